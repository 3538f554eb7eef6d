"""Transforms of real frames to frequencies, of lengths that are powers of two: by kernels of ours on CPUs."""

from __future__ import annotations

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.partition.elements import operator_attributes
from ladder.partition.subgraphs import Subgraph, part_of
from targets import TileDevice

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
