"""Vector instructions of one result: tables of types and functions, and what makes closures of their rows.

Semantics: AMD Instinct MI300 ISA, sections 16.6 (VOP2) to 16.9 (VOP3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ladder.simulate.amd.arithmetic import align, dot_integers, field, fma, perm, signed_field, special
from ladder.simulate.amd.lanes import NOWHERE, dpp_sources
from ladder.simulate.gcn import floats as f
from ladder.simulate.gcn.listing import VCC, GcnError, Instruction, Operand
from ladder.simulate.gcn.memory import require_whole
from ladder.simulate.gcn.wave import (
    LANES,
    ONES,
    Read,
    Wave,
    mask_result,
    mask_source,
    number_of,
    result,
    source,
)
from ladder.simulate.nvidia.helpers import lop3
from ladder.simulate.values import Array

Step = Callable[[Wave], Any]
Row = tuple[str, str, Callable[..., Any]]
"""Type of the result, types of the sources, function."""

U, W = np.uint32, np.uint64
LOW24 = U(0xFFFFFF)


def _low24(x: Array) -> Array:
    """Return the signed number in the low 24 bits."""
    found: Array = (x.astype(np.int64) & 0xFFFFFF ^ 0x800000) - 0x800000
    return found


def _reverse(x: Array) -> Array:
    bits = np.unpackbits(np.ascontiguousarray(np.atleast_1d(x)).view(np.uint8), bitorder="little")
    return (
        np.packbits(bits.reshape(-1, 32)[:, ::-1], axis=1, bitorder="little").view(np.uint32).reshape(x.shape)
    )


def _leading(x: Array) -> Array:
    """Return how many zeros lead, -1 without a one."""
    found: Array = np.where(x == 0, U(ONES), U(32) - np.frexp(x.astype(np.float64))[1].astype(np.uint32))
    return found


def _high(a: Array, b: Array, dtype: Any) -> Array:
    found: Array = (a.astype(dtype) * b.astype(dtype) >> dtype(32)).astype(np.uint32)
    return found


def _median(a: Array, b: Array, c: Array) -> Array:
    found: Array = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    return found


def _mul_add(signed: bool) -> Callable[..., Array]:
    def function(a: Array, b: Array, c: Array) -> Array:
        x, y = (_low24(value) if signed else value.astype(np.int64) & 0xFFFFFF for value in (a, b))
        found: Array = (x * y + c.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)
        return found

    return function


_mul_add_signed, _mul_add_unsigned = _mul_add(True), _mul_add(False)
NONE = np.zeros((), np.uint32)


def _shift(function: Callable[..., Any], bits: int) -> Callable[..., Array]:
    """Return a shift, whose first operand says by how many places."""
    return lambda n, a: function(a, (n & n.dtype.type(bits - 1)).astype(a.dtype))


SHIFTS = (
    ("lshlrev", "b", "u", np.left_shift),
    ("lshrrev", "b", "u", np.right_shift),
    ("ashrrev", "i", "i", np.right_shift),
)
"""Name, letter of the type in the instruction, type of the operand, function."""


def _rows(types: str, count: int, **functions: Callable[..., Any]) -> dict[str, Row]:
    """Return instructions of ``count`` operands that are all of the result's type; ``b`` stands for ``u``."""
    kinds = {t: t.replace("b", "u") for t in types.split()}
    return {
        f"{name}_{t}": (kind, " ".join([kind] * count), function)
        for name, function in functions.items()
        for t, kind in kinds.items()
    }


