"""Bytes and operations of a tile program, counted from its loops and statements."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ladder.ir.program.model import Copy, Loop, Multiply, Operand, Statement, TileProgram, size_of
from ladder.ir.program.verify import program_argument, reads


@dataclass(frozen=True)
class Counts:
    """What one call does.

    Parameters
    ----------
    dram
        Bytes of arguments: what a thread reads again in its own loops comes from its caches.
    cache
        Bytes that are written to and read from memory of the kernel's own.
    operations
        Multiplies and adds of the instructions, those on padding included.
    converted
        Recipe -> elements that it converts.
    """

    dram: int
    cache: int
    operations: int
    converted: Mapping[str, int]


@dataclass(frozen=True)
class _Place:
    """Where a statement stands: ``(loop, iterations)`` around it, and the extent of each axis there."""

    pieces: Mapping[str, int]
    loops: tuple[tuple[Loop, int], ...] = ()

    def enter(self, loop: Loop) -> _Place:
        extent = self.pieces[loop.axis]
        times = -(-extent // loop.step)
        return _Place({**self.pieces, loop.axis: min(loop.step, extent)}, (*self.loops, (loop, times)))

    @property
    def times(self) -> int:
        return math.prod(times for _, times in self.loops)

    def elements(self, operand: Operand) -> int:
        return math.prod(self.pieces[axis] for axis in operand.axes)

    def passes(self, operand: Operand) -> int:
        """Return how often an argument is asked for: other elements, or the same by other threads."""
        total, within = 1, False
        for loop, times in self.loops:
            total *= times if loop.axis in operand.axes or not within else 1
            within = within or loop.over == "threads"
        return total


def count(program: TileProgram, m: int, n: int, k: int) -> Counts:
    """Count a program for the extents of a call.

    Parameters
    ----------
    m, n, k
        Rows of the activations, rows and columns of the weight.
    """
    sizes = program.sizes(m, n, k)
    totals: Counter[str] = Counter()
    converted: Counter[str] = Counter()

    def visit(body: tuple[Statement, ...], place: _Place) -> None:
        for statement in body:
            if isinstance(statement, Loop):
                visit(statement.body, place.enter(statement))
                continue
            for name in reads(statement):
                operand = program.operand(name)
                bits = place.elements(operand) * operand.tile.ttype.elem_bits
                if program_argument(program, name):
                    totals["dram"] += bits * place.passes(operand)
                elif operand.tile.level == "cache":
                    totals["cache"] += bits * place.times
            if isinstance(statement, Copy):
                made = statement.target
                totals["cache"] += made.tile.level == "cache" and (
                    place.elements(made) * place.times * made.tile.ttype.elem_bits
                )
                if statement.recipe:
                    converted[statement.recipe] += place.elements(made) * place.times
            if isinstance(statement, Multiply):
                totals["operations"] += 2 * _products(program, statement, place) * place.times

    visit(program.body, _Place({axis: size_of(extent, sizes) for axis, extent in program.axes}))
    return Counts(totals["dram"] // 8, totals["cache"] // 8, totals["operations"], dict(converted))


def _products(program: TileProgram, product: Multiply, place: _Place) -> int:
    """Return the products of one execution: register tiles are multiplied whole, padding included."""
    tile = program.operand(product.total)
    whole = [tile.extent(axis) for axis in ("m", "n")]
    rows = [
        extent if isinstance(extent, int) else place.pieces[axis]
        for axis, extent in zip("mn", whole, strict=True)
    ]
    return math.prod(rows) * place.pieces["g"] * place.pieces["k"]
