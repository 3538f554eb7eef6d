"""The kernel of a problem on the simulator, at a shape small enough for a CPU, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ladder.api.evidence import token_evidence
from ladder.api.lowered import Lowered
from ladder.cli.console import finite
from ladder.cli.operands import cancellation, make_operands
from ladder.cli.problem import Problem
from ladder.ir import gemm_reference
from ladder.runtime.compile import ANY_M, Request
from ladder.runtime.packed import pack
from ladder.runtime.tokens import EIGHT_BIT
from schedules.estimate import gemm_at
from schedules.footprint import block_rows, k_slices
from schedules.schedule import GpuSchedule, Plan, Schedule

if TYPE_CHECKING:
    from ladder.api.evidence import Evidence
    from ladder.ir.gemm import Gemm
    from ladder.simulate import SimulationResult

SHOWN = 5
"""Findings that are told to people."""

ROWS_MORE, TOKENS_MORE, DEPTH_MORE = 3, 1, 37
"""How far the simulated extents reach into a second tile of N, of M, and of K."""


@dataclass(frozen=True)
class SimulatedCheck:
    """Result of simulating a kernel.

    m, n, k: The shape: that of the problem, or where it is larger one that leaves remainders everywhere.
    relative_error: Against float64.
    findings: What was wrong, as text; empty for a correct kernel.
    matrix_instructions: Executed, by kind.
    bank_conflicts: Passes through shared memory that conflicts cost, beyond those that are needed.
    blocks: Thread blocks simulated.
    """

    m: int
    n: int
    k: int
    relative_error: float
    findings: tuple[str, ...]
    matrix_instructions: dict[str, int]
    bank_conflicts: int
    blocks: int

    @classmethod
    def of(cls, shape: tuple[int, int, int], result: SimulationResult) -> SimulatedCheck:
        """Return what a simulation at a shape (M, N, K) found."""
        return cls(
            *shape,
            result.relative_error,
            tuple(map(str, result.findings)),
            dict(result.counts),
            sum(report.conflicts.extra for report in result.bank_conflicts),
            result.blocks[0],
        )

    def as_json(self) -> dict[str, Any]:
        changed = {"relative_error": finite(self.relative_error), "findings": list(self.findings)}
        return {**vars(self), **changed}

    def as_text(self) -> str:
        found = "; ".join(self.findings[:SHOWN]) or "no findings"
        more = len(self.findings) - SHOWN
        return (
            f"M={self.m} N={self.n} K={self.k}, {self.blocks} blocks: error {self.relative_error:.1e},"
            f" {found}{f' and {more} more' if more > 0 else ''}"
        )


@dataclass(frozen=True)
class TokenCheck:
    """Result for the kernel that quantises x before the product.

    evidence: What its code takes.
    relative_error: Of codes times scales against x, in the simulation.
    findings: What the simulation found wrong, as text.
    """

    evidence: Evidence
    relative_error: float
    findings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        checked = {"relative_error": finite(self.relative_error), "findings": list(self.findings)}
        return {**checked, **self.evidence.as_json()}

    def as_text(self) -> str:
        code = self.evidence.as_text()["code"].partition("; ")[2]
        return f"{code}; simulated: {'; '.join(self.findings[:SHOWN]) or 'no findings'}"


TOKEN_SOURCE, TOKEN_ROWS, TOKEN_COLUMNS = "float16", 3, 5000
"""Type of x before it is quantised, rows of the simulation, and columns at most."""


def token_check(problem: Problem, gemm: Gemm) -> TokenCheck | None:
    """Compile and simulate the kernel that quantises x to an operator's 8-bit type; None for other types.

    Raises MissingToolError, CompilerError if it cannot be compiled.
    """
    from ladder.simulate.operator import simulate_tokens

    if not gemm.token_scale or gemm.activation not in EIGHT_BIT:
        return None
    evidence = token_evidence(problem.device, TOKEN_SOURCE, gemm.activation, problem.k, gemm.token_group)
    x = np.random.default_rng(problem.seed).normal(size=(TOKEN_ROWS, min(problem.k, TOKEN_COLUMNS)))
    result = simulate_tokens(x.astype(TOKEN_SOURCE), gemm.activation, problem.device, group=gemm.token_group)
    return TokenCheck(evidence, result.relative_error, tuple(map(str, result.findings)))


def small_shape(gemm: Gemm, schedule: Schedule, m: int) -> tuple[int, int, int]:
    """Return M, N and K that fill every buffer of a schedule once and leave remainders in each dimension."""
    assert isinstance(schedule, GpuSchedule)
    depth = schedule.tile_k * k_slices(schedule) * (schedule.stages + 1)
    if gemm.group_size < gemm.k:
        depth = max(depth, 2 * gemm.group_size)
    tokens = schedule.tile_m + TOKENS_MORE
    return min(m, tokens), min(gemm.n, block_rows(schedule) + ROWS_MORE), min(gemm.k, depth + DEPTH_MORE)


def simulated_check(problem: Problem, lowered: Lowered) -> SimulatedCheck:
    """Simulate the kernel that serves the problem's M at a small shape, and compare it with float64.

    Raises UnknownCallError if the kernel calls something that the simulator has no semantics for.
    """
    from ladder.simulate.operator import simulate

    schedule = lowered.plan.schedule_for(problem.m)
    m, n, k = small_shape(lowered.request.gemm, schedule, problem.m)
    gemm = gemm_at(lowered.request.gemm, n, k)
    group = problem.group if problem.group is not None else -1
    small = replace(problem, m=m, n=n, k=k, group_size=None if problem.ttype.is_block else group)
    operands = make_operands(small, gemm)
    exact = gemm_reference(gemm, operands.x, operands.weight, operands.bias, operands.token_scale)
    request = Request(gemm, problem.device.name, Plan(((ANY_M, schedule),)))
    result = simulate(
        Lowered(request),
        operands.x,
        pack(gemm, problem.device, operands.weight),
        operands.bias,
        operands.token_scale,
        expected=exact,
        cancellation=cancellation([operands], exact),
    )
    return SimulatedCheck.of((m, n, k), result)
