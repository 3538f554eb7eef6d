"""The float64 reference executor: what a graph means, in real arithmetic on decoded weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ladder.ir.build import bind
from ladder.ir.extents import match_shape
from ladder.ir.graph import Graph, Node
from ladder.ir.interpret import NUMERIC, interpret
from ladder.ir.quantized_values import components_of
from tile_types.errors import DTypeError, ShapeError, unknown_name
from tile_types.quantized import QuantizedTensor

Operand = Any
"""numpy or torch array of values, or a `QuantizedTensor`."""


def evaluate(
    graph: Graph, inputs: Mapping[str, Operand] | Sequence[Operand]
) -> npt.NDArray[np.float64] | tuple[npt.NDArray[np.float64], ...]:
    """Execute a graph in float64.

    Types do not round: ``convert`` keeps values, so this is the exact meaning of the program on
    the decoded operands. ``encode`` rounds.

    graph: At any level; symbolic extents are read off the inputs.
    inputs: By name or in order. Arrays of values (numpy or torch, any dtype); an input of a quantized type
        takes a `QuantizedTensor`.
    Returns: float64 array, or a tuple of them if the graph has several outputs.
    Raises ShapeError if an input is missing or has another shape, or one size two values.
    Raises DTypeError if a quantized type gets an array, or codes of another type.
    """
    given = _by_name(graph, inputs)
    sizes: dict[str, int] = {}
    for node in graph.inputs:
        match_shape(node.tile.shape, np.shape(given[node.name]) or (), f"input {node.name!r}", sizes)
    values = [_operand(node, given[node.name]) for node in graph.inputs]
    results = tuple(np.asarray(value) for value in interpret(bind(graph, sizes), values, _KEPT))
    return results[0] if len(results) == 1 else results


def _kept(node: Node, value: Any) -> Any:
    """Return a computed value; the greatest of no integers is the least of their type."""
    name = node.tile.ttype.name if node.operator == "reduce_max" else ""
    if not re.fullmatch(r"u?int(8|16|32|64)", name):
        return value
    return np.where(np.isneginf(value), float(np.iinfo(name).min), value)


_KEPT = replace(NUMERIC, keep=_kept)


def _by_name(graph: Graph, inputs: Mapping[str, Operand] | Sequence[Operand]) -> dict[str, Operand]:
    names = [node.name for node in graph.inputs]
    if not isinstance(inputs, Mapping):
        if len(inputs) != len(names):
            raise ShapeError(
                f"graph {graph.name!r} takes inputs {', '.join(names)}; got {len(inputs)} of them"
            )
        return dict(zip(names, inputs, strict=True))
    for name in inputs:
        if name not in names:
            raise unknown_name(f"input of graph {graph.name!r}", name, names)
    for name in names:
        if name not in inputs:
            raise ShapeError(f"graph {graph.name!r} needs the input {name!r}")
    return dict(inputs)


def _operand(node: Node, value: Operand) -> Any:
    ttype = node.tile.ttype
    if not isinstance(value, QuantizedTensor):
        if ttype.is_block:
            raise DTypeError(f"input {node.name!r} is {ttype.name}: give a QuantizedTensor (see quantize)")
        held = value.detach().double().cpu().numpy() if hasattr(value, "detach") else value
        return np.asarray(held).astype(np.float64)
    if value.ttype != ttype.element_type:
        raise DTypeError(f"input {node.name!r} is {ttype.name}, the QuantizedTensor holds {value.type_name}")
    if ttype.is_block and min(ttype.block_size, value.shape[1]) != min(value.group_size, value.shape[1]):
        raise DTypeError(
            f"input {node.name!r} is {ttype.name}, the QuantizedTensor has a scale per"
            f" {value.group_size} elements"
        )
    return components_of(value)
