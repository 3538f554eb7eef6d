"""Matrix and dot instructions of AMD GPUs as steps of 32 weight rows over 32 bytes of K.

The 64 lanes of a wave hold what two NVIDIA warps hold (`schedules.layouts`): lane l takes the packed
words of thread ``owner(l)``, whose registers a0, a2 are row g and a1, a3 row g+8. MFMA 16x16 takes
16 rows at once, so a step is two of them. D holds row ``4 * (l // 16) + i`` and activation row ``l % 16``
(AMD Instinct MI300 ISA, "MFMA register layouts"). Which columns of K a lane holds does not matter as
long as x agrees: lane l takes the words of column group ``l // 16``.

The 32 lanes of a wave of RDNA take the words of several threads (``parts``). WMMA of RDNA3 reads 16 columns
of K of row ``l % 16`` from both halves of the wave, that of RDNA4 eight from each (RDNA3 ISA, section 7.9;
RDNA4 ISA, section 7.12; LLVM's tests of the intrinsics).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.instructions import Issue, LaneMap, MatrixStep
from ladder.lower.rocm.dialect import as_type, cross_lane, intrinsic, is_of_words, lanes, mfma, vector
from schedules.waves import STEP_COLUMNS
from targets import TileDevice
from tile_types.errors import DeviceError

K_GROUPS = 4
"""Threads that hold the columns of K of a row of a packed tile."""

RUN = 4
"""Neighbouring rows of an activation row that a lane of D holds."""


class WaveMap(LaneMap):
    """Who holds what where two MFMA 16x16 make a step: eight rows per lane, one activation row."""

    def operand(self, lane: Expr) -> tuple[Expr, Expr]:
        return lane // 8 % 2 * 16 + lane % 8, lane // 16

    def row_slot(self, index: int) -> int:
        return index

    def half(self, slot: int) -> int:
        return slot // 4

    def sum_source(self, index: int) -> int:
        return 0

    def slot_row(self, lane: Expr, slot: int) -> Expr:
        return lane // 32 * 16 + lane // 16 % 2 * 4 + slot % 4 + slot // 4 * 8

    def column(self, lane: Expr, index: int) -> Expr:
        return lane % 16


class DotMap(WaveMap):
    """Who holds what where lanes multiply for themselves: two weight rows, a part of K."""

    def half(self, slot: int) -> int:
        return slot

    def slot_row(self, lane: Expr, slot: int) -> Expr:
        return self.operand(lane)[0] + 8 * slot

    def column(self, lane: Expr, index: int) -> Expr:
        return 0

    def is_first(self, lane: Expr) -> Expr:
        return lane < 16


class HalfMap(WaveMap):
    """Who holds what where WMMA make a step: sixteen rows that follow each other, one activation row.

    Rows g of a lane's words are one instruction's, rows g+8 another's. Which lane has which row of an
    instruction is ours to choose: RDNA4's lanes of a half hold eight neighbouring rows of D.
    """

    def half(self, slot: int) -> int:
        return slot // 8

    def slot_row(self, lane: Expr, slot: int) -> Expr:
        return lane // 16 * 16 + slot


class InterleavedMap(HalfMap):
    """The same of RDNA3, where register i of a lane of half h holds row ``2 * i + h`` of D."""

    def operand(self, lane: Expr) -> tuple[Expr, Expr]:
        return lane % 2 * 16 + lane % 16 // 2, 0


class GroupMap(WaveMap):
    """Who holds what where the columns of MFMA 16x16 are groups of K of one activation row."""

    def column(self, lane: Expr, index: int) -> Expr:
        return 0

    def is_first(self, lane: Expr) -> Expr:
        return lane % STEP_COLUMNS == 0


COLUMN_LANES = (1, 2, 4, 8)
"""Lane distances over which the sums of such columns are added up."""

WAVE_MAP = WaveMap(accumulators=8, rows_per_lane=8)
GROUP_MAP = GroupMap(accumulators=8, rows_per_lane=8)
DOT_MAP = DotMap(accumulators=2, rows_per_lane=2, partial_lanes=(16, 32))
DOT32_MAP = DotMap(accumulators=2, rows_per_lane=2, partial_lanes=(16,))
HALF_MAP = HalfMap(accumulators=16, rows_per_lane=16)
INTERLEAVED_MAP = InterleavedMap(accumulators=16, rows_per_lane=16)
PAIRS = (Issue((0, 2), (0, 1), (0, 1, 2, 3)), Issue((1, 3), (0, 1), (4, 5, 6, 7)))
QUADS = (Issue((0, 2, 4, 6), (0, 1, 2, 3), (0, 1, 2, 3)), Issue((1, 3, 5, 7), (0, 1, 2, 3), (4, 5, 6, 7)))
SINGLES = (
    Issue((0,), (0,), (0, 1, 2, 3)),
    Issue((1,), (0,), (4, 5, 6, 7)),
    Issue((2,), (1,), (0, 1, 2, 3)),
    Issue((3,), (1,), (4, 5, 6, 7)),
)
"""Issues of an instruction that takes two registers of each operand, four (those of two steps), or one."""

ROW_PAIRS = (Issue((0, 2), (0, 1), (0,)), Issue((1, 3), (0, 1), (1,)))
"""The same for dot products: a sum for row g and one for g+8."""


ARGUMENTS: Mapping[str, Callable[..., tuple[Expr, ...]]] = {
    "none": lambda a, x, sums: (a, x, sums),
    "no clamp": lambda a, x, sums: (a, x, sums, T.bool(False)),
    "signed": lambda a, x, sums: (T.bool(True), a, T.bool(True), x, sums, T.bool(False)),
}
"""Immediates of an instruction -> its arguments: that sums do not saturate, and that operands are signed."""


@dataclass(frozen=True)
class WaveStep(MatrixStep):
    """A step that AMD GPUs run.

    feature: What the device must have.
    operand: LLVM's type of an operand: a vector that registers are joined to.
    run: Sums of a lane that follow each other and are of neighbouring rows.
    immediates: What the instruction is told beside its operands: a key of `ARGUMENTS`.
    """

    feature: str = "mfma"
    operand: str = "float16x4"
    run: int = RUN
    immediates: str = "none"

    def named(self, weight: str) -> str:
        """Return the instruction's name, which states types of 8-bit floats."""
        return self.spelling.format(w=LLVM_FP8.get(weight, ""))

    def k_group(self, lane: Expr, part: int) -> Expr:
        """Return which group of four columns of K, of those of a thread, a lane multiplies."""
        return K_GROUPS // self.parts * part + lane // 16

    def holder(self, lane: Expr, part: int) -> Expr:
        """Return which thread of 64 has the packed words that a lane takes."""
        return lane // 8 % 2 * 32 + lane % 8 * 4 + self.k_group(lane, part)

    @property
    def words(self) -> int:
        """Registers of an operand of one instruction."""
        return len(self.issues[0].a)

    def perform(
        self, weight: str, acc: Any, totals: Sequence[int], a: list[Expr], x: list[Expr], start: Any
    ) -> None:
        kind = f"{'int32' if self.carrier == 'uint32' else 'float32'}x{len(totals)}"
        at = lanes(totals[0], len(totals))
        operands = [as_type(vector(registers), self.operand) for registers in (a, x)]
        total = self.product(kind, self.named(weight), operands, as_type(acc[at], kind))
        b.store(acc, as_type(total, f"{acc.dtype}x{len(totals)}"), at)

    def product(self, kind: str, name: str, operands: list[Expr], sums: Expr) -> Expr:
        """Return ``sums`` and the products of two operands, of the type ``kind``."""
        weights, activations = operands
        return mfma(kind, name, weights, activations, sums)


