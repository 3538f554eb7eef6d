"""Natives that are called again by matched runs, and the iterators that they take and give."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.fx

from ladder.capture.heap.nodes import CaptureError
from ladder.capture.heap.single import contents
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.opcodes import STOP
from ladder.capture.interpreter.recording import recorded
from ladder.capture.operations.moving import built, step, walk
from ladder.capture.operations.objects import (
    LAZY,
    check_not_overridden,
    closes_something,
    is_fixed,
    perform,
    pinned_part,
    seen_through,
)
from ladder.capture.operations.symbolic import computed_dynamic, pure_dynamic
from ladder.capture.python import natives, polyfills
from ladder.capture.python.frames import NULL
from ladder.capture.values.kinds import PLAIN_DICTS, is_a, is_constant, is_plain, name_of_kind
from ladder.capture.values.shapes import Walk

_MAPPINGS = (dict, OrderedDict)
_OF_ITERABLES = (zip, itertools.zip_longest, itertools.chain, itertools.product)
"""Natives that iterate over each of their arguments."""
_KEYS: tuple[type, ...] = (type({}.keys()), type(OrderedDict().keys()))


def _consumes(function: Any) -> bool:
    """Say whether a native takes all that the iterators it is given have."""
    return function in natives.CONSUMERS or getattr(function, "__name__", "") == "join"


def next_or_stop(iterator: Iterator[Any]) -> Any:
    """Return the next item, or `STOP`."""
    return next(iterator, STOP)


def taken(value: Any, first: int | None, rest: bool) -> tuple[Any, ...]:
    """Return items of `value` as unpacking takes them; see `building.unpacked`."""
    if first is None:
        return tuple(value)
    if not is_iterable(type(value)):
        raise TypeError(f"cannot unpack non-iterable {name_of_kind(value)} object")
    stream = iter(value)
    items: list[Any] = []
    for _ in range(first if rest else first + 1):
        item = next(stream, STOP)
        if item is STOP:
            return tuple(items)
        items.append(item)
    return (*items, *list(stream)) if rest else tuple(items)


def is_iterable(kind: type) -> bool:
    """Say whether the interpreter takes objects of a class for iterable: it looks at the class alone."""
    names = {"__iter__", "__getitem__"}
    return kind is Walk or any(not names.isdisjoint(vars(owner)) for owner in kind.__mro__)


def items_of(value: Any) -> list[Any]:
    """Return all items of `value`, without asking it how many there are."""
    return [item for item in value]  # noqa: C416 `list` would ask


def mapping_items(value: Any, called: str = "") -> dict[Any, Any]:
    """Return what a mapping holds that is unpacked, as the named arguments of a call if any is `called`."""
    try:
        return {**value}
    except TypeError as error:
        refused = str(error)
        if not called or refused != f"'{type(value).__name__}' object is not a mapping":
            raise
    raise TypeError(f"{called} argument after ** must be a mapping, not {type(value).__name__}")


# replay -----------------------------------------------------------------------------------
def replay(
    vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, looking: bool
) -> Any:
    """Call a replayable native; a matched run calls it again if its result lives on."""
    if looking and pure_dynamic(function, args, kwargs):
        return computed_dynamic(vm, function, args)
    opened = built(vm, function, args, kwargs)
    if opened is not NULL:
        return opened
    args, kwargs = vm.plain_given(args, kwargs)
    args = _iterated_args(vm, function, args)
    hidden = any(is_hidden(vm, item) for item in args)
    if hidden and function in natives.CHANGES and _consumes(function):
        return vm.call_function(pinned_part(vm, polyfills.item_by_item), (function, *args), kwargs)
    if _consumes(function):
        kinds = natives.ITERATORS if looking or function in natives.NAMED_ITEMS else frozenset()
        args = tuple(
            drained(vm, item) if type(item) in kinds or is_hidden(vm, item) else item for item in args
        )
        opened = built(vm, function, args, kwargs)
        if opened is not NULL:
            return opened
        args = tuple(map(vm.plain, args))
    elif hidden and function not in LAZY:
        raise CaptureError("a native given a generator")
    if function in natives.CONSUMERS and len(args) == 1:
        args = (_keys_alone(vm, args[0]),)
    if looking and function in natives.KEYS_ONLY and args and type(args[0]) in PLAIN_DICTS:
        vm.heap.touch(args[0], 1)
        args = (tuple(args[0]), *args[1:])
    # What iterators had is in `args` by now: the call must not be made with the iterators again.
    call = (function, args, kwargs)
    return recorded(vm, _replayed, (*call, looking, hidden and function in LAZY), call)


def _iterated_args(vm: Interpreter, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a native with what it iterates over as `iterated` gives it."""
    if function in _OF_ITERABLES:
        return tuple(iterated(vm, item, function) for item in args)
    if function is enumerate or (function in natives.CONSUMERS and function not in _MAPPINGS):
        several = function in (min, max) and len(args) > 1  # these compare their arguments
        return args if several or not args else (iterated(vm, args[0], function), *args[1:])
    return args


