"""No graph falls back as a whole: what a fault of the compiler costs, and what it may not leave behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ladder
from ladder import faults, knobs
from ladder.api import aliasing
from ladder.api.compiler import Compiler
from ladder.api.pieces import FEWEST_STEPS
from ladder.api.surroundings import STATE, kept_state
from ladder.capture.captured import Captured
from ladder.faults import LadderWarning
from ladder.frontend import aten_rows
from ladder.integrations.dynamo import backend
from ladder.partition.partition import ordered
from ladder.runtime import build
from ladder.runtime.model import build as model_build
from ladder.runtime.model.executable import Executable
from tile_types.errors import DTypeError, VerificationError

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def compiled(function: Callable[..., Any], *examples: Any) -> tuple[Any, Compiler]:
    """Return a function with one graph as a plan, and what compiled it."""
    compiler = Compiler()
    return compiler(torch.fx.symbolic_trace(function), list(examples)), compiler


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("broken on purpose")


def chain(x: Tensor) -> Tensor:
    return (x.sin() + 1, x.softmax(-1))  # type: ignore[return-value]


def test_a_kernel_that_fails_to_build_is_steps_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 7)
    monkeypatch.setattr(build, "_build", broken)
    monkeypatch.setattr(faults, "_warned", set())
    build.forget_kernels()
    with knobs.override(cache=False), pytest.raises(ZeroDivisionError):
        compiled(chain, x)
    with knobs.override(cache=False, strict=False), pytest.warns(LadderWarning, match="report") as told:
        run, compiler = compiled(chain, x)
    assert len(told) == 1
    assert all(torch.allclose(y, z) for y, z in zip(run(x), chain(x), strict=True))
    (built,) = compiler.built
    assert {step.part.kind for step in built.plan.steps} == {"torch"}
    assert "for a fault: ZeroDivisionError at ladder/runtime/build.py:" in str(built.plan)
    assert not compiler.refused


def test_a_row_that_fails_is_a_call_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 7)
    monkeypatch.setitem(aten_rows.ROWS, "sin.default", broken)
    with knobs.override(cache=False), pytest.raises(ZeroDivisionError):
        compiled(chain, x)
    with knobs.override(strict=False, cache=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run, compiler = compiled(chain, x)
    assert all(torch.allclose(y, z) for y, z in zip(run(x), chain(x), strict=True))
    assert "torch.ops.aten.sin.default" in str(compiler.built[0].plan)
    assert "chain" in {step.part.kind for step in compiler.built[0].plan.steps}


def test_a_fault_is_raised_or_told_once_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 7)
    monkeypatch.setattr(model_build, "make_plan", broken)
    monkeypatch.setattr(faults, "_warned", set())
    with pytest.raises(ZeroDivisionError):
        compiled(chain, x)
    with knobs.override(strict=False), pytest.warns(LadderWarning) as told:
        (run, compiler), _ = [compiled(chain, x) for _ in range(2)]
    assert len(told) == 1
    assert "ladder/runtime/model/build.py:" in str(told[0].message)
    assert "LADDER_STRICT" in str(told[0].message)
    assert all(torch.equal(y, z) for y, z in zip(run(x), chain(x), strict=True))
    assert "ZeroDivisionError" in compiler.refused[0]


def test_a_call_without_its_plan_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = ladder.compile(chain), torch.randn(3, 7)
    fast(x)
    monkeypatch.setattr(Executable, "run", broken)
    monkeypatch.setattr(faults, "_warned", set())
    with pytest.raises(ZeroDivisionError):
        fast(x)
    with knobs.override(strict=False), pytest.warns(LadderWarning, match="without its plan"):
        y = fast(x)
    with knobs.override(strict=False), warnings.catch_warnings(action="error"):  # told once
        z = fast(x)
    assert all(map(torch.equal, (*y, *z), 2 * chain(x)))


def _rows_or_none(x: Tensor, rows: Tensor) -> Tensor:
    try:
        return x[rows] + 1
    except IndexError:
        return x * 0


def test_errors_that_the_program_catches_are_its_own() -> None:
    fast, x = ladder.compile(_rows_or_none), torch.randn(4)
    with warnings.catch_warnings(action="error"):
        for rows in ([1, 2], [1, 2], [0, 9], [0, 9], [3, 0], [0, 9]):
            given = torch.tensor(rows)
            assert torch.equal(fast(x, given), _rows_or_none(x, given))


def test_errors_that_the_program_leaves_are_raised_as_they_are() -> None:
    fast, x = ladder.compile(lambda x, rows: x[rows] * 2), torch.randn(4)
    for rows in ([1, 2], [1, 2]):
        fast(x, torch.tensor(rows))
    with pytest.raises(IndexError, match="index 9 is out of bounds for dimension 0 with size 4"):
        fast(x, torch.tensor([0, 9]))
    assert torch.equal(fast(x, torch.tensor([0, 3])), x[[0, 3]] * 2)


def test_what_cannot_be_taken_is_told_once_per_function() -> None:
    class Sub(Tensor):
        pass

    x = torch.randn(3).as_subclass(Sub)
    for _ in range(2):
        compiler = Compiler()
        with pytest.warns(LadderWarning, match="subclass") as told:
            _ = [compiler(torch.fx.symbolic_trace(chain), [x]) for _ in range(3)]
        assert len(told) == 1
        assert len(compiler.refused) == 3


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_refused() -> None:
    given = torch.quantize_per_tensor(torch.ones(3), 0.5, 2, torch.quint8)
    fast = ladder.compile(lambda x: x.dequantize() * 2)
    with torch.no_grad(), pytest.warns(LadderWarning, match="an argument is a quantized tensor"):
        assert all(torch.equal(fast(given), torch.full((3,), 2.0)) for _ in range(3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    given = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    compiler = Compiler()
    with pytest.warns(LadderWarning, match="an argument is a nested tensor"):
        run = compiler(torch.fx.symbolic_trace(lambda x: x * 2), [given])
    assert all(torch.equal(part, torch.full_like(part, 2.0)) for part in run(given).unbind())


def test_a_failed_trace_leaves_nothing_behind() -> None:
    def changes(x: Tensor) -> None:
        torch._C._functorch._vmap_increment_nesting(3, "same")
        torch._C._set_grad_enabled(True)
        torch.set_default_dtype(torch.float64)
        torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, True)  # type: ignore[no-untyped-call]
        torch.device("meta").__enter__()
        torch.rand(3, device="cpu")
        raise ZeroDivisionError

    def state() -> list[Any]:
        return [
            value.tolist() if isinstance(value, Tensor) else value for value in (read() for read, _ in STATE)
        ]

    before = state()
    with pytest.raises(ZeroDivisionError), kept_state():
        changes(torch.ones(3))
    assert state() == before


def same_twice(x: Tensor) -> Tensor:
    copied: Tensor = torch.ops.aten.copy(x, x)
    return torch.hypot(x, x) + copied + torch.cross(x, x, dim=-1)


def carried(x: Tensor) -> Tensor:
    spectrum = torch.view_as_real(torch.fft.fft(x)).sum(-1)
    result: Tensor = spectrum * x.to(torch.int16).float()
    return result


@pytest.mark.parametrize("function", [same_twice, carried])
def test_calls(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 3)
    assert torch.allclose(torch.compile(function, backend=backend)(x), function(x), atol=1e-6)


def test_parts_that_need_each_other_are_no_plan() -> None:
    _, compiler = compiled(lambda x: (x.sin() @ x).cos(), torch.randn(3, 3))
    graph = compiler.built[0].program.graph
    first, *_, last = [step.part for step in compiler.built[0].plan.steps]
    from dataclasses import replace

    with pytest.raises(VerificationError, match="need each other"):
        ordered(graph, [replace(first, inputs=last.outputs), replace(last, inputs=first.outputs)])


@pytest.mark.parametrize("dynamic", [False, True])
def test_random_numbers_are_those_of_the_program(dynamic: bool) -> None:
    """Draws keep their order, also what nobody reads, and parts that could be fused across one."""

    def program(x: Tensor) -> tuple[Tensor, ...]:
        a = torch.rand_like(x)
        torch.rand(5)
        b = torch.nn.functional.dropout(x + 1, 0.5)
        late = torch.nn.functional.dropout(a * b, 0.25) + torch.randint(0, 9, x.shape)
        late = late + torch.dropout(x, 1.0, True)  # draws nothing
        return late, x.sin() + a, torch.bernoulli(torch.full_like(x, 0.5)), torch.randperm(x.shape[0])

    fast = torch.compile(program, backend=backend, dynamic=dynamic)
    for count in (3, 3, 4, 6):
        x = torch.randn(count, 8)
        torch.manual_seed(count)
        wanted, after = program(x), torch.get_rng_state()
        torch.manual_seed(count)
        found = fast(x)
        assert torch.equal(torch.get_rng_state(), after)
        assert all(torch.allclose(y, z, atol=1e-6) for y, z in zip(found, wanted, strict=True))


def test_open_sizes_that_no_polynomial_is() -> None:
    """A number that depends on sizes fits no plan of open sizes: there is one per set of sizes."""
    from ladder.integrations.dynamo import compiler

    def program(x: Tensor) -> Tensor:
        return torch.add(x * x.shape[0] ** -0.5, 1)

    before, fast = len(compiler.built), torch.compile(program, backend=backend, dynamic=True)
    for count in (3, 4, 6, 3):
        x = torch.randn(count, 8)
        assert torch.allclose(fast(x), program(x))
    assert len(compiler.built) == before + 3


def test_open_sizes_that_are_the_larger_of_two() -> None:
    def program(x: Tensor) -> Tensor:
        table = torch.arange(12.0).reshape(12, 1) + torch.zeros(12, 4)
        return torch.nn.functional.pad(table[-x.shape[0] :] + x, (1, 0)) * 2

    fast = torch.compile(program, backend=backend, dynamic=True)
    for count in (5, 6, 11):
        x = torch.randn(count, 4)
        assert torch.allclose(fast(x), program(x))


def test_operators_whose_results_no_trace_knows() -> None:
    """``nonzero`` and masks run in torch, each as one step; what lies between is compiled."""

    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = (x.sin() + 1) * 2
        chosen = y[y > 1].cos() * 3
        values, counts = torch.unique(torch.nonzero(y > 1), return_counts=True)
        for _ in range(FEWEST_STEPS):  # shorter pieces run as they are
            y = y.cos() * 2
        return chosen + 1, values * 2, counts + 1, y.softmax(-1)

    run, compiler = compiled(program, torch.randn(3, 4))
    for _ in range(3):
        x = torch.randn(3, 4)
        assert all(torch.allclose(y, z, atol=1e-6) for y, z in zip(run(x), program(x), strict=True))
    assert sorted(text.partition(" ")[0] for text in compiler.alone) == ["getitem", "nonzero", "unique"]
    assert not compiler.refused
    assert any("chain" in str(built.plan) for built in compiler.built)


def test_operators_whose_results_no_trace_knows_beside_no_grad() -> None:
    """As vision towers have them, whose positions are made under ``torch.no_grad``."""

    def program(x: Tensor, counts: Tensor) -> Tensor:
        with torch.no_grad():
            places = torch.repeat_interleave(torch.arange(3), counts).expand(2, -1)
        return (x.sin() + 1) * places.sum(0).cos().sum() * 2

    fast = ladder.compile(program)
    with torch.no_grad():
        for counts in ([1, 2, 3], [1, 2, 3], [3, 0, 1]):
            given = torch.randn(3, 4), torch.tensor(counts)
            torch.testing.assert_close(fast(*given), program(*given))
    assert not fast.refused
    assert fast.outcome == "whole"


@pytest.mark.parametrize("numbers", [(0, 1), (-1, 0), (2, -4), (-5, 0), (0, 4)])
@pytest.mark.parametrize("counted", [False, True])
def test_rows_from_the_end(numbers: tuple[int, int], counted: bool) -> None:
    """``cache[at] = rows`` counts negative numbers from the end, ``index_copy_`` refuses them."""

    def put(cache: Tensor, at: Tensor, rows: Tensor) -> tuple[Tensor]:
        other = torch.relu(cache)
        if counted:
            cache.index_put_((at,), rows * 2)
            other.index_put_((at,), rows)
        else:
            cache.index_copy_(0, at, rows * 2)
            other.index_copy_(1, at, rows.t()[:4])
        return (rows + other.sum(),)

    def called(run: Any) -> tuple[Any, Tensor]:
        cache = torch.arange(16.0).view(4, 4)
        try:
            return run(cache, torch.tensor(numbers), torch.ones(2, 4)), cache
        except IndexError:
            return None, torch.empty(0)

    run, compiler = compiled(put, torch.zeros(4, 4), torch.tensor([2, 0]), torch.ones(2, 4))
    (found, mine), (expected, theirs) = called(run), called(put)
    assert (found is None) is (expected is None)
    assert all(map(torch.equal, (*(found or ()), mine), (*(expected or ()), theirs)))
    assert not compiler.refused


def test_an_argument_that_is_written_may_be_the_result() -> None:
    def program(cache: Tensor, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        cache.index_copy_(0, at, rows * 2)
        return cache, cache + 1

    cache, at = torch.zeros(4, 3), torch.tensor([2, 0])
    run, compiler = compiled(program, cache, at, torch.ones(2, 3))
    for number in range(3):
        rows, kept = torch.randn(2, 3), cache.clone()
        same, more = run(cache, at, rows)
        kept, wanted = program(kept, at, rows)
        assert same is cache
        assert torch.equal(cache, kept), number
        assert torch.equal(more, wanted)
    assert not compiler.refused


def test_float64_is_computed_in_float64() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x.softmax(-1),
            torch.nn.functional.layer_norm(x, (7,)),
            x.var(-1),
            x.mean(-1),
            torch.nn.functional.gelu(x),
            x[0, 0].sum(0),
        )

    x = torch.randn(3, 7, dtype=torch.float64)
    run, _ = compiled(program, x)
    assert all(torch.allclose(y, z, rtol=1e-13, atol=1e-14) for y, z in zip(run(x), program(x), strict=True))


def adds_and_views(buffer: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    buffer.add_(x)
    return buffer[1], x[1:], buffer.t(), x * 2, buffer


def test_results_that_lie_in_what_is_written_are_parts_of_it() -> None:
    examples = torch.ones(4, 4), torch.randn(4, 4)
    run, compiler = compiled(adds_and_views, *examples)
    for _ in range(2):
        buffer, x = torch.ones(9).repeat(2)[1:17].view(4, 4), torch.randn(4, 4)
        expected = adds_and_views(buffer.clone(), x)
        found = run(buffer, x)
        assert all(map(torch.equal, found, expected))
        buffer.zero_()
        assert not found[0].any()
        assert not found[2].any()
        assert found[4] is buffer
    assert (len(compiler.built), compiler.refused) == (1, [])


def makes_positions(items: list[int]) -> Tensor:
    steps = torch.arange(len(items))
    return (steps[:, None] - steps).clamp(-3, 3).float()


def test_a_graph_that_takes_no_tensors_is_a_plan() -> None:
    compiler = Compiler()
    fast = torch.compile(makes_positions, backend=compiler)
    assert torch.equal(fast([0] * 5), makes_positions([0] * 5))
    assert (len(compiler.built), compiler.refused) == (1, [])


@pytest.mark.filterwarnings("ignore::ladder.faults.LadderWarning")
def test_a_graph_of_numbers_alone_runs_in_torch() -> None:
    """As torch.compile makes them between two graphs: no piece of it is a plan either."""
    run, compiler = compiled(lambda n: ((n - 1) % 8, n * 2), 13)
    assert run(13) == (4, 26)
    assert run(14) == (5, 28)
    assert not compiler.built


def test_all_generators_are_set_back_where_a_graph_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of GPUs as well: another generator stands for one."""
    gpu = torch.Generator().manual_seed(5)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))

    def program(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(4, generator=None) + torch.zeros(4).index_select(0, at)

    failing = [False]

    def failing_backend(module: torch.fx.GraphModule, examples: list[object]) -> Callable[..., object]:
        def run(*inputs: object) -> object:
            torch.rand(1, generator=gpu)
            if failing[0]:
                torch.rand(7)
                raise RuntimeError("a kernel failed")
            return module.forward(*inputs)

        return run

    captured = Captured(program, failing_backend)
    x, at = torch.ones(4), torch.tensor([0, 1, 2, 3])
    for _ in range(2):
        captured(x, at)
    before, torch_before = gpu.get_state(), torch.get_rng_state()
    wanted = program(x, at)
    after = torch.get_rng_state()
    torch.set_rng_state(torch_before)
    failing[0] = True
    assert torch.equal(captured(x, at), wanted)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(gpu.get_state(), before)


def test_results_that_were_not_asked_for() -> None:
    """Attention of torch's modules gives None where its fake tensors are weights, if nobody needs them."""
    attention, x = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval(), torch.randn(2, 5, 16)

    def program(x: Tensor) -> Tensor:
        found: Tensor = attention(x, x, x, need_weights=False)[0] + 1
        return found

    fast = ladder.compile(program)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), program(x))
    assert fast.calls["eager"] == 0, fast.explain()


