"""Methods of containers: their reads are guarded, their changes made again."""

from __future__ import annotations

import operator
import threading
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

from ladder.capture.heap.nodes import CaptureError, Itself, Node
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.opcodes import STOP
from ladder.capture.interpreter.recording import recorded
from ladder.capture.operations.moving import moved
from ladder.capture.operations.objects import (
    OVERRIDES,
    check_not_overridden,
    is_fixed,
    perform,
    pinned_part,
    require_fitting,
    settled,
)
from ladder.capture.operations.replay import (
    advance,
    drained,
    is_hidden,
    known_iterator,
    replay,
    touch_pairs,
)
from ladder.capture.operations.tensor_operators import known_text
from ladder.capture.python import natives, polyfills
from ladder.capture.python.frames import NULL
from ladder.capture.values.kinds import descriptor_of, is_a, is_constant, is_key, is_plain
from ladder.capture.values.tensors import is_plain_tensor

TEXTS = (str, bytes)
"""Types of keys that equal no key of another type."""
QUICK = (*TEXTS, int, type(None), types.FunctionType)
"""Types of keys that are looked up alone: what else a dictionary holds is not read."""
_SLOT_CALLS = (types.WrapperDescriptorType,)
BY_IDENTITY: Any = (object.__hash__, object.__eq__)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def container_method(
    vm: Interpreter, function: Any, owner: Any, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a method of a list, dict, set, deque or a subclass that overrides nothing."""
    kind = type(owner)
    method = descriptor_of(function)
    require_fitting(method, (owner, *rest), kwargs)
    base = getattr(method, "__objclass__", None)
    if base not in natives.METHODS or name not in natives.METHODS[base]:
        return _other_method(vm, function, owner, name, rest, kwargs)
    if kind is not base:
        _check_not_overridden_for(kind, base, name)
    if name == "sort" and kwargs.get("key") is not None:
        raise CaptureError("list.sort with a key")
    opened = moved(vm, owner, name, rest, kwargs) if kind is base else NULL
    if opened is not NULL:
        return opened
    if name == "get" and rest and is_a(owner, dict):
        rest = (vm.plain(rest[0]), *rest[1:])
        quick = dict_read(vm, owner, name, rest)
        if quick is not NULL:
            return quick
    rest, kwargs = vm.plain_given(rest, kwargs)
    rest = _with_known_key(vm, owner, rest)
    if any(_is_taken_apart(vm, owner, item) for item in rest) and _takes_items(name, rest):
        return _with_items(vm, function, owner, name, rest, kwargs)
    if base in (dict, OrderedDict, defaultdict) and name in ("__getitem__", "__contains__"):
        quick = dict_read(vm, owner, name, rest)
        if quick is not NULL:
            return quick
    given = (method, (owner, *rest), kwargs)
    return recorded(vm, _known_method, (method, owner, name, rest, kwargs), given)


def _with_known_key(vm: Interpreter, owner: Any, rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a method; a key that values of tensors make up is assumed to be what it is."""
    hashed = bool(rest) and is_a(owner, dict | set | frozenset)
    return (known_text(vm, rest[0]), *rest[1:]) if hashed else rest


def _is_taken_apart(vm: Interpreter, owner: Any, item: Any) -> bool:
    """Say whether a method must not take the items of an iterator itself: what pairs hold is looked at."""
    return is_hidden(vm, item) or (is_a(owner, dict) and type(item) in natives.ITERATORS)


def _takes_items(name: str, rest: tuple[Any, ...]) -> bool:
    return name in natives.CONSUMING or (name == "__setitem__" and is_a(rest[0], slice))


def _with_items(
    vm: Interpreter, function: Any, owner: Any, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a method that takes all that iterators of this segment have."""
    method = descriptor_of(function)
    if name == "__init__" and method.__objclass__ in natives.FILLS:
        container_method(vm, function, owner, name, ((), *rest[1:]), kwargs)
        method, rest, kwargs = natives.FILLS[method.__objclass__], rest[:1], {}
    if method in natives.STEPWISE:
        return vm.call_function(pinned_part(vm, polyfills.item_by_item), (method, owner, *rest), kwargs)
    rest = tuple(drained(vm, item) if _is_taken_apart(vm, owner, item) else item for item in rest)
    return container_method(vm, function, owner, name, rest, kwargs)


def _known_method(vm: Interpreter, method: Any, owner: Any, name: str, rest: Any, kwargs: Any) -> Any:
    for item in rest:
        if type(item) in (tuple, frozenset) and is_constant(item):
            vm.heap.touch(item)
    if not is_a(owner, tuple | frozenset):  # these are made again of their parts
        vm.heap.node(owner)
    # Where it keeps growing, what is in it is not read.
    read = name not in natives.BLIND or not _keeps_growing(vm, owner)
    by_identity = read and _admit_method(vm, owner, name, rest, kwargs)
    indexed = is_a(owner, list | tuple | deque) and name in natives.INDEXED
    if indexed and rest and not is_constant(rest[0]):
        raise CaptureError(f"{type(rest[0]).__qualname__} stands for an index")
    changes = [] if name in natives.READERS else [vm.heap.node(owner)]
    result = perform(vm, method, (owner, *rest), kwargs, changes)
    if by_identity:
        vm.heap.node(owner).by_identity = True
    if name == "keys":
        vm.heap.node(result).source = owner
    return result


def _keeps_growing(vm: Interpreter, owner: Any) -> bool:
    return f"len({vm.heap.guard.paths.get(vm.heap.node(owner).var)})" in vm.heap.lifted


def _admit_method(
    vm: Interpreter, owner: Any, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Check that a method may be called; say whether all that is then in the container is `identity_key`."""
    looking = name in natives.LOOKING and not is_a(owner, dict)
    if is_a(owner, set) and name in ("add", "discard", "remove") and identity_key(vm, owner, rest[0]):
        return True
    vm.heap.touch(owner, 8 if looking else 1)
    if looking and not is_plain(list(owner)):
        raise CaptureError(f"{name} compares elements")
    if is_a(owner, dict) and name in ("__eq__", "__ne__") and not is_plain(dict(owner)):
        raise CaptureError("dictionaries of objects are compared")
    if name in ("extend", "update", "__init__", "extendleft"):
        for item in rest:
            admit_iterable(vm, item)
        touch_pairs(vm, rest if is_a(owner, dict) else ())
    hashed = is_a(owner, dict | set | frozenset) and name not in ("update", "__init__", "__eq__")
    keyed = hashed and bool(rest) and not is_plain(rest[0])
    if keyed and not identity_key(vm, owner, rest[0]):
        raise CaptureError("a key that is not a constant")
    stores = name in natives.STORING and not (rest and is_a(rest[0], slice))
    for item in () if stores else (*rest, *kwargs.values()):
        if not is_constant(item) and is_a(item, list | tuple | dict | set | frozenset | deque):
            check_not_overridden(type(item))
            vm.heap.touch(item, 8 if looking else 1)
        if looking and not is_plain(item):
            raise CaptureError(f"{name} compares objects")
    return keyed and name == "__setitem__"


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


def _check_not_overridden_for(kind: type, base: type, name: str) -> None:
    """Natives of a base class call overridden methods only of certain classes; be strict."""
    if base is not OrderedDict or name in natives.UNHEEDING:
        return  # these work on the storage of the base class alone
    own = {key for home in kind.__mro__[: kind.__mro__.index(base)] for key in vars(home)} & OVERRIDES
    if own - ({"__getitem__"} if name in ("__init__", "update") else set()):
        raise CaptureError(f"{kind.__qualname__} overrides {sorted(own)}")


def dict_read(vm: Interpreter, owner: Any, name: str, rest: tuple[Any, ...]) -> Any:
    """Read one key, guarding no others; NULL if the general way must be taken."""
    key = rest[0]
    node = vm.heap.node(owner)
    if type(key) is str and node.is_known(key) and (name == "__contains__" or dict.__contains__(owner, key)):
        return dict.__contains__(owner, key) if name == "__contains__" else dict.__getitem__(owner, key)
    return _key_read(vm, owner, node, name, rest)


def _key_read(vm: Interpreter, owner: Any, node: Node, name: str, rest: tuple[Any, ...]) -> Any:
    """Read a key, and note what is there."""
    key = rest[0]
    vm.heap.touch(key) if type(key) in (tuple, frozenset) else None
    if not is_key(key) or (type(key) not in QUICK and not is_a(key, type)):
        return NULL
    vm.heap.meet_key(key)
    not_alone = type(key) not in (*TEXTS, types.FunctionType)
    if not_alone and _may_find_another(key, owner):
        return NULL
    found = dict.get(owner, key, NULL)
    constant = vm.heap.constant(key)
    path = f"{vm.heap.guard.path(node.var)}[{key!r}]"
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
    if name == "__contains__" and node.holds_dynamic(key):
        return True
    if name == "__contains__" and path in vm.heap.lifted:
        if node.external and key not in node.written:
            vm.heap.guard.check(f"dict.__contains__({node.var}, {constant})", f"{path} is there")
        return True
    text = f"{node.var}[{constant}]" if type(owner) in (dict, OrderedDict) else ""
    text = text or f"dict.__getitem__({node.var}, {constant})"
    read = vm.heap.read if name == "__contains__" else vm.heap.load
    value = read(node, key, found, text, path)
    return True if name == "__contains__" else value


def _may_find_another(key: Any, owner: Any) -> bool:
    """Say whether a lookup of `key` may find another key, or ask code of the program for one."""
    alike = {*map(type, dict.__iter__(owner))} <= {type(key), str}
    return not alike and any(_may_be_taken_for(key, other) for other in dict.__iter__(owner))


def _may_be_taken_for(key: Any, other: Any) -> bool:
    """Say whether a lookup of `key` may find `other`, of another type, or ask code of the program for it."""
    if is_key(other):
        return other == key and type(other) is not type(key)
    return not is_plain_tensor(other) and (type(other).__hash__, type(other).__eq__) != BY_IDENTITY


def changes_often(vm: Interpreter, node: Node) -> bool:
    """Say whether what is in a dictionary has kept changing, key by key."""
    path = vm.heap.guard.path(node.var)
    return any(f"{path}[{key!r}]" in vm.heap.lifted for key in dict.keys(node.obj))


def _default(vm: Interpreter, owner: Any, node: Node, key: Any) -> Any:
    """Make, store and return the default of a key that a `defaultdict` lacks."""
    factory = owner.default_factory
    path = f"{node.var}.default_factory"
    if node.first(Itself.FACTORY):
        vm.heap.meet(factory, path, path, stable=node.stable)
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
    if name in natives.FIXED.get(kind, ()) and is_fixed(vm, owner):
        return replay(vm, getattr(kind, name), (owner, *rest), kwargs, looking=True)
    if (fresh and kind.__module__ in ("_hashlib", "_blake2", "_md5", "_sha1")) or kind in natives.VIEWS:
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
    """Say whether `item` and all in `container`, which is ours, are hashed and compared by identity."""
    node = vm.heap.find(container)
    if node is None or node.external:
        return False
    if not all(_is_identity_key(vm, key) for key in ((item,) if node.by_identity else (item, *container))):
        return False
    node.by_identity = True
    return True


def _is_identity_key(vm: Interpreter, key: Any) -> bool:
    """Say whether a key, or each element of a tuple, is a constant or is compared by identity."""
    if is_constant(key):
        return True
    if type(key) is tuple:
        return all(_is_identity_key(vm, part) for part in key)
    return told_apart(vm, key) or (is_plain_tensor(key) and _is_distinct(vm, key))


def told_apart(vm: Interpreter, value: Any) -> bool:
    """Say whether an object of this run is hashed and compared by identity; which it is, is guarded then."""
    kind = type(value)
    return (kind.__hash__, kind.__eq__) == BY_IDENTITY and _is_distinct(vm, value)


def _is_distinct(vm: Interpreter, value: Any) -> bool:
    known = vm.heap.find(value) is not None
    if known:
        vm.heap.distinct.add(type(value))
    return known


def store_key(vm: Interpreter, container: dict[Any, Any], key: Any, item: Any) -> None:
    """Set one key. Whether it was there decides the order of the keys, so that is guarded."""
    node = vm.heap.node(container)
    if node.external and not node.mutated and len(container) <= 64 and not changes_often(vm, node):
        vm.heap.touch(container, 1)
    if dict_read(vm, container, "__contains__", (key,)) is NULL:
        vm.heap.touch(container, 1)
    uses: set[str] = set()
    target = vm.heap.reference(container, uses)
    text = f"dict.__setitem__({target}, {vm.heap.constant(key)}, {vm.heap.reference(item, uses)})"
    vm.heap.keep_entry(node, key)
    replaces = key in container
    dict.__setitem__(container, key, vm.held(item))
    node.wrote(key, item)
    vm.heap.change(text, [node], uses)
    if replaces:
        vm.heap.steps[-1].slot = node.var, type(key), key
