"""Packed words of which registers of sign and magnitude are made by few shifts and masks.

A register of a 16-bit float takes the magnitude of a code to neighbouring bits of each lane and its
sign to bit 15. Rotating a word moves the bits of both lanes alike, so the bits of a word are sixteen
*slots*, each of which holds a bit for either lane; a *piece* is some bits of a code, in the slots
from which one rotation brings them to their places. Pieces of whole codes need one instruction
and a shift; not as many fit a word as it has bits for, so the rest of its slots hold parts of codes.

Packed words whose bits are sums modulo two of bits of codes.

An order of bits that merely moves them cannot bring the signs and magnitudes of four e2m1 codes to
their places in float16 by one shift each: the places of one code, shifted, do not tile a lane. Sums
can: a register is the exclusive or of one or two shifted words, masked, and packing solves for the words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, combinations_with_replacement, product
from typing import NamedTuple


@dataclass(frozen=True)
class XorPacking:
    """How registers come from words: the exclusive or of shifted words, masked.

    place, sign: Bits of a lane to which the lower three bits of a code and its top bit come.
    shifts: Of each of a word's four registers: the distances of one or two copies, shifted to the left or,
        where negative, rotated to the right.
    """

    place: int
    sign: int
    shifts: tuple[tuple[int, ...], ...]


XOR_PACKINGS = {
    "float16 crossed": XorPacking(9, 15, ((6,), (9,), (0, 2), (0, -3))),
    "bfloat16 crossed": XorPacking(6, 15, ((2,), (6,), (0, -4), (0, -6))),
}
"""Found by search: four shifts of a word and no fewer give all its bits to signs and e2m1 magnitudes."""


def sources(crossing: XorPacking, slot: int) -> list[tuple[int, int]]:
    """Return which bits of a word are summed to which bits of a register that holds codes."""
    found = []
    for element, bit, shift in product((0, 16), range(4), crossing.shifts[slot]):
        place = element + (crossing.sign if bit == 3 else crossing.place + bit) - shift
        if shift <= 0 or place >= 0:
            found.append((element + bit, place % 32))
    return found


@cache
def packed_words(crossing: XorPacking) -> tuple[dict[int, int], ...]:
    """Invert `_sources`: masks of each register's code bits by how far left they are added to the word."""
    rows: list[tuple[int, int]] = []  # bits of the word, and which code bits (32 slot + bit) they sum to
    for slot in range(4):
        sums: dict[int, int] = {}
        for bit, place in sources(crossing, slot):
            sums[bit] = sums.get(bit, 0) ^ 1 << place
        rows += [(places, 1 << (32 * slot + bit)) for bit, places in sums.items()]
    for place in range(32):
        pivot = next(index for index in range(place, 32) if rows[index][0] >> place & 1)
        rows[place], rows[pivot] = rows[pivot], rows[place]
        places, codes = rows[place]
        for index in range(32):
            if index != place and rows[index][0] >> place & 1:
                rows[index] = rows[index][0] ^ places, rows[index][1] ^ codes
    parts: tuple[dict[int, int], ...] = ({}, {}, {}, {})
    for place, (_, codes) in enumerate(rows):
        for slot, bit in product(range(4), range(32)):
            if codes >> (32 * slot + bit) & 1:
                parts[slot][place - bit] = parts[slot].get(place - bit, 0) | 1 << bit
    return parts


SLOTS = 16
"""Bits of a lane."""

SIGN = 15
"""Bit of a lane that is the sign."""

MOST_KINDS = 12
"""Kinds of words that are combined with each other."""


class Piece(NamedTuple):
    """Bits of a code that one rotation brings to their places.

    bits: Bits of the code.
    turn: By how many slots a word is rotated to the left.
    """

    bits: tuple[int, ...]
    turn: int


class Part(NamedTuple):
    """Bits that a register takes from a word: ``rotate_left(word, turn) & mask`` in each lane."""

    word: int
    turn: int
    mask: int


Word = tuple[Piece, ...]
"""The pieces of one word."""


def spread_name(place: int) -> str:
    """Return the name of the order for magnitudes whose lowest bit comes to bit ``place``."""
    return f"spread {place}"


def spread_places(bits: int) -> range:
    """Return where the magnitude of a code may begin."""
    return range(SIGN - bits + 2)


