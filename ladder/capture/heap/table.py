"""The part of a guard that is about objects that stay: modules, classes, functions and their dictionaries.

They are the same objects call after call. What a record read in them is a table of facts (home, key, value).
Dictionaries, those of classes too, count their changes (torch's ``dict_version``), so those that did not
change are not looked into, where the count can be relied on. Facts about other homes are compared by
identity in bulk.
"""

from __future__ import annotations

import gc
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from operator import attrgetter, contains, eq, getitem, is_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ladder.capture.values.kinds import by_value, has_same_value, kind_among
from ladder.runtime.snapshot import DictionaryVersions, refer_to

dict_version: Callable[[dict[Any, Any]], int] | None = getattr(torch._C._dynamo.guards, "dict_version", None)
"""A number that differs after each change of a dictionary; None where torch has it no more."""


class _Missing:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Missing()
WHOLE = _Missing()
_instance_dict = attrgetter("__dict__")


def _instances_count() -> bool:
    """Tell whether the dictionary of an instance counts what is set through the instance.

    In Python 3.13 it may show values that lie in the instance itself, and is not told of changes of these.
    """
    if dict_version is None:
        return False
    instance = _Missing()
    before = dict_version(vars(instance))
    setattr(instance, "name", None)  # noqa: B010  as programs do: the name is not known before
    return dict_version(vars(instance)) != before


INSTANCES_COUNT = _instances_count()


class Changes:
    """Tells at the cost of one question whether any dictionary that counts its changes was changed.

    Where the interpreter tells torch of changes (Python 3.12 on), these of all dictionaries are numbered in
    one sequence, in which one that is asked for the first time takes the next number. If a new one takes the
    number behind that of the last question, nothing was changed in between. Where threads ask at once,
    the worst is that something counts as changed which was not.
    """

    def __init__(self) -> None:
        self._last = UNKNOWN
        self._state = object()

    def state(self) -> object:
        """Return an object that is the same as long as nothing is changed."""
        assert dict_version is not None
        number = dict_version({})
        if number != self._last + 1:
            self._state = object()
        self._last = number  # behind the state, which a thread that reads this number then finds
        return self._state


def _are_in_one_sequence() -> bool:
    """Tell whether changes are numbered as `Changes` takes them to be."""
    if dict_version is None:
        return False
    asked, other = dict[int, int](), dict[int, int]()
    first, _ = dict_version({}), dict_version(asked)
    other[0] = other[1] = asked[0] = 0  # changes of one that was not asked for have no numbers
    return dict_version({}) == first + 3


def _clones_count() -> bool:
    """Tell whether a dictionary counts that an empty one took the entries of another as a whole.

    Where the interpreter tells torch of changes, torch does not count this one.
    """
    if dict_version is None:
        return False
    empty = dict[int, int]()
    before = dict_version(empty)
    empty.update({0: 0})
    return dict_version(empty) != before


CLONES_COUNT = _clones_count()

UNKNOWN = -1
"""No version."""

changes = Changes() if _are_in_one_sequence() else None


def counted_dict(home: Any) -> dict[Any, Any] | None:
    """Return the dictionary that `home` is or shows, if it counts its changes."""
    if dict_version is None:
        return None
    shows = type(home) is MappingProxyType
    behind = gc.get_referents(home) if shows else [home]
    counts = shows or INSTANCES_COUNT  # any other dictionary may be that of an instance
    return behind[0] if counts and len(behind) == 1 and type(behind[0]) is dict else None


class Field(str):
    """A key that is the name of a field: of a function, or of a class."""

    __slots__ = ()


class Slot(NamedTuple):
    """A key that is a native descriptor: of a slot, or of what a cell holds."""

    descriptor: Any


FIELDS = (Field, Slot)
"""Types of keys that name a field of an object, and not an entry of a dictionary."""
CONTENTS = Slot(types.CellType.__dict__["cell_contents"])


def reader(key: Field | Slot) -> Callable[[Any], Any]:
    """Return what reads a field of an object."""
    return key.descriptor.__get__ if isinstance(key, Slot) else attrgetter(key)


class Entry:
    """One fact: `key` of `home` is `value` (or `ABSENT`; or the keys are `value`, for `WHOLE`)."""

    __slots__ = ("home", "key", "path", "value")

    def __init__(self, home: Any, key: Any, value: Any, path: str) -> None:
        self.home = home
        self.key = key
        self.value = value
        self.path = path

    def found(self) -> Any:
        home, key = self.home, self.key
        if type(key) in FIELDS:
            return reader(key)(home)
        return dict.get(home, key, ABSENT) if isinstance(home, dict) else home.get(key, ABSENT)

    def holds(self) -> bool:
        home, value = self.home, self.value
        if self.key is WHOLE:
            kind = kind_among(value)
            return list(home) == value and [*map(kind, home)] == [*map(kind, value)]
        found = self.found()
        if found is value:
            return True
        return by_value(value) and type(found) is type(value) and has_same_value(found, value)


