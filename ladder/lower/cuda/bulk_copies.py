"""Copies by the tensor memory accelerator, from global to shared memory; their bytes arrive at a barrier."""

from __future__ import annotations

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b

TENSOR_COPY = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
"""Of a box of a tensor map."""

MATRIX_COPY = TENSOR_COPY.replace("2d", "3d")
"""Of a box of one of several matrices."""

BULK_COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
"""Of neighbouring bytes."""


def bulk_copy(target: Expr, source: Expr, nbytes: int | Expr, barrier: Expr) -> None:
    """Emit a copy of neighbouring bytes, a multiple of 16 of them."""
    b.ptx(BULK_COPY, target, source, T.uint32(nbytes) if isinstance(nbytes, int) else nbytes, barrier)
