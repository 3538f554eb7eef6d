"""The math loop of the wgmma pipeline for 8-bit operands: integer sums as they are, others promoted.

Group scales apply to accumulators, and fp8 tensor cores keep few bits of long sums: so
every interval of K is summed apart and added, scaled, to totals that stay in registers
(`wgmma8_units` says which products run when).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.wgmma8_units import STEP, Loop, Unit
from ladder.lower.cuda.wgmma16 import Parts
from ladder.lower.cuda.wgmma_epilogue import PerActivationRow
from ladder.lower.cuda.wgmma_geometry import MathThread, Spec
from ladder.lower.cuda.wgmma_grid import Piece
from ladder.lower.cuda.wgmma_operands import SLAB_REGISTERS, Registers, allocate_registers
from ladder.lower.cuda.wgmma_products import (
    commit_group,
    open_group,
    pin_registers,
    start_product,
    wait_groups,
)
from ladder.lower.gpu.arguments import Arguments
from schedules.layouts import TILE

Step = Callable[[], None]


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Turnstile:
    """Two warpgroups that take turns at the tensor core, by named barriers 1 and 2.

    seat: Which of the two this warpgroup is.
    """

    seat: Expr

    @classmethod
    def open(cls, group: Expr) -> Turnstile:
        """Emit the seat of warpgroup ``group``; the first one may start."""
        # By a shuffle, after which ptxas knows that it is the same in all lanes.
        found = cls(b.keep(b.shuffle(T.Cast("int32", group), 0)))
        with b.when(found.seat == 1):
            found.leave()
        return found

    def enter(self) -> None:
        """Wait until the other warpgroup's products end."""
        b.emit(T.ptx.bar.sync(T.Cast("uint32", 1 + self.seat), T.uint32(256)))

    def leave(self) -> None:
        """Let the other warpgroup start its products."""
        b.emit(T.ptx.bar.arrive(T.Cast("uint32", 2 - self.seat), T.uint32(256)))


@dataclass(frozen=True)
class State:
    """A thread's accumulators, and its registers of weights.

    loop, units: How the loop is cut, and its units.
    banks, total: Running sums, and totals where sums are promoted (else None).
    weights: Operands and what is fetched for them.
    pending: Scales of the units in flight: rows g and g+8 of each bank.
    factors: Scales of groups of x: of the unit that is promoted next, and of the one after it.
    multiplied: The stage that products read; the ring's own is being decoded.
    turnstile: How two warpgroups take turns; None where they do not.
    """

    loop: Loop
    units: list[Unit]
    banks: list[Any]
    total: Any
    weights: Registers
    pending: Any
    factors: list[PerActivationRow]
    multiplied: b.Variable
    turnstile: Turnstile | None


def takes_turns(spec: Spec, loop: Loop, units: list[Unit]) -> bool:
    """Whether two warpgroups take turns at the tensor core: one promotes while the other multiplies.

    Left alone they fall into step: both wait for products that run at half speed, then both promote.
    It pays where operands are decoded in that time too.
    """
    decodes = loop.parted and spec.gemm.scale
    return spec.geo.warpgroups == 2 and decodes and all(unit.done for unit in units)


def allocate_state(spec: Spec, args: Arguments, who: MathThread, *, scaled: bool) -> State:
    """Allocate a thread's registers; ``scaled``: there are scales within K."""
    loop = Loop(spec.geo)
    units, kind = loop.units(), "uint32" if spec.integer else "float32"
    banks = [b.local(loop.bank_registers, kind) for _ in range(loop.banks)]
    total = b.local(spec.sums, "float32") if spec.geo.promotes else None
    weights = allocate_registers(spec, scaled=scaled, sets=loop.operand_sets)
    pending = b.local(2 * loop.banks, "float32")
    grouped = 2 if spec.gemm.token_group else 0
    factors = [PerActivationRow(args, who.lane, loop.unit_m) for _ in range(grouped)]
    multiplied = b.Variable("int32", 0)
    turnstile = Turnstile.open(who.group) if takes_turns(spec, loop, units) else None
    return State(loop, units, banks, total, weights, pending, factors, multiplied, turnstile)


