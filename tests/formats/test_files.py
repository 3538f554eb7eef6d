"""Files that the formats' own tools wrote (``make_files.py``): dequantized to the tool's own bits."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ladder
from ladder.formats.checkpoint import Checkpoint
from tile_types import QuantizedTensor

FILES = Path(__file__).parent / "files"
EXPECTED = json.loads((FILES / "expected.json").read_text())
PLUS_ZERO = ("modelopt_nvfp4.safetensors", "modelopt_nvfp4_32.safetensors")
"""Files whose tool reads the code of -0 as +0: all that differs is a zero's sign."""


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def opened(file: str, folder: Path, config: dict[str, object] | None = None) -> Checkpoint:
    """Open a file as its tool leaves it: in a folder with a configuration, by default the tool's."""
    if file.endswith(".gguf"):
        return ladder.load_checkpoint(FILES / file)
    (folder / "model.safetensors").write_bytes((FILES / file).read_bytes())
    config = config or EXPECTED[file]["config"]
    (folder / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    return ladder.load_checkpoint(folder)


@pytest.mark.parametrize("file", EXPECTED)
def test_values_are_the_tools_own_bits(file: str, tmp_path: Path) -> None:
    checkpoint = opened(file, tmp_path)
    for name, expected in EXPECTED[file]["sha256"].items():
        entry = checkpoint.entry(name)
        loaded = checkpoint[name]
        values = checkpoint.dequantize(name)
        assert values.dtype == getattr(torch, EXPECTED[file]["dtype"] or "float32")
        assert tuple(values.shape) == entry.shape
        assert digest(values + 0 if file in PLUS_ZERO else values) == expected
        first = loaded[0] if isinstance(loaded, tuple) else loaded
        assert isinstance(first, QuantizedTensor) or file == "hqq_axis0.safetensors"


AUTO_ROUND = {
    "ct_mxfp4": {"bits": 4, "data_type": "mx_fp", "group_size": 32},
    "ct_mxfp8": {"bits": 8, "data_type": "mx_fp", "group_size": 32},
    "ct_nvfp4": {"bits": 4, "data_type": "nv_fp", "group_size": 16},
    "ct_fp8_tensor": {"bits": 8, "data_type": "fp", "group_size": 0, "fmt": "e4m3"},
    "ct_fp8_channel": {"bits": 8, "data_type": "fp", "group_size": -1, "fmt": "e4m3"},
    "fp8_blocks": {"bits": 8, "data_type": "fp", "group_size": [128, 128], "fmt": "e4m3"},
}
"""Files of other tools whose tensors AutoRound 0.16 names and stores alike -> what it says of them."""


OF_AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}

QUARK = ("ct_fp8_tensor", "ct_fp8_channel", "ct_int8_channel", "modelopt_mxfp4")
"""Files of other tools whose tensors Quark 0.13 names and stores alike."""

STATED = [
    *((name, {**OF_AUTO_ROUND, **stated}) for name, stated in AUTO_ROUND.items()),
    *((name, {"quant_method": "quark"}) for name in QUARK),
]


@pytest.mark.parametrize(("name", "config"), STATED)
def test_other_tools_store_the_same(name: str, config: dict[str, object], tmp_path: Path) -> None:
    plain, file = tmp_path / "plain", f"{name}.safetensors"
    plain.mkdir()
    expected = opened(file, plain)
    checkpoint = opened(file, tmp_path, config)
    for tensor in EXPECTED[file]["sha256"]:
        assert torch.equal(checkpoint.dequantize(tensor), expected.dequantize(tensor))


def test_integers_that_share_exponents_are_no_floats(tmp_path: Path) -> None:
    """AutoRound 0.16's MXINT4 has the arrays of MXFP4, of a sign and quarters: they were read as e2m1."""
    stated = {"bits": 4, "data_type": "mx_int", "group_size": 32, "sym": True}
    with pytest.raises(ladder.CheckpointError, match="mx_int, integers that share exponents"):
        opened("ct_mxfp4.safetensors", tmp_path, {**OF_AUTO_ROUND, **stated})


def test_auto_round_packs_as_mlx_does(tmp_path: Path) -> None:
    """AutoRound 0.16's ``auto_round:mlx``: its configuration beside MLX's, which has layers' own bits."""
    plain, file = tmp_path / "plain", "mlx_3bit.safetensors"
    plain.mkdir()
    expected = opened(file, plain)
    (tmp_path / "model.safetensors").write_bytes((FILES / file).read_bytes())
    own = {"quant_method": "auto-round", "packing_format": "mlx", "bits": 8, "sym": True, "data_type": "int"}
    stated = {"quantization": EXPECTED[file]["config"], "quantization_config": {**own, "group_size": 32}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    checkpoint = ladder.load_checkpoint(tmp_path)
    assert checkpoint.formats == ("mlx",)
    for tensor in EXPECTED[file]["sha256"]:
        assert torch.equal(checkpoint.dequantize(tensor), expected.dequantize(tensor))


def test_inputs_that_are_multiplied_are_refused(tmp_path: Path) -> None:
    """ModelOpt's AWQ and SmoothQuant: the codes alone are those of another matrix."""
    for factor, refused in ((1.0, False), (0.5, True)):
        file = "modelopt_int4.safetensors"
        arrays = {**load_file(FILES / file), "layer.pre_quant_scale": torch.full((128,), factor)}
        save_file(arrays, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": EXPECTED[file]["config"]}))
        if refused:
            with pytest.raises(ladder.CheckpointError, match=r"layer\.pre_quant_scale: inputs"):
                ladder.load_checkpoint(tmp_path)
        else:
            assert "layer.weight" in ladder.load_checkpoint(tmp_path)


def test_every_recipe_has_its_file() -> None:
    assert {f"{path.name}" for path in FILES.iterdir()} == {*EXPECTED, "expected.json"}
