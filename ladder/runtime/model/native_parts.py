"""Gathers, scatters, attention and transforms of frames as steps on CPUs, whose arguments are bound once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch

from ladder.ir.attention import Attention
from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph
from ladder.partition.attention import are_few, node_of, on_cpu
from ladder.partition.native_parts import KINDS, axis_of, depth_of, length_of, operand
from ladder.partition.subgraphs import call_of
from ladder.runtime import native
from ladder.runtime.build import Job
from ladder.runtime.compile import target_of
from ladder.runtime.model.codes import by_torch
from ladder.runtime.model.entry_calls import Operand, bind_entry, ready
from ladder.runtime.model.plan import PlanStep
from ladder.runtime.model.workspace import Bound, Slots, Workspace
from targets import TileDevice, get_device


def elements_job(graph: Graph, device: TileDevice) -> Job:
    """Return the kernel of a part: one of each kind and types serves all sizes and models."""
    node = call_of(graph)
    kind = KINDS[str(node_attributes(node)["target"])]
    facts: list[Any] = [graph.tile(value).ttype.name for value in node.inputs[:2]]
    if kind == "scatter_rows":
        facts.append(depth_of(graph, node))
    return native.native_job(device, "elements", kind, *facts)


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
    told = torch.zeros(1, dtype=torch.int32)
    first, operands = _elements(graph, read, made, shapes)
    entry = memory.owner.kernels[step.entry]
    call = bind_entry(memory, entry, first, operands[:-1], (operands[-1], told))
    outside_of_axis = told.numpy()

    def run(slots: Slots) -> None:
        call(slots)
        if outside_of_axis[0]:
            checked(slots)

    return run


def _elements(
    graph: Graph, read: Sequence[str], made: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], list[Operand]]:
    """Return the numbers that a kernel of elements takes, and its operands, the result as the last."""
    node, whole = call_of(graph), shapes[made]
    if node_attributes(node)["target"] == "onnx.ScatterND":
        depth = depth_of(graph, node)
        rows, places = (prod(whole[:depth]), prod(whole[depth:])), shapes[read[1]]
        new = Operand(read[2], (prod(places[:-1]), rows[1]))
        return whole[:depth], [
            Operand(read[0], rows),
            Operand(read[1], (-1, depth)),
            new,
            Operand(made, rows),
        ]
    axis = axis_of(graph, node)
    seen = [(value, shapes[value]) for value in (*read, made)]
    return (), [Operand(name, (prod(s[:axis]), s[axis], prod(s[axis + 1 :]))) for name, s in seen]


def bind_attention(memory: Workspace, step: PlanStep) -> Bound:
    """Return the call of a kernel; torch's is called where there are many scores, or none."""
    graph, plan = step.part.graph, memory.owner.plan
    node, outside = node_of(graph), step.part.outside
    device = get_device(target_of(memory.owner.where))
    form, read = on_cpu(graph, node, device), [outside[value] for value in node.inputs]
    if form is None or step.entry not in memory.owner.kernels:
        return by_torch(memory, step)
    if not memory.settles(step):
        return _attention_of_call(memory, step, form)
    q, k, v, *masks = (memory.now.numbers(plan.tiles[value].shape)() for value in read)
    if not are_few(form, (q[0], q[-2], k[-2]), v[-1]):
        return by_torch(memory, step)
    operands = [Operand(value, strided=True) for value in read[:3]]
    operands += [Operand(read[3], (1,) * (4 - len(mask)) + mask) for mask in masks]
    return bind_entry(
        memory, memory.owner.kernels[step.entry], (), operands, (Operand(step.part.outputs[0]),)
    )


def _attention_of_call(memory: Workspace, step: PlanStep, form: Attention) -> Bound:
    """Return the call for the sizes of each call: it takes what calls of these sizes alone take."""
    entry, torchs, value = memory.owner.kernels[step.entry], by_torch(memory, step), step.part.outputs[0]
    read = [memory.slot[step.part.outside[name]] for name in node_of(step.part.graph).inputs]
    place, target = memory.slot[value], memory.target(value)

    def run(slots: Slots) -> None:
        q, k, v, *masks = (slots[at] for at in read)
        if not are_few(form, (q.shape[0], q.shape[-2], k.shape[-2]), v.shape[-1]):
            torchs(slots)
            return
        slots[place] = out = target()
        entry(q, k, v, *(ready(mask[(None,) * (4 - mask.ndim)]) for mask in masks), out)

    return run


def fourier_job(graph: Graph, device: TileDevice) -> Job:
    """Return the kernel of a part: one of each length serves all models."""
    return native.native_job(device, "fourier", "frames", length_of(graph, call_of(graph)))


@cache
def turns(length: int) -> torch.Tensor:
    """Return cosines and sines of the angles ``-2 pi k / length``, float32 ``[2, length]``."""
    angles = -2 * np.pi * np.arange(length) / length
    return torch.from_numpy(np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32))


def bind_fourier(memory: Workspace, step: PlanStep) -> Bound:
    """Return the call of a kernel; torch computes what it is not for, which only values tell."""
    node, (made,) = call_of(step.part.graph), step.part.outputs
    outside = step.part.outside
    x, second, window = (None if v is None else outside[v] for v in (operand(node, at) for at in range(3)))
    length = length_of(step.part.graph, node)
    number = None if second is None else memory.known(second)
    if not memory.settles(step) or length is None or (second is not None and number is None):
        return by_torch(memory, step)
    shapes = [memory.now.numbers(memory.owner.plan.tiles[str(v)].shape)() for v in (x, made)]
    told = 0 if number is None else int(number.reshape(()))
    if not all(map(prod, shapes)) or (window is None and told not in (0, length)):
        return by_torch(memory, step)
    entry = memory.owner.kernels[step.entry]
    if window is None:  # DFT: each row is one frame
        rows, taken = prod(shapes[0][:-2]), shapes[0][-2]
        given = Operand(str(x), (rows, taken)), torch.ones(taken), turns(length)
        return bind_entry(memory, entry, (0,), given, (Operand(made, (rows, 1, length // 2 + 1, 2)),))
    signal = Operand(str(x), tuple(shapes[0][:2]))
    return bind_entry(memory, entry, (told,), (signal, Operand(window), turns(length)), (Operand(made),))
