"""Warpgroups that relieve each other: each has a tile of its own, and multiplies one interval of K at a time.

While one warpgroup multiplies, the other one moves the sums of its interval out of the tensor core's
way, or writes its finished tile; so the tensor core hardly ever waits. Stages hold intervals of
both tiles by turns, and a warpgroup passes over those of the other. It enters its interval when the other
one has come to the last turn of its own: sooner, and the phases of stages' barriers, of which only
the parity shows, would be ambiguous.

A thread has 128 sums, and no registers for as many totals: of each sum it keeps the 16 upper
bits, its *head*, apart, and leaves the rest, which is small, in the accumulator.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda import wgmma_epilogue
from ladder.lower.cuda.wgmma import pin_registers
from ladder.lower.cuda.wgmma8 import ByteKernel
from ladder.lower.cuda.wgmma8_plan import STEP
from ladder.lower.cuda.wgmma_producer import Producer
from ladder.lower.gpu.decode import load_order
from schedules.legal import RELAY_INTERVAL

Expr = Any

STEPS = 4
"""Products along K in a slab of 128 bytes."""

STEP_REGISTERS = 4
"""Operand registers of one product."""

FIRST_BARRIER = 1
"""Named barrier at which warpgroup 0 waits for its interval."""

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


class RelayKernel(ByteKernel):
    """A persistent kernel of 8-bit floating operands whose two warpgroups have tiles of their own."""

    def _allocate(self) -> None:
        self.count = self.geo.m64 * self.geo.accumulators
        self.sums = b.local(self.count, "float32")
        self.heads = b.local(self.count // 2, "uint32")
        self.total: Any = None
        self._allocate_operands(1)
        # The stage that products read; the ring's own may be the next one.
        self.multiplied = b.Variable("int32", 0)

    # ---- tiles ----------------------------------------------------------------------
    @property
    def _interval_turns(self) -> int:
        """Turns of the loop in a full interval."""
        return RELAY_INTERVAL // (self.geo.body * self.geo.slab)

    def _turns_of(self, interval: Expr) -> Expr:
        """Return the turns of a tile's interval; the last one has what is left."""
        whole = self._interval_turns
        return T.min(self.turns - interval * whole, whole)

    def _stages_of(self, interval: Expr) -> Expr:
        return self._turns_of(interval) * (self.geo.body // self.geo.slabs)

    def _walk(self) -> None:
        """Work on every other tile of the block: warpgroup 0 on the first, third, ..."""
        count = b.keep(self.n_blocks * self.m_blocks)
        self.intervals = b.keep((self.turns + self._interval_turns - 1) // self._interval_turns)
        tile = b.Variable("int32", self.first + self.group_index * self.walkers)
        with b.when(self.group_index == 1):
            self.ring.skip(self._stages_of(0))
        with b.repeat_while(tile.value < count):
            paired = T.Or(self.group_index == 1, tile.value + self.walkers < count)
            self.accompanied = b.keep(T.Cast("int32", paired)) > 0
            row_tile, token = map(b.keep, self.place(tile.value))
            self._relay_tile(tile.value == self.first)
            held = wgmma_epilogue.row_values(self, row_tile, token)
            wgmma_epilogue.finish_tile(self, row_tile, token, held)
            tile.set(tile.value + 2 * self.walkers)

    def _relay_tile(self, opens: Expr) -> None:
        """Sum one tile over K, interval by interval; ``opens`` says whether it is the block's first."""
        for index in range(self.count // 2):
            b.store(self.heads, T.uint32(0), index)
        with b.loop(self.intervals) as interval:
            # Alone it waits once, for the other group's last interval.
            follows = T.And(interval == 0, T.Not(opens))
            with b.when(T.Or(follows, T.And(interval > 0, self.accompanied))):
                b.emit(T.ptx.bar.sync(T.Cast("uint32", FIRST_BARRIER + self.group_index), T.uint32(256)))
            self._interval(interval * self._interval_turns, b.keep(self._turns_of(interval)))
            # The other warpgroup's interval comes next: the same one, or that after it.
            following = b.keep(interval + self.group_index)
            following = b.keep(T.if_then_else(following < self.intervals, following, 0))
            with b.when(self.accompanied):
                self.ring.skip(self._stages_of(following))
            with b.when(interval + 1 < self.intervals):
                self._carry()

    def _carry(self) -> None:
        """Move the upper half of every sum to its head."""
        source, places = CARRY.format(count=self.count), (self.sums.ptr_to([0]), self.heads.ptr_to([0]))
        b.emit(b.call_inline(f"ladder_carry{self.count}", source, "void", *places))
        pin_registers(self.heads, self.count // 2)
        pin_registers(self.sums, self.count)

    # ---- products -------------------------------------------------------------------
    def _interval(self, first: Expr, count: Expr) -> None:
        """Run turns ``first .. first+count`` of a tile and wait for their products."""
        self._await_stage()
        for step in range(STEPS - 1):
            self._load_step(step)
        with b.loop(count) as number:
            with b.when(T.And(self.accompanied, number + 1 == count)):
                other = T.Cast("uint32", FIRST_BARRIER + 1 - self.group_index)
                b.emit(T.ptx.bar.arrive(other, T.uint32(256)))
            for slab in range(self.geo.body):
                self._relay_slab(first + number, number, count, slab)
        self._wait_products(0)
        pin_registers(self.sums, self.count)
        self.previous.set(self.multiplied.value)
        self._release()
        self.ring.advance()

    def _relay_slab(self, turn: Expr, number: Expr, count: Expr, slab: int) -> None:
        """Start a slab's products step by step, each time loading operands for the step three ahead."""
        self.previous.set(self.multiplied.value)
        self.multiplied.set(self.ring.stage.value)
        for step in range(STEPS):
            self._start_step(step, turn > 0 if slab == step == 0 else True)
            self._wait_products(1, pin=False)
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

    def _wait_products(self, pending: int, pin: bool = True) -> None:
        b.emit(T.ptx.wgmma.wait_group.sync.aligned(pending))

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
            base = (m * geo.stage_tiles + tile) * geo.tile_words + offset
            words, place = self.tile_words[m], tile * geo.bits + part // STEP * width
            with b.vector(width) as v:
                source = self.words[self.ring.stage.value, base + self.group_thread * width + v]
                b.store(words, source, place + v)
            every = [words[tile * geo.bits + i] for i in range(geo.bits)]
            first = (m * STEPS + step) * STEP_REGISTERS
            position = part // STEP * STEP_REGISTERS
            self.decoder.registers(every, position, STEP_REGISTERS, self.operands, first, None, None, None)
            pin_registers(self.operands, STEP_REGISTERS, first)

    # ---- producer -------------------------------------------------------------------
    def _produce(self, producer: Producer) -> None:
        """Fill stages with intervals of two tiles by turns."""
        count = b.keep(self.n_blocks * self.m_blocks)
        intervals = b.keep((self.turns + self._interval_turns - 1) // self._interval_turns)
        tile = b.Variable("int32", self.first)
        with b.repeat_while(tile.value < count):
            second = b.keep(tile.value + self.walkers)
            places = [tuple(map(b.keep, self.place(t))) for t in (tile.value, T.min(second, count - 1))]
            with b.loop(intervals) as interval:
                turns = b.keep(self._turns_of(interval))
                producer.turns(*places[0], interval * self._interval_turns, turns)
                with b.when(second < count):
                    producer.turns(*places[1], interval * self._interval_turns, turns)
            tile.set(tile.value + 2 * self.walkers)

    def partial_sum(self, position: int) -> Expr:
        """Return a finished sum as float32."""
        word = self.heads[position // 2]
        head = T.bitwise_and(word, T.uint32(HEAD_HIGH)) if position % 2 else T.shift_left(word, T.uint32(16))
        value = self.sums[position] + T.reinterpret("float32", head)
        gain = self.decoder.decoder.gains[position // 2 % 2]
        return value if gain == 1.0 else value * T.float32(gain)
