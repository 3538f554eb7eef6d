"""Vectors in TIR, mostly of 512 bits: constants, bit operations and x86 instructions without a name there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.lower import Expr
from ladder.lower import builder as b
from tile_types import TirOps, get_type

BYTES = {"float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2}
"""Alignment of elements; 1 for those that are not named."""

DPBF16 = "ladder_dpbf16"

LLVM_HELPERS = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define internal <16 x float> @ladder_dpbf16(<16 x float> %c, <32 x i16> %a, <16 x i32> %b) alwaysinline {
  %x = bitcast <32 x i16> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
    <16 x float> %c, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}
"""
"""TVM's LLVM backend has no bfloat16 vectors: the one instruction that takes them is wrapped in LLVM IR."""


DOT_BYTES = "ladder_dot_bytes"


def _constants(ttype: str, values: Iterable[int]) -> str:
    return f"<{', '.join(f'{ttype} {value}' for value in values)}>"


def _byte_helpers() -> str:
    """Return LLVM IR that adds products of unsigned and signed bytes by AVX2, even and odd ones apart."""
    words, sums, whole = "<32 x i16>", "<16 x i32>", _constants("i32", range(16))
    bits, low = _constants("i16", [8] * 32), _constants("i16", [255] * 32)
    lines = [
        "declare <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16>, <16 x i16>)",
        f"define internal {sums} @{DOT_BYTES}({sums} %c, {sums} %a, {sums} %b) alwaysinline {{",
        *(f"  %{x}w = bitcast <16 x i32> %{x} to {words}" for x in "ab"),
        f"  %a0 = and {words} %aw, {low}",
        f"  %a1 = lshr {words} %aw, {bits}",
        f"  %bl = shl {words} %bw, {bits}",
        f"  %b0 = ashr {words} %bl, {bits}",
        f"  %b1 = ashr {words} %bw, {bits}",
    ]
    for odd in range(2):
        for half in range(2):
            chosen = _constants("i32", range(16 * half, 16 * half + 16))
            for x in "ab":
                operands = f"{words} %{x}{odd}, {words} undef, {sums} {chosen}"
                lines.append(f"  %{x}{odd}h{half} = shufflevector {operands}")
            given = f"<16 x i16> %a{odd}h{half}, <16 x i16> %b{odd}h{half}"
            lines.append(f"  %p{odd}{half} = call <8 x i32> @llvm.x86.avx2.pmadd.wd({given})")
    halves = (f"  %s{half} = add <8 x i32> %p0{half}, %p1{half}" for half in range(2))
    lines += [
        *halves,
        f"  %s = shufflevector <8 x i32> %s0, <8 x i32> %s1, <16 x i32> {whole}",
        "  %r = add <16 x i32> %c, %s",
        "  ret <16 x i32> %r",
        "}",
    ]
    return "\n".join(lines)


BYTE_HELPERS = _byte_helpers()
"""Dot products of bytes for processors that have no instruction for them: exact, in pairs of 16 bits."""


PAIRS, ADDED, FOLD = "ladder_byte_pairs", "ladder_added_pairs", "ladder_folded_pairs"


def _vector(kind: str, times: int = 1) -> str:
    """Return LLVM's type of several vectors of a kind, such as ``16 x i16``, side by side."""
    count, _, element = kind.partition(" ")
    return f"<{times * int(count)} {element}>"


def _halved(name: str, call: str, given: str, made: str) -> str:
    """Return LLVM IR of a function that calls another for both 256-bit halves of two vectors.

    call: What is called, an intrinsic or assembly.
    given, made: Kinds of half a vector, of the operands and of the result.
    """
    half, whole, result = _vector(given), _vector(given, 2), _vector(made)
    lines = [f"define internal {_vector(made, 2)} @{name}({whole} %a, {whole} %b) alwaysinline {{"]
    size = int(given.split()[0])
    for at in range(2):
        places = f"<{size} x i32> {_constants('i32', range(size * at, size * (at + 1)))}"
        lines += [f"  %{x}{at} = shufflevector {whole} %{x}, {whole} undef, {places}" for x in "ab"]
        lines.append(f"  %r{at} = call {result} {call}({half} %a{at}, {half} %b{at})")
    size = 2 * int(made.split()[0])
    places = f"<{size} x i32> {_constants('i32', range(size))}"
    lines += [
        f"  %r = shufflevector {result} %r0, {result} %r1, {places}",
        f"  ret {_vector(made, 2)} %r",
        "}",
    ]
    return "\n".join(lines)


