"""Weights that change between calls of a plan, in every way in which programs write them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ladder
from ladder.runtime.model import probes
from ladder.runtime.model.ordered import Ordered, Watch, convolve, is_enabled, multiply, ordered_matrix
from ladder.runtime.model.probes import Noted, Probes


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


def one_element(weight: Any) -> None:
    weight.data.view(-1)[3] = 100


def other_data(weight: Any) -> None:
    weight.data = torch.rand_like(weight)


def in_place(weight: Any) -> None:
    with torch.no_grad():
        weight.mul_(2)


@pytest.mark.parametrize("looked", [True, False])
@pytest.mark.parametrize("write", [added_to_data, one_element, other_data, in_place])
@pytest.mark.parametrize("name", ["linear.weight", "convolution.weight", "norm.bias", "scale"])
def test_the_next_call_sees_what_was_written(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[Any], None], name: str, looked: bool
) -> None:
    """Also where no element is looked at, as on GPUs, where looking would wait for the device."""
    if not looked:
        monkeypatch.setattr(probes, "_is_seen", lambda tensor: False)
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(3, 24)
    fast = ladder.compile(net)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
        for _ in range(2):
            write(net.get_parameter(name))
            torch.testing.assert_close(fast(x), net(x))


def test_torchs_counter_may_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of writes by other libraries, where no element is looked at."""
    monkeypatch.setattr(probes, "_is_seen", lambda tensor: False)
    net, x = Net().eval(), torch.randn(3, 24)
    fast = ladder.compile(net)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
        torch.from_dlpack(net.linear.weight.detach()).mul_(2)
        torch.autograd.graph.increment_version(net.parameters())
        torch.testing.assert_close(fast(x), net(x))


def test_reading_data_changes_no_program() -> None:
    """Of parameters that are watched: torch's property and ours give the same, and programs trace it."""
    net = nn.Linear(3, 3)
    noted = Noted(net.parameters())
    assert noted.hold([*net.parameters()])
    data = net.weight.data
    assert type(data) is torch.Tensor
    assert (data.requires_grad, data.data_ptr()) == (False, net.weight.data_ptr())
    assert not noted.hold([*net.parameters()])
    assert Noted(net.parameters()).hold([*net.parameters()])
    copied = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    assert not vars(copied.weight)
    with pytest.raises(TypeError):
        net.weight.data = 3  # type: ignore[assignment]

    def program(x: torch.Tensor) -> torch.Tensor:
        net.weight.data.mul_(2)
        return x @ net.weight.data.t() + net.bias

    x = torch.randn(2, 3)
    wanted = x @ (2 * net.weight).t() + net.bias
    torch.testing.assert_close(torch.compile(program, backend="eager", fullgraph=True)(x), wanted)


def test_reads_are_counted_of_layers_that_one_plan_serves() -> None:
    torch.manual_seed(0)
    layers = [Net().eval() for _ in range(3)]
    fast = ladder.compile(lambda net, x: net(x))
    x = torch.randn(3, 24)
    with torch.no_grad():
        for turn in range(4):
            for layer in layers:
                torch.testing.assert_close(fast(layer, x), layer(x))
            one_element(layers[turn % 3].linear.weight)


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


def turned(weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return weight.t().clone()


@pytest.mark.parametrize("write", [None, added_to_data, other_data, in_place])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float64, torch.int8)])
def test_weights_are_looked_at_together(
    dtypes: tuple[torch.dtype, torch.dtype], write: Callable[[Any], None] | None
) -> None:
    watch, x = Watch(), torch.randn(2, 3)
    weights = [torch.arange(12.0).reshape(3, 4).to(dtype) for dtype in dtypes]
    held = [watch.keep(stays=False)(turned) for _ in weights]

    def run(given: list[torch.Tensor]) -> list[torch.Tensor | None]:
        watch.look()
        return [one.of(weight, x) for one, weight in zip(held, given, strict=True)]

    seen = [run(weights) for _ in range(4)]
    assert watch.holds
    assert all(map(same, seen[-1], seen[0]))  # nothing was put in order again
    if write is not None and weights[1].is_floating_point():
        write(weights[1])
    assert all(map(torch.equal, run(weights), (weight.t() for weight in weights)))
    if dtypes[0] == dtypes[1]:
        assert all(map(torch.equal, run(weights[::-1]), (weight.t() for weight in weights[::-1])))


def same(left: Any, right: Any) -> bool:
    return left is right


def test_a_run_that_ends_early_hides_no_change() -> None:
    watch, x, weight, other = Watch(), torch.randn(2, 3), torch.rand(3, 4), torch.rand(3, 4)
    first, second = (Ordered(turned, False, watch) for _ in range(2))
    watch.weights.update((first, second))
    for begun in ((first, second), (first, second), (first,), (first, second)):
        if len(begun) == 1:
            other.mul_(2)  # and the run ends before it comes to this
        watch.look()
        for each in begun:
            given = weight if each is first else other
            found = each.of(given, x)
            assert found is not None
            assert torch.equal(found, given.t())


@pytest.mark.skipif(not is_enabled(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("bias", [torch.full((1,), 0.5).expand(32), torch.arange(64.0)[::2]])
def test_biases_of_weights_in_order_lie_as_they_like(bias: torch.Tensor) -> None:
    x, matrix = torch.randn(5, 64), torch.randn(32, 64)
    wanted = nn.functional.linear(x, matrix, bias)
    torch.testing.assert_close(multiply(x, ordered_matrix(matrix, x), bias), wanted)
    image, kernel = torch.randn(1, 8, 9, 9), torch.randn(32, 8, 3, 3)
    settings = [1, 1], [1, 1], [1, 1], 1
    order: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
    ordered = order(kernel.to_mkldnn(), settings[1], settings[0], *settings[2:], list(image.shape))
    wanted = nn.functional.conv2d(image, kernel, bias, *settings)
    torch.testing.assert_close(convolve(image, ordered, bias, settings), wanted)
