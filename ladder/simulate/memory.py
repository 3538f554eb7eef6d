"""Shared and global memory: checked accesses of many lanes at once, with traffic and bank conflicts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from ladder.simulate.banks import BankMeter, Banks
from ladder.simulate.findings import Log
from ladder.simulate.order import ASYNC_LANE, Actor, Agents, Clocks, Shadow
from ladder.simulate.threads import Threads
from ladder.simulate.values import WITHIN, Array

WIDEST = 16
"""Bytes of the widest access of a thread."""


@dataclass(frozen=True)
class Pointer:
    """Address of elements: a place in a tensor, or registers.

    space: ``"shared"``, ``"global"`` or ``"local"``.
    target: `Tensor` of global memory, `Region` of shared memory, or the first register's number.
    offset: Bytes from the start of the tensor, or of the block's shared memory: a number or an array.
    """

    space: str
    target: Any
    offset: Any


@dataclass(frozen=True)
class Region:
    """A buffer in shared memory: bytes ``start .. stop`` of a block's part."""

    name: str
    start: int
    stop: int


class Tensor:
    """A tensor in global memory, copied in with room for whole wide accesses.

    name: How findings call it.
    array: Its contents.
    """

    def __init__(self, name: str, array: Array) -> None:
        self.name, self.array, self.size = name, array, array.nbytes
        padded = -(-array.nbytes // WIDEST) * WIDEST + WIDEST
        self.bytes = np.zeros(padded, np.uint8)
        self.bytes[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        # Only outputs need to know what was stored.
        self.stored: Array | None = None

    def track_stores(self) -> None:
        """Treat the tensor as output: its contents are garbage until stored."""
        self.stored = np.zeros(self.bytes.size, np.bool_)

    def copy_back(self) -> None:
        """Write the contents back to the array."""
        self.array.reshape(-1).view(np.uint8)[:] = self.bytes[: self.size]


class Memory:
    """All memory of the blocks that are simulated together.

    agents: Places of vector clocks.
    blocks: Blocks that are simulated together, whole clusters.
    shared_bytes: Shared memory of a block.
    unit: Bytes of the narrowest store to shared memory.
    log, traffic: Where findings and bytes moved go.
    banks: Of shared memory.
    """

    def __init__(
        self,
        agents: Agents,
        blocks: int,
        shared_bytes: int,
        unit: int,
        log: Log,
        traffic: Counter[str],
        banks: Banks,
    ) -> None:
        self.agents, self.log, self.traffic = agents, log, traffic
        self.limit, self.pitch = shared_bytes, max(-(-shared_bytes // 1024), 1) * 1024
        # NaN in every float type: what nobody wrote shows in whatever it gets into.
        self.shared = np.full(blocks * self.pitch, 0xFF, np.uint8)
        self.clocks = Clocks(agents, blocks * agents.warps)
        self.shadow = Shadow(self.clocks, blocks * self.pitch // unit, unit, log)
        self.banks = BankMeter(banks)

    # ---- shared memory -------------------------------------------------------------------------
    def locate(self, c: Threads, address: Any, width: int, region: Region | None, statement: int) -> Array:
        """Return where lanes access the bytes of all blocks; wrong addresses are reported, then mended."""
        address = np.broadcast_to(np.asarray(address, np.int64) & WITHIN, (c.count, c.lanes))
        low, high = (0, self.limit) if region is None else (region.start, region.stop)
        active = address if c.mask is None else address[c.mask]
        if active.size and (active.min() < low or active.max() + width > high):
            where = "shared memory" if region is None else f"shared buffer {region.name}"
            worst = int(active.max()) + width if active.max() + width > high else int(active.min())
            self.log.add(
                "out of bounds", statement, f"byte {worst - low} of {where} of {high - low} bytes", "shared"
            )
            address = np.clip(address, 0, self.limit - width)
        if active.size and (active & (width - 1)).any():
            self.log.add("misaligned", statement, f"shared address is no multiple of {width}", "shared")
            address = address & ~(width - 1)
        if c.mask is not None:
            address = np.where(c.mask, address, 0)
        flat: Array = address + c.block * self.pitch
        return flat

    def _actor(self, c: Threads) -> tuple[Actor, Array | None]:
        """Return who accesses as arrays ``[accesses, 1]``, and which lanes do."""
        epochs = self.clocks.epoch(c.warps)
        own = self.clocks.own[c.warps]
        lanes = c.lane_ids
        if c.mask is None:
            rows = c.row_ids
        else:
            rows, lanes = c.row_ids[c.mask.reshape(-1)], lanes[c.mask.reshape(-1)]
        every = (c.warps[rows], own[rows], epochs[rows], lanes)
        return Actor(*(part[:, None] for part in every)), None if c.mask is None else c.mask.reshape(-1)

    def granules(self, flat: Array, width: int) -> Array:
        """Return the granules ``[accesses, n]`` of accesses of ``width`` bytes."""
        first = flat[:, None] // self.shadow.unit
        return first + np.arange(max(width // self.shadow.unit, 1))

    def load_shared(
        self, c: Threads, address: Any, width: int, region: Region | None, statement: int
    ) -> Array:
        """Load ``width`` bytes per lane: bytes ``[warps, 32, width]``, of any value where inactive."""
        where = self.locate(c, address, width, region, statement)
        self.banks.count(c, where, width, statement, is_read=True)
        flat = where.reshape(-1)
        data = self.shared.view(f"V{width}").take(flat // width) if width > 1 else self.shared.take(flat)
        actor, active = self._actor(c)
        chosen = flat if active is None else flat[active]
        self.traffic["shared read"] += chosen.size * width
        self.shadow.on_read(self.granules(chosen, width), actor, statement)
        c.touched = True
        return np.ascontiguousarray(data).view(np.uint8).reshape(c.count, c.lanes, width)

    def store_shared(
        self, c: Threads, address: Any, data: Array, region: Region | None, statement: int
    ) -> None:
        """Store bytes ``[warps, 32, width]``."""
        width = data.shape[-1]
        where = self.locate(c, address, width, region, statement)
        self.banks.count(c, where, width, statement, is_read=False)
        flat, values = where.reshape(-1), data.reshape(-1, width)
        actor, active = self._actor(c)
        if active is not None:
            flat, values = flat[active], values[active]
        self.traffic["shared write"] += flat.size * width
        self._check_collisions(flat, width, statement)
        self.shadow.on_write(self.granules(flat, width), actor, statement)
        self.shared[flat[:, None] + np.arange(width)] = values
        c.touched = True

    def combine_shared(self, c: Threads, address: Any, values: Array, operation: Any, statement: int) -> None:
        """Combine elements ``[warps, 32, 1]`` with those of shared memory, one after the other.

        What was written there must be visible; that others combine at once is no race.
        """
        size = values.dtype.itemsize
        where = self.locate(c, address, size, None, statement)
        flat, values = where.reshape(-1), values.reshape(-1)
        actor, active = self._actor(c)
        if active is not None:
            flat, values = flat[active], values[active]
        self.traffic["shared write"] += flat.size * size
        self.shadow.on_read(self.granules(flat, size), actor, statement)
        elements = self.shared.view(values.dtype)
        for place, value in zip((flat // size).tolist(), values, strict=True):
            elements[place] = operation(elements[place], value)
        c.touched = True

    def _check_collisions(self, flat: Array, width: int, statement: int) -> None:
        """Report two lanes that store to the same bytes with one instruction."""
        order = np.sort(flat)
        if flat.size > 1 and (np.diff(order) < width).any():
            self.log.add("race", statement, "two threads store to the same shared bytes at once", "at once")

    def copier(self, warp: int, agent: int, epoch: int) -> Actor:
        """Return an asynchronous copy that a warp started."""
        return Actor(np.array(warp), np.array(agent), np.array(epoch), np.array(ASYNC_LANE))

    # ---- global memory -------------------------------------------------------------------------
    def place(self, c: Threads, pointer: Pointer, width: int, statement: int) -> Array:
        """Return the byte offsets ``[warps, 32]`` of an access of global memory, checked and mended."""
        tensor: Tensor = pointer.target
        offset = np.broadcast_to(np.asarray(pointer.offset, np.int64), (c.count, c.lanes))
        active = offset if c.mask is None else offset[c.mask]
        if active.size and (active.min() < 0 or active.max() + width > tensor.size):
            worst = int(active.min()) if active.min() < 0 else int(active.max()) + width
            self.log.add(
                "out of bounds", statement, f"byte {worst} of {tensor.name} of {tensor.size} bytes", "global"
            )
            offset = np.clip(offset, 0, tensor.bytes.size - width)
        if active.size and (active & (width - 1)).any():
            self.log.add("misaligned", statement, f"address in {tensor.name} is no multiple of {width}")
            offset = offset & ~(width - 1)
        return offset if c.mask is None else np.where(c.mask, offset, 0)

    def load_global(self, c: Threads, pointer: Pointer, width: int, statement: int) -> Array:
        """Load ``width`` bytes per lane from a tensor; returns bytes ``[warps, 32, width]``."""
        tensor: Tensor = pointer.target
        offset = self.place(c, pointer, width, statement)
        active = offset.size if c.mask is None else int(c.mask.sum())
        self.traffic[f"global read {tensor.name}"] += active * width
        if tensor.stored is not None:
            seen = offset if c.mask is None else offset[c.mask]
            if not tensor.stored[seen].all():
                self.log.add("uninitialised", statement, f"reads what no thread stored to {tensor.name}")
        data = (
            tensor.bytes.view(f"V{width}").take(offset // width) if width > 1 else tensor.bytes.take(offset)
        )
        return np.ascontiguousarray(data).view(np.uint8).reshape(c.count, c.lanes, width)

    def store_global(self, c: Threads, pointer: Pointer, data: Array, statement: int) -> None:
        """Store bytes ``[warps, 32, width]`` to a tensor."""
        tensor: Tensor = pointer.target
        width = data.shape[-1]
        offset = self.place(c, pointer, width, statement).reshape(-1)
        values = data.reshape(-1, width)
        if c.mask is not None:
            active = c.mask.reshape(-1)
            offset, values = offset[active], values[active]
        self._write(tensor, offset[:, None] + np.arange(width), values, statement)

    def combine_global(
        self, c: Threads, pointer: Pointer, values: Array, operation: Any, statement: int
    ) -> None:
        """Combine elements ``[warps, 32, n]`` with those of a tensor, one after the other."""
        tensor: Tensor = pointer.target
        size, count = values.dtype.itemsize, values.shape[-1]
        offset = self.place(c, pointer, size * count, statement).reshape(-1)
        values = values.reshape(-1, count)
        if c.mask is not None:
            active = c.mask.reshape(-1)
            offset, values = offset[active], values[active]
        self.traffic[f"global write {tensor.name}"] += values.nbytes
        at = (offset[:, None] // size + np.arange(count)).reshape(-1)
        elements = tensor.bytes.view(values.dtype)
        for place, value in zip(at.tolist(), values.reshape(-1), strict=True):
            elements[place] = operation(elements[place], value)
        if tensor.stored is not None:
            tensor.stored[(at[:, None] * size + np.arange(size)).reshape(-1)] = True

    def write_global(self, tensor: Tensor, offset: int, values: Array, statement: int) -> None:
        """Store neighbouring bytes to a tensor, as a copy does."""
        self._write(tensor, offset + np.arange(values.size), values, statement)

    def _write(self, tensor: Tensor, at: Array, values: Array, statement: int) -> None:
        """Store bytes to a tensor."""
        self.traffic[f"global write {tensor.name}"] += values.size
        if tensor.stored is not None:
            again = tensor.stored[at]
            # The same value may be stored twice: tiles may overlap.
            if (again & (tensor.bytes[at] != values)).any():
                self.log.add(
                    "race", statement, f"different values are stored to one element of {tensor.name}"
                )
            tensor.stored[at] = True
        tensor.bytes[at] = values
        if not np.array_equal(tensor.bytes[at], values):
            self.log.add("race", statement, f"two threads store different values to {tensor.name} at once")


def to_bytes(values: Array) -> Array:
    """View elements ``[warps, 32, n]`` as bytes ``[warps, 32, width]``."""
    return np.ascontiguousarray(values).view(np.uint8)
