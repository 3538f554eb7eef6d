"""Tiles of 256 tokens of plain fp8 operands, whose sums have no registers for as many totals.

fp8 tensor cores keep few bits of long sums. A thread has 128 sums here: at the end of every interval of
K it moves the 16 upper bits of each, its *head*, to half a register, and leaves the rest, which is
small, in the accumulator. Nothing is rounded by that.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda import wgmma_epilogue
from ladder.lower.cuda.wgmma import pin_registers
from ladder.lower.cuda.wgmma8 import ByteKernel
from ladder.lower.cuda.wgmma8_plan import STEP
from ladder.lower.gpu.decode import load_order
from schedules.legal import CARRY_INTERVAL

Expr = Any

STEPS = 4
"""Products along K in a slab of 128 bytes."""

STEP_REGISTERS = 4
"""Operand registers of one product."""

HEAD_HIGH = 0xFFFF0000
"""Bits of a pair of heads that belong to the second of its two sums."""

CARRY = """
__device__ __forceinline__ void ladder_carry{count}(float* sums, unsigned* heads) {{
#pragma unroll
  for (int i = 0; i < {count} / 2; ++i) {{
    float low = sums[2 * i] + __uint_as_float(heads[i] << 16);
    float high = sums[2 * i + 1] + __uint_as_float(heads[i] & 0xffff0000u);
    heads[i] = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
    sums[2 * i] = low - __uint_as_float(heads[i] << 16);
    sums[2 * i + 1] = high - __uint_as_float(heads[i] & 0xffff0000u);
  }}
}}
"""


class CarryKernel(ByteKernel):
    """A kernel of fp8 operands whose sums carry into 16-bit heads."""

    def _allocate(self) -> None:
        self.count = self.geo.m64 * self.geo.accumulators
        self.sums = b.local(self.count, "float32")
        self.heads = b.local(self.count // 2, "uint32")
        self.total: Any = None
        self._allocate_operands(1)
        # The stage that products read; the ring's own may be the next one.
        self.multiplied = b.Variable("int32", 0)

    def _tile(self, row_tile: Expr, token: Expr) -> None:
        """Sum one tile over K, interval by interval, and write it."""
        for index in range(self.count // 2):
            b.store(self.heads, T.uint32(0), index)
        whole = CARRY_INTERVAL // (self.geo.body * self.geo.slab)
        intervals = b.keep((self.turns + whole - 1) // whole)
        with b.loop(intervals) as interval:
            first = b.keep(interval * whole)
            self._interval(first, b.keep(T.min(self.turns - first, whole)))
            with b.when(interval + 1 < intervals):
                self._carry()
        # No sooner: there is no register for them.
        held = wgmma_epilogue.row_values(self, row_tile, token)
        wgmma_epilogue.finish_tile(self, row_tile, token, held)

    def _carry(self) -> None:
        """Move the upper half of every sum to its head."""
        source, places = CARRY.format(count=self.count), (self.sums.ptr_to([0]), self.heads.ptr_to([0]))
        b.emit(b.call_inline(f"ladder_carry{self.count}", source, "void", *places))
        pin_registers(self.heads, self.count // 2)
        pin_registers(self.sums, self.count)

    def _interval(self, first: Expr, count: Expr) -> None:
        """Run turns ``first .. first+count`` of a tile and wait for their products."""
        self._await_stage()
        for step in range(STEPS - 1):
            self._load_step(step)
        with b.loop(count) as number:
            for slab in range(self.geo.body):
                self._steps(first + number, number, count, slab)
        self._wait_products(0)
        pin_registers(self.sums, self.count)
        self.previous.set(self.multiplied.value)
        self._release()
        self.ring.advance()

    def _steps(self, turn: Expr, number: Expr, count: Expr, slab: int) -> None:
        """Start a slab's products step by step, each time loading operands for the step three ahead."""
        self.previous.set(self.multiplied.value)
        self.multiplied.set(self.ring.stage.value)
        for step in range(STEPS):
            self._start_step(step, turn > 0 if slab == step == 0 else True)
            self._wait_products(1)
            if step == 0:
                with b.when(True if slab else number > 0):
                    self._release()
            elif step == 1:
                if slab + 1 < self.geo.body:
                    self.ring.advance()
                else:
                    # Where the interval ends, the stage at hand is entered again and read in vain.
                    self.ring.advance_if(number + 1 < count)
                self._await_stage()
            self._load_step((step - 1) % STEPS)

    def _start_step(self, step: int, adds: Expr) -> None:
        """Start one step's products of all row tiles as one group."""
        b.emit(T.ptx.wgmma.fence.sync.aligned())
        for m in range(self.geo.m64):
            first = (m * STEPS + step) * STEP_REGISTERS
            registers = [self.operands[first + i] for i in range(STEP_REGISTERS)]
            sums = [self.sums[m * self.geo.accumulators + i] for i in range(self.geo.accumulators)]
            self._multiply(sums, registers, self.multiplied.value, 0, step, 0, adds)
        b.emit(T.ptx.wgmma.commit_group.sync.aligned())

    def _load_step(self, step: int) -> None:
        """Load a step's operands from the ring's stage: bytes that go to the core as they are."""
        geo = self.geo
        tile, part = divmod(step * STEP, geo.slab // geo.tiles_per_slab)
        offset, width = load_order(geo.bits)[part // STEP]
        for m in range(geo.m64):
            base = (self._row_tile(m) * geo.stage_tiles + tile) * geo.tile_words + offset
            words, place = self.tile_words[m], tile * geo.bits + part // STEP * width
            with b.vector(width) as v:
                source = self.words[self.ring.stage.value, base + self.group_thread * width + v]
                b.store(words, source, place + v)
            every = [words[tile * geo.bits + i] for i in range(geo.bits)]
            first = (m * STEPS + step) * STEP_REGISTERS
            position = part // STEP * STEP_REGISTERS
            self.decoder.registers(every, position, STEP_REGISTERS, self.operands, first, None, None, None)
            pin_registers(self.operands, STEP_REGISTERS, first)

    def partial_sum(self, position: int) -> Expr:
        """Return a finished sum as float32."""
        word = self.heads[position // 2]
        head = T.bitwise_and(word, T.uint32(HEAD_HIGH)) if position % 2 else T.shift_left(word, T.uint32(16))
        value = self.sums[position] + T.reinterpret("float32", head)
        gain = self.decoder.decoder.gains[position // 2 % 2]
        return value if gain == 1.0 else value * T.float32(gain)
