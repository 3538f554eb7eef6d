"""Rules that keep channels last between convolutions: transposes move behind the operators that read them.

Products leave rows of channels, ``[N, H, W, C]``; models see ``[N, C, H, W]``, a transpose of it. Where the
next product wants rows again, the two transposes meet and vanish. Only this transpose moves: others are
views of chains that read them at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ladder.ir.build import node_attributes, prune
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.ir.indexing import Affine, Indexing, parse_indexing
from ladder.ir.ops import get_operator
from ladder.rewrite.rules import Match, Pattern, Rule, Rules, pattern
from tile_types.tile import Extent

Permutation = tuple[int, ...]


def channels_first(rank: int) -> Permutation:
    """Return the permutation that brings the last axis to place 1."""
    return (0, rank - 1, *range(1, rank - 1))


def _inner(match: Match, value: str) -> str | None:
    """Return x where a value is x with channels brought first."""
    node = match.builder.node(value)
    if node.operator != "transpose":
        return None
    permutation = node_attributes(node)["permutation"]
    if len(permutation) < 3 or permutation != channels_first(len(permutation)):
        return None
    return node.inputs[0]


def is_turned(match: Match, value: str) -> bool:
    """Tell whether a value is one with channels last in memory whose channels are brought first."""
    return _inner(match, value) is not None


def _turned(match: Match, value: str) -> str:
    """Bring channels first."""
    rank = len(match.builder.tile(value).shape)
    if rank < 3:
        return value
    return match.builder.add("transpose", value, permutation=channels_first(rank))


def _last(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return what belongs to axes with channels first, in the order with channels last."""
    return (values[0], *values[2:], values[1])


def _sink_elementwise(match: Match) -> str | None:
    """``f(turned x, turned y, vector)`` -> turned ``f(x, y, vector)``; vectors may be one of each image."""
    root = match.root
    if not (get_operator(root.operator).elementwise or root.operator == "convert") or not root.inputs:
        return None
    found = [_inner(match, value) for value in root.inputs]
    if all(inner is None for inner in found):
        return None
    rank = len(root.tile.shape)
    operands = []
    for value, inner in zip(root.inputs, found, strict=True):
        shape = match.builder.tile(value).shape
        if inner is not None and len(shape) == rank:
            operands.append(inner)
            continue
        padded = (1,) * (rank - len(shape)) + tuple(shape)
        if sum(extent != 1 for extent in shape) > 1 and any(extent != 1 for extent in padded[2:]):
            return None
        operands.append(match.builder.add("reshape", value, shape=_last(padded)) if shape else value)
    attributes: dict[str, Any] = dict(root.attributes)
    return _turned(match, match.builder.add(root.operator, *operands, **attributes))


def _sink_reduction(match: Match) -> str | None:
    """``reduce(turned x)`` -> turned ``reduce(x)`` along the axis where it lies in x."""
    inner = _inner(match, match.root.inputs[0])
    if inner is None:
        return None
    attributes: dict[str, Any] = node_attributes(match.root)
    rank = len(match.builder.tile(inner).shape)
    axis = channels_first(rank)[attributes["axis"] % rank]
    if axis in (0, rank - 1) and not attributes["keep"]:
        return None  # what is left has other axes at its ends
    given: dict[str, Any] = dict(match.root.attributes) | {"axis": axis}
    return _turned(match, match.builder.add(match.root.operator, inner, **given))


def _sink_box(match: Match) -> str | None:
    """``pad``, ``slice`` or ``broadcast`` of a transposed x -> the transpose of that of x."""
    inner = _inner(match, match.root.inputs[0])
    if inner is None or len(match.builder.tile(inner).shape) != len(match.root.tile.shape):
        return None
    given: dict[str, Any] = dict(match.root.attributes)
    for name in ("low", "high", "begin", "shape", "step"):
        if given.get(name):
            given[name] = _last(given[name])
    return _turned(match, match.builder.add(match.root.operator, inner, **given))


