"""MFMA with block scales (gfx950), of 4-bit floats.

Lane ``16 g + i`` holds elements ``32 g`` to ``32 g + 31`` of row i of its operand, low nibbles first, and in
byte 0 of another register the E8M0 scale of that block; sums lie as those of MFMA 16x16 (AMD Instinct
CDNA4 ISA, "Matrix fused-multiply-add with block exponent scaling"). Products are summed in float64 and
rounded once.
"""

from __future__ import annotations

import numpy as np

from ladder.simulate.amd.mfma import LANES, as_bytes, gather_d, rows_of, scatter_d
from ladder.simulate.cohort import Cohort
from ladder.simulate.program import Read
from ladder.simulate.translate import CallView, Translator, UnknownCallError
from ladder.simulate.values import Array

NAME = "llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4"

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""Value of each code."""

FP4, ROWS, CHUNK = 4, 16, 16
"""Number of e2m1, rows of an operand, bytes of a lane's."""

NAN_SCALE, SCALE_BIAS = 255, 127


def multiply(a: Array, b: Array, c: Array, scales: tuple[Array, Array]) -> Array:
    """Return the accumulators ``[waves, 64, 4]`` after one instruction.

    a, b: Bytes of the operands, ``[waves, 64, 16]``.
    c: float32 accumulators ``[waves, 64, 4]``.
    scales: Registers with the scales of a and of b, uint32 ``[waves, 64]``.
    """
    factors = []
    for codes, scale in zip((a, b), scales, strict=True):
        elements = E2M1[np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], -1)]
        exponent = (scale & 0xFF).astype(np.int64)
        power = np.where(exponent == NAN_SCALE, np.nan, np.exp2(exponent - float(SCALE_BIAS)))
        factors.append(rows_of(elements * power[..., None], ROWS))
    return scatter_d((factors[0] @ factors[1].transpose(0, 2, 1) + gather_d(c, ROWS)).astype(np.float32))


def translate(t: Translator, call: CallView) -> Read:
    """Return the closure of the intrinsic.

    Raises UnknownCallError for other types than e2m1, and scales that are not in byte 0.
    """
    a, b, sums = (t.read(value) for value in call.operands[:3])
    kinds = [t.number(value) for value in call.operands[3:5]]
    bytes_taken = [t.number(call.operands[5]), t.number(call.operands[7])]
    if kinds != [FP4, FP4] or any(bytes_taken):
        raise UnknownCallError(f"{call.name} of types {kinds}, scales in bytes {bytes_taken}")
    scales = [t.read(call.operands[6]), t.read(call.operands[8])]
    types = [str(value.ty) for value in call.operands[:2]]

    def read(c: Cohort) -> Array:
        c.require_whole("MFMA", call.statement)
        c.machine.counts["mfma"] += c.count
        words = [as_bytes(c, value(c), CHUNK, dtype) for value, dtype in zip((a, b), types, strict=True)]
        held = np.broadcast_to(np.asarray(sums(c), np.float32), (c.count, LANES, 4))
        given = [
            np.broadcast_to(np.asarray(scale(c)).astype(np.int32).view(np.uint32), (c.count, LANES))
            for scale in scales
        ]
        return multiply(words[0], words[1], held, (given[0], given[1]))

    return read
