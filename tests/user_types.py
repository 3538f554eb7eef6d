"""Types that a user might register: floats of any split, logarithms, posits, tables of any values."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from tile_types import TType, get_type, register_type


def _whole(code: Any, ops: Any) -> Any:
    """Sign, three exponent bits and one of the mantissa, without zero or subnormals."""
    magnitude = ops.exp2(ops.cast(code >> 1 & 7, "float32") - 3.0)
    magnitude = magnitude * (1.0 + 0.5 * ops.cast(code & 1, "float32"))
    return ops.select(code >= 16, -magnitude, magnitude)


def _falling(code: Any, ops: Any) -> Any:
    """Sign and a negated exponent of five bits."""
    magnitude = ops.exp2(4.0 - ops.cast(code & 15, "float32"))
    return ops.select(code >= 16, -magnitude, magnitude)


def _spaced(step: int, offset: int) -> Any:
    """Whole numbers a step apart: of some, no 16-bit float is the offset from a power of two."""
    return lambda code, ops: step * ops.cast(code, "int32") + offset


def _table(values: Any) -> Any:
    held = tuple(float(value) for value in np.asarray(values).astype(ml_dtypes.bfloat16))
    return lambda code, ops: ops.lookup(held, code)


def _signed(magnitudes: Any) -> Any:
    return np.concatenate([magnitudes, -np.asarray(magnitudes)])


def _posit(bits: int) -> Any:
    """Return the values of posits with one exponent bit; the code of "not a real" is 0 here."""
    return [_posit_value(code, bits) for code in range(1 << bits)]


def _posit_value(code: int, bits: int) -> float:
    if code in (0, 1 << (bits - 1)):
        return 0.0
    sign = code >> (bits - 1)
    text = format((-code if sign else code) & ((1 << (bits - 1)) - 1), f"0{bits - 1}b")
    run = len(text) - len(text.lstrip(text[0]))
    rest = text[run + 1 :]
    regime = run - 1 if text[0] == "1" else -run
    exponent, fraction = int(rest[:1] or "0"), rest[1:]
    value = 2.0 ** (2 * regime + exponent) * (1 + int(fraction or "0", 2) / (1 << len(fraction)))
    return -value if sign else value


def _random(bits: int) -> Any:
    return np.random.default_rng(bits).normal(size=1 << bits)


def _shuffled(bits: int) -> Any:
    return np.random.default_rng(bits).permutation(1 << bits) - (1 << (bits - 1))


FORMS: dict[str, tuple[int, Any]] = {
    "whole5": (5, _whole),
    "falling5": (5, _falling),
    "odd5": (5, _spaced(2, -31)),
    "odd7": (7, _spaced(2, -127)),
    "odd8": (8, _spaced(2, -255)),
    "below8": (8, _spaced(1, -85)),
    "negated8": (8, _spaced(-1, 0)),
    "log5": (5, _table(_signed([0.0, *(2.0 ** (e / 2) for e in range(-8, 7))]))),
    "log7": (7, _table(_signed([0.0, *(2.0 ** (e / 4) for e in range(-40, 23))]))),
    "posit3": (3, _table(_posit(3))),
    "posit6": (6, _table(_posit(6))),
    "posit8": (8, _table(_posit(8))),
    **{f"random{bits}": (bits, _table(_random(bits))) for bits in range(3, 9)},
    "shuffled4": (4, _table(_shuffled(4))),
    "shuffled6": (6, _table(_shuffled(6))),
}
"""Width and decode of each."""

FLOATS = ("fp5_e3m1", "fp6_e3m2", "fp6_e2m3", "fp7_e3m3", "fp7_e2m4", "fp8_e4m3")
"""Small floats, which the library makes by name."""

SPACED = ("odd5", "odd7", "odd8", "below8", "negated8")
"""Whole numbers a step apart."""

ARITHMETIC = ("whole5", "falling5", *SPACED, *FLOATS)
"""Types that need no table."""

SELECTED = (("posit3", "float16"),)
"""Types whose few distinct bytes are selected in registers, cheaper than from a table, and for which core."""


@cache
def _of_form(name: str) -> TType:
    bits, decode = FORMS[name]
    return TType(name, bits, decode)


def user_type(name: str) -> TType:
    """Return a type of `FORMS`, registered until the test ends, or one of the library."""
    return register_type(_of_form(name)) if name in FORMS else get_type(name)
