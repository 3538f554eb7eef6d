"""Regions of autocast, within a program and around it: plans have the conversions as steps of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, scaled_dot_product_attention

import ladder
from ladder.api.grouped_linear import GroupedLinear
from ladder.integrations.dynamo import backend

LOW = 8e-3
"""Two roundings to bfloat16: chains of ours round once where torch rounds after each operator."""


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = self.down(torch.relu(self.up(x)))
        result: Tensor = self.norm(y.float() + x)
        return result


class Attention(nn.Module):
    """Switches autocast off within, as rotary embeddings do; queries, keys and values differ in type."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            q, k, v = self.read(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4).unbind(0)
            with torch.autocast(x.device.type, enabled=False):
                frequencies = x @ x.transpose(1, 2)
                q = q.float() * frequencies.mean()
            y = scaled_dot_product_attention(q, k, v)
            return self.write(y.transpose(1, 2).flatten(2)), frequencies


class Recurrent(nn.Module):
    """What autocast lists and would be an operator of ours elsewhere: a recurrent layer, interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return interpolate(self.out(self.layer(x)[0]), scale_factor=2.0, mode="linear")


class Quantized(nn.Module):
    """Layers of Ladder give autocast's type, as torch's do: what they give is stored among its values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.filter = nn.Conv1d(32, 32, 3, padding=1)
        ladder.quantize_(self, "int8", group_size=32, convolutions=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            stored = x.new_zeros(x.shape, dtype=torch.bfloat16)
            y = self.down(torch.relu(self.up(x)))
            stored[1:] = y[1:]
            return stored, y, self.filter(y.transpose(-1, -2))


PROGRAMS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (Perceptron, (8, 32)),
    (Attention, (2, 6, 32)),
    (Recurrent, (2, 5, 16)),
    (Quantized, (2, 5, 32)),
]


def _assert_near(found: Any, wanted: Any) -> None:
    if isinstance(wanted, tuple):
        for one, other in zip(found, wanted, strict=True):
            _assert_near(one, other)
        return
    assert found.dtype == wanted.dtype
    assert (found.double() - wanted.double()).norm() <= LOW * wanted.double().norm()


GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")],
)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize(("make", "shape"), PROGRAMS)
def test_regions_are_plans(
    make: Callable[[], nn.Module], shape: tuple[int, ...], around: bool, device: str
) -> None:
    if make is Recurrent and device == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("torch has no bfloat16 recurrent layers on CPUs without AVX-512")
    torch.manual_seed(0)
    model, x = make().eval().to(device), torch.randn(shape, device=device)
    fast = ladder.compile(model)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=around):
        wanted = model(x)
        for _ in range(3):
            _assert_near(fast(x), wanted)
        _assert_near(torch.compile(model, backend=backend)(x), wanted)
    assert not fast.refused


def test_what_is_switched_off_inside_stays_exact() -> None:
    """Steps of torch must not convert what the program computes in float32."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            exact = x @ x
        return exact, x @ x

    fast, x = ladder.compile(program), torch.randn(24, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            exact, low = fast(x)
            torch.testing.assert_close(exact, program(x)[0])
            assert low.dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    assert not fast.refused


def test_nothing_that_autocast_lists_stays_as_it_was() -> None:
    """A region without listed operators, and one that only switches autocast off, change no bit."""

    def on(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.relu(x) * 2
        return y + x

    def off(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = torch.relu(x) * 2
        return y + x

    x = torch.randn(4, 4)
    for function in (on, off):
        for around in (False, True):
            fast = ladder.compile(function)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=around):
                assert all(torch.equal(fast(x), function(x)) for _ in range(3))
            assert not fast.refused


def test_a_graph_that_breaks_off_in_a_region_is_compiled_for_where_it_begins() -> None:
    def program(x: Tensor) -> Tensor:
        y = x @ x
        with torch.autocast("cpu", torch.bfloat16):
            z = torch.relu(y) @ x
            if z.sum() > 0:  # a value decides: the rest is another graph
                z = z @ x
        return z.float() + y

    fast, x = ladder.compile(program), torch.rand(4, 4)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", Warning)
        for each in (x, x, -x, x):
            _assert_near(fast(each), program(each))
            assert not torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("ignore:a graph runs")
def test_graphs_that_leave_autocast_on_run_in_torch() -> None:
    def program(x: Tensor) -> Tensor:
        torch.set_autocast_enabled("cpu", True)
        return torch.relu(x) @ x

    fast, x = ladder.compile(program), torch.randn(4, 4)
    try:
        with torch.no_grad():
            for _ in range(3):
                torch.set_autocast_enabled("cpu", False)
                assert fast(x).dtype == torch.bfloat16
                assert torch.is_autocast_enabled("cpu")
    finally:
        torch.set_autocast_enabled("cpu", False)
    assert any("stays" in why for why in fast.refused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, "int8"])
def test_quantized_layers_give_the_type_of_autocast(
    dtype: torch.dtype, given: torch.dtype, activation: str | None
) -> None:
    torch.manual_seed(0)
    layer = ladder.Linear.from_linear(nn.Linear(64, 32, dtype=dtype), "int8", activation=activation)
    x = torch.randn(3, 64, dtype=given)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, layer(x.to(dtype)).bfloat16())


def test_experts_give_the_type_of_autocast() -> None:
    torch.manual_seed(0)
    matrix = ladder.quantize(torch.randn(4 * 32, 64), "int8", group_size=32)
    layer = GroupedLinear.from_stack(matrix, 4)
    x, offsets = torch.randn(6, 64), torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x.bfloat16(), offsets)
        assert torch.equal(layer(x, offsets), layer(x, offsets).bfloat16())
    assert torch.equal(low, layer(x.bfloat16().float(), offsets).bfloat16())


def test_gradients_pass_quantized_layers_within_autocast() -> None:
    torch.manual_seed(0)
    layer = ladder.Linear.from_linear(nn.Linear(64, 32), "int8", group_size=32)
    x, rows = torch.randn(3, 64, requires_grad=True), torch.randn(3, 32)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).backward(rows.bfloat16())
    wanted = rows.bfloat16().float() @ layer.weight
    assert x.grad is not None
    assert (x.grad - wanted).norm() <= LOW * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_with_a_bias_are_converted_after_it(dtype: torch.dtype) -> None:
    """Kernels add a bias of the type that they store: one of more bits stays in the product's own type."""

    class Converted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
            ladder.quantize_(self, "int8", group_size=32)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(x).to(dtype)).float()).to(dtype)

    torch.manual_seed(0)
    model, x = Converted(), torch.randn(2, 5, 32)
    fast = ladder.compile(model)
    with torch.no_grad():
        for _ in range(3):
            _assert_near(fast(x), model(x))
    assert not fast.refused
