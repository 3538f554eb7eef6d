"""Operators of text, pictures and classical models: the standard's own reference computes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from ladder.runtime.onnx_ops.operation import Operation, Run
from ladder.runtime.onnx_ops.values import array_of, value_of

NAMES = (
    *("TfIdfVectorizer", "ImageDecoder", "StringNormalizer", "StringConcat", "StringSplit", "RegexFullMatch"),
    *(
        f"ai.onnx.ml::{name}"
        for name in (
            *("ArrayFeatureExtractor", "Binarizer", "LabelEncoder", "Normalizer", "Scaler"),
            *("LinearClassifier", "LinearRegressor"),
            *(
                "Imputer",
                "OneHotEncoder",
                "FeatureVectorizer",
                "SVMClassifier",
                "SVMRegressor",
            ),
        )
    ),
)
"""Operators that run so."""


def _evaluated(op: Operation, *operands: Any) -> Any:
    """Compute one node by the reference."""
    domain, _, name = op.name.rpartition("::")
    names = [f"i{at}" if value is not None else "" for at, value in enumerate(operands)]
    given = {key: _attribute(key, value) for key, value in op.given.items()}
    results = [f"o{at}" for at in range(op.count)]
    node = onnx.helper.make_node(name, names, results, domain=domain, **given)
    infos = [onnx.helper.make_tensor_value_info(name, 0, None) for name in names if name]
    outputs = [onnx.helper.make_tensor_value_info(name, 0, None) for name in results]
    graph = onnx.helper.make_graph([node], "one", infos, outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(domain, op.version)])
    feeds = {name: array_of(value) for name, value in zip(names, operands, strict=True) if name}
    found = ReferenceEvaluator(model).run(None, feeds)
    return tuple(value_of(np.asarray(value)) for value in found)


def _attribute(key: str, value: Any) -> Any:
    """Return an attribute as nodes have it."""
    if hasattr(value, "dtype"):
        return onnx.numpy_helper.from_array(array_of(value), key)
    return value


def _label_encoder(op: Operation, x: Any) -> Any:
    """Version 1 has a list of texts, whose places are the other labels; the reference knows later ones."""
    texts = op.get("classes_strings")
    if texts is None:
        return _evaluated(op, x)
    places = {text: at for at, text in enumerate(texts)}
    if isinstance(x, np.ndarray):
        unknown = op.get("default_int64", -1)
        found = [places.get(str(text), unknown) for text in x.ravel()]
        return value_of(np.array(found, np.int64).reshape(x.shape))
    unknown = op.get("default_string", "_Unused")
    found = [texts[at] if 0 <= at < len(texts) else unknown for at in x.ravel().tolist()]
    return np.array(found, object).reshape(tuple(x.shape))


REFERENCE: Mapping[str, Run] = {
    **dict.fromkeys(NAMES, _evaluated),
    "ai.onnx.ml::LabelEncoder": _label_encoder,
}
"""Operators that the standard's reference computes."""
