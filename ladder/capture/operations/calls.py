"""Calls: Python functions are interpreted, annotated natives replayed, all others break the graph."""

from __future__ import annotations

import functools
import inspect
import operator
import re
import sys
import types
import weakref
from typing import Any

import numpy as np
import torch

from ladder.capture.heap.nodes import CaptureError, Dynamic, Itself
from ladder.capture.interpreter.evaluate import is_known, run
from ladder.capture.interpreter.interpreter import Call, Interpreter
from ladder.capture.interpreter.recording import recorded
from ladder.capture.operations.attributes import CACHED, load_attr
from ladder.capture.operations.builtin_functions import BUILTINS
from ladder.capture.operations.function_modes import ABOUT_MODES, told_of_modes
from ladder.capture.operations.functions import generator_of, new_frame
from ladder.capture.operations.modeled import call_cached, may_have_died, modeled
from ladder.capture.operations.native_calls import annotated, instantiate, native
from ladder.capture.operations.objects import (
    identify,
    met_part,
    new_container,
    pinned_part,
    require_fitting,
    touch_part,
)
from ladder.capture.operations.operators import subscript
from ladder.capture.operations.replay import replay
from ladder.capture.operations.tensor_operators import tensor_operator
from ladder.capture.python import natives
from ladder.capture.python.prescan import frame_names, unfollowed
from ladder.capture.records import Store
from ladder.capture.values import settings, tensors
from ladder.capture.values.kinds import by_identity, is_a, is_constant, is_plain
from ladder.runtime.operator import is_captured

