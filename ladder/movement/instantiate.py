"""Translation of a chain's tile graph into a movement graph: one template per operator.

Every operator reads device memory, computes in lanes and writes device memory; a reduction first adds what
each lane has, passes that on, and adds over lanes. `rewrite` then removes what need not move.
"""

from __future__ import annotations

from ladder.ir.build import is_along_last, node_attributes
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.movement.decompose import canonical
from ladder.movement.graph import Compute, Move, MovementGraph, Slice, Step, Sync, Tensor
from ladder.movement.mapping import Mapping, held_width
from ladder.movement.pattern import VIEWS
from ladder.partition.rows import REDUCTIONS, SCANS, loop_extents
from tile_types.errors import LadderError


def instantiate(graph: Graph, mapping: Mapping) -> MovementGraph:
    """Return the movement graph of a chain whose extents are numbers.

    Raises LadderError if it has an operator that is neither element-wise, a reduction nor a view.
    """
    rows = int(product(loop_extents(graph, graph.outputs)))
    return _Templates(canonical(graph), mapping).graph(rows)


class _Templates:
    """Emits the steps of one operator after the other."""

    def __init__(self, graph: Graph, mapping: Mapping) -> None:
        self.source, self.mapping = graph, mapping
        self.width = held_width(graph)
        self.tensors: dict[str, Tensor] = {}
        self.steps: list[Step] = []

    def graph(self, rows: int) -> MovementGraph:
        for node in self.source.nodes:
            self.place(node)
        inputs = tuple(node.name for node in self.source.inputs)
        outputs = self.source.outputs
        return MovementGraph(
            self.source.name, self.mapping, self.tensors, tuple(self.steps), inputs, outputs, rows
        )

    def place(self, node: Node) -> None:
        row = get_operator(node.operator)
        if row.role == "input":
            self.declare(node.name, node.tile.ttype.name, node.tile.known_shape, "device")
        elif not node.inputs:
            self.tensor(node.name, node, "immediate")
            self.steps.append(Compute(node.name, "source", node.operator, (), node.attributes))
        elif row.elementwise or node.operator in ("convert", "encode", *SCANS):
            operands = tuple(self.move(value, f"{node.name}.{at}") for at, value in enumerate(node.inputs))
            self.tensor(f"{node.name}.r", node, "lane")
            step = Compute(f"{node.name}.r", "elementwise", node.operator, operands, node.attributes)
            self.steps.append(step)
            self.finish(node)
        elif node.operator in REDUCTIONS:
            self.reduction(node)
        elif node.operator in VIEWS:
            self.tensor(f"{node.name}.r", node, "lane")
            self.steps.append(Move(f"{node.name}.r", node.inputs[0], (node,)))
            self.finish(node)
        else:
            raise LadderError(
                f"{node.operator} has no template of moves; split it in ladder.movement.decompose"
            )

    def reduction(self, node: Node) -> None:
        """Emit a reduction: what each lane has, then over lanes."""
        operand = self.move(node.inputs[0], f"{node.name}.0")
        lanes, kind = self.lanes(node), node.tile.ttype.name
        shape = self.tensors[operand].shape
        axis = node_attributes(node)["axis"] % len(shape)
        if lanes > 1:
            part = (*shape[:axis], lanes, *shape[axis + 1 :])
            self.declare(f"{node.name}.part", kind, part, "lane")
            layout = (("axis", axis), ("lanes", lanes), ("width", self.width))
            self.steps.append(Compute(f"{node.name}.part", "partial", node.operator, (operand,), layout))
            self.declare(f"{node.name}.parts", kind, part, "device")
            self.steps += [Move(f"{node.name}.parts", f"{node.name}.part"), Sync("device")]
            operand = self.move(f"{node.name}.parts", f"{node.name}.all")
        self.tensor(f"{node.name}.r", node, "lane")
        step = Compute(f"{node.name}.r", "reduce", node.operator, (operand,), node.attributes)
        self.steps.append(step)
        self.finish(node)

    def lanes(self, node: Node) -> int:
        """Return over how many lanes a reduction's operand lies: those of a row, if it runs along columns."""
        shape = self.source.tile(node.inputs[0]).known_shape
        along = is_along_last(self.source, node)
        return self.mapping.lanes if along and shape[-1] % self.width == 0 else 1

    def move(self, value: str, name: str) -> str:
        """Emit the move of a value into lanes."""
        tensor = self.tensors[value]
        self.declare(name, tensor.ttype, tensor.shape, "lane")
        self.steps.append(Move(name, value))
        return name

    def finish(self, node: Node) -> None:
        """Emit the move of a result to the device, and a sync."""
        self.tensor(node.name, node, "device")
        self.steps += [Move(node.name, f"{node.name}.r"), Sync("device")]

    def tensor(self, name: str, node: Node, level: str) -> None:
        self.declare(name, node.tile.ttype.name, node.tile.known_shape, level)

    def declare(self, name: str, ttype: str, shape: tuple[int, ...], level: str) -> None:
        """Add a tensor with the slice that a lane has of it."""
        self.tensors[name] = Tensor(ttype, shape, self.slice(shape, level))

    def slice(self, shape: tuple[int, ...], level: str) -> Slice:
        """Return what a lane touches: vectors of columns, ``lanes`` vectors apart."""
        columns = shape[-1] if shape else 1
        width = self.width if columns % self.width == 0 else 1
        lanes = self.mapping.lanes
        num = -(-columns // (width * lanes)) if lanes > 1 else 1
        return Slice(level, num, width, width * lanes if num > 1 else width)
