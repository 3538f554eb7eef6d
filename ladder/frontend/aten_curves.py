"""ATen's hyperbolic functions and the tangent, and roundings to steps, of a few of our operators each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ladder.frontend.aten_functions import exponential_less_one, single, trigonometric
from ladder.frontend.aten_signs import with_sign
from ladder.frontend.importer import Importer, Row, held, wide_of

FLAT = 1.0
"""Magnitude up to which a hyperbolic sine is made of the exponential less 1."""

HUGE = 2.0**60
"""Magnitude from which on an inverse hyperbolic function is the logarithm of twice its argument."""


def _of(im: Importer, operator: str, *operands: Any) -> str:
    return im.apply(operator, operands, "float32")


def _halves(im: Importer, size: str) -> tuple[str, str]:
    """Return ``exp(x) / 2`` and ``exp(-x) / 2`` of a magnitude, finite as long as the first is."""
    root = _of(im, "exp", _of(im, "mul", size, 0.5))
    grown = _of(im, "mul", _of(im, "mul", root, 0.5), root)
    return grown, _of(im, "div", _of(im, "div", 0.5, root), root)


def _sine(im: Importer, x: str) -> str:
    size = _of(im, "abs", x)
    less = exponential_less_one(im, _of(im, "minimum", size, FLAT))
    near = _of(im, "mul", _of(im, "add", less, _of(im, "div", less, _of(im, "add", less, 1.0))), 0.5)
    far = _of(im, "sub", *_halves(im, size))
    return with_sign(im, im.g.add("select", _of(im, "less", size, FLAT), near, far), x)


def _cosine(im: Importer, x: str) -> str:
    return _of(im, "add", *_halves(im, _of(im, "abs", x)))


def _tangent(im: Importer, out: str, x: str) -> Any:
    """Return the quotient of sine and cosine; None where torch's are taken, or wider ones."""
    sine, cosine = (trigonometric(name)(im, "float32", x) for name in ("sin", "cos"))
    if None in (sine, cosine) or wide_of(out) != "float32":
        return None
    return im.cast(_of(im, "div", sine, cosine), out)


def _logarithm_of_twice(im: Importer, x: str) -> str:
    return _of(im, "add", im.g.add("log1p", x), math.log(2))  # as that of x, of which vectors are made


def _inverse_sine(im: Importer, x: str) -> str:
    """Return ``log(1 + a + a^2 / (1 + sqrt(1 + a^2)))`` of the magnitude a, with the sign of x."""
    size = _of(im, "abs", x)
    square = _of(im, "square", size)
    root = _of(im, "add", _of(im, "sqrt", _of(im, "add", square, 1.0)), 1.0)
    found = im.g.add("log1p", _of(im, "add", size, _of(im, "div", square, root)))
    huge = _of(im, "less", HUGE, size)
    return with_sign(im, im.g.add("select", huge, _logarithm_of_twice(im, size), found), x)


def _inverse_cosine(im: Importer, x: str) -> str:
    """Return ``log(1 + t + sqrt(t) sqrt(t + 2))`` of ``t = x - 1``, which is none below 0."""
    t = _of(im, "sub", x, 1.0)
    root = _of(im, "mul", _of(im, "sqrt", t), _of(im, "sqrt", _of(im, "add", t, 2.0)))
    found = im.g.add("log1p", _of(im, "add", t, root))
    return im.g.add("select", _of(im, "less", HUGE, x), _logarithm_of_twice(im, x), found)


def _inverse_tangent(im: Importer, x: str) -> str:
    """Return half of ``log(1 + 2 a / (1 - a))`` of the magnitude a, with the sign of x."""
    size = _of(im, "abs", x)
    share = _of(im, "div", _of(im, "mul", size, 2.0), _of(im, "sub", 1.0, size))
    return with_sign(im, _of(im, "mul", im.g.add("log1p", share), 0.5), x)


def _turned(im: Importer, out: str, x: str) -> Any:
    """Return the angle of real numbers: pi of what is below 0."""
    if im.ttype(x) != out or wide_of(out) != "float32":
        return None
    wide, (half, none) = im.operand(x, "float32"), (im.number(a, "float32") for a in (math.pi, 0.0))
    angle = im.g.add("select", _of(im, "less", wide, 0.0), half, none)
    return im.cast(im.g.add("select", _of(im, "less_equal", wide, math.inf), angle, wide), out)


def _rounded(im: Importer, out: str, x: str, decimals: int = 0) -> Any:
    """Return numbers of so many decimals."""
    if out != "float32":
        return None
    ten = held(10.0 ** abs(decimals), "float32")
    up, down = ("mul", "div") if decimals >= 0 else ("div", "mul")
    return im.apply(down, [im.g.add("round", im.apply(up, [x, ten], "float32")), ten], "float32")


def _tensor_quantized(im: Importer, out: str, x: str, scale: Any, zero: Any, low: int, high: int) -> Any:
    """Return the values of the nearest codes of a type with one scale; the lowest of what is no number."""
    if not isinstance(scale, float) or not isinstance(zero, int) or _keeps_codes(im, out, x):
        return None
    single = np.float32(scale)
    with np.errstate(all="ignore"):
        inverse = float(np.float32(1) / single)
    scales = (im.number(inverse, "float32"), im.number(float(single), "float32"))
    return _quantized(im, out, x, scales, im.number(float(zero), "float32"), low, high), None


def _channel_quantized(
    im: Importer, out: str, x: str, scale: str, zero: str, axis: int, low: int, high: int
) -> Any:
    """Return those of a type with a scale for each position of an axis; on CPUs 64 bits hold codes."""
    if (im.ttype(scale), im.ttype(zero)) != ("float32", "int32") or im.on_cpu or _keeps_codes(im, out, x):
        return None
    scale, zero = (im.along(value, axis, len(im.shape(x))) for value in (scale, im.cast(zero, "float32")))
    inverse = im.apply("div", [1.0, scale], "float32")
    return _quantized(im, out, x, (inverse, scale), zero, low, high), None


def _keeps_codes(im: Importer, out: str, x: str) -> bool:
    """Tell whether the program also wants which codes were clamped, or other floats than ours."""
    return 1 in im.used or im.ttype(x) != out or wide_of(out) != "float32"


def _quantized(
    im: Importer, out: str, x: str, scales: tuple[str, str], zero: str, low: int, high: int
) -> str:
    inverse, scale = scales
    near = im.g.add("round", im.apply("mul", [im.stepped(x), inverse], "float32"))
    code = im.g.add("add", near, zero)
    is_number = im.apply("less_equal", [code, math.inf], "float32")
    code = im.g.add("select", is_number, code, im.number(float(low), "float32"))
    code = im.apply("minimum", [im.apply("maximum", [code, float(low)], "float32"), float(high)], "float32")
    return im.cast(im.g.add("mul", im.g.add("sub", code, zero), scale), out)


CURVES: dict[str, Row] = {
    **{
        f"{name}.default": single(function)
        for name, function in {
            "sinh": _sine, "cosh": _cosine, "asinh": _inverse_sine, "acosh": _inverse_cosine,
            "atanh": _inverse_tangent,
        }.items()
    },
    "tan.default": _tangent,
    "angle.default": _turned,
    "round.decimals": _rounded,
    "fake_quantize_per_tensor_affine_cachemask.default": _tensor_quantized,
    "fake_quantize_per_channel_affine_cachemask.default": _channel_quantized,
}  # fmt: skip
"""Name and overload -> row."""
