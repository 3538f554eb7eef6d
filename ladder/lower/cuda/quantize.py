"""Dynamic activations: 8-bit codes and one scale per token, or per token and group of K.

A block owns a token. Each thread keeps its chunks of the row in registers between the search
for the largest magnitude and the rounding, so that x is read once; what a longer row has beyond
the registers is read again, from L2. Magnitudes compare as bit patterns: those of infinity and
NaN are above every finite one, so the largest tells whether the row is finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import require_quantizable
from ladder.lower import builder as b
from ladder.lower.cuda.launch import Overlap
from ladder.lower.gpu.arguments import tir_name
from ladder.lower.gpu.emission import helper
from schedules.schedule import check
from targets import TileDevice
from tile_types import get_type

Expr = Any

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Types of x, and their bytes."""

CHUNK = 8
"""Neighbouring elements that a thread takes at a time: 8 bytes of codes."""

LOAD = "ld.global.L1::no_allocate.v4.u32"
"""x is read once. With ``.nc`` ptxas would move loads before `Overlap.wait`."""

WARP = 32

STEP_WARPS = 2
"""Warps by which blocks grow with K: few different kernels, few idle threads."""

MAGNITUDE, INFINITY, NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000
"""float32 bits: all but the sign, and what the names say."""

SMALLEST_SCALE = 2.0**-126
"""Scale of zeros: the least whose reciprocal is a normal number."""

ROUNDER = 1.5 * 2.0**23
"""Its float32 sum with a small number has the nearest integer, ties to even, in its low bits."""

NARROW_PAIR = {"fp8_e4m3": "cvt.rn.satfinite.e4m3x2.f32", "fp8_e5m2": "cvt.rn.satfinite.e5m2x2.f32"}
"""Two float32 to two 8-bit floats, rounded once (PTX ISA, cvt)."""


@dataclass(frozen=True)
class Quantization:
    """What a quantising kernel does, and how it is tiled.

    Parameters
    ----------
    source
        Element type of x, of `ITEM_BYTES`.
    activation
        ``"int8"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``.
    group
        Elements along K that share a scale: 0 for a whole row, else `CHUNK` times a power of
        two, at most 256.
    threads
        Threads per row, a multiple of 32.
    chunks
        Chunks that a thread keeps in registers.
    """

    source: str
    activation: str
    group: int = 0
    threads: int = 128
    chunks: int = 4

    def __post_init__(self) -> None:
        require_quantizable(self.source)
        check(
            self.threads % WARP == 0 and WARP <= self.threads <= 1024,
            f"a row takes 1 to 32 whole warps, got {self.threads} threads",
        )
        lanes = self.group // CHUNK
        check(
            self.group % CHUNK == 0 and lanes <= WARP and lanes & (lanes - 1) == 0,
            f"a group is {CHUNK} elements times a power of two up to {WARP}, got {self.group}",
        )

    @property
    def limit(self) -> float:
        """Largest magnitude of a code; int8 leaves -128 out, so that -x has minus the codes of x."""
        return 127.0 if self.activation == "int8" else get_type(self.activation).max_abs


