"""The pipelines of AMD: x through two buffers of LDS, weights from memory to registers.

``out^T = W · x^T``: a block owns weight rows and ``tile_m`` activation rows. Packed words lie in the order
of the matrix cores' operands, so a lane loads what it decodes and multiplies, one stage ahead
(`Weights`). x is loaded to registers a stage ahead too, and written to LDS when the stage at hand is
done (`Activations`): one barrier per stage. Waves may split K; their sums are added up through LDS
(`Results`). ``mfma`` multiplies with matrix instructions, of whose result a lane holds four
neighbouring weight rows of an activation row, ``dot`` multiplies few activation rows with dot products
within lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from itertools import product
from math import gcd
from operator import add
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.ir.windows import Windows
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.accumulators import Accumulators
from ladder.lower.gpu.activation_tile import CHUNK_WORDS, each_piece
from ladder.lower.gpu.arguments import declare_arguments
from ladder.lower.gpu.decode import load_order
from ladder.lower.gpu.epilogue import finish, finish_float
from ladder.lower.gpu.groups import GroupRegisters, array_dtype, left_by
from ladder.lower.gpu.implicit_gemm import find_corner, first_channel, output_extents, within
from ladder.lower.gpu.tile_multiplier import TileMultiplier
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.decode import left_by_fnuz, reads_fnuz, to_fnuz
from ladder.lower.rocm.gemm_place import Place, Spec, choose_spec, find_place
from ladder.lower.rocm.gemm_scales import ColumnAccumulators, Columns, GroupReader, WaveGroupRegisters, row_of
from ladder.lower.rocm.results import store_run
from ladder.lower.rocm.steps import COLUMN_LANES, RUN
from schedules.layouts import THREADS, TILE
from schedules.schedule import GpuSchedule
from schedules.waves import STEP_ROWS
from targets import TileDevice

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
            gemm = self.spec.gemm
            floats = [T.Cast("float32", value) for value in sums]
            store_run(
                args.y, (m, n), len(sums),
                lambda i: finish_float(gemm, floats[i], m, n + i, args),
                lambda i: finish(gemm, floats[i], m, n + i, args),
            )  # fmt: skip

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
                    registers.fetch(GroupReader(self.spec.groups, args, tile, row_of(self.place, block)))

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
        thread, row = self.place.holders[part], row_of(self.place, block)
        row_tile, upper = b.bind(row // 2), b.bind(row % 2)
        words = self.tile_words(step, half)[block * self.spec.step.parts + part].buffers
        for buffer, (offset, width) in zip(words, load_order(self.spec.groups.bits), strict=True):
            place = offset + (upper * BLOCK_THREADS + thread) * width
            d.load(buffer, self.place.args.words, row_tile, tile, place, width=width)


class WaveGemm:
    """Emits one kernel."""

    def __init__(self, gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> None:
        self.spec = choose_spec(gemm, device, schedule)

    def emit(self) -> None:
        spec = self.spec
        place = find_place(spec, declare_arguments(spec.gemm))
        shared = d.shared(spec.geo.shared_bytes // 4)
        columns = Columns(spec, place, shared) if spec.has_columns else None
        x, weights = Activations(spec, place, shared, columns), Weights(spec, place, columns)
        body = Body(spec, place, shared, _accumulators(spec, columns), x, weights, columns)
        with b.when(place.exists):
            body.emit()


def _accumulators(spec: Spec, columns: Columns | None) -> Accumulators:
    """Allocate the accumulators of a lane."""
    geo, activation = spec.geo, spec.gemm.activation
    left = left_by(spec.decoder, spec.gemm) if spec.raw else left_by_fnuz(spec.device, activation)
    sizes = (spec.groups, spec.step, spec.decoder.operand, geo.row_blocks, geo.m_blocks, left)
    return Accumulators(*sizes) if columns is None else ColumnAccumulators(*sizes, columns.known_sums)


@dataclass(frozen=True)
class Body:
    """Emits what a block does once it knows its tile.

    shared: LDS, as uint32 words.
    columns: The groups of K of the lane's column of matrix instructions, where columns have different ones.
    """

    spec: Spec
    place: Place
    shared: Any
    sums: Accumulators
    x: Activations
    weights: Weights
    columns: Columns | None = None

    def emit(self) -> None:
        """Emit the first stage, the walk over K and the stores."""
        geo, args = self.spec.geo, self.place.args
        # Two iterations at a time: registers and LDS of a stage change places without copies. Were the second
        # conditional, LLVM would sink its loads into it.
        two = 2 * geo.stage_tiles
        pairs = b.keep((args.k_tiles + two - 1) // two)
        self.x.fetch(T.int32(0))
        self.weights.fetch(T.int32(0), 0)
        self.x.write(0, T.int32(0))
        if self.columns is not None:
            self.columns.begin()
        multiplier = TileMultiplier(self.spec.decoder, self.sums)
        with b.loop(pairs, rolled=True) as pair:
            is_last = pair == pairs - 1
            for half in range(2):
                self._iteration(multiplier, b.bind(2 * pair + half), half, is_last)
            if self.columns is not None:
                self.columns.end_pair(multiplier, pair, is_last)
        if self.sums.periods == {0}:
            multiplier.flush_all(self.weights.first_groups)
        Results(self.spec, self.place, self.shared, self.sums).store()

    def _iteration(self, multiplier: TileMultiplier, iteration: Expr, half: int, is_last: Expr) -> None:
        """Multiply a stage, which is in set ``half`` of registers and LDS; fetch the next to the other."""
        other = 1 - half
        d.block_sync(self.spec.device)
        ahead = b.bind(iteration + 1)
        self.x.fetch(ahead)
        d.schedule_fence()  # x is awaited first: loads return in order
        self.weights.fetch(ahead, other)
        d.schedule_fence()
        self._multiply(multiplier, iteration, half, is_last, lambda: self.x.write(other, ahead))

    def _multiply(
        self, multiplier: TileMultiplier, iteration: Expr, half: int, is_last: Expr, write: Callable[[], None]
    ) -> None:
        """Decode and multiply this wave's tiles of a stage; near its end ``write`` what was fetched."""
        spec, place, geo, sums = self.spec, self.place, self.spec.geo, self.sums
        step_m, parts = spec.step.columns, range(spec.step.parts)
        stage, last = half * geo.stage_chunks, (geo.slice_tiles - 1, geo.tile_chunks // SPAN_GROUPS - 1, 0)
        before = place.slice * geo.slice_tiles * geo.tile_chunks
        own = b.bind(place.wave_m + (place.lane % step_m if step_m > 1 else 0))
        groups = [b.bind(before + spec.step.k_group(place.lane, part)) for part in parts]
        for step in range(geo.slice_tiles):
            blocks = range(geo.row_blocks)
            registers: list[GroupRegisters] = [self.weights.group(step, block, half) for block in blocks]
            taken = None if self.columns is None else self.columns.takes(iteration, step)
            tile, index, period = self.weights.tile(iteration, step), *self._place_in_run(half, step)
            for each in registers:
                each.tile = tile if period % 2 else index

            def load_activations(
                m_block: int, span: int, out: Any, step: int = step, taken: Expr | None = taken
            ) -> None:
                if (step, span, m_block) == last:
                    d.schedule_fence()  # before, waiting for what was fetched would stop the work
                    write()
                ahead = step * geo.tile_chunks + span * SPAN_GROUPS
                row = own + m_block * step_m
                for part in parts:
                    at = (stage + geo.x_tile.place(row, groups[part] + ahead)) * CHUNK_WORDS
                    at = at if taken is None else T.Select(taken, at, geo.zeros_beside(ahead))
                    d.load(out, self.shared, at, width=CHUNK_WORDS, at=part * CHUNK_WORDS)

            due = self._due(iteration, half, step, is_last)
            real = T.min(tile, place.args.k_tiles - 1)
            sums.scale_columns(place.args, place.lane, place.first_m + place.wave_m, real)
            multiplier.emit_flushing(self.weights.tile_words(step, half), registers, load_activations, due)
            if geo.joins:
                d.schedule_fence()  # or LLVM decodes all tiles of a stage at once, in hundreds of registers

    def _place_in_run(self, half: int, step: int) -> tuple[int, int]:
        """Return which of a run of neighbouring tiles a wave's tile is, and how many those are.

        Runs begin at multiples of their length: two stages, or one where other waves have what follows.
        """
        tiles = self.spec.geo.slice_tiles
        return (half * tiles + step, 2 * tiles) if self.spec.schedule.split_k == 1 else (step, tiles)

    def _due(self, iteration: Expr, half: int, step: int, is_last: Expr) -> Expr:
        """Return whether sums must be flushed after a wave's tile ``step`` of a stage.

        Tiles beyond K add nothing and have the scales of the last one. Where K is split, a wave's next
        tile after a stage is in another group, unless groups are longer than a stage.
        """
        tiles, periods = self.spec.geo.slice_tiles, sorted(self.sums.periods - {0})
        last, (index, run) = step == tiles - 1, self._place_in_run(half, step)
        if not periods or any((index + 1) % p == 0 for p in periods if run % p == 0):
            return bool(periods)
        if last and self.spec.schedule.split_k > 1:
            return True
        tile = self.weights.tile(iteration, step)
        due = [(tile + 1) % p == 0 for p in periods if run % p and (last or p % tiles)]
        due += [is_last] if last and half else []
        return reduce(T.Or, due) if due else False
