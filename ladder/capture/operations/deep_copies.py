"""Deep copies: `copy.deepcopy` copies memory once for all tensors that lie in it, graphs copy each tensor."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from typing import Any

import torch

from ladder.capture.heap.nodes import CaptureError, Dynamic, Text
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.python import polyfills
from ladder.capture.values.aliasing import storage_of
from ladder.capture.values.kinds import is_a

MOST_OBJECTS = 100_000
"""Objects that are looked at for tensors."""
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)
_NOT_COPIED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)
_LEAVES = (*_NOT_COPIED, int, float, str, bytes, Dynamic, Text)
COPIES_MEMORY: Any = torch.Tensor.__deepcopy__
"""What copies the memory behind a tensor, and notes it; parameters are copied apart."""


def meet_deep_copy(vm: Interpreter, value: Any, memo: Any = None) -> None:
    """Let the graph break at a call of `copy.deepcopy` whose copies share memory, as what is copied does.

    Raises CaptureError.
    """
    if _is_inside(vm):
        return  # the call around it has looked
    if memo is not None:
        raise CaptureError("a deep copy by a memo of the program")
    vm.heap.guard.begin_apart()
    known: set[int] = set()
    for found in _reached(value):
        if is_a(found, _STORAGES):
            raise CaptureError("a deep copy of a storage")
        if _lies(found):
            if storage_of(found) in known:
                raise CaptureError("a deep copy of tensors that share memory")
            known.add(storage_of(found))


def meet_copied_memory(vm: Interpreter, value: Any) -> None:
    """Guard that a tensor from outside shares no memory with others that one deep copy copies."""
    node = vm.heap.node(value)
    if node.external and _lies(value) and _is_inside(vm):
        vm.heap.guard.keep_apart(node.var)


def _is_inside(vm: Interpreter) -> bool:
    return any(frame.code is polyfills.deepcopy_.__code__ for frame in vm.frames)


def _lies(value: Any) -> bool:
    """Say whether a value is a tensor that `copy.deepcopy` copies by its memory; parameters are not."""
    return is_a(value, torch.Tensor) and (
        type(value).__deepcopy__ is COPIES_MEMORY and value.layout is torch.strided
    )


def _reached(value: Any) -> Iterator[Any]:
    """Yield the tensors and storages among what a value holds."""
    waiting, seen = [value], {id(value)}
    while waiting:
        found = waiting.pop()
        if is_a(found, (torch.Tensor, *_STORAGES)):
            yield found
        held = gc.get_referents(found)
        if is_a(found, torch.Tensor) and found.is_leaf:
            held.append(found.grad)
        for item in held:
            if id(item) not in seen and not is_a(item, _LEAVES):
                seen.add(id(item))
                waiting.append(item)
        if len(seen) > MOST_OBJECTS:
            raise CaptureError("a deep copy of very many objects")
