"""Operators that compute each element alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from math import inf
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ladder.runtime.onnx_ops.operation import Operation, Run
from ladder.runtime.onnx_ops.values import array_of, narrow, ordered, restored, value_of, wide


def unary(function: Callable[[Any], Any]) -> Run:
    """Return the row of a function of one tensor that keeps its type."""

    def run(op: Operation, x: Any, *rest: Any) -> Any:
        return narrow(function(wide(x)), x.dtype)

    return run


def aligned(op: Operation, a: Any, b: Any) -> tuple[Any, Any]:
    """Return operands that broadcast as numpy has it; before opset 7, `axis` says where the second begins."""
    if op.version < 7 and op.get("broadcast") and op.get("axis") is not None:
        axis = op.get("axis") % a.ndim
        b = b.reshape(*b.shape, *[1] * (a.ndim - axis - b.ndim))
    return a, b


def binary(function: Callable[[Any, Any], Any]) -> Run:
    """Return the row of a function of two tensors of one type."""

    def run(op: Operation, a: Any, b: Any) -> Any:
        x, y = aligned(op, wide(a), wide(b))
        return narrow(function(x, y), a.dtype)

    return run


def compared(function: Callable[[Any, Any], Any]) -> Run:
    """Return the row of a comparison."""

    def run(op: Operation, a: Any, b: Any) -> Any:
        if isinstance(a, np.ndarray):
            return torch.from_numpy(np.asarray(function(a, b), dtype=bool))
        return function(*aligned(op, ordered(a), ordered(b)))

    return run


def folded(function: Callable[[Any, Any], Any]) -> Run:
    """Return the row of a function of any number of tensors."""

    def run(op: Operation, *values: Any) -> Any:
        return restored(reduce(function, map(ordered, values)), values[0].dtype)

    return run


def _sum(op: Operation, *values: Any) -> Any:
    return narrow(reduce(torch.add, map(wide, values)), values[0].dtype)


def _by_numpy(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    return value_of(function(array_of(a), array_of(b))).to(a.device)


def _divide(op: Operation, a: Any, b: Any) -> Any:
    if a.dtype == torch.uint64:
        if not array_of(b).all():
            raise ZeroDivisionError("integers divided by zero")
        return _by_numpy(np.floor_divide, a, b)
    x, y = aligned(op, wide(a), wide(b))
    if x.is_floating_point() or x.is_complex():
        return narrow(torch.div(x, y), a.dtype)
    return narrow(_quotient(x, y), a.dtype)


def _quotient(x: Any, y: Any) -> Any:
    """Divide integers, rounded toward 0: the least number by -1, where processors trap, wraps."""
    negates = y == -1
    if not negates.any():
        return torch.div(x, y, rounding_mode="trunc")
    return torch.where(negates, -x, torch.div(x, torch.where(negates, 1, y), rounding_mode="trunc"))


def _modulo(op: Operation, a: Any, b: Any) -> Any:
    if a.dtype == torch.uint64:
        return _by_numpy(np.remainder, a, b)
    function = torch.fmod if op.get("fmod", 0) else _floored
    return narrow(function(wide(a), wide(b)), a.dtype)


def _floored(a: Any, b: Any) -> Any:
    """Return the remainder with the sign of the divisor; of infinite divisors too."""
    if not a.is_floating_point():
        return torch.remainder(a, b)
    found = torch.fmod(a, b)
    found = torch.where((found != 0) & ((found < 0) != (b < 0)), found + b, found)
    return torch.where(found == 0, torch.copysign(torch.zeros_like(found), b), found)


def _power(op: Operation, a: Any, b: Any) -> Any:
    x, y = aligned(op, wide(a), wide(b))
    if not x.is_floating_point() and y.is_floating_point():
        return narrow(torch.pow(x.double(), y.double()), a.dtype)
    if not x.is_floating_point() and bool((y < 0).any()):
        return narrow(torch.pow(x.double(), y.double()).trunc(), a.dtype)
    return narrow(torch.pow(x, y.to(x.dtype) if not y.is_floating_point() else y).to(x.dtype), a.dtype)


def _shift(op: Operation, a: Any, b: Any) -> Any:
    """Shift bits; by as many as there are, or more, gives 0, or the sign of what is shifted to the right."""
    x, y, bits = wide(a), wide(b), 8 * a.element_size()
    if op.get("direction") == "LEFT":
        found = torch.where(
            y >= bits, torch.zeros_like(x), torch.bitwise_left_shift(x, y.clamp(max=bits - 1))
        )
        return narrow(found, a.dtype)
    if a.dtype == torch.uint64:
        return _by_numpy(lambda p, q: np.where(q > 63, np.uint64(0), p >> np.minimum(q, np.uint64(63))), a, b)
    return narrow(torch.bitwise_right_shift(x, y.clamp(max=8 * x.element_size() - 1)), a.dtype)


def _clip(op: Operation, x: Any, low: Any = None, high: Any = None) -> Any:
    low = op.get("min") if low is None else low
    high = op.get("max") if high is None else high
    value = ordered(x)
    for bound, function in ((low, torch.maximum), (high, torch.minimum)):
        if bound is not None:
            bound = torch.as_tensor(bound, device=x.device)
            bound = ordered(bound) if bound.dtype == x.dtype else bound.to(value.dtype)
            value = function(value, bound.reshape(()))
    return restored(value, x.dtype)


def _where(op: Operation, condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(yes, np.ndarray):
        return np.where(array_of(condition), yes, no)
    return narrow(torch.where(condition, wide(yes), wide(no)), yes.dtype)


def _selu(op: Operation, x: Any) -> Any:
    alpha, gamma = op.get("alpha", 1.6732632423543772), op.get("gamma", 1.0507009873554805)
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x))


def _celu(op: Operation, x: Any) -> Any:
    alpha = op.get("alpha", 1.0)
    return x.clamp(min=0) + (alpha * torch.expm1(x / alpha)).clamp(max=0)


def _prelu(op: Operation, x: Any, slope: Any) -> Any:
    if op.version < 7 and slope.ndim == 1 and slope.numel() > 1:
        slope = slope.reshape(-1, *[1] * (x.ndim - 2))
    return narrow(torch.where(wide(x) >= 0, wide(x), wide(x) * wide(slope)), x.dtype)


def _shrink(op: Operation, x: Any) -> Any:
    bias, edge, value = op.get("bias", 0.0), op.get("lambd", 0.5), wide(x)
    found = torch.where(value < -edge, value + bias, torch.where(value > edge, value - bias, 0))
    return narrow(found.to(value.dtype), x.dtype)


def _is_infinite(op: Operation, x: Any) -> Any:
    x = x.float() if x.element_size() == 1 else x
    high = (x == inf) & bool(op.get("detect_positive", 1))
    return high | ((x == -inf) & bool(op.get("detect_negative", 1)))


def _softplus(x: Any) -> Any:
    return torch.logaddexp(x, torch.zeros_like(x))


def _sign(x: Any) -> Any:
    """Return the sign; of NaN it is NaN, as in ONNX's reference, where torch says 0."""
    found = torch.sign(x)
    return torch.where(x.isnan(), x, found) if x.is_floating_point() else found


