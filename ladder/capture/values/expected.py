"""Extents that are left open from the first call on: those that programs which generate text change.

A program that is given an object which holds what earlier calls computed (a cache of keys and values) is
called again with other lengths, and often with another batch: a record of one prompt should serve the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch

from ladder.capture.values.kinds import by_identity, by_value, is_a
from ladder.capture.values.shapes import LEAST_OPEN, extent_path
from ladder.capture.values.tensors import is_plain_tensor

STATELESS = (torch.Tensor, torch.nn.Module, dict, list, tuple, set, frozenset, FunctionType, MethodType)
INTEGERS = (torch.int64, torch.int32)
MOST_AXES = 2
MAKES_CACHE = ("use_cache", True)
"""The argument by which models of transformers are asked to make a cache and give it back."""


def expected_open(names: Sequence[str], values: Sequence[Any]) -> set[str]:
    """Return the paths of the extents of token numbers, masks and positions; none without a cache.

    names, values: The arguments of the first call.
    """
    caches = any(map(_holds_state, values)) or MAKES_CACHE in _flags(names, values)
    return numbering_extents(names, values) if caches else set()


def numbering_extents(names: Sequence[str], values: Sequence[Any]) -> set[str]:
    """Return the paths of the extents of all arguments that are token numbers, masks or positions."""
    pairs = [(name, value) for name, value in zip(names, values, strict=True) if _is_numbering(value)]
    return {extent_path(name, axis) for name, value in pairs for axis in range(value.dim())}


def open_extents(names: Sequence[str], values: Sequence[Any], lifted: Iterable[str]) -> frozenset[int]:
    """Return the extents of arguments that the paths `lifted` leave open, and the differences of lengths.

    With a mask for 17 positions and one token number, 16 positions are in the cache.
    """
    paths = {*lifted}
    pairs = [(name, value) for name, value in zip(names, values, strict=True) if _is_numbering(value)]
    extents = {
        extent
        for name, value in pairs
        for axis, extent in enumerate(value.shape)
        if extent_path(name, axis) in paths
    }
    lengths = {value.shape[-1] for _, value in pairs if value.dim()}
    before = {longer - shorter for longer in lengths for shorter in lengths}
    return frozenset(extent for extent in extents | before if extent >= LEAST_OPEN)


def shapes_of(values: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of tensors among arguments; modes of torch do not see that they are asked for."""
    with torch._C.DisableTorchFunction():
        plain = (value for value in values if is_plain_tensor(value) and value.layout is torch.strided)
        return tuple(tuple(value.shape) for value in plain if not value.is_nested)


def _flags(names: Sequence[str], values: Sequence[Any]) -> list[tuple[str, bool]]:
    return [(name, value) for name, value in zip(names, values, strict=True) if type(value) is bool]


def _holds_state(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(is_a(item, torch.Tensor) or _holds_state(item) for item in value)
    plain = is_a(value, STATELESS) or by_identity(value) or by_value(value)
    return not plain and type(value).__dictoffset__ != 0


def _is_numbering(value: Any) -> bool:
    return type(value) is torch.Tensor and value.dtype in INTEGERS and value.dim() <= MOST_AXES
