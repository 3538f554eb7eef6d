"""What heap model and guard are made of: shadows of objects, lines, steps of the mock, open scalars."""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch


class CaptureError(Exception):
    """Raised where a stretch of the program cannot be recorded; the run itself goes on."""


class Unrecordable(CaptureError):
    """A live object that no step can make again; `origin` is the instruction that made it."""

    def __init__(self, message: str, origin: Any) -> None:
        super().__init__(message)
        self.origin = origin


class Itself(enum.Enum):
    """What is read of an object itself: keys of a `Node` that no key of a container equals."""

    IDENTITY = enum.auto()
    PINNED = enum.auto()
    LENGTH = enum.auto()
    CODE = enum.auto()
    TARGET = enum.auto()
    AUTOGRAD = enum.auto()
    FACTORY = enum.auto()
    DICTIONARY = enum.auto()


class _Nothing(dict[Any, Any]):
    """The empty dictionary that all nodes share that hold nothing: it is replaced, and not filled."""

    __hash__ = object.__hash__  # type: ignore[assignment]


_NOTHING: Mapping[Any, Any] = _Nothing()
_NONE: AbstractSet[Any] = frozenset()


@dataclass(slots=True, eq=False)
class Node:
    """The shadow of one heap object.

    `source`: the dictionary of which it is a view of the keys.
    `by_identity`: whether all members of a container of the segment are known to be hashed and compared so.
    `closes`: whether it is a generator that does something when it is dropped before its end.
    `seen`: the keys whose value at entry is guarded -> the path, if that may be left open. `written` holds
    those that the segment set; `lifted` the
    dynamic scalars at keys, found there or (`stored`) set. `entry`: what a container from outside held before
    the segment changed it, without what has been replaced since; None if it is unchanged or was read whole.
    """

    obj: Any
    var: str
    _: KW_ONLY
    external: bool
    stable: bool = False
    seen: Mapping[Any, str] = _NOTHING
    written: AbstractSet[Any] = _NONE
    pinned: bool = False
    full: bool = False
    mutated: bool = False
    by_identity: bool = False
    recordable: bool = True
    closes: bool = False
    origin: Any = None
    parents: AbstractSet[str] = _NONE
    lifted: Mapping[Any, Any] = _NOTHING
    stored: AbstractSet[Any] = _NONE
    source: Any = None
    autograd: tuple[bool, bool] = (True, False)
    entry: Any = None

    def first(self, key: Any, path: str = "") -> bool:
        """Say whether what `key` of an object from outside was at entry is read now, and was not before."""
        if not self.external or key in self.seen or key in self.written:
            return False
        self.see(key, path)
        return True

    def see(self, key: Any, path: str = "") -> None:
        """Note that what `key` was at entry is read."""
        if type(self.seen) is not dict:  # most nodes hold nothing: they need no containers of their own
            self.seen = {}
        self.seen[key] = path

    def is_known(self, key: Any) -> bool:
        """Say whether nothing is left to note where `key` is read: it was read before, or set here."""
        return not self.lifted and (not self.external or key in self.seen or key in self.written)

    def lift(self, key: Any, item: Any) -> None:
        """Note that what `key` is now is the dynamic scalar `item`."""
        if type(self.lifted) is not dict:
            self.lifted = {}
        self.lifted[key] = item

    def settle(self, key: Any) -> Any:
        """Return the dynamic scalar at `key`, of which the number counts from now on."""
        assert type(self.lifted) is dict
        return self.lifted.pop(key)

    def rewritten(self) -> Iterator[str]:
        """Yield the paths of what the segment has found in an object from outside, and replaced."""
        yield from filter(None, map(self.seen.get, self.written))

    def wrote(self, key: Any, item: Any = None) -> None:
        """Note that the segment has set `key`, to `item` if that is dynamic."""
        if type(self.written) is not set:
            self.written = set()
        self.written.add(key)
        if key in self.lifted:
            self.settle(key)
        if self.stored:
            self.stored -= {key}
        if dynamic_parts(item):
            self.lift(key, item)
            self.stored |= {key}

    def holds_dynamic(self, key: Any) -> bool:
        """Say whether what is at `key` now is dynamic."""
        return key in self.lifted and (key in self.stored or key not in self.written)


