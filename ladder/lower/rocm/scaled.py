"""Block-scaled products of gfx950: codes and scales go from memory to the matrix cores' registers.

``out^T = W · x^T`` by ``v_mfma_scale_f32_16x16x128_f8f6f4``: of 4-bit floats, lane l holds 32 neighbours of
row ``l % 16``, from element ``32 (l // 16)`` of a span of 128 on: a block with one scale. Of the result it
holds weight rows ``4 (l // 16) + i`` of activation row ``l % 16`` (AMD Instinct CDNA4 ISA, "Matrix
fused-multiply-add with block exponent scaling"). Waves of a block have weight rows of their own, or share
K and add up through LDS. No such kernel has run on hardware yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.scaled import ScaledGemm
from ladder.lower import builder as b
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.machine import join_bfloat
from schedules.schedule import check
from schedules.wave_scaled import FRAGMENT, LANES, SPAN, WAVES, WaveScaledSchedule, check_legal
from targets import TileDevice

Expr = Any

INSTRUCTION = "llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4"

FP4 = 4
"""The instruction's number of e2m1."""

CHUNK = 16
"""Bytes of a lane's operand."""

ROWS = 128
"""Rows of an atom of scales; see `schedules.scaled.place_scales`."""

RUN = 4
"""Neighbouring weight rows whose sums a lane holds."""


def emit(form: ScaledGemm, device: TileDevice, schedule: WaveScaledSchedule, name: str) -> Any:
    """Emit the kernel ``name``.

    It takes uint8 x ``[M, row bytes]`` and its scales ``[atoms, groups of four, 512]``, the weight's, float32
    factor ``[1]``, perhaps a bias ``[N]``, and the result ``[M, N]``.
    Raises DeviceError or ScheduleError if the device or the schedule does not fit.
    """
    check_legal(form, device)
    check(isinstance(schedule, WaveScaledSchedule), f"no schedule of AMD GPUs: {schedule}")
    with b.function(name) as kernel:
        _Body(form, device, schedule).emit()
    return kernel.func


