"""Scans along axes before the last on GPUs: integrals over an image's rows, decays along a text's tokens.

A block takes neighbouring columns. Each lane holds a few elements of one column that follow each other, and
scans these; what the parts before it come to passes through shared memory. Columns that are longer than what
the lanes of a block hold are scanned in turns. What is computed of a scan, further scans included, stays
where it is, so it is read from registers.
"""

from __future__ import annotations

from math import prod
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.graph import Graph, Node
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.combining import storing
from ladder.lower.chain.dialect import from_words, words_of
from ladder.lower.chain.gpu_nest import GpuNest
from ladder.lower.chain.indices import Index
from ladder.lower.chain.nest import BYTES, Reduction
from ladder.lower.chain.scans import up_to
from ladder.partition.rows import SCANS
from schedules.schedule import check


def scans_columns(graph: Graph) -> bool:
    """Tell whether a chain of columns scans them."""
    return any(node.operator in SCANS for node in graph.nodes)


class ColumnScans:
    """The kernel of a chain that scans along an axis before its results' last one."""

    def __init__(self, nest: GpuNest) -> None:
        self.nest, self.lanes, self.held = nest, nest.mapping.across, nest.mapping.num
        graph = nest.graph
        shape = nest.shape(graph.outputs[0])
        check(not nest.scatters, "scanned columns are scattered")
        self.axis, axes = nest.rows, nest.mapping.axes
        self.outer, self.length = shape[: self.axis], int(shape[self.axis])
        self.across = [int(extent) for extent in shape[-axes:]]
        self.scans = [node for node in graph.nodes if node.operator in SCANS]
        self.parts = nest.lanes // self.lanes
        """Lanes that share a column."""
        self.turns = -(-self.length // (self.parts * self.held))
        sizes = [BYTES[str(Reduction(nest, node, self.probes()).dtype)] // 4 for node in self.scans]
        self.words = [nest.lanes * size for size in sizes]

    def probes(self) -> Index:
        return tuple(self.nest.probe(f"w{at}", e) for at, e in enumerate(self.nest.shape(self.scans[0].name)))

    def emit(self) -> None:
        nest, columns = self.nest, prod(self.across)
        chunks = -(-columns // self.lanes)
        several = 2 if self.turns > 1 else 1
        words = several * sum(self.words) if self.parts > 1 else 0
        block, thread = nest.start(prod(self.outer, start=chunks), nest.lanes, words)
        number = b.bind(tirx.floormod(block, chunks) * self.lanes + tirx.floormod(thread, self.lanes))
        part = b.bind(tirx.floordiv(thread, self.lanes)) if self.parts > 1 else 0
        row = nest.bound_index(tirx.floordiv(block, chunks), self.outer)
        whole = columns % self.lanes == 0
        column = number if whole else b.bind(tirx.min(number, columns - 1))
        nest.within(column, columns)
        index = nest.bound_index(column, self.across)
        its = [Reduction(nest, node, (*row, 0, *index)) for node in self.scans]
        carries = [b.Variable(it.dtype, it.neutral) for it in its] if self.turns > 1 else []
        with nest.loop(self.turns) as turn:
            first = b.bind((turn * self.parts + part) * self.held) if self.turns > 1 else part * self.held
            self.turn(
                row, index, first, its, carries, thread, part, turn, None if whole else number < columns
            )

    def turn(
        self, row: Index, index: Index, first: Expr, its: list[Reduction], carries: list[Any],
        thread: Expr, part: Expr, turn: Expr, inside: Expr,
    ) -> None:  # fmt: skip
        """Emit the scans of what the lanes hold at once, and the results there."""
        nest, whole = self.nest, self.length == self.turns * self.parts * self.held
        places, valid = [], list[Expr]()
        for at in range(self.held):
            position = b.bind(first + at) if whole else b.bind(tirx.min(first + at, self.length - 1))
            nest.within(position, self.length)
            places.append((*row, position, *index))
            valid.append(None if whole else first + at < self.length)
        begin = tirx.floormod(turn, 2) * sum(self.words) if self.turns > 1 else 0
        for number, (node, it, words) in enumerate(zip(self.scans, its, self.words, strict=True)):
            carry = carries[number] if carries else None
            self.scan(node, it, places, valid, carry, thread, part, begin)
            begin = begin + words
        for value in nest.graph.outputs:
            for place, there in zip(places, valid, strict=True):
                found = nest.elements(value, [place])
                store = storing(nest, value, [place], found)
                with b.where(there, inside):
                    store()
        nest.values.forget()
        nest.values.cells.clear()

    def scan(
        self, node: Node, it: Reduction, places: list[Index], valid: list[Expr], carry: Any,
        thread: Expr, part: Expr, begin: Expr,
    ) -> None:  # fmt: skip
        """Emit one scan: of each lane's elements, then of the parts before it."""
        nest = self.nest
        read = [nest.register(nest.elements(it.operand, [place])[0]) for place in places]
        own: list[Expr] = []
        for value, there in zip(read, valid, strict=True):
            value = value if there is None else T.if_then_else(there, value, it.neutral)
            own.append(b.bind(it.combine(own[-1], value)) if own else b.bind(value))
        before = None if carry is None else b.bind(carry.value)
        if self.parts > 1:
            before = self.before(it, own[-1], before, carry, thread, part, begin)
        elif carry is not None:
            carry.set(it.combine(before, own[-1]))
        for at, place in enumerate(places):
            nest.keep_cell(node, place, up_to(it, before, own, at))

    def before(
        self, it: Reduction, total: Expr, carried: Expr, carry: Any, thread: Expr, part: Expr, begin: Expr
    ) -> Expr:
        """Return what is before a lane's elements in its column; ``carry`` becomes what all come to."""
        nest, shared = self.nest, self.nest.dialect.shared
        words = words_of(total, it.dtype)
        for number, word in enumerate(words):
            b.store(shared, word, begin + number * nest.lanes + thread)
        nest.dialect.sync()
        column = tirx.floormod(thread, self.lanes)
        before = b.Variable(it.dtype, it.neutral if carried is None else carried)
        every = b.Variable(it.dtype, before.value) if carry is not None else None
        for other in range(self.parts):
            at = [begin + number * nest.lanes + other * self.lanes + column for number in range(len(words))]
            value = b.bind(from_words([shared[place] for place in at], it.dtype))
            if other + 1 < self.parts:
                before.set(it.combine(before.value, T.if_then_else(other < part, value, it.neutral)))
            if every is not None:
                every.set(it.combine(every.value, value))
        if carry is not None and every is not None:
            carry.set(every.value)
        return b.bind(before.value)
