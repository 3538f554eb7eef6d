"""Decoders: from packed words to tensor-core operand registers, by recipes that are proven before use.

Where scales multiply accumulators, registers may hold *raw* numbers, and the accumulator applies
what is left: ``scale * (gain * sum(raw * x) + (offset - zero) * sum(x))``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.decode_codebook import Table
from ladder.lower.gpu.emission import SharedTable, TirMachine, fill_table
from ladder.lower.gpu.groups import Fold, exponent_byte, fold, power_of, times
from ladder.lower.gpu.machine import XOR, Machine, Word
from ladder.lower.gpu.proven import (
    FP8_OPERANDS,
    OFFSET_CLOCKS,
    Proven,
    cheapest,
    operand_type,
    packed_order,
    proven_recipes,
    table_bytes,
    usable,
)
from ladder.lower.gpu.recipes import Conversion
from schedules.codes import held_type
from schedules.layouts import THREADS, planes
from targets import TileDevice

SIGNS = 0x80008000
"""Signs of two 16-bit floats."""


class LoadedWords(Sequence[Word]):
    """A thread's packed words, read from a local buffer when first used."""

    def __init__(self, m: Machine, buffer: Any, count: int) -> None:
        self._machine, self._buffer, self._count = m, buffer, count
        self._read: dict[int, Word] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if index not in self._read:
            self._read[index] = self._machine.input(b.bind(self._buffer[index]))
        return self._read[index]


@dataclass(frozen=True)
class GroupValues:
    """What registers of one group of K are decoded with, for rows g and g+8; None where there is nothing.

    scales: In both halves of a uint32 (16-bit cores), or, if ``prepared``, what `Decoder.kept` returned.
    zeros: Zero points: uint32 with the value in both halves (16-bit cores) or all four bytes (8-bit cores);
        for real zero points, pairs (coarse part, remainder).
    at: Byte of ``scales`` that holds the exponent, where those are words of exponents.
    """

    scales: tuple[Any, Any] | None = None
    zeros: tuple[Any, Any] | None = None
    at: int | None = None
    prepared: bool = False


NO_VALUES = GroupValues()


