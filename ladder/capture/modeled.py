"""Native methods whose effect on the heap is written down: which cell of state they read or write.

A row maps (type of the receiver, method name) to ``method(machine, owner, *args, **kwargs)``. The state of an
object that has no Python attributes is a key of its `Node`, so that reads become guards and writes steps.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ladder.capture.frames import NULL
from ladder.capture.segment import CaptureError

if TYPE_CHECKING:
    from ladder.capture.core import Core

_UNSET = object()
_VALUE = "value"


def _current(machine: Core, variable: contextvars.ContextVar[Any]) -> Any:
    """Return the value of `variable` in this context, guarded; `NULL` if it has none and no default."""
    segment, value = machine.segment, variable.get(_UNSET)
    node = segment.node(variable)
    path = f"{variable.name}.get()"
    if value is _UNSET:
        text = f"{node.var}.get({segment.constant(_UNSET)}) is {segment.constant(_UNSET)}"
        segment.absent(node, _VALUE, text, path)
        return NULL
    return segment.load(node, _VALUE, value, f"{node.var}.get()", path)


def get_variable(machine: Core, variable: contextvars.ContextVar[Any], *default: Any) -> Any:
    """``ContextVar.get``."""
    found = _current(machine, variable)
    if found is not NULL:
        return found
    return variable.get(*default)  # the variable's own default, or LookupError, if none is given


def set_variable(machine: Core, variable: contextvars.ContextVar[Any], value: Any) -> Any:
    """``ContextVar.set``: the value before is guarded, since `reset` brings it back."""
    _current(machine, variable)
    node = machine.segment.node(variable)
    token = machine.perform(contextvars.ContextVar.set, (variable, value), {}, [node])
    node.wrote(_VALUE)
    return token


def reset_variable(machine: Core, variable: contextvars.ContextVar[Any], token: Any) -> None:
    """``ContextVar.reset`` with a token of this segment."""
    segment = machine.segment
    changes = [segment.node(variable), segment.node(token)]
    if changes[1].external:
        raise CaptureError("a context variable is reset by a token from before")
    machine.perform(contextvars.ContextVar.reset, (variable, token), {}, changes)


MODELED: dict[tuple[type, str], Callable[..., Any]] = {
    (contextvars.ContextVar, "get"): get_variable,
    (contextvars.ContextVar, "set"): set_variable,
    (contextvars.ContextVar, "reset"): reset_variable,
}
"""(type of the receiver, method name) -> what carries it out and records it."""
