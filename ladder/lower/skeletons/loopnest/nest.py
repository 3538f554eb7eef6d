"""Base of the loop nests of vectors and of tile registers: rows are prepared, columns spread over threads.

A nest walks the statements of its program in order. Loops over the rows and columns, the preparation of x
and the output are emitted here; what is inside the loop over columns differs by the kind of registers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir import scalars
from ladder.ir.ops import get_operator
from ladder.ir.program import (
    AddGroup,
    Copy,
    Fill,
    Loop,
    Multiply,
    Operand,
    Statement,
    Store,
    Sum,
    TileProgram,
)
from ladder.ir.program.model import made_by, walk
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.llvm_functions import exp
from ladder.lower.cpu import vectors as v
from ladder.lower.cpu.pack import HALF, NUMBERS
from ladder.lower.cpu.vectors import BYTES
from ladder.lower.skeletons.loopnest.activations import WORD_COLUMNS, Activations
from ladder.lower.skeletons.loopnest.decode import (
    Decoder,
    copies_of,
    decoder_for,
    form_of,
    units_ahead,
)
from ladder.lower.skeletons.loopnest.digits import (
    MOST_LEFT_OUT,
    PASSES,
    ByteDigitActivations,
    DigitActivations,
)
from ladder.lower.skeletons.loopnest.terms import TermActivations
from ladder.lower.skeletons.loopnest.units import BYTE_LANE, Unit
from schedules.cpu_layout import LANES, ROWS, UNIT, CpuLayout, stored_layout
from schedules.instructions import BYTE_RECIPES, BYTE_SPLITS, DIGITS, INSTRUCTIONS, SPLITS, TERMS, pieces_of

NAMES = {"w": "words", "scale": "scales", "zero": "zeros"}
"""Arguments that kernels call by what packing makes of them."""


@dataclass(frozen=True)
class OperandTensors:
    """Tensors and extents of one kernel.

    m, n, k: Rows of x, columns of the output, row pitch of x.
    blocks, units, groups: Extents of the packed weight.
    tensors: By the names of the program's arguments.
    """

    m: Expr
    n: Expr
    k: Expr
    blocks: Expr
    units: Expr
    groups: Expr
    tensors: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]


def declare_arguments(program: TileProgram) -> OperandTensors:
    """Declare the arguments in calling order; every extent is symbolic."""
    m, n, k = b.symbol("M"), b.symbol("N"), b.symbol("K")
    blocks, units, n_pad = b.symbol("blocks"), b.symbol("units"), b.symbol("n_pad")
    bits = program.operand("w").tile.ttype.elem_bits
    shapes: dict[str, tuple[Expr, ...]] = {
        "x": (m, k),
        "w": (blocks, units, LANES * bits),
        "scale": (b.symbol("scale_groups"), n_pad, b.symbol("scale_bytes")),
        "zero": (b.symbol("zero_groups"), n_pad, b.symbol("zero_bytes")),
        "row_scale": (n_pad,),
        "token_scale": (m,),
        "bias": (n,),
        "y": (m, n),
    }
    tensors = {operand.name: _tensor(operand, shapes[operand.name]) for operand in program.arguments}
    layout = stored_layout(program)
    groups: Expr = 1
    if layout.group:
        padded = layout.padded_group
        groups = units * (UNIT // padded) if padded < UNIT else tirx.floordiv(units, padded // UNIT)
    return OperandTensors(m, n, k, blocks, units, groups, tensors)


def _tensor(operand: Operand, shape: tuple[Expr, ...]) -> Any:
    """Declare a tensor that may start at any element: callers pass slices."""
    stored = {"w": "uint32", "scale": "uint8", "zero": "uint8"}
    dtype = stored.get(operand.name) or b.tir_name(operand.ttype)
    return b.tensor(NAMES.get(operand.name, operand.name), shape, dtype, align=BYTES.get(dtype, 1))


KEPT = v.kept_in(0, 1)
FUNCTIONS = {"exp": lambda x: exp(x, KEPT), "keep": KEPT}
"""What functions become in the epilogue: the exponential of LLVM's vectors would be a call per lane."""


