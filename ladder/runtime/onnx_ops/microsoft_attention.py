"""Attention and rotary embeddings of the domain com.microsoft, with what they keep from call to call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch

from ladder.runtime.onnx_ops.integers import whole_product
from ladder.runtime.onnx_ops.microsoft import root_mean_square, unpacked
from ladder.runtime.onnx_ops.operation import Operation, Run
from tile_types.errors import ShapeError


def rotated(x: Any, cosine: Any, sine: Any, interleaved: bool) -> Any:
    """Rotate pairs of the last axis of ``x[batch, heads, rows, size]``; what lies beyond the angles stays."""
    width = 2 * cosine.shape[-1]
    head, rest = x[..., :width], x[..., width:]
    a, b = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    turned = (a * cosine - b * sine, b * cosine + a * sine)
    found = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([found, rest], -1)


def _rotary(op: Operation, x: Any, positions: Any, cosines: Any, sines: Any) -> Any:
    """Rotate heads by angles of their positions; onnxruntime reads no ``scale``."""
    heads = op.get("num_heads", 0)
    if x.ndim == 3:
        size = x.shape[2] // heads if heads else 2 * cosines.shape[1]
        value = x.unflatten(2, (-1, size)).transpose(1, 2)
    else:
        value = x
    rows = torch.arange(value.shape[2], device=x.device)
    at = positions + rows if positions.numel() == 1 else positions
    where = _places_of(at, cosines)
    cosine, sine = (table[where].unsqueeze(-3) for table in (cosines, sines))
    found = rotated(value, cosine, sine, bool(op.get("interleaved", 0)))
    return found.transpose(1, 2).reshape(x.shape) if x.ndim == 3 else found


def _places_of(positions: Any, table: Any) -> Any:
    """Return positions as indices of a table; ShapeError if some are beyond it, or below 0."""
    found = positions.long()
    if found.numel() and (int(found.min()) < 0 or int(found.max()) >= len(table)):
        raise ShapeError(f"positions {int(found.min())} to {int(found.max())} of {len(table)}")
    return found


def _rotary_of_images(op: Operation, x: Any, positions: Any, cosines: Any, sines: Any) -> Any:
    """Rotate by angles of which some follow the time, others the row and the column of a token.

    positions: Of all three, ``[3, batch, rows]``.
    """
    sizes, columns = op.get("mrope_section"), torch.arange(cosines.shape[1], device=x.device)
    if op.get("mrope_layout", 0):
        turn = columns % 3
        axis = torch.where((turn == 1) & (columns < 3 * sizes[1]), 1, 0)
        axis = torch.where((turn == 2) & (columns < 3 * sizes[2]), 2, axis)
    else:
        axis = torch.repeat_interleave(torch.arange(3, device=x.device), torch.tensor(sizes, device=x.device))
    where = _places_of(positions, cosines)[axis].movedim(0, -1)  # [batch, rows, columns]
    cosine, sine = (table[where, columns].unsqueeze(1) for table in (cosines, sines))
    size = x.shape[-1] // op.get("num_heads", 0) if op.get("num_heads", 0) else 2 * cosines.shape[1]
    value = x.unflatten(2, (-1, size)).transpose(1, 2) if x.ndim == 3 else x
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
    k_scale: Any = None, v_scale: Any = None, q_norm: Any = None, k_norm: Any = None, counts: Any = None,
) -> Any:  # fmt: skip
    """Attend with fewer heads of keys than of queries, to what was kept and to new rows, causally or not.

    There may be no new rows: layers that share keys attend to those of another.

    lengths: The last position of each sequence after this call.
    k_scale, v_scale: Of codes of kept rows.
    counts: How many of the new rows are filled; all are if it is None.
    """
    heads, kept = op.get("num_heads"), op.get("kv_num_heads")
    if k is None:  # packed
        size = q.shape[2] // (heads + 2 * kept)
        q, k, v = q.split([heads * size, kept * size, kept * size], -1)
    q, k, v = _in_heads(q, heads), _in_heads(k, kept), _in_heads(v, kept)
    q, k = (_normed(op, x, scale, name) for x, scale, name in ((q, q_norm, "q"), (k, k_norm, "k")))
    rows = q.shape[2]
    ends = lengths.reshape(-1).long() + 1
    if counts is not None:
        before = ends - counts.reshape(-1).long()
    else:
        before = torch.zeros_like(ends) if int(total) == rows else ends - rows
    at = before.reshape(-1, 1) + torch.arange(rows, device=q.device)
    most = max(int(total), 0 if past_k is None else past_k.shape[2])
    if len(ends) != len(q) or (len(ends) and not 1 <= int(ends.min()) <= int(ends.max()) <= most):
        raise ShapeError(
            f"{op.name}: sequences end at {ends.tolist()[:9]}, of {len(q)}, at most {most} positions"
        )
    if op.get("do_rotary", 0):
        where = _places_of(at if positions is None else positions, cosines)
        angles = [table[where].unsqueeze(1) for table in (cosines, sines)]
        turn = bool(op.get("rotary_interleaved", 0))
        q, k = (rotated(x, angles[0], angles[1], turn) if x.shape[2] else x for x in (q, k))
    codes = [
        _Codes.of(op, name, scale, kept, past)
        for name, scale, past in (("k", k_scale, past_k), ("v", v_scale, past_v))
    ]
    new = [form.rounded(x) for form, x in zip(codes, (k, v), strict=True)]
    window = op.get("local_window_size", -1)
    if op.get("sliding_window_cache", 0):
        both = [torch.cat([old, fresh], 2) for old, fresh in zip((past_k, past_v), new, strict=True)]
        places, index = _window_places(past_k.shape[2], window, before, ends, at)
        caches = [x.gather(2, index[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3])) for x in both]
    else:
        both = caches = [
            _appended(old, fresh, at, int(total)) for old, fresh in zip((past_k, past_v), new, strict=True)
        ]
        places = torch.arange(both[0].shape[2], device=q.device).expand(len(at), -1)
    keys, values = (form.values(x, q.dtype) for form, x in zip(codes, both, strict=True))
    mask = _seen(op, places.unsqueeze(1), at.unsqueeze(-1), ends.reshape(-1, 1, 1))
    bias = None if bias is None else _of_places(bias, places)
    found, scores = _with_scores(op, q, keys, values, mask.unsqueeze(1), bias, sink)
    if scores is None:
        return _joined(found), *caches
    return _joined(found), *caches, scores[..., : int(total)] if op.get("qk_output", 0) else None


def _normed(op: Operation, x: Any, scale: Any, name: str) -> Any:
    """Return heads over the roots of their mean squares, times a vector; as they are where there is none."""
    if scale is None:
        return x
    epsilon = op.get(f"{name}_norm_epsilon", op.get("qk_norm_epsilon", 1e-6))
    return root_mean_square(x, scale, epsilon)[0]


def _seen(op: Operation, places: Any, at: Any, ends: Any) -> Any:
    """Return which keys at some positions a query at one sees.

    ends: Positions behind the last key.
    """
    if not op.get("causal", 1):
        op.require(local_window_size=-1)
        return places < ends
    window = op.get("local_window_size", -1)
    return (places <= at) & (places > at - window) if window > 0 else places <= at


@dataclass(frozen=True)
class _Codes:
    """How rows of a cache are stored: bits of a code, 0 for numbers; scales of all, or of heads' elements."""

    bits: int
    scale: Any

    @classmethod
    def of(cls, op: Operation, name: str, scale: Any, heads: int, past: Any) -> _Codes:
        """Return what the attributes say of keys or values."""
        if op.get(f"{name}_quant_type", "NONE") == "NONE":
            return cls(0, None)
        bits = op.get("kv_cache_bit_width", 8)
        if scale is None or past is None or (past.dtype, bits) not in ((torch.int8, 8), (torch.uint8, 4)):
            raise ShapeError(f"{op.name}: codes of {bits} bits in {None if past is None else past.dtype}")
        return cls(bits, scale.reshape(1, heads, 1, -1) if scale.numel() > 1 else scale.reshape(1, 1, 1, 1))

    def rounded(self, rows: Any) -> Any:
        """Return new rows as they are stored."""
        if not self.bits:
            return rows
        most = (1 << (self.bits - 1)) - 1
        codes = (rows.float() / self.scale.float()).round().clamp(-most - 1, most)
        if self.bits == 8:
            return codes.to(torch.int8)
        pairs = (codes + 8).to(torch.uint8)
        return pairs[..., ::2] | pairs[..., 1::2] << 4

    def values(self, stored: Any, dtype: Any) -> Any:
        """Return the numbers that are stored."""
        if not self.bits:
            return stored
        codes = stored if self.bits == 8 else unpacked(stored, 4, 2 * stored.shape[-1]) - 8
        return (codes.float() * self.scale.float()).to(dtype)


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
    if not rows and old is not None:  # another layer's, with nothing new
        return old
    extent = max(total, 0 if old is None else old.shape[2])
    found = new.new_zeros(batch, heads, extent, size)
    if old is not None:
        found[:, :, : old.shape[2]] = old
    places = at.reshape(batch, 1, rows, 1).expand(new.shape)
    return found.scatter(2, places, new)


