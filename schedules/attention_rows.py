"""How lanes that share a row of keys or values divide it: what each loads at once."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from schedules.schedule import check

WIDEST, WORD = 16, 4
"""Bytes of a lane's widest load, and of a register."""


@dataclass(frozen=True)
class Piece:
    """What each lane that shares a row loads at once: neighbouring elements, lane after lane.

    begin: First element of the row that the piece of the first lane has.
    elements: Elements of a lane.
    before: Elements of a lane in pieces before.
    """

    begin: int
    elements: int
    before: int

    def column(self, lane: Any) -> Any:
        """Return the first element of the row that a lane has, a number or an expression."""
        return self.begin + lane * self.elements

    def end(self, lanes: int) -> int:
        """Return the element of the row after the last lane's."""
        return self.begin + lanes * self.elements

    def words(self, width: int) -> int:
        """Return the registers of a lane's elements of so many bytes; less than a word takes one."""
        return ceil(self.elements * width / WORD)


def divide(size: int, lanes: int, width: int, least: int = WORD, most: int = WIDEST) -> tuple[Piece, ...]:
    """Divide a row among lanes: pieces of 16 bytes each as long as they last, then 8, and so on.

    size: Elements of the row as cores multiply it.
    width: Bytes of an element.
    least, most: Bytes of the narrowest load, and of the widest.
    Raises ScheduleError if lanes have no whole loads.
    """
    found: list[Piece] = []
    begin, nbytes = 0, most
    while nbytes >= least:
        elements = nbytes // width
        while elements and begin + elements * lanes <= size:
            found.append(Piece(begin, elements, begin // lanes))
            begin = found[-1].end(lanes)
        nbytes //= 2
    check(begin == size, f"{size * width / lanes:g} bytes of a head per lane are no whole loads of {least}")
    return tuple(found)
