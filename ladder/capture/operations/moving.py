"""Containers in which numbers are left open: moved, copied, looped over, added up, these stay open."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from ladder.capture.heap.nodes import Dynamic, dynamic_parts
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.operations.objects import new_container
from ladder.capture.operations.symbolic import computed_dynamic
from ladder.capture.python.frames import NULL, Frame
from ladder.capture.python.words import words
from ladder.capture.values.kinds import by_identity, is_a, is_constant
from ladder.capture.values.shapes import DynamicSize, Walk

_SEQUENCES = (tuple, DynamicSize, list)
_SOURCES = (*_SEQUENCES, dict)
_BETWEEN = frozenset(
    words("LOAD_FAST_AND_CLEAR SWAP COPY BUILD_LIST BUILD_SET BUILD_MAP PRECALL CALL NOP RESUME")
)
"""Instructions that may stand between a GET_ITER and the loop of a comprehension."""


def _opens(vm: Interpreter) -> bool:
    """Say whether numbers may be left open."""
    return vm.heap.counts or bool(vm.heap.lifted)


def is_made_here(vm: Interpreter, value: Any) -> bool:
    """Say whether `value` was made in this segment, by steps."""
    node = vm.heap.find(value) if vm.recording else None
    return node is not None and not node.external and node.recordable


def open_items(vm: Interpreter, value: Any) -> Any:
    """Return what a container holds, with open numbers as `Dynamic`; None if none is left open.

    What it holds is guarded then.
    """
    if not vm.recording or not _opens(vm) or not is_a(value, dict | tuple | list):
        return None
    if dynamic_parts(value):
        return value
    known = vm.heap.find(value)
    if known is None or not (known.lifted or _may_open(vm, known.var)):
        return None
    items = vm.heap.items(value)
    return None if items is value else items


def _may_open(vm: Interpreter, var: str) -> bool:
    within = f"{vm.heap.guard.path(var)}["
    return any(path.startswith(within) for path in vm.heap.lifted)


def transfer(vm: Interpreter, target: Any, method: Any, args: tuple[Any, ...], moved: Any) -> Any:
    """Call a method of a container of this segment that puts in `moved`, pairs of key and item."""
    heap, uses = vm.heap, set[str]()
    node = heap.node(target)
    text = heap.call_text(heap.constant(method), (target, *args), {}, uses)
    result = method(target, *map(vm.held, args))
    heap.change(text, [node], uses)
    for key, item in moved:
        node.wrote(key, item)
    return result


# methods ----------------------------------------------------------------------------------
def _append(vm: Interpreter, owner: list[Any], item: Any) -> Any:
    if not (dynamic_parts(item) or (_holds_open(vm, owner) and _may_go_in(vm, item))):
        return NULL
    return transfer(vm, owner, list.append, (item,), [(len(owner), item)])


def _holds_open(vm: Interpreter, owner: Any) -> bool:
    """Say whether a number in a container of this segment is left open, or was."""
    node = vm.heap.find(owner)
    return node is not None and bool(node.lifted)


def _is_known(vm: Interpreter, item: Any) -> bool:
    node = vm.heap.find(item)
    return node is not None and node.recordable


def _may_go_in(vm: Interpreter, item: Any) -> bool:
    """Say whether steps can put in `item`: it is a constant, left open, or known here."""
    return is_constant(item) or bool(dynamic_parts(item)) or _is_known(vm, item)


def _rearranged(name: str) -> Callable[..., Any]:
    """Return what carries out a method of lists that moves or replaces items by their places alone."""
    method = getattr(list, name)

    def carry_out(vm: Interpreter, owner: list[Any], *args: Any) -> Any:
        given = (*(vm.plain(arg) for arg in args[:1]), *args[1:])
        slices = bool(given) and type(given[0]) is slice
        if slices and type(given[-1]) not in (slice, list, tuple):
            return NULL
        opens = any(open_items(vm, arg) is not None if slices else dynamic_parts(arg) for arg in args[1:])
        if not (opens or _holds_open(vm, owner)) or not all(_may_go_in(vm, arg) for arg in given):
            return NULL
        held = vm.heap.items(owner)
        expected = list(held)
        try:
            result = method(expected, *(vm.heap.items(arg) if slices else arg for arg in given))
        except (IndexError, TypeError, ValueError):  # the program meets it
            return NULL
        gone = [(at, None) for at in range(len(expected), len(held))]
        transfer(vm, owner, method, given, [*enumerate(expected), *gone])
        return result

    return carry_out


def item_at(vm: Interpreter, container: Any, key: Any) -> Any:
    """Return an item, or some, of a list in which numbers are left open; else `NULL`."""
    known = type(container) is list and is_constant(key) and type(key) in (int, slice)
    items = open_items(vm, container) if known else None
    if items is None:
        return NULL
    return new_container(vm, items[key]) if type(key) is slice else items[key]


def _pop(vm: Interpreter, owner: dict[Any, Any], key: Any, *default: Any) -> Any:
    key, held = vm.plain(key), open_items(vm, owner)
    if held is None or not is_constant(key):
        return NULL
    if key not in held:
        return default[0] if default else NULL
    transfer(vm, owner, dict.pop, (key,), [(key, None)])
    return held[key]


def _set_default(vm: Interpreter, owner: dict[Any, Any], key: Any, default: Any = None) -> Any:
    key = vm.plain(key)
    if not is_constant(key) or not _holds_open(vm, owner) or not _may_go_in(vm, default):
        return NULL
    held = vm.heap.items(owner)
    if key not in held:
        transfer(vm, owner, dict.setdefault, (key, default), [(key, default)])
        return default
    return held[key]


def _delete_key(vm: Interpreter, owner: dict[Any, Any], key: Any) -> Any:
    if not is_constant(key) or not _holds_open(vm, owner) or key not in owner:
        return NULL
    return transfer(vm, owner, dict.__delitem__, (key,), [(key, None)])


def _update(vm: Interpreter, owner: dict[Any, Any], source: Any = None, **named: Any) -> Any:
    if not any(map(dynamic_parts, named.values())) and open_items(vm, source) is None:
        return NULL
    if source is not None and type(source) is not dict:
        return NULL
    for each in (source, new_container(vm, named) if named else None):
        if each:
            transfer(vm, owner, dict.update, (each,), vm.heap.items(each).items())
    return None


BY_PLACE = ("__setitem__", "__delitem__", "insert", "pop", "reverse")
"""Methods of lists that move or replace items by their places alone."""

METHODS: dict[tuple[type, str], Callable[..., Any]] = {
    (list, "append"): _append,
    (list, "extend"): lambda vm, owner, source: None if move_into(vm, owner, list.extend, source) else NULL,
    **{(list, name): _rearranged(name) for name in BY_PLACE},
    (dict, "__delitem__"): _delete_key,
    (dict, "pop"): _pop,
    (dict, "setdefault"): _set_default,
    (dict, "update"): _update,
}
"""(type, name of a method) -> what carries it out where numbers are left open, or gives `NULL`."""


def moved(vm: Interpreter, owner: Any, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a container in which, or in whose arguments, numbers are left open; else `NULL`."""
    if not _opens(vm):
        return NULL
    if name in ("keys", "values", "items") and not rest and type(owner) is dict:
        return _walk(vm, owner, name)
    if name == "copy" and type(owner) in (list, dict):
        return built(vm, type(owner), (owner,), {})
    method = METHODS.get((type(owner), name))
    return method(vm, owner, *rest, **kwargs) if method is not None and is_made_here(vm, owner) else NULL


