"""Copies by the tensor memory accelerator, from global to shared memory; their bytes arrive at a barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.lower import Expr
from ladder.lower import builder as b

TENSOR_COPY = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
"""Of a box of a tensor map."""

MATRIX_COPY = TENSOR_COPY.replace("2d", "3d")
"""Of a box of one of several matrices."""

BULK_COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
"""Of neighbouring bytes."""


SWIZZLE_128, LINES_128 = 3, 2
"""CU_TENSOR_MAP_SWIZZLE_128B, and CU_TENSOR_MAP_L2_PROMOTION_L2_128B."""


def map_handle() -> Expr:
    """Declare a tensor map, which the host makes; return its handle."""
    return I.Bind(T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap").ty)


def tiled_map(
    source: Any, dtype: str, extents: Sequence[Expr], pitches: Sequence[Expr], box: Sequence[Expr],
    swizzle: int = SWIZZLE_128, where: Expr | None = None,
) -> Expr:  # fmt: skip
    """Make a tensor map on the host, of boxes of a tensor, zero outside; return its handle.

    extents, box: Along each axis, the last one first: of the tensor, and of a box.
    pitches: Bytes from one position to the next along each axis but that one.
    where: What must hold for there to be a map; None: nothing.
    """
    handle, ones = map_handle(), (1,) * len(box)
    with b.where(where):
        call = T.call_packed(
            "runtime.cuTensorMapEncodeTiled",
            *(handle, dtype, len(extents), source.data, *extents, *pitches),
            *(*box, *ones, 0, swizzle, LINES_128, 0),
        )
        b.emit(call)
    return handle


def bulk_copy(target: Expr, source: Expr, nbytes: int | Expr, barrier: Expr) -> None:
    """Emit a copy of neighbouring bytes, a multiple of 16 of them."""
    b.ptx(BULK_COPY, target, source, T.uint32(nbytes) if isinstance(nbytes, int) else nbytes, barrier)
