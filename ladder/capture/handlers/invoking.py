"""Instructions that call, or make what is called: spread arguments, `super`, functions, class patterns."""

from __future__ import annotations

import contextlib
import inspect
import types
from typing import Any

from ladder.capture.handlers.variables import load_cell
from ladder.capture.heap.nodes import CaptureError
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.opcodes import STOP
from ladder.capture.operations.replay import advance, drained, is_iterable, iterate, iterated
from ladder.capture.python.bytecode import VERSION
from ladder.capture.python.frames import NULL, Frame
from ladder.capture.values.kinds import is_a, is_constant, name_of_kind
from ladder.capture.values.shapes import DynamicSize

_MATCH_SELF = 1 << 22
"""The flag of types whose positional pattern takes the whole: `int`, `str`, ..., and their subclasses."""


def call_spread(vm: Interpreter, function: Any, args: Any, kwargs: Any) -> Any:
    """Call with ``*args, **kwargs``."""
    if type(args) not in (tuple, DynamicSize):
        args = vm.plain(args)
        if not is_iterable(type(args)):
            kind = name_of_kind(args)
            raise TypeError(f"{called_text(function)} argument after * must be an iterable, not {kind}")
    if vm.recording:
        if type(args) is DynamicSize:
            args = tuple(args)
        elif type(args) is not tuple:
            with vm.barrier():
                args = drained(vm, iterate(vm, iterated(vm, args, tuple)))
        with vm.stopping():
            vm.heap.touch(args, 1)
            kwargs = vm.heap.items(kwargs)
    args = tuple(args)
    if not all(is_a(key, str) for key in dict.__iter__(kwargs)):
        raise TypeError("keywords must be strings")
    if function is super and not args:
        args = super_arguments(vm, vm.frames[-1])
    return vm.call(function, args, dict(kwargs))


def called_text(function: Any) -> str:
    """Return what is called as messages of the interpreter on its arguments write it."""
    home, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    path = name if home in (None, "builtins") else f"{home}.{name}"
    return str(function) if name is None else f"{path}()"


def super_arguments(vm: Interpreter, frame: Frame) -> tuple[Any, Any]:
    """Return what ``super()`` without arguments means in `frame`."""
    if not frame.code.co_argcount:
        raise RuntimeError("super(): no arguments")
    first = _bound(vm, frame, frame.code.co_varnames[0])
    if first is NULL:
        raise RuntimeError("super(): arg[0] deleted")
    if "__class__" not in frame.slots:
        raise RuntimeError("super(): __class__ cell not found")
    kind = _bound(vm, frame, "__class__")
    if kind is NULL:
        raise RuntimeError("super(): empty __class__ cell")
    return kind, first


def _bound(vm: Interpreter, frame: Frame, name: str) -> Any:
    """Return a variable of `frame`, in a cell or not, or `NULL`."""
    if name not in (*frame.code.co_cellvars, *frame.code.co_freevars):
        return frame.slots.get(name, NULL)
    with contextlib.suppress(NameError):
        return load_cell(vm, frame, name)
    return NULL


def special_method(vm: Interpreter, value: Any, name: str) -> Any:
    """Return the bound special method `name`, looked up on the type."""
    kind = type(value)
    found = vm.heap.class_attribute(kind, name) if vm.recording else inspect.getattr_static(kind, name, NULL)
    if found is NULL:
        raise TypeError(
            f"'{name_of_kind(value)}' object does not support the context manager protocol"
            + (f" (missed {name} method)" if VERSION >= (3, 14) or hasattr(kind, "__enter__") else "")
        )
    if is_a(found, types.FunctionType):
        return types.MethodType(found, value)
    return found.__get__(value, kind)


