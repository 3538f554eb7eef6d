"""Matrix instructions as a table: how one step of a 16-row fragment runs on each NVIDIA generation.

A *step* multiplies 16 weight rows by 8 activation rows over 32 bytes of K (16 elements of 16 bits or
32 of 8 bits): ``acc[16, 8] += W[16, k] · x[8, k]^T``. W is the A operand in four registers
``a0..a3``, x the B operand in two, ``b0`` and ``b1``, in the fragment order of
``mma.m16n8k16`` / ``m16n8k32``, which is also the order of the packed words
(`schedules.layouts`). Older generations compose the step from smaller instructions
(PTX ISA, "Matrix fragments for mma.m8n8k4, m8n8k16, m16n8k8, m16n8k16, m16n8k32").

The index functions work on Python integers and on TIR expressions alike, so that tests
evaluate exactly the arithmetic that kernels use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ladder.lower import Expr
from targets import TileDevice
from tile_types.errors import DeviceError

STEP_COLUMNS = 8
"""Activation rows of one step."""

STEP_BYTES = 32
"""Bytes along K of one step."""


@dataclass(frozen=True)
class Issue:
    """One instruction of a step: which registers of the step it takes."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    accumulators: tuple[int, ...]


@dataclass(frozen=True)
class LaneMap:
    """Who holds what: lanes to operand coordinates and accumulator positions.

    accumulators: 32-bit accumulators per lane of a step.
    rows_per_lane: Distinct weight rows among them.
    partial_lanes: Lane distances (powers of two) over which accumulators are partial sums of the result.
    """

    accumulators: int
    rows_per_lane: int
    partial_lanes: tuple[int, ...] = ()

    def operand(self, lane: Expr) -> tuple[Expr, Expr]:
        """Return ``(g, c)``: the row of 0..7 and the column group of 0..3 whose operands a lane holds."""
        return lane // 4, lane % 4

    def row_slot(self, index: int) -> int:
        """Return which of the lane's distinct rows accumulator ``index`` belongs to."""
        return index // 2

    def half(self, slot: int) -> int:
        """Return whether a lane's ``slot``-th distinct row is decoded as a row g (0) or g+8 (1)."""
        return slot % 2

    def slot_row(self, lane: Expr, slot: int) -> Expr:
        """Return the row of 0..15 of a lane's ``slot``-th distinct row."""
        return lane // 4 + 8 * slot

    def sum_source(self, index: int) -> int:
        """Return an accumulator that has the same activation row as ``index``, if W is all ones."""
        return index

    def column(self, lane: Expr, index: int) -> Expr:
        """Return the activation row of 0..7 of accumulator ``index``."""
        return lane % 4 * 2 + index % 2

    def position(self, lane: Expr, index: int) -> tuple[Expr, Expr]:
        """Return ``(row, column)`` of accumulator ``index``."""
        return self.slot_row(lane, self.row_slot(index)), self.column(lane, index)

    def is_first(self, lane: Expr) -> Expr:
        """Return whether a lane is the first of those that share sums (always, where none do)."""
        return True


class QuadPairMap(LaneMap):
    """Volta: four quad-pairs each multiply 8x8x4, on a quarter of the step's K each.

    Quad-pair p holds lanes 4p..4p+3 and 16+4p..16+4p+3, one row each, and sums the columns
    {2p, 2p+1, 2p+8, 2p+9}: those that packed thread (g, c=p) owns. So a lane takes the
    operands of another lane of its warp and nothing needs to be repacked.
    """

    def operand(self, lane: Expr) -> tuple[Expr, Expr]:
        return lane % 4 + lane // 16 * 4, lane // 4 % 4

    def row_slot(self, index: int) -> int:
        return index // 8 * 2 + index // 2 % 2

    def slot_row(self, lane: Expr, slot: int) -> Expr:
        return slot // 2 * 8 + slot % 2 * 2 + lane % 2 + lane // 16 * 4

    def is_first(self, lane: Expr) -> Expr:
        return lane // 4 % 4 == 0

    def column(self, lane: Expr, index: int) -> Expr:
        return index // 4 % 2 * 4 + lane // 2 % 2 * 2 + index % 2


WARP_MAP = LaneMap(accumulators=4, rows_per_lane=2)
QUAD_PAIR_MAP = QuadPairMap(accumulators=16, rows_per_lane=4, partial_lanes=(4, 8))

WHOLE_STEP = (Issue((0, 1, 2, 3), (0, 1), (0, 1, 2, 3)),)
HALF_STEPS = (Issue((0, 1), (0,), (0, 1, 2, 3)), Issue((2, 3), (1,), (0, 1, 2, 3)))
QUARTER_STEPS = (
    Issue((0,), (0,), (0, 1)),
    Issue((1,), (0,), (2, 3)),
    Issue((2,), (1,), (0, 1)),
    Issue((3,), (1,), (2, 3)),
)
QUAD_PAIR_STEPS = (Issue((0, 2), (0, 1), tuple(range(8))), Issue((1, 3), (0, 1), tuple(range(8, 16))))


