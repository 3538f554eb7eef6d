"""Attribute access, by the rules of `object.__getattribute__`, with every look-up guarded."""

from __future__ import annotations

import collections
import contextvars
import functools
import sys
import threading
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch

from ladder.capture.heap.nodes import CaptureError, Itself, Node, Text
from ladder.capture.interpreter.exceptions import context_of, is_handled, set_field
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.recording import recorded
from ladder.capture.operations.counts import counted_metadata
from ladder.capture.operations.function_modes import by_mode
from ladder.capture.operations.module_items import MODULE_GET, module_item
from ladder.capture.operations.objects import is_fixed, pinned_part, seen_through, tuple_item
from ladder.capture.operations.symbolic import OF_ANY_VALUES, is_open, open_metadata
from ladder.capture.operations.tensor_operators import is_external, tensor_operator
from ladder.capture.python import natives, polyfills
from ladder.capture.python.frames import NULL
from ladder.capture.python.words import words
from ladder.capture.values.kinds import by_identity, by_value, is_a, is_constant, module_of
from ladder.capture.values.shapes import DynamicSize
from ladder.capture.values.tensors import METADATA, UNGUARDED, VIEWS_BY_ATTRIBUTE, is_plain_tensor

_OBJECT_GET: Any = object.__getattribute__
_PROPERTY_GET: Any = property.__dict__["__get__"]
PLAIN_HOMES = frozenset(
    {object, tuple, list, dict, set, frozenset, deque, OrderedDict, defaultdict, int, float, str, bytes}
    | {BaseException, complex, property, types.FunctionType, functools.partial}
    | {
        types.GeneratorType,
        types.SimpleNamespace,
        types.ModuleType,
        types.MappingProxyType,
        contextvars.ContextVar,
        Exception,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        threading.local,
    }
)
"""Types whose `__getattribute__` is `object`'s under another name."""
FUNCTION_NAMES = frozenset(
    words("__name__ __qualname__ __module__ __doc__ __annotations__ __annotate__ __type_params__")
)
"""What a function says of itself, and may be told, as by `functools.wraps`."""
_FUNCTION_FIELDS = {
    "__code__",
    "__defaults__",
    "__kwdefaults__",
    "__closure__",
    "__globals__",
    *FUNCTION_NAMES,
}
_TYPE_FIELDS = {"__name__", "__qualname__", "__mro__", "__bases__", "__module__", "__doc__", "__flags__"}
_MAXIMUM_LENGTH: Any = deque.__dict__["maxlen"]
_TYPE_GET: Any = type.__getattribute__
CHAINS_DESCRIPTORS = sys.version_info < (3, 13)
"""Whether a `classmethod` of another descriptor, such as a `property`, gives what that gives of the class."""
CACHED: Any = type(functools.cache(len))
"""The type of functions behind `functools.cache`."""
_OF_PYBIND: Any = type(vars(torch._C._InferenceMode)["__enter__"])
"""The type of methods of classes that pybind makes."""
SIZE_METHODS: dict[str, Any] = {"numel": polyfills.numel_}
"""Methods of shapes that are followed where extents are open."""
_TUPLE_GETTER = collections._tuplegetter  # type: ignore[attr-defined]


_REGISTRIES = (torch._ops._Ops, torch._ops._OpNamespace, torch._ops.OpOverloadPacket)
"""What looks an operator up by its name, and keeps it."""


def instance_dict(value: Any) -> Any:
    """Return the instance dictionary of `value`, for thread-local data this thread's, or `NULL`."""
    get = threading.local.__getattribute__ if is_a(value, threading.local) else _OBJECT_GET
    try:
        found = get(value, "__dict__")
    except AttributeError:
        return NULL
    return found if is_a(found, dict) else NULL


def load_attr(vm: Interpreter, value: Any, name: str) -> Any:
    """Return ``value.name``."""
    if type(value) is DynamicSize and name in SIZE_METHODS:
        return types.MethodType(pinned_part(vm, SIZE_METHODS[name]), value)
    value = vm.plain(value)
    if type(value) is Text:
        return _text_attr(value, name)
    return recorded(vm, _load, (value, name), (getattr, (value, name)))