def make_function(vm: Interpreter, frame: Frame, code: types.CodeType, parts: dict[str, Any]) -> Any:
    """Make a function, as ``def`` and ``lambda`` do."""
    parts = {name: vm.plain(value) for name, value in parts.items()}
    defaults, closure = parts.get("defaults"), parts.get("closure")
    function = types.FunctionType(code, frame.names, code.co_name, defaults, closure)
    _complete(function, parts)
    if vm.recording:
        heap = vm.heap
        uses: set[str] = set()
        try:
            texts = [
                heap.constant(code),
                heap.constant(frame.names),
                repr(code.co_name),
                heap.reference(defaults, uses),
                heap.reference(closure, uses),
            ]
            node = heap.fresh(function, f"{heap.constant(types.FunctionType)}({', '.join(texts)})", uses)
            for name in ("kwdefaults", "annotations", "annotate"):
                if name in parts:
                    _set_part(vm, node, function, name, parts[name])
            qualified = f"{node.var}.__qualname__ = {code.co_qualname!r}"
            heap.change(qualified, [node], set())
        except CaptureError as error:
            heap.hidden(function, getattr(error, "origin", None) or vm.here())
    return function


def _set_part(vm: Interpreter, node: Any, function: Any, name: str, value: Any) -> None:
    uses: set[str] = set()
    if name == "annotations":
        value = function.__annotations__
        if id(value) not in vm.heap.nodes and not is_constant(value):
            vm.heap.fresh(value, _dict_text(vm, value, uses), uses)
    text = f"{node.var}.__{name}__ = {vm.heap.reference(value, uses)}"
    vm.heap.change(text, [node], uses)


def _dict_text(vm: Interpreter, value: dict[str, Any], uses: set[str]) -> str:
    refer = vm.heap.reference
    return "{" + ", ".join(f"{key!r}: {refer(item, uses)}" for key, item in value.items()) + "}"


def advance_or_raise(vm: Interpreter, iterator: Any) -> Any:
    """Return ``next(iterator)``."""
    if is_a(iterator, types.GeneratorType):
        with vm.barrier():
            return next(iterator)
    with vm.barrier():
        item = advance(vm, iterator)
    if item is STOP:
        raise StopIteration
    return item


def match_class(vm: Interpreter, subject: Any, kind: Any, names: tuple[str, ...], count: int) -> Any:
    """Return the attributes that a class pattern takes, or None if it does not match."""
    if not is_a(kind, type):
        raise TypeError(f"called match pattern must be a {'class' if VERSION >= (3, 12) else 'type'}")
    if not vm.call(isinstance, (subject, kind), {}):
        return None
    values: list[Any] = []
    matched: tuple[Any, ...] = ()
    if count:
        own = vm.call(getattr, (kind, "__match_args__", NULL), {})
        itself = own is NULL and bool(kind.__flags__ & _MATCH_SELF)
        matched, values = _positional(kind, () if own is NULL else own, itself, count), [subject] * itself
    seen = set()
    for name in (*matched, *names):
        if name in seen:
            raise TypeError(f"{kind.__name__}() got multiple sub-patterns for attribute {name!r}")
        seen.add(name)
        found = vm.call(getattr, (subject, name, NULL), {})  # a property is asked once
        if found is NULL:
            return None
        values.append(found)
    return tuple(values)


def _positional(kind: type, names: Any, itself: bool, count: int) -> tuple[Any, ...]:
    """Return the attributes that the `count` patterns without a name take, by the class's `names`."""
    if type(names) is not tuple:
        given = type(names).__name__
        raise TypeError(f"{kind.__name__}.__match_args__ must be a tuple (got {given})")
    allowed = 1 if itself else len(names)
    if allowed < count:
        many = "" if allowed == 1 else "s"
        raise TypeError(f"{kind.__name__}() accepts {allowed} positional sub-pattern{many} ({count} given)")
    for name in names[:count]:
        if type(name) is not str:
            raise TypeError(f"__match_args__ elements must be strings (got {type(name).__name__})")
    return names[:count]


def _complete(function: Any, parts: dict[str, Any]) -> None:
    if "kwdefaults" in parts:
        function.__kwdefaults__ = parts["kwdefaults"]
    if "annotations" in parts:
        given = parts["annotations"]
        flat = given if is_a(given, dict) else dict(zip(given[::2], given[1::2], strict=True))
        function.__annotations__ = flat
    if "annotate" in parts:
        function.__annotate__ = parts["annotate"]
