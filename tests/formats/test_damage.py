"""Files that are truncated, mixed up or made to do harm: one error of one kind."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ladder
from ladder.cli.formats import run_convert
from ladder.formats.files import read_safetensors
from ladder.formats.gguf import read_gguf

FILES = Path(__file__).parent / "files"
EXPECTED = json.loads((FILES / "expected.json").read_text())
SAMPLES = (
    "all.gguf",
    "gptq_desc_act.safetensors",
    "awq_gemm.safetensors",
    "awq_gemv.safetensors",
    "awq_gemv_fast.safetensors",
    "bnb_nf4_nested.safetensors",
    "ct_pack_asym.safetensors",
    "ct_nvfp4.safetensors",
    "hqq_4bit.safetensors",
    "torchao_mxfp4_swizzled.safetensors",
    "torchao_tiles.safetensors",
    "gpt_oss.safetensors",
)


def load_all(path: Path) -> None:
    """Read every tensor and its description."""
    checkpoint = ladder.load_checkpoint(path)
    for name in checkpoint:
        checkpoint.entry(name)
        checkpoint.dequantize(name)


def fails_well(path: Path) -> bool:
    """Tell whether a file is refused; any error but ours fails the test."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_all(path)
    except ladder.CheckpointError as error:
        if path.name not in str(error):
            raise AssertionError("the error does not name the file") from error
        return True
    return False


@pytest.mark.parametrize("name", SAMPLES)
def test_truncated_files_are_refused(name: str, tmp_path: Path) -> None:
    data = (FILES / name).read_bytes()
    copy = tmp_path / name
    for part in (0, 1, 7, 8, 60, len(data) // 2, len(data) - 1):
        copy.write_bytes(data[:part])
        assert fails_well(copy)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_altered_bytes_give_one_error_or_other_values(tmp_path: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(SAMPLES))
    octets = bytearray((FILES / name).read_bytes())
    places = st.integers(0, min(len(octets), 6000) - 1)
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=6)):
        octets[place] = value
    copy = tmp_path / f"altered{Path(name).suffix}"
    copy.write_bytes(octets)
    fails_well(copy)


