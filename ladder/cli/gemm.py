"""``ladder gemm``: compile one product, run it, compare it with float64, time it beside torch.

With ``--experts`` it is a grouped GEMM, one launch for all experts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ladder.api.experts import GroupedMatmul
from ladder.api.lowered import Lowered
from ladder.api.matmul import Matmul
from ladder.cli.amd_gpu import with_run
from ladder.cli.check import SimulatedCheck, simulated_check, small_shape, token_check
from ladder.cli.comparison import checked, compared, compiled_report
from ladder.cli.console import Progress, silent
from ladder.cli.measure import Call, ceiling, copies_for, side_by_side
from ladder.cli.operands import Operands, activations, cancellation, make_operands, make_weight
from ladder.cli.problem import Problem, why_not_here
from ladder.cli.report import GemmReport
from ladder.ir import gemm_reference
from ladder.ir.gemm import Gemm
from ladder.runtime.compile import ANY_M
from ladder.runtime.experts import host_ranges
from ladder.runtime.packed import PackedWeight
from ladder.simulate.operator import simulate
from schedules.schedule import Plan
from targets import TileDevice
from tile_types import QuantizedTensor
from tile_types.arrays import torch_dtype
from tile_types.errors import ParseError

SIMULATED = 3
"""Experts of the simulated launch: one has no tokens."""


@dataclass(frozen=True)
class ExpertOperands:
    """Operands of all experts, and the exact result.

    x: ``[T, K]``, or ``[E, M, K]`` if masked.
    weights: ``[N, K]`` quantized, one per expert.
    ranges: int32 offsets ``[E + 1]`` or, if masked, counts ``[E]``.
    bias, token_scale: ``[E, N]`` and a scale per row, or None.
    exact: float64 ``[rows, N]``; NaN in rows of no expert.
    cancellation: Of the products of all experts.
    """

    x: torch.Tensor
    weights: list[QuantizedTensor]
    ranges: torch.Tensor
    bias: torch.Tensor | None
    token_scale: torch.Tensor | None
    exact: Any
    cancellation: float

    @property
    def owned(self) -> Any:
        """Which rows an expert has."""
        return ~np.isnan(self.exact[:, 0])


def run_experts(problem: Problem, *, check: bool = True, step: Progress = silent) -> GemmReport:
    """Compile the products of ``problem.experts`` experts; simulate, or run, and compare with float64.

    ``problem.m`` is what most experts have; the second has none, and every third half of it.

    Raises LadderError if the problem cannot be, or a compiler is missing or fails.
    """
    if not problem.device.is_gpu:
        raise ParseError("a launch of several experts' products is a kernel of GPUs: name one as --target")
    step(f"compiling for {problem.device.name}")
    start = time.perf_counter()
    lowered = operator_of(problem).lower(problem.device).serving(problem.m)
    report = replace(compiled_report(problem, lowered, start), experts=problem.experts)
    report = replace(report, flops=report.flops * problem.experts, bytes=report.bytes * problem.experts)
    if check and problem.device.is_gpu:
        step("looking at the code and simulating the kernel")
        found = simulated_experts(problem, lowered)
        report = replace(
            report,
            evidence=lowered.evidence(max(problem.m, 1)),
            simulated=found,
            relative_error=found.relative_error,
            passed=not found.findings,
        )
    reason = why_not_here(problem.device)
    if reason or not check:
        return replace(report, not_run=f"{reason or 'not asked to'}; the kernel was compiled, but not run")
    step("running, and computing the exact result in float64")
    drawn = draw(problem, operator_of(problem).gemm)
    return compared(report, run(problem, drawn), drawn.exact[drawn.owned], drawn.cancellation)


def operator_of(problem: Problem, plan: Plan | None = None) -> GroupedMatmul:
    """Return the operator that computes a problem."""
    gemm = problem.gemm
    return GroupedMatmul(
        problem.experts,
        problem.n,
        problem.k,
        problem.ttype,
        gemm.activation,
        masked=problem.masked,
        target=problem.device,
        plan=plan,
        output=gemm.output,
        group_size=problem.group,
        zero=None if gemm.zero == "none" else gemm.zero,
        bias=gemm.bias,
        epilogue=gemm.epilogue,
    )


def tokens_of(problem: Problem) -> list[int]:
    """Return the tokens of every expert."""
    shares = {1: 0, 2: problem.m // 2}
    return [shares.get(expert % 3, problem.m) for expert in range(problem.experts)]


def draw(problem: Problem, gemm: Gemm) -> ExpertOperands:
    """Draw operands from the problem's seed, and multiply them exactly."""
    random = torch.Generator().manual_seed(problem.seed)
    counts = tokens_of(problem)
    rows = problem.m * problem.experts if problem.masked else sum(counts)
    weights = [make_weight(problem, random) for _ in counts]
    x = activations(torch.randn(rows, problem.k, generator=random), gemm.activation)
    scale = torch.rand(rows, generator=random) / 64 + 1 / 64 if gemm.token_scale else None
    bias = None
    if gemm.bias:
        bias = torch.randn(problem.experts, problem.n, generator=random).to(torch_dtype(gemm.output))
    given = torch.tensor(counts if problem.masked else [0, *accumulate(counts)], dtype=torch.int32)
    exact = np.full((rows, problem.n), np.nan)
    single, products = replace(gemm, experts=0, masked=False), []
    for expert, start, stop in host_ranges(gemm, given, rows):
        if start < stop:
            own = None if bias is None else bias[expert]
            scales = None if scale is None else scale[start:stop]
            products.append(Operands(x[start:stop], weights[expert], own, scales))
            exact[start:stop] = gemm_reference(single, x[start:stop], weights[expert], own, scales)
    cancelled = cancellation(products, np.nan_to_num(exact))
    shape = (problem.experts, problem.m) if problem.masked else (rows,)
    scale = None if scale is None else scale.reshape(shape)
    return ExpertOperands(x.reshape(*shape, problem.k), weights, given, bias, scale, exact, cancelled)


