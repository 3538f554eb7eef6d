"""diffusers: models of pipelines, quantized while they are loaded, saved and loaded again."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ladder

pytest.importorskip("diffusers", reason="diffusers is not installed: pip install 'ladder-compiler[engines]'")
from benchmarks import zoo

zoo.import_torchvision()
import diffusers  # noqa: E402

from ladder.integrations.diffusers import LadderConfig  # noqa: E402

FILE = "diffusion_pytorch_model.safetensors"
LATENT, CONTEXT = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 32)


def unet() -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(32,), layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
    ).eval()  # fmt: skip


def transformer() -> Any:
    torch.manual_seed(0)
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=1,
        sample_size=8, norm_num_groups=8, num_embeds_ada_norm=16,
    ).eval()  # fmt: skip


def called(model: Any) -> torch.Tensor:
    if isinstance(model, diffusers.UNet2DConditionModel):
        given = {"encoder_hidden_states": CONTEXT}
    else:
        given = {"class_labels": torch.tensor([1, 3])}
    with torch.no_grad():
        return model(LATENT, timestep=torch.tensor([3, 5]), **given).sample


def layers(model: Any) -> dict[str, ladder.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ladder.Linear)}


def linears(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """Write a random pipeline's denoiser, whole and in shards."""
    path: Path = tmp_path_factory.mktemp("models")
    for name, make in {"unet": unet, "transformer": transformer}.items():
        make().save_pretrained(path / name)
        make().save_pretrained(path / f"{name}-shards", max_shard_size="40KB")
    return path


@pytest.mark.parametrize("shards", ["", "-shards"])
@pytest.mark.parametrize("name", ["unet", "transformer"])
def test_quantized_saved_and_loaded(name: str, shards: str, folder: Path, tmp_path: Path) -> None:
    plain = {"unet": unet, "transformer": transformer}[name]()
    kind, wanted = type(plain), linears(plain)
    config = LadderConfig("int4", group_size=16)
    model = kind.from_pretrained(folder / (name + shards), quantization_config=config)
    assert sorted(layers(model)) == sorted(wanted)
    for path, layer in layers(model).items():
        weight = plain.get_submodule(path).weight
        expected = ladder.quantize(weight, "int4", group_size=16)
        assert torch.equal(layer.canonical.storage, expected.storage)
        weight.data = expected.dequantize("float32")
    exact = called(plain)
    assert (called(model) - exact).norm() <= 1e-5 * exact.norm()

    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB" if shards else "1GB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > (1 if shards else 0)
    again = kind.from_pretrained(tmp_path / "saved")
    assert torch.equal(called(again), called(model))


def test_what_quantize_made_of_a_model_is_saved_and_loaded(tmp_path: Path) -> None:
    """diffusers initialises at random what it misses: configurations say that layers are Ladder's."""
    model = ladder.quantize_(transformer(), "int4", group_size=16, overrides={"*.to_k": "int8"})
    model.save_pretrained(tmp_path)
    found = diffusers.DiTTransformer2DModel.from_pretrained(tmp_path).eval()
    assert torch.equal(called(found), called(model))
    assert found.transformer_blocks[0].attn1.to_k.canonical.ttype.name == "int8"


def test_pipelines(folder: Path, tmp_path: Path) -> None:
    pipe = diffusers.DDPMPipeline(diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(16, 32), layers_per_block=1,
        norm_num_groups=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    ), diffusers.DDPMScheduler(num_train_timesteps=10))  # fmt: skip
    pipe.save_pretrained(tmp_path / "plain")
    arguments = {"weight": "int8", "modules_to_not_convert": ["time_embedding"], "group_size": 16}
    configs = (
        diffusers.PipelineQuantizationConfig(quant_backend="ladder", quant_kwargs=arguments),
        diffusers.PipelineQuantizationConfig(quant_mapping={"unet": LadderConfig(**arguments)}),
    )
    images = []
    for config in configs:
        model = diffusers.DDPMPipeline.from_pretrained(tmp_path / "plain", quantization_config=config)
        assert len(layers(model.unet)) == len(linears(pipe.unet)) - 2
        model.save_pretrained(tmp_path / "saved")
        again = diffusers.DDPMPipeline.from_pretrained(tmp_path / "saved")
        for each in (model, again):
            each.set_progress_bar_config(disable=True)
            made = each(generator=torch.Generator().manual_seed(0), num_inference_steps=2, output_type="np")
            images.append(torch.from_numpy(made.images))
    for image in images:  # torch's convolutions of a copy elsewhere in memory may differ in the last bit
        torch.testing.assert_close(image, images[0], atol=1e-6, rtol=0)


