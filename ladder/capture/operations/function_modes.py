"""Modes that the program pushes (`torch.overrides.TorchFunctionMode`): each sees the operators under it.

While a segment is recorded they are kept in ``vm.modes`` and not pushed, since operators that the interpreter
runs are none of theirs. What torch would tell the last of them of a call is found by making that call under
a mode that only notes it; the method of the program's mode is then interpreted, without that mode.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from ladder.capture.heap.nodes import CaptureError
from ladder.capture.interpreter.interpreter import Call, Interpreter
from ladder.capture.operations.objects import new_container, pinned_part
from ladder.capture.python.frames import NULL
from ladder.capture.values.kinds import is_a
from ladder.capture.values.tensors import PYTHON_OPERATORS
from ladder.interrupts import pass_on

_FUNCTORCH = torch._C._functorch.__name__
"""Its functions are told to no mode."""


class _Call(NamedTuple):
    """Arguments of a mode's ``__torch_function__``; `kwargs` may be left out."""

    function: Any
    types: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None


class _Noted(BaseException):
    """Raised instead of a call, which is not made. `call` is None where no mode sees it."""

    def __init__(self, call: _Call | None) -> None:
        super().__init__()
        self.call = call


class _Noting(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        raise _Noted(_Call(function, types, args, kwargs))


class _Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, *given: Any, **named: Any) -> NoReturn:
        raise _Noted(None)


def _told(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call | None:
    """Return the arguments that a mode gets for a call, which is not made; None if no mode sees it."""
    try:
        with _Refusing(), _Noting():  # type: ignore[no-untyped-call]
            function(*args, **kwargs)
    except _Noted as noted:
        return noted.call
    except Exception as error:
        pass_on(error)
        return None  # it raises this once more when it is made
    return None


def watched(call: Call) -> Call:
    """Let modes see what `call` does with a function: one that sees it says what comes of it."""

    @functools.wraps(call)
    def shown(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if vm.recording and vm.modes and (found := by_mode(vm, function, args, kwargs)) is not NULL:
            return found
        return call(vm, function, args, kwargs)

    return shown


def by_mode(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a call by the innermost mode; `NULL` if that is not called for it."""
    if getattr(function, "__module__", "") == _FUNCTORCH:
        return NULL
    if is_a(function, types.FunctionType) and function not in PYTHON_OPERATORS:
        raise CaptureError("a mode sees what is inside of an operator of the program's")
    plain, named = tuple(map(vm.unlifted, args)), {key: vm.unlifted(item) for key, item in kwargs.items()}
    call = _told(function, plain, named)
    if call is None:
        return NULL
    args, kwargs = _as_given(vm, call, (plain, args), (named, kwargs))
    mode = vm.modes.pop()
    try:
        with vm.barrier():
            result = _asked(vm, mode, call, args, kwargs)
    finally:
        vm.modes.append(mode)
        if not vm.recording:
            vm.push_modes()
    if result is NotImplemented:
        vm.stop("a mode leaves an operator to others", vm.here())
        return vm.natively(function, *args, **kwargs)
    return result


def _asked(vm: Interpreter, mode: Any, call: _Call, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call the method of a mode; that of a default device says only where tensors are made."""
    function = pinned_part(vm, call.function)
    if type(mode) is DeviceContext:
        placed = function in _device_constructors() and kwargs.get("device") is None
        return vm.call(function, args, {**kwargs, "device": mode.device} if placed else kwargs)
    method = vm.call(getattr, (mode, "__torch_function__"), {})
    told = function, tuple(call.types), args
    return vm.call(method, told if call.kwargs is None else (*told, new_container(vm, kwargs)), {})


def _as_given(
    vm: Interpreter, call: _Call, args: tuple[Any, Any], kwargs: tuple[Any, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a mode's arguments, with open numbers where they are those that the program passed."""
    (plain, given), (named, keywords) = args, kwargs
    told = call.kwargs or {}
    pairs = zip((*call.args, *told.values()), (*plain, *map(named.get, told)), strict=False)
    alike = len(call.args) == len(plain) and told.keys() == named.keys()
    if alike and all(one is other for one, other in pairs):
        return given, keywords
    for item in (*given, *keywords.values()):
        vm.plain(item)  # what is open is settled
    return call.args, dict(call.kwargs or {})


def enter_device(vm: Interpreter, device: torch.device) -> torch.device:
    """Do ``torch.device.__enter__``: tensors are made there from now on."""
    vm.call(torch._C._push_on_torch_function_stack, (vm.call(DeviceContext, (device,), {}),), {})
    return device


def leave_device(vm: Interpreter, device: torch.device, *error: Any) -> None:
    """Do ``torch.device.__exit__``, which leaves the last mode."""
    vm.call(torch._C._pop_torch_function_stack, (), {})


def push_mode(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Enter a mode."""
    (mode,) = args
    if not isinstance(mode, TorchFunctionMode):
        raise CaptureError("what is pushed is no mode of torch's own kind")
    vm.heap.node(mode)
    vm.modes.append(mode)


def pop_mode(vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave the last mode of this segment, and return it."""
    if not vm.modes:
        raise CaptureError("a mode from before is left")
    return vm.modes.pop()


def told_of_modes(vm: Interpreter, function: Any) -> Any:
    """Answer a question about the modes in force: those from before the segment, then its own."""
    before = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return ABOUT_MODES[function]([*before, *vm.modes])


ABOUT_MODES: dict[Any, Callable[[list[Any]], Any]] = {
    torch._C._len_torch_function_stack: len,
    torch._C._is_torch_function_mode_enabled: bool,
    torch.overrides._get_current_function_mode_stack: list,
}
"""Function that asks about modes -> what answers it of all modes, the innermost last."""
