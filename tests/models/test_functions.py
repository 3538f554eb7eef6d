"""Activation functions written as several operators become one; what only looks like them does not."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from ladder.api.problem import gemm_for
from ladder.frontend.onnx_import import import_onnx
from ladder.frontend.torch_fx import import_fx
from ladder.ir import Graph, evaluate
from ladder.rewrite import simplify

ROOT = math.sqrt(2 / math.pi)

WRITTEN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "bloom": (lambda x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))), "gelu_tanh"),
    "gpt": (lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))), "gelu_tanh"),
    "erf": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu"),
    "a sum": (lambda x: 0.5 * x + 0.5 * x * torch.erf(x * math.sqrt(0.5)), "gelu"),
    "of a sum": (lambda x: (x + 1) * torch.sigmoid(x + 1), "silu"),
    "of one value": (lambda x: x * torch.sigmoid(x), "silu"),
    "of two values": (lambda x: x.cos() * torch.sigmoid(x), ""),
    "another constant": (lambda x: 0.5 * x * (1.0 + torch.tanh(0.79 * (x + 0.044715 * x * x * x))), ""),
    "another half": (lambda x: 0.25 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * x * x * x))), ""),
    "another argument": (lambda x: 0.5 * x.abs() * (1.0 + torch.erf(x / math.sqrt(2.0))), ""),
    "another power": (lambda x: x * x * torch.sigmoid(x), ""),
}
"""Case -> function, and the operator that it becomes."""

MATCHED = ("gelu", "gelu_tanh", "silu")


def matched(graph: Graph) -> list[str]:
    return [node.operator for node in graph.nodes if node.operator in MATCHED]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("case", WRITTEN)
def test_functions_written_as_several_operators(case: str, dtype: torch.dtype) -> None:
    function, name = WRITTEN[case]
    x = torch.linspace(-6, 6, 97, dtype=torch.float64).to(dtype)
    imported = import_fx(torch.fx.symbolic_trace(function), [x]).graph
    graph = simplify(imported)
    assert matched(graph) == ([name] if name and dtype != torch.float64 else [])
    assert matched(simplify(imported, precise=True)) == []
    if dtype == torch.float64:
        return  # functions of float64 are calls of torch
    found = evaluate(graph, [x.double().numpy()])
    assert np.allclose(found, function(x.double()).numpy(), rtol=1e-6, atol=1e-6)


def test_functions_of_onnx_models() -> None:
    text = """agraph (float[n,8] x) => (y) {
        root = Constant <value_float: float = 1.4142135> ()
        half = Constant <value_float: float = 0.5> ()
        one = Constant <value_float: float = 1.0> ()
        scaled = Div(x, root)
        inner = Erf(scaled)
        outer = Add(inner, one)
        whole = Mul(x, outer)
        y = Mul(whole, half)
    }"""
    graph = onnx.parser.parse_graph(text)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    assert matched(simplify(import_onnx(model, gemm_for).program.graph)) == ["gelu"]
