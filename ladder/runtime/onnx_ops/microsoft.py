"""Operators of the domain com.microsoft, which exported and quantised language models contain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F

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
    """Return numbers of a few bits from bytes, the lowest bits first, along the last axis."""
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
    """Take rows of a table that is quantised in blocks along its last axis."""
    op.require(gather_axis=0)
    if op.get("quantize_axis", 1) not in (-1, codes.ndim - 1):
        raise ShapeError(f"{op.name} of blocks along another than the last axis is not supported")
    bits, block = op.get("bits", 4), op.get("block_size", 128)
    rows = codes[indices.long()]
    packed = rows.dtype == torch.uint8 and bits < 8
    rows = unpacked(rows, bits, rows.shape[-1] * (8 // bits)) if packed else rows.to(torch.int32)
    factor = scales[indices.long()]
    zero: Any = (1 << (bits - 1)) if codes.dtype == torch.uint8 else 0
    if zeros is not None:
        zero = unpacked(zeros[indices.long()], bits, factor.shape[-1]).repeat_interleave(block, -1)
    return (rows - zero).to(factor.dtype) * factor.repeat_interleave(block, -1)[..., : rows.shape[-1]]


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


# attention -------------------------------------------------------------------------------------------


def rotated(x: Any, cosine: Any, sine: Any, interleaved: bool) -> Any:
    """Rotate pairs of the last axis of ``x[batch, heads, rows, size]``; what lies beyond the angles stays."""
    width = 2 * cosine.shape[-1]
    head, rest = x[..., :width], x[..., width:]
    a, b = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    turned = (a * cosine - b * sine, b * cosine + a * sine)
    found = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([found, rest], -1)


def _rotary(op: Operation, x: Any, positions: Any, cosines: Any, sines: Any) -> Any:
    op.require(scale=1.0)
    heads = op.get("num_heads", 0)
    if x.ndim == 3:
        size = x.shape[2] // heads if heads else 2 * cosines.shape[1]
        value = x.unflatten(2, (-1, size)).transpose(1, 2)
    else:
        value = x
    rows = torch.arange(value.shape[2], device=x.device)
    at = positions + rows if positions.numel() == 1 else positions
    cosine, sine = (table[at.long()].unsqueeze(-3) for table in (cosines, sines))
    found = rotated(value, cosine, sine, bool(op.get("interleaved", 0)))
    return found.transpose(1, 2).reshape(x.shape) if x.ndim == 3 else found


def _in_heads(x: Any, heads: int) -> Any:
    """Return ``[batch, rows, heads * size]`` as ``[batch, heads, rows, size]``."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2) if x.ndim == 3 else x


def _joined(x: Any) -> Any:
    return x.transpose(1, 2).flatten(2)


def _softmax(scores: Any, dtype: Any) -> Any:
    return torch.nan_to_num(torch.softmax(scores.float(), -1)).to(dtype)


def _group_query(
    op: Operation, q: Any, k: Any, v: Any, past_k: Any, past_v: Any, lengths: Any, total: Any,
    cosines: Any = None, sines: Any = None, positions: Any = None, bias: Any = None, sink: Any = None,
    *others: Any,
) -> Any:  # fmt: skip
    """Attend with fewer heads of keys than of queries, to what was kept and to new rows, causally."""
    op.require(causal=1, qk_output=0, k_quant_type="NONE", v_quant_type="NONE")
    if any(other is not None for other in others):
        raise ShapeError(f"{op.name} with caches in codes, norms or numbers of queries is not supported")
    heads, kept = op.get("num_heads"), op.get("kv_num_heads")
    if k is None:  # packed
        size = q.shape[2] // (heads + 2 * kept)
        q, k, v = q.split([heads * size, kept * size, kept * size], -1)
    q, k, v = _in_heads(q, heads), _in_heads(k, kept), _in_heads(v, kept)
    rows = q.shape[2]
    ends = lengths.reshape(-1).long() + 1
    before = torch.zeros_like(ends) if int(total) == rows else ends - rows
    at = before.reshape(-1, 1) + torch.arange(rows, device=q.device)
    if op.get("do_rotary", 0):
        where = at if positions is None else positions.long()
        angles = [table[where].unsqueeze(1) for table in (cosines, sines)]
        q, k = (rotated(x, angles[0], angles[1], bool(op.get("rotary_interleaved", 0))) for x in (q, k))
    window = op.get("local_window_size", -1)
    if op.get("sliding_window_cache", 0):
        keys, values = (torch.cat([old, new], 2) for old, new in ((past_k, k), (past_v, v)))
        places, index = _window_places(past_k.shape[2], window, before, ends, at)
        caches = [x.gather(2, index[:, None, :, None].expand_as(past_k)) for x in (keys, values)]
    else:
        keys, values = caches = [
            _appended(old, new, at, int(total)) for old, new in ((past_k, k), (past_v, v))
        ]
        places = torch.arange(keys.shape[2], device=q.device).expand(len(at), -1)
    mask = places.unsqueeze(1) <= at.unsqueeze(-1)
    if window > 0:
        mask = mask & (places.unsqueeze(1) > at.unsqueeze(-1) - window)
    bias = None if bias is None else _of_places(bias, places)
    found = _attended(op, q, keys, values, mask.unsqueeze(1), bias, sink)
    return _joined(found), *caches


