"""Values of a block graph: each emits the fragments and operands that its users ask for.

A value is a matrix; the warps of a group split its rows. The part that a warp holds consists of *fragments*
of 16 rows in the accumulator layout of the device's matrix instruction (`lanes`). Element-wise operators are
computed when a fragment is asked for, so chains of them are fused, whatever stands between matrix products,
reductions and accumulators. A value that is asked for the same part twice computes it once.

Fragments of 16 columns, rounded to 16 bits, are the first operand of the next product: nothing moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

from tvm.script import tirx as T

from ladder.ir.operator import Operator
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.blocks.context import BlockContext
from ladder.lower.blocks.fragments import DEPTH, Shape, hold, zeros
from ladder.lower.blocks.shared import TileLayout
from tile_types.errors import ScheduleError


class Value:
    """A matrix that a group of warps can compute.

    name: Of the node.
    shape: Rows and columns; an extent 1 is broadcast when more is asked for.
    dtype: Element type.
    """

    def __init__(self, context: BlockContext, name: str, shape: Shape, dtype: str) -> None:
        self.context, self.name, self.shape, self.dtype = context, name, shape, dtype

    # ---- parts, as users ask for them ---------------------------------------------------------------
    def fragment(self, m: int, n: Expr) -> list[Expr]:
        """Return the float32 elements of a thread in a fragment, see `ladder.lower.blocks.lanes`."""
        if self.shape[1] == 1:
            return self.context.lanes.spread(self.row(m))
        return list(self._once(("fragment", m, n), lambda: self._fragment(m, n)))

    def row(self, m: int) -> list[Expr]:
        """Return a thread's float32 elements of a value of one column."""
        return list(self._once(("row", m), lambda: self._row(m)))

    def inverses(self, m: int, n: Expr) -> list[Expr]:
        """Return the reciprocals of `fragment`, computed once where rows or columns are all the same."""
        if self.shape[1] == 1:
            rows = self._once(("inverse row", m), lambda: [self.context.inverse(x) for x in self.row(m)])
            return self.context.lanes.spread(rows)
        place = 0 if self.shape[0] == 1 else m
        return list(self._once(("inverse", place, n), lambda: self._inverses(place, n)))

    def _inverses(self, m: int, n: Expr) -> list[Expr]:
        """Return reciprocals of a fragment; of one row, all of a lane's are the same."""
        elements, run = self.fragment(m, n), self.context.lanes.run
        if self.shape[0] == 1:
            return [self.context.inverse(x) for x in elements[:run]] * (len(elements) // run)
        return [self.context.inverse(x) for x in elements]

    def partial_row(self, m: int) -> list[Expr]:
        """Return what is summed over the threads of a row to give `row`, or `row` itself."""
        return self.row(m)

    @property
    def is_partial(self) -> bool:
        """Whether `partial_row` is not yet summed."""
        return False

    def operand_a(self, m: int, k: int) -> list[Expr]:
        """Return uint32 registers of a first operand: rows of fragment m, 16 columns from 16 k on."""
        return list(self._once(("a", m, k), lambda: self._operand_a(m, k)))

    def operand_b(self, k: int, n: Expr, count: int, transposed: bool) -> list[list[Expr]]:
        """Return uint32 registers for each of ``count`` fragments of columns, as second operands.

        ``transposed``: the value is stored as ``[N, K]``.
        """
        return spilled(self.context, self).operand_b(k, n, count, transposed)

    def operand_a_of(self, first: Value, m: int, k: int) -> list[Expr]:
        """Return the first operand that goes with this second one: `operand_a` of the other value."""
        return first.operand_a(m, k)

    def column_factors(self, n: Expr) -> list[Expr] | None:
        """Return what sums over this second operand are multiplied with, by column, or None."""
        return None

    depth_run = 1
    """Steps along K that a second operand prepares together."""

    # ---- how they are computed ----------------------------------------------------------------------
    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        raise NotImplementedError

    def _row(self, m: int) -> list[Expr]:
        raise ScheduleError(f"%{self.name} of {self.shape[1]} columns is no column")

    def _operand_a(self, m: int, k: int) -> list[Expr]:
        context, count = self.context, DEPTH // self.context.lanes.columns
        parts = [self.fragment(m, count * k + i) for i in range(count)]
        return context.dialect.packed_operand(parts, context.operand, context.threads.lane)

    def _once(self, key: tuple[Any, ...], make: Any) -> Any:
        return self.context.point.once((self.name, *key), make)


class Constant(Value):
    """One number."""

    def __init__(self, context: BlockContext, name: str, number: float) -> None:
        super().__init__(context, name, (1, 1), "float32")
        self.number = number

    def _row(self, m: int) -> list[Expr]:
        return [T.float32(self.number)] * self.context.lanes.row_elements


class SharedTile(Value):
    """A 16-bit matrix in shared memory.

    base: Shared address of its first byte, a uint32 expression.
    """

    def __init__(
        self, context: BlockContext, name: str, shape: Shape, dtype: str, layout: TileLayout, base: Expr
    ) -> None:
        super().__init__(context, name, shape, dtype)
        self.layout, self.base = layout, base

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        dialect = self.context.dialect
        words = dialect.fragment_words(self, m, n)
        return [hold(half) for word in words for half in dialect.unpack(word, self.dtype)]

    def rows(self, m: int) -> list[Expr]:
        """Return the rows of a fragment that a lane has elements of; rows beyond the last are the last."""
        lanes, last = self.context.lanes, self.shape[0] - 1
        if last == 0:
            return [0] * lanes.row_elements
        first = self.context.first_row(self.shape[0])
        return [T.min(first + lanes.position(m, 0, run)[0], last) for run in range(lanes.row_elements)]

    def start(self, place: Expr) -> Expr:
        """Return a shared address so far from the tile's first byte, computed once."""
        found = self._once(("start", place), lambda: b.Variable("uint32", self.base + place))
        return found.value

    def _operand_a(self, m: int, k: int) -> list[Expr]:
        return self.context.dialect.operand_a(self, m, k)

    def operand_b(self, k: int, n: Expr, count: int, transposed: bool) -> list[list[Expr]]:
        return self.context.dialect.operand_b(self, k, n, count, transposed)


class Elementwise(Value):
    """A row of the operator table applied to fragments."""

    def __init__(
        self,
        context: BlockContext,
        name: str,
        shape: Shape,
        dtype: str,
        row: Operator,
        operands: Sequence[Value],
    ) -> None:
        super().__init__(context, name, shape, dtype)
        lower = context.dialect.functions.get(row.name, row.lower)
        if lower is None:
            raise ScheduleError(f"%{name}: {row.name} has no scalar lowering")
        self.lower, self.operands, self.operator = lower, operands, row.name
        self.is_quotient = row.name == "div"

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        lower: Callable[..., Expr] = self.lower
        if self.is_quotient and math.prod(self.operands[1].shape) < math.prod(self.shape):
            # One division serves all elements that have this divisor.
            operands, lower = [self.operands[0].fragment(m, n), self.operands[1].inverses(m, n)], mul
        else:
            operands = [operand.fragment(m, n) for operand in self.operands]
        return [self._rounded(lower(*elements)) for elements in zip(*operands, strict=True)]

    def _row(self, m: int) -> list[Expr]:
        columns = zip(*(operand.row(m) for operand in self.operands), strict=True)
        return [self._rounded(self.lower(*elements)) for elements in columns]

    def _rounded(self, value: Expr) -> Expr:
        exact = self.dtype == "float32"
        return hold(value if exact else self.context.dialect.rounded(value, self.dtype))


class Convert(Value):
    """The value in another type: rounded where it is narrower, and for free as an operand of a product."""

    def __init__(self, context: BlockContext, name: str, shape: Shape, dtype: str, source: Value) -> None:
        super().__init__(context, name, shape, dtype)
        self.source = source

    def _converted(self, elements: list[Expr]) -> list[Expr]:
        if self.dtype == "float32":
            return elements
        return [hold(self.context.dialect.rounded(element, self.dtype)) for element in elements]

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        return self._converted(self.source.fragment(m, n))

    def _row(self, m: int) -> list[Expr]:
        return self._converted(self.source.row(m))

    def _operand_a(self, m: int, k: int) -> list[Expr]:
        return self.source.operand_a(m, k)

    @property
    def is_packed(self) -> bool:
        """Whether this is a decoded weight."""
        return self.source.depth_run > 1

    def operand_b(self, k: int, n: Expr, count: int, transposed: bool) -> list[list[Expr]]:
        if self.is_packed:
            return self.source.operand_b(k, n, count, transposed)
        return super().operand_b(k, n, count, transposed)

    def operand_a_of(self, first: Value, m: int, k: int) -> list[Expr]:
        return self.source.operand_a_of(first, m, k) if self.is_packed else super().operand_a_of(first, m, k)

    def column_factors(self, n: Expr) -> list[Expr] | None:
        return self.source.column_factors(n) if self.is_packed else None

    @property
    def depth_run(self) -> int:  # type: ignore[override]
        return self.source.depth_run


class Concat(Value):
    """Values side by side (axis 1) or above one another (axis 0), for products: nothing is copied."""

    def __init__(
        self, context: BlockContext, name: str, shape: Shape, dtype: str, parts: Sequence[Value], axis: int
    ) -> None:
        super().__init__(context, name, shape, dtype)
        self.parts, self.axis = parts, axis
        if any(part.shape[axis] % DEPTH for part in parts):
            raise ScheduleError(f"%{name}: parts of a concatenation are multiples of {DEPTH} along its axis")

    def _part(self, at: int, width: int) -> tuple[Value, int]:
        for part in self.parts:
            count = part.shape[self.axis] // width
            if at < count:
                return part, at
            at -= count
        raise ScheduleError(f"%{self.name}: a part beyond its end")

    def _require(self, axis: int, use: str) -> None:
        if self.axis != axis:
            raise ScheduleError(
                f"%{self.name} joins axis {self.axis}, which {use} does not take; join {axis}"
            )

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        self._require(1, "an element-wise operator")
        if not isinstance(n, int):
            raise ScheduleError(f"%{self.name}: a concatenation after the loop is taken by products only")
        part, at = self._part(n, self.context.lanes.columns)
        return part.fragment(m, at)

    def _operand_a(self, m: int, k: int) -> list[Expr]:
        self._require(1, "the first operand of a product")
        part, at = self._part(k, DEPTH)
        return part.operand_a(m, at)

    def operand_b(self, k: int, n: Expr, count: int, transposed: bool) -> list[list[Expr]]:
        self._require(1 if transposed else 0, "the second operand of a product")
        part, at = self._part(k, DEPTH)
        return part.operand_b(at, n, count, transposed)


def spilled(context: BlockContext, value: Value) -> SharedTile:
    """Return where a computed value lies in shared memory."""
    context.point.require_written(value.name)
    layout = context.geo.spills[value.name]
    offset = context.geo.offsets[f"spill {value.name}"] + context.threads.group * layout.bytes

    def make() -> SharedTile:
        dialect = context.dialect
        base = b.Variable(dialect.address_type, context.shared.base + dialect.address(offset)).value
        name = f"{value.name} in shared memory"
        return SharedTile(context, name, value.shape, context.operand, layout, base)

    return context.point.once((value.name, "spilled"), make)  # type: ignore[no-any-return]


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
