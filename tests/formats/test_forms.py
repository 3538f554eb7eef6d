"""Forms that tools wrote once, or write on GPUs alone: built here by the formats' definitions."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ladder
from ladder.formats import repack
from ladder.formats.bits import words_to_codes
from ladder.formats.layer import Layer, TensorInMemory
from ladder.formats.repack import transposed_nibbles, transposed_words
from ladder.integrations.engine_layers import GptqLayer
from ladder.lower.cpu.repack import emit_transposed_nibbles, emit_transposed_words
from ladder.runtime import native
from tile_types import QuantizedTensor

FILES = Path(__file__).parent / "files"
N, K, GROUP = 8, 64, 16


def stored(folder: Path, arrays: dict[str, torch.Tensor], config: dict[str, Any]) -> QuantizedTensor:
    """Write a layer and load it."""
    metadata = config.pop("metadata", None)
    layer = {f"a.{name}": value.contiguous() for name, value in arrays.items()}
    save_file(layer, folder / "model.safetensors", metadata=metadata)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return ladder.load_checkpoint(folder)["a.weight"]


def random_codes(bits: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, (N, K), generator=torch.Generator().manual_seed(bits))


def scales(columns: int = K // GROUP) -> torch.Tensor:
    return torch.rand(N, columns, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16) + 0.5


def sparse_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack ``32 // bits`` codes in a word, as compressed-tensors did before 0.17."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word)).unflatten(1, (-1, per_word))
    words = (padded.long() << bits * torch.arange(per_word)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_words_with_gaps(bits: int, tmp_path: Path) -> None:
    codes = random_codes(bits)
    arrays = {
        "weight_packed": sparse_words(codes, bits),
        "weight_scale": scales(),
        "weight_shape": torch.tensor([N, K]),
    }
    weights = {"weights": {"num_bits": bits, "group_size": GROUP}}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": weights}}
    wanted = (codes - (1 << bits - 1)).double() * scales().double().repeat_interleave(GROUP, 1)
    assert torch.equal(stored(tmp_path, arrays, config).dequantize(), wanted)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("asymmetric", [True, False])
def test_packed_columns_in_an_order_of_their_own(even: bool, asymmetric: bool, tmp_path: Path) -> None:
    """Groups as large as each other, or not: then the largest common block serves."""
    random, codes = torch.Generator().manual_seed(4), random_codes(4)
    sizes = [16, 16, 16, 16] if even else [8, 24, 20, 12]
    index = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))[torch.randperm(K, generator=random)]
    zero = torch.randint(0, 16, (N, 4), generator=random) if asymmetric else torch.full((N, 4), 8)
    arrays = {
        "weight_packed": sparse_words(codes, 4),
        "weight_scale": scales(4),
        "weight_shape": torch.tensor([N, K]),
        "weight_g_idx": index.int(),
    }
    if asymmetric:
        arrays["weight_zero_point"] = sparse_words(zero.t(), 4).t()
    found = stored(tmp_path, arrays, {"quant_method": "compressed-tensors"})
    assert found.columns is not None
    assert found.block == (1, 16 if even else 4)
    wanted = (codes - zero[:, index]).double() * scales(4).double()[:, index]
    assert torch.equal(found.dequantize(), wanted)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
@pytest.mark.parametrize("block", [(N // 2, K // 4), (N, K)])
def test_zero_points_of_blocks_are_stored_as_they_are(
    bits: int, dtype: torch.dtype, block: tuple[int, int], tmp_path: Path
) -> None:
    """Packed are those of rows and groups alone; the one of a whole matrix has one axis."""
    rows, columns = N // block[0], K // block[1]
    random, codes = torch.Generator().manual_seed(5), random_codes(bits)
    middle = 1 << bits - 1
    zero = torch.randint(-middle, middle, (rows, columns), generator=random)
    scale = torch.rand(rows, columns, generator=random) + 0.5
    shape = (rows, columns) if rows * columns > 1 else (1,)
    options = {"num_bits": bits, "symmetric": False, "strategy": "tensor"}
    if rows * columns > 1:
        options |= {"strategy": "block", "block_structure": list(block)}
    arrays = {
        "weight_packed": sparse_words(codes, bits),
        "weight_scale": scale.reshape(shape),
        "weight_zero_point": zero.to(dtype).reshape(shape),
        "weight_shape": torch.tensor([N, K]),
    }
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": options}}}

    def expanded(values: torch.Tensor) -> torch.Tensor:
        return values.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)

    wanted = (codes - middle - expanded(zero)) * expanded(scale)
    assert torch.equal(stored(tmp_path, dict(arrays), dict(config)).dequantize(), wanted)
    arrays["weight_zero_point"] = (zero + (1 << bits)).to(torch.int32).reshape(shape)
    with pytest.raises(ladder.CheckpointError, match=f"no number of {bits} bits"):
        stored(tmp_path, arrays, config)


def test_zero_points_of_eight_bit_codes_may_be_words(tmp_path: Path) -> None:
    codes = random_codes(8).to(torch.int8)
    zero = torch.randint(-128, 128, (N, 1), generator=torch.Generator().manual_seed(6), dtype=torch.int32)
    arrays = {"weight": codes, "weight_scale": scales(1), "weight_zero_point": zero}
    found = stored(tmp_path, arrays, {"quant_method": "compressed-tensors"})
    assert torch.equal(found.dequantize(), (codes.double() - zero) * scales(1).double())


@pytest.mark.parametrize(("version", "bits"), [("0.20.1", 8), ("0.16.0", 7)])
def test_words_that_fit_several_widths_are_of_the_version_that_wrote_them(
    version: str, bits: int, tmp_path: Path
) -> None:
    """Layers of 7 and 8 bits: with gaps, both take a byte."""
    codes = random_codes(bits)
    arrays = {
        "weight_packed": sparse_words(codes, bits),
        "weight_scale": scales(1),
        "weight_shape": torch.tensor([N, K]),
    }
    options = {f"group_{n}": {"weights": {"num_bits": n, "strategy": "channel"}} for n in (7, 8)}
    config = {"quant_method": "compressed-tensors", "config_groups": options, "version": version}
    wanted = (codes - (1 << bits - 1)).double() * scales(1).double()
    assert torch.equal(stored(tmp_path, dict(arrays), dict(config)).dequantize(), wanted)
    with pytest.raises(ladder.CheckpointError, match="fit several widths"):
        stored(tmp_path, arrays, config | {"version": "unknown"})


def test_gptq_groups_of_different_sizes(tmp_path: Path) -> None:
    codes = random_codes(4)
    index = torch.repeat_interleave(torch.arange(4), torch.tensor([8, 24, 20, 12])).roll(5)
    words = sparse_words(codes, 4).t()
    zero = torch.full((4, N), 7)
    arrays = {
        "qweight": words,
        "qzeros": sparse_words(zero, 4),
        "scales": scales(4).t().half(),
        "g_idx": index.int(),
    }
    found = stored(tmp_path, arrays, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"})
    wanted = (codes - 8).double() * scales(4).half().double()[:, index]
    assert torch.equal(found.dequantize(), wanted)


def test_a_form_that_is_not_read_is_named(tmp_path: Path) -> None:
    arrays = {"qweight": sparse_words(random_codes(4), 4).t(), "scales": scales().t().half()}
    arrays["qzeros"] = sparse_words(torch.full((4, N), 7), 4)
    with pytest.raises(ladder.CheckpointError, match="marlin"):
        stored(tmp_path, arrays, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"})


def test_torchao_int4_has_an_offset(tmp_path: Path) -> None:
    """``q * scale + zero`` with signed nibbles, low first: what its GPU kernels compute."""
    codes, zero = random_codes(4), torch.randn(N, K // GROUP).to(torch.bfloat16)
    described = {"_type": "Int4Tensor", "_data": {"block_size": [1, GROUP]}, "_tensor_data_names": []}
    arrays = {
        "_weight_qdata": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8),
        "_weight_scale": scales().t(),
        "_weight_zero_point": zero.t(),
    }
    config = {"metadata": {"a.weight": json.dumps(described), "tensor_names": '["a.weight"]'}}
    found = stored(tmp_path, arrays, config)
    signed = torch.where(codes > 7, codes - 16, codes).double()
    wanted = signed * scales().double().repeat_interleave(GROUP, 1) + zero.double().repeat_interleave(
        GROUP, 1
    )
    assert torch.equal(found.dequantize(), wanted)


def test_experts_go_into_a_grouped_product(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(1)
    arrays = {
        "a.gate_up_proj_blocks": torch.randint(0, 256, (2, N, 2, 16), generator=random).to(torch.uint8),
        "a.gate_up_proj_scales": torch.randint(120, 130, (2, N, 2), generator=random).to(torch.uint8),
    }
    save_file(arrays, tmp_path / "model.safetensors")
    experts = ladder.load_checkpoint(tmp_path / "model.safetensors")["a.gate_up_proj"]
    op = ladder.GroupedMatmul(E=2, N=N, K=64, weight="mxfp4", activation="float32")
    packed = op.pack(experts)
    assert packed.arrays["words"].shape[0] == 2


@pytest.mark.parametrize("name", ["gptq_v1_3bit", "gptq_planar_5bit", "gptq_desc_act_3bit", "ct_mxfp6"])
def test_matrices_are_unpacked_some_rows_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(__file__).parent / "files" / f"{name}.safetensors"
    whole = ladder.load_checkpoint(file)["layer.weight"].dequantize()
    monkeypatch.setattr("ladder.formats.bits.CHUNK_CODES", 300)
    assert torch.equal(ladder.load_checkpoint(file)["layer.weight"].dequantize(), whole)


@pytest.mark.costly
def test_plans_gather_columns(tmp_path: Path) -> None:
    """A compiled model with a layer whose columns are in an order of their own."""
    file = Path(__file__).parent / "files" / "gptq_desc_act.safetensors"
    layer = ladder.Linear.from_quantized(ladder.load_checkpoint(file)["layer.weight"], dtype=torch.float32)
    fast, x = ladder.compile(torch.nn.Sequential(layer, torch.nn.ReLU())), torch.randn(2, layer.in_features)
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(fast(x), torch.relu(layer(x)), atol=1e-5)
    assert not fast.refused


def test_rows_of_many_blocks() -> None:
    """Blocks that are repeated along a row give their codes and numbers again, whatever words hold them."""
    checkpoint = ladder.load_checkpoint(FILES / "all.gguf")
    for name, (form, layer) in checkpoint.layers.items():
        found, times = checkpoint[name], 25
        octets = TensorInMemory(layer.tensor("").repeat(1, times))
        again = form.read(Layer(name, {"": octets}))
        assert torch.equal(again.codes(), found.codes().repeat(1, times)), name
        assert torch.equal(again.scale.view(torch.uint8), found.scale.repeat(1, times).view(torch.uint8))
        assert (again.offset is None) == (found.offset is None)
        assert again.offset is None or torch.equal(again.offset, found.offset.repeat(1, times))


def test_blocks_are_taken_apart_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = ladder.load_checkpoint(FILES / "all.gguf")
    whole = checkpoint["q6_k"]
    monkeypatch.setattr("ladder.runtime.native.MOST_BYTES", 1)
    assert torch.equal(checkpoint["q6_k"].codes(), whole.codes())


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (1, 1), (70, 33), (16, 200), (257, 8), (144, 1024)])
def test_transposed_words_and_nibbles(rows: int, columns: int) -> None:
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (8 * rows, columns), dtype=torch.int32)
    assert torch.equal(transposed_words(words, 0x1234), words.t() ^ 0x1234)
    order, flip = (0, 2, 4, 6, 1, 3, 5, 7), -0x77777778
    found = words_to_codes(transposed_nibbles(words, order, flip), 4, 8 * rows)
    codes = words_to_codes(words, 4, 8 * columns).view(8 * rows, columns, 8)
    wanted = torch.empty_like(codes)
    wanted[:, :, list(order)] = codes ^ 8
    assert torch.equal(found, wanted.flatten(1).t())


@pytest.mark.parametrize("start", [0, 1, 7])
def test_bytes_at_any_address_are_changed_by_a_kernel(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes stores texts of odd lengths between codes, which torch changed, much more slowly."""
    entry, called = native.entry, []
    monkeypatch.setattr(native, "entry", lambda *facts: called.append(facts) or entry(*facts))
    octets = torch.randint(0, 256, (repack.LEAST_KERNEL_BYTES + 7,), dtype=torch.uint8)[
        start : start + repack.LEAST_KERNEL_BYTES
    ]
    assert torch.equal(repack.changed(octets, 0x88), octets ^ 0x88)
    assert torch.equal(repack.changed(octets, 0, swaps=True), octets << 4 | octets >> 4)
    assert [kind for _, kind, _ in called] == ["changed_words", "changed_words"]


