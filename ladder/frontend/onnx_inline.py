"""Graphs of ONNX models put in the place of a node: what defines an operator, and branches of If."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import onnx


def renamed(nodes: Iterable[Any], names: dict[str, str], prefix: str) -> list[Any]:
    """Return copies of nodes whose results have names of their own.

    nodes: In order.
    names: Name in the graph -> name outside; what the nodes compute is added, under ``prefix``.
    prefix: Unique to the node that is replaced.
    """
    found = []
    for node in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        _read(copy, names)
        for at, name in enumerate(copy.output):
            if name:
                copy.output[at] = names.setdefault(name, f"{prefix}{name}")
        copy.name = f"{prefix}{node.name or node.op_type}"
        found.append(copy)
    return found


def _read(node: Any, names: Mapping[str, str]) -> None:
    """Rename what a node, and the graphs in it, read from outside."""
    for at, name in enumerate(node.input):
        node.input[at] = names.get(name, name)
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            read_within(graph, names)


def read_within(graph: Any, names: Mapping[str, str]) -> None:
    """Rename what a graph, and the graphs in it, read from outside."""
    own = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
    own |= {name for node in graph.node for name in node.output}
    outside = {name: target for name, target in names.items() if name not in own}
    for node in graph.node:
        _read(node, outside)
    for info in graph.output:
        info.name = outside.get(info.name, info.name)
