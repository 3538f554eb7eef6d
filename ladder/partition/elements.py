"""Types of elements that kernels of chains have, and chains that no kernel has for theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ladder.ir.graph import Graph
from ladder.partition.subgraphs import Subgraph

FLOATS8 = ("fp8_e4m3", "fp8_e5m2")
"""Types of elements that kernels of chains convert and move, and do not compute with."""

MOVES_CODES = ("input", "convert", "broadcast", "concat", "gather", "put", "reshape", "slice", "transpose")
"""Operators that read or make them."""

ELEMENTS = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "uint16", "int8", "uint8", "bool",
    *FLOATS8,
)  # fmt: skip
"""Types of elements that kernels of chains read, compute with and store."""

OF_TORCH: Mapping[str, tuple[str, ...]] = {"rocm": ("float64",)}
"""Kind of device -> types that torch computes: LLVM has no functions of float64 for AMD GPUs."""


def lacking(graph: Graph, kind: str) -> str:
    """Say which type of elements kernels of chains lack on a kind of device; empty if none."""
    if kind != "cuda" and any(node.operator == "gather" for node in graph.nodes):
        return "no kernel of chains gathers"
    types = {graph.tile(value).ttype.name for node in graph.nodes for value in node.values}
    known = {*ELEMENTS} - {*OF_TORCH.get(kind, ())}
    if types - known:
        return f"no kernel of chains has {min(types - known)}"
    computed = (node for node in graph.nodes if node.operator not in MOVES_CODES)
    read = {graph.tile(value).ttype.name for node in computed for value in (*node.inputs, *node.values)}
    return "".join(f"no kernel of chains computes with {name}" for name in sorted(read & {*FLOATS8})[:1])


def without_kernel(part: Subgraph, kind: str) -> Subgraph:
    """Return a chain of elements that no kernel has as torch runs it; any other part as it is."""
    reason = lacking(part.graph, kind) if part.kind == "chain" else ""
    return replace(part, kind="torch", reason=reason) if reason else part