def move_into(vm: Interpreter, target: Any, method: Any, source: Any) -> bool:
    """Extend a container of this segment by one in which numbers are left open; say whether there are any."""
    if not is_a(target, dict | list):
        return False
    fits = type(source) in ((dict,) if is_a(target, dict) else (*_SEQUENCES, Walk))
    items = _source_items(vm, source) if fits and is_made_here(vm, target) else None
    if items is None and fits and type(source) in (tuple, list, dict) and _holds_open(vm, target):
        items = vm.heap.items(source) if is_made_here(vm, target) else None
    if items is None:
        return False
    pairs = [*items.items()] if is_a(target, dict) else [*enumerate(items, len(target))]
    transfer(vm, target, method, (source,), pairs)
    return True


def joined(vm: Interpreter, symbol: str, left: Any, right: Any) -> Any:
    """Return ``left + right`` or ``left | right`` where numbers are left open in them; else `NULL`."""
    kind = type(left)
    if not _opens(vm) or type(right) is not kind or symbol not in JOINS.get(kind, ()):
        return NULL
    parts = [open_items(vm, item) for item in (left, right)]
    if parts == [None, None]:
        return NULL
    if symbol.endswith("="):
        return left if move_into(vm, left, JOINS[kind][symbol], right) else NULL
    first, second = (vm.heap.items(item) for item in (left, right))
    if kind is tuple:
        return (*first, *second)
    return new_container(vm, {**first, **second} if kind is dict else [*first, *second])


JOINS: dict[type, dict[str, Any]] = {
    tuple: {"+": None},
    list: {"+": None, "+=": list.extend},
    dict: {"|": None, "|=": dict.update},
}
"""Types -> the operators that join two of them -> the method that an operator in place stands for."""


