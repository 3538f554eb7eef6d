"""The instruction set that decoders are written in, with value numbering.

A decoder is written once against `Machine`. `TirMachine` (emission.py) emits it, `NumpyMachine`
(proof.py) executes it exactly, and `CountingMachine` counts it: what is proven and ranked is
what is emitted. Sources of the semantics: PTX ISA, "lop3", "prmt", "Half Precision Floating
Point Instructions", "cvt".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from tile_types import TType

AND = 0xC0
"""lop3 table of ``a & b``."""
AND_XOR = 0x6A
"""lop3 table of ``(a & b) ^ c``."""
AND_OR = 0xEA
"""lop3 table of ``(a & b) | c``."""
XOR = 0x3C
"""lop3 table of ``a ^ b``."""
OR = 0xFC
"""lop3 table of ``a | b``."""
XNOR_AND = 0x82
"""lop3 table of ``~(a ^ b) & c``."""
REFERENCE_COST = 40
"""Instructions of one element of the reference decode, roughly."""


@dataclass(frozen=True, eq=False)
class Word:
    """One 32-bit register; ``content`` is what the machine at hand computes with."""

    content: Any


class Machine(ABC):
    """Instructions on 32-bit words. Equal instructions on equal words are performed once."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Word] = {}
        self._inputs: list[Word] = []

    @abstractmethod
    def perform(self, operation: str, words: list[Any], immediates: tuple[Any, ...]) -> Any:
        """Perform one instruction on the contents of its operands."""

    def input(self, content: Any) -> Word:
        """Bring in a word from outside."""
        self._inputs.append(Word(content))
        return self._inputs[-1]

    def _once(self, operation: str, words: tuple[Word, ...] = (), *immediates: Any) -> Word:
        key = (operation, tuple(id(word) for word in words), immediates)
        if key not in self._made:
            self._made[key] = Word(self.perform(operation, [w.content for w in words], immediates))
        return self._made[key]

    def constant(self, bits: int) -> Word:
        """Return a constant."""
        return self._once("constant", (), bits & 0xFFFFFFFF)

    def lop3(self, a: Word, b: Word, c: Word, table: int) -> Word:
        """Return any bitwise function of three words; ``table`` is PTX's immLut."""
        return self._once("lop3", (a, b, c), table)

    def mask(self, a: Word, bits: int) -> Word:
        """Return ``a & bits``."""
        return self.lop3(a, self.constant(bits), self.constant(0), AND)

    def shift(self, a: Word, left: int) -> Word:
        """Shift left by ``left`` bits, or logically right by ``-left``."""
        return self._once("shift", (a,), left) if left else a

    def permute(self, a: Word, b: Word, selector: Word) -> Word:
        """Pick four of the eight bytes of (a, b) by the low four nibbles of ``selector`` (prmt)."""
        return self._once("permute", (a, b, selector))

    def subtract(self, a: Word, b: Word) -> Word:
        """Return ``a - b`` modulo 2**32."""
        return self._once("subtract", (a, b))

    def float_sub(self, core: str, a: Word, b: Word) -> Word:
        """Return ``a - b`` of two float16 or bfloat16 lanes, rounded to nearest even."""
        return self._once("float_sub", (a, b), core)

    def float_mul(self, core: str, a: Word, b: Word) -> Word:
        """Return ``a * b`` of two lanes, rounded once."""
        return self._once("float_mul", (a, b), core)

    def float_fma(self, core: str, a: Word, b: Word, c: Word) -> Word:
        """Return ``a * b + c`` of two lanes, rounded once."""
        return self._once("float_fma", (a, b, c), core)

    def narrow(self, core: str, a: Word) -> Word:
        """Convert two float16 lanes to two fp8 values in the low 16 bits, saturating."""
        return self._once("narrow", (a,), core)

    def halves(self, low: Word, high: Word) -> Word:
        """Round two float32 words to two float16 lanes."""
        return self._once("halves", (low, high))

    def reference(self, ttype: TType, code: Word, core: str) -> Word:
        """Decode one code (alone in its word) by the type's own expression to bits of ``core``."""
        return self._once("reference", (code,), ttype, core)


class CountingMachine(Machine):
    """Counts instructions; constants are free."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def perform(self, operation: str, words: list[Any], immediates: tuple[Any, ...]) -> Any:
        """Count one instruction."""
        self.count += {"constant": 0, "reference": REFERENCE_COST}.get(operation, 1)


def repeat(bits: int, lane: int) -> int:
    """Return ``bits`` in every ``lane``-wide lane of a word."""
    return sum((bits & ((1 << lane) - 1)) << at for at in range(0, 32, lane))


def subtract_bytes(m: Machine, a: Word, b: Word) -> Word:
    """Return the four differences of bytes modulo 256; no borrow crosses bytes."""
    high, low, none = m.constant(0x80808080), m.constant(0x7F7F7F7F), m.constant(0)
    difference = m.subtract(m.lop3(a, high, none, OR), m.lop3(b, low, none, AND))
    return m.lop3(difference, m.lop3(a, b, high, XNOR_AND), none, XOR)
