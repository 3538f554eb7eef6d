"""Operators of text, pictures and classical models: the standard's own reference computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from ladder.runtime.onnx_ops.operation import Operation, Run
from ladder.runtime.onnx_ops.trees import SVMClassifier
from ladder.runtime.onnx_ops.values import array_of, value_of
from tile_types.errors import MissingToolError

NAMES = (
    *("TfIdfVectorizer", "ImageDecoder", "StringConcat", "StringSplit", "RegexFullMatch"),
    *(f"ai.onnx.ml::{name}" for name in ("ArrayFeatureExtractor", "Binarizer", "Imputer")),
)
"""Operators that run so."""


def evaluated(op: Operation, *operands: Any) -> Any:
    """Compute one node by the reference.

    Raises MissingToolError if it needs a package that is not installed.
    """
    names = [f"i{at}" if value is not None else "" for at, value in enumerate(operands)]
    feeds = {name: array_of(value) for name, value in zip(names, operands, strict=True) if name}
    try:
        found = op.once(lambda: _evaluator(op, names)).run(None, feeds)
    except ImportError as error:
        raise MissingToolError(f"{op.name} needs a further package: {error}") from error
    return tuple(value_of(np.asarray(value)) for value in found)


def _evaluator(op: Operation, names: Sequence[str]) -> Any:
    """Return the reference's evaluator of a model of one node."""
    domain, _, name = op.name.rpartition("::")
    given = {key: _attribute(key, value) for key, value in op.given.items()}
    if name == "TfIdfVectorizer":
        given["weights"] = _by_place(given["ngram_indexes"], given.get("weights"))
    results = [f"o{at}" for at in range(op.count)]
    node = onnx.helper.make_node(name, names, results, domain=domain, **given)
    sides = [[onnx.helper.make_tensor_value_info(n, 0, None) for n in side if n] for side in (names, results)]
    graph = onnx.helper.make_graph([node], "one", *sides)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(domain, op.version)])
    return ReferenceEvaluator(model, new_ops=[SVMClassifier] if name == SVMClassifier.__name__ else None)


def _by_place(places: Sequence[int], weights: Sequence[float] | None) -> list[float]:
    """Return weights of n-grams by their places in the result, as the reference reads them; 1 without any."""
    found = [1.0] * (max(places, default=-1) + 1)
    for place, weight in zip(places, weights or (), strict=False):
        found[place] = weight
    return found


def _attribute(key: str, value: Any) -> Any:
    if hasattr(value, "dtype"):
        return onnx.numpy_helper.from_array(array_of(value), key)
    return value


REFERENCE: Mapping[str, Run] = dict.fromkeys(NAMES, evaluated)
"""Operators that the standard's reference computes."""