@dataclass(frozen=True)
class MatrixStep:
    """A row of the table: one step on one generation.

    activation: Element type of x.
    capability: Lowest compute capability that has it.
    spelling: PTX instruction; ``{w}`` is the weight operand's type.
    issues: The instructions that make up a step.
    lanes: Fragment maps.
    carrier: Type of the accumulator registers (PTX takes s32 in uint32 registers).
    promote: Elements of K after which partial sums must move to float32 registers; 0 for never.
    columns: Activation rows of a step.
    steps: Steps that an instruction takes at once: it then has four registers of W and two of x for each.
    parts: Threads' packed words that a lane decodes for a step, each with columns of K of its own.
    joined: Parts whose registers an instruction takes at once.
    """

    activation: str
    capability: tuple[int, int]
    spelling: str
    issues: tuple[Issue, ...] = WHOLE_STEP
    lanes: LaneMap = WARP_MAP
    carrier: str = "float32"
    promote: int = 0
    columns: int = STEP_COLUMNS
    steps: int = 1
    parts: int = 1
    joined: int = 1

    @property
    def element_bytes(self) -> int:
        """Bytes of an operand element."""
        return 2 if self.activation in ("float16", "bfloat16") else 1

    @property
    def elements(self) -> int:
        """Elements along K of one step."""
        return STEP_BYTES // self.element_bytes

    def emit(
        self,
        weight: str,
        acc: Any,
        first: int,
        a: list[Expr],
        b: list[Expr],
        start: list[Expr] | None = None,
    ) -> None:
        """Emit ``acc[first:] += a · b`` for one step, or ``= start + a · b``.

        weight: Operand type that the weights were decoded to (fp8 types may differ from the activation's).
        acc: Local buffer of the type ``carrier``.
        first: First of ``lanes.accumulators`` registers.
        a, b: Four and two uint32 registers; None in ``a`` marks registers that take no part.
        start: Accumulators to begin with, for steps of one instruction.
        """
        for issue in self.issues:
            if all(a[i] is None for i in issue.a):
                continue
            totals = [first + i for i in issue.accumulators]
            weights = [_zero() if a[i] is None else a[i] for i in issue.a]
            self.perform(weight, acc, totals, weights, _activations(issue, a, b), start)

    def perform(
        self, weight: str, acc: Any, totals: Sequence[int], a: list[Expr], x: list[Expr], start: Any
    ) -> None:
        """Emit one instruction into registers ``totals`` of ``acc``; the rest as for `emit`."""
        from ladder.lower import builder

        sums = [acc[i] for i in totals]
        builder.ptx(self.spelling.format(w=PTX_FP8.get(weight, "")), *sums, *a, *x, *(start or sums))


FP8_PROMOTION = 128
"""Elements of K after which fp8 partial sums move to float32 registers.

fp8 tensor cores keep about 14 bits of the running sum (DeepSeek-V3, section 3.3.2).
"""

STEPS: tuple[MatrixStep, ...] = (
    MatrixStep("float16", (8, 0), "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
    MatrixStep("float16", (7, 5), "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", HALF_STEPS),
    MatrixStep(
        "float16", (7, 0), "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32", QUAD_PAIR_STEPS, QUAD_PAIR_MAP
    ),
    MatrixStep("bfloat16", (8, 0), "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
    MatrixStep("int8", (8, 0), "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", carrier="uint32"),
    MatrixStep(
        "int8", (7, 5), "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32", QUARTER_STEPS, carrier="uint32"
    ),
    MatrixStep(
        "fp8_e4m3", (8, 9), "mma.sync.aligned.m16n8k32.row.col.f32.{w}.e4m3.f32", promote=FP8_PROMOTION
    ),
    MatrixStep(
        "fp8_e5m2", (8, 9), "mma.sync.aligned.m16n8k32.row.col.f32.{w}.e5m2.f32", promote=FP8_PROMOTION
    ),
)
"""Best first for each activation type."""

PTX_FP8 = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}


def select_step(device: TileDevice, activation: str) -> MatrixStep:
    """Return the best step of ``device`` for activations of type ``activation``.

    Raises DeviceError if the device has none; the message names what would work.
    """
    usable = [s for s in STEPS if s.capability <= device.compute_capability]
    for step in usable:
        if step.activation == activation:
            return step
    devices = sorted({f"sm_{s.capability[0]}{s.capability[1]}" for s in STEPS if s.activation == activation})
    if activation == "float32" or not devices:
        raise DeviceError(
            f"GPU tensor cores take no {activation} activations; use target 'cpu', or one of"
            f" {', '.join(dict.fromkeys(s.activation for s in STEPS))}"
        )
    have = ", ".join(dict.fromkeys(s.activation for s in usable)) or "no activation type"
    raise DeviceError(
        f"{device.name} has no tensor core for {activation} activations; it takes {have},"
        f" and {activation} needs {devices[0]} or newer"
    )


def _activations(issue: Issue, a: list[Expr], b: list[Expr]) -> list[Expr]:
    """Return the registers of x: zeros where no weight takes part, as an infinity times zero is NaN."""
    each = len(issue.a) // len(issue.b)
    taken = [issue.a[at : at + each] for at in range(0, len(issue.a), each)]
    return [
        _zero() if all(a[i] is None for i in weights) else b[at]
        for weights, at in zip(taken, issue.b, strict=True)
    ]


def _zero() -> Expr:
    from tvm.script import tirx as T

    return T.uint32(0)
