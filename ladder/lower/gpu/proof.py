"""Proof by exhaustion: execute a decode recipe for every code in every place of a thread's words.

`NumpyMachine` gives each instruction its exact meaning: float results are computed in float64
and rounded once (round to odd before a second rounding, Boldo & Melquiond 2008).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ladder.lower.gpu.machine import Machine, Word
from ladder.lower.gpu.recipes import FLOAT_CORES, PLAIN, Conversion, Meaning, Recipe
from schedules.layouts import pieces
from tile_types import NumpyOps, TType, core_values, get_type
from tile_types.errors import VerificationError
from tile_types.forms import is_arithmetic

Words = npt.NDArray[np.uint32]
Reals = npt.NDArray[np.float64]

CORE_DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}

ROTATIONS = (1, 7)
"""Neighbouring places hold codes this far apart, so that leaks between places show."""


BATCH = 1 << 16
"""Threads that are executed at once, about."""


OF_TWO: tuple[Callable[[Words, Words], Any], ...] = (
    lambda b, c: np.uint32(0),
    lambda b, c: ~(b | c),
    lambda b, c: ~b & c,
    lambda b, c: ~b,
    lambda b, c: b & ~c,
    lambda b, c: ~c,
    lambda b, c: b ^ c,
    lambda b, c: ~(b & c),
    lambda b, c: b & c,
    lambda b, c: ~(b ^ c),
    lambda b, c: c,
    lambda b, c: ~b | c,
    lambda b, c: b,
    lambda b, c: b | ~c,
    lambda b, c: b | c,
    lambda b, c: ~np.uint32(0),
)
"""Functions of two bits by their four results: bit ``2 b + c`` of the number is that of ``b`` and ``c``."""


def _odd(total: Reals, error: Reals) -> Reals:
    """Return the neighbour of ``total + error`` whose last bit is odd where ``total`` is inexact."""
    towards = np.where(error > 0, np.inf, -np.inf)
    even = (total.view(np.uint64) & 1) == 0
    inexact = np.isfinite(error) & (error != 0)
    return np.where(inexact & even, np.nextafter(total, towards), total)


def round_to(core: str, value: Reals, error: Reals | None = None) -> Words:
    """Round ``value + error`` once to a 16-bit float and return its bits."""
    exact = value if error is None else _odd(value, error)
    with np.errstate(all="ignore"):
        if core == "float16":
            return exact.astype(np.float16).view(np.uint16).astype(np.uint32)
        single = exact.astype(np.float32)
        rest = exact - single.astype(np.float64)
        towards = np.where(rest > 0, np.float32(np.inf), np.float32(-np.inf))
        inexact = np.isfinite(rest) & (rest != 0) & ((single.view(np.uint32) & 1) == 0)
        single = np.where(inexact, np.nextafter(single, towards), single)
        return single.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)


def _two_sum(a: Reals, b: Reals) -> tuple[Reals, Reals]:
    """Return the rounded sum and its exact error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def lanes(core: str, word: Words) -> list[Reals]:
    """Return the values of each lane of a word, lowest first."""
    dtype = np.dtype(CORE_DTYPES[core])
    shape = np.ascontiguousarray(word, dtype="<u4").view(dtype).reshape(len(word), -1)
    return list(shape.astype(np.float64).T)


