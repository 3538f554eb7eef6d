"""Where intermediate results lie: lifetimes to offsets in one block of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALIGNMENT = 256
"""Bytes: what the allocators of GPUs give, and more than any vector needs."""


@dataclass(frozen=True)
class Lifetime:
    """A buffer that is written by step ``first`` and last read by step ``last``."""

    name: str
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Arena:
    """Offsets of buffers in a block of ``nbytes``."""

    offsets: Mapping[str, int]
    nbytes: int


def lay_out(lifetimes: Sequence[Lifetime]) -> Arena:
    """Place buffers so that those alive at one time do not overlap, the largest first.

    Each takes the lowest offset at which it fits between those already placed whose lifetimes meet its own.
    """
    placed: list[tuple[Lifetime, int]] = []
    for buffer in sorted(lifetimes, key=lambda item: (-item.nbytes, item.first, item.name)):
        taken = sorted((at, at + _rounded(other.nbytes)) for other, at in placed if _meet(buffer, other))
        offset = 0
        for begin, end in taken:
            if offset + _rounded(buffer.nbytes) <= begin:
                break
            offset = max(offset, end)
        placed.append((buffer, offset))
    total = max((at + _rounded(buffer.nbytes) for buffer, at in placed), default=0)
    return Arena({buffer.name: at for buffer, at in placed}, total)


def _meet(a: Lifetime, b: Lifetime) -> bool:
    return a.first <= b.last and b.first <= a.last


def _rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
