"""A chain in the kernel of attention: it makes q, and new rows of the caches of keys and values.

Each block makes the rows of q that it has, in shared memory. A new row of a cache is stored by the block of
the cluster whose warp will read it, before any of its warps reads: no other block reads that row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.attention import AXES, Attention
from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain import plain_chain
from ladder.lower.chain.cuda import ACCESS, CudaDialect, prefetch_by_first
from ladder.lower.chain.gathers import reads_rows
from ladder.lower.chain.gpu_rows import RowLoops
from ladder.lower.chain.indices import Index
from ladder.lower.chain.scatter import Chain
from ladder.lower.chain.side_by_side import Loop, declare_arguments, part_of
from ladder.lower.cuda.attention_loads import Place
from ladder.movement.mapping import Mapping
from schedules.attention import WARP, AttentionSchedule
from schedules.schedule import check
from targets import TileDevice

VECTOR = 8
"""Elements of a row that a lane makes at a time: 16 bytes."""

PAD = 8
"""Elements between rows of q, so that lanes of different rows use different banks."""

TOKENS = 2
"""Axis of ``[batch, heads, tokens, size]`` along which rows go into a cache."""


@dataclass(frozen=True)
class RowsForm:
    """A chain that makes q ``[batch, heads, 1, size]``, and puts a row of each head into two caches.

    graph: Of known sizes; its results are q, and the ``put`` nodes of keys and values.
    """

    graph: Graph

    def __post_init__(self) -> None:
        q, *caches = (self.graph.producer(value) for value in self.graph.outputs)
        shapes = [tile.shape for node in self.graph.nodes for tile in node.tiles]
        check(all(isinstance(extent, int) for shape in shapes for extent in shape), "sizes are open")
        check(len(q.tile.shape) == 4 and q.operator != "put", "q has four axes, and is no cache")
        check(len(caches) == 2 and all(map(_puts_tokens, caches)), "rows of tokens go into two caches")
        rows = {self.graph.tile(node.inputs[2]).shape[TOKENS:] for node in caches}
        check(rows == {q.tile.shape[TOKENS:]} and q.tile.shape[TOKENS] == 1, "there is one new token")
        check(all(node.tile.shape[0] == q.tile.shape[0] for node in caches), "they are of one batch")


def _puts_tokens(node: Node) -> bool:
    """Tell whether a node puts whole rows of tokens into a cache."""
    if node.operator != "put" or len(node.tile.shape) != 4:
        return False
    given = node_attributes(node)
    return given["axis"] == TOKENS and not given["along"] and not given["combine"]


class _Dialect(CudaDialect):
    """CUDA's dialect with stores of rows where attention reads them."""

    def __init__(self, device: TileDevice) -> None:
        super().__init__(device)
        self.space = ""
        """Memory that takes the result that is made now."""
        self.place: Callable[[Index], Expr]
        """The address of an element there."""

    def store(self, buffer: Any, index: Index, words: Sequence[Expr]) -> None:
        b.ptx(f"st.{self.space}{ACCESS[len(words)]}.u32", self.place(index), *words)


class AttentionRows:
    """Rows being made, see `ladder.lower.cuda.attention_loads.MadeRows`.

    It declares its arguments when it is made: the chain's inputs, but for the caches.
    """

    def __init__(
        self, form: RowsForm, attention: Attention, device: TileDevice, schedule: AttentionSchedule
    ) -> None:
        self.attention, self.schedule = attention, schedule
        check(attention.group <= schedule.rows, "a block has all heads that share keys")
        self.dialect = _Dialect(device)
        chain, cheap = plain_chain(Chain.of(form.graph), self.dialect.functions)
        sizes, arguments = declare_arguments(chain, results=False)
        lanes = max(2, 1 << (-(-attention.size // (2 * VECTOR)) - 1).bit_length())
        mapping = Mapping(lanes, -(-attention.size // (VECTOR * lanes)), WARP // lanes)
        parts = [part_of(chain, (value,)) for value in chain.graph.outputs]
        self.nests = [Loop(part, self.dialect, mapping, cheap, sizes, arguments) for part in parts]
        check(all(nest.rows == 3 for nest in self.nests), "a row is of one head and token")
        self.rows: Any = None

    def allocate(self, pool: Any) -> None:
        """Take shared memory for q."""
        attention = self.attention
        self.rows = pool.alloc((attention.group, attention.size + PAD), attention.ttype, align=128)

    def prefetch(self, place: Place) -> None:
        """Bring small inputs into L2 while the kernel before may still run; by the grid's first block."""
        found = {name: line for nest in self.nests for name, line in nest.early_lines().items()}
        first = tirx.all(place.rank == 0, place.first_row == 0, place.head == 0, place.batch == 0)
        prefetch_by_first(found.values(), first, place.thread, self.schedule.threads)

    def emit(self, place: Place, span: int) -> None:
        """Make all rows of the block's head, those of q, of keys and of values by warps of their own.

        span: Keys of a warp's iteration.
        """
        first = 0
        if any(reads_rows(nest.graph) for nest in self.nests):
            self.dialect.watch_rows()
        for nest, name, heads in zip(self.nests, "qkv", (self.attention.group, 1, 1), strict=True):
            warps = -(-heads // nest.mapping.teams)
            self.dialect.space = "shared" if name == "q" else "global"
            self.dialect.place = self._address(name, place)
            with b.when(T.And(place.warp >= first, place.warp < first + warps)):
                self._make(nest, place, heads, b.bind(place.warp - first), span)
            first += warps
        check(first <= self.schedule.warps, f"{first} warps make rows, a block has {self.schedule.warps}")
        self.dialect.finish()
        b.block_sync()

    def _address(self, name: str, place: Place) -> Callable[[Index], Expr]:
        """Return the address of an element of q, of keys or of values, by its index."""
        if name == "q":
            first = place.head * self.attention.group
            return lambda at: self.rows.ptr_to([at[1] - first, at[3]])
        numbers, cache = place.inputs.numbers, place.inputs.tensors[name]
        steps = [*(numbers[f"{name}_{axis}"] for axis in AXES[name]), 1]
        return lambda at: cache.ptr_to([sum(map(operator.mul, at, steps))])

    def _make(self, nest: Loop, place: Place, heads: int, warp: Expr, span: int) -> None:
        """Make the rows of a result, a team of lanes each; teams beyond the last make it too.

        heads: Of the result that the block has.
        warp: The warp among those that make the result.
        """
        lanes, (value,) = nest.lanes, nest.graph.outputs
        nest.thread, nest.lane = place.thread, b.bind(place.lane % lanes)
        team = b.bind(warp * nest.mapping.teams + place.lane // lanes)
        head = place.head * heads + T.min(team, heads - 1)
        row, valid = b.bind(place.batch * (self.attention.kv_heads * heads) + head), team < heads
        if value in nest.scatters and self.schedule.cluster > 1:
            valid = T.And(valid, self._is_here(nest, value, place, span))
        nest.valid, loops = b.bind(valid), RowLoops(nest)
        nest.open_codes()
        check(loops.row_layout(value)[0] > 1, "rows are made in vectors")
        loops.row(row)

    def _is_here(self, nest: Loop, value: str, place: Place, span: int) -> Expr:
        """Tell whether a warp of this block reads the new row of a cache."""
        scatter = nest.scatters[value]
        number = b.bind(T.Cast("int32", nest.buffers[scatter.ids][0]))
        row = T.Select(number < 0, number + scatter.base.shape[scatter.axis], number)
        return row // span % self.schedule.cluster == place.rank
