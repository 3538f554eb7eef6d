"""Which products of plain halves are for kernels of ours, on packed weights, and which for the library."""

from __future__ import annotations

from functools import lru_cache

from ladder.ir.gemm import Gemm
from schedules.estimate import Estimator
from schedules.policy import rank
from schedules.tuning import TuningDatabase
from targets import TileDevice

FEW_ROWS = 16
"""M up to which reading the weight takes longest: our kernels do that at the bandwidth of memory."""

LIBRARY, LIBRARY_RATE = 3.0e-6, 0.71
"""Seconds that a product of torch's takes beside its arithmetic, and the fraction of the cores' peak that it
reaches; fitted to products of 512 to 1576 activation rows of models on an H200."""

FUNCTION = 1.1e-12
"""Seconds per element that a function adds to a kernel of ours: its warps end together."""

CHAIN = 1.2e-6
"""Seconds that a kernel of its own for the function after a product takes beside moving its elements."""


@lru_cache(maxsize=1024)
def serves_dense(device: TileDevice, gemm: Gemm, m: int) -> bool:
    """Tell whether a kernel of ours is predicted to be faster than torch's product.

    For large M that is where ours also computes the function that follows: torch's result would be read
    and written once more.
    """
    if m <= FEW_ROWS:
        return True
    return bool(gemm.epilogue) and predicted(device, gemm, m) <= predict_library(device, gemm, m)


def serves_experts(device: TileDevice, gemm: Gemm, rows: int) -> bool:
    """Tell whether a kernel of ours multiplies rows by the matrices of experts, rather than torch's.

    gemm: With matrices as they lie.
    rows: Of all experts together.

    Cores of the fifth generation are torch's where arithmetic takes longer than memory: ours multiply such
    matrices by instructions of the generations before alone.
    """
    return "tcgen05" not in device.features or rows <= FEW_ROWS * gemm.experts


def predicted(device: TileDevice, gemm: Gemm, m: int) -> float:
    """Return the seconds that our fastest kernel is predicted to take; what was measured alike counts."""
    estimator = Estimator(gemm, device, TuningDatabase().measurements(device, gemm))
    best = [candidate.schedule for candidate in rank(gemm, device, m)[:1]]
    function = FUNCTION * m * gemm.n if gemm.epilogue else 0.0
    return function + min(estimator.seconds(schedule, m) for schedule in (*estimator.measured, *best))


def predict_library(device: TileDevice, gemm: Gemm, m: int) -> float:
    """Return the seconds that torch's product, and a kernel for what follows it, are predicted to take."""
    core, dram = device.core_for(gemm.activation), device.layers[0]
    flops = 2 * m * gemm.n * gemm.k
    product = LIBRARY + flops / (core.ops_per_cycle * device.units * device.clock * LIBRARY_RATE)
    moved = 2 * 2 * m * gemm.n / dram.bandwidth
    return product + (CHAIN + moved if gemm.epilogue else 0.0)
