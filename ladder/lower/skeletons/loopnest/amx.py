"""Nests on AMX: decoded tiles in cache, sums in tile registers.

The packed layout already is AMX's: sixteen decoded steps of a panel are the sixteen rows of a B tile
(Intel SDM volume 2, TDPBF16PS, TDPBSSD and TDPBSUD), and sixteen rows of words are an A tile. A thread
decodes a piece of K of its panels once and multiplies it with every row of the turn; sums of a group
are in memory between pieces.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.program import AddGroup, Copy, Fill, Loop, Multiply, Store, TileProgram
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v
from ladder.lower.skeletons.loopnest.nest import At, Nest, NestKernel, offset_of
from ladder.lower.skeletons.loopnest.terms import TermActivations
from ladder.lower.skeletons.loopnest.units import Unit
from schedules.cpu_layout import LANES
from tile_types import get_type

TILE_ROWS = 16

SYSCALL_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
"""Linux x86-64: a process must ask before it touches tile registers (Documentation/arch/x86/xstate.rst)."""


class Instructions:
    """AMX instructions on tile registers 0-3 (C), 4-5 (A) and 6-7 (B).

    steps: Rows of B tiles: 32-bit words of K per multiply.
    operand: ``"bfloat16"`` or ``"int8"``.
    signed: Whether bytes of weights are signed.
    """

    def __init__(self, steps: int, operand: str, signed: bool) -> None:
        self.steps = steps
        self.operand = operand
        self.signed = signed

    def _emit(self, name: str, *operands: Expr) -> None:
        b.emit(T.call_llvm_intrin("int32", f"llvm.x86.{name}", *operands))

    def allow(self) -> None:
        """Ask the kernel for tile registers; once per process suffices and asking again is cheap."""
        request = [T.int64(x) for x in (SYSCALL_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)]
        b.emit(T.call_extern("int64", "syscall", *request))

    def configure(self) -> None:
        """Set the shapes of all tiles (palette 1)."""
        settings = [0] * 64
        settings[0] = 1
        for tile in range(8):
            settings[16 + 2 * tile] = 4 * self.steps if tile in (4, 5) else 64
            settings[48 + tile] = self.steps if tile in (6, 7) else TILE_ROWS
        memory = v.scratch(64, "uint8")
        b.store(memory, v.table(settings, "uint8"), v.lanes(0, 64))
        self._emit("ldtilecfg", memory.ptr_to([0]))

    def release(self) -> None:
        """Return the tile registers to their initial state."""
        self._emit("tilerelease")

    def zero(self, tile: int) -> None:
        self._emit("tilezero", T.int8(tile))

    def load(self, tile: int, memory: Any, start: Expr, pitch: Expr) -> None:
        """Load a tile of 32-bit words; ``pitch`` is in words."""
        self._emit("tileloadd64", T.int8(tile), memory.ptr_to([start]), T.Cast("int64", pitch) * T.int64(4))

    def store(self, tile: int, memory: Any, start: Expr, pitch: Expr) -> None:
        """Store a tile of 32-bit words; ``pitch`` is in words."""
        self._emit("tilestored64", T.int8(tile), memory.ptr_to([start]), T.Cast("int64", pitch) * T.int64(4))

    def multiply(self, total: int, x: int, weights: int) -> None:
        """Emit C += A · B: bfloat16 pairs, or signed activations times weights."""
        bytes_ = "tdpbssd" if self.signed else "tdpbsud"
        name = "tdpbf16ps" if self.operand == "bfloat16" else bytes_
        self._emit(name, T.int8(total), T.int8(x), T.int8(weights))


def signed_offset(program: TileProgram) -> int | None:
    """Return what makes signed bytes of codes, once per weight; None where sums of x do it per result."""
    offset = offset_of(program)
    if offset is None or offset < -128 or offset + 2 ** get_type(program.operand("w").ttype).elem_bits > 128:
        return None
    return offset


class TileNest(Nest):
    """A kernel on tile registers."""

    def __init__(self, kernel: NestKernel) -> None:
        super().__init__(kernel)
        product, loops = self.program.product
        elements, padded = kernel.layout.elements, kernel.layout.padded_group
        self.steps = loops[-1].step // elements
        operand = self.program.operand(product.left).ttype
        self.shift = signed_offset(self.program) if operand == "int8" else None
        self.tiles = Instructions(self.steps, operand, self.shift is not None)
        self.pitch = self.program.operand("acc").fixed("m")
        self.chunk_steps = self.program.operand(product.right).fixed("k") // elements
        self.group_steps = padded // elements if padded else self.args.units * kernel.layout.steps

    def emit(self) -> None:
        self.tiles.allow()
        super().emit()

    def fill(self, fill: Fill, at: At) -> At:
        """Emit the beginning of the totals; sums of a group begin in tile registers."""
        if fill.target.name != "total":
            return at
        at = self.allocate(at)
        self.clear(fill, at)
        self.tiles.configure()
        return at

    def groups(self, loop: Loop, at: At) -> None:
        if loop.over == "unrolled":
            self.body(loop.body, at)
            return
        with b.loop(self.args.groups) as group:
            self.body(loop.body, replace(at, group=group))

    def depth(self, loop: Loop, at: At) -> None:
        """Emit the loop over pieces of a group, or over the multiplies of one."""
        if at.chunk is not None:
            with b.loop(at.extent // self.steps) as part:
                self.body(loop.body, replace(at, part=part))
            return
        steps, whole = self.group_steps, self.chunk_steps
        with b.loop((steps + whole - 1) // whole) as chunk:
            start = b.bind(at.group * steps + chunk * whole)
            extent = b.bind(tirx.min(whole, steps - chunk * whole))
            self.body(loop.body, replace(at, chunk=chunk, start=start, extent=extent))

    def inner_rows(self, loop: Loop, at: At) -> None:
        with b.loop(at.here // self.kernel.rows) as turn:
            self.body(loop.body, replace(at, block=turn * self.kernel.rows))

    def copy(self, copy: Copy, at: At) -> None:
        """Emit the decoding of a piece, or sums on their way to tile registers and back."""
        if copy.target.name == "w.cache":
            self._decode(at)
        elif copy.target.name == "acc.register":
            self._restore(at)
        elif copy.source == "acc.register":
            for index, (a, panel) in enumerate(self._pairs()):
                self.tiles.store(index, at.tiles["acc"], self._place(at, a, panel), LANES)

    def _pairs(self) -> list[tuple[int, int]]:
        """Return the tile registers of sums: which rows of x, which panel."""
        return [
            (a, panel) for a in range(self.kernel.rows // TILE_ROWS) for panel in range(self.kernel.panels)
        ]

    def _place(self, at: At, a: int, panel: int) -> Expr:
        return (panel * self.pitch + at.block + a * TILE_ROWS) * LANES

    def _restore(self, at: At) -> None:
        """Emit the beginning of sums: zero in the first piece, else as they were stored."""
        pairs = self._pairs()

        def clear() -> None:
            for index in range(len(pairs)):
                self.tiles.zero(index)

        def restore() -> None:
            for index, (a, panel) in enumerate(pairs):
                self.tiles.load(index, at.tiles["acc"], self._place(at, a, panel), LANES)

        b.either(at.chunk == 0, clear, restore)

    def _decode(self, at: At) -> None:
        """Emit the decoding of the steps of one piece."""
        per_unit, padded = self.kernel.layout.steps, self.kernel.layout.padded_group
        if padded and self.group_steps < per_unit:
            self._decode_part(at, at.start // per_unit, at.start % per_unit)
            return
        with b.loop(at.extent // per_unit) as unit:
            for panel in range(self.kernel.panels):
                source = self.kernel.source(at.tile, panel, at.start // per_unit + unit)
                for step in range(per_unit):
                    self._keep(at, panel, unit * per_unit + step, source, step)

    def _decode_part(self, at: At, unit: Expr, offset: Expr) -> None:
        """Emit the decoding of a group smaller than a unit; which part is known at run time only."""
        for first in range(0, self.kernel.layout.steps, self.group_steps):
            with b.when(offset == first):
                for panel in range(self.kernel.panels):
                    source = self.kernel.source(at.tile, panel, unit)
                    for step in range(self.group_steps):
                        self._keep(at, panel, step, source, first + step)

    def _keep(self, at: At, panel: int, position: Expr, source: Unit, step: int) -> None:
        """Emit the decoding of one step of one panel: a row of a B tile."""
        (value,) = self.kernel.decode(source, step)
        if self.shift is not None:
            value = v.as_type(value, "int8x64") + v.constant(self.shift, "int8", 64)
        index = (panel * self.chunk_steps + position) * LANES
        b.store(at.tiles["w.cache"], v.as_type(value, "uint32x16"), v.lanes(index))

    def without_zero(self, add: AddGroup, value: Expr, source: tuple[Expr, Expr, Expr], zeros: Expr) -> Expr:
        """Return the sum of a group as it is where weights were signed."""
        return value if self.shift is not None else super().without_zero(add, value, source, zeros)

    def multiply(self, product: Multiply, at: At) -> None:
        """Emit C += A · B for the rows and panels of a register tile."""
        x, decoded = self.kernel.x, at.tiles[product.right]
        planes = [x.plane * term for term in range(x.terms)] if isinstance(x, TermActivations) else [0]
        for number, plane in enumerate(planes):
            for a in range(self.kernel.rows // TILE_ROWS):
                row_start = plane + (at.block + a * TILE_ROWS) * x.steps + at.start + at.part * self.steps
                self.tiles.load(4 + a, x.words, row_start, x.steps)
            for panel in range(self.kernel.panels if number == 0 else 0):
                start = (panel * self.chunk_steps + at.part * self.steps) * LANES
                self.tiles.load(6 + panel, decoded, start, LANES)
            for index, (a, panel) in enumerate(self._pairs()):
                self.tiles.multiply(index, 4 + a, 6 + panel)

    def add(self, add: AddGroup, at: At) -> None:
        """Emit the addition of a group for every row of the turn."""
        for panel in range(self.kernel.panels):
            numbers = self.numbers(add, at, panel)
            with b.loop(at.here) as row:
                place = v.lanes((panel * self.pitch + row) * LANES)
                value = at.tiles[add.value][place]
                self.add_group(add, at.tiles[add.total], value, place, (row, at.group, 0), numbers)

    def store(self, store: Store, at: At) -> None:
        """Emit the output of the rows of a turn."""
        self.tiles.release()
        with b.loop(at.here) as row:
            self.store_row(store, at, row, at.first + row)
