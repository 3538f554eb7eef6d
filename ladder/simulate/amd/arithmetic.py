"""Arithmetic of single lanes that TIR has no operator for: byte permutes, bit fields, dot products.

Semantics: AMD Instinct MI300 ISA, "VOP3 Instructions" (V_PERM_B32, V_BFE, V_ALIGNBYTE, V_MED3) and "VOP3P
Instructions" (V_DOT2, V_DOT4, V_DOT8, V_CVT_PK); LLVM AMDGPU usage, the intrinsics of each name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np

from ladder.simulate.cohort import Cohort
from ladder.simulate.program import Read
from ladder.simulate.translate import CallView, Translator, UnknownCallError
from ladder.simulate.values import NUMPY, Array, Value, element_of, odd, two_sum

Function = Callable[..., Any]

SELECTORS = 14
"""What V_PERM picks from: eight bytes, the signs of every second one, a byte of zeros, one of ones."""


def perm(high: Array, low: Array, selector: Array) -> Array:
    """V_PERM_B32: pick four bytes of ``low`` (0 to 3) and ``high`` (4 to 7), or constants."""
    shape = np.broadcast_shapes(high.shape, low.shape, selector.shape)
    pool = np.empty((*shape, SELECTORS), np.uint8)
    pool[..., :4], pool[..., 4:8] = _bytes(low), _bytes(high)
    pool[..., 8:12] = (pool[..., 1:8:2] >> 7) * np.uint8(255)
    pool[..., 12], pool[..., 13] = 0, 255
    codes = np.minimum(_bytes(selector), SELECTORS - 1)
    rows = codes.reshape(-1, 4)
    if (rows == rows[:1]).all():  # the same for all lanes, as in nearly all code
        picked = pool[..., rows[0].tolist()]
    else:
        picked = np.take_along_axis(pool, np.broadcast_to(codes, (*shape, 4)), -1)
    words: Array = np.ascontiguousarray(picked).view(np.uint32)[..., 0]
    return words


def _bytes(words: Array) -> Array:
    """Return the bytes of 32-bit words on a further axis, lowest first."""
    split: Array = np.ascontiguousarray(words, "<u4")[..., None].view(np.uint8)
    return split.reshape(*words.shape, 4)


def _field(signed: bool) -> Function:
    def extract(word: Array, offset: Array, width: Array) -> Array:
        """V_BFE: ``width`` bits from bit ``offset``."""
        offset, width = offset & np.uint32(31), width & np.uint32(31)
        mask = (np.uint32(1) << width) - np.uint32(1)
        bits: Array = word >> offset & mask
        if not signed:
            return bits
        top: Array = np.where(width > 0, np.uint32(1) << np.maximum(width, 1) - np.uint32(1), np.uint32(0))
        extended: Array = (bits ^ top) - top
        return extended

    return extract


def _shifted(unit: int) -> Function:
    def align(high: Array, low: Array, amount: Array) -> Array:
        """V_ALIGNBIT, V_ALIGNBYTE: the low word of 64 bits shifted right."""
        steps = (amount & np.uint32(31 if unit == 1 else 3)).astype(np.uint64) * np.uint64(unit)
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        low_word: Array = (both >> steps).astype(np.uint32)
        return low_word

    return align


def _dot(bits: int, signed: tuple[bool, bool]) -> Function:
    """V_DOT4, V_DOT8: products of integers of ``bits`` bits in two words, added to a third operand."""

    def parts(word: Array, is_signed: bool) -> Array:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        found = (word[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.int64)
        return np.where(found >> bits - 1 & 1, found - (1 << bits), found) if is_signed else found

    def dot(*given: Array) -> Array:
        # V_DOT4_I32_IU8 is told which operands are signed.
        told = len(given) > len("abc") + 1
        a, b, c, clamp = (given[1], *given[3:]) if told else given
        if told and not (given[0].all() and given[2].all()):
            raise UnknownCallError("a dot product of unsigned operands")
        if np.asarray(clamp).any():
            raise UnknownCallError("a dot product that saturates")
        total = (parts(a, signed[0]) * parts(b, signed[1])).sum(axis=-1)
        wrapped = total.astype(np.uint64) + c.astype(np.uint64) & np.uint64(0xFFFFFFFF)
        result: Array = wrapped.astype(np.uint32)
        return result

    return dot


def _words(function: Function) -> Callable[[Translator, CallView], Read]:
    """Return a row for a function of 32-bit words, element by element of a vector."""

    def translate(t: Translator, call: CallView) -> Read:
        reads = [t.read(operand) for operand in call.operands]
        result = NUMPY[call.dtype]

        def read(c: Cohort) -> Value:
            found = function(*(as_word(part(c)) for part in reads))
            return found.view(result) if found.ndim else found.view(result)[()]

        return read

    return translate


def as_word(value: Value) -> Array:
    """Return the 32 bits of a number or of an array's elements."""
    held = np.asarray(value)
    if held.dtype.itemsize == 4:
        return held.view(np.uint32)
    return (held.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)


