"""Floating-point formats: sign, exponent and mantissa of any width, decoded and encoded by arithmetic.

Sources: OCP 8-bit Floating Point Specification (OFP8) rev. 1.0, OCP Microscaling
Formats (MX) v1.0, IEEE 754-2019; ``fnuz`` follows Noune et al., arXiv 2206.02915.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tile_types.arrays import Array, arrays_of

FLOAT32_BIAS = 127
FLOAT32_MANTISSA = 23
QUIET_NAN = 0x7FC00000
INFINITY = 0x7F800000


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format with subnormals.

    exponent_bits, mantissa_bits: Field widths; the sign takes one more bit.
    specials: ``"none"``: every code is a number (fp4, fp6). ``"ieee"``: the top exponent holds infinity and
        NaN. ``"fn"``: only magnitude all-ones is NaN. ``"fnuz"``: the code of -0 is the one NaN, and the bias
        is one higher.
    """

    exponent_bits: int
    mantissa_bits: int
    specials: str = "none"

    @property
    def bits(self) -> int:
        """Width of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """Exponent bias, 2**(e-1) - 1 (``fnuz``: one more)."""
        return (1 << (self.exponent_bits - 1)) - (0 if self.specials == "fnuz" else 1)

    @property
    def largest_magnitude(self) -> int:
        """Magnitude bits of the largest finite number."""
        all_ones = (1 << (self.bits - 1)) - 1
        top_exponent = ((1 << self.exponent_bits) - 1) << self.mantissa_bits
        return {"ieee": top_exponent - 1, "fn": all_ones - 1}.get(self.specials, all_ones)

    def decode(self, code: Any, ops: Any) -> Any:
        """Return the float32 value of ``code``; formats of up to 8 exponent and 23 mantissa bits.

        Subnormals are scaled as integers, so that no device's flush-to-zero touches them.
        """
        if self.exponent_bits == 8:  # float32's own exponent: the bits are float32's upper bits
            return ops.bitcast(code << (32 - self.bits), "float32")
        shift = FLOAT32_MANTISSA - self.mantissa_bits
        sign = (code >> (self.bits - 1)) << 31
        magnitude = code & ((1 << (self.bits - 1)) - 1)
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        normal = (magnitude << shift) + ((FLOAT32_BIAS - self.bias) << FLOAT32_MANTISSA)
        unit = 2.0 ** (1 - self.bias - self.mantissa_bits)
        subnormal = ops.bitcast(ops.cast(mantissa, "float32") * ops.constant(unit, "float32"), "uint32")
        bits = ops.select(magnitude < (1 << self.mantissa_bits), subnormal, normal) | sign
        return ops.bitcast(self._specials(code, magnitude, bits, sign, ops), "float32")

    def _specials(self, code: Any, magnitude: Any, bits: Any, sign: Any, ops: Any) -> Any:
        """Put NaN and infinity where the format has them."""
        if self.specials == "fnuz":
            return ops.select(code == (1 << (self.bits - 1)), QUIET_NAN, bits)
        if self.specials == "fn":
            return ops.select(magnitude > self.largest_magnitude, sign | QUIET_NAN, bits)
        if self.specials == "ieee":
            infinity = self.largest_magnitude + 1
            bits = ops.select(magnitude == infinity, sign | INFINITY, bits)
            return ops.select(magnitude > infinity, sign | QUIET_NAN, bits)
        return bits

    def encode(self, values: Array) -> Array:
        """Return the int64 codes of finite float64 values: to nearest even, saturating.

        Zero always gets the code of +0.
        """
        xp = arrays_of(values)
        smallest = 1 - self.bias
        beyond = 2.0 ** ((1 << self.exponent_bits) - self.bias)
        size = xp.clip(abs(values), 0.0, beyond)
        exponent = xp.exponent(xp.clip(size, 2.0**smallest, beyond))
        mantissa = xp.cast(xp.rint(size * xp.pow2(self.mantissa_bits - exponent)), "int64")
        magnitude = ((exponent - smallest) << self.mantissa_bits) + mantissa
        magnitude = xp.clip(magnitude, 0, self.largest_magnitude)
        negative = xp.cast((values < 0) & (magnitude > 0), "int64")
        return magnitude | (negative << (self.bits - 1))
