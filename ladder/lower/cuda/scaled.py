"""Block-scaled products of sm_100a and sm_103a: codes and scales go to the core as they are stored.

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

from ladder.ir.scaled import FORMATS, ScaledGemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda import barriers
from ladder.lower.cuda.barriers import Ring
from ladder.lower.cuda.bulk_copies import TENSOR_COPY, bulk_copy
from ladder.lower.cuda.launch import Overlap
from ladder.lower.cuda.scaled_memory import (
    WARPS,
    Memory,
    Place,
    ScaledArguments,
    Stages,
    declare,
    encode_map,
    find_place,
    place,
)
from ladder.lower.cuda.tcgen05_memory import (
    DESCRIPTOR_HIGH,
    LANE,
    STEP_BYTES,
    STEPS,
    WARP_LANES,
    after_sync,
    allocate_columns,
    before_sync,
    commit,
    free_columns,
)
from ladder.lower.cuda.wgmma_products import pin_registers
from schedules.scaled import (
    ATOM,
    LANE_SCALES,
    ROWS,
    SLAB,
    ScaledSchedule,
    check_legal,
    scale_columns,
    tensor_columns,
)
from targets import TileDevice

COLUMNS = 32
"""Sums that a thread holds at a time."""


@dataclass(frozen=True)
class Epilogue:
    """Writes a block's tile.

    base: First address of its tensor memory.
    """

    form: ScaledGemm
    schedule: ScaledSchedule
    args: ScaledArguments
    memory: Memory
    base: Expr

    def finish(self, where: Place) -> None:
        """Wait for the sums, then write them."""
        args, split = self.args, self.schedule.split_k
        warp = b.bind(where.thread // 32)
        n, first_m = b.bind(where.n_tile * ROWS + where.thread), b.bind(where.m_tile * self.schedule.tile_m)
        held = b.local(COLUMNS, "float32")
        barriers.wait(self.memory.finished.ptr_to([0]), 0)
        after_sync()
        lanes = T.Cast("uint32", warp * WARP_LANES << LANE)
        with b.loop(self.schedule.tile_m // COLUMNS, rolled=True) as part:
            place = self.base + lanes + T.Cast("uint32", part * COLUMNS)
            b.ptx(f"tcgen05.ld.sync.aligned.32x32b.x{COLUMNS}.b32", *[held[i] for i in range(COLUMNS)], place)
            b.ptx("tcgen05.wait::ld.sync.aligned")
            pin_registers(held, COLUMNS)
            own = 0 if split == 1 else where.rank * (COLUMNS // split)
            if split > 1:
                self._exchange(where, held)
            m = first_m + part * COLUMNS + own
            mine = n < args.n
            if self.schedule.rows < ROWS:
                mine = T.And(mine, where.thread // self.schedule.rows == where.part)
            with b.when(mine):
                self._store(n, m, held, COLUMNS // split)
        before_sync()

    def _exchange(self, where: Place, held: Any) -> None:
        """Send each block of the cluster the columns that it finishes, and add up the own ones."""
        split = self.schedule.split_k
        quads = COLUMNS // split // 4
        for owner in range(split):
            with b.when(where.rank != owner):
                sender = where.rank - T.Cast("int32", where.rank > owner)
                for quad in range(quads):
                    target = self.memory.sums.ptr_to([sender, quad, where.thread, 0])
                    four = [held[(owner * quads + quad) * 4 + i] for i in range(4)]
                    barriers.send(target, self.memory.arrived.ptr_to([0]), T.int32(owner), four)
        for owner in range(1, split):
            with b.when(where.rank == owner):
                for index in range(quads * 4):
                    b.store(held, held[owner * quads * 4 + index], index)
        barriers.wait(self.memory.arrived.ptr_to([0]), 0)
        for sender in range(split - 1):
            for index in range(quads * 4):
                other = self.memory.sums[sender, index // 4, where.thread, index % 4]
                b.store(held, held[index] + other, index)

    def _store(self, n: Expr, m: Expr, held: Any, count: int) -> None:
        """Scale, round and store sums of neighbouring activation rows."""
        args, output = self.args, self.form.output
        factor = b.bind(args.factor[0])
        bias = T.Cast("float32", args.bias[n]) if args.bias is not None else None
        kept = b.Variable("float32", bias).value if bias is not None else None
        for index in range(count):
            with b.when(m + index < args.m):
                total = held[index] * factor
                value = total if kept is None else total + kept
                b.store(args.y, T.Cast(output, value), m + index, n)


COPY = "tcgen05.cp.cta_group::{}.32x128b.warpx4"
"""An atom of scales to all four quarters of the lanes."""

SCALES_HIGH = 1 << 14 | 8
"""Upper half of an atom's descriptor: no swizzle, the constant 1, 128 bytes between groups of eight rows."""