UNARY: Mapping[str, Callable[[Any], Any]] = {
    **{
        name: getattr(torch, name.lower())
        for name in (
            *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Erf", "Exp"),
            *("Log", "Neg", "Reciprocal", "Sigmoid", "Sin", "Sqrt", "Tan", "Tanh"),
            *("Ceil", "Floor", "Round"),
        )
    },
    # torch's vectors of float32 overflow where e^x does.
    "Cosh": lambda x: x.double().cosh().to(x.dtype),
    "Sinh": lambda x: x.double().sinh().to(x.dtype),
    "Sign": _sign,
    "Not": torch.logical_not,
    "BitwiseNot": torch.bitwise_not,
    "Relu": lambda x: x.clamp(min=0),
    "Softplus": lambda x: _softplus(x.float()).to(x.dtype) if x.element_size() == 2 else _softplus(x),
    "Softsign": F.softsign,
    "Mish": F.mish,
    "Identity": lambda x: x,
}
"""Functions of one tensor that keep its type."""

MAGNITUDES: Mapping[str, Callable[[Any], Any]] = {
    "Abs": lambda x: x,
    "Sign": lambda x: narrow((wide(x) != 0).to(torch.int64), x.dtype),
}
"""Functions that read signs -> what they are of uint64, which is computed in int64."""


def _of_magnitude(run: Run, function: Callable[[Any], Any]) -> Run:
    """Return a row with another function of uint64."""
    return lambda op, x: function(x) if x.dtype == torch.uint64 else run(op, x)


BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "And": torch.logical_and, "Or": torch.logical_or,
    "Xor": torch.logical_xor, "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip
"""Functions of two tensors that keep their type."""

ELEMENTWISE: Mapping[str, Run] = {
    **{name: unary(function) for name, function in UNARY.items()},
    **{name: _of_magnitude(unary(UNARY[name]), function) for name, function in MAGNITUDES.items()},
    **{name: binary(function) for name, function in BINARY.items()},
    **{
        name: compared(function)
        for name, function in {
            "Equal": lambda a, b: a == b, "Less": lambda a, b: a < b, "LessOrEqual": lambda a, b: a <= b,
            "Greater": lambda a, b: a > b, "GreaterOrEqual": lambda a, b: a >= b,
        }.items()
    },
    "Max": folded(torch.maximum),
    "Min": folded(torch.minimum),
    "Sum": _sum,
    "Mean": lambda op, *values: reduce(torch.add, values) / len(values),
    "Div": _divide,
    "Mod": _modulo,
    "Pow": _power,
    "BitShift": _shift,
    "Clip": _clip,
    "Where": _where,
    "LeakyRelu": lambda op, x: torch.where(x >= 0, x, x * op.get("alpha", 0.01)),
    "Elu": lambda op, x: torch.where(x < 0, op.get("alpha", 1.0) * torch.expm1(x), x),
    "Selu": _selu,
    "Celu": _celu,
    "HardSigmoid": lambda op, x: (op.get("alpha", 0.2) * x + op.get("beta", 0.5)).clamp(0, 1),
    "HardSwish": lambda op, x: x * (x / 6 + 0.5).clamp(0, 1),
    "PRelu": _prelu,
    "ThresholdedRelu": lambda op, x: torch.where(x > op.get("alpha", 1.0), x, torch.zeros_like(x)),
    "Shrink": _shrink,
    "Gelu": lambda op, x: F.gelu(x, approximate=op.get("approximate", "none")),
    "Swish": lambda op, x: x * torch.sigmoid(op.get("alpha", 1.0) * x),
    "IsNaN": lambda op, x: torch.isnan(x.float() if x.element_size() == 1 else x),
    "IsInf": _is_infinite,
}  # fmt: skip
"""Operators that compute each element alone."""
