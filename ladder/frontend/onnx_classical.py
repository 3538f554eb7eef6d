"""Numeric operators of classical models (``ai.onnx.ml``) on float32, as the arithmetic that they stand for.

Exporters of scikit-learn put them before and behind products. Shape inference has no rule for them, so that
a plan would end at each; as arithmetic they join the kernels around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto
from onnx.helper import get_attribute_value, make_node
from onnx.numpy_helper import from_array

from ladder.runtime.onnx_ops.evaluate import versions_of

DOMAIN = "ai.onnx.ml"

OLDEST = 13
"""Opset from which on the operators that are written here are those of today."""

SMALLEST = 1e-30
"""What rows are divided by at least."""

KEPT = frozenset({
    "Add", "ArrayFeatureExtractor", "Binarizer", "Concat", "Div", "Flatten", "Gather", "Gemm", "Identity",
    "Imputer", "MatMul", "Mul", "Relu", "Reshape", "Slice", "Squeeze", "Sub", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators whose result is of the type of their first operand."""

FLOATS = frozenset(
    ("FeatureVectorizer", "LinearRegressor", "Normalizer", "OneHotEncoder", "Scaler", "SVMRegressor")
)
"""Operators whose result is float32."""

Steps = Iterator[tuple[str, list[Any], Mapping[str, Any]]]
"""Operator, operands (of the steps before by number from -1 down, names, or arrays), and attributes."""


def _scaler(x: str, given: Mapping[str, Any]) -> Steps:
    yield "Sub", [x, np.array(given.get("offset", 0.0), np.float32)], {}
    yield "Mul", [-1, np.array(given.get("scale", 1.0), np.float32)], {}


def _binarizer(x: str, given: Mapping[str, Any]) -> Steps:
    yield "Greater", [x, np.array(given.get("threshold", 0.0), np.float32)], {}
    yield "Cast", [-1], {"to": TensorProto.FLOAT}


def _imputer(x: str, given: Mapping[str, Any]) -> Steps:
    replaced = np.array(given.get("replaced_value_float", 0.0), np.float32)
    yield ("IsNaN", [x], {}) if np.isnan(replaced) else ("Equal", [x, replaced], {})
    yield "Where", [-1, np.array(given["imputed_value_floats"], np.float32), x], {}


def _normalizer(x: str, given: Mapping[str, Any]) -> Steps:
    squares = given["norm"] == b"L2"
    yield ("Mul", [x, x], {}) if squares else ("Abs", [x], {})
    yield "ReduceSum", [-1, np.array([-1])], {}
    if squares:
        yield "Sqrt", [-1], {}
    yield "Max", [-1, np.array(SMALLEST, np.float32)], {}
    yield "Div", [x, -1], {}


def _regressor(x: str, given: Mapping[str, Any]) -> Steps:
    weight = np.array(given["coefficients"], np.float32).reshape(int(given.get("targets", 1)), -1)
    yield "MatMul", [x, np.ascontiguousarray(weight.T)], {}
    if "intercepts" in given:
        yield "Add", [-1, np.array(given["intercepts"], np.float32)], {}


ROWS: Mapping[str, Callable[[str, Mapping[str, Any]], Steps]] = {
    "Scaler": _scaler,
    "Binarizer": _binarizer,
    "Imputer": _imputer,
    "Normalizer": _normalizer,
    "LinearRegressor": _regressor,
}
"""Operator -> the steps that it stands for."""


NEEDED: Mapping[str, str] = {"Imputer": "imputed_value_floats", "LinearRegressor": "coefficients"}
"""Operator -> the attribute without which it has no row."""


def with_arithmetic(model: Any) -> Any:
    """Return a model in which such nodes are arithmetic; the same object where it has none."""
    concerned = any(node.domain == DOMAIN and node.op_type in ROWS for node in model.graph.node)
    if versions_of(model).get("", 0) < OLDEST or not concerned:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    floats = {info.name for info in graph.input if info.type.tensor_type.elem_type == TensorProto.FLOAT}
    floats |= {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    nodes: list[Any] = []
    for node in graph.node:
        given = {item.name: get_attribute_value(item) for item in node.attribute}
        first = node.input[0] if node.input else ""
        if node.domain == DOMAIN and first in floats and _is_plain(node.op_type, given):
            nodes += _written(graph, node, given)
        else:
            nodes.append(node)
        if _makes_floats(node.op_type, given, first in floats):
            floats.update(node.output)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
    return copy


def _is_plain(name: str, given: Mapping[str, Any]) -> bool:
    """Tell whether a node on float32 has a row and is of a form that the row writes."""
    if name == "Normalizer":
        return given.get("norm") in (b"L1", b"L2")
    plain = given.get("post_transform", b"NONE") == b"NONE"
    return name in ROWS and plain and (name not in NEEDED or NEEDED[name] in given)


def _makes_floats(name: str, given: Mapping[str, Any], first: bool) -> bool:
    return given["to"] == TensorProto.FLOAT if name == "Cast" else name in FLOATS or (first and name in KEPT)


def _written(graph: Any, node: Any, given: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the nodes of a row; their stored operands join the graph."""
    steps = list(ROWS[node.op_type](node.input[0], given))
    results = [f"{node.output[0]}:{at}" for at in range(len(steps) - 1)] + [node.output[0]]
    for at, (operator, operands, attributes) in enumerate(steps):
        names = [
            _name(graph, f"{results[at]}:operand{place}", x, results[:at]) for place, x in enumerate(operands)
        ]
        yield make_node(operator, names, [results[at]], name=node.name, **attributes)


def _name(graph: Any, name: str, operand: Any, before: list[str]) -> str:
    if not isinstance(operand, np.ndarray):
        return before[operand] if isinstance(operand, int) else str(operand)
    graph.initializer.append(from_array(operand, name))
    return name
