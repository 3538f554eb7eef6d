"""Runs products on the simulator."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from gemm_cases import BOUNDS, NUMPY, Problem, gemm, gemv, mma
from rewriting import rewrite

from ladder.ir.gemm import Gemm
from ladder.lower.build import emit
from ladder.simulate import SimulationResult, simulate_launch
from schedules.schedule import GpuSchedule
from targets import get_device

__all__ = ["BOUNDS", "NUMPY", "Problem", "gemm", "gemv", "mma"]

ROUNDED = {"float16": 5e-4, "bfloat16": 3e-3}
"""Error that the output type alone may cause."""


def wgmma(**fields: Any) -> GpuSchedule:
    """Return a small wgmma schedule."""
    return GpuSchedule(**{"pipeline": "wgmma", "tile_m": 16, "stages": 3, "warps": 4, **fields})


def emitted(problem: Gemm, schedule: GpuSchedule, arch: str = "sm_90a") -> Any:
    """Return the PrimFunc of a schedule."""
    return emit(problem, get_device(f"cuda/{arch}"), schedule, "simulated")


def bound_of(problem: Gemm) -> float:
    """Return the relative error that a problem's kernels may have."""
    return max(BOUNDS[problem.activation], ROUNDED.get(problem.output, 0.0))


@lru_cache(maxsize=16)
def problem_of(problem: Gemm, m: int, target: str = "cuda/sm_90a") -> Problem:
    """Return the operands of a problem; kernels do not change them."""
    return Problem(problem, m, target=target)


class SimulatedKernel:
    """A kernel to call with arrays: whatever the simulator finds is an error."""

    def __init__(self, function: Any, outputs: tuple[int, ...] = (-1,), target: str = "cuda/sm_90a") -> None:
        self.function, self.outputs, self.target = function, outputs, target

    def __call__(self, *arrays: Any, eager: bool = False, reverse: bool = False) -> None:
        """Run the whole grid; outputs that no thread stores are the caller's matter."""
        order = "last warps first" if reverse else "together"
        result = simulate_launch(self.function, arrays, target=self.target, outputs=self.outputs, order=order)
        found = [str(finding) for finding in result.findings if finding.kind != "unwritten"]
        assert not found, found[:5]


def run(
    function: Any, problem: Gemm, m: int, target: str = "cuda/sm_90a", **options: Any
) -> tuple[SimulationResult, float]:
    """Simulate a kernel on random operands and a poisoned output; return the result and its error.

    The error is relative to the sums before an activation.
    """
    operands = problem_of(problem, m, target)
    y = np.full((m, problem.n), np.nan, NUMPY[problem.output])
    result = simulate_launch(function, [*operands.arrays, y], target=target, **options)
    difference = y.astype(np.float64) - operands.expected
    return result, float(np.linalg.norm(difference)) / operands.size


def require_right(function: Any, problem: Gemm, *given: Any, **options: Any) -> SimulationResult:
    """Simulate a kernel as `run`: nothing is found, and the error is one that it may have."""
    result, error = run(function, problem, *given, **options)
    assert not result.findings, result.report()
    assert error <= bound_of(problem), f"error {error:.1e}"
    return result


def require_caught(mutant: Any, kernel: Any, problem: Gemm, m: int, target: str = "cuda/sm_90a") -> None:
    """Simulate a changed kernel: what is wrong with it has the kind and the words that a mutant names.

    mutant: Has ``change``, which returns a change of statements, ``kind`` and ``words``.
    """
    changed = rewrite(kernel, mutant.change())
    same = bool(changed.script() == kernel.script())
    assert not same, "the mutation changed nothing"
    result, error = run(changed, problem, m, target)
    if mutant.kind == "wrong values":
        assert not error <= bound_of(problem)
        return
    named = [str(f) for f in result.findings if f.kind == mutant.kind and mutant.words in str(f)]
    assert named, f"expected {mutant.kind} ({mutant.words}), got error {error:.1e} and\n{result.report()}"
