"""The transforms of which schedules are lists: each rewrites a tile program and says when it may.

A schedule is applied in order. Every transform acts on the *innermost piece*: what the slices before it have
left as the body of the innermost loop. So the order of slices is the order of loops, and a tile is placed,
converted and mapped at the loop that its transform follows. All leave the program's result as it is.
Source: Ladder (OSDI 2024), section 4.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from ladder.ir.program import (
    AddGroup,
    Copy,
    Fill,
    Layout,
    Loop,
    Multiply,
    Operand,
    Statement,
    Store,
    Sum,
    TileProgram,
)
from ladder.ir.program.model import LOCAL, MEMORY, OVER, granule, made_by, walk
from ladder.ir.program.verify import program_argument, reads
from schedules.cpu_layout import ROWS, UNIT, stored_layout
from schedules.instructions import INSTRUCTIONS, OPERAND_TILES, RECIPES, SUM_TILES, Instruction
from targets import TileDevice
from tile_types import get_type
from tile_types.errors import ParseError, ScheduleError, unknown_name
from tile_types.tile import Extent

Body = tuple[Statement, ...]

MOST_ROWS = 16
"""Rows of x that one vector of prepared words can interleave."""


@dataclass(frozen=True)
class Transform:
    """One step of a schedule; ``str()`` gives the line that `parse_transform` reads back."""

    form: ClassVar[str] = ""
    """The line, with a field's name in braces for its value."""

    def __str__(self) -> str:
        return self.form.format(**{item.name: getattr(self, item.name) for item in fields(self)})

    def apply(self, program: TileProgram, device: TileDevice) -> TileProgram:
        """Return the rewritten program.

        Raises
        ------
        ScheduleError
            If it may not be applied; the message begins with the transform.
        """
        raise NotImplementedError

    def check(self, condition: bool, message: str) -> None:
        """Refuse unless ``condition`` holds."""
        if not condition:
            raise ScheduleError(f"{self}: {message}")


@dataclass(frozen=True)
class Slice(Transform):
    """Cut an axis of the innermost piece.

    args
        ``axis``: m, n, g or k; ``step``: elements of a piece; ``over``: loop, threads or unrolled.
    rewrite
        ``S  ->  for axis by step over ...: S(piece)``, where S are the statements that go through the axis
    checks
        pieces of n divide it; others are whole granules, or parts of one; threads share columns, not sums;
        what is unrolled has a number of pieces that is known.
    """

    form = "slice {axis} by {step} over {over}"
    axis: str
    step: int
    over: str

    def apply(self, program: TileProgram, device: TileDevice) -> TileProgram:
        """Wrap a loop around the statements of the innermost piece that go through the axis."""
        self.check(self.axis in dict(program.axes), f"axes are {', '.join(dict(program.axes))}")
        self.check(self.over in OVER, f"pieces lie over {', '.join(OVER)}")
        loops = program.product[1]
        extent: Extent = {**dict(program.axes), **{loop.axis: loop.step for loop in loops}}[self.axis]
        self._check_pieces(extent)
        self.check(self.over != "unrolled" or isinstance(extent, int), f"{self.axis} has {extent} elements")
        if self.over == "threads":
            self.check(self.axis == "n", "threads share the columns of the result")
            self.check(all(loop.over != "threads" for loop in loops), "threads are started once")
        return replace(program, body=in_piece(program.body, lambda body: self._wrap(program, body)))

    def _check_pieces(self, extent: Extent) -> None:
        whole = granule(extent)
        self.check(self.step >= 1, "a piece has at least one element")
        divides = whole % self.step == 0
        if self.axis == "n":
            self.check(divides, f"n is {extent}; pad w.n to a multiple of {self.step}")
        elif self.axis == "k":
            units = self.step % UNIT == whole % UNIT == 0
            self.check(divides or units or self.step % whole == 0, f"k is {extent}: pieces are no whole units")
        else:
            self.check(divides or isinstance(extent, str), f"{self.axis} is {extent}")

    def _wrap(self, program: TileProgram, body: Body) -> Body:
        places = [index for index, statement in enumerate(body) if self.axis in axes_of(program, statement)]
        first, end = places[0], places[-1] + 1
        inside = tuple(narrowed(statement, self.axis, self.step) for statement in body[first:end])
        self.check(
            not any(isinstance(statement, Sum) and statement.axis == self.axis for statement in inside),
            f"sums of x go through all of {self.axis}: place x in cache before",
        )
        return (*body[:first], Loop(self.axis, self.step, self.over, inside), *body[end:])


