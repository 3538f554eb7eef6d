"""Instructions that may become tensor operators: arithmetic, comparison, truth, subscripts."""

from __future__ import annotations

import operator
import types
import typing
from collections import OrderedDict, deque
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.fx

from ladder.capture.heap.nodes import CaptureError, Dynamic
from ladder.capture.heap.single import contents
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.recording import call_in_statement, recorded
from ladder.capture.operations.attributes import load_attr
from ladder.capture.operations.containers import (
    container_method,
    dict_read,
    identity_key,
    store_key,
    told_apart,
)
from ladder.capture.operations.moving import JOINS, item_at, joined
from ladder.capture.operations.objects import (
    is_fixed,
    perform,
    pinned_part,
    seen_through,
    settled,
    tuple_item,
)
from ladder.capture.operations.replay import admit, is_hidden, replay, touch_pairs
from ladder.capture.operations.symbolic import computed_dynamic, pure_dynamic
from ladder.capture.operations.tensor_operators import known_text, tensor_operator
from ladder.capture.operations.truth import decided, user_constant
from ladder.capture.operations.user_operators import user_binary, user_unary
from ladder.capture.python import natives, polyfills
from ladder.capture.python.frames import NULL
from ladder.capture.python.symbols import BINARY, COMPARE, IN_PLACE, UNARY
from ladder.capture.values import tensors
from ladder.capture.values.kinds import is_a, is_constant, is_key, is_plain
from ladder.capture.values.shapes import DynamicSize

_CONTAINERS = (list, tuple, dict, set, frozenset)


_ALIASES = (types.GenericAlias, types.UnionType)


def _touch_constants(vm: Interpreter, *values: Any) -> None:
    """Guard what tuples of constants hold: those from outside may hold others."""
    for value in values:
        if is_constant(value):
            vm.heap.touch(value)


def negated_contains(container: Any, item: Any) -> bool:
    """Return ``item not in container``."""
    return item not in container


def binary(vm: Interpreter, symbol: str, left: Any, right: Any) -> Any:
    """Return ``left symbol right``, also for comparisons and in-place forms."""
    function = BINARY[symbol]
    return recorded(vm, _binary, (symbol, function, left, right), (function, (left, right)))


def _binary(vm: Interpreter, symbol: str, function: Any, left: Any, right: Any) -> Any:
    if (found := _of_sizes(vm, symbol, left, right)) is not NULL:
        return found
    if is_a(left, torch.Tensor) or is_a(right, torch.Tensor):
        return _tensor_binary(vm, symbol, function, left, right)
    if symbol in IN_PLACE and type(left) in (Dynamic, int, float, bool, complex):
        function = BINARY[symbol[:-1]]  # numbers have no in-place form
    if pure_dynamic(function, (left, right), {}):
        return computed_dynamic(vm, function, (left, right))
    both = joined(vm, symbol, left, right)
    if both is not NULL:
        return both
    left, right = vm.plain(left), vm.plain(right)
    if is_constant(left) and is_constant(right) and not user_constant(left, right):
        _touch_constants(vm, left, right)
        return function(left, right)
    if symbol == "|" and is_a(left, _ALIASES) | is_a(right, _ALIASES):
        return perform(vm, function, (left, right), {}, [])
    if is_fixed(vm, left) or is_fixed(vm, right):
        return replay(vm, _not_in_place(symbol, function), (left, right), {}, looking=True)
    known = (*_CONTAINERS, int, str)
    if is_a(left, known) and is_a(right, known):
        return _container_binary(vm, symbol, function, left, right)
    method = JOINS.get(type(left), {}).get(symbol) if is_hidden(vm, right) else None
    return _by_methods(vm, symbol, left, right) if method is None else _filled(vm, left, method, right)


def _filled(vm: Interpreter, owner: Any, method: Any, items: Any) -> Any:
    """Return a container after ``+=`` or ``|=`` with an iterator of this segment."""
    with vm.barrier():
        vm.call_function(pinned_part(vm, polyfills.item_by_item), (method, owner, items), {})
    return owner


