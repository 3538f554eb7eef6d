"""Rewrite rules that hold for every program, as tables."""

from __future__ import annotations

from typing import Any

from ladder.ir.build import GraphBuilder, is_by_element, node_attributes
from ladder.ir.constant import WHOLE
from ladder.ir.extents import Shape, product
from ladder.ir.graph import Node
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
    return outer.holds(inner.probe_values())


def _drop_same(match: Match) -> str | None:
    """``convert(x: t, type=t)`` -> ``x``."""
    return match["x"] if match.tile("x").ttype.name == match.root.tile.ttype.name else None


def _fold_converts(match: Match) -> str | None:
    """``convert(convert(x, a), b)`` -> ``convert(x, b)`` if type a holds all values of x.

    Of one that rounds a value of its own type, in which a kernel may keep more, nothing would be left, unless
    that has been rounded.
    """
    middle, source = match.tile("inner").ttype.name, match.tile("x").ttype.name
    attributes: dict[str, Any] = dict(match.root.attributes)
    if not _holds(middle, source):
        return None
    if attributes.get("exact", False) and source == match.root.tile.ttype.name:
        return match["x"] if _is_rounded(match.builder.node(match["x"])) else None
    return match.builder.add("convert", match["x"], level=match.root.tile.level, **attributes)


def _is_rounded(node: Node) -> bool:
    """Tell whether a value has been rounded to its type where it was made."""
    return node.operator == "convert" and bool(dict(node.attributes).get("exact", False))


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


MOST_BEHIND = 32
"""Values behind a norm's rows among which its numbers are looked for."""


def _is_of_rows(value: str, builder: GraphBuilder) -> bool:
    """Tell whether a value is one number of each row, or made of these element by element, as norms are."""
    rows = builder.tile(value).shape[:-1]
    if builder.tile(value).shape[-1:] == (1,):
        return True
    found = [value]
    for one in found:
        node = builder.node(one)
        if not is_by_element(node):
            continue
        for operand in node.inputs:
            shape = builder.tile(operand).shape
            if shape == (*rows, 1):
                return True
            if shape[:-1] == rows and operand not in found and len(found) < MOST_BEHIND:
                found.append(operand)
    return False


def _sink_reshapes(match: Match) -> str | None:
    """``f(reshape(x), reshape(y), 2)`` -> ``reshape(f(x, y, 2))``, where x and y have one shape."""
    operator, builder = get_operator(match.root.operator), match.builder
    nodes = [builder.node(value) for value in match.root.inputs]
    views = [node.operator == "reshape" and node.tile.shape == match.root.tile.shape for node in nodes]
    shapes = {builder.tile(node.inputs[0]).shape for node, view in zip(nodes, views, strict=True) if view}
    if not (operator.elementwise or operator.name == "convert") or len(shapes) != 1:
        return None
    if not any(view and _is_of_rows(n.inputs[0], builder) for n, view in zip(nodes, views, strict=True)):
        return None
    operands = []
    for value, node, view in zip(match.root.inputs, nodes, views, strict=True):
        if not view and product(builder.tile(value).shape) != 1:
            return None
        operands.append(node.inputs[0] if view else builder.add("reshape", value, shape=()))
    attributes: dict[str, Any] = dict(match.root.attributes)
    value = builder.add(operator.name, *operands, **attributes)
    return builder.add("reshape", value, shape=match.root.tile.shape)


