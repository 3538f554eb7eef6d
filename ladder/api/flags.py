"""Arguments whose gradients a graph switches on or off, as where adapters of PEFT are disabled for a while.

Where no gradients are recorded that changes no number: the plan leaves it out, and it is done behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from ladder.capture.trace.graph_module import sets_flag

Run = Callable[..., Any]


def without_flags(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, Callable[[Run], Run]] | None:
    """Return the graph without its nodes that are `sets_flag`, and what does them behind a run of it.

    Returns: None if it has no such node.
    """
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    flags = {places.index(node.args[0]): _flag_of(node) for node in module.graph.nodes if sets_flag(node)}
    if not flags:
        return None
    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    results: Any = graph.graph_copy(module.graph, copied)
    graph.output(results)
    for node in [node for node in graph.nodes if sets_flag(node)]:
        graph.erase_node(node)
    rest = torch.fx.GraphModule(module, graph)
    rest.meta = dict(module.meta)

    def behind(run: Run) -> Run:
        def call(*values: Any) -> Any:
            found = run(*values)
            for at, flag in flags.items():
                values[at].requires_grad_(flag)
            return found

        return call

    return rest, behind


def _flag_of(node: torch.fx.Node) -> bool:
    """Return what such a node sets; the last one of an argument counts."""
    return bool((*node.args[1:], *node.kwargs.values(), True)[0])
