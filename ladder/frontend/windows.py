"""The indices of windows over images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ladder.ir.extents import floordiv, total
from tile_types.errors import ShapeError
from tile_types.tile import Extent


def spread_over(values: Sequence[int], kernel: Sequence[Any]) -> list[int]:
    """Return one value per axis of the window; a single one serves all."""
    return list(values) * len(kernel) if len(values) == 1 else list(values)


def are_numbers(*settings: Sequence[Any]) -> bool:
    """Tell whether settings of windows are known, and no open sizes."""
    return all(isinstance(value, int) for values in settings for value in values)


def window_indexing(
    spatial: Sequence[Extent], kernel: Sequence[Any], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[str, tuple[tuple[str, Extent], ...]]:  # fmt: skip
    """Return the affine indices ``2*h0+r0-1 ...`` of windows and the extents of h and r.

    Raises ShapeError if what windows are like depends on open sizes.
    """
    if not are_numbers(kernel, stride, padding, dilation):
        raise ShapeError("windows whose extent, step, gap or border is an open size have no indexing")
    places, sizes = [], []
    for at, (extent, taps) in enumerate(zip(spatial, kernel, strict=True)):
        step, space, gap = stride[at], padding[at], dilation[at]
        reach = gap * (taps - 1) + 1
        count = total([floordiv(total([extent, 2 * space, -reach]), step), 1])
        sizes += [(f"h{at}", count), (f"r{at}", taps)]
        shift = f"-{space}" if space else ""
        places.append(f"{step}*h{at}+{gap}*r{at}{shift}")
    return " ".join(places), tuple(sizes)


def borders_rounded_up(
    spatial: Sequence[Any], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:  # fmt: skip
    """Return the border behind each axis that holds a last window which begins inside the image's own.

    That is torch's count of windows with ``ceil_mode``.
    """
    found = []
    for extent, taps, step, space, gap in zip(spatial, kernel, stride, padding, dilation, strict=True):
        reach = gap * (taps - 1) + 1
        count = -(-(extent + 2 * space - reach) // step) + 1
        count -= (count - 1) * step >= extent + space
        found.append(max(space, (count - 1) * step + reach - extent - space))
    return found
