"""The fx graph module of a finished trace, with what a backend is told of it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Container, Iterable
from typing import Any

import torch
import torch.fx

from ladder.capture.trace.conditionals import with_modules
from ladder.capture.trace.loops import rolled
from ladder.capture.trace.trace import Trace, Value, without_unused_parts
from ladder.capture.values.aliasing import Aliasing, aliasing_of, storage_of
from ladder.capture.values.kinds import is_a

ASKING_FOR_GRADIENTS = frozenset({"requires_grad_", "retain_grad", "detach_", "backward"})
"""Methods of tensors that change what autograd does, and no numbers."""
OF_NUMBERS = {operator.pow: torch.pow, operator.ipow: torch.pow}
"""What torch writes out wrong after a number, ``(-1) ** x`` as ``-1 ** x`` -> what it writes right."""


def graph_module(
    trace: Trace, wanted: list[Value], buffers: Container[int], *, before: bool, loops: bool
) -> torch.fx.GraphModule:
    """Return the graph that gives the values `wanted`.

    buffers: Ids of the buffers of modules.
    before: Whether gradients are recorded where the graph begins.
    loops: Whether iterations that match become one node.
    """
    graph = trace.graph
    graph.output(tuple(value.fx for value in wanted))
    without_unused_parts(graph)
    root = with_modules(graph, trace.modules)
    if loops:
        root, graph = rolled(graph, root)
    module = torch.fx.GraphModule(root, graph)
    if why := _switches_gradients(trace, graph, before):
        module.meta["switches"] = why
    if not trace.modules:  # which side is taken decides it otherwise
        module.meta["aliasing"] = _aliasing(trace, wanted)
    if trace.shapes:
        module.meta["open"] = _open_examples(trace)
    inputs = [item for _, _, item in trace.placeholders]
    module.meta["of_model"] = [is_a(item, torch.nn.Parameter) or id(item) in buffers for item in inputs]
    return module


def respell(module: torch.fx.GraphModule) -> None:
    """Let a graph of torch's call the operators of `OF_NUMBERS` by the names that it writes right."""
    for part in [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]:
        for node in [node for node in part.graph.nodes if node.target in OF_NUMBERS]:
            first, second = node.args
            if not is_a(first, torch.fx.Node) and is_a(second.meta.get("example_value"), torch.Tensor):
                node.target = OF_NUMBERS[node.target]
                part.recompile()


def show_sizes(trace: Trace) -> None:
    """Give the graph each open number that its arguments are computed of and none of them shows."""
    symbols = trace.shapes
    if not symbols:
        return
    opened = [symbols.fakes.get(var, symbols.given.get(var)) for _, var, _ in trace.placeholders]
    extents = [extent for example in opened if example is not None for extent in _open_numbers(example)]
    shown = {extent for extent in extents if extent.is_symbol}
    used = {symbol for extent in extents for symbol in extent.free_symbols}
    for symbol in sorted((used - shown) & symbols.names.keys(), key=str):
        name = symbols.names[symbol]
        symbols.given[name] = symbols.number_of(symbol)
        trace.placeholder(name, symbols.values[name])


def _open_numbers(example: Any) -> list[Any]:
    """Return the expressions of an argument's open extents, or of an open number."""
    numbers = example.shape if is_a(example, torch.Tensor) else [example]
    return [number.node.expr for number in numbers if type(number) is torch.SymInt]


def _aliasing(trace: Trace, wanted: list[Value]) -> Aliasing:
    """Return what shares memory in the run that was recorded."""
    inputs = [example for _, _, example in trace.placeholders]
    before = [trace.versions[var] for _, var, _ in trace.placeholders]
    results = [value.obj for value in wanted]
    return aliasing_of(inputs, results, writes=trace.writes, before=before, late=trace.late)


def _open_examples(trace: Trace) -> list[Any]:
    """Return the graph's examples with symbols in place of what is left open: fake tensors, and numbers."""
    symbols = trace.shapes
    held = [item for _, _, item in trace.placeholders if is_a(item, torch.Tensor)]
    lying = Counter(storage_of(item) for item in held if item.layout is torch.strided)

    def opened(var: str, example: Any) -> Any:
        if is_a(example, torch.Tensor):
            alone = example.layout is torch.strided and lying[storage_of(example)] == 1
            return (symbols.fake_alone if alone else symbols.fake_of)(var, example)
        symbol = symbols.given.get(var)
        return example if symbol is None else symbol

    return [opened(var, example) for _, var, example in trace.placeholders]


def _switches_gradients(trace: Trace, graph: torch.fx.Graph, before: bool) -> str:
    """Say what a graph does to the recording of gradients that a plan would not; empty if nothing.

    `before`: whether gradients were recorded where it begins.
    """
    sides = [part for each in trace.modules.values() for part in each.modules()]
    inside = [node for part in sides if is_a(part, torch.fx.GraphModule) for node in part.graph.nodes]
    return switched(graph, [item for _, _, item in trace.placeholders], before, inside)


def switched(
    graph: torch.fx.Graph, examples: Iterable[Any], before: bool, inside: Iterable[torch.fx.Node] = ()
) -> str:
    """Say what the nodes of a graph do to the recording of gradients of its arguments; empty if nothing.

    inside: Nodes of its branches and loops, which leave the recording of gradients as it was.
    """
    written = _switches(graph.nodes)
    recorded = True in (*written, *_switches(inside))
    asking = [n for n in graph.nodes if n.op == "call_method" and n.target in ASKING_FOR_GRADIENTS]
    if asking and (before or recorded or not all(_asks_in_vain(n) or sets_flag(n) for n in asking)):
        return "it says of tensors whether they have gradients"
    if written and written[-1] is not before:
        return "it leaves the recording of gradients otherwise than it was"
    if recorded and any(is_a(item, torch.Tensor) and item.requires_grad for item in examples):
        return "gradients are recorded in a part of it"
    return ""


def _asks_in_vain(node: torch.fx.Node) -> bool:
    """Tell whether a method asks for gradients of what the graph looks up itself, as PEFT does of embeddings.

    Where none are recorded, that changes no number, and nobody else has the tensor.
    """
    source = node.args[0]
    made = is_a(source, torch.fx.Node) and source.target is torch.nn.functional.embedding
    return made and node.target == "requires_grad_"


def sets_flag(node: torch.fx.Node) -> bool:
    """Tell whether a node says of an argument whether it has gradients, and gives nothing that is read."""
    source = node.args[0] if node.op == "call_method" and node.target == "requires_grad_" else None
    return is_a(source, torch.fx.Node) and source.op == "placeholder" and not node.users


def _switches(nodes: Iterable[torch.fx.Node]) -> list[Any]:
    return [node.args[0] for node in nodes if node.target is torch._C._set_grad_enabled]