LEAST_SUM = 2.0**-126

SMALLEST = {"float16": 2.0**-14, "bfloat16": 2.0**-126}
"""Least normal number of operands that CDNA2 flushes; those of 32 bits it keeps."""


def flushed(values: Array, least: float) -> Array:
    """Replace what is nearer to zero than the least normal number by zero."""
    kept: Array = np.where(np.abs(values) < least, np.zeros((), values.dtype), values)
    return kept


def _dot_halves(flushes: bool) -> Callable[[Translator, CallView], Read]:
    """V_DOT2_F32_F16 and _BF16: two products of halves and a float32, rounded once."""

    def translate(t: Translator, call: CallView) -> Read:
        a, b, c = (t.read(operand) for operand in call.operands[:3])
        name, count = element_of(str(call.operands[0].ty))
        if count != 2 or t.number(call.operands[3]):
            raise UnknownCallError(f"{call.name} of {call.operands[0].ty}, or clamped")

        def read(cohort: Cohort) -> Value:
            x, y = (np.asarray(part(cohort), NUMPY[name]).astype(np.float64) for part in (a, b))
            return dot_pairs(x, y, np.asarray(c(cohort), np.float32), name, flushes)

        return read

    return translate


def dot_pairs(x: Array, y: Array, sums: Array, kind: str, flushes: bool) -> Array:
    """Return float32 sums to which two products each are added, rounded once; x and y are float64."""
    if flushes:
        x, y = flushed(x, SMALLEST[kind]), flushed(y, SMALLEST[kind])
    products = np.broadcast_to(x * y, np.broadcast_shapes((x * y).shape, (2,)))
    total = odd(*two_sum(products[..., 0], products[..., 1]))
    result: Array = odd(*two_sum(total, sums.astype(np.float64))).astype(np.float32)
    return flushed(result, LEAST_SUM) if flushes else result


def _dot_words(flushes: bool) -> Callable[[Translator, CallView], Read]:
    """V_DOT2_F32_BF16 of words, which the function ``ladder_dot2_f32_bf16`` makes vectors of."""

    def translate(t: Translator, call: CallView) -> Read:
        a, b, c = (t.read(operand) for operand in call.operands)

        def read(cohort: Cohort) -> Value:
            x, y = (_bfloats(as_word(part(cohort))) for part in (a, b))
            return dot_pairs(x, y, np.asarray(c(cohort), np.float32), "bfloat16", flushes)

        return read

    return translate


def _bfloats(words: Array) -> Array:
    """Return the two values of each word as an axis of float64."""
    halves = np.ascontiguousarray(words)[..., None].view(np.uint16)
    values: Array = halves.view(NUMPY["bfloat16"]).astype(np.float64)
    return values


def dot_bytes(a: Array, b: Array, c: Array, kinds: tuple[str, str]) -> Array:
    """V_DOT4_F32_FP8_BF8 and its kind: four products of 8-bit floats and a float32, rounded once."""
    factors = []
    for word, kind in ((a, kinds[0]), (b, kinds[1])):
        codes = np.ascontiguousarray(word)[..., None].view(np.uint8)
        factors.append(codes.view(NUMPY[kind]).astype(np.float64))
    total = (factors[0] * factors[1]).sum(axis=-1)
    found: Array = odd(*two_sum(total, np.asarray(c).view(np.float32).astype(np.float64))).astype(np.float32)
    return found


def _dot_bytes(kinds: tuple[str, str]) -> Callable[[Translator, CallView], Read]:
    def translate(t: Translator, call: CallView) -> Read:
        a, b, c = (t.read(operand) for operand in call.operands)

        def read(cohort: Cohort) -> Value:
            return dot_bytes(as_word(a(cohort)), as_word(b(cohort)), np.asarray(c(cohort), np.float32), kinds)

        return read

    return translate


def _from_bytes(dtype: str) -> Callable[[Translator, CallView], Read]:
    """Return a row of V_CVT_PK_F32_FP8 and _BF8: two 8-bit floats of a half of a word."""

    def translate(t: Translator, call: CallView) -> Read:
        value, high = t.read(call.operands[0]), t.number(call.operands[1])

        def read(c: Cohort) -> Value:
            word = as_word(value(c)) >> np.uint32(16 * bool(high))
            pair = np.stack([word & np.uint32(0xFF), word >> np.uint32(8) & np.uint32(0xFF)], axis=-1)
            return pair.astype(np.uint8).view(NUMPY[dtype]).astype(np.float32)

        return read

    return translate


