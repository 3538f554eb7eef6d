"""The loop nest of a chain on NVIDIA GPUs.

Without reductions every thread takes one vector of neighbouring columns of any row. With them a row
belongs to one warp, or to one block where it is long; its lanes hold vectors of columns in turn, and
reductions end in shuffles, then in shared memory. Reductions of a few elements (windows) run in one thread
each. Elements are read in 16 bytes where index and shape prove that they lie so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.build import node_attributes
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.lower import builder as b
from ladder.lower.chain.nest import BYTES, Nest, Reduction, is_zero
from ladder.lower.chain.values import Index, computed_type, stored_type
from ladder.lower.cuda.launch import Overlap
from ladder.partition.rows import REDUCTIONS
from schedules.schedule import check
from targets import TileDevice

Expr = Any

WARP = 32
BLOCK = 256
"""Threads of a block whose threads have nothing to do with each other."""

LONGEST = 1024
"""Threads of a block that share a row."""

WINDOW = 64
"""Elements up to which one thread reduces alone."""

WIDE = 16
"""Bytes of one access."""

SLOTS = 32
"""Reductions over a block that one kernel can hold; each has its own place, so one barrier is enough."""

LOAD, STORE = "ld.global.v4.u32", "st.global.v4.u32"


class GpuNest(Nest):
    """One kernel being emitted."""

    def __init__(self, graph: Graph, device: TileDevice) -> None:
        super().__init__(graph, device, align=WIDE)
        self.overlap = Overlap(device)
        self.width = self.vector_width()
        self.words: dict[Any, Any] = {}
        self.lane_of_vector: Expr = 0
        self.alone = False
        self.lanes = self.team()
        self.slot = 0

    # shape of the kernel --------------------------------------------------------------------------
    def vector_width(self) -> int:
        """Return the columns that a thread takes at once: 16 bytes of the narrowest float that moves."""
        tiles = [self.graph.tile(value) for value in self.graph.outputs]
        if any(len(tile.shape) == self.rows for tile in tiles):
            return 1
        widths = [BYTES.get(stored_type(tile.ttype.name), 1) for tile in tiles]
        width = WIDE // min((w for w in widths if w in (2, 4)), default=WIDE)
        extents = [tile.shape[-1] for tile in tiles]
        return width if all(isinstance(e, int) and e % width == 0 for e in extents) else 1

    def reductions(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.operator in REDUCTIONS]

    def is_flat(self) -> bool:
        """Tell whether threads work alone: nothing is reduced, or windows are."""
        extents = []
        for node in self.reductions():
            shape = self.graph.tile(node.inputs[0]).shape
            extents.append(shape[node_attributes(node)["axis"] % len(shape)])
        total = product(extents)
        numbers = all(len(self.graph.tile(value).shape) == self.rows for value in self.graph.outputs)
        return not extents or (numbers and isinstance(total, int) and total <= WINDOW)

    def team(self) -> int:
        """Return the threads that share a row."""
        if self.is_flat():
            return 1
        counts = [product(self.graph.tile(value).shape[self.rows :]) for value in self.graph.outputs]
        for node in self.reductions():
            shape = self.graph.tile(node.inputs[0]).shape
            counts.append(shape[node_attributes(node)["axis"] % len(shape)])
        known = [count for count in counts if isinstance(count, int)]
        largest = max(known) if len(known) == len(counts) else LONGEST * self.width
        vectors = -(-largest // (self.width * 2))
        return min(LONGEST, max(WARP, 1 << max(0, vectors - 1).bit_length()))

    def emit(self) -> None:
        """Emit the whole kernel."""
        self.count = self.extent(product(self.graph.tile(self.graph.outputs[0]).shape[: self.rows]))
        (self.emit_flat if self.lanes == 1 else self.emit_rows)()

    def take_over(self) -> None:
        """Let the next kernel of a plan start, and wait for those before."""
        self.overlap.release()
        self.overlap.wait()

    # threads alone ---------------------------------------------------------------------------------
    def emit_flat(self) -> None:
        """Emit one vector per thread, for every result and every piece of its columns."""
        self.alone = True
        pieces = [(value, start, stop) for value in self.graph.outputs for start, stop in self.pieces(value)]
        counts = [self.items(value, start, stop) for value, start, stop in pieces]
        most = counts[0]
        for count in counts[1:]:
            most = (
                tirx.max(most, count)
                if not (isinstance(most, int) and isinstance(count, int))
                else max(most, count)
            )
        self.overlap.declare("blockIdx.x", "threadIdx.x", shared=False)
        b.device()
        (block,) = b.block_index([tirx.floordiv(most + BLOCK - 1, BLOCK)])
        item = b.bind(block * BLOCK + b.thread_index(BLOCK))
        self.take_over()
        for (value, start, stop), count in zip(pieces, counts, strict=True):
            with b.when(item < count):
                self.flat_item(value, item, start, stop)
            self.values.forget()
            self.values.cells.clear()

    def pieces(self, value: str) -> list[tuple[Expr, Expr]]:
        """Return the pieces of the last column axis; a number has one."""
        shape = [self.extent(extent) for extent in self.graph.tile(value).shape]
        if len(shape) == self.rows:
            return [(0, 1)]
        probes = tuple(self.probe(f"p{axis}", extent) for axis, extent in enumerate(shape))
        found = self.cuts(value, probes, probes[-1], shape[-1])
        whole = all(isinstance(e, int) and e % self.width == 0 for piece in found for e in piece)
        if not whole and self.width > 1:
            self.width = 1
        return found

    def items(self, value: str, start: Expr, stop: Expr) -> Expr:
        """Return how many vectors a piece has over all rows."""
        outer = (
            self.extent(product(self.graph.tile(value).shape[: -1 or None]))
            if self.has_columns(value)
            else self.count
        )
        return outer * tirx.floordiv(stop - start, self.width) if self.has_columns(value) else outer

    def has_columns(self, value: str) -> bool:
        return len(self.graph.tile(value).shape) > self.rows

    def flat_item(self, value: str, item: Expr, start: Expr, stop: Expr) -> None:
        """Emit the vector that a thread has."""
        shape = [self.extent(extent) for extent in self.graph.tile(value).shape]
        if not self.has_columns(value):
            index = self.unravelled(item, shape)
            self.store_vector(value, [index])
            return
        chunks = self.values.simplified(tirx.floordiv(stop - start, self.width))
        chunk = b.bind(self.values.simplified(tirx.floormod(item, chunks)))
        outer = self.unravelled(b.bind(self.values.simplified(tirx.floordiv(item, chunks))), shape[:-1])
        with self.ranged(chunk, chunks) if not isinstance(chunk, int) else _nothing():
            outer = tuple(b.bind(part) for part in outer)
            for part, extent in zip(outer, shape[:-1], strict=True):
                if not isinstance(part, int):
                    self.values.analyzer.bind(part, _range(extent), True)
            self.vector(value, outer, start + chunk * self.width)

    def vector(self, value: str, outer: Index, column: Expr) -> None:
        """Emit ``width`` neighbouring elements of a result."""
        places = [(*outer, column + lane) for lane in range(self.width)]

        def body() -> None:
            self.words.clear()
            self.store_vector(value, places)
            self.words.clear()

        if self.width == 1:
            body()
            return
        width, self.width = self.width, 1  # nothing is loaded while conditions are looked for
        self.branched(value, places[0], (), partial(self.at_width, width, body))
        self.width = width

    def at_width(self, width: int, body: Callable[[], None]) -> None:
        """Emit something whose vectors have ``width`` elements."""
        before, self.width = self.width, width
        body()
        self.width = before

    def store_vector(self, value: str, places: Sequence[Index]) -> None:
        """Compute elements and store them, in one access if they are 16 bytes."""
        found = []
        for lane, place in enumerate(places):
            self.lane_of_vector = lane
            self.prepare(value, place, ())
            found.append(self.stored(value, self.values.at(value, place)))
        self.lane_of_vector = 0
        dtype = stored_type(self.graph.tile(value).ttype.name)
        with self.placed(value, places) as target:
            self.write(self.results[value], dtype, target, found)

    def write(self, target: Any, dtype: str, places: Sequence[Index], elements: Sequence[Expr]) -> None:
        """Store neighbouring elements."""
        per_access = WIDE // BYTES.get(dtype, 1)
        if len(places) % per_access or dtype not in ("float32", "float16", "bfloat16", "int32"):
            for place, element in zip(places, elements, strict=True):
                b.store(target, element, *(place or (0,)))
            return
        for first in range(0, len(places), per_access):
            words = _words(elements[first : first + per_access], dtype)
            b.ptx(STORE, target.ptr_to(list(places[first])), *words)

    # loads -----------------------------------------------------------------------------------------
    def load(self, name: str, index: Index) -> Expr:
        """Return an element; of a vector that lies in memory as it is here, the first load brings all."""
        tile = self.graph.tile(name)
        dtype, wanted = stored_type(tile.ttype.name), computed_type(tile.ttype.name)
        lane = self.lane_of_vector
        if (
            self.width > 1
            and index
            and not self.values.guards
            and self.lies_in_vectors(name, index, lane, dtype)
        ):
            value = self.from_vector(name, index, lane, dtype)
        else:
            value = self.buffers[name][index or (0,)]
        return value if dtype == wanted else T.Cast(wanted, value)

    def lies_in_vectors(self, name: str, index: Index, lane: int, dtype: str) -> bool:
        """Tell whether this and its neighbours are ``width`` elements from a multiple of ``width`` on."""
        last = self.graph.tile(name).shape[-1]
        if dtype not in ("float32", "float16", "bfloat16") or not isinstance(last, int) or last % self.width:
            return False
        return is_zero(self.values.simplified(tirx.floormod(index[-1] - lane, self.width)))

    def from_vector(self, name: str, index: Index, lane: int, dtype: str) -> Expr:
        """Return an element of a vector in registers, loading it at its first use."""
        place = (*index[:-1], self.values.simplified(index[-1] - lane))
        key = self.values.key(name, place)
        per_access = WIDE // BYTES[dtype]
        if key not in self.words:
            registers = b.local(self.width // per_access * 4, "uint32")
            for access in range(self.width // per_access):
                target = (registers[access * 4 + word] for word in range(4))
                at = [*place[:-1], place[-1] + access * per_access]
                b.ptx(LOAD, *target, self.buffers[name].ptr_to(at))
            self.words[key] = registers
        return _element(self.words[key], lane, dtype)

    # rows ------------------------------------------------------------------------------------------
    def emit_rows(self) -> None:
        """Emit a row per team of lanes."""
        teams = 4 if self.lanes == WARP else 1  # rows of several warps meet at the block's barrier
        shared = self.lanes > WARP
        self.overlap.declare("blockIdx.x", "threadIdx.x", shared=shared)
        b.device()
        (block,) = b.block_index([tirx.floordiv(self.count + teams - 1, teams)])
        thread = b.thread_index(teams * self.lanes)
        if shared:
            pool = b.shared_pool()
            self.partial = pool.alloc((SLOTS * WARP,), "float32", align=128)
            pool.commit()
        self.lane = b.bind(tirx.floormod(thread, self.lanes)) if teams > 1 else thread
        row = b.bind(block * teams + tirx.floordiv(thread, self.lanes)) if teams > 1 else block
        self.take_over()
        with b.when(row < self.count) if teams > 1 else _nothing():
            self.row(row)

    def row(self, row: Expr) -> None:
        """Emit every result of a row."""
        self.values.analyzer.bind(row, _range(self.count), True)
        index = tuple(b.bind(part) for part in self.unravelled(row, self.row_extents()))
        for part, extent in zip(index, self.row_extents(), strict=True):
            if not isinstance(part, int):
                self.values.analyzer.bind(part, _range(extent), True)
        for value in self.graph.outputs:
            self.row_result(value, index)
            self.values.forget()

    def row_result(self, value: str, row: Index) -> None:
        """Emit one result: its reductions by all lanes, then its columns."""
        columns = self.columns(value)
        probes = tuple(self.probe(f"c{axis}", extent) for axis, extent in enumerate(columns))
        self.prepare(value, (*row, *probes), probes)
        self.values.forget()
        if not columns:
            self.alone = True
            with b.when(self.lane == 0):
                self.store_vector(value, [row])
            self.alone = False
            return
        cuts = self.cuts(value, (*row, *probes), probes[-1], columns[-1])
        width = self.width
        if not all(isinstance(e, int) and e % width == 0 for piece in cuts for e in piece):
            self.width = 1
        outer = columns[0]
        for extent in columns[1:-1]:
            outer = outer * extent
        for start, stop in cuts:
            self.column_piece(value, row, columns, start, stop)
        self.width = width

    def column_piece(self, value: str, row: Index, columns: Sequence[Expr], start: Expr, stop: Expr) -> None:
        """Emit a piece of the columns: vectors go round the lanes."""
        chunks = self.values.simplified(tirx.floordiv(stop - start, self.width))
        items = chunks
        for extent in columns[:-1]:
            items = items * extent

        def item(number: Expr) -> None:
            self.alone = True
            column = start + self.values.simplified(tirx.floormod(number, chunks)) * self.width
            outer = self.unravelled(self.values.simplified(tirx.floordiv(number, chunks)), columns[:-1])
            self.vector(value, (*row, *outer), column)
            self.alone = False

        self.round_lanes(items, item)

    def round_lanes(self, items: Expr, body: Callable[[Expr], None]) -> None:
        """Emit ``body(item)`` for every item, lane by lane in turns."""
        items = self.values.simplified(items)
        turns = self.values.simplified(tirx.floordiv(items + self.lanes - 1, self.lanes))
        with b.loop(turns) as turn:
            number = b.bind(turn * self.lanes + self.lane)
            self.values.analyzer.bind(number, _range(items), True)
            with b.when(number < items):
                body(number)
                self.values.forget()

    # reductions ------------------------------------------------------------------------------------
    def reduce(self, node: Node, index: Index) -> None:
        """Emit a reduction: by the row's lanes together, or within one thread's work by it alone."""
        it = Reduction(self, node, index)
        probe = self.probe("k", it.extent)
        self.prepare(it.operand, it.at(probe), (probe,))
        self.values.forget()
        total = b.Variable(it.dtype, it.neutral)
        width, lane, words = self.width, self.lane_of_vector, self.words
        together = not self.alone
        last = it.axis == len(self.graph.tile(it.operand).shape) - 1
        nested = bool(self.values.needed(it.operand, it.at(probe)))
        usable = together and last and not nested and isinstance(it.extent, int) and it.extent % width == 0
        self.width, self.lane_of_vector, self.words = (width if usable else 1), 0, {}

        def add(position: Expr) -> None:
            self.alone = True
            self.words.clear()
            for at in range(self.width):
                self.lane_of_vector = at
                place = it.at(position + at)
                self.prepare(it.operand, place, ())
                total.set(it.combine(total.value, self.values.at(it.operand, place)))
            self.lane_of_vector = 0
            self.alone = not together

        if together:
            self.round_lanes(tirx.floordiv(it.extent, self.width), lambda number: add(number * self.width))
        else:
            with b.loop(it.extent) as position, self.ranged(position, it.extent):
                add(position)
        self.values.forget()
        self.width, self.lane_of_vector, self.words = width, lane, words
        self.keep_cell(node, index, self.over_lanes(it, total.value) if together else b.bind(total.value))

    def over_lanes(self, it: Reduction, value: Expr) -> Expr:
        """Return what all lanes of a row found, on each of them."""
        value = _shuffled(it, value, min(self.lanes, WARP))
        warps = self.lanes // WARP
        if warps <= 1:
            return value
        check(self.slot < SLOTS, f"a chain of more than {SLOTS} reductions over a block")
        place, self.slot = self.slot * WARP, self.slot + 1
        bits = value if it.dtype == "float32" else T.reinterpret("float32", value)
        with b.when(tirx.floormod(self.lane, WARP) == 0):
            b.store(self.partial, bits, place + tirx.floordiv(self.lane, WARP))
        b.block_sync()
        read = b.bind(self.partial[place + tirx.floormod(self.lane, warps)])
        read = read if it.dtype == "float32" else b.bind(T.reinterpret(it.dtype, read))
        return _shuffled(it, read, warps)


def _shuffled(it: Reduction, value: Expr, lanes: int) -> Expr:
    """Return the combination of ``lanes`` neighbouring lanes, a power of two, on each of them."""
    value, distance = b.bind(value), lanes // 2
    while distance:
        other = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), value, distance, WARP, WARP)
        value = b.bind(it.combine(value, other))
        distance //= 2
    return value


def _element(words: Any, lane: int, dtype: str) -> Expr:
    """Return one element of a vector as it is stored."""
    if BYTES[dtype] == 4:
        return T.reinterpret(dtype, words[lane])
    half = words[lane // 2] >> T.uint32(16 * (lane % 2))
    return T.reinterpret(dtype, T.Cast("uint16", half))


def _words(elements: Sequence[Expr], dtype: str) -> list[Expr]:
    """Return elements as 32-bit words, the first in the low bits."""
    if BYTES[dtype] == 4:
        return [b.bind(T.reinterpret("uint32", element)) for element in elements]
    halves = [T.Cast("uint32", T.reinterpret("uint16", element)) for element in elements]
    return [b.bind(low | (high << T.uint32(16))) for low, high in zip(halves[::2], halves[1::2], strict=True)]


def _range(extent: Expr) -> Any:
    from tvm import ir

    return ir.Range(0, extent)


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()
