"""Transforms of tiles: map gives one a layout, convert another type, place another level."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ladder.ir.program import AddGroup, Copy, Fill, Layout, Loop, Operand, Sum, TileProgram
from ladder.ir.program.model import LOCAL, MEMORY, granule, made_by
from ladder.ir.program.rewriting import Body, at_level, in_piece, innermost, renamed, replaced, rewritten
from ladder.ir.program.verify import reads
from schedules.cpu_layout import stored_layout
from schedules.instructions import BYTE_DIGITS, BYTE_PAIRS, RECIPES, SPLITS, TERMS
from schedules.transforms.base import Transform
from schedules.transforms.extents import padding_text
from targets import TileDevice
from tile_types import get_type, representable
from tile_types.forms import byte_form, byte_pairs, is_extended, largest_integer

MOST_ROWS = 16
"""Rows of x that one vector of prepared words can interleave."""


@dataclass(frozen=True)
class Map(Transform):
    """Give a tile a layout at its level.

    args
        ``tile``: w (in memory) or x (its newest copy); ``layout``: ``planes(bits)``, of blocks of 16 columns
        and units of 32 of K, codes in planes of bits in lanes of so many bits (`schedules.cpu_layout`), or
        ``words(rows)``, 32-bit words of so many rows side by side.
    rewrite
        ``T[i]  ->  T[layout(i)]``
    checks
        the layout is one of the tile's; codes of bytes count from 0; everything that the packed form rounds
        up is padded; rows of words divide the tile.
    """

    form = "map {tile} to {layout}"
    tile: str
    layout: Layout

    def apply(self, program: TileProgram, device: TileDevice) -> TileProgram:
        """Set the layout of the tile."""
        self.check(
            (self.tile, self.layout.name) in (("w", "planes"), ("x", "words")), "no tile has that layout"
        )
        self.check(len(self.layout.parameters) == 1, "a layout of one number")
        return self._weight(program) if self.tile == "w" else self._activations(program)

    def _weight(self, program: TileProgram) -> TileProgram:
        self.check(program.product[0].right == "w", "weights are mapped in memory, before they are placed")
        weight, layout = program.operand("w"), stored_layout(program)
        self.check(self.layout.parameters == (layout.lane,), f"weights are packed as planes({layout.lane})")
        unsigned = weight.tile.ttype.minimum == 0
        self.check(
            layout.lane != 8 or unsigned, "bytes count from the smallest value: convert w by offset before"
        )
        missing = {axis: n for axis, n in layout.padding.items() if not _is_padded(weight, axis, n)}
        self.check(not missing, f"first {padding_text(missing)}")
        return replaced(program, replace(weight, tile=replace(weight.tile, layout=self.layout)))

    def _activations(self, program: TileProgram) -> TileProgram:
        name = program.product[0].left
        self.check(name != "x", f"place x in cache before; it lies in {MEMORY}")
        copy, (rows,) = program.operand(name), self.layout.parameters
        self.check(isinstance(copy.extent("m"), int), "slice m before x is placed")
        self.check(rows in (1, 2, 4, 8, MOST_ROWS), f"rows must be a power of two up to {MOST_ROWS}")
        self.check(copy.fixed("m") % rows == 0, f"slice m has {copy.fixed('m')} rows, no multiple of {rows}")
        return replaced(program, replace(copy, tile=replace(copy.tile, layout=self.layout)))


def _is_padded(weight: Operand, axis: str, multiple: int) -> bool:
    return granule(weight.extent(axis)) % multiple == 0


@dataclass(frozen=True)
class Convert(Transform):
    """Decode or encode a tile where it lies.

    args
        ``tile``: x or w; ``ttype``: what it becomes; ``by``: ``offset`` (codes of w in memory count from the
        smallest value), ``widening`` (x, exact), ``digits`` or ``bytes`` (x, integers of
        each group), ``terms`` (x, sums of bfloat16), or a recipe of `schedules.instructions.RECIPES`.
    rewrite
        ``T.level <- T  ->  T.level <- convert T``; by offset: ``x · w  ->  x · (w - low) + low · sum of x``
    checks
        the type holds every value; the recipe makes it of such codes on this device; the tile has left memory
        and is not converted.
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
        self.check(
            operand.tile.level in ("cache", "register"), f"place {self.tile} in cache or register before"
        )
        copies = [s for s, _ in program.find(Copy) if isinstance(s, Copy) and s.target.name == name]
        self.check(all(not copy.recipe for copy in copies), f"{name} is converted already")
        self._check_recipe(program, operand, device)
        made = replace(operand, tile=replace(operand.tile, ttype=get_type(self.ttype)))
        return rewritten(
            replaced(program, made),
            lambda s: replace(s, recipe=self.by) if isinstance(s, Copy) and s.target.name == name else s,
        )

    def _check_recipe(self, program: TileProgram, operand: Operand, device: TileDevice) -> None:
        split = self.tile == "x" and self.by in SPLITS
        self.check(split or operand.ttype != self.ttype, f"{self.tile} is {self.ttype} already")
        if self.tile == "x":
            ways = ("widening", *SPLITS)
            self.check(self.by in ways, f"activations are converted by {', '.join(ways)}")
            widened = "bfloat16" if self.by == TERMS else "float32"
            made = {widened} if split else {"bfloat16", "float32"}
            self.check(self.ttype in made, f"activations become {' or '.join(sorted(made))} so")
            given = SPLITS.get(self.by, {operand.ttype: 1})
            self.check(operand.ttype in given, f"{' or '.join(given)} have {self.by}")
            if self.by == TERMS:  # together they are exact
                return
            self._check_exact(operand)
            return
        self.check(self.by in RECIPES, f"weights are converted by {', '.join(RECIPES)}")
        recipe, layout = RECIPES[self.by], program.operand("w").tile.layout
        self.check(self.ttype in recipe.results, f"{self.by} makes {' or '.join(recipe.results)}")
        self.check(operand.tile.ttype.elem_bits <= recipe.most_bits, f"codes of {operand.ttype} are too wide")
        self.check(layout is not None, "map w to planes before")
        self.check(layout.parameters[0] in recipe.lanes, f"{self.by} does not read {layout}")
        self._check_exact(operand)
        missing = ", ".join(sorted(recipe.features - device.features))
        self.check(not missing, f"{device.name} lacks {missing}")

    def _check_exact(self, operand: Operand) -> None:
        ttype = operand.tile.ttype
        counted = ttype.is_integer and ttype.minimum >= 0  # of at most eight bits: uint8 holds them
        if self.by == "extend":
            held = is_extended(ttype)
        elif self.tile == "w" and self.by == BYTE_DIGITS:
            held = byte_form(ttype) is not None
        elif self.tile == "w" and self.by == BYTE_PAIRS:
            held = byte_pairs(ttype) is not None and byte_form(ttype) is None
        elif self.ttype == "int16":
            held = largest_integer(ttype) is not None
        else:
            held = counted if self.ttype == "uint8" else representable(ttype, self.ttype)
        self.check(held, f"{self.ttype} does not hold every value of {operand.ttype}")

    def _by_offset(self, program: TileProgram) -> TileProgram:
        weight = program.operand("w")
        unsigned = f"uint{weight.tile.ttype.elem_bits}"
        self.check(
            self.tile == "w" and program.product[0].right == "w", "only weights in memory have an offset"
        )
        self.check(not program.product[1], "codes are stored so: convert before anything is sliced")
        self.check(
            stored_layout(program).lane == 8 and weight.tile.layout is None,
            "only bytes that are not mapped yet",
        )
        self.check(
            self.ttype == unsigned and weight.ttype != unsigned, f"codes of {weight.ttype} become {unsigned}"
        )
        made = replace(weight, tile=replace(weight.tile, ttype=get_type(unsigned)))
        offset = int(weight.tile.ttype.minimum)
        program = replaced(program, made)
        if program.has("zero"):  # zero points count from the smallest value as well
            return program
        x, exact = program.operand("x"), program.operand("acc").tile.ttype
        shape = tuple(dict(program.axes)[axis] for axis in "mg")
        total = Operand("x.sum", ("m", "g"), replace(x.tile, ttype=exact, shape=shape))
        program = replace(program, body=(Sum(total, "x", "k"), *program.body))
        return rewritten(
            program, lambda s: replace(s, sums="x.sum", offset=offset) if isinstance(s, AddGroup) else s
        )


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
        names = {"x": product.left, "w": product.right, "acc": product.total, "total": "total"}
        operand = program.operand(names[self.tile])
        levels = (MEMORY, *LOCAL)
        self.check(
            levels.index(operand.tile.level) < levels.index(self.level),
            f"{operand.name} is in {operand.tile.level}",
        )
        if self.tile in ("acc", "total"):
            return self._sum(program, operand)
        (self._check_x if self.tile == "x" else self._check_w)(program, loops)
        return self._copy(program, operand, loops)

    def _check_x(self, program: TileProgram, loops: Sequence[Loop]) -> None:
        self.check(
            self.level == "cache" and self.by in ("threads", "loop"),
            "x goes to cache, by threads or by a loop",
        )
        others = ", ".join(f"slice {loop.axis}" for loop in loops if loop.axis != "m")
        self.check(not others, f"x is prepared once for all columns and groups: place it before {others}")

    def _check_w(self, program: TileProgram, loops: Sequence[Loop]) -> None:
        self.check(program.operand("w").tile.layout is not None, "map w to planes before")
        ahead = re.fullmatch(r"prefetch [1-9]\d{0,5}", self.by) if self.level == "l2" else self.by == ""
        self.check(bool(ahead), "w goes to l2 by prefetch of some units, elsewhere by loads")

    def _copy(self, program: TileProgram, operand: Operand, loops: Sequence[Loop]) -> TileProgram:
        pieces = program.pieces(loops)
        shape = tuple(pieces[axis] for axis in operand.axes)
        layout = operand.tile.layout if self.level == "l2" else None
        tile = replace(operand.tile, shape=shape, level=self.level, layout=layout)
        made = Operand(f"{self.tile}.{self.level}", operand.axes, tile)

        def insert(body: Body) -> Body:
            made_here = [made_by(statement) for statement in body]
            first = max(
                (i + 1 for i, tile in enumerate(made_here) if tile and tile.name == operand.name), default=0
            )
            after = tuple(renamed(statement, operand.name, made.name) for statement in body[first:])
            sums = tuple(
                at_level(s, self.level) if isinstance(s, Sum) and s.source == made.name else s for s in after
            )
            return (*body[:first], Copy(made, operand.name, self.by), *sums)

        return replace(program, body=in_piece(program.body, insert))

    def _sum(self, program: TileProgram, operand: Operand) -> TileProgram:
        self.check(not self.by and self.level != "l2", "sums are in cache or register, by nobody")
        self.check(self.tile != "total" or self.level == "cache", "total is summed over groups in cache")
        inner = innermost(program.body)
        if any(isinstance(s, Fill) and s.target.name == operand.name for s in inner):
            return replaced(program, replace(operand, tile=replace(operand.tile, level=self.level)))
        loops = program.product[1]
        within = next((loop.axis for loop in loops if loop.axis in "gk"), "g")
        self.check(self.tile == "acc", f"total is summed further out: place it before slice {within}")
        pieces = program.pieces(loops)
        tile = replace(operand.tile, shape=tuple(pieces[a] for a in operand.axes), level=self.level)
        made = Operand(f"{self.tile}.{self.level}", operand.axes, tile)

        def around(body: Body) -> Body:
            uses = [i for i, statement in enumerate(body) if operand.name in reads(statement)]
            first, end = uses[0], uses[-1] + 1
            inside = tuple(renamed(statement, operand.name, made.name) for statement in body[first:end])
            return (*body[:first], Copy(made, operand.name), *inside, Copy(operand, made.name), *body[end:])

        return replace(program, body=in_piece(program.body, around))
