"""Decoders for AMD GPUs, and the codes of fp8 that their matrix cores read differently.

CDNA3 reads fp8 as e4m3fnuz and e5m2fnuz (AMD Instinct MI300 ISA, "FP8 and BF8"): the same bits mean
half of what they mean in the OCP types, the code of -0 means NaN, and the OCP codes of NaN and
infinity are numbers. So zeros lose their sign, what is not finite becomes NaN, and sums are
multiplied by four.

Which proven recipe costs AMD GPUs least, and which need not round.

bfloat16 arithmetic goes through float32 (`ladder.lower.rocm.machine`). `FloatMachine` executes it as
the GPU does, so that recipes are proven for that too; with `CuttingMachine` those that never round.

Types of any values on AMD GPUs: V_PERM picks a byte of the value for each of four codes.

A table of eight entries is two registers, and the low three bits of four codes, one in each byte, select
from it. Further bits choose between tables. Where the values of one table are those of another with the
other sign, as in most types, that bit goes to the sign.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.decode import Decoder, conversion_of
from ladder.lower.gpu.decode_codebook import ByteLookup, byte_lookups, quad
from ladder.lower.gpu.emission import SharedTable, TirMachine
from ladder.lower.gpu.groups import FLOAT32_BIAS, FLOAT32_MANTISSA, NOTHING_LEFT, Correction, exponent_byte
from ladder.lower.gpu.machine import AND_XOR, REFERENCE_COST, SELECT, Machine, Word, repeat
from ladder.lower.gpu.proof import NumpyMachine, Words, lanes, prove
from ladder.lower.gpu.proven import (
    Proven,
    count,
    decode_all,
    is_decodable,
    proof_key,
    proven_recipes,
    table_bytes,
)
from ladder.lower.gpu.recipes import PLAIN, Conversion, Move, Recipe, fields, gather, moves, shifts
from ladder.lower.rocm.machine import FnuzMachine, Form, RocmMachine, bitwise
from schedules.codes import CONVERSIONS, converted_as
from schedules.group_values import streams_exponents
from schedules.layouts import EXPONENT_FORMS, NIBBLE
from targets import TileDevice
from tile_types.errors import VerificationError

ENTRIES = 8
"""Bytes among which V_PERM selects."""

INDEX_BITS = 3

SIGN = 0x80

ORDERS = ("lanes", "dense", "bytes", "pairs")
"""Orders of packed bits that are read."""


@lru_cache(maxsize=64)
def _pairs(bits: int, order: str) -> tuple[tuple[int, int], ...]:
    """Return pairs of the 16 registers of a thread's tile, those with the fewest moves first."""
    cost = {
        (first, second): shifts(_moves_of_pair(bits, order, first, second))
        for first in range(16)
        for second in range(first + 1, 16)
    }
    left, found = set(range(16)), []
    for first, second in sorted(cost, key=lambda pair: cost[pair]):
        if first in left and second in left:
            found.append((first, second))
            left -= {first, second}
    return tuple(found)


def _moves_of_pair(bits: int, order: str, first: int, second: int) -> list[Move]:
    """Return the moves of two registers' codes to the bottom of bytes, even ones and odd ones."""
    return [
        move
        for at, register in ((0, first), (8, second))
        for move in moves(fields(bits, 16, register, order), 0, bits, at)
    ]