PAIR_HELPERS = "\n".join(
    (
        "declare <16 x i16> @llvm.x86.avx2.pmadd.ub.sw(<32 x i8>, <32 x i8>)",
        "declare <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16>, <16 x i16>)",
        _halved(PAIRS, "@llvm.x86.avx2.pmadd.ub.sw", "32 x i8", "16 x i16"),
        _halved(ADDED, 'asm sideeffect "vpaddw $2, $1, $0", "=x,x,x"', "16 x i16", "16 x i16"),
        _halved(FOLD, "@llvm.x86.avx2.pmadd.wd", "16 x i16", "8 x i32"),
    )
)
"""Sums of products of bytes in 16 bits, by AVX2. Additions are assembly that keeps its order: LLVM orders
what it may such that more sums are open at a time than there are registers, or finishes one half of all
vectors first and keeps every word of x for the other in memory."""


STREAM = "ladder_stream"

STREAM_HELPER = f"""
define internal i32 @{STREAM}(ptr %place, <16 x i32> %words) alwaysinline {{
  store <16 x i32> %words, ptr %place, align 64, !nontemporal !{{i32 1}}
  ret i32 0
}}
"""
"""A store past the caches: a line that is written whole is not read from memory first."""


LINE = 512
"""Bits of a line of cache, and of the widest vectors."""

STACK = 1 << 18
"""Most bytes of an array on the stack: a thread has 8 MB of it at most, and a kernel several arrays."""


@contextmanager
def helpers(text: str = LLVM_HELPERS) -> Iterator[None]:
    """Make helpers in LLVM IR callable in what is emitted inside the block."""
    with I.attr(T.int32(0), "pragma_import_llvm", tvm.ir.StringImm(text)):
        yield


@contextmanager
def parallel(extent: Expr) -> Iterator[Expr]:
    """Emit a loop whose iterations are spread over TVM's threads."""
    with I.parallel(0, extent) as index:
        yield index


def scratch(count: Expr, dtype: str) -> Any:
    """Allocate memory on the stack (registers if indexed by constants), or, if large or open, on the heap."""
    if isinstance(count, int) and count * tvm.DataType(dtype).bits <= 8 * STACK:
        # Without the annotation TVM calls its workspace allocator in the loop.
        return I.alloc_buffer((count,), dtype, scope="global", annotations={"disable_lower_builtin": True})
    return heap(count, dtype)


def kept_in(lane: Expr, lanes: int = 16) -> Callable[[Expr], Expr]:
    """Return what keeps a value in a register in a loop over lanes, where no name can be bound."""

    def kept(value: Expr) -> Expr:
        register = scratch(lanes, str(value.ty.dtype))
        b.store(register, value, lane)
        return register[lane]

    return kept


