"""Costs of moves on the GPUs that chains are lowered for."""

from __future__ import annotations

from ladder.movement.model import HOPPER, Machine
from targets import TileDevice

LAUNCH = 1.2e-6
"""Seconds of a launch on AMD GPUs (`schedules.cost_amd`)."""

MOST_THREADS = 256
"""TVM marks AMD kernels as having at most 256 threads."""

KEPT = 0.8
"""Share of the last cache that is still there for the next kernel."""

LAST_CACHE = {"gfx942": (256 << 20, 17.2e12), "gfx950": (256 << 20, 17.2e12)}
"""Architecture -> bytes and peak bytes per second of a cache behind L2 (CDNA3 and CDNA4 whitepapers)."""


def machine_of(device: TileDevice) -> Machine:
    """Return the costs that the model ranks mappings with.

    Those of an H200 are fitted; those of AMD GPUs follow from `targets.amd`: nothing was measured there,
    and what a block and a turn cost is the H200's.
    """
    if device.vendor != "amd":
        return HOPPER
    dram, l2 = device.layer("dram"), device.layer("l2")
    capacity, bandwidth = LAST_CACHE.get(device.arch, (l2.capacity, l2.bandwidth))
    hopper_latency = 700e-9
    return Machine(
        device=dram.bandwidth * dram.sustained,
        cache=min(bandwidth, l2.bandwidth) * l2.sustained,
        resident=capacity * KEPT,
        units=device.units,
        launch=LAUNCH,
        life=HOPPER.life * dram.latency / hopper_latency,
        resident_lanes=device.max_threads_per_unit,
        issue=device.units * device.vector_ops_per_cycle * device.clock,
        wave=device.warp,
        threads=MOST_THREADS,
    )
