"""Experts with stacked weights: quantized in place by `ladder.quantize_`, and the mixture they compute."""

from __future__ import annotations

import copy
import importlib
import io
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ladder
from benchmarks import zoo
from ladder.api.grouped_linear import GroupedLinear, mixture
from ladder.api.stacked_experts import uninstall

transformers = pytest.importorskip("transformers", minversion="5")
zoo.import_torchvision()

pytestmark = pytest.mark.usefixtures("one_schedule")
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 16, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
    "pad_token_id": 0, "moe_intermediate_size": 96, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "n_routed_experts": 4,
}  # fmt: skip
TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


def random_model(name: str) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def dequantized(model: Any, plain: Any) -> Any:
    """Return the plain model with the weights that the quantized one has."""
    other = copy.deepcopy(plain)
    for name, layer in model.named_modules():
        if isinstance(layer, GroupedLinear):
            path, _, stack = name.replace(".quantized.", ".").rpartition(".")
            module = other.get_submodule(path)
            values = layer.canonical.dequantize("float32").unflatten(0, (layer.experts, -1))
            getattr(module, stack).data = (
                values.transpose(1, 2).contiguous() if module.is_transposed else values
            )
        elif isinstance(layer, ladder.Linear):
            other.get_submodule(name).weight.data = layer.canonical.dequantize("float32")
    return other


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_of_a_model_are_quantized_in_place(name: str) -> None:
    plain = random_model(name)
    model = ladder.quantize_(copy.deepcopy(plain), "int4", group_size=32, skip=["lm_head"])
    rows = {row.name: row for row in ladder.quantization(model).rows}
    experts = [row for path, row in rows.items() if path.endswith(".experts")]
    assert len(experts) == 2
    assert all(row.weight == "int4_g32" and row.after < row.before / 3 for row in experts)
    fast = ladder.compile(model)
    with torch.no_grad():
        for tokens in (TOKENS, TOKENS, TOKENS[:, :1], TOKENS[:, :1]):
            wanted = dequantized(model, plain)(tokens).logits
            assert torch.allclose(model(tokens).logits, wanted, atol=2e-4, rtol=2e-3)
            assert torch.allclose(fast(tokens).logits, wanted, atol=2e-4, rtol=2e-3)
    assert fast.outcome == "whole"


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS[:, :1]])
def test_gradients_pass_through_experts(name: str, tokens: torch.Tensor) -> None:
    """As adapters in front of them need; those of the experts' biases are there, too."""
    plain = random_model(name)
    model = ladder.quantize_(copy.deepcopy(plain), "int4", group_size=32, skip=["lm_head"])
    other = dequantized(model, plain)
    for parameter in (*model.parameters(), *other.parameters()):
        parameter.requires_grad_(parameter.is_floating_point())
    for run in (model, torch.compile(model, backend="aot_eager")):
        for each in (run, other):
            each.zero_grad()
            each(tokens, use_cache=False).logits.square().mean().backward()
        found, wanted = ({n: p.grad for n, p in m.named_parameters()} for m in (model, other))
        for path, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[path], rtol=1e-3, atol=1e-5, msg=path)


OWNERS = {
    "offsets": (torch.randn(7, 64), torch.tensor([1, 3, 3, 6], dtype=torch.int32)),
    "slots": (torch.randn(4, 2, 64), torch.tensor([2, 0, 7, 2], dtype=torch.int32)),
    "none": (torch.randn(0, 64), torch.tensor([0, 0, 0, 0], dtype=torch.int32)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", OWNERS)
def test_gradients_of_grouped_products(way: str, dtype: torch.dtype) -> None:
    """Experts without rows, rows without an expert, an expert of two slots, no rows at all."""
    weight = ladder.quantize(torch.randn(3 * 48, 64), "int4", group_size=32)
    layer = GroupedLinear.from_stack(weight, 3, torch.randn(3, 48), dtype=dtype)
    layer.bias.requires_grad_()
    rows, owners = OWNERS[way]
    x = rows.to(dtype).requires_grad_()
    y = layer(x, owners)
    gradient = torch.randn(y.shape).to(dtype)
    found = torch.autograd.grad(y, (x, layer.bias), gradient)
    values = weight.dequantize("float32").unflatten(0, (3, 48))
    flat, for_x = gradient.float().view(-1, 48), torch.zeros(rows.view(-1, 64).shape)
    for_bias, numbers = torch.zeros(3, 48), owners.tolist()
    pairs = list(enumerate(pairwise(numbers)))
    if way == "slots":
        pairs = [(e, (2 * at, 2 * at + 2)) for at, e in enumerate(numbers) if e < 3]
    for expert, (first, last) in pairs:
        for_x[first:last] = flat[first:last] @ values[expert]
        for_bias[expert] += flat[first:last].sum(0)
    bound = {"rtol": 2e-2, "atol": 1e-1} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found[0].float().view(-1, 64), for_x, **bound)
    torch.testing.assert_close(found[1].float(), for_bias, **bound)


def routed(tokens: int) -> tuple[Any, ...]:
    """Return inputs of LongCat's experts, of which those from 3 on give their tokens back."""
    x, weights = torch.randn(tokens, 64), torch.rand(tokens, 2)
    return x, torch.randint(0, 5, (tokens, 2)), weights


def shared(tokens: int) -> tuple[Any, ...]:
    return torch.randn(2, tokens, 64), torch.rand(2, tokens, 3)


@pytest.mark.parametrize(
    ("home", "kind", "inputs"),
    [("longcat_flash", "LongcatFlashExperts", routed), ("inkling", "InklingSharedExperts", shared)],
)
def test_experts_beside_others(home: str, kind: str, inputs: Callable[[int], tuple[Any, ...]]) -> None:
    torch.manual_seed(0)
    fields = {"hidden_size": 64, "expert_ffn_hidden_size": 96, "moe_intermediate_size": 96}
    fields |= {"n_routed_experts": 3, "zero_expert_num": 2, "n_shared_experts": 3, "hidden_act": "silu"}
    name = f"transformers.models.{home}.modeling_{home}"
    plain = getattr(importlib.import_module(name), kind)(SimpleNamespace(**fields)).eval()
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model = torch.nn.ModuleDict({"experts": copy.deepcopy(plain)})
    ladder.quantize_(model, "int4", group_size=32)
    same, experts = copy.deepcopy(model["experts"]), model["experts"]
    uninstall(same, plain, "float32")
    shapes = [parameter.shape for parameter in plain.parameters()]
    assert sorted(parameter.shape for parameter in same.parameters()) == sorted(shapes)
    with torch.no_grad():
        for tokens in (5, 1, 0):
            given = inputs(tokens)
            assert torch.allclose(experts(*given), same(*given), atol=2e-4, rtol=2e-3)


def test_rules_name_experts() -> None:
    model = random_model("qwen3_moe")
    names = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    asked: list[str] = []
    ladder.quantize_(
        model, "int4", group_size=32, skip=[names[0]], overrides={"*.1.mlp.experts": "int8"},
        filter=lambda name, module: bool(asked.append(name)) or True,
    )  # fmt: skip
    rows = {row.name: row for row in ladder.quantization(model).rows}
    assert "skipped" in rows[names[0]].reason
    assert rows[names[1]].weight == "int8_g32"
    assert names[1] in asked
    assert model.get_submodule(names[0]).down_proj is not None
    ladder.quantize_(model, "int4", group_size=32, filter=lambda name, module: name == names[0])
    assert "experts" in str(ladder.quantization(model).quantized)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "jetmoe"])
