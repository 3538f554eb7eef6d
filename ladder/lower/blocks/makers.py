"""From the operators of a block graph to values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from ladder.ir.graph import Node
from ladder.lower.blocks import reductions as r
from ladder.lower.blocks import values as v
from ladder.lower.blocks.accumulators import Accumulator
from ladder.lower.blocks.shared import TileLayout
from tile_types.errors import ScheduleError

if TYPE_CHECKING:
    from ladder.lower.blocks.kernel import BlockKernel


def _load(kernel: BlockKernel, node: Node, operands: Any, attributes: Any) -> v.Value:
    geo, name = kernel.geo, node.name
    if geo.direct:
        kind = v.GlobalRow if geo.flat else v.GlobalTile
        return kind(kernel, node, kernel.shape(name), node.tile.ttype.name)
    looped = geo.is_looped(node)
    offset = geo.stage_offsets[name] if looped else geo.offsets[name]
    base = (kernel.stage.value if looped else kernel.base) + T.uint32(offset)
    shape, layout = kernel.shape(name), geo.layouts[name]
    if isinstance(layout, TileLayout):
        return v.SharedTile(kernel, name, shape, node.tile.ttype.name, layout, base)
    from ladder.lower.blocks.packed import PackedTile

    return PackedTile(kernel, node, shape, layout, base, kernel.device)


def _constant(kernel: BlockKernel, node: Node, operands: Any, attributes: Any) -> v.Value:
    if kernel.shape(node.name) != (1, 1):
        raise ScheduleError(f"%{node.name}: constants of one element are lowered")
    return v.Constant(kernel, node.name, float(attributes["value"]))


def _convert(kernel: BlockKernel, node: Node, operands: Any, attributes: Any) -> v.Value:
    return v.Convert(kernel, node.name, kernel.shape(node.name), node.tile.ttype.name, operands[0])


def _matmul(kernel: BlockKernel, node: Node, operands: Any, attributes: Any) -> v.Value:
    transposed = bool(attributes["transpose_b"])
    return v.Matmul(kernel, node.name, kernel.shape(node.name), operands[0], operands[1], transposed)


def _concat(kernel: BlockKernel, node: Node, operands: Any, attributes: Any) -> v.Value:
    rank = len(node.tile.known_shape)
    axis = attributes["axis"] % rank - (rank - 2)
    return v.Concat(kernel, node.name, kernel.shape(node.name), node.tile.ttype.name, operands, axis)


def _reduce(kernel: BlockKernel, node: Node, operands: Any, attributes: Any) -> v.Value:
    rank = len(node.tile.known_shape)
    axis = attributes["axis"] % rank - rank
    if not attributes["keep"] or axis < -2:
        raise ScheduleError(
            f"%{node.name}: reductions along one of the last two axes that keep it are lowered"
        )
    kind = r.Reduce if axis == -1 else r.ColumnReduce
    return kind(kernel, node.name, kernel.shape(node.name), node.operator, operands[0])


def _accumulate(kernel: BlockKernel, node: Node, operands: Any, attributes: Any) -> v.Value:
    return Accumulator(kernel, node, operands, str(attributes["kind"]))


MAKERS: dict[str, Callable[..., v.Value]] = {
    "load": _load, "constant": _constant, "convert": _convert, "matmul": _matmul, "concat": _concat,
    "reduce_sum": _reduce, "reduce_max": _reduce, "accumulate": _accumulate,
}  # fmt: skip
"""Operator -> what makes its value; element-wise rows of the operator table need none."""
