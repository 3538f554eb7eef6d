"""Layout of a quantized tile in shared memory: packed words, scales and zero points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower.gpu.groups import Groups
from schedules.group_values import scale_span
from schedules.layouts import TILE
from tile_types.errors import ScheduleError


@dataclass(frozen=True)
class Strips:
    """Scales or zero points of a tile: runs of elements, one for each of its rows.

    size: Bytes of an element.
    span: Elements along K that a run serves; 0 if all of them.
    parts: Runs, one after the other, that serve the same elements.
    """

    size: int
    span: int
    parts: int = 1

    def count(self, columns: int) -> int:
        """Return the runs of a tile."""
        return self.parts * (max(1, columns // self.span) if self.span else 1)

    def first(self, column: Expr) -> Expr:
        """Return the run, of all in memory, that serves a tile from ``column`` on."""
        return column // self.span * self.parts if self.span else 0

    def run(self, column: int, columns: int) -> int:
        """Return the first run of a tile of ``columns`` that serves one of them."""
        return column // self.span * self.parts if 0 < self.span < columns else 0


@dataclass(frozen=True)
class PackedLayout:
    """A quantized tile in shared memory: packed tiles by rows, then rows of scales and of zero points.

    rows, columns: Extents of the tile along N and K.
    """

    gemm: Gemm
    rows: int
    columns: int

    def __post_init__(self) -> None:
        if self.rows % TILE or self.columns % TILE:
            raise ScheduleError(
                f"tiles of packed weights are multiples of {TILE} x {TILE}, got {self.rows} x {self.columns}"
            )
        for strips in self.strips.values():
            if strips.span and max(strips.span, self.columns) % min(strips.span, self.columns):
                raise ScheduleError(f"tiles of {self.columns} columns do not divide groups of {strips.span}")

    @cached_property
    def groups(self) -> Groups:
        """How scales fall on packed tiles."""
        return Groups(self.gemm)

    @cached_property
    def strips(self) -> Mapping[str, Strips]:
        """Metadata of packed words, by name of the array."""
        found = {}
        if self.gemm.scale:
            found["scales"] = Strips(4 if self.groups.exponents else 2, scale_span(self.gemm))
        if self.gemm.zero != "none":
            found["zeros"] = Strips(2, self.groups.size, 2 if self.gemm.zero == "float" else 1)
        return found

    @property
    def k_tiles(self) -> int:
        """Packed tiles along K."""
        return self.columns // TILE

    @property
    def tile_bytes(self) -> int:
        """Bytes of a packed tile."""
        return 512 * self.groups.bits

    @property
    def run_bytes(self) -> int:
        """Bytes of the packed tiles of 64 rows: they lie together in memory."""
        return self.k_tiles * self.tile_bytes

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """First byte of each array of `strips`, and the size of all under ``"end"``."""
        offsets, at = {}, self.rows // TILE * self.run_bytes
        for name, strips in self.strips.items():
            offsets[name] = at
            at += strips.size * self.rows * strips.count(self.columns)
        return {**offsets, "end": at}

    @property
    def bytes(self) -> int:
        return self.offsets["end"]

    def tile_byte(self, row: Expr, k: int) -> Expr:
        """Return where packed tile ``k`` of the ``row``-th 64 rows begins."""
        return row * self.run_bytes + k * self.tile_bytes

    def strip_byte(self, name: str, k: int, granule: int, part: int, row: Expr) -> Expr:
        """Return where a row's scale or zero point of a granule of packed tile ``k`` lies."""
        strips = self.strips[name]
        column = k * TILE + granule * (TILE // self.groups.per_tile)
        run = strips.run(column, self.columns) + part
        return self.offsets[name] + (run * self.rows + row) * strips.size
