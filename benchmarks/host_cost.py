"""What one call of a compiled product costs the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ladder.runtime.compile import Request
from ladder.runtime.kernel import CompiledGemm
from ladder.runtime.operator import matmul
from ladder.runtime.packed import PackedWeight


def host_cost_us(
    operator: CompiledGemm,
    x: torch.Tensor,
    packed: PackedWeight,
    calls: int = 2000,
    direct: Callable[[torch.Tensor, PackedWeight], torch.Tensor] | None = None,
) -> dict[str, float]:
    """Measure what one call costs the host before the kernel runs.

    Parameters
    ----------
    operator
        A compiled operator without bias and token scales.
    x
        Activations; on a GPU launches are asynchronous, so a small M gives the pure host cost. On a
        CPU the kernel's own time is part of ``"direct"`` and ``"kernel"`` alike; take the difference.
    packed
        A weight for it.
    calls
        How many calls to measure.
    direct
        The public callable, e.g. `ladder.Matmul`, to time as ``"direct"``; by default ``operator``.

    Returns
    -------
    Microseconds: ``"kernel"`` the bare launch, ``"direct"`` with checks and allocation,
    ``"operator"`` through ``torch.ops.ladder.matmul``.
    """
    entry, call = operator.entries[0], direct or operator
    y, weight = operator(x, packed), packed.tensors
    request = Request(operator.gemm).text
    ways = {
        "kernel": lambda: entry(x, *weight, y),
        "direct": lambda: call(x, packed),
        "operator": lambda: matmul(x, weight, None, None, request),
    }
    return {name: _host_us(way, calls, x.is_cuda) for name, way in ways.items()}


def _host_us(call: Callable[[], object], calls: int, is_cuda: bool) -> float:
    """Return the median over batches that leave the launch queue room, so that the host never waits."""
    batch, means = 200, []
    for _ in range(max(1, calls // batch)):
        if is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        means.append((time.perf_counter() - start) / batch * 1e6)
    return statistics.median(means)
