"""Stores and deletions of attributes, by the rules of `object.__setattr__` and `object.__delattr__`.

Assignments of ``tensor.data`` are steps after the graph, which reads what was given from then on.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
import torch.fx

from ladder.capture.heap.nodes import CaptureError
from ladder.capture.interpreter.exceptions import set_field
from ladder.capture.interpreter.graph_arguments import value_of
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.recording import call_in_statement, recorded
from ladder.capture.operations.attributes import (
    FUNCTION_NAMES,
    PLAIN_HOMES,
    dict_node,
    instance_dict,
    instance_item,
    is_data,
)
from ladder.capture.operations.functions import let_die
from ladder.capture.operations.objects import pinned_part, settled
from ladder.capture.operations.symbolic import is_open
from ladder.capture.operations.tensor_operators import is_external, tensor_operator
from ladder.capture.python.frames import NULL
from ladder.capture.values.aliasing import storage_of
from ladder.capture.values.kinds import is_a, is_constant
from ladder.capture.values.monitor import place_of
from ladder.capture.values.tensors import is_plain_tensor

_OBJECT_SET: Any = object.__setattr__
_OBJECT_DELETE: Any = object.__delattr__
_TRACEBACK: Any = BaseException.__dict__["__traceback__"]
_CHAINED: Any = tuple(
    BaseException.__dict__[name] for name in ("__context__", "__cause__", "__suppress_context__")
)
_REQUIRES: Any = torch.Tensor.requires_grad


def store_attr(vm: Interpreter, value: Any, name: str, item: Any) -> None:
    """Do ``value.name = item``."""
    value = vm.plain(value)
    recorded(vm, _store, (value, name, item), (setattr, (value, name, item)))


def _store(vm: Interpreter, value: Any, name: str, item: Any) -> None:
    kind = type(value)
    if is_a(value, type | types.ModuleType):
        raise CaptureError("an attribute of a class or module is set")
    setter = vm.heap.class_attribute(kind, "__setattr__")
    if is_a(setter, types.FunctionType):
        call_in_statement(vm, setter, (value, name, item))
        return
    if getattr(setter, "__objclass__", None) not in PLAIN_HOMES:
        raise CaptureError("a native __setattr__")
    store_plain(vm, value, name, item, setter)


def store_plain(vm: Interpreter, value: Any, name: str, item: Any, setter: Any = _OBJECT_SET) -> None:
    """Do ``object.__setattr__(value, name, item)``, by that name or another."""
    found = vm.heap.class_attribute(type(value), name)
    if type(found) is property and found.fset is not None:
        call_in_statement(vm, pinned_part(vm, found.fset), (value, item))
        return
    if _followed_descriptor(vm, found, "__set__", value, item):
        return
    if found is _TRACEBACK and not is_external(vm, value):
        setter(value, name, item)  # where an error made here has been is no part of what is made again
        return
    if found in _CHAINED and vm.recording:
        chained(vm, value, name, item)
        return
    if found is _GETTER and is_plain_tensor(value):
        store_data(vm, value, item)
        return
    if found is _REQUIRES and is_plain_tensor(value) and type(item) is bool:
        tensor_operator(vm, torch.Tensor.requires_grad_, (value, item), {})
        return
    slot = type(found) is types.MemberDescriptorType
    field = slot or (is_a(value, types.FunctionType) and name in FUNCTION_NAMES)
    if found is not NULL and is_data(type(found)) and not field:
        raise CaptureError(f"the data descriptor {name} is set")
    inside = instance_dict(value)
    node = vm.heap.node(value) if field or inside is NULL else dict_node(vm, value, inside)
    item = settled(vm, item, keep=True)
    if _is_hidden_manager(vm, value, item):
        setter(value, name, vm.held(item))
        node.wrote(found if slot else name, item)
        return
    uses: set[str] = set()
    owner = vm.heap.reference(value, uses)
    text = f"{vm.heap.constant(setter)}({owner}, {name!r}, "
    text += f"{vm.heap.reference(item, uses)})"
    targets = [node, vm.heap.node(value)]
    vm.heap.keep_entry(node, name)
    vm.heap.keep_entry(targets[1])
    before = NULL if inside is NULL else inside.get(name, NULL)
    setter(value, name, vm.held(item))
    node.wrote(found if slot else name, item)
    vm.heap.change(text, targets, uses)
    if vm.heap.steps[-1].keep:
        vm.heap.steps[-1].replaced = value, name, before if is_constant(before) else NULL


def chained(vm: Interpreter, error: BaseException, name: str, item: Any) -> None:
    """Do ``error.__context__ = item``, or the same of the cause, which hides the context."""
    if is_external(vm, error):
        raise CaptureError(f"{name} of an exception from outside is set")
    set_field(vm, error, name, item)
    vm.heap.node(error).written |= {"__suppress_context__"} if name == "__cause__" else set()


def _followed_descriptor(vm: Interpreter, found: Any, name: str, *rest: Any) -> bool:
    """Call the method of a descriptor that is a Python function; say whether it has such a one."""
    method = NULL if found is NULL else vm.heap.class_attribute(type(found), name)
    if not is_a(method, types.FunctionType):
        return False
    call_in_statement(vm, method, (found, *rest))
    return True


def _is_hidden_manager(vm: Interpreter, value: Any, item: Any = None) -> bool:
    """Say whether `value` is a context manager of this segment over a generator, which is or holds `item`.

    No step can make it again, so what changes in it makes no step.
    """
    if not is_a(value, contextlib._GeneratorContextManagerBase):
        return False
    node, held = vm.heap.node(value), vm.heap.nodes.get(id(item))
    if not node.external and held is not None and held.closes:
        let_die(vm, value, instance_dict(value))
    return not node.recordable


def delete_attr(vm: Interpreter, value: Any, name: str) -> None:
    """Do ``del value.name``."""
    value = vm.plain(value)
    recorded(vm, _delete, (value, name), (delattr, (value, name)))


def _delete(vm: Interpreter, value: Any, name: str) -> None:
    deleter = vm.heap.class_attribute(type(value), "__delattr__")
    if is_a(deleter, types.FunctionType):
        call_in_statement(vm, deleter, (value, name))
        return
    if deleter is not _OBJECT_DELETE or is_a(value, type):
        raise CaptureError("an attribute is deleted natively")
    delete_plain(vm, value, name)


def delete_plain(vm: Interpreter, value: Any, name: str) -> None:
    """Do ``object.__delattr__(value, name)``."""
    inside = instance_dict(value)
    if inside is NULL:
        raise CaptureError("an attribute is deleted natively")
    found = vm.heap.class_attribute(type(value), name)
    if type(found) is property and found.fdel is not None:
        call_in_statement(vm, pinned_part(vm, found.fdel), (value,))
        return
    if _followed_descriptor(vm, found, "__delete__", value):
        return
    if found is not NULL and is_data(type(found)):
        raise CaptureError("a descriptor is deleted")
    if instance_item(vm, value, name) is NULL:
        delattr(value, name)  # raises
    node = dict_node(vm, value, inside)
    if _is_hidden_manager(vm, value):
        object.__delattr__(value, name)
        node.wrote(name)
        return
    uses: set[str] = set()
    owner = vm.heap.reference(value, uses)
    vm.heap.keep_entry(node, name)
    vm.heap.keep_entry(vm.heap.node(value))
    object.__delattr__(value, name)
    node.wrote(name)
    vm.heap.change(
        f"{vm.heap.constant(object.__delattr__)}({owner}, {name!r})", [node, vm.heap.node(value)], uses
    )


_GETTER: Any = torch._C.TensorBase.__dict__["data"]


def store_data(vm: Interpreter, value: torch.Tensor, data: Any) -> None:
    """Do ``value.data = data``.

    Versions, and what shares memory with the tensor as it was, stay as they are. The graph breaks where
    autograd would see that it reads `data` in place of the tensor, or memory that both have is written.
    """
    if not is_a(data, torch.Tensor) or not (_is_fit(vm, value) and _is_fit(vm, data)):
        raise CaptureError("the data of a tensor are set")
    node, known = vm.heap.node(value), value_of(vm, value)
    vm.trace.refuse_writes({storage_of(value)}, "__set__")
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
