"""Loads and stores, warp-wide instructions, barriers: one row per operator.

Semantics: PTX ISA, the section of each instruction's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ladder.simulate.barriers import GroupBarrier, GroupWait, MbarrierWait, NamedWait, each_active
from ladder.simulate.cohort import Cohort, Wait
from ladder.simulate.hardware import Hardware
from ladder.simulate.matrix import Shape, mma
from ladder.simulate.memory import Pointer, to_bytes
from ladder.simulate.program import Read, Step
from ladder.simulate.threads import first_active_lane
from ladder.simulate.translate import CallView, Translator, UnknownCallError
from ladder.simulate.values import LANES, NUMPY, RANK_BITS, Array, Value, is_array, spread

WORD = NUMPY["uint32"]

PTX_TYPES = {
    "u16": "uint16",
    "b16": "uint16",
    "u32": "uint32",
    "b32": "uint32",
    "f32": "float32",
    "u64": "uint64",
}


# ---- operands --------------------------------------------------------------------------------------
def nothing(t: Translator, call: CallView) -> Step:
    """Return a step without effect: hints, and set-up that has no meaning here."""
    return lambda c: None


def collect(t: Translator, operands: tuple[Any, ...], dtype: Any) -> Callable[[Cohort], Array]:
    """Return a closure for registers ``[warps, 32, count]`` of a type's bits."""
    reads = [(t.read(operand), NUMPY[str(operand.ty.dtype)]) for operand in operands]

    def value(c: Cohort) -> Array:
        parts = []
        for read, kind in reads:
            found = read(c)
            if not is_array(found) and kind.kind == "f":  # a number: no thread's own
                found = np.asarray(found, kind)
            if is_array(found) and found.dtype != dtype:
                found = found.view(dtype) if found.dtype.itemsize == dtype.itemsize else found.astype(dtype)
            parts.append(spread(found, c.count, dtype))
        return np.stack(parts, axis=2)

    return value


def deliver(t: Translator, operands: tuple[Any, ...], statement: int) -> Callable[[Cohort, Array], None]:
    """Return a function that puts ``[warps, 32, count]`` into destination registers."""
    slots = [t.register(operand) for operand in operands]

    def put(c: Cohort, values: Array) -> None:
        for index, (slot, dtype) in enumerate(slots):
            kind = NUMPY[dtype]
            found = np.ascontiguousarray(values[:, :, index])
            c.store(slot, found.view(kind) if found.dtype != kind else found, statement, kind)

    return put


def address(t: Translator, operand: Any) -> Callable[[Cohort], Any]:
    """Return a closure for an address: a `Pointer`, or a shared address as a number."""
    return t.read(operand)


# ---- loads and stores ------------------------------------------------------------------------------
def _load(t: Translator, call: CallView) -> Step:
    kind = NUMPY[PTX_TYPES[next(m for m in reversed(call.modifiers) if m in PTX_TYPES)]]
    put = deliver(t, call.operands[:-1], call.statement)
    source, width, statement = (
        address(t, call.operands[-1]),
        kind.itemsize * len(call.operands[:-1]),
        call.statement,
    )

    def action(c: Cohort) -> None:
        at = source(c)
        if isinstance(at, Pointer) and at.space == "global":
            data = c.machine.memory.load_global(c, at, width, statement)
        else:
            data = c.machine.memory.load_shared(c, _shared(at), width, None, statement)
        put(c, data.view(kind))

    return action


def _store(t: Translator, call: CallView) -> Step:
    kind = NUMPY[PTX_TYPES[next(m for m in reversed(call.modifiers) if m in PTX_TYPES)]]
    target, values, statement = (
        address(t, call.operands[0]),
        collect(t, call.operands[1:], kind),
        call.statement,
    )

    def action(c: Cohort) -> None:
        data, at = to_bytes(values(c)), target(c)
        if isinstance(at, Pointer) and at.space == "global":
            c.machine.memory.store_global(c, at, data, statement)
        else:
            c.machine.memory.store_shared(c, _shared(at), data, None, statement)

    return action


COMBINED: dict[str, Any] = {
    "f32": np.float32,
    "f64": np.float64,
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    **dict.fromkeys(("f16", "f16x2"), np.float16),
    **dict.fromkeys(("bf16", "bf16x2"), ml_dtypes.bfloat16),
}
"""PTX's types of elements that are combined in memory."""

REDUCTIONS = ("red", "red_half", "red_vec_half", "red_vec_f32")
"""How TIR calls the forms of ``red``."""

COMBINE: dict[str, Any] = {"add": np.add, "max": np.maximum, "min": np.minimum}