def target(bits: int, place: int, bit: int) -> int:
    """Return the bit of a lane to which a bit of a code comes."""
    return SIGN if bit == bits - 1 else place + bit


@cache
def spread(bits: int, place: int) -> tuple[tuple[Part, ...], ...]:
    """Return the parts of each of sixteen registers, of which it is the sum.

    Words of up to two kinds are tried, of all kinds that a whole code's pieces leave; the cheapest
    way to make sixteen registers of them is taken.
    """
    best: tuple[int, list[list[tuple[int, Piece]]]] | None = None
    least = {word: _least_cost(word) for word in _kinds(bits, place)}
    for first, second in combinations_with_replacement(least, 2):
        for count in range(1, bits + 1):
            if best is not None and count * least[first] + (bits - count) * least[second] >= best[0]:
                continue
            made = _registers(bits, (first,) * count + (second,) * (bits - count))
            if made is not None and (best is None or _cost(bits, place, made) < best[0]):
                best = _cost(bits, place, made), made
    assert best is not None  # words of single bits always do
    return _parts(bits, place, best[1])


def _slots(bits: int, place: int, piece: Piece) -> int:
    """Return the slots that a piece takes, as a mask."""
    return sum(1 << (target(bits, place, bit) - piece.turn) % SLOTS for bit in piece.bits)


def _shapes(bits: int) -> list[tuple[int, ...]]:
    """Return which bits of a code may be a piece of their own, largest first; single bits apart."""
    magnitude, sign = tuple(range(bits - 1)), (bits - 1,)
    found = {magnitude, (*magnitude, *sign)}
    for cut in range(1, bits - 1):
        for part in (magnitude[:cut], magnitude[cut:]):
            found |= {part, (*part, *sign)}
    return sorted((shape for shape in found if len(shape) > 1), key=lambda shape: (-len(shape), shape))


