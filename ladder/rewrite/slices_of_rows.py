"""Slices of rows that are reduced, as of two softmaxes that are subtracted, reduce their rows alone.

Where all that reads a value is slices that share no element, and something is computed of all of them by
element, each computes its own: the value is not stored, and rows that are read together are of one kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ladder.ir.build import GraphBuilder, draws, node_attributes, transformed
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.ir.shapes import replaced
from ladder.rewrite.short_reductions import COMBINING

Readers = Mapping[str, list[Node | None]]
"""Value -> the nodes that read it, None for results."""


@dataclass(frozen=True)
class Cut:
    """Every ``step``-th position along an axis, ``count`` of them from ``begin`` on."""

    axis: int
    begin: int
    count: int
    step: int

    @property
    def positions(self) -> range:
        return range(self.begin, self.begin + self.count * self.step, self.step)


def reduced_in_slices(graph: Graph) -> Graph:
    """Return a graph in which slices without common elements are taken of what rows are reduced from."""
    readers: dict[str, list[Node | None]] = {value: [None] for value in graph.outputs}
    for node in graph.nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
    cuts = {value: found for value in readers if (found := _cuts(graph, value, readers))}
    rows = {value: _computed(graph, value, found, readers) for value, found in cuts.items()}
    rows = {
        value: axes
        for value, axes in rows.items()
        if any(_reduces(graph, name) for name in axes) and _meet(cuts[value], readers)
    }
    if not rows:
        return graph
    names: dict[str, str] = {}

    def one(builder: GraphBuilder, node: Node, inputs: tuple[str, ...]) -> str | None:
        names.update(zip(node.inputs, inputs, strict=True))
        if node.operator != "slice" or node.inputs[0] not in rows:
            return None
        (value,) = node.inputs
        return _of_slice(builder, graph, value, cuts[value][node.name], rows[value], names, {})

    return replace(transformed(graph, one), grid=graph.grid)


def _reduces(graph: Graph, value: str) -> bool:
    return graph.producer(value).operator in COMBINING


def _meet(slices: Iterable[str], readers: Readers) -> bool:
    """Tell whether something is computed of all slices, by element of their shape."""
    computed: list[set[str]] = []
    for value in slices:
        found, ahead = set[str](), [value]
        while ahead:
            users = [user for user in readers.get(ahead.pop(), ()) if user is not None and _by_element(user)]
            ahead += [user.name for user in users if user.name not in found]
            found.update(user.name for user in users)
        computed.append(found)
    return bool(set.intersection(*computed))


def _by_element(node: Node) -> bool:
    return get_operator(node.operator).elementwise or node.operator == "convert"


def _cuts(graph: Graph, value: str, readers: Readers) -> dict[str, Cut] | None:
    """Return what each reader shows of a value, if all are slices along one axis without common elements."""
    shape, found = graph.tile(value).shape, dict[str, Cut]()
    users = readers[value]
    if len(users) < 2 or not all(isinstance(extent, int) for extent in shape):
        return None
    for user in users:
        if user is None or user.operator != "slice":
            return None
        given = node_attributes(user)
        apart = [
            axis
            for axis, extents in enumerate(zip(shape, user.tile.shape, strict=True))
            if len({*extents}) > 1
        ]
        places = (*given["begin"], *user.tile.shape)
        if len(apart) != 1 or not all(isinstance(place, int) for place in places):
            return None
        axis, steps = apart[0], given["step"] or (1,) * len(shape)
        found[user.name] = Cut(axis, given["begin"][axis], user.tile.known_shape[axis], steps[axis])
    taken = [position for cut in found.values() for position in cut.positions]
    alike = len({cut.axis for cut in found.values()}) == 1
    return found if alike and len(taken) == len({*taken}) else None


def _computed(graph: Graph, value: str, cuts: Mapping[str, Cut], readers: Readers) -> dict[str, int]:
    """Return what is computed for a value alone -> its axis that is cut."""
    axis = next(iter(cuts.values())).axis
    whole, found = graph.tile(value).shape[axis], dict[str, int]()
    ahead = [(value, axis)]
    while ahead:
        name, axis = ahead.pop()
        node = graph.producer(name)
        alone = name == value or all(user is not None and user.name in found for user in readers[name])
        if name in found or not alone or graph.tile(name).shape[axis] != whole:
            continue
        below = None if draws(node) else _axes_below(graph, node, axis)
        if below is not None:
            found[name] = axis
            ahead += [(operand, at) for operand, at in zip(node.inputs, below, strict=True) if at >= 0]
    return found


def _axes_below(graph: Graph, node: Node, axis: int) -> list[int] | None:
    """Return which axis of each operand is an axis of the result, negative if none; None if unknown."""
    if node.operator in COMBINING:
        given, rank = node_attributes(node), len(graph.tile(node.inputs[0]).shape)
        along = given["axis"] % rank
        below = axis if given["keep"] or axis < along else axis + 1
        return None if below == along else [below]
    if _by_element(node):
        return [axis - len(node.tile.shape) + len(graph.tile(value).shape) for value in node.inputs]
    return None


def _of_slice(
    builder: GraphBuilder, graph: Graph, value: str, cut: Cut, rows: Mapping[str, int],
    names: Mapping[str, str], made: dict[str, str],
) -> str:  # fmt: skip
    """Add what computes a slice of a value, of slices of what is not computed for it alone."""
    if value in made:
        return made[value]
    node, axis = graph.producer(value), rows[value]
    below, operands = _axes_below(graph, node, axis), list[str]()
    assert below is not None
    whole = node.tile.shape[axis]
    for operand, at in zip(node.inputs, below, strict=True):
        shape = graph.tile(operand).known_shape
        if at < 0 or shape[at] != whole:
            operands.append(names[operand])
        elif operand in rows:
            operands.append(_of_slice(builder, graph, operand, cut, rows, names, made))
        else:
            begin, steps = (
                replaced((0,) * len(shape), at, cut.begin),
                replaced((1,) * len(shape), at, cut.step),
            )
            extents = replaced(shape, at, cut.count)
            operands.append(builder.add("slice", names[operand], begin=begin, shape=extents, step=steps))
    made[value] = builder.add(node.operator, *operands, **node_attributes(node))
    return made[value]
