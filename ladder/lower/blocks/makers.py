"""Translation of block graph operators into values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script import tirx as T

from ladder.ir.build import node_attributes
from ladder.ir.graph import Node
from ladder.ir.ops import get_operator
from ladder.lower import Expr
from ladder.lower.blocks import reductions as r
from ladder.lower.blocks import values as v
from ladder.lower.blocks.analysis import reduced_axis
from ladder.lower.blocks.context import BlockContext
from ladder.lower.blocks.fragments import Shape, hold
from ladder.lower.blocks.packed import PackedTile
from ladder.lower.blocks.shared import TileLayout
from ladder.lower.blocks.values import Matmul, Value
from tile_types.errors import ScheduleError


class GlobalTile(Value):
    """A tile whose columns are too few for `GlobalRow`."""

    def __init__(self, context: BlockContext, node: Node, shape: Shape, dtype: str) -> None:
        super().__init__(context, node.name, shape, dtype)
        self.node, self.source = node, context.tensors[node.inputs[0]]

    def _places(self, m: int, n: Expr) -> list[Expr]:
        """Return the places of a thread's runs of columns."""
        first, pitch = self.context.place.begin(self.node, self.context.point.step)
        rows, places = self.shape[0], []
        for run in range(self.context.lanes.runs):
            row, column = self.context.lanes.position(m, n, run)
            row = T.min(self.context.first_row(rows) + row, rows - 1) if rows > 1 else 0
            places.append(first + row * pitch + column)
        return places

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        run = range(self.context.lanes.run)
        return [self._loaded(place + i) for place in self._places(m, n) for i in run]

    def _row(self, m: int) -> list[Expr]:
        first, pitch = self.context.place.begin(self.node, self.context.point.step)
        rows = self.shape[0]
        runs = (self.context.lanes.position(m, 0, run)[0] for run in range(self.context.lanes.runs))
        places = [T.min(self.context.first_row(rows) + row, rows - 1) if rows > 1 else 0 for row in runs]
        return [self._loaded(first + row * pitch) for row in places]

    def _loaded(self, at: Expr) -> Expr:
        dialect, wide = self.context.dialect, self.dtype == "float32"
        (bits,) = dialect.load(self.source, at, 1, "float32" if wide else "uint16")
        return bits if wide else hold(dialect.widened(bits, self.dtype))


class GlobalRow(Value):
    """A 16-bit tile of a graph without products: threads load what they take, straight into registers."""

    def __init__(self, context: BlockContext, node: Node, shape: Shape, dtype: str) -> None:
        super().__init__(context, node.name, shape, dtype)
        self.node, self.source = node, context.tensors[node.inputs[0]]
        if shape[1] % context.lanes.columns:
            raise ScheduleError(
                f"%{node.name}: threads share rows by {context.lanes.columns}, got {shape[1]}"
            )

    def _fragment(self, m: int, n: Expr) -> list[Expr]:
        first, pitch = self.context.place.begin(self.node, self.context.point.step)
        row, column = self.context.lanes.position(m if self.shape[0] > 1 else 0, n, 0)
        dialect = self.context.dialect
        words = dialect.load(self.source, first + row * pitch + column, 4, "uint32")
        return [hold(half) for word in words for half in dialect.unpack(word, self.dtype)]


def _load(context: BlockContext, node: Node, operands: Any, attributes: Any) -> v.Value:
    geo, shared, name = context.geo, context.shared, node.name
    if geo.to_registers(node):
        kind = GlobalRow if geo.flat else GlobalTile
        return kind(context, node, context.program.shape(name), node.tile.ttype.name)
    looped = geo.is_looped(node)
    offset = geo.stage_offsets[name] if looped else geo.offsets[name]
    base = (shared.stage.value if looped else shared.base) + context.dialect.address(offset)
    shape, layout = context.program.shape(name), geo.layouts[name]
    if isinstance(layout, TileLayout):
        return v.SharedTile(context, name, shape, node.tile.ttype.name, layout, base)
    return PackedTile(context, node, shape, layout, base)


def _constant(context: BlockContext, node: Node, operands: Any, attributes: Any) -> v.Value:
    if context.program.shape(node.name) != (1, 1):
        raise ScheduleError(f"%{node.name}: constants of one element are lowered")
    return v.Constant(context, node.name, float(attributes["value"]))


def _convert(context: BlockContext, node: Node, operands: Any, attributes: Any) -> v.Value:
    return v.Convert(context, node.name, context.program.shape(node.name), node.tile.ttype.name, operands[0])


def _matmul(context: BlockContext, node: Node, operands: Any, attributes: Any) -> v.Value:
    transposed = bool(attributes["transpose_b"])
    return Matmul(context, node.name, context.program.shape(node.name), operands[0], operands[1], transposed)


def _concat(context: BlockContext, node: Node, operands: Any, attributes: Any) -> v.Value:
    rank = len(node.tile.known_shape)
    axis = attributes["axis"] % rank - (rank - 2)
    shape = context.program.shape(node.name)
    return v.Concat(context, node.name, shape, node.tile.ttype.name, operands, axis)


def _reduce(context: BlockContext, node: Node, operands: Any, attributes: Any) -> v.Value:
    axis = reduced_axis(node, attributes)
    kind = r.Reduce if axis == -1 else r.ColumnReduce
    return kind(context, node.name, context.program.shape(node.name), node.operator, operands[0])


_MAKERS: dict[str, Callable[..., v.Value]] = {
    "load": _load, "constant": _constant, "convert": _convert, "matmul": _matmul, "concat": _concat,
    "reduce_sum": _reduce, "reduce_max": _reduce,
}  # fmt: skip
"""Operator -> what makes its value; element-wise rows of the operator table need none."""


def make_value(context: BlockContext, node: Node, operands: Sequence[v.Value]) -> v.Value:
    """Return the value of a node that is no accumulator.

    Raises ScheduleError if the operator is not lowered.
    """
    make = _MAKERS.get(node.operator)
    if make is not None:
        return make(context, node, operands, node_attributes(node))
    row = get_operator(node.operator)
    if not row.elementwise:
        raise ScheduleError(f"%{node.name}: {node.operator} is not lowered to block graphs of GPUs")
    shape, dtype = context.program.shape(node.name), node.tile.ttype.name
    return v.Elementwise(context, node.name, shape, dtype, row, operands)
