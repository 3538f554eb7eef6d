"""The accumulators of a thread: running sums of products, and totals that they are flushed to.

Each granule of a packed tile (or group of tiles) may end with a *flush*: ``total += partial * scale``.
Where registers hold raw numbers (`ladder.lower.gpu.decode`), the flush does the rest:
``total += scale * (sum(raw * x) + (offset - zero) / gain * sum(x))``, with gains applied to the finished
sums. An infinite or NaN element of x then gives NaN where the sum of products may have been infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.groups import NOTHING_LEFT, Correction, GroupRegisters, Groups
from ladder.lower.gpu.instructions import MatrixStep
from schedules.layouts import TILE

SUM_TILES = 4
"""Tiles after which sums of raw numbers must meet their sum of x: both cancel in part."""

ONES = {"float16": 0x3C003C00, "bfloat16": 0x3F803F80, "int8": 0x01010101}
"""An operand register of ones."""


class Accumulators:
    """The accumulator fragments of one thread: running sums, and totals where sums are flushed.

    weight: Operand type of decoded weights.
    row_blocks, m_blocks: 16-row and blocks of eight activation rows; fragments are
        ``[row_blocks][m_blocks]``.
    known_sums: Returns the sums of a lane's two activation rows of a block where they need not be computed
        here.
    """

    def __init__(
        self,
        groups: Groups,
        step: MatrixStep,
        weight: str,
        row_blocks: int,
        m_blocks: int,
        left: Correction = NOTHING_LEFT,
        known_sums: Callable[[int], list[Expr]] | None = None,
    ) -> None:
        self.groups, self.step, self.weight, self.left = groups, step, weight, left
        self.known_sums = known_sums
        self.row_blocks, self.m_blocks = row_blocks, m_blocks
        self.m_factor: Callable[[int, int], Expr] | None = None
        self.fragments = row_blocks * m_blocks
        self.width = step.lanes.accumulators
        self.starts: dict[int, list[Expr]] = {}
        self.fresh = set(range(self.fragments)) if self.begins_shifted else set()
        self.partial = self._cleared(self.fragments, step.carrier)
        self.total: Any = self._cleared(self.fragments, "float32") if self.flushes else None
        summed = left.sums_x and known_sums is None
        self.x_sums: Any = self._cleared(m_blocks, step.carrier) if summed else None

    def _cleared(self, fragments: int, dtype: str) -> Any:
        buffer = b.local(fragments * self.width, dtype)
        for i in range(fragments * self.width):
            b.store(buffer, T.float32(0) if dtype == "float32" else T.uint32(0), i)
        return buffer

    @property
    def begins_shifted(self) -> bool:
        """Whether partial sums begin with what offsets add to them, so that flushes need not add it."""
        whole = len(self.step.issues) == 1 and self.step.carrier == "float32"
        return self.left.sums_x and self.known_sums is not None and self.left.zero == "none" and whole

    def _start(self, fragment: int) -> list[Expr] | None:
        """Return what a fragment begins with if this is its first step since its flush."""
        if fragment not in self.fresh:
            return None
        self.fresh.remove(fragment)
        m_block = fragment % self.m_blocks
        if m_block not in self.starts:
            assert self.known_sums is not None
            sums = self.known_sums(m_block)
            shifts = [offset / gain for offset, gain in zip(self.left.offsets, self.left.gains, strict=True)]
            self.starts[m_block] = [
                b.bind(sums[i % 2] * T.float32(shifts[self.step.lanes.row_slot(i)]))
                for i in range(self.width)
            ]
        return self.starts[m_block]

    @property
    def flushes(self) -> bool:
        """Whether partial sums move to totals."""
        flushed_anyway = self.groups.on_accumulator or self.step.promote > 0
        return flushed_anyway or self.left.sums_x or self.groups.token_tiles > 0

    @property
    def flushes_granules(self) -> bool:
        """Whether every granule of a tile has a flush of its own."""
        return self.groups.on_accumulator or self.left.zero != "none"

    @property
    def periods(self) -> set[int]:
        """Tiles after each multiple of which partial sums must be flushed; 0 for the last tile only."""
        periods = {self.groups.tiles} if self.flushes_granules else set()
        periods |= {self.step.promote // TILE} if self.step.promote else set()
        periods |= {self.groups.token_tiles} if self.groups.token_tiles else set()
        return periods | ({SUM_TILES} if self.left.sums_x else set())

    def scale_columns(self, args: Arguments, lane: Expr, first: Expr, tile: Expr) -> None:
        """Have flushes after K tile ``tile`` apply the scales of groups of x, where there are such groups.

        ``first`` is the first activation row of the fragments. Rows beyond M take the last row's scales;
        they are not stored.
        """
        if not self.groups.token_tiles:
            return
        group = b.keep(T.truncdiv(tile, self.groups.token_tiles))

        def factor(m_block: int, index: int) -> Expr:
            row = first + m_block * self.step.columns + self.step.lanes.column(lane, index)
            return args.token_scale[T.min(row, args.m - 1), group]

        self.m_factor = factor

    def flush_due(self, tile: Expr, tiles: Expr) -> Expr:
        """Return whether sums must be flushed after K tile ``tile`` of ``tiles``.

        A Python bool where that is known when the kernel is emitted: groups end there, or the
        instruction's own sum has become too long. The last tile always flushes.
        """
        periods = self.periods
        if not self.flushes or 1 in periods:
            return self.flushes
        due = tile == tiles - 1
        for period in sorted(periods - {0}):
            due = T.Or(due, (tile + 1) % period == 0)
        return due

    @property
    def dtype(self) -> str:
        """Type of finished sums: int32 or float32."""
        whole = self.step.carrier == "uint32" and self.left.gains == (1.0, 1.0)
        return "int32" if whole and not self.flushes else "float32"

    def multiply(self, fragment: int, a: list[Expr], operands: list[Expr]) -> None:
        """Emit one step into a fragment."""
        start = self._start(fragment)
        self.step.emit(self.weight, self.partial, fragment * self.width, a, operands, start)

    def add_x(self, m_block: int, a: list[Expr], operands: list[Expr]) -> None:
        """Emit the sum of x over one step, where sums of x are needed; ``a`` as for `multiply`."""
        if self.x_sums is not None:
            # Where sums of row g serve all, those of row g+8 (odd registers) are spared.
            spared = self.step.lanes.sum_source(self.width - 1) == 0
            ones = [
                None if x is None or (spared and register % 2) else T.uint32(ONES[self.weight])
                for register, x in enumerate(a)
            ]
            self.step.emit(self.weight, self.x_sums, m_block * self.width, ones, operands)

    def flush(self, m_block: int, granule: int, group_registers: list[GroupRegisters]) -> None:
        """Emit the flushes of a block along M's fragments with a granule's scales, and clear the sums."""
        sums = self._x_sums(m_block)
        self.starts.pop(m_block, None)
        if self.begins_shifted:
            self.fresh |= set(range(m_block, self.fragments, self.m_blocks))
        for block, registers in enumerate(group_registers):
            for i in range(self.width):
                at = (block * self.m_blocks + m_block) * self.width + i
                self._flush_one(at, m_block * self.width + i, granule, registers, sums)
        if self.x_sums is not None:
            for i in range(self.width):
                b.store(self.x_sums, self._zero(), m_block * self.width + i)

    def _x_sums(self, m_block: int) -> list[Expr]:
        """Return the float32 sum of x for each sum of a fragment; nothing where none is needed."""
        if not self.left.sums_x or self.begins_shifted:
            return []
        if self.known_sums is not None:
            pair = [b.bind(self._as_float(value)) for value in self.known_sums(m_block)]
            return [pair[i % 2] for i in range(self.width)]
        sources = [self.step.lanes.sum_source(i) for i in range(self.width)]
        return [self._as_float(self.x_sums[m_block * self.width + i]) for i in sources]

    def _flush_one(
        self, at: int, column_at: int, granule: int, registers: GroupRegisters, sums: list[Expr]
    ) -> None:
        slot = self.step.lanes.row_slot(at % self.width)
        scale, value = registers.factor(granule, slot), self._as_float(self.partial[at])
        factor = None if self.m_factor is None else self.m_factor(*divmod(column_at, self.width))
        scale = _product(scale, factor)
        total = self.total[at] + (value if scale is None else value * scale)
        if sums:
            shift = registers.shift(self.left, granule, slot)
            shift = shift if scale is None else b.bind(shift * scale)
            total = total + sums[column_at % self.width] * shift
        b.store(self.total, total, at)
        b.store(self.partial, self._zero(), at)

    def _zero(self) -> Expr:
        return T.uint32(0) if self.step.carrier == "uint32" else T.float32(0)

    def _as_float(self, value: Expr) -> Expr:
        return T.Cast("float32", T.Cast("int32", value)) if self.step.carrier == "uint32" else value

    def result(self, fragment: int, index: int) -> Expr:
        """Return one finished sum, of type `dtype`."""
        at = fragment * self.width + index
        if self.dtype == "int32":
            return T.Cast("int32", self.partial[at])
        value = self._as_float(self.partial[at]) if self.total is None else self.total[at]
        gain = self.left.gains[self.step.lanes.half(self.step.lanes.row_slot(index))]
        return value if gain == 1.0 else value * T.float32(gain)

    def join_lanes(self) -> None:
        """Emit the sums over lanes that hold partial sums of the same elements (Volta)."""
        sums = self.partial if self.total is None else self.total
        for distance in self.step.lanes.partial_lanes:
            for i in range(self.fragments * self.width):
                b.store(sums, sums[i] + b.shuffle_xor(sums[i], distance), i)


def _product(first: Expr | None, second: Expr | None) -> Expr | None:
    """Multiply factors of which either may be absent."""
    if first is None or second is None:
        return second if first is None else first
    return b.bind(first * second)
