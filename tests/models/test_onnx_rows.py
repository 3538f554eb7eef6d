"""Each ONNX operator against the standard's own reference implementation, without compiling anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import ladder
from ladder.api.problem import gemm_for
from ladder.frontend.onnx_import import Imported, import_onnx
from ladder.frontend.onnx_models import CODES, ROWS
from ladder.ir.reference import evaluate
from ladder.rewrite import simplify
from ladder.runtime.model.program import ImportRefused

RANDOM = np.random.default_rng(7)
X = RANDOM.standard_normal((2, 6, 5)).astype(np.float32)
IMAGE = RANDOM.standard_normal((2, 4, 7, 9)).astype(np.float32)
POSITIVE = np.abs(X) + 0.5
CHANNELS = RANDOM.standard_normal(4).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def floats(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def model_of(
    operator: str, operands: list[Any], given: dict[str, Any], opset: int, live: int, results: int = 1
) -> onnx.ModelProto:
    """Return a model of one node whose first ``live`` operands are inputs, the others stored."""
    names = [f"i{at}" if value is not None else "" for at, value in enumerate(operands)]
    outputs = [f"o{at}" for at in range(results)]
    node = helper.make_node(operator, names, outputs, **given)
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in list(zip(names, operands, strict=True))[:live]
    ]
    stored = [
        onnx.numpy_helper.from_array(value, name)
        for name, value in list(zip(names, operands, strict=True))[live:]
        if value is not None
    ]
    results_ = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs]
    graph = helper.make_graph([node], "one", infos, results_, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def run(imported: Imported, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Execute the tile graph in float64."""
    values = {}
    for name, source in imported.program.sources.items():
        values[name] = (
            feeds[imported.inputs[source.at[0]]]
            if source.kind == "argument"
            else imported.program.held[source.at[0]].numpy()
        )
    found = evaluate(imported.program.graph, values)
    return list(found) if isinstance(found, tuple) else [found]


