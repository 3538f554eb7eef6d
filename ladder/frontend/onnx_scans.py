"""Scans of ONNX models whose state is the end of the last window: windows of a sequence, without a loop.

A body that joins its state and the next elements, gives that window out and keeps its end as the new state
makes overlapping windows of all elements in a row. Slices of that row make them too, however many they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ladder.frontend.onnx_branches import outside, unchanged
from ladder.frontend.onnx_check import graphs_of, nodes_of
from ladder.frontend.onnx_inline import read_within
from ladder.runtime.onnx_ops.evaluate import version_of, versions_of

OLDEST = 13
"""Version from which on the operators that stand for a scan have their form."""

END = np.iinfo(np.int64).max
"""What slices to the end state."""


def with_windows(model: Any) -> Any:
    """Return a checked model in which scans that make windows of a sequence are slices of it."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    if version_of("", versions_of(model)) < OLDEST:
        return model
    found = {
        at: form for at, node in enumerate(model.graph.node) if (form := _form(node, stored)) is not None
    }
    if not found:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.node[:]
    for at, node in enumerate(model.graph.node):
        copy.graph.node.extend(_as_slices(node, found[at]) if at in found else [node])
    return copy


@dataclass(frozen=True)
class Windows:
    """Windows that a scan makes.

    rank: Axes of an element; the last is the one that windows are along.
    state, step: Elements that a window shares with the one before, and further ones.
    taken, given: Axes of the sequence and of the result along which the scan goes.
    """

    rank: int
    state: int
    step: int
    taken: int
    given: int


def _form(node: Any, stored: Mapping[str, Any]) -> Windows | None:
    """Return the windows that a node makes; None if it is another one."""
    if node.op_type != "Scan" or node.domain or len(node.input) != 2 or len(node.output) != 2:
        return None
    given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if any(any(given.get(f"scan_{side}_directions", ())) for side in ("input", "output")):
        return None
    body = given["body"]
    nodes = [inner for inner in body.node if inner.op_type != "Constant"]
    if [inner.op_type for inner in nodes] != ["Concat", "Slice"] or given["num_scan_inputs"] != 1:
        return None
    join, cut = nodes
    ends = [[info.name for info in infos] for infos in (body.input, body.output)]
    if (
        [*join.input] != ends[0]
        or ends[1] != [cut.output[0], join.output[0]]
        or cut.input[0] != join.output[0]
    ):
        return None
    return _measured(given, body, join, cut, stored)


def _measured(
    given: Mapping[str, Any], body: Any, join: Any, cut: Any, stored: Mapping[str, Any]
) -> Windows | None:
    shapes = [info.type.tensor_type.shape.dim for info in body.input]
    rank = len(shapes[0])
    bounds = _bounds(cut, {**stored, **_constants(body)}, rank)
    state, step = (shape[-1].dim_value if len(shape) else 0 for shape in shapes)
    last = helper.get_attribute_value(join.attribute[0]) in (-1, rank - 1)
    if len(shapes[1]) != rank or not last or state < 1 or step < 1 or bounds != (step, rank - 1):
        return None
    taken, made = ((given.get(f"scan_{side}_axes") or [0])[0] % (rank + 1) for side in ("input", "output"))
    return Windows(rank, state, step, taken, made)


def _constants(body: Any) -> dict[str, Any]:
    found = {tensor.name: tensor for tensor in body.initializer}
    for node in body.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            found[node.output[0]] = node.attribute[0].t
    return found


def _bounds(cut: Any, stored: Mapping[str, Any], rank: int) -> tuple[int, int] | None:
    """Return where a slice to the end of one axis begins, and the axis; None for another slice."""
    if len(cut.input) < 4 or any(name and name not in stored for name in cut.input[1:]):
        return None
    values = [numpy_helper.to_array(stored[name]).reshape(-1).tolist() for name in cut.input[1:] if name]
    if any(len(value) != 1 for value in values):
        return None
    start, end, axis, *steps = (value[0] for value in values)
    return (start, axis % rank) if end >= 1 << 31 and steps in ([], [1]) else None


