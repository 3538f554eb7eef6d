"""Scale groups along K: where they fall on packed tiles, and the registers that hold them.

A packed tile is cut into *granules*: runs of its registers that share a scale. Scales go
either onto decoded operands or onto accumulators (`ladder.lower.gpu.accumulators`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, frexp, log2
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.instructions import MatrixStep
from ladder.lower.gpu.machine import Machine, Word
from ladder.lower.gpu.recipes import FLOAT_CORES, Meaning
from schedules.group_values import scale_span, streams_exponents
from schedules.layouts import (
    EXPONENT_FORMS,
    EXPONENTS,
    OPERAND_EXPONENT,
    SCALE_EXPONENT,
    TILE,
    lane_of,
    packed_group,
)
from tile_types import get_type

FACTOR_EXPONENT = {"float16": 16, "bfloat16": 120}
"""Factors of raw operands stay below two to this."""

LARGEST_POWER = {"float16": 2.0**15, "bfloat16": 2.0**120}
"""Powers of two that scales are multiplied by at once."""

FLOAT32_BIAS, FLOAT32_MANTISSA = 127, 23
"""Bias of a float32's exponent, and the bits below it."""


def pair16(value: Expr) -> Expr:
    """Return the bits of a float16 or bfloat16 value in both halves of a uint32 register."""
    bits = T.Cast("uint32", T.reinterpret(value, dtype="uint16"))
    return bits * T.uint32(0x00010001)


def bytes4(value: Expr) -> Expr:
    """Return the bits of an int8 value in all four bytes of a uint32 register."""
    bits = T.Cast("uint32", T.reinterpret(value, dtype="uint8"))
    return bits * T.uint32(0x01010101)


def exponent_byte(m: Machine, word: Word, at: int) -> Word:
    """Return one of the four exponents of a word."""
    moved = m.shift(word, -8 * at)
    return moved if at == EXPONENTS - 1 else m.mask(moved, 0xFF)


def power_of(m: Machine, core: str, byte: Word, power: float) -> Word:
    """Return ``power`` times a scale of which ``byte`` is the exponent, in both lanes of a register.

    One multiply-add where ``power`` is a power of two and no such product leaves the normal numbers.
    """
    form, lanes = EXPONENT_FORMS[core], 0x00010001
    step, most = lanes << form.mantissa_bits, 2 * form.bias
    fraction, exponent = frexp(abs(power))
    added = exponent - 1 - form.raised
    if fraction == 0.5 and form.lowest + added >= 1 and form.highest + added <= most:
        return m.multiply(byte, step, added * step + (0x80008000 if power < 0 else 0))
    return times(m, core, m.multiply(byte, step), power / 2.0**form.raised)


def float_of_exponent(word: Expr, at: int, core: str) -> Expr:
    """Return the float32 scale whose exponent is byte ``at`` of a word."""
    form = EXPONENT_FORMS[core]
    moved = word >> T.uint32(8 * at) if at else word
    byte = moved if at == EXPONENTS - 1 else moved & T.uint32(0xFF)
    bits = byte * T.uint32(1 << FLOAT32_MANTISSA) + T.uint32(
        (FLOAT32_BIAS - form.bias - form.raised << FLOAT32_MANTISSA) % (1 << 32)
    )
    return T.reinterpret(bits, dtype="float32")


def times(m: Machine, core: str, word: Word, power: float) -> Word:
    """Multiply by a power of two, at once or by factors that the operand type holds."""
    largest = LARGEST_POWER[core]
    while abs(power) > largest:
        word = m.float_mul(core, word, m.constant(FLOAT_CORES[core].bits(largest)))
        power /= largest
    return word if power == 1.0 else m.float_mul(core, word, m.constant(FLOAT_CORES[core].bits(power)))


@dataclass(frozen=True)
class Fold:
    """One multiply-add that turns a raw operand into ``value * scale / 2**exponent``.

    ``raw * (scale * step) + scale * start``: rounded once, since both products of the scale are
    by powers of two. Results that are subnormal in float16 may be off by its smallest number.

    steps, starts: Factors of the scale for rows g and g+8.
    exponent: Chosen so that the largest scale that packing leaves still has a finite product.
    """

    steps: tuple[float, float]
    starts: tuple[float, float]
    exponent: int

    def powers(self, half: int) -> tuple[float, ...]:
        """Return which multiples of the scale multiply row g or g+8 and, where any is, are then added."""
        return (self.steps[half], self.starts[half]) if any(self.starts) else (self.steps[half],)


