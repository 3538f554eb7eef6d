"""Fragments and products of tensor cores, in plain numpy: who holds which element, and what comes out.

Layouts: PTX ISA, "Matrix fragments for mma", "wgmma: register fragments", "Shared memory matrix
layout". Products are summed in float64 and rounded once; hardware sums in float32 with truncation
(`tests/simulate/test_hardware.py` says how far apart the two are).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ladder.simulate.values import LANES, Array, table_of

OPERANDS = {
    "f16": ("float16", 2),
    "bf16": ("bfloat16", 2),
    "s8": ("int8", 4),
    "u8": ("uint8", 4),
    "e4m3": ("float8_e4m3fn", 4),
    "e5m2": ("float8_e5m2", 4),
}
"""PTX operand type -> element type, and elements per 32-bit register."""


def decode(bits: Array, kind: str) -> Array:
    """Return the values of operand elements given as bytes ``[..., k * size]``."""
    dtype, per_register = OPERANDS[kind]
    if dtype in ("int8", "uint8"):
        return bits.view(dtype).astype(np.float32)
    values: Array = table_of(dtype)[bits.view(np.uint16 if per_register == 2 else np.uint8)]
    return values


@dataclass(frozen=True)
class Shape:
    """Shape of one matrix instruction."""

    m: int
    n: int
    k: int

    @staticmethod
    def parse(text: str) -> Shape:
        """Read ``m16n8k16``."""
        m, rest = text[1:].split("n")
        n, k = rest.split("k")
        return Shape(int(m), int(n), int(k))


def gather_a(registers: Array, kind: str, halves: int) -> Array:
    """Return A ``[warps, 8 * halves, k]`` from registers ``[warps, 32, count]`` (row halves change first)."""
    warps, _, count = registers.shape
    per = OPERANDS[kind][1]
    elements = decode(np.ascontiguousarray(registers).view(np.uint8), kind)
    parts = elements.reshape(warps, 8, 4, count // halves, halves, per)  # g, c, k half, row half, element
    return parts.transpose(0, 4, 1, 3, 2, 5).reshape(warps, 8 * halves, -1)


def gather_b(registers: Array, kind: str) -> Array:
    """Return B ``[warps, k, 8]`` from registers ``[warps, 32, count]``."""
    warps, _, count = registers.shape
    per = OPERANDS[kind][1]
    elements = decode(np.ascontiguousarray(registers).view(np.uint8), kind)
    parts = elements.reshape(warps, 8, 4, count, per)  # n, c, k half, element
    return parts.transpose(0, 3, 2, 4, 1).reshape(warps, -1, 8)


def gather_c(registers: Array) -> Array:
    """Return C ``[warps, 8 * halves, 8]`` from registers ``[warps, 32, 2 * halves]``."""
    warps, _, count = registers.shape
    parts = registers.reshape(warps, 8, 4, count // 2, 2)
    return parts.transpose(0, 3, 1, 2, 4).reshape(warps, 4 * count, 8)


def scatter_c(c: Array) -> Array:
    """Return registers ``[warps, 32, 2 * halves]`` from C ``[warps, 8 * halves, 8]``."""
    warps, rows, _ = c.shape
    parts = c.reshape(warps, rows // 8, 8, 4, 2)
    return parts.transpose(0, 2, 3, 1, 4).reshape(warps, LANES, rows // 4)


def multiply(a: Array, b: Array, c: Array, integer: bool) -> Array:
    """Return ``a @ b + c`` as the accumulator type holds it."""
    if integer:
        return (a @ b).astype(np.int64).astype(np.int32) + c  # |a @ b| < 2**24: exact in float32
    return (a.astype(np.float64) @ b.astype(np.float64) + c).astype(np.float32)


def mma(shape: Shape, kinds: tuple[str, str], a: Array, b: Array, c: Array) -> Array:
    """Return the accumulators ``[warps, 32, n]`` of one warp-wide instruction.

    shape, kinds: As the instruction spells them.
    a, b: uint32 registers ``[warps, 32, count]``.
    c: float32 or int32 accumulators.
    """
    if shape == Shape(8, 8, 4):
        return _quad_pairs(a, b, c)
    halves = shape.m // 8
    products = gather_a(a, kinds[0], halves), gather_b(b, kinds[1])
    return scatter_c(multiply(*products, gather_c(c), kinds[0] in ("s8", "u8")))


@lru_cache(maxsize=1)
def _quad_pair_places() -> tuple[Array, Array, Array, Array]:
    """Return quad pair and row of every lane, and row and column of every accumulator (mma.m8n8k4)."""
    lane = np.arange(LANES)
    index = np.arange(8)
    row = lane % 4 + lane // 16 * 4
    out_row = (lane % 2 + lane // 16 * 4)[:, None] + (index & 2)
    out_column = (lane & 2)[:, None] + (index & 4) + (index & 1)
    return lane // 4 % 4, row, out_row, out_column


def _quad_pairs(a: Array, b: Array, c: Array) -> Array:
    """Volta: each of four quad pairs multiplies 8x4 by 4x8."""
    pair, row, out_row, out_column = _quad_pair_places()
    matrices = []
    for registers in (a, b):
        elements = decode(np.ascontiguousarray(registers).view(np.uint8), "f16").astype(np.float64)
        matrix = np.zeros((len(a), 4, 8, 4))
        matrix[:, pair, row] = elements
        matrices.append(matrix)
    products = matrices[0] @ matrices[1].transpose(0, 1, 3, 2)
    return (products[:, pair[:, None], out_row, out_column] + c).astype(np.float32)


# ---- wgmma ---------------------------------------------------------------------------------------
SWIZZLES = {0: (16, 0), 1: (128, 7), 2: (64, 3), 3: (32, 1)}
"""Descriptor's swizzle mode -> bytes of a row, and the address bits (from bit 7) that move chunks."""


