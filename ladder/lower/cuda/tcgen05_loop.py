"""The warps of the pipeline ``tcgen05`` that decode weights into tensor memory, and then write the sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda.tcgen05_memory import (
    TensorMemory,
    after_sync,
    before_sync,
    lanes_of,
    load_columns,
    store_slab,
)
from ladder.lower.cuda.tcgen05_spec import SLOTS, SUM_COLUMN
from ladder.lower.cuda.wgmma_epilogue import Epilogue
from ladder.lower.cuda.wgmma_grid import Piece
from ladder.lower.cuda.wgmma_operands import Operands
from ladder.lower.cuda.wgmma_products import pin_registers
from ladder.lower.cuda.wgmma_spec import Spec
from ladder.lower.cuda.wgmma_thread import MathThread

Expr = Any


class TensorSums:
    """A thread's sums, of which registers hold as many as the epilogue stages at a time.

    Its argument is the accumulator's number, as wgmma counts them. Sums of other columns are loaded when
    the first of them is asked for: all warps of a warpgroup must ask together.

    spec, who, base: The kernel's spec, this thread, and the first address of the block's tensor memory.
    """

    def __init__(self, spec: Spec, who: MathThread, base: Expr) -> None:
        self.spec, self.who, self.base = spec, who, base
        self.registers = b.local(spec.geo.chunk // 2, "uint32" if spec.integer else "float32")
        self.held: tuple[int, int] | None = None

    def __call__(self, index: int) -> Expr:
        """Return a finished sum."""
        geo = self.spec.geo
        m, within = divmod(index, geo.accumulators)
        part, register = divmod(within, geo.chunk // 2)
        if self.held != (m, part):
            self._load(m, part)
            self.held = (m, part)
        gain, held = self.spec.decoder.decoder.gains[register // 2 % 2], self.registers[register]
        total = T.Cast("float32", T.reinterpret("int32", held)) if self.spec.integer else held
        return total if gain == 1.0 else total * T.float32(gain)

    def _load(self, m: int, part: int) -> None:
        """Load the columns that the epilogue stages together, of row tile ``m`` of the warpgroup."""
        geo = self.spec.geo
        lanes = lanes_of(self.who, self.who.group * geo.m64 + m)
        place = self.base + lanes + T.uint32(SUM_COLUMN + part * geo.chunk)
        load_columns(place, self.registers, geo.chunk)
        pin_registers(self.registers, geo.chunk // 2)


@dataclass(frozen=True)
class DecodeLoop:
    """A slab of 128 bytes of K is decoded while the products of the one before run.

    tensor, base: The block's tensor memory, and its first address.
    """

    spec: Spec
    operands: Operands
    epilogue: Epilogue
    tensor: TensorMemory
    base: Expr

    def tile(self, piece: Piece) -> None:
        """Decode one tile's weights along K, wait for its sums and write them."""
        spec = self.spec
        held = self.epilogue.load(piece)
        phase = b.Variable("int32", 0)
        self._fetch(0)
        with b.loop(piece.iterations) as iteration:
            for slab in range(spec.geo.body):
                self._slab(slab, phase.value)
                if slab % SLOTS == SLOTS - 1:
                    phase.set(phase.value ^ 1)
                self._fetch_next(iteration, piece.iterations, slab)
        b.emit(T.cuda.mbarrier_wait(self.tensor.finished.ptr_to([0]), 0))
        if spec.schedule.pair:  # another block's products arrive here: not after this block has ended
            for slot in range(SLOTS):
                b.emit(T.cuda.mbarrier_wait(self.tensor.free.ptr_to([slot]), phase.value ^ 1))
        after_sync()
        self.epilogue.finish(piece, held, TensorSums(spec, self.operands.who, self.base))
        before_sync()

    def _slab(self, slab: int, phase: Expr) -> None:
        """Decode the fetched slab, and store it once the products of two slabs before are done."""
        geo, operands, slot = self.spec.geo, self.operands, slab % SLOTS
        for m in range(geo.m64):
            for tile in range(geo.tiles_per_slab):
                operands.decode(m, tile, 0)
        b.emit(T.cuda.mbarrier_wait(self.tensor.free.ptr_to([slot]), phase ^ 1))
        after_sync()
        for m in range(geo.m64):
            place = self.base + lanes_of(operands.who, operands.row_tile(m))
            store_slab(place, slot, [register for step in range(4) for register in operands.step(0, m, step)])
        b.ptx("tcgen05.wait::st.sync.aligned")
        before_sync()
        b.emit(T.cuda.warp_sync())
        with b.when(operands.who.lane == 0):
            self.tensor.arrive_decoded(slot)

    def _fetch_next(self, iteration: Expr, iterations: Expr, slab: int) -> None:
        """Fetch the slab after ``slab``, unless the tile ends."""
        if slab + 1 < self.spec.geo.body:
            self._fetch(slab + 1)
        else:
            with b.when(iteration + 1 < iterations):
                self._fetch(0)

    def _fetch(self, slab: int) -> None:
        """Load an iteration's slab into registers, and leave the stage after its last one."""
        geo, ring = self.spec.geo, self.operands.ring
        if slab % geo.slabs == 0:
            full = self.operands.memory.full.ptr_to([ring.stage.value])
            b.emit(T.cuda.mbarrier_wait(full, ring.phase.value))
        self.operands.fetch(slab)
        if (slab + 1) % geo.slabs == 0:
            self._arrive(self.operands.memory.empty.ptr_to([ring.stage.value]))
            ring.advance()

    def _arrive(self, barrier: Expr) -> None:
        """Arrive for the whole warp."""
        b.emit(T.cuda.warp_sync())
        with b.when(self.operands.who.lane == 0):
            b.emit(T.ptx.mbarrier.arrive.shared.b64(barrier, T.uint32(1)))
