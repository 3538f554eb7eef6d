"""Chains on AMD GPUs: vectors in TIR, V_EXP and V_RCP, lanes by DPP, bfloat16 by its bits.

TVM's ROCm target takes bfloat16 for uint16 from some pass on, and a conversion of reinterpreted bits for one
of whole numbers: here no value but what is loaded or stored has that type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tvm import tirx
from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.chain.dialect import Dialect
from ladder.lower.chain.values import Index
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.machine import UPPER_HALVES
from ladder.movement.machines import MOST_THREADS
from ladder.movement.mapping import SIZES
from schedules.schedule import check

Expr = Any

LOG2_E = 1.4426950408889634

QUAD_PAIRS, QUAD_HALVES, HALF_MIRROR, MIRROR = 0xB1, 0x4E, 0x141, 0x140
"""DPP controls: quad_perm [1, 0, 3, 2] and [2, 3, 0, 1], row_half_mirror, row_mirror (CDNA3 ISA, 6.3)."""

MOVES = {1: QUAD_PAIRS, 2: QUAD_HALVES, 4: HALF_MIRROR, 8: MIRROR}
"""Distance -> a control that brings a value of the other half of twice as many lanes.

The mirrors bring another lane than the one at the distance, which `Dialect.exchange` allows.
"""

QUIET, INFINITY = 0x00400000, 0x7F800000


def _exponential(x: Expr) -> Expr:
    """Return a power of two: one instruction and one product."""
    if str(x.ty.dtype) != "float32":
        return T.exp(x)
    return d.intrinsic("float32", "llvm.amdgcn.exp2", x * T.float32(LOG2_E))


def _quotient(x: Expr, y: Expr) -> Expr:
    """Return a product with a reciprocal of one instruction."""
    if str(y.ty.dtype) != "float32":
        return tirx.div(x, y)
    return x * d.intrinsic("float32", "llvm.amdgcn.rcp", y)


def _inverse_root(x: Expr) -> Expr:
    return d.intrinsic("float32", "llvm.amdgcn.rsq", x) if str(x.ty.dtype) == "float32" else T.rsqrt(x)


class RocmDialect(Dialect):
    """AMD GPUs, of waves with 64 lanes or 32."""

    cheap: ClassVar[Mapping[str, Callable[..., Expr]]] = {
        "exp": _exponential,
        "div": _quotient,
        "rsqrt": _inverse_root,
    }

    def start(self, blocks: Expr, threads: int, words: int) -> tuple[Expr, Expr]:
        check(threads <= MOST_THREADS, f"a block has at most {MOST_THREADS} threads, got {threads}")
        most = self.device.shared_per_block
        check(4 * words <= most, f"a block has at most {most} bytes of LDS, got {4 * words}")
        block, thread = d.launch(blocks, threads)
        if words:
            self.shared = d.shared(words)
        return block, thread

    def sync(self) -> None:
        d.block_sync(self.wave)

    def load(self, registers: Any, first: int, count: int, buffer: Any, index: Index) -> None:
        width = 4 * count // SIZES.get(str(buffer.dtype), 4)
        loaded = buffer[(*index[:-1], d.lanes(index[-1], width))]
        kind = "uint32" if count == 1 else f"uint32x{count}"
        b.store(registers, d.as_type(loaded, kind), d.lanes(first, count))

    def load_one(self, register: Any, buffer: Any, index: Index) -> None:
        b.store(register, T.reinterpret(str(register.dtype), buffer[index]), 0)

    def store(self, buffer: Any, index: Index, words: Sequence[Expr]) -> None:
        dtype = str(buffer.dtype)
        width = 4 * len(words) // SIZES[dtype]
        value = d.as_type(d.vector(list(words)), dtype if width == 1 else f"{dtype}x{width}")
        b.store(buffer, value, *index[:-1], d.lanes(index[-1], width))

    def exchange(self, value: Expr, distance: int, thread: Expr) -> Expr:
        dtype = str(value.ty.dtype)
        if distance not in MOVES:
            return d.shuffle_xor(value, dtype, thread, distance)
        every = T.int32(0xF)
        controls = (T.int32(MOVES[distance]), every, every, T.bool(True))
        moved = d.cross_lane("int32", "llvm.amdgcn.mov.dpp", d.as_type(value, "int32"), *controls)
        return d.as_type(moved, dtype)

    # ---- bfloat16 ------------------------------------------------------------------------------------
    def widened(self, bits: Expr, dtype: str, wanted: str) -> Expr:
        if dtype != "bfloat16":
            return super().widened(bits, dtype, wanted)
        return T.reinterpret("float32", T.Cast("uint32", bits) << T.uint32(16))

    def element(self, buffer: Any, index: Index, dtype: str, wanted: str) -> Expr:
        if dtype != "bfloat16":
            return super().element(buffer, index, dtype, wanted)
        return self.widened(T.reinterpret("uint16", buffer[index]), dtype, wanted)

    def unchanged(self, value: Expr, dtype: str) -> Expr | None:
        return _widened_bits(value) if dtype == "bfloat16" else super().unchanged(value, dtype)

    def rounded(self, value: Expr, dtype: str) -> Expr:
        if dtype != "bfloat16":
            return super().rounded(value, dtype)
        bits = _rounded_bits(value) >> T.uint32(16)
        return T.reinterpret("bfloat16", T.Cast("uint16", bits))

    def rounded_pair(self, low: Expr, high: Expr, dtype: str) -> Expr:
        if dtype == "float16":
            return d.as_type(T.Shuffle([T.Cast("float16", value) for value in (low, high)], [0, 1]), "uint32")
        words = [b.bind(_rounded_bits(value)) for value in (high, low)]
        return d.intrinsic("uint32", "llvm.amdgcn.perm", *words, T.uint32(UPPER_HALVES))


def _rounded_bits(value: Expr) -> Expr:
    """Return float32 bits whose upper half is the nearest bfloat16, ties to even; NaN stays one."""
    bits = b.bind(T.reinterpret("uint32", value))
    odd = (bits >> T.uint32(16)) & T.uint32(1)
    magnitude = bits & T.uint32(0x7FFFFFFF)
    nearest = bits + (odd + T.uint32(0x7FFF))
    return T.Select(magnitude > T.uint32(INFINITY), bits | T.uint32(QUIET), nearest)


def _widened_bits(value: Expr) -> Expr | None:
    """Return the uint16 that `RocmDialect.widened` made a float32 of; None if it did not make it."""
    shifted = value.args[0] if getattr(getattr(value, "op", None), "name", "") == "tirx.reinterpret" else None
    narrow = shifted.a if isinstance(shifted, tirx.LShift) else None
    if isinstance(narrow, tirx.Cast) and str(narrow.value.ty.dtype) == "uint16":
        return narrow.value
    return None
