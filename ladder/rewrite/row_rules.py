"""What follows the product of a stored matrix, brought to its rows.

A product of tensors of more axes multiplies all rows at once and reshapes the result. Sums with a bias and
other functions of each element come before that, so that the product's kernel computes them too.
"""

from __future__ import annotations

from typing import Any

from ladder.ir.extents import product
from ladder.ir.ops import get_operator
from ladder.rewrite.rules import Match, Pattern, Rule, Rules


def _rows(match: Match, value: str) -> str | None:
    """Return the matrix that a value is in another shape, with the same last axis."""
    node = match.builder.node(value)
    if node.operator != "reshape":
        return None
    source, shape = match.builder.tile(node.inputs[0]).shape, node.tile.shape
    return node.inputs[0] if len(source) == 2 and len(shape) > 2 and source[1] == shape[-1] else None


def _before_reshape(match: Match) -> str | None:
    """``f(reshape(rows), vector, number)`` -> ``reshape(f(rows, vector, number))``."""
    root = match.root
    if not get_operator(root.operator).elementwise or len(root.tile.shape) < 3:
        return None
    columns, operands, matrices = root.tile.shape[-1], list[str](), set[tuple[Any, ...]]()
    for value in root.inputs:
        shape, rows = match.builder.tile(value).shape, _rows(match, value)
        if rows is not None and shape == root.tile.shape:
            matrices.add(match.builder.tile(rows).shape)
        elif product(shape) != 1 and (shape[-1:] != (columns,) or product(shape) != columns):
            return None
        elif rows is None and len(shape) > 2:
            rows = match.builder.add("reshape", value, shape=shape[-1:])
        operands.append(rows or value)
    if len(matrices) != 1:
        return None
    attributes: dict[str, Any] = dict(root.attributes)
    made = match.builder.add(root.operator, *operands, **attributes)
    return match.builder.add("reshape", made, shape=root.tile.shape)


ROWS_OF_PRODUCTS: Rules = (Rule("functions of rows before they are reshaped", Pattern(), _before_reshape),)