@dataclass(frozen=True)
class HalfWaveStep(WaveStep):
    """A step of WMMA of RDNA4: two instructions of 16 weight rows, 16 activation rows."""

    def product(self, kind: str, name: str, operands: list[Expr], sums: Expr) -> Expr:
        return cross_lane(kind, name, *ARGUMENTS[self.immediates](*operands, sums))


@dataclass(frozen=True)
class RepeatedStep(HalfWaveStep):
    """The same of RDNA3: both halves of a wave decode the words of all four threads of their rows."""

    def k_group(self, lane: Expr, part: int) -> Expr:
        return part

    def holder(self, lane: Expr, part: int) -> Expr:
        return lane % 2 * 32 + lane % 16 // 2 * 4 + part


@dataclass(frozen=True)
class DotStep(WaveStep):
    """A step of dot products within lanes, for few activation rows: no row of a matrix core goes unused."""

    run: int = 1

    def perform(
        self, weight: str, acc: Any, totals: Sequence[int], a: list[Expr], x: list[Expr], start: Any
    ) -> None:
        """Emit the products of registers of one row with those of an activation row, one after the other."""
        kind = "int32" if self.carrier == "uint32" else "float32"
        total = as_type(acc[totals[0]], kind)
        for weights, activations in zip(a, x, strict=True):
            if getattr(weights, "value", None) == 0:  # takes no part
                continue
            operands = [as_type(register, self.operand) for register in (weights, activations)]
            total = self.product(kind, self.named(weight), operands, total)
        b.store(acc, as_type(total, str(acc.dtype)), totals[0])

    def product(self, kind: str, name: str, operands: list[Expr], sums: Expr) -> Expr:
        return intrinsic(kind, name, *ARGUMENTS[self.immediates](*operands, sums))


