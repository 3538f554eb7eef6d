"""Products of rows with a matrix of floats on CPUs, and the chain that reads them.

A block of rows by a panel of columns is accumulated in vector registers: each step multiplies one element of
every row with one row of the panel. The chain that follows is computed of the block before it is stored, so
the product itself never lies in memory. Panels lie one after the other, as `panels` puts them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import tirx

from ladder.ir.graph import Graph
from ladder.lower import builder as b
from ladder.lower.chain.cpu import CpuNest
from ladder.lower.chain.indices import Index
from ladder.lower.chain.puts import Chain
from ladder.lower.cpu import vectors as v
from ladder.movement.decompose import decompose
from tile_types.tile import Tile

Expr = Any

LANES = 16

ROWS = {4: 6, 3: 8, 2: 12, 1: 14}
"""Vectors of a panel -> rows of a block: 32 registers hold their products, and a row of the panel."""

SLOWER = {4: 1.0, 3: 1.0, 2: 1.1, 1: 1.3}
"""Vectors of a panel -> time of one vector's products: narrow panels load more per product."""

SERIAL = 1 << 20
"""Products of a kernel below which one thread does all: starting threads costs more."""


def panel_vectors(columns: int) -> int:
    """Return how many vectors wide the panels of a matrix are: so that least is computed beyond its end."""

    def cost(vectors: int) -> float:
        return -(-columns // (vectors * LANES)) * vectors * SLOWER[vectors]

    return min(ROWS, key=cost)


class RowNest(CpuNest):
    """A chain whose first input is a product of `depth` elements of rows and columns.

    In place of that input the kernel takes the rows ``[M, K]`` and the matrix in panels
    ``[ceil(N / width), K, width]``.
    """

    def __init__(self, chain: Chain, depth: int) -> None:
        self.product, self.depth = chain.graph.inputs[0].name, depth
        self.here: Expr = None
        """Where the element being computed lies among those of its block."""
        super().__init__(chain)
        self.merged, self.beside = 1, 0

    def buffer(self, name: str, tile: Tile) -> Any:
        if name != self.product:
            return super().buffer(name, tile)
        rows, columns = tile.shape
        self.columns_of_matrix = int(str(columns))
        self.vectors = panel_vectors(self.columns_of_matrix)
        width = self.vectors * LANES
        self.panels = -(-self.columns_of_matrix // width)
        depth = self.depth
        self.x = b.tensor("x", [self.extent(rows), depth], "float32", align=4)
        self.matrix = b.tensor("matrix", [self.panels, depth, width], "float32", align=64)
        return None

    def load(self, name: str, index: Index) -> Expr:
        return self.block[self.here] if name == self.product else super().load(name, index)

    def emit(self) -> None:
        """Emit blocks of rows, panel by panel."""
        rows = self.extent(self.graph.tile(self.product).shape[0])
        size = ROWS[self.vectors]
        blocks = self.values.simplified(tirx.floordiv(rows + size - 1, size))
        count = self.values.simplified(blocks * self.panels)
        work = self.depth * self.columns_of_matrix
        serial = isinstance(rows, int) and rows * work < SERIAL
        with b.loop(count) if serial else v.parallel(count) as number, self.ranged(number, count):
            panel, at = self.unravelled(number, (self.panels, blocks))
            self.block_of(rows, b.bind(at * size), b.bind(panel))

    def block_of(self, rows: Expr, first: Expr, panel: Expr) -> None:
        """Emit one block: its products, then what is made of them, row by row."""
        size = ROWS[self.vectors]
        self.block = v.scratch(size * self.vectors * LANES, "float32")
        count = b.bind(tirx.min(size, rows - first))
        tails = [1 << bit for bit in reversed(range((size - 1).bit_length()))]

        def rest() -> None:
            for tail in tails:
                done = tirx.floordiv(count, 2 * tail) * (2 * tail)
                with b.when(tirx.floormod(tirx.floordiv(count, tail), 2) == 1):
                    self.products(tail, first, b.bind(done), panel)

        b.either(count == size, lambda: self.products(size, first, 0, panel), rest)
        with b.loop(count) as row, self.ranged(row, size):
            self.row_of(first, row, panel)

    def products(self, rows: int, first: Expr, done: Expr, panel: Expr) -> None:
        """Emit the products of some rows of a block with a panel."""
        sums = v.scratch(rows * self.vectors * LANES, "float32")
        places = [(row, vector) for row in range(rows) for vector in range(self.vectors)]
        for row, vector in places:
            b.store(sums, v.constant(0, "float32"), v.lanes((row * self.vectors + vector) * LANES))
        with b.loop(self.depth) as step:
            weights = [b.bind(self.matrix[panel, step, v.lanes(n * LANES)]) for n in range(self.vectors)]
            for row in range(rows):
                x = b.bind(v.splat(self.x[first + done + row, step]))
                for vector, weight in enumerate(weights):
                    at = v.lanes((row * self.vectors + vector) * LANES)
                    b.store(sums, v.fma(x, weight, sums[at]), at)
        for row, vector in places:
            at = (row * self.vectors + vector) * LANES
            b.store(self.block, sums[v.lanes(at)], v.lanes(done * (self.vectors * LANES) + at))

    def row_of(self, first: Expr, row: Expr, panel: Expr) -> None:
        """Emit the results of one row of a block: whole vectors, and what is left of the last."""
        width = self.vectors * LANES
        rest = self.columns_of_matrix % LANES
        for vector in range(self.vectors):
            start = panel * width + vector * LANES

            def whole(start: Expr = start, vector: int = vector) -> None:
                self.elements(first + row, start, row * width + vector * LANES, LANES)

            def part(start: Expr = start, vector: int = vector) -> None:
                with b.when(start < self.columns_of_matrix):
                    self.elements(first + row, start, row * width + vector * LANES, rest)

            if self.panels * width == self.columns_of_matrix:
                whole()
            elif not rest:
                with b.when(start < self.columns_of_matrix):
                    whole()
            else:
                b.either(start + LANES <= self.columns_of_matrix, whole, part)

    def elements(self, row: Expr, start: Expr, at: Expr, lanes: int) -> None:
        """Emit neighbouring elements of all results."""
        with b.vector(lanes) as lane, self.ranged(lane, lanes), self.in_lane(lane, lanes):
            self.here = at + lane
            for value in self.graph.outputs:
                self.element(value, (row, start + lane))
        self.values.forget()


def emit_rows(graph: Graph, depth: int, name: str) -> Any:
    """Emit the PrimFunc ``(sizes..., x, matrix, others..., y)`` of a chain that reads a product first."""
    chain = Chain.of(graph)
    plain = replace(chain, graph=decompose(chain.graph))
    with b.function(name) as result:
        RowNest(plain, depth).emit()
    return result.func


def panels(matrix: Any) -> Any:
    """Return a torch matrix ``[N, K]`` in panels: ``[ceil(N / width), K, width]``, zeros beyond N."""
    import torch

    columns, depth = matrix.shape
    width = panel_vectors(columns) * LANES
    count = -(-columns // width)
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, count * width - columns))
    return padded.reshape(count, width, depth).transpose(1, 2).contiguous()
