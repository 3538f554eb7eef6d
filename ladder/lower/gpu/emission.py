"""Decoder instructions as TIR: plain operators where TIR has them, else helpers of one instruction."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.machine import Machine
from tile_types import TirOps, TType

FLOAT_SUFFIX = {"float16": "f16x2", "bfloat16": "bf16x2"}

NATIVE = {"float16": ("float_sub", "float_mul", "float_fma"), "bfloat16": ("float_fma",)}
"""sub.bf16x2 and mul.bf16x2 need sm_90; fma.rn.bf16x2 exists from sm_80 on and gives the same bits."""

MINUS_ONE, MINUS_ZERO = 0xBF80BF80, 0x80008000

NARROW = {"fp8_e4m3": "cvt.rn.satfinite.e4m3x2.f16x2", "fp8_e5m2": "cvt.rn.satfinite.e5m2x2.f16x2"}

SPELLINGS = {
    "permute": "prmt.b32 %0, %1, %2, %3;",
    "dot": "dp4a.u32.u32 %0, %1, %2, %3;",
    "float_sub": "sub.rn.{type} %0, %1, %2;",
    "float_mul": "mul.rn.{type} %0, %1, %2;",
    "float_fma": "fma.rn.{type} %0, %1, %2, %3;",
}


CONSTRAINTS = {"r": '"r"(a{})', "f": '"f"(__uint_as_float(a{}))'}
"""How a helper hands its uint32 operands to an instruction: as they are, or as float32."""


@lru_cache(maxsize=512)
def helper(name: str, instruction: str, operands: int, kind: str = "r") -> str:
    """Return the CUDA source of a helper for one instruction on 32-bit registers.

    The assembly is not volatile: the compiler may merge and reorder it.
    """
    parameters = ", ".join(f"unsigned int a{i}" for i in range(operands))
    inputs = ", ".join(CONSTRAINTS[kind].format(i) for i in range(operands))
    return (
        f"static __device__ __forceinline__ unsigned int {name}({parameters}) {{\n"
        f'  unsigned int d; asm("{instruction}" : "=r"(d) : {inputs}); return d;\n}}\n'
    )


WIDENINGS = {"fp8_e4m3": "cvt.rn.f16x2.e4m3x2", "fp8_e5m2": "cvt.rn.f16x2.e5m2x2"}
"""Two 8-bit floats to float16, exactly (PTX ISA, cvt)."""


def widened_pair(dtype: str, word: Expr, half: int) -> Expr:
    """Return the two 8-bit floats of a half of a word as float16, in one word."""
    name = f"ladder_widen_{dtype}_{half}"
    text = f"{{.reg .b16 l, h; mov.b32 {{l, h}}, %1; {WIDENINGS[dtype]} %0, {'lh'[half]};}}"
    return b.call_inline(name, helper(name, text, 1), "uint32", word)


LOOK_UP_AT = """
static __device__ __forceinline__ unsigned int ladder_look_up_at(unsigned int address) {
  return *reinterpret_cast<const unsigned int*>(__cvta_shared_to_generic(address));
}
"""

LOOK_UP = """
static __device__ __forceinline__ unsigned int ladder_look_up(const unsigned int* table, unsigned int at) {
  return *reinterpret_cast<const unsigned int*>(reinterpret_cast<const char*>(table) + at);
}
"""

FILL_TABLE = """
static __device__ __forceinline__ unsigned int {name}_value(int code) {{
  const unsigned long long four = {four};
  return (unsigned int)(four >> (16 * (code & 3))) & 0xFFFF;
}}
static __device__ __forceinline__ void {name}(unsigned int* table, int thread, int threads) {{
#pragma unroll 1
  for (int codes = thread; codes < {entries}; codes += threads) {{
    const unsigned int word = {word};
    uint4* row = reinterpret_cast<uint4*>(table) + codes * {row};
#pragma unroll
    for (int i = 0; i < 8; i++) row[i ^ codes % 8] = make_uint4(word, word, word, word);
  }}
}}
"""

IMMEDIATE_FOURS = 8
"""Words of four values up to which values are immediate operands: memory would have to be read by every
launch first."""


def fill_table(buffer: Any, values: Sequence[int], step: int, row: int, thread: Expr, threads: int) -> None:
    """Emit one thread's share of a table of 16-bit values, or of all pairs of them, repeated for 32 lanes.

    Entries begin ``row`` bytes apart; the threads of a pass write to different banks. A pair's second
    code begins ``step`` bits after the first one; 0 if there are no pairs.
    """
    padded = np.array([*values, *([0] * (-len(values) % 4))], "<u2")
    text = [f"{four:#x}ull" for four in padded.view("<u8").tolist()]
    name = f"ladder_fill_table_{zlib.crc32(' '.join(text).encode()):08x}_{len(values)}_{step}_{row}"
    immediate = len(text) <= IMMEDIATE_FOURS
    source = FILL_TABLE.format(
        name=name,
        four=_chosen(text, 4) if immediate else f"{name}_values[code >> 2]",
        word=f"{name}_value(codes)"
        if not step
        else f"{name}_value(codes & {(1 << step) - 1}) | {name}_value(codes >> {step}) << 16",
        entries=len(values) << step,
        row=row // 16,
    )
    if not immediate:
        held = f"{name}_values[{len(text)}] = {{{', '.join(text)}}}"
        source = f"\nstatic __device__ const unsigned long long {held};{source}"
    b.emit(b.call_inline(name, source, "void", buffer.ptr_to([0]), thread, threads))


def _chosen(texts: Sequence[str], unit: int) -> str:
    """Return the expression that chooses a text, which stands for ``unit`` codes, by the bits of a code."""
    if len(texts) == 1:
        return texts[0]
    half = len(texts) // 2
    low, high = _chosen(texts[:half], unit), _chosen(texts[half:], unit)
    return f"!(code & {half * unit}) ? ({low}) : ({high})"


@dataclass(frozen=True)
class SharedTable:
    """A table in shared memory as a thread sees it.

    buffer: uint32 words, as many as the decoder says.
    lane_offset: ``4 * lane``.
    address: uint32: where this lane's column begins in shared memory.
    """

    buffer: Any
    lane_offset: Expr
    address: Expr

    @classmethod
    def of(cls, buffer: Any, lane: Expr) -> SharedTable:
        """Emit what a lane keeps of a table."""
        address = b.keep(T.cuda.cvta_generic_to_shared(buffer.ptr_to([lane])))
        return cls(buffer, b.keep(4 * lane), address)


def allocate_table(pool: Any, words: int, lane: Expr) -> SharedTable | None:
    """Allocate a decode table of ``words`` words in shared memory; None where the decoder has none."""
    return SharedTable.of(pool.alloc((words,), "uint32", align=128), lane) if words else None


class TirMachine(Machine):
    """Emits instructions; every result is bound to a name."""

    def __init__(self, table: SharedTable | None = None) -> None:
        super().__init__()
        self._table = table

    def perform(self, operation: str, words: list[Any], immediates: tuple[Any, ...]) -> Any:
        """Emit one instruction and return its result."""
        result = getattr(self, f"_do_{operation}")(*words, *immediates)
        return result if operation == "constant" else b.bind(result)

    def _call(self, name: str, instruction: str, *operands: Expr, kind: str = "r") -> Expr:
        return b.call_inline(name, helper(name, instruction, len(operands), kind), "uint32", *operands)

    def _do_constant(self, bits: int) -> Expr:
        return T.uint32(bits)

    def _do_lop3(self, x: Expr, y: Expr, z: Expr, table: int) -> Expr:
        return self._call(f"ladder_lop3_{table:02x}", f"lop3.b32 %0, %1, %2, %3, {table:#x};", x, y, z)

    def _do_shift(self, x: Expr, left: int) -> Expr:
        return x << T.uint32(left) if left > 0 else x >> T.uint32(-left)

    def _do_rotate(self, x: Expr, right: int) -> Expr:
        return x >> T.uint32(right) | x << T.uint32(32 - right)

    def _do_multiply(self, x: Expr, factor: int, addend: int) -> Expr:
        product = x * T.uint32(factor)
        return product + T.uint32(addend) if addend else product

    def _do_multiply_add(self, x: Expr, addend: Expr, factor: int) -> Expr:
        return x * T.uint32(factor) + addend

    def _do_permute(self, x: Expr, y: Expr, selector: Expr) -> Expr:
        return self._call("ladder_prmt", SPELLINGS["permute"], x, y, selector)

    def _do_dot(self, x: Expr, addend: Expr, weights: int) -> Expr:
        return self._call("ladder_dot", SPELLINGS["dot"], x, T.uint32(weights), addend)

    def _do_subtract(self, x: Expr, y: Expr) -> Expr:
        return x - y

    def _float(self, operation: str, core: str, *operands: Expr) -> Expr:
        kind = FLOAT_SUFFIX[core]
        return self._call(f"ladder_{operation}_{kind}", SPELLINGS[operation].format(type=kind), *operands)

    def _do_float_sub(self, x: Expr, y: Expr, core: str) -> Expr:
        if "float_sub" in NATIVE[core]:
            return self._float("float_sub", core, x, y)
        return self._float("float_fma", core, y, T.uint32(MINUS_ONE), x)

    def _do_float_mul(self, x: Expr, y: Expr, core: str) -> Expr:
        if "float_mul" in NATIVE[core]:
            return self._float("float_mul", core, x, y)
        return self._float("float_fma", core, x, y, T.uint32(MINUS_ZERO))

    def _do_float_fma(self, x: Expr, y: Expr, z: Expr, core: str) -> Expr:
        return self._float("float_fma", core, x, y, z)

    def _do_narrow(self, x: Expr, core: str) -> Expr:
        # The result is a 16-bit register: widen it inside the helper.
        text = f"{{.reg .b16 h; {NARROW[core]} h, %1; mov.b32 %0, {{h, h}};}}"
        return self._call(f"ladder_narrow_{core}", text, x)

    def _do_halves(self, low: Expr, high: Expr) -> Expr:
        return self._call("ladder_halves", "cvt.rn.f16x2.f32 %0, %1, %2;", high, low, kind="f")

    def _do_table_lane(self, absolute: bool) -> Expr:
        return self._shared.address if absolute else self._shared.lane_offset

    def _do_look_up(self, at: Expr, entries: tuple[int, ...], row: int, absolute: bool) -> Expr:
        if absolute:
            return b.call_inline("ladder_look_up_at", LOOK_UP_AT, "uint32", at)
        return b.call_inline("ladder_look_up", LOOK_UP, "uint32", self._shared.buffer.ptr_to([0]), at)

    @property
    def _shared(self) -> SharedTable:
        assert self._table is not None, "this decoder needs its table (Decoder.fill_table)"
        return self._table

    def _do_reference(self, code: Expr, ttype: TType, core: str) -> Expr:
        value = ttype.evaluate(code, TirOps())
        if core == "int8":
            return T.Cast("uint32", T.Cast("int32", value)) & T.uint32(0xFF)
        return T.Cast("uint32", T.reinterpret(T.Cast(core, value), dtype="uint16"))
