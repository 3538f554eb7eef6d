"""Block-scaled products of gfx950: codes and scales go from memory to the matrix cores' registers.

``out^T = W · x^T`` by ``v_mfma_scale_f32_16x16x128_f8f6f4``: of a span of 128 codes lane l holds 32 of row
``l % 16`` (`schedules.wave_scaled.LAYOUTS`) and the scale of block ``l // 16``. Of the result it holds weight
rows ``4 (l // 16) + i`` of activation row ``l % 16`` (AMD Instinct CDNA4 ISA, "Matrix fused-multiply-add with
block exponent scaling"). Waves of a block have weight rows of their own, or share K and add up through LDS.
No such kernel has run on hardware yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.scaled import ScaledGemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.results import store_run
from schedules.schedule import check
from schedules.wave_scaled import (
    FRAGMENT,
    LANES,
    LAYOUTS,
    WAVES,
    Layout,
    WaveScaledSchedule,
    check_legal,
    held_words,
)
from targets import TileDevice

INSTRUCTION = "llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4"

ROWS = 128
"""Rows of an atom of scales; see `schedules.scaled.place_scales`."""

RUN = 4
"""Neighbouring weight rows whose sums a lane holds."""


def emit(form: ScaledGemm, device: TileDevice, schedule: WaveScaledSchedule, name: str) -> Any:
    """Emit the kernel ``name``.

    It takes uint8 x ``[M, bytes]`` and its scales ``[atoms, groups of four, 512]``, the weight's, float32
    factor ``[1]``, perhaps a bias ``[N]``, and the result ``[M, N]``.
    Raises DeviceError or ScheduleError if the device or the schedule does not fit.
    """
    check(isinstance(schedule, WaveScaledSchedule), f"no schedule of AMD GPUs: {schedule}")
    check_legal(form, device, schedule)
    with b.function(name) as kernel:
        _Body(form, device, schedule).emit()
    return kernel.func


@dataclass(frozen=True)
class _Side:
    """One operand as a wave reads it.

    codes, scales, row_bytes: Its tensors, and the bytes of a row of codes.
    rows: The row of each fragment that this lane reads, none beyond the last.
    first: Its first word among those that are held of a span.
    must_vanish: Whether its codes are made zeros beyond K.
    """

    layout: Layout
    codes: Any
    scales: Any
    row_bytes: Expr
    rows: tuple[Expr, ...]
    first: int
    must_vanish: bool

    def word(self, index: int) -> int:
        """Return the first word of a fragment: its codes, then its scale."""
        return self.first + (self.layout.words + 1) * index

    def load(self, span: Expr, exists: Expr, group: Expr, held: Any) -> None:
        """Load a lane's codes and scales of a span for all fragments; ``exists``: whether it is one of K."""
        run, wide = self.layout.run, self.layout.run // 4
        count = RUN if wide % RUN == 0 else 2  # words that lie at multiples of themselves
        last = self.row_bytes // run - 1
        for part in range(self.layout.runs // 4):
            wanted = b.bind(span * self.layout.runs + (part * 4 + group))
            place, is_real = b.bind(T.min(wanted, last)), b.bind(T.And(exists, wanted <= last))
            for index, row in enumerate(self.rows):
                word = self.word(index) + part * wide
                for at in range(0, wide, count):
                    codes = self.codes[row, d.lanes(place * run + 4 * at, 4 * count)]
                    b.store(held, d.as_type(codes, f"uint32x{count}"), d.lanes(word + at, count))
                for at in range(wide if self.must_vanish else 0):
                    b.store(held, T.Select(is_real, held[word + at], T.uint32(0)), word + at)
        for index, row in enumerate(self.rows):
            byte = row % 32 * 16 + row % ROWS // 32 * 4 + group
            scale = T.Cast("uint32", self.scales[row // ROWS, span, byte])
            b.store(held, scale, self.word(index) + self.layout.words)

    def operand(self, held: Any, index: int) -> Expr:
        """Return a fragment's codes as the instruction takes them."""
        first, words = self.word(index), self.layout.words
        return d.as_type(d.vector([held[first + i] for i in range(words)]), f"int32x{words}")

    def scale(self, held: Any, index: int) -> Expr:
        """Return the register of a fragment's scales."""
        return d.as_type(held[self.word(index) + self.layout.words], "int32")


def _operand(name: str, rows: Expr) -> tuple[Any, Any]:
    """Declare the codes ``[rows, bytes]`` of an operand and their scales ``[atoms, groups of four, 512]``."""
    row_bytes, atoms, groups = (b.symbol(f"{name}_{extent}") for extent in ("bytes", "atoms", "groups"))
    return b.tensor(name, (rows, row_bytes), "uint8"), b.tensor(
        f"{name}_scales", (atoms, groups, 512), "uint8"
    )


class _Body:
    """Emits one kernel."""

    def __init__(self, form: ScaledGemm, device: TileDevice, schedule: WaveScaledSchedule) -> None:
        self.form, self.device, self.schedule = form, device, schedule
        self.m, self.n = m, n = b.symbol("M"), b.symbol("N")
        self.x, self.x_scales = _operand("x", m)
        self.w, self.w_scales = _operand("w", n)
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
        s, form = self.schedule, self.form
        # Infinity times a zero beyond K is no number: x is then to vanish too.
        infinite = form.activation == "mxfp8_e5m2"
        rows = self._rows(self.first_n, s.row_steps, self.n)
        w = _Side(LAYOUTS[form.weight], self.w, self.w_scales, self.w.shape[1], rows, 0, True)
        rows, first = self._rows(self.first_m, s.m_steps, self.m), s.row_steps * (w.layout.words + 1)
        layout = LAYOUTS[form.activation]
        return w, _Side(layout, self.x, self.x_scales, self.x.shape[1], rows, first, infinite)

    def _rows(self, start: Expr, steps: int, rows: Expr) -> tuple[Expr, ...]:
        """Return the row of each fragment from one on that this lane reads; the last one beyond it."""
        own = (start + (FRAGMENT * i + self.lane % FRAGMENT) for i in range(steps))
        return tuple(b.bind(T.min(each, rows - 1)) for each in own)

    def _walk(self, sums: list[Any]) -> None:
        """Multiply all spans, loading two turns of them alternately into two sets of registers."""
        s, sides = self.schedule, self._sides()
        length = sides[0].layout.span_bytes
        spans = b.bind((sides[0].row_bytes + length - 1) // length)
        turn = s.split_k * s.ahead
        pairs = b.bind((spans + 2 * turn - 1) // (2 * turn))
        words = held_words(self.form, s)
        held = [[b.local(words, "uint32") for _ in range(s.ahead)] for _ in range(2)]

        def fetch(number: Expr, half: int) -> None:
            for index, registers in enumerate(held[half]):
                span = b.bind((number * s.split_k + self.slice) * s.ahead + index)
                real, exists = b.bind(T.min(span, spans - 1)), b.bind(span < spans)
                for side in sides:
                    side.load(real, exists, self.group, registers)

        fetch(T.int32(0), 0)
        with b.loop(pairs, rolled=True) as pair:
            for half in range(2):
                fetch(2 * pair + half + 1, 1 - half)
                d.schedule_fence()
                for registers in held[half]:
                    self._multiply(sides, registers, sums)

    def _multiply(self, sides: tuple[_Side, _Side], registers: Any, sums: list[Any]) -> None:
        """Issue the products of all fragments of a span."""
        kinds = [T.int32(side.layout.number) for side in sides]
        for number, total in enumerate(sums):
            steps = divmod(number, self.schedule.m_steps)
            operands = [side.operand(registers, step) for side, step in zip(sides, steps, strict=True)]
            scales = [side.scale(registers, step) for side, step in zip(sides, steps, strict=True)]
            zero = T.int32(0)
            done = d.cross_lane(
                "float32x4", INSTRUCTION, *operands, total[d.lanes(0, RUN)], *kinds,
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

        store_run(self.y, (m, n), RUN, value, lambda i: T.Cast(self.form.output, value(i)))