def test_types_and_skipped_modules(folder: Path) -> None:
    config = LadderConfig("nf4", group_size=16, modules_to_not_convert=["time_embedding"])
    model = diffusers.UNet2DConditionModel.from_pretrained(
        folder / "unet", quantization_config=config, torch_dtype=torch.bfloat16
    )
    assert len(layers(model)) == len(linears(unet())) - 2
    assert {layer.dtype for layer in layers(model).values()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_wrong_use_is_named(folder: Path, tmp_path: Path) -> None:
    kind = diffusers.UNet2DConditionModel
    with pytest.raises(ladder.LadderError, match="did you mean 'int8'"):
        kind.from_pretrained(folder / "unet", quantization_config=LadderConfig("int99"))
    with pytest.raises(ladder.ShapeError, match="group_size") as caught:
        kind.from_pretrained(folder / "unet", quantization_config=LadderConfig("int4", group_size=4096))
    assert "while quantizing" in caught.value.__notes__[0]
    with pytest.raises(ladder.DeviceError, match="onto one device"):
        kind.from_pretrained(
            folder / "unet", quantization_config=LadderConfig(), device_map={"conv_in": "cpu", "": "meta"}
        )
    config = LadderConfig("int4", group_size=16)
    kind.from_pretrained(folder / "unet", quantization_config=config).save_pretrained(tmp_path / "saved")
    with pytest.raises(ladder.CheckpointError, match="saved with weight = 'int4', 'int8' is asked for"):
        kind.from_pretrained(tmp_path / "saved", quantization_config=LadderConfig("int8"))
    arrays = load_file(tmp_path / "saved" / FILE)
    prefix = "time_embedding.linear_1.weight."
    parts = {name: value for name, value in arrays.items() if name.startswith(prefix)}
    others = {name.replace("linear_1", "linear_9"): value.clone() for name, value in parts.items()}
    save_file(arrays | others, tmp_path / "saved" / FILE)
    with pytest.raises(ladder.CheckpointError, match=r"linear_9\.weight is no linear layer"):
        kind.from_pretrained(tmp_path / "saved")
    del arrays[prefix + "scale"]
    save_file(arrays, tmp_path / "saved" / FILE)
    with pytest.raises(ladder.CheckpointError, match=r"linear_1\.weight"):
        kind.from_pretrained(tmp_path / "saved")
    assert (
        json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]["weight"]
        == "int4"
    )


def test_codes_of_other_tools_are_not_quantized_as_if_they_were_weights(folder: Path, tmp_path: Path) -> None:
    """diffusers passes over methods that it does not know, and loads fp8 codes without their scales."""
    shutil.copytree(folder / "unet", tmp_path / "stored")
    arrays = load_file(tmp_path / "stored" / FILE)
    name = "time_embedding.linear_1.weight"
    arrays |= {name: arrays[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(())}
    save_file(arrays, tmp_path / "stored" / FILE, metadata={"format": "pt"})
    with pytest.raises(ladder.CheckpointError, match="quantized already"):
        diffusers.UNet2DConditionModel.from_pretrained(
            tmp_path / "stored", quantization_config=LadderConfig("int4", group_size=16)
        )


def test_the_example_of_the_readme() -> None:
    page = Path(ladder.__file__).parent / "integrations" / "README.md"
    (block,) = re.findall(r"<!-- test: diffusers -->\n```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert any(isinstance(layer, ladder.Linear) for layer in names["model"].modules())
