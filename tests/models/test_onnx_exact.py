"""What decides whether a model's results are right where they differ from onnxruntime's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from benchmarks.onnx_exact import exactly
from benchmarks.onnx_models import FACTOR, judged

MODEL = """
    <ir_version: 8, opset_import: ["" : 13]>
    rounds (float[N, 4] x) => (float[N, 4] y)
    <float half = {0.3}>
    {
        s = Sigmoid(x)
        q, scale, zero = DynamicQuantizeLinear(s)
        wide = DequantizeLinear(q, scale, zero)
        y = Mul(wide, half)
    }"""


def by_hand(x: np.ndarray) -> np.ndarray:
    """Return the results in float64; the model's stored number is one of float32."""
    s = 1 / (1 + np.exp(-x.astype(np.float64)))
    scale = s.max() / 255
    return np.rint(s / scale) * scale * np.float64(np.float32(0.3))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(MODEL), str(found))
    return found


def test_the_reference_is_evaluated_in_float64(path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    (y,) = exactly(path, {"x": x}) or ()
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, by_hand(x), rtol=1e-12)


def test_results_are_judged_by_their_distance_to_it(path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    exact = by_hand(x).astype(np.float32)
    largest = float(np.abs(exact).max())

    def verdict(ours: float, rival: float) -> str:
        moved = torch.from_numpy(exact + np.float32(ours * largest))
        return str(judged(path, {"x": x}, [moved], [exact + np.float32(rival * largest)])["result"])

    assert verdict(0.0, 0.1) == "right"
    assert verdict(3e-4, -2e-4) == "near"
    assert verdict(FACTOR * 2.2e-4, -2e-4) == "wrong"
    assert verdict(0.1, 0.0) == "wrong"
