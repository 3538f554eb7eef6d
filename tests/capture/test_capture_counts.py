"""Extents that values decide: numbers of the graph, assumed only where the program needs to know them."""

from __future__ import annotations

import itertools

import pytest
import torch

import ladder
from ladder.capture import capture
from ladder.capture.trace.assumptions import MOST_COUNTS


def best_few(x, mask):
    """As heads of detectors do: the best few of those above a threshold."""
    found = []
    for scores in x.T:
        kept = scores[mask]
        best, order = kept.topk(min(3, kept.size(0)))
        found.append({"scores": best, "order": order, "mean": best.sum() / max(len(best), 1)})
    return found


def sizes(x, mask):
    y = x[mask]
    return y.reshape(y.shape[0], -1) * 2, torch.zeros(y.shape[0] * 2), y.numel() + 1, len(y), y.shape


def made(x, mask):
    y = x[mask]
    z = torch.zeros((y.size(0), 3), dtype=y.dtype)
    z[:, 0] = 1
    return torch.cat([z, y[:, :3]], 1), y.new_full((len(y),), 4.0), torch.arange(len(y))[:2]


def kept_in_containers(x, mask):
    parts = [x[mask], x[~mask], torch.nonzero(mask)]
    counts = [len(part) for part in parts]
    named = {"first": counts[0], "sum": sum(counts[:2])}
    return [part * 2 for part in torch.cat(parts[:2]).split(counts[:2])], counts, named, max(counts)


def divided(x, mask):
    y = x[mask]
    return y.shape[0] // 2, y.shape[0] / 3, y.sum() * 0 + y.shape[0] % 3, -y.shape[0]


def changed_in_place(x, mask):
    y = x[mask]
    y.mul_(2)
    y += 1
    return y.to(torch.float32).contiguous(), y


def activated_in_place(x, mask):
    y = torch.nn.functional.relu(x[mask], inplace=True)
    z = torch.nn.functional.leaky_relu(y - 1, 0.1, True)
    return y, torch.nn.Hardtanh(inplace=True)(z), z


def given_back(x, mask):
    y = x[mask]
    same = y.flatten(start_dim=1), torch.atleast_1d(y), y.resolve_conj(), y.conj(), torch.real(y)
    return [item is y for item in same], y.flatten() is y, y.flatten(start_dim=1) * 2


def by_level(x, mask):
    out = torch.zeros(4, 3)
    for level in range(3):
        rows = torch.where(mask == (level % 2 == 0))[0]
        out[rows % 4] = x[rows, :3] + level
    return out


def taken_apart(x, mask):
    boxes = x[mask]
    left, top, right, bottom = boxes.unbind(1)
    return torch.stack([left * 2, top, right, bottom], 1), [part + 1 for part in boxes.chunk(2, dim=1)]


def written_to_an_operand(x, mask):
    y = x[mask]
    sums = y.new_empty(len(y) + 1, 4)
    sums[:1].zero_()
    given = torch.cumsum(y, dim=0, out=sums.narrow(0, 1, len(y)))
    return sums, given.mul_(2), given is torch.add(y, 1, out=given), torch.mul(y, 3, out=torch.empty(0))


def squeezed_at_axes(x, mask):
    y = x[mask][:, None, :1]
    one = y.squeeze(-1)
    other, both = y.squeeze(dim=1), y.squeeze((1, -1))
    return one, one.dim(), other.ndim, both.dim(), both * 2, x[mask].squeeze(-1).dim()


def repeated(x, mask):
    return torch.repeat_interleave(x, mask.long() + 1, dim=0).shape, torch.unique(mask.long()).shape[0]


WHOLE = [
    best_few,
    sizes,
    made,
    kept_in_containers,
    divided,
    changed_in_place,
    activated_in_place,
    given_back,
    written_to_an_operand,
    squeezed_at_axes,
    by_level,
    repeated,
    taken_apart,
]


def given(number, share=0.5, rows=9):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, 4, generator=generator), torch.rand(rows, generator=generator) > share


