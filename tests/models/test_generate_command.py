"""`ladder generate`: text of a small model, as transformers makes it of the same quantized weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")
from benchmarks import zoo  # noqa: E402

zoo.import_torchvision()
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from ladder.cli import app as commands  # noqa: E402
from ladder.cli.generate import Request, load, run_generate  # noqa: E402
from tile_types.errors import CheckpointError, DeviceError  # noqa: E402

TEXT = "tiles are small and types lie in them where warps read a row of codes"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """Write a random Llama and a tokenizer of few words."""
    path: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=15, eos_token_id=None, bos_token_id=None,
        dtype="float32",
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(TEXT.split())}, unk_token="tiles"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


@pytest.mark.costly
def test_text_is_that_of_eager(folder: Path) -> None:
    texts = []
    for compiled in (True, False):
        request = Request(
            folder,
            "tiles are small",
            group_size=32,
            tokens=12,
            dtype="float32",
            device="cpu",
            compiled=compiled,
        )
        pieces: list[str] = []
        found = run_generate(request, load(request), pieces.append)
        assert "".join(pieces) == found["text"]
        assert found["tokens"] == 12
        texts.append(found["text"])
    assert texts[0] == texts[1]
    assert len(texts[0].split()) == 12


def test_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(folder), "--prompt", "types lie", "--weight", "none", "--tokens", "4", "--eager"]
    assert commands.run(["generate", *arguments, "--device", "cpu", "--dtype", "float32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["graphs"]) == (4, "eager")


def test_bad_requests(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in {
        ("--prompt", "tiles", "--weight", "int99"): "unknown type 'int99'",
        ("--prompt", "", "--weight", "none", "--device", "cpu"): "the prompt has no tokens",
        ("--prompt", "tiles", "--dtype", "float99"): "not one of",
        ("--prompt", "tiles", "--seed", "-1"): "greater than or equal to 0",
        ("--prompt", "tiles", "--seed", str(1 << 70)): "less than or equal to",
        ("--prompt", "tiles", "--weight", "none", "--tokens", "2048"): "LlamaForCausalLM has 2048",
    }.items():
        assert commands.run(["generate", str(folder), *arguments]) == 2
        assert says in capsys.readouterr().err


def test_folders_that_cannot_be_loaded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each, without a traceback."""
    arrays = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    without = {name: array for name, array in arrays.items() if "layers.1.mlp.up_proj" not in name}
    for number, (changed, weights, arguments, says) in enumerate(
        (
            ({}, without, (), "lacks 1 tensor of LlamaForCausalLM: model.layers.1.mlp.up_proj.weight"),
            ({}, without, ("--weight", "none"), "lacks 1 tensor of LlamaForCausalLM"),
            ({"model_type": "qwen2"}, arrays, (), "lacks 6 tensors of Qwen2ForCausalLM"),
            ({"hidden_size": 32}, arrays, (), "has the shape"),
            ({"hidden_size": 32}, arrays, ("--weight", "none"), "transformers cannot load it"),
            ({"model_type": "nothing"}, arrays, (), "nothing"),
            ({"hidden_size": 62}, arrays, (), "hidden size (62)"),
            ({}, arrays, ("--group-size", "4096"), "group_size"),
        )
    ):
        path = tmp_path / str(number)
        shutil.copytree(folder, path)
        (path / "config.json").write_text(json.dumps(config | changed))
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        request = ["generate", str(path), "--prompt", "tiles", "--device", "cpu", "--group-size", "32"]
        assert commands.run([*request, *arguments]) in (1, 2)
        said = capsys.readouterr().err
        assert says in said
        assert "Traceback" not in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_here(folder: Path) -> None:
    with pytest.raises(DeviceError, match="sees no GPU"):
        load(Request(folder, "tiles", device="cuda"))


def test_folders_without_a_model_or_tokenizer(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load(Request(tmp_path, "tiles"))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        load(Request(tmp_path, "tiles"))