def _merge_columns(match: Match) -> str | None:
    """``f(x[n, a, b], reshape(mean[n, 1]), ...)`` -> ``reshape(f(reshape(x)[n, a * b], mean, ...))``.

    Norms over several axes then have rows of one axis, as their reductions do. What follows them on the same
    axes has such rows too: ``f(reshape(y[n, a * b]), weight[a, b])``.
    """
    root, builder = match.root, match.builder
    shape = root.tile.shape
    if not get_operator(root.operator).elementwise or len(root.inputs) < 2 or len(shape) < 2:
        return None
    nodes = [builder.node(value) for value in root.inputs]
    rows = next((rows for node in nodes if (rows := _rows_of(node, builder, shape)) is not None), None)
    if rows is None or _has_rows(match):
        return None
    columns, operands = shape[len(rows) :], []
    flat = product(columns)
    for node, value in zip(nodes, root.inputs, strict=True):
        own = builder.tile(value).shape
        own = (*(1 for _ in shape[len(own) :]), *own)
        if _rows_of(node, builder, shape) == rows:
            operands.append(node.inputs[0])
        elif own[len(rows) :] == columns:
            operands.append(builder.add("reshape", value, shape=(*own[: len(rows)], flat)))
        elif product(own[len(rows) :]) == 1:
            operands.append(builder.add("reshape", value, shape=(*own[: len(rows)], 1)))
        else:
            return None
    attributes: dict[str, Any] = dict(root.attributes)
    value = builder.add(root.operator, *operands, **attributes)
    return builder.add("reshape", value, shape=shape)


def _rows_of(node: Node, builder: GraphBuilder, shape: Shape) -> Shape | None:
    """Return the row axes if a value of several axes of columns is a reshape of normed rows, or numbers."""
    if node.operator != "reshape":
        return None
    source = builder.tile(node.inputs[0]).shape
    rows = source[:-1]
    several = sum(extent != 1 for extent in shape[len(rows) :]) > 1
    if not source or not several or shape[: len(rows)] != rows:
        return None
    own, columns = node.tile.shape, shape[len(rows) :]
    ones = (*rows, *(1 for _ in columns))
    whole = source[-1] == product(columns) and own == shape and _is_of_rows(node.inputs[0], builder)
    return rows if whole or (source[-1] == 1 and own == ones) else None


def _part_columns(match: Match) -> str | None:
    """``f(reshape(x[n, a, b])[n, a * b], y[n, a * b])`` -> ``reshape(f(x, reshape(y)[n, a, b]))``.

    Where x is of rows of b, as norms of heads are: what follows is then computed on these rows.
    """
    root, builder = match.root, match.builder
    shape = root.tile.shape
    if not get_operator(root.operator).elementwise or len(root.inputs) < 2 or not shape:
        return None
    nodes = [builder.node(value) for value in root.inputs]
    found = next((columns for node in nodes if (columns := _columns_of(node, builder, shape))), None)
    if found is None or _has_rows(match):
        return None
    operands = []
    for node, value in zip(nodes, root.inputs, strict=True):
        own = builder.tile(value).shape
        if _columns_of(node, builder, shape) == found:
            operands.append(node.inputs[0])
        elif product(own) == 1:
            operands.append(builder.add("reshape", value, shape=()))
        else:
            columns = tuple(1 for _ in found) if own[-1] == 1 else found
            operands.append(builder.add("reshape", value, shape=(*own[:-1], *columns)))
    attributes: dict[str, Any] = dict(root.attributes)
    value = builder.add(root.operator, *operands, **attributes)
    return builder.add("reshape", value, shape=shape)


def _has_rows(match: Match) -> bool:
    """Tell whether an operand of the root's shape is of rows of its last axis."""
    shape = match.root.tile.shape
    alike = (value for value in match.root.inputs if match.builder.tile(value).shape == shape)
    return shape[-1] != 1 and any(_is_of_rows(value, match.builder) for value in alike)


def _columns_of(node: Node, builder: GraphBuilder, shape: Shape) -> Shape | None:
    """Return the axes that a reshape makes the last one, if what it reads is of rows; else None."""
    if node.operator != "reshape" or node.tile.shape != shape:
        return None
    source = builder.tile(node.inputs[0]).shape
    columns = source[len(shape) - 1 :]
    whole = source[: len(shape) - 1] == shape[:-1] and len(columns) > 1 and product(columns) == shape[-1]
    several = sum(extent != 1 for extent in columns) > 1
    return columns if whole and several and _is_of_rows(node.inputs[0], builder) else None


ROW_SINKING: Rules = (
    Rule("sink equal reshapes", Pattern(), _sink_reshapes),
    Rule("join the columns of norms", Pattern(), _merge_columns),
    Rule("part the columns of norms of heads", Pattern(), _part_columns),
)
"""Lets what follows a norm of rows be computed on rows, whatever axes its results have."""


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
