"""The errors that attention and products may have: what is rounded so meets them, some of it nearly."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ladder.ir.gemm import Gemm
from ladder.ir.rounding import BOUNDS, largest_error
from ladder.simulate.operator import rounding_bound


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


def product_error(kind: Any, bits: int, zero: str, random: np.random.Generator) -> float:
    """Return the error of a product whose weights less zero points, times scales, and results are rounded."""
    n, k, group = 192, 1024, 64

    def rounded(values: Any) -> Any:
        return np.asarray(values, np.float64).astype(kind).astype(np.float64)

    table = rounded(random.standard_normal(1 << bits) * random.uniform(0.3, 3))
    values = table[random.integers(0, 1 << bits, (n, k))]
    scale = rounded(random.uniform(0.01, 0.02, (n, k // group))).repeat(group, 1)
    zeros = table[random.integers(0, 1 << bits, (n, k // group))].repeat(group, 1) if zero != "none" else 0.0
    x = rounded(random.standard_normal((8, k)))
    exact = x @ ((values - zeros) * scale).T
    got = rounded(x @ rounded(rounded(values - zeros) * scale).T)
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("zero", ["none", "integer"])
@pytest.mark.parametrize(("name", "kind"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_rounded_products_meet_it_closely(name: str, kind: Any, zero: str) -> None:
    """With zero points three numbers are rounded, of which 3e-3 of bfloat16 knew two."""
    gemm = Gemm(
        n=192, k=1024, weight="uint4", activation=name, output=name, group_size=64, scale=True, zero=zero
    )
    random = np.random.default_rng(3)
    found = [product_error(kind, bits, zero, random) for bits in (3, 4, 7, 8) for _ in range(8)]
    assert 0.6 < max(found) / largest_error(gemm) <= 1
    assert (max(found) > BOUNDS[name]) == (name == "bfloat16" and zero != "none")
