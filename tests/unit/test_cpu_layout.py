"""The packed weight of CPU kernels: where codes lie, and that they come back."""

from __future__ import annotations

import pytest
import torch

import ladder
from ladder.ir.gemm import Gemm
from ladder.ir.program import operand_type
from ladder.lower.cpu.pack import pack_codes, stored_numbers, unpack_codes
from ladder.lower.cpu.packed_codes import emit_packed_codes
from ladder.lower.passes import as_it_runs
from ladder.runtime import native
from ladder.runtime.cpu_words import unpacked_words
from schedules.cpu_layout import CpuLayout, PackForm, cpu_layout
from targets import host_cpu
from tile_types import QuantizedTensor
from tile_types.packing import pack_codes as canonical


@pytest.mark.parametrize("lane", [8, 16])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("group", [0, 8, 16, 20, 64])
def test_unpack_inverts_pack(lane: int, bits: int, group: int) -> None:
    layout = CpuLayout(bits, lane, group)
    codes = torch.randint(0, 1 << bits, (21, 101), generator=torch.Generator().manual_seed(bits))
    words = pack_codes(layout, codes)
    assert tuple(words.shape) == layout.shape(21, 101)
    assert torch.equal(unpack_codes(layout, words, 21, 101), codes)


@pytest.mark.costly
@pytest.mark.parametrize("stored", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("lane", [8, 16])
def test_kernels_pack_as_torch_does(stored: int, lane: int) -> None:
    """Whole blocks and what is left of them; codes that are inverted; and back, with zeros where none are."""
    layout, flip, fill = CpuLayout(stored, lane, 0), 1 << (stored - 1), 1
    pack = native.described(
        "packed_codes", f"{stored}_{stored}_{lane}", PackForm(stored, stored, lane), "packed_codes"
    )
    told = torch.tensor([fill, flip], dtype=torch.uint8)
    for shape in (21, 101), (16, 2560), (130, 1300):
        codes = torch.randint(0, 1 << stored, shape, generator=torch.Generator().manual_seed(lane)).byte()
        blocks, units, words = layout.shape(*shape)
        lines = torch.empty(blocks, units * stored, 16, dtype=torch.int32)
        columns, storage = torch.tensor([shape[1]], dtype=torch.int32), canonical(codes, stored)
        pack(told, columns, storage, lines)
        expected = pack_codes(layout, codes ^ flip, fill).view(torch.int32)
        assert torch.equal(lines.view(blocks, units, words), expected)
        back = unpacked_words(layout, lines.view(blocks, units, words), *shape, flip)
        assert torch.equal(back.view(torch.uint8), storage.view(torch.uint8))


@pytest.mark.parametrize("lane", [8, 16])
@pytest.mark.parametrize("stored", [1, 2, 4])
def test_reordered_words_stay_small(stored: int, lane: int) -> None:
    """Each exchange of codes is computed once: TVM's simplification inlined it, 4 times the code a step."""
    function = emit_packed_codes(PackForm(stored, stored, lane), "packed")
    assert len(as_it_runs(function, host_cpu().tvm_target).script()) < 200_000


@pytest.mark.parametrize("weight", ["int4", "ternary"])
@pytest.mark.parametrize("activation", ["float32", "int8"])
@pytest.mark.parametrize("group", [16, 24, 32, 1024])
def test_weights_are_packed_and_found_again(
    weight: str, activation: str, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels' arrays are those of torch; the canonical weight comes back bit for bit, or is kept."""
    matrix = torch.randn(40, 1024, generator=torch.Generator().manual_seed(group))
    quantized = ladder.quantize(matrix, weight, group_size=group, scale_type="float16")
    plain = ladder.Linear.from_quantized(quantized, activation=activation)
    monkeypatch.setattr("ladder.runtime.cpu_words.LEAST_CODES", 0)
    monkeypatch.setattr("ladder.runtime.native.MOST_BYTES", 1 << 14)
    layer = ladder.Linear.from_quantized(quantized, activation=activation)
    for found, expected in zip(layer.arrays, plain.arrays, strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert layer.canonical is not None
    for name, array in quantized.to_dict()["arrays"].items():
        found = getattr(layer.canonical, name)
        assert found.dtype == array.dtype
        assert torch.equal(found.view(torch.uint8), array.view(torch.uint8))
    other = ladder.Linear(1024, 40, weight=weight, group_size=group, bias=False, activation=activation)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(matrix), plain(matrix))
    assert torch.equal(layer.weight + 0, plain.weight + 0)


def test_codes_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer on a CPU keeps no second copy of its codes, unless zero points were made by changing some."""
    monkeypatch.setattr("ladder.runtime.cpu_words.LEAST_CODES", 0)
    quantized = ladder.quantize(torch.randn(64, 256), "uint4", group_size=32, zero="integer")
    layer = ladder.Linear.from_quantized(quantized)
    assert layer._canonical is None
    moved = layer.half()
    assert moved._canonical is None
    assert torch.equal(moved.canonical.codes(), quantized.codes())
    assert torch.equal(moved.canonical.zero, quantized.zero)


def test_codes_beside_a_scale_of_zero_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero points made of an offset change codes of such groups; their values stay (GGUF's K-quants)."""
    monkeypatch.setattr("ladder.runtime.cpu_words.LEAST_CODES", 0)
    drawn = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (32, 256), generator=drawn).byte()
    scale, offset = (torch.rand(32, 8, generator=drawn) for _ in range(2))
    scale[scale < 0.2] = 0
    quantized = QuantizedTensor.from_codes(
        codes, "uint4", (1, 32), scale=scale, offset=-offset, scale_type="float32"
    )
    layer = ladder.Linear.from_quantized(quantized, dtype=torch.float32)
    assert layer._canonical is None
    assert torch.equal(layer.canonical.dequantize("float32"), quantized.dequantize("float32"))


@pytest.mark.parametrize("bits", [16, 19, 32])
def test_wide_codes_come_back(bits: int) -> None:
    layout = CpuLayout(bits, 16, 0)
    codes = torch.randint(0, 1 << bits, (17, 40), generator=torch.Generator().manual_seed(bits))
    assert torch.equal(unpack_codes(layout, pack_codes(layout, codes), 17, 40), codes)


def test_one_word_of_int4_pairs() -> None:
    """Row r is lane r; columns 2s and 2s+1 are the 4-bit slot s of the lane's two halves."""
    layout = CpuLayout(4, 16, 0)
    codes = torch.zeros(16, 32, dtype=torch.int64)
    codes[3, :8] = torch.arange(1, 9)
    word = int(pack_codes(layout, codes).view(torch.int32)[0, 0, 3]) & 0xFFFFFFFF
    assert word == 0x8642_7531


def test_one_word_of_int4_bytes() -> None:
    """Four columns per step; the second step is the high nibble of each byte."""
    layout = CpuLayout(4, 8, 0)
    codes = torch.zeros(16, 32, dtype=torch.int64)
    codes[15, :8] = torch.arange(1, 9)
    word = int(pack_codes(layout, codes).view(torch.int32)[0, 0, 15]) & 0xFFFFFFFF
    assert word == 0x8473_6251


def test_memory_is_dense() -> None:
    for bits in range(1, 9):
        blocks, units, words = CpuLayout(bits, 16, 128).shape(4096, 4096)
        assert blocks * units * words * 32 == 4096 * 4096 * bits


@pytest.mark.parametrize(
    ("weight", "activation", "operand"),
    [
        ("int4", "bfloat16", "bfloat16"),
        ("int4", "int8", "int8"),
        ("ternary", "int8", "int8"),
        ("fp4_e2m1", "int8", "bfloat16"),
        ("fp6_e3m2", "fp8_e4m3", "bfloat16"),
        ("float16", "bfloat16", "float32"),
        ("int4", "float16", "float32"),
        ("float32", "int8", "float32"),
    ],
)
def test_operand_type_is_decided_by_values(weight: str, activation: str, operand: str) -> None:
    gemm = Gemm(64, 64, weight, activation)
    assert operand_type(gemm) == operand
    assert cpu_layout(gemm).lane == (8 if operand == "int8" else 16)


def test_zero_points_beyond_a_narrow_type_do_not_wrap_around() -> None:
    """200 as uint8 is -56 as int8, which is 200 again as uint8."""
    gemm = Gemm(1, 64, "uint8", "float16", group_size=32, zero="integer")
    stored = stored_numbers(gemm, "zero", torch.tensor([[200, 3]], dtype=torch.uint8))
    assert stored.double().tolist() == [[200, 3]]