def _text_attr(value: Text, name: str) -> Any:
    """Return an attribute of a string that matched runs make anew: its methods are given it."""
    found = getattr(str, name, None)
    if isinstance(found, types.MethodDescriptorType | types.WrapperDescriptorType):
        return types.MethodType(found, value)
    return getattr(str(value), name)


def _load(vm: Interpreter, value: Any, name: str) -> Any:
    try:
        return _loaded(vm, value, name)
    except AttributeError as error:
        if error.name is None and error.obj is None:  # as attribute access in C does
            set_field(vm, error, "name", name)
            set_field(vm, error, "obj", value)
        raise


def _loaded(vm: Interpreter, value: Any, name: str) -> Any:
    kind = type(value)
    if kind is types.MappingProxyType and hasattr(kind, name):
        value = seen_through(vm, value)
        kind = type(value)
    if kind in _REGISTRIES:
        getattr(value, name, None)  # from now on it is an attribute
    if kind is types.ModuleType:
        if name == "__getattribute__" and name not in vars(value):
            return value.__getattribute__
        return _module_item(vm, value, name)
    if is_a(value, type):
        return _class_attr(vm, value, name)
    if kind is super:
        return _super_attr(vm, value, name)
    if kind is types.MethodType and name in ("__func__", "__self__", "__name__", "__doc__"):
        return getattr(value, name)
    if is_constant(value) and not is_a(value, types.FunctionType | torch.jit.ScriptFunction):
        return _constant_attr(vm, value, name)
    return _object_attr(vm, value, kind, name)


def _constant_attr(vm: Interpreter, value: Any, name: str) -> Any:
    """Attributes of scalars and other constants are constants, if the class is not the user's."""
    if type(value).__flags__ & 1 << 9 and module_of(type(value)).split(".")[0] not in ("torch", "numpy"):
        return _object_attr(vm, value, type(value), name)
    return getattr(value, name)


def _object_attr(vm: Interpreter, value: Any, kind: type, name: str) -> Any:
    fallback = vm.heap.class_attribute(kind, "__getattr__")
    if fallback is NULL:
        return _attribute(vm, value, kind, name)
    is_native = not is_a(fallback, types.FunctionType)
    if is_native and getattr(fallback, "__objclass__", None) is not dict:
        raise CaptureError("a native __getattr__")
    try:
        with vm.barrier():
            return _attribute(vm, value, kind, name)
    except AttributeError:
        pass
    if is_native:  # a dictionary whose items are read as attributes
        with vm.barrier():
            return vm.call(fallback, (value, name), {})
    if fallback is MODULE_GET and (found := _part_of_module(vm, fallback, value, kind, name)) is not NULL:
        return found
    return vm.call_function(fallback, (value, name), {})


def _part_of_module(vm: Interpreter, fallback: Any, value: Any, kind: type, name: str) -> Any:
    """Return what the method of modules finds; `NULL` where it is interpreted, as where a class looks on."""
    if vm.heap.class_attribute(kind, "__getattribute__") is not _OBJECT_GET:
        return NULL
    try:
        with vm.barrier():
            inside = _attribute(vm, value, kind, "__dict__")
    except (AttributeError, CaptureError):
        return NULL
    return module_item(vm, fallback, inside, name)


def _attribute(vm: Interpreter, value: Any, kind: type, name: str) -> Any:
    getter = vm.heap.class_attribute(kind, "__getattribute__")
    if is_a(getter, types.FunctionType):
        return vm.call_function(getter, (value, name), {})
    if is_a(value, threading.local) and name == "__dict__":
        inside = instance_dict(value)
        dict_node(vm, value, inside)
        return inside
    if kind is CACHED and name.startswith("cache_"):
        raise vm.meets_statistics()
    if getattr(getter, "__objclass__", None) not in PLAIN_HOMES:
        raise CaptureError(f"{kind.__qualname__} has its own native __getattribute__")
    return generic_attribute(vm, value, kind, name)


def generic_attribute(vm: Interpreter, value: Any, kind: type, name: str) -> Any:
    """Return ``object.__getattribute__(value, name)``; `kind` is the type of `value`."""
    found = vm.heap.class_attribute(kind, name)
    described = type(found)
    if found is not NULL and hasattr(described, "__get__") and is_data(described):
        return bind_descriptor(vm, found, value, kind)
    inside = instance_item(vm, value, name)
    if inside is not NULL:
        return inside
    if found is not NULL:
        return bind_descriptor(vm, found, value, kind) if hasattr(described, "__get__") else found
    return _OBJECT_GET(value, name)  # raises the AttributeError of this type


