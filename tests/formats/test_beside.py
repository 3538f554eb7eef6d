"""What lies beside codes, and would be lost: read with them, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ladder
from ladder.faults import LadderWarning
from ladder.integrations.engine_layers import Configuration

FILES = Path(__file__).parent / "files"
EXPECTED = json.loads((FILES / "expected.json").read_text())
N, K = 32, 128


def changed(
    name: str, folder: Path, arrays: dict[str, torch.Tensor], config: dict[str, Any] | None = None
) -> Path:
    """Write a tool's file with further arrays, and further words in its configuration."""
    file = FILES / f"{name}.safetensors"
    save_file({**load_file(file), **arrays}, folder / "model.safetensors")
    stated = {**EXPECTED[file.name]["config"], **(config or {})}
    (folder / "config.json").write_text(json.dumps({"quantization_config": stated or None}))
    return folder


BESIDE = {
    "ParoQuant": (
        "awq_gemm",
        {"layer.theta": torch.rand(8, K // 2), "layer.channel_scales": torch.rand(1, K)},
    ),
    "EoRA": (
        "gptq_v2_4bit",
        {"layer.lora_A.weight": torch.rand(4, K), "layer.lora_B.weight": torch.rand(N, 4)},
    ),
    "SVDQuant": ("modelopt_nvfp4", {"layer.svdquant_lora_a": torch.rand(4, K)}),
    "SINQ": ("hqq_4bit", {"layer.scale2": torch.rand(1, K)}),
    "Quark's rotations": ("modelopt_mxfp4", {"layer.input_rotation": torch.rand(32, 32)}),
    "BitNet's norms": ("bitnet_autobitlinear", {"layer.rms_norm.weight": torch.rand(K)}),
    "smoothing": ("awq_gemm", {"layer.smooth": torch.rand(K)}),
}


@pytest.mark.parametrize("what", BESIDE)
def test_arrays_that_no_format_knows_are_refused(what: str, tmp_path: Path) -> None:
    """Each of these was read as if nothing lay beside the codes."""
    name, arrays = BESIDE[what]
    with pytest.raises(ladder.CheckpointError, match=r"layer\.\w+.*beside the codes of layer\.weight"):
        ladder.load_checkpoint(changed(name, tmp_path, arrays))


@pytest.mark.parametrize("name", ["shared_input_rotation_256", "model.shared_input_rotation_256"])
def test_rotations_that_layers_share_are_refused(name: str, tmp_path: Path) -> None:
    """Quark stores one for all layers of a size, which lies beside none of them."""
    with pytest.raises(ladder.CheckpointError, match=f"^.*{name}: rotations of inputs"):
        ladder.load_checkpoint(changed("modelopt_mxfp4", tmp_path, {name: torch.rand(32, 32)}))


def test_what_weights_do_not_depend_on_is_allowed(tmp_path: Path) -> None:
    names = (
        "bias",
        "input_scale",
        "activation_global_scale_bits",
        "input_global_scale",
        "k_scale",
        "output_scale",
        "activation_scale",
        "scale_input",
    )
    arrays = {f"layer.{name}": torch.ones(1) for name in names}
    checkpoint = ladder.load_checkpoint(changed("ct_fp8_channel", tmp_path, arrays))
    assert set(checkpoint.plain) == set(arrays)


WITHOUT_A_CONFIGURATION = {
    "EETQ": {"weight": torch.int8, "weight_scales": torch.float16},
    "executorch": {"weight": torch.int8, "scales": torch.float32},
    "gpt-fast": {"weight": torch.int32, "scales_and_zeros": torch.bfloat16},
    "AQLM": {"codes": torch.int8, "codebooks": torch.float16, "scales": torch.float16},
    "TensorRT-LLM": {"weight": torch.uint8, "weights_scaling_factor": torch.float16},
    "MLC": {"q_weight": torch.int32, "q_scale": torch.float16},
    "EXL3": {"trellis": torch.int16, "suh": torch.float16},
    "QuIP#": {"Qidxs": torch.int64, "SU": torch.float16},
    "sparse": {"compressed": torch.float16, "bitmask": torch.uint8},
    "SVDQuant": {"qweight": torch.int8, "wscales": torch.float16, "proj_down": torch.float16},
}


@pytest.mark.parametrize("tool", WITHOUT_A_CONFIGURATION)
def test_codes_of_other_tools_are_no_tensors(tool: str, tmp_path: Path) -> None:
    """Nothing says how they are quantized, but what lies beside them."""
    arrays = {
        f"a.b.{name}": torch.ones(4, 8, dtype=kind) for name, kind in WITHOUT_A_CONFIGURATION[tool].items()
    }
    save_file(arrays, tmp_path / "model.safetensors")
    named = tool in ("MLC", "EXL3", "QuIP#", "SVDQuant")
    with pytest.raises(ladder.CheckpointError, match=f"{tool if named else ''}.* form that is not read"):
        ladder.load_checkpoint(tmp_path)


OF_NAMED_METHODS = {
    "exl2": {"q_weight": torch.int32, "q_scale": torch.int32, "q_scale_max": torch.float16},
    "exl3": {"trellis": torch.int16, "suh": torch.float16},
    "fp_quant": {"qweight": torch.uint8, "scales": torch.uint8, "forward_hadamard_matrix": torch.bfloat16},
    "sinq": {"W_q": torch.uint8},
    "squeezellm": {"qweight": torch.int32, "lookup_table": torch.float16},
}


@pytest.mark.parametrize(("method", "dtype"), [("w8a8_int8", torch.int8), ("w8a8_fp8", torch.float8_e4m3fn)])
def test_sglangs_own_methods_have_scales_of_rows(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    codes, scale = torch.randint(-8, 8, (N, K)).to(dtype), torch.rand(N, 1)
    save_file({"a.weight": codes, "a.weight_scale": scale}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    assert torch.equal(ladder.load_checkpoint(tmp_path).dequantize("a.weight"), codes.float() * scale)


@pytest.mark.parametrize("method", OF_NAMED_METHODS)
def test_methods_that_are_not_read_are_named(method: str, tmp_path: Path) -> None:
    """Also where the name of an array is that of another method's codes, whose parts were asked for."""
    arrays = {f"a.{name}": torch.ones(4, 8, dtype=kind) for name, kind in OF_NAMED_METHODS[method].items()}
    save_file(arrays, tmp_path / "model.safetensors")
    content = {"quantization_config": {"quant_method": method, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ladder.CheckpointError, match=f"the method '{method}' is not read"):
        ladder.load_checkpoint(tmp_path)


def test_casts_without_scales_are_tensors(tmp_path: Path) -> None:
    """Weights cast to fp8, beside norms that have a ``scale`` of their own; integers that are no codes."""
    arrays = {
        "a.qkv.weight": torch.ones(4, 8).to(torch.float8_e4m3fn),
        "a.qkv.input_scale": torch.ones(1),
        "a.norm.scale": torch.ones(8),
        "a.index": torch.ones(4, 4, dtype=torch.int64),
    }
    save_file(arrays, tmp_path / "model.safetensors")
    assert set(ladder.load_checkpoint(tmp_path)) == set(arrays)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"transform_config": {"config_groups": {"R3": {"apply": [{"location": "input"}]}}}}, True),
        ({"transform_config": {"config_groups": {"R1": {"apply": [{"location": "weight_output"}]}}}}, False),
        ({"rotation_config": {"hadamard_type": "hadamard", "block_size": 32}}, True),
        ({"spinquant_config": {"r1": True}}, True),
        ({"rotation_config": None}, False),
        ({"rotation": "hadamard"}, True),  # GPTQModel's: inputs of down_proj, of which no array tells
        ({"rotation": None}, False),
    ],
)
def test_transforms_of_a_running_model_are_refused(
    config: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    changed("ct_pack_4bit", tmp_path, {}, config)
    if refused:
        with pytest.raises(ladder.CheckpointError, match="the configuration"):
            ladder.load_checkpoint(tmp_path)
    else:
        assert "layer.weight" in ladder.load_checkpoint(tmp_path).layers


def test_a_transform_is_named_rather_than_its_arrays(tmp_path: Path) -> None:
    """QuIP's of llm-compressor: matrices beside the codes, and what they do in the configuration."""
    config = {"transform_config": {"config_groups": {"v": {"apply": [{"location": "input"}]}}}}
    changed("ct_pack_4bit", tmp_path, {"layer.v_input.weight": torch.eye(8)}, config)
    with pytest.raises(ladder.CheckpointError, match=r"transform 'v' of .*input.* is not applied here"):
        ladder.load_checkpoint(tmp_path)


@pytest.mark.parametrize("part", ["q_zero_point", "k_zero_point", "v_zero_point", "input_zero_point"])
def test_zero_points_of_attention_are_no_codes(part: str, tmp_path: Path) -> None:
    """compressed-tensors stores those of 8-bit floats as such, one per head."""
    zeros = torch.zeros(4, 1, 1).to(torch.float8_e4m3fn)
    changed("ct_pack_4bit", tmp_path, {f"attn.{part}": zeros, "attn.q_scale": torch.ones(4, 1, 1)}, {})
    assert "layer.weight" in ladder.load_checkpoint(tmp_path).layers


@pytest.mark.parametrize(("name", "part"), [("quark_nvfp4", "scale_2"), ("ct_fp8_channel", "scale_ub")])
def test_scales_of_inputs_are_no_part_of_weights(name: str, part: str, tmp_path: Path) -> None:
    """The factor of Quark's NVFP4, and FBGEMM's bound, of inputs that are quantized as they come."""
    changed(name, tmp_path, {f"layer.input_{part}": torch.ones(())})
    assert "layer.weight" in ladder.load_checkpoint(tmp_path).layers


ONLINE = {"name": "rotation", "r1": True, "r2": True, "rotation_size": 32}
SAID: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts pruned": (
        "ct_pack_4bit",
        {"moe_sparsity_config": {"method": "prune", "num_experts": [None, 6]}},
        "moe_sparsity_config.*experts",
    ),
    "experts constant": (
        "ct_pack_4bit",
        {"moe_sparsity_config": {"method": "novice", "num_experts": [None, 6]}},
        "moe_sparsity_config.*constants",
    ),
    "a transform of a place that is not known": (
        "ct_pack_4bit",
        {"transform_config": {"config_groups": {"u": {"apply": [{"location": "residual"}]}}}},
        "transform 'u' of .*residual",
    ),
    "EoRA": (
        "gptq_v2_4bit",
        {"adapter": {"name": "lora", "path": "eora", "rank": 64}},
        "'adapter'.*low rank",
    ),
    "EoRA of some layers": (
        "gptq_v2_4bit",
        {"dynamic": {".*up_proj.*": {"bits": 4, "adapter": {"rank": 128}}}},
        "'adapter'.*low rank",
    ),
    "AutoRound's rotation of the head": (
        "autoround_4bit",
        {"extra_config": {"lm_head": {"bits": 8, "rotation_config": {"block_size": 32}}}},
        "rotation_config.*not done",
    ),
    "ModelOpt's branch": ("modelopt_nvfp4", {"quant_algo": "NVFP4_SVD", "lora_rank": 32}, "'lora_rank'"),
    "ModelOpt's branch of a group": (
        "modelopt_nvfp4",
        {"config_groups": {"group_0": {"pre_quant_scale": True, "lora_rank": 32}}},
        "'lora_rank'",
    ),
    "Quark's rotation": (
        "quark_int4",
        {"algo_config": [{**ONLINE, "online_r1_rotation": True}]},
        "algo_config",
    ),
    "Quark's fourth rotation": ("quark_int4", {"algo_config": [{**ONLINE, "r4": True}]}, "algo_config"),
    "Quark's layers that rotate": (
        "quark_int4",
        {"algo_config": [{**ONLINE, "online_config": {"online_rotation_layers": ["layer"]}}]},
        "algo_config",
    ),
    "Quark's branch": ("quark_int4", {"algo_config": [{"name": "svdquant", "svd_rank": 32}]}, "svdquant"),
    "one algorithm of Quark's": ("quark_int4", {"algo_config": {**ONLINE, "r4": True}}, "algo_config"),
}
"""What the newest tools say in a configuration and nowhere else: a file, what is said, and the error."""


