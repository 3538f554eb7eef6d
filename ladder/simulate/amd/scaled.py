"""MFMA with block scales (gfx950): two operands of 8, 6 or 4-bit floats each.

Lane ``16 g + i`` holds 32 elements of row i of its operand and, in byte 0 of another register, the E8M0 scale
of elements ``32 g`` to ``32 g + 31``. Those elements are its own if they have 6 or 4 bits, lowest bits first;
of 8-bit ones it holds ``16 g`` to ``16 g + 15`` and ``64 + 16 g`` to ``64 + 16 g + 15``. Sums lie as those of
MFMA 16x16 (AMD Instinct CDNA4 ISA, "Matrix fused-multiply-add with block exponent scaling"; which lane scales
which 8-bit element is what ROCm's composable_kernel found on hardware, test/mx_mfma_op). Products are summed
in float64 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ladder.simulate.amd.mfma import LANES, as_bytes, gather_d, rows_of, scatter_d
from ladder.simulate.cohort import Cohort
from ladder.simulate.program import Read
from ladder.simulate.translate import CallView, Translator, UnknownCallError
from ladder.simulate.values import Array

NAME = "llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4"

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""Value of each code."""

ROWS, BLOCK = 16, 32
"""Rows of an operand, elements of a lane and of a scale."""

NAN_SCALE, SCALE_BIAS = 255, 127


@dataclass(frozen=True)
class Element:
    """A type of elements: its bits, and the value of each code."""

    bits: int
    values: Array

    @property
    def size(self) -> int:
        """Bytes of a lane's operand."""
        return BLOCK * self.bits // 8


def _values(kind: type, bits: int) -> Array:
    values: Array = np.arange(1 << bits, dtype=np.uint8).view(kind).astype(np.float64)
    return values


ELEMENTS = (
    Element(8, _values(ml_dtypes.float8_e4m3fn, 8)),
    Element(8, _values(ml_dtypes.float8_e5m2, 8)),
    Element(6, _values(ml_dtypes.float6_e2m3fn, 6)),
    Element(6, _values(ml_dtypes.float6_e3m2fn, 6)),
    Element(4, E2M1),
)
"""Elements by the instruction's number."""


def multiply(a: Array, b: Array, c: Array, scales: tuple[Array, Array], kinds: tuple[int, int]) -> Array:
    """Return the accumulators ``[waves, 64, 4]`` after one instruction.

    a, b: Bytes of the operands, ``[waves, 64, bytes]``.
    c: float32 accumulators ``[waves, 64, 4]``.
    scales: Registers with the scales of a and of b, uint32 ``[waves, 64]``.
    kinds: Numbers of the types of a and of b.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        left, right = (
            _factor(ELEMENTS[kind], *given) for kind, *given in zip(kinds, (a, b), scales, strict=True)
        )
        return scatter_d((left @ right.transpose(0, 2, 1) + gather_d(c, ROWS)).astype(np.float32))


def _factor(element: Element, held: Array, scale: Array) -> Array:
    """Return an operand's values ``[waves, rows, 128]`` from lanes' bytes and scales."""
    bits = np.unpackbits(held, axis=-1, bitorder="little").reshape(*held.shape[:2], BLOCK, element.bits)
    codes = bits @ (1 << np.arange(element.bits))
    if element.bits == 8:  # halves of lanes' elements lie side by side
        waves = len(codes)
        halves = codes.reshape(waves, LANES // ROWS, ROWS, 2, BLOCK // 2)
        rows = halves.transpose(0, 2, 3, 1, 4).reshape(waves, ROWS, -1)
    else:
        rows = rows_of(codes, ROWS)
    exponent = (scale & 0xFF).astype(np.int64)
    power = np.where(exponent == NAN_SCALE, np.nan, np.exp2(exponent - float(SCALE_BIAS)))
    factor: Array = element.values[rows] * np.repeat(rows_of(power[..., None], ROWS), BLOCK, axis=-1)
    return factor


def translate(t: Translator, call: CallView) -> Read:
    """Return the closure of the intrinsic.

    Raises UnknownCallError for types that there are not, and scales that are not in byte 0.
    """
    a, b, sums = (t.read(value) for value in call.operands[:3])
    kinds = t.number(call.operands[3]), t.number(call.operands[4])
    bytes_taken = [t.number(call.operands[5]), t.number(call.operands[7])]
    if not all(0 <= kind < len(ELEMENTS) for kind in kinds) or any(bytes_taken):
        raise UnknownCallError(f"{call.name} of types {kinds}, scales in bytes {bytes_taken}")
    scales = [t.read(call.operands[6]), t.read(call.operands[8])]
    types = [str(value.ty) for value in call.operands[:2]]

    def read(c: Cohort) -> Array:
        c.require_whole("MFMA", call.statement)
        c.machine.counts["mfma"] += c.count
        words = [
            as_bytes(c, value(c), ELEMENTS[kind].size, dtype)
            for value, kind, dtype in zip((a, b), kinds, types, strict=True)
        ]
        held = np.broadcast_to(np.asarray(sums(c), np.float32), (c.count, LANES, 4))
        given = [
            np.broadcast_to(np.asarray(scale(c)).astype(np.int32).view(np.uint32), (c.count, LANES))
            for scale in scales
        ]
        return multiply(words[0], words[1], held, (given[0], given[1]), kinds)

    return read
