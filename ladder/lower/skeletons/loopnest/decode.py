"""From packed words to multiplicands: by table in registers or memory, or by the type's decode expression.

Every decoder reads one row block and unit and returns what one step (E columns) multiplies:

* bfloat16 operand: one uint16x32, a pair of columns per row;
* float32 operand: E vectors float32x16, one per column;
* digits: one uint16x32, a pair of integers per row;
* int8 operand: one uint32x16 of four unsigned bytes per row, counted from the smallest value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.program import Copy, TileProgram
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import tables
from ladder.lower.cpu import vectors as v
from schedules.cpu_layout import LANES, CpuLayout, Plane
from schedules.instructions import BYTE_DIGITS
from tile_types import TirOps, TType
from tile_types.forms import Bytes, byte_form

Bits = np.ndarray[Any, Any]

HALF = 32
"""16-bit elements of a vector."""


@dataclass
class Unit:
    """The packed words of one row block and unit, loaded when first needed.

    words: The packed array.
    block, unit: Indices into it.
    ahead: Units by which prefetches run ahead; 0: none.
    units, skipped: Units of a row block, and row blocks from one tile to the next: there prefetches go on.
    """

    layout: CpuLayout
    words: Any
    block: Expr
    unit: Expr
    ahead: int = 0
    units: Expr = None
    skipped: int = 0
    loaded: dict[int, Expr] = field(default_factory=dict)

    def vector(self, plane: Plane, step: int) -> Expr:
        """Return the uint32x16 that holds the plane's bits of ``step``."""
        index = plane.start + step // plane.slots
        if index not in self.loaded:
            if self.ahead:
                after = self.unit + self.ahead
                jump = tirx.Select(after >= self.units, (self.skipped - 1) * self.units, T.int32(0))
                line = self.words[self.block, after + jump, index * LANES]
                v.prefetch(T.address_of(line))
            self.loaded[index] = b.bind(self.words[self.block, self.unit, v.lanes(index * LANES)])
        return self.loaded[index]

    def lane(self, plane: Plane, step: int, lane: Expr) -> Expr:
        """Return one uint32 of that vector, for loops that TVM vectorises."""
        return self.words[self.block, self.unit, (plane.start + step // plane.slots) * LANES + lane]


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
    if recipe == "extend":
        return ExtendingDecoder(PairTable(layout, element), made.ttype)
    if made.ttype == "int16":
        return PairDecoder(IntegerTable(layout, element))
    if made.ttype == "bfloat16":
        return PairDecoder(PairTable(layout, element, rounded=True)) if recipe == "lookup" else RawPairs()
    if recipe == "lookup":
        return FloatDecoder(PairTable(layout, element))
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


BYTE_LANE = 8
"""Bits of an element of a lane that is read as bytes."""


def narrow_places(widest: int, width: int, step: int) -> tuple[int, list[int]]:
    """Return where a narrower plane has the bits of the codes that a step reads of the widest.

    widest, width: Bits of a code in each plane, whose codes lie in halves of 32-bit lanes.
    step: Of a unit that is read as bytes.
    Returns: The line of the plane within a unit, and the first bits of the codes of eight bytes there.
    """
    packed, slots, ratio = 2 * BYTE_LANE // widest, BYTE_LANE // widest, widest // width
    line, slot = divmod(step, slots)
    first = line % ratio * packed + slot
    return line // ratio, [
        16 * element + (first + half * slots) * width for element in range(4) for half in range(2)
    ]


def form_of(element: TType) -> Bytes:
    """Return the bytes of a type that has them, as its program says."""
    form = byte_form(element)
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
        word = self._codes(unit, step)
        if form.flip is None:
            return [b.bind(v.as_type(v.permute_bytes(self.table, v.as_type(word, "uint8x64")), "uint32x16"))]
        if bits < BYTE_LANE:
            word = v.masked(word, ((1 << bits) - 1) * 0x01010101, "uint32", LANES)
        flipped = v.constant(form.flip * 0x01010101, "uint32")
        return [b.bind(T.bitwise_xor(word, flipped) if form.flip else word)]

    def _codes(self, unit: Unit, step: int) -> Expr:
        """Return the codes of a step in the low bits of bytes; bits above are arbitrary."""
        widest, *rest = self.layout.planes
        right = widest.width * (step % widest.slots)
        codes = v.shifted(unit.vector(widest, step), right, "uint32", LANES)
        for plane in rest:
            line, places = narrow_places(widest.width, plane.width, step)
            words = v.as_type(unit.vector(plane, line * plane.slots), "uint8x64")
            part = v.shifted_octets(words, [place - plane.shift for place in places])
            low = ((1 << plane.shift) - 1) * 0x01010101
            codes = T.bitwise_or(
                v.masked(codes, low, "uint32", LANES),
                v.masked(v.as_type(part, "uint32x16"), low ^ 0xFFFFFFFF, "uint32", LANES),
            )
        return codes


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
        return b.bind(result)


class IntegerTable(PairTable):
    """Values that are integers of 16 bits."""

    def _bits(self) -> Bits:
        return self.element.values().astype(np.int16).view(np.uint16)

    def _upper(self) -> Bits:
        return self._bits()


class LookupTable:
    """A table of 2, 4, ... 256 uint16 in vector registers, 32 entries each."""

    def __init__(self, values: Bits) -> None:
        count = len(values)
        # The upper half of a sign-magnitude type is the lower half with the sign set.
        self.signed = count == 256 and np.array_equal(values[128:], values[:128] | 0x8000)
        kept = values[:128] if self.signed else values
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


class FloatDecoder(PairDecoder):
    """Look pairs up and split them into one float32 vector per column."""

    def __call__(self, unit: Unit, step: int) -> list[Expr]:
        codes = self.pairs.codes(unit, step)
        word = b.bind(v.as_type(self.pairs.upper.look_up(codes), "uint32x16"))
        even, odd = v.shifted(word, -16, "uint32", LANES), v.masked(word, 0xFFFF0000, "uint32", LANES)
        if self.pairs.lower is not None:
            rest = b.bind(v.as_type(self.pairs.lower.look_up(codes), "uint32x16"))
            even = T.bitwise_or(even, v.masked(rest, 0xFFFF, "uint32", LANES))
            odd = T.bitwise_or(odd, v.shifted(rest, 16, "uint32", LANES))
        return [b.bind(v.as_type(half, "float32x16")) for half in (even, odd)]


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
