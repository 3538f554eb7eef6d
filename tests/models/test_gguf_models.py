"""GGUF files as models of transformers: tokens equal those of the dequantized model, run by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ladder
from benchmarks import zoo

transformers = pytest.importorskip("transformers", minversion="5")
gguf = pytest.importorskip("gguf")
zoo.import_torchvision()
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

from ladder.api.grouped_linear import GroupedLinear  # noqa: E402
from ladder.integrations import gguf_models  # noqa: E402
from ladder.integrations.transformers import load_pretrained  # noqa: E402
from tests.models.test_transformers_formats import eager, same_tokens  # noqa: E402
from tests.models.test_transformers_loading import TOKENS, logits  # noqa: E402
from tile_types.errors import CheckpointError  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_schedule")
AUTO = transformers.AutoModelForCausalLM
HEADS, KEYS, EXPERTS = 4, 2, 3
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 32}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": KEYS, "max_position_embeddings": 64}
ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
MOE = {"moe_intermediate_size": 96, "num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, rope_parameters=ROPE, tie_word_embeddings=False),
    "qwen3moe": transformers.Qwen3MoeConfig(**SIZES, **MOE, tie_word_embeddings=True),
}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.layers.": "blk.", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.o_proj": "attn_output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate.": "ffn_gate_inp.", "mlp.experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
"""Part of a name of transformers -> llama.cpp's."""


