"""Interface to GPU-specific code of chains: launches, accesses, lane shuffles, 16-bit floats.

A vendor's table of these is a `Dialect`; `ladder.lower.chain.gpu` emits the same loop nest in each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.scalars import reinterpreted
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.conversions import decoded, encoded, round_through
from ladder.lower.chain.element_types import HALVES, INTEGERS16, NARROW
from ladder.lower.chain.gathers import no_row_number
from ladder.lower.chain.indices import Index
from ladder.lower.gpu.emission import TirMachine
from targets import TileDevice
from tile_types.errors import ScheduleError

PAIR_OF_BYTES, PAIR_OF_HALVES = 0x0040, 0x5410
"""Selectors of the first byte, or the first two, of each of two words."""

Early = tuple[int, Callable[[Expr], Expr]]
"""Cache lines of an input, and address of one of them."""


class Dialect(ABC):
    """How one vendor's kernels are written."""

    functions: ClassVar[Mapping[str, Callable[..., Expr]]]
    """Operators that this device computes otherwise than the operator table says."""

    cheap: ClassVar[Mapping[str, Callable[..., Expr]]]
    """Approximations of operators whose every result is rounded to 16 bits: their errors vanish in that."""

    machine: ClassVar[type[TirMachine]]
    """Emits operations on words."""

    def __init__(self, device: TileDevice) -> None:
        self.device = device
        self.wave = device.warp
        """Lanes that exchange values."""
        self.shared: Any = None
        """Shared memory as uint32 words, once a kernel with some has begun."""
        self.no_row: b.Variable | None = None
        """Whether a thread was given a number of no row, of kernels that read rows by number."""

    @property
    def noalias(self) -> bool:
        """Whether compilers may take arguments for apart from each other, and read them at any time."""
        return True

    @property
    def by_inverse(self) -> Callable[[Expr, Expr, Expr], Expr] | None:
        """What returns ``x / divisor`` of float32, given the reciprocal, rounded as a division is."""
        return None

    @property
    def by_near_inverse(self) -> Callable[[Expr, Expr], Expr] | None:
        """What returns the same of a divisor from 1 on, of which it approximates the reciprocal itself."""
        return None

    # ---- launch --------------------------------------------------------------------------------------
    @abstractmethod
    def start(self, blocks: Expr, threads: int, words: int, inputs: Sequence[Early]) -> tuple[Expr, Expr]:
        """Begin the device's part, with 32-bit words of shared memory. Return block and thread.

        inputs: What is to be brought nearer while the kernel before may still run.
        """

    @abstractmethod
    def sync(self) -> None:
        """Emit a barrier of the block."""

    def watch_rows(self) -> None:
        """Begin to note whether data names rows that are not there, before the first `row_number`."""
        self.no_row = b.Variable("int32", 0)

    def finish(self) -> None:  # noqa: B027
        """End the kernel: with an error where data named a row that is not there."""

    # ---- accesses ------------------------------------------------------------------------------------
    @abstractmethod
    def load(
        self, registers: Any, first: int, count: int, buffer: Any, index: Index, *, once: bool = False
    ) -> None:
        """Emit one access: ``count`` words of a buffer, global or shared, into ``registers[first..]``.

        once: Whether nothing else reads them, so that caches need not keep them.
        """

    @abstractmethod
    def load_one(self, register: Any, buffer: Any, index: Index) -> None:
        """Emit the load of one element into a register of its size, where the branch around says so."""

    @abstractmethod
    def store(self, buffer: Any, index: Index, words: Sequence[Expr]) -> None:
        """Emit one access: words become the elements from an index on."""

    def combine(self, operation: str, buffer: Any, index: Index, dtype: str, found: Sequence[Expr]) -> None:
        """Emit atomic operations: neighbouring elements of a stored type are combined with those in memory.

        operation: As of the operator ``put``.
        """
        raise ScheduleError("no sums into rows by number in kernels of chains for this device")

    def add_shared(self, place: Expr, kind: str, value: Expr) -> None:
        """Emit an atomic sum with a word of shared memory; ``kind`` is PTX's name of its type."""
        raise ScheduleError("no sums in shared memory in kernels of chains for this device")

    def row_number(self, value: Expr, extent: Expr, from_end: bool) -> Expr:
        """Return what data says is a row of ``extent``; where it is none, `finish` ends with an error.

        from_end: Whether negative numbers count from the end.
        """
        return no_row_number(value, extent, from_end)

    # ---- between lanes -------------------------------------------------------------------------------
    @abstractmethod
    def shuffle(self, value: Expr, distance: int, thread: Expr) -> Expr:
        """Return the 32-bit value of the lane at a distance, a power of two below the wave.

        Where all lanes of each half hold the same, as in a reduction from distance 1 on, it may be another
        lane of the other half.

        thread: This thread's number within the block.
        """

    def largest(self, value: Expr, dtype: str) -> Expr | None:
        """Return the largest of the wave's values, on all lanes, in one step; None where there is none.

        A NaN among them was found by `maximum`.
        """
        return None

    # ---- elements ------------------------------------------------------------------------------------
    def widened(self, bits: Expr, dtype: str, wanted: str) -> Expr:
        """Return an element of a stored type, given as unsigned bits, in the type that is computed with."""
        value = T.reinterpret(dtype, bits)
        return value if dtype == wanted else T.Cast(wanted, value)

    def element(self, buffer: Any, index: Index, dtype: str, wanted: str) -> Expr:
        """Return one element of a buffer in the type that is computed with."""
        value = buffer[index]
        return value if dtype == wanted else T.Cast(wanted, value)

    def unchanged(self, value: Expr, dtype: str) -> Expr | None:
        """Return the bits of what was widened to ``value``, if that is all that happened to it."""
        if isinstance(value, tirx.Cast) and str(value.value.ty.dtype) == dtype:
            value = value.value
        return reinterpreted("uint16", value) if str(value.ty.dtype) == dtype else None

    def rounded(self, value: Expr, dtype: str) -> Expr:
        return value if str(value.ty.dtype) == dtype else T.Cast(dtype, value)

    def rounded_through(self, value: Expr, dtype: str, name: Callable[[Expr], Expr]) -> Expr:
        """Return a float32 rounded to a 16-bit type, as a float32; ``name`` names what is used twice."""
        return round_through(value, dtype)

    @abstractmethod
    def rounded_pair(self, low: Expr, high: Expr, dtype: str) -> Expr:
        """Return two float32 values as 16-bit floats in one word, rounded to nearest even."""

    # ---- 8-bit codes ---------------------------------------------------------------------------------
    def permute(self, low: Expr, high: Expr, selector: int) -> Expr:
        """Return four bytes of two words; ``selector`` as for PTX's prmt."""
        m = self.machine()
        return m.permute(m.input(low), m.input(high), m.constant(selector)).content

    @abstractmethod
    def narrow_pair(self, low: Expr, high: Expr, dtype: str) -> Expr:
        """Return two codes of an 8-bit float in the low half of a word, from float32 bits, rounded once."""

    def encoded(self, value: Expr, dtype: str, within: bool = False) -> Expr:
        """Return the code of a float32, an int32, as `ladder.lower.chain.conversions.encoded`."""
        return encoded(value, dtype, within)

    def decoded(self, code: Expr, dtype: str) -> Expr:
        """Return the float32 of a code, as `ladder.lower.chain.conversions.decoded`."""
        return decoded(code, dtype)

    # ---- made of these -------------------------------------------------------------------------------
    def packed(self, found: Sequence[Expr], dtype: str) -> list[Expr]:
        """Return elements as 32-bit words, the first in the low bits."""
        if dtype in NARROW:
            parts = [reinterpreted("uint32", T.Cast("int32", value)) for value in found]
            for selector in (PAIR_OF_HALVES,) if dtype in INTEGERS16 else (PAIR_OF_BYTES, PAIR_OF_HALVES):
                both = zip(parts[::2], parts[1::2], strict=True)
                parts = [self.permute(*two, selector) for two in both]
            return parts
        if dtype not in HALVES:
            return [b.bind(word) for value in found for word in words_of(self.rounded(value, dtype), dtype)]
        return [
            b.bind(self._pair(low, high, dtype)) for low, high in zip(found[::2], found[1::2], strict=True)
        ]

    def _pair(self, low: Expr, high: Expr, dtype: str) -> Expr:
        """Return two elements in one word: what was loaded as it is, else rounded together."""
        plain = [self.unchanged(value, dtype) for value in (low, high)]
        if None not in plain:
            return joined(*plain)
        return self.rounded_pair(_single(low), _single(high), dtype)