def _window_places(capacity: int, window: int, before: Any, ends: Any, at: Any) -> tuple[Any, Any]:
    """Return where the rows of a cache of a window and new rows stand, and which of them it keeps.

    A cache holds positions in order from its first row on, `_resident` of them.

    before, ends: Positions of the first new row and behind the last, ``[batch]``.
    at: Positions of the new rows, ``[batch, rows]``.
    Returns positions ``[batch, capacity + rows]``, of rows that are not filled behind all others; and per
    row of the cache afterwards the one of these that it holds, ``[batch, capacity]``.
    """
    row, before = torch.arange(capacity, device=at.device), before.unsqueeze(-1)
    first = before - _resident(before, capacity, window)
    old = torch.where(first + row < before, first + row, torch.iinfo(torch.int64).max)
    later = ends.unsqueeze(-1) - _resident(ends.unsqueeze(-1), capacity, window) + row
    index = torch.where(later < before, later - first, later - before + capacity)
    return torch.cat([old, at], -1), index.clamp(max=capacity + at.shape[1] - 1)


def _resident(count: Any, capacity: int, window: int) -> Any:
    """Return how many of so many rows a cache holds that makes room for several at a time when it is full."""
    room = capacity - window + 1
    return count - room * ((count - capacity).clamp(min=0) + room - 1).div(room, rounding_mode="floor")


def _of_places(bias: Any, places: Any) -> Any:
    """Return the columns of a bias that positions ``[batch, columns]`` name."""
    index = places.clamp(max=bias.shape[-1] - 1)[:, None, None]
    wide = bias.expand(len(places), -1, -1, -1)
    return wide.gather(-1, index.expand(*wide.shape[:3], -1))


def _appended(old: Any, new: Any, at: Any, total: int) -> Any:
    """Return rows that were kept with new ones at their places."""
    batch, heads, rows, size = new.shape
    extent = max(total, 0 if old is None else old.shape[2])
    found = new.new_zeros(batch, heads, extent, size)
    if old is not None:
        found[:, :, : old.shape[2]] = old
    places = at.reshape(batch, 1, rows, 1).expand(new.shape)
    return found.scatter(2, places, new)


def _attended(op: Operation, q: Any, k: Any, v: Any, mask: Any, bias: Any = None, sink: Any = None) -> Any:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    scores = torch.matmul(q, k.mT).float() * (op.get("scale", 0.0) or 1 / sqrt(q.shape[-1]))
    if sink is None and op.get("smooth_softmax", 0) > 0:
        sink = scores.new_zeros(scores.shape[1])
    cap = op.get("softcap", 0.0)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
    if sink is not None:
        extra = sink.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.matmul(_softmax(torch.cat([scores, extra], -1), v.dtype)[..., :-1], v)
    return torch.matmul(_softmax(scores, v.dtype), v)


def _multi_head(
    op: Operation, q: Any, k: Any = None, v: Any = None, bias: Any = None, mask: Any = None,
    added: Any = None, past_k: Any = None, past_v: Any = None, length: Any = None, origins: Any = None,
) -> Any:  # fmt: skip
    """Attend with separate projections of queries, keys and values.

    length: How many rows of what was kept are filled; new ones come behind them, None: all are.
    origins: Where the rows of a beam come from; all must come from their own.
    """
    heads = op.get("num_heads")
    if k is None:  # [batch, rows, heads, 3, size]
        q, k, v = (part.flatten(2) for part in q.unbind(3))
    elif v is None:  # [batch, rows, heads, 2, size]
        k, v = (part.flatten(2) for part in k.unbind(3))
    parts = [q, k, v]
    if bias is not None:
        widths = [x.shape[-1] if x.ndim == 3 else x.shape[1] * x.shape[-1] for x in parts]
        parts = [x + part if x.ndim == 3 else x for x, part in zip(parts, bias.split(widths), strict=True)]
    q, k, v = (_in_heads(x, heads) for x in parts)
    if origins is not None and origins.any():
        raise ShapeError(f"{op.name} of several beams is not supported")
    fresh, (k, v) = k.shape[2], _all_rows(k, v, past_k, past_v, length)
    found = _joined(_attended(op, q, k, v, None, _with_masks(op, mask, added, q, k, k.shape[2] - fresh)))
    if past_k is None or length is None:
        return found, k, v
    return found, _behind(past_k, k), _behind(past_v, v)


def _all_rows(k: Any, v: Any, past_k: Any, past_v: Any, length: Any) -> tuple[Any, Any]:
    """Return keys and values with those that were kept before them."""
    if past_k is None:
        return k, v
    count = past_k.shape[2] if length is None else int(length)
    return torch.cat([past_k[:, :, :count], k], 2), torch.cat([past_v[:, :, :count], v], 2)