def test_models_with_experts_are_copied_and_pickled(name: str) -> None:
    """As `torch.save` of a whole model does, and what sends one to another process."""
    model = ladder.quantize_(random_model(name), "int8", skip=["lm_head"])
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    with torch.no_grad():
        wanted = model(TOKENS).logits
        for other in (torch.load(saved, weights_only=False), copy.deepcopy(model)):
            assert torch.equal(other(TOKENS).logits, wanted)


def test_what_cannot_be_quantized_leaves_all_as_it_is() -> None:
    model = random_model("mixtral")
    model.model.layers[1].mlp.experts.down_proj.data[2, 3, 5] = torch.nan
    with pytest.raises(ladder.LadderError, match="nan") as raised:
        ladder.quantize_(model, "int4", group_size=32)
    assert "model.layers.1.mlp.experts" in raised.value.__notes__[0]
    assert not any(isinstance(module, ladder.Linear) for module in model.modules())
    assert model.model.layers[0].mlp.experts.gate_up_proj is not None


def test_a_packed_projection_is_named() -> None:
    model = torch.nn.TransformerEncoderLayer(32, 4, 64)
    ladder.quantize_(model, "int4", group_size=32)
    rows = {row.name: row.reason for row in ladder.quantization(model).rows}
    assert "MultiheadAttention" in rows["self_attn"]
    assert rows["linear1"] == ""


@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("chosen", [1, 3])
def test_mixture_is_the_weighted_sum_of_experts(tokens: int, chosen: int) -> None:
    """An expert may be chosen twice; numbers below 0 and from E on are no expert, whose rows are not read."""
    torch.manual_seed(tokens)
    experts, width = 4, 6
    matrices = torch.randn(experts, width, width)
    x, weights = torch.randn(tokens, width), torch.randn(tokens, chosen)

    def product(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        y = torch.full_like(rows, torch.nan)
        if rows.dim() == 3:  # slots of one row, which name their experts
            for slot, expert in enumerate(offsets):
                y[slot] = rows[slot] @ matrices[expert].T if 0 <= expert < experts else torch.nan
            return y
        for expert in range(experts):
            begin, end = int(offsets[expert]), int(offsets[expert + 1])
            y[begin:end] = rows[begin:end] @ matrices[expert].T
        return y

    for least, top in ((0, experts), (-2, experts + 2), (-1, 0)):
        ids = torch.randint(least, top, (tokens, chosen))
        wanted = torch.zeros(tokens, width)
        for token in range(tokens):
            for each in range(chosen):
                if 0 <= (expert := int(ids[token, each])) < experts:
                    wanted[token] += (
                        weights[token, each] * torch.relu(x[token] @ matrices[expert].T) @ matrices[expert].T
                    )
        found = mixture(x, ids, weights, product, torch.relu, product, experts)
        assert found.shape == wanted.shape
        assert torch.allclose(found, wanted, atol=1e-4, rtol=1e-4)


def test_torch_compile_takes_layers_of_experts_that_no_call_has_warmed() -> None:
    weight = ladder.quantize(torch.randn(2 * 64, 64), "int4", group_size=32)
    layer, x = GroupedLinear.from_stack(weight, 2), torch.randn(4, 64)
    offsets = torch.tensor([0, 1, 4], dtype=torch.int32)
    found = torch.compile(layer, fullgraph=True, backend="eager")(x, offsets)
    assert torch.equal(found, layer(x, offsets))
