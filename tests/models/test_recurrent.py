"""Recurrent layers: ONNX's by kernels of ours beside torch's, step by step; torch's as one step of a plan."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch.utils._pytree import tree_leaves

import ladder
from ladder.runtime.onnx_ops import recurrent
from ladder.runtime.onnx_ops.evaluate import operation_of
from ladder.runtime.onnx_ops.recurrent import RECURRENT

CASES: list[tuple[str, int, str, tuple[str, ...], dict[str, Any]]] = [
    ("LSTM", 37, "bidirectional", ("b", "lengths", "h", "c"), {}),
    ("LSTM", 5, "reverse", ("lengths",), {}),
    ("LSTM", 16, "forward", ("b", "c"), {"activations": ["Sigmoid", "Tanh", "Tanh"]}),
    ("GRU", 37, "bidirectional", ("b", "lengths", "h"), {"linear_before_reset": 1}),
    ("GRU", 20, "bidirectional", ("b", "h"), {"linear_before_reset": 0}),
]


def layer(operator: str, hidden: int, direction: str, given: tuple[str, ...], more: dict[str, Any]) -> Any:
    """Return a model of one layer with 8 inputs, of open steps and batch."""
    count, gates = 1 + (direction == "bidirectional"), {"LSTM": 4, "GRU": 3}[operator]
    draw = np.random.default_rng(0)
    shapes = {"w": (gates * hidden, 8), "r": (gates * hidden, hidden), "b": (2 * gates * hidden,)}
    stored = [
        onnx.numpy_helper.from_array(0.5 * draw.standard_normal((count, *shapes[name])).astype("f4"), name)
        for name in ("w", "r", *("b" for name in given if name == "b"))
    ]
    roles = ("b", "lengths", "h", "c") if operator == "LSTM" else ("b", "lengths", "h")
    inputs = {
        "x": ["steps", "batch", 8],
        "lengths": ["batch"],
        "h": [count, "batch", hidden],
        "c": [count, "batch", hidden],
    }
    infos = [
        helper.make_tensor_value_info(
            name, TensorProto.INT32 if name == "lengths" else TensorProto.FLOAT, inputs[name]
        )
        for name in ("x", *(name for name in given if name != "b"))
    ]
    outputs = ["y", "last_h", "last_c"][: len(roles) - 1]
    names = ["x", "w", "r", *(name if name in given else "" for name in roles)]
    node = helper.make_node(operator, names, outputs, hidden_size=hidden, direction=direction, **more)
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph([node], "layer", infos, results, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def test_inputs_of_open_width() -> None:
    """Stored weights say how wide they are."""
    model = layer("GRU", 5, "reverse", (), {})
    x = torch.randn(3, 2, 8)
    known = tree_leaves(ladder.compile(model)(x))[:1]
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "width"
    fast = ladder.compile(model)
    torch.testing.assert_close(tree_leaves(fast(x))[:1], known)
    assert "ladder recurrent" in str(fast.plan())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fast(x[..., 1:])


def arguments(model: Any, steps: int, batch: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(steps)
    found = {}
    for info in model.graph.input:
        shape = [
            {"steps": steps, "batch": batch}.get(d.dim_param, d.dim_value)
            for d in info.type.tensor_type.shape.dim
        ]
        found[info.name] = torch.randn(shape, generator=draw)
    if "lengths" in found:
        found["lengths"] = torch.arange(batch, dtype=torch.int32) % (steps + 1)
    return found


def by_steps(model: Any, given: dict[str, torch.Tensor]) -> Any:
    """Return the results of the layer as torch computes it step by step."""
    stored = {t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
    node = model.graph.node[0]
    return RECURRENT[node.op_type](
        operation_of(node, {"": 17}), *({**stored, **given}.get(n) for n in node.input)
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[2]} of {case[1]}")
def test_layers(case: Any) -> None:
    model = layer(*case)
    fast = ladder.compile(model)
    for steps, batch in ((6, 3), (1, 1), (6, 3), (6, 3), (6, 3), (9, 2), (0, 2)):
        given = arguments(model, steps, batch)
        for found, wanted in zip(fast(**given), by_steps(model, given), strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)
    assert "ladder recurrent" in fast.plan()


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("operator", ["LSTM", "GRU"])
def test_layers_of_torch(operator: str, direction: str, layout: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel is built, torch's layer computes what the steps do."""
    more = {"layout": layout} | ({"linear_before_reset": 1} if operator == "GRU" else {})
    for given in (("b",), ()):
        model = layer(operator, 11, direction, given, more)
        x = arguments(model, 7, 3)
        called = mock.patch.object(torch, operator.lower(), wraps=getattr(torch, operator.lower()))
        with called as function:
            found = by_steps(model, x)
        function.assert_called_once()
        with monkeypatch.context() as without:
            without.setattr(recurrent, "_is_of_torch", lambda *_: False)
            wanted = by_steps(model, x)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_functions_of_large_and_lost_numbers() -> None:
    """States saturate without overflow; what is not a number stays so in its own sequence."""
    model = layer("LSTM", 16, "forward", ("b",), {})
    x = torch.stack([torch.full((4, 8), 1e30), torch.full((4, 8), float("nan")), torch.zeros(4, 8)], 1)
    for found, wanted in zip(ladder.compile(model)(x), by_steps(model, {"x": x}), strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True)


