"""Single objects as the heap model sees them: what a container holds, of what parts an object is made."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch

from ladder.capture.heap.nodes import CaptureError
from ladder.capture.values.kinds import (
    descriptor_of,
    is_a,
    is_constant,
    is_key,
    made_by_native,
    module_of,
    parts,
)
from ladder.capture.values.shapes import DynamicSize, Growing, Walk, standing

MAKERS: dict[type, str] = {tuple: "", frozenset: "frozenset", Growing: "list"}
"""Containers that nothing changes any more, and what makes one of the tuple of its parts."""
Texts = Callable[[Any], str]
"""From an object to text that denotes it in the mock."""


def made_of_parts(value: Any, reference: Texts, constant: Texts) -> str:
    """Return text that makes an immutable object of its parts.

    value: The object.
    reference, constant: What denotes a part, and what denotes an object that stays.
    Raises CaptureError if it is no such object.
    """
    kind = type(value)
    if kind is DynamicSize or kind in MAKERS:
        maker = constant(torch.Size) if kind is DynamicSize else MAKERS[kind]
        return f"{maker}(({''.join(f'{reference(item)}, ' for item in value)}))"
    if kind is slice:
        return f"slice({', '.join(map(reference, parts(value)))})"
    if kind is Walk:
        if not value.stands_alike():
            raise CaptureError("a container that was changed while it is looped over")
        return f"{constant(standing)}({reference(value.source)}, {value.view!r}, {value.at})"
    if kind is types.MethodType:
        return f"{constant(types.MethodType)}({reference(value.__func__)}, {reference(value.__self__)})"
    return _made_natively(value, reference, constant)


def _made_natively(value: Any, reference: Texts, constant: Texts) -> str:
    if is_a(value, types.BuiltinMethodType | types.MethodWrapperType):
        found = descriptor_of(value)
        if found is not None:
            owner = reference(value.__self__)
            return f"{constant(found)}.__get__({owner}, type({owner}))"
    fields = made_by_native(value) if is_a(value, BaseException) and is_constant(value.args) else None
    if fields is not None:
        given = "".join(f", {name}={reference(item)}" for name, item in fields.items())
        return f"{constant(type(value))}(*{constant(value.args)}{given})"
    if type(value) is types.CellType:
        raise CaptureError("a cell of unknown origin")
    raise CaptureError(f"an object of unknown origin: {brief(value)}")


def is_of_capture(value: Any) -> bool:
    """Say whether `value` is a function that capture itself puts in the place of a builtin."""
    return type(value) is types.FunctionType and module_of(value).startswith("ladder.capture.")


def contents(value: Any) -> Any:
    """Return what a container holds, with no call of its class's methods or of keys; None if it takes one."""
    if is_a(value, dict) and not all(map(is_key, dict.__iter__(value))):
        return None
    if is_a(value, OrderedDict):
        return {key: dict.__getitem__(value, key) for key in OrderedDict.__iter__(value)}
    if is_a(value, dict):
        return dict(zip(dict.__iter__(value), dict.values(value), strict=True))
    base = next((kind for kind in (list, tuple, deque, set, frozenset) if is_a(value, kind)), None)
    return None if base is None else [*base.__iter__(value)]


def brief(value: Any) -> str:
    """Return a few words for an object."""
    kind = type(value).__name__
    if is_a(value, types.ModuleType):  # it may have lost its name
        return f"{kind} {vars(value).get('__name__')}"
    return f"{kind} {value.__name__}" if is_a(value, type | types.FunctionType) else kind


def is_mutable_class(kind: type) -> bool:
    """Say whether attributes of `kind` itself can be assigned (heap types, not IMMUTABLETYPE)."""
    return bool(kind.__flags__ & 1 << 9) and not kind.__flags__ & 1 << 8
