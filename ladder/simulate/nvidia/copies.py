"""Asynchronous copies into shared memory: cp.async groups, bulk and tensor copies with mbarriers.

What they bring is recorded as written by an agent of its own, whose epochs only the matching wait
makes known. Bytes of cp.async arrive no earlier than the wait, those of bulk copies at once:
orders of arrival do not matter where everyone waits (PTX ISA, "Data movement: asynchronous copy").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ladder.simulate.barriers import Mbarrier, each_active
from ladder.simulate.cohort import Cohort
from ladder.simulate.hardware import Hardware
from ladder.simulate.matrix import swizzled
from ladder.simulate.memory import Pointer, Tensor
from ladder.simulate.nvidia.ptx import nothing
from ladder.simulate.order import ASYNC_LANE, Actor
from ladder.simulate.program import Step
from ladder.simulate.translate import CallView, Translator, UnknownCallError
from ladder.simulate.values import LANES, NUMPY, WITHIN, Array
from schedules.im2col import CORNERS, IM2COL, MOST_STRIDE

BULK_UNIT = 16
TENSOR_ALIGNMENT = 128

MAP_SWIZZLES = {0: 0, 1: 1, 2: 3, 3: 7}
"""cuTensorMapEncodeTiled's swizzle -> the address bits (from bit 7) that move chunks."""


# ---- cp.async --------------------------------------------------------------------------------------
@dataclass
class Pending:
    """Copies under way: for each 16 bytes its warp, its group, where they go and what they are."""

    warps: Array
    groups: Array
    places: Array
    data: Array


class CopyGroups:
    """Groups of cp.async of every warp."""

    def __init__(self, warps: int) -> None:
        self.committed = np.zeros(warps, np.int32)
        self.pending: list[Pending] = []


def groups_of(c: Cohort) -> CopyGroups:
    """Return the machine's groups of copies."""
    machine = c.machine
    found = machine.extras.setdefault("copies", CopyGroups(machine.blocks * machine.block_warps))
    assert isinstance(found, CopyGroups)
    return found


def _copy(t: Translator, call: CallView) -> Step:
    target, source = t.read(call.operands[0]), t.read(call.operands[1])
    width, statement = t.number(call.operands[2]), call.statement
    size = t.read(call.operands[3]) if len(call.operands) > 3 else lambda c: width

    def action(c: Cohort) -> None:
        memory, groups = c.machine.memory, groups_of(c)
        count = np.broadcast_to(np.asarray(size(c), np.int64), (c.count, LANES))
        saved, wanted = c.mask, c.narrowed(count > 0)
        c.mask = None if wanted.all() else wanted
        data = memory.load_global(c, source(c), width, statement) if wanted.any() else _zeros(c, width)
        c.mask = saved
        data = np.where(np.arange(width) < count[:, :, None], data, np.uint8(0))
        where = memory.locate(c, target(c), width, None, statement).reshape(-1)
        memory.banks.count(c, where.reshape(c.count, LANES), width, statement, is_read=False)
        active = c.active.reshape(-1)
        warps = np.repeat(c.warps, LANES)[active]
        own = memory.agents.copies(memory.clocks.own[warps])
        number = groups.committed[warps] + 1
        actor = Actor(*(part[:, None] for part in (warps, own, number, c.lane_ids[active])))
        places = where[active]
        memory.shadow.on_write(memory.granules(places, width), actor, statement)
        memory.traffic["shared write"] += places.size * width
        groups.pending.append(Pending(warps, number, places, data.reshape(-1, width)[active]))
        c.touched = True

    return action


def _zeros(c: Cohort, width: int) -> Array:
    return np.zeros((c.count, LANES, width), np.uint8)


def _commit(t: Translator, call: CallView) -> Step:
    def action(c: Cohort) -> None:
        groups_of(c).committed[c.warps] += 1

    return action


def _wait(t: Translator, call: CallView) -> Step:
    left = t.number(call.operands[0])

    def action(c: Cohort) -> None:
        machine, groups = c.machine, groups_of(c)
        clocks = machine.memory.clocks
        finished = groups.committed[c.warps] - left
        agents = machine.memory.agents.copies(clocks.own[c.warps])
        clocks.known[c.warps, agents] = np.maximum(clocks.known[c.warps, agents], finished)
        done = np.zeros(len(groups.committed), np.int32)
        done[c.warps] = finished
        groups.pending = [p for p in groups.pending if not _deliver(p, done, machine.memory.shared)]

    return action