@dataclass(frozen=True)
class Decoder:
    """Decodes one weight type to one operand type.

    zero: How zero points that `registers` subtracts are stored (`Gemm.zero`); ``"none"`` if there are none or
        if they are left to the accumulator.
    fold: How scales multiply raw operands, where they do not multiply values.
    """

    conversion: Conversion
    zero: str
    choice: Proven
    fold: Fold | None = None

    @property
    def gains(self) -> tuple[float, float]:
        """Factors of rows g and g+8: ``value = gain * raw + offset``. Powers of two times the type's step."""
        if self.fold is not None:
            return 2.0**self.fold.exponent, 2.0**self.fold.exponent
        return self.choice.meaning.gains

    @property
    def offsets(self) -> tuple[float, float]:
        """Offsets of rows g and g+8.

        Where one is not 0 the accumulator adds ``offset * sum(x)``; both terms cancel in part, so
        sums of a 16-bit core should be taken at least every 256 elements of K (offsets of bfloat16
        reach 136).
        """
        return self.choice.meaning.offsets if self.fold is None else (0.0, 0.0)

    @property
    def subtracts_zeros(self) -> bool:
        """Whether `registers` takes zero points; otherwise the accumulator subtracts ``zero * sum(x)``."""
        return self.zero != "none"

    @property
    def operand(self) -> str:
        """Operand type of the decoded registers."""
        return self.conversion.operand

    @property
    def words(self) -> int:
        """32-bit words of a thread per 64 x 64 tile."""
        return self.conversion.bits

    @property
    def lane(self) -> int:
        """Bits of one element in a register."""
        return self.conversion.lane

    @property
    def table_words(self) -> int:
        """uint32 words of shared memory that the decoder's table takes: 0 if it has none.

        The kernel allocates them, emits `fill_table` before a barrier, and hands a `SharedTable` to
        `registers`.
        """
        return table_bytes(self.choice.recipe) // 4

    @property
    def table_entries(self) -> int:
        """Entries of the decoder's table: 0 if it has none."""
        return len(self.choice.recipe.entries) if isinstance(self.choice.recipe, Table) else 0

    def fill_table(self, buffer: Any, thread: Expr, threads: int) -> None:
        """Emit this thread's share of writing the table to shared memory.

        buffer: uint32 words, `table_words` of them.
        thread, threads: This thread, and the number, of the threads that fill it.
        """
        table = self.choice.recipe
        assert isinstance(table, Table)
        fill_table(buffer, table.values, table.step, table.row, thread, threads)

    def registers(
        self,
        tile_words: Any,
        which: range,
        out: Any,
        first: int,
        values: GroupValues = NO_VALUES,
        table: SharedTable | None = None,
    ) -> None:
        """Emit the decode of some registers of the thread's tile, which lie in one group of K.

        tile_words: Local uint32 buffer of all the thread's words, planes one after another.
        which: Numbers of the registers.
        out, first: Local uint32 buffer that receives them, and where.
        values: Scales and zero points of the group.
        table: The decoder's table, if it has one (`table_words`).
        """
        m, zeros = self.machine(table), values.zeros
        words = LoadedWords(m, tile_words, self.words)
        parts = (None, None) if zeros is None else tuple(self._parts(m, zero) for zero in zeros)
        factors = self._factors(m, values)
        for place, index in enumerate(which, first):
            value = self.value(m, words, index, factors[index % 2], parts[index % 2])
            b.store(out, value.content, place)

    def machine(self, table: SharedTable | None) -> TirMachine:
        return TirMachine(table)

    def _factors(self, m: Machine, values: GroupValues) -> Sequence[list[Word] | None]:
        """Return the factors of rows g and g+8."""
        if values.scales is None:
            return (None, None)
        if values.prepared:
            return [[m.input(factor) for factor in row] for row in values.scales]
        return [self.prepare(m, m.input(scale), half, values.at) for half, scale in enumerate(values.scales)]

    def kept(self, scale: Expr, half: int, at: int | None = None) -> list[Expr]:
        """Emit what `GroupValues.scales` holds prepared of the scale of row g (``half`` 0) or g+8."""
        m = self.machine(None)
        return [factor.content for factor in self.prepare(m, m.input(scale), half, at)]

    @property
    def factors(self) -> int:
        """Registers that `prepare` makes of one row's scale."""
        return len(self._powers(0))

    def _powers(self, half: int) -> tuple[float, ...]:
        return (1.0,) if self.fold is None else self.fold.powers(half)

    def prepare(self, m: Machine, scale: Word, half: int, at: int | None = None) -> list[Word]:
        """Return what multiplies, and what is then added, in row g (``half`` 0) or g+8.

        ``scale`` holds the scale twice or, if ``at`` is given, its exponent in that byte.
        """
        powers = self._powers(half)
        if at is None:
            return [times(m, self.operand, scale, power) if power else m.constant(0) for power in powers]
        byte = exponent_byte(m, scale, at)
        return [power_of(m, self.operand, byte, power) if power else m.constant(0) for power in powers]

    def _parts(self, m: Machine, zero: Any) -> tuple[Word, ...]:
        return tuple(m.input(part) for part in (zero if self.zero == "float" else (zero,)))

    def value(
        self,
        m: Machine,
        words: Sequence[Word],
        index: int,
        factors: Sequence[Word] | None,
        zero: tuple[Word, ...] | None,
    ) -> Word:
        """Return operand register ``index`` on a machine: decoded, less its zero point, times its scale.

        ``factors`` is what `prepare` made of the scale.
        """
        recipe = self.choice.recipe
        inside = zero[0] if zero is not None and self.zero == "integer" else None
        value = recipe.register(m, words, index, inside)
        if zero is not None and self.zero == "float":
            return self._less_real_zero(m, value, zero, factors)
        if factors is None:
            return value
        if len(factors) == 1:
            return m.float_mul(self.operand, value, factors[0])
        return m.float_fma(self.operand, value, *factors)

    def _less_real_zero(
        self, m: Machine, value: Word, zero: tuple[Word, ...], factors: Sequence[Word] | None
    ) -> Word:
        """Return ``(value - coarse - rest) * scale`` of a zero point's parts.

        Of values less the coarse part nothing is rounded away, so the multiply-add is the only rounding of
        a value's own size.
        """
        coarse, rest = zero
        value = m.float_sub(self.operand, value, coarse)
        if factors is None:
            return m.float_sub(self.operand, value, rest)
        (scale,) = factors
        shift = m.float_mul(self.operand, rest, scale)
        minus = m.lop3(shift, m.constant(SIGNS), m.constant(0), XOR)
        return m.float_fma(self.operand, value, scale, minus)


