"""Functions that read metadata of tensors (``size``, ``stride``, ``dtype``); guards check their results."""

from __future__ import annotations

from typing import Any

import torch

from ladder.capture.heap.nodes import CaptureError, Dynamic
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.operations.attributes import meet_metadata
from ladder.capture.operations.counts import counted_metadata, is_counted
from ladder.capture.operations.function_modes import watched
from ladder.capture.operations.symbolic import EXTENTS, OF_ANY_VALUES, WITHOUT_EXTENTS, is_open, open_metadata
from ladder.capture.values import tensors
from ladder.capture.values.kinds import is_a, is_constant, is_plain
from ladder.capture.values.shapes import has_idle_axes


@watched
def read_metadata(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call one of the functions `tensors.METADATA`; what it gives is guarded, or open."""
    name = function.__name__
    args, kwargs = _of_types(name, args, kwargs)
    given = (*args, *kwargs.values())
    asked = [item for item in given if is_a(item, torch.Tensor)]
    if not all(is_plain(item) for item in given if not is_a(item, torch.Tensor)):
        raise CaptureError("metadata of a structure")
    one = len(asked) == 1 and bool(args) and asked[0] is args[0]
    for item in asked:
        depends = is_counted(vm, item) and name not in OF_ANY_VALUES
        if depends and one:
            return counted_metadata(vm, item, name, args[1:], kwargs)
        if depends or not tensors.is_plain_tensor(item):
            raise CaptureError(f"{name} of a tensor whose shape depends on values")
        meet_metadata(vm, item, name)
    if name not in EXTENTS | WITHOUT_EXTENTS and any(item in vm.heap.copies for item in asked):
        vm.heap.fix_shapes(f"{name} is read")
    if any(is_open(vm, item) for item in asked):
        if one and name in EXTENTS | WITHOUT_EXTENTS:
            return open_metadata(vm, asked[0], name, args[1:], kwargs)
        vm.heap.fix_shapes(f"{name} is read")
    if name == "stride":
        _meet_idle_strides(vm)
    args, kwargs = vm.plain_given(args, kwargs)
    result = function(*args, **kwargs)
    if not is_constant(result):
        raise CaptureError("metadata that is not a constant")
    return result


def _of_types(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with plain numbers for symbolic ones where only types matter; types are guarded."""
    if name != "result_type":
        return args, kwargs
    numbers = [item.value if type(item) is Dynamic else item for item in (*args, *kwargs.values())]
    return tuple(numbers[: len(args)]), dict(zip(kwargs, numbers[len(args) :], strict=True))


def _meet_idle_strides(vm: Interpreter) -> None:
    """Guard strides along axes of one element, which guards of tensors leave out."""
    for node in vm.heap.tensors:
        if node.obj.layout is torch.strided and has_idle_axes(node.obj.shape) and node.first("stride"):
            steps = vm.heap.constant(node.obj.stride())
            vm.heap.guard.check(f"{node.var}.stride() == {steps}", f"{node.var}.stride()")
