"""ATen's division rounded down, and what it leaves."""

from __future__ import annotations

from typing import Any

from ladder.frontend.aten_bits import INTEGERS
from ladder.frontend.importer import Importer

MOST = 1 << 7
"""Divisors below it are those of all types of integers."""


def floored(im: Importer, out: str, a: Any, b: Any) -> Any:
    """Return the quotient of integers by a number, rounded down."""
    return im.cast(_parts(im, a, b)[0], out) if _divides(im, out, a, b) else None


def remainder(im: Importer, out: str, a: Any, b: Any) -> Any:
    """Return what division rounded down leaves, of integers; of floats behind the point, 0 with a's sign."""
    if _divides(im, out, a, b):
        return im.cast(_parts(im, a, b)[1], out)
    if out != "float32" or b != 1 or im.ttype(a) != out:
        return None
    left = im.g.add("sub", a, im.g.add("floor", a))
    zero = im.number(0.0, out)
    return im.g.add("select", im.g.add("equal", left, zero), im.g.add("mul", a, zero), left)


def _divides(im: Importer, out: str, a: Any, b: Any) -> bool:
    """Tell whether b is a whole number above 0, by which integers are divided."""
    whole = out in INTEGERS and im.is_value(a) and im.ttype(a) == out
    return whole and isinstance(b, int) and 0 < b < MOST


def _parts(im: Importer, a: str, b: int) -> tuple[str, str]:
    """Return the quotient of integers rounded down, and what is left."""
    wide = "int64" if im.ttype(a) == "int64" else "int32"
    a, divisor, none, one = im.cast(a, wide), *(im.number(value, wide) for value in (b, 0, 1))
    whole = im.g.add("quotient", a, divisor)
    left = im.g.add("sub", a, im.g.add("mul", whole, divisor))
    below = im.g.add("less", left, none)
    whole = im.g.add("sub", whole, im.g.add("select", below, one, none))
    return whole, im.g.add("add", left, im.g.add("select", below, divisor, none))
