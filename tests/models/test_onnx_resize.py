"""Resize as in the standard's own reference: whole factors of the nearest element are moves of a kernel."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import ladder
from ladder.runtime.onnx_ops.operation import Operation
from ladder.runtime.onnx_ops.table import TABLE

HOW = {
    "half_pixel": ("round_prefer_floor", True),
    "asymmetric": ("floor", True),
    "pytorch_half_pixel": ("ceil", False),
    "align_corners": ("floor", False),
}
"""Coordinates -> how they become whole, and whether that repeats every element."""


def model(how: str, factor: int, version: int) -> onnx.ModelProto:
    given = {"coordinate_transformation_mode": how, "nearest_mode": HOW[how][0]} if version > 10 else {}
    scales = onnx.numpy_helper.from_array(np.array([1, 1, factor, 1], np.float32), "scales")
    names = ["x", "", "scales"] if version > 10 else ["x", "scales"]
    nodes = [helper.make_node("Resize", names, ["r"], **given), helper.make_node("Relu", ["r"], ["y"])]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "resize",
        [info("x", TensorProto.FLOAT, ["n", 3, "h", 5])],
        [info("y", TensorProto.FLOAT, None)],
        [scales],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=8)


@pytest.mark.parametrize(
    ("how", "factor", "version"), [*((how, 3, 13) for how in HOW), ("asymmetric", 2, 10)]
)
def test_whole_factors(how: str, factor: int, version: int) -> None:
    written = model(how, factor, version)
    fast = ladder.compile(written)
    x = torch.randn(2, 3, 4, 5)
    (wanted,) = ReferenceEvaluator(model(how, factor, max(version, 13))).run(None, {"x": x.numpy()})
    np.testing.assert_array_equal(fast(x).numpy(), wanted)
    assert ("torch onnx.Resize" in fast.plan()) != HOW[how][1]


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("antialias", [0, 1])
@pytest.mark.parametrize("scale", [2.0, 0.6, 1.7])
def test_an_infinite_element_reaches_no_farther_than_its_weights(
    mode: str, antialias: int, scale: float
) -> None:
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode=mode, antialias=antialias)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "resize",
        [info("x", TensorProto.FLOAT, [1, 1, "n"])],
        [info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.array([1, 1, scale], np.float32), "scales")],
    )
    written = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    x = torch.randn(1, 1, 24)
    got = ladder.compile(written)(x)
    (wanted,) = ReferenceEvaluator(written).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5, atol=1e-5)
    x[0, 0, 12] = torch.inf
    away = ladder.compile(written)(x).isfinite()
    assert bool(away[..., :2].all())
    assert bool(away[..., -2:].all())
    assert not bool(away.all())


@pytest.mark.parametrize("shape", [(2, 3, 6), (2, 3, 6, 5), (1, 2, 4, 3, 6), (1, 1, 300, 4)], ids=str)
@pytest.mark.parametrize("scale", [2.0, 0.5, 1.5, 0.2])
@pytest.mark.parametrize("how", ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"])
def test_linear_in_all_axes(
    how: str, scale: float, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's function computes what has its coordinates, and is as precise."""
    sizes = np.array([*shape[:2], *(max(1, int(n * scale)) for n in shape[2:])])
    calls: list[bool] = []
    name = f"upsample_{('linear1d', 'bilinear2d', 'trilinear3d')[len(shape) - 3]}"
    function = getattr(torch._C._nn, name)
    monkeypatch.setattr(torch._C._nn, name, lambda *args: calls.append(True) or function(*args))
    operands = onnx.numpy_helper.from_array(sizes, "sizes")
    node = helper.make_node(
        "Resize", ["x", "", "", "sizes"], ["y"], mode="linear", coordinate_transformation_mode=how
    )
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "resize",
        [info("x", TensorProto.FLOAT, shape)],
        [info("y", TensorProto.FLOAT, None)],
        [operands],
    )
    written = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    x = torch.randn(shape)
    (wanted,) = ReferenceEvaluator(written).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(ladder.compile(written)(x).numpy(), wanted, rtol=0, atol=3e-6)
    single = how == "pytorch_half_pixel" and 1 in sizes[2:]
    wide = shape[2] == 300 and (how == "align_corners" or scale != 2)
    assert bool(calls) == (how != "asymmetric" and not single and not wide)


def test_what_keeps_its_sizes_is_not_resampled() -> None:
    op = Operation("Resize", 18, {"mode": "linear"})
    x, sizes = torch.randn(2, 3, 4, 5), torch.tensor([2, 3, 4, 5])
    assert TABLE["Resize"](op, x, None, None, sizes) is x
    half = x.half()
    for rows in range(1, 40):  # more shapes than are kept
        found = TABLE["Resize"](op, half[:, :, :, :3], None, None, torch.tensor([2, 3, rows, 3]))
        wanted = torch.nn.functional.interpolate(half[..., :3].float(), (rows, 3), mode="bilinear")
        assert torch.equal(found, wanted.half())


def test_batches_without_pictures() -> None:
    """Sizes that a model reads off its operand are those of its plan; an axis of no elements keeps none."""
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float[n, 2, h, w] x) => (y) {
        s = Shape <end = 2> (x)  t = Concat <axis = 0> (s, pixels)
        y = Resize <mode = "linear"> (x, , , t) }"""
    written = onnx.parser.parse_model(text)
    written.graph.initializer.append(onnx.numpy_helper.from_array(np.array([8, 9]), "pixels"))
    fast = ladder.compile(written)
    assert fast.staged.single is not None
    assert fast(torch.randn(0, 2, 4, 4)).shape == (0, 2, 8, 9)
    assert fast(torch.randn(3, 2, 4, 4)).shape == (3, 2, 8, 9)