LLVM_FP8 = {"fp8_e4m3": "fp8", "fp8_e5m2": "bf8"}

MFMA = "llvm.amdgcn.mfma."


def _mfma(activation: str, name: str, operand: str, feature: str = "mfma", **other: Any) -> WaveStep:
    return WaveStep(
        activation, (0, 0), name if is_of_words(name) else MFMA + name, **{"issues": PAIRS, **other},
        lanes=WAVE_MAP, columns=STEP_COLUMNS, feature=feature, operand=operand,
    )  # fmt: skip


STEPS: tuple[WaveStep, ...] = (
    _mfma("float16", "f32.16x16x32.f16", "float16x8", "mfma.k64", issues=QUADS, steps=2),
    _mfma("float16", "f32.16x16x16f16", "float16x4"),
    _mfma("bfloat16", "ladder_mfma_f32_16x16x32_bf16", "int32x4", "mfma.k64", issues=QUADS, steps=2),
    _mfma("bfloat16", "f32.16x16x16bf16.1k", "int16x4"),
    _mfma("int8", "i32.16x16x64.i8", "int32x4", "mfma.k64", carrier="uint32", issues=QUADS, steps=2),
    _mfma("int8", "i32.16x16x32.i8", "int64", "mfma.i8.k32", carrier="uint32"),
    _mfma("int8", "i32.16x16x16i8", "int32", carrier="uint32", issues=SINGLES),
    _mfma("fp8_e4m3", "f32.16x16x32.{w}.fp8", "int64", "mfma.fp8"),
    _mfma("fp8_e5m2", "f32.16x16x32.{w}.bf8", "int64", "mfma.fp8"),
)
"""Best first for each activation type."""


GROUP_STEPS: tuple[WaveStep, ...] = tuple(
    replace(step, lanes=GROUP_MAP, columns=1) for step in STEPS if step.element_bytes == 2
)
"""The same of one activation row, of which each column of the instruction has another group of K."""

BFLOAT_DOT = "ladder_dot2_f32_bf16"


def _dot(
    activation: str, name: str, operand: str, feature: str, immediates: str = "none", **other: Any
) -> DotStep:
    return DotStep(
        activation, (0, 0), name, ROW_PAIRS, **{"lanes": DOT_MAP, **other},
        columns=1, feature=feature, operand=operand, immediates=immediates,
    )  # fmt: skip


DOTS: tuple[DotStep, ...] = (
    _dot("float16", "llvm.amdgcn.fdot2", "float16x2", "dot", "no clamp"),
    _dot("bfloat16", BFLOAT_DOT, "uint32", "dot.bf16"),
    _dot("int8", "llvm.amdgcn.sdot4", "int32", "dot", "no clamp", carrier="uint32"),
)

_dot32 = partial(_dot, lanes=DOT32_MAP, parts=2)

