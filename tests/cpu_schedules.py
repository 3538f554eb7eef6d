"""Products on CPUs that stand for all: every instruction, kind of group, zero point and conversion."""

from __future__ import annotations

from typing import Any

from ladder.ir.gemm import Gemm
from schedules.cpu_policy import proposal
from schedules.schedule import TransformList
from targets import TileDevice, get_device

N, K = 37, 131
Row = tuple[str, str, str, str, int, str, int, int, dict[str, Any]]
ROWS: tuple[Row, ...] = (
    ("avx512_bf16", "int4", "bfloat16", "float32", 48, "none", 2, 16, {}),
    ("avx512_bf16", "nf4", "bfloat16", "float16", 16, "none", 2, 32, {"bias": True, "epilogue": ("silu",)}),
    ("avx512_bf16", "bfloat16", "bfloat16", "float32", 0, "none", 8, 16, {}),
    ("avx512_vnni", "int4", "int8", "float32", 32, "none", 1, 16, {"token_scale": True}),
    ("avx512_vnni", "uint8", "int8", "float32", 0, "integer", 2, 16, {}),
    ("avx512_vnni", "int3", "int8", "float16", 16, "integer", 1, 16, {}),
    ("avx512_vnni16", "int4", "bfloat16", "float32", 48, "none", 2, 16, {}),
    ("avx512_vnni16", "uint3", "float16", "float16", 16, "integer", 1, 16, {"bias": True}),
    ("avx512_vnni16", "int8", "float16", "float32", 64, "float", 1, 32, {"epilogue": ("silu",)}),
    ("avx512_vnni16", "uint7", "bfloat16", "float32", 20, "none", 4, 16, {"token_scale": True}),
    ("avx512_vnni8", "int4", "float32", "float32", 48, "none", 2, 16, {}),
    ("avx512_vnni8", "uint4", "bfloat16", "float32", 20, "integer", 1, 16, {"bias": True}),
    ("avx512_vnni8", "int8", "float16", "float32", 32, "none", 4, 16, {"epilogue": ("silu",)}),
    ("avx512_vnni8", "fp4_e2m1", "float16", "float16", 16, "none", 2, 32, {}),
    ("avx512_vnni8x2", "int4", "float16", "float16", 64, "none", 4, 16, {}),
    ("avx512_vnni8x2", "uint8", "bfloat16", "bfloat16", 20, "float", 1, 16, {"bias": True}),
    ("avx512_vnni8w2", "nf4", "float16", "float16", 64, "none", 4, 16, {}),
    ("avx512_vnni8w2", "fp6_e3m2", "bfloat16", "bfloat16", 16, "float", 1, 32, {"bias": True}),
    ("avx2_maddubs avx2", "int4", "int8", "float32", 32, "none", 4, 16, {"token_scale": True}),
    ("avx2_maddubs avx2", "uint6", "int8", "float32", 16, "integer", 2, 16, {}),
    ("fma", "fp4_e2m1", "float16", "float16", 32, "none", 2, 16, {}),
    ("fma", "uint4", "float32", "float32", 20, "float", 1, 32, {}),
    ("fma avx2", "float32", "float32", "float32", 0, "none", 4, 16, {}),
    ("fma avx2", "ternary", "int8", "bfloat16", 8, "none", 2, 16, {}),
    ("fma avx2", "int3", "fp8_e4m3", "float32", 128, "none", 2, 16, {}),
    ("amx_bf16_terms", "int4", "float16", "float32", 48, "none", 16, 32, {}),
    ("amx_bf16_terms", "uint4", "float32", "float32", 16, "integer", 32, 32, {}),
    ("amx_bf16_terms", "int8", "float32", "float16", 0, "none", 16, 32, {"bias": True}),
    ("amx_bf16", "uint4", "bfloat16", "float32", 80, "float", 16, 32, {}),
    ("avx512_bf16", "int6", "bfloat16", "float32", 32, "none", 2, 16, {}),
    ("fma", "uint8", "float16", "float32", 32, "none", 2, 16, {}),
    ("amx_int8", "int4", "int8", "float32", 16, "none", 32, 32, {}),
    ("amx_int8", "int8", "int8", "float32", 0, "none", 16, 32, {}),
)  # fmt: skip
"""Instruction (and device), weight, activation, output, group, zero points, register tile, the rest."""


def _case(row: Row) -> tuple[Gemm, TileDevice, str, int, int]:
    core, weight, activation, output, group, zero, tile_m, tile_n, rest = row
    core, _, name = core.partition(" ")
    device = get_device(f"cpu/{name or ('amx' if core.startswith('amx') else 'avx512_bf16')}")
    gemm = Gemm(N, K, weight, activation, output, group or K, group != 0, zero, **rest)
    return gemm, device, core, tile_m, tile_n


CASES = {f"{row[0]} {row[1]} x {row[2]} g{row[4]}": _case(row) for row in ROWS}
"""Name -> problem, device, instruction, rows and columns of the register tile."""


def schedule_of(name: str) -> TransformList:
    """Return the schedule of a case."""
    gemm, device, core, tile_m, tile_n = CASES[name]
    return proposal(gemm, device, core, tile_m, tile_n)
