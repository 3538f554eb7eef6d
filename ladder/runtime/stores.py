"""``ladder::store``: parts that are written into slices of a tensor, as caches take keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ladder.runtime.registered import define

SLICED, SELECTED = 0, 1
"""Kinds of bounds: a range of an axis, and one place of it, which the part lacks."""

TO_THE_END = 2**63 - 1
"""End of a range that has none."""

EACH = 5
"""Numbers that say one kind of bounds: the kind, the axis, begin (or the place), end, step."""


def store(base: torch.Tensor, parts: Sequence[torch.Tensor], bounds: Sequence[int]) -> None:
    """Copy parts into slices of a tensor, one after the other.

    parts: Of types that torch converts and of shapes that it broadcasts to those of their slices.
    bounds: Of each part how many bounds follow, and these: `EACH` numbers each, of what those before show.
        They count as in ``torch.ops.aten.slice`` and ``select``: from the end if negative, ranges cut off.
    Raises IndexError, RuntimeError as torch does for places that there are not and shapes that do not fit.
    """
    at = 0
    for part in parts:
        view, count = base, bounds[at]
        for first in range(at + 1, at + 1 + count * EACH, EACH):
            kind, axis, begin, end, step = bounds[first : first + EACH]
            if kind == SELECTED:
                view = view.select(axis, begin)
            else:
                view = torch.ops.aten.slice.Tensor(view, axis, begin, end, step)
        view.copy_(part)
        at += 1 + count * EACH


def _nothing(base: torch.Tensor, parts: Sequence[torch.Tensor], bounds: Sequence[int]) -> None:
    """Tell that there is no result."""


STORE = define("store(Tensor(a!) base, Tensor[] parts, SymInt[] bounds) -> ()", store, _nothing)


def stored(form: Callable[..., Any]) -> Callable[..., Any]:
    """Return what computes the functional form of `STORE` without torch's dispatcher, which takes longer.

    form: The form, see `ladder.runtime.functional.functional_form`; plans call it with whole tensors alone.
    """

    def run(
        bases: Sequence[torch.Tensor], places: Sequence[int], own: Sequence[int], base: None,
        parts: Sequence[torch.Tensor], bounds: Sequence[int],
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        if not own:
            return form(bases, places, own, base, parts, bounds)  # type: ignore[no-any-return]
        store(bases[0], parts, bounds)
        return bases

    return run