def simulated_experts(problem: Problem, lowered: Lowered) -> SimulatedCheck:
    """Simulate the kernel for a few experts at a small shape, and compare it with float64."""
    schedule = lowered.plan.schedule_for(problem.m)
    m, n, k = small_shape(lowered.request.gemm, schedule, max(problem.m, 1))
    group = None if problem.ttype.is_block else problem.group or -1
    experts = min(problem.experts, SIMULATED)
    small = replace(problem, m=m, n=n, k=k, group_size=group, experts=experts)
    operator = operator_of(small, Plan(((ANY_M, schedule),)))
    drawn = draw(small, operator.gemm)
    packed = operator.pack(drawn.weights)
    result = simulate(
        operator,
        drawn.x,
        packed,
        drawn.bias,
        drawn.token_scale,
        ranges=drawn.ranges,
        expected=drawn.exact,
        cancellation=drawn.cancellation,
    )
    return SimulatedCheck.of((m, n, k), result)


def run(problem: Problem, drawn: ExpertOperands) -> Any:
    """Run the kernel on the target; returns the rows of experts."""
    operator = operator_of(problem)
    packed = operator.pack(drawn.weights, "cuda")
    moved = [None if t is None else t.cuda() for t in (drawn.bias, drawn.token_scale)]
    result = operator(drawn.x.cuda(), packed, drawn.ranges.cuda(), *moved)
    return result.double().cpu().numpy().reshape(len(drawn.exact), -1)[drawn.owned]


SIXTEEN_BIT = ("float16", "bfloat16", "float32")
INT4_PACK_GROUPS = (32, 64, 128, 256)
"""Group sizes that torch's int4 kernel takes."""

INNER_K_TILES = 2
INT4_OFFSET = 8
"""torch's int4 kernel computes (code - 8) * scale + zero with unsigned codes."""


def torch_baselines(gemm: Gemm, operands: Operands, device: TileDevice) -> dict[str, list[Call]]:
    """Return calls by name, each on weights that together exceed the cache.

    The linear layer has the decoded weight in the activation's type, bfloat16 if that has 8 bits.
    """
    return dict(_baselines(gemm, operands, device))


def _baselines(gemm: Gemm, operands: Operands, device: TileDevice) -> Iterator[tuple[str, list[Call]]]:
    name = gemm.activation if gemm.activation in SIXTEEN_BIT else "bfloat16"
    x = operands.x.to(torch_dtype(name))
    weight = _dense(operands.weight).to(device=x.device, dtype=x.dtype)
    weights = [weight.clone() for _ in range(copies_for(weight.nbytes, device))]
    yield f"{name} F.linear", [partial(torch.nn.functional.linear, x, copy) for copy in weights]
    if _int4_applies(gemm, device):
        yield "_weight_int4pack_mm_for_cpu", _int4_calls(x, operands.weight, device)


def _dense(weight: QuantizedTensor) -> torch.Tensor:
    return torch.as_tensor(weight.dequantize("float32"))


def _int4_applies(gemm: Gemm, device: TileDevice) -> bool:
    fits = gemm.weight == "int4" and gemm.zero == "none" and gemm.activation == "bfloat16"
    shaped = gemm.group_size in INT4_PACK_GROUPS and gemm.k % gemm.group_size == 0 and gemm.n % 16 == 0
    known = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    return fits and shaped and known and not device.is_gpu