def instance_item(vm: Interpreter, value: Any, name: str) -> Any:
    """Return the entry `name` of the instance dictionary, or `NULL`."""
    inside = instance_dict(value)
    if inside is NULL:
        return NULL
    node = dict_node(vm, value, inside)
    if node.is_known(name):
        return dict.get(inside, name, NULL)
    path = f"{vm.heap.guard.path(node.var)}[{name!r}]"
    if name not in inside:
        vm.heap.absent(node, name, f"{name!r} not in {node.var}", path)
        return NULL
    return vm.heap.load(node, name, inside[name], f"{node.var}[{name!r}]", path)


def dict_node(vm: Interpreter, value: Any, inside: dict[str, Any]) -> Node:
    """Return the node of the instance dictionary of `value`, which may be that of other objects too."""
    heap, known = vm.heap, vm.heap.find(inside)
    owner = heap.node(value)
    first = owner.first(Itself.DICTIONARY)
    if known is not None and not (first and known.external):
        return known
    plain = type(value).__getattribute__ is _OBJECT_GET
    text = f"{owner.var}.__dict__" if plain else f"{heap.constant(_OBJECT_GET)}({owner.var}, '__dict__')"
    if is_a(value, threading.local):
        text = f"{heap.constant(instance_dict)}({owner.var})"
    if not owner.external:
        node = heap.fresh(inside, text, {owner.var})
        node.parents = {owner.var, *owner.parents}
        node.seen = dict.fromkeys(inside, "")
        return node
    path = f"{heap.guard.paths.get(owner.var, _brief_path(value))}.__dict__"
    if owner.pinned and plain and (known is None or known.pinned):
        heap.guard.table.instances[id(value)] = (value, inside)
        return known or heap.pin(inside, path)
    if known is not None:
        heap.guard.check(f"{text} is {known.var}", f"{path} is {heap.guard.path(known.var)}")
        return known
    node = Node(inside, heap.guard.bind(text, path), external=True, stable=owner.stable)
    node.stable &= not is_a(value, threading.local)  # each thread has another
    return heap.add(node)


def _module_item(vm: Interpreter, module: types.ModuleType, name: str) -> Any:
    """Return an entry of a module's dictionary, or what its own ``__getattr__`` gives for it."""
    names = vars(module)
    node, path = vm.heap.pin(names), f"{names.get('__name__')}.{name}"
    if name in names:
        return vm.heap.load(node, name, names[name], f"{node.var}[{name!r}]", path)
    vm.heap.absent(node, name, f"{name!r} not in {node.var}", path)
    if hasattr(types.ModuleType, name):
        raise CaptureError(f"{path} is of all modules")
    if "__getattr__" not in names:
        vm.heap.absent(node, "__getattr__", f"'__getattr__' not in {node.var}", f"{path}, by __getattr__")
        return getattr(module, name)  # raises the AttributeError of modules
    return vm.call(_module_item(vm, module, "__getattr__"), (name,), {})


# classes ----------------------------------------------------------------------------------
def _class_attr(vm: Interpreter, value: type, name: str) -> Any:
    meta = type(value)
    if name in _TYPE_FIELDS:
        return _type_field(vm, value, name)
    if not _reads_as_type(vm, meta):
        raise CaptureError("a metaclass with its own __getattribute__")
    over = vm.heap.class_attribute(meta, name)
    if type(over) is property:
        return bind_descriptor(vm, over, value, meta)
    if over is not NULL and is_data(type(over)):
        raise CaptureError("a data descriptor of a metaclass")
    found = vm.heap.class_attribute(value, name)
    if found is NULL:
        if over is not NULL:
            return bind_descriptor(vm, over, value, meta)
        if vm.heap.class_attribute(meta, "__getattr__") is not NULL:
            raise CaptureError("an attribute computed by a metaclass")
        return getattr(value, name)
    return _bound_to_class(vm, found, value, name)


def _reads_as_type(vm: Interpreter, meta: type) -> bool:
    """Say whether attributes of a metaclass's classes are found as those of `type`; pybind11's own are."""
    if meta is type:
        return True
    native = [base.__getattribute__ for base in meta.__mro__ if base.__module__ == "pybind11_builtins"]
    return vm.heap.class_attribute(meta, "__getattribute__") in (_TYPE_GET, *native)


