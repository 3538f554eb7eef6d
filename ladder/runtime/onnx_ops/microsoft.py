"""Operators of the domain com.microsoft, which exported and quantised language models contain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ladder.runtime.onnx_ops.elementwise import ELEMENTWISE
from ladder.runtime.onnx_ops.integers import whole_product
from ladder.runtime.onnx_ops.operation import Operation, Run
from ladder.runtime.onnx_ops.quantized import dynamic
from ladder.runtime.onnx_ops.recurrent import RECURRENT
from ladder.runtime.onnx_ops.reductions import REDUCTIONS
from tile_types.errors import ShapeError

# products --------------------------------------------------------------------------------------------


def _fused_matmul(op: Operation, a: Any, b: Any) -> Any:
    """Multiply batches, one or both transposed, times a number."""
    a, b = (_turned(op, x, side) for x, side in ((a, "A"), (b, "B")))
    return torch.matmul(a, b) * op.get("alpha", 1.0)


def _turned(op: Operation, x: Any, side: str) -> Any:
    if op.get(f"transBatch{side}", 0):
        x = x.movedim(0, -2)
    return x.mT if op.get(f"trans{side}", 0) and x.ndim > 1 else x


def unpacked(codes: Any, bits: int, count: int) -> Any:
    """Return numbers of a few bits from bytes, the lowest bits first, along the last axis.

    Raises ShapeError if such numbers would cross bytes, as onnxruntime's do not.
    """
    if bits < 1 or 8 % bits:
        raise ShapeError(f"codes of {bits} bits are not supported, of 1, 2, 4 and 8 bits are")
    per_byte = 8 // bits
    shifts = torch.arange(per_byte, device=codes.device) * bits
    found = (codes.unsqueeze(-1).to(torch.int32) >> shifts) & ((1 << bits) - 1)
    return found.flatten(-2)[..., :count]


def _matmul_nbits(
    op: Operation, a: Any, b: Any, scales: Any, zeros: Any = None, groups: Any = None, bias: Any = None
) -> Any:
    """Multiply by a weight ``[N, K]`` of 2, 4 or 8 bits, quantised in blocks along K."""
    k, n, bits, block = op.get("K"), op.get("N"), op.get("bits", 4), op.get("block_size")
    blocks = -(-k // block)
    codes = unpacked(b.reshape(n, blocks, -1), bits, block).to(scales.dtype)
    if zeros is None:
        zero: Any = 1 << (bits - 1)
    elif zeros.dtype == torch.uint8:
        zero = unpacked(zeros.reshape(n, -1), bits, blocks).to(scales.dtype).unsqueeze(-1)
    else:
        zero = zeros.reshape(n, blocks, 1)
    weight = ((codes - zero) * scales.reshape(n, blocks, 1)).reshape(n, -1)[:, :k]
    if groups is not None:
        weight = (
            (codes.reshape(n, -1)[:, :k] - zero.reshape(n, -1)[:, groups.long()])
            if zeros is not None
            else codes.reshape(n, -1)[:, :k] - zero
        ) * scales.reshape(n, -1)[:, groups.long()]
    return F.linear(a, weight.to(a.dtype), bias)


def _gather_block_quantized(op: Operation, codes: Any, indices: Any, scales: Any, zeros: Any = None) -> Any:
    """Take elements along an axis of a table that is quantised in blocks along one; the last may be less."""
    bits, block = op.get("bits", 4), op.get("block_size", 128)
    taken, divided = (
        op.get(name, at) % codes.ndim for at, name in enumerate(("gather_axis", "quantize_axis"))
    )
    is_bytes = codes.dtype == torch.uint8
    if is_bytes and (taken != 0 or divided != codes.ndim - 1):
        raise ShapeError(f"{op.name}: bytes are taken along the first axis, in blocks along the last")
    rows = _along(codes, taken, indices.long())
    at = indices.long()
    if taken == divided:
        at = at % codes.shape[taken] // block
    factor, zero = _along(scales, taken, at), (1 << (bits - 1)) if is_bytes else 0
    if is_bytes:
        rows = unpacked(rows, bits, rows.shape[-1] * (8 // bits))
    if zeros is not None:
        zero = _along(zeros, taken, at)
        zero = unpacked(zero, bits, factor.shape[-1]) if is_bytes else zero.to(torch.int32)
    if taken != divided:
        axis = divided + (indices.ndim - 1) * (divided > taken)
        factor, zero = (
            x.repeat_interleave(block, axis).narrow(axis, 0, rows.shape[axis]) if torch.is_tensor(x) else x
            for x in (factor, zero)
        )
    return (rows.to(torch.int32) - zero).to(factor.dtype) * factor


def _along(table: Any, axis: int, indices: Any) -> Any:
    """Return what indices take along an axis, which theirs replace."""
    return table[(slice(None),) * axis + (indices,)]


# functions of one element ----------------------------------------------------------------------------


def _bias_split_gelu(op: Operation, x: Any, bias: Any) -> Any:
    left, right = (x + bias).chunk(2, -1)
    return left * F.gelu(right)


# normalisation ---------------------------------------------------------------------------------------


def _skip_layer_norm(op: Operation, x: Any, skip: Any, gamma: Any, beta: Any = None, bias: Any = None) -> Any:
    total = x + skip if bias is None else x + skip + bias
    inner = Operation("LayerNormalization", 17, {"epsilon": op.get("epsilon", 1e-5)})
    return *REDUCTIONS["LayerNormalization"](inner, total, gamma, beta), total


def _layer_norm(op: Operation, x: Any, scale: Any, bias: Any = None) -> Any:
    """Normalise in float32; the result is of the scale's type."""
    return REDUCTIONS["LayerNormalization"](op, x.to(scale.dtype), scale, bias)


