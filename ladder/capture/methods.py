"""Attributes of a function under capture: those of the function, and of a module its methods too.

While a method of a module runs, as ``generate`` does, calls of the module go to records: the method itself
runs as it is, with a captured ``forward`` in place of the module's own. So do calls of modules to which it
may pass its own call on, as PEFT's models do: those inside of it that have another method of that name.

Where a module cannot be captured as a whole and runs as it is, so do calls of the modules inside of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any, Protocol

import torch

_FORWARD = "forward"
_NAMES = frozenset({"__name__", "__qualname__"})
"""What torch.jit.trace and functools.wraps read of functions."""


class Capturing(Protocol):
    """A function under capture, and (`inside`) what captures calls of modules by methods of the function."""

    function: Callable[..., Any]
    inside: Any

    def beside(self, function: Callable[..., Any]) -> Any:
        """Return another function under capture."""


def attribute_of(captured: Capturing, name: str) -> Any:
    """Return an attribute of the function that `captured` itself does not have.

    Raises AttributeError if there is none, or the function is no module.
    """
    function = captured.__dict__.get("function")
    if name == "__signature__" and function is not None:
        return signature_of(function)
    if name in _NAMES and isinstance(function, FunctionType | MethodType):
        return getattr(function, name)
    if not isinstance(function, torch.nn.Module) or name.startswith("__"):
        raise AttributeError(f"{type(captured).__qualname__!r} object has no attribute {name!r}", name=name)
    found = getattr(function, name)
    if not isinstance(found, MethodType) or found.__self__ is not function:
        return found
    if found.__func__ is getattr(
        torch.nn.Module, name, None
    ):  # attributes are all it needs; it may return itself
        return MethodType(found.__func__, captured)
    return _method(captured, found)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function; of a module that of its ``forward``.

    Raises AttributeError if it has none, as some natives.
    """
    try:
        return inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except (TypeError, ValueError) as error:
        raise AttributeError(str(error)) from error


def _method(captured: Capturing, method: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with calls_captured(captured, [method.__self__, *_passed_to(method.__self__, method.__func__)]):
            found = method(*args, **kwargs)
        return captured if found is method.__self__ else found

    return call


_PASSED_ON = "generate"
"""A method to which other methods pass calls on, under whatever name."""


def _passed_to(module: torch.nn.Module, method: Any) -> list[torch.nn.Module]:
    """Return the outermost modules inside of one that have another method of that name, or `_PASSED_ON`."""
    name = getattr(method, "__name__", "")
    own = {label: getattr(type(module), label, None) for label in (name, _PASSED_ON)}
    found = dict[torch.nn.Module, None]()
    waiting = [] if hasattr(torch.nn.Module, name) else [*module.children()]
    while waiting:
        child = waiting.pop()
        if all(getattr(type(child), label, None) in (None, known) for label, known in own.items()):
            waiting += child.children()
        else:
            found[child] = None
    return [*found]


def parts_of(function: Callable[..., Any]) -> list[torch.nn.Module]:
    """Return the modules that a function may call which have programs of their own, not layers of torch.

    They are those inside of a module, of the object whose method it is, and of what it names outside.
    """
    whole: Any = getattr(function, "__self__", function)
    if _is_module(whole):
        inside = [*whole.modules()][1:]
    else:
        inside = [
            each for value in _named_by(function, whole) if _is_module(value) for each in value.modules()
        ]
    return [module for module in dict.fromkeys(inside) if _has_program(module)]


def _is_module(value: Any) -> bool:
    return issubclass(type(value), torch.nn.Module)  # `isinstance` may ask the object itself


def _named_by(function: Callable[..., Any], whole: Any) -> list[Any]:
    """Return what a function finds in attributes of its object, in cells and in globals."""
    if whole is not function:
        return [*getattr(whole, "__dict__", {}).values()]
    plain = inspect.unwrap(function)
    if not isinstance(plain, FunctionType):
        return []
    cells = [cell.cell_contents for cell in plain.__closure__ or () if cell != _EMPTY]
    return [*cells, *(plain.__globals__.get(name) for name in plain.__code__.co_names)]


_EMPTY = CellType()
"""Equal to each cell of a variable that is not set."""


def _has_program(module: torch.nn.Module) -> bool:
    kind = type(module)
    forward = getattr(kind, _FORWARD, None)
    if (
        not isinstance(forward, FunctionType)
        or forward is torch.nn.Module.forward
        or _FORWARD in vars(module)
    ):
        return False
    return any(True for _ in module.children()) or not str(kind.__module__).startswith("torch.nn.")


@contextmanager
def calls_captured(captured: Capturing, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Let calls of modules be captured."""
    with ExitStack() as replaced:
        for module in modules:
            replaced.enter_context(_captured_forward(captured, module))
        yield


@contextmanager
def _captured_forward(captured: Capturing, module: torch.nn.Module) -> Iterator[None]:
    own, known = module.__dict__, captured.inside.get(module)
    if known is not None and own.get(_FORWARD) is known:
        yield
        return
    before = [own[_FORWARD]] if _FORWARD in own else []
    if known is None:
        known = captured.inside[module] = captured.beside(module.forward)
    own[_FORWARD] = known
    try:
        yield
    finally:
        if own.get(_FORWARD) is known:  # the program has set no other
            own.pop(_FORWARD)
            own.update((_FORWARD, each) for each in before)
