"""CUDA graphs of a frame: all launches of a plan replayed by one call.

Arguments that are the same tensors at the same address from call to call (weights) are read where they are;
the others are copied into buffers of the graph. What the plan writes into an argument is written there.
Other results are copied out: the next replay overwrites them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any
from weakref import WeakSet

import torch

from ladder.runtime import peers
from ladder.runtime.model.bound_plan import BoundPlan

log = logging.getLogger("ladder.model")

COPIED = 64 << 20
"""Bytes of arguments that a graph for one of many sets of sizes may have a copy of."""

WARM = 2
"""Calls before a graph is recorded: the first loads kernels, the second shows which arguments stay."""

PAYS = 4
"""Calls for each recording, before there is another: arguments that never stay are not recorded each time."""


_with_collectives: WeakSet[Replay] = WeakSet()
"""Recordings that hold a group's connections: NCCL ends a group only when none is left."""


def release_collectives() -> None:
    """Drop all CUDA graphs with collectives, and memory shared with peers, so that groups can be destroyed.

    Calls record anew.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    for replay in list(_with_collectives):
        replay.graph, replay.results, replay.copies = None, [], []
    peers.forget()


class Replay:
    """Runs a plan, as a CUDA graph from the third call on.

    step_by_step: Runs all steps with arguments; returns the plan's outputs.
    owner: The plan, bound to arguments.
    """

    def __init__(self, step_by_step: Callable[[Sequence[Any]], list[Any]], owner: BoundPlan) -> None:
        self.step_by_step, self.owner = step_by_step, owner
        self.calls = self.recordings = 0
        self.generation = 0
        self.mode = "global" if owner.plan.is_pure() else "thread_local"
        """Whose calls a recording forbids: NCCL's own threads ask for its events meanwhile."""
        self.refused = ""
        self.graph: Any = None
        self.copies: list[tuple[int, torch.Tensor]] = []
        self.results: list[Any] = []

    def run(self, values: Sequence[Any], generation: int) -> list[Any]:
        """Run with arguments, those of a generation; returns the graph's outputs."""
        self.calls += 1
        if self.graph is None or generation != self.generation:
            if self.refused or self.calls <= max(WARM, PAYS * self.recordings):
                return self.step_by_step(values)
            self.record(values, self.owner.arguments.moving)
            self.generation = generation
            if self.graph is None:
                return self.step_by_step(values)
        if self.copies:
            torch._foreach_copy_([copy for _, copy in self.copies], [values[at] for at, _ in self.copies])
        self.graph.replay()
        written, wanted = self.owner.written, self.owner.wanted
        return [
            values[written[at]] if at in written else result.clone() if at in wanted else None
            for at, result in enumerate(self.results)
        ]

    def record(self, values: Sequence[Any], moving: Collection[int]) -> None:
        """Record the steps; what cannot be recorded runs step by step from then on."""
        copied = sum(values[at].nbytes for at in moving)
        if self.owner.names and copied > COPIED:
            self.graph, self.refused = None, f"{copied} bytes of arguments change, for one of many sizes"
            return
        static = [value.clone() if at in moving else value for at, value in enumerate(values)]
        self.copies = [(at, static[at]) for at in sorted(moving)]
        self.graph = None
        self.recordings += 1
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode=self.mode):
                self.results = self.step_by_step(static)
        except RuntimeError as error:
            self.refused = str(error)
            log.warning("no CUDA graph of a plan: %s", error)
            return
        self.graph = graph
        if self.mode != "global":
            _with_collectives.add(self)
