"""ONNX graphs, node by node: by a row, by the graph that the standard defines it by, or as control flow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import torch

from ladder.ir.build import node_attributes
from ladder.ir.graph import Node
from ladder.runtime.onnx_ops.operation import Operation
from ladder.runtime.onnx_ops.specialized import Specialized
from ladder.runtime.onnx_ops.table import TABLE, key_of
from ladder.runtime.onnx_ops.values import DTYPES, code_of, value_of
from tile_types.errors import LadderError, unknown_name

# Operators that run graphs: If, Loop and Scan --------------------------------------------------------
Scope = Mapping[str, Any]
ControlRun = Callable[..., Any]


def _if(op: Operation, scope: Scope, condition: Any) -> Any:
    branch = op.given["then_branch" if bool(condition.reshape(())) else "else_branch"]
    return tuple(branch((), scope))


def _loop(op: Operation, scope: Scope, most: Any = None, condition: Any = None, *state: Any) -> Any:
    """Run the body until its first result is false, or a number of times."""
    body, values = op.given["body"], list(state)
    limit = None if most is None else int(most.reshape(()))
    going = condition is None or bool(condition.reshape(()))
    scanned: list[list[Any]] = [[] for _ in range(len(body.outputs) - 1 - len(values))]
    at = 0
    while going and (limit is None or at < limit):
        now = condition if condition is not None else torch.tensor(True)
        count = torch.tensor([at] if body.counts_by_vectors else at, dtype=torch.int64)
        found = body((count, now, *values), scope)
        going, condition = bool(found[0]), found[0]
        values = list(found[1 : 1 + len(state)])
        for all_, value in zip(scanned, found[1 + len(state) :], strict=True):
            all_.append(value)
        at += 1
    first = 1 + len(state)
    return *values, *(_stacked(all_, body, first + n) for n, all_ in enumerate(scanned))


def _stacked(values: Sequence[Any], body: Any, at: int, axis: int = 0) -> Any:
    """Return scanned values as one tensor; of no iterations, one of the stated type without elements."""
    if not values:
        return body.nothing(at, axis)
    if isinstance(values[0], np.ndarray):
        return np.stack(values, axis)
    return torch.stack(list(values), axis)


def _scan(op: Operation, scope: Scope, *operands: Any) -> Any:
    return _scan_batches(op, scope, *operands) if op.version < 9 else _scan_once(op, scope, operands)


def _scan_once(op: Operation, scope: Scope, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Run the body for each slice of the scanned operands."""
    body, count = op.given["body"], op.get("num_scan_inputs")
    values, scanned = list(operands[: len(operands) - count]), operands[len(operands) - count :]
    axes = op.get("scan_input_axes") or [0] * count
    turned = op.get("scan_input_directions") or [0] * count
    parts = [
        _slices(x, axis)[:: -1 if back else 1] for x, axis, back in zip(scanned, axes, turned, strict=True)
    ]
    results = len(body.outputs) - len(values)
    found: list[list[Any]] = [[] for _ in range(results)]
    for slices in zip(*parts, strict=True):
        now = body((*values, *slices), scope)
        values, rest = list(now[: len(values)]), now[len(values) :]
        for all_, value in zip(found, rest, strict=True):
            all_.append(value)
    axes = op.get("scan_output_axes") or [0] * results
    turned = op.get("scan_output_directions") or [0] * results
    stacked = [
        _stacked(all_[::-1] if back else all_, body, len(values) + at, axis)
        for at, (all_, axis, back) in enumerate(zip(found, axes, turned, strict=True))
    ]
    return *values, *stacked


def _slices(value: Any, axis: int) -> Sequence[Any]:
    """Return the slices of a tensor, or of an array of texts, along an axis."""
    if isinstance(value, np.ndarray):
        first = np.moveaxis(value, axis, 0)
        return [first[at, ...] for at in range(len(first))]
    slices: Sequence[Any] = value.unbind(axis)
    return slices


def _scan_batches(op: Operation, scope: Scope, lengths: Any, *operands: Any) -> tuple[Any, ...]:
    """Version 8: the first axis of all operands is a batch, the second is scanned."""
    turned = op.get("directions")
    given = {"body": op.given["body"], "num_scan_inputs": op.get("num_scan_inputs")}
    inner = Operation(op.name, 9, {**given, "scan_input_directions": turned}, op.count)
    count, batch = op.get("num_scan_inputs"), operands[0].shape[0]
    found = []
    for at in range(batch):
        rows = [x[at] for x in operands]
        if lengths is not None:
            rows[-count:] = [x[: int(lengths[at])] for x in rows[-count:]]
        found.append(_scan_once(inner, scope, rows))
    return tuple(
        _stacked(parts, inner.given["body"], at) for at, parts in enumerate(zip(*found, strict=True))
    )