class Functions:
    """Python functions whose code and defaults are as they were, seen from what each refers to.

    The interpreter calls its audit hooks for each read of ``__code__``, ``__defaults__`` and
    ``__kwdefaults__``, but once for ``gc.get_referents`` of all functions. It gives the parts of a function
    in one order, without those it does not have: code, globals, module, defaults, keyword defaults,
    documentation, name, closure and so on, at last the qualified name. Where module and documentation are
    strings (or None), no part can come to lie where another was, as strings stand between tuples and
    dictionaries; of other functions the fields are read.
    """

    __slots__ = ("facts", "identical", "owners", "parts", "strict")

    def __init__(self, facts: list[Entry]) -> None:
        self.facts = facts
        owners = {id(fact.home): fact.home for fact in facts}.values()
        with_defaults = [each for each in owners if (each.__defaults__, each.__kwdefaults__) != (None, None)]
        strict = set(map(id, with_defaults))
        self.owners = (*with_defaults, *(each for each in owners if id(each) not in strict))
        """Those with defaults come first: tuples may be equal and hold other numbers."""
        self.strict = len(with_defaults)
        self.parts = gc.get_referents(*self.owners)
        self.identical = gc.get_referents(*with_defaults)

    def hold(self) -> bool:
        """Compare what the functions refer to; code that is equal does the same.

        They come to refer to more when annotations or attributes are first read: their facts tell then.
        """
        if not self.owners or refer_to(self.owners, self.parts):
            return True
        found = gc.get_referents(*self.owners)
        equal = found == self.parts and all(map(is_, found, self.identical))
        self.parts, self.identical = found, gc.get_referents(*self.owners[: self.strict])
        held = equal or all(fact.holds() for fact in self.facts)
        if not held:
            self.parts = []
        return held

    @staticmethod
    def takes(entry: Entry) -> bool:
        """Tell whether `entry` is a part of a function that is seen from what it refers to, and holds.

        Documentation that was deleted reads as None, too, but is not among what the function refers to.
        """
        home = entry.home
        return (
            entry.key in FUNCTION_FIELDS
            and type(home) is types.FunctionType
            and type(home.__module__) is str
            and (type(home.__doc__) is str or any(part is None for part in gc.get_referents(home)))
            and entry.found() is entry.value
        )


HEAP = 1 << 9
"""The flag of classes that programs define."""


class Objects:
    """Objects that stay whose dictionaries and classes are as they were, seen from what each refers to.

    The garbage collector's view gives both with one call for all objects. Only objects that can refer to
    nothing else are taken: without slots, and with a dictionary that holds all their attributes.
    """

    __slots__ = ("owners", "parts")

    def __init__(self, parts: dict[int, tuple[Any, Any, type]]) -> None:
        self.owners = tuple(owner for owner, _, _ in parts.values())
        self.parts = [part for _, inside, kind in parts.values() for part in (inside, kind)]

    def hold(self) -> bool:
        """Compare what the objects refer to."""
        return not self.owners or refer_to(self.owners, self.parts)

    @staticmethod
    def takes(owner: Any, inside: Any) -> bool:
        """Tell whether an object refers to its dictionary `inside`, to its class and nothing else."""
        kind = type(owner)
        own = [base for base in kind.__mro__ if base is not object]
        plain = all(base.__flags__ & HEAP and "__slots__" not in vars(base) for base in own)
        found = gc.get_referents(owner)
        return plain and len(found) == 2 and found[0] is inside and found[1] is kind


FUNCTION_FIELDS = ("__code__", "__defaults__", "__kwdefaults__")
"""What of a function that stays is compared in bulk."""

PLAIN = (dict, OrderedDict, MappingProxyType)
"""Types whose entries are read by a built-in function alone."""
Columns = tuple[tuple[Any, ...], ...]