def fold(operand: str, meaning: Meaning, reach: float) -> Fold | None:
    """Return how scales multiply raw operands, or None if that would round twice.

    operand: Operand type.
    meaning: What the raw operands stand for.
    reach: Largest magnitude of the weight type's values.
    """
    numbers = (*meaning.gains, *(offset for offset in meaning.offsets if offset))
    if operand not in FLOAT_CORES or any(abs(frexp(number)[0]) != 0.5 for number in numbers):
        return None
    scale = min(2.0**OPERAND_EXPONENT / reach, 2.0**SCALE_EXPONENT)
    largest = ceil(log2(max(map(abs, meaning.gains)) * scale))
    exponent = max(0, largest - FACTOR_EXPONENT[operand])
    low, high = (gain / 2.0**exponent for gain in meaning.gains)
    start_low, start_high = (offset / 2.0**exponent for offset in meaning.offsets)
    return Fold((low, high), (start_low, start_high), exponent)


OPERAND_ROWS = 2
"""Rows g and g+8 of which a lane holds operands."""


@dataclass(frozen=True)
class Groups:
    """How scales and zero points of a problem fall on packed tiles.

    placement: ``"operand"`` or ``"accumulator"``; 8-bit cores always use the accumulator.
    core: Type of the decoded operands; by default that of the activations.
    """

    gemm: Gemm
    placement: str = "operand"
    core: str = ""

    @property
    def lane(self) -> int:
        """Bits of an operand element; also the operand registers of a tile per thread."""
        return lane_of(self.core or self.gemm.activation)

    @property
    def bits(self) -> int:
        """Bits of a weight code; also the packed words of a tile per thread."""
        return get_type(self.gemm.weight).elem_bits

    @property
    def tile_words(self) -> int:
        """32-bit words of a packed tile."""
        return 128 * self.bits

    @property
    def zero_parts(self) -> int:
        """Arrays that make up zero points: none, one, or coarse part and remainder."""
        return {"none": 0, "integer": 1, "float": 2}[self.gemm.zero]

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
        """Tiles that share a activation scale; 0 when one serves the whole row."""
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


@dataclass(frozen=True)
class Correction:
    """Correction that decoded registers leave to the accumulator: ``value = gain * raw + offset - zero``.

    gains, offsets: Of rows g and g+8.
    zero: Kind of the zero points that are still to be subtracted.
    """

    gains: tuple[float, float] = (1.0, 1.0)
    offsets: tuple[float, float] = (0.0, 0.0)
    zero: str = "none"

    @property
    def sums_x(self) -> bool:
        """Whether sums of x are needed."""
        return any(self.offsets) or self.zero != "none"


def left_by(decoder: Any, gemm: Gemm) -> Correction:
    """Return what a `ladder.lower.gpu.decode.Decoder` leaves to the accumulator."""
    return Correction(decoder.gains, decoder.offsets, "none" if decoder.subtracts_zeros else gemm.zero)


NOTHING_LEFT = Correction()

Reader = Callable[[str, int, int, Expr], Expr]
"""``read(name, granule, part, row)``: element of ``"scales"`` or ``"zeros"`` for fragment row 0..15."""


class GroupRegisters:
    """Scales and zero points of a tile, or of neighbours that share them, as loaded: converted on use.

    lane: The lane of the warp.
    types: Element types of scales and zero points, or None where absent.
    """

    def __init__(
        self, groups: Groups, step: MatrixStep, lane: Expr, types: tuple[str | None, str | None]
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
        """Return the byte of a word of exponents that serves a granule; None where scales are none."""
        if not self.groups.exponents:
            return None
        return self.tile % 2 * self.groups.per_tile + granule if isinstance(self.tile, int) else granule

    def _exponent_word(self, row: int) -> Expr:
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

    def shift(self, left: Correction, granule: int, row_slot: int) -> Expr:
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
