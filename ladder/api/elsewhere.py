"""Results of a graph that lie on another device than its tensors, and are made there of numbers alone.

Caches of transformers make such numbers on the CPU while a model runs on a GPU. Torch makes them at each
call; the plan of all else does not know of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
import torch.fx

from ladder.capture.values.aliasing import Aliasing

MAKERS = frozenset(
    (torch.tensor, torch.scalar_tensor, torch.zeros, torch.ones, torch.full, torch.empty, torch.arange)
)
"""Functions that make such tensors: of numbers alone, and the same ones each time."""

Run = Callable[..., Sequence[Any]]


def without_results(
    module: torch.fx.GraphModule, expected: Aliasing, place: torch.device
) -> tuple[torch.fx.GraphModule, Callable[[Run], Run]] | None:
    """Return the graph without the results that lie elsewhere, and what adds them to those of its run.

    expected: How its results lie.
    place: Where the graph's tensors are.
    Returns: None if such a result is not made by one of `MAKERS` of numbers alone, or the graph does more
        with it than copy it to ``place``.
    """
    output = module.graph.output_node()
    results: Any = output.args[0]
    if not isinstance(results, tuple | list) or len(results) != len(expected.devices):
        return None
    apart = {at: results[at] for at, each in enumerate(expected.devices) if each not in (None, place)}
    for node in apart.values():
        if not _is_made(node) or not all(user is output or _copies(user, place) for user in node.users):
            return None
    if any("_default" in getattr(node.target, "__name__", "") for node in module.graph.nodes):
        return None  # what is made depends on the default type or device just there
    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.graph_copy(module.graph, copied)
    kept = tuple(value for at, value in enumerate(results) if at not in apart)
    graph.output(torch.fx.map_arg(kept, copied.__getitem__))
    for node in set(apart.values()):
        for user in [*copied[node].users]:
            with graph.inserting_before(user):
                there = graph.call_function(node.target, node.args, {**node.kwargs, "device": place})
            user.replace_all_uses_with(there)
            graph.erase_node(user)
        graph.erase_node(copied[node])
    rest = torch.fx.GraphModule(module, graph)
    rest.meta = {**module.meta, "aliasing": _aliasing_without(expected, apart)}

    def joined(run: Run) -> Run:
        def call(*values: Any) -> Sequence[Any]:
            own = iter(run(*values))
            made = {node: node.target(*node.args, **node.kwargs) for node in apart.values()}
            return tuple(made[apart[at]] if at in apart else next(own) for at in range(len(results)))

        return call

    return rest, joined


def _is_made(node: Any) -> bool:
    called = isinstance(node, torch.fx.Node) and node.op == "call_function"
    return called and node.target in MAKERS and not node.all_input_nodes


def _copies(node: torch.fx.Node, place: torch.device) -> bool:
    """Tell whether a node does nothing but copy a tensor of another device to this one."""
    if (node.op, node.target, len(node.args), len(node.kwargs)) != ("call_method", "to", 2, 0):
        return False
    where = node.args[1]
    return isinstance(where, str | torch.device) and torch.device(where) == place


def _aliasing_without(expected: Aliasing, apart: Container[int]) -> Aliasing:
    """Return how the other results lie: nothing shares memory with those that are apart."""
    inputs = len(expected.memory) - len(expected.devices)
    kept = [at for at in range(len(expected.memory)) if at - inputs not in apart]
    number = {at: new for new, at in enumerate(kept)}
    results = [at - inputs for at in kept if at >= inputs]
    return Aliasing(
        tuple(number[expected.memory[at]] for at in kept),
        tuple(number[expected.objects[at]] for at in kept),
        expected.writes,
        tuple(expected.strides[at] for at in results),
        tuple(expected.versions[at] for at in kept),
        tuple(expected.devices[at] for at in results),
        tuple(expected.gradients[at] for at in results),
        tuple(expected.views[at] for at in results),
    )