def _attended(op: Operation, q: Any, k: Any, v: Any, mask: Any, bias: Any = None, sink: Any = None) -> Any:
    return _with_scores(op, q, k, v, mask, bias, sink)[0]


def _with_scores(op: Operation, q: Any, k: Any, v: Any, mask: Any, bias: Any = None, sink: Any = None) -> Any:
    """Attend; returns the rows, and scores before or after softmax if the node asks for them."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    scores = torch.matmul(q, k.mT).float() * (op.get("scale", 0.0) or 1 / sqrt(q.shape[-1]))
    if sink is None and op.get("smooth_softmax", 0) > 0:
        sink = scores.new_zeros(scores.shape[1])
    cap = op.get("softcap", 0.0)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores if bias is None else scores + bias
    masked = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
    if sink is not None:
        extra = sink.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        shares = _softmax(torch.cat([masked, extra], -1), v.dtype)[..., :-1]
    else:
        shares = _softmax(masked, v.dtype)
    found = torch.matmul(shares, v)
    if op.count < 4:
        return found, None
    before = scores if mask is None else scores.masked_fill(~mask, 0)
    return found, shares if op.get("qk_output", 1) == 2 else before.to(q.dtype)


def _multi_head(
    op: Operation, q: Any, k: Any = None, v: Any = None, bias: Any = None, mask: Any = None,
    added: Any = None, past_k: Any = None, past_v: Any = None, length: Any = None, origins: Any = None,
) -> Any:  # fmt: skip
    """Attend with separate projections of queries, keys and values.

    length: How many rows of what was kept are filled; new ones come behind them, None: all are.
    origins: The beam that each kept row of a beam comes from, ``[batch, beams, rows]``.
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
    fresh, new = k.shape[2], (k, v)
    beams = [_of_beams(past, origins, length) for past in (past_k, past_v)]
    k, v = _all_rows(k, v, beams[0], beams[1], length)
    added = _with_masks(op, mask, added, q, k, k.shape[2] - fresh)
    found, scores = _with_scores(op, q, k, v, None, added)
    if past_k is None or length is None:
        return (_joined(found), k, v, scores)[: max(op.count, 3)]
    kept = (_behind(past, rows, int(length)) for past, rows in zip((past_k, past_v), new, strict=True))
    return (_joined(found), *kept, scores)[: max(op.count, 3)]


