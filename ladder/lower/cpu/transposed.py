"""Transpose words in registers."""

from __future__ import annotations

from tvm import tirx

from ladder.lower import Expr
from ladder.lower import builder as b

EIGHT = 8
"""Words of a vector, and vectors, that are transposed."""


def transposed(square: list[Expr]) -> list[Expr]:
    """Transpose eight vectors of eight words, by rounds of shuffles of two."""
    found = [b.bind(line) for line in square]
    for distance in (1, 2, 4):
        made: list[Expr] = [None] * EIGHT
        for low in (at for at in range(EIGHT) if not at & distance):
            for high in range(2):
                places = [(at & ~distance) + distance * high for at in range(EIGHT)]
                chosen = [place + (EIGHT if at & distance else 0) for at, place in enumerate(places)]
                pair = [found[low], found[low + distance]]
                made[low + distance * high] = b.bind(tirx.Shuffle(pair, chosen))
        found = made
    return found
