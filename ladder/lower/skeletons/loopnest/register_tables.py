"""Tables in vector registers: of 16-bit elements by ``vpermw``, of bytes by ``vpermb``, and their pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v

Bits = np.ndarray[Any, Any]

HALF, COUNT = 32, 64
"""16-bit elements of a vector, and bytes."""

SIGN = 1 << 7

LOW_BYTES = 0x00FF


def _has_signs(values: Bits) -> bool:
    """Tell whether the upper half of a table of 256 is the lower half with the sign set."""
    return len(values) == 2 * SIGN and np.array_equal(values[SIGN:], values[:SIGN] | 0x8000)


class LookupTable:
    """A table of 2, 4, ... 256 uint16 in vector registers, 32 entries each."""

    def __init__(self, values: Bits) -> None:
        self.signed = _has_signs(values)
        kept = values[:SIGN] if self.signed else values
        # vpermw ignores index bits above the fifth: a repeated table ignores more.
        kept = np.tile(kept, max(1, HALF // len(kept)))
        self.parts = [b.bind(v.table(part, "uint16")) for part in kept.reshape(-1, HALF)]

    def look_up(self, codes: Expr) -> Expr:
        found = self._select(self.parts, codes)
        if not self.signed:
            return found
        sign = v.masked(v.shifted(codes, -8, "uint16", HALF), 0x8000, "uint16", HALF)
        return T.bitwise_or(found, sign)

    def _select(self, parts: list[Expr], codes: Expr) -> Expr:
        if len(parts) == 1:
            return v.permute(parts[0], codes)
        if len(parts) == 2:
            return v.permute_pair(parts[0], parts[1], codes)
        half = len(parts) // 2
        upper = v.masked(codes, half * HALF, "uint16", HALF)
        chosen = tirx.NE(upper, v.constant(0, "uint16", HALF))
        return tirx.Select(chosen, self._select(parts[half:], codes), self._select(parts[:half], codes))


class ByteTable:
    """A table of 2, 4, ... 256 uint8 in vector registers, 64 entries each.

    signed: The table is that of codes below ``SIGN``, and the upper half differs in the sign bit alone.
    """

    def __init__(self, values: Bits, signed: bool = False) -> None:
        self.signed = signed
        # Indices have six bits, or seven: a repeated table ignores those above a code.
        kept = np.tile(values, max(1, COUNT // len(values)))
        self.parts = [b.bind(v.table(part, "uint8")) for part in kept.reshape(-1, COUNT)]

    def look_up(self, codes: Expr) -> Expr:
        """Return the bytes of 64 codes, whose bits above those that count are arbitrary."""
        found = self._select(self.parts, codes)
        return T.bitwise_or(found, v.masked(codes, SIGN, "uint8", COUNT)) if self.signed else found

    def _select(self, parts: list[Expr], codes: Expr) -> Expr:
        if len(parts) == 1:
            return v.permute_bytes(parts[0], codes)
        if len(parts) == 2:
            return v.permute_byte_pair(parts[0], parts[1], codes)
        upper = v.as_type(codes, f"int8x{COUNT}") < v.constant(0, "int8", COUNT)
        return tirx.Select(upper, self._select(parts[2:], codes), self._select(parts[:2], codes))


class HalfTable:
    """A table of uint16 as one of upper bytes and one of lower bytes, either of which may be 0."""

    def __init__(self, values: Bits) -> None:
        half = len(values) // 2
        signed = _has_signs(values)
        plain = len(values) == 2 * SIGN and np.array_equal(values[half:], values[:half])
        kept = values[:half] if signed or plain else values
        self.upper, self.lower = (
            ByteTable(part.astype(np.uint8), signed and top) if np.any(part) or (signed and top) else None
            for top, part in ((True, kept >> 8), (False, kept & LOW_BYTES))
        )

    def look_up(self, codes: Expr) -> tuple[Expr, Expr]:
        """Return the values of the even bytes of 64 codes, and those of the odd ones: uint16x32 each."""
        high, low = (
            None if table is None else v.kept(v.as_type(table.look_up(codes), "uint16x32"), "uint16", HALF)
            for table in (self.upper, self.lower)
        )
        return self._joined(high, low, 0), self._joined(high, low, 8)

    def _joined(self, high: Expr, low: Expr, right: int) -> Expr:
        """Return words of the bytes at one place of each 16 bits."""
        parts = []
        if low is not None:
            parts.append(v.masked(v.shifted(low, right, "uint16", HALF), LOW_BYTES, "uint16", HALF))
        if high is not None:
            parts.append(v.masked(v.shifted(high, right - 8, "uint16", HALF), 0xFF00, "uint16", HALF))
        if not parts:
            return v.constant(0, "uint16", HALF)
        return b.bind(parts[0] if len(parts) == 1 else T.bitwise_or(*parts))
