"""Arithmetic of single lanes that TIR has no operator for: byte permutes, bit fields, dot products.

Semantics: AMD Instinct MI300 ISA, "VOP3 Instructions" (V_PERM_B32, V_BFE, V_ALIGNBYTE, V_MED3) and "VOP3P
Instructions" (V_DOT2, V_DOT4, V_DOT8, V_CVT_PK); LLVM AMDGPU usage, the intrinsics of each name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ladder.simulate.program import Read
from ladder.simulate.translate import CallView, Translator, UnknownCallError
from ladder.simulate.values import NUMPY, Array, Value, element_of, odd, two_sum

Function = Callable[..., Any]

U = np.uint32

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


def field(word: Array, offset: Array, width: Array) -> Array:
    """V_BFE_U32: ``width`` bits from bit ``offset``."""
    found: Array = word >> (offset & U(31)) & ((U(1) << (width & U(31))) - U(1))
    return found


def signed_field(word: Array, offset: Array, width: Array) -> Array:
    """V_BFE_I32: the same, as a signed number."""
    found, width = field(word, offset, width), width & U(31)
    top = np.where(width > 0, U(1) << np.maximum(width, U(1)) - U(1), U(0))
    extended: Array = (found ^ top) - top
    return extended


def align(unit: int) -> Function:
    """V_ALIGNBIT, V_ALIGNBYTE: the low word of 64 bits shifted right."""

    def shifted(high: Array, low: Array, amount: Array) -> Array:
        steps = (amount & U(31 if unit == 1 else 3)).astype(np.uint64) * np.uint64(unit)
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        found: Array = (both >> steps).astype(np.uint32)
        return found

    return shifted


def dot_integers(bits: int, is_signed: bool) -> Function:
    """V_DOT4, V_DOT8: products of integers of ``bits`` bits in two words, added to a third operand."""

    def parts(word: Array) -> Array:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        found = (word[..., None] >> shifts & U((1 << bits) - 1)).astype(np.int64)
        return np.where(found >> bits - 1 & 1, found - (1 << bits), found) if is_signed else found

    def dot(a: Array, b: Array, c: Array) -> Array:
        total = (parts(a) * parts(b)).sum(axis=-1)
        found: Array = (total + c.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)
        return found

    return dot


def _dot(bits: int, is_signed: bool) -> Function:
    """Return `dot_integers` of an intrinsic's operands."""
    products = dot_integers(bits, is_signed)

    def dot(*given: Array) -> Array:
        # V_DOT4_I32_IU8 is told which operands are signed.
        told = len(given) > len("abc") + 1
        a, b, c, clamp = (given[1], *given[3:]) if told else given
        if told and not (given[0].all() and given[2].all()):
            raise UnknownCallError("a dot product of unsigned operands")
        if np.asarray(clamp).any():
            raise UnknownCallError("a dot product that saturates")
        found: Array = products(a, b, c)
        return found

    return dot


def _of(function: Function, t: Translator, call: CallView) -> Read:
    """Return what reads a call's operands and applies a function to their values."""
    reads = [t.read(operand) for operand in call.operands]
    return lambda c: function(*(part(c) for part in reads))


def _words(function: Function) -> Callable[[Translator, CallView], Read]:
    """Return a row for a function of 32-bit words, element by element of a vector."""

    def translate(t: Translator, call: CallView) -> Read:
        result = NUMPY[call.dtype]

        def found(*given: Value) -> Value:
            words = function(*map(as_word, given)).view(result)
            return words if words.ndim else words[()]

        return _of(found, t, call)

    return translate


def as_word(value: Value) -> Array:
    """Return the 32 bits of a number or of an array's elements."""
    held = np.asarray(value)
    held = held.astype(np.float32) if held.dtype == np.float64 else held  # a number of the host
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
        name, count = element_of(str(call.operands[0].ty))
        if count != 2 or t.number(call.operands[3]):
            raise UnknownCallError(f"{call.name} of {call.operands[0].ty}, or clamped")

        def dot(a: Value, b: Value, c: Value, _: Value) -> Array:
            x, y = (np.asarray(part, NUMPY[name]).astype(np.float64) for part in (a, b))
            return dot_pairs(x, y, np.asarray(c, np.float32), name, flushes)

        return _of(dot, t, call)

    return translate


def dot_pairs(x: Array, y: Array, sums: Array, kind: str, flushes: bool) -> Array:
    """Return float32 sums to which two products each are added, rounded once; x and y are float64."""
    if flushes:
        x, y = flushed(x, SMALLEST[kind]), flushed(y, SMALLEST[kind])
    products = np.broadcast_to(x * y, np.broadcast_shapes((x * y).shape, (2,)))
    total = odd(*two_sum(products[..., 0], products[..., 1]))
    result: Array = odd(*two_sum(total, sums.astype(np.float64))).astype(np.float32)
    return flushed(result, LEAST_SUM) if flushes else result


def _dot_words(flushes: bool) -> Function:
    """V_DOT2_F32_BF16 of words, which the function ``ladder_dot2_f32_bf16`` makes vectors of."""

    def dot(a: Array, b: Array, c: Array) -> Array:
        x, y = (halves(word, "bfloat16") for word in (a, b))
        return dot_pairs(x, y, c.view(np.float32), "bfloat16", flushes)

    return dot