def written(kind: str, path: Path, **options: Any) -> Path:
    """Write a random model as llama.cpp's converter does; returns the first file."""
    torch.manual_seed(0)
    config = CONFIGS[kind]
    writer = gguf.GGUFWriter(path, kind, **options)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if kind == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    else:
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = 1 / 10000.0 ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    for name, tensor in AUTO.from_config(config).state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            add(writer, kind, name, torch.nn.init.normal_(tensor, std=0.2).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(path.parent.glob("*-00001-of-*.gguf"), path)


def add(writer: Any, kind: str, name: str, values: np.ndarray) -> None:
    """Write a tensor; queries and keys of Llama in llama.cpp's order, gates and ups of experts apart."""
    if "experts.gate_up_proj" in name:
        layer = name.split(".")[2]
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            add_quantized(writer, f"blk.{layer}.ffn_{part}_exps.weight", half)
        return
    heads = {"q_proj": HEADS, "k_proj": KEYS}.get(name.split(".")[-2], 0)
    if kind == "llama" and heads:
        halves = values.reshape(heads, 2, -1, values.shape[-1])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    if values.ndim == 1 or "gate_inp" in name:
        writer.add_tensor(name, values)
    else:
        add_quantized(writer, name, values)


def add_quantized(writer: Any, name: str, values: np.ndarray) -> None:
    kind = gguf.GGMLQuantizationType.Q5_1 if "ffn_down" in name else gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("options", [{}, {"split_max_tensors": 5}], ids=["whole", "split"])
def test_tokens_equal_those_of_the_dequantized_model(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path = written(kind, tmp_path / "m.gguf", **options)
    model = load_pretrained(AUTO, path).eval()
    layers = [layer for layer in model.modules() if isinstance(layer, ladder.Linear)]
    stacks = [layer for layer in layers if isinstance(layer, GroupedLinear)]
    assert len(layers) - len(stacks) == (15 if kind == "llama" else 8)
    assert len(stacks) == (0 if kind == "llama" else 4)
    folder = tmp_path / "plain"
    plain = AUTO.from_config(CONFIGS[kind])
    named = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        if name in named:
            parameter.data = named[name].data
    plain.save_pretrained(folder)
    assert same_tokens(model, eager(model, folder))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(AUTO.from_pretrained(tmp_path / "saved")), logits(model))


def test_rows_are_put_back_in_order(tmp_path: Path) -> None:
    path = written("llama", tmp_path / "m.gguf")
    model, theirs = load_pretrained(AUTO, path), AUTO.from_pretrained(tmp_path, gguf_file=path.name)
    for name in ("q_proj", "k_proj", "v_proj"):
        found, wanted = (getattr(m.model.layers[1].self_attn, name) for m in (model, theirs))
        assert torch.equal(found.canonical.dequantize("float32"), wanted.weight.float())


def test_orders_of_rows_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One matrix of numbers for the same layer of all blocks; what llama.cpp leaves alone is not gathered."""
    tried: list[str] = []
    process = gguf_models._process

    def counted(processor: Any, array: np.ndarray, stored: str) -> Any:
        tried.extend([stored] if array.dtype == np.int32 else [])
        return process(processor, array, stored)

    monkeypatch.setattr(gguf_models, "_process", counted)
    path = written("llama", tmp_path / "m.gguf")
    _, _, found, _ = gguf_models.model_of(AUTO, path, torch.float32)
    assert len(tried) == 9, tried
    stored = ladder.load_checkpoint(path)
    for ours, theirs in (("mlp.up_proj", "ffn_up"), ("self_attn.v_proj", "attn_v")):
        form, _ = found.layers[f"model.layers.1.{ours}.weight"]
        assert form is stored.layers[f"blk.1.{theirs}.weight"][0]


@pytest.mark.parametrize("most", [1, 300, 1 << 22])
def test_embeddings_are_dequantized_some_rows_at_a_time(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_models, "MOST_VALUES", most)
    path = written("llama", tmp_path / "model.gguf")
    stored, read = ladder.load_checkpoint(path), list[int]()
    whole = stored.dequantize("token_embd.weight", torch.float32)
    dequantize = gguf_models.Checkpoint.dequantize

    def noted(self: Any, name: str, dtype: Any = None) -> torch.Tensor:
        found = dequantize(self, name, dtype)
        read.extend([found.numel()] * (name == "token_embd.weight"))
        return found

    monkeypatch.setattr(gguf_models.Checkpoint, "dequantize", noted)
    values = gguf_models.model_of(AUTO, path, torch.float16)[3]
    assert torch.equal(values["model.embed_tokens.weight"], whole.half())
    assert max(read) <= max(most, whole.shape[1])
    assert sum(read) == whole.numel()


def test_names_are_those_of_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of names are built once, not for each module; of a model without a prefix, for those within."""
    path = written("llama", tmp_path / "model.gguf")
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf")
    whole = AUTO.from_config(config)
    processor = gguf_models.TENSOR_PROCESSORS["llama"](config=config.to_dict())
    wanted, read = gguf_models.get_gguf_hf_weights_map(whole, processor), gguf_models.load_checkpoint(path)
    tables: list[Any] = []
    table = gguf.TensorNameMap.__init__
    count = lambda *given: (tables.append(given), table(*given))[1]  # noqa: E731
    monkeypatch.setattr(gguf.TensorNameMap, "__init__", count)
    assert gguf_models._names(read, whole, processor) == wanted
    assert len(tables) == 1
    within = torch.nn.ModuleDict({"inner": whole})
    within.config = config
    found = gguf_models._names(read, within, processor)
    assert found == {name: f"inner.{place}" for name, place in wanted.items()}
    assert len(tables) == 3


@pytest.mark.parametrize(
    ("architecture", "kind", "message"),
    [
        ("llama", "adapter", "no model: its general.type is 'adapter'"),
        ("clip", "", "no configuration"),
        ("imatrix", "imatrix", "no model: its general.type is 'imatrix'"),
    ],
)
def test_what_is_no_model_is_named(architecture: str, kind: str, message: str, tmp_path: Path) -> None:
    """LoRA adapters, projectors of images, importance matrices."""
    writer = gguf.GGUFWriter(tmp_path / "it.gguf", architecture)
    if kind:
        writer.add_type(kind)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((8, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(AUTO, tmp_path / "it.gguf")


def test_what_has_no_place_is_named(tmp_path: Path) -> None:
    path = written("llama", tmp_path / "m.gguf")
    with pytest.raises(ladder.CheckpointError, match="ForSequenceClassification has no place for output"):
        load_pretrained(transformers.AutoModelForSequenceClassification, path)
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(ladder.CheckpointError, match="truncated"):
        load_pretrained(AUTO, path)


@pytest.mark.parametrize("scaling", ["yarn", "none"])
def test_scalings_of_positions_are_refused(
    scaling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_rope = gguf.GGUFWriter.add_rope_freq_base

    def also_scaled(writer: Any, base: float) -> None:
        add_rope(writer, base)
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))

    monkeypatch.setattr(gguf.GGUFWriter, "add_rope_freq_base", also_scaled)
    path = written("llama", tmp_path / "m.gguf")
    if scaling == "none":
        assert logits(load_pretrained(AUTO, path)).shape[-1] == 64
    else:
        with pytest.raises(ladder.CheckpointError, match=r"rope\.scaling\.type is 'yarn'"):
            load_pretrained(AUTO, path)


def test_compiled(tmp_path: Path) -> None:
    model = load_pretrained(AUTO, written("llama", tmp_path / "m.gguf")).eval()
    fast = ladder.compile(model)
    with torch.no_grad():
        for _ in range(2):
            found = fast(TOKENS).logits
    assert torch.allclose(found, logits(model), atol=1e-3)
