"""What natives make of plain data is followed: arrays, matches, signatures, shapes, tensors."""

import collections
import functools
import inspect
import re
import types

import numpy as np
import pytest
import torch
from torch._higher_order_ops.while_loop import while_loop

from ladder.capture import capture

FOLLOWED, RIGHT = [], []
PATTERN = re.compile(r"layer\.(\d+)")
NAMES = types.MappingProxyType({"scale": 3})


def followed(function):
    FOLLOWED.append(function)
    return function


def right(function):
    RIGHT.append(function)
    return function


def target(a, b=2, *rest, d=4, **named):
    return a + b


SIGNATURE = inspect.signature(target)


@followed
def list_of_tensors_made_of_numbers(x):
    """Operators of ATen give lists, as `tolist` does of numbers."""
    first, rest = torch.ops.aten.split_with_sizes.default(torch.arange(4.0), [1, 3])
    return x + first + rest.sum() + len(torch.zeros(2, 0).tolist())


@followed
def bound_here(x):
    bound = inspect.signature(target).bind(x, d=3)
    bound.apply_defaults()
    return bound.arguments["a"] * bound.arguments["b"], bound.kwargs


@followed
def bound_by_global(x):
    bound = SIGNATURE.bind(1, 5, 6, k=3)
    return x * len(bound.args) + len(bound.kwargs)


@followed
def defaults_of_signature(x):
    return x * sum(p.default is not p.empty for p in SIGNATURE.parameters.values())


@followed
def tensors_of_ranges(x):
    return torch.tensor(range(1, 4)) + x.sum(), x[range(2)], x.new_tensor(range(len(x)))


@followed
def read_only_mapping(x):
    own = types.MappingProxyType({"a": x, "b": 2})
    total = own["a"] * len(own) + NAMES.get("scale", 0) + NAMES["scale"]
    return total * own["b"], sorted(own), "scale" in NAMES, [*NAMES.items()]


@followed
def kept_pattern(x):
    found = PATTERN.search("layer.12")
    named = re.search(r"(?P<n>\d+)", "q31")
    return x * int(found.group(1)) + int(named["n"]) + len(named.groupdict()) + named.start()


@followed
def pattern_without_match(x):
    return x * 2 if PATTERN.match("none") is None else x


@followed
def compared_arrays(x):
    steps = np.array([1, 2, 3])
    same = bool((steps == np.arange(1, 4)).all())
    return x * int((steps > 1).sum()) + same + len(steps) + steps.shape[0] + steps.ndim


@followed
def window_of_image(x):
    size = np.array([8, 4])
    blocks = np.where(size % 4 == 0, size, 1)
    return x * int(blocks[0]) + float(np.ceil(size / 3).max()) if not np.mod(size, 4).any() else x


@followed
def arrays_one_by_one(x):
    rows = np.array([[1.0, 2.0], [3.0, 4.0]])
    total = sum(float(row.sum()) for row in rows)
    return x * total + float(rows[rows > 2].sum()) + float((-rows).T[0, 1]) + len(np.unique([1, 1, 2]))


@followed
def array_kept(x):
    return x * 2, np.stack([np.arange(3), np.ones(3, dtype=np.int64)])[1:]


@followed
def tensor_by_type(x):
    empty = torch.FloatTensor(2, 3).fill_(2.0)
    made = torch.LongTensor([[1, 2], [3, 4]]) + torch.Tensor([1, 2]) + torch.Tensor().sum()
    return x.sum() + made + empty.sum()


@followed
def tensor_of_open_size(x):
    return torch.FloatTensor(x.shape[0]).fill_(3) + x.new(x.shape).fill_(1) + x.new([1.0])


@followed
def cast_by_type(x):
    return x.type(torch.DoubleTensor) + x.type("torch.LongTensor") + (x.type() == "torch.FloatTensor")


@followed
def count_of_shape(x):
    return x * x.shape.numel() + x.size()[:1].numel() + torch.Size([2, 3]).numel()


