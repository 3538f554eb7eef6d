"""Pieces of keys, values and queries as lanes load them, and the operands that they become.

Sixteen lanes are the rows of an operand, groups of sixteen its columns: four of a wave of CDNA, two of RDNA
(`ladder.lower.rocm.steps`). Of a key, each group takes its part of the head, in pieces of up to 16 bytes, and
q comes in the same order. Of a value, each of the sixteen lanes takes a piece, and groups take a run of
neighbouring keys each. RDNA3's instructions read all columns from both groups, which exchange theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from tvm.script import tirx as T

from ladder.ir.attention import CODES, Attention
from ladder.lower import builder as b
from ladder.lower.gpu.proven import proven_recipes
from ladder.lower.gpu.recipes import Conversion, Lanes16
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.machine import RocmMachine, join_bfloat
from ladder.lower.rocm.ranking import Exact, proven_here, vector_instructions
from ladder.lower.rocm.steps import SPLIT_STEPS, STEPS, WMMA_STEPS, WaveStep
from schedules.layouts import Field
from schedules.schedule import check
from schedules.wave_attention import FRAGMENT, fragment_of, piece
from targets import TileDevice
from tile_types import get_type

Expr = Any

LOW_HALVES, HIGH_HALVES = 0x05040100, 0x07060302
"""V_PERM's selectors of the low halves of two words side by side, and of the high ones."""


@lru_cache(maxsize=64)
def lane_recipe(stored: str, operand: str) -> tuple[Any, bool]:
    """Return the decoder of two codes in 16-bit lanes that takes the fewest instructions.

    Second comes whether its float32 results need no rounding. It leaves no factor: values that CDNA2 takes
    for 0 would be the smallest codes.

    Raises ScheduleError if the type has none.
    """
    conversion = Conversion(get_type(stored), operand, raw=True)
    found = [
        (here.recipe, proven.recipe.inner)
        for proven in proven_recipes(conversion)
        if isinstance(proven.recipe, Lanes16) and set(proven.meaning.gains) == {1.0}
        if not any(proven.meaning.offsets)
        for here in proven_here(proven, conversion)
    ]
    check(bool(found), f"{stored} has no decoder to {operand} in lanes")
    best, inner = min(found, key=lambda pair: vector_instructions(pair[0], conversion))
    return inner, isinstance(best, Exact)


class Operands:
    """How the lanes of a wave divide K, V and q."""

    def __init__(self, form: Attention, device: TileDevice) -> None:
        self.form, self.scaled, width = form, form.stored in CODES, form.stored_bytes
        self.width = width
        self.fragment = fragment_of(device)
        self.groups = self.fragment.groups
        self.key_elements = piece(form.size // self.groups, width)
        self.value_elements = piece(form.size // FRAGMENT, width)
        self.key_pieces = form.size // (self.groups * self.key_elements)
        self.value_pieces = form.size // (FRAGMENT * self.value_elements)
        self.recipe = lane_recipe(form.stored, form.ttype) if self.scaled else None
        self.steps = [
            step
            for step in (*STEPS, *WMMA_STEPS, *SPLIT_STEPS)
            if step.feature in device.features and step.activation == form.ttype
        ]

    @property
    def tiles(self) -> int:
        """Fragments of a head's elements."""
        return self.form.size // FRAGMENT

    def step(self, count: int) -> WaveStep:
        """Return the widest instruction for operands of so many registers of a lane's own."""
        return next(step for step in self.steps if count % self.own_words(step) == 0)

    def own_words(self, step: WaveStep) -> int:
        """Return the registers of an operand that a lane has before halves of a wave exchange theirs."""
        return step.words // self.fragment.operands

    def whole(self, words: Sequence[Expr], group: Expr) -> list[Expr]:
        """Return operands, each with those of the other half of the wave where instructions take both.

        Those of the first half come first.
        """
        if self.fragment.operands == 1:
            return list(words)
        found: list[Expr] = []
        run = self.own_words(self.steps[0])
        for at in range(0, len(words), run):
            own = [b.bind(word) for word in words[at : at + run]]
            found += d.with_other_half(own, group == 0)
        return found

    def query_words(self, words: Sequence[Expr]) -> list[Expr]:
        """Return q's operand registers, in the order in which those of K come."""
        if not self.scaled:
            return list(words)
        found = []
        for i in range(0, len(words), 2):  # codes 0 and 2, then 1 and 3 of a word of K
            found += [permute(words[i], words[i + 1], s) for s in (LOW_HALVES, HIGH_HALVES)]
        return found

    def key_words(self, words: Sequence[Expr]) -> list[Expr]:
        """Return the operand registers of a lane's part of a key."""
        return [pair for word in words for pair in self._pairs(word)]

    def value_words(self, keys: Sequence[Sequence[Expr]]) -> Iterator[list[Expr]]:
        """Yield the operand registers of each tile of a head, from the words of a lane's run of values."""
        real = min(4 // self.width, self.value_elements)
        for words in zip(*keys, strict=True):
            pairs = [self._joined(*words[i : i + 2]) for i in range(0, len(words), 2)]
            yield from [list(registers) for registers in zip(*pairs, strict=True)][:real]

    def _joined(self, low: Expr, high: Expr) -> list[Expr]:
        """Return the elements of two values side by side, one register for each place in a word."""
        halves = (permute(low, high, selector) for selector in (LOW_HALVES, HIGH_HALVES))
        return [pair for word in halves for pair in self._pairs(word)]

    def weights(self, values: Sequence[Expr]) -> list[Expr]:
        """Return weights of neighbouring keys as operand registers."""
        return [pack(values[i], values[i + 1], self.form.ttype) for i in range(0, len(values), 2)]

    def _pairs(self, word: Expr) -> list[Expr]:
        """Return a word of K or V as registers of two elements."""
        if self.recipe is None:
            return [word]
        recipe, exact = self.recipe
        found = []
        for position in (0, 8):
            m = RocmMachine()
            m.exact = exact
            found.append(recipe.convert(m, [m.input(word)], [Field(0, position, 8, 0)], None).content)
        return found


def pack(low: Expr, high: Expr, dtype: str) -> Expr:
    """Round two float32 values to 16 bits, in one word."""
    if dtype == "bfloat16":
        return join_bfloat(low, high)
    return d.as_type(d.vector([T.Cast("float16", low), T.Cast("float16", high)]), "uint32")


def permute(low: Expr, high: Expr, selector: int) -> Expr:
    """Pick bytes of two words."""
    return b.bind(d.intrinsic("uint32", "llvm.amdgcn.perm", high, low, T.uint32(selector)))