def compare(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> None:
    expected = ReferenceEvaluator(model).run(None, feeds)
    imported = import_onnx(model, gemm_for)
    found = run(imported, {name: feeds[name] for name in imported.inputs})
    assert len(found) == len(expected)
    for (value, tile), wanted in zip(
        zip(found, imported.program.graph.outputs, strict=True), expected, strict=True
    ):
        stated = imported.program.graph.tile(tile)
        assert value.shape == np.shape(wanted)
        assert stated.ttype.name in (wanted.dtype.name, "bool")
        np.testing.assert_allclose(value, np.asarray(wanted, np.float64), rtol=2e-5, atol=2e-6)


CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    **{name: (name, [X, floats(6, 1)], {}) for name in ("Add", "Sub", "Mul", "Max", "Min", "Div")},
    **{name: (name, [X], {}) for name in ("Neg", "Abs", "Exp", "Sin", "Cos", "Tanh")},
    **{name: (name, [X], {}) for name in ("Sigmoid", "Erf", "Floor")},
    **{name: (name, [POSITIVE], {}) for name in ("Log", "Sqrt", "Reciprocal", "Relu")},
    **{
        name: (name, [X.round(), X[:1].round()], {})
        for name in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
    },
    "And": ("And", [X > 0, X > 1], {}),
    "Or": ("Or", [X > 0, X > 1], {}),
    "Not": ("Not", [X > 0], {}),
    "a number": ("Mul", [X, np.array(0.5, np.float32)], {}),
    "more axes": ("Add", [X[0, 0], floats(1, 1, 1)], {}),
    "Max of three": ("Max", [X, -X, X[:1]], {}),
    "Pow": ("Pow", [POSITIVE, np.array(2, np.float32)], {}),
    "Pow of two": ("Pow", [POSITIVE, floats(5)], {}),
    "Clip": ("Clip", [X, np.array(-0.5, np.float32), np.array(0.5, np.float32)], {}),
    "Clip above": ("Clip", [X, None, np.array(0.5, np.float32)], {}),
    "Gelu": ("Gelu", [X], {}),
    "Gelu by tanh": ("Gelu", [X], {"approximate": "tanh"}),
    "Cast": ("Cast", [X.round()], {"to": TensorProto.INT64}),
    "Cast to truth": ("Cast", [X.round()], {"to": TensorProto.BOOL}),
    "CastLike": ("CastLike", [X.round().astype(np.int64), X], {}),
    "Where": ("Where", [X > 0, X, np.array(0, np.float32)], {}),
    "Where of one condition": ("Where", [np.array(True), X, 2 * X], {}),
    "IsNaN": ("IsNaN", [np.where(X > 1, np.nan, X)], {}),
    "IsInf": ("IsInf", [np.where(X > 1, np.inf, np.where(X < -1, -np.inf, X))], {}),
    "IsInf below": ("IsInf", [np.where(X < 0, -np.inf, np.inf)], {"detect_positive": 0}),
    "Identity": ("Identity", [X], {}),
    "Dropout": ("Dropout", [X], {}),
    "Size": ("Add", [np.array(3, np.int64), np.array(4, np.int64)], {}),
    "Reshape": ("Reshape", [X, ints(0, -1)], {}),
    "Reshape to less": ("Reshape", [X, ints(-1)], {}),
    "Flatten": ("Flatten", [IMAGE], {"axis": 2}),
    "Flatten from the end": ("Flatten", [IMAGE], {"axis": -1}),
    "Unsqueeze": ("Unsqueeze", [X, ints(0, -1)], {}),
    "Squeeze": ("Squeeze", [X[:, :1], ints(1)], {}),
    "Squeeze all": ("Squeeze", [X[:1, :, :1]], {}),
    "Transpose": ("Transpose", [X], {"perm": [2, 0, 1]}),
    "Transpose all": ("Transpose", [X], {}),
    "Expand": ("Expand", [X[:, :1], ints(3, 1, 4, 1)], {}),
    "Tile": ("Tile", [X, ints(2, 1, 3)], {}),
    "Concat": ("Concat", [X, X[:, :2]], {"axis": -2}),
    "Split": ("Split", [X, ints(1, 5)], {"axis": 1}),
    "Split evenly": ("Split", [X], {"axis": 1, "num_outputs": 2}),
    "Split unevenly": ("Split", [X], {"axis": 2, "num_outputs": 2}),
    "Split with an empty part": ("Split", [X[:, :4]], {"axis": 1, "num_outputs": 3}),
    "Slice": ("Slice", [X, ints(-3, 1), ints(100, -1), ints(1, 2), ints(2, 1)], {}),
    "Slice backward": ("Slice", [X, ints(-1, 4), ints(-9999, 0), ints(1, 2), ints(-2, -1)], {}),
    "Slice of nothing backward": ("Slice", [X, ints(1), ints(3), ints(1), ints(-1)], {}),
    "Slice of nothing": ("Slice", [X, ints(4), ints(2), ints(1)], {}),
    "Gather one": ("Gather", [X, np.array(-2, np.int64)], {"axis": 1}),
    "Gather a run": ("Gather", [X, ints(1, 3, 5)], {"axis": 1}),
    "Gather any": ("Gather", [X, ints(3, 0, -1, 3).reshape(2, 2)], {"axis": 1}),
    "Pad": ("Pad", [X, ints(0, 1, 2, 0, 3, 0), np.array(1.5, np.float32)], {}),
    "Pad an axis": ("Pad", [X, ints(1, 2), None, ints(-1)], {}),
    "Pad by what lies beside": ("Pad", [X, ints(1, 4, 0, 0, 2, 3)], {"mode": "reflect"}),
    "Pad by the last": ("Pad", [X, ints(1, 4, 0, 0, 7, 3)], {"mode": "edge"}),
    "Trilu": ("Trilu", [X], {}),
    "Trilu below": ("Trilu", [X, np.array(-1, np.int64)], {"upper": 0}),
    "ReduceSum": ("ReduceSum", [X, ints(1)], {"keepdims": 0}),
    "ReduceMean": ("ReduceMean", [X, ints(-1, 0)], {}),
    "ReduceMean of all": ("ReduceMean", [X], {"keepdims": 0}),
    "ReduceMean of none": ("ReduceMean", [X], {"noop_with_empty_axes": 1}),
    "ReduceMax": ("ReduceMax", [X, ints(2)], {}),
    "ReduceProd": ("ReduceProd", [X, ints(-1)], {"keepdims": 0}),
    "ReduceMin": ("ReduceMin", [X, ints(0)], {}),
    "ReduceSumSquare": ("ReduceSumSquare", [X, ints(1)], {}),
    "ReduceL2": ("ReduceL2", [X, ints(-1)], {}),
    "MatMul": ("MatMul", [X, floats(5, 3)], {}),
    "MatMul of stacks": ("MatMul", [X, floats(2, 5, 3)], {}),
    "MatMul of a vector": ("MatMul", [X[0, 0], floats(5, 3)], {}),
    "MatMul by a vector": ("MatMul", [X, floats(5)], {}),
    "MatMul of vectors": ("MatMul", [X[0, 0], floats(5)], {}),
    "Gemm": ("Gemm", [X[0], floats(3, 5), floats(3)], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    "Gemm turned": ("Gemm", [X[0], floats(6, 3)], {"transA": 1}),
    "Conv": ("Conv", [IMAGE, floats(6, 4, 3, 3), floats(6)], {"pads": [1, 1, 1, 1], "strides": [2, 1]}),
    "Conv in groups": ("Conv", [IMAGE, floats(8, 2, 3, 3)], {"group": 2, "dilations": [2, 2]}),
    "Conv by uneven pads": ("Conv", [IMAGE, floats(6, 4, 2, 2)], {"pads": [0, 1, 1, 0]}),
    "Conv on a line": ("Conv", [X, floats(3, 6, 3)], {"pads": [1, 1]}),
    "Conv of the same size": (
        "Conv", [IMAGE, floats(6, 4, 3, 3)], {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    ),
    "MaxPool": ("MaxPool", [IMAGE], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "MaxPool on a line": ("MaxPool", [X], {"kernel_shape": [2], "strides": [2]}),
    "AveragePool": ("AveragePool", [IMAGE], {"kernel_shape": [2, 3], "strides": [2, 2]}),
    "AveragePool with pads": (
        "AveragePool", [IMAGE], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1},
    ),
    "AveragePool within borders": (
        "AveragePool", [IMAGE], {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 2, 1]},
    ),
    "GlobalAveragePool": ("GlobalAveragePool", [IMAGE], {}),
    "GlobalMaxPool": ("GlobalMaxPool", [IMAGE], {}),
    "Softmax": ("Softmax", [X], {}),
    "Softmax of rows": ("Softmax", [X], {"axis": 1}),
    "LogSoftmax": ("LogSoftmax", [X], {}),
    "LayerNormalization": ("LayerNormalization", [X, floats(5), floats(5)], {}),
    "LayerNormalization of two axes": ("LayerNormalization", [X, floats(6, 5)], {"axis": 1, "epsilon": 1e-3}),
    "GroupNormalization": ("GroupNormalization", [IMAGE, CHANNELS, CHANNELS], {"num_groups": 2}),
    "InstanceNormalization": ("InstanceNormalization", [IMAGE, CHANNELS, CHANNELS], {}),
    **{
        name: (name, [X], {})
        for name in ("HardSigmoid", "HardSwish", "LeakyRelu", "ThresholdedRelu", "Softsign", "Ceil", "Round")
    },
    "HardSigmoid of its own": ("HardSigmoid", [X], {"alpha": 0.3, "beta": 0.4}),
    "PRelu": ("PRelu", [X, floats(6, 1)], {}),
    "Sum": ("Sum", [X, floats(6, 1), X], {}),
    "Mean": ("Mean", [X, floats(6, 1), X], {}),
    "DepthToSpace": ("DepthToSpace", [IMAGE], {"blocksize": 2}),
    "DepthToSpace by columns": ("DepthToSpace", [IMAGE], {"blocksize": 2, "mode": "CRD"}),
    "BatchNormalization": (
        "BatchNormalization", [IMAGE, CHANNELS, CHANNELS, CHANNELS, np.abs(CHANNELS)], {},
    ),
}  # fmt: skip

NEWER: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "Swish": ([X], {"alpha": 1.5}),
    "Attention": ([floats(2, 4, 5, 8), floats(2, 2, 6, 8), floats(2, 2, 6, 8)], {"is_causal": 1}),
}
"""Operators of version 24."""