def _behind(buffer: Any, rows: Any) -> Any:
    """Return a buffer whose first rows are replaced."""
    return torch.cat([rows, buffer[:, :, rows.shape[2] :]], 2)


def _decoder_masked(
    op: Operation, q: Any, k: Any = None, v: Any = None, mask: Any = None, added: Any = None,
    past_k: Any = None, past_v: Any = None, length: Any = None, beams: Any = None, origins: Any = None,
    bias: Any = None,
) -> Any:  # fmt: skip
    """Attend with one row of queries: `_multi_head` with its operands in another order."""
    op.require(output_qk=0)
    return _multi_head(op, q, k, v, bias, mask, added, past_k, past_v, length, origins)


def _with_masks(op: Operation, mask: Any, added: Any, q: Any, k: Any, past: int) -> Any:
    """Return what is added to scores: by the operator's definition masks lower them by a number.

    mask: Of keys, or of both, or numbers of keys; one of a single column holds for none.
    added: What is added anyhow, or None.
    q, k: Queries and keys ``[batch, heads, rows, size]``.
    past: How many of the keys come before those of the first query.
    """
    batch, rows, columns = q.shape[0], q.shape[2], k.shape[2]
    terms = [] if added is None else [added]
    if mask is not None and not (mask.ndim == 2 and mask.shape[1] == 1 != columns):
        number = op.get("mask_filter_value", -10000.0)
        terms.append(torch.where(_kept(mask, batch, columns), 0.0, number).to(torch.float32))
    if op.get("unidirectional", 0):
        later = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(past + 1)
        later[-1:] = False  # where there are more keys than queries, the last one sees all of them
        terms.append(torch.where(later, torch.finfo(torch.float32).min, 0.0))
    return sum(terms[1:], terms[0]) if terms else None


def _kept(mask: Any, batch: int, columns: int) -> Any:
    """Return a mask as booleans ``[batch, 1, 1 or rows, columns]``."""
    if mask.ndim == 1:  # ends of keys, or ends and then starts
        places = torch.arange(columns, device=mask.device)
        kept = places < mask[:batch].reshape(-1, 1)
        mask = kept & (places >= mask[batch:].reshape(-1, 1)) if len(mask) == 2 * batch else kept
    found = mask.bool()
    return found if mask.ndim == 4 else found.unsqueeze(1) if mask.ndim == 3 else found[:, None, None]


def _attention(
    op: Operation, x: Any, weight: Any, bias: Any, mask: Any = None, past: Any = None, added: Any = None
) -> Any:
    """Project, and attend; one weight for queries, keys and values."""
    sizes = op.get("qkv_hidden_sizes") or [weight.shape[1] // 3] * 3
    projected = torch.matmul(x, weight) if bias is None else torch.matmul(x, weight) + bias
    return _attended_parts(op, projected, sizes, mask, past, added)


def _attended_parts(op: Operation, projected: Any, sizes: Any, mask: Any, past: Any, added: Any) -> Any:
    op.require(do_rotary=0, past_present_share_buffer=0)
    heads = op.get("num_heads")
    q, k, v = (_in_heads(part, heads) for part in projected.split(list(sizes), -1))
    rows = k.shape[2]
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    found = _attended(op, q, k, v, None, _with_masks(op, mask, added, q, k, k.shape[2] - rows))
    return _joined(found), torch.stack([k, v]) if op.count > 1 else None


def _quantized_attention(
    op: Operation, x: Any, weight: Any, bias: Any, x_s: Any, w_s: Any, mask: Any = None, x_z: Any = None,
    w_z: Any = None, past: Any = None,
) -> Any:  # fmt: skip
    """Project codes, and attend."""
    projected = whole_product(x, weight, x_z, w_z).to(x_s.dtype) * (x_s * w_s) + bias
    return _attended_parts(op, projected, [weight.shape[1] // 3] * 3, mask, past, None)


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
    "BiasAdd": lambda op, x, bias, residual: x + bias + residual,
    "BiasSplitGelu": _bias_split_gelu,
    "SkipLayerNormalization": _skip_layer_norm,
    "LayerNormalization": _layer_norm,
    "SimplifiedLayerNormalization": _rms_norm,
    "SkipSimplifiedLayerNormalization": _skip_rms_norm,
    "EmbedLayerNormalization": _embed_layer_norm,
    "RotaryEmbedding": _rotary,
    "GroupQueryAttention": _group_query,
    "MultiHeadAttention": _multi_head,
    "DecoderMaskedMultiHeadAttention": _decoder_masked,
    "Attention": _attention,
    "QAttention": _quantized_attention,
}
"""By their names in the domain."""

MICROSOFT: Mapping[str, Run] = {f"com.microsoft::{name}": row for name, row in _ROWS.items()}
"""Operators of com.microsoft, norms that onnxruntime has in ONNX's domain among them."""
