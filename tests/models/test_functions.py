"""Activation functions that models spell out become one operator; what only looks like them does not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ladder.frontend.aten_graphs import to_aten

ROOT = math.sqrt(2 / math.pi)

SPELT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "bloom": (lambda x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))), "gelu"),
    "gpt": (lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))), "gelu"),
    "erf": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu"),
    "of a sum": (lambda x: (x + 1) * torch.sigmoid(x + 1), ""),
    "swish": (lambda x: x.cos() * torch.sigmoid(x.cos()), ""),
    "of one value": (lambda x: x * torch.sigmoid(x), "silu"),
    "another constant": (lambda x: 0.5 * x * (1.0 + torch.tanh(0.79 * (x + 0.044715 * x * x * x))), ""),
    "another half": (lambda x: 0.25 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * x * x * x))), ""),
    "another argument": (lambda x: 0.5 * x.abs() * (1.0 + torch.erf(x / math.sqrt(2.0))), ""),
}
"""Case -> function, and the operator that it becomes."""


@pytest.mark.parametrize("case", SPELT)
def test_functions_that_are_spelt_out(case: str) -> None:
    function, name = SPELT[case]
    x = torch.linspace(-6, 6, 97, dtype=torch.float64)
    traced = to_aten(torch.fx.symbolic_trace(function), [x])
    called = [str(node.target).split(".")[1] for node in traced.graph.nodes if node.op == "call_function"]
    assert (called == [name]) == bool(name), called
    assert torch.allclose(traced(x), function(x), rtol=1e-6, atol=1e-8)