def _deliver(pending: Pending, done: Array, shared: Array) -> bool:
    """Let copies of finished groups arrive; return whether all of them have."""
    arrived = pending.groups <= done[pending.warps]
    if arrived.any():
        at = pending.places[arrived]
        shared[at[:, None] + np.arange(pending.data.shape[1])] = pending.data[arrived]
        left = ~arrived
        pending.warps, pending.groups = pending.warps[left], pending.groups[left]
        pending.places, pending.data = pending.places[left], pending.data[left]
    return not pending.warps.size


# ---- bulk and tensor copies --------------------------------------------------------------------------
@dataclass(frozen=True)
class TensorMap:
    """A tensor map (cuTensorMapEncodeTiled) of a matrix, or of ``count`` matrices, ``step`` bytes apart."""

    tensor: Tensor
    extents: tuple[int, int]
    pitch: int
    box: tuple[int, int]
    element: int
    swizzle: int
    count: int = 1
    step: int = 0

    @property
    def box_bytes(self) -> int:
        """Bytes of a box, whether or not its elements exist."""
        return self.box[0] * self.box[1] * self.element

    def rows(self, column: int, row: int, matrix: int = 0) -> Array:
        """Return the bytes ``[rows, bytes]`` of the box at element ``column`` of ``row``; zeros outside."""
        width = self.box[0] * self.element
        result = np.zeros((self.box[1], width), np.uint8)
        low, high = max(column, 0), min(column + self.box[0], self.extents[0])
        for index in range(self.box[1]):
            if 0 <= matrix < self.count and 0 <= row + index < self.extents[1] and low < high:
                start = matrix * self.step + (row + index) * self.pitch + low * self.element
                part = self.tensor.bytes[start : start + (high - low) * self.element]
                first = (low - column) * self.element
                result[index, first : first + part.size] = part
        return result

    def existing(self, column: int, row: int, data: Array) -> Iterator[tuple[int, Array]]:
        """Yield the byte and the bytes of each row of a box ``[rows, bytes]`` that lies in the tensor."""
        low, high = max(column, 0), min(column + self.box[0], self.extents[0])
        for index in range(self.box[1]):
            if 0 <= row + index < self.extents[1] and low < high:
                first = (low - column) * self.element
                part = data[index, first : first + (high - low) * self.element]
                yield (row + index) * self.pitch + low * self.element, part


@dataclass(frozen=True)
class WindowMap:
    """A four-dimensional tensor map in im2col mode (cuTensorMapEncodeIm2col) of an image, channels last."""

    tensor: Tensor
    image: tuple[int, int, int, int]
    box: tuple[int, int]
    corners: tuple[tuple[int, int], tuple[int, int]]
    strides: tuple[int, int]
    element: int
    swizzle: int = 7

    @property
    def box_bytes(self) -> int:
        """Bytes of a box, whether or not its elements exist."""
        return self.box[0] * self.box[1] * self.element

    def rows(self, channel: int, column: int, row: int, image: int, right: int, down: int) -> Array:
        """Return the bytes ``[pixels, bytes]`` of pixels from one on, by strides within the corners' box."""
        count, height, width, channels = self.image
        # Pixels per line and lines per image, by the driver's rule: from corner to corner.
        last = [size - 1 + high for size, (_, high) in zip((height, width), self.corners, strict=True)]
        result = np.zeros((self.box[1], self.box[0] * self.element), np.uint8)
        low, high = max(channel, 0), min(channel + self.box[0], channels)
        for pixel in range(self.box[1]):
            h, w = row + down, column + right
            if 0 <= image < count and 0 <= h < height and 0 <= w < width and low < high:
                at = (((image * height + h) * width + w) * channels + low) * self.element
                first, size = (low - channel) * self.element, (high - low) * self.element
                result[pixel, first : first + size] = self.tensor.bytes[at : at + size]
            column += self.strides[1]
            if column > last[1]:
                column, row = self.corners[1][0], row + self.strides[0]
            if row > last[0]:
                row, image = self.corners[0][0], image + 1
        return result


