"""Models of transformers: quantized while loaded, saved, loaded again, and of other tools' formats."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ladder
from benchmarks import zoo
from tile_types.errors import ShapeError, UnknownNameError

transformers = pytest.importorskip("transformers", minversion="5")
zoo.import_torchvision()
from transformers.core_model_loading import WeightRenaming  # noqa: E402

from ladder.integrations.transformers import (  # noqa: E402
    LadderConfig,
    LadderQuantizer,
    load_pretrained,
    names_in,
)

pytestmark = pytest.mark.usefixtures("one_schedule")
GROUP = 32
TOKENS = torch.arange(6)[None]


def tiny(folder: Path) -> Any:
    """Write a random model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, attention_bias=True, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny(tmp_path / "plain")
    return tmp_path / "plain"


def quantized_layers(model: torch.nn.Module) -> dict[str, ladder.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ladder.Linear)}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def eager(model: Any, folder: Path) -> Any:
    """Return the plain model with the dequantized weights of a quantized one."""
    plain = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    for name, layer in quantized_layers(model).items():
        plain.get_submodule(name).weight.data = layer.canonical.dequantize("float32")
    return plain


def test_weights_are_quantized_while_loading(folder: Path, tmp_path: Path) -> None:
    config = LadderConfig("int4", group_size=GROUP)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config).eval()
    layers = quantized_layers(model)
    assert len(layers) == 14
    assert type(model.lm_head) is torch.nn.Linear
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.removesuffix(".weight") in layers:
            expected = ladder.quantize(weight, "int4", group_size=GROUP)
            found = layers[name.removesuffix(".weight")].canonical
            assert torch.equal(found.storage, expected.storage)
    plain = eager(model, folder)
    assert torch.allclose(logits(model), logits(plain), atol=1e-4, rtol=1e-3)
    made = [m.generate(TOKENS, max_new_tokens=8, do_sample=False) for m in (model, plain)]
    assert torch.equal(*made)

    model.save_pretrained(tmp_path / "saved")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert len(quantized_layers(again)) == 14
    assert torch.equal(logits(again), logits(model))


