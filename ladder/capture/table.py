"""The part of a guard that is about objects that stay: checked in bulk, by version where that is known.

A model's modules, their dictionaries and parameters are the same objects call after call. What a
record read in them is a table of (dictionary, key, value); a dictionary whose version has not
changed since it was last checked needs no look at its entries.
"""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import compress
from operator import attrgetter, contains, getitem, is_, not_
from types import MappingProxyType
from typing import Any

from ladder.capture.kinds import by_value, has_same_value


class _Missing:
    def __repr__(self) -> str:
        return "ABSENT"


VERSION_OFFSET = 24
"""Of ``ma_version_tag``, after the count of references, the type and the number of entries."""
DICT_POINTER_OFFSET = -24
"""Of an instance's pointer to its dictionary, where the class leaves that to the interpreter."""
ABSENT = _Missing()
WHOLE = _Missing()
_instance_dict = attrgetter("__dict__")


def _word(address: int) -> ctypes.Array[ctypes.c_char]:
    """Return a view of the eight bytes of memory at `address`."""
    return (ctypes.c_char * 8).from_address(address)


def _version(home: Any) -> bytes:
    """Return the version tag of a dictionary (PEP 509), which every change of it makes another."""
    return bytes(_word(id(home) + VERSION_OFFSET))


def _versions_are_known() -> bool:
    """Say whether this Python keeps version tags where `_version` looks."""
    plain = sys.implementation.name == "cpython" and struct.calcsize("P") == 8
    special = hasattr(sys, "gettotalrefcount") or bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    return plain and not special and sys.version_info < (3, 14) and _versions_work(_version)


def _versions_work(version: Callable[[Any], Any]) -> bool:
    """Try every way in which the dictionary of an instance or class changes."""

    class Probe:
        pass

    def store(target: Any, value: int) -> None:
        target.a = value

    probe: Any = Probe()
    probe.a = 1
    inside, outside = vars(probe), class_dict(Probe)
    changes: list[tuple[Any, Callable[[], Any]]] = [
        (inside, lambda: setattr(probe, "a", 2)),
        (inside, lambda: setattr(probe, "b", 2)),
        (inside, lambda: inside.update(a=3)),
        (inside, lambda: inside.__setitem__("a", 4)),
        (inside, lambda: delattr(probe, "a")),
        (inside, inside.clear),
        (inside, lambda: inside.setdefault("a", 5)),
        (inside, lambda: inside.pop("a")),
        (inside, lambda: inside.__ior__({"a": 6})),
        (inside, lambda: exec("a = 7", {}, inside)),
        (inside, lambda: exec("a = 8", inside)),
        (inside, inside.popitem),
        (inside, lambda: vars(probe).__init__(a=9)),
        (inside, lambda: object.__setattr__(probe, "a", 10)),
        (inside, lambda: inside.__delitem__("a")),
        (inside, lambda: setattr(probe, "a", 11)),
        (outside, lambda: setattr(Probe, "c", 1)),
        (outside, lambda: setattr(Probe, "c", 2)),
        (outside, lambda: delattr(Probe, "c")),
        # Enough times for the interpreter to specialise the instruction.
        *((inside, partial(store, probe, value)) for value in range(100)),
        *((outside, partial(store, Probe, value)) for value in range(100)),
    ]
    for target, change in changes:
        before = version(target)
        if version(target) != before:
            return False
        change()
        if version(target) == before:
            return False
    return True


def class_dict(kind: type) -> Any:
    """Return the dictionary behind ``kind.__dict__``, or the read-only view if it is out of reach."""
    found = gc.get_referents(kind.__dict__)
    return found[0] if len(found) == 1 and type(found[0]) is dict else kind.__dict__


class Entry:
    """One fact: `key` of `home` is `value` (or `ABSENT`; or the keys are `value`, for `WHOLE`)."""

    __slots__ = ("home", "key", "path", "value")

    def __init__(self, home: Any, key: Any, value: Any, path: str) -> None:
        self.home = home
        self.key = key
        self.value = value
        self.path = path

    def holds(self) -> bool:
        """Look whether it is so."""
        home, value = self.home, self.value
        if self.key is WHOLE:
            return list(home) == value and [*map(type, home)] == [*map(type, value)]
        found = dict.get(home, self.key, ABSENT) if isinstance(home, dict) else home.get(self.key, ABSENT)
        if found is value:
            return True
        return by_value(value) and type(found) is type(value) and has_same_value(found, value)