TABLE: dict[str, Row] = {
    # floats
    **_rows("f32 f16", 1, rndne=np.rint, floor=np.floor, ceil=np.ceil, trunc=np.trunc),
    **_rows("f32 f16", 2, add=np.add, sub=np.subtract, mul=np.multiply, max=f.larger, min=f.smaller),
    **_rows("f32 f16", 3, fma=fma, div_fixup=f.div_fixup),
    **_rows("f32", 1, exp=special(np.exp2), log=special(np.log2), sqrt=special(np.sqrt)),
    **_rows("f32", 1, rcp=special(lambda x: 1.0 / x), rcp_iflag=special(lambda x: 1.0 / x)),
    **_rows("f32", 1, rsq=special(lambda x: 1.0 / np.sqrt(x))),
    **_rows("f32", 2, mul_legacy=f.product_or_zero, maximum=np.maximum, minimum=np.minimum),
    **_rows("f32", 3, med3=f.median, fmaak=fma, fmamk=fma, mad=f.flushed_sum),
    **_rows("f32", 3, maximum3=lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    **_rows("f32", 3, minimum3=lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    **_rows("f32", 3, max3=lambda a, b, c: f.larger(f.larger(a, b), c)),
    **_rows("f32", 3, min3=lambda a, b, c: f.smaller(f.smaller(a, b), c)),
    **_rows("f32", 3, minmax=lambda a, b, c: f.larger(f.smaller(a, b), c)),
    **_rows("f32", 3, maxmin=lambda a, b, c: f.smaller(f.larger(a, b), c)),
    "ldexp_f32": ("f32", "f32 i32", lambda a, n: np.ldexp(a, np.clip(n, -400, 400))),
    # conversions
    "cvt_f32_f16": ("f32", "f16", lambda x: x.astype(np.float32)),
    "cvt_f16_f32": ("f16", "f32", lambda x: x.astype(np.float16)),
    "cvt_f32_i32": ("f32", "i32", lambda x: x.astype(np.float32)),
    "cvt_f32_u32": ("f32", "u32", lambda x: x.astype(np.float32)),
    "cvt_f16_i16": ("f16", "i16", lambda x: x.astype(np.float16)),
    "cvt_f16_u16": ("f16", "u16", lambda x: x.astype(np.float16)),
    "cvt_i32_f32": ("i32", "f32", f.to_integer(np.int32)),
    "cvt_u32_f32": ("u32", "f32", f.to_integer(np.uint32)),
    **{f"cvt_f32_ubyte{i}": ("f32", "u32", lambda x, i=i: (x >> U(8 * i) & U(0xFF)).astype(np.float32))
       for i in range(4)},
    # integers
    **_rows("b32 b16 b64", 1, mov=lambda x: x),
    **_rows("b32", 1, **{"not": np.invert}, bfrev=_reverse),
    "bcnt_u32_b32": ("u32", "u32 u32", lambda a, b: np.bitwise_count(a).astype(np.uint32) + b),
    "ffbh_u32": ("u32", "u32", _leading),
    "ffbh_i32": ("u32", "i32", lambda x: _leading((x ^ x >> np.int32(31)).astype(np.uint32))),
    **_rows("b32 b16", 2, **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}),
    **_rows("b32", 2, xnor=lambda a, b: ~(a ^ b)),
    **_rows("u32 u16 f32", 2, subrev=lambda a, b: b - a),
    **_rows("u32 u16", 2, add=np.add, sub=np.subtract, mul_lo=np.multiply),
    **_rows("u32 i32 u16 i16", 2, max=np.maximum, min=np.minimum),
    **_rows("u32 i32", 3, max3=lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    **_rows("u32 i32", 3, min3=lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    **_rows("u32 i32 u16 i16", 3, med3=_median),
    **_rows("u16", 3, mad=lambda a, b, c: a * b + c, mad_legacy=lambda a, b, c: a * b + c),
    **_rows("u32", 3, add3=lambda a, b, c: a + b + c, xad=lambda a, b, c: (a ^ b) + c, bfe=field),
    **_rows("u32", 3, lshl_add=lambda a, n, c: (a << (n & U(31))) + c),
    **_rows("u32", 3, add_lshl=lambda a, b, n: a + b << (n & U(31))),
    **_rows("b32", 3, lshl_or=lambda a, n, c: a << (n & U(31)) | c, and_or=lambda a, b, c: a & b | c),
    **_rows("b32", 3, or3=lambda a, b, c: a | b | c, xor3=lambda a, b, c: a ^ b ^ c),
    **_rows("b32", 3, bfi=lambda m, a, b: m & a | ~m & b, perm=perm, alignbit=align(1), alignbyte=align(8)),
    "bfe_i32": ("u32", "u32 u32 u32", signed_field),
    "mul_hi_u32": ("u32", "u32 u32", lambda a, b: _high(a, b, np.uint64)),
    "mul_hi_i32": ("u32", "i32 i32", lambda a, b: _high(a, b, np.int64)),
    "mul_u32_u24": ("u32", "u32 u32", lambda a, b: (a & LOW24) * (b & LOW24)),
    "mul_i32_i24": ("u32", "u32 u32", lambda a, b: _mul_add_signed(a, b, NONE)),
    "mad_u32_u24": ("u32", "u32 u32 u32", _mul_add_unsigned),
    "mad_i32_i24": ("u32", "u32 u32 u32", _mul_add_signed),
    "dot4_i32_i8": ("u32", "u32 u32 u32", dot_integers(8, True)),
    "dot4_u32_u8": ("u32", "u32 u32 u32", dot_integers(8, False)),
    "dot8_i32_i4": ("u32", "u32 u32 u32", dot_integers(4, True)),
    # shifts
    **{f"{name}_{of}{bits}": (f"{to}{bits}", f"u{min(bits, 32)} {to}{bits}", _shift(function, bits))
       for name, of, to, function in SHIFTS for bits in (16, 32, 64)},
    "lshl_add_u64": ("u64", "u64 u32 u64", lambda a, n, c: (a << (n & U(63)).astype(W)) + c),
}  # fmt: skip
"""Mnemonic behind ``v_`` -> its row."""

ACCUMULATING: dict[str, Row] = {
    "fmac_f32": ("f32", "f32 f32 f32", fma),
    "mac_f32": ("f32", "f32 f32 f32", f.flushed_sum),
    "fmac_f16": ("f16", "f16 f16 f16", fma),
    "dot4c_i32_i8": ("u32", "u32 u32 u32", dot_integers(8, True)),
    "dot8c_i32_i4": ("u32", "u32 u32 u32", dot_integers(4, True)),
}
"""The same where the result is added to: its register is the last source."""


def moved_lanes(i: Instruction) -> Callable[[Wave, Array], Array]:
    """Return what DPP does to a source; lanes without a source, or that are not active, give 0."""
    control = dpp_control(i)
    source_lane = dpp_sources(control, LANES)
    if (
        i.modifiers.get("bound_ctrl") not in ("1", "0")
        or i.number("row_mask", 15) != 15
        or i.number("bank_mask", 15) != 15
    ):
        raise GcnError(f"the emulator knows DPP with all rows, all banks and bound_ctrl only: {i.text}")
    there = source_lane != NOWHERE

    def move(w: Wave, held: Array) -> Array:
        require_whole(w, i)
        lanes = np.broadcast_to(held, LANES)[np.maximum(source_lane, 0)]
        return np.where(there & w.mask[np.maximum(source_lane, 0)], lanes, held.dtype.type(0))

    return move


CONTROLS = {"row_shl": 0x100, "row_shr": 0x110, "row_ror": 0x120, "row_newbcast": 0x150}


def dpp_control(i: Instruction) -> int:
    """Return the control word that a DPP modifier stands for."""
    if "quad_perm" in i.modifiers:
        return sum(lane << 2 * at for at, lane in enumerate(i.bits("quad_perm", ())))
    if "row_mirror" in i.modifiers:
        return 0x140
    if "row_half_mirror" in i.modifiers:
        return 0x141
    if "row_bcast" in i.modifiers:
        return {15: 0x142, 31: 0x143}[i.number("row_bcast")]
    for name, base in CONTROLS.items():
        if name in i.modifiers:
            return base | i.number(name)
    raise GcnError(f"the emulator does not know the DPP of {i.text}")


def sources(i: Instruction, operands: tuple[Operand, ...], kinds: list[str]) -> list[Read]:
    """Return what reads the sources of an instruction, with SDWA's selections and DPP's moves."""
    if "op_sel" in i.modifiers or "mul" in i.modifiers or "div" in i.modifiers or "clamp" in i.modifiers:
        raise GcnError(f"the emulator does not know a modifier of {i.text}")
    moved = moved_lanes(i) if i.form.endswith("dpp") else None
    return [
        source(operand, kind, i.modifiers.get(f"src{at}_sel", "DWORD"), moved if at == 0 else None)
        for at, (operand, kind) in enumerate(zip(operands, kinds, strict=True))
    ]


def plain(i: Instruction, name: str) -> Step:
    """Translate a row of `TABLE` or `ACCUMULATING`."""
    to, kinds, function = (TABLE | ACCUMULATING)[name]
    given = i.operands[1:] if name in TABLE else (*i.operands[1:], i.operands[0])
    reads, write = sources(i, given, kinds.split()), result(i, to)
    return lambda w: write(w, function(*(read(w) for read in reads)))


# ---- comparisons, conditions, carries ----------------------------------------------------------------
RELATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ne": np.not_equal, "lg": lambda a, b: (a < b) | (a > b), "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b), "nle": lambda a, b: ~(a <= b), "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b), "nlg": lambda a, b: ~((a < b) | (a > b)),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "u": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip


def compare(i: Instruction, name: str) -> Step:
    """``v_cmp_*``: a truth value for each lane into an SGPR pair."""
    _, relation, kind = name.split("_")
    function = f.is_class if relation == "class" else RELATIONS[relation]
    kinds = [kind, "u32" if relation == "class" else kind]
    reads, write = sources(i, i.operands[1:], kinds), mask_result(i.operands[0])
    return lambda w: write(w, function(*(read(w) for read in reads)))


def choose(i: Instruction, name: str) -> Step:
    """``v_cndmask_b32``, ``_b16``: of floats where one has a sign or is a magnitude."""
    given, bits = i.operands[1:3], name.removeprefix("cndmask_b")
    kind = ("f" if any(operand.negated or operand.absolute for operand in given) else "u") + bits
    reads, write = sources(i, given, [kind, kind]), result(i, kind)
    mask = mask_source(i.operands[3])
    return lambda w: write(w, np.where(mask(w), reads[1](w), reads[0](w)))


def carry(i: Instruction, name: str) -> Step:
    """``v_add_co_u32`` and its kind: a sum or difference, and its carry."""
    reads, write = sources(i, i.operands[2:4], ["u32", "u32"]), result(i, "u32")
    into = mask_result(i.operands[1])
    before = mask_source(i.operands[4]) if len(i.operands) > 4 else lambda w: np.zeros(LANES, np.bool_)
    sign, swapped = (1 if name.startswith("add") else -1), "rev" in name

    def step(w: Wave) -> None:
        a, b = (read(w).astype(np.int64) for read in (reversed(reads) if swapped else reads))
        total = a + sign * (b + before(w).astype(np.int64))
        write(w, (total & 0xFFFFFFFF).astype(np.uint32))
        into(w, (total < 0) | (total > 0xFFFFFFFF))

    return step


def wide_mul_add(i: Instruction, name: str) -> Step:
    """``v_mad_u64_u32`` and ``v_mad_i64_i32``."""
    kind = "u" if "u64" in name else "i"
    reads = sources(i, i.operands[2:5], [f"{kind}32", f"{kind}32", f"{kind}64"])
    write, dtype = result(i, "u64"), np.dtype(f"{kind}8")

    def step(w: Wave) -> None:
        a, b, c = (read(w).astype(dtype) for read in reads)
        write(w, (a * b + c).view(np.uint64))

    return step


def divide(i: Instruction, name: str) -> Step:
    """``v_div_scale_f32`` and ``v_div_fmas_f32``."""
    write = result(i, "f32")
    if name == "div_scale_f32":
        reads, into = sources(i, i.operands[2:5], ["f32"] * 3), mask_result(i.operands[1])

        def scale(w: Wave) -> None:
            value, flag = f.div_scale(*(np.broadcast_to(read(w), LANES) for read in reads))
            write(w, value)
            into(w, flag)

        return scale
    reads, flags = sources(i, i.operands[1:4], ["f32"] * 3), mask_source(Operand("s", VCC, 2))
    a, b, c = reads
    return lambda w: write(w, f.div_fmas(a(w), b(w), c(w), flags(w)))


def truth_table(i: Instruction, name: str) -> Step:
    """``v_bitop3_b32``, ``v_bitop3_b16``: any bitwise function of three words, or of their lower halves."""
    if set(i.modifiers) - {"bitop3"}:
        raise GcnError(f"the emulator does not know a modifier of {i.text}")
    inner = Instruction(i.text, i.op, i.form, i.operands, {})
    reads, write = sources(inner, i.operands[1:4], ["u32"] * 3), result(inner, "u32")
    a, b, c = reads
    table = f"{i.number('bitop3'):x}"
    kept = np.uint32(0xFFFF if name == "bitop3_b16" else ONES)
    return lambda w: write(w, lop3(a(w), b(w), c(w), table) & kept)


# ---- lanes and registers -----------------------------------------------------------------------------
def read_lane(i: Instruction, name: str) -> Step:
    """``v_readfirstlane_b32`` and ``v_readlane_b32``."""
    to, value = i.operands[0].index, source(i.operands[1], "u32")
    lane = None if name == "readfirstlane_b32" else source(i.operands[2], "u32")

    def step(w: Wave) -> None:
        at = int(w.mask.argmax()) if lane is None else int(lane(w)) & w.lanes - 1
        w.set_scalar(to, int(np.broadcast_to(value(w), LANES)[at]))

    return step


def write_lane(i: Instruction, name: str) -> Step:
    """``v_writelane_b32``: a scalar becomes the word of one lane, active or not."""
    to, value, lane = i.operands[0].index, source(i.operands[1], "u32"), source(i.operands[2], "u32")
    return lambda w: w.v[to].__setitem__(int(lane(w)) & w.lanes - 1, value(w))


ROWS: tuple[tuple[Any, Callable[[Instruction, str], Step]], ...] = (
    (TABLE.keys() | ACCUMULATING.keys(), plain),
    ({f"accvgpr_{what}_b32" for what in ("read", "write", "mov")},
     lambda i, name: plain(i, "mov_b32")),
    ({f"cmp_{r}_{t}" for r in RELATIONS for t in ("f32", "f16", "u32", "i32", "u16", "i16", "u64", "i64")}
     | {"cmp_class_f32", "cmp_class_f16"}, compare),
    ({"cndmask_b32", "cndmask_b16"}, choose),
    ({f"{kind}_co_u32" for kind in ("add", "addc", "sub", "subb", "subrev", "subbrev")}, carry),
    ({"mad_u64_u32", "mad_i64_i32"}, wide_mul_add),
    ({"div_scale_f32", "div_fmas_f32"}, divide),
    ({"bitop3_b32", "bitop3_b16"}, truth_table),
    ({"readfirstlane_b32", "readlane_b32"}, read_lane),
    ({"writelane_b32"}, write_lane),
)  # fmt: skip
"""Mnemonics behind ``v_``, and what makes their closures."""


def translate(i: Instruction) -> Step | None:
    """Return the closure of a vector instruction; None if it is none that is known."""
    if not i.op.startswith("v_"):
        return None
    name = i.op.removeprefix("v_")
    return next((make(i, name) for names, make in ROWS if name in names), None)


__all__ = ["number_of", "translate"]