def _sink_reshape(match: Match) -> str | None:
    """``reshape(turned x)`` that regroups axes behind the channels -> turned ``reshape(x)``.

    Not where it joins all of them: programs return such views, in the order of the image's memory.
    """
    inner, shape = _inner(match, match.root.inputs[0]), match.root.tile.shape
    if inner is None or len(shape) < 4:
        return None
    given = match.builder.tile(inner).shape
    if shape[:2] != (given[0], given[-1]):
        return None
    return _turned(match, match.builder.add("reshape", inner, shape=_last(shape)))


def _sink_concat(match: Match) -> str | None:
    """``concat(turned x, turned y)`` -> turned ``concat(x, y)``."""
    found = [_inner(match, value) for value in match.root.inputs]
    if any(inner is None for inner in found):
        return None
    rank = len(match.root.tile.shape)
    axis = channels_first(rank)[node_attributes(match.root)["axis"] % rank]
    return _turned(match, match.builder.add("concat", *(x for x in found if x is not None), axis=axis))


def _sink_repeats(match: Match) -> str | None:
    """``repeat(turned x)``, of elements or the whole along any axes -> turned ``repeat(x)``."""
    inner, shape = _inner(match, match["x"]), match.tile("x").shape
    apart, wide = match.tile("apart").shape, match.tile("wide").shape
    runs = axis_runs(wide, match.root.tile.shape)
    if inner is None or runs is None or len(apart) != len(wide):
        return None
    if tuple(product([apart[at] for at in run]) for run in runs) != shape:
        return None
    order = [at for run in _last(runs) for at in run]
    value = match.builder.add("reshape", inner, shape=tuple(apart[at] for at in order))
    value = match.builder.add("broadcast", value, shape=tuple(wide[at] for at in order))
    return _turned(match, match.builder.add("reshape", value, shape=_last(match.root.tile.shape)))


def _sink_windows(match: Match) -> str | None:
    """``map(turned x)`` -> ``map(x)``; its result keeps channels last where each axis still has its own."""
    inner = _inner(match, match.root.inputs[0])
    if inner is None:
        return None
    given: dict[str, Any] = dict(match.root.attributes)
    indexing = parse_indexing(given["spec"])
    (axes,) = indexing.operands
    rank = len(axes)
    own = len(indexing.result) >= rank and all(
        name in axis.names for name, axis in zip(indexing.result, axes, strict=False)
    )
    result = (*_last(indexing.result[:rank]), *indexing.result[rank:]) if own else indexing.result
    value = match.builder.add("map", inner, **given | {"spec": _spec(_last(axes), result)})
    if not own:
        return value
    return match.builder.add(
        "transpose", value, permutation=(*channels_first(rank), *range(rank, len(result)))
    )


def _spec(axes: Sequence[Affine], result: Sequence[str]) -> str:
    return str(Indexing((tuple(axes),), tuple(result)))


def axis_runs(shape: Sequence[Extent], merged: Sequence[Extent]) -> list[list[int]] | None:
    """Return which axes of a shape each axis of another joins; None if it joins none but runs."""
    found, at = [], 0
    for extent in merged:
        run: list[int] = []
        while at < len(shape) and (not run or product([shape[i] for i in run]) != extent):
            run.append(at)
            at += 1
        if product([shape[i] for i in run]) != extent:
            return None
        found.append(run)
    return found if at == len(shape) else None


def _order_windows(match: Match) -> str | None:
    """``transpose(map)``, or of a reshape that joins its axes -> ``map`` in that order."""
    permutation = node_attributes(match.root)["permutation"]
    node = match.builder.node(match.root.inputs[0])
    shape = node.tile.shape
    node = match.builder.node(node.inputs[0]) if node.operator == "reshape" else node
    if node.operator != "map":
        return None
    runs = axis_runs(node.tile.shape, shape)
    if runs is None:
        return None
    given: dict[str, Any] = dict(node.attributes)
    indexing = parse_indexing(given["spec"])
    order = [indexing.result[at] for place in permutation for at in runs[place]]
    value = match.builder.add("map", *node.inputs, **given | {"spec": _spec(indexing.operands[0], order)})
    return match.builder.add("reshape", value, shape=match.root.tile.shape)


