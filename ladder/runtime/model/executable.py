"""An imported model as one callable."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ladder.forks import renewed
from ladder.ir.extents import match_shape
from ladder.runtime.compile import compiled
from ladder.runtime.kernel import CompiledGemm
from ladder.runtime.model.arguments import UNKNOWN, Arguments, Look
from ladder.runtime.model.frame import Frame
from ladder.runtime.model.joined import Joined
from ladder.runtime.model.plan import Plan
from ladder.runtime.model.results import Part, Result, result_of
from ladder.runtime.model.sizes import reader
from tile_types.errors import AliasingError, DTypeError, ShapeError

MOST_FITTING = 256
"""Sets of shapes that are remembered as fitting."""


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
    places
        As in `Program.sizes`, complete; by default what the shapes of inputs show.

    Raises
    ------
    ShapeError
        If no argument shows a size that a step needs.
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
        places: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.plan = plan
        self.bindings, self.packs = dict(bindings), dict(packs)
        self.held = dict(held)
        self.results, self.updates = tuple(results), tuple(updates)
        self.kernels = kernels
        self.where = where
        self.joined = joined if joined is not None and joined.joins else None
        self.places = dict(places_of(plan, self.bindings) if places is None else places)
        """Symbolic size -> where a call shows it."""
        self.names = tuple(self.places)
        self._read = reader(tuple(self.places.values()))
        self._results: list[Result] = []
        self.wanted: frozenset[int] = frozenset()
        """Outputs of the graph that are results."""
        self.gives({})
        self.written = {
            output: self.bindings[plan.in_place[value]]
            for output, value in enumerate(plan.outputs)
            if value in plan.in_place
        }
        """Output of the graph that a step writes into an argument -> that argument."""
        self.copied = [(at, output) for at, output in self.updates if output not in self.written]
        """Arguments that take outputs once all steps have run."""
        self.changed = sorted({*self.written.values(), *(at for at, _ in self.copied)})
        """Arguments that are written."""
        self.arguments = Arguments(self.changed, are_open=bool(self.names))
        self.operators: dict[str, CompiledGemm] = {}
        """Request -> kernels of a quantized product that came with the plan; others are found or built."""
        self._fitting: set[tuple[Any, ...]] = set()
        """Types, shapes and dtypes of arguments that fitted."""
        self._frames: list[Frame] = []
        """Those that no call uses."""
        self._lock = renewed(threading.Lock())

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Run; ``values`` are the arguments of the graph that was imported.

        Raises
        ------
        ShapeError
            If a tensor does not have the shape that the plan is for.
        AliasingError
            If an argument lies in the memory of one that is written.
        """
        look = self.look(values)
        if not look.apart:
            raise AliasingError("arguments share memory that the model writes: give it tensors of their own")
        return self.run(values, look)

    def look(self, values: Sequence[Any]) -> Look:
        """Compare the arguments of a call with those of the calls before."""
        if self.where.type != "cuda" and not self.arguments.written:
            return UNKNOWN
        with self._lock:
            return self.arguments.look(values)

    def run(self, values: Sequence[Any], look: Look) -> tuple[Any, ...]:
        """Run with arguments that `look` has seen."""
        given, generation = values, look.generation
        if self.joined is not None:
            with self._lock:
                values = (*values, *self.joined.of(values))
                generation += self.joined.generation
        frame = self._take()
        try:
            sizes = self._read(values) if self.names else ()
            found = frame.call(values, sizes, generation)
        finally:
            self._frames.append(frame)
        torch.autograd.graph.increment_version([given[at] for at in self.changed])
        return tuple(result(given, found, sizes) for result in self._results)

    def made_from(self, values: Sequence[Any]) -> int:
        """Return the position of the first argument that is made of others."""
        return len(values) - (len(self.joined.arrays) if self.joined is not None else 0)

    def gives(self, parts: Mapping[int, Part]) -> None:
        """Let results be arguments that are written, or parts of them, by number of the result."""
        self._results = [result_of(item, self.names, parts.get(at)) for at, item in enumerate(self.results)]
        whole = {at for at, part in parts.items() if part.steps is None}
        read = (item for at, item in enumerate(self.results) if at not in whole)
        self.wanted = frozenset(item for item in read if isinstance(item, int))

    def operator(self, request: str) -> CompiledGemm:
        """Return the kernels of a quantized product."""
        return self.operators.get(request) or compiled(request, self.where)

    def sizes(self, values: Sequence[Any]) -> dict[str, int]:
        """Return the symbolic sizes of arguments by name."""
        return dict(zip(self.names, self._read(values), strict=True))

    def check(self, values: Sequence[Any], given: int | None = None) -> None:
        """Raise unless arguments are what the plan is for: callers without guards of their own ask this.

        Parameters
        ----------
        values
            The arguments.
        given
            How many, from the first on, may be other tensors than in the check before; by default all.

        Raises
        ------
        ShapeError, DTypeError
            Names the argument.
        """
        from ladder.runtime.model.library import torch_type

        seen = tuple((type(v), getattr(v, "shape", None), getattr(v, "dtype", None)) for v in values[:given])
        if seen in self._fitting:
            return
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
        if len(self._fitting) >= MOST_FITTING:
            self._fitting.clear()
        self._fitting.add(seen)

    def _take(self) -> Frame:
        """Return a frame that no other call uses."""
        try:
            return self._frames.pop()
        except IndexError:
            return Frame(self)

    def prepare(self) -> None:
        """Make the first frame ahead of its call."""
        self._frames.append(self._take())

    def recorded(self) -> list[Any]:
        """Return the CUDA graphs that calls have recorded so far."""
        replays = [state.replay for frame in self._frames for state in frame.states.values()]
        return [replay.graph for replay in replays if replay is not None and replay.graph is not None]

    def memory(self) -> dict[str, int]:
        """Return bytes of intermediate results: laid out, and what they would take side by side."""
        return {
            "arena": max((frame.arena for frame in self._frames), default=0),
            "without sharing": max((frame.total() for frame in self._frames), default=0),
        }


def places_of(plan: Plan, bindings: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return symbolic size -> (argument, axis) that shows it, from the shapes of a plan's inputs."""
    found: dict[str, tuple[int, int]] = {}
    for name, at in bindings.items():
        for axis, extent in enumerate(plan.tiles[name].shape):
            if isinstance(extent, str) and extent.isidentifier():
                found.setdefault(extent, (at, axis))
    return found
