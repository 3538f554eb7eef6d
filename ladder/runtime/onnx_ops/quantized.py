"""Operators on codes of 8 bits: products, convolutions, functions of elements, pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
import torch
import torch.nn.functional as F

from ladder.runtime.byte_products import has_kernels, rounded
from ladder.runtime.onnx_ops.casts import is_integer, numbers, saturated
from ladder.runtime.onnx_ops.integers import along, less_zero, whole_convolution, whole_product
from ladder.runtime.onnx_ops.operation import Operation, Run
from ladder.runtime.onnx_ops.reductions import REDUCTIONS
from ladder.runtime.onnx_ops.values import SUB_BYTE, code_of
from ladder.runtime.onnx_ops.windows import WINDOWS
from tile_types.errors import DTypeError

UINT8 = int(onnx.TensorProto.UINT8)


def dynamic(x: Any) -> tuple[Any, Any, Any]:
    """Return codes of 8 bits, scale and zero point by the range of a tensor, which has 0 in it."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() and has_kernels():
        return rounded(x)
    low, high = torch.aminmax(x) if x.numel() else (x.new_zeros(()), x.new_zeros(()))
    low, high = low.clamp_(max=0), high.clamp_(min=0)
    scale = high.sub_(low).div_(255)
    divisor = scale + (scale == 0)  # 1 where all elements are 0
    zero = low.neg_().div_(divisor).clamp_(0, 255).round_()
    return saturated(x / divisor, UINT8, zero), scale, zero.to(torch.uint8)


def _value(x: Any, scale: Any, zero: Any) -> Any:
    return less_zero(x, zero) * scale


def _codes(value: Any, scale: Any, zero: Any, code: int) -> Any:
    return saturated(value / scale, code, None if zero is None else along(numbers(zero), None, value.ndim))


# products and convolutions -----------------------------------------------------------------------------


def _qlinear_matmul(
    op: Operation, a: Any, a_s: Any, a_z: Any, b: Any, b_s: Any, b_z: Any, y_s: Any, y_z: Any
) -> Any:
    if code_of(y_z) in SUB_BYTE or not is_integer(code_of(y_z)):
        raise DTypeError(f"QLinearMatMul to {y_z.dtype} is not supported")
    total = whole_product(a, b, a_z, b_z)
    scale = along(a_s.float(), -2, total.ndim) * along(b_s.float(), -1, total.ndim)
    ratio = total.float() * scale / along(y_s.float(), -2, total.ndim)
    return saturated(ratio, code_of(y_z), along(numbers(y_z), -2, total.ndim))


def _to_float(
    op: Operation, a: Any, b: Any, a_s: Any, b_s: Any, a_z: Any = None, b_z: Any = None, bias: Any = None
) -> Any:
    found = whole_product(a, b, a_z, b_z).to(a_s.dtype) * (a_s * b_s)
    return found if bias is None else found + bias


def _dynamic_matmul(op: Operation, a: Any, b: Any, b_s: Any, b_z: Any = None, bias: Any = None) -> Any:
    """Quantize the activation by its range, multiply integers, scale back."""
    codes, scale, zero = dynamic(a)
    return _to_float(op, codes, b, scale, b_s, zero, b_z, bias)


def _gemm(
    op: Operation, a: Any, a_s: Any, a_z: Any, b: Any, b_s: Any, b_z: Any, c: Any = None, y_s: Any = None,
    y_z: Any = None,
) -> Any:  # fmt: skip
    """Multiply matrices of codes, add whole numbers; to codes if a scale for them is given."""
    a, b = (x.mT if op.get(name, 0) else x for x, name in ((a, "transA"), (b, "transB")))
    total = whole_product(a, b, a_z, b_z)
    scale = a_s * b_s * op.get("alpha", 1.0)
    value = (total if c is None else total + c).float() * scale
    return value if y_s is None else _codes(value, y_s, y_z, UINT8 if y_z is None else code_of(y_z))


def _conv_integer(op: Operation, x: Any, w: Any, x_zero: Any = None, w_zero: Any = None) -> Any:
    return whole_convolution(op, x, w, x_zero, w_zero).to(torch.int64).to(torch.int32)


def _qlinear_conv(
    op: Operation, x: Any, x_s: Any, x_z: Any, w: Any, w_s: Any, w_z: Any, y_s: Any, y_z: Any,
    bias: Any = None,
) -> Any:  # fmt: skip
    total = whole_convolution(op, x, w, x_z, w_z)
    if bias is not None:
        total = total + along(bias, 1, total.ndim)
    scale = x_s.float() * along(w_s.float(), 1, total.ndim) / y_s.float()
    return saturated(total.float() * scale, code_of(y_z), numbers(y_z))


# of com.microsoft: functions of what codes stand for ---------------------------------------------------


