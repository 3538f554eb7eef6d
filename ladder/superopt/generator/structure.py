"""Results of the search: a structure of kernels and block graphs over named dimensions, without numbers.

Every dimension of the program is a product of named factors: ``Ng`` blocks (if the grid splits it),
``Kl`` steps (if the loop splits it) and ``Nt``, what is left in a tile. Tiles have these names as extents,
so shapes, abstract expressions and memory are computed by the operator table on symbols, and a match is
never a coincidence of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ladder.ir.extents import product
from ladder.ir.graph import Literal
from tile_types.tile import Extent

LOOPED, AFTER, FINAL = "looped", "after", "final"
"""Stages of a value: computed in each step, once from accumulators (always, without a loop), or once from
what the blocks of a split reduction leave (by a second block graph)."""

UNIT_AXIS = "1"
"""Stands for a dimension where an axis has one element."""

CONSTANT = {"scale": "mul", "offset": "add"}
"""Steps with a constant -> the operator."""

DECODE = "convert"
"""The only step of a quantized operand."""

Links = tuple[tuple[str, tuple[tuple[str, Literal], ...]], ...]
"""Operators of one operand, in order, with their attributes."""


@dataclass(frozen=True)
class Mapping:
    """How a block graph's dimensions split its operands.

    grid: The dimension that each grid dimension splits.
    loops: The dimension that each loop dimension splits; none without a loop.
    imap: For each operand and grid dimension, the axis that is split, or -1 (replicated).
    fmap: The same for loop dimensions.
    batch: Dimensions of the grid of which a tile has one index.
    split: The last grid dimension if it splits a reduction: a second block graph combines the parts.
    """

    grid: tuple[str, ...]
    loops: tuple[str, ...]
    imap: tuple[tuple[int, ...], ...]
    fmap: tuple[tuple[int, ...], ...]
    batch: tuple[str, ...] = ()
    split: str | None = None

    def factors(self, dimension: str) -> tuple[str, ...]:
        """Return the names whose product is the dimension; none for an axis of extent 1."""
        if dimension == UNIT_AXIS:
            return ()
        names = [f"{dimension}g"] if dimension in self.grid else []
        names += [f"{dimension}l"] if dimension in self.loops else []
        return (*names, *self.left(dimension))

    def left(self, dimension: str) -> tuple[str, ...]:
        """Return the factor that no grid or loop dimension can split further; none of a batch dimension."""
        return () if dimension in (UNIT_AXIS, *self.batch) else (f"{dimension}t",)

    def full(self, dimension: str) -> Extent:
        """Return the dimension's extent."""
        return product(self.factors(dimension))

    def tile(self, operand: int, axes: Sequence[str]) -> tuple[Extent, ...]:
        return tuple(product(self._left(operand, axis, name)) for axis, name in enumerate(axes))

    def _left(self, operand: int, axis: int, dimension: str) -> list[str]:
        names = list(self.factors(dimension))
        splits = (("g", self.grid, self.imap[operand]), ("l", self.loops, self.fmap[operand]))
        for suffix, dimensions, axes in splits:
            if (dimension, axis) in zip(dimensions, axes, strict=True):
                names.remove(f"{dimension}{suffix}")
        return names


WHOLE = Mapping((), (), (), ())
"""The mapping of kernels: nothing is split."""


@dataclass(frozen=True, order=True)
class GraphStep:
    """One operator of a block graph; steps of a graph increase in this order (canonical form).

    newest: Indices of the operands, largest first: what the order compares first, so that a step that does
        not use its predecessor's result could as well have come before it, and did.
    operator: A row of the operator table, ``scale`` or ``offset`` (by a constant), ``concat_matmul``,
        ``chain`` (of operators of one operand), ``combine`` (sum over the blocks of a split reduction) or
        `DECODE`.
    operands: Indices of the operands in order.
    attributes: Sorted (name, value) pairs.
    """

    newest: tuple[int, ...]
    operator: str
    operands: tuple[int, ...]
    attributes: tuple[tuple[str, Literal], ...] = ()

    @property
    def links(self) -> Links:
        """Its parts: its links if it is a chain, else itself."""
        given: Any = dict(self.attributes)
        links: Links = given["links"] if self.operator == "chain" else ((self.operator, self.attributes),)
        return links

    @property
    def label(self) -> str:
        return "·".join(name for name, _ in self.links)

    def renumbered(self, numbers: Sequence[int]) -> GraphStep:
        """Return the step with operand ``numbers[i]`` for i."""
        newest, operands = (tuple(numbers[i] for i in which) for which in (self.newest, self.operands))
        return GraphStep(newest, self.operator, operands, self.attributes)

    def with_links(self, links: Links) -> GraphStep:
        """Return the step with other links of the same operators."""
        attributes = (("links", links),) if self.operator == "chain" else links[0][1]
        return replace(self, attributes=attributes)


@dataclass(frozen=True)
class Prefix:
    """Operators that run as kernels of their own, before the block graph.

    steps: Their steps over the program's inputs, in canonical order.
    operands: Which values (inputs, then results) the block graph takes.
    """

    steps: tuple[GraphStep, ...]
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Structure:
    """A kernel graph without numbers: what runs first, and a block graph whose last step is stored.

    shifted: Whether exponentials are taken relative to a running maximum: as the program does.
    """

    prefix: Prefix
    mapping: Mapping
    steps: tuple[GraphStep, ...]
    shifted: bool = False

    def with_constants(self, constants: Any) -> Structure:
        """Return the structure with other numbers to scale with: old -> new, as for another size."""
        before, steps = (
            tuple(step.with_links(tuple(_rescaled(step.links, constants))) for step in part)
            for part in (self.prefix.steps, self.steps)
        )
        return replace(self, prefix=replace(self.prefix, steps=before), steps=steps)

    def stages(self) -> list[str]:
        """Return the stage of every value: operands, then steps."""
        start = LOOPED if self.mapping.loops else AFTER
        found = [start] * len(self.prefix.operands)
        advanced = {"accumulate": AFTER, "combine": FINAL}
        for step in self.steps:
            found.append(advanced.get(step.operator, found[step.operands[0]]))
        return found


def _rescaled(links: Links, constants: Any) -> Iterator[Any]:
    for name, attributes in links:
        if name in CONSTANT:
            yield name, (("value", constants[dict(attributes)["value"]]),)
        else:
            yield name, attributes