def test_results_with_gaps_lie_as_the_sizes_of_a_call_have_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As keys and values of a sliding window: part of what was joined, for prompts of any length."""

    def program(x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        values = x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
        return torch.cat([past, values], 2)[:, :, -3:], x * 2

    fast = ladder.compile(program)
    for rows, length, before in ((2, 6, 0), (3, 7, 0), (4, 9, 0), (2, 5, 2), (3, 1, 3), (2, 2, 0), (3, 7, 0)):
        given = torch.randn(rows, length, 8), torch.randn(rows, 2, before, 4)
        for found, expected in zip(fast(*given), program(*given), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            assert (found.stride(), found.storage_offset()) == (expected.stride(), expected.storage_offset())
    assert "operator by operator" not in caplog.text

    def asked(*_: Any) -> Any:
        raise AssertionError("how results lie follows from the sizes of a call")

    monkeypatch.setattr(aliasing, "open_strides", asked)
    monkeypatch.setattr(aliasing, "strides_for", asked)
    x, past = torch.randn(3, 11, 8), torch.randn(3, 2, 5, 4)
    for found, expected in zip(fast(x, past), program(x, past), strict=True):
        assert (found.stride(), found.storage_offset()) == (expected.stride(), expected.storage_offset())


def test_an_argument_that_is_negated_where_it_is_read_is_refused() -> None:
    """Kernels read memory, which holds the other sign."""
    given = torch._neg_view(torch.randn(3, 8))
    compiler = Compiler()
    with pytest.warns(LadderWarning, match="negated where it is read"):
        run = compiler(torch.fx.symbolic_trace(chain), [given])
    assert all(map(torch.equal, run(given), chain(given)))
    plan = Compiler()(torch.fx.symbolic_trace(chain), [given.resolve_neg()]).executable
    plan.check([given.resolve_neg()])
    with pytest.raises(DTypeError, match="argument 0 is negated where it is read"):
        plan.check([given])


def test_elements_that_no_kernel_has_are_torchs() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        codes = (x * 2).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), torch.nn.functional.pad(codes, (1, 2)).float() + 1, x.exp()

    fast, x = ladder.compile(program), torch.randn(3, 5)
    for _ in range(2):
        torch.testing.assert_close(fast(x), program(x))
    assert "pad  [no kernel of chains computes with fp8_e4m3]" in fast.plan()
    assert "mul maximum minimum" in fast.plan()
    assert "convert add" in fast.plan()
