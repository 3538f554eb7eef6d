"""ConvTranspose as torch has it: a convolution of ours where the kernel is a multiple of the stride."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional

import ladder

FUNCTIONS = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d}
CASES = {
    "pixels apart": (2, {"taps": 2, "stride": 2}, True),
    "overlapping": (2, {"taps": 4, "stride": 2, "padding": 1}, True),
    "a vocoder's": (1, {"taps": 16, "stride": 8, "padding": 4}, True),
    "stride 1": (2, {"taps": 3, "stride": 1, "padding": 1}, True),
    "cut off by less": (1, {"taps": 4, "stride": 2, "padding": 1, "output_padding": 1}, True),
    "no multiple of the stride": (2, {"taps": 3, "stride": 2, "padding": 1, "output_padding": 1}, False),
    "elements beyond the last": (1, {"taps": 2, "stride": 2, "output_padding": 1}, False),
}
"""Name -> axes, settings, and whether a kernel of ours computes it."""


def model(rank: int, taps: int, stride: int, padding: int = 0, output_padding: int = 0):
    draw = np.random.default_rng(taps)
    arrays = {"w": draw.standard_normal((3, 5, *[taps] * rank)), "b": draw.standard_normal(5)}
    stored = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
    given = {"pads": [padding] * 2 * rank, "output_padding": [output_padding] * rank}
    node = helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], strides=[stride] * rank, **given)
    info = helper.make_tensor_value_info
    shape = ["n", 3, *(f"s{axis}" for axis in range(rank))]
    inputs, outputs = [info("x", TensorProto.FLOAT, shape)], [info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "transposed", inputs, outputs, stored)
    written = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
    return written, [torch.tensor(array, dtype=torch.float64) for array in arrays.values()]


@pytest.mark.parametrize("case", CASES)
def test_as_torch_has_it(case: str) -> None:
    rank, settings, ours = CASES[case]
    written, (weight, bias) = model(rank, **settings)
    fast = ladder.compile(written)
    given = [settings.get(name, 0) for name in ("stride", "padding", "output_padding")]
    for n in (2, 1):
        x = torch.randn(n, 3, *range(4 + n, 4 + n + rank))
        x[0, 1, 2] = torch.inf
        found, wanted = fast(x), FUNCTIONS[rank](x.double(), weight, bias, *given)
        assert found.shape == wanted.shape
        finite = wanted.isfinite()
        assert torch.equal(finite, found.isfinite())
        torch.testing.assert_close(found[finite], wanted[finite].float(), rtol=1e-5, atol=1e-5)
    assert ("onnx.ConvTranspose" not in fast.plan()) == ours
