"""The part of a guard that is about objects that stay: checked in bulk, by their memory where that is known.

A model's modules, their dictionaries and parameters are the same objects call after call. What a
record read in them is a table of (dictionary, key, value); a dictionary whose version has not
changed since it was last checked needs no look at its entries. See `ladder.capture.memory`.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from itertools import compress
from operator import attrgetter, contains, getitem, is_, not_
from types import MappingProxyType
from typing import Any

from ladder.capture import memory
from ladder.capture.kinds import by_value, has_same_value
from ladder.capture.memory import Memory, address_of_field, versioned, word_at


class _Missing:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Missing()
WHOLE = _Missing()
_instance_dict = attrgetter("__dict__")


class Field(str):
    """A key that is the name of a field: of a function, or of a class."""

    __slots__ = ()


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
        home, key, value = self.home, self.key, self.value
        if key is WHOLE:
            return list(home) == value and [*map(type, home)] == [*map(type, value)]
        if type(key) is Field:
            return getattr(home, key) is value
        found = dict.get(home, key, ABSENT) if isinstance(home, dict) else home.get(key, ABSENT)
        if found is value:
            return True
        return by_value(value) and type(found) is type(value) and has_same_value(found, value)


class Place:
    """Facts that hold as long as one word of memory stays as it is: of a dictionary, or of one field.

    `address`: of the word; None where that is not known.
    """

    __slots__ = ("address", "entries")

    def __init__(self, home: Any, key: Any) -> None:
        if type(key) is Field:
            self.address = address_of_field(home, key)
        else:
            self.address = id(home) + memory.VERSION_OFFSET if memory.KNOWN and versioned(home) else None
        self.entries: list[Entry] = []

    def word(self) -> bytes:
        """Return the word if the facts hold, else one that it cannot be."""
        hold = all(entry.holds() for entry in self.entries)
        return word_at(self.address or 0) if hold else b"changed!"


class Table:
    """All facts of one record.

    `memory` are the words of the places, then others that must be what they were; `seen` is what all were
    when the facts were last seen to hold.
    """

    def __init__(self) -> None:
        self.places: dict[Any, Place] = {}
        self.empty: list[Any] = []
        self.instances: dict[int, tuple[Any, Any]] = {}
        self.kinds: dict[int, tuple[Any, Any]] = {}
        self.held: list[Any] = []
        self.memory: Memory | None = None
        self.seen = b""
        self.facts: list[Entry] = []

    def add(self, home: Any, key: Any, value: Any, path: str) -> None:
        """Add a fact."""
        name = (id(home), str(key)) if type(key) is Field else id(home)
        place = self.places.get(name)
        if place is None:
            place = self.places[name] = Place(home, key)
        place.entries.append(Entry(home, key, value, path))

    def finish(self, first: int) -> list[Entry]:
        """Prepare for use; `first` is the number of the first fact. Returns all facts."""
        self.first = first
        self.rows: list[list[tuple[int, Entry]]] = []
        for place in self.places.values():
            numbers = range(first + len(self.facts), first + len(self.facts) + len(place.entries))
            self.rows.append([*zip(numbers, place.entries, strict=True)])
            self.facts += place.entries
        self._sort()
        if memory.KNOWN and all(place.address is not None for place in self.places.values()):
            self._watch()
        return self.facts

    def _watch(self) -> None:
        """Have the memory of objects read instead of asking them, where it says what they would."""
        words = [(place.address or 0, place.word()) for place in self.places.values()]
        for rows, word_of in ((self.instances, memory.dict_pointer), (self.kinds, memory.class_pointer)):
            found = {key: word_of(*pair) for key, pair in rows.items()}
            words += [word for word in found.values() if word is not None]
            self.held += [rows.pop(key) for key, word in found.items() if word is not None]
        counts = {id(home): home for home in self.empty if versioned(home)}
        self.empty = [home for home in self.empty if id(home) not in counts]
        self.held += list(counts.values())
        words += [(at + memory.ENTRIES_OFFSET, struct.pack("n", 0)) for at in counts]
        self.memory = Memory([address for address, _ in words])
        self.seen = b"".join(word for _, word in words)

    def _sort(self) -> None:
        """Arrange the facts for `unchanged`."""
        entries = self.facts
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
        now = b"" if self.memory is None else self.memory.take().tobytes()
        changed = memory.differing(now, self.seen, 0, len(now))
        for number in range(len(self.rows)) if self.memory is None else changed:
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
        failed = ["    failed = " + constant(self.recheck) + "()", "    if failed: return failed"]
        if self.memory is not None and self.memory.count:
            lines += [f"if {constant(self.memory.take)}().tobytes() != {constant(self)}.seen:", *failed]
        elif self.facts:
            lines += [f"if not {constant(self.unchanged)}():", *failed]
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
