"""Grouped GEMM: find the expert whose activation rows a block multiplies, one launch for all experts.

A kernel asks for its `MTile` and goes on as if there were one matrix: the arguments that come with
it show one expert's weights, and M ends where the expert's activation rows end. The rows of one expert
are neighbours in x, either one expert after the other (``ranges`` are the E+1 offsets), or in slots of
equally many rows (``ranges`` are the E counts, or the expert of each slot). They are read on the device.
What vendors do differently is said by `Lanes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.arguments import Arguments


@dataclass(frozen=True)
class Lanes(ABC):
    """A warp or wave whose lanes search the ranges together; all of them must take part.

    lane, count: The lane's number, and how many there are, a power of two.
    """

    lane: Expr
    count: int

    @abstractmethod
    def read(self, ranges: Any, index: Expr) -> Expr:
        """Return an int32 of ``ranges`` as it is once the kernels before have ended."""

    @abstractmethod
    def shuffle_xor(self, value: Expr, distance: int) -> Expr:
        """Return the int32 of the lane at a distance (a power of two), read before it changes."""

    @abstractmethod
    def uniform(self, value: Expr) -> Expr:
        """Return an int32 that is the same in all lanes, as the vendor's code holds such."""


class ExpertSlice:
    """The part of a tensor ``[E, ...]`` that belongs to one expert, indexed like ``[...]``."""

    def __init__(self, tensor: Any, expert: Expr) -> None:
        self.tensor, self.expert = tensor, expert
        self.dtype, self.shape = tensor.dtype, tensor.shape[1:]

    def ptr_to(self, indices: list[Expr]) -> Expr:
        """Return the address of an element."""
        return self.tensor.ptr_to([self.expert, *indices])

    def __getitem__(self, index: Expr) -> Expr:
        indices = index if isinstance(index, tuple) else (index,)
        return self.tensor[(self.expert, *indices)]


NEIGHBOURS = 4
"""Experts whose offsets a lane reads at once, so that it waits for memory once."""


@dataclass(frozen=True)
class MTile:
    """The activation rows of one tile of the output.

    args: The arguments as one expert's product sees them: its weights, and ``m`` after its last row.
    first: First row of x of the tile.
    exists: Whether there is such a tile: the grid is an upper bound. Code after `find_m_tile` must run under
        this condition.
    """

    args: Arguments
    first: Expr
    exists: Expr


