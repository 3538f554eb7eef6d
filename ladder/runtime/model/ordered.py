"""Weights reordered for oneDNN once, where torch's own functions reorder them in each call.

A weight is put in order again when it is another tensor or was changed in place. What keeps changing from
call to call is not worth it: torch's functions take it as it is, until two calls bring the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ladder.ir.extents import product
from ladder.runtime.model.probes import Probes
from tile_types.tile import Tile

Order = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(weight, what it is multiplied with) -> the weight in order."""

CONVOLVE: Any = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
MULTIPLY: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""oneDNN's convolution and product with weights in order; None in a torch without it."""

LEAST, MOST = 1 << 16, 4_000_000
"""Elements of a matrix from which on order pays for what a call of oneDNN costs more than one of BLAS, and
up to which a second copy of it is kept."""


MOST_CHANGES = 2
"""Calls in a row with another weight each, from the first on, after which it is put in order no more."""


class Ordered:
    """One weight.

    Parameters
    ----------
    order
        Puts it in order.
    stays
        Whether it is a constant: the same tensor, which nobody writes, in each call.
    """

    def __init__(self, order: Order, stays: bool = False) -> None:
        self.order, self.stays = order, stays
        self.known: tuple[Any, int, int] = (None, 0, 0)
        """The weight of the last call, its address, and how often it was changed in place."""
        self.ordered: torch.Tensor | None = None
        self.probes = Probes(())
        self.changes = 0
        """Calls in a row that brought another weight than the call before."""

    def of(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Return the weight in order; None where torch's own function is to take the plain one."""
        if self.stays and self.ordered is not None:
            return self.ordered
        version = 0 if weight.is_inference() else weight._version
        now = (weight, weight.data_ptr(), version)
        if self.known[0] is weight and self.known[1:] == now[1:] and self.probes.hold():
            self.changes = 0
        else:
            self.known, self.ordered, self.probes = now, None, Probes((weight,))
            self.changes += 1
        if self.ordered is None and x.numel() > 0 and self.changes <= MOST_CHANGES:
            self.ordered = self.order(weight.detach(), x)
        return self.ordered


def is_enabled() -> bool:
    """Tell whether torch has oneDNN, and may use it."""
    there = torch._C._has_mkldnn and CONVOLVE is not None and MULTIPLY is not None
    return there and bool(torch.backends.mkldnn.enabled)


def pays(weight: Tile) -> bool:
    """Tell whether a matrix is worth being put in order."""
    count = product(weight.shape)
    known = weight.ttype.name == "float32" and isinstance(count, int)
    return known and LEAST <= int(count) <= MOST and is_enabled()


def ordered_matrix(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Put a matrix ``[N, K]``, or ``[N, 1, 1, K]``, in order for a product with rows like x."""
    matrix = weight.reshape(weight.shape[0], -1).contiguous()
    found: Any = torch.ops.mkldnn._reorder_linear_weight(matrix, x.shape[0])
    return found  # type: ignore[no-any-return]


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x weight^T + bias`` of rows and a matrix in order."""
    return MULTIPLY(x.contiguous(), weight, bias, "none", [], "")  # type: ignore[no-any-return]
