"""tcgen05: tensor memory, products of one thread, and the commits and fences between them.

Products are computed where the instruction stands; who may see or overwrite what they touch is a matter
of order (`ladder.simulate.nvidia.tensor_memory`). Registers of a load may be used after
``tcgen05.wait::ld`` only. Semantics: PTX ISA, "TensorCore 5th Generation Family Instructions".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ladder.simulate.barriers import each_active
from ladder.simulate.cohort import Cohort, InFlight
from ladder.simulate.matrix import decode, descriptor_chunks, multiply
from ladder.simulate.memory import to_bytes
from ladder.simulate.nvidia.ptx import WORD, collect, meet
from ladder.simulate.nvidia.tensor_memory import COLUMNS, PART, ROWS, Access, TensorMemory
from ladder.simulate.order import ASYNC_LANE, Actor
from ladder.simulate.program import Step
from ladder.simulate.translate import CallView, Translator, UnknownCallError
from ladder.simulate.values import LANES, NUMPY, WITHIN, Array

SHAPES = {"16x128b": (16, 4), "16x256b": (16, 8), "32x32b": (32, 1)}
"""Shape of a load or store -> lanes, and columns that its number multiplies."""

STEP_BYTES = 32
"""Bytes of K of one product."""

TYPES = {
    "kind::f16": {0: "f16", 1: "bf16"},
    "kind::f8f6f4": {0: "e4m3", 1: "e5m2"},
    "kind::i8": {0: "u8", 1: "s8"},
}
"""Kind -> number in the instruction descriptor -> operand type."""

SUMS = {"kind::f16": 1, "kind::f8f6f4": 1, "kind::i8": 2}
"""Kind -> the number there of float32 sums, or of int32."""

DESCRIPTOR_CONSTANT, SWIZZLES = 1, {2: 1}
"""Value of bits 46 to 48 of a shared memory descriptor; its swizzle mode -> that of wgmma's."""


# ---- allocation, fences and waits ------------------------------------------------------------------
def _allocate(t: Translator, call: CallView) -> Step:
    place, columns, statement = t.read(call.operands[0]), t.number(call.operands[1]), call.statement

    def action(c: Cohort) -> None:
        meet(c, "tcgen05.alloc", statement)
        tensor = TensorMemory.of(c.machine)
        tensor.use(group_of(call), statement)
        data = np.zeros((c.count, LANES, 1), np.uint32)
        for row in c.active_warps():
            data[row] = tensor.allocate(int(c.block[row, 0]), columns, int(c.warps[row]), statement)
        saved, lane = c.mask, np.arange(LANES) == 0
        c.mask = np.broadcast_to(lane, (c.count, LANES)) & c.active
        at = place(c)
        where = getattr(at, "offset", at)
        c.machine.memory.store_shared(c, where, to_bytes(data), None, statement)
        c.mask = saved

    return action


def _free(t: Translator, call: CallView) -> Step:
    base, columns, statement = t.read(call.operands[0]), t.number(call.operands[1]), call.statement

    def action(c: Cohort) -> None:
        meet(c, "tcgen05.dealloc", statement)
        tensor = TensorMemory.of(c.machine)
        tensor.use(group_of(call), statement)
        for row, first in _whole(c, base(c), statement):
            access = tensor.own_access(int(c.warps[row]), statement)
            tensor.free(int(c.block[row, 0]), first & 0xFFFF, columns, access)

    return action


def _relinquish(t: Translator, call: CallView) -> Step:
    def action(c: Cohort) -> None:
        meet(c, "tcgen05.relinquish_alloc_permit", call.statement)
        TensorMemory.of(c.machine).gives_up[c.block[c.active_warps(), 0]] = True

    return action


def _fence(t: Translator, call: CallView) -> Step:
    after = "fence::after_thread_sync" in call.modifiers

    def action(c: Cohort) -> None:
        tensor, warps = TensorMemory.of(c.machine), c.warps[c.active_warps()]
        (tensor.fence_after if after else tensor.fence_before)(warps)

    return action


def _wait(t: Translator, call: CallView) -> Step:
    loads = "wait::ld" in call.modifiers

    def action(c: Cohort) -> None:
        meet(c, "tcgen05.wait", call.statement)
        tensor, products = TensorMemory.of(c.machine), c.products
        warps = c.warps[c.active_warps()]
        tensor.waited[warps] = tensor.started[warps]
        if loads:
            for slot in list(products.results):
                held = c.slots[slot]
                if held.__class__ is InFlight:
                    c.slots[slot] = held.value
            products.results.clear()

    return action


