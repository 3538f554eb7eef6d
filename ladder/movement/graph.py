"""The movement graph (PowerFusion's GIR): slices of memory, moves between them, computation, syncs.

A graph is a list of steps over tensors. A tensor lies at one level, and its slice says what one lane touches
of it. Computation is element-wise, a reduction or a broadcast, from lane to lane; only a `Move` changes
level or order; a `Sync` makes what was written before it visible to its scope.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ladder.ir.graph import Literal
from ladder.movement.mapping import Mapping as Placement
from ladder.movement.pattern import Pattern
from tile_types.library import get_type

LEVELS = ("immediate", "lane", "warp", "block", "device")
"""Where a tensor lies, nearest first: known when compiling, registers, shuffled, shared and device memory."""


@dataclass(frozen=True)
class Slice:
    """Accesses of one lane: ``num`` accesses of ``width`` elements, ``stride`` elements apart."""

    level: str
    num: int = 1
    width: int = 1
    stride: int = 1

    def __str__(self) -> str:
        return f"{self.level}({self.num} x {self.width} by {self.stride})"


@dataclass(frozen=True)
class Tensor:
    """A value at one level.

    ttype: Name of its type.
    shape: Extents.
    """

    ttype: str
    shape: tuple[int, ...]
    slice: Slice

    @property
    def elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * get_type(self.ttype).elem_bits // 8


@dataclass(frozen=True)
class Move:
    """Copy to another level, in the order that a pattern gives; one of both sides is a lane."""

    result: str
    source: str
    pattern: Pattern = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.source,)


@dataclass(frozen=True)
class Compute:
    """Apply an operator of the table.

    kind: ``"source"`` (numbers and positions), ``"elementwise"``, ``"broadcast"``, ``"partial"`` (a reduction
        of what each lane has; the result has an axis for lanes), ``"reduce"``.
    pattern: Of a broadcast: where its operand is read, always by a lane that has it.
    """

    result: str
    kind: str
    operator: str
    inputs: tuple[str, ...]
    attributes: tuple[tuple[str, Literal], ...] = ()
    pattern: Pattern = ()


@dataclass(frozen=True)
class Sync:
    """Wait for all lanes of a scope: what they wrote is visible to them afterwards."""

    scope: str

    @property
    def inputs(self) -> tuple[str, ...]:
        return ()


Step = Move | Compute | Sync


@dataclass(frozen=True)
class MovementGraph:
    """Steps in order.

    name: Of the chain.
    tensors: All of them by name.
    steps: In order.
    inputs, outputs: Device tensors.
    rows: What the chain is a loop over; without reductions, of its result's last axis.
    """

    name: str
    mapping: Placement
    tensors: Mapping[str, Tensor]
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rows: int

    @cached_property
    def columns(self) -> int:
        """The most elements that a row has, of what is reduced or of a result."""
        read = (s.inputs[0] for s in self.steps if isinstance(s, Compute) and s.kind in ("partial", "reduce"))
        return max(1, *(self.tensors[n].elements // max(1, self.rows) for n in (*read, *self.outputs)))

    @cached_property
    def width(self) -> int:
        """Neighbouring elements that a lane takes at once."""
        return max((t.slice.width for t in self.tensors.values() if t.slice.level == "lane"), default=1)

    @cached_property
    def writers(self) -> Mapping[str, int]:
        """Tensor -> the step that writes it."""
        return {s.result: at for at, s in enumerate(self.steps) if not isinstance(s, Sync)}

    @cached_property
    def readers(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor -> the steps that read it."""
        found: dict[str, list[int]] = {name: [] for name in self.tensors}
        for at, step in enumerate(self.steps):
            for name in dict.fromkeys(step.inputs):
                found[name].append(at)
        return {name: tuple(steps) for name, steps in found.items()}

    def level(self, name: str) -> str:
        """Return where a tensor lies."""
        return self.tensors[name].slice.level

    def syncs(self, scope: str) -> int:
        """Return how often a scope waits."""
        return sum(isinstance(step, Sync) and step.scope == scope for step in self.steps)

    @property
    def launches(self) -> int:
        """Kernels: a sync of the device ends one."""
        return 1 + self.syncs("device")

    def with_steps(
        self, steps: tuple[Step, ...], tensors: Mapping[str, Tensor] | None = None
    ) -> MovementGraph:
        """Return the graph with other steps; tensors that no step names are dropped."""
        known = {**self.tensors, **(tensors or {})}
        named = {s.result for s in steps if not isinstance(s, Sync)} | {n for s in steps for n in s.inputs}
        kept = {n: t for n, t in known.items() if n in named or n in self.inputs or n in self.outputs}
        return replace(self, steps=steps, tensors=kept)

    def __str__(self) -> str:
        """Return one line per step."""
        from ladder.movement.printer import print_movement

        return print_movement(self)