@pytest.mark.parametrize("what", SAID)
def test_configurations_of_more_than_weights_are_refused(what: str, tmp_path: Path) -> None:
    """Each of these was read as if the configuration said nothing."""
    name, config, error = SAID[what]
    with pytest.raises(ladder.CheckpointError, match=error):
        ladder.load_checkpoint(changed(name, tmp_path, {}, config))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ct_pack_4bit", {"moe_sparsity_config": None, "sparsity_config": {}, "transform_config": {}}),
        ("gptq_v2_4bit", {"adapter": None, "rotation": None, "meta": {"opt_rotation_epochs": 3}}),
        ("gptq_v2_4bit", {"dynamic": {".*adapter.*": {"bits": 4}, "-:.*lora.*": {}}, "adapter": {}}),
        ("quark_int4", {"algo_config": [ONLINE, {"name": "awq"}, {"name": "smooth", "alpha": 0.5}]}),
        ("quark_int4", {"algo_config": None}),
        ("mlx_4bit", {"model.vision_adapter.fc1": {"bits": 4, "group_size": 64}, "model.lora.x": False}),
        ("autoround_4bit", {"extra_config": {"lm_head": {"bits": 16}}, "super_bits": None, "iters": 200}),
        ("modelopt_nvfp4", {"config_groups": {"group_0": {"pre_quant_scale": False}}}),
    ],
)
def test_configurations_of_what_weights_hold_are_read(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """Rotations and smoothing that are in the weights, what was not used, and names of layers."""
    found = ladder.load_checkpoint(changed(name, tmp_path, {}, config)).dequantize("layer.weight")
    assert torch.equal(found, ladder.load_checkpoint(changed(name, tmp_path, {})).dequantize("layer.weight"))


def test_engines_refuse_configurations_of_more_than_weights() -> None:
    """vLLM's and SGLang's loaders fill layers of ours: no checkpoint of ours is opened there."""
    given = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    assert Configuration(given, "an engine", {"gptq": None}).form == "gptq"
    with pytest.raises(ladder.CheckpointError, match="'adapter'"):
        Configuration({**given, "adapter": {"rank": 8}}, "an engine", {"gptq": None})


def test_how_gptqmodel_quantizes_inputs_is_allowed(tmp_path: Path) -> None:
    """GPTQModel 7.7 says it in a dictionary, which was taken for the type of our layer's inputs."""
    said = {"activation": {"mode": "w4a_nvfp4", "recipe": "least_squares"}}
    matrix = ladder.load_checkpoint(changed("gptq_v2_4bit", tmp_path, {}, said))["layer.weight"]
    served = Configuration({"quant_method": "gptq", **said}, "an engine", {"gptq": None})
    layer = served.hold(matrix, torch.float32, torch.device("cpu"))
    wanted = torch.ones(1, K) @ matrix.dequantize("float32").T
    assert torch.allclose(layer(torch.ones(1, K)), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("shifted", "file"), [(0, "gptq_v2_4bit"), (1, "gptq_v1_4bit"), (0, "autoround_6bit")]
)
def test_qllm_stores_zero_points_as_they_are_unless_it_says_so(
    shifted: int, file: str, tmp_path: Path
) -> None:
    """Its words of 6 bits are streams, as AutoRound's are."""
    changed(file, tmp_path, {})
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    own = ladder.load_checkpoint(tmp_path).dequantize("layer.weight")
    (tmp_path / "config.json").unlink()
    stated = {"bits": config["bits"], "group_size": config["group_size"], "COMPATIBLE_WITH_AUTOGPTQ": shifted}
    said = json.dumps({**stated, "quant_method": "gptq", "version": "GPTQ"})
    (tmp_path / "quant_config.json").write_text(said)
    assert torch.equal(ladder.load_checkpoint(tmp_path).dequantize("layer.weight"), own)


@pytest.mark.parametrize("version", ["gptq_v1_4bit", "gptq_v2_4bit", "gptq_planar_3bit"])
def test_gptqmodels_names_of_forms(version: str, tmp_path: Path) -> None:
    """GPTQModel 7 names the form ``format``; zero points of version 2 were read as those of version 1."""
    changed(version, tmp_path, {})
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())["quantization_config"]
    own = ladder.load_checkpoint(tmp_path).dequantize("layer.weight")
    form = config.pop("checkpoint_format")
    for stated in ({"format": form}, {"format": form, "checkpoint_format": form}):
        file.write_text(json.dumps({"quantization_config": {**config, **stated}}))
        assert torch.equal(ladder.load_checkpoint(tmp_path).dequantize("layer.weight"), own)
    other = "gptq" if form != "gptq" else "gptq_v2"
    contrary = {**config, "format": form, "checkpoint_format": other}
    file.write_text(json.dumps({"quantization_config": contrary}))
    with pytest.raises(ladder.CheckpointError, match="several forms"):
        ladder.load_checkpoint(tmp_path)["layer.weight"]


