"""Experts of transformers that do not say how their weights lie: each class by its row of `FORMS`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import ladder
from benchmarks import zoo

transformers = pytest.importorskip("transformers", minversion="5")
zoo.import_torchvision()
from ladder.api.grouped_linear import GroupedLinear  # noqa: E402
from ladder.api.stacked_experts import FORMS, form, held  # noqa: E402
from ladder.integrations.transformers import LadderConfig  # noqa: E402
from tests.models.test_transformers_loading import TOKENS, logits  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_schedule")
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 16, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
    "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1, "dtype": "float32",
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14, "max_position_embeddings": 4}
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama4_text": ("Llama4ForCausalLM", {**SIZES, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}, 4),
    "dbrx": (
        "DbrxForCausalLM",
        {
            "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 64,
            "pad_token_id": 0, "eos_token_id": None,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
            "dtype": "float32",
        },
        6,
    ),
    "jetmoe": ("JetMoeForCausalLM", {**SIZES, "kv_channels": 16}, 8),
    "step3p7": (
        "Step3p7ForConditionalGeneration",
        {
            "text_config": {
                **SIZES, "moe_intermediate_size": 96, "share_expert_dim": 64,
                "mlp_layer_types": ["sparse", "sparse"], "swiglu_limits": [None, 0.5],
                "sliding_window": 8,
            },
            "vision_config": VISION, "dtype": "float32",
        },
        4,
    ),
}  # fmt: skip
"""Kind of a configuration -> class, configuration, and how many layers of experts it has."""


def random_model(kind: str) -> Any:
    torch.manual_seed(0)
    name, options, _ = MODELS[kind]
    config = transformers.AutoConfig.for_model(kind, **options)
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def dequantized(model: Any, plain: Any) -> Any:
    """Return the plain model with the weights that the quantized one has."""
    other = copy.deepcopy(plain)
    for path, module in model.named_modules():
        if type(module) is ladder.Linear:
            other.get_submodule(path).weight.data = module.canonical.dequantize("float32")
        found = form(module)
        for stack in () if found is None else found.stacks:
            layer = module.quantized[stack.replace(".", "_")]
            values = layer.canonical.dequantize("float32").unflatten(0, (layer.experts, -1))
            parameter = held(other.get_submodule(path), stack)
            turned = values.transpose(1, 2) if stack in found.transposed else values  # type: ignore[union-attr]
            parameter.data = turned.reshape(parameter.shape).contiguous()
    return other


def experts_of(model: Any) -> int:
    return sum(isinstance(module, GroupedLinear) for module in model.modules())


def test_each_class_is_there() -> None:
    for module, name in FORMS:
        assert hasattr(__import__(module, fromlist=[name]), name)


@pytest.mark.costly
@pytest.mark.parametrize("kind", MODELS)
def test_loaded_quantized_and_saved(kind: str, tmp_path: Path) -> None:
    plain = random_model(kind)
    plain.save_pretrained(tmp_path / "plain")
    config = LadderConfig("int4", group_size=32)
    model = type(plain).from_pretrained(tmp_path / "plain", quantization_config=config).eval()
    assert experts_of(model) == MODELS[kind][2]
    other = dequantized(model, plain)
    assert torch.allclose(logits(model), logits(other), atol=2e-4, rtol=2e-3)
    made = [m.generate(TOKENS, max_new_tokens=8, do_sample=False) for m in (model, other)]
    assert torch.equal(*made)
    model.save_pretrained(tmp_path / "saved")
    again = type(plain).from_pretrained(tmp_path / "saved").eval()
    assert experts_of(again) == MODELS[kind][2]
    assert torch.equal(logits(again), logits(model))


def test_experts_of_an_unknown_form_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, unless they are named as those that stay: most of the weights are theirs."""
    [known] = [key for key in FORMS if key[1] == "LongcatFlashExperts"]
    monkeypatch.delitem(FORMS, known)
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
    sizes |= {"v_head_dim": 16, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 96, "zero_expert_num": 2}
    more = {"num_layers": 1, "n_routed_experts": 4, "moe_topk": 2, "num_key_value_heads": 4}
    config = transformers.AutoConfig.for_model("longcat_flash", **{**SIZES, **sizes, **more})
    model = transformers.LongcatFlashForCausalLM(config)
    model.save_pretrained(tmp_path)
    options: dict[str, Any] = {"group_size": 32}
    with pytest.raises(ladder.LadderError, match=r"layers\.0\.mlp\.experts: how LongcatFlashExperts"):
        type(model).from_pretrained(tmp_path, quantization_config=LadderConfig("int4", **options))
    options["modules_to_not_convert"] = ["experts"]
    loaded = type(model).from_pretrained(tmp_path, quantization_config=LadderConfig("int4", **options))
    assert experts_of(loaded) == 0
    assert any(isinstance(module, ladder.Linear) for module in loaded.modules())


def test_linear_layers_of_falcon(tmp_path: Path) -> None:
    """They are of a class derived from torch's."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
    plain = transformers.FalconForCausalLM(
        transformers.FalconConfig(**sizes, bias=True, dtype="float32")
    ).eval()
    plain.save_pretrained(tmp_path)
    config = LadderConfig("int4", group_size=32)
    model = type(plain).from_pretrained(tmp_path, quantization_config=config).eval()
    assert sum(type(module) is ladder.Linear for module in model.modules()) == 8
    assert torch.allclose(logits(model), logits(dequantized(model, plain)), atol=2e-4, rtol=2e-3)


def test_a_model_of_which_nothing_is_quantized_is_refused(tmp_path: Path) -> None:
    plain = random_model("jetmoe")
    plain.save_pretrained(tmp_path)
    config = LadderConfig("int4", group_size=32, modules_to_not_convert=["model", "lm_head"])
    with pytest.raises(ladder.LadderError, match="no linear layer or expert"):
        type(plain).from_pretrained(tmp_path, quantization_config=config)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weight": True}, "True"),
        ({"weight": None}, "None"),
        ({"group_siz": 32}, "group_size"),
        ({"modules_to_not_convert": "lm_head"}, "list of names"),
        ({"modules_to_not_convert": [3]}, "list of names"),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ladder.LadderError, match=says):
        LadderConfig(**options)


@pytest.mark.parametrize("group_size", [True, 32.0, "32"])
def test_group_sizes_are_whole_numbers(group_size: Any) -> None:
    with pytest.raises(ladder.ShapeError, match="group_size"):
        ladder.quantize(torch.randn(8, 64), "int4", group_size=group_size)


@pytest.mark.costly
@pytest.mark.parametrize("kind", MODELS)
def test_quantized_in_place_and_compiled(kind: str) -> None:
    plain = random_model(kind)
    model = ladder.quantize_(copy.deepcopy(plain), "nf4", group_size=32, skip=["lm_head"])
    rows = ladder.quantization(model).rows
    assert not any("Expert" in row.module and row.reason for row in rows)
    fast, wanted = ladder.compile(model), logits(dequantized(model, plain))
    for _ in range(2):
        assert torch.allclose(logits(fast), wanted, atol=2e-4, rtol=2e-3)