STORED = (
    "Reshape",
    "Expand",
    "Tile",
    "Gather",
    "Slice",
    "Split",
    "Pad",
    "Trilu",
    "Clip",
    "Squeeze",
    "Unsqueeze",
)
"""Operators whose further operands must be known at import."""


@pytest.mark.parametrize("case", CASES)
def test_rows_are_the_standard(case: str) -> None:
    operator, operands, given = CASES[case]
    live = (
        1
        if operator in STORED or operator.startswith("Reduce") or "Normalization" in operator
        else len(operands)
    )
    results = given.get("num_outputs", 2 if operator == "Split" else 1)
    model = model_of(operator, operands, given, 21, live, results)
    compare(model, {f"i{at}": value for at, value in enumerate(operands[:live])})


@pytest.mark.parametrize("operator", NEWER)
def test_rows_of_newer_versions(operator: str) -> None:
    operands, given = NEWER[operator]
    feeds = {f"i{at}": value for at, value in enumerate(operands)}
    compare(model_of(operator, operands, given, 24, len(operands)), feeds)


def test_every_row_has_a_case() -> None:
    tried = {operator for operator, _, _ in CASES.values()}
    elsewhere = {
        "Constant",
        "ConstantOfShape",
        "Shape",
        "Size",
        "Range",
        "Resize",
        "Upsample",
        "ConvTranspose",
        "TopK",
        *NEWER,
        *CODES,
    }
    assert set(ROWS) - tried == elsewhere


