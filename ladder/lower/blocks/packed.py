"""Quantized second operands: packed words and scales in shared memory, decoded into operand registers.

A tile of a quantized weight ``[N, K]`` takes part in ``x · w^T`` after ``convert``. Its words are packed for
``mma.m16n8k16`` with the weight as A operand (`schedules.layouts`); the four registers of a decoded step are,
two by two, the B operands of its rows g and g + 8. Scales multiply decoded registers, the row's power of two
and the decoder's gain finished sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm.script import tirx as T

from ladder.ir.graph import Node
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.blocks.context import BlockContext
from ladder.lower.blocks.copies import Copy, Piece
from ladder.lower.blocks.fragments import Shape
from ladder.lower.blocks.packed_layout import PackedLayout
from ladder.lower.blocks.shared import CHUNK_BYTES
from ladder.lower.blocks.values import Value
from ladder.lower.cuda.bulk_copies import bulk_copy
from ladder.lower.gpu.decode import Decoder, GroupValues, load_order
from schedules.layouts import TILE
from tile_types.errors import ScheduleError

STEPS = TILE // 16
"""Steps of 16 elements along K of a packed tile."""


class PackedCopy(Copy):
    """Copies the words and scales of a step's tile."""

    layout: PackedLayout

    def __init__(self, context: BlockContext, node: Node) -> None:
        super().__init__(context, node)
        self.words = context.tensors[f"{node.inputs[0]}_words"]
        self.n, self.k = context.program.block.tile(node.inputs[0]).known_shape

    def _runs(self, step: Expr, at: Expr) -> Iterator[tuple[Expr, Any, Expr, int]]:
        """Yield target byte, tensor, first element and bytes of every run that lies together in memory."""
        layout = self.layout
        row, column = (b.bind(x) for x in self.context.place.corner(self.node, step if self.looped else None))
        base = T.Cast("int32", at) + self.offset
        words = layout.tile_bytes // 4
        for index in range(layout.rows // TILE):
            tile = (row // TILE + index) * (-(-self.k // TILE)) + column // TILE
            yield base + index * layout.run_bytes, self.words, tile * words, layout.run_bytes
        for name, strips in layout.strips.items():
            array, count = self.context.tensors[f"{self.node.inputs[0]}_{name}"], layout.rows * strips.size
            for index in range(strips.count(layout.columns)):
                first = (strips.first(column) + index) * (-(-self.n // TILE) * TILE) + row
                yield base + layout.offsets[name] + count * index, array, first, count

    def pieces(self, step: Expr, at: Expr) -> Iterator[Piece]:
        for target, tensor, first, count in self._runs(step, at):
            chunks = count // CHUNK_BYTES
            per_chunk = CHUNK_BYTES // (4 if str(tensor.dtype) == "uint32" else 2)
            for turn in range(-(-chunks // self.threads)):
                piece = b.bind(self._thread + turn * self.threads)
                exists = True if (turn + 1) * self.threads <= chunks else piece < chunks
                yield Piece(target + piece * CHUNK_BYTES, tensor, first + piece * per_chunk, exists)

    def start(self, step: Expr, at: Expr, barrier: Expr) -> None:
        shared = self.context.shared.words
        for target, tensor, first, count in self._runs(step, at):
            place, source = shared.ptr_to([b.bind(target // 4)]), tensor.ptr_to([first])
            bulk_copy(place, source, count, barrier)

    def prefetch(self, step: Expr) -> None:
        for _, tensor, first, count in self._runs(step, 0):
            with b.when(self.context.threads.group_thread == 0):
                b.ptx("cp.async.bulk.prefetch.L2.global", tensor.ptr_to([first]), T.uint32(count))


class PackedTile(Value):
    """A quantized weight: only the second operand of a product with ``transpose_b``, after ``convert``.

    base: Shared address of its first byte, a uint32 expression.
    row_scale: The weight's powers of two by row, a tensor.
    """

    depth_run = STEPS
    """Steps along K that are decoded together."""

    def __init__(
        self, context: BlockContext, node: Node, shape: Shape, layout: PackedLayout, base: Expr
    ) -> None:
        super().__init__(context, node.name, shape, context.operand)
        self.node, self.layout, self.base = node, layout, base
        self.row_scale = context.tensors[f"{node.inputs[0]}_row_scale"]
        self.decoder: Decoder = context.dialect.decoder(layout.gemm)

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        raise ScheduleError(f"%{self.name}: quantized tiles are taken by products only, as second operand")

    def operand_b(self, k: int, n: Expr, count: int, transposed: bool) -> list[list[Expr]]:
        if not transposed:
            raise ScheduleError(f"%{self.name}: quantized weights are [N, K]; multiply with transpose_b")
        assert count == 2, f"%{self.name}: `BlockGeometry` checks it"
        holders = self.context.dialect.packed_holders(self.context.threads.lane)
        decoded = [
            self._once(("decoded", k // STEPS, n, part), lambda own=own: self._decode(k // STEPS, n, own))
            for part, own in enumerate(holders)
        ]
        four = [registers[k % STEPS * 4 + i] for registers in decoded for i in range(4)]
        return [four[half::2] for half in range(2)]

    def operand_a_of(self, first: Value, m: int, k: int) -> list[Expr]:
        return self.context.dialect.operand_a_beside_packed(first, m, k)

    def _decode(self, k: int, n: Expr, holder: Expr) -> Any:
        """Return the 16 registers that a thread of NVIDIA's would hold of the rows of two fragments."""
        layout, context = self.layout, self.context
        pair, rows = n // 2, 2 * context.lanes.columns
        start = self.base + context.dialect.address(layout.tile_byte(pair // (TILE // rows), k))
        owner = pair % (TILE // rows) * (2 * rows) + holder
        words = b.local(layout.groups.bits, "uint32")
        at = 0
        for offset, width in load_order(layout.groups.bits):
            place = start + context.dialect.address((offset + owner * width) * 4)
            for i, word in enumerate(context.dialect.read(context.shared, place, width)):
                b.store(words, word, at + i)
            at += width
        out = b.local(4 * STEPS, "uint32")
        registers = layout.groups.registers
        for granule in range(layout.groups.per_tile):
            scales = self._rows("scales", k, granule, pair) if layout.gemm.scale else None
            first = granule * registers
            byte: int | None = None
            if layout.groups.exponents:
                scales, byte = self._exponents(scales, k, granule)
            values = GroupValues(scales, self._zeros(k, granule, pair), byte)
            self.decoder.registers(words, range(first, first + registers), out, first, values)
            context.dialect.keep_order()
        return out

    def _rows(self, name: str, k: int, granule: int, pair: Expr, part: int = 0) -> tuple[Expr, Expr]:
        """Return what rows g and g + 8 have, in both halves of a register if it is one half."""
        wide = self.layout.strips[name].size == 4

        def load(place: Expr) -> Expr:
            kind, context = "uint32" if wide else "uint16", self.context
            dialect = context.dialect
            (bits,) = dialect.read(context.shared, self.base + dialect.address(place), 1, kind)
            if wide:
                return bits
            return b.Variable("uint32", T.Cast("uint32", bits) * T.uint32(0x00010001)).value

        context = self.context
        first = pair * (2 * context.lanes.columns) + context.dialect.packed_row(context.threads.lane)
        places = [self.layout.strip_byte(name, k, granule, part, first + 8 * half) for half in range(2)]
        run = self.layout.strip_byte(name, k, granule, part, 0)
        low, high = (
            self._once((name, run, pair, half), lambda place=place: load(place))
            for half, place in enumerate(places)
        )
        return low, high

    def _exponents(self, words: Any, k: int, granule: int) -> tuple[tuple[Expr, Expr], int]:
        """Return rows' words of exponents, and which of their bytes serves a granule."""
        per_tile, tiles = self.layout.groups.per_tile, self.layout.k_tiles
        if tiles % 2 == 0:
            return words, k % 2 * per_tile + granule
        _, column = self.context.place.corner(self.node, self.context.point.step)
        odd = T.Cast("uint32", (column // TILE + k) % 2)
        low, high = (b.bind(word >> (odd * T.uint32(16))) for word in words)
        return (low, high), granule

    def _zeros(self, k: int, granule: int, pair: Expr) -> Any:
        """Return the zero points of rows g and g + 8 as the decoder takes them."""
        if "zeros" not in self.layout.strips:
            return None
        parts = [
            self._rows("zeros", k, granule, pair, part) for part in range(self.layout.strips["zeros"].parts)
        ]
        return parts[0] if len(parts) == 1 else tuple(zip(*parts, strict=True))

    def column_factors(self, n: Expr) -> list[Expr]:
        """Return what the sums of a lane's columns of a fragment are multiplied with at the end."""
        return list(self._once(("factors", n), lambda: self._column_factors(n)))

    def _column_factors(self, n: Expr) -> list[Expr]:
        context = self.context
        first, _ = context.place.corner(self.node, None)
        at = first + context.lanes.position(0, n, 0)[1]
        factors = context.dialect.load(self.row_scale, at, context.lanes.run, "float32")
        low, high = self.decoder.gains
        gain: Expr = T.float32(low) if low == high else T.Select(n % 2 == 0, T.float32(low), T.float32(high))
        return [b.Variable("float32", factor * gain).value for factor in factors]
