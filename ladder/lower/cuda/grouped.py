"""How a warp of a CUDA kernel finds its tile of a grouped GEMM (`ladder.lower.gpu.grouped`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.launch import Overlap
from ladder.lower.gpu import grouped
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.grouped import Lanes, MTile
from schedules.schedule import GpuSchedule

WARP = 32


@dataclass(frozen=True)
class Warp(Lanes):
    """The 32 lanes of a warp, in whose registers all values of CUDA code are."""

    count: int = WARP

    def read(self, ranges: Any, index: Expr) -> Expr:
        # A plain read could move ahead of the wait for the kernel before.
        register = b.local(1, "uint32")
        b.ptx("ld.global.u32", register[0], ranges.ptr_to([index]))
        # Not a cast: TVM takes what was unsigned for never negative, and drops the clamping to 0.
        return T.reinterpret("int32", register[0])

    def shuffle_xor(self, value: Expr, distance: int) -> Expr:
        return b.keep(b.shuffle_xor(value, distance))

    def uniform(self, value: Expr) -> Expr:
        return value


FOUND_WORDS, FOUND_BYTES = 4, 128
"""Words by which the first warp of a block tells the others (expert, first row, end, whether it exists), and
bytes until buffers of alignment 128 may follow."""


MANY_SLICES = 4
"""Slices of K of the kernels that one token's experts have (measured on an H200)."""


class Told(NamedTuple):
    """The thread's warp, and `FOUND_WORDS` int32 of shared memory of the block."""

    warp: Expr
    words: Any


def shares_search(gemm: Gemm, schedule: GpuSchedule) -> bool:
    """Tell whether one warp of a gemv block searches the block's rows for all, where there is a search.

    Few blocks cut K in many slices, and have schedulers enough: there a barrier costs more.
    """
    searches = gemm.experts and not gemm.masked and not gemm.slots
    return bool(searches) and schedule.split_k < MANY_SLICES


def find_m_tile(
    args: Arguments, block: Expr, tile_m: int, lane: Expr, overlap: Overlap, told: Told | None = None
) -> MTile:
    """Find the activation rows of a tile; ranges are read after the kernel before, which may write them.

    told: Where the first warp tells the others what it found, so that they leave their schedulers to it;
        None: every warp searches.
    """
    if args.experts is not None:
        overlap.wait()
    if told is None:
        return grouped.find_m_tile(args, block, tile_m, Warp(lane))
    with b.when(told.warp == 0):
        run = grouped.find_run(args, tile_m, Warp(lane))
        found = grouped.find_rows(args, run, block, tile_m, Warp(lane))
        with b.when(lane == 0):
            for index, value in enumerate(found):
                b.store(told.words, T.Cast("int32", value), index)
    b.block_sync()
    expert, first, stop, exists = (b.keep(told.words[index]) for index in range(FOUND_WORDS))
    return MTile(grouped.args_of_expert(args, expert, stop), first, exists != 0)