@pytest.mark.parametrize("opset", [13, 17])
def test_axes_were_attributes_once(opset: int) -> None:
    compare(model_of("ReduceMean", [X], {"axes": [1], "keepdims": 0}, opset, 1), {"i0": X})


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("given", [{}, {"axis": 0}, {"axis": -1}])
def test_all_axes_from_one_on_were_one(operator: str, given: dict[str, int]) -> None:
    """The reference implementation is of newer versions alone, so it is asked for a matrix."""
    axis = given.get("axis", 1) % 3
    matrix = X.reshape(int(np.prod(X.shape[:axis])), -1)
    expected = ReferenceEvaluator(model_of(operator, [matrix], {}, 21, 1)).run(None, {"i0": matrix})[0]
    found = run(import_onnx(model_of(operator, [X], given, 11, 1), gemm_for), {"i0": X})[0]
    np.testing.assert_allclose(found, expected.reshape(X.shape), rtol=2e-5, atol=2e-6)


def test_bounds_that_are_computed() -> None:
    feeds = {"i0": X, "i1": np.array(0.3, np.float32), "i2": np.array(-0.2, np.float32)}
    compare(model_of("Clip", list(feeds.values()), {}, 21, 3), feeds)
    compare(model_of("Clip", list(feeds.values())[:2], {}, 11, 2), dict(list(feeds.items())[:2]))


def test_rows_of_a_table_by_values() -> None:
    table, ids = floats(9, 4), ints(3, -1, 0, 8).reshape(2, 2)
    compare(model_of("Gather", [table, ids], {}, 21, 2), {"i0": table, "i1": ids})


def graph_of(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}')


COMPUTED_SHAPES = {
    "heads": """agraph (float[batch, seq, 12] x) => (y) {
        s = Shape(x)
        b = Shape <start: int = 0, end: int = 1> (x)
        one = Constant <value_ints: ints = [1]> ()
        n = Gather(s, one)
        three = Constant <value_ints: ints = [3]> ()
        rest = Constant <value_ints: ints = [-1]> ()
        to = Concat <axis = 0> (b, n, three, rest)
        y = Reshape(x, to)
    }""",
    "positions": """agraph (float[batch, seq] x) => (y) {
        s = Shape(x)
        i = Constant <value_int: int = 1> ()
        n = Gather(s, i)
        begin = Constant <value_int: int = 0> ()
        r = Range(begin, n, i)
        f = Cast <to: int = 1> (r)
        y = Add(x, f)
    }""",
    "causal": """agraph (float[batch, seq] x) => (y) {
        n = Shape <start: int = 1> (x)
        square = Concat <axis = 0> (n, n)
        ones = ConstantOfShape <value = float[1] {1}> (square)
        low = Trilu <upper: int = 0> (ones)
        axis = Constant <value_ints: ints = [1]> ()
        row = Unsqueeze(x, axis)
        y = Mul(row, low)
    }""",
    "sizes as numbers": """agraph (float[batch, seq] x) => (y) {
        n = Shape(x)
        f = Cast <to: int = 1> (n)
        k = Size(x)
        g = Cast <to: int = 1> (k)
        h = ReduceMax <keepdims: int = 0> (f)
        a = Div(x, h)
        y = Div(a, g)
    }""",
    "stretch": """agraph (float[batch, 1] x, float[seq] z) => (y) {
        b = Shape(x)
        n = Shape(z)
        both = Concat <axis = 0> (b, n)
        minus = Constant <value_ints: ints = [-1, -1, -1]> ()
        is = Equal(both, minus)
        ones = Constant <value_ints: ints = [1, 1, 1]> ()
        to = Where(is, ones, both)
        two = Constant <value_ints: ints = [2]> ()
        w = Unsqueeze(x, two)
        y = Expand(w, to)
    }""",
}  # fmt: skip


