"""Scalar lowerings: the ``lower`` column of the operator table.

Each function takes TIR scalars of one type and returns a TIR scalar. TVM is imported on the first call.

TVM's simplifier takes floats for reals and integers for whole numbers: it makes 0 of ``x - x``, true of
``x == x`` and x of ``(x + y) - y``. What computes with data is therefore `opaque` to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import ml_dtypes
import numpy as np

_CHEAP: ContextVar[Mapping[str, Callable[..., Any]]] = ContextVar("cheap functions")


@contextmanager
def using(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Lower ``exp`` and ``div`` to these functions of TIR scalars, also within other functions.

    The one named ``keep`` puts a value into a register, so that what is used often is computed once.
    """
    token = _CHEAP.set(functions)
    try:
        yield
    finally:
        _CHEAP.reset(token)


def _cheap(name: str) -> Callable[..., Any] | None:
    return _CHEAP.get({}).get(name)


def kept(x: Any) -> Any:
    """Return a value in a register if the kernel has set ``keep``, else unchanged."""
    keep = _cheap("keep")
    return x if keep is None else keep(x)


def names_values() -> bool:
    """Tell whether the kernel has set ``keep``."""
    return _cheap("keep") is not None


def _tirx() -> Any:
    from tvm import tirx  # type: ignore[import-untyped, unused-ignore]

    return tirx


def like(x: Any, value: float) -> Any:
    """Return a constant of the type of ``x``."""
    return _tirx().const(value, str(x.ty.dtype))


def opaque(x: Any) -> Any:
    """Return a value that TVM's simplifier does not see through: its bits taken for the type that they have.

    No instruction comes of it, and the device's compiler sees through it. A float that is known is its
    magnitude, with a sign; integers are left as they are.
    """
    tirx = _tirx()
    kind, dtype = type(x).__name__, str(x.ty.dtype)
    if kind == "IntImm":
        return x
    if kind != "FloatImm":
        return tirx.call_intrin(dtype, "tirx.reinterpret", x)
    magnitude = tirx.call_intrin(dtype, "tirx.fabs", like(x, abs(x.value)))
    return like(x, -0.0) - magnitude if math.copysign(1, x.value) < 0 else magnitude


def chosen(condition: Any, yes: Any, no: Any) -> Any:
    """Return a select over the bits of its operands: TVM bounds nested selects in exponential time."""
    tirx, dtype = _tirx(), str(yes.ty.dtype)
    if type(condition).__name__ == "IntImm":  # TVM has no bits of a choice that folds to 0
        return yes if condition.value else no
    if type(yes).__name__ == type(no).__name__ == "IntImm" and yes.value == no.value:
        return yes
    found = tirx.Select(condition, yes, no)
    if dtype == "bool":
        return found
    kind, bits = ("uint" if dtype.startswith("int") else "int"), "".join(filter(str.isdigit, dtype))
    as_bits = tirx.call_intrin(f"{kind}{bits}", "tirx.reinterpret", found)
    return tirx.call_intrin(dtype, "tirx.reinterpret", as_bits)


