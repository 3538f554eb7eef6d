"""From torch functions to programs, block graphs on the CPU, and `ladder.superoptimize` as a whole."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ladder
from benchmarks import superopt_graphs as graphs
from ladder.api import fused_trials
from ladder.api.tensor_program import decoded, packed_types, recorded, translated
from ladder.ir import evaluate
from ladder.lower.blocks import BlockSchedule
from ladder.lower.blocks.analysis import BlockProgram, gemm_of
from ladder.lower.blocks.candidates import FITTED, Estimate, legal_schedules, neighbours, predicted, ranked
from ladder.lower.blocks.geometry import BlockGeometry
from ladder.runtime.fused import Fused, Lowering
from ladder.runtime.packed import pack
from ladder.runtime.trials import Trial, _various, candidates_of
from ladder.simulate.fused import simulate_fused
from ladder.superopt.generator import Database, Limits, Program, get_program, instantiate, search
from ladder.superopt.generator.stored import identity
from targets import get_device, host_cpu
from tests.numeric.cpu_problems import factored
from tile_types import quantize
from tile_types.errors import (
    ConversionError,
    DTypeError,
    ScheduleError,
    ShapeError,
    VerificationError,
)


@pytest.fixture(autouse=True)
def slow_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of these sizes may be faster as torch runs them: what is tested is the kernels."""
    for module in ("superopt_task", "superoptimize"):
        monkeypatch.setattr(f"ladder.api.{module}.torch_seconds", lambda function, inputs: 1.0)


def draw(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.5).half()


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(x @ gate) * (x @ up)


def norm_matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))) @ w


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1) @ v


def gelus(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ gate, approximate="tanh") * F.gelu(x @ gate)


def program_of(function: Any, inputs: list[Any]) -> Program:
    tensors = decoded(inputs)
    found = recorded(function, tensors)
    return translated(found.name, found.module, found.examples, tensors, packed_types(inputs))