@cache
def _kinds(bits: int, place: int) -> tuple[Word, ...]:
    """Return kinds of words, of few pieces: as many whole codes as fit or one less, and parts of others."""
    whole = tuple(range(bits))
    fitting = {
        chosen: taken
        for count in range(SLOTS // bits + 1)
        for chosen in combinations(range(SLOTS), count)
        if (taken := _disjoint([_slots(bits, place, Piece(whole, turn)) for turn in chosen])) is not None
        and (not chosen or 0 in chosen)
    }
    most = max(map(len, fitting))
    kinds: list[Word] = []
    for chosen, taken in fitting.items():
        if len(chosen) >= max(1, most - 1):
            begun = tuple(Piece(whole, turn) for turn in chosen)
            kinds += [(*begun, *rest) for rest in _fillings(bits, place, taken, _shapes(bits)[1:])]
    cheap = list(_one_of_each(sorted(set(kinds), key=lambda word: (_word_cost(word), word))))
    alone = [(_cost(bits, place, made), word) for word in cheap if (made := _registers(bits, (word,) * bits))]
    best = [word for _, word in sorted(alone)[:MOST_KINDS]]
    return tuple(dict.fromkeys([*best, *cheap[:MOST_KINDS]]))


def _disjoint(masks: Sequence[int]) -> int | None:
    """Return the union of masks, or None if they overlap."""
    union = 0
    for mask in masks:
        if union & mask:
            return None
        union |= mask
    return union


def _fillings(
    bits: int, place: int, taken: int, shapes: Sequence[tuple[int, ...]], depth: int = 2
) -> Iterator[Word]:
    """Yield pieces for the free slots: up to ``depth`` of several bits, then single bits as if for signs."""
    yield tuple(Piece((bits - 1,), SIGN - slot) for slot in range(SLOTS) if not taken >> slot & 1)
    if depth:
        for index, shape in enumerate(shapes):
            for turn in range(SLOTS):
                piece = Piece(shape, turn)
                slots = _slots(bits, place, piece)
                if not slots & taken:
                    rest = _fillings(bits, place, taken | slots, shapes[index:], depth - 1)
                    yield from ((piece, *others) for others in rest)


def _word_cost(word: Word) -> int:
    """Return the instructions for the pieces of a word: a mask each, a shift for each turn."""
    turns = {piece.turn % SLOTS for piece in word}
    return len(word) + len(turns - {0})


def _least_cost(word: Word) -> int:
    """Return what a word's pieces cost at least, whatever turns its single bits take."""
    turns = {piece.turn % SLOTS for piece in word if len(piece.bits) > 1}
    return len(word) + len(turns - {0})


def _one_of_each(words: Sequence[Word]) -> Iterator[Word]:
    """Yield the first of words whose pieces have the same shapes."""
    seen = set()
    for word in words:
        shapes = tuple(sorted(piece.bits for piece in word))
        if shapes not in seen:
            seen.add(shapes)
            yield word


def _registers(bits: int, words: Sequence[Word]) -> list[list[tuple[int, Piece]]] | None:
    """Return which pieces make each register, or None if they do not make sixteen.

    Pieces of several bits are put together where they complete each other; single bits fill what is left.
    """
    pieces = [(at, piece) for at, word in enumerate(words) for piece in word]
    singles = [(at, piece) for at, piece in pieces if len(piece.bits) == 1]
    wide = sorted((x for x in pieces if len(x[1].bits) > 1), key=lambda x: -len(x[1].bits))
    left = [(x, sum(1 << bit for bit in x[1].bits)) for x in wide]
    made: list[tuple[list[tuple[int, Piece]], int]] = []
    while left:
        register, held, rest = [left[0][0]], left[0][1], []
        for other, mask in left[1:]:
            if held & mask:
                rest.append((other, mask))
            else:
                register.append(other)
                held |= mask
        made.append((register, held))
        left = rest
    made += [([], 0) for _ in range(SLOTS - len(made))]
    if len(made) > SLOTS or SLOTS * bits - sum(held.bit_count() for _, held in made) != len(singles):
        return None
    for register, held in made:
        for bit in (bit for bit in range(bits) if not held >> bit & 1):
            at, piece = singles.pop()
            register.append((at, Piece((bit,), piece.turn)))
    return [register for register, _ in made]


def _turned(bits: int, place: int, piece: Piece) -> Piece:
    """Return a single bit's piece with its own turn: it was laid where a sign would be."""
    if len(piece.bits) > 1:
        return piece
    slot = SIGN - piece.turn
    return Piece(piece.bits, (target(bits, place, piece.bits[0]) - slot) % SLOTS)


def _cost(bits: int, place: int, registers: Sequence[Sequence[tuple[int, Piece]]]) -> int:
    """Return the instructions for all registers."""
    pieces = [(at, _turned(bits, place, piece)) for register in registers for at, piece in register]
    return len(pieces) + len({(at, piece.turn % SLOTS) for at, piece in pieces if piece.turn % SLOTS})


def _parts(
    bits: int, place: int, registers: Sequence[Sequence[tuple[int, Piece]]]
) -> tuple[tuple[Part, ...], ...]:
    """Return the registers' parts; a word that only moves right is rotated by half a word more.

    So no wanted bit crosses the ends of the word, and the rotation is a shift.
    """
    masks: dict[tuple[int, int], int] = {}
    found: list[list[Part]] = []
    for register in registers:
        parts = []
        for at, piece in register:
            turned = _turned(bits, place, piece)
            mask = sum(1 << target(bits, place, bit) for bit in turned.bits)
            key = at, turned.turn % SLOTS
            masks[key] = masks.get(key, 0) | mask
            parts.append(Part(*key, mask))
        found.append(parts)
    return tuple(
        tuple(part._replace(turn=_turn(part.turn, masks[part.word, part.turn])) for part in parts)
        for parts in found
    )


def _turn(turn: int, wanted: int) -> int:
    """Return the rotation of a whole word that brings bits of both lanes from their slots."""
    return turn + SLOTS if turn and wanted < 1 << turn else turn


def spread_sources(bits: int, place: int, register: int) -> list[tuple[int, int, int]]:
    """Return ``(bit of the register, word, bit of the word)`` for both codes, each in its lane."""
    found = []
    for word, turn, mask in spread(bits, place)[register]:
        for bit in range(bits):
            at = target(bits, place, bit)
            if mask >> at & 1:
                found += [(lane + bit, word, (lane + at - turn) % 32) for lane in (0, 16)]
    return found
