"""Layouts of tiles in shared memory, chosen together.

Each tile has a few layouts. One has more bank conflicts, another more bytes; all tiles must fit.

Exact dynamic storage allocation: offsets in shared memory that need the fewest bytes.

Buffers that are alive at the same time must not overlap. The problem is strongly NP-hard (Garey &
Johnson, SR2), and block graphs have a dozen buffers: branch and bound over orders of placement is exact,
since some order in which each buffer is put at the lowest free place gives an optimum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ladder.lower.blocks.shared import TileLayout
from tile_types.errors import ScheduleError


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


PADS = (0, 1)
"""Chunks that may be left free between rows: an odd pitch has no conflicts. Nor have swizzled panels."""


@dataclass(frozen=True)
class Candidate:
    """A tile whose layout is open.

    name: Of its node.
    rows, chunks: Extents; a chunk is 16 bytes.
    copies: How often it lies in shared memory: stages and groups.
    reads: How often it is read.
    swizzles: Whether it may lie in swizzled panels: their addresses are no sums with a number.
    """

    name: str
    rows: int
    chunks: int
    copies: int
    reads: int
    swizzles: bool = True

    @property
    def options(self) -> tuple[TileLayout, ...]:
        panels = TileLayout.panels(self.rows, self.chunks) if self.swizzles else None
        padded = (TileLayout(self.rows, self.chunks, self.chunks + pad) for pad in PADS)
        return (*padded, *([panels] if panels else []))

    def cost(self, layout: TileLayout) -> int:
        """Return accesses of shared memory, eight rows of a chunk being one without conflicts."""
        return -(-self.rows // 8) * self.chunks * layout.passes * self.reads

    def bytes(self, layout: TileLayout) -> int:
        return layout.bytes * self.copies


def choose(candidates: Sequence[Candidate], budget: int) -> Mapping[str, TileLayout]:
    """Return the layouts with the fewest accesses, then the fewest bytes, that fit ``budget`` bytes.

    Raises ScheduleError if the smallest layouts do not fit.
    """
    least = sum(min(map(candidate.bytes, candidate.options)) for candidate in candidates)
    if least > budget:
        raise ScheduleError(f"tiles take {least} bytes of shared memory, {budget} are left; use smaller ones")
    best = {c.name: min(c.options, key=lambda option: (c.cost(option), option.bytes)) for c in candidates}
    if sum(candidate.bytes(best[candidate.name]) for candidate in candidates) <= budget:
        return best  # each tile's best fits: nothing to trade
    return _solve(candidates, budget)


def _solve(candidates: Sequence[Candidate], budget: int) -> Mapping[str, TileLayout]:
    """Add tile by tile; of choices so far, those stay that none beats in accesses and bytes at once."""
    best: list[tuple[int, int, dict[str, TileLayout]]] = [(0, 0, {})]
    for c in candidates:
        wider = [
            (cost + c.cost(option), size + c.bytes(option), {**chosen, c.name: option})
            for cost, size, chosen in best
            for option in c.options
        ]
        best, least = [], budget + 1
        for choice in sorted(wider, key=lambda choice: choice[:2]):
            if choice[1] < least:
                best.append(choice)
                least = choice[1]
    return best[0][2]
