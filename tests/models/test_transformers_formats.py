"""Architectures by formats: tokens of a quantized model equal those of the dequantized one, run by torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ladder
from benchmarks import zoo

transformers = pytest.importorskip("transformers", minversion="5")
zoo.import_torchvision()
from ladder.api.grouped_linear import GroupedLinear  # noqa: E402
from ladder.cli.generate import Request, load, run_generate  # noqa: E402
from ladder.integrations.transformers import LadderConfig, load_pretrained  # noqa: E402
from tests.models.test_transformers_loading import STORED, TOKENS, as_gptq, logits  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_schedule")
GROUP = 32
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": False, "dtype": "float32",
    "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 96, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "phi3": {},
    "olmo2": {},
    "starcoder2": {},
    "granite": {},
    "gemma2": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "gpt_oss": {**EXPERTS, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
}
TYPES = {"int4": {"group_size": GROUP}, "nf4": {"group_size": GROUP}, "mxfp4": {}, "int8": {}}
AUTO = transformers.AutoModelForCausalLM


def plain(name: str, folder: Path) -> Any:
    """Write a random model."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES, **ARCHITECTURES.get(name, {}))
    model = AUTO.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


def eager(model: Any, folder: Path) -> Any:
    """Return the plain model with the dequantized weights of a quantized one."""
    other = AUTO.from_pretrained(folder).eval()
    for name, layer in model.named_modules():
        if isinstance(layer, GroupedLinear):
            path, _, stack = name.replace(".quantized.", ".").rpartition(".")
            module = other.get_submodule(path)
            weight = getattr(module, stack)
            values = layer.canonical.dequantize("float32").unflatten(0, (layer.experts, -1))
            weight.data = values.transpose(1, 2).contiguous() if module.is_transposed else values
        elif isinstance(layer, ladder.Linear):
            other.get_submodule(name).weight.data = layer.canonical.dequantize("float32")
    return other


def same_tokens(model: Any, other: Any) -> bool:
    """Compare logits, and 12 tokens that were chosen greedily."""
    assert torch.allclose(logits(model), logits(other), atol=2e-4, rtol=2e-3)
    made = [m.generate(TOKENS, max_new_tokens=12, do_sample=False) for m in (model, other)]
    return torch.equal(*made)


def linears(model: Any) -> list[str]:
    """Return the names of a plain model's layers that are quantized, stacks of experts aside."""
    found = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return [name for name in found if name != "lm_head"]


def layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, ladder.Linear)]


CASES = [(name, weight) for name in ARCHITECTURES for weight in TYPES]


@pytest.mark.parametrize(("name", "weight"), CASES)
def test_loaded_quantized_and_saved(name: str, weight: str, tmp_path: Path) -> None:
    wanted = linears(plain(name, tmp_path / "plain"))
    config = LadderConfig(weight, **TYPES[weight])
    model = AUTO.from_pretrained(tmp_path / "plain", quantization_config=config).eval()
    stacks = [layer for layer in layers(model) if isinstance(layer, GroupedLinear)]
    assert len(stacks) == (4 if "num_experts" in ARCHITECTURES[name] else 0)
    assert len(layers(model)) - len(stacks) == len(wanted)
    assert same_tokens(model, eager(model, tmp_path / "plain"))
    model.save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    again, info = AUTO.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()), "nothing is reported as missing or unexpected"
    assert len(layers(again)) == len(layers(model))
    assert torch.equal(logits(again.eval()), logits(model))


def store(folder: Path, target: Path, form: str) -> None:
    """Rewrite a model's folder as another tool would have stored it, experts one by one."""
    make, config = STORED[form]
    rewrite(folder, target, config, lambda name: bool(re.search(r"proj|c_fc|\.experts\.", name)), make)


