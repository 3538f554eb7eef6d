"""Arguments of operators as arguments of graph nodes."""

from __future__ import annotations

import operator
import types
from keyword import iskeyword
from typing import Any

import numpy as np
import torch
import torch.fx

from ladder.capture.heap.nodes import CaptureError, Dynamic
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.python.symbols import BINARY, IN_PLACE
from ladder.capture.trace.graph_module import OF_NUMBERS
from ladder.capture.trace.trace import Value
from ladder.capture.values import tensors
from ladder.capture.values.kinds import is_a, mapped
from ladder.capture.values.shapes import DynamicSize

_OF_NUMBERS = {BINARY[symbol]: BINARY[symbol[:-1]] for symbol in IN_PLACE} | OF_NUMBERS
"""``number += tensor`` changes nothing in place, and is no statement where the number is written out."""
_FX_CONSTANTS: tuple[Any, ...] = (
    int,
    float,
    complex,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
)
_DTYPES: dict[Any, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
"""What torch takes types of Python for."""
_FX_CONSTANTS = (*_FX_CONSTANTS, torch.memory_format, type(...), torch._ops.OpOverload)


def operator_node(vm: Interpreter, function: Any, args: Any, kwargs: Any) -> torch.fx.Node:
    """Add the node of an operator to the graph."""
    graph = vm.trace.graph
    # Code cannot spell them by name: ``from`` of `random_` and `uniform_`, which comes next.
    args = (*args, *(value for name, value in kwargs.items() if iskeyword(name)))
    kwargs = {name: value for name, value in kwargs.items() if not iskeyword(name)}
    described = is_a(function, types.MethodDescriptorType | types.WrapperDescriptorType)
    method = is_a(function, types.FunctionType) and function.__qualname__.startswith("Tensor.")
    if described and function.__name__ in ("__getitem__", "__setitem__"):
        return graph.call_function(getattr(operator, function.__name__.strip("_")), args, kwargs)
    if (described or method) and args and is_a(args[0], torch.fx.Node):
        vm.heap.class_attribute(torch.Tensor, function.__name__)
        return graph.call_method(function.__name__, args, kwargs)
    if is_a(function, torch.jit.ScriptFunction):
        function = tensors.scripted(function)
    if args and not is_a(args[0], torch.fx.Node):
        function = _OF_NUMBERS.get(function, function)
    return graph.call_function(function, args, kwargs)


def argument(vm: Interpreter, value: Any, inputs: list[Value]) -> Any:
    """Return `value` as an argument of a graph node."""
    if type(value) is Dynamic:
        return _number(vm, value, inputs)
    if is_a(value, torch.Tensor):
        return tensor_argument(vm, value, inputs)
    if type(value) in (list, tuple, torch.Size, DynamicSize):
        vm.heap.touch(value, 1)
        items = [argument(vm, item, inputs) for item in value]
        return items if type(value) is list else tuple(items)
    if type(value) is dict:
        vm.heap.touch(value, 1)
        return {key: argument(vm, item, inputs) for key, item in value.items()}
    if type(value) is range:
        return list(value)
    if type(value) is slice:
        return mapped(value, lambda part: _bound(vm, part, inputs))
    if is_a(value, np.integer | np.floating):
        return value.item()
    if is_a(value, _FX_CONSTANTS) and type(value) in _FX_CONSTANTS:
        return value
    if is_a(value, type) and value in _DTYPES:
        return _DTYPES[value]
    raise CaptureError(f"an operator takes {type(value).__qualname__}")


def _bound(vm: Interpreter, value: Any, inputs: list[Value]) -> Any:
    """Return a bound of a slice: of a tensor made of numbers alone, the integer that torch reads."""
    whole = tensors.is_plain_tensor(value) and value.numel() == 1 and value.dtype in _WHOLE
    if whole and value_of(vm, value).constant:
        return int(value)
    return argument(vm, value, inputs)


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _number(vm: Interpreter, value: Dynamic, inputs: list[Value]) -> Any:
    """Return the node of a number; inside a side of a branch one that the graph computes is assumed."""
    if value.counted is None:
        if vm.heap.shapes:
            vm.heap.shapes.given[value.var] = value.symbol
        return vm.trace.placeholder(value.var, value.value)
    if vm.aside:
        return vm.plain(value)
    known = vm.trace.values[value.var]
    inputs.append(known)
    return known.fx


def tensor_argument(vm: Interpreter, value: torch.Tensor, inputs: list[Value]) -> torch.fx.Node:
    """Return the graph node of a tensor, and add what is known of it to `inputs`."""
    if not tensors.is_plain_tensor(value):
        raise CaptureError("an operator on a tensor subclass")
    known = value_of(vm, value)
    if known.var in vm.trace.replaced and value.requires_grad and torch.is_grad_enabled():
        raise CaptureError("gradients of a tensor whose data were set")
    inputs.append(known)
    if known.fx is None:
        if not vm.heap.node(value).external:
            raise CaptureError("a tensor that was not made by an operator")
        if value.layout is not torch.strided:
            raise CaptureError("a tensor that is not strided")
        known.fx = vm.trace.placeholder(known.var, value)
    return known.fx


def value_of(vm: Interpreter, tensor: torch.Tensor) -> Value:
    """Return what the trace knows of a tensor."""
    return vm.trace.value(vm.heap.node(tensor).var, tensor)
