"""Products of values by matrix instructions."""

from __future__ import annotations

from typing import Any

from ladder.lower import builder as b
from ladder.lower.blocks.context import BlockContext
from ladder.lower.blocks.fragments import DEPTH, FRAGMENT_COLUMNS, Shape, hold, zeros
from ladder.lower.blocks.values import Value
from ladder.lower.gpu.instructions import emit_step
from tile_types.errors import ScheduleError

Expr = Any


class Matmul(Value):
    """A product by matrix instructions, accumulated in float32."""

    def __init__(
        self, context: BlockContext, name: str, shape: Shape, a: Value, second: Value, transposed: bool
    ) -> None:
        super().__init__(context, name, shape, "float32")
        self.a, self.b, self.transposed = a, second, transposed
        depth = a.shape[1]
        if depth % DEPTH or shape[1] % FRAGMENT_COLUMNS:
            raise ScheduleError(
                f"%{name}: matrix instructions take K by {DEPTH} and N by {FRAGMENT_COLUMNS}, got"
                f" {depth} and {shape[1]}"
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
            first = {(m, k): self.a.operand_a(m, k) for k in range(start, start + run) for m in range(rows)}
            for n in range(0, columns, 2):
                count, column = min(2, columns - n), b.bind(begin + n)
                for k in range(start, start + run):
                    second = self.b.operand_b(k, column, count, self.transposed)
                    for m in range(rows):
                        for i in range(count):
                            place = 4 * (m * columns + n + i)
                            emit_step(context.instruction, "", sums, place, first[m, k], second[2 * i :][:2])

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        if isinstance(n, int):
            sums, columns = self._once(("sums",), self._all), self.shape[1] // FRAGMENT_COLUMNS
            return self.scaled([sums[4 * (m * columns + n) + i] for i in range(4)], n)
        sums = zeros(4)
        for k in range(self.depth):
            second = self.b.operand_b(k, n, 1, self.transposed)
            emit_step(self.context.instruction, "", sums, 0, self.a.operand_a(m, k), second)
        return [sums[i] for i in range(4)]

    def scaled(self, sums: list[Expr], n: Expr) -> list[Expr]:
        """Return finished sums of a fragment times the factors of their columns, if they have any."""
        factors = self.b.column_factors(n)
        return sums if factors is None else [hold(x * factors[i % 2]) for i, x in enumerate(sums)]

    def _all(self) -> Any:
        self.context.require_whole_columns(self.name)
        sums = zeros(4 * self.context.geo.fragments(self.shape))
        self.add_into(sums)
        return sums
