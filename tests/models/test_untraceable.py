"""What cannot be traced without values says so in a sentence of our own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ladder.frontend.aten_graphs import to_aten
from ladder.runtime.model.program import ImportRefused


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (
            lambda x: torch.linalg.lstsq(x, x)[1],
            "the sizes of what aten.linalg_lstsq.default gives depend on",
        ),
        (lambda x: torch.equal(x, x + 1), "aten.equal.default reads values, and graphs are traced without"),
        (
            lambda x: x[: x.long()[0, 0].item()].sum() if x.sum().item() > 0 else x,
            "a shape or a decision depends",
        ),
        (lambda x: torch.tensor_split(x, x[0].long()), "an operator reads values, and graphs are traced"),
    ],
)
def test_what_depends_on_values_is_named(program: Callable[[Tensor], Tensor], why: str) -> None:
    class Program(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return program(x)

    graph = torch.fx.Graph()
    graph.output(graph.call_module("program", (graph.placeholder("x"),)))
    module = torch.fx.GraphModule({"program": Program()}, graph)
    with pytest.raises(ImportRefused, match=why):
        to_aten(module, [torch.ones(4, 4)])
