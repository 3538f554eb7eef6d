"""Inline CUDA helpers of the emitters, one row each: a name, what its source must contain, what it does.

A helper whose text no longer contains its instruction is refused rather than simulated wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from ladder.simulate.barriers import each_active
from ladder.simulate.cohort import Cohort
from ladder.simulate.memory import Pointer, to_bytes
from ladder.simulate.nvidia import digits, stream
from ladder.simulate.nvidia.floats import by_inverse, largest, pair, special
from ladder.simulate.nvidia.ptx import WORD, arrive
from ladder.simulate.order import ASYNC_LANE, Actor
from ladder.simulate.program import Read, Step
from ladder.simulate.translate import CallView, Translator, UnknownCallError
from ladder.simulate.values import (
    NUMPY,
    ROUND,
    Array,
    Value,
    halves_of,
    join_halves,
    odd,
    spread,
    to_float8,
    to_float16,
    two_sum,
)

FLOATS = {"f16x2": "float16", "bf16x2": "bfloat16", "float16": "float16", "bfloat16": "bfloat16"}
FP8 = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True)
class Helper:
    """One row.

    name: Pattern of the whole name; its groups go to ``make``.
    contains: What the source must contain; ``{0}`` is the name's first group.
    make: Makes the closure from the translator, the call, the groups and the source.
    """

    name: str
    contains: str
    make: Callable[[Translator, CallView, tuple[str, ...], str], Any]


def translate(t: Translator, call: CallView, source: str) -> Any:
    """Return the closure of a helper's call.

    Raises UnknownCallError if no row has the name, or the source does not contain what the row says.
    """
    for row in HELPERS:
        match = re.fullmatch(row.name, call.name)
        if match is None:
            continue
        if row.contains.format(*match.groups()) not in source:
            raise UnknownCallError(f"helper {call.name} no longer contains {row.contains!r}; update its row")
        return row.make(t, call, match.groups(), source)
    raise UnknownCallError(f"the simulator has no helper {call.name!r}; add a row to {__name__}.HELPERS")


# ---- register helpers --------------------------------------------------------------------------------
def _words(function: Callable[..., Array]) -> Callable[[Translator, CallView, tuple[str, ...], str], Read]:
    """Make a row's closure from a function of uint32 arrays and the name's groups."""

    def make(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Read:
        reads = [t.read(operand) for operand in call.operands]

        def read(c: Cohort) -> Value:
            words = [np.asarray(read(c), np.uint32) for read in reads]
            result = function(*words, *groups)
            return result if result.ndim else int(result)

        return read

    return make


def _stop_where(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Step:
    """End with an error where a thread was given a number of no row; the log says so."""
    wrong = t.read(call.operands[0])

    def action(c: Cohort) -> None:
        if (np.broadcast_to(np.asarray(wrong(c), bool), c.active.shape) & c.active).any():
            c.log.add("out of bounds", call.statement, "takes a row that is not there", "row")

    return action


def lop3(a: Array, b: Array, c: Array, table: str) -> Array:
    """Return any bitwise function of three words."""
    code = int(table, 16)
    if code in COMMON_LOP3:
        return COMMON_LOP3[code](a, b, c)
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for row in range(8):
        if code >> row & 1:
            terms = [x if row >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0))]
            result = result | (terms[0] & terms[1] & terms[2])
    return result


COMMON_LOP3: dict[int, Callable[[Array, Array, Array], Array]] = {
    0x6A: lambda a, b, c: (a & b) ^ c,
    0xEA: lambda a, b, c: (a & b) | c,
    0xC0: lambda a, b, c: a & b,
}


def dot(a: Array, weights: Array, addend: Array) -> Array:
    """Add the products of unsigned bytes to a word."""
    total = addend
    for shift in np.arange(0, 32, 8, dtype=np.uint32):
        total = total + (a >> shift & np.uint32(0xFF)) * (weights >> shift & np.uint32(0xFF))
    return np.asarray(total, np.uint32)


def prmt(low: Array, high: Array, selector: Array) -> Array:
    """Pick four of eight bytes; bit 3 of a nibble repeats the byte's sign."""
    pool = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    result = np.zeros(np.broadcast_shapes(pool.shape, selector.shape), np.uint32)
    for index in range(4):
        nibble = selector >> np.uint32(4 * index) & np.uint32(15)
        byte = (pool >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8)) & np.uint64(0xFF)).astype(
            np.uint32
        )
        sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        result = result | np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * index)
    return result


