"""Slices of joins: what loops fill part by part, as ``out[:, t] = h``, is one join of all that they wrote."""

from __future__ import annotations

from itertools import accumulate, pairwise

from ladder.ir.build import GraphBuilder, node_attributes
from ladder.ir.extents import Shape, product, total
from ladder.ir.graph import Node
from ladder.ir.shapes import replaced
from ladder.rewrite.rules import Match, Rule, Rules, pattern


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


JOIN_FOLDING: Rules = (
    Rule("fold slice of slice", pattern("slice", pattern("slice", "x", name="inner")), _slice_of_slice),
    Rule("slice an operand of a join", pattern("slice", pattern("concat", name="join")), _slice_of_join),
    Rule("join operands of joins", pattern("concat"), _join_of_slices),
)