@dataclass(frozen=True)
class Pad(Transform):
    """Round an axis of the weight up; what is added holds the code of 0, and scales of 0.

    args
        ``axis``: of the weight; ``multiple``: of which the extent becomes a multiple.
    rewrite
        ``w[N, ..]  ->  w[N^128, ..]``, and every loop goes through the padded axis
    checks
        nothing is sliced yet; the multiple is that of the packed form, which all schedules of a product share.
    """

    form = "pad w.{axis} to {multiple} with 0"
    axis: str
    multiple: int

    def apply(self, program: TileProgram, device: TileDevice) -> TileProgram:
        """Round the extent of the axis up in the weight and what belongs to it."""
        packed = stored_layout(program).padding
        wanted = packed.get(self.axis)
        self.check(wanted == self.multiple, f"weights are packed with {_padding(packed)}")
        self.check(not program.product[1], "pad before anything is sliced")
        extent = program.extent(self.axis)
        self.check("^" not in str(extent), "it is padded already")
        rounded: Extent = (
            -(-extent // self.multiple) * self.multiple if isinstance(extent, int) else f"{extent}^{self.multiple}"
        )
        axes = tuple((name, rounded if name == self.axis else old) for name, old in program.axes)
        arguments = tuple(
            resized(operand, self.axis, rounded) if operand.name in PACKED else operand
            for operand in program.arguments
        )
        body = tuple(narrowed(statement, self.axis, rounded) for statement in program.body)
        return replace(program, axes=axes, arguments=arguments, body=body)


PACKED = ("w", "scale", "zero", "row_scale")
"""Arguments that packing makes."""


def _padding(packed: Mapping[str, int]) -> str:
    return ", ".join(f"pad w.{axis} to {multiple}" for axis, multiple in packed.items())


@dataclass(frozen=True)
class Map(Transform):
    """Give a tile a layout at its level.

    args
        ``tile``: w (in memory) or x (its newest copy); ``layout``: ``planes(bits of a lane)``: rows of 16
        columns of 32-bit lanes, codes in planes of bits; ``words(rows)``: 32-bit words of so many rows side by
        side, a row after the other for ``words(1)``.
    rewrite
        ``T[i]  ->  T[layout(i)]``
    checks
        the layout is one of the tile's; codes of bytes count from 0; everything that the packed form rounds up
        is padded; rows of words divide the tile.
    """

    form = "map {tile} to {layout}"
    tile: str
    layout: Layout

    def apply(self, program: TileProgram, device: TileDevice) -> TileProgram:
        """Set the layout of the tile."""
        self.check((self.tile, self.layout.name) in (("w", "planes"), ("x", "words")), "no tile has that layout")
        self.check(len(self.layout.parameters) == 1, "a layout of one number")
        return self._weight(program) if self.tile == "w" else self._activations(program)

    def _weight(self, program: TileProgram) -> TileProgram:
        self.check(program.product[0].right == "w", "weights are mapped in memory, before they are placed")
        weight, layout = program.operand("w"), stored_layout(program)
        self.check(self.layout.parameters == (layout.lane,), f"weights are packed as planes({layout.lane})")
        unsigned = weight.tile.ttype.minimum == 0
        self.check(layout.lane != 8 or unsigned, "bytes count from the smallest value: convert w by offset before")
        missing = {axis: n for axis, n in layout.padding.items() if not _is_padded(weight, axis, n)}
        self.check(not missing, f"first {_padding(missing)}")
        return replaced(program, replace(weight, tile=replace(weight.tile, layout=self.layout)))

    def _activations(self, program: TileProgram) -> TileProgram:
        name = program.product[0].left
        self.check(name != "x", f"place x in cache before; it lies in {MEMORY}")
        copy, (rows,) = program.operand(name), self.layout.parameters
        self.check(isinstance(copy.extent("m"), int), "slice m before x is placed")
        self.check(rows in (1, 2, 4, 8, MOST_ROWS), f"rows must be a power of two up to {MOST_ROWS}")
        self.check(copy.fixed("m") % rows == 0, f"{copy.fixed('m')} rows are no multiple of {rows}")
        return replaced(program, replace(copy, tile=replace(copy.tile, layout=self.layout)))


def _is_padded(weight: Operand, axis: str, multiple: int) -> bool:
    return granule(weight.extent(axis)) % multiple == 0


@dataclass(frozen=True)
class Convert(Transform):
    """Decode or encode a tile where it lies.

    args
        ``tile``: x or w; ``ttype``: what it becomes; ``by``: ``offset`` (codes of w in memory count from the
        smallest value), ``widening`` (x, exact), or a recipe of `schedules.instructions.RECIPES`.
    rewrite
        ``T.level <- T  ->  T.level <- convert T``; by offset: ``x · w  ->  x · (w - low) + low · sum of x``
    checks
        the recipe makes the type of such codes on this device; the tile has left memory and is not converted.
    """

    form = "convert {tile} to {ttype} by {by}"
    tile: str
    ttype: str
    by: str

    def apply(self, program: TileProgram, device: TileDevice) -> TileProgram:
        """Change what the newest copy of the tile holds."""
        self.check(self.tile in ("x", "w"), "only operands of the product are converted")
        if self.by == "offset":
            return self._by_offset(program)
        name = getattr(program.product[0], "left" if self.tile == "x" else "right")
        operand = program.operand(name)
        self.check(operand.tile.level in ("cache", "register"), f"place {self.tile} in cache or register before")
        copies = [s for s, _ in program.find(Copy) if isinstance(s, Copy) and s.target.name == name]
        self.check(all(not copy.recipe for copy in copies), f"{name} is converted already")
        self._check_recipe(program, operand, device)
        made = replace(operand, tile=replace(operand.tile, ttype=get_type(self.ttype)))
        return rewritten(
            replaced(program, made),
            lambda s: replace(s, recipe=self.by) if isinstance(s, Copy) and s.target.name == name else s,
        )

    def _check_recipe(self, program: TileProgram, operand: Operand, device: TileDevice) -> None:
        if self.tile == "x":
            self.check(self.by == "widening", "activations are converted by widening")
            self.check(operand.ttype != self.ttype, f"x is {self.ttype} already")
            self.check(self.ttype in ("bfloat16", "float32"), "activations are widened to bfloat16 or float32")
            return
        if self.by not in RECIPES:
            raise unknown_name("recipe", self.by, RECIPES)
        recipe, layout = RECIPES[self.by], program.operand("w").tile.layout
        self.check(operand.ttype != self.ttype, f"w is {self.ttype} already")
        self.check(self.ttype in recipe.results, f"{self.by} makes {' or '.join(recipe.results)}")
        self.check(operand.tile.ttype.elem_bits <= recipe.most_bits, f"codes of {operand.ttype} are too wide")
        self.check(layout is not None, "map w to planes before")
        self.check(layout.parameters[0] in recipe.lanes, f"{self.by} does not read {layout}")
        missing = ", ".join(sorted(recipe.features - device.features))
        self.check(not missing, f"{device.name} lacks {missing}")

    def _by_offset(self, program: TileProgram) -> TileProgram:
        weight = program.operand("w")
        unsigned = f"uint{weight.tile.ttype.elem_bits}"
        self.check(self.tile == "w" and program.product[0].right == "w", "only weights in memory have an offset")
        self.check(not program.product[1], "codes are stored so: convert before anything is sliced")
        self.check(stored_layout(program).lane == 8 and weight.tile.layout is None, "only bytes that are not mapped yet")
        self.check(self.ttype == unsigned and weight.ttype != unsigned, f"codes of {weight.ttype} become {unsigned}")
        made = replace(weight, tile=replace(weight.tile, ttype=get_type(unsigned)))
        offset = int(weight.tile.ttype.minimum)
        program = replaced(program, made)
        if program.has("zero"):  # zero points count from the smallest value as well
            return program
        x, exact = program.operand("x"), program.operand("acc").tile.ttype
        shape = tuple(dict(program.axes)[axis] for axis in "mg")
        total = Operand("x.sum", ("m", "g"), replace(x.tile, ttype=exact, shape=shape))
        program = replace(program, body=(Sum(total, "x", "k"), *program.body))
        return rewritten(program, lambda s: replace(s, sums="x.sum", offset=offset) if isinstance(s, AddGroup) else s)


@dataclass(frozen=True)
class Place(Transform):
    """Put a tile of the innermost piece to a level nearer to the instructions.

    args
        ``tile``: x, w, or the sums acc and total; ``level``: l2, cache or register; ``by``: who copies x
        (``threads`` or ``loop``), how lines of w come to L2 (``prefetch U``: U packed units ahead).
    rewrite
        ``S(T)  ->  T.level <- T; S(T.level)``; sums that begin further out are written back after S
    checks
        the level is nearer than the tile's; x is prepared once for all threads; w is mapped.
    """

    form = "place {tile} in {level}{by}"
    tile: str
    level: str
    by: str = ""

    def __str__(self) -> str:
        return f"place {self.tile} in {self.level}" + (f" by {self.by}" if self.by else "")

    def apply(self, program: TileProgram, device: TileDevice) -> TileProgram:
        """Make a copy at the level, or let a sum begin there."""
        self.check(self.level in LOCAL, f"levels are {', '.join(LOCAL)}")
        self.check(self.tile in ("x", "w", "acc", "total"), "tiles are x, w, acc and total")
        product, loops = program.product
        self.check(not product.by, "the instruction is chosen already; place before")
        names = {"x": product.left, "w": product.right, "acc": product.total, "total": "total"}
        operand = program.operand(names[self.tile])
        levels = (MEMORY, *LOCAL)
        self.check(levels.index(operand.tile.level) < levels.index(self.level), f"{operand.name} is in {operand.tile.level}")
        if self.tile in ("acc", "total"):
            return self._sum(program, operand)
        (self._check_x if self.tile == "x" else self._check_w)(program, loops)
        return self._copy(program, operand, loops)

    def _check_x(self, program: TileProgram, loops: Sequence[Loop]) -> None:
        self.check(self.level == "cache" and self.by in ("threads", "loop"), "x goes to cache, by threads or by a loop")
        self.check(all(loop.axis == "m" for loop in loops), "x is prepared once for all columns: only m is sliced before")

    def _check_w(self, program: TileProgram, loops: Sequence[Loop]) -> None:
        self.check(program.operand("w").tile.layout is not None, "map w to planes before")
        ahead = re.fullmatch(r"prefetch [1-9]\d*", self.by) if self.level == "l2" else self.by == ""
        self.check(bool(ahead), "w goes to l2 by prefetch of some units, elsewhere by loads")

    def _copy(self, program: TileProgram, operand: Operand, loops: Sequence[Loop]) -> TileProgram:
        pieces = {**dict(program.axes), **{loop.axis: loop.step for loop in loops}}
        shape = tuple(pieces[axis] for axis in operand.axes)
        layout = operand.tile.layout if self.level == "l2" else None
        tile = replace(operand.tile, shape=shape, level=self.level, layout=layout)
        made = Operand(f"{self.tile}.{self.level}", operand.axes, tile)

        def insert(body: Body) -> Body:
            made_here = [made_by(statement) for statement in body]
            first = max((i + 1 for i, tile in enumerate(made_here) if tile and tile.name == operand.name), default=0)
            after = tuple(renamed(statement, operand.name, made.name) for statement in body[first:])
            sums = tuple(_at_level(s, self.level) if isinstance(s, Sum) and s.source == made.name else s for s in after)
            return (*body[:first], Copy(made, operand.name, self.by), *sums)

        return replace(program, body=in_piece(program.body, insert))

    def _sum(self, program: TileProgram, operand: Operand) -> TileProgram:
        self.check(not self.by, "sums are not copied")
        self.check(self.tile != "total" or self.level == "cache", "total is summed over groups in cache")
        inner = innermost(program.body)
        if any(isinstance(s, Fill) and s.target.name == operand.name for s in inner):
            return replaced(program, replace(operand, tile=replace(operand.tile, level=self.level)))
        self.check(self.tile == "acc", "total is complete here: place it before g is sliced")
        loops = program.product[1]
        pieces = {**dict(program.axes), **{loop.axis: loop.step for loop in loops}}
        tile = replace(operand.tile, shape=tuple(pieces[a] for a in operand.axes), level=self.level)
        made = Operand(f"{self.tile}.{self.level}", operand.axes, tile)

        def around(body: Body) -> Body:
            uses = [i for i, statement in enumerate(body) if operand.name in reads(statement)]
            first, end = uses[0], uses[-1] + 1
            inside = tuple(renamed(statement, operand.name, made.name) for statement in body[first:end])
            return (*body[:first], Copy(made, operand.name), *inside, Copy(operand, made.name), *body[end:])

        return replace(program, body=in_piece(program.body, around))


@dataclass(frozen=True)
class Use(Transform):
    """Multiply by an instruction.

    args
        ``instruction``: one of `schedules.instructions.INSTRUCTIONS`; ``operator``: matmul.
    rewrite
        ``acc += x · w  ->  acc += x · w by instruction``, and sums of products get its accumulator's type
    checks
        the device has it; operands have its types and lie where it reads them; slices are those of its nest and
        multiples of its extents; sums fit into its registers.
    """

    form = "use {instruction} for {operator}"
    instruction: str
    operator: str = "matmul"

    def apply(self, program: TileProgram, device: TileDevice) -> TileProgram:
        """Name the instruction at the product."""
        self.check(self.operator == "matmul", "instructions are used for matmul")
        if self.instruction not in INSTRUCTIONS:
            raise unknown_name("instruction", self.instruction, INSTRUCTIONS)
        cores = sorted({core.name for core in device.cores})
        self.check(
            self.instruction in cores, f"{device.name} has no core {self.instruction!r}; it has {', '.join(cores)}"
        )
        row = INSTRUCTIONS[self.instruction]
        self._check_operands(program, row)
        self._check_nest(program, row)
        (self._check_tiles if row.tiles else self._check_vectors)(program, row, device)
        exact = get_type(row.accumulator)

        def typed(statement: Statement) -> Statement:
            made = made_by(statement)
            if made is not None and made.name.partition(".")[0] == "acc" or isinstance(statement, Sum):
                return replace(statement, target=replace(made, tile=replace(made.tile, ttype=exact)))
            return replace(statement, by=self.instruction) if isinstance(statement, Multiply) else statement

        return rewritten(program, typed)

    def _check_operands(self, program: TileProgram, row: Instruction) -> None:
        product = program.product[0]
        x, w, acc = (program.operand(name) for name in (product.left, product.right, product.total))
        self.check(x.tile.level == "cache" and x.tile.layout is not None, "place x in cache and map x to words before")
        near = "cache" if row.tiles else "register"
        self.check(w.tile.level == near, f"w lies in {w.tile.level}: place w in {near} before")
        self.check(acc.tile.level == "register", f"{acc.name} lies in {acc.tile.level}: place acc in register before")
        total = program.operand("total")
        self.check(total.tile.level == "cache", f"total lies in {total.tile.level}: place total in cache before")
        for operand, wanted in ((x, row.operand), (w, row.weight)):
            root = operand.name.partition(".")[0]
            self.check(operand.ttype == wanted, f"it needs {wanted}, {root} is {operand.ttype}: convert {root} before")

    def _check_nest(self, program: TileProgram, row: Instruction) -> None:
        loops = program.product[1]
        axes = " ".join(loop.axis for loop in loops)
        halves = row.nest.replace("g", "g g")  # two groups of a packed unit
        fits = axes == row.nest or (axes == halves and not row.tiles)
        wanted = ", ".join(f"slice {axis}" for axis in row.nest.split())
        self.check(fits, f"it needs {wanted} in this order, the program slices {axes or 'nothing'}")
        groups = [loop for loop in loops if loop.axis == "g"]
        self.check(groups[-1].step == 1, "sums are of one group: slice g by 1")
        small = program.extent("k") == UNIT // 2 and not row.tiles
        if small:
            steps = [(loop.step, loop.over) for loop in groups]
            self.check(
                steps == [(2, "loop"), (1, "unrolled")],
                "two groups share a packed unit: slice g by 2 over loop, slice g by 1 over unrolled",
            )
        self.check(len(groups) == 1 + small, "slice g by 1 over loop")
        allowed = {"n": ("threads", "loop"), "g": ("loop", "unrolled")}
        for loop in loops:
            self.check(loop.over in allowed.get(loop.axis, ("loop",)), f"not with slice {loop.axis} over {loop.over}")

    def _check_vectors(self, program: TileProgram, row: Instruction, device: TileDevice) -> None:
        acc, w, x = (program.operand(name) for name in ("acc", program.product[0].right, program.product[0].left))
        m, n, k = acc.fixed("m"), acc.fixed("n"), w.fixed("k")
        self.check(x.tile.layout == Layout("words", (m,)), f"a register tile has {m} rows: map x to words({m})")
        self.check(n % row.columns == 0, f"{n} columns are no multiple of {row.columns}: slice n")
        unit = program.extent("k")
        wanted = UNIT // 2 if unit == UNIT // 2 else UNIT
        self.check(k == wanted, f"{k} columns are not the {wanted} of a packed unit: slice k by {wanted}")
        used, room = 4 * m * n, device.layer("register").capacity
        self.check(used < room, f"accumulators of {used} bytes leave none of {room} bytes of registers")

    def _check_tiles(self, program: TileProgram, row: Instruction, device: TileDevice) -> None:
        product, loops = program.product
        acc, w, x = (program.operand(name) for name in (product.total, product.right, product.left))
        m, n, k = acc.fixed("m"), acc.fixed("n"), loops[-1].step
        self.check(x.tile.layout == Layout("words", (1,)), "tiles load rows of x: map x to words(1)")
        self.check(m % row.rows == 0, f"it multiplies {row.rows} rows at a time, slice m has {m}")
        self.check(n % row.columns == 0, f"it multiplies {row.columns} columns at a time, slice n has {n}")
        a, b = m // row.rows, n // row.columns
        self.check(
            a <= OPERAND_TILES and b <= OPERAND_TILES and a * b <= SUM_TILES,
            f"a tile of {m} by {n} needs {a + b + a * b} tile registers: an AMX tile is 16 or 32 tokens by 16 or 32 rows",
        )
        unit = 32 // get_type(row.operand).elem_bits
        self.check(k <= row.depth and k % unit == 0, f"it multiplies {row.depth} columns at a time, slice k has {k}")
        self.check(w.fixed("k") % UNIT == 0, f"slice k by whole packed units of {UNIT} before w is placed")
        group = program.extent("k")
        self.check(granule(group) % k == 0, f"slice k: pieces of {k} do not divide {group}")
        self.check(w.fixed("n") % ROWS == 0 and w.axes[-1] == "k", "slice n by whole row blocks")


TRANSFORMS: Mapping[str, type[Transform]] = {
    "slice": Slice,
    "map": Map,
    "pad": Pad,
    "convert": Convert,
    "place": Place,
    "use": Use,
}
"""The transforms by the words with which their lines begin."""

_LINES: tuple[tuple[str, Callable[..., Transform]], ...] = (
    (r"slice (\w+) by (\d+) over (\w+)", lambda axis, step, over: Slice(axis, int(step), over)),
    (r"map (\w+) to (\w+)\(([\d, ]*)\)", lambda tile, name, of: Map(tile, Layout(name, _numbers(of)))),
    (r"pad w\.(\w+) to (\d+) with 0", lambda axis, multiple: Pad(axis, int(multiple))),
    (r"convert (\w+) to (\w+) by (\w+)", Convert),
    (r"place (\w+) in (\w+)(?: by ([\w ]+))?", lambda tile, level, by: Place(tile, level, by or "")),
    (r"use (\w+) for (\w+)", Use),
)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(", "))) if text else ()


