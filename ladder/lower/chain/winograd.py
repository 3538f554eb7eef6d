"""Convolutions of 3 x 3 elements by Winograd's products, and the chain that reads them.

Four neighbouring elements of a result are sums of 16 products of each channel instead of 36: the image's
tiles of 4 x 4 elements and the kernels are transformed by additions, multiplied place by place as matrices,
and transformed back. Each result is made of the 3 x 3 elements that it reads, so that it errs by these alone.
Differences would make NaN of results that are infinite: where one is not finite, the tiles of a block are
multiplied as they are.

    V = B' d B, U = G g G', y = A' (U * V) A
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.windows import Windows
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.cpu_rows import Gather, RowNest, Step
from ladder.lower.chain.scatter import Chain
from ladder.lower.cpu import vectors as v
from schedules.row_panels import SERIAL, WINOGRAD_POINTS, Registers

Transform = Callable[[Sequence[Expr]], Sequence[Expr]]

PLACES, SIDE, STEP = 16, 4, 2
"""Elements of a tile; along an axis; and those of a result that it gives along an axis."""

CACHED = 1 << 15
"""Elements of transformed tiles that stay in the second-level cache beside the kernels."""

MOST_TILES = 48
"""Tiles of a block at most."""

FEWEST_PLAIN_TILES = 1
"""Tiles of a block that are multiplied as they are: the 16 matrices would be read for too little."""


def inward(d: Sequence[Expr]) -> Sequence[Expr]:
    """Return ``B' d`` of four elements along an axis."""
    return d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]


def outward(m: Sequence[Expr]) -> Sequence[Expr]:
    """Return ``A' m`` of four places along an axis."""
    return m[0] + m[1] + m[2], m[1] - m[2] - m[3]


