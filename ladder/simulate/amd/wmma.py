"""WMMA: matrix products of 16 x 16 x 16 of a wave of 32 lanes.

Layouts (AMD RDNA3 ISA, section 7.9; RDNA4 ISA, section 7.12; "How to accelerate AI applications on RDNA 3
using WMMA", GPUOpen 2023):

* RDNA3: A[i][k] is element k of lanes i and i + 16, which must agree; B[k][j] is element k of lanes j and
  j + 16; D[i][j] is register ``i // 2`` of lane ``j + 16 * (i % 2)``;
* RDNA4: A[i][k] is element ``k % 8`` of lane ``i + 16 * (k // 8)``, B[k][j] that of lane
  ``j + 16 * (k // 8)``; D[i][j] is register ``i % 8`` of lane ``j + 16 * (i // 8)``.

Products are summed in float64 and rounded once. Where halves of a wave disagree, sums are no numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ladder.simulate.amd import mfma
from ladder.simulate.amd.mfma import OCP, WIDE, Core, Product, operand, row_of
from ladder.simulate.program import Read
from ladder.simulate.translate import CallView, Translator, UnknownCallError
from ladder.simulate.values import NUMPY, Array

LANES, EXTENT, REGISTERS = 32, 16, 8

DISAGREEING = 0x7FFFFFFF
"""A float32 that is no number, or the largest integer."""


@dataclass(frozen=True)
class HalfCore(Core):
    """The matrix cores of an RDNA GPU; ``split``: whether halves of a wave hold halves of K."""

    lanes: int = LANES
    split: bool = False


RDNA3 = HalfCore("gfx1100", {}, {}, False)
RDNA4 = HalfCore("gfx1201", {}, OCP, False, split=True)

SPELLING = re.compile(
    r"llvm\.amdgcn\.wmma\.(?P<sums>f32|i32)\.16x16x16\.(?P<a>f16|bf16|iu8|fp8|bf8)(?:\.(?P<b>fp8|bf8))?"
)


def parse(name: str, core: HalfCore) -> Product:
    """Read an intrinsic's name.

    Raises UnknownCallError if the architecture has no such instruction, or the simulator does not know it.
    """
    match = SPELLING.fullmatch(name)
    kinds = {**WIDE, "iu8": "int8", **core.bytes_as}
    if match is None or match["a"] not in kinds or (match["a"] in core.bytes_as) != bool(match["b"]):
        raise UnknownCallError(f"{core.arch} has no {name}, or the simulator does not know it")
    return Product(EXTENT, EXTENT, kinds[match["a"]], kinds[match["b"] or match["a"]])


def _rows(elements: Array, core: HalfCore) -> tuple[Array, Array]:
    """Return A (or B transposed) ``[waves, 16, 16]``, and which of its rows the halves agree about."""
    low, high = elements[:, :EXTENT].astype(np.float64), elements[:, EXTENT:].astype(np.float64)
    if core.split:
        return np.concatenate([low, high], axis=2), np.ones(low.shape[:2], np.bool_)
    return low, ((low == high) | (np.isnan(low) & np.isnan(high))).all(axis=2)


def gather_d(registers: Array, core: HalfCore) -> Array:
    """Return D ``[waves, 16, 16]`` from accumulators ``[waves, 32, 8]``."""
    parts = registers.reshape(-1, 2, EXTENT, REGISTERS)  # half, column, register
    order = (0, 1, 3, 2) if core.split else (0, 3, 1, 2)
    return parts.transpose(order).reshape(-1, EXTENT, EXTENT)


def scatter_d(d: Array, core: HalfCore) -> Array:
    """Return accumulators from D: the inverse of `gather_d`."""
    shape, order = ((2, REGISTERS), (0, 1, 3, 2)) if core.split else ((REGISTERS, 2), (0, 2, 3, 1))
    return d.reshape(-1, *shape, EXTENT).transpose(order).reshape(-1, LANES, REGISTERS)


def multiply(what: Product, core: HalfCore, a: Array, b: Array, c: Array) -> Array:
    """Return the accumulators after one instruction.

    what, core: The instruction, and what executes it.
    a, b: Bytes of the operands, ``[waves, 32, bytes]``.
    c: float32 or int32 accumulators ``[waves, 32, 8]``.
    """
    (left, known), (right, agreed) = (_rows(operand(w, t), core) for w, t in ((a, what.a), (b, what.b)))
    sums = left @ right.transpose(0, 2, 1) + gather_d(c, core)
    found = sums.astype(np.int64).astype(np.int32) if what.integer else sums.astype(np.float32)
    wrong = ~(known[:, :, None] & agreed[:, None, :])
    return scatter_d(np.where(wrong, np.int32(DISAGREEING).view(found.dtype), found), core)


def rows(core: HalfCore) -> dict[str, Callable[[Translator, CallView], Read]]:
    """Return the rows of an architecture's matrix instructions."""
    names = ["f32.16x16x16.f16", "f32.16x16x16.bf16", "i32.16x16x16.iu8"]
    names += [f"f32.16x16x16.{a}.{b}" for a, b in product(core.bytes_as, core.bytes_as)]
    return dict.fromkeys((f"llvm.amdgcn.wmma.{name}" for name in names), _translator_of(core))


def _translator_of(core: HalfCore) -> Callable[[Translator, CallView], Read]:
    def translate(t: Translator, call: CallView) -> Read:
        what = parse(call.name, core)
        given = call.operands
        if what.integer:
            if [t.number(given[at]) for at in (0, 2, 5)] != [1, 1, 0]:
                raise UnknownCallError(f"{call.name} of unsigned operands, or that saturates")
            given = (given[1], given[3], given[4])
        size = (EXTENT // 2 if core.split else EXTENT) * NUMPY[what.a].itemsize
        return row_of("WMMA", t, call, given[:3], size, (LANES, REGISTERS), partial(multiply, what, core))

    return translate


CORES: dict[str, Any] = {core.arch: core for core in (mfma.CDNA2, mfma.CDNA3, mfma.CDNA4, RDNA3, RDNA4)}
"""Architecture -> its matrix cores."""
