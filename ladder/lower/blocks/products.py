"""Products of values by matrix instructions."""

from __future__ import annotations

from typing import Any

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.blocks.context import BlockContext
from ladder.lower.blocks.fragments import DEPTH, Shape, hold, zeros
from ladder.lower.blocks.values import Value
from tile_types.errors import ScheduleError


class Matmul(Value):
    """A product by matrix instructions, accumulated in float32."""

    def __init__(
        self, context: BlockContext, name: str, shape: Shape, a: Value, second: Value, transposed: bool
    ) -> None:
        super().__init__(context, name, shape, "float32")
        self.a, self.b, self.transposed = a, second, transposed
        depth, wide = a.shape[1], context.lanes.columns
        if depth % DEPTH or shape[1] % wide:
            raise ScheduleError(
                f"%{name}: matrix instructions take K by {DEPTH} and N by {wide}, got {depth} and {shape[1]}"
            )
        self.depth = depth // DEPTH

    def add_into(self, sums: Any) -> None:
        """Emit ``sums += a · b`` for all fragments of the warp."""
        if self.context.schedule.products == "wgmma":
            self.context.deferred.append((self, sums))
            return
        context, (height, width) = self.context, self.shape
        rows, columns = context.row_fragments(height), context.geo.column_fragments(width)
        begin = context.first_column(columns)
        run = self.b.depth_run
        for start in range(0, self.depth, run):
            steps = range(start, start + run)
            first = {(m, k): self.b.operand_a_of(self.a, m, k) for k in steps for m in range(rows)}
            for n in range(0, columns, 2):
                count, column = min(2, columns - n), b.bind(begin + n)
                for k in steps:
                    second = self.b.operand_b(k, column, count, self.transposed)
                    for m in range(rows):
                        for i in range(count):
                            place = context.lanes.elements * (m * columns + n + i)
                            context.dialect.multiply(sums, place, first[m, k], second[i])
                    context.dialect.keep_order()

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        lanes = self.context.lanes
        size = lanes.elements
        if isinstance(n, int):
            sums, columns = self._once(("sums",), self._all), self.shape[1] // lanes.columns
            return self.scaled([sums[size * (m * columns + n) + i] for i in range(size)], n)
        sums = zeros(size)
        for k in range(self.depth):
            (second,) = self.b.operand_b(k, n, 1, self.transposed)
            self.context.dialect.multiply(sums, 0, self.a.operand_a(m, k), second)
        return [sums[i] for i in range(size)]

    def scaled(self, sums: list[Expr], n: Expr) -> list[Expr]:
        """Return finished sums of a fragment times the factors of their columns, if they have any."""
        factors = self.b.column_factors(n)
        return sums if factors is None else [hold(x * factors[i % len(factors)]) for i, x in enumerate(sums)]

    def _all(self) -> Any:
        self.context.require_whole_columns(self.name)
        sums = zeros(self.context.lanes.elements * self.context.geo.fragments(self.shape))
        self.add_into(sums)
        return sums
