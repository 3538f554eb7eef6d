"""Arithmetic of TIR expressions, on numbers and arrays alike."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ladder.simulate.cohort import Cohort
from ladder.simulate.values import MASKS, NUMPY, Array, Value, element_of, is_array


def _floordiv(a: Value, b: Value) -> Value:
    if b.__class__ is int and b > 0 and b & (b - 1) == 0:
        return a >> (b.bit_length() - 1)
    return a // b


def _floormod(a: Value, b: Value) -> Value:
    if b.__class__ is int and b > 0 and b & (b - 1) == 0:
        return a & (b - 1)
    return a % b


def _divide(a: Value, b: Value) -> Value:
    """Divide as C does: towards zero, or floats as they are."""
    if isinstance(a, (float, np.floating)) or (is_array(a) and a.dtype.kind == "f"):
        return a / b
    if is_array(a) or is_array(b):
        quotient, rest = np.divmod(a, b)
        return quotient + ((rest != 0) & (np.less(a, 0) != np.less(b, 0))).astype(quotient.dtype)
    return _signed(abs(a) // abs(b), a, b)


def _signed(quotient: int, a: int, b: int) -> int:
    return -quotient if (a < 0) != (b < 0) else quotient


def _and(a: Value, b: Value) -> Value:
    return np.logical_and(a, b) if is_array(a) or is_array(b) else a and b


def _or(a: Value, b: Value) -> Value:
    return np.logical_or(a, b) if is_array(a) or is_array(b) else a or b


BINARY: dict[str, Callable[[Value, Value], Value]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "FloorDiv": _floordiv,
    "FloorMod": _floormod,
    "Div": _divide,
    "Mod": lambda a, b: a - _divide(a, b) * b,
    "Min": lambda a, b: np.minimum(a, b) if is_array(a) or is_array(b) else min(a, b),
    "Max": lambda a, b: np.maximum(a, b) if is_array(a) or is_array(b) else max(a, b),
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "And": _and,
    "Or": _or,
    "BitwiseAnd": operator.and_,
    "BitwiseOr": operator.or_,
    "BitwiseXor": operator.xor,
    "LShift": operator.lshift,
    "RShift": operator.rshift,
}
"""TIR node -> operator."""

NEUTRAL = {("Add", 0), ("Mul", 1)}
"""Operands that change nothing, on either side."""

COMPARISONS = ("EQ", "NE", "LT", "LE", "GT", "GE", "And", "Or")


def binary(kind: str, a: Any, b: Any, dtype: str) -> Any:
    """Return an operation on numbers or closures: a number if both are known, else a closure.

    Integers of threads that agree are Python's, so unsigned ones are brought back into range here.
    """
    function, mask = BINARY[kind], 0 if kind in COMPARISONS else MASKS.get(element_of(dtype)[0], 0)
    if not callable(a) and not callable(b):
        value = function(a, b)
        return value & mask if mask else value
    if b.__class__ is int and (kind, b) in NEUTRAL:
        return a
    if a.__class__ is int and (kind, a) in NEUTRAL:
        return b
    result = _closure(function, a, b)
    return _masked(result, mask) if mask else result


def _closure(function: Callable[[Value, Value], Value], a: Any, b: Any) -> Callable[[Cohort], Value]:
    if not callable(b):
        return lambda c: function(a(c), b)
    if not callable(a):
        return lambda c: function(a, b(c))
    return lambda c: function(a(c), b(c))


def _masked(read: Callable[[Cohort], Value], mask: int) -> Callable[[Cohort], Value]:
    def value(c: Cohort) -> Value:
        found = read(c)
        return found & mask if found.__class__ is int else found

    return value


def select(condition: Any, then: Any, other: Any, dtype: str) -> Any:
    """Return ``condition ? then : other``, both of which may be evaluated."""
    if not callable(condition):
        return then if condition else other
    first, second = (part if callable(part) else (lambda c, part=part: part) for part in (then, other))
    kind = NUMPY[dtype]

    def value(c: Cohort) -> Value:
        chosen = condition(c)
        if not is_array(chosen):
            return first(c) if chosen else second(c)
        return np.where(chosen, first(c), second(c)).astype(kind, copy=False)

    return value


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[x.dtype])(x)  # type: ignore[no-any-return]


UNARY: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "tanh": np.tanh,
    "cos": np.cos,
    "sin": np.sin,
    "sigmoid": lambda x: np.float32(1) / (np.float32(1) + np.exp(-x)),
    "erf": _erf,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "nearbyint": np.rint,
    "trunc": np.trunc,
    "fabs": np.abs,
}
"""Functions of one float; their last bits differ from those of CUDA's library."""

UNARY_CALLS = {f"{space}.{name}": function for name, function in UNARY.items() for space in ("tirx", "prim")}