def _not_in_place(symbol: str, function: Any) -> Any:
    if symbol in IN_PLACE:
        raise CaptureError("an array is changed in place")
    return function


def _of_sizes(vm: Interpreter, symbol: str, left: Any, right: Any) -> Any:
    """Return a shape and a tuple joined, or whether they are equal; NULL for other operands and operators."""
    if DynamicSize not in (type(left), type(right)):
        return NULL
    if symbol == "+":
        return _joined_sizes(left, right)
    if symbol in ("==", "!=") and _are_sizes(left, right):
        _touch_constants(vm, vm.seen(left), vm.seen(right))
        return _same_sizes(vm, left, right) is (symbol == "==")
    return NULL


def _joined_sizes(left: Any, right: Any) -> Any:
    """Concatenate shapes, or a shape and a tuple."""
    if not (is_a(left, tuple) and is_a(right, tuple)):
        raise CaptureError("a shape is added to what is no tuple")
    values = [torch.Size(()) if type(item) is DynamicSize else type(item)(()) for item in (left, right)]
    joined = (*left, *right)
    return DynamicSize(joined) if type(values[0] + values[1]) is torch.Size else joined


def _are_sizes(*values: Any) -> bool:
    """Tell whether all are tuples of numbers, read or known."""
    sequences = all(type(value) in (tuple, torch.Size, DynamicSize) for value in values)
    return sequences and all(type(item) in (int, Dynamic) for value in values for item in value)


def _same_sizes(vm: Interpreter, left: Any, right: Any) -> bool:
    """Tell whether shapes are equal."""
    return len(left) == len(right) and all(map(partial(_is_one_extent, vm), left, right))


def _is_one_extent(vm: Interpreter, one: Any, other: Any) -> bool:
    """Tell whether extents are equal: of open ones that is guarded, unless they are one expression."""
    opened = [item for item in (one, other) if type(item) is Dynamic]
    symbols = [item.symbol.node.expr for item in opened if is_a(item.symbol, torch.SymInt)]
    if len(symbols) == 2 and symbols[0] == symbols[1]:
        return True
    if len(opened) == 1 and opened[0].value in (one, other):
        return bool(vm.plain(one) == vm.plain(other))  # the open one is a number that is known
    return bool(vm.plain(computed_dynamic(vm, operator.eq, (one, other))) if opened else one == other)


def _tensor_binary(vm: Interpreter, symbol: str, function: Any, left: Any, right: Any) -> Any:
    left, right = (item if type(item) is Dynamic else vm.plain(item) for item in (left, right))
    # numpy leaves operators to tensors, to which its bool and complex numbers are floats.
    left, right = (item.item() if is_a(item, np.integer | np.floating) else item for item in (left, right))
    if symbol in IN_PLACE and not is_a(left, torch.Tensor):
        function = BINARY[symbol[:-1]]  # numbers have no in-place form
    other = right if is_a(left, torch.Tensor) else left
    if type(other) in (Dynamic, int, float, bool, complex) or is_a(other, torch.Tensor):
        return tensor_operator(vm, function, (left, right), {})
    if other is None and symbol in ("==", "!="):
        return function(left, right)
    raise CaptureError(f"a tensor {symbol} {type(other).__qualname__}")


def _container_binary(vm: Interpreter, symbol: str, function: Any, left: Any, right: Any) -> Any:
    for item in (left, right):
        if (
            type(item) not in natives.METHODS
            and not is_constant(item)
            and not _is_plain_tuple(vm, symbol, item)
        ):
            raise CaptureError("arithmetic of a container subclass")
    looking = symbol in COMPARE or is_a(left, set | frozenset | dict) or symbol.startswith("%")
    for item in (left, right):
        admit(vm, item, looking and not (is_a(left, dict) and symbol.startswith("|")))
    touch_pairs(vm, (right,) if is_a(left, dict) else ())
    in_place = symbol.endswith("=") and symbol not in COMPARE and not is_constant(left)
    changes = [vm.heap.node(left)] if in_place and type(left) in (list, set, dict) else []
    return perform(vm, function, (left, right), {}, changes)


