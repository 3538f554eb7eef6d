"""Stores of neighbouring results of a row, by one vector where rows begin at multiples of its size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.rocm.dialect import as_type, lanes, vector
from ladder.lower.rocm.machine import join_bfloat


def store_run(
    y: Any, place: tuple[Expr, Expr], count: int, value: Callable[[int], Expr], rounded: Callable[[int], Expr]
) -> None:
    """Store ``count`` neighbouring results of a row; columns beyond the last are not written.

    place: Their row and the first column.
    value, rounded: Emit a result as float32, and as an element of ``y``.
    """
    (m, n), columns = place, y.shape[1]

    def whole() -> None:
        b.store(y, _as_elements(str(y.dtype), [b.bind(value(i)) for i in range(count)]), m, lanes(n, count))

    def single() -> None:
        for i in range(count):
            with b.when(n + i < columns):
                b.store(y, rounded(i), m, n + i)

    b.either(T.And(columns % count == 0, n + count <= columns), whole, single)


def _as_elements(ttype: str, values: list[Expr]) -> Expr:
    """Return float32 values as a vector of a type."""
    if ttype == "bfloat16":  # TVM would round each by many instructions
        words = [join_bfloat(*values[i : i + 2]) for i in range(0, len(values), 2)]
        return as_type(vector(words), f"bfloat16x{len(values)}")
    return vector([value if ttype == "float32" else T.Cast(ttype, value) for value in values])