def test_configurations_of_the_language_model_count(tmp_path: Path) -> None:
    """Models of several modalities have it in ``text_config``: it was passed over."""
    changed("gptq_v2_4bit", tmp_path, {})
    file = tmp_path / "config.json"
    own = ladder.load_checkpoint(tmp_path).dequantize("layer.weight")
    config = json.loads(file.read_text())["quantization_config"]
    part = {"hidden_size": 8, "quantization_config": config}
    file.write_text(json.dumps({"model_type": "vlm", "text_config": part}))
    checkpoint = ladder.load_checkpoint(tmp_path)
    assert checkpoint.config == config
    assert torch.equal(checkpoint.dequantize("layer.weight"), own)
    file.write_text(json.dumps({"text_config": part, "other": {"quantization_config": {"bits": 8}}}))
    with pytest.raises(ladder.CheckpointError, match="several quantization_config"):
        ladder.load_checkpoint(tmp_path)


def test_modelopts_own_file_of_its_configuration(tmp_path: Path) -> None:
    """Exports before ModelOpt 0.29 have nothing else: it was not read."""
    changed("modelopt_nvfp4", tmp_path, {})
    own = ladder.load_checkpoint(tmp_path).dequantize("layer.weight")
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "hf_quant_config.json"
    said: dict[str, Any] = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    checkpoint = ladder.load_checkpoint(tmp_path)
    assert checkpoint.config["quant_method"] == "modelopt"
    assert torch.equal(checkpoint.dequantize("layer.weight"), own)
    said |= {"quant_algo": "NVFP4_SVD", "lora_rank": 32}
    file.write_text(json.dumps({"quantization": said}))
    with pytest.raises(ladder.CheckpointError, match="lora_rank"):
        ladder.load_checkpoint(tmp_path)


