"""A thread of the math warpgroups of the pipeline ``wgmma``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ladder.lower import builder as b

Expr = Any


@dataclass(frozen=True)
class MathThread:
    """Its warpgroup, its place in that, its warp in the warpgroup, and the lane in the warp."""

    group: Expr
    group_thread: Expr
    warp: Expr
    lane: Expr


def find_math_thread(thread: Expr) -> MathThread:
    """Emit where a thread of the block stands among the math warpgroups."""
    group, group_thread = b.bind(thread // 128), b.bind(thread % 128)
    return MathThread(group, group_thread, b.bind(group_thread // 32), b.bind(group_thread % 32))
