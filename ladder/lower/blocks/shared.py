"""Layout of a 16-bit matrix in shared memory: padded rows or swizzled panels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from tile_types.errors import ScheduleError


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


CHUNK_BYTES = 16
"""Bytes that one lane of a copy moves, and one row of a matrix that ``ldmatrix`` loads."""

CHUNK_ELEMENTS = 8
"""16-bit elements of a chunk."""

BANKS = 8
"""Chunks that shared memory serves at once."""

PANELS = (8, 4)
"""Chunks per row of a swizzled panel: 128 and 64 bytes, the widths that tensor maps swizzle."""

PANEL_ROWS = 8
"""Rows after which a swizzle repeats."""


@dataclass(frozen=True)
class TileLayout:
    """Rows of chunks, a fixed pitch apart, or panels of swizzled rows.

    rows, chunks: Extents; a chunk is eight elements.
    pitch: Chunks from row to row. Swizzled: of a panel.
    swizzled: Whether columns are cut into panels of ``pitch`` chunks, one after the other, in which chunk c
        of row r lies at ``c ^ (r % 8)`` (of 4 chunks: ``c ^ (r / 2 % 4)``), as tensor copies put it (CUDA
        driver API, CUtensorMapSwizzle).
    """

    rows: int
    chunks: int
    pitch: int
    swizzled: bool = False

    @staticmethod
    def panels(rows: int, chunks: int) -> TileLayout | None:
        """Return the swizzled layout, or None for rows that no panels divide."""
        width = next((width for width in PANELS if chunks % width == 0), None)
        if width is None or (width == PANELS[1] and chunks > width):
            return None
        return TileLayout(rows, chunks, width, swizzled=True)

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel; panels begin where swizzles do."""
        return -(-self.rows // PANEL_ROWS) * PANEL_ROWS * self.pitch * CHUNK_BYTES

    def _mix(self, row: Expr) -> Expr:
        return row % PANEL_ROWS if self.pitch == PANELS[0] else row // 2 % PANELS[1]

    def byte(self, row: Expr, chunk: Expr) -> Expr:
        if not self.swizzled:
            return (row * self.pitch + chunk) * CHUNK_BYTES
        panel, within = chunk // self.pitch, chunk % self.pitch
        return panel * self.panel_bytes + (row * self.pitch + (within ^ self._mix(row))) * CHUNK_BYTES

    def moved(self, start: Expr, rows: int, chunk: Expr) -> Expr:
        """Return an address further on, from that of one of a row's first two chunks.

        start: Shared address, a uint32 expression.
        rows: Rows further, a multiple of 8.
        chunk: Chunks further; even, if ``start`` may be a second chunk.
        """
        down = rows * self.pitch * CHUNK_BYTES
        if not self.swizzled:
            return start + _word(down + chunk * CHUNK_BYTES)
        start = start + _word(down + chunk // self.pitch * self.panel_bytes)
        within = chunk % self.pitch * CHUNK_BYTES
        return start if isinstance(within, int) and within == 0 else start ^ _word(within)

    @property
    def bytes(self) -> int:
        if self.swizzled:
            return self.chunks // self.pitch * self.panel_bytes
        return self.rows * self.pitch * CHUNK_BYTES

    @property
    def passes(self) -> int:
        """Times that shared memory is accessed to load eight rows of a chunk: 1 is best."""
        return 1 if self.swizzled else math.gcd(self.pitch, BANKS)


def _word(value: Expr) -> Expr:
    return T.uint32(value) if isinstance(value, int) else T.Cast("uint32", value)


MOST_BOX = 256
"""Rows, and elements of a row, that one tensor copy moves."""


def copied_layout(name: str, rows: int, chunks: int) -> TileLayout:
    """Return the layout that tensor copies give a tile: panels, or else rows one after the other.

    Raises ScheduleError if a copy does not take so many rows or columns.
    """
    layout = TileLayout.panels(rows, chunks) or TileLayout(rows, chunks, chunks)
    if rows > MOST_BOX or 8 * layout.pitch > MOST_BOX:
        raise ScheduleError(
            f"%{name}: tensor copies take up to {MOST_BOX} rows of multiples of 64, or up to {MOST_BOX},"
            f" elements, got {rows} x {8 * chunks}"
        )
    return layout
