"""How far apart two results of a model are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors in a result, and in what it holds."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif type(value).__module__.startswith("transformers.cache_utils"):
        yield from leaves(vars(value))
    elif hasattr(value, "keys") and isinstance(getattr(value, "keys", None), torch.Tensor):
        yield from (value.keys, value.values)


def difference(expected: Any, found: Any) -> float:
    """Return the greatest difference of two results relative to the expected one's greatest magnitude."""
    pairs = list(zip(leaves(expected), leaves(found), strict=True))
    worst = 0.0
    for left, right in pairs:
        if left.shape != right.shape or left.dtype is not right.dtype:
            return float("inf")
        if left.numel():
            greatest = left.double().abs_().max().clamp_min(1e-12)
            off = left.double().sub_(right).abs_().max() / greatest
            worst = max(worst, float(off.nan_to_num(0.0 if left.isnan().equal(right.isnan()) else torch.inf)))
    return worst
