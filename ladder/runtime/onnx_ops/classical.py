"""Classical models, and what prepares their columns (``ai.onnx.ml``): any numbers give float32 results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ladder.runtime.onnx_ops.operation import Operation, Run
from ladder.runtime.onnx_ops.reference import evaluated
from ladder.runtime.onnx_ops.trees import POST, of_two
from ladder.runtime.onnx_ops.values import array_of, value_of
from tile_types.errors import ShapeError


def _real(x: Any) -> Any:
    """Return numbers as they are computed with: float32 as it is, others in float64."""
    return x if isinstance(x, np.ndarray) or x.dtype == torch.float32 else x.double()


def in_reals(function: Run) -> Run:
    """Return the row of an operator that computes with real numbers and gives float32 ones."""

    def run(op: Operation, *operands: Any) -> Any:
        found = function(op, *map(_real, operands))
        results = found if isinstance(found, tuple) else (found,)
        return tuple(
            value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for value in results
        )

    return run


def _numbers(op: Operation, name: str, like: Any, default: float = 0.0) -> Any:
    return torch.as_tensor(op.get(name, [default]), dtype=like.dtype, device=like.device)


def _scaled(op: Operation, x: Any) -> Any:
    return (x - _numbers(op, "offset", x)) * _numbers(op, "scale", x, 1.0)


SIZES = {
    "MAX": lambda x: x.amax(-1, keepdim=True),
    "L1": lambda x: x.abs().sum(-1, keepdim=True),
    "L2": lambda x: x.square().sum(-1, keepdim=True).sqrt(),
}
"""Norm -> what rows are divided by; the standard's largest element is not that of magnitudes."""


def _normalized(op: Operation, x: Any) -> Any:
    size = SIZES[op.get("norm", "MAX")](x)
    return x / torch.where(size == 0, 1.0, size)


def _linear(op: Operation, x: Any, results: int) -> Any:
    """Multiply rows, a vector is one, by the first coefficients, and add intercepts if there are as many.

    Raises ShapeError if there are too few coefficients.
    """
    rows = x if x.ndim == 2 else x.reshape(1, -1)
    weights = _numbers(op, "coefficients", x)
    needed = results * rows.shape[1]
    if x.ndim > 2 or len(weights) < needed:
        raise ShapeError(f"{len(weights)} coefficients of {results} results for rows {list(x.shape)}")
    added = _numbers(op, "intercepts", x)
    found = rows @ weights[:needed].reshape(results, -1).T
    return found + added if len(added) == results else found


def _regressed(op: Operation, x: Any) -> Any:
    return POST[op.get("post_transform", "NONE")](_linear(op, x, int(op.get("targets", 1))))


def _vectorized(op: Operation, *parts: Any) -> Any:
    """Join rows, each part cut or filled with zeros to its width; a vector is one row."""
    rows = [x.flatten(1) if x.ndim > 1 else x.reshape(1, -1) for x in parts]
    widths = op.get("inputdimensions", [x.shape[1] for x in rows])
    cut = [x[:, :width] for x, width in zip(rows, widths, strict=True)]
    return torch.cat([F.pad(x, (0, width - x.shape[1])) for x, width in zip(cut, widths, strict=True)], 1)


def _one_hot(op: Operation, x: Any) -> Any:
    """Numbers of any type are those of whole categories, without their fractions.

    Raises ShapeError at an element of no category, where the node allows none.
    """
    texts = op.get("cats_strings")
    labels = np.array(texts, object) if texts else np.array(op.get("cats_int64s", []), np.int64)
    elements = x.astype(str).astype(object) if texts else array_of(x.to(torch.int64))
    found = elements[..., None] == labels
    if not op.get("zeros", 1) and not found.any(-1).all():
        raise ShapeError("an element is in no category, and zeros is 0")
    return value_of(found.astype(np.float32))


NOT_A_NUMBER = "NaN"
"""What stands for NaN, which equals no key, among the keys of labels."""


def _keyed(value: Any) -> Any:
    return value if value == value else NOT_A_NUMBER


def _of_any_type(op: Operation, of: str) -> Any:
    """Return the first attribute of this name that is given, of one of its types, as an array or list."""
    names = ("tensor", "strings", "int64s", "floats", "string", "int64", "float")
    given = (op.get(f"{of}_{name}") for name in names)
    return next((array_of(x) if hasattr(x, "dtype") else x for x in given if x is not None), None)


