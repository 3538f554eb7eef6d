"""Scales and zero points as AMD lanes hold them: as words, loaded by as many as lie side by side."""

from __future__ import annotations

from typing import Any, Protocol, cast

from tvm.script import tirx as T

from ladder.lower.gpu.groups import GroupRegisters, Groups, Reader
from ladder.lower.gpu.scales import bytes4
from ladder.lower.rocm.dialect import Pieces
from ladder.lower.rocm.steps import RUN, WaveStep

Expr = Any

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "uint32": 4}


class WaveReader(Protocol):
    """Loads scales and zero points as words."""

    def __call__(self, name: str, granule: int, part: int, row: Expr) -> Expr:
        """Return one element, zero-extended to a word."""

    def run(self, granule: int, row: Expr, words: int) -> Expr:
        """Return the scales of neighbouring rows from ``row`` on as a vector of words."""


class WaveGroupRegisters(GroupRegisters):
    """Scales and zero points of a tile as words.

    Narrow loads fill a whole register each; neighbouring rows of D arrive by one load. Of narrow
    variables LLVM would make pairs as soon as they arrive, and wait for them.
    """

    def __init__(
        self, groups: Groups, step: WaveStep, lane: Expr, types: tuple[str | None, str | None]
    ) -> None:
        self.types = dict(zip(("scales", "zeros"), types, strict=True))
        super().__init__(groups, step, lane, (None, None))
        scale_type = types[0]
        self.run_words = 0 if scale_type is None or self.rows < RUN else RUN * ELEMENT_BYTES[scale_type] // 4
        singles = [1] * self._scale_count
        widths = [self.run_words] * (self._scale_count // RUN) if self.run_words else singles
        self.scales = Pieces(widths) if scale_type else None
        self.zeros = Pieces([1] * self._zero_count) if types[1] else None

    def fetch(self, read: Reader) -> None:
        if self.run_words:
            for run in range(self._scale_count // RUN):
                granule, first = divmod(run * RUN, self.rows)
                row = self.step.lanes.slot_row(self.lane, first)
                value = cast(WaveReader, read).run(granule, row, self.run_words)
                self.scales.store(run, value, self.run_words)
        super().fetch(read)

    def put(self, array: str, at: int, value: Expr) -> None:
        if array == "zeros" or not self.run_words:
            getattr(self, array).store(at, value, 1)

    def word(self, array: str, at: int) -> Expr:
        """Return a word whose low bits are an element; others may be above them."""
        pieces = getattr(self, array)
        if array == "zeros" or not self.run_words:
            return pieces[at]
        word, place = divmod(at * self.run_words, RUN)
        return pieces[word] >> T.uint32(16) if place else pieces[word]

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
