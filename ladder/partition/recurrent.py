"""Recurrent layers: by a kernel of ours on CPUs with vectors of 8 or 16 floats."""

from __future__ import annotations

from ladder.ir.graph import Graph, Node
from ladder.ir.recurrent import as_recurrent
from ladder.partition.subgraphs import Subgraph, part_of
from schedules.row_panels import registers_of
from targets import TileDevice
from tile_types.errors import ShapeError

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
