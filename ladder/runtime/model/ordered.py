"""Weights reordered for oneDNN once, where torch's own functions reorder them in each call.

A weight is put in order again when it is another tensor or was changed in place. What keeps changing from
call to call is not worth it: torch's functions take it as it is, until two calls bring the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from ladder.ir.extents import product
from ladder.runtime.model.probes import Noted
from tile_types.tile import Tile

Settings = tuple[list[int], list[int], list[int], int]
"""Stride, padding, dilation, groups of a convolution."""

Order = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(weight, what it is multiplied with) -> the weight in order."""

CONVOLVE: Any = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
MULTIPLY: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""oneDNN's convolution and product with weights in order; None in a torch without it."""

LEAST_ORDERED, MOST_ORDERED = 1 << 16, 4_000_000
"""Elements of a matrix from which on order pays for what a call of oneDNN costs more than one of BLAS, and
up to which a second copy of it is kept."""


MOST_CHANGES = 2
"""Calls in a row with another weight each, from the first on, after which it is put in order no more."""


class Ordered:
    """One weight.

    order: Puts it in order.
    stays: Whether it is a constant: the same tensor, which nobody writes, in each call.
    watch: What looks at it together with others.
    """

    def __init__(self, order: Order, stays: bool, watch: Watch) -> None:
        self.order, self.stays, self.watch = order, stays, watch
        self.weight: torch.Tensor | None = None
        """That of the last call,"""
        self.noted = Noted(())
        """and what it was."""
        self.ordered: torch.Tensor | None = None
        self.changes = 0
        """Calls in a row that brought another weight than the call before."""

    def of(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Return the weight in order; None where torch's own function is to take the plain one."""
        if self.ordered is not None and (self.stays or (self.watch.holds and weight is self.weight)):
            return self.ordered
        if self.noted.hold((weight,)):
            self.changes = 0
        else:
            self.weight, self.noted, self.ordered = weight, Noted((weight,)), None
            self.changes += 1
            self.watch.moved = True
        if self.ordered is None and x.numel() > 0 and self.changes <= MOST_CHANGES:
            self.ordered = self.order(weight.detach(), x)
        return self.ordered


class Watch:
    """Looks at all weights in order of a frame before each of its runs: one comparison instead of many.

    What was noted of each weight is compared, so that it holds only where each would; after a run that met
    a changed weight each is looked at alone, until a run meets none.
    """

    def __init__(self) -> None:
        self.weights: WeakSet[Ordered] = WeakSet()
        self.moved = True
        """Whether another weight, or a changed one, came since the last run began."""
        self.holds = False
        """Whether the look before this run found all weights to be what they were."""
        self._noted: Noted | None = None

    def keep(self, stays: bool) -> Keep:
        """Return what makes an `Ordered` of this, told how to put the weight in order."""

        def kept(order: Order) -> Ordered:
            found = Ordered(order, stays, self)
            self.weights.add(found)
            self.moved = True
            return found

        return kept

    def look(self) -> None:
        """Find out, before a run, whether all weights are what they were."""
        if self.moved:
            self.moved, self.holds, self._noted = False, False, None
            return
        if self._noted is None:
            self._noted = Noted.together([each.noted for each in self.weights if not each.stays])
        self.holds = not self._noted.parts or self._noted.hold(self._noted.parts)


Keep = Callable[[Order], Ordered]
"""Makes the holder of one weight of a frame, given what puts it in order."""


def is_enabled() -> bool:
    """Tell whether torch has oneDNN, and may use it."""
    there = torch._C._has_mkldnn and CONVOLVE is not None and MULTIPLY is not None
    return there and bool(torch.backends.mkldnn.enabled)


def pays(weight: Tile) -> bool:
    """Tell whether a matrix is worth being put in order."""
    count = product(weight.shape)
    known = weight.ttype.name == "float32" and isinstance(count, int)
    return known and LEAST_ORDERED <= int(count) <= MOST_ORDERED and is_enabled()


def ordered_matrix(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Put a matrix ``[N, K]``, or ``[N, 1, 1, K]``, in order for a product with rows like x."""
    matrix = weight.reshape(weight.shape[0], -1).contiguous()
    found: Any = torch.ops.mkldnn._reorder_linear_weight(matrix, x.shape[0])
    return found  # type: ignore[no-any-return]


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x weight^T + bias`` of rows and a matrix in order."""
    return MULTIPLY(x.contiguous(), weight, _dense(bias), "none", [], "")  # type: ignore[no-any-return]


def convolve(
    image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, settings: Settings
) -> torch.Tensor:
    """Return the convolution of ``[N, C, H, W]`` with a weight in order."""
    stride, padding, dilation, groups = settings
    given = (image, weight, _dense(bias), padding, stride, dilation, groups)
    return CONVOLVE(*given, "none", [], "")  # type: ignore[no-any-return]


def _dense(bias: torch.Tensor | None) -> torch.Tensor | None:
    """Return a bias whose elements lie side by side: oneDNN's functions do not look at its stride."""
    return None if bias is None else bias.contiguous()
