"""Arguments of a plan over its calls: which are the same tensors, and whether written ones alias others.

Most arguments of a call are a model's parameters: the same tensors at the same addresses as in the call
before. One comparison of all of them tells so; arrays made of them, recorded CUDA graphs and what was found
about shared memory then still hold.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ladder.runtime.snapshot import Snapshot, Tensors, identical

Span = tuple[int, int]
"""Addresses of the first byte of a tensor and of the byte behind its last."""

Fingerprint = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Key that tells a tensor from others while it is not kept alive: identity, address, shape and strides."""

SHOWN = 2
"""Calls that show which arguments stay."""


class Look(NamedTuple):
    """Result of comparing arguments with those of earlier calls.

    generation: Grows when an argument that stayed so far is another tensor, or lies elsewhere.
    apart: Whether no other argument lies in the memory of one that is written, and none of these in its own.
    """

    generation: int
    apart: bool


UNKNOWN = Look(0, True)
"""The answer where nothing is written and nothing recorded."""


class CallArguments:
    """Compares the arguments of calls; not for use by two threads at a time.

    written: Positions of the arguments that are written.
    are_open: Whether a tensor may have another shape than in the call before.
    """

    def __init__(self, written: Iterable[int], *, are_open: bool = True) -> None:
        self.written = frozenset(written)
        self.are_open = are_open
        self.moving: frozenset[int] = frozenset()
        """Positions of tensors that are only read, and were not the same in two calls."""
        self._generation = 0
        self._apart = True
        self._first: dict[int, Fingerprint] = {}
        self._steady: tuple[int, ...] = ()
        self._pick: Callable[[Sequence[Any]], Tensors] = tuple
        self._known: Sequence[torch.Tensor] = ()
        self._snapshot = Snapshot()
        self._addresses: list[int] = []
        self._counts: list[int] = []
        self._written_spans: list[Span] = []

    def look(self, values: Sequence[Any]) -> Look:
        """Compare the arguments of a call, and remember them."""
        if self._generation < SHOWN or not self._stayed(values):
            self._start_anew({at: v for at, v in enumerate(values) if isinstance(v, torch.Tensor)})
        return Look(self._generation, self._apart and self._moving_are_apart(values))

    def stay(self, places: frozenset[int]) -> bool:
        """Tell whether a generation tells where the tensors at these positions lie."""
        return self._generation >= SHOWN and self.moving.isdisjoint(places)

    def _stayed(self, values: Sequence[Any]) -> bool:
        steady = self._pick(values)
        return self._snapshot.confirm(steady, lambda: self._lie_as_before(steady))

    def _lie_as_before(self, steady: Tensors) -> bool:
        same = identical(steady, self._known)
        if not same or [*map(torch.Tensor.data_ptr, steady)] != self._addresses:
            return False
        return not self.are_open or [*map(torch.Tensor.numel, steady)] == self._counts

    def _start_anew(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Learn from a call which tensors stay; the first call holds none of them alive."""
        self._generation += 1
        if self._generation < SHOWN:
            self._first = {at: _fingerprint(tensor) for at, tensor in tensors.items()}
        else:
            self.moving |= set(tensors) - self._same(tensors) - self.written
            self._steady = tuple(at for at in tensors if at not in self.moving)
            self._pick = _picker(self._steady)
            self._known = tuple(tensors[at] for at in self._steady)
            self._addresses = [*map(torch.Tensor.data_ptr, self._known)]
            self._counts = [*map(torch.Tensor.numel, self._known)]
            self._snapshot = Snapshot()
        if self.written:
            spans = {at: span_of(tensor) for at, tensor in tensors.items() if at not in self.moving}
            self._written_spans = sorted(
                spans[at] for at in self.written if at in spans and _is_filled(spans[at])
            )
            self._apart = _are_apart(sorted((*span, at in self.written) for at, span in spans.items()))
            self._apart &= all(lies_once(tensors[at]) for at in self.written & tensors.keys())

    def _same(self, tensors: Mapping[int, torch.Tensor]) -> set[int]:
        """Return the positions of tensors that are what they were in the call before."""
        if self._generation == SHOWN:
            return {at for at, tensor in tensors.items() if self._first.get(at) == _fingerprint(tensor)}
        known = zip(self._steady, self._known, self._addresses, self._counts, strict=True)
        return {
            at
            for at, tensor, address, count in known
            if tensors.get(at) is tensor and tensor.data_ptr() == address and tensor.numel() == count
        }

    def _moving_are_apart(self, values: Sequence[Any]) -> bool:
        """Look for each in the written spans, which are apart and in order: the first that ends behind it."""
        written = self._written_spans
        for span in (span_of(values[at]) for at in self.moving) if written else ():
            at = bisect_right(written, span[0], key=itemgetter(1))
            if _is_filled(span) and at < len(written) and written[at][0] < span[1]:
                return False
        return True


def _is_filled(span: Span) -> bool:
    return span[0] < span[1]


def _fingerprint(value: torch.Tensor) -> Fingerprint:
    return id(value), value.data_ptr(), tuple(value.shape), value.stride()


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Tensors]:
    """Return what takes the values at positions."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda values: [values[at] for at in positions]


def span_of(value: torch.Tensor) -> Span:
    """Return where a tensor begins and ends in memory."""
    begin = value.data_ptr()
    if not value.numel():
        return begin, begin
    if value.is_contiguous():
        return begin, begin + value.nbytes
    steps = zip(value.shape, value.stride(), strict=True)
    return begin, begin + (1 + sum((size - 1) * step for size, step in steps)) * value.element_size()


def lies_once(value: torch.Tensor) -> bool:
    """Say whether strides show that no two elements of a tensor are one in memory."""
    reach = 1
    for step, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and step < reach:
            return False
        reach += (size - 1) * step
    return True


def _are_apart(spans: Iterable[tuple[int, int, bool]]) -> bool:
    """Tell whether no written span of memory overlaps another; spans are sorted by their beginnings."""
    end = end_of_written = 0
    for begin, until, written in spans:
        if begin < until and (begin < end_of_written or (written and begin < end)):
            return False
        end = max(end, until)
        end_of_written = max(end_of_written, until) if written else end_of_written
    return True
