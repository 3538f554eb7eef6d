"""Operators of com.microsoft that keep a state, mix streams or choose experts, in onnxruntime's newest form.

A call has tokens of several sequences one behind another (``total_tokens``), with where each begins. All are
computed in float32 and rounded to the operand's type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F

from ladder.runtime.onnx_ops.microsoft import root_mean_square
from ladder.runtime.onnx_ops.operation import Operation, Run
from tile_types.errors import ShapeError

# states ------------------------------------------------------------------------------------------------


def _sequences(starts: Any, batch: int, tokens: int) -> Iterator[slice]:
    """Yield the tokens of each sequence: from one start to the next, or all as many."""
    if starts is None and (batch < 1 or tokens % batch):
        raise ShapeError(f"{tokens} tokens are not those of {batch} sequences of one length")
    at = range(0, tokens + 1, max(tokens // batch, 1)) if starts is None else starts.tolist()
    ends = list(at)
    if ends[0] != 0 or ends[-1] != tokens or sorted(ends) != ends or len(ends) != batch + 1:
        raise ShapeError(f"sequences that start at {ends[:9]} are not {batch} of {tokens} tokens")
    yield from (slice(*pair) for pair in pairwise(ends))


def _delta_net(
    op: Operation, q: Any, k: Any = None, v: Any = None, starts: Any = None, decay: Any = None,
    beta: Any = None, state: Any = None, a_log: Any = None, bias: Any = None, captures: Any = None,
    active: Any = None,
) -> Any:  # fmt: skip
    """Attend through a matrix per head ``[values, keys]`` that each token decays and corrects."""
    op.require(state_update_capacity=0)
    leading, kind = q.shape[: -1 if k is None else -2], q.dtype
    q, k, v = _heads(q, k, v, state)
    size, heads = q.shape[-1], v.shape[1]
    if op.get("qk_l2_norm", 0):
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    factor = None if decay is None else _gate(op, decay.float().reshape(len(q), heads, -1), a_log, bias).exp()
    rate = None if beta is None else beta.float().reshape(-1, heads, 1)
    if rate is not None and op.get("beta_activation", "none") == "sigmoid":
        rate = rate.sigmoid()
    batch = len(state) if state is not None else leading[0] if starts is None else len(starts) - 1
    kept = v.new_zeros(batch, heads, v.shape[-1], size) if state is None else state.float().clone()
    rule, found = op.get("update_rule", "gated_delta"), torch.empty_like(v)
    for each, tokens in enumerate(_sequences(starts, batch, len(q))):
        for at in range(tokens.start, tokens.stop):
            if rule in ("gated", "gated_delta"):
                kept[each] *= factor[at].unsqueeze(-2)  # type: ignore[index]
            value = v[at]
            if rule in ("delta", "gated_delta"):
                value = rate[at] * (value - (kept[each] * k[at].unsqueeze(-2)).sum(-1))  # type: ignore[index]
            kept[each] += value.unsqueeze(-1) * k[at].unsqueeze(-2)
            found[at] = (kept[each] * q[at].unsqueeze(-2)).sum(-1)
    found = found * (op.get("scale", 0.0) or 1 / sqrt(size))
    return found.reshape(*leading, *found.shape[1:]).to(kind), kept


def _heads(q: Any, k: Any, v: Any, state: Any) -> tuple[Any, Any, Any]:
    """Return queries, keys and values ``[tokens, heads, size]``, also of one operand that has all."""
    if k is not None:
        q, k, v = (x.float().flatten(0, -3) for x in (q, k, v))
        return q, k, v
    if state is None:
        raise ShapeError("com.microsoft::GatedDeltaNet: packed operands need a state, which says their heads")
    (heads, wide, size), rows = state.shape[1:], q.float().flatten(0, -2)
    keys = (rows.shape[-1] - heads * wide) // (2 * size)
    parts = rows.split([keys * size, keys * size, heads * wide], -1)
    q, k, v = (x.unflatten(-1, (-1, n)) for x, n in zip(parts, (size, size, wide), strict=True))
    return q, k, v


def _gate(op: Operation, decay: Any, a_log: Any, bias: Any) -> Any:
    """Return logarithms of what states are multiplied by, ``[tokens, heads, 1 or keys]``."""
    name = op.get("gate_activation", "none")
    if name == "none":
        return decay
    heads = decay.shape[1]
    raw = decay if bias is None else decay + bias.float().reshape(heads, -1)
    factor = a_log.float().exp().reshape(heads, 1)
    if name in ("softplus", "qwen"):
        return -factor * F.softplus(raw)
    return op.get("gate_lower_bound", -5.0) * torch.sigmoid(factor * raw)


def _packed_convolution(
    op: Operation, x: Any, weight: Any, starts: Any, bias: Any, state: Any, captures: Any = None,
    delta: Any = None, mask: Any = None,
) -> Any:  # fmt: skip
    """Convolve each channel with what came before in its sequence; returns the rows and new states."""
    op.require(state_update_capacity=0)
    if delta is not None or mask is not None:
        raise ShapeError(f"{op.name} with weights that depend on tokens is not supported")
    gap = op.get("dilation", 1)
    rows, states = [], []
    for each, tokens in enumerate(_sequences(starts, len(state), len(x))):
        whole = torch.cat([state[each], x[tokens].T], -1)
        rows.append(F.conv1d(whole[None], weight, bias, dilation=gap, groups=x.shape[1])[0].T)
        states.append(whole[:, whole.shape[1] - state.shape[2] :])
    found = torch.cat(rows)
    silu = op.get("activation", "none") in ("silu", "swish")
    return F.silu(found) if silu else found, torch.stack(states)


# streams -----------------------------------------------------------------------------------------------


def _grouped(op: Operation, x: Any) -> Any:
    count = op.get("num_branches", 0)
    return x.float().unflatten(-1, (count, -1)) if count else x.float()


def _per_stream(gates: Any, like: Any) -> Any:
    """Return gates of streams, or of their elements, so that they multiply ``[..., streams, elements]``."""
    gates = gates.float()
    if gates.shape == like.shape[:-1]:
        return gates.unsqueeze(-1)
    return gates.reshape(like.shape) if gates.numel() == like.numel() else gates


def _pre_mix(op: Operation, streams: Any, gates: Any) -> Any:
    wide = _grouped(op, streams)
    found = (wide * _per_stream(gates, wide)).sum(-2) * op.get("reduction_scale", 1.0)
    return found.to(streams.dtype)


def _post_mix(op: Operation, streams: Any, block: Any, gates: Any, mix: Any = None) -> Any:
    wide = _grouped(op, streams)
    mixed = wide if mix is None else torch.matmul(mix.float().mT, wide)
    found = mixed + _per_stream(gates, wide) * block.float().unsqueeze(-2)
    return found.reshape(streams.shape).to(streams.dtype)


def _engram_gate(
    op: Operation, key: Any, query: Any, value: Any, key_scale: Any, query_scale: Any, scale: Any = None
) -> Any:
    """Multiply values by a function of the product of keys and queries, both normed."""
    epsilon, size = op.get("epsilon", 1e-5), key.shape[-1]
    sides = (
        root_mean_square(x.float(), s.float(), epsilon)[0]
        for x, s in ((key, key_scale), (query, query_scale))
    )
    dot = torch.mul(*sides).sum(-1, keepdim=True) / sqrt(size)
    gated = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt()) * value.float().unsqueeze(-2)
    normed = None if scale is None else root_mean_square(gated, scale.float(), epsilon)[0].to(value.dtype)
    return gated.to(value.dtype), normed


# experts -----------------------------------------------------------------------------------------------


def _route(op: Operation, logits: Any, bias: Any, projection: Any = None) -> Any:
    """Return logarithms of the chosen experts' scores, by groups first; or the scores of all."""
    rows = logits.reshape(-1, logits.shape[-1]).float()
    scores = torch.sigmoid(rows if projection is None else F.linear(rows, projection.float()))
    biased = scores + bias.float()
    if op.count > 1:
        return None, biased, scores
    count, groups = op.get("top_k"), op.get("n_group", 1)
    parts = biased.unflatten(-1, (groups, -1))
    best = parts.topk(min(op.get("group_topk", 2), parts.shape[-1]), -1).values.sum(-1)
    active = torch.zeros_like(best, dtype=torch.bool)
    active.scatter_(1, best.topk(op.get("topk_group", 1), -1).indices, True)
    chosen = parts.masked_fill(~active.unsqueeze(-1), float("-inf")).flatten(1).topk(count, -1).indices
    found = torch.full_like(scores, op.get("router_sentinel", -1e4))
    found.scatter_(1, chosen, scores.clamp(min=1e-20).log().gather(1, chosen))
    return found.to(logits.dtype)


_ROWS: Mapping[str, Run] = {
    "GatedDeltaNet": _delta_net,
    "VarlenCausalConvWithState": _packed_convolution,
    "HyperConnectionPreMix": _pre_mix,
    "HyperConnectionPostMix": _post_mix,
    "EngramGate": _engram_gate,
    "MoEGroupRouter": _route,
}
"""By their names in the domain."""

STATES: Mapping[str, Run] = {f"com.microsoft::{name}": row for name, row in _ROWS.items()}
"""Operator, with its domain -> what computes it."""
