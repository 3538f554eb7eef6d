"""The block types of GGUF: each a row that says where a block's codes, scales and offsets are.

Sources: ``ggml-common.h`` and ``ggml-quants.c`` of llama.cpp, ``gguf/quants.py``. All arithmetic of scales is
exact in float32, so dequantization in float32 rounds at most once per element, as ggml's does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ladder.formats.gguf_grids import grid
from tile_types import get_type
from tile_types.errors import CheckpointError
from tile_types.stored_blocks import Factors, Lookup, Octets, Pieces, Plane, StoredBlocks

if TYPE_CHECKING:
    import torch

Spots = tuple[tuple[str, int, int, int], ...]
"""Where an integer is: field, first bit in it, how many, and where they belong."""

Table = npt.NDArray[np.uint64]
"""Eight codes a row."""


@dataclass(frozen=True)
class Scales:
    """Scales or minima of the parts of a block: a float16 number times integers, see `Factors`."""

    number: Spots
    integers: tuple[Spots, ...]
    flip: int = 0
    less: int = 0
    times: float = 1.0


@dataclass(frozen=True)
class Vectors:
    """Codes by look-ups, eight at a time.

    grid: Name of the grid.
    indices: Of each eight codes the one or two integers that name its vectors.
    marks: Of each eight codes the integer that names a row of ``table``, which is added.
    """

    grid: str
    indices: tuple[tuple[Spots, ...], ...]
    marks: tuple[Spots, ...]
    table: Callable[[], Table]


@dataclass(frozen=True)
class BlockType:
    """How one type of blocks is laid out.

    name: In lower case.
    fields: numpy's description of its bytes.
    element: Our type of a code.
    codes: Where codes are: of each plane the field, bits, width and shift (`Plane`), or look-ups.
    numbers: Scales, and offsets: fields, or what the kernel computes, as float32.
    scale: Type of the scales and offsets.
    flip, vanishing: See `StoredBlocks`.
    changed: What becomes of the bytes of scales; raises CheckpointError for what has no meaning.
    before: Rewrites blocks as those of TQ2_0, whose form is then the kernel's.
    """

    name: str
    elements: int
    fields: npt.DTypeLike
    element: str
    codes: tuple[tuple[str, int, int, int], ...] | Vectors
    numbers: tuple[str | Scales, ...] = ("d",)
    scale: str = "float32"
    flip: int = 0
    vanishing: int | None = None
    changed: Callable[[torch.Tensor], torch.Tensor] | None = None
    before: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return np.dtype(self.fields).itemsize

    @cached_property
    def form(self) -> StoredBlocks:
        """What the kernel that takes blocks apart is made of."""
        if self.before is not None:
            return BLOCKS[TQ2_0].form

        planes: tuple[Plane, ...] = ()
        lookups: tuple[Lookup, ...] = ()
        if isinstance(self.codes, Vectors):
            pairs = zip(self.codes.indices, self.codes.marks, strict=True)
            lookups = tuple(
                Lookup(tuple(map(self._pieces, found)), self._pieces(marks)) for found, marks in pairs
            )
        else:
            planes = tuple(Plane(self._first(field), *rest) for field, *rest in self.codes)
        return StoredBlocks(
            *(self.nbytes, self.elements, get_type(self.element).elem_bits, planes, lookups),
            flip=self.flip,
            vanishing=self.vanishing,
            numbers=tuple(self._number(part) for part in self.numbers),
        )

    def tables(self) -> tuple[Table, Table]:
        """Return the tables of look-ups; of one row where there are none."""
        if isinstance(self.codes, Vectors):
            return eight_codes(grid(self.codes.grid)), self.codes.table()
        return np.zeros(1, np.uint64), np.zeros(1, np.uint64)

    def _first(self, field: str) -> int:
        described = np.dtype(self.fields).fields
        assert described is not None
        return described[field][1]

    def _pieces(self, spots: Spots) -> Pieces:
        return tuple((8 * self._first(field) + first, width, left) for field, first, width, left in spots)

    def _number(self, part: str | Scales) -> Factors | Octets:
        if isinstance(part, str):
            return Octets(self._first(part), np.dtype(self.fields)[part].itemsize)
        integers = tuple(map(self._pieces, part.integers))
        return Factors(self._pieces(part.number), integers, part.flip, part.less, part.times)


def eight_codes(codes: npt.NDArray[Any]) -> Table:
    """Return rows of up to eight codes as an integer each, the first lowest."""
    shifts = np.arange(0, 8 * codes.shape[1], 8, dtype=np.uint64)
    rows: Table = np.bitwise_or.reduce(codes.astype(np.uint64) << shifts, axis=1)
    return rows


def signs(bit: int, count: int = 256) -> Table:
    """Return the signs that integers mean, at a bit of each code; of seven, the eighth makes them even."""
    each = [index if count == 256 else index | (index.bit_count() & 1) << 7 for index in range(count)]
    return eight_codes(np.array([[(found >> at & 1) << bit for at in range(8)] for found in each]))


def steps() -> Table:
    """Return what is added to the levels of IQ1 that are not shifted down, and to those that are."""
    return eight_codes(np.array([[3] * 8, [0] * 8]))


def each(count: int, *spots: Callable[[int], tuple[str, int, int, int]]) -> tuple[Spots, ...]:
    """Return where each of some integers is."""
    return tuple(tuple(spot(at) for spot in spots) for at in range(count))


def one(found: Iterable[Spots]) -> tuple[tuple[Spots, ...], ...]:
    """Return look-ups of one vector each."""
    return tuple((spots,) for spots in found)


def two(found: tuple[Spots, ...]) -> tuple[tuple[Spots, ...], ...]:
    """Return look-ups of two consecutive vectors each."""
    return tuple(zip(found[::2], found[1::2], strict=True))


def half(name: str) -> Spots:
    """Return a float16 field as the number of scales."""
    return ((name, 0, 16, 0),)


def six_bit(minimum: int) -> tuple[Spots, ...]:
    """Return where the 8 scales, or minima, of 6 bits are that Q4_K and Q5_K pack into 12 bytes."""
    low, high = 32 * minimum, 64 + 4 * minimum
    whole = each(4, lambda at: ("scales", low + 8 * at, 6, 0))
    halves = each(
        4, lambda at: ("scales", high + 8 * at, 4, 0), lambda at: ("scales", low + 8 * at + 6, 2, 4)
    )
    return whole + halves


def odd(number: Spots, times: float, *integers: Spots) -> tuple[Scales]:
    """Return scales that are ``2 * s + 1`` times a number, of integers whose lowest bit is left free."""
    return (Scales(number, integers, flip=1, times=times),)


D = half("d")
SIX_BIT = (Scales(D, six_bit(0)), Scales(half("dmin"), six_bit(1), times=-1.0))
FOUR_BIT = (
    Scales(D, each(16, lambda at: ("scales", 8 * at, 4, 0))),
    Scales(half("dmin"), each(16, lambda at: ("scales", 8 * at + 4, 4, 0)), times=-1.0),
)
Q3 = each(
    16,
    lambda at: ("scales", 8 * (at % 8) + 4 * (at // 8), 4, 0),
    lambda at: ("scales", 64 + 8 * (at % 4) + 2 * (at // 4), 2, 4),
)
Q6 = each(16, lambda at: ("scales", 8 * at, 8, 0))
IQ4 = each(8, lambda at: ("scales_l", 4 * at, 4, 0), lambda at: ("scales_h", 2 * at, 2, 4))
QUARTERS = odd(D, 0.125, *each(16, lambda at: ("scales", 4 * at, 4, 1)))
MANY = each(16, lambda at: ("scales", 16 * (at // 4) + 3 * (at % 4), 3, 1))
SPREAD: Spots = tuple(("scales", 16 * at + 12, 4, 4 * at) for at in range(4))
"""IQ1_M's number: four bits in each of four words."""


