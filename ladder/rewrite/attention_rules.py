"""Rules that bring attention to the form that kernels take: what lies around it goes into it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from ladder.ir.attention import (
    CODES,
    FLOATS,
    HEAD_MULTIPLE,
    MOST_HEAD_ELEMENTS,
    as_attention,
    open_extents,
)
from ladder.ir.attention_row import EXTRAS, named_operands
from ladder.ir.build import is_by_element, node_attributes
from ladder.ir.graph import Node
from ladder.ir.ops import get_operator
from ladder.rewrite.rules import Match, Rule, Rules, pattern
from schedules.attention import choose
from targets import TileDevice
from tile_types.errors import LadderError

VIEWS = ("reshape", "broadcast")
COMPARISONS = {"less": 0, "less_equal": 1}
"""Comparison ``key ? position`` -> reach."""

MOST_TOKENS = 64
"""Query tokens up to which a position replaces a mask: more are torch's, which makes one in each layer."""


def _rebuilt(match: Match, given: dict[str, str], **changed: Any) -> str:
    """Add the attention of a match with other operands and attributes."""
    extras = tuple(name for name in EXTRAS if name in given)
    attributes: dict[str, Any] = dict(match.root.attributes) | {"extras": extras} | changed
    operands = [given[name] for name in ("q", "k", "v", *extras)]
    return match.builder.add("attention", *operands, **attributes)


def _operands(match: Match, node: Node) -> dict[str, str]:
    return dict(named_operands(node.inputs, node_attributes(node)))


def _turn(match: Match) -> str | None:
    """``transpose(attention)`` -> attention whose result has heads behind tokens."""
    inner = match.node("inner")
    given = node_attributes(inner)
    if node_attributes(match.root)["permutation"] != (0, 2, 1, 3) or given["turned"]:
        return None
    attributes: dict[str, Any] = dict(inner.attributes) | {"turned": True}
    return match.builder.add("attention", *inner.inputs, **attributes)


def _behind_views(match: Match, value: str) -> Node:
    node = match.builder.node(value)
    while node.operator in VIEWS:
        node = match.builder.node(node.inputs[0])
    return node


def _place(match: Match) -> str | None:
    """Mask ``iota <= position`` -> operand ``position``: the kernel reads no mask, and stops there."""
    given = _operands(match, match.root)
    if "mask" not in given or "position" in given or not node_attributes(match.root)["choose"]:
        return None
    node, tokens = _behind_views(match, given["mask"]), match.builder.tile(given["q"]).shape[-2]
    if node.operator not in COMPARISONS or (isinstance(tokens, int) and tokens > MOST_TOKENS):
        return None
    keys, position = node.inputs
    if not _counts_keys(match, keys, match.builder.tile(given["k"]).shape[-2]):
        return None
    shape = match.builder.tile(position).shape
    named = match.builder.tile(position).ttype.name
    lead = (1,) * (4 - len(shape)) + tuple(shape)
    if len(lead) != 4 or lead[1] != 1 or lead[3] != 1 or named not in ("int32", "int64"):
        return None
    given["position"] = match.builder.add("reshape", position, shape=(lead[0], lead[2]))
    del given["mask"]
    return _rebuilt(match, given, choose=False, reach=COMPARISONS[node.operator])


def _counts_keys(match: Match, value: str, keys: Any) -> bool:
    """Tell whether a value is 0, 1, ... along its last axis, as many as there are keys."""
    shape = match.builder.tile(value).shape
    node = match.builder.node(value)
    while node.operator in (*VIEWS, "convert"):
        node = match.builder.node(node.inputs[0])
    if node.operator != "iota" or not shape or shape[-1] != keys:
        return False
    attributes = node_attributes(node)
    single = all(extent == 1 for extent in shape[:-1])
    return single and attributes["begin"] == 0 and attributes["step"] == 1 and attributes["extent"] == keys


def _coded(match: Match, value: str) -> tuple[str, str] | None:
    """Return (codes, scale) of ``convert(convert(codes) * scale)``; None for other values."""
    node = match.builder.node(value)
    node = match.builder.node(node.inputs[0]) if node.operator == "convert" else node
    if node.operator != "mul":
        return None
    for wide, scale in (node.inputs, node.inputs[::-1]):
        inner = match.builder.node(wide)
        if inner.operator != "convert":
            continue
        codes = match.builder.tile(inner.inputs[0])
        fits = match.builder.tile(scale)
        per_token = fits.ttype.name == "float32" and fits.shape == (*codes.shape[:-1], 1)
        if codes.ttype.name in CODES and per_token:
            return inner.inputs[0], scale
    return None


def _keep_codes(match: Match) -> str | None:
    """Take the codes and scales of decoded keys and values as operands."""
    given = _operands(match, match.root)
    if "k_scale" in given:
        return None
    keys, values = (_coded(match, given[name]) for name in "kv")
    if keys is None or values is None:
        return None
    given["k"], given["k_scale"] = keys
    given["v"], given["v_scale"] = values
    return _rebuilt(match, given)