def _to_bytes(dtype: str) -> Callable[[Translator, CallView], Read]:
    """Return a row of V_CVT_PK_FP8_F32 and _BF8: two float32 to half a word; too large ones become NaN."""

    def translate(t: Translator, call: CallView) -> Read:
        low, high, old = (t.read(operand) for operand in call.operands[:3])
        upper = bool(t.number(call.operands[3]))

        def read(c: Cohort) -> Value:
            codes = [
                np.asarray(part(c), np.float32).astype(NUMPY[dtype]).view(np.uint8).astype(np.uint32)
                for part in (low, high)
            ]
            pair = codes[0] | codes[1] << np.uint32(8)
            kept = as_word(old(c)) & np.uint32(0x0000FFFF if upper else 0xFFFF0000)
            return (kept | pair << np.uint32(16 * upper)).view(np.int32)

        return read

    return translate


def _median(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _of_floats(function: Function, dtype: str) -> Callable[[Translator, CallView], Read]:
    def translate(t: Translator, call: CallView) -> Read:
        reads = [t.read(operand) for operand in call.operands]
        return lambda c: function(*(np.asarray(part(c), NUMPY[dtype]) for part in reads))

    return translate


def _fma(t: Translator, call: CallView) -> Read:
    """Return ``a * b + c`` rounded once, in the type of the result, element by element."""
    reads, kind = [t.read(operand) for operand in call.operands], NUMPY[call.dtype]

    def read(cohort: Cohort) -> Value:
        a, b, c = (np.asarray(part(cohort), kind).astype(np.float64) for part in reads)
        return odd(*two_sum(a * b, c)).astype(kind)

    return read


def _element_wise(function: Function) -> Callable[[Translator, CallView], Read]:
    """Return a call that applies a function to floats of the result's type."""

    def translate(t: Translator, call: CallView) -> Read:
        reads, kind = [t.read(operand) for operand in call.operands], NUMPY[call.dtype]
        return lambda c: function(*(np.asarray(read(c), kind) for read in reads))

    return translate


def _of_normals(function: Function) -> Callable[[Translator, CallView], Read]:
    """V_EXP, V_RCP and V_RSQ of float32 in LLVM's bare intrinsics: subnormal operands and results are 0."""

    def flush(x: Array) -> Array:
        kept: Array = np.where(np.abs(x) < LEAST_SUM, np.copysign(np.float32(0), x), x)
        return kept

    def translate(t: Translator, call: CallView) -> Read:
        value = t.read(call.operands[0])

        def read(c: Cohort) -> Value:
            with np.errstate(all="ignore"):
                found = function(flush(np.asarray(value(c), np.float32)).astype(np.float64))
                return flush(found.astype(np.float32))

        return read

    return translate


READS: dict[str, Callable[[Translator, CallView], Any]] = {
    "llvm.amdgcn.perm": _words(perm),
    "llvm.amdgcn.ubfe": _words(_field(signed=False)),
    "llvm.amdgcn.sbfe": _words(_field(signed=True)),
    "llvm.amdgcn.alignbyte": _words(_shifted(8)),
    "llvm.amdgcn.alignbit": _words(_shifted(1)),
    "llvm.fshr": _words(_shifted(1)),
    "llvm.amdgcn.sdot4": _words(_dot(8, (True, True))),
    "llvm.amdgcn.sudot4": _words(_dot(8, (True, True))),
    "llvm.amdgcn.udot4": _words(_dot(8, (False, False))),
    "llvm.amdgcn.sdot8": _words(_dot(4, (True, True))),
    "llvm.amdgcn.udot8": _words(_dot(4, (False, False))),
    "llvm.amdgcn.fmed3": _of_floats(_median, "float32"),
    "llvm.amdgcn.exp2": _of_normals(np.exp2),
    "llvm.amdgcn.rcp": _of_normals(lambda x: 1.0 / x),
    "llvm.amdgcn.rsq": _of_normals(lambda x: 1.0 / np.sqrt(x)),
    "llvm.arithmetic.fence": lambda t, call: t.read(call.operands[0]),
    "llvm.fma": _fma,
    "tirx.fma": _fma,
    "llvm.rint": _element_wise(np.rint),
    "llvm.maximum": _element_wise(np.maximum),
    "llvm.minimum": _element_wise(np.minimum),
}
"""Calls that return a value of this lane."""


def rows_of(floats: Mapping[str, str], flushes: bool) -> dict[str, Callable[[Translator, CallView], Any]]:
    """Return the rows in which architectures differ: meaning of 8-bit floats, fate of subnormals."""
    dots = dict.fromkeys(("llvm.amdgcn.fdot2", "llvm.amdgcn.fdot2.f32.bf16"), _dot_halves(flushes))
    dots["ladder_dot2_f32_bf16"] = _dot_words(flushes)
    rows = {
        **dots,
        **{f"llvm.amdgcn.cvt.pk.f32.{name}": _from_bytes(dtype) for name, dtype in floats.items()},
    }
    rows |= {
        f"llvm.amdgcn.dot4.f32.{a}.{b}": _dot_bytes((floats[a], floats[b]))
        for a, b in product(floats, floats)
    }
    return {**rows, **{f"llvm.amdgcn.cvt.pk.{name}.f32": _to_bytes(dtype) for name, dtype in floats.items()}}
