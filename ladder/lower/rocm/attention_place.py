"""The spec of an attention kernel on AMD GPUs, and which rows of q and which keys a lane has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.attention import Attention
from ladder.lower import builder as b
from ladder.lower.gpu.attention import HeadPlace, Inputs
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.attention_operands import Operands
from ladder.lower.rocm.gemm_place import together
from ladder.lower.rocm.grouped import WaveLanes
from schedules.wave_attention import FRAGMENT, WaveAttentionSchedule, check_legal
from targets import TileDevice

Expr = Any

ALIGNED = 16
"""Bytes that all rows of q, k, v and the result begin at multiples of."""


@dataclass(frozen=True)
class Spec:
    """Decisions about a kernel before it is emitted."""

    form: Attention
    device: TileDevice
    schedule: WaveAttentionSchedule
    operands: Operands

    @property
    def run(self) -> int:
        """Neighbouring keys of a score's column that a lane holds, and rows of a column of sums."""
        return self.operands.fragment.run

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.schedule.waves * self.device.warp

    @property
    def scores(self) -> list[tuple[int, int, int]]:
        """(fragment, part, element) of a lane's scores of an iteration."""
        plan = self.schedule
        return [(f, p, e) for f in range(plan.fragments) for p in range(plan.parts) for e in range(self.run)]


def choose_spec(form: Attention, device: TileDevice, schedule: WaveAttentionSchedule) -> Spec:
    """Return the operands of a kernel.

    Raises ScheduleError as `schedules.wave_attention.check_legal`.
    """
    check_legal(form, device, schedule)
    return Spec(form, device, schedule, Operands(form, device))


@dataclass(frozen=True)
class Place(HeadPlace):
    """Where a lane works.

    row_wave, key_wave: The wave among those that have other rows, and other keys.
    left: The row of a left operand (a key, or elements of a head) that the lane holds.
    """

    row_wave: Expr
    key_wave: Expr
    left: Expr


def aligned(at: Expr, width: int) -> Expr:
    """Return an offset that is a multiple of `ALIGNED` bytes such that LLVM knows it."""
    unit = ALIGNED // width
    return b.keep(T.truncdiv(at, unit)) * unit


def find_place(spec: Spec, inputs: Inputs) -> Place:
    """Emit which rows of q and which keys this lane works on."""
    plan, form, n = spec.schedule, spec.form, inputs.numbers
    total = b.bind(n["tokens"] * form.group)
    tiles = b.bind((total + plan.rows - 1) // plan.rows)
    blocks = tiles * form.kv_heads * n["batch"]
    dealt, thread = d.launch(blocks, spec.threads)
    dies = spec.device.dies
    block = b.keep(together(dealt, blocks, dies)) if dies > 1 else dealt
    tile, rest = b.keep(T.truncmod(block, tiles)), b.bind(T.truncdiv(block, tiles))
    head, batch = b.keep(T.truncmod(rest, form.kv_heads)), b.keep(T.truncdiv(rest, form.kv_heads))
    first_row = b.keep(tile * plan.rows)
    row_count = b.keep(T.min(total - first_row, plan.rows))
    lanes = spec.device.warp
    lane = b.bind(thread % lanes)
    wave = WaveLanes(lane, lanes).uniform(thread // lanes) if plan.waves > 1 else 0
    key_wave, row_wave = (wave % plan.key_waves, wave // plan.key_waves) if plan.waves > 1 else (0, 0)
    g, c = b.keep(lane // FRAGMENT), b.keep(lane % FRAGMENT)
    fragment = spec.operands.fragment
    left = b.keep(d.left_row(c, fragment.operands, fragment.run))
    return Place(
        inputs, form.group, head, batch, first_row, row_count, thread, lane, g, c, row_wave, key_wave, left
    )  # fmt: skip
