"""Assignments of ``tensor.data``: steps after the graph, which reads what was given from then on."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from ladder.capture.heap.nodes import CaptureError
from ladder.capture.interpreter.graph_arguments import value_of
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.operations.symbolic import is_open
from ladder.capture.operations.tensor_operators import tensor_operator
from ladder.capture.values.aliasing import storage_of
from ladder.capture.values.kinds import is_a
from ladder.capture.values.monitor import place_of
from ladder.capture.values.tensors import is_plain_tensor

_GETTER: Any = torch._C.TensorBase.__dict__["data"]


def is_data_of_tensor(found: Any, value: Any) -> bool:
    """Tell whether a descriptor is ``data`` of a tensor."""
    return found is _GETTER and is_plain_tensor(value)


def store_data(vm: Interpreter, value: torch.Tensor, data: Any) -> None:
    """Do ``value.data = data``.

    Versions, and what shares memory with the tensor as it was, stay as they are. The graph breaks where
    autograd would see that it reads `data` in place of the tensor, or memory that both have is written.
    """
    if not is_a(data, torch.Tensor) or not (_is_fit(vm, value) and _is_fit(vm, data)):
        raise CaptureError("the data of a tensor are set")
    node, known = vm.heap.node(value), value_of(vm, value)
    if not node.external or node.autograd[1] or is_open(vm, value) or vm.aside:
        raise CaptureError("the data of a tensor that is made here, open or a view are set")
    if _is_itself(vm, value, data):
        return
    given = value_of(vm, tensor_operator(vm, getattr, (data, "data"), {}))
    before, uses = value.data, set[str]()
    text = f"{vm.heap.reference(value, uses)}.data = {vm.heap.reference(data, uses)}"
    try:
        value.data = data
    except (TypeError, RuntimeError) as error:
        raise CaptureError("the data of a tensor cannot be set") from error
    known.fx, known.constant = given.fx, False
    vm.trace.replaced.setdefault(known.var, (value, before))
    vm.heap.change(text, [node], uses)


def _is_fit(vm: Interpreter, value: torch.Tensor) -> bool:
    strided = is_plain_tensor(value) and value.layout is torch.strided and not value.is_inference()
    if not strided or vm.modes or value_of(vm, value).dynamic:
        return False
    fake = vm.heap.shapes.fakes[vm.heap.node(value).var] if is_open(vm, value) else value
    return all(is_a(extent, int) for extent in (*fake.shape, *fake.stride()))


def _is_itself(vm: Interpreter, value: torch.Tensor, data: torch.Tensor) -> bool:
    """Tell whether a tensor is given what it holds: what operators have made of it alone, in every call."""
    if (
        storage_of(value) != storage_of(data)
        or place_of(value) != place_of(data)
        or value.dtype != data.dtype
    ):
        return False
    node, own = value_of(vm, data).fx, value_of(vm, value).fx
    while node is not None and node is not own:
        node = node.args[0] if len(node.all_input_nodes) == 1 and is_a(node.args[0], torch.fx.Node) else None
    return node is not None