def make_decoder(
    gemm: Gemm,
    device: TileDevice,
    placement: str = "operand",
    *,
    gains: bool = False,
    table: int = 0,
    offset_clocks: float = OFFSET_CLOCKS,
    core: str = "",
) -> Decoder:
    """Return the cheapest proven decoder for a problem.

    gemm: The problem.
    device: Its compute capability limits the choice.
    placement: ``"operand"``: registers hold values less their zero points, times their scale where one is
        given. ``"accumulator"``: registers hold raw numbers (`Decoder.gains`, `Decoder.offsets`), and zero
        points are left to the accumulator unless `Decoder.subtracts_zeros`.
    gains: Whether the kernel multiplies finished sums by `Decoder.gains` with placement ``"operand"`` too.
    table: Bytes of shared memory that the kernel has for a table (`Decoder.table_words`).
    offset_clocks: Clocks that an offset costs a warp per tile with placement ``"accumulator"``: those of its
        sums of x, where it needs them for nothing else.
    core: Operand type, where it is not what packed words are ordered for.
    Raises ConversionError if the core cannot hold the weight's values.
    Raises VerificationError if no recipe passes its proof.
    """
    conversion, zero = conversion_of(gemm, device, placement == "accumulator", core)
    raw = conversion.raw
    summed = gemm.zero != "none" and zero == "none"
    clocks = 0.0 if summed else offset_clocks
    plain = Decoder(conversion, zero, cheapest(conversion, device.compute_capability, table, clocks))
    if raw or not gains or zero != "none":
        return plain
    choices = (plain, *_folding(plain, gemm.scale, device, table))
    return min(choices, key=lambda decoder: decoder.choice.cost.weight)


def conversion_of(gemm: Gemm, device: TileDevice, raw: bool, core: str = "") -> tuple[Conversion, str]:
    """Return what a problem's decoder converts, and the kind of the zero points that it subtracts.

    raw: Whether registers may hold raw numbers.
    core: Operand type, where it is not what packed words are ordered for.
    Raises ConversionError if the core cannot hold the weight's values.
    """
    device.core_for(gemm.activation)
    operand, element = operand_type(gemm), held_type(gemm.weight)
    operand = core or operand
    # fp8 tensor cores keep too few bits of a sum to take zero points from it afterwards.
    zero = "none" if raw and operand not in FP8_OPERANDS else gemm.zero
    inside = "integer" if zero == "integer" else "none"
    order = packed_order(element, gemm.activation, device)
    return Conversion(element, operand, inside, raw, order), zero


def _folding(plain: Decoder, scaled: bool, device: TileDevice, table: int) -> Iterator[Decoder]:
    """Yield decoders for placement ``"operand"`` whose gain is left to the finished sums."""
    conversion = replace(plain.conversion, raw=True)
    limits = conversion.ttype
    for proven in proven_recipes(conversion):
        folded = fold(conversion.operand, proven.meaning, max(abs(limits.minimum), abs(limits.maximum)))
        if not usable(proven, device.compute_capability, table) or folded is None:
            continue
        if scaled:
            yield Decoder(conversion, "none", proven, folded)
        elif not any(proven.meaning.offsets) and proven.in_range:
            yield Decoder(conversion, "none", proven)


def load_order(bits: int) -> list[tuple[int, int]]:
    """Return how a thread loads its words of a tile: pairs (offset, vector).

    Thread t loads ``vector`` words from ``offset + t * vector``, in words from the start of the
    tile; one after another they are the words that `Decoder.registers` takes.
    """
    order, start = [], 0
    for width, _ in planes(bits):
        vector = min(width, 4)
        order += [(start + chunk * THREADS * vector, vector) for chunk in range(width // vector)]
        start += THREADS * width
    return order