def _combine(t: Translator, call: CallView) -> Step:
    """Combine with what is in global or shared memory, one element after the other."""
    kind = np.dtype(next(COMBINED[m] for m in reversed(call.modifiers) if m in COMBINED))
    operation = next(COMBINE[m] for m in call.modifiers if m in COMBINE)
    halves = any(m.endswith("x2") for m in call.modifiers)
    word = np.dtype(np.uint32) if halves else np.dtype(f"u{kind.itemsize}")
    target, statement = address(t, call.operands[0]), call.statement
    values = collect(t, call.operands[1:], word)

    def action(c: Cohort) -> None:
        data = to_bytes(values(c)).view(kind)
        at, memory = target(c), c.machine.memory
        if isinstance(at, Pointer) and at.space == "global":
            memory.combine_global(c, at, data, operation, statement)
        else:
            memory.combine_shared(c, _shared(at), data, operation, statement)

    return action


def _shared(at: Any) -> Value:
    return at.offset if isinstance(at, Pointer) else at


def _to_shared(t: Translator, call: CallView) -> Any:
    """Return the shared address of a pointer; in a cluster, it also says whose memory that is."""
    source, cluster = t.expression(call.operands[0]), t.launch.cluster
    if cluster > 1:
        read = source if callable(source) else lambda c: source
        return lambda c: _narrow((c.block % cluster << RANK_BITS) + np.asarray(read(c).offset, np.int64))
    if not callable(source):
        return int(source.offset)
    return lambda c: _narrow(source(c).offset)


def _narrow(offset: Value) -> Value:
    return offset.astype(np.uint32) if is_array(offset) else offset


# ---- warps -----------------------------------------------------------------------------------------
def _shuffle_xor(t: Translator, call: CallView) -> Read:
    value, order = t.read(call.operands[1]), np.arange(LANES) ^ t.number(call.operands[2])

    def read(c: Cohort) -> Value:
        c.require_whole("a shuffle", call.statement)
        found = value(c)
        return found[:, order] if is_array(found) and found.shape[1] == LANES else found

    return read


def _shuffle(t: Translator, call: CallView) -> Read:
    value, source = t.read(call.operands[1]), t.read(call.operands[2])

    def read(c: Cohort) -> Value:
        c.require_whole("a shuffle", call.statement)
        found, lane = value(c), source(c)
        if not is_array(found) or found.shape[1] != LANES:
            return found
        order = np.broadcast_to(np.asarray(lane) % LANES, (c.count, LANES))
        return np.take_along_axis(found, order, axis=1)

    return read


def _warp_sync(t: Translator, call: CallView) -> Step:
    def action(c: Cohort) -> None:
        c.require_whole("__syncwarp", call.statement)
        c.machine.memory.clocks.sync_lanes(c.warps)

    return action


def meet(c: Cohort, what: str, statement: int) -> None:
    """Do what every ``.sync.aligned`` instruction does: all lanes of a warp come together."""
    c.require_whole(what, statement)
    if c.touched:
        c.machine.memory.clocks.meet_lanes(c.warps)
        c.touched = False


# ---- matrices in shared memory ----------------------------------------------------------------------
def _matrix_count(call: CallView) -> int:
    return int(next(m for m in call.modifiers if m in ("x1", "x2", "x4"))[1:])


def _ldmatrix(t: Translator, call: CallView) -> Step:
    count, transposed = _matrix_count(call), "trans" in call.modifiers
    put = deliver(t, call.operands[:count], call.statement)
    source, statement = address(t, call.operands[count]), call.statement

    def action(c: Cohort) -> None:
        c.require_whole("ldmatrix", statement)
        saved, c.mask = c.mask, _row_lanes(c, count)
        rows = c.machine.memory.load_shared(c, _shared(source(c)), 16, None, statement)
        c.mask = saved
        meet(c, "ldmatrix", statement)
        matrices = rows[:, : 8 * count].view(np.uint16).reshape(c.count, count, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 1, 3, 2)
        words = np.ascontiguousarray(matrices).view(np.uint32).reshape(c.count, count, LANES)
        put(c, words.transpose(0, 2, 1))

    return action


def _row_lanes(c: Cohort, count: int) -> Array | None:
    """Return which lanes give row addresses of ``count`` matrices."""
    if count == 4:
        return c.mask
    lanes = np.broadcast_to(np.arange(LANES) < 8 * count, (c.count, LANES))
    return np.array(lanes) if c.mask is None else lanes & c.mask


