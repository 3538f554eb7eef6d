"""Packed words, scales and zero points of an AMD kernel: from memory to two sets of registers."""

from __future__ import annotations

from math import gcd
from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.gpu.decode import load_order
from ladder.lower.gpu.groups import GroupRegisters, array_dtype
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.gemm_place import Place, Spec
from ladder.lower.rocm.gemm_scales import Columns, GroupReader, row_of
from ladder.lower.rocm.groups import WaveGroupRegisters
from schedules.layouts import THREADS, TILE
from schedules.waves import STEP_ROWS

Expr = Any

BLOCK_THREADS = THREADS * STEP_ROWS // TILE
"""Threads that own the packed words of a 32-row block of a tile."""


class Weights:
    """Two sets of registers of a stage's weights, and the loads into them.

    columns: What holds the scales instead, where columns of instructions are groups of K.
    """

    def __init__(self, spec: Spec, place: Place, columns: Columns | None = None) -> None:
        self.spec, self.place, self.columns = spec, place, columns
        geo, args = spec.geo, place.args
        types = (array_dtype(args.scales), array_dtype(args.zeros))
        blocks = geo.row_blocks * geo.slice_tiles
        widths = [width for _, width in load_order(spec.groups.bits)]
        self.words = [(d.Pieces(widths), d.Pieces(widths)) for _ in range(blocks * spec.step.parts)]
        # Neighbouring tiles of a stage that have their scales in common share registers.
        self.share = gcd(spec.groups.span or geo.slice_tiles, geo.slice_tiles)
        self.groups = [
            tuple(WaveGroupRegisters(spec.groups, spec.step, place.lane, types) for _ in range(2))
            for _ in range(0 if columns else blocks // self.share)
        ]

    @property
    def first_groups(self) -> list[GroupRegisters]:
        """Scales and zero points of the first tile of a stage, by row block."""
        return [sets[0] for sets in self.groups[: self.spec.geo.row_blocks]]

    def fetch(self, iteration: Expr, half: int) -> None:
        """Emit the loads of a stage's packed words, scales and zero points of this lane."""
        geo, args = self.spec.geo, self.place.args
        for step in range(geo.slice_tiles):
            tile = b.bind(T.min(self.tile(iteration, step), args.k_tiles - 1))
            for block in range(geo.row_blocks):
                for part in range(self.spec.step.parts):
                    self._fetch_words(tile, step, block, part, half)
                if step % self.share == 0 and self.columns is None:
                    registers = self.group(step, block, half)
                    registers.fetch(
                        GroupReader(self.spec.groups, args, tile, row_of(self.spec, self.place, block))
                    )

    def group(self, step: int, block: int, half: int) -> WaveGroupRegisters:
        """Return the scales and zero points of a tile of a stage."""
        if self.columns is not None:
            return self.columns.scales[block]
        return self.groups[step // self.share * self.spec.geo.row_blocks + block][half]

    def tile(self, iteration: Expr, step: int) -> Expr:
        """Return a packed tile along K of this wave's slice of a stage; it may lie beyond K."""
        geo = self.spec.geo
        return b.bind(iteration * geo.stage_tiles + self.place.slice * geo.slice_tiles + step)

    def tile_words(self, step: int, half: int) -> list[d.Pieces]:
        """Return a lane's words of a tile of a stage, by row block and part."""
        count = self.spec.geo.row_blocks * self.spec.step.parts
        return [words[half] for words in self.words[step * count : (step + 1) * count]]

    def _fetch_words(self, tile: Expr, step: int, block: int, part: int, half: int) -> None:
        thread, row = self.place.holders[part], row_of(self.spec, self.place, block)
        row_tile, upper = b.bind(row // 2), b.bind(row % 2)
        words = self.tile_words(step, half)[block * self.spec.step.parts + part].buffers
        for buffer, (offset, width) in zip(words, load_order(self.spec.groups.bits), strict=True):
            place = offset + (upper * BLOCK_THREADS + thread) * width
            d.load(buffer, self.place.args.words, row_tile, tile, place, width=width)