class Table:
    """All facts of one record."""

    def __init__(self) -> None:
        self.facts: list[Entry] = []
        self.empty: list[Any] = []
        self.instances: dict[int, tuple[Any, Any]] = {}
        self.kinds: dict[int, tuple[Any, Any]] = {}
        self.first = 0
        self.there: Columns = ()
        self.missing: Columns = ()
        self.functions = Functions([])
        self.objects = Objects({})
        self.fields: list[tuple[Callable[[Any], Any], list[Any], list[Any]]] = []
        self.others: list[Entry] = []
        self.homes: list[dict[Any, Any]] = []
        """Dictionaries that count their changes,"""
        self.within: list[list[Entry]] = []
        """the facts about each,"""
        self.versions: list[int] = []
        """the versions at which these held,"""
        self.tags = DictionaryVersions(())
        """the same, where each holds its own,"""
        self.state: object = None
        """what `changes` gave then,"""
        self.vacant: tuple[dict[Any, Any], ...] = ()
        """and those that were empty then, where taking all entries of another is not counted."""
        self.restless: frozenset[int] = frozenset()
        """Ids of the objects that the record itself changes: their changes are not counted."""

    def add(self, home: Any, key: Any, value: Any, path: str) -> None:
        self.facts.append(Entry(home, key, value, path))

    def finish(self, first: int, restless: Iterable[int] = ()) -> list[Entry]:
        """Prepare for use; `first`: the number of the first fact. Returns all facts."""
        self.first, self.restless = first, frozenset(restless)
        self._arrange()
        return self.facts

    def _arrange(self) -> None:
        """Lay the facts out in columns for `unchanged`."""
        rows: dict[str, list[tuple[Any, ...]]] = {"there": [], "missing": []}
        counted: dict[int, tuple[dict[Any, Any], list[Entry]]] = {}
        fields: dict[Field | Slot, tuple[list[Any], list[Any]]] = {}
        functions: list[Entry] = []
        self.others = []
        for entry in self.facts:
            counts = type(entry.key) not in FIELDS and id(entry.home) not in self.restless
            behind = counted_dict(entry.home) if counts else None
            if behind is not None:
                counted.setdefault(id(behind), (behind, []))[1].append(entry)
            elif entry.key is WHOLE:
                self.others.append(entry)
            elif Functions.takes(entry):
                functions.append(entry)
            elif type(entry.key) in FIELDS:
                owners, values = fields.setdefault(entry.key, ([], []))
                owners.append(entry.home)
                values.append(entry.value)
            elif type(entry.home) not in PLAIN:
                self.others.append(entry)
            elif entry.value is ABSENT:
                rows["missing"].append((entry.home, entry.key))
            else:
                rows["there"].append((entry.home, entry.key, entry.value))
        self.there = _columns(rows["there"], 3)
        self.missing = _columns(rows["missing"], 2)
        self.functions = Functions(functions)
        self.fields = [(reader(key), *columns) for key, columns in fields.items()]
        self.within = [entries for _, entries in counted.values()]
        self.homes = [behind for behind, _ in counted.values()]
        self.versions, self.state, self.vacant = [UNKNOWN] * len(self.homes), None, ()
        self.tags = DictionaryVersions(self.homes if changes is None else ())

    def unchanged(self) -> bool:
        """Say quickly whether every value is what it was."""
        homes, keys, values = self.there
        try:
            same = self._dictionaries_hold() and all(map(is_, map(getitem, homes, keys), values))
        except KeyError:
            return False
        if not same or any(map(contains, *self.missing)) or not self.functions.hold():
            return False
        for get, owners, parts in self.fields:
            if not all(map(is_, map(get, owners), parts)):
                return False
        return all(entry.holds() for entry in self.others)

    def _dictionaries_hold(self) -> bool:
        """Look into the dictionaries that changed since all facts about them held."""
        if dict_version is None:
            return True
        if any(self.vacant):
            self.versions, self.state = [UNKNOWN] * len(self.homes), None
        state = changes.state() if changes is not None else None
        if state is not None and state is self.state:
            return True
        return self.tags.confirm(lambda: self._versions_hold(state))

    def _versions_hold(self, state: object) -> bool:
        assert dict_version is not None
        versions = [*map(dict_version, self.homes)]
        if versions != self.versions:
            changed = [at for at, same in enumerate(map(eq, versions, self.versions)) if not same]
            if not all(entry.holds() for at in changed for entry in self.within[at]):
                return False
            self.vacant = () if CLONES_COUNT else tuple(home for home in self.homes if not home)
        self.versions, self.state = versions, state
        return True

    def recheck(self) -> int:
        """Return 0 if all facts hold, else the number of one that does not.

        Equal scalars in place of others are compared by identity from then on.
        """
        for number, entry in enumerate(self.facts, self.first):
            if not entry.holds():
                return number
        for entry in self.facts:
            if entry.key is not WHOLE:
                entry.value = entry.found()
        self._arrange()
        return 0

    def lines(self, constant: Callable[[Any], str]) -> list[str]:
        """Return the lines of the guard; each returns a number where a fact does not hold."""
        lines = []
        last = self.first + len(self.facts)
        self._take_objects()
        if self.facts:
            lines.append(f"if not {constant(self.unchanged)}():")
            lines += [f"    failed = {constant(self.recheck)}()", "    if failed: return failed"]
        if self.empty:
            lines.append(f"if any({constant(tuple(self.empty))}): return {last}")
        if self.objects.owners:
            lines.append(f"if not {constant(self.objects.hold)}(): return {last}")
        if self.instances:
            owners, inside = zip(*self.instances.values(), strict=True)
            found = f"map({constant(_instance_dict)}, {constant(owners)})"
            lines.append(f"if not all(map({constant(is_)}, {found}, {constant(inside)})): return {last}")
        if self.kinds:
            values, kinds = zip(*self.kinds.values(), strict=True)
            found = f"map(type, {constant(values)})"
            lines.append(f"if not all(map({constant(is_)}, {found}, {constant(kinds)})): return {last}")
        return lines

    def _take_objects(self) -> None:
        """Leave instances and kinds that are seen together to `objects`."""
        both = {
            key: (owner, inside, self.kinds[key][1])
            for key, (owner, inside) in self.instances.items()
            if key in self.kinds and Objects.takes(owner, inside)
        }
        self.objects = Objects(both)
        for key in both:
            del self.instances[key], self.kinds[key]


def _columns(rows: list[tuple[Any, ...]], count: int) -> Columns:
    return tuple(zip(*rows, strict=True)) or ((),) * count
