"""The packed weight of CPU kernels: where codes lie, and that they come back."""

from __future__ import annotations

import pytest
import torch

from ladder.ir.gemm import Gemm
from ladder.ir.program import operand_type
from ladder.lower.cpu.pack import pack_codes, unpack_codes
from schedules.cpu_layout import CpuLayout, cpu_layout


@pytest.mark.parametrize("lane", [8, 16])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("group", [0, 8, 16, 20, 64])
def test_unpack_inverts_pack(lane: int, bits: int, group: int) -> None:
    layout = CpuLayout(bits, lane, group)
    codes = torch.randint(0, 1 << bits, (21, 101), generator=torch.Generator().manual_seed(bits))
    words = pack_codes(layout, codes)
    assert tuple(words.shape) == layout.shape(21, 101)
    assert torch.equal(unpack_codes(layout, words, 21, 101), codes)


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
