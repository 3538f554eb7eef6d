"""ONNX's Slice and Gather with constants beyond axes of open size: clamped, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from interpreted import interpret_chains

import ladder
from ladder.integrations.dynamo import backend
from ladder.ir.extents import larger, product, smaller, total

onnx = pytest.importorskip("onnx")

MOST = (1 << 63) - 1

SLICES = [
    (-5, MOST, 1), (0, -5, 1), (2, -2, 1), (-5, -2, 1), (3, 10**9, 1), (0, 4, 1), (4, 8, 1), (-4, 2, 1),
    (0, (1 << 31) - 1, 2), (1, -1, 3), (5, 2, 1), (-1, 0, 1), (0, -1, 2), (3, 1 << 62, 2),
]  # fmt: skip
IDS = [[0], [9], [-9], [0, 1, 2, 3], [0, -1], [2, 0, 1], [[0, 1], [2, -3]], []]


def model(operator: str, constants: dict[str, list[int]], **attributes: int) -> object:
    """Return a model of one operator on a matrix of open sizes, and a sum with 1."""
    h, kind = onnx.helper, onnx.TensorProto.FLOAT
    held = [onnx.numpy_helper.from_array(np.array(v, np.int64), k) for k, v in constants.items()]
    held.append(onnx.numpy_helper.from_array(np.float32(1), "one"))
    nodes = [
        h.make_node(operator, ["x", *constants], ["found"], **attributes),
        h.make_node("Add", ["found", "one"], ["y"]),
    ]
    takes = [h.make_tensor_value_info("x", kind, ["m", "n"])]
    graph = h.make_graph(nodes, "g", takes, [h.make_tensor_value_info("y", kind, None)], held)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(("start", "end", "step"), SLICES)
def test_slices_are_clamped(start: int, end: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_chains(monkeypatch)
    compiled = ladder.compile(model("Slice", {"s": [start], "e": [end], "a": [1], "t": [step]}))
    for n in (2, 3, 4, 6, 9, 1, 0):
        x = torch.arange(2.0 * n).reshape(2, n)
        assert torch.equal(compiled(x), x[:, start:end:step] + 1), n


@pytest.mark.parametrize(("start", "wanted"), [(-9, [0]), (-1, [3, 2, 1, 0]), (9, [3, 2, 1, 0]), (1, [1, 0])])
def test_slices_backwards_begin_at_an_element(start: int, wanted: list[int]) -> None:
    """What is before the first element is clamped to it, as ONNX states; Python has nothing there."""
    bounds = {"s": [start], "e": [-99], "a": [1], "t": [-1]}
    x = torch.arange(8.0).reshape(2, 4)
    assert torch.equal(ladder.compile(model("Slice", bounds))(x), x[:, wanted] + 1)


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
def test_transposed_convolutions_of_the_same_size(mode: str) -> None:
    """Extents are multiplied by the strides, whatever padding of the result is asked for."""
    h, kind = onnx.helper, onnx.TensorProto.FLOAT
    held = [onnx.numpy_helper.from_array(np.arange(1, 4, dtype=np.float32).reshape(1, 1, 3), "w")]
    node = h.make_node("ConvTranspose", ["x", "w"], ["y"], auto_pad=mode, strides=[2], output_padding=[1])
    takes = [h.make_tensor_value_info("x", kind, [1, 1, "n"])]
    graph = h.make_graph([node], "g", takes, [h.make_tensor_value_info("y", kind, None)], held)
    compiled = ladder.compile(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8))
    found = compiled(torch.tensor([[[1.0, 10.0, 100.0]]]))
    assert found.flatten().tolist() == [2, 13, 20, 130, 200, 300]


@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_numbers_beyond_an_axis_are_refused(
    ids: list[int], axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpret_chains(monkeypatch)
    compiled = ladder.compile(model("Gather", {"i": ids}, axis=axis))
    for n in (1, 2, 3, 10):
        x = torch.arange(float(n * (n + 1))).reshape(n, n + 1)
        try:
            wanted = np.take(x.numpy(), np.array(ids, np.int64), axis)
        except IndexError:
            with pytest.raises(ladder.LadderError, match=f"needs .* <= {'mn'[axis]}"):
                compiled(x)
        else:
            np.testing.assert_array_equal(compiled(x).numpy(), wanted + 1)


def test_lengths_of_slices_have_one_spelling() -> None:
    tail = total(["n", product([-1, smaller("n", 5)])])
    assert tail == larger(total(["n", -5]), 0) == "max(n - 5, 0)"
    assert larger("n", 0) == "n"
    assert smaller("n", 0) == 0
    assert total([larger("n", "m"), smaller("n", "m")]) == total(["n", "m"])


def test_tensors_without_elements() -> None:
    """A join reads none of what has none, in the kernels as compiled."""
    h, kind = onnx.helper, onnx.TensorProto.FLOAT
    held = [onnx.numpy_helper.from_array(np.ones((2, 3), np.float32), "c")]
    nodes = [h.make_node("Exp", ["x"], ["e"]), h.make_node("Concat", ["e", "c"], ["y"], axis=0)]
    takes = [h.make_tensor_value_info("x", kind, ["n", 3])]
    graph = h.make_graph(nodes, "g", takes, [h.make_tensor_value_info("y", kind, None)], held)
    compiled = ladder.compile(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8))
    for n in (2, 0, 1):
        x = torch.randn(n, 3)
        torch.testing.assert_close(compiled(x), torch.cat([x.exp(), torch.ones(2, 3)]))


WINDOWS = {
    "Conv": ("Conv", {"pads": [1, 1], "strides": [2]}, lambda x, w: F.conv1d(x, w, padding=1, stride=2)),
    "Conv apart": ("Conv", {"dilations": [2]}, lambda x, w: F.conv1d(x, w, dilation=2)),
    "Conv one side": ("Conv", {"pads": [0, 2]}, lambda x, w: F.conv1d(F.pad(x, (0, 2)), w)),
    "MaxPool": ("MaxPool", {"kernel_shape": [3]}, lambda x, w: F.max_pool1d(x, 3, 1)),
    "MaxPool up": (
        "MaxPool",
        {"kernel_shape": [3], "strides": [2], "ceil_mode": 1},
        lambda x, w: F.max_pool1d(x, 3, 2, ceil_mode=True),
    ),
    "MaxPool that begins in no padding": (
        "MaxPool",
        {"kernel_shape": [1], "strides": [2], "ceil_mode": 1},
        lambda x, w: F.max_pool1d(x, 1, 2, ceil_mode=True),
    ),
    "AveragePool up": (
        "AveragePool",
        {"kernel_shape": [2], "strides": [3], "pads": [0, 1], "ceil_mode": 1},
        lambda x, w: F.avg_pool1d(x, 2, 3, ceil_mode=True),
    ),
    "AveragePool": (
        "AveragePool",
        {"kernel_shape": [4], "pads": [1, 1], "count_include_pad": 1},
        lambda x, w: F.avg_pool1d(x, 4, 1, 1),
    ),
}
"""Operators with windows, and torch's."""


