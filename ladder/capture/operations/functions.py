"""Python functions that are called: what is read of them, and their frames."""

from __future__ import annotations

import inspect
import weakref
from functools import partial
from typing import Any

from ladder.capture.heap.heap import Heap
from ladder.capture.heap.nodes import CaptureError, Itself, Node
from ladder.capture.interpreter.evaluate import resume
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.operations.objects import closes_something, new_container
from ladder.capture.python.frames import Frame, bind, guards_yields, make_generator


def new_frame(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
    """Return the frame of a call, after guarding what the function itself holds."""
    meet_function(vm, function)
    defaults = function.__defaults__ or ()
    named = function.__kwdefaults__ or {}
    slots = bind(function, args, kwargs, defaults, named)
    if slots is None:
        function(*map(vm.plain, args), **{key: vm.plain(v) for key, v in kwargs.items()})
        raise CaptureError("arguments that do not fit")
    if function.__code__.co_flags & inspect.CO_VARKEYWORDS:
        code = function.__code__
        last = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
        new_container(vm, slots[code.co_varnames[last]])
    frame = Frame(function, slots)
    frame.before = vm.trace.operators
    return frame


def meet_function(vm: Interpreter, function: Any) -> None:
    """Guard, once, what a function that is called holds: code, defaults, cells."""
    node = vm.heap.node(function)
    if node.first(Itself.CODE):
        _meet_function(vm, node)


def _meet_function(vm: Interpreter, node: Node) -> None:
    heap, function, var = vm.heap, node.obj, node.var
    path = getattr(function, "__qualname__", var)
    heap.read(node, "__code__", function.__code__, f"{var}.__code__", f"{path}.__code__")
    heap.read(node, "__defaults__", function.__defaults__, f"{var}.__defaults__", f"{path}.defaults")
    named = function.__kwdefaults__
    heap.read(node, "__kwdefaults__", named, f"{var}.__kwdefaults__", f"{path}.kwdefaults")
    if not node.stable:
        names = heap.constant(function.__globals__)
        heap.guard.check(f"{var}.__globals__ is {names}", f"globals of {path}")
    for part in (function.__defaults__, named):
        if part:
            heap.touch(part, 1)
    for number, cell in enumerate(function.__closure__ or ()):
        name = function.__code__.co_freevars[number]
        if not node.pinned:
            heap.read(node, f"={number}", cell, f"{var}.__closure__[{number}]", f"{path}<{name}>")
        elif node.first(f"={number}"):
            heap.pin(cell, f"{path}<{name}>")  # functions keep their cells


def generator_of(vm: Interpreter, frame: Frame) -> Any:
    """Return the generator that a call of a generator function gives."""
    closes = guards_yields(frame.code) or any(closes_something(vm, value) for value in frame.slots.values())
    generator = make_generator(frame, partial(resume, vm))
    hide(vm, generator, generator, closes=closes)
    return generator


def hide(vm: Interpreter, iterator: Any, dying: Any, *, closes: bool) -> None:
    """Register an iterator; it is not held, since what it does when it is dropped must come then.

    dying: What dies with it, and can be referred to weakly.
    """
    node = Node(None, vm.heap.guard.fresh_name(), external=False)
    node.recordable, node.origin, node.closes = False, vm.here(), closes
    vm.heap.nodes[id(iterator)] = node
    weakref.finalize(dying, _forget, weakref.ref(vm.heap), id(iterator)).atexit = False


def let_die(vm: Interpreter, holder: Any, inside: Any) -> None:
    """Hold a fresh object, and its dictionary `inside`, no longer: a generator in it acts when it dies."""
    for value in (holder, inside):
        node = vm.heap.node(value)
        node.obj, node.recordable, node.closes, node.origin = None, False, True, node.origin or vm.here()
        weakref.finalize(holder, _forget, weakref.ref(vm.heap), id(value)).atexit = False
    kept = vm.heap.guard.keep
    kept[:] = [value for value in kept if value is not holder and value is not inside]


def _forget(heap: weakref.ref[Heap], number: int) -> None:
    """Drop the node of what has died; what the segment has met lives no longer than its heap."""
    if (found := heap()) is not None:
        found.nodes.pop(number, None)
