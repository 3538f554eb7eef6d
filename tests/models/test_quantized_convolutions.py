"""Quantized convolutions in plans: one kernel that gathers windows takes in bias, residual and function."""

from __future__ import annotations

import pytest
import torch
from convolution_cases import Case, Drawn, draw

from ladder.frontend.torch_fx import import_fx
from ladder.ir.windows import Windows
from ladder.partition import partition
from ladder.runtime import convolve
from ladder.runtime.model.build import gemm_requests
from ladder.runtime.model.prepared import simplified
from schedules.schedule import GpuSchedule
from targets import get_device

PLANNED = {
    "groups of scales": Case(
        Windows((3, 3), (2, 2), (1, 1)), 64, 64, (2, 9, 7), GpuSchedule("mma", 16), "int4",
        options={"group_size": 64, "bias": True},
    ),
    "points": Case(
        Windows((1, 1)), 64, 64, (1, 6, 8), GpuSchedule("mma", 16), "nf4", options={"group_size": 64}
    ),
    "one scale per row": Case(Windows((1, 1), (2, 2)), 64, 40, (1, 6, 8), GpuSchedule("mma", 16), "int8"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANNED)
def test_one_kernel(name: str) -> None:
    drawn, device = draw(PLANNED[name]), get_device("cuda/sm_90a")
    module, arguments = spelt_out(drawn)
    found = simplified(import_fx(module, arguments), device)
    packed = [name for name, source in found.sources.items() if source.kind in ("weight", "part")]
    (part,) = partition(found.graph, packed, device=device)
    gemm = part.gemm
    assert gemm is not None
    assert gemm.windows == drawn.request.gemm.windows
    assert (gemm.residual, gemm.bias, gemm.epilogue) == (True, drawn.bias is not None, ("relu",))
    assert {role for role, _ in part.roles} >= {"A", "B", "residual"}
    assert gemm_requests([part], device)[0].plan is not None


def test_normalisation_is_folded() -> None:
    drawn, device = draw(PLANNED["one scale per row"]), get_device("cuda/sm_90a")
    vectors = [torch.rand(drawn.expected.shape[-1]).half() for _ in range(4)]
    given = [drawn.x, *drawn.packed.tensors, *vectors]
    graph = torch.fx.Graph()
    x, *places = (graph.placeholder(f"a{at}") for at in range(len(given)))
    y = graph.call_function(convolve.registered, (x, places[:-4], None, None, drawn.request.text))
    first = graph.call_function(torch.permute, (y, (0, 3, 1, 2)))
    normal = graph.call_function(torch.nn.functional.batch_norm, (first, *places[-4:], False, 0.1, 1e-5))
    graph.output(graph.call_function(torch.relu, (normal,)))
    found = simplified(import_fx(torch.fx.GraphModule({}, graph), given), device)
    packed = [name for name, source in found.sources.items() if source.kind in ("weight", "part")]
    kernel, *views = partition(found.graph, packed, device=device)
    assert kernel.gemm is not None
    assert (kernel.gemm.factor, kernel.gemm.bias, kernel.gemm.epilogue) == (True, True, ("relu",))
    assert {role for role, _ in kernel.roles} == {"A", "B", "row_scale", "factor", "bias"}
    assert {part.kind for part in views} == {"view"}


def spelt_out(drawn: Drawn) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """Return ``relu(convolve(x) + other)`` as a graph, and its arguments: packed arrays among them."""
    given = [drawn.x, *drawn.packed.tensors, drawn.bias, torch.randn(drawn.expected.shape).half()]
    graph = torch.fx.Graph()
    places = [None if value is None else graph.placeholder(f"a{at}") for at, value in enumerate(given)]
    x, *arrays, bias, other = places
    y = graph.call_function(convolve.registered, (x, arrays, bias, None, drawn.request.text))
    total = graph.call_function(torch.add, (y, other))
    graph.output(graph.call_function(torch.relu, (total,)))
    return torch.fx.GraphModule({}, graph), [value for value in given if value is not None]