@dataclass(slots=True, eq=False)
class MockStep:
    """One line of the mock: it defines `var`, uses `uses`, changes `changes`.

    `slot`: the variable of a dictionary and its key, where the line does nothing but replace that item.
    `replaced`: an object from outside, the name of its attribute that the line sets, and the constant that it
    held, `NULL` for anything else.
    """

    text: str
    var: str | None
    uses: set[str]
    changes: set[str]
    keep: bool
    slot: tuple[str, type, Any] | None = None
    replaced: tuple[Any, str, Any] | None = None


@dataclass(slots=True, eq=False)
class Dynamic:
    """A scalar of the interpreter's stack that matched runs read or compute anew.

    `symbol`: what it is to `Shapes`, if it is an extent of a tensor. `counted`: the instruction at which it
    was read, if the graph computes it: the guard comes before and does not know it.
    """

    value: Any
    var: str
    symbol: Any = None
    counted: Any = None


class Text(str):
    """A string made of the values of tensors: matched runs make it anew, if anything uses it.

    numbers: Those tensors, which nothing changes, and the number of each; None of one that is written out.
    """

    __slots__ = ("numbers",)

    numbers: tuple[tuple[torch.Tensor, Any], ...]

    def __new__(cls, value: str, numbers: tuple[tuple[torch.Tensor, Any], ...]) -> Text:
        """Return the string, made of `numbers`."""
        made = super().__new__(cls, value)
        made.numbers = numbers
        return made


def hold_strings(holders: Iterable[Any]) -> None:
    """Put a string in place of each `Text` into containers, cells and attributes."""
    for holder in holders:
        kind = type(holder)
        if issubclass(kind, list | deque):
            _hold(enumerate(holder), partial(kind.__setitem__, holder))
        elif issubclass(kind, dict):
            _hold(dict.items(holder), partial(dict.__setitem__, holder))
        elif kind is types.CellType and holder != types.CellType():
            _hold([("cell_contents", holder.cell_contents)], partial(setattr, holder))
        _hold(_attributes(holder).items(), partial(dict.__setitem__, _attributes(holder)))
        _hold(_slots(holder), partial(object.__setattr__, holder))


def _hold(places: Iterable[tuple[Any, Any]], put: Callable[[Any, Any], None]) -> None:
    for key, value in [(key, value) for key, value in places if holds_text(value)]:
        put(key, _as_string(value))


def _attributes(holder: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def _slots(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of what an instance of a Python class has slots for."""
    for kind in type(holder).__mro__:
        for name, member in vars(kind).items() if "__slots__" in vars(kind) else ():
            if type(member) is types.MemberDescriptorType:
                with suppress(AttributeError):
                    yield name, member.__get__(holder)


def holds_text(value: Any) -> bool:
    """Tell whether a value is a `Text`, or a tuple with one inside."""
    return type(value) is Text or (type(value) is tuple and any(map(holds_text, value)))


def _as_string(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_as_string, value))
    return str(value) if type(value) is Text else value


def dynamic_parts(value: Any) -> list[Dynamic]:
    """Return the dynamic scalars that `value` is, or a tuple of which it is."""
    if type(value) is Dynamic:
        return [value]
    is_tuple = issubclass(type(value), tuple)
    return [part for item in tuple.__iter__(value) for part in dynamic_parts(item)] if is_tuple else []


@dataclass(slots=True, eq=False)
class Check:
    """One line of the guard: `text` binds a variable, or is a condition that must hold.

    `holds`: the id of the object that must be where it was. `number`: it asks of numbers, or of
    extents that are left open, what they must be.
    """

    text: str
    binds: str | None
    why: str
    path: str | None
    holds: int = 0
    number: bool = False
