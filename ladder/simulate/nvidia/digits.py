"""Helpers of the pipeline ``digits``: x as signed 8-bit digits in shared memory.

The constants of a helper (offset, scales, weights, which halves meet) are read from its own text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ladder.simulate.cohort import Cohort
from ladder.simulate.memory import Pointer
from ladder.simulate.program import Step
from ladder.simulate.translate import CallView, Translator, UnknownCallError
from ladder.simulate.values import LANES, NUMPY, Array, spread, table_of

WORD = NUMPY["uint32"]
HALF = 0xFFFF
BIAS = np.float64(8421504.0)
"""0x808080: makes the three lower bytes of a sum unsigned."""

INVERTED = np.uint32(0x80808080)


@dataclass(frozen=True)
class Quad:
    """Four halves of x that make one register of each digit: (word, half) each, their scale, their weight."""

    sources: tuple[tuple[int, int], ...]
    scale: float
    weight: int


@dataclass(frozen=True)
class Constants:
    """Constants in the text of a helper."""

    lanes: int
    offset: int
    rows: int
    magic: int


def _constants(source: str) -> Constants:
    lanes = re.search(r"[dl] < (\d+); [dl] \*= 2", source)
    low = re.search(r"low = (-?\d+) \*", source)
    start = re.search(r"(0x[0-9a-f]+)u \+ \(low << (\d+)\)", source)
    if lanes is None or low is None or start is None:
        raise UnknownCallError("a helper of digits whose text the simulator cannot read")
    return Constants(int(lanes[1]), int(low[1]), int(start[2]), int(start[1], 16))


def _quads(source: str) -> list[Quad]:
    found = []
    for part in source.split("const float scaled = factor * ")[1:]:
        scale = float(part[: part.index("f;")])
        halves = re.findall(r"\(w\[(\d)\]( >> 16)?\)? & 0xffffu|w\[(\d)\] & 0xffffu", part)
        sources = tuple((int(first or second), int(bool(high))) for first, high, second in halves)
        weight = re.search(r"__dp4a\(\(int\)out\[\d\]\[d\], (0x[0-9a-f]+)", part)
        if len(sources) != 4 or weight is None:
            raise UnknownCallError("a quad of digits that the simulator cannot read")
        found.append(Quad(sources, scale, int(weight[1], 16)))
    return found


def permute(a: Array, b: Array, selector: int) -> Array:
    """Return ``__byte_perm(a, b, selector)``."""
    result = np.zeros(a.shape, np.uint32)
    for index in range(4):
        nibble = selector >> 4 * index & 7
        word = a if nibble < 4 else b
        result |= (word >> np.uint32(8 * (nibble % 4)) & np.uint32(0xFF)) << np.uint32(8 * index)
    return result


def dot(word: Array, weight: int) -> Array:
    """Return ``__dp4a(word, weight, 0)`` of signed bytes."""
    weights = np.array([weight], np.uint32).view(np.int8).astype(np.int32)
    digits = np.ascontiguousarray(word).view(np.int8).reshape(*word.shape, 4).astype(np.int32)
    return (digits * weights).sum(axis=-1, dtype=np.int32)  # type: ignore[no-any-return]


def _over_lanes(values: Array, lanes: int, join: Callable[[Array, Array], Array]) -> Array:
    """Combine neighbouring lanes, whose number is a power of two, as shuffles do."""
    distance = 1
    while distance < lanes:
        values = join(values, values[:, np.arange(LANES) ^ distance])
        distance *= 2
    return values


def _scale_of(words: Array, lanes: int, kind: str) -> tuple[Array, Array]:
    """Return exponent field and clamped exponent field of the largest magnitude."""
    magnitude = words & np.uint32(0x7FFF7FFF)
    most = np.maximum(magnitude & np.uint32(HALF), magnitude >> np.uint32(16)).max(axis=2)
    most = _over_lanes(most, lanes, np.maximum)
    top = table_of(kind)[most].view(np.uint32) >> np.uint32(23)
    return top, np.maximum(top, np.uint32(40))


def _digits(words: Array, quads: list[Quad], factor: Array, kind: str) -> Array:
    """Return the digits ``[warps, 32, digit, quad]``."""
    out = np.zeros((*words.shape[:2], 4, len(quads)), np.uint32)
    for t, quad in enumerate(quads):
        scaled = (factor * np.float32(quad.scale)).astype(np.float64)
        y = []
        for word, high in quad.sources:
            bits = words[:, :, word] >> np.uint32(16 * high) & np.uint32(HALF)
            total = (table_of(kind)[bits].astype(np.float64) * scaled + BIAS).astype(np.float32)
            y.append(np.nan_to_num(np.rint(total)).astype(np.int64).astype(np.uint32))
        low = permute(y[0], y[1], 0x5140), permute(y[2], y[3], 0x5140)
        high_ = permute(y[0], y[1], 0x7362), permute(y[2], y[3], 0x7362)
        out[:, :, 0, t] = permute(*low, 0x5410) ^ INVERTED
        out[:, :, 1, t] = permute(*low, 0x7632) ^ INVERTED
        out[:, :, 2, t] = permute(*high_, 0x5410) ^ INVERTED
        out[:, :, 3, t] = permute(*high_, 0x7632)
    return out


class _Stores:
    """Stores of some lanes to shared memory."""

    def __init__(self, c: Cohort, statement: int) -> None:
        self.c, self.statement = c, statement

    def store(self, pointer: Pointer, add: int, values: Array, chosen: Array) -> None:
        """Store words ``[warps, 32, n]`` of chosen lanes at ``add`` bytes beyond a pointer."""
        c, saved = self.c, self.c.mask
        mask = c.narrowed(chosen)
        if not mask.any():
            return
        c.mask = None if mask.all() else mask
        data = np.ascontiguousarray(values.astype(np.uint32)).view(np.uint8)
        place = np.asarray(pointer.offset, np.int64) + add
        c.machine.memory.store_shared(c, place, data, pointer.target, self.statement)
        c.mask = saved


def split(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Step:
    """Write sixteen 16-bit elements of a tile as digits, and where sums of the period start."""
    kind, constants, quads = groups[0], _constants(source), _quads(source)
    words = [t.read(operand) for operand in call.operands[:8]]
    active, column, tile = (t.read(operand) for operand in call.operands[8:11])
    digits, starts, unit = (t.pointer(t.expression(operand)) for operand in call.operands[11:14])

    def action(c: Cohort) -> None:
        w = np.stack([spread(read(c), c.count, WORD) for read in words], axis=2)
        top, power = _scale_of(w, constants.lanes, kind)
        out = _digits(w, quads, ((np.uint32(283) - power) << np.uint32(23)).view(np.float32), kind)
        on = spread(active(c), c.count, np.dtype(np.bool_))
        stores = _Stores(c, call.statement)
        for d in range(4):
            stores.store(digits(c), 64 * d, out[:, :, d], on)
        sums = [sum(dot(out[:, :, d, i], quad.weight) for i, quad in enumerate(quads)) for d in range(4)]
        sums = [_over_lanes(np.asarray(s), constants.lanes, np.add) for s in sums]
        place = spread(column(c), c.count, np.dtype(np.int32))
        first = on & (spread(tile(c), c.count, np.dtype(np.int32)) == 0)
        low, high = (
            (constants.offset * np.where(place == 0, sums[i], sums[i + 2])).astype(np.uint32) for i in (0, 1)
        )
        shifted = [value << np.uint32(constants.rows) for value in (low, high)]
        parts = [np.uint32(constants.magic) + value for value in (low, high, *shifted)]
        stores.store(starts(c), 0, np.stack(parts, axis=2), first & (place < 2))
        step = np.where(top == 255, np.uint32(0x7FC00000), (power - np.uint32(29)) << np.uint32(23))
        stores.store(unit(c), 0, step[:, :, None], first & (place == 0))

    return action


def copy(t: Translator, call: CallView, groups: tuple[str, ...], source: str) -> Any:
    """Write sixteen int8 elements as they are; returns their sum."""
    begins = "if (true)" in source
    constants = _constants(source)
    words = [t.read(operand) for operand in call.operands[:4]]
    active, column, tile = (t.read(operand) for operand in call.operands[4:7])
    digits, starts = (t.pointer(t.expression(operand)) for operand in call.operands[7:9])

    def read(c: Cohort) -> Array:
        w = np.stack([spread(word(c), c.count, WORD) for word in words], axis=2)
        on = spread(active(c), c.count, np.dtype(np.bool_))
        stores = _Stores(c, call.statement)
        stores.store(digits(c), 0, w, on)
        total = np.asarray(sum(dot(w[:, :, i], 0x01010101) for i in range(4)))
        if begins:
            place = spread(column(c), c.count, np.dtype(np.int32))
            chosen = on & (spread(tile(c), c.count, np.dtype(np.int32)) == 0) & (place == 0)
            low = (constants.offset * _over_lanes(total, constants.lanes, np.add)).astype(np.uint32)
            for word, value in ((0, low), (2, low << np.uint32(constants.rows))):
                bits = np.uint32(constants.magic) + value
                stores.store(starts(c), 4 * word, bits[:, :, None], chosen)
        return total

    return read