def alike(found, expected):
    if isinstance(expected, torch.Tensor):
        return type(found) is type(expected) and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(alike(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        pairs = zip(found, expected, strict=True)
        return type(found) is type(expected) and all(alike(*pair) for pair in pairs)
    return type(found) is type(expected) and found == expected


@pytest.mark.parametrize("program", WHOLE, ids=lambda program: program.__name__)
def test_sizes_that_values_decide_are_numbers_of_one_graph(program):
    captured = capture(program)
    for number, rows in itertools.product(range(4), (9, 7)):
        arguments = given(number, rows=rows)
        assert alike(captured(*arguments), program(*arguments))
    assert captured.outcome == "whole"
    assert len(captured.records) == 2  # for sizes that are known, and for open ones
    assert not captured.calls["eager"]


def test_they_are_so_in_plans():
    fast = ladder.compile(kept_in_containers)
    for number in range(3):
        assert alike(fast(*given(number)), kept_in_containers(*given(number)))
    assert fast.outcome == "whole"
    assert not any("no tensor" in reason for reason in fast.refused)


def asserted(x, lengths):
    assert lengths.max().item() <= x.shape[1]
    return torch.relu(x) + lengths.float().mean()


def refused(x, lengths):
    if int(lengths.max()) > 100:
        raise ValueError("too long")
    return x * 2


def scaled(x, lengths):
    most = x.abs().max().item()
    return x / max(most, 1e-5), most, float(lengths.sum()) / 2


def sized_by_number(x, lengths):
    longest = lengths.max().item()
    return x[:, :longest] * 2, torch.zeros(longest, 2), {"longest": longest, "next": longest + 1}


def read_before_a_change(x, lengths):
    total = lengths.sum().item()
    lengths.add_(1)
    return x * total, lengths * 2


NUMBERS = (asserted, refused, scaled, sized_by_number, read_before_a_change)


@pytest.mark.parametrize("way", [capture, ladder.compile])
@pytest.mark.parametrize("program", NUMBERS, ids=lambda program: program.__name__)
def test_numbers_that_change_are_numbers_of_one_graph(program, way):
    captured = way(program)
    for number in range(8):
        torch.manual_seed(number)
        x, lengths = torch.randn(3, 9), torch.randint(1, 9, (3,))
        mine, its = lengths.clone(), lengths.clone()
        found, expected = captured(x, mine), program(x, its)
        assert (alike if way is capture else close)(found, expected)
        assert torch.equal(mine, its)
    assert captured.outcome == "whole"
    assert captured.calls["recorded"] <= 6  # the first values of each number are assumed
    assert not captured.calls["eager"]
    if program is refused:
        with pytest.raises(ValueError, match="too long"):
            captured(x, lengths + 200)


def close(found, expected):
    if isinstance(expected, torch.Tensor):
        return found.shape == expected.shape and torch.allclose(found, expected)
    if isinstance(expected, tuple):
        return all(close(*pair) for pair in zip(found, expected, strict=True))
    return type(found) is type(expected) and found == expected


def looped(x, lengths):
    for _ in range(lengths.max().item()):
        x = x * 1.5
    return x


def test_numbers_that_decide_how_the_program_goes_on_break_the_graph():
    captured = capture(looped)
    for number in range(4 * MOST_COUNTS):
        x, lengths = torch.ones(3), torch.tensor([1 + number % 7])
        assert torch.equal(captured(x, lengths), looped(x, lengths))
    assert captured.outcome == "split"


def none_or_some(x, mask):
    y = x[mask]
    if y.numel() == 0:
        return x * 0
    return y + 1


def test_what_seldom_happens_leaves_one_graph():
    captured = capture(none_or_some)
    for number in range(12):
        arguments = given(number, share=2.0 if number % 5 == 3 else 0.5)
        assert alike(captured(*arguments), none_or_some(*arguments))
    assert captured.outcome == "whole"
    assert captured.calls["recorded"] == 2


def test_what_often_happens_breaks_the_graph():
    captured = capture(none_or_some)
    for number in range(4 * MOST_COUNTS):
        arguments = given(number, share=2.0 if number % 2 else 0.5)
        assert alike(captured(*arguments), none_or_some(*arguments))
    assert captured.outcome == "split"
    assert captured.calls["recorded"] <= 6


def row_by_row(x, mask, log):
    log.add_(1)
    y = x[mask]
    return [y[at] * at for at in range(y.shape[0])]


@pytest.mark.parametrize("way", [capture, ladder.compile])
def test_a_graph_that_raises_since_a_number_is_another_is_undone(way):
    captured, log = way(row_by_row), torch.zeros(1)
    for share in (0.2, 0.2, 0.8, 2.0, 0.5, 0.2):
        x, mask = given(1, share)
        assert alike(captured(x, mask, log), [row * at for at, row in enumerate(x[mask])])
    assert log == 6


def squeezed(x, mask):
    y = x[mask].squeeze()
    return y.dim(), y.shape


def squeezed_at_rows(x, mask):
    y = x[mask].squeeze(0)
    return y.dim(), y.sum(-1), x[mask].squeeze((0, 1)).ndim


def flattened(x, mask):
    y = x[mask].squeeze()
    return y.flatten() is y, y.flatten(), torch.flatten(input=y) is y


def laid_out(x, mask):
    y = x[mask].t()
    return y.contiguous() is y, y.contiguous()


def laid_out_as_asked(x, mask):
    y = x[mask].reshape(-1, 5, 1, 1)
    same = y.to(memory_format=torch.channels_last), y.contiguous(memory_format=torch.channels_last)
    return [item is y for item in same]


def summed_to(x, mask):
    y = x[mask]
    return y.sum_to_size(1, 5) is y if len(y) else None


@pytest.mark.parametrize(
    "program", [squeezed, squeezed_at_rows, flattened, laid_out, laid_out_as_asked, summed_to]
)
def test_axes_that_values_decide(program):
    captured = capture(program)
    for count in (3, 1, 2, 1, 0, 3):
        arguments = torch.randn(4, 5), torch.arange(4) < count
        assert alike(captured(*arguments), program(*arguments))


@pytest.fixture(scope="module")
def library():
    made = torch.library.Library("ladder_test_counts", "DEF")
    made.define("above(Tensor x, float limit) -> Tensor")
    made.define("told(Tensor x, float limit) -> Tensor")
    made.define("twice(Tensor x) -> Tensor")
    for name in ("above", "told"):
        made.impl(name, lambda x, limit: x[x > limit], "CPU")
    made.impl("twice", lambda x: x * 2, "CPU")
    torch.library.register_fake("ladder_test_counts::twice", torch.empty_like, lib=made)

    def fake(x, limit):
        return x.new_empty(torch.library.get_ctx().new_dynamic_size())

    torch.library.register_fake("ladder_test_counts::told", fake, lib=made)
    yield torch.ops.ladder_test_counts
    made._destroy()


@pytest.mark.parametrize(("name", "outcome"), [("above", "split"), ("told", "whole")])
def test_operators_of_libraries_have_no_tag_for_it(library, name, outcome):
    def program(x):
        y = getattr(library, name)(x, 0.0)
        return library.twice(y), y.shape[0], torch.ones(len(y))

    program(given(0)[0].reshape(-1))  # operators are looked up once
    captured = capture(program)
    for number in range(5):
        x = given(number)[0].reshape(-1)
        assert alike(captured(x), program(x))
    assert captured.outcome == outcome


def blocks(x, first):
    """As masks of images side by side: bounds are elements of a tensor of numbers, or of an argument."""
    ends = torch.tensor([2, 3]).cumsum(-1)
    y = x.clone()
    y[:, ends[0] : ends[1]] = 0
    ends[0] += 1
    return y, x[: first[0]] * 2, x[ends[0] :: ends[1]]


@pytest.mark.parametrize("way", [capture, ladder.compile])
def test_bounds_of_slices_made_of_numbers_are_integers_of_the_graph(way):
    fast = way(blocks)
    for number in (1, 2, 3, 2):
        arguments = torch.randn(6, 7), torch.tensor([number])
        assert close(fast(*arguments), blocks(*arguments))
    assert fast.outcome == "whole"
    (record, *_) = fast.records
    if way is capture:
        written = next(node for node in record.graph.graph.nodes if "setitem" in str(node.target))
        assert written.args[1][1] == slice(2, 5, None)


@pytest.mark.parametrize("way", [capture, ladder.compile])
def test_strides_of_counted_tensors_stay_open(way):
    def program(x):
        columns = (torch.nonzero(x > 0).float() + 0.5).t() * 2
        steps = columns.stride()
        return columns.as_strided((2, 2), (steps[0], columns.stride(1))), steps, columns[:, :2].stride()

    captured = way(program)
    for rows in (5, 6, 9, 12, 7, 5):
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
        with torch.no_grad():
            assert close(captured(x), program(x))
    assert captured.outcome == "whole"
    assert len(captured.records) <= 2
