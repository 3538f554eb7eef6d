"""Instructions that build: f-strings, displays, comprehensions, and unpacking."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch

from ladder.capture.heap.nodes import CaptureError, Dynamic, Text, dynamic_parts
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.recording import opaque, recorded
from ladder.capture.operations.containers import BY_IDENTITY, admit_iterable
from ladder.capture.operations.moving import is_made_here, move_into, transfer
from ladder.capture.operations.objects import hide, new_container, perform, says_its_arguments, settled
from ladder.capture.operations.operators import binary, subscript
from ladder.capture.operations.replay import drained, is_hidden, iterate, iterated, replay, taken
from ladder.capture.operations.symbolic import computed_dynamic
from ladder.capture.operations.tensor_operators import tensor_operator
from ladder.capture.python import natives
from ladder.capture.values.kinds import is_a, is_constant, is_plain
from ladder.capture.values.shapes import DynamicSize
from ladder.capture.values.tensors import is_plain_tensor


def make_set(*items: Any) -> set[Any]:
    """Return the set of `items`."""
    return set(items)


def make_dict(*items: Any) -> dict[Any, Any]:
    """Return the dictionary of the first half of `items` to the second."""
    half = len(items) // 2
    return dict(zip(items[:half], items[half:], strict=True))


def formatted(value: Any, conversion: int, spec: str) -> str:
    """Return a replacement field of an f-string; `conversion` as in FORMAT_VALUE."""
    convert = (None, str, repr, ascii)[conversion]
    return format(value if convert is None else convert(value), spec)


def joined_text(vm: Interpreter, parts: list[Any]) -> Any:
    """Concatenate the parts of an f-string."""
    if vm.recording and any(type(part) is Text for part in parts):
        uses: set[str] = set()
        texts = "".join(f"{vm.heap.reference(part, uses)}, " for part in parts)
        numbers = tuple(each for part in parts if type(part) is Text for each in part.numbers)
        made = Text("".join(map(vm.unlifted, parts)), numbers)
        return _made_anew(vm, made, f"''.join(({texts}))", uses)
    if any(type(part) is Dynamic for part in parts):
        total: Any = ""
        for part in parts:
            total = binary(vm, "+", total, part)
        return total
    return "".join(parts)


def formatted_numbers(kind: Callable[[Any], Any], conversion: int, spec: str, *numbers: Any) -> str:
    """Return a replacement field that is a size or tuple."""
    return formatted(kind(numbers), conversion, spec)


def _made_anew(vm: Interpreter, made: Text, text: str, uses: set[str]) -> Text:
    vm.heap.fresh(made, text, uses)
    vm.heap.uses_dynamic = vm.heap.makes_texts = True
    return made


def _tensor_as_text(vm: Interpreter, value: torch.Tensor, conversion: int, spec: str) -> Text:
    """Return a replacement field that is a tensor: as it is now, whatever changes it later."""
    if vm.modes:
        raise CaptureError("a mode sees how a tensor is written out")
    copy, uses = tensor_operator(vm, torch.clone, (value,), {}), set[str]()
    text = vm.heap.call_text(vm.heap.constant(formatted), (copy, conversion, spec), {}, uses)
    number = None if value.dim() or conversion else value.item()
    return _made_anew(vm, Text(formatted(value, conversion, spec), ((copy, number),)), text, uses)


def format_field(vm: Interpreter, value: Any, conversion: int, spec: Any) -> Any:
    """Return a replacement field of an f-string."""
    if not vm.recording:
        return vm.natively(formatted, value, conversion, spec)
    if type(value) in (str, Text) and spec == "" and conversion == 0:
        return value
    given = (value, conversion, spec)
    return recorded(vm, _formatted, given, (formatted, given))


_WRITES: dict[int, Callable[[Any], str]] = {1: str, 2: repr}
"""Conversion of a replacement field -> what makes text of its value."""


def _formatted(vm: Interpreter, value: Any, conversion: int, spec: Any) -> Any:
    if type(value) is DynamicSize:
        return computed_dynamic(vm, formatted_numbers, (torch.Size, conversion, spec, *value))
    held = [type(item) is Dynamic for item in value] if type(value) is tuple else []
    if any(held) and all(open_ or is_constant(item) for open_, item in zip(held, value, strict=True)):
        return computed_dynamic(vm, formatted_numbers, (tuple, conversion, spec, *value))
    if type(value) is torch.Tensor and is_plain_tensor(value) and not value.requires_grad:
        return _tensor_as_text(vm, value, conversion, vm.plain(spec))
    if conversion == 0 and is_a(value, BaseException):  # what exceptions have of their own is `str`
        own = vm.heap.class_attribute(type(value), "__format__") is not object.__format__
        conversion = 0 if own or vm.plain(spec) else 1
    if (writes := _WRITES.get(conversion)) and says_its_arguments(vm, value, f"__{writes.__name__}__"):
        return format_field(vm, writes(value), 0, spec)
    if type(value) is not Dynamic and not is_plain(value):
        raise CaptureError(f"format of {type(value).__qualname__}")
    return replay(vm, formatted, (value, conversion, spec), {}, looking=True)


def add_to(vm: Interpreter, target: Any, method: Any, args: tuple[Any, ...]) -> None:
    """Add to a container that a comprehension is building."""
    *keys, item = args
    keys = [settled(vm, key) for key in keys]
    args = (*keys, settled(vm, item, keep=method is not set.add))
    if dynamic_parts(args[-1]) and hashed_natively(vm, keys) and is_made_here(vm, target):
        transfer(vm, target, method, args, [(keys[0] if keys else len(target), item)])
        return
    args = tuple(map(vm.plain, args))
    if vm.recording and method is not list.append and not hashed_natively(vm, args[:1]):
        opaque(vm, method, (target, *args), {}, "push", "a key that is not a constant")
        return
    if vm.recording:
        try:
            node = vm.heap.node(target)
            uses: set[str] = set()
            text = vm.heap.call_text(vm.heap.constant(method), (target, *args), {}, uses)
            vm.heap.change(text, [node], uses)
        except CaptureError as error:
            hide(vm, target, getattr(error, "origin", None))
    method(target, *args)


def hashed_natively(vm: Interpreter, keys: Any) -> bool:
    """Say whether no code of the user's runs where `keys` are hashed and compared."""
    for key in keys if vm.recording else ():
        vm.heap.touch(key) if type(key) in (tuple, frozenset) else None
    return not vm.recording or all(
        is_constant(key) or is_plain_tensor(key) or (type(key).__hash__, type(key).__eq__) == BY_IDENTITY
        for key in keys
    )


