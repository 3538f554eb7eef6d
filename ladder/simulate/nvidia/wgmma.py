"""wgmma: products of warpgroups that run on while the warps do, until a wait.

Sums are computed where the instruction stands, but no thread may touch a sum or an operand
register before ``wait_group`` has waited for its group, and bytes of shared memory count as being
read until then (PTX ISA, "Asynchronous warpgroup level matrix instructions").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ladder.simulate.cohort import Cohort, InFlight, Partial
from ladder.simulate.matrix import (
    OPERANDS,
    Shape,
    decode,
    descriptor_chunks,
    descriptor_columns,
    gather_a,
    multiply,
    wgmma_registers,
    wgmma_rows,
)
from ladder.simulate.memory import Pointer
from ladder.simulate.nvidia.ptx import WORD, collect, meet
from ladder.simulate.order import ASYNC_LANE, Actor
from ladder.simulate.program import Step
from ladder.simulate.translate import CallView, Translator, UnknownCallError
from ladder.simulate.values import LANES, NUMPY, Array, is_array, spread

GROUP_WARPS = 4
ROWS = 64
STEP_BYTES = 32
FIELD = 0x3FFF


@dataclass(frozen=True)
class Instruction:
    """One ``wgmma.mma_async``: shape, operand types, and where its operands stand in the call."""

    shape: Shape
    kinds: tuple[str, str]
    integer: bool
    sums: tuple[int, ...]
    registers: tuple[int, ...]
    statement: int
    transposed: bool


def _encode(t: Translator, call: CallView) -> Step:
    """Build a descriptor: start address, leading and stride offsets, swizzle mode."""
    target, source = t.expression(call.operands[0]), t.read(call.operands[1])
    leading, stride, mode = (t.number(operand) for operand in call.operands[2:])
    if not isinstance(target, Pointer) or target.space != "local":
        raise UnknownCallError("a descriptor is encoded into a register")
    slot, statement = target.target, call.statement

    def action(c: Cohort) -> None:
        start = source(c).offset
        high = (mode << 62) | (stride & FIELD) << 32 | (leading & FIELD) << 16
        low = (np.asarray(start, np.int64) >> 4 & FIELD).astype(np.uint64)
        c.store(slot, spread(low | np.uint64(high), c.count, NUMPY["uint64"]), statement, NUMPY["uint64"])

    return action


def _fence(t: Translator, call: CallView) -> Step:
    def action(c: Cohort) -> None:
        meet(c, "wgmma.fence", call.statement)
        c.products.unfenced.clear()

    return action


def _commit(t: Translator, call: CallView) -> Step:
    def action(c: Cohort) -> None:
        meet(c, "wgmma.commit_group", call.statement)
        c.products.committed += 1

    return action


def _wait(t: Translator, call: CallView) -> Step:
    left = t.number(call.operands[0])

    def action(c: Cohort) -> None:
        meet(c, "wgmma.wait_group", call.statement)
        c.machine.memory.clocks.meet_lanes(c.warps)
        products = c.products
        products.finished = max(products.finished, products.committed - left)
        for slot, group in list(products.results.items()):
            if group <= products.finished:
                held = c.slots[slot]
                if held.__class__ is InFlight:
                    c.slots[slot] = held.value
                del products.results[slot]
        products.sources = {s: g for s, g in products.sources.items() if g > products.finished}
        memory = c.machine.memory
        agents = memory.agents.products(memory.clocks.own[c.warps])
        memory.clocks.known[c.warps, agents] = products.finished

    return action


def _product(t: Translator, call: CallView) -> Step:
    shape = Shape.parse(next(m for m in call.modifiers if m.startswith("m64n")))
    kinds = call.modifiers[call.modifiers.index(f"m64n{shape.n}k{shape.k}") + 1 :][1:3]
    t.launch.unit = GROUP_WARPS
    count, per_thread = shape.n // 2, call.name.endswith("_rs")
    sources = 4 if per_thread else 1
    slots = tuple(t.register(operand)[0] for operand in call.operands[:count])
    a_operands = call.operands[count : count + sources]
    a = collect(t, a_operands, WORD) if per_thread else t.read(a_operands[0])
    registers = (
        tuple(t.register(o)[0] for o in a_operands if type(o).__name__ == "TensorLoad") if per_thread else ()
    )
    descriptor, adds, *signs = call.operands[count + sources :]
    transposed = [bool(t.number(flag)) for flag in signs[2:]]
    if any(t.number(sign) != 1 for sign in signs[:2]) or any(transposed[:-1]):
        raise UnknownCallError(f"wgmma with negated or transposed first operands: {call.modifiers}")
    if shape.k * (4 // OPERANDS[kinds[0]][1]) != STEP_BYTES:
        raise UnknownCallError(f"wgmma {shape} of {kinds[0]} is no step of 32 bytes")
    what = Instruction(
        shape, (kinds[0], kinds[1]), call.modifiers[3] == "s32", slots, registers, call.statement,
        any(transposed),
    )  # fmt: skip
    operands = a, t.read(descriptor), t.read(adds)
    return _issue(what, *operands, per_thread)


def _issue(
    what: Instruction,
    a: Callable[[Cohort], Any],
    b: Callable[[Cohort], Any],
    adds: Callable[[Cohort], Any],
    rs: bool,
) -> Step:
    """Return the closure of one instruction; ``rs`` says whether A is in registers."""

    def action(c: Cohort) -> None:
        meet(c, "wgmma", what.statement)
        if not _whole_groups(c):
            c.machine.log.add(
                "divergence", what.statement, "wgmma needs the four warps of a warpgroup together"
            )
            return
        c.machine.counts["wgmma"] += c.count // GROUP_WARPS
        accumulates = adds(c)
        add = spread(accumulates, c.count, np.dtype(np.bool_))[:, 0]
        _check_fenced(c, what)
        b_rows = (_columns_of if what.transposed else _rows_of)(c, b(c), what.shape.n, what)
        if rs:
            a_rows = gather_a(a(c), what.kinds[0], 2).reshape(-1, ROWS, what.shape.k)
        else:
            a_rows = decode(_rows_of(c, a(c), ROWS, what), what.kinds[0])
        products = decode(b_rows, what.kinds[1]).transpose(0, 2, 1)
        sums = _sums(c, what, add)
        result = wgmma_registers(multiply(a_rows, products, wgmma_rows(sums), what.integer))
        _put(c, what, result)

    return action


def _whole_groups(c: Cohort) -> bool:
    groups = c.warps.reshape(-1, GROUP_WARPS) if c.count % GROUP_WARPS == 0 else None
    within = c.machine.block_warps % GROUP_WARPS
    if groups is None:
        return False
    first = groups[:, 0] % c.machine.block_warps if within else groups[:, 0]
    return bool((first % GROUP_WARPS == 0).all() and (np.diff(groups, axis=1) == 1).all())


def _check_fenced(c: Cohort, what: Instruction) -> None:
    """Report registers written after the last fence, other than by products."""
    unfenced = c.products.unfenced
    if unfenced and not unfenced.isdisjoint((*what.sums, *what.registers)):
        message = "wgmma uses registers written since the last wgmma.fence"
        c.machine.log.add("asynchronous", what.statement, message, "fence")


def _rows_of(c: Cohort, descriptor: Any, rows: int, what: Instruction) -> Array:
    """Read the bytes ``[groups, rows, 32]`` that descriptors name, as an agent of the warpgroup."""
    data = _read(c, descriptor, what, lambda value: descriptor_chunks(value, rows))
    return data.reshape(-1, rows, STEP_BYTES)


def _columns_of(c: Cohort, descriptor: Any, columns: int, what: Instruction) -> Array:
    """Return bytes as `_rows_of`, of 16-bit operands whose columns lie together: 16 rows along K."""
    if int(np.asarray(descriptor, np.uint64).flat[0]) >> 62 != 1:
        raise UnknownCallError("transposed operands of wgmma: swizzled by 128 bytes")
    data = _read(c, descriptor, what, lambda value: descriptor_columns(value, columns))
    halves = data.reshape(-1, 16, columns * 2).view(np.uint16)
    rows: Array = np.ascontiguousarray(halves.transpose(0, 2, 1)).view(np.uint8)
    return rows


def _read(c: Cohort, descriptor: Any, what: Instruction, places: Callable[[int], Array]) -> Array:
    """Read the 16-byte chunks that descriptors name, ``[groups, chunks * 16]``."""
    memory, groups = c.machine.memory, c.count // GROUP_WARPS
    values = np.broadcast_to(np.asarray(descriptor, np.uint64), (c.count, LANES))
    if (values != values.reshape(groups, -1)[:, :1].repeat(GROUP_WARPS, axis=0)).any():
        c.machine.log.add("divergence", what.statement, "threads of a warpgroup give different descriptors")
    chunks = np.stack([places(int(values[g * GROUP_WARPS, 0])) for g in range(groups)])
    if chunks.min() < 0 or chunks.max() + 16 > memory.limit:
        message = f"wgmma reads byte {int(chunks.max()) + 15} of shared memory of {memory.limit} bytes"
        c.machine.log.add("out of bounds", what.statement, message, "wgmma")
        chunks = np.clip(chunks, 0, memory.limit - 16) & ~15
    flat = chunks + c.block[::GROUP_WARPS, :, None] * memory.pitch
    _record_reads(c, flat.reshape(groups, -1), what)
    memory.traffic["shared read"] += flat.size * 16
    data: Array = memory.shared.view("V16").take(flat // 16).view(np.uint8)
    return data.reshape(groups, -1)


def _record_reads(c: Cohort, flat: Array, what: Instruction) -> None:
    memory = c.machine.memory
    group = c.products.committed + 1
    for index, places in enumerate(flat):
        warps = c.warps[index * GROUP_WARPS : (index + 1) * GROUP_WARPS]
        agents = memory.agents.products(memory.clocks.own[warps])
        at = memory.granules(places, 16).reshape(1, -1)
        actor = Actor(warps[:, None], agents[:, None], np.array(group), np.array(ASYNC_LANE))
        memory.shadow.on_read(at, actor, what.statement)
        memory.shadow.check_proxy(at, warps, what.statement)


def _sums(c: Cohort, what: Instruction, add: Array) -> Array:
    """Return the accumulators before the product, zeros where it overwrites."""
    kind = NUMPY["int32" if what.integer else "float32"]
    result = np.zeros((c.count, LANES, len(what.sums)), kind)
    if not add.any():
        return result
    for index, slot in enumerate(what.sums):
        held = c.slots[slot]
        held = held.value if held.__class__ in (InFlight, Partial) else held
        if held is None:
            c.machine.log.add(
                "uninitialised", what.statement, "wgmma adds to a sum that nothing wrote (stale accumulator)"
            )
            continue
        result[:, :, index] = _bits(held, c.count, kind)
    return np.where(add[:, None, None], result, np.zeros((), kind))


def _bits(held: Any, warps: int, kind: Any) -> Array:
    if is_array(held) and held.dtype != kind:
        held = held.view(kind)
    return spread(held, warps, kind)


def _put(c: Cohort, what: Instruction, result: Array) -> None:
    """Leave sums in flight, and operands owned, until their group is waited for."""
    products, group = c.products, c.products.committed + 1
    if what.integer:
        result = result.view(np.uint32)
    columns = np.ascontiguousarray(result.transpose(2, 0, 1))
    for index, slot in enumerate(what.sums):
        c.slots[slot] = InFlight(columns[index], group)
        products.results[slot] = group
    for slot in what.registers:
        products.sources[slot] = group


def _table() -> dict[str, Callable[[Translator, CallView], Step]]:
    kinds = ("f16", "bf16", "int", "fp8", "f8", "e4m3", "tf32")
    return {f"tirx.ptx.wgmma_{kind}_{place}": _product for kind in kinds for place in ("rs", "ss")}


STEPS: dict[str, Callable[[Translator, CallView], Step]] = {
    "tirx.cuda.wgmma_encode_matrix_descriptor": _encode,
    "tirx.ptx.wgmma_fence": _fence,
    "tirx.ptx.wgmma_commit_group": _commit,
    "tirx.ptx.wgmma_wait_group": _wait,
    **_table(),
}
"""Calls about warpgroups' products."""
