"""tcgen05 with block scales: copies of scales into tensor memory, and the products that take them.

A copy comes before the products that its thread starts later, but not after those that it started before:
columns of scales may be filled again only when a commit has said so (PTX ISA, "Implicitly pipelined tcgen05
instructions", "Block scaling", "Scale factor layout").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ladder.simulate.barriers import each_active
from ladder.simulate.cohort import Cohort
from ladder.simulate.matrix import decode
from ladder.simulate.nvidia.tcgen05 import blocks_of, group_of, one_lane, parts, read_chunks, read_rows
from ladder.simulate.nvidia.tensor_memory import COLUMNS, ROWS, TensorMemory
from ladder.simulate.program import Step
from ladder.simulate.translate import CallView, Translator, UnknownCallError
from ladder.simulate.values import Array

QUARTER = 32
"""Lanes that one warp reaches: scales lie in all four alike."""

CONSTANT = 1
"""Value of bits 46 to 48 of a shared memory descriptor."""

KINDS = {
    ("kind::mxf8f6f4", "scale_vec::1X"): (1, {0: "e4m3", 1: "e5m2"}, "e8m0"),
    ("kind::mxf4", "scale_vec::2X"): (2, {1: "e2m1"}, "e8m0"),
    ("kind::mxf4nvf4", "scale_vec::4X"): (4, {1: "e2m1"}, "ue4m3"),
}
"""Kind and scale vector -> scales of a row of one product, operand types by number, scale type."""

FOURS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Values of e2m1 codes."""


def _values(data: Array, kind: str) -> Array:
    """Return the values ``[rows, k]`` of operand bytes ``[rows, 32]``; of two in a byte the low is first."""
    if kind != "e2m1":
        return decode(data, kind)
    return FOURS[np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)]


def _scale_values(codes: Array, kind: str) -> Array:
    if kind == "ue4m3":
        return decode(np.ascontiguousarray(codes & 127), "e4m3").astype(np.float64)
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int32) - 127))


def _copy(t: Translator, call: CallView) -> Step:
    if not {"32x128b", "warpx4"} <= set(call.modifiers):
        raise UnknownCallError(f"the simulator has no tcgen05.cp of {call.modifiers}")
    place, source, statement = t.read(call.operands[0]), t.read(call.operands[1]), call.statement
    group = group_of(call)

    def action(c: Cohort) -> None:
        one_lane(c, statement)
        TensorMemory.of(c.machine).use(group, statement)
        for _, warp, _, address, descriptor in each_active(c, place(c), source(c)):
            for block in blocks_of(c, warp, group, statement):
                _copy_atom(c, warp, block, address, int(descriptor) & (1 << 64) - 1, statement)

    return action


