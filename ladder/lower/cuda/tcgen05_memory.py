"""Tensor memory of the pipeline ``tcgen05``, its barriers, and the products that one thread starts on it.

A block's columns: two slabs of decoded weights, then the sums. Addresses are lanes in the upper and columns
in the lower 16 bits (PTX ISA, "Tensor Memory Addressing").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda import barriers
from ladder.lower.cuda.barriers import Ring
from ladder.lower.cuda.wgmma_geometry import ROW_BYTES, WARP_ROWS, MathThread, Spec, WgmmaGeometry
from ladder.lower.cuda.wgmma_grid import Grid, Piece
from ladder.lower.cuda.wgmma_memory import Memory
from schedules.footprint import RESERVED_BYTES, TENSOR_COLUMNS, tensor_columns
from targets import TileDevice

SLAB_COLUMNS = 32
"""Columns of tensor memory that 128 bytes of K take in each of its lanes."""

SLOTS = 2
"""Slabs of weights that tensor memory holds: one is multiplied while the next is decoded."""

SUM_COLUMN = SLOTS * SLAB_COLUMNS
"""First column of the sums: weights come before."""


LEAST_REGISTERS = 56
"""Registers without which ptxas cannot hold the operands of an instruction: sixteen of them and a mask."""


@dataclass(frozen=True)
class TensorGeometry(WgmmaGeometry):
    """Sizes as those of wgmma, of which a block has one instruction's 128 rows of weights.

    Packed tile h of the block, strip w of sixteen rows, row i, is lane 32w + 16h + i of tensor memory: warp
    w of a warpgroup reaches lanes 32w to 32w + 31 alone, and has that strip's codes in wgmma too.
    """

    @property
    def threads(self) -> int:
        """Threads of a block: those that decode, a producer's warp, and the one that multiplies."""
        return (self.schedule.warps + 2) * 32

    @property
    def partners(self) -> int:
        """Blocks that multiply together: what ``cta_group`` says."""
        return 1 + self.schedule.pair

    @property
    def reallocates(self) -> bool:
        """Whether registers move between warps: sums lie in tensor memory, so there is no need."""
        return False

    @property
    def columns(self) -> int:
        """Columns of tensor memory that a block allocates."""
        return tensor_columns(self.schedule)

    def resident_blocks(self, device: TileDevice) -> int:
        """Return the blocks that share a multiprocessor, its tensor memory included."""
        shared = device.shared_per_unit // (self.shared_bytes + RESERVED_BYTES)
        registers = device.registers_per_unit // (self.threads * LEAST_REGISTERS)
        return max(1, min(shared, registers, TENSOR_COLUMNS // self.columns))


LANE = 16
"""Bits of an address below its lane."""

WARP_LANES = 32
"""Lanes that one warp of a warpgroup reaches."""


@dataclass(frozen=True)
class TensorMemory:
    """A block's part of tensor memory.

    word: Where the allocation writes its address: one word of shared memory.
    decoded, free: Barriers of the slabs of weights: decoded, and multiplied.
    finished: Barrier of the sums.
    """

    geo: TensorGeometry
    word: Any
    decoded: Any
    free: Any
    finished: Any

    def initialise(self) -> None:
        """Emit the initialisation of the barriers, for one thread."""
        decoding = self.geo.schedule.warps * self.geo.partners
        for slot in range(SLOTS):
            barriers.initialise(self.decoded.ptr_to([slot]), decoding)
            barriers.initialise(self.free.ptr_to([slot]))
        barriers.initialise(self.finished.ptr_to([0]))

    def allocate(self) -> None:
        """Allocate the block's columns, for one whole warp."""
        allocate_columns(self.word, self.geo.columns, self.geo.partners)

    def release(self, base: Expr) -> None:
        """Free the columns, for the warp that allocated them."""
        free_columns(base, self.geo.columns, self.geo.partners)

    def arrive_decoded(self, slot: int) -> None:
        """Tell the thread that starts products, which the first block of a pair has, of a slab; one lane."""
        barrier = self.decoded.ptr_to([slot])
        if self.geo.partners == 1:
            barriers.arrive(barrier)
        else:
            barriers.arrive_at(barrier, 0)


def place_tensor_memory(pool: Any, geo: TensorGeometry) -> TensorMemory:
    """Place in shared memory what tensor memory needs there."""
    decoded, free = (pool.alloc((SLOTS,), "uint64", align=8) for _ in range(2))
    finished = pool.alloc((1,), "uint64", align=8)
    return TensorMemory(geo, pool.alloc((1,), "uint32", align=8), decoded, free, finished)


def allocate_columns(word: Any, columns: int, partners: int) -> None:
    """Allocate columns, for one whole warp; other blocks may allocate theirs then.

    word: Where their address is written.
    partners: Blocks that multiply together.
    """
    group = f"cta_group::{partners}.sync.aligned"
    b.ptx(f"tcgen05.alloc.{group}.shared::cta.b32", word.ptr_to([0]), T.uint32(columns))
    b.ptx(f"tcgen05.relinquish_alloc_permit.{group}")
    before_sync()


def free_columns(base: Expr, columns: int, partners: int) -> None:
    """Free columns, for the warp that allocated them."""
    after_sync()
    b.ptx(f"tcgen05.dealloc.cta_group::{partners}.sync.aligned.b32", base, T.uint32(columns))


def before_sync() -> None:
    """Order accesses of tensor memory before the arrival or barrier that follows."""
    b.ptx("tcgen05.fence::before_thread_sync")


def after_sync() -> None:
    """Order accesses of tensor memory after the wait or barrier that came before."""
    b.ptx("tcgen05.fence::after_thread_sync")


def lanes_of(who: MathThread, row_tile: Expr) -> Expr:
    """Return, as part of an address, the first of sixteen lanes of the warp's strip of a row tile."""
    return T.Cast("uint32", (who.warp * WARP_LANES + row_tile * WARP_ROWS) << LANE)


def store_slab(place: Expr, slot: int, registers: list[Expr]) -> None:
    """Store a slab's sixteen operand registers: the fragment order of mma is that of ``16x128b``."""
    b.ptx("tcgen05.st.sync.aligned.16x128b.x8.b32", place + T.uint32(slot * SLAB_COLUMNS), *registers)


def load_columns(place: Expr, registers: Any, columns: int) -> None:
    """Load neighbouring columns of sums, in mma's order of accumulators; ``columns`` is a multiple of 8."""
    first = 0
    for power in (32, 16, 8, 4, 2, 1):
        if columns - first >= 8 * power:
            held = [registers[first // 2 + index] for index in range(4 * power)]
            b.ptx(f"tcgen05.ld.sync.aligned.16x256b.x{power}.b32", *held, place + T.uint32(first))
            first += 8 * power
    b.ptx("tcgen05.wait::ld.sync.aligned")


ROWS = 128
"""Weight rows of one block's part of an instruction."""

STEPS, STEP_BYTES = 4, 32
"""Products along K in a slab, and bytes of a row of x that each takes."""

COMMIT = "tcgen05.commit.cta_group::{}.mbarrier::arrive::one.shared::cluster.b64"

COMMIT_TO_ALL = "tcgen05.commit.cta_group::{}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
"""The same, at the barriers of several blocks."""

PAIR = 0b11
"""Both blocks of a pair."""

DESCRIPTOR_HIGH = 2 << 29 | 1 << 14 | 64
"""Upper half of x's descriptor: 128-byte swizzle, the constant 1, 1024 bytes between groups of eight rows."""

MASK_WORDS = 4
"""Words for each block of a mask of lanes of the sums that are left out: none."""


@dataclass(frozen=True)
class Kind:
    """An instruction's kind, and the numbers of an operand's type and of its sums' in its descriptor."""

    name: str
    number: int
    sums: int = 1


KINDS: Mapping[str, Kind] = {
    "float16": Kind("kind::f16", 0),
    "bfloat16": Kind("kind::f16", 1),
    "fp8_e4m3": Kind("kind::f8f6f4", 0),
    "fp8_e5m2": Kind("kind::f8f6f4", 1),
    "int8": Kind("kind::i8", 1, 2),
}
"""Operand types that this pipeline multiplies."""


def instruction_descriptor(weight: str, activation: str, columns: int, blocks: int = 1) -> int:
    """Return the instruction descriptor of a product of 128 rows of each block, both operands K-major."""
    first, second = KINDS[weight], KINDS[activation]
    types = second.sums << 4 | first.number << 7 | second.number << 10
    return types | columns >> 3 << 17 | blocks * ROWS >> 4 << 24


def commit(barrier: Expr, group: int, mask: Expr | None = None) -> None:
    """Have the products so far arrive at a barrier when they are done, or at those of several blocks."""
    if group == 2:
        mask = T.uint16(PAIR)
    if mask is None:
        b.ptx(COMMIT.format(group), barrier)
    else:
        b.ptx(COMMIT_TO_ALL.format(group), barrier, mask)


@dataclass(frozen=True)
class Issuer:
    """Starts the products of a block: of weights in tensor memory, and x in shared memory.

    x has 128 swizzled bytes of K per activation row (PTX ISA, "tcgen05.mma", "Instruction descriptor").

    base: First address of its tensor memory.
    k_tiles: Packed tiles along K.
    """

    spec: Spec
    grid: Grid
    memory: Memory
    tensor: TensorMemory
    base: Expr
    k_tiles: Expr

    def tile(self, piece: Piece) -> None:
        """Start the products of one tile, slab after slab; ``finished`` completes with the last."""
        geo, ring = self.tensor.geo, Ring(self.spec.schedule.stages)
        phase = b.Variable("int32", 0)
        start = b.local(1, "uint32")
        # The low half of x's descriptor: its address in units of 16 bytes, and a leading offset not used.
        address = T.cuda.cvta_generic_to_shared(self.memory.x.ptr_to([0, 0]))
        b.store(start, T.Cast("uint32", address) >> T.uint32(4) | T.uint32(1 << 16), 0)
        with b.loop(piece.iterations) as iteration:
            for slab in range(geo.body):
                if slab % geo.slabs == 0:
                    ring.await_full(self.memory.full)
                slot = slab % SLOTS
                barriers.wait(self.tensor.decoded.ptr_to([slot]), phase.value)
                after_sync()
                # Tiles beyond K repeat the last one: infinities times the zeros of x would be NaN.
                first = piece.first_tile + (iteration * geo.body + slab) * geo.tiles_per_slab
                each = STEPS // geo.tiles_per_slab
                for tile in range(geo.tiles_per_slab):
                    with b.when(first + tile < self.k_tiles):
                        for step in range(tile * each, tile * each + each):
                            self._product(iteration, slab, step, ring.stage.value, start[0])
                commit(self.tensor.free.ptr_to([slot]), geo.partners)
                if slot == SLOTS - 1:
                    phase.set(phase.value ^ 1)
                if (slab + 1) % geo.slabs == 0:
                    self._leave(ring.stage.value)
                    ring.advance()
        commit(self.tensor.finished.ptr_to([0]), geo.partners)

    def _leave(self, stage: Expr) -> None:
        """Have products arrive, when they are done, at every block that copies a share of their x."""
        empty, cluster = self.memory.empty.ptr_to([stage]), self.spec.schedule.cluster
        every = T.Cast("uint16", ((1 << cluster) - 1) << (self.grid.slice * cluster))
        commit(empty, self.tensor.geo.partners, every if cluster > 1 else None)

    def _product(self, iteration: Expr, slab: int, step: int, stage: Expr, start: Expr) -> None:
        """Start the product of a step of a slab; the first one of the tile overwrites the sums."""
        geo, spec = self.spec.geo, self.spec
        tile_m, group = spec.schedule.tile_m, self.tensor.geo.partners
        inside = slab % geo.slabs * geo.held_m * ROW_BYTES + step * STEP_BYTES
        low = start + T.Cast("uint32", stage) * T.uint32(geo.x_bytes >> 4) + T.uint32(inside >> 4)
        x = T.Cast("uint64", low) | T.uint64(DESCRIPTOR_HIGH << 32)
        weights = self.base + T.uint32(slab % SLOTS * SLAB_COLUMNS + step * SLAB_COLUMNS // STEPS)
        number = instruction_descriptor(spec.decoder.operand, spec.gemm.activation, tile_m, group)
        adds = T.bool(True) if step or slab else iteration > 0
        spelling = f"tcgen05.mma.cta_group::{group}.{KINDS[spec.gemm.activation].name}"
        masks = [T.uint32(0)] * (MASK_WORDS * group)
        b.ptx(spelling, self.base + T.uint32(SUM_COLUMN), weights, x, T.uint32(number), *masks, adds)
