"""How a 16-bit matrix lies in shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

CHUNK_BYTES = 16
"""What one lane of a copy moves, and one row of a matrix that ``ldmatrix`` loads."""

BANKS = 8
"""Chunks that shared memory serves at once."""


@dataclass(frozen=True)
class TileLayout:
    """Rows of chunks, a fixed pitch apart.

    Parameters
    ----------
    rows, chunks
        Extents; a chunk is eight elements.
    pitch
        Chunks from row to row.
    """

    rows: int
    chunks: int
    pitch: int

    def byte(self, row: Any, chunk: Any) -> Any:
        """Return the first byte of a chunk; for integers and TIR expressions alike."""
        return (row * self.pitch + chunk) * CHUNK_BYTES

    @property
    def bytes(self) -> int:
        """Size."""
        return self.rows * self.pitch * CHUNK_BYTES

    @property
    def passes(self) -> int:
        """Times that shared memory is accessed to load eight rows of a chunk: 1 is best."""
        return math.gcd(self.pitch, BANKS)
