"""Which files of a folder are read, and what indexes of shards say of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ladder

INDEXES = (
    ("model.safetensors.index.json", "model"),
    ("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model"),
    ("consolidated.safetensors.index.json", "consolidated"),
    ("model.safetensors.index.fp16.json", "model.fp16"),
    ("pytorch_model.bin.index.json", "pytorch_model"),
)
"""Name of an index -> how the names of its shards begin."""


def write_shards(folder: Path, index: str, stem: str, *shards: dict[str, torch.Tensor]) -> list[str]:
    """Write shards and an index that names all of their tensors; return their names."""
    ending = ".bin" if ".bin." in index else ".safetensors"
    names = [f"{stem}-{at + 1:05}-of-{len(shards):05}{ending}" for at in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        if ending == ".bin":
            torch.save(tensors, folder / name)
        else:
            save_file(tensors, folder / name)
    weight_map = {each: name for name, tensors in zip(names, shards, strict=True) for each in tensors}
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names


@pytest.mark.parametrize(("index", "stem"), INDEXES)
def test_shards_of_any_tool_are_one_checkpoint(index: str, stem: str, tmp_path: Path) -> None:
    shards = {"a.weight": torch.randn(2, 3)}, {"b.weight": torch.randn(3)}
    names = write_shards(tmp_path, index, stem, *shards)
    for path in (tmp_path, tmp_path / index):
        checkpoint = ladder.load_checkpoint(path)
        assert list(checkpoint) == ["a.weight", "b.weight"]
        assert all(torch.equal(checkpoint[name], value) for each in shards for name, value in each.items())
    (tmp_path / names[1]).unlink()
    with pytest.raises(ladder.CheckpointError, match=names[1]):
        ladder.load_checkpoint(tmp_path)


def test_indexes_of_two_models_are_not_mixed(tmp_path: Path) -> None:
    for stem in ("first", "second"):
        write_shards(tmp_path, f"{stem}.safetensors.index.json", stem, {"a": torch.ones(1)})
    with pytest.raises(ladder.CheckpointError, match="several indexes"):
        ladder.load_checkpoint(tmp_path)
    write_shards(tmp_path, "model.safetensors.index.json", "model", {"b": torch.ones(1)})
    assert list(ladder.load_checkpoint(tmp_path)) == ["b"]


def test_shards_hold_what_their_index_does_not_name(tmp_path: Path) -> None:
    codes, scale = torch.randn(4, 4).to(torch.float8_e4m3fn), torch.tensor(0.5)
    shards = {"a.weight": codes, "a.weight_scale": scale}, {"b": torch.zeros(1)}
    index = tmp_path / "model.safetensors.index.json"
    names = write_shards(tmp_path, index.name, "model", *shards)
    index.write_text(json.dumps({"weight_map": {"a.weight": names[0], "b": names[1]}}))
    found = ladder.load_checkpoint(tmp_path).dequantize("a.weight").double()
    assert torch.equal(found, codes.double() * 0.5)
    save_file({"a.weight_scale": scale * 2, "b": torch.zeros(1)}, tmp_path / names[1])
    with pytest.raises(ladder.CheckpointError, match="does not say which"):
        ladder.load_checkpoint(tmp_path)


def test_mistrals_own_files_say_how_they_are_quantized(tmp_path: Path) -> None:
    codes = torch.randn(4, 4).to(torch.float8_e4m3fn)
    params = tmp_path / "params.json"
    params.write_text(json.dumps({"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}))
    tensors = {"wq.weight": codes, "wq.qscale_weight": torch.tensor(0.5), "wq.qscale_act": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "consolidated.safetensors")
    found = ladder.load_checkpoint(tmp_path).dequantize("wq.weight").double()
    assert torch.equal(found, codes.double() * 0.5)
    params.write_text(json.dumps({"quantization": {"quant_method": "aqlm"}}))
    with pytest.raises(ladder.CheckpointError, match="'aqlm'"):
        ladder.load_checkpoint(tmp_path)
