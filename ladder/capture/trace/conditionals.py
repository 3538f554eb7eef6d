"""Conditional nodes: a branch on a value of the graph, with what follows on both sides inside the graph.

A branch becomes ``choose(condition, when_true, when_false, operands)``. Both sides take the same operands
and return equally many values, None where a side has fewer; only the side that is taken runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ladder.capture.trace.loops import WHOLE, rolled, run_of


class Unrecorded(Exception):
    """Raised where the condition is one for which no side is known."""


def choose(
    condition: Any,
    when_true: Callable[..., Any] | None,
    when_false: Callable[..., Any] | None,
    operands: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Run the side that `condition` says on `operands`.

    Returns the condition as a bool, then what the side returns.

    Raises Unrecorded if that side is None.
    """
    holds = bool(condition)
    return (holds, *run_of(taken_side(holds, when_true, when_false))(*operands))


def taken_side(
    holds: bool, when_true: Callable[..., Any] | None, when_false: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Return the side that is taken.

    Raises Unrecorded if it is None.
    """
    side = when_true if holds else when_false
    if side is None:
        raise Unrecorded(f"the side for {holds} has never been recorded")
    return side


@dataclass
class Side:
    """Nodes of a graph that belong to one side of a branch, and which of them it returns."""

    nodes: list[torch.fx.Node]
    returned: list[torch.fx.Node]


def is_choice(node: torch.fx.Node) -> bool:
    """Say whether a node is a conditional."""
    return node.op == "call_function" and node.target is choose


def described(module: torch.fx.GraphModule | None) -> Iterator[str]:
    """Yield what each conditional of a graph chooses by and from, those inside others too."""
    for part in module.modules() if module is not None else ():
        for node in filter(is_choice, part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ()):
            condition, *names, operands = node.args
            sides = zip(("true", "false"), names, strict=True)
            sizes = [
                f"{side}: {'not known' if name is None else _size(part.get_submodule(str(name.target)))}"
                for side, name in sides
            ]
            yield f"by {condition} of {len(operands)} operands; {', '.join(sizes)}"


def _size(module: Any) -> str:
    count = sum(node.op in ("call_function", "call_method") for node in module.graph.nodes)
    return f"{count} operators"


def folded(
    graph: torch.fx.Graph,
    condition: torch.fx.Node,
    sides: dict[bool, Side | None],
    modules: dict[str, torch.nn.Module],
    *,
    loops: bool,
) -> list[torch.fx.Node]:
    """Replace the nodes of both sides by one conditional; the graphs of the sides go into `modules`.

    Returns the nodes that are the condition as a bool, then the values of either side.
    """
    known = [side for side in sides.values() if side is not None]
    operands = list(dict.fromkeys(node for side in known for node in _outer(side)))
    width = max(len(side.returned) for side in known)
    made: dict[bool, str | None] = {}
    for holds, side in sides.items():
        made[holds] = None
        if side is not None:
            made[holds] = name = f"side_{len(modules)}"
            modules[name] = _module(side, operands, width, modules, loops=loops)
    for side in known:
        for node in reversed(side.nodes):
            graph.erase_node(node)
    names = (made[True], made[False])
    parts = tuple(None if name is None else graph.get_attr(name) for name in names)
    node = graph.call_function(choose, (condition, *parts, tuple(operands)))
    results = [graph.call_function(operator.getitem, (node, at)) for at in range(width + 1)]
    for each in (node, *results):
        each.meta[WHOLE] = True
    return results


def _outer(side: Side) -> Iterable[torch.fx.Node]:
    inside = set(side.nodes)
    used = [source for node in side.nodes for source in node.all_input_nodes]
    return (node for node in (*used, *side.returned) if node not in inside)


def _module(
    side: Side, operands: list[torch.fx.Node], width: int, modules: dict[str, Any], *, loops: bool
) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    known = {node: graph.placeholder(f"operand_{at}") for at, node in enumerate(operands)}
    for node in side.nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
    empty: list[Any] = [None] * (width - len(side.returned))
    graph.output((*(known[node] for node in side.returned), *empty))
    root = with_modules(graph, modules)
    if loops:
        root, graph = rolled(graph, root)
    return torch.fx.GraphModule(root, graph)


def with_modules(graph: torch.fx.Graph, modules: dict[str, torch.nn.Module]) -> torch.nn.Module:
    """Return a module that holds those of `modules` that `graph` names."""
    root = torch.nn.Module()
    for node in graph.nodes:
        if node.op == "get_attr":
            root.add_module(str(node.target), modules[str(node.target)])
    return root