def twice(word: Array, half: str) -> Array:
    """Return the low or high half of a word in both halves."""
    bits = word >> np.uint32(16 * (half == "h")) & np.uint32(0xFFFF)
    return np.asarray(bits * np.uint32(0x10001), np.uint32)


def _by_halves(function: Callable[..., Array]) -> Callable[..., Array]:
    """Apply a function of exact float64 halves, and its rounding, to both halves of words."""

    def apply(*operands: Any) -> Array:
        *words, name = operands
        dtype = FLOATS[name]
        low, high = zip(*(halves_of(word, dtype) for word in words), strict=True)
        parts = [ROUND[dtype](function(*(x.astype(np.float64) for x in part))) for part in (low, high)]
        return join_halves(*parts)

    return apply


def multiply_halves(a: Array, b: Array, name: str) -> Array:
    """Multiply halves; a product of two is exact in float32, but for bfloat16's range."""
    dtype = FLOATS[name]
    (a_low, a_high), (b_low, b_high) = halves_of(a, dtype), halves_of(b, dtype)
    if dtype == "bfloat16":
        a_low, a_high = a_low.astype(np.float64), a_high.astype(np.float64)
    return join_halves(ROUND[dtype](np.asarray(a_low * b_low)), ROUND[dtype](np.asarray(a_high * b_high)))


def _fma(a: Array, b: Array, c: Array) -> Array:
    return odd(*two_sum(a * b, c))


def _sub(a: Array, b: Array) -> Array:
    return odd(*two_sum(a, -b))


subtract_halves = _by_halves(_sub)
"""``a - b`` of halves, rounded once."""

fma_halves = _by_halves(_fma)
"""``a * b + c`` of halves, rounded once."""


def _both_bytes(low: Array, high: Array, name: str) -> Array:
    """Round float32 to two 8-bit floats, in both halves of a word."""
    codes = [to_float8(value, FP8[name]).astype(np.uint32) for value in (low, high)]
    both = codes[0] | codes[1] << np.uint32(8)
    return join_halves(both, both)


def narrow(word: Array, name: str) -> Array:
    """Round two float16 to 8-bit floats, saturating, in both halves of a word."""
    return _both_bytes(*halves_of(word, "float16"), name)


def narrow_pair(first: Array, second: Array, name: str) -> Array:
    """Round two float32, given by their bits, to 8-bit floats."""
    return _both_bytes(first.view(np.float32), second.view(np.float32), name)


def widen(pairs: Array, name: str, half: str) -> Array:
    """Convert the two 8-bit floats of a half of a word to float16."""
    codes = np.asarray(pairs >> np.uint32(16 * int(half)))
    low, high = (_float8_values(FP8[name])[codes >> np.uint32(8 * i) & np.uint32(0xFF)] for i in (0, 1))
    return join_halves(low, high)


@cache
def _float8_values(dtype: str) -> Array:
    """Return the bits of each code's float16 value."""
    codes = np.arange(256, dtype=np.uint8)
    halves: Array = codes.view(getattr(ml_dtypes, dtype)).astype(np.float16).view(np.uint16)
    return halves


def _halves(high: Array, low: Array) -> Array:
    return join_halves(to_float16(low.view(np.float32)), to_float16(high.view(np.float32)))


