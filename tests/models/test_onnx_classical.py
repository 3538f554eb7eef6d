"""Operators of classical models: trees, maps, and functions that a model states in other versions."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import ladder
from ladder.faults import LadderWarning
from ladder.runtime.model.program import ImportRefused
from ladder.runtime.onnx_ops import trees as trees_in_torch
from ladder.runtime.onnx_ops.evaluate import operation_of
from ladder.runtime.onnx_ops.operation import Operation
from ladder.runtime.onnx_ops.table import TABLE
from ladder.runtime.onnx_ops.trees import coupled
from ladder.runtime.onnx_ops.values import array_of

pytestmark = pytest.mark.usefixtures("one_schedule")

ML = "ai.onnx.ml"


def model_of(nodes: list[Any], outputs: list[Any], ml: int = 3, columns: int = 3) -> Any:
    """Return a model of rows ``x`` of float32."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", columns])
    graph = helper.make_graph(nodes, "g", [x], outputs)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ML, ml)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def trees(mode: str) -> dict[str, Any]:
    """Return attributes of two trees of three leaves and one of one."""
    modes = [mode, mode, "LEAF", "LEAF", "LEAF"]
    return {
        "nodes_treeids": [0] * 5 + [1] * 5 + [2],
        "nodes_nodeids": [0, 1, 2, 3, 4] * 2 + [0],
        "nodes_featureids": [0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0],
        "nodes_values": [0.25, -0.5, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        "nodes_modes": [*modes, *modes, "LEAF"],
        "nodes_truenodeids": [1, 2, 0, 0, 0] * 2 + [0],
        "nodes_falsenodeids": [4, 3, 0, 0, 0] * 2 + [0],
        "nodes_missing_value_tracks_true": [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0],
    }


def votes(prefix: str, kinds: int) -> dict[str, Any]:
    ids = [at % kinds for at in range(7)]
    return {
        f"{prefix}_treeids": [0, 0, 0, 1, 1, 1, 2],
        f"{prefix}_nodeids": [2, 3, 4, 2, 3, 4, 0],
        f"{prefix}_ids": ids,
        f"{prefix}_weights": [1.0, -2.0, 3.5, 0.5, 0.25, -1.0, 0.75],
    }


def rows() -> Any:
    """Return rows with numbers on the borders, and missing ones."""
    values = torch.tensor([-1.0, -0.5, 0.0, 0.25, 1.0, 2.0, float("nan")])
    return values[torch.randint(0, 7, (64, 3), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("mode", ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ"])
@pytest.mark.parametrize("how", ["SUM", "AVERAGE", "MIN", "MAX"])
def test_regressor(mode: str, how: str) -> None:
    """Rows end at the leaves that the standard's reference finds, missing numbers too."""
    node = helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain=ML, n_targets=1, aggregate_function=how,
        base_values=[0.125], **trees(mode), **votes("target", 1),
    )  # fmt: skip
    model = model_of([node], [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 1])])
    x = rows()
    wanted = ReferenceEvaluator(model).run(None, {"x": x.numpy()})[0]
    np.testing.assert_allclose(ladder.compile(model)(x).numpy(), wanted, rtol=1e-6)


@pytest.mark.parametrize("post", ["NONE", "SOFTMAX", "LOGISTIC"])
def test_classifier_with_maps(post: str) -> None:
    """Labels and a map of scores per row, as scikit-learn's models have them."""
    labels = ["low", "middle", "high"]
    nodes = [
        helper.make_node(
            "TreeEnsembleClassifier", ["x"], ["label", "scores"], domain=ML, classlabels_strings=labels,
            post_transform=post, **trees("BRANCH_LEQ"), **votes("class", 3),
        ),
        helper.make_node("ZipMap", ["scores"], ["maps"], domain=ML, classlabels_strings=labels),
    ]  # fmt: skip
    outputs = [helper.make_empty_tensor_value_info(name) for name in ("label", "maps", "scores")]
    model, x = model_of(nodes, outputs), rows()
    label, maps, scores = ladder.compile(model)(x)
    single = model_of(nodes[:1], [outputs[0], outputs[2]])
    wanted = ReferenceEvaluator(single).run(None, {"x": x.numpy()})
    assert label.tolist() == wanted[0].tolist()
    np.testing.assert_allclose(scores.numpy(), wanted[1], rtol=1e-5)
    assert maps == [dict(zip(labels, row, strict=True)) for row in scores.tolist()]


@pytest.mark.parametrize(("weights", "post", "expected"), [
    ([0.75, 0.25], "NONE", ([1, 0], [[0.25, 0.75], [0.75, 0.25]])),
    ([0.5, -1.0], "NONE", ([1, 0], [[-0.5, 0.5], [1.0, -1.0]])),
    ([0.5, -1.0], "LOGISTIC", ([1, 0], [[0.37754068, 0.62245935], [0.7310586, 0.26894143]])),
])  # fmt: skip
def test_one_of_two_classes_has_votes(weights: list[float], post: str, expected: Any) -> None:
    """The other class's score follows, as onnxruntime has it."""
    node = helper.make_node(
        "TreeEnsembleClassifier", ["x"], ["label", "scores"], domain=ML, classlabels_int64s=[0, 1],
        post_transform=post, nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2], nodes_featureids=[1, 0, 0],
        nodes_values=[0.0, 0.0, 0.0], nodes_modes=["BRANCH_LT", "LEAF", "LEAF"], nodes_truenodeids=[1, 0, 0],
        nodes_falsenodeids=[2, 0, 0], class_treeids=[0, 0], class_nodeids=[1, 2], class_ids=[0, 0],
        class_weights=weights,
    )  # fmt: skip
    model = model_of([node], [helper.make_empty_tensor_value_info(name) for name in ("label", "scores")])
    label, scores = ladder.compile(model)(torch.tensor([[0.0, -1.0, 0.0], [0.0, 1.0, 0.0]]))
    assert label.tolist() == expected[0]
    np.testing.assert_allclose(scores.numpy(), expected[1], rtol=1e-6)


