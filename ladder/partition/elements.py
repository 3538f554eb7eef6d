"""Gathers and scatters of elements by computed numbers: by kernels of ours on CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.partition.subgraphs import Subgraph, part_of
from targets import TileDevice

KINDS: Mapping[str, str] = {"onnx.GatherElements": "gather", "onnx.ScatterElements": "scatter"}
"""Calls -> the kernel of `ladder.lower.cpu.elements`."""

TYPES, NUMBERS = ("float32", "int32", "int64", "uint8", "int8"), ("int32", "int64")
"""Types of elements, and of their numbers, that kernels take."""


def elements_part(graph: Graph, node: Node, device: TileDevice | None) -> Subgraph | None:
    """Return the part of a call that moves elements by number; None if no kernel of ours computes it."""
    target = str(dict(node.attributes).get("target"))
    if target not in KINDS or device is None or device.kind != "llvm" or len(set(node.inputs)) < 2:
        return None
    tiles = [graph.tile(value) for value in node.inputs]
    axis, given = axis_of(graph, node), operator_attributes(node)
    shapes = [[*t.shape[:axis], *t.shape[axis + 1 :]] for t in tiles]
    plain = given.get("reduction", b"none") in (b"none", "none") and len(tiles[0].shape) > axis
    if not plain or any(shape != shapes[0] for shape in shapes):
        return None
    if tiles[0].ttype.name not in TYPES or tiles[1].ttype.name not in NUMBERS:
        return None
    return part_of("elements", graph, node)


def operator_attributes(node: Node) -> dict[str, Any]:
    """Return the attributes of the ONNX operator that a call is."""
    return dict(dict(node_attributes(node)["keywords"])["attributes"])


def axis_of(graph: Graph, node: Node) -> int:
    """Return the axis along which elements are numbered."""
    rank = max(len(graph.tile(node.inputs[0]).shape), 1)
    return int(operator_attributes(node).get("axis", 0)) % rank