_KEYS = frozenset({type({}.keys()), type(OrderedDict[Any, Any]().keys())})


def _by_methods(vm: Interpreter, symbol: str, left: Any, right: Any) -> Any:
    """Return what methods of the program give; keys of dictionaries are sets, and none changes in place."""
    kinds = {type(left), type(right)}
    if not kinds & _KEYS or not kinds <= _KEYS | {set, frozenset}:
        return user_binary(vm, symbol, left, right)
    symbol = symbol[:-1] if symbol in IN_PLACE else symbol
    with vm.barrier():
        sides = [side if type(side) is set else vm.call(set, (side,), {}) for side in (left, right)]
    return _container_binary(vm, symbol, BINARY[symbol], *sides)


def _is_plain_tuple(vm: Interpreter, symbol: str, value: Any) -> bool:
    """Say whether `symbol` compares a tuple of a class of its own, such as a named one, as any tuple."""
    if symbol not in COMPARE or not is_a(value, tuple):
        return False
    kind, names = type(value), (f"__{name}__" for name in COMPARE.values())
    return all(vm.heap.class_attribute(kind, name) is getattr(tuple, name) for name in names)


def unary(vm: Interpreter, symbol: str, value: Any) -> Any:
    """Return ``symbol value``."""
    function = UNARY[symbol]
    return recorded(vm, _unary, (symbol, function, value), (function, (value,)))


def _unary(vm: Interpreter, symbol: str, function: Any, value: Any) -> Any:
    if is_a(value, torch.Tensor):
        return tensor_operator(vm, function, (value,), {})
    if type(value) is Dynamic:
        return computed_dynamic(vm, function, (value,))
    if is_constant(value) and not user_constant(value):
        _touch_constants(vm, value)
        return function(value)
    if is_fixed(vm, value):
        return replay(vm, function, (value,), {}, looking=True)
    return user_unary(vm, symbol, function, value)


def contains(vm: Interpreter, container: Any, item: Any, negate: bool) -> Any:
    """Return ``item in container`` or its negation."""
    container, item = vm.plain(container), vm.plain(item)
    function = negated_contains if negate else operator.contains
    return recorded(vm, _contains, (container, item, negate), (function, (container, item)))


def _contains(vm: Interpreter, container: Any, item: Any, negate: bool) -> bool:
    return _holds(vm, seen_through(vm, container), item) is not negate


def _looked_up(container: Any, item: Any) -> tuple[Any, ...]:
    """Return the functions and constants compared where `item` is looked for; empty if others are."""
    if type(container) in (set, frozenset):
        return (item,) if is_key(item) else ()
    keys = (item, *container) if type(container) in (tuple, list) else ()
    return keys if all(map(_is_native_key, keys)) else ()


def _is_native_key(value: Any) -> bool:
    """Tell whether a value is a function of a module or a constant that no class of the program compares."""
    return is_key(value) and (type(value) is types.FunctionType or not user_constant(value))


def _holds(vm: Interpreter, container: Any, item: Any) -> bool:
    kind = type(container)
    _touch_constants(vm, container, item)
    if is_constant(container) and is_constant(item) and vm.heap.find(container) is None:
        return item in container
    view = vm.heap.find(container) if kind in natives.VIEWS else None
    if view is not None and view.source is not None:
        return _holds(vm, view.source, item)
    method = vm.heap.class_attribute(kind, "__contains__")
    if is_a(method, types.FunctionType):
        with vm.barrier():
            return decided(vm, vm.call_function(method, (container, item), {}))
    if is_a(container, dict | set | frozenset):
        item = known_text(vm, item)
    if is_a(container, dict) and is_key(item):
        quick = dict_read(vm, container, "__contains__", (item,))
        if quick is not NULL:
            return bool(quick)
    if is_fixed(vm, container):
        return bool(replay(vm, operator.contains, (container, item), {}, looking=True))
    return _holds_natively(vm, container, item)