def build_set(vm: Interpreter, items: list[Any]) -> Any:
    """Make a set of items on the stack."""
    items = [settled(vm, item) for item in items]
    if not hashed_natively(vm, items):
        return opaque(vm, make_set, tuple(items), {}, "push", "a set of hashable objects")
    return new_container(vm, set(items))


def build_dict(vm: Interpreter, keys: list[Any], values: list[Any]) -> Any:
    """Make a dictionary of items on the stack."""
    keys, values = [settled(vm, key) for key in keys], [settled(vm, item, keep=True) for item in values]
    if not hashed_natively(vm, keys):
        given = (*keys, *values)
        return opaque(vm, make_dict, given, {}, "push", "a dictionary keyed by hashable objects")
    return new_container(vm, dict(zip(keys, values, strict=True)))


def extend_display(vm: Interpreter, target: Any, method: Any, value: Any) -> None:
    """Extend a container that a display is building."""
    if vm.recording:
        if move_into(vm, target, method, value):
            return
        value = vm.plain(value)
        if is_a(value, OrderedDict) and method is dict.update and type(value) is not OrderedDict:
            value = _asked_items(vm, value)
        if method is not dict.update:
            value = iterated(vm, value, list if method is list.extend else set)
    _extend(vm, target, method, value)


def _extend(vm: Interpreter, target: Any, method: Any, value: Any) -> None:
    if not vm.recording:  # methods of `value` may have ended that
        vm.natively(method, target, value)
        return
    if not _extendable(vm, value):
        raise CaptureError("extended by an unknown iterable")
    admit_iterable(vm, value)
    taken_once = method is set.update and type(value) in natives.ITERATORS  # keys are looked at first
    if not taken_once and not is_hidden(vm, value):
        _extend_by_items(vm, target, method, value)
        return
    items = drained(vm, iterate(vm, value))
    try:
        _extend_by_items(vm, target, method, items)
    except CaptureError as error:  # they cannot be taken again
        hide(vm, target, getattr(error, "origin", None))
        method(target, vm.plain(items))