def swizzled(address: Array, mask: int) -> Array:
    """Return where a byte address lies: bits 4.. are mixed with bits 7.. (PTX ISA, "Swizzling modes")."""
    moved: Array = address ^ ((address >> 7 & mask) << 4)
    return moved


def descriptor_chunks(descriptor: int, rows: int) -> Array:
    """Return the addresses ``[rows, 2]`` of the 16-byte chunks of ``rows`` rows of 32 bytes, K-major.

    descriptor: 64-bit matrix descriptor (PTX ISA, "Matrix-descriptor format"): start, leading and stride
        offset in 16-byte units, swizzle mode in bits 62-63.
    """
    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    pitch, mask = SWIZZLES[descriptor >> 62 & 3]
    row, chunk = np.arange(rows)[:, None], np.arange(2)[None, :]
    step = leading if mask == 0 else 16
    return swizzled(start + row // 8 * stride + row % 8 * pitch + chunk * step, mask)


def descriptor_columns(descriptor: int, columns: int) -> Array:
    """Return the addresses ``[16, columns / 8]`` of the chunks of 16 rows along K whose columns lie together.

    As `descriptor_chunks`, with swizzles of 128 bytes: here the leading offset leads to the next 64 columns,
    the stride offset to the next 8 rows (PTX ISA, "Strides").
    """
    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    row, chunk = np.arange(16)[:, None], np.arange(columns // 8)[None, :]
    place = start + row // 8 * stride + row % 8 * 128 + chunk // 8 * leading + chunk % 8 * 16
    return swizzled(place, SWIZZLES[1][1])


def wgmma_rows(accumulators: Array) -> Array:
    """Return D ``[groups, 64, n]`` from accumulators ``[4 * groups, 32, n / 2]``."""
    warps, _, count = accumulators.shape
    parts = accumulators.reshape(warps, 8, 4, count // 4, 2, 2)  # g, c, token block, row half, element
    return parts.transpose(0, 4, 1, 3, 2, 5).reshape(warps // 4, 64, 2 * count)


def wgmma_registers(rows: Array) -> Array:
    """Return accumulators ``[4 * groups, 32, n / 2]`` from D ``[groups, 64, n]``."""
    groups, _, n = rows.shape
    parts = rows.reshape(groups * 4, 2, 8, n // 8, 4, 2)
    return parts.transpose(0, 2, 4, 3, 1, 5).reshape(groups * 4, LANES, n // 2)
