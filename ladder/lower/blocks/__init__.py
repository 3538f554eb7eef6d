"""Block graphs of the superoptimizer as kernels.

`analysis` normalizes a block graph; `geometry` computes its sizes (`layouts` places its tiles in
shared memory). `kernel` emits for GPUs: `context` holds what its parts share,
`values`, `products`, `reductions` and `accumulators` compute fragments, `pipeline` copies
tiles; what vendors do differently is a table (`dialect`: `cuda`, `rocm`; `fragments`). `cpu`
emits functions for TVM's LLVM backend. Takes `ladder.ir` graphs only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ladder.ir.graph import Graph
from ladder.lower.blocks.schedule import BlockSchedule
from targets import TileDevice
from tile_types.errors import DeviceError

Emitter = Callable[["Graph", "TileDevice", BlockSchedule, str, Collection[str]], Any]


def emitter_for(device: TileDevice) -> Emitter:
    """Return what emits block graphs for a device.

    Raises DeviceError if nothing does.
    """
    if device.is_gpu:
        from ladder.lower.blocks.kernel import emit as emit_gpu

        return emit_gpu
    if device.kind == "llvm":
        from ladder.lower.blocks.cpu import emit as emit_cpu

        return emit_cpu
    raise DeviceError(f"block graphs are lowered to GPUs and to CPUs, not to {device.name}")


__all__ = ["BlockSchedule", "emitter_for"]
