"""Loops of ONNX models without what does not change: their bodies carry and compute less.

Exporters hand stored matrices from iteration to iteration, and write a recurrent layer as a Loop that takes
the next element of a sequence and multiplies it by a matrix, which is read from memory each time. What stays
is read from around the loop instead, and one product of all elements before it reads the matrix once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import onnx

from ladder.frontend.onnx_branches import outside, unchanged
from ladder.frontend.onnx_check import nodes_of
from ladder.frontend.onnx_inline import read_within


def with_lean_loops(model: Any) -> Any:
    """Return a checked model whose loops carry only what changes, after products that can be before them."""
    if not any(map(_is_loop, nodes_of(model.graph))):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _rewrite(copy.graph, {})
    return copy


def _is_loop(node: Any) -> bool:
    return node.op_type == "Loop" and not node.domain


def _rewrite(graph: Any, around: Mapping[str, int]) -> None:
    """Rewrite the loops of a graph, and of graphs in it; ``around`` has stored tensors with their ranks."""
    stored = {**around, **{tensor.name: len(tensor.dims) for tensor in graph.initializer}}
    nodes: list[Any] = []
    for node in graph.node:
        if _is_loop(node):
            after = _states_around(node)
            before = [_before(*found, "/".join(node.output)) for found in [*_products(node, stored)]]
            nodes += [*before, node, *after]
        else:
            nodes.append(node)
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _rewrite(inner, stored)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def _body(loop: Any) -> Any:
    return next(attribute.g for attribute in loop.attribute if attribute.name == "body")


def _states_around(loop: Any) -> list[Any]:
    """Let a loop read states that never change from around it; returns what its results of them become."""
    body, after = _body(loop), []
    made = {name for node in body.node for name in node.output}
    staying = {name: first for name, first in unchanged(loop, body).items() if first and first not in made}
    for at in reversed(range(2, len(body.input))):
        name = body.input[at].name
        if name not in staying:
            continue
        if loop.output[at - 2]:
            after.append(onnx.helper.make_node("Identity", [staying[name]], [loop.output[at - 2]]))
        del body.input[at], body.output[at - 1], loop.input[at], loop.output[at - 2]
    read_within(body, staying)
    return after


def _before(product: Any, sequence: str, matrix: str, number: str, prefix: str) -> Any:
    """Return the product of a whole sequence; that of one element becomes an element of it."""
    (result,) = product.output
    whole = onnx.helper.make_node("MatMul", [sequence, matrix], [f"{prefix}/{result}"])
    product.CopyFrom(onnx.helper.make_node("Gather", [whole.output[0], number], [result], product.name))
    return whole


def _products(loop: Any, stored: Mapping[str, int]) -> Iterator[tuple[Any, str, str, str]]:
    """Yield the products of a body that can be made before its loop: node, sequence, matrix, number.

    An element is what Gather takes at a number that grows by one per iteration: none is taken twice.

    stored: Stored tensor around the loop -> its rank.
    """
    body = _body(loop)
    makers = {name: node for node in body.node for name in node.output}
    around, numbers = set(outside(body)), _numbers(body, makers)
    for node in body.node:
        taken = makers.get(node.input[0]) if node.op_type == "MatMul" and not node.domain else None
        if taken is None or taken.op_type != "Gather" or taken.domain:
            continue
        (sequence, number), matrix = taken.input, node.input[1]
        first = [attribute.i for attribute in taken.attribute if attribute.name == "axis"] in ([], [0])
        if first and number in numbers and sequence in around - set(stored) and stored.get(matrix) == 2:
            yield node, sequence, matrix, number


def _numbers(body: Any, makers: Mapping[str, Any]) -> set[str]:
    """Return the inputs of a Loop's body that grow by one per iteration."""
    own = {tensor.name: tensor for tensor in body.initializer}
    own |= {name: node.attribute[0].t for name, node in makers.items() if _is_tensor(node)}
    found = {info.name for info in body.input[:1]}
    for info, result in zip(body.input[2:], body.output[1:], strict=False):
        maker = makers.get(result.name)
        if maker is None or maker.op_type != "Add" or info.name not in maker.input:
            continue
        (step,) = [name for name in maker.input if name != info.name] or [info.name]
        if step in own and onnx.numpy_helper.to_array(own[step]).tolist() in (1, [1]):
            found.add(info.name)
    return found


def _is_tensor(node: Any) -> bool:
    return node.op_type == "Constant" and [a.name for a in node.attribute] == ["value"]
