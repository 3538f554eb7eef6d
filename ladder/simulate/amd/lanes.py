"""Values that move between the lanes of a wave: DPP, ds_bpermute, readlane, and TVM's shuffles.

Semantics: AMD Instinct MI300 ISA, "Data Parallel Primitives (DPP)" and "LDS Permute"; LLVM AMDGPU usage,
the intrinsics of each name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ladder.simulate.cohort import Cohort
from ladder.simulate.program import Read
from ladder.simulate.translate import CallView, Translator, UnknownCallError
from ladder.simulate.values import NUMPY, Array, Value, is_array

ROW, BANK = 16, 4
NOWHERE = -1
"""Source of a lane that DPP gives no value."""


def _taken(c: Cohort, value: Value, source: Array) -> Value:
    if not is_array(value) or value.shape[1] == 1:
        return value
    order = np.broadcast_to(source, (c.count, c.lanes))
    return np.take_along_axis(value, order, axis=1)


def dpp_sources(control: int, lanes: int) -> Array:
    """Return the source of every lane, `NOWHERE` where it has none, for a DPP control word."""
    lane = np.arange(lanes)
    row, within = lane // ROW * ROW, lane % ROW
    low = control & 0xF
    if control < 0x100:  # quad_perm
        return lane // 4 * 4 + (control >> 2 * (lane % 4) & 3)
    ways: dict[int, Array] = {
        0x10: np.where(within + low < ROW, lane + low, NOWHERE),  # row_shl
        0x11: np.where(within - low >= 0, lane - low, NOWHERE),  # row_shr
        0x12: row + (within - low) % ROW,  # row_ror
        0x15: row + low,  # row_newbcast (gfx90a and later)
    }
    single: dict[int, Array] = {
        0x140: row + ROW - 1 - within,  # row_mirror
        0x141: lane // 8 * 8 + 7 - lane % 8,  # row_half_mirror
        0x142: np.where(lane >= ROW, row - 1, NOWHERE),  # row_bcast:15
        0x143: np.where(lane >= 2 * ROW, lane // (2 * ROW) * 2 * ROW - 1, NOWHERE),  # row_bcast:31
    }
    if control in single:
        return single[control]
    if control >> 4 in ways and (low or control >> 4 == 0x15):
        return ways[control >> 4]
    raise UnknownCallError(f"the simulator does not know DPP control {control:#x}")


def _dpp(with_old: bool) -> Callable[[Translator, CallView], Read]:
    def translate(t: Translator, call: CallView) -> Read:
        operands = call.operands if with_old else (None, *call.operands)
        old = t.read(operands[0]) if with_old else (lambda c: 0)
        value = t.read(operands[1])
        control, rows, banks, bound = (t.number(operand) for operand in operands[2:6])
        dtype = NUMPY[call.dtype]

        def read(c: Cohort) -> Value:
            c.require_whole("DPP", call.statement)
            source = dpp_sources(control, c.lanes)
            lane = np.arange(c.lanes)
            enabled = (rows >> lane // ROW & 1).astype(bool) & (banks >> lane % ROW // BANK & 1).astype(bool)
            there = np.broadcast_to(c.active, (c.count, c.lanes))[:, np.maximum(source, 0)]
            has_source = (source != NOWHERE) & there
            moved = _taken(c, c.spread(value(c), dtype), np.maximum(source, 0))
            kept = c.spread(old(c), dtype)
            missing = np.zeros((), dtype) if bound else kept
            return np.where(enabled, np.where(has_source, moved, missing), kept)

        return read

    return translate


def _bpermute(t: Translator, call: CallView) -> Read:
    place, value = t.read(call.operands[0]), t.read(call.operands[1])

    def read(c: Cohort) -> Value:
        c.require_whole("ds_bpermute", call.statement)
        return _taken(c, value(c), np.asarray(place(c)) // 4 % c.lanes)

    return read


def other_sixteen(order: int, lanes: int) -> Array:
    """Return the lane that each reads by V_PERMLANEX16: nibbles of ``order`` choose in the other sixteen."""
    lane = np.arange(lanes)
    chosen: Array = np.array([order >> 4 * at & 0xF for at in range(ROW)])[lane % ROW]
    return (lane // ROW ^ 1) * ROW + chosen


def _permute_other_sixteen(t: Translator, call: CallView) -> Read:
    value = t.read(call.operands[1])
    low, high, *rules = (t.number(operand) for operand in call.operands[2:])
    if any(rules):
        raise UnknownCallError(f"the simulator knows {call.name} of lanes that are active only")
    order = (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32

    def read(c: Cohort) -> Value:
        c.require_whole("V_PERMLANEX16", call.statement)
        return _taken(c, value(c), other_sixteen(order, c.lanes))

    return read


def _read_lane(t: Translator, call: CallView) -> Read:
    value, lane = t.read(call.operands[0]), t.read(call.operands[1])

    def read(c: Cohort) -> Value:
        return _taken(c, value(c), np.asarray(lane(c)) % c.lanes)

    return read


def _read_first_lane(t: Translator, call: CallView) -> Read:
    value = t.read(call.operands[0])
    return lambda c: _taken(c, value(c), c.active.argmax(axis=1)[:, None])


def _shuffle(change: Callable[[Array, Any], Array]) -> Callable[[Translator, CallView], Read]:
    """Return TVM's shuffle: ``(mask, value, lane, width, warp size)``."""

    def translate(t: Translator, call: CallView) -> Read:
        value, other = t.read(call.operands[1]), t.read(call.operands[2])

        def read(c: Cohort) -> Value:
            c.require_whole("a shuffle", call.statement)
            return _taken(c, value(c), change(np.arange(c.lanes), np.asarray(other(c))) % c.lanes)

        return read

    return translate


READS: dict[str, Callable[[Translator, CallView], Any]] = {
    "llvm.amdgcn.mov.dpp": _dpp(with_old=False),
    "llvm.amdgcn.update.dpp": _dpp(with_old=True),
    "llvm.amdgcn.ds.bpermute": _bpermute,
    "llvm.amdgcn.permlanex16": _permute_other_sixteen,
    "llvm.amdgcn.readlane": _read_lane,
    "llvm.amdgcn.readfirstlane": _read_first_lane,
    "tirx.tvm_warp_shuffle": _shuffle(lambda lane, other: other),
    "tirx.tvm_warp_shuffle_xor": _shuffle(lambda lane, other: lane ^ other),
    "tirx.tvm_warp_shuffle_down": _shuffle(lambda lane, other: np.minimum(lane + other, lane.size - 1)),
}
"""Calls that return another lane's value."""
