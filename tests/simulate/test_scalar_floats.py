"""Scalar float32 instructions of RDNA4 on the emulator, one at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ladder.simulate.gcn import scalar, vector
from ladder.simulate.gcn.listing import EXEC, GcnError, parse_instruction
from ladder.simulate.gcn.wave import Wave


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def after(line: str, *registers: int) -> Any:
    """Return the wave after one instruction; ``registers`` are s0, s1, ..."""
    held = list(registers)
    wave = SimpleNamespace(scc=7, held=held, scalar=lambda index, count=1: held[index])
    wave.set_scalar = lambda index, value, count: held.__setitem__(index, value)
    step = scalar.translate(parse_instruction(line), {})
    assert step is not None
    step(wave)
    return wave


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("s_add_f32 s0, s1, s2", 2.5),
        ("s_sub_f32 s0, s1, 0.5", 2.5),
        ("s_fmac_f32 s0, s1, s2", 8.5),
        ("s_fmamk_f32 s0, s1, 0x40000000, s2", 5.5),
        ("s_fmaak_f32 s0, s1, s2, 0x3f800000", -0.5),
        ("s_max_num_f32 s0, s1, s3", 3.0),  # of a number and NaN the number
        ("s_minimum_f32 s0, s1, s2", -0.5),
        ("s_maximum_f32 s0, s1, s3", np.nan),  # of a number and NaN the NaN
        ("s_rndne_f32 s0, s2", -0.0),
        ("s_cvt_f32_i32 s0, -7", -7.0),
        ("v_s_sqrt_f32 s0, 4.0", 2.0),
        ("v_s_rcp_f32 s0, s2", -2.0),
    ],
)
def test_numbers(line: str, expected: float) -> None:
    assert after(line, bits(10), bits(3), bits(-0.5), bits(np.nan)).held[0] == bits(expected)


@pytest.mark.parametrize(
    ("relation", "expected"),
    [("lt", 0), ("gt", 1), ("lg", 1), ("nlt", 1), ("ngt", 0), ("o", 1), ("u", 0), ("eq", 0), ("neq", 1)],
)
def test_relations(relation: str, expected: int) -> None:
    assert after(f"s_cmp_{relation}_f32 s0, s1", bits(3), bits(-0.5)).scc == expected
    unordered = after(f"s_cmp_{relation}_f32 s0, s1", bits(3), bits(np.nan)).scc
    assert unordered == (relation.startswith("n") or relation == "u")


def test_conversions_saturate() -> None:
    assert after("s_cvt_i32_f32 s0, s1", 0, bits(3e9)).held[0] == 0x7FFFFFFF
    assert after("s_cvt_u32_f32 s0, s1", 0, bits(-5.0)).held[0] == 0


def test_halves() -> None:
    word = 0xC0003C00  # -2 and 1
    assert after("s_cvt_f32_f16 s0, s1", 0, word).held[0] == bits(1)
    assert after("s_cvt_hi_f32_f16 s0, s1", 0, word).held[0] == bits(-2)
    assert after("s_cvt_f16_f32 s0, s1", 0, bits(-2)).held[0] == 0xC000
    assert after("s_add_f16 s0, s1, 2.0", 0, word).held[0] == 0x4200
    assert after("s_cmp_lt_f16 s0, s1", 0, word).scc == 1
    assert after("s_cmp_o_f16 s0, s1", 0x7E00, word).scc == 0


def test_changed_signs_are_refused() -> None:
    with pytest.raises(GcnError, match="changed sign"):
        after("v_s_sqrt_f32 s0, -s1", 0, bits(4))


def test_a_scalar_becomes_the_word_of_one_lane() -> None:
    """Whether the lane is active or not."""
    wave = Wave(None, 0)
    wave.s[3], wave.v[7] = 9, 1
    wave.set_scalar(EXEC, 0, 2)
    step = vector.translate(parse_instruction("v_writelane_b32 v7, s3, 5"))
    assert step is not None
    step(wave)
    assert wave.v[7].tolist() == [1] * 5 + [9] + [1] * 58
