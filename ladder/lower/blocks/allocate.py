"""Exact dynamic storage allocation: offsets in shared memory that need the fewest bytes.

Buffers that are alive at the same time must not overlap. The problem is strongly NP-hard (Garey &
Johnson, SR2), and block graphs have a dozen buffers: branch and bound over orders of placement is exact,
since some order in which each buffer is put at the lowest free place gives an optimum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Lifetime:
    """A buffer: bytes, and the first and last moment at which it is alive."""

    size: int
    first: int
    last: int

    def meets(self, other: Lifetime) -> bool:
        """Whether two are alive at the same time."""
        return self.first <= other.last and other.first <= self.last


def lower_bound(buffers: Mapping[str, Lifetime]) -> int:
    """Return the most bytes that are alive at one moment."""
    moments = {buffer.first for buffer in buffers.values()}
    return max(
        (sum(x.size for x in buffers.values() if x.first <= moment <= x.last) for moment in moments),
        default=0,
    )


def allocate(buffers: Mapping[str, Lifetime], alignment: int = 1) -> dict[str, int]:
    """Return the offset of every buffer, with the least end of all.

    buffers: By name.
    alignment: Offsets are multiples of it, in bytes.
    """
    rounded = {
        name: Lifetime(-(-x.size // alignment) * alignment, x.first, x.last) for name, x in buffers.items()
    }
    search = _Search(rounded, lower_bound(rounded))
    search.place({}, 0)
    return search.best


class _Search:
    """Depth-first over orders of placement; stops at the lower bound."""

    def __init__(self, buffers: Mapping[str, Lifetime], bound: int) -> None:
        # Large and long-lived ones first: the first descent is then nearly always optimal.
        self.buffers = dict(sorted(buffers.items(), key=lambda item: (-item[1].size, item[0])))
        self.bound = bound
        self.best: dict[str, int] = {}
        self.height = sum(buffer.size for buffer in buffers.values()) + 1

    def place(self, offsets: dict[str, int], height: int) -> None:
        """Place what is left in every order that may improve on the best."""
        if height >= self.height:
            return
        if len(offsets) == len(self.buffers):
            self.best, self.height = dict(offsets), height
            return
        for name, buffer in self.buffers.items():
            if name in offsets:
                continue
            at = self._lowest(buffer, offsets)
            self.place({**offsets, name: at}, max(height, at + buffer.size))
            if self.height == self.bound:
                return

    def _lowest(self, buffer: Lifetime, offsets: Mapping[str, int]) -> int:
        others = sorted(
            (at, at + self.buffers[name].size)
            for name, at in offsets.items()
            if self.buffers[name].meets(buffer)
        )
        at = 0
        for begin, end in others:
            if at + buffer.size <= begin:
                break
            at = max(at, end)
        return at
