"""CUDA graphs of a frame: all launches of a plan replayed by one call.

Arguments that are the same tensors at the same address from call to call (weights) are read where they are;
the others are copied into buffers of the graph. What the plan writes into an argument is written there.
Other results are copied out: the next replay overwrites them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import eq, is_
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ladder.runtime.model.frame import Frame

log = logging.getLogger("ladder.model")

COPIED = 64 << 20
"""Bytes of arguments that a graph for one of many sets of sizes may have a copy of."""

WARM = 2
"""Calls before a graph is recorded: the first loads kernels, the second shows which arguments stay."""


class Replay:
    """Runs a frame, as a CUDA graph from the third call on.

    Parameters
    ----------
    frame
        Whose steps are recorded.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.aliases = frame.owner.aliases
        self.written = frozenset(self.aliases.values())
        self.calls = 0
        self.refused = ""
        self.graph: Any = None
        self.seen: tuple[list[int], list[torch.Tensor], list[int]] | None = None
        self.moving: set[int] = set()
        self.copies: list[tuple[int, torch.Tensor]] = []
        self.results: list[Any] = []

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Run with arguments; returns the graph's outputs."""
        stays = self.note(values)
        self.calls += 1
        if self.refused or self.calls <= WARM:
            return self.frame.run(values)
        if self.graph is None or not stays:
            self.record(values)
        if self.graph is None:
            return self.frame.run(values)
        if self.copies:
            torch._foreach_copy_([copy for _, copy in self.copies], [values[at] for at, _ in self.copies])
        self.graph.replay()
        return [
            values[self.aliases[at]] if at in self.aliases else result.clone()
            for at, result in enumerate(self.results)
        ]

    def note(self, values: Sequence[Any]) -> bool:
        """Compare arguments with those before; returns whether what was recorded still fits."""
        places = [at for at, value in enumerate(values) if isinstance(value, torch.Tensor)]
        tensors = [values[at] for at in places]
        now = (places, tensors, [*map(torch.Tensor.data_ptr, tensors)])
        before, self.seen = self.seen if self.seen and self.seen[0] == places else now, now
        same = map(is_, tensors, before[1]), map(eq, now[2], before[2])
        changed = {
            at for at, object_is, place_is in zip(places, *same, strict=True) if not (object_is and place_is)
        }
        fresh = changed - self.moving
        self.moving |= changed - self.written
        return not fresh

    def record(self, values: Sequence[Any]) -> None:
        """Record the steps; what cannot be recorded runs step by step from then on."""
        copied = sum(values[at].nbytes for at in self.moving)
        if self.frame.now.names and copied > COPIED:
            self.graph, self.refused = None, f"{copied} bytes of arguments change, for one of many sizes"
            return
        static = [value.clone() if at in self.moving else value for at, value in enumerate(values)]
        self.copies = [(at, static[at]) for at in sorted(self.moving)]
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                self.results = self.frame.run(static)
        except RuntimeError as error:
            self.graph, self.refused = None, str(error)
            log.warning("no CUDA graph of a plan: %s", error)
            return
        self.graph = graph
