"""From packed words to multiplicands: by table in registers or memory, or by the type's decode expression.

Every decoder reads one row block and unit and returns what one step (E columns) multiplies:

* bfloat16 operand: one uint16x32, a pair of columns per row;
* float32 operand: E vectors float32x16, one per column;
* digits: one uint16x32, a pair of integers per row;
* int8 operand: one uint32x16 of four unsigned bytes per row, counted from the smallest value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import ml_dtypes
import numpy as np
from tvm.script import tirx as T

from ladder.ir.program import Copy, TileProgram
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import tables
from ladder.lower.cpu import vectors as v
from ladder.lower.skeletons.loopnest.register_tables import HALF, Bits, ByteTable, HalfTable, LookupTable
from ladder.lower.skeletons.loopnest.units import BYTE_LANE, Unit, byte_codes
from schedules.cpu_layout import LANES, CpuLayout
from schedules.instructions import BYTE_DIGITS, BYTE_PAIRS
from tile_types import TirOps, TType
from tile_types.forms import BytePairs, Bytes, byte_form, byte_pairs


class Decoder(Protocol):
    """How codes become multiplicands."""

    def begin(self) -> None:
        """Emit what is constant for a tile, where a tile begins; nothing where a decoder does not say."""
        return

    def __call__(self, unit: Unit, step: int) -> list[Expr]:
        """Return the multiplicands of one step."""
        ...


def decoder_for(program: TileProgram, layout: CpuLayout) -> Decoder:
    """Return what makes the weight's multiplicands, as the program's conversion says."""
    element, made = program.operand("w").tile.ttype, program.operand(program.product[0].right)
    recipe = next((copy.recipe for copy in copies_of(program, made.name) if copy.recipe), "")
    if made.ttype == "uint8":
        return ByteDecoder(layout)
    if recipe == BYTE_DIGITS:
        return DigitByteDecoder(layout, element)
    if recipe == BYTE_PAIRS:
        return PairByteDecoder(layout, element)
    if recipe == "extend":
        return ExtendingDecoder(PairTable(layout, element), made.ttype)
    if recipe == "byte_lookup":
        return ByteTableDecoder(layout, element, made.ttype)
    if made.ttype == "int16":
        return PairDecoder(IntegerTable(layout, element))
    if made.ttype == "bfloat16":
        return PairDecoder(PairTable(layout, element, rounded=True)) if recipe == "lookup" else RawPairs()
    if recipe == "lookup":
        pairs = PairTable(layout, element)
        return (WordDecoder if is_of_words(element) else FloatDecoder)(pairs)
    return (MemoryDecoder if recipe == "table" else ExpressionDecoder)(layout, element)


def helpers_of(program: TileProgram) -> str:
    """Return the LLVM IR that the decoder of a program calls."""
    made = program.operand(program.product[0].right)
    by_table = any(copy.recipe == "table" for copy in copies_of(program, made.name))
    return tables.helper(program.operand("w").tile.ttype) if by_table else ""


def copies_of(program: TileProgram, name: str) -> list[Copy]:
    """Return the statements that make a tile."""
    return [s for s, _ in program.find(Copy) if isinstance(s, Copy) and s.target.name == name]


def units_ahead(program: TileProgram) -> int:
    """Return the units by which the weight is prefetched; 0 if it is not."""
    copies = copies_of(program, "w.l2")
    return int(copies[0].by.removeprefix("prefetch ")) if copies else 0


def form_of(element: TType) -> Bytes | BytePairs:
    """Return the bytes of a type that has them, or pairs of bytes, as its program says."""
    form = byte_form(element) or byte_pairs(element)
    assert form is not None
    return form


@dataclass
class DigitByteDecoder(Decoder):
    """Bytes of values: codes that are counted by a mask, others by a table in a register.

    layout: Of the words, read as bytes.
    """

    layout: CpuLayout
    element: TType
    table: Expr = None

    def begin(self) -> None:
        """Name the table once per tile, if there is one."""
        form = form_of(self.element)
        if form.flip is None:
            repeated = np.resize(
                form.table, 4 * LANES
            )  # indices have six bits, of which codes are the lowest
            self.table = b.bind(v.table(repeated, "uint8"))

    def __call__(self, unit: Unit, step: int) -> list[Expr]:
        """Return four unsigned bytes per row."""
        form, bits = form_of(self.element), self.layout.bits
        word = byte_codes(self.layout, unit, step)
        if form.flip is None:
            return [b.bind(v.as_type(v.permute_bytes(self.table, v.as_type(word, "uint8x64")), "uint32x16"))]
        if bits < BYTE_LANE:
            word = v.masked(word, ((1 << bits) - 1) * 0x01010101, "uint32", LANES)
        flipped = v.constant(form.flip * 0x01010101, "uint32")
        return [b.bind(T.bitwise_xor(word, flipped) if form.flip else word)]


@dataclass
class PairByteDecoder(Decoder):
    """The upper and the lower bytes of values, by tables in registers."""

    layout: CpuLayout
    element: TType
    tables: tuple[ByteTable, ByteTable] = field(init=False)

    def begin(self) -> None:
        form = byte_pairs(self.element)
        assert form is not None
        upper, lower = (ByteTable(np.array(part, np.uint8)) for part in (form.table, form.lower))
        self.tables = upper, lower

    def __call__(self, unit: Unit, step: int) -> list[Expr]:
        """Return twice four unsigned bytes per row."""
        codes = v.kept(v.as_type(byte_codes(self.layout, unit, step), "uint8x64"), "uint8", 64)
        return [b.bind(v.as_type(table.look_up(codes), "uint32x16")) for table in self.tables]


class RawPairs(Decoder):
    """bfloat16 weights are multiplicands as they are stored."""

    def __call__(self, unit: Unit, step: int) -> list[Expr]:
        return [v.as_type(unit.vector(unit.layout.planes[0], step), "uint16x32")]


@dataclass
class ByteDecoder(Decoder):
    """Unsigned bytes for integer cores: shifts and masks only, since packed codes count from 0."""

    layout: CpuLayout

    def __call__(self, unit: Unit, step: int) -> list[Expr]:
        """Return four unsigned bytes per row."""
        total = None
        for plane in self.layout.planes:
            right = plane.width * (step % plane.slots) - plane.shift
            bits = ((1 << plane.width) - 1) << plane.shift
            part = v.shifted(unit.vector(plane, step), right, "uint32", LANES)
            part = v.masked(part, bits * 0x01010101, "uint32", LANES) if plane.width < 8 else part
            total = part if total is None else T.bitwise_or(total, part)
        return [b.bind(total)]


@dataclass
class PairTable:
    """Look codes up in registers: any type of up to eight bits becomes 16-bit halves of float32.

    element: The type.
    rounded: Round values to bfloat16 (exact but for codebooks of real numbers). Otherwise a second table
        holds the lower halves, if any is not 0.
    upper, lower: The tables, once `begin` has named them.
    """

    layout: CpuLayout
    element: TType
    rounded: bool = False
    upper: LookupTable = field(init=False)
    lower: LookupTable | None = field(init=False)

    def begin(self) -> None:
        """Name the tables once per tile; LLVM keeps them in registers or folds them into loads."""
        self.upper = LookupTable(self._upper())
        lower = self._bits() & 0xFFFF
        self.lower = None if self.rounded or not np.any(lower) else LookupTable(lower)

    def _bits(self) -> Bits:
        return self.element.values().astype(np.float32).view(np.uint32)

    def _upper(self) -> Bits:
        if self.rounded:
            return self.element.values().astype(ml_dtypes.bfloat16).view(np.uint16)
        return self._bits() >> 16

    def codes(self, unit: Unit, step: int) -> Expr:
        """Return the codes of a step in the low bits of 32 elements; bits above are arbitrary."""
        result = None
        for plane in self.layout.planes:
            half = v.as_type(unit.vector(plane, step), "uint16x32")
            right = plane.width * (step % plane.slots) - plane.shift
            part = v.shifted(half, right, "uint16", HALF)
            result = part if result is None else v.merged(result, part, plane.shift, "uint16", HALF)
        return v.kept(result, "uint16", HALF)


class IntegerTable(PairTable):
    """Values that are integers of 16 bits."""

    def _bits(self) -> Bits:
        return self.element.values().astype(np.int16).view(np.uint16)

    def _upper(self) -> Bits:
        return self._bits()


@dataclass
class PairDecoder(Decoder):
    """Look bfloat16 pairs up."""

    pairs: PairTable

    def begin(self) -> None:
        self.pairs.begin()

    def __call__(self, unit: Unit, step: int) -> list[Expr]:
        return [b.bind(self.pairs.upper.look_up(self.pairs.codes(unit, step)))]


@dataclass
class ExtendingDecoder(Decoder):
    """Extend codes that are unsigned or in two's complement: to 16 bits, or to 32, which become floats.

    made: ``"int16"``, ``"bfloat16"`` or ``"float32"``.
    """

    pairs: PairTable
    made: str

    def __call__(self, unit: Unit, step: int) -> list[Expr]:
        codes, bits = self.pairs.codes(unit, step), self.pairs.layout.bits
        if self.made == "int16":
            return [b.bind(v.as_type(self._extended(codes, 16 - bits, 16 - bits, 16), "uint16x32"))]
        words = b.bind(v.as_type(codes, "uint32x16"))
        floats = [
            b.bind(T.Cast("float32x16", self._extended(words, left, 32 - bits, 32)))
            for left in (32 - bits, 16 - bits)  # the even column, the odd one
        ]
        if self.made == "float32":
            return floats
        even, odd = (v.as_type(x, "uint32x16") for x in floats)
        return [
            b.bind(
                v.as_type(
                    v.merged(v.shifted(even, 16, "uint32", LANES), odd, 16, "uint32", LANES), "uint16x32"
                )
            )
        ]

    def _extended(self, words: Expr, left: int, right: int, width: int) -> Expr:
        """Return words shifted to the left, which drops what is above a code, and back."""
        kind, count = "int" if self.pairs.element.minimum < 0 else "uint", LANES * 32 // width
        high = v.shifted(words, -left, f"uint{width}", count)
        return v.shifted(v.as_type(high, f"{kind}{width}x{count}"), right, f"{kind}{width}", count)


def floats_of(upper: Expr, lower: Expr | None) -> list[Expr]:
    """Return two float32x16, of the even columns and of the odd ones, from halves of pairs: uint16x32."""
    word = b.bind(v.as_type(upper, "uint32x16"))
    even, odd = v.shifted(word, -16, "uint32", LANES), v.masked(word, 0xFFFF0000, "uint32", LANES)
    if lower is not None:
        rest = b.bind(v.as_type(lower, "uint32x16"))
        even = T.bitwise_or(even, v.masked(rest, 0xFFFF, "uint32", LANES))
        odd = T.bitwise_or(odd, v.shifted(rest, 16, "uint32", LANES))
    return [b.bind(v.as_type(half, "float32x16")) for half in (even, odd)]


class FloatDecoder(PairDecoder):
    """Look pairs up and split them into one float32 vector per column."""

    def __call__(self, unit: Unit, step: int) -> list[Expr]:
        codes, pairs = self.pairs.codes(unit, step), self.pairs
        return floats_of(
            pairs.upper.look_up(codes), None if pairs.lower is None else pairs.lower.look_up(codes)
        )


def float_bits(element: TType) -> Bits:
    """Return the bits of a type's values as float32."""
    return element.values().astype(np.float32).view(np.uint32)


