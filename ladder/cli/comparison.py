"""Reports of a compiled product, and of what it computed beside float64."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from ladder.api.lowered import Lowered
from ladder.cli.operands import Operands, cancellation
from ladder.cli.problem import Problem
from ladder.cli.report import GemmReport
from ladder.ir import gemm_reference
from ladder.ir.gemm import Gemm
from ladder.ir.rounding import largest_error
from ladder.simulate.operator import explained, relative_error
from ladder.simulate.values import NUMPY
from schedules.cost import minimum_bytes


def compiled_report(problem: Problem, lowered: Lowered, start: float) -> GemmReport:
    """Compile for the target, which began at ``start``, and report what is known without running."""
    gemm = lowered.request.gemm
    kernels = lowered.kernels
    seconds = time.perf_counter() - start
    return GemmReport(
        target=problem.device.name,
        m=problem.m,
        n=problem.n,
        k=problem.k,
        weight=problem.ttype.name,
        activation=gemm.activation,
        output=gemm.output,
        group_size=gemm.group_size,
        zero=gemm.zero,
        bias=gemm.bias,
        epilogue=gemm.epilogue,
        seed=problem.seed,
        kernel=lowered.kernel(problem.m).entry,
        schedule=str(lowered.plan.schedule_for(problem.m)),
        compile_s=round(seconds, 3),
        from_cache=all(kernel.from_cache for kernel in kernels),
        bytes=minimum_bytes(gemm, problem.m),
        flops=2 * problem.m * problem.n * problem.k,
        tolerance=largest_error(gemm),
    )


def checked(report: GemmReport, operands: Operands, gemm: Gemm, result: torch.Tensor) -> GemmReport:
    """Compare a result with float64 on the decoded weights."""
    exact = gemm_reference(gemm, operands.x, operands.weight, operands.bias, operands.token_scale)
    return compared(report, result.double().cpu().numpy(), exact, cancellation([operands], exact))


def compared(report: GemmReport, found: Any, exact: Any, cancelled: float) -> GemmReport:
    """Add the error of results, and whether it is more than rounding explains.

    cancelled: `cancellation` of what was multiplied.
    """
    tolerance = explained(exact, NUMPY[report.output], report.tolerance * cancelled)
    error = relative_error(found, exact)
    # A NaN fails too: it is within nothing.
    passed = report.passed is not False and error <= tolerance
    return replace(report, relative_error=error, tolerance=tolerance, passed=passed)
