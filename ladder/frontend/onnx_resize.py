"""Resize and Upsample by whole factors, of the nearest element: moves, without arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ladder.frontend.onnx_call import Call, Row
from ladder.ir.extents import quotient
from ladder.runtime.onnx_ops.resize import NEAREST, PLACES
from tile_types.tile import Extent

SAMPLES = (1, 2, 5)
"""Extents for which places are compared: formulas are the same for all."""


def _resized(call: Call) -> Any:
    """Repeat every element; None where a result is more than that, or not known to be."""
    given, shape = call.given, call.shape(0)
    stretches = given.get("keep_aspect_ratio_policy", b"stretch") == b"stretch"
    if given.get("mode", b"nearest") != b"nearest" or "axes" in given or not stretches:
        return None
    factors = _factors(call, shape)
    if factors is None or not all(_repeats(call, factor) for factor in factors):
        return None
    return call.im.repeat_elements(call.tensor(0), factors)


def _factors(call: Call, shape: Sequence[Extent]) -> list[int] | None:
    """Return how often elements stand along each axis, if these are whole numbers."""
    upsample = call.node.op_type == "Upsample"
    at = 1 if upsample or call.version < 11 else 2
    if call.has(3) and not upsample:
        found = [quotient(size, extent) for size, extent in zip(call.extents(3), shape, strict=True)]
        whole = [factor for factor in found if isinstance(factor, int) and factor > 0]
        return whole if len(whole) == len(shape) else None
    known = call.known(at)
    scales = call.given.get("scales") if known is None else known.array.tolist()
    if not scales or len(scales) != len(shape) or any(scale < 1 or scale != int(scale) for scale in scales):
        return None
    return [int(scale) for scale in scales]


def _repeats(call: Call, factor: int) -> bool:
    """Tell whether places of the result are those of the operand, each as often."""
    older = call.node.op_type == "Upsample" or call.version < 11
    how, nearest = (b"asymmetric", b"floor") if older else (b"half_pixel", b"round_prefer_floor")
    place = PLACES.get(call.given.get("coordinate_transformation_mode", how).decode())
    choose = NEAREST.get(call.given.get("nearest_mode", nearest).decode())
    if place is None or choose is None or place is PLACES["tf_crop_and_resize"]:
        return False
    for extent in SAMPLES if factor > 1 else ():
        at = torch.arange(extent * factor, dtype=torch.float64)
        found = choose(place(at, factor, extent, extent * factor, 0.0, 1.0)).clamp(0, extent - 1)
        if not torch.equal(found, at.div(factor, rounding_mode="floor")):
            return False
    return True


RESIZES: Mapping[str, Row] = {"Resize": _resized, "Upsample": _resized}
"""Operators that resample."""
