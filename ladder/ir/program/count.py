"""Bytes and operations of a tile program, counted from its loops and statements."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from ladder.ir.program.model import Copy, Loop, Multiply, Operand, Statement, TileProgram, made_by, size_of
from ladder.ir.program.verify import program_argument, reads


@dataclass(frozen=True)
class Counts:
    """Bytes and operations of one call.

    dram: Bytes of arguments: what a thread reads again in its own loops comes from its caches.
    cache: Bytes that are written to and read from memory of the kernel's own.
    operations: Multiplies and adds of the instructions, those on padding included.
    converted: Recipe -> elements that it converts.
    """

    dram: int
    cache: int
    operations: int
    converted: Mapping[str, int]


@dataclass(frozen=True)
class _Place:
    """Where a statement stands.

    extents: Of the axes, in all.
    pieces: Number of pieces of each axis here.
    loops: ``(loop, iterations per execution)`` around it, outermost first.
    """

    extents: Mapping[str, int]
    pieces: Mapping[str, int]
    loops: tuple[tuple[Loop, Fraction], ...] = ()

    def enter(self, loop: Loop) -> _Place:
        before, pieces = self.pieces[loop.axis], -(-self.extents[loop.axis] // loop.step)
        inner = (loop, Fraction(pieces, before))
        return _Place(self.extents, {**self.pieces, loop.axis: pieces}, (*self.loops, inner))

    @property
    def times(self) -> Fraction:
        """How often the statement is executed."""
        return math.prod((times for _, times in self.loops), start=Fraction(1))

    def elements(self, operand: Operand) -> Fraction:
        """Return the elements of a tile that one execution touches, on average."""
        return math.prod((self.width(axis) for axis in operand.axes), start=Fraction(1))

    def width(self, axis: str) -> Fraction:
        """Return the extent of a piece, on average: the last one may be partial."""
        return Fraction(self.extents[axis], self.pieces[axis])

    def passes(self, operand: Operand) -> Fraction:
        """Return how often an argument is asked for: other elements, or the same by other threads."""
        total, within = Fraction(1), False
        for loop, times in self.loops:
            total *= times if loop.axis in operand.axes or not within else 1
            within = within or loop.over == "threads"
        return total


def count(program: TileProgram, m: int, n: int, k: int) -> Counts:
    """Count a program for the extents of a call.

    m, n, k: Rows of the activations, rows and columns of the weight.
    """
    sizes = program.sizes(m, n, k)
    extents = {axis: size_of(extent, sizes) for axis, extent in program.axes}
    totals: dict[str, Fraction] = defaultdict(Fraction)
    converted: dict[str, Fraction] = defaultdict(Fraction)
    for statement, place in _places(program.body, _Place(extents, dict.fromkeys(extents, 1))):
        for level, bits in _moved(program, statement, place):
            totals[level] += bits / 8
        if isinstance(statement, Copy) and statement.recipe:
            converted[statement.recipe] += place.elements(statement.target) * place.times
        if isinstance(statement, Multiply):
            totals["operations"] += 2 * _products(program, statement, place) * place.times
    whole = {name: math.ceil(value) for name, value in totals.items()}
    recipes = {name: math.ceil(value) for name, value in converted.items()}
    return Counts(whole.get("dram", 0), whole.get("cache", 0), whole.get("operations", 0), recipes)


def _places(body: tuple[Statement, ...], place: _Place) -> Iterator[tuple[Statement, _Place]]:
    """Yield the statements that are no loops, with their places."""
    for statement in body:
        if isinstance(statement, Loop):
            yield from _places(statement.body, place.enter(statement))
        else:
            yield statement, place


def _moved(program: TileProgram, statement: Statement, place: _Place) -> Iterator[tuple[str, Fraction]]:
    """Yield the bits that all executions of a statement read or write, by level."""
    made = made_by(statement)
    for operand in [*map(program.operand, reads(statement)), *([made] if made else [])]:
        bits = place.elements(operand) * operand.tile.ttype.elem_bits
        argument = program_argument(program, operand.name)
        yield operand.tile.level, bits * (place.passes(operand) if argument else place.times)


def _products(program: TileProgram, product: Multiply, place: _Place) -> Fraction:
    """Return the products of one execution: register tiles are multiplied whole, padding included."""
    tile = program.operand(product.total)
    rows = [tile.extent(axis) for axis in ("m", "n")]
    whole = [row if isinstance(row, int) else place.width(axis) for axis, row in zip("mn", rows, strict=True)]
    return math.prod(whole, start=Fraction(1)) * place.width("g") * place.width("k")
