"""The transform that chooses the instruction, and what its nest must be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ladder.ir.program import Copy, Layout, Multiply, Statement, TileProgram
from ladder.ir.program.model import granule, made_by
from ladder.ir.program.rewriting import made_anew, rewritten
from schedules.cpu_layout import UNIT, bytes_group
from schedules.instructions import (
    BYTE_RECIPES,
    BYTE_SPLITS,
    DIGIT_BITS,
    INSTRUCTIONS,
    OPERAND_TILES,
    SPLITS,
    SUM_TILES,
    TWO_BYTES,
    Instruction,
    columns_in_32_bits,
)
from schedules.transforms.base import Transform
from targets import TileDevice
from tile_types import get_type
from tile_types.forms import byte_form, byte_pairs, largest_integer

SUMS = ("acc", "acc.cache", "acc.register", "x.sum")
"""Tiles that have the accumulator's type."""


@dataclass(frozen=True)
class Use(Transform):
    """Multiply by an instruction.

    args
        ``instruction``: one of `schedules.instructions.INSTRUCTIONS`; ``operator``: matmul.
    rewrite
        ``acc += x · w  ->  acc += x · w by instruction``, and sums of products get its accumulator's type
    checks
        the device has it; operands have its types and lie where it reads them; slices are those of its nest
        and multiples of its extents; sums fit into its registers.
    """

    form = "use {instruction} for {operator}"
    instruction: str
    operator: str = "matmul"

    def apply(self, program: TileProgram, device: TileDevice) -> TileProgram:
        """Name the instruction at the product."""
        self.check(self.operator == "matmul", "instructions are used for matmul")
        self.check(self.instruction in INSTRUCTIONS, f"instructions are {', '.join(INSTRUCTIONS)}")
        cores = sorted({core.name for core in device.cores})
        self.check(
            self.instruction in cores,
            f"{device.name} has no core {self.instruction!r}; it has {', '.join(cores)}",
        )
        row = INSTRUCTIONS[self.instruction]
        self._check_operands(program, row)
        bits = program.operand("w").tile.ttype.elem_bits
        self.check(bits <= row.most_bits, f"it takes codes of {row.most_bits} bits at most, w has {bits}")
        self._check_nest(program, row)
        (self._check_tiles if row.tiles else self._check_vectors)(program, row, device)
        exact = get_type(row.accumulator)

        def typed(statement: Statement) -> Statement:
            made = made_by(statement)
            if made is not None and made.name in SUMS:
                return made_anew(statement, replace(made, tile=replace(made.tile, ttype=exact)))
            return replace(statement, by=self.instruction) if isinstance(statement, Multiply) else statement

        return rewritten(program, typed)

    def _check_operands(self, program: TileProgram, row: Instruction) -> None:
        product = program.product[0]
        x, w, acc = (program.operand(name) for name in (product.left, product.right, product.total))
        self.check(
            x.tile.level == "cache" and x.tile.layout is not None,
            "place x in cache and map x to words before",
        )
        near = "cache" if row.tiles else "register"
        self.check(w.tile.level == near, f"w lies in {w.tile.level}: place w in {near} before")
        self.check(
            acc.tile.level == "register", f"{acc.name} lies in {acc.tile.level}: place acc in register before"
        )
        total = program.operand("total")
        self.check(
            total.tile.level == "cache", f"total lies in {total.tile.level}: place total in cache before"
        )
        for operand, wanted in ((x, row.operand), (w, row.weight)):
            root = operand.name.partition(".")[0]
            self.check(
                operand.ttype == wanted,
                f"it needs {wanted}, {root} is {operand.ttype}: convert {root} before",
            )

        copies = [s for s, _ in program.find(Copy) if isinstance(s, Copy) and s.target.name == x.name]
        split = next((copy.recipe for copy in copies if copy.recipe in SPLITS), "")
        self.check(split in ("", row.split), f"it takes no {split} of x")
        self.check(split == row.split, f"convert x to {row.operand} by {row.split} before")
        made = [s for s, _ in program.find(Copy) if isinstance(s, Copy) and s.target.name == w.name]
        recipe = next((copy.recipe for copy in made if copy.recipe), "")
        if row.recipe:
            self.check(recipe == row.recipe, f"convert w to {row.weight} by {row.recipe} before")
        self.check(
            row.recipe == recipe or recipe not in BYTE_RECIPES, f"it takes no {recipe}: convert w otherwise"
        )
        if split in DIGIT_BITS:
            self._check_sums(program, split)

    def _check_sums(self, program: TileProgram, split: str) -> None:
        """Check that sums of products of digits stay integers of 32 bits."""
        ttype, group = program.operand("w").tile.ttype, program.extent("k")
        form = byte_form(ttype) or byte_pairs(ttype)
        largest = form.largest if split in BYTE_SPLITS and form else largest_integer(ttype)
        assert largest is not None  # weights are integers by now
        most = columns_in_32_bits(largest, split)
        fits = isinstance(group, int) and group <= most
        self.check(fits, f"sums of up to {most} columns are exact: {group} are too many")
        rounded = program.operand("y").ttype != "float32"
        self.check(rounded or split != TWO_BYTES, "two digits are for results that are rounded to 16 bits")

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
            self.check(
                loop.over in allowed.get(loop.axis, ("loop",)), f"not with slice {loop.axis} over {loop.over}"
            )

    def _check_vectors(self, program: TileProgram, row: Instruction, device: TileDevice) -> None:
        acc, w, x = (
            program.operand(name) for name in ("acc", program.product[0].right, program.product[0].left)
        )
        m, n, k = acc.fixed("m"), acc.fixed("n"), w.fixed("k")
        self.check(x.tile.layout == Layout("words", (m,)), f"slice m leaves {m} rows: map x to words({m})")
        self.check(n % row.columns == 0, f"{n} columns are no multiple of {row.columns}: slice n")
        unit = program.extent("k")
        if row.split in BYTE_SPLITS:
            least = bytes_group(program.operand("w").tile.ttype.elem_bits)
            fits = isinstance(unit, int) and unit >= least
            self.check(fits, f"a step of bytes takes {least} columns of a group at least, not {unit}")
        wanted = UNIT // 2 if unit == UNIT // 2 else UNIT
        self.check(k == wanted, f"{k} columns are not the {wanted} of a packed unit: slice k by {wanted}")
        sums = row.sums(program.operand("x").ttype)
        used, room = 4 * m * n * sums, device.layer("register").capacity
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
            f"slice m by {m}, slice n by {n} need {a + b + a * b} tile registers; at most 32 by 32 fit",
        )
        unit = 32 // get_type(row.operand).elem_bits
        self.check(
            k <= row.depth and k % unit == 0, f"it multiplies {row.depth} columns at a time, slice k has {k}"
        )
        self.check(w.fixed("k") % UNIT == 0, f"slice k by whole packed units of {UNIT} before w is placed")
        group = program.extent("k")
        self.check(granule(group) % k == 0, f"slice k: pieces of {k} do not divide {group}")
