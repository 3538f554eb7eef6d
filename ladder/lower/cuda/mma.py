"""The pipeline of warp-wide matrix instructions: stages in shared memory, decode in registers.

``out^T = W · x^T``: a block owns ``tile_n`` weight rows and ``tile_m`` activation rows and walks K in
stages. Packed words stay in fragment order through shared memory, so a thread decodes what
it multiplies; x is swizzled for ldmatrix. Copies are asynchronous from sm_80 on. Results pass
through shared memory so that stores run along N.

How threads of the mma pipeline copy a stage of x: rows of a matrix, or windows of an image.

A thread copies 16-byte chunks, zeros where there is nothing. Of windows (implicit GEMM), the place of a
chunk is a sum of what depends on the activation row (found once, by divisions) and of what depends on K
(stepped from stage to stage): a thread's chunks have one place along K, so it keeps one channel and one tap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.ir.windows import Windows
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.activations import SPAN_CHUNKS, Copier, SpanLoader
from ladder.lower.cuda.launch import Overlap
from ladder.lower.cuda.mma_geometry import Place, Spec, choose_spec, find_place
from ladder.lower.cuda.stored_tiles import load_operands
from ladder.lower.gpu.accumulators import Accumulators
from ladder.lower.gpu.activation_tile import CHUNK_BYTES, each_piece
from ladder.lower.gpu.arguments import declare_arguments
from ladder.lower.gpu.decode import load_order
from ladder.lower.gpu.emission import SharedTable, allocate_table
from ladder.lower.gpu.epilogue import finish_row
from ladder.lower.gpu.groups import GroupRegisters, array_dtype
from ladder.lower.gpu.implicit_gemm import feature_column, find_corner, first_channel, output_extents, within
from ladder.lower.gpu.instructions import STEP_COLUMNS
from ladder.lower.gpu.tile_multiplier import TileMultiplier
from schedules.layouts import TILE
from schedules.schedule import GpuSchedule, check
from targets import TileDevice


@dataclass(frozen=True)
class Rows:
    """Rows of a matrix.

    stages: The stages of x in shared memory.
    """

    spec: Spec
    place: Place
    copier: Copier
    stages: Any

    def copy(self, stage: Expr, tile: Expr) -> None:
        """Copy this thread's chunks of the stage that begins at packed tile ``tile``; zeros beyond x."""
        args, geo = self.place.args, self.spec.geo
        layout, per_chunk = geo.x_tile, CHUNK_BYTES // self.spec.step.element_bytes

        def copy(piece: Expr) -> None:
            row, chunk = b.bind(piece // layout.chunks), b.bind(piece % layout.chunks)
            m = b.bind(self.place.first_m + row)
            column = b.bind(tile * TILE + chunk * per_chunk)
            valid = b.bind(T.And(m < args.m, column < args.k_x))
            at = [T.if_then_else(valid, m, 0), T.if_then_else(valid, column, 0)]
            target = self.stages.ptr_to([stage, layout.word(row, chunk)])
            self.copier.chunk(target, args.x.ptr_to(at), valid)

        each_piece(self.spec.schedule.tile_m * layout.chunks, geo.threads, self.place.thread, copy)


@dataclass(frozen=True)
class Pixel:
    """The window of one activation row: its row in the tile, row and column of its corner, and its offset."""

    place: Expr
    row: Expr
    column: Expr
    offset: Expr


class ImplicitGemm:
    """Windows of an image; the parameters are those of `Rows`, and the windows."""

    def __init__(self, spec: Spec, place: Place, copier: Copier, stages: Any, windows: Windows) -> None:
        self.spec, self.place, self.copier, self.stages, self.windows = spec, place, copier, stages, windows
        self.per_chunk = CHUNK_BYTES // spec.step.element_bytes
        self.chunks, threads, args = spec.geo.x_tile.chunks, spec.geo.threads, place.args
        check(
            spec.gemm.channels % self.per_chunk == 0,
            f"the {spec.gemm.channels} channels of a tap are no chunks of {self.per_chunk}; pad them",
        )
        check(threads % self.chunks == 0, f"{threads} threads for {self.chunks} chunks per activation row")
        self.chunk = b.keep(T.truncmod(place.thread, self.chunks))
        extents = output_extents(windows, args)
        self.group_channels = b.keep(T.truncdiv(args.image[3], windows.groups))
        channel = first_channel(windows, args, place.row_tile * TILE, self.group_channels)
        per_iteration, tile_m = threads // self.chunks, spec.schedule.tile_m
        self.even = tile_m % per_iteration == 0
        iterations = range(-(-tile_m // per_iteration))
        self.pixels = [self._pixel(iteration * per_iteration, extents, channel) for iteration in iterations]
        first = self.chunk * self.per_chunk
        tap = b.keep(T.truncdiv(first, self.group_channels))
        taps = windows.kernel[1]
        self.channel = b.Variable("int32", first - tap * self.group_channels)
        self.tap_row = b.Variable("int32", T.truncdiv(tap, taps) * windows.dilation[0])
        self.tap_column = b.Variable("int32", T.truncmod(tap, taps) * windows.dilation[1])

    def _pixel(self, first: int, extents: tuple[Expr, Expr], channel: Expr) -> Pixel:
        """Find the window of the thread's activation row ``first`` rows on."""
        at, args = self.windows, self.place.args
        _, height, width, channels = args.image
        place = b.keep(T.truncdiv(self.place.thread, self.chunks) + first)
        m = b.keep(self.place.first_m + place)
        corner = find_corner(at, m, extents)
        # A row that no tap reaches stands for activation rows beyond M.
        row = b.keep(T.if_then_else(m < args.m, corner.row, -(1 << 30)))
        offset = b.keep((corner.image * height + T.max(row, -at.padding[0])) * width + corner.column)
        return Pixel(place, row, corner.column, b.keep(offset * channels + channel))

    def copy(self, stage: Expr, tile: Expr) -> None:
        """Copy the chunks of the taps at hand, then step to those of the next stage."""
        at, args, layout = self.windows, self.place.args, self.spec.geo.x_tile
        _, height, width, channels = args.image
        down, right = self.tap_row.value, self.tap_column.value
        step = b.keep((down * width + right) * channels + self.channel.value)
        inside = b.bind(down < at.kernel[0] * at.dilation[0])
        for pixel in self.pixels:
            rows = within(pixel.row + down, height)
            valid = b.bind(T.And(T.And(rows, within(pixel.column + right, width)), inside))
            source = args.x.ptr_to([0, 0, 0, T.if_then_else(valid, pixel.offset + step, 0)])
            target = self.stages.ptr_to([stage, layout.word(pixel.place, self.chunk)])
            with b.when(True if self.even else pixel.place < self.spec.schedule.tile_m):
                self.copier.chunk(target, source, valid)
        self._advance()

    def _advance(self) -> None:
        at, step = self.windows, self.spec.schedule.tile_k
        self.channel.set(self.channel.value + step)
        with b.repeat_while(self.channel.value >= self.group_channels):
            self.channel.set(self.channel.value - self.group_channels)
            self.tap_column.set(self.tap_column.value + at.dilation[1])
            with b.when(self.tap_column.value == at.kernel[1] * at.dilation[1]):
                self.tap_column.set(0)
                self.tap_row.set(self.tap_row.value + at.dilation[0])


def activation_source(spec: Spec, place: Place, copier: Copier, stages: Any) -> Rows | ImplicitGemm:
    """Return what copies x of a kernel into its stages."""
    windows = spec.gemm.windows
    if windows is None:
        return Rows(spec, place, copier, stages)
    return ImplicitGemm(spec, place, copier, stages, windows)


ELEMENT_BYTES = {"float32": 4, "uint32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Stages:
    """Shared memory of a block.

    table: The decode table, if the decoder has one.
    x, words, scales, zeros: Stages of x, packed words, scales and zero points; None where absent.
    results: Where results are transposed; reuses the memory of everything else.
    """

    table: SharedTable | None
    x: Any
    words: Any
    scales: Any
    zeros: Any
    results: Any


def allocate_stages(spec: Spec, place: Place) -> Stages:
    """Allocate shared memory."""
    geo, stages = spec.geo, spec.schedule.stages
    pool = b.SharedPool()
    table = allocate_table(pool, spec.decoder.table_words, place.lane)
    x = pool.alloc((stages, geo.x_tile.words(spec.schedule.tile_m)), "uint32", align=128)
    extents = (stages, geo.row_tiles, geo.stage_tiles, geo.groups.tile_words)
    words = pool.alloc(extents, "uint32", align=128)
    scales = _group_rows(spec, pool, 1, array_dtype(place.args.scales))
    zeros = _group_rows(spec, pool, spec.groups.zero_parts, array_dtype(place.args.zeros))
    pool.move_base_to(0)
    results = pool.alloc((geo.staged_m, geo.pitch), "float32", align=128)
    pool.commit()
    return Stages(table, x, words, scales, zeros, results)


def _group_rows(spec: Spec, pool: Any, parts: int, dtype: str | None) -> Any:
    """Allocate stages of rows of scales or zero points; None where absent."""
    if dtype is None:
        return None
    extents = (spec.schedule.stages, spec.geo.group_rows, parts, spec.schedule.tile_n)
    return pool.alloc(extents, dtype, align=128)


@dataclass(frozen=True)
class StageCopies:
    """Emits this thread's share of the copies of a stage."""

    spec: Spec
    place: Place
    copier: Copier
    stages: Stages
    x: Rows | ImplicitGemm

    def emit(self, stage: Expr, iteration: Expr) -> None:
        tile = b.bind(iteration * self.spec.geo.stage_tiles)
        self.x.copy(stage, tile)
        self._copy_words(stage, tile)
        self._copy_groups(stage, tile, self.place.args.scales, self.stages.scales, 1)
        self._copy_groups(stage, tile, self.place.args.zeros, self.stages.zeros, self.spec.groups.zero_parts)

    def _row_tile(self, index: Expr) -> Expr:
        """Return a packed tile along N; tiles beyond N repeat the last one."""
        return T.min(self.place.row_tile + index, self.place.args.n_tiles - 1)

    def _k_tile(self, tile: Expr) -> Expr:
        """Return a packed tile along K; tiles beyond K repeat the last one, against zeros of x."""
        return tile if self.spec.geo.stage_tiles == 1 else T.min(tile, self.place.args.k_tiles - 1)

    def _copy_words(self, stage: Expr, tile: Expr) -> None:
        """Copy packed words as they lie."""
        geo = self.spec.geo
        per_tile = geo.groups.tile_words // 4

        def copy(piece: Expr) -> None:
            which, at = b.bind(piece // per_tile), b.bind(piece % per_tile * 4)
            row, step = b.bind(which // geo.stage_tiles), b.bind(which % geo.stage_tiles)
            if self.spec.gemm.stored:
                self._copy_stored(stage, row, step, tile, b.bind(piece % per_tile))
                return
            source = self.place.args.words.ptr_to([self._row_tile(row), self._k_tile(tile + step), at])
            self.copier.chunk(self.stages.words.ptr_to([stage, row, step, at]), source)

        each_piece(geo.row_tiles * geo.stage_tiles * per_tile, geo.threads, self.place.thread, copy)

    def _copy_stored(self, stage: Expr, row: Expr, step: Expr, tile: Expr, chunk: Expr) -> None:
        """Copy 16 bytes of a tile of a matrix that is not packed; zeros beyond K, or N along chunks."""
        args, words = self.place.args, self.place.args.words
        line, part = b.bind(chunk // 8), b.bind(chunk % 8)
        first_n, first_k = b.bind(self._row_tile(row) * TILE), b.bind((tile + step) * TILE)
        if self.spec.gemm.stored == "rows":
            n, k = T.min(first_n + line, args.n - 1), b.bind(first_k + part * 8)
            valid = b.bind(k < args.k_x)
            source = words.ptr_to([n, T.if_then_else(valid, k, 0)])
        else:
            n, k = b.bind(first_n + part * 8), b.bind(first_k + line)
            valid = b.bind(T.And(k < args.k_x, n < args.n))
            source = words.ptr_to([T.if_then_else(valid, k, 0), T.if_then_else(valid, n, 0)])
        target = self.stages.words.ptr_to([stage, row, step, line * 32 + (part ^ (line % 8)) * 4])
        self.copier.chunk(target, source, valid)

    def _copy_groups(self, stage: Expr, tile: Expr, array: Any, buffer: Any, parts: int) -> None:
        """Copy the rows of scales or zero points that serve a stage."""
        if buffer is None:
            return
        geo, groups = self.spec.geo, self.spec.groups
        per_chunk = CHUNK_BYTES // ELEMENT_BYTES[str(array.dtype)]
        per_row, per_tile = self.spec.schedule.tile_n // per_chunk, groups.per_tile

        def copy(piece: Expr) -> None:
            line, column = b.bind(piece // per_row), b.bind(piece % per_row * per_chunk)
            row, part = b.bind(line // parts), b.bind(line % parts)
            group = groups.row(self._k_tile(tile + row // per_tile), row % per_tile)
            at = self._row_tile(column // TILE) * TILE + column % TILE
            source = [group, part, at] if parts == 2 else [group, at]
            self.copier.chunk(buffer.ptr_to([stage, row, part, column]), array.ptr_to(source))

        each_piece(geo.group_rows * parts * per_row, geo.threads, self.place.thread, copy)


RUN = 8
"""Outputs along N that a thread finishes together."""


class Mma:
    """Emits one kernel."""

    def __init__(self, gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> None:
        self.spec = choose_spec(gemm, device, schedule)
        self.copier, self.overlap = Copier(device), Overlap(device)

    def emit(self) -> None:
        """Emit the whole body: fill the stages, walk K, store."""
        spec, overlap = self.spec, self.overlap
        args = declare_arguments(spec.gemm)
        overlap.declare()
        place = find_place(spec, args, overlap)
        overlap.release()
        geo, groups = spec.geo, spec.groups
        sums = Accumulators(groups, spec.step, spec.decoder.operand, geo.row_blocks, geo.m_blocks)
        stages = allocate_stages(spec, place)
        words = [b.local(groups.bits, "uint32") for _ in range(geo.row_blocks)]
        types = (array_dtype(place.args.scales), array_dtype(place.args.zeros))
        registers = [GroupRegisters(groups, spec.step, place.lane, types) for _ in range(geo.row_blocks)]
        source = activation_source(spec, place, self.copier, stages.x)
        overlap.wait()
        with b.when(place.exists):
            copies = StageCopies(spec, place, self.copier, stages, source)
            self._multiply(place, stages, copies, Operands(spec, place, stages, words, registers), sums)
            self.copier.wait(0)
            Results(spec, place, stages.results, sums).store()

    def _multiply(
        self, place: Place, stages: Stages, copies: StageCopies, operands: Operands, sums: Accumulators
    ) -> None:
        """Emit the walk over K."""
        spec, count = self.spec, self.spec.schedule.stages
        iterations = b.keep((place.args.k_tiles + spec.geo.stage_tiles - 1) // spec.geo.stage_tiles)
        for iteration in range(count - 1):
            with b.when(iterations > iteration):
                copies.emit(iteration, iteration)
            self.copier.commit()
        if stages.table is not None:  # a barrier comes before the first stage is read
            spec.decoder.fill_table(stages.table.buffer, place.thread, spec.geo.threads)
        multiplier = TileMultiplier(spec.decoder, sums, stages.table)
        with b.loop(iterations) as iteration:
            self.copier.wait(count - 2)
            b.block_sync()
            ahead = b.bind(iteration + (count - 1))
            with b.when(ahead < iterations):
                copies.emit(b.keep(T.truncmod(ahead, count)), ahead)
            self.copier.commit()
            operands.multiply(multiplier, b.keep(T.truncmod(iteration, count)), iteration)
        sums.join_lanes()


@dataclass(frozen=True)
class Operands:
    """Decodes and multiplies the packed tiles of a stage.

    words, groups: Registers of packed words, and of scales and zero points, by row block.
    """

    spec: Spec
    place: Place
    stages: Stages
    words: list[Any]
    groups: list[GroupRegisters]

    def multiply(self, multiplier: TileMultiplier, stage: Expr, iteration: Expr) -> None:
        """Emit the products of a stage."""
        spec, place, geo, sums = self.spec, self.place, self.spec.geo, multiplier.accumulators
        first_m = b.bind(place.m_warp * geo.warp_m)
        loader = SpanLoader(spec.step.lanes, place.lane, geo.x_tile)
        for step in range(geo.stage_tiles):
            for block in range(geo.row_blocks):
                self._load(stage, step, block)
                self.groups[block].tile = step if geo.stage_tiles % 2 == 0 else iteration

            def load_activations(m_block: int, span: int, out: Any, step: int = step) -> None:
                chunk = step * geo.tile_chunks + span * SPAN_CHUNKS
                loader.load(self.stages.x, [stage], first_m + m_block * STEP_COLUMNS, chunk, out)

            tile = b.bind(iteration * geo.stage_tiles + step)
            due = sums.flush_due(tile, place.args.k_tiles)
            real = T.min(tile, place.args.k_tiles - 1)
            sums.scale_columns(place.args, place.lane, place.first_m + first_m, real)
            multiplier.emit_flushing(self.words, self.groups, load_activations, due)

    def _load(self, stage: Expr, step: int, block: int) -> None:
        """Load the thread's words, scales and zero points of one packed tile."""
        place, stages = self.place, self.stages
        row_tile = b.bind(place.quartet * self.spec.geo.row_blocks + block)
        at = 0
        if self.spec.gemm.stored:
            tile = stages.words.ptr_to([stage, row_tile, step, 0])
            load_operands(self.spec.gemm.stored, tile, place.row_warp, place.lane, self.words[block])
        for offset, width in () if self.spec.gemm.stored else load_order(self.spec.groups.bits):
            source = stages.words.ptr_to([stage, row_tile, step, offset + place.owner * width])
            registers = [self.words[block][at + i] for i in range(width)]
            b.ptx(f"ld.shared{'' if width == 1 else f'.v{width}'}.u32", *registers, source)
            at += width

        def read(name: str, granule: int, part: int, row: Expr) -> Expr:
            buffer = stages.scales if name == "scales" else stages.zeros
            column = row_tile * TILE + place.row_warp * 16 + row
            return buffer[stage, self.spec.geo.group_row(step, granule), part, column]

        self.groups[block].fetch(read)


@dataclass(frozen=True)
class Results:
    """Stores a tile of the output, some activation rows at a time.

    staged: float32 ``[m][n]`` in shared memory.
    """

    spec: Spec
    place: Place
    staged: Any
    sums: Accumulators

    def store(self) -> None:
        for first in range(0, self.spec.geo.m_blocks, self.spec.geo.staged_blocks):
            b.block_sync()
            self._stage(first)
            b.block_sync()
            self._store(first)

    def _stage(self, first: int) -> None:
        """Write blocks ``first..`` along M of every warp to shared memory, transposed."""
        lanes, geo, place = self.spec.step.lanes, self.spec.geo, self.place
        m_row = b.bind(place.m_warp * (geo.staged_blocks * STEP_COLUMNS))
        with b.when(lanes.is_first(place.lane)):
            for block in range(geo.row_blocks):
                column = b.bind((place.quartet * geo.row_blocks + block) * TILE + place.row_warp * 16)
                for index in range(geo.staged_blocks):
                    fragment = block * geo.m_blocks + first + index
                    for i in range(lanes.accumulators):
                        row, m = lanes.position(place.lane, i)
                        value = T.Cast("float32", self.sums.result(fragment, i))
                        b.store(self.staged, value, m_row + index * STEP_COLUMNS + m, column + row)

    def _store(self, first: int) -> None:
        """Finish and store runs of outputs along N of the staged activation rows."""
        geo, place, gemm = self.spec.geo, self.place, self.spec.gemm
        runs = self.spec.schedule.tile_n // RUN
        per_warp = geo.staged_blocks * STEP_COLUMNS

        def store(piece: Expr) -> None:
            row, column = b.bind(piece // runs), b.bind(piece % runs * RUN)
            offset = row // per_warp * geo.warp_m + first * STEP_COLUMNS + row % per_warp
            m, row_of_weight = b.bind(place.first_m + offset), b.bind(place.row_tile * TILE + column)
            n, exists = feature_column(gemm.windows, place.args, row_of_weight)
            with b.when(T.And(m < place.args.m, exists)):
                sums = b.local(RUN, "float32")
                for i in range(RUN):
                    b.store(sums, self.staged[row, column + i], i)
                finish_row(gemm, place.args, sums, RUN, m, n)

        each_piece(geo.staged_m * runs, geo.threads, place.thread, store)
