"""How stream-K divides work, and the workspace through which its blocks pass sums.

A *unit* is one turn of a kernel's loop over K. The functions work on Python integers and on TIR
expressions alike, so that tests evaluate exactly the arithmetic that kernels use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Index = Any
"""A Python integer or a TIR expression."""

WORKSPACE = "ladder.workspace"
"""Name under which a kernel's host code finds what gives it a workspace: bytes -> address."""


def whole_tiles(tiles: Index, blocks: int, highest: Callable[..., Index] = max) -> Index:
    """Return how many of ``tiles`` are walked whole: the full rounds of all blocks but the last one."""
    return highest(tiles // blocks - 1, 0) * blocks


def share_begin(share: Index, units: Index, blocks: int) -> Index:
    """Return the first of ``units`` that belongs to a share, of which there is one per block."""
    return share * units // blocks
