"""The memory of a plan: slots for values, and buffers for those that steps write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import torch

from ladder.partition.subgraphs import OWN_KINDS
from ladder.runtime.allocate import allocator
from ladder.runtime.model.bound_plan import BoundPlan
from ladder.runtime.model.data_reads import Detached
from ladder.runtime.model.library import product_takes_out
from ladder.runtime.model.memory import Block, Result, contiguous, divided
from ladder.runtime.model.ordered import Keep, Ordered, Watch
from ladder.runtime.model.plan import PlanStep
from ladder.runtime.model.sizes import CallSizes, Settled, Sizes, is_fixed
from ladder.runtime.packed import as_taken
from tile_types.arrays import torch_dtype

Slots = list[Any]
Bound = Callable[[Slots], None]


class Workspace:
    """Slots for values and memory for those that steps write; one call at a time uses it.

    owner: The plan, bound to arguments.
    """

    def __init__(self, owner: BoundPlan) -> None:
        self.owner, self.now = owner, CallSizes(owner.names)
        plan = owner.plan
        self.slot = {value: at for at, value in enumerate(plan.tiles)}
        self.slots: Slots = [None] * len(self.slot)
        held = {**owner.held, **owner.owned}
        self.constants = {*held, *(v for s in plan.steps if s.constant for v in s.part.outputs)}
        """Values that stay from call to call."""
        self.plain: dict[int, Detached] = {}
        """As `Given.plain`."""
        self.watch = Watch()
        self.panels: dict[tuple[Any, ...], Ordered] = {}
        """(Value, how it is stored) -> the matrix in panels, for steps of all sizes."""
        fixed, open_ = divided(self._results())
        self.fixed = Block(fixed, (), owner.where)
        self.open = Block(open_, self.now.names, owner.where)
        self.kept = dict(zip((result.name for result in fixed), self.fixed.buffers(()), strict=True))
        self.places = {result.name: at for at, result in enumerate(open_)}
        views = (step.part for step in plan.steps if step.part.kind == "view")
        self.shown_by = {part.outputs[0]: part.inputs[0] for part in views}
        self.scratch: dict[Any, Any] = {}
        """What steps work in, one after the other."""
        self.packed: dict[str, tuple[int, ...]] = owner.packs
        self.buffers: list[torch.Tensor] = []
        """Memory of results of open shapes, of the call at hand."""
        self.values: Sequence[Any] = ()
        """Its arguments."""
        self.sizes: Sizes = ()
        self.some_empty = False
        self.still = set(self.kept)
        """Values beside constants that are the same memory in every call: their slots stay as they are."""
        for name, tensor in (held | self.kept).items():
            self.slots[self.slot[name]] = tensor

    def settled(self, sizes: Sizes) -> Workspace:
        """Return the workspace of sizes that are entered: its shapes are known, the memory is the same."""
        found = copy(self)
        found.now = self.now.settled(sizes)
        made = {name: self.buffers[at] for name, at in self.places.items()}
        found.kept, found.places = {**self.kept, **made}, {}
        found.still = set(found.kept)
        found.slots = [None] * len(self.slot)
        for value in (*self.constants, *found.kept):
            if value in self.slot:
                found.slots[self.slot[value]] = found.kept.get(value, self.slots[self.slot[value]])
        return found

    def weight(self, places: Sequence[int]) -> list[torch.Tensor]:
        """Return the arrays of a packed weight, which are arguments of the call at hand."""
        return [as_taken(self.values[at]) for at in places]

    def known(self, value: str) -> torch.Tensor | None:
        """Return the tensor that a value is in every call; None if it may be another."""
        there = value in self.still or value in self.constants
        return self.slots[self.slot[value]] if there else None

    def _results(self) -> list[Result]:
        """Return what steps of ours write and what is no result of the plan."""
        plan = self.owner.plan
        kept = self.shown
        found = []
        for number, step in enumerate(plan.steps):
            if step.constant or not self._writes_in_place(step):
                continue
            for value in step.part.outputs:
                if value not in kept and value not in plan.in_place:
                    tile = plan.tiles[value]
                    dtype = torch_dtype(tile.ttype.name)
                    found.append(Result(value, tile.shape, dtype, number, plan.last_use[value]))
        return found

    @cached_property
    def shown(self) -> set[str]:
        """The results of the plan and what they are views of."""
        shown = set(self.owner.plan.outputs)
        for step in reversed(self.owner.plan.steps):
            if step.part.shares and shown & set(step.part.outputs):
                shown |= set(step.part.inputs)
            written = self.owner.plan.in_place
            shown |= {written[value] for value in step.part.outputs if value in shown and value in written}
        return shown

    def lasting(self) -> list[int]:
        """Return which results of the plan are constants, or views of some."""
        constants = set(self.constants)
        for step in self.owner.plan.steps:
            if step.part.shares and constants & set(step.part.inputs):
                constants |= set(step.part.outputs)
        return [at for at, value in enumerate(self.owner.plan.outputs) if value in constants]

    def target(self, value: str) -> Callable[[], torch.Tensor]:
        """Return what gives the memory that a step writes a value to."""
        base = self.owner.plan.in_place.get(value)
        if base is not None:
            slot = self.slot[base]
            return lambda: self.slots[slot]
        if value in self.kept:
            buffer = self.kept[value]
            return lambda: buffer
        if value in self.places:
            at = self.places[value]
            return lambda: self.buffers[at]
        tile, where = self.owner.plan.tiles[value], self.owner.where
        shape, dtype, allocate = self.now.numbers(tile.shape), torch_dtype(tile.ttype.name), allocator(where)
        if is_fixed(tile.shape) or isinstance(self.now, Settled):
            sizes, strides = shape(), contiguous(shape())
            return lambda: allocate(sizes, strides, dtype)
        return lambda: allocate(shape(), contiguous(shape()), dtype)

    def is_own(self, value: str) -> bool:
        """Tell whether a value is written into the frame's own memory: contiguous, aligned, and no number."""
        written = value in self.kept or value in self.places
        return written and self.owner.plan.tiles[value].shape != ()

    def lies_still(self, value: str) -> bool:
        """Tell whether a value is in the frame's own memory, or a view of what is."""
        if value in self.kept or value in self.places:
            return True
        return value in self.shown_by and self.lies_still(self.shown_by[value])

    def is_hidden(self, value: str) -> bool:
        """Tell whether callers cannot see that a view shares memory: it is no result, or the plan's alone."""
        if value not in self.shown:
            return True
        while value in self.shown_by:
            value = self.shown_by[value]
        plan, mine = self.owner.plan, {*self.owner.bindings, *self.constants}
        return value not in mine and value not in plan.in_place

    def knows(self, step: PlanStep) -> bool:
        """Tell whether the extents of a step are the same in every call."""
        return not step.sizes or isinstance(self.now, Settled)

    def settles(self, step: PlanStep) -> bool:
        """Tell whether a kernel on a CPU, whose results are new or in buffers, is always called alike."""
        return self.owner.where.type == "cpu" and self.knows(step)

    def reads(self, step: PlanStep) -> tuple[int, ...]:
        return tuple(self.slot[value] for value in step.part.inputs)

    def lasting_inputs(self, step: PlanStep) -> dict[str, Keep]:
        """Return the inputs of a step's graph, on a CPU, that no step writes -> what keeps them in order."""
        if self.owner.where.type != "cpu":
            return {}
        bindings, changed = self.owner.bindings, self.owner.changed
        inside = (node.name for node in step.part.graph.inputs)
        given = zip(inside, step.part.inputs, strict=True)
        return {
            name: self.watch.keep(value in self.constants)
            for name, value in given
            if value in self.constants or (value in bindings and bindings[value] not in changed)
        }

    def _writes_in_place(self, step: PlanStep) -> bool:
        """Tell whether a step writes into memory that it is given."""
        if step.part.kind == "product":
            return product_takes_out(step.part.graph, self.lasting_inputs(step))
        return step.part.kind in OWN_KINDS