def _encode_windows(t: Translator, call: CallView) -> Step:
    target, data, dtype, *numbers = call.operands
    batch, height, width, channels, box, pixels, *rest = (t.number(n) for n in numbers)
    kernel, strides, padding, dilation = zip(rest[::2], rest[1::2], strict=True)
    corners = tuple((-p, p - (k - 1) * d) for k, p, d in zip(kernel, padding, dilation, strict=True))
    element = NUMPY[str(dtype.value)].itemsize
    if channels * element % BULK_UNIT or box * element > 128 or pixels > 1024:
        raise UnknownCallError(f"no im2col map has {channels} channels in boxes of {box}, {pixels} pixels")
    if not all(at in CORNERS for pair in corners for at in pair):
        raise UnknownCallError(f"corners of an im2col map of an image are signed bytes, got {corners}")
    if max(strides) > MOST_STRIDE:
        raise UnknownCallError(f"strides of an im2col map are at most {MOST_STRIDE}, got {strides}")
    tensor = t.names[data.args[0]].tensor
    image = (batch, height, width, channels)
    t.names[target] = WindowMap(tensor, image, (box, pixels), (corners[0], corners[1]), strides, element)
    return lambda c: None


def _encode(t: Translator, call: CallView) -> Step:
    target, dtype, rank, data, *numbers = call.operands
    axes = t.number(rank)
    if call.name != "runtime.cuTensorMapEncodeTiled" or axes not in (2, 3):
        raise UnknownCallError(f"the simulator knows no {call.name} of rank {rank}")
    known = [t.number(n) for n in numbers]
    extents, pitches, boxes = known[:axes], known[axes : 2 * axes - 1], known[2 * axes - 1 : 3 * axes - 1]
    (inner, outer, *count), (pitch, *step), (box_inner, box_outer, *deep) = extents, pitches, boxes
    swizzle = known[-3]
    if any(one != 1 for one in deep):
        raise UnknownCallError(f"the simulator copies boxes of one matrix, not of {deep}")
    held = t.names[data.args[0]]
    element = NUMPY[str(dtype.value)].itemsize
    if any(each % 16 for each in pitches) or box_inner * element % 16:
        raise UnknownCallError(f"a tensor map needs pitches and boxes of multiples of 16 bytes, got {pitch}")
    box, moved = (box_inner, box_outer), MAP_SWIZZLES[swizzle]
    t.names[target] = TensorMap(held.tensor, (inner, outer), pitch, box, element, moved, *count, *step)
    return lambda c: None


def barrier_for(c: Cohort, warp: int, block: int, byte: int, statement: int) -> Mbarrier | None:
    """Return the mbarrier that a copy completes at; its initialisation must be visible to copies."""
    barrier = c.machine.mbarriers.reach(warp, block, byte, statement)
    if barrier is not None and not barrier.fenced:
        c.machine.log.add(
            "proxy", statement, "a copy completes at an mbarrier without fence.mbarrier_init after its init"
        )
    return barrier


def _land(
    c: Cohort, warp: int, block: int, places: Array, data: Array, barrier: Mbarrier, statement: int
) -> None:
    """Let 16-byte chunks arrive at bytes ``places`` of a block, and count them at its barrier."""
    memory = c.machine.memory
    if places.min() < 0 or places.max() + BULK_UNIT > memory.limit:
        message = f"a copy to byte {int(places.max())} of shared memory of {memory.limit} bytes"
        c.machine.log.add("out of bounds", statement, message, "bulk")
        places = np.clip(places, 0, memory.limit - BULK_UNIT)
    if c.machine.block_has_left(block):
        c.machine.log.add("barrier", statement, f"a copy to block {block}, which has ended", "left")
    flat = places + block * memory.pitch
    actor = memory.copier(warp, barrier.agent, barrier.phase + 1)
    memory.shadow.on_write(memory.granules(flat, BULK_UNIT), actor, statement)
    memory.shared[flat[:, None] + np.arange(BULK_UNIT)] = data.reshape(-1, BULK_UNIT)
    memory.traffic["shared write"] += data.size
    barrier.land(data.size)


def _bulk(t: Translator, call: CallView) -> Step:
    target, source, size, place = (t.read(operand) for operand in call.operands)
    statement = call.statement

    def action(c: Cohort) -> None:
        pointer: Pointer = source(c)
        tensor: Tensor = pointer.target
        for _, warp, _, to, start, count, byte in each_active(
            c, target(c), pointer.offset, size(c), place(c)
        ):
            block, to = warp // c.machine.block_warps, to & WITHIN
            barrier = barrier_for(c, warp, block, byte, statement)
            if barrier is None or not _legal(c, to, start, count, tensor, statement):
                continue
            c.machine.memory.traffic[f"global read {tensor.name}"] += count
            places = np.arange(to, to + count, BULK_UNIT)
            _land(c, warp, block, places, tensor.bytes[start : start + count], barrier, statement)

    return action