def _copy_atom(c: Cohort, warp: int, block: int, address: int, descriptor: int, statement: int) -> None:
    """Copy 32 rows of 16 bytes of a block to four columns of each quarter of its lanes."""
    if descriptor >> 46 & 7 != CONSTANT or descriptor >> 61:
        raise UnknownCallError(f"the simulator has no descriptor {descriptor:#x} of scales")
    tensor, log, row = TensorMemory.of(c.machine), c.machine.log, np.arange(QUARTER)
    chunks = ((descriptor & 0x3FFF) << 4) + row // 8 * ((descriptor >> 32 & 0x3FFF) << 4) + row % 8 * 16
    data = read_chunks(c, warp, chunks, statement, block).view(np.uint32)
    first = address & 0xFFFF
    if address >> 16 or first % 4:
        log.add("out of bounds", statement, f"an atom of scales to lane {address >> 16}, column {first}")
    if first + 4 > COLUMNS:
        log.add("out of bounds", statement, f"scales to column {first + 3} of {COLUMNS}")
        return
    columns = np.arange(first, first + 4)
    tensor.on_write(block, parts(0, ROWS), columns, tensor.product(warp, statement, follows=False))
    tensor.words[block, :, first : first + 4] = np.tile(data, (ROWS // QUARTER, 1))


@dataclass(frozen=True)
class ScaledProduct:
    """Fields of an instruction descriptor: activation rows, types, the byte where scales lie."""

    columns: int
    kinds: tuple[str, str]
    vector: int
    scale: str
    bytes: tuple[int, int]
    group: int = 1

    @staticmethod
    def read(kind: str, vector: str, descriptor: int, group: int) -> ScaledProduct:
        """Read the descriptor of a product of 128 rows of each block."""
        count, types, scale = KINDS.get((kind, vector), (0, {}, ""))
        first, second = (types.get(descriptor >> at & 7, "") for at in (7, 10))
        columns, at = (descriptor >> 17 & 0x3F) * 8, (descriptor >> 29 & 3, descriptor >> 4 & 3)
        fields = 0x3F << 17 | 7 << 7 | 7 << 10 | 3 << 4 | 3 << 29
        plain = descriptor & ~fields == (scale == "e8m0") << 23 | group * ROWS >> 4 << 24
        aligned = count and not any(byte % count for byte in at)
        least = 8 * group
        if not (first and second and plain and aligned and columns % least == 0 and least <= columns <= 256):
            raise UnknownCallError(f"the simulator has no tcgen05.mma of {kind}, descriptor {descriptor:#x}")
        return ScaledProduct(columns, (first, second), count, scale, at, group)


def _product(t: Translator, call: CallView) -> Step:
    kind, vector = (next(m for m in call.modifiers if m.startswith(p)) for p in ("kind::", "scale_vec::"))
    what = ScaledProduct.read(kind, vector, t.number(call.operands[3]), group_of(call))
    reads = [t.read(call.operands[place]) for place in (0, 1, 2, 4, 5, 6)]

    def action(c: Cohort) -> None:
        one_lane(c, call.statement)
        TensorMemory.of(c.machine).use(what.group, call.statement)
        c.machine.counts["tcgen05"] += len(c.active_warps())
        for _, warp, _, *operands in each_active(c, *(read(c) for read in reads)):
            _multiply(c, what, warp, operands, call.statement)

    return action


def _multiply(c: Cohort, what: ScaledProduct, warp: int, operands: list[int], statement: int) -> None:
    """Add a product to the sums of its blocks; each has a share of the rows of x, and scales of all."""
    d, w, x, w_scales, x_scales, adds = operands
    blocks = blocks_of(c, warp, what.group, statement)
    share = what.columns // len(blocks)
    codes = np.concatenate([read_rows(c, share, warp, x, statement, block) for block in blocks])
    for block in blocks:
        given = d, read_rows(c, ROWS, warp, w, statement, block), codes, w_scales, x_scales, adds
        _multiply_block(c, what, warp, block, given, statement)


def _multiply_block(
    c: Cohort, what: ScaledProduct, warp: int, block: int, operands: tuple[Any, ...], statement: int
) -> None:
    d, w, x, w_scales, x_scales, adds = operands
    tensor = TensorMemory.of(c.machine)
    access, every = tensor.product(warp, statement), parts(0, ROWS)
    if (d | w_scales | x_scales) >> 16:
        c.machine.log.add("out of bounds", statement, "sums and scales of 128 rows begin at lane 0", "lanes")
    columns = np.arange(d & 0xFFFF, (d & 0xFFFF) + what.columns)
    held = [
        np.arange(place & 0xFFFF, (place & 0xFFFF) + -(-rows // QUARTER))
        for place, rows in ((w_scales, ROWS), (x_scales, what.columns))
    ]
    for read in [*held, columns][: 3 if adds else 2]:
        tensor.on_read(block, every, read, access)
    tensor.on_write(block, every, columns, access)
    if max(part.max() for part in (*held, columns)) >= COLUMNS:
        return  # reported
    values = [_values(data, kind) for data, kind in zip((w, x), what.kinds, strict=True)]
    # Each quarter of the rows has its own copy of the scales.
    scales = [
        _scales(tensor.words[block][:, part], what, byte) for part, byte in zip(held, what.bytes, strict=True)
    ]
    before = tensor.words[block][:, columns].view(np.float32) if adds else np.zeros((ROWS, 1), np.float32)
    group = values[0].shape[1] // what.vector
    with np.errstate(invalid="ignore", over="ignore"):
        for quarter in range(ROWS // QUARTER):
            rows = slice(quarter * QUARTER, (quarter + 1) * QUARTER)
            left = values[0][rows] * np.repeat(scales[0][quarter, rows], group, axis=1)
            right = values[1] * np.repeat(scales[1][quarter, : what.columns], group, axis=1)
            total = left @ right.T + before[rows]
            tensor.words[block, rows, columns[0] : columns[0] + what.columns] = total.astype(np.float32).view(
                np.uint32
            )


def _scales(words: Array, what: ScaledProduct, byte: int) -> Array:
    """Return the scales ``[quarter, rows, vector]`` that words ``[128, columns]`` hold from a byte on.

    Row r is lane ``r % 32`` of a quarter, column ``r // 32``.
    """
    lanes = words.reshape(ROWS // QUARTER, QUARTER, -1).transpose(0, 2, 1)
    codes = np.ascontiguousarray(lanes).view(np.uint8).reshape(ROWS // QUARTER, -1, 4)
    return _scale_values(codes[:, :, byte : byte + what.vector], what.scale)


STEPS: dict[str, Callable[[Translator, CallView], Step]] = {
    "tirx.ptx.tcgen05_cp": _copy,
    "tirx.ptx.tcgen05_mma_block_scale_ss": _product,
}
"""Calls about block scales."""
