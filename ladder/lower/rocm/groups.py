"""Scales and zero points as AMD lanes hold them: each in a word of its own."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.gpu.groups import GroupRegisters, Groups
from ladder.lower.gpu.scales import bytes4
from ladder.lower.rocm.steps import WaveStep

Expr = Any


class WaveGroupRegisters(GroupRegisters):
    """Scales and zero points of a tile as words, each in a variable of its own.

    A narrow load fills a whole register; of narrow variables, and of neighbours in a buffer, LLVM
    would make pairs and vectors as soon as they arrive, and wait for them.
    """

    def __init__(
        self, groups: Groups, step: WaveStep, lane: Expr, types: tuple[str | None, str | None]
    ) -> None:
        self.types = dict(zip(("scales", "zeros"), types, strict=True))
        super().__init__(groups, step, lane, (None, None))
        self.scales = [b.local(1, "uint32") for _ in range(self._scale_count if types[0] else 0)] or None
        self.zeros = [b.local(1, "uint32") for _ in range(self._zero_count if types[1] else 0)] or None

    def put(self, array: str, at: int, value: Expr) -> None:
        b.store(getattr(self, array)[at], value, 0)

    def word(self, array: str, at: int) -> Expr:
        """Return an element as its word."""
        return getattr(self, array)[at][0]

    def _exponent_word(self, row: int) -> Expr:
        return self._own_exponents(self.word("scales", row))

    def replicated(self, array: str, at: int) -> Expr:
        word = self.word(array, at)
        if self.types[array] == "int8":
            return bytes4(T.reinterpret(T.Cast("uint8", word), dtype="int8"))
        return word * T.uint32(0x00010001)

    def number(self, array: str, at: int) -> Expr:
        word = self.word(array, at)
        return NUMBERS[str(self.types[array])](word)


NUMBERS = {
    "float32": lambda word: T.reinterpret(word, dtype="float32"),
    "bfloat16": lambda word: T.reinterpret(word << T.uint32(16), dtype="float32"),
    "float16": lambda word: T.Cast("float32", T.reinterpret(T.Cast("uint16", word), dtype="float16")),
    "int8": lambda word: T.Cast("float32", T.reinterpret(T.Cast("uint8", word), dtype="int8")),
}
"""How words of each type become float32."""
