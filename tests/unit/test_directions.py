"""Reductions along rows of a large value, and along its columns, have kernels of their own on GPUs."""

from __future__ import annotations

import pytest

from ladder.ir import GraphBuilder
from ladder.partition import partition
from targets import get_device

H200 = get_device("cuda/sm_90a")


def kernels(rows: int, columns: int, axes: tuple[int, int]) -> int:
    """Return the kernels of means of squares along two axes."""
    g = GraphBuilder("chain")
    x = g.add("convert", g.input("x", "bfloat16", (rows, columns)), type="float32")
    square = g.add("square", x)
    graph = g.finish(*(g.add("reduce_sum", square, axis=axis, keep=False) for axis in axes))
    return sum(part.kind == "chain" for part in partition(graph, device=H200))


@pytest.mark.parametrize(
    ("rows", "columns", "axes", "count"),
    [(2048, 2048, (1, 0), 2), (2048, 2048, (0, 1), 2), (64, 64, (1, 0), 1), (2048, 2048, (1, 1), 1)],
)
def test_rows_and_columns_are_reduced_apart(
    rows: int, columns: int, axes: tuple[int, int], count: int
) -> None:
    """Of large values: of small ones another launch would cost more."""
    assert kernels(rows, columns, axes) == count
