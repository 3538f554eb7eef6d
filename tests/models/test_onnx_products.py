"""What follows products of stored matrices in ONNX models is computed by their kernels."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import ladder

LAYER = """
    <ir_version: 10, opset_import: ["" : 21]>
    layer (float[B, S, 4] x, float[B, S, 6] r) => (float[B, S, 6] y, float[B, S, 6] z)
    <float root = {1.4142135}, float one = {1}, float half = {0.5}>
    {
        p = MatMul(x, w)
        s = Add(bias, p)
        d = Div(s, root)
        e = Erf(d)
        o = Add(e, one)
        m = Mul(s, o)
        y = Mul(m, half)
        q = MatMul(y, v)
        z = Sub(r, q)
    }"""


def test_bias_and_gelu_are_of_the_products_kernel() -> None:
    model = onnx.parser.parse_model(LAYER)
    draw = np.random.default_rng(0)
    stored = {"w": (4, 6), "bias": (1, 1, 6), "v": (6, 6)}
    arrays = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in stored.items()}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in arrays.items())
    fast = ladder.compile(model)
    torch.manual_seed(0)
    products = [line for line in fast.plan().splitlines() if "matmul" in line]
    assert len(products) == 2
    assert "matmul add gelu" in products[0] or "torch" in products[0]
    w, bias, v = (torch.from_numpy(arrays[name]) for name in stored)
    for batch, length in [(2, 3), (1, 1), (0, 2), (2, 3)]:
        x, r = torch.randn(batch, length, 4), torch.randn(batch, length, 6)
        x[:1, :1, :1], r[:1, :1, 1:2] = float("nan"), float("inf")
        y, z = fast(x, r)
        wanted = torch.nn.functional.gelu(x @ w + bias)
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(z, r - wanted @ v, rtol=1e-5, atol=1e-5, equal_nan=True)


BATCHES = [((5, 3, 4), (1, 4, 2)), ((1, 3, 4), (5, 4, 2)), ((2, 1, 3, 4), (6, 4, 5))]


@pytest.mark.parametrize("shapes", BATCHES)
def test_batches_of_one_are_multiplied_with_all(shapes: tuple[tuple[int, ...], ...]) -> None:
    sides = ", ".join(f"float{list(shape)} {name}" for name, shape in zip("ab", shapes, strict=True))
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({sides}) => (float y) {{ y = MatMul(a, b) }}'
    fast = ladder.compile(onnx.parser.parse_model(text))
    a, b = map(torch.randn, shapes)
    torch.testing.assert_close(fast(a, b), a @ b)