SIZES = {"heads": {"x": (3, 5, 12)}, "stretch": {"x": (3, 1), "z": (4,)}}


@pytest.mark.parametrize("name", COMPUTED_SHAPES)
def test_shapes_that_are_computed(name: str) -> None:
    shapes = SIZES.get(name, {"x": (3, 5)})
    compare(graph_of(COMPUTED_SHAPES[name]), {key: floats(*shape) for key, shape in shapes.items()})


def test_windows_over_uneven_pads() -> None:
    """The reference implementation turns such pads around, so this compares with pads added before."""
    model = model_of("MaxPool", [IMAGE], {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1]}, 21, 1)
    wide = np.pad(IMAGE, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=-np.inf)
    expected = ReferenceEvaluator(model_of("MaxPool", [wide], {"kernel_shape": [2, 2]}, 21, 1)).run(
        None, {"i0": wide}
    )
    np.testing.assert_array_equal(run(import_onnx(model, gemm_for), {"i0": IMAGE})[0], expected[0])


def test_values_that_need_each_other_are_refused() -> None:
    text = "agraph (float[2] x) => (y) {\n y = Add(x, late)\n late = Identity(y)\n }"
    with pytest.raises(ImportRefused, match="input 'late' of node"):
        import_onnx(graph_of(text), gemm_for)


ATTENTION = """agraph (float[b,2,s,4] q, float[b,2,t,4] k, float[b,2,t,4] v, float[s,t] mask) => (y) {
    half = Constant <value_float: float = 0.5> ()
    turned = Transpose <perm: ints = [0, 1, 3, 2]> (k)
    product = MatMul(q, turned)
    scaled = Mul(product, half)
    zero = Constant <value_float: float = 0.0> ()
    least = Constant <value_float: float = -3.0e38> ()
    shown = Less(mask, zero)
    masked = MASKED
    p = Softmax(masked)
    y = MatMul(p, v)
}"""


@pytest.mark.parametrize(
    "masked", ["Add(scaled, mask)", "Add(mask, product)", "Identity(scaled)", "Where(shown, scaled, least)"]
)
def test_attention_that_is_spelt_out(masked: str) -> None:
    model = graph_of(ATTENTION.replace("MASKED", masked))
    sizes = {"q": (3, 2, 5, 4), "k": (3, 2, 6, 4), "v": (3, 2, 6, 4), "mask": (5, 6)}
    compare(model, {name: floats(*shape) for name, shape in sizes.items()})
    graph = simplify(import_onnx(model, gemm_for).program.graph)
    operators = [node.operator for node in graph.nodes]
    assert operators.count("attention") == 1
    assert operators.count("matmul") == 0


