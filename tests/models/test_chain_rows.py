"""Chains of GPUs that would leave most of the device idle by too few rows."""

from __future__ import annotations

from ladder.ir import Graph, GraphBuilder
from ladder.partition import partition
from targets import get_device


def total(rows: int, columns: int) -> Graph:
    g = GraphBuilder("model")
    square = g.add("square", g.input("x", "float32", (rows, columns)))
    sums = g.add("reduce_sum", square, axis=1)
    return g.finish(g.add("reduce_sum", sums, axis=0))


def norm(images: int, channels: int, points: int) -> Graph:
    """Return differences from the mean over all of an image, divided by the root of their squares' sum."""
    g = GraphBuilder("model")
    x = g.input("x", "float32", (images, channels, points))
    mean = g.add("reduce_sum", g.add("reduce_sum", x, axis=2), axis=1)
    apart = g.add("sub", x, mean)
    squares = g.add("reduce_sum", g.add("reduce_sum", g.add("square", apart), axis=2), axis=1)
    return g.finish(g.add("mul", apart, g.add("rsqrt", squares)))


def chains(graph: Graph, target: str) -> list[list[str]]:
    """Return the operators of each chain."""
    parts = partition(graph, device=get_device(target))
    return [[n.operator for n in part.graph.nodes if n.operator != "input"] for part in parts]


def test_sums_over_all_axes_are_two_launches() -> None:
    assert chains(total(1024, 4096), "cuda/sm_90a") == [["square", "reduce_sum"], ["reduce_sum"]]


def test_sums_stay_one_launch_where_that_costs_little() -> None:
    whole = [["square", "reduce_sum", "reduce_sum"]]
    assert chains(total(64, 128), "cuda/sm_90a") == whole  # little to read
    assert chains(total(1024, 4096), "cpu") == whole


def test_a_norm_over_whole_images_sums_by_channels_first() -> None:
    found = chains(norm(16, 64, 65536), "cuda/sm_90a")
    assert found[0] == ["reduce_sum"]
    assert ["sub", "square", "reduce_sum"] in found
    assert chains(norm(2048, 8, 128), "cuda/sm_90a") == chains(norm(2048, 8, 128), "cpu")  # images enough