def _holds_natively(vm: Interpreter, container: Any, item: Any) -> bool:
    if is_a(container, set | dict) and identity_key(vm, container, item):
        return item in container
    if keys := _looked_up(container, item):
        vm.heap.touch(container, 1)
        for each in contents(container) or ():
            vm.heap.touch(each)  # tuples are compared by what they hold
        for key in keys:
            vm.heap.meet_key(key)
        return item in container
    if type(container) in (tuple, list) and told_apart(vm, item):
        vm.heap.touch(container, 1)
        if all(_is_native_key(each) or told_apart(vm, each) for each in container):
            return item in container
    if not (is_plain(item) and (is_a(container, dict) or is_plain(container))):
        raise CaptureError("membership among objects")
    admit(vm, container, not is_a(container, dict))
    admit(vm, item, True)
    return item in container


# subscripts -------------------------------------------------------------------------------
def subscript(vm: Interpreter, container: Any, key: Any) -> Any:
    """Return ``container[key]``."""
    container = vm.plain(container) if type(container) not in (tuple, DynamicSize) else container
    container = seen_through(vm, container)
    key = vm.plain(key) if not is_a(container, torch.Tensor) else key
    return recorded(vm, _subscript, (container, key), (operator.getitem, (container, key)))


def _subscript(vm: Interpreter, container: Any, key: Any) -> Any:
    if is_a(container, torch.Tensor):
        return tensor_operator(vm, operator.getitem, _selected(vm, container, key), {})
    if type(container) is DynamicSize and type(key) is slice:
        return DynamicSize(container[key])
    if is_a(container, type | torch.nn.Module):
        pass
    elif is_a(container, tuple) and is_a(key, int) and _plain_items(vm, container):
        return tuple_item(vm, container, key)
    elif is_constant(container) and is_constant(key) and not user_constant(container):
        _touch_constants(vm, container, key)
        return container[key]
    elif type(container) is tuple and type(key) is slice:
        vm.heap.touch(container, 1)
        return container[key]
    elif is_a(container, list | tuple | dict | deque):
        method = vm.heap.class_attribute(type(container), "__getitem__")
        if not is_a(method, types.FunctionType):
            found = item_at(vm, container, key)
            given: tuple[Any, ...] = (container, "__getitem__", (key,), {})
            return container_method(vm, method, *given) if found is NULL else found
    method = vm.heap.class_attribute(type(container), "__getitem__")
    if is_a(method, types.FunctionType):
        return vm.call_function(method, (container, key), {})
    return _fixed_item(vm, container, key)


def _selected(vm: Interpreter, tensor: torch.Tensor, key: Any) -> tuple[torch.Tensor, Any]:
    """Return a tensor and an index of it that mean ``tensor[key]``, open integers among it selected.

    ``select`` takes symbols; torch's subscripts would fix them.
    """
    keys = key if type(key) is tuple else (key,)
    if not any(map(_is_open_integer, keys)) or not all(map(_is_basic_index, keys)) or tensors.maps_rows():
        return tensor, key
    skipped = tensor.ndim - sum(each is not None and each is not Ellipsis for each in keys)
    if skipped < 0 or sum(each is Ellipsis for each in keys) > 1:
        return tensor, key
    axis, places, rest = 0, [], []
    for each in keys:
        if _is_open_integer(each):
            places.append((axis, each))
        else:
            rest.append(each)
        axis += skipped if each is Ellipsis else each is not None
    if not all(_is_within(vm, tensor, at, number) for at, number in places):
        return tensor, key
    with vm.barrier():
        for place in reversed(places):
            tensor = tensor_operator(vm, torch.select, (tensor, *place), {})
    return tensor, tuple(rest) or Ellipsis