def aligned(count: Expr, dtype: str) -> Any:
    """Allocate memory that begins at a line of cache: vectors that lie in two lines take longer.

    TVM aligns what it allocates on the stack to 16 bytes, except vectors, so vectors are allocated.
    """
    size = tvm.DataType(dtype).bits
    if not isinstance(count, int) or count * size > 8 * STACK or count * size % LINE:
        return scratch(count, dtype)
    held = scratch(count * size // LINE, f"{dtype}x{LINE // size}")
    return I.decl_buffer((count,), dtype, data=held.data, scope="global")


def heap(count: Expr, dtype: str) -> Any:
    """Allocate memory by TVM's workspace allocator, which keeps it for the thread; bytes need 64 bits."""
    return I.alloc_buffer((tirx.Cast("int64", count),), dtype, scope="global")


def kept(value: Expr, dtype: str, count: int) -> Expr:
    """Compute a vector once into a register of its own.

    TVM inlines what `b.bind` names: a chain of values that are used twice each doubles with every step.
    """
    cell = scratch(count, dtype)
    b.store(cell, value, lanes(0, count))
    return cell[lanes(0, count)]


def lanes(start: Expr, count: int = 16) -> Expr:
    """Return the index of ``count`` consecutive elements."""
    return T.ramp(start, 1, count) if count > 1 else start


def splat(value: Expr, count: int = 16) -> Expr:
    """Repeat a scalar."""
    return T.broadcast(value, count)


def constant(value: float, dtype: str, count: int = 16) -> Expr:
    """Return a vector whose elements are equal."""
    return T.broadcast(tirx.const(value, dtype), count)


def table(values: Iterable[int], dtype: str) -> Expr:
    """Return a constant vector."""
    return joined([tirx.const(int(value), dtype) for value in values])


def joined(parts: Sequence[Expr], count: int = 1) -> Expr:
    """Return one vector of scalars, or of vectors of ``count`` elements, side by side."""
    return tirx.Shuffle(list(parts), list(range(count * len(parts))))


def store_first(out: Any, values: Expr, row: Expr, column: Expr, width: int, count: Expr) -> None:
    """Store the first ``count`` of the ``width`` elements of a vector into a row."""
    line = scratch(width, str(out.dtype))
    b.store(line, values, lanes(0, width))
    with b.loop(count) as at:
        b.store(out, line[at], row, column + at)


def as_type(value: Expr, dtype: str) -> Expr:
    """Reinterpret the bits of a vector."""
    return T.reinterpret(dtype, value)


def shifted(value: Expr, right: int, dtype: str, count: int) -> Expr:
    """Shift every element right by a constant; left if it is negative."""
    if right == 0:
        return value
    amount = constant(abs(right), dtype, count)
    return T.shift_right(value, amount) if right > 0 else T.shift_left(value, amount)


def masked(value: Expr, mask: int, dtype: str, count: int) -> Expr:
    """Return ``value & mask`` element by element."""
    return T.bitwise_and(value, constant(mask, dtype, count))


def merged(low: Expr, high: Expr, shift: int, dtype: str, count: int) -> Expr:
    """Take the bits below ``shift`` from ``low`` and the others from ``high``."""
    below = (1 << shift) - 1
    full = (1 << int(dtype.removeprefix("uint"))) - 1
    return T.bitwise_or(masked(low, below, dtype, count), masked(high, full ^ below, dtype, count))


def permute(values: Expr, index: Expr) -> Expr:
    """Return ``values[index & 31]``, 32 x uint16 (``vpermw``)."""
    return T.call_llvm_pure_intrin("uint16x32", "llvm.x86.avx512.permvar.hi.512", values, index)


def permute_pair(low: Expr, high: Expr, index: Expr) -> Expr:
    """Return element ``index & 63`` of two tables of 32 x uint16 (``vpermi2w``)."""
    return T.call_llvm_pure_intrin("uint16x32", "llvm.x86.avx512.vpermi2var.hi.512", low, index, high)


def dot_bf16(total: Expr, weights: Expr, x: Expr) -> Expr:
    """Add products of bfloat16 pairs: float32x16 += uint16x32 · uint32x16 (``vdpbf16ps``)."""
    return T.call_pure_extern("float32x16", DPBF16, total, weights, x)


def dot_int8(total: Expr, weights: Expr, x: Expr) -> Expr:
    """Add products of unsigned and signed bytes: int32x16 += uint8x64 · int8x64 (``vpdpbusd``)."""
    return T.call_llvm_pure_intrin(
        "int32x16",
        "llvm.x86.avx512.vpdpbusd.512",
        total,
        T.reinterpret("int8x64", weights),
        T.reinterpret("int8x64", x),
    )


def dot_int16(total: Expr, weights: Expr, x: Expr) -> Expr:
    """Add products of pairs of 16 bits: int32x16 += uint16x32 · uint32x16 (``vpdpwssd``)."""
    operands = (T.reinterpret("int16x32", part) for part in (weights, x))
    return T.call_llvm_pure_intrin("int32x16", "llvm.x86.avx512.vpdpwssd.512", total, *operands)


def dot_bytes(total: Expr, weights: Expr, x: Expr) -> Expr:
    """Do what `dot_int8` does by AVX2; needs `BYTE_HELPERS`."""
    return T.call_pure_extern("int32x16", DOT_BYTES, total, weights, T.reinterpret("int32x16", x))


def byte_pairs(weights: Expr, x: Expr) -> Expr:
    """Return sums of two products of unsigned and signed bytes: int16x32; needs `PAIR_HELPERS`."""
    return T.call_pure_extern("int16x32", PAIRS, *(T.reinterpret("int8x64", part) for part in (weights, x)))


def added_pairs(pairs: Expr, more: Expr) -> Expr:
    """Add int16x32; needs `PAIR_HELPERS`."""
    return T.call_pure_extern("int16x32", ADDED, pairs, more)


def folded_pairs(pairs: Expr) -> Expr:
    """Return sums of two elements of int16x32 as int32x16; needs `PAIR_HELPERS`."""
    return T.call_pure_extern("int32x16", FOLD, pairs, constant(1, "int16", 2 * 16))


def permute_bytes(values: Expr, index: Expr) -> Expr:
    """Return ``values[index & 63]``, 64 x uint8 (``vpermb``)."""
    return T.call_llvm_pure_intrin("uint8x64", "llvm.x86.avx512.permvar.qi.512", values, index)


def permute_byte_pair(low: Expr, high: Expr, index: Expr) -> Expr:
    """Return element ``index & 127`` of two tables of 64 x uint8 (``vpermi2b``)."""
    return T.call_llvm_pure_intrin("uint8x64", "llvm.x86.avx512.vpermi2var.qi.512", low, index, high)


def permute_words(values: Expr, index: Expr) -> Expr:
    """Return ``values[index & 15]``, 16 x uint32 (``vpermd``)."""
    return T.call_llvm_pure_intrin("uint32x16", "llvm.x86.avx512.permvar.si.512", values, index)


def permute_word_pair(low: Expr, high: Expr, index: Expr) -> Expr:
    """Return element ``index & 31`` of two tables of 16 x uint32 (``vpermi2d``)."""
    return T.call_llvm_pure_intrin("uint32x16", "llvm.x86.avx512.vpermi2var.d.512", low, index, high)


def shifted_octets(words: Expr, bits: Sequence[int]) -> Expr:
    """Return in each byte the eight bits of its 64-bit element from one on, round its end: 64 x uint8.

    bits: The first bits of the eight bytes of an element (``vpmultishiftqb``).
    """
    first = table([bit % 64 for bit in bits] * 8, "uint8")
    return T.call_llvm_pure_intrin("uint8x64", "llvm.x86.avx512.pmultishift.qb.512", first, words)


def reduced(how: str, values: Expr) -> Expr:
    """Return ``add``, ``umax``, ... of all elements of a vector."""
    element, _, _ = str(values.ty.dtype).partition("x")
    return T.call_llvm_pure_intrin(element, f"llvm.vector.reduce.{how}", values)


def prefetch(address: Expr) -> None:
    """Bring a line that is read soon into the second-level cache; an address beyond the array is harmless."""
    read, second_level, data = T.int32(0), T.int32(2), T.int32(1)
    I.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", address, read, second_level, data))


def stream(address: Expr, words: Expr) -> None:
    """Write a whole line of memory, int32x16, that nobody reads soon; needs `STREAM_HELPER`."""
    I.evaluate(T.call_extern("int32", STREAM, address, words))


def fma(a: Expr, b: Expr, c: Expr, count: int = 16) -> Expr:
    """Return ``a * b + c`` of float32, with one rounding where the machine has such an instruction."""
    return T.call_llvm_pure_intrin(f"float32x{count}", "llvm.fmuladd", a, b, c)


def bits_of(value: Expr, activation: str) -> Expr:
    """Return the bits of one activation as an unsigned integer of its width."""
    width = {"float32": 32, "float16": 16, "bfloat16": 16}.get(activation, 8)
    return T.reinterpret(f"uint{width}", value)


def as_float(value: Expr, activation: str) -> Expr:
    """Widen one activation to float32, exactly."""
    if activation in ("float32", "float16", "int8"):
        return T.Cast("float32", value)
    code = T.Cast("uint32", bits_of(value, activation))
    if activation == "bfloat16":
        return T.reinterpret("float32", T.shift_left(code, T.uint32(16)))
    return T.Cast("float32", get_type(activation).evaluate(code, TirOps()))
