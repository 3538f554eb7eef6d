"""Loop nodes: where iterations of a graph match, one node runs their body again and again.

A run of the graph's nodes becomes ``repeat(body, count, carried, fixed, tables)`` if it is `count` times
the same operators, each taking what the iteration itself computed, what the one before computed
(carried), what comes from before the loop and stays the same (fixed), or numbers (tables, where they
change). Layers with weights of their own do not match. The order of all operators stays as it was.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from ladder.capture.values.kinds import mapped, parts

LEAST_ITERATIONS = 3
"""Fewest repetitions of a body that count as a loop."""
MOST_BODY_OPERATORS = 128
"""Most operators in the body of a loop."""
WHOLE = "whole"
"""In the ``meta`` of nodes that are in no loop."""


def run_of(part: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs a part of a graph; a call of the module itself would run hooks of the program's."""
    forward: Callable[..., Any] = getattr(part, "forward", part)
    return forward


def repeat(
    body: Callable[..., Any],
    count: int,
    carried: tuple[Any, ...],
    fixed: tuple[Any, ...],
    tables: tuple[tuple[Any, ...], ...],
) -> tuple[Any, ...]:
    """Run ``body(*carried, *fixed, *numbers)`` `count` times; it returns what is carried on, then outputs.

    Returns what is carried out of the last iteration, then for each output a list of all iterations'.
    """
    body = run_of(body)
    outputs: list[Any] = []
    for turn in range(count):
        found = body(*carried, *fixed, *(table[turn] for table in tables))
        carried = found[: len(carried)]
        outputs.append(found[len(carried) :])
    return (*carried, *map(list, zip(*outputs, strict=True)))


