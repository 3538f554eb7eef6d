"""Pictures and volumes of other sizes by kernels of ours on CPUs: linear, or of the nearest elements."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from ladder.runtime import native
from ladder.runtime.native import can_build

MODULE = "resampling"


def have_kernels(x: Any, largest: int) -> bool:
    """Tell whether the kernels take a tensor; `largest`: elements of results, and of what is between."""
    plain = x.device.type == "cpu" and x.numel() > 0 and x.element_size() in (1, 2, 4, 8)
    return plain and largest < native.MOST_BYTES and can_build(MODULE, "picking", False, 32)


def interpolated(x: Any, taps: Mapping[int, tuple[Any, Any]]) -> Any:
    """Interpolate along axes, float32.

    taps: Axis -> elements that results read, and what of each: int32 and float32 ``[2, new extent]``.
    """
    for at, count in _neighbours(taps):
        kernel = native.entry(MODULE, "resampling", count, _width(x, at + count) > 1)
        given = [part for axis in range(at, at + count) for part in taps[axis]]
        x = _run(kernel, x, at, count, given, [taps[axis][0].shape[1] for axis in range(at, at + count)])
    return x


def picked(x: Any, taps: Mapping[int, Any]) -> Any:
    """Return the elements that taps name, int32 by axis."""
    kind = getattr(torch, f"uint{8 * x.element_size()}")
    found = x.view(kind)
    for at, count in _neighbours(taps):
        kernel = native.entry(MODULE, "picking", _width(x, at + count) > 1, 8 * x.element_size())
        given = [taps[axis] for axis in range(at, at + count)]
        if count == 1:
            given = [torch.zeros(1, dtype=torch.int32), *given]
        found = _run(kernel, found, at, count, given, [len(taps[axis]) for axis in range(at, at + count)])
    return found.view(x.dtype)


def _width(x: Any, after: int) -> int:
    return prod(x.shape[after:])


def _neighbours(axes: Mapping[int, Any]) -> list[tuple[int, int]]:
    """Return pairs of neighbouring axes, from the last on, and single ones: the first of each, how many."""
    found, left = [], sorted(axes)
    while left:
        count = 2 if len(left) > 1 and left[-2] == left[-1] - 1 else 1
        found.append((left[-count], count))
        del left[-count:]
    return found


def _run(kernel: Any, x: Any, at: int, count: int, given: list[Any], sizes: list[int]) -> Any:
    """Call a kernel for some axes; one of them is the columns of pictures of one row."""
    before, after = x.shape[:at], x.shape[at + count :]
    pixels = x.shape[at : at + count] if count == 2 else (1, x.shape[at])
    out = x.new_empty(*before, *sizes, *after)
    view = (prod(before), *(sizes if count == 2 else (1, *sizes)), prod(after))
    kernel(x.reshape(prod(before), *pixels, prod(after)).contiguous(), *given, out.view(view))
    return out
