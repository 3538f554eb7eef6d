"""CUDA graphs of a frame: all launches of a plan replayed by one call.

Arguments that are the same tensors at the same address from call to call (weights) are read where they are;
the others are copied into buffers of the graph. What the plan writes into an argument is written there.
Other results are copied out: the next replay overwrites them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ladder.runtime.model.frame import Frame

log = logging.getLogger("ladder.model")

COPIED = 64 << 20
"""Bytes of arguments that a graph for one of many sets of sizes may have a copy of."""

WARM = 2
"""Calls before a graph is recorded: the first loads kernels, the second shows which arguments stay."""

PAYS = 4
"""Calls for each recording, before there is another: arguments that never stay are not recorded each time."""


class Replay:
    """Runs a frame, as a CUDA graph from the third call on.

    Parameters
    ----------
    frame
        Whose steps are recorded.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.calls = self.recordings = 0
        self.generation = 0
        self.refused = ""
        self.graph: Any = None
        self.copies: list[tuple[int, torch.Tensor]] = []
        self.results: list[Any] = []

    def run(self, values: Sequence[Any], generation: int) -> list[Any]:
        """Run with arguments, those of a generation; returns the graph's outputs."""
        self.calls += 1
        if self.graph is None or generation != self.generation:
            if self.refused or self.calls <= max(WARM, PAYS * self.recordings):
                return self.frame.run(values)
            self.record(values, self.frame.owner.arguments.moving)
            self.generation = generation
            if self.graph is None:
                return self.frame.run(values)
        if self.copies:
            torch._foreach_copy_([copy for _, copy in self.copies], [values[at] for at, _ in self.copies])
        self.graph.replay()
        written, wanted = self.frame.owner.written, self.frame.owner.wanted
        return [
            values[written[at]] if at in written else result.clone() if at in wanted else None
            for at, result in enumerate(self.results)
        ]

    def record(self, values: Sequence[Any], moving: Collection[int]) -> None:
        """Record the steps; what cannot be recorded runs step by step from then on."""
        copied = sum(values[at].nbytes for at in moving)
        if self.frame.now.names and copied > COPIED:
            self.graph, self.refused = None, f"{copied} bytes of arguments change, for one of many sizes"
            return
        static = [value.clone() if at in moving else value for at, value in enumerate(values)]
        self.copies = [(at, static[at]) for at in sorted(moving)]
        self.graph = None
        self.recordings += 1
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                self.results = self.frame.run(static)
        except RuntimeError as error:
            self.refused = str(error)
            log.warning("no CUDA graph of a plan: %s", error)
            return
        self.graph = graph
