"""Weights that change between calls of a plan, in every way in which programs write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ladder
from ladder.runtime.model.probes import Probes


class Net(nn.Module):
    """Weights that plans put in other orders: of rows, of a convolution, of a norm folded into it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 40)
        self.convolution, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.rand(40) + 0.5)

    def forward(self, x: Any) -> Any:
        rows = torch.softmax(self.linear(x) * self.scale, -1).reshape(-1, 4, 10)
        return torch.relu(self.norm(self.convolution(rows)))


def added_to_data(weight: Any) -> None:
    weight.data += torch.rand_like(weight)


def other_data(weight: Any) -> None:
    weight.data = torch.rand_like(weight)


def in_place(weight: Any) -> None:
    with torch.no_grad():
        weight.mul_(2)


@pytest.mark.parametrize("write", [added_to_data, other_data, in_place])
@pytest.mark.parametrize("name", ["linear.weight", "convolution.weight", "norm.bias", "scale"])
def test_the_next_call_sees_what_was_written(write: Callable[[Any], None], name: str) -> None:
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(3, 24)
    fast = ladder.compile(net)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
        for _ in range(2):
            write(net.get_parameter(name))
            torch.testing.assert_close(fast(x), net(x))


def test_weights_of_inference_mode() -> None:
    with torch.inference_mode():
        net, x = Net().eval(), torch.randn(3, 24)
        fast = ladder.compile(net)
        for _ in range(3):
            fast(x)
        net.linear.weight.mul_(2)
        torch.testing.assert_close(fast(x), net(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int8])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4)])
def test_probes_notice_what_goes_over_a_whole_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype).t() if len(shape) == 2 else torch.zeros(shape, dtype=dtype)
    probes = Probes([tensor, torch.full((4,), float("nan"))])
    assert probes.hold()
    tensor.data.fill_(1)
    assert probes.hold() == (tensor.numel() == 0)
