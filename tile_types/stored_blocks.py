"""How blocks of codes lie in files: bits of codes in planes or by look-ups, and the numbers beside them."""

from __future__ import annotations

from dataclasses import dataclass

Piece = tuple[int, int, int]
"""Some bits of an integer: the first in the block, how many, and where they belong in the integer."""

Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class Plane:
    """Bits of all codes: of each ``width`` bytes first all lowest fields, then the next.

    at: First byte in the block.
    bits: Width of a field.
    width: Bytes whose fields follow each other, a multiple of 8; 1 for fields in the order of codes.
    shift: Where the field belongs in the code.
    """

    at: int
    bits: int
    width: int
    shift: int = 0


@dataclass(frozen=True)
class Lookup:
    """Eight codes: the vectors of a grid that integers name, plus a row of another table.

    grid: The one or two integers; the second names the upper four codes.
    marks: The integer that names what is added, such as signs.
    """

    grid: tuple[Pieces, ...]
    marks: Pieces


@dataclass(frozen=True)
class Factors:
    """A float16 number times small integers: scales or minima of the parts of a block.

    number: The bits of the number.
    integers: Those of each integer.
    flip, less: What an integer becomes: ``(integer ^ flip) - less``.
    times: What the number is multiplied by first, exactly.
    """

    number: Pieces
    integers: tuple[Pieces, ...]
    flip: int = 0
    less: int = 0
    times: float = 1.0

    @property
    def is_kept(self) -> bool:
        """Whether the number times `times` is a float16 number, too: then factors are kept."""
        return abs(self.times) == 1.0


@dataclass(frozen=True)
class Octets:
    """Bytes of a block that are a number themselves, or several.

    at, count: The first, and how many.
    """

    at: int
    count: int


@dataclass(frozen=True)
class StoredBlocks:
    """How blocks of codes lie.

    nbytes, elements: Of a block.
    bits: Width of a code.
    planes, lookups: Where codes are: one of both.
    flip: Bits of codes that are inverted.
    vanishing: Code that means what code 0 means, and becomes it.
    numbers: Scales, then offsets.
    """

    nbytes: int
    elements: int
    bits: int
    planes: tuple[Plane, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    flip: int = 0
    vanishing: int | None = None
    numbers: tuple[Factors | Octets, ...] = ()