REFUSED = {
    "operator": ("NonZero", [X], {}, "no single plan, since NonZero"),
    "training": ("BatchNormalization", [IMAGE, *[CHANNELS] * 4], {"training_mode": 1}, "Training_mode"),
    "an index beyond": ("Gather", [X, ints(X.shape[0])], {}, "outside of axis 0"),
    "an index before": ("Gather", [X, ints(-X.shape[0] - 1)], {}, "outside of axis 0"),
    "type": ("Add", [X.astype(np.complex64), X.astype(np.complex64)], {}, "unsupported type.*complex64"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_named(case: str) -> None:
    operator, operands, given, message = REFUSED[case]
    live = len(operands) if case == "type" else 1
    with pytest.raises(ImportRefused, match=message):
        import_onnx(model_of(operator, operands, given, 21, live), gemm_for)


def test_shapes_by_values_are_no_single_plan() -> None:
    model = model_of("Reshape", [X, ints(4, 15)], {}, 21, 2)
    with pytest.raises(ImportRefused, match=r"must be known at import[\s\S]*needs one"):
        import_onnx(model, gemm_for)


def test_sequences_in_a_batch_of_one_are_not_sorted() -> None:
    nodes = [
        helper.make_node("TopK", ["lengths", "k"], ["sorted", "order"]),
        helper.make_node("Gather", ["x", "order"], ["y"], axis=1),
        helper.make_node("Cast", ["sorted"], ["count"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["y", "count"], ["z"]),
    ]
    given = {"lengths": ints(7), "x": X[:, :1]}
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in given.items()
    ]
    stored = [onnx.numpy_helper.from_array(ints(1), "k")]
    result = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "sorted", infos, [result], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    compare(model, given)
    operators = {node.operator for node in import_onnx(model, gemm_for).program.graph.nodes}
    assert not operators & {"take", "call"}


@pytest.mark.parametrize("operator", ["ReduceL2", "ReduceSumSquare"])
def test_squares_without_axes_are_not_added(operator: str) -> None:
    model = model_of(operator, [X, ints()], {"noop_with_empty_axes": 1}, 18, 1)
    (wanted,) = ReferenceEvaluator(model).run(None, {"i0": X})
    np.testing.assert_allclose(ladder.compile(model)(torch.from_numpy(X)).numpy(), wanted, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_squares_of_wide_types_are_added_in_them(dtype: type) -> None:
    """Float32 has 24 bits: the sum of these is another number there."""
    x = np.array([[5001, 3, 1], [7, 9001, 2]], dtype)
    model = model_of("ReduceSumSquare", [x, ints(1)], {}, 18, 1)
    found = ladder.compile(model)(torch.from_numpy(x)).numpy()
    assert found.dtype == dtype
    assert found.tolist() == [[25010011], [81018054]]


def test_inverse_roots_of_negative_ends() -> None:
    """As `pow` of C and numpy: 0 of -inf, inf of -0.0."""
    x = np.array([4.0, -np.inf, np.inf, -0.0, 0.0, -2.0, np.nan], np.float32)
    model = model_of("Pow", [x, np.array(-0.5, np.float32)], {}, 17, 1)
    imported = import_onnx(model, gemm_for)
    (found,) = run(imported, dict.fromkeys(imported.inputs, x))
    np.testing.assert_array_equal(found, [0.5, 0.0, 0.0, np.inf, np.inf, np.nan, np.nan])


def test_inverse_roots_of_means_of_squares_stay_one_operator() -> None:
    text = """norm (float[2, 8] x) => (float[2, 1] y) {
        axes = Constant<value = int64[1] {-1}>()
        least = Constant<value = float {0.001}>()
        power = Constant<value = float {-0.5}>()
        square = Mul(x, x)
        mean = ReduceMean(square, axes)
        sum = Add(mean, least)
        y = Pow(sum, power)
    }"""
    graph = import_onnx(graph_of(text), gemm_for).program.graph
    assert "select" not in {node.operator for node in graph.nodes}
    assert "rsqrt" in {node.operator for node in graph.nodes}


def test_shrink_of_nan_is_zero() -> None:
    """NaN lies on neither side of the edges."""
    x = np.array([np.nan, -0.3, np.inf, -2.0], np.float32)
    model = model_of("Shrink", [x], {"lambd": 0.5, "bias": 0.25}, 18, 1)
    found = ladder.compile(model)(torch.from_numpy(x)).numpy()
    assert found.tolist() == [0.0, 0.0, np.inf, -1.75]
    assert not np.signbit(found[1])


@pytest.mark.parametrize("operator", ["Cosh", "Sinh"])
def test_hyperbolic_functions_of_all_that_float32_holds(operator: str) -> None:
    """Half of e^89 is a float32, e^89 is none."""
    x = np.full(16, 89.0, np.float32)
    model = model_of(operator, [x], {}, 18, 1)
    (wanted,) = ReferenceEvaluator(model).run(None, {"i0": x})
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(ladder.compile(model)(torch.from_numpy(x)).numpy(), wanted, rtol=1e-5)


def test_a_determinant_of_half_precision() -> None:
    x = np.array([[2.0, 1.0], [0.5, 3.0]], np.float16)
    found = ladder.compile(model_of("Det", [x], {}, 22, 1))(torch.from_numpy(x))
    assert (found.dtype, found.item()) == (torch.float16, 5.5)