def _type_field(vm: Interpreter, value: type, name: str) -> Any:
    found = getattr(value, name)
    if by_identity(found) or by_value(found):
        owner = vm.heap.constant(value)
        vm.heap.meet(found, f"{owner}.{name}", f"{owner}.{name}", stable=True)
    return found


def _bound_to_class(vm: Interpreter, found: Any, value: type, name: str) -> Any:
    if is_a(found, classmethod):
        return _class_method(vm, found, value)
    if is_a(found, staticmethod):
        return pinned_part(vm, found.__func__)
    if _is_property(vm, type(found)):
        return found
    if hasattr(type(found), "__get__") and not is_a(found, types.FunctionType):
        getter = vm.heap.class_attribute(type(found), "__get__")
        if is_a(getter, types.FunctionType):
            return vm.call_function(getter, (found, None, value), {})
        return getattr(value, name)
    return found


def _super_attr(vm: Interpreter, value: Any, name: str) -> Any:
    this, owner = value.__thisclass__, value.__self__
    kind = value.__self_class__
    if name == "__class__":
        return super
    if kind is None:
        raise CaptureError("an attribute of an unbound super")
    order = kind.__mro__
    for home in order[order.index(this) + 1 :]:
        vm.heap.class_attribute(home, name)
        if name in home.__dict__:
            found = home.__dict__[name]
            if not hasattr(type(found), "__get__"):
                return found
            return bind_descriptor(vm, found, None if owner is kind else owner, kind)
    return getattr(value, name)


# descriptors ------------------------------------------------------------------------------
def bind_descriptor(vm: Interpreter, found: Any, value: Any, kind: type) -> Any:
    """Return what the descriptor `found` gives for `value`, an instance of `kind`."""
    described = type(found)
    if described is types.FunctionType:
        return found if value is None else types.MethodType(found, value)
    if _is_property(vm, described):
        if found.fget is None:
            raise CaptureError("a property without a getter")
        return vm.call(pinned_part(vm, found.fget), (value,), {})
    if described is classmethod:
        return _class_method(vm, found, kind)
    if described is staticmethod:
        return pinned_part(vm, found.__func__)
    return _bind_native(vm, found, described, value, kind)


def _class_method(vm: Interpreter, found: Any, kind: type) -> Any:
    """Return what a `classmethod` gives: a method of `kind`, or what a descriptor inside gives of it."""
    inner = pinned_part(vm, found.__func__)
    if CHAINS_DESCRIPTORS and type(inner) is not types.FunctionType and hasattr(type(inner), "__get__"):
        return bind_descriptor(vm, inner, kind, kind)
    return found.__get__(None, kind)  # what is inside need not be callable, as `MethodType` asks


def _is_property(vm: Interpreter, described: type) -> bool:
    """Say whether instances of a subclass of `property` are read as properties are."""
    if described is property:
        return True
    return issubclass(described, property) and vm.heap.class_attribute(described, "__get__") is _PROPERTY_GET


def _bind_native(vm: Interpreter, found: Any, described: type, value: Any, kind: type) -> Any:
    if described in (
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        types.ClassMethodDescriptorType,
    ):
        return found.__get__(value, kind)
    if described is types.BuiltinFunctionType:
        return found
    if described is CACHED:
        return types.MethodType(found, value)
    if described is _OF_PYBIND:
        inner = pinned_part(vm, found.__func__)
        return inner if value is None else types.MethodType(inner, value)
    if described is _TUPLE_GETTER and is_a(value, tuple):
        return tuple_item(vm, value, found.__reduce__()[1][0])
    if described is types.MemberDescriptorType:
        return _slot(vm, found, value)
    if described is types.GetSetDescriptorType:
        return _computed(vm, found, value, kind)
    getter = vm.heap.class_attribute(described, "__get__")
    if is_a(getter, types.FunctionType):
        return vm.call_function(getter, (found, value, kind), {})
    raise CaptureError(f"a descriptor of type {described.__qualname__}")


def _slot(vm: Interpreter, found: Any, value: Any) -> Any:
    try:
        inside = found.__get__(value)
    except AttributeError:
        raise CaptureError(f"the slot {found.__name__} is unset") from None
    node = vm.heap.node(value)
    text = f"{vm.heap.constant(found)}.__get__({node.var})"
    return vm.heap.load(node, found, inside, text, f"{node.var}.{found.__name__}")