def _pack(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Read:
    """Round two float32 to the halves of a register."""
    low, high = (t.read(operand) for operand in call.operands)
    rounded, kind = ROUND[groups[0]], NUMPY["float32"]

    def read(c: Cohort) -> Array:
        parts = (np.ascontiguousarray(spread(part(c), c.count, kind)) for part in (low, high))
        return join_halves(*(rounded(part) for part in parts))

    return read


# ---- memory helpers ------------------------------------------------------------------------------------
def _look_up(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Read:
    table, at = t.read(call.operands[0]), t.read(call.operands[1])

    def read(c: Cohort) -> Value:
        pointer: Pointer = table(c)
        place = pointer.offset + np.asarray(at(c), np.int64)
        data = c.machine.memory.load_shared(c, place, 4, pointer.target, call.statement)
        return data.view(WORD)[:, :, 0]

    return read


def _look_up_at(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Read:
    address = t.read(call.operands[0])

    def read(c: Cohort) -> Value:
        data = c.machine.memory.load_shared(c, np.asarray(address(c), np.int64), 4, None, call.statement)
        return data.view(WORD)[:, :, 0]

    return read


def _table_values(source: str, count: int) -> Array:
    """Return the values of a table from its 64-bit constants, four values each, in the order of codes."""
    fours = [int(v, 16) for v in re.findall(r"(0x[0-9a-f]+)ull", source)]
    if 4 * len(fours) < count:
        raise UnknownCallError("a table whose values the simulator cannot read")
    return np.array([fours[index // 4] >> 16 * (index % 4) & 0xFFFF for index in range(count)], np.uint32)


def _read_peer(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Step:
    """Load 16 bytes from another block of the cluster (ld.shared::cluster)."""
    place, rank, out = t.read(call.operands[0]), t.read(call.operands[1]), t.expression(call.operands[2])
    first, statement = out.target, call.statement

    def action(c: Cohort) -> None:
        own, cluster = c.block, c.machine.cluster_blocks
        c.block = own // cluster * cluster + np.asarray(rank(c))
        data = c.machine.memory.load_shared(c, place(c).offset, 16, None, statement).view(WORD)
        for _, warp, _, block in each_active(c, c.block):
            c.machine.mbarriers.visit(warp, block, statement)
        c.block = own
        c.machine.memory.traffic["cluster read"] += int(c.active.sum()) * 16
        for index in range(4):
            c.store(first + index, data[:, :, index], statement, WORD)

    return action


def _write_peer(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Step:
    """Store 16 bytes to another block of the cluster (st.shared::cluster)."""
    place, rank, *values = (t.read(operand) for operand in call.operands)
    kind, statement = NUMPY["float32"], call.statement

    def action(c: Cohort) -> None:
        data = np.stack([spread(value(c), c.count, kind) for value in values], axis=2)
        own, cluster = c.block, c.machine.cluster_blocks
        c.block = own // cluster * cluster + np.asarray(rank(c))
        for _, warp, _, block in each_active(c, c.block):
            if c.machine.block_has_left(block):
                c.machine.log.add("barrier", statement, "a store to a block that has ended", "left")
            c.machine.mbarriers.visit(warp, block, statement)
        c.machine.memory.store_shared(c, place(c).offset, to_bytes(data), None, statement)
        c.block = own
        c.machine.memory.traffic["cluster write"] += int(c.active.sum()) * 16

    return action


def _carry(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Step:
    """Move what a bfloat16 holds of each sum to its head; the rest stays in the sum."""
    sums, heads = (t.expression(operand).target for operand in call.operands)
    statement, kind = call.statement, NUMPY["float32"]

    def action(c: Cohort) -> None:
        for index in range(int(groups[0]) // 2):
            head = spread(c.load(heads + index, statement, WORD), c.count, WORD)
            halves = (head << np.uint32(16), head & np.uint32(0xFFFF0000))
            totals = [
                spread(c.load(sums + 2 * index + i, statement, kind), c.count, kind) + half.view(kind)
                for i, half in enumerate(halves)
            ]
            bits = [total.view(WORD) & np.uint32(0xFFFF0000) for total in totals]
            c.store(heads + index, bits[0] >> np.uint32(16) | bits[1], statement, WORD)
            for i, (total, kept) in enumerate(zip(totals, bits, strict=True)):
                c.store(sums + 2 * index + i, total - kept.view(kind), statement, kind)

    return action


def _fill_table(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Step:
    """Fill a table of values or of all pairs of them: the loop of the helper, turn by turn."""
    count, step, row = (int(group) for group in groups)
    words = _table_values(source, count)
    if step:
        lows = np.resize(words, 1 << step)
        words = (lows[None, :] | words[:, None] << np.uint32(16)).reshape(-1)
    table, thread, threads = t.read(call.operands[0]), t.read(call.operands[1]), t.number(call.operands[2])

    def action(c: Cohort) -> None:
        pointer: Pointer = table(c)
        saved = c.mask
        for first in range(0, len(words), threads):
            codes = spread(thread(c), c.count, np.dtype(np.int64)) + first
            inside = codes < len(words)
            c.mask = saved
            c.mask = None if (mask := c.narrowed(inside)).all() else mask
            if not mask.any():
                continue
            safe = np.where(inside, codes, 0)
            data = np.ascontiguousarray(np.repeat(words[safe][:, :, None], 4, axis=2)).view(np.uint8)
            for index in range(8):
                place = pointer.offset + safe * row + (index ^ safe % 8) * 16
                c.machine.memory.store_shared(c, place, data, pointer.target, call.statement)
        c.mask = saved

    return action


# ---- clusters --------------------------------------------------------------------------------------------
def _remote(c: Cohort, warp: int, rank: int) -> int:
    """Return the block of a rank in a warp's cluster."""
    block, cluster = warp // c.machine.block_warps, c.machine.cluster_blocks
    return block // cluster * cluster + rank


def _arrive_at(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Step:
    """Arrive once at the same mbarrier of another block of the cluster (mapa, mbarrier.arrive)."""
    place, rank = t.read(call.operands[0]), t.read(call.operands[1])

    def action(c: Cohort) -> None:
        for _, warp, _, byte, target in each_active(c, place(c).offset, rank(c)):
            block = _remote(c, warp, target)
            barrier = c.machine.mbarriers.reach(warp, block, byte, call.statement)
            c.machine.mbarriers.visit(warp, block, call.statement)
            if barrier is not None:
                arrive(c, barrier, warp, 1, call.statement)
        c.machine.memory.clocks.advance(c.warps)

    return action


def _send4(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Step:
    """Store four floats to another block, counted at an mbarrier there (st.async)."""
    place, barrier, rank, *values = (t.read(operand) for operand in call.operands)
    kind, statement = NUMPY["float32"], call.statement

    def action(c: Cohort) -> None:
        memory = c.machine.memory
        saved = c.block
        data = np.stack([spread(value(c), c.count, kind) for value in values], axis=2)
        target = saved // c.machine.cluster_blocks * c.machine.cluster_blocks + np.asarray(rank(c))
        c.block = target
        flat = memory.locate(c, place(c).offset, 16, None, statement)
        c.block = saved
        _send(c, (flat, np.broadcast_to(target, flat.shape)), barrier(c).offset, data, statement)

    return action


def _send(c: Cohort, where: tuple[Array, Array], byte: Any, data: Array, statement: int) -> None:
    """Let each active thread's 16 bytes arrive, and count them at the barriers."""
    memory, active = c.machine.memory, c.active
    warps = np.broadcast_to(c.warps[:, None], active.shape)[active]
    places, blocks = (part[active] for part in where)
    bytes_ = np.broadcast_to(np.asarray(byte), active.shape)[active]
    keys = list(zip(warps.tolist(), blocks.tolist(), bytes_.tolist(), strict=True))
    for key in dict.fromkeys(keys):
        chosen = np.array([k == key for k in keys])
        barrier = c.machine.mbarriers.reach(*key, statement)
        if barrier is None:
            continue
        if c.machine.block_has_left(key[1]):
            c.machine.log.add("barrier", statement, "st.async to a block that has ended", "left")
        at = memory.granules(places[chosen], 16)
        actor = Actor(
            warps[chosen][:, None], np.array(barrier.agent), np.array(barrier.phase + 1), np.array(ASYNC_LANE)
        )
        memory.shadow.on_write(at, actor, statement)
        memory.shared[places[chosen][:, None] + np.arange(16)] = data[active][chosen].view(np.uint8)
        memory.traffic["cluster write"] += int(chosen.sum()) * 16
        barrier.land(int(chosen.sum()) * 16)


def _pin(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Step:
    """Empty assembly that reads and writes registers: only their state is checked."""
    pointer, count = t.expression(call.operands[0]), int(groups[1])
    first, kind, statement = (
        pointer.target,
        NUMPY["uint32" if groups[0] == "unsigned" else "float32"],
        call.statement,
    )

    def action(c: Cohort) -> None:
        for slot in range(first, first + count):
            c.store(slot, c.load(slot, statement, kind), statement, kind)

    return action


HELPERS: tuple[Helper, ...] = (
    Helper(r"ladder_lop3_([0-9a-f]{2})", "lop3.b32 %0, %1, %2, %3, 0x{0}", _words(lop3)),
    Helper(r"ladder_dot", "dp4a.u32.u32 %0, %1, %2, %3;", _words(dot)),
    Helper(r"ladder_prmt", "prmt.b32 %0, %1, %2, %3;", _words(prmt)),
    Helper(r"ladder_twice_([lh])", "mov.b32 {{l, h}}, %1; mov.b32 %0, {{{0}, {0}}};", _words(twice)),
    Helper(r"ladder_float_mul_(\w+)", "mul.rn.{0} %0, %1, %2;", _words(multiply_halves)),
    Helper(r"ladder_float_sub_(\w+)", "sub.rn.{0} %0, %1, %2;", _words(subtract_halves)),
    Helper(r"ladder_float_fma_(\w+)", "fma.rn.{0} %0, %1, %2, %3;", _words(fma_halves)),
    Helper(r"ladder_narrow_(fp8_e\dm\d)", "cvt.rn.satfinite", _words(narrow)),
    Helper(r"ladder_narrow_pair_(fp8_e\dm\d)", "cvt.rn.satfinite", _words(narrow_pair)),
    Helper(r"ladder_widen_(fp8_e\dm\d)_([01])", "cvt.rn.f16x2.e", _words(widen)),
    Helper(r"ladder_halves", "cvt.rn.f16x2.f32 %0, %1, %2;", _words(_halves)),
    Helper(r"ladder_pack_(float16|bfloat16)", "cvt.rn.", _pack),
    Helper(r"ladder_(reciprocal|power_of_two)", ".approx.ftz.f32", special),
    Helper(r"ladder_(whole_reciprocal)", "rcp.approx.f32 ", special),
    Helper(r"ladder_(whole_power_of_two)", "ex2.approx.f32 ", special),
    Helper(r"ladder_(logarithm_of_two)", "lg2.approx.f32 ", special),
    Helper(r"ladder_(quotient)", "div.full.f32 ", pair),
    Helper(r"ladder_(log_of_sum)", "fmaxf(x, y) + log1pf(expf(-apart));", pair),
    Helper(r"ladder_stop_where", "if (wrong) __trap();", _stop_where),
    Helper(r"ladder_(product)", "return __fmul_rn(x, y);", pair),
    Helper(r"ladder_by_inverse", "__fmaf_rn(__fmaf_rn(-near, divisor, x), inverse, near)", by_inverse),
    Helper(r"ladder_(maximum|minimum)", ".NaN.f32 ", pair),
    Helper(r"ladder_largest_(int32|float32)", "redux.sync.max.s32 %0, %1, 0xffffffff;", largest),
    Helper(r"ladder_pin_(unsigned|float)(\d+)", 'asm volatile(""', _pin),
    Helper(r"ladder_look_up_at", "__cvta_shared_to_generic(address)", _look_up_at),
    Helper(r"ladder_look_up", "reinterpret_cast<const char*>(table) + at", _look_up),
    Helper(r"ladder_fill_table_\w+?_(\d+)_(\d+)_(\d+)", "row[i ^ codes % 8] = make_uint4(word", _fill_table),
    Helper(r"ladder_arrive_at", "mbarrier.arrive.shared::cluster.b64", _arrive_at),
    Helper(r"ladder_read_peer", "ld.shared::cluster.v4.u32", _read_peer),
    Helper(r"ladder_write_peer", "st.shared::cluster.v4.f32", _write_peer),
    Helper(r"ladder_carry(\d+)", "__byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632)", _carry),
    Helper(r"ladder_hand_over_(\d+)_(\d+)", "__stcg(place + i * {1}", stream.hand_over),
    Helper(r"ladder_announce_(\d+)", "st.release.gpu.global.u64", stream.announce),
    Helper(r"ladder_take_over_(\d+)_(\d+)", "ld.acquire.gpu.global.u64", stream.take_over),
    Helper(r"ladder_split_(float16|bfloat16)_\w+", "__float2int_rn(__fmaf_rn(", digits.split),
    Helper(r"ladder_copy_digits_\w+", "reinterpret_cast<uint4*>(digits) = make_uint4(", digits.copy),
    Helper(r"ladder_send4", "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32", _send4),
)
"""Meanings of the emitters' helper functions."""
