"""Scalar instructions: arithmetic of SGPRs, branches, the masks of active lanes.

Semantics: AMD Instinct MI300 ISA, sections 16.1 to 16.5 (SOP2, SOPK, SOP1, SOPC, SOPP); RDNA4 ISA, SOP2, of
64-bit sums.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ladder.simulate.gcn import scalar_floats
from ladder.simulate.gcn.listing import EXEC, VCC, GcnError, Instruction, Operand
from ladder.simulate.gcn.wave import EVERY, ONES, Wave, literal_bits

Step = Callable[[Wave], Any]
Function = Callable[..., tuple[int, int | None]]
"""Values of sources -> result, and the new SCC where the instruction writes it."""


def signed(value: int, bits: int = 32) -> int:
    """Return unsigned bits as a signed number."""
    return value - (1 << bits) if value >> bits - 1 & 1 else value


def read(operand: Operand, count: int) -> Callable[[Wave], int]:
    """Return what reads a scalar source of 32 or 64 bits."""
    if operand.kind == "s":
        index = operand.index
        return lambda w: w.scalar(index, count)
    if operand.kind != "literal":
        raise GcnError("a scalar instruction reads a vector register")
    bits = literal_bits(operand.text, "u32")
    if count == 2 and operand.text.startswith("-"):
        bits |= ONES << 32
    return lambda w: bits


def _flag(value: int) -> tuple[int, int | None]:
    return value, int(value != 0)


def _add(a: int, b: int) -> tuple[int, int]:
    return (a + b) & ONES, int(not -(1 << 31) <= signed(a) + signed(b) < 1 << 31)


def _field(word: int, where: int, bits: int, is_signed: bool) -> tuple[int, int | None]:
    offset, width = where & bits - 1, where >> 16 & 0x7F
    found = word >> offset & (1 << width) - 1 if width else 0
    if is_signed and width and found >> width - 1:
        found |= (1 << bits) - (1 << width)
    return _flag(found & (1 << bits) - 1)


def _lowest(value: int) -> tuple[int, None]:
    return ((value & -value).bit_length() - 1 & ONES, None)


def _leading(value: int, bits: int = 32) -> tuple[int, None]:
    """Return how many zeros lead, -1 without a one."""
    return (bits - value.bit_length() if value else ONES), None


def _leading_signs(value: int) -> tuple[int, None]:
    """Return how many bits lead that equal the first, -1 if all do."""
    return _leading(value ^ (ONES if value >> 31 else 0))


BINARY: dict[str, tuple[int, Function]] = {
    "add_u32": (1, lambda a, b: ((a + b) & ONES, a + b >> 32)),
    "sub_u32": (1, lambda a, b: ((a - b) & ONES, int(b > a))),
    "add_i32": (1, _add),
    "sub_i32": (1, lambda a, b: ((a - b) & ONES, int(not -(1 << 31) <= signed(a) - signed(b) < 1 << 31))),
    "mul_i32": (1, lambda a, b: (a * b & ONES, None)),
    "mul_hi_u32": (1, lambda a, b: (a * b >> 32, None)),
    "mul_hi_i32": (1, lambda a, b: (signed(a) * signed(b) >> 32 & ONES, None)),
    "min_i32": (1, lambda a, b: (a if signed(a) < signed(b) else b, int(signed(a) < signed(b)))),
    "max_i32": (1, lambda a, b: (a if signed(a) > signed(b) else b, int(signed(a) > signed(b)))),
    "min_u32": (1, lambda a, b: (min(a, b), int(a < b))),
    "max_u32": (1, lambda a, b: (max(a, b), int(a > b))),
    "bfe_u32": (1, lambda a, b: _field(a, b, 32, False)),
    "bfe_i32": (1, lambda a, b: _field(a, b, 32, True)),
    "bfm_b32": (1, lambda a, b: (((1 << (a & 31)) - 1 << (b & 31)) & ONES, None)),
    "add_nc_u64": (2, lambda a, b: (a + b & EVERY, None)),
    "sub_nc_u64": (2, lambda a, b: (a - b & EVERY, None)),
    "mul_u64": (2, lambda a, b: (a * b & EVERY, None)),
    "pack_ll_b32_b16": (1, lambda a, b: (a & 0xFFFF | (b & 0xFFFF) << 16, None)),
    "pack_lh_b32_b16": (1, lambda a, b: (a & 0xFFFF | b & 0xFFFF0000, None)),
    "pack_hh_b32_b16": (1, lambda a, b: (a >> 16 | b & 0xFFFF0000, None)),
}
"""Mnemonic behind ``s_`` -> registers of an operand, and what it computes of two."""

BITWISE: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
"""The same of bits, for 32 and 64 of them."""

SHIFTS: dict[str, Callable[[int, int, int], int]] = {
    "lshl": lambda a, n, bits: a << n & (1 << bits) - 1,
    "lshr": lambda a, n, bits: a >> n,
    "ashr": lambda a, n, bits: signed(a, bits) >> n & (1 << bits) - 1,
}

UNARY: dict[str, tuple[int, Function]] = {
    "mov_b32": (1, lambda a: (a, None)),
    "mov_b64": (2, lambda a: (a, None)),
    "not_b32": (1, lambda a: _flag(~a & ONES)),
    "not_b64": (2, lambda a: _flag(~a & EVERY)),
    "abs_i32": (1, lambda a: _flag(abs(signed(a)) & ONES)),
    "brev_b32": (1, lambda a: (int(f"{a:032b}"[::-1], 2), None)),
    "sext_i32_i8": (1, lambda a: (signed(a & 0xFF, 8) & ONES, None)),
    "sext_i32_i16": (1, lambda a: (signed(a & 0xFFFF, 16) & ONES, None)),
    "bcnt1_i32_b32": (1, lambda a: _flag(a.bit_count())),
    "bcnt1_i32_b64": (2, lambda a: _flag(a.bit_count())),
    "ff1_i32_b32": (1, _lowest),
    "ff1_i32_b64": (2, _lowest),
    "flbit_i32": (1, _leading_signs),
    "flbit_i32_b32": (1, _leading),
    "flbit_i32_b64": (2, lambda a: _leading(a, 64)),
}

COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}

SAVES: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, exec_: a & exec_,
    "or": lambda a, exec_: a | exec_,
    "xor": lambda a, exec_: a ^ exec_,
    "andn2": lambda a, exec_: a & ~exec_,
    "andn1": lambda a, exec_: ~a & exec_,
}
"""``s_*_saveexec``: what becomes of the active lanes."""

BRANCHES: dict[str, Callable[[Wave], bool]] = {
    "branch": lambda w: True,
    "cbranch_scc0": lambda w: not w.scc,
    "cbranch_scc1": lambda w: bool(w.scc),
    "cbranch_vccz": lambda w: not w.scalar(VCC, w.mask_words),
    "cbranch_vccnz": lambda w: bool(w.scalar(VCC, w.mask_words)),
    "cbranch_execz": lambda w: not w.scalar(EXEC, w.mask_words),
    "cbranch_execnz": lambda w: bool(w.scalar(EXEC, w.mask_words)),
}


def _writing(i: Instruction, function: Callable[[Wave], tuple[int, int | None]], count: int) -> Step:
    to = i.operands[0]

    def step(w: Wave) -> None:
        value, flag = function(w)
        w.set_scalar(to.index, value, count)
        if flag is not None:
            w.scc = flag

    return step


def _binary(i: Instruction, name: str) -> Step:
    count, function = BINARY[name]
    a, b = (read(operand, count) for operand in i.operands[1:3])
    return _writing(i, lambda w: function(a(w), b(w)), count)


def _bitwise(i: Instruction, name: str) -> Step:
    kind, _, size = name.partition("_b")
    count, function, every = int(size) // 32, BITWISE[kind], (1 << int(size)) - 1
    a, b = (read(operand, count) for operand in i.operands[1:3])
    return _writing(i, lambda w: _flag(function(a(w), b(w)) & every), count)


def _unary(i: Instruction, name: str) -> Step:
    count, function = UNARY[name]
    a = read(i.operands[1], count)
    return _writing(i, lambda w: function(a(w)), i.operands[0].count)


def _shift(i: Instruction, name: str) -> Step:
    kind, _, size = name.partition("_")
    bits, function = int(size[1:]), SHIFTS[kind]
    a, n = read(i.operands[1], bits // 32), read(i.operands[2], 1)
    return _writing(i, lambda w: _flag(function(a(w), n(w) & bits - 1, bits)), bits // 32)


def _shift_add(i: Instruction, name: str) -> Step:
    places = int(name[4])
    a, b = (read(operand, 1) for operand in i.operands[1:3])

    def function(w: Wave) -> tuple[int, int]:
        total = (a(w) << places) + b(w)
        return total & ONES, int(total > ONES)

    return _writing(i, function, 1)


def _carry(i: Instruction, name: str) -> Step:
    a, b = (read(operand, 1) for operand in i.operands[1:3])

    def add(w: Wave) -> tuple[int, int]:
        total = a(w) + b(w) + w.scc
        return total & ONES, total >> 32

    def subtract(w: Wave) -> tuple[int, int]:
        total = a(w) - b(w) - w.scc
        return total & ONES, int(total < 0)

    return _writing(i, add if name == "addc_u32" else subtract, 1)


def _immediate(i: Instruction, name: str) -> Step:
    """SOPK: ``s_movk``, ``s_addk``, ``s_mulk``, whose operand is a signed 16-bit number."""
    to = i.operands[0]
    value = signed(int(i.operands[1].text, 0) & 0xFFFF, 16) & ONES
    function: dict[str, Callable[[int], tuple[int, int | None]]] = {
        "movk_i32": lambda held: (value, None),
        "addk_i32": lambda held: _add(held, value),
        "mulk_i32": lambda held: (held * value & ONES, None),
    }
    return _writing(i, lambda w: function[name](w.scalar(to.index)), 1)


def _compare(i: Instruction, name: str) -> Step:
    relation, _, kind = name.removeprefix("cmp_").removeprefix("cmpk_").partition("_")
    count = 2 if kind.endswith("64") else 1
    a, b = (read(operand, count) for operand in i.operands)
    of = signed if kind == "i32" else lambda value: value
    test = COMPARISONS[relation]

    def step(w: Wave) -> None:
        w.scc = int(test(of(a(w)), of(b(w))))

    return step


def _bit(i: Instruction, name: str) -> Step:
    a, b = (read(operand, 1) for operand in i.operands)
    wanted = int(name[6])

    def step(w: Wave) -> None:
        w.scc = int((a(w) >> (b(w) & 31) & 1) == wanted)

    return step


def _set_bit(i: Instruction, name: str) -> Step:
    """``s_bitset``: one bit of the destination; the others stay."""
    to, at, value = i.operands[0], read(i.operands[1], 1), int(name[6])

    def changed(w: Wave) -> tuple[int, None]:
        bit = 1 << (at(w) & 31)
        return w.scalar(to.index) & ~bit | bit * value, None

    return _writing(i, changed, 1)


def _select(i: Instruction, name: str) -> Step:
    count = 2 if name.endswith("64") else 1
    a, b = (read(operand, count) for operand in i.operands[1:3])
    return _writing(i, lambda w: (a(w) if w.scc else b(w), None), count)


def _save(i: Instruction, name: str) -> Step:
    count = int(name[-2:]) // 32
    to, a = i.operands[0], read(i.operands[1], count)
    function = SAVES[name.partition("_")[0]]

    def step(w: Wave) -> None:
        given, before = a(w), w.scalar(EXEC, count)
        w.set_scalar(to.index, before, count)
        w.set_scalar(EXEC, function(given, before) & w.every, count)
        w.scc = int(w.scalar(EXEC, count) != 0)

    return step


def _branch(i: Instruction, name: str, labels: dict[str, int]) -> Step:
    target, taken = labels[i.operands[0].text], BRANCHES[name]

    def step(w: Wave) -> None:
        if taken(w):
            w.pc = target

    return step


DISTANCE = re.compile(r"\((\S+)-(\S+)\)(&4294967295|>>32)")
"""Half of the distance between two labels: beyond the reach of branches, LLVM adds it to the counter."""


def _in_numbers(i: Instruction, labels: dict[str, int]) -> Instruction:
    """Return an instruction with distances between labels as numbers: of instructions, as the counter is."""

    def number(match: re.Match[str]) -> str:
        distance = labels[match[1]] - labels[match[2]]
        return str((distance if match[3].startswith("&") else distance >> 32) & ONES)

    if "(" not in i.text:
        return i
    return replace(
        i, operands=tuple(replace(each, text=DISTANCE.sub(number, each.text)) for each in i.operands)
    )


def _next_place(i: Instruction, name: str) -> Step:
    return _writing(i, lambda w: (w.pc, None), 2)


def _go_to(i: Instruction, name: str) -> Step:
    to = read(i.operands[0], 2)

    def step(w: Wave) -> None:
        w.pc = to(w)

    return step


ROWS: tuple[tuple[Any, Callable[[Instruction, str], Step]], ...] = (
    (BINARY, _binary),
    ({f"{kind}_b{size}" for kind in BITWISE for size in (32, 64)}, _bitwise),
    (UNARY, _unary),
    ({"getpc_b64"}, _next_place),
    ({"setpc_b64"}, _go_to),
    (
        {f"{kind}_b{size}" for kind in ("lshl", "lshr") for size in (32, 64)} | {"ashr_i32", "ashr_i64"},
        _shift,
    ),
    ({f"lshl{n}_add_u32" for n in (1, 2, 3, 4)}, _shift_add),
    ({"addc_u32", "subb_u32"}, _carry),
    ({"movk_i32", "addk_i32", "mulk_i32"}, _immediate),
    ({f"cmp{k}_{r}_{t}" for k in ("", "k") for r in COMPARISONS for t in ("i32", "u32", "u64")}, _compare),
    ({"bitcmp0_b32", "bitcmp1_b32"}, _bit),
    ({"bitset0_b32", "bitset1_b32"}, _set_bit),
    ({"cselect_b32", "cselect_b64"}, _select),
    ({f"{kind}_saveexec_b{size}" for kind in SAVES for size in (32, 64)}, _save),
    ({"nop", "setprio", "sleep", "sethalt", "inst_prefetch"}, lambda i, name: lambda w: None),
)
"""Mnemonics behind ``s_``, and what makes their closures."""


def translate(i: Instruction, labels: dict[str, int]) -> Step | None:
    """Return the closure of a scalar instruction; None if it is none that is known."""
    i = _in_numbers(i, labels)
    name = i.op.removeprefix("s_")
    if i.op.startswith("v_s_"):
        return scalar_floats.translate(i)
    if not i.op.startswith("s_"):
        return None
    if name in BRANCHES:
        return _branch(i, name, labels)
    known = next((make(i, name) for names, make in ROWS if name in names), None)
    return known or scalar_floats.translate(i)
