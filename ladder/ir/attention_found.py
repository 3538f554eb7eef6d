"""Attention that a model spells out, ``softmax(q kᵀ · scale + mask) v``, as the one operator that it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ladder.ir.build import node_attributes
from ladder.ir.graph import Node
from ladder.ir.rewrite import Match, Rule, Rules, pattern

FLOAT_MASKS = ("float16", "bfloat16", "float32")


@dataclass
class Scores:
    """What is known of the scores while their computation is followed back."""

    scale: float = 1.0
    mask: str | None = None


def _is_float(match: Match, value: str) -> bool:
    return match.builder.tile(value).ttype.name in FLOAT_MASKS


def _plain(match: Match, value: str) -> Node:
    """Return the node that computes a value, conversions between floats left out."""
    node = match.builder.node(value)
    while node.operator == "convert" and _is_float(match, node.inputs[0]) and _is_float(match, node.name):
        node = match.builder.node(node.inputs[0])
    return node


def _number(match: Match, value: str) -> float | None:
    node = match.builder.node(value)
    return float(node_attributes(node)["value"]) if node.operator == "constant" else None


def _before_softmax(match: Match, value: str) -> str | None:
    """Return s where a value is ``softmax(s)`` along the last axis."""
    ratio = _plain(match, value)
    if ratio.operator != "div":
        return None
    powers, total = (match.builder.node(x) for x in ratio.inputs)
    if powers.operator != "exp" or total.operator != "reduce_sum" or total.inputs[0] != powers.name:
        return None
    shifted = match.builder.node(powers.inputs[0])
    if shifted.operator != "sub":
        return None
    most = match.builder.node(shifted.inputs[1])
    last = len(ratio.tile.shape) - 1
    along = all(
        node_attributes(n)["axis"] % (last + 1) == last and node_attributes(n)["keep"] for n in (total, most)
    )
    if most.operator != "reduce_max" or most.inputs[0] != shifted.inputs[0] or not along:
        return None
    return shifted.inputs[0]


def _product_of(match: Match, value: str, found: Scores) -> Node | None:
    """Follow scores back to the product; notes the scale, and the mask that is added after it."""
    shape = match.builder.tile(value).shape
    node = _plain(match, value)
    if node.operator == "add":
        for inner, mask in (node.inputs, node.inputs[::-1]):
            product = _scaled(match, inner, found)
            if product is not None and _is_mask(match, mask, shape):
                found.mask = _narrow(match, mask)
                return product
        return None
    return _scaled(match, node.name, found)


def _scaled(match: Match, value: str, found: Scores) -> Node | None:
    """Return the product that a value is, up to one factor."""
    node, scale = _plain(match, value), 1.0
    if node.operator in ("mul", "div"):
        number = _number(match, node.inputs[1])
        if number is None or number == 0.0:
            return None
        scale = number if node.operator == "mul" else 1.0 / number
        node = _plain(match, node.inputs[0])
    node = _plain(match, node.inputs[0]) if node.operator == "reshape" else node
    if node.operator != "matmul" or len(node.tile.shape) < 3:
        return None
    found.scale = scale
    return node


def _is_mask(match: Match, value: str, shape: Any) -> bool:
    """Tell whether a value spreads over batch, heads or tokens of scores, with a number per key."""
    own = match.builder.tile(value).shape
    lead = (1,) * (len(shape) - len(own)) + tuple(own)
    fits = len(lead) == len(shape) and lead[-1] == shape[-1]
    return fits and all(a in (1, b) for a, b in zip(lead, shape, strict=True)) and _is_float(match, value)


def _narrow(match: Match, value: str) -> str:
    """Return a mask as it was before it was widened."""
    node = match.builder.node(value)
    if node.operator == "convert" and _is_float(match, node.inputs[0]):
        before, after = (match.builder.tile(x).ttype for x in (node.inputs[0], value))
        if before.elem_bits <= after.elem_bits:
            return node.inputs[0]
    return value


def _four_axes(match: Match, value: str, lead: Any) -> str | None:
    """Return the operand of a product of stacked matrices with its own axes of batch and heads."""
    tile = match.builder.tile(value)
    if len(tile.shape) == 4:
        return value if tile.shape[:2] == tuple(lead) else None
    return match.builder.add("reshape", value, shape=(*lead, *tile.shape[-2:]))


def _spelt_out(match: Match) -> str | None:
    """``reshape(softmax(q kᵀ · scale + mask) v)`` -> attention."""
    product = match.node("product")
    shape = match.root.tile.shape
    weights = match.builder.node(product.inputs[0])
    weights = match.builder.node(weights.inputs[0]) if weights.operator == "reshape" else weights
    if len(shape) != 4 or len(weights.tile.shape) != 4 or node_attributes(product)["transpose_b"]:
        return None
    scores, found = _before_softmax(match, weights.name), Scores()
    inner = None if scores is None else _product_of(match, scores, found)
    lead = shape[:2]
    if inner is None or weights.tile.shape[:2] != lead or weights.tile.shape[2] != shape[2]:
        return None
    q, k = (_four_axes(match, value, lead) for value in inner.inputs)
    v = _four_axes(match, product.inputs[1], lead)
    if q is None or k is None or v is None or match.builder.tile(q).shape[:-1] != shape[:-1]:
        return None
    if not node_attributes(inner)["transpose_b"]:
        k = match.builder.add("transpose", k, permutation=(0, 1, 3, 2))
    types = {match.builder.tile(value).ttype.name for value in (q, k, v)} | {match.root.tile.ttype.name}
    if len(types) > 1:
        return None
    masks = [] if found.mask is None else [found.mask]
    extras = ("mask",) * len(masks)
    return match.builder.add("attention", q, k, v, *masks, scale=found.scale, extras=extras)


SPELT_OUT: Rules = (
    Rule("attention spelt out", pattern("reshape", pattern("matmul", name="product")), _spelt_out),
)
"""For targets that have attention in one kernel."""
