"""Attention by kernels of ours: their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ladder.ir.attention import AXES, Attention
from tile_types.errors import ShapeError

LARGEST = 1 << 31
"""Elements that 32-bit offsets reach."""


def arguments(form: Attention, given: Mapping[str, torch.Tensor]) -> list[Any]:
    """Return a kernel's arguments: sizes, strides, and every tensor as the one axis of its elements.

    Parameters
    ----------
    form
        What the kernel computes.
    given
        ``q``, ``k``, ``v`` and ``out`` as ``[batch, heads, tokens, size]``, what else `Attention.tensors` names; any
        strides but along the last axis, extents 1 are shared.

    Raises
    ------
    ShapeError
        If offsets do not fit 32 bits, or the last axis is not contiguous.
    """
    q, k = given["q"], given["k"]
    numbers = {"batch": q.shape[0], "tokens": q.shape[2], "keys": k.shape[2]}
    flat = []
    for name in form.tensors():
        tensor = given[name]
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ShapeError(f"attention needs contiguous rows of {name}, got strides {tensor.stride()}")
        span = 1 + sum((e - 1) * s for e, s in zip(tensor.shape, tensor.stride(), strict=True))
        if span >= LARGEST:
            raise ShapeError(f"attention's {name} spans {span} elements; offsets have 32 bits")
        for axis, extent, stride in zip(AXES[name], tensor.shape, tensor.stride(), strict=False):
            numbers[f"{name}_{axis}"] = 0 if extent == 1 else stride
        flat.append((tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor).as_strided((span,), (1,)))
    return [*(numbers[name] for name in form.numbers()), *flat]
