"""Pieces of keys, values and queries as they are loaded, and the matrix operands that they become."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from tvm.script import tirx as T

from ladder.ir.attention import CODES, Attention
from ladder.lower import builder as b
from ladder.lower.cuda.functions import pack
from ladder.lower.gpu.emission import TirMachine, helper
from ladder.lower.gpu.proven import Proven, proven_recipes
from ladder.lower.gpu.recipes import Conversion, Lanes16
from schedules.codes import LARGEST_GAIN
from schedules.layouts import Field
from schedules.schedule import check
from targets import TileDevice
from tile_types import get_type

Expr = Any

LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632
"""Selectors of ``prmt``: the low halves of two words side by side, the high ones."""

WIDEST = 16
"""Bytes of a lane's load."""

LANES_OF_KEY, LANES_OF_VALUE = 4, 8
"""Lanes that share a row of K, and of V."""

TRANSPOSE = "movmatrix.sync.aligned.m8n8.trans.b16"


@lru_cache(maxsize=64)
def lane_recipe(stored: str, operand: str) -> tuple[Any, float]:
    """Return the cheapest proven decoder of two codes in 16-bit lanes, and the factor of its results.

    Raises ScheduleError if the type has none.
    """
    ttype = get_type(stored)
    found: list[Proven] = []
    for proven in proven_recipes(Conversion(ttype, operand, raw=True)):
        one = len(set(proven.meaning.gains)) == 1 and not any(proven.meaning.offsets)
        if isinstance(proven.recipe, Lanes16) and one and abs(proven.meaning.gains[0]) <= LARGEST_GAIN:
            found.append(proven)
    check(bool(found), f"{stored} has no decoder to {operand} in lanes")
    best = found[0]
    assert isinstance(best.recipe, Lanes16)
    return best.recipe.inner, best.meaning.gains[0]


class Operands:
    """How the lanes of a warp divide K, V and q."""

    def __init__(self, form: Attention, device: TileDevice) -> None:
        self.form, self.scaled = form, form.stored in CODES
        width = form.stored_bytes
        key_bytes = _piece(form.size * width // LANES_OF_KEY)
        value_bytes = _piece(form.size * width // LANES_OF_VALUE)
        self.key_words, self.value_words = key_bytes // 4, value_bytes // 4
        self.key_elements, self.value_elements = key_bytes // width, value_bytes // width
        self.key_pieces = form.size // (LANES_OF_KEY * self.key_elements)
        self.value_pieces = form.size // (LANES_OF_VALUE * self.value_elements)
        self.recipe: Any
        self.recipe, gain = lane_recipe(form.stored, form.ttype) if self.scaled else (None, 1.0)
        self.key_gain = self.value_gain = gain

    def row_bytes(self, tensor: str) -> int:
        """Return the bytes of a head's row of q, k or v."""
        return self.form.size * (2 if tensor == "q" else self.form.stored_bytes)

    def query_words(self, words: Any) -> list[Expr]:
        """Return q's operand registers, in the order in which those of K come."""
        if not self.scaled:
            return [words[i] for i in range(self.form.size // 8)]
        found = []
        for i in range(0, self.form.size // 8, 2):  # codes 0 and 2, then 1 and 3 of a word of K
            found += [_permute(words[i], words[i + 1], s) for s in (LOW_HALVES, HIGH_HALVES)]
        return found

    def keys(self, words: Any, fragment: int) -> list[list[Expr]]:
        """Return the A operands of a fragment of keys, per step of 16 elements."""
        rows = []
        for half in range(2):
            first = (fragment * 2 + half) * self.key_pieces * self.key_words
            loaded = [words[first + i] for i in range(self.key_pieces * self.key_words)]
            rows.append([pair for word in loaded for pair in self._pairs(word)])
        return [
            [rows[0][at], rows[1][at], rows[0][at + 1], rows[1][at + 1]] for at in range(0, len(rows[0]), 2)
        ]

    def values(self, words: Any, fragment: int) -> Iterator[list[Expr]]:
        """Yield the A operands of transposed values, per tile of 16 elements of a head."""
        count = self.value_pieces * self.value_words
        rows = [[words[(fragment * 4 + key) * count + i] for i in range(count)] for key in range(4)]
        for at in range(count):
            low = [
                e
                for s in (LOW_HALVES, HIGH_HALVES)
                for e in self._pairs(_permute(rows[0][at], rows[1][at], s))
            ]
            high = [
                e
                for s in (LOW_HALVES, HIGH_HALVES)
                for e in self._pairs(_permute(rows[2][at], rows[3][at], s))
            ]
            for pair in range(0, len(low), 2):
                yield [low[pair], low[pair + 1], high[pair], high[pair + 1]]

    def place(self, element: int, g: Expr) -> Expr:
        """Return where in the head an element of lane group ``g`` lies."""
        piece, within = divmod(element, self.value_elements)
        return (piece * LANES_OF_VALUE + g) * self.value_elements + within

    def transposed(self, low: Expr, high: Expr) -> Expr:
        """Return a register of the B operand from two weights of neighbouring rows."""
        out = b.local(1, "uint32")
        b.ptx(TRANSPOSE, out[0], pack(low, high, self.form.ttype))
        return out[0]

    def _pairs(self, word: Expr) -> list[Expr]:
        """Return a word of K or V as registers of two elements."""
        if not self.scaled:
            return [word]
        found = []
        for position in (0, 8):
            m = TirMachine()
            where = [Field(0, position, 8, 0)]
            found.append(self.recipe.convert(m, [m.input(word)], where, None).content)
        return found


def _piece(nbytes: int) -> int:
    """Return the bytes that a lane loads at once of so many.

    Raises ScheduleError if they are no whole words.
    """
    piece = min(WIDEST, nbytes & -nbytes)
    check(piece >= 4, f"{nbytes} bytes of a head per lane are no whole words")
    return piece


def _permute(low: Expr, high: Expr, selector: int) -> Expr:
    source = helper("ladder_prmt", "prmt.b32 %0, %1, %2, %3;", 3)
    return b.bind(b.call_inline("ladder_prmt", source, "uint32", low, high, T.uint32(selector)))
