"""Stores of results: each group that shares a loop stores some of the columns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from tvm.script import tirx as T

from ladder.ir.graph import Node
from ladder.lower import builder as b
from ladder.lower.blocks.accumulators import Merger
from ladder.lower.blocks.context import BlockContext
from ladder.lower.blocks.values import Value
from tile_types.errors import ScheduleError

Expr = Any


class Store:
    """Stores results.

    merger: What joins the accumulators of groups; None for one group.
    """

    def __init__(self, context: BlockContext, merger: Merger | None) -> None:
        self.context, self.merger = context, merger

    def emit(self, node: Node, value: Value) -> None:
        """Store a result: each of the groups that share the loop takes some of its columns."""
        if value.shape[1] == 1:
            self._store_rows(node, value)
            return
        columns, rest = divmod(value.shape[1], self.context.lanes.columns)
        if rest:
            raise ScheduleError(
                f"%{node.name}: columns are stored by {self.context.lanes.columns}, got {value.shape[1]}"
            )
        plan, threads = self.context.schedule, self.context.threads
        sharers = plan.sharers * plan.column_warps
        worker = threads.worker * plan.column_warps + threads.column_warp
        span = 2 if columns % 2 == 0 and columns >= 2 * sharers else 1
        if sharers == 1:
            self._store_columns(node, value, list(range(columns)))
            return
        if columns == span * sharers and self.context.program.stores == (node,):
            self._store_once(node, value, [b.keep(worker * span + i) for i in range(span)])
            return
        for iteration in range(-(-columns // (span * sharers))):
            first = b.keep((iteration * sharers + worker) * span)
            with b.when(first < columns), self.context.point.nested():
                self._store_columns(node, value, [b.keep(first + i) for i in range(span)])

    def _store_once(self, node: Node, value: Value, columns: Sequence[Expr]) -> None:
        """Store a result of which every group takes as many columns: others' sums are read before it."""
        places = [(m, n) for m in range(self.context.row_fragments(value.shape[0])) for n in columns]
        parts = [value.fragment(m, n) for m, n in places]
        if self.merger is not None:
            self.merger.have_read()
        for (m, n), elements in zip(places, parts, strict=True):
            self._store_fragment(node, value, m, n, elements)

    def _store_columns(self, node: Node, value: Value, columns: Sequence[Expr]) -> None:
        for m in range(self.context.row_fragments(value.shape[0])):
            for n in columns:
                self._store_fragment(node, value, m, n, value.fragment(m, n))

    def _store_fragment(self, node: Node, value: Value, m: int, n: Expr, elements: list[Expr]) -> None:
        rows, out = value.shape[0], self.context.tensors[node.name]
        begin, pitch = self.context.place.begin(node, None)
        size = len(elements) // self.context.lanes.runs
        for run in range(self.context.lanes.runs):
            place, column = self.context.lanes.position(m, n, run)
            row = b.bind(self.context.first_row(rows) + place)
            with b.when(row < rows) if rows % self.context.lanes.rows else nullcontext():
                at = b.bind(begin + row * pitch + column)
                self.context.dialect.store(out, at, elements[run * size :][:size])

    def _store_rows(self, node: Node, value: Value) -> None:
        """Store a value of one column: of the threads that hold a row, one stores it."""
        rows, out, threads = value.shape[0], self.context.tensors[node.name], self.context.threads
        begin, pitch = self.context.place.begin(node, None)
        for m in range(self.context.row_fragments(rows)):
            elements = value.row(m)
            for run, element in enumerate(elements):
                place, column = self.context.lanes.position(m, 0, run)
                row = b.bind(self.context.first_row(rows) + place)
                # The first column's threads; of groups that share the loop, the first.
                first = T.And(column == 0, T.And(threads.worker == 0, threads.column_warp == 0))
                with b.when(T.And(first, row < rows)):
                    self.context.dialect.store(out, begin + row * pitch, [element])