# ---- loads and stores ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Fragment:
    """Which lane and column of tensor memory each thread's registers have: ``[32, registers]`` each."""

    lanes: int
    columns: int
    row: Array
    column: Array

    @staticmethod
    def of(call: CallView) -> Fragment:
        """Return the layout of a load or store by its shape (PTX ISA, "Data movement shape")."""
        shape = next((m for m in call.modifiers if m in SHAPES), "")
        if not shape or {"pack::16b", "unpack::16b"} & set(call.modifiers):
            raise UnknownCallError(f"the simulator has no tcgen05 access of {call.modifiers}")
        (lanes, each), count = SHAPES[shape], int(next(m for m in call.modifiers if m[0] == "x")[1:])
        lane, register = np.arange(LANES)[:, None], np.arange(each * lanes // LANES * count)[None, :]
        if shape == "32x32b":
            return Fragment(32, count, lane + 0 * register, register + 0 * lane)
        wide = each // 4  # neighbouring columns that a thread has
        row = lane // 4 + register // wide % 2 * 8
        column = register // (2 * wide) * each + lane % 4 * wide + register % wide
        return Fragment(16, each * count, row, column)

    def places(self, c: Cohort, address: Any, statement: int) -> Iterator[tuple[int, int, int, Access]]:
        """Yield row, first lane and column, and access of each active warp; others' lanes are reported."""
        tensor = TensorMemory.of(c.machine)
        for row, base in _whole(c, address, statement):
            warp, lane, column = int(c.warps[row]), base >> 16, base & 0xFFFF
            own = warp % c.machine.block_warps % 4 * 32
            if not own <= lane <= own + 32 - self.lanes or lane % self.lanes:
                message = (
                    f"warp {warp} accesses lanes from {lane} on of tensor memory, it has {own} to {own + 31}"
                )
                c.machine.log.add("out of bounds", statement, message, "lanes")
                lane = own
            if column + self.columns > COLUMNS:
                message = f"column {column + self.columns - 1} of tensor memory of {COLUMNS}"
                c.machine.log.add("out of bounds", statement, message, "columns")
            yield row, lane, min(column, COLUMNS - self.columns), tensor.own_access(warp, statement)


def _whole(c: Cohort, value: Any, statement: int) -> list[tuple[int, int]]:
    """Return each active warp's row, and its number, which all of its lanes must give alike."""
    numbers = np.broadcast_to(np.asarray(value, np.int64), (c.count, LANES))
    if (numbers != numbers[:, :1]).any():
        c.machine.log.add("divergence", statement, "lanes of a warp give different addresses")
    return [(int(row), int(numbers[row, 0])) for row in c.active_warps()]


def parts(first: int, lanes: int) -> Array:
    """Return the parts of the lanes that are told apart."""
    return np.arange(first // PART, (first + lanes) // PART)


def _store(t: Translator, call: CallView) -> Step:
    fragment, address, statement = Fragment.of(call), t.read(call.operands[0]), call.statement
    values = collect(t, call.operands[1:], WORD)

    def action(c: Cohort) -> None:
        meet(c, "tcgen05.st", statement)
        tensor, data = TensorMemory.of(c.machine), values(c)
        for row, lane, column, access in fragment.places(c, address(c), statement):
            block, columns = int(c.block[row, 0]), np.arange(column, column + fragment.columns)
            tensor.on_write(block, parts(lane, fragment.lanes), columns, access)
            tensor.words[block, lane + fragment.row, column + fragment.column] = data[row]

    return action


def _load(t: Translator, call: CallView) -> Step:
    fragment, address, statement = Fragment.of(call), t.read(call.operands[-1]), call.statement
    slots = [t.register(operand) for operand in call.operands[:-1]]

    def action(c: Cohort) -> None:
        meet(c, "tcgen05.ld", statement)
        tensor = TensorMemory.of(c.machine)
        data = np.zeros((c.count, LANES, len(slots)), np.uint32)
        for row, lane, column, access in fragment.places(c, address(c), statement):
            block, columns = int(c.block[row, 0]), np.arange(column, column + fragment.columns)
            tensor.on_read(block, parts(lane, fragment.lanes), columns, access)
            data[row] = tensor.words[block, lane + fragment.row, column + fragment.column]
        for number, (slot, dtype) in enumerate(slots):
            c.store(
                slot, np.ascontiguousarray(data[:, :, number]).view(NUMPY[dtype]), statement, NUMPY[dtype]
            )
            c.slots[slot] = InFlight(c.slots[slot], c.products.committed + 1)
            c.products.results[slot] = c.products.committed + 1

    return action


# ---- products --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Product:
    """Fields of an instruction descriptor: activation rows, and the types of both operands."""

    columns: int
    kinds: tuple[str, str]
    integer: bool
    group: int = 1

    @staticmethod
    def read(kind: str, descriptor: int, group: int) -> Product:
        """Read the descriptor of a dense product of 128 rows of each block, with sums of 32 bits."""
        types = TYPES.get(kind, {})
        first, second = (types.get(descriptor >> at & 7, "") for at in (7, 10))
        columns = (descriptor >> 17 & 0x3F) * 8
        plain = (
            descriptor & ~(0x3F << 17 | 7 << 7 | 7 << 10) == SUMS.get(kind, 0) << 4 | group * ROWS >> 4 << 24
        )
        least = 16 * group
        if not (first and second and plain and columns % least == 0 and least <= columns <= 256):
            raise UnknownCallError(f"the simulator has no tcgen05.mma of {kind}, descriptor {descriptor:#x}")
        return Product(columns, (first, second), SUMS[kind] == 2, group)


def group_of(call: CallView) -> int:
    """Return how many blocks a call says that it is for."""
    return 2 if "cta_group::2" in call.modifiers else 1


def blocks_of(c: Cohort, warp: int, group: int, statement: int) -> list[int]:
    """Return the blocks that a product or copy is for, that of even rank first."""
    block = warp // c.machine.block_warps
    if group == 1:
        return [block]
    if c.machine.cluster_blocks % 2:
        c.machine.log.add("barrier", statement, "a cluster without pairs of blocks has no cta_group::2")
        return [block]
    return [block // 2 * 2, block // 2 * 2 + 1]


def _product(t: Translator, call: CallView) -> Step:
    group = group_of(call)
    kind = next(m for m in call.modifiers if m.startswith("kind::"))
    what = Product.read(kind, t.number(call.operands[3]), group)
    last = 4 + 4 * group
    if any(t.number(mask) for mask in call.operands[4:last]):
        raise UnknownCallError("the simulator has no tcgen05.mma that leaves lanes out")
    sums, weights, x, adds = (t.read(call.operands[place]) for place in (0, 1, 2, last))

    def action(c: Cohort) -> None:
        one_lane(c, call.statement)
        TensorMemory.of(c.machine).use(group, call.statement)
        c.machine.counts["tcgen05"] += len(c.active_warps())
        for _, warp, _, d, a, b, add in each_active(c, sums(c), weights(c), x(c), adds(c)):
            _multiply(c, what, warp, (d, a, b), bool(add), call.statement)

    return action


def one_lane(c: Cohort, statement: int) -> None:
    """Report several threads of a warp that do what one should."""
    if (c.active.sum(axis=1) > 1).any():
        c.machine.log.add("divergence", statement, "several threads of a warp start one product each")


def _multiply(
    c: Cohort, what: Product, warp: int, operands: tuple[int, int, int], add: bool, statement: int
) -> None:
    """Add a product to the sums of its blocks, or put it there; each has a share of the rows of x."""
    (d, a, x), blocks = operands, blocks_of(c, warp, what.group, statement)
    if (d | a) >> 16:
        c.machine.log.add("out of bounds", statement, "operands of 128 rows begin at lane 0", "lanes")
    share = what.columns // len(blocks)
    held = [read_rows(c, share, warp, x, statement, block) for block in blocks]
    rows = decode(np.concatenate(held), what.kinds[1])
    for block in blocks:
        _multiply_block(c, what, warp, block, (d & 0xFFFF, a & 0xFFFF, rows, add), statement)


def _multiply_block(
    c: Cohort, what: Product, warp: int, block: int, operands: tuple[int, int, Array, bool], statement: int
) -> None:
    (result, first, rows, add), tensor = operands, TensorMemory.of(c.machine)
    access, every = tensor.product(warp, statement), parts(0, ROWS)
    words = np.arange(first, first + STEP_BYTES // 4)
    columns = np.arange(result, result + what.columns)
    tensor.on_read(block, every, words, access)
    if add:
        tensor.on_read(block, every, columns, access)
    tensor.on_write(block, every, columns, access)
    if max(words.max(), columns.max()) >= tensor.words.shape[2]:
        return  # reported
    held = np.ascontiguousarray(tensor.words[block][:, words]).view(np.uint8)
    before = tensor.words[block][:, columns] if add else np.zeros((ROWS, what.columns), np.uint32)
    old = before.view(np.int32 if what.integer else np.float32)
    total = multiply(decode(held, what.kinds[0]), rows.T, old, what.integer)
    tensor.words[block][:, columns] = total.view(np.uint32)


def read_rows(c: Cohort, count: int, warp: int, descriptor: int, statement: int, block: int) -> Array:
    """Read the bytes ``[count, 32]`` of an operand that a descriptor names in a block's shared memory."""
    descriptor = int(descriptor) & (1 << 64) - 1
    if descriptor >> 46 & 7 != DESCRIPTOR_CONSTANT or descriptor >> 61 not in SWIZZLES:
        raise UnknownCallError(f"the simulator has no shared memory descriptor {descriptor:#x}")
    chunks = descriptor_chunks(descriptor & (1 << 46) - 1 | SWIZZLES[descriptor >> 61] << 62, count)
    return read_chunks(c, warp, chunks, statement, block).reshape(count, STEP_BYTES)


def read_chunks(c: Cohort, warp: int, chunks: Array, statement: int, block: int) -> Array:
    """Read 16 bytes from each address in a block's shared memory, as products of a warp: ``[chunks, 16]``."""
    memory = c.machine.memory
    if chunks.max() + 16 > memory.limit:
        message = f"reads byte {int(chunks.max()) + 15} of shared memory of {memory.limit} bytes"
        c.machine.log.add("out of bounds", statement, message, "tcgen05")
        chunks = np.clip(chunks, 0, memory.limit - 16) & ~15
    flat = chunks.reshape(-1) + block * memory.pitch
    access = TensorMemory.of(c.machine).product(warp, statement)
    at = memory.granules(flat, 16).reshape(1, -1)
    warps = np.array([warp])
    actor = Actor(warps, np.array(access.agent), np.array(access.epoch), np.array(ASYNC_LANE))
    memory.shadow.on_read(at, actor, statement)
    memory.shadow.check_proxy(at, warps, statement)
    memory.traffic["shared read"] += flat.size * 16
    return memory.shared.view("V16").take(flat // 16).view(np.uint8).reshape(-1, 16)


def _commit(t: Translator, call: CallView) -> Step:
    """Arrive at an mbarrier when all products so far are done, which came after what their thread knew."""
    group = group_of(call)
    place, statement = t.read(call.operands[0]), call.statement
    mask = t.read(call.operands[1]) if len(call.operands) > 1 else lambda c: 0

    def action(c: Cohort) -> None:
        tensor, at = TensorMemory.of(c.machine), place(c)
        tensor.use(group, statement)
        for _, warp, _, byte, chosen in each_active(c, getattr(at, "offset", at), mask(c)):
            done = tensor.product(warp, statement)
            tensor.products[warp] = done.epoch
            for block in _targets(c, warp, chosen, statement):
                _arrive(c, block, byte & WITHIN, done)
        c.machine.memory.clocks.advance(c.warps)

    return action


def _targets(c: Cohort, warp: int, mask: int, statement: int) -> list[int]:
    """Return the blocks that a mask of the cluster names; without one, the warp's own."""
    block, cluster = warp // c.machine.block_warps, c.machine.cluster_blocks
    if not mask:
        return [block]
    if mask >> cluster:
        c.machine.log.add("barrier", statement, f"commit mask {mask:#x} names blocks beyond the cluster")
    first = block // cluster * cluster
    return [first + index for index in range(cluster) if mask >> index & 1]


def _arrive(c: Cohort, block: int, byte: int, done: Access) -> None:
    """Arrive at a block's mbarrier for products; another block must wait for that before it ends."""
    barrier = c.machine.mbarriers.reach(done.warp, block, byte, done.statement)
    if barrier is not None:
        if block != done.warp // c.machine.block_warps:
            barrier.filled = barrier.phase + 1
        clock = c.machine.memory.clocks.published(done.warp, whole=False)
        clock[done.agent] = done.epoch
        barrier.arrive(1, clock, done.statement)


STEPS: dict[str, Callable[[Translator, CallView], Step]] = {
    "tirx.ptx.tcgen05_alloc": _allocate,
    "tirx.ptx.tcgen05_dealloc": _free,
    "tirx.ptx.tcgen05_relinquish_alloc_permit": _relinquish,
    "tirx.ptx.tcgen05_fence": _fence,
    "tirx.ptx.tcgen05_wait": _wait,
    "tirx.ptx.tcgen05_st": _store,
    "tirx.ptx.tcgen05_ld": _load,
    "tirx.ptx.tcgen05_mma_ts": _product,
    "tirx.ptx.tcgen05_commit": _commit,
    "tirx.ptx.tcgen05_commit_multicast": _commit,
}
"""Calls about tensor memory."""
