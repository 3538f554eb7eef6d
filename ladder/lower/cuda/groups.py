"""Scale groups along K, and the accumulators that group ends act on.

A packed tile is cut into *granules*: runs of its registers that share a scale. Scales go
either onto decoded operands or onto accumulators; in the second case each granule (or
group) ends with a *flush*: ``total += partial * scale``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cuda.instructions import MatrixStep, emit_step
from ladder.lower.cuda.scales import bytes4, pair16
from schedules.layouts import TILE, lane_of, packed_group
from tile_types import get_type

Expr = Any

OPERAND_ROWS = 2
"""Rows g and g+8 of which a lane holds operands."""


@dataclass(frozen=True)
class Groups:
    """How scales and zero points of a problem fall on packed tiles.

    Parameters
    ----------
    gemm
        The problem.
    placement
        ``"operand"`` or ``"accumulator"``; 8-bit cores always use the accumulator.
    """

    gemm: Gemm
    placement: str = "operand"

    @property
    def lane(self) -> int:
        """Bits of an operand element; also the operand registers of a tile per thread."""
        return lane_of(self.gemm.activation)

    @property
    def bits(self) -> int:
        """Bits of a weight code; also the packed words of a tile per thread."""
        return get_type(self.gemm.weight).elem_bits

    @property
    def size(self) -> int:
        """Elements of K per packed group; 0 when one serves the whole row."""
        whole = self.gemm.group_size >= self.gemm.k
        return 0 if whole else packed_group(self.gemm.group_size, self.gemm.k)

    @property
    def per_tile(self) -> int:
        """Granules of a tile."""
        return TILE // self.size if 0 < self.size < TILE else 1

    @property
    def tiles(self) -> int:
        """Tiles that a group spans; 0 when one group serves the whole row."""
        return -(-self.size // TILE)

    @property
    def token_tiles(self) -> int:
        """Tiles that share a token scale; 0 when one serves the whole row."""
        return self.gemm.token_group // TILE

    @property
    def registers(self) -> int:
        """Operand registers of a granule."""
        return self.lane // self.per_tile

    @property
    def on_operand(self) -> bool:
        """Whether scales multiply decoded operands."""
        return self.gemm.scale and self.lane == 16 and self.placement == "operand"

    @property
    def on_accumulator(self) -> bool:
        """Whether scales multiply accumulators."""
        return self.gemm.scale and not self.on_operand

    def row(self, tile: Expr, granule: Expr) -> Expr:
        """Return the row of the scale array that serves a granule of K tile ``tile``."""
        if self.size == 0:
            return 0
        return tile * self.per_tile + granule if self.tiles == 1 else tile // self.tiles

    def run_row(self, run: Expr, length: int, index: int, granule: int) -> Expr:
        """Return `row` of tile ``index`` of run ``run``, runs being ``length`` tiles.

        Knowing that runs start at multiples of their length saves divisions.
        """
        if self.tiles > 1 and length % self.tiles == 0:
            return run * (length // self.tiles) + index // self.tiles
        if self.tiles > 1 and self.tiles % length == 0:
            return run // (self.tiles // length)
        return self.row(run * length + index, granule)


Reader = Callable[[str, int, int, Expr], Expr]
"""``read(name, granule, part, row)``: element of ``"scales"`` or ``"zeros"`` for fragment row 0..15."""


class GroupRegisters:
    """Scales and zero points of a tile, or of neighbours that share them, as loaded: converted on use.

    Parameters
    ----------
    groups, step
        What is loaded, and for which rows.
    lane
        The lane of the warp.
    types
        Element types of scales and zero points, or None where absent.
    """

    def __init__(
        self,
        groups: Groups,
        step: MatrixStep,
        lane: Expr,
        types: tuple[str | None, str | None],
    ) -> None:
        self.groups, self.step, self.lane = groups, step, lane
        self.rows = OPERAND_ROWS if groups.on_operand else step.lanes.rows_per_lane
        self.parts = 2 if groups.gemm.zero == "float" else 1
        scale_type, zero_type = types
        self.scales: Any = b.local(self._scale_count, scale_type) if scale_type else None
        self.zeros: Any = b.local(self._zero_count, zero_type) if zero_type else None

    @property
    def _scale_count(self) -> int:
        return self.groups.per_tile * self.rows

    @property
    def _zero_count(self) -> int:
        return self.groups.per_tile * self.parts * OPERAND_ROWS

    def _operand_row(self, index: int) -> Expr:
        return self.step.lanes.operand(self.lane)[0] + 8 * index

    def _scale_row(self, index: int) -> Expr:
        if self.groups.on_operand:
            return self._operand_row(index)
        return self.step.lanes.slot_row(self.lane, index)

    def fetch(self, read: Reader) -> None:
        """Emit the loads of one tile's scales and zero points."""
        for granule in range(self.groups.per_tile):
            if self.scales is not None:
                for i in range(self.rows):
                    at = granule * self.rows + i
                    b.store(self.scales, read("scales", granule, 0, self._scale_row(i)), at)
            if self.zeros is not None:
                for part in range(self.parts):
                    for i in range(OPERAND_ROWS):
                        at = self._zero_at(granule, part, i)
                        b.store(self.zeros, read("zeros", granule, part, self._operand_row(i)), at)

    def _zero_at(self, granule: int, part: int, row: int) -> int:
        return (granule * self.parts + part) * OPERAND_ROWS + row

    def operand_scales(self, granule: int) -> tuple[Expr, Expr] | None:
        """Return the duplicated scales of rows g and g+8, if scales go onto operands."""
        if not self.groups.on_operand:
            return None
        first = granule * self.rows
        low, high = (b.bind(pair16(self.scales[first + i])) for i in range(OPERAND_ROWS))
        return low, high

    def operand_zeros(self, granule: int) -> Any:
        """Return the replicated zero points of rows g and g+8 as the decoder takes them."""
        if self.zeros is None:
            return None
        replicate = pair16 if self.groups.lane == 16 else bytes4
        parts = [
            tuple(b.bind(replicate(self.zeros[self._zero_at(granule, part, i)])) for i in range(OPERAND_ROWS))
            for part in range(self.parts)
        ]
        if self.parts == 1:
            return parts[0]
        return tuple((parts[0][i], parts[1][i]) for i in range(OPERAND_ROWS))

    def factor(self, granule: int, row_slot: int) -> Expr | None:
        """Return the float32 scale of an accumulator's row, if scales go onto accumulators."""
        if not self.groups.on_accumulator:
            return None
        return T.Cast("float32", self.scales[granule * self.rows + row_slot])


