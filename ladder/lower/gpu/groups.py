"""Scale groups along K, and the accumulators that group ends act on.

A packed tile is cut into *granules*: runs of its registers that share a scale. Scales go
either onto decoded operands or onto accumulators; in the second case each granule (or
group) ends with a *flush*: ``total += partial * scale``. There registers may hold raw numbers
(`ladder.lower.gpu.decode`), and the flush does the rest: ``total += scale * (sum(raw * x) +
(offset - zero) / gain * sum(x))``, with gains applied to the finished sums. An infinite or NaN
element of x then gives NaN where the sum of products may have been infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.instructions import MatrixStep, emit_step
from ladder.lower.gpu.scales import bytes4, float_of_exponent, pair16
from schedules.layouts import TILE, lane_of, packed_group
from schedules.legal import scale_span, streams_exponents
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
    def exponents(self) -> bool:
        """Whether scales come as words of four exponents."""
        return streams_exponents(self.gemm)

    @property
    def span(self) -> int:
        """Tiles that an element of the scale array serves; 0 when one serves the whole row."""
        return -(-scale_span(self.gemm) // TILE)

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
        return tile * self.per_tile + granule if self.span == 1 else tile // self.span

    def run_row(self, run: Expr, length: int, index: int, granule: int) -> Expr:
        """Return `row` of tile ``index`` of run ``run``, runs being ``length`` tiles.

        Knowing that runs start at multiples of their length saves divisions.
        """
        if self.span > 1 and length % self.span == 0:
            return run * (length // self.span) + index // self.span
        if self.span > 1 and self.span % length == 0:
            return run // (self.span // length)
        return self.row(run * length + index, granule)


SUM_TILES = 4
"""Tiles after which sums of raw numbers must meet their sum of x: both cancel in part."""

ONES = {"float16": 0x3C003C00, "bfloat16": 0x3F803F80, "int8": 0x01010101}
"""An operand register of ones."""


@dataclass(frozen=True)
class Leftover:
    """What decoded registers leave to the accumulator: ``value = gain * raw + offset - zero``.

    Parameters
    ----------
    gains, offsets
        Of rows g and g+8.
    zero
        Kind of the zero points that are still to be subtracted.
    """

    gains: tuple[float, float] = (1.0, 1.0)
    offsets: tuple[float, float] = (0.0, 0.0)
    zero: str = "none"

    @property
    def sums_tokens(self) -> bool:
        """Whether sums of x are needed."""
        return any(self.offsets) or self.zero != "none"


def left_by(decoder: Any, gemm: Gemm) -> Leftover:
    """Return what a `ladder.lower.gpu.decode.Decoder` leaves to the accumulator."""
    return Leftover(decoder.gains, decoder.offsets, "none" if decoder.subtracts_zeros else gemm.zero)


NOTHING_LEFT = Leftover()

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
        self.tile: Expr = 0
        """The tile that is decoded next, counted from any multiple of what an element of scales serves."""

    @property
    def _scale_parts(self) -> int:
        """Elements of a row's scales that serve a tile."""
        return 1 if self.groups.exponents else self.groups.per_tile

    @property
    def _scale_count(self) -> int:
        return self._scale_parts * self.rows

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
            if self.scales is not None and granule < self._scale_parts:
                for i in range(self.rows):
                    at = granule * self.rows + i
                    self.put("scales", at, read("scales", granule, 0, self._scale_row(i)))
            if self.zeros is not None:
                for part in range(self.parts):
                    for i in range(OPERAND_ROWS):
                        at = self._zero_at(granule, part, i)
                        self.put("zeros", at, read("zeros", granule, part, self._operand_row(i)))

    def put(self, array: str, at: int, value: Expr) -> None:
        """Emit ``value`` becoming element ``at`` of ``"scales"`` or ``"zeros"``."""
        b.store(getattr(self, array), value, at)

    def replicated(self, array: str, at: int) -> Expr:
        """Return element ``at`` of ``"scales"`` or ``"zeros"`` in all lanes of a word."""
        return (pair16 if self.groups.lane == 16 else bytes4)(getattr(self, array)[at])

    def number(self, array: str, at: int) -> Expr:
        """Return element ``at`` of ``"scales"`` or ``"zeros"`` as float32."""
        return T.Cast("float32", getattr(self, array)[at])

    def _zero_at(self, granule: int, part: int, row: int) -> int:
        return (granule * self.parts + part) * OPERAND_ROWS + row

    def exponent_at(self, granule: int) -> int | None:
        """Return the byte of `exponent_word` that serves a granule, or None where scales are no exponents."""
        if not self.groups.exponents:
            return None
        return self.tile % 2 * self.groups.per_tile + granule if isinstance(self.tile, int) else granule

    def _exponent_word(self, row: int) -> Expr:
        """Return a row's word of exponents."""
        return self._own_exponents(self.scales[row])

    def _own_exponents(self, word: Expr) -> Expr:
        """Return a word of exponents: the tile's ones first where it is not known when emitting."""
        if isinstance(self.tile, int):
            return word
        return b.bind(word >> (T.Cast("uint32", T.bitwise_and(self.tile, 1)) * T.uint32(16)))

    def operand_scales(self, granule: int) -> tuple[Expr, Expr] | None:
        """Return the scales of rows g and g+8 as the decoder takes them, if they go onto operands.

        Each is held twice; or words of exponents, of which `exponent_at` is meant.
        """
        if not self.groups.on_operand:
            return None
        if self.groups.exponents:
            return self._exponent_word(0), self._exponent_word(1)
        first = granule * self.rows
        low, high = (b.bind(self.replicated("scales", first + i)) for i in range(OPERAND_ROWS))
        return low, high

    def operand_zeros(self, granule: int) -> Any:
        """Return the replicated zero points of rows g and g+8 as the decoder takes them."""
        if self.zeros is None:
            return None
        parts = [
            tuple(
                b.bind(self.replicated("zeros", self._zero_at(granule, part, i))) for i in range(OPERAND_ROWS)
            )
            for part in range(self.parts)
        ]
        if self.parts == 1:
            return parts[0]
        return tuple((parts[0][i], parts[1][i]) for i in range(OPERAND_ROWS))

    def factor(self, granule: int, row_slot: int) -> Expr | None:
        """Return the float32 scale of an accumulator's row, if scales go onto accumulators."""
        if not self.groups.on_accumulator:
            return None
        at = self.exponent_at(granule)
        if at is not None:
            return b.bind(float_of_exponent(self._exponent_word(row_slot), at, self.groups.gemm.activation))
        return b.bind(self.number("scales", granule * self.rows + row_slot))

    def shift(self, left: Leftover, granule: int, row_slot: int) -> Expr:
        """Return ``(offset - zero) / gain`` of an accumulator's row, float32."""
        half = self.step.lanes.half(row_slot)
        gain = left.gains[half]
        value: Expr = T.float32(left.offsets[half] / gain)
        if left.zero == "none":
            return value
        for part in range(self.parts):
            stored = self.number("zeros", self._zero_at(granule, part, row_slot))
            value = value - stored * T.float32(1 / gain)
        return b.bind(value)


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
    row_blocks, token_blocks
        16-row and 8-token blocks; fragments are ``[row_blocks][token_blocks]``.
    left
        What decoded registers leave to the sums.
    known_sums
        Returns the sums of a lane's two tokens of a block where they need not be computed here.
    """

    def __init__(
        self,
        groups: Groups,
        step: MatrixStep,
        weight: str,
        row_blocks: int,
        token_blocks: int,
        left: Leftover = NOTHING_LEFT,
        known_sums: Callable[[int], list[Expr]] | None = None,
    ) -> None:
        self.groups, self.step, self.weight, self.left = groups, step, weight, left
        self.known_sums = known_sums
        self.row_blocks, self.token_blocks = row_blocks, token_blocks
        self.token_factor: Callable[[int, int], Expr] | None = None
        self.fragments = row_blocks * token_blocks
        self.width = step.lanes.accumulators
        self.starts: dict[int, list[Expr]] = {}
        self.fresh = set(range(self.fragments)) if self.begins_shifted else set()
        self.partial = self._cleared(self.fragments, step.carrier)
        self.total: Any = self._cleared(self.fragments, "float32") if self.flushes else None
        summed = left.sums_tokens and known_sums is None
        self.token_sums: Any = self._cleared(token_blocks, step.carrier) if summed else None

    def _cleared(self, fragments: int, dtype: str) -> Any:
        """Allocate fragments of zeros."""
        buffer = b.local(fragments * self.width, dtype)
        for i in range(fragments * self.width):
            b.store(buffer, T.float32(0) if dtype == "float32" else T.uint32(0), i)
        return buffer

    @property
    def begins_shifted(self) -> bool:
        """Whether partial sums begin with what offsets add to them, so that flushes need not add it."""
        whole = len(self.step.issues) == 1 and self.step.carrier == "float32"
        return self.left.sums_tokens and self.known_sums is not None and self.left.zero == "none" and whole

    def _start(self, fragment: int) -> list[Expr] | None:
        """Return what a fragment begins with if this is its first step since its flush."""
        if fragment not in self.fresh:
            return None
        self.fresh.remove(fragment)
        token_block = fragment % self.token_blocks
        if token_block not in self.starts:
            assert self.known_sums is not None
            sums = self.known_sums(token_block)
            shifts = [offset / gain for offset, gain in zip(self.left.offsets, self.left.gains, strict=True)]
            self.starts[token_block] = [
                b.bind(sums[i % 2] * T.float32(shifts[self.step.lanes.row_slot(i)]))
                for i in range(self.width)
            ]
        return self.starts[token_block]

    @property
    def flushes(self) -> bool:
        """Whether partial sums move to totals."""
        flushed_anyway = self.groups.on_accumulator or self.step.promote > 0
        return flushed_anyway or self.left.sums_tokens or self.groups.token_tiles > 0

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
        return periods | ({SUM_TILES} if self.left.sums_tokens else set())

    def scale_tokens(self, args: Arguments, lane: Expr, first: Expr, tile: Expr) -> None:
        """Have flushes after K tile ``tile`` scale tokens by group, where they are at all.

        ``first`` is the first token of the fragments. Rows beyond the tokens take the last one's
        scales; they are not stored.
        """
        if not self.groups.token_tiles:
            return
        group = b.keep(T.truncdiv(tile, self.groups.token_tiles))

        def factor(token_block: int, index: int) -> Expr:
            row = first + token_block * self.step.tokens + self.step.lanes.token(lane, index)
            return args.token_scale[T.min(row, args.m - 1), group]

        self.token_factor = factor

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
        emit_step(self.step, self.weight, self.partial, fragment * self.width, a, operands, start)

    def add_tokens(self, token_block: int, a: list[Expr], operands: list[Expr]) -> None:
        """Emit the sum of x over one step, where sums of x are needed; ``a`` as for `multiply`."""
        if self.token_sums is not None:
            # Where sums of row g serve all, those of row g+8 (odd registers) are spared.
            spared = self.step.lanes.sum_source(self.width - 1) == 0
            ones = [
                None if x is None or (spared and register % 2) else T.uint32(ONES[self.weight])
                for register, x in enumerate(a)
            ]
            emit_step(self.step, self.weight, self.token_sums, token_block * self.width, ones, operands)

    def flush(self, token_block: int, granule: int, group_registers: list[GroupRegisters]) -> None:
        """Emit the flushes of a token block's fragments with a granule's scales, and clear the sums."""
        sums = self._token_sums(token_block)
        self.starts.pop(token_block, None)
        if self.begins_shifted:
            self.fresh |= set(range(token_block, self.fragments, self.token_blocks))
        for block, registers in enumerate(group_registers):
            for i in range(self.width):
                at = (block * self.token_blocks + token_block) * self.width + i
                self._flush_one(at, token_block * self.width + i, granule, registers, sums)
        if self.token_sums is not None:
            for i in range(self.width):
                b.store(self.token_sums, self._zero(), token_block * self.width + i)

    def _token_sums(self, token_block: int) -> list[Expr]:
        """Return the float32 sum of x for each sum of a fragment; nothing where none is needed."""
        if not self.left.sums_tokens or self.begins_shifted:
            return []
        if self.known_sums is not None:
            pair = [b.bind(self._as_float(value)) for value in self.known_sums(token_block)]
            return [pair[i % 2] for i in range(self.width)]
        sources = [self.step.lanes.sum_source(i) for i in range(self.width)]
        return [self._as_float(self.token_sums[token_block * self.width + i]) for i in sources]

    def _flush_one(
        self, at: int, tokens_at: int, granule: int, registers: GroupRegisters, sums: list[Expr]
    ) -> None:
        slot = self.step.lanes.row_slot(at % self.width)
        scale, value = registers.factor(granule, slot), self._as_float(self.partial[at])
        factor = None if self.token_factor is None else self.token_factor(*divmod(tokens_at, self.width))
        scale = _product(scale, factor)
        total = self.total[at] + (value if scale is None else value * scale)
        if sums:
            shift = registers.shift(self.left, granule, slot)
            shift = shift if scale is None else b.bind(shift * scale)
            total = total + sums[tokens_at % self.width] * shift
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
                other = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), sums[i], distance, 32, 32)
                b.store(sums, sums[i] + other, i)


def _product(first: Expr | None, second: Expr | None) -> Expr | None:
    """Multiply factors of which either may be absent."""
    if first is None or second is None:
        return second if first is None else first
    return b.bind(first * second)
