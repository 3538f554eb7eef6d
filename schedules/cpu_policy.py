"""CPU schedules by operand type and M: a table, edited by measurement.

What a core multiplies is decided by values: activations and weights must survive the conversion
unchanged. Each row of `TABLE` says which compute instruction serves that operand type up to one
M, and how its loops are tiled; the first row whose core the device has wins.
"""

from __future__ import annotations

from dataclasses import dataclass

from ladder.ir.gemm import Gemm
from schedules.schedule import CpuSchedule, check
from targets import TileDevice
from tile_types import get_type, representable

LARGEST_M = 1 << 16
BUCKETS = (1, 2, 4, 8, 16, LARGEST_M)
"""Largest M of each range of the plan."""

CORE_OPERANDS = {
    "amx_int8": "int8",
    "avx512_vnni": "int8",
    "amx_bf16": "bfloat16",
    "avx512_bf16": "bfloat16",
    "fma": "float32",
}
"""Operand type of every core that the CPU pipeline can emit."""

WIDENINGS = {
    "int8": ("bfloat16",),
    "fp8_e4m3": ("bfloat16",),
    "fp8_e5m2": ("bfloat16",),
    "bfloat16": ("bfloat16",),
}
"""16-bit operand types that hold every value of an activation type."""

REGISTERS = 32
"""Vector registers; a tile leaves room for weights, table and shifts."""


@dataclass(frozen=True)
class Row:
    """``schedule`` serves operands of its core's type for M up to ``m_max``."""

    m_max: int
    schedule: CpuSchedule


def _rows(core: str, *steps: tuple[int, int, int]) -> tuple[Row, ...]:
    decode = "scratch" if core.startswith("amx") else "register"
    return tuple(Row(m, CpuSchedule(core, tile_m, tile_n, 32, decode)) for m, tile_m, tile_n in steps)


_VECTOR = ((1, 1, 128), (2, 2, 64), (4, 4, 64), (8, 8, 32), (LARGEST_M, 16, 16))
"""(largest M, tokens, rows of B) of a tile of 512-bit accumulators: at most 16 in flight."""

_NARROW = ((1, 1, 16), (2, 2, 16), (LARGEST_M, 4, 16))
"""The same where a 512-bit value takes several registers."""

TABLE: tuple[Row, ...] = (
    *_rows("amx_bf16", (16, 16, 32), (LARGEST_M, 32, 32)),
    *_rows("amx_int8", (16, 16, 32), (LARGEST_M, 32, 32)),
    *_rows("avx512_bf16", *_VECTOR),
    *_rows("avx512_vnni", *_VECTOR),
    *_rows("fma", *_VECTOR),
)

AMX_FROM = 9
"""Smallest M that AMX serves: below, decoding dominates and tiles would be mostly padding."""


def operand_type(gemm: Gemm) -> str:
    """Return the narrowest type that holds activations and weights: int8, bfloat16 or float32.

    It decides the packed layout, so it depends on the problem alone, never on the device.
    """
    weight = get_type(gemm.weight)
    if gemm.activation == "int8" and weight.elem_bits <= 8 and weight.is_integer:
        return "int8"
    for operand in WIDENINGS.get(gemm.activation, ()):
        if representable(weight, operand):
            return operand
    return "float32"


def core_operand(gemm: Gemm, core: str) -> str:
    """Return the operand type of a core.

    Raises
    ------
    ScheduleError
        If the CPU pipeline cannot emit the core, or the core cannot hold the problem's values.
    """
    known = ", ".join(CORE_OPERANDS)
    check(core in CORE_OPERANDS, f"the CPU pipeline has no code for core {core!r}; use one of {known}")
    wanted, able = operand_type(gemm), CORE_OPERANDS[core]
    check(
        able in (wanted, "float32"),
        f"core {core!r} multiplies {able}, but {gemm.activation} x {gemm.weight} needs {wanted}",
    )
    return able


def require_core(gemm: Gemm, device: TileDevice, schedule: CpuSchedule) -> None:
    """Raise ScheduleError unless the device has the schedule's core and the core holds the values."""
    core_operand(gemm, schedule.core)
    names = {core.name for core in device.cores}
    check(
        schedule.core in names,
        f"{device.name} has no core {schedule.core!r}; it has {', '.join(sorted(names))}",
    )
    if schedule.core.startswith("amx"):
        check(
            (schedule.tile_m, schedule.tile_n) in ((16, 32), (32, 32)),
            f"an AMX tile is 16 or 32 tokens by 32 rows, got {schedule.tile_m} by {schedule.tile_n}",
        )
        return
    check(16 % schedule.tile_m == 0, f"tile_m must be a power of two up to 16, got {schedule.tile_m}")
    check(
        128 % schedule.tile_n == 0 and schedule.tile_n >= 16,
        f"tile_n must be 16, 32, 64 or 128, got {schedule.tile_n}",
    )
    accumulators = schedule.tile_m * schedule.tile_n // 16
    check(accumulators < REGISTERS, f"{accumulators} accumulators do not fit in {REGISTERS} registers")


def _fits(gemm: Gemm, device: TileDevice, row: Row, m: int) -> bool:
    core = row.schedule.core
    if core not in {x.name for x in device.cores} or m > row.m_max:
        return False
    if core.startswith("amx") and m < AMX_FROM:
        return False
    return CORE_OPERANDS[core] in (operand_type(gemm), "float32")


def _rows_for(device: TileDevice) -> tuple[Row, ...]:
    if "avx512f" in device.features:
        return TABLE
    return _rows("fma", *_NARROW)


def cpu_candidates(gemm: Gemm, device: TileDevice, m: int) -> tuple[CpuSchedule, ...]:
    """Return every schedule of the table that could serve ``m``, the table's choice first."""
    rows = (row for row in _rows_for(device) if _fits(gemm, device, row, m))
    return tuple(dict.fromkeys(row.schedule for row in rows))


def cpu_schedule(gemm: Gemm, device: TileDevice, m: int) -> CpuSchedule:
    """Return the table's schedule for ``m`` rows of A.

    Raises
    ------
    ScheduleError
        If the device has no core that the CPU pipeline can emit.
    """
    found = cpu_candidates(gemm, device, m)
    check(bool(found), f"{device.name} has no core that the CPU pipeline can emit for {gemm.activation}")
    return found[0]