def _single(value: Expr) -> Expr:
    return value if str(value.ty.dtype) == "float32" else T.Cast("float32", value)


def words_of(value: Expr, dtype: str) -> list[Expr]:
    """Return a number as 32-bit words, the low one first."""
    if not dtype.endswith("64"):
        return [reinterpreted("uint32", value)]
    held = b.Variable(dtype, value).value  # TVM narrows what it computes, but nothing that lies in memory
    bits = b.bind(reinterpreted("uint64", held))
    return [T.Cast("uint32", bits), T.Cast("uint32", bits >> T.uint64(32))]


def from_words(words: Sequence[Expr], dtype: str) -> Expr:
    """Return the number whose 32-bit words these are."""
    if len(words) == 1:
        return T.reinterpret(dtype, words[0])
    low, high = (T.Cast("uint64", word) for word in words)
    return reinterpreted(dtype, low | (high << T.uint64(32)))


def joined(low: Expr, high: Expr) -> Expr:
    """Return two uint16 in one word."""
    first, second = (T.Cast("uint32", half) for half in (low, high))
    return first | (second << T.uint32(16))


def halves_of(words: Any, lane: int) -> Expr:
    """Return the uint16 of one lane of a vector of 16-bit elements."""
    return T.Cast("uint16", words[lane // 2] >> T.uint32(16 * (lane % 2)))