@pytest.mark.parametrize(("changed", "message"), [
    ({"nodes_truenodeids": [0, 2, 0, 0, 0] * 2 + [0]}, "cycle"),
    ({"nodes_truenodeids": [1, 9, 0, 0, 0] * 2 + [0]}, "not there"),
    ({"nodes_featureids": [0, 2, 0, 0, 0, 7, 0, 0, 0, 0, 0]}, "7"),
])  # fmt: skip
def test_trees_that_are_none(changed: dict[str, Any], message: str) -> None:
    given = trees("BRANCH_LEQ") | changed
    node = helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain=ML, n_targets=1, **given, **votes("target", 1)
    )
    model = model_of([node], [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 1])])
    with pytest.raises(ladder.LadderError, match=message):
        ladder.compile(model)(rows())


def test_categories_and_cast_maps() -> None:
    """Text to numbers and back; rows of a map's values."""
    from ladder.runtime.onnx_ops.operation import Operation
    from ladder.runtime.onnx_ops.sequences import MAPS

    given = {"cats_strings": ["a", "b"], "cats_int64s": [5, 7], "default_int64": -9}
    mapped = Operation(f"{ML}::CategoryMapper", 1, given)
    row = MAPS[mapped.name]
    assert row(mapped, np.array([["b", "c"]], object)).tolist() == [[7, -9]]
    assert row(mapped, torch.tensor([5, 6])).tolist() == ["a", "_Unused"]
    cast = Operation(f"{ML}::CastMap", 1, {"map_form": "SPARSE", "max_map": 4})
    assert MAPS[cast.name](cast, {2: 1.5}).tolist() == [[0, 0, 1.5, 0]]
    with pytest.raises(ladder.ShapeError, match="key 4"):
        MAPS[cast.name](cast, {4: 1.0})
    vector = Operation(f"{ML}::DictVectorizer", 1, {"string_vocabulary": ["x", "y"]})
    assert MAPS[vector.name](vector, {"y": 2.0}).tolist() == [[0, 2]]