def root_mean_square(x: Any, scale: Any, epsilon: float) -> tuple[Any, Any]:
    """Return a tensor over the root of its mean square along the last axis, and that factor."""
    value = x.float()
    inverse = (value.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (value * inverse).to(x.dtype) * scale, inverse


def _rms_norm(op: Operation, x: Any, scale: Any) -> Any:
    return root_mean_square(x.to(scale.dtype), scale, op.get("epsilon", 1e-5))


def _skip_rms_norm(op: Operation, x: Any, skip: Any, gamma: Any, bias: Any = None) -> Any:
    total = x + skip if bias is None else x + skip + bias
    found, inverse = root_mean_square(total, gamma, op.get("epsilon", 1e-5))
    return found, None, inverse, total


def _embed_layer_norm(
    op: Operation, ids: Any, segments: Any, words: Any, places: Any, kinds: Any, gamma: Any, beta: Any,
    mask: Any = None, positions: Any = None,
) -> Any:  # fmt: skip
    """Add embeddings of words, positions and segments, and normalise."""
    at = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape) if positions is None else positions
    total = words[ids.long()] + places[at.long()]
    if kinds is not None and segments is not None:
        total = total + kinds[segments.long()]
    found = F.layer_norm(total, total.shape[-1:], gamma, beta, op.get("epsilon", 1e-12))
    counts = torch.zeros(ids.shape[0], dtype=torch.int32) if mask is None else mask.sum(1).to(torch.int32)
    return found, counts, total


# others ----------------------------------------------------------------------------------------------


def _quantized_lstm(
    op: Operation, x: Any, w: Any, r: Any, b: Any, lengths: Any, h: Any, c: Any, p: Any,
    w_s: Any, w_z: Any, r_s: Any, r_z: Any,
) -> Any:  # fmt: skip
    """Run a LSTM whose weights are 8-bit codes, ``[directions, K, N]``; inputs and states are rounded."""
    weights, inner = (list(zip(*parts, strict=True)) for parts in ((w, w_s, w_z), (r, r_s, r_z)))
    given = {**op.given, "product": _product_of_codes, "hidden_size": r.shape[1]}
    return RECURRENT["LSTM"](Operation("LSTM", 14, given, op.count), x, weights, inner, b, lengths, h, c, p)