def is_refused_or_empty(call: Callable[[], torch.Tensor]) -> bool:
    try:
        return not call().numel()
    except ladder.LadderError:
        return True


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_that_do_not_fit_are_refused(name: str) -> None:
    """At each width, open or known: torch's result, or where it has none an error of ours, or no elements."""
    operator, attributes, by_torch = WINDOWS[name]
    h, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = torch.arange(24.0).reshape(2, 4, 3) / 8
    held = [onnx.numpy_helper.from_array(weight.numpy(), "w")] if operator == "Conv" else []
    node = h.make_node(operator, ["x", "w"][: 1 + len(held)], ["y"], **attributes)

    def compiled(width: object) -> object:
        takes = [h.make_tensor_value_info("x", kind, ["n", 4, width])]
        graph = h.make_graph([node], "g", takes, [h.make_tensor_value_info("y", kind, None)], held)
        return ladder.compile(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8))

    of_any_width = compiled("m")
    for width in range(7):
        x = torch.arange(8.0 * width).reshape(2, 4, width) / 16
        try:
            wanted = by_torch(x, weight)
        except RuntimeError:
            assert is_refused_or_empty(lambda x=x: of_any_width(x))
            assert is_refused_or_empty(lambda x=x, width=width: compiled(width)(x))
        else:
            torch.testing.assert_close(of_any_width(x), wanted)
            torch.testing.assert_close(compiled(width)(x), wanted)


def test_views_of_what_an_open_extent_leaves() -> None:
    """No large size stands for an extent that a fixed one is cut by: the views are copied then."""

    def program(x: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left = kept[:, x.shape[1] :] * 2
        return left.transpose(0, 1).flatten(), left.transpose(1, 2).reshape(left.shape[0], -1), x + 1

    fast = ladder.compile(program)
    for extent in (2, 3, 4, 7, 1, 8):
        given = torch.randn(3, extent), torch.randn(3, 8, 2)
        assert all(map(torch.equal, fast(*given), program(*given))), extent
    assert fast.refused == []


FALLING = {
    "left of columns": (lambda x, y: (y[:, 4 * x.shape[0] :] * 2).sum(1) + 1, (3, 16)),
    "cut at both ends": (lambda x, y: torch.tanh(y[:, x.shape[0] : 20 - x.shape[0]] * 2), (3, 40)),
    "softmax": (lambda x, y: torch.softmax(y[:, : 40 - x.shape[0]], -1), (3, 40)),
    "dilated": (lambda x, y: F.conv2d(y, x[:1, :1, None, None], dilation=x.shape[0]).sum(), (1, 1, 9, 9)),
    "dilated windows": (lambda x, y: F.max_pool2d(y, 3, 1, 0, x.shape[0]) + 1, (1, 1, 9, 9)),
}
"""Programs of two tensors whose extents fall to nothing as the first one's grows, and the second's shape."""


@pytest.mark.parametrize("name", FALLING)
def test_extents_that_fall_as_a_size_grows(name: str) -> None:
    """Kernels are chosen for extents that there may be, where no large size may be taken."""
    program, shape = FALLING[name]
    by_torch, fast = torch.compile(program, backend=backend, dynamic=True), ladder.compile(program)
    for extent in (2, 3, 2, 4, 1):
        x, y = torch.randn(extent, extent), torch.randn(shape)
        for run in (by_torch, fast):
            torch.testing.assert_close(run(x, y), program(x, y))
    assert fast.refused == []
