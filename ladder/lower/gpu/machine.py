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
XOR_AND = 0x28
"""lop3 table of ``(a ^ b) & c``."""
XNOR_AND = 0x82
"""lop3 table of ``~(a ^ b) & c``."""
SELECT = 0xCA
"""lop3 table of ``a ? b : c``, bit by bit."""
REFERENCE_COST = 40
"""Instructions of one element of the reference decode, roughly."""

PIPE_CLOCKS = {
    "lop3": ("alu", 2.0),
    "shift right": ("alu", 2.0),
    "shift left": ("fma", 2.0),
    "rotate": ("alu", 2.0),
    "permute": ("alu", 2.0),
    "select_bytes": ("alu", 2.0),
    "multiply": ("fma", 2.0),
    "multiply_add": ("fma", 2.0),
    "subtract": ("alu", 2.0),
    "dot": ("fma", 2.0),
    "float_sub": ("fma", 1.0),
    "float_mul": ("fma", 1.0),
    "float_fma": ("fma", 1.0),
    "narrow": ("alu", 2.0),
    "halves": ("alu", 2.0),
    "convert": ("alu", 2.0),
    "look_up": ("shared", 4.0),
    "reference": ("alu", 2.0 * REFERENCE_COST),
}
"""Pipe of each instruction, and the clocks that a warp's instruction keeps it busy.

Of one of the four parts of a multiprocessor, from sm_80 on: 16 lanes per clock for logic, and for
integer multiplies (which ptxas shifts left with), 32 for packed 16-bit floats; shared memory
serves 32 lanes of all four parts (CUDA C++ Programming Guide, "Throughput of Native Arithmetic
Instructions"; the same was measured on an H200).
"""

TABLE_ROWS = (256, 128)
"""Bytes from entry to entry of a table in shared memory: each lane of a warp has its own bank.

With 256, half of them unused, a byte of codes is a byte of the address: one `permute` puts it there.
With 128 one `dot` does, which is as many clocks; gemv takes 4 % longer with it, wgmma 9 % less (H200).
Of tables of single codes gemv takes 1 to 3 % less with it.
"""

ISSUE_WEIGHT = 0.5
"""How much an instruction counts beside the busiest pipe: decoding shares the issue slots."""

SHARED_WEIGHT = 0.25
"""How much a clock of shared memory counts: activations pass through it too."""


@dataclass(frozen=True, eq=False)
class Word:
    """One 32-bit register; ``content`` is what the machine at hand computes with."""

    content: Any