@dataclass(frozen=True)
class ByteTable(ByteLookup):
    """Table look-ups by V_PERM."""

    def values(self, m: Machine, words: Sequence[Word], index: int) -> Word:
        if self.lane == 8:
            codes = gather(m, words, moves(fields(self.bits, 8, index, self.order), 0, self.bits, 0), 8)
            return self._bytes(m, codes, 0, 0)
        if self.order == "pairs":
            return self._of_pairs(m, words, index)
        pair = next(pair for pair in _pairs(self.bits, self.order) if index in pair)
        codes = gather(m, words, _moves_of_pair(self.bits, self.order, *pair), 16)
        low, high = (self._bytes(m, codes, 0, part) for part in (0, 1))
        return m.permute(low, high, m.constant(0x6240 + 0x1111 * pair.index(index)))

    def _of_pairs(self, m: Machine, words: Sequence[Word], index: int) -> Word:
        """Decode where the nibbles of a byte hold both codes of a register."""
        codes = self.pairs(m, words, index)
        half = index % 4 // 2

        def lane(element: int) -> Word:
            low, high = (self._bytes(m, codes, NIBBLE * element, part) for part in (0, 1))
            return m.permute(low, high, m.constant(0x7362 if half else 0x5140))

        return m.permute(lane(0), lane(1), m.constant(0x7632 if index % 2 else 0x5410))

    def _bytes(self, m: Machine, codes: Word, at: int, part: int) -> Word:
        """Return byte ``part`` of the values of four codes, which begin at bit ``at`` of each byte."""
        selector = m.shift(codes, -at)
        if self.bits > INDEX_BITS or self.order == "pairs":  # else nothing lies beside the codes
            selector = m.mask(selector, (min(len(self.table), ENTRIES) - 1) * 0x01010101)
        return self._choose(m, codes, at, self.entries(part, ENTRIES), selector)

    def _choose(self, m: Machine, codes: Word, at: int, entries: list[int], selector: Word) -> Word:
        if len(set(entries)) == 1:
            return m.constant(entries[0] * 0x01010101)
        if len(entries) == ENTRIES:
            return m.select_bytes(m.constant(quad(entries, 0)), m.constant(quad(entries, 4)), selector)
        half = len(entries) // 2
        lower, upper = entries[:half], entries[half:]
        below = self._choose(m, codes, at, lower, selector)
        if lower == upper:
            return below
        top = m.shift(codes, 7 - at - (half.bit_length() - 1))
        if all(x ^ y == SIGN for x, y in zip(lower, upper, strict=True)):
            return m.lop3(top, m.constant(SIGN * 0x01010101), below, AND_XOR)
        return m.lop3(self._signs(m, top), self._choose(m, codes, at, upper, selector), below, SELECT)

    def _signs(self, m: Machine, word: Word) -> Word:
        """Return 0xFF for each byte whose top bit is set: V_PERM repeats signs of odd bytes."""
        return m.permute(word, m.shift(word, 8), m.constant(0xBF9D))


def propose_byte_table(conversion: Conversion) -> Iterator[Recipe]:
    """Propose look-ups for any type of up to eight bits."""
    if conversion.order in ORDERS and conversion.bits <= 8:
        yield from byte_lookups(conversion, ByteTable)


ONE = 0x3F800000
"""Bits of the float32 1."""