FUNCTION = """<ir_version: 10, opset_import: ["" : 22, "mine" : 1]>
agraph (float[3, 4] x) => (float[1, 1] y) {{ t = mine.twice(x) y = ReduceSum(t) }}
<domain: "mine", opset_import: ["" : {version}]> twice (a) => (b) {{ {body} }}"""


def test_functions_of_another_version() -> None:
    """Functions count as the model's version where their operators are the same in both."""
    x = torch.randn(3, 4)
    model = parser.parse_model(FUNCTION.format(version=21, body="b = Add(a, a)"))
    torch.testing.assert_close(ladder.compile(model)(x), (x + x).sum().reshape(1, 1))
    changed = parser.parse_model(FUNCTION.format(version=12, body="c = ReduceSum(a) b = Add(a, c)"))
    with pytest.raises(
        ImportRefused, match=r"'twice' is written for version 12 .* and Add, ReduceSum changed"
    ):
        ladder.compile(changed)


def test_attributes_of_functions_have_defaults() -> None:
    """Calls take what a function states of its attributes, those in other functions and in branches too."""
    text = """<ir_version: 10, opset_import: ["" : 18, "mine" : 1]>
    agraph (float[3, 4] x) => (float[3, 4] y, float[3, 4] z)
    { y = mine.outer(x) z = mine.soft <alpha = 3.0> (x) }
    <domain: "mine", opset_import: ["" : 18]> soft <alpha: float = 0.5> (a) => (b)
    { b = Elu <alpha: float = @alpha> (a) }
    <domain: "mine", opset_import: ["" : 18, "mine" : 1]> outer (a) => (b) { b = mine.soft(a) }"""
    x = torch.randn(3, 4)
    for found, alpha in zip(ladder.compile(parser.parse_model(text))(x), (0.5, 3.0), strict=True):
        torch.testing.assert_close(found, torch.nn.functional.elu(x, alpha))


@pytest.mark.parametrize("places", [[1, 6], [[0, 1], [1, 2]]])
def test_sparse_constants_are_read(places: list[object]) -> None:
    values, at = (numpy_helper.from_array(np.array(a)) for a in (np.float32([5, 7]), places))
    constant = helper.make_node(
        "Constant", [], ["y"], sparse_value=helper.make_sparse_tensor(values, at, [2, 4])
    )
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])
    graph = helper.make_graph([constant], "g", [], [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    assert ladder.compile(model)().tolist() == [[0, 5, 0, 0], [0, 0, 7, 0]]
    model.graph.node[0].attribute[0].sparse_tensor.dims[:] = [1 << 28, 4]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ImportRefused, match="sparse_value has extents"):
        ladder.compile(model)


def test_sparse_initializers_are_read() -> None:
    """The rules for shapes of package onnx take them for scalars, which no product has."""
    values, at = (numpy_helper.from_array(a, "w") for a in (np.float32([5, 7]), np.int64([1, 6])))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 4])
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], [y], columns=2)
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, at, [2, 4]))
    x = torch.tensor([[1.0, 2.0]])
    assert ladder.compile(model)(x).tolist() == [[0, 5, 14, 0]]
    model.graph.sparse_initializer[0].dims[:] = [1 << 28, 4]
    with pytest.raises(ImportRefused, match="'w' has extents"):
        ladder.compile(model)


def test_stated_shapes_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that a model states of its result is no reason to refuse it, as long as the type is right."""
    monkeypatch.setattr("ladder.faults._warned", set())
    model = parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18]> agraph (float[N, 8] x) => (float[N, 8] y)
        <float[8, 1] w = {1, 2, 3, 4, 5, 6, 7, 8}> { y = MatMul(x, w) }"""
    )
    x = torch.randn(5, 8)
    with pytest.warns(LadderWarning, match="what it gives is taken"):
        found = ladder.compile(model)(x)
    np.testing.assert_allclose(found, x @ torch.arange(1.0, 9.0).reshape(8, 1), rtol=1e-5)


