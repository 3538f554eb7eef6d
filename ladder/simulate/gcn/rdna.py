"""What RDNA spells or does differently from GFX9: other mnemonics, pairs of instructions, split counters.

Instructions are renamed to what GFX9 calls them where they do the same, so that one table serves both.
Semantics: AMD RDNA3 and RDNA4 ISA. A wave of 32 lanes has the upper half of every register never active.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ladder.simulate.amd import wmma
from ladder.simulate.amd.arithmetic import dot_bytes, dot_integers
from ladder.simulate.amd.lanes import other_sixteen
from ladder.simulate.gcn.listing import (
    NAMED,
    GcnError,
    Instruction,
    Operand,
    parse_instruction,
    takes_bytes,
)
from ladder.simulate.gcn.memory import require_whole
from ladder.simulate.gcn.packed import registers_of
from ladder.simulate.gcn.wave import LANES, Wave, result, words

Step = Callable[[Wave], Any]

PAIR = "v_dual"
"""Mnemonic of two instructions that one wave issues at once."""

KINDS = {"u": "u", "i": "s"}
"""How narrow loads begin, and what GFX9 has in its place."""

CARRIES = {"add": "addc", "sub": "subb", "subrev": "subbrev"}

RENAMED: tuple[tuple[str, str], ...] = (
    (r"(s|global|scratch)_(load|store)_b32", r"\1_\2_dword"),
    *((rf"(s|global|scratch)_(load|store)_b{32 * n}", rf"\1_\2_dwordx{n}") for n in (2, 3, 4, 8, 16)),
    *((rf"(s|global|scratch)_load_{ours}8", rf"\1_load_{theirs}byte") for ours, theirs in KINDS.items()),
    *((rf"(s|global|scratch)_load_{ours}16", rf"\1_load_{theirs}short") for ours, theirs in KINDS.items()),
    *(
        (rf"(global|scratch)_load_(d16|d16_hi)_{ours}8", rf"\1_load_{theirs}byte_\2")
        for ours, theirs in KINDS.items()
    ),
    (r"(global|scratch)_load_(d16|d16_hi)_b16", r"\1_load_ushort_\2"),
    (r"(global|scratch)_store_b8", r"\1_store_byte"),
    (r"(global|scratch)_store_b16", r"\1_store_short"),
    (r"(global|scratch)_store_d16_hi_b8", r"\1_store_byte_d16_hi"),
    (r"(global|scratch)_store_d16_hi_b16", r"\1_store_short_d16_hi"),
    (r"ds_load_2addr_stride64_(b\d+)", r"ds_read2st64_\1"),
    (r"ds_load_2addr_(b\d+)", r"ds_read2_\1"),
    (r"ds_store_2addr_stride64_(b\d+)", r"ds_write2st64_\1"),
    (r"ds_store_2addr_(b\d+)", r"ds_write2_\1"),
    (r"ds_load_(\w+)", r"ds_read_\1"),
    (r"ds_store_(\w+)", r"ds_write_\1"),
    (r"v_(add|sub|subrev)_nc_(\w+)", r"v_\1_\2"),
    *((f"v_{ours}_co_ci_u32", f"v_{theirs}_co_u32") for ours, theirs in CARRIES.items()),
    (r"v_mad_co_u64_u32", "v_mad_u64_u32"),
    (r"v_(max|min|med3|max3|min3|minmax|maxmin)_num_(f\d+)", r"v_\1_\2"),
    (r"v_dot2acc_(\w+)", r"v_dot2c_\1"),
    (r"s_(add|sub)_co_([iu]32)", r"s_\1_\2"),
    (r"s_addk_co_i32", "s_addk_i32"),
    (r"s_add_co_ci_u32", "s_addc_u32"),
    (r"s_sub_co_ci_u32", "s_subb_u32"),
    (r"s_(and|or)_not1_(\w+)", r"s_\1n2_\2"),
    (r"s_ctz_i32_(b\d+)", r"s_ff1_i32_\1"),
    (r"s_clz_i32_u(\d+)", r"s_flbit_i32_b\1"),
    (r"s_cls_i32", "s_flbit_i32"),
    (r"v_clz_i32_u32", "v_ffbh_u32"),
    (r"v_cls_i32", "v_ffbh_i32"),
    (r"s_barrier_wait", "s_barrier"),
)
"""Patterns of mnemonics, and what GFX9 calls the same."""

NOTHING = re.compile(
    r"s_(delay_alu|clause|wait_alu|waitcnt_depctr|sendmsg|wait_(expcnt|samplecnt|bvhcnt|storecnt)|"
    r"waitcnt_vscnt|set_inst_prefetch_distance|code_end)"
)
"""Hints, and waits for what the emulator completes at once: stores, and units that kernels do not use."""

NO_OPERATION = "s_nop"


def as_gfx9(i: Instruction) -> Instruction:
    """Return an instruction under GFX9's name, as far as it has one."""
    if i.op == PAIR:
        return i
    if NOTHING.fullmatch(i.op):
        return replace(i, op=NO_OPERATION, operands=())
    if i.op.startswith("v_cmpx_"):
        active = Operand("s", *NAMED["exec_lo"])
        return replace(i, op=i.op.replace("cmpx", "cmp"), operands=(active, *i.operands))
    matches = ((re.fullmatch(pattern, i.op), name) for pattern, name in RENAMED)
    return next((replace(i, op=match.expand(name)) for match, name in matches if match), i)


