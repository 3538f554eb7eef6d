"""Tiles for a structure, and the bytes that a multiprocessor then moves: what graphs are ranked by."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as Numbers

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph
from ladder.superopt.generator.instantiate import instantiate
from ladder.superopt.generator.program import Program
from ladder.superopt.generator.space import evaluated
from ladder.superopt.generator.structure import Mapping, Structure
from tile_types.errors import ShapeError
from tile_types.tile import Extent, Tile

LAUNCH_BYTES = 64 * 1024
"""Bytes that a unit loads in the 2 µs of another launch, at 4.2 TB/s over 132 units."""

TILES = (16, 32, 64, 128, 256)
"""Extents of a split dimension in a tile that are tried."""

ROWS = (1, 2, 4, 8, *TILES)
"""The same for programs without matrix products."""

PARTS = (2, 4, 8, 16, 32, 64)
"""Numbers of blocks that share a reduction."""


def choose_factors(
    structure: Structure, program: Program, units: int, capacity: int
) -> tuple[dict[str, int], float]:
    """Return factors for the program's own sizes, and the bytes that a unit moves, kernels included.

    Of factors that move the same, those of the fewest steps of all blocks.

    units: Multiprocessors of the device.
    capacity: Bytes of shared memory that the tiles of a block may take together.
    Raises ShapeError if no tile divides the sizes and fits.
    """
    cost_of = _Costs(instantiate(structure, program, packed=True), units, capacity)
    best: tuple[float, int] | None = None
    chosen: dict[str, int] = {}
    for factors in tilings(structure.mapping, program):
        cost = cost_of(factors)
        steps = math.prod(number for name, number in factors.items() if name[-1] in "gl")
        if cost is not None and (best is None or (cost, steps) < best):
            best, chosen = (cost, steps), factors
    if best is None:
        tiles = TILES if program.multiplies else ROWS
        raise ShapeError(f"no tiles of {tiles} divide {dict(program.sizes)} and fit {capacity} bytes")
    return chosen, best[0]


class _Costs:
    """Cost of a kernel graph over symbols, at numbers for them."""

    def __init__(self, graph: Graph, units: int, capacity: int) -> None:
        self.graph, self.units, self.capacity = graph, units, capacity
        self.kernels = [node for node in graph.nodes if node.operator != "input"]
        self.bodies = [node.body for node in self.kernels if node.body is not None]
        self.shared = [
            [node.tile for node in body.nodes if node.tile.level == "shared"] for body in self.bodies
        ]

    def __call__(self, factors: Numbers[str, int]) -> float | None:
        """Return the bytes that a unit moves, with launches; None if tiles do not fit."""
        numbers = tuple(sorted(factors.items()))
        if any(_bytes(tiles, numbers) > self.capacity for tiles in self.shared):
            return None
        total = LAUNCH_BYTES * (len(self.kernels) - 1.0)
        for body in self.bodies:
            blocks = _product([axis.extent for axis in body.grid], numbers)
            total += -(-blocks // self.units) * _loaded(body, numbers)
        plain = [node for node in self.kernels if node.body is None]
        moved = [self.graph.tile(value) for node in plain for value in (node.name, *node.inputs)]
        return total + _bytes(moved, numbers) / self.units


_Numbered = tuple[tuple[str, int], ...]


def _product(extents: Sequence[Extent], numbers: _Numbered) -> int:
    return math.prod(evaluated(str(extent), numbers) for extent in extents)


def _bytes(tiles: Sequence[Tile], numbers: _Numbered) -> int:
    return sum(math.ceil(_product(tile.shape, numbers) * tile.ttype.bits_per_element / 8) for tile in tiles)


def _loaded(body: Graph, numbers: _Numbered) -> int:
    """Return the bytes that a block loads: in each step, what the loop splits."""
    steps = _product([axis.extent for axis in body.loops], numbers)
    loads = [node for node in body.nodes if node.operator == "load"]
    looped = [node for node in loads if max(node_attributes(node)["loop"], default=-1) >= 0]
    once, each = (_bytes([node.tile for node in nodes], numbers) for nodes in (loads, looped))
    return once + (steps - 1) * each


def tilings(
    mapping: Mapping, program: Program, tiles: tuple[int, ...] | None = None
) -> Iterator[dict[str, int]]:
    """Yield factors of a program's sizes: tiles that divide them, by default `TILES` or `ROWS`.

    Tiles hold whole groups of what shares a scale.
    """
    tiles = tiles or (TILES if program.multiplies else ROWS)
    groups = program.groups
    choices = [
        _of_dimension(mapping, name, size, tuple(t for t in tiles if t % groups.get(name, 1) == 0))
        for name, size in program.sizes.items()
    ]
    for parts in itertools.product(*choices):
        yield {name: number for part in parts for name, number in part.items()}


def _of_dimension(
    mapping: Mapping, dimension: str, size: int, tiles: tuple[int, ...]
) -> list[Numbers[str, int]]:
    """Return numbers for a dimension's factors: tiles that divide it, and how blocks and steps share it."""
    left = mapping.left(dimension)
    split = [name for name in mapping.factors(dimension) if name not in left]
    if not left:
        return [{split[0]: size}]
    if not split:
        return [{left[0]: size}]
    found = [(tile, size // tile) for tile in tiles if size % tile == 0 and tile < size]
    if len(split) == 1:
        return [
            {split[0]: rest, left[0]: tile} for tile, rest in found if not _parted(mapping, dimension, rest)
        ]
    return [
        {split[0]: parts, split[1]: rest // parts, left[0]: tile}
        for tile, rest in found for parts in PARTS if rest % parts == 0 and parts < rest
    ]  # fmt: skip


def _parted(mapping: Mapping, dimension: str, parts: int) -> bool:
    """Whether too many blocks would share a reduction."""
    return dimension == mapping.split and parts > PARTS[-1]