WORD_BITS = 5
"""Bits of the widest codes that one instruction looks up in 32-bit words of two registers."""


def is_of_words(element: TType) -> bool:
    """Whether looking whole float32 values up takes less than halves of pairs: the lower ones are not 0."""
    return element.elem_bits <= WORD_BITS and bool(np.any(float_bits(element) & 0xFFFF))


@dataclass
class WordDecoder(PairDecoder):
    """Look float32 values of codes of up to five bits up, a column at a time."""

    parts: list[Expr] = field(init=False)

    def begin(self) -> None:
        values = float_bits(self.pairs.element)
        kept = np.tile(values, max(1, LANES // len(values)))  # indices are of four bits, or of five
        self.parts = [b.bind(v.table(part, "uint32")) for part in kept.reshape(-1, LANES)]

    def __call__(self, unit: Unit, step: int) -> list[Expr]:
        words = b.bind(v.as_type(self.pairs.codes(unit, step), "uint32x16"))
        return [self._look_up(v.shifted(words, right, "uint32", LANES)) for right in (0, 16)]

    def _look_up(self, codes: Expr) -> Expr:
        low, *high = self.parts
        found = v.permute_word_pair(low, high[0], codes) if high else v.permute_words(low, codes)
        return b.bind(v.as_type(found, "float32x16"))


@dataclass
class ByteTableDecoder(Decoder):
    """Look the bytes of values of codes of up to eight bits up, which makes the multiplicands of two steps.

    made: ``"bfloat16"``, to which values are rounded, or ``"float32"``.
    upper, lower: The tables of halves of float32, once `begin` has named them; the lower may be 0.
    """

    layout: CpuLayout
    element: TType
    made: str
    upper: HalfTable = field(init=False)
    lower: HalfTable | None = field(init=False)

    def begin(self) -> None:
        """Name the tables once per tile."""
        bits = float_bits(self.element)
        rounded = self.element.values().astype(ml_dtypes.bfloat16).view(np.uint16)
        self.upper = HalfTable(rounded if self.made == "bfloat16" else bits >> 16)
        whole = self.made == "bfloat16" or not np.any(bits & 0xFFFF)
        self.lower = None if whole else HalfTable(bits & 0xFFFF)

    def __call__(self, unit: Unit, step: int) -> list[Expr]:
        """Return one uint16x32, or two float32x16, of a step."""
        slots = BYTE_LANE // self.layout.planes[0].width
        line, slot = divmod(step, 2 * slots)
        half, slot = divmod(slot, slots)
        other = line * 2 * slots + (1 - half) * slots + slot
        if step not in unit.decoded:
            unit.decoded |= zip(sorted((step, other)), self._steps(unit, line * slots + slot), strict=True)
        return unit.decoded[step]

    def _steps(self, unit: Unit, step: int) -> Iterator[list[Expr]]:
        """Yield the multiplicands of two steps, whose codes are the bytes of one."""
        found = byte_codes(replace(self.layout, lane=BYTE_LANE), unit, step)
        codes = v.kept(v.as_type(found, "uint8x64"), "uint8", 64)
        uppers = self.upper.look_up(codes)
        lowers = (None, None) if self.lower is None else self.lower.look_up(codes)
        for upper, lower in zip(uppers, lowers, strict=True):
            yield [upper] if self.made == "bfloat16" else floats_of(upper, lower)


@dataclass
class MemoryDecoder(Decoder):
    """Read the value of each code from an array: any type of up to 16 bits on any machine."""

    layout: CpuLayout
    element: TType

    def __call__(self, unit: Unit, step: int) -> list[Expr]:
        """Return E vectors float32x16."""
        return [
            b.bind(tables.look_up(self.element, self._codes(unit, step, element)))
            for element in range(self.layout.elements)
        ]

    def _codes(self, unit: Unit, step: int, element: int) -> Expr:
        """Return the codes of one column: uint32x16."""
        codes = None
        for plane in self.layout.planes:
            right = self.layout.lane * element + plane.width * (step % plane.slots)
            part = v.shifted(unit.vector(plane, step), right, "uint32", LANES)
            part = v.masked(part, (1 << plane.width) - 1, "uint32", LANES)
            part = v.shifted(part, -plane.shift, "uint32", LANES)
            codes = part if codes is None else T.bitwise_or(codes, part)
        return b.bind(codes)


@dataclass
class ExpressionDecoder(Decoder):
    """Evaluate the type's decode expression in a vectorised loop: any type on any machine."""

    layout: CpuLayout
    element: TType

    def __call__(self, unit: Unit, step: int) -> list[Expr]:
        """Return E vectors float32x16."""
        result = []
        for element in range(self.layout.elements):
            target = v.scratch(LANES, "float32")
            with b.vector(LANES) as lane:
                b.store(target, self._value(self._code(unit, step, element, lane)), lane)
            result.append(b.bind(target[v.lanes(0)]))
        return result

    def _code(self, unit: Unit, step: int, element: int, lane: Expr) -> Expr:
        code = None
        for plane in self.layout.planes:
            right = self.layout.lane * element + plane.width * (step % plane.slots)
            part = T.shift_right(unit.lane(plane, step, lane), T.uint32(right))
            part = T.bitwise_and(part, T.uint32((1 << plane.width) - 1))
            part = T.shift_left(part, T.uint32(plane.shift)) if plane.shift else part
            code = part if code is None else T.bitwise_or(code, part)
        return code

    def _value(self, code: Expr) -> Expr:
        if self.layout.lane == 8:
            # Packed codes count from the smallest value; the sum of x corrects for it, as on integer cores.
            return T.Cast("float32", code)
        return T.Cast("float32", self.element.evaluate(code, TirOps()))
