"""A chain of rows as the prologue of a product of few activation rows: its result never leaves shared memory.

Every block computes all rows of the chain, with all its threads, and keeps the activation rows that the
product multiplies. What else the chain gives (the sum of a residual, say) is stored by one block, as are
the rows themselves where others read them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tvm.script import tirx as T

from ladder.ir.extents import product
from ladder.ir.graph import Graph
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.approximation import may_be_approximate
from ladder.lower.chain.cuda import ACCESS, CudaDialect, prefetch_by_first
from ladder.lower.chain.gpu_nest import GpuNest
from ladder.lower.chain.gpu_rows import RowLoops
from ladder.lower.chain.indices import Index
from ladder.lower.chain.nest import Reduction
from ladder.lower.chain.scatter import Chain
from ladder.movement.decompose import contracted, decompose
from ladder.movement.mapping import HELD, Mapping, held_columns
from ladder.partition.rows import REDUCTIONS, loop_axes
from schedules.schedule import check
from targets import TileDevice
from tile_types.tile import Tile

MOST_ROWS = 4
"""Rows of a prologue: every block computes all of them, one after the other."""

RUN = 8
"""Elements of a row that a thread stores at once: 16 bytes."""


@dataclass(frozen=True)
class PrologueForm:
    """A chain, and which of its results are the activation rows of a product.

    graph: The chain, of known sizes.
    value: The result that is multiplied.
    copies: Shapes of further results, in which the activation rows are stored, once or several times over.
    """

    graph: Graph
    value: str
    copies: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        check(bool(self.graph.tile(self.value).shape), "a number is no row")
        shapes = (*(node.tile.shape for node in self.graph.nodes), *self.copies)
        check(all(isinstance(e, int) for shape in shapes for e in shape), "sizes are open")
        check(all(node.operator != "put" for node in self.graph.nodes), "a prologue scatters nothing")
        check(0 < self.rows <= MOST_ROWS, f"a prologue has up to {MOST_ROWS} rows, got {self.rows}")
        check(self.columns % RUN == 0, f"rows of {self.columns} elements are no multiple of {RUN}")
        check(self.graph.tile(self.value).ttype.elem_bits == 16, "activation rows of 16-bit floats are kept")
        rows = loop_axes(self.graph, self.graph.outputs)
        held = None if rows is None else held_columns(self.graph, rows)
        check(held == self.columns, "threads hold no rows of this chain")

    @property
    def rows(self) -> int:
        """Activation rows."""
        return int(product(self.graph.tile(self.value).shape[:-1]))

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return int(self.graph.tile(self.value).shape[-1])

    @property
    def kind(self) -> str:
        """Type of the activation rows."""
        return self.graph.tile(self.value).ttype.name

    @property
    def words(self) -> int:
        """32-bit words in which the warps of a block exchange what they reduced."""
        return 64 * self.rows * sum(node.operator in REDUCTIONS for node in self.graph.nodes)

    @property
    def nbytes(self) -> int:
        """Shared memory of a block."""
        return 2 * self.rows * self.columns + 4 * self.words + 256


class _Dialect(CudaDialect):
    """CUDA's dialect with its own stores of activation rows."""

    rows: Any = None
    """Shared memory that takes them, in their own shape."""

    def store(self, buffer: Any, index: Index, words: Any) -> None:
        if buffer is not self.rows:
            super().store(buffer, index, words)
            return
        b.ptx(f"st.shared{ACCESS[len(words)]}.u32", buffer.ptr_to(list(index)), *words)


class _Nest(GpuNest):
    """The chain, its rows shared by all threads of a block; the multiplied result is no argument."""

    def __init__(
        self, form: PrologueForm, chain: Chain, device: TileDevice, mapping: Mapping, cheap: bool
    ) -> None:
        self.form = form
        self.multiplied = chain.graph.outputs[form.graph.outputs.index(form.value)]
        """The result that is multiplied, by its name in the chain as it is emitted."""
        super().__init__(chain, _Dialect(device), mapping, cheap)
        check(len(self.columns(self.multiplied)) == 1, "rows of a prologue have one axis")

    def buffer(self, name: str, tile: Tile) -> Any:
        return None if name == f"{self.multiplied}_result" else super().buffer(name, tile)

    def over_lanes(self, it: Reduction, value: Expr) -> Expr:
        """Return what all threads of the block found; its warps may be of any number."""
        wave, warps = self.dialect.wave, self.lanes // self.dialect.wave
        read = self.exchanged(self.shuffled(it, value, wave), it.dtype)
        found, within = b.Variable(it.dtype, it.neutral), b.bind(T.floormod(self.lane, wave))
        with b.when(within < warps):
            found.set(read(within))
        return self.shuffled(it, found.value, wave)