class Machine(ABC):
    """Instructions on 32-bit words. Equal instructions on equal words are performed once."""

    exact = False
    """Whether results of float instructions are known to need no rounding; most machines do not ask."""

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
        return self._once("constant", (), bits & 0xFFFFFFFF)

    def lop3(self, a: Word, b: Word, c: Word, table: int) -> Word:
        """Return any bitwise function of three words; ``table`` is PTX's immLut."""
        return self._once("lop3", (a, b, c), table)

    def mask(self, a: Word, bits: int) -> Word:
        return self.lop3(a, self.constant(bits), self.constant(0), AND)

    def shift(self, a: Word, left: int) -> Word:
        """Shift left by ``left`` bits, or logically right by ``-left``."""
        return self._once("shift", (a,), left) if left else a

    def rotate(self, a: Word, right: int) -> Word:
        """Rotate right by ``right`` bits."""
        return self._once("rotate", (a,), right)

    def multiply(self, a: Word, factor: int, addend: int = 0) -> Word:
        """Return ``a * factor + addend`` modulo 2**32.

        A factor of several bits adds copies of ``a``, shifted left.
        """
        return self._once("multiply", (a,), factor, addend & 0xFFFFFFFF)

    def multiply_add(self, a: Word, factor: int, addend: Word) -> Word:
        """Return ``a * factor + addend`` modulo 2**32."""
        return self._once("multiply_add", (a, addend), factor)

    def permute(self, a: Word, b: Word, selector: Word) -> Word:
        """Pick four of the eight bytes of (a, b) by the low four nibbles of ``selector`` (prmt)."""
        return self._once("permute", (a, b, selector))

    def select_bytes(self, a: Word, b: Word, selector: Word) -> Word:
        """Pick four of the eight bytes of (a, b) by the bytes of ``selector``, all below 8 (AMD's V_PERM)."""
        return self._once("select_bytes", (a, b, selector))

    def subtract(self, a: Word, b: Word) -> Word:
        """Return ``a - b`` modulo 2**32."""
        return self._once("subtract", (a, b))

    def dot(self, a: Word, weights: int, addend: Word) -> Word:
        """Return ``addend`` plus the products of unsigned bytes of ``a`` and ``weights`` (dp4a)."""
        return self._once("dot", (a, addend), weights)

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

    def convert(self, core: str, codes: str, word: Word, scale: Word, place: int) -> Word:
        """Convert two neighbouring codes of a narrow float, times a power of two, rounded once.

        AMD's V_CVT_SCALEF32_PK: ``place`` counts pairs of codes from the bottom of the word, and the exponent
        of the float32 ``scale`` is the power's.
        """
        return self._once("convert", (word, scale), core, codes, place)

    def halves(self, low: Word, high: Word) -> Word:
        """Round two float32 words to two float16 lanes."""
        return self._once("halves", (low, high))

    def table_lane(self, *, absolute: bool = False) -> Word:
        """Return ``4 * lane``, where this lane's column of a table begins, or its address."""
        return self._once("table_lane", (), absolute)

    def look_up(self, entries: tuple[int, ...], row: int, at: Word, *, absolute: bool = False) -> Word:
        """Return the word of a table in shared memory ``row * entry`` bytes after `table_lane`."""
        return self._once("look_up", (at,), entries, row, absolute)

    def reference(self, ttype: TType, code: Word, core: str) -> Word:
        """Decode one code (alone in its word) by the type's own expression to bits of ``core``."""
        return self._once("reference", (code,), ttype, core)


@dataclass(frozen=True)
class Cost:
    """Cost of a decode for a warp.

    instructions: Instructions to issue.
    alu, fma, shared: Clocks for which the pipes of logic, of multiplication and of shared memory are busy.
    """

    instructions: int = 0
    alu: float = 0.0
    fma: float = 0.0
    shared: float = 0.0

    @property
    def busiest(self) -> float:
        """Clocks that the decode takes at least, one instruction being issued per clock."""
        return max(self.alu, self.fma, self.shared, float(self.instructions))

    @property
    def weight(self) -> float:
        """Cost by which recipes are ranked."""
        return self.busiest + ISSUE_WEIGHT * self.instructions + SHARED_WEIGHT * self.shared


class CountingMachine(Machine):
    """Counts instructions and the clocks of each pipe; constants are free."""

    def __init__(self) -> None:
        super().__init__()
        self.instructions = 0
        self.clocks = {"alu": 0.0, "fma": 0.0, "shared": 0.0}

    @property
    def cost(self) -> Cost:
        return Cost(self.instructions, **self.clocks)

    def perform(self, operation: str, words: list[Any], immediates: tuple[Any, ...]) -> Any:
        if operation in ("constant", "table_lane"):
            return
        if operation == "shift":
            operation = "shift left" if immediates[0] > 0 else "shift right"
        pipe, clocks = PIPE_CLOCKS[operation]
        self.instructions += REFERENCE_COST if operation == "reference" else 1
        self.clocks[pipe] += clocks


def repeat(bits: int, lane: int) -> int:
    """Return ``bits`` in every ``lane``-wide lane of a word."""
    return sum((bits & ((1 << lane) - 1)) << at for at in range(0, 32, lane))


def subtract_bytes(m: Machine, a: Word, b: Word) -> Word:
    """Return the four differences of bytes modulo 256; no borrow crosses bytes."""
    high, low, none = m.constant(0x80808080), m.constant(0x7F7F7F7F), m.constant(0)
    difference = m.subtract(m.lop3(a, high, none, OR), m.lop3(b, low, none, AND))
    return m.lop3(difference, m.lop3(a, b, high, XNOR_AND), none, XOR)
