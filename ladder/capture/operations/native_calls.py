"""Calls of classes and of native functions, by their annotations."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch

from ladder.capture.heap.nodes import CaptureError, Dynamic, Text, dynamic_parts
from ladder.capture.interpreter.evaluate import is_known, run
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.recording import recorded
from ladder.capture.operations.attribute_stores import delete_plain, store_plain
from ladder.capture.operations.attributes import bind_descriptor, generic_attribute
from ladder.capture.operations.containers import container_method
from ladder.capture.operations.deep_copies import meet_deep_copy
from ladder.capture.operations.function_modes import watched
from ladder.capture.operations.functions import new_frame
from ladder.capture.operations.metadata import read_metadata
from ladder.capture.operations.modeled import FUNCTIONS, METHODS, outlives
from ladder.capture.operations.moving import open_tuple
from ladder.capture.operations.native_iterators import CALLING, native_iterator, runs_code
from ladder.capture.operations.objects import perform, pinned_part, require_fitting, says_its_arguments
from ladder.capture.operations.replay import drained, iterate, replay
from ladder.capture.operations.tensor_operators import read_list, tensor_operator
from ladder.capture.python import natives, polyfills
from ladder.capture.python.frames import NULL
from ladder.capture.values import tensors
from ladder.capture.values.kinds import descriptor_of, is_a, is_constant, is_plain, module_of
from ladder.capture.values.shapes import DynamicSize

_BUILTIN = types.BuiltinFunctionType
_POLYFILLS: dict[Any, types.FunctionType] = {
    functools.reduce: polyfills.reduce_,  # type: ignore[dict-item]
    torch.autograd.Variable: polyfills.variable,  # type: ignore[dict-item]
    torch.cuda.get_device_capability: polyfills.get_device_capability,  # type: ignore[dict-item]
}
_ANNOTATED = CALLING.keys() | _POLYFILLS.keys()
_POLYFILLS_OF_OBJECTS: dict[Any, Any] = {
    sum: polyfills.sum_,
    any: polyfills.any_,
    all: polyfills.all_,
    copy.copy: polyfills.copy_,
    copy.deepcopy: polyfills.deepcopy_,
}
_POLYFILLS_WITH_KEY = {sorted: polyfills.sorted_, min: polyfills.min_, max: polyfills.max_}
_TENSOR_TYPE = type(torch.FloatTensor)
_MADE_EMPTY = (object, dict, list, set, OrderedDict, defaultdict, deque, types.SimpleNamespace, property)
"""Classes whose ``__new__`` makes an empty object of the class that it is given."""
_OF_CLASSES = ("__new__", "__instancecheck__", "__subclasscheck__", "__subclasses__")


def instantiate(vm: Interpreter, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a class."""
    heap = vm.heap
    if kind is torch.Tensor or is_a(kind, _TENSOR_TYPE):
        return _by_tensor_type(vm, kind, args, kwargs)
    if kind is type and len(args) == 1 and not kwargs:
        found = type(vm.plain(args[0]))
        return str if found is Text else found
    if kind in _POLYFILLS or runs_code(vm, kind, args):
        return annotated(vm, kind, args, kwargs)
    if issubclass(kind, weakref.ReferenceType):
        if kind is not weakref.ref or len(args) != 1 or not outlives(vm, args[0]):
            raise vm.leave("a weak reference to what may die meanwhile")
        return perform(vm, kind, args, kwargs, [])
    if kind is reversed and len(args) == 1 and not kwargs and _indexed(vm, args[0]):
        return vm.call_function(pinned_part(vm, polyfills.reversed_), args, kwargs)
    if kind in natives.STRUCTURE or kind in natives.DATA or kind is functools.partial:
        return (watched(_replayed) if kind is torch.device else _replayed)(vm, kind, args, kwargs)
    meta_call = heap.class_attribute(type(kind), "__call__")
    if is_a(meta_call, types.FunctionType):
        return vm.call_function(meta_call, (kind, *args), kwargs)
    if meta_call is not type.__call__:
        raise CaptureError("a native metaclass __call__")
    return construct(vm, kind, args, kwargs)


_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
"""Of these `torch.Tensor` makes a view, whatever their type."""


