"""How a warp of a CUDA kernel finds its tile of a grouped GEMM (`ladder.lower.gpu.grouped`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.launch import Overlap
from ladder.lower.gpu import grouped
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.grouped import MTile

WARP = 32


@dataclass(frozen=True)
class Warp:
    """The 32 lanes of a warp."""

    lane: Expr
    count: int = WARP

    def read(self, ranges: Any, index: Expr) -> Expr:
        """Return one of the ranges. A plain read could move ahead of the wait for the kernel before."""
        register = b.local(1, "uint32")
        b.ptx("ld.global.u32", register[0], ranges.ptr_to([index]))
        # Not a cast: TVM takes what was unsigned for never negative, and drops the clamping to 0.
        return T.reinterpret("int32", register[0])

    def shuffle_xor(self, value: Expr, distance: int) -> Expr:
        """Return the value of another lane."""
        return b.keep(T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), value, distance, WARP, WARP))

    def uniform(self, value: Expr) -> Expr:
        """Return the value: registers of CUDA code are all of lanes."""
        return value


def find_m_tile(args: Arguments, block: Expr, tile_m: int, lane: Expr, overlap: Overlap) -> MTile:
    """Find the activation rows of a tile; ranges are read after the kernel before, which may write them."""
    if args.experts is not None:
        overlap.wait()
    return grouped.find_m_tile(args, block, tile_m, Warp(lane))
