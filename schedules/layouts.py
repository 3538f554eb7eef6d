"""Orders of packed bits: which bits of a thread's words are the codes of an operand register."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from schedules.spread import XOR_PACKINGS, packed_words, sources, spread_name, spread_places, spread_sources
from tile_types.errors import DTypeError, ShapeError

if TYPE_CHECKING:
    pass

TILE = 64
"""Rows and columns of one packed tile."""

THREADS = 128
"""Threads that own one packed tile."""

LANES = {"float16": 16, "bfloat16": 16, "int8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8}
"""Bits of one operand element of each core type."""

ORDERS = (
    "lanes",
    "dense",
    "bytes",
    "float16 signs",
    "bfloat16 signs",
    "float16 crossed",
    "bfloat16 crossed",
    "pairs",
    "halves",
)
"""Orders of the bits in words.

``lanes``: each code in the lane that its element has in a register; odd widths in planes.
``dense`` (odd widths): as many whole codes as fit a lane; the rest of the lanes hold the last codes.
``... signs``: top bits of four codes of a lane apart from the others, so that few instructions
bring signs and magnitudes to their places in that type (`SIGN_PLACES`).
``... crossed``: bits are sums modulo two of bits of codes, so that one instruction on two shifted words
makes a register of that type (`XOR_PACKINGS`).
``bytes`` (5 to 7 bits): as ``dense`` has it in lanes of 8 bits, so that most codes lie in bytes of their own.
``pairs`` (3 and 4 bits): as ``dense`` has it in lanes of 4 bits, so that both codes of a register, which
select a pair of values from a table, are in one byte.
``halves`` (8 bits): both codes of a register side by side, in half of a word.
The orders of signs and of XOR packing are for four-bit codes; all but the first two for 16-bit cores.
Further orders of 3 to 8 bits, one for each place of the magnitude in a 16-bit float, are in `SPREAD`.
"""

SPREAD = {spread_name(place): place for place in spread_places(3)}
"""Orders of `schedules.spread`, and where the magnitude begins."""

ODD_BITS = (3, 5, 6, 7)

BYTE_BITS = (5, 6, 7)
"""Widths of codes that can lie in order ``bytes``."""

NIBBLE = 4

PAIR_BITS = (3, 4)
"""Widths of codes that can lie in order ``pairs``."""

SLOTS = {"pairs": NIBBLE, "halves": 8}
"""Orders in which both codes of a register lie side by side, and the bits that each has for itself."""

SIGN_PLACES: dict[str, tuple[tuple[tuple[int, int, int], ...], ...]] = {
    "float16 signs": (
        ((0, 3, 0), (14, 1, 3)),
        ((3, 3, 0), (13, 1, 3)),
        ((6, 3, 0), (12, 1, 3)),
        ((9, 3, 0), (15, 1, 3)),
    ),
    "bfloat16 signs": (
        ((0, 3, 0), (9, 1, 3)),
        ((3, 3, 0), (12, 1, 3)),
        ((6, 3, 0), (15, 1, 3)),
        ((13, 2, 0), (10, 1, 2), (11, 1, 3)),
    ),
}
"""Parts of each of four codes in a lane: position, width, and lowest bit of the code.

A shift brings codes to their places in the type whose signs are as far from the rest as that type's
sign is from its last exponent bits. The parts of others are far enough apart that one product with a
sum of powers of two brings them there (`ladder.lower.gpu.recipes.gather`).
"""

PACKABLE_BITS = (1, 2, 3, 4, 5, 6, 7, 8, 16)

OPERAND_EXPONENT = 12
"""Scaled weights of a row stay below 2**12: far from float16's overflow and its subnormals."""

SCALE_EXPONENT = -8
"""Group scales stay below 2**-8: float16 holds them times 2**24, the inverse of its smallest number."""

EXPONENT_GROUP = 32
"""Elements of K per scale where kernels read exponents instead of scales."""

EXPONENTS = 4
"""Exponents in a word: those of neighbouring groups, the first one lowest."""


