"""A plan as closures over its memory, for the open sizes of the current call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ladder.runtime.model.binders import BINDERS
from ladder.runtime.model.bound_plan import BoundPlan
from ladder.runtime.model.given import Given
from ladder.runtime.model.graphs import Replay
from ladder.runtime.model.sizes import Sizes, evaluator
from ladder.runtime.model.workspace import Bound, Workspace
from ladder.runtime.threads import keep_apart
from tile_types.errors import ShapeError

MOST = (1 << 31) - 1
"""Elements that 32 bits count."""

STATES = 64
"""Sets of sizes whose buffers and CUDA graph a frame keeps."""


@dataclass(frozen=True)
class State:
    """What a frame keeps of a set of sizes.

    Parameters
    ----------
    buffers
        Memory of results of open shapes, in order.
    extents
        What steps ask for, as `Now.known` has it.
    some_empty
        Whether a value of a chain of open sizes has no elements.
    replay
        The CUDA graph; None on CPUs, and where chains are computed by reference.
    """

    buffers: list[torch.Tensor]
    extents: list[tuple[int, ...]]
    some_empty: bool
    replay: Replay | None


class Frame:
    """The steps of a plan as closures over memory of their own: one call at a time runs it.

    Parameters
    ----------
    owner
        The plan, bound to arguments.
    """

    def __init__(self, owner: BoundPlan) -> None:
        self.owner, self.memory = owner, Workspace(owner)
        slot, names, plan = self.memory.slot, self.memory.now.names, owner.plan
        self.states: dict[Sizes, State] = {}
        self.given = Given([(slot[name], at) for name, at in owner.bindings.items()])
        chains = (step.part for step in plan.steps if step.part.kind in ("chain", "rows") and step.sizes)
        shapes = {tile.shape for part in chains for node in part.graph.nodes for tile in node.tiles}
        self.counted = [evaluator(shape, names) for shape in shapes if 0 not in shape]
        self.outputs = [slot[value] for value in plan.outputs]
        mine = self.memory.shown() - self.memory.constants - set(owner.bindings)
        self.results = [slot[value] for value in mine if value in slot]
        self.lasting = self.memory.lasting()
        self.steps = self._bound()

    def _bound(self) -> list[tuple[Bound, tuple[int, ...]]]:
        """Return the steps that every call runs, each with the slots that nothing reads after it."""
        memory, plan = self.memory, self.owner.plan
        found = []
        for number, step in enumerate(plan.steps):
            bound = BINDERS[step.part.kind](memory, step)
            if step.constant:
                bound(memory.slots)
                continue
            dead = {
                memory.slot[value]
                for value in (*step.part.inputs, *step.part.outputs)
                if value in memory.slot
                and plan.last_use[value] <= number
                and value not in memory.constants
                and value not in self.owner.bindings
            }
            found.append((bound, tuple(dead)))
        return found

    def call(self, values: Sequence[Any], sizes: Sizes, generation: int = 0) -> list[Any]:
        """Run with arguments of given sizes, by a CUDA graph where there is one.

        Parameters
        ----------
        values, sizes
            The arguments, and what they show.
        generation
            Grows when a tensor that stayed so far lies elsewhere, as `Look.generation`.
        """
        state = self.enter(sizes)
        return self.run(values) if state.replay is None else state.replay.run(values, generation)

    def enter(self, sizes: Sizes) -> State:
        """Let the steps run for these sizes from now on."""
        state = self.states.get(sizes)
        if state is None:
            state = self._opened(sizes)
        elif len(self.states) > 1:  # the last used is the last to go
            self.states[sizes] = self.states.pop(sizes)
        memory = self.memory
        memory.sizes, memory.buffers, memory.now.known = sizes, state.buffers, state.extents
        memory.some_empty = state.some_empty
        return state

    def _opened(self, sizes: Sizes) -> State:
        """Return the state of sizes that are new.

        Raises
        ------
        ShapeError
            If a chain would read or write a tensor of so many elements that 32 bits do not count them.
        """
        elements = [prod(shape(sizes)) for shape in self.counted]
        if max(elements, default=0) > MOST:
            raise ShapeError(f"a tensor has more than {MOST} elements: chains of open sizes do not count on")
        grown = self.memory.open.grown
        buffers = self.memory.open.buffers(sizes)
        if self.memory.open.grown != grown:
            self.states.clear()  # what lies in the memory before would keep it
        elif len(self.states) >= STATES:
            self.states.pop(next(iter(self.states)))
        some_empty = 0 in elements
        replay = Replay(self.run, self.owner) if self.owner.where.type == "cuda" and not some_empty else None
        extents = self.memory.now.evaluated(sizes)
        self.states[sizes] = state = State(buffers, extents, some_empty, replay)
        return state

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Run every step; returns the graph's outputs."""
        slots, self.memory.values = self.memory.slots, values
        self.given.put(values, slots, self.owner.made_from(values))
        if self.owner.where.type == "cpu":
            keep_apart()
        for step, dead in self.steps:
            step(slots)
            for slot in dead:
                slots[slot] = None
        found = [slots[at] for at in self.outputs]
        if self.owner.copied:
            self._update(values, found)
        for at in self.lasting:
            found[at] = found[at].clone()  # the caller may write into what it gets
        self.given.drop(slots)
        for slot in self.results:
            slots[slot] = None
        self.memory.values = ()
        return found

    def _update(self, values: Sequence[Any], found: Sequence[Any]) -> None:
        """Let arguments take outputs; the executable counts that they were written."""
        targets = [values[at] for at, _ in self.owner.copied]
        counted = tuple(target for target in targets if not target.is_inference())
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(counted):
            torch._foreach_copy_(targets, [found[output] for _, output in self.owner.copied])

    @property
    def arena(self) -> int:
        """Bytes that intermediate results take."""
        return self.memory.fixed.memory.numel() + self.memory.open.memory.numel()

    def total(self) -> int:
        """Return the bytes of intermediate results side by side, of the sizes of the last call."""
        return self.memory.fixed.total(()) + self.memory.open.total(self.memory.sizes)