@pytest.mark.parametrize("emit", [emit_transposed_nibbles, emit_transposed_words])
def test_threads_share_matrices_of_few_columns(emit: Callable[[str], Any]) -> None:
    """One panel of columns, as 1024 outputs of AWQ are two, was the work of one thread."""
    (loop,) = re.findall(r"T\.parallel\((.*)\):", emit("transposed").script())
    assert len(set(re.findall(r"[A-Za-z]\w*", loop))) == 2


def test_a_rank_of_an_engine_has_columns_of_all_groups() -> None:
    """GPTQ with desc_act, cut along the inputs as vLLM and SGLang do: scales are whole on every rank."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}
    layer = object.__new__(GptqLayer)
    layer.prefix, layer.settings = "down_proj", SimpleNamespace(config=config)
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (K // 8, N), dtype=torch.int32)
    whole = {"qzeros": words[: K // GROUP, : N // 8].clone(), "scales": torch.rand(K // GROUP, N)}
    order = torch.randperm(K).int() // GROUP
    wanted = layer.matrix({**whole, "qweight": words, "g_idx": order}).dequantize("float32")
    for rank, columns in enumerate(wanted.chunk(2, 1)):
        cut = {"qweight": words.chunk(2)[rank].clone(), "g_idx": order.chunk(2)[rank].clone()}
        assert torch.equal(layer.matrix({**whole, **cut}).dequantize("float32"), columns)


@pytest.mark.parametrize("bits", [4, 8])
def test_narrow_integers_are_stored_in_bytes(bits: int, tmp_path: Path) -> None:
    """compressed-tensors' naive-quantized: int8 codes, of which the configuration says fewer bits."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    codes = torch.randint(-8, 8, (N, K), dtype=torch.int8)
    found = stored(tmp_path, {"weight": codes, "weight_scale": scales()}, config)
    assert torch.equal(found.dequantize("float32"), codes * scales().float().repeat_interleave(GROUP, 1))


