"""Elements, vectors and reductions of chains on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.build import is_along_last
from ladder.ir.graph import Node
from ladder.ir.ops import get_operator
from ladder.ir.scalars import opaque
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.conversions import round_through
from ladder.lower.chain.element_types import computed_type, stored_type
from ladder.lower.chain.indices import Index
from ladder.lower.chain.llvm_functions import LLVM_FUNCTIONS, bfloat16_of, exp, nearest, through_bfloat16
from ladder.lower.chain.nest import Nest, Reduction, is_zero, uses
from ladder.lower.chain.scatter import Chain
from ladder.lower.cpu import vectors as v
from ladder.lower.cpu.vectors import as_float
from ladder.movement.choose import bound
from ladder.movement.instantiate import instantiate
from ladder.movement.mapping import Mapping
from ladder.movement.model import held
from ladder.movement.rewrite import rewrite
from ladder.partition.rows import REDUCTIONS

LANES, NARROW = 16, 4
"""Elements of a vector, and of the shorter vectors at the end of a row."""

MOST_STACK_ELEMENTS = 1 << 13
"""Elements of a row that are kept on the stack between its reductions and its results; others on the heap."""


class CpuNest(Nest):
    """A kernel for CPUs being emitted: what computes elements, one by one and in vectors."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self.open_codes()
        self.values.lowerings = {
            **LLVM_FUNCTIONS,
            **dict.fromkeys(("exp", "exp_ftz"), lambda x: exp(x, self.values.named)),
            "round": nearest,
        }
        self.values.rounded = self.rounded
        self.lane: tuple[Expr, int] = (0, 1)
        """Which lane of how many is being emitted."""
        self.turned: dict[Any, Expr] = {}
        """Bits of elements that lie turned in a scratch, by input and address."""
        self.memory_of_rows: dict[tuple[str, str], Any] = {}
        """What keeps rows that are long or of open length, by value and type: one row after the other."""

    @cached_property
    def kept(self) -> frozenset[str]:
        """Values whose rows stay in memory between a reduction over them and what reads them after it."""
        return held(rewrite(instantiate(bound(self.graph), Mapping(LANES))))

    def long_rows(self) -> dict[tuple[str, str], Expr]:
        """Return (value, type) -> the length of its rows, of those that are kept, but not on the stack."""
        found = {}
        for node in self.graph.nodes:
            kept = self.kept_by(node) if node.operator in REDUCTIONS else ""
            if kept:
                length = self.extent(self.graph.tile(kept).shape[-1])
                if not is_short(length):
                    found[kept, computed_type(node.tile.ttype.name)] = length
        return found

    def kept_by(self, node: Node) -> str:
        """Return the value whose row a reduction keeps: its operand, or what makes that alone; "" if none."""
        wanted = {*self.values.shared, *self.graph.outputs}  # what nothing else reads is not kept
        several = [value for value in self.rows_of(node) if value in wanted]
        return next((value for value in several if value in self.kept), "")

    def rows_of(self, node: Node) -> Iterator[str]:
        """Yield the operand of a reduction along rows, and what makes it alone, nearest first."""
        value = node.inputs[0] if is_along_last(self.graph, node) else ""
        while value:
            yield value
            made = self.graph.producer(value)
            alone = get_operator(made.operator).elementwise and len(made.inputs) == 1
            value = made.inputs[0] if alone and self.graph.tile(made.inputs[0]) == made.tile else ""

    def held(self, value: Expr, whole: Expr = None) -> Expr:
        """Return an open number in memory: TVM would put what it is made of in every place where it is read.

        whole: What makes it open, by default itself.
        """
        if isinstance(value if whole is None else whole, int):
            return value
        cell = v.scratch(1, "int32")
        b.store(cell, value, 0)
        return cell[0]

    def register(self, value: Expr) -> Expr:
        """Return a value that is computed once, in memory that LLVM makes a register of.

        What has a name TVM's passes put in its place again, in exponential time; bounds of vectors of
        comparisons they cannot tell.
        """
        if str(value.ty.dtype) == "bool":
            return opaque(tirx.NE(self.register(tirx.Select(value, T.int32(1), T.int32(0))), T.int32(0)))
        at, lanes = self.lane
        cell = v.scratch(lanes, str(value.ty.dtype))
        b.store(cell, value, at)
        return cell[at]

    @contextmanager
    def rows_over(self, count: Expr, serial: bool) -> Iterator[Expr]:
        """Emit a loop over threads, or of one thread."""
        with b.loop(count) if serial else v.parallel(count) as at:
            self.within(at, count)
            yield at

    @contextmanager
    def vector(self, lanes: int) -> Iterator[Expr]:
        with b.vector(lanes) as lane:
            self.within(lane, lanes)
            before, self.lane = self.lane, (lane, lanes)
            yield lane
            self.lane = before

    def rounded(self, value: Expr, kind: str) -> Expr:
        """Return a float32 rounded to a 16-bit type, as a float32."""
        if kind == "bfloat16":
            return through_bfloat16(value, self.values.named)
        return round_through(value, kind)

    def stored(self, value: str, found: Expr) -> Expr:
        kind = self.graph.tile(value).ttype.name
        return bfloat16_of(found, self.register) if kind == "bfloat16" else super().stored(value, found)

    def load(self, name: str, index: Index) -> Expr:
        kind = self.graph.tile(name).ttype.name
        place = tvm_ffi.structural_hash(self.address(name, index)) if self.turned else None
        if (name, place) in self.turned:
            return from_bits(self.turned[name, place], kind)
        value, wanted = self.buffers[name][index or (0,)], computed_type(kind)
        if kind in ("float16", "bfloat16"):
            return as_float(value, kind)
        return value if stored_type(kind) == wanted else T.Cast(wanted, value)

    def element(self, value: str, index: Index) -> None:
        """Emit one element of a result."""
        self.prepare(value, index, ())
        with self.values.keeping(self.register):
            found = self.stored(value, self.values.at(value, index))
        with self.placed(value, [index]) as (place,):
            b.store(self.results[value], found, *(place or (0,)))

    def is_decided(self, value: str, index: Callable[[Expr], Index], start: Expr, stop: Expr) -> bool:
        """Tell whether joins and borders are decided alike for all lanes of each vector from ``start`` on.

        TVM takes loops with other conditions apart into single lanes, and does not do so right where values
        are kept.
        """
        return all(
            self._is_decided(value, index, *each) for each in self.loops(start, stop, LANES) if each[2] > 1
        )

    def _is_decided(
        self, value: str, index: Callable[[Expr], Index], first: Expr, turns: Expr, lanes: int
    ) -> bool:
        chunk, lane = self.probe("chunk", turns), self.probe("lane", lanes)
        with self.values.only_loads():
            self.reads(value, index(first + chunk * lanes + lane))
            return not any(
                uses(part, (chunk, lane)) for comparison in self.values.open for part in comparison
            )

    def vector_loop(self, start: Expr, stop: Expr, lanes: int, body: Callable[[Expr, Expr], None]) -> None:
        """Emit ``body(i, lane)`` for start <= i < stop: in vectors, narrow ones, then in lane 0."""
        for first, turns, width in self.loops(start, stop, lanes):
            if width == 1:
                with self.loop(turns) as at:
                    body(first + at, 0)
            else:
                with self.loop(turns) as chunk, self.vector(width) as lane:
                    body(first + chunk * width + lane, lane)
            self.values.forget()

    def loops(self, start: Expr, stop: Expr, lanes: int) -> Iterator[tuple[Expr, Expr, int]]:
        """Yield the loops that go from ``start`` to ``stop``: where each begins, its turns, their lanes."""
        rest = self.values.simplified(stop - start)
        for width in (lanes, NARROW, 1) if lanes > 1 else (1,):
            turns = self.values.simplified(rest // width)
            if is_zero(turns) or (width == NARROW and turns == 1):  # not worth its code
                continue
            yield start, turns, width
            start = self.values.simplified(start + turns * width)
            rest = self.values.simplified(rest - turns * width)

    def reduce(self, node: Node, index: Index) -> None:
        """Emit one reduction: a sum per lane, then over lanes."""
        it = Reduction(self, node, index)
        probe = self.probe("k", it.extent)
        self.prepare(it.operand, it.at(probe), (probe,))
        nested = bool(self.values.needed(it.operand, it.at(probe)))
        self.values.forget()
        pieces = [(0, it.extent)] if nested else self.cuts(it.operand, it.at(probe), probe, it.extent)
        one = nested or (isinstance(it.extent, int) and it.extent < LANES)
        widths = [1 if one or not self.is_decided(it.operand, it.at, *piece) else LANES for piece in pieces]
        lanes = max(widths, default=1)
        sums = v.scratch(lanes, it.dtype)
        b.store(sums, v.splat(it.neutral, lanes) if lanes > 1 else it.neutral, v.lanes(0, lanes))

        kept = self.kept_by(node)
        row = self.memory_of_rows.get((kept, it.dtype))
        if kept and is_short(it.extent):
            row = v.scratch(it.extent, it.dtype)

        def add(position: Expr, lane: Expr) -> None:
            self.prepare(it.operand, it.at(position), ())
            with self.values.keeping(self.register):
                if row is not None:
                    place = tuple(map(self.values.simplified, it.at(position)))
                    b.store(row, self.values.at(kept, place), position)
                    self.values.memory[self.values.key(kept, place)] = row[position]
                found = self.values.at(it.operand, it.at(position))
            b.store(sums, it.combine(sums[lane], found), lane)

        for piece, width in zip(pieces, widths, strict=True):
            self.vector_loop(*piece, width, add)
        if row is not None:
            place = tuple(map(self.values.simplified, it.at(0)[:-1]))
            self.values.rows[kept] = self.values.key(kept, place), row
        while lanes > 1:
            lanes //= 2
            with self.vector(lanes) as lane:
                b.store(sums, it.combine(sums[lane], sums[lane + lanes]), lane)
        self.keep_cell(node, index, b.bind(sums[0]))


def is_short(length: Expr) -> bool:
    """Tell whether a row is kept on the stack."""
    return isinstance(length, int) and length <= MOST_STACK_ELEMENTS


def from_bits(bits: Expr, kind: str) -> Expr:
    """Return an element of a type as it is computed with, from its bits."""
    if kind == "bfloat16":
        return T.reinterpret("float32", T.shift_left(T.Cast("uint32", bits), T.uint32(16)))
    value, wanted = T.reinterpret(stored_type(kind), bits), computed_type(kind)
    return value if stored_type(kind) == wanted else T.Cast(wanted, value)