class Tiles(Gather):
    """Reads an image in tiles of 4 x 4 that overlap by two, of a copy with borders that whole tiles cover."""

    def __init__(self, nest: RowNest, windows: Windows) -> None:
        super().__init__(nest, windows)
        halves = [nest.values.simplified(tirx.floordiv(extent + 1, STEP)) for extent in self.results]
        self.down, self.across = (nest.held(half) for half in halves)
        self.rows = nest.held(nest.values.simplified(self.down * STEP + 2))
        self.line = nest.held(nest.values.simplified((self.across * STEP + 2) * self.channels))
        self.is_image = False

    def place(self, number: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the image, and the first row and column of results, of a tile."""
        column, rest = tirx.floormod(number, self.across), tirx.floordiv(number, self.across)
        row, image = tirx.floormod(rest, self.down), tirx.floordiv(rest, self.down)
        return b.bind(image), b.bind(row * STEP), b.bind(column * STEP)

    def begins(self, number: Expr, rows: int) -> list[Expr]:
        """Return where the windows of a tile's results begin, row by row: the copy has all of them."""
        image, down, across = self.place(number)
        corner = b.bind((image * self.rows + down) * self.line + across * self.channels)
        return [corner + at // STEP * self.line + at % STEP * self.channels for at in range(rows)]


class WinogradNest(RowNest):
    """A chain whose first input is a convolution of 3 x 3 elements, one by one, channels last.

    Panels hold the kernels as they are ``[9 C]``, then transformed ``[16 C]``.
    """

    def __init__(self, chain: Chain, depth: int, registers: Registers, windows: Windows) -> None:
        self.channels = depth // windows.points
        self.plain = depth
        super().__init__(chain, self.channels * WINOGRAD_POINTS, registers, windows)
        self.size = registers.rows[self.vectors]
        fits = min(MOST_TILES, CACHED // (PLACES * self.channels)) // self.size
        self.tiles = max(fits, 1) * self.size
        """Of a block."""
        self.width = self.vectors * self.lanes

    def emit(self) -> None:
        assert self.windows is not None  # that is what tiles are of
        rows = self.extent(self.graph.tile(self.product).shape[0])
        tiles = Tiles(self, self.windows)
        tiles.prepare()
        count = self.held(self.values.simplified(tiles.batch * tiles.down * tiles.across))
        blocks = self.values.simplified(tirx.floordiv(count + self.tiles - 1, self.tiles))
        serial = isinstance(rows, int) and rows * self.depth * self.columns_of_matrix < SERIAL
        with self.rows_over(blocks, serial) as number:
            first = b.bind(number * self.tiles)
            self.block_of_tiles(tiles, first, b.bind(tirx.min(self.tiles, count - first)))

    def block_of_tiles(self, tiles: Tiles, first: Expr, count: Expr) -> None:
        """Emit a block: its transformed tiles, then by panels products, sums and what is made of them."""
        turned = v.scratch(PLACES * self.tiles * self.channels, "float32")
        sums = v.scratch(PLACES * self.tiles * self.width, "float32")
        results = v.scratch(self.tiles * STEP * STEP * self.width, "float32")
        with b.when(count > FEWEST_PLAIN_TILES), b.loop(count) as tile:
            self.turn(tiles, turned, first + tile, tile)
        with self.loop(self.panels) as panel:
            finite = v.scratch(self.lanes, "float32")
            b.store(finite, v.constant(0, "float32", self.lanes), v.lanes(0, self.lanes))
            with b.when(count > FEWEST_PLAIN_TILES):
                groups = tirx.floordiv(count + self.size - 1, self.size)
                with b.loop(PLACES) as place, b.loop(groups) as group:
                    begin = b.bind(place * self.tiles + group * self.size)
                    steps = self.steps_of(turned, place)
                    self.put_into(sums, self.products(self.size, begin, panel, steps), self.size, begin)
                with b.loop(count) as tile, b.loop(self.vectors) as vector:
                    self.turn_back(sums, results, finite, tile, vector)
            with b.when(tirx.Or(count <= FEWEST_PLAIN_TILES, self.is_broken(finite))), b.loop(count) as tile:
                self.plain_tile(tiles, results, first + tile, tile, panel)
            self.each(tiles, first, count, lambda at, row: self.row_of(results, at, row, panel))

    def each(self, tiles: Tiles, first: Expr, count: Expr, body: Callable[[Expr, Expr], None]) -> None:
        """Emit ``body(place in the block, row)`` for every element of the tiles that the result has."""
        high, wide = tiles.results
        with b.loop(count) as tile:
            image, down, across = tiles.place(first + tile)
            with b.loop(STEP) as row, b.loop(STEP) as column:
                inside = tirx.And(down + row < high, across + column < wide)
                with b.when(inside):
                    at = b.bind((tile * STEP + row) * STEP + column)
                    body(at, b.bind((image * high + down + row) * wide + across + column))

    def turn(self, tiles: Tiles, turned: Any, number: Expr, tile: Expr) -> None:
        """Emit the transform of one tile: all places of a vector of channels, then the next."""
        lanes, (image, down, across) = self.lanes, tiles.place(number)
        begin = b.bind((image * tiles.rows + down) * tiles.line + across * self.channels)
        with b.loop(self.channels // lanes) as chunk:
            base = b.bind(begin + chunk * lanes)
            places = [base + i * tiles.line + j * self.channels for i in range(SIDE) for j in range(SIDE)]
            found = self.transformed([tiles.x[v.lanes(at, lanes)] for at in places], inward)
            for place, value in enumerate(found):
                at = (place * self.tiles + tile) * self.channels + chunk * lanes
                b.store(turned, value, v.lanes(at, lanes))

    def turn_back(self, sums: Any, results: Any, finite: Any, tile: Expr, vector: Expr) -> None:
        """Emit the results of one tile, and what they leave in `finite`: 0, or NaN."""
        lanes = self.lanes
        at = b.bind(tile * self.width + vector * lanes)
        step = self.tiles * self.width
        given = [sums[v.lanes(at + place * step, lanes)] for place in range(PLACES)]
        whole, none = v.lanes(0, lanes), v.constant(0, "float32", lanes)
        for place, value in enumerate(self.transformed(given, outward)):
            here = v.lanes((tile * STEP * STEP + place) * self.width + vector * lanes, lanes)
            b.store(results, value, here)
            b.store(finite, v.fma(results[here], none, finite[whole], lanes), whole)

    def transformed(self, given: Sequence[Expr], transform: Transform) -> list[Expr]:
        """Emit a transform of 4 x 4 vectors along both axes; returns the results, row by row."""
        held = self.in_registers(given)
        columns = [transform([held[i * SIDE + j] for i in range(SIDE)]) for j in range(SIDE)]
        count = len(columns[0])
        held = self.in_registers([columns[j][i] for i in range(count) for j in range(SIDE)])
        return [value for i in range(count) for value in transform(held[i * SIDE : (i + 1) * SIDE])]

    def in_registers(self, values: Sequence[Expr]) -> list[Expr]:
        """Emit values into memory that LLVM makes registers of; returns what reads them."""
        lanes = self.lanes
        cells = v.scratch(len(values) * lanes, "float32")
        places = [v.lanes(at * lanes, lanes) for at in range(len(values))]
        for place, value in zip(places, values, strict=True):
            b.store(cells, value, place)
        return [cells[place] for place in places]

    def steps_of(self, turned: Any, place: Expr) -> Callable[[Expr, int, Step], None]:
        """Return the products of transformed tiles with the kernels of a place."""

        def steps(first: Expr, rows: int, step: Step) -> None:
            number = b.bind(self.plain + place * self.channels)
            begin = [b.bind((first + row) * self.channels) for row in range(rows)]
            for c in self.unrolled(self.channels, rows):
                step(number + c, [turned[at + c] for at in begin])

        return steps

    def is_broken(self, finite: Any) -> Expr:
        """Return whether any lane is NaN."""
        total = v.scratch(1, "float32")
        b.store(total, finite[0], 0)
        for lane in range(1, self.lanes):
            b.store(total, total[0] + finite[lane], 0)
        bits = T.reinterpret("uint32", total[0])
        return tirx.NE(T.bitwise_and(bits, T.uint32(0x7FFFFFFF)), T.uint32(0))

    def plain_tile(self, tiles: Tiles, results: Any, number: Expr, tile: Expr, panel: Expr) -> None:
        """Emit what one tile gives of the product by 9 products of each channel."""
        count = STEP * STEP
        found = self.products(count, number, panel, tiles.steps)
        self.put_into(results, found, count, tile * count)