def test_attention_that_would_leave_keys_out_is_named(tmp_path: Path) -> None:
    """ModelOpt's `sparse_attention_config` changes what a model computes, not its weights: said once."""
    changed("modelopt_nvfp4", tmp_path, {})
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    own = ladder.load_checkpoint(tmp_path).dequantize("layer.weight")
    sparse = {"config_groups": {"group_0": {"sparse_algo": "softmax_skip"}}}
    file.write_text(json.dumps({**content, "sparse_attention_config": sparse}))
    with pytest.warns(LadderWarning, match="sparse_attention_config is not applied"):
        checkpoint = ladder.load_checkpoint(tmp_path)
    assert torch.equal(checkpoint.dequantize("layer.weight"), own)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16}, "convrot"),
        ({"format": "convrot_w4a4"}, "'convrot_w4a4' is not read"),
        ({}, "None is not read"),
    ],
)
def test_comfyui_formats_that_are_not_read_are_named(text: dict[str, Any], word: str, tmp_path: Path) -> None:
    mark = torch.tensor(list(json.dumps(text).encode()), dtype=torch.uint8)
    with pytest.raises(ladder.CheckpointError, match=word):
        ladder.load_checkpoint(changed("comfy_int8", tmp_path, {"layer.comfy_quant": mark}))


