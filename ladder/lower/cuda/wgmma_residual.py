"""What is added to the results of the wgmma pipeline: a thread loads its part a turn of the epilogue ahead.

A turn stores a chunk of activation rows. Loads that waited for each other would leave memory idle: a block
that walks over tiles alone on its multiprocessor has as few in flight as it has threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.arguments import Arguments

RUN_WORDS = 4
"""Registers of the 16 bytes that a thread loads at once."""


@dataclass(frozen=True)
class Residual:
    """Loads runs of the tensor that is added, 16 bytes each.

    run: Elements of a run.
    """

    args: Arguments
    run: int

    def load(self, rows: Sequence[Expr], column: Expr) -> Any:
        """Start loading a run of each of ``rows`` from ``column`` on; return registers, four of each run.

        What lies beyond the tensor is not read: something within stands for it. Where rows do not begin at
        multiples of 16 bytes nothing is loaded.
        """
        tensor, args = self.args.residual, self.args
        words = b.local(RUN_WORDS * len(rows), "uint32")
        for index in range(RUN_WORDS * len(rows)):
            b.store(
                words, T.uint32(0), index
            )  # else they would take registers all the time between two tiles
        with b.when(args.n % self.run == 0):
            inside = b.bind(T.min(column, args.n - self.run))
            for number, row in enumerate(rows):
                registers = [words[RUN_WORDS * number + i] for i in range(RUN_WORDS)]
                source = tensor.ptr_to([T.min(row, args.m - 1), inside])
                # Not a plain read: the compiler would move it ahead of the wait for the kernel before.
                b.ptx("ld.global.v4.u32", *registers, source)
        return words

    def element(self, words: Any, number: int, index: int) -> Expr:
        """Return element ``index`` of the loaded run ``number``, as float32."""
        first = RUN_WORDS * number
        if str(self.args.residual.dtype) == "float32":
            return T.reinterpret("float32", words[first + index])
        half = T.Cast("uint16", words[first + index // 2] >> T.uint32(16 * (index % 2)))
        return T.Cast("float32", T.reinterpret(str(self.args.residual.dtype), half))
