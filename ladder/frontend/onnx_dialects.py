"""What exporters and optimizers write in ways of their own, restated as the standard has it.

onnxruntime's optimizer appends the nodes that it fuses, so that nodes stand after those that read them; it
writes norms as operators of ONNX's domain before ONNX had them; some tools name that domain ``ai.onnx``,
leave out the versions of the domains that they use, or the graph's name, write -1 for an open extent, leave
the channels of pictures open though a stored kernel says how many there are, or leave nodes without results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Any

import onnx

from ladder.frontend.onnx_check import graphs_of, nodes_of
from ladder.frontend.onnx_stages import names_read
from ladder.runtime.onnx_ops.evaluate import versions_of

MICROSOFT = "com.microsoft"
"""Domain of onnxruntime's own operators."""

UNSTATED = {MICROSOFT: 1, "ai.onnx.ml": 1}
"""Domains of which onnxruntime takes this version where a model uses them and states none."""

BEFORE: Mapping[str, int] = {"LayerNormalization": 17, "SimplifiedLayerNormalization": 1 << 31}
"""Operators that onnxruntime has in ONNX's domain -> the version from which on they are the standard's."""


def restated(model: Any) -> Any:
    """Return a model without functions as the standard has it; the same object where nothing is to do."""
    found = model
    for applies, change in CHANGES:
        if applies(found):
            if found is model:
                found = onnx.ModelProto()
                found.CopyFrom(model)
            change(found)
    return found


# open extents ------------------------------------------------------------------------------------------


def _open(model: Any) -> list[Any]:
    """Return the extents that are stated as -1."""
    infos = [info for graph in graphs_of(model.graph) for info in _stated(graph)]
    return [dim for info in infos for dim in info.type.tensor_type.shape.dim if dim.dim_value == -1]


def _stated(graph: Any) -> Iterator[Any]:
    yield from (*graph.input, *graph.value_info, *graph.output)


def _leave_open(model: Any) -> None:
    for dim in _open(model):
        dim.ClearField("dim_value")


def _channels(model: Any) -> list[tuple[Any, int]]:
    """Return open channels of inputs that a convolution reads, and how many its stored kernel takes."""
    graph = model.graph
    kernels = {tensor.name: tensor.dims for tensor in graph.initializer}
    inputs = {info.name: info.type.tensor_type.shape.dim for info in graph.input}
    found = []
    for node in graph.node:
        if node.op_type != "Conv" or node.domain or node.input[1] not in kernels:
            continue
        dims, kernel = inputs.get(node.input[0], ()), kernels[node.input[1]]
        if len(dims) == len(kernel) and not dims[1].HasField("dim_value"):
            groups = next((each.i for each in node.attribute if each.name == "group"), 1)
            found.append((dims[1], kernel[1] * groups))
    return found


def _count(model: Any) -> None:
    stated = [dim for info in _stated(model.graph) for dim in info.type.tensor_type.shape.dim]
    for channels, count in _channels(model):
        name = channels.dim_param
        for dim in [channels, *(dim for dim in stated if name and dim.dim_param == name)]:
            dim.dim_value = count


# domains -----------------------------------------------------------------------------------------------


def _spelled_out(model: Any) -> list[Any]:
    """Return what names ONNX's domain in full."""
    return [item for item in (*model.opset_import, *nodes_of(model.graph)) if item.domain == "ai.onnx"]


def _shorten(model: Any) -> None:
    for item in _spelled_out(model):
        item.domain = ""
    stated = {entry.domain: entry.version for entry in reversed(model.opset_import)}
    del model.opset_import[:]
    model.opset_import.extend(onnx.helper.make_opsetid(*pair) for pair in reversed(stated.items()))


def _unstated(model: Any) -> list[str]:
    """Return the domains that nodes are of and no version is stated of."""
    used = {node.domain for node in nodes_of(model.graph)}
    return [domain for domain in UNSTATED if domain in used and domain not in versions_of(model)]


def _state(model: Any) -> None:
    model.opset_import.extend(
        onnx.helper.make_opsetid(domain, UNSTATED[domain]) for domain in _unstated(model)
    )


def _own(model: Any) -> list[Any]:
    """Return the nodes whose operator is onnxruntime's in ONNX's domain."""
    version = versions_of(model).get("", 0)
    return [n for n in nodes_of(model.graph) if not n.domain and version < BEFORE.get(n.op_type, 0)]


def _rename(model: Any) -> None:
    for node in _own(model):
        node.domain = MICROSOFT


def _idle(model: Any) -> list[Any]:
    """Return the graphs that have nodes without results."""
    return [graph for graph in graphs_of(model.graph) if not all(any(node.output) for node in graph.node)]


def _drop(model: Any) -> None:
    for graph in reversed(_idle(model)):  # inner ones first: nodes are replaced with the graphs in them
        _replace(graph, [node for node in graph.node if any(node.output)])


def _replace(graph: Any, nodes: list[Any]) -> None:
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


# order -------------------------------------------------------------------------------------------------


def _out_of_order(model: Any) -> list[Any]:
    """Return the graphs in which a node stands before one that makes what it reads."""
    return [
        graph for graph in graphs_of(model.graph) if any(maker >= reader for maker, reader in _edges(graph))
    ]


def _edges(graph: Any) -> Iterator[tuple[int, int]]:
    """Yield the places of nodes and of those that read their results."""
    made = {name: at for at, node in enumerate(graph.node) for name in node.output if name}
    for at, node in enumerate(graph.node):
        yield from ((made[name], at) for name in names_read(node) if name in made)


def _sort(model: Any) -> None:
    for graph in reversed(_out_of_order(model)):
        _sort_graph(graph)


def _sort_graph(graph: Any) -> None:
    """Put each node behind those that it reads from, else as they stand; a ring stays as it is."""
    readers: dict[int, list[int]] = {}
    missing = [0] * len(graph.node)
    for maker, reader in set(_edges(graph)):
        readers.setdefault(maker, []).append(reader)
        missing[reader] += 1
    ready = [at for at, count in enumerate(missing) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heappop(ready))
        for reader in readers.get(order[-1], ()):
            missing[reader] -= 1
            if not missing[reader]:
                heappush(ready, reader)
    if len(order) == len(graph.node):
        _replace(graph, [graph.node[at] for at in order])


def _name(model: Any) -> None:
    model.graph.name = "graph"


CHANGES: tuple[tuple[Callable[[Any], Any], Callable[[Any], None]], ...] = (
    (lambda model: not model.graph.name, _name),
    (_open, _leave_open),
    (_channels, _count),
    (_spelled_out, _shorten),
    (_own, _rename),
    (_unstated, _state),
    (_idle, _drop),
    (_out_of_order, _sort),
)
"""What tells whether a model needs a change -> what changes it, in this order."""
