"""A cohort: warps at the same statement, executed together; it splits where warps part and can merge again.

Registers are *slots*. A slot holds a number all threads share, an array, or one of the states
below; only arrays grow with the number of warps, so one statement costs about the same for one
warp and for thirty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from ladder.simulate.hardware import Hardware
from ladder.simulate.threads import Threads
from ladder.simulate.values import Array, Value, is_array


@dataclass(frozen=True)
class Partial:
    """A register that only some threads have written."""

    value: Array
    written: Array


@dataclass(frozen=True)
class InFlight:
    """A register that an asynchronous product of group ``group`` writes."""

    value: Value
    group: int


@dataclass
class Frame:
    """An open branch or loop: which threads go on after it, and which still owe the other branch."""

    mask: Array | None
    pending: Array | None = None


@dataclass
class Products:
    """Asynchronous products of a cohort's warpgroups: groups, and registers that they use.

    committed: Groups committed so far; the open one has the next number.
    finished: Groups waited for.
    sources: Register -> group that reads it.
    results: Registers that groups in flight write, with the group.
    unfenced: Registers written since the last ``wgmma.fence``.
    """

    committed: int = 0
    finished: int = 0
    sources: dict[int, int] = field(default_factory=dict)
    results: dict[int, int] = field(default_factory=dict)
    unfenced: set[int] = field(default_factory=set)

    def copy(self) -> Products:
        return replace(
            self, sources=dict(self.sources), results=dict(self.results), unfenced=set(self.unfenced)
        )


class Wait(Protocol):
    """The condition a cohort waits for; barriers keep what differs between warps, so cohorts may split."""

    statement: int

    def ready(self, c: Cohort) -> Array:
        """Return which of the cohort's warps may go on."""

    def complete(self, c: Cohort) -> None:
        """Let the cohort go on, with what it learns by that."""

    def describe(self, c: Cohort) -> str:
        """Return what is missing."""


class Cohort(Threads):
    """Warps that execute together.

    machine: What they run on.
    warps: Their numbers among all that are simulated together, ascending.
    slots: Their registers.
    """

    def __init__(self, machine: Hardware, warps: Array, slots: list[Any]) -> None:
        super().__init__(warps, machine.lanes, machine.block_warps, machine.log)
        self.machine, self.slots = machine, slots
        self.counter = 0
        self.frames: list[Frame] = []
        self.wait: Wait | None = None
        self.products = Products()

    # ---- registers -----------------------------------------------------------------------------
    def load(self, slot: int, statement: int, dtype: Any) -> Value:
        """Return a register in any state, reporting what must not be read."""
        held = self.slots[slot]
        if held is None:
            self._complain("uninitialised", statement, "reads a register that nothing wrote")
            return np.full((self.count, self.lanes), 0x55, np.uint8).astype(dtype)
        if held.__class__ is InFlight:
            self._complain(
                "asynchronous",
                statement,
                "reads a register before the wait for the asynchronous instruction that writes it",
            )
            return held.value
        if held.__class__ is Partial:
            if (self.active & ~held.written).any():
                self._complain("uninitialised", statement, "reads a register that not all threads wrote")
            return held.value
        return held

    def _complain(self, kind: str, statement: int, message: str) -> None:
        self.log.add(kind, statement, message, "register")

    def store(self, slot: int, value: Value, statement: int, dtype: Any) -> None:
        """Set a register of the active threads."""
        old = self.slots[slot]
        products = self.products
        if old.__class__ is InFlight or slot in products.sources:
            self._check_owned(slot, old, statement)
        products.unfenced.add(slot)
        if self.mask is None:
            self.slots[slot] = value
            return
        self.slots[slot] = self._blend(old, value, dtype)

    def _check_owned(self, slot: int, old: Any, statement: int) -> None:
        if old.__class__ is InFlight:
            self._complain(
                "asynchronous",
                statement,
                "writes a register before the wait for the asynchronous instruction that writes it",
            )
        elif self.products.sources[slot] > self.products.finished:
            self._complain(
                "asynchronous", statement, "writes an operand register that a product in flight still reads"
            )

    def _blend(self, old: Any, value: Value, dtype: Any) -> Any:
        """Return a register's new state where only the active threads write it."""
        assert self.mask is not None
        new = self.spread(value, dtype)
        if old is None:
            return Partial(np.where(self.mask, new, np.asarray(0x55).astype(dtype)), self.mask.copy())
        if old.__class__ is Partial:
            written = old.written | self.mask
            result = np.where(self.mask, new, old.value)
            return result if written.all() else Partial(result, written)
        before = old.value if old.__class__ is InFlight else old
        return np.where(self.mask, new, self.spread(before, dtype))

    # ---- splitting and merging -----------------------------------------------------------------
    def split(self, rows: Array) -> Cohort:
        """Return a cohort of some rows with all their state."""
        part = Cohort(self.machine, self.warps[rows], [_take(value, rows) for value in self.slots])
        part.mask = _whole_or_none(_take(self.mask, rows))
        part.counter, part.touched = self.counter, self.touched
        part.frames = [Frame(_take(f.mask, rows), _take(f.pending, rows)) for f in self.frames]
        part.wait, part.products = self.wait, self.products.copy()
        return part