def array_dtype(array: Any) -> str | None:
    """Return the element type of an argument, or None where it is absent."""
    return None if array is None else str(array.dtype)


class Accumulators:
    """The accumulator fragments of one thread: running sums, and totals where sums are flushed.

    Parameters
    ----------
    groups, step
        The problem's scales and the instructions.
    weight
        Operand type of decoded weights.
    fragments
        Number of 16 x 8 fragments.
    """

    def __init__(self, groups: Groups, step: MatrixStep, weight: str, fragments: int) -> None:
        self.groups, self.step, self.weight, self.fragments = groups, step, weight, fragments
        self.width = step.lanes.accumulators
        self.partial = b.local(fragments * self.width, step.carrier)
        self.total: Any = b.local(fragments * self.width, "float32") if self.flushes else None
        for i in range(fragments * self.width):
            b.store(self.partial, self._zero(), i)
            if self.total is not None:
                b.store(self.total, T.float32(0), i)

    def _zero(self) -> Expr:
        return T.uint32(0) if self.step.carrier == "uint32" else T.float32(0)

    @property
    def flushes(self) -> bool:
        """Whether partial sums move to totals."""
        return self.groups.on_accumulator or self.step.promote > 0 or self.groups.token_tiles > 0

    def flush_due(self, tile: Expr, tiles: Expr) -> Expr:
        """Return whether sums must be flushed after K tile ``tile`` of ``tiles``.

        A Python bool where that is known when the kernel is emitted: groups end there, or the
        instruction's own sum has become too long. The last tile always flushes.
        """
        periods = {self.groups.tiles} if self.groups.on_accumulator else set()
        periods |= {self.step.promote // TILE} if self.step.promote else set()
        periods |= {self.groups.token_tiles} if self.groups.token_tiles else set()
        if not self.flushes or 1 in periods:
            return self.flushes
        due = tile == tiles - 1
        for period in sorted(periods - {0}):
            due = T.Or(due, (tile + 1) % period == 0)
        return due

    @property
    def dtype(self) -> str:
        """Type of finished sums: int32 or float32."""
        return "int32" if self.step.carrier == "uint32" and not self.flushes else "float32"

    def multiply(self, fragment: int, a: list[Expr], operands: list[Expr]) -> None:
        """Emit one step into a fragment."""
        emit_step(self.step, self.weight, self.partial, fragment * self.width, a, operands)

    def flush(
        self,
        fragment: int,
        factor: Callable[[int], Expr | None],
        token_factor: Callable[[int], Expr] | None = None,
    ) -> None:
        """Emit ``total += partial * factor(row slot) * token_factor(index)`` and clear the partial sums."""
        for i in range(self.width):
            at = fragment * self.width + i
            value = self._as_float(self.partial[at])
            scale = factor(self.step.lanes.row_slot(i))
            value = value if scale is None else value * scale
            value = value if token_factor is None else value * token_factor(i)
            b.store(self.total, self.total[at] + value, at)
            b.store(self.partial, self._zero(), at)

    def _as_float(self, value: Expr) -> Expr:
        return T.Cast("float32", T.Cast("int32", value)) if self.step.carrier == "uint32" else value

    def result(self, fragment: int, index: int) -> Expr:
        """Return one finished sum, of type `dtype`."""
        at = fragment * self.width + index
        if self.total is not None:
            return self.total[at]
        return T.Cast("int32", self.partial[at]) if self.dtype == "int32" else self.partial[at]

    def join_lanes(self) -> None:
        """Emit the sums over lanes that hold partial sums of the same elements (Volta)."""
        sums = self.partial if self.total is None else self.total
        for distance in self.step.lanes.partial_lanes:
            for i in range(self.fragments * self.width):
                other = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), sums[i], distance, 32, 32)
                b.store(sums, sums[i] + other, i)