class NumpyMachine(Machine):
    """Executes instructions on uint32 arrays."""

    def perform(self, operation: str, words: list[Any], immediates: tuple[Any, ...]) -> Any:
        """Execute one instruction for the whole batch."""
        with np.errstate(all="ignore"):
            return getattr(self, f"_do_{operation}")(*words, *immediates)

    def _do_constant(self, bits: int) -> Words:
        return np.array([bits], np.uint32)

    def _do_lop3(self, a: Words, b: Words, c: Words, table: int) -> Words:
        high, low = OF_TWO[table >> 4](b, c), OF_TWO[table & 15](b, c)
        result: Words = low ^ (a & (high ^ low))
        return result

    def _do_shift(self, a: Words, left: int) -> Words:
        moved = np.left_shift(a, np.uint32(left)) if left > 0 else np.right_shift(a, np.uint32(-left))
        return moved.astype(np.uint32)

    def _do_rotate(self, a: Words, right: int) -> Words:
        return a >> np.uint32(right) | a << np.uint32(32 - right)

    def _do_multiply(self, a: Words, factor: int, addend: int) -> Words:
        return a * np.uint32(factor) + np.uint32(addend)

    def _do_multiply_add(self, a: Words, addend: Words, factor: int) -> Words:
        return a * np.uint32(factor) + addend

    def _do_permute(self, a: Words, b: Words, selector: Words) -> Words:
        pool = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        result = np.zeros(np.broadcast_shapes(pool.shape, selector.shape), np.uint32)
        for index in range(4):
            nibble = (selector >> np.uint32(4 * index)) & 0xF
            byte = ((pool >> ((nibble & 7).astype(np.uint64) * 8)) & 0xFF).astype(np.uint32)
            sign = np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0))
            result |= np.where(nibble & 8, sign, byte) << np.uint32(8 * index)
        return result

    def _do_select_bytes(self, a: Words, b: Words, selector: Words) -> Words:
        pool = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        result = np.zeros(np.broadcast_shapes(pool.shape, selector.shape), np.uint32)
        for at in range(0, 32, 8):
            byte = selector >> np.uint32(at) & np.uint32(0xFF)
            if np.any(byte > 7):
                raise VerificationError("a selector of bytes is above 7")
            picked = pool >> (byte.astype(np.uint64) * np.uint64(8)) & np.uint64(0xFF)
            result |= picked.astype(np.uint32) << np.uint32(at)
        return result

    def _do_subtract(self, a: Words, b: Words) -> Words:
        return a - b

    def _pairs(self, core: str, *words: Words) -> list[tuple[Reals, ...]]:
        whole = np.broadcast_arrays(*words)
        return list(zip(*(lanes(core, word) for word in whole), strict=True))

    def _join(self, halves: list[Words]) -> Words:
        return halves[0] | halves[1] << np.uint32(16)

    def _do_float_sub(self, a: Words, b: Words, core: str) -> Words:
        return self._join([round_to(core, *_two_sum(x, -y)) for x, y in self._pairs(core, a, b)])

    def _do_float_mul(self, a: Words, b: Words, core: str) -> Words:
        return self._join([round_to(core, x * y) for x, y in self._pairs(core, a, b)])

    def _do_float_fma(self, a: Words, b: Words, c: Words, core: str) -> Words:
        sums = [_two_sum(x * y, z) for x, y, z in self._pairs(core, a, b, c)]
        return self._join([round_to(core, *total) for total in sums])

    def _do_narrow(self, a: Words, core: str) -> Words:
        dtype = CORE_DTYPES[core]
        largest = float(ml_dtypes.finfo(dtype).max)
        halves = [np.clip(x, -largest, largest).astype(np.float32) for x in lanes("float16", a)]
        low, high = (half.astype(dtype).view(np.uint8).astype(np.uint32) for half in halves)
        return low | high << np.uint32(8)

    def _do_convert(self, word: Words, scale: Words, core: str, codes: str, place: int) -> Words:
        ttype = get_type(codes)
        bits, mask = ttype.elem_bits, np.uint32((1 << ttype.elem_bits) - 1)
        exponent = (scale >> np.uint32(23) & np.uint32(0xFF)).astype(np.float64)
        power = np.where(exponent == 255, np.nan, np.exp2(exponent - 127))  # as E8M0 has it
        held = [word >> np.uint32(bits * (2 * place + element)) & mask for element in (0, 1)]
        return self._join([round_to(core, ttype.decode_codes(code) * power) for code in held])

    def _do_halves(self, low: Words, high: Words) -> Words:
        singles = [np.ascontiguousarray(word).view(np.float32).astype(np.float64) for word in (low, high)]
        return self._join([round_to("float16", single) for single in singles])

    def _do_dot(self, a: Words, addend: Words, weights: int) -> Words:
        pairs = [(a >> np.uint32(8 * i) & 0xFF, np.uint32(weights >> 8 * i & 0xFF)) for i in range(4)]
        return sum((byte * weight for byte, weight in pairs), addend).astype(np.uint32)

    def _do_table_lane(self, absolute: bool) -> Words:
        return np.array([4 * 5 + 1152 * absolute], np.uint32)  # as lane 5 sees a table somewhere

    def _do_look_up(self, at: Words, entries: tuple[int, ...], row: int, absolute: bool) -> Words:
        entry, column = np.divmod(at - self._do_table_lane(absolute), np.uint32(row))
        if np.any(column):
            raise VerificationError("a table is read outside the lane's own column")
        return np.array(entries, np.uint32)[entry]

    def _do_reference(self, code: Words, ttype: TType, core: str) -> Words:
        value = np.asarray(ttype.evaluate(code, NumpyOps()))
        if core == "int8":
            return value.astype(np.int32).astype(np.uint32) & np.uint32(0xFF)
        return round_to(core, value.astype(np.float64))