def _stmatrix(t: Translator, call: CallView) -> Step:
    count, transposed = _matrix_count(call), "trans" in call.modifiers
    target, statement = address(t, call.operands[0]), call.statement
    values = collect(t, call.operands[1:], WORD)

    def action(c: Cohort) -> None:
        words = values(c).transpose(0, 2, 1)
        meet(c, "stmatrix", statement)
        matrices = np.ascontiguousarray(words).view(np.uint16).reshape(c.count, count, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 1, 3, 2)
        rows = np.zeros((c.count, LANES, 8), np.uint16)
        rows[:, : 8 * count] = matrices.reshape(c.count, 8 * count, 8)
        saved, c.mask = c.mask, _row_lanes(c, count)
        c.machine.memory.store_shared(c, _shared(target(c)), to_bytes(rows), None, statement)
        c.mask = saved

    return action


def _mma(t: Translator, call: CallView) -> Step:
    shape = Shape.parse(next(m for m in call.modifiers if m[0] == "m" and m[1].isdigit()))
    kinds = call.modifiers[-3], call.modifiers[-2]
    integer = call.modifiers[-1] == "s32"
    accumulators = shape.m * shape.n // LANES if shape.k != 4 else 8
    per_register = 2 if shape.k == 4 or kinds[0] in ("f16", "bf16") else 4
    sizes = (
        accumulators,
        _registers(shape.m, shape.k, per_register),
        _registers(shape.n, shape.k, per_register),
    )
    bounds = np.cumsum([0, *sizes, accumulators]).tolist()
    if bounds[-1] != len(call.operands):
        raise UnknownCallError(f"mma {shape} takes {bounds[-1]} registers, got {len(call.operands)}")
    d, a, b, old = (call.operands[bounds[i] : bounds[i + 1]] for i in range(4))
    put, statement = deliver(t, d, call.statement), call.statement
    reads = (
        collect(t, a, WORD),
        collect(t, b, WORD),
        collect(t, old, NUMPY["int32" if integer else "float32"]),
    )

    def action(c: Cohort) -> None:
        meet(c, "mma", statement)
        c.machine.counts["mma"] += c.count
        put(c, mma(shape, kinds, *(read(c) for read in reads)))

    return action


def _registers(rows: int, k: int, per_register: int) -> int:
    return 2 if k == 4 else rows * k // per_register // LANES


def _movmatrix(t: Translator, call: CallView) -> Step:
    """Transpose the 8 x 8 matrix of 16-bit elements that a warp's registers are."""
    put, statement = deliver(t, call.operands[:1], call.statement), call.statement
    value = collect(t, call.operands[1:], WORD)

    def action(c: Cohort) -> None:
        words = np.ascontiguousarray(value(c)[:, :, 0])
        meet(c, "movmatrix", statement)
        turned = words.view(np.uint16).reshape(c.count, 8, 8).transpose(0, 2, 1)
        put(c, np.ascontiguousarray(turned).view(np.uint32).reshape(c.count, LANES, 1))

    return action


# ---- barriers ----------------------------------------------------------------------------------------
def _sync(
    barrier_of: Callable[[Hardware], GroupBarrier],
) -> Callable[[Translator, CallView], Callable[[Cohort], Wait]]:
    """Return the row of an instruction that waits at a barrier of the machine."""

    def translate(t: Translator, call: CallView) -> Callable[[Cohort], Wait]:
        def make(c: Cohort) -> Wait:
            barrier = barrier_of(c.machine)
            barrier.arrive(c, call.statement)
            return GroupWait(barrier, call.statement)

        return make

    return translate


def _named_sync(t: Translator, call: CallView) -> Callable[[Cohort], Wait]:
    number, threads = t.read(call.operands[0]), t.number(call.operands[1])

    def make(c: Cohort) -> Wait:
        c.machine.named_barriers.arrive(c, number(c), threads, True, call.statement)
        return NamedWait(c.machine.named_barriers, call.statement)

    return make


def _named_arrive(t: Translator, call: CallView) -> Step:
    number, threads = t.read(call.operands[0]), t.number(call.operands[1])
    return lambda c: c.machine.named_barriers.arrive(c, number(c), threads, False, call.statement)


def _cluster_arrive(t: Translator, call: CallView) -> Step:
    return lambda c: c.machine.cluster_barrier.arrive(c, call.statement)


def _cluster_wait(t: Translator, call: CallView) -> Callable[[Cohort], Wait]:
    return lambda c: GroupWait(c.machine.cluster_barrier, call.statement)


def _mbarrier_init(t: Translator, call: CallView) -> Step:
    place, count = t.read(call.operands[0]), t.read(call.operands[1])

    def action(c: Cohort) -> None:
        at = _shared(place(c))
        c.machine.memory.store_shared(c, at, np.zeros((c.count, LANES, 8), np.uint8), None, call.statement)
        for _, warp, _, byte, arrivals in each_active(c, at, count(c)):
            block = warp // c.machine.block_warps
            c.machine.mbarriers.create(block, byte, arrivals, call.statement)

    return action


