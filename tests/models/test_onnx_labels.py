"""Labels and scores of classical models, as onnxruntime has them where the standard is vague."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch

import ladder
from ladder.runtime.onnx_ops.operation import Operation
from ladder.runtime.onnx_ops.table import TABLE
from tile_types.errors import ShapeError

NAN = float("nan")


def run(name: str, given: dict[str, Any], x: Any, version: int = 1) -> Any:
    return TABLE[f"ai.onnx.ml::{name}"](Operation(f"ai.onnx.ml::{name}", version, given, 2), x)


def labels(given: dict[str, Any], x: Any) -> Any:
    found = run("LabelEncoder", given, x, 4)
    assert tuple(found.shape) == tuple(x.shape)
    return found


def test_labels_that_are_stated_by_tensors() -> None:
    """The first of equal keys counts; NaN is a key; the default is of the type of the labels."""
    whole = {"keys_int64s": [1, 2, 1], "values_int64s": [10, 20, 99]}
    x = torch.tensor([[1, 2, 3]])
    assert labels({**whole, "default_tensor": torch.tensor([42])}, x).tolist() == [[10, 20, 42]]
    assert labels(whole, x).tolist() == [[10, 20, -1]]
    floats = {"keys_floats": [1.0, NAN, 0.0], "values_floats": [5.0, 6.0, 7.0]}
    found = labels({**floats, "default_tensor": torch.tensor([-1.0])}, torch.tensor([NAN, 1.0, -0.0, 8.0]))
    assert found.tolist() == [6.0, 5.0, 7.0, -1.0]
    assert found.dtype == torch.float32
    assert labels(floats, torch.tensor([9.0])).tolist() == [0.0]
    texts = {"keys_tensor": torch.tensor([3.5, NAN], dtype=torch.float64), "values_strings": ["a", "none"]}
    given = {**texts, "default_tensor": np.array(["?"], object)}
    assert labels(given, torch.tensor([NAN, 3.5, 1.0], dtype=torch.float64)).tolist() == ["none", "a", "?"]
    assert labels(texts, torch.tensor([1.0], dtype=torch.float64)).tolist() == ["_Unused"]
    assert labels({"keys_strings": ["a"], "values_int64s": [4]}, np.array(["a", "b"], object)).tolist() == [
        4,
        -1,
    ]
    narrow = {"keys_strings": ["a"], "values_tensor": torch.tensor([4], dtype=torch.int16)}
    assert labels(narrow, np.array([], object)).dtype == torch.int16
    with pytest.raises(ShapeError, match="1 labels of 2 keys"):
        labels({"keys_int64s": [1, 2], "values_int64s": [3]}, x)


@pytest.mark.parametrize("post", ["NONE", "LOGISTIC"])
def test_one_score_of_two_classes(post: str) -> None:
    given = {
        "coefficients": [1.0, -2.0],
        "intercepts": [0.5],
        "classlabels_ints": [10, 20],
        "post_transform": post,
    }
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    chosen, scores = run("LinearClassifier", given, x)
    raw = torch.tensor([1.5, -1.5])
    wanted = torch.stack([1 - raw, raw], 1) if post == "NONE" else torch.sigmoid(torch.stack([-raw, raw], 1))
    torch.testing.assert_close(scores, wanted)
    assert chosen.tolist() == [20, 10]
    assert run("LinearClassifier", given, x[0])[1].shape == (1, 2)


def test_coefficients_that_are_left_over_do_not_count() -> None:
    classes = {"coefficients": [1.0, 0, 0, 1, 9, 9], "intercepts": [0.0, 0.5], "classlabels_ints": [3, 4]}
    x = torch.tensor([[3.0, 7.0]])
    assert run("LinearClassifier", classes, x)[1].tolist() == [[3.0, 7.5]]
    numbers = {"coefficients": [1.0, 0, 0, 1, 9], "intercepts": [100.0], "targets": 2}
    assert run("LinearRegressor", numbers, x)[0].tolist() == [[3.0, 7.0]]
    for shape in ((3,), (1, 4), (1, 1, 2)):
        with pytest.raises(ShapeError, match="coefficients of 2 results"):
            run("LinearRegressor", numbers, torch.zeros(shape))


@pytest.mark.parametrize("given", ["coefficients=[1.0, 2.0, 3.0]", "coefficients=[1.0, 2.0, 3.0, 9.0]"])
def test_a_vector_is_one_row_of_a_regressor(given: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 1]> g (float[3] x) => (float[1, 1] y) {{
        y = ai.onnx.ml.LinearRegressor <targets=1, {given}, intercepts=[1.0]> (x) }}"""
    found = ladder.compile(onnx.parser.parse_model(text))(torch.tensor([1.0, 2.0, 3.0]))
    assert found.tolist() == [[15.0]]


