"""Products of rows with a matrix of floats on CPUs, and the chain that reads them.

A block of rows by a panel of columns is accumulated in vector registers: each step multiplies one element of
every row with one row of the panel. The chain that follows is computed of the block before it is stored, so
the product itself never lies in memory. Panels lie one after the other, as `panels` puts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.extents import product
from ladder.ir.windows import Windows
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.cpu_nest import CpuNest
from ladder.lower.chain.indices import Index
from ladder.lower.chain.scatter import Chain
from ladder.lower.cpu import vectors as v
from schedules.row_panels import SERIAL, Registers
from tile_types.tile import Tile

Step = Callable[[Expr, Sequence[Expr]], None]
"""``(number of the step, one element per row)`` -> emits its products."""

Steps = Callable[[Expr, int, Step], None]
"""``(first row, rows, step)`` -> emits the step for every element of the rows."""

MOST_WINDOWS = 8
"""Rows of a block whose elements do not lie at equal distances: each has an address of its own."""

UNROLLED = 4
"""Products of each element that a step of a loop adds."""

CHAINS = 8
"""Sums side by side that hide the latency of their additions."""

MOST_OPERATORS = 128
"""Operators on vectors of a block that are emitted one by one."""

LIGHT = frozenset(
    {
        *("add", "sub", "mul", "div", "maximum", "minimum", "relu", "neg", "abs", "square"),
        *("select", "less", "less_equal", "convert"),
    }
)
"""Operators of one or two instructions."""


class RowNest(CpuNest):
    """A chain whose first input is a product of `depth` elements of rows and columns.

    In place of that input the kernel takes the rows ``[M, K]`` and the matrix in panels
    ``[ceil(N / width), K, width]``; of windows, which are its second input, the image.
    """

    def __init__(
        self, chain: Chain, depth: int, registers: Registers, windows: Windows | None = None
    ) -> None:
        self.windows = windows
        self.image = chain.graph.inputs[1] if windows is not None else None
        self.product, self.depth = chain.graph.inputs[0].name, depth
        self.columns_of_matrix = int(str(chain.graph.inputs[0].tile.shape[1]))
        self.lanes = registers.lanes
        self.vectors = registers.panel_vectors(self.columns_of_matrix)
        self.panels = -(-self.columns_of_matrix // (self.vectors * self.lanes))
        most = registers.rows[self.vectors]
        self.size = min(most, MOST_WINDOWS) if windows is not None else most
        """Rows of a block."""
        self.here: Expr = None
        """The product's element of which one of the chain is being computed."""
        super().__init__(chain)

    def buffer(self, name: str, tile: Tile) -> Any:
        if self.image is not None and name == self.image.name:
            return None  # declared in place of the product
        if name != self.product:
            return super().buffer(name, tile)
        shape = [tile.shape[0], self.depth] if self.image is None else [product(self.image.tile.shape)]
        x = b.tensor("x", [self.extent(extent) for extent in shape], "float32", align=4)
        matrix = b.tensor("matrix", [self.panels, self.depth, self.vectors * self.lanes], "float32", align=64)
        return x, matrix

    @property
    def x(self) -> Any:
        """The rows, or the image."""
        return self.buffers[self.product][0]

    @property
    def matrix(self) -> Any:
        """The matrix in panels."""
        return self.buffers[self.product][1]

    def load(self, name: str, index: Index) -> Expr:
        return self.here if name == self.product else super().load(name, index)

    def emit(self) -> None:
        """Emit blocks of rows, panel by panel."""
        rows = self.held(self.extent(self.graph.tile(self.product).shape[0]))
        steps: Steps = self.steps
        if self.windows is not None:
            gather = Gather(self, self.windows)
            gather.prepare()
            steps = gather.steps
        size = self.size
        blocks = self.held(self.values.simplified(tirx.floordiv(rows + size - 1, size)))
        count = self.values.simplified(blocks * self.panels)
        work = self.depth * self.columns_of_matrix
        serial = isinstance(rows, int) and rows * work < SERIAL
        with self.rows_over(count, serial) as number:
            panel, at = self.unravelled(number, (self.panels, blocks))
            self.block_of(rows, self.held(at * size, rows), self.held(panel, rows), steps)

    def steps(self, first: Expr, rows: int, step: Step) -> None:
        """Emit ``step(number, one element per row)`` for every element of the rows."""
        for number in self.unrolled(self.depth, rows):
            step(number, [self.x[first + row, number] for row in range(rows)])

    def unrolled(self, extent: int, rows: int) -> Iterator[Expr]:
        """Emit a loop over products: of a whole block, several in a row, so that they share addresses.

        Of a few rows, as many as have sums of their own.
        """
        count = UNROLLED if rows == self.size else self.sums_of(rows)
        whole = extent // count
        if whole:
            with b.loop(whole) as number:
                for at in range(count):
                    yield number * count + at
        for at in range(whole * count, extent):
            yield tirx.const(at, "int32")

    def sums_of(self, rows: int) -> int:
        """Return the sums of which a result of a block of some rows is made: as many as hide latency."""
        few = rows < self.size and rows * self.vectors * 2 <= CHAINS
        return min(UNROLLED, CHAINS // (rows * self.vectors)) if few else 1

    def block_of(self, rows: Expr, first: Expr, panel: Expr, steps: Steps) -> None:
        """Emit one block: its products, then what is made of them, row by row."""
        size = self.size
        block = v.scratch(size * self.vectors * self.lanes, "float32")
        count = self.held(tirx.min(size, rows - first), rows)
        tails = [1 << bit for bit in reversed(range((size - 1).bit_length()))]

        def each_row() -> None:
            with b.loop(count) as row:
                self.within(row, size)
                self.row_of(block, row, first + row, panel)

        def whole() -> None:
            sums = self.products(size, first, panel, steps)
            if not self.is_short:
                self.put_into(block, sums, size, 0)
                return
            for row in range(size):
                self.row_of(sums, row, first + row, panel)

        def rest() -> None:
            for tail in tails:
                done = tirx.floordiv(count, 2 * tail) * (2 * tail)
                with b.when(tirx.floormod(tirx.floordiv(count, tail), 2) == 1):
                    begin = b.bind(done)
                    self.put_into(block, self.products(tail, first + begin, panel, steps), tail, begin)
            if self.is_short:
                each_row()

        b.either(count == size, whole, rest)
        if not self.is_short:
            each_row()

    @property
    def is_short(self) -> bool:
        """Whether the chain is emitted for each vector of a block: it then reads products in registers."""
        found = [n.operator for n in self.graph.nodes if n.operator not in ("input", "constant")]
        return LIGHT.issuperset(found) and len(found) * self.size * self.vectors <= MOST_OPERATORS

    def put_into(self, block: Any, sums: Any, rows: int, done: Expr) -> None:
        """Emit the move of products of some rows into the block, from a row on."""
        for number in range(rows * self.vectors):
            at = number * self.lanes
            here = v.lanes(done * (self.vectors * self.lanes) + at, self.lanes)
            b.store(block, sums[v.lanes(at, self.lanes)], here)

    def products(self, rows: int, first: Expr, panel: Expr, steps: Steps) -> Any:
        """Emit the products of some rows with a panel; returns them, row by row."""
        lanes, count = self.lanes, rows * self.vectors
        parts = self.sums_of(rows)
        sums = v.scratch(parts * count * lanes, "float32")
        places = [number * lanes for number in range(parts * count)]
        for at in places:
            b.store(sums, v.constant(0, "float32", lanes), v.lanes(at, lanes))
        turns = cycle(range(parts))

        def step(number: Expr, elements: Sequence[Expr]) -> None:
            weights = [
                b.bind(self.matrix[panel, number, v.lanes(n * lanes, lanes)]) for n in range(self.vectors)
            ]
            begin = next(turns) * count
            for row, element in enumerate(elements):
                x = b.bind(v.splat(element, lanes))
                for vector, weight in enumerate(weights):
                    at = v.lanes((begin + row * self.vectors + vector) * lanes, lanes)
                    b.store(sums, v.fma(x, weight, sums[at], lanes), at)

        steps(first, rows, step)
        for at in places[count:]:
            here, further = v.lanes(at % (count * lanes), lanes), v.lanes(at, lanes)
            b.store(sums, sums[here] + sums[further], here)
        return sums

    def row_of(self, block: Any, at: Expr, row: Expr, panel: Expr) -> None:
        """Emit the results of a row, the ``at``-th of a block: whole vectors, and the rest of the last."""
        lanes, width = self.lanes, self.vectors * self.lanes
        rest = self.columns_of_matrix % lanes
        for vector in range(self.vectors):
            start = panel * width + vector * lanes

            def whole(start: Expr = start, vector: int = vector) -> None:
                self.elements(block, row, start, at * width + vector * lanes, lanes)

            def part(start: Expr = start, vector: int = vector) -> None:
                with b.when(start < self.columns_of_matrix):
                    self.elements(block, row, start, at * width + vector * lanes, rest)

            if self.panels * width == self.columns_of_matrix:
                whole()
            elif not rest:
                with b.when(start < self.columns_of_matrix):
                    whole()
            else:
                b.either(start + lanes <= self.columns_of_matrix, whole, part)

    def elements(self, block: Any, row: Expr, start: Expr, at: Expr, lanes: int) -> None:
        """Emit neighbouring elements of all results."""
        with self.vector(lanes) as lane:
            self.here = block[at + lane]
            for value in self.graph.outputs:
                self.element(value, (row, start + lane))
        self.values.forget()


class Gather:
    """Reads windows of an image, channels last, as rows: of a copy with borders, where it has some."""

    def __init__(self, nest: RowNest, windows: Windows) -> None:
        assert nest.image is not None  # that is what windows are of
        self.nest, self.windows = nest, windows
        self.batch, self.high, self.wide, channels = map(nest.extent, nest.image.tile.shape)
        self.channels = int(str(channels))
        self.high, self.wide = nest.held(self.high), nest.held(self.wide)
        self.results = tuple(nest.held(self.places(e, n), e) for n, e in enumerate((self.high, self.wide)))
        self.above, self.left = windows.padding
        self.rows = nest.values.simplified(self.high + 2 * self.above)
        self.line = nest.held(nest.values.simplified((self.wide + 2 * self.left) * self.channels))
        self.x = nest.x
        self.is_image = not self.above and not self.left
        """Whether no copy is needed."""

    def places(self, extent: Expr, axis: int) -> Expr:
        """Return how many windows there are along an axis."""
        windows = self.windows
        covered = windows.dilation[axis] * (windows.kernel[axis] - 1) + 1
        free = extent + 2 * windows.padding[axis] - covered
        return self.nest.values.simplified(tirx.floordiv(free, windows.stride[axis]) + 1)

    def prepare(self) -> None:
        """Emit the copy with borders of zeros."""
        if self.is_image:
            return
        nest, border, inner = self.nest, self.left * self.channels, self.wide * self.channels
        count = nest.values.simplified(self.batch * self.rows)
        source, self.x = self.x, v.scratch(nest.values.simplified(count * self.line), "float32")

        def zeros(begin: Expr, number: Expr) -> None:
            with b.loop(number) as at:
                b.store(self.x, T.float32(0), begin + at)

        with v.parallel(count) as line:
            image, row = b.bind(tirx.floordiv(line, self.rows)), b.bind(tirx.floormod(line, self.rows))
            begin = b.bind(line * self.line)

            def copied() -> None:
                zeros(begin, border)
                first = b.bind((image * self.high + row - self.above) * inner)
                with b.loop(inner) as at:
                    b.store(self.x, source[first + at], begin + border + at)
                zeros(begin + border + inner, self.nest.values.simplified(self.line - border - inner))

            inside = tirx.And(row >= self.above, row < self.above + self.high)
            b.either(inside, copied, lambda: zeros(begin, self.line))

    def steps(self, first: Expr, rows: int, step: Step) -> None:
        """Emit ``step(number, one element per row)`` for every element of the windows."""
        begins = v.scratch(rows, "int32")
        for row, begin in enumerate(self.begins(first, rows)):
            b.store(begins, begin, row)
        (taps_down, taps_across), (down, across) = self.windows.kernel, self.windows.dilation
        with b.loop(taps_down) as r, b.loop(taps_across) as s:
            tap = b.bind(r * (down * self.line) + s * (across * self.channels))
            begin = [b.bind(begins[row] + tap) for row in range(rows)]
            first_number = b.bind((r * taps_across + s) * self.channels)
            for c in self.nest.unrolled(self.channels, rows):
                step(first_number + c, [self.x[at + c] for at in begin])

    def begins(self, first: Expr, rows: int) -> list[Expr]:
        """Return where the windows of some rows begin."""
        return [self.begin(first + row) for row in range(rows)]

    def begin(self, number: Expr) -> Expr:
        """Return where the window of a row begins."""
        (high, wide), (down, across) = self.results, self.windows.stride
        column, rest = tirx.floormod(number, wide), tirx.floordiv(number, wide)
        row, image = tirx.floormod(rest, high), tirx.floordiv(rest, high)
        return (image * self.rows + row * down) * self.line + column * (across * self.channels)
