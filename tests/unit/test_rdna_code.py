"""Machine code of RDNA as the emulator reads it: names, pairs, halves of registers, encoded sizes."""

from __future__ import annotations

import numpy as np
import pytest

from ladder.simulate.gcn import rdna
from ladder.simulate.gcn.launch import Program
from ladder.simulate.gcn.listing import EXEC, NULL, Listing, parse_instruction
from ladder.simulate.gcn.wave import Wave


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("s_load_b256 s[4:11], s[0:1], 0x18", "s_load_dwordx8"),
        ("s_load_b96 s[4:6], s[0:1], 0x18", "s_load_dwordx3"),
        ("global_load_b32 v1, v[2:3], off", "global_load_dword"),
        ("global_load_i8 v1, v[2:3], off", "global_load_sbyte"),
        ("global_load_u16 v1, v[2:3], off", "global_load_ushort"),
        ("global_load_d16_b16 v1, v[2:3], off", "global_load_ushort_d16"),
        ("global_load_d16_hi_b16 v1, v[2:3], off", "global_load_ushort_d16_hi"),
        ("global_load_d16_i8 v1, v[2:3], off", "global_load_sbyte_d16"),
        ("global_store_d16_hi_b16 v[2:3], v1, off", "global_store_short_d16_hi"),
        ("scratch_load_b128 v[0:3], off, s2", "scratch_load_dwordx4"),
        ("scratch_store_b32 off, v0, off", "scratch_store_dword"),
        ("ds_load_2addr_stride64_b32 v[0:1], v2 offset1:1", "ds_read2st64_b32"),
        ("ds_store_2addr_b32 v2, v3, v4 offset1:1", "ds_write2_b32"),
        ("ds_store_b128 v2, v[4:7]", "ds_write_b128"),
        ("v_sub_co_ci_u32_e64 v50, null, s19, v50, s0", "v_subb_co_u32"),
        ("v_subrev_co_ci_u32_e32 v50, vcc_lo, v1, v50, vcc_lo", "v_subbrev_co_u32"),
        ("v_maxmin_num_f32 v1, v2, v3, v4", "v_maxmin_f32"),
        ("s_and_not1_saveexec_b32 s0, s1", "s_andn2_saveexec_b32"),
        ("s_addk_co_i32 s1, 0x80", "s_addk_i32"),
        ("s_delay_alu instid0(VALU_DEP_1)", "s_nop"),
    ],
)
def test_names(line: str, name: str) -> None:
    assert rdna.as_gfx9(parse_instruction(line)).op == name


@pytest.mark.parametrize(
    ("line", "bytes3", "bytes4"),
    [
        ("global_load_b128 v[0:3], v[4:5], off", 8, 12),
        ("scratch_load_b32 v0, off, off", 8, 12),
        ("v_dual_mov_b32 v1, 0 :: v_dual_and_b32 v2, 31, v0", 8, 8),
        ("v_dual_mov_b32 v1, 0 :: v_dual_and_b32 v2, 0xff, v0", 12, 12),
        ("v_pk_fma_f16 v113, v53, s8, 0xd480 op_sel_hi:[1,0,0]", 12, 12),
        ("v_dot2acc_f32_f16 v53, v110, v106", 4, 4),
        ("v_add_co_u32_e64_dpp v2, s2, v2, v2 row_mirror row_mask:0xf bank_mask:0xf bound_ctrl:1", 12, 12),
        ("v_add_nc_u32_e32 v49, 0xfffffc00, v176", 8, 8),
        ("v_wmma_f32_16x16x16_f16 v[9:16], v[17:24], v[181:188], v[1:8]", 8, 8),
        ("s_wait_loadcnt 0x5", 4, 4),
        ("s_addk_co_i32 s1, 0x80", 4, 4),
        ("v_permlanex16_b32 v2, v2, s1, 0xfedcba98", 12, 12),
    ],
)
def test_encoded_sizes(line: str, bytes3: int, bytes4: int) -> None:
    i = parse_instruction(line)
    assert (rdna.encoded_bytes(i, False), rdna.encoded_bytes(i, True)) == (bytes3, bytes4)


