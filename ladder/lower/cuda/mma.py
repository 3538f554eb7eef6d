"""The pipeline of warp-wide matrix instructions: stages in shared memory, decode in registers.

``out^T = W · x^T``: a block owns ``tile_n`` weight rows and ``tile_m`` activation rows and walks K in
stages. Packed words stay in fragment order through shared memory, so a thread decodes what
it multiplies; x is swizzled for ldmatrix. Copies are asynchronous from sm_80 on. Results pass
through shared memory so that stores run along N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cuda.activations import SPAN_CHUNKS, Copier, SpanLoader
from ladder.lower.cuda.launch import Overlap
from ladder.lower.cuda.mma_activations import activation_source
from ladder.lower.cuda.mma_geometry import Spec, choose_spec
from ladder.lower.cuda.mma_place import Place, find_place
from ladder.lower.cuda.mma_stages import StageCopies, Stages, allocate_stages
from ladder.lower.gpu.accumulators import Accumulators
from ladder.lower.gpu.activation_tile import each_piece
from ladder.lower.gpu.arguments import declare_arguments
from ladder.lower.gpu.decode import load_order
from ladder.lower.gpu.epilogue import finish_row
from ladder.lower.gpu.groups import GroupRegisters, array_dtype
from ladder.lower.gpu.instructions import STEP_COLUMNS
from ladder.lower.gpu.tile_multiplier import TileMultiplier
from schedules.layouts import TILE
from schedules.schedule import GpuSchedule
from targets import TileDevice

Expr = Any

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
        overlap.declare("blockIdx.x", "threadIdx.x")
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
        for offset, width in load_order(self.spec.groups.bits):
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
        """Emit the stores."""
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
            m, n = b.bind(place.first_m + offset), b.bind(place.row_tile * TILE + column)
            with b.when(T.And(m < place.args.m, n < place.args.n)):
                sums = b.local(RUN, "float32")
                for i in range(RUN):
                    b.store(sums, self.staged[row, column + i], i)
                finish_row(gemm, place.args, sums, RUN, m, n)

        each_piece(geo.staged_m * runs, geo.threads, place.thread, store)
