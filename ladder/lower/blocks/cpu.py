"""One block graph as a CPU function: blocks in parallel, values in buffers, columns in vectors.

Element-wise values are expressions of what they are computed from; products, reductions, accumulators and
what is used several times are stored, in float32. Meant to be right and reasonable on any CPU that TVM's
LLVM backend knows, not to match hand-written kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.ir import scalars
from ladder.ir.build import node_attributes
from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.blocks.analysis import AFTER, BEFORE, LOOP, BlockProgram, GridPlace, gemm_of, reduced_axis
from ladder.lower.blocks.schedule import BlockSchedule
from ladder.lower.chain.llvm_functions import LLVM_FUNCTIONS
from ladder.lower.cpu.pack import HALF, NUMBERS, computed_as
from schedules.cpu_layout import LANES, ROWS, UNIT, cpu_layout
from targets import TileDevice
from tile_types import TirOps, get_type
from tile_types.errors import ScheduleError


@dataclass(frozen=True)
class PackedMatrix:
    """The packed arrays of a weight ``[N, K]``, see `ladder.lower.cpu.pack`.

    words, scales, zeros, row_scale: Buffers of one axis; None where the problem has none.
    """

    gemm: Gemm
    words: Any
    scales: Any
    zeros: Any
    row_scale: Any

    @staticmethod
    def declare(node: Node, activation: str) -> PackedMatrix:
        """Declare an input's arrays, in the order in which `ladder.runtime.packed` has them."""
        gemm = gemm_of(node.tile.ttype, node.tile.known_shape, activation)
        wanted = {
            "words": "uint32",
            "scales": "uint8" if gemm.scale else None,
            "zeros": None if gemm.zero == "none" else "uint8",
            "row_scale": "float32",
        }
        arrays = {
            name: b.tensor(f"{node.name}_{name}", (b.symbol(name),), dtype) if dtype else None
            for name, dtype in wanted.items()
        }
        return PackedMatrix(gemm, **arrays)

    def value(self, row: Expr, column: Expr) -> Expr:
        layout = cpu_layout(self.gemm)
        group = column // layout.group if layout.group else 0
        whole = layout.group == layout.padded_group
        place = column if whole else group * layout.padded_group + column % layout.group
        at = group * layout.padded_n(self.gemm.n) + row
        number = T.Cast("float32", get_type(self.gemm.weight).evaluate(self._code(row, place), TirOps()))
        scale = None if self.scales is None else self._number("scale", self.scales, at)
        if self.zeros is not None:
            number = number - self._number("zero", self.zeros, at, scale)
        return number * (self.row_scale[row] if scale is None else scale)

    def _product(self, stored: Any, at: Expr) -> tuple[Expr, Expr]:
        """Return whether numbers are stored as factors, and number ``at`` if so."""
        layout = cpu_layout(self.gemm)
        count, rows, groups = layout.factored, layout.padded_n(self.gemm.n), layout.groups(self.gemm.k)
        group, row = T.floordiv(at, rows), T.floormod(at, rows)
        start = T.floordiv(group, count) * (rows * (HALF + count))

        def octet(place: Expr) -> Expr:
            return stored[tirx.min(place, stored.shape[0] - 1)]

        low, high = (T.Cast("uint16", octet(start + HALF * row + byte)) for byte in range(HALF))
        half = T.reinterpret("float16", T.bitwise_or(low, T.shift_left(high, T.uint16(8))))
        inner = T.floormod(group, count)
        place = start + HALF * rows + (T.floordiv(inner, 4) * rows + row) * 4 + T.floormod(inner, 4)
        integer = T.reinterpret("int8", octet(place))
        is_stored = stored.shape[0] * count == groups * rows * (HALF + count)
        return is_stored, T.Cast("float32", half) * T.Cast("float32", integer)

    def _number(self, name: str, stored: Any, at: Expr, scale: Expr = None) -> Expr:
        """Return number ``at`` of an array whose size tells the type (`ladder.lower.cpu.pack.NUMBERS`).

        Bytes that a narrower type lacks are read as its last ones, and then not used.

        scale: Of a zero point.
        """
        layout, wide = cpu_layout(self.gemm), computed_as(self.gemm, name)
        size = T.floordiv(stored.shape[0], layout.groups(self.gemm.k) * layout.padded_n(self.gemm.n))
        octets = [T.Cast("uint32", stored[at * size + tirx.min(byte, size - 1)]) for byte in range(4)]
        kinds = NUMBERS[wide]
        found: Expr = None
        for count in sorted(kinds, reverse=True):
            bits = octets[0]
            for byte in range(1, count):
                bits = T.bitwise_or(bits, T.shift_left(octets[byte], T.uint32(8 * byte)))
            number = T.reinterpret(kinds[count], bits if count == 4 else T.Cast(f"uint{8 * count}", bits))
            number = T.Cast("float32", number)
            found = number if found is None else tirx.Select(size == count, number, found)
        if layout.factored and wide == "float32" and (name == "scale" or scale is not None):
            is_stored, product = self._product(stored, at)
            if scale is not None:
                none = T.float32(0)
                product = tirx.Select(scale == none, none, (none - product) / scale)
            found = tirx.Select(is_stored, product, found)
        return found

    def _code(self, row: Expr, column: Expr) -> Expr:
        layout = cpu_layout(self.gemm)
        _, units, words = layout.shape(self.gemm.n, self.gemm.k)
        first = (row // ROWS * units + column // UNIT) * words + row % ROWS
        step, element = column % UNIT // layout.elements, column % layout.elements
        code: Expr = None
        for plane in layout.planes:
            word = self.words[first + (plane.start + step // plane.slots) * LANES]
            right = T.Cast("uint32", layout.lane * element + plane.width * (step % plane.slots))
            part = T.bitwise_and(T.shift_right(word, right), T.uint32((1 << plane.width) - 1))
            part = T.shift_left(part, T.uint32(plane.shift)) if plane.shift else part
            code = part if code is None else T.bitwise_or(code, part)
        return code


At = Callable[[Expr, Expr], Expr]
"""Row and column -> float32 element."""

LOWEST = -3.0e38
START = {"sum": 0.0, "max": LOWEST, "rescale": 0.0, "last": 0.0, "reduce_sum": 0.0, "reduce_max": LOWEST}
VECTOR = 16
"""Columns computed at once."""


def emit(
    block: Graph, device: TileDevice, schedule: BlockSchedule, name: str, constants: Collection[str] = ()
) -> Any:
    """Emit one block graph; as `ladder.lower.blocks.kernel.emit`, but for a CPU.

    Raises ScheduleError if the schedule shares a block among warps, or names what is not lowered.
    """
    if schedule != BlockSchedule():
        raise ScheduleError(
            f"blocks run on one CPU thread each: BlockSchedule() is their schedule, not {schedule}"
        )
    with b.function(name) as result:
        program = BlockProgram.of(block)
        graph = program.block
        nodes = [*graph.inputs, *(graph.producer(output) for output in graph.outputs)]
        tensors = {node.name: _declared(node, program.operand) for node in nodes}
        with I.parallel(0, program.blocks) as index:
            CpuBlock(program, tensors, GridPlace(graph, index)).emit()
    return result.func


class CpuBlock:
    """One block of a function being emitted.

    tensors: Arguments of the function.
    """

    def __init__(self, program: BlockProgram, tensors: Mapping[str, Any], place: GridPlace) -> None:
        self.program, self.block = program, program.block
        self.tensors, self.place = tensors, place
        self.values: dict[str, At] = {}
        self.buffers: dict[str, Any] = {}

    def emit(self) -> None:
        self._allocate()
        self._run(BEFORE, None)
        if self.program.accumulators:
            for node in self.program.accumulators:
                self._begin(node)
            with b.loop(self.program.steps) as step:
                self._run(LOOP, step)
                for node in self.program.accumulators:
                    self._accumulate(node)
        self._run(AFTER, None)

    def _allocate(self) -> None:
        """Allocate buffers for what is stored: products, reductions, accumulators, maxima, shared values."""
        for node in self.block.nodes:
            followed = node.name in self._maxima()
            if node.operator in ("input", "store", "load", "constant") and not followed:
                continue
            kept = followed or node.operator in ("matmul", "reduce_sum", "reduce_max", "accumulate")
            users = self.program.users[node.name]
            if kept or len(users) > 1 or any(user.operator == "matmul" for user in users):
                rows, columns = self.program.shape(node.name)
                self.buffers[node.name] = I.alloc_buffer((rows * columns,), "float32", scope="global")
        for maximum in self._maxima():
            rows, _ = self.program.shape(maximum)
            self.buffers[f"{maximum} so far"] = I.alloc_buffer((rows,), "float32", scope="global")
            self.buffers[f"{maximum} factor"] = I.alloc_buffer((rows,), "float32", scope="global")

    def _maxima(self) -> list[str]:
        """Return the values that ``rescale`` accumulators take as maxima."""
        nodes = self.program.accumulators
        return list(dict.fromkeys(node.inputs[1] for node in nodes if len(node.inputs) == 2))

    # ---- stages ---------------------------------------------------------------------------------------
    def _run(self, stage: str, step: Expr | None) -> None:
        for node in self.block.nodes:
            if node.operator in ("input", "accumulate") or self.program.stages[node.name] != stage:
                continue
            if node.operator == "store":
                self._store(node)
                continue
            self.values[node.name] = self._value(node, step)
            if node.name in self.buffers and node.operator not in ("matmul", "reduce_sum", "reduce_max"):
                self._keep(node)
            if node.name in self._maxima():
                self._follow(node.name)

    def _value(self, node: Node, step: Expr | None) -> At:
        attributes = node_attributes(node)
        operands = [self._broadcast(name) for name in node.inputs] if node.operator != "load" else []
        if node.operator == "load":
            return self._loaded(node, step)
        if node.operator == "constant":
            return lambda r, c: T.float32(float(attributes["value"]))
        if node.operator == "convert":
            return self._rounded(operands[0], node.tile.ttype.name)
        if node.operator == "matmul":
            return self._product(node, bool(attributes["transpose_b"]))
        if node.operator in ("reduce_sum", "reduce_max"):
            return self._reduced(node, attributes)
        if node.operator == "concat":
            return self._joined(node, attributes["axis"])
        row = get_operator(node.operator)
        if not row.elementwise or row.lower is None:
            raise ScheduleError(f"%{node.name}: {node.operator} is not lowered to CPU block graphs")
        lower = row.lower
        return self._rounded(
            lambda r, c: lower(*(operand(r, c) for operand in operands)), node.tile.ttype.name
        )

    def _rounded(self, value: At, dtype: str) -> At:
        if dtype == "float32":
            return value
        return lambda r, c: T.Cast("float32", T.Cast(dtype, value(r, c)))

    def _broadcast(self, name: str) -> At:
        """Return a value whose axes of one element stretch."""
        rows, columns = self.program.shape(name)
        value = self.values[name]
        return lambda r, c: value(0 if rows == 1 else r, 0 if columns == 1 else c)

    def _loaded(self, node: Node, step: Expr | None) -> At:
        step = step if self.program.stages[node.name] == LOOP else None
        source = self.tensors[node.inputs[0]]
        if isinstance(source, PackedMatrix):
            row, column = self.place.corner(node, step)
            return lambda r, c: source.value(row + r, column + c)
        first, pitch = self.place.begin(node, step)
        return lambda r, c: T.Cast("float32", source[first + r * pitch + c])

    def _joined(self, node: Node, axis: int) -> At:
        rank = len(node.tile.known_shape)
        along = axis % rank - (rank - 2)
        sizes = [self.program.shape(name)[along] for name in node.inputs]
        parts = [self.values[name] for name in node.inputs]

        def value(r: Expr, c: Expr) -> Expr:
            at, first = (r, c)[along], sum(sizes[:-1])
            result = self._part(parts[-1], along, r, c, first)
            for part, size in zip(reversed(parts[:-1]), reversed(sizes[:-1]), strict=True):
                first -= size
                result = T.if_then_else(at < first + size, self._part(part, along, r, c, first), result)
            return result

        return value

    def _part(self, part: At, along: int, r: Expr, c: Expr, first: int) -> Expr:
        return part(r - first, c) if along == 0 else part(r, c - first)

    # ---- what is stored -------------------------------------------------------------------------------
    def _at(self, name: str) -> At:
        _, columns = self.program.shape(name)
        buffer = self.buffers[name]
        return lambda r, c: buffer[r * columns + c]

    def _fill(self, name: str, value: At) -> None:
        rows, columns = self.program.shape(name)
        buffer = self.buffers[name]
        with b.loop(rows) as r, _columns(columns) as c:
            b.store(buffer, value(r, c), r * columns + c)

    def _keep(self, node: Node) -> None:
        self._fill(node.name, self.values[node.name])
        self.values[node.name] = self._at(node.name)

    def _product(self, node: Node, transposed: bool) -> At:
        rows, columns = self.program.shape(node.name)
        depth = self.program.shape(node.inputs[0])[1]
        first, second = (self.values[name] for name in node.inputs)
        buffer = self.buffers[node.name]
        self._fill(node.name, lambda r, c: T.float32(0))
        with b.loop(rows) as r, b.loop(depth) as k:
            # No let: TVM's BF16ComputeLegalize does not visit one, and its bits would be read as an integer.
            factor = b.Variable("float32", first(r, k)).value
            with _columns(columns) as c:
                at = r * columns + c
                b.store(buffer, buffer[at] + factor * (second(c, k) if transposed else second(k, c)), at)
        return self._at(node.name)

    def _reduced(self, node: Node, attributes: Any) -> At:
        axis = reduced_axis(node, attributes)
        rows, columns = self.program.shape(node.inputs[0])
        source, buffer = self.values[node.inputs[0]], self.buffers[node.name]
        self._fill(node.name, lambda r, c: T.float32(START[node.operator]))
        with b.loop(rows) as r, b.loop(columns) as c:
            at = r if axis == -1 else c
            b.store(buffer, _combine(node.operator, buffer[at], source(r, c)), at)
        return self._at(node.name)

    # ---- accumulators -----------------------------------------------------------------------------------
    def _begin(self, node: Node) -> None:
        kind = str(node_attributes(node)["kind"])
        if kind not in START:
            raise ScheduleError(
                f"%{node.name}: accumulators of kind sum, max, rescale and last are lowered, not {kind}"
            )
        self._fill(node.name, lambda r, c: T.float32(START[kind]))
        self.values[node.name] = self._at(node.name)
        for maximum in node.inputs[1:]:
            rows, _ = self.program.shape(maximum)
            with b.loop(rows) as r:
                b.store(self.buffers[f"{maximum} so far"], T.float32(LOWEST), r)

    def _follow(self, name: str) -> None:
        """Keep the greatest maximum so far, and what accumulators are multiplied with to follow it."""
        rows, _ = self.program.shape(name)
        most, factor = self.buffers[f"{name} so far"], self.buffers[f"{name} factor"]
        own = self._at(name)
        with b.loop(rows) as r:
            b.store(factor, T.max(most[r], own(r, 0)), r)
            b.store(most, T.exp(most[r] - factor[r]), r)
            swapped = b.Variable("float32", most[r])
            b.store(most, factor[r], r)
            b.store(factor, swapped.value, r)

    def _accumulate(self, node: Node) -> None:
        kind = str(node_attributes(node)["kind"])
        value, buffer = self.values[node.inputs[0]], self.buffers[node.name]
        _, columns = self.program.shape(node.name)
        own = self._at(node.name)
        if kind == "rescale":
            local, most = self._at(node.inputs[1]), self.buffers[f"{node.inputs[1]} so far"]
            factor = self.buffers[f"{node.inputs[1]} factor"]
            step = value
            self._fill(
                node.name, lambda r, c: own(r, c) * factor[r] + step(r, c) * T.exp(local(r, 0) - most[r])
            )
        elif kind == "last":
            self._fill(node.name, value)
        else:
            join = "reduce_max" if kind == "max" else "reduce_sum"
            self._fill(node.name, lambda r, c: _combine(join, buffer[r * columns + c], value(r, c)))

    def _store(self, node: Node) -> None:
        name = node.inputs[0]
        rows, columns = self.program.shape(name)
        first, pitch = self.place.begin(node, None)
        out, value = self.tensors[node.name], self.values[name]
        with b.loop(rows) as r, _columns(columns) as c:
            b.store(out, T.Cast(str(out.dtype), value(r, c)), first + r * pitch + c)


def _combine(operator: str, x: Expr, y: Expr) -> Expr:
    if operator == "reduce_sum":
        return x + y
    return LLVM_FUNCTIONS["maximum"](x, y) if scalars.is_float(x) else T.max(x, y)


@contextmanager
def _columns(count: int) -> Iterator[Expr]:
    """Loop over columns, in vectors where they divide evenly."""
    if count % VECTOR:
        with b.loop(count) as c:
            yield c
        return
    with b.loop(count // VECTOR) as chunk, b.vector(VECTOR) as lane:
        yield chunk * VECTOR + lane


def _declared(node: Node, operand: str) -> Any:
    if node.tile.ttype.is_block:
        return PackedMatrix.declare(node, operand)
    return b.tensor(node.name, (prod(node.tile.known_shape),), node.tile.ttype.name)
