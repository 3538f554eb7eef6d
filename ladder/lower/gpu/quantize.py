"""Dynamic activations: 8-bit codes and one scale per row of x, or per row and group of K.

A block owns a row. Each thread keeps its chunks of the row in registers between the search
for the largest magnitude and the rounding, so that x is read once; what a longer row has beyond
the registers is read again, from L2. Magnitudes compare as bit patterns: those of infinity and
NaN are above every finite one, so the largest tells whether the row is finite.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import SMALLEST_SCALE
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.dialect import Dialect
from schedules.quantization import CHUNK, WARP, Quantization
from schedules.schedule import check

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Types of x, and their bytes."""

MAGNITUDE, INFINITY, NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000
"""float32 bits: all but the sign, and what the names say."""

ROUNDER = 1.5 * 2.0**23
"""Its float32 sum with a small number has the nearest integer, ties to even, in its low bits."""


class Quantizer:
    """One kernel being emitted: ``(x[M,K], codes[M,K], token_scale)``, generic in M and K.

    ``token_scale`` is float32 ``[M]``, or ``[M, ceil(K / group)]``. ``scale`` is the largest
    magnitude of the row (or group) over `Quantization.limit`, at least 2**-126, and ``codes`` is
    ``x * (1 / scale)`` in float32, rounded to nearest even. Infinity or NaN give the scale NaN, so
    that every product with it is NaN; codes are unspecified then.
    """

    def __init__(self, plan: Quantization, dialect: Dialect) -> None:
        self.warp = dialect.wave
        whole = f"a row takes whole waves of {self.warp} lanes, got {plan.threads} threads"
        check(plan.threads % self.warp == 0, whole)
        self.plan, self.dialect = plan, dialect
        m, self.k = b.symbol("M"), b.symbol("K")
        groups = b.symbol("groups")
        self.x = b.tensor("x", (m, self.k), plan.source)
        self.codes = b.tensor("codes", (m, self.k), b.tir_name(plan.activation))
        shape = (m, groups) if plan.group else (m,)
        self.scales = b.tensor("token_scale", shape, "float32", align=4)
        self.row, self.thread = dialect.start(m, plan.threads, WARP, [])
        self.whole = self.k % CHUNK == 0
        self.per_word = 4 // ITEM_BYTES[plan.source]
        self.values = [self._registers() for _ in range(plan.chunks)]

    # ---- the kernel ---------------------------------------------------------------------
    def _registers(self) -> Any:
        """Allocate registers for one chunk, as loaded."""
        return b.local(CHUNK // self.per_word, "uint32")

    def emit(self) -> None:
        if self.plan.group:
            self._each_chunk(self._quantize_group)
        else:
            self._quantize_row()

    # ---- walks over the row -----------------------------------------------------------
    def _column(self, turn: Expr) -> Expr:
        return b.bind((turn * self.plan.threads + self.thread) * CHUNK)

    def _each_chunk(self, body: Any) -> None:
        """Emit ``body(values, column)`` for every chunk of the thread, loaded in its turn."""
        step = self.plan.threads * CHUNK
        with b.loop((self.k + step - 1) // step) as turn:
            column = self._column(turn)
            self._load(self.values[0], column)
            body(self.values[0], column)

    def _quantize_row(self) -> None:
        """Find the row's scale and round, keeping what fits into registers in between."""
        plan, step = self.plan, self.plan.threads * CHUNK
        best = b.Variable("uint32", T.uint32(0))
        for index, values in enumerate(self.values):
            self._load(values, self._column(index))
        for index, values in enumerate(self.values):
            with b.when(self._column(index) < self.k):
                best.set(self._largest(values, best.value))
        turns = b.keep((self.k + step - 1) // step)
        rest = self._registers()
        with b.loop(turns, plan.chunks) as turn:
            self._load(rest, self._column(turn))
            best.set(self._largest(rest, best.value))
        scale, inverse = self._scale(self._over_block(best.value))
        with b.when(self.thread == 0):
            b.store(self.scales, scale, self.row)
        for index, values in enumerate(self.values):
            self._store(values, self._column(index), inverse)
        with b.loop(turns, plan.chunks) as turn:
            column = self._column(turn)
            self._load(rest, column)
            self._store(rest, column, inverse)

    def _quantize_group(self, values: Any, column: Expr) -> None:
        """Find the scale of the group that neighbouring lanes hold, and round."""
        lanes = self.plan.group // CHUNK
        scale, inverse = self._scale(self._over_lanes(self._largest(values, T.uint32(0)), lanes))
        first = column % self.plan.group == 0
        with b.when(T.And(first, column < self.k)):
            b.store(self.scales, scale, self.row, column // self.plan.group)
        self._store(values, column, inverse)

    # ---- memory -----------------------------------------------------------------------
    def _load(self, values: Any, column: Expr) -> None:
        """Load one chunk; zeros beyond K."""
        words = CHUNK // self.per_word

        def vectors() -> None:
            for first in range(0, words, 4):
                place = self.row, column + first * self.per_word
                self.dialect.load(values, first, 4, self.x, place, once=True)

        def elements() -> None:
            for index in range(CHUNK):
                with b.when(column + index < self.k):
                    bits = T.reinterpret(f"uint{32 // self.per_word}", self.x[self.row, column + index])
                    shift = T.uint32(index % self.per_word * 16)
                    at = index // self.per_word
                    b.store(values, values[at] | T.Cast("uint32", bits) << shift, at)

        for index in range(words):
            b.store(values, T.uint32(0), index)
        b.either(T.And(self.whole, column < self.k), vectors, elements)

    def _value(self, values: Any, index: int) -> Expr:
        """Return one element of a chunk as float32."""
        word, high = values[index // self.per_word], index % self.per_word
        if self.plan.source == "float16":
            bits = T.Cast("uint16", word >> T.uint32(16 * high))
            return T.Cast("float32", T.reinterpret("float16", bits))
        if self.plan.source == "bfloat16":
            word = word & T.uint32(0xFFFF0000) if high else word << T.uint32(16)
        return T.reinterpret("float32", word)

    def _store(self, values: Any, column: Expr, inverse: Expr) -> None:
        """Round and store one chunk; nothing beyond K."""
        with b.when(column < self.k):
            self._store_within(values, column, inverse)

    def _store_within(self, values: Any, column: Expr, inverse: Expr) -> None:
        words = [self._word(values, first, inverse) for first in range(0, CHUNK, 4)]

        def vectors() -> None:
            self.dialect.store(self.codes, (self.row, column), words)

        def elements() -> None:
            for index in range(CHUNK):
                code = T.Cast("uint8", words[index // 4] >> T.uint32(index % 4 * 8))
                with b.when(column + index < self.k):
                    value = T.reinterpret(b.tir_name(self.plan.activation), code)
                    b.store(self.codes, value, self.row, column + index)

        b.either(self.whole, vectors, elements)

    # ---- arithmetic -------------------------------------------------------------------
    def _largest(self, values: Any, best: Expr) -> Expr:
        """Return the bits of the largest magnitude of a chunk and of ``best``."""
        for index in range(CHUNK):
            bits = T.reinterpret("uint32", self._value(values, index))
            best = T.max(best, b.bind(bits & T.uint32(MAGNITUDE)))
        return b.bind(best)

    def _over_block(self, best: Expr) -> Expr:
        """Return the largest of all threads; shared memory has room for that of each warp."""
        best = self._over_lanes(best, self.warp)
        warps = self.plan.threads // self.warp
        if warps == 1:
            return best
        lane, shared = b.bind(self.thread % self.warp), self.dialect.shared
        with b.when(lane == 0):
            b.store(shared, best, self.thread // self.warp)
        self.dialect.sync()
        return self._over_lanes(b.bind(shared[lane % warps]), 1 << (warps - 1).bit_length())

    def _scale(self, largest: Expr) -> tuple[Expr, Expr]:
        """Return the scale for a largest magnitude's bits, and its reciprocal."""
        ratio = T.reinterpret("float32", largest) / T.float32(self.plan.limit)
        nan = T.reinterpret("float32", T.uint32(NAN))
        finite = T.max(ratio, T.float32(SMALLEST_SCALE))
        scale = b.Variable("float32", T.Select(largest >= T.uint32(INFINITY), nan, finite)).value
        return scale, b.Variable("float32", T.float32(1) / scale).value

    def _word(self, values: Any, first: int, inverse: Expr) -> Expr:
        """Return four codes, the first in the low byte."""
        product, permute = self.dialect.functions["mul"], self.dialect.permute
        units = [b.bind(product(self._value(values, first + i), inverse)) for i in range(4)]
        if self.plan.activation == "int8":
            bits = [b.bind(T.reinterpret("uint32", unit + T.float32(ROUNDER))) for unit in units]
            pairs = [permute(bits[i], bits[i + 1], 0x0040) for i in (0, 2)]
        else:
            words = [b.bind(T.reinterpret("uint32", unit)) for unit in units]
            pairs = [self.dialect.narrow_pair(words[i], words[i + 1], self.plan.activation) for i in (0, 2)]
        return permute(pairs[0], pairs[1], 0x5410)

    def _over_lanes(self, value: Expr, lanes: int) -> Expr:
        """Return the largest of ``lanes`` neighbouring lanes, a power of two."""
        distance = 1
        while distance < lanes:
            value = b.bind(T.max(value, self.dialect.shuffle(value, distance, self.thread)))
            distance *= 2
        return value
