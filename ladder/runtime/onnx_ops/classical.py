"""Classical models, and what prepares their columns (``ai.onnx.ml``): any numbers give float32 results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ladder.runtime.onnx_ops.operation import Operation, Run
from ladder.runtime.onnx_ops.reference import evaluated
from ladder.runtime.onnx_ops.trees import POST
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


def _regressed(op: Operation, x: Any) -> Any:
    rows = x if x.ndim == 2 else x.reshape(1, -1)
    weights = _numbers(op, "coefficients", x).reshape(op.get("targets", 1), -1)
    return POST[op.get("post_transform", "NONE")](rows @ weights.T + _numbers(op, "intercepts", x))


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


def _label_encoder(op: Operation, x: Any) -> Any:
    """Version 1 has a list of texts, whose places are the other labels; the reference knows later ones."""
    texts = op.get("classes_strings")
    if texts is None:
        return _with_label_of_nan(op, x, evaluated(op, x))
    places = {text: at for at, text in enumerate(texts)}
    if isinstance(x, np.ndarray):
        unknown = op.get("default_int64", -1)
        found = [places.get(str(text), unknown) for text in x.ravel()]
        return value_of(np.array(found, np.int64).reshape(x.shape))
    unknown = op.get("default_string", "_Unused")
    found = [texts[at] if 0 <= at < len(texts) else unknown for at in x.ravel().tolist()]
    return np.array(found, object).reshape(tuple(x.shape))


def _with_label_of_nan(op: Operation, x: Any, found: Any) -> Any:
    """Return labels, those of NaN by the key that is NaN: the reference finds none that equals it."""
    keys = op.get("keys_floats", op.get("keys_tensor"))
    absent = isinstance(x, torch.Tensor) and x.is_floating_point() and bool(x.isnan().any())
    places = (
        [at for at, key in enumerate(array_of(torch.as_tensor(keys))) if key != key]
        if absent and keys is not None
        else []
    )
    if not places:
        return found
    names = ("values_floats", "values_int64s", "values_strings", "values_tensor")
    values = next(op.get(name) for name in names if op.get(name) is not None)
    labels = array_of(found[0]).copy()
    labels[array_of(x.isnan())] = (
        array_of(values)[places[0]] if hasattr(values, "dtype") else values[places[0]]
    )
    return value_of(labels)


def _of_any_rows(function: Run) -> Run:
    """Return the row of a model of rows that also takes none of them."""

    def run(op: Operation, x: Any) -> Any:
        if not len(x):
            return tuple(value[:0] for value in function(op, x.new_zeros(1, *x.shape[1:])))
        return function(op, x)

    return run


def _classified(op: Operation, x: Any) -> Any:
    """Labels are those of the largest scores; logistic ones may be alike, since they end at 1."""
    rows = x if x.ndim == 2 else x.reshape(1, -1)
    weights = _numbers(op, "coefficients", x).reshape(-1, rows.shape[1])
    scores = rows @ weights.T + _numbers(op, "intercepts", x)
    texts = op.get("classlabels_strings")
    labels = list(texts or op.get("classlabels_ints") or [1])
    if len(weights) == 1 and len(labels) == 2:
        scores = torch.cat([-scores, scores], 1)
    if scores.shape[1] == 1:
        chosen, labels = (scores[:, 0] >= 0).long(), ["" if texts else 0, labels[0]]
    else:
        chosen = scores.argmax(1)
    found = np.array(labels, object if texts else np.int64)[chosen.cpu().numpy()]
    return value_of(found), POST[op.get("post_transform", "NONE")](scores)


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
