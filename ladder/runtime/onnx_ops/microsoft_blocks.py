"""Operators of com.microsoft: what newer language models are made of, and what ONNX has by other names.

Linear attention and causal convolutions keep a state from call to call; a mixture of experts sends each
row through the networks that a router chooses. All are computed in float32 and rounded to the operand's type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F

from ladder.runtime.onnx_ops.microsoft import unpacked
from ladder.runtime.onnx_ops.moves import MOVES
from ladder.runtime.onnx_ops.operation import Operation, Run
from ladder.runtime.onnx_ops.resize import RESIZES
from ladder.runtime.onnx_ops.windows import WINDOWS
from tile_types.errors import ShapeError

# states ------------------------------------------------------------------------------------------------


def _linear_attention(
    op: Operation, q: Any, k: Any, v: Any, past: Any = None, decay: Any = None, beta: Any = None
) -> Any:
    """Attend through a matrix per head that each token decays and adds to; returns rows and the state."""
    op.require(state_window=0)
    heads, kept, rule = op.get("q_num_heads"), op.get("kv_num_heads"), op.get("update_rule", "gated_delta")
    size, wide = q.shape[-1] // heads, v.shape[-1] // kept
    scale = op.get("scale", 0.0) or 1 / sqrt(size)
    q, k, v = (x.float().unflatten(-1, (-1, n)).transpose(1, 2) for x, n in ((q, size), (k, size), (v, wide)))
    q, k = (x.repeat_interleave(max(kept // x.shape[1], 1), 1) for x in (q, k))
    state = k.new_zeros(k.shape[0], kept, size, wide) if past is None else past.float()
    factor = None if decay is None else decay.float().unflatten(-1, (kept, -1)).exp().unsqueeze(-1)
    rate = None if beta is None else beta.float().expand(*beta.shape[:2], kept)[..., None]
    rows = []
    for at in range(q.shape[2]):
        if rule in ("gated", "gated_delta"):
            state = state * factor[:, at]  # type: ignore[index]
        key, value = k[:, :, at], v[:, :, at]
        if rule in ("delta", "gated_delta"):
            value = rate[:, at] * (value - (key.unsqueeze(-1) * state).sum(-2))  # type: ignore[index]
        state = state + key.unsqueeze(-1) * value.unsqueeze(-2)
        read = state.repeat_interleave(q.shape[1] // kept, 1)
        rows.append(scale * (q[:, :, at].unsqueeze(-1) * read).sum(-2))
    found = torch.stack(rows, 1).flatten(2)
    return found.to(v.dtype), state if past is None else state.to(past.dtype)


def _attention_gate(op: Operation, a: Any, bias: Any, scale: Any, b: Any = None) -> Any:
    decay = (scale * F.softplus(a.float() + bias)).to(a.dtype)
    return decay, None if b is None else torch.sigmoid(b.float()).to(b.dtype)


def _causal_convolution(op: Operation, x: Any, weight: Any, bias: Any = None, past: Any = None) -> Any:
    """Convolve each channel with what came before; returns the rows and what the next call needs of them."""
    if op.get("channels_last", 0):
        first = [None if y is None else y.flatten(2).mT for y in (x, past)]
        given = {**op.given, "channels_last": 0}
        found, kept = _causal_convolution(
            Operation(op.name, op.version, given), first[0], weight, bias, first[1]
        )
        return found.mT.reshape(x.shape), kept.mT.unflatten(-1, x.shape[2:])
    op.require(
        ndim=1, state_channels_last=0, state_window=0, state_length=0, state_update_capacity=0,
        input_channels=0, input_channel_offset=0,
    )  # fmt: skip
    gap = op.get("dilation", 1)
    before = (weight.shape[-1] - 1) * gap
    whole = F.pad(x, [before, 0]) if past is None else torch.cat([past, x], -1)
    found = F.conv1d(whole, weight, bias, dilation=gap, groups=x.shape[1])
    found = F.silu(found) if op.get("activation", "none") in ("silu", "swish") else found
    return found, whole[..., whole.shape[-1] - before :]


# norms -------------------------------------------------------------------------------------------------


def _normalised(x: Any, epsilon: float) -> Any:
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()


def _gated_norm(op: Operation, x: Any, scale: Any, gate: Any) -> Any:
    """Norm heads of the width of ``scale``, times a function of a gate."""
    wide, width = x.float(), scale.shape[0]
    found = _normalised(wide.unflatten(-1, (-1, width)), op.get("epsilon", 1e-5)) * scale.float()
    function = torch.sigmoid if op.get("activation", "silu") == "sigmoid" else F.silu
    return (found.flatten(-2) * function(gate.float())).to(x.dtype)


def _branchwise_norm(op: Operation, x: Any, scale: Any = None) -> Any:
    count = op.get("num_branches", 0)
    wide = x.float().unflatten(-1, (count, -1)) if count else x.float()
    found = _normalised(wide, op.get("epsilon", 1e-5))
    if scale is not None:
        found = found * scale.float().reshape(found.shape[-2:] if scale.numel() > found.shape[-1] else -1)
    return found.reshape(x.shape).to(x.dtype)


def _scaled_silu(op: Operation, x: Any, scale: Any = None) -> Any:
    scaled = (x.float() * (op.get("alpha", 1.0) if scale is None else scale.float())).to(x.dtype)
    return scaled * torch.sigmoid(scaled.float()).to(x.dtype)


# experts -----------------------------------------------------------------------------------------------


def _swiglu(op: Operation, x: Any) -> Any:
    """Gate one half of a row, interleaved or joined, by the other."""
    gate, value = (x[..., ::2], x[..., 1::2]) if op.get("swiglu_fusion", 0) == 1 else x.chunk(2, -1)
    return _gated(op, gate, value)


def _gated(op: Operation, gate: Any, value: Any) -> Any:
    limit = op.get("swiglu_limit")
    if limit is not None:
        gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    sigmoid = torch.sigmoid(op.get("activation_alpha", 1.0) * gate)
    return gate * sigmoid * (value + op.get("activation_beta", 0.0))


FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "relu": torch.relu,
    "gelu": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "identity": lambda x: x,
}
"""Activations of experts, as onnxruntime computes them."""


def _shares(op: Operation, router: Any, weights: Any = None, *, always: bool = False) -> tuple[Any, Any]:
    """Return the shares of the experts that a router gives most, and which these are, ``[rows, count]``."""
    logits = router.reshape(-1, router.shape[-1]).float()
    shares, chosen = torch.softmax(logits, -1).topk(op.get("k", 1))
    if weights is not None:
        shares = weights.reshape(logits.shape).float().gather(1, chosen)
    if always or op.get("normalize_routing_weights", 0):
        shares = shares / shares.sum(-1, keepdim=True)
    return shares, chosen


def _experts(
    op: Operation, x: Any, router: Any, w1: Any, b1: Any, w2: Any, b2: Any = None, w3: Any = None,
    b3: Any = None,
) -> Any:  # fmt: skip
    """Mix experts; matrices may state ``[K, N]``, as older files do, but always lie as ``[N, K]``."""
    first, third = (None if w is None else w.reshape(len(w), -1, x.shape[-1]) for w in (w1, w3))
    second = w2.reshape(len(w2), x.shape[-1], -1)
    return _mixed(op, x, _shares(op, router), first, b1, second, b2, third, b3)


def _mixed(
    op: Operation, x: Any, routes: tuple[Any, Any], w1: Any, b1: Any, w2: Any, b2: Any = None, w3: Any = None,
    b3: Any = None,
) -> Any:  # fmt: skip
    """Add, for each row, the results of the experts that are chosen for it, times their shares."""
    op.require(use_sparse_mixer=0, swiglu_limit_after_activation=0)
    rows, name = x.reshape(-1, x.shape[-1]).float(), op.get("activation_type", "relu")
    shares, chosen = routes
    found = torch.zeros_like(rows)
    for expert in sorted(set(chosen.flatten().tolist())):
        at, place = (chosen == expert).nonzero(as_tuple=True)
        (first, second, third) = (
            None if w is None else (w[expert].float(), None if b is None else b[expert].float())
            for w, b in ((w1, b1), (w2, b2), (w3, b3))
        )
        inner = F.linear(rows[at], *first)  # type: ignore[misc]
        if name == "swiglu":
            inner = _swiglu(op, inner) if third is None else _gated(op, inner, F.linear(rows[at], *third))
        else:
            inner = FUNCTIONS[name](inner) * (1 if third is None else F.linear(rows[at], *third))
        found.index_add_(0, at, F.linear(inner, *second) * shares[at, place].unsqueeze(-1))  # type: ignore[misc]
    return found.reshape(x.shape).to(x.dtype)


class _Decoded:
    """Experts' matrices of few bits, each decoded when it is asked for."""

    def __init__(self, bits: int, codes: Any, scales: Any, zeros: Any) -> None:
        self.bits, self.codes, self.scales, self.zeros = bits, codes, scales, zeros

    def __getitem__(self, expert: int) -> Any:
        stored = self.codes[expert]
        codes = unpacked(stored, self.bits, stored.shape[-1] * 8 // self.bits).float()
        scale = self.scales[expert].float().reshape(len(codes), -1)
        groups = codes.unflatten(-1, (scale.shape[1], -1))
        zero: Any = 1 << (self.bits - 1)
        if self.zeros is not None:  # of rows, they lie side by side
            lying = self.zeros[expert].reshape(len(codes) if self.zeros.ndim > 2 else 1, -1)
            zero = unpacked(lying, self.bits, scale.numel() // len(lying)).reshape(*scale.shape, 1)
        return ((groups - zero) * scale[..., None]).flatten(-2)


def _stored_experts(
    op: Operation, x: Any, router: Any, w1: Any, s1: Any, b1: Any, w2: Any, s2: Any, b2: Any = None,
    w3: Any = None, s3: Any = None, b3: Any = None, z1: Any = None, z2: Any = None, z3: Any = None,
    weights: Any = None,
) -> Any:  # fmt: skip
    """Mix experts whose matrices ``[N, K]`` are codes of 4 or 8 bits, in blocks along K or by rows.

    weights: Shares of all experts, where the router only chooses; without them onnxruntime's CPU normalizes
        those of the router, whatever the node says.
    """
    op.require(quant_type="int")
    bits = op.get("expert_weight_bits", 4)
    first, second, third = (
        None if w is None else _Decoded(bits, w, s, z)
        for w, s, z in ((w1, s1, z1), (w2, s2, z2), (w3, s3, z3))
    )
    return _mixed(
        op, x, _shares(op, router, weights, always=weights is None), first, b1, second, b2, third, b3
    )


# under other names --------------------------------------------------------------------------------------


def _unique(op: Operation, x: Any) -> Any:
    """Return distinct values in the order in which they occur, where each value is among them, and counts."""
    values, places, counts = torch.unique(x, return_inverse=True, return_counts=True)
    first = torch.full_like(counts, len(x)).scatter_reduce(0, places, torch.arange(len(x)), "amin")
    order = first.argsort()
    return values[order], order.argsort()[places], counts[order]


def _distances(op: Operation, a: Any, b: Any) -> Any:
    squares = (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1)
    return squares if op.get("metric", "sqeuclidean") == "sqeuclidean" else squares.sqrt()


def _crop(op: Operation, x: Any) -> Any:
    """Cut borders off a picture; what ``scale`` states is left, from the first two borders on."""
    border, scale = list(op.get("border") or []), op.get("scale")
    if len(border) != 4 or x.ndim != 4 or (scale is not None and len(scale) != 2):
        raise ShapeError(f"Crop of {border} to {scale} of a tensor of {x.ndim} axes")
    left, top, right, bottom = border
    height, width = scale or (x.shape[2] - top - bottom, x.shape[3] - left - right)
    if min(*border, height, width) < 0 or top + height > x.shape[2] or left + width > x.shape[3]:
        raise ShapeError(f"Crop of {border} to {[height, width]} of a picture of {list(x.shape[2:])}")
    return x[:, :, top : top + height, left : left + width]


def _conv_transposed(op: Operation, x: Any, w: Any, pads: Any = None, bias: Any = None) -> Any:
    given = op.given if pads is None else {**op.given, "pads": pads.tolist()}
    return WINDOWS["ConvTranspose"](Operation("ConvTranspose", 11, given), x, w, bias)


_ROWS: Mapping[str, Run] = {
    "LinearAttention": _linear_attention,
    "LinearAttentionGate": _attention_gate,
    "CausalConvWithState": _causal_convolution,
    "GatedRMSNorm": _gated_norm,
    "BranchwiseRMSNorm": _branchwise_norm,
    "ScaledSiLU": _scaled_silu,
    "GatedAdd": lambda op, x, y, gate: x + y * gate,
    "MoE": _experts,
    "QMoE": _stored_experts,
    "Unique": _unique,
    "CDist": _distances,
    "Inverse": lambda op, x: torch.linalg.inv(x if x.dtype == torch.float64 else x.float()).to(x.dtype),
    "ExpandDims": lambda op, x, axis: x.unsqueeze(int(axis)),
    "UnfoldTensor": lambda op, x: x.unfold(op.get("dim", -1), op.get("size"), op.get("step", 1)),
    "MatMulInteger16": lambda op, a, b: torch.matmul(a.int(), b.int()),
    "ConvTransposeWithDynamicPads": _conv_transposed,
    "NhwcMaxPool": lambda op, x: WINDOWS["MaxPool"](op, x.movedim(-1, 1)).movedim(1, -1),
    "BiasDropout": lambda op, x, bias, residual=None, *_: x + bias + (0 if residual is None else residual),
    **{name: MOVES[name] for name in ("GatherND", "Pad", "Range", "Trilu")},
    "GridSample": RESIZES["GridSample"],
}
"""By their names in the domain."""

EARLY: Mapping[str, Run] = {
    "ImageScaler": lambda op, x: x * op.get("scale", 1.0) + x.new_tensor(op.get("bias")).reshape(-1, 1, 1),
    "Crop": _crop,
    "Scale": lambda op, x: x * op.get("scale", 1.0),
    "DynamicSlice": lambda op, *args: MOVES["Slice"](Operation("Slice", 10, {}), *args),
    "Affine": lambda op, x: x * op.get("alpha", 1.0) + op.get("beta", 0.0),
    "ScaledTanh": lambda op, x: op.get("alpha", 1.0) * torch.tanh(op.get("beta", 1.0) * x),
    "ParametricSoftplus": lambda op, x: op.get("alpha", 1.0) * F.softplus(op.get("beta", 1.0) * x),
}
"""Operators that ONNX had for trial before version 10, which converters of that time wrote."""

BLOCKS: Mapping[str, Run] = {**{f"com.microsoft::{name}": row for name, row in _ROWS.items()}, **EARLY}
"""Operator, with its domain -> what computes it."""
