"""Where the bits of packed codes lie in a thread's words, and moving them in few instructions.

The layout is `schedules.layouts.FragmentLayout`, `fields` says where it has the bits of a register.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ladder.lower.cuda.machine import AND_XOR, Machine, Word, repeat
from schedules.layouts import Field, fields

__all__ = ["Field", "Move", "fields", "gather", "moves", "odd_bytes", "shifts"]


class Move(NamedTuple):
    """``width`` bits of a word's lanes to be moved from ``source`` to ``target``."""

    word: int
    source: int
    target: int
    width: int


def odd_bytes(where: Iterable[Field], odd: int) -> tuple[Field, ...]:
    """See the even (``odd`` = 0) or odd bytes of 8-bit lanes as 16-bit lanes."""
    return tuple(field._replace(position=field.position + 8 * odd) for field in where)


def moves(where: Iterable[Field], low: int, high: int, target: int) -> list[Move]:
    """Return the moves that bring code bits ``[low, high)`` to bit ``target`` of the lanes."""
    result = []
    for field in where:
        first, last = max(low, field.shift), min(high, field.shift + field.width)
        if first < last:
            source = field.position + first - field.shift
            result.append(Move(field.word, source, target + first - low, last - first))
    return result


def gather(m: Machine, words: Sequence[Word], wanted: Iterable[Move], lane: int, base: int = 0) -> Word:
    """Return ``base`` (a whole word) xor the moved bits; one shift and one lop3 per distance."""
    masks: dict[tuple[int, int], int] = {}
    for move in wanted:
        key = (move.word, move.target - move.source)
        masks[key] = masks.get(key, 0) | (((1 << move.width) - 1) << move.target)
    result = None
    for (word, distance), mask in masks.items():
        shifted = m.shift(words[word], distance)
        if result is None and not base and repeat(mask, lane) == 0xFFFFFFFF:
            result = shifted
            continue
        into = m.constant(base) if result is None else result
        result = m.lop3(shifted, m.constant(repeat(mask, lane)), into, AND_XOR)
    assert result is not None  # a code has at least one bit
    return result


def shifts(wanted: Iterable[Move]) -> int:
    """Return how many (shift, lop3) pairs `gather` needs."""
    return len({(move.word, move.target - move.source) for move in wanted})
