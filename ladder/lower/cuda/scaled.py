"""Block-scaled products of sm_100a: codes and scales go to the core as they are stored.

``out^T = W · x^T``: 128 weight rows are the instruction's M, activation rows its N. A producer copies slabs
of 128 bytes of K of both operands, and their scales, into a ring of stages; one thread copies the scales on
into tensor memory and starts four products of each slab; four warps write the sums. Each stage has its own
columns of scales there, so that products which read them have ended when the stage is filled again (PTX
ISA, "tcgen05.mma", "tcgen05.cp", "Block scaling"). No such kernel has run on hardware yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.scaled import ScaledGemm
from ladder.lower import builder as b
from ladder.lower.cuda.launch import Overlap
from ladder.lower.cuda.scaled_epilogue import Epilogue
from ladder.lower.cuda.scaled_memory import Memory, Ring, ScaledArguments, declare, encode_map, place
from ladder.lower.cuda.scaled_place import WARPS, Place, find_place
from ladder.lower.cuda.scaled_products import Issuer
from ladder.lower.cuda.tcgen05_memory import after_sync, allocate_columns, free_columns
from ladder.lower.cuda.wgmma_activations import TENSOR_COPY
from ladder.lower.cuda.wgmma_producer import BULK_COPY
from schedules.scaled import ATOM, LANE_SCALES, ROWS, SLAB, ScaledSchedule, check_legal, tensor_columns
from targets import TileDevice

Expr = Any


def emit(form: ScaledGemm, device: TileDevice, schedule: ScaledSchedule, name: str) -> Any:
    """Emit one kernel, generic in M, N and K.

    Its arguments: codes of x ``[M, bytes]`` and their scales (`schedules.scaled.place_scales`), codes and
    scales of the weight, a float32 factor ``[1]``, the bias where there is one, and the result.

    Raises DeviceError, ScheduleError if the device has no such cores, or the schedule does not fit.
    """
    check_legal(form, device, schedule)
    with b.function(name) as result:
        _emit(form, device, schedule)
    return result.func


def _emit(form: ScaledGemm, device: TileDevice, schedule: ScaledSchedule) -> None:
    """Emit host part, set-up and the three roles."""
    args, overlap = declare(form), Overlap(device)
    rows = T.min(schedule.held_m, (args.m + 7) // 8 * 8)
    x_map, w_map = (
        encode_map(args.x, args.m, args.row_bytes, rows),
        encode_map(args.w, args.n, args.row_bytes, schedule.rows),
    )
    overlap.declare("blockIdx.x", *["clusterCtaIdx.x"] * (schedule.cluster > 1), "threadIdx.x")
    b.device(min_blocks=1)
    where = find_place(args, schedule)
    copied = b.bind(rows)
    overlap.release()
    memory = place(form, schedule, where.part)
    _set_up(form, schedule, memory, where)
    overlap.wait()
    base = b.Variable("uint32", memory.word[0]).value
    warp = where.thread // 32

    def work() -> None:
        with b.when(warp == WARPS), b.when(T.cuda.elect_sync()):
            _produce(form, schedule, args, memory, where, (x_map, w_map), copied)
        with b.when(warp == WARPS + 1), b.when(T.cuda.elect_sync()):
            issuer = Issuer(form, schedule, memory, base)

            def multiply() -> None:
                issuer.multiply(where.iterations, where.m_tile)

            if schedule.pair:
                b.either(where.rank == 0, multiply, lambda: issuer.report(where.iterations))
            else:
                multiply()

    def write() -> None:
        Epilogue(form, schedule, args, memory, base).finish(where)

    b.either(where.thread >= WARPS * 32, work, write)
    b.sync(schedule.partners)
    with b.when(warp == WARPS + 1):
        free_columns(base, tensor_columns(form, schedule), schedule.partners)


def _set_up(form: ScaledGemm, schedule: ScaledSchedule, memory: Memory, where: Place) -> None:
    """Initialise barriers and allocate tensor memory."""
    with b.when(where.thread == 0):
        memory.initialise(schedule)
    with b.when(where.thread // 32 == WARPS + 1):
        allocate_columns(memory.word, tensor_columns(form, schedule), schedule.partners)
    b.sync(schedule.cluster)
    after_sync()


def _produce(
    form: ScaledGemm,
    schedule: ScaledSchedule,
    args: ScaledArguments,
    memory: Memory,
    where: Place,
    maps: tuple[Expr, Expr],
    copied: Expr,
) -> None:
    """Copy slab after slab of both operands and their scales into the ring."""
    ring = Ring(schedule.stages)
    first_m = where.m_tile * schedule.tile_m
    own_m = first_m + where.rank * schedule.held_m if schedule.pair else first_m
    inside = where.part * schedule.rows
    scales = Scales(form, schedule, args, memory, where, copied)
    with b.loop(where.iterations) as iteration:
        stage, slab = ring.stage.value, b.bind(where.first + iteration)
        b.emit(T.cuda.mbarrier_wait(memory.empty.ptr_to([stage]), ring.phase.value ^ 1))
        full = memory.full.ptr_to([stage])
        size = T.Cast("uint32", (copied + schedule.rows) * SLAB + scales.bytes)
        b.emit(T.ptx.mbarrier.arrive.expect_tx.shared.b64(full, size))
        b.ptx(TENSOR_COPY, memory.x.place(stage), T.address_of(maps[0]), slab * SLAB, own_m, full)
        w_row, target = where.n_tile * ROWS + inside, memory.w.place(stage, inside * SLAB)
        b.ptx(TENSOR_COPY, target, T.address_of(maps[1]), slab * SLAB, w_row, full)
        scales.copy(stage, slab, first_m, full)
        ring.advance()
    if schedule.pair:  # products of the other block's thread arrive here: not after this block has ended
        with b.loop(schedule.stages):
            b.emit(T.cuda.mbarrier_wait(memory.empty.ptr_to([ring.stage.value]), ring.phase.value ^ 1))
            ring.advance()


@dataclass(frozen=True)
class Scales:
    """Copies the scales of a slab.

    copied: Activation rows that the block copies.
    """

    form: ScaledGemm
    schedule: ScaledSchedule
    args: ScaledArguments
    memory: Memory
    where: Place
    copied: Expr

    @property
    def held(self) -> int:
        """Bytes of the scales of 128 rows."""
        return self.form.slab_atoms * ATOM

    @property
    def bytes(self) -> Expr:
        """Bytes of all copies of a slab."""
        if self.schedule.rows < ROWS:
            return self.held + self.copied * (LANE_SCALES * self.form.slab_atoms)
        return self.held * (1 + self.schedule.x_atoms)

    def copy(self, stage: Expr, slab: Expr, first_m: Expr, full: Expr) -> None:
        """Start the copies: the weight's atoms, then those of x."""
        args, schedule, where, target = self.args, self.schedule, self.where, self.memory.scales
        first, size = slab * self.form.slab_atoms, T.uint32(self.held)
        # The second block of a pair may have no weights: its rows are never stored.
        atom = T.min(where.n_tile, args.w_atoms - 1) if schedule.pair else where.n_tile
        b.ptx(BULK_COPY, target.place(stage), args.w_scales.ptr_to([atom, first, 0]), size, full)
        for index in range(schedule.x_atoms):
            # Rows beyond M have the last rows' scales: their sums are never stored.
            row, place = T.min(first_m // ROWS + index, args.x_atoms - 1), (1 + index) * self.held
            if schedule.rows == ROWS:
                source = args.x_scales.ptr_to([row, first, 0])
                b.ptx(BULK_COPY, target.place(stage, place), source, size, full)
            else:
                self._copy_lanes(stage, row, first, full)

    def _copy_lanes(self, stage: Expr, row: Expr, first: Expr, full: Expr) -> None:
        """Copy of each atom of x the lanes of rows that there are; rows of a tile are lanes of a quarter."""
        size = T.Cast("uint32", self.copied * LANE_SCALES)
        for atom in range(self.form.slab_atoms):
            target = self.memory.scales.place(stage, self.held + atom * ATOM)
            b.ptx(BULK_COPY, target, self.args.x_scales.ptr_to([row, first + atom, 0]), size, full)
