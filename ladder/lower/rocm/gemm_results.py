"""The end of an AMD kernel: sums are finished and stored, through LDS where waves or lanes share them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import add
from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.gpu.accumulators import Accumulators
from ladder.lower.gpu.activation_tile import each_piece
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.epilogue import store_run
from ladder.lower.rocm.gemm_place import Place, Spec
from ladder.lower.rocm.steps import COLUMN_LANES, RUN
from schedules.waves import STEP_ROWS

Expr = Any


@dataclass(frozen=True)
class Results:
    """Stores the sums of a block.

    shared: LDS, as uint32 words.
    """

    spec: Spec
    place: Place
    shared: Any
    sums: Accumulators

    def store(self) -> None:
        """Emit the stores."""
        if self.spec.geo.joins:
            self._join()
        else:
            self._store_own()

    def _store_own(self) -> None:
        """Finish and store this lane's sums: runs of four weight rows of one activation row."""
        geo, place, step = self.spec.geo, self.place, self.spec.step
        lanes = step.lanes
        for m_block in range(geo.m_blocks):
            inner = lanes.column(place.lane, 0) + m_block * step.columns
            m = b.bind(place.first_m + place.wave_m + inner)
            with b.when(m < place.args.m):
                for block, first in product(range(geo.row_blocks), range(0, lanes.accumulators, RUN)):
                    inner = block * STEP_ROWS + lanes.slot_row(place.lane, first)
                    row = place.row_block * STEP_ROWS + inner
                    fragment = block * geo.m_blocks + m_block
                    sums = [self.sums.result(fragment, first + i) for i in range(RUN)]
                    self._store_run(sums, m, b.bind(row))

    def _store_run(self, sums: list[Expr], m: Expr, n: Expr) -> None:
        args = self.place.args
        with b.when(n < args.n):
            store_run(self.spec.gemm, args, [T.Cast("float32", value) for value in sums], m, n)

    def _join(self) -> None:
        """Add up the sums of all slices of K, and of all lanes of a row, through LDS, and store them."""
        geo, place = self.spec.geo, self.place
        self._leave()
        d.block_sync(self.spec.device)
        runs = geo.rows // RUN

        def store(piece: Expr) -> None:
            own, row = b.bind(piece // runs), b.bind(piece % runs * RUN)
            m, n = b.bind(place.first_m + own), b.bind(place.first_block * STEP_ROWS + row)
            with b.when(m < place.args.m):
                self._store_run(self._joined(own, row), m, n)

        each_piece(self.spec.schedule.tile_m * runs, geo.threads, place.thread, store)

    def _leave(self) -> None:
        """Leave this lane's sums in LDS, once x is not read any more."""
        geo, place, step = self.spec.geo, self.place, self.spec.step
        lanes, part = step.lanes, place.slice
        inside = b.bind((place.row_block - place.first_block) * STEP_ROWS)
        if lanes.partial_lanes:
            part = (
                place.slice * (self.spec.device.warp // lanes.partial_lanes[0])
                + place.lane // lanes.partial_lanes[0]
            )
        part, run = b.bind(part), step.run
        d.block_sync(self.spec.device)
        fragments, firsts = range(geo.row_blocks * geo.m_blocks), range(0, lanes.accumulators, run)
        for fragment, first in product(fragments, firsts):
            block, m_block = divmod(fragment, geo.m_blocks)
            row, m = lanes.position(place.lane, first)
            m = place.wave_m + m_block * step.columns + m
            at = geo.sum_word(part, m, inside + block * STEP_ROWS + row)
            sums = [self._of_all_columns(self.sums.result(fragment, first + i)) for i in range(run)]
            words = d.vector([d.as_type(value, "uint32") for value in sums])
            with b.when(lanes.is_first(place.lane)) if self.spec.has_columns else nullcontext():
                b.store(self.shared, words, d.lanes(at, run))

    def _of_all_columns(self, value: Expr) -> Expr:
        """Return the sum over the lanes of a row, where columns hold groups of K."""
        if not self.spec.has_columns:
            return value
        for distance in COLUMN_LANES:
            value = b.bind(value + d.exchange(b.bind(value), "float32", self.place.lane, distance))
        return value

    def _joined(self, m: Expr, row: Expr) -> list[Expr]:
        """Return the sums of a run of weight rows of an activation row over all parts, in the order of K."""
        kind = self.sums.dtype
        loaded = [b.local(RUN, "uint32") for _ in range(self.spec.geo.parts)]
        for part, words in enumerate(loaded):
            d.load(words, self.shared, self.spec.geo.sum_word(part, m, row), width=RUN)
        return [b.bind(reduce(add, (d.as_type(words[i], kind) for words in loaded))) for i in range(RUN)]
