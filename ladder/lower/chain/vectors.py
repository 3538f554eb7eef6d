"""Vectors of neighbouring elements in a GPU thread's registers: loads and stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.graph import Graph
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.dialect import Dialect, from_words, halves_of
from ladder.lower.chain.element_types import computed_type, stored_type
from ladder.lower.chain.indices import Index
from ladder.lower.chain.nest import BYTES, is_zero
from ladder.lower.chain.values import Values

ACCESS_BYTES = 16
"""Bytes of one access at most."""

VECTORS = frozenset(BYTES)
"""Types in memory of which vectors are loaded and stored."""


@dataclass
class Shared:
    """A vector in shared memory.

    words: How many it has.
    places: First word of each access.
    half: Of a single element of 16 bits: which half of its word it is.
    """

    dialect: Dialect
    words: int
    places: tuple[Expr, ...]
    half: Expr = None
    registers: Any = None

    def load(self) -> Any:
        """Return its words in registers, read at the first use."""
        if self.registers is None:
            self.registers = b.local(self.words, "uint32")
            for (first, count), place in zip(_accesses(self.words), self.places, strict=True):
                self.dialect.load(self.registers, first, count, self.dialect.shared, (place,))
        return self.registers

    def element(self, lane: int, dtype: str) -> Expr:
        """Return the bits of one of its elements."""
        if self.half is None:
            return element(self.load(), lane, dtype)
        return T.Cast("uint16", self.load()[0] >> (T.Cast("uint32", self.half) * T.uint32(16)))


class Vectors:
    """Loads and stores of one kernel.

    buffers: Input -> argument.
    address: ``(input, index)`` -> elements before that one.
    """

    def __init__(
        self,
        dialect: Dialect,
        graph: Graph,
        values: Values,
        buffers: Mapping[str, Any],
        address: Callable[[str, Index], Expr],
    ) -> None:
        self.dialect = dialect
        self.graph, self.values, self.buffers, self.address = graph, values, buffers, address
        self.width = 1
        """Elements of the vectors that are made now."""
        self.lane = 0
        """Which of them."""
        self.words: dict[Any, Any] = {}
        self.of_rows = False
        """Whether a thread reads all elements of rows: by accesses that hold some of them, in any order."""
        self.holds = False
        """Whether single elements stay in registers as vectors do, to be read again."""
        self.around_borders = False
        """Whether some elements of vectors are at borders: the others are read as parts of vectors."""
        self.side_by_side: set[Any] = set()
        """Addresses of elements that a vector reads beside each other, in either order."""
        self.transposed: dict[Any, Shared] = {}
        """Vectors that lie in shared memory, by input, width and address less lane."""

    def load(self, name: str, index: Index) -> Expr:
        """Return an element of an input, computed type; the first of an aligned vector brings all."""
        kind = self.graph.tile(name).ttype.name
        dtype, wanted = stored_type(kind), computed_type(kind)
        if self.values.numbers and index:
            index = (*(0 for _ in index[1:]), self.address(name, index))
        wide = self.width > 1 or bool(self.transposed)
        bits = self._of_vector(name, index, dtype) if wide and index and not self.of_rows else None
        bits = self._of_access(name, index, dtype) if self.of_rows and index else bits
        if bits is None:
            bits = self._alone(name, index, dtype)
        if bits is None:
            return self.dialect.element(self.buffers[name], index or (0,), dtype, wanted)
        return self.dialect.widened(bits, dtype, wanted)

    def _of_vector(self, name: str, index: Index, dtype: str) -> Expr | None:
        """Return the bits of an element of a vector in registers; None if none can be loaded here."""
        guards = [self.values.resolved(guard) for guard in self.values.guards]
        if (guards and self.values.keep is None) or dtype not in VECTORS:
            return None
        base = self.values.simplified(self.address(name, index) - self.lane)
        hashed = base if isinstance(base, int) else tvm_ffi.structural_hash(base)
        key = (name, self.width, hashed, *map(tvm_ffi.structural_hash, guards))
        if key in self.transposed:
            return self.transposed[key].element(self.lane, dtype)
        if self.width == 1:
            return None
        if key not in self.words:
            if self.lane or not self.is_aligned(name, base, self.width):
                return None if guards else self._of_neighbours(name, index, dtype)
            self.words[key] = self._fetched(name, index, dtype, guards)
        return element(self.words[key], self.lane, dtype)

    def _of_access(self, name: str, index: Index, dtype: str) -> Expr | None:
        """Return the bits of an element of the longest access that is known to hold it; None if none is."""
        if self.values.guards or dtype not in VECTORS:
            return None
        at = self.values.simplified(self.address(name, index))
        for width in (ACCESS_BYTES >> k for k in range(4)):
            lane = self.values.simplified(tirx.floormod(at, width))
            if width * BYTES[dtype] > ACCESS_BYTES or not isinstance(lane, int):
                continue
            begin = self.values.simplified(at - lane)
            if not self.is_aligned(name, begin, width):
                continue
            key = (name, width, begin if isinstance(begin, int) else tvm_ffi.structural_hash(begin))
            if key not in self.words:
                self.words[key] = b.local(width * BYTES[dtype] // 4, "uint32")
                self.fetch(name, _moved(index, -lane), self.words[key], width)
            return element(self.words[key], lane, dtype)
        return None

    def _of_neighbours(self, name: str, index: Index, dtype: str) -> Expr | None:
        """Return an element of a vector in registers, or of one that is loaded for several.

        That is the one behind a vector, as every second element is read, and where elements are read side by
        side, but no vector begins with the first.
        """
        at = self.values.simplified(self.address(name, index))
        lane = self.values.simplified(tirx.floormod(at, self.width))
        if not isinstance(lane, int):
            return None

        def key(begin: Expr) -> Any:
            begin = self.values.simplified(begin)
            return name, self.width, begin if isinstance(begin, int) else tvm_ffi.structural_hash(begin)

        found = key(at - lane)
        if found not in self.words:
            follows = not lane and key(at - self.width) in self.words
            wanted = follows or self.around_borders or place_of(name, at) in self.side_by_side
            if not wanted or not self.is_aligned(name, at - lane, self.width):
                return None
            self.words[found] = self._fetched(name, _moved(index, -lane), dtype, ())
        return element(self.words[found], lane, dtype)

    def _alone(self, name: str, index: Index, dtype: str) -> Expr | None:
        """Return the bits of an element that is kept, or that conditions guard: loaded under them, else None.

        A conditional expression would load it, and wait for it, in one of two branches.
        """
        wanted = (bool(self.values.guards) or self.holds) and self.values.keep is not None
        if not wanted or BYTES.get(dtype, 0) not in (2, 4, 8):
            return None
        guards = [self.values.resolved(guard) for guard in self.values.guards]
        at = self.address(name, index)
        place = at if isinstance(at, int) else tvm_ffi.structural_hash(at)
        key = (name, 0, place, *map(tvm_ffi.structural_hash, guards))
        if key not in self.words:
            bits = 8 * BYTES[dtype]
            register = b.local(1, f"uint{bits}")
            if guards:
                b.store(register, tirx.const(0, f"uint{bits}"), 0)
            with b.where(*guards):
                self.dialect.load_one(register, self.buffers[name], index or (0,))
            self.words[key] = register
        return self.words[key][0]

    def note(self, reads: Sequence[Sequence[tuple[str, Expr]]]) -> None:
        """Note what lanes read side by side, given what the first, the second and the last one read."""
        self.side_by_side.clear()
        first, second, last = reads
        if not len(first) == len(second) == len(last):
            return
        for (name, begin), (_, other), (_, end) in zip(first, second, last, strict=True):
            step = self.values.simplified(other - begin)
            whole = isinstance(step, int) and abs(step) == 1
            if whole and self.values.simplified(end - begin) == step * (self.width - 1):
                lanes = (self.values.simplified(begin + step * lane) for lane in range(self.width))
                self.side_by_side.update(place_of(name, lane) for lane in lanes)

    def is_shifted(self, name: str, base: Expr, width: int) -> bool:
        """Tell whether it is known which elements of whole accesses come from ``base`` on."""
        lane = self.values.simplified(tirx.floormod(base, width))
        return isinstance(lane, int) and self.is_aligned(name, self.values.simplified(base - lane), width)

    def is_aligned(self, name: str, base: Expr, width: int) -> bool:
        """Tell whether ``width`` elements from ``base`` on are whole accesses within the input."""
        dtype = stored_type(self.graph.tile(name).ttype.name)
        size = BYTES.get(dtype, 0) * width
        if dtype not in VECTORS or size not in (4, 8, 16, 32, 64):
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
        with b.where(*guards):
            self.fetch(name, index, registers, self.width)
        return registers

    def fetch(self, name: str, index: Index, registers: Any, width: int) -> None:
        """Load neighbouring elements from an index on."""
        size = BYTES[stored_type(self.graph.tile(name).ttype.name)]
        for first, count in _accesses(width * size // 4):
            at = _moved(index, first * 4 // size)
            self.dialect.load(registers, first, count, self.buffers[name], at)

    def store(self, buffer: Any, dtype: str, places: Sequence[Index], found: Sequence[Expr]) -> None:
        """Store neighbouring elements, already of their stored type but for halves, in wide accesses."""
        size = BYTES.get(dtype, 1)
        if len(places) * size % 4 or dtype not in VECTORS:
            for place, value in zip(places, found, strict=True):
                b.store(buffer, self.dialect.rounded(value, dtype), *(place or (0,)))
            return
        words = self.dialect.packed(found, dtype)
        for first, count in _accesses(len(words)):
            at = _moved(places[0], first * 4 // size)
            self.dialect.store(buffer, at, words[first : first + count])


def place_of(name: str, address: Expr) -> Any:
    """Return what stands for an address in sets."""
    return name, address if isinstance(address, int) else tvm_ffi.structural_hash(address)


def _moved(index: Index, elements: int) -> Index:
    """Return an index some elements further on; that of a tensor without axes is its only element's."""
    return (*index[:-1], index[-1] + elements) if index else (elements,)


def _accesses(words: int) -> list[tuple[int, int]]:
    """Return (first word, words) of each access: as many words as divide a vector, a power of two."""
    count = min(words & -words, ACCESS_BYTES // 4)
    return [(first, count) for first in range(0, words, count)]


def element(words: Any, lane: int, dtype: str) -> Expr:
    """Return the bits of one element of a vector as it is stored."""
    if BYTES[dtype] == 1:
        return T.Cast("uint8", words[lane // 4] >> T.uint32(8 * (lane % 4)))
    if BYTES[dtype] == 8:
        return from_words([words[2 * lane], words[2 * lane + 1]], "uint64")
    return words[lane] if BYTES[dtype] == 4 else halves_of(words, lane)