class Cohorts:
    """The cohorts that have not ended."""

    def __init__(self, first: Cohort) -> None:
        self.running = [first]

    def divide(self, c: Cohort, rows: Sequence[Array]) -> list[Cohort]:
        """Replace a cohort by cohorts of some of its rows each."""
        parts = [c.split(part) for part in rows]
        self.running.remove(c)
        self.running.extend(parts)
        return parts

    def end(self, c: Cohort) -> None:
        """Take out a cohort whose kernel has ended."""
        c.machine.ended[c.warps] = True
        self.running.remove(c)

    def merge(self, c: Cohort, other: Cohort) -> Cohort | None:
        """Replace two cohorts at the same statement by one of both; None if their states differ."""
        both = merged(c, other)
        if both is not None:
            self.running = [o for o in self.running if o is not c and o is not other] + [both]
        return both


def _take(value: Any, rows: Array) -> Any:
    if is_array(value):
        return value[rows]
    if value.__class__ is Partial:
        return Partial(value.value[rows], value.written[rows])
    if value.__class__ is InFlight:
        return InFlight(_take(value.value, rows), value.group)
    return value


def _whole_or_none(mask: Array | None) -> Array | None:
    return None if mask is None or mask.all() else mask


def merged(first: Cohort, second: Cohort) -> Cohort | None:
    """Return one cohort of the warps of two at the same statement, or None if their states differ."""
    same = (first.counter, len(first.frames), first.products) == (
        second.counter, len(second.frames), second.products,
    )  # fmt: skip
    if not same or first.products.results:
        return None
    order = np.argsort(np.concatenate([first.warps, second.warps]), kind="stable")
    pair = _Pair(first.count, second.count, first.lanes, order)
    try:
        result = Cohort(first.machine, np.concatenate([first.warps, second.warps])[order], [])
        result.slots = [pair.join(a, b) for a, b in zip(first.slots, second.slots, strict=True)]
    except _Different:
        return None
    result.counter, result.wait, result.products = first.counter, first.wait, first.products.copy()
    result.mask = _whole_or_none(pair.masks(first.mask, second.mask))
    result.frames = [
        Frame(pair.masks(a.mask, b.mask), pair.pending(a.pending, b.pending))
        for a, b in zip(first.frames, second.frames, strict=True)
    ]
    return result


class _Different(Exception):
    """Two cohorts hold states that do not combine."""


@dataclass(frozen=True)
class _Pair:
    """How the rows of two cohorts interleave."""

    first: int
    second: int
    lanes: int
    order: Array

    def join(self, a: Any, b: Any) -> Any:
        if a is b:
            return a
        if a.__class__ is InFlight or b.__class__ is InFlight:
            raise _Different
        if a is None or b is None or Partial in (a.__class__, b.__class__):
            return self._stack_states(a, b)
        if not is_array(a) and not is_array(b) and a == b:
            return a
        return self._stack(a, b)

    def _stack(self, a: Value, b: Value) -> Array:
        kind = a.dtype if is_array(a) else b.dtype if is_array(b) else np.asarray(a).dtype
        if kind == np.int64 and not (is_array(a) or is_array(b)):
            kind = np.dtype(np.int32) if max(abs(int(a)), abs(int(b))) < 2**31 else kind
        shape = np.broadcast_shapes(*(x.shape[1:] for x in (a, b) if is_array(x)), (1,))
        parts = [
            np.broadcast_to(np.asarray(x, kind), (rows, *shape))
            for x, rows in ((a, self.first), (b, self.second))
        ]
        return np.concatenate(parts)[self.order]

    def _stack_states(self, a: Any, b: Any) -> Partial:
        """Combine registers that not all threads wrote."""
        states = []
        for held, rows in ((a, self.first), (b, self.second)):
            written = (
                held.written if held.__class__ is Partial else np.full((rows, self.lanes), held is not None)
            )
            states.append((held.value if held.__class__ is Partial else held, written))
        (x, x_written), (y, y_written) = states
        kind = np.asarray(y if x is None else x).dtype.type
        value = self._stack(kind(0) if x is None else x, kind(0) if y is None else y)
        return Partial(value, np.concatenate([x_written, y_written])[self.order])

    def masks(self, a: Array | None, b: Array | None) -> Array | None:
        if a is None and b is None:
            return None
        parts = [
            np.ones((rows, self.lanes), np.bool_) if mask is None else mask
            for mask, rows in ((a, self.first), (b, self.second))
        ]
        return np.concatenate(parts)[self.order]

    def pending(self, a: Array | None, b: Array | None) -> Array | None:
        if (a is None) != (b is None):
            raise _Different
        return None if a is None else self.masks(a, b)
