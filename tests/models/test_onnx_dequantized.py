"""Codes of ONNX models as numbers: blocks of vectors, and scales of 16 bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import ladder


def decoded(x: np.ndarray, scale: np.ndarray, out: int, **given: Any) -> Any:
    """Return what `DequantizeLinear` gives for codes that are an input."""
    code = helper.np_dtype_to_tensor_dtype(x.dtype)
    stored = onnx.numpy_helper.from_array(scale, "scale")
    node = helper.make_node("DequantizeLinear", ["x", "scale"], ["y"], **given)
    result = helper.make_tensor_value_info("y", out, None)
    graph = helper.make_graph(
        [node], "one", [helper.make_tensor_value_info("x", code, x.shape)], [result], [stored]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    return ladder.compile(model)(torch.from_numpy(x))


@pytest.mark.parametrize(("size", "block"), [(6, 3), (5, 2), (4, 4)])
def test_vectors_have_blocks(size: int, block: int) -> None:
    x, scale = np.arange(size, dtype=np.int8), np.array([0.5, 2.0, 8.0], np.float32)[: -(-size // block)]
    found = decoded(x, scale, TensorProto.FLOAT, axis=0, block_size=block)
    assert np.array_equal(found.numpy(), x * np.repeat(scale, block)[:size])


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("out", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_products_with_scales_of_16_bits_are_rounded_once(kind: Any, out: int) -> None:
    """Codes of 16 bits have more digits than such scales, and are beyond the largest half."""
    x, scale = np.array([12345, -32767, 3, -1], np.int16), np.array(0.01, kind)
    for codes in (x, x.view(np.uint16)):
        exact = codes.astype(np.float64) * float(scale)
        found = decoded(codes, scale, out, output_dtype=out)
        wanted = torch.from_numpy(exact.astype(np.float32)).to(found.dtype)
        assert torch.equal(found, wanted)
