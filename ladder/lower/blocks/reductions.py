"""Reductions over the rows and columns of values."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.blocks.context import BlockContext
from ladder.lower.blocks.dialect import BlockDialect, Combine
from ladder.lower.blocks.fragments import DEPTH, ROWS, Shape, hold
from ladder.lower.blocks.lanes import FragmentLanes, fragment_lanes
from ladder.lower.blocks.values import Convert, Elementwise, SharedTile, Value
from tile_types.errors import ScheduleError


def combine_of(operator: str, dialect: BlockDialect) -> Combine:
    """Return how a reduction combines two elements."""
    return dialect.greater if operator == "reduce_max" else add


class Reduce(Value):
    """A reduction over the columns: in a thread, then (`row`) over the threads of a row."""

    def __init__(self, context: BlockContext, name: str, shape: Shape, operator: str, source: Value) -> None:
        super().__init__(context, name, shape, "float32")
        self.combine, self.source, self.operator = combine_of(operator, context.dialect), source, operator
        if source.shape[1] % context.lanes.columns:
            raise ScheduleError(
                f"%{name}: columns are reduced by {context.lanes.columns}, got {source.shape[1]}"
            )

    @property
    def is_partial(self) -> bool:
        return self.operator == "reduce_sum"

    def partial_row(self, m: int) -> list[Expr]:
        return list(self._once(("partial", m), lambda: self._partial(m)))

    def _partial(self, m: int) -> list[Expr]:
        root = _root_of_squares(self.source)
        if self.operator == "reduce_sum" and root is not None:
            squares = self.context.dialect.sums_of_squares(root, m)
            if squares is not None:
                return squares
        lanes = self.context.lanes
        totals: list[Expr] = []
        for n in range(self.source.shape[1] // lanes.columns):
            parts = lanes.fold(self.source.fragment(m, n), self.combine)
            totals = [hold(self.combine(x, y)) for x, y in zip(totals, parts, strict=True)] if n else parts
        return [hold(total) for total in totals]

    def _row(self, m: int) -> list[Expr]:
        return self.context.lanes.join_row(self.name, self.partial_row(m), self.combine)


def _root_of_squares(value: Value) -> Value | None:
    """Return the 16-bit matrix that a value is the element-wise square of; None if it is no such square."""
    squared = isinstance(value, Elementwise) and (
        value.operator == "square" or (value.operator == "mul" and value.operands[0] is value.operands[1])
    )
    root: Any = value.operands[0] if squared else None  # type: ignore[attr-defined]
    if isinstance(root, Convert) and root.dtype == "float32":
        root = root.source
    suits = isinstance(root, SharedTile) and root.dtype == root.context.operand
    return root if suits and root.shape[0] > 1 and root.shape[1] % DEPTH == 0 else None


class ColumnReduce(Value):
    """A reduction over the rows, computed where a `SharedRow` asks for it."""

    def __init__(self, context: BlockContext, name: str, shape: Shape, operator: str, source: Value) -> None:
        super().__init__(context, name, shape, "float32")
        self.combine, self.source = combine_of(operator, context.dialect), source
        if source.shape[0] % ROWS or not isinstance(context.lanes, FragmentLanes):
            raise ScheduleError(
                f"%{name}: rows are reduced by {ROWS}, in graphs with matrix products; got {source.shape[0]}"
            )

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        lanes, totals = fragment_lanes(self.context.lanes), list[Expr]()
        for step in range(self.source.shape[0] // ROWS):
            part = self.source.fragment(step, n)
            runs = [part[i : i + lanes.run] for i in range(0, len(part), lanes.run)]
            own = [reduce(self.combine, column) for column in zip(*runs, strict=True)]
            totals = [hold(self.combine(x, y)) for x, y in zip(totals, own, strict=True)] if step else own
        return [lanes.join_column(total, self.combine) for total in totals] * lanes.row_elements


class SharedRow(Value):
    """A value of one row that follows from a reduction over rows: computed once by a group of warps.

    The warps take columns in turn and share the results, reciprocals where all users divide by them.

    inverted: Whether reciprocals are shared.
    """

    def __init__(self, context: BlockContext, source: Value, inverted: bool) -> None:
        super().__init__(context, source.name, source.shape, source.dtype)
        self.source, self.inverted = source, inverted

    def _place(self, n: Expr) -> Expr:
        """Return the shared address of a thread's columns of fragment n."""
        context, (_, column) = self.context, self.context.lanes.position(0, n, 0)
        offset = context.geo.offsets[f"columns {self.name}"] + context.threads.group * (4 * self.shape[1])
        return context.shared.base + context.dialect.address(offset + column * 4)

    def share(self) -> None:
        """Compute this warp's columns and put them where the group reads them, after a barrier."""
        context, point, threads = self.context, self.context.point, self.context.threads
        lanes, warps = context.lanes, context.schedule.row_warps
        columns = self.shape[1] // lanes.columns
        for iteration in range(-(-columns // warps)):
            n = b.keep(iteration * warps + threads.row_warp)
            with b.when(n < columns) if columns % warps else point.nested(), point.nested():
                with point.whole_rows():
                    own = self.source.fragment(0, n)[: lanes.run]
                shared = [context.inverse(x) for x in own] if self.inverted else own
                with b.when(lanes.position(0, 0, 0)[0] == 0):
                    context.dialect.write(context.shared, self._place(n), shared)

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        if self.inverted:
            raise ScheduleError(f"%{self.name} is shared as its reciprocal")
        return self._shared(n)

    def inverses(self, m: int, n: Expr) -> list[Expr]:
        return self._shared(n) if self.inverted else super().inverses(m, n)

    def _shared(self, n: Expr) -> list[Expr]:
        self.context.point.require_written(self.name)
        own = self._once(("columns", n), lambda: self._load(n))
        return list(own) * self.context.lanes.row_elements

    def _load(self, n: Expr) -> list[Expr]:
        context = self.context
        return context.dialect.read(context.shared, self._place(n), context.lanes.run, "float32")
