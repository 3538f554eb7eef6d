"""The truth and length of values."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.fx

from ladder.capture.heap.nodes import CaptureError, Node
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.operations.objects import check_not_overridden
from ladder.capture.operations.tensor_operators import assume, is_held, may_be_assumed
from ladder.capture.python import natives
from ladder.capture.python.frames import NULL
from ladder.capture.python.liveness import only_raises
from ladder.capture.values.kinds import is_a, is_constant

_CONTAINERS = (list, tuple, dict, set, frozenset)


class Answer:
    """An object of which CPython takes the truth or length that a method of another one gave."""

    __slots__ = ("answer", "name")

    def __init__(self, answer: Any, name: str) -> None:
        self.answer, self.name = answer, name

    def __len__(self) -> Any:
        return self.answer

    def __bool__(self) -> Any:
        return self.answer if self.name == "__bool__" else len(self) > 0


_AS_NATIVES = ("torch", type(torch.__version__).__module__, "typing")
"""Modules of classes in Python whose constants compare as natives do."""


def user_constant(*values: Any) -> bool:
    """Say whether a constant is an instance of a class of the user's (an enum member)."""
    return any(type(v).__flags__ & 1 << 9 and type(v).__module__ not in _AS_NATIVES for v in values)


def truth(vm: Interpreter, value: Any) -> Any:
    """Return ``bool(value)``, or `NULL` if it must be read at a graph break."""
    value = vm.plain(value)
    if not vm.recording:
        return vm.natively(bool, value)
    if is_a(value, bool) or value is None:
        return bool(value)
    if is_constant(value) and not user_constant(value) and vm.heap.find(value) is None:
        return bool(value)
    try:
        vm.refuse_poisoned()
        return _truth(vm, value)
    except CaptureError:
        return NULL


def _truth(vm: Interpreter, value: Any) -> bool:
    known = type(value) in natives.METHODS
    if known or (is_a(value, _CONTAINERS) and vm.heap.class_attribute(type(value), "__bool__") is NULL):
        check_not_overridden(type(value))
        node = vm.heap.find(value)
        if node is not None and node.pinned and not value and not node.mutated and not node.full:
            node.full = True
            vm.heap.guard.table.empty.append(value)
            return False
        if node is not None and node.external and not node.full:
            _guard_emptiness(vm, node)
        return bool(value)
    if is_a(value, torch.Tensor):
        return _truth_of_numbers(vm, value)
    kind = type(value)
    for name in ("__bool__", "__len__"):
        method = vm.heap.class_attribute(kind, name)
        if is_a(method, types.FunctionType):
            with vm.barrier():
                return bool(Answer(settled_answer(vm, vm.call_function(method, (value,), {})), name))
        if method is not NULL:
            raise CaptureError("a native truth value")
    return True


def _truth_of_numbers(vm: Interpreter, value: torch.Tensor) -> bool:
    """Return the truth of a tensor that is the same in all runs that raise no error.

    It is made of numbers alone; or the program only raises an error where it is another, as by an `assert`;
    or it is computed of what modules hold, as is a flag that says whether they are initialized.
    """
    node = vm.heap.find(value)
    if vm.modes or node is None or value.numel() != 1:
        raise CaptureError("the truth of a tensor")
    holds = bool(value)
    if not vm.trace.is_constant(node.var):
        frame = vm.frames[-1]
        checks, held = only_raises(frame.program, frame.index - 1, not holds), is_held(vm, value)
        if not ((checks or held) and may_be_assumed(vm, value)):
            raise CaptureError("the truth of a tensor")
        assume(vm, value, holds, most=3 if checks else 2)
    return holds


def _guard_emptiness(vm: Interpreter, node: Node) -> None:
    """Guard whether a container from outside is empty; one that the segment has put something in is not."""
    value = node.obj
    if not node.mutated:
        size, holds = vm.heap.constant(type(value).__len__), len(value) > 0
        vm.heap.guard.check(f"({size}({node.var}) > 0) is {holds}", f"{node.var} is empty or not")
    if not value or (node.mutated and is_a(value, dict) and node.written.isdisjoint(dict.keys(value))):
        vm.heap.touch(value, 1)


def decided(vm: Interpreter, answer: Any) -> bool:
    """Return the truth of what a method of the program gave: guarded, or no longer recorded.

    The method is never called again, so that what it changed is changed once.
    """
    holds = truth(vm, answer)
    if holds is NULL:
        vm.stop(f"the truth of {type(answer).__qualname__}, which a method gave", vm.here())
        holds = vm.natively(bool, answer)
    return bool(holds)


def length_as(vm: Interpreter, answer: Any) -> int:
    """Return the length of an object whose ``__len__`` gave `answer`."""
    return len(Answer(settled_answer(vm, answer), "__len__"))


def settled_answer(vm: Interpreter, answer: Any) -> Any:
    """Return a guarded number; where CPython would ask `answer` for one, recording ends."""
    answer = vm.plain(answer)
    if vm.recording and not is_constant(answer):
        vm.stop(f"{type(answer).__qualname__} stands for a number", vm.here())
    return answer