def test_scatter_of_nothing() -> None:
    model = parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18]> agraph
        (int64[4] x, int64[M, 1] at, int64[M] u) => (int64[4] y) { y = ScatterND(x, at, u) }"""
    )
    x = torch.arange(4)
    found = ladder.compile(model)(x, torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert torch.equal(found, x)


@pytest.mark.parametrize("mode", list(trees_in_torch.MODES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forests_by_kernels(mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, blocks that are not whole, several chunks, NaN: bit by bit as torch computes them."""
    given = {**trees(mode), **votes("target", 2), "n_targets": 2}
    if dtype == torch.float64:
        for name in ("nodes_values", "target_weights"):
            wide = np.asarray(given.pop(name)) * (1 + 1e-12)  # which no float32 holds
            given[f"{name}_as_tensor"] = numpy_helper.from_array(wide, name)
    node = helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain=ML, **given)
    x, counts = rows().to(dtype).repeat(5, 1), (0, 1, 4, 5, 8, 13, 300)
    x[::2] *= 1 + 1e-12

    def computed() -> list[Any]:
        op = operation_of(node, {ML: 3})
        return [TABLE[f"{ML}::TreeEnsembleRegressor"](op, x[:count]) for count in counts]

    found = computed()
    forest = trees_in_torch._listed(operation_of(node, {ML: 3}), "target")
    assert (forest.mode, forest.splits.dtype) == (mode, dtype)
    monkeypatch.setattr(trees_in_torch.Forest, "mode", None)
    assert all(map(torch.equal, found, computed()))


ARITHMETIC = {
    "Scaler": {"offset": [0.5, -1.0, 2.0], "scale": [2.0, 0.25, -1.0]},
    "Scaler of one": {"offset": [0.5], "scale": [3.0]},
    "Binarizer": {"threshold": 0.25},
    "Imputer": {"imputed_value_floats": [1.0, 2.0, 3.0], "replaced_value_float": float("nan")},
    "Imputer of a number": {"imputed_value_floats": [7.0], "replaced_value_float": 0.25},
    "Normalizer by sums": {"norm": "L1"},
    "Normalizer by lengths": {"norm": "L2"},
    "LinearRegressor": {
        "coefficients": [0.5, -1.0, 2.0, 0.0, 3.0, 1.0],
        "intercepts": [0.25, -2.0],
        "targets": 2,
        "post_transform": "NONE",
    },
    **{
        f"SVMRegressor of {kind}": {
            "kernel_type": kind, "kernel_params": [0.5, 0.25, 3.0], "n_supports": 2, "rho": [0.125],
            "support_vectors": [0.5, -1.0, 2.0, 0.0, 3.0, 1.0], "coefficients": [1.5, -0.5],
            "post_transform": "NONE", "one_class": int(kind == "LINEAR"),
        }
        for kind in ("LINEAR", "POLY", "RBF", "SIGMOID")
    },
    "SVMRegressor of columns": {
        "kernel_type": "LINEAR", "n_supports": 0, "rho": [0.125], "coefficients": [1.5, -0.5, 1.0],
        "post_transform": "NONE",
    },
}  # fmt: skip
"""Operator -> attributes of a node."""


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_on_floats(name: str) -> None:
    """Rows with numbers on the borders, zeros, and missing ones; it joins what follows."""
    node = helper.make_node(name.split()[0], ["x"], ["m"], domain=ML, **ARITHMETIC[name])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = model_of([node, helper.make_node("Neg", ["m"], ["y"])], [out])
    x = torch.tensor([[0.25, -0.5, 3.0], [0.0, 0.0, 0.0], [float("nan"), 1.0, 0.25], [1e-38, 2.0, -7.0]])
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x.numpy()})
    fast = ladder.compile(model)
    torch.testing.assert_close(fast(x), torch.from_numpy(wanted), equal_nan=True)
    assert fast.staged.single