def tiled(source: str, activation: str, group: int, k: int) -> Quantization:
    """Return the quantisation whose threads hold a row of ``k`` elements and little more.

    Measured on an H200 for K = 4096 ... 28672 and M = 1 ... 4096: two chunks per thread, four where
    that takes more than 512 threads; groups need one.
    """
    chunks = 1 if group else 2 if k <= 2 * CHUNK * 512 else 4
    step = WARP * STEP_WARPS
    threads = -(-k // (CHUNK * chunks * step)) * step
    return Quantization(source, activation, group, min(threads, 512 if group else 1024), chunks)


def emit(plan: Quantization, device: TileDevice, name: str) -> Any:
    """Emit ``(x[M,K], codes[M,K], token_scale)``, generic in M and K.

    ``token_scale`` is float32 ``[M]``, or ``[M, ceil(K / group)]``. ``scale`` is the largest
    magnitude of the row (or group) over `Quantization.limit`, at least 2**-126, and ``codes`` is
    ``x * (1 / scale)`` in float32, rounded to nearest even. Infinity or NaN give the scale NaN, so
    that every product with it is NaN; codes are unspecified then.

    Raises
    ------
    ConversionError
        If the device does not multiply the type.
    """
    device.core_for(plan.activation)
    with b.function(name) as result:
        _Quantizer(plan, Overlap(device)).emit()
    return result.func


class _Quantizer:
    """One kernel being emitted."""

    def __init__(self, plan: Quantization, overlap: Overlap) -> None:
        self.plan, self.overlap = plan, overlap
        m, self.k = b.symbol("M"), b.symbol("K")
        groups = b.symbol("groups")
        self.x = b.tensor("x", (m, self.k), plan.source)
        self.codes = b.tensor("codes", (m, self.k), tir_name(plan.activation))
        shape = (m, groups) if plan.group else (m,)
        self.scales = b.tensor("token_scale", shape, "float32", align=4)
        overlap.declare("blockIdx.x", "threadIdx.x")
        b.device()
        (self.row,) = b.block_index([m])
        self.thread = b.thread_index(plan.threads)
        self.whole = self.k % CHUNK == 0
        self.per_word = 4 // ITEM_BYTES[plan.source]
        self.values = [self._registers() for _ in range(plan.chunks)]

    def _registers(self) -> Any:
        """Allocate registers for one chunk, as loaded."""
        return b.local(CHUNK // self.per_word, "uint32")

    def emit(self) -> None:
        """Emit the whole body."""
        pool = b.shared_pool()
        self.warp_largest = pool.alloc((WARP,), "uint32", align=128)
        pool.commit()
        self.overlap.release()
        self.overlap.wait()
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
        scale, inverse = self._scale(_over_lanes(self._largest(values, T.uint32(0)), lanes))
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
                targets = (values[first + i] for i in range(4))
                b.ptx(LOAD, *targets, self.x.ptr_to([self.row, column + first * self.per_word]))

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
            b.ptx("st.global.v2.u32", self.codes.ptr_to([self.row, column]), *words)

        def elements() -> None:
            for index in range(CHUNK):
                code = T.Cast("uint8", words[index // 4] >> T.uint32(index % 4 * 8))
                with b.when(column + index < self.k):
                    value = T.reinterpret(tir_name(self.plan.activation), code)
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
        """Return the largest of all threads."""
        best = _over_lanes(best, WARP)
        warps = self.plan.threads // WARP
        if warps == 1:
            return best
        lane = b.bind(self.thread % WARP)
        with b.when(lane == 0):
            b.store(self.warp_largest, best, self.thread // WARP)
        b.block_sync()
        return _over_lanes(b.bind(self.warp_largest[lane % warps]), 1 << (warps - 1).bit_length())

    def _scale(self, largest: Expr) -> tuple[Expr, Expr]:
        """Return the scale for a largest magnitude's bits, and its reciprocal."""
        ratio = T.reinterpret("float32", largest) / T.float32(self.plan.limit)
        nan = T.reinterpret("float32", T.uint32(NAN))
        finite = T.max(ratio, T.float32(SMALLEST_SCALE))
        scale = b.Variable("float32", T.Select(largest >= T.uint32(INFINITY), nan, finite)).value
        return scale, b.Variable("float32", T.float32(1) / scale).value

    def _word(self, values: Any, first: int, inverse: Expr) -> Expr:
        """Return four codes, the first in the low byte."""
        units = [b.bind(self._value(values, first + i) * inverse) for i in range(4)]
        if self.plan.activation == "int8":
            bits = [b.bind(T.reinterpret("uint32", unit + T.float32(ROUNDER))) for unit in units]
            pairs = [_permute(bits[i], bits[i + 1], 0x0040) for i in (0, 2)]
        else:
            words = [b.bind(T.reinterpret("uint32", unit)) for unit in units]
            pairs = [_narrow_pair(self.plan.activation, words[i], words[i + 1]) for i in (0, 2)]
        return _permute(pairs[0], pairs[1], 0x5410)


def _over_lanes(value: Expr, lanes: int) -> Expr:
    """Return the largest of ``lanes`` neighbouring lanes, a power of two."""
    distance = lanes // 2
    while distance:
        other = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), value, distance, WARP, WARP)
        value = b.bind(T.max(value, other))
        distance //= 2
    return value


def _permute(low: Expr, high: Expr, selector: int) -> Expr:
    source = helper("ladder_prmt", "prmt.b32 %0, %1, %2, %3;", 3)
    return b.bind(b.call_inline("ladder_prmt", source, "uint32", low, high, T.uint32(selector)))


def _narrow_pair(activation: str, low: Expr, high: Expr) -> Expr:
    """Return two 8-bit floats in the low half of a word, from the bits of two float32."""
    name = f"ladder_narrow_pair_{activation}"
    text = f"{{.reg .b16 h; {NARROW_PAIR[activation]} h, %2, %1; mov.b32 %0, {{h, h}};}}"
    return b.bind(b.call_inline(name, helper(name, text, 2, "f"), "uint32", low, high))
