"""ONNX's NonMaxSuppression, RoiAlign and pooling of floats, beside the standard's own reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ladder.runtime.onnx_ops import vision
from ladder.runtime.onnx_ops.operation import Operation
from ladder.runtime.onnx_ops.table import TABLE
from tests.models.test_onnx_selection import Called
from tile_types.errors import ShapeError

CODES = {torch.float32: TensorProto.FLOAT, torch.float64: TensorProto.DOUBLE, torch.int64: TensorProto.INT64}


def reference(name: str, version: int, given: dict[str, Any], *operands: torch.Tensor) -> np.ndarray:
    """Return what the standard's reference computes."""
    names = [f"x{at}" for at in range(len(operands))]
    info = helper.make_tensor_value_info
    inputs = [info(n, CODES[x.dtype], x.shape) for n, x in zip(names, operands, strict=True)]
    node = helper.make_node(name, names, ["y"], **given)
    graph = helper.make_graph([node], "one", inputs, [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=8)
    feeds = {n: x.numpy() for n, x in zip(names, operands, strict=True)}
    (found,) = ReferenceEvaluator(model).run(None, feeds)
    return np.asarray(found)


def boxes(count: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw boxes and scores, some of which are equal."""
    random = torch.Generator().manual_seed(count)
    centres = torch.rand(2, count, 2, generator=random) * spread
    sizes = torch.rand(2, count, 2, generator=random) + 0.1
    scores = torch.rand(2, 3, count, generator=random)
    scores[:, :, ::7] = 0.5
    return torch.cat([centres - sizes / 2, centres + sizes / 2], -1), scores


@pytest.mark.parametrize("least", [None, 0.0, 0.4])
@pytest.mark.parametrize("whole", [False, True])
def test_a_kernel_keeps_what_torch_keeps(
    whole: bool, least: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of equal, negative, infinite scores, zeros of both signs, NaN; boxes that touch or are points."""
    given, scores = boxes(90, 4.0)
    given = given.round() if whole else given
    special = torch.tensor([0.0, -0.0, -1.0, float("inf"), float("-inf"), -0.0, float("nan")])
    scores[0, 0, 1::8] = special.repeat(2)[: len(scores[0, 0, 1::8])]
    operands = [given, scores, torch.tensor([9]), torch.tensor([0.25 if whole else 0.4])]
    operands += [] if least is None else [torch.tensor([least])]
    op, run = Operation("NonMaxSuppression", 11), TABLE["NonMaxSuppression"]
    calls = []
    entry = vision.native.entry
    monkeypatch.setattr(vision.native, "entry", lambda *name: calls.append(name) or entry(*name))
    found = run(op, *operands)
    count = len(calls)
    assert set(calls) == {("suppression", "suppression")}
    monkeypatch.setattr(vision, "_have_kernel", lambda *of: False)
    assert torch.equal(found, run(op, *operands))
    assert len(calls) == count


@pytest.mark.parametrize(("count", "spread"), [(1, 1.0), (5, 0.5), (150, 1.0), (300, 8.0)])
@pytest.mark.parametrize(("most", "limit", "least"), [(0, 0.5, 0.0), (3, 0.5, 0.3), (1000, 0.2, 0.0)])
def test_boxes_are_kept_as_one_after_another(
    count: int, spread: float, most: int, limit: float, least: float
) -> None:
    """Several blocks of boxes, of which few or almost all are kept."""
    given, scores = boxes(count, spread)
    numbers = torch.tensor([most]), torch.tensor([limit]), torch.tensor([least])
    found = TABLE["NonMaxSuppression"](Operation("NonMaxSuppression", 11), given, scores, *numbers)
    wanted = []
    for image in range(2):
        for kind in range(3):
            order = torch.sort(scores[image, kind], descending=True, stable=True).indices.tolist()
            kept: list[int] = []
            for at in order:
                if float(scores[image, kind, at]) <= np.float32(least) or len(kept) == most:
                    continue
                a = given[image, at]
                overlaps = []
                for other in kept:
                    c = given[image, other]
                    sides = (torch.minimum(a[2:], c[2:]) - torch.maximum(a[:2], c[:2])).clamp(min=0)
                    shared, areas = sides.prod(), (a[2:] - a[:2]).prod() + (c[2:] - c[:2]).prod()
                    overlaps.append(float(shared / (areas - shared)))
                if all(overlap <= limit for overlap in overlaps):
                    kept.append(at)
            wanted += [[image, kind, at] for at in kept]
    assert found.tolist() == wanted


def test_boxes_are_compared_in_blocks() -> None:
    """Thirty boxes kept one after another took as many rounds of fifteen operators."""
    given, scores = boxes(100, 8.0)
    with Called() as called:
        found = TABLE["NonMaxSuppression"](
            Operation("NonMaxSuppression", 11), given, scores, torch.tensor([100]), torch.tensor([0.5])
        )
    assert len(found) > 300
    assert len(called.names) < 300


@pytest.mark.parametrize("mode", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("ratio", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", [True, False])
def test_regions_of_several_images(
    kernel: bool, mode: str, ratio: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regions beyond the borders, of no extent, and in images out of order."""
    if not kernel:
        monkeypatch.setattr(vision, "_have_regions", lambda *of: False)
    given = {
        "output_height": 3, "output_width": 2, "sampling_ratio": ratio, "spatial_scale": 0.5,
        "coordinate_transformation_mode": mode,
    }  # fmt: skip
    x = torch.randn(2, 3, 7, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    corners = [[1, 2, 9, 11], [-6, -4, 5, 8], [10, 6, 30, 20], [3, 3, 3, 3], [0, 0, 17, 13]]
    rois, images = torch.tensor(corners).to(dtype), torch.tensor([1, 0, 1, 0, 1])
    op = Operation("RoiAlign", 16, given)
    with Called() as called:
        found = TABLE["RoiAlign"](op, x, rois, images)
    wanted = reference("RoiAlign", 16, given, x, rois, images)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-5)
    assert ("grid_sampler_2d" in called.names) == (ratio > 0 and not (kernel and dtype == torch.float32))
    assert TABLE["RoiAlign"](op, x, rois[:0], images[:0]).shape == (0, 3, 3, 2)
    part = x[:, ::2, :, 1:].half()
    torch.testing.assert_close(
        TABLE["RoiAlign"](op, part, rois, images), TABLE["RoiAlign"](op, part.float(), rois, images).half()
    )


def test_an_infinite_element_is_in_its_cells_alone() -> None:
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    x[0, 0, 6, 6] = torch.inf
    given = {"output_height": 4, "output_width": 4, "sampling_ratio": 1}
    rois, images = torch.tensor([[0.0, 0.0, 7.0, 7.0]]), torch.tensor([0])
    found = TABLE["RoiAlign"](Operation("RoiAlign", 16, given), x, rois, images)
    assert found[0, 0].isfinite().sum() == 15
    with pytest.raises(ShapeError, match="none of the 1 images"):
        TABLE["RoiAlign"](Operation("RoiAlign", 16, given), x, rois, images + 1)


@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize(
    ("shape", "kernel", "strides", "pads"),
    [
        ((2, 9, 8, 7), [3, 3], [2, 2], [1, 1, 1, 1]),
        ((1, 3, 8, 7), [2, 3], [1, 2], [0, 1, 0, 1]),
        ((1, 8, 6, 6), [3, 3], [1, 1], [0, 1, 1, 0]),
        ((1, 2, 9), [3], [2], [1, 1]),
        ((1, 2, 5, 4, 6), [2, 2, 3], [1, 2, 2], [1, 0, 1, 1, 0, 1]),
    ],
    ids=str,
)
def test_pooled_windows(
    shape: tuple[int, ...], kernel: list[int], strides: list[int], pads: list[int], counted: int
) -> None:
    given = {"kernel_shape": kernel, "strides": strides, "pads": pads}
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    averaged = {**given, "count_include_pad": counted}
    with Called() as called:
        found = TABLE["AveragePool"](Operation("AveragePool", 11, averaged), x)
    np.testing.assert_allclose(found.numpy(), reference("AveragePool", 11, averaged, x), rtol=1e-5, atol=1e-6)
    assert ("stack" not in called.names) == (pads[: len(kernel)] == pads[len(kernel) :])
    assert found.is_contiguous()
    found = TABLE["MaxPool"](Operation("MaxPool", 11, given), x)
    assert np.array_equal(found.numpy(), reference("MaxPool", 11, given, x))
    assert found.is_contiguous()


def test_special_values_stay_in_their_windows() -> None:
    x = torch.ones(1, 8, 6, 6)
    x[0, 2, 1, 1], x[0, 3, 1, 1], x[0, 4, 1, 1] = torch.nan, torch.inf, -torch.inf
    given = {"kernel_shape": [2, 2], "strides": [2, 2]}
    for name in ("MaxPool", "AveragePool"):
        found = TABLE[name](Operation(name, 11, given), x)
        assert found[0, 2].isnan().sum() == 1
        assert found[0, 3].isinf().sum() == 1
        assert found[0, 4].isfinite().sum() == (9 if name == "MaxPool" else 8)
    assert TABLE["AveragePool"](Operation("AveragePool", 11, given), x[:0]).shape == (0, 8, 3, 3)
