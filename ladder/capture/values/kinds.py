"""What a Python object is to capture: a constant by identity, a constant by value, or a heap object."""

from __future__ import annotations

import enum
import operator
import re
import types
import typing
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard, TypeVar, overload

import numpy as np
import torch

from ladder.capture.python.frames import Absent

Kind = TypeVar("Kind")


@overload
def is_a(value: object, kinds: type[Kind]) -> TypeGuard[Kind]: ...
@overload
def is_a(value: object, kinds: Any) -> bool: ...
def is_a(value: object, kinds: Any) -> bool:
    """Say whether `value` is an instance by its type.

    `isinstance` would go on to ask the object for its ``__class__``, which may be code of the user's.
    """
    return issubclass(type(value), kinds)


def module_of(value: Any) -> str:
    """Return the name of the module that a class or function says it is of; empty where it says none."""
    found = value.__module__
    return found if type(found) is str else ""


TYPING: frozenset[type] = frozenset(
    type(form)
    for form in (
        *vars(typing).values(),
        *(typing.Sequence[int], typing.Callable[[int], int], typing.Literal[0], typing.Annotated[int, 0]),
        typing.Optional[int],  # noqa: UP045 (the type of this spelling)
    )
    if type(form).__module__ == "typing" and not isinstance(form, type)
)
"""Types of what `typing` has and makes by subscripts, such as ``Optional[int]``, which nothing changes."""

IDENTITY_TYPES: frozenset[type] = TYPING | frozenset(
    {
        *(type, types.ModuleType, types.MethodDescriptorType, types.WrapperDescriptorType),
        *(types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType),
        *(types.CodeType, type(None), bool, type(...), type(NotImplemented), property, staticmethod),
        *(classmethod, torch.dtype, torch.layout, torch.memory_format, np.ufunc, type(np.prod), Absent),
        *(
            torch._ops.TorchBindOpOverload,
            torch._ops.OpOverload,
            torch._ops.OpOverloadPacket,
            torch.jit.ScriptFunction,
            torch.Generator,
        ),
        *(type(type.__dict__["mro"]), types.GenericAlias, types.UnionType, type(torch.__version__)),
    }
)
"""Objects of these types are what they are: the guard is ``is``."""

VALUE_TYPES: frozenset[type] = frozenset(
    {int, float, complex, str, bytes, range, re.Pattern}
    | {torch.device, torch.Size, torch.finfo, torch.iinfo, torch._C._SDPBackend}
)
"""Immutable and compared by value: the guard is the exact type and ``==``."""

_IDENTITY_BASES = (type, enum.Enum)
_VALUE_BASES = (np.generic, np.dtype)
HEAP_TYPES: frozenset[type] = frozenset(
    {dict, list, set, OrderedDict, defaultdict, deque, types.FunctionType, types.MethodType, types.CellType}
    | {torch.Tensor, torch.nn.Parameter, object, BaseException, types.GeneratorType}
)
"""Types whose instances are no constants, told at once: most values that are asked about have one."""

PLAIN_DICTS = (dict, OrderedDict, Counter, defaultdict)
_MODULE_FUNCTION = types.BuiltinFunctionType


def by_identity(value: Any) -> bool:
    """Say whether `value` is a constant whose guard is ``is``."""
    kind = type(value)
    if kind in HEAP_TYPES:
        return False
    if kind in IDENTITY_TYPES or issubclass(kind, _IDENTITY_BASES):
        return True
    if kind is _MODULE_FUNCTION:
        return value.__self__ is None or is_a(value.__self__, types.ModuleType | type)
    return False


def by_value(value: Any) -> bool:
    """Say whether `value` is an immutable scalar whose guard is its type and ``==``.

    Reading a native attribute, as ``torch.Tensor.shape.__get__`` names it, is one.
    """
    if type(value) is types.MethodWrapperType:
        return type(value.__self__) is types.GetSetDescriptorType
    kind = type(value)
    return kind in VALUE_TYPES or (kind not in HEAP_TYPES and issubclass(kind, _VALUE_BASES))


def is_constant(value: Any) -> bool:
    """Say whether `value` is an immutable value with nothing of the heap inside."""
    kind = type(value)
    if kind in HEAP_TYPES:
        return False
    if kind in VALUE_TYPES or by_identity(value) or by_value(value):
        return True
    if kind in (tuple, frozenset):
        return all(is_constant(item) for item in value)
    if type(value) is slice:
        return all(map(is_constant, parts(value)))
    return False


