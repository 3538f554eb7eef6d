"""Special methods of modules under capture: of containers, such as ``nn.Sequential``, and context managers.

Python looks them up in classes, so what stands for a module with such methods has a class with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

METHODS = (
    *("__len__", "__bool__", "__iter__", "__reversed__", "__contains__"),
    *("__getitem__", "__setitem__", "__delitem__"),
    *("__enter__", "__exit__"),
)
"""What a class may define that Python calls for syntax and builtins."""

Kind = TypeVar("Kind", bound=type)


def with_methods_of(kind: Kind, module: type) -> Kind:
    """Return a class like one of what is captured, with the special methods of a module's class."""
    names = tuple(name for name in METHODS if getattr(module, name, None) is not getattr(kind, name, None))
    return _derived(kind, names) if names else kind


def plain(kind: type) -> type:
    """Return the class that one was made from; copies and pickles name it."""
    return kind.__mro__[1] if "__ladder_methods__" in vars(kind) else kind


@functools.cache
def _derived(kind: Any, names: tuple[str, ...]) -> Any:
    methods = {name: _passed_on(name) for name in names}
    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**about, **methods, "__ladder_methods__": names})


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: Any, *arguments: Any) -> Any:
        return getattr(type(self.function), name)(self.function, *arguments)

    call.__name__ = name
    return call
