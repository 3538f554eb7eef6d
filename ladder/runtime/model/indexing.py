"""``x[i, j, ...]`` of few numbers that are broadcast to many: one number for each row, then one copy.

torch's operator on CPUs makes a tensor of the full shape of each of them first. Bounds are checked as there,
but on the numbers as they are given, before they are broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

Indices = Sequence[torch.Tensor | None]

FEWEST = 2048
"""Rows from which on this is faster."""

BROADCAST = 4
"""How many times more rows there are than numbers given for them."""

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Types whose rows torch does not select by number."""


def indexed(call: Callable[[torch.Tensor, Indices], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``aten::index`` on CPUs; ``call`` is torch's, which does the rest and raises the errors."""

    def run(x: torch.Tensor, indices: Indices) -> torch.Tensor:
        rows = _rows(x, indices) if x.device.type == "cpu" else None
        if rows is None:
            return call(x, indices)
        rest = x.shape[len(indices) :]
        table = x.reshape(-1, *rest)
        return table.index_select(0, rows.reshape(-1)).view(*rows.shape, *rest)

    return run


def _rows(x: torch.Tensor, indices: Indices) -> torch.Tensor | None:
    """Return which rows of the first axes, counted through, are taken; None where torch's way serves."""
    given = [each for each in indices if each is not None and each.dtype in (torch.int64, torch.int32)]
    if not 2 <= len(given) == len(indices) <= x.dim() or not x.numel() or x.dtype in UNSIGNED:
        return None
    try:
        shape: torch.Size = torch.broadcast_shapes(*(each.shape for each in given))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    if math.prod(shape) < max(FEWEST, BROADCAST * sum(each.numel() for each in given)):
        return None
    parts = []
    for axis, numbers in enumerate(given):
        extent = x.shape[axis]
        least, most = map(int, torch.aminmax(numbers))
        if not -extent <= least <= most < extent:
            return None
        place = numbers.long() if least >= 0 else torch.where(numbers < 0, numbers + extent, numbers).long()
        parts.append(place * math.prod(x.shape[axis + 1 : len(given)]))
    return _sum(parts).expand(shape)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Add what is broadcast: first what varies along the last axes, then what makes the sum grow least."""
    total = min(parts, key=_axes_behind)
    rest = [part for part in parts if part is not total]
    while rest:
        grown = [math.prod(torch.broadcast_shapes(total.shape, part.shape)) for part in rest]  # type: ignore[no-untyped-call]
        total = total + rest.pop(grown.index(min(grown)))
    return total


def _axes_behind(part: torch.Tensor) -> int:
    """Return how many axes lie behind the last along which a tensor varies."""
    return next((at for at, extent in enumerate(reversed(part.shape)) if extent > 1), part.dim())
