"""Results whose strides torch's reference implementations state differently from its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import compute_elementwise_output_strides

from ladder.frontend.fx_nodes import inverse

UNLIKE = frozenset(
    f"aten::{name}"
    for name in ("copysign", "xlogy", "special_xlog1py", "heaviside", "logaddexp", "logaddexp2", "addcdiv")
)
"""Elementwise operators of several tensors whose references compose others, in another order."""


def laid_as_by_kernels(function: Any, args: Sequence[Any], found: Any) -> Any:
    """Return what an operator of `UNLIKE` gave, in the order of axes in which its kernel lays it.

    What draws random numbers into it draws them in that order.
    """
    if function._schema.name not in UNLIKE or function._schema.is_mutable:
        return found
    tensors = [value.expand(found.shape) for value in args if isinstance(value, torch.Tensor)]
    if len({value.stride() for value in tensors}) < 2:
        return found
    strides = compute_elementwise_output_strides(*tensors)
    if strides == found.stride():
        return found
    axes = tuple(sorted(range(found.dim()), key=lambda axis: -strides[axis]))
    return found.permute(axes).clone(memory_format=torch.contiguous_format).permute(inverse(axes))
