"""Packed words, scales and zero points of a gemv kernel: from global memory straight into registers.

Each thread keeps ``stages`` tiles of its slice of K in flight. Tiles go to the slices in *runs* of
neighbours, so that tiles of a group share one load of its scales.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.gemv_geometry import STRIP
from ladder.lower.cuda.gemv_place import Place, half_words
from ladder.lower.cuda.gemv_spec import Spec
from ladder.lower.gpu.decode import load_order
from ladder.lower.gpu.groups import GroupRegisters, array_dtype

LOADS = {width: f"ld.global.L1::no_allocate{'' if width == 1 else f'.v{width}'}.u32" for width in (1, 2, 4)}
"""Weights are read once: they bypass L1. ``.nc`` would let ptxas move loads before `Overlap.wait`."""


class Cursor:
    """Where a slice of K is: its current run, and where that run's words start."""

    def __init__(self, spec: Spec, place: Place) -> None:
        geo, first = spec.geo, place.share.first_run + place.warp.slice
        self.spec, self.share = spec, place.share
        self.run = b.Variable("int32", first)
        """The run being multiplied, counted over all slices."""
        tile = place.warp.strip // geo.tile_strips * place.args.k_tiles + first * geo.run
        start = b.bind(tile * spec.groups.tile_words)
        self.words = {
            width: b.Variable("int64", T.Cast("int64", start + place.owner * width))
            for _, width in load_order(spec.groups.bits)
        }
        """Width of a load -> where the lane's words of the run start."""

    def inside(self, distance: int) -> Expr:
        """Return whether the tile ``distance`` after the first of the current run lies within K."""
        return self.run.value * self.spec.geo.run + distance < self.share.end

    def advance(self) -> None:
        """Go to the slice's next run."""
        self.run.set(self.run.value + self.spec.schedule.split_k)
        for at in self.words.values():
            at.set(at.value + T.int64(self.spec.geo.round_tiles * self.spec.groups.tile_words))


class Weights:
    """Registers of the tiles in flight, and their loads."""

    def __init__(self, spec: Spec, place: Place, cursor: Cursor) -> None:
        self.spec, self.place, self.cursor = spec, place, cursor
        geo, groups, stages = spec.geo, spec.groups, spec.schedule.stages
        self.half_words = half_words(place.args, geo, groups.tile_words)
        self.words = [[b.local(groups.bits, "uint32") for _ in range(geo.row_blocks)] for _ in range(stages)]
        types = (array_dtype(place.args.scales), array_dtype(place.args.zeros))
        self.groups = [
            [GroupRegisters(groups, spec.step, place.warp.lane, types) for _ in range(geo.row_blocks)]
            for _ in range(stages // geo.group_tiles)
        ]

    def fill(self) -> None:
        """Emit the loads of the first tiles."""
        geo = self.spec.geo
        for slot in range(self.spec.schedule.stages):
            self.load(slot, slot // geo.run * geo.round_tiles + slot % geo.run, guarded=True)

    def load(self, slot: int, distance: int, *, guarded: bool) -> None:
        """Emit the loads of a tile's words and, after the last tile of a group, of its scales.

        ``distance`` counts tiles from the first of the current run.
        """
        gemm, group_tiles, inside = self.spec.gemm, self.spec.geo.group_tiles, self.cursor.inside
        with b.when(inside(distance) if guarded else True):
            for block, words in enumerate(self.words[slot]):
                self._load_words(words, block, distance)
        before = group_tiles - 1
        if slot % group_tiles == before and (gemm.scale or gemm.zero != "none"):
            with b.when(inside(distance - before) if guarded else True):
                for block, registers in enumerate(self.groups[slot // group_tiles]):
                    registers.fetch(partial(self._read_group, distance - before, block))

    def _load_words(self, target: Any, block: int, distance: int) -> None:
        """Emit the loads of a thread's words of one fragment's rows of a tile."""
        at = 0
        half, own = divmod(block, self.spec.geo.own_blocks)
        for offset, width in load_order(self.spec.groups.bits):
            word = self.cursor.words[width].value
            word = word + T.int64(distance * self.spec.groups.tile_words + offset + own * 32 * width)
            word = word + T.Cast("int64", self.half_words) if half else word
            registers = (target[at + i] for i in range(width))
            b.ptx(LOADS[width], *registers, self.place.args.words.ptr_to([0, 0, word]))
            at += width

    def _read_group(self, distance: int, block: int, name: str, granule: int, part: int, row: Expr) -> Expr:
        """Return one scale or zero point of a K tile."""
        array, length = getattr(self.place.args, name), self.spec.geo.run
        run = self.cursor.run.value + distance // length
        group = self.spec.groups.run_row(run, length, distance % length, granule)
        half, own = divmod(block, self.spec.geo.own_blocks)
        column = self.place.column + half * self.place.args.n + own * STRIP + row
        if name == "zeros" and self.spec.gemm.zero == "float":
            return array[group, part, column]
        return array[group, column]
