"""torchao's `quantize_` with our configurations: layers, stored tensors, errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ladder

pytest.importorskip("torchao", reason="torchao is not installed: pip install 'ladder-compiler[engines]'")
from benchmarks import zoo

zoo.import_torchvision()
from torchao.core.config import config_from_dict, config_to_dict  # noqa: E402
from torchao.quantization import (  # noqa: E402
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)

from ladder.integrations.torchao import LadderStoredConfig, LadderWeightOnlyConfig  # noqa: E402


def net(width: int = 128, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    made = torch.nn.Sequential(
        torch.nn.Linear(width, 96), torch.nn.SiLU(), torch.nn.Linear(96, 32, bias=False)
    )
    return made.eval().to(dtype)


@pytest.mark.parametrize("weight", ["int4", "nf4", "mxfp4"])
def test_layers_are_those_of_our_own_quantize(weight: str) -> None:
    options: dict[str, Any] = {"group_size": None if weight == "mxfp4" else 32}
    model, ours, x = net(), net(), torch.randn(3, 128)
    quantize_(model, LadderWeightOnlyConfig(weight, **options))
    ladder.quantize_(ours, weight, **options)
    with torch.no_grad():
        assert isinstance(model[2], ladder.Linear)
        assert torch.equal(model(x), ours(x))
        assert model(x[:0]).shape == (0, 32)


STORED = {
    "int8": Int8WeightOnlyConfig(),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "uint3": IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=PerGroup(32)),
    "float8": Float8WeightOnlyConfig(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", STORED)
def test_what_torchao_quantized_is_taken_bit_for_bit(form: str, dtype: torch.dtype) -> None:
    model, x = net(dtype=dtype), torch.randn(3, 128, dtype=dtype)
    quantize_(model, STORED[form])
    values = [model[at].weight.dequantize() for at in (0, 2)]
    with torch.no_grad():
        wanted = model(x)
        quantize_(model, LadderStoredConfig())
        found = model(x)
    for at, value in zip((0, 2), values, strict=True):
        kept = model[at].canonical
        name = str(value.dtype).removeprefix("torch.")
        assert torch.equal(kept.dequantize(name, "scales_first"), value) or torch.equal(
            kept.dequantize(name), value
        )
    assert (found - wanted).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * wanted.norm()


def test_configurations_by_name_and_as_json() -> None:
    config = LadderWeightOnlyConfig("nf4", group_size=64)
    assert config_from_dict(config_to_dict(config)) == config
    model = net()
    quantize_(model, FqnToConfig({"2": config}), filter_fn=None)
    assert type(model[0]) is torch.nn.Linear
    assert isinstance(model[2], ladder.Linear)


def test_wrong_use_is_named() -> None:
    with pytest.raises(ladder.LadderError, match="did you mean 'int8'"):
        quantize_(net(), LadderWeightOnlyConfig("int99"))
    with pytest.raises(ladder.LadderError, match="has not quantized this weight"):
        quantize_(net(), LadderStoredConfig())
    with pytest.raises(ladder.LadderError, match="a SiLU is no plain linear layer"):
        quantize_(net(), LadderWeightOnlyConfig(), filter_fn=lambda module, name: name == "1")
    model = net()
    quantize_(model, Int8WeightOnlyConfig())
    with pytest.raises(ladder.LadderError, match="is a Int8Tensor already"):
        quantize_(model, LadderWeightOnlyConfig())
    bad = net()
    bad[0].weight.data[1, 2] = float("nan")
    with pytest.raises(ladder.LadderError, match="1, 2"):
        quantize_(bad, LadderWeightOnlyConfig(group_size=32))


def test_the_example_of_the_readme() -> None:
    page = Path(ladder.__file__).parent / "integrations" / "README.md"
    (block,) = re.findall(r"<!-- test: torchao -->\n```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert any(isinstance(layer, ladder.Linear) for layer in names["model"].modules())


@pytest.mark.parametrize("config", [Int8WeightOnlyConfig(version=2), Float8WeightOnlyConfig()])
def test_state_dicts_that_torch_saved_are_read(config: Any, tmp_path: Path) -> None:
    model = net(dtype=torch.bfloat16)
    quantize_(model, config)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    checkpoint = ladder.load_checkpoint(tmp_path / "model.pt")
    for layer in (0, 2):
        assert isinstance(checkpoint[f"{layer}.weight"], ladder.QuantizedTensor)
        values, wanted = checkpoint.dequantize(f"{layer}.weight"), model[layer].weight.dequantize()
        assert values.dtype == wanted.dtype
        assert torch.equal(values, wanted)
    assert torch.equal(checkpoint["0.bias"], model[0].bias)
    torch.save({"model": model.state_dict()}, tmp_path / "nested.pt")
    with pytest.raises(ladder.CheckpointError, match="which is not read"):
        ladder.load_checkpoint(tmp_path / "nested.pt")