def quark_words(codes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arrays of unsigned 4-bit codes [K, K] in groups, columns before rows, in order."""
    words = sum(codes.t().unflatten(1, (-1, 8))[..., at].long() << 4 * at for at in range(8))
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return {"weight": words, "weight_scale": torch.ones(K // GROUP, K)}


def quark(**options: Any) -> dict[str, Any]:
    told = {"dtype": "uint4", "qscheme": "per_group", "group_size": GROUP, "ch_axis": -1, **options}
    whole = {"quant_method": "quark", "global_quant_config": {"weight": told}}
    return {**whole, "export": {"pack_method": "order"}}


def test_quark_tells_types_by_layer(tmp_path: Path) -> None:
    """Of a layer's own scheme, else of linear layers, else of all: nothing stored says it."""
    codes = torch.randint(0, 16, (K, K), generator=torch.Generator().manual_seed(4))
    signed = (codes ^ 8) - 8
    own = quark(dtype="int4")["global_quant_config"]
    found = stored(tmp_path, quark_words(codes), quark())
    assert torch.equal(found.dequantize("float32"), codes.float())
    for key, rules in (("layer_quant_config", {"a*": own}), ("layer_type_quant_config", {"Linear": own})):
        found = stored(tmp_path, quark_words(codes), {**quark(), key: rules})
        assert torch.equal(found.dequantize("float32"), signed.float()), key


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (quark(dtype="int3"), "int32 does not hold what is called 'int3'"),
        (quark(qscheme="per_tensor"), "per_tensor"),
        (quark(group_size=GROUP * 2), "scales"),
        ({"quant_method": "quark"}, "no one scheme"),
        ({**quark(), "layer_quant_config": {"a": {}}}, "no one scheme"),
        ({**quark(), "export": {"pack_method": "other"}}, "pack_method"),
    ],
)
def test_quark_says_what_does_not_fit(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    codes = torch.zeros(K, K, dtype=torch.int64)
    with pytest.raises(ladder.CheckpointError, match=says):
        stored(tmp_path, quark_words(codes), config)


def test_quark_says_what_the_octets_of_scales_are(tmp_path: Path) -> None:
    """In groups of 32, AMDFP4 lies as MXFP4 does: its scales were read as exponents."""
    code = torch.tensor([0x70, 0x78, 0x01, 0xFF]).repeat(4, 1).to(torch.uint8)
    arrays = {"weight": torch.full((4, 64), 0x22, dtype=torch.uint8), "weight_scale": code}
    options = {"dtype": "fp4", "group_size": 32}
    found = stored(tmp_path, arrays, quark(**options, scale_format="e5m3")).dequantize("float32")
    assert found[0, ::32].tolist()[:3] == [0.5, 1.0, 2.0**-17]
    assert found[0, -1].isnan()
    found = stored(tmp_path, arrays, quark(**options, scale_format="e8m0")).dequantize("float32")
    assert found[0, ::32].tolist()[:2] == [2.0**-15, 2.0**-7]
    with pytest.raises(ladder.CheckpointError, match="scales"):
        stored(tmp_path, arrays, quark(**{**options, "group_size": 16}, scale_format="e5m3"))


@pytest.mark.parametrize("kind", ["int8", "int2"])
def test_quark_stores_columns_before_rows(kind: str, tmp_path: Path) -> None:
    """Square matrices of integers in groups were read as what they are transposed."""
    codes = torch.randint(-2, 2, (K, K), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    scale = torch.rand(K // GROUP, K)
    arrays = {"weight": codes.t(), "weight_scale": scale}
    if kind == "int2":
        with pytest.raises(ladder.CheckpointError, match="int8 does not hold what is called 'int2'"):
            stored(tmp_path, arrays, quark(dtype=kind))
        return
    wanted = codes.float() * scale.t().repeat_interleave(GROUP, 1)
    assert torch.equal(stored(tmp_path, arrays, quark(dtype=kind)).dequantize("float32"), wanted)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"num_bits": 3}, "codes of 3 bits are not read"),
        ({"num_bits": True}, "num_bits is True"),
        ({"num_bits": 8}, r"\.weight is uint8, expected int8"),
        ({"module_quant_configs": {"a": {"num_bits": "4"}}}, "codes of '4' bits"),
        ({"module_quant_configs": {"a": 4}}, "says 4 of it"),
        ({"module_quant_configs": {"a(": {}}}, "pattern 'a\\(' is none"),
        ({"module_quant_configs": {"(a+)+$": {}}}, "pattern .* is longer than those that are read"),
        ({"module_quant_configs": {".*" * 9: {}}}, "pattern .* is longer than those that are read"),
        ({"module_quant_configs": {"a" * 300: {}}}, "pattern .* is longer than those that are read"),
    ],
)
def test_what_gemma_says_is_checked(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    """Patterns of a file must not take long."""
    arrays = {"weight": torch.zeros(4, 32, dtype=torch.uint8), "weight_scale": torch.ones(4, 1)}
    stored(tmp_path, arrays, {"quant_method": "gemma", "module_quant_configs": {r"a\d+\.": {}}})
    with pytest.raises(ladder.CheckpointError, match=says):
        stored(tmp_path, arrays, {"quant_method": "gemma", **config})


def test_a_tensor_of_gguf_without_axes_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "number.gguf"
    start = b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 1, 0, 1, b"a", 0, 0, 0)  # float32 at offset 0
    path.write_bytes(start + bytes(-len(start) % 32) + struct.pack("<f", 2.5) + bytes(28))
    assert torch.equal(ladder.load_checkpoint(path)["a"], torch.tensor(2.5))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_0_in_gptqs_first_version(bits: int, tmp_path: Path) -> None:
    """GPTQModel subtracts the 1 of each from whole words, in which a 0 borrows from the next zero point."""
    random, groups, outputs = torch.Generator().manual_seed(7), K // GROUP, 32
    codes = torch.randint(0, 1 << bits, (outputs, K), generator=random)
    zero = torch.randint(0, 3, (groups, outputs), generator=random) % (1 << bits)
    ones = sum(1 << place for place in range(0, 32, bits))
    arrays = {
        "qweight": sparse_words(codes, bits).t(),
        "qzeros": sparse_words(zero, bits) - ones,
        "scales": torch.ones(groups, outputs, dtype=torch.float16),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": "gptq"}
    wanted = codes - zero.t().repeat_interleave(GROUP, 1)
    assert torch.equal(stored(tmp_path, arrays, config).dequantize(), wanted.double())


def stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes along the last axis one behind another, lowest bits first, into words of 32 bits."""
    count = -(-codes.shape[1] * bits // 32)
    digits = (codes[..., None] >> torch.arange(bits) & 1).flatten(1)
    digits = torch.nn.functional.pad(digits, (0, 32 * count - digits.shape[1])).unflatten(1, (count, 32))
    words = (digits.long() << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("asymmetric", [True, False])
def test_awq_of_other_widths(bits: int, asymmetric: bool, tmp_path: Path) -> None:
    """GPTQModel's; where layers may have widths of their own, the extents must tell which one."""
    outputs, groups, random = 40, K // GROUP, torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (K, outputs), generator=random)
    zero = torch.randint(0, 1 << bits, (groups, outputs), generator=random)
    zero = zero if asymmetric else torch.full_like(zero, 1 << bits - 1)
    scale = torch.rand(groups, outputs, generator=random).half()
    arrays = {"qweight": stream(codes, bits), "qzeros": stream(zero, bits), "scales": scale}
    config = {"quant_method": "awq", "bits": bits, "group_size": GROUP, "checkpoint_format": "gemm"}
    wanted = ((codes - zero.repeat_interleave(GROUP, 0)) * scale.repeat_interleave(GROUP, 0)).t()
    for stated in ({}, {"bits": 4, "dynamic": {"a": {"bits": bits}}}):
        assert torch.equal(stored(tmp_path, arrays, config | stated).dequantize("float16"), wanted)
    few = {name: part[:, : -(-24 * bits // 32)] for name, part in arrays.items()} | {"scales": scale[:, :24]}
    if bits == 3:
        with pytest.raises(ladder.CheckpointError, match=r"its words fit codes of \[4, 3\] bits"):
            stored(tmp_path, few, config | {"bits": 4, "dynamic": {"a": {"bits": 3}}})
    with pytest.raises(ladder.CheckpointError, match="the configuration says 4"):
        stored(tmp_path, arrays, config | {"bits": 4})


@pytest.mark.parametrize(("method", "form"), [("gptq", "marlin"), ("awq", "marlin"), ("gptq", "bitblas")])
def test_words_of_other_kernels_are_refused_by_name(method: str, form: str, tmp_path: Path) -> None:
    words = torch.zeros(K // 16, 2 * K, dtype=torch.int32)
    arrays = {"qweight": words, "scales": torch.ones(2, K), "qzeros": words[:2, : K // 8]}
    config = {"quant_method": method, "bits": 4, "group_size": K // 2, "checkpoint_format": form}
    with pytest.raises(ladder.CheckpointError, match=f"the configuration calls its form '{form}'"):
        stored(tmp_path, arrays, config)


def test_errors_name_the_formats_of_the_stated_method(tmp_path: Path) -> None:
    """ModelOpt's W4A8_AWQ rounds its weights twice; what other tools' formats lack is of no interest."""
    arrays = {
        "a.weight": torch.zeros(16, 64, dtype=torch.uint8),
        "a.weight_scale": torch.ones(32, 1),
        "a.weight_scale_2": torch.tensor(1.0),
    }
    save_file(arrays, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ladder.CheckpointError, match="calls its form 'W4A8_AWQ'") as caught:
        ladder.load_checkpoint(tmp_path)
    assert "modelopt-int4" in str(caught.value)
    assert "bitnet" not in str(caught.value)
