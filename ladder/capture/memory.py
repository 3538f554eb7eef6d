"""Words of the memory of objects that stay: what of an object changes with it, and all of them read at once.

An object's class, a dictionary's version (PEP 509) and number of entries, an instance's pointer to its
dictionary, a function's code: CPython keeps each in a word at a known place of the object. A guard over
thousands of them costs what the memory costs, if one call gathers all words: the misses of the processor's
cache overlap then. Where this Python keeps a word is found out, or tried out, once per process; where that
fails, guards ask the objects.
"""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np

WORD = 8
CLASS_OFFSET = 8
"""Of the pointer to an object's class, after the count of references."""
ENTRIES_OFFSET = 16
"""Of a dictionary's number of entries."""
VERSION_OFFSET = 24
"""Of ``ma_version_tag``, after the number of entries."""
DICT_POINTER_OFFSET = -24
"""Of an instance's pointer to its dictionary, where the class leaves that to the interpreter."""
DICTIONARIES = (dict, OrderedDict)
"""Types of the dictionaries whose words are read."""


class Memory:
    """The words at some addresses.

    Parameters
    ----------
    addresses
        Multiples of 8, in objects that somebody else keeps alive.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        self.count = len(addresses)
        first = min(addresses, default=0)
        span = (max(addresses, default=0) - first) // WORD + 1
        # An array over all memory between the objects: only the words at `places` are ever touched.
        self.__array_interface__ = {
            "data": (first, True),
            "shape": (span,),
            "typestr": np.dtype(np.uint64).str,
            "version": 3,
        }
        places = np.array([(address - first) // WORD for address in addresses], dtype=np.intp)
        whole = np.asarray(self) if self.count else np.zeros(1, np.uint64)
        self.take: Callable[[], Any] = partial(whole.take, places, None, None, "clip")
        """Reads all words."""


def word_at(address: int) -> bytes:
    """Return one word."""
    return ctypes.string_at(address, WORD)


def pointer_to(value: Any) -> bytes:
    """Return the word that points to an object; None may be no pointer at all."""
    return struct.pack("P", id(value))


def class_dict(kind: type) -> Any:
    """Return the dictionary behind ``kind.__dict__``, or the read-only view if it is out of reach."""
    found = gc.get_referents(kind.__dict__)
    return found[0] if len(found) == 1 and type(found[0]) is dict else kind.__dict__


Word = tuple[int, bytes]
"""An address, and what is there as long as nothing changes."""


def dict_pointer(owner: Any, inside: Any) -> Word | None:
    """Return the word that points to the dictionary `inside` of `owner`; None if it is not where known."""
    managed = 1 << 4  # Py_TPFLAGS_MANAGED_DICT
    if not type(owner).__flags__ & managed:
        return None
    return _checked(id(owner) + DICT_POINTER_OFFSET, pointer_to(inside))


def class_pointer(value: Any, kind: type) -> Word | None:
    """Return the word that points to the class of an object; None if that is another now."""
    return _checked(id(value) + CLASS_OFFSET, pointer_to(kind))


def _checked(address: int, expected: bytes) -> Word | None:
    return (address, expected) if word_at(address) == expected else None


def differing(now: bytes, before: bytes, start: int, end: int) -> Iterable[int]:
    """Yield the numbers of the words, from byte `start` to `end`, in which two memories differ."""
    if now[start:end] == before[start:end]:
        return
    if end - start == WORD:
        yield start // WORD
        return
    middle = (start + end) // (2 * WORD) * WORD
    yield from differing(now, before, start, middle)
    yield from differing(now, before, middle, end)


# trying out ----------------------------------------------------------------------------------------


def _usual() -> bool:
    """Say whether this is a CPython whose objects may lie as they are read here."""
    plain = sys.implementation.name == "cpython" and struct.calcsize("P") == WORD
    special = hasattr(sys, "gettotalrefcount") or bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    return plain and not special and sys.version_info < (3, 14)


def _version(home: Any) -> bytes:
    """Return the version of a dictionary, which every change of it makes another."""
    return word_at(id(home) + VERSION_OFFSET)


def versions_work(version: Callable[[Any], Any]) -> bool:
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


def _entries_are_known() -> bool:
    """Say whether dictionaries keep their number of entries, and objects their class, where looked for."""
    for kind in DICTIONARIES:
        home: Any = kind()
        for count in (0, 1, 2, 1, 0):
            while len(home) != count:
                home.popitem() if len(home) > count else home.update({len(home): None})
            at = id(home)
            if word_at(at + ENTRIES_OFFSET) != struct.pack("n", count):
                return False
            if word_at(at + CLASS_OFFSET) != pointer_to(kind):
                return False
    return True


class _First:
    def method(self, a: int = 1, *, b: int = 2) -> None: ...


class _Second(_First):
    def method(self, a: int = 3, *, b: int = 4) -> None: ...


def _plain(self: Any) -> None: ...


_EXAMPLES: Mapping[type, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    FunctionType: (
        (_First.method, _Second.method, _plain),
        ("__code__", "__defaults__", "__kwdefaults__"),
    ),
    type: ((_First, _Second), ("__mro__",)),
}
"""Kind of object -> some, and the fields in which they differ."""


def _field_offset(kind: type, name: str) -> int | None:
    """Return where objects of a kind keep the pointer to a field; None if that is not one place."""
    found = []
    examples = _EXAMPLES[kind][0]
    for offset in range(2 * WORD, kind.__basicsize__ - WORD + 1, WORD):
        held = [(word_at(id(item) + offset), getattr(item, name)) for item in examples]
        if all(word == (bytes(WORD) if value is None else pointer_to(value)) for word, value in held):
            found.append(offset)
    return found[0] if len(found) == 1 else None


def _offsets() -> dict[tuple[type, str], int]:
    """Return (kind, field) -> offset of the fields that are found where they stay when they change."""
    found: dict[tuple[type, str], int] = {}
    for kind, (_, names) in _EXAMPLES.items():
        for name in names:
            offset = _field_offset(kind, name)
            if offset is not None and _follows(kind, name, offset):
                found[kind, name] = offset
    return found


def _follows(kind: type, name: str, offset: int) -> bool:
    """Say whether the word of a field changes with it."""

    class Probe(_First):
        pass

    def function(self: Any) -> None: ...

    changes: dict[str, tuple[Any, Callable[[], Any]]] = {
        "__code__": (function, lambda: setattr(function, "__code__", _plain.__code__)),
        "__defaults__": (function, lambda: setattr(function, "__defaults__", (1,))),
        "__kwdefaults__": (function, lambda: setattr(function, "__kwdefaults__", {"b": 1})),
        "__mro__": (Probe, lambda: setattr(Probe, "__bases__", (_Second,))),
    }
    target, change = changes[name]
    before = word_at(id(target) + offset)
    change()
    after = word_at(id(target) + offset)
    return before != after and after == pointer_to(getattr(target, name))


KNOWN = _usual() and versions_work(_version) and _entries_are_known()
"""Whether words are where they are looked for, and change with what they stand for."""

FIELDS: Mapping[tuple[type, str], int] = _offsets() if KNOWN else {}
"""Kind of object, name of a field -> offset of the pointer to it."""


def is_field(owner: Any, name: Any) -> bool:
    """Say whether `name` is a field of a function that words are looked up for."""
    return type(owner) is FunctionType and name in _EXAMPLES[FunctionType][1]


def address_of_field(owner: Any, name: str) -> int | None:
    """Return where an object keeps the pointer to a field; None if that is not known, or not so now."""
    offset = FIELDS.get((FunctionType if type(owner) is FunctionType else type, name))
    if offset is None:
        return None
    value = getattr(owner, name)
    expected = (bytes(WORD), pointer_to(None)) if value is None else (pointer_to(value),)
    return id(owner) + offset if word_at(id(owner) + offset) in expected else None


def versioned(home: Any) -> bool:
    """Say whether the words of a dictionary are read."""
    return type(home) in DICTIONARIES
