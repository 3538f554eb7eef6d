"""ATen's operators of bits and of truth values."""

from __future__ import annotations

from typing import Any

from ladder.frontend.importer import Importer, Row

INTEGERS = ("int64", "int32", "int16", "uint16", "int8", "uint8")
"""Types that kernels of chains compute the bits of, narrower ones in int32."""

OF_TRUTHS = {"bitwise_and": "both", "bitwise_or": "either"}
"""Operators of bits -> what they are of truth values."""


def _logic(operator: str) -> Row:
    return lambda im, out, *operands: im.apply(operator, operands, "bool") if out == "bool" else None


def _bits(operator: str) -> Row:
    def row(im: Importer, out: str, a: Any, b: Any) -> Any:
        if out in INTEGERS:
            return im.arithmetic(operator, [a, b], out)
        if out != "bool":
            return None
        if operator in OF_TRUTHS:
            return im.apply(OF_TRUTHS[operator], [a, b], "bool")
        whole = [im.cast(im.operand(value, "bool"), "int32") for value in (a, b)]
        return im.cast(im.apply(operator, whole, "int32"), "bool")

    return row


def _complement(im: Importer, out: str, a: Any) -> Any:
    return im.apply("negation", [a], out) if out == "bool" else _bits("bitwise_xor")(im, out, a, -1)


def _shift(way: str) -> Row:
    """Return the row of a shift; both operands wrap around to the result's type first, as in torch."""
    row = _bits(f"shift_{way}")

    def shifted(im: Importer, out: str, a: Any, b: Any) -> Any:
        return row(im, out, im.operand(a, out), im.operand(b, out)) if out in INTEGERS else None

    return shifted


BITS: dict[str, Row] = {
    **{f"logical_{name}.default": _logic(row) for name, row in {
        "and": "both", "or": "either", "not": "negation"}.items()},
    **{f"{name}.{form}": _bits(name)
        for form in ("Tensor", "Scalar", "Scalar_Tensor")
        for name in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    "bitwise_not.default": _complement,
    **{f"bitwise_{way}_shift.{form}": _shift(way)
        for form in ("Tensor", "Tensor_Scalar", "Scalar_Tensor") for way in ("left", "right")},
    **{f"__{way[0]}shift__.{form}": _shift(way)
        for form in ("Tensor", "Scalar") for way in ("left", "right")},
}  # fmt: skip