class TileMultiplier:
    """Emits one packed tile's decode and multiplication, span by span.

    Parameters
    ----------
    decoder
        Turns packed words into operand registers.
    accumulators
        The fragments, ``[row_blocks][token_blocks]``.
    row_blocks, token_blocks
        16-row and 8-token blocks of this thread's warp.
    """

    def __init__(self, decoder: Any, accumulators: Accumulators, row_blocks: int, token_blocks: int) -> None:
        self.decoder, self.accumulators = decoder, accumulators
        self.groups = accumulators.groups
        self.row_blocks, self.token_blocks = row_blocks, token_blocks
        self.span = 2 * 4
        self.operands = b.local(row_blocks * self.span, "uint32")
        self.tokens = b.local(4, "uint32")
        self.token_factor: Callable[[int, int], Expr] | None = None
        """``token_factor(token_block, index)``: the scale of an accumulator's token in the tile's group."""

    def emit(
        self,
        words: list[Any],
        group_registers: list[GroupRegisters],
        load_tokens: Callable[[int, int, Any], None],
        flush: bool,
    ) -> None:
        """Emit the tile.

        Parameters
        ----------
        words
            Local buffers of the thread's packed words, one per row block.
        group_registers
            Scales and zero points of each row block.
        load_tokens
            ``load_tokens(token_block, span, out)`` emits the loads of B operands.
        flush
            Whether partial sums are flushed at the tile's last granule.
        """
        for span in range(self.groups.lane // self.span):
            for block in range(self.row_blocks):
                self._decode(words, group_registers, block, span)
            for token_block in range(self.token_blocks):
                load_tokens(token_block, span, self.tokens)
                for block in range(self.row_blocks):
                    self._multiply(group_registers, block, token_block, span, flush)

    def _granules(self, span: int) -> range:
        """Return the granules that a span touches."""
        first = span * self.span // self.groups.registers
        return range(first, (span * self.span + self.span - 1) // self.groups.registers + 1)

    def _decode(self, words: list[Any], group_registers: list[GroupRegisters], block: int, span: int) -> None:
        count = min(self.span, self.groups.registers)
        for granule in self._granules(span):
            first = max(granule * self.groups.registers, span * self.span)
            self.decoder.registers(
                words[block],
                first,
                count,
                self.operands,
                block * self.span + first - span * self.span,
                group_registers[block].operand_scales(granule),
                group_registers[block].operand_zeros(granule),
            )

    def _multiply(
        self, group_registers: list[GroupRegisters], block: int, token_block: int, span: int, flush: bool
    ) -> None:
        """Emit a span's steps into one fragment, and the flushes of granules that end in it."""
        fragment = block * self.token_blocks + token_block
        for granule in self._granules(span):
            low = granule * self.groups.registers - span * self.span
            for step in range(2):
                a = [
                    self.operands[block * self.span + r] if low <= r < low + self.groups.registers else None
                    for r in range(4 * step, 4 * step + 4)
                ]
                if any(x is not None for x in a):
                    self.accumulators.multiply(
                        fragment, a, [self.tokens[2 * step], self.tokens[2 * step + 1]]
                    )
            ends = low + self.groups.registers <= self.span
            inner = self.groups.per_tile > 1 and self.accumulators.groups.on_accumulator
            if self.accumulators.flushes and ends and (flush or inner):
                self._flush(group_registers, block, fragment, granule)

    def _flush(self, group_registers: list[GroupRegisters], block: int, fragment: int, granule: int) -> None:
        scale, token_block = self.token_factor, fragment % self.token_blocks
        self.accumulators.flush(
            fragment,
            lambda row: group_registers[block].factor(granule, row),
            None if scale is None else lambda index: scale(token_block, index),
        )

    def flush_all(self, group_registers: list[GroupRegisters]) -> None:
        """Emit the flush of every fragment with the tile's last granule."""
        for block in range(self.row_blocks):
            for token_block in range(self.token_blocks):
                fragment = block * self.token_blocks + token_block
                self._flush(group_registers, block, fragment, self.groups.per_tile - 1)