@pytest.mark.parametrize("name", ["comfy_nvfp4", "comfy_mxfp8"])
def test_comfyui_may_describe_layers_in_the_header(name: str, tmp_path: Path) -> None:
    """The layers of both descriptions are equal: scales in tiles, NVFP4's first code in the upper half."""
    arrays = load_file(FILES / f"{name}.safetensors")
    layers = {"layer": json.loads(bytes(arrays.pop("layer.comfy_quant").tolist()))}
    header = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    save_file(arrays, tmp_path / "model.safetensors", header)
    expected = ladder.load_checkpoint(FILES / f"{name}.safetensors")
    found = ladder.load_checkpoint(tmp_path)
    assert torch.equal(found.dequantize("layer.weight"), expected.dequantize("layer.weight"))


@pytest.mark.parametrize(
    ("name", "extents", "says"),
    [
        ("comfy_nvfp4_padded", [30, 70], ""),
        ("comfy_mxfp8", [33, 65], ""),
        ("comfy_nvfp4_padded", [40, 70], "orig_shape"),
        ("comfy_mxfp8", [40, 1.5], "orig_shape"),
    ],
)
def test_comfyui_may_say_extents_without_padding(
    name: str, extents: list[Any], says: str, tmp_path: Path
) -> None:
    arrays = load_file(FILES / f"{name}.safetensors")
    header = {"_quantization_metadata": json.dumps({"layers": {"layer": {"orig_shape": extents}}})}
    save_file(arrays, tmp_path / "model.safetensors", header)
    checkpoint = ladder.load_checkpoint(tmp_path)
    if says:
        with pytest.raises(ladder.CheckpointError, match=says):
            checkpoint.entry("layer.weight")
        return
    padded = ladder.load_checkpoint(FILES / f"{name}.safetensors").dequantize("layer.weight")
    assert checkpoint.entry("layer.weight").shape == tuple(extents)
    assert torch.equal(checkpoint.dequantize("layer.weight"), padded[: extents[0], : extents[1]])