def _of_beams(past: Any, origins: Any, length: Any) -> Any:
    """Return the rows that were kept, each from the beam that it comes from."""
    if origins is None or past is None:
        return past
    batch, count = len(past), int(length)
    beam = torch.arange(batch, device=past.device).reshape(-1, 1)
    sources = beam // origins.shape[1] * origins.shape[1] + origins.reshape(batch, -1)[:, :count]
    places = torch.arange(count, device=past.device)
    return past.transpose(1, 2)[sources.long(), places].transpose(1, 2)


def _all_rows(k: Any, v: Any, past_k: Any, past_v: Any, length: Any) -> tuple[Any, Any]:
    """Return keys and values with those that were kept before them."""
    if past_k is None:
        return k, v
    count = past_k.shape[2] if length is None else int(length)
    return torch.cat([past_k[:, :, :count], k], 2), torch.cat([past_v[:, :, :count], v], 2)


def _behind(buffer: Any, rows: Any, count: int) -> Any:
    """Return a buffer with rows behind its first ones."""
    return torch.cat([buffer[:, :, :count], rows, buffer[:, :, count + rows.shape[2] :]], 2)


def _decoder_masked(
    op: Operation, q: Any, k: Any = None, v: Any = None, mask: Any = None, added: Any = None,
    past_k: Any = None, past_v: Any = None, length: Any = None, beams: Any = None, origins: Any = None,
    bias: Any = None,
) -> Any:  # fmt: skip
    """Attend with one row of queries: `_multi_head` with its operands in another order."""
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
    op: Operation,
    x: Any,
    weight: Any,
    bias: Any = None,
    mask: Any = None,
    past: Any = None,
    added: Any = None,
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


_ROWS: Mapping[str, Run] = {
    "RotaryEmbedding": _rotary,
    "MRotaryEmbedding": _rotary_of_images,
    "GroupQueryAttention": _group_query,
    "MultiHeadAttention": _multi_head,
    "DecoderMaskedMultiHeadAttention": _decoder_masked,
    "Attention": _attention,
    "QAttention": _quantized_attention,
}
"""By their names in the domain."""

ATTENTION: Mapping[str, Run] = {f"com.microsoft::{name}": row for name, row in _ROWS.items()}
"""Operator, with its domain -> what computes it."""