EXPONENTS = 1 << 23
"""Instruction descriptor: scales are e8m0, else e4m3 without sign."""


def instruction_descriptor(form: ScaledGemm, columns: int, scale: int = 0, blocks: int = 1) -> int:
    """Return the instruction descriptor of a product of 128 rows of each block.

    ``scale`` says from which byte of a column on the scales of both operands lie.
    """
    first, second = FORMATS[form.weight], FORMATS[form.activation]
    kind = EXPONENTS if first.scale == "e8m0" else 0
    types = first.number << 7 | second.number << 10
    return scale << 4 | types | columns >> 3 << 17 | kind | blocks * ROWS >> 4 << 24 | scale << 29


@dataclass(frozen=True)
class Issuer:
    """Starts the products of a block.

    base: First address of its tensor memory: sums, then each stage's scales.
    """

    form: ScaledGemm
    schedule: ScaledSchedule
    memory: Memory
    base: Expr

    def multiply(self, iterations: Expr, m_tile: Expr) -> None:
        """Start the products of all slabs; ``finished`` completes with the last."""
        memory, ring, tile_m = self.memory, Ring(self.schedule.stages), self.schedule.tile_m
        x, w, scales = (_descriptor_low(part) for part in (memory.x, memory.w, memory.scales))
        # Activation rows of a tile begin at one of the four quarters of an atom.
        offset = (
            T.Cast("uint32", m_tile % (ROWS // tile_m) * (tile_m // 32)) if tile_m < ROWS else T.uint32(0)
        )
        offset = b.Variable("uint32", offset).value
        with b.loop(iterations) as iteration:
            stage = T.Cast("uint32", ring.stage.value)
            ring.await_full(memory.full)
            if memory.partner is not None:
                ring.await_full(memory.partner)
            after_sync()
            columns = scale_columns(self.form, self.schedule)
            first = b.Variable("uint32", self.base + T.uint32(tile_m) + stage * T.uint32(columns)).value
            self._copy_scales(scales + stage * T.uint32(memory.scales.stride >> 4), first)
            for step in range(STEPS):
                inside = T.uint32(step * STEP_BYTES >> 4)
                operands = [
                    T.Cast("uint64", low + stage * T.uint32(part.stride >> 4) + inside)
                    | T.uint64(DESCRIPTOR_HIGH << 32)
                    for low, part in ((w, memory.w), (x, memory.x))
                ]
                self._product(operands, first, offset, step, iteration)
            commit(memory.empty.ptr_to([ring.stage.value]), self.schedule.partners)
            ring.advance()
        commit(memory.finished.ptr_to([0]), self.schedule.partners)

    def report(self, iterations: Expr) -> None:
        """Tell the first block of a pair, whose thread starts the products of both, of each full stage."""
        memory, ring = self.memory, Ring(self.schedule.stages)
        with b.loop(iterations):
            ring.await_full(memory.full)
            barriers.arrive_at(memory.partner.ptr_to([ring.stage.value]), 0)
            ring.advance()

    def _copy_scales(self, low: Expr, first: Expr) -> None:
        """Copy a stage's atoms; those of x of 256 rows lie side by side."""
        atoms, wide = self.form.slab_atoms, self.schedule.x_atoms
        for atom in range(atoms * (1 + wide)):
            row, part = divmod(atom - atoms, atoms)
            column = 4 * atom if atom < atoms else 4 * (atoms + part * wide + row)
            source = T.Cast("uint64", low + T.uint32(atom * ATOM >> 4)) | T.uint64(SCALES_HIGH << 32)
            b.ptx(COPY.format(self.schedule.partners), first + T.uint32(column), source)

    def _product(self, operands: list[Expr], first: Expr, offset: Expr, step: int, iteration: Expr) -> None:
        """Start the product of a step of a slab; the first one of the tile overwrites the sums."""
        form, wide = self.form, self.schedule.x_atoms
        atom, scale = divmod(step * form.format.scale_vec, 4)
        group = self.schedule.partners
        number = T.uint32(instruction_descriptor(form, self.schedule.tile_m, scale, group))
        w_scales = first + T.uint32(4 * atom)
        x_scales = first + T.uint32(4 * (form.slab_atoms + atom * wide)) + offset
        adds = T.bool(True) if step else iteration > 0
        kind, vector = form.format.kind, form.format.scale_vec
        spelling = f"tcgen05.mma.cta_group::{group}.kind::{kind}.block_scale.scale_vec::{vector}X"
        b.ptx(spelling, self.base, *operands, number, w_scales, x_scales, adds)


def _descriptor_low(part: Stages) -> Expr:
    """Return the lower half of a descriptor: the address in units of 16 bytes, a leading offset not used."""
    address = T.cuda.cvta_generic_to_shared(part.place(0))
    low = T.Cast("uint32", address) >> T.uint32(4) | T.uint32(1 << 16)
    return b.Variable("uint32", low).value


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
    overlap.declare(cluster=schedule.cluster)
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
            Producer(form, schedule, args, memory, where, (x_map, w_map), copied).fill()
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


@dataclass(frozen=True)
class Producer:
    """Copies both operands and their scales into the ring.

    maps: Tensor maps of x and of the weight.
    copied: Activation rows that the block copies.
    """

    form: ScaledGemm
    schedule: ScaledSchedule
    args: ScaledArguments
    memory: Memory
    where: Place
    maps: tuple[Expr, Expr]
    copied: Expr

    def fill(self) -> None:
        """Copy slab after slab."""
        schedule, memory, where = self.schedule, self.memory, self.where
        ring = Ring(schedule.stages)
        first_m = where.m_tile * schedule.tile_m
        own_m = first_m + where.rank * schedule.held_m if schedule.pair else first_m
        inside = where.part * schedule.rows
        with b.loop(where.iterations) as iteration:
            stage, slab = ring.stage.value, b.bind(where.first + iteration)
            ring.await_empty(memory.empty)
            full = memory.full.ptr_to([stage])
            size = T.Cast("uint32", (self.copied + schedule.rows) * SLAB + self.scale_bytes)
            barriers.expect(full, size)
            x_map, w_map = map(T.address_of, self.maps)
            b.ptx(TENSOR_COPY, memory.x.place(stage), x_map, slab * SLAB, own_m, full)
            w_row, target = where.n_tile * ROWS + inside, memory.w.place(stage, inside * SLAB)
            b.ptx(TENSOR_COPY, target, w_map, slab * SLAB, w_row, full)
            self._copy_scales(stage, slab, first_m, full)
            ring.advance()
        if schedule.pair:  # products of the other block's thread arrive here: not after this block has ended
            with b.loop(schedule.stages):
                ring.await_empty(memory.empty)
                ring.advance()

    @property
    def held(self) -> int:
        """Bytes of the scales of 128 rows."""
        return self.form.slab_atoms * ATOM

    @property
    def scale_bytes(self) -> Expr:
        """Bytes of all copies of a slab's scales."""
        if self.schedule.rows < ROWS:
            return self.held + self.copied * (LANE_SCALES * self.form.slab_atoms)
        return self.held * (1 + self.schedule.x_atoms)

    def _copy_scales(self, stage: Expr, slab: Expr, first_m: Expr, full: Expr) -> None:
        """Start the copies of scales: the weight's atoms, then those of x."""
        args, schedule, where, target = self.args, self.schedule, self.where, self.memory.scales
        first = slab * self.form.slab_atoms
        # The second block of a pair may have no weights: its rows are never stored.
        atom = T.min(where.n_tile, args.w_atoms - 1) if schedule.pair else where.n_tile
        bulk_copy(target.place(stage), args.w_scales.ptr_to([atom, first, 0]), self.held, full)
        for index in range(schedule.x_atoms):
            # Rows beyond M have the last rows' scales: their sums are never stored.
            row, place = T.min(first_m // ROWS + index, args.x_atoms - 1), (1 + index) * self.held
            if schedule.rows == ROWS:
                source = args.x_scales.ptr_to([row, first, 0])
                bulk_copy(target.place(stage, place), source, self.held, full)
            else:
                self._copy_lanes(stage, row, first, full)

    def _copy_lanes(self, stage: Expr, row: Expr, first: Expr, full: Expr) -> None:
        """Copy of each atom of x the lanes of rows that there are; rows of a tile are lanes of a quarter."""
        size = T.Cast("uint32", self.copied * LANE_SCALES)
        for atom in range(self.form.slab_atoms):
            target = self.memory.scales.place(stage, self.held + atom * ATOM)
            bulk_copy(target, self.args.x_scales.ptr_to([row, first + atom, 0]), size, full)