MAX_DEPTH = 60
_ASYNC = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
_BUILTIN = types.BuiltinFunctionType
_NATIVE_TYPES = (
    *(_BUILTIN, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
    *(types.ClassMethodDescriptorType, type(torch.jit.script), torch._ops.OpOverload),
    type(re.compile("").sub),
)
_SINGLE: Any = functools.singledispatch(lambda value: value)
_COMPILING = frozenset({is_captured, torch.compiler.is_compiling})
"""Functions by which a program asks whether a compiler traces it: models then leave out checks of values."""
_UNTOLD = ("torch.nn.modules.transformer", "torch.optim.")
"""Modules that are told no, by what their names begin with.

Torch's encoder gives zeros in padded rows unless a compiler traces it; its optimizers round otherwise then.
"""


def call(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function`: interpret, replay or break the graph."""
    function = vm.plain(function)
    given = (function, args, kwargs)
    return recorded(vm, _called, given, given)


def _called(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kind = type(function)
    composed = COMPOSED.get(kind)
    if composed is not None:
        return composed(vm, function, args, kwargs)
    if by_identity(function):
        builtin = BUILTINS.get(function)
        if builtin is not None:
            require_fitting(function, args, kwargs)
            return builtin(vm, *map(vm.seen, args), **kwargs)
        if function in natives.DATA and not is_a(function, type) and kind not in _NATIVE_TYPES:
            return replay(vm, function, args, kwargs, looking=True)
    if is_a(function, type):
        return instantiate(vm, function, args, kwargs)
    if kind is np.ufunc or (kind is type(np.prod) and function in natives.OF_ARRAYS):
        return replay(vm, function, args, kwargs, looking=True)
    if kind in _NATIVE_TYPES or kind is torch._ops.OpOverloadPacket:
        return _identified(vm, function, args, kwargs)
    if is_a(function, Store):
        return _compiled_by_us(vm, function, args, kwargs)
    found = vm.heap.class_attribute(kind, "__call__")
    if is_a(found, types.FunctionType):
        return vm.call_function(found, (function, *args), kwargs)
    raise CaptureError(f"a call of {kind.__module__}.{kind.__qualname__}")


def _call_method(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    owner = met_part(vm, function, "__self__")
    return vm.call(met_part(vm, function, "__func__"), (owner, *args), kwargs)


def _identified(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a native; one from outside that is bound to an object is known by name and object."""
    node = vm.heap.find(function)
    if node is not None and node.external and not node.stable:
        vm.heap.guard.check(f"{node.var}.__name__ == {function.__name__!r}", f"name of {node.var}")
        met_part(vm, function, "__self__")
    if type(function) is _BUILTIN:
        if function in tensors.STATE_READS:
            return _state_read(vm, function, args, kwargs)
        if function in settings.READS and vm.recording:
            return _switch_setting(vm, function, args, kwargs)
        if function in tensors.NO_EFFECT:
            return None
        if function in tensors.OVERRIDE_CHECKS:
            return _has_override(vm, function, args)
    return native(vm, function, args, kwargs)


def _state_read(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the answer of a function that reads the state of torch, guarded."""
    if vm.modes and function in ABOUT_MODES:
        return _told(vm, told_of_modes(vm, function))
    given = tuple(map(vm.plain, args))
    found = function(*given, **kwargs)
    if "autocast" in function.__name__:
        vm.heap.guard.meet_autocast()
    if (settings.PARTS.get(function, function), given) in vm.trace.settings:
        return _told(vm, found)
    if function not in tensors.STATE_GUARDED:
        known = is_constant(given) and (is_constant(found) or is_plain(found))
        written = vm.trace.state_written and function not in settings.WRITES
        if written or kwargs or not known:
            raise CaptureError(f"{function.__name__} is read")
        constant = vm.heap.constant
        text = f"{constant(function)}(*{constant(given)}) == {constant(found)}"
        vm.heap.guard.check(text, f"{function.__name__} gives {found}")
    return _told(vm, found)


def _told(vm: Interpreter, found: Any) -> Any:
    """Return an answer as the program gets it: a list is one of its own."""
    return new_container(vm, [*found]) if type(found) is list else found


def _switch_setting(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write a setting of torch: a node of the graph. What it was before is guarded."""
    args, kwargs = vm.plain_given(args, kwargs)
    setting = settings.READS[function], args[:-1]
    if kwargs or not args:
        raise CaptureError(f"{function.__name__} by name")
    if setting not in vm.trace.settings:
        _state_read(vm, *setting, {})
        vm.trace.settings[setting] = settings.is_now(setting)
    return tensor_operator(vm, function, args, {})


def _switch_determinism(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``use_deterministic_algorithms``, which writes two settings at once."""
    given = inspect.signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    state = given.arguments["mode"], given.arguments["warn_only"]
    return _switch_setting(vm, settings.set_deterministic_algorithms, (state,), {})


def _call_partial(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inner, before = met_part(vm, function, "func"), met_part(vm, function, "args")
    named = met_part(vm, function, "keywords")
    vm.heap.touch(before, 1)
    touch_part(vm, function, named)
    return vm.call(inner, (*before, *args), {**named, **kwargs})


def _call_alias(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``list[int]`` and the like: the class, whose instances cannot keep what they were called by."""
    kind = function.__origin__
    if kind.__dictoffset__ or "__slots__" in vars(kind):
        raise CaptureError(f"a call of {function}, which its instance keeps")
    return vm.call(kind, args, kwargs)


def _call_getter(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 1 or kwargs:
        raise CaptureError("arguments that do not fit")
    node = vm.heap.node(function)
    keys = function.__reduce__()[1]
    if node.external:
        constant = vm.heap.constant(keys)
        vm.heap.guard.check(f"{node.var}.__reduce__()[1] == {constant}", f"{node.var} gets {keys}")
    if type(function) is operator.attrgetter and any("." in key for key in keys):
        raise CaptureError("a getter of nested attributes")
    get: Any = load_attr if type(function) is operator.attrgetter else subscript
    with vm.barrier():
        found = tuple(get(vm, args[0], key) for key in keys)
    return found[0] if len(keys) == 1 else found


def _call_reference(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    node, target = vm.heap.node(function), function()
    held = id(target) in vm.heap.arguments or _is_local(vm, target)
    if target is not None and not held and may_have_died(vm):
        raise vm.leave("a weak reference to what may have died meanwhile")
    if node.first(Itself.TARGET):
        # Never pinned: a record must not keep alive what is only weakly referred to.
        vm.heap.meet(target, f"{node.var}()", f"{node.var}()", stable=False)
    return target


def _is_local(vm: Interpreter, value: Any) -> bool:
    """Say whether a variable of an interpreted frame is bound to an object, which so lives."""
    return any(item is value for frame in vm.frames for item in frame.slots.values())


def _has_override(vm: Interpreter, function: Any, args: tuple[Any, ...]) -> bool:
    """``has_torch_function`` and its forms: tensors of torch's own classes have none."""
    if vm.modes:
        raise CaptureError("a mode sees a function of several operators")
    flat = args[0] if len(args) == 1 and is_a(args[0], tuple | list) else args
    for item in flat:
        if is_a(item, torch.Tensor):
            vm.heap.node(item)
            if not tensors.is_plain_tensor(item):
                raise CaptureError("a tensor subclass")
        elif type(item) is not Dynamic and not is_constant(item):
            raise CaptureError("an object that might override operators")
    return bool(function(*args))


# Python functions -------------------------------------------------------------------------
def call_function(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a Python function: as one operator, replayed, or interpreted."""
    if not vm.recording:
        return vm.natively(function, *args, **kwargs)
    how = _annotation(function, kwargs)
    if how is not None:
        identify(vm, function)
        return how(vm, function, args, kwargs)
    code = function.__code__
    if code.co_flags & _ASYNC or len(vm.frames) >= MAX_DEPTH or not is_known(code):
        raise CaptureError(f"{function.__qualname__} is not interpreted")
    if frame_names(code):
        raise CaptureError(f"{function.__qualname__} looks at frames")
    if vm.store.left_out and unfollowed(code, args[0] if args else None) in vm.store.left_out:
        raise CaptureError(f"{function.__qualname__}, in which the graph broke again and again")
    frame = new_frame(vm, function, args, kwargs)
    if code.co_flags & inspect.CO_GENERATOR:
        return generator_of(vm, frame)
    return run(vm, frame)


def _annotation(function: Any, kwargs: dict[str, Any]) -> Call | None:
    """Return how to call a Python function that is in one of the tables, else None."""
    for table, how in ANNOTATIONS:
        if function in table:
            return how
    known = modeled(function)
    if known is not None:
        return known
    if function in natives.DATA and kwargs.get("key") is None:
        return annotated
    if function in natives.LEAVES:
        return _leaf
    if function.__dict__.get("_torchdynamo_disable") and _is_disabling(function.__code__):
        return _disabled_by_torch
    if "_torchdynamo_inline" in function.__dict__:
        return _compiled_by_torch
    return _DISPATCHING.get(function.__code__)


def _compiling(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if str(vm.frames[-1].names.get("__name__")).startswith(_UNTOLD):
        return False
    vm.told_compiling = vm.store.tells_compiling
    return vm.told_compiling


def _leaf(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise CaptureError(f"{function.__qualname__} runs natively")


def _is_disabling(code: types.CodeType) -> bool:
    """Say whether code is that of the functions that ``torch.compiler.disable`` gives."""
    home = sys.modules.get("torch._dynamo.eval_frame")
    return home is not None and code.co_name == "_fn" and code.co_filename == home.__file__


def _disabled_by_torch(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what ``torch.compiler.disable`` was given, which says nothing of this compiler."""
    return vm.call(pinned_part(vm, function._torchdynamo_orig_callable), args, kwargs)


def _compiled_by_torch(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what `torch.compile` or `torch.jit.script` was given, as the former does inside another graph."""
    return vm.call(pinned_part(vm, function._torchdynamo_inline), args, kwargs)


def _call_scripted(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a scripted function as its Python if that does the same; others run as they are."""
    how = _compiled_by_torch if reads_no_values(function) else _identified
    return how(vm, function, args, kwargs)


def reads_no_values(function: Any) -> bool:
    """Tell whether a function was scripted, not traced, and branches by nothing but sizes and numbers."""
    written = getattr(function, "__qualname__", "") == "torch.jit.ScriptFunction"
    return written and not any(function.graph.findAllNodes(kind) for kind in _VALUES)


_VALUES = tuple(
    f"aten::{name}"
    for name in (
        *("Bool", "Int", "Float", "Complex", "item", "tolist", "equal", "allclose", "is_nonzero"),
        *("IntImplicit", "FloatImplicit", "ComplexImplicit", "ScalarImplicit"),
    )
)
"""What makes Python's values of those of tensors, in the graph of a scripted function."""


def _compiled_by_us(vm: Interpreter, function: Store, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what is captured by itself as part of this graph, unless it is compiled with other options."""
    given, ours = function.__reduce__(), vm.store.__reduce__()
    if (given[0], given[1][1:]) != (ours[0], ours[1][1:]):
        raise CaptureError("a function compiled with other options")
    return vm.call(load_attr(vm, function, "function"), args, kwargs)


def _dispatched(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a `functools.singledispatch` function."""
    kind = type(vm.plain(args[0]))
    return vm.call(_chosen(vm, function, "dispatch", kind), args, kwargs)


def _dispatch(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``dispatch`` of such a function, as methods that choose by the class of an argument do."""
    (kind,) = map(vm.plain, args)
    if kwargs or not is_a(kind, type):
        raise CaptureError("dispatch by what is no class")
    return _chosen(vm, function, "__call__", kind)


def _chosen(vm: Interpreter, function: Any, method: str, kind: type) -> Any:
    """Return what is registered for a class; the guard looks it up again."""
    node, chosen, constant = vm.heap.node(function), getattr(function, method)(kind), vm.heap.constant
    if not node.external:
        raise CaptureError("what is registered in this call")
    text = f"{node.var}.{method}({constant(kind)}) is {constant(chosen)}"
    vm.heap.guard.check(text, f"{node.var} dispatches {kind.__qualname__}")
    return pinned_part(vm, chosen)


_DISPATCHING: dict[Any, Call] = {_SINGLE.__code__: _dispatched, _SINGLE.dispatch.__code__: _dispatch}
"""Code of the functions that `functools.singledispatch` makes -> how they are called."""


def _python_operator(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = function.__name__
    if name == "__len__":
        return BUILTINS[len](vm, *args)
    if name in tensors.METADATA:
        return native(vm, function, args, kwargs)
    return tensor_operator(vm, function, args, kwargs)


COMPOSED: dict[type, Call] = {
    types.FunctionType: call_function,
    types.MethodType: _call_method,
    functools.partial: _call_partial,
    types.GenericAlias: _call_alias,
    operator.itemgetter: _call_getter,
    operator.attrgetter: _call_getter,
    weakref.ReferenceType: _call_reference,
    CACHED: call_cached,
    torch.jit.ScriptFunction: _call_scripted,
}
"""How to call what is made of other callables, by type."""
ANNOTATIONS: tuple[tuple[Any, Call], ...] = (
    (BUILTINS, lambda vm, function, args, kwargs: BUILTINS[function](vm, *map(vm.seen, args), **kwargs)),
    (tensors.PYTHON_OPERATORS, _python_operator),
    (tensors.STATE_READS, _state_read),
    (_COMPILING, _compiling),
    ({torch.use_deterministic_algorithms}, _switch_determinism),
)
"""Python functions that are not interpreted, and how they are called."""
