"""The operator ``attention``: what its operands are, its result, and its reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ladder.ir.extents import Shape, product, show_shape, total
from ladder.ir.operator import Attribute, Attributes, Operator, Tiles
from tile_types.errors import ShapeError
from tile_types.tile import Extent, Tile
from tile_types.ttype import TType

EXTRAS = ("mask", "position", "k_scale", "v_scale")
"""Operands that may follow q, k and v, in this order; a fourth operand that is not named is a mask."""


def operand_names(count: int, attributes: Attributes) -> tuple[str, ...]:
    """Return what each of ``count`` operands is."""
    extras = tuple(attributes["extras"]) or ("mask",)
    return ("q", "k", "v", *extras)[:count]


def named_operands(values: Sequence[Any], attributes: Attributes) -> Mapping[str, Any]:
    """Return operands by name."""
    return dict(zip(operand_names(len(values), attributes), values, strict=True))


def _shape(tiles: Tiles, attributes: Attributes) -> Shape:
    """``q[B..., H, S, D]``, ``k[B..., h, T, D]``, ``v[B..., h, T, E]`` give ``[B..., H, S, E]``."""
    q, k, v = (tile.shape for tile in tiles[:3])
    extras = tuple(attributes["extras"])
    if any(name not in EXTRAS for name in extras) or (extras and len(extras) != len(tiles) - 3):
        raise ShapeError(f"attention takes {EXTRAS} behind q, k, v, got {extras} for {len(tiles)} operands")
    if not len(q) == len(k) == len(v) >= 3 or q[-1] != k[-1] or k[-2] != v[-2]:
        raise ShapeError(f"attention cannot take {', '.join(map(show_shape, (q, k, v)))}")
    if attributes["turned"]:
        return (*q[:-3], q[-2], q[-3], v[-1])
    return (*q[:-1], v[-1])


def _reference(values: Sequence[Any], attributes: Attributes) -> Any:
    """Softmax of scaled scores, times v; heads of k and v serve groups of heads of q."""
    given = named_operands(values, attributes)
    q, k, v = (np.asarray(given[name], np.float64) for name in "qkv")
    if "k_scale" in given:
        k, v = k * np.asarray(given["k_scale"]), v * np.asarray(given["v_scale"])
    groups = q.shape[-3] // k.shape[-3]
    k, v = (np.repeat(value, groups, axis=-3) for value in (k, v))
    scale = attributes["scale"] if attributes["scale"] is not None else q.shape[-1] ** -0.5
    scores = q @ np.swapaxes(k, -1, -2) * scale
    if "mask" in given:
        mask = np.asarray(given["mask"])
        scores = np.where(mask != 0, scores, -np.inf) if attributes["choose"] else scores + mask
    if "position" in given:
        limit = np.asarray(given["position"])[:, None, :, None] + attributes["reach"]
        scores = np.where(np.arange(scores.shape[-1]) < limit, scores, -np.inf)
    if attributes["causal"]:
        scores = np.where(np.tril(np.ones(scores.shape[-2:])) != 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    result = weights / weights.sum(-1, keepdims=True) @ v
    return np.swapaxes(result, -2, -3) if attributes["turned"] else result


def _flops(tiles: Tiles, result: Tile, attributes: Attributes) -> Extent:
    width = total([tiles[0].shape[-1], result.shape[-1]])
    return product([2, *tiles[0].shape[:-1], tiles[1].shape[-2], width])


def _type(tiles: Tiles, attributes: Attributes) -> TType:
    return tiles[0].ttype


def _name(arguments: Any, tiles: Tiles, attributes: Attributes) -> Any:
    return ("attention", *arguments)


ATTENTION = Operator(
    "attention", (3, 7), _shape, _reference, None, _name, "other", _flops,
    attributes={
        "causal": Attribute("flag", False), "choose": Attribute("flag", False),
        "scale": Attribute("number", None), "extras": Attribute("literal", ()),
        "turned": Attribute("flag", False), "reach": Attribute("int", 0),
        "strict": Attribute("flag", False),
    },
    result_type=_type, engine="library",
    doc="softmax(q kᵀ scale + mask) v; choose: the mask says which scores count; extras: operands behind v;"
    " position: query token [B, S] sees the keys before position + reach; turned: [B, S, H, E];"
    " strict: rows whose mask is -inf throughout are NaN, as softmax has them, not 0 as torch's operator has",
)  # fmt: skip
