"""Graphs on a GPU some of whose tensors lie on the CPU."""

from __future__ import annotations

import pytest
import torch

import ladder
from ladder.integrations import dynamo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

PROGRAMS = {
    "result on the CPU": lambda x: ((x + 1).cpu(), x * 2),
    "part on the CPU": lambda x: ((x + 1).cpu().exp().sum(0) * 2, x * 2),
    "there and back": lambda x: (x.cpu() * 3).to(x.device) + x,
    "made on the CPU": lambda x: (torch.zeros(3), torch.arange(4, device=x.device) + 1, x * 2),
    "numbers of the CPU": lambda x: x * torch.tensor(3.0) + torch.ones(()),
    "rows by numbers of the CPU": lambda x: (x[torch.arange(2)], torch.arange(2) + 1),
    "read": lambda x: x * (x + 1).cpu().numpy().shape[0],
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("way", [ladder.compile, lambda f: torch.compile(f, backend=dynamo.backend)])
def test_results_lie_where_the_program_has_them(way, name: str) -> None:
    program, x = PROGRAMS[name], torch.randn(4, 8, device="cuda")
    fast = way(program)
    with torch.no_grad():
        for _ in range(4):
            x = x + 1
            expected, found = program(x), fast(x)
            expected, found = [each if isinstance(each, tuple) else (each,) for each in (expected, found)]
            assert [each.device for each in found] == [each.device for each in expected]
            for one, other in zip(expected, found, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@torch.no_grad()
def test_calls_on_several_devices_in_turn() -> None:
    """Torch's own stream for recordings is on one device, whatever plan is recorded."""
    fast = ladder.compile(lambda x: torch.softmax(torch.tanh(x) @ x.t(), -1).sum(0))
    for at in range(18):
        x = torch.randn(4 + at // 9, 8, device=("cuda:1", "cuda:0", "cpu")[at % 3])
        torch.testing.assert_close(fast(x), torch.softmax(torch.tanh(x) @ x.t(), -1).sum(0))
        assert torch.cuda.current_device() == 0
    assert not fast.refused


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("weight", ["int4", "nf4", "mxfp4"])
@torch.no_grad()
def test_quantized_layers_on_another_device_than_the_current(weight: str) -> None:
    """Torch's own `ldexp`, which scales are lowered by, launches on the current one."""
    layer = torch.nn.Linear(128, 96, device="cuda:1", dtype=torch.float16)
    model = torch.nn.Sequential(layer)
    ladder.quantize_(model, weight)
    dense, fast = model[0].weight, ladder.compile(model)
    x = torch.randn(5, 3, 128, device="cuda:1", dtype=torch.float16)
    expected = torch.nn.functional.linear(x.double(), dense.double(), layer.bias.double())
    for run in (model, fast, fast, fast, fast):
        error = (run(x).double() - expected).norm() / expected.norm()
        assert error <= 2e-3
        assert torch.cuda.current_device() == 0