@dataclass(frozen=True)
class Loop8:
    """The loop.

    scales: Stages of group scales in shared memory; None where there are none.
    """

    parts: Parts
    state: State
    args: Arguments
    scales: Any

    @property
    def spec(self) -> Spec:
        return self.parts.spec

    def tile(self, piece: Piece) -> None:
        """Sum one tile over K and write it."""
        loop, state = self.state.loop, self.state
        consumer, epilogue = self.parts.consumer, self.parts.epilogue
        self._clear_totals()
        early = not loop.parted
        held = epilogue.load(piece) if early else {}
        self._load_factors(piece, 0, 0)
        consumer.await_stage()
        self.parts.operands.fetch(0)
        self._decode_share(0, range(self._items))
        if loop.long and self.spec.geo.promotes:
            count = loop.iterations
            with b.loop((piece.iterations + count - 1) // count) as interval:
                self._run(piece, interval * count, T.min(piece.iterations - interval * count, count))
                for index in range(loop.bank_registers):
                    value = state.total[index] + self._sum_in(state.units[-1], index)
                    b.store(state.total, value, index)
        else:
            self._run(piece, 0, piece.iterations)
        consumer.ring.advance()
        held = held if early else epilogue.load(piece)
        epilogue.finish(piece, held, self._finished, state.total)

    def _finished(self, register: int) -> Expr:
        """Return the finished sum of an accumulator as float32."""
        if self.state.total is not None:
            return self.state.total[register]
        bank, index = divmod(register, self.state.loop.bank_registers)
        gain = self.spec.decoder.gains[index // 2 % 2]
        return self._as_float(self.state.banks[bank][index]) * T.float32(gain)

    def _clear_totals(self) -> None:
        for index in range(self.spec.sums if self.spec.geo.promotes else 0):
            b.store(self.state.total, T.float32(0), index)

    # ---- iterations ----------------------------------------------------------------------
    def _run(self, piece: Piece, first: Expr, count: Expr) -> None:
        """Run iterations ``first .. first+count``; products of one may still run while the next begins."""
        with b.loop(count) as number:
            self._iteration(piece, first + number, number)
        if self.state.loop.long:
            self._end_unit(self.state.units[-1])
            for bank in self.state.banks:
                pin_registers(bank, self.state.loop.bank_registers)

    def _iteration(self, piece: Piece, iteration: Expr, number: Expr) -> None:
        """Start all units of an iteration, each before the one ahead of it is promoted.

        ``number`` counts the iterations since sums were cleared.
        """
        loop, units, shares = self.state.loop, self.state.units, self._shares()
        running, late = (units[-1] if loop.long else None), loop.parted
        for index, unit in enumerate(units):
            share = shares[index % len(shares)]
            if index % len(shares) == 0:
                self._enter_slab(unit.slab)
            self._start(number, unit)
            if running:
                wait_groups(1)
                self._release_after(running, True if index else number > 0)
            # The loads' latency hides behind the promotion.
            fetch = partial(self._fetch_share, piece, iteration, unit.slab + 1, share)
            decode = partial(self._decode_share, unit.slab + 1, share)
            if not late:
                fetch()
            self._remember_scales(unit)
            if running:
                self._promote(running)
            self._load_factors(piece, iteration, index + 1)
            if not late:
                decode()
            running = unit
            # ptxas serialises sums that are in flight across a loop's back edge and also
            # read by ordinary instructions, so each iteration finishes what it started.
            last = index == len(units) - 1
            if not loop.long and (last or (unit.done and loop.drains)):
                self._end_unit(unit, (fetch, decode) if late else (_nothing, _nothing))
                running = None

    def _end_unit(self, unit: Unit, around: tuple[Step, Step] = (_nothing, _nothing)) -> None:
        """Wait for all products and promote those of the last unit; do something before and after that."""
        if self.state.turnstile is not None:
            # The last step of this unit runs while the other warpgroup starts.
            wait_groups(1)
            self.state.turnstile.leave()
        wait_groups(0)
        around[0]()
        self.parts.consumer.previous.set(self.state.multiplied.value)
        self._release_after(unit)
        self._promote(unit)
        around[1]()

    def _enter_slab(self, slab: int) -> None:
        """Note from which stage the products of a slab read."""
        if slab % self.spec.geo.slabs == 0:
            self.parts.consumer.previous.set(self.state.multiplied.value)
            self.state.multiplied.set(self.parts.consumer.ring.stage.value)

    def _release_after(self, unit: Unit, ran: Expr = True) -> None:
        """Free the previous stage if it ends with a finished unit, which did run."""
        units = self.state.units
        following = units[(units.index(unit) + 1) % len(units)]
        if following.slab != unit.slab and following.slab % self.spec.geo.slabs == 0:
            with b.when(ran):
                self.parts.consumer.release()

    # ---- decoding ahead -------------------------------------------------------------
    @property
    def _items(self) -> int:
        """Packed tiles of a slab and warpgroup."""
        return self.spec.geo.m64 * self.spec.geo.tiles_per_slab

    def _shares(self) -> list[range]:
        """Return which packed tiles of the next slab each unit of a slab decodes."""
        units, items = len(self.state.units) // self.spec.geo.body, self._items
        if self.state.loop.parted:
            return [range(0)] * (units - 1) + [range(items)]
        bounds = [-(-items * unit // units) for unit in range(units + 1)]
        return [range(bounds[unit], bounds[unit + 1]) for unit in range(units)]

    def _fetch_share(self, piece: Piece, iteration: Expr, slab: int, share: range) -> None:
        if not share:
            return
        geo, operands = self.spec.geo, self.parts.operands
        if share.start == 0 and slab % geo.slabs == 0:
            self.parts.consumer.enter_stage(iteration, piece.iterations, slab)
        for item in share:
            m, tile = divmod(item, geo.tiles_per_slab)
            operands.load_words(m, tile, slab)
            if tile == 0:
                operands.fetch_rows(m, slab % geo.body)
        if self.state.loop.parted:
            # A tile's last fetch is in vain, and of the stage that is freed next.
            b.emit(T.cuda.warp_sync())

    def _decode_share(self, slab: int, share: range) -> None:
        geo, bank = self.spec.geo, slab % self.state.loop.operand_sets
        for item in share:
            m, tile = divmod(item, geo.tiles_per_slab)
            self.parts.operands.decode(m, tile, bank)
            # Here, while products run, and not when the next ones need them.
            count = SLAB_REGISTERS // geo.tiles_per_slab
            first = (bank * geo.m64 + m) * SLAB_REGISTERS + tile * count
            pin_registers(self.state.weights.operands, count, first)

    # ---- products -------------------------------------------------------------------
    def _start(self, number: Expr, unit: Unit) -> None:
        """Start a unit's products as one group; ``number`` counts iterations since sums were cleared."""
        loop, bank, turnstile = self.state.loop, self.state.banks[unit.bank], self.state.turnstile
        sums = [bank[i] for i in range(loop.bank_registers)]
        within, stage = unit.slab % self.spec.geo.slabs, self.state.multiplied.value
        if turnstile is not None:
            turnstile.enter()
        open_group()
        for step in range(unit.start // STEP, -(-unit.end // STEP)):
            first = unit.fresh and step == unit.start // STEP
            adds = number > 0 if first and loop.long else not first
            if turnstile is not None and step == -(-unit.end // STEP) - 1:
                commit_group()
            descriptor = self.parts.x.at(stage, within, step, unit.first_m)
            start_product(self.spec, sums, self._registers(unit, step), descriptor, adds)
        commit_group()

    def _registers(self, unit: Unit, step: int) -> list[Expr]:
        """Return a step's operand; a group of 16 takes half of it, and zeros for the rest."""
        registers = self.parts.operands.step(unit.slab % self.state.loop.operand_sets, unit.m, step)
        if unit.extent >= STEP:
            return registers
        half = unit.start % STEP // unit.extent
        return [register if i // 2 == half else T.uint32(0) for i, register in enumerate(registers)]

    # ---- promotion ------------------------------------------------------------------
    def _remember_scales(self, unit: Unit) -> None:
        """Load the factors of a unit's sums, which outlive its stage."""
        if self.scales is None or not unit.done:
            return
        for half in (0, 1):
            gain = T.float32(self.spec.decoder.gains[half])
            b.store(self.state.pending, self._scale(unit, half) * gain, 2 * unit.bank + half)

    def _scale(self, unit: Unit, half: int) -> Expr:
        """Return the scale of row g or g+8 that holds at the end of a unit."""
        geo = self.spec.geo
        row = (unit.slab % geo.slabs * geo.slab + unit.start) // geo.scale_step
        low = self.parts.operands.first_row(unit.m)
        return self.scales[self.state.multiplied.value, row * self.spec.schedule.tile_n + low + half * 8]

    def _load_factors(self, piece: Piece, iteration: Expr, index: int) -> None:
        """Load the scales of the groups of x of an iteration's unit, or of the next iteration's first."""
        state, units = self.state, self.state.units
        if not state.factors:
            return
        unit = units[index % len(units)]
        k = (
            (iteration + index // len(units)) * state.loop.iteration
            + unit.slab * self.spec.geo.slab
            + unit.start
        )
        group = T.truncdiv(piece.first_tile * TILE + k, self.spec.gemm.token_group)
        last = self.args.token_scale.shape[1] - 1
        state.factors[index % 2].load(piece.first_m + unit.first_m, b.keep(T.min(group, last)))

    def _promote(self, unit: Unit) -> None:
        """Add a finished unit's sums, scaled, to the totals, if its interval ends."""
        if not unit.done:
            return
        state, count = self.state, self.state.loop.bank_registers
        pin_registers(state.banks[unit.bank], count)
        for factors in state.factors:
            factors.forget()
        first = unit.m * self.spec.geo.accumulators + unit.first_m // 2
        for index in range(count):
            value = state.total[first + index] + self._sum_in(unit, index)
            b.store(state.total, value, first + index)
        # The compiler would put the additions off, and keep copies of the sums meanwhile.
        pin_registers(state.total, count, first)

    def _sum_in(self, unit: Unit, index: int) -> Expr:
        """Return a register of a unit's sums, scaled, as float32."""
        state, half = self.state, index // 2 % 2
        value = self._as_float(state.banks[unit.bank][index])
        if state.factors:
            value = value * state.factors[state.units.index(unit) % 2][index]
        if self.scales is not None:
            return value * state.pending[2 * unit.bank + half]
        gain = self.spec.decoder.gains[half]
        return value if gain == 1.0 else value * T.float32(gain)

    def _as_float(self, register: Expr) -> Expr:
        return T.Cast("float32", T.reinterpret(register, dtype="int32")) if self.spec.integer else register
