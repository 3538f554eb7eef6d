"""Operators with kernels of ours on CPUs: gathers and scatters by number, transforms, recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.recurrent import as_recurrent
from ladder.partition.subgraphs import Subgraph, part_of
from schedules.row_panels import registers_of
from targets import TileDevice
from tile_types.errors import ShapeError

KINDS: Mapping[str, str] = {
    "onnx.GatherElements": "gather", "onnx.ScatterElements": "scatter", "onnx.ScatterND": "scatter_rows",
}  # fmt: skip
"""Calls -> the kernel of `ladder.lower.cpu.elements`."""

TYPES, NUMBERS = ("float32", "int32", "int64", "uint8", "int8"), ("int32", "int64")
"""Types of elements, and of their numbers, that kernels take."""


def elements_part(graph: Graph, node: Node, device: TileDevice | None) -> Subgraph | None:
    """Return the part of a call that moves elements by number; None if no kernel of ours computes it."""
    target = str(dict(node.attributes).get("target"))
    if target not in KINDS or device is None or device.kind != "llvm" or len(set(node.inputs)) < 2:
        return None
    tiles = [graph.tile(value) for value in node.inputs]
    axis, plain = (
        axis_of(graph, node),
        operator_attributes(node).get("reduction", b"none") in (b"none", "none"),
    )
    if target == "onnx.ScatterND":
        plain = plain and 0 < depth_of(graph, node) <= len(tiles[0].shape)
    else:
        shapes = [[*t.shape[:axis], *t.shape[axis + 1 :]] for t in tiles]
        plain = plain and len(tiles[0].shape) > axis and all(shape == shapes[0] for shape in shapes)
    if not plain or tiles[0].ttype.name not in TYPES or tiles[1].ttype.name not in NUMBERS:
        return None
    return part_of("elements", graph, node)


def operator_attributes(node: Node) -> dict[str, Any]:
    """Return the attributes of the ONNX operator that a call is."""
    return dict(dict(node_attributes(node)["keywords"])["attributes"])


def axis_of(graph: Graph, node: Node) -> int:
    """Return the axis along which elements are numbered."""
    rank = max(len(graph.tile(node.inputs[0]).shape), 1)
    return int(operator_attributes(node).get("axis", 0)) % rank


def depth_of(graph: Graph, node: Node) -> int:
    """Return how many numbers name a row of ``ScatterND``; 0 where that is open."""
    last = graph.tile(node.inputs[1]).shape[-1:]
    return last[0] if last and isinstance(last[0], int) else 0


SHORTEST, LONGEST = 16, 4096
"""Lengths of transforms that kernels compute."""


def fourier_part(graph: Graph, node: Node, device: TileDevice | None) -> Subgraph | None:
    """Return the part of a transform; None if no kernel of ours computes it."""
    if device is None or device.kind != "llvm" or not _is_ours(graph, node):
        return None
    return part_of("fourier", graph, node)


def _is_ours(graph: Graph, node: Node) -> bool:
    target = str(dict(node.attributes).get("target"))
    if target not in ("onnx.STFT", "onnx.DFT"):
        return False
    given, x, out = operator_attributes(node), graph.tile(node.inputs[0]), graph.tile(node.name)
    length, rank = length_of(graph, node), len(x.shape)
    if x.ttype.name != "float32" or length is None or not SHORTEST <= length <= LONGEST:
        return False
    if length & (length - 1) or given.get("inverse", 0) or out.shape[-1] != 2:
        return False
    if target == "onnx.STFT":
        window = operand(node, 2)
        alone = window is not None and graph.tile(window).shape == (length,) and operand(node, 3) is None
        return alone and bool(given.get("onesided", 1)) and (rank == 2 or x.shape[-1] == 1)
    last = int(given.get("axis", 1 if version(node) < 20 else -2)) % rank == rank - 2
    extent = x.shape[-2] if rank > 1 else None
    short = isinstance(extent, int) and (
        extent == length or (operand(node, 1) is not None and extent < length)
    )
    return last and short and x.shape[-1] == 1 and bool(given.get("onesided", 0)) and operand(node, 2) is None


def length_of(graph: Graph, node: Node) -> int | None:
    """Return the even length whose transform has as many frequencies as the result; None if they are open."""
    shape = graph.tile(node.name).shape
    bins = shape[-2] if len(shape) > 1 else None
    return 2 * (bins - 1) if isinstance(bins, int) else None


def version(node: Node) -> int:
    """Return the version of the operator that a call is."""
    return int(dict(node_attributes(node)["keywords"])["version"])


def operand(node: Node, at: int) -> str | None:
    """Return the value that is an operand of the operator; None if it is left out."""
    arguments = node_attributes(node)["arguments"]
    found = arguments[at] if at < len(arguments) else None
    return None if found is None else node.inputs[found[1]]


DOT_PRODUCTS = "avx512_vnni"
"""Instruction that sums products of codes."""


def recurrent_part(graph: Graph, node: Node, device: TileDevice | None) -> Subgraph | None:
    """Return the part of a layer; None if no kernel of ours computes it."""
    if device is None or registers_of(device) is None:
        return None
    try:
        as_recurrent(graph, node)
    except ShapeError:
        return None
    return part_of("recurrent", graph, node)
