"""Numeric operators of classical models (``ai.onnx.ml``), written as operators of ONNX's own.

Exporters of scikit-learn put them before and behind products. As arithmetic they join the kernels around
them; forms that no row writes are left to the standard's reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto
from onnx.helper import make_node

from ladder.frontend.onnx_values import Known
from tile_types.tile import Tile

DOMAIN = "ai.onnx.ml"

VERSIONS = {"": 18}
"""Opset of the operators that the rows add."""

SMALLEST = 1e-30
"""What rows are divided by at least."""


@dataclass
class Expansion:
    """A node, and the operators that are added in its place to a model that is imported.

    names, tiles: Of its operands.
    given: Its attributes.
    prefix: Of the names of new values.
    values: The model's; stored operands join them.
    node: Adds a node of these versions.
    """

    names: Sequence[str]
    tiles: Sequence[Tile]
    given: Mapping[str, Any]
    prefix: str
    values: dict[str, Any]
    node: Callable[[Any, Mapping[str, int]], None]
    count: int = 0

    @property
    def x(self) -> str:
        return self.names[0]

    def add(self, operator: str, *operands: str | np.ndarray, **attributes: Any) -> str:
        """Add an operator of values by their names, and of arrays; returns the name of its result."""
        names = [x if isinstance(x, str) else self._named(Known(np.asarray(x))) for x in operands]
        result = self._named(None)
        self.node(make_node(operator, names, [result], **attributes), VERSIONS)
        return result

    def _named(self, value: Known | None) -> str:
        self.count += 1
        name = f"{self.prefix}{self.count}"
        if value is not None:
            self.values[name] = value
        return name

    def floats(self, name: str, default: Any = 0.0) -> np.ndarray:
        """Return an attribute as an array."""
        return np.array(self.given.get(name, default), np.float32)

    @property
    def is_plain(self) -> bool:
        """Whether results are what is computed, and no function of it."""
        return bool(self.given.get("post_transform", b"NONE") == b"NONE")


Row = Callable[[Expansion], Sequence[str] | None]
"""Returns the names of the results; None, before it adds anything, for a form that it does not write."""


def _scaler(call: Expansion) -> Sequence[str] | None:
    return [call.add("Mul", call.add("Sub", call.x, call.floats("offset")), call.floats("scale", 1.0))]


def _binarizer(call: Expansion) -> Sequence[str] | None:
    return [call.add("Cast", call.add("Greater", call.x, call.floats("threshold")), to=TensorProto.FLOAT)]


def _imputer(call: Expansion) -> Sequence[str] | None:
    if "imputed_value_floats" not in call.given:
        return None
    replaced = call.floats("replaced_value_float")
    absent = call.add("IsNaN", call.x) if np.isnan(replaced) else call.add("Equal", call.x, replaced)
    return [call.add("Where", absent, call.floats("imputed_value_floats"), call.x)]


def _normalizer(call: Expansion) -> Sequence[str] | None:
    squares = call.given.get("norm") == b"L2"
    if not squares and call.given.get("norm") != b"L1":
        return None
    sizes = call.add("Mul", call.x, call.x) if squares else call.add("Abs", call.x)
    total = call.add("ReduceSum", sizes, np.array([-1]))
    root = call.add("Sqrt", total) if squares else total
    return [call.add("Div", call.x, call.add("Max", root, np.array(SMALLEST, np.float32)))]


def _features(call: Expansion) -> Sequence[str] | None:
    """Take columns; a vector is one row."""
    rank = len(call.tiles[0].shape)
    found = call.add("Gather", call.x, call.add("Reshape", call.names[1], np.array([-1])), axis=rank - 1)
    return [call.add("Unsqueeze", found, np.array([0])) if rank == 1 else found]


def _linear(call: Expansion, x: str, rows: int, added: str = "intercepts") -> str:
    """Multiply by the rows of a matrix, and add a vector if there is one."""
    weights = call.floats("coefficients").reshape(rows, -1)
    found = call.add("MatMul", x, np.ascontiguousarray(weights.T))
    return call.add("Add", found, call.floats(added)[:rows]) if added in call.given else found


def _fit(call: Expansion, results: int) -> bool:
    """Whether operands are rows, and coefficients and intercepts as many as these and the results need."""
    shape, intercepts = call.tiles[0].shape, call.given.get("intercepts", ())
    fitting = len(shape) == 2 and len(call.given.get("coefficients", ())) == results * shape[1]
    return fitting and len(intercepts) in (0, results)


def _linear_regressor(call: Expansion) -> Sequence[str] | None:
    targets = int(call.given.get("targets", 1))
    return [_linear(call, call.x, targets)] if call.is_plain and _fit(call, targets) else None


POST = {b"NONE": "", b"LOGISTIC": "Sigmoid", b"SOFTMAX": "Softmax"}
"""What becomes of scores -> operator; none for scores as they are."""


def _linear_classifier(call: Expansion) -> Sequence[str] | None:
    """Score two or more classes, each by a row of its own."""
    labels, post = call.given.get("classlabels_ints", ()), call.given.get("post_transform", b"NONE")
    if len(labels) < 2 or post not in POST or not _fit(call, len(labels)):
        return None
    scores = _linear(call, call.x, len(labels))
    label = call.add("Gather", np.array(labels), call.add("ArgMax", scores, axis=-1, keepdims=0))
    return [label, call.add(POST[post], scores) if POST[post] else scores]


def _similarities(call: Expansion, count: int) -> str:
    """Return ``[rows, count]`` the kernel function of rows and support vectors."""
    vectors = call.floats("support_vectors").reshape(count, -1)
    gamma, start, degree = call.floats("kernel_params", (0.0, 0.0, 0.0))
    kind = call.given.get("kernel_type", b"LINEAR")
    if kind == b"RBF":
        distance = call.add("Sub", call.add("Unsqueeze", call.x, np.array([1])), vectors)
        squares = call.add("ReduceSum", call.add("Mul", distance, distance), np.array([-1]), keepdims=0)
        return call.add("Exp", call.add("Mul", squares, -gamma))
    products = call.add("MatMul", call.x, np.ascontiguousarray(vectors.T))
    if kind == b"LINEAR":
        return products
    moved = call.add("Add", call.add("Mul", products, gamma), start)
    return call.add("Tanh", moved) if kind == b"SIGMOID" else call.add("Pow", moved, degree)


def _svm_regressor(call: Expansion) -> Sequence[str] | None:
    """Sum over support vectors; without them, over columns."""
    if not call.is_plain or len(call.tiles[0].shape) != 2:
        return None
    count = call.given.get("n_supports", 0)
    found = _linear(call, _similarities(call, count) if count else call.x, 1, "rho")
    if not call.given.get("one_class", 0):
        return [found]
    one = np.array(1, np.float32)
    return [call.add("Where", call.add("Greater", found, 0 * one), one, -one)]


CLASSICAL: Mapping[str, Row] = {
    "Scaler": _scaler,
    "Binarizer": _binarizer,
    "Imputer": _imputer,
    "Normalizer": _normalizer,
    "LinearRegressor": _linear_regressor,
    "LinearClassifier": _linear_classifier,
    "SVMRegressor": _svm_regressor,
    "ArrayFeatureExtractor": _features,
}
"""Operator on float32 -> the operators that it stands for."""

ANY_TYPE = frozenset(("ArrayFeatureExtractor",))
"""Operators whose rows are for operands of all types."""


def classical_row(node: Any, tiles: Sequence[Tile]) -> Row | None:
    """Return the row of an operator of operands of these tiles; None where it has none."""
    typed = node.op_type in ANY_TYPE or tiles[0].ttype.name == "float32"
    return CLASSICAL.get(node.op_type) if node.domain == DOMAIN and typed else None