def no_nan(exponents: torch.Tensor) -> torch.Tensor:
    """Return exponents of MXFP4's scales."""
    if (exponents == 255).any():
        raise CheckpointError("a block has the exponent 255, which ggml and OCP read differently")
    return exponents


def unsigned(scales: torch.Tensor) -> torch.Tensor:
    """Return the scales of NVFP4; ggml takes NaN for 0."""
    if (scales > 127).any():
        raise CheckpointError("a scale has a sign, which unsigned e4m3 has not")
    return scales.masked_fill(scales == 127, 0)


def as_tq2(octets: torch.Tensor) -> torch.Tensor:
    """Return TQ1_0's blocks as TQ2_0's: digits are at the high end of bytes times powers of 3."""
    import torch

    digits = [
        (octets[..., first : first + count].int() * 3**digit & 255) * 3 >> 8
        for first, count, most in ((0, 32, 5), (32, 16, 5), (48, 4, 4))
        for digit in range(most)
    ]
    slots = torch.cat(digits, -1).view(*octets.shape[:-1], 2, 4, 32)
    packed = (slots << torch.tensor([0, 2, 4, 6], dtype=torch.int32)[:, None]).sum(-2).flatten(-2)
    return torch.cat([packed.to(torch.uint8), octets[..., 52:]], -1)


