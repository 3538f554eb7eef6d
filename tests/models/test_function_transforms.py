"""Quantized layers and compiled functions under ``torch.func``, forward-mode differentiation and tracers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import ladder
from tile_types.errors import LadderError

pytestmark = pytest.mark.usefixtures("one_schedule")


@pytest.fixture(scope="module", params=[None, "int8"])
def layer(request: pytest.FixtureRequest) -> nn.Module:
    """Return a quantized layer, whose activations are floats or quantized in the call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32))
    ladder.quantize_(model, "int4", group_size=32, activation=request.param)
    return model


def rows() -> torch.Tensor:
    """Return five rows."""
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


MAPPED: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "rows": lambda layer, x: torch.vmap(layer)(x),
    "columns": lambda layer, x: torch.vmap(layer, in_dims=1)(x.T.contiguous()),
    "nested": lambda layer, x: torch.vmap(torch.vmap(layer))(x[:, None])[:, 0],
    "traced by torch.jit": lambda layer, x: torch.jit.trace(layer, (x[:2],))(x),
    "traced by torch.fx": lambda layer, x: torch.fx.symbolic_trace(layer)(x),
}


@pytest.mark.costly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", MAPPED)
def test_a_quantized_layer_gives_its_values(way: str, layer: nn.Module) -> None:
    with torch.no_grad():
        assert torch.equal(MAPPED[way](layer, rows()), layer(rows()))


def test_biases_that_differ_by_sample(layer: nn.Module) -> None:
    biases, x = torch.randn(3, 32), rows()
    with torch.no_grad():
        found = torch.vmap(lambda bias: torch.func.functional_call(layer, {"0.bias": bias}, (x,)))(biases)
        for bias, each in zip(biases, found, strict=True):
            assert torch.equal(each, torch.func.functional_call(layer, {"0.bias": bias}, (x,)))


def tangent(function: Callable[..., Any], x: torch.Tensor) -> Any:
    """Return the tangent of a function's result by forward-mode differentiation."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


DIFFERENTIATED: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "grad": lambda function, x: torch.func.grad(lambda a: function(a).sum())(x),
    "jacrev": lambda function, x: torch.func.jacrev(function)(x),
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (torch.ones_like(x),))[1],
    "forward mode": tangent,
    "backward": lambda function, x: torch.autograd.grad(function(x.requires_grad_()).sum(), x)[0],
}


@pytest.fixture(scope="module")
def twins() -> tuple[nn.Module, nn.Module]:
    """Return a quantized model, and one of float layers with the weights that codes stand for."""
    torch.manual_seed(0)
    floats = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 16, bias=False))
    quantized = ladder.quantize_(copy.deepcopy(floats), "int4", group_size=32)
    for mine, theirs in zip(floats, quantized, strict=True):
        if isinstance(mine, nn.Linear):
            mine.weight.data = theirs.weight.to(torch.float32)
    return quantized, floats


def squares(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return the sum of squares of what a model returns, as a function of its input."""
    return lambda x: model(x).square().sum()


def by_sample(model: nn.Module, x: torch.Tensor) -> Any:
    """Return the gradient for a bias, of each row alone."""

    def lost(bias: torch.Tensor, row: torch.Tensor) -> Any:
        return torch.func.functional_call(model, {"1.bias": bias}, (row[None],)).square().sum()

    return torch.vmap(torch.func.grad(lost), (None, 0))(model.get_parameter("1.bias").detach(), x)


def along_a_bias(model: nn.Module, x: torch.Tensor) -> Any:
    """Return the tangent of a model's result where only a bias has one."""
    bias = model.get_parameter("1.bias").detach()
    return torch.func.jvp(
        lambda b: torch.func.functional_call(model, {"1.bias": b}, (x,)), (bias,), (x[0, :32],)
    )


DERIVED: dict[str, Callable[[Any, torch.Tensor], Any]] = DIFFERENTIATED | {
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x),
    "forward over reverse": lambda model, x: torch.func.hessian(squares(model))(x[0]),
    "reverse over forward": lambda model, x: torch.func.jacrev(torch.func.jacfwd(squares(model)))(x[0]),
    "forward over forward": lambda model, x: torch.func.jacfwd(torch.func.jacfwd(squares(model)))(x[0]),
    "grad of vmap": lambda model, x: torch.func.grad(squares(torch.vmap(model)))(x),
    "vmap of grad": lambda model, x: torch.vmap(torch.func.grad(squares(model)))(x),
    "each sample's, for a bias": by_sample,
    "tangent of a bias": along_a_bias,
    "batched gradients": lambda model, x: torch.autograd.grad(
        model(x.requires_grad_()), x, torch.eye(16)[:, None].expand(-1, 5, -1), is_grads_batched=True
    ),
}


@pytest.mark.parametrize("way", DERIVED)
def test_a_quantized_layer_has_the_derivatives_of_its_weights(
    way: str, twins: tuple[nn.Module, nn.Module]
) -> None:
    quantized, floats = twins
    expected = DERIVED[way](floats, rows())
    torch.testing.assert_close(DERIVED[way](quantized, rows()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.costly
@pytest.mark.parametrize("way", [way for way in DIFFERENTIATED if way != "backward"])
def test_a_layer_that_quantizes_its_inputs_refuses_derivatives(way: str) -> None:
    layer = ladder.quantize_(nn.Sequential(nn.Linear(64, 32)), "int4", group_size=32, activation="int8")
    with pytest.raises(LadderError, match="have no gradient"):
        DIFFERENTIATED[way](layer, rows())


def curve(x: torch.Tensor) -> torch.Tensor:
    """Return a sum of smooth functions."""
    return torch.tanh(x) * 2 + x.sin()


@pytest.mark.costly
@pytest.mark.parametrize("way", DIFFERENTIATED)
def test_a_compiled_function_has_its_derivatives_also_after_plans_served_calls(way: str) -> None:
    fast, x = ladder.compile(curve), rows()
    for _ in range(4):
        fast(x)
    expected = DIFFERENTIATED[way](curve, rows())
    torch.testing.assert_close(DIFFERENTIATED[way](fast, rows()), expected)
    torch.testing.assert_close(fast(x), curve(x))


def test_a_compiled_function_is_mapped_and_says_that_it_runs_eagerly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fast, x = ladder.compile(curve), rows()
    fast(x)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(torch.vmap(fast)(x), curve(x))
        torch.vmap(fast)(x)
    assert caplog.text.count("torch.func or forward-mode differentiation transforms a call") == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_beside_layers_that_learn_is_the_same_without_gradients() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    ladder.quantize_(model, "int4", group_size=32)
    x = rows()
    traced = torch.jit.trace(model, (x,))  # compares its graph with one recorded without gradients
    assert torch.equal(traced(x[:3]), model(x[:3]))
    x.requires_grad_()
    (through,) = torch.autograd.grad(traced(x).sum(), x)
    assert torch.equal(through, torch.autograd.grad(model(x).sum(), x)[0])


def test_rows_of_integers_and_a_number_run_on_kernels() -> None:
    """`make_fx` has a number where the mapped operator converts the number's tensor."""
    fast = ladder.compile(lambda x, i: torch.vmap(lambda row, index: row - index * 0.1)(x, i))
    x, index = torch.randn(5, 4), torch.arange(5)
    for _ in range(2):
        torch.testing.assert_close(fast(x, index), x - index[:, None] * 0.1)
    assert not fast.refused
