"""Products of consecutive rows with a matrix of each group, which PyTorch has for float32 on CPUs.

transformers calls an operator of its own in its place while a compiler traces. Its loop in Python takes twice
as long at the sizes of a token; the results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ALIGNED = 16
"""Bytes by which PyTorch wants the rows of matrices to begin apart."""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

by_torch: Any = getattr(torch.nn.functional, "grouped_mm", None)
"""PyTorch's own; None before 2.10."""


def grouped(call: Product) -> Product:
    """Return ``(rows, matrices, ends) -> products``: row `r` times the matrix of the group that it is in.

    call: The operator that also does what PyTorch's own does not take.
    """

    def run(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if not serves(rows, matrices, ends):
            return call(rows, matrices, ends)
        found: torch.Tensor = by_torch(rows, matrices, offs=ends)
        last = int(ends[-1])
        if last < len(found):
            found[last:] = 0
        return found

    return run


def in_turn(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each group, which end before ``ends[e]``, by its matrix; others are zeros."""
    y = rows.new_zeros(len(rows), matrices.shape[2])
    start = 0
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        if start < end:
            torch.mm(rows[start:end], matrix, out=y[start:end])
            start = end
    return y


def serves(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> bool:
    """Tell whether PyTorch's own product takes these operands."""
    return (
        by_torch is not None
        and rows.device.type == "cpu"
        and rows.dtype is matrices.dtype is torch.float32
        and ends.dtype is torch.int32
        and len(rows) > 0
        and len(ends) > 0
        and all(map(is_dense, (rows, matrices)))
    )


def is_dense(operand: torch.Tensor) -> bool:
    """Tell whether the rows or the columns of matrices are dense and begin at aligned bytes."""
    outer, inner = operand.stride()[-2:]
    far, near = (outer, inner) if inner == 1 else (inner, outer)
    dense = operand.shape[-1] if inner == 1 else operand.shape[-2]
    fits = near == 1 and far >= max(1, dense) and far * operand.itemsize % ALIGNED == 0
    return fits and operand.data_ptr() % ALIGNED == 0
