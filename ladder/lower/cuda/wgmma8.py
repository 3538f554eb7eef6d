"""The sm_90a pipeline for 8-bit cores: integer sums as they are, others promoted to float32.

Group scales apply to accumulators, and fp8 tensor cores keep few bits of long sums: so
every interval of K is summed apart and added, scaled, to totals that stay in registers
(`wgmma8_plan` says which products run when).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cuda import wgmma_epilogue
from ladder.lower.cuda.wgmma import INSTRUCTIONS, Kernel, pin_registers
from ladder.lower.cuda.wgmma8_plan import STEP, Loop, Unit
from ladder.lower.cuda.wgmma_decode import ScaledDecoder
from ladder.lower.cuda.wgmma_geometry import Geometry
from ladder.lower.gpu.decode import make_decoder
from ladder.lower.gpu.instructions import PTX_FP8
from schedules.layouts import TILE
from schedules.schedule import GpuSchedule, check
from targets import TileDevice

Expr = Any
Step = Callable[[], None]


def _nothing() -> None:
    """Do nothing."""


def wgmma_kernel(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Kernel:
    """Return what emits a problem's kernel.

    Raises
    ------
    ScheduleError
        If the device has no wgmma or the schedule does not fit.
    """
    from ladder.lower.cuda.wgmma_carry import CarryKernel

    check("wgmma" in device.features, f"{device.name} has no wgmma; use the 'mma' pipeline")
    geo = Geometry(gemm, schedule)
    if geo.carries:
        return CarryKernel(gemm, device, schedule)
    return (ByteKernel if geo.lane == 8 else Kernel)(gemm, device, schedule)


class ByteKernel(Kernel):
    """A kernel whose operands have eight bits."""

    def _choose_decoder(self) -> ScaledDecoder:
        """Leave gains to the sums; offsets and zero points would need the sums of X as well."""
        raw = make_decoder(self.gemm, self.device, "accumulator", table=self.geo.table_bytes)
        zeros_left = self.gemm.zero != "none" and not raw.subtracts_zeros
        if zeros_left or any(raw.offsets):
            raw = make_decoder(self.gemm, self.device, table=self.geo.table_bytes)
        return ScaledDecoder(raw)

    def _allocate(self) -> None:
        geo = self.geo
        self.plan = Loop(geo)
        self.units = self.plan.units()
        kind = "uint32" if self.integer else "float32"
        self.banks = [b.local(self.plan.bank_registers, kind) for _ in range(self.plan.banks)]
        self.total = b.local(geo.m64 * geo.accumulators, "float32") if geo.promotes else None
        self._allocate_operands(self.plan.operand_sets)
        # Scales of the units in flight: rows g and g+8 of each bank.
        self.pending = b.local(2 * self.plan.banks, "float32")
        # Scales of groups of tokens: of the unit that is promoted next, and of the one after it.
        grouped = 2 if self.gemm.token_group else 0
        self.factors = [wgmma_epilogue.PerToken(self, self.plan.unit_tokens) for _ in range(grouped)]
        # The stage that products read; the ring's own is being decoded.
        self.multiplied = b.Variable("int32", 0)
        if self._alternates:
            # By a shuffle, after which ptxas knows that it is the same in all lanes.
            every, group = T.uint32(0xFFFFFFFF), T.Cast("int32", self.group_index)
            self.seat = b.keep(T.tvm_warp_shuffle(every, group, 0, 32, 32))
            with b.when(self.seat == 1):
                self._yield_core()

    @property
    def _alternates(self) -> bool:
        """Whether two warpgroups take turns at the tensor core: one promotes while the other multiplies.

        Left alone they fall into step: both wait for products that run at half speed, then both promote.
        It pays (1 to 3 %) where operands are decoded in that time too.
        """
        decodes = self.plan.parted and self.gemm.scale
        return self.geo.warpgroups == 2 and decodes and all(unit.done for unit in self.units)

    def _take_core(self) -> None:
        """Wait until the other warpgroup's products end (named barriers 1 and 2)."""
        b.emit(T.ptx.bar.sync(T.Cast("uint32", 1 + self.seat), T.uint32(256)))

    def _yield_core(self) -> None:
        """Let the other warpgroup start its products."""
        b.emit(T.ptx.bar.arrive(T.Cast("uint32", 2 - self.seat), T.uint32(256)))

    def _clear_totals(self) -> None:
        for index in range(self.geo.m64 * self.geo.accumulators if self.geo.promotes else 0):
            b.store(self.total, T.float32(0), index)

    def _tile(self, row_tile: Expr, token: Expr) -> None:
        self._clear_totals()
        early = not self.plan.parted
        held = wgmma_epilogue.row_values(self, row_tile, token) if early else {}
        self.token = token
        self._load_factors(0, 0)
        self._first_slab()
        self._decode_share(0, range(self._items))
        if self.plan.long and self.geo.promotes:
            count = self.plan.turns
            with b.loop((self.turns + count - 1) // count) as interval:
                self._run(interval * count, T.min(self.turns - interval * count, count))
                for index in range(self.plan.bank_registers):
                    b.store(self.total, self.total[index] + self._sum_in(self.units[-1], index), index)
        else:
            self._run(0, self.turns)
        self.ring.advance()
        held = held if early else wgmma_epilogue.row_values(self, row_tile, token)
        wgmma_epilogue.finish_tile(self, row_tile, token, held)

    def _run(self, first: Expr, count: Expr) -> None:
        """Run turns ``first .. first+count``; products of one may still run while the next begins."""
        with b.loop(count) as number:
            self._turn(first + number, number)
        if self.plan.long:
            self._finish(self.units[-1])
            for bank in self.banks:
                pin_registers(bank, self.plan.bank_registers)

    def _turn(self, turn: Expr, number: Expr) -> None:
        """Start all units of a turn, each before the one ahead of it is promoted.

        ``number`` counts the turns since sums were cleared.
        """
        shares = self._shares()
        running = self.units[-1] if self.plan.long else None
        for index, unit in enumerate(self.units):
            share = shares[index % len(shares)]
            if index % len(shares) == 0:
                self._enter_slab(unit.slab)
            self._start(number, unit)
            if running:
                self._wait_products(1)
                self._release_after(running, True if index else number > 0)
            # The loads' latency hides behind the promotion.
            fetch = partial(self._fetch_share, turn, unit.slab + 1, share)
            decode = partial(self._decode_share, unit.slab + 1, share)
            late = self.plan.parted
            if not late:
                fetch()
            self._remember_scales(unit)
            if running:
                self._promote(running)
            self._load_factors(turn, index + 1)
            if not late:
                decode()
            running = unit
            # ptxas serialises sums that are in flight across a loop's back edge and also
            # read by ordinary instructions, so each turn finishes what it started.
            last = index == len(self.units) - 1
            if not self.plan.long and (last or (unit.done and self.plan.drains)):
                self._finish(unit, (fetch, decode) if late else (_nothing, _nothing))
                running = None

    def _finish(self, unit: Unit, around: tuple[Step, Step] = (_nothing, _nothing)) -> None:
        """Wait for all products and promote those of the last unit; do something before and after that."""
        if self._alternates:
            # The last step of this unit runs while the other warpgroup starts.
            self._wait_products(1)
            self._yield_core()
        self._wait_products(0)
        around[0]()
        self.previous.set(self.multiplied.value)
        self._release_after(unit)
        self._promote(unit)
        around[1]()

    def _wait_products(self, pending: int) -> None:
        b.emit(T.ptx.wgmma.wait_group.sync.aligned(pending))

    def _enter_slab(self, slab: int) -> None:
        """Note from which stage the products of a slab read."""
        if slab % self.geo.slabs == 0:
            self.previous.set(self.multiplied.value)
            self.multiplied.set(self.ring.stage.value)

    # ---- decoding ahead -------------------------------------------------------------
    @property
    def _items(self) -> int:
        """Packed tiles of a slab and warpgroup."""
        return self.geo.m64 * self.geo.tiles_per_slab

    def _shares(self) -> list[range]:
        """Return which packed tiles of the next slab each unit of a slab decodes."""
        units, items = len(self.units) // self.geo.body, self._items
        if self.plan.parted:
            return [range(0)] * (units - 1) + [range(items)]
        bounds = [-(-items * unit // units) for unit in range(units + 1)]
        return [range(bounds[unit], bounds[unit + 1]) for unit in range(units)]

    def _fetch_share(self, turn: Expr, slab: int, share: range) -> None:
        if not share:
            return
        if share.start == 0 and slab % self.geo.slabs == 0:
            self._enter_stage(turn, slab)
        within = slab % self.geo.slabs
        for item in share:
            m, tile = divmod(item, self.geo.tiles_per_slab)
            place = within * self.geo.tiles_per_slab + tile
            self._load_words(self.tile_words[m], tile * self.geo.bits, m, place)
            if tile == 0:
                self._fetch_rows(m, slab % self.geo.body)
        if self.plan.parted:
            # A tile's last fetch is in vain, and of the stage that is freed next.
            b.emit(T.cuda.warp_sync())

    def _decode_share(self, slab: int, share: range) -> None:
        for item in share:
            m, tile = divmod(item, self.geo.tiles_per_slab)
            words = [self.tile_words[m][tile * self.geo.bits + i] for i in range(self.geo.bits)]
            self._decode_tile(words, m, tile, slab % self.plan.operand_sets)
            # Here, while products run, and not when the next ones need them.
            count = 16 // self.geo.tiles_per_slab
            first = (slab % self.plan.operand_sets * self.geo.m64 + m) * 16 + tile * count
            pin_registers(self.operands, count, first)

    # ---- products -------------------------------------------------------------------
    def _start(self, number: Expr, unit: Unit) -> None:
        """Start a unit's products as one group; ``number`` counts turns since sums were cleared."""
        bank = self.banks[unit.bank]
        sums = [bank[i] for i in range(self.plan.bank_registers)]
        within = unit.slab % self.geo.slabs
        if self._alternates:
            self._take_core()
        b.emit(T.ptx.wgmma.fence.sync.aligned())
        for step in range(unit.start // STEP, -(-unit.end // STEP)):
            first = unit.fresh and step == unit.start // STEP
            adds = number > 0 if first and self.plan.long else not first
            registers = self._registers(unit, step)
            if self._alternates and step == -(-unit.end // STEP) - 1:
                b.emit(T.ptx.wgmma.commit_group.sync.aligned())
            self._multiply(sums, registers, self.multiplied.value, within, step, unit.tokens, adds)
        b.emit(T.ptx.wgmma.commit_group.sync.aligned())

    def _multiply(
        self, sums: list[Expr], registers: list[Expr], stage: Expr, within: int, step: int, token: int,
        accumulate: Expr,
    ) -> None:  # fmt: skip
        """Start one product with the tokens from ``token`` on of step ``step`` of a slab."""
        spelling = INSTRUCTIONS[self.gemm.activation].format(
            n=2 * len(sums), w=PTX_FP8.get(self.decoder.operand, "")
        )
        descriptor = self._descriptor(stage, within, step, token)
        modifiers = () if self.integer else (1, 1)
        adds = T.bool(accumulate) if isinstance(accumulate, bool) else accumulate
        b.ptx(spelling, *sums, *registers, descriptor, adds, *modifiers)

    def _registers(self, unit: Unit, step: int) -> list[Expr]:
        """Return a step's operand; a group of 16 takes half of it, and zeros for the rest."""
        base = (unit.slab % self.plan.operand_sets * self.geo.m64 + unit.m) * 16 + step * 4
        registers = [self.operands[base + i] for i in range(4)]
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
            gain = T.float32(self.decoder.decoder.gains[half])
            b.store(self.pending, self._scale(unit, half) * gain, 2 * unit.bank + half)

    def _scale(self, unit: Unit, half: int) -> Expr:
        """Return the scale of row g or g+8 that holds at the end of a unit."""
        row = (unit.slab % self.geo.slabs * self.geo.slab + unit.start) // self.geo.scale_step
        low = self._row_tile(unit.m) * TILE + self.warp * 16 + self.lane // 4
        return self.scales[self.multiplied.value, row * self.schedule.tile_n + low + half * 8]

    def _load_factors(self, turn: Expr, index: int) -> None:
        """Load the scales of the groups of tokens of a turn's unit, or of the next turn's first."""
        if not self.factors:
            return
        unit = self.units[index % len(self.units)]
        k = (turn + index // len(self.units)) * self.plan.turn + unit.slab * self.geo.slab + unit.start
        group = T.truncdiv(self.first_tile * TILE + k, self.gemm.token_group)
        last = self.args.token_scale.shape[1] - 1
        self.factors[index % 2].load(self.token + unit.tokens, b.keep(T.min(group, last)))

    def _release_after(self, unit: Unit, ran: Expr = True) -> None:
        """Free the previous stage if it ends with a finished unit, which did run."""
        following = self.units[(self.units.index(unit) + 1) % len(self.units)]
        if following.slab != unit.slab and following.slab % self.geo.slabs == 0:
            with b.when(ran):
                self._release()

    def _promote(self, unit: Unit) -> None:
        """Add a finished unit's sums, scaled, to the totals, if its interval ends."""
        if not unit.done:
            return
        pin_registers(self.banks[unit.bank], self.plan.bank_registers)
        for factors in self.factors:
            factors.forget()
        first = unit.m * self.geo.accumulators + unit.tokens // 2
        for index in range(self.plan.bank_registers):
            value = self.total[first + index] + self._sum_in(unit, index)
            b.store(self.total, value, first + index)
        # The compiler would put the additions off, and keep copies of the sums meanwhile.
        pin_registers(self.total, self.plan.bank_registers, first)

    def _sum_in(self, unit: Unit, index: int) -> Expr:
        """Return a register of a unit's sums, scaled, as float32."""
        value, half = self._as_float(self.banks[unit.bank][index]), index // 2 % 2
        if self.factors:
            value = value * self.factors[self.units.index(unit) % 2][index]
        if self.scales is not None:
            return value * self.pending[2 * unit.bank + half]
        gain = self.decoder.decoder.gains[half]
        return value if gain == 1.0 else value * T.float32(gain)

    def _as_float(self, register: Expr) -> Expr:
        """Return a sum as float32."""
        return T.Cast("float32", T.reinterpret(register, dtype="int32")) if self.integer else register

    def partial_sum(self, position: int) -> Expr:
        """Return a register of an unpromoted sum as float32."""
        bank, index = divmod(position, self.plan.bank_registers)
        return self._as_float(self.banks[bank][index]) * T.float32(self.decoder.decoder.gains[index // 2 % 2])
