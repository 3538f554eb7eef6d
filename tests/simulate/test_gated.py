"""Gated products by kernels of few activation rows, against the same products without their gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from problems import emitted, gemm, gemv, problem_of
from test_found_plans import prepared_for_h200
from torch import nn

import ladder
from ladder import knobs
from ladder.api.grouped_linear import GroupedLinear, mixture
from ladder.ir.gemm import Gemm
from ladder.ir.ops import get_operator
from ladder.runtime.compile import Request, gated_schedule, plan_for, request_for, streaming_schedule
from ladder.runtime.model import prepared
from ladder.runtime.model.prepared import grouped_request
from ladder.simulate import simulate_launch
from schedules.legal import is_legal
from schedules.schedule import GpuSchedule
from targets import get_device
from tile_types.errors import ScheduleError, ShapeError

H200 = get_device("cuda/sm_90a")


def digits(**fields: Any) -> GpuSchedule:
    return GpuSchedule("digits", 1, stages=2, warps=6, split_k=2, placement="accumulator", **fields)


WIDE = {"warp_rows": 32}
CASES: dict[str, tuple[Gemm, GpuSchedule, int]] = {
    "int4, digits": (
        gemm(n=256, k=200, weight="int4", scale=True, group_size=128, output="float16"), digits(**WIDE), 1,
    ),
    "int4, digits, two blocks share K": (
        gemm(n=384, k=700, weight="int4", scale=True, group_size=128, output="float16", bias=True),
        digits(**WIDE, cluster=2), 1,
    ),
    "int2, int8 activations": (
        gemm(n=128, k=200, weight="int2", activation="int8", output="bfloat16", token_scale=True),
        digits(**WIDE), 1,
    ),
    "int4, gemv": (
        gemm(n=384, k=200, weight="int4", scale=True, group_size=64, output="float16"), gemv(**WIDE), 5,
    ),
    "uint4 with zero points, bias": (
        gemm(n=256, k=333, scale=True, group_size=128, zero="float", output="float16", bias=True),
        gemv(**WIDE, warps=6), 1,
    ),
    "uint4, groups of 32 whose lanes share values": (
        gemm(n=384, k=1000, scale=True, group_size=32, zero="float", output="float16"),
        gemv(**WIDE, warps=6), 3,
    ),
    "uint3, two blocks share K": (
        gemm(
            n=384, k=600, weight="uint3", scale=True, group_size=64, output="bfloat16",
            activation="bfloat16",
        ),
        gemv(**WIDE, placement="accumulator", cluster=2), 2,
    ),
    "nf4": (gemm(n=256, k=200, weight="nf4", scale=True, group_size=64, output="float16"), gemv(**WIDE), 1),
    "mxfp4": (
        gemm(n=256, k=192, weight="fp4_e2m1", scale=True, group_size=32, power_scales=True, output="float16"),
        gemv(**WIDE), 1,
    ),
    "float16": (gemm(n=128, k=72, weight="float16", output="float16"), gemv(**WIDE, warps=2, split_k=1), 11),
}  # fmt: skip


def simulated(problem: Gemm, schedule: GpuSchedule, arrays: list[Any]) -> Any:
    dtype = {"float16": np.float16, "bfloat16": "bfloat16"}[problem.output]
    y = np.full((arrays[0].shape[0], problem.columns), np.nan, dtype)
    result = simulate_launch(emitted(problem, schedule), [*arrays, y], outputs=(-1,))
    assert not result.findings, result.findings[:3]
    return y


def gated(y: Any, name: str, last: bool) -> Any:
    """Return what a gate makes of a product, as it is defined: every step is rounded."""
    first, second = np.split(y, 2, axis=1)
    gate, other = (second, first) if last else (first, second)
    with np.errstate(all="ignore"):
        applied = get_operator(name).reference([gate.astype(np.float64)], {}).astype(y.dtype)
        return (applied.astype(np.float32) * other.astype(np.float32)).astype(y.dtype)


@pytest.mark.parametrize("name", CASES)
def test_halves_meet(name: str) -> None:
    problem, schedule, m = CASES[name]
    schedule = replace(schedule, tile_m=16) if m > 8 else schedule
    arrays = [array.copy() for array in problem_of(problem, m).arrays]
    if name == "float16":  # of random bits
        arrays[-1] *= np.float32(2.0**-14)
    plain = simulated(problem, schedule, arrays)
    assert np.isfinite(plain.astype(np.float32)).all()
    for gate, last in (("relu", False), ("relu", True), ("silu", False)):
        found = simulated(replace(problem, gate=gate, gate_last=last), schedule, arrays)
        wanted = gated(plain, gate, last).astype(np.float32)
        if gate == "relu":
            assert np.array_equal(found.astype(np.float32), wanted)
        else:
            steps = np.abs(wanted) * 2.0 ** (-6 if problem.output == "bfloat16" else -9) + 1e-6
            assert (np.abs(found.astype(np.float32) - wanted) <= steps).all()


def test_what_is_no_number() -> None:
    """Overflows, infinities and NaN of x and of bias come out as the product's own steps make them."""
    problem, schedule, _ = CASES["uint4 with zero points, bias"]
    arrays = [array.copy() for array in problem_of(problem, 8).arrays]
    x, bias = arrays[0], arrays[-1]
    x[1, 3], x[2, 5], x[3, :], x[4, 0] = np.nan, np.inf, 0, -np.inf
    bias[:6] = 65504, -65504, np.inf, -np.inf, np.nan, -0.0
    bias[128:134] = 65504, 65504, 0, -0.0, 1, np.inf
    x[5] = 1e4
    plain = simulated(problem, schedule, arrays)
    assert np.isinf(plain).any()
    assert np.isnan(plain).any()
    for gate in ("relu", "silu", "gelu"):
        found = simulated(replace(problem, gate=gate), schedule, arrays).astype(np.float32)
        wanted = gated(plain, gate, False).astype(np.float32)
        assert np.array_equal(np.isnan(found), np.isnan(wanted))
        close = np.isclose(found, wanted, rtol=4e-3, atol=1e-4) | np.isnan(wanted)
        assert close.all(), (gate, found[~close], wanted[~close])


