"""The registers of one wave, and how instructions read and write them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ladder.simulate.gcn.listing import EXEC, M0, NULL, VCC, GcnError, Instruction, Operand
from ladder.simulate.values import Array

LANES = 64
MOST_VECTOR, MOST_LOCAL = 63, 15
"""Largest values of VMCNT and LGKMCNT."""

ONES = 0xFFFFFFFF
EVERY = (1 << LANES) - 1

TYPES: dict[str, np.dtype[Any]] = {
    "f16": np.dtype(np.float16), "u16": np.dtype(np.uint16), "i16": np.dtype(np.int16),
    "f32": np.dtype(np.float32), "u32": np.dtype(np.uint32), "i32": np.dtype(np.int32),
    "u64": np.dtype(np.uint64), "i64": np.dtype(np.int64),
}  # fmt: skip
"""Types that instructions take registers for."""

Read = Callable[["Wave"], Any]


@dataclass
class Outstanding:
    """A memory instruction that no wait has covered yet.

    text: The instruction.
    kind: ``"global"``, ``"scratch"``, ``"lds read"``, ``"lds write"``, ``"exchange"`` or ``"scalar"``.
    results: Registers that it will write.
    """

    text: str
    kind: str
    results: frozenset[int]


class Wave:
    """One wave of 64 lanes, or of 32: then the upper half of every register is never active.

    group: What the waves of its workgroup share.
    number: Its number within the workgroup.
    lanes: Its lanes.
    """

    def __init__(self, group: Any, number: int, lanes: int = LANES) -> None:
        self.group, self.number, self.lanes = group, number, lanes
        self.every, self.mask_words = (1 << lanes) - 1, lanes // 32
        self.v = np.full((256, LANES), ONES, np.uint32)
        self.a = np.full((256, LANES), ONES, np.uint32)
        self.s = [0] * 128  # that of ``null`` stays 0
        self.scratch = np.zeros((LANES, 0), np.uint8)
        self.scc = 0
        self.pc = 0
        self.mask = np.ones(LANES, np.bool_)
        self.whole = True
        self.set_scalar(EXEC, self.every, 2)
        self.s[VCC] = self.s[M0] = 0
        self.vector_memory: deque[Outstanding] = deque()
        self.local_memory: deque[Outstanding] = deque()
        self.scalar_memory = self.local_memory
        self.pending: frozenset[int] = frozenset()

    # ---- scalar registers --------------------------------------------------------------------------
    def scalar(self, index: int, count: int = 1) -> int:
        """Return one SGPR, or two as one number."""
        return self.s[index] | self.s[index + 1] << 32 if count == 2 else self.s[index]

    def set_scalar(self, index: int, value: int, count: int = 1) -> None:
        """Write one SGPR or two; what goes to ``null`` is lost."""
        if index == NULL:
            return
        self.s[index] = value & ONES
        if count == 2:
            self.s[index + 1] = value >> 32 & ONES
        if index <= EXEC + 1 and index + count > EXEC:
            active = self.scalar(EXEC, 2)
            self.mask, self.whole = lanes_of(active & self.every), active & self.every == self.every

    # ---- waits ---------------------------------------------------------------------------------------
    def issue(self, queue: deque[Outstanding], entry: Outstanding) -> None:
        """Note a memory instruction; hardware holds it back while its counter is at its largest."""
        most = MOST_VECTOR if queue is self.vector_memory else MOST_LOCAL
        if len(queue) >= most:
            self.wait(queue, most - 1)
        queue.append(entry)
        self.pending = self.pending | entry.results

    def wait(self, queue: deque[Outstanding], most: int) -> None:
        """Wait until no more than ``most`` instructions of a queue are outstanding.

        Scalar loads may return out of order: while one is outstanding, only a wait for all means anything.
        """
        if most and any(entry.kind == "scalar" for entry in queue):
            return
        while len(queue) > most:
            queue.popleft()
        left = (*self.vector_memory, *self.local_memory, *self.scalar_memory)
        self.pending = frozenset().union(*(entry.results for entry in left))


def lanes_of(mask: int) -> Array:
    """Return the bits of a number as a truth value for each lane."""
    raw = np.frombuffer(mask.to_bytes(8, "little"), np.uint8)
    bits: Array = np.unpackbits(raw, bitorder="little").view(np.bool_)
    return bits


def number_of(lanes: Array) -> int:
    """Return truth values of lanes as the bits of a number."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


# ---- constants ---------------------------------------------------------------------------------------
def literal_bits(text: str, kind: str) -> int:
    """Return the bits of a constant in an instruction that takes a type."""
    dtype = TYPES[kind]
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
        return int(text, 0) & (1 << 8 * dtype.itemsize) - 1
    if not re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", text):
        raise GcnError(f"the emulator does not know the operand {text!r}")
    form = dtype if dtype.kind == "f" else np.dtype(np.float16 if dtype.itemsize == 2 else np.float32)
    if text.lstrip("-").startswith("0.15915494"):  # 1 / (2 pi)
        return 0x3118 if form.itemsize == 2 else 0x3E22F983
    return int(np.array(float(text), form).view(f"u{form.itemsize}"))


# ---- sources -----------------------------------------------------------------------------------------
HALVES = {".l": (0, 16), ".h": (16, 16)}
"""First bit and bits of a half of a register."""

