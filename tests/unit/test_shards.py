"""Shards of quantized matrices: bit for bit the parts of the whole, from every format."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import ladder
from tile_types import QuantizedTensor
from tile_types.errors import ShapeError
from tile_types.shards import COLUMNS, ROWS, borders, joined, shard

FILES = Path(__file__).parents[1] / "formats" / "files"
EXPECTED = json.loads((FILES / "expected.json").read_text())


def stored(file: str, folder: Path) -> Iterator[QuantizedTensor]:
    """Yield the quantized matrices of a file that a format's own tool wrote."""
    path = FILES / file
    if not file.endswith(".gguf"):
        path = folder / "model.safetensors"
        path.write_bytes((FILES / file).read_bytes())
        (folder / "config.json").write_text(json.dumps({"quantization_config": EXPECTED[file]["config"]}))
        path = folder
    checkpoint = ladder.load_checkpoint(path)
    for name in checkpoint.layers:
        found = checkpoint[name]
        yield from (
            m for m in (found if isinstance(found, tuple) else (found,)) if isinstance(m, QuantizedTensor)
        )


def values(matrix: QuantizedTensor) -> torch.Tensor:
    return torch.as_tensor(matrix.dequantize("float64"))


def can_be_cut(matrix: QuantizedTensor, axis: int, count: int) -> bool:
    extent, width = matrix.shape[axis], matrix.block[axis]
    size = -(-extent // count)
    if count == 1 or size * (count - 1) >= extent:
        return count == 1
    narrow = axis == COLUMNS and width < extent and math.gcd(width, size) < min(width, 16)
    return not narrow and (axis == ROWS or matrix.columns is None)


@pytest.mark.parametrize("file", EXPECTED)
def test_shards_of_every_format_are_parts_of_the_whole(file: str, tmp_path: Path) -> None:
    for matrix in stored(file, tmp_path):
        whole = values(matrix)
        for axis, count in itertools.product((ROWS, COLUMNS), (1, 2, 4)):
            if can_be_cut(matrix, axis, count):
                parts = [values(shard(matrix, axis, index, count)) for index in range(count)]
                assert torch.equal(torch.cat(parts, axis), whole)
            else:
                with pytest.raises(ShapeError, match=r"order of their own|cut its groups|leave nothing"):
                    shard(matrix, axis, count - 1, count)


@pytest.mark.parametrize("array", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize(
    ("weight", "options"),
    [
        ("int4", {"group_size": 128, "zero": "integer"}),
        ("int3", {"group_size": 96}),
        ("nf4", {"group_size": 64, "zero": "float"}),
        ("mxfp4", {}),
        ("nvfp4", {}),
        ("fp8_e4m3", {"block": (128, 128)}),
        ("int8", {}),
        ("int8", {"block": (192, 384)}),
    ],
)
def test_groups_are_cut_at_the_widest_common_border(
    array: object, weight: str, options: dict[str, object]
) -> None:
    rng = np.random.default_rng(0)
    matrix = ladder.quantize(array(rng.standard_normal((192, 384)).astype(np.float32)), weight, **options)  # type: ignore[operator]
    whole = np.asarray(matrix.dequantize())
    for count in (2, 3, 4):
        for axis in (ROWS, COLUMNS):
            parts = [shard(matrix, axis, index, count) for index in range(count)]
            assert np.array_equal(np.concatenate([np.asarray(p.dequantize()) for p in parts], axis), whole)
            assert len({part.block for part in parts}) == 1  # so that one kernel serves all devices


def test_rows_of_joined_matrices_are_cut_within_each() -> None:
    matrix = ladder.quantize(torch.randn(96 + 32 + 32, 64), "fp8_e4m3", block=(32, 32))
    whole, parts = values(matrix), (96, 32, 32)
    for index in range(2):
        found = values(shard(matrix, ROWS, index, 2, parts))
        wanted = torch.cat([part.chunk(2)[index] for part in whole.split(parts)])
        assert torch.equal(found, wanted)


def test_what_cannot_be_cut_is_refused() -> None:
    matrix = ladder.quantize(torch.randn(6, 64), "int4", group_size=32)
    with pytest.raises(ShapeError, match="groups of 32 into groups of 8"):
        shard(matrix, COLUMNS, 0, 8)
    with pytest.raises(ShapeError, match="nothing for shard 3"):
        shard(matrix, ROWS, 0, 4)
    with pytest.raises(ShapeError, match="do not add up"):
        shard(matrix, ROWS, 0, 2, (2, 2))
    with pytest.raises(ShapeError, match="does not exist"):
        borders(6, 2, 2)
    longer = ladder.quantize(torch.randn(7, 64), "int4", group_size=32)
    assert torch.equal(values(shard(longer, ROWS, 3, 4)), values(longer)[6:])  # as torch.chunk cuts


@pytest.mark.parametrize("block", [(1, 32), (16, 32), (64, 64), (48, 32)])
def test_joined_shards_are_the_whole(block: tuple[int, int]) -> None:
    torch.manual_seed(0)
    parts = [ladder.quantize(torch.randn(rows, 64), "int4", block=block) for rows in (48, 96, 48)]
    whole = joined(parts)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    back = [shard(whole, ROWS, index, 4) for index in range(4)]
    assert torch.equal(joined(back).dequantize(), whole.dequantize())
    with pytest.raises(ShapeError, match="one kind"):
        joined([parts[0], ladder.quantize(torch.randn(48, 64), "nf4", block=block)])


@pytest.mark.parametrize("numbers", ["torch", "numpy"])
@pytest.mark.parametrize("scaled", [True, False])
def test_matrices_with_factors_of_their_own_are_joined(scaled: bool, numbers: str) -> None:
    """NVFP4's experts, and GGUF's with a scale each: the scales are the tools' products in float32."""
    draw = torch.Generator().manual_seed(4)
    parts = []
    for factor in (float(np.float32(0.000287905)), 0.5, None):
        codes = torch.randint(0, 16, (32, 64), generator=draw, dtype=torch.uint8)
        scale = (torch.rand(32, 4, generator=draw) * 300).to(torch.float8_e4m3fn)
        fields = {"scale": scale, "scale_type": "fp8_e4m3"} if scaled else {}
        made = QuantizedTensor.from_codes(codes, "fp4_e2m1", (1, 16), tensor_scale=factor, **fields)
        parts.append(made.numpy() if numbers == "numpy" else made)
    whole = joined(parts)
    assert (whole.tensor_scale, whole.scale_type) == (None, "float32")
    wanted = [torch.as_tensor(part.dequantize("float32", "scales_first")) for part in parts]
    assert torch.equal(torch.as_tensor(whole.dequantize("float32")), torch.cat(wanted))
