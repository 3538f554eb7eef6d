"""Vector instructions on several numbers of a register: packed math, mixed precision, dot products, MFMA.

Semantics: AMD Instinct MI300 ISA, section 16.10 (VOP3P) and "Matrix Arithmetic Instructions".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ladder.simulate.amd import arithmetic, conversions, mfma, scaled
from ladder.simulate.amd.arithmetic import fma
from ladder.simulate.gcn import floats as f
from ladder.simulate.gcn.listing import GcnError, Instruction, Operand
from ladder.simulate.gcn.memory import require_whole
from ladder.simulate.gcn.wave import LANES, Wave, long_words, result, source, store_words, words
from ladder.simulate.translate import UnknownCallError
from ladder.simulate.values import NUMPY, Array

Step = Callable[[Wave], Any]
U = np.uint32

HALVES: dict[str, tuple[str, Callable[..., Array]]] = {
    "pk_add_f16": ("f16", np.add),
    "pk_mul_f16": ("f16", np.multiply),
    "pk_fma_f16": ("f16", fma),
    "pk_max_f16": ("f16", f.larger),
    "pk_min_f16": ("f16", f.smaller),
    "pk_add_u16": ("u16", np.add),
    "pk_sub_u16": ("u16", np.subtract),
    "pk_sub_i16": ("u16", np.subtract),
    "pk_mul_lo_u16": ("u16", np.multiply),
    "pk_mad_u16": ("u16", lambda a, b, c: a * b + c),
    "pk_max_u16": ("u16", np.maximum),
    "pk_min_u16": ("u16", np.minimum),
    "pk_max_i16": ("i16", np.maximum),
    "pk_min_i16": ("i16", np.minimum),
    "pk_lshlrev_b16": ("u16", lambda n, a: a << (n & np.uint16(15))),
    "pk_lshrrev_b16": ("u16", lambda n, a: a >> (n & np.uint16(15))),
    "pk_ashrrev_i16": ("i16", lambda n, a: a >> (n & np.int16(15))),
}
"""Mnemonic behind ``v_`` -> type of both halves, and the function."""

PAIRS: dict[str, Callable[..., Array]] = {
    "pk_add_f32": np.add,
    "pk_mul_f32": np.multiply,
    "pk_fma_f32": fma,
}


def _signs(i: Instruction, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    none = (0,) * count
    return i.bits("neg_lo", none), i.bits("neg_hi", none)


def _selected(i: Instruction, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return i.bits("op_sel", (0,) * count), i.bits("op_sel_hi", (1,) * count)


def _no_modifiers(i: Instruction, *allowed: str) -> None:
    """Refuse what the tables do not know."""
    if set(i.modifiers) - set(allowed):
        raise GcnError(f"the emulator does not know a modifier of {i.text}")


def halves(i: Instruction, name: str) -> Step:
    """Packed math of two 16-bit numbers."""
    _no_modifiers(i, "op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    kind, function = HALVES[name]
    given = [words(operand, "f16" if kind == "f16" else "u32") for operand in i.operands[1:]]
    selected, signs = _selected(i, len(given)), _signs(i, len(given))
    write, dtype = store_words(i.operands[0]), {"f16": np.float16, "u16": np.uint16, "i16": np.int16}[kind]

    def step(w: Wave) -> None:
        held = [read(w) for read in given]
        found = []
        for places, negated in zip(selected, signs, strict=True):
            parts = [_half(word, place, dtype) for word, place in zip(held, places, strict=True)]
            parts = [-part if minus else part for part, minus in zip(parts, negated, strict=True)]
            found.append(np.asarray(function(*parts), dtype).view(np.uint16).astype(np.uint32))
        write(w, found[0] | found[1] << U(16))

    return step


def _half(word: Array, upper: int, dtype: Any) -> Array:
    """Return the lower or upper half of words as a type."""
    bits = word >> U(16) if upper else word & U(0xFFFF)
    return np.asarray(bits).astype(np.uint16).view(dtype)


def pairs(i: Instruction, name: str) -> Step:
    """Packed math of two float32 in two registers."""
    _no_modifiers(i, "op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    selected, signs = _selected(i, len(i.operands) - 1), _signs(i, len(i.operands) - 1)
    upper = zip(i.operands[1:], *selected, strict=True)
    if any(operand.kind == "literal" and operand.text != "0" and (a or b) for operand, a, b in upper):
        raise GcnError(f"the emulator knows no upper half of a constant of packed float32: {i.text}")
    given, function = [_two_floats(operand) for operand in i.operands[1:]], PAIRS[name]
    writes = [store_words(Operand(i.operands[0].kind, i.operands[0].index + at)) for at in (0, 1)]

    def step(w: Wave) -> None:
        held = [read(w) for read in given]
        found = []
        for places, negated in zip(selected, signs, strict=True):
            parts = [
                (wide >> np.uint64(32 * at)).astype(U).view(np.float32)
                for wide, at in zip(held, places, strict=True)
            ]
            parts = [-part if minus else part for part, minus in zip(parts, negated, strict=True)]
            found.append(np.asarray(function(*parts), np.float32).view(U))
        for write, value in zip(writes, found, strict=True):
            write(w, value)

    return step


def _two_floats(operand: Operand) -> Callable[[Wave], Array]:
    """Return what reads 64 bits of a source; a constant is a float32 in the lower half."""
    if operand.kind != "literal":
        return long_words(operand)
    constant = words(operand, "f32")
    return lambda w: constant(w).astype(np.uint64)


def move_pair(i: Instruction, name: str) -> Step:
    """``v_pk_mov_b32``: one register of each source."""
    _no_modifiers(i, "op_sel", "op_sel_hi")
    given = [long_words(operand) for operand in i.operands[1:]]
    low, high = i.bits("op_sel", (0, 0))[0], i.bits("op_sel", (0, 0))[1]
    writes = [store_words(Operand(i.operands[0].kind, i.operands[0].index + at)) for at in (0, 1)]

    def step(w: Wave) -> None:
        found = [
            (read(w) >> np.uint64(32 * at)).astype(U) for read, at in zip(given, (low, high), strict=True)
        ]
        for write, value in zip(writes, found, strict=True):
            write(w, value)

    return step


# ---- mixed precision ---------------------------------------------------------------------------------
def mixed(i: Instruction, name: str) -> Step:
    """``v_fma_mix*``: a float32 multiply-add whose operands may be halves; its result may be one."""
    _no_modifiers(i, "op_sel", "op_sel_hi")
    upper, narrow = i.bits("op_sel", (0, 0, 0)), i.bits("op_sel_hi", (0, 0, 0))
    reads = [_mixed_source(*given) for given in zip(i.operands[1:], upper, narrow, strict=True)]
    to = i.operands[0]
    write, keep = store_words(to), {"fma_mixlo_f16": 0xFFFF0000, "fma_mixhi_f16": 0xFFFF}.get(name)

    def step(w: Wave) -> None:
        found = fma(*(read(w) for read in reads))
        if keep is None:
            write(w, found.view(U))
            return
        bits = found.astype(np.float16).view(np.uint16).astype(U)
        bits = bits << U(16) if keep == 0xFFFF else bits
        write(w, bits | w.v[to.index] & U(keep))

    return step


def _mixed_source(operand: Operand, upper: int, narrow: int) -> Callable[[Wave], Array]:
    """Return what reads a float32, or a half as one, with its sign."""
    plain = words(operand, "f16" if narrow else "f32")

    def read(w: Wave) -> Array:
        held = plain(w)
        value = _half(held, upper, np.float16).astype(np.float32) if narrow else held.view(np.float32)
        value = np.abs(value) if operand.absolute else value
        return -value if operand.negated else value

    return read


def pack_halves(i: Instruction, name: str) -> Step:
    """``v_pack_b32_f16``: two halves in one register."""
    _no_modifiers(i, "op_sel")
    low, high = (words(operand, "f16") for operand in i.operands[1:3])
    places, write = i.bits("op_sel", (0, 0)), store_words(i.operands[0])

    def step(w: Wave) -> None:
        first, second = (
            np.asarray(read(w)) >> U(16 * at) & U(0xFFFF)
            for read, at in zip((low, high), places, strict=False)
        )
        write(w, first | second << U(16))

    return step


def convert_pair(i: Instruction, name: str) -> Step:
    """``v_cvt_pk_f16_f32`` and ``v_cvt_pk_bf16_f32``: two float32 rounded to halves."""
    _no_modifiers(i)
    dtype = NUMPY["bfloat16"] if "bf16" in name else np.dtype(np.float16)
    low, high, write = source(i.operands[1], "f32"), source(i.operands[2], "f32"), store_words(i.operands[0])

    def step(w: Wave) -> None:
        first, second = (read(w).astype(dtype).view(np.uint16).astype(U) for read in (low, high))
        write(w, first | second << U(16))

    return step


def convert_bytes(i: Instruction, name: str) -> Step:
    """``v_cvt_pk_fp8_f32`` and ``v_cvt_pk_bf8_f32``: two float32 to half a register."""
    _no_modifiers(i, "op_sel")
    reads, to = [source(operand, "f32") for operand in i.operands[1:3]], i.operands[0]
    upper, write, kind = i.bits("op_sel", (0, 0, 0))[2], store_words(to), name.split("_")[2]

    def step(w: Wave) -> None:
        dtype, (low, high) = NUMPY[w.group.core.bytes_as[kind]], (np.asarray(read(w)) for read in reads)
        write(w, arithmetic.to_bytes(low, high, w.v[to.index], U(upper), dtype))

    return step


def convert_from_bytes(i: Instruction, name: str) -> Step:
    """``v_cvt_pk_f32_fp8`` and ``v_cvt_pk_f32_bf8``: two 8-bit floats of half a register."""
    _no_modifiers(i, "op_sel", "src0_sel")
    upper = i.bits("op_sel", (0,))[0] or i.modifiers.get("src0_sel") == "WORD_1"
    read, kind = words(i.operands[1]), name.split("_")[3]
    writes = [store_words(Operand("v", i.operands[0].index + at)) for at in (0, 1)]

    def step(w: Wave) -> None:
        found = arithmetic.from_bytes(np.asarray(read(w)), U(upper), NUMPY[w.group.core.bytes_as[kind]])
        for at, write in enumerate(writes):
            write(w, found[..., at].view(U))

    return step


CONVERSIONS = {
    f"cvt_scalef32_pk_{to}_{of}": (of, to) for of in conversions.SOURCES for to in conversions.RESULTS
}


def convert_scaled(i: Instruction, name: str) -> Step:
    """``v_cvt_scalef32_pk_*``: two narrow floats of a byte or half of a register, times a power of two."""
    _no_modifiers(i, "op_sel")
    word, scale = words(i.operands[1]), words(i.operands[2], "f32")
    low, high, _ = i.bits("op_sel", (0, 0, 0))
    write, (source_name, to) = store_words(i.operands[0]), CONVERSIONS[name]
    place = low + 2 * high if conversions.SOURCES[source_name][0] == 4 else low
    return lambda w: write(w, conversions.convert(word(w), scale(w), place, source_name, to))


# ---- dot products and MFMA ---------------------------------------------------------------------------
DOTS = {
    "dot2_f32_f16": "float16",
    "dot2c_f32_f16": "float16",
    "dot2_f32_bf16": "bfloat16",
    "dot2c_f32_bf16": "bfloat16",
}


def dot(i: Instruction, name: str) -> Step:
    """``v_dot2``: two products of halves and a float32, rounded once; CDNA2 flushes subnormal numbers."""
    _no_modifiers(i)
    kind, given = DOTS[name], i.operands[1:] if "dot2_" in name else (*i.operands[1:], i.operands[0])
    a, b, c = (words(operand, "f32") for operand in given)
    write = result(i, "f32")

    def step(w: Wave) -> None:
        x, y = (arithmetic.halves(read(w), kind) for read in (a, b))
        write(w, arithmetic.dot_pairs(x, y, c(w).view(np.float32), kind, w.group.core.flushes))

    return step


def matrix(i: Instruction, name: str) -> Step:
    """``v_mfma_*``."""
    _no_modifiers(i)
    to, *given = i.operands
    spelled = (
        "llvm.amdgcn." + name.removesuffix("_1k").replace("_", ".") + (".1k" if name.endswith("_1k") else "")
    )
    if any(operand.kind not in ("v", "a") for operand in given[:2]):
        raise GcnError(f"the emulator knows no constant operands of {i.text}")

    def step(w: Wave) -> None:
        require_whole(w, i)
        what = _product(spelled, w.group.core, i)
        a, b = (registers_of(w, operand).view(np.uint8) for operand in given[:2])
        c = np.zeros((LANES, to.count), U) if given[2].kind == "literal" else registers_of(w, given[2])
        kind = np.int32 if what.integer else np.float32
        sums = mfma.multiply(what, w.group.core, a[None], b[None], c.view(kind)[None])[0].astype(kind)
        getattr(w, to.kind)[to.index : to.index + to.count] = sums.view(U).T

    if given[2].kind == "literal" and given[2].text != "0":
        raise GcnError(f"the emulator knows no constant sums but 0: {i.text}")
    return step


SCALED = "mfma_scale_f32_16x16x128_f8f6f4"


def scaled_matrix(i: Instruction) -> Step:
    """``v_mfma_scale_*`` whose scales lie in byte 0."""
    _no_modifiers(i, "op_sel", "op_sel_hi", "cbsz", "blgp")
    kinds = i.number("cbsz"), i.number("blgp")
    chosen = (*i.bits("op_sel", (0, 0, 0)), *i.bits("op_sel_hi", (1, 1, 1)))
    to, *given = i.operands
    registers = all(operand.kind in ("v", "a") for operand in (*given[:2], *given[3:5]))
    wide = [4 * operand.count for operand in given[:2]]
    known = all(0 <= kind < len(scaled.ELEMENTS) for kind in kinds)
    if not known or wide != [scaled.ELEMENTS[kind].size for kind in kinds] or any(chosen) or not registers:
        raise GcnError(f"the emulator does not know {i.text}")
    if given[2].kind == "literal" and given[2].text != "0":
        raise GcnError(f"the emulator knows no constant sums but 0: {i.text}")

    def step(w: Wave) -> None:
        require_whole(w, i)
        a, b = (registers_of(w, operand).view(np.uint8)[None] for operand in given[:2])
        scales = [registers_of(w, operand)[None, :, 0] for operand in given[3:5]]
        c = np.zeros((LANES, to.count), U) if given[2].kind == "literal" else registers_of(w, given[2])
        sums = scaled.multiply(a, b, c.view(np.float32)[None], (scales[0], scales[1]), kinds)[0]
        getattr(w, to.kind)[to.index : to.index + to.count] = sums.view(U).T

    return step


def _product(spelled: str, core: mfma.Core, i: Instruction) -> mfma.Product:
    """Return the shape of a matrix instruction; CDNA3 calls bfloat16 what CDNA2 calls ``bf16_1k``."""
    for name in (spelled, f"{spelled}.1k"):
        try:
            return mfma.parse(name, core)
        except UnknownCallError:
            continue
    raise GcnError(f"{core.arch} has no {i.text}, or the emulator does not know it")


def registers_of(w: Wave, operand: Operand) -> Array:
    """Return neighbouring registers as ``[lanes, registers]``."""
    held = getattr(w, operand.kind)[operand.index : operand.index + operand.count]
    return np.ascontiguousarray(held.T)


ROWS: tuple[tuple[Any, Callable[[Instruction, str], Step]], ...] = (
    (HALVES, halves),
    (PAIRS, pairs),
    ({"pk_mov_b32"}, move_pair),
    ({"fma_mix_f32", "fma_mixlo_f16", "fma_mixhi_f16"}, mixed),
    ({"pack_b32_f16"}, pack_halves),
    ({"cvt_pk_f16_f32", "cvt_pk_bf16_f32"}, convert_pair),
    ({"cvt_pk_fp8_f32", "cvt_pk_bf8_f32"}, convert_bytes),
    ({"cvt_pk_f32_fp8", "cvt_pk_f32_bf8"}, convert_from_bytes),
    (CONVERSIONS, convert_scaled),
    (DOTS, dot),
)
"""Mnemonics behind ``v_``, and what makes their closures."""


def translate(i: Instruction) -> Step | None:
    """Return the closure of such an instruction; None if it is none that is known."""
    name = i.op.removeprefix("v_")
    if name == SCALED:
        return scaled_matrix(i)
    if name.startswith("mfma_"):
        return matrix(i, name)
    return next((make(i, name) for names, make in ROWS if name in names), None)