def _legal(c: Cohort, to: int, start: int, count: int, tensor: Tensor, statement: int) -> bool:
    """Check a bulk copy's alignment and extent."""
    log = c.machine.log
    if to % BULK_UNIT or start % BULK_UNIT or count % BULK_UNIT:
        log.add(
            "misaligned", statement, f"a bulk copy of {count} bytes from {start} to {to}: multiples of 16"
        )
        return False
    if start < 0 or start + count > tensor.size:
        log.add("out of bounds", statement, f"byte {start + count} of {tensor.name} of {tensor.size} bytes")
        return False
    return True


def _tensor(t: Translator, call: CallView) -> Step:
    tensor_map, statement = t.expression(call.operands[1]), call.statement
    place_read, *rest = (t.read(operand) for index, operand in enumerate(call.operands) if index != 1)
    if not isinstance(tensor_map, TensorMap):
        raise UnknownCallError("a tensor copy from a map that the host does not encode")
    axes = 2 + (tensor_map.step > 0)
    place, barrier_read = rest[:axes], rest[axes]
    multicast = rest[axes + 1] if len(rest) > axes + 1 else None

    def action(c: Cohort) -> None:
        targets = multicast(c) if multicast is not None else -1
        columns = (place_read(c), barrier_read(c), targets, *(read(c) for read in place))
        for _, warp, _, to, byte, chosen, *at in each_active(c, *columns):
            _copy_box(c, tensor_map, warp, (to, byte), tuple(at), chosen, statement)

    return action


def _copy_box(
    c: Cohort,
    box: TensorMap | WindowMap,
    warp: int,
    here: tuple[int, int],
    at: tuple[int, ...],
    chosen: int,
    statement: int,
) -> None:
    """Copy one box to the blocks of a multicast mask (-1 for the own block)."""
    to, byte = here[0] & WITHIN, here[1]
    if to % TENSOR_ALIGNMENT:
        c.machine.log.add("misaligned", statement, f"a tensor copy to byte {to}: no multiple of 128")
        return
    rows = box.rows(*at)
    c.machine.memory.traffic[f"global read {box.tensor.name}"] += box.box_bytes
    places = swizzled(np.arange(to, to + box.box_bytes, BULK_UNIT), box.swizzle)
    block, cluster = warp // c.machine.block_warps, c.machine.cluster_blocks
    first = block // cluster * cluster
    blocks = [block] if chosen == -1 else [first + i for i in range(cluster) if chosen >> i & 1]
    if chosen != -1 and chosen >> cluster:
        c.machine.log.add("barrier", statement, f"multicast mask {chosen:#x} names blocks beyond the cluster")
    for target in blocks:
        barrier = barrier_for(c, warp, target, byte, statement)
        if barrier is not None:
            _land(c, warp, target, places, rows.reshape(-1), barrier, statement)


# ---- tensor copies to global memory ------------------------------------------------------------------
class StoreGroups:
    """Groups of tensor stores of every warp.

    committed: How many have been.
    begun: Whether there are stores since the last one.
    read: How many are known to have read shared memory.
    last: Statement of the last store, 0 where there was none.
    """

    def __init__(self, machine: Hardware) -> None:
        self.machine, warps = machine, machine.blocks * machine.block_warps
        self.committed, self.begun, self.read, self.last = (np.zeros(warps, np.int32) for _ in range(4))

    def check_read(self) -> None:
        """Report blocks that ended before their copies had read what they stored."""
        for warp in np.flatnonzero((self.last > 0) & (self.read < self.committed + self.begun)):
            message = "a block ended before a tensor copy was known to have read its shared memory"
            self.machine.log.add("race", int(self.last[warp]), message, "left unread")


def _stores_of(c: Cohort) -> StoreGroups:
    """Return the machine's groups of tensor stores."""
    found = c.machine.extras.get("stores")
    if found is None:
        found = c.machine.extras["stores"] = StoreGroups(c.machine)
        c.machine.at_end.append(found.check_read)
    assert isinstance(found, StoreGroups)
    return found


def _store(t: Translator, call: CallView) -> Step:
    tensor_map, statement = t.expression(call.operands[0]), call.statement
    first, second, place = (t.read(operand) for operand in call.operands[1:])
    if not isinstance(tensor_map, TensorMap):
        raise UnknownCallError("a tensor copy to a map that the host does not encode")

    def action(c: Cohort) -> None:
        for _, warp, _, column, row, start in each_active(c, first(c), second(c), place(c)):
            _store_box(c, tensor_map, warp, start & WITHIN, (column, row), statement)

    return action


