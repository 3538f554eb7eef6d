"""Gradients through frozen quantized layers, as training of adapters needs them."""

from __future__ import annotations

import copy
import operator as operators
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ladder
from ladder.api.compiler import Compiler
from ladder.runtime import operator
from tile_types.errors import LadderError

pytestmark = pytest.mark.usefixtures("one_schedule")

N, K = 24, 96


def frozen(dtype: torch.dtype = torch.float32, weight: str = "int4", **options: Any) -> ladder.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(K, N, dtype=dtype)
    return ladder.Linear.from_linear(linear, weight, **options)


def decoded(layer: ladder.Linear) -> nn.Linear:
    """Return the layer of the same weights in float64."""
    assert layer.canonical is not None
    assert layer.bias is not None
    wide = nn.Linear(K, N, dtype=torch.float64)
    wide.weight.data = torch.as_tensor(layer.canonical.dequantize("float64"))
    wide.bias.data = layer.bias.double()
    return wide


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]
)
@pytest.mark.parametrize("weight", ["int4", "nf4", "mxfp4"])
@pytest.mark.parametrize("shape", [(K,), (0, K), (1, K), (2, 3, K)])
def test_gradients_are_those_of_the_decoded_weight(
    dtype: torch.dtype, tolerance: float, weight: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tolerance: the weight, and the gradient, are rounded to the type."""
    monkeypatch.setattr(operator, "DECODED_COLUMNS", 40)  # three parts, the last one short
    layer = frozen(dtype, weight, **({} if weight == "mxfp4" else {"group_size": 32}))
    assert layer.bias is not None
    layer.bias.requires_grad_()
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    wide, y = decoded(layer), x.detach().double().requires_grad_()
    above = torch.randn((*shape[:-1], N), dtype=dtype)
    found = torch.autograd.grad(layer(x), (x, layer.bias), above)
    wanted = torch.autograd.grad(wide(y), (y, wide.bias), above.double())
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= tolerance * other.norm()


class Adapted(nn.Module):
    """A frozen layer and its adapter, checkpointed."""

    def __init__(self, frozen: nn.Module) -> None:
        super().__init__()
        self.frozen = frozen
        self.down, self.up = nn.Linear(K, 4, bias=False), nn.Linear(4, N, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return torch.tanh(self.frozen(x) + self.up(self.down(x)))

        result: Tensor = checkpoint(run, x, use_reentrant=False)
        return result


@pytest.mark.parametrize("way", ["eager", "torch.compile", "ladder.compile"])
@pytest.mark.filterwarnings("ignore:a graph runs in torch alone")
def test_adapters_learn_what_they_learn_on_decoded_weights(way: str) -> None:
    torch._dynamo.reset()
    layer = frozen(group_size=32)
    model = nn.Sequential(nn.Linear(K, K), Adapted(layer))
    wide = copy.deepcopy(model)
    wide[1].frozen = decoded(layer).float().requires_grad_(False)  # type: ignore[assignment]
    ways: dict[str, Any] = {
        "eager": lambda model: model,
        "torch.compile": lambda model: torch.compile(model, backend="aot_eager"),
        "ladder.compile": ladder.compile,
    }
    x, wanted = torch.randn(16, K), torch.randn(16, N)
    losses = []
    for each, run in ((model, ways[way](model)), (wide, wide)):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.5)
        steps = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(run(x), wanted)
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
        losses.append(steps)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0.0)
    assert losses[0][-1] < losses[0][0]


def test_second_derivatives() -> None:
    layer, x = frozen(group_size=32), torch.randn(3, K, requires_grad=True)
    found, wanted = (
        torch.autograd.functional.vhp(lambda x, run=run: torch.tanh(run(x)).sum(), x, torch.ones_like(x))[1]
        for run in (layer, decoded(layer).float())
    )
    torch.testing.assert_close(found, wanted)


def test_rounded_activations_refuse() -> None:
    layer, x = frozen(group_size=32, activation="int8"), torch.randn(2, K, requires_grad=True)
    with pytest.raises(LadderError, match="have no gradient"):
        layer(x).sum().backward()


WRITES: dict[str, Any] = {
    "as PEFT merges adapters": lambda weight: setattr(weight, "data", weight.data + 1),
    "method": lambda weight: weight.add_(1),
    "as layers are initialised": nn.init.kaiming_uniform_,
    "operator": lambda weight: operators.iadd(weight, 1),
    "item": lambda weight: operators.setitem(weight, 0, 1.0),
}


@pytest.mark.parametrize("way", WRITES)
def test_writes_into_decoded_weights_are_refused(way: str) -> None:
    with pytest.raises(LadderError, match="set_weight"):
        WRITES[way](frozen(group_size=32).weight)


def test_whoever_freezes_weights_may_freeze_decoded_ones() -> None:
    weight = frozen(group_size=32).weight
    weight.requires_grad = False
    assert not weight.requires_grad_(False).requires_grad


def test_a_model_that_was_prepared_for_training_runs_on_kernels() -> None:
    """PEFT lets what embeddings give have gradients, so that checkpointed layers have some."""
    model = nn.Sequential(nn.Embedding(8, K), Adapted(frozen(group_size=32))).eval()
    model[0].register_forward_hook(lambda module, given, result: result.requires_grad_(True))
    fast, tokens = ladder.compile(model), torch.tensor([[1, 5, 2]])
    with torch.no_grad():
        wanted = model(tokens)
        for _ in range(3):
            torch.testing.assert_close(fast(tokens), wanted)
    assert not fast.refused


@pytest.mark.parametrize("targets", ["0", "all-linear"])
def test_peft_adapts_layers_as_it_does_torchs(targets: str) -> None:
    peft = pytest.importorskip("peft")
    layer, x = frozen(group_size=32), torch.randn(2, K)
    before = layer(x)
    model = peft.get_peft_model(nn.Sequential(layer), peft.LoraConfig(target_modules=targets))
    torch.testing.assert_close(model(x), before)
    model(x).sum().backward()
    assert [name for name, each in model.named_parameters() if each.grad is not None]


def test_tools_that_quantize_linear_layers_pass_over_quantized_ones() -> None:
    """Of torch's classes it is the one which torch.ao and torchao do not quantize; adapters take any."""
    layer = frozen(group_size=32)
    assert isinstance(layer, nn.Linear)
    assert isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    with pytest.raises(LadderError, match="set_weight"):
        layer.reset_parameters()


class Apart(nn.Module):
    """Says of parameters whether they have gradients, as PEFT does where adapters are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, on: bool) -> Tensor:
        y = self.first(x).tanh() + self.second(x)
        self.second.requires_grad_(False)
        z = self.first(y).sin()
        self.second.requires_grad_(on)
        self.first.weight.requires_grad_(requires_grad=not on)
        return y + z


def test_parameters_are_told_whether_they_have_gradients() -> None:
    model = Apart()
    fast = ladder.compile(model)
    with torch.no_grad():
        for on in (True, True, False, False, True):
            x = torch.randn(3, 8)
            found = fast(x, on)
            told = [each.requires_grad for each in model.parameters()]
            model.requires_grad_(True)
            torch.testing.assert_close(found, model(x, on))
            assert told == [each.requires_grad for each in model.parameters()]
            model.requires_grad_(True)
    assert not fast.refused
    assert len(fast.compiler.built) == 2


def test_nothing_is_refused_where_nothing_is_computed() -> None:
    compiler = Compiler()
    assert compiler(torch.fx.symbolic_trace(lambda: ()), [])() == ()
    weight = nn.Parameter(torch.ones(2))
    with torch.no_grad():
        compiler(torch.fx.symbolic_trace(told), [weight])(weight)
    assert not weight.requires_grad
    assert not compiler.refused


def told(weight: Tensor) -> tuple[()]:
    weight.requires_grad_(False)
    return ()