@dataclass
class Loop:
    """`count` iterations of `period` nodes from `start` on.

    `carried`: (place in the body, node before the loop) to number; `fixed`: node to number; `tables`:
    (place, which constant) to the numbers of all iterations.
    """

    start: int
    period: int
    count: int
    carried: dict[tuple[int, torch.fx.Node], int] = field(default_factory=dict)
    fixed: dict[torch.fx.Node, int] = field(default_factory=dict)
    tables: dict[tuple[int, int], tuple[Any, ...]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many nodes the loop takes the place of."""
        return self.period * self.count


def rolled(
    graph: torch.fx.Graph, root: torch.nn.Module | None = None
) -> tuple[torch.nn.Module, torch.fx.Graph]:
    """Return `graph` with its loops as nodes, and the module that holds their bodies: `root`."""
    root = root or torch.nn.Module()
    nodes = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    loops = {loop.start: loop for loop in _loops(nodes)}
    if not loops:
        return root, graph
    made = torch.fx.Graph()
    known: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            known[node] = made.node_copy(node)
    at = 0
    while at < len(nodes):
        if at in loops:
            _emit(loops[at], nodes, root, made, known)
            at += loops[at].size
        else:
            known[nodes[at]] = made.node_copy(nodes[at], known.__getitem__)
            at += 1
    made.output(map_arg(graph.output_node().args[0], known.__getitem__))
    return root, made


# finding -----------------------------------------------------------------------------------------
def _leaves(value: Any) -> Iterator[Any]:
    """Yield the nodes and constants of an argument, in order."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, slice):
        yield from parts(value)
    else:
        yield value


def _shape(value: Any) -> Any:
    """Return what all iterations' arguments must share: the structure, and the types of constants."""
    if isinstance(value, tuple | list):
        return (type(value), *map(_shape, value))
    if isinstance(value, dict):
        return (dict, *((key, _shape(item)) for key, item in value.items()))
    if isinstance(value, slice):
        return (slice, *map(_shape, parts(value)))
    return type(value)


def _loops(nodes: list[torch.fx.Node]) -> Iterator[Loop]:
    shapes = [
        (node.op, node.target, _shape((node.args, node.kwargs)), at if WHOLE in node.meta else None)
        for at, node in enumerate(nodes)
    ]
    numbers = {shape: number for number, shape in enumerate(dict.fromkeys(shapes))}
    signatures = [numbers[shape] for shape in shapes]
    position = {node: at for at, node in enumerate(nodes)}
    leaves = [(*_leaves((node.args, node.kwargs)),) for node in nodes]
    start = 0
    while start + LEAST_ITERATIONS <= len(nodes):
        best = Loop(start, 1, 0)
        for period in _periods(start, signatures):
            loop = Loop(start, period, _count(start, period, signatures))
            if loop.size > best.size:
                best = max(best, _matching(loop, leaves, position), key=lambda found: found.size)
        if best.count:
            yield best
        start += best.size or 1


def _periods(start: int, signatures: list[int]) -> Iterator[int]:
    """Yield the lengths of bodies that at least `LEAST_ITERATIONS` iterations from `start` on may have."""
    first = signatures[start]
    for period in range(1, min(MOST_BODY_OPERATORS, (len(signatures) - start) // LEAST_ITERATIONS) + 1):
        ends = start + period * LEAST_ITERATIONS
        if first == signatures[start + period] and (
            signatures[start : ends - period] == signatures[start + period : ends]
        ):
            yield period


def _count(start: int, period: int, signatures: list[int]) -> int:
    """Return how many iterations of `period` nodes from `start` on look alike."""
    count = 1
    while (
        signatures[start + count * period : start + (count + 1) * period]
        == signatures[start : start + period]
    ):
        count += 1
    return count


def _matching(loop: Loop, leaves: list[tuple[Any, ...]], position: dict[Any, int]) -> Loop:
    """Return the iterations of a loop that match, filled in; none where they are too few."""
    count: int | None = loop.count
    while count is not None and count >= LEAST_ITERATIONS:
        loop = Loop(loop.start, loop.period, count)
        count = _mismatch(loop, leaves, position)
    return loop if count is None else Loop(loop.start, loop.period, 0)


def _mismatch(loop: Loop, leaves: list[tuple[Any, ...]], position: dict[Any, int]) -> int | None:
    """Fill in how values go through `loop`; return how many iterations match if not all do."""
    for place in range(loop.period):
        turns = leaves[loop.start + place : loop.start + loop.size : loop.period]
        for which, values in enumerate(zip(*turns, strict=True)):
            check = _node_mismatch if isinstance(values[0], torch.fx.Node) else _constant_mismatch
            wrong = check(loop, place, which, values, position)
            if wrong is not None:
                return wrong
    return None


def _constant_mismatch(
    loop: Loop, place: int, which: int, values: tuple[Any, ...], _: dict[Any, int]
) -> int | None:
    differs = [turn for turn, value in enumerate(values) if repr(value) != repr(values[0])]
    if not differs:
        return None
    if type(values[0]) not in (int, float):
        return differs[0]
    loop.tables[place, which] = values
    return None


def _node_mismatch(
    loop: Loop, place: int, which: int, values: tuple[Any, ...], position: dict[Any, int]
) -> int | None:
    sources = [_source(loop, turn, node, position) for turn, node in enumerate(values)]
    expected = sources[1]
    wrong = next((turn for turn, source in enumerate(sources[1:], 1) if source != expected), None)
    if wrong is not None:
        return wrong
    where, what = expected
    if where == "before":
        if sources[0] != ("outside", values[0]):
            return 1
        loop.carried.setdefault((what, values[0]), len(loop.carried))
    elif sources[0] != expected:
        return 1
    elif where == "outside":
        loop.fixed.setdefault(what, len(loop.fixed))
    return None


def _source(loop: Loop, turn: int, node: torch.fx.Node, position: dict[Any, int]) -> tuple[str, Any]:
    """Return where an argument of iteration `turn` comes from."""
    at = position.get(node, -1) - loop.start
    if not 0 <= at < loop.size:
        return "outside", node
    back = turn - at // loop.period
    return ("here", "before", "far")[min(back, 2)], at % loop.period


# writing -----------------------------------------------------------------------------------------
def _emit(
    loop: Loop, nodes: list[torch.fx.Node], root: torch.nn.Module, made: torch.fx.Graph, known: dict[Any, Any]
) -> None:
    """Add the node of `loop` to `made`, and to `known` what its nodes are there."""
    inside = nodes[loop.start : loop.start + loop.size]
    among = set(inside)
    wanted = [at for at, node in enumerate(inside) if any(user not in among for user in node.users)]
    last = loop.size - loop.period
    final = {place: number for (place, _), number in loop.carried.items()}
    listed = sorted({at % loop.period for at in wanted if at < last or at % loop.period not in final})
    name = f"loop_{len(list(root.children()))}"
    body = torch.fx.GraphModule(torch.nn.Module(), _body(loop, inside, listed))
    root.add_module(name, body)
    carried = tuple(known[first] for _, first in loop.carried)
    fixed = tuple(known[node] for node in loop.fixed)
    tables = tuple(loop.tables.values())
    node = made.call_function(repeat, (made.get_attr(name), loop.count, carried, fixed, tables))
    lists = {
        place: made.call_function(operator.getitem, (node, len(loop.carried) + number))
        for number, place in enumerate(listed)
    }
    for at in wanted:
        turn, place = divmod(at, loop.period)
        if at >= last and place in final:
            known[inside[at]] = made.call_function(operator.getitem, (node, final[place]))
        else:
            known[inside[at]] = made.call_function(operator.getitem, (lists[place], turn))


def _body(loop: Loop, inside: list[torch.fx.Node], listed: list[int]) -> torch.fx.Graph:
    """Return the graph of one iteration: that of the second, whose sources are those of all others."""
    graph = torch.fx.Graph()
    carried = {key: graph.placeholder(f"carried_{number}") for key, number in loop.carried.items()}
    fixed = {node: graph.placeholder(f"fixed_{number}") for node, number in loop.fixed.items()}
    tables = {key: graph.placeholder(f"number_{number}") for number, key in enumerate(loop.tables)}
    made: list[torch.fx.Node] = []
    first, second = inside[: loop.period], inside[loop.period : 2 * loop.period]
    of_second = {node: place for place, node in enumerate(second)}
    of_first = {node: place for place, node in enumerate(first)}
    for place, node in enumerate(second):
        starts = tuple(_leaves((first[place].args, first[place].kwargs)))
        counter = iter(range(len(starts)))

        def taken(value: Any, place: int = place, starts: Any = starts, counter: Any = counter) -> Any:
            which = next(counter)
            if not isinstance(value, torch.fx.Node):
                return tables.get((place, which), value)
            if value in of_second:
                return made[of_second[value]]
            return carried[of_first[value], starts[which]] if value in of_first else fixed[value]

        args, kwargs = _replaced(node.args, taken), _replaced(node.kwargs, taken)
        made.append(graph.create_node(node.op, node.target, args, kwargs))
    graph.output((*(made[place] for place, _ in loop.carried), *(made[place] for place in listed)))
    return graph


def _replaced(value: Any, taken: Callable[[Any], Any]) -> Any:
    """Return an argument with every leaf replaced, in the order of `_leaves`."""
    if isinstance(value, tuple | list):
        items = [_replaced(item, taken) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _replaced(item, taken) for key, item in value.items()}
    if isinstance(value, slice):
        return mapped(value, lambda item: _replaced(item, taken))
    return taken(value)