SELECTS = {f"BYTE_{i}": (8 * i, 8) for i in range(4)} | {
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
    "DWORD": (0, 32),
}


def words(operand: Operand, kind: str = "u32") -> Callable[[Wave], Array]:
    """Return what reads the low 32 bits of a source of any file as an array of lanes, or as one number."""
    index = operand.index
    if operand.half == ".h":
        return lambda w: w.v[index] >> np.uint32(16)
    if operand.kind == "v":
        return lambda w: w.v[index]
    if operand.kind == "a":
        return lambda w: w.a[index]
    if operand.kind == "s":
        return lambda w: np.asarray(w.s[index], np.uint32)
    constant = np.asarray(literal_bits(operand.text, kind) & ONES, np.uint32)
    return lambda w: constant


def long_words(operand: Operand) -> Callable[[Wave], Array]:
    """Return what reads 64 bits of a source."""
    index = operand.index
    if operand.kind in ("v", "a"):
        file = operand.kind
        return lambda w: (
            getattr(w, file)[index].astype(np.uint64)
            | getattr(w, file)[index + 1].astype(np.uint64) << np.uint64(32)
        )
    if operand.kind == "s":
        return lambda w: np.asarray(w.scalar(index, 2), np.uint64)
    constant = np.asarray(literal_bits(operand.text, "u64"), np.uint64)
    return lambda w: constant


def source(
    operand: Operand, kind: str, select: str = "DWORD", moved: Callable[[Wave, Array], Array] | None = None
) -> Read:
    """Return what reads a source as a type, with its modifiers.

    operand, kind: What, and as which of `TYPES`.
    select: Part of the register that SDWA takes.
    moved: What DPP does to the register's lanes.
    """
    dtype = TYPES[kind]
    if (operand.negated or operand.absolute) and dtype.kind != "f":
        raise GcnError(f"the emulator knows no signs of integers: {operand}")
    if dtype.itemsize == 8:
        wide = long_words(operand)
        return lambda w: wide(w).view(dtype)
    raw = words(operand, kind)
    shift, size = SELECTS[select]

    def read(w: Wave) -> Array:
        held = raw(w)
        if moved is not None:
            held = moved(w, held)
        if size < 32:
            held = held >> np.uint32(shift) & np.uint32((1 << size) - 1)
            if operand.extended:
                top = np.uint32(1 << size - 1)
                held = (held ^ top) - top
        found = held.astype(np.uint16).view(dtype) if dtype.itemsize == 2 else held.view(dtype)
        return found

    if not (operand.negated or operand.absolute):
        return read

    def changed(w: Wave) -> Array:
        found = np.abs(read(w)) if operand.absolute else read(w)
        return -found if operand.negated else found

    return changed


def mask_source(operand: Operand) -> Read:
    """Return what reads an SGPR pair as a truth value for each lane."""
    if operand.kind == "literal":
        constant = lanes_of(int(operand.text, 0) & EVERY)
        return lambda w: constant
    index, count = operand.index, operand.count
    return lambda w: lanes_of(w.scalar(index, count))


# ---- results -----------------------------------------------------------------------------------------
def store_words(operand: Operand) -> Callable[[Wave, Array], None]:
    """Return what writes 32 bits per active lane to a VGPR or AGPR."""
    index, file = operand.index, operand.kind
    if file not in ("v", "a"):
        raise GcnError(f"a vector result goes to {file}{index}")

    def write(w: Wave, value: Array) -> None:
        np.copyto(getattr(w, file)[index], value, where=w.mask)

    return write


def result(i: Instruction, kind: str) -> Callable[[Wave, Any], None]:
    """Return what writes a result of a type.

    A narrow one clears the rest unless SDWA says otherwise, or half of a register is named.
    """
    operand, dtype = i.operands[0], TYPES[kind]
    low = store_words(operand)
    if dtype.itemsize == 8:
        high = store_words(Operand(operand.kind, operand.index + 1))

        def both(w: Wave, value: Any) -> None:
            bits = np.asarray(value, dtype).view(np.uint64)
            low(w, bits.astype(np.uint32))
            high(w, (bits >> np.uint64(32)).astype(np.uint32))

        return both
    shift, size = SELECTS[i.modifiers.get("dst_sel", "DWORD")]
    keeps = i.modifiers.get("dst_unused", "UNUSED_PAD") == "UNUSED_PRESERVE" or operand.half != ""
    shift, size = HALVES.get(operand.half, (shift, size))
    if i.modifiers.get("dst_unused") == "UNUSED_SEXT":
        raise GcnError(f"a result that extends its sign: {i.text}")
    field = np.uint32(((1 << size) - 1) << shift)
    index, file = operand.index, operand.kind

    def write(w: Wave, value: Any) -> None:
        held = np.asarray(value, dtype)
        bits = held.view(np.uint16).astype(np.uint32) if dtype.itemsize == 2 else held.view(np.uint32)
        if size < 32:
            bits = bits << np.uint32(shift) & field
            bits = bits | getattr(w, file)[index] & ~field if keeps else bits
        low(w, bits)

    return write


def mask_result(operand: Operand) -> Callable[[Wave, Array], None]:
    """Return what writes a truth value for each active lane to SGPRs; others get 0."""
    index, count = operand.index, operand.count

    def write(w: Wave, value: Array) -> None:
        w.set_scalar(index, number_of(np.broadcast_to(value, LANES) & w.mask), count)

    return write
