"""Scans of ONNX models that make windows of a sequence, beside the loop that they are."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import ladder
from ladder.frontend.onnx_scans import with_windows

RANDOM = np.random.default_rng(11)


def scanning(state: int, step: int, axis: int, start: int | None = None) -> onnx.ModelProto:
    """Return a model of a scan over a sequence ``[2, open, step]`` or, along axis 0, ``[open, 2, step]``."""
    joined = helper.make_node("Concat", ["before", "new"], ["window"], axis=-1)
    kept = helper.make_node("Slice", ["window", "from", "end", "axis"], ["after"])
    numbers = {"from": step if start is None else start, "end": 1 << 62, "axis": 1}
    info = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, extent])
        for name, extent in (("before", state), ("new", step), ("after", state), ("window", state + step))
    ]
    body = helper.make_graph([joined, kept], "body", info[:2], info[2:])
    node = helper.make_node(
        "Scan", ["s", "x"], ["last", "y"], body=body, num_scan_inputs=1, scan_input_axes=[axis],
        scan_output_axes=[1],
    )  # fmt: skip
    sequence: list[int | str] = [2, "T", step] if axis else ["T", 2, step]
    inputs = [
        helper.make_tensor_value_info("s", onnx.TensorProto.FLOAT, [2, state]),
        helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, sequence),
    ]
    results = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in ("last", "y")]
    stored = [numpy_helper.from_array(np.array([value]), name) for name, value in numbers.items()]
    graph = helper.make_graph([node], "scan", inputs, results, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def windows_of(state: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the last state, and windows ``[2, T, elements]``, of steps ``[T, 2, step]``."""
    made = []
    for new in steps:
        made.append(np.concatenate([state, new], 1))
        state = made[-1][:, new.shape[1] :]
    return state, np.stack(made, 1)


@pytest.mark.parametrize(("state", "step", "axis"), [(3, 2, 1), (4, 4, 0)])
def test_windows_of_a_sequence(state: int, step: int, axis: int) -> None:
    model = scanning(state, step, axis)
    assert all(node.op_type != "Scan" for node in with_windows(model).graph.node)
    fast = ladder.compile(model)
    for count in (4, 4, 1):
        x = RANDOM.standard_normal((2, count, step) if axis else (count, 2, step)).astype(np.float32)
        s = RANDOM.standard_normal((2, state)).astype(np.float32)
        with torch.no_grad():
            found = fast(s=torch.from_numpy(s), x=torch.from_numpy(x))
        for value, wanted in zip(found, windows_of(s, np.moveaxis(x, axis, 0)), strict=True):
            assert np.array_equal(value.numpy(), wanted)


def test_other_scans_stay() -> None:
    model = scanning(3, 2, 1, start=1)  # the state would grow: no scan that anybody can run
    assert with_windows(model) is model
