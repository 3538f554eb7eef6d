"""Extents that change from call to call: left open after two misses, and never to a wrong result."""

from __future__ import annotations

import math
from itertools import groupby, product

import pytest
import torch
import torch.nn.functional as functional
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan

from ladder.capture import capture
from ladder.capture.records import OPEN_CALLS_PER_LOOK
from ladder.capture.values.shapes import Shapes

SEQUENCE = ((2, 3), (3, 5), (4, 7), (5, 9), (9, 5), (6, 6), (2, 11))
"""(batch, tokens) of successive calls."""


def attention_with_cache(x, weight, cache):
    b, t, _ = x.shape
    q = functional.linear(x, weight).view((*x.shape[:-1], -1, 4)).transpose(1, 2)
    full = torch.cat([cache, q], 2)
    positions = torch.arange(full.size(2) - t, full.shape[-2])
    scores = (q @ full.transpose(-1, -2)) / math.sqrt(q.size(-1)) + positions[-1]
    mixed = functional.softmax(scores, -1) @ full
    return mixed.transpose(1, 2).reshape(b, t, -1), full


def branch_on_extent(x, *_):
    return x * 2 if x.shape[1] > 6 else x + x.size(0)


def returns_shape(x, *_):
    return x.relu(), x.shape, x.shape[:-1], (x.size(0), x.numel()), len(x)


def builds_from_extents(x, *_):
    b, t = x.shape[0], x.size(dim=1)
    mask = torch.tril(torch.ones(t, t, dtype=torch.bool))
    grid = torch.zeros(b, t + 1, device=x.device)
    grid[:, 1:] = x.sum(-1)
    return mask, grid, torch.full((b, 2 * t), 1.5), x.new_empty(b * t, 0).shape


