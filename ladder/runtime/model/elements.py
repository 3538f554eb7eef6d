"""Gathers and scatters of elements by number as steps: kernels of ours, whose arguments are bound once."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from ladder.ir.build import node_attributes
from ladder.partition.elements import KINDS, axis_of
from ladder.partition.subgraphs import call_of
from ladder.runtime import native
from ladder.runtime.model.codes import by_torch
from ladder.runtime.model.entry_calls import Operand, bind_entry
from ladder.runtime.model.workspace import Bound, Slots, Workspace

if TYPE_CHECKING:
    from ladder.ir.graph import Graph
    from ladder.runtime.build import Job
    from ladder.runtime.model.plan import PlanStep
    from targets import TileDevice


def elements_job(graph: Graph, device: TileDevice) -> Job:
    """Return the kernel of a part: one of each kind and types serves all sizes and models."""
    node = call_of(graph)
    kind = KINDS[str(node_attributes(node)["target"])]
    types = [graph.tile(value).ttype.name for value in node.inputs[:2]]
    return native.native_job(device, "elements", kind, *types)


def bind_elements(memory: Workspace, step: PlanStep) -> Bound:
    """Return the call of a kernel; what it tells of numbers outside of the axis is torch's error."""
    graph, plan = step.part.graph, memory.owner.plan
    node, checked = call_of(graph), by_torch(memory, step)
    outside = step.part.outside
    read, (made,) = [outside[value] for value in node.inputs], step.part.outputs
    if not memory.settles(step):
        return checked
    shapes = {value: memory.now.numbers(plan.tiles[value].shape)() for value in (*read, made)}
    if not all(map(prod, shapes.values())):
        return checked
    axis, told = axis_of(graph, node), torch.zeros(1, dtype=torch.int32)

    def seen(value: str) -> Operand:
        shape = shapes[value]
        return Operand(value, (prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])))

    entry = memory.owner.kernels[step.entry]
    call = bind_entry(memory, entry, (), [seen(value) for value in read], (seen(made), told))
    outside_of_axis = told.numpy()

    def run(slots: Slots) -> None:
        call(slots)
        if outside_of_axis[0]:
            checked(slots)

    return run
