"""The error that attention may have: what is rounded so meets it, some of it nearly."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ladder.simulate.operator import BOUNDS, rounding_bound


def errors(kind: Any, name: str, random: np.random.Generator) -> float:
    """Return the error over the bound of attention whose weights and results are rounded."""
    rows, keys, size = random.integers(1, 6), random.integers(1, 9), random.integers(16, 65)
    scores = random.standard_normal((rows, keys)) * random.choice([0.1, 1, 4])
    weights = np.exp(scores - scores.max(-1, keepdims=True) - random.uniform(0, 1, (rows, 1)))
    v = random.standard_normal((keys, size)).astype(kind).astype(np.float64)
    total = weights.sum(-1, keepdims=True)
    exact = weights @ v / total
    got = (weights.astype(kind).astype(np.float64) @ v / total).astype(kind).astype(np.float64)
    terms = (weights**2 @ (v**2).sum(-1)) / total[:, 0] ** 2
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact)) / rounding_bound(exact, name, terms)


@pytest.mark.parametrize(("name", "kind"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_rounded_attention_meets_it_closely(name: str, kind: Any) -> None:
    random = np.random.default_rng(1)
    found = [errors(kind, name, random) for _ in range(2000)]
    assert 0.7 < max(found) <= 1


def test_of_many_rows_it_is_below_that_of_products() -> None:
    exact = np.random.default_rng(0).standard_normal((4096, 64))
    assert 0.75 * BOUNDS["bfloat16"] < rounding_bound(exact, "bfloat16") < BOUNDS["bfloat16"]


def test_one_row_may_err_as_its_largest_weight_does() -> None:
    """Both are rounded by half of 2**-7 at most."""
    assert rounding_bound(np.eye(1, 16), "bfloat16") == pytest.approx(2**-8 * 2**0.5)
    assert rounding_bound(np.zeros((2, 16)), "float16") == pytest.approx(2**-11 * 0.6, rel=0.01)
