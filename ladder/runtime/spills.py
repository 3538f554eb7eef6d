"""Kernels that do not spill registers: the next best schedule takes the place of one that does.

No estimate tells which values a compiler moves to memory; its report does. Whatever chooses among schedules
compiles them here, best first, until one does not spill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from ladder import faults
from schedules.spilling import TRIES
from tile_types.errors import ScheduleError

if TYPE_CHECKING:
    from ladder.runtime.build import Kernel
    from targets import TileDevice

SCRATCH = "scratch_bytes"
"""Memory of a lane in AMD's reports, where its spilled registers go."""


Built = TypeVar("Built")
Kernels = TypeVar("Kernels", bound="Iterable[Kernel]")


def spilled(resources: Mapping[str, Mapping[str, int]]) -> int:
    """Return what kernels spill by their compiler's report: bytes, on AMD GPUs registers and bytes."""
    reports = [report.items() for report in resources.values()]
    return sum(count for report in reports for name, count in report if "spill" in name or name == SCRATCH)


def least_spilling(built: Iterable[Built], kernels_of: Callable[[Built], Iterable[Kernel]]) -> Built:
    """Return the first of what was built from some schedules whose kernels do not spill.

    built: Of the best schedule first; each is compiled when it is asked for.
    kernels_of: Returns its kernels.
    Returns: Of `TRIES` that all spill, what spills least.
    """
    found: list[tuple[int, Built]] = []
    for one in islice(built, TRIES):
        found.append((sum(kernel.spilled for kernel in kernels_of(one)), one))
        if not found[-1][0]:
            break
    return min(found, key=itemgetter(0))[1]


def refuse_spills(kernels: Kernels, device: TileDevice) -> Kernels:
    """Return kernels; raises ScheduleError if those of an AMD GPU spill: none was timed to tell the cost."""
    spilling = [kernel for kernel in kernels if kernel.spilled]
    if spilling and device.vendor == "amd":
        raise ScheduleError(f"its kernels spill: {_counts(spilling)}")
    return kernels


def warn_of_spills(kernels: Kernels, device: TileDevice) -> Kernels:
    """Return kernels that are taken; warns once of each that spills, as do those of other schedules."""
    for kernel in kernels:
        if kernel.spilled:
            faults.warn_once(
                f"{device.name} {kernel.entry}",
                f"no schedule that was tried for {device.name} is free of spills: {_counts([kernel])} is"
                " taken, whose results are right, but which moves registers through memory and may be slow",
            )
    return kernels


def _counts(kernels: Iterable[Kernel]) -> str:
    """Return names and spills of kernels."""
    return ", ".join(f"{kernel.entry} ({kernel.spilled} registers or bytes)" for kernel in kernels)