@pytest.mark.parametrize("post", ["NONE", "LOGISTIC", "SOFTMAX"])
def test_classes_by_products(post: str) -> None:
    """Scores, and the labels of the greatest, in one plan with the columns that are chosen before."""
    nodes = [
        helper.make_node("ArrayFeatureExtractor", ["x", "columns"], ["chosen"], domain=ML),
        helper.make_node(
            "LinearClassifier", ["chosen"], ["label", "scores"], domain=ML, post_transform=post,
            coefficients=[0.5, -1.0, 2.0, 0.25, 1.0, 3.0], intercepts=[0.125, -1.0, 0.5],
            classlabels_ints=[7, -1, 3],
        ),
    ]  # fmt: skip
    model = model_of(nodes, [helper.make_empty_tensor_value_info(name) for name in ("label", "scores")])
    model.graph.initializer.append(numpy_helper.from_array(np.array([[2, 0]]), "columns"))
    fast, x = ladder.compile(model), torch.randn(9, 3)
    wanted = ReferenceEvaluator(model).run(None, {"x": x.numpy()})
    assert len(fast.staged.stages) == 1
    for found, right in zip(fast(x), wanted, strict=True):
        torch.testing.assert_close(found, torch.from_numpy(right))


def test_probabilities_of_classes_by_pairs() -> None:
    """They are the minimum of a quadratic form over vectors that sum up to one."""
    pairs = np.random.default_rng(3).uniform(0.05, 0.95, (4, 4))
    pairs[np.tril_indices(4, -1)] = (1 - pairs.T)[np.tril_indices(4, -1)]
    system = np.ones((5, 5)) - np.diag([0.0, 0, 0, 0, 1])
    for i in range(4):
        for j in range(4):
            others = [pairs[k, i] ** 2 for k in range(4) if k != i]
            system[i, j] = sum(others) if i == j else -pairs[j, i] * pairs[i, j]
    exact = np.linalg.solve(system, [0, 0, 0, 0, 1])[:4]
    assert np.abs(coupled(pairs) - exact).max() < 2e-3


@pytest.mark.parametrize("labels", [["no", "yes"], [4, 9], ["a", "b", "c"], [4, 9, 2]])
@pytest.mark.parametrize("proba", [False, True])
def test_support_vectors(labels: list[Any], proba: bool) -> None:
    """Beside votes and pairs of linear kernels, computed here."""
    count, draw = len(labels), np.random.default_rng(1)
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    vectors, weights = draw.standard_normal((2 * count, 3)), draw.standard_normal((count - 1, 2 * count))
    rho, a, b = (draw.standard_normal(len(pairs)) for _ in range(3))
    kind = "classlabels_strings" if isinstance(labels[0], str) else "classlabels_ints"
    node = helper.make_node(
        "SVMClassifier", ["x"], ["label", "scores"], domain=ML, kernel_type="LINEAR", rho=rho,
        support_vectors=vectors.ravel(), coefficients=weights.ravel(), vectors_per_class=[2] * count,
        **{kind: labels},
        **({"prob_a": a, "prob_b": b} if proba else {}),
    )  # fmt: skip
    fast = ladder.compile(
        model_of([node], [helper.make_empty_tensor_value_info(name) for name in ("label", "scores")])
    )
    x = draw.standard_normal((9, 3)).astype(np.float32)
    names, scores = fast(torch.from_numpy(x))
    dots = x @ vectors.T
    for row in range(9):
        votes, chance = np.zeros(count), np.zeros((count, count))
        for at, (i, j) in enumerate(pairs):
            one, other = slice(2 * i, 2 * i + 2), slice(2 * j, 2 * j + 2)
            found = rho[at] + weights[j - 1, one] @ dots[row, one] + weights[i, other] @ dots[row, other]
            votes[i if found > 0 else j] += 1
            chance[i, j] = 1 / (1 + np.exp(a[at] * found + b[at]))
            chance[j, i] = 1 - chance[i, j]
        assert names[row] == labels[votes.argmax()]
        if proba:
            assert np.abs(scores[row].numpy() - coupled(chance)).max() < 1e-3
    none = fast(torch.zeros(0, 3))
    assert [tuple(value.shape) for value in none] == [(0,), (0, scores.shape[1])]


