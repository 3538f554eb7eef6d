"""ONNX operators as steps of plans: their attributes are literals of a tile graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ladder.ir.build import node_attributes
from ladder.ir.graph import Node
from ladder.runtime.onnx_ops.evaluate import FAILURES, failed
from ladder.runtime.onnx_ops.operation import Operation
from ladder.runtime.onnx_ops.table import TABLE, key_of
from tile_types.errors import unknown_name


def operation_of_call(node: Node) -> Operation:
    """Return the operator that a call of a tile graph is."""
    given = node_attributes(node)
    return _operation(given["target"], dict(given["keywords"]), len(node.tiles))


def _operation(target: str, keywords: Mapping[str, Any], count: int) -> Operation:
    name = key_of(str(keywords["domain"]), target.partition(".")[2])
    if name not in TABLE:
        raise unknown_name("ONNX operator", name, TABLE)
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in keywords["attributes"]}
    return Operation(name, int(keywords["version"]), given, count)


def operation_run(target: str, keywords: Mapping[str, Any], count: int) -> Callable[..., tuple[Any, ...]]:
    """Return ``(operands) -> results`` of an operator.

    target: ``"onnx.Name"``.
    keywords: ``attributes``: pairs of name and literal; ``domain``; ``version``.
    count: Results that the graph has.
    Raises UnknownNameError if there is none of that name.
    """
    op = _operation(target, keywords, count)
    row = TABLE[op.name]

    def run(*operands: Any) -> tuple[Any, ...]:
        try:
            found = row(op, *operands)
        except FAILURES as error:
            raise failed(f"{op.name} of version {op.version}", operands, error) from error
        return found[:count] if isinstance(found, tuple) else (found,)

    return run
