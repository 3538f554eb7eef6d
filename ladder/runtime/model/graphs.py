"""CUDA graphs of a frame: all launches of a plan replayed by one call.

Arguments that are the same tensors at the same address from call to call (weights) are read where they are;
the others are copied into buffers of the graph. What the plan writes into an argument is written there.
Other results are copied out: the next replay overwrites them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
        self.seen: list[tuple[Any, int]] = []
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
        now = [(value, value.data_ptr() if isinstance(value, torch.Tensor) else 0) for value in values]
        before, self.seen = self.seen or now, now
        changed = {
            at
            for at, (new, old) in enumerate(zip(now, before, strict=True))
            if isinstance(new[0], torch.Tensor) and (new[0] is not old[0] or new[1] != old[1])
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
