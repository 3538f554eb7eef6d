"""Values derived from 8-bit codes that are the same in every call, computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

BYTES = (torch.uint8, torch.int8)


@dataclass(frozen=True)
class DerivedValue:
    """A value derived from a tensor, and the version of the tensor that it was made of."""

    version: int
    value: Any


_KEPT: Any = WeakIdKeyDictionary()
"""Tensor that stays -> form -> what follows from it."""


def stays(tensor: torch.Tensor) -> None:
    """Say that a tensor is the same in every call, so that what follows from it may be kept."""
    if tensor.dtype in BYTES and not tensor.is_inference() and tensor not in _KEPT:
        _KEPT[tensor] = {}


def kept(tensor: torch.Tensor, form: Any, make: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``make(tensor)``, made once for a tensor that `stays`; ``form`` names what is made.

    Kernels write memory of other tensors without torch's knowledge, so nothing is kept of those.
    """
    forms = _KEPT.get(tensor)
    if forms is None:
        return make(tensor)
    found = forms.get(form)
    if found is None or found.version != tensor._version:
        found = forms[form] = DerivedValue(tensor._version, make(tensor))
    return found.value
