"""Support vector classifiers, where the standard's reference is wrong or fails.

It couples the probabilities of three and more classes by a wrong matrix, and fails for two classes that are
texts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.ops.aionnxml.op_svm_classifier import SVMClassifier as Reference
from onnx.reference.ops.aionnxml.op_svm_classifier import sigmoid_probability

CLOSE = 1e-7
"""Least probability of one of a pair, as libsvm has it."""


def coupled(pairs: Any) -> Any:
    """Return the probabilities of classes by those of pairs.

    pairs: ``[classes, classes]``: in row i, column j, that it is i if it is one of these two.
    Source: Wu, Lin, Weng, "Probability estimates for multi-class classification", 2004, algorithm 2.
    """
    count = len(pairs)
    others = pairs * (1 - np.eye(count, dtype=pairs.dtype))
    matrix = np.diag((others**2).sum(0)) - others * others.T
    found = np.full(count, 1 / count, pairs.dtype)
    for _ in range(max(100, count)):
        product = matrix @ found
        mean = found @ product
        if np.abs(product - mean).max() < 0.005 / count:
            break
        for at in range(count):
            step = (mean - product[at]) / matrix[at, at]
            found[at] += step
            found /= 1 + step
            product = matrix @ found
            mean = found @ product
    return found


class SVMClassifier(Reference):  # type: ignore[misc]  # the reference has no types
    """The reference's with probabilities that are coupled as they were trained, and texts as labels."""

    op_domain = "ai.onnx.ml"

    def _probabilities(self, scores: Any, class_count_: int) -> Any:
        pairs = np.zeros((class_count_, class_count_), scores.dtype)
        for at, (i, j) in enumerate(zip(*np.triu_indices(class_count_, 1), strict=True)):
            of_pair = sigmoid_probability(scores[at], self._svm.atts.prob_a[at], self._svm.atts.prob_b[at])
            pairs[i, j] = np.clip(of_pair, CLOSE, 1 - CLOSE)
            pairs[j, i] = 1 - pairs[i, j]
        return coupled(pairs)

    def _run(
        self, X: Any, classlabels_ints: Any = None, classlabels_strings: Any = None, **given: Any
    ) -> Any:
        if not classlabels_strings:
            return super()._run(X, classlabels_ints=classlabels_ints, classlabels_strings=None, **given)
        numbers = list(range(len(classlabels_strings)))
        labels, scores = super()._run(X, classlabels_ints=numbers, classlabels_strings=None, **given)
        return np.array([classlabels_strings[label] for label in labels]), scores
