"""Reductions over the rows and columns of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.blocks.context import BlockContext
from ladder.lower.blocks.fragments import DEPTH, FRAGMENT_COLUMNS, FRAGMENT_ROWS, Shape, hold, inverse, zeros
from ladder.lower.blocks.lanes import over_lanes
from ladder.lower.blocks.values import Convert, Elementwise, SharedTile, Value
from ladder.lower.cuda.functions import FUNCTIONS
from ladder.lower.gpu.instructions import emit_step
from tile_types.errors import ScheduleError

Expr = Any


def add(x: Expr, y: Expr) -> Expr:
    """Return the sum."""
    return x + y


def greater(x: Expr, y: Expr) -> Expr:
    """Return the maximum, NaN if one is."""
    return FUNCTIONS["maximum"](x, y)


COMBINE: Mapping[str, Callable[[Expr, Expr], Expr]] = {"reduce_sum": add, "reduce_max": greater}
"""How reductions combine two elements."""


class Reduce(Value):
    """A reduction over the columns: in a thread, then (`row`) over the threads of a row."""

    def __init__(self, context: BlockContext, name: str, shape: Shape, operator: str, source: Value) -> None:
        super().__init__(context, name, shape, "float32")
        self.combine, self.source, self.operator = COMBINE[operator], source, operator
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
            return _sums_of_squares(root, m)
        lanes = self.context.lanes
        totals: list[Expr] = []
        for n in range(self.source.shape[1] // lanes.columns):
            parts = lanes.fold(self.source.fragment(m, n), self.combine)
            totals = [hold(self.combine(x, y)) for x, y in zip(totals, parts, strict=True)] if n else parts
        return [hold(total) for total in totals]

    def _row(self, m: int) -> list[Expr]:
        return self.context.lanes.join_row(self.name, self.partial_row(m), self.combine)


def _root_of_squares(value: Value) -> Value | None:
    """Return the 16-bit matrix of which a value is the square of every element, if it is, for products."""
    squared = isinstance(value, Elementwise) and (
        value.operator == "square" or (value.operator == "mul" and value.operands[0] is value.operands[1])
    )
    root: Any = value.operands[0] if squared else None  # type: ignore[attr-defined]
    if isinstance(root, Convert) and root.dtype == "float32":
        root = root.source
    suits = isinstance(root, SharedTile) and root.dtype == root.context.operand
    return root if suits and root.shape[0] > 1 and root.shape[1] % DEPTH == 0 else None


def _sums_of_squares(root: Value, m: int) -> list[Expr]:
    """Return a lane's parts of the sums of squares of rows g and g + 8: the diagonal of ``x · x^T``.

    The registers of eight rows as an A operand are those of the same rows as columns of a B operand. A
    product of 16 elements takes two instructions where squares and sums take 24.
    """
    context, parts = root.context, []
    lane = context.threads.lane
    for half in range(2 if root.shape[0] > FRAGMENT_ROWS // 2 else 1):
        sums = zeros(4)
        for k in range(root.shape[1] // DEPTH):
            a = root.operand_a(m, k)
            emit_step(context.instruction, "", sums, 0, a, [a[half], a[half + 2]])
        own = T.Select(lane // 4 % 2 == 0, sums[2 * half], sums[2 * half + 1])
        parts.append(hold(T.Select(lane % 4 == lane // 8, own, T.float32(0))))
    return parts if len(parts) == 2 else parts * 2


class ColumnReduce(Value):
    """A reduction over the rows, computed where a `SharedRow` asks for it."""

    def __init__(self, context: BlockContext, name: str, shape: Shape, operator: str, source: Value) -> None:
        super().__init__(context, name, shape, "float32")
        self.combine, self.source = COMBINE[operator], source
        if source.shape[0] % FRAGMENT_ROWS or context.lanes.elements != 4:
            raise ScheduleError(
                f"%{name}: rows are reduced by {FRAGMENT_ROWS}, in graphs with matrix products;"
                f" got {source.shape[0]}"
            )

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        totals: list[Expr] = []
        for step in range(self.source.shape[0] // FRAGMENT_ROWS):
            part = self.source.fragment(step, n)
            pairs = [self.combine(part[i], part[i + 2]) for i in range(2)]
            totals = [hold(self.combine(x, y)) for x, y in zip(totals, pairs, strict=True)] if step else pairs
        return [over_lanes(total, self.combine, (4, 8, 16)) for total in totals] * 2


class SharedRow(Value):
    """A value of one row that follows from a reduction over rows: computed once by a group of warps.

    The warps take columns in turn and share the results, reciprocals where all users divide by them.

    source: The value.
    inverted: Whether reciprocals are shared.
    """

    def __init__(self, context: BlockContext, source: Value, inverted: bool) -> None:
        super().__init__(context, source.name, source.shape, source.dtype)
        self.source, self.inverted = source, inverted

    def _place(self, n: Expr) -> Expr:
        """Return the shared address of a thread's two columns of fragment n."""
        context, threads = self.context, self.context.threads
        offset = context.geo.offsets[f"columns {self.name}"] + threads.group * (4 * self.shape[1])
        return context.shared.base + T.Cast("uint32", offset + n * 32 + threads.lane % 4 * 8)

    def share(self) -> None:
        """Compute this warp's columns and put them where the group reads them, after a barrier."""
        point, threads, columns = self.context.point, self.context.threads, self.shape[1] // FRAGMENT_COLUMNS
        warps = self.context.schedule.row_warps
        for iteration in range(-(-columns // warps)):
            n = b.keep(iteration * warps + threads.row_warp)
            with b.when(n < columns) if columns % warps else point.nested(), point.nested():
                with point.whole_rows():
                    pair = self.source.fragment(0, n)[:2]
                shared = [inverse(x) for x in pair] if self.inverted else pair
                with b.when(threads.lane // 4 == 0):
                    b.ptx("st.shared.v2.f32", self._place(n), *shared)

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        if self.inverted:
            raise ScheduleError(f"%{self.name} is shared as its reciprocal")
        return self._shared(n)

    def inverses(self, m: int, n: Expr) -> list[Expr]:
        return self._shared(n) if self.inverted else super().inverses(m, n)

    def _shared(self, n: Expr) -> list[Expr]:
        self.context.point.require_written(self.name)
        pair = self._once(("columns", n), lambda: self._load(n))
        return [*pair, *pair]

    def _load(self, n: Expr) -> list[Expr]:
        pair = b.local(2, "float32")
        b.ptx("ld.shared.v2.f32", pair[0], pair[1], self._place(n))
        return [pair[0], pair[1]]