def _is_within(vm: Interpreter, tensor: torch.Tensor, axis: int, number: Any) -> bool:
    """Tell whether an open integer numbers an element of an axis; that it does is guarded."""
    if not -tensor.shape[axis] <= number.value < tensor.shape[axis]:
        return False
    fake = vm.heap.shapes.fake_of(vm.heap.node(tensor).var, tensor)
    extent = fake.shape[axis]
    return bool(number.symbol >= -extent) and bool(number.symbol < extent)


def _is_open_integer(value: Any) -> bool:
    return type(value) is Dynamic and type(value.value) is int and value.symbol is not None


def _is_basic_index(value: Any) -> bool:
    """Say whether an item of a subscript gives a view."""
    return value is None or value is Ellipsis or type(value) in (int, slice) or _is_open_integer(value)


def _fixed_item(vm: Interpreter, container: Any, key: Any) -> Any:
    if is_a(container, type):
        return _generic_alias(vm, container, key)
    if not is_fixed(vm, container):
        raise CaptureError(f"{type(container).__qualname__} is subscripted")
    return replay(vm, operator.getitem, (container, key), {}, looking=True)


def _generic_alias(vm: Interpreter, kind: type, key: Any) -> Any:
    """Return ``kind[key]``, such as ``list[int]``."""
    method = vm.heap.class_attribute(kind, "__class_getitem__")
    native = is_a(method, types.ClassMethodDescriptorType)
    if is_a(method, classmethod) and not is_a(method.__func__, type):
        if method is vars(typing.Generic).get("__class_getitem__") and is_constant(key):
            _touch_constants(vm, key)
            return kind[key]  # type: ignore[index]
        return vm.call(load_attr(vm, kind, "__class_getitem__"), (key,), {})
    if not native and not is_a(method, classmethod):
        raise CaptureError(f"the class {kind.__qualname__} is subscripted")
    uses: set[str] = set()
    found = kind[key]  # type: ignore[index]
    made = vm.heap.reference(kind, uses)  # a class may be made in the call too
    vm.heap.fresh(found, f"{made}[{vm.heap.reference(key, uses)}]", uses)
    return found


def _plain_items(vm: Interpreter, container: Any) -> bool:
    own = type(container) is DynamicSize
    return own or vm.heap.class_attribute(type(container), "__getitem__") is tuple.__getitem__


def store_subscript(vm: Interpreter, container: Any, key: Any, item: Any) -> None:
    """Do ``container[key] = item``."""
    container = vm.plain(container)
    key = key if is_a(container, torch.Tensor) else vm.plain(key)  # bounds of slices may stay open
    item = settled(vm, item, keep=is_a(container, dict | list))
    given = (container, key, item)
    recorded(vm, _store_subscript, given, (operator.setitem, given))


def _store_subscript(vm: Interpreter, container: Any, key: Any, item: Any) -> None:
    if is_a(container, torch.Tensor):
        tensor_operator(vm, operator.setitem, (*_selected(vm, container, key), item), {})
        return
    method = vm.heap.class_attribute(type(container), "__setitem__")
    if is_a(method, types.FunctionType):
        call_in_statement(vm, method, (container, key, item))
    elif is_a(container, dict) and is_key(key) and not is_a(container, OrderedDict):
        store_key(vm, container, key, item)
    elif is_a(container, list | dict | deque):
        container_method(vm, method, container, "__setitem__", (key, item), {})
    else:
        raise CaptureError(f"an item of {type(container).__qualname__} is set")


def delete_subscript(vm: Interpreter, container: Any, key: Any) -> None:
    """Do ``del container[key]``."""
    container, key = vm.plain(container), vm.plain(key)
    recorded(vm, _delete_subscript, (container, key), (operator.delitem, (container, key)))


def _delete_subscript(vm: Interpreter, container: Any, key: Any) -> None:
    method = vm.heap.class_attribute(type(container), "__delitem__")
    if is_a(method, types.FunctionType):
        call_in_statement(vm, method, (container, key))
    elif is_a(container, list | dict | deque):
        container_method(vm, method, container, "__delitem__", (key,), {})
    else:
        raise CaptureError("an item is deleted natively")