def test_layers_without_a_kernel() -> None:
    model = layer("LSTM", 16, "forward", ("b",), {"clip": 0.5})
    given = arguments(model, 4, 2)
    fast = ladder.compile(model)
    for found, wanted in zip(fast(**given), by_steps(model, given), strict=True):
        torch.testing.assert_close(found, wanted)
    assert "torch onnx.LSTM" in fast.plan()


@pytest.mark.parametrize(
    ("cell", "form"),
    [
        (torch.nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        (torch.nn.LSTM, {"proj_size": 3, "bias": False}),
        (torch.nn.GRU, {"bidirectional": True}),
        (torch.nn.RNN, {"nonlinearity": "relu", "batch_first": True, "num_layers": 2, "dropout": 0.5}),
    ],
)
def test_layers_of_torch_are_one_step_for_all_lengths(cell: Any, form: dict[str, Any]) -> None:
    module = cell(5, 6, **form).eval()
    fast = ladder.compile(module)
    for shape in ((3, 4, 5), (7, 4, 5), (8, 2, 5), (11, 3, 5), (6, 9, 5)):
        x = torch.randn(shape)
        with torch.no_grad():
            found, wanted = (tree_leaves(f(x)) for f in (fast, module))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()
    assert len(fast.records) <= 3
    assert fast.plan().count("torch recurrent") == len(fast.graphs)


@pytest.mark.parametrize("cell", [torch.nn.LSTM, torch.nn.GRU])
def test_layers_of_torch_draw_the_numbers_that_eager_draws(cell: Any) -> None:
    module = cell(5, 6, num_layers=2, dropout=0.5)
    fast, x = ladder.compile(module), torch.randn(3, 4, 5)
    for _ in range(3):
        with torch.no_grad():
            torch.manual_seed(0)
            found = fast(x)[0]
            torch.manual_seed(0)
            assert torch.equal(found, module(x)[0])
    assert "torch recurrent_dropout" in fast.plan()


def test_layers_of_torch_in_exported_files(tmp_path: Path) -> None:
    module, x = torch.nn.LSTM(5, 6).eval(), torch.randn(3, 4, 5)
    with torch.no_grad():
        path = ladder.compile(module).export(tmp_path / "layer.ladder", x)
        code = (
            f"import ladder, torch; f = ladder.load({str(path)!r}); x = torch.load({str(tmp_path / 'x')!r});"
            f" torch.save(f(x)[0], {str(tmp_path / 'y')!r})"
        )
        torch.save(x, tmp_path / "x")
        subprocess.run([sys.executable, "-c", code], check=True)
        torch.testing.assert_close(torch.load(tmp_path / "y"), module(x)[0])