def safetensors_of(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def gguf_of(*offsets: int) -> bytes:
    """Return a file of vectors of 8 float32 numbers that lie at these offsets."""
    names = "abcdef"[: len(offsets)].encode()
    entries = (
        struct.pack("<Q1sIQIQ", 1, names[at : at + 1], 1, 8, 0, offset) for at, offset in enumerate(offsets)
    )
    header = b"GGUF" + struct.pack("<IQQ", 3, len(offsets), 0) + b"".join(entries)
    return header + bytes(-len(header) % 32 + 32 * max(3, len(offsets)))


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE: dict[str, tuple[str, bytes]] = {
    "a header longer than the file": (".safetensors", struct.pack("<Q", 1 << 62)),
    "a header that is no object": (".safetensors", safetensors_of([1, 2])),
    "a deeply nested header": (".safetensors", struct.pack("<Q", 200_000) + b"[" * 200_000),
    "huge extents": (".safetensors", safetensors_of({"a": ENTRY | {"shape": [1 << 40, 1 << 40]}}, bytes(8))),
    "negative extents": (".safetensors", safetensors_of({"a": ENTRY | {"shape": [-1, -2]}}, bytes(8))),
    "truth values for extents": (
        ".safetensors",
        safetensors_of({"a": ENTRY | {"shape": [True, 2]}}, bytes(8)),
    ),
    "an unknown type": (".safetensors", safetensors_of({"a": ENTRY | {"dtype": "F7"}}, bytes(8))),
    "overlapping tensors": (".safetensors", safetensors_of({"a": ENTRY, "b": ENTRY}, bytes(8))),
    "offsets beyond the end": (
        ".safetensors",
        safetensors_of({"a": ENTRY | {"data_offsets": [8, 16]}}, bytes(8)),
    ),
    "sizes that contradict": (
        ".safetensors",
        safetensors_of({"a": ENTRY | {"data_offsets": [0, 7]}}, bytes(8)),
    ),
    "bytes between tensors": (
        ".safetensors",
        safetensors_of({"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 20]}}, bytes(20)),
    ),
    "bytes before the first tensor": (
        ".safetensors",
        safetensors_of({"a": ENTRY | {"data_offsets": [8, 16]}}, bytes(16)),
    ),
    "bytes after the last tensor": (".safetensors", safetensors_of({"a": ENTRY}, bytes(9))),
    "a tensor named twice": (
        ".safetensors",
        safetensors_of({"a": ENTRY, "b": ENTRY}, bytes(8)).replace(b'"b"', b'"a"'),
    ),
    "a name that moves the cursor": (".safetensors", safetensors_of({"a\x1b[2J": ENTRY}, bytes(8))),
    "half of a UTF-16 pair in a name": (".safetensors", safetensors_of({"a\ud800": ENTRY}, bytes(8))),
    "a line break in a name of GGUF": (
        ".gguf",
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 2) + b"\na" + struct.pack("<IQIQ", 1, 2, 0, 0) + bytes(64),
    ),
    "another magic number": (".gguf", b"GGML" + bytes(60)),
    "a later version, big-endian": (".gguf", b"GGUF" + struct.pack(">IQQ", 4, 0, 0)),
    "words in big-endian blocks": (
        ".gguf",
        b"GGUF" + struct.pack(">IQQQ1sIQIQ", 3, 1, 0, 1, b"a", 1, 256, 16, 0) + bytes(128),
    ),
    "countless metadata": (".gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60)),
    "an endless string": (".gguf", b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 50) + b"a"),
    "an endless array": (
        ".gguf",
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q", 1)
        + b"a"
        + struct.pack("<IIQ", 9, 4, 1 << 60),
    ),
    "nested arrays": (
        ".gguf",
        b"GGUF"
        + struct.pack("<IQQQ", 3, 0, 1, 1)
        + b"a"
        + struct.pack("<I", 9)
        + struct.pack("<IQ", 9, 1) * 500,
    ),
    "a tensor beyond the end": (
        ".gguf",
        b"GGUF"
        + struct.pack("<IQQQ", 3, 1, 0, 1)
        + b"a"
        + struct.pack("<IQIQ", 1, 1 << 40, 0, 0)
        + bytes(64),
    ),
    "tensors of GGUF that overlap": (".gguf", gguf_of(0, 0)),
    "blocks of GGUF without an axis": (
        ".gguf",
        b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 1, 0, 1, b"a", 0, 2, 0) + bytes(64),
    ),
    "a tensor of GGUF between places": (".gguf", gguf_of(1)),
    "a gap between tensors of GGUF": (".gguf", gguf_of(0, 64)),
    "tensors of GGUF in another order": (".gguf", gguf_of(32, 0)),
    "code in a pickle": (".pt", b"cos\nsystem\n(S'true'\ntR."),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files_are_refused(what: str, tmp_path: Path) -> None:
    suffix, data = HOSTILE[what]
    path = tmp_path / f"bad{suffix}"
    path.write_bytes(data)
    assert fails_well(path)


def test_other_pickles_give_no_warning(tmp_path: Path) -> None:
    (tmp_path / "bad.pt").write_bytes(pickle.dumps({"a": os.system}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ladder.CheckpointError):
            ladder.load_checkpoint(tmp_path / "bad.pt")


def test_tensors_of_gguf_follow_one_another(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(gguf_of(0, 32, 64))
    assert list(ladder.load_checkpoint(path)) == ["a", "b", "c"]


def test_what_torchao_saved_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes that torch's unpickler does not know: the error says what to do."""
    module = types.ModuleType("torchao.quantization")
    module.Tile = type("Tile", (), {"__module__": module.__name__, "__qualname__": "Tile"})  # type: ignore[attr-defined]
    with monkeypatch.context() as scope:
        for name in ("torchao", module.__name__):
            scope.setitem(sys.modules, name, module)
        torch.save({"a": module.Tile()}, tmp_path / "model.pt")
    with pytest.raises(ladder.CheckpointError, match="import torchao first"):
        ladder.load_checkpoint(tmp_path / "model.pt")


@pytest.mark.parametrize("kind", ["method", "type", "shard"])
def test_long_names_of_a_file_are_cut_in_errors(kind: str, tmp_path: Path) -> None:
    """A name of a file may be of any length; the message stays one to read."""
    long, arrays = "x" * 20000, load_file(FILES / "gptq_v1_4bit.safetensors")
    save_file(arrays, tmp_path / "model.safetensors")
    if kind == "method":
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": long}}))
    elif kind == "shard":
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": long}}))
    else:
        header = json.dumps({"a": {"dtype": long, "shape": [1], "data_offsets": [0, 4]}}).encode()
        data = struct.pack("<Q", len(header)) + header + bytes(4)
        (tmp_path / "model.safetensors").write_bytes(data)

    def read() -> None:
        for each in (checkpoint := ladder.load_checkpoint(tmp_path)):
            checkpoint[each]

    with pytest.raises(ladder.CheckpointError, match=r"xxx\.\.\.xxx") as raised:
        read()
    assert len(str(raised.value)) < 1000


def without(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda arrays: arrays.pop(name)


def replaced(
    name: str, value: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda arrays: arrays.update({name: value(arrays[name])})


def copied(name: str, to: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda arrays: arrays.update({to: arrays[name].clone()})


MIXED_UP: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = {
    "scales missing": ("gptq_v2_4bit", without("layer.scales"), "scales"),
    "zero points of other groups": ("gptq_v2_4bit", replaced("layer.qzeros", lambda x: x[:1]), "groups"),
    "groups that are not there": ("gptq_desc_act", replaced("layer.g_idx", lambda x: x + 90), "g_idx"),
    "codes of another type": ("gptq_v2_4bit", replaced("layer.qweight", lambda x: x.float()), "int32"),
    "another extent": ("ct_pack_4bit", replaced("layer.weight_shape", lambda x: x * 50), "weight_shape"),
    "negative extents": ("ct_pack_4bit", replaced("layer.weight_shape", lambda x: -x), "weight_shape"),
    "no global scale": ("ct_nvfp4", replaced("layer.weight_global_scale", lambda x: x * 0), "is 0"),
    "a codebook of its own": ("bnb_nf4", replaced("layer.weight.quant_map", lambda x: x * 2), "table"),
    "a state that is no JSON": (
        "bnb_nf4",
        replaced("layer.weight.quant_state.bitsandbytes__nf4", lambda x: x // 2),
        "JSON",
    ),
    "bits that are not": ("hqq_4bit", replaced("layer.nbits", lambda x: x + 9), "bits"),
    "a shape that is not": ("hqq_4bit", replaced("layer.shape", lambda x: x * 9), "hold"),
    "fewer experts": (
        "gpt_oss",
        replaced("model.layers.0.mlp.experts.gate_up_proj_scales", lambda x: x[:1]),
        "_scales",
    ),
    "offsets missing": ("mlx_4bit", without("layer.biases"), "offsets"),
    "groups of another size": ("mlx_4bit", replaced("layer.scales", lambda x: x[:, :1]), "groups of 64"),
    "words without scales": ("mlx_4bit", without("layer.scales"), "scales of such codes are missing"),
    "offsets beside exponents": ("mlx_mxfp4", copied("layer.scales", "layer.biases"), "offsets"),
    "codes that are no ternary ones": (
        "bitnet_bitlinear",
        replaced("layer.weight", lambda x: x | 3),
        "codes",
    ),
    "no statistics": ("bnb_int8", without("layer.weight"), "SCB"),
}


@pytest.mark.parametrize("what", MIXED_UP)
def test_contradictions_are_named(what: str, tmp_path: Path) -> None:
    name, change, word = MIXED_UP[what]
    arrays = load_file(FILES / f"{name}.safetensors")
    change(arrays)
    save_file({key: value.contiguous() for key, value in arrays.items()}, tmp_path / "model.safetensors")
    config = EXPECTED[f"{name}.safetensors"]["config"] if name.startswith(OF_A_CONFIGURATION) else {}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ladder.CheckpointError, match=word):
        load_all(tmp_path)


OF_A_CONFIGURATION = ("mlx", "bitnet")
"""Files that nothing but their configuration tells."""

SILENT: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = {
    "bits of another type": ("bnb_nf4", replaced("layer.weight", lambda x: x.bool()), "weight is bool"),
    "a table of integers": (
        "bnb_nf4_nested",
        replaced("layer.weight.nested_quant_map", lambda x: x.int()),
        "nested_quant_map is int32",
    ),
    "words that are no codes": ("hqq_4bit", replaced("layer.W_q", lambda x: x.bool()), "W_q is bool"),
    "an axis of another type": ("hqq_4bit", replaced("layer.axis", lambda x: x.view(torch.float32)), "axis"),
    "a factor of another type": (
        "modelopt_nvfp4",
        replaced("layer.weight_scale_2", lambda x: x.view(torch.int32)),
        "weight_scale_2 is int32",
    ),
    "no codes": ("gptq_v2_4bit", without("layer.qweight"), "qzeros.*without the codes"),
    "no order of columns": ("gptq_desc_act", without("layer.g_idx"), "g_idx.*desc_act"),
    "other groups": ("gptq_v2_4bit", replaced("layer.qzeros", lambda x: x.repeat(1, 2)), "says 4"),
    "scales of other groups": (
        "ct_pack_4bit",
        replaced("layer.weight_scale", torch.t),
        r"blocks of \[\(1, 32",
    ),
    "scales of another block": ("fp8_blocks", replaced("layer.weight_scale_inv", lambda x: x[:1]), "16, 64"),
    "zero points missing": ("ct_int8_asym", without("layer.weight_zero_point"), "without zero points"),
    "codes of other tools": ("ct_fp8_channel", replaced("layer.weight", lambda x: x.char()), "int8 without"),
    "scales missing": ("ct_fp8_channel", without("layer.weight_scale"), "scales of such codes are missing"),
    "no table": ("bnb_nf4", without("layer.weight.quant_map"), "without the codes"),
    "half of torchao's": ("torchao_int8", without("layer._weight_scale"), "without the rest"),
    "torchao's zero points": ("torchao_int3", without("layer._weight_zero_point"), "_zero_point' is missing"),
    "torchao's scales": ("torchao_int3", replaced("layer._weight_scale", torch.t), "scales have the shape"),
}


@pytest.mark.parametrize("what", SILENT)
def test_what_would_be_read_as_other_values_is_refused(what: str, tmp_path: Path) -> None:
    """Beside the configuration that the tool writes; each of these once gave wrong values in silence."""
    name, change, word = SILENT[what]
    file = FILES / f"{name}.safetensors"
    arrays, config = load_file(file), EXPECTED[file.name]["config"]
    change(arrays)
    with safe_open(file, "pt") as opened:
        texts = opened.metadata()
    save_file(
        {key: value.contiguous() for key, value in arrays.items()}, tmp_path / "model.safetensors", texts
    )
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config or None}))
    with pytest.raises(ladder.CheckpointError, match=word):
        load_all(tmp_path)


def test_layers_may_differ_from_the_configuration_where_it_says_so(tmp_path: Path) -> None:
    """GPTQModel's ``dynamic`` gives some layers other bits and groups."""
    (tmp_path / "model.safetensors").write_bytes((FILES / "gptq_v2_4bit.safetensors").read_bytes())
    config = EXPECTED["gptq_v2_4bit.safetensors"]["config"] | {"bits": 8, "group_size": 16}
    for dynamic, refused in ((None, True), ({"+:layer": {"bits": 4, "group_size": 32}}, False)):
        text = json.dumps({"quantization_config": config | {"dynamic": dynamic}})
        (tmp_path / "config.json").write_text(text)
        assert fails_well(tmp_path) is refused


@pytest.mark.parametrize(
    ("method", "name", "kind"),
    [
        ("aqlm", "a.codes", torch.int8),
        ("qqq", "a.B", torch.int32),
        ("spqr", "a.dense_weights", torch.int64),
        ("sinq", "a.b", torch.uint32),
    ],
)
def test_methods_that_are_not_read_are_named(
    method: str, name: str, kind: torch.dtype, tmp_path: Path
) -> None:
    save_file({name: torch.zeros(4, dtype=kind)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    with pytest.raises(ladder.CheckpointError, match=rf"{name}.*'{method}' is not read"):
        ladder.load_checkpoint(tmp_path)


def test_scales_whose_meaning_is_not_known_are_refused(tmp_path: Path) -> None:
    file = "gptqmodel_fp8_row.safetensors"
    (tmp_path / "model.safetensors").write_bytes((FILES / file).read_bytes())
    config = EXPECTED[file]["config"] | {"weight_scale_semantics": "logarithm"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ladder.CheckpointError, match="'logarithm' are not read"):
        ladder.load_checkpoint(tmp_path)["layer.weight"]


PICKLED: dict[str, tuple[object, str]] = {
    "elements that the file does not hold": (
        {"a": torch.zeros(1).expand(1 << 20, 1 << 20)},
        "more than the file",
    ),
    "no values": ({"a": torch.empty(3, device="meta")}, "dense"),
    "sparse": ({"a": torch.eye(3).to_sparse()}, "dense"),
    "an unknown type": ({"a": torch.zeros(2, dtype=torch.complex128)}, "'a' has elements of type complex128"),
    "tensors without names": ({"a": [torch.zeros(2)]}, "'a' is a list"),
    "no dictionary": ([torch.zeros(2)], "holds a list"),
    "a module": ({"a": torch.nn.Linear(2, 2)}, "Unsupported global"),
}


@pytest.mark.parametrize("what", PICKLED)
def test_pickled_files_hold_dense_tensors_by_name(what: str, tmp_path: Path) -> None:
    content, word = PICKLED[what]
    torch.save(content, tmp_path / "bad.pt")
    with pytest.raises(ladder.CheckpointError, match=word) as raised:
        ladder.load_checkpoint(tmp_path / "bad.pt")
    assert "bad.pt" in str(raised.value)
    assert str(raised.value).isprintable()


def test_files_of_torch_before_its_archives_are_read(tmp_path: Path) -> None:
    """They cannot be mapped, which was the reason given for any file that torch did not write."""
    path = tmp_path / "old.bin"
    values = {"a.weight": torch.randn(8, 4), "b": {"c": torch.arange(4)}}
    torch.save(values, path, _use_new_zipfile_serialization=False)
    checkpoint = ladder.load_checkpoint(path)
    assert torch.equal(checkpoint.dequantize("a.weight"), values["a.weight"].double())
    assert set(checkpoint) == {"a.weight", "b.c"}
    torch.save({"a": Harm()}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ladder.CheckpointError, match="system"):
        ladder.load_checkpoint(path)
    path.write_bytes(b"no pickle at all")
    with pytest.raises(ladder.CheckpointError, match="torch did not write it"):
        ladder.load_checkpoint(path)


class Harm:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.system, ("exit 1",)


def test_conjugated_and_negated_tensors_convert(tmp_path: Path) -> None:
    values = {"conjugated": torch.tensor([1 + 2j]).conj(), "negated": torch._neg_view(torch.ones(2))}
    torch.save(values, tmp_path / "some.pt")
    run_convert(str(tmp_path / "some.pt"), tmp_path / "own.safetensors")
    assert all(
        torch.equal(load_file(tmp_path / "own.safetensors")[key], value) for key, value in values.items()
    )


def test_a_configuration_of_another_method_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((FILES / "gptq_v2_4bit.safetensors").read_bytes())
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "bitsandbytes"}}')
    with pytest.raises(ladder.CheckpointError, match=r"gptq.*bitsandbytes"):
        ladder.load_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16])
def test_scales_beside_codes_of_another_type_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Integers always, others where the configuration says that they belong together (ModelOpt's AWQ)."""
    arrays = {"a.weight": torch.zeros(8, 8, dtype=dtype), "a.weight_scale": torch.ones(8, 1)}
    save_file(arrays, tmp_path / "model.safetensors")
    if dtype == torch.uint8:
        with pytest.raises(ladder.CheckpointError, match=r"uint8 beside a\.weight_scale"):
            ladder.load_checkpoint(tmp_path)
    else:
        assert sorted(ladder.load_checkpoint(tmp_path)) == sorted(arrays)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "modelopt"}}')
    with pytest.raises(ladder.CheckpointError, match=r"a\.weight_scale.*8-bit"):
        ladder.load_checkpoint(tmp_path)


def test_blocks_of_fp8_are_128_wide_unless_the_configuration_says_otherwise(tmp_path: Path) -> None:
    """600 rows and 5 scales: blocks of 128, not of 120."""
    codes, scales = torch.ones(600, 128).to(torch.float8_e4m3fn), torch.arange(1.0, 6.0)[:, None]
    save_file({"a.weight": codes, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    values = ladder.load_checkpoint(tmp_path).dequantize("a.weight")
    assert torch.equal(values[:, 0], torch.arange(600).div(128, rounding_mode="floor") + 1.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"block": [0, 16]}, "extents"),
        ({"block": [1, True]}, "extents"),
        ({"shape": [2.5, 64]}, "2.5"),
        ({"tensor_scale": [1]}, "tensor_scale"),
        ({"scale_type": "float32"}, "float32"),
        ({"scale_type": 1}, "scale_type"),
        ({"version": 9}, "version"),
        ({"zero_kind": "float"}, "zero"),
    ],
)
def test_altered_descriptions_of_our_own(change: dict[str, object], says: str, tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    run_convert(str(FILES / "gptq_desc_act.safetensors"), path)
    arrays = load_file(path)
    described = json.loads(bytes(arrays["layer.weight.description"].tolist())) | change
    arrays["layer.weight.description"] = torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)
    save_file(arrays, path)
    with pytest.raises(ladder.CheckpointError, match=says) as raised:
        load_all(path)
    assert "layer.weight" in str(raised.value)