def place(codes: npt.NDArray[np.uint32], bits: int, lane: int, order: str = "lanes") -> list[Words]:
    """Return a thread's words for ``codes[batch, register, element]``, as the layout says."""
    words = [np.zeros(len(codes), np.uint32) for _ in range(bits)]
    for register, parts in enumerate(pieces(bits, lane, order)):
        held = np.zeros(len(codes), np.uint32)
        for element in range(codes.shape[2]):
            held |= codes[:, register, element] << np.uint32(lane * element)
        for word, mask, left in parts:
            kept = held & np.uint32(mask)
            words[word] ^= kept << np.uint32(left) if left >= 0 else kept >> np.uint32(-left)
    return words


def prove(
    recipe: Recipe,
    conversion: Conversion,
    meaning: Meaning = PLAIN,
    machine: type[NumpyMachine] = NumpyMachine,
) -> None:
    """Check a recipe for every valid code (and integer zero point) in every place.

    Of a type without an arithmetic form that includes the codes of NaN and infinity: tables hold them.

    ``meaning`` must turn what the registers hold into the values without an error in float32.
    ``machine`` executes it.

    Raises VerificationError: Names the first code that decodes wrongly and what came out.
    """
    ttype, lane = conversion.ttype, conversion.lane
    codes = _proven_codes(conversion)
    zeros = _zero_range(ttype) if conversion.zero == "integer" else np.zeros(1, np.int64)
    batch = np.repeat(np.arange(len(codes)), len(zeros))
    zero = np.tile(zeros, len(codes))
    values = ttype.decode_codes(codes)
    if not ttype.exact:
        rounded = core_values(ttype, conversion.operand)
        values = rounded[codes]
    # Where pairs of codes are decoded together, every pair must be seen.
    rotations = np.arange(len(codes)) if getattr(recipe, "together", 1) > 1 else np.array(ROTATIONS)
    for some in np.array_split(rotations, -(-len(rotations) * len(batch) // BATCH)):
        start, zeros_of = np.tile(batch, len(some)), np.tile(zero, len(some))
        index = start[:, None] + np.arange(32)[None, :] * np.repeat(some, len(batch))[:, None]
        chosen = (index % len(codes)).reshape(len(start), lane, 32 // lane)
        expected = values[chosen] - zeros_of[:, None, None]
        _check(machine(), recipe, conversion, meaning, codes[chosen], expected, zeros_of)


def _proven_codes(conversion: Conversion) -> npt.NDArray[np.uint32]:
    ttype = conversion.ttype
    codes = ttype.valid_codes().astype(np.uint32)
    if conversion.operand not in FLOAT_CORES or is_arithmetic(ttype):
        return codes
    special = np.flatnonzero(~np.isfinite(ttype.values())).astype(np.uint32)
    return np.concatenate([codes, special])


def _zero_range(ttype: TType) -> npt.NDArray[np.int64]:
    return np.arange(int(ttype.minimum), int(ttype.maximum) + 1)


def _check(
    m: NumpyMachine,
    recipe: Recipe,
    conversion: Conversion,
    meaning: Meaning,
    codes: npt.NDArray[np.uint32],
    expected: Reals,
    zero: npt.NDArray[np.int64],
) -> None:
    words = [m.input(word) for word in place(codes, conversion.bits, conversion.lane, conversion.order)]
    operand = _zero_operand(m, conversion, zero) if conversion.zero == "integer" else None
    for register in range(codes.shape[1]):
        out = np.broadcast_to(recipe.register(m, words, register, operand).content, zero.shape)
        for element, raw in enumerate(lanes(conversion.operand, out)):
            got = _value(raw, meaning, register % 2)
            right = expected[:, register, element]
            wrong = np.flatnonzero((got != right) & ~(np.isnan(got) & np.isnan(right)))
            if len(wrong):
                at = wrong[0]
                raise VerificationError(
                    f"{type(recipe).__name__} decodes code {codes[at, register, element]} of"
                    f" {conversion.ttype.name} to {got[at]} instead of {expected[at, register, element]}"
                    f" ({conversion.operand}, zero point {zero[at]}, register {register}, lane {element})"
                )


def _value(raw: Reals, meaning: Meaning, half: int) -> Reals:
    """Return ``gain * raw + offset`` in float32."""
    gain, offset = np.float32(meaning.gains[half]), np.float32(meaning.offsets[half])
    with np.errstate(all="ignore"):
        return (raw.astype(np.float32) * gain + offset).astype(np.float64)


def _zero_operand(m: NumpyMachine, conversion: Conversion, zero: npt.NDArray[np.int64]) -> Word:
    """Return the zero point as kernels hold it: in both halves, or in all four bytes."""
    if conversion.lane == 8:
        return m.input((zero & 0xFF).astype(np.uint32) * np.uint32(0x01010101))
    bits = zero.astype(np.float64).astype(CORE_DTYPES[conversion.operand]).view(np.uint16)
    return m.input(bits.astype(np.uint32) * np.uint32(0x00010001))
