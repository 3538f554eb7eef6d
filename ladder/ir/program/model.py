"""The data of a tile program: operands, statements and loops, all frozen values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tile_types.errors import ShapeError, unknown_name
from tile_types.tile import Extent, Tile

MEMORY = "dram"
"""Level of arguments."""

LOCAL = ("l2", "cache", "register")
"""Levels of tiles that a kernel makes: ``l2`` holds lines of an argument ahead of their use, ``cache`` is
memory of the kernel's own, which stays in caches by its size, ``register`` is indexed by constants only."""

OVER = ("loop", "threads", "unrolled")
"""Resources over which the iterations of a loop are spread."""

PADDED = re.compile(r"([A-Z])\^(\d+)")
"""``N^128``: N rounded up to a multiple of 128."""


def size_of(extent: Extent, sizes: Mapping[str, int]) -> int:
    """Return an extent as a number; ``sizes`` gives that of each symbol."""
    if isinstance(extent, int):
        return extent
    padded = PADDED.fullmatch(extent)
    if padded:
        return -(-sizes[padded[1]] // int(padded[2])) * int(padded[2])
    return sizes[extent]


def granule(extent: Extent) -> int:
    """Return what is known to divide an extent."""
    if isinstance(extent, int):
        return extent
    padded = PADDED.fullmatch(extent)
    return int(padded[2]) if padded else 1


@dataclass(frozen=True)
class Layout:
    """How the elements of a tile lie at its level, by name: ``words(16)``."""

    name: str
    parameters: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.parameters))})"


@dataclass(frozen=True)
class Operand:
    """A named tile whose axes have names.

    name: ``"x"``; copies are called ``"x.cache"``, after the level they lie at.
    axes: Name of each axis.
    tile: Type, shape, level and layout.
    """

    name: str
    axes: tuple[str, ...]
    tile: Tile

    @property
    def ttype(self) -> str:
        """Name of the element type."""
        return self.tile.ttype.name

    def extent(self, axis: str) -> Extent:
        """Return the extent of an axis; 1 if the tile has none of that name."""
        return self.tile.shape[self.axes.index(axis)] if axis in self.axes else 1

    def fixed(self, axis: str) -> int:
        """Return the extent of an axis that schedules must have made a number.

        Raises ShapeError if it is symbolic.
        """
        extent = self.extent(axis)
        if isinstance(extent, int):
            return extent
        raise ShapeError(f"{self.name} has {extent} elements along {axis}, which only the caller knows")

    def nbytes(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes of its elements."""
        count = math.prod(size_of(extent, sizes) for extent in self.tile.shape)
        return -(-count * self.tile.ttype.elem_bits // 8)


@dataclass(frozen=True)
class Fill:
    """``target <- 0``."""

    target: Operand


@dataclass(frozen=True)
class Copy:
    """``target <- source``: a tile at another level, and with a recipe in another type.

    target: What is made; a tile that exists already is written back.
    source: Name of what is read.
    by: The mechanism: ``"threads"``, ``"prefetch 4"``; empty: loads and stores.
    recipe: How codes become values of the target's type; empty: the type stays.
    """

    target: Operand
    source: str
    by: str = ""
    recipe: str = ""


@dataclass(frozen=True)
class Sum:
    """``target <- sum of source over axis``."""

    target: Operand
    source: str
    axis: str


@dataclass(frozen=True)
class Multiply:
    """``total += left · rightᵀ``, summed over the axes that the total lacks, by an instruction."""

    total: str
    left: str
    right: str
    by: str = ""


@dataclass(frozen=True)
class AddGroup:
    """``total += (value - zero * sums + offset * sums) * scale``, summed over groups.

    total, value: Sums over all groups, and the product of one group.
    sums: Sums of the activations of a group; empty: neither zero points nor an offset.
    zero, scale: Arguments per group and column; empty: none.
    offset: What code 0 stands for.
    """

    total: str
    value: str
    sums: str = ""
    zero: str = ""
    scale: str = ""
    offset: int = 0


@dataclass(frozen=True)
class Store:
    """``target <- operators(source)``, rounded to the target's type.

    target, source: An argument, and what is stored into it.
    operators: ``(operator, operand)`` in order; the operand is an argument, or empty for functions of one
        number.
    """

    target: str
    source: str
    operators: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Loop:
    """Cuts an axis into pieces of ``step`` elements; what is inside sees one piece.

    axis: Name of the axis.
    step: Elements of one piece; the last one may be partial.
    over: One of `OVER`.
    body: Statements.
    """

    axis: str
    step: int
    over: str
    body: tuple[Statement, ...]


Statement = Fill | Copy | Sum | Multiply | AddGroup | Store | Loop


@dataclass(frozen=True)
class TileProgram:
    """One kernel.

    name: What it computes.
    axes: ``(name, extent)`` of what loops go through: ``m`` and ``n`` of the result, ``g`` groups of ``k``
        columns.
    arguments: Tensors in calling order.
    body: Statements.
    """

    name: str
    axes: tuple[tuple[str, Extent], ...]
    arguments: tuple[Operand, ...]
    body: tuple[Statement, ...]

    def __str__(self) -> str:
        from ladder.ir.program.text import print_program

        return print_program(self)

    def extent(self, axis: str) -> Extent:
        return dict(self.axes)[axis]

    def pieces(self, loops: Sequence[Loop]) -> dict[str, Extent]:
        """Return the extent of each axis inside loops, outermost first."""
        return {**dict(self.axes), **{loop.axis: loop.step for loop in loops}}

    @cached_property
    def _operands(self) -> Mapping[str, Operand]:
        made = (made_by(statement) for statement, _ in walk(self.body))
        found = {operand.name: operand for operand in self.arguments}
        for operand in made:
            if operand is not None:
                found.setdefault(operand.name, operand)
        return found

    def has(self, name: str) -> bool:
        return name in self._operands

    def operand(self, name: str) -> Operand:
        """Return an argument or a tile that a statement makes.

        Raises UnknownNameError if there is none of that name.
        """
        if name not in self._operands:
            raise unknown_name(f"tile of {self.name}", name, self._operands)
        return self._operands[name]

    def find(self, kind: type) -> list[tuple[Statement, tuple[Loop, ...]]]:
        """Return the statements of a kind, each with the loops around it, outermost first."""
        return [(statement, loops) for statement, loops in walk(self.body) if isinstance(statement, kind)]

    @cached_property
    def product(self) -> tuple[Multiply, tuple[Loop, ...]]:
        """The product, with the loops around it."""
        ((statement, loops),) = self.find(Multiply)
        assert isinstance(statement, Multiply)
        return statement, loops

    def sizes(self, m: int, n: int, k: int) -> dict[str, int]:
        """Return the size of every symbol for extents of a call."""
        group = self.operand("x").extent("k")
        return {"M": m, "N": n, "K": k, "G": -(-k // group) if isinstance(group, int) else 1}


def walk(
    body: tuple[Statement, ...], outer: tuple[Loop, ...] = ()
) -> Iterator[tuple[Statement, tuple[Loop, ...]]]:
    """Yield every statement, loops included, with the loops around it."""
    for statement in body:
        yield statement, outer
        if isinstance(statement, Loop):
            yield from walk(statement.body, (*outer, statement))


def made_by(statement: Statement) -> Operand | None:
    """Return the tile that a statement makes."""
    return statement.target if isinstance(statement, (Fill, Copy, Sum)) else None