@pytest.mark.parametrize("order", [[0, 0], [1, 128]])
def test_columns_that_are_no_order_are_refused(order: list[int], tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    run_convert(str(FILES / "gptq_desc_act.safetensors"), path)
    arrays = load_file(path)
    arrays["layer.weight.columns"][:2] = torch.tensor(order)
    save_file(arrays, path)
    with pytest.raises(ladder.CheckpointError, match="columns"):
        load_all(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """Opening a pipe would wait for somebody to write."""
    os.mkfifo(tmp_path / "pipe.safetensors")
    for path in (tmp_path / "pipe.safetensors", "", "a" * 5000, tmp_path / "nowhere"):
        with pytest.raises(ladder.CheckpointError):
            ladder.load_checkpoint(path)


def test_damage_of_a_tensor_names_it(tmp_path: Path) -> None:
    octets = bytearray((FILES / "all.gguf").read_bytes())
    stored = read_gguf(FILES / "all.gguf").layers["nvfp4"][1].parts[""]
    octets[stored.begin] = 0xFF  # a scale of NVFP4 with a sign
    path = tmp_path / "signed.gguf"
    path.write_bytes(octets)
    with pytest.raises(ladder.CheckpointError, match=r"signed\.gguf: nvfp4: a scale has a sign"):
        ladder.load_checkpoint(path)["nvfp4"]


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", 3, "absent.safetensors"])
def test_an_index_stays_in_its_folder(shard: object, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ladder.CheckpointError):
        ladder.load_checkpoint(tmp_path)


def test_headers_agree_with_the_safetensors_package() -> None:
    for path in FILES.glob("*.safetensors"):
        ours, theirs = read_safetensors(path), load_file(path)
        assert set(ours) == set(theirs)
        for name, expected in theirs.items():
            tensor = ours[name].tensor()
            assert tensor.dtype == expected.dtype
            assert tensor.shape == expected.shape
            pair = (array.contiguous().reshape(-1).view(torch.uint8) for array in (tensor, expected))
            assert torch.equal(*pair)


def split_file(folder: Path, number: int, count: int = 3, tensors: int = 3) -> Path:
    """Write one of the files of a split GGUF model, which holds one tensor of 4 numbers."""
    pairs = {b"split.no": number, b"split.count": count, b"split.tensors.count": tensors}
    start = b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs))
    start += b"".join(struct.pack(f"<Q{len(key)}sIi", len(key), key, 5, at) for key, at in pairs.items())
    start += struct.pack("<Q2sIQIQ", 2, f"t{number}".encode(), 1, 4, 0, 0)
    path = folder / f"m-{number + 1:05}-of-{3:05}.gguf"
    path.write_bytes(start.ljust(-(-len(start) // 32) * 32, b"\0") + struct.pack("<4f", *[number] * 4))
    return path


def test_files_of_a_split_model_are_one(tmp_path: Path) -> None:
    files = [split_file(tmp_path, number) for number in range(3)]
    for path in (*files, tmp_path):
        checkpoint = ladder.load_checkpoint(path)
        assert {name: checkpoint[name].tolist() for name in checkpoint} == {
            f"t{n}": [n] * 4 for n in range(3)
        }


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda files: files[2].unlink(), "cannot read .*00003"),
        (lambda files: split_file(files[0].parent, 2, count=4), "number 2 of 4"),
        (lambda files: split_file(files[0].parent, 0, count=4), "one of 4 files"),
        (lambda files: split_file(files[0].parent, 0, tensors=4), "has 4 tensors"),
        (lambda files: files[2].write_bytes(files[1].read_bytes()), "number 1 of 3"),
    ],
)
def test_files_of_split_models_that_do_not_fit(
    change: Callable[[list[Path]], object], says: str, tmp_path: Path
) -> None:
    files = [split_file(tmp_path, number) for number in range(3)]
    change(files)
    with pytest.raises(ladder.CheckpointError, match=says):
        ladder.load_checkpoint(files[0])