def _by_tensor_type(vm: Interpreter, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `torch.Tensor` or a type such as `torch.FloatTensor`."""
    alone = kind is torch.Tensor and len(args) == 1 and not kwargs and type(args[0]) in _PLAIN_TENSORS
    if alone and args[0].layout is torch.strided:
        return vm.call(torch.Tensor.view_as, (args[0], args[0]), {})
    if kind is torch.Tensor:
        dtype = vm.call(torch.get_default_dtype, (), {})
    elif kind.is_cuda or kind.layout is not torch.strided:
        raise CaptureError(f"{kind.__name__}()")
    else:
        dtype = kind.dtype
    return _tensor_of(vm, dtype, torch.device("cpu"), args, kwargs)


def _new(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _tensor_of(vm, args[0].dtype, args[0].device, args[1:], kwargs)


def _to_type(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``Tensor.type``, which also takes types of tensors of the CPU."""
    if len(args) == 2 and is_a(args[1], _TENSOR_TYPE) and args[0].is_cpu and not args[1].is_cuda:
        args = (args[0], args[1].dtype)
    return tensor_operator(vm, function, args, kwargs)


def _tensor_of(
    vm: Interpreter, dtype: Any, device: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    shape = len(args) == 1 and type(args[0]) is DynamicSize
    numbers = all(type(item) in (int, list, tuple, torch.Size) for item in map(vm.unlifted, args))
    if kwargs or not (shape or (numbers and is_plain([vm.unlifted(item) for item in args]))):
        raise CaptureError("a tensor of what is no number, shape or list")
    return vm.call_function(pinned_part(vm, polyfills.tensor_by_type), (dtype, device, *args), {})


def _replayed(vm: Interpreter, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kind is functools.partial:  # it asks nothing of what it is given
        given = vm.plain_given(args, kwargs)
        return recorded(vm, perform, (kind, *given, []), (kind, *given))
    alone = len(args) == 1 and not kwargs
    if kind is str and alone and says_its_arguments(vm, args[0]):
        return str(args[0])
    if kind is str and alone and (writes := _writer(vm, args[0], "__str__", "__repr__")):
        return _written(vm, writes, args[0])
    if kind in _NUMBERS and alone and is_a(args[0], torch.Tensor):
        return vm.call(vm.heap.class_attribute(type(args[0]), _NUMBERS[kind]), args, {})
    return replay(vm, kind, args, kwargs, looking=kind in natives.DATA)


_NUMBERS: dict[type, str] = {int: "__int__", float: "__float__"}
"""Types of numbers -> the method that a tensor has for them."""


def _writer(vm: Interpreter, value: Any, *names: str) -> types.FunctionType | None:
    """Return the method in Python that writes an object of the program as text; None if natives do.

    names: Methods that are asked, each where those before are `object`'s.
    """
    if is_plain(value) or is_a(value, torch.Tensor) or vm.heap.find(value) is None:
        return None
    for name in names:
        found = vm.heap.class_attribute(type(value), name)
        if found is not getattr(object, name):
            return found if type(found) is types.FunctionType else None
    return None


def _written(vm: Interpreter, method: types.FunctionType, value: Any) -> Any:
    """Return the text that a method of the program gives; TypeError if it is none, as natives raise it."""
    text = vm.call_function(method, (value,), {})
    known = text.value if type(text) is Dynamic else text
    if not is_a(known, str):
        raise TypeError(f"{method.__name__} returned non-string (type {type(known).__name__})")
    return text


def _indexed(vm: Interpreter, value: Any) -> bool:
    """Say whether `reversed` indexes `value` by functions of torch's, as it does lists of modules.

    Where it is made a list, it asks for the length again: that of torch may be asked any number of times.
    """
    names = ("__reversed__", "__getitem__", "__len__")
    own, *found = (vm.heap.class_attribute(type(value), name) for name in names)
    return own is NULL and all(
        is_a(item, types.FunctionType) and module_of(item).startswith("torch.") for item in found
    )


def construct(vm: Interpreter, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do ``type.__call__(kind, *args, **kwargs)``."""
    heap = vm.heap
    if heap.class_attribute(kind, "__del__") is not NULL:
        raise vm.leave(f"{kind.__qualname__} has a finalizer")
    if issubclass(kind, BaseException):
        return _exception(vm, kind, args, kwargs)
    new = heap.class_attribute(kind, "__new__")
    initialise = heap.class_attribute(kind, "__init__")
    if is_a(new, staticmethod):
        new = pinned_part(vm, new.__func__)
    if is_a(new, types.FunctionType):
        return vm.call_function(pinned_part(vm, polyfills.construct), (new, kind, *args), kwargs)
    made = _allocate(vm, kind, new, args, kwargs)
    if not is_a(made, kind) or initialise is object.__init__:
        return made
    return _initialise(vm, made, initialise, args, kwargs)


def _allocate(vm: Interpreter, kind: type, new: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inherited = vm.heap.class_attribute(kind, "__init__") is object.__init__
    if new is object.__new__ and inherited and (args or kwargs):
        raise CaptureError("object() takes no arguments")
    return allocate(vm, getattr(new, "__self__", None), new, kind, args)


def allocate(vm: Interpreter, home: Any, new: Any, kind: type, args: tuple[Any, ...]) -> Any:
    """Make an instance of `kind` by `new`, the ``__new__`` of the native class `home`."""
    if kind.__flags__ & (1 << 20 | 1 << 7):
        raise CaptureError("a class that is abstract or makes no instances")
    if (home is tuple or (home is kind and issubclass(kind, tuple))) and len(args) == 1:
        items = args[0]
        if not is_a(items, tuple | list):
            with vm.barrier():
                items = drained(vm, iterate(vm, items))
        if any(map(dynamic_parts, items)):
            return open_tuple(vm, new, kind, tuple(items))
        given = (kind, tuple(map(vm.plain, items)))
        return recorded(vm, _touched_tuple, (items, new, given), (new, given))
    if home not in _MADE_EMPTY:
        raise CaptureError(f"instances of {kind.__qualname__} are made natively")
    made = new(kind)
    vm.heap.fresh(made, f"{vm.heap.constant(new)}({vm.heap.constant(kind)})", set())
    return made


def _touched_tuple(vm: Interpreter, items: Any, new: Any, given: tuple[Any, ...]) -> Any:
    vm.heap.touch(items, 1)
    return perform(vm, new, given, {}, [])


def _initialise(vm: Interpreter, made: Any, how: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not vm.recording:  # what made it has ended that
        vm.natively(how, made, *args, **kwargs)
        return made
    if how is types.SimpleNamespace.__init__ and not args:
        for name, item in kwargs.items():
            store_plain(vm, made, name, item)
        return made
    if not is_a(how, types.FunctionType):
        with vm.barrier():
            native(vm, how, (made, *args), kwargs)
        return made
    if how.__code__.co_flags & inspect.CO_GENERATOR or not is_known(how.__code__):
        raise CaptureError("__init__ is not interpreted")
    frame = new_frame(vm, how, (made, *args), kwargs)
    frame.override = made
    return run(vm, frame)


def _exception(vm: Interpreter, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain = tuple(map(vm.plain, args))
    lookup = vm.heap.class_attribute
    new, initialise = lookup(kind, "__new__"), lookup(kind, "__init__")
    if is_a(new, types.FunctionType | staticmethod):
        raise CaptureError("an exception class with its own __new__")
    if not is_a(initialise, types.FunctionType):
        made = perform(vm, kind, plain, kwargs, [])
        return made
    made = new(kind, *plain, **kwargs)
    uses: set[str] = set()
    text = vm.heap.call_text(vm.heap.constant(new), (kind, *plain), kwargs, uses)
    vm.heap.fresh(made, text, uses)
    return _initialise(vm, made, initialise, args, kwargs)


def native(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a native function by its annotation."""
    if function in tensors.STATE_WRITES:
        return tensor_operator(vm, function, args, kwargs)
    if tensors.is_torch_native(function) or _is_tensor_method(function):
        return _torch_native(vm, function, args, kwargs)
    if function in _ANNOTATED or function in natives.STRUCTURE or function in natives.DATA:
        return annotated(vm, function, args, kwargs)
    owner, name, rest = _receiver(function, args)
    held = _held(vm, function, owner, name)
    if held in FUNCTIONS:
        return FUNCTIONS[held](vm, function, args if held is function else (owner, *rest), kwargs)
    if (type(owner), name) in METHODS:
        return METHODS[type(owner), name](vm, owner, *map(vm.plain, rest), **kwargs)
    if owner is NULL:
        raise CaptureError(f"the native {getattr(function, '__qualname__', function)}")
    if is_a(owner, type) and name in _OF_CLASSES:
        return _of_class(vm, function, owner, name, args, kwargs)
    if is_a(owner, natives.SCALAR_TYPES):
        return replay(vm, function, args, kwargs, looking=True)
    if owner is object or is_a(function, types.WrapperDescriptorType | types.MethodWrapperType):
        return _wrapper(vm, function, owner, name, rest, kwargs)
    return container_method(vm, function, owner, name, rest, kwargs)


def _held(vm: Interpreter, function: Any, owner: Any, name: str) -> Any:
    """Return the native class method that `function` binds to a class, as that holds it, else `function`."""
    found = vm.heap.class_attribute(owner, name) if is_a(owner, type) else NULL
    return found if type(found) is types.ClassMethodDescriptorType else function


def _of_class(
    vm: Interpreter, function: Any, owner: type, name: str, args: Any, kwargs: dict[str, Any]
) -> Any:
    if name == "__subclasses__" and not args:
        return _subclasses(vm, owner)
    if name != "__new__":
        return function(*map(vm.unlifted, args), **kwargs)  # of which only the type matters
    if not args or not is_a(args[0], type):
        raise CaptureError(f"{owner.__qualname__}.__new__")
    if owner is object and len(args) > 1:
        raise CaptureError("object.__new__ with arguments")
    return allocate(vm, owner, function, args[0], args[1:])


def _subclasses(vm: Interpreter, owner: type) -> Any:
    """Return the classes that inherit from one directly; the guard finds the same."""
    found: tuple[type, ...] = tuple(type.__subclasses__(owner))
    of, known = vm.heap.constant(type.__subclasses__), vm.heap.constant(found)
    text = f"(*{of}({vm.heap.constant(owner)}),) == {known}"
    vm.heap.guard.check(text, f"the subclasses of {owner.__qualname__}")
    return vm.call(list, (pinned_part(vm, found),), {})


def _is_tensor_method(function: Any) -> bool:
    return type(function) in (_BUILTIN, types.MethodWrapperType) and is_a(function.__self__, torch.Tensor)


def _torch_native(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if type(function) in (_BUILTIN, types.MethodWrapperType) and is_a(function.__self__, torch.Tensor):
        args = (function.__self__, *args)
        function = getattr(torch._C.TensorBase, function.__name__)
    name = getattr(function, "__name__", "")  # traced functions have none
    if function in _BY_METHOD and not (name == "type" and len(args) == 1):
        return _BY_METHOD[function](vm, function, args, kwargs)
    if name in tensors.METADATA:
        return read_metadata(vm, function, args, kwargs)
    return tensor_operator(vm, function, args, kwargs)


_BY_METHOD = {
    torch._C.TensorBase.new: _new,
    torch._C.TensorBase.type: _to_type,
    torch._C.TensorBase.tolist: read_list,
}
"""Methods of tensors that take or stand for types of tensors, or make lists."""


def _wrapper(vm: Interpreter, function: Any, owner: Any, name: str, rest: Any, kwargs: dict[str, Any]) -> Any:
    """Slot wrappers: `object.__setattr__`, `dict.__getitem__`, `list.__init__` and the like."""
    home = getattr(function, "__objclass__", None) or type(owner)
    require_fitting(descriptor_of(function), (owner, *rest), kwargs)
    if (name == "__setattr__" and function in (object.__setattr__,)) or _wraps(function, object, name):
        return _object_wrapper(vm, owner, name, rest, kwargs)
    if name == "__get__" and is_a(owner, _BOUND_BY_HAND):
        return _bound_by_hand(vm, owner, *rest)
    if name == "__init__" and home is property and not vm.heap.node(owner).external:
        return perform(vm, property.__init__, (owner, *rest), kwargs, [vm.heap.node(owner)])
    if (name == "__call__" and home is type) or (is_a(owner, type) and name == "__call__"):
        return construct(vm, owner, rest, kwargs)
    return container_method(vm, function, owner, name, rest, kwargs)


_BOUND_BY_HAND = (types.FunctionType, types.GetSetDescriptorType, property, classmethod, staticmethod)


def _bound_by_hand(vm: Interpreter, found: Any, value: Any, kind: Any = None) -> Any:
    """Return what ``found.__get__(value, kind)`` gives, found a descriptor."""
    if value is None and is_a(found, types.GetSetDescriptorType | property):
        return found
    return bind_descriptor(vm, found, value, type(value) if kind is None else kind)


def _object_wrapper(vm: Interpreter, owner: Any, name: str, rest: Any, kwargs: dict[str, Any]) -> Any:
    if name == "__setattr__":
        return store_plain(vm, owner, vm.plain(rest[0]), rest[1])
    if name == "__getattribute__" and not is_a(owner, type | types.ModuleType):
        return generic_attribute(vm, owner, type(owner), vm.plain(rest[0]))
    if name == "__delattr__":
        return delete_plain(vm, owner, vm.plain(rest[0]))
    if name == "__init__" and not rest and not kwargs:
        return None
    raise CaptureError(f"object.{name}")


def _keyed(
    vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the named arguments with which the interpreter orders objects; None where the builtin does.

    It follows keys, tensors given one by one, and tuples that differ in what they begin with.
    """
    tensors = function is not sorted and len(args) > 1 and any(is_a(item, torch.Tensor) for item in args)
    if tensors or kwargs.get("key") is not None:
        return kwargs
    first = _differ_at_once(vm, args, kwargs)
    return {**kwargs, "key": pinned_part(vm, polyfills.first_of)} if first else None


def annotated(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a native or Python function that computes plain data or moves references."""
    require_fitting(function, args, kwargs)
    if runs_code(vm, function, args):
        return native_iterator(vm, function, args, kwargs)
    if function in _POLYFILLS:
        return vm.call_function(pinned_part(vm, _POLYFILLS[function]), args, kwargs)
    looking = function in natives.DATA
    if function in natives.OF_TENSORS and any(is_a(item, torch.Tensor) for item in args[:2]):
        return tensor_operator(vm, natives.OF_TENSORS[function], args, kwargs)
    if function in _POLYFILLS_WITH_KEY and (keyed := _keyed(vm, function, args, kwargs)) is not None:
        return vm.call_function(pinned_part(vm, _POLYFILLS_WITH_KEY[function]), args, keyed)
    if function is repr and len(args) == 1 and not kwargs:
        if says_its_arguments(vm, args[0], "__repr__"):
            return repr(args[0])
        if writes := _writer(vm, args[0], "__repr__"):
            return _written(vm, writes, args[0])
    if function is copy.deepcopy and vm.recording:
        meet_deep_copy(vm, *args, **kwargs)
    if function in _POLYFILLS_OF_OBJECTS and not all(map(is_plain, (*args, *kwargs.values()))):
        return vm.call_function(pinned_part(vm, _POLYFILLS_OF_OBJECTS[function]), args, kwargs)
    return replay(vm, function, args, kwargs, looking=looking)


def _differ_at_once(vm: Interpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether what is ordered is tuples of objects that all begin otherwise: no more is compared."""
    alone = len(args) == 1 and kwargs.keys() <= {"reverse"}
    if not alone or not (type(args[0]) in (list, tuple) or type(args[0]) in natives.VIEWS):
        return False
    items = [*args[0]]
    if is_plain(items) or not all(type(item) is tuple and item for item in items):
        return False
    begins = [vm.unlifted(item[0]) for item in items]
    return is_constant(tuple(begins)) and len({*begins}) == len(begins)


def _receiver(function: Any, args: tuple[Any, ...]) -> tuple[Any, str, tuple[Any, ...]]:
    """Return (receiver, method name, other arguments) of a native method; NULL if it has none."""
    name = getattr(function, "__name__", "")
    if is_a(function, types.MethodDescriptorType | types.WrapperDescriptorType):
        return (args[0], name, args[1:]) if args else (NULL, name, args)
    owner = getattr(function, "__self__", None)
    if owner is None or (is_a(owner, types.ModuleType) and type(function) is _BUILTIN):
        return NULL, name, args
    return owner, name, args


def _wraps(function: Any, home: type, name: str) -> bool:
    """Say whether `function` is the slot `name` of exactly `home`."""
    if is_a(function, types.WrapperDescriptorType):
        return function.__objclass__ is home and function is home.__dict__.get(name)
    if is_a(function, types.MethodWrapperType):
        return getattr(function, "__objclass__", None) is home
    return False
