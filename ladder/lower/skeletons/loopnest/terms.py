"""Activations as sums of bfloat16, which tile registers multiply: a float16 of two, a float32 of three.

Each term is what the ones before leave, without the bits that bfloat16 has no room for, so nothing is lost
but what is subnormal there. Terms after an infinite element or NaN are 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v
from ladder.lower.skeletons.loopnest.activations import Activations, column_sum
from schedules.instructions import TERMS, pieces_of

EXPONENT, UPPER, NAN = 0x7F800000, 0xFFFF0000, 0x7FC00000
"""Bits of the exponent of a float32, those of a term, and NaN."""


@dataclass(frozen=True)
class TermActivations(Activations):
    """Activations as terms: ``words[term][block][step]`` hold those of a pair of columns.

    plane: Words of one term.
    """

    plane: Expr

    @property
    def terms(self) -> int:
        """Terms of an element."""
        return pieces_of(self.activation, TERMS)

    def prepare(self, block: Expr, first: Expr) -> None:
        chunks = self.chunks_of_a_group
        with b.loop(self.rows) as local, b.loop(self.groups) as group:
            total = v.scratch(self.chunk, "float32")
            b.store(total, v.constant(0, "float32", self.chunk), v.lanes(0, self.chunk))
            with b.loop(chunks) as chunk:
                values = v.scratch(self.chunk, "float32")
                self.widen(values, first + local, group * chunks + chunk, 0)
                whole = v.lanes(0, self.chunk)
                b.store(total, total[whole] + values[whole], whole)
                self._split(values, block, local, group * chunks + chunk)
            if self.sums is not None:
                b.store(self.sums, column_sum(total, self.chunk), self.number(block, group, local))

    def _split(self, values: Any, block: Expr, local: Expr, chunk: Expr) -> None:
        """Emit the terms of a row and chunk."""
        count = self.chunk // self.columns
        start = (block * self.steps + chunk * count) * self.rows + local
        bits = v.scratch(self.chunk, "uint32")
        for term in range(self.terms):
            with b.vector(self.chunk) as lane:
                found = tirx.Select(
                    T.isnan(values[lane]), T.uint32(NAN), T.reinterpret("uint32", values[lane])
                )
                b.store(bits, T.bitwise_and(found, T.uint32(UPPER)), lane)
            with b.vector(self.chunk) as lane:
                special = T.bitwise_and(bits[lane], T.uint32(EXPONENT)) == T.uint32(EXPONENT)
                rest = values[lane] - T.reinterpret("float32", bits[lane])
                b.store(values, tirx.Select(special, T.float32(0), rest), lane)
            with b.loop(count) as step:
                even, odd = (bits[step * self.columns + i] for i in range(2))
                word = T.bitwise_or(T.shift_right(even, T.uint32(16)), odd)
                b.store(self.words, word, self.plane * term + start + step * self.rows)
