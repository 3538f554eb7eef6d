"""Builtins that are neither interpreted nor replayed: the interpreter carries them out itself."""

from __future__ import annotations

import abc
import builtins
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch

from ladder.capture.heap.nodes import CaptureError, Dynamic
from ladder.capture.interpreter.exceptions import handled_error
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.opcodes import STOP
from ladder.capture.operations.attribute_stores import delete_attr, store_attr
from ladder.capture.operations.attributes import load_attr
from ladder.capture.operations.counts import counted_metadata, is_counted
from ladder.capture.operations.function_modes import watched
from ladder.capture.operations.managers import enter_inference
from ladder.capture.operations.objects import is_fixed, seen_through, shown
from ladder.capture.operations.replay import advance, is_hidden, iterate, known_iterator
from ladder.capture.operations.symbolic import is_open, open_metadata
from ladder.capture.operations.tensor_operators import known_text
from ladder.capture.operations.truth import decided, length_as, truth
from ladder.capture.python import natives, polyfills
from ladder.capture.python.frames import NULL
from ladder.capture.values.kinds import by_identity, is_a, is_constant
from ladder.capture.values.shapes import DynamicSize
from ladder.capture.values.tensors import is_plain_tensor

_HOOK = "__subclasshook__"
_HOOK_OWNERS = frozenset({"collections.abc", "abc", "contextlib", "os", "importlib.abc", "numbers"})


def _identity(vm: Interpreter, value: Any) -> int:
    """Return ``id(value)`` for looking it up: which objects are distinct is guarded, not the number."""
    if vm.heap.find(value) is None and is_constant(value):
        vm.heap.guard.keep.append(value)
        return id(value)
    vm.heap.node(value)
    vm.heap.distinct.add(type(value))
    return id(value)


def _address(vm: Interpreter, value: Any) -> int:
    """``id``, of what stays where it is: other objects are not at the same address in every run."""
    node = vm.heap.find(value)
    if not by_identity(value) and (node is None or not node.pinned):
        raise CaptureError(f"the id of a {type(value).__qualname__} that comes and goes")
    return id(value)


def _is_plain_object(vm: Interpreter, kind: type) -> bool:
    """Say whether `copy.deepcopy` copies instances by their dictionaries."""
    for name in (*polyfills.OF_OBJECTS, *polyfills.OF_PICKLING):
        vm.heap.class_attribute(kind, name)
    return polyfills.is_plain_object(kind)


def _frames_needed(vm: Interpreter, *args: Any, **kwargs: Any) -> Any:
    raise CaptureError("a builtin that looks at the frame of its caller")


def _globals(vm: Interpreter) -> dict[str, Any]:
    vm.heap.pin(vm.frames[-1].names)
    return vm.frames[-1].names


def _vars(vm: Interpreter, *args: Any) -> Any:
    if len(args) != 1 or is_a(args[0], type | types.ModuleType):
        raise CaptureError("vars()")
    try:
        return load_attr(vm, args[0], "__dict__")
    except AttributeError:
        raise CaptureError("vars() of what has no __dict__") from None


def _exc_info(vm: Interpreter) -> Any:
    error = handled_error(vm)
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


def _getattr(vm: Interpreter, value: Any, name: Any, *default: Any) -> Any:
    name = known_text(vm, vm.plain(name))
    if not default:
        return load_attr(vm, value, name)
    try:
        with vm.barrier():
            return load_attr(vm, value, name)
    except AttributeError:
        return default[0]


def _hasattr(vm: Interpreter, value: Any, name: Any) -> bool:
    try:
        with vm.barrier():
            load_attr(vm, value, known_text(vm, vm.plain(name)))
    except AttributeError:
        return False
    return True


def _setattr(vm: Interpreter, value: Any, name: Any, item: Any) -> None:
    with vm.barrier():
        store_attr(vm, value, vm.plain(name), item)


def _delattr(vm: Interpreter, value: Any, name: Any) -> None:
    with vm.barrier():
        delete_attr(vm, value, vm.plain(name))


def _isinstance(vm: Interpreter, value: Any, kinds: Any) -> Any:
    kinds = vm.plain(kinds)
    if type(kinds) is tuple:
        vm.heap.touch(kinds)
        return any(_isinstance(vm, value, kind) for kind in kinds)
    if type(value) is kinds:
        return True  # ``__instancecheck__`` is not asked
    if is_a(kinds, type):
        check = vm.heap.class_attribute(type(kinds), "__instancecheck__")
        if is_a(kinds, abc.ABCMeta):
            _meet_abstract(vm, type(value), kinds)
        elif is_a(check, types.FunctionType):
            with vm.barrier():
                return decided(vm, vm.call_function(check, (kinds, value), {}))
    elif not by_identity(kinds):
        raise CaptureError("isinstance of an unknown kind")
    value = value.value if type(value) is Dynamic else value
    return isinstance(torch.Size(()) if type(value) is DynamicSize else value, kinds)


def _issubclass(vm: Interpreter, value: Any, kinds: Any) -> Any:
    if not is_constant(kinds) or not is_constant(value):
        raise CaptureError("issubclass of unknown kinds")
    vm.heap.touch(kinds)
    for kind in kinds if type(kinds) is tuple else (kinds,):
        if is_a(kind, abc.ABCMeta):
            _meet_abstract(vm, value, kind)
        elif vm.heap.class_attribute(type(kind), "__subclasscheck__") is not type.__subclasscheck__:
            raise CaptureError("issubclass of a kind with its own metaclass")
    return issubclass(value, kinds)


