"""The loop nest of every CPU kernel that multiplies in vector registers.

Row blocks are spread over threads. A thread keeps ``tile_m`` x ``tile_n / 16`` accumulators in
registers, walks a group of K, and adds the scaled group to float32 sums; for the next block of
tokens it decodes the same rows again, now from cache. Tokens beyond `BLOCKS` blocks take another
turn, so that their prepared words stay in the second-level cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v
from ladder.lower.cpu.activations import WORD_COLUMNS, Activations
from ladder.lower.cpu.amx import TOKENS, AmxTiles, Instructions
from ladder.lower.cpu.arguments import Arguments, declare_arguments
from ladder.lower.cpu.decode import Decoder, Unit, decoder_for
from ladder.lower.cpu.epilogue import store_rows
from ladder.lower.cpu.layout import LANES, ROWS, UNIT, CpuLayout, cpu_layout
from ladder.lower.cpu.pack import offset_of
from schedules.cpu_policy import core_operand, require_core
from schedules.schedule import CpuSchedule, Schedule
from targets import TileDevice
from tile_types.errors import ScheduleError

Expr = Any

BLOCKS = 8
"""Token blocks prepared at a time."""


@dataclass(frozen=True)
class Kernel:
    """What all parts of one kernel's emission share.

    Parameters
    ----------
    gemm, schedule
        The problem and its loops.
    layout
        Where codes lie.
    operand
        Type that the core multiplies.
    args
        Tensors and extents.
    x
        Prepared activations.
    decode
        Codes to multiplicands.
    """

    gemm: Gemm
    schedule: CpuSchedule
    layout: CpuLayout
    operand: str
    args: Arguments
    x: Activations
    decode: Decoder

    @property
    def rows(self) -> int:
        """Row blocks per tile."""
        return self.schedule.tile_n // ROWS

    @property
    def tokens(self) -> int:
        """Tokens per tile."""
        return self.schedule.tile_m

    @property
    def accumulator(self) -> str:
        """Element type of the running sum of one group."""
        return "int32" if self.operand == "int8" else "float32"

    @property
    def offset(self) -> int:
        """What packed code 0 stands for, where packed codes count from the smallest value."""
        return offset_of(self.gemm.weight) if self.layout.lane == 8 else 0

    def add_group(
        self, totals: Any, value: Expr, at: Expr, source: tuple[Expr, Expr, Expr], columns: Expr
    ) -> None:
        """Emit ``totals[at] += scale * (value - zero * sum of x)`` for one token and row block.

        ``source`` is (token block, group, token); the packed offset counts as a zero point.
        """
        value = T.Cast("float32x16", self._without_zero(value, source, columns))
        if self.gemm.scale:
            b.store(totals, v.fma(value, self.args.scales[source[1], columns], totals[at]), at)
        else:
            b.store(totals, value + totals[at], at)

    def _without_zero(self, value: Expr, source: tuple[Expr, Expr, Expr], columns: Expr) -> Expr:
        """Subtract what zero points, or the offset alone, contributed."""
        if self.x.sums is None:
            return value
        total = v.splat(self.x.sum(*source))
        if self.gemm.zero == "none":
            return value + total * v.constant(self.offset, self.accumulator)
        zeros = self.args.zeros[source[1], columns]
        if self.operand == "int8" and self.gemm.zero == "integer":
            return value - zeros * total
        wide = [T.Cast("float32x16", x) for x in (value, zeros, total)]
        return wide[0] - wide[1] * wide[2]


class Nest:
    """One kernel being emitted.

    Raises
    ------
    ScheduleError
        If the schedule's core is not one of the device, or cannot multiply these types.
    """

    def __init__(self, gemm: Gemm, device: TileDevice, schedule: Schedule) -> None:
        if not isinstance(schedule, CpuSchedule):
            raise ScheduleError(f"the CPU pipeline needs a CpuSchedule, got {type(schedule).__name__}")
        require_core(gemm, device, schedule)
        self.gemm, self.device, self.schedule = gemm, device, schedule

    def emit(self) -> None:
        """Emit the whole body."""
        args = declare_arguments(self.gemm, cpu_layout(self.gemm))
        with v.helpers():
            _emit_body(self.gemm, self.device, self.schedule, args)


def _emit_body(gemm: Gemm, device: TileDevice, schedule: CpuSchedule, args: Arguments) -> None:
    layout, operand = cpu_layout(gemm), core_operand(gemm, schedule.core)
    amx = schedule.core.startswith("amx")
    # AMX reads rows of tokens, so there every token is a block of its own.
    per_block, limit = (1, TOKENS) if amx else (schedule.tile_m, BLOCKS)
    tiles = (args.m + schedule.tile_m - 1) // schedule.tile_m
    blocks = b.bind(tiles * (schedule.tile_m // per_block))
    x = _activations(gemm, layout, operand, args, per_block, b.bind(tirx.min(blocks, limit)))
    decode = decoder_for(gemm, layout, operand, device.features)
    kernel = Kernel(gemm, schedule, layout, operand, args, x, decode)
    if amx:
        Instructions(1, operand).allow()
    with b.loop((blocks + limit - 1) // limit) as turn:
        first = b.bind(turn * limit)
        here = b.bind(tirx.min(limit, blocks - first))
        with b.loop(here) if schedule.tile_m < 8 else v.parallel(here) as block:
            x.prepare(block, (first + block) * per_block)
        with v.parallel(args.blocks // kernel.rows) as tile:
            kernel.decode.begin()
            if amx:
                AmxTiles(kernel).emit(tile, first, here)
            else:
                with b.loop(here) as block:
                    _tile(kernel, tile, block, first + block)


def _activations(
    gemm: Gemm, layout: CpuLayout, operand: str, args: Arguments, tokens: int, blocks: Expr
) -> Activations:
    """Allocate the prepared activations of ``blocks`` blocks of ``tokens`` tokens."""
    words = v.scratch(blocks * args.units * (UNIT // WORD_COLUMNS[operand]) * tokens, "uint32")
    needed = gemm.zero != "none" or (layout.lane == 8 and offset_of(gemm.weight) != 0)
    dtype = "int32" if operand == "int8" else "float32"
    sums = v.scratch(blocks * args.groups * tokens, dtype) if needed else None
    return Activations(
        layout, operand, gemm.activation, tokens, args.x, args.m, args.k, args.units, args.groups, words, sums
    )


def _tile(kernel: Kernel, tile: Expr, block: Expr, token_block: Expr) -> None:
    """Emit one tile: all of K for ``rows`` row blocks and one token block."""
    count = kernel.rows * kernel.tokens
    totals = v.scratch(count * LANES, "float32")
    with b.loop(count) as index:
        b.store(totals, v.constant(0, "float32"), v.lanes(index * LANES))
    halves = UNIT // (kernel.layout.padded_group or UNIT)
    if kernel.layout.group == 0:
        _group(kernel, tile, block, totals, 0, 0, kernel.args.units)
    elif halves > 1:
        with b.loop(kernel.args.units) as unit:
            for half in range(halves):
                _group(kernel, tile, block, totals, unit * halves + half, unit, half)
    else:
        units = kernel.layout.padded_group // UNIT
        with b.loop(kernel.args.groups) as group:
            _group(kernel, tile, block, totals, group, group * units, units)
    with b.loop(kernel.tokens) as token:
        row = token_block * kernel.tokens + token
        with b.when(row < kernel.args.m):
            _store(kernel, totals, token, row, tile)


def _store(kernel: Kernel, totals: Any, token: Expr, row: Expr, tile: Expr) -> None:
    """Emit the output of one token of a tile."""
    store_rows(kernel.gemm, kernel.args, totals, token, row, tile * kernel.rows, kernel.rows, kernel.tokens)


def _group(
    kernel: Kernel, tile: Expr, block: Expr, totals: Any, group: Expr, first: Expr, extent: Expr
) -> None:
    """Emit one group: ``extent`` units from unit ``first``, or half ``extent`` of it for small groups."""
    accumulators = v.scratch(kernel.rows * kernel.tokens * LANES, kernel.accumulator)
    for index in range(kernel.rows * kernel.tokens):
        b.store(accumulators, v.constant(0, kernel.accumulator), v.lanes(index * LANES))
    steps = kernel.layout.steps
    if kernel.layout.padded_group == UNIT // 2:
        half = range(extent * steps // 2, (extent + 1) * steps // 2)
        _unit(kernel, tile, block, accumulators, first, half)
    elif isinstance(extent, int) and extent == 1:
        _unit(kernel, tile, block, accumulators, first, range(steps))
    else:
        with b.loop(extent) as unit:
            _unit(kernel, tile, block, accumulators, first + unit, range(steps))
    _add_group(kernel, tile, block, totals, accumulators, group)


def _unit(kernel: Kernel, tile: Expr, block: Expr, accumulators: Any, unit: Expr, steps: range) -> None:
    """Emit the steps of one unit: decode each row block, multiply by every token."""
    sources = [
        Unit(kernel.layout, kernel.args.words, tile * kernel.rows + row, unit) for row in range(kernel.rows)
    ]
    words_per_unit = UNIT // kernel.x.columns
    words_per_step = words_per_unit // kernel.layout.steps
    for step in steps:
        weights = [kernel.decode(source, step) for source in sources]
        for part in range(words_per_step):
            position = unit * words_per_unit + step * words_per_step + part
            for token in range(kernel.tokens):
                _multiply(kernel, accumulators, token, kernel.x.word(block, position, token), weights, part)


def _multiply(
    kernel: Kernel, accumulators: Any, token: int, word: Expr, weights: list[list[Expr]], part: int
) -> None:
    """Emit the products of one word of x with every row block."""
    x = v.splat(b.bind(word) if kernel.rows > 1 else word)
    for row in range(kernel.rows):
        at = v.lanes((row * kernel.tokens + token) * LANES)
        b.store(accumulators, multiply(kernel.operand, accumulators[at], weights[row][part], x), at)


def multiply(operand: str, total: Expr, weights: Expr, x: Expr) -> Expr:
    """Return ``total`` plus the products of one step."""
    if operand == "bfloat16":
        return v.dot_bf16(total, weights, x)
    if operand == "int8":
        return v.dot_int8(total, weights, x)
    return v.fma(weights, v.as_type(x, "float32x16"), total)


def _add_group(kernel: Kernel, tile: Expr, block: Expr, totals: Any, accumulators: Any, group: Expr) -> None:
    """Emit ``totals += scale * (accumulators - zero * sum of x)`` for the whole tile."""
    for row in range(kernel.rows):
        columns = v.lanes((tile * kernel.rows + row) * ROWS)
        for token in range(kernel.tokens):
            at = v.lanes((row * kernel.tokens + token) * LANES)
            kernel.add_group(totals, accumulators[at], at, (block, group, token), columns)