def _int4_calls(x: torch.Tensor, weight: QuantizedTensor, device: TileDevice) -> list[Call]:
    aten = torch.ops.aten
    codes = torch.as_tensor(weight.codes()).to(torch.int32)
    packed = aten._convert_weight_to_int4pack_for_cpu((codes + INT4_OFFSET) % 16, INNER_K_TILES)
    scale = torch.as_tensor(weight.scale).T.to(x.dtype)
    scales = torch.stack([scale, torch.zeros_like(scale)], dim=-1).contiguous()
    group = min(weight.group_size, weight.shape[1])
    return [
        partial(aten._weight_int4pack_mm_for_cpu, x, packed.clone(), group, scales)
        for _ in range(copies_for(packed.nbytes, device))
    ]


def run_gemm(
    problem: Problem,
    *,
    check: bool = True,
    timed: bool = True,
    simulated: bool = True,
    step: Progress = silent,
) -> GemmReport:
    """Compile a product and, where its target is here, run, check and time it.

    problem: What to multiply, and for which target.
    check: Whether to compare with float64; for a GPU also to look at its code.
    timed: Whether to time it; but on AMD GPUs beside torch.
    simulated: Whether a check of a GPU's kernel also simulates it on the CPU.
    step: Called with what is being done.
    Raises LadderError if the problem cannot be, or a compiler is missing or fails.
    """
    if problem.masked and not problem.experts:
        raise ParseError("--masked says how the tokens of experts lie: give --experts too")
    if problem.experts:
        return run_experts(problem, check=check, step=step)
    step(f"compiling for {problem.device.name}")
    operator, reason = problem.operator(), why_not_here(problem.device)
    lowered, start = operator.lower(problem.device), time.perf_counter()
    if reason or problem.device.kind == "rocm":  # only the kernel that serves this M is of interest
        lowered = lowered.serving(problem.m)
    report = compiled_report(problem, lowered, start)
    if check and problem.device.is_gpu:
        step(f"looking at the code{' and simulating the kernel' if simulated else ''}")
        report = with_evidence(report, problem, lowered, simulated)
    if reason:
        done = "compiled and simulated, but not timed" if report.simulated else "compiled, but not run"
        return replace(report, not_run=f"{reason}; the kernel was {done}")
    step("drawing and packing operands")
    operands = make_operands(problem, operator.gemm)
    if problem.device.kind == "rocm":
        step("running on the GPU")
        packed = operator.pack(operands.weight)
        return with_run(report, lowered, operands, packed, check=check, timed=timed)
    place = "cuda" if problem.device.is_gpu else "cpu"
    packed, operands = operator.pack(operands.weight, place), operands.to(place)
    if check:
        step("computing the exact result in float64")
        report = checked(report, operands, operator.gemm, multiply(operator, operands, packed))
    if timed and problem.m:
        step("timing beside torch")
        report = clocked(report, problem, operator, operands, packed)
    return report


def with_evidence(
    report: GemmReport, problem: Problem, lowered: Lowered, simulated: bool = True
) -> GemmReport:
    """Add what the code of the kernel says, and if asked what it does on the simulator with any rows."""
    report = replace(report, evidence=lowered.evidence(max(problem.m, 1)))
    if not problem.m or not simulated:
        return report
    found, tokens = simulated_check(problem, lowered), token_check(problem, lowered.request.gemm)
    return replace(
        report,
        simulated=found,
        tokens=tokens,
        relative_error=found.relative_error,
        passed=not found.findings and not (tokens and tokens.findings),
    )


def multiply(operator: Matmul, operands: Operands, packed: PackedWeight) -> torch.Tensor:
    """Run the kernel once."""
    return operator(operands.x, packed, bias=operands.bias, token_scale=operands.token_scale)


def clocked(
    report: GemmReport, problem: Problem, operator: Matmul, operands: Operands, packed: PackedWeight
) -> GemmReport:
    """Time the kernel beside torch, every weight coming from memory."""
    device = problem.device
    ours: list[Call] = [
        partial(multiply, operator, operands, copy_of(packed))
        for _ in range(copies_for(packed.nbytes, device))
    ]
    theirs = torch_baselines(operator.gemm, operands, device)
    times = side_by_side({"ladder": ours, **theirs}, device)
    baselines = {name: round(times[name], 3) for name in theirs}
    best = min(baselines, key=lambda name: baselines[name])
    limit = ceiling(device, report.activation)
    return replace(
        report,
        time_us=round(times["ladder"], 3),
        baseline_us=baselines[best],
        baseline=best,
        baselines_us=baselines,
        roofline_fraction=round(limit.seconds(report.bytes, report.flops) * 1e6 / times["ladder"], 6),
        roofline=limit.source,
    )


def copy_of(packed: PackedWeight) -> PackedWeight:
    """Return the same weight elsewhere in memory."""
    arrays = {name: array.clone() for name, array in packed.arrays.items()}
    return replace(packed, arrays=arrays)
