"""Layouts of tiles in shared memory, chosen together by integer programming (z3).

Each tile has a few layouts. One has more bank conflicts, another more bytes; all tiles must fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ladder.lower.blocks.shared import TileLayout
from tile_types.errors import ScheduleError

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
        """Layouts to choose from."""
        panels = TileLayout.panels(self.rows, self.chunks) if self.swizzles else None
        padded = (TileLayout(self.rows, self.chunks, self.chunks + pad) for pad in PADS)
        return (*padded, *([panels] if panels else []))

    def cost(self, layout: TileLayout) -> int:
        """Return accesses of shared memory, eight rows of a chunk being one without conflicts."""
        return -(-self.rows // 8) * self.chunks * layout.passes * self.reads

    def bytes(self, layout: TileLayout) -> int:
        """Return bytes of all copies."""
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
    import z3

    solver = z3.Optimize()
    chosen = {c.name: [z3.Bool(f"{c.name} {i}") for i in range(len(c.options))] for c in candidates}
    bytes_, cost = [], []
    for candidate in candidates:
        switches = chosen[candidate.name]
        solver.add(z3.PbEq([(switch, 1) for switch in switches], 1))
        for switch, option in zip(switches, candidate.options, strict=True):
            bytes_.append(z3.If(switch, candidate.bytes(option), 0))
            cost.append(z3.If(switch, candidate.cost(option), 0))
    solver.add(z3.Sum(bytes_) <= budget)
    solver.minimize(z3.Sum(cost))
    solver.minimize(z3.Sum(bytes_))
    if solver.check() != z3.sat:
        raise ScheduleError(f"no layouts of the tiles fit {budget} bytes")
    model = solver.model()
    return {
        c.name: next(
            option
            for switch, option in zip(chosen[c.name], c.options, strict=True)
            if z3.is_true(model.evaluate(switch, model_completion=True))
        )
        for c in candidates
    }