def test_shards_and_stacked_experts(tmp_path: Path) -> None:
    """Attention and stacked experts are quantized; both come back from several files."""
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, num_local_experts=4, dtype="float32",
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).eval().save_pretrained(tmp_path / "plain")
    options = LadderConfig("int4", group_size=GROUP)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path / "plain", quantization_config=options).eval()
    assert len(quantized_layers(model)) == 6
    model.save_pretrained(tmp_path / "saved", max_shard_size="30KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    again = auto.from_pretrained(tmp_path / "saved").eval()
    assert len(quantized_layers(again)) == 6
    assert torch.equal(logits(again), logits(model))


def test_layers_whose_weights_lie_the_other_way_round(tmp_path: Path) -> None:
    """GPT-2's `Conv1D`: in place, by examples, while loading, and saved and loaded again."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    plain = transformers.GPT2LMHeadModel(config).eval()
    plain.save_pretrained(tmp_path / "plain")
    in_place = ladder.quantize(plain, "int4", group_size=GROUP, skip=["lm_head"])
    options = LadderConfig("int4", group_size=GROUP)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path / "plain", quantization_config=options).eval()
    model.save_pretrained(tmp_path / "saved")
    again = auto.from_pretrained(tmp_path / "saved").eval()
    reference = copy.deepcopy(plain)
    for name, layer in quantized_layers(in_place).items():
        reference.get_submodule(name).weight.data = layer.canonical.dequantize("float32").T.contiguous()
    for quantized in (in_place, model, again):
        assert len(quantized_layers(quantized)) == 8
        assert torch.allclose(logits(quantized), logits(reference), atol=1e-4, rtol=1e-3)
    by_examples = ladder.quantize(plain, "int4", group_size=GROUP, calibration=[TOKENS])
    assert [row.observed for row in ladder.quantization(by_examples).quantized] == [TOKENS.numel()] * 9
    with pytest.raises(ShapeError, match="Conv1D: no layer replaces itself"):
        ladder.quantize_(plain.transformer.h[0].attn.c_attn)


@pytest.mark.parametrize("kind", ["granitemoe", "hy_v3"])
def test_names_that_transformers_changes_when_it_saves(tmp_path: Path, kind: str) -> None:
    """Modules that are called as other models' files are, and files with other names than modules."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "head_dim": 16, "moe_intermediate_size": 32}
    sizes |= {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.CONFIG_MAPPING[kind](**sizes, dtype="float32", pad_token_id=0)
    auto, options = transformers.AutoModelForCausalLM, LadderConfig("int4", group_size=GROUP)
    auto.from_config(config).eval().save_pretrained(tmp_path / "plain")
    model = auto.from_pretrained(tmp_path / "plain", quantization_config=options).eval()
    assert len(quantized_layers(model)) >= 10
    model.save_pretrained(tmp_path / "saved")
    again = auto.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(logits(again), logits(model))


def test_a_multi_modal_model_comes_back_without_complaints(tmp_path: Path) -> None:
    """Its files name the language model otherwise than the model does: no array is called unexpected."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = transformers.LlamaConfig(**sizes, vocab_size=64, dtype="float32")
    vision = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=63)
    transformers.LlavaForConditionalGeneration(config).eval().save_pretrained(tmp_path / "plain")
    auto, options = transformers.AutoModelForImageTextToText, LadderConfig("int4", group_size=GROUP)
    model = auto.from_pretrained(tmp_path / "plain", quantization_config=options).eval()
    model.save_pretrained(tmp_path / "saved")
    again, told = auto.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(told.values())
    assert torch.equal(logits(again.eval()), logits(model))


def test_what_quantize_made_of_a_model_is_saved_and_loaded(tmp_path: Path) -> None:
    """transformers initialises at random what it misses: configurations say that layers are Ladder's."""
    model = tiny(tmp_path / "plain")
    ladder.quantize_(model, "int4", group_size=32, overrides={"*.down_proj": "int8", "lm_head": None})
    settings = {"quant_method": "ladder", "weight": "stored"}
    assert model.config.quantization_config == settings
    model.save_pretrained(tmp_path / "saved")
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(logits(found), logits(model))
    assert found.model.layers[0].mlp.down_proj.canonical.ttype.name == "int8"
    found.save_pretrained(tmp_path / "again")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(logits(again), logits(model))


def test_names_that_leave_the_base_model_are_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inkling's head is stored within the base model, which holds no such module."""
    rule = WeightRenaming(r"^model\.llm\.unembed\.", "lm_head.")
    monkeypatch.setattr("ladder.integrations.transformers.get_model_conversion_mapping", lambda model: [rule])
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    stored = ["model.llm.unembed.weight", "layers.0.mlp.down_proj.weight"]
    found = {"lm_head.weight": stored[0], "model.layers.0.mlp.down_proj.weight": stored[1]}
    assert names_in(model, stored) == found


@pytest.mark.parametrize("loaded", [False, True])
def test_quantized_layers_that_a_plain_checkpoint_joins(loaded: bool, tmp_path: Path) -> None:
    """Checkpoints of HRM-Text have gate and up as one matrix, so have queries, keys and values."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model("hrm_text", **sizes, vocab_size=64)
    model = transformers.AutoModel.from_config(config).eval()
    if loaded:
        model.save_pretrained(tmp_path / "plain")
        model = transformers.AutoModel.from_pretrained(tmp_path / "plain").eval()
    ladder.quantize_(model, "int4", group_size=32)
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModel.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        assert torch.equal(again(TOKENS)[0], model(TOKENS)[0])


def test_how_quantized_layers_compute_is_saved(tmp_path: Path) -> None:
    model = tiny(tmp_path / "plain")
    assert getattr(ladder.quantize_(model, skip="*").config, "quantization_config", None) is None
    whole = torch.nn.ModuleDict({"inner": model})
    ladder.quantize_(whole, "int4", group_size=32, activation="int8", skip="*.lm_head")
    assert model.config.quantization_config["activation"] == "int8"
    model.save_pretrained(tmp_path / "saved")
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(logits(found), logits(model))
    other = tiny(tmp_path / "other")
    ladder.quantize_(other, "int4", group_size=32, overrides={"*.down_proj": {"activation": "int8"}})
    other.save_pretrained(tmp_path / "mixed")
    with pytest.raises(UnknownNameError, match="differs by layer"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "mixed")


def test_skipped_modules_and_errors(folder: Path) -> None:
    config = LadderConfig("int4", group_size=GROUP, modules_to_not_convert=["lm_head", "mlp"])
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config)
    assert len(quantized_layers(model)) == 8
    quantizer = LadderQuantizer(LadderConfig("int4", group_size=4096))
    with pytest.raises(ladder.ShapeError, match="lm_head: group_size"):
        quantizer.take(model, "lm_head", model.lm_head.weight)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_settings_given_for_a_saved_model_hold_or_are_refused(folder: Path, tmp_path: Path) -> None:
    auto, options = transformers.AutoModelForCausalLM, LadderConfig("int4", group_size=GROUP)
    auto.from_pretrained(folder, quantization_config=options).save_pretrained(tmp_path / "saved")
    for other, name in (
        (LadderConfig("int8"), "weight"),
        (LadderConfig("int4", group_size=16), "group_size"),
    ):
        with pytest.raises(ladder.CheckpointError, match=f"saved with {name} = .* is asked for"):
            auto.from_pretrained(tmp_path / "saved", quantization_config=other)
    model = auto.from_pretrained(
        tmp_path / "saved", quantization_config=LadderConfig("int4", activation="int8")
    )
    assert {layer._activation for layer in quantized_layers(model).values()} == {"int8"}
    assert model.config.quantization_config.options == {"group_size": GROUP, "activation": "int8"}


def without(path: Path, prefix: str) -> None:
    """Write the arrays of a folder again but those whose names begin so."""
    kept = {name: array for name, array in load_file(path).items() if not name.startswith(prefix)}
    save_file(kept, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "lost",
    ["model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "model.norm", "lm_head"],
)
@pytest.mark.parametrize("saved", [False, True])
def test_tensors_that_a_checkpoint_lacks_are_named(folder: Path, lost: str, saved: bool) -> None:
    """transformers would initialise them at random, and say so in a log alone."""
    config: Any = LadderConfig("int4", group_size=GROUP)
    if saved:
        model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config)
        model.save_pretrained(folder)
        config = None
    without(folder / "model.safetensors", lost)
    with pytest.raises(ladder.CheckpointError, match=rf"lacks 1 tensor of LlamaForCausalLM: {lost}"):
        transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config)


def test_heads_that_are_tied_or_new_may_be_missing(folder: Path) -> None:
    without(folder / "model.safetensors", "lm_head")
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, "tie_word_embeddings": True}))
    config = LadderConfig("int4", group_size=GROUP)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    new = transformers.LlamaForSequenceClassification
    with pytest.raises(ladder.CheckpointError, match=r"score\.weight"):
        new.from_pretrained(folder, quantization_config=config)
    named = LadderConfig("int4", group_size=GROUP, modules_to_not_convert=["score"])
    assert not torch.equal(
        new.from_pretrained(folder, quantization_config=named).score.weight, torch.zeros(2, 64)
    )


@pytest.mark.parametrize("heads", [[], ["lm_head"]])
def test_a_base_model_is_read_from_a_model_with_a_head_and_back(
    folder: Path, tmp_path: Path, heads: list[str]
) -> None:
    """As of plain checkpoints: the head is left out, and names have the base model's prefix or not."""
    config = LadderConfig("int4", group_size=GROUP, modules_to_not_convert=heads)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config)
    model.save_pretrained(tmp_path / "whole")
    expected = model.model(TOKENS).last_hidden_state
    base = transformers.AutoModel.from_pretrained(tmp_path / "whole")
    assert torch.equal(base(TOKENS).last_hidden_state, expected)
    base.save_pretrained(tmp_path / "base")
    again = transformers.AutoModel.from_pretrained(tmp_path / "base")
    assert torch.equal(again(TOKENS).last_hidden_state, expected)


def test_quantized_heads_are_tied_no_more(folder: Path, tmp_path: Path) -> None:
    """Tools tie weights anew as they please: the head was refused as a parameter."""
    plain = transformers.LlamaForCausalLM.from_pretrained(folder, tie_word_embeddings=True).eval()
    x, model = torch.tensor([[1, 2, 3]]), ladder.quantize_(plain, "int4", group_size=GROUP)
    expected = model(x).logits
    model.save_pretrained(tmp_path / "saved")
    for each in (model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")):
        each.tie_weights()
        assert isinstance(each.lm_head, ladder.Linear)
        assert torch.equal(each(x).logits, expected)
        each.resize_token_embeddings(72)
        found = each(x).logits
        assert found.shape[-1] == 72
        assert torch.allclose(found[..., :64], expected, rtol=1e-3, atol=1e-4)


def test_what_cannot_be_quantized_is_one_error(folder: Path) -> None:
    auto = transformers.AutoModelForCausalLM
    with pytest.raises(ladder.ShapeError, match=r"_proj: group_size"):
        auto.from_pretrained(folder, quantization_config=LadderConfig("int4", group_size=4096))
    arrays = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    save_file(
        {**arrays, f"{name}.weight": torch.zeros(32, 64)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ladder.CheckpointError, match=rf"{name}\.weight has the shape \[32, 64\]"):
        auto.from_pretrained(folder, quantization_config=LadderConfig("int4", group_size=GROUP))
    with pytest.raises(
        ladder.DTypeError, match=r"down_proj and \d+ other layers would compute in torch.float64"
    ):
        auto.from_pretrained(folder, quantization_config=LadderConfig("int4"), dtype=torch.float64)


def test_models_that_read_the_weights_of_their_layers(tmp_path: Path) -> None:
    """Mamba's mixers initialise the layers that they hold, and multiply by a weight themselves."""
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        hidden_size=64, state_size=8, num_hidden_layers=1, vocab_size=64, time_step_rank=32, dtype="float32"
    )
    transformers.MambaForCausalLM(config).eval().save_pretrained(tmp_path / "plain")
    auto, options = transformers.AutoModelForCausalLM, LadderConfig("int4", group_size=GROUP)
    model = auto.from_pretrained(tmp_path / "plain", quantization_config=options).eval()
    plain = auto.from_pretrained(tmp_path / "plain").eval()
    layers = quantized_layers(model)
    assert set(layers) == {f"backbone.layers.0.mixer.{name}_proj" for name in ("in", "x", "dt", "out")}
    for name, layer in layers.items():
        plain.get_submodule(name).weight.data.copy_(layer.weight)
    assert torch.allclose(logits(model), logits(plain), atol=1e-4, rtol=1e-3)


QUERY = "model.layers.0.self_attn.q_proj.weight"
DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str]] = {
    "codes of another type": (
        lambda a: {f"{QUERY}.storage": a[f"{QUERY}.storage"].float()},
        "codes are float32",
    ),
    "scales of another type": (lambda a: {f"{QUERY}.scale": a[f"{QUERY}.scale"].short()}, "scales are int16"),
    "another layer's": (
        lambda a: {
            name: a[name.replace("q_proj", "k_proj")].clone() for name in a if name.startswith(f"{QUERY}.")
        },
        r"has the shape \[32, 64\]",
    ),
}