def _fill_heads(match: Match) -> str | None:
    """Attention of heads that kernels do not take -> of heads with zeros behind their elements."""
    given, builder = _operands(match, match.root), match.builder
    tile, shape = builder.tile(given["q"]), match.root.tile.shape
    size = tile.shape[-1]
    if not isinstance(size, int) or shape[-1] != size or tile.ttype.name not in FLOATS:
        return None
    zeros = -size % HEAD_MULTIPLE
    if not zeros or size > MOST_HEAD_ELEMENTS or "k_scale" in given:
        return None
    none = (0,) * len(shape)
    for name in "qkv":
        given[name] = builder.add("pad", given[name], low=none, high=(*none[1:], zeros))
    scale = node_attributes(match.root)["scale"]
    whole = _rebuilt(match, given, scale=float(size) ** -0.5 if scale is None else scale)
    return builder.add("slice", whole, begin=none, shape=shape)


def _add_mask(match: Match, device: TileDevice) -> str | None:
    """Mask that chooses -> what is added: torch's attention would make it of the mask in each layer."""
    if not node_attributes(match.root)["choose"] or not _is_torchs(match, device):
        return None
    given, builder = _operands(match, match.root), match.builder
    mask = builder.node(given["mask"])
    once = builder.node(mask.inputs[0]) if mask.operator == "broadcast" else mask
    ttype = builder.tile(given["q"]).ttype.name
    none, hidden = (builder.add("constant", value=value, type=ttype) for value in (0.0, -math.inf))
    added = builder.add("select", once.name, none, hidden)
    if once is not mask:
        added = builder.add("broadcast", added, shape=mask.tile.shape)
    return _rebuilt(match, given | {"mask": added}, choose=False)


def _is_torchs(match: Match, device: TileDevice) -> bool:
    """Tell whether attention of known sizes is predicted to be faster by torch."""
    extents = open_extents(match.builder, match.root)
    batch, tokens, keys = (extent if isinstance(extent, int) else 0 for extent in extents)
    if not batch * tokens * keys:
        return False
    try:
        return choose(as_attention(match.builder, match.root), device, (batch, tokens, keys)).is_torchs
    except LadderError:
        return True


def added_masks(device: TileDevice) -> Rules:
    """Return the rule for attention that is torch's on a device with kernels of ours."""
    return (Rule("masks are added", pattern("attention"), partial(_add_mask, device=device)),)


TURNED: Rules = (
    Rule("heads behind tokens", pattern("transpose", pattern("attention", name="inner")), _turn),
)
"""For kernels that write a token's heads side by side."""

ATTENTION_FORMS: Rules = (
    *TURNED,
    Rule("positions for masks", pattern("attention"), _place),
    Rule("codes of keys", pattern("attention"), _keep_codes),
    Rule("heads that kernels take", pattern("attention"), _fill_heads),
)
"""For targets whose kernels read positions and codes."""


HEADS_FIRST = (0, 2, 1, 3)
"""Swaps heads and tokens, both ways."""


def _swapped(values: Any) -> tuple[Any, ...]:
    """Return what belongs to four axes with the middle two swapped."""
    return (values[0], values[2], values[1], values[3])


def _behind(match: Match, value: str) -> str | None:
    """Return a value ``[B, H, T, D]`` computed as ``[B, T, H, D]``; None where that takes a copy."""
    node, shape = match.builder.node(value), match.builder.tile(value).shape
    if node.operator == "transpose":
        same = node_attributes(node)["permutation"] == HEADS_FIRST
        return node.inputs[0] if same else None
    given: dict[str, Any] = dict(node.attributes)
    if node.operator == "slice":
        given |= {name: _swapped(given[name]) for name in ("begin", "shape", "step") if given.get(name)}
    elif node.operator == "concat":
        if given["axis"] % 4 != 3:
            return None
    elif not is_by_element(node) or not node.inputs:
        return None
    operands = []
    for operand in node.inputs:
        own = match.builder.tile(operand).shape
        found = _behind(match, operand) if own == shape or (len(own) == 4 and own[1] != 1) else None
        if found is None and (own == shape or len(own) > 4):
            return None
        operands.append(found if found is not None else _spread(match, operand))
        if operands[-1] is None:
            return None
    return match.builder.add(node.operator, *operands, **given)


def _spread(match: Match, value: str) -> Any:
    """Return a value that is the same for all heads as it spreads over ``[B, T, H, D]``; None for others."""
    shape = match.builder.tile(value).shape
    lead = (1,) * (4 - len(shape)) + tuple(shape)
    if lead[1] != 1:
        return None
    return value if not shape else match.builder.add("reshape", value, shape=_swapped(lead))


def _heads_behind(match: Match) -> str | None:
    """``attention(f(transpose(x)), ...)`` -> ``attention(transpose(f(x)), ...)``."""
    q, *rest = match.root.inputs
    shape = match.builder.tile(q).shape
    operator = match.builder.node(q).operator
    computed = get_operator(operator).elementwise or operator in ("convert", "concat")
    if not computed or len(shape) != 4 or 1 in shape[1:3]:
        return None
    found = _behind(match, q)
    if found is None:
        return None
    turned = match.builder.add("transpose", found, permutation=HEADS_FIRST)
    attributes: dict[str, Any] = dict(match.root.attributes)
    return match.builder.add("attention", turned, *rest, **attributes)


QUERY_LAYOUT: Rules = (Rule("queries by tokens", pattern("attention"), _heads_behind),)
"""Where attention writes its result in the order of its queries."""
