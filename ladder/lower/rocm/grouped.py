"""How a wave of an AMD kernel finds its tile of a grouped GEMM (`ladder.lower.gpu.grouped`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ladder.lower import builder as b
from ladder.lower.rocm.dialect import cross_lane, shuffle_xor
from schedules.waves import WAVE

Expr = Any


@dataclass(frozen=True)
class WaveLanes:
    """The lanes of a wave: ``count`` of them."""

    lane: Expr
    count: int = WAVE

    def read(self, ranges: Any, index: Expr) -> Expr:
        """Return one of the ranges: kernels of a stream never overlap."""
        return b.keep(ranges[index])

    def shuffle_xor(self, value: Expr, distance: int) -> Expr:
        """Return the value of another lane."""
        return b.keep(shuffle_xor(value, "int32", self.lane, distance))

    def uniform(self, value: Expr) -> Expr:
        """Return the value in a scalar register, so that addresses and branches that follow are scalar."""
        return b.keep(cross_lane("int32", "llvm.amdgcn.readfirstlane", value))
