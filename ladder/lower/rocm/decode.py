"""Decoders for AMD GPUs, and the codes of fp8 that their matrix cores read differently.

CDNA3 reads fp8 as e4m3fnuz and e5m2fnuz (AMD Instinct MI300 ISA, "FP8 and BF8"): the same bits mean
half of what they mean in the OCP types, the code of -0 means NaN, and the OCP codes of NaN and
infinity are numbers. So zeros lose their sign, what is not finite becomes NaN, and sums are
multiplied by four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.gpu.decode import Decoder, conversion_of
from ladder.lower.gpu.emission import SharedTable, TirMachine
from ladder.lower.gpu.groups import NOTHING_LEFT, Correction
from ladder.lower.gpu.machine import Machine, Word, repeat
from ladder.lower.gpu.scales import FLOAT32_BIAS, FLOAT32_MANTISSA, exponent_byte
from ladder.lower.rocm.converted import Converted
from ladder.lower.rocm.machine import FnuzMachine, RocmMachine
from ladder.lower.rocm.ranking import best_recipe
from schedules.footprint import streams_exponents
from schedules.layouts import EXPONENT_FORMS
from targets import TileDevice

Expr = Any

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
        if not (self.fnuz and self._has_negative_zero):
            return value
        return m.input(without_negative_zero(value.content))

    @property
    def _has_negative_zero(self) -> bool:
        """Whether the type has one; of its codes only finite ones are packed."""
        values = self.conversion.ttype.values()
        return bool(np.any((values == 0) & np.signbit(values)))


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