def _replayed(vm: Interpreter, function: Any, args: Any, kwargs: Any, looking: bool, hidden: bool) -> Any:
    moved = () if function in natives.NAMED_ITEMS else kwargs.values()
    if function in natives.NAMED_ITEMS:
        touch_pairs(vm, args)
    elif function == dict.fromkeys:
        vm.heap.touch(args)
    for item in (*args, *moved):
        _admit_fixed(vm, function, item) if looking and _holds_fixed(vm, item) else admit(vm, item, looking)
    if hidden:
        return _hidden_result(vm, function, args, kwargs)
    changes = [vm.heap.node(args[0])] if function in natives.CHANGES else []
    return perform(vm, function, args, kwargs, changes)


def touch_pairs(vm: Interpreter, sources: Iterable[Any]) -> None:
    """Guard what natives look at that make a dictionary of pairs: how long these are, and their keys."""
    for source in sources:
        if is_a(source, list | tuple | deque):
            vm.heap.touch(source, 2)
            for pair in contents(source):
                vm.heap.touch(pair, 1)
                vm.heap.touch(pair[0]) if is_a(pair, list | tuple) and pair else None


def _keys_alone(vm: Interpreter, value: Any) -> Any:
    """Return the keys of a dictionary that the program has made: its items need not be made for them."""
    source = vm.heap.node(value).source if type(value) in _KEYS else None
    made = source is not None and not vm.heap.node(source).external
    return tuple(value) if made and is_constant(tuple(value)) else value


def _holds_fixed(vm: Interpreter, item: Any) -> bool:
    return is_fixed(vm, item) or (type(item) in (list, tuple) and any(is_fixed(vm, part) for part in item))


def _admit_fixed(vm: Interpreter, function: Any, item: Any) -> None:
    """Check that `function` may be given an object that natives made, or a sequence with some in it."""
    home = getattr(function, "__objclass__", None)
    if function not in natives.OF_ARRAYS and home not in natives.FIXED:
        raise CaptureError(f"a native given {type(item).__qualname__}")
    if not is_fixed(vm, item):
        vm.heap.touch(item, 1)
        for part in item:
            _admit_fixed(vm, function, part) if is_fixed(vm, part) else admit(vm, part, True)


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
        vm.heap.touch(value)  # what a tuple of constants holds may come from outside
        return
    kind = type(value)
    parts = list(value) if kind in natives.VIEWS else value
    if is_a(value, tuple):
        parts = contents(value)
    if looking and not is_plain(parts):
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
    if closes_something(vm, args):
        raise vm.leave("it matters when a generator is dropped")
    result = function(*args, **kwargs)
    vm.heap.hidden(result, vm.here())
    return result


# iteration --------------------------------------------------------------------------------
def iterate(vm: Interpreter, value: Any) -> Any:
    """Return ``iter(value)``."""
    walked = walk(vm, value)
    if walked is not NULL:
        return walked
    value = vm.plain(value)
    return recorded(vm, _iterate, (value,), (iter, (value,)))


def _iterate(vm: Interpreter, value: Any) -> Any:
    value = seen_through(vm, value)
    kind = type(value)
    if is_a(value, types.GeneratorType) or kind in natives.ITERATORS or is_hidden(vm, value):
        return value
    if kind is tuple and any(is_hidden(vm, item) for item in value):
        return vm.call_function(pinned_part(vm, polyfills.rows), (value,), {})
    if kind in natives.METHODS or is_a(value, str | bytes | range | torch.Size):
        return replay(vm, iter, (value,), {}, looking=False)
    if kind in natives.VIEWS:
        return replay(vm, iter, (value,), {}, looking=False)
    method = vm.heap.class_attribute(kind, "__iter__")
    if is_a(method, types.FunctionType):
        made = vm.call(types.MethodType(method, value), (), {})
        if type(made) is not Walk and not hasattr(type(made), "__next__"):
            raise TypeError(f"iter() returned non-iterator of type '{type(vm.plain(made)).__name__}'")
        return made
    if is_a(value, list | tuple | dict | set | deque) and method is not NULL:
        return replay(vm, iter, (value,), {}, looking=False)
    if is_fixed(vm, value):
        return vm.call_function(pinned_part(vm, polyfills.rows), (value,), {})
    if method is NULL and is_a(value, torch.Tensor):
        raise CaptureError("a tensor is iterated over")
    raise CaptureError(f"{kind.__qualname__} is iterated over")


def advance(vm: Interpreter, iterator: Any) -> Any:
    """Return the next item of an iterator, or `STOP`."""
    if type(iterator) is Walk:
        return step(vm, iterator, STOP)
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