def executed(*lines: str, **registers: int | np.ndarray) -> Wave:
    """Return a wave of 32 lanes after instructions, given one number, or each lane's, of some registers."""
    wave = Wave(None, 0, 32)
    for name, value in registers.items():
        wave.v[int(name[1:])] = value
    program = Program(Listing("kernel", [rdna.as_gfx9(parse_instruction(line)) for line in lines]))
    for step in program.steps:
        step(wave)
    return wave


def test_pairs_read_before_they_write() -> None:
    wave = executed("v_dual_mov_b32 v1, v2 :: v_dual_mov_b32 v2, v1", v1=5, v2=7)
    assert (wave.v[1, 0], wave.v[2, 0]) == (7, 5)


def test_halves_of_registers() -> None:
    wave = executed("v_add_nc_u16 v2.h, 3, v1.h", "v_mov_b16_e32 v1.l, v2.h", v1=0x50001, v2=0x90008)
    assert (wave.v[2, 0], wave.v[1, 0]) == (0x80008, 0x50008)


def test_masks_are_single_registers() -> None:
    wave = executed("v_cmp_gt_u32_e64 s4, 9, v0", "v_cmpx_lt_u32_e32 3, v0", v0=7)
    assert wave.s[4] == 0xFFFFFFFF
    assert wave.s[5] == 0
    assert (wave.s[EXEC], wave.s[EXEC + 1], wave.whole) == (0xFFFFFFFF, 0, True)
    lanes = Wave(None, 0, 32)
    lanes.v[0] = np.arange(64)
    (step,) = Program(Listing("kernel", [rdna.as_gfx9(parse_instruction("v_cmpx_lt_u32_e32 3, v0"))])).steps
    step(lanes)
    assert (lanes.s[EXEC], lanes.whole) == (0xFFFFFFF0, False)


def test_other_sixteen_lanes_in_any_order() -> None:
    """V_PERMLANEX16 (RDNA3 ISA, "Vector Instructions"): nibbles choose a lane of the other sixteen."""
    lanes = Wave(None, 0, 32)
    lanes.v[1] = np.arange(64)
    line = "v_permlanex16_b32 v2, v1, 0x76543210, 0x89abcdef"
    (step,) = Program(Listing("kernel", [rdna.as_gfx9(parse_instruction(line))])).steps
    step(lanes)
    assert lanes.v[2, :32].tolist() == [*range(16, 24), *range(31, 23, -1), *range(8), *range(15, 7, -1)]


def test_what_goes_to_null_is_lost() -> None:
    wave = executed("v_add_co_u32 v1, null, v0, v0", v0=0xFFFFFFFF)
    assert (wave.v[1, 0], wave.s[NULL]) == (0xFFFFFFFE, 0)


def test_carries_of_moved_lanes() -> None:
    """Each lane's number and its mirror's in the row's half."""
    numbers = np.arange(64, dtype=np.uint32) % 8 << 29
    line = "v_add_co_u32_e64_dpp v2, s2, v3, v3 row_half_mirror row_mask:0xf bank_mask:0xf bound_ctrl:1"
    wave = executed(line, v3=numbers)
    assert wave.v[2][:8].tolist() == [7 << 29] * 8
    assert wave.s[2] == 0
    assert executed(line, v3=numbers[::-1] | 1 << 31).s[2] == 0xFFFFFFFF


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("s_cvt_f32_u32 s1, 3", 0x40400000),
        ("s_cvt_u32_f32 s1, 0x40b00000", 5),
        ("s_mul_f32 s1, 2.0, 0.5", 0x3F800000),
    ],
)
def test_scalar_floats(line: str, value: int) -> None:
    assert executed(line).s[1] == value
