"""What operators of a traced program write, and writes that no functional graph can stand for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ladder.runtime.functional import hint_of, memory_of
from ladder.runtime.model.program import ImportRefused

_NOWHERE = np.empty(1, np.uint8)
"""Memory of addresses that are compared and not read."""


def refuse_real_writes(function: Any, written: Sequence[torch.Tensor]) -> None:
    """Raise ImportRefused before tracing writes into a tensor that the program holds."""
    for value in written:
        real = type(value) in (torch.Tensor, torch.nn.Parameter)
        if real and not torch._is_functional_tensor(value):
            raise ImportRefused(f"{function} changes a tensor that is no argument")


def written_by(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call of an operator writes."""
    found: list[torch.Tensor] = []
    if function._schema.is_mutable:
        for place, argument in enumerate(function._schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += [value for value in tree_leaves(given) if isinstance(value, torch.Tensor)]
    return found


def refuse_resized(function: Any, written: Sequence[tuple[torch.Tensor, torch.Size]]) -> None:
    """Raise ImportRefused where a tensor of some elements gets another size (``resize_``, ``out=``).

    Functional graphs give it memory of its own; in eager, views show what it had, and it writes there.
    """
    moves_axes = torch.Tag.inplace_view in function.tags and "resize" not in function._schema.name
    for value, before in written if not moves_axes else ():
        if value.shape != before and not any(isinstance(extent, int) and extent == 0 for extent in before):
            raise ImportRefused(f"{function} gives what it writes another size")


def refuse_shared_results(function: Any, args: Sequence[Any], written: Sequence[torch.Tensor]) -> None:
    """Raise ImportRefused where ``out=`` holds what a sum or product reads: torch clears it at once."""
    if not written or "out" not in function._overloadname or torch.Tag.pointwise in function.tags:
        return
    memory = {memory_of(value) for value in tree_leaves(args) if isinstance(value, torch.Tensor)}
    if memory & {memory_of(value) for value in written}:
        raise ImportRefused(f"{function} writes what it reads")


def refuse_overlaps(args: Sequence[Any], written: Sequence[torch.Tensor]) -> None:
    """Raise ImportRefused where an operator reads elements that it has written by then: ``y[::2] += y[:1]``.

    Functional graphs read what was there before; in eager, elements follow one another.
    """
    memory: dict[int, list[torch.Tensor]] = defaultdict(list)
    for read in tree_leaves(args) if written else ():
        if isinstance(read, torch.Tensor) and read.layout is torch.strided:
            memory[memory_of(read)].append(read)
    for value in written:
        reads = memory[memory_of(value)] if value.layout is torch.strided else ()
        if any(read is not value and _overlaps(value, read) for read in reads):
            raise ImportRefused("an operator reads in another order what it writes")


def _overlaps(written: torch.Tensor, read: torch.Tensor) -> bool:
    """Tell whether an element of one memory is read, for the sizes at hand, where another one is written."""
    try:
        if _place(read.expand(written.shape)) == _place(written):
            return False
    except RuntimeError:  # of another shape
        pass
    return bool(np.shares_memory(_addresses(written), _addresses(read)))


def _place(value: torch.Tensor) -> tuple[Any, ...]:
    """Return where elements lie: the offset, and the strides of axes of several."""
    axes = zip(map(hint_of, value.shape), map(hint_of, value.stride()), strict=True)
    return hint_of(value.storage_offset()), tuple((extent, stride) for extent, stride in axes if extent != 1)


def _addresses(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return an array of the same addresses; nothing is read there."""
    shape, strides = map(hint_of, value.shape), map(hint_of, value.stride())
    begin, size = hint_of(value.storage_offset()) * value.itemsize, value.itemsize
    memory = np.lib.stride_tricks.as_strided(_NOWHERE, (begin + size,), (1,), writeable=False)
    first = memory[begin : begin + size].view(f"V{size}")
    steps = tuple(stride * size for stride in strides)
    return np.lib.stride_tricks.as_strided(first, (*shape, 1), (*steps, size), writeable=False)
