"""Values of a block graph as code: each hands out the part that its user asks for.

A value is a matrix; the warps of a group split its rows. The part that a warp holds consists of
16 x 8 *fragments* in the accumulator layout of ``mma.m16n8k16`` (`ladder.lower.gpu.instructions`): lane
``4 g + c`` has columns ``2 c, 2 c + 1`` of rows ``g`` and ``g + 8``. Element-wise operators are computed
when a fragment is asked for, so chains of them are fused, whatever stands between matrix products,
reductions and accumulators. A value that is asked for the same part twice computes it once.

Two fragments side by side, rounded to 16 bits, are the A operand of the next product: nothing moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from ladder.ir.graph import Node
from ladder.ir.operator import Operator
from ladder.lower import builder as b
from ladder.lower.blocks import warpgroups
from ladder.lower.blocks.shared import TileLayout
from ladder.lower.cuda.functions import LOG2_E, exponential, special
from ladder.lower.gpu.instructions import emit_step
from tile_types.errors import ScheduleError

if TYPE_CHECKING:
    from ladder.lower.blocks.kernel import BlockKernel

Expr = Any
Shape = tuple[int, int]

FRAGMENT_ROWS, FRAGMENT_COLUMNS, DEPTH = 16, 8, 16
"""Rows and columns of an accumulator fragment, and elements along K of one matrix instruction."""

PACK = """
static __device__ __forceinline__ unsigned int ladder_pack_{name}(float low, float high) {{
  unsigned int packed;
  asm("cvt.rn.{ptx}.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}}
"""
PACKED = {"float16": "f16x2", "bfloat16": "bf16x2"}


def sigmoid(x: Expr) -> Expr:
    """Return ``1 / (1 + exp(-x))``; an overflowing exponential gives the correct 0."""
    return special("reciprocal", T.float32(1) + special("power_of_two", x * T.float32(-LOG2_E)))


def silu(x: Expr) -> Expr:
    """Return ``x / (1 + exp(-x))``."""
    return x * sigmoid(x)


FAST = {"exp": exponential, "sigmoid": sigmoid, "silu": silu}
"""Operators that are computed otherwise than the operator table says, within 2^-21."""


def hold(value: Expr) -> Expr:
    """Compute a float32 once, into a register."""
    return b.Variable("float32", value).value


def pack(low: Expr, high: Expr, dtype: str) -> Expr:
    """Return two floats rounded to 16 bits in one uint32 register."""
    source = PACK.format(name=dtype, ptx=PACKED[dtype])
    return b.Variable("uint32", b.call_inline(f"ladder_pack_{dtype}", source, "uint32", low, high)).value


def unpack(word: Expr, dtype: str) -> list[Expr]:
    """Return the two halves of a register as float32."""
    halves = (T.Cast("uint16", word & T.uint32(0xFFFF)), T.Cast("uint16", word >> T.uint32(16)))
    return [T.Cast("float32", T.reinterpret(half, dtype=dtype)) for half in halves]


class Value:
    """A matrix that a group of warps can compute.

    Parameters
    ----------
    kernel
        The kernel being emitted.
    name
        Of the node.
    shape
        Rows and columns; an extent 1 is broadcast when more is asked for.
    dtype
        Element type.
    """

    def __init__(self, kernel: BlockKernel, name: str, shape: Shape, dtype: str) -> None:
        self.kernel, self.name, self.shape, self.dtype = kernel, name, shape, dtype

    # ---- parts, as users ask for them ---------------------------------------------------------------
    def fragment(self, m: int, n: Expr) -> list[Expr]:
        """Return the float32 elements of a thread in a fragment, see `ladder.lower.blocks.lanes`."""
        if self.shape[1] == 1:
            return self.kernel.lanes.spread(self.row(m))
        return list(self._once(("fragment", m, n), lambda: self._fragment(m, n)))

    def row(self, m: int) -> list[Expr]:
        """Return a thread's float32 elements of a value of one column."""
        return list(self._once(("row", m), lambda: self._row(m)))

    def inverses(self, m: int, n: Expr) -> list[Expr]:
        """Return the reciprocals of `fragment`, computed once where rows or columns are all the same."""
        if self.shape[1] == 1:
            rows = self._once(("inverse row", m), lambda: [inverse(x) for x in self.row(m)])
            return self.kernel.lanes.spread(rows)
        place = 0 if self.shape[0] == 1 else m
        return list(
            self._once(("inverse", place, n), lambda: _inverse_pairs(self.fragment(place, n), self.shape))
        )

    def partial_row(self, m: int) -> list[Expr]:
        """Return what is summed over the threads of a row to give `row`, or `row` itself."""
        return self.row(m)

    @property
    def is_partial(self) -> bool:
        """Whether `partial_row` is not yet summed."""
        return False

    def operand_a(self, m: int, k: int) -> list[Expr]:
        """Return the four uint32 registers of an A operand: rows of fragment m, 16 columns from 16 k on."""
        return list(self._once(("a", m, k), lambda: self._operand_a(m, k)))

    def operand_b(self, k: int, n: Expr, count: int, transposed: bool) -> list[Expr]:
        """Return two uint32 registers for each of ``count`` fragments of columns, as a B operand.

        ``transposed``: the value is stored as ``[N, K]``.
        """
        return self.kernel.spilled(self).operand_b(k, n, count, transposed)

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
        left, right = self.fragment(m, 2 * k), self.fragment(m, 2 * k + 1)
        pairs = (left[:2], left[2:], right[:2], right[2:])
        return [pack(low, high, self.kernel.operand) for low, high in pairs]

    def _once(self, key: tuple[Any, ...], make: Any) -> Any:
        return self.kernel.once((self.name, *key), make)


def _product(x: Expr, y: Expr) -> Expr:
    return x * y


def inverse(x: Expr) -> Expr:
    """Return the reciprocal, in a register."""
    return hold(special("reciprocal", x))


def _inverse_pairs(elements: list[Expr], shape: Shape) -> list[Expr]:
    """Return reciprocals of a fragment; of one row, its halves are the same."""
    if shape[0] == 1 and len(elements) == 4:
        return [inverse(x) for x in elements[:2]] * 2
    return [inverse(x) for x in elements]


class Constant(Value):
    """One number."""

    def __init__(self, kernel: BlockKernel, name: str, number: float) -> None:
        super().__init__(kernel, name, (1, 1), "float32")
        self.number = number

    def _row(self, m: int) -> list[Expr]:
        return [T.float32(self.number)] * self.kernel.lanes.row_elements


class SharedTile(Value):
    """A 16-bit matrix in shared memory.

    Parameters
    ----------
    layout
        Where its chunks of 16 bytes lie.
    base
        Shared address of its first byte, a uint32 expression.
    """

    def __init__(
        self, kernel: BlockKernel, name: str, shape: Shape, dtype: str, layout: TileLayout, base: Expr
    ) -> None:
        super().__init__(kernel, name, shape, dtype)
        self.layout, self.base = layout, base

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        if isinstance(n, int) and self.shape[0] > 1 and self.shape[1] % DEPTH == 0:
            words = self.operand_a(m, n // 2)[n % 2 * 2 :][:2]
        else:
            words = [self._word(row, n) for row in self._rows(m)]
        return [hold(half) for word in words for half in unpack(word, self.dtype)]

    def _rows(self, m: int) -> list[Expr]:
        if self.shape[0] == 1:
            return [0]
        first = self.kernel.first_row(self.shape[0]) + m * FRAGMENT_ROWS + self.kernel.lane // 4
        return [T.min(first, self.shape[0] - 1), T.min(first + 8, self.shape[0] - 1)]

    def _word(self, row: Expr, n: Expr) -> Expr:
        place = self.base + T.Cast("uint32", self.layout.byte(row, n) + self.kernel.lane % 4 * 4)
        word = b.local(1, "uint32")
        b.ptx("ld.shared.u32", word[0], place)
        return word[0]

    def fragment(self, m: int, n: Expr) -> list[Expr]:
        found = super().fragment(m, n)
        return found if len(found) == 4 else found * 2

    def _operand_a(self, m: int, k: int) -> list[Expr]:
        lane, rows = self.kernel.lane, self.shape[0]
        lanes = lane % 16
        first = self.kernel.first_row(rows)
        place = self.kernel.kept(
            ("a", self.layout, rows, m),
            lambda: self._byte(T.min(first + m * 16 + lanes, rows - 1), lane // 16),
        )
        return self._matrices(place, (0, 2 * k), 4, "")

    def operand_b(self, k: int, n: Expr, count: int, transposed: bool) -> list[Expr]:
        lane = self.kernel.lane
        if transposed:
            row, chunk = lane % 8 + lane // 16 * 8, lane // 8 % 2
            place = self.kernel.kept(("bt", self.layout), lambda: self._byte(row, chunk))
            # Rows further: a number, or one that the layout cannot fold.
            offset = (n * 8, 2 * k)
        else:
            place = self.kernel.kept(("b", self.layout), lambda: self._byte(lane % 16, lane // 16))
            offset = (k * DEPTH, n)
        # The lanes of the second fragment give addresses that one fragment alone ignores.
        return self._matrices(place, offset, 2 * count, "" if transposed else ".trans")

    def _byte(self, row: Expr, chunk: Expr) -> Expr:
        return T.Cast("uint32", self.layout.byte(row, chunk))

    def _matrices(self, place: Expr, offset: tuple[Expr, Expr], count: int, mode: str) -> list[Expr]:
        words = b.local(count, "uint32")
        registers = [words[i] for i in range(count)]
        start = self._once(("start", place), lambda: b.Variable("uint32", self.base + place))
        b.ptx(
            f"ldmatrix.sync.aligned.m8n8.x{count}{mode}.shared.b16",
            *registers,
            self.layout.moved(start.value, *offset),
        )
        return registers


class Elementwise(Value):
    """A row of the operator table applied to fragments."""

    def __init__(
        self,
        kernel: BlockKernel,
        name: str,
        shape: Shape,
        dtype: str,
        row: Operator,
        operands: Sequence[Value],
    ) -> None:
        super().__init__(kernel, name, shape, dtype)
        lower = FAST.get(row.name, row.lower)
        if lower is None:
            raise ScheduleError(f"%{name}: {row.name} has no scalar lowering")
        self.lower, self.operands, self.operator = lower, operands, row.name
        self.is_quotient = row.name == "div"

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        lower: Callable[..., Expr] = self.lower
        if self.is_quotient and math.prod(self.operands[1].shape) < math.prod(self.shape):
            # One division serves all elements that have this divisor.
            operands, lower = [self.operands[0].fragment(m, n), self.operands[1].inverses(m, n)], _product
        else:
            operands = [operand.fragment(m, n) for operand in self.operands]
        return [self._rounded(lower(*elements)) for elements in zip(*operands, strict=True)]

    def _row(self, m: int) -> list[Expr]:
        columns = zip(*(operand.row(m) for operand in self.operands), strict=True)
        return [self._rounded(self.lower(*elements)) for elements in columns]

    def _rounded(self, value: Expr) -> Expr:
        exact = self.dtype == "float32"
        return hold(value if exact else T.Cast("float32", T.Cast(self.dtype, value)))


class Convert(Value):
    """The value in another type: rounded where it is narrower, and for free as an operand of a product."""

    def __init__(self, kernel: BlockKernel, name: str, shape: Shape, dtype: str, source: Value) -> None:
        super().__init__(kernel, name, shape, dtype)
        self.source = source

    def _converted(self, elements: list[Expr]) -> list[Expr]:
        if self.dtype == "float32":
            return elements
        return [hold(T.Cast("float32", T.Cast(self.dtype, element))) for element in elements]

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

    def operand_b(self, k: int, n: Expr, count: int, transposed: bool) -> list[Expr]:
        if self.is_packed:
            return self.source.operand_b(k, n, count, transposed)
        return super().operand_b(k, n, count, transposed)

    def column_factors(self, n: Expr) -> list[Expr] | None:
        return self.source.column_factors(n) if self.is_packed else None

    @property
    def depth_run(self) -> int:  # type: ignore[override]
        return self.source.depth_run


class Concat(Value):
    """Values side by side (axis 1) or above one another (axis 0), for products: nothing is copied."""

    def __init__(
        self, kernel: BlockKernel, name: str, shape: Shape, dtype: str, parts: Sequence[Value], axis: int
    ) -> None:
        super().__init__(kernel, name, shape, dtype)
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
        part, at = self._part(n, FRAGMENT_COLUMNS)
        return part.fragment(m, at)

    def _operand_a(self, m: int, k: int) -> list[Expr]:
        self._require(1, "the first operand of a product")
        part, at = self._part(k, DEPTH)
        return part.operand_a(m, at)

    def operand_b(self, k: int, n: Expr, count: int, transposed: bool) -> list[Expr]:
        self._require(1 if transposed else 0, "the second operand of a product")
        part, at = self._part(k, DEPTH)
        return part.operand_b(at, n, count, transposed)


class Matmul(Value):
    """A product by matrix instructions, accumulated in float32."""

    def __init__(
        self, kernel: BlockKernel, name: str, shape: Shape, a: Value, second: Value, transposed: bool
    ) -> None:
        super().__init__(kernel, name, shape, "float32")
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
        if self.kernel.schedule.products == "wgmma":
            warpgroups.add_into(self, sums)
            return
        rows, columns = self.kernel.row_fragments(self.shape[0]), self.kernel.column_fragments(self.shape[1])
        begin = self.kernel.first_column(columns)
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
                            emit_step(self.kernel.step, "", sums, place, first[m, k], second[2 * i :][:2])

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        if isinstance(n, int):
            sums, columns = self._once(("sums",), self._all), self.shape[1] // FRAGMENT_COLUMNS
            return self.scaled([sums[4 * (m * columns + n) + i] for i in range(4)], n)
        sums = zeros(4)
        for k in range(self.depth):
            second = self.b.operand_b(k, n, 1, self.transposed)
            emit_step(self.kernel.step, "", sums, 0, self.a.operand_a(m, k), second)
        return [sums[i] for i in range(4)]

    def scaled(self, sums: list[Expr], n: Expr) -> list[Expr]:
        """Return finished sums of a fragment times the factors of their columns, if they have any."""
        factors = self.b.column_factors(n)
        return sums if factors is None else [hold(x * factors[i % 2]) for i, x in enumerate(sums)]

    def _all(self) -> Any:
        self.kernel.require_whole_columns(self.name)
        sums = zeros(4 * self.kernel.fragments(self.shape))
        self.add_into(sums)
        return sums


def zeros(count: int, value: float = 0.0) -> Any:
    """Return float32 registers that all hold a number."""
    registers = b.local(count, "float32")
    for i in range(count):
        b.store(registers, T.float32(value), i)
    return registers


class GlobalTile(Value):
    """A tile of a graph without products, whose columns are too few for `GlobalRow`."""

    def __init__(self, kernel: BlockKernel, node: Node, shape: Shape, dtype: str) -> None:
        super().__init__(kernel, node.name, shape, dtype)
        self.node, self.source = node, kernel.tensors[node.inputs[0]]

    def _places(self, m: int, n: Expr) -> list[Expr]:
        """Return the places of a thread's runs of columns."""
        first, pitch = self.kernel.place.begin(self.node, self.kernel.loop_step)
        rows, places = self.shape[0], []
        for run in range(self.kernel.lanes.runs):
            row, column = self.kernel.lanes.position(m, n, run)
            row = T.min(self.kernel.first_row(rows) + row, rows - 1) if rows > 1 else 0
            places.append(first + row * pitch + column)
        return places

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        pair = range(2)
        return [self._loaded(place + i) for place in self._places(m, n) for i in pair]

    def _row(self, m: int) -> list[Expr]:
        first, pitch = self.kernel.place.begin(self.node, self.kernel.loop_step)
        rows = self.shape[0]
        runs = (self.kernel.lanes.position(m, 0, run)[0] for run in range(self.kernel.lanes.runs))
        places = [T.min(self.kernel.first_row(rows) + row, rows - 1) if rows > 1 else 0 for row in runs]
        return [self._loaded(first + row * pitch) for row in places]

    def _loaded(self, at: Expr) -> Expr:
        # By name: the compiler may move plain loads to before the kernels before have ended.
        wide = self.dtype == "float32"
        bits = b.local(1, "float32" if wide else "uint16")
        b.ptx("ld.global.f32" if wide else "ld.global.u16", bits[0], self.source.ptr_to([at]))
        return bits[0] if wide else hold(T.Cast("float32", T.reinterpret(bits[0], dtype=self.dtype)))


class GlobalRow(Value):
    """A 16-bit tile of a graph without products: threads load what they take, straight into registers."""

    def __init__(self, kernel: BlockKernel, node: Node, shape: Shape, dtype: str) -> None:
        super().__init__(kernel, node.name, shape, dtype)
        self.node, self.source = node, kernel.tensors[node.inputs[0]]
        if shape[1] % kernel.lanes.columns:
            raise ScheduleError(f"%{node.name}: threads share rows by {kernel.lanes.columns}, got {shape[1]}")

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        first, pitch = self.kernel.place.begin(self.node, self.kernel.loop_step)
        row, column = self.kernel.lanes.position(m if self.shape[0] > 1 else 0, n, 0)
        words = b.local(4, "uint32")
        place = self.source.ptr_to([first + row * pitch + column])
        b.ptx("ld.global.v4.u32", *(words[i] for i in range(4)), place)
        return [hold(half) for i in range(4) for half in unpack(words[i], self.dtype)]
