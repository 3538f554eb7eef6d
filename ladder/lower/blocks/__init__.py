"""Block graphs of the superoptimizer as kernels.

`analysis` lays a block graph open, `geometry` sizes it (`layouts` and `allocate` place its tiles exactly,
`order` its barriers), `kernel` emits CUDA out of `values`, `cpu` functions for TVM's LLVM backend. Takes
`ladder.ir` graphs only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from ladder.lower.blocks.schedule import BlockSchedule
from tile_types.errors import DeviceError

if TYPE_CHECKING:
    from ladder.ir.graph import Graph
    from targets import TileDevice

Emitter = Callable[["Graph", "TileDevice", BlockSchedule, str, Collection[str]], Any]


def emitter_for(device: TileDevice) -> Emitter:
    """Return what emits block graphs for a device.

    Raises
    ------
    DeviceError
        If nothing does.
    """
    if device.kind == "cuda":
        from ladder.lower.blocks.kernel import emit as emit_cuda

        return emit_cuda
    if device.kind == "llvm":
        from ladder.lower.blocks.cpu import emit as emit_cpu

        return emit_cpu
    raise DeviceError(f"block graphs are lowered to CUDA and to CPUs, not to {device.name}")


__all__ = ["BlockSchedule", "emitter_for"]