def slices_by_extent(x, *_):
    t = x.shape[1]
    return x[:, : t // 2], x[:, -1], x[:, 1:t].contiguous(), x.narrow(1, t - 2, 2)


def indexes_by_extent(x, *_):
    return x[:, x.shape[1] - 1]


def writes_slices(x, *_):
    y = torch.zeros(x.shape[0] + 1, *x.shape[1:])
    y[1:] = x
    y[0, : x.shape[1]].add_(1)
    return y


def expands(x, *_):
    b, t, c = x.size()
    bias = torch.arange(t, dtype=x.dtype)[None, :, None].expand(b, -1, c)
    return (x + bias).flatten(0, 1), x.repeat(1, 2, 1).view(b, 2, t, c), x.reshape(-1, c)


def spreads_sizes(x, *_):
    return x.flatten(0, 1).relu().view(*x.shape), x.new_zeros(*x.size()[:2]), max(*x.shape[:2], 1)


def joins_shapes(x, *_):
    middle, first = (3,), (4,)
    return x.new_zeros(x.shape[:1] + middle + x.shape[2:]), torch.ones(first + x.shape[1:])


def iterates(x, *_):
    return [row.sum() for row in x], sum(x.shape), [n + 1 for n in x.shape]


def unbinds(x, *_):
    first, *rest = x.unbind(1)
    return first, len(rest)


def formats_extent(x, *_):
    return f"{x.shape[1]} tokens, {tuple(x.shape)}", str(x.shape)


def keeps_extents(x, *_):
    kept = {"t": x.shape[1], "shape": x.shape, "list": [x.shape[0], *x.shape[1:]]}
    return kept, isinstance(x.shape, torch.Size), type(x.shape)


def convolves(x, *_):
    y = functional.conv1d(x.transpose(1, 2), torch.ones(4, 8, 2), padding=1)
    return functional.max_pool1d(y, 2), functional.interpolate(y, size=y.shape[-1] * 2)


def normalises(x, *_):
    y = functional.layer_norm(x, x.shape[-1:])
    return y.var(1), y.mean((0, 1)), y.argmax(1), y.sort(1).values, y.cumsum(1)


def strides(x, *_):
    return x.stride(), x.transpose(0, 1).is_contiguous(), x.transpose(0, 1).contiguous()


def compares_extents(x, *_):
    if x.shape[0] == x.shape[1]:
        return x @ x.transpose(1, 2)
    return x.transpose(0, 1) if x.shape[0] < x.shape[1] else x


def raises_for_some(x, *_):
    if x.shape[1] == 9:
        raise ValueError(f"{x.shape[1]} tokens")
    return x.softmax(1)


OPEN = (
    attention_with_cache, branch_on_extent, returns_shape, builds_from_extents, slices_by_extent,
    writes_slices, expands, joins_shapes, spreads_sizes, normalises, compares_extents, raises_for_some,
)  # fmt: skip
FIXED = (iterates, unbinds, formats_extent, keeps_extents, strides, indexes_by_extent, convolves)
"""Programs whose extents are fixed by what reads them, or by torch: right, but recorded anew."""


def inputs(b, t, past=2):
    generator = torch.Generator().manual_seed(b * 100 + t)
    shapes = (b, t, 8), (16, 8), (b, 4, past, 4)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def outcome(function, args):
    try:
        return function(*args)
    except (ValueError, RuntimeError, IndexError) as error:
        return repr(error)


def same(expected, found):
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        steps = zip(expected.shape, expected.stride(), found.stride(), strict=True)
        return all(mine == other for extent, mine, other in steps if extent > 1)
    if isinstance(expected, dict):
        return expected.keys() == found.keys() and all(same(expected[key], found[key]) for key in expected)
    if isinstance(expected, list | tuple):
        kinds = type(expected) is type(found) and len(expected) == len(found)
        return kinds and all(map(same, expected, found))
    return type(expected) is type(found) and expected == found


@pytest.mark.parametrize("program", OPEN + FIXED, ids=lambda program: program.__name__)
def test_same_as_without_capture(program):
    captured = capture(program)
    for b, t in (*SEQUENCE, (1, 4), (3, 1), (0, 4), (4, 7)):
        args = inputs(b, t, past=t % 4 + 2)
        assert same(outcome(program, args), outcome(captured, args)), (b, t)
    if program in OPEN:
        before = captured.calls["recorded"]
        for b, t in product((12, 7), (13, 15)):
            args = inputs(b, t, past=b)
            assert same(outcome(program, args), outcome(captured, args)), (b, t)
        assert captured.calls == {"recorded": before, "eager": 0}


def test_operands_that_must_agree_are_checked():
    captured = capture(lambda x, y: x + y)
    for n in (3, 4, 5, 6):
        captured(torch.ones(n, 2), torch.ones(n, 2))
    assert captured.calls["recorded"] == 2
    assert captured(torch.ones(7, 2), torch.ones(1, 2)).shape == (7, 2)  # broadcasts: another record
    assert captured.calls["recorded"] == 3
    with pytest.raises(RuntimeError, match="must match"):
        captured(torch.ones(7, 2), torch.ones(8, 2))


def test_other_strides_are_another_record():
    captured = capture(lambda x: x.view(-1))
    for n in (3, 4, 5, 6):
        captured(torch.ones(n, 2))
    with pytest.raises(RuntimeError, match="view size"):
        captured(torch.ones(2, 6).T)
    assert captured(torch.ones(9, 2)).shape == (18,)


@pytest.mark.parametrize("fast", [False, True])
def test_a_model_with_open_batch_and_tokens_is_one_graph(fast, monkeypatch):
    """Up to torch 2.12 the operator of the fast path has no fake: it is recorded for each call's sizes."""
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", fast)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    captured = capture(layer)
    with torch.no_grad():
        for b, t in SEQUENCE:
            x = torch.randn(b, t, 8)
            torch.testing.assert_close(captured(x), layer(x), rtol=0, atol=0)
    assert captured.calls["recorded"] <= (len(SEQUENCE) if fast and torch.__version__ < "2.13" else 4)


def test_random_generators_advance_as_without_capture():
    def program(x):
        return functional.dropout(x, 0.5) + torch.rand(x.shape[0], 1)

    captured = capture(program)
    for n in (3, 4, 5, 6, 7):
        x = torch.ones(n, 4)
        torch.manual_seed(n)
        expected = program(x), torch.rand(1)
        torch.manual_seed(n)
        assert same(expected, (captured(x), torch.rand(1)))


def test_backends_say_whether_shapes_may_change():
    shapes = []

    def fixed(module, examples):
        shapes.append([tuple(item.shape) for item in examples])
        return module.forward

    captured = capture(torch.relu, backend=fixed)
    for n in (3, 4, 5, 6, 7):
        captured(torch.ones(n))
    assert shapes == [[(3,)], [(4,)], [(5,)], [(6,)], [(7,)]]


def test_gradients_flow_through_open_shapes():
    weight = torch.randn(8, 8, requires_grad=True)
    captured = capture(lambda x: (x @ weight).view(-1, x.shape[1] * 8).sum())
    for b, t in SEQUENCE:
        x = torch.randn(b, t, 8)
        (grad,) = torch.autograd.grad(captured(x), weight)
        expected = x.sum((0, 1))[:, None].expand(8, 8)
        torch.testing.assert_close(grad, expected)


def test_explain_names_what_is_left_open():
    captured = capture(lambda x: x.relu())
    for n in (3, 4, 5, 6):
        captured(torch.ones(n, 2))
    assert "left open: args[0].shape[0]" in captured.explain()
    assert "args[0] is contiguous" in captured.explain(guards=True)


def _added(left, right):
    return left + right


@pytest.mark.parametrize(
    "program",
    [
        lambda x: sum(x[:, at] for at in range(x.shape[1])),
        lambda x: associative_scan(_added, x, 1, combine_mode="generic") * x.shape[0],
    ],
    ids=["loop", "scan"],
)
def test_extents_that_must_be_numbers_are_left_open_once(program):
    fast = capture(program)
    for tokens in (4, 7, 9, 12):
        x = torch.randn(3, tokens)
        torch.testing.assert_close(fast(x), program(x))
    (entry,) = fast.entries.values()
    assert "args[0].shape[1]" in entry.lifted & entry.unliftable([x])
    assert not any("args[0].shape[1]" in check.why for check in entry.records[0].checks)


class Offset(nn.Module):
    """Takes a number, as embeddings of positions do."""

    def forward(self, x, start):
        return x + torch.arange(start, start + x.shape[1]), lambda: start


def test_numbers_given_to_modules_stay_open():
    """``Module._call_impl`` keeps its arguments in a cell, and here ``forward`` does too."""
    module = Offset()

    def program(x, cache):
        y, ask = module(x, cache.shape[1] * 2)
        return y, ask

    fast = capture(program)
    for length in (3, 5, 6, 9, 4):
        x, cache = torch.randn(2, 3), torch.randn(2, length)
        (found, ask), (expected, _) = fast(x, cache), program(x, cache)
        assert torch.equal(found, expected)
        assert ask() == 2 * length
    assert (fast.outcome, len(fast.records)) == ("whole", 2)


def test_shapes_are_compared_with_tuples_that_may_be_others():
    """A tuple from outside is guarded where a shape of open sizes is compared with it."""
    fast = capture(program := lambda x, shape: x + 1 if x.shape == shape else x - 1)
    for shape in ((6, 5), (7, 5), (9, 5), (7, 4), (6, 5)):
        for n in (4, 6, 7, 9):
            x = torch.ones(n, 5)
            assert torch.equal(fast(x, shape), program(x, shape))


def test_shapes_are_compared_by_what_they_are_of_sizes():
    """Two shapes that are one expression of the sizes are equal without a look at these."""

    def program(x, y):
        state = torch.zeros(2, x.shape[1], 3)
        if state.size() != (2, x.shape[1], 3) or x.shape[:1] == (2, x.shape[1]):
            return x
        return x + 1 if x.shape == y.shape else x - 1

    fast = capture(program)
    for sizes in (((4, 5), (4, 5)), ((6, 5), (6, 5)), ((7, 8), (7, 8)), ((9, 3), (9, 3)), ((9, 3), (1, 3))):
        x, y = (torch.randn(shape) for shape in sizes)
        assert torch.equal(fast(x, y), program(x, y))
    assert fast.outcome == "whole"
    assert len(fast.records) <= 5


def test_shapes_that_are_compared_stay_open():
    """Whether open sizes are equal is guarded, not what they are."""

    def program(x, y):
        return x - y.sum() if x.size() != (2, y.shape[1] + 1) else x + y.sum()

    fast = capture(program)
    for wide, narrow in ((5, 4), (6, 5), (8, 7), (9, 8), (12, 11), (5, 6), (6, 8), (8, 6), (9, 9), (7, 6)):
        x, y = torch.randn(2, wide), torch.randn(3, narrow)
        assert torch.equal(fast(x, y), program(x, y))
    assert (fast.outcome, len(fast.records)) == ("whole", 3)


def test_open_sizes_in_messages_stay_open():
    def program(x):
        torch._assert(x.dim() == 2, f"expected rows, got {x.shape}")
        return x * 2, f"{x.shape} {x.shape[:1]!r}"

    fast = capture(program)
    for rows in (3, 5, 6, 9):
        x = torch.randn(rows, 4)
        (found, text), (expected, wanted) = fast(x), program(x)
        assert torch.equal(found, expected)
        assert text == wanted
    assert (fast.outcome, len(fast.records)) == ("whole", 2)


@pytest.mark.parametrize("kind", [bool, int, float, complex])
def test_types_of_python_are_types_of_tensors(kind):
    def program(x):
        return x[torch.tensor([-1], dtype=int)].to(kind), torch.zeros(2, dtype=kind)

    fast = capture(program)
    for _ in range(2):
        x = torch.randn(3, 4)
        found, expected = fast(x), program(x)
        assert all(map(torch.equal, found, expected))
        assert [y.dtype for y in found] == [y.dtype for y in expected]
    assert fast.outcome == "whole"


def test_the_greater_of_extents_stays_open():
    def program(x, cache):
        start = max(cache.shape[0] - 2, 0)
        return x + start, cache[min(start, 100) :] * 2

    fast = capture(program)
    for length in (4, 5, 6, 9, 12):
        x, cache = torch.randn(3), torch.randn(length)
        assert all(map(torch.equal, fast(x, cache), program(x, cache)))
    assert (fast.outcome, len(fast.records)) == ("whole", 2)


def test_extents_in_long_expressions_are_fixed():
    """Windows of padded pictures, again and again: torch's reasoning takes longer with each expression."""

    def program(x, scale):
        for side in (3, 4, 5, 7):
            high, wide = ((side - extent % side) % side for extent in x.shape)
            x = torch.nn.functional.pad(x, (0, wide, 0, high))
            rows, columns = x.shape[0] // side, x.shape[1] // side
            x = x.view(rows, side, columns, side).transpose(1, 2).reshape(rows * side, columns * side)
        return x * scale.sum()

    fast = capture(program)
    for high, wide, count in ((20, 24, 2), (21, 26, 3), (21, 26, 5), (23, 30, 4), (20, 24, 9)):
        x, scale = torch.arange(float(high * wide)).view(high, wide), torch.ones(count)
        assert torch.equal(fast(x, scale), program(x, scale))
    fixed = set().union(*(point.unliftable([x, scale]) for point in fast.all_points()))
    assert {"args[0].shape[0]", "args[0].shape[1]"} <= fixed
    assert fast.calls["recorded"] <= 4  # how many are summed stays open


@pytest.mark.parametrize("detached", [False, True])
def test_symbols_are_extents_alone(detached):
    part = torch.randn(8, 3)[2:7]
    shapes = Shapes()
    shapes.lift("x", part.detach() if detached else part, {0: "rows"})
    fake = shapes.fakes["x"]
    assert {str(item) for item in (*fake.stride(), fake.storage_offset())} == {"3", "1", "0"}
    assert fake.shape[0].node.expr in shapes.names


def test_the_record_for_the_sizes_of_calls_is_tried_first():
    def program(x):
        return (x * 2).sum(-1).relu()

    fast = capture(program)
    tried = []
    for size in (
        6,
        7,
        8,
        *[6] * (OPEN_CALLS_PER_LOOK + 1),
        *[9] * (OPEN_CALLS_PER_LOOK + 1),
        *[6] * (OPEN_CALLS_PER_LOOK + 1),
        0,
        1,
    ):
        x = torch.randn(size, 3)
        assert torch.equal(fast(x), program(x))
        tried.append(fast.records[0].is_open)
    assert len(fast.records) == 4  # for 6, for all, and for the sizes that mean something of their own
    first = [key for key, _ in groupby(tried)]
    assert first[:5] == [False, True, False, True, False]


def test_tensors_that_hold_gradients_are_left_open():
    captured = capture(lambda x: x.view(2 * x.shape[0], -1) * 2)
    for rows in (3, 5, 7, 9):
        x = torch.randn(rows, 4, requires_grad=True)
        x.grad = torch.ones(rows, 4)
        assert torch.equal(captured(x), x.view(2 * rows, -1) * 2)
    assert captured.calls == {"recorded": 2, "eager": 0}


def test_shapes_whose_extents_are_known_are_those_of_torch():
    def program(x):
        rows = [*x]
        return rows[0] * 2, x.shape, x.size()

    fast = capture(program)
    for rows in (3, 4, 5, 4):
        _, *shapes = fast(torch.ones(rows, 2))
        assert shapes == [(rows, 2)] * 2
        assert {type(shape) for shape in shapes} == {torch.Size}


def test_strides_of_tensors_without_elements_are_no_symbols():
    def program(x):
        x.fill_diagonal_(1)
        return x.diagonal() + 1, x * 2

    fast = capture(program)
    for rows, columns, step in ((0, 8, 1), (0, 6, 2), (0, 10, 2), (0, 8, 4), (2, 6, 2), (4, 8, 1)):
        x, y = (torch.zeros(rows, columns)[:, ::step] for _ in range(2))
        for found, wanted in zip(fast(x), program(y), strict=True):
            assert found.shape == wanted.shape
            assert torch.equal(found, wanted)


def test_common_types_of_tensors_and_numbers_stay_open():
    def common(x, number):
        return x + 1, torch.result_type(x, number), torch.result_type(x, other=number)

    fast = capture(common)
    for extent, number in ((4, 2), (4, 2.5), (5, True), (6, 3), (7, 0.5), (8, 4), (9, 5), (3, False)):
        x = torch.arange(extent)
        found, expected = fast(x, number), common(x, number)
        assert torch.equal(found[0], expected[0])
        assert found[1:] == expected[1:]
    assert not any(record.split for record in fast.records)
    assert len(fast.records) <= 6
