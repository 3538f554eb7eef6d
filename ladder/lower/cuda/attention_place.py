"""Decisions about a kernel of attention, and which rows of q and which keys a thread has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.attention import Attention
from ladder.lower import builder as b
from ladder.lower.cuda.attention_operands import Operands
from ladder.lower.gpu.attention import HeadPlace, Inputs, first_of_head
from ladder.lower.gpu.instructions import MatrixStep, select_step
from schedules.attention import FRAGMENT, STEP_ROWS, WARP, AttentionSchedule
from schedules.schedule import check
from targets import TileDevice

Expr = Any


@dataclass(frozen=True)
class Spec:
    """Decisions about a kernel before it is emitted."""

    form: Attention
    schedule: AttentionSchedule
    step: MatrixStep
    operands: Operands

    @property
    def parts(self) -> int:
        """Fragments of rows of q."""
        return self.schedule.rows // STEP_ROWS

    @property
    def tiles(self) -> int:
        """Fragments of a head's elements."""
        return self.form.size // FRAGMENT

    @property
    def span(self) -> int:
        """Keys of a warp's iteration."""
        return FRAGMENT * self.schedule.fragments

    @property
    def scores(self) -> list[tuple[int, int, int]]:
        """(fragment, part, element) of a lane's scores of an iteration."""
        fragments = range(self.schedule.fragments)
        return [(f, p, e) for f in fragments for p in range(self.parts) for e in range(4)]


def choose_spec(form: Attention, device: TileDevice, schedule: AttentionSchedule) -> Spec:
    """Return the operands of a kernel.

    Raises ScheduleError if the head does not divide into fragments.
    """
    check(form.size % 16 == 0 and 16 <= form.size <= 256, f"heads of {form.size} elements have no kernel")
    check(form.heads % form.kv_heads == 0, "heads of q must divide into groups")
    return Spec(form, schedule, select_step(device, form.ttype), Operands(form, device))


@dataclass(frozen=True)
class Place(HeadPlace):
    """Where a thread works.

    rank: The block's place in its cluster.
    warp: The thread's warp.
    worker, workers: The warp among those that share the keys of a head, and how many those are.
    begins: First element of the head of ``"k"`` and ``"v"``.
    """

    rank: Expr
    warp: Expr
    worker: Expr
    workers: int
    begins: Mapping[str, Expr]


def find_place(spec: Spec, inputs: Inputs) -> Place:
    """Emit which rows of q and which keys this thread works on."""
    schedule, form, n = spec.schedule, spec.form, inputs.numbers
    total = b.bind(n["tokens"] * form.group)
    tiles = (total + schedule.rows - 1) // schedule.rows
    b.device(schedule.resident)
    x, head, batch = b.block_index([schedule.cluster * tiles, form.kv_heads, n["batch"]])
    rank: Expr = b.keep(b.cluster_rank([schedule.cluster])[0]) if schedule.cluster > 1 else 0
    head, batch = b.keep(head), b.keep(batch)
    first_row = b.keep(x // schedule.cluster * schedule.rows)
    row_count = b.keep(T.min(total - first_row, schedule.rows))
    thread = b.thread_index(schedule.threads)
    lane = b.bind(thread % WARP)
    warp, g, c = b.keep(thread // WARP), b.keep(lane // 4), b.keep(lane % 4)
    worker = b.keep(rank * schedule.warps + warp)
    begins = {name: b.keep(first_of_head(inputs, batch, head, name)) for name in ("k", "v")}
    return Place(
        inputs, form.group, head, batch, first_row, row_count, thread, lane, g, c, rank, warp, worker,
        schedule.warps * schedule.cluster, begins,
    )  # fmt: skip