CONTROL: Mapping[str, ControlRun] = {"If": _if, "Loop": _loop, "Scan": _scan}
"""Operators that run graphs."""


Versions = Mapping[str, int]
"""Domain -> version of its operators."""

Specialize = Callable[[Any], "Specialized | None"]
"""Graph of a node -> what makes it a model; None if that is not worth it."""

Step = Callable[[Mapping[str, Any], Sequence[Any]], tuple[Any, ...]]
"""``(scope, operands) -> results``."""


def versions_of(model: Any) -> dict[str, int]:
    """Return the versions of operators that a model or function states."""
    found = {entry.domain: int(entry.version) for entry in model.opset_import}
    if "ai.onnx" in found:
        found.setdefault("", found["ai.onnx"])
    return found


def version_of(domain: str, versions: Versions) -> int:
    """Return the version of a domain's operators; 1 where none is stated."""
    return versions.get("" if domain == "ai.onnx" else domain, 1)


@lru_cache(maxsize=4096)
def schema_of(domain: str, operator: str, version: int) -> Any:
    """Return the standard's definition of an operator; None if it has none of that name."""
    try:
        return onnx.defs.get_schema(operator, version, "" if domain == "ai.onnx" else domain)
    except onnx.defs.SchemaError:
        return None


def tensor_value(tensor: Any) -> Any:
    """Return a stored tensor as a value."""
    return value_of(onnx.numpy_helper.to_array(tensor))


def attribute_value(attribute: Any, versions: Versions, specialize: Specialize | None = None) -> Any:
    """Return an attribute as rows take it."""
    if attribute.type == onnx.AttributeProto.GRAPH:
        return Body(attribute.g, versions, None if specialize is None else specialize(attribute.g))
    if attribute.type == onnx.AttributeProto.TENSOR:
        return tensor_value(attribute.t)
    if attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
        return dense_value(attribute.sparse_tensor)
    found = onnx.helper.get_attribute_value(attribute)
    if isinstance(found, bytes):
        return found.decode("utf-8", "surrogateescape")
    if isinstance(found, Sequence) and found and isinstance(found[0], bytes):
        return [value.decode("utf-8", "surrogateescape") for value in found]
    return list(found) if isinstance(found, Sequence) and not isinstance(found, str) else found


def dense_value(sparse: Any) -> Any:
    """Return a sparse tensor as a value."""
    values, places = tensor_value(sparse.values), tensor_value(sparse.indices)
    found = torch.zeros(list(sparse.dims), dtype=values.dtype)
    index = (places,) if places.ndim == 1 else tuple(places.T)
    return (
        (found.reshape(-1) if places.ndim == 1 else found)
        .index_put_(index, values)
        .reshape(list(sparse.dims))
    )


def operation_of(node: Any, versions: Versions, specialize: Specialize | None = None) -> Operation:
    """Return a node as rows take it."""
    given = {attribute.name: attribute_value(attribute, versions, specialize) for attribute in node.attribute}
    name = key_of(node.domain, node.op_type)
    return Operation(name, version_of(node.domain, versions), given, len(node.output))


def is_known(node: Any, versions: Versions) -> bool:
    """Tell whether torch computes an operator, in the version that a model states."""
    name = key_of(node.domain, node.op_type)
    if name in TABLE or name in CONTROL:
        return True
    schema = schema_of(node.domain, node.op_type, version_of(node.domain, versions))
    return schema is not None and bool(schema.has_function or schema.has_context_dependent_function)


def unknown(node: Any) -> LadderError:
    """Return the error for an operator that has no row."""
    name = key_of(node.domain, node.op_type)
    return unknown_name("ONNX operator", name, (*TABLE, *CONTROL))


def step_of(node: Any, versions: Versions, specialize: Specialize | None = None) -> Step:
    """Return what computes a node; graphs of its own as models where `specialize` makes some.

    Raises UnknownNameError if nothing does; the nearest names are suggested.
    """
    name = key_of(node.domain, node.op_type)
    if name in CONTROL:
        control, op = CONTROL[name], operation_of(node, versions, specialize)
        return lambda scope, operands: _tuple(control(op, scope, *operands))
    if name in TABLE:
        row, op = TABLE[name], operation_of(node, versions)
        return lambda scope, operands: _tuple(row(op, *operands))
    if not is_known(node, versions):
        raise unknown(node)
    return _Function(node, versions)


def _tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