def rewrite(
    folder: Path,
    target: Path,
    config: dict[str, Any],
    chosen: Callable[[str], bool],
    make: Callable[..., Any],
) -> None:
    target.mkdir()
    arrays: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        prefix, _, last = name.rpartition(".")
        linear = last == "weight" and value.ndim == 2 and chosen(prefix)
        parts = make(value) if linear else {last: value}
        arrays |= {f"{prefix}.{part}": array for part, array in parts.items()}
    save_file(arrays, target / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**content, "quantization_config": config}))


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_oss", "apertus"])
def test_dequantized_models_are_plain_ones(name: str, tmp_path: Path) -> None:
    plain(name, tmp_path / "plain")
    model = AUTO.from_pretrained(tmp_path / "plain", quantization_config=LadderConfig("int4", group_size=32))
    found = logits(model.eval())
    model.save_pretrained(tmp_path / "quantized")  # from now on the configuration names the type
    model.dequantize().save_pretrained(tmp_path / "saved")
    assert not layers(model)
    again = AUTO.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model))
    assert torch.allclose(logits(model), found, atol=2e-4, rtol=2e-3)


def test_modules_on_disks_are_refused(tmp_path: Path) -> None:
    plain("llama", tmp_path / "plain")
    with pytest.raises(ladder.DeviceError, match="no module onto a disk"):
        AUTO.from_pretrained(
            tmp_path / "plain",
            quantization_config=LadderConfig("int4", group_size=32),
            device_map={"model": "disk", "lm_head": "cpu"},
            offload_folder=tmp_path,
        )


@pytest.mark.parametrize("form", STORED)
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "gpt_oss"])
def test_formats_of_other_tools(name: str, form: str, tmp_path: Path) -> None:
    wanted = linears(plain(name, tmp_path / "plain"))
    store(tmp_path / "plain", tmp_path / "stored", form)
    model = load_pretrained(AUTO, tmp_path / "stored").eval()
    assert len(layers(model)) == len(wanted) + (4 if "num_experts" in ARCHITECTURES[name] else 0)
    assert same_tokens(model, eager(model, tmp_path / "plain"))


def test_who_holds_experts_may_initialise_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Qwen3-Omni's blocks do."""
    plain("mixtral", tmp_path / "plain")
    store(tmp_path / "plain", tmp_path / "stored", next(iter(STORED)))
    base: Any = transformers.MixtralPreTrainedModel
    before = base._init_weights

    def initialise(self: Any, module: Any) -> None:
        before(self, module)
        if hasattr(module, "experts"):
            transformers.initialization.normal_(module.experts.gate_up_proj)

    monkeypatch.setattr(base, "_init_weights", initialise)
    model = load_pretrained(AUTO, tmp_path / "stored").eval()
    assert same_tokens(model, eager(model, tmp_path / "plain"))


