"""Rewrite rules that hold for every program, as tables."""

from __future__ import annotations

from typing import Any

from ladder.ir.build import node_attributes
from ladder.ir.constant import WHOLE
from ladder.ir.extents import product
from ladder.ir.indexing import Affine, Indexing, parse_indexing
from ladder.ir.ops import get_operator
from ladder.rewrite.rules import Match, Pattern, Rule, Rules, pattern
from tile_types.library import get_type


def _holds(wide: str, narrow: str) -> bool:
    """Whether every value of ``narrow`` is one of ``wide`` (converting there loses nothing)."""
    inner, outer = get_type(narrow), get_type(wide)
    if inner == outer:
        return True
    if inner.is_block or inner.elem_bits > 16:
        return False
    values = inner.probe_values()
    return bool((outer.decode_codes(outer.encode(values)) == values).all())


def _drop_same(match: Match) -> str | None:
    """``convert(x: t, type=t)`` -> ``x``."""
    return match["x"] if match.tile("x").ttype.name == match.root.tile.ttype.name else None


def _fold_converts(match: Match) -> str | None:
    """``convert(convert(x, a), b)`` -> ``convert(x, b)`` if type a holds all values of x."""
    middle, source = match.tile("inner").ttype.name, match.tile("x").ttype.name
    if not _holds(middle, source):
        return None
    attributes: dict[str, Any] = dict(match.root.attributes)
    return match.builder.add("convert", match["x"], level=match.root.tile.level, **attributes)


CONVERT_FOLDING: Rules = (
    Rule("drop convert to the same type", pattern("convert", "x"), _drop_same),
    Rule(
        "fold convert of convert", pattern("convert", pattern("convert", "x", name="inner")), _fold_converts
    ),
)


def _drop_same_shape(match: Match) -> str | None:
    """``reshape(x)``, ``broadcast(x)`` or ``slice(x)`` of the shape of x -> ``x``."""
    return match["x"] if match.tile("x").shape == match.root.tile.shape else None


def _fold_reshapes(match: Match) -> str | None:
    """``reshape(reshape(x))`` -> ``reshape(x)``."""
    return match.builder.add("reshape", match["x"], level=match.root.tile.level, shape=match.root.tile.shape)


def _fold_transposes(match: Match) -> str | None:
    """``transpose(transpose(x, p), q)`` -> ``transpose(x, p[q])``, or ``x``."""
    inner = match.attributes("inner")["permutation"]
    permutation = tuple(inner[axis] for axis in node_attributes(match.root)["permutation"])
    if permutation == tuple(range(len(permutation))):
        return match["x"]
    return match.builder.add("transpose", match["x"], level=match.root.tile.level, permutation=permutation)


def _drop_empty(match: Match) -> str | None:
    """``concat(x, empty)`` -> ``x``; of several parts those that have elements are joined."""
    axis = node_attributes(match.root)["axis"]
    parts = [value for value in match.root.inputs if match.builder.tile(value).shape[axis] != 0]
    if not parts or len(parts) == len(match.root.inputs):
        return None
    if len(parts) == 1:
        return parts[0]
    return match.builder.add("concat", *parts, level=match.root.tile.level, axis=axis)


LAYOUT_FOLDING: Rules = (
    Rule("drop empty parts of joins", pattern("concat"), _drop_empty),
    Rule("drop views of the same shape", pattern("reshape|broadcast|slice", "x"), _drop_same_shape),
    Rule("fold reshape of reshape", pattern("reshape", pattern("reshape", "x")), _fold_reshapes),
    Rule("fold transposes", pattern("transpose", pattern("transpose", "x", name="inner")), _fold_transposes),
)


NEUTRAL = {"add": 0, "mul": 1}
"""Operator -> the number that changes nothing: ``-0.0 + 0.0`` is another zero, so sums only of integers."""


def _drop_neutral(match: Match) -> str | None:
    """``x + 0`` of integers, ``x * 1`` -> ``x``."""
    operator, tile = match.root.operator, match.root.tile
    if operator == "add" and tile.ttype.name not in WHOLE:
        return None
    for value, other in (match.root.inputs, match.root.inputs[::-1]):
        node = match.builder.node(other)
        number = node_attributes(node)["value"] if node.operator == "constant" else None
        if number == NEUTRAL[operator] and match.builder.tile(value) == tile:
            return value
    return None


NEUTRAL_FOLDING: Rules = (Rule("drop numbers that change nothing", pattern("add|mul"), _drop_neutral),)


_MATMULS = {False: parse_indexing("m k, k n -> m n"), True: parse_indexing("m k, n k -> m n")}


