"""Scratch memory: bytes of each lane's own, where LLVM keeps registers that it spills.

GFX940 and RDNA reach it by ``scratch_`` instructions, GFX90A by ``buffer_`` ones through ``s[0:3]``.
Semantics: AMD Instinct MI300, RDNA3 and RDNA4 ISA, "Flat, Scratch and Global"; AMD Instinct MI200 ISA,
"Buffer Addressing"; that ``s[0:3]`` describe the private segment: AMDGPU backend guide.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ladder.simulate.gcn.listing import GcnError, Instruction, Operand
from ladder.simulate.gcn.memory import WIDTHS, from_registers, to_registers
from ladder.simulate.gcn.wave import LANES, Outstanding, Wave, words
from ladder.simulate.values import Array

Step = Callable[[Wave], Any]

KNOWN = re.compile(r"(scratch|buffer)_(load|store)_(dword(?:x[234])?|[us]?(?:byte|short))(_d16(?:_hi)?)?")
DESCRIPTOR = (0, 4)
"""First register and number of those that describe the private segment."""


def translate(i: Instruction) -> Step | None:
    """Return the closure of an access of scratch memory; None if it is none."""
    match = KNOWN.fullmatch(i.op)
    if match is None:
        return None
    data, others = _data_and_others(i)
    if match[1] == "buffer" and all((o.index, o.count) != DESCRIPTOR for o in others if o.kind == "s"):
        raise GcnError(f"the emulator does not know the buffer of {i.text}")
    places, half = _places(i, others, WIDTHS[match[3]]), match[4] or ""
    return (_load if match[2] == "load" else _store)(i, data, places, match[3], half)


def _data_and_others(i: Instruction) -> tuple[Operand, list[Operand]]:
    """Return where the data is, and what else is named; ``scratch_store`` has its address first."""
    at = 0
    if i.op.startswith("scratch_store"):
        at = max(at for at, operand in enumerate(i.operands) if operand.kind in ("v", "a"))
    return i.operands[at], [*i.operands[:at], *i.operands[at + 1 :]]


def _places(i: Instruction, others: list[Operand], width: int) -> Callable[[Wave], tuple[Array, Array]]:
    """Return what finds the active lanes whose bytes exist, ``[lanes, 1]``, and which bytes these are."""
    offset = np.int64(i.number("offset"))
    parts = [words(operand) for operand in others if operand.count == 1]

    def places(w: Wave) -> tuple[Array, Array]:
        address = sum((part(w).view(np.int32).astype(np.int64) for part in parts), offset)
        address = np.broadcast_to(address, LANES)
        inside = (address >= 0) & (address + width <= w.scratch.shape[1])
        if (w.mask & ~inside).any():
            w.group.report("out of bounds", i.text)
        lanes = np.flatnonzero(w.mask & inside)[:, None]
        return lanes, address[lanes] + np.arange(width)

    return places


def _load(i: Instruction, data: Operand, places: Any, kind: str, half: str) -> Step:
    width, results = WIDTHS[kind], data.registers

    def step(w: Wave) -> None:
        lanes, at = places(w)
        found = np.zeros((LANES, width), np.uint8)
        found[lanes[:, 0]] = w.scratch[lanes, at]
        to_registers(w, data, found, kind, (half == "_d16", half == "_d16_hi"))
        w.issue(w.vector_memory, Outstanding(i.text, "scratch", results))

    return step


def _store(i: Instruction, data: Operand, places: Any, kind: str, half: str) -> Step:
    read = from_registers(data, WIDTHS[kind], 16 if half else 0)

    def step(w: Wave) -> None:
        lanes, at = places(w)
        w.scratch[lanes, at] = read(w)[lanes[:, 0]]
        if not w.group.stores_apart:
            w.issue(w.vector_memory, Outstanding(i.text, "scratch", frozenset()))

    return step
