"""How the lanes of an AMD kernel copy a stage of x to LDS: rows of a matrix, or windows of an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T

from ladder.ir.windows import Windows
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.activation_tile import CHUNK_WORDS
from ladder.lower.gpu.implicit_gemm import find_corner, first_channel, output_extents, within
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.decode import reads_fnuz, to_fnuz
from ladder.lower.rocm.gemm_place import Place, Spec
from ladder.lower.rocm.gemm_scales import Columns
from schedules.layouts import TILE
from schedules.waves import STEP_ROWS

SPAN_GROUPS = 4
"""Groups of four words in 64 bytes of K, one for each quarter of a wave."""


class Rows:
    """Pieces of rows of a matrix."""

    def __init__(self, spec: Spec, place: Place) -> None:
        self.spec, self.place = spec, place

    def load(self, index: int, row: Expr, column: Expr) -> Expr:
        """Return a piece of 16 bytes; whatever lies beyond x is in its place."""
        args = self.place.args
        m = b.bind(T.min(self.place.first_m + row, args.m - 1))
        return args.x[m, d.lanes(T.Select(column < args.k_x, column, 0), self.spec.geo.per_chunk)]

    def exists(self, index: int, column: Expr) -> Expr:
        """Whether there are such columns."""
        return column < self.place.args.k_x


class ImplicitGemm:
    """Pieces of windows of an image: each belongs to one tap.

    corners: Of the window of each piece's activation row, which are the same in every stage.
    """

    def __init__(self, spec: Spec, place: Place, windows: Windows, rows: Sequence[Expr]) -> None:
        self.spec, self.place, self.windows, args = spec, place, windows, place.args
        extents = output_extents(windows, args)
        self.channels = b.keep(T.truncdiv(args.image[3], windows.groups))
        # Weights lie padded: blocks beyond N read what the last group reads, and store nothing.
        row = T.min(place.first_block * STEP_ROWS, args.n - 1)
        self.first = first_channel(windows, args, row, self.channels)
        last = [b.keep(T.min(place.first_m + row, args.m - 1)) for row in rows]
        self.corners = [find_corner(windows, m, extents) for m in last]
        self.inside = [b.Variable("bool", T.bool(False)) for _ in rows]

    def load(self, index: int, row: Expr, column: Expr) -> Expr:
        """Return a piece of 16 bytes; of the padding, the image's first."""
        at, corner = self.windows, self.corners[index]
        _, height, width, _ = self.place.args.image
        tap = b.bind(T.truncdiv(column, self.channels))
        down = b.bind(corner.row + T.truncdiv(tap, at.kernel[1]) * at.dilation[0])
        right = b.bind(corner.column + T.truncmod(tap, at.kernel[1]) * at.dilation[1])
        inside = self.inside[index]
        inside.set(T.And(T.And(within(down, height), within(right, width)), tap < at.points))
        channel = self.first + column - tap * self.channels
        place = [T.Select(inside.value, axis, 0) for axis in (down, right, channel)]
        piece = d.lanes(b.bind(place[2]), self.spec.geo.per_chunk)
        return self.place.args.x[corner.image, b.bind(place[0]), b.bind(place[1]), piece]

    def exists(self, index: int, column: Expr) -> Expr:
        """Whether the piece that was loaded last lies in the image."""
        return self.inside[index].value


class Activations:
    """Registers of a thread's pieces of a stage, their loads and their writes.

    shared: LDS, as uint32 words.
    columns: What takes the sums of groups of x, where columns of instructions are groups of K.
    """

    def __init__(self, spec: Spec, place: Place, shared: Any, columns: Columns | None = None) -> None:
        self.spec, self.place, self.shared, self.columns = spec, place, shared, columns
        self.fetched = b.local(spec.geo.pieces * CHUNK_WORDS, "uint32")
        self.source = Rows(spec, place) if spec.gemm.windows is None else self._windows(spec.gemm.windows)

    def _windows(self, windows: Windows) -> ImplicitGemm:
        rows = [self._piece(index)[0] for index in range(self.spec.geo.pieces)]
        return ImplicitGemm(self.spec, self.place, windows, rows)

    def _piece(self, index: int) -> tuple[Expr, Expr]:
        """Return row and chunk of a thread's piece of a stage."""
        chunks = self.spec.geo.x_tile.chunks
        piece = b.bind(self.place.thread + index * self.spec.geo.threads)
        return b.bind(piece // chunks), b.bind(piece % chunks)

    def _column(self, iteration: Expr, chunk: Expr) -> Expr:
        """Return the first element of K of a piece."""
        return iteration * (self.spec.geo.stage_tiles * TILE) + chunk * self.spec.geo.per_chunk

    def fetch(self, iteration: Expr) -> None:
        """Emit the loads of this thread's pieces of a stage of x."""
        for index in range(self.spec.geo.pieces):
            row, chunk = self._piece(index)
            column = b.bind(self._column(iteration, chunk))
            loaded = d.as_type(self.source.load(index, row, column), "uint32x4")
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
            inside = b.bind(self.source.exists(index, self._column(iteration, chunk)))
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
