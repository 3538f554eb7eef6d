"""Offsets of a block's tiles in their tensors."""

from __future__ import annotations

import math
from typing import Any

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.lower.blocks.analysis import known
from tile_types.errors import ScheduleError

Expr = Any

INT32 = 1 << 31


class GridPlace:
    """Where tiles begin: the digits of a block's number, and of a step's.

    index: Number of the block within the grid.
    """

    def __init__(self, block: Graph, index: Expr) -> None:
        self.block = block
        self.position = _digits(index, [known(axis) for axis in block.grid])

    def begin(self, node: Node, step: Expr | None) -> tuple[Expr, int]:
        """Return the first element of a load's or store's tile, and the elements from row to row.

        node: The load or store.
        step: Step of the loop, or None.
        """
        whole = node.tile if node.operator == "store" else self.block.tile(node.inputs[0])
        shape = whole.known_shape
        if math.prod(shape) >= INT32:
            raise ScheduleError(f"%{node.name}: a tensor of {math.prod(shape)} elements needs 64-bit offsets")
        pitches = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        first: Expr = 0
        for position, pitch in zip(self._corner(node, step), pitches, strict=True):
            first = first + position * pitch
        return first, pitches[-2] if len(pitches) > 1 else shape[-1]

    def corner(self, node: Node, step: Expr | None) -> tuple[Expr, Expr]:
        """Return row and column at which a tile begins, leading axes counting as rows."""
        shape = self.block.tile(node.inputs[0]).known_shape
        *rest, column = self._corner(node, step)
        row: Expr = 0
        for position, extent in zip(rest, shape[:-1], strict=True):
            row = row * extent + position
        return row, column

    def _corner(self, node: Node, step: Expr | None) -> list[Expr]:
        """Return where a tile begins along each axis."""
        attributes = node_attributes(node)
        loops = [known(axis) for axis in self.block.loops]
        part = self.block.tile(node.inputs[0]) if node.operator == "store" else node.tile
        axes = [*zip(attributes["grid"], self.position, (known(a) for a in self.block.grid), strict=True)]
        if step is not None:
            axes += zip(attributes["loop"], _digits(step, loops), loops, strict=True)
        digits: list[Expr] = [0] * len(part.shape)
        for axis, position, extent in axes:
            if axis >= 0:
                digits[axis] = digits[axis] * extent + position
        return [digit * extent for digit, extent in zip(digits, part.known_shape, strict=True)]


def _digits(index: Expr, extents: list[int]) -> list[Expr]:
    """Return the digits of a number, the last extent's varying fastest."""
    found: list[Expr] = []
    for extent in reversed(extents):
        found.append(index % extent if len(found) + 1 < len(extents) else index)
        index = index // extent
    return found[::-1]
