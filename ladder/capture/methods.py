"""Attributes of a function under capture: those of the function, and of a module its methods too.

While a method of a module runs, as ``generate`` does, calls of the module go to records: the method itself
runs as it is, with a captured ``forward`` in place of the module's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch

_FORWARD = "forward"
_NAMES = frozenset({"__name__", "__qualname__"})
"""What torch.jit.trace and functools.wraps read of functions."""


class Capturing(Protocol):
    """A function under capture, and (`within`) what captures calls of a module by its own methods."""

    function: Callable[..., Any]
    within: Any

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
    return _method(captured, found) if isinstance(found, MethodType) and found.__self__ is function else found


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
        with _captured_forward(captured, method.__self__):
            found = method(*args, **kwargs)
        return captured if found is method.__self__ else found

    return call


@contextmanager
def _captured_forward(captured: Capturing, module: torch.nn.Module) -> Iterator[None]:
    """Let calls of a module be captured."""
    own = module.__dict__
    if own.get(_FORWARD) is captured.within and captured.within is not None:
        yield
        return
    before = [own[_FORWARD]] if _FORWARD in own else []
    if captured.within is None:
        captured.within = captured.beside(module.forward)
    own[_FORWARD] = captured.within
    try:
        yield
    finally:
        own.pop(_FORWARD, None)
        own.update((_FORWARD, each) for each in before)