class _Function:
    """A node of an operator that the standard defines by a graph, per types of its operands."""

    def __init__(self, node: Any, versions: Versions) -> None:
        self.node, self.versions = node, versions
        self.bodies: dict[tuple[Any, ...], Body] = {}

    def __call__(self, scope: Mapping[str, Any], operands: Sequence[Any]) -> tuple[Any, ...]:
        types = [type_of(value) for value in operands]
        key = tuple(None if type_ is None else type_.SerializeToString() for type_ in types)
        body = self.bodies.get(key)
        if body is None:
            function = function_of(self.node, self.versions, types)
            body = self.bodies[key] = Body(function, versions_of(function))
        return tuple(body([*operands, *[None] * (len(body.inputs) - len(operands))], {}))


def type_of(value: Any) -> Any:
    """Return the ONNX type of a value; None for one that is left out."""
    if value is None:
        return None
    if isinstance(value, list):
        inner = type_of(value[0]) if value else onnx.helper.make_tensor_type_proto(1, None)
        return onnx.helper.make_sequence_type_proto(inner)
    return onnx.helper.make_tensor_type_proto(code_of(value), list(value.shape))


def function_of(node: Any, versions: Versions, types: Sequence[Any]) -> Any:
    """Return the function that the standard defines an operator by, with a node's attributes in it.

    node: Of an operator that has one.
    versions: Of the model's operators.
    types: ONNX types of the operands, None for those that are left out.
    """
    version = version_of(node.domain, versions)
    schema = schema_of(node.domain, node.op_type, version)
    function, node = onnx.FunctionProto(), _without_heads(node, types[:1])
    if schema.has_function:
        text = schema.get_function_with_opset_version(_nearest(schema.function_opset_versions, version))
    else:
        at = _nearest(schema.context_dependent_function_opset_versions, version)
        given = [b"" if type_ is None else type_.SerializeToString() for type_ in types]
        text = schema.get_context_dependent_function_with_opset_version(at, node.SerializeToString(), given)
    function.ParseFromString(text)
    if not function.node:
        raise LadderError(f"{node.op_type} has no definition for {len(types)} operands of these types")
    attributes = {a.name: a for a in node.attribute}
    for name, stated in schema.attributes.items():
        if name not in attributes and stated.default_value.name:
            attributes[name] = stated.default_value
    for inner in function.node:
        _bind_attributes(inner, attributes)
    return function


def _without_heads(node: Any, types: Sequence[Any]) -> Any:
    """Return attention of heads that are apart without their numbers: its function would join them."""
    apart = [type_ for type_ in types if type_ is not None and len(type_.tensor_type.shape.dim) == 4]
    if node.op_type != "Attention" or not apart:
        return node
    found = onnx.NodeProto()
    found.CopyFrom(node)
    kept = [a for a in node.attribute if a.name not in ("q_num_heads", "kv_num_heads")]
    del found.attribute[:]
    found.attribute.extend(kept)
    return found


def _nearest(offered: Sequence[int], version: int) -> int:
    return max((at for at in offered if at <= version), default=min(offered))


def _bind_attributes(node: Any, given: Mapping[str, Any]) -> None:
    """Put a caller's attributes in place of references to them; those that it lacks are left out."""
    kept = []
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name not in given:
                continue
            bound = onnx.AttributeProto()
            bound.CopyFrom(given[attribute.ref_attr_name])
            bound.name = attribute.name
            attribute = bound
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            for inner in graph.node:
                _bind_attributes(inner, given)
        kept.append(attribute)
    copies = [onnx.AttributeProto() for _ in kept]
    for copy, attribute in zip(copies, kept, strict=True):
        copy.CopyFrom(attribute)
    del node.attribute[:]
    node.attribute.extend(copies)


@dataclass(frozen=True)
class BoundNode:
    """A node with what computes it."""

    title: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    step: Step


