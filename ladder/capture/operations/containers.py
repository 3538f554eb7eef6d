"""Containers, iterators and the natives that move references: replayed by the mock."""

from __future__ import annotations

import contextlib
import operator
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.fx

from ladder.capture.heap.nodes import CaptureError, Dynamic, Node
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.opcodes import STOP
from ladder.capture.interpreter.recording import recorded
from ladder.capture.operations.objects import (
    LAZY,
    OVERRIDES,
    check_not_overridden,
    perform,
    pinned_part,
    settled,
)
from ladder.capture.operations.symbolic import ARITHMETIC, computed_extent
from ladder.capture.python import natives, polyfills
from ladder.capture.python.frames import NULL
from ladder.capture.values.kinds import PLAIN_DICTS, descriptor_of, is_a, is_constant, is_plain
from ladder.capture.values.tensors import is_plain_tensor

_MAPPINGS = (dict, OrderedDict)
_SLOT_CALLS = (types.WrapperDescriptorType,)
BY_IDENTITY: Any = (object.__hash__, object.__eq__)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def _consumes(function: Any) -> bool:
    """Say whether a native takes all that the iterators it is given have."""
    return function in natives.CONSUMERS or getattr(function, "__name__", "") == "join"


def next_or_stop(iterator: Iterator[Any]) -> Any:
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


# replay -----------------------------------------------------------------------------------
def replay(
    vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, looking: bool
) -> Any:
    """Call a replayable native; a matched run calls it again if its result lives on."""
    if looking and pure_dynamic(vm, function, args, kwargs):
        return computed_dynamic(vm, function, args)
    args, kwargs = vm.plain_given(args, kwargs)
    if function is zip:
        args = tuple(iterated(vm, item, function) for item in args)
    elif function is enumerate or (function in natives.CONSUMERS and function not in _MAPPINGS):
        several = function in (min, max) and len(args) > 1  # these compare their arguments
        args = args if several or not args else (iterated(vm, args[0], function), *args[1:])
    hidden = any(is_hidden(vm, item) for item in args)
    if _consumes(function):
        kinds = natives.ITERATORS if looking else frozenset()
        args = tuple(
            drained(vm, item) if type(item) in kinds or is_hidden(vm, item) else item for item in args
        )
    elif hidden and function not in LAZY:
        raise CaptureError("a native given a generator")
    if looking and function in natives.KEYS_ONLY and args and type(args[0]) in PLAIN_DICTS:
        vm.heap.touch(args[0], 1)
        args = (tuple(args[0]), *args[1:])
    # What iterators had is in `args` by now: the call must not be made with the iterators again.
    call = (function, args, kwargs)
    return recorded(vm, _replayed, (*call, looking, hidden and function in LAZY), call)


def _replayed(vm: Interpreter, function: Any, args: Any, kwargs: Any, looking: bool, hidden: bool) -> Any:
    for item in (*args, *kwargs.values()):
        admit(vm, item, looking)
    if hidden:
        return _hidden_result(vm, function, args, kwargs)
    changes = [vm.heap.node(args[0])] if function in natives.CHANGES else []
    return perform(vm, function, args, kwargs, changes)