FUNCTIONS = {
    "gated": (gated, [(4, 16), (16, 8), (16, 8)], 3),
    "norm_matmul": (norm_matmul, [(4, 16), (16, 16)], 3),  # K and N are dimensions of their own
    "attention": (attention, [(2, 4, 8), (2, 16, 8), (2, 16, 8)], 5),
    "gelus": (gelus, [(4, 16), (16, 8)], 3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_programs_of_functions(name: str) -> None:
    function, shapes, dimensions = FUNCTIONS[name]
    inputs = [draw(*shape) for shape in shapes]
    program = program_of(function, inputs)
    assert len(program.sizes) == dimensions
    exact = function(*(x.double() for x in inputs)).numpy()
    found = evaluate(program.graph(), [x.double().numpy() for x in inputs])
    assert np.linalg.norm(found - exact) <= 2e-3 * np.linalg.norm(exact)
    # Constants follow the sizes.
    larger = program.resized(**{name: 2 * size for name, size in program.sizes.items()})
    assert [node.tile.shape for node in larger.graph().inputs] != [
        node.tile.shape for node in program.graph().inputs
    ]


def test_products_of_a_tensor_with_itself_are_squares() -> None:
    program = program_of(lambda x, y: (x * x).sum(-1, keepdim=True) * y, [draw(4, 16), draw(4, 16)])
    assert [node.operator for node in program.graph().nodes if node.inputs] == ["square", "reduce_sum", "mul"]


REFUSED = {
    "cos has no counterpart": lambda x: torch.cos(x) @ x,
    "keepdim=True": lambda x: x / x.sum(-1),
    "only matmul's second operand": lambda x: x.transpose(-1, -2) + x,
    "the power 3": lambda x: x.pow(3) @ x,
    "division by 0.0": lambda x: x / 0.0 @ x,
    "division by 1e-39": lambda x: x / 1e-39 @ x,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_translated_is_named(message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        program_of(REFUSED[message], [draw(16, 16)])


@pytest.mark.parametrize("function", [lambda w, x: w @ x, lambda w, x: x @ w])
def test_products_of_vectors_are_named(function: Any) -> None:
    with pytest.raises(ConversionError, match="matmul of a vector"):
        program_of(function, [draw(16, 16), draw(16)])


def test_a_softmax_of_a_vector(cache: None) -> None:
    x = draw(16)
    found = ladder.superoptimize(lambda x: torch.softmax(x, 0), [x], limits=QUICK, trials=1)
    assert found.certificate.verdict == "equal"
    torch.testing.assert_close(found(x), torch.softmax(x, 0), rtol=2e-3, atol=1e-3)


OUTSIDE_LAX = {
    "two exponentials on one path": lambda x: torch.exp(torch.exp(x)),
    "relu is outside LAX": lambda x: torch.relu(x),
}


@pytest.mark.parametrize("message", OUTSIDE_LAX)
def test_what_is_outside_lax_is_named_and_compiled(message: str, cache: None) -> None:
    x = draw(16, 16)
    found = ladder.superoptimize(OUTSIDE_LAX[message], [x])
    (part,) = found.parts
    assert message in part.reason
    assert "chain" in part.plan
    torch.testing.assert_close(found(x), OUTSIDE_LAX[message](x), rtol=2e-3, atol=1e-3)
    assert found.as_json()["delta"] is None
    for proof in ("certificate", "stability"):
        with pytest.raises(VerificationError, match=f"so nothing is proved: .*{message}"):
            getattr(found, proof)


CASES = {
    "rmsnorm_matmul": graphs.rmsnorm_matmul(4, 64, 96, 48, 32),
    "gated_mlp": graphs.gated_mlp(8, 64, 32, 16, 32),
    "lora": graphs.lora(4, 32, 32, 16, 16),
    "lora after a loop": graphs.lora(4, 32, 32, 16, 16, 16),
    "attention": graphs.attention(2, 8, 16, 64, 8, 16, 0.25),
    "normalised attention": graphs.attention(2, 8, 16, 64, 8, 16, norm=True),
    "ntrans": graphs.norm_transition(3, 48),
    "split attention": graphs.split_attention(2, 16, 16, 64, 2, 8, 16),
}


@pytest.fixture(scope="module")
def cache(kernels_of_the_run):
    with ladder.knobs.override(cache_dir=kernels_of_the_run):
        yield


@pytest.mark.parametrize("name", CASES)
def test_block_graphs_on_the_cpu(name: str, cache: None) -> None:
    case = CASES[name]
    kernels = sum(node.operator == "block" for node in case.graph.nodes)
    fused = Fused.build(Lowering(case.graph, (BlockSchedule(),) * kernels), host_cpu())
    inputs = [draw(*node.tile.known_shape) for node in case.graph.inputs]
    exact = case.meaning(*(x.double().numpy() for x in inputs))
    assert np.linalg.norm(fused(*inputs).double().numpy() - exact) <= 5e-4 * np.linalg.norm(exact)


WEIGHTS = ["nf4_g64", "mxfp4", "int3_g32", "uint4_g128_zi", "uint2_g32_zf"]


@pytest.mark.parametrize("weight", WEIGHTS)
def test_quantized_weights_on_the_cpu(weight: str, cache: None) -> None:
    case = graphs.rmsnorm_matmul(4, 256, 128, 64, 64, weight)
    x, tile = draw(4, 256), case.graph.inputs[1].tile
    stored = quantize(draw(*tile.known_shape), tile.ttype)
    packed = pack(gemm_of(tile.ttype, tile.known_shape, "float16"), host_cpu(), stored)
    fused = Fused.build(Lowering(case.graph, (BlockSchedule(),)), host_cpu())
    exact = case.meaning(x.double().numpy(), stored.dequantize().double().numpy().T)
    assert np.linalg.norm(fused(x, packed).double().numpy() - exact) <= 5e-4 * np.linalg.norm(exact)


@pytest.mark.parametrize(("weight", "group"), [("uint4_g32_zf", 32), ("uint2_g16_zf", 16), ("int6_g16", 16)])
def test_factored_scales_on_the_cpu(weight: str, group: int, cache: None) -> None:
    case = graphs.rmsnorm_matmul(4, 256, 128, 64, 64, weight)
    x, tile = draw(4, 256), case.graph.inputs[1].tile
    n, k = tile.known_shape[::-1] if tile.known_shape[0] == 256 else tile.known_shape
    stored = factored(tile.ttype.element, (n, k), group, offset=weight.endswith("zf"), vanishing=True)
    packed = pack(gemm_of(tile.ttype, tile.known_shape, "float16"), host_cpu(), stored)
    assert packed.is_factored
    fused = Fused.build(Lowering(case.graph, (BlockSchedule(),)), host_cpu())
    exact = case.meaning(x.double().numpy(), stored.dequantize().double().numpy().T)
    assert np.linalg.norm(fused(x, packed).double().numpy() - exact) <= 5e-4 * np.linalg.norm(exact)


def test_a_cpu_block_is_not_shared() -> None:
    with pytest.raises(ScheduleError, match="one CPU thread each"):
        Fused.build(Lowering(CASES["gated_mlp"].graph, (BlockSchedule(2),)), host_cpu())


def test_constants_are_inputs_and_part_of_a_kernel() -> None:
    graph, device = CASES["gated_mlp"].graph, get_device("cuda/sm_90a")
    keys = {
        job.key
        for constants in ((), ("GATE",), ("GATE", "UP"))
        for job in Lowering(graph, (BlockSchedule(),), constants).jobs(device)
    }
    assert len(keys) == 3
    with pytest.raises(ScheduleError, match="no inputs of 'gated_mlp': W"):
        Lowering(graph, (BlockSchedule(),), ("W",))


def test_fused_programs_check_their_inputs(cache: None) -> None:
    case = CASES["gated_mlp"]
    fused = Fused.build(Lowering(case.graph, (BlockSchedule(),)), host_cpu())
    x, gate, up = (draw(*node.tile.known_shape) for node in case.graph.inputs)
    with pytest.raises(ShapeError, match="the program takes"):
        fused(x[:4], gate, up)
    with pytest.raises(DTypeError, match="takes float16"):
        fused(x.float(), gate, up)
    with pytest.raises(ShapeError, match="contiguous"):
        fused(x, draw(32, 64).t(), up)


def test_schedules_of_a_gpu_are_legal_and_ranked() -> None:
    block = graphs.gated_mlp(8, 512, 256, 64, 64).block
    device = get_device("cuda/sm_90a")
    schedules = [geo.schedule for geo in legal_schedules(block, device)]
    assert {plan.copies for plan in schedules} == {"lanes", "tensor"}
    assert all(plan.sharers <= 8 for plan in schedules)
    estimates = ranked(block, device)
    assert [e.seconds for e in estimates] == sorted(e.seconds for e in estimates)
    assert len(estimates) == len(schedules)
    assert {geo.schedule.cluster for geo in legal_schedules(block, get_device("cuda/sm_80"))} == {1}


def test_neighbours_of_a_schedule_are_legal_and_others() -> None:
    block = graphs.gated_mlp(64, 512, 256, 64, 64).block
    plan = BlockSchedule(2, 4, 3, copies="tensor", products="wgmma", release="end")
    near = neighbours(block, get_device("cuda/sm_90a"), plan, ("gate_in", "up_in"))
    schedules = {estimate.schedule for estimate in near}
    assert {replace(plan, release="asked"), replace(plan, stages=4)} <= schedules
    assert replace(plan, groups=1, stages=6) in schedules
    assert plan not in schedules
    assert len(schedules) == len(near)
    program = BlockProgram.of(block)
    own = predicted(program, get_device("cuda/sm_90a"), plan, False)  # constants, but too small to count
    for estimate in near:
        all_of_it = predicted(program, get_device("cuda/sm_90a"), estimate.schedule, False)
        assert estimate.seconds == pytest.approx(all_of_it - own)
    assert neighbours(block, get_device("cpu/avx2"), BlockSchedule()) == []


QUICK = Limits(operators=6, workers=1)


def test_superoptimize(cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole; then once more, which neither searches nor times anything."""
    inputs = [draw(4, 64), draw(64, 32), draw(64, 32)]
    found = ladder.superoptimize(gated, inputs, limits=QUICK, trials=3, seed=0)
    exact = gated(*(x.double() for x in inputs))
    assert (found(*inputs).double() - exact).norm() <= 1e-3 * exact.norm()
    assert found.certificate.equal
    assert 0 < found.certificate.delta <= 2**-64
    assert found.stability.stable
    assert len(found.trials) == 3
    assert found.best.measured == min(trial.measured for trial in found.trials)
    assert found.as_json()["states"] > 0
    (body,) = (node.body for node in found.graph.nodes if node.body is not None)
    assert sum(node.operator == "matmul" for _, node in body.walk()) == 2
    assert "searched in" in str(found)

    for name in ("search", "candidates_of", "checked"):
        monkeypatch.setattr(f"ladder.api.superopt_task.{name}", None)
    renamed = lambda *values: gated(*values)  # noqa: E731  the name of a program is no part of it
    again = ladder.superoptimize(renamed, inputs, limits=QUICK, trials=3)
    assert "from the database" in str(again)
    assert again.as_json()["from_database"] is True
    assert [trial.as_json() for trial in again.trials] == [trial.as_json() for trial in found.trials]
    assert torch.equal(again(*inputs), found(*inputs))


def test_what_was_found_where_the_device_is_not_is_timed_where_it_is(
    cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [draw(4, 64), draw(64, 32), draw(64, 32)]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("ladder.api.superopt_task.Task.is_here", False)
        untimed = ladder.superoptimize(gated, inputs, limits=QUICK, trials=3, seed=0)
    assert untimed.fused is None
    found = ladder.superoptimize(gated, inputs, limits=QUICK, trials=3)
    assert "from the database" in str(found)
    assert all(trial.measured for trial in found.trials)


def test_the_nearly_fastest_kernels_are_timed_again(cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that other work slowed down the first time wins if it is the fastest."""
    inputs = [draw(4, 64), draw(64, 32), draw(64, 32)]
    found = ladder.superoptimize(gated, inputs, limits=QUICK, trials=3, seed=0)
    assert found.fused is not None
    timed = [(replace(found.best, measured=seconds), found.fused) for seconds in (1.0, 1.05, 1.2)]
    again = iter([0.9, 0.7] * fused_trials.TURNS)
    monkeypatch.setattr(fused_trials, "_seconds", lambda fused, given: next(again))
    assert [trial.measured for trial, _ in fused_trials.in_turns(timed, inputs)] == [0.7, 0.9, 1.2]


def test_one_lucky_time_of_a_kernel_does_not_count(cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where copies of inputs lie changes a kernel's time: it is chosen by the median over places."""
    inputs = [draw(4, 64), draw(64, 32), draw(64, 32)]
    found = ladder.superoptimize(gated, inputs, limits=QUICK, trials=3, seed=0)
    assert found.fused is not None
    timed = [(replace(found.best, measured=seconds), found.fused) for seconds in (1.0, 1.05)]
    again = iter([0.7, 0.9, 1.0, 0.9, 1.0, 0.9])
    monkeypatch.setattr(fused_trials, "_seconds", lambda fused, given: next(again))
    assert [trial.measured for trial, _ in fused_trials.in_turns(timed, inputs)] == [0.9, 1.0]


def test_kernels_are_compared_where_the_function_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """One infinity among a function's results, and kernels that give anything were right."""
    x = torch.tensor([0.0, 1.0, 2.0, float("nan")])

    class Kernels:
        def __init__(self, *y: float) -> None:
            self.y = torch.tensor(y)

        def packed(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            return inputs

        def __call__(self, *given: torch.Tensor) -> torch.Tensor:
            return self.y

    nothing: Any = SimpleNamespace(operand="float32")
    trial = Trial(nothing, nothing, {}, 1.0)
    monkeypatch.setattr(fused_trials, "_seconds", lambda fused, given: 1.0)
    results = [Kernels(0.0, 1.0, 0.5, 0.0), Kernels(0.0, 1.0, 0.75, 0.0), Kernels(0.0, math.inf, 0.5, 0.0)]
    trials: Any = [(trial, each) for each in results]
    found = fused_trials.checked(trials, lambda x: 1 / x, [x])
    assert [trial.measured for trial, _ in found] == [1.0, None, None]


def test_the_next_kernel_starts_early_where_each_pair_has_an_idle_multiprocessor() -> None:
    """It brings its first tiles into L2 then."""
    device = get_device("cuda/sm_90a")
    plan = BlockSchedule(1, 4, 9, copies="tensor", products="wgmma", release="end")
    for blocks, gains in ((48, False), (64, True), (96, False), (128, False)):
        program = BlockProgram.of(graphs.gated_mlp(64, 4096, 64 * blocks, 64, 64).block)
        late, early = (predicted(program, device, replace(plan, release=when)) for when in ("end", "asked"))
        assert (early < late) == gains


def test_what_torch_runs_faster_it_runs(cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searched, and from the database."""
    inputs = [draw(4, 64), draw(64, 32), draw(64, 32)]
    monkeypatch.setattr("ladder.api.superopt_task.torch_seconds", lambda function, given: 1e-9)
    for _ in range(2):
        found = ladder.superoptimize(gated, inputs, limits=QUICK, trials=1, seed=0)
        assert "none is faster, so torch runs it" in str(found)
        assert found.as_json()["unfused"] is True
        with monkeypatch.context() as without_kernels:
            without_kernels.setattr(Fused, "__call__", None)
            assert torch.equal(found(*inputs), gated(*inputs))
        with pytest.raises(ShapeError, match="optimised for"):
            found(inputs[0][:2], *inputs[1:])


def test_the_database_knows_shapes_types_and_devices(cache: None) -> None:
    program = program_of(gated, [draw(4, 64), draw(64, 32), draw(64, 32)])
    wider = program_of(gated, [draw(8, 64), draw(64, 32), draw(64, 32)])
    other = program_of(gated, [x.bfloat16() for x in (draw(4, 64), draw(64, 32), draw(64, 32))])
    limits = [Limits.of(program, name) for name in ("cuda/sm_90a", "cuda/sm_80")]
    database = Database(ladder.knobs.settings.cache_dir)
    known = [identity(one, limits[0]) for one in (program, wider, other)] + [identity(program, limits[1])]
    assert len({database.path(facts) for facts in known}) == 4


def test_gelus_are_fused(cache: None) -> None:
    """They are functions of which proofs know nothing but that equal operands give equal results."""
    inputs = [draw(8, 64), draw(64, 32), draw(64, 32)]
    program = lambda x, gate, up: F.gelu(x @ gate, approximate="tanh") * (x @ up)  # noqa: E731
    found = ladder.superoptimize(program, inputs, limits=QUICK, trials=1, seed=0)
    exact = program(*(x.double() for x in inputs))
    assert (found(*inputs).double() - exact).norm() <= 2e-3 * exact.norm()
    assert [node.operator for node in found.graph.nodes if node.inputs] == ["block"]


def mixed(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A norm into a product, relu, and a gate; two results."""
    y = F.relu(norm_matmul(x, w)) + 1.0
    return F.silu(y @ v), y


def test_what_cannot_be_proved_is_cut_out(cache: None) -> None:
    inputs = [draw(4, 16), draw(16, 32), draw(32, 16)]
    found = ladder.superoptimize(mixed, inputs, limits=replace(QUICK, operators=8), trials=1, seed=0)
    exact = mixed(*(x.double() for x in inputs))
    for y, wanted in zip(found(*inputs), exact, strict=True):
        assert (y.double() - wanted).norm() <= 2e-3 * wanted.norm()
    first, rest, last = found.parts
    assert first.operators[-1] == "matmul"
    assert rest.operators == ("relu", "add")
    assert "relu is outside LAX" in rest.reason
    assert "chain" in rest.plan
    assert last.operators == ("matmul", "silu")
    assert 0 < found.certificate.delta == sum(kernels.certificate.delta for kernels in found.kernels)
    assert "mixed in 3 parts" in str(found)
    assert [bool(part["kernels"]) for part in found.as_json()["parts"]] == [True, False, True]


def scaled_by_the_most(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """No block graph that a search knows: its maximum is a factor."""
    y = norm_matmul(x, w)
    return y * y.amax(-1, keepdim=True)


@pytest.mark.parametrize("is_faster", [True, False])
def test_what_has_no_graph_is_cut_in_halves(
    is_faster: bool, cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The halves run, unless torch runs all of it faster."""
    inputs = [draw(4, 16), draw(16, 32)]
    torch_takes = 2.0 if is_faster else 0.5
    monkeypatch.setattr(
        "ladder.api.superoptimize.torch_seconds",
        lambda call, given: torch_takes if call is scaled_by_the_most else 1.0,
    )
    found = ladder.superoptimize(
        scaled_by_the_most, inputs, limits=replace(QUICK, operators=8), trials=1, seed=0
    )
    exact = scaled_by_the_most(*(x.double() for x in inputs))
    assert (found(*inputs).double() - exact).norm() <= 2e-3 * exact.norm()
    first, rest = found.parts
    assert first.operators[-1] == "matmul"
    assert first.kernels is not None
    assert rest.operators == ("amax", "mul")
    assert "if the maxima had other values" in rest.reason
    assert ("none is faster, so torch runs it" in str(found)) is not is_faster
    assert found.as_json()["unfused"] is not is_faster


def quantized_mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * (x @ up.T)


def test_quantized_inputs_are_packed_weights() -> None:
    stored = [ladder.quantize(draw(64, 128), name, group_size=64) for name in ("int4", "nf4")]
    program = program_of(quantized_mlp, [draw(8, 128), *stored])
    assert dict(program.packed) == {"X1": "int4_g64", "X2": "nf4_g64"}
    x = draw(8, 128).double()
    exact = quantized_mlp(x, *(w.dequantize() for w in stored))
    found = evaluate(program.graph(), [x.numpy(), *(w.dequantize().numpy() for w in stored)])
    assert np.allclose(found, exact.numpy())
    with pytest.raises(ConversionError, match="only matmul's second operand"):
        program_of(lambda x, w: x @ (w + 1.0).T, [draw(8, 128), stored[0]])
    blocks = ladder.quantize(draw(64, 128), "int4", block=(32, 32))
    with pytest.raises(ConversionError, match="scales of 32 rows"):
        program_of(lambda x, w: x @ w.T, [draw(8, 128), blocks])


@pytest.mark.parametrize(
    "options", [{"ttype": "mxfp4"}, {"ttype": "uint4", "zero": "integer", "group_size": 64}]
)
def test_superoptimize_quantized_inputs(options: dict[str, Any], cache: None) -> None:
    """Packed once, decoded in the block."""
    inputs = [draw(8, 128), *(ladder.quantize(draw(64, 128), **options) for _ in range(2))]
    limits = replace(QUICK, operators=8, proofs=1, split=False)
    found = ladder.superoptimize(quantized_mlp, inputs, limits=limits, trials=1, seed=0, constants=(1, 2))
    exact = quantized_mlp(*decoded(inputs, torch.float64))
    assert (found(*inputs).double() - exact).norm() <= 1e-3 * exact.norm()
    assert found.best.lowering.constants == ("X1", "X2")
    (body,) = (node.body for node in found.graph.nodes if node.body is not None)
    assert [node.operator for node in body.nodes].count("load") == 3


def fused_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.silu(x @ w) * 2.0


def test_types_are_computed_as_asked(cache: None) -> None:
    """What converts to another type runs in torch, as a part of its own."""
    for convert in (lambda x: x.to(torch.int8).float(), lambda x: x.half().float()):
        function = lambda x, w, convert=convert: convert(x) * w + w  # noqa: E731
        x, w = torch.randint(-5, 6, (16, 16)).float(), draw(16, 16).float()
        found = ladder.superoptimize(function, [x, w], limits=QUICK, trials=1)
        for values in (x, x + 0.4, x * 1e3, x * 1e5):
            assert torch.allclose(found(values, w), function(values, w), rtol=1e-6, equal_nan=True)


def test_results_lie_as_the_functions(cache: None) -> None:
    function = lambda x, w: torch.relu((x * w + w).mT)  # noqa: E731
    x, w = draw(16, 32), draw(16, 32)
    found = ladder.superoptimize(function, [x, w], limits=QUICK, trials=1)
    assert found(x, w).stride() == function(x, w).stride() == (1, 32)
    assert torch.allclose(found(x, w), function(x, w), rtol=2e-3, atol=1e-3)


BFLOAT16 = {
    "a sum": lambda x, w, c: (x @ w) + c,
    "a quotient": lambda x, w, c: (x @ w) / (c * c + 1.0),
    "silu": lambda x, w, c: F.silu(x @ w) * c,
}


@pytest.mark.parametrize("name", BFLOAT16)
def test_products_of_bfloat16_on_the_cpu(name: str, cache: None) -> None:
    """A product's operand is read as bfloat16, not as the integer of its bits."""
    inputs = [draw(*shape).bfloat16() for shape in ((16, 64), (64, 32), (16, 32))]
    found = ladder.superoptimize(BFLOAT16[name], inputs, limits=replace(QUICK, proofs=1), trials=1)
    exact = BFLOAT16[name](*(x.double() for x in inputs))
    assert (found(*inputs).double() - exact).norm() <= 4 * 2**-8 * exact.norm()


def test_ties_of_the_model_go_to_more_threads() -> None:
    """nTrans has no loop: the model says nothing of warps and rows per block."""
    program = get_program("ntrans").resized(B=64, D=1024)
    report = search(program, replace(QUICK, operators=7, proofs=1), seed=0)
    first = candidates_of(report, get_device("cuda/sm_90a"), 1)[0]
    assert first.factors["Bg"] == 64
    assert first.lowering.schedules[0].row_warps == 16


def test_kernels_that_hardly_differ_come_last() -> None:
    """The first of many trials differ in tiles or schedule, not in how their sums are ordered alone."""
    program = get_program("rmsnorm_matmul").resized(B=16, K=2048, N=256)
    report = search(program, replace(QUICK, operators=8, proofs=6), seed=0)
    trials = candidates_of(report, get_device("cuda/sm_90a"), 64)

    def known(trial: Trial) -> tuple[Any, ...]:
        return (*sorted(trial.factors.items()), trial.lowering.schedules[trial.slowest])

    assert len(set(map(known, trials[:8]))) >= 6
    twin = replace(trials[0], found=report.found[-1])
    assert _various([trials[0], twin, trials[1]]) == [trials[0], trials[1], twin]


def test_graphs_that_load_more_are_ranked_too() -> None:
    """Bytes alone do not say which graph is fastest: all that were found are lowered."""
    program = get_program("rmsnorm_matmul").resized(B=16, K=2048, N=256)
    report = search(program, replace(QUICK, operators=8, proofs=6), seed=0)
    device = get_device("cuda/sm_90a")
    best = candidates_of(report, device, 1)[0].found
    others = [found for found in report.found if found is not best]
    assert len(others) >= 5
    assert candidates_of(replace(report, found=(*others, best)), device, 1)[0].found is best


def test_registers_limit_the_blocks_of_a_multiprocessor() -> None:
    """Two groups of attention over 128 rows would fit its shared memory twice, and its registers once."""
    block = graphs.attention(16, 256, 64, 4096, 128, 64).block
    device = get_device("cuda/sm_90a")
    geo = BlockGeometry(BlockProgram.of(block), device, BlockSchedule(2, 4, 2, copies="tensor"))
    assert device.shared_per_block // geo.shared_bytes == 2
    assert Estimate(geo, FITTED).fitting == 1


def test_loops_of_two_dimensions_are_lowered(cache: None) -> None:
    """A sum over a batch of products: batch and rows in one loop, on the CPU and on the simulator."""
    function = lambda x, w: (x @ w).sum(0, keepdim=True)  # noqa: E731
    inputs = [draw(32, 16, 64), draw(32, 64, 32)]
    program = program_of(function, inputs)
    report = search(program, replace(QUICK, operators=5, loops=2, split=False), seed=0)
    found = next(f for f in report.found if len(f.structure.mapping.loops) == 2)
    factors = {"D1l": 32, "D1t": 1, "D2t": 16, "D3l": 2, "D3t": 32, "D6g": 1, "D6t": 32}
    known = {name: factors[name] for d in program.sizes for name in found.structure.mapping.factors(d)}
    lowering = Lowering(instantiate(found.structure, program, known), (BlockSchedule(),))
    exact = function(*(x.double() for x in inputs))
    y = Fused.build(lowering, host_cpu())(*inputs)
    assert (y.double() - exact).norm() <= 1e-3 * exact.norm()
    wide = Lowering(lowering.graph, (BlockSchedule(groups=2, stages=3),))
    result = simulate_fused(wide, get_device("cuda/sm_90a"), inputs)
    assert not result.findings, result.report()
    assert result.relative_error(exact.numpy()) <= 1e-3
