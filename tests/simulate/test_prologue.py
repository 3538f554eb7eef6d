"""Products whose activation rows are computed in their kernel, against the chain and the product apart."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from problems import gemm, gemv, problem_of
from test_found_plans import prepared_for_h200
from test_gated import Experts
from torch import nn

import ladder
from ladder import knobs
from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.ir.gemm import Gemm
from ladder.lower.build import emit, emit_with_prologue
from ladder.lower.chain import emit_chain
from ladder.lower.chain.prologue import PrologueForm
from ladder.partition import prologues
from ladder.runtime.model.prepared import from_data, to_data
from ladder.runtime.model.prologues import Described, prologue_jobs
from ladder.runtime.packed import pack
from ladder.simulate import simulate_launch
from ladder.simulate.operator import numpy_of
from schedules.schedule import GpuSchedule
from targets import get_device
from tile_types import quantize
from tile_types.arrays import numpy_dtype
from tile_types.errors import ScheduleError

H200 = get_device("cuda/sm_90a")


def digits(**fields: Any) -> GpuSchedule:
    return GpuSchedule("digits", 1, stages=2, warps=6, split_k=2, placement="accumulator", **fields)


def residual_norm(rows: tuple[int, ...], width: int, kind: str, layer: bool = False) -> tuple[Graph, str]:
    """Return the sum of two tensors, and its norm: of the root mean square, or of mean and variance."""
    g = GraphBuilder("chain")
    x, y = g.input("x", kind, (*rows, width)), g.input("y", kind, (*rows, width))
    w, last = g.input("w", kind, (width,)), len(rows)
    total = g.add("add", x, y)
    wide, share = g.add("convert", total, type="float32"), g.add("constant", value=1 / width, type="float32")
    if layer:
        mean = g.add("mul", g.add("reduce_sum", wide, axis=last), share)
        wide = g.add("sub", wide, mean)
    mean = g.add("mul", g.add("reduce_sum", g.add("square", wide), axis=last), share)
    mean = g.add("add", mean, g.add("constant", value=1e-6, type="float32"))
    normed = g.add("mul", w, g.add("convert", g.add("mul", wide, g.add("rsqrt", mean)), type=kind))
    return g.finish(total, normed), normed


WIDE = {"warp_rows": 32}
INT4 = {"weight": "int4", "scale": True, "output": "float16"}
CASES: dict[str, tuple[Gemm, GpuSchedule, tuple[int, ...], bool]] = {
    "gemv": (gemm(n=200, k=200, group_size=64, **INT4), gemv(), (1, 1), False),
    "gemv, three rows, warps of no power of two": (
        gemm(n=130, k=328, group_size=128, bias=True, **INT4), gemv(warps=6), (3,), False,
    ),
    "gemv, two blocks share K": (
        gemm(
            n=384, k=600, weight="uint3", scale=True, group_size=64, output="bfloat16",
            activation="bfloat16",
        ),
        gemv(**WIDE, placement="accumulator", cluster=2), (2, 1), True,
    ),
    "gemv, gate": (
        gemm(n=256, k=200, weight="nf4", scale=True, group_size=64, output="float16", gate="silu"),
        gemv(**WIDE), (1, 2), True,
    ),
    "float16": (gemm(n=128, k=72, weight="float16", output="float16"), gemv(warps=2, split_k=1), (1,), False),
    "digits": (gemm(n=256, k=200, group_size=128, **INT4), digits(**WIDE), (1,), False),
    "digits, gate, two blocks share K": (
        gemm(n=384, k=704, group_size=128, bias=True, gate="silu", **INT4), digits(**WIDE, cluster=2),
        (1, 1), True,
    ),
    "digits, two rows, long": (gemm(n=64, k=2056, group_size=128, **INT4), digits(), (2,), False),
}  # fmt: skip


def launched(function: Any, arrays: list[Any], results: int, **options: Any) -> None:
    outputs = tuple(range(-results, 0))
    result = simulate_launch(function, arrays, outputs=outputs, **options)
    assert not result.findings, result.findings[:3]


def apart(
    graph: Graph, value: str, given: list[Any], problem: Gemm, schedule: GpuSchedule, weights: list[Any]
):
    """Return the other result of a chain, and the product, by a kernel each."""
    kind = numpy_dtype(problem.activation)
    made = {name: np.full(graph.tile(name).shape, np.nan, kind) for name in graph.outputs}
    launched(emit_chain(graph, H200, "chain"), [*given, *made.values()], len(made))
    rows = made[value].reshape(-1, problem.k)
    y = np.full((len(rows), problem.columns), np.nan, numpy_dtype(problem.output))
    launched(emit(problem, H200, schedule, "product"), [rows, *weights, y], 1)
    return [made[name] for name in graph.outputs if name != value], y


@pytest.mark.parametrize("name", CASES)
def test_as_apart(name: str) -> None:
    problem, schedule, rows, layer = CASES[name]
    graph, value = residual_norm(rows, problem.k, problem.activation, layer)
    rng = np.random.default_rng(0)
    given = [
        rng.normal(size=node.tile.shape).astype(numpy_dtype(problem.activation)) for node in graph.inputs
    ]
    weights = [array.copy() for array in problem_of(problem, 1).arrays[1:]]
    if problem.weight == "float16":  # of random bits
        weights[-1] *= np.float32(2.0**-14)
    others, wanted = apart(graph, value, given, problem, schedule, weights)
    form = PrologueForm(graph, value)
    function = emit_with_prologue(form, problem, H200, schedule, "fused")
    sums = [np.full(other.shape, np.nan, other.dtype) for other in others]
    y = np.full(wanted.shape, np.nan, wanted.dtype)
    for order in ("together", "last warps first"):
        arrays = [*given, *sums, *weights, y]
        outputs = (len(given), -1)
        result = simulate_launch(function, arrays, outputs=outputs, order=order)
        assert not result.findings, result.findings[:3]
        for found, other in zip(sums, others, strict=True):
            assert np.array_equal(found.astype(np.float32), other.astype(np.float32))
        difference = y.astype(np.float64) - wanted.astype(np.float64)
        assert np.isfinite(difference).all()
        rounding = 2.0 ** (-8 if problem.output == "bfloat16" else -11)
        assert np.linalg.norm(difference) <= rounding * np.linalg.norm(wanted.astype(np.float64)), name


def test_what_is_no_number() -> None:
    """Rows of zeros, of NaN and with infinities come out as from kernels apart."""
    problem, schedule, _, _ = CASES["gemv, three rows, warps of no power of two"]
    graph, value = residual_norm((4,), problem.k, problem.activation)
    rng = np.random.default_rng(0)
    given = [rng.normal(size=node.tile.shape).astype(np.float16) for node in graph.inputs]
    given[0][0], given[1][0] = 0, -0.0
    given[0][1, 5], given[0][2, 7], given[1][3] = np.nan, np.inf, 65504
    given[0][3] = 65504
    weights = [array.copy() for array in problem_of(problem, 1).arrays[1:]]
    (total,), wanted = apart(graph, value, given, problem, schedule, weights)
    found, y = np.full_like(total, np.nan), np.full_like(wanted, np.nan)
    function = emit_with_prologue(PrologueForm(graph, value), problem, H200, schedule, "fused")
    result = simulate_launch(function, [*given, found, *weights, y], outputs=(len(given), -1))
    assert not result.findings, result.findings[:3]
    assert found.tobytes() == total.tobytes()
    assert np.isnan(wanted).any()
    assert np.array_equal(np.isnan(y), np.isnan(wanted))
    assert np.allclose(y, wanted, rtol=2e-3, atol=1e-4, equal_nan=True)


def test_what_is_refused() -> None:
    problem, schedule, _, _ = CASES["gemv"]
    graph, value = residual_norm((1,), problem.k, "float16")
    form = PrologueForm(graph, value)
    for wrong in (
        replace(problem, k=208),
        replace(problem, activation="bfloat16"),
        replace(problem, experts=2),
    ):
        with pytest.raises(ScheduleError, match="prologue is not for"):
            emit_with_prologue(form, wrong, H200, schedule, "fused")
    with pytest.raises(ScheduleError, match="no prologues"):
        emit_with_prologue(form, problem, H200, GpuSchedule("mma", 16, stages=2, warps=4), "fused")
    for rows, width, kind in (
        ((5,), 64, "float16"),
        ((0,), 64, "float16"),
        ((1,), 60, "float16"),
        ((1,), 64, "float32"),
        (("m",), 64, "float16"),
    ):
        with pytest.raises(ScheduleError):
            PrologueForm(*residual_norm(rows, width, kind))
    with pytest.raises(ScheduleError, match="too long"):
        emit_with_prologue(
            PrologueForm(*residual_norm((1,), 8192, "float16")),
            replace(problem, k=8192),
            H200,
            gemv(warps=2, split_k=1),
            "fused",
        )


class Gemma(nn.Module):
    """A root mean square norm whose weight counts from one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class Residual(nn.Module):
    """A sum, and a product of its norm."""

    def __init__(self, norm: type[nn.Module], bias: bool, kind: torch.dtype) -> None:
        super().__init__()
        self.norm = norm(128)
        self.product = nn.Linear(128, 192, bias=bias)
        self.to(kind)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        total = x + y
        return total, self.product(self.norm(total))


