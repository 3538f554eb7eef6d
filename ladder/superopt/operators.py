"""torch's operators as steps of a traced program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ladder.superopt.tracer import OverSize, Traced, Tracer
from tile_types.errors import ConversionError


def _matmul(t: Tracer, a: Traced, b: Traced) -> Traced:
    a, b = t.value(a), t.value(b)
    if len(a.axes) < 2 or len(b.axes) < 2:
        raise ConversionError("matmul of a vector is not taken; give it an axis of one element")
    t.dimensions.join(a.axes[-1], b.axes[-2])
    leading = []
    for x, y in zip(_leading(a, b), _leading(b, a), strict=True):
        leading.append(t.dimensions.join(x, y) if x and y else x or y)
    plain = replace(b, transposed=False)
    return t.add("matmul", (a, plain), (*leading, a.axes[-2], b.axes[-1]), transpose_b=b.transposed)


def _linear(t: Tracer, x: Traced, weight: Traced, bias: Any = None) -> Traced:
    y = _matmul(t, x, _transpose(t, weight))
    return y if bias is None else t.elementwise("add", y, bias)


def _leading(x: Traced, other: Traced) -> tuple[int, ...]:
    missing = max(len(other.axes) - len(x.axes), 0)
    return (0,) * missing + x.axes[:-2]


def _transpose(t: Tracer, x: Traced, *axes: int) -> Traced:
    rank = len(x.axes)
    swapped = {axis % rank for axis in (axes or (-1, -2))}
    if swapped != {rank - 1, rank - 2}:
        raise ConversionError("only the last two axes are transposed")
    flipped = (*x.axes[:-2], x.axes[-1], x.axes[-2])
    return replace(x, axes=flipped, transposed=not x.transposed)


def _attribute(t: Tracer, x: Traced, name: str) -> Traced:
    if name != "mT" and (name != "T" or len(x.axes) != 2):
        raise ConversionError(f"a tensor's attribute {name} is not taken; .T of a matrix and .mT are")
    return _transpose(t, x)


def _multiply(t: Tracer, a: Any, b: Any) -> Traced:
    if isinstance(a, Traced) and a == b:
        return t.elementwise("square", a)
    for x, y in ((a, b), (b, a)):
        if isinstance(y, Traced) and y.inverse and not (isinstance(x, Traced) and x.inverse):
            return t.elementwise("div", x, replace(y, inverse=False))
    return t.elementwise("mul", a, b)


def _divide(t: Tracer, a: Any, b: Any) -> Traced:
    if isinstance(b, Traced):
        return t.elementwise("div", a, b)
    if not 2.0**-126 <= abs(b) <= 2.0**126:
        raise ConversionError(f"division by {b} is not taken: its reciprocal is no float32")
    return t.elementwise("mul", a, 1.0 / b)


def _power(t: Tracer, x: Traced, exponent: float) -> Traced:
    if exponent != 2:
        raise ConversionError(f"the power {exponent} is not taken; squares are")
    return t.elementwise("square", x)


def _axis(x: Traced, dim: Any, keepdim: bool, what: str) -> int:
    axes = (dim,) if isinstance(dim, int) else tuple(dim)
    if len(axes) != 1 or not keepdim:
        raise ConversionError(f"{what} is taken along one axis, with keepdim=True")
    return int(axes[0]) % len(x.axes)


def _reduction(operator: str) -> Callable[..., Traced]:
    def reduce(t: Tracer, x: Traced, dim: Any, keepdim: bool = False) -> Traced:
        x = t.value(x)
        axis = _axis(x, dim, keepdim, operator)
        axes = (*x.axes[:axis], 0, *x.axes[axis + 1 :])
        return t.add(operator, (x,), axes, axis=axis)

    return reduce


def _mean(t: Tracer, x: Traced, dim: Any, keepdim: bool = False) -> Traced:
    axis = _axis(x, dim, keepdim, "mean")
    total = _reduction("reduce_sum")(t, x, dim, keepdim)
    return t.elementwise("mul", total, t.constant(OverSize(x.axes[axis])))


def _softmax(t: Tracer, x: Traced, dim: int, **rest: Any) -> Traced:
    most = _reduction("reduce_max")(t, x, dim, True)
    exponential = t.elementwise("exp", t.elementwise("sub", x, most))
    return t.elementwise("div", exponential, _reduction("reduce_sum")(t, exponential, dim, True))


def _rms_norm(
    t: Tracer, x: Traced, shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Traced:
    return _normalized(t, x, shape, weight, None, t.epsilon if eps is None else eps)


def _layer_norm(
    t: Tracer, x: Traced, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5,
    *rest: Any,
) -> Traced:  # fmt: skip
    return _normalized(t, t.elementwise("sub", x, _mean(t, x, -1, True)), shape, weight, bias, eps)


def _normalized(t: Tracer, x: Traced, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Traced:
    """Divide rows by their root mean square, scale and shift them."""
    if len(shape) != 1:
        raise ConversionError("norms are taken along the last axis")
    mean = _mean(t, _power(t, x, 2), -1, True)
    y = t.elementwise("div", x, t.elementwise("sqrt", t.elementwise("add", mean, eps) if eps else mean))
    y = y if weight is None else t.elementwise("mul", y, weight)
    return y if bias is None else t.elementwise("add", y, bias)


def _gelu(t: Tracer, x: Traced, approximate: str = "none") -> Traced:
    return t.elementwise("gelu_tanh" if approximate == "tanh" else "gelu", x)


def _unary(operator: str) -> Callable[..., Traced]:
    return lambda t, x, **rest: t.elementwise(operator, x)


def _binary(operator: str) -> Callable[..., Traced]:
    return lambda t, a, b: t.elementwise(operator, a, b)


def _unchanged(t: Tracer, x: Traced, *rest: Any, **options: Any) -> Traced:
    """Conversions among a program's type and float32: block graphs compute in float32 and store that type."""
    return x


def _inverse_root(t: Tracer, x: Traced) -> Traced:
    return replace(t.elementwise("sqrt", x), inverse=True)


OPERATORS: Mapping[str, Callable[..., Traced]] = {
    "matmul": _matmul, "mm": _matmul, "bmm": _matmul, "add": _binary("add"), "sub": _binary("sub"),
    "mul": _multiply, "truediv": _divide, "div": _divide, "pow": _power,
    "square": lambda t, x: _power(t, x, 2),
    "exp": _unary("exp"), "sqrt": _unary("sqrt"), "rsqrt": _inverse_root, "silu": _unary("silu"),
    "sigmoid": _unary("sigmoid"), "tanh": _unary("tanh"), "neg": _unary("neg"), "relu": _unary("relu"),
    "sum": _reduction("reduce_sum"), "amax": _reduction("reduce_max"), "mean": _mean, "softmax": _softmax,
    "rms_norm": _rms_norm, "layer_norm": _layer_norm, "gelu": _gelu, "linear": _linear,
    "transpose": _transpose, "t": _transpose, "getattr": _attribute, "float": _unchanged, "half": _unchanged,
    "to": _unchanged, "type_as": _unchanged, "contiguous": _unchanged,
}  # fmt: skip
"""torch function or method -> what translates it."""
