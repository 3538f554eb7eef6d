"""What prepares the columns of classical models (``ai.onnx.ml``): numbers of any type, NaN, and fractions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

import ladder

KINDS = (np.float32, np.float64, np.int32, np.int64)
W, B = np.array([[0.5, -0.25, 1.5], [2.0, 0.125, -1.0]]), np.array([0.75, -0.5])


def ran(operator: str, x: np.ndarray, out: int = TensorProto.FLOAT, **given: Any) -> np.ndarray:
    """Return the last result of one node of a model of open rows."""
    code = helper.np_dtype_to_tensor_dtype(x.dtype)
    count = 2 if "Classifier" in operator else 1
    node = helper.make_node(operator, ["x"], ["label", "y"][-count:], domain="ai.onnx.ml", **given)
    infos = [helper.make_tensor_value_info("x", code, ["rows", *x.shape[1:]])]
    results = [helper.make_tensor_value_info("y", out, None)]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    graph = helper.make_graph([node], "one", infos, results)
    found = ladder.compile(helper.make_model(graph, opset_imports=opsets, ir_version=9))(torch.from_numpy(x))
    assert isinstance(found, torch.Tensor)
    return found.numpy()


def softmax(x: np.ndarray) -> np.ndarray:
    raised = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(raised / raised.sum(-1, keepdims=True))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_any_type_give_float32(kind: Any) -> None:
    x = np.array([[1, -2, 3], [0, 0, 0], [-4, -5, -1]], kind)
    exact, scores = x.astype(np.float64), x.astype(np.float64) @ W.T + B
    lines = {"coefficients": W.ravel().tolist(), "intercepts": B.tolist()}
    largest = np.where((exact.max(1) == 0)[:, None], 1, exact.max(1, keepdims=True))
    size = np.maximum(np.abs(exact).sum(1, keepdims=True), 1e-300)
    length = np.maximum(np.sqrt((exact**2).sum(1, keepdims=True)), 1e-300)
    cases: list[tuple[str, dict[str, Any], np.ndarray]] = [
        ("Scaler", {"offset": [0.5, 1.0, -0.25], "scale": [0.3]}, (exact - [0.5, 1.0, -0.25]) * 0.3),
        ("Normalizer", {"norm": "MAX"}, exact / largest),
        ("Normalizer", {"norm": "L1"}, exact / size),
        ("Normalizer", {"norm": "L2"}, exact / length),
        ("FeatureVectorizer", {"inputdimensions": [3]}, exact),
        ("LinearRegressor", {"targets": 2, **lines}, scores),
        ("LinearRegressor", {"targets": 2, "post_transform": "SOFTMAX", **lines}, softmax(scores)),
        ("LinearRegressor", {"targets": 2, "post_transform": "LOGISTIC", **lines}, 1 / (1 + np.exp(-scores))),
        ("LinearClassifier", {"classlabels_ints": [3, 4], **lines}, scores),
        (
            "SVMRegressor",
            {
                "kernel_type": "LINEAR",
                "kernel_params": [0.0, 0.0, 0.0],
                "support_vectors": W.ravel().tolist(),
                "n_supports": 2,
                "coefficients": [1.0, -2.0],
                "rho": [0.25],
            },
            (exact @ W.T) @ np.array([[1.0], [-2.0]]) + 0.25,
        ),
    ]
    for operator, given, wanted in cases:
        found = ran(operator, x, **given)
        assert found.dtype == np.float32, operator
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=operator)


@pytest.mark.parametrize("kind", KINDS)
def test_categories_have_no_fractions(kind: Any) -> None:
    x = np.array([[2.75, -0.5], [1.0, 7.0]]).astype(kind)
    found = ran("OneHotEncoder", x, cats_int64s=[0, 1, 2], zeros=1)
    assert np.array_equal(found, x.astype(np.int64)[..., None] == np.arange(3))


def test_a_label_may_be_that_of_nan() -> None:
    x = np.array([1.0, np.nan, 3.0], np.float32)
    given = {"keys_floats": [1.0, float("nan")], "default_int64": -7}
    found = ran("LabelEncoder", x, TensorProto.INT64, values_int64s=[5, 6], **given)
    assert found.tolist() == [5, 6, -7]