def parse_transform(line: str) -> Transform:
    """Read back what ``str(transform)`` printed.

    Raises
    ------
    ParseError
        If the line is no transform.
    """
    for pattern, make in _LINES:
        found = re.fullmatch(pattern, line.strip())
        if found:
            return make(*found.groups())
    raise ParseError(f"not a transform: {line.strip()!r}; lines begin with {', '.join(TRANSFORMS)}")


def apply_all(program: TileProgram, transforms: Sequence[Transform], device: TileDevice) -> TileProgram:
    """Apply a schedule to a block graph; returns the tile program.

    Raises
    ------
    ScheduleError
        If a transform may not be applied; the message begins with it.
    """
    for transform in transforms:
        program = transform.apply(program, device)
    return program


# ---- rewriting ------------------------------------------------------------------------


def in_piece(body: Body, rewrite: Callable[[Body], Body]) -> Body:
    """Rewrite the body of the innermost loop."""
    for place, statement in enumerate(body):
        if isinstance(statement, Loop):
            inner = replace(statement, body=in_piece(statement.body, rewrite))
            return (*body[:place], inner, *body[place + 1 :])
    return rewrite(body)


def innermost(body: Body) -> Body:
    """Return the body of the innermost loop."""
    loop = next((statement for statement in body if isinstance(statement, Loop)), None)
    return body if loop is None else innermost(loop.body)


