"""ONNX's conversions to codes of 8 bits and back as tile graph rows: they join the kernels around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ladder.frontend.aten_rows import ROWS as ATEN
from ladder.frontend.onnx_call import Call, Row
from ladder.frontend.onnx_values import Known

LIMITS: Mapping[str, tuple[float, float]] = {"uint8": (0.0, 255.0), "int8": (-128.0, 127.0)}
"""Types of codes that kernels make -> smallest and largest."""

SPECIAL = ("block_size", "precision", "output_dtype")
"""Attributes whose default alone has a kernel."""

FLOAT = "float32"


def _is_plain(call: Call) -> bool:
    return call.ttype(1) == FLOAT and not any(call.given.get(name, 0) for name in SPECIAL)


def _spread(call: Call, at: int) -> str | None:
    """Return scale or zero point as float32, so that it broadcasts; None where its form has no kernel."""
    known = call.known(at)
    if known is None or known.symbolic:
        return call.im.cast(call.tensor(at), FLOAT) if call.shape(at) == () else None
    array, rank = known.array.astype(np.float32), len(call.shape(0))
    if array.size == 1:
        return call.piece.tensor(Known(array.reshape(())))
    if array.ndim != 1:
        return None
    axis = int(call.given.get("axis", 1)) % rank
    return call.piece.tensor(Known(array.reshape([-1 if place == axis else 1 for place in range(rank)])))


def _codes(call: Call, ratio: str, zero: str | None, target: str) -> str:
    """Round, move by the zero point, and clamp; NaN becomes the smallest code."""
    low, high = LIMITS[target]
    whole = ATEN["round.default"](call.im, FLOAT, ratio)
    whole = whole if zero is None else ATEN["add.Tensor"](call.im, FLOAT, whole, zero)
    above = ATEN["ge.Scalar"](call.im, "bool", whole, low)
    most = ATEN["clamp.default"](call.im, FLOAT, whole, None, high)
    return call.im.cast(ATEN["where.self"](call.im, FLOAT, above, most, low), target)


def _quantized(call: Call) -> Any:
    target = call.ttype(2) if call.has(2) else "uint8"
    if call.out != FLOAT or not _is_plain(call) or target not in LIMITS:
        return None
    scale, zero = _spread(call, 1), _spread(call, 2) if call.has(2) else None
    if scale is None or (zero is None and call.has(2)):
        return None
    return _codes(call, ATEN["div.Tensor"](call.im, FLOAT, call.tensor(0), scale), zero, target)


def _dequantized(call: Call) -> Any:
    if call.out not in LIMITS or not _is_plain(call):
        return None
    scale, zero = _spread(call, 1), _spread(call, 2) if call.has(2) else None
    if scale is None or (zero is None and call.has(2)):
        return None
    value = call.im.cast(call.tensor(0), FLOAT)
    value = value if zero is None else ATEN["sub.Tensor"](call.im, FLOAT, value, zero)
    return ATEN["mul.Tensor"](call.im, FLOAT, value, scale)


CODES: Mapping[str, Row] = {"QuantizeLinear": _quantized, "DequantizeLinear": _dequantized}
"""Conversions to codes and back."""
