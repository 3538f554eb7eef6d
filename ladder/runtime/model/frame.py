"""A plan with memory of its own, for the open sizes of the current call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import torch

from ladder.ir.extents import MOST_COUNTED
from ladder.partition.subgraphs import COUNTING
from ladder.runtime.model.bound_plan import BoundPlan
from ladder.runtime.model.graphs import Replay
from ladder.runtime.model.sizes import Sizes, together
from ladder.runtime.model.steps import Steps
from ladder.runtime.model.workspace import Workspace

STATES = 64
"""Sets of sizes whose buffers and CUDA graph a frame keeps."""

CALLS_BEFORE_BINDING = 3
"""Calls with the same open sizes after which steps are bound to these, on a CPU; for each further set of
sizes twice as many. Binding takes as long as several calls, which sizes that come seldom never earn."""


@dataclass
class State:
    """State of a frame for one set of sizes.

    buffers: Memory of results of open shapes, in order.
    extents: What steps ask for, as `CallSizes.known` has it.
    some_empty: Whether a value of a chain of open sizes has no elements.
    is_beyond: Whether a tensor has more elements than kernels count: torch runs their steps.
    replay: The CUDA graph; None on CPUs, and where chains are computed by reference.
    steps: The steps for these sizes alone; None as long as those for all sizes serve.
    calls: How often the sizes were asked for.
    """

    buffers: list[torch.Tensor]
    extents: list[tuple[int, ...]]
    some_empty: bool
    is_beyond: bool
    replay: Replay | None
    steps: Steps | None = None
    calls: int = 0


class Frame:
    """The steps of a plan as closures over memory of their own: one call at a time runs it.

    owner: The plan, bound to arguments.
    """

    def __init__(self, owner: BoundPlan) -> None:
        self.owner, self.memory = owner, Workspace(owner)
        names, plan = self.memory.now.names, owner.plan
        self.states: dict[Sizes, State] = {}
        chains = (step.part for step in plan.steps if step.part.kind in ("chain", "rows") and step.sizes)
        shapes = {tile.shape for part in chains for node in part.graph.nodes for tile in node.tiles}
        self.entered: State | None = None
        """That of the last call."""
        self.counted = together([shape for shape in shapes if 0 not in shape], names)
        graphs = (step.part.graph for step in plan.steps if step.part.kind in COUNTING)
        ends = dict.fromkeys(graph.tile(value).shape for graph in graphs for value in graph.ends)
        self.limited = together([*ends], names)
        self.steps = Steps(self.memory)
        """For all sizes."""
        self.settles = bool(names) and owner.where.type == "cpu"
        self.enough = CALLS_BEFORE_BINDING
        """Calls after which steps are bound to the next set of sizes."""

    def call(self, values: Sequence[Any], sizes: Sizes, generation: int = 0) -> list[Any]:
        """Run with arguments of given sizes, by a CUDA graph where there is one.

        values, sizes: The arguments, and what they show.
        generation: Grows when a tensor that stayed so far lies elsewhere, as `Look.generation`.
        """
        state = self.enter(sizes)
        if state.replay is not None:
            return state.replay.run(values, generation)
        if state.steps is None and self.settles and not state.some_empty:
            state.calls += 1
            if state.calls >= self.enough:
                state.steps = self.settled(sizes)
                self.enough *= 2
        return (state.steps or self.steps).run(values)

    def settled(self, sizes: Sizes) -> Steps:
        """Return the steps for given sizes alone, those that were entered last."""
        return Steps(self.memory.settled(sizes)) if self.memory.now.names else self.steps

    def enter(self, sizes: Sizes) -> State:
        """Let the steps run for these sizes from now on."""
        if sizes == self.memory.sizes and self.entered is not None:
            return self.entered
        state = self.states.get(sizes)
        if state is None:
            state = self._opened(sizes)
        elif len(self.states) > 1:  # the last used is the last to go
            self.states[sizes] = self.states.pop(sizes)
        memory = self.memory
        memory.sizes, memory.buffers, memory.now.known = sizes, state.buffers, state.extents
        memory.some_empty = state.some_empty
        if state.is_beyond and state.steps is None:
            state.steps = Steps(memory.settled(sizes), by_torch=COUNTING)
        self.entered = state
        return state

    def _opened(self, sizes: Sizes) -> State:
        """Return the state of sizes that are new."""
        elements = [*map(prod, self.counted(sizes))]
        is_beyond = max(map(prod, self.limited(sizes)), default=0) > MOST_COUNTED
        grown = self.memory.open.grown
        buffers = self.memory.open.buffers(sizes)
        if self.memory.open.grown != grown:
            self.states.clear()  # what lies in the memory before would keep it
        elif len(self.states) >= STATES:
            self.states.pop(next(iter(self.states)))
        some_empty = 0 in elements
        plain = not some_empty and not is_beyond
        replay = Replay(self.steps.run, self.owner) if self.owner.where.type == "cuda" and plain else None
        extents = self.memory.now.evaluated(sizes)
        self.states[sizes] = state = State(buffers, extents, some_empty, is_beyond, replay)
        return state

    @property
    def arena(self) -> int:
        """Bytes that intermediate results take."""
        return self.memory.fixed.memory.numel() + self.memory.open.memory.numel()

    def total(self) -> int:
        """Return the bytes of intermediate results side by side, of the sizes of the last call."""
        return self.memory.fixed.total(()) + self.memory.open.total(self.memory.sizes)


class Frames:
    """The frames of a plan that no call uses, by stream.

    Work on a GPU goes on after a call: the next call may write the same memory only in the same stream.

    owner: The plan, bound to arguments.
    """

    def __init__(self, owner: BoundPlan) -> None:
        self.owner = owner
        self._idle: dict[int, list[Frame]] = {}

    def take(self) -> tuple[list[Frame], Frame]:
        """Return a frame, and the list to which it goes back.

        A CUDA graph that the program records gets a frame that no call uses later: its memory is the graph's,
        which may be replayed beside other work.
        """
        if self.owner.is_recorded():
            return [], Frame(self.owner)
        idle = self._idle.setdefault(self._stream(), [])
        try:
            return idle, idle.pop()
        except IndexError:  # all of them work
            return idle, Frame(self.owner)

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))

    def __iter__(self) -> Iterator[Frame]:
        return chain.from_iterable([*self._idle.values()])

    def _stream(self) -> int:
        """Return the stream into which a call launches; 0 on CPUs."""
        where = self.owner.where
        if where.type != "cuda":
            return 0
        at = torch.cuda.current_device() if where.index is None else where.index
        return torch._C._cuda_getCurrentRawStream(at)
