"""Movement graphs as text, one line per step."""

from __future__ import annotations

from ladder.ir.build import node_attributes
from ladder.ir.graph import Node
from ladder.movement.graph import Compute, Move, MovementGraph, Step, Sync
from ladder.movement.model import source_slice, traffic


def print_movement(graph: MovementGraph) -> str:
    """Return the graph as text: mapping, tensors at their levels, steps, and what they cost."""
    lines = [f"movement {graph.name} [{graph.mapping}] {{"]
    for name in graph.inputs:
        lines.append(f"  %{name} = input : {_tensor(graph, name)}")
    lines += [f"  {_step(graph, step)}" for step in graph.steps]
    lines.append(f"  return {', '.join(f'%{name}' for name in graph.outputs)}")
    cost = traffic(graph)
    levels = ", ".join(f"{level} {count} B" for level, count in cost.bytes.items() if count)
    waits = ", ".join(f"{scope} {count}" for scope, count in cost.syncs.items() if count) or "none"
    return "\n".join([*lines, f"}}  // {graph.launches} launches; moved: {levels}; syncs: {waits}"])


def _tensor(graph: MovementGraph, name: str) -> str:
    tensor = graph.tensors[name]
    return f"{tensor.ttype}[{', '.join(map(str, tensor.shape))}] {tensor.slice}"


def _step(graph: MovementGraph, step: Step) -> str:
    if isinstance(step, Sync):
        return f"sync {step.scope}"
    text = f"%{step.result} = {_source(step)}"
    if isinstance(step, Move) and graph.level(step.source) == "device":
        text += f" from {source_slice(graph, step)}"
    return f"{text} : {_tensor(graph, step.result)}"


def _source(step: Move | Compute) -> str:
    if isinstance(step, Move):
        views = " ".join(map(_view, step.pattern))
        return f"move %{step.source}{f' [{views}]' if views else ''}"
    attributes = "".join(f", {name}={value}" for name, value in step.attributes)
    operands = ", ".join(f"%{name}" for name in step.inputs)
    return f"{step.kind} {step.operator}({operands}{attributes if operands else attributes[2:]})"


def _view(node: Node) -> str:
    shown = {k: v for k, v in node_attributes(node).items() if k != "shape" and v not in ((), None)}
    shape = "x".join(map(str, node.tile.shape))
    values = ", ".join(f"{name}={value}" for name, value in shown.items())
    return f"{node.operator}({values + ': ' if values else ''}{shape})"