def _product_of_codes(x: Any, weight: tuple[Any, Any, Any]) -> Any:
    """Round to codes by the range of all elements, and multiply."""
    matrix, w_scale, w_zero = weight
    codes, scale, zero = dynamic(x)
    return whole_product(codes, matrix, zero, w_zero).to(scale.dtype) * (scale * w_scale)


def _fused_conv(op: Operation, x: Any, w: Any, bias: Any = None, added: Any = None) -> Any:
    from ladder.runtime.onnx_ops.windows import convolved

    found = convolved(op, x, w, bias)
    return _activated(op, found if added is None else found + added)


def _last_conv(op: Operation, x: Any, w: Any, bias: Any = None, added: Any = None) -> Any:
    """Convolve pictures whose channels come last, as those of what is added and of the result.

    Those of weights do so, too, in the operator that optimizers write for GPUs.
    """
    w = w.movedim(-1, 1) if op.name == "com.microsoft::NhwcConv" else w
    first = None if added is None else added.movedim(-1, 1)
    return _fused_conv(op, x.movedim(-1, 1), w, bias, first).movedim(1, -1)


ACTIVATIONS: Mapping[str, Callable[..., Any]] = {
    "": lambda x: x,
    "Relu": torch.relu,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "LeakyRelu": lambda x, alpha=0.01: F.leaky_relu(x, alpha),
    "Clip": lambda x, low=float("-inf"), high=float("inf"): x.clamp(low, high),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: (alpha * x + beta).clamp(0, 1),
    "HardSwish": F.hardswish,
    "Elu": F.elu,
    "Selu": lambda x, alpha=1.67326319217681885, gamma=1.05070102214813232: gamma * F.elu(x, alpha),
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "ThresholdedRelu": lambda x, alpha=1.0: torch.where(x > alpha, x, 0),
    "Gelu": F.gelu,
}
"""Functions that products are fused with."""


def _activated(op: Operation, value: Any) -> Any:
    """Apply the function that a product is fused with."""
    stated = [op.get(f"activation_{name}") for name in ("alpha", "beta", "gamma")]
    numbers = op.get("activation_params") or [number for number in stated if number is not None]
    return ACTIVATIONS[op.get("activation", "")](value, *numbers)


def _fused_gemm(op: Operation, a: Any, b: Any, c: Any = None) -> Any:
    a, b = (x.mT if op.get(name, 0) else x for x, name in ((a, "transA"), (b, "transB")))
    found = torch.matmul(a, b) * op.get("alpha", 1.0)
    found = found if c is None else found + c * op.get("beta", 1.0)
    return _activated(op, found)


_ROWS: Mapping[str, Run] = {
    "FusedMatMul": _fused_matmul,
    "TransposeMatMul": _fused_matmul,
    "FusedGemm": _fused_gemm,
    "FusedConv": _fused_conv,
    "NhwcConv": _last_conv,
    "NhwcFusedConv": _last_conv,
    "MatMulNBits": _matmul_nbits,
    "DynamicQuantizeLSTM": _quantized_lstm,
    "GatherBlockQuantized": _gather_block_quantized,
    "Gelu": lambda op, x: F.gelu(x),
    "BiasGelu": lambda op, x, bias: F.gelu(x + bias),
    "FastGelu": lambda op, x, bias=None: F.gelu(x if bias is None else x + bias, approximate="tanh"),
    "QuickGelu": lambda op, x: x * torch.sigmoid(op.get("alpha", 1.702) * x),
    "ThresholdedRelu": ELEMENTWISE["ThresholdedRelu"],
    "BiasAdd": lambda op, x, bias, residual: x + bias + residual,
    "BiasSplitGelu": _bias_split_gelu,
    "SkipLayerNormalization": _skip_layer_norm,
    "LayerNormalization": _layer_norm,
    "SimplifiedLayerNormalization": _rms_norm,
    "SkipSimplifiedLayerNormalization": _skip_rms_norm,
    "EmbedLayerNormalization": _embed_layer_norm,
}
"""By their names in the domain."""

MICROSOFT: Mapping[str, Run] = {f"com.microsoft::{name}": row for name, row in _ROWS.items()}
"""Operators of com.microsoft, norms that onnxruntime has in ONNX's domain among them."""
