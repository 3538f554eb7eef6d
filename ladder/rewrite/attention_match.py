"""Pattern match of attention, ``softmax(q kᵀ · scale + mask) v``, written as several operators.

Scores that are replaced by the least number of their type count as keys that are not seen: softmax gives them
no weight. That holds where each row sees a key (in a row of replaced scores alone all would weigh the same),
so which are replaced must be known while compiling: masks made of counters. Where the mask is an input, a
large negative number that replaces scores of float32 is the same as one added to them (`REPLACED_SCORES`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ladder.ir.attention_row import named_operands
from ladder.ir.build import node_attributes
from ladder.ir.constant import constant_value
from ladder.ir.graph import Node
from ladder.rewrite.merge import softmax_maximum
from ladder.rewrite.rules import Match, Rule, Rules, pattern
from tile_types.library import get_type

FLOAT_MASKS = ("float16", "bfloat16", "float32")

LARGEST_MASKED = -1e30
"""A number that is no more than this stays itself when a score of float32 is added to it."""


@dataclass
class Scores:
    """Facts about attention scores, gathered while their computation is followed back."""

    scale: float = 1.0
    mask: str | None = None
    seen: Seen | None = None
    adds: bool = False
    """Whether a number that replaces scores may be read as one that is added to them."""


@dataclass(frozen=True)
class Seen:
    """Which keys are seen: a truth value that broadcasts to the scores."""

    value: str
    array: npt.NDArray[np.float64]

    def everything(self) -> bool:
        return bool(self.array.all())

    def causal(self, tokens: Any, keys: Any) -> bool:
        """Tell whether row s sees the keys ``t <= s``."""
        rows = self.array.reshape(-1, *self.array.shape[-2:])
        square = self.array.shape[-2:] == (tokens, keys) and tokens == keys
        return square and all(bool((row == np.tri(tokens)).all()) for row in rows)


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


def _spread_number(match: Match, value: str) -> float | None:
    """Return the number that all elements of a value are."""
    node = match.builder.node(value)
    while node.operator in ("reshape", "broadcast", "convert"):
        node = match.builder.node(node.inputs[0])
    return _number(match, node.name)


def _before_softmax(match: Match, value: str) -> str | None:
    """Return s where a value is ``softmax(s)`` along the last axis."""
    ratio = _plain(match, value)
    if ratio.operator != "div":
        return None
    most = softmax_maximum(match.builder, *ratio.inputs)
    if most is None:
        return None
    given, last = node_attributes(most), len(ratio.tile.shape) - 1
    return most.inputs[0] if given["keep"] and given["axis"] % (last + 1) == last else None


def _product_of(match: Match, value: str, found: Scores) -> Node | None:
    """Follow scores back to the product; notes the scale, and the masks that are applied after it."""
    shape = match.builder.tile(value).shape
    node = _plain(match, value)
    if node.operator == "select" and found.seen is None:
        return _chosen(match, node, found)
    if node.operator == "add":
        for inner, mask in (node.inputs, node.inputs[::-1]):
            product = _scaled(match, inner, found)
            if product is not None and _is_mask(match, mask, shape):
                found.mask = _narrow(match, mask)
                return product
        return None
    return _scaled(match, node.name, found)


def _chosen(match: Match, node: Node, found: Scores) -> Node | None:
    """Follow scores of which some are replaced by the least number of their type."""
    condition, *branches = node.inputs
    if len(node.tile.shape) < len(match.builder.tile(condition).shape):
        return None
    for kept, (scores, fill) in ((True, branches), (False, branches[::-1])):
        number = _spread_number(match, fill)
        if number is None or match.builder.tile(scores).shape != node.tile.shape:
            continue
        seen = _seen(match, condition, kept) if number <= least_number(node.tile.ttype.name) else None
        if seen is not None:
            found.seen = seen
            return _product_of(match, scores, found)
        if found.adds and -np.inf < number <= LARGEST_MASKED and node.tile.ttype.name == "float32":
            found.mask = _added(match, condition, kept, number)
            return _scaled(match, scores, found) if _is_mask(match, found.mask, node.tile.shape) else None
    return None


def _seen(match: Match, condition: str, kept: bool) -> Seen | None:
    """Return which keys are seen; None if that is not known while compiling, or if a row sees none."""
    array = constant_value(match.builder.node, _matrix_of(match, condition).name)
    if array is None:
        return None
    truth = (array != 0) if kept else (array == 0)
    if not truth.any(-1).all():
        return None
    return Seen(condition if kept else match.builder.add("negation", condition), truth)


def _matrix_of(match: Match, value: str, beside: tuple[str, ...] = ()) -> Node:
    """Return what computes the matrices that a value is or repeats, before operators of these names."""
    node = match.builder.node(value)
    while node.operator in ("broadcast", "reshape", *beside):
        inner = match.builder.node(node.inputs[0])
        if inner.tile.shape[-2:] != node.tile.shape[-2:]:
            break
        node = inner
    return node


def _added(match: Match, condition: str, kept: bool, number: float) -> str:
    """Return what is added to scores in place of a number that replaces them."""
    none, much = (match.builder.add("constant", value=value, type="float32") for value in (0.0, number))
    return match.builder.add("select", condition, *((none, much) if kept else (much, none)))


def least_number(ttype: str) -> float:
    """Return the least finite number of a type."""
    values = get_type(ttype).probe_values() if get_type(ttype).elem_bits <= 16 else np.finfo(np.float32).min
    values = np.asarray(values, np.float64)
    return float(values[np.isfinite(values)].min())


def _masked(match: Match, found: Scores, ttype: str, tokens: Any, keys: Any) -> dict[str, Any]:
    """Return the masks of attention: its operand ``mask`` if any, and attributes."""
    if found.seen is None or found.seen.everything():
        return {} if found.mask is None else {"mask": found.mask, "strict": True}
    if found.mask is None:
        causal = found.seen.causal(tokens, keys)
        return {"causal": True} if causal else {"mask": found.seen.value, "choose": True}
    builder = match.builder
    added = found.mask
    if builder.tile(added).ttype.name != ttype:
        added = builder.add("convert", added, type=ttype)
    least = builder.add("constant", value=least_number(ttype), type=ttype, name="least")
    return {"mask": builder.add("select", found.seen.value, added, least)}


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


def _matched(match: Match, adds: bool = False) -> str | None:
    """``softmax(q kᵀ · scale + mask) v``, perhaps in another shape -> attention."""
    product = match.root if match.root.operator == "matmul" else match.node("product")
    shape = match.root.tile.shape
    weights = match.builder.node(product.inputs[0])
    weights = match.builder.node(weights.inputs[0]) if weights.operator == "reshape" else weights
    if len(shape) != 4 or len(weights.tile.shape) != 4 or node_attributes(product)["transpose_b"]:
        return None
    scores, found = _before_softmax(match, weights.name), Scores(adds=adds)
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
    if len(types) > 1 or (adds and types != {"float32"}):
        return None
    (ttype,) = types
    given = _masked(match, found, ttype, shape[-2], match.builder.tile(k).shape[-2])
    masks = [given.pop("mask")] if "mask" in given else []
    extras = ("mask",) * len(masks)
    return match.builder.add("attention", q, k, v, *masks, scale=found.scale, extras=extras, **given)


def _known_mask(match: Match) -> str | None:
    """Drop a mask of which it is known while compiling that it hides no keys, or those behind the token."""
    given = node_attributes(match.root)
    named = dict(named_operands(match.root.inputs, given))
    if "mask" not in named:
        return None
    seen = _seen_by(match, named["mask"], bool(given["choose"]))
    tokens, keys = (match.builder.tile(named[name]).shape[-2] for name in "qk")
    causal = seen is not None and not seen.everything()
    if seen is None or (causal and not seen.causal(tokens, keys)):
        return None
    del named["mask"]
    attributes: dict[str, Any] = dict(match.root.attributes) | {"choose": False, "strict": False}
    attributes |= {"causal": causal or given["causal"], "extras": tuple(named)[3:]}
    return match.builder.add("attention", *named.values(), **attributes)


def _seen_by(match: Match, mask: str, chooses: bool) -> Seen | None:
    """Return which keys a mask of attention shows, one that chooses or one of 0 and minus infinity."""
    if chooses:
        return _seen(match, mask, True)
    node = _matrix_of(match, mask, ("convert",))
    if node.operator != "select":
        return None
    numbers = [_spread_number(match, value) for value in node.inputs[1:]]
    if numbers.count(0.0) != 1:
        return None
    seen = _seen(match, node.inputs[0], numbers[0] == 0.0)
    hides = -np.inf in numbers  # other numbers leave some of a key, but are added to none where all are seen
    return seen if hides or (seen is not None and seen.everything()) else None


PRODUCTS = (pattern("matmul"), pattern("reshape", pattern("matmul", name="product")))
"""Products of weights and values: of four axes, and of stacked matrices."""

ATTENTION_PATTERNS: Rules = (
    *(Rule("match attention", form, _matched) for form in PRODUCTS),
    Rule("masks that are known", pattern("attention"), _known_mask),
)
"""For every program."""

REPLACED_SCORES: Rules = tuple(
    Rule("match attention whose scores are replaced", form, partial(_matched, adds=True)) for form in PRODUCTS
)
"""For CPUs: on GPUs a row of which all scores are replaced may overflow."""
