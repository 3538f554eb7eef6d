"""ATen's divisions rounded down or toward 0, and what they leave."""

from __future__ import annotations

from typing import Any

from ladder.frontend.aten_bits import INTEGERS
from ladder.frontend.aten_signs import with_sign
from ladder.frontend.importer import Importer, held

NARROW = ("float32", "float16", "bfloat16")
"""Floats that are divided as float32."""

MOST = {
    "int64": 1 << 63,
    "int32": 1 << 31,
    "int16": 1 << 15,
    "uint16": 1 << 16,
    "int8": 1 << 7,
    "uint8": 1 << 8,
}
"""Type of integers -> numbers below it are its own."""


def floored(im: Importer, out: str, a: Any, b: Any) -> Any:
    """Return a quotient rounded down: of integers by a number, of float32."""
    if _divides(im, out, a, b):
        return im.cast(_parts(im, a, b)[0], out)
    return _floored_floats(im, a, b) if out == "float32" and not im.on_cpu else None


def _floored_floats(im: Importer, a: Any, b: Any) -> str:
    """Return the whole number next to what is left of a quotient without its rest, or the quotient by 0."""
    divisor = b
    a, b, zero, one = (im.operand(value, "float32") for value in (a, b, 0.0, 1.0))
    rest = im.g.add("fmod", a, b)
    whole = im.g.add("div", im.g.add("sub", a, rest), b)
    whole = im.g.add("select", _turns(im, rest, b, divisor), im.g.add("sub", whole, one), whole)
    down = im.g.add("floor", whole)
    above = im.apply("less", [0.5, im.g.add("sub", whole, down)], "float32")
    down = im.g.add("select", above, im.g.add("add", down, one), down)
    quotient = im.g.add("div", a, b)
    down = im.g.add("select", im.g.add("equal", whole, zero), with_sign(im, zero, quotient), down)
    return im.g.add("select", im.g.add("equal", b, zero), quotient, down)


def truncated(im: Importer, out: str, a: Any, b: Any) -> Any:
    """Return a quotient of floats rounded toward 0."""
    known = not (im.is_value(a) and im.is_value(b))
    if out not in NARROW or (known and out != "float32"):
        return None
    return im.floats("quotient", _wide(im, out, a, b), out)


def remainder(im: Importer, out: str, a: Any, b: Any) -> Any:
    """Return what division rounded down leaves: of integers by a number, of floats with b's sign."""
    if _divides(im, out, a, b):
        return im.cast(_parts(im, a, b)[1], out)
    if out == "float32" and b == 1 and im.ttype(a) == out:
        left = im.g.add("sub", a, im.g.add("floor", a))
        zero = im.number(0.0, out)
        return im.g.add("select", im.g.add("equal", left, zero), im.g.add("mul", a, zero), left)
    if out not in NARROW or im.on_cpu:
        return None
    a, divisor = _wide(im, out, a, b)
    a, b = (im.operand(value, "float32") for value in (a, divisor))
    rest = im.g.add("fmod", a, b)
    return im.cast(im.g.add("select", _turns(im, rest, b, divisor), im.g.add("add", rest, b), rest), out)


def left_over(im: Importer, out: str, a: Any, b: Any) -> Any:
    """Return what division of floats rounded toward 0 leaves; on CPUs torch computes vectors."""
    return None if out not in NARROW or im.on_cpu else im.floats("fmod", _wide(im, out, a, b), out)


def _wide(im: Importer, out: str, *operands: Any) -> list[Any]:
    """Return operands as their types hold them, numbers as that of the result does."""
    given: list[Any] = [held(value, out) if isinstance(value, int | float) else value for value in operands]
    return [im.stepped(value) if im.is_value(value) else value for value in given]


def _turns(im: Importer, rest: str, b: str, divisor: Any) -> str:
    """Tell whether what is left has the other sign than the divisor, and is not 0.

    divisor: As the program gives it: the sign of a number is known.
    """
    zero = im.number(0.0, "float32")
    if isinstance(divisor, int | float) and divisor != 0:
        return im.g.add("less", *((rest, zero) if divisor > 0 else (zero, rest)))
    below, negative = (im.g.add("less", value, zero) for value in (rest, b))
    both = im.g.add("both", im.g.add("less", zero, rest), negative)
    return im.g.add("either", both, im.g.add("both", below, im.g.add("less", zero, b)))


def _divides(im: Importer, out: str, a: Any, b: Any) -> bool:
    """Tell whether b is a whole number above 0, by which integers are divided."""
    whole = out in INTEGERS and im.is_value(a) and im.ttype(a) == out
    return whole and isinstance(b, int) and 0 < b < MOST[out]


def _parts(im: Importer, a: str, b: int) -> tuple[str, str]:
    """Return the quotient of integers rounded down, and what is left."""
    wide = "int64" if im.ttype(a) == "int64" else "int32"
    a, divisor, none, one = im.cast(a, wide), *(im.number(value, wide) for value in (b, 0, 1))
    whole = im.g.add("quotient", a, divisor)
    left = im.g.add("sub", a, im.g.add("mul", whole, divisor))
    below = im.g.add("less", left, none)
    whole = im.g.add("sub", whole, im.g.add("select", below, one, none))
    return whole, im.g.add("add", left, im.g.add("select", below, divisor, none))
