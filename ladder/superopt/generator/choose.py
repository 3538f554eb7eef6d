"""Tiles for a structure, and the bytes that a multiprocessor then moves: what graphs are ranked by."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from collections.abc import Mapping as Numbers

from ladder.ir.graph import Graph
from ladder.ir.build import bind, node_attributes
from ladder.superopt.generator.instantiate import instantiate
from ladder.superopt.generator.program import Program
from ladder.superopt.generator.structure import Mapping, Structure
from tile_types.errors import ShapeError

LAUNCH_BYTES = 64 * 1024
"""What a unit loads in the 2 µs of another launch, at 4.2 TB/s over 132 units."""

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

    Parameters
    ----------
    units
        Multiprocessors of the device.
    capacity
        Bytes of shared memory that the tiles of a block may take together.

    Raises
    ------
    ShapeError
        If no tile divides the sizes and fits.
    """
    symbolic = instantiate(structure, program)
    best: tuple[float, int] | None = None
    chosen: dict[str, int] = {}
    for factors in tilings(structure.mapping, program):
        graph = bind(symbolic, factors)
        cost = _cost(graph, units, capacity)
        steps = math.prod(number for name, number in factors.items() if name[-1] in "gl")
        if cost is not None and (best is None or (cost, steps) < best):
            best, chosen = (cost, steps), factors
    if best is None:
        tiles = TILES if program.multiplies else ROWS
        raise ShapeError(f"no tiles of {tiles} divide {dict(program.sizes)} and fit {capacity} bytes")
    return chosen, best[0]


def _cost(graph: Graph, units: int, capacity: int) -> float | None:
    """Return the bytes that a unit moves, one launch for each kernel but the first; None if tiles do not fit."""
    kernels = [node for node in graph.nodes if node.operator != "input"]
    total = LAUNCH_BYTES * (len(kernels) - 1.0)
    for node in kernels:
        if node.body is None:
            total += sum(graph.tile(value).nbytes for value in (node.name, *node.inputs)) / units
            continue
        used = sum(inner.tile.nbytes for inner in node.body.nodes if inner.tile.level == "shared")
        if used > capacity:
            return None
        blocks = math.prod(int(axis.extent) for axis in node.body.grid)
        total += -(-blocks // units) * _loaded(node.body)
    return total


def _loaded(body: Graph) -> int:
    """Return the bytes that a block loads: in each step, what the loop splits."""
    steps = math.prod(int(axis.extent) for axis in body.loops)
    loads = [node for node in body.nodes if node.operator == "load"]
    looped = [node for node in loads if max(node_attributes(node)["loop"], default=-1) >= 0]
    return sum(n.tile.nbytes for n in loads) + (steps - 1) * sum(n.tile.nbytes for n in looped)


def tilings(
    mapping: Mapping, program: Program, tiles: tuple[int, ...] | None = None
) -> Iterator[dict[str, int]]:
    """Yield factors of a program's sizes: tiles that divide them, by default `TILES` or `ROWS`."""
    tiles = tiles or (TILES if program.multiplies else ROWS)
    choices = [_of_dimension(mapping, name, size, tiles) for name, size in program.sizes.items()]
    for parts in itertools.product(*choices):
        yield {name: number for part in parts for name, number in part.items()}


def _of_dimension(
    mapping: Mapping, dimension: str, size: int, tiles: tuple[int, ...]
) -> list[Numbers[str, int]]:
    """Return numbers for the factors of a dimension: tiles that divide it, and how blocks and steps share it."""
    left = mapping.left(dimension)
    split = [name for name in mapping.factors(dimension) if name not in left]
    if not left:
        return [{split[0]: size}]
    if not split:
        return [{left[0]: size}]
    found = [(tile, size // tile) for tile in tiles if size % tile == 0 and tile < size]
    if len(split) == 1:
        return [{split[0]: rest, left[0]: tile} for tile, rest in found if not _parted(mapping, dimension, rest)]
    return [
        {split[0]: parts, split[1]: rest // parts, left[0]: tile}
        for tile, rest in found for parts in PARTS if rest % parts == 0 and parts < rest
    ]  # fmt: skip


def _parted(mapping: Mapping, dimension: str, parts: int) -> bool:
    """Whether too many blocks would share a reduction."""
    return dimension == mapping.split and parts > PARTS[-1]
