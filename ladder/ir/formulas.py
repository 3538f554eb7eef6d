"""Composite operators of one value as operators that machines have, for graphs as for kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ladder.ir import scalars


class Writer(Protocol):
    """Applies element-wise operators to values and numbers."""

    def __call__(self, operator: str, *operands: Any) -> Any:
        """Return the result, a value; operands are values, or numbers of their type."""

    def kept(self, value: Any) -> Any:
        """Return a value that is used several times."""


ERF_COEFFICIENTS = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
"""Abramowitz & Stegun, Handbook of Mathematical Functions, 7.1.26: |error| <= 1.5e-7."""

ERF_SERIES = tuple(2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(7))
"""Of ``erf(x) / x`` in powers of x squared, lowest first; the next term is below 1e-9 up to `ERF_NEAR`."""

ERF_NEAR = 0.5


def _one_and_exp(w: Writer, x: Any) -> Any:
    return w("add", 1.0, w("exp", w("neg", x)))


def _sigmoid(w: Writer, x: Any) -> Any:
    """Return ``1 / (1 + exp(-x))``; an overflowing exponential gives the correct 0."""
    return w("div", 1.0, _one_and_exp(w, x))


def _tanh(w: Writer, x: Any) -> Any:
    """Return ``(1 - e) / (1 + e)``, ``e = exp(-2 |x|)``, with the sign of x; a polynomial near 0."""
    magnitude = w.kept(w("abs", x))
    small = w.kept(w("exp", w("mul", magnitude, -2.0)))
    far = w.kept(w("div", w("sub", 1.0, small), w("add", 1.0, small)))
    signed = w("select", w("less", x, 0.0), w("neg", far), far)
    square = w.kept(w("square", x))
    near = w("mul", x, w("fused", square, w("fused", square, 2 / 15, -1 / 3), 1.0))
    return w("select", w("less", magnitude, 0.05), near, signed)


def _complementary_erf(w: Writer, x: Any) -> Any:
    """Return ``1 - erf(x)`` for x >= 0 to 1.5e-7: no device library."""
    t = w.kept(w("div_ftz", 1.0, w("fused", x, 0.3275911, 1.0)))
    polynomial = w("fused", t, ERF_COEFFICIENTS[-1], ERF_COEFFICIENTS[-2])
    for coefficient in reversed(ERF_COEFFICIENTS[:-2]):
        polynomial = w("fused", polynomial, t, coefficient)
    return w("mul", w("mul", polynomial, t), w("exp_ftz", w("neg", w("square", x))))


def _erf(w: Writer, x: Any) -> Any:
    """Return the error function: its series near 0, else to 1.5e-7."""
    magnitude = w.kept(w("abs", x))
    above = w.kept(w("sub", 1.0, _complementary_erf(w, magnitude)))
    square = w.kept(w("square", x))
    series = w("fused", square, ERF_SERIES[-1], ERF_SERIES[-2])
    for coefficient in ERF_SERIES[-3::-1]:
        series = w("fused", series, square, coefficient)
    signed = w("select", w("less", x, 0.0), w("neg", above), above)
    return w("select", w("less", magnitude, ERF_NEAR), w("mul", x, series), signed)


def _gelu(w: Writer, x: Any) -> Any:
    """Return ``x * (1 + erf(x / sqrt 2)) / 2``, of ``erfc(|x| / sqrt 2) / 2`` or what it lacks to 1."""
    magnitude = w("abs", x)
    tail = _complementary_erf(w, w.kept(w("mul", magnitude, math.sqrt(0.5))))
    below = w.kept(w("mul", tail, 0.5))
    return w("mul", x, w("select", w("less", x, 0.0), below, w("sub", 1.0, below)))


def _gelu_tanh(w: Writer, x: Any) -> Any:
    """Return the tanh approximation of GELU, as ``x * sigmoid(2u)``, since (1 + tanh u) / 2 = sigmoid(2u)."""
    cubic = w("fused", w("square", x), 0.044715, 1.0)
    twice = w("mul", w("mul", x, 2 * math.sqrt(2 / math.pi)), cubic)
    return w("mul", x, _sigmoid(w, twice))


FORMULAS: Mapping[str, Callable[[Writer, Any], Any]] = {
    "sigmoid": _sigmoid,
    "silu": lambda w, x: w("div", x, _one_and_exp(w, x)),
    "tanh": _tanh,
    "erf": _erf,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda w, x: w("maximum", x, 0.0),
}
"""Operator of one value -> what it is made of."""


class _OfScalars:
    """Writes TIR scalars of the type of one."""

    def __init__(self, like: Any) -> None:
        self.like = like

    def __call__(self, operator: str, *operands: Any) -> Any:
        from ladder.ir.ops import get_operator

        lower = get_operator(operator).lower
        assert lower is not None, operator
        numbers = (scalars.like(self.like, x) if isinstance(x, float) else x for x in operands)
        return lower(*numbers)

    def kept(self, value: Any) -> Any:
        return scalars.kept(value)


def of_scalars(operator: str) -> Callable[[Any], Any]:
    """Return a composite operator as a function of a TIR scalar."""
    return lambda x: FORMULAS[operator](_OfScalars(x), scalars.kept(x))
