"""Plans whose sizes are open: one serves every batch and length, whatever made the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import model_zoo as zoo
import pytest
import torch
from torch import Tensor, nn

import ladder
from ladder.runtime.model.bound_plan import BoundPlan
from ladder.runtime.model.executable import Executable
from ladder.runtime.model.memory import Block, Result, rounded_up
from ladder.runtime.model.plan import ModelPlan
from ladder.runtime.model.sizes import CallSizes, evaluator
from tile_types.errors import LadderError, ShapeError

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_schedule")


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def error(found: Any, expected: Any) -> float:
    if isinstance(expected, Tensor):
        assert found.shape == expected.shape
        return float((found.double() - expected.double()).norm() / (expected.double().norm() + 1e-30))
    if isinstance(expected, int):
        return float(found != expected)
    return max(error(a, b) for a, b in zip(found, expected, strict=True))


def seeded(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return model.eval()


def mlp() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16)))


def test_batches() -> None:
    """The second size makes the plan that serves the others; 1 and 0 mean something of their own."""
    check_batches(mlp())


@pytest.mark.usefixtures("long_test")
def test_batches_of_a_quantized_model() -> None:
    check_batches(ladder.quantize(mlp(), "int4", group_size=16))


def check_batches(model: Any) -> None:
    fast = ladder.compile(model)
    plans = []
    for count in (2, 3, 4, 5, 64, 300, 2, 1, 0, 17):
        x = torch.randn(count, 16)
        assert error(fast(x), model(x)) < 2e-6
        plans.append(len(fast.models))
    assert plans == [1, 2, 2, 2, 2, 2, 2, 3, 4, 4]
    assert not fast.refused


def test_batches_and_lengths() -> None:
    model = seeded(zoo.Bert(layers=1))
    fast = ladder.compile(model)
    for at, (batch, length) in enumerate(((2, 5), (3, 7), (4, 9), (5, 6), (2, 2), (7, 33), (9, 40))):
        ids, mask = torch.randint(0, 64, (batch, length)), torch.ones(batch, length)
        mask[:, length // 2 + 1 :] = 0
        assert error(fast(ids, mask), model(ids, mask)) < 2e-6
        assert len(fast.models) == min(at + 1, 2)
    with pytest.raises(RuntimeError, match="size of tensor"):  # the program's own error
        fast(ids, mask[:1, :3])


def test_growing_caches_and_prompts() -> None:
    """Keys and values are joined by ``torch.cat``, as transformers' DynamicCache does."""
    model = seeded(zoo.Llama(layers=2))
    fast = ladder.compile(model)
    for length in (6, 9, 4, 3, 11):
        ids = torch.randint(0, 100, (1, length))
        expected, past = model(ids)
        assert error(fast(ids), (expected, past)) < 2e-6
    assert len(fast.models) == 2
    for _ in range(7):
        ids = torch.randint(0, 100, (1, 1))
        found = fast(ids, past)
        expected, past = model(ids, past)
        assert error(found, (expected, past)) < 2e-6
    assert (len(fast.models), fast.refused) == (4, [])
    chains = [step.entry for step in fast.models[-1].plan.steps if step.sizes and step.part.kind == "chain"]
    assert len(set(chains)) < len(chains)  # layers share kernels whatever their sizes are called


def scaled(x: Tensor, number: float) -> Tensor:
    return torch.relu(x * number) + number


@pytest.mark.parametrize("numbers", [(2, 3, 4, 5, 6, -1, 0, 1, 7), (0.5, 1.5, 2.5, 3.5, 4.5)])
def test_numbers_are_never_baked_in(numbers: tuple[float, ...]) -> None:
    """Whole numbers become symbols like extents; for others each has its own plan."""
    fast, x = ladder.compile(scaled), torch.randn(3, 8)
    for number in numbers:
        assert error(fast(x, number), scaled(x, number)) < 1e-6
    assert len(fast.models) == (6 if isinstance(numbers[0], int) else 5)


