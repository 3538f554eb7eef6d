"""Tensor expressions: what they mean, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ladder.ir import apply, compute, evaluate, expr, max_, sum_, tensor, to_graph, verify
from tile_types.errors import DTypeError, ShapeError, UnknownNameError
from tile_types.quantize import quantize

rng = np.random.default_rng(0)


def gemm(weight="nf4", n=24, k=96, **rest):
    a = tensor("A", ("M", k), "float16")
    b = tensor("B", (n, k), weight, **rest)
    return compute(("M", n), lambda m, n, k: a[m, k] * b[n, k], reduce={"k": k})


def conv(pad, stride=1):
    x = tensor("X", (2, 9, 9, 4), "float32")
    w = tensor("W", (5, 3, 3, 4), "float32")
    size = 9 if pad else 7
    return compute(
        (2, -(-size // stride), -(-size // stride), 5),
        lambda n, h, w_, f, r, s, c: x[n, stride * h + r - pad, stride * w_ + s - pad, c] * w[f, r, s, c],
        reduce={"r": 3, "s": 3, "c": 4},
        output="float32",
        pad=bool(pad),
    )


def test_quantized_gemm():
    program = gemm(group_size=32)
    verify(to_graph(program))
    w = quantize(rng.standard_normal((24, 96)), "nf4", group_size=32)
    a = rng.standard_normal((7, 96))
    assert np.allclose(evaluate(program, {"A": a, "B": w}), a @ w.dequantize().T, rtol=1e-13)


def test_accesses_through_a_computed_tensor():
    x = tensor("x", (100,), "float32")
    blur = compute((98,), lambda i: x[i] + x[i + 1] + x[i + 2], output="float32")
    twice = compute((96,), lambda i: blur[i] + blur[i + 2], output="float32", name="D")
    data = rng.standard_normal(100)
    once = data[:-2] + data[1:-1] + data[2:]
    assert np.allclose(evaluate(twice, [data]), once[:-2] + once[2:])


@pytest.mark.parametrize(("pad", "stride"), [(0, 1), (1, 1), (1, 2), (0, 2)])
def test_convolution_equals_torch(pad, stride):
    program = conv(pad, stride)
    verify(to_graph(program))
    x, w = torch.randn(2, 9, 9, 4, dtype=torch.float64), torch.randn(5, 3, 3, 4, dtype=torch.float64)
    expected = torch.nn.functional.conv2d(
        x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), stride=stride, padding=pad
    )
    assert np.allclose(evaluate(program, [x, w]), expected.permute(0, 2, 3, 1), rtol=1e-12)


def test_epilogue_and_broadcasting_of_vectors():
    a, b = tensor("A", ("M", 8), "int8"), tensor("B", (5, 8), "int8")
    t, bias = tensor("t", ("M",), "float32"), tensor("bias", (5,), "float16")
    program = compute(
        ("M", 5), lambda m, n, k: apply("silu", t[m] * sum_(a[m, k] * b[n, k], k) + bias[n]), reduce={"k": 8}
    )
    graph = to_graph(program)
    verify(graph)
    assert [node.tile.ttype.name for node in graph.nodes if node.operator == "contract"] == ["int32"]
    A, B = rng.integers(-9, 9, (3, 8)), rng.integers(-9, 9, (5, 8))
    T, bias_values = rng.random(3), rng.random(5)
    z = T[:, None] * (A @ B.T) + bias_values
    got = evaluate(program, {"A": A, "B": B, "t": T, "bias": bias_values})
    assert np.allclose(got, z / (1 + np.exp(-z)), rtol=1e-13)


def test_general_bodies():
    x = tensor("x", (4, 6), "float32")
    y = tensor("y", (6, 4), "float32")
    X, Y = rng.standard_normal((4, 6)), rng.standard_normal((6, 4))
    cases = {
        "transposed add": (
            compute((4, 6), lambda i, j: x[i, j] - y[j, i] / 2, output="float32"),
            X - Y.T / 2,
        ),
        "outer": (compute((6, 4), lambda i, j: x[j, i] * 2 + 1, output="float32"), X.T * 2 + 1),
        "distance": (
            compute(
                (4, 4), lambda i, j, k: apply("square", x[i, k] - y[k, j]), reduce={"k": 6}, output="float32"
            ),
            ((X[:, None, :] - Y.T[None]) ** 2).sum(-1),
        ),
        "maximum": (
            compute((4,), lambda i, k: max_(x[i, k], k), reduce={"k": 6}, output="float32"),
            X.max(1),
        ),
        "diagonal": (compute((4,), lambda i: x[i, i], output="float32"), np.diagonal(X)),
        "constant": (
            compute((2, 3), lambda i, j: 1 - expr.scalar(3), output="float32"),
            np.full((2, 3), -2.0),
        ),
        "stretched": (compute((2, 4), lambda i, j: -x[j, 0], output="float32"), np.tile(-X[:, 0], (2, 1))),
        "negated sum of products": (
            compute(
                (4,), lambda i, k: -sum_(x[i, k] * y[k, i] * x[i, k], k), reduce={"k": 6}, output="float32"
            ),
            -(X * Y.T * X).sum(1),
        ),
    }
    for name, (program, expected) in cases.items():
        graph = to_graph(program)
        verify(graph)
        inputs = {node.name: {"x": X, "y": Y}[node.name] for node in graph.inputs}
        assert np.allclose(evaluate(program, inputs), expected, rtol=1e-12), name


def test_element_wise_operators_are_functions_of_the_module():
    x = tensor("x", (3,), "float32")
    program = compute((3,), lambda i: expr.relu(x[i]), output="float32")
    assert np.array_equal(evaluate(program, [np.array([-1.0, 0, 2])]), [0, 0, 2])
    with pytest.raises(AttributeError, match="matmul"):
        expr.matmul  # noqa: B018


def test_explicit_convert_sets_the_core_type():
    a, b = tensor("A", (2, 8), "fp8_e4m3"), tensor("B", (3, 8), "int4")
    program = compute(
        (2, 3),
        lambda m, n, k: expr.convert(a[m, k], "float16") * expr.convert(b[n, k], "float16"),
        reduce={"k": 8},
    )
    contract = next(node for node in to_graph(program).nodes if node.operator == "contract")
    graph = to_graph(program)
    assert [graph.tile(value).ttype.name for value in contract.inputs] == ["float16", "float16"]


@pytest.mark.parametrize(
    ("build", "error", "reason"),
    [
        (lambda: gemm("nf5"), UnknownNameError, "nf4"),
        (lambda: gemm(zero="integer"), ShapeError, "need group_size"),
        (lambda: tensor("x", (4, "K"), "int4", group_size=-1), ShapeError, "known last extent"),
        (lambda: compute((4,), lambda i, j: expr.scalar(0)), ShapeError, "must take 1 indices"),
        (lambda: compute((4,), lambda i: tensor("x", (4, 4), "float16")[i]), ShapeError, "got 1 indices"),
        (lambda: compute((4,), lambda i: tensor("x", (4,), "float16")["i"]), ShapeError, "affine"),
        (lambda: compute((4,), lambda i: tensor("x", (4,), "float16")[i * i]), ShapeError, "by an integer"),
        (lambda: compute((4,), lambda i: "x"), DTypeError, "built from tensors"),
        (lambda: apply("silo", 1.0), UnknownNameError, "silu"),
        (lambda: apply("matmul", 1.0, 2.0), DTypeError, "not element-wise"),
        (lambda: sum_(1.0), ShapeError, "names its index variables"),
        (
            lambda: to_graph(compute((8,), lambda i: tensor("x", (4,), "float16")[i])),
            ShapeError,
            r"index i of operand 0 spans 0\.\.7",
        ),
        (
            lambda: to_graph(compute((4,), lambda i, k: tensor("x", (4,), "float16")[i], reduce={"k": 3})),
            ShapeError,
            "does not depend",
        ),
    ],
)
def test_bad_expressions(build, error, reason):
    with pytest.raises(error, match=reason):
        build()


def test_inputs_are_checked():
    program = gemm(group_size=32)
    w = quantize(rng.standard_normal((24, 96)), "nf4", group_size=32)
    a = np.zeros((3, 96))
    with pytest.raises(ShapeError, match="needs the input 'B'"):
        evaluate(program, {"A": a})
    with pytest.raises(UnknownNameError, match="'b'"):
        evaluate(program, {"A": a, "b": w})
    with pytest.raises(ShapeError, match=r"input 'A' must have shape \[M, 96\], got \[3, 95\]|with"):
        evaluate(program, {"A": a[:, 1:], "B": w})
    with pytest.raises(DTypeError, match="give a QuantizedTensor"):
        evaluate(program, {"A": a, "B": np.zeros((24, 96))})
    with pytest.raises(DTypeError, match="holds int4"):
        evaluate(program, {"A": a, "B": quantize(rng.standard_normal((24, 96)), "int4", group_size=32)})
    with pytest.raises(DTypeError, match="a scale per 16 elements"):
        evaluate(program, {"A": a, "B": quantize(rng.standard_normal((24, 96)), "nf4", group_size=16)})
    with pytest.raises(ShapeError, match="got 1 of them"):
        evaluate(program, [a])
