"""Vectors of neighbouring elements in a GPU thread's registers: loads, stores, and what is cheap on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.graph import Graph
from ladder.lower import builder as b
from ladder.lower.chain.nest import BYTES, is_zero
from ladder.lower.chain.values import Index, Values, computed_type, stored_type

Expr = Any

WIDE = 16
"""Bytes of one access at most."""

ACCESS = {16: ".v4", 8: ".v2", 4: ""}
"""Bytes of an access -> its suffix in PTX."""

LOG2_E = 1.4426950408889634

HELPER = """
__forceinline__ __device__ float ladder_{name}(float x) {{
  float result;
  asm("{instruction} %0, %1;" : "=f"(result) : "f"(x));
  return result;
}}
"""
INSTRUCTIONS = {"reciprocal": "rcp.approx.ftz.f32", "power_of_two": "ex2.approx.ftz.f32"}
"""Helper -> its one instruction; what is too small for a normal float32 becomes 0."""

PACK = """
__forceinline__ __device__ unsigned int ladder_pack_{name}(float low, float high) {{
  unsigned int packed;
  asm("cvt.rn.{ptx}.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}}
"""
PACKED = {"float16": "f16x2", "bfloat16": "bf16x2"}


def helped(name: str, x: Expr) -> Expr:
    """Return one of `INSTRUCTIONS` of a float32."""
    source = HELPER.format(name=name, instruction=INSTRUCTIONS[name])
    return b.call_inline(f"ladder_{name}", source, "float32", x)


def _exponential(x: Expr) -> Expr:
    """Return a power of two: one instruction of the special function unit and one product."""
    return helped("power_of_two", x * T.float32(LOG2_E)) if str(x.ty.dtype) == "float32" else T.exp(x)


def _quotient(x: Expr, y: Expr) -> Expr:
    """Return a product with a reciprocal, both within 2^-22."""
    return x * helped("reciprocal", y) if str(y.ty.dtype) == "float32" else tirx.div(x, y)


APPROXIMATE: Mapping[str, Callable[..., Expr]] = {"exp": _exponential, "div": _quotient, "rsqrt": T.rsqrt}
"""What operators become where every result is rounded to 16 bits: their errors vanish in that."""


@dataclass
class Shared:
    """A vector in shared memory.

    Parameters
    ----------
    buffer
        Words of shared memory.
    words
        How many it has.
    places
        First word of each access.
    """

    buffer: Any
    words: int
    places: tuple[Expr, ...]
    registers: Any = None

    def load(self) -> Any:
        """Return its words in registers, read at the first use."""
        if self.registers is None:
            self.registers = b.local(self.words, "uint32")
            places = {
                first: place for (first, _), place in zip(_accesses(self.words), self.places, strict=True)
            }
            _access("ld.shared", self.words, self.registers, lambda at: self.buffer.ptr_to([places[at]]))
        return self.registers


class Vectors:
    """Loads and stores of one kernel.

    Parameters
    ----------
    graph
        The chain.
    values
        Its values.
    buffers
        Input -> argument.
    address
        ``(input, index)`` -> elements before that one.
    """

    def __init__(
        self,
        graph: Graph,
        values: Values,
        buffers: Mapping[str, Any],
        address: Callable[[str, Index], Expr],
    ) -> None:
        self.graph, self.values, self.buffers, self.address = graph, values, buffers, address
        self.width = 1
        """Elements of the vectors that are made now."""
        self.lane = 0
        """Which of them."""
        self.words: dict[Any, Any] = {}
        self.exchanged: dict[Any, Shared] = {}
        """Vectors that lie in shared memory, by input, width and address less lane."""

    def load(self, name: str, index: Index) -> Expr:
        """Return an element of an input, computed type; the first of an aligned vector brings all."""
        kind = self.graph.tile(name).ttype.name
        dtype, wanted = stored_type(kind), computed_type(kind)
        value = self._of_vector(name, index, dtype) if self.width > 1 and index else None
        if value is None:
            value = self._alone(name, index, dtype)
        if value is None:
            value = self.buffers[name][index or (0,)]
        return value if dtype == wanted else T.Cast(wanted, value)

    def _of_vector(self, name: str, index: Index, dtype: str) -> Expr | None:
        """Return an element of a vector in registers; None if none can be loaded here."""
        guards = [self.values.simplified(guard) for guard in self.values.guards]
        if (guards and self.values.keep is None) or BYTES.get(dtype, 0) not in (2, 4):
            return None
        base = self.values.simplified(self.address(name, index) - self.lane)
        hashed = base if isinstance(base, int) else tvm_ffi.structural_hash(base)
        key = (name, self.width, hashed, *map(tvm_ffi.structural_hash, guards))
        if key in self.exchanged:
            return element(self.exchanged[key].load(), self.lane, dtype)
        if key not in self.words:
            if self.lane or not self.is_aligned(name, base, self.width):
                return None
            self.words[key] = self._fetched(name, index, dtype, guards)
        return element(self.words[key], self.lane, dtype)

    def _alone(self, name: str, index: Index, dtype: str) -> Expr | None:
        """Return an element that conditions guard, loaded under them; None where a plain read does.

        A conditional expression would load it, and wait for it, in one of two branches.
        """
        if not self.values.guards or self.values.keep is None or BYTES.get(dtype, 0) not in (2, 4):
            return None
        guards = [self.values.simplified(guard) for guard in self.values.guards]
        at = self.address(name, index)
        place = at if isinstance(at, int) else tvm_ffi.structural_hash(at)
        key = (name, 0, place, *map(tvm_ffi.structural_hash, guards))
        if key not in self.words:
            bits = 8 * BYTES[dtype]
            register = b.local(1, f"uint{bits}")
            b.store(register, tirx.const(0, f"uint{bits}"), 0)
            with b.when(_all(guards)):
                b.ptx(f"ld.global.u{bits}", register[0], self.buffers[name].ptr_to(list(index or (0,))))
            self.words[key] = register
        return T.reinterpret(dtype, self.words[key][0])

    def is_aligned(self, name: str, base: Expr, width: int) -> bool:
        """Tell whether ``width`` elements from ``base`` on are whole accesses within the input."""
        dtype = stored_type(self.graph.tile(name).ttype.name)
        size = BYTES.get(dtype, 0) * width
        if dtype not in ("float32", "float16", "bfloat16", "int32") or size not in (4, 8, 16, 32):
            return False
        total: Expr = 1
        for extent in self.graph.tile(name).shape:
            total = total * self.values.extent(extent)
        return all(is_zero(self.values.simplified(tirx.floormod(e, width))) for e in (base, total))

    def _fetched(self, name: str, index: Index, dtype: str, guards: Sequence[Expr]) -> Any:
        """Return a vector in registers; zeros where a condition says that there is none."""
        count = self.width * BYTES[dtype] // 4
        registers = b.local(count, "uint32")
        if not guards:
            self.fetch(name, index, registers, self.width)
            return registers
        for word in range(count):
            b.store(registers, T.uint32(0), word)
        with b.when(_all(guards)):
            self.fetch(name, index, registers, self.width)
        return registers

    def fetch(self, name: str, index: Index, registers: Any, width: int) -> None:
        """Load neighbouring elements from an index on."""
        size = BYTES[stored_type(self.graph.tile(name).ttype.name)]
        buffer = self.buffers[name]
        _access(
            "ld.global",
            width * size // 4,
            registers,
            lambda at: buffer.ptr_to([*index[:-1], index[-1] + at * 4 // size]),
        )

    def store(self, buffer: Any, dtype: str, places: Sequence[Index], found: Sequence[Expr]) -> None:
        """Store neighbouring elements, already of their stored type but for halves, in wide accesses."""
        size = BYTES.get(dtype, 1)
        if len(places) * size % 4 or dtype not in ("float32", "float16", "bfloat16", "int32"):
            for place, value in zip(places, found, strict=True):
                b.store(buffer, rounded(value, dtype), *(place or (0,)))
            return
        words = packed(found, dtype)
        for first, count in _accesses(len(words)):
            at = [*places[0][:-1], places[0][-1] + first * 4 // size]
            spelling = f"st.global{ACCESS[count * 4]}.u32"
            b.ptx(spelling, buffer.ptr_to(at), *words[first : first + count])


def _all(conditions: Sequence[Expr]) -> Expr:
    whole = conditions[0]
    for condition in conditions[1:]:
        whole = tirx.And(whole, condition)
    return whole


def _accesses(words: int) -> list[tuple[int, int]]:
    """Return (first word, words) of each access."""
    count = min(words, WIDE // 4)
    return [(first, count) for first in range(0, words, count)]


def _access(spelling: str, words: int, registers: Any, place: Callable[[int], Any]) -> None:
    for first, count in _accesses(words):
        target = (registers[first + word] for word in range(count))
        b.ptx(f"{spelling}{ACCESS[count * 4]}.u32", *target, place(first))


def element(words: Any, lane: int, dtype: str) -> Expr:
    """Return one element of a vector as it is stored."""
    if BYTES[dtype] == 4:
        return T.reinterpret(dtype, words[lane])
    half = words[lane // 2] >> T.uint32(16 * (lane % 2))
    return T.reinterpret(dtype, T.Cast("uint16", half))


def rounded(value: Expr, dtype: str) -> Expr:
    """Return a value as it is stored."""
    return value if str(value.ty.dtype) == dtype else T.Cast(dtype, value)


def packed(found: Sequence[Expr], dtype: str) -> list[Expr]:
    """Return elements as 32-bit words, the first in the low bits."""
    if BYTES[dtype] == 4:
        return [b.bind(T.reinterpret("uint32", rounded(value, dtype))) for value in found]
    return [b.bind(_pair(low, high, dtype)) for low, high in zip(found[::2], found[1::2], strict=True)]


def _pair(low: Expr, high: Expr, dtype: str) -> Expr:
    """Return two elements in one word: what was loaded as it is, else rounded together."""
    plain = [_unchanged(value, dtype) for value in (low, high)]
    if None not in plain:
        first, second = (T.Cast("uint32", T.reinterpret("uint16", value)) for value in plain)
        return first | (second << T.uint32(16))
    source = PACK.format(name=dtype, ptx=PACKED[dtype])
    floats = [
        value if str(value.ty.dtype) == "float32" else T.Cast("float32", value) for value in (low, high)
    ]
    return b.call_inline(f"ladder_pack_{dtype}", source, "uint32", *floats)


def _unchanged(value: Expr, dtype: str) -> Expr | None:
    """Return what was widened to ``value``, if that is all that happened to it."""
    if str(value.ty.dtype) == dtype:
        return value
    if isinstance(value, tirx.Cast) and str(value.value.ty.dtype) == dtype:
        return value.value
    return None