@followed
def rows_of_open_tensor(x):
    return torch.stack(list(x.unsqueeze(1))).sum() + len(x)


@followed
def constants_of_types(x):
    return x * int.from_bytes(b"\x01\x02", "big") + len(range(*slice(0, 10, 3).indices(7)))


@followed
def checked_distribution(x):
    known = torch.distributions.Normal(0, 1).icdf(torch.tensor(0.25))
    return x * known + torch.distributions.Uniform(0.0, 2.0).log_prob(torch.tensor(0.5))


@followed
def class_of_tuples(x):
    Pair = collections.namedtuple("Pair", "first second", defaults=(3,))
    pair = Pair(x)._replace(first=x + 1)
    return pair.first * pair.second, pair._asdict(), Pair(x, 1)


class Described:
    def __get__(self, owner, kind=None):
        return 3 if owner is None else owner.size


class Sized:
    size = 4
    described = Described()


@followed
def descriptor_of_class(x):
    return x * Sized.described + Sized().described


def bigger(self):
    return self.size + 1


class Bound(Sized):
    @property
    def twice(self):
        return 2 * self.size


@followed
def descriptors_bound_by_hand(x):
    one = Bound()
    one.first, one.second = bigger.__get__(one), bigger.__get__(one, Bound)
    unbound = bigger.__get__(None, Bound) is bigger, Bound.twice.__get__(None, Bound) is Bound.twice
    return x * one.first() + one.second() * Bound.twice.__get__(one), unbound


@followed
def tensors_as_they_are_where_values_decide_extents(x):
    places = torch.nonzero(x > 0)
    kept, cast = torch.as_tensor(places, device=x.device), torch.asarray(places, dtype=x.dtype)
    return kept is places, cast is places, kept + 1, cast * 2


@right
def array_changed(x):
    steps = np.zeros(4)
    view = steps[1:]
    steps[1] = 3
    steps += 1
    np.add(view, 1, out=view)
    np.fill_diagonal(whole := np.ones((2, 2)), 5)
    return x * float(steps.sum()), steps, view, whole


@right
def array_printed(x):
    with np.printoptions(precision=2):
        short = str(np.array([1.23456]))
    return x, short, str(np.array([1.23456]))


@right
def missing_key(x):
    names = {"a": 1}
    try:
        names.pop("b")
    except KeyError:
        names["b"] = 2
    return x * names.pop("b") + len(names)


@right
def mapping_changed(x):
    names = {"a": 1}
    shown = types.MappingProxyType(names)
    before = shown["a"]
    names["a"] = 5
    return x * shown["a"] + before, shown.get("z")


def described(value):
    return repr(value).replace("-0.", "0.")


@pytest.mark.parametrize("function", [*FOLLOWED, *RIGHT], ids=lambda function: function.__name__)
def test_same_as_without_capture(function):
    captured = capture(function)
    for number in (2, 2, 2, 3, 4, 2) if "open" in function.__name__ else (2, 2, 2, 2):
        x = torch.arange(number) + 0.5
        assert described(captured(x)) == described(function(x))
    if function in FOLLOWED:
        assert captured.outcome == "whole", captured.explain()


def test_each_call_has_its_own_class_of_tuples():
    captured = capture(lambda x: collections.namedtuple("Pair", "first second")(x, 1))
    kinds = {type(captured(torch.ones(2))) for _ in range(3)}
    assert len(kinds) == 3
    assert {kind.__module__ for kind in kinds} == {__name__}


def test_mapping_behind_a_view_is_guarded():
    names = {"scale": 2}
    shown = types.MappingProxyType(names)

    def scaled(x, given):
        return x * given["scale"] + len(given)

    captured, x = capture(scaled), torch.ones(2)
    for scale in (2, 2, 3, 3):
        names["scale"] = scale
        assert captured(x, shown).equal(scaled(x, shown))
        names[f"more {scale}"] = 0
        assert captured(x, shown).equal(scaled(x, shown))


