"""Tiles that threads load from device memory into registers: of graphs without products, and columns."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.ir.graph import Node
from ladder.lower.blocks.context import BlockContext
from ladder.lower.blocks.fragments import Shape, hold
from ladder.lower.blocks.values import Value
from tile_types.errors import ScheduleError

Expr = Any


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