@dataclass(frozen=True)
class Exponents:
    """How a byte stands for a power of two: ``byte`` is the exponent field of ``scale * 2**raised``.

    bias, mantissa_bits: Of the 16-bit type whose exponent field it is.
    raised: The largest scale that packing leaves, 2**-9, becomes nearly the largest number.
    lowest: Smaller scales become this one, so that products with powers of two of decoders stay normal
        numbers.
    """

    bias: int
    mantissa_bits: int
    raised: int
    lowest: int

    @property
    def highest(self) -> int:
        """The largest byte."""
        return SCALE_EXPONENT - 1 + self.raised + self.bias


EXPONENT_FORMS = {"float16": Exponents(15, 10, 24, 13), "bfloat16": Exponents(127, 7, 126, 127)}
"""Of 16-bit cores. float16 keeps 17 powers of two below a row's largest scale, bfloat16 117."""


def lane_of(core: str) -> int:
    """Return the bits of one operand element of ``core``.

    Raises DTypeError if GPU tensor cores have no such operand type.
    """
    if core not in LANES:
        raise DTypeError(
            f"GPU tensor cores multiply quantized weights by {', '.join(LANES)}, not by {core}: "
            "convert the model or the activations first, as by model.to(torch.bfloat16)"
        )
    return LANES[core]


