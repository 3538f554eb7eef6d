"""Instructions that a GPU runs on random operands, so that the simulator can be compared with it bit for bit.

`record.py` makes the CUDA program, runs it and saves operands and results; the tests read only that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TRIALS = 3

MMA = (
    ("m16n8k16", "f32", "f16", "f16"),
    ("m16n8k8", "f32", "f16", "f16"),
    ("m8n8k4", "f32", "f16", "f16"),
    ("m16n8k16", "f32", "bf16", "bf16"),
    ("m16n8k32", "s32", "s8", "s8"),
    ("m8n8k16", "s32", "s8", "s8"),
    ("m16n8k32", "f32", "e4m3", "e4m3"),
    ("m16n8k32", "f32", "e4m3", "e5m2"),
    ("m16n8k32", "f32", "e5m2", "e4m3"),
    ("m16n8k32", "f32", "e5m2", "e5m2"),
)
"""mma.sync: shape, accumulator, A, B."""

REGISTERS = {
    "m16n8k16": (4, 2, 4),
    "m16n8k8": (2, 1, 4),
    "m8n8k4": (2, 2, 8),
    "m16n8k32": (4, 2, 4),
    "m8n8k16": (1, 1, 2),
}
"""Registers of A, B and C per thread."""

WGMMA = (
    (16, 16, "f32", "f16", "f16", 1, "rs"),
    (64, 16, "f32", "f16", "f16", 1, "rs"),
    (16, 16, "f32", "bf16", "bf16", 1, "rs"),
    (16, 32, "s32", "s8", "s8", 1, "rs"),
    (16, 32, "s32", "s8", "s8", 2, "rs"),
    (16, 32, "s32", "s8", "s8", 3, "rs"),
    (16, 32, "s32", "s8", "s8", 0, "rs"),
    (16, 32, "s32", "s8", "s8", 1, "ss"),
    (16, 16, "f32", "f16", "f16", 1, "ss"),
    (16, 32, "f32", "e4m3", "e4m3", 1, "rs"),
    (16, 32, "f32", "e4m3", "e5m2", 1, "rs"),
    (16, 32, "f32", "e5m2", "e4m3", 1, "rs"),
    (16, 32, "f32", "e5m2", "e5m2", 1, "rs"),
)
"""wgmma: tokens, K of a step, accumulator, A, B, swizzle mode, where A is."""

SHARED_BYTES = 16384
A_START = 8192
"""Byte of shared memory at which A begins, where it is there; B begins at 0."""

OFFSETS = {1: (16, 1024), 2: (16, 512), 3: (16, 256), 0: (128, 256)}
"""Swizzle mode -> leading and stride offsets in bytes."""

WORD_INSTRUCTIONS = {
    "prmt": ("prmt.b32 %0, %1, %2, %3;", 3),
    "lop3_6a": ("lop3.b32 %0, %1, %2, %3, 0x6a;", 3),
    "lop3_d8": ("lop3.b32 %0, %1, %2, %3, 0xd8;", 3),
    "float_mul_f16x2": ("mul.rn.f16x2 %0, %1, %2;", 2),
    "float_sub_f16x2": ("sub.rn.f16x2 %0, %1, %2;", 2),
    "float_fma_f16x2": ("fma.rn.f16x2 %0, %1, %2, %3;", 3),
    "float_fma_bf16x2": ("fma.rn.bf16x2 %0, %1, %2, %3;", 3),
    "narrow_fp8_e4m3": ("{.reg .b16 h; cvt.rn.satfinite.e4m3x2.f16x2 h, %1; mov.b32 %0, {h, h};}", 1),
    "narrow_fp8_e5m2": ("{.reg .b16 h; cvt.rn.satfinite.e5m2x2.f16x2 h, %1; mov.b32 %0, {h, h};}", 1),
    "halves": ("cvt.rn.f16x2.f32 %0, %1, %2;", -2),
    "pack_bfloat16": ("cvt.rn.bf16x2.f32 %0, %1, %2;", -2),
    "narrow_pair_fp8_e4m3": (
        "{.reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, %2, %1; mov.b32 %0, {h, h};}",
        -2,
    ),
    "narrow_pair_fp8_e5m2": (
        "{.reg .b16 h; cvt.rn.satfinite.e5m2x2.f32 h, %2, %1; mov.b32 %0, {h, h};}",
        -2,
    ),
}
"""Instructions on words: PTX, and number of operands (negative: they are float32)."""

WORDS = 512


@dataclass(frozen=True)
class Case:
    """One instruction with its operands' words and the number of words it returns, for `TRIALS` trials."""

    name: str
    inputs: np.ndarray
    outputs: int
    threads: int


def _floats(rng: np.random.Generator, count: int, kind: str, trial: int) -> np.ndarray:
    """Return random operand words: normal numbers, then wide exponents, then near cancellation."""
    import ml_dtypes

    if kind in ("s8", "bits"):
        return rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32)
    dtypes = {
        "f16": np.float16,
        "bf16": ml_dtypes.bfloat16,
        "e4m3": ml_dtypes.float8_e4m3fn,
        "e5m2": ml_dtypes.float8_e5m2,
        "f32": np.float32,
    }
    dtype = np.dtype(dtypes[kind])
    values = rng.normal(size=count * 4 // dtype.itemsize)
    if trial == 1:
        values *= 2.0 ** rng.integers(-6, 7, values.size)
    if trial == 2:
        values = np.sign(values) * (1 + rng.integers(0, 4, values.size) / 4)
    return values.astype(dtype).view(np.uint32)


def cases() -> list[Case]:
    """Return all cases with the same operands every time."""
    rng = np.random.default_rng(2026)
    result = []
    for shape, acc, a, b in MMA:
        na, nb, nc = REGISTERS[shape]
        rows = [
            np.concatenate(
                [
                    _floats(rng, 32 * na, a, t),
                    _floats(rng, 32 * nb, b, t),
                    _floats(rng, 32 * nc, "f32" if acc == "f32" else "bits", t),
                ]
            )
            for t in range(TRIALS)
        ]
        result.append(Case(f"mma_{shape}_{acc}_{a}_{b}", np.stack(rows), 32 * nc, 32))
    for n, k, acc, a, b, mode, place in WGMMA:
        rows = []
        for t in range(TRIALS):
            shared = _floats(rng, SHARED_BYTES // 4, b, t)
            if a != b:  # A is in registers: all shared memory is B's
                shared = _floats(rng, SHARED_BYTES // 4, b, t)
            registers = _floats(rng, 128 * 4, a, t)
            sums = _floats(rng, 64 * n, "f32" if acc == "f32" else "bits", t)
            rows.append(np.concatenate([shared[: _used(n, mode, place)], registers, sums]))
        result.append(Case(f"wgmma_{n}_{k}_{acc}_{a}_{b}_{mode}_{place}", np.stack(rows), 64 * n, 128))
    for name, (_, count) in WORD_INSTRUCTIONS.items():
        kind = "bits"
        rows = [
            np.concatenate([_floats(rng, WORDS, kind if t else _kind(name, count), t) for _ in range(3)])
            for t in range(TRIALS)
        ]
        result.append(Case(f"word_{name}", np.stack(rows), WORDS, WORDS))
    return result


def _kind(name: str, count: int) -> str:
    if count < 0:
        return "f32"
    return "bf16" if "bf16" in name else "f16"


def _used(n: int, mode: int, place: str) -> int:
    """Return the words of shared memory that are saved: B's rows, and A's where it is there."""
    return SHARED_BYTES // 4 if place == "ss" else max(n * 128, 2048) // 4
