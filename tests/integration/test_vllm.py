"""vLLM's own layers and loaders on the CPU: shards of 1, 2 and 4 ranks are the whole's, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ladder

vllm = pytest.importorskip(
    "vllm", reason="vLLM has an environment of its own; see ladder/integrations/README.md"
)
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor import parameter  # noqa: E402
from vllm.model_executor.kernels.linear import choose_mp_linear_kernel  # noqa: E402
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig  # noqa: E402
from vllm.model_executor.layers import linear  # noqa: E402
from vllm.model_executor.layers.quantization import get_quantization_config  # noqa: E402
from vllm.scalar_type import scalar_types  # noqa: E402

from ladder.integrations import vllm as plugin  # noqa: E402
from ladder.integrations import vllm_kernels  # noqa: E402
from tests.integration.engine_forms import GROUP, QKV, K, forms, gptq, once, sizes, stored  # noqa: E402
from tile_types.packing import pack_codes  # noqa: E402

PLACE = [0, 1]
"""Rank and number of ranks that vLLM is told."""


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    plugin.register()
    plugin.register()  # vLLM calls it again in other roles
    for module in (parameter, linear):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: PLACE[0])
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: PLACE[1])
    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        yield


def config(**fields: Any) -> Any:
    made = get_quantization_config("ladder").from_config({"quant_method": "ladder", **fields})
    made.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    return made


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


def fill(layer: Any, arrays: dict[str, torch.Tensor], *shard: Any) -> None:
    """Load the arrays of one layer of a checkpoint as vLLM's models do, after the mapper of names."""
    mapper = layer.quant_method.config.get_checkpoint_weight_mapper()
    for name, value in mapper.apply((f"proj{name}", value) for name, value in arrays.items()):
        target = getattr(layer, name.removeprefix("proj."))
        target.weight_loader(target, value, *shard)


def weight_of(layer: Any) -> torch.Tensor:
    """Return what a packed layer multiplies by, [N, K]: its product with the identity."""
    layer.quant_method.process_weights_after_loading(layer)
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


def test_skipped_and_refused() -> None:
    quant = config(weight="int4", group_size=GROUP, modules_to_not_convert=["q_proj", "k_proj", "v_proj"])
    assert isinstance(qkv(quant, 0, 1).quant_method, linear.UnquantizedLinearMethod)
    with pytest.raises(ladder.ShapeError, match="within a group"):
        down(config(weight="int4", group_size=48, online=True), 0, 4)
    with pytest.raises(ladder.CheckpointError, match="vLLM itself"):
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


@pytest.mark.parametrize("kind", ["uint4b8", "uint8b128", "uint4", "uint8"])
def test_the_kernel_for_vllms_own_methods(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n, weight_type = 64, getattr(scalar_types, kind)
    bits, signed = weight_type.size_bits, weight_type.has_bias()
    problem = MPLinearLayerConfig((K, n), (K, n), weight_type, torch.float16, GROUP, not signed)
    monkeypatch.setattr(
        vllm_kernels.linear.current_platform.__class__, "_enum", vllm_kernels.PlatformEnum.CPU
    )
    chosen = choose_mp_linear_kernel(problem, compute_capability=90)
    assert chosen is vllm_kernels.LadderMPLinearKernel
    codes, points = torch.randint(0, 1 << bits, (n, K)), torch.randint(0, 1 << bits, (K // GROUP, n))
    packed = {
        name: pack_codes(values, bits).view(torch.int32) for name, values in {"q": codes, "z": points}.items()
    }
    scales = torch.rand(K // GROUP, n).half()
    layer, loader = torch.nn.Module(), {"weight_loader": lambda *_: None}
    laid = {"input_dim": 1, "output_dim": 0, "packed_dim": 1, "packed_factor": 32 // bits}
    layer.w_q = parameter.PackedvLLMParameter(data=packed["q"], **laid, **loader)
    layer.w_s = parameter.GroupQuantScaleParameter(data=scales, input_dim=0, output_dim=1, **loader)
    laid = {"input_dim": 0, "output_dim": 1, "packed_dim": 1, "packed_factor": 32 // bits}
    layer.w_zp = parameter.PackedvLLMParameter(data=packed["z"], **laid, **loader)
    kernel = chosen(problem, "w_q", "w_s", None if signed else "w_zp")
    kernel.process_weights_after_loading(layer)
    zero = torch.full_like(points, 1 << (bits - 1)) if signed else points
    spread = [part.T.repeat_interleave(GROUP, 1) for part in (zero, scales.double())]
    x = torch.randn(3, K).half()
    exact = x.double() @ ((codes - spread[0]) * spread[1]).T
    assert (kernel.apply_weights(layer, x) - exact).norm() <= 2e-3 * exact.norm()
    other = MPLinearLayerConfig((K, n), (K, n), scalar_types.float4_e2m1f, torch.float16, GROUP, False)
    assert not chosen.can_implement(other)[0]


def test_experts() -> None:
    """Experts of one rank, and of a rank that has two of four."""
    experts, size, hidden = 4, 64, 96
    weights = torch.randn(experts, 2 * size, hidden), torch.randn(experts, hidden, size)
    x, ids = torch.randn(5, hidden), torch.tensor([[0, 1], [2, 0], [3, 3], [1, 2], [2, 3]])
    shares = torch.rand(5, 2)
    for own in ([0, 1, 2, 3], [2, 3]):
        moe = SimpleNamespace(intermediate_size_per_partition=size, tp_size=1)
        method = plugin.LadderMoEMethod(config(weight="int4", group_size=GROUP, online=True), moe)
        layer = torch.nn.Module()
        method.create_weights(layer, len(own), hidden, size, torch.float32)
        layer.w13_weight.data, layer.w2_weight.data = (weight[own].clone() for weight in weights)
        method.process_weights_after_loading(layer)
        places = [own.index(expert) if expert in own else -1 for expert in range(experts)]
        layer.expert_map = None if len(own) == experts else torch.tensor(places, dtype=torch.int32)
        layer.activation = "silu"
        up, down_of = (
            {e: ladder.quantize(weight[e], "int4", group_size=GROUP).dequantize("float32") for e in own}
            for weight in weights
        )
        expected = torch.zeros(5, hidden)
        for row, expert, share in (
            (r, int(e), s) for r in range(5) for e, s in zip(ids[r], shares[r], strict=True)
        ):
            if expert in own:
                gate, value = (up[expert] @ x[row]).chunk(2)
                expected[row] += share * (down_of[expert] @ (torch.nn.functional.silu(gate) * value))
        found = method.apply(layer, x, shares, ids)
        assert torch.allclose(found, expected, atol=1e-3, rtol=1e-3)