def _mbarrier_arrive(t: Translator, call: CallView) -> Step:
    place, amount = t.read(call.operands[0]), t.read(call.operands[1])
    expects, statement = call.name.endswith("expect_tx"), call.statement

    def action(c: Cohort) -> None:
        for _, warp, _, byte, number in each_active(c, _shared(place(c)), amount(c)):
            barrier = c.machine.mbarriers.reach(warp, warp // c.machine.block_warps, byte, statement)
            if barrier is None:
                continue
            if expects:
                barrier.expect(number)
            arrive(c, barrier, warp, 1 if expects else number, statement)
        c.machine.memory.clocks.advance(c.warps)

    return action


def arrive(c: Cohort, barrier: Any, warp: int, times: int, statement: int) -> None:
    """Arrive at an mbarrier for one thread, with what its warp knows."""
    whole = c.mask is None or bool(c.mask[np.searchsorted(c.warps, warp)].all())
    barrier.arrive(times, c.machine.memory.clocks.published(warp, whole), statement)


def _mbarrier_wait(t: Translator, call: CallView) -> Callable[[Cohort], Wait | None]:
    place, parity, statement = t.read(call.operands[0]), t.read(call.operands[1]), call.statement

    def make(c: Cohort) -> Wait | None:
        owner, at = c.machine.mbarriers, _shared(place(c))
        rows = c.active_warps()
        lanes = c.active[rows].argmax(axis=1)
        places, phases = (
            np.broadcast_to(np.asarray(v), (c.count, LANES))[rows, lanes] for v in (at, parity(c))
        )
        for warp, byte, phase in zip(c.warps[rows].tolist(), places.tolist(), phases.tolist(), strict=True):
            barrier = owner.reach(warp, warp // c.machine.block_warps, byte, statement)
            if barrier is not None:
                owner.awaited[warp] = (barrier, phase)
        return MbarrierWait(owner, statement)

    return make


def _fence_init(t: Translator, call: CallView) -> Step:
    def action(c: Cohort) -> None:
        blocks = set(c.block[c.active_warps(), 0].tolist())
        for (block, _), barrier in c.machine.mbarriers.table.items():
            barrier.fenced = barrier.fenced or block in blocks

    return action


READS: dict[str, Callable[[Translator, CallView], Any]] = {
    "tirx.cuda.cvta_generic_to_shared": _to_shared,
    "tirx.tvm_warp_shuffle": _shuffle,
    "tirx.tvm_warp_shuffle_xor": _shuffle_xor,
    "tirx.cuda.elect_sync": lambda t, call: lambda c: first_active_lane(c).astype(np.uint32),
}
"""Calls that return a value."""

STEPS: dict[str, Callable[[Translator, CallView], Step]] = {
    "tirx.ptx.ld": _load,
    "tirx.ptx.ld_vec": _load,
    "tirx.ptx.st": _store,
    "tirx.ptx.st_vec": _store,
    **dict.fromkeys(map("tirx.ptx.{}".format, REDUCTIONS), _combine),
    "tirx.ptx.ldmatrix": _ldmatrix,
    "tirx.ptx.stmatrix": _stmatrix,
    "tirx.ptx.movmatrix": _movmatrix,
    "tirx.ptx.mma": _mma,
    "tirx.ptx.mma_int": _mma,
    "tirx.ptx.mma_fp8": _mma,
    "tirx.cuda.warp_sync": _warp_sync,
    "tirx.ptx.bar_arrive": _named_arrive,
    "tirx.ptx.barrier_cluster_arrive": _cluster_arrive,
    "tirx.ptx.mbarrier_init": _mbarrier_init,
    "tirx.ptx.mbarrier_arrive": _mbarrier_arrive,
    "tirx.ptx.mbarrier_arrive_expect_tx": _mbarrier_arrive,
    "tirx.ptx.fence_mbarrier_init": _fence_init,
    "tirx.ptx.fence_proxy": lambda t, call: lambda c: c.machine.memory.clocks.fence_proxy(c.warps),
    "tirx.ptx.griddepcontrol": nothing,
    "tirx.ptx.prefetch": nothing,
    "tirx.ptx.setmaxnreg": nothing,
}
"""Calls with an effect."""

STOPS: dict[str, Callable[[Translator, CallView], Any]] = {
    "tirx.cuda.cta_sync": _sync(lambda machine: machine.block_barrier),
    "tirx.ptx.bar_sync_count": _named_sync,
    "tirx.cuda.cluster_sync": _sync(lambda machine: machine.cluster_barrier),
    "tirx.ptx.barrier_cluster_wait": _cluster_wait,
    "tirx.cuda.mbarrier_wait": _mbarrier_wait,
}
"""Calls at which warps may wait."""