@dataclass(frozen=True)
class _Side:
    """One operand as a wave reads it.

    codes, scales: Its tensors.
    rows: The row of each fragment that this lane reads, none beyond the last.
    """

    codes: Any
    scales: Any
    rows: tuple[Expr, ...]

    def load(self, chunk: Expr, span: Expr, group: Expr, held: Any, at: int) -> None:
        """Load what a span needs: four words of codes and a scale for each fragment, from word ``at`` on."""
        for index, row in enumerate(self.rows):
            word = at + 5 * index
            codes = self.codes[row, d.lanes(chunk * CHUNK, CHUNK)]
            b.store(held, d.as_type(codes, "uint32x4"), d.lanes(word, RUN))
            byte = row % 32 * 16 + row % ROWS // 32 * 4 + group
            b.store(held, T.Cast("uint32", self.scales[row // ROWS, span, byte]), word + RUN)


class _Body:
    """Emits one kernel."""

    def __init__(self, form: ScaledGemm, device: TileDevice, schedule: WaveScaledSchedule) -> None:
        self.form, self.device, self.schedule = form, device, schedule
        m, n, row_bytes, x_atoms, w_atoms, groups = (
            b.symbol(name) for name in ("M", "N", "row_bytes", "x_atoms", "w_atoms", "groups")
        )
        self.m, self.n, self.row_bytes = m, n, row_bytes
        self.x = b.tensor("x", (m, row_bytes), "uint8")
        self.x_scales = b.tensor("x_scales", (x_atoms, groups, 512), "uint8")
        self.w = b.tensor("w", (n, row_bytes), "uint8")
        self.w_scales = b.tensor("w_scales", (w_atoms, groups, 512), "uint8")
        self.factor = b.tensor("factor", (1,), "float32", align=4)
        self.bias = b.tensor("bias", (n,), form.output, align=4) if form.bias else None
        self.y = b.tensor("y", (m, n), form.output)
        n_tiles, m_tiles = (
            (n + schedule.rows - 1) // schedule.rows,
            (m + schedule.tile_m - 1) // schedule.tile_m,
        )
        block, thread = d.launch(n_tiles * m_tiles, WAVES * LANES)
        self.lane, self.wave = b.bind(thread % LANES), b.bind(thread // LANES)
        self.slice = b.bind(self.wave % schedule.split_k)
        own = self.wave // schedule.split_k * (FRAGMENT * schedule.row_steps)
        self.first_n = b.bind(block % n_tiles * schedule.rows + own)
        self.first_m = b.bind(block // n_tiles * schedule.tile_m)
        self.group = b.bind(self.lane // FRAGMENT)

    def emit(self) -> None:
        """Emit the walk over K, the joining of sums and the stores."""
        s = self.schedule
        shared = d.shared(s.shared_words)
        count = s.row_steps * s.m_steps
        sums = [b.local(RUN, "float32") for _ in range(count)]
        for each in sums:
            b.store(each, T.Broadcast(T.float32(0), RUN), d.lanes(0, RUN))
        self._walk(sums)
        if s.split_k > 1:
            self._join(shared, sums)
        with b.when(self.slice == 0):
            self._store(sums)

    # ---- over K ----------------------------------------------------------------------
    def _sides(self) -> tuple[_Side, _Side]:
        """Return the weight's side and that of x."""
        row, s = self.lane % FRAGMENT, self.schedule
        w_rows = (self.first_n + FRAGMENT * i + row for i in range(s.row_steps))
        x_rows = (self.first_m + FRAGMENT * i + row for i in range(s.m_steps))
        return (
            _Side(self.w, self.w_scales, tuple(b.bind(T.min(each, self.n - 1)) for each in w_rows)),
            _Side(self.x, self.x_scales, tuple(b.bind(T.min(each, self.m - 1)) for each in x_rows)),
        )

    def _walk(self, sums: list[Any]) -> None:
        """Multiply all spans, loading two turns of them alternately into two sets of registers."""
        s, sides = self.schedule, self._sides()
        spans = b.bind((self.row_bytes + SPAN // 2 - 1) // (SPAN // 2))
        turn = s.split_k * s.ahead
        pairs = b.bind((spans + 2 * turn - 1) // (2 * turn))
        words = 5 * (s.row_steps + s.m_steps)
        held = [[b.local(words, "uint32") for _ in range(s.ahead)] for _ in range(2)]

        def fetch(number: Expr, half: int) -> None:
            for index, registers in enumerate(held[half]):
                self._fetch(
                    sides, b.bind((number * s.split_k + self.slice) * s.ahead + index), spans, registers
                )

        fetch(T.int32(0), 0)
        with b.loop(pairs, rolled=True) as pair:
            for half in range(2):
                fetch(2 * pair + half + 1, 1 - half)
                d.schedule_fence()
                for registers in held[half]:
                    self._multiply(registers, sums)

    def _fetch(self, sides: tuple[_Side, _Side], span: Expr, spans: Expr, registers: Any) -> None:
        """Load a span of both operands; of what lies beyond K the weight is zero."""
        s, chunks = self.schedule, self.row_bytes // CHUNK
        real = T.min(span, spans - 1)
        chunk = b.bind(real * 4 + self.group)
        place = b.bind(T.min(chunk, chunks - 1))
        sides[0].load(place, real, self.group, registers, 0)
        sides[1].load(place, real, self.group, registers, 5 * s.row_steps)
        exists = b.bind(T.And(span < spans, chunk < chunks))
        for index in range(s.row_steps):
            for word in range(5 * index, 5 * index + 5):
                b.store(registers, T.Select(exists, registers[word], T.uint32(0)), word)

    def _multiply(self, registers: Any, sums: list[Any]) -> None:
        """Issue the products of all fragments of a span."""
        s = self.schedule
        for row_step in range(s.row_steps):
            for m_step in range(s.m_steps):
                a, x = 5 * row_step, 5 * (s.row_steps + m_step)
                operands = (
                    d.as_type(d.vector([registers[at + i] for i in range(RUN)]), "int32x4") for at in (a, x)
                )
                total = sums[row_step * s.m_steps + m_step]
                scales = [d.as_type(registers[at + RUN], "int32") for at in (a, x)]
                zero, kind = T.int32(0), T.int32(FP4)
                done = d.cross_lane(
                    "float32x4", INSTRUCTION, *operands, total[d.lanes(0, RUN)], kind, kind,
                    zero, scales[0], zero, scales[1],
                )  # fmt: skip
                b.store(total, done, d.lanes(0, RUN))

    # ---- results ---------------------------------------------------------------------
    def _join(self, shared: Any, sums: list[Any]) -> None:
        """Add the sums of waves that share K to those of the first of them."""
        s, count = self.schedule, len(sums)
        others = s.split_k - 1
        slot = self.wave // s.split_k * others

        def place(number: Expr, index: int) -> Expr:
            return d.lanes((((slot + number) * count + index) * LANES + self.lane) * RUN, RUN)

        with b.when(self.slice > 0):
            for index, each in enumerate(sums):
                value = d.as_type(each[d.lanes(0, RUN)], "uint32x4")
                b.store(shared, value, place(self.slice - 1, index))
        d.block_sync(self.device)
        with b.when(self.slice == 0):
            for number in range(others):
                for index, each in enumerate(sums):
                    value = d.as_type(shared[place(number, index)], "float32x4")
                    b.store(each, each[d.lanes(0, RUN)] + value, d.lanes(0, RUN))

    def _store(self, sums: list[Any]) -> None:
        """Scale, round and store: four weight rows of an activation row at once where rows are aligned."""
        s, factor = self.schedule, b.bind(self.factor[0])
        for index, each in enumerate(sums):
            m = b.bind(self.first_m + index % s.m_steps * FRAGMENT + self.lane % FRAGMENT)
            n = b.bind(self.first_n + index // s.m_steps * FRAGMENT + self.group * RUN)
            with b.when(m < self.m):
                self._store_run(each, factor, m, n)

    def _store_run(self, sums: Any, factor: Expr, m: Expr, n: Expr) -> None:
        def value(i: int) -> Expr:
            total = sums[i] * factor
            return total if self.bias is None else total + T.Cast("float32", self.bias[n + i])

        def whole() -> None:
            values = [b.bind(value(i)) for i in range(RUN)]
            b.store(self.y, self._joined(values), m, d.lanes(n, RUN))

        def single() -> None:
            for i in range(RUN):
                with b.when(n + i < self.n):
                    b.store(self.y, T.Cast(self.form.output, value(i)), m, n + i)

        b.either(T.And(self.n % RUN == 0, n + RUN <= self.n), whole, single)

    def _joined(self, values: list[Expr]) -> Expr:
        """Return float32 values as a vector of the output type."""
        if self.form.output == "bfloat16":
            words = [join_bfloat(*values[i : i + 2]) for i in range(0, RUN, 2)]
            return d.as_type(d.vector(words), "bfloat16x4")
        narrow: Callable[[Expr], Expr] = (
            (lambda each: each) if self.form.output == "float32" else lambda each: T.Cast("float16", each)
        )
        return d.vector([narrow(each) for each in values])