def _store_box(c: Cohort, box: TensorMap, warp: int, start: int, at: tuple[int, int], statement: int) -> None:
    """Copy one box from shared memory to what of it exists; it is read until a wait says otherwise."""
    memory = c.machine.memory
    if start % TENSOR_ALIGNMENT:
        c.machine.log.add("misaligned", statement, f"a tensor copy from byte {start}: no multiple of 128")
        return
    places = swizzled(np.arange(start, start + box.box_bytes, BULK_UNIT), box.swizzle)
    if places.max() + BULK_UNIT > memory.limit:
        message = f"a copy from byte {int(places.max())} of shared memory of {memory.limit} bytes"
        c.machine.log.add("out of bounds", statement, message, "bulk")
        return
    flat = places + warp // c.machine.block_warps * memory.pitch
    warps = np.array([warp])
    agents = memory.agents.stores(memory.clocks.own[warps])
    stores = _stores_of(c)
    epochs = stores.committed[warps] + 1
    stores.begun[warp], stores.last[warp] = 1, statement
    granules = memory.granules(flat, BULK_UNIT).reshape(1, -1)
    actor = Actor(warps[:, None], agents[:, None], epochs[:, None], np.array(ASYNC_LANE))
    memory.shadow.on_read(granules, actor, statement)
    memory.shadow.check_proxy(granules, warps, statement)
    memory.traffic["shared read"] += box.box_bytes
    data = memory.shared[flat[:, None] + np.arange(BULK_UNIT)].reshape(box.box[1], -1)
    for offset, values in box.existing(*at, data):
        memory.write_global(box.tensor, offset, values, statement)


def _commit_stores(t: Translator, call: CallView) -> Step:
    def action(c: Cohort) -> None:
        stores, warps = _stores_of(c), c.warps[c.active.any(axis=1)]
        stores.committed[warps] += 1
        stores.begun[warps] = 0

    return action


def _wait_stores(t: Translator, call: CallView) -> Step:
    left = t.number(call.operands[0])

    def action(c: Cohort) -> None:
        clocks, stores, warps = c.machine.memory.clocks, _stores_of(c), c.warps[c.active.any(axis=1)]
        agents = c.machine.memory.agents.stores(clocks.own[warps])
        stores.read[warps] = np.maximum(stores.read[warps], stores.committed[warps] - left)
        clocks.known[warps, agents] = np.maximum(clocks.known[warps, agents], stores.read[warps])

    return action


def _windows(t: Translator, call: CallView) -> Step:
    window_map, statement = t.expression(call.operands[1]), call.statement
    if not isinstance(window_map, WindowMap):
        raise UnknownCallError("a copy in im2col mode from a map that the host does not encode so")
    target, *place, barrier, right, down = (t.read(call.operands[i]) for i in (0, *range(2, 9)))
    multicast = t.read(call.operands[9]) if len(call.operands) > 9 else None

    def action(c: Cohort) -> None:
        targets = multicast(c) if multicast is not None else -1
        numbers = [read(c) for read in (*place, right, down)]
        for _, warp, _, to, byte, chosen, *at in each_active(c, target(c), barrier(c), targets, *numbers):
            _copy_box(c, window_map, warp, (to, byte), tuple(at), chosen, statement)

    return action


STEPS: dict[str, Callable[[Translator, CallView], Any]] = {
    "tirx.ptx.cp_async_cg": _copy,
    "tirx.ptx.cp_async_cg_src_size": _copy,
    "tirx.ptx.cp_async_commit_group": _commit,
    "tirx.ptx.cp_async_wait_group": _wait,
    "tirx.ptx.cp_async_bulk_g2s_cluster": _bulk,
    "tirx.ptx.cp_async_bulk_tensor_g2s_cluster": _tensor,
    "tirx.ptx.cp_async_bulk_tensor_g2s_cluster_im2col": _windows,
    "tirx.ptx.cp_async_bulk_tensor_s2g": _store,
    "tirx.ptx.cp_async_bulk_commit_group": _commit_stores,
    "tirx.ptx.cp_async_bulk_wait_group": _wait_stores,
    "tirx.ptx.cp_async_bulk_prefetch": nothing,
    "tirx.ptx.cp_async_bulk_tensor_prefetch": nothing,
    "tirx.tvm_call_packed": lambda t, call: (_encode_windows if call.name == IM2COL else _encode)(t, call),
}
"""Calls that copy."""
