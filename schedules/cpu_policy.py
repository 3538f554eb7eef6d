"""CPU schedules by operand type and M: a table, edited by measurement.

Each row says which compute instruction serves activations of one type up to one M, and how
its loops are tiled. The first row whose core the device has wins within each range of M.
"""

from __future__ import annotations

from dataclasses import dataclass

from ladder.ir.gemm import Gemm
from schedules.schedule import CpuSchedule
from targets import TileDevice

LARGEST_M = 1 << 16
BUCKETS = (1, 4, 16, 64, LARGEST_M)
"""Largest M of each range of the plan."""


@dataclass(frozen=True)
class Row:
    """``schedule`` serves ``activation`` for M up to ``m_max`` where the device has its core."""

    activation: str
    m_max: int
    schedule: CpuSchedule


def _rows(activation: str, core: str, *steps: tuple[int, int, int, int, str]) -> tuple[Row, ...]:
    return tuple(Row(activation, m, CpuSchedule(core, *tile)) for m, *tile in steps)  # type: ignore[arg-type]


TABLE: tuple[Row, ...] = (
    # (largest M, tile_m, tile_n, tile_k, where to decode); earlier rows win.
    *_rows("bfloat16", "avx512_bf16", (1, 1, 16, 64, "register"), (4, 4, 16, 64, "register")),
    *_rows("bfloat16", "amx_bf16", (16, 16, 32, 64, "scratch"), (LARGEST_M, 32, 32, 64, "scratch")),
    *_rows("bfloat16", "avx512_bf16", (16, 8, 32, 64, "scratch"), (LARGEST_M, 8, 32, 64, "scratch")),
    *_rows("int8", "avx512_vnni", (1, 1, 16, 64, "register"), (4, 4, 16, 64, "register")),
    *_rows("int8", "amx_int8", (16, 16, 32, 64, "scratch"), (LARGEST_M, 32, 32, 64, "scratch")),
    *_rows("int8", "avx512_vnni", (16, 8, 32, 64, "scratch"), (LARGEST_M, 8, 32, 64, "scratch")),
    *(
        row
        for activation in ("float32", "bfloat16", "float16", "int8")
        for row in _rows(
            activation,
            "fma",
            (1, 1, 16, 64, "register"),
            (4, 4, 16, 64, "register"),
            (LARGEST_M, 8, 16, 64, "scratch"),
        )
    ),
)


def cpu_schedule(gemm: Gemm, device: TileDevice, m: int) -> CpuSchedule:
    """Return the table's schedule for ``m`` rows of A.

    Raises
    ------
    ConversionError
        If the device has no core for the activation type; the message names those it has.
    """
    device.core_for(gemm.activation, "cpu")
    names = {core.name for core in device.cores_for(gemm.activation, "cpu")}
    fitting = [
        row.schedule
        for row in TABLE
        if row.activation == gemm.activation and m <= row.m_max and row.schedule.core in names
    ]
    return fitting[0]


def cpu_candidates(gemm: Gemm, device: TileDevice, m: int) -> tuple[CpuSchedule, ...]:
    """Return the table's choice first, then every other schedule of the table that could serve ``m``."""
    first = cpu_schedule(gemm, device, m)
    names = {core.name for core in device.cores_for(gemm.activation, "cpu")}
    others = (
        row.schedule for row in TABLE if row.activation == gemm.activation and row.schedule.core in names
    )
    return tuple(dict.fromkeys((first, *others)))
