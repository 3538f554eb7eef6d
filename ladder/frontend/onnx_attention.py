"""Pattern match of attention, ``softmax(q kᵀ scale + mask) v``, as exporters of ONNX models write it."""

from __future__ import annotations

from collections.abc import Iterator

from ladder.ir.build import node_attributes
from ladder.ir.graph import Node
from ladder.ir.rewrite import Match, Rule, Rules, pattern

RANK = 4
"""Batch, heads, tokens, size."""

NOTHING = -1e30
"""A score that is chosen instead of others, and is no more than this, is the same as one added to them: any
score vanishes beside it."""


def _below(match: Match, value: str, operator: str) -> Node | None:
    """Return the node that computes a value, below conversions, if it is of an operator."""
    node = match.builder.node(value)
    while node.operator == "convert":
        node = match.builder.node(node.inputs[0])
    return node if node.operator == operator else None


def _scores(match: Match, value: str) -> str | None:
    """Return what a softmax over the last axis is of: ``e / sum(e)`` with ``e = exp(s - max(s))``."""
    quotient = _below(match, value, "div")
    if quotient is None:
        return None
    powers, total = (match.builder.node(operand) for operand in quotient.inputs)
    if powers.operator != "exp" or not _reduces(match, total, "reduce_sum", quotient.inputs[0]):
        return None
    shifted = match.builder.node(powers.inputs[0])
    if shifted.operator != "sub":
        return None
    scores, most = shifted.inputs
    return scores if _reduces(match, match.builder.node(most), "reduce_max", scores) else None


def _reduces(match: Match, node: Node, operator: str, value: str) -> bool:
    """Tell whether a node reduces the last axis of a value and keeps it."""
    if node.operator != operator or node.inputs != (value,):
        return False
    attributes, rank = node_attributes(node), len(match.builder.tile(value).shape)
    return bool(attributes["keep"]) and attributes["axis"] % rank == rank - 1


def _product(match: Match, value: str) -> tuple[Node, float] | None:
    """Return (product, scale) of a product that a number may multiply or divide."""
    product = _below(match, value, "matmul")
    if product is not None:
        return product, 1.0
    for operator in ("mul", "div"):
        node = _below(match, value, operator)
        if node is None:
            continue
        product, number = _below(match, node.inputs[0], "matmul"), match.builder.node(node.inputs[1])
        if product is not None and number.operator == "constant":
            factor = float(node_attributes(number)["value"])
            return product, factor if operator == "mul" else 1 / factor
    return None


def _readings(match: Match, scores: str) -> Iterator[tuple[Node, float, str | None]]:
    """Yield (product, scale, mask) for every way to read scores as ``q kᵀ scale + mask``."""
    found = _product(match, scores)
    if found is not None:
        yield *found, None
    total = _below(match, scores, "add")
    for value, mask in (total.inputs, total.inputs[::-1]) if total is not None else ():
        found = _product(match, value)
        if found is not None:
            yield *found, mask
    chosen = _below(match, scores, "select")
    if chosen is not None:
        condition, kept, other = chosen.inputs
        found, number = _product(match, kept), match.builder.node(other)
        if found is not None and number.operator == "constant" and _vanishes(number):
            ttype = match.builder.tile(other).ttype.name
            nothing = match.builder.add("constant", value=0.0, type=ttype)
            yield *found, match.builder.add("select", condition, nothing, other)


def _vanishes(number: Node) -> bool:
    return bool(float(node_attributes(number)["value"]) <= NOTHING)


def _whole(match: Match) -> str | None:
    """``softmax(q @ kᵀ * scale + mask) @ v`` -> ``attention(q, k, v, mask)``."""
    weights, values = match.root.inputs
    scores = None if node_attributes(match.root)["transpose_b"] else _scores(match, weights)
    if scores is None:
        return None
    for product, scale, mask in _readings(match, scores):
        q, keys = product.inputs
        turned = bool(node_attributes(product)["transpose_b"])
        tiles = [match.builder.tile(value) for value in (q, keys, values)]
        fits = all(len(tile.shape) == RANK and tile.shape[:-2] == tiles[0].shape[:-2] for tile in tiles)
        if (
            not fits
            or len({tile.ttype.name for tile in tiles}) > 1
            or match.root.tile.ttype != tiles[0].ttype
        ):
            continue
        k = keys if turned else match.builder.add("transpose", keys, permutation=(0, 1, 3, 2))
        masks = [] if mask is None else [_mask(match, mask, tiles[0].ttype.name)]
        return match.builder.add("attention", q, k, values, *masks, scale=scale)
    return None


def _mask(match: Match, mask: str, ttype: str) -> str:
    """Return a mask with the axes and the type that attention takes."""
    tile = match.builder.tile(mask)
    if tile.ttype.name != ttype:
        mask = match.builder.add("convert", mask, type=ttype)
    shape = (*(1,) * (RANK - len(tile.shape)), *tile.shape)
    return mask if shape == tile.shape else match.builder.add("reshape", mask, shape=shape)


ATTENTION_PATTERNS: Rules = (Rule("match attention", pattern("matmul"), _whole),)
"""For graphs of other tools."""
