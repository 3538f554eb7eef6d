"""What was loaded is of use: packed for kernels, multiplied, converted, listed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ladder
from ladder.api.problem import gemm_for
from ladder.cli.app import run
from ladder.formats.checkpoint import Checkpoint
from ladder.formats.native_write import write
from ladder.lower import cpu
from ladder.runtime.packed import pack
from targets import get_device
from tile_types import QuantizedTensor, get_type

FILES = Path(__file__).parent / "files"
EXPECTED = json.loads((FILES / "expected.json").read_text())
ACTIVATION = "float32"


def opened(file: str, folder: Path) -> Checkpoint:
    if file.endswith(".gguf"):
        return ladder.load_checkpoint(FILES / file)
    (folder / "model.safetensors").write_bytes((FILES / file).read_bytes())
    (folder / "config.json").write_text(json.dumps({"quantization_config": EXPECTED[file]["config"]}))
    return ladder.load_checkpoint(folder)


def matrices(checkpoint: Checkpoint) -> dict[str, QuantizedTensor]:
    found = {}
    for name in checkpoint.layers:
        loaded = checkpoint[name]
        if not isinstance(loaded, torch.Tensor):
            found[name] = loaded[0] if isinstance(loaded, tuple) else loaded
    return found


@pytest.mark.parametrize("file", EXPECTED)
def test_codes_and_scales_survive_packing(file: str, tmp_path: Path) -> None:
    """CPU kernels hold each code, and scales in float32, as they were stored."""
    for matrix in matrices(opened(file, tmp_path)).values():
        if matrix.columns is not None:
            continue
        n, k = matrix.shape
        zero = "float" if matrix.offset is not None else matrix.zero_kind
        gemm = gemm_for(n, k, matrix.ttype, ACTIVATION, group_size=min(matrix.block[1], k), zero=zero)
        packed = pack(gemm, get_device("cpu"), matrix)
        plain = matrix.without_offset()
        assert torch.equal(cpu.unpack(gemm, packed.arrays["words"]), plain.codes().long())


MULTIPLIED = {
    "all.gguf": ("q4_k", "iq2_xxs"),
    "gptq_desc_act.safetensors": ("layer.weight",),
    "hqq_4bit.safetensors": ("layer.weight",),
}


@pytest.mark.parametrize("file", MULTIPLIED)
def test_linear_multiplies_by_the_dequantized_values(file: str, tmp_path: Path) -> None:
    checkpoint = opened(file, tmp_path)
    for name in MULTIPLIED[file]:
        matrix = checkpoint[name]
        layer = ladder.Linear.from_quantized(matrix, dtype=torch.float32)
        x = torch.randn(3, matrix.shape[1], generator=torch.Generator().manual_seed(0))
        wanted = x.double() @ matrix.dequantize("float64").T
        found = layer(x).double()
        assert float((found - wanted).norm() / wanted.norm()) < 1e-5
        again = ladder.Linear(layer.in_features, layer.out_features, False, **options_of(layer))
        again.load_state_dict(layer.state_dict())
        assert torch.equal(again(x), layer(x))


def options_of(layer: ladder.Linear) -> dict[str, object]:
    return {**layer._options, "dtype": layer.dtype}


def test_packed_state_keeps_the_order_of_columns(tmp_path: Path) -> None:
    matrix = opened("gptq_desc_act.safetensors", tmp_path)["layer.weight"]
    layer = ladder.Linear.from_quantized(matrix, dtype=torch.float32, keep_canonical=False)
    again = ladder.Linear(layer.in_features, layer.out_features, False, **options_of(layer))
    again.load_state_dict(layer.state_dict())
    x = torch.randn(2, layer.in_features)
    assert torch.equal(again(x), layer(x))


def test_operators_refuse_columns_in_another_order(tmp_path: Path) -> None:
    matrix = opened("gptq_desc_act.safetensors", tmp_path)["layer.weight"]
    op = ladder.Matmul(*matrix.shape, matrix.ttype, group_size=matrix.block[1], zero=matrix.zero_kind)
    with pytest.raises(ladder.ShapeError, match="order"):
        op.pack(matrix)


def with_offset(scale: list[list[float]]) -> QuantizedTensor:
    codes = torch.arange(32, dtype=torch.uint8).reshape(2, 16) % 16
    fields = {"scale": torch.tensor(scale), "offset": torch.tensor([[0.5, -3.0], [0.0, 7.0]])}
    return QuantizedTensor.from_codes(codes, "uint4", (1, 8), scale_type="float32", **fields)


@pytest.mark.parametrize("scale", [[[0.25, 2.0], [1.0, 0.5]], [[0.0, 2.0], [1.0, 0.0]]])
def test_offsets_become_zero_points(scale: list[list[float]]) -> None:
    """Also where a scale is zero, so that no zero point times it gives the offset."""
    matrix = with_offset(scale)
    plain = matrix.without_offset()
    assert (plain.offset, plain.zero_kind) == (None, "float")
    assert torch.equal(plain.dequantize(), matrix.dequantize())
    same = matrix.numpy().without_offset().dequantize()
    assert np.array_equal(same, matrix.dequantize().numpy())


@pytest.mark.parametrize("rows", [1024, 1032])  # whole blocks of rows, and not
def test_large_offsets_are_packed_as_torch_packs_them(rows: int) -> None:
    """By kernels that transpose, and where a few scales are zero."""
    draw = torch.Generator().manual_seed(5)
    storage = torch.randint(0, 256, (rows, 2048), dtype=torch.uint8, generator=draw)
    scale, offset = (torch.randn(rows, 128, generator=draw) for _ in range(2))
    scale[5::97, ::13] = 0.0
    fields = {"scale": scale, "offset": offset, "scale_type": "float32"}
    matrix = QuantizedTensor(get_type("uint4"), (rows, 4096), storage, (1, 32), **fields)
    op = ladder.Matmul(N=rows, K=4096, weight="uint4", activation="float32", group_size=32, zero="float")
    plain = matrix.without_offset()
    flat = (scale == 0).repeat_interleave(32, 1)
    assert torch.equal(plain.dequantize()[flat], matrix.dequantize()[flat])
    wanted, found = cpu.pack(op.gemm, plain), op.pack(matrix).arrays
    assert {name: array.shape for name, array in found.items()} == {n: a.shape for n, a in wanted.items()}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("factor", [None, 0.7])
def test_zero_points_of_offsets_are_rounded_once(factor: float | None) -> None:
    draw = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 1 << 31, (2, 4096, 8), generator=draw).int().view(torch.float32)
    scale, offset = torch.nan_to_num(bits[0], 1.0, 1.0, 1.0), -torch.nan_to_num(bits[1], 1.0, 1.0, 1.0)
    scale[::7] = 0.0
    codes = torch.zeros(4096, 64, dtype=torch.uint8)
    fields = {"scale": scale, "offset": offset, "scale_type": "float32", "tensor_scale": factor}
    plain = QuantizedTensor.from_codes(codes, "uint4", (1, 8), **fields).without_offset()
    times = factor or 1.0
    nonzero = torch.where(scale == 0, 1.0, scale.double())
    wanted = torch.where(scale == 0, -offset.double() / times, -offset.double() / (nonzero * times))
    assert torch.equal(plain.scale, nonzero.float())
    assert torch.equal(plain.zero, wanted.float())


def test_order_of_columns() -> None:
    order = torch.randperm(16).to(torch.int32)
    matrix = with_offset([[0.25, 2.0], [1.0, 0.5]])
    moved = QuantizedTensor(**{**vars(matrix), "columns": order})
    assert torch.equal(moved.dequantize()[:, order.long()], matrix.dequantize())
    again = QuantizedTensor.from_dict(moved.to_dict())
    assert torch.equal(again.dequantize(), moved.dequantize())


def test_rounding_of_every_step() -> None:
    """HQQ in float16: the difference is rounded before it is multiplied."""
    fields = {"scale": torch.tensor([[0.1]]).half(), "zero": torch.tensor([[0.3]]).half()}
    codes, kinds = torch.arange(16, dtype=torch.uint8)[None], {"zero_kind": "float", "scale_type": "float16"}
    matrix = QuantizedTensor.from_codes(codes, "uint4", (1, 16), **kinds, **fields)
    wanted = (torch.arange(16).half() - fields["zero"]) * fields["scale"]
    assert torch.equal(matrix.dequantize("float16", "each"), wanted)
    assert not torch.equal(matrix.dequantize("float16"), wanted)
    with pytest.raises(ladder.UnknownNameError, match="once"):
        matrix.dequantize("float16", "onse")


def test_codebooks_are_types_like_others() -> None:
    for name in ("binary", "q2", "iq1", "iq2", "iq3", "iq3_s", "iq4", "bnb_fp4"):
        ttype = get_type(name)
        assert np.array_equal(ttype.encode(ttype.probe_values()) % 64, ttype.valid_codes()) or name in (
            "iq2", "bnb_fp4",
        )  # fmt: skip
        assert get_type(f"{name}_g32").element == name


@pytest.mark.parametrize("file", sorted({*EXPECTED} - {"hqq_axis0.safetensors"}))
def test_converted_files_dequantize_to_the_same_bits(file: str, tmp_path: Path) -> None:
    """By the rule of the tool that made them, whose name is lost; hqq_axis0 is stored dequantized."""
    checkpoint = opened(file, tmp_path)
    path = tmp_path / "converted" / "ours.safetensors"
    path.parent.mkdir()
    assert write(checkpoint, path, checkpoint) == path.stat().st_size
    ours = ladder.load_checkpoint(path)
    for name in checkpoint:
        wanted = checkpoint.dequantize(name)
        parts = [name] if name in ours else [f"{name}.{number}" for number in range(len(wanted))]
        found = torch.stack([ours.dequantize(part) for part in parts]).view(wanted.shape)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("said", ["float8 once", "float32 twice", "float32", ""])
def test_a_rounding_that_is_not_known_is_refused(said: str, tmp_path: Path) -> None:
    checkpoint, path = opened("ct_nvfp4.safetensors", tmp_path), tmp_path / "ours.safetensors"
    write(checkpoint, path, checkpoint)
    save_file(load_file(path), path, metadata={"layer.weight": said})
    with pytest.raises(ladder.CheckpointError, match=r"layer\.weight: the metadata say"):
        ladder.load_checkpoint(path).dequantize("layer.weight")


def test_inspect_and_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(FILES / "all.gguf"), "--json"]) == 0
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}
    assert listed["q4_k"]["shape"] == [2, 512]
    assert listed["q4_k"]["bits"] == 4.5
    assert listed["plain"]["format"] == "float32"
    output = tmp_path / "out.safetensors"
    assert run(["convert", str(FILES / "all.gguf"), str(output)]) == 0
    assert run(["inspect", str(output)]) == 0
    assert "q4_k" in capsys.readouterr().out
    assert run(["inspect", str(tmp_path / "absent")]) == 2
    assert "no checkpoint" in capsys.readouterr().err


def test_convert_writes_only_what_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, and nothing is left behind or lost."""
    source = tmp_path / "model.safetensors"
    opened("gptq_v2_4bit.safetensors", tmp_path)
    held, files = source.read_bytes(), sorted(tmp_path.iterdir())
    for output, says in {
        tmp_path / "model.gguf": "must end with .safetensors",
        source: "is what is to be read",
        tmp_path / "absent" / "a.safetensors": "cannot write",
    }.items():
        assert run(["convert", str(source), str(output)]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == files
    assert source.read_bytes() == held
    assert run(["convert", str(source), str(tmp_path / "ours.safetensors")]) == 0
    ours, folder = (ladder.load_checkpoint(path) for path in (tmp_path / "ours.safetensors", tmp_path))
    assert (ours.formats, folder.formats) == (("ladder",), ("gptq",))  # each by its own, beside one config


def test_headers_of_many_axes_and_long_names_have_room(tmp_path: Path) -> None:
    """A filter is one array, however many matrices its shape would make; characters may take 4 bytes."""
    names = ["filter", "\N{GRINNING FACE}" * 200]
    save_file({names[0]: torch.zeros(40, 50, 3, 3), names[1]: torch.ones(2)}, tmp_path / "a.safetensors")
    checkpoint = ladder.load_checkpoint(tmp_path / "a.safetensors")
    assert write(checkpoint, tmp_path / "b.safetensors", checkpoint) < 90_000
    assert torch.equal(ladder.load_checkpoint(tmp_path / "b.safetensors")[names[1]], torch.ones(2))


def test_a_configuration_with_infinities_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"a": [Infinity, 1e999, NaN, 2]}}')
    assert run(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"] == {"a": [None, None, None, 2]}


def test_warnings_are_one_line(tmp_path: Path) -> None:
    source, output = FILES / "hqq_axis0.safetensors", tmp_path / "a.safetensors"
    command = [sys.executable, "-m", "ladder", "convert", str(source), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("ladder: warning: HQQ groups along axis 0 are dequantized")
    assert done.stderr.count("\n") == 1