def _binary(function: Any) -> Run:
    def run(
        op: Operation, a: Any, a_s: Any, a_z: Any, b: Any, b_s: Any, b_z: Any, y_s: Any, y_z: Any = None
    ) -> Any:
        return _codes(function(_value(a, a_s, a_z), _value(b, b_s, b_z)), y_s, y_z, code_of(a))

    return run


def _unary(function: Callable[[Operation, Any], Any]) -> Run:
    def run(op: Operation, x: Any, x_s: Any, x_z: Any, y_s: Any, y_z: Any = None) -> Any:
        return _codes(function(op, _value(x, x_s, x_z)), y_s, y_z, code_of(x))

    return run


def _last_channels(run: Run) -> Run:
    """Return a function of pictures, and of operands beside them, whose channels may come last."""

    def found(op: Operation, x: Any, *others: Any) -> Any:
        last = op.get("channels_last", 0)
        value = run(op, x.movedim(-1, 1) if last else x, *others)
        return value.movedim(1, -1) if last else value

    return found


def _softmax(op: Operation, x: Any, x_s: Any, x_z: Any, y_s: Any, y_z: Any = None) -> Any:
    """Softmax of a stated version; onnxruntime multiplies by the whole part of one over the scale."""
    inner = Operation("Softmax", int(op.get("opset", 13)), op.given)
    value = REDUCTIONS["Softmax"](inner, _value(x, x_s, x_z))
    return _codes(value, 1 / (1 / y_s).floor(), y_z, code_of(x))


def _mean(op: Operation, x: Any) -> Any:
    axes = list(op.get("axes") or range(x.ndim))
    return x.mean(axes, keepdim=bool(op.get("keepdims", 1)))


def _embed_layer_norm(
    op: Operation, ids: Any, segments: Any, words: Any, places: Any, kinds: Any, gamma: Any, beta: Any,
    mask: Any, *numbers: Any,
) -> Any:  # fmt: skip
    """Add embeddings of words, positions and segments, and normalise.

    numbers: Scales of the tables and of the factors and offsets, then their zero points.
    """
    scales, zeros = numbers[:5], (*numbers[5:], *[None] * 5)

    def rows(at: int, table: Any, index: Any = ...) -> Any:
        return _value(table[index], scales[at], zeros[at])

    total = rows(0, words, ids.long()) + rows(1, places, torch.arange(ids.shape[1], device=ids.device))
    if kinds is not None and segments is not None:
        total = total + rows(2, kinds, segments.long())
    found = F.layer_norm(total, total.shape[-1:], rows(3, gamma), rows(4, beta), op.get("epsilon", 1e-12))
    counts = torch.zeros(ids.shape[0], dtype=torch.int32) if mask is None else mask.sum(1).to(torch.int32)
    return found, counts


def _concat(op: Operation, y_s: Any, y_z: Any, *parts: Any) -> Any:
    values = [_value(*parts[at : at + 3]) for at in range(0, len(parts), 3)]
    return _codes(torch.cat(values, op.get("axis")), y_s, y_z, code_of(parts[0]))


_MICROSOFT: Mapping[str, Run] = {
    "MatMulIntegerToFloat": _to_float,
    "DynamicQuantizeMatMul": _dynamic_matmul,
    "QGemm": _gemm,
    "QLinearAdd": _binary(torch.add),
    "QLinearMul": _binary(torch.mul),
    "QLinearSigmoid": _unary(lambda op, x: torch.sigmoid(x)),
    "QLinearLeakyRelu": _unary(lambda op, x: F.leaky_relu(x, op.get("alpha", 0.01))),
    "QLinearSoftmax": _softmax,
    "QLinearReduceMean": _unary(_mean),
    "QLinearConv": _last_channels(_qlinear_conv),
    "QLinearAveragePool": _unary(_last_channels(WINDOWS["AveragePool"])),
    "QLinearGlobalAveragePool": _unary(_last_channels(WINDOWS["GlobalAveragePool"])),
    "QLinearConcat": _concat,
    "QEmbedLayerNormalization": _embed_layer_norm,
    "QLinearWhere": lambda op, condition, a, a_s, a_z, b, b_s, b_z, y_s, y_z: _codes(
        torch.where(condition, _value(a, a_s, a_z), _value(b, b_s, b_z)), y_s, y_z, code_of(a)
    ),
}
"""By their names in the domain."""

QUANTIZED: Mapping[str, Run] = {
    "DynamicQuantizeLinear": lambda op, x: dynamic(x),
    "MatMulInteger": lambda op, a, b, a_zero=None, b_zero=None: whole_product(a, b, a_zero, b_zero),
    "QLinearMatMul": _qlinear_matmul,
    "ConvInteger": _conv_integer,
    "QLinearConv": _qlinear_conv,
    **{f"com.microsoft::{name}": row for name, row in _MICROSOFT.items()},
}
"""Operators on codes."""