def test_damaged_and_hostile_folders(folder: Path, tmp_path: Path) -> None:
    auto, options = transformers.AutoModelForCausalLM, LadderConfig("int4", group_size=GROUP)
    auto.from_pretrained(folder, quantization_config=options).save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    arrays = load_file(path)
    for alter, says in DAMAGES.values():
        save_file({**arrays, **alter(arrays)}, path, metadata={"format": "pt"})
        with pytest.raises(ladder.CheckpointError, match=says):
            auto.from_pretrained(tmp_path / "saved")
    undescribed = {name: value for name, value in arrays.items() if name != f"{QUERY}.description"}
    save_file(undescribed, path, metadata={"format": "pt"})
    with pytest.raises(ladder.CheckpointError, match="without its description"):
        auto.from_pretrained(tmp_path / "saved")
    path.unlink()
    save_file(arrays, tmp_path / "outside.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(arrays, "../outside.safetensors")}
    (tmp_path / "saved" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ladder.CheckpointError, match="lies outside of it"):
        auto.from_pretrained(tmp_path / "saved")


def as_gptq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    q = ladder.quantize(weight, "uint4", group_size=GROUP, zero="integer", scale_type="float16")
    zero = q.zero.t().to(torch.int32).reshape(q.zero.shape[1], -1, 8) << (4 * torch.arange(8))
    return {
        "qweight": q.storage.view(torch.int32).t().contiguous(),
        "qzeros": zero.sum(-1).to(torch.int32),
        "scales": q.scale.t().contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
    }


def as_awq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    q = ladder.quantize(weight, "uint4", group_size=GROUP, zero="integer", scale_type="float16")
    low, high = q.storage & 15, q.storage >> 4
    codes = torch.stack([low, high], -1).flatten(1)

    def words(values: torch.Tensor) -> torch.Tensor:
        eight = values.t().to(torch.int32).unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return (eight << (4 * torch.arange(8))).sum(-1).to(torch.int32)

    return {"qweight": words(codes), "qzeros": words(q.zero), "scales": q.scale.t().contiguous()}


def as_packed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    q = ladder.quantize(weight, "int4", group_size=GROUP, scale_type="bfloat16")
    words = (q.storage ^ 0x88).view(torch.int32)
    return {"weight_packed": words, "weight_scale": q.scale, "weight_shape": torch.tensor(weight.shape)}


def as_fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scales = torch.ones([-(-extent // 128) for extent in weight.shape])
    scale = torch.tensor(0.5)  # of inputs, which are not quantized here
    return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale_inv": scales, "input_scale": scale}


def as_quanto(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    groups = weight.reshape(-1, GROUP)
    shift = -groups.amin(1, keepdim=True)
    scale = (groups.amax(1, keepdim=True) + shift) / 15
    low, high = ((groups + shift) / scale).round().to(torch.uint8).chunk(2)
    arrays = {"_data._data": low | high << 4, "_scale": scale, "_shift": shift}
    ones = {f"{where}_scale": torch.tensor(1.0) for where in ("input", "output")}
    return {**{f"weight.{part}": array for part, array in arrays.items()}, **ones}


STORED: dict[str, tuple[Callable[[torch.Tensor], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "gptq": (
        as_gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (
        as_awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    ),
    "pack-quantized": (as_packed, {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "fp8-blocks": (as_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "quanto-groups": (as_quanto, {"quant_method": "quanto"}),
}


def store(folder: Path, target: Path, form: str) -> None:
    """Rewrite a model's folder as another tool would have stored it."""
    make, config = STORED[form]
    target.mkdir()
    arrays: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        prefix, _, last = name.rpartition(".")
        linear = last == "weight" and "proj" in prefix
        parts = make(value) if linear else {last: value}
        arrays |= {f"{prefix}.{part}": array for part, array in parts.items()}
    save_file(arrays, target / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**content, "quantization_config": config}))


@pytest.mark.parametrize("form", STORED)
def test_models_of_other_tools(folder: Path, tmp_path: Path, form: str) -> None:
    store(folder, tmp_path / "stored", form)
    model, info = load_pretrained(
        transformers.AutoModelForCausalLM, tmp_path / "stored", output_loading_info=True
    )
    assert not any(info.values()), "nothing is reported as missing or unexpected"
    layers = quantized_layers(model.eval())
    assert len(layers) == 14
    checkpoint = ladder.load_checkpoint(tmp_path / "stored")
    for name, layer in layers.items():
        stored = checkpoint[f"{name}.weight"].dequantize()
        assert torch.equal(layer.canonical.dequantize(), stored.view(layer.out_features, layer.in_features))
    plain = eager(model, folder)
    assert torch.allclose(logits(model), logits(plain), atol=1e-4, rtol=1e-3)
    model.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("modelopt", "quantized already.*load_pretrained"),
        ("unheard_of", "the configuration says 'unheard_of'"),
    ],
)
def test_codes_of_other_tools_are_not_quantized_as_if_they_were_weights(
    folder: Path, tmp_path: Path, method: str, says: str
) -> None:
    """transformers passes over methods that it does not know, and loads fp8 codes without their scales."""
    arrays = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    scale = arrays[name].abs().max() / 448
    arrays |= {name: (arrays[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "quant_algo": "FP8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ladder.CheckpointError, match=says):
        transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=LadderConfig("int4"))


@pytest.mark.parametrize("form", ["fp8-blocks", "pack-quantized"])
def test_embeddings_of_other_tools_are_dequantized(folder: Path, tmp_path: Path, form: str) -> None:
    """Tools quantize the table, under the model's own name of it or others, and tie the head to it."""
    store(folder, tmp_path / "stored", form)
    path, table = tmp_path / "stored" / "model.safetensors", "model.embed_tokens.weight"
    arrays = load_file(path)
    del arrays["lm_head.weight"]
    parts = STORED[form][0](arrays.pop(table))
    arrays |= {f"model.embed_tokens.{part}": value for part, value in parts.items()}
    save_file(arrays, path, metadata={"format": "pt"})
    config = json.loads((tmp_path / "stored" / "config.json").read_text())
    (tmp_path / "stored" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    auto = transformers.AutoModelForCausalLM
    model, info = load_pretrained(auto, tmp_path / "stored", output_loading_info=True)
    assert not any(info.values())
    wanted = ladder.load_checkpoint(tmp_path / "stored").dequantize(table, torch.float32)
    assert torch.equal(model.model.embed_tokens.weight, wanted)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "ours")
    again = auto.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(logits(again), logits(model.eval()))


def test_a_model_of_which_nothing_is_quantized_is_refused(folder: Path) -> None:
    """As BitNet's weights for training: transformers quantizes them at every product."""
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "bitnet", "quantization_mode": "online"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    with pytest.raises(ladder.CheckpointError, match=r"no tensor is stored quantized, .* 'bitnet'"):
        load_pretrained(transformers.AutoModelForCausalLM, folder)


def test_a_tensor_that_is_no_layer_is_named(folder: Path, tmp_path: Path) -> None:
    store(folder, tmp_path / "stored", "fp8-blocks")
    path = tmp_path / "stored" / "model.safetensors"
    arrays = load_file(path)
    arrays |= {f"model.other.{part}": value for part, value in as_fp8(torch.ones(32, 32)).items()}
    save_file(arrays, path, metadata={"format": "pt"})
    with pytest.raises(ladder.CheckpointError, match=r"model\.other\.weight"):
        load_pretrained(transformers.AutoModelForCausalLM, tmp_path / "stored")