def tail(x: Tensor) -> tuple[Tensor, Tensor]:
    """Leave two rows out: nothing is left of two."""
    return (x * 2)[2:] + 1, x.sum(0)


def counted(x: Tensor) -> tuple[Tensor, Tensor]:
    length = x.shape[1]
    return x + torch.arange(length, 2 * length), x[:, : length // 2].reshape(-1) * length


def joined(x: Tensor) -> Tensor:
    return torch.cat([x, x.relu(), x[:, :1]], 1).softmax(1)


def parted(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 5 else x + x.shape[1]


def shared_out(x: Tensor) -> Tensor:
    """Divide by an extent that is 0 where a size is small."""
    parts = x.shape[1] // 96
    return x[:, :64].reshape(-1, parts, 64 // parts).transpose(1, 2).exp() * 2


PROGRAMS: tuple[Callable[[Tensor], Any], ...] = (tail, counted, joined, parted)
SIZES = ((3, 4), (5, 6), (4, 8), (7, 5), (2, 9), (12, 4), (33, 40), (1, 5), (6, 1))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs(program: Callable[[Tensor], Any]) -> None:
    fast = ladder.compile(program)
    for shape in SIZES:
        x = torch.randn(shape)
        assert error(fast(x), program(x)) < 1e-6
    assert not fast.refused


def test_extents_that_divide() -> None:
    fast = ladder.compile(shared_out)
    for rows, parts in ((2, 2), (3, 4), (1, 8), (4, 16), (2, 1)):
        x = torch.randn(rows, 96 * parts)
        assert error(fast(x), shared_out(x)) < 1e-6
    assert not fast.refused


def shown(x: Tensor) -> tuple[Tensor, int, Tensor]:
    return x.relu() + x.shape[0], 2 * x.shape[1], x.reshape(-1)


@pytest.mark.parametrize("make", [mlp, lambda: shown], ids=["mlp", "sizes returned"])
def test_torch_compile(make: Callable[[], Any]) -> None:
    """``dynamic=True``: torch's own symbols; its open floats (the norm's epsilon) are fixed."""
    from ladder.integrations.dynamo import backend, compiler

    model, before, refused = make(), len(compiler.built), len(compiler.refused)
    fast = torch.compile(model, backend=backend, dynamic=True)
    for count in (2, 3, 5, 17):
        x = torch.randn(count, 16)
        assert error(fast(x), model(x)) < 2e-6
    assert (len(compiler.built), len(compiler.refused)) == (before + 1, refused)


def ranged(x: Tensor) -> Tensor:
    return x * x.shape[0] if 4 < x.shape[0] <= 8 else x + 1


def unlike(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] != 5 else x + 1


def rested(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def test_files(tmp_path: Path) -> None:
    """What the program decided by its sizes is in the file."""
    path = ladder.compile(ranged).export(tmp_path / "m", torch.randn(7, 3), open_axes={"x": [0]})
    loaded = ladder.load(path)
    for count in (5, 6, 8):
        x = torch.randn(count, 3)
        assert error(loaded(x), ranged(x)) < 1e-6
    for count in (4, 9):
        with pytest.raises(ShapeError, match=f"the model needs .* <= .*, this call has .*{count}"):
            loaded(torch.randn(count, 3))


@pytest.mark.parametrize(
    ("program", "shapes", "axes", "why"),
    [
        (unlike, [(7, 3)], {"x": [0]}, "cannot hold what the model needs of its sizes: Ne"),
        (rested, [(7, 3), (7, 3)], {"x": [0]}, "another size that is not open makes it 7"),
        (ranged, [(7, 3)], {"y": [0]}, "unknown parameter 'y'"),
        (ranged, [(7, 3)], {"x": [2]}, "axis 2 of x"),
        (ranged, [(1, 3)], {"x": [0]}, "2 or more elements"),
        (ranged, [(7, 3)], [0], "which axes of which parameter"),
    ],
)
def test_files_that_cannot_be(
    program: Any, shapes: list[tuple[int, ...]], axes: Any, why: str, tmp_path: Path
) -> None:
    with pytest.raises(LadderError, match=why):
        ladder.compile(program).export(tmp_path / "m", *map(torch.randn, shapes), open_axes=axes)


def test_layouts_serve_classes_of_sizes() -> None:
    results = [Result("a", ("n", 4), torch.float32, 0, 1), Result("b", ("n*n",), torch.float32, 1, 2)]
    block = Block(results, ("n",), CPU)
    for size in (9, 10, 2, 33, 9):
        a, b = block.buffers((size,))
        assert (a.shape, b.shape) == ((size, 4), (size * size,))
        assert a.data_ptr() + a.nbytes <= b.data_ptr() or b.data_ptr() + b.nbytes <= a.data_ptr()
    assert block.grown == 2  # 9 and 10 are of one class; 2 needs less, 33 more
    assert all(size <= rounded_up(size) <= 1.25 * size for size in range(1, 3000))


def test_extents_are_compiled() -> None:
    assert evaluator(("a*b + 1", 7, "ceildiv(a, 4)", "floordiv(a - b, 2)"), ("a", "b"))((9, 4)) == (
        37,
        7,
        3,
        2,
    )
    now = CallSizes(("a",))
    numbers = now.numbers(("2*a", 3))
    now.known = now.evaluated((5,))
    assert numbers() == (10, 3)


def test_what_no_argument_shows_is_refused() -> None:
    with pytest.raises(ShapeError, match="no argument shows the size b"):
        CallSizes(("a",)).numbers(("a + b",))
    with pytest.raises(ShapeError, match="no argument shows the size n"):
        Executable(BoundPlan(ModelPlan((), {}, ()), {}, {}, {}, [("2*n",)], (), {}, CPU))


def test_a_write_to_all_of_an_open_axis_copies_nothing() -> None:
    """What is written replaces what was there; with fixed sizes that was known."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        both = torch.cat([x, y], 1)
        both[:, :, :] += y.repeat(1, 2, 1)
        both[:, :] = both * 2
        return both + 1

    fast = ladder.compile(program)
    with torch.no_grad():
        for tokens in (3, 4, 7):
            x, y = torch.randn(2, 3, tokens), torch.randn(2, 3, tokens)
            torch.testing.assert_close(fast(x, y), program(x, y))
    assert "scatter" not in fast.plan()


def test_overlapping_windows_are_added_in_one_step() -> None:
    """Of any length: torch would take the sum apart into an addition for each element of a window."""
    window = torch.hann_window(64)

    def halved(x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(x, 64, 16, window=window, return_complex=True)
        return torch.istft(spectrum * 0.5, 64, 16, window=window)

    fast = ladder.compile(halved)
    with torch.no_grad():
        for length in (400, 400, 640, 512):
            x = torch.randn(length, generator=torch.Generator().manual_seed(length))
            torch.testing.assert_close(fast(x), halved(x))
    plan = str(fast.plan())
    assert plan.count("unfold_backward") == 4, plan  # a line for each of two, with its reason
    assert "index_add" not in plan


def test_parts_of_one_row_lie_apart_by_no_symbol() -> None:
    """A part of a mask of one sequence, whose first stride nothing tells, is repeated for each query."""

    def repeated(mask: Tensor) -> Tensor:
        return (mask.view(1, 1, 1, -1) > 0).expand(1, 2, mask.shape[1], -1).contiguous()

    fast = ladder.compile(repeated)
    with torch.no_grad():
        for length in (3, 4, 5, 6):
            mask = torch.randn(1, 9)[:, :length]
            assert torch.equal(fast(mask), repeated(mask))
    assert len(fast.models) == 2
    assert not fast.refused
