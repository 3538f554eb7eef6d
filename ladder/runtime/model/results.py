"""Results of a plan: outputs of its graph, extents, and arguments that it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ladder.runtime.model.sizes import Sizes, evaluator

Result = Callable[[Sequence[Any], Sequence[Any], Sizes], Any]
"""(Arguments, the graph's outputs, sizes) -> a result."""


class ArgumentPart(NamedTuple):
    """A result that is an argument which the graph writes, or lies in its memory.

    `steps`, `offset`: its strides and first element, counted from the argument's; None if it is the argument.
    """

    argument: int
    steps: tuple[int, ...] | None = None
    offset: int = 0

    def of(self, whole: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the part of an argument; where its type has another size, the graph's own `value`."""
        if self.steps is None or value.dtype.itemsize != whole.dtype.itemsize:
            return value
        whole = whole if value.dtype is whole.dtype else whole.view(value.dtype)
        return whole.as_strided(value.shape, self.steps, whole.storage_offset() + self.offset)


def result_of(item: int | tuple[Any], names: Sequence[str], part: ArgumentPart | None = None) -> Result:
    """Return what gives a result: an argument or a part of one, the graph's output, or an extent."""
    if part is not None and part.steps is None:
        return lambda given, found, sizes: given[part.argument]
    if isinstance(item, int):
        if part is not None:
            return lambda given, found, sizes: part.of(given[part.argument], found[item])
        return lambda given, found, sizes: found[item]
    (value,) = item
    if not isinstance(value, str):
        return lambda given, found, sizes: value
    extent = evaluator((value,), names)
    return lambda given, found, sizes: extent(sizes)[0]