def _windows_last(match: Match) -> str | None:
    """``reduce(transpose(windows))`` along a window -> transpose of the reduction."""
    node = match.builder.node(match.root.inputs[0])
    attributes: dict[str, Any] = node_attributes(match.root)
    if node.operator != "transpose" or attributes["keep"]:
        return None
    permutation = node_attributes(node)["permutation"]
    rank = len(permutation)
    axis = attributes["axis"] % rank
    if rank < 5 or axis != rank - 1 or permutation[axis] != axis:
        return None
    given: dict[str, Any] = dict(match.root.attributes) | {"axis": axis}
    value = match.builder.add(match.root.operator, node.inputs[0], **given)
    return match.builder.add("transpose", value, permutation=permutation[:-1])


def _closed(match: Match, value: str) -> str | None:
    """Return ``x[n, s, c]`` of an image ``[n, c, 1, s]``, channels last; None if it is none."""
    shape = match.builder.tile(value).shape
    if len(shape) < 4 or shape[2] != 1:
        return None
    closed = (*shape[:2], *shape[3:])
    opened = match.builder.node(value)
    if opened.operator == "reshape" and match.builder.tile(opened.inputs[0]).shape == closed:
        inner = _inner(match, opened.inputs[0])
        if inner is not None:
            return inner
    flat = match.builder.add("reshape", value, shape=closed)
    return match.builder.add("transpose", flat, permutation=(0, *range(2, len(closed)), 1))


def _depthwise(match: Match) -> str | None:
    """Convolution of each channel of x by itself -> sums over windows, channels last.

    Such sums are bound by memory, and fuse with what follows; elsewhere they stay a library's.
    """
    given = node_attributes(match.root)
    indexing = parse_indexing(given["spec"])
    image, kernel = indexing.operands
    weight = match.root.inputs[1]
    shape = match.builder.tile(weight).shape  # [groups, 1, 1, taps...]
    if image[1].index != kernel[0].index or tuple(shape[1:3]) != (1, 1):
        return None
    inner = _closed(match, match.root.inputs[0])
    if inner is None:
        return None
    taps = [str(axis.index) for axis in kernel[3:]]
    outer = list(indexing.result[3:])
    channel = str(image[1].index)
    axes = (image[0], *image[3:], image[1])
    spec = _spec(axes, (indexing.result[0], *outer, channel, *taps))
    value = match.builder.add("map", inner, spec=spec, sizes=given["sizes"], pad=given["pad"])
    flat = match.builder.add("reshape", weight, shape=(shape[0], *shape[3:]))
    return match.builder.add(
        "reshape", _turned(match, sum_of_windows(match, value, flat, len(taps))), shape=match.root.tile.shape
    )


def sum_of_windows(match: Match, windows: str, weight: str, axes: int) -> str:
    """Return the sums along the last axes of windows times a weight, in the type of the match."""
    computed = "float64" if match.root.tile.ttype.name == "float64" else "float32"
    value = match.builder.add("mul", _typed(match, windows, computed), _typed(match, weight, computed))
    for _ in range(axes):
        axis = len(match.builder.tile(value).shape) - 1
        value = match.builder.add("reduce_sum", value, axis=axis, keep=False)
    return _typed(match, value, match.root.tile.ttype.name)


MOST_TAPS = 49
"""Products of a channel by itself up to which sums over windows of images as they lie are bound by memory."""