@pytest.mark.parametrize(("kind", "grid"), [("rowwise", (N, 1)), ("blockwise", (2, 4))])
def test_fp8_of_comfyui_with_scales_of_parts(kind: str, grid: tuple[int, int], tmp_path: Path) -> None:
    codes, scale = torch.randn(N, K).to(torch.float8_e4m3fn), torch.rand(grid)
    text = json.dumps({"format": f"float8_e4m3fn_{kind}"}).encode()
    stored = scale.squeeze(1) if kind == "rowwise" else scale
    arrays = {
        "a.weight": codes,
        "a.weight_scale": stored.clone(),
        "a.comfy_quant": torch.tensor(list(text), dtype=torch.uint8),
    }
    save_file(arrays, tmp_path / "model.safetensors")
    own = codes.float() * torch.kron(scale, torch.ones(N // grid[0], K // grid[1]))
    assert torch.equal(ladder.load_checkpoint(tmp_path).dequantize("a.weight"), own)


@pytest.mark.parametrize("scale", [torch.tensor(0.3), torch.rand(N, 1), torch.rand(N, 4, 1)])
def test_scaled_fp8_of_comfyui(scale: torch.Tensor, tmp_path: Path) -> None:
    """One scale, musubi-tuner's of rows, and of parts of rows."""
    codes = torch.randn(N, K).to(torch.float8_e4m3fn)
    marker = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    arrays = {"a.weight": codes, "a.scale_weight": scale, "a.scale_input": torch.ones(1), **marker}
    save_file(arrays, tmp_path / "model.safetensors")
    parts = scale.reshape(-1, scale.shape[1] if scale.ndim == 3 else 1)
    own = (codes.float().view(N, parts.shape[1], -1) * parts[..., None]).view(N, K)
    assert torch.equal(ladder.load_checkpoint(tmp_path).dequantize("a.weight"), own)


@pytest.mark.parametrize("kind", ["NVFP4", "TQ2_0", "Q4_K", "Q8_0"])
@pytest.mark.parametrize("experts", [0, 3])
def test_factors_of_gguf_tensors(kind: str, experts: int, tmp_path: Path) -> None:
    """llama.cpp multiplies the products of ``a.weight`` by ``a.scale``: of NVFP4, and of BitNet's."""
    number, random = gguf.GGMLQuantizationType[kind], np.random.default_rng(3)
    elements, nbytes = gguf.GGML_QUANT_SIZES[number]
    octets = random.integers(0, 64, (*[experts] * bool(experts), 2, 512 // elements * nbytes), dtype=np.uint8)
    factors = random.random(max(experts, 1), dtype=np.float32)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("a.weight", octets, raw_dtype=number)
    writer.add_tensor("a.scale", factors)
    writer.add_tensor("a.input_scale", np.ones(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = ladder.load_checkpoint(tmp_path / "m.gguf")
    own = torch.from_numpy(gguf.quants.dequantize(octets, number)).double()
    own = own * torch.from_numpy(factors).double().view(-1, 1, 1)[: max(experts, 1)].reshape(
        -1, *[1] * (own.ndim - 1)
    )
    found = checkpoint.dequantize("a.weight").double()
    assert found.shape == own.shape
    assert (found - own).abs().max() <= 2e-7 * own.abs().max()
    assert set(checkpoint.plain) == {"a.input_scale"}


def torchao_int8(folder: Path, arrays: dict[str, torch.Tensor], data: dict[str, Any]) -> Path:
    """Write torchao's int8 layer with further arrays and attributes, described as torchao does."""
    file = FILES / "torchao_int8.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = dict(opened.metadata())
    described = json.loads(metadata["layer.weight"])
    described["_data"] |= data
    described["_tensor_data_names"] += [name.removeprefix("layer._weight_") for name in arrays]
    metadata["layer.weight"] = json.dumps(described)
    save_file({**load_file(file), **arrays}, folder / "model.safetensors", metadata=metadata)
    return folder


def test_factors_of_torchaos_inputs_are_refused(tmp_path: Path) -> None:
    """SmoothQuant and AWQ leave them beside int8 codes: they were passed over."""
    path = torchao_int8(tmp_path, {"layer._weight_act_pre_scale": torch.rand(K)}, {})
    with pytest.raises(ladder.CheckpointError, match="scales activations first"):
        ladder.load_checkpoint(path)["layer.weight"]


def test_attributes_of_torchao_that_are_not_known_are_refused(tmp_path: Path) -> None:
    path = torchao_int8(tmp_path, {}, {"rotation": "hadamard", "act_quant_kwargs": None})
    with pytest.raises(ladder.CheckpointError, match="its rotation: what a Int8Tensor does"):
        ladder.load_checkpoint(path)["layer.weight"]


def test_how_torchao_quantizes_inputs_is_allowed(tmp_path: Path) -> None:
    """Static scales of inputs lie beside the codes; they were refused."""
    arrays = {"layer._weight_act_quant_scale": torch.rand(1, 1)}
    path = torchao_int8(tmp_path, arrays, {"act_quant_kwargs": {"_type": "QuantizeTensorToInt8Kwargs"}})
    plain = ladder.load_checkpoint(FILES / "torchao_int8.safetensors")
    found = ladder.load_checkpoint(path)
    assert torch.equal(found.dequantize("layer.weight"), plain.dequantize("layer.weight"))