def test_arrays_from_outside_are_read_anew():
    steps = np.array([1, 2])

    def scaled(x):
        return x * int((steps > 1).sum())

    captured, x = capture(scaled), torch.ones(2)
    for item in (1, 1, 5, 5):
        steps[0] = item
        assert captured(x).equal(scaled(x))


@torch.jit.script
def _corrected(scores: torch.Tensor, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if q.size(-2) != rows.size(-2):
        return scores + 1
    return scores


@torch.jit.script
def _by_values(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 0):
        return x * 2
    return x.tanh()


@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_scripted_functions_are_parts_of_graphs() -> None:
    """One that branches by sizes may give its operand; one that reads values or was traced runs as it is."""
    traced = torch.jit.trace(lambda x: x.relu() + (x.shape[0] == 2), torch.randn(2, 3))

    def program(q: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = _corrected(q @ rows.mT, q, rows)
        scores += 1  # of the product itself, where sizes agree
        return scores, traced(_by_values(q))

    fast = capture(program)
    for rows, columns in ((2, 2), (2, 4), (5, 2), (6, 6), (7, 7)):
        for sign in (1, -1):
            q, other = sign * torch.ones(rows, 3), torch.randn(columns, 3)
            for expected, found in zip(program(q, other), fast(q, other), strict=True):
                assert torch.equal(expected, found)
    assert (fast.outcome, [record.split for record in fast.records if record.split]) == ("whole", [])


@pytest.mark.parametrize("recorded", [True, False])
def test_torch_traces_a_captured_function(recorded: bool) -> None:
    """A call that ``torch.jit.trace`` follows runs as it is: it compares the graphs of several."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return x.relu() * 2 + x.shape[0]

    fast = capture(program)
    for rows in (3, 4, 5) if recorded else ():
        fast(torch.randn(rows))
    traced = torch.jit.trace(lambda x: fast(x), torch.randn(4))
    x = torch.randn(6)
    assert torch.equal(traced(x), program(x))
    assert torch.equal(torch.jit.trace(fast, torch.randn(4))(x), program(x))  # asks for a name
    assert (fast.__name__, functools.wraps(fast)(lambda x: x).__name__) == ("program", "program")


def test_torch_compile_says_what_it_needs_where_it_may_leave_nothing_out() -> None:
    fast = capture(lambda x: x + 1)
    whole = torch.compile(lambda x: fast(x) * 2, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="give it the function that was compiled"):
        whole(torch.randn(3))


def test_a_native_that_graphs_cannot_name_is_called_between_them() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, inverse, _ = torch._VF.unique_dim(x * 2, 0, True, True, False)  # type: ignore[attr-defined]
        return rows + 1, inverse * 2

    fast = capture(program)
    for count in (3, 4, 4):
        x = torch.randn(count, 2).sign()
        for expected, found in zip(program(x), fast(x), strict=True):
            assert torch.equal(expected, found)


def test_while_loop_of_torch() -> None:
    def program(x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        step = lambda at, value: (at + 1, value * 2)  # noqa: E731
        found: tuple[torch.Tensor, ...] = while_loop(lambda at, _: at < count, step, (torch.tensor(0), x))
        return found

    fast = capture(program)
    for count in (3, 0, 2, 3, 3):
        x = torch.randn(3)
        for expected, found in zip(program(x, count), fast(x, count), strict=True):
            assert torch.equal(expected, found)
            assert found is not x
    assert fast.calls["eager"] == 0


def test_tensors_of_tensors_are_views() -> None:
    weight = torch.nn.Parameter(torch.randn(3))

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = x * 2
        torch.Tensor(result)[1:].add_(1)
        torch.Tensor(x.t()).mul_(3)
        return result, torch.Tensor(torch.arange(3)), torch.Tensor(weight) + x, torch.Tensor(2, 3).shape

    fast = capture(program)
    for _ in range(3):
        given = torch.randn(4, 3)
        twin = given.clone()
        for found, wanted in zip(fast(given), program(twin), strict=True):
            assert found == wanted if isinstance(wanted, torch.Size) else torch.equal(found, wanted)
        assert torch.equal(given, twin)
    assert (fast.outcome, fast.calls["recorded"]) == ("whole", 1)
    assert fast(given)[2].requires_grad


def test_a_sum_begins_with_a_tensor_also_where_it_adds_none():
    def program(x, parts):
        none = sum([], x.new_zeros(1))
        return none, sum(parts, start=x), sum([], x) is x

    fast, x = capture(program), torch.randn(3)
    for parts in ([x, x + 1], [x, x + 2], [], []):
        found, wanted = fast(x, parts), program(x, parts)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
        assert found[2] is True
    assert fast.outcome == "whole"


def fresh(x):
    grid = torch.ones_like(x)
    grid.requires_grad = False  # as programs say of what they make
    return x * grid


def learning(x):
    y = torch.zeros(3)
    y.requires_grad = True
    return (y * x).sum(), y.requires_grad, y


def switched(x):
    x.requires_grad = not x.requires_grad
    return x + 1


def computed(x):
    y = (x.requires_grad_() * 2).exp()
    y.requires_grad = False
    return y


@pytest.mark.parametrize("program", [fresh, learning, switched, computed])
@pytest.mark.parametrize("kind", [torch.Tensor.clone, torch.nn.Parameter])
def test_whether_tensors_require_gradients_is_set(program, kind):
    def outcome(called):
        x = kind(torch.ones(3))
        try:
            found = called(x)
        except RuntimeError as error:
            found = str(error)
        found = [*found, x] if type(found) is tuple else [found, x]
        return [(y.tolist(), y.requires_grad, y.is_leaf) if isinstance(y, torch.Tensor) else y for y in found]

    fast = capture(program)
    for _ in range(3):
        assert outcome(fast) == outcome(program)
    assert fast.outcome == ("split" if program is computed else "whole")


@pytest.mark.filterwarnings("ignore:torch.get_autocast:DeprecationWarning")
def test_types_of_autocast_are_read_by_their_old_names():
    def program(x):
        half = torch.get_autocast_gpu_dtype() is torch.float16 and torch.is_autocast_enabled("cpu")
        return x * (2 if half else 3), x.to(torch.get_autocast_cpu_dtype())

    fast, x = capture(program), torch.ones(3)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        for enabled in (True, False):
            with torch.autocast("cpu", dtype, enabled=enabled):
                for found, wanted in zip(fast(x), program(x), strict=True):
                    assert found.dtype is wanted.dtype
                    assert torch.equal(found, wanted)
    assert fast.outcome == "whole"


def by_capability(x, device):
    try:
        found = torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError, ValueError) as error:
        return x.cos(), (type(error), error.args)
    return (x.sin() * 2 if found >= (8, 0) else x.tan()), found


DEVICES = [0, 1, "cuda:1", torch.device("cuda:0"), torch.device("cpu"), "cpu"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs here answer for themselves")
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("some", [False, True])
def test_programs_may_ask_what_gpus_can(some: bool, device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As experts of transformers do: the graph is whole, and errors are eager's."""
    known = [types.SimpleNamespace(major=7, minor=5), types.SimpleNamespace(major=9, minor=0)]
    if some:
        index = torch.cuda._utils._get_device_index
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known[index(device)])
    x, fast = torch.randn(4), capture(by_capability)
    for _ in range(3):
        (y, found), (expected, capability) = fast(x, device), by_capability(x, device)
        assert found == capability
        torch.testing.assert_close(y, expected)
    assert "graph break" not in fast.explain()


def test_nested_tensors_are_written_in_place():
    def function(x):
        x = x.clone()
        kept = x * 2
        x.add_(x)
        x.mul_(3.0)
        return kept, x

    fast = capture(function)
    for rows in (2, 2, 3):
        given = torch.nested.nested_tensor([torch.rand(2), torch.rand(rows)])
        for found, want in zip(fast(given), function(given), strict=True):
            pairs = zip(found.unbind(), want.unbind(), strict=True)
            assert all(torch.equal(mine, its) for mine, its in pairs)