def halves_of(i: Instruction) -> tuple[Instruction, Instruction]:
    """Return both instructions of a pair; ``v_dual_cndmask_b32`` chooses by VCC without saying so."""
    found = []
    for part in i.text.split(" :: "):
        each = parse_instruction(part.replace("v_dual_", "v_"))
        if each.op == "v_cndmask_b32":
            each = replace(each, operands=(*each.operands, Operand("s", *NAMED["vcc_lo"])))
        found.append(as_gfx9(each))
    return found[0], found[1]


def pair(i: Instruction, translate: Callable[[Instruction], Step | None]) -> Step | None:
    """Translate a pair: both read their sources before either writes its result."""
    first, second = halves_of(i)
    steps, to = (translate(first), translate(second)), first.operands[0].index
    if steps[0] is None or steps[1] is None:
        return None
    one, other = steps[0], steps[1]

    def step(w: Wave) -> None:
        before = w.v[to].copy()
        one(w)
        after = w.v[to].copy()
        w.v[to] = before
        other(w)
        w.v[to] = after

    return step


# ---- products ----------------------------------------------------------------------------------------
def _signed(i: Instruction) -> bool:
    """Tell whether both operands of an integer product are signed, and its sums wrap around."""
    return set(i.modifiers) == {"neg_lo"} and i.bits("neg_lo", (0, 0, 0)) == (1, 1, 0)


def matrix(i: Instruction) -> Step:
    """``v_wmma_*``."""
    to, *given = i.operands
    spelled = "llvm.amdgcn." + i.op.removeprefix("v_").replace("_", ".")
    if given[2].kind == "literal" and given[2].text != "0":
        raise GcnError(f"the emulator knows no constant sums but 0: {i.text}")

    def step(w: Wave) -> None:
        require_whole(w, i)
        what = wmma.parse(spelled, w.group.core)
        if (not _signed(i)) if what.integer else bool(i.modifiers):
            raise GcnError(f"the emulator does not know a modifier of {i.text}")
        a, b = (registers_of(w, operand)[: wmma.LANES].view(np.uint8) for operand in given[:2])
        none = np.zeros((wmma.LANES, to.count), np.uint32)
        c = none if given[2].kind == "literal" else registers_of(w, given[2])[: wmma.LANES]
        kind = np.int32 if what.integer else np.float32
        sums = wmma.multiply(what, w.group.core, a[None], b[None], c.view(kind)[None])[0].astype(kind)
        w.v[to.index : to.index + to.count, : wmma.LANES] = sums.view(np.uint32).T

    return step


def dot_signed(i: Instruction) -> Step:
    """``v_dot4_i32_iu8`` of signed operands."""
    if not _signed(i):
        raise GcnError(f"the emulator does not know a modifier of {i.text}")
    (a, b, c), write, dot = map(words, i.operands[1:]), result(i, "u32"), dot_integers(8, True)
    return lambda w: write(w, dot(a(w), b(w), c(w)))


def dot_floats(i: Instruction) -> Step:
    """``v_dot4_f32_fp8_bf8`` and its kind."""
    if i.modifiers:
        raise GcnError(f"the emulator does not know a modifier of {i.text}")
    a, b, c = (words(operand, "f32") for operand in i.operands[1:])
    names, write = i.op.split("_")[3:], result(i, "f32")

    def step(w: Wave) -> None:
        kinds = w.group.core.bytes_as
        write(w, dot_bytes(a(w), b(w), c(w), (kinds[names[0]], kinds[names[1]])))

    return step


def other_half(i: Instruction) -> Step:
    """``v_permlanex16_b32``: each lane reads one of the other sixteen of its 32, all of which are active."""
    if i.modifiers:
        raise GcnError(f"the emulator does not know a modifier of {i.text}")
    (value, low, high), write = map(words, i.operands[1:]), result(i, "u32")

    def step(w: Wave) -> None:
        require_whole(w, i)
        order = int(np.max(low(w))) | int(np.max(high(w))) << 32
        write(w, np.broadcast_to(value(w), LANES)[other_sixteen(order, LANES)])

    return step


