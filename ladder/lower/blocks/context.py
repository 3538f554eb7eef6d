"""Context of a kernel being emitted: threads, arguments, shared memory and lane layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ladder.lower import Expr
from ladder.lower.blocks.analysis import BlockProgram, GridPlace
from ladder.lower.blocks.dialect import BlockDialect
from ladder.lower.blocks.fragments import hold
from ladder.lower.blocks.geometry import BlockGeometry
from ladder.lower.blocks.lanes import FlatLanes, FragmentLanes, Lanes
from ladder.lower.blocks.schedule import BlockSchedule
from ladder.lower.blocks.shared import SharedMemory
from ladder.lower.blocks.threads import Point, Threads
from targets import TileDevice
from tile_types.errors import ScheduleError


@dataclass(frozen=True)
class BlockContext:
    """A kernel of a block graph, as far as its values, copies and stores ask for it.

    tensors: Arguments of the kernel by name.
    constants: Inputs that no kernel before writes.
    deferred: Products of a step that warpgroups are to compute, with their sums.
    """

    geo: BlockGeometry
    threads: Threads
    tensors: Mapping[str, Any]
    constants: frozenset[str]
    shared: SharedMemory
    lanes: Lanes
    dialect: BlockDialect
    place: GridPlace
    point: Point = field(default_factory=Point)
    deferred: list[tuple[Any, Any]] = field(default_factory=list)

    @staticmethod
    def of(
        geo: BlockGeometry,
        threads: Threads,
        dialect: BlockDialect,
        tensors: Mapping[str, Any],
        constants: frozenset[str],
    ) -> BlockContext:
        """Allocate shared memory, and derive the rest."""
        shared = dialect.shared_memory(geo, threads)
        kind = FlatLanes if geo.flat else FragmentLanes
        lanes = kind(threads, dialect, shared, geo)
        place = GridPlace(geo.program.block, threads.block)
        return BlockContext(geo, threads, tensors, constants, shared, lanes, dialect, place)

    @property
    def program(self) -> BlockProgram:
        return self.geo.program

    @property
    def schedule(self) -> BlockSchedule:
        """Division of the work."""
        return self.geo.schedule

    @property
    def device(self) -> TileDevice:
        return self.geo.device

    @property
    def operand(self) -> str:
        """The 16-bit type that products are computed in."""
        return self.geo.program.operand

    def row_fragments(self, rows: int) -> int:
        """Return the fragments along the rows of a value that the warp has."""
        return -(-rows // self.lanes.rows) if self.point.whole else self.geo.row_fragments(rows)

    def first_row(self, rows: int) -> Expr:
        """Return the warp's first row of a value."""
        split = not (self.point.whole or self.geo.flat)
        return self.threads.row_warp * (self.row_fragments(rows) * self.lanes.rows) if split else 0

    def first_column(self, fragments: int) -> Expr:
        """Return the warp's first fragment of columns, of as many each."""
        return self.threads.column_warp * fragments

    def sync_group(self) -> None:
        """Synchronize the warps of the group."""
        self.dialect.sync_group(self.threads)

    def inverse(self, x: Expr) -> Expr:
        """Return the reciprocal of a float32, in a register."""
        return hold(self.dialect.reciprocal(x))

    def require_whole_columns(self, name: str) -> None:
        """Raise unless a warp has all columns of what it computes.

        Raises ScheduleError: Otherwise: only sums of products are split along columns.
        """
        if self.schedule.column_warps > 1 and self.point.step is not None:
            raise ScheduleError(f"%{name} is taken within the loop as a whole; use column_warps=1")
