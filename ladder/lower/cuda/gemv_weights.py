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
from ladder.lower.cuda.gemv_place import Place, half_words
from ladder.lower.cuda.gemv_spec import Spec
from ladder.lower.cuda.gemv_values import OwnValues, SharedValues
from ladder.lower.gpu.decode import load_order

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
    """Registers of the tiles in flight, and their loads.

    shared: Shared memory through which lanes hand out scales and zero points, if they do.
    """

    def __init__(self, spec: Spec, place: Place, cursor: Cursor, shared: Any = None) -> None:
        self.spec, self.place, self.cursor = spec, place, cursor
        geo, groups, stages = spec.geo, spec.groups, spec.schedule.stages
        self.half_words = half_words(place.args, geo, groups.tile_words)
        self.words = [[b.local(groups.bits, "uint32") for _ in range(geo.row_blocks)] for _ in range(stages)]
        kind = OwnValues if shared is None else partial(SharedValues, shared=shared)
        self.values: OwnValues | SharedValues = kind(spec, place, cursor.run)

    def fill(self) -> None:
        """Emit the loads of the first tiles."""
        geo = self.spec.geo
        for slot in range(self.spec.schedule.stages):
            self.load(slot, slot // geo.run * geo.round_tiles + slot % geo.run, guarded=True)

    def load(self, slot: int, distance: int, *, guarded: bool) -> None:
        """Emit the loads of a tile's words and, where they are due, of scales and zero points.

        ``distance`` counts tiles from the first of the current run.
        """
        gemm, inside = self.spec.gemm, self.cursor.inside
        with b.when(inside(distance) if guarded else True):
            for block, words in enumerate(self.words[slot]):
                self._load_words(words, block, distance)
        before = self.values.due(slot)
        if before is not None and (gemm.scale or gemm.zero != "none"):
            with b.when(inside(distance - before) if guarded else True):
                self.values.load(slot, distance - before, guarded=guarded)

    def begin(self, slot: int, *, guarded: bool) -> None:
        """Emit what the run that begins with a slot needs before its first tile."""
        self.values.share(slot, self.cursor.inside(0) if guarded else True)

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