def _computed(vm: Interpreter, found: Any, value: Any, kind: type) -> Any:
    name = found.__name__
    if name == "__class__":
        return kind
    if name == "__dict__":
        inside = found.__get__(value)
        dict_node(vm, value, inside)
        return inside
    if is_a(value, torch.Tensor) and found.__objclass__ is torch._C.TensorBase:
        return _tensor_attr(vm, value, name)
    if found is _MAXIMUM_LENGTH or (is_a(value, types.FunctionType) and name in _FUNCTION_FIELDS):
        return _native_field(vm, value, name)
    if is_constant(value):
        return found.__get__(value)
    if name in natives.FIXED.get(kind, ()) and is_fixed(vm, value):
        node = vm.heap.node(value)
        inside = found.__get__(value)
        if not is_constant(inside) and vm.heap.find(inside) is None:
            vm.heap.fresh(inside, f"{node.var}.{name}", {node.var})
        return inside
    if is_a(value, BaseException):
        return _error_field(vm, found, value, name)
    raise CaptureError(f"the computed attribute {kind.__qualname__}.{name}")


def _native_field(vm: Interpreter, value: Any, name: str) -> Any:
    node, inside = vm.heap.node(value), getattr(value, name)
    if not node.external and not is_constant(inside) and vm.heap.find(inside) is None:
        vm.heap.fresh(inside, f"{node.var}.{name}", {node.var})
    return vm.heap.load(node, name, inside, f"{node.var}.{name}", f"{node.var}.{name}")


def _error_field(vm: Interpreter, found: Any, value: Any, name: str) -> Any:
    external = is_external(vm, value)
    inside = found.__get__(value)
    if name == "__context__" and inside is None and (not external or is_handled(vm, value)):
        return context_of(vm, value)
    if not external:
        return inside
    node = vm.heap.node(value)
    return vm.heap.load(node, name, inside, f"{node.var}.{name}", f"{node.var}.{name}")


def _tensor_attr(vm: Interpreter, value: Any, name: str) -> Any:
    if not is_plain_tensor(value):
        raise CaptureError("an attribute of a tensor subclass")
    if vm.modes and (found := by_mode(vm, getattr, (value, name), {})) is not NULL:
        return found
    node = vm.heap.node(value)
    if name in VIEWS_BY_ATTRIBUTE or name == "data":
        return tensor_operator(vm, getattr, (value, name), {})
    if name in METADATA and name not in OF_ANY_VALUES and vm.trace.is_dynamic(node.var):
        return counted_metadata(vm, value, name, (), {})
    if name in METADATA:
        meet_metadata(vm, value, name)
        return open_metadata(vm, value, name, (), {}) if is_open(vm, value) else getattr(value, name)
    if name == "grad" and node.external:
        # Within a segment no gradient changes: backward passes and assignments break the graph.
        return vm.heap.load(node, name, value.grad, f"{node.var}.grad", f"{node.var}.grad")
    raise CaptureError(f"the tensor attribute {name}")


def meet_metadata(vm: Interpreter, value: torch.Tensor, name: str) -> None:
    """Guard metadata that do not follow from what is guarded of every tensor."""
    node = vm.heap.node(value)
    if name not in UNGUARDED or name in node.seen:
        return
    if not node.external:
        if name not in ("is_leaf", "requires_grad", "is_nested", "_is_view"):
            raise CaptureError(f"{name} of a tensor made here")
        return
    if node.var in vm.trace.replaced and name not in ("is_leaf", "requires_grad"):
        raise CaptureError(f"{name} of a tensor whose data were set")
    node.first(name)
    found = getattr(value, name)
    text = f"{node.var}.{name}{'()' if callable(found) else ''}"
    found = vm.heap.constant(found() if callable(found) else found)
    vm.heap.guard.check(f"{text} == {found}", f"{node.var}.{name}")


def is_data(described: type) -> bool:
    """Say whether descriptors of a type also take what is stored."""
    return hasattr(described, "__set__") or hasattr(described, "__delete__")


def _brief_path(value: Any) -> str:
    return value.__qualname__ if is_a(value, type | types.FunctionType) else type(value).__name__
