"""Chains bound to the memory of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ladder.ir import evaluate
from ladder.ir.build import bind
from ladder.ir.extents import product
from ladder.ir.graph import Graph
from ladder.partition.scatter import numbered, written
from ladder.runtime.model.entry_calls import Operand, bind_entry, ready
from ladder.runtime.model.little import kernel_of
from ladder.runtime.model.plan import PlanStep
from ladder.runtime.model.sizes import evaluator
from ladder.runtime.model.workspace import Bound, Slots, Workspace
from tile_types.tile import Extent


def bind_chain(memory: Workspace, step: PlanStep) -> Bound:
    """Return the call of a chain."""
    entry: Any = memory.owner.kernels.get(step.entry)  # none where every result is known to be empty
    numbers = memory.now.numbers((*step.sizes, *step.starts))
    in_place = set(written(step.part).values())
    elements = _elements(step.part.graph) if memory.owner.where.type == "cpu" else ()
    kernel = kernel_of(entry, memory.now, elements, SERIAL)
    if entry is not None and not in_place and memory.settles(step):
        operands, results = map(Operand, step.part.inputs), map(Operand, step.part.outputs)
        return bind_entry(memory, kernel(), numbers(), [*operands], [*results])
    reads = tuple(
        (memory.slot[value], memory.is_own(value), memory.owner.plan.tiles[value].shape == ())
        for value in step.part.inputs
        if value not in in_place
    )
    writes = tuple((memory.slot[value], memory.target(value)) for value in step.part.outputs)
    plain = not in_place and all(memory.is_own(value) for value in step.part.outputs)
    """Whether results lie as the kernel writes them."""
    numbers_of_rows = _rows_to_check(memory, step)
    names = memory.now.names
    extents = evaluator(_extents_within(step.part.graph), names) if step.sizes else lambda sizes: ()

    def run(slots: Slots) -> None:
        operands = _operands(slots, reads)
        for slot, extent, from_end in numbers_of_rows:
            _require_rows(slots[slot], extent()[0], from_end)
        results = []
        for slot, target in writes:
            slots[slot] = result = target()
            results.append(result)
        if plain and entry is not None and not memory.some_empty:
            kernel()(*numbers(), *operands, *results)
            return
        if (entry is None or memory.some_empty) and not any(result.numel() for result in results):
            return
        into = [*map(ready, results)]
        if memory.some_empty and 0 in extents(memory.sizes):
            given = [slots[memory.slot[value]] for value in step.part.inputs]
            by_reference(bind(step.part.graph, dict(zip(names, memory.sizes, strict=True))), given, into)
        else:
            kernel()(*numbers(), *operands, *map(_at_least_1d, into))
        for result, copy in zip(results, into, strict=True):
            if copy is not result:  # an argument that lies otherwise
                result.copy_(copy)

    return run


SERIAL = 1 << 14
"""Elements of a chain's largest value below which one thread does all."""


def _elements(graph: Graph) -> tuple[Extent, ...]:
    """Return the numbers of elements of all values of a chain."""
    return tuple(dict.fromkeys(product(tile.shape) for node in graph.nodes for tile in node.tiles))


def _operands(slots: Slots, reads: Sequence[tuple[int, bool, bool]]) -> list[torch.Tensor]:
    """Return what a kernel reads: (slot, whether it lies in a buffer of the plan, whether it is a number)."""
    operands = []
    for slot, own, is_number in reads:
        x = slots[slot]
        if not own:
            x = ready(x)
        operands.append(x.reshape(1) if is_number else x)
    return operands


def _extents_within(graph: Graph) -> tuple[Extent, ...]:
    """Return the extents in a chain that may be 0 at run time."""
    extents = (e for node in graph.nodes for tile in node.tiles for e in tile.shape)
    return tuple(dict.fromkeys(extent for extent in extents if extent != 0))


def by_reference(graph: Graph, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    """Compute a chain by the table's reference: kernels do not read tensors that have no elements."""
    given = [x.detach().cpu() for x in operands]
    arrays = [(x.double() if x.is_floating_point() else x).numpy() for x in given]
    found = evaluate(graph, arrays)
    for value, result in zip(found if isinstance(found, tuple) else (found,), results, strict=True):
        array = torch.from_numpy(np.array(value))
        result.copy_(array)
        if array.is_floating_point() and not result.is_floating_point() and result.dtype != torch.bool:
            ends = torch.iinfo(result.dtype)  # the extremes of nothing are infinite there
            result.masked_fill_(array == -float("inf"), ends.min).masked_fill_(
                array == float("inf"), ends.max
            )


def _rows_to_check(
    memory: Workspace, step: PlanStep
) -> list[tuple[int, Callable[[], tuple[int, ...]], bool]]:
    """Return (slot, extent, from_end) of what places rows; GPUs leave out rows beyond the end."""
    if memory.owner.where.type != "cpu":
        return []
    found = dict.fromkeys(numbered(step.part))
    return [(memory.slot[value], memory.now.numbers((extent,)), ends) for value, extent, ends in found]


def _require_rows(numbers: torch.Tensor, extent: int, from_end: bool) -> None:
    least = -extent if from_end else 0
    if numbers.numel() and not least <= int(numbers.min()) <= int(numbers.max()) < extent:
        raise IndexError(f"rows {numbers.tolist()} are to be put into {extent}")


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that kernels take: numbers have one axis there."""
    return tensor if tensor.ndim else tensor.reshape(1)
