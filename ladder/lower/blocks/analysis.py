"""Normal form of a block graph for lowering: matrices with stages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ladder.ir.build import node_attributes
from ladder.ir.gemm import Gemm, has_power_scales
from ladder.ir.graph import Axis, Graph, Node
from ladder.ir.ops import get_operator
from ladder.lower import Expr
from tile_types.errors import ScheduleError
from tile_types.multiples import held_multiple
from tile_types.tile import Tile
from tile_types.ttype import TType

BEFORE, LOOP, AFTER = "before", "loop", "after"
"""Stages of a value: it is the same in all steps of the loop, differs in each, or follows accumulators."""

STAGES = (BEFORE, LOOP, AFTER)

HALVES = ("float16", "bfloat16")
"""Types that matrix instructions take."""


def without_outer_products(block: Graph) -> Graph:
    """Return a block graph whose products of a column with a row are element-wise ones."""
    return replace(block, nodes=tuple(_as_elementwise(block, node) for node in block.nodes))


def _as_elementwise(block: Graph, node: Node) -> Node:
    if node.operator != "matmul" or block.tile(node.inputs[0]).known_shape[-1] != 1:
        return node
    if node_attributes(node)["transpose_b"]:
        raise ScheduleError(f"%{node.name}: products of a column with a transposed column are not lowered")
    return replace(node, operator="mul", attributes=())


def matrix_of(tile: Tile, what: str = "a tile") -> tuple[int, int]:
    """Return rows and columns of a tile; leading axes must have one element.

    Raises ScheduleError if they have more: put them on the grid.
    """
    shape = tile.known_shape
    if math.prod(shape[:-2]) != 1:
        raise ScheduleError(f"{what} is {list(shape)}: axes before the last two go to the grid")
    rows, columns = (1, 1, *shape)[-2:]
    return rows, columns


def reduced_axis(node: Node, attributes: Mapping[str, Any]) -> int:
    """Return the axis along which a node reduces, -1 or -2; raises ScheduleError if it does otherwise."""
    rank = len(node.tile.known_shape)
    axis = int(attributes["axis"] % rank - rank)
    if not attributes["keep"] or axis < -2:
        raise ScheduleError(
            f"%{node.name}: reductions along one of the last two axes that keep it are lowered"
        )
    return axis


@dataclass(frozen=True)
class BlockProgram:
    """A block graph with known extents, ready to be lowered.

    block: The graph, outer products element-wise.
    """

    block: Graph

    @staticmethod
    def of(block: Graph) -> BlockProgram:
        """Check a block graph.

        Raises ScheduleError: Names what is not lowered.
        """
        program = BlockProgram(without_outer_products(block))
        for node in program.block.nodes:
            if node.operator != "input" and get_operator(node.operator).role != "store":
                matrix_of(node.tile, f"%{node.name}")
        return program

    @cached_property
    def stages(self) -> Mapping[str, str]:
        """The stage of every node."""
        found: dict[str, str] = {}
        for node in self.block.nodes:
            found[node.name] = self._stage(node, found)
        return found

    def _stage(self, node: Node, found: Mapping[str, str]) -> str:
        role = get_operator(node.operator).role
        if role == "accumulate":
            return AFTER
        if role == "load":
            return LOOP if any(axis >= 0 for axis in node_attributes(node)["loop"]) else BEFORE
        return max((found[value] for value in node.inputs), key=STAGES.index, default=BEFORE)

    @property
    def operand(self) -> str:
        """The 16-bit type that products are computed in: that of the tiles they take.

        Raises ScheduleError if there are several.
        """
        types = sorted({node.tile.ttype.name for node in self.loads if node.tile.ttype.name in HALVES})
        if len(types) > 1:
            raise ScheduleError(f"tiles of one 16-bit type are lowered, got {' and '.join(types)}")
        return types[0] if types else HALVES[0]

    @cached_property
    def users(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that take a value."""
        users: dict[str, list[Node]] = {name: [] for name in self.block.tiles}
        for node in self.block.nodes:
            for value in dict.fromkeys(node.inputs):
                users[value].append(node)
        return {name: tuple(nodes) for name, nodes in users.items()}

    @cached_property
    def loads(self) -> tuple[Node, ...]:
        """Loads of tiles."""
        return self._having("load")

    @cached_property
    def accumulators(self) -> tuple[Node, ...]:
        """Accumulators of the loop."""
        return self._having("accumulate")

    @cached_property
    def stores(self) -> tuple[Node, ...]:
        """Stores of results."""
        return self._having("store")

    def _having(self, role: str) -> tuple[Node, ...]:
        return tuple(node for node in self.block.nodes if get_operator(node.operator).role == role)

    @cached_property
    def steps(self) -> int:
        """Steps of the loop; 1 without."""
        return math.prod(known(axis) for axis in self.block.loops)

    @cached_property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return math.prod(known(axis) for axis in self.block.grid)

    def shape(self, value: str) -> tuple[int, int]:
        """Return rows and columns of a value."""
        if value not in self._shapes:
            self._shapes[value] = matrix_of(self.block.tile(value), f"%{value}")
        return self._shapes[value]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes that were asked for: schedules by the thousand ask for the same."""
        return {}


def gemm_of(ttype: TType, shape: tuple[int, ...], activation: str) -> Gemm:
    """Return the normal form of a product with a weight ``[N, K]``, which decides its packed arrays.

    As `ladder.api.problem.gemm_for`, which packs weights.
    """
    n, k = shape[-2:]
    group = min(ttype.shape[-1], k)
    held = held_multiple(ttype, (activation,), ttype.zero_kind)
    return Gemm(
        n=n, k=k, weight=held.name, activation=activation, output=activation,
        group_size=group, scale=group < k, zero=ttype.zero_kind,
        power_scales=group < k and has_power_scales(ttype),
    )  # fmt: skip


def known(axis: Axis) -> int:
    """Return an axis's extent; raises ScheduleError for a symbol."""
    if not isinstance(axis.extent, int):
        raise ScheduleError(f"dimension {axis.name}={axis.extent} is symbolic; bind its size first")
    return axis.extent


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