def _depthwise_as_it_lies(match: Match) -> str | None:
    """Convolution of each channel of x by itself -> sums over windows, channels first."""
    given = node_attributes(match.root)
    indexing = parse_indexing(given["spec"])
    image, kernel = indexing.operands
    rows, shape = (match.builder.tile(value).shape for value in match.root.inputs)
    taps = product(shape[3:])
    if image[1].index != kernel[0].index or tuple(shape[1:3]) != (1, 1) or rows[2] != 1:
        return None
    if not isinstance(taps, int) or not 1 < taps <= MOST_TAPS:
        return None
    names = [str(axis.index) for axis in kernel[3:]]
    spec = _spec((*image[:2], *image[3:]), (*indexing.result[:2], *indexing.result[3:], *names))
    x, weight = match.root.inputs
    closed = match.builder.add("reshape", x, shape=(*rows[:2], *rows[3:]))
    value = match.builder.add("map", closed, spec=spec, sizes=given["sizes"], pad=given["pad"])
    outputs = (1,) * len(shape[3:])
    flat = match.builder.add("reshape", weight, shape=(shape[0], *outputs, *shape[3:]))
    value = sum_of_windows(match, value, flat, len(names))
    return match.builder.add("reshape", value, shape=match.root.tile.shape)


def _typed(match: Match, value: str, ttype: str) -> str:
    same = match.builder.tile(value).ttype.name == ttype
    return value if same else match.builder.add("convert", value, type=ttype)


def as_given(graph: Graph) -> Graph:
    """Let libraries, which look at strides themselves, read arguments and leave results as they lie."""
    left: dict[str, str] = {}
    read: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        library = get_operator(node.operator).engine == "library" and node.operator != "restride"
        names = left | read if library else left
        nodes.append(replace(node, inputs=tuple(names.get(value, value) for value in node.inputs)))
        source = _unmoved(graph, node)
        if source is not None:
            (read if node.operator == "transpose" else left)[node.name] = source
    outputs = tuple(left.get(value, value) for value in graph.outputs)
    return prune(replace(graph, nodes=tuple(nodes), outputs=outputs))


def _unmoved(graph: Graph, node: Node) -> str | None:
    """Return x of ``transpose(restride(x))``, and of ``restride`` where x lies so by itself; else None."""
    if node.operator not in ("transpose", "restride"):
        return None
    before, order = graph.producer(node.inputs[0]), node_attributes(node)["permutation"]
    if node.operator == "restride" and order == tuple(range(len(order))):
        while get_operator(before.operator).engine == "view" and before.operator != "transpose":
            before = graph.producer(before.inputs[0])
        return None if before.operator == "transpose" else node.inputs[0]
    if {before.operator, node.operator} != {"transpose", "restride"}:
        return None
    inner = node_attributes(before)["permutation"]
    own = get_operator(graph.producer(before.inputs[0]).operator).engine != "library"
    if any(inner[axis] != at for at, axis in enumerate(order)) or (own and node.operator == "restride"):
        return None
    return before.inputs[0]


WINDOW_ORDER: Rules = (Rule("windows in order", pattern("transpose"), _order_windows),)
"""Gathered windows lie as they are read. To be applied before `TRANSPOSE_SINKING`, which turns windows."""

REPEATS = pattern("reshape", pattern("broadcast", pattern("reshape", "x", name="apart"), name="wide"))
"""Elements that stand several times side by side: an image made larger."""

DEPTHWISE: Rules = (Rule("channels by themselves", pattern("contract"), _depthwise),)

DEPTHWISE_FIRST: Rules = (Rule("channels by themselves, first", pattern("contract"), _depthwise_as_it_lies),)

TRANSPOSE_SINKING: Rules = (
    Rule("channels last in windows", pattern("map"), _sink_windows),
    Rule("reduce windows first", pattern("reduce_sum|reduce_max"), _windows_last),
    Rule("channels last in reductions", pattern("reduce_sum|reduce_max"), _sink_reduction),
    Rule("channels last in boxes", pattern("pad|slice|broadcast"), _sink_box),
    Rule("channels last in other images", pattern("reshape"), _sink_reshape),
    Rule("channels last in joins", pattern("concat"), _sink_concat),
    Rule("channels last in repeats", REPEATS, _sink_repeats),
    Rule("channels last in functions", Pattern(), _sink_elementwise),
)
"""Rules that move transposes that put channels last behind what follows them."""