def pure_dynamic(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a scalar can be computed of dynamic scalars and constants."""
    dynamic = any(type(item) is Dynamic for item in args)
    return dynamic and not kwargs and all(type(item) is Dynamic or is_constant(item) for item in args)


def computed_dynamic(vm: Interpreter, function: Any, args: tuple[Any, ...]) -> Any:
    """Compute a scalar from dynamic scalars, in the guard: an exception there is a miss."""
    values = [item.value if type(item) is Dynamic else item for item in args]
    try:
        result = function(*values)
    except Exception:
        for item in args:  # what follows is for these values
            vm.plain(item)
        raise
    if type(result) not in (int, float, bool, str):
        return function(*map(vm.plain, args))
    heap = vm.heap
    texts = [item.var if type(item) is Dynamic else heap.constant(item) for item in args]
    text = f"{heap.constant(function)}({', '.join(texts)})"
    made = Dynamic(result, heap.guard.bind(text, text))
    if function not in ARITHMETIC:  # of others the type may depend on the values
        heap.guard.check(f"type({made.var}) is {type(result).__name__}", f"type of {text}")
    return computed_extent(vm, function, args, made)


def iterated(vm: Interpreter, value: Any, function: Any) -> Any:
    """Return what the native `function` may iterate over in place of `value`, if that runs Python code.

    Such code is interpreted: ``__iter__``, what natives ask for a length, and items of a consumer.
    """
    if is_constant(value) or is_a(value, list | tuple | dict | set | frozenset | deque):
        return value
    if type(value) in natives.ITERATORS or type(value) in natives.VIEWS or is_hidden(vm, value):
        return value
    if not is_a(vm.heap.class_attribute(type(value), "__iter__"), types.FunctionType):
        return value
    with vm.barrier():
        iterator = iterate(vm, value)
        if function in natives.ASKING:
            _ask_length(vm, value)
    if type(iterator) in natives.ITERATORS or is_hidden(vm, iterator):
        return iterator
    if function in natives.CONSUMERS:
        return drained(vm, iterator)
    return vm.call_function(pinned_part(vm, polyfills.stream), (iterator,), {})


def _ask_length(vm: Interpreter, value: Any) -> None:
    """Do what natives do to find out how much room items will take."""
    lookup = vm.heap.class_attribute
    method = lookup(type(value), "__len__")
    method = lookup(type(value), "__length_hint__") if method is NULL else method
    if is_a(method, types.FunctionType):
        with contextlib.suppress(TypeError):  # as they do
            vm.call_function(method, (value,), {})


def is_hidden(vm: Interpreter, value: Any) -> bool:
    """Say whether `value` is an iterator of this segment that no step can make again."""
    node = vm.heap.nodes.get(id(value))
    return node is not None and not node.recordable and hasattr(type(value), "__next__")


def drained(vm: Interpreter, value: Any, most: int | None = None) -> tuple[Any, ...]:
    """Return what is left of an iterator, or `most` items of it, taken under watch."""
    items: list[Any] = []
    with vm.barrier():
        while len(items) != most and (item := advance(vm, value)) is not STOP:
            items.append(item)
    return tuple(items)


def admit(vm: Interpreter, value: Any, looking: bool) -> None:
    """Check that a replayable native may be given `value`."""
    if (is_constant(value) and vm.heap.find(value) is None) or is_hidden(vm, value):
        return
    kind = type(value)
    if looking and not is_plain(list(value) if kind in natives.VIEWS else value):
        raise CaptureError(f"a native that looks into {kind.__qualname__}")
    if is_a(value, list | tuple | dict | set | frozenset | deque):
        check_not_overridden(kind)
        if is_a(value, set | frozenset):
            vm.heap.constant_keys(value)
        vm.heap.touch(value, 8 if looking else 1)
    elif kind in natives.ITERATORS:
        known_iterator(vm, value)
    elif kind in natives.VIEWS:
        if vm.heap.node(value).external:
            raise CaptureError("a view from outside")
    elif looking or not is_a(value, types.FunctionType | types.MethodType | type(len)):
        raise CaptureError(f"a native given {kind.__qualname__}")


def _hidden_result(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = function(*args, **kwargs)
    vm.heap.hidden(result, vm.here())
    return result


# iteration --------------------------------------------------------------------------------
def iterate(vm: Interpreter, value: Any) -> Any:
    """Return ``iter(value)``."""
    value = vm.plain(value)
    return recorded(vm, _iterate, (value,), (iter, (value,)))


def _iterate(vm: Interpreter, value: Any) -> Any:
    kind = type(value)
    if is_a(value, types.GeneratorType) or kind in natives.ITERATORS:
        return value
    if kind in natives.METHODS or is_a(value, str | bytes | range | torch.Size):
        return replay(vm, iter, (value,), {}, looking=False)
    if kind in natives.VIEWS:
        return replay(vm, iter, (value,), {}, looking=False)
    method = vm.heap.class_attribute(kind, "__iter__")
    if is_a(method, types.FunctionType):
        return vm.call(types.MethodType(method, value), (), {})
    if is_a(value, list | tuple | dict | set | deque) and method is not NULL:
        return replay(vm, iter, (value,), {}, looking=False)
    if method is NULL and is_a(value, torch.Tensor):
        raise CaptureError("a tensor is iterated over")
    raise CaptureError(f"{kind.__qualname__} is iterated over")


def advance(vm: Interpreter, iterator: Any) -> Any:
    """Return the next item of an iterator, or `STOP`."""
    if not vm.recording:
        return vm.natively(next_or_stop, iterator)
    node = vm.heap.find(iterator)
    kind = type(iterator)
    if is_hidden(vm, iterator):
        with vm.barrier():
            return next_or_stop(iterator)
    if kind in natives.ITERATORS and node is not None:
        return recorded(vm, _advance_known, (iterator,), (next_or_stop, (iterator,)), "next")
    return recorded(vm, _advance_by_method, (iterator,), (next_or_stop, (iterator,)), "next")


def _advance_by_method(vm: Interpreter, iterator: Any) -> Any:
    kind = type(iterator)
    method = vm.heap.class_attribute(kind, "__next__")
    if not is_a(method, types.FunctionType):
        raise CaptureError(f"{kind.__qualname__} is advanced")
    try:
        with vm.barrier():
            return vm.call_function(method, (iterator,), {})
    except StopIteration:
        return STOP


def known_iterator(vm: Interpreter, iterator: Any, depth: int = 4) -> None:
    """Guard what an iterator from outside will give, by what it would be pickled as."""
    node = vm.heap.node(iterator)
    if not node.external or node.full:
        return
    if depth == 0 or type(iterator) not in natives.REDUCIBLE:
        raise CaptureError(f"a {type(iterator).__qualname__} from outside")
    parts = iterator.__reduce__()
    heap, path = vm.heap, vm.heap.guard.path(node.var)
    var = heap.guard.bind(f"{node.var}.__reduce__()", f"{path} from here on")
    heap.guard.check(f"len({var}) == {len(parts)} and len({var}[1]) == {len(parts[1])}", f"kind of {path}")
    heap.guard.check(f"{var}[0] is {heap.constant(parts[0])}", f"kind of {path}")
    for number, source in enumerate(parts[1]):
        heap.meet(source, f"{var}[1][{number}]", f"source of {path}", stable=False)
        heap.guard.keep.append(source)
        if type(source) in natives.ITERATORS:
            known_iterator(vm, source, depth - 1)
        else:
            heap.touch(source, 2)
    if len(parts) > 2:
        heap.meet(parts[2], f"{var}[2]", f"position of {path}", stable=False)
    node.full = True


def _advance_known(vm: Interpreter, iterator: Any) -> Any:
    known_iterator(vm, iterator)
    node, item = vm.heap.node(iterator), next_or_stop(iterator)
    vm.heap.change(f"next({node.var}, None)", [node], set())
    return item


# methods of containers --------------------------------------------------------------------
def container_method(
    vm: Interpreter, function: Any, owner: Any, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a method of a list, dict, set, deque or a subclass that overrides nothing."""
    kind = type(owner)
    method = descriptor_of(function)
    base = getattr(method, "__objclass__", None)
    if base not in natives.METHODS or name not in natives.METHODS[base]:
        return _other_method(vm, function, owner, name, rest, kwargs)
    if kind is not base:
        _check_not_overridden_for(vm, kind, base, name, function)
    if name == "sort" and kwargs.get("key") is not None:
        raise CaptureError("list.sort with a key")
    rest = tuple(map(vm.plain, rest))
    kwargs = {key: vm.plain(value) for key, value in kwargs.items()}
    if name in natives.CONSUMING:
        rest = tuple(drained(vm, item) if is_hidden(vm, item) else item for item in rest)
    if base in (dict, OrderedDict, defaultdict) and name in ("get", "__getitem__", "__contains__"):
        quick = dict_read(vm, owner, name, rest, function)
        if quick is not NULL:
            return quick
    given = (method, (owner, *rest), kwargs)
    return recorded(vm, _known_method, (method, owner, name, rest, kwargs), given)


def _known_method(vm: Interpreter, method: Any, owner: Any, name: str, rest: Any, kwargs: Any) -> Any:
    path = vm.heap.guard.paths.get(vm.heap.node(owner).var)
    # Where it keeps growing, what is in it is not read.
    if name not in natives.BLIND or f"len({path})" not in vm.heap.lifted:
        _admit_method(vm, owner, name, rest, kwargs)
    indexed = is_a(owner, list | tuple | deque) and name in natives.INDEXED
    if indexed and rest and not is_constant(rest[0]):
        raise CaptureError(f"{type(rest[0]).__qualname__} stands for an index")
    changes = [] if name in natives.READERS else [vm.heap.node(owner)]
    result = perform(vm, method, (owner, *rest), kwargs, changes)
    if name == "keys":
        vm.heap.node(result).source = owner
    return result


def _admit_method(
    vm: Interpreter, owner: Any, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    looking = name in natives.LOOKING and not is_a(owner, dict)
    vm.heap.node(owner)
    if is_a(owner, set) and name in ("add", "discard", "remove") and identity_key(vm, owner, rest[0]):
        return
    vm.heap.touch(owner, 8 if looking else 1)
    if looking and not is_plain(list(owner)):
        raise CaptureError(f"{name} compares elements")
    if is_a(owner, dict) and name in ("__eq__", "__ne__") and not is_plain(dict(owner)):
        raise CaptureError("dictionaries of objects are compared")
    if name in ("extend", "update", "__init__", "extendleft"):
        for item in rest:
            admit_iterable(vm, item)
    hashed = is_a(owner, dict | set | frozenset) and name not in ("update", "__init__", "__eq__")
    if hashed and rest and not is_plain(rest[0]) and not identity_key(vm, owner, rest[0]):
        raise CaptureError("a key that is not a constant")
    stores = name in natives.STORING and not (rest and is_a(rest[0], slice))
    for item in () if stores else (*rest, *kwargs.values()):
        if not is_constant(item) and is_a(item, list | tuple | dict | set | frozenset | deque):
            check_not_overridden(type(item))
            vm.heap.touch(item, 8 if looking else 1)
        if looking and not is_plain(item):
            raise CaptureError(f"{name} compares objects")


def admit_iterable(vm: Interpreter, item: Any) -> None:
    """Check that what `item` gives may go into a container."""
    if is_constant(item) or is_a(item, list | tuple | dict | set | frozenset | deque):
        return
    if is_hidden(vm, item):
        return
    if type(item) not in natives.ITERATORS and type(item) not in natives.VIEWS:
        raise CaptureError("extended by an unknown iterable")
    if type(item) in natives.ITERATORS:
        known_iterator(vm, item)
    elif vm.heap.node(item).external:
        raise CaptureError("extended by a view from outside")


def _check_not_overridden_for(vm: Interpreter, kind: type, base: type, name: str, function: Any) -> None:
    """Natives of a base class call overridden methods only of certain classes; be strict."""
    if base is not OrderedDict or name in natives.UNHEEDING:
        return  # these work on the storage of the base class alone
    own = {key for home in kind.__mro__[: kind.__mro__.index(base)] for key in vars(home)} & OVERRIDES
    if own - ({"__getitem__"} if name in ("__init__", "update") else set()):
        raise CaptureError(f"{kind.__qualname__} overrides {sorted(own)}")


def dict_read(vm: Interpreter, owner: Any, name: str, rest: tuple[Any, ...], function: Any) -> Any:
    """Read one key, guarding no others; NULL if the general way must be taken."""
    key = rest[0]
    node = vm.heap.node(owner)
    if not is_constant(key) or (type(key) not in (str, int, type(None)) and not is_a(key, type)):
        return NULL
    found = dict.get(owner, key, NULL)
    constant = vm.heap.constant(key)
    path = f"{vm.heap.guard.path(node.var)}[{key!r}]"
    # Another key may be equal and of another type: only keys of this very type are quick.
    if any(other == key and type(other) is not type(key) for other in owner if type(key) is not str):
        return NULL
    if found is NULL:
        vm.heap.absent(node, key, f"not dict.__contains__({node.var}, {constant})", path)
        if name == "__getitem__":
            missing = vm.heap.class_attribute(type(owner), "__missing__")
            if type(owner) is defaultdict and owner.default_factory is not None:
                return _default(vm, owner, node, key)
            if is_a(missing, types.FunctionType):
                return vm.call_function(missing, (owner, key), {})
            raise KeyError(key)
        return False if name == "__contains__" else rest[1] if len(rest) > 1 else None
    if name == "__contains__" and path in vm.heap.lifted:
        if node.external and key not in node.written:
            vm.heap.guard.check(f"dict.__contains__({node.var}, {constant})", f"{path} is there")
        return True
    text = f"{node.var}[{constant}]" if type(owner) in (dict, OrderedDict) else ""
    text = text or f"dict.__getitem__({node.var}, {constant})"
    read = vm.heap.read if name == "__contains__" else vm.heap.load
    value = read(node, key, found, text, path)
    return True if name == "__contains__" else value


def changes_often(vm: Interpreter, node: Node) -> bool:
    """Say whether what is in a dictionary has kept changing, key by key."""
    path = vm.heap.guard.path(node.var)
    return any(f"{path}[{key!r}]" in vm.heap.lifted for key in dict.keys(node.obj))


def _default(vm: Interpreter, owner: Any, node: Node, key: Any) -> Any:
    """Make, store and return the default of a key that a `defaultdict` lacks."""
    factory = owner.default_factory
    path = f"{node.var}.default_factory"
    vm.heap.read(node, "default_factory", factory, path, path)
    with vm.barrier():
        value = vm.call(factory, (), {})
        given = (owner, key, settled(vm, value, keep=True))
        recorded(vm, store_key, given, (operator.setitem, given))
    return value


def _other_method(
    vm: Interpreter, function: Any, owner: Any, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    kind = type(owner)
    if kind in natives.ITERATORS and name in ("__iter__", "__next__"):
        if name == "__iter__":
            return owner
        with vm.barrier():
            item = advance(vm, owner)
        if item is STOP:
            raise StopIteration
        return item
    if kind is types.GeneratorType and is_hidden(vm, owner):
        with vm.barrier():
            return getattr(owner, name)(*rest, **kwargs)
    if is_a(owner, BaseException) and name == "__init__" and is_a(function, _SLOT_CALLS):
        return perform(vm, function, (owner, *rest), kwargs, [vm.heap.node(owner)])
    if kind in _LOCKS and (
        name in ("__enter__", "__exit__") or (name in ("acquire", "release") and not rest)
    ):
        return _lock(vm, getattr(kind, name), owner, rest)
    node = vm.heap.find(owner)
    fresh = node is not None and not node.external and node.recordable
    if fresh and kind is np.ndarray and name in natives.ARRAY_METHODS and is_plain(list(rest)):
        return perform(vm, getattr(kind, name), (owner, *rest), kwargs, [])
    if (fresh and kind.__module__ in ("_hashlib", "_blake2", "re", "_md5", "_sha1")) or kind in natives.VIEWS:
        return perform(vm, getattr(kind, name), (owner, *rest), kwargs, [])
    raise CaptureError(f"{kind.__qualname__}.{name}")


def _lock(vm: Interpreter, method: Any, owner: Any, rest: tuple[Any, ...]) -> Any:
    """Take or release a lock: a matched run does so in the same places."""
    node = vm.heap.node(owner)
    given = "".join(", None" for _ in rest)  # `__exit__` looks at none of its arguments
    result = method(owner, *rest)
    vm.heap.change(f"{vm.heap.constant(method)}({node.var}{given})", [node], set())
    return result


def identity_key(vm: Interpreter, container: Any, item: Any) -> bool:
    """Say whether `item` is hashed and compared by identity, and `container` is ours."""
    node = vm.heap.find(container)
    if node is None or node.external:
        return False
    for value in (item, *container):
        if is_constant(value):
            continue
        kind = type(value)
        by_id = (kind.__hash__, kind.__eq__) == BY_IDENTITY
        if not (by_id or is_plain_tensor(value)):
            return False
        if vm.heap.find(value) is None:
            return False
        vm.heap.distinct.add(kind)
    return True


def store_key(vm: Interpreter, container: dict[Any, Any], key: Any, item: Any) -> None:
    """Set one key. Whether it was there decides the order of the keys, so that is guarded."""
    node = vm.heap.node(container)
    if node.external and not node.mutated and len(container) <= 64 and not changes_often(vm, node):
        vm.heap.touch(container, 1)
    if dict_read(vm, container, "__contains__", (key,), None) is NULL:
        vm.heap.touch(container, 1)
    uses: set[str] = set()
    target = vm.heap.reference(container, uses)
    text = f"dict.__setitem__({target}, {vm.heap.constant(key)}, {vm.heap.reference(item, uses)})"
    dict.__setitem__(container, key, vm.unlifted(item))
    node.wrote(key, item)
    vm.heap.change(text, [node], uses)
