"""x of an AMD kernel: loaded to registers a stage ahead, then written to one of two buffers of LDS."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.gpu.activation_tile import CHUNK_BYTES, CHUNK_WORDS
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.decode import reads_fnuz, to_fnuz
from ladder.lower.rocm.gemm_place import Place, Spec
from ladder.lower.rocm.gemm_scales import Columns
from schedules.layouts import TILE

Expr = Any

SPAN_GROUPS = 4
"""Groups of four words in 64 bytes of K, one for each quarter of a wave."""


class Activations:
    """Registers of a thread's pieces of a stage, their loads and their writes.

    shared: LDS, as uint32 words.
    columns: What takes the sums of groups of x, where columns of instructions are groups of K.
    """

    def __init__(self, spec: Spec, place: Place, shared: Any, columns: Columns | None = None) -> None:
        self.spec, self.place, self.shared, self.columns = spec, place, shared, columns
        self.fetched = b.local(spec.geo.pieces * CHUNK_WORDS, "uint32")

    def _piece(self, index: int) -> tuple[Expr, Expr]:
        """Return row and chunk of a thread's piece of a stage."""
        chunks = self.spec.geo.x_tile.chunks
        piece = b.bind(self.place.thread + index * self.spec.geo.threads)
        return b.bind(piece // chunks), b.bind(piece % chunks)

    def fetch(self, iteration: Expr) -> None:
        """Emit the loads of this thread's pieces of a stage of x; whatever lies beyond x is in its place."""
        args, geo, per_chunk = self.place.args, self.spec.geo, CHUNK_BYTES // self.spec.step.element_bytes
        for index in range(geo.pieces):
            row, chunk = self._piece(index)
            m = b.bind(T.min(self.place.first_m + row, args.m - 1))
            column = b.bind(iteration * (geo.stage_tiles * TILE) + chunk * per_chunk)
            at = d.lanes(T.Select(column < args.k_x, column, 0), per_chunk)
            loaded = d.as_type(args.x[m, at], "uint32x4")
            b.store(self.fetched, loaded, d.lanes(index * CHUNK_WORDS, CHUNK_WORDS))

    def write(self, half: int, iteration: Expr) -> None:
        """Emit the writes of the pieces fetched for an iteration to LDS; zeros beyond K.

        Word c of chunk i of 64 bytes goes to place 4c + i, so that the lanes of column group c find
        their operands of two steps side by side.
        """
        geo, activation, tile_m = self.spec.geo, self.spec.gemm.activation, self.spec.schedule.tile_m
        fnuz = reads_fnuz(self.spec.device, activation)
        stage = half * geo.stage_chunks * CHUNK_WORDS
        for index in range(geo.pieces):
            row, chunk = self._piece(index)
            span = b.bind(chunk // SPAN_GROUPS * SPAN_GROUPS)
            first = b.bind(geo.x_tile.word(row, span) + chunk % SPAN_GROUPS)
            column = iteration * (geo.stage_tiles * TILE) + chunk * (
                CHUNK_BYTES // self.spec.step.element_bytes
            )
            inside = b.bind(column < self.place.args.k_x)
            words = [
                T.Select(inside, self.fetched[index * CHUNK_WORDS + c], T.uint32(0))
                for c in range(CHUNK_WORDS)
            ]
            if self.columns is not None:
                words = [b.bind(word) for word in words]
                self.columns.sum_piece(words, iteration, chunk, row < tile_m)

            def write(words: list[Expr] = words, first: Expr = first) -> None:
                for c, word in enumerate(words):
                    # The swizzle is an exclusive or of multiples of four words.
                    b.store(
                        self.shared,
                        to_fnuz(word, activation) if fnuz else word,
                        stage + (first ^ (c * CHUNK_WORDS)),
                    )

            if (index + 1) * geo.threads <= tile_m * geo.x_tile.chunks:
                write()
            else:
                with b.when(row < tile_m):
                    write()
