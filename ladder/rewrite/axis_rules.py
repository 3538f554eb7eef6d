"""Rules about axes: reductions are merged, functions move before reshapes, slices before concatenations.

What loops fill part by part, as ``out[:, t] = h``, is one join of all that they wrote.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

from ladder.ir.build import GraphBuilder, node_attributes
from ladder.ir.extents import Shape, product, total
from ladder.ir.graph import Node
from ladder.ir.ops import get_operator
from ladder.ir.shapes import replaced
from ladder.rewrite.rules import Match, Pattern, Rule, Rules, pattern
from tile_types.tile import Extent

REPEATED = 3
"""Times that a join has the same operands from which on an index repeats them: kernels have code for each."""

LEAST_JOINED_COLUMNS = 16
"""Columns of what is repeated from which on it stays a join: its pieces are vectors, remainders are not."""

Pair = tuple[Extent, ...]
"""Extents of two neighbouring axes."""


def _merge(match: Match) -> str | None:
    """``reduce(reduce(x, axis + 1), axis)`` -> reduction of x with both axes joined.

    Not where the inner one is read by others too: both would then read all of x.
    """
    if match["inner"] in match.shared:
        return None
    inner, shape = match.node("inner"), match.tile("x").shape
    outer, below = node_attributes(match.root), node_attributes(inner)
    axis = outer["axis"] % len(inner.tile.shape)
    same = inner.operator == match.root.operator and outer["keep"] == below["keep"]
    if not same or below["axis"] % len(shape) != axis + 1:
        return None
    joined = _joined(match, match["x"], axis - len(shape), shape[axis : axis + 2])
    if joined is None:
        return None
    given: dict[str, Any] = dict(match.root.attributes) | {"axis": axis}
    value = match.builder.add(match.root.operator, joined, **given)
    return match.builder.add("reshape", value, shape=match.root.tile.shape)


def _joined(match: Match, value: str, axis: int, pair: Pair) -> str | None:
    """Return a value with an axis, counted from the end, and the next joined; None where that takes work.

    pair: The extents of both in what is computed of it.
    """
    node, shape = match.builder.node(value), match.builder.tile(value).shape
    at, row = len(shape) + axis, get_operator(node.operator)
    if at < 0:
        return value if at < -1 or shape[0] == 1 else None
    if row.elementwise or node.operator == "convert":
        operands = [_joined(match, operand, axis, pair) for operand in node.inputs]
        found = [operand for operand in operands if operand is not None]
        attributes: dict[str, Any] = dict(node.attributes)
        return match.builder.add(node.operator, *found, **attributes) if found == operands else None
    both = shape[at : at + 2]
    stored = row.role == "input" or row.engine in ("product", "library") or node.operator == "reshape"
    if node.operator in ("reduce_sum", "reduce_max"):  # of an axis before or behind both: these lie in order
        reduced = node_attributes(node)["axis"] % len(match.builder.tile(node.inputs[0]).shape)
        stored = reduced < at or reduced > at + 1
    given = node
    while given.operator == "reshape":
        given = match.builder.node(given.inputs[0])
    if 1 in both and both not in ((1, 1), pair) and given.operator == "input":  # numbers of one of the axes
        value, both = (
            match.builder.add("broadcast", value, shape=(*shape[:at], *pair, *shape[at + 2 :])),
            pair,
        )
    elif both != (1, 1) and not (stored and both == pair):
        return None
    return match.builder.add("reshape", value, shape=(*shape[:at], product(both), *shape[at + 2 :]))


def _merge_reshaped(match: Match) -> str | None:
    """``reduce(reshape(reduce(x, axis + 1)), axis)``, reshaped behind that axis only -> as `_merge`."""
    inner, between, shape = match.node("inner"), match.node("between"), match.tile("x").shape
    if match["inner"] in match.shared or match["between"] in match.shared:
        return None
    outer, below = node_attributes(match.root), node_attributes(inner)
    axis = outer["axis"] % len(between.tile.shape)
    alike = between.tile.shape[: axis + 1] == shape[: axis + 1]
    if inner.operator != match.root.operator or not alike or below["axis"] % len(shape) != axis + 1:
        return None
    joined = _joined(match, match["x"], axis - len(shape), shape[axis : axis + 2])
    if joined is None:
        return None
    value = match.builder.add(match.root.operator, joined, axis=axis)
    return match.builder.add("reshape", value, shape=match.root.tile.shape)


def _along_the_last(match: Match) -> str | None:
    """``reduce(x)``, axes of one element behind -> reduction along the last axis, as kernels of rows are."""
    given, shape = node_attributes(match.root), match.builder.tile(match.root.inputs[0]).shape
    axis = given["axis"] % len(shape)
    if axis == len(shape) - 1 or shape[axis] == 1 or any(extent != 1 for extent in shape[axis + 1 :]):
        return None
    value = match.builder.add("reshape", match.root.inputs[0], shape=shape[: axis + 1])
    reduced: dict[str, Any] = dict(match.root.attributes) | {"axis": axis}
    value = match.builder.add(match.root.operator, value, **reduced)
    return match.builder.add("reshape", value, shape=match.root.tile.shape)


FEW_NEIGHBOURS, MUCH_REDUCED = 32, 1 << 20
"""Elements side by side that fill no lines of memory, and of all that is reduced for which that counts."""


def _columns_first(match: Match) -> str | None:
    """``reduce(reduce(x, last), axis)``, others between -> reduction along ``axis``, then along the last.

    As of groups of channels that lie last: rows of all groups are read whole, and little is reduced further.
    """
    if match["inner"] in match.shared:
        return None
    shape, below = match.tile("x").shape, node_attributes(match.node("inner"))
    outer, last = node_attributes(match.root), len(shape) - 1
    axis = outer["axis"] % len(match.node("inner").tile.shape)
    count, few = product(shape), shape[last]
    if match.node("inner").operator != match.root.operator or below["axis"] % len(shape) != last:
        return None
    if not isinstance(count, int) or not isinstance(few, int) or count < MUCH_REDUCED or few > FEW_NEIGHBOURS:
        return None
    if axis >= last or product(shape[axis + 1 : last]) == 1:
        return None
    value = match.builder.add(match.root.operator, match["x"], axis=axis)
    value = match.builder.add(match.root.operator, value, axis=last)
    return match.builder.add("reshape", value, shape=match.root.tile.shape)


COLUMNS_FIRST: Rules = (
    Rule(
        "columns before few neighbours",
        pattern("reduce_sum|reduce_max", pattern("reduce_sum|reduce_max", "x", name="inner")),
        _columns_first,
    ),
)

LAST_REDUCTIONS: Rules = (
    Rule("reduce along the last axis", pattern("reduce_sum|reduce_max"), _along_the_last),
)

MERGED_REDUCTIONS: Rules = (
    Rule(
        "neighbouring axes of reductions with a reshape between",
        pattern(
            "reduce_sum|reduce_max",
            pattern("reshape", pattern("reduce_sum|reduce_max", "x", name="inner"), name="between"),
        ),
        _merge_reshaped,
    ),
    Rule(
        "neighbouring axes of reductions",
        pattern("reduce_sum|reduce_max", pattern("reduce_sum|reduce_max", "x", name="inner")),
        _merge,
    ),
)


def _rows(match: Match, value: str) -> str | None:
    """Return the matrix that a value is in another shape, with the same last axis."""
    node = match.builder.node(value)
    if node.operator != "reshape":
        return None
    source, shape = match.builder.tile(node.inputs[0]).shape, node.tile.shape
    return node.inputs[0] if len(source) == 2 and len(shape) > 2 and source[1] == shape[-1] else None


def _before_reshape(match: Match) -> str | None:
    """``f(reshape(rows), vector, number)`` -> ``reshape(f(rows, vector, number))``."""
    root = match.root
    if not get_operator(root.operator).elementwise or len(root.tile.shape) < 3:
        return None
    columns, operands, matrices = root.tile.shape[-1], list[str](), set[tuple[Any, ...]]()
    for value in root.inputs:
        shape, rows = match.builder.tile(value).shape, _rows(match, value)
        if rows is not None and shape == root.tile.shape:
            matrices.add(match.builder.tile(rows).shape)
        elif product(shape) != 1 and (shape[-1:] != (columns,) or product(shape) != columns):
            return None
        elif rows is None and len(shape) > 2:
            rows = match.builder.add("reshape", value, shape=shape[-1:])
        operands.append(rows or value)
    if len(matrices) != 1:
        return None
    attributes: dict[str, Any] = dict(root.attributes)
    made = match.builder.add(root.operator, *operands, **attributes)
    return match.builder.add("reshape", made, shape=root.tile.shape)


ROWS_OF_PRODUCTS: Rules = (Rule("functions of rows before they are reshaped", Pattern(), _before_reshape),)
"""A product of tensors of more axes reshapes its rows; its kernel then computes what follows by element."""


def _slice_of_slice(match: Match) -> str:
    """``slice(slice(x))`` -> ``slice(x)``."""
    outer, inner = node_attributes(match.root), match.attributes("inner")
    rank = len(outer["begin"])
    steps, further = (given["step"] or (1,) * rank for given in (inner, outer))
    begin = [
        total((first, product((step, then))))
        for first, step, then in zip(inner["begin"], steps, outer["begin"], strict=True)
    ]
    step = tuple(a * b for a, b in zip(steps, further, strict=True))
    return _box(match.builder, match["x"], tuple(begin), match.root, step)


def _box(builder: GraphBuilder, value: str, begin: Shape, like: Node, step: tuple[int, ...]) -> str:
    return builder.add("slice", value, begin=begin, shape=like.tile.shape, step=step)


def _marks(builder: GraphBuilder, join: Node, axis: int) -> list[int] | None:
    """Return where the operands of a join begin, and where the last ends; None if sizes decide that."""
    extents = [builder.tile(value).shape[axis] for value in join.inputs]
    if not all(isinstance(extent, int) for extent in extents):
        return None
    return [*accumulate(map(int, extents), initial=0)]


def _slice_of_join(match: Match) -> str | None:
    """``slice(concat(..., x, ...))`` -> ``slice(x)`` where it shows nothing of the others."""
    join, given = match.node("join"), node_attributes(match.root)
    axis = node_attributes(join)["axis"] % len(join.tile.shape)
    begin, count = given["begin"][axis], match.root.tile.shape[axis]
    marks = _marks(match.builder, join, axis)
    if marks is None or not (isinstance(begin, int) and isinstance(count, int) and count):
        return None
    last = begin + (count - 1) * (given["step"] or (1,) * (axis + 1))[axis]
    for value, (low, high) in zip(join.inputs, pairwise(marks), strict=True):
        if low <= begin and last < high:
            place = replaced(given["begin"], axis, begin - low)
            return _box(match.builder, value, place, match.root, given["step"])
    return None


def _join_of_slices(match: Match) -> str | None:
    """``concat(..., slice(concat(xs)), ...)`` -> ``concat(..., some of xs, ...)``."""
    axis = node_attributes(match.root)["axis"] % len(match.root.tile.shape)
    parts: list[str] = []
    for value in match.root.inputs:
        parts += _shown(match.builder, value, axis) or [value]
    if parts == [*match.root.inputs]:
        return None
    return match.builder.add("concat", *parts, level=match.root.tile.level, axis=axis)


def _shown(builder: GraphBuilder, value: str, axis: int) -> list[str] | None:
    """Return what a slice along one axis shows of the operands of a join along it; None if it is none."""
    cut = builder.node(value)
    if cut.operator != "slice":
        return None
    join, given = builder.node(cut.inputs[0]), node_attributes(cut)
    shape, whole = cut.tile.shape, join.tile.shape
    if join.operator != "concat" or node_attributes(join)["axis"] % len(whole) != axis:
        return None
    marks, begin, count = _marks(builder, join, axis), given["begin"][axis], shape[axis]
    along = replaced(shape, axis, whole[axis]) == whole and not {*given["step"]} - {1}
    if not along or marks is None or not (isinstance(begin, int) and isinstance(count, int)):
        return None
    found = []
    for part, (low, high) in zip(join.inputs, pairwise(marks), strict=True):
        first, end = max(begin, low), min(begin + count, high)
        if first < end:
            own = replaced(shape, axis, end - first)
            place = replaced((0,) * len(shape), axis, first - low)
            is_all = end - first == high - low
            found.append(part if is_all else builder.add("slice", part, begin=place, shape=own))
    return found


def _join_of_repeats(match: Match) -> str | None:
    """``concat(x, y, x, y, x, y)`` -> ``concat(x, y)``, repeated along a new axis before its own."""
    values, shape, level = match.root.inputs, match.root.tile.shape, match.root.tile.level
    axis, period = node_attributes(match.root)["axis"] % len(shape), _period(values)
    times, whole = len(values) // period, shape[axis]
    if times < REPEATED or not isinstance(whole, int):
        return None
    if axis == len(shape) - 1 and whole // times >= LEAST_JOINED_COLUMNS:
        return None
    group = match.builder.add("concat", *values[:period], level=level, axis=axis) if period > 1 else values[0]
    own = match.builder.tile(group).shape[axis:]
    one = match.builder.add("reshape", group, level=level, shape=(*shape[:axis], 1, *own))
    many = match.builder.add("broadcast", one, level=level, shape=(*shape[:axis], times, *own))
    return match.builder.add("reshape", many, level=level, shape=shape)


def _period(values: tuple[str, ...]) -> int:
    """Return after how many values the same ones follow again, to the end."""
    count = len(values)
    return next(n for n in range(1, count + 1) if count % n == 0 and values == values[:n] * (count // n))


JOIN_FOLDING: Rules = (
    Rule("fold slice of slice", pattern("slice", pattern("slice", "x", name="inner")), _slice_of_slice),
    Rule("slice an operand of a join", pattern("slice", pattern("concat", name="join")), _slice_of_join),
    Rule("join operands of joins", pattern("concat"), _join_of_slices),
    Rule("repeat what a join repeats", pattern("concat"), _join_of_repeats),
)
