"""Problems and schedules drawn at random: small, with remainders in every dimension."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ladder.ir.gemm import Gemm
from ladder.lower.build import emit
from schedules.schedule import GpuSchedule
from targets import get_device
from tile_types.errors import LadderError

ARCH = "cuda/sm_90a"

WEIGHTS = {
    "float16": ("uint4", "int4", "int8", "uint3", "int2", "uint1", "nf4", "fp4_e2m1", "float16"),
    "bfloat16": ("uint4", "int4", "int8", "nf4", "int5", "ternary"),
    "int8": ("int8", "int4", "uint4", "uint2"),
    "fp8_e4m3": ("fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int4"),
    "fp8_e5m2": ("fp8_e5m2", "fp4_e2m1"),
}
"""Activation -> weight types."""

SIZES = {"n": (67, 130, 203, 256), "k": (200, 450, 700, 1024)}


@dataclass(frozen=True)
class Drawn:
    """One problem, one schedule, one M."""

    gemm: Gemm
    schedule: GpuSchedule
    m: int

    @property
    def name(self) -> str:
        """A short name."""
        g, s = self.gemm, self.schedule
        return f"{s.pipeline}-{g.weight}-{g.activation}-{g.n}x{g.k}-g{g.group_size}-{g.zero}-m{self.m}"

    def function(self) -> Any:
        """Return the emitted PrimFunc."""
        return emit(self.gemm, get_device(ARCH), self.schedule, "drawn")


def _gemm(r: random.Random, pipeline: str) -> Gemm:
    activation = r.choice(list(WEIGHTS))
    narrow = activation not in ("float16", "bfloat16")
    scale = r.random() < 0.8
    return Gemm(
        n=r.choice(SIZES["n"]),
        k=r.choice(SIZES["k"]),
        weight=r.choice(WEIGHTS[activation]),
        activation=activation,
        group_size=r.choice((32, 64, 128)) if scale else -1,
        scale=scale,
        zero=r.choice(("none", "none", "integer")),
        bias=r.random() < 0.3,
        token_scale=narrow and r.random() < 0.5,
        output="float32" if narrow else r.choice(("float32", activation)),
        epilogue=("relu",) if r.random() < 0.2 else (),
    )


def _schedule(r: random.Random, pipeline: str, gemm: Gemm, m: int) -> GpuSchedule:
    narrow = gemm.activation not in ("float16", "bfloat16")
    placement = "accumulator" if narrow else r.choice(("operand", "accumulator"))
    if pipeline == "gemv":
        warps, split = r.choice((4, 8)), r.choice((1, 2, 4))
        return GpuSchedule(
            "gemv",
            r.choice((8, 16)),
            stages=r.choice((2, 3, 4)),
            warps=warps,
            split_k=split,
            placement=placement,
        )
    if pipeline == "mma":
        tile_m, tile_n = r.choice(((16, 64), (32, 64), (64, 128), (32, 128)))
        return GpuSchedule(
            "mma",
            tile_m,
            tile_n,
            r.choice((64, 128)),
            r.choice((2, 3)),
            r.choice((4, 8)),
            placement=placement,
        )
    kind = r.choice(("plain", "cluster", "persistent", "split"))
    return GpuSchedule(
        "wgmma",
        r.choice((16, 32, 64, 128)),
        r.choice((64, 128, 256)),
        r.choice((128, 256)) if narrow else r.choice((64, 128)),
        r.choice((3, 4)),
        r.choice((4, 8)),
        split_k=r.choice((2, 4)) if kind == "split" else 1,
        cluster=2 if kind == "cluster" else 1,
        persistent=kind == "persistent",
        placement=placement if narrow else "operand",
    )


def draw(count: int, seed: int) -> Iterator[Drawn]:
    """Yield ``count`` legal problems, the same for the same seed."""
    r = random.Random(seed)
    found = 0
    while found < count:
        pipeline = ("gemv", "mma", "wgmma", "wgmma")[found % 4]
        try:
            gemm = _gemm(r, pipeline)
            m = r.choice((1, 5) if pipeline == "gemv" else (16, 64, 129))
            drawn = Drawn(gemm, _schedule(r, pipeline, gemm, m), m)
            drawn.function()
        except LadderError:
            continue
        found += 1
        yield drawn
