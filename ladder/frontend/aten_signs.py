"""ATen's functions that read the sign or the bits of floats, and those of two numbers made of them."""

from __future__ import annotations

import math
from typing import Any

from ladder.frontend.aten_functions import ARC_TANGENT, odd_series
from ladder.frontend.importer import Importer, Row, wide_of

MAGNITUDE, SIGN = 0x7FFFFFFF, -0x80000000
"""Which bits of a float32 are its magnitude, and which its sign."""


def _is_float(ttype: str) -> bool:
    return ttype.startswith(("float", "bfloat"))


def with_sign(im: Importer, magnitude: str, sign: str) -> str:
    """Return a float32 with the sign of another, also of zeros and of what is no number."""
    size = im.apply("bitwise_and", [im.g.add("bits", magnitude), MAGNITUDE], "int32")
    signs = im.apply("bitwise_and", [im.g.add("bits", sign), SIGN], "int32")
    return im.g.add("of_bits", im.apply("bitwise_or", [size, signs], "int32"))


def _copied_sign(im: Importer, out: str, x: Any, sign: Any) -> Any:
    if wide_of(out) != "float32" or any(im.is_value(a) and im.ttype(a) == "float64" for a in (x, sign)):
        return None
    wide = (im.operand(value, "float32") for value in (x, sign))
    return im.cast(with_sign(im, *wide), out)


def _sign_bit(im: Importer, out: str, x: str) -> Any:
    if wide_of(im.ttype(x)) != "float32" or not _is_float(im.ttype(x)):
        return None
    return im.apply("less", [im.g.add("bits", im.operand(x, "float32")), 0], "int32")


def _viewed_as(im: Importer, out: str, x: str, *_: Any) -> Any:
    """Return the bits of 32 bits as another type of as many."""
    operator = {("float32", "int32"): "bits", ("int32", "float32"): "of_bits"}.get((im.ttype(x), out))
    return None if operator is None else im.g.add(operator, x)


def _is_infinite(im: Importer, out: str, x: str) -> Any:
    if not _is_float(im.ttype(x)):
        return None
    wide = wide_of(im.ttype(x))
    return im.apply("equal", [im.apply("abs", [im.operand(im.stepped(x), wide)], wide), math.inf], wide)


def _extreme_number(operator: str) -> Row:
    """Return the row of an extreme that leaves out what is no number."""

    def row(im: Importer, out: str, a: Any, b: Any) -> Any:
        if not _is_float(out):
            return im.arithmetic(operator, [a, b], out)
        wide = wide_of(out)
        a, b = (im.operand(value, wide) for value in (a, b))
        numbers = (im.apply("less_equal", [value, math.inf], wide) for value in (a, b))
        is_first, is_second = numbers
        second = im.g.add("select", is_second, im.apply(operator, [a, b], wide), a)
        return im.cast(im.g.add("select", is_first, second, b), out)

    return row


def _exclusive(im: Importer, out: str, a: Any, b: Any) -> Any:
    """Tell whether one of two is true."""
    truths = [im.cast(im.cast(value, "bool"), "int32") for value in (a, b)]
    return im.cast(im.apply("bitwise_xor", truths, "int32"), "bool")


SMALL, LARGE, SCALE = 2.0**-60, 2.0**60, 2.0**100
"""Magnitudes beyond which squares are scaled."""


def _hypotenuse(im: Importer, out: str, a: Any, b: Any) -> Any:
    """Return ``sqrt(a * a + b * b)``, infinite beside an infinity."""
    if wide_of(out) != "float32" or not _is_float(out):
        return None
    sizes = [im.apply("abs", [value], "float32") for value in (a, b)]
    most = im.apply("maximum", sizes, "float32")
    factor, back = (
        im.g.add(
            "select",
            im.apply("less", [LARGE, most], "float32"),
            im.number(1 / scale, "float32"),
            im.g.add(
                "select",
                im.apply("less", [most, SMALL], "float32"),
                im.number(scale, "float32"),
                im.number(1.0, "float32"),
            ),
        )
        for scale in (SCALE, 1 / SCALE)
    )
    squares = [im.g.add("square", im.apply("mul", [size, factor], "float32")) for size in sizes]
    root = im.apply("mul", [im.g.add("sqrt", im.apply("add", squares, "float32")), back], "float32")
    infinite = [im.apply("equal", [size, math.inf], "float32") for size in sizes]
    found = im.g.add("select", im.g.add("either", *infinite), im.number(math.inf, "float32"), root)
    return im.cast(found, out)


def _angle(im: Importer, out: str, y: Any, x: Any) -> Any:
    """Return the arc tangent of ``y / x`` in the quadrant that signs tell, zeros' too."""
    if wide_of(out) != "float32" or not _is_float(out):
        return None
    y, x = (im.operand(value, "float32") for value in (y, x))
    up, along = (im.apply("abs", [value], "float32") for value in (y, x))
    less, more = (im.apply(name, [up, along], "float32") for name in ("minimum", "maximum"))
    same = im.apply("equal", [up, along], "float32")
    ratio = im.apply("div", [less, more], "float32")
    is_zero = im.apply("equal", [more, 0.0], "float32")
    ratio = im.g.add("select", same, im.number(1.0, "float32"), ratio)
    ratio = im.g.add("select", is_zero, im.number(0.0, "float32"), ratio)
    arc = odd_series(im, ratio, im.apply("square", [ratio], "float32"), ARC_TANGENT)
    steep = im.apply("less", [along, up], "float32")
    arc = im.g.add("select", steep, im.apply("sub", [math.pi / 2, arc], "float32"), arc)
    behind = im.apply("less", [im.g.add("bits", x), 0], "int32")
    is_number = im.apply("less_equal", [im.apply("maximum", [y, x], "float32"), math.inf], "float32")
    arc = im.g.add("select", behind, im.apply("sub", [math.pi, arc], "float32"), arc)
    arc = im.g.add("select", is_number, arc, im.apply("add", [y, x], "float32"))
    return im.cast(with_sign(im, arc, y), out)


SIGNS: dict[str, Row] = {
    **{f"copysign.{form}": _copied_sign for form in ("Tensor", "Scalar")},
    "signbit.default": _sign_bit,
    "view.dtype": _viewed_as,
    "isinf.default": _is_infinite,
    "fmax.default": _extreme_number("maximum"),
    "fmin.default": _extreme_number("minimum"),
    "logical_xor.default": _exclusive,
    "hypot.default": _hypotenuse,
    "atan2.default": _angle,
}
"""Name and overload -> row."""
