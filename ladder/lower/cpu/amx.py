"""The inner part of AMX kernels: decoded tiles in cache, accumulators in tile registers.

The packed layout already is AMX's: sixteen decoded steps of a row block are the sixteen rows of
a B tile (Intel SDM volume 2, TDPBF16PS and TDPBSUD), and sixteen tokens of row-major words
are an A tile. A thread decodes up to `CHUNK` units of two row blocks once and multiplies them
with every token of the turn; sums of a group live in memory between chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v
from ladder.lower.cpu.decode import Unit
from ladder.lower.cpu.epilogue import store_rows
from ladder.lower.cpu.layout import LANES, ROWS

if TYPE_CHECKING:
    from ladder.lower.cpu.kernel import Kernel

Expr = Any

CHUNK = 8
"""Units decoded at a time: 16 KiB for two row blocks."""

TOKENS = 128
"""Tokens of one turn."""

TILE_ROWS = 16

SYSCALL_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
"""Linux x86-64: a process must ask before it touches tile registers (Documentation/arch/x86/xstate.rst)."""


class Instructions:
    """AMX instructions on tile registers 0-3 (C), 4-5 (A) and 6-7 (B).

    Parameters
    ----------
    steps
        Rows of B tiles: 32-bit words of K per multiply.
    operand
        ``"bfloat16"`` or ``"int8"``.
    """

    def __init__(self, steps: int, operand: str) -> None:
        self.steps = steps
        self.operand = operand

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
        """Clear a tile."""
        self._emit("tilezero", T.int8(tile))

    def load(self, tile: int, memory: Any, start: Expr, pitch: Expr) -> None:
        """Load a tile of 32-bit words; ``pitch`` is in words."""
        self._emit("tileloadd64", T.int8(tile), memory.ptr_to([start]), T.Cast("int64", pitch) * T.int64(4))

    def store(self, tile: int, memory: Any, start: Expr, pitch: Expr) -> None:
        """Store a tile of 32-bit words; ``pitch`` is in words."""
        self._emit("tilestored64", T.int8(tile), memory.ptr_to([start]), T.Cast("int64", pitch) * T.int64(4))

    def multiply(self, total: int, tokens: int, weights: int) -> None:
        """Emit C += A · B: bfloat16 pairs, or signed activations times unsigned weights."""
        name = "tdpbf16ps" if self.operand == "bfloat16" else "tdpbsud"
        self._emit(name, T.int8(total), T.int8(tokens), T.int8(weights))


def tile_steps(kernel: Kernel) -> int:
    """Return the steps of one multiply: sixteen unless groups are shorter."""
    layout = kernel.layout
    steps = layout.padded_group // layout.elements if layout.group else TILE_ROWS
    return math.gcd(steps, TILE_ROWS)


@dataclass
class AmxTiles:
    """Emission of one tile of output columns, all tokens of a turn."""

    kernel: Kernel

    def __post_init__(self) -> None:
        self.steps = tile_steps(self.kernel)
        self.tiles = Instructions(self.steps, self.kernel.operand)
        group = self.kernel.layout.padded_group
        self.group_steps = group // self.kernel.layout.elements
        self.chunk_steps = CHUNK * self.kernel.layout.steps

    def emit(self, tile: Expr, first: Expr, here: Expr) -> None:
        """Emit everything for row blocks ``2 * tile`` and ``2 * tile + 1``; ``here`` counts tokens."""
        kernel = self.kernel
        count = kernel.rows * TOKENS * LANES
        totals, raw = v.scratch(count, "float32"), v.scratch(count, kernel.accumulator)
        decoded = v.scratch(kernel.rows * self.chunk_steps * LANES, "uint32")
        with b.loop(count // LANES) as index:
            b.store(totals, v.constant(0, "float32"), v.lanes(index * LANES))
        self.tiles.configure()
        with b.loop(kernel.args.groups) as group:
            steps = self.group_steps or kernel.args.units * kernel.layout.steps
            self._group(tile, here, group, steps, (decoded, raw))
            self._add(tile, here, group, totals, raw)
        self.tiles.release()
        with b.loop(here) as token, b.when(first + token < kernel.args.m):
            store_rows(
                kernel.gemm,
                kernel.args,
                totals,
                token,
                first + token,
                tile * kernel.rows,
                kernel.rows,
                TOKENS,
            )

    def _group(self, tile: Expr, here: Expr, group: Expr, steps: Expr, memory: tuple[Any, Any]) -> None:
        """Emit one group: decode a chunk, multiply it with every token."""
        chunks = (steps + self.chunk_steps - 1) // self.chunk_steps
        with b.loop(chunks) as chunk:
            start = b.bind(group * steps + chunk * self.chunk_steps)
            extent = b.bind(tirx.min(self.chunk_steps, steps - chunk * self.chunk_steps))
            self._decode(tile, start, extent, memory[0])
            with b.loop(here // self.kernel.tokens) as turn:
                self._multiply(turn * self.kernel.tokens, start, extent, chunk, memory)

    def _decode(self, tile: Expr, start: Expr, extent: Expr, decoded: Any) -> None:
        """Emit the decoding of ``extent`` steps from step ``start`` of K."""
        per_unit = self.kernel.layout.steps
        if self.group_steps and self.group_steps < per_unit:
            self._decode_part(tile, start // per_unit, start % per_unit, decoded)
            return
        with b.loop(extent // per_unit) as unit:
            for row in range(self.kernel.rows):
                source = self._source(tile, row, start // per_unit + unit)
                for step in range(per_unit):
                    self._keep(decoded, row, unit * per_unit + step, source, step)

    def _decode_part(self, tile: Expr, unit: Expr, offset: Expr, decoded: Any) -> None:
        """Emit the decoding of a group smaller than a unit; which part is known at run time only."""
        for first in range(0, self.kernel.layout.steps, self.group_steps):
            with b.when(offset == first):
                for row in range(self.kernel.rows):
                    source = self._source(tile, row, unit)
                    for step in range(self.group_steps):
                        self._keep(decoded, row, step, source, first + step)

    def _source(self, tile: Expr, row: int, unit: Expr) -> Unit:
        return Unit(self.kernel.layout, self.kernel.args.words, tile * self.kernel.rows + row, unit)

    def _keep(self, decoded: Any, row: int, position: Expr, source: Unit, step: int) -> None:
        """Emit the decoding of one step of one row block: a row of a B tile."""
        (value,) = self.kernel.decode(source, step)
        index = (row * self.chunk_steps + position) * LANES
        b.store(decoded, v.as_type(value, "uint32x16"), v.lanes(index))

    def _multiply(self, token: Expr, start: Expr, extent: Expr, chunk: Expr, memory: tuple[Any, Any]) -> None:
        """Emit C += A · B for the tokens from ``token`` and all row blocks of the tile."""
        kernel, (decoded, raw) = self.kernel, memory
        token_tiles = kernel.tokens // TILE_ROWS
        pairs = [(a, row) for a in range(token_tiles) for row in range(kernel.rows)]

        def place(a: int, row: int) -> Expr:
            return (row * TOKENS + token + a * TILE_ROWS) * LANES

        def clear() -> None:
            for index in range(len(pairs)):
                self.tiles.zero(index)

        def restore() -> None:
            for index, (a, row) in enumerate(pairs):
                self.tiles.load(index, raw, place(a, row), LANES)

        b.either(chunk == 0, clear, restore)
        with b.loop(extent // self.steps) as part:
            for a in range(token_tiles):
                row_start = (token + a * TILE_ROWS) * kernel.x.steps + start + part * self.steps
                self.tiles.load(4 + a, kernel.x.words, row_start, kernel.x.steps)
            for row in range(kernel.rows):
                self.tiles.load(6 + row, decoded, (row * self.chunk_steps + part * self.steps) * LANES, LANES)
            for index, (a, row) in enumerate(pairs):
                self.tiles.multiply(index, 4 + a, 6 + row)
        for index, (a, row) in enumerate(pairs):
            self.tiles.store(index, raw, place(a, row), LANES)

    def _add(self, tile: Expr, here: Expr, group: Expr, totals: Any, raw: Any) -> None:
        """Emit ``totals += scale * (raw - zero * sum of x)`` for every token."""
        for row in range(self.kernel.rows):
            columns = v.lanes((tile * self.kernel.rows + row) * ROWS)
            with b.loop(here) as token:
                at = v.lanes((row * TOKENS + token) * LANES)
                self.kernel.add_group(totals, raw[at], at, (token, group, 0), columns)
