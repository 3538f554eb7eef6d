"""Memory-bound chains as TIR: loops over rows, everything else is an expression of the element's index.

`values` gives the expression of any value of a chain at an index, whatever views and joins lie between; it
is the same for all targets. `cpu` is the loop nest for CPUs. A kernel takes the chain's inputs and outputs
in order; symbolic sizes come first, as integers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tile_types.errors import DeviceError

if TYPE_CHECKING:
    from targets import TileDevice

EMITTERS = {"llvm": "ladder.lower.chain.cpu", "cuda": "ladder.lower.chain.gpu"}
"""Target kind -> module whose ``emit_chain(graph, device, name)`` emits a chain."""


def emitter(device: TileDevice) -> Callable[..., Any]:
    """Return what emits chains for a device.

    Raises
    ------
    DeviceError
        If nothing does.
    """
    if device.kind not in EMITTERS:
        raise DeviceError(f"chains of memory-bound operators have no kernels for {device.name} yet")
    emit: Callable[..., Any] = importlib.import_module(EMITTERS[device.kind]).emit_chain
    return emit