def rewritten(program: TileProgram, rewrite: Callable[[Statement], Statement]) -> TileProgram:
    """Rewrite every statement, the bodies of loops first."""

    def visit(body: Body) -> Body:
        return tuple(
            rewrite(replace(s, body=visit(s.body)) if isinstance(s, Loop) else s) for s in body
        )

    return replace(program, body=visit(program.body))


def replaced(program: TileProgram, operand: Operand) -> TileProgram:
    """Return the program with another tile in the place of the argument or made tile of its name."""
    arguments = tuple(operand if old.name == operand.name else old for old in program.arguments)

    def exchange(statement: Statement) -> Statement:
        made = made_by(statement)
        same = made is not None and made.name == operand.name
        return replace(statement, target=operand) if same else statement  # type: ignore[arg-type]

    return rewritten(replace(program, arguments=arguments), exchange)


def resized(operand: Operand, axis: str, extent: Extent) -> Operand:
    """Return a tile with another extent along an axis, if it has that."""
    if axis not in operand.axes:
        return operand
    place = operand.axes.index(axis)
    shape = (*operand.tile.shape[:place], extent, *operand.tile.shape[place + 1 :])
    return replace(operand, tile=replace(operand.tile, shape=shape))


def narrowed(statement: Statement, axis: str, extent: Extent) -> Statement:
    """Return a statement that makes a tile of another extent."""
    made = made_by(statement)
    return statement if made is None else replace(statement, target=resized(made, axis, extent))  # type: ignore[arg-type]


def renamed(statement: Statement, old: str, new: str) -> Statement:
    """Return a statement that reads another tile."""
    names = ("source", "left", "right", "total") if not isinstance(statement, Store) else ("source",)
    changes: dict[str, Any] = {
        name: new for name in names if getattr(statement, name, None) == old and isinstance(getattr(statement, name), str)
    }
    return replace(statement, **changes)


def axes_of(program: TileProgram, statement: Statement) -> frozenset[str]:
    """Return the axes that a statement goes through."""
    made = made_by(statement)
    names = [*reads(statement)] if not isinstance(statement, Copy) else []
    axes = {axis for name in names for axis in program.operand(name).axes}
    return frozenset(axes | set(made.axes if made else ()))


def _at_level(statement: Sum, level: str) -> Sum:
    tile = replace(statement.target.tile, level=level)
    return replace(statement, target=replace(statement.target, tile=tile))
