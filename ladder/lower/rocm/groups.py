"""Scales and zero points as AMD lanes hold them: each in a word of its own."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower.gpu.groups import GroupRegisters, Groups
from ladder.lower.gpu.scales import bytes4
from ladder.lower.rocm.steps import WaveStep

Expr = Any


class WaveGroupRegisters(GroupRegisters):
    """Scales and zero points of a tile as words.

    A narrow load fills a whole register; of narrow variables LLVM would make pairs, as soon as they
    arrive, and wait for them.
    """

    def __init__(
        self, groups: Groups, step: WaveStep, lane: Expr, types: tuple[str | None, str | None]
    ) -> None:
        self.types = dict(zip(("scales", "zeros"), types, strict=True))
        super().__init__(groups, step, lane, (types[0] and "uint32", types[1] and "uint32"))

    def replicated(self, array: str, at: int) -> Expr:
        word = getattr(self, array)[at]
        if self.types[array] == "int8":
            return bytes4(T.reinterpret(T.Cast("uint8", word), dtype="int8"))
        return word * T.uint32(0x00010001)

    def number(self, array: str, at: int) -> Expr:
        word = getattr(self, array)[at]
        return NUMBERS[str(self.types[array])](word)


NUMBERS = {
    "float32": lambda word: T.reinterpret(word, dtype="float32"),
    "bfloat16": lambda word: T.reinterpret(word << T.uint32(16), dtype="float32"),
    "float16": lambda word: T.Cast("float32", T.reinterpret(T.Cast("uint16", word), dtype="float16")),
    "int8": lambda word: T.Cast("float32", T.reinterpret(T.Cast("uint8", word), dtype="int8")),
}
"""How words of each type become float32."""
