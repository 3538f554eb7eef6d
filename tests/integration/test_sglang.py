"""SGLang's own layers and loaders on the CPU: shards of 1, 2 and 4 ranks are the whole's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ladder
from benchmarks import zoo

zoo.import_torchvision()
pytest.importorskip(
    "sglang", reason="SGLang has an environment of its own; see ladder/integrations/README.md"
)
from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES  # noqa: E402
from sglang.srt.layers import linear  # noqa: E402
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig  # noqa: E402
from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput  # noqa: E402
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402
from sglang.srt.layers.quantization import get_quantization_config  # noqa: E402
from sglang.srt.model_loader.auto_loader import STANDARD_QKV_MAPPING  # noqa: E402

from ladder.integrations import sglang as plugin  # noqa: E402
from tests.integration.engine_forms import GROUP, QKV, K, forms, gptq, once, sizes, stored  # noqa: E402

PLACE = [0, 1]
"""Rank and number of ranks that SGLang is told."""


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    plugin.register()  # SGLang calls it again in other processes
    monkeypatch.setattr(linear, "_resolve_linear_group", lambda group: linear._LogicalGroup(*PLACE))
    torch.manual_seed(0)


def config(**fields: Any) -> Any:
    found = get_quantization_config("ladder").from_config({"quant_method": "ladder", **fields})
    found.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return found


def qkv(quant: Any, rank: int, ranks: int, k: int = K) -> Any:
    PLACE[:] = rank, ranks
    return linear.QKVParallelLinear(
        k, 32, 4, 2, bias=False, params_dtype=torch.bfloat16, quant_config=quant,
        prefix="model.layers.0.self_attn.qkv_proj",
    )  # fmt: skip


def down(quant: Any, rank: int, ranks: int, k: int = K) -> Any:
    PLACE[:] = rank, ranks
    return linear.RowParallelLinear(
        k, 64, bias=False, params_dtype=torch.bfloat16, quant_config=quant, reduce_results=False,
        prefix="model.layers.0.mlp.down_proj",
    )  # fmt: skip


def fill(layer: Any, arrays: dict[str, torch.Tensor], shard: str = "") -> None:
    """Load the arrays of one layer of a checkpoint as SGLang's models do: by the names they have there."""
    known = dict(torch.nn.ModuleDict({"qkv_proj" if shard else "down_proj": layer}).named_parameters())
    for name, value in arrays.items():
        if shard:
            assert STANDARD_QKV_MAPPING.try_load(f"{shard}_proj{name}", value, known) in known
        else:
            known[f"down_proj{name}"].weight_loader(known[f"down_proj{name}"], value)


def weight_of(layer: Any) -> torch.Tensor:
    """Return what a packed layer multiplies by, [N, K]: its product with the identity."""
    layer.quant_method.process_weights_after_loading(layer)
    assert not list(layer.parameters())
    eye = torch.eye(layer.product.in_features, dtype=torch.bfloat16)
    return layer.quant_method.apply(layer, eye).T