def stump(**given: Any) -> dict[str, Any]:
    """Return attributes of a tree that compares column 0 with 0; column -2 of its leaves is never read."""
    return {
        "nodes_treeids": [0, 0, 0],
        "nodes_nodeids": [0, 1, 2],
        "nodes_featureids": [0, -2, -2],
        "nodes_values": [0.0, 0.0, 0.0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0],
        **given,
    }


@pytest.mark.parametrize("post", ["NONE", "LOGISTIC"])
def test_votes_above_zero_for_one_of_two_classes(post: str) -> None:
    votes = {
        "class_treeids": [0, 0],
        "class_nodeids": [1, 2],
        "class_ids": [0, 0],
        "class_weights": [0.25, 2.0],
    }
    given = stump(**votes, classlabels_int64s=[5, 6], post_transform=post)
    chosen, scores = run("TreeEnsembleClassifier", given, torch.tensor([[-1.0], [1.0]]))
    raw = torch.tensor([0.25, 2.0])
    wanted = torch.stack([1 - raw, raw], 1) if post == "NONE" else torch.sigmoid(torch.stack([-raw, raw], 1))
    torch.testing.assert_close(scores, wanted)
    assert chosen.tolist() == [5, 6]
    chosen, scores = run(
        "TreeEnsembleClassifier", {**given, "classlabels_int64s": [1]}, torch.tensor([[1.0]])
    )
    assert scores.shape == (1, 1)
    assert chosen.tolist() == [1]


@pytest.mark.parametrize("how", ["MIN", "MAX", "SUM", "AVERAGE"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_without_a_vote_begin_at_zero(how: str, dtype: torch.dtype) -> None:
    votes = {
        "target_treeids": [0, 0],
        "target_nodeids": [1, 2],
        "target_ids": [0, 1],
        "target_weights": [3.0, -4.0],
    }
    given = stump(**votes, n_targets=2, aggregate_function=how, base_values=[10.0, 20.0])
    found = run("TreeEnsembleRegressor", given, torch.tensor([[-1.0], [1.0]], dtype=dtype))
    assert found.tolist() == [[13.0, 20.0], [10.0, 16.0]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nodes_featureids": [-1, 0, 0]}, "below 0"),
        ({"nodes_featureids": [0, 0]}, "below 0"),
        ({"target_ids": [0, 2]}, "not among 2"),
        ({"target_ids": [0, -1]}, "not among 2"),
        ({"target_weights": [1.0]}, "1 votes"),
        ({"n_targets": 0}, "not among 0"),
    ],
    ids=str,
)
def test_trees_that_do_not_fit_are_one_error(changed: dict[str, Any], message: str) -> None:
    votes = {
        "target_treeids": [0, 0],
        "target_nodeids": [1, 2],
        "target_ids": [0, 1],
        "target_weights": [3.0, -4.0],
    }
    with pytest.raises(ShapeError, match=message):
        run("TreeEnsembleRegressor", {**stump(**votes, n_targets=2), **changed}, torch.zeros(1, 1))


def test_maps_become_texts_as_in_onnxruntime() -> None:
    found = TABLE["ai.onnx.ml::CastMap"](
        Operation("ai.onnx.ml::CastMap", 1, {"cast_to": "TO_STRING"}), {2: 3.0, 1: -0.5}
    )
    assert found.tolist() == [["-0.500000", "3.000000"]]
    text = """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 1]>
        g (map(int64, float) x) => (float[1, 2] y) {
        y = ai.onnx.ml.CastMap <map_form="SPARSE", max_map=2> (x) }"""
    fast = ladder.compile(onnx.parser.parse_model(text))
    with pytest.raises(ladder.LadderError, match="map of 1"):
        fast({7: 1.0})