class Table:
    """All facts of one record.

    `words` are the version tags of the homes, then the instances' pointers to their dictionaries, as
    views of memory; `seen` is what they were together when the facts were last seen to hold.
    """

    def __init__(self) -> None:
        self.entries: dict[int, list[Entry]] = {}
        self.homes: list[Any] = []
        self.empty: list[Any] = []
        self.instances: dict[int, tuple[Any, Any]] = {}
        self.kinds: dict[int, tuple[Any, type]] = {}
        self.words: tuple[Any, ...] = ()
        self.seen = b""
        self.facts: list[Entry] = []

    def add(self, home: Any, key: Any, value: Any, path: str) -> None:
        """Add a fact."""
        if id(home) not in self.entries:
            self.entries[id(home)] = []
            self.homes.append(home)
        self.entries[id(home)].append(Entry(home, key, value, path))

    def finish(self, first: int) -> list[Entry]:
        """Prepare for use; `first` is the number of the first fact. Returns all facts."""
        self.first = first
        self.rows: list[list[tuple[int, Entry]]] = []
        for home in self.homes:
            row = []
            for entry in self.entries[id(home)]:
                row.append((first + len(self.facts), entry))
                self.facts.append(entry)
            self.rows.append(row)
        self._sort()
        if VERSIONS_ARE_KNOWN and all(map(_versioned, self.homes)):
            self._watch()
        return self.facts

    def _watch(self) -> None:
        pairs = [pair for pair in self.instances.values() if _points_to(*pair)]
        self.instances = {key: pair for key, pair in self.instances.items() if not _points_to(*pair)}
        tags = [_word(id(home) + VERSION_OFFSET) for home in self.homes]
        self.words = (*tags, *(_word(id(owner) + DICT_POINTER_OFFSET) for owner, _ in pairs))
        self.held = pairs
        # What the recorded run itself has changed is looked at in the next call.
        hold = [all(entry.holds() for _, entry in row) for row in self.rows]
        now = [bytes(tag) if held else b"changed!" for tag, held in zip(tags, hold, strict=True)]
        self.seen = b"".join([*now, *map(bytes, self.words[len(tags) :])])

    def _sort(self) -> None:
        """Arrange the facts for `unchanged`."""
        entries = [entry for home in self.homes for entry in self.entries[id(home)]]
        plain = (dict, OrderedDict, MappingProxyType)
        alone = [entry.key is not WHOLE and type(entry.home) in plain for entry in entries]
        single = [*compress(entries, alone)]
        self.whole = [*compress(entries, map(not_, alone))]
        there = [(entry.home, entry.key, entry.value) for entry in single if entry.value is not ABSENT]
        missing = [(entry.home, entry.key) for entry in single if entry.value is ABSENT]
        self.there: Any = tuple(zip(*there, strict=True)) or ((), (), ())
        self.missing: Any = tuple(zip(*missing, strict=True)) or ((), ())

    def unchanged(self) -> bool:
        """Say quickly whether every value is the very object that it was."""
        homes, keys, values = self.there
        try:
            same = all(map(is_, map(getitem, homes, keys), values))
        except KeyError:
            return False
        return same and not any(map(contains, *self.missing)) and all(item.holds() for item in self.whole)

    def recheck(self) -> int:
        """Return 0 if all facts hold, else the number of one that does not."""
        now = b"".join(self.words)
        for number in _differing(now, self.seen, 0, len(now)) if now else range(len(self.rows)):
            if number >= len(self.rows):
                return self.first + len(self.facts)
            for at, entry in self.rows[number]:
                if not entry.holds():
                    return at
        self.seen = now
        return 0

    def lines(self, constant: Callable[[Any], str]) -> list[str]:
        """Return the lines of the guard; each returns a number where a fact does not hold."""
        lines = []
        last = self.first + len(self.facts)
        if self.words:
            lines.append(f"if {constant(b''.join)}({constant(self.words)}) != {constant(self)}.seen:")
            lines += [f"    failed = {constant(self.recheck)}()", "    if failed: return failed"]
        elif self.homes:
            lines += [f"if not {constant(self.unchanged)}():", f"    failed = {constant(self.recheck)}()"]
            lines.append("    if failed: return failed")
        if self.empty:
            lines.append(f"if any({constant(tuple(self.empty))}): return {last}")
        if self.instances:
            owners, inside = zip(*self.instances.values(), strict=True)
            found = f"map({constant(_instance_dict)}, {constant(owners)})"
            lines.append(f"if not all(map({constant(is_)}, {found}, {constant(inside)})): return {last}")
        if self.kinds:
            values, kinds = zip(*self.kinds.values(), strict=True)
            lines.append(f"if [*map(type, {constant(values)})] != {constant(list(kinds))}: return {last}")
        return lines


def _versioned(home: Any) -> bool:
    return type(home) in (dict, OrderedDict)


def _points_to(owner: Any, inside: Any) -> bool:
    """Say whether `owner` keeps its pointer to its dictionary `inside` where it is looked for."""
    managed = 1 << 4  # Py_TPFLAGS_MANAGED_DICT
    here = bool(type(owner).__flags__ & managed)
    return here and bytes(_word(id(owner) + DICT_POINTER_OFFSET)) == struct.pack("P", id(inside))


def _differing(now: bytes, before: bytes, start: int, end: int) -> Iterator[int]:
    """Yield the numbers of the words in which two memories differ."""
    if now[start:end] == before[start:end]:
        return
    if end - start == 8:
        yield start // 8
        return
    middle = (start + end) // 16 * 8
    yield from _differing(now, before, start, middle)
    yield from _differing(now, before, middle, end)


VERSIONS_ARE_KNOWN = _versions_are_known()