NORMS: dict[str, tuple[Any, bool, torch.dtype, tuple[int, ...]]] = {
    "root mean square": (nn.RMSNorm, False, torch.float16, (1, 1)),
    "layer norm, bias": (nn.LayerNorm, True, torch.float16, (2,)),
    "Gemma, bfloat16": (Gemma, False, torch.bfloat16, (1, 1)),
}


@pytest.mark.parametrize("name", NORMS)
def test_plans(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, bias, kind, rows = NORMS[name]
    torch.manual_seed(0)
    model = Residual(make, bias, kind).eval().requires_grad_(False)
    ladder.quantize_(model, "int4", group_size=64)
    given = [torch.randn(*rows, 128).to(kind) for _ in range(2)]
    with knobs.override(cache=False, found_graphs=False):
        found = prepared_for_h200(model, given, monkeypatch)
        with knobs.override(prologues=False):
            without = prepared_for_h200(model, given, monkeypatch)
    assert "chain" in [part.kind for part in without.parts]
    assert [part.kind for part in found.parts if part.kind != "view"] == ["prologue"]
    require_prologue(next(part for part in found.parts if part.kind == "prologue"))
    data = to_data(found)
    assert data is not None
    assert from_data(json.loads(json.dumps(data))) == replace(found, parts=list(found.parts))


class Routed(Residual):
    """Rows that are multiplied, given, and read once for each of two experts."""

    def __init__(self) -> None:
        super().__init__(nn.RMSNorm, True, torch.float16)
        self.experts = Experts(lambda rows: rows.chunk(2, -1)[0])

    def forward(self, x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> Any:
        total = x + y
        rows = self.norm(total)
        return total, rows, self.product(rows), self.experts(rows, ids, shares)


def test_rows_that_others_read_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Routed().eval().requires_grad_(False)
    ladder.quantize_(model, "int4", group_size=64)
    given = [torch.randn(1, 128).half(), torch.randn(1, 128).half(), torch.tensor([[3, 1]])]
    with knobs.override(cache=False, found_graphs=False):
        found = prepared_for_h200(model, [*given, torch.rand(1, 2).half()], monkeypatch)
    (part,) = (part for part in found.parts if part.kind == "prologue")
    assert json.loads(part.found)["copies"] == [[1, 128], [2, 1, 128]]
    require_prologue(part)
    (job,) = prologue_jobs(part, H200)
    assert next(iter(job.others())).key != job.key  # what takes its place where it spills
    with knobs.override(cache=False, found_graphs=False):  # one block stores them: no more than is soon done
        monkeypatch.setattr(prologues, "STORED", 1.0)
        parts = prepared_for_h200(model, [*given, torch.rand(1, 2).half()], monkeypatch).parts
    assert "prologue" not in [part.kind for part in parts]


class Between(Residual):
    """A product of rows to which something is added that is made of the same rows by another product."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.other = nn.Linear(128, 192, dtype=torch.float16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        rows = self.norm(x + y)
        return self.product(rows) + self.other(rows).sin()


def test_rows_of_which_a_bias_is_made_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Between(nn.RMSNorm, False, torch.float16).eval().requires_grad_(False)
    ladder.quantize_(model, "int4", group_size=64)
    given = [torch.randn(1, 128).half() for _ in range(2)]
    with knobs.override(cache=False, found_graphs=False):
        parts = prepared_for_h200(model, given, monkeypatch).parts
    assert [part.kind for part in parts].count("prologue") <= 1


def require_prologue(part: Any) -> None:
    """Simulate a part's kernel on random operands and compare with what the part means."""
    described = Described.parse(part.found)
    roles, rng, arrays, meant = dict(part.roles), np.random.default_rng(1), {}, {}
    for node in part.graph.inputs:
        shape, name = node.tile.known_shape, node.tile.ttype.name
        meant[node.name] = torch.from_numpy(rng.normal(size=shape)) * 0.5
        if node.tile.ttype.is_block:
            meant[node.name] = quantize(meant[node.name].float(), node.tile.ttype)
            arrays[node.name] = [numpy_of(array) for array in pack(part.gemm, H200, meant[node.name]).tensors]
            continue
        arrays[node.name] = [meant[node.name].numpy().astype(numpy_dtype(name))]
        meant[node.name] = arrays[node.name][0].astype(np.float64)
    names = [roles[f"X{at}"] for at in range(sum(role.startswith("X") for role in roles))]
    names += [roles[role] for role in ("B", "bias") if role in roles]
    inputs = [array for name in names for array in arrays[name]]
    tiles = [part.graph.tile(value) for value in part.graph.outputs]
    y, *others = [np.full(tile.known_shape, np.nan, numpy_dtype(tile.ttype.name)) for tile in tiles]
    chain, rest = inputs[: len(names) - 1 - ("bias" in roles)], inputs[len(names) - 1 - ("bias" in roles) :]
    given = [
        array.view(np.uint32) if array.dtype == np.int32 else array for array in (*chain, *others, *rest)
    ]
    flat = y.reshape(-1, part.gemm.columns)
    outputs = (*range(len(chain), len(chain) + len(others)), -1)
    result = simulate_launch(described.emit(part.gemm, H200, "kernel"), [*given, flat], outputs=outputs)
    assert not result.findings, result.report()
    wanted = evaluate(part.graph, [meant[node.name] for node in part.graph.inputs])
    bound = 1e-2 if part.gemm.output == "bfloat16" else 1e-3
    for got, exact in zip((y, *others), wanted, strict=True):
        error = np.linalg.norm(got.astype(np.float64).reshape(np.shape(exact)) - exact)
        assert error <= bound * np.linalg.norm(exact)
