"""The math loop for tiles of 256 activation rows of plain fp8: there are no registers for totals.

fp8 tensor cores keep few bits of long sums. A thread has 128 sums here: at the end of every interval of
K it moves the 16 upper bits of each, its *head*, to half a register, and leaves the rest, which is
small, in the accumulator. Nothing is rounded by that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.wgmma8_units import STEP
from ladder.lower.cuda.wgmma16 import Parts
from ladder.lower.cuda.wgmma_geometry import Spec
from ladder.lower.cuda.wgmma_grid import Piece
from ladder.lower.cuda.wgmma_operands import Registers, allocate_registers
from ladder.lower.cuda.wgmma_products import (
    commit_group,
    open_group,
    pin_registers,
    start_step,
    wait_groups,
)
from ladder.lower.gpu.decode import load_order
from schedules.footprint import CARRY_INTERVAL

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


@dataclass(frozen=True)
class State:
    """A thread's registers.

    sums, heads: Accumulators, and pairs of their upper halves.
    weights: Operands and what is fetched for them.
    multiplied: The stage that products read; the ring's own may be the next one.
    """

    sums: Any
    heads: Any
    weights: Registers
    multiplied: b.Variable


def allocate_state(spec: Spec) -> State:
    """Allocate a thread's registers."""
    sums, heads = b.local(spec.sums, "float32"), b.local(spec.sums // 2, "uint32")
    weights = allocate_registers(spec, scaled=False, sets=1)
    return State(sums, heads, weights, b.Variable("int32", 0))


@dataclass(frozen=True)
class CarryLoop:
    """The loop."""

    parts: Parts
    state: State

    @property
    def spec(self) -> Spec:
        return self.parts.spec

    def tile(self, piece: Piece) -> None:
        """Sum one tile over K, interval by interval, and write it."""
        self._clear()
        whole = CARRY_INTERVAL // (self.spec.geo.body * self.spec.geo.slab)
        intervals = b.keep((piece.iterations + whole - 1) // whole)
        with b.loop(intervals) as interval:
            first = b.keep(interval * whole)
            self._interval(first, b.keep(T.min(piece.iterations - first, whole)))
            with b.when(interval + 1 < intervals):
                self._carry()
        joined = self._joined() if self.parts.epilogue.stream is not None else None
        # No sooner: there is no register for them.
        held = self.parts.epilogue.load(piece)
        self.parts.epilogue.finish(piece, held, partial(self._finished, joined), joined)

    def _clear(self) -> None:
        """Clear heads; and sums, for the compiler alone, where `_joined` takes registers between tiles."""
        for index in range(self.spec.sums // 2):
            b.store(self.state.heads, T.uint32(0), index)
        if self.parts.epilogue.stream is not None:
            for index in range(self.spec.sums):
                b.store(self.state.sums, T.float32(0), index)
            pin_registers(self.state.sums, self.spec.sums)

    def _joined(self) -> Any:
        """Return sums as float32 registers of their own, which may be handed over and added to."""
        whole = b.local(self.spec.sums, "float32")
        for register in range(self.spec.sums):
            b.store(whole, self._whole(register), register)
        pin_registers(whole, self.spec.sums)
        return whole

    def _whole(self, register: int) -> Expr:
        """Return a sum and its head as float32."""
        word = self.state.heads[register // 2]
        head = T.bitwise_and(word, T.uint32(HEAD_HIGH)) if register % 2 else T.shift_left(word, T.uint32(16))
        return self.state.sums[register] + T.reinterpret("float32", head)

    def _finished(self, joined: Any, register: int) -> Expr:
        """Return a finished sum as float32, scaled by what the decoder left; ``joined``: of `_joined`."""
        value = self._whole(register) if joined is None else joined[register]
        gain = self.spec.decoder.gains[register // 2 % 2]
        return value if gain == 1.0 else value * T.float32(gain)

    def _carry(self) -> None:
        """Move the upper half of every sum to its head."""
        count, state = self.spec.sums, self.state
        source, places = CARRY.format(count=count), (state.sums.ptr_to([0]), state.heads.ptr_to([0]))
        b.emit(b.call_inline(f"ladder_carry{count}", source, "void", *places))
        pin_registers(state.heads, count // 2)
        pin_registers(state.sums, count)

    def _interval(self, first: Expr, count: Expr) -> None:
        """Run iterations ``first .. first+count`` of a tile and wait for their products."""
        consumer = self.parts.consumer
        consumer.await_stage()
        for step in range(STEPS - 1):
            self._load_step(step)
        with b.loop(count) as number:
            for slab in range(self.spec.geo.body):
                self._steps(first + number, number, count, slab)
        wait_groups(0)
        pin_registers(self.state.sums, self.spec.sums)
        consumer.previous.set(self.state.multiplied.value)
        consumer.release()
        consumer.ring.advance()

    def _steps(self, iteration: Expr, number: Expr, count: Expr, slab: int) -> None:
        """Start a slab's products step by step, each time loading operands for the step three ahead."""
        consumer, multiplied = self.parts.consumer, self.state.multiplied
        consumer.previous.set(multiplied.value)
        multiplied.set(consumer.ring.stage.value)
        for step in range(STEPS):
            self._start_step(step, iteration > 0 if slab == step == 0 else True)
            wait_groups(1)
            if step == 0:
                with b.when(True if slab else number > 0):
                    consumer.release()
            elif step == 1:
                # Where the interval ends, the stage at hand is entered again and read in vain.
                consumer.enter_stage(number, count, slab + 1)
            self._load_step((step - 1) % STEPS)

    def _start_step(self, step: int, adds: Expr) -> None:
        """Start one step's products of all row tiles as one group."""
        open_group()
        registers = partial(self.parts.operands.step, 0, step=step)
        descriptor = self.parts.x.at(self.state.multiplied.value, 0, step)
        start_step(self.spec, self.state.sums, registers, descriptor, adds)
        commit_group()

    def _load_step(self, step: int) -> None:
        """Load a step's operands from the ring's stage: bytes that go to the core as they are."""
        geo, operands, weights = self.spec.geo, self.parts.operands, self.state.weights
        tile, part = divmod(step * STEP, geo.slab // geo.tiles_per_slab)
        offset, width = load_order(geo.groups.bits)[part // STEP]
        stage = self.parts.consumer.ring.stage.value
        for m in range(geo.m64):
            base = (operands.row_tile(m) * geo.stage_tiles + tile) * geo.groups.tile_words + offset
            words, place = weights.words[m], tile * geo.groups.bits + part // STEP * width
            with b.vector(width) as v:
                source = operands.memory.words[stage, base + operands.who.group_thread * width + v]
                b.store(words, source, place + v)
            every = [words[tile * geo.groups.bits + i] for i in range(geo.groups.bits)]
            first = (m * STEPS + step) * STEP_REGISTERS
            position = part // STEP * STEP_REGISTERS
            which = range(position, position + STEP_REGISTERS)
            self.spec.decoder.registers(every, which, weights.operands, first)
            pin_registers(weights.operands, STEP_REGISTERS, first)
