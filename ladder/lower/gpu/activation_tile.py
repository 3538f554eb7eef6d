"""Where tiles of x lie in shared memory: the XOR swizzle, and how threads share pieces of a copy.

Rows are activation rows; a row is a run of 16-byte chunks along K. The swizzle spreads the chunks that
eight lanes of neighbouring activation rows read at once over all 32 banks. Index functions work on Python
integers and on TIR expressions alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ladder.lower import Expr
from ladder.lower import builder as b

CHUNK_BYTES = 16
CHUNK_WORDS = 4


@dataclass(frozen=True)
class ActivationTile:
    """Where the chunks of a tile ``[activation rows, chunks]`` lie in shared memory.

    chunks: 16-byte chunks per row: 4, or a multiple of 8 (an expression stands for the latter).
    """

    chunks: Expr

    def __post_init__(self) -> None:
        if isinstance(self.chunks, int) and self.chunks != 4 and self.chunks % 8:
            raise ValueError(f"the swizzle permutes 4 chunks or multiples of 8, got rows of {self.chunks}")

    def place(self, row: Expr, chunk: Expr) -> Expr:
        """Return where chunk ``chunk`` of row ``row`` lies, counted in chunks."""
        narrow = isinstance(self.chunks, int) and self.chunks == 4
        mix = row // 2 % 4 if narrow else row % 8
        return row * self.chunks + (chunk ^ mix)

    def word(self, row: Expr, chunk: Expr) -> Expr:
        """Return the 32-bit word at which chunk ``chunk`` of row ``row`` starts."""
        return self.place(row, chunk) * CHUNK_WORDS

    def words(self, rows: int) -> Expr:
        return rows * self.chunks * CHUNK_WORDS


def each_piece(count: int, threads: int, thread: Expr, body: Any) -> None:
    """Emit ``body(piece)`` so that ``threads`` threads cover pieces 0..count-1 once."""
    for turn in range(-(-count // threads)):
        piece = b.bind(thread + turn * threads)
        if (turn + 1) * threads <= count:
            body(piece)
        else:
            with b.when(piece < count):
                body(piece)