@pytest.mark.parametrize("form", forms())
def test_shards_are_those_of_the_whole(form: str) -> None:
    fields, make = forms()[form]
    k = 320 if "uint3" in form else K  # a border of columns must lie on a word
    heads = {name: make(torch.randn(rows, k, dtype=torch.bfloat16)) for name, rows in QKV.items()}
    rows = make(torch.randn(64, k, dtype=torch.bfloat16))
    wholes: dict[str, torch.Tensor] = {}
    for ranks in (1, 2) if "uint3" in form else (1, 2, 4):
        columns, summands = [], []
        for rank in range(ranks):
            layer = qkv(config(**fields), rank, ranks, k)
            for name, arrays in heads.items():
                fill(layer, arrays, name)
            columns.append(weight_of(layer).split([part // ranks for part in sizes(ranks)]))
            layer = down(config(**fields), rank, ranks, k)
            fill(layer, rows)
            summands.append(weight_of(layer))
        joined = [torch.cat(parts) for parts in zip(*columns, strict=True)]
        found = {
            "qkv": torch.cat([joined[0], *(once(part, ranks) for part in joined[1:])]),
            "down": torch.cat(summands, 1),
        }
        wholes = wholes or found
        assert all(torch.equal(found[name], wholes[name]) for name in found)


def test_values_are_those_of_the_checkpoint() -> None:
    weight = torch.randn(64, K, dtype=torch.bfloat16)
    layer = down(config(weight="int4", group_size=GROUP), 0, 1)
    fill(layer, stored(weight, "int4"))
    expected = ladder.quantize(weight, "int4", group_size=GROUP).dequantize("bfloat16")
    assert torch.equal(weight_of(layer), expected)


def test_a_float32_checkpoint_is_quantized_in_the_models_type() -> None:
    weight = torch.randn(64, K)
    layer = down(config(weight="int4", group_size=GROUP, online=True), 0, 1)
    fill(layer, {".weight": weight})
    expected = ladder.quantize(weight.bfloat16(), "int4", group_size=GROUP).dequantize("bfloat16")
    assert torch.equal(weight_of(layer), expected)


def test_skipped_and_refused() -> None:
    assert "ladder" in QUANTIZATION_CHOICES
    quant = config(weight="int4", group_size=GROUP, modules_to_not_convert=["self_attn"])
    assert isinstance(qkv(quant, 0, 1).quant_method, plugin.UnquantizedLinearMethod)
    with pytest.raises(ladder.ShapeError, match="within a group"):
        down(config(weight="int4", group_size=48, online=True), 0, 4)
    with pytest.raises(ladder.CheckpointError, match="SGLang itself"):
        config(quant_method="awq")
    with pytest.raises(ladder.CheckpointError, match="inputs rotated"):
        config(quant_method="gptq", bits=4, group_size=GROUP, rotation="hadamard")
    override = plugin.LadderQuantizationConfig.override_quantization_method
    assert override({"quant_method": "gptq"}, "ladder") == "ladder"
    assert override({"quant_method": "gptq"}, None) is None
    layer = qkv(config(quant_method="gptq", bits=4, group_size=GROUP, desc_act=True), 0, 1)
    heads = {name: gptq(torch.empty(rows, K), 4, torch.randperm(K) // GROUP) for name, rows in QKV.items()}
    fill(layer, heads["q"], "q")
    with pytest.raises(ladder.CheckpointError, match="different orders"):
        fill(layer, heads["k"], "k")
    method = plugin.LadderMoEMethod(config(online=True))
    with pytest.raises(ladder.LadderError, match="swiglu_limit"):
        method.create_moe_runner(torch.nn.Module(), MoeRunnerConfig(swiglu_limit=7.0))


@pytest.mark.parametrize("own", [[0, 1, 2, 3], [2, 3]])
def test_experts(own: list[int]) -> None:
    """Experts of one rank, and of a rank that has two of four; SGLang gives numbers of this rank's, or -1."""
    size, hidden = 64, 96
    weights = torch.randn(4, 2 * size, hidden), torch.randn(4, hidden, size)
    x, ids, shares = (
        torch.randn(5, hidden),
        torch.tensor([[0, 1], [2, 0], [3, 3], [1, 2], [2, 3]]),
        torch.rand(5, 2),
    )
    method = plugin.LadderMoEMethod(config(weight="int4", group_size=GROUP, online=True))
    layer = torch.nn.Module()
    method.create_weights(layer, len(own), hidden, size, torch.float32)
    method.create_moe_runner(layer, MoeRunnerConfig(activation="silu"))
    layer.w13_weight.data, layer.w2_weight.data = (weight[own].clone() for weight in weights)
    method.process_weights_after_loading(layer)
    up, narrow = (
        {e: ladder.quantize(weight[e], "int4", group_size=GROUP).dequantize("float32") for e in own}
        for weight in weights
    )
    expected = torch.zeros(5, hidden)
    for row, at in ((row, at) for row in range(5) for at in range(2) if int(ids[row, at]) in own):
        expert = int(ids[row, at])
        gate, value = (up[expert] @ x[row]).chunk(2)
        expected[row] += shares[row, at] * (narrow[expert] @ (torch.nn.functional.silu(gate) * value))
    local = torch.tensor([own.index(expert) if expert in own else -1 for expert in range(4)])[ids]
    given = StandardDispatchOutput(x, None, StandardTopKOutput(shares, local.int(), torch.empty(5, 4)))
    found = method.apply(layer, given).hidden_states
    assert torch.allclose(found, expected, atol=1e-3, rtol=1e-3)
