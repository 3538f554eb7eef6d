"""Elements that a chain reads by number (``gather``): where they are, and their values.

The number is in memory, so nothing is known of it while a kernel is planned: a variable stands for it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tvm_ffi
from tvm import ir, tirx

from ladder.ir.graph import Graph, Node
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.indices import Index
from ladder.partition.rows import gathered_from
from tile_types.errors import ScheduleError

if TYPE_CHECKING:
    from ladder.lower.chain.values import Values


def reads_rows(graph: Graph) -> bool:
    """Tell whether a chain reads elements by number."""
    return any(node.operator == "gather" for node in graph.nodes)


def no_row_number(value: Expr, extent: Expr, from_end: bool) -> Expr:
    """Refuse: a kernel that knows of no number beyond the last row would read there."""
    raise ScheduleError("no gathers in kernels of chains for this device")


def places(values: Values, node: Node, index: Index, attributes: Mapping[str, Any]) -> list[Index]:
    """Return where a gather reads its operands, with a variable for the number."""
    _, own = gathered_from(node, _rank(values, node), index, 0)
    key = values.key(node.name, tuple(map(values.simplified, own)))
    if key not in values.stand_ins:
        values.stand_ins[key] = tirx.Var(f"{node.name}_number", "int32")
        values.analyzer.bind(values.stand_ins[key], ir.Range(0, _extent(values, node, attributes)))
    return [*gathered_from(node, _rank(values, node), index, values.stand_ins[key])]


def element(values: Values, node: Node, index: Index, attributes: Mapping[str, Any]) -> Expr:
    """Return an element; its number is worked out once for all that it is used for."""
    if values.looking:
        for operand, place in reversed(
            [*zip(node.inputs, places(values, node, index, attributes), strict=True)]
        ):
            found = values.at(operand, place)
        return found
    _, own = gathered_from(node, _rank(values, node), index, 0)
    guards = (tvm_ffi.structural_hash(values.simplified(guard)) for guard in values.guards)
    key = ("number", *values.key(node.name, tuple(map(values.simplified, own))), *guards)
    if key not in values.memory:
        extent = _extent(values, node, attributes)
        found = values.row_number(values.at(node.inputs[1], own), extent, attributes["from_end"])
        values.memory[key] = b.bind(b.Variable("int32", found).value)
        values.analyzer.bind(values.memory[key], ir.Range(0, extent))
    return values.at(node.inputs[0], gathered_from(node, _rank(values, node), index, values.memory[key])[0])


def _rank(values: Values, node: Node) -> int:
    return len(values.graph.tile(node.inputs[0]).shape)


def _extent(values: Values, node: Node, attributes: Mapping[str, Any]) -> Expr:
    return values.extent(values.graph.tile(node.inputs[0]).shape[attributes["axis"]])
