"""Sums into a few places by number, as of histograms: blocks of a GPU have their own in shared memory.

Many threads would else wait for each other at every place. At its end a block adds what it has found to what
is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.build import node_attributes
from ladder.ir.extents import product
from ladder.ir.graph import Graph
from ladder.ir.scalars import reinterpreted
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.element_types import stored_type
from ladder.lower.chain.indices import Index
from ladder.lower.chain.scatter import Chain
from ladder.partition.rows import REDUCTIONS, SCANS
from targets import TileDevice

if TYPE_CHECKING:
    from ladder.lower.chain.gpu_nest import GpuNest

MOST_BINS, LEAST_EACH = 1 << 13, 8
"""Places that a block has, and elements that it adds for each of them at least."""

THREADS, TURNS, BLOCKS = 512, 4, 2
"""Of a block, elements that a thread reads before it adds one, and blocks per multiprocessor."""

MOST_EXACT = 1 << 53
"""Numbers from which on float64 does not hold all that are whole."""

COUNTED = ("int32", "int64", "float32")
SUMMED = ("int32", "float32")
"""Types of which equal numbers are counted, and of which others are summed."""


def bin_blocks(chain: Chain, device: TileDevice) -> int:
    """Return the blocks of a kernel that sums into places of its own first; 0: none does.

    The chain adds each of many elements of known number to one of a few places, and has no other result.
    """
    graph, (value, *others) = chain.graph, chain.graph.outputs
    scatter = chain.scatters.get(value)
    if others or scatter is None or scatter.combine != "add" or device.kind != "cuda":
        return 0
    bins, count = product(scatter.base.shape), product(graph.tile(value).shape)
    kinds = SUMMED if number_of(graph, value) is None else COUNTED
    reduces = any(node.operator in (*REDUCTIONS, *SCANS) for node in graph.nodes)
    known = isinstance(bins, int) and isinstance(count, int) and 0 < bins <= MOST_BINS
    if not known or reduces or graph.tile(value).ttype.name not in kinds:
        return 0
    blocks = min(BLOCKS * device.units, int(count) // (LEAST_EACH * int(bins)))
    return blocks if 2 * blocks >= device.units else 0


def number_of(graph: Graph, value: str) -> float | None:
    """Return the number that all elements of a value are; None if they are of other values."""
    node = graph.producer(value)
    while node.operator in ("broadcast", "reshape", "convert"):
        node = graph.producer(node.inputs[0])
    number = float(node_attributes(node)["value"]) if node.operator == "constant" else None
    return number if number is None or abs(number) < MOST_EXACT else None


class Bins:
    """A kernel whose blocks have places of their own.

    blocks: How many.
    """

    def __init__(self, nest: GpuNest, blocks: int) -> None:
        self.nest, self.blocks = nest, blocks
        (self.value,) = nest.graph.outputs
        self.base = nest.scatters[self.value].base
        self.count, self.bins = (
            int(product(s)) for s in (nest.graph.tile(self.value).shape, self.base.shape)
        )
        self.number = number_of(nest.graph, self.value)
        self.dtype = stored_type(nest.graph.tile(self.value).ttype.name)

    def emit(self) -> None:
        nest = self.nest
        nest.alone, nest.bins = True, self
        block, thread = nest.start(self.blocks, THREADS, self.bins)
        self.each(thread, lambda at: b.store(nest.dialect.shared, T.uint32(0), at))
        nest.dialect.sync()
        self.add_elements(block, thread)
        nest.dialect.sync()
        self.each(thread, self.add_bin)

    def each(self, thread: Expr, body: Callable[[Expr], None]) -> None:
        """Emit ``body(place)`` for each place, by a thread each."""
        with b.loop(-(-self.bins // THREADS)) as turn:
            at = b.bind(turn * THREADS + thread)
            with b.when(at < self.bins):
                body(at)

    def add_elements(self, block: Expr, thread: Expr) -> None:
        """Emit the sums of a block's elements, which lie side by side."""
        nest, together = self.nest, THREADS * TURNS
        turns = -(-self.count // (self.blocks * together))
        shape = nest.shape(self.value)
        with b.loop(turns) as turn:
            nest.later = []
            for at in range(TURNS):
                number = b.bind((block * turns + turn) * together + at * THREADS + thread)
                nest.valid = number < self.count
                item = b.bind(tirx.min(number, self.count - 1))
                nest.within(item, self.count)
                nest.store_vector(self.value, [nest.bound_index(item, shape)])
            for valid, store in nest.later:
                with b.where(valid):
                    store()
            nest.later = nest.valid = None
            nest.values.forget()
            nest.vectors.words.clear()

    def combine(self, place: Index, found: Sequence[Expr]) -> None:
        """Emit the sum of an element with what the block has for its place."""
        flat: Expr = 0
        for at, extent in zip(place, self.base.shape, strict=True):
            flat = flat * extent + at
        (element,) = found
        self.nest.dialect.add_shared(flat, "f32" if self.is_float else "u32", self.as_word(element))

    @property
    def is_float(self) -> bool:
        return self.number is None and self.dtype == "float32"

    def as_word(self, element: Expr) -> Expr:
        if self.number is not None:
            return T.uint32(1)
        return element if self.is_float else reinterpreted("uint32", element)

    def add_bin(self, at: Expr) -> None:
        """Emit the sum of what a block has for a place with what is there."""
        nest = self.nest
        bits = b.bind(b.Variable("uint32", nest.dialect.shared[at]).value)
        with b.when(bits != T.uint32(0)):
            total = bits if self.number is not None else reinterpreted(self.dtype, bits)
            if self.number is not None:
                total = T.Cast(self.dtype, bits) * tirx.const(self.typed(self.number), self.dtype)
            place = nest.unravelled(at, list(self.base.shape))
            nest.dialect.combine("add", nest.results[self.value], place, self.dtype, [b.bind(total)])

    def typed(self, number: float) -> float | int:
        return number if self.dtype.startswith("float") else int(number)
