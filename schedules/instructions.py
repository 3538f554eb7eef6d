"""Instructions that transform `use` may name: what they multiply, and the nest of slices that hosts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    """``acc[m, n] += x[m, k] · w[n, k]`` on one register tile.

    operand, weight, accumulator: Types of x, w and the sum.
    rows, columns, depth: Extents m, n and k of one instruction.
    nest: Axes of the slices around it, outermost first.
    tiles: Operands are tile registers, of which there are 4 for sums, 2 for x and 2 for w; otherwise vector
        registers, of which the device says how many bytes there are.
    most_bits: Widest stored code of w whose products it adds without loss.
    split: How x becomes several numbers, one of `SPLITS`; empty: it is multiplied as it is.
    recipe: The one of `RECIPES` that makes its weights; empty: any that makes their type but `BYTE_RECIPES`.
    skeleton: What emits its nest (`ladder.lower.build.SKELETONS`).
    """

    operand: str
    weight: str
    accumulator: str
    rows: int
    columns: int
    depth: int
    nest: str
    tiles: bool = False
    most_bits: int = 32
    split: str = ""
    recipe: str = ""
    skeleton: str = "cpu"

    def sums(self, activation: str) -> int:
        """Return the sums of each row and column of vector registers."""
        pieces = pieces_of(activation, self.split) if self.split else 1
        return pieces + (self.recipe == BYTE_PAIRS)  # products of digits are worth as many powers of 256


_DOT, _TILES = "m n m g k", "m n g k m k"

INSTRUCTIONS: Mapping[str, Instruction] = {
    "amx_int8": Instruction("int8", "uint8", "int32", 16, 16, 64, _TILES, tiles=True),
    "amx_bf16": Instruction("bfloat16", "bfloat16", "float32", 16, 16, 32, _TILES, tiles=True),
    "amx_bf16_terms": Instruction(
        "bfloat16", "bfloat16", "float32", 16, 16, 32, _TILES, tiles=True, split="terms"
    ),
    "avx512_vnni": Instruction("int8", "uint8", "int32", 1, 16, 4, _DOT),
    "avx2_maddubs": Instruction("int8", "uint8", "int32", 1, 16, 4, _DOT, most_bits=7),
    "avx512_bf16": Instruction("bfloat16", "bfloat16", "float32", 1, 16, 2, _DOT),
    "avx512_vnni16": Instruction("float32", "int16", "float32", 1, 16, 2, _DOT, most_bits=8, split="digits"),
    "avx512_vnni8": Instruction(
        "float32", "float32", "float32", 1, 16, 4, _DOT, most_bits=8, split="bytes", recipe="bytes"
    ),
    "avx512_vnni8x2": Instruction(
        "float32", "float32", "float32", 1, 16, 4, _DOT, most_bits=8, split="two_bytes", recipe="bytes"
    ),
    "avx512_vnni8w2": Instruction(
        "float32", "float32", "float32", 1, 16, 4, _DOT, most_bits=8, split="two_bytes", recipe="byte_pairs"
    ),
    "fma": Instruction("float32", "float32", "float32", 1, 16, 1, _DOT),
}
"""By the names that devices give their cores; 16 columns are what narrower machines split."""

LARGEST_SUM = (1 << 15) - 1
"""Largest sum that the 16-bit lanes of ``vpmaddubsw`` hold."""


def steps_in_16_bits(bits: int) -> int:
    """Return how many pairs of products of int8 and codes of some bits a 16-bit lane adds without loss."""
    return LARGEST_SUM // (2 * 128 * ((1 << bits) - 1))


DIGITS, BYTE_DIGITS, TWO_BYTES, TERMS = "digits", "bytes", "two_bytes", "terms"
"""How x becomes several numbers: digits of integers, of 16 bits or of 8, which have a sum each, or bfloat16
terms. Weights become bytes too, each less the smallest value of their type (`tile_types.forms.Bytes`)."""

BYTE_PAIRS = "byte_pairs"
"""The recipe of weights of two bytes."""

BYTE_RECIPES = (BYTE_DIGITS, BYTE_PAIRS)
"""Recipes of weights that digits of eight bits multiply."""

DIGIT_BITS: Mapping[str, int] = {DIGITS: 16, BYTE_DIGITS: 8, TWO_BYTES: 8}
"""Bits of a digit."""

BYTE_SPLITS = (BYTE_DIGITS, TWO_BYTES)
"""Conversions whose digits multiply weights that are bytes."""

SPLITS: Mapping[str, Mapping[str, int]] = {
    DIGITS: {"float16": 2, "bfloat16": 2},
    BYTE_DIGITS: {"float16": 3, "bfloat16": 3, "float32": 3},
    TWO_BYTES: {"float16": 2, "bfloat16": 2},
    TERMS: {"float16": 2, "float32": 3},
}
"""Conversion -> type of x -> numbers that an element becomes."""


def pieces_of(activation: str, split: str) -> int:
    """Return how many numbers an element of x becomes."""
    return SPLITS[split][activation]


def columns_in_32_bits(largest: float, split: str = DIGITS) -> int:
    """Return how many products of a digit and a weight of at most some magnitude 32 bits add without loss."""
    return ((1 << 31) - 1) // max(1, int((1 << (DIGIT_BITS[split] - 1)) * largest))


SUM_TILES, OPERAND_TILES = 4, 2
"""Tile registers for sums, and for each operand."""


@dataclass(frozen=True)
class Recipe:
    """How codes become values.

    results: Types that it makes.
    most_bits: Widest code that it takes.
    lanes: Bits of an element of the packed layout that it reads.
    features: What the device must have.
    cost: Vector operations per 32-bit word of operands, besides extracting each plane of bits.
    choices: Least `tile_types.forms.choices` of a type for which it is proposed.
    least_bits: Narrowest code for which it is proposed.
    """

    results: tuple[str, ...]
    most_bits: int
    lanes: tuple[int, ...]
    features: frozenset[str] = frozenset()
    cost: float = 0.0
    choices: int = 0
    least_bits: int = 0


_WORDS = frozenset({"avx512f", "avx512bw"})

RECIPES: Mapping[str, Recipe] = {
    "mask": Recipe(("uint8",), 8, (8,)),
    "extend": Recipe(("int16", "bfloat16", "float32"), 8, (16,), _WORDS, 4.0, least_bits=6),
    "byte_lookup": Recipe(("bfloat16", "float32"), 8, (16,), _WORDS | {"avx512_vbmi"}, 0.75, least_bits=8),
    "lookup": Recipe(("bfloat16", "float32", "int16"), 8, (16,), _WORDS, 1.0),
    "table": Recipe(("float32",), 16, (16,), cost=6.0, choices=8),
    "bytes": Recipe(("float32",), 8, (16,), _WORDS | {"avx512_vbmi"}, 0.5),
    "byte_pairs": Recipe(("float32",), 6, (16,), _WORDS | {"avx512_vbmi"}, 1.0),
    "arithmetic": Recipe(("float32",), 32, (8, 16), cost=4.0),
}
"""Conversions of weights: masks, shifts that keep signs, tables in registers of bytes of values or of halves,
tables in memory, integers of eight bits or of 16 for digits of eight bits, the expression."""

PLANE_OPERATIONS = 1.5
"""Vector operations that extract one plane of bits: a shift and, but for the last, a merge."""
