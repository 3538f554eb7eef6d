"""Evaluation of a graph by any column of the operator table.

`interpret` executes a graph over a number domain (float64, finite fields); `abstract_expressions`
computes what Mirage's pruning compares.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ladder.ir.build import node_attributes
from ladder.ir.graph import Axis, Graph, Node
from ladder.ir.operator import AbstractExpression, Operator
from ladder.ir.ops import get_operator
from tile_types.errors import ShapeError, VerificationError


@dataclass(frozen=True)
class Domain:
    """How a number domain applies operators and holds arrays.

    apply: ``(operator, values, attributes) -> value``.
    stack: Joins equal-shaped values along a new first axis.
    blank: ``(value, shape)``: an array to store tiles like ``value`` into.
    keep: ``(node, value) -> value``: what becomes of a computed value, e.g. rounding to its type.
    replaced: Identity of a node -> ``(values) -> value``, for nodes that are computed otherwise than by their
        row.
    """

    apply: Callable[[Operator, Sequence[Any], Mapping[str, Any]], Any]
    stack: Callable[[Sequence[Any]], Any]
    blank: Callable[[Any, tuple[int, ...]], Any]
    keep: Callable[[Node, Any], Any] = lambda node, value: value
    replaced: Mapping[int, Callable[[Sequence[Any]], Any]] = field(default_factory=dict)


NUMERIC = Domain(
    lambda operator, values, attributes: operator.reference(values, attributes),
    np.stack,
    lambda value, shape: np.zeros(shape),
)


def finite_domain(field: Any) -> Domain:
    """Return the domain of a `Field` or other `Arithmetic`; operators outside LAX are refused by name."""

    def apply(operator: Operator, values: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        if operator.finite is None:
            raise VerificationError(
                f"{operator.name} has no finite-field semantics: the program is outside LAX"
            )
        return operator.finite(field, values, attributes)

    def stack(values: Sequence[Any]) -> Any:
        return field.joined(values, np.stack)

    def blank(value: Any, shape: tuple[int, ...]) -> Any:
        return value.zero.map(lambda part: np.broadcast_to(part, shape).copy())

    return Domain(apply, stack, blank)


def interpret(graph: Graph, operands: Sequence[Any], domain: Domain) -> tuple[Any, ...]:
    """Execute a graph whose extents are numbers.

    operands: One value of the domain per input, in order.
    Returns tuple: One value per output.
    Raises ShapeError if an extent is still symbolic.
    """
    values: dict[str, Any] = dict(zip((node.name for node in graph.inputs), operands, strict=True))
    if graph.level == "block":
        parts = _split_at_accumulators(graph)
        for block in itertools.product(*map(range, _sizes(graph.grid))):
            _run_block(graph, parts, values, block, domain)
    else:
        _run_nodes(graph, graph.nodes, values, domain)
    return tuple(values[output] for output in graph.outputs)


def _run_nodes(graph: Graph, nodes: Sequence[Node], values: dict[str, Any], domain: Domain) -> None:
    for node in nodes:
        if node.name in values:
            continue
        operands = [values[value] for value in node.inputs]
        values.update(zip(node.values, _results(graph, node, operands, domain, {}), strict=True))


def _results(
    graph: Graph, node: Node, operands: Sequence[Any], domain: Domain, context: Mapping[str, Any]
) -> tuple[Any, ...]:
    if node.body is not None:
        return interpret(node.body, operands, domain)
    if id(node) in domain.replaced:
        return (domain.replaced[id(node)](operands),)
    attributes = {**node_attributes(node, graph), **context}
    return (domain.keep(node, domain.apply(get_operator(node.operator), operands, attributes)),)


def _run_block(
    graph: Graph,
    parts: tuple[Sequence[Node], Sequence[Node]],
    values: dict[str, Any],
    block: tuple[int, ...],
    domain: Domain,
) -> None:
    """Run one block: the loop, then the accumulators and what follows; keep what is stored."""
    looped, after = parts
    collected: dict[str, list[list[Any]]] = {node.name: [] for node in after}
    local: dict[str, Any] = {}
    for step in itertools.product(*map(range, _sizes(graph.loops))):
        local = dict(values)
        for node in looped:
            operands = [local[value] for value in node.inputs]
            local.update(_run_block_node(graph, node, operands, (*block, *step), local, domain))
        for node in after:
            if _role(node) == "accumulate":
                collected[node.name].append([local[value] for value in node.inputs])
    for node in after:
        iterations = zip(*collected[node.name], strict=True)
        operands = [domain.stack(column) for column in iterations] or [local[value] for value in node.inputs]
        local.update(_run_block_node(graph, node, operands, block, local, domain))
    values.update({node.name: local[node.name] for node in graph.nodes if _role(node) == "store"})


def _run_block_node(
    graph: Graph,
    node: Node,
    operands: list[Any],
    index: tuple[int, ...],
    local: Mapping[str, Any],
    domain: Domain,
) -> dict[str, Any]:
    """Run one node at a grid (and loop) index, with the context its role asks for."""
    role = _role(node)
    context: dict[str, Any] = {}
    if role in ("load", "store"):
        attributes = node_attributes(node)
        tile = operands[0].shape if role == "store" else attributes["shape"]
        context["begin"] = _begin(graph, (*attributes["grid"], *attributes.get("loop", ())), tile, index)
        if role == "store":
            whole = local.get(node.name)
            operands = [
                domain.blank(operands[0], attributes["shape"]) if whole is None else whole,
                operands[0],
            ]
    return dict(zip(node.values, _results(graph, node, operands, domain, context), strict=True))


def _begin(graph: Graph, axes: Sequence[int], tile: Sequence[int], index: Sequence[int]) -> tuple[int, ...]:
    """Return a tile's offset: the dimensions that split an axis are mixed-radix digits, the loop's last."""
    extents = _sizes((*graph.grid, *graph.loops))
    position = [0] * len(tile)
    for axis, extent, at in zip(axes, extents, index, strict=False):
        if axis >= 0:
            position[axis] = position[axis] * extent + at
    return tuple(digit * extent for digit, extent in zip(position, tile, strict=True))


def _role(node: Node) -> str:
    return get_operator(node.operator).role


def _split_at_accumulators(graph: Graph) -> tuple[list[Node], list[Node]]:
    """Return the nodes of an iteration, and the accumulators with what follows them."""
    late: set[str] = set()
    looped, after = [], []
    for node in graph.nodes:
        if _role(node) == "accumulate" or late & set(node.inputs):
            after.append(node)
            late |= set(node.values)
        elif _role(node) != "input":
            looped.append(node)
    return looped, after


def _sizes(axes: Sequence[Axis]) -> list[int]:
    for axis in axes:
        if not isinstance(axis.extent, int):
            raise ShapeError(f"dimension {axis.name}={axis.extent} is symbolic; bind its sizes first")
    return [int(axis.extent) for axis in axes]


def abstract_expressions(
    graph: Graph,
    operands: Sequence[AbstractExpression] | None = None,
    contracted: Mapping[str, tuple[str, Callable[[AbstractExpression], AbstractExpression]]] | None = None,
) -> tuple[AbstractExpression, ...]:
    """Return the abstract expression of every output (Mirage, §4.3).

    operands: Expressions of the inputs; by default their names.
    contracted: Value -> a value that it is taken to be one function of, and that function.
    """
    names = [node.name for node in graph.inputs]
    values: dict[str, AbstractExpression] = dict(zip(names, operands or names, strict=True))
    for node in graph.nodes:
        if node.name in (contracted or {}):
            source, function = (contracted or {})[node.name]
            values[node.name] = function(values[source])
        elif node.name not in values:
            arguments = [values[value] for value in node.inputs]
            values.update(zip(node.values, _abstract(graph, node, arguments), strict=True))
    return tuple(values[output] for output in graph.outputs)


def _abstract(
    graph: Graph, node: Node, arguments: list[AbstractExpression]
) -> tuple[AbstractExpression, ...]:
    if node.body is not None:
        return abstract_expressions(node.body, arguments)
    tiles = [graph.tile(value) for value in node.inputs]
    return (get_operator(node.operator).abstract(arguments, tiles, node_attributes(node, graph)),)


def lax_classes(graph: Graph) -> frozenset[str]:
    """Return the LAX classes of all operators in a graph, nested graphs included."""
    return frozenset(
        get_operator(node.operator).lax_class(node_attributes(node, owner)) for owner, node in graph.walk()
    )