def _applied(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Apply an operator so that neither equal operands, nor known ones, nor what they are made of show."""
    first = opaque(a) if type(a).__name__ == "FloatImm" else a
    return opaque(function(first, opaque(b)))


def is_float(x: Any) -> bool:
    """Tell whether a scalar is a floating-point number."""
    return str(x.ty.dtype).startswith(("float", "bfloat"))


def _cast(dtype: str, x: Any) -> Any:
    return _tirx().Cast(dtype, x)


def reinterpreted(dtype: str, x: Any) -> Any:
    """Return the bits of a scalar as another type of as many bits.

    Those of a known one are computed here: CUDA C++ takes no address of a literal, and TVM has no bits of a
    known 0. A NaN loses its payload.
    """
    tirx = _tirx()
    if type(x).__name__ not in ("IntImm", "FloatImm"):
        return tirx.call_intrin(dtype, "tirx.reinterpret", x)

    held, wanted = (np.dtype(getattr(ml_dtypes, name, name)) for name in (str(x.ty.dtype), dtype))
    value = x.value % (1 << 8 * held.itemsize) if held.kind == "u" else x.value
    (found,) = np.array([value], held).view(wanted)
    return tirx.const(int(found) if wanted.kind in "iub" else float(found), dtype)


def _wrapped(function: Callable[[Any, Any], Any], in_halves: Callable[..., Any], a: Any, b: Any) -> Any:
    """Apply an operator so that integers wrap around.

    Code generation tells LLVM that 32 and 64 bits, signed or not, never overflow. So 32 bits are computed as
    64, and 64 as words of 32 in registers of 64, by a function of their lower and upper words.
    """
    dtype = str(a.ty.dtype)
    if dtype not in ("int32", "int64"):
        return _applied(function, a, b)
    if dtype == "int32":
        return opaque(_cast("int32", function(*(_cast("int64", opaque(x)) for x in (a, b)))))
    pairs = [_words(kept(x)) for x in (a, b)]
    low, high = in_halves(*pairs)
    low = kept(low)
    joined = (high + (low >> _word(32))) << _word(32) | low & _word(_LOW)
    return reinterpreted(dtype, joined)


_LOW = 0xFFFFFFFF

Words = tuple[Any, Any]


def _word(value: int) -> Any:
    return _tirx().const(value, "uint64")


def _words(x: Any) -> Words:
    """Return the lower and the upper 32 bits."""
    bits = reinterpreted("uint64", x)
    return bits & _word(_LOW), bits >> _word(32)


def _sum_of_words(a: Words, b: Words) -> Words:
    return a[0] + b[0], a[1] + b[1]


def _difference_of_words(a: Words, b: Words) -> Words:
    """Add the complement and 1."""
    return a[0] + ((b[0] ^ _word(_LOW)) + _word(1)), a[1] + (b[1] ^ _word(_LOW))


def _product_of_words(a: Words, b: Words) -> Words:
    crossed = (a[0] * b[1] & _word(_LOW)) + (a[1] * b[0] & _word(_LOW))
    return a[0] * b[0], crossed


def add(a: Any, b: Any) -> Any:
    """Return ``a + b``."""
    return _wrapped(lambda x, y: x + y, _sum_of_words, a, b)


def subtract(a: Any, b: Any) -> Any:
    """Return ``a - b``."""
    return _wrapped(lambda x, y: x - y, _difference_of_words, a, b)


def multiply(a: Any, b: Any) -> Any:
    """Return ``a * b``."""
    return _wrapped(lambda x, y: x * y, _product_of_words, a, b)


def unsigned(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return an operator of unsigned integers for signed ones: in C those wrap around, these must not.

    What is known of both is computed here: TVM refuses an unsigned number below 0.
    """

    def applied(a: Any, b: Any) -> Any:
        dtype = str(a.ty.dtype)
        if dtype not in ("int32", "int64"):
            return _applied(function, a, b)
        if type(a).__name__ == type(b).__name__ == "IntImm":
            half = 1 << (int(dtype[3:]) - 1)
            return _tirx().const((function(int(a), int(b)) + half) % (2 * half) - half, dtype)
        bits = (reinterpreted(f"u{dtype}", x) for x in (a, b))
        return reinterpreted(dtype, function(*bits))

    return applied


def fused(a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c``, rounded once where the device's compiler sees to it."""
    return opaque(a * b + opaque(c))


def divide(a: Any, b: Any) -> Any:
    """Return ``a / b``."""
    return _applied(_cheap("div") or _tirx().div, a, b)


def quotient(a: Any, b: Any) -> Any:
    """Return ``a / b`` rounded toward 0; of integers, 0 where b is 0, and wrapped around where b is -1."""
    if is_float(a):
        return _tirx().trunc(divide(a, b))
    if type(b).__name__ == "IntImm" and b.value not in (0, -1):
        return opaque(_tirx().truncdiv(opaque(a), b))
    tirx, b = _tirx(), opaque(b)
    usual = tirx.And(*(tirx.NE(b, like(a, value)) for value in (0, -1)))  # others' quotients always exist
    found = tirx.truncdiv(opaque(a), opaque(chosen(usual, b, like(a, 1))))
    return chosen(usual, opaque(found), multiply(a, b))


_STEP, _STEPS = 28, 10
"""Binary digits of a quotient that a division of float64 finds, and how many divisions find all."""


def left_over(a: Any, b: Any) -> Any:
    """Return what division rounded toward 0 leaves of a float32, exactly, with the sign of ``a``.

    Quotients of float64 by a divisor shifted to the left have few digits, so each step's rest is exact.
    """
    tirx = _tirx()
    size, divisor = (kept(_cast("float64", absolute(opaque(x)))) for x in (a, b))
    rest = size
    for step in reversed(range(_STEPS)):
        shifted = kept(divisor * like(divisor, 2.0 ** (_STEP * step)))
        whole = tirx.trunc(opaque(rest / shifted))
        rest = kept(opaque(rest - opaque(whole * shifted)))
    infinite = tirx.And(equal(divisor, like(divisor, math.inf)), less(size, like(size, math.inf)))
    found = _cast("float32", chosen(infinite, size, rest))
    sign = bitwise_and(bits(a), _tirx().const(-(1 << 31), "int32"))
    return of_bits(bitwise_or(bits(found), sign))


def _of_bits(name: str) -> Callable[[Any, Any], Any]:
    """Return an operator of the bits of two integers."""
    return lambda a, b: _applied(getattr(_tirx(), name), a, b)


def bits(x: Any) -> Any:
    """Return the bits of a float32 as an int32."""
    return reinterpreted("int32", x)


def of_bits(x: Any) -> Any:
    """Return the float32 whose bits an int32 is."""
    return reinterpreted("float32", x)


bitwise_and, bitwise_or, bitwise_xor = map(_of_bits, ("bitwise_and", "bitwise_or", "bitwise_xor"))


def shift_left(a: Any, b: Any) -> Any:
    """Return an integer shifted to the left; 0 where b is negative, or as large as there are bits."""
    usual, steps = _steps(b, 0)
    found = _applied(_tirx().shift_left, a, steps)
    return found if usual is True else chosen(usual, found, like(a, 0))


def shift_right(a: Any, b: Any) -> Any:
    """Return an integer shifted to the right; its sign everywhere where b is negative, or too large."""
    return _applied(_tirx().shift_right, a, _steps(b, _width(b) - 1)[1])


def _steps(b: Any, otherwise: int) -> tuple[Any, Any]:
    """Tell whether an integer has as many bits, and return by how many it is shifted; else ``otherwise``."""
    if type(b).__name__ == "IntImm":
        usual = 0 <= b.value < _width(b)
        return usual, b if usual else like(b, otherwise)
    b = kept(b)
    usual = _tirx().And(less_equal(like(b, 0), b), less(b, like(b, _width(b))))
    return usual, chosen(usual, b, like(b, otherwise))


def _width(x: Any) -> int:
    """Return the bits of an integer."""
    return int(str(x.ty.dtype).removeprefix("int"))


def divide_ftz(a: Any, b: Any) -> Any:
    """Return ``a / b`` of a b whose reciprocal is a normal number, or 0 or infinity as b itself."""
    cheap = _cheap("div_ftz")
    return divide(a, b) if cheap is None else _applied(cheap, a, b)


def maximum(a: Any, b: Any) -> Any:
    """Return the greater of two, NaN if one is."""
    return _extreme(_tirx().max, lambda x, y: less(y, x), a, b)


def minimum(a: Any, b: Any) -> Any:
    """Return the lesser of two, NaN if one is."""
    return _extreme(_tirx().min, less, a, b)


def _extreme(whole: Callable[..., Any], first: Callable[..., Any], a: Any, b: Any) -> Any:
    """Return a if it comes first or is NaN, else b, which may be NaN; one that is known is not looked at."""
    if not is_float(a):
        return _applied(whole, a, b)
    if is_number(a):
        a, b = b, a
    a = kept(a)
    if is_number(b):
        return chosen(first(b, a), b, a)
    b = kept(b)
    return chosen(equal(a, a), _tirx().Select(first(a, b), a, b), a)


def is_number(x: Any) -> bool:
    """Tell whether a float is known, see `opaque`, and is one."""
    value = known(x)
    return value is not None and not math.isnan(value)


def known(x: Any) -> float | None:
    """Return a float that is known, also where it is `opaque`; else None."""
    sign = 1.0
    while type(x).__name__ != "FloatImm":
        if type(x).__name__ == "Sub" and type(x.a).__name__ == "FloatImm":
            x, sign = x.b, -sign
        elif getattr(getattr(x, "op", None), "name", "") in ("tirx.fabs", "tirx.reinterpret"):
            x = x.args[0]
        else:
            return None
    return sign * float(x.value)


def negate(x: Any) -> Any:
    """Return ``-x``."""
    return opaque(like(x, -0.0) - opaque(x)) if is_float(x) else subtract(like(x, 0), x)


def square(x: Any, product: Callable[[Any, Any], Any] | None = None) -> Any:
    """Return ``x * x``, as ``product`` multiplies if given."""
    x = kept(x)
    return (product or multiply)(x, x)


def exp(x: Any) -> Any:
    """Return the exponential."""
    return (_cheap("exp") or _tirx().exp)(x)


def exp_ftz(x: Any) -> Any:
    """Return the exponential; 0 where that is subnormal and a device flushes it to zero."""
    return (_cheap("exp_ftz") or exp)(x)


def _of_tir(name: str) -> Callable[..., Any]:
    """Return the function of TIR scalars that TVM has by a name."""
    return lambda *operands: getattr(_tirx(), name)(*operands)


sqrt, log, log10, log2 = map(_of_tir, ("sqrt", "log", "log10", "log2"))
exp2, sin, cos, power = map(_of_tir, ("exp2", "sin", "cos", "pow"))
floor, nearest = _of_tir("floor"), _of_tir("nearbyint")
"""The greatest whole number that is not above, and the nearest, the even one of two."""

both, either, negation = _of_tir("And"), _of_tir("Or"), _of_tir("Not")


BEYOND_ONE = (
    *(0.33333451, -0.25000098, 0.19990826, -0.16647206),
    *(0.14478761, -0.13162799, 0.10464279, -0.04507043),
)
"""Coefficients of ``(log(1 + m) - m + m ** 2 / 2) / m ** 3``, m from -1/4 to 1/2, within 5e-9 of the log."""


def log_beyond_one(x: Any) -> Any:
    """Return ``log(1 + x)`` of a float32, within two units in its last place.

    It is ``e log 2 + log(1 + m)``, where 1 + m is (1 + x) / 2 ** e, from 3/4 to 3/2, and m is never rounded
    where e is 0.
    """
    tirx = _tirx()
    between = tirx.And(less(like(x, -1), x), less(x, like(x, math.inf)))
    usual = tirx.And(between, negation(equal(x, like(x, 0))))
    inside = kept(chosen(usual, x, like(x, 1)))
    three_quarters, four = (reinterpreted("int32", like(x, value)) for value in (0.75, 4.0))
    above = reinterpreted("int32", opaque(inside + like(x, 1))) - three_quarters
    power = kept(above & tirx.const(-(1 << 23), "int32"))  # e, where the exponent lies in a float
    less_one = fused(reinterpreted("float32", four - power), like(x, 0.25), like(x, -1))
    m = kept(opaque(reinterpreted("float32", reinterpreted("int32", inside) - power) + less_one))
    found = like(x, BEYOND_ONE[-1])
    for coefficient in (*BEYOND_ONE[-2::-1], -0.5):
        found = fused(found, m, like(x, coefficient))
    found = fused(multiply(found, m), m, m)
    found = fused(_cast("float32", power), like(x, math.log(2) / (1 << 23)), found)
    unusual = chosen(less(x, like(x, -1)), like(x, math.nan), x)
    unusual = chosen(equal(x, like(x, -1)), like(x, -math.inf), unusual)
    return chosen(usual, found, unusual)


def log_of_sum(a: Any, b: Any) -> Any:
    """Return ``log(exp(a) + exp(b))`` of float32, which neither overflows nor vanishes."""
    a, b = kept(a), kept(b)
    apart = chosen(equal(a, b), like(a, 0), absolute(subtract(a, b)))  # infinities have no difference
    return add(maximum(a, b), log_beyond_one(exp(negate(apart))))


def rsqrt(x: Any) -> Any:
    """Return ``1 / sqrt(x)``."""
    return divide(like(x, 1.0), _tirx().sqrt(x))


def absolute(x: Any) -> Any:
    """Return the magnitude; the least integer has none, and stays."""
    return _tirx().abs(x) if is_float(x) else chosen(less(x, like(x, 0)), negate(x), x)


def less(a: Any, b: Any) -> Any:
    """Return ``a < b``."""
    return _applied(lambda x, y: x < y, a, b)


def less_equal(a: Any, b: Any) -> Any:
    """Return ``a <= b``."""
    return _applied(lambda x, y: x <= y, a, b)


def equal(a: Any, b: Any) -> Any:
    """Return ``a == b``."""
    return _applied(_tirx().EQ, a, b)


def select(condition: Any, yes: Any, no: Any) -> Any:
    """Return ``yes`` where the condition holds, else ``no``; both are evaluated."""
    return chosen(condition, yes, no)
