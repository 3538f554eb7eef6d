"""Memory-bound chains as TIR: loops over rows, everything else is an expression of the element's index.

`values` gives the expression of any value of a chain at an index, whatever views and joins lie between; it
is the same for all targets. `cpu` is the loop nest for CPUs. A kernel takes the chain's inputs and outputs
in order; symbolic sizes come first, as integers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tile_types.errors import DeviceError

if TYPE_CHECKING:
    from ladder.ir.graph import Graph
    from targets import TileDevice

NESTS = {"llvm": "ladder.lower.chain.cpu:CpuNest", "cuda": "ladder.lower.chain.gpu:GpuNest"}
"""Target kind -> ``module:class`` of the loop nest."""


def emit_chain(graph: Graph, device: TileDevice, name: str) -> Any:
    """Emit the PrimFunc ``(sizes..., inputs..., outputs...)`` of a chain; GPU arguments begin at 16 bytes.

    Raises
    ------
    DeviceError
        If nothing emits chains for the device.
    ScheduleError
        If the chain is no loop over rows.
    DTypeError
        If a type has no TIR form.
    """
    from ladder.lower import builder as b

    if device.kind not in NESTS:
        raise DeviceError(f"chains of memory-bound operators have no kernels for {device.name} yet")
    module, nest = NESTS[device.kind].split(":")
    # A kernel that starts early must not read before it has waited, whatever compilers know of its arguments.
    with b.function(name, noalias="pdl" not in device.features) as result:
        getattr(importlib.import_module(module), nest)(graph, device).emit()
    return result.func