DOTS32: tuple[DotStep, ...] = (
    _dot32("float16", "llvm.amdgcn.fdot2", "float16x2", "dot32", "no clamp"),
    _dot32("bfloat16", BFLOAT_DOT, "uint32", "dot32"),
    _dot32("int8", "llvm.amdgcn.sudot4", "int32", "dot32", "signed", carrier="uint32"),
    _dot32("fp8_e4m3", "llvm.amdgcn.dot4.f32.{w}.fp8", "int32", "dot.fp8"),
    _dot32("fp8_e5m2", "llvm.amdgcn.dot4.f32.{w}.bf8", "int32", "dot.fp8"),
)
"""The same of waves of 32 lanes, which take the words of two threads."""

WMMA = "llvm.amdgcn.wmma."


def _halves(registers: int) -> tuple[Issue, ...]:
    """Return the issues of WMMA whose operands are so many registers: rows g, then rows g+8."""
    x, first = tuple(range(registers)), tuple(range(0, 2 * registers, 2))
    return (
        Issue(first, x, tuple(range(8))),
        Issue(tuple(i + 1 for i in first), x, tuple(range(8, 16))),
    )


def _repeated(activation: str, name: str, operand: str, registers: int, **other: Any) -> WaveStep:
    """Return the row of an instruction whose operands are so many registers, of ``joined`` threads' words."""
    return RepeatedStep(
        activation, (0, 0), WMMA + name, _halves(registers), INTERLEAVED_MAP, columns=STEP_COLUMNS, steps=2,
        parts=K_GROUPS, joined=registers // 4, feature="wmma", operand=operand, **other,
    )  # fmt: skip


def _split(activation: str, name: str, operand: str, registers: int, **other: Any) -> WaveStep:
    return HalfWaveStep(
        activation, (0, 0), WMMA + name, _halves(registers), HALF_MAP, columns=STEP_COLUMNS,
        steps=registers // 2, parts=K_GROUPS // 2, feature="wmma.split", operand=operand, **other,
    )  # fmt: skip


WMMA_STEPS: tuple[WaveStep, ...] = (
    _repeated("float16", "f32.16x16x16.f16", "float16x16", 8),
    _repeated("bfloat16", "f32.16x16x16.bf16", "int16x16", 8),
    _repeated("int8", "i32.16x16x16.iu8", "int32x4", 4, carrier="uint32", immediates="signed"),
)
"""WMMA of RDNA3."""

SPLIT_STEPS: tuple[WaveStep, ...] = (
    _split("float16", "f32.16x16x16.f16", "float16x8", 4),
    _split("bfloat16", "f32.16x16x16.bf16", "int16x8", 4),
    _split("int8", "i32.16x16x16.iu8", "int32x2", 2, carrier="uint32", immediates="signed"),
    _split("fp8_e4m3", "f32.16x16x16.{w}.fp8", "int32x2", 2),
    _split("fp8_e5m2", "f32.16x16x16.{w}.bf8", "int32x2", 2),
)
"""WMMA of RDNA4."""


def matrix_steps(device: TileDevice, activation: str) -> list[WaveStep]:
    """Return a device's matrix instructions for operands of a type, the widest first."""
    every = (*STEPS, *WMMA_STEPS, *SPLIT_STEPS)
    return [step for step in every if step.feature in device.features and step.activation == activation]


def best_step(steps: Sequence[WaveStep], device: TileDevice, activation: str) -> WaveStep:
    """Return the first of a pipeline's steps that a device has for activations of a type.

    Raises DeviceError if the device has none; the message names what it has.
    """
    usable = [step for step in steps if step.feature in device.features]
    for step in usable:
        if step.activation == activation:
            return step
    have = ", ".join(dict.fromkeys(step.activation for step in usable)) or "no activation type"
    raise DeviceError(
        f"{device.name} has no instruction of this pipeline for {activation} activations; it takes {have}"
    )


STEPS_OF: Mapping[str, Sequence[WaveStep]] = {
    "mfma": STEPS,
    "mfma_groups": GROUP_STEPS,
    "dot": DOTS,
    "wmma": WMMA_STEPS,
    "wmma_split": SPLIT_STEPS,
    "dot32": DOTS32,
}
"""Pipeline -> its steps, best first for each activation type."""
