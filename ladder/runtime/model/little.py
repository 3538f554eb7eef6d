"""Kernels of open sizes on CPUs: with little work they run in the thread that calls them.

Where sizes are known, a kernel itself starts no threads for little work; kernels of open sizes start them for
any. That takes longer than the work, and much longer where other processes use the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ladder.runtime.library import alone
from ladder.runtime.model.sizes import CallSizes, is_fixed
from tile_types.tile import Extent


def kernel_of(entry: Any, now: CallSizes, elements: Sequence[Extent], most: int) -> Callable[[], Any]:
    """Return what gives the kernel for the sizes of the call at hand.

    entry: The kernel.
    elements: Numbers that are below ``most`` where there is little to compute; none if that is not asked.
    """
    lone = entry if is_fixed(tuple(elements)) else alone(entry)
    if lone is entry:
        return lambda: entry
    numbers = now.numbers(tuple(elements))
    return lambda: lone if max(numbers()) < most else entry
