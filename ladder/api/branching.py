"""Graphs that branch on a value: a plan for what comes first, and one for either side.

Which side runs is decided on the host: the value is read once (on a GPU that waits for it), and no Python
code of the program runs in between.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch.fx

from ladder.api.aliasing import without_values
from ladder.capture.trace.conditionals import is_choice, taken_side
from ladder.frontend.untraceable import untraceable
from ladder.interrupts import pass_on
from ladder.runtime.model.program import ImportRefused

Make = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


def branches(module: torch.fx.GraphModule) -> bool:
    """Say whether a graph has a conditional node."""
    return any(map(is_choice, module.graph.nodes))


class Branching:
    """Runs a graph that ends with a conditional.

    module: The graph.
    examples: Its inputs.
    make: Compiles the parts: ``make(graph_module, examples)``.
    Raises ImportRefused if something is computed after the conditional, or shapes before it depend on values.
    """

    def __init__(self, module: torch.fx.GraphModule, examples: list[Any], make: Make) -> None:
        (choice,) = filter(is_choice, module.graph.nodes)
        condition, when_true, when_false, operands = choice.args
        results: Any = module.graph.output_node().args[0]
        late = {node for node in module.graph.nodes if _takes(node, choice)}
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        # What are inputs goes past the first plan: results of plans need not be the objects they were.
        early = [node for node in (condition, *_nodes(operands), *results) if node not in late]
        computed = list(dict.fromkeys(node for node in early if node not in inputs))
        first = _before(module, {choice, *late}, computed)
        opened = module.meta.get("open", examples)
        values: dict[Any, Any] = dict(zip(inputs, opened, strict=True))
        values |= zip(computed, _on_fakes(first, opened), strict=True)
        parts = _Parts(make, "open" in module.meta)
        self.first = parts(first, examples, opened) if computed else _nothing
        order = [*inputs, *computed]
        told = [*_nodes(operands), *_telling(_nodes(operands), inputs, values)]
        self.condition, self.operands = order.index(condition), [*map(order.index, told)]
        self.results = [
            (node in late, node.args[1] if node in late else order.index(node)) for node in results
        ]
        given = [values[node] for node in told]
        self.sides = [
            None if name is None else _side(_taking(_submodule(module, name), len(given)), given, make)
            for name in (when_true, when_false)
        ]

    def __call__(self, *inputs: Any) -> Any:
        values = (*inputs, *self.first(*inputs))
        holds = bool(values[self.condition])
        found = (holds, *taken_side(holds, *self.sides)(*(values[at] for at in self.operands)))
        return tuple((found if late else values)[at] for late, at in self.results)


class _Parts:
    """Compiles parts of a graph; `is_open`: whether sizes are symbols."""

    def __init__(self, make: Make, is_open: bool) -> None:
        self.make = make
        self.is_open = is_open

    def __call__(
        self, part: torch.fx.GraphModule, examples: list[Any], opened: list[Any]
    ) -> Callable[..., Any]:
        if self.is_open:
            part.meta["open"] = opened
        return self.make(part, examples)


def _telling(
    operands: list[torch.fx.Node], inputs: list[torch.fx.Node], values: dict[Any, Any]
) -> list[torch.fx.Node]:
    """Return the inputs that say what sizes are which operands only name, as in ``n + 1``."""
    named = {symbol for node in operands for size in _sizes(values[node]) for symbol in size.free_symbols}
    found: list[torch.fx.Node] = []
    for node in (*operands, *inputs):
        told = named.intersection(_sizes(values[node]))
        found += [node] if told and node not in operands else []
        named -= told
    return found


def _sizes(value: Any) -> list[Any]:
    """Return the expressions of the open sizes that an argument is, or has."""
    extents = value.shape if isinstance(value, torch.Tensor) else [value]
    return [each.node.expr for each in extents if isinstance(each, torch.SymInt)]


def _taking(module: torch.fx.GraphModule, count: int) -> torch.fx.GraphModule:
    """Return a graph that takes `count` arguments: what it has no names for, it leaves alone."""
    known = [node for node in module.graph.nodes if node.op == "placeholder"]
    if len(known) == count:
        return module
    graph = torch.fx.Graph()
    places = [graph.placeholder(node.name) for node in known]
    for at in range(len(known), count):
        graph.placeholder(f"told_{at}")
    copied: Any = graph.graph_copy(module.graph, dict(zip(known, places, strict=True)))
    graph.output(copied)
    taking = torch.fx.GraphModule(module, graph)
    taking.meta |= module.meta
    return taking


def _side(module: torch.fx.GraphModule, examples: list[Any], make: Make) -> Callable[..., Any]:
    """Return the callable of a side; one that computes nothing returns its arguments."""
    nothing = all(node.op in ("placeholder", "output") for node in module.graph.nodes)
    return module.forward if nothing else make(module, examples)


def _nothing(*_: Any) -> tuple[Any, ...]:
    return ()


def _nodes(value: Any) -> list[torch.fx.Node]:
    return list(value)


def _takes(node: torch.fx.Node, choice: torch.fx.Node) -> bool:
    """Say whether a node takes one result of the conditional."""
    return node.target is operator.getitem and node.args[0] is choice


def _submodule(module: torch.fx.GraphModule, name: Any) -> torch.fx.GraphModule:
    found = module.get_submodule(str(name.target))
    assert isinstance(found, torch.fx.GraphModule)
    return found


def _before(
    module: torch.fx.GraphModule, late: set[torch.fx.Node], wanted: list[torch.fx.Node]
) -> torch.fx.GraphModule:
    """Return the graph without `late`: what comes before a conditional."""
    graph = torch.fx.Graph()
    known: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.nodes:
        if node in late or node.op in ("get_attr", "output"):
            continue
        if not late.isdisjoint(node.all_input_nodes):
            raise ImportRefused("something is computed after a conditional")
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(tuple(known[node] for node in wanted))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _on_fakes(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
    """Return what a graph gives, without values."""
    mode, fakes = without_values(examples)
    try:
        with mode:
            return module.forward(*fakes)
    except Exception as error:  # whatever cannot be traced, the program itself still can
        pass_on(error)
        raise ImportRefused(untraceable(error)) from error
