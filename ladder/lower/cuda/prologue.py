"""Interface to what computes activation rows in a product's own kernel (`ladder.lower.chain.prologue`)."""

from __future__ import annotations

from typing import Any, Protocol

Expr = Any


class Prologue(Protocol):
    """A prologue of a kernel being emitted; its arguments are declared."""

    @property
    def columns(self) -> int:
        """Elements of an activation row."""

    @property
    def nbytes(self) -> int:
        """Shared memory of a block."""

    def prefetch(self, first: Expr, thread: Expr) -> None:
        """Bring small inputs into L2 while the kernel before may still run; by the ``first`` block."""

    def allocate(self, pool: Any) -> Any:
        """Return shared memory for the activation rows."""

    def emit(self, first: Expr, thread: Expr) -> None:
        """Compute all rows; the block may read them afterwards.

        first: Whether this block stores what else is computed.
        thread: This thread of the block.
        """