# ---- scalar arithmetic of floats -----------------------------------------------------------------------
def _float(bits: int) -> np.float32:
    return np.float32(np.array(bits, np.uint32).view(np.float32))


def _bits(value: Any) -> int:
    return int(np.asarray(value, np.float32).view(np.uint32))


def to_unsigned(bits: int) -> int:
    """``s_cvt_u32_f32``: towards zero, saturating, NaN to 0."""
    value = float(_float(bits))
    return 0 if value != value else int(min(max(value, 0.0), float(0xFFFFFFFF)))


SCALAR: dict[str, Callable[..., int]] = {
    "s_mul_f32": lambda a, b: _bits(_float(a) * _float(b)),
    "s_cvt_f32_u32": lambda a: _bits(np.float32(a)),
    "s_cvt_u32_f32": to_unsigned,
}
"""Mnemonic -> bits of the result, by those of the sources."""


def scalar_float(i: Instruction) -> Step:
    """Translate a row of `SCALAR`."""
    to, function = i.operands[0].index, SCALAR[i.op]
    reads = [words(operand, "u32" if i.op == "s_cvt_f32_u32" else "f32") for operand in i.operands[1:]]
    return lambda w: w.set_scalar(to, function(*(int(read(w)) for read in reads)))


# ---- waits -------------------------------------------------------------------------------------------
def wait(i: Instruction) -> Step:
    """RDNA4's waits: each names its counter, or two of them."""
    names, most = i.op.removeprefix("s_wait_").split("_"), int(i.operands[0].text, 0)
    each = (most >> 8, most & 0xFF) if len(names) == 2 else (most,)

    def step(w: Wave) -> None:
        queues = {"loadcnt": w.vector_memory, "dscnt": w.local_memory, "kmcnt": w.scalar_memory}
        for name, left in zip(names, each, strict=True):
            w.wait(queues[name], left)

    return step


def signal(i: Instruction) -> Step:
    """``s_barrier_signal``: other waves may pass the barrier from here on."""

    def step(w: Wave) -> None:
        if any(entry.kind.startswith("lds") for entry in w.local_memory):
            w.group.report("barrier", i.text)

    return step


ROWS: tuple[tuple[str, Callable[[Instruction], Step]], ...] = (
    (r"v_wmma_\w+", matrix),
    (r"v_dot4_i32_iu8", dot_signed),
    (r"v_dot4_f32_[fb][pf]8_[fb][pf]8", dot_floats),
    (r"v_permlanex16_b32", other_half),
    ("|".join(SCALAR), scalar_float),
    (r"s_wait_(loadcnt|dscnt|kmcnt)(_dscnt)?", wait),
    (r"s_barrier_signal", signal),
)
"""Patterns of mnemonics, and what makes their closures."""


def translate(i: Instruction) -> Step | None:
    """Return the closure of an instruction that GFX9 lacks; None if it is none that is known."""
    return next((make(i) for pattern, make in ROWS if re.fullmatch(pattern, i.op)), None)


# ---- encoding ------------------------------------------------------------------------------------------
WITHIN = re.compile(
    r"s_(\w+k(_co)?_i32|cmpk_\w+|nop|waitcnt\w*|wait_\w+|delay_alu|clause|setprio|sleep|c?branch\w*|sendmsg|"
    r"endpgm|barrier\w*|set_inst_prefetch_distance)"
)
"""Scalar instructions whose operands lie within their four bytes."""

SHORT = re.compile(r"v_(readfirstlane_b32|nop|dot2acc_\w+|pk_fmac_f16|swap_b32|fmaak_\w+|fmamk_\w+)")
"""Vector instructions of four bytes, or eight with a constant, that are written without a suffix."""


def encoded_bytes(i: Instruction, split: bool) -> int:
    """Return the bytes of an instruction's encoding (RDNA3 and RDNA4 ISA, "Microcode Formats").

    ``split``: whether it is RDNA4's.
    """
    if WITHIN.fullmatch(i.op):
        return 4
    if i.op.startswith(("s_load", "ds_")):
        return 8
    if i.op.startswith(("global_", "scratch_")):
        return 12 if split else 8
    if i.form == "e64_dpp":
        return 12
    constant = 4 * any(map(takes_bytes, i.operands))
    if i.op.startswith("s_") or i.form == "e32" or SHORT.fullmatch(i.op):
        return 4 + constant
    return 8 + constant
