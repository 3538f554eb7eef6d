"""ONNX's TopK, ArgMax, ArgMin and GridSample by torch's own kernels where these decide nothing otherwise."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch.utils._python_dispatch import TorchDispatchMode

import ladder
from ladder.runtime.onnx_ops.operation import Operation
from ladder.runtime.onnx_ops.table import TABLE


class Called(TorchDispatchMode):
    """Names of the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def top(x: torch.Tensor, k: int, axis: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    op = Operation("TopK", 11, {"axis": axis, "largest": int(largest)}, 2)
    values, indices = TABLE["TopK"](op, x, torch.tensor([k]))
    return values, indices


def drawn() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    floats = torch.randn(4, 30, 5, generator=random)
    few = torch.randint(-3, 3, (4, 30, 5), generator=random)
    special = few.float()
    special[0, 3, 1], special[0, 9, 1], special[1, 2, 2], special[1, 5, 2] = torch.nan, torch.nan, -0.0, 0.0
    special[2, 4, 3], special[2, 8, 3], special[2, 9, 3] = torch.inf, torch.inf, -torch.inf
    return {
        "distinct": floats,
        "halves": floats.half(),
        "ties": few,
        "special": special,
        "large": few.view(torch.uint64),
        "empty": floats[:0],
    }


@pytest.mark.parametrize("name", drawn())
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("largest", [False, True])
def test_of_equal_elements_the_first_comes_first(name: str, axis: int, largest: bool) -> None:
    """NaN counts as the largest."""
    x = drawn()[name]
    if name == "large":
        kept = x.view(torch.int64).numpy().view(np.uint64)
        order = np.argsort(~kept if largest else kept, axis=axis, kind="stable")
    else:
        order = torch.sort(x, dim=axis, descending=largest, stable=True).indices.numpy()
    for k in (0, 1, min(3, x.shape[axis]), x.shape[axis]):
        if k > x.shape[axis]:
            continue
        values, indices = top(x, k, axis, largest)
        wanted = order.take(range(k), axis)
        assert indices.shape == wanted.shape
        assert np.array_equal(indices.numpy(), wanted)
        exact = x.view(torch.int64) if name == "large" else x
        found = values.view(torch.int64) if name == "large" else values
        assert torch.equal(found.nan_to_num(7.5), exact.gather(axis, torch.tensor(wanted)).nan_to_num(7.5))
    if name != "empty":
        op = Operation("ArgMax" if largest else "ArgMin", 13, {"axis": axis, "keepdims": 1})
        found = TABLE[op.name](op, x).numpy()
        if name == "special" and not largest:  # of minima NaN counts as the least
            order = torch.sort(x.nan_to_num(-torch.inf), dim=axis, stable=True).indices.numpy()
            order[0, :, 1] = 3 if axis == 1 else order[0, :, 1]
        if name != "special" or largest or axis == 1:
            assert np.array_equal(found, order.take([0], axis))


def test_few_of_many_are_selected_not_sorted() -> None:
    """A sort of 50,000 took a hundred times as long as onnxruntime's selection."""
    x = torch.randperm(5000, generator=torch.Generator().manual_seed(0)).reshape(2, 2500).float()
    with Called() as called:
        top(x, 5, 1, True)
    assert "sort" not in called.names
    x[1] = x[1].round(decimals=-3)
    with Called() as called:
        values, indices = top(x, 5, 1, True)
    assert "sort" in called.names
    wanted = torch.sort(x, descending=True, stable=True)
    assert torch.equal(values, wanted.values[:, :5])
    assert torch.equal(indices, wanted.indices[:, :5])


GRIDS = [
    (mode, padding, corners, shape)
    for mode in ("linear", "cubic", "nearest")
    for padding in ("zeros", "border", "reflection")
    for corners in (0, 1)
    for shape in ((2, 3, 5, 4), (1, 2, 3, 4, 5))
    if mode != "cubic" or len(shape) == 4
]


@pytest.mark.parametrize(("mode", "padding", "corners", "shape"), GRIDS)
def test_samples_are_those_of_the_standards_reference(
    mode: str, padding: str, corners: int, shape: tuple[int, ...]
) -> None:
    given = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    info, rank = helper.make_tensor_value_info, len(shape) - 2
    graph = helper.make_graph(
        [helper.make_node("GridSample", ["x", "g"], ["y"], **given)],
        "samples",
        [info("x", TensorProto.FLOAT, shape), info("g", TensorProto.FLOAT, [shape[0], *[3] * rank, rank])],
        [info("y", TensorProto.FLOAT, None)],
    )
    written = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=random)
    grid = torch.rand(shape[0], *[3] * rank, rank, generator=random) * 3 - 1.5
    op = Operation("GridSample", 20, given)
    with Called() as called:
        found = TABLE["GridSample"](op, x, grid)
    generic = TABLE["GridSample"](op, x, grid.double())
    np.testing.assert_allclose(found.numpy(), generic.numpy(), rtol=1e-5, atol=1e-5)
    if (mode, padding) != ("cubic", "border"):  # where the reference differs from onnxruntime and torch
        (wanted,) = ReferenceEvaluator(written).run(None, {"x": x.numpy(), "g": grid.numpy()})
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-5)
    assert (len(called.names) < 8) == (mode != "nearest")


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_places_that_are_no_numbers_give_none(special: float) -> None:
    """To torch they are outside, where there are zeros."""
    grid = torch.zeros(1, 2, 2, 2)
    grid[0, 0, 1, 0] = special
    op = Operation("GridSample", 20, {"mode": "linear", "padding_mode": "zeros"})
    found = TABLE["GridSample"](op, torch.randn(1, 2, 3, 3), grid)
    assert found.isnan().sum() == 2
    assert bool(found[:, :, 0, 1].isnan().all())


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_infinite_places_are_at_the_border(mode: str) -> None:
    op = Operation("GridSample", 20, {"mode": mode, "padding_mode": "border"})
    x, grid = torch.randn(1, 2, 3, 4), torch.rand(1, 2, 3, 2) * 2 - 1
    far, beyond = grid.clone(), grid.clone()
    for at, sign, axis in ((0, 1, 0), (1, -1, 1), (2, 1, 1)):
        far[0, 1, at, axis], beyond[0, 1, at, axis] = 9.0 * sign, torch.inf * sign
    assert torch.equal(TABLE["GridSample"](op, x, far.double()), TABLE["GridSample"](op, x, beyond.double()))


@pytest.mark.parametrize("index", [4, -5, 1 << 40])
def test_gather_out_of_range_is_one_error(tmp_path: Any, index: int) -> None:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Gather", ["x", "i"], ["g"]), helper.make_node("Relu", ["g"], ["y"])],
        "gather",
        [info("x", TensorProto.FLOAT, [4, "m"]), info("i", TensorProto.INT64, ["n"])],
        [info("y", TensorProto.FLOAT, None)],
    )
    fast = ladder.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9))
    loaded = ladder.load(fast.export(tmp_path / "model.ladder"))
    inside = torch.tensor([-4, 3])
    for model, x in product((fast, loaded), (torch.randn(4, 3), torch.randn(4, 0))):
        assert torch.equal(model(x, inside), x[inside].relu())
        with pytest.raises(ladder.OutOfRangeError, match="an index lies outside of the axis"):
            model(x, torch.tensor([0, index]))
