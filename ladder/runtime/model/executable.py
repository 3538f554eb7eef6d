"""An imported model as one callable."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ladder.ir.extents import match_shape
from ladder.runtime.compile import compiled
from ladder.runtime.kernel import CompiledGemm
from ladder.runtime.model.frame import Frame
from ladder.runtime.model.graphs import Replay
from ladder.runtime.model.joined import Joined
from ladder.runtime.model.plan import Plan
from tile_types.errors import DTypeError, ShapeError

FRAMES = 8
"""Sets of sizes whose memory is kept."""


class Executable:
    """Runs a plan.

    Parameters
    ----------
    plan
        The steps.
    bindings
        Input of the graph -> position among `values`; packed weights by `packs`.
    packs
        Input of the graph that is a packed weight -> positions of its arrays.
    held
        Input of the graph -> tensor that the program brings.
    results
        As in `Program.results`.
    updates
        As in `Program.updates`.
    kernels
        Kernel -> its loaded entry.
    where
        The device.
    joined
        Arrays that are made of arguments; their positions follow those of the arguments.
    """

    def __init__(
        self,
        plan: Plan,
        bindings: Mapping[str, int],
        packs: Mapping[str, tuple[int, ...]],
        held: Mapping[str, torch.Tensor],
        results: Sequence[int | tuple[Any]],
        updates: Sequence[tuple[int, int]],
        kernels: Mapping[str, Any],
        where: torch.device,
        joined: Joined | None = None,
    ) -> None:
        self.plan = plan
        self.bindings, self.packs = dict(bindings), dict(packs)
        self.held = dict(held)
        self.results, self.updates = tuple(results), tuple(updates)
        self.kernels = kernels
        self.where = where
        self.joined = joined if joined is not None and joined.joins else None
        self.symbolic = {
            name: at
            for name, at in self.bindings.items()
            if any(isinstance(extent, str) for extent in plan.tiles[name].shape)
        }
        self.aliases = {
            output: self.bindings[plan.in_place[value]]
            for output, value in enumerate(plan.outputs)
            if value in plan.in_place
        }
        """Result that is written into an argument -> that argument."""
        self.operators: dict[str, CompiledGemm] = {}
        """Request -> kernels of a quantized product that came with the plan; others are found or built."""
        self._frames: dict[tuple[int, ...], list[Frame | Replay]] = {}
        self._lock = threading.Lock()

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Run; ``values`` are the arguments of the graph that was imported.

        Raises
        ------
        ShapeError
            If a tensor does not have the shape that the plan is for.
        """
        if self.joined is not None:
            with self._lock:
                values = (*values, *self.joined.of(values))
        sizes = self.sizes(values) if self.symbolic else {}
        key = tuple(sizes[name] for name in sorted(sizes))
        frame = self._take(key, sizes)
        try:
            found = frame.run(values)
        finally:
            self._give_back(key, frame)
        for at, output in self.updates:
            if output not in self.aliases:
                values[at].copy_(found[output])
        return tuple(found[item] if isinstance(item, int) else item[0] for item in self.results)

    def operator(self, request: str) -> CompiledGemm:
        """Return the kernels of a quantized product."""
        return self.operators.get(request) or compiled(request, self.where)

    def sizes(self, values: Sequence[Any]) -> dict[str, int]:
        """Read the symbolic sizes off the arguments."""
        sizes: dict[str, int] = {}
        for name, at in self.symbolic.items():
            match_shape(self.plan.tiles[name].shape, values[at].shape, f"argument {at}", sizes)
        return sizes

    def check(self, values: Sequence[Any]) -> None:
        """Raise unless arguments are what the plan is for: callers without guards of their own ask this.

        Raises
        ------
        ShapeError, DTypeError
            Names the argument.
        """
        from ladder.runtime.model.library import torch_type

        sizes: dict[str, int] = {}
        for name, at in self.bindings.items():
            if at >= len(values):
                continue  # made of others
            tile, value = self.plan.tiles[name], values[at]
            if not isinstance(value, torch.Tensor):
                raise ShapeError(f"argument {at} must be a tensor, got {type(value).__name__}")
            match_shape(tile.shape, value.shape, f"argument {at}", sizes)
            if value.dtype != torch_type(tile.ttype.name):
                raise DTypeError(f"argument {at} must be {tile.ttype.name}, got {value.dtype}")

    def _take(self, key: tuple[int, ...], sizes: Mapping[str, int]) -> Frame | Replay:
        """Return a frame that no other call uses."""
        with self._lock:
            free = self._frames.get(key)
            if free:
                return free.pop()
        frame = Frame(self, sizes)
        return Replay(frame) if self.where.type == "cuda" else frame

    def _give_back(self, key: tuple[int, ...], frame: Frame | Replay) -> None:
        with self._lock:
            self._frames.setdefault(key, []).append(frame)
            if len(self._frames) > FRAMES:
                self._frames.pop(next(iter(self._frames)))

    def recorded(self) -> list[Any]:
        """Return the CUDA graphs that calls have recorded so far."""
        kept = [frame for frames in self._frames.values() for frame in frames]
        return [frame.graph for frame in kept if isinstance(frame, Replay) and frame.graph is not None]

    def memory(self) -> dict[str, int]:
        """Return bytes of intermediate results: laid out, and what they would take side by side."""
        kept = [frame for frames in self._frames.values() for frame in frames]
        frames = [frame.frame if isinstance(frame, Replay) else frame for frame in kept]
        return {
            "arena": max((frame.arena.nbytes for frame in frames), default=0),
            "without sharing": max((frame.total for frame in frames), default=0),
        }
