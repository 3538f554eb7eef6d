"""The shared memory of a block while a kernel is emitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ladder.lower import builder as b

Expr = Any


@dataclass(frozen=True)
class SharedMemory:
    """The shared memory of a block.

    words: All of it, as uint32.
    arrivals: Barriers of tensor copies; None without.
    base: Shared address of its first byte.
    stage: Shared address of the stage of the step at hand.
    stages_at: First byte of the group's stages.
    """

    words: Any
    arrivals: Any
    base: Expr
    stage: b.Variable
    stages_at: Expr
