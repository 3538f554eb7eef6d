"""Resize as in the standard's own reference: whole factors of the nearest element are moves of a kernel."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import ladder
from ladder.runtime.onnx_ops import resize
from ladder.runtime.onnx_ops.operation import Operation
from ladder.runtime.onnx_ops.table import TABLE
from tile_types.errors import ShapeError

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
@pytest.mark.parametrize("kernels", [True, False])
def test_linear_in_all_axes(
    kernels: bool, how: str, scale: float, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no kernel, torch's function computes what has its coordinates, and is as precise."""
    if not kernels:
        monkeypatch.setattr(resize, "have_kernels", lambda *of: False)
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
    assert bool(calls) == (not kernels and how != "asymmetric" and not single and not wide)


def test_what_keeps_its_sizes_is_not_resampled() -> None:
    op = Operation("Resize", 18, {"mode": "linear"})
    x, sizes = torch.randn(2, 3, 4, 5), torch.tensor([2, 3, 4, 5])
    assert TABLE["Resize"](op, x, None, None, sizes) is x
    half = x.half()
    for rows in range(1, 40):  # more shapes than are kept
        found = TABLE["Resize"](op, half[:, :, :, :3], None, None, torch.tensor([2, 3, rows, 3]))
        wanted = torch.nn.functional.interpolate(half[..., :3].float(), (rows, 3), mode="bilinear")
        torch.testing.assert_close(found, wanted.half(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("axes", [[0], [2], [0, 1, 2], [1, 3], [0, 2, 3], [3]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int16, torch.bool])
def test_kernels_of_any_axes(
    dtype: torch.dtype, axes: list[int], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of views too; an infinite element and NaN are where torch's functions have them."""
    if mode == "linear" and not dtype.is_floating_point:
        return
    x = torch.randn(4, 5, 6, 7, generator=torch.Generator().manual_seed(1)).mul(9).to(dtype)
    if dtype.is_floating_point:
        x[1, 1, 1, 1], x[2, 3, 4, 5] = torch.inf, torch.nan
    factors = torch.tensor([1.7, 0.6, 2.0, 1.0][: len(axes)])
    op = Operation("Resize", 19, {"mode": mode, "axes": axes})
    views = [x, x.permute(0, 2, 3, 1), x[:, ::2], x.flip(3)[:1]]
    found = [TABLE["Resize"](op, each, None, factors) for each in views]
    monkeypatch.setattr(resize, "have_kernels", lambda *of: False)
    for each, got in zip(views, found, strict=True):
        wanted = TABLE["Resize"](Operation("Resize", 19, op.given), each, None, factors)
        assert got.dtype == dtype
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted, equal_nan=True)


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


@pytest.mark.parametrize("how", ["half_pixel", "asymmetric", "align_corners"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int8])
def test_whole_numbers_between_neighbours_have_no_fractions(how: str, dtype: torch.dtype) -> None:
    """Cut off, as onnxruntime does (the standard says nothing of it), after a sum in its order in float32."""
    x = torch.randint(0, 128, (2, 3, 4, 5), generator=torch.Generator().manual_seed(3)).to(dtype)
    x = x if dtype == torch.uint8 else x - 64
    op = Operation("Resize", 13, {"mode": "linear", "coordinate_transformation_mode": how})
    found = TABLE["Resize"](op, x, None, torch.tensor([1.0, 1, 3, 2]))
    f, wide = np.float32, x.numpy().astype(np.float32)
    sides = []
    for extent, out in ((4, 12), (5, 10)):
        at, scale = np.arange(out, dtype=f), f(out / extent)
        places = {"asymmetric": at / scale, "half_pixel": (at + f(0.5)) / scale - f(0.5)}
        place = (at * f(extent - 1) / f(out - 1) if how == "align_corners" else places[how]).clip(
            0, extent - 1
        )
        first = place.astype(int)
        second = np.minimum(first + 1, extent - 1)
        after, before = np.abs(place - first.astype(f)), np.abs(place - second.astype(f))
        same = first == second
        sides.append([(first, np.where(same, f(0.5), before)), (second, np.where(same, f(0.5), after))])
    total = np.zeros((2, 3, 12, 10), dtype=f)
    for row, row_share in sides[0]:
        for column, share in sides[1]:
            total = total + wide[:, :, row][..., column] * (share[None, :] * row_share[:, None])
    assert torch.equal(found, torch.from_numpy(np.trunc(total)).to(dtype))
    assert not torch.equal(found.float(), torch.from_numpy(total).round())


@pytest.mark.parametrize(
    ("scales", "sizes"), [((0.5, 0.3), None), ((2.0, 1.0), None), ((0.77, 0.25), None), (None, (7, 40))]
)
def test_smoothed_pictures_are_torchs_with_margins(
    scales: tuple[float, ...] | None, sizes: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch leaves out what lies beyond borders, where ONNX repeats elements; it takes no infinite ones."""
    x = torch.randn(1, 2, 20, 32)
    given = {"mode": "linear", "antialias": 1}
    args = [None, None if scales is None else torch.tensor([1.0, 1.0, *scales])]
    args += [] if sizes is None else [torch.tensor([1, 2, *sizes])]
    found = TABLE["Resize"](Operation("Resize", 18, given), x, *args)
    assert resize._smoothed(Operation("Resize", 18, given), x, [2, 3], [(10, 0.5), (8, 0.25)]) is not None
    monkeypatch.setattr(resize, "_smoothed", lambda *of: None)
    torch.testing.assert_close(
        found, TABLE["Resize"](Operation("Resize", 18, given), x, *args), rtol=1e-4, atol=5e-5
    )
    monkeypatch.undo()
    x[0, 0, 10, 16] = torch.inf
    away = TABLE["Resize"](Operation("Resize", 18, given), x, *args).isfinite()
    assert bool(away[0, 1].all() and away[0, 0, 0].all())


@pytest.mark.parametrize("shape", [(1, 2, 6, 1), (1, 1, 9, 4), (2, 3, 1, 8), (1, 1, 1, 1)], ids=str)
def test_smoothed_pictures_of_one_column(shape: tuple[int, ...]) -> None:
    """Torch's function reads one element of a column where the result has one."""
    x, sizes = torch.randn(shape), torch.tensor([*shape[:2], max(1, shape[2] // 3), 1])
    found = TABLE["Resize"](Operation("Resize", 18, {"mode": "linear", "antialias": 1}), x, None, None, sizes)
    both = TABLE["Resize"](
        Operation("Resize", 18, {"mode": "linear", "antialias": 1}),
        x.unsqueeze(2),
        None,
        None,
        torch.tensor([*sizes[:2], 1, *sizes[2:]]),
    )
    torch.testing.assert_close(found, both.squeeze(2), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_smoothed_codes_are_rounded_between_axes(mode: str) -> None:
    """Columns first, then rows, as in onnxruntime and Pillow."""
    x = torch.randint(0, 256, (2, 6, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    given = {"mode": mode, "antialias": 1, "cubic_coeff_a": -0.5}

    def resized(x: torch.Tensor, axes: list[int], sizes: list[int]) -> torch.Tensor:
        return TABLE["Resize"](
            Operation("Resize", 18, {**given, "axes": axes}), x, None, None, torch.tensor(sizes)
        )

    columns = resized(x.double(), [2], [3])
    columns = (columns + 0.5).floor().clamp(0, 255)
    rows = (resized(columns, [1], [4]) + 0.5).floor().clamp(0, 255)
    assert torch.equal(resized(x, [1, 2], [4, 3]), rows.to(torch.uint8))
    assert resized(x.to(torch.int32), [2], [3]).dtype == torch.int32
    assert resized(x[:, :0], [2], [3]).shape == (2, 0, 3)


@pytest.mark.parametrize(
    ("given", "scales", "sizes"),
    [
        ({"axes": [3]}, [2.0], None),
        ({"axes": [1, -2]}, [2.0, 2.0], None),
        ({}, [2.0, 2.0], None),
        ({}, [1.0, 1.0, float("nan")], None),
        ({}, [1.0, 1.0, float("inf")], None),
        ({}, None, [2, 3, 4, 5]),
        ({}, None, [2, 3, -4]),
    ],
    ids=str,
)
def test_other_numbers_than_axes_are_one_error(
    given: dict[str, list[int]], scales: list[float] | None, sizes: list[int] | None
) -> None:
    op = Operation("Resize", 18, given)
    args = [None if value is None else torch.tensor(value) for value in (scales, sizes)]
    with pytest.raises(ShapeError, match=r"^Resize"):
        TABLE["Resize"](op, torch.randn(2, 3, 4), None, *args)
