"""Containers, iterators and the natives that move references: replayed by the mock."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ladder.capture import natives, polyfills
from ladder.capture.calls import Calls
from ladder.capture.frames import NULL, Absent
from ladder.capture.kinds import PLAIN_DICTS, descriptor_of, is_a, is_constant, is_plain
from ladder.capture.nodes import CaptureError, Dynamic, Node
from ladder.capture.symbolic import ARITHMETIC
from ladder.capture.tensors import is_plain_tensor
from ladder.capture.words import words

STOP = Absent()
"""What an exhausted iterator gives."""

_MAPPINGS = (dict, OrderedDict)
_LAZY = (zip, enumerate, iter, reversed)
_OVERRIDES = frozenset(
    words("__getitem__ __setitem__ __delitem__ __contains__ __iter__ __len__ keys items values")
)
_READ_OVERRIDES = _OVERRIDES - {"__setitem__", "__delitem__"}
_SLOT_CALLS = (types.WrapperDescriptorType,)
BY_IDENTITY: Any = (object.__hash__, object.__eq__)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def _consumes(function: Any) -> bool:
    """Say whether a native takes all that the iterators it is given have."""
    return function in natives.CONSUMERS or getattr(function, "__name__", "") == "join"


def advance(iterator: Iterator[Any]) -> Any:
    """Return the next item, or `STOP`."""
    return next(iterator, STOP)


def taken(value: Any, first: int | None, rest: bool) -> tuple[Any, ...]:
    """Return items of `value` as unpacking takes them; see `Machine.unpacked`."""
    if first is None:
        return tuple(value)
    stream = iter(value)
    items: list[Any] = []
    for _ in range(first if rest else first + 1):
        item = next(stream, STOP)
        if item is STOP:
            return tuple(items)
        items.append(item)
    return (*items, *list(stream)) if rest else tuple(items)


def items_of(value: Any) -> list[Any]:
    """Return all items of `value`, without asking it how many there are."""
    return [item for item in value]  # noqa: C416 `list` would ask


class Containers(Calls):
    """`replay`, `container_method`, iteration."""

    # replay -----------------------------------------------------------------------------------
    def replay(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, looking: bool) -> Any:
        """Call a replayable native; a matched run calls it again if its result lives on."""
        if looking and self._pure_dynamic(function, args, kwargs):
            return self._computed_dynamic(function, args)
        args = tuple(map(self.plain, args))
        kwargs = {key: self.plain(value) for key, value in kwargs.items()}
        if function is zip:
            args = tuple(self.iterated(item, function) for item in args)
        elif function is enumerate or (function in natives.CONSUMERS and function not in _MAPPINGS):
            several = function in (min, max) and len(args) > 1  # these compare their arguments
            args = args if several or not args else (self.iterated(args[0], function), *args[1:])
        hidden = any(self._is_hidden(item) for item in args)
        if _consumes(function):
            given = (self._is_hidden, lambda item: looking and type(item) in natives.ITERATORS)
            args = tuple(self.drained(item) if any(test(item) for test in given) else item for item in args)
        elif hidden and function not in _LAZY:
            raise CaptureError("a native given a generator")
        if looking and function in natives.KEYS_ONLY and args and type(args[0]) in PLAIN_DICTS:
            self.heap.touch(args[0], 1)
            args = (tuple(args[0]), *args[1:])
        # What iterators had is in `args` by now: the call must not be made with the iterators again.
        call = (function, args, kwargs)
        return self.recorded(self._replayed, (*call, looking, hidden and function in _LAZY), call)

    def _replayed(self, function: Any, args: Any, kwargs: Any, looking: bool, hidden: bool) -> Any:
        for item in (*args, *kwargs.values()):
            self._admit(item, looking)
        if hidden:
            return self._hidden_result(function, args, kwargs)
        changes = [self.heap.node(args[0])] if function in natives.CHANGES else []
        return self.perform(function, args, kwargs, changes)

    def _pure_dynamic(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        dynamic = any(type(item) is Dynamic for item in args)
        return dynamic and not kwargs and all(type(item) is Dynamic or is_constant(item) for item in args)

    def _computed_dynamic(self, function: Any, args: tuple[Any, ...]) -> Any:
        """Compute a scalar from dynamic scalars, in the guard: an exception there is a miss."""
        values = [item.value if type(item) is Dynamic else item for item in args]
        try:
            result = function(*values)
        except Exception:
            for item in args:  # what follows is for these values
                self.plain(item)
            raise
        if type(result) not in (int, float, bool, str):
            return function(*map(self.plain, args))
        heap = self.heap
        texts = [item.var if type(item) is Dynamic else heap.constant(item) for item in args]
        text = f"{heap.constant(function)}({', '.join(texts)})"
        made = Dynamic(result, heap.guard.bind(text, text))
        if function not in ARITHMETIC:  # of others the type may depend on the values
            heap.guard.check(f"type({made.var}) is {type(result).__name__}", f"type of {text}")
        return self.computed_extent(function, args, made)

    def iterated(self, value: Any, function: Any) -> Any:
        """Return what the native `function` may iterate over in place of `value`, if that runs Python code.

        Such code is interpreted: ``__iter__``, what natives ask for a length, and items of a consumer.
        """
        if is_constant(value) or is_a(value, list | tuple | dict | set | frozenset | deque):
            return value
        if type(value) in natives.ITERATORS or type(value) in natives.VIEWS or self._is_hidden(value):
            return value
        if not is_a(self.heap.class_attribute(type(value), "__iter__"), types.FunctionType):
            return value
        with self.barrier():
            iterator = self.iterate(value)
            if function in natives.ASKING:
                self._ask_length(value)
        if type(iterator) in natives.ITERATORS or self._is_hidden(iterator):
            return iterator
        if function in natives.CONSUMERS:
            return self.drained(iterator)
        return self.call_function(self.part(polyfills.stream), (iterator,), {})

    def _ask_length(self, value: Any) -> None:
        """Do what natives do to find out how much room items will take."""
        lookup = self.heap.class_attribute
        method = lookup(type(value), "__len__")
        method = lookup(type(value), "__length_hint__") if method is NULL else method
        if is_a(method, types.FunctionType):
            with contextlib.suppress(TypeError):  # as they do
                self.call_function(method, (value,), {})

    def _is_hidden(self, value: Any) -> bool:
        node = self.heap.nodes.get(id(value))
        return node is not None and not node.recordable and hasattr(type(value), "__next__")

    def drained(self, value: Any, most: int | None = None) -> tuple[Any, ...]:
        """Return what is left of an iterator, or `most` items of it, taken under watch."""
        items: list[Any] = []
        with self.barrier():
            while len(items) != most and (item := self.advance(value)) is not STOP:
                items.append(item)
        return tuple(items)

    def _admit(self, value: Any, looking: bool) -> None:
        """Check that a replayable native may be given `value`."""
        if (is_constant(value) and self.heap.find(value) is None) or self._is_hidden(value):
            return
        kind = type(value)
        if looking and not is_plain(list(value) if kind in natives.VIEWS else value):
            raise CaptureError(f"a native that looks into {kind.__qualname__}")
        if is_a(value, list | tuple | dict | set | frozenset | deque):
            self._check_not_overridden(kind)
            if is_a(value, set | frozenset):
                self.heap.constant_keys(value)
            self.heap.touch(value, 8 if looking else 1)
        elif kind in natives.ITERATORS:
            self._known_iterator(value)
        elif kind in natives.VIEWS:
            if self.heap.node(value).external:
                raise CaptureError("a view from outside")
        elif looking or not is_a(value, types.FunctionType | types.MethodType | type(len)):
            raise CaptureError(f"a native given {kind.__qualname__}")

    def _check_not_overridden(self, kind: type) -> None:
        if kind in natives.METHODS:
            return
        for owner in kind.__mro__:
            if owner in natives.METHODS:
                return
            if _READ_OVERRIDES & set(vars(owner)):
                raise CaptureError(f"{kind.__qualname__} overrides what natives call")

    def _hidden_result(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        self.heap.hidden(result, self.here())
        return result

    def perform(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], changes: list[Node]
    ) -> Any:
        """Call a native with admitted arguments and add the step that calls it again."""
        heap = self.heap
        uses: set[str] = set()
        consumed = [heap.node(item) for item in args if type(item) in natives.ITERATORS]
        changes = [*changes, *(node for node in consumed if function not in _LAZY and node not in changes)]
        texts = [heap.reference(item, uses) for item in args]
        texts += [f"{key}={heap.reference(item, uses)}" for key, item in kwargs.items()]
        text = f"{heap.constant(function)}({', '.join(texts)})"
        try:
            result = function(*args, **kwargs)
        except BaseException:
            if changes:
                self.stop("a native that changes its argument failed")
            raise
        self._note_result(result, text, uses, changes)
        if type(result) in natives.ITERATORS:
            sources = [heap.node(item) for item in args if type(item) in natives.ITERATORS]
            heap.derive(heap.node(result), sources)
        return result

    def _note_result(self, result: Any, text: str, uses: set[str], changes: list[Node]) -> None:
        heap = self.heap
        known = heap.find(result) is not None or is_constant(result)
        if changes:
            if known or type(result) is tuple:
                heap.change(text, changes, uses)
                return
            var = heap.guard.fresh_name()
            heap.change(f"{var} = {text}", changes, uses, var)
            node = heap.computed(result, var)
        elif not known:
            node = heap.fresh(result, text, uses)
        if not known:
            self._note_inside(result, node.var, 4, set())

    def _note_inside(self, value: Any, var: str, depth: int, parents: set[str]) -> None:
        """Register the new mutable objects inside a new container by where they lie in it."""
        if depth == 0 or not is_a(value, list | tuple | dict):
            return
        entries = value.items() if is_a(value, dict) else enumerate(value)
        for key, item in list(entries):
            if is_constant(item) or self.heap.find(item) is not None:
                continue
            if is_a(item, list | dict | set | deque | tuple) or hasattr(type(item), "__dict__"):
                if type(item) is types.MethodType:
                    continue
                node = self.heap.fresh(item, f"{var}[{self.heap.constant(key)}]", {var})
                node.parents = {var, *parents}
                self._note_inside(item, node.var, depth - 1, node.parents)

    # iteration --------------------------------------------------------------------------------
    def iterate(self, value: Any) -> Any:
        """Return ``iter(value)``."""
        value = self.plain(value)
        if not self.recording:
            return self.natively(iter, value)
        return self.recorded(self._iterate, (value,), (iter, (value,)))

    def _iterate(self, value: Any) -> Any:
        kind = type(value)
        if is_a(value, types.GeneratorType) or kind in natives.ITERATORS:
            return value
        if kind in natives.METHODS or is_a(value, str | bytes | range | torch.Size):
            return self.replay(iter, (value,), {}, looking=False)
        if kind in natives.VIEWS:
            return self.replay(iter, (value,), {}, looking=False)
        method = self.heap.class_attribute(kind, "__iter__")
        if is_a(method, types.FunctionType):
            return self.call(types.MethodType(method, value), (), {})
        if is_a(value, list | tuple | dict | set | deque) and method is not NULL:
            return self.replay(iter, (value,), {}, looking=False)
        if method is NULL and is_a(value, torch.Tensor):
            raise CaptureError("a tensor is iterated over")
        raise CaptureError(f"{kind.__qualname__} is iterated over")

    def advance(self, iterator: Any) -> Any:
        """Return the next item of an iterator, or `STOP`."""
        if not self.recording:
            return self.natively(advance, iterator)
        node = self.heap.find(iterator)
        kind = type(iterator)
        if self._is_hidden(iterator):
            with self.barrier():
                return advance(iterator)
        if kind in natives.ITERATORS and node is not None:
            return self.recorded(self._advance_known, (iterator,), (advance, (iterator,)), "next")
        return self.recorded(self._advance_by_method, (iterator,), (advance, (iterator,)), "next")

    def _advance_by_method(self, iterator: Any) -> Any:
        kind = type(iterator)
        method = self.heap.class_attribute(kind, "__next__")
        if not is_a(method, types.FunctionType):
            raise CaptureError(f"{kind.__qualname__} is advanced")
        try:
            with self.barrier():
                return self.call_function(method, (iterator,), {})
        except StopIteration:
            return STOP

    def _known_iterator(self, iterator: Any, depth: int = 4) -> None:
        """Guard what an iterator from outside will give, by what it would be pickled as."""
        node = self.heap.node(iterator)
        if not node.external or node.full:
            return
        if depth == 0 or type(iterator) not in natives.REDUCIBLE:
            raise CaptureError(f"a {type(iterator).__qualname__} from outside")
        parts = iterator.__reduce__()
        heap, path = self.heap, self.heap.guard.path(node.var)
        var = heap.guard.bind(f"{node.var}.__reduce__()", f"{path} from here on")
        heap.guard.check(
            f"len({var}) == {len(parts)} and len({var}[1]) == {len(parts[1])}", f"kind of {path}"
        )
        heap.guard.check(f"{var}[0] is {heap.constant(parts[0])}", f"kind of {path}")
        for number, source in enumerate(parts[1]):
            heap.meet(source, f"{var}[1][{number}]", f"source of {path}", stable=False)
            heap.guard.keep.append(source)
            if type(source) in natives.ITERATORS:
                self._known_iterator(source, depth - 1)
            else:
                heap.touch(source, 2)
        if len(parts) > 2:
            heap.meet(parts[2], f"{var}[2]", f"position of {path}", stable=False)
        node.full = True

    def _advance_known(self, iterator: Any) -> Any:
        self._known_iterator(iterator)
        node, item = self.heap.node(iterator), advance(iterator)
        self.heap.change(f"next({node.var}, None)", [node], set())
        return item

    # methods of containers --------------------------------------------------------------------
    def container_method(
        self, function: Any, owner: Any, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a method of a list, dict, set, deque or a subclass that overrides nothing."""
        kind = type(owner)
        method = descriptor_of(function)
        base = getattr(method, "__objclass__", None)
        if base not in natives.METHODS or name not in natives.METHODS[base]:
            return self._other_method(function, owner, name, rest, kwargs)
        if kind is not base:
            self._check_not_overridden_for(kind, base, name, function)
        if name == "sort" and kwargs.get("key") is not None:
            raise CaptureError("list.sort with a key")
        rest = tuple(map(self.plain, rest))
        kwargs = {key: self.plain(value) for key, value in kwargs.items()}
        if name in natives.CONSUMING:
            rest = tuple(self.drained(item) if self._is_hidden(item) else item for item in rest)
        if base in (dict, OrderedDict, defaultdict) and name in ("get", "__getitem__", "__contains__"):
            quick = self._dict_read(owner, name, rest, function)
            if quick is not NULL:
                return quick
        given = (method, (owner, *rest), kwargs)
        return self.recorded(self._known_method, (method, owner, name, rest, kwargs), given)

    def _known_method(self, method: Any, owner: Any, name: str, rest: Any, kwargs: Any) -> Any:
        path = self.heap.guard.paths.get(self.heap.node(owner).var)
        # Where it keeps growing, what is in it is not read.
        if name not in natives.BLIND or f"len({path})" not in self.heap.lifted:
            self._admit_method(owner, name, rest, kwargs)
        indexed = is_a(owner, list | tuple | deque) and name in natives.INDEXED
        if indexed and rest and not is_constant(rest[0]):
            raise CaptureError(f"{type(rest[0]).__qualname__} stands for an index")
        changes = [] if name in natives.READERS else [self.heap.node(owner)]
        result = self.perform(method, (owner, *rest), kwargs, changes)
        if name == "keys":
            self.heap.node(result).source = owner
        return result

    def _admit_method(self, owner: Any, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        looking = name in natives.LOOKING and not is_a(owner, dict)
        self.heap.node(owner)
        if is_a(owner, set) and name in ("add", "discard", "remove") and self.identity_key(owner, rest[0]):
            return
        self.heap.touch(owner, 8 if looking else 1)
        if looking and not is_plain(list(owner)):
            raise CaptureError(f"{name} compares elements")
        if is_a(owner, dict) and name in ("__eq__", "__ne__") and not is_plain(dict(owner)):
            raise CaptureError("dictionaries of objects are compared")
        if name in ("extend", "update", "__init__", "extendleft"):
            for item in rest:
                self._admit_iterable(item)
        hashed = is_a(owner, dict | set | frozenset) and name not in ("update", "__init__", "__eq__")
        if hashed and rest and not is_plain(rest[0]) and not self.identity_key(owner, rest[0]):
            raise CaptureError("a key that is not a constant")
        stores = name in natives.STORING and not (rest and is_a(rest[0], slice))
        for item in () if stores else (*rest, *kwargs.values()):
            if not is_constant(item) and is_a(item, list | tuple | dict | set | frozenset | deque):
                self._check_not_overridden(type(item))
                self.heap.touch(item, 8 if looking else 1)
            if looking and not is_plain(item):
                raise CaptureError(f"{name} compares objects")

    def _admit_iterable(self, item: Any) -> None:
        if is_constant(item) or is_a(item, list | tuple | dict | set | frozenset | deque):
            return
        if self._is_hidden(item):
            return
        if type(item) not in natives.ITERATORS and type(item) not in natives.VIEWS:
            raise CaptureError("extended by an unknown iterable")
        if type(item) in natives.ITERATORS:
            self._known_iterator(item)
        elif self.heap.node(item).external:
            raise CaptureError("extended by a view from outside")

    def _check_not_overridden_for(self, kind: type, base: type, name: str, function: Any) -> None:
        """Natives of a base class call overridden methods only of certain classes; be strict."""
        if base is not OrderedDict or name in natives.UNHEEDING:
            return  # these work on the storage of the base class alone
        own = {key for home in kind.__mro__[: kind.__mro__.index(base)] for key in vars(home)} & _OVERRIDES
        if own - ({"__getitem__"} if name in ("__init__", "update") else set()):
            raise CaptureError(f"{kind.__qualname__} overrides {sorted(own)}")

    def _dict_read(self, owner: Any, name: str, rest: tuple[Any, ...], function: Any) -> Any:
        """Read one key, guarding no others; NULL if the general way must be taken."""
        key = rest[0]
        node = self.heap.node(owner)
        if not is_constant(key) or (type(key) not in (str, int, type(None)) and not is_a(key, type)):
            return NULL
        found = dict.get(owner, key, NULL)
        constant = self.heap.constant(key)
        path = f"{self.heap.guard.path(node.var)}[{key!r}]"
        # Another key may be equal and of another type: only keys of this very type are quick.
        if any(other == key and type(other) is not type(key) for other in owner if type(key) is not str):
            return NULL
        if found is NULL:
            self.heap.absent(node, key, f"not dict.__contains__({node.var}, {constant})", path)
            if name == "__getitem__":
                missing = self.heap.class_attribute(type(owner), "__missing__")
                if type(owner) is defaultdict and owner.default_factory is not None:
                    return self._default(owner, node, key)
                if is_a(missing, types.FunctionType):
                    return self.call_function(missing, (owner, key), {})
                raise KeyError(key)
            return False if name == "__contains__" else rest[1] if len(rest) > 1 else None
        if name == "__contains__" and path in self.heap.lifted:
            if node.external and key not in node.written:
                self.heap.guard.check(f"dict.__contains__({node.var}, {constant})", f"{path} is there")
            return True
        text = f"{node.var}[{constant}]" if type(owner) in (dict, OrderedDict) else ""
        text = text or f"dict.__getitem__({node.var}, {constant})"
        read = self.heap.read if name == "__contains__" else self.heap.load
        value = read(node, key, found, text, path)
        return True if name == "__contains__" else value

    def changes_often(self, node: Node) -> bool:
        """Say whether what is in a dictionary has kept changing, key by key."""
        path = self.heap.guard.path(node.var)
        return any(f"{path}[{key!r}]" in self.heap.lifted for key in dict.keys(node.obj))

    def _default(self, owner: Any, node: Node, key: Any) -> Any:
        """Make, store and return the default of a key that a `defaultdict` lacks."""
        factory = owner.default_factory
        path = f"{node.var}.default_factory"
        self.heap.read(node, "default_factory", factory, path, path)
        with self.barrier():
            value = self.call(factory, (), {})
            self.store_subscript(owner, key, value)
        return value

    def _other_method(
        self, function: Any, owner: Any, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        kind = type(owner)
        if kind in natives.ITERATORS and name in ("__iter__", "__next__"):
            if name == "__iter__":
                return owner
            with self.barrier():
                item = self.advance(owner)
            if item is STOP:
                raise StopIteration
            return item
        if kind is types.GeneratorType and self._is_hidden(owner):
            with self.barrier():
                return getattr(owner, name)(*rest, **kwargs)
        if is_a(owner, BaseException) and name == "__init__" and is_a(function, _SLOT_CALLS):
            return self.perform(function, (owner, *rest), kwargs, [self.heap.node(owner)])
        if kind in _LOCKS and (
            name in ("__enter__", "__exit__") or (name in ("acquire", "release") and not rest)
        ):
            return self._lock(getattr(kind, name), owner, rest)
        node = self.heap.find(owner)
        fresh = node is not None and not node.external and node.recordable
        if fresh and kind is np.ndarray and name in natives.ARRAY_METHODS and is_plain(list(rest)):
            return self.perform(getattr(kind, name), (owner, *rest), kwargs, [])
        if (
            fresh and kind.__module__ in ("_hashlib", "_blake2", "re", "_md5", "_sha1")
        ) or kind in natives.VIEWS:
            return self.perform(getattr(kind, name), (owner, *rest), kwargs, [])
        raise CaptureError(f"{kind.__qualname__}.{name}")

    def _lock(self, method: Any, owner: Any, rest: tuple[Any, ...]) -> Any:
        """Take or release a lock: a matched run does so in the same places."""
        node = self.heap.node(owner)
        given = "".join(", None" for _ in rest)  # `__exit__` looks at none of its arguments
        result = method(owner, *rest)
        self.heap.change(f"{self.heap.constant(method)}({node.var}{given})", [node], set())
        return result

    def identity_key(self, container: Any, item: Any) -> bool:
        """Say whether `item` is hashed and compared by identity, and `container` is ours."""
        node = self.heap.find(container)
        if node is None or node.external:
            return False
        for value in (item, *container):
            if is_constant(value):
                continue
            kind = type(value)
            by_id = (kind.__hash__, kind.__eq__) == BY_IDENTITY
            if not (by_id or is_plain_tensor(value)):
                return False
            if self.heap.find(value) is None:
                return False
            self.heap.distinct.add(kind)
        return True

    # building ---------------------------------------------------------------------------------
    def new(self, value: Any) -> Any:
        """Register a list, dict or set that an instruction has just made of items on the stack."""
        if not self.recording:
            return value
        heap = self.heap
        uses: set[str] = set()
        try:
            if is_a(value, dict):
                pairs = [(heap.reference(k, uses), heap.reference(v, uses)) for k, v in value.items()]
                text = "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
            else:
                items = ", ".join(heap.reference(item, uses) for item in value)
                text = f"[{items}]" if is_a(value, list) else f"{{*({items},)}}" if value else "set()"
            heap.fresh(value, text, uses)
        except CaptureError as error:
            # Nothing of the user's has run: only a later use of this object ends the recording.
            heap.hidden(value, getattr(error, "origin", None) or self.here())
        return value


__all__ = ["STOP", "Containers", "advance", "copy", "functools", "operator"]