class _Rows(RowLoops):
    """Every row in each block; what is no activation row is stored by the first block."""

    def __init__(self, nest: _Nest, first: Expr) -> None:
        super().__init__(nest)
        self.first = first

    def row_result(self, value: str, row: Index, width: int, cuts: Any) -> None:
        self.nest.valid = None if value == self.nest.multiplied else self.first  # type: ignore[attr-defined]
        super().row_result(value, row, width, cuts)


class ChainPrologue:
    """A prologue being emitted, see `ladder.lower.cuda.launch.Prologue`.

    It declares its arguments when it is made: the chain's inputs, then the results that are stored.

    threads: Of a block.
    """

    def __init__(self, form: PrologueForm, device: TileDevice, threads: int) -> None:
        turns = -(-form.columns // (RUN * threads))
        check(turns * RUN <= HELD, f"rows of {form.columns} elements are too long for {threads} threads")
        cheap = may_be_approximate(form.graph)
        graph = contracted(decompose(form.graph)) if cheap else decompose(form.graph)
        chain = Chain(graph, {}, ())
        self.form, self.threads = form, threads
        self.columns, self.nbytes = form.columns, form.nbytes
        self.nest = _Nest(form, chain, device, Mapping(lanes=threads, num=turns), cheap)
        self.copies = [b.tensor(f"copy{at}", shape, form.kind) for at, shape in enumerate(form.copies)]
        self.rows: Any = None
        """The activation rows in shared memory."""

    def prefetch(self, first: Expr, thread: Expr) -> None:
        """Bring small inputs into L2 while the kernel before may still run; by the ``first`` block."""
        dialect: Any = self.nest.dialect
        if dialect.overlap.possible:
            prefetch_by_first(self.nest.early_lines().values(), first, thread, self.threads)

    def allocate(self, pool: Any) -> Any:
        """Return shared memory for the activation rows."""
        dialect: Any = self.nest.dialect
        dialect.shared = pool.alloc((max(1, self.form.words),), "uint32", align=128)
        first, shape = pool.offset, self.form.graph.tile(self.form.value).shape
        dialect.rows = self.nest.results[self.nest.multiplied] = pool.alloc(shape, self.form.kind, align=128)
        pool.move_base_to(first)
        self.rows = pool.alloc((self.form.rows, self.form.columns), self.form.kind, align=128)
        return self.rows

    def emit(self, first: Expr, thread: Expr) -> None:
        """Compute all rows; the block may read them afterwards.

        first: Whether this block stores the other results.
        thread: This thread of the block.
        """
        nest = self.nest
        nest.thread = nest.lane = thread
        nest.within(thread, self.threads)
        nest.watch_rows()
        for row in range(self.form.rows):
            _Rows(nest, first).row(row)
            nest.values.forget()
            nest.values.cells.clear()
            nest.vectors.words.clear()
        nest.dialect.finish()
        b.block_sync()
        if self.copies:
            with b.when(first):
                self.store_copies(thread)

    def store_copies(self, thread: Expr) -> None:
        """Store the activation rows in the results that are copies of them, vector by vector."""
        chunks = self.columns // RUN
        with b.loop((self.form.rows * chunks + self.threads - 1) // self.threads) as turn:
            number = b.bind(turn * self.threads + thread)
            with b.when(number < self.form.rows * chunks):
                row, column = b.bind(T.floordiv(number, chunks)), b.bind(T.floormod(number, chunks) * RUN)
                words = b.local(4, "uint32")
                place = self.rows.ptr_to([row, column])
                b.ptx("ld.shared.v4.u32", *(words[at] for at in range(4)), place)
                for result, shape in zip(self.copies, self.form.copies, strict=True):
                    for first in range(0, prod(shape[:-1]), self.form.rows):
                        target = result.ptr_to([*self.nest.unravelled(first + row, shape[:-1]), column])
                        b.ptx("st.global.v4.u32", target, *(words[at] for at in range(4)))
