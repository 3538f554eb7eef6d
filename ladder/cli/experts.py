"""``ladder gemm --experts``: a grouped GEMM (one launch for all experts), checked like a single product."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ladder.api.experts import GroupedMatmul
from ladder.api.lowered import Lowered
from ladder.cli.check import SimulatedCheck, small_shape
from ladder.cli.comparison import compared, compiled_report
from ladder.cli.console import Progress, silent
from ladder.cli.operands import Operands, activations, cancellation, make_weight
from ladder.cli.problem import Problem, why_not_here
from ladder.ir import gemm_reference
from ladder.runtime.compile import ANY_M
from ladder.runtime.experts import host_ranges
from ladder.simulate.operator import simulate
from schedules.schedule import Plan
from tile_types.arrays import torch_dtype
from tile_types.errors import ParseError

if TYPE_CHECKING:
    from ladder.cli.report import GemmReport
    from ladder.ir.gemm import Gemm
    from tile_types import QuantizedTensor

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