def _extend_by_items(vm: Interpreter, target: Any, method: Any, items: Any) -> None:
    if move_into(vm, target, method, items):
        return
    items = vm.plain(items)
    if not hashed_natively(vm, items if method is set.update else ()):
        vm.stop("a set of hashable objects", vm.here())
        method(target, items)
        return
    vm.heap.touch(items, 1)
    try:
        perform(vm, method, (target, items), {}, [vm.heap.node(target)])
    except CaptureError as error:
        hide(vm, target, getattr(error, "origin", None))
        method(target, items)


def _asked_items(vm: Interpreter, value: Any) -> Any:
    """Return a dictionary of what an ordered dictionary of another class gives for each of its keys."""
    if vm.heap.class_attribute(type(value), "keys") is not OrderedDict.keys:
        raise CaptureError(f"{type(value).__qualname__} has keys of its own")
    vm.heap.touch(value, 1)
    with vm.barrier():
        return new_container(vm, {key: subscript(vm, value, key) for key in OrderedDict.__iter__(value)})


def _extendable(vm: Interpreter, value: Any) -> bool:
    known = type(value) in natives.METHODS or type(value) in natives.VIEWS or is_constant(value)
    base = next((kind for kind in (list, tuple, set, deque) if is_a(value, kind)), None)
    plain = base is not None and vm.heap.class_attribute(type(value), "__iter__") is base.__iter__
    return known or plain or type(value) in natives.ITERATORS or is_hidden(vm, value)


def unpacked(vm: Interpreter, value: Any, first: int | None = None, rest: bool = True) -> Any:
    """Return the items of a sequence to unpack; None if a tuple of them was pushed instead.

    `first` items are taken one by one (all, if it is None), then all others if `rest`, else one more.
    """
    if type(value) in (tuple, DynamicSize):
        return tuple(vm.heap.items(value)) if vm.recording else value
    value = vm.plain(value)
    if not vm.recording:
        return vm.natively(taken, value, first, rest)
    if is_a(value, str | bytes | range | torch.Size):
        return tuple(value)
    base = next((kind for kind in (list, tuple) if is_a(value, kind)), None)
    asked = (
        ("__iter__", "__len__") if first is None else ("__iter__",)
    )  # what is spread is asked for its length
    if base and all(vm.heap.class_attribute(type(value), name) is getattr(base, name) for name in asked):
        items = vm.heap.items(value)
        return (*(items if type(items) is list else base.__iter__(items)),)
    if type(value) in natives.METHODS.keys() | natives.VIEWS | natives.ITERATORS or is_hidden(vm, value):
        with vm.barrier():
            return drained(vm, iterate(vm, value), None if rest or first is None else first + 1)
    if is_a(vm.heap.class_attribute(type(value), "__iter__"), types.FunctionType):
        with vm.barrier():
            return _unpacked_by_method(vm, value, first, rest)
    if is_a(value, torch.Tensor) and is_plain_tensor(value) and value.dim():
        with vm.barrier():
            return tuple(vm.call(torch.unbind, (value,), {}))
    vm.frames[-1].stack.append(
        opaque(vm, taken, (value, first, rest), {}, "redo", "an unknown iterable is unpacked")
    )
    return None


def _unpacked_by_method(vm: Interpreter, value: Any, first: int | None, rest: bool) -> tuple[Any, ...]:
    if first is None:
        return tuple(vm.call(list, (value,), {}))
    iterator = iterate(vm, value)
    items = drained(vm, iterator, first if rest else first + 1)
    return (*items, *vm.call(list, (iterator,), {})) if rest and len(items) == first else items
