"""Products, convolutions and rounding of codes of 8 bits: by kernels of ours on CPUs that have AVX2."""

from __future__ import annotations

from collections.abc import Mapping

from ladder.ir.graph import Graph, Node
from ladder.partition.recurrent import DOT_PRODUCTS
from ladder.partition.subgraphs import Subgraph, part_of
from targets import TileDevice

NEEDS = "avx2"
"""Instructions of the kernels."""

OPERATORS: Mapping[str, bool] = {
    "onnx.DynamicQuantizeLinear": False,
    "onnx.MatMulInteger": False,
    "onnx.ConvInteger": True,
}
"""Calls that kernels compute -> whether the library always does where bytes have dot products."""


def codes_part(graph: Graph, node: Node, device: TileDevice | None) -> Subgraph | None:
    """Return the part of a call on codes; None if no kernel of ours computes it."""
    left = OPERATORS.get(str(dict(node.attributes).get("target")))
    if left is None or device is None or device.kind != "llvm" or NEEDS not in device.features:
        return None
    if left and DOT_PRODUCTS in device.features:
        return None
    return part_of("codes", graph, node)
