"""An imported model as one callable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ladder.forks import renewed
from ladder.ir.extents import match_shape
from ladder.runtime.model.arguments import UNKNOWN, Look
from ladder.runtime.model.bound_plan import BoundPlan
from ladder.runtime.model.frame import Frames
from ladder.runtime.model.plan import ModelPlan
from ladder.runtime.model.results import ArgumentPart, result_of
from ladder.runtime.model.sizes import ELEMENT, Sizes, facts_of, reader
from ladder.runtime.words import Watched
from tile_types.arrays import torch_dtype
from tile_types.errors import AliasingError, DTypeError, ShapeError

MOST_FITTING = 256
"""Sets of shapes that are remembered as fitting."""


class Executable:
    """Runs a plan.

    bound: The plan, bound to arguments.
    Raises ShapeError if no argument shows a size that a result needs.
    """

    def __init__(self, bound: BoundPlan) -> None:
        self.bound = bound
        self.read = reader(tuple(bound.places.values()))
        self._results = [result_of(item, bound.names, None) for item in bound.results]
        self._as_computed = bound.results == (*range(len(bound.plan.outputs)),)
        """Whether the results are the graph's outputs, in order."""
        self._only_reads = self.where.type != "cuda" and not bound.arguments.written
        self._fitting: dict[tuple[Any, ...], Sizes | None] = {}
        """Types, shapes and dtypes of arguments that fitted -> the sizes that they show, as of `check`."""
        self._shown = max((at for at, _ in bound.places.values()), default=-1)
        """Position of the last argument that shows a size."""
        self._shows_elements = any(axis == ELEMENT for _, axis in bound.places.values())
        self._frames = Frames(bound)
        self._words = Watched(bound.weights())
        self._lock = renewed(threading.Lock())
        self._casts = torch._C._is_any_autocast_enabled()
        """What conversions a plan has are its own steps: autocast would add some in its steps of torch."""

    @property
    def plan(self) -> ModelPlan:
        return self.bound.plan

    @property
    def where(self) -> torch.device:
        return self.bound.where

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Run; ``values`` are the arguments of the graph that was imported.

        Raises ShapeError if a tensor does not have the shape that the plan is for.
        Raises AliasingError if an argument lies in the memory of one that is written.
        """
        return self.call(values)

    def call(self, values: Sequence[Any], sizes: Sizes | None = None) -> tuple[Any, ...]:
        """Run as a call does; ``sizes`` are those of the arguments, as `check` returns them."""
        look = UNKNOWN if self._only_reads else self.look(values)
        if not look.apart:
            raise AliasingError("arguments share memory that the model writes: give it tensors of their own")
        return self.run(values, look, sizes)

    def look(self, values: Sequence[Any]) -> Look:
        """Compare the arguments of a call with those of the calls before."""
        if self._only_reads:
            return UNKNOWN
        with self._lock:
            return self.bound.arguments.look(values)

    def run(self, values: Sequence[Any], look: Look, sizes: Sizes | None = None) -> tuple[Any, ...]:
        """Run with arguments that `look` has seen, and the sizes that they show; None reads them off."""
        given, generation = values, look.generation
        joined = self.bound.joined
        if joined is not None and joined.settled:
            values = (*values, *joined.arrays)
        elif joined is not None:
            with self._lock:
                stay = self.bound.arguments.stay(joined.places)
                values = (*values, *joined.of(values, look.generation if stay else 0))
                generation += joined.generation
        self._words.check(values)
        idle, frame = self._frames.take()
        try:
            sizes = self.read(values) if sizes is None else sizes
            if self._casts:
                with torch._C._DisableAutocast():
                    found = frame.call(values, sizes, generation)
            else:
                found = frame.call(values, sizes, generation)
        finally:
            idle.append(frame)
        if self.bound.changed:
            torch.autograd.graph.increment_version([given[at] for at in self.bound.changed])
        if self._as_computed:
            return tuple(found)
        return tuple([result(given, found, sizes) for result in self._results])

    def gives(self, parts: Mapping[int, ArgumentPart]) -> None:
        """Let results be arguments that are written, or parts of them, by number of the result."""
        self._results = [
            result_of(item, self.bound.names, parts.get(at)) for at, item in enumerate(self.bound.results)
        ]
        self._as_computed = self._as_computed and not parts
        whole = {at for at, part in parts.items() if part.steps is None}
        read = (item for at, item in enumerate(self.bound.results) if at not in whole)
        self.bound.wanted = frozenset(item for item in read if isinstance(item, int))

    def sizes(self, values: Sequence[Any]) -> dict[str, int]:
        """Return the symbolic sizes of arguments by name."""
        return dict(zip(self.bound.names, self.read(values), strict=True))

    def check(
        self, values: Sequence[Any], given: int | None = None, within: Callable[[Sizes], None] | None = None
    ) -> Sizes | None:
        """Raise unless arguments are what the plan is for: callers without guards of their own ask this.

        values: The arguments.
        given: How many, from the first on, may be other tensors than in the check before; by default all.
        within: Raises if sizes are beyond limits; the same in all checks.
        Returns: The sizes that the arguments show; None if an argument that is made of others shows one.
        Raises ShapeError, DTypeError: Names the argument.
        """
        try:
            seen = facts_of(len(values) if given is None else given)(values)
        except AttributeError:  # one is no tensor, which the loop below may refuse
            seen = None
        if self._shows_elements:  # which types and shapes do not tell
            seen = None
        if seen in self._fitting:
            return self._fitting[seen]
        sizes: dict[str, int] = {}
        for name, at in self.bound.bindings.items():
            if at >= len(values):
                continue  # made of others
            tile, value = self.plan.tiles[name], values[at]
            if not isinstance(value, torch.Tensor):
                raise ShapeError(f"argument {at} must be a tensor, got {type(value).__name__}")
            match_shape(tile.shape, value.shape, f"argument {at}", sizes)
            _check_type(value, tile.ttype.name, f"argument {at}")
        shown = self.read(values) if self._shown < len(values) else None
        if within is not None and shown is not None:
            within(shown)
        if len(self._fitting) >= MOST_FITTING:
            self._fitting.clear()
        if seen is not None:
            self._fitting[seen] = shown
        return shown

    def prepare(self) -> None:
        """Make the first frame ahead of its call."""
        idle, frame = self._frames.take()
        idle.append(frame)

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


def _check_type(value: torch.Tensor, name: str, where: str) -> None:
    """Raise DTypeError unless a tensor is of the named type, and its memory holds what it is."""
    if value.layout != torch.strided:
        raise DTypeError(f"{where} must have its elements in memory, got {value.layout}: give its to_dense()")
    if value.dtype != torch_dtype(name):
        raise DTypeError(f"{where} must be {name}, got {value.dtype}")
    if value.is_neg():
        raise DTypeError(f"{where} is negated where it is read: give its resolve_neg()")