class Body:
    """A graph or function, run node by node.

    graph: ``GraphProto`` or ``FunctionProto``.
    versions: Of the operators.
    special: The graph as a model, for the types and shapes of some calls.
    Raises UnknownNameError if it has an operator that nothing computes.
    """

    def __init__(self, graph: Any, versions: Versions, special: Specialized | None = None) -> None:
        self.special = special
        is_function = self._is_function = isinstance(graph, onnx.FunctionProto)
        stored = () if is_function else graph.initializer
        self.held = {tensor.name: tensor_value(tensor) for tensor in stored}
        self.inputs = list(graph.input) if is_function else [info.name for info in graph.input]
        self.outputs = list(graph.output) if is_function else [info.name for info in graph.output]
        self._infos = () if is_function else tuple(graph.output)
        first = graph.input[0].type.tensor_type.shape if self._infos and graph.input else None
        self.counts_by_vectors = first is not None and len(first.dim) == 1
        """Whether its first operand is stated as a vector: a loop's counter, where exporters make it one."""
        self.steps = [bound_node(node, versions) for node in graph.node]

    def __call__(self, operands: Sequence[Any], scope: Mapping[str, Any]) -> list[Any]:
        """Return the results; ``scope`` has the values around the graph."""
        given = dict(zip(self.inputs, operands, strict=False))
        if self.special is not None:
            taken = [given[name] if name in given else scope[name] for name in self.special.names]
            model = self.special.of(taken)
            if model is not None:
                found = model(*taken)
                return [found] if len(self.outputs) == 1 else [*found]
        values = {**scope, **self.held, **given}
        for step in self.steps:
            run_node(step, values)
        return [self._result(values, name) for name in self.outputs]

    def _result(self, values: Mapping[str, Any], name: str) -> Any:
        """Return a result; definitions of operators leave out those that a node does not ask for."""
        if name not in values and not self._is_function:
            raise LadderError(f"nothing computes the result {name!r}")
        return values.get(name)

    def nothing(self, at: int, axis: int) -> Any:
        """Return no values of a result along a new axis: as the graph states it; open extents are 0."""
        kind = self._infos[at].type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        shape.insert(axis % (len(shape) + 1), 0)
        if kind.elem_type == onnx.TensorProto.STRING:
            return np.empty(shape, dtype=object)
        return torch.zeros(shape, dtype=DTYPES[kind.elem_type or 1])


def bound_node(node: Any, versions: Versions, specialize: Specialize | None = None) -> BoundNode:
    """Return a node with what computes it, see `step_of`."""
    title = (
        f"{node.op_type} {node.name!r}" if node.name else f"{node.op_type} that computes {node.output[0]!r}"
    )
    return BoundNode(title, tuple(node.input), tuple(node.output), step_of(node, versions, specialize))


def run_node(node: BoundNode, values: dict[str, Any]) -> None:
    """Compute a node and note its results.

    Raises LadderError if it cannot be computed of these values; the message names it.
    """
    operands = [values[name] if name else None for name in node.reads]
    try:
        found = node.step(values, operands)
    except NodeFailed:
        raise
    except FAILURES as error:
        raise failed(node.title, operands, error) from error
    missing = next(filter(None, node.writes[len(found) :]), None)
    if missing is not None:
        raise NodeFailed(f"{node.title} does not compute {missing!r}, its result {len(found)} or later")
    for name, value in zip(node.writes, found, strict=False):
        if name:
            values[name] = value


class NodeFailed(LadderError):
    """A node that cannot be computed of the values of a call; the message names it."""


FAILURES = (LadderError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
"""Exceptions of torch, numpy and rows for operands that do not fit, and modes that there are not."""


def failed(title: str, operands: Sequence[Any], error: Exception) -> NodeFailed:
    """Return the error of a node that cannot be computed."""
    return NodeFailed(f"{title}: {' '.join(str(error).split())[:400]}; operands: {_shown(operands)}")


def _shown(operands: Sequence[Any]) -> str:
    def one(value: Any) -> str:
        if value is None or isinstance(value, (list, dict)):
            kind = "map" if isinstance(value, dict) else "sequence"
            return "left out" if value is None else f"{kind} of {len(value)}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"

    return ", ".join(map(one, operands)) or "none"


def operation_of_call(node: Node) -> Operation:
    """Return the operator that a call of a tile graph is."""
    given = node_attributes(node)
    return _operation(given["target"], dict(given["keywords"]), len(node.tiles))


def _operation(target: str, keywords: Mapping[str, Any], count: int) -> Operation:
    name = key_of(str(keywords["domain"]), target.partition(".")[2])
    if name not in TABLE:
        raise unknown_name("ONNX operator", name, TABLE)
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in keywords["attributes"]}
    return Operation(name, int(keywords["version"]), given, count)


def operation_run(target: str, keywords: Mapping[str, Any], count: int) -> Callable[..., tuple[Any, ...]]:
    """Return ``(operands) -> results`` of an operator.

    target: ``"onnx.Name"``.
    keywords: ``attributes``: pairs of name and literal; ``domain``; ``version``.
    count: Results that the graph has.
    Raises UnknownNameError if there is none of that name.
    """
    op = _operation(target, keywords, count)
    row = TABLE[op.name]

    def run(*operands: Any) -> tuple[Any, ...]:
        try:
            found = row(op, *operands)
        except FAILURES as error:
            raise failed(f"{op.name} of version {op.version}", operands, error) from error
        return found[:count] if isinstance(found, tuple) else (found,)

    return run
