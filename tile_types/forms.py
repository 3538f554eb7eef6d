"""Arithmetic forms of small types: linear functions of codes, and floats whose bits are bits of codes.

A type that has neither form is decoded by a table, or by its own expression where that chooses little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import frexp
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tile_types.ops import NumpyOps
from tile_types.representable import core_values
from tile_types.ttype import TType

HALVES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
"""The 16-bit floats whose bits codes can be."""

MOST_BITS = 8
"""Width up to which forms of floats are looked for."""

GAIN_EXPONENTS = {"float16": range(-24, 16), "bfloat16": range(-126, 128)}
"""Powers of two that a type can multiply by."""

MOST_WIRINGS = 12
"""Ways of different cost that are tried at most."""


@dataclass(frozen=True)
class Affine:
    """``value(code) = factor * (code ^ flip) + offset`` for every valid code."""

    flip: int
    factor: float
    offset: float


def affine_forms(ttype: TType) -> Iterator[Affine]:
    """Yield the affine forms of a type: plain, or with the top bit flipped (two's complement).

    Types of one value have none: their factor would be 0.
    """
    codes, values = ttype.valid_codes().astype(np.int64), ttype.probe_values()
    for flip in (0, 1 << (ttype.elem_bits - 1)):
        flipped = codes ^ flip
        run = float(flipped[-1] - flipped[0])
        factor = float(values[-1] - values[0]) / run if run else 1.0
        offset = float(values[0]) - factor * float(flipped[0])
        if factor and np.array_equal(factor * flipped + offset, values):
            yield Affine(flip, factor, offset)


@lru_cache(maxsize=1024)
def largest_integer(ttype: TType) -> int | None:
    """Return the largest magnitude of a type whose values all are integers of 16 bits, None of another."""
    if not ttype.exact or ttype.elem_bits > MOST_BITS:
        return None
    values = ttype.element_type.values()
    if not np.isfinite(values).all() or (values != np.rint(values)).any() or np.abs(values).max() >= 1 << 15:
        return None
    return int(np.abs(values).max())


def is_extended(ttype: TType) -> bool:
    """Whether codes are integers themselves: unsigned, or in two's complement."""
    codes = np.arange(1 << ttype.elem_bits)
    signed = (codes ^ len(codes) // 2) - len(codes) // 2
    return any(np.array_equal(ttype.element_type.values(), each) for each in (codes, signed))


@dataclass(frozen=True)
class Bytes:
    """``value(code) = (byte(code) + low) / 2**exponent`` of a type of few values, evenly spaced but for gaps.

    table: The byte of each code.
    flip: What makes bytes of codes by exclusive or; None where only the table does.
    """

    table: tuple[int, ...]
    low: int
    exponent: int
    flip: int | None

    @property
    def largest(self) -> int:
        """The largest byte."""
        return max(self.table)

    @property
    def unit(self) -> float:
        """What one is worth."""
        return 2.0**-self.exponent


BYTE_EXPONENTS = range(-8, 9)
"""Powers of two that may make integers of values."""


LOOKED_UP_BITS = 6
"""Bits of the widest codes that a table of 64 bytes, a vector register, holds values of."""


@lru_cache(maxsize=1024)
def byte_form(ttype: TType) -> Bytes | None:
    """Return a type's values as bytes, None where they are not integers of eight bits times a power of two.

    Codes of more than `LOOKED_UP_BITS` are counted, not looked up.
    """
    if not ttype.exact or ttype.elem_bits > 8:
        return None
    values = ttype.element_type.values().astype(np.float64)
    if not np.isfinite(values).all():
        return None
    for exponent in BYTE_EXPONENTS:
        scaled = np.ldexp(values, exponent)
        if np.array_equal(scaled, np.rint(scaled)):
            break
    else:
        return None
    low = int(min(scaled.min(), 0))
    found = scaled - low
    if found.max() > 255:
        return None
    table = found.astype(np.int64)
    flips = table ^ np.arange(len(table))
    flip = int(flips[0]) if (flips == flips[0]).all() else None
    if flip is None and ttype.elem_bits > LOOKED_UP_BITS:
        return None
    return Bytes(tuple(map(int, table)), low, exponent, flip)


@dataclass(frozen=True)
class BytePairs:
    """``value(code) = (256 * (table(code) + low) + lower(code) + low) * unit`` of a type of few values.

    table, lower: The upper and the lower byte of each code.
    """

    table: tuple[int, ...]
    lower: tuple[int, ...]
    unit: float

    low = -128
    flip = None
    largest = 2 * 255


LARGEST_PAIR = 127 << 8
"""The largest integer of a pair of bytes whose lower one has a sign."""

UNITS = 4096
"""Units that are tried for values that are rounded real numbers."""

PAIR_ERROR = 2.0**-13
"""The most by which such a value may be off as a pair of bytes, as a fraction of it."""


@lru_cache(maxsize=1024)
def byte_pairs(ttype: TType) -> BytePairs | None:
    """Return a type's values as pairs of bytes, None where they are not that: exact values lose nothing."""
    if ttype.elem_bits > LOOKED_UP_BITS:
        return None
    values = ttype.element_type.values().astype(np.float64)
    if not np.isfinite(values).all() or not values.any():
        return None
    units = np.abs(values).max() / _largest_integers(values, ttype.exact)
    scaled = values / units[:, None]
    whole = np.rint(scaled)
    error = np.abs(scaled - whole)
    worst = np.max(np.divide(error, np.abs(scaled), out=np.zeros_like(error), where=values != 0), axis=1)
    best = int(np.argmin(worst)) if len(units) else 0
    if not len(units) or worst[best] > (0 if ttype.exact else PAIR_ERROR):
        return None
    integers = whole[best].astype(np.int64)
    upper = integers + 128 >> 8
    table, lower = (tuple(int(x) + 128 for x in part) for part in (upper, integers - (upper << 8)))
    return BytePairs(table, lower, float(units[best]))


def _largest_integers(values: npt.NDArray[np.float64], exact: bool) -> npt.NDArray[np.float64]:
    """Return integers that the largest magnitude may become.

    exact: Only one: the least that makes integers of all values.
    """
    if not exact:
        return np.linspace(LARGEST_PAIR / 2, LARGEST_PAIR, UNITS)
    for exponent in BYTE_EXPONENTS:
        scaled = np.ldexp(values, exponent)
        if np.array_equal(scaled, np.rint(scaled)) and np.abs(scaled).max() <= LARGEST_PAIR:
            return np.array([np.abs(scaled).max()])
    return np.empty(0)


@dataclass(frozen=True)
class Wiring:
    """Bits of a 16-bit float that are bits of a code or constants; ``gain`` times the float is the value.

    wires: ``(bit of the float, bit of the code)``, ascending.
    base: Bits of the float to invert, after the wires are laid: constants, and inverted bits of the code.
    gain: What remains to multiply by.
    """

    wires: tuple[tuple[int, int], ...]
    base: int
    gain: float


def wirings(ttype: TType, core: str) -> tuple[Wiring, ...]:
    """Return the ways in which the bits of a type's codes are those of floats of type ``core``.

    Subnormal numbers, biases, inverted exponents, numbers without a sign and types without zero differ
    in the wiring, not in the method: each power of two is tried as the gain, and each bit of the
    floats must then be a constant, or one bit of the code or its inverse.

    ttype: An element type; of more than 8 bits none is found.
    core: float16 or bfloat16.
    """
    if ttype.elem_bits > MOST_BITS or core not in HALVES:
        return ()
    codes, rounded = ttype.valid_codes(), core_values(ttype, core)[ttype.valid_codes()]
    values = ttype.probe_values() if ttype.exact else rounded
    return _wirings(ttype.elem_bits, core, codes.tobytes(), values.tobytes())


@lru_cache(maxsize=512)
def _wirings(bits: int, core: str, codes_held: bytes, values_held: bytes) -> tuple[Wiring, ...]:
    codes, values = np.frombuffer(codes_held, np.uint32), np.frombuffer(values_held, np.float64)
    found: dict[tuple[tuple[int, int], ...], Wiring] = {}
    sources = _sources(codes, bits)
    for gain in _gains(values, core):
        with np.errstate(all="ignore"):
            held = (values / gain).astype(HALVES[core])
            fits = np.array_equal(held.astype(np.float64) * gain, values)
        wiring = _wire(held.view(np.uint16), values != 0, sources, gain) if fits else None
        if wiring is not None and wiring.wires:
            found.setdefault(wiring.wires, wiring)
        if len(found) == MOST_WIRINGS:
            break
    return tuple(found.values())


def _gains(values: npt.NDArray[np.float64], core: str) -> list[float]:
    """Return the factors to try, nearest 1 first: powers of two, and times the least value's fraction."""
    least = float(np.abs(values[values != 0]).min(initial=1.0))
    units = dict.fromkeys((1.0, 2 * frexp(least)[0]))
    exponents = sorted(GAIN_EXPONENTS[core], key=abs)
    gains = [unit * 2.0**exponent for unit in units for exponent in exponents]
    return [gain for gain in gains if float(np.asarray(gain).astype(HALVES[core])) == gain]


def _sources(codes: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.bool_]:
    """Return what a bit of the float may be, by code: 0, 1, then each bit of the code and its inverse."""
    rows = [np.zeros(len(codes), bool), np.ones(len(codes), bool)]
    for bit in range(bits):
        row = (codes >> np.uint32(bit) & 1).astype(bool)
        rows += [row, ~row]
    return np.stack(rows)


def _wire(
    held: npt.NDArray[np.uint16], nonzero: npt.NDArray[np.bool_], sources: npt.NDArray[np.bool_], gain: float
) -> Wiring | None:
    """Return the wiring that yields these floats (zeros of either sign), of few distances, or None."""
    lanes = (held[None] >> np.arange(16, dtype=np.uint16)[:, None] & 1).astype(bool)
    cared = np.ones_like(lanes)
    cared[15] = nonzero
    fits = ~((lanes[:, None] ^ sources[None]) & cared[:, None]).any(axis=2)
    if not fits.any(axis=1).all():
        return None
    base = sum(1 << bit for bit in range(16) if not fits[bit, 0] and fits[bit, 1])
    left = {bit for bit in range(16) if not fits[bit, :2].any()}
    wires: list[tuple[int, int]] = []
    width = (sources.shape[0] - 2) // 2
    while left:  # the distance that serves most of the bits that are left
        plans = [
            [(bit, bit - far) for bit in left if 0 <= bit - far < width and _either(fits[bit], bit - far)]
            for far in range(1 - width, 16)
        ]
        best = max(plans, key=len)
        wires += best
        left -= {bit for bit, _ in best}
    base |= sum(1 << bit for bit, source in wires if not fits[bit, 2 * source + 2])
    return Wiring(tuple(sorted(wires)), base, gain)


def _either(fits: npt.NDArray[np.bool_], source: int) -> bool:
    """Tell whether a bit of the float may be bit ``source`` of the code or its inverse."""
    return bool(fits[2 * source + 2] or fits[2 * source + 3])


def is_arithmetic(ttype: TType) -> bool:
    """Tell whether a type has one of the forms, so that no table is needed to decode it to 16-bit floats."""
    if ttype.elem_bits > MOST_BITS or any(wirings(ttype, core) for core in HALVES):
        return True
    return ttype.exact and any(True for _ in affine_forms(ttype))


EXP2_CHOICES = 8
"""Selections that cost about as much as a power of two, which machines have no instruction for."""


class _Counter(NumpyOps):
    """Evaluates a decode and counts what it selects among."""

    def __init__(self) -> None:
        self.found = 0

    def select(self, condition: Any, then: Any, otherwise: Any) -> Any:
        self.found += 1
        return super().select(condition, then, otherwise)

    def exp2(self, value: Any) -> Any:
        self.found += EXP2_CHOICES
        return super().exp2(value)

    def lookup(self, table: Sequence[float], code: Any) -> Any:
        self.found += len(table) - 1
        return super().lookup(table, code)


def choices(ttype: TType) -> int:
    """Return the selections by which kernels choose the value of a code: 15 of a table of 16."""
    if table := ttype.element_type.kernel_table:
        return len(table) - 1
    counter = _Counter()
    with np.errstate(all="ignore"):
        ttype.evaluate(np.zeros(1, np.uint32), counter)
    return counter.found
