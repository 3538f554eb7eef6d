"""Transforms of frames in ONNX models, in kernels of ours, beside numpy's in float64."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import ladder

RANDOM = np.random.default_rng(5)


def ran(node: onnx.NodeProto, x: np.ndarray, stored: dict[str, np.ndarray], opset: int) -> np.ndarray:
    """Return the result of a node; asserts that a kernel of ours computes it."""
    info = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)
    result = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    held = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    graph = helper.make_graph([node], "one", [info], [result], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    fast = ladder.compile(model)
    with torch.no_grad():
        found = fast(torch.from_numpy(x))
    assert f"ladder onnx.{node.op_type}" in fast.plan()
    return found.numpy()


def close(found: np.ndarray, exact: np.ndarray) -> None:
    wanted = np.stack([exact.real, exact.imag], -1)
    assert found.shape == wanted.shape
    assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize(("length", "step"), [(16, 5), (512, 160), (2048, 512)])
def test_frames_of_signals(length: int, step: int) -> None:
    x, window = RANDOM.standard_normal((2, length + 2 * step)), np.hanning(length) + 0.01
    x, window = x.astype(np.float32), window.astype(np.float32)
    node = helper.make_node("STFT", ["x", "step", "window"], ["y"], onesided=1)
    found = ran(node, x, {"step": np.array(step), "window": window}, 17)
    frames = np.lib.stride_tricks.sliding_window_view(x, length, 1)[:, ::step].astype(np.float64)
    close(found, np.fft.rfft(frames * window))


@pytest.mark.parametrize("taken", [25, 32])
def test_rows_that_zeros_follow(taken: int) -> None:
    x = RANDOM.standard_normal((3, 2, taken, 1)).astype(np.float32)
    node = helper.make_node("DFT", ["x", "length"], ["y"], axis=-2, onesided=1)
    found = ran(node, x, {"length": np.array(32)}, 17)
    close(found, np.fft.rfft(x[..., 0].astype(np.float64), 32))


def test_lengths_that_frequencies_do_not_tell_apart() -> None:
    x = RANDOM.standard_normal((2, 20, 1)).astype(np.float32)
    node = helper.make_node("DFT", ["x", "length"], ["y"], axis=1, onesided=1)
    found = ran(node, x, {"length": np.array(33)}, 17)  # as many frequencies as of 32
    close(found, np.fft.rfft(x[..., 0].astype(np.float64), 33))