HALF, LEAST = ("d", "<f2"), ("dmin", "<f2")


def _k(*fields: Any) -> npt.DTypeLike:
    return np.dtype(list(fields))


def _octets(name: str, count: int) -> tuple[str, str, int]:
    return name, "u1", count


F16 = "float16"
QS16, QS64, QS128 = (_octets("qs", count) for count in (16, 64, 128))
LOW, HIGH, BYTES = ("qs", 4, 16, 0), ("qh", 1, 1, 4), (("qs", 8, 32, 0),)

BLOCKS = {
    2: BlockType("q4_0", 32, _k(HALF, QS16), "int4", (LOW,), scale=F16, flip=8),
    3: BlockType("q4_1", 32, _k(HALF, ("m", "<f2"), QS16), "uint4", (LOW,), ("d", "m"), F16),
    6: BlockType("q5_0", 32, _k(HALF, _octets("qh", 4), QS16), "int5", (LOW, HIGH), scale=F16, flip=16),
    7: BlockType(
        *("q5_1", 32, _k(HALF, ("m", "<f2"), _octets("qh", 4), QS16), "uint5", (LOW, HIGH), ("d", "m"), F16)
    ),
    8: BlockType("q8_0", 32, _k(HALF, ("qs", "i1", 32)), "int8", (("qs", 8, 32, 0),), scale=F16),
    9: BlockType(
        "q8_1", 32, _k(HALF, ("s", "<f2"), ("qs", "i1", 32)), "int8", (("qs", 8, 32, 0),), scale=F16
    ),
    10: BlockType(
        *("q2_k", 256, _k(_octets("scales", 16), QS64, HALF, LEAST), "uint2", (("qs", 2, 32, 0),), FOUR_BIT)
    ),
    11: BlockType(
        *("q3_k", 256, _k(_octets("hmask", 32), QS64, _octets("scales", 12), HALF), "int3"),
        (("qs", 2, 32, 0), ("hmask", 1, 32, 2)),
        (Scales(D, Q3, less=32),),
        flip=4,
    ),
    12: BlockType(
        *("q4_k", 256, _k(HALF, LEAST, _octets("scales", 12), QS128), "uint4", (("qs", 4, 32, 0),), SIX_BIT)
    ),
    13: BlockType(
        *("q5_k", 256, _k(HALF, LEAST, _octets("scales", 12), _octets("qh", 32), QS128), "uint5"),
        (("qs", 4, 32, 0), ("qh", 1, 32, 4)),
        SIX_BIT,
    ),
    14: BlockType(
        *("q6_k", 256, _k(_octets("ql", 128), _octets("qh", 64), ("scales", "i1", 16), HALF), "int6"),
        (("ql", 4, 64, 0), ("qh", 2, 32, 4)),
        (Scales(D, Q6, flip=128, less=128),),
        flip=32,
    ),
    15: BlockType("q8_k", 256, _k(("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16)), "int8", BYTES),
    16: BlockType(
        *("iq2_xxs", 256, _k(HALF, ("qs", "<u4", 16)), "iq2"),
        Vectors(
            "iq2_xxs",
            one(each(32, lambda at: ("qs", 64 * (at // 4) + 8 * (at % 4), 8, 0))),
            each(32, lambda at: ("qs", 64 * (at // 4) + 32 + 7 * (at % 4), 7, 0)),
            lambda: signs(2, 128),
        ),
        odd(D, 0.125, *each(8, lambda at: ("qs", 64 * at + 60, 4, 1))),
    ),
    17: BlockType(
        *("iq2_xs", 256, _k(HALF, ("qs", "<u2", 32), _octets("scales", 8)), "iq2"),
        Vectors(
            "iq2_xs",
            one(each(32, lambda at: ("qs", 16 * at, 9, 0))),
            each(32, lambda at: ("qs", 16 * at + 9, 7, 0)),
            lambda: signs(2, 128),
        ),
        QUARTERS,
    ),
    18: BlockType(
        *("iq3_xxs", 256, _k(HALF, QS64, ("gas", "<u4", 8)), "iq3"),
        Vectors(
            "iq3_xxs",
            two(each(64, lambda at: ("qs", 8 * at, 8, 0))),
            each(32, lambda at: ("gas", 32 * (at // 4) + 7 * (at % 4), 7, 0)),
            lambda: signs(3, 128),
        ),
        odd(D, 0.25, *each(8, lambda at: ("gas", 32 * at + 28, 4, 1))),
    ),
    19: BlockType(
        *("iq1_s", 256, _k(HALF, _octets("qs", 32), ("qh", "<u2", 8)), "iq1"),
        Vectors(
            "iq1_s",
            one(
                each(
                    32,
                    lambda at: ("qs", 8 * at, 8, 0),
                    lambda at: ("qh", 16 * (at // 4) + 3 * (at % 4), 3, 8),
                )
            ),
            each(32, lambda at: ("qh", 16 * (at // 4) + 15, 1, 0)),
            steps,
        ),
        odd(D, 1.0, *each(8, lambda at: ("qh", 16 * at + 12, 3, 1))),
    ),
    20: BlockType("iq4_nl", 32, _k(HALF, QS16), "iq4", (LOW,), scale=F16),
    21: BlockType(
        *("iq3_s", 256),
        _k(HALF, QS64, _octets("qh", 8), _octets("signs", 32), _octets("scales", 4)),
        "iq3_s",
        Vectors(
            "iq3_s",
            two(each(64, lambda at: ("qs", 8 * at, 8, 0), lambda at: ("qh", at, 1, 8))),
            each(32, lambda at: ("signs", 8 * at, 8, 0)),
            lambda: signs(3),
        ),
        odd(D, 1.0, *each(8, lambda at: ("scales", 4 * at, 4, 1))),
    ),
    22: BlockType(
        *("iq2_s", 256),
        _k(HALF, _octets("qs", 32), _octets("signs", 32), _octets("qh", 8), _octets("scales", 8)),
        "iq2",
        Vectors(
            "iq2_s",
            one(each(32, lambda at: ("qs", 8 * at, 8, 0), lambda at: ("qh", 2 * at, 2, 8))),
            each(32, lambda at: ("signs", 8 * at, 8, 0)),
            lambda: signs(2),
        ),
        QUARTERS,
    ),
    23: BlockType(
        *("iq4_xs", 256, _k(HALF, ("scales_h", "<u2"), _octets("scales_l", 4), QS128), "iq4", (LOW,)),
        (Scales(D, IQ4, less=32),),
    ),
    29: BlockType(
        *("iq1_m", 256, _k(_octets("qs", 32), _octets("qh", 16), ("scales", "<u2", 4)), "iq1"),
        Vectors(
            "iq1_s",
            one(each(32, lambda at: ("qs", 8 * at, 8, 0), lambda at: ("qh", 4 * at, 3, 8))),
            each(32, lambda at: ("qh", 4 * at + 3, 1, 0)),
            steps,
        ),
        odd(SPREAD, 1.0, *MANY),
    ),
    34: BlockType(
        *("tq1_0", 256, _k(_octets("qs", 48), _octets("qh", 4), HALF), "ternary", ()),
        scale=F16,
        before=as_tq2,
    ),
    35: BlockType("tq2_0", 256, _k(QS64, HALF), "ternary", (("qs", 2, 32, 0),), scale=F16),
    39: BlockType(
        *("mxfp4", 32, _k(("e", "u1"), QS16), "fp4_e2m1", (LOW,), ("e",), "e8m0"),
        vanishing=8,
        changed=no_nan,
    ),
    40: BlockType(
        *("nvfp4", 64, _k(_octets("d", 4), _octets("qs", 32)), "fp4_e2m1", (("qs", 4, 8, 0),)),
        scale="fp8_e4m3",
        vanishing=8,
        changed=unsigned,
    ),
    41: BlockType("q1_0", 128, _k(HALF, QS16), "binary", (("qs", 1, 1, 0),), scale=F16),
    42: BlockType("q2_0", 64, _k(HALF, QS16), "q2", (("qs", 2, 1, 0),), scale=F16),
}
"""ggml's number of a type -> its row."""

TQ2_0 = 35
