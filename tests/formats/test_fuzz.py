"""Files with parts changed at random, seeded: refused by one error, or what is read survives `convert`.

By hand, for thousands of cases: ``python tests/formats/test_fuzz.py SEED COUNT``.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ladder
from ladder.cli.formats import run_convert

FILES = Path(__file__).parent / "files"
EXPECTED = json.loads((FILES / "expected.json").read_text())
NAMES = [name for name in EXPECTED if name.endswith(".safetensors")]
Arrays = dict[str, torch.Tensor]

ODD: list[Any] = [
    *(
        None,
        -1,
        0,
        1,
        2,
        7,
        33,
        1 << 31,
        1 << 63,
        1 << 70,
        1.5,
        float("nan"),
        "",
        "x",
        "float16",
        "gptq",
        "mxfp4",
    ),
    *([], [0, 0], [1, -1], [1 << 40, 1 << 40], [True, 2], [[1, 2]], {}, {"a": 1}, True, False),
]
NUMBERS = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1.0, 1e-45, 3e38]
DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.uint32),
    *(
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
    ),
]
RESHAPED: list[Callable[[torch.Tensor], torch.Tensor]] = [
    *(torch.t, torch.flatten, lambda x: x[:0], lambda x: x[:-1], lambda x: x[..., :-1], lambda x: x[None]),
    *(lambda x: torch.cat([x, x]), lambda x: torch.cat([x, x], -1), lambda x: x.flatten()[0]),
    *(lambda x: x.reshape(2, -1), lambda x: x.reshape(-1, 4)),
]


def reshaped(draw: random.Random, array: torch.Tensor) -> torch.Tensor:
    return draw.choice(RESHAPED)(array)


def retyped(draw: random.Random, array: torch.Tensor) -> torch.Tensor:
    dtype = draw.choice(DTYPES)
    return array.to(dtype) if draw.random() < 0.5 else array.contiguous().view(dtype)


def revalued(draw: random.Random, array: torch.Tensor) -> torch.Tensor:
    flat = array.clone().reshape(-1)
    at = draw.choice([slice(None), draw.randrange(len(flat))])
    if flat.dtype.is_floating_point:
        wide = flat.float()
        wide[at] = draw.choice(NUMBERS)
        return wide.to(array.dtype).view(array.shape)
    extremes = torch.iinfo(array.dtype)
    flat[at] = draw.choice([extremes.min, extremes.max, 0, 1, 2, 5, draw.randint(extremes.min, extremes.max)])
    return flat.view(array.shape)


def changed(draw: random.Random, value: Any) -> Any:
    """Change something within an object of JSON."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key, value = draw.choice(list(value)), dict(value)
        if draw.random() < 0.3:
            del value[key]
        else:
            value[key] = changed(draw, value[key])
        return value
    return draw.choice(ODD)


def redescribed(draw: random.Random, array: torch.Tensor) -> torch.Tensor:
    text = json.dumps(changed(draw, json.loads(bytes(array.tolist()))))
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def mutated(draw: random.Random, name: str) -> tuple[Arrays, dict[str, str], Any]:
    """Return the arrays, the texts and the configuration of a file, one to three of them changed."""
    arrays, config = load_file(FILES / name), copy.deepcopy(EXPECTED[name]["config"])
    with safe_open(FILES / name, "pt") as file:
        texts = dict(file.metadata() or {})
    for _ in range(draw.choice([1, 1, 2, 3])):
        key = draw.choice(list(arrays))
        with contextlib.suppress(RuntimeError, ValueError, TypeError, IndexError):  # what does not apply
            match draw.randrange(8):
                case 0 if len(arrays) > 1:
                    del arrays[key]
                case 1:
                    config = changed(draw, config)
                case 2 if texts:
                    about = draw.choice(list(texts))
                    texts[about] = json.dumps(changed(draw, json.loads(texts[about])))
                case 3:
                    other = draw.choice(list(arrays))
                    arrays[key], arrays[other] = arrays[other], arrays[key]
                case kind:
                    change = (reshaped, retyped, revalued, redescribed)[kind % 4]
                    arrays[key] = change(draw, arrays[key])
    return arrays, texts, config


def values(loaded: Any) -> torch.Tensor:
    matrix = loaded if isinstance(loaded, torch.Tensor) else loaded.dequantize("float64")
    return torch.view_as_real(matrix) if matrix.is_complex() else torch.nan_to_num(matrix.double(), nan=0.125)


def read_and_convert(folder: Path) -> None:
    checkpoint = ladder.load_checkpoint(folder)
    for name in checkpoint:
        assert tuple(checkpoint.dequantize(name).shape) == checkpoint.entry(name).shape
    run_convert(str(folder), folder / "own.safetensors")
    again = ladder.load_checkpoint(folder / "own.safetensors")
    for name in checkpoint:
        loaded = checkpoint[name]
        matrices = (
            {f"{name}.{at}": one for at, one in enumerate(loaded)}
            if isinstance(loaded, tuple)
            else {name: loaded}
        )
        for own, matrix in matrices.items():
            assert torch.equal(values(again[own]), values(matrix)), own


def run(seed: int, folder: Path) -> bool:
    """Tell whether a changed file is refused; fail if that is by another error, or leaves a file."""
    draw = random.Random(seed)
    arrays, texts, config = mutated(draw, draw.choice(NAMES))
    path = folder / "model.safetensors"
    save_file({name: array.contiguous().clone() for name, array in arrays.items()}, path, texts or None)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read_and_convert(folder)
    except ladder.CheckpointError as error:
        text = str(error)
        assert str(folder) in text, text
        assert "\n" not in text, text
        assert len(text) < 700, text
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
        return True
    return False


@pytest.mark.parametrize("seed", range(4))
def test_changed_files_are_refused_or_read_alike(seed: int) -> None:
    refused = 0
    for case in range(40):
        with tempfile.TemporaryDirectory() as folder:
            refused += run(1000 * seed + case, Path(folder))
    assert 8 <= refused <= 36  # neither all nor none


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    for number in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            run(number, Path(folder))