def renamed(indexing: Indexing) -> Indexing:
    """Name the indices i0, i1 ... in order of appearance, so that equal indexings compare equal."""
    names = {name: f"i{number}" for number, name in enumerate(indexing.names)}
    operands = tuple(
        tuple(Affine.of({names[n]: f for n, f in axis.terms}, axis.offset) for axis in axes)
        for axes in indexing.operands
    )
    return Indexing(operands, tuple(names[name] for name in indexing.result))


def _contract_to_matmul(match: Match) -> str | None:
    """``contract('m k, n k -> m n')`` -> ``matmul(transpose_b)``; operands swap if need be."""
    attributes = node_attributes(match.root)
    indexing = parse_indexing(attributes["spec"])
    if attributes["sizes"] or attributes["pad"]:
        return None
    swapped = Indexing(indexing.operands[::-1], indexing.result)
    orders = ((indexing, (match["a"], match["b"])), (swapped, (match["b"], match["a"])))
    for candidate, operands in orders:
        for transpose_b, form in _MATMULS.items():
            if renamed(candidate) == renamed(form):
                return match.builder.add(
                    "matmul",
                    *operands,
                    level=match.root.tile.level,
                    transpose_b=transpose_b,
                    type=match.root.tile.ttype.name,
                )
    return None


MATMUL_RECOGNITION: Rules = (Rule("contract to matmul", pattern("contract", "a", "b"), _contract_to_matmul),)


def _outer_product(match: Match) -> str | None:
    """``matmul(x[..., M, 1], y[..., 1, N])`` -> ``x * y + 0``: a sum begins with 0, so that none is -0."""
    column, row = match.tile("column"), match.tile("row")
    types = {tile.ttype.name for tile in (column, row, match.root.tile)}
    if column.shape[-1] != 1 or types != {"float32"}:
        return None
    add, value = match.builder.add, match["row"]
    if node_attributes(match.root)["transpose_b"]:
        value = add("reshape", value, shape=(*row.shape[:-2], 1, row.shape[-2]))
    return add("add", add("mul", match["column"], value), add("constant", value=0.0, type="float32"))


OUTER_PRODUCTS: Rules = (
    Rule("products over an axis of one element", pattern("matmul", "column", "row"), _outer_product),
)


def _sink_reshape(match: Match) -> str | None:
    """``f(reshape(x))`` -> ``reshape(f(x))`` for functions of one number and conversions."""
    operator = get_operator(match.root.operator)
    if not (operator.unary or operator.name == "convert"):
        return None
    attributes: dict[str, Any] = dict(match.root.attributes)
    value = match.builder.add(operator.name, match["x"], **attributes)
    return match.builder.add("reshape", value, shape=match.root.tile.shape)


RESHAPE_SINKING: Rules = (Rule("sink reshape", Pattern(inputs=(pattern("reshape", "x"),)), _sink_reshape),)
"""Brings a product and the functions that follow it together: layers reshape their results in between."""


def _repeated_heads(match: Match, value: str) -> str | None:
    """Return x where a value is x with each head repeated: ``reshape(broadcast(reshape(x)))``."""
    node = match.builder.node(value)
    chain = []
    for operator in ("reshape", "broadcast", "reshape"):
        if node.operator != operator:
            return None
        chain.append(node)
        value = node.inputs[0]
        node = match.builder.node(value)
    joined, stretched, opened = chain
    shape = match.builder.tile(value).shape
    one = (*shape[:-2], 1, *shape[-2:])
    if opened.tile.shape != one or len(stretched.tile.shape) != len(one):
        return None
    same = all(
        a == b for at, (a, b) in enumerate(zip(one, stretched.tile.shape, strict=True)) if at != len(one) - 3
    )
    merged = (*shape[:-3], product([shape[-3], stretched.tile.shape[-3]]), *shape[-2:])
    return value if same and joined.tile.shape == merged else None


def _group_heads(match: Match) -> str | None:
    """``attention(q, repeat(k), repeat(v))`` -> ``attention(q, k, v)``: heads of k serve groups of q's."""
    q, k, v, *rest = match.root.inputs
    keys, values = (_repeated_heads(match, value) for value in (k, v))
    if keys is None or values is None:
        return None
    attributes: dict[str, Any] = dict(match.root.attributes)
    return match.builder.add("attention", q, keys, values, *rest, **attributes)


GROUPED_ATTENTION: Rules = (Rule("group heads", pattern("attention"), _group_heads),)
"""Models repeat the keys of grouped-query attention; the operator need not."""