def halves(words: Array, kind: str) -> Array:
    """Return the two values of each word as an axis of float64."""
    bits = np.ascontiguousarray(words)[..., None].view(np.uint16)
    values: Array = bits.view(NUMPY[kind]).astype(np.float64)
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


def from_bytes(word: Array, high: Any, dtype: Any) -> Array:
    """V_CVT_PK_F32_FP8 and _BF8: the two 8-bit floats of a half of a word, on a further axis."""
    half = word >> U(16) * high
    pair = np.stack([half & U(0xFF), half >> U(8) & U(0xFF)], axis=-1)
    found: Array = pair.astype(np.uint8).view(dtype).astype(np.float32)
    return found


def to_bytes(low: Array, high: Array, old: Array, upper: Any, dtype: Any) -> Array:
    """V_CVT_PK_FP8_F32 and _BF8: two float32 to half a word; too large ones become NaN."""
    first, second = (x.view(np.float32).astype(dtype).view(np.uint8).astype(np.uint32) for x in (low, high))
    shift = U(16) * upper
    found: Array = (first | second << U(8)) << shift | old & ~(U(0xFFFF) << shift)
    return found


def _median(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def fma(a: Array, b: Array, c: Array) -> Array:
    """Return ``a * b + c``, rounded once to the type of the operands."""
    x, y, z = (np.asarray(value).astype(np.float64) for value in (a, b, c))
    rounded: Array = odd(*two_sum(x * y, z)).astype(np.result_type(a, b, c))
    return rounded


def _element_wise(function: Function) -> Callable[[Translator, CallView], Read]:
    """Return a row for a function of floats of the result's type."""

    def translate(t: Translator, call: CallView) -> Read:
        kind = NUMPY[call.dtype]
        return _of(lambda *given: function(*(np.asarray(value, kind) for value in given)), t, call)

    return translate


def flush(x: Array) -> Array:
    """Return float32 with subnormal numbers as zeros of their sign."""
    kept: Array = np.where(np.abs(x) < LEAST_SUM, np.copysign(np.float32(0), x), x)
    return kept


def special(function: Function) -> Function:
    """V_EXP, V_RCP and V_RSQ of float32: subnormal operands and results are 0."""

    def applied(x: Array) -> Array:
        with np.errstate(all="ignore"):
            return flush(function(flush(x).astype(np.float64)).astype(np.float32))

    return applied


READS: dict[str, Callable[[Translator, CallView], Any]] = {
    "llvm.amdgcn.perm": _words(perm),
    "llvm.amdgcn.ubfe": _words(field),
    "llvm.amdgcn.sbfe": _words(signed_field),
    "llvm.amdgcn.alignbyte": _words(align(8)),
    "llvm.amdgcn.alignbit": _words(align(1)),
    "llvm.fshr": _words(align(1)),
    "llvm.amdgcn.sdot4": _words(_dot(8, True)),
    "llvm.amdgcn.sudot4": _words(_dot(8, True)),
    "llvm.amdgcn.udot4": _words(_dot(8, False)),
    "llvm.amdgcn.sdot8": _words(_dot(4, True)),
    "llvm.amdgcn.udot8": _words(_dot(4, False)),
    "llvm.amdgcn.fmed3": _element_wise(_median),
    "llvm.amdgcn.exp2": _element_wise(special(np.exp2)),
    "llvm.amdgcn.rcp": _element_wise(special(lambda x: 1.0 / x)),
    "llvm.amdgcn.rsq": _element_wise(special(lambda x: 1.0 / np.sqrt(x))),
    "llvm.arithmetic.fence": lambda t, call: t.read(call.operands[0]),
    "llvm.fma": _element_wise(fma),
    "tirx.fma": _element_wise(fma),
    "llvm.rint": _element_wise(np.rint),
    "llvm.maximum": _element_wise(np.maximum),
    "llvm.minimum": _element_wise(np.minimum),
}
"""Calls that return a value of this lane."""


def rows_of(floats: Mapping[str, str], flushes: bool) -> dict[str, Callable[[Translator, CallView], Any]]:
    """Return the rows in which architectures differ: meaning of 8-bit floats, fate of subnormals."""
    rows = dict.fromkeys(("llvm.amdgcn.fdot2", "llvm.amdgcn.fdot2.f32.bf16"), _dot_halves(flushes))
    rows["ladder_dot2_f32_bf16"] = _words(_dot_words(flushes))
    for name, held in floats.items():
        rows[f"llvm.amdgcn.cvt.pk.f32.{name}"] = _words(partial(from_bytes, dtype=NUMPY[held]))
        rows[f"llvm.amdgcn.cvt.pk.{name}.f32"] = _words(partial(to_bytes, dtype=NUMPY[held]))
    for a, b in product(floats, floats):
        rows[f"llvm.amdgcn.dot4.f32.{a}.{b}"] = _words(partial(dot_bytes, kinds=(floats[a], floats[b])))
    return rows