def _label_encoder(op: Operation, x: Any) -> Any:
    """Return the labels of keys; of equal keys the first counts, and NaN is one.

    Version 1 has a list of texts, whose places are the other labels.
    """
    texts = op.get("classes_strings")
    if texts is not None:
        pair = (texts, list(range(len(texts)))) if isinstance(x, np.ndarray) else (range(len(texts)), texts)
    else:
        pair = _of_any_type(op, "keys"), _of_any_type(op, "values")
    keys, values = (list(x.ravel().tolist() if isinstance(x, np.ndarray) else x) for x in pair)
    if len(keys) != len(values):
        raise ShapeError(f"{len(values)} labels of {len(keys)} keys")
    kind = _label_type(op, values)
    labels = dict(zip(map(_keyed, reversed(keys)), reversed(values), strict=True))
    default = _default_label(op, kind)
    elements = x.astype(str).ravel() if isinstance(x, np.ndarray) else array_of(x).ravel()
    found = [labels.get(_keyed(element), default) for element in elements.tolist()]
    return value_of(np.array(found, kind).reshape(tuple(x.shape)))


def _label_type(op: Operation, values: list[Any]) -> Any:
    """Return numpy's type of labels: texts, the type of a tensor, int64, or float32."""
    tensor = op.get("values_tensor")
    if tensor is not None:
        kind = array_of(tensor).dtype
        return object if kind.kind in "OUS" else kind
    return (
        object
        if values and isinstance(values[0], str)
        else np.int64
        if op.get("values_floats") is None
        else np.float32
    )


def _default_label(op: Operation, kind: Any) -> Any:
    """Return the label of what is no key: version 4 states it as a tensor, for labels of any type."""
    tensor = op.get("default_tensor")
    if tensor is not None:
        return array_of(tensor).ravel().tolist()[0]
    if kind is object:
        return op.get("default_string", "_Unused")
    return op.get("default_int64", -1) if np.dtype(kind).kind in "iu" else op.get("default_float", -0.0)


def _of_any_rows(function: Run) -> Run:
    """Return the row of a model of rows that also takes none of them."""

    def run(op: Operation, x: Any) -> Any:
        if not len(x):
            return tuple(value[:0] for value in function(op, x.new_zeros(1, *x.shape[1:])))
        return function(op, x)

    return run


def _classified(op: Operation, x: Any) -> Any:
    """Labels are those of the largest scores; logistic ones may be alike, since they end at 1."""
    columns = x.shape[-1] if x.ndim else 1
    count = len(op.get("intercepts") or ()) or len(op.get("coefficients")) // max(columns, 1)
    scores, post = _linear(op, x, count), op.get("post_transform", "NONE")
    texts = op.get("classlabels_strings")
    labels = list(texts or op.get("classlabels_ints") or [1])
    if count == 1 and len(labels) == 2:
        chosen, scores = of_two(scores[:, 0], 0.0, post, True)
    elif count == 1:
        chosen, labels, scores = (
            (scores[:, 0] >= 0).long(),
            ["" if texts else 0, labels[0]],
            POST[post](scores),
        )
    else:
        chosen, scores = scores.argmax(1), POST[post](scores)
    found = np.array(labels, object if texts else np.int64)[chosen.cpu().numpy()]
    return value_of(found), scores


CLASSICAL: Mapping[str, Run] = {
    "ai.onnx.ml::Scaler": in_reals(_scaled),
    "ai.onnx.ml::Normalizer": in_reals(_normalized),
    "ai.onnx.ml::LinearRegressor": in_reals(_regressed),
    "ai.onnx.ml::OneHotEncoder": _one_hot,
    "ai.onnx.ml::LabelEncoder": _label_encoder,
    "ai.onnx.ml::FeatureVectorizer": in_reals(_vectorized),
    "ai.onnx.ml::LinearClassifier": in_reals(_classified),
    "ai.onnx.ml::SVMClassifier": in_reals(_of_any_rows(evaluated)),
    "ai.onnx.ml::SVMRegressor": in_reals(_of_any_rows(evaluated)),
}
"""Classical models, and operators that prepare what they read."""
