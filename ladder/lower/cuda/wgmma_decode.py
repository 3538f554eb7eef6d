"""Scaled operands of the wgmma pipeline: decode and scale in as few instructions as stay exact.

A raw decoder (`decode.make_decoder` for accumulators) leaves ``value = gain * raw + offset``.
Where offset and gain are powers of two, one fused multiply-add with ``gain * scale`` and
``offset * scale``, both exact in float16, gives the correctly rounded ``value * scale``:
one instruction instead of the two that subtract and scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp
from typing import Any

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cuda.decode import Decoder, LoadedWords, make_decoder
from ladder.lower.cuda.emission import SharedTable, TirMachine
from ladder.lower.cuda.machine import Machine, Word
from ladder.lower.cuda.recipes import FLOAT_CORES
from schedules.legal import table_bytes
from schedules.schedule import check
from targets import TileDevice

Expr = Any
LARGEST_POWER = 12
"""Exponent of the largest power of two that a scale is multiplied by at once: float16 ends at 2**15."""


@dataclass(frozen=True)
class ScaledDecoder:
    """Decodes to operands that hold values times their scales.

    Parameters
    ----------
    decoder
        The plain decoder, or the raw one if ``fused``.
    fused
        Whether one multiply-add applies gain, offset and scale.
    """

    decoder: Decoder
    fused: bool

    @property
    def operand(self) -> str:
        """Operand type of the decoded registers."""
        return self.decoder.operand

    @property
    def factors(self) -> int:
        """Registers that hold one row's scale: ``gain * scale``, and ``offset * scale`` if there is one."""
        return 2 if self.fused and any(self.decoder.offsets) else 1

    def prepare(self, scale: Expr, half: int) -> list[Expr]:
        """Return what a row of half ``half`` keeps of its scale, which a register holds twice."""
        if not self.fused:
            return [scale]
        m = TirMachine()
        word = m.input(scale)
        factors = [_times(m, word, self.decoder.gains[half])]
        if self.factors == 2:
            factors.append(m.float_mul(self.operand, word, self._constant(m, self.decoder.offsets[half])))
        return [factor.content for factor in factors]

    def registers(
        self,
        words: Sequence[Expr],
        first: int,
        count: int,
        out: Any,
        out_first: int,
        scales: Sequence[Sequence[Expr]] | None,
        zeros: tuple[Any, Any] | None,
        table: SharedTable | None,
    ) -> None:
        """Emit the decode of registers ``first .. first+count-1`` of the thread's tile.

        As `Decoder.registers`, except that ``scales`` holds for rows g and g+8 what `prepare` returned.
        """
        if not self.fused or scales is None:
            plain = None if scales is None else (scales[0][0], scales[1][0])
            self.decoder.registers(words, first, count, out, out_first, plain, zeros, table)
            return
        m = TirMachine()
        loaded = LoadedWords(m, words, self.decoder.words)
        factors = [[m.input(factor) for factor in row] for row in scales]
        for index in range(first, first + count):
            raw = self.decoder.choice.recipe.register(m, loaded, index, None)
            value = self._scaled(m, raw, factors[index % 2])
            b.store(out, value.content, out_first + index - first)

    def _scaled(self, m: Machine, raw: Word, factors: Sequence[Word]) -> Word:
        if len(factors) == 1:
            return m.float_mul(self.operand, raw, factors[0])
        return m.float_fma(self.operand, raw, factors[0], factors[1])

    def _constant(self, m: Machine, value: float) -> Word:
        return m.constant(FLOAT_CORES[self.operand].bits(value))


def _times(m: Machine, word: Word, power: float) -> Word:
    """Multiply float16 lanes by a power of two that they need not hold."""
    exponent = frexp(abs(power))[1] - 1
    while exponent:
        step = max(-LARGEST_POWER, min(exponent, LARGEST_POWER))
        word = m.float_mul("float16", word, m.constant(FLOAT_CORES["float16"].bits(2.0**step)))
        exponent -= step
    if power < 0:
        word = m.float_mul("float16", word, m.constant(FLOAT_CORES["float16"].bits(-1.0)))
    return word


def _power_of_two(value: float) -> bool:
    return abs(frexp(value)[0]) == 0.5


def scaled_decoder(gemm: Gemm, device: TileDevice) -> ScaledDecoder:
    """Return the decoder of a problem's operands.

    Fused where that is exact: float16, group scales, no zero points, and gain and offset powers of
    two. Stored scales times the largest gain, 2**24, stay in float16's range (`normalise_scales`).
    """
    plain = make_decoder(gemm, device, table=table_bytes(gemm))
    check(plain.table_words * 4 == table_bytes(gemm), f"a table of {plain.table_words} words was not planned")
    if gemm.activation != "float16" or not gemm.scale or gemm.zero != "none":
        return ScaledDecoder(plain, fused=False)
    raw = make_decoder(gemm, device, "accumulator", offset_clocks=0.0)
    exact = all(map(_power_of_two, raw.gains)) and all(
        offset == 0.0 or _power_of_two(offset) for offset in raw.offsets
    )
    cheaper = raw.choice.cost.instructions < plain.choice.cost.instructions
    return ScaledDecoder(raw, fused=True) if exact and cheaper else ScaledDecoder(plain, fused=False)
