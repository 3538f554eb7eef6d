"""Results of a recorded CUDA graph as a call's own tensors, which lie as the recorded ones do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false as _is_dense

from ladder.runtime.model.arguments import lies_once, span_of

ALIGNMENT = 16
"""Bytes; those of the longest element."""


class Lent(NamedTuple):
    """A result that lies in the memory of an argument.

    result: As recorded.
    argument: Its position.
    strides: The argument's, in the recording.
    offset: First element, counted from the argument's.
    """

    result: torch.Tensor
    argument: int
    strides: tuple[int, ...]
    offset: int


class Replayed:
    """Makes tensors of a call of what a graph has written.

    results: Of the recording; the next replay overwrites them.
    wanted: Positions of those that are asked for.
    given: Arguments of the recording.
    """

    def __init__(
        self, results: Sequence[Any] = (), wanted: Collection[int] = (), given: Sequence[Any] = ()
    ) -> None:
        self.results = list(results)
        self.alone: list[tuple[int, torch.Tensor]] = []
        """Results that a plain copy serves."""
        self.together: list[tuple[torch.Tensor, list[tuple[int, torch.Tensor, int]]]] = []
        """Bytes, and results that lie in them with their first elements."""
        self.lent: dict[int, Lent] = {}
        arguments = {_memory(value): at for at, value in reversed([*enumerate(given)]) if _has_memory(value)}
        groups: dict[int, list[int]] = {}
        for at in sorted(wanted):
            result = results[at]
            if not _has_memory(result):
                self.alone.append((at, result))
            elif _memory(result) in arguments:
                argument = arguments[_memory(result)]
                whole = given[argument]
                offset = result.storage_offset() - whole.storage_offset()
                self.lent[at] = Lent(result, argument, whole.stride(), offset)
            else:
                groups.setdefault(_memory(result), []).append(at)
        for group in groups.values():
            if len(group) == 1 and _is_dense(results[group[0]]):
                self.alone.append((group[0], results[group[0]]))
            else:
                self.together.append(_bytes_of([(at, results[at]) for at in group]))

    def fits(self, values: Sequence[Any]) -> bool:
        """Say whether results that lie in arguments can be taken from those of a call."""
        return all(
            values[lent.argument].stride() == lent.strides
            and values[lent.argument].dtype == lent.result.dtype
            for lent in self.lent.values()
        )

    def of(self, values: Sequence[Any]) -> list[Any]:
        """Return the results by position, None for what is not wanted; `values` are a call's arguments."""
        found: list[Any] = [None] * len(self.results)
        for at, result in self.alone:
            found[at] = result.clone()
        for memory, results in self.together:
            copy = memory.clone()
            for at, result, first in results:
                found[at] = _like(result, _typed(copy, result), first)
        for at, lent in self.lent.items():
            whole = values[lent.argument].detach()
            found[at] = _like(lent.result, whole, whole.storage_offset() + lent.offset)
        return found


def lying_as(value: torch.Tensor) -> torch.Tensor:
    """Return a copy with the strides of a tensor; a dense one where some of its elements are one."""
    if _is_dense(value) or not lies_once(value) or not _has_memory(value):
        return value.clone()
    memory, [(_, _, first)] = _bytes_of([(0, value)])
    return _like(value, _typed(memory.clone(), value), first)


def _bytes_of(
    group: Sequence[tuple[int, torch.Tensor]],
) -> tuple[torch.Tensor, list[tuple[int, torch.Tensor, int]]]:
    """Return the bytes that results in one memory span, and each result with its first element in these."""
    _, one = group[0]
    spans = [span_of(value) for _, value in group]
    start, end = min(first for first, _ in spans), max(last for _, last in spans)
    start -= (start - _memory(one)) % ALIGNMENT
    memory = torch.empty(0, dtype=torch.uint8, device=one.device)
    memory.set_(one.untyped_storage(), start - _memory(one), (end - start,), (1,))
    placed = zip(spans, group, strict=True)
    return memory, [(at, value, (first - start) // value.itemsize) for (first, _), (at, value) in placed]


def _typed(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return bytes as elements of a tensor's type."""
    return memory[: len(memory) // like.itemsize * like.itemsize].view(like.dtype)


def _like(value: torch.Tensor, memory: torch.Tensor, first: int) -> torch.Tensor:
    """Return the tensor in another memory that lies as a value does, from an element on."""
    found = memory.as_strided(value.shape, value.stride(), first)
    found = found.conj() if value.is_conj() else found
    return torch._neg_view(found) if value.is_neg() else found


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
