"""Which aten operators may raise depending on values.

Those that do nothing else have no result; graphs hold operators of ours in their place, which have one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ladder.runtime.registered import define

_NAMES = (
    *("index", "gather", "scatter", "embedding", "take", "put", "one_hot", "nll_loss", "ctc", "nonzero"),
    *("cholesky", "linalg", "lu_", "inverse", "geqrf", "multinomial", "bernoulli", "poisson", "binomial"),
    *("local_scalar_dense", "masked_s", "repeat_interleave", "bincount", "assert", "searchsorted"),
    *("histogram", "histc", "max_unpool", "segment_reduce", "binary_cross_entropy"),
)
"""How the names of such operators begin, underscores aside."""

_DIVISIONS = ("floor_divide", "remainder", "fmod", "div.Tensor_mode")
"""Operators that raise where integers are divided by 0."""


def may_raise(function: Any, args: Sequence[Any]) -> bool:
    """Tell whether an aten operator may raise for some values of tensors like those in ``args``."""
    name = str(function._schema.name).removeprefix("aten::").strip("_")
    if name.startswith(_NAMES):
        return True
    divides = name in _DIVISIONS or f"{name}.{function._overloadname}".rstrip("_") in _DIVISIONS
    return divides and isinstance(args[1], torch.Tensor) and not any(map(_never_raises, args[:2]))


def _never_raises(value: Any) -> bool:
    """Tell whether a division by this, or of this, is one of floats, or one that a GPU does."""
    if not isinstance(value, torch.Tensor):
        return isinstance(value, float | complex)
    return value.is_floating_point() or value.is_complex() or value.device.type != "cpu"


def _check_factors(info: torch.Tensor, name: str, is_matrix: bool) -> torch.Tensor:
    """Raise what ``torch.linalg`` raises where LAPACK says that a matrix cannot be decomposed."""
    torch.ops.aten._linalg_check_errors(info, name, is_matrix=is_matrix)
    return torch.empty(0, device=info.device)


def _check_truth(truth: torch.Tensor, message: str = "") -> torch.Tensor:
    """Raise what ``torch._assert_async`` raises."""
    torch._assert_async(truth, message) if message else torch._assert_async(truth)
    return torch.empty(0, device=truth.device)


def _nothing(checked: torch.Tensor, *_: Any) -> torch.Tensor:
    return checked.new_empty(0, dtype=torch.float32)


_CHECKED = ("CompositeExplicitAutograd",)
define("check_factors(Tensor info, str name, bool is_matrix) -> Tensor", _check_factors, _nothing, _CHECKED)
define("check_truth(Tensor truth, str message='') -> Tensor", _check_truth, _nothing, _CHECKED)


@cache
def checks() -> Mapping[Any, Any]:
    """Return operators without a result -> those that give one, which graphs can hold."""
    aten, ours = torch.ops.aten, torch.ops.ladder
    return {
        aten._linalg_check_errors.default: ours.check_factors.default,
        aten._assert_async.default: ours.check_truth.default,
        aten._assert_async.msg: ours.check_truth.default,
    }