def is_key(value: Any) -> bool:
    """Say whether `value` is a constant or a function of a module: hashed and compared natively, it lasts."""
    if type(value) is types.FunctionType:
        return "<locals>" not in value.__qualname__
    return is_constant(value)


def name_of_kind(value: Any) -> str:
    """Return the name of the type of `value` as messages of the interpreter give it.

    That of a type which is no class of Python begins with its module: errors of natives tell.
    """
    kind = type(value)
    if any("__index__" in vars(owner) for owner in kind.__mro__):
        return kind.__name__
    try:
        operator.index(value)
    except TypeError as error:
        return str(error).split("'")[1]
    return kind.__name__


def parts(value: slice) -> tuple[Any, Any, Any]:
    """Return start, stop and step of a slice."""
    return value.start, value.stop, value.step


def mapped(value: slice, change: Callable[[Any], Any]) -> slice:
    """Return a slice with each of its parts changed."""
    return slice(*map(change, parts(value)))


def is_plain(value: Any, depth: int = 8) -> bool:
    """Say whether `value` is data all the way down: containers of constants."""
    if is_constant(value):
        return True
    if depth == 0:
        return False
    if type(value) in PLAIN_DICTS:
        return all(is_constant(key) and is_plain(item, depth - 1) for key, item in value.items())
    if type(value) in (list, tuple, set, frozenset, deque):
        return all(is_plain(item, depth - 1) for item in value)
    return False


def descriptor_of(function: Any) -> Any:
    """Return the descriptor of a class that, bound to its object, is the native method `function`.

    None if there is none: ``getattr(object, name)`` need not be it, as in calls through ``super()``.
    """
    if is_a(function, types.MethodDescriptorType | types.WrapperDescriptorType):
        return function
    owner, name = function.__self__, function.__name__
    for home in type(owner).__mro__:
        found: Any = home.__dict__.get(name)
        native = is_a(found, types.MethodDescriptorType | types.WrapperDescriptorType)
        if native and found.__get__(owner, type(owner)) == function:
            return found
    return None


def made_by_native(value: BaseException) -> dict[str, Any] | None:
    """Return the fields besides its arguments that make an exception again; None if more is in it."""
    kind = type(value)
    more = (OSError, ImportError, SyntaxError, BaseExceptionGroup)
    if kind.__module__ != "builtins" or issubclass(kind, more) or vars(value):
        return None
    if value.__cause__ is not None or value.__context__ is not None:
        return None
    fields = {NameError: ("name",), AttributeError: ("name", "obj")}
    names = next((fields[home] for home in kind.__mro__ if home in fields), ())
    return {name: getattr(value, name) for name in names}


def same_value(name: str, value: Any, constant: str) -> str:
    """Return the Python condition that the variable `name` holds exactly the scalar `value`."""
    if is_a(value, float) and value != value:
        return f"{name} != {name}"
    if is_a(value, float | complex | np.generic) and not value:
        return f"repr({name}) == {repr(value)!r}"  # 0.0 and -0.0
    return f"{name} == {constant}"


def has_same_value(found: Any, value: Any) -> bool:
    """Say what the condition of `same_value` says, of two scalars of one type."""
    if is_a(value, float) and value != value:
        return bool(found != found)
    if is_a(value, float | complex | np.generic) and not value:
        return repr(found) == repr(value)
    return bool(found == value)


def kind_of(key: Any) -> Any:
    """Return what distinguishes equal keys: type, the sign of zero, the kinds of elements."""
    if type(key) is tuple:
        return tuple(map(kind_of, key))
    if type(key) is frozenset:
        return frozenset((each, kind_of(each)) for each in key)
    return repr(key) if type(key) in (float, complex) and not key else type(key)


def kind_among(keys: Iterable[Any]) -> Callable[[Any], Any]:
    """Return what tells keys from equal ones: ``type``, where equal ones of one type are the same."""
    return kind_of if any(type(key) in (float, complex, tuple, frozenset) for key in keys) else type


def has_same_numbers(found: Any, value: Any) -> bool:
    """Say whether `found` is the number `value`, or holds the same as its lists of numbers."""
    if type(found) is not type(value):
        return False
    if type(value) is not list:
        return has_same_value(found, value)
    return len(found) == len(value) and all(map(has_same_numbers, found, value))
