"""Where the bits of packed codes lie in a thread's words, and moving them in few instructions.

The layout is `schedules.fragments.FragmentLayout`, `fields` says where it has the bits of a register.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ladder.lower.gpu.machine import AND_XOR, Machine, Word, repeat
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
    """Return ``base`` (a whole word) xor the moved bits.

    One shift and one lop3 per distance, or one product for all of a word where that is less.
    """
    masks: dict[int, dict[int, int]] = {}
    for move in wanted:
        of_word = masks.setdefault(move.word, {})
        distance, mask = move.target - move.source, ((1 << move.width) - 1) << move.target
        of_word[distance] = of_word.get(distance, 0) | mask
    result = None
    for shifted, mask in _moved(m, words, masks, lane):
        if result is None and not base and repeat(mask, lane) == 0xFFFFFFFF:
            result = shifted
            continue
        into = m.constant(base) if result is None else result
        result = m.lop3(shifted, m.constant(repeat(mask, lane)), into, AND_XOR)
    assert result is not None  # a code has at least one bit
    return result


def _moved(
    m: Machine, words: Sequence[Word], masks: Mapping[int, Mapping[int, int]], lane: int
) -> Iterator[tuple[Word, int]]:
    """Yield words with moved bits, and where the wanted ones are in a lane."""
    for word, places in masks.items():
        right = max(0, -min(places))
        shifted = sum(distance != 0 for distance in places)
        sources = sum(mask >> (distance + right) for distance, mask in places.items())
        if 3 + (right > 0) < len(places) + shifted and _copies_apart(places, right, sources, lane):
            kept = m.mask(m.shift(words[word], -right), repeat(sources, lane))
            yield m.multiply(kept, sum(1 << (distance + right) for distance in places)), sum(places.values())
            continue
        for distance, mask in places.items():
            yield m.shift(words[word], distance), mask


def _copies_apart(places: Mapping[int, int], right: int, sources: int, lane: int) -> bool:
    """Tell whether a sum of shifted copies of ``sources`` has each wanted bit as it is in one copy.

    No other copy may have a bit there, nor may a carry of the bits below arrive.
    """
    wanted, bits, carry = repeat(sum(places.values()), lane), repeat(sources, lane), 0
    for at in range(32):
        copies = sum(bits << (distance + right) >> at & 1 for distance in places) + carry
        if wanted >> at & 1 and copies != 1:
            return False
        carry = copies // 2
    return True


def shifts(wanted: Iterable[Move]) -> int:
    """Return how many (shift, lop3) pairs `gather` needs."""
    return len({(move.word, move.target - move.source) for move in wanted})