def as_nvfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what llm-compressor stores of a layer: with a scale of its own, by which values are divided."""
    q = ladder.quantize(weight, "nvfp4")
    return {
        "weight_packed": q.storage,
        "weight_scale": q.scale,
        "weight_global_scale": torch.tensor([1 / q.tensor_scale]),
    }


def test_experts_have_factors_of_their_own(tmp_path: Path) -> None:
    """NVFP4: experts that differ in the scale of the whole matrix were refused."""
    plain("mixtral", tmp_path / "plain")
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    chosen = re.compile(r"proj|\.experts\.").search
    rewrite(tmp_path / "plain", tmp_path / "stored", config, lambda name: bool(chosen(name)), as_nvfp4)
    model = load_pretrained(AUTO, tmp_path / "stored").eval()
    assert same_tokens(model, eager(model, tmp_path / "plain"))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(AUTO.from_pretrained(tmp_path / "saved").eval()), logits(model))


def as_packed(weight: torch.Tensor, bits: int, group: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what compressed-tensors stores of integers, codes beside the middle one, and their values."""
    tiles = weight.unflatten(-1, (-1, group))
    scale = tiles.abs().amax(-1) / (2 ** (bits - 1) - 1)
    codes = (tiles / scale[..., None]).round().long()
    biased = (codes + 2 ** (bits - 1)).flatten(-2).unflatten(-1, (-1, 32 // bits))
    words = (biased << bits * torch.arange(32 // bits)).sum(-1).to(torch.int32)
    arrays = {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    return arrays, (codes * scale[..., None]).flatten(-2)


def test_experts_of_several_types(tmp_path: Path) -> None:
    """Down projections of more bits: transformers takes one group of the configuration for all."""
    plain("qwen3_moe", tmp_path / "plain")
    forms: dict[int, tuple[str, int, int]] = {64: ("(gate|up)_proj", 4, 32), 96: ("down_proj", 8, 96)}
    groups = {
        f"group_{k}": {
            "targets": [f"re:.*experts.*{names}"],
            "weights": {"type": "int", "strategy": "group", "num_bits": bits, "group_size": group},
        }
        for k, (names, bits, group) in forms.items()
    }
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    wanted: dict[int, list[torch.Tensor]] = {64: [], 96: []}

    def make(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        k = weight.shape[1]
        arrays, values = as_packed(weight, *forms[k][1:])
        wanted[k].append(values)
        return arrays

    rewrite(tmp_path / "plain", tmp_path / "stored", config, lambda name: "experts" in name, make)
    model = load_pretrained(AUTO, tmp_path / "stored").eval()
    found = [layer.canonical.dequantize("float32") for layer in layers(model)]
    for k, values in wanted.items():  # by layer, expert, gates before ups
        assert torch.equal(torch.cat([each for each in found if each.shape[1] == k]), torch.cat(values))
    assert same_tokens(model, eager(model, tmp_path / "plain"))


def tokenizer(folder: Path) -> None:
    """Write a tokenizer of numbers: each is its own token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({str(at): at for at in range(64)}, unk_token="3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


GENERATED = [
    (name, form)
    for name in ARCHITECTURES
    for form in ("int4", *STORED)
    if name != "gpt_oss" or form == "int4"  # its experts are stored in a form of their own
]


@pytest.mark.parametrize(("name", "form"), GENERATED)
def test_ladder_generate(name: str, form: str, tmp_path: Path) -> None:
    """The command, its model compiled: its text is that of the dequantized weights, run by torch."""
    folder = tmp_path / "plain"
    plain(name, folder)
    if form in STORED:
        store(folder, tmp_path / "stored", form)
    path = tmp_path / "stored" if form in STORED else folder
    tokenizer(path)
    request = Request(path, "5 9 33 7 60 2", group_size=GROUP, tokens=12, dtype="float32", device="cpu")
    ready = load(request)
    found = run_generate(request, ready, lambda piece: None)
    given = ready.tokenizer(request.prompt, return_tensors="pt")  # architectures have their own
    given = {name: given[name] for name in ("input_ids", "attention_mask")}
    made = eager(ready.model, folder).generate(**given, max_new_tokens=12, do_sample=False)
    wanted = made[0, given["input_ids"].shape[1] :]
    assert found["tokens"] == len(wanted) == 12
    assert found["text"] == ready.tokenizer.decode(wanted, skip_special_tokens=True)
    records = int(re.search(r"(\d+) records", found["graphs"])[1])
    assert records <= 6, "it records at every token"


def as_blocks(weight: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """Return a stack [E, N, K] as gpt-oss stores it."""
    parts = [ladder.quantize(matrix, "mxfp4") for matrix in weight]
    blocks = torch.stack([part.storage for part in parts]).unflatten(-1, (-1, 16))
    return {
        f"{name}_blocks": blocks,
        f"{name}_scales": torch.stack([part.scale.view(torch.uint8) for part in parts]),
    }


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    plain("gpt_oss", tmp_path / "plain")
    (tmp_path / "stored").mkdir()
    arrays: dict[str, torch.Tensor] = {}
    for name, value in load_file(tmp_path / "plain" / "model.safetensors").items():
        stack = name.endswith(("gate_up_proj", "down_proj"))
        arrays |= as_blocks(value.transpose(1, 2), name) if stack else {name: value}
    save_file(arrays, tmp_path / "stored" / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((tmp_path / "plain" / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (tmp_path / "stored" / "config.json").write_text(json.dumps(content))
    model = load_pretrained(AUTO, tmp_path / "stored").eval()
    assert sum(isinstance(layer, GroupedLinear) for layer in layers(model)) == len(layers(model)) == 4
    assert same_tokens(model, eager(model, tmp_path / "plain"))


def test_experts_that_are_half_quantized_are_refused(tmp_path: Path) -> None:
    plain("mixtral", tmp_path / "plain")
    config = STORED["gptq"][1]
    rewrite(tmp_path / "plain", tmp_path / "stored", config, lambda name: name.endswith("w2"), as_gptq)
    with pytest.raises(ladder.LadderError, match="gate_up_proj is not quantized"):
        load_pretrained(AUTO, tmp_path / "stored")


def test_experts_that_are_skipped_stay(tmp_path: Path) -> None:
    plain("qwen3_moe", tmp_path / "plain")
    config = LadderConfig("int4", group_size=GROUP, modules_to_not_convert=["lm_head", "experts"])
    model = AUTO.from_pretrained(tmp_path / "plain", quantization_config=config).eval()
    assert not any(isinstance(layer, GroupedLinear) for layer in layers(model))
    assert same_tokens(model, eager(model, tmp_path / "plain"))


def test_the_example_of_the_readme() -> None:
    """It runs here, in a process that has what transformers imports of torchvision."""
    page = Path(ladder.__file__).parent / "integrations" / "README.md"
    (block,) = re.findall(r"<!-- test: transformers -->\n```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert any(isinstance(layer, GroupedLinear) for layer in layers(names["model"]))


def as_int8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], str]:
    """Return the arrays and the description of torchao's int8."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    data = {"act_quant_kwargs": None, "block_size": [1, weight.shape[1]]}
    said = {"_type": "Int8Tensor", "_data": data, "_tensor_data_names": ["qdata", "scale"]}
    return {"_qdata": (weight / scale).round().to(torch.int8), "_scale": scale}, json.dumps(said)


def test_torchaos_tensors_are_described_by_the_names_of_the_model(tmp_path: Path) -> None:
    """transformers stores them by the names that files of the architecture always had."""
    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    config = transformers.ViTConfig(**sizes, num_hidden_layers=1, image_size=16, patch_size=8)
    model, images = transformers.ViTModel(config).eval(), torch.randn(2, 3, 16, 16)
    model.save_pretrained(tmp_path)
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    file = tmp_path / "model.safetensors"
    arrays, header = load_file(file), {"format": "pt"}
    for stored, values in [(name, values) for name, values in arrays.items() if values.dim() == 2]:
        name = next(name for name, layer in linear.items() if torch.equal(layer.weight, values))
        codes, header[f"{name}.weight"] = as_int8(arrays.pop(stored))
        prefix = stored.removesuffix("weight") + "_weight"
        arrays |= {prefix + part: value for part, value in codes.items()}
        linear[name].weight.data = codes["_qdata"] * codes["_scale"]
    save_file(arrays, file, metadata=header)
    said = json.loads((tmp_path / "config.json").read_text())
    said["quantization_config"] = {"quant_method": "torchao"}
    (tmp_path / "config.json").write_text(json.dumps(said))
    loaded = load_pretrained(transformers.ViTModel, tmp_path).eval()
    assert sum(isinstance(layer, ladder.Linear) for layer in loaded.modules()) == len(header) - 1
    found, wanted = loaded(images).last_hidden_state, model(images).last_hidden_state
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()
    with pytest.raises(ladder.CheckpointError, match="described by another name"):
        ladder.load_checkpoint(tmp_path)


def test_layers_that_are_more_than_a_product_are_dequantized(tmp_path: Path) -> None:
    """PhiMoE's routers are derived from linear layers, and quantized by tools that ask for no more."""
    torch.manual_seed(0)
    config = transformers.PhimoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    AUTO.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    arrays, as_stored = load_file(file), STORED["fp8-blocks"]
    routers = [name for name in arrays if name.endswith(("router.weight", "gate.weight"))]
    assert len(routers) == SIZES["num_hidden_layers"]
    for name in routers:
        parts = as_stored[0](arrays.pop(name))
        arrays |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
    save_file(arrays, file, metadata={"format": "pt"})
    said = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": as_stored[1]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    loaded, stored = load_pretrained(AUTO, tmp_path), ladder.load_checkpoint(tmp_path)
    found = [layer.weight for layer in loaded.modules() if type(layer).__name__ == "PhimoeTopKRouter"]
    assert len(found) == len(routers)
    for weight, name in zip(found, routers, strict=True):
        assert torch.equal(weight, stored.dequantize(name, torch.float32))
