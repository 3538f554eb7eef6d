"""`ladder.simulate`: what it takes, what it returns, and what it says when it cannot."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from problems import emitted, gemm, gemv, mma, problem_of, run
from rewriting import Once, called, rewrite, with_arguments
from tvm import ir

import ladder
from ladder.cli.operands import cancellation, make_operands
from ladder.cli.problem import Problem as GemmProblem
from ladder.ir.rounding import BOUNDS
from ladder.simulate import UnknownCallError, simulate_launch
from ladder.simulate.banks import Banks
from ladder.simulate.extents import SimulationError
from ladder.simulate.launch import SimulationResult
from ladder.simulate.operator import judged
from ladder.simulate.values import NUMPY


@pytest.fixture(scope="module")
def weight() -> ladder.QuantizedTensor:
    torch.manual_seed(0)
    return ladder.quantize(torch.randn(130, 200), "int4", group_size=64)


def _operator(**fields: object) -> ladder.Matmul:
    return ladder.Matmul(N=130, K=200, weight="int4", group_size=64, target="cuda/sm_90a", **fields)


@pytest.mark.costly
@pytest.mark.parametrize("m", [1, 33])
def test_an_operator(weight: ladder.QuantizedTensor, m: int) -> None:
    op, x = _operator(), torch.randn(m, 200).half()
    exact = x.double() @ weight.dequantize().double().T
    result = ladder.simulate(op, x, op.pack(weight), expected=exact)
    assert not result.findings, result.report()
    assert result.relative_error < 5e-4
    assert result.y.shape == (m, 130)
    assert result.traffic["global write y"] >= m * 130 * 2  # the last tile may repeat tokens
    assert result.traffic["global read words"] >= 130 * 200 // 2
    assert sum(result.counts.values()) > 0


def test_a_bias_and_eight_bits(weight: ladder.QuantizedTensor) -> None:
    op = _operator(activation="int8", bias=True)
    result = ladder.simulate(op, torch.randn(3, 200).half(), op.pack(weight), torch.randn(130))
    assert not result.findings, result.report()
    assert np.isfinite(result.y).all()


@pytest.mark.parametrize("activation", ["float16", "int8"])
def test_experts(activation: str) -> None:
    """The tokens of five experts, one without any, and rows of nobody at both ends."""
    torch.manual_seed(1)
    op = ladder.GroupedMatmul(
        E=5, N=70, K=200, weight="int4", group_size=64, activation=activation, target="cuda/sm_90a"
    )
    weights = [ladder.quantize(torch.randn(70, 200), "int4", group_size=64) for _ in range(5)]
    x, offsets = torch.randn(24, 200).half(), torch.tensor([1, 4, 4, 9, 20, 23], dtype=torch.int32)
    exact = torch.full((24, 70), torch.nan, dtype=torch.float64)
    for expert, weight in enumerate(weights):
        rows = slice(int(offsets[expert]), int(offsets[expert + 1]))
        exact[rows] = x[rows].double() @ torch.as_tensor(weight.dequantize()).T
    expected = exact if activation == "float16" else None
    result = ladder.simulate(op, x, op.pack(weights), ranges=offsets, expected=expected)
    assert not result.findings, result.report()
    rows = exact.numpy()[1:23]
    error = np.linalg.norm(result.y[1:23] - rows) / np.linalg.norm(rows)
    assert error <= (5e-4 if activation == "float16" else 2e-2)
    with pytest.raises(ladder.ShapeError, match="ranges"):
        ladder.simulate(op, x, op.pack(weights))


def test_slots_that_name_their_experts() -> None:
    """As a call takes them: they were refused."""
    op = ladder.GroupedMatmul(3, 33, 64, "int4", group_size=32, target="cuda/sm_80")
    weights = [ladder.quantize(torch.randn(33, 64), "int4", group_size=32) for _ in range(3)]
    x, named = torch.randn(2, 5, 64).half(), torch.tensor([2, 0], dtype=torch.int32)
    decoded = torch.stack([torch.as_tensor(weights[expert].dequantize()) for expert in named.tolist()])
    expected = x.double() @ decoded.mT
    result = ladder.simulate(op, x, op.pack(weights, "cpu"), ranges=named, expected=expected)
    assert not result.findings, result.report()


def test_wrong_values_are_a_finding(weight: ladder.QuantizedTensor) -> None:
    op, x = _operator(), torch.randn(2, 200).half()
    result = ladder.simulate(op, x, op.pack(weight), expected=torch.ones(2, 130))
    assert result.kinds() == {"wrong values"}


def test_what_it_cannot_simulate(weight: ladder.QuantizedTensor) -> None:
    op = _operator()
    with pytest.raises(ladder.DeviceError, match="NVIDIA and AMD"):
        ladder.simulate(op, torch.randn(2, 200).half(), op.pack(weight), target="cpu")
    with pytest.raises(ladder.DTypeError, match="bfloat16"):
        ladder.simulate(op, torch.randn(3, 200).bfloat16(), op.pack(weight))
    with pytest.raises(ladder.ShapeError, match="K=200"):
        ladder.simulate(op, torch.randn(2, 100).half(), op.pack(weight))
    with pytest.raises(ladder.UnknownNameError, match="together"):
        ladder.simulate(op, torch.randn(2, 200).half(), op.pack(weight), order="togther")


def test_arrays_must_fit() -> None:
    problem = gemm()
    function = emitted(problem, mma())
    with pytest.raises(SimulationError, match="arrays"):
        simulate_launch(function, problem_of(problem, 3).arrays)
    y = np.zeros((4, problem.n), np.float32)
    with pytest.raises(SimulationError, match="is float64 where float32 is expected"):
        simulate_launch(function, [*problem_of(problem, 3).arrays, y[:3].astype(np.float64)])
    with pytest.raises(SimulationError, match="extent 4 where 3 is expected"):
        simulate_launch(function, [*problem_of(problem, 3).arrays, y])


def _renamed(s: object) -> object:
    return with_arguments(s, lambda arguments: [ir.StringImm("ladder_unheard_of"), *arguments[1:]])


def test_unknown_helpers_are_named() -> None:
    problem = gemm(weight="nf4", group_size=64, scale=True)
    from problems import wgmma

    function = emitted(problem, wgmma())
    change = Once(lambda s: called(s).startswith("ladder_"), _renamed, 0)
    with pytest.raises(UnknownCallError, match="ladder_unheard_of"):
        run(rewrite(function, change), problem, 3)


def test_lines_are_those_of_the_script() -> None:
    problem = gemm(k=450)
    from rewriting import remove

    changed = rewrite(emitted(problem, mma()), remove("tirx.cuda.cta_sync", 0))
    result, _ = run(changed, problem, 3)
    lines = changed.script().splitlines()
    assert result.findings
    for finding in result.findings:
        assert finding.line
        assert lines[finding.line - 1].strip().startswith(finding.statement.removesuffix("...")[:60])


def test_traffic_of_a_kernel_that_reads_weights_once() -> None:
    problem = gemm(n=64, k=256)
    result, _ = run(emitted(problem, gemv()), problem, 1)
    assert result.traffic["global read argument 1"] == 64 * 256 // 2
    assert result.blocks[0] == result.blocks[1]


@pytest.mark.parametrize(
    ("addresses", "width", "expected"),
    [
        (np.arange(32) * 4, 4, (1, 1)),
        (np.zeros(32, int), 4, (1, 1)),
        (np.arange(32) * 8, 4, (2, 1)),
        (np.arange(32) * 128, 4, (32, 1)),
        (np.arange(32) * 16, 16, (4, 4)),
        (np.arange(32) * 32, 16, (8, 4)),
        (np.arange(32) * 128, 16, (32, 4)),
        (np.arange(32) * 8, 8, (2, 2)),
        (np.arange(32) * 2, 2, (1, 1)),
        (np.where(np.arange(32) < 3, np.arange(32) * 128, -1), 4, (3, 1)),
    ],
)
def test_bank_conflicts(addresses: np.ndarray, width: int, expected: tuple[int, int]) -> None:
    assert Banks().passes(addresses, width) == expected


@pytest.mark.parametrize(("times", "kinds"), [(1.0, set()), (1.01, {"wrong values"})])
def test_few_results_above_powers_of_two_may_be_rounded_by_more(times: float, kinds: set[str]) -> None:
    """Half a unit of bfloat16 there is 3.9e-3 of the result, more than rounding usually costs."""
    exact = np.full((1, 2), 1 + 2**-8 * 0.99)
    found = (exact * times).astype(ml_dtypes.bfloat16)
    assert judged(SimulationResult((found,), (), {}, ()), exact, 3e-3).kinds() == kinds


@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 1), (1, 5), (16, 16)])
@pytest.mark.parametrize("activation", ["float16", "bfloat16"])
def test_decoded_weights_may_be_rounded_once_whatever_the_number_of_results(
    activation: str, m: int, n: int
) -> None:
    kind = NUMPY[activation]
    for seed in range(40):
        problem = GemmProblem("int4", activation, 32, m, n, 256, output=activation, seed=seed)
        operands = make_operands(problem, problem.gemm)
        weight, x = operands.weight.dequantize("float64").numpy(), operands.x.double().numpy()
        exact, found = x @ weight.T, (x @ weight.astype(kind).astype(np.float64).T).astype(kind)
        bound = BOUNDS[activation] * cancellation([operands], exact)
        assert not judged(SimulationResult((found,), (), {}, ()), exact, bound).findings
        wrong = (2 * exact).astype(kind)
        assert judged(SimulationResult((wrong,), (), {}, ()), exact, bound).findings or bound > 1