@dataclass(frozen=True)
class NestKernel:
    """The kernel being emitted, as values that every part of a nest reads.

    rows, panels: Rows of x, and panels of 16 columns of the result, of a register tile.
    blocks: Blocks of prepared rows in all.
    """

    program: TileProgram
    layout: CpuLayout
    args: OperandTensors
    rows: int
    panels: int
    blocks: Expr
    x: Activations
    decode: Decoder

    @property
    def accumulator(self) -> str:
        """Element type of the running sum of one group."""
        return self.program.operand("acc").ttype

    def source(self, tile: Expr, panel: int, unit: Expr) -> Unit:
        """Return the packed words of one panel and unit."""
        block, ahead = tile * self.panels + panel, units_ahead(self.program)
        return Unit(self.layout, self.args["w"], block, unit, ahead, self.args.units, self.panels)


def kernel_of(program: TileProgram, args: OperandTensors) -> NestKernel:
    """Read from a program what its parts share, and allocate prepared activations."""
    product, loops = program.product
    rows = [loop.step for loop in loops if loop.axis == "m"]
    weight, x = program.operand("w"), program.operand(product.left)
    group = program.operand("x").extent("k")
    lane = weight.tile.layout.parameters[0]
    if any(copy.recipe in BYTE_RECIPES for copy in copies_of(program, product.right)):
        lane = BYTE_LANE
    layout = CpuLayout(weight.tile.ttype.elem_bits, lane, group if isinstance(group, int) else 0)
    (words,) = x.tile.layout.parameters
    tiles = (args.m + rows[-1] - 1) // rows[-1]
    blocks = b.bind(tiles * (rows[-1] // words))
    prepared = _activations(program, layout, args, words, b.bind(tirx.min(blocks, rows[0] // words)))
    columns = program.operand(product.total).fixed("n") // ROWS
    return NestKernel(
        program, layout, args, rows[-1], columns, blocks, prepared, decoder_for(program, layout)
    )


def _activations(
    program: TileProgram, layout: CpuLayout, args: OperandTensors, words: int, blocks: Expr
) -> Activations:
    """Allocate the prepared activations of ``blocks`` blocks of ``words`` rows."""
    x = program.operand(program.product[0].left)
    (copy,) = copies_of(program, x.name)
    stored, extents = program.operand("x").ttype, (args.m, args.k, args.units, args.groups)
    operand, pieces = (copy.recipe, pieces_of(stored, copy.recipe)) if copy.recipe in SPLITS else (x.ttype, 1)
    passes = PASSES if operand in BYTE_SPLITS else 1
    plane = passes * blocks * args.units * (UNIT // WORD_COLUMNS[operand]) * words
    memory = v.scratch(plane * pieces, "uint32")
    sums = None
    if program.has("x.sum"):
        sums = v.scratch(passes * blocks * args.groups * words, program.operand("x.sum").ttype)
    offset = offset_of(program)
    factor = 1 if offset is None else offset
    parts = (layout, operand, stored, words, args["x"], *extents, memory, sums, factor)
    if operand == TERMS:
        return TermActivations(*parts, plane)
    count = passes * blocks * args.groups * words
    if operand == DIGITS:
        return DigitActivations(*parts, v.scratch(count, "float32"))
    if operand in BYTE_SPLITS:
        element = program.operand("w").tile.ttype
        sums = INSTRUCTIONS[program.product[0].by].sums(stored)
        starts = v.scratch(count * sums, "int32") if form_of(element).low else None
        walks = v.scratch(blocks, "int32"), v.scratch(blocks * (PASSES * args.groups + 1), "int32")
        most = MOST_LEFT_OUT[program.operand("y").ttype]
        return ByteDigitActivations(*parts, v.scratch(count, "float32"), element, starts, *walks, most)
    return Activations(*parts)


def offset_of(program: TileProgram) -> int | None:
    """Return what the sums of x are multiplied by where that is one number for all groups and columns."""
    ((add, _),) = program.find(AddGroup)
    assert isinstance(add, AddGroup)
    return add.offset if add.sums and not add.zero else None


@dataclass(frozen=True)
class At:
    """Where in the nest emission stands; each loop replaces what it determines.

    first, here: First block of prepared rows of this turn, and their number.
    tile, block: Which columns, and which prepared rows: in blocks of the turn, or in rows for tile registers.
    group: Which group.
    unit, extent: First packed unit of the group or of the piece, and their number.
    x_group, x_unit: Where these lie in prepared rows.
    half: Which half of the unit, where it holds two groups; else -1.
    chunk, start: Which piece of K, and its first step.
    part: Which multiply of the piece.
    tiles: Memory by the names of tiles.
    """

    first: Expr = 0
    here: Expr = 0
    tile: Expr = None
    block: Expr = 0
    group: Expr = 0
    unit: Expr = 0
    x_group: Expr = 0
    x_unit: Expr = 0
    extent: Expr = 0
    half: int = -1
    chunk: Expr = None
    start: Expr = 0
    part: Expr = 0
    tiles: Mapping[str, Any] = field(default_factory=dict)


class Nest(ABC):
    """One kernel being emitted."""

    def __init__(self, kernel: NestKernel) -> None:
        self.kernel, self.program, self.args = kernel, kernel.program, kernel.args

    def emit(self) -> None:
        self.body(self.program.body, At())

    def body(self, statements: tuple[Statement, ...], at: At) -> None:
        """Emit statements in order."""
        for statement in statements:
            at = self._statement(statement, at) or at

    def _statement(self, statement: Statement, at: At) -> At | None:
        """Emit one statement; returns where emission stands if that made memory."""
        if isinstance(statement, Fill):
            return self.fill(statement, at)
        if isinstance(statement, Sum):
            return None  # rows are summed while they are prepared
        emitters: dict[type, Callable[[Any, At], None]] = {
            Loop: self._loop,
            Copy: self._copy,
            Multiply: self.multiply,
            AddGroup: self.add,
            Store: self.store,
        }
        emitters[type(statement)](statement, at)
        return None

    def _copy(self, copy: Copy, at: At) -> None:
        (self._rows if copy.source == "x" else self.copy)(copy, at)

    def _loop(self, loop: Loop, at: At) -> None:
        """Emit a loop: over turns of rows, columns, rows of a turn, groups, or columns of a group."""
        rows = self._turns if at.tile is None else self.inner_rows
        {"n": self._columns, "m": rows, "g": self.groups, "k": self.depth}[loop.axis](loop, at)

    def _turns(self, loop: Loop, at: At) -> None:
        """Emit the loop over turns, whose prepared rows stay in cache."""
        limit = loop.step // self.kernel.x.rows
        with b.loop((self.kernel.blocks + limit - 1) // limit) as turn:
            first = b.bind(turn * limit)
            here = b.bind(tirx.min(limit, self.kernel.blocks - first))
            self.body(loop.body, replace(at, first=first, here=here))

    def _rows(self, copy: Copy, at: At) -> None:
        """Emit the preparation of the rows of a turn."""
        with v.parallel(at.here) if copy.by == "threads" else b.loop(at.here) as block:
            self.kernel.x.prepare(block, (at.first + block) * self.kernel.x.rows)

    def _columns(self, loop: Loop, at: At) -> None:
        """Emit the loop over tiles of columns: those of which the result has one, few that packing added."""
        count = b.bind((self.args.n + loop.step - 1) // loop.step)
        with v.parallel(count) if loop.over == "threads" else b.loop(count) as tile:
            self.kernel.decode.begin()
            self.body(loop.body, replace(at, tile=tile))

    def allocate(self, at: At) -> At:
        """Allocate the memory that begins at a sum over groups: its own, and that of what is inside."""
        inside = [made for made in map(made_by, (s for s, _ in walk(self.program.body))) if made is not None]
        names = {"x.cache", "x.sum", *at.tiles}
        wanted = {made.name: made for made in inside if made.tile.level == "cache" and made.name not in names}
        return replace(at, tiles={**at.tiles, **{name: self._scratch(tile) for name, tile in wanted.items()}})

    def _scratch(self, operand: Operand) -> Any:
        count = operand.fixed("m") * operand.fixed("n") * operand.fixed("k")
        if operand.name == "w.cache":
            return v.aligned(count // self.kernel.layout.elements, "uint32")
        return v.aligned(count, operand.ttype)

    def clear(self, fill: Fill, at: At) -> None:
        """Emit zeros into a sum over groups."""
        count = fill.target.fixed("m") * fill.target.fixed("n") // LANES
        with b.loop(count) as index:
            b.store(at.tiles[fill.target.name], v.constant(0, "float32"), v.lanes(index * LANES))

    def numbers(self, add: AddGroup, at: At, panel: int) -> tuple[Expr, Expr]:
        """Emit the reads of a panel's zero points and scales in a group; None where it has none."""
        start = (at.tile * self.kernel.panels + panel) * ROWS
        scales = self._number(add.scale, at.group, start) if add.scale else None
        zero = add.zero if add.sums else ""
        return (self._number(zero, at.group, start, scales) if zero else None), scales

    def _number(self, name: str, group: Expr, start: Expr, scales: Expr = None) -> Expr:
        """Emit the read of a vector of numbers, whose last extent tells their type (`NUMBERS`).

        scales: Those of zero points.
        """
        tensor, wide = self.args[name], self.program.operand(name).ttype
        _, columns, size = tensor.shape
        flat, kinds, count = tensor.view(-1), dict(NUMBERS[wide]), self.kernel.layout.factored
        kept = v.scratch(LANES, wide)
        if name == "scale":
            del kinds[1]  # they are no integers

        def read(count: int) -> None:
            first = b.bind((T.Cast("int64", group) * columns + start) * size)
            found = v.as_type(flat[v.lanes(first, LANES * count)], f"{kinds[count]}x{LANES}")
            b.store(kept, found if kinds[count] == wide else T.Cast(f"{wide}x{LANES}", found), v.lanes(0))

        def multiply() -> None:
            block, inner = tirx.floordiv(group, count), tirx.floormod(group, count)
            first = b.bind(T.Cast("int64", block) * columns * size)
            halves = v.as_type(flat[v.lanes(first + HALF * start, LANES * HALF)], f"float16x{LANES}")
            place = first + HALF * columns + (tirx.floordiv(inner, 4) * columns + start) * 4
            fours = v.as_type(flat[v.lanes(place, LANES * 4)], f"int32x{LANES}")
            integers = T.shift_right(
                T.shift_left(fours, v.splat(T.int32(24) - tirx.floormod(inner, 4) * 8)),
                v.constant(24, "int32"),
            )
            found = b.bind(T.Cast(f"float32x{LANES}", halves) * T.Cast(f"float32x{LANES}", integers))
            if scales is not None:
                none = v.constant(0, "float32")
                found = tirx.Select(scales == none, none, (none - found) / scales)
            b.store(kept, found, v.lanes(0))

        def choose(counts: list[int]) -> None:
            if len(counts) == 1:
                read(counts[0])
            else:
                b.either(size == counts[0], lambda: read(counts[0]), lambda: choose(counts[1:]))

        if count and wide == "float32" and (scales is not None or name == "scale"):
            b.either(size == HALF + count, multiply, lambda: choose(sorted(kinds)))
        else:
            choose(sorted(kinds))
        return b.bind(kept[v.lanes(0)])

    def add_group(
        self,
        add: AddGroup,
        totals: Any,
        value: Expr,
        place: Expr,
        source: tuple[Expr, Expr, Expr],
        numbers: tuple[Expr, Expr],
    ) -> None:
        """Emit ``totals[place] += scale * (value - zero * sum of x)`` for one row and panel.

        ``source`` is (block of prepared rows, group, row of the block), ``numbers`` (zero points, scales).
        """
        zeros, scales = numbers
        value = T.Cast("float32x16", self.without_zero(add, value, source, zeros))
        if scales is not None:
            b.store(totals, v.fma(value, scales, totals[place]), place)
        else:
            b.store(totals, value + totals[place], place)

    def without_zero(self, add: AddGroup, value: Expr, source: tuple[Expr, Expr, Expr], zeros: Expr) -> Expr:
        """Subtract what zero points, or the offset alone, contributed."""
        if not add.sums:
            return value
        total = v.splat(self.kernel.x.sum(*source))
        if not add.zero:
            return value + total  # already times the offset
        if self.kernel.accumulator == self.program.operand(add.zero).ttype == "int32":
            return value - zeros * total
        wide = [T.Cast("float32x16", x) for x in (value, zeros, total)]
        return wide[0] - wide[1] * wide[2]

    def store_row(self, store: Store, at: At, local: Expr, row: Expr) -> None:
        """Emit the output of one row unless it is beyond M; it is the ``local``-th of the tile's sums."""
        source = self.program.operand(store.source)
        pitch, count = source.fixed("m"), source.fixed("n") // ROWS
        with b.when(row < self.args.m):
            for index in range(count):
                start = b.bind((at.tile * count + index) * ROWS)
                self._store_panel(store, at.tiles[store.source], (index * pitch + local) * LANES, row, start)

    def _store_panel(self, store: Store, totals: Any, first: Expr, row: Expr, start: Expr) -> None:
        """Emit 16 columns of a row, from ``start`` on, whose float32 sums lie from ``first`` on."""

        def one(lane: Expr) -> None:
            with scalars.using(FUNCTIONS):
                value = self._finished(store, totals[first + lane], row, start + lane)
            b.store(self.args[store.target], value, row, start + lane)

        def whole() -> None:
            with b.vector(LANES) as lane:
                one(lane)

        def partial() -> None:
            with b.loop(self.args.n - start) as lane:
                one(lane)

        b.either(start + ROWS <= self.args.n, whole, partial)

    def _finished(self, store: Store, value: Expr, row: Expr, column: Expr) -> Expr:
        """Return one element of the output."""
        for name, operand in store.operators:
            if not operand:
                lower = get_operator(name).lower
                assert lower is not None  # every unary operator has one
                value = lower(value)
                continue
            of_rows = self.program.operand(operand).axes == ("m",)
            factor = self.args[operand][row if of_rows else column]
            value = value * factor if name == "mul" else value + T.Cast("float32", factor)
        output = self.program.operand(store.target).ttype
        return value if output == "float32" else T.Cast(output, value)

    @abstractmethod
    def fill(self, fill: Fill, at: At) -> At | None:
        """Emit the beginning of a sum."""

    @abstractmethod
    def copy(self, copy: Copy, at: At) -> None:
        """Emit what brings weights or sums to another level."""

    @abstractmethod
    def inner_rows(self, loop: Loop, at: At) -> None:
        """Emit the loop over register tiles of the rows of a turn."""

    @abstractmethod
    def groups(self, loop: Loop, at: At) -> None:
        """Emit the loop over groups."""

    @abstractmethod
    def depth(self, loop: Loop, at: At) -> None:
        """Emit a loop over columns of a group."""

    @abstractmethod
    def multiply(self, product: Multiply, at: At) -> None:
        """Emit the product of the innermost pieces."""

    @abstractmethod
    def add(self, add: AddGroup, at: At) -> None:
        """Emit the addition of a group's sum to the total."""

    @abstractmethod
    def store(self, store: Store, at: At) -> None:
        """Emit the output of a tile."""