def test_columns_of_a_vector_are_a_row() -> None:
    node = helper.make_node("ArrayFeatureExtractor", ["labels", "at"], ["y"], domain=ML)
    at, y = (helper.make_tensor_value_info(name, 7, ["n"] if name == "at" else None) for name in ("at", "y"))
    graph = helper.make_graph([node], "g", [at], [y], [numpy_helper.from_array(np.arange(5, 9), "labels")])
    opsets = [helper.make_opsetid("", 9), helper.make_opsetid(ML, 1)]
    found = ladder.compile(helper.make_model(graph, opset_imports=opsets))(torch.tensor([3, 0, 0]))
    assert found.tolist() == [[8, 5, 5]]


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures need a package that may not be there: the error says which."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    node = helper.make_node("ImageDecoder", ["x"], ["y"])
    x, y = (helper.make_tensor_value_info(name, TensorProto.UINT8, None) for name in ("x", "y"))
    model = helper.make_model(helper.make_graph([node], "g", [x], [y]))
    with pytest.raises(ladder.LadderError, match=r"ImageDecoder .*Pillow must be installed"):
        ladder.compile(model)(torch.zeros(9, dtype=torch.uint8))


def test_arithmetic_on_other_types_stays() -> None:
    """A row of float64 is moved and scaled in float64, then rounded."""
    node = helper.make_node("Scaler", ["x"], ["y"], domain=ML, offset=[1e8], scale=[1.0])
    x, y = (helper.make_tensor_value_info(n, t, ["n", 1]) for n, t in (("x", 11), ("y", 1)))
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ML, 3)]
    model = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=opsets, ir_version=9)
    found = ladder.compile(model)(torch.tensor([[1e8 + 0.25]], dtype=torch.float64))
    assert found.tolist() == [[0.25]]


@pytest.mark.parametrize("texts", [True, False])
def test_labels_are_those_of_scores_that_logistic_ones_hide(texts: bool) -> None:
    """Scores of 30 and 40 are both 1 as float32; each class has its own row, or one row is for two."""
    labels = {"classlabels_strings": ["a", "b", "c"]} if texts else {"classlabels_ints": [5, 7, 9]}

    def labelled(x: Any, coefficients: list[float], count: int) -> tuple[list[Any], Any]:
        given = {name: values[:count] for name, values in labels.items()}
        given |= {"coefficients": coefficients, "intercepts": [0.0] * len(coefficients)}
        op = Operation("ai.onnx.ml::LinearClassifier", 1, {**given, "post_transform": "LOGISTIC"}, 2)
        found, scores = TABLE[op.name](op, x)
        return array_of(found).tolist(), scores

    names = next(iter(labels.values()))
    x = torch.tensor([[1.0], [-1.0]])
    found, scores = labelled(x, [30.0, 40.0, -50.0], 3)
    assert found == [names[1], names[2]]
    torch.testing.assert_close(scores, torch.sigmoid(x @ torch.tensor([[30.0, 40.0, -50.0]])))
    assert labelled(x, [30.0], 2)[0] == [names[1], names[0]]
    assert labelled(x, [30.0], 1)[0] == [names[0], "" if texts else 0]
    assert labelled(x[:0], [30.0, 40.0, -50.0], 3)[1].shape == (0, 3)
    assert labelled(x.to(torch.int64), [30.0, 40.0, -50.0], 3)[0] == found