def _meet_abstract(vm: Interpreter, kind: Any, abstract: Any) -> None:
    """Guard what classes are registered with abstract ones; protocols look at the object itself."""
    home = next(home for home in abstract.__mro__ if _HOOK in vars(home))
    own = home.__module__ not in _HOOK_OWNERS and home is not object
    if own or type(abstract).__module__ not in ("abc", "typing", "enum"):
        raise CaptureError("an abstract class that decides itself what its instances are")
    if abstract not in getattr(kind, "__mro__", ()):
        if getattr(abstract, "_is_protocol", False):
            raise CaptureError("a protocol")
        token = vm.heap.constant(abc.get_cache_token)
        vm.heap.guard.check(f"{token}() == {abc.get_cache_token()}", "no class was registered as abstract")


@watched
def _tensor_length(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (value,) = args
    if not is_plain_tensor(value):
        raise CaptureError("the length of a tensor subclass")
    if is_counted(vm, value):
        return counted_metadata(vm, value, "__len__", (), {})
    return open_metadata(vm, value, "__len__", (), {}) if is_open(vm, value) else len(value)


_VIEWS = frozenset(
    type(getattr(kind(), name)()) for kind in (dict, OrderedDict) for name in ("keys", "values", "items")
)
"""What shows the keys or values of a dictionary, and is as long."""


def _len(vm: Interpreter, value: Any) -> Any:
    if type(value) is DynamicSize:
        return len(value)
    value = seen_through(vm, vm.plain(value))
    kind = type(value)
    if kind in _VIEWS:
        return _len(vm, shown(value.mapping))
    if is_constant(value) and vm.heap.find(value) is None:
        return len(value)
    if is_a(value, torch.Tensor):
        return _tensor_length(vm, len, (value,), {})
    if is_a(value, list | tuple | dict | set | frozenset | deque):
        method = vm.heap.class_attribute(kind, "__len__")
        if not is_a(method, types.FunctionType):
            vm.heap.node(value) if not is_a(value, tuple | frozenset) else None
            vm.heap.items(value)
            return len(value)
    method = vm.heap.class_attribute(kind, "__len__")
    if is_a(method, types.FunctionType):
        with vm.barrier():
            return length_as(vm, vm.call_function(method, (value,), {}))
    if is_fixed(vm, value):
        return len(value)
    raise CaptureError(f"the length of {kind.__qualname__}")


def _iter(vm: Interpreter, value: Any, *sentinel: Any) -> Any:
    if sentinel:
        raise CaptureError("iter() with a sentinel")
    return iterate(vm, value)


def _next(vm: Interpreter, iterator: Any, *default: Any) -> Any:
    iterator = vm.plain(iterator)
    hidden = is_hidden(vm, iterator)
    if hidden and not default:
        with vm.barrier():
            return next(iterator)  # a generator's end has a value
    node = vm.heap.find(iterator)
    known = type(iterator) in natives.ITERATORS and node is not None
    if known and not hidden:
        known_iterator(vm, iterator)
    if not hidden and not known:
        method = vm.heap.class_attribute(type(iterator), "__next__")
        if is_a(method, types.FunctionType) and not default:
            return vm.call_function(method, (iterator,), {})
        raise CaptureError(f"{type(iterator).__qualname__} is advanced")
    item = advance(vm, iterator)
    if item is not STOP:
        return item
    if default:
        return default[0]
    raise StopIteration


def _callable(vm: Interpreter, value: Any) -> bool:
    value = vm.plain(value)
    vm.heap.class_attribute(type(value), "__call__")
    return callable(value)


def _super(vm: Interpreter, *args: Any) -> Any:
    if len(args) != 2:
        raise CaptureError("super() with one argument")
    made = super(*args)
    vm.heap.guard.keep.append(made)
    return made


def _bool(vm: Interpreter, *args: Any) -> Any:
    if not args:
        return False
    holds = truth(vm, args[0])
    if holds is NULL:
        raise CaptureError(f"the truth of {type(args[0]).__qualname__}")
    return holds


def _bound(vm: Interpreter, function: Any, value: Any) -> types.MethodType:
    return types.MethodType(vm.plain(function), vm.plain(value))


BUILTINS: dict[Any, Callable[..., Any]] = {
    builtins.getattr: _getattr,
    builtins.hasattr: _hasattr,
    builtins.setattr: _setattr,
    builtins.delattr: _delattr,
    builtins.isinstance: _isinstance,
    builtins.issubclass: _issubclass,
    builtins.len: _len,
    builtins.iter: _iter,
    builtins.next: _next,
    builtins.callable: _callable,
    builtins.super: _super,
    builtins.bool: _bool,
    builtins.globals: _globals,
    builtins.locals: _frames_needed,
    builtins.eval: _frames_needed,
    builtins.exec: _frames_needed,
    builtins.vars: _vars,
    builtins.dir: _frames_needed,
    builtins.id: _address,
    types.MethodType: _bound,
    sys.exc_info: _exc_info,
    polyfills.identity: _identity,
    polyfills.is_plain_object: _is_plain_object,
    torch._C._InferenceMode: enter_inference,
}
"""Builtin -> ``do(vm, *args, **kwargs)``."""