def padded(extent: int) -> int:
    """Round ``extent`` up to whole packed tiles."""
    return -(-extent // TILE) * TILE


def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """Split a ``bits``-wide code into planes of power-of-two width.

    Returns: ``(width, shift)`` of each plane, widest first; ``shift`` is the plane's lowest bit in the code.
    """
    result, shift = [], 0
    for width in (16, 8, 4, 2, 1):
        while bits - shift >= width:
            result.append((width, shift))
            shift += width
    return tuple(result)


class Field(NamedTuple):
    """Bits ``[shift, shift+width)`` of a register's codes, at ``position`` of each lane of a word."""

    word: int
    position: int
    width: int
    shift: int


class Piece(NamedTuple):
    """The bits ``mask`` of a register, ``left`` further left in a word (right where negative).

    The register holds each code in its lane.
    """

    word: int
    mask: int
    left: int


def fields(bits: int, lane: int, register: int, order: str = "lanes") -> tuple[Field, ...]:
    """Return where the codes of one register lie, widest part first, in an order that keeps lanes."""
    if order in SIGN_PLACES:
        word, slot = divmod(register, 4)
        return tuple(Field(word, *part) for part in SIGN_PLACES[order][slot])
    if order == "dense":
        return _widest_first(_dense(bits, lane, bits, register))
    if order == "bytes":
        odd = register % 2
        held = _dense(bits, 8, bits, register // 2)
        return _widest_first(field._replace(position=8 * odd + field.position) for field in held)
    found, first = [], 0
    for width, shift in planes(bits):
        slots = lane // width
        found.append(Field(first + register // slots, width * (register % slots), width, shift))
        first += width
    return tuple(found)


def _widest_first(fields: Iterable[Field]) -> tuple[Field, ...]:
    return tuple(sorted(fields, key=lambda field: -field.width))


def _dense(bits: int, lane: int, words: int, register: int) -> Iterator[Field]:
    """Yield the parts of a register's codes in ``words`` words, lowest bits first.

    Each lane holds as many whole codes as fit; the rest of the lanes hold the codes of the last registers.
    """
    whole = lane // bits
    if register < words * whole:
        yield Field(register // whole, bits * (register % whole), bits, 0)
        return
    rest = lane - bits * whole
    first = (register - words * whole) * bits
    done = 0
    while done < bits:
        word, at = divmod(first + done, rest)
        width = min(rest - at, bits - done)
        yield Field(word, bits * whole + at, width, done)
        done += width


def code_fields(bits: int, lane: int, register: int, element: int, order: str) -> tuple[Field, ...]:
    """Return where one code lies, as if a word had one lane; any order whose words hold bits of codes."""
    if order not in SLOTS:
        held = fields(bits, lane, register, order)
        return tuple(field._replace(position=field.position + lane * element) for field in held)
    slot = SLOTS[order]
    registers = 32 // (2 * slot)
    place = slot * (2 * (register % registers) + element)
    inside = _dense(bits, slot, bits, register // registers)
    return _widest_first(field._replace(position=place + field.position) for field in inside)


def _slot_pieces(bits: int, register: int, order: str) -> tuple[Piece, ...]:
    """Return the pieces of a register in an order of `SLOTS`."""
    return tuple(
        Piece(word, ((1 << width) - 1) << (16 * element + shift), position - shift - 16 * element)
        for element in (0, 1)
        for word, position, width, shift in code_fields(bits, 16, register, element, order)
    )


def _spread_pieces(bits: int, place: int, register: int) -> tuple[Piece, ...]:
    """Return the pieces of a register in an order of `SPREAD`."""
    masks: dict[tuple[int, int], int] = {}
    for bit, word, at in spread_sources(bits, place, register):
        masks[word, at - bit] = masks.get((word, at - bit), 0) | 1 << bit
    return tuple(Piece(word, mask, left) for (word, left), mask in masks.items())


def orders(bits: int, lane: int) -> tuple[str, ...]:
    """Return the orders that codes of a width can have."""
    spread = tuple(map(spread_name, spread_places(bits))) if lane == 16 and 3 <= bits <= 8 else ()
    if bits == 4 and lane == 16:
        return (*(order for order in ORDERS if order not in ("dense", "bytes", "halves")), *spread)
    found = ["lanes"]
    found += ["dense"] if bits in ODD_BITS else []
    found += ["bytes"] if bits in BYTE_BITS and lane == 16 else []
    found += ["pairs"] if bits in PAIR_BITS and lane == 16 else []
    found += ["halves"] if bits == SLOTS["halves"] and lane == 16 else []
    return (*found, *spread)


@lru_cache(maxsize=256)
def pieces(bits: int, lane: int, order: str) -> tuple[tuple[Piece, ...], ...]:
    """Return the pieces of every register, of which words are the exclusive or."""
    if order in XOR_PACKINGS:
        parts = packed_words(XOR_PACKINGS[order])
        return tuple(
            tuple(Piece(index // 4, mask, left) for left, mask in parts[index % 4].items())
            for index in range(lane)
        )
    if order in SLOTS:
        return tuple(_slot_pieces(bits, index, order) for index in range(lane))
    if order in SPREAD:
        return tuple(_spread_pieces(bits, SPREAD[order], index) for index in range(lane))
    every = sum(1 << at for at in range(0, 32, lane))
    return tuple(
        tuple(
            Piece(field.word, every * (((1 << field.width) - 1) << field.shift), field.position - field.shift)
            for field in fields(bits, lane, index, order)
        )
        for index in range(lane)
    )


@lru_cache(maxsize=256)
def taken(bits: int, lane: int, order: str) -> tuple[tuple[Piece, ...], ...]:
    """Return the pieces of words of which every register is the exclusive or."""
    if order not in XOR_PACKINGS:
        return pieces(bits, lane, order)
    parts = [sources(XOR_PACKINGS[order], slot) for slot in range(4)]
    return tuple(
        tuple(Piece(index // 4, 1 << bit, word_bit - bit) for bit, word_bit in parts[index % 4])
        for index in range(lane)
    )


LEAST_GROUP = 16
"""Elements that a scale of the GPUs' layout serves at least; it serves a multiple of that."""


def packed_group(group_size: int, k: int) -> int:
    """Return how many elements along K one packed scale serves.

    Multiples of 64 stay; smaller groups become 32 or 16 (their scales are repeated);
    a group that covers all of K becomes the padded K.

    Raises ShapeError if the group is not a multiple of 16 and does not cover K.
    """
    if group_size >= k:
        return padded(k)
    for granule in (64, 32, LEAST_GROUP):
        if group_size % granule == 0:
            return group_size if granule == 64 else granule
    raise ShapeError(
        f"group_size {group_size} does not fit the GPU layout; use a multiple of 16 or one scale per row"
    )
