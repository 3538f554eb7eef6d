"""Scalar lowerings: the ``lower`` column of the operator table.

Each function takes TIR scalars of one floating-point type and returns a TIR scalar. TVM is
imported on the first call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_CHEAP: ContextVar[Mapping[str, Callable[..., Any]]] = ContextVar("cheap functions")


@contextmanager
def using(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Lower ``exp`` and ``div`` to these functions of TIR scalars, also within other functions.

    ``keep`` among them returns a register with a value: what a function uses several times is computed once.
    """
    token = _CHEAP.set(functions)
    try:
        yield
    finally:
        _CHEAP.reset(token)


def _cheap(name: str) -> Callable[..., Any] | None:
    return _CHEAP.get({}).get(name)


def kept(x: Any) -> Any:
    """Return a value in a register, where kernels have given a way to."""
    keep = _cheap("keep")
    return x if keep is None else keep(x)


def _tirx() -> Any:
    from tvm import tirx  # type: ignore[import-untyped, unused-ignore]

    return tirx


def _like(x: Any, value: float) -> Any:
    """Return a constant of the type of ``x``."""
    return _tirx().const(value, str(x.ty.dtype))


def add(a: Any, b: Any) -> Any:
    """Return ``a + b``."""
    return a + b


def subtract(a: Any, b: Any) -> Any:
    """Return ``a - b``."""
    return a - b


def multiply(a: Any, b: Any) -> Any:
    """Return ``a * b``."""
    return a * b


def divide(a: Any, b: Any) -> Any:
    """Return ``a / b``."""
    return (_cheap("div") or _tirx().div)(a, b)


def maximum(a: Any, b: Any) -> Any:
    """Return the greater of two."""
    return _tirx().max(a, b)


def minimum(a: Any, b: Any) -> Any:
    """Return the lesser of two."""
    return _tirx().min(a, b)


def negate(x: Any) -> Any:
    """Return ``-x``."""
    return _like(x, 0.0) - x


def square(x: Any) -> Any:
    """Return ``x * x``."""
    return x * x


def relu(x: Any) -> Any:
    """Return ``max(x, 0)``."""
    return _tirx().max(x, _like(x, 0.0))


def exp(x: Any) -> Any:
    """Return the exponential."""
    return (_cheap("exp") or _tirx().exp)(x)


def sqrt(x: Any) -> Any:
    """Return the square root."""
    return _tirx().sqrt(x)


def rsqrt(x: Any) -> Any:
    """Return ``1 / sqrt(x)``."""
    return divide(_like(x, 1.0), _tirx().sqrt(x))


def sigmoid(x: Any) -> Any:
    """Return ``1 / (1 + exp(-x))``; an overflowing exponential gives the correct 0."""
    return divide(_like(x, 1.0), _like(x, 1.0) + exp(negate(x)))


def silu(x: Any) -> Any:
    """Return ``x / (1 + exp(-x))``."""
    return divide(x, _like(x, 1.0) + exp(negate(x)))


def tanh(x: Any) -> Any:
    """Return ``(1 - e) / (1 + e)``, ``e = exp(-2 |x|)``, with the sign of x; x itself near 0."""
    tirx = _tirx()
    zero, one = _like(x, 0.0), _like(x, 1.0)
    magnitude = tirx.max(x, negate(x))
    small = kept(exp(magnitude * _like(x, -2.0)))
    far = divide(one - small, one + small)
    cubic = x * (one - x * x * _like(x, 1 / 3) + x * x * x * x * _like(x, 2 / 15))
    return tirx.Select(magnitude < _like(x, 0.05), cubic, tirx.Select(x < zero, negate(far), far))


ERF_COEFFICIENTS = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
"""Abramowitz & Stegun, Handbook of Mathematical Functions, 7.1.26: |error| <= 1.5e-7."""


def complementary_erf(x: Any) -> Any:
    """Return ``1 - erf(x)`` for x >= 0 to 1.5e-7 (Abramowitz & Stegun 7.1.26): no device library."""
    one = _like(x, 1.0)
    t = kept(divide(one, one + x * _like(x, 0.3275911)))
    polynomial = _like(x, 0.0)
    for coefficient in reversed(ERF_COEFFICIENTS):
        polynomial = (polynomial + _like(x, coefficient)) * t
    return polynomial * exp(negate(x * x))


def gelu(x: Any) -> Any:
    """Return ``x * (1 + erf(x / sqrt 2)) / 2``, as ``max(x, 0) - |x| * erfc(|x| / sqrt 2) / 2``."""
    magnitude = kept(_tirx().max(x, negate(x)))
    tail = complementary_erf(kept(magnitude * _like(x, math.sqrt(0.5))))
    return relu(x) - magnitude * _like(x, 0.5) * tail


def gelu_tanh(x: Any) -> Any:
    """Return the tanh approximation of GELU, as ``x * sigmoid(2u)``, since (1 + tanh u) / 2 = sigmoid(2u)."""
    u = x * _like(x, math.sqrt(2 / math.pi)) * (_like(x, 1.0) + x * x * _like(x, 0.044715))
    return x * sigmoid(u * _like(x, 2.0))


def log(x: Any) -> Any:
    """Return the natural logarithm."""
    return _tirx().log(x)


def sin(x: Any) -> Any:
    """Return the sine."""
    return _tirx().sin(x)


def cos(x: Any) -> Any:
    """Return the cosine."""
    return _tirx().cos(x)


def absolute(x: Any) -> Any:
    """Return the magnitude."""
    return _tirx().max(x, negate(x))


def floor(x: Any) -> Any:
    """Return the greatest whole number that is not above."""
    return _tirx().floor(x)


def nearest(x: Any) -> Any:
    """Return the nearest whole number, the even one of two."""
    return _tirx().nearbyint(x)


def erf(x: Any) -> Any:
    """Return the error function to 1.5e-7."""
    magnitude = absolute(x)
    above = _like(x, 1.0) - complementary_erf(magnitude)
    return _tirx().Select(x < _like(x, 0.0), negate(above), above)


def power(x: Any, exponent: Any) -> Any:
    """Return ``x ** exponent``."""
    return _tirx().pow(x, exponent)


def less(a: Any, b: Any) -> Any:
    """Return ``a < b``."""
    return a < b


def less_equal(a: Any, b: Any) -> Any:
    """Return ``a <= b``."""
    return a <= b


def equal(a: Any, b: Any) -> Any:
    """Return ``a == b``."""
    return _tirx().EQ(a, b)


def both(a: Any, b: Any) -> Any:
    """Return whether both are true."""
    return _tirx().And(a, b)


def either(a: Any, b: Any) -> Any:
    """Return whether one is true."""
    return _tirx().Or(a, b)


def negation(a: Any) -> Any:
    """Return whether it is false."""
    return _tirx().Not(a)


def select(condition: Any, yes: Any, no: Any) -> Any:
    """Return ``yes`` where the condition holds, else ``no``; both are evaluated."""
    return _tirx().Select(condition, yes, no)
