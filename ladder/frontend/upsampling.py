"""Upsampling as one operator of a graph.

Torch would take it apart into gathers and products: they give no number where a pixel is infinite, and sizes
that are floats on the way cannot stay open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

OPERATORS = {
    **{("nearest", n): f"upsample_nearest{n}d" for n in (1, 2, 3)},
    **{("nearest-exact", n): f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)},
    ("linear", 1): "upsample_linear1d",
    ("bilinear", 2): "upsample_bilinear2d",
    ("bicubic", 2): "upsample_bicubic2d",
    ("trilinear", 3): "upsample_trilinear3d",
    ("bilinear smooth", 2): "_upsample_bilinear2d_aa",
    ("bicubic smooth", 2): "_upsample_bicubic2d_aa",
}
"""(Mode, axes) -> operator of ATen; `smooth` where `antialias` is asked for."""

EXACT = 1 << 10
"""The largest denominator of a scale whose products with sizes are computed in integers."""


def upsampling(target: Any) -> Callable[..., Any] | None:
    """Return what stands for a function of torch in a graph; None if that does not upsample."""
    return FUNCTIONS.get(target)


def interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Return ``torch.nn.functional.interpolate``; what it refuses, it refuses itself."""
    axes = input.ndim - 2
    name = OPERATORS.get((f"{mode} smooth" if antialias else mode, axes))
    aligned = None if mode.startswith("nearest") else bool(align_corners)
    refused = (size is None) == (scale_factor is None) or (aligned is None and align_corners is not None)
    sizes, scales = (_of_axes(value, axes) for value in (size, scale_factor))
    if name is None or refused or (sizes or scales or ()) == () or (recompute_scale_factor and sizes):
        return functional.interpolate(
            input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        )
    if recompute_scale_factor and scales:
        sizes, scales = _scaled(input, scales), None
    return _upsample(name, input, sizes, aligned, scales)


def _of_axes(value: Any, axes: int) -> list[Any] | None:
    """Return a number for each axis, nothing where there are too many or too few."""
    if value is None:
        return None
    several = list(value) if isinstance(value, list | tuple) else [value] * axes
    return several if len(several) == axes else []


def _scaled(input: Any, scales: Sequence[float]) -> list[Any]:
    return [_product(extent, scale) for extent, scale in zip(input.shape[2:], scales, strict=True)]


def _product(extent: Any, scale: float) -> Any:
    """Return the integer part of a size times a scale."""
    over, under = float(scale).as_integer_ratio()
    return extent * over // under if under <= EXACT else math.floor(extent * scale)


def _upsample(name: str, input: Any, sizes: Any, aligned: bool | None, scales: Any) -> Any:
    scales = None if scales is None else [float(scale) for scale in scales]
    if sizes is None:
        sizes = _scaled(input, scales or ())
    return torch.ops.ladder.upsample.default(input, sizes, name, aligned, scales)


def _native(name: str, aligns: bool) -> Callable[..., Any]:
    """Return what stands for the function of that name, which `interpolate` calls."""

    names = ("align_corners", "scale_factors") if aligns else ("scale_factors",)

    def run(input: Any, output_size: Any = None, *rest: Any, **options: Any) -> Any:
        given = {**dict(zip(names, rest, strict=False)), **options}
        scales = given.pop("scale_factors", None)
        aligned = given.pop("align_corners", False if aligns else None)
        listed = scales is None or isinstance(scales, list | tuple)
        if given or len(rest) > len(names) or not listed or (output_size is None) == (scales is None):
            return getattr(torch._C._nn, name)(input, output_size, *rest, **options)
        return _upsample(name, input, output_size, aligned, scales)

    return run


FUNCTIONS: dict[Any, Callable[..., Any]] = {functional.interpolate: interpolate} | {
    getattr(torch._C._nn, name): _native(name, aligns=not mode.startswith("nearest"))
    for (mode, _), name in OPERATORS.items()
}
"""Function of torch -> what stands for it in a graph."""