def _as_slices(node: Any, form: Windows) -> Iterator[Any]:
    """Yield the nodes that stand for a scan: windows are blocks of ``step`` elements side by side."""
    first, name, rank = form.rank - 1, f"{node.output[1]}/windows", form.rank
    blocks = -(-(form.state + form.step) // form.step)
    more = (blocks * form.step) - form.state - form.step
    kept = [axis for axis in range(rank + 1) if axis != form.taken]
    order = [*kept[:first], form.taken, *kept[first:]]
    yield helper.make_node("Transpose", [node.input[1]], [f"{name}/steps"], perm=order)
    yield from _calculated("Reshape", f"{name}/steps", f"{name}/new", [*[0] * first, -1])
    yield helper.make_node("Concat", [node.input[0], f"{name}/new"], [f"{name}/row"], axis=first)
    if node.output[0]:
        yield from _calculated("Slice", f"{name}/row", node.output[0], [-form.state], [END], [first])
    yield from _calculated("Pad", f"{name}/row", f"{name}/whole", [*[0] * (2 * rank - 1), more])
    for at in range(blocks):
        end = (at + 1 - blocks) * form.step or END
        yield from _calculated("Slice", f"{name}/whole", f"{name}/{at}", [at * form.step], [end], [first])
        yield from _calculated("Reshape", f"{name}/{at}", f"{name}/block{at}", [*[0] * first, -1, form.step])
    yield helper.make_node(
        "Concat", [f"{name}/block{at}" for at in range(blocks)], [f"{name}/wide"], axis=rank
    )
    yield from _calculated("Slice", f"{name}/wide", f"{name}/made", [0], [form.state + form.step], [rank])
    back = [axis for axis in range(rank + 1) if axis != first]
    yield helper.make_node(
        "Transpose",
        [f"{name}/made"],
        [node.output[1]],
        perm=[*back[: form.given], first, *back[form.given :]],
    )


def _calculated(operator: str, x: str, result: str, *numbers: list[int]) -> Iterator[Any]:
    """Yield a node of one operand and vectors of known integers."""
    names = [f"{result}:{operator}{at}" for at in range(len(numbers))]
    for name, value in zip(names, numbers, strict=True):
        yield helper.make_node(
            "Constant", [], [name], value=numpy_helper.from_array(np.array(value, np.int64))
        )
    yield helper.make_node(operator, [x, *names], [result])


# Loops of ONNX models without what does not change: their bodies carry and compute less --------------
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
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _rewrite(inner, stored)
        if _is_loop(node):
            after = _states_around(node)
            before = [_before(*found, "/".join(node.output)) for found in [*_products(node, stored)]]
            nodes += [*before, *([node] if any(node.output) else []), *after]
        else:
            nodes.append(node)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def _body(loop: Any) -> Any:
    return next(attribute.g for attribute in loop.attribute if attribute.name == "body")


def _states_around(loop: Any) -> list[Any]:
    """Let a loop read states that never change from around it; returns what its results of them become."""
    body, after = _body(loop), []
    own = _own_names(body)
    staying = {
        name: first
        for name, first in unchanged(loop, body).items()
        if first and (first == name or first not in own)
    }
    for at in reversed(range(2, len(body.input))):
        name = body.input[at].name
        if name not in staying:
            continue
        if loop.output[at - 2]:
            after.append(onnx.helper.make_node("Identity", [staying[name]], [loop.output[at - 2]]))
        del body.input[at], body.output[at - 1], loop.input[at], loop.output[at - 2]
    read_within(body, staying)
    return after


def _own_names(body: Any) -> set[str]:
    """Return the names of what a body, and the graphs in it, take, store and make."""
    found = {name for node in nodes_of(body) for name in node.output}
    for graph in graphs_of(body):
        found |= {each.name for each in (*graph.input, *graph.initializer)}
    return found


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