@dataclass(frozen=True)
class Converted:
    """Conversion of the pair of codes that a register holds.

    bits: Of a code.
    operand: What the lanes become.
    codes: Type as whose codes the instruction reads them.
    """

    bits: int
    operand: str
    codes: str

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        return self.scaled(m, words, index, m.constant(ONE))

    def scaled(self, m: Machine, words: Sequence[Word], index: int, scale: Word) -> Word:
        """Return a register of values times a power of two, whose float32 bits ``scale`` holds."""
        word, place = divmod(index, 32 // (2 * self.bits))
        return m.convert(self.operand, self.codes, words[word], scale, place)


def propose_converted(conversion: Conversion, codes: str | None) -> Iterator[Converted]:
    """Propose the device's instructions for a type; ``codes``: `schedules.codes.converted_as`."""
    if codes is None or conversion.zero != "none" or conversion.order != CONVERSIONS[codes].order:
        return
    yield Converted(conversion.bits, conversion.operand, codes)


class FloatMachine(NumpyMachine):
    """Executes bfloat16 instructions in float32, and rounds."""

    def _rounded(self, single: Any) -> Words:
        bits = np.asarray(single, np.float32).view(np.uint32)
        odd = bits >> np.uint32(16) & np.uint32(1)
        return (bits + odd + np.uint32(0x7FFF)) >> np.uint32(16)

    def _wide(self, *words: Words) -> list[Any]:
        """Return the float32 values of both lanes of every operand."""
        whole = np.broadcast_arrays(*words)
        return list(zip(*([x.astype(np.float32) for x in lanes("bfloat16", w)] for w in whole), strict=True))

    def _do_float_sub(self, a: Words, b: Words, core: str) -> Words:
        if core != "bfloat16":
            return super()._do_float_sub(a, b, core)
        return self._join([self._rounded(x - y) for x, y in self._wide(a, b)])

    def _do_float_mul(self, a: Words, b: Words, core: str) -> Words:
        if core != "bfloat16":
            return super()._do_float_mul(a, b, core)
        return self._join([self._rounded(x * y) for x, y in self._wide(a, b)])

    def _do_float_fma(self, a: Words, b: Words, c: Words, core: str) -> Words:
        if core != "bfloat16":
            return super()._do_float_fma(a, b, c, core)
        # Products of bfloat16 are exact in float64, and so are sums of values this near each other.
        wide = ([x.astype(np.float64) for x in operands] for operands in self._wide(a, b, c))
        return self._join([self._rounded((x * y + z).astype(np.float32)) for x, y, z in wide])


class CuttingMachine(FloatMachine):
    """Executes bfloat16 instructions in float32, and cuts the results off."""

    def _rounded(self, single: Any) -> Words:
        return np.asarray(single, np.float32).view(np.uint32) >> np.uint32(16)


@dataclass(frozen=True)
class Exact:
    """A recipe whose float32 results need no rounding."""

    inner: Recipe

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        """Return a register, as the recipe does."""
        m.exact = True
        try:
            return self.inner.register(m, words, index, zero)
        finally:
            m.exact = False


OPERATIONS = {
    "shift": 1,
    "rotate": 1,
    "multiply": 4,
    "subtract": 1,
    "select_bytes": 1,
    "narrow": 5,
    "halves": 3,
    "convert": 1,
    "look_up": 8,
    "table_lane": 1,
    "reference": REFERENCE_COST,
}
"""Vector instructions of an operation; a 32-bit product takes four times as long as others."""

COMPUTED_PERMUTE = 4
"""The same of a permutation whose selector is computed: nibbles become bytes first."""

BFLOAT_EXACT, BFLOAT_ROUNDED = 5, 10
"""The same of bfloat16 arithmetic: two lanes are widened, calculated, and joined, perhaps rounded."""

ONE_INSTRUCTION = (("|", ("&", "x", "y"), "z"), ("|", "z", ("&", "x", "y")), bitwise(SELECT))
"""Forms of several operations that V_AND_OR and V_BFI perform at once."""


class VectorCounter(Machine):
    """Counts vector instructions; contents are constants, or None where computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def perform(self, operation: str, words: list[Any], immediates: tuple[Any, ...]) -> Any:
        if operation == "constant":
            return immediates[0]
        if operation == "lop3":
            form = bitwise(immediates[0])
            self.count += 1 if form in ONE_INSTRUCTION else max(1, _operators(form))
        elif operation == "permute":
            self.count += COMPUTED_PERMUTE if words[2] is None else 1
        elif operation.startswith("float_"):
            bfloat = BFLOAT_EXACT if self.exact else BFLOAT_ROUNDED
            self.count += bfloat if immediates[0] == "bfloat16" else 1
        else:
            self.count += OPERATIONS[operation]
        return None


def _operators(form: Form) -> int:
    """Return the operators of a form of `bitwise`; a complement comes with its neighbour."""
    if isinstance(form, str):
        return 0
    return int(form[0] != "~") + sum(_operators(part) for part in form[1:])


def vector_instructions(recipe: Recipe, conversion: Conversion) -> int:
    """Return the vector instructions of decoding a lane's share of a tile (32 codes)."""
    m = VectorCounter()
    decode_all(recipe, conversion, m)
    return m.count


def best_recipe(conversion: Conversion, device: TileDevice) -> Proven:
    """Return the recipe that takes the fewest vector instructions, proven for float32 arithmetic too.

    Raises VerificationError if none passes.
    """
    shared = proven_recipes(conversion) if is_decodable(conversion) else ()
    choices = [
        as_wave
        for proven in (*shared, *_own_recipes(conversion, device))
        if not any(proven.capability) and not table_bytes(proven.recipe)
        if proven.in_range
        for as_wave in proven_here(proven, conversion)
    ]
    if not choices:
        raise VerificationError(f"no decode of {conversion.ttype.name} is right in float32 arithmetic")
    return min(choices, key=lambda proven: vector_instructions(proven.recipe, conversion))


_own: dict[tuple[Any, ...], list[Proven]] = {}


def _own_recipes(conversion: Conversion, device: TileDevice) -> list[Proven]:
    """Return look-ups by V_PERM and conversions by the device's instructions, proven."""
    codes = converted_as(conversion.ttype, conversion.operand, device)
    key = (*proof_key(conversion), codes)
    if key not in _own:
        proposals = [("byte table", recipe) for recipe in propose_byte_table(conversion)]
        proposals += [("converted", recipe) for recipe in propose_converted(conversion, codes)]
        for _, recipe in proposals:
            prove(recipe, conversion)
        _own[key] = [
            Proven(strategy, recipe, PLAIN, count(recipe, conversion)) for strategy, recipe in proposals
        ]
    return _own[key]


def proven_here(proven: Proven, conversion: Conversion) -> list[Proven]:
    """Return a recipe as AMD GPUs can run it: cutting off, rounding, or not at all."""
    if conversion.operand != "bfloat16" or isinstance(proven.recipe, Converted):
        return [proven]
    for machine, recipe in ((CuttingMachine, Exact(proven.recipe)), (FloatMachine, proven.recipe)):
        try:
            prove(recipe, conversion, proven.meaning, machine)
        except VerificationError:
            continue
        return [replace(proven, recipe=recipe)]
    return []


FNUZ = "fp8fnuz"
"""Feature of devices whose matrix cores read fp8 as fnuz types."""

NOT_FINITE = {"fp8_e4m3": 0x7F, "fp8_e5m2": 0x7C}
"""Magnitudes of OCP types from which on codes are NaN or infinity."""

FNUZ_LEFT = Correction(gains=(4.0, 4.0))
"""Correction that operands of half their value leave to the sums."""


@dataclass(frozen=True)
class WaveDecoder(Decoder):
    """A decoder whose instructions are those of AMD GPUs.

    fnuz: Whether registers hold fnuz codes.
    powers: Whether scales come as exponents.
    """

    fnuz: bool = False
    powers: bool = False

    @property
    def scales_inside(self) -> bool:
        """Whether scales go into conversions, as float32."""
        return self.powers and isinstance(self.choice.recipe, Converted)

    def prepare(self, m: Machine, scale: Word, half: int, at: int | None = None) -> list[Word]:
        if at is None or not self.scales_inside:
            return super().prepare(m, scale, half, at)
        form = EXPONENT_FORMS[self.operand]
        lower = (form.bias + form.raised - FLOAT32_BIAS) << FLOAT32_MANTISSA
        placed = m.shift(exponent_byte(m, scale, at), FLOAT32_MANTISSA)
        return [m.subtract(placed, m.constant(lower))]

    def machine(self, table: SharedTable | None) -> TirMachine:
        return (FnuzMachine if self.fnuz else RocmMachine)(table)

    def value(
        self,
        m: Machine,
        words: Sequence[Word],
        index: int,
        factors: Sequence[Word] | None,
        zero: tuple[Word, ...] | None,
    ) -> Word:
        recipe = self.choice.recipe
        if factors is not None and self.powers and isinstance(recipe, Converted):
            return recipe.scaled(m, words, index, *factors)
        value = super().value(m, words, index, factors, zero)
        if not self.fnuz:
            return value
        held = self.conversion.ttype.values()
        if not np.isfinite(held).all():
            return m.input(to_fnuz(value.content, self.operand))
        if np.any((held == 0) & np.signbit(held)):
            return m.input(without_negative_zero(value.content))
        return value


def wave_decoder(gemm: Gemm, device: TileDevice, *, raw: bool = False) -> WaveDecoder:
    """Return the decoder of a problem: registers hold values less their zero points, or ``raw`` numbers.

    Raises ConversionError if the core cannot hold the weight's values.
    Raises VerificationError if no recipe passes its proof.
    """
    conversion, zero = conversion_of(gemm, device, raw)
    choice, fnuz = best_recipe(conversion, device), reads_fnuz(device, gemm.activation)
    return WaveDecoder(conversion, zero, choice, fnuz=fnuz, powers=streams_exponents(gemm))


def reads_fnuz(device: TileDevice, activation: str) -> bool:
    """Whether the matrix core reads activations as fnuz codes."""
    return activation in NOT_FINITE and FNUZ in device.features


def left_by_fnuz(device: TileDevice, activation: str) -> Correction:
    """Return what operands leave to the sums."""
    return FNUZ_LEFT if reads_fnuz(device, activation) else NOTHING_LEFT


def _bytes4(byte: int) -> Expr:
    return T.uint32(repeat(byte, 8))


def without_negative_zero(word: Expr) -> Expr:
    """Turn codes of -0 among four codes into 0: finite OCP codes become fnuz codes of half their value."""
    some = (word & _bytes4(0x7F)) + _bytes4(0x7F)  # top bits: set unless the magnitude is 0
    return b.bind(word & (some | _bytes4(0x7F)))


def to_fnuz(word: Expr, core: str) -> Expr:
    """Turn four OCP codes into fnuz codes of half their value.

    -0 becomes 0; NaN and infinity become NaN. No byte carries into another.
    """
    magnitude = word & _bytes4(0x7F)
    special = b.bind((magnitude + _bytes4(0x80 - NOT_FINITE[core])) & _bytes4(0x80))
    below = special - (special >> T.uint32(7))
    return (without_negative_zero(word) & (below ^ T.uint32(0xFFFFFFFF))) | special