def count_m_tiles(args: Arguments, tile_m: int) -> Expr:
    """Return how many tiles of ``tile_m`` activation rows there are at most, from what the host knows."""
    if args.experts is None:
        return (args.m + tile_m - 1) // tile_m
    if args.slots is not None:
        return args.slots * ((T.truncdiv(args.m, args.slots) + tile_m - 1) // tile_m)
    # Every expert may end within a tile, and no tile is empty.
    return T.min(args.m, (args.m + args.experts * (tile_m - 1)) // tile_m)


def find_m_tile(args: Arguments, block: Expr, tile_m: int, lanes: Lanes) -> MTile:
    """Find the activation rows of tile ``block``, of `count_m_tiles`.

    args: The kernel's arguments.
    block: Tile along M, the same in every lane of a warp.
    tile_m: Activation rows per tile.
    lanes: The warp.
    """
    if args.experts is None:
        return MTile(args, b.bind(block * tile_m), True)
    run = None if args.slots is not None else find_run(args, tile_m, lanes)
    expert, first, stop, exists = find_rows(args, run, block, tile_m, lanes)
    return MTile(args_of_expert(args, expert, stop), first, exists)


def args_of_expert(args: Arguments, expert: Expr, stop: Expr) -> Arguments:
    """Return the arguments as one expert's product sees them, whose rows end before ``stop``."""
    weights: dict[str, Any] = {
        name: ExpertSlice(tensor, expert)
        for name in ("words", "scales", "zeros", "row_scale", "bias")
        if (tensor := getattr(args, name)) is not None
    }
    return replace(args, m=stop, **weights)


@dataclass(frozen=True)
class Run:
    """The neighbouring experts whose tiles a lane counts, `NEIGHBOURS` at a time.

    turns, first: How many times, and the first expert.
    before: Tiles of all experts before the first.
    total: Tiles of all experts.
    """

    turns: Expr
    first: Expr
    before: Expr
    total: Expr


def find_rows(args: Arguments, run: Run | None, block: Expr, tile_m: int, lanes: Lanes) -> tuple[Expr, ...]:
    """Return expert, first row, end of its rows and whether the tile exists; ``run``: see `find_run`."""
    return _in_slots(args, block, tile_m, lanes) if run is None else _in_run(args, run, block, tile_m, lanes)


def _in_slots(args: Arguments, block: Expr, tile_m: int, lanes: Lanes) -> tuple[Expr, ...]:
    """Return expert, first row, end of its rows and whether the tile exists, for slots."""
    slot = b.keep(T.truncdiv(args.m, args.slots))
    per_slot = b.keep(T.truncdiv(slot + tile_m - 1, tile_m))
    own = b.keep(T.truncdiv(block, per_slot))
    first = b.keep(own * slot + T.truncmod(block, per_slot) * tile_m)
    told = b.keep(lanes.uniform(lanes.read(args.ranges, own)))
    if not args.named:
        stop = b.keep(own * slot + T.min(told, slot))
        return own, first, stop, first < stop
    expert = b.keep(T.max(T.min(told, args.experts - 1), 0))
    return expert, first, b.keep((own + 1) * slot), expert == told


def find_run(args: Arguments, tile_m: int, lanes: Lanes) -> Run:
    """Deal the experts, whose rows follow each other, to the lanes of a warp, and count their tiles.

    A lane counts the tiles of a run of neighbouring experts, `NEIGHBOURS` of which it reads at once, and a
    scan over the lanes tells how many come before.
    """
    lane, count = lanes.lane, lanes.count
    turns = b.keep(T.truncdiv(args.experts + (count * NEIGHBOURS - 1), count * NEIGHBOURS))
    own = b.keep(lane * turns * NEIGHBOURS)
    total = b.Variable("int32", 0)
    with b.loop(turns) as turn:
        total.set(total.value + sum(_tiles_of(args, own + turn * NEIGHBOURS, tile_m, lanes)))
    before = b.Variable("int32", 0)
    for distance in _distances(lanes):
        other = lanes.shuffle_xor(total.value, distance)
        with b.when(T.bitwise_and(lane, distance) != 0):
            before.set(before.value + other)
        total.set(total.value + other)
    return Run(turns, own, before.value, total.value)


def _distances(lanes: Lanes) -> list[int]:
    """Return by how much the numbers of lanes differ that exchange values until all have met."""
    return [1 << bit for bit in range(lanes.count.bit_length() - 1)]


def _in_run(args: Arguments, run: Run, block: Expr, tile_m: int, lanes: Lanes) -> tuple[Expr, ...]:
    """Return the same for rows that follow each other: the lane whose run holds the tile tells the others."""
    before = b.Variable("int32", run.before)
    found, found_before = b.Variable("int32", -1), b.Variable("int32", 0)
    with b.loop(run.turns) as turn:
        expert = b.keep(run.first + turn * NEIGHBOURS)
        for index, here in enumerate(_tiles_of(args, expert, tile_m, lanes)):
            with b.when(T.And(before.value <= block, block < before.value + here)):
                found.set(expert + index)
                found_before.set(before.value)
            before.set(before.value + here)
    for distance in _distances(lanes):
        for cell in (found, found_before):
            cell.set(T.max(cell.value, lanes.shuffle_xor(cell.value, distance)))
    tile_expert, tiles_before = lanes.uniform(found.value), lanes.uniform(found_before.value)
    expert = b.keep(T.max(tile_expert, 0))
    start, stop = _range(args, _offset(args, expert, lanes), _offset(args, expert + 1, lanes))
    first = b.keep(start + (block - tiles_before) * tile_m)
    return expert, first, b.keep(stop), tile_expert >= 0


def _tiles_of(args: Arguments, expert: Expr, tile_m: int, lanes: Lanes) -> list[Expr]:
    """Return the tiles of `NEIGHBOURS` experts from ``expert`` on; those after the last one have none."""
    at = (T.min(expert + index, args.experts) for index in range(NEIGHBOURS + 1))
    offsets = [_offset(args, index, lanes) for index in at]
    ranges = (_range(args, start, stop) for start, stop in pairwise(offsets))
    return [b.keep(T.truncdiv(T.max(stop - start, 0) + (tile_m - 1), tile_m)) for start, stop in ranges]


def _offset(args: Arguments, index: Expr, lanes: Lanes) -> Expr:
    """Return the first activation row of an expert, where those of the one before end."""
    if not args.ends:
        return lanes.read(args.ranges, index)
    before = lanes.read(args.ranges, T.max(index - 1, 0))
    return T.if_then_else(index > 0, before, 0)


def _range(args: Arguments, start: Expr, stop: Expr) -> tuple[Expr, Expr]:
    """Return first and end of an expert's activation rows, within x whatever the offsets say."""
    return b.bind(T.max(start, 0)), b.bind(T.min(stop, args.m))


def raster(block: Expr, rows: Expr, columns: Expr, width: int) -> tuple[Expr, Expr]:
    """Return which of ``rows`` (along N) and ``columns`` (along M) of tiles a block computes.

    Blocks walk bands of ``width`` rows, all columns of a band before the next one, so that neighbours share
    operands in L2.
    """
    # The operands are positive, so truncating division spares the code for signs.
    band = b.keep(columns * width)
    first = b.keep(T.truncdiv(block, band) * width)
    place = b.keep(T.truncmod(block, band))
    own = b.keep(T.min(rows - first, width))
    return first + T.truncmod(place, own), T.truncdiv(place, own)
