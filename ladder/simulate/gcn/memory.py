"""Memory instructions: scalar loads, global memory, LDS, and exchanges through LDS hardware.

Semantics: AMD Instinct MI300 ISA, chapters 7, 9 and 11. Every access is checked against the bounds of
its tensor or of LDS. Accesses of global memory may begin at any byte, as HSA sets hardware up and LLVM
expects (AMDGPU backend guide: unaligned access mode). What LDS words were written or read by another wave
since the last barrier is a race.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ladder.simulate.gcn.listing import GcnError, Instruction, Operand
from ladder.simulate.gcn.wave import LANES, Outstanding, Read, Wave, source, store_words, words
from ladder.simulate.values import Array

Step = Callable[[Wave], Any]

SPACE_BITS = 40
"""Bits of an address within a tensor; those above say which tensor."""

WIDTHS = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "dwordx8": 32, "dwordx16": 64,
          "ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2}  # fmt: skip
LDS_WIDTHS = {
    "b8": 1,
    "u8": 1,
    "i8": 1,
    "b16": 2,
    "u16": 2,
    "i16": 2,
    "b32": 4,
    "b64": 8,
    "b96": 12,
    "b128": 16,
}
SIGNED = {"sbyte", "sshort", "i8", "i16"}


class Space:
    """Global memory: tensors far apart, so that an address beyond one is in none.

    arrays: C-contiguous arrays; stores go to them.
    """

    def __init__(self, arrays: list[Array]) -> None:
        self.bytes = [array.reshape(-1).view(np.uint8) for array in arrays]

    @staticmethod
    def address(number: int) -> int:
        """Return where a tensor begins."""
        return number + 1 << SPACE_BITS

    def place(self, address: Array, width: int) -> tuple[Array, Array, Array]:
        """Return which tensor and where in it each address lies, and whether all its bytes do."""
        number = (address >> np.uint64(SPACE_BITS)).astype(np.int64) - 1
        offset = (address & np.uint64((1 << SPACE_BITS) - 1)).astype(np.int64)
        sizes = np.array([*(held.size for held in self.bytes), 0])
        known = (number >= 0) & (number < len(self.bytes))
        inside = known & (offset + width <= sizes[np.where(known, number, len(self.bytes))])
        return number, offset, inside


# ---- scalar loads ------------------------------------------------------------------------------------
def _scalar_load(i: Instruction) -> Step:
    to, base = i.operands[0].index, i.operands[1].index
    kind, offset = i.op.removeprefix("s_load_"), i.operands[2]
    width, signed = WIDTHS[kind], kind in SIGNED
    results = i.operands[0].registers

    def step(w: Wave) -> None:
        more = int(offset.text, 0) if offset.kind == "literal" else w.s[offset.index]
        more += i.number("offset")
        address = np.array([w.scalar(base, 2) + more & -min(width, 4)], np.uint64)
        found = _loaded(w, i, address, np.ones(1, np.bool_), width).tobytes()
        for at in range(0, width, 4):
            w.set_scalar(to + at // 4, int.from_bytes(found[at : at + 4], "little", signed=signed))
        w.issue(w.scalar_memory, Outstanding(i.text, "scalar", results))

    return step


# ---- global memory -----------------------------------------------------------------------------------
def _addresses(i: Instruction, at: int) -> Callable[[Wave], Array]:
    """Return what computes the addresses of a global access whose first address operand is ``at``."""
    where, base = i.operands[at], i.operands[at + 1] if len(i.operands) > at + 1 else None
    offset = np.uint64(i.number("offset") & (1 << 64) - 1)
    if base is not None and base.kind == "s":
        index, low = base.index, words(where)
        return lambda w: np.uint64(w.scalar(index, 2)) + low(w).astype(np.uint64) + offset
    if "off" not in i.modifiers:
        raise GcnError(f"the emulator does not know the address of {i.text}")
    wide = source(where, "u64")
    return lambda w: wide(w) + offset


def _loaded(w: Wave, i: Instruction, address: Array, active: Array, width: int) -> Array:
    """Return ``[lanes, width]`` bytes; zeros where a lane is not active or reads what is not there."""
    space: Space = w.group.space
    number, offset, inside = space.place(address, width)
    _check(w, i, active, inside)
    found = np.zeros((active.size, width), np.uint8)
    good = active & inside
    for tensor in np.unique(number[good]):
        lanes = np.flatnonzero(good & (number == tensor))
        found[lanes] = space.bytes[tensor][offset[lanes, None] + np.arange(width)]
    return found


def _check(w: Wave, i: Instruction, active: Array, inside: Array) -> None:
    if (active & ~inside).any():
        w.group.report("out of bounds", i.text)


def _global_load(i: Instruction) -> Step:
    kind = i.op.removeprefix("global_load_")
    high, low = kind.endswith("_d16_hi"), kind.endswith("_d16")
    kind = kind.removesuffix("_d16_hi").removesuffix("_d16")
    width, to, address = WIDTHS[kind], i.operands[0], _addresses(i, 1)
    results = to.registers

    def step(w: Wave) -> None:
        found = _loaded(w, i, np.broadcast_to(address(w), LANES), w.mask, width)
        to_registers(w, to, found, kind, (low, high))
        w.issue(w.vector_memory, Outstanding(i.text, "global", results))

    return step


def to_registers(w: Wave, to: Operand, found: Array, kind: str, halves: tuple[bool, bool]) -> None:
    """Write loaded bytes to registers, extended to words or, if ``halves``, as one half of one."""
    if found.shape[1] >= 4:
        for at, word in enumerate(np.ascontiguousarray(found).view(np.uint32).T):
            store_words(Operand(to.kind, to.index + at))(w, word)
        return
    dtype = np.dtype(f"{'i' if kind in SIGNED else 'u'}{found.shape[1]}")
    wide = np.ascontiguousarray(found).view(dtype)[:, 0].astype(np.int64).astype(np.uint32)
    held = getattr(w, to.kind)[to.index]
    if halves[0]:
        wide = wide & np.uint32(0xFFFF) | held & np.uint32(0xFFFF0000)
    elif halves[1]:
        wide = wide << np.uint32(16) | held & np.uint32(0xFFFF)
    store_words(to)(w, wide)


def from_registers(operand: Operand, width: int, shift: int = 0) -> Callable[[Wave], Array]:
    """Return what reads ``[lanes, width]`` bytes to store."""
    parts = [words(Operand(operand.kind, operand.index + at)) for at in range(-(-width // 4))]

    def read(w: Wave) -> Array:
        held = np.stack([np.broadcast_to(part(w), LANES) for part in parts], axis=1) >> np.uint32(shift)
        return np.ascontiguousarray(held).view(np.uint8)[:, :width]

    return read


def _global_store(i: Instruction) -> Step:
    kind = i.op.removeprefix("global_store_")
    shift = 16 if kind.endswith("_d16_hi") else 0
    width = WIDTHS[kind.removesuffix("_d16_hi")]
    data = from_registers(i.operands[1], width, shift)
    moved = Instruction(i.text, i.op, i.form, (i.operands[1], i.operands[0], *i.operands[2:]), i.modifiers)
    address = _addresses(moved, 1)

    def step(w: Wave) -> None:
        space: Space = w.group.space
        number, offset, inside = space.place(np.broadcast_to(address(w), LANES), width)
        _check(w, i, w.mask, inside)
        bytes_, good = data(w), w.mask & inside
        for tensor in np.unique(number[good]):
            lanes = np.flatnonzero(good & (number == tensor))
            space.bytes[tensor][offset[lanes, None] + np.arange(width)] = bytes_[lanes]
        if not w.group.stores_apart:
            w.issue(w.vector_memory, Outstanding(i.text, "global", frozenset()))

    return step


# ---- LDS ---------------------------------------------------------------------------------------------
class LocalMemory:
    """A workgroup's LDS, and which wave touched each word since the last barrier.

    size: Bytes.
    """

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)
        count = -(-size // 4)
        self.writer, self.reader = np.full(count, -1, np.int16), np.full(count, -1, np.int16)

    def new_epoch(self) -> None:
        """Forget who touched what: all waves have passed a barrier."""
        self.writer[:] = -1
        self.reader[:] = -1

    def touch(self, wave: int, at: Array, is_write: bool) -> bool:
        """Note the bytes that a wave accesses; return whether another wave's access is unordered to it."""
        place = np.unique(at // 4)
        writer, reader = self.writer[place], self.reader[place]
        clash = bool(((writer >= 0) & (writer != wave)).any())
        if is_write:
            clash = clash or bool(((reader != -1) & (reader != wave)).any())
            self.writer[place] = wave
        else:
            self.reader[place] = np.where((reader == -1) | (reader == wave), wave, MANY)
        return clash


MANY = -2
"""Reader of a word that several waves read."""


def _local_places(i: Instruction, at: int, width: int) -> list[Callable[[Wave], Array]]:
    """Return what computes the byte addresses of an LDS access: one per piece."""
    base = words(i.operands[at])
    if not re.search(r"read2|write2", i.op):
        offsets = [i.number("offset")]
    else:
        unit = width * (64 if "st64" in i.op else 1)
        offsets = [i.number("offset0") * unit, i.number("offset1") * unit]

    def at_offset(offset: int) -> Callable[[Wave], Array]:
        return lambda w: np.broadcast_to(base(w), LANES).astype(np.int64) + offset

    return [at_offset(offset) for offset in offsets]


def _local_access(w: Wave, i: Instruction, place: Array, width: int, is_write: bool) -> tuple[Array, Array]:
    """Check an access; return the lanes that may do it, and the bytes of each."""
    memory: LocalMemory = w.group.local
    inside = (place >= 0) & (place + width <= memory.bytes.size)
    if (w.mask & ~inside).any():
        w.group.report("out of bounds", i.text)
    if (place[w.mask] % min(width & -width, 8 if width == 16 else width)).any():
        w.group.report("misaligned", i.text)
    lanes = np.flatnonzero(w.mask & inside)
    at = place[lanes, None] + np.arange(width)
    if memory.touch(w.number, at.reshape(-1), is_write):
        w.group.report("race", i.text)
    return lanes, at


def _local_width(i: Instruction) -> tuple[int, str]:
    kind = next(part for part in reversed(i.op.split("_")) if part in LDS_WIDTHS)
    return LDS_WIDTHS[kind], kind


def _local_read(i: Instruction) -> Step:
    if "_d16" in i.op:
        raise GcnError(f"the emulator does not know {i.text}")
    (width, kind), to = _local_width(i), i.operands[0]
    places, results = _local_places(i, 1, width), to.registers

    def step(w: Wave) -> None:
        given = [place(w) for place in places]  # the first piece may overwrite the register of addresses
        for number, place in enumerate(given):
            lanes, at = _local_access(w, i, place, width, False)
            found = np.zeros((LANES, width), np.uint8)
            found[lanes] = w.group.local.bytes[at]
            to_registers(w, Operand(to.kind, to.index + number * (width // 4)), found, kind, (False, False))
        w.issue(w.local_memory, Outstanding(i.text, "lds read", results))

    return step


def _local_write(i: Instruction) -> Step:
    width, _ = _local_width(i)
    shift = 16 if i.op.endswith("_d16_hi") else 0
    places = _local_places(i, 0, width)
    sources = [from_registers(operand, width, shift) for operand in i.operands[1 : 1 + len(places)]]

    def step(w: Wave) -> None:
        for place, data in zip(places, sources, strict=True):
            lanes, at = _local_access(w, i, place(w), width, True)
            w.group.local.bytes[at] = data(w)[lanes]
        w.issue(w.local_memory, Outstanding(i.text, "lds write", frozenset()))

    return step


def require_whole(w: Wave, i: Instruction) -> None:
    """Report an exchange between lanes while part of the wave is active."""
    if not w.whole:
        w.group.report("divergence", i.text)


def _permute(i: Instruction) -> Step:
    to, place, value = i.operands[:3]
    write, at, data = store_words(to), words(place), words(value)
    backward = i.op == "ds_bpermute_b32"
    offset = np.uint32(i.number("offset"))

    def step(w: Wave) -> None:
        require_whole(w, i)
        lane = np.broadcast_to((at(w) + offset) >> np.uint32(2) & np.uint32(w.lanes - 1), LANES)
        held = np.where(w.mask, data(w), np.uint32(0))
        if backward:
            found = held[lane]
        else:
            found = np.zeros(LANES, np.uint32)
            found[lane[w.mask]] = held[w.mask]
        write(w, found)
        w.issue(w.local_memory, Outstanding(i.text, "exchange", to.registers))

    return step


ROWS: tuple[tuple[str, Callable[[Instruction], Step]], ...] = (
    (r"s_load_(dword(x\d+)?|[us](byte|short))", _scalar_load),
    (r"global_load_(dword(x[234])?|[us](byte|short)(_d16(_hi)?)?)", _global_load),
    (r"global_store_(dword(x[234])?|(byte|short)(_d16_hi)?)", _global_store),
    (r"ds_read(2(st64)?)?_[bui](8|16|32|64|96|128)", _local_read),
    (r"ds_write(2(st64)?)?_b(8|16|32|64|96|128)(_d16_hi)?", _local_write),
    (r"ds_b?permute_b32", _permute),
)
"""Patterns of mnemonics, and what makes their closures."""


def translate(i: Instruction) -> Step | None:
    """Return the closure of a memory instruction; None if it is none that is known."""
    return next((make(i) for pattern, make in ROWS if re.fullmatch(pattern, i.op)), None)


def is_vector_load(i: Instruction) -> bool:
    """Tell whether an instruction loads from global or scratch memory: such loads return in order."""
    return i.op.startswith(("global_load", "scratch_load", "buffer_load"))


__all__ = [
    "WIDTHS",
    "LocalMemory",
    "Read",
    "Space",
    "from_registers",
    "is_vector_load",
    "require_whole",
    "to_registers",
    "translate",
]