# natives ----------------------------------------------------------------------------------
def built(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a native that makes or adds up containers, where numbers are left open in them; else `NULL`."""
    if not _opens(vm) or not vm.recording:
        return NULL
    if function is dict:
        return _built_dict(vm, args, kwargs)
    items = _source_items(vm, args[0]) if args else None
    if function in (enumerate, zip):
        return _zipped(vm, function, args) if not kwargs else NULL
    if items is None or kwargs or function not in NATIVES:
        return NULL
    return NATIVES[function](vm, items, *args[1:])


def _source_items(vm: Interpreter, source: Any) -> Any:
    if type(source) is Walk:
        return source.rest(vm.heap.items(source.source), NULL)
    return open_items(vm, source) if type(source) in _SOURCES else None


def _built_dict(vm: Interpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sources = [open_items(vm, item) for item in args]
    if len(args) > 1 or (args and type(args[0]) is not dict):
        return NULL
    if not any(sources) and not any(map(dynamic_parts, kwargs.values())):
        return NULL
    vm.heap.touch(args[0], 1) if args and sources[0] is None else None
    return new_container(vm, {**((sources[0] or args[0]) if args else {}), **kwargs})


def _folded(function: Any, first: int) -> Callable[..., Any]:
    def fold(vm: Interpreter, items: Any, *start: Any) -> Any:
        total = start[0] if start else first
        if not all(type(item) is Dynamic or type(item) is int for item in (*items, total)):
            return NULL
        for item in items:
            known = type(total) is int and type(item) is int
            total = function(total, item) if known else computed_dynamic(vm, function, (total, item))
        return total

    return fold


def _are_extents(vm: Interpreter, items: Any) -> bool:
    return all(type(vm.unlifted(item)) is int for item in items)


def _chosen(function: Any) -> Callable[..., Any]:
    def choose(vm: Interpreter, items: Any, *more: Any) -> Any:
        plain = all(type(item) is Dynamic or type(item) is int for item in items)
        return computed_dynamic(vm, function, tuple(items)) if plain and len(items) > 1 and not more else NULL

    return choose


NATIVES: dict[Any, Callable[..., Any]] = {
    list: lambda vm, items: new_container(vm, list(items)),
    tuple: lambda vm, items: tuple(items),
    torch.Size: lambda vm, items: DynamicSize(items) if _are_extents(vm, items) else NULL,
    sum: _folded(operator.add, 0),
    math.prod: _folded(operator.mul, 1),
    max: _chosen(max),
    min: _chosen(min),
}
"""Natives of a sequence in which numbers are left open -> what gives them, from its items; or `NULL`."""


# loops ------------------------------------------------------------------------------------
def walk(vm: Interpreter, value: Any) -> Any:
    """Return the iterator of a loop over a container in which numbers are left open; else `NULL`."""
    if type(value) is Walk:
        return value
    if type(value) not in _SOURCES:
        return NULL
    return _walk(vm, value, "keys" if type(value) is dict else "")


def walk_alone(vm: Interpreter, value: Any) -> Any:
    """Return an iterator that nothing else sees, over what holds open numbers; else `NULL`."""
    if type(value) is Walk:
        return value
    known = type(value) in _SOURCES or (
        is_a(value, tuple) and vm.heap.class_attribute(type(value), "__iter__") is tuple.__iter__
    )
    if not known or (opened := open_items(vm, value)) is None:
        return NULL
    return Walk(tuple(opened)) if is_a(value, tuple) else Walk(value, "keys" if type(value) is dict else "")


def _walk(vm: Interpreter, value: Any, view: str = "") -> Any:
    if not vm.frames or not _is_looped_over(vm.frames[-1]) or open_items(vm, value) is None:
        return NULL
    return Walk(value, view)


def _zipped(vm: Interpreter, function: Any, args: tuple[Any, ...]) -> Any:
    """Pair up shapes and tuples of numbers for a loop over them."""
    known = all(_is_fixed(vm, item) for item in args)
    if not known or not vm.frames or not _is_looped_over(vm.frames[-1]):
        return NULL
    opened = [open_items(vm, item) for item in args]
    if opened == [None] * len(args):
        return NULL
    given = (old if new is None else new for old, new in zip(args, opened, strict=True))
    return Walk(tuple(function(*given)))


def _is_fixed(vm: Interpreter, value: Any) -> bool:
    """Say whether what `value` gives cannot change during a loop."""
    if type(value) in (tuple, DynamicSize, torch.Size, int, range, str):
        return True
    return is_a(value, tuple) and vm.heap.class_attribute(type(value), "__iter__") is tuple.__iter__


def _is_looped_over(frame: Frame) -> bool:
    """Say whether nothing but a loop, or a native of `NATIVES`, sees what is pushed next."""
    for following in frame.program.instructions[frame.index :]:
        if following.op in ("FOR_ITER", "LIST_EXTEND"):
            return True
        if following.op == "CALL":
            alone = following.arg == 0  # the call of the function that a comprehension is
            return alone or (following.arg == 1 and any(_is_native(item) for item in frame.stack[-2:]))
        if following.op != "GET_ITER" and following.op not in _BETWEEN:
            return False
    return False


def _is_native(value: Any) -> bool:
    return by_identity(value) and value in NATIVES


def step(vm: Interpreter, walked: Walk, stop: Any) -> Any:
    """Return the next item of a loop, or `stop`."""
    items = vm.heap.items(walked.source) if vm.recording else walked.source
    item = walked.step(items, stop)
    return item if vm.recording else vm.plain(item)


def open_tuple(vm: Interpreter, new: Any, kind: type, items: tuple[Any, ...]) -> Any:
    """Make an instance of a class of tuples, of which some `items` are left open."""
    uses: set[str] = set()
    text = vm.heap.call_text(vm.heap.constant(new), (kind, items), {}, uses)
    made = new(kind, tuple(map(vm.held, items)))
    node = vm.heap.fresh(made, text, uses)
    for index, item in enumerate(items):
        if dynamic_parts(item):
            node.wrote(index, item)
    return made