class Gated(nn.Module):
    """Gate and up as two layers, or as one whose columns are halves."""

    def __init__(self, act: Any, layers: int = 2, last: bool = False, wide: bool = False) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(128, 256 // layers) for _ in range(layers)])
        self.act, self.last, self.wide = act, last, wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [layer(x) for layer in self.inner]
        one, two = found if len(found) == 2 else found[0].chunk(2, -1)
        one, two = (two, one) if self.last else (one, two)
        return (self.act(one.float()) * two).half() if self.wide else self.act(one) * two


ACT = nn.functional
PATTERNS: dict[str, tuple[Any, tuple[str, bool] | None]] = {
    "silu": (lambda: Gated(ACT.silu), ("silu", False)),
    "gelu, up first": (lambda: Gated(ACT.gelu, last=True), ("gelu", True)),
    "relu": (lambda: Gated(ACT.relu), ("relu", False)),
    "one layer": (lambda: Gated(ACT.silu, 1), ("silu", False)),
    "one layer, up first": (lambda: Gated(ACT.silu, 1, last=True), ("silu", True)),
    "not rounded between": (lambda: Gated(ACT.silu, wide=True), None),
    "of the same half": (lambda: Gated(lambda one: ACT.silu(one) * 2.0), None),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_gates_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, wanted = PATTERNS[name]
    torch.manual_seed(0)
    model = ladder.quantize_(make().half().eval().requires_grad_(False), "int4", group_size=64)
    monkeypatch.setattr(prepared, "with_found_graphs", lambda found, *_: found)
    monkeypatch.setattr(prepared, "gated_schedule", lambda *_: gemv(**WIDE))
    with knobs.override(cache=False):
        parts = prepared_for_h200(model, torch.randn(1, 1, 128).half(), monkeypatch).parts
    gates = [(part.gemm.gate, part.gemm.gate_last) for part in parts if part.gemm and part.gemm.gate]
    assert gates == ([] if wanted is None else [wanted])
    assert ("chain" in [part.kind for part in parts]) == (wanted is None)


def grouped(**fields: Any) -> ladder.GroupedMatmul:
    op = ladder.GroupedMatmul(3, 256, 200, "int4", group_size=128, target=H200.name)
    op.request = replace(op.request, gemm=replace(op.gemm, slots=5, **fields))
    return op


def test_experts_have_gates_of_their_own() -> None:
    """Each slot gets the gate of its expert's halves; what is no number stays in its slot."""
    torch.manual_seed(0)
    packed = grouped().pack([ladder.quantize(torch.randn(256, 200), "int4", group_size=128) for _ in "012"])
    x, owners = torch.randn(5, 1, 200).half(), torch.tensor([2, 0, 3, 2, 1], dtype=torch.int32)
    x[1, 0, 7], x[3, 0, 5] = torch.nan, torch.inf
    here = [0, 1, 3, 4]
    plain = ladder.simulate(grouped(), x, packed, ranges=owners)
    assert not plain.findings
    for gate, last in (("relu", False), ("silu", True)):
        found = ladder.simulate(grouped(gate=gate, gate_last=last), x, packed, ranges=owners)
        assert not found.findings
        wanted = gated(plain.y[here], gate, last).astype(np.float32)
        assert np.isnan(wanted[1]).all()
        np.testing.assert_allclose(found.y[here].astype(np.float32), wanted, rtol=4e-3, atol=1e-4)


class Experts(nn.Module):
    """A token's experts, chosen outside."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        stacks = [ladder.quantize(torch.randn(4 * n, 128), "int4", group_size=64) for n in (256, 128)]
        self.up, self.down = (GroupedLinear.from_stack(w, 4, dtype=torch.float16) for w in stacks)
        self.gate = gate

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return mixture(x, ids, weights, self.up, self.gate, self.down)


@pytest.mark.parametrize(("gate", "chains"), [(ACT.silu, 1), (lambda one: one.sigmoid() * 2.0, 2)])
def test_gates_of_experts_are_found(gate: Any, chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(rows: torch.Tensor) -> torch.Tensor:
        one, two = rows.chunk(2, -1)
        return gate(one) * two

    model, x = Experts(halves), torch.randn(1, 128).half()
    given = [x, torch.tensor([[3, 1]]), torch.rand(1, 2).half()]
    with knobs.override(cache=False):
        parts = prepared_for_h200(model, given, monkeypatch).parts
    requests = [found for part in parts if (found := grouped_request(part))]
    assert [(found.gemm.gate, found.gemm.slots) for found in requests] == [
        ("silu" if chains == 1 else "", 2), ("", 2),
    ]  # fmt: skip
    behind = parts[[bool(grouped_request(part)) for part in parts].index(True) + 1 :]
    assert [part.kind for part in behind].count("chain") == chains


def test_gates_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ladder.quantize_(Gated(ACT.silu).half().eval().requires_grad_(False), "int4", group_size=64)
    monkeypatch.setattr(prepared, "with_found_graphs", lambda found, *_: found)
    with knobs.override(cache=False, gated_products=False):
        parts = prepared_for_h200(model, torch.randn(1, 1, 128).half(), monkeypatch).parts
    assert not [part for part in parts if part.gemm and part.gemm.gate]
    assert "chain" in [part.kind for part in parts]


def test_schedules_of_gates() -> None:
    """What serves the product without its gate serves it where it can; for many rows nothing does."""
    own = Gemm(512, 256, "int4", group_size=128, gate="silu")
    found = gated_schedule(own, H200, 1)
    assert isinstance(found, GpuSchedule)
    assert found.pipeline in ("gemv", "digits")
    assert is_legal(own, H200, found)
    assert gated_schedule(own, H200, 4096) is None
    with pytest.raises(ScheduleError, match="few activation rows"):
        request_for(own, H200, 4096)


@pytest.mark.parametrize("weight", ["int4", "nf4"])
def test_products_that_more_is_fused_into_stream_weights(weight: str) -> None:
    """They do so unless the plan's own kernel is faster by more than is saved."""
    gemm = Gemm(1024, 1024, weight, group_size=64)
    own = plan_for(Request(gemm, H200.name)).schedule_for(1)
    fused = streaming_schedule(gemm, H200, 1, saved=1.0)
    assert isinstance(fused, GpuSchedule)
    assert fused.pipeline in ("gemv", "digits")
    assert streaming_schedule(gemm, H200, 1, saved=-1.0) == own


def test_what_is_refused() -> None:
    problem, schedule, _ = CASES["int4, gemv"]
    own = replace(problem, gate="silu")
    assert is_legal(own, H200, schedule)
    assert not is_legal(own, H200, replace(schedule, warp_rows=16))
    with pytest.raises(ScheduleError, match="does not serve gate"):
        emitted(own, GpuSchedule("mma", 16, stages=2, warps=4))
    for wrong in ({"n": 192}, {"epilogue": ("relu",)}, {"residual": True}):
        with pytest.raises(ShapeError, match="gated product takes"):
            replace(own, **wrong)
    with pytest.raises(ShapeError, match="there is none"):
        replace(problem, gate_last=True)
