"""Assembly of AMD GPUs as the emulator reads it: operands, modifiers, encoded sizes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ladder.simulate.amd.wmma import CORES
from ladder.simulate.gcn.host import written_bytes
from ladder.simulate.gcn.launch import Program
from ladder.simulate.gcn.listing import (
    EXEC,
    VCC,
    GcnError,
    Listing,
    encoded_bytes,
    parse_instruction,
    parse_listing,
)
from ladder.simulate.gcn.wave import LANES, Wave


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("s_mov_b32 s5, 0x10001", 8),
        ("s_mov_b32 s5, -16", 4),
        ("s_movk_i32 s22, 0x6400", 4),
        ("s_load_dwordx4 s[12:15], s[0:1], 0x20", 8),
        ("v_add_f32_e32 v0, 1.0, v13", 4),
        ("v_mul_f32_e32 v1, 0x4f7ffffe, v1", 8),
        ("v_add_f32_dpp v30, v30, v30 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf bound_ctrl:1", 8),
        ("v_fmaak_f32 v4, 0.5, v4, 0xc2880000", 8),
        ("v_readfirstlane_b32 s14, v1", 4),
        ("v_mfma_f32_16x16x16_f16 v[26:29], v[22:23], v[86:87], 0", 8),
        ("ds_write2st64_b32 v92, v3, v4 offset1:16", 8),
        ("buffer_store_dword v5, off, s[96:99], 0 offset:264", 8),
        ("s_getpc_b64 s[92:93]", 4),
        ("s_add_u32 s92, s92, (.LBB0_10-.Lpost_getpc0)&4294967295", 8),
        ("s_addc_u32 s93, s93, (.LBB0_10-.Lpost_getpc0)>>32", 8),
        ("s_setpc_b64 s[92:93]", 4),
    ],
)
def test_encoded_sizes(line: str, size: int) -> None:
    assert encoded_bytes(parse_instruction(line)) == size


def test_operands_and_modifiers() -> None:
    i = parse_instruction("v_fma_mixlo_f16 v6, -v10, |v12|, v[0:1] op_sel:[1,0] op_sel_hi:[0,0,1]")
    assert (i.op, i.form) == ("v_fma_mixlo_f16", "")
    assert [(o.kind, o.index, o.count) for o in i.operands] == [
        ("v", 6, 1),
        ("v", 10, 1),
        ("v", 12, 1),
        ("v", 0, 2),
    ]
    assert i.operands[1].negated
    assert i.operands[2].absolute
    assert i.bits("op_sel", (0, 0, 0)) == (1, 0, 0)
    assert i.registers == {6, 10, 12, 0, 1}
    assert parse_instruction("s_and_saveexec_b64 s[0:1], vcc").registers == {512, 513, 512 + 106, 512 + 107}


LOOP = """
k:
	s_mov_b32 s0, 4
	.p2align	6
.LBB0_1:
	s_add_i32 s0, s0, -1
	s_endpgm
	.section	.rodata
	.p2align	6, 0x0
	.amdhsa_kernel k
	.end_amdhsa_kernel
  - .args:
    .name:           k
"""


def test_what_is_skipped_before_an_aligned_loop_is_code_as_well() -> None:
    listing = parse_listing(LOOP, "k")
    assert listing.aligned == {1: 64}
    assert written_bytes(listing, CORES["gfx1100"]) == 64 + 8


def test_unknown_instructions_are_named() -> None:
    unknown = [parse_instruction("v_frobnicate_f32 v0, v1"), parse_instruction("s_endpgm")]
    with pytest.raises(GcnError, match="v_frobnicate_f32"):
        Program(Listing("kernel", unknown))


@pytest.mark.parametrize(("target", "place"), [(".Lfirst", 0), (".Llast", 6)])
def test_branches_beyond_reach_add_a_distance_to_the_counter(target: str, place: int) -> None:
    """Forward and backward: the high half of a negative distance is -1."""
    lines = [
        "s_nop 0",
        "s_getpc_b64 s[4:5]",
        f"s_add_u32 s4, s4, ({target}-.Lpost)&4294967295",
        f"s_addc_u32 s5, s5, ({target}-.Lpost)>>32",
        "s_setpc_b64 s[4:5]",
        "s_nop 0",
        "s_endpgm",
    ]
    program = Program(
        Listing("k", [parse_instruction(line) for line in lines], {".Lfirst": 0, ".Lpost": 2, ".Llast": 6})
    )
    wave = Wave(None, 0)
    for at in range(1, 5):
        wave.pc = at + 1
        program.steps[at](wave)
    assert wave.pc == place


def executed(line: str, **registers: list[int]) -> list[int]:
    """Return the first lanes of v0 after an instruction, given those of other registers."""
    wave = Wave(None, 0)
    for name, values in registers.items():
        if name == "vcc":
            wave.set_scalar(VCC, sum(bit << lane for lane, bit in enumerate(values)), 2)
        else:
            wave.v[int(name[1:]), : len(values)] = values
    (step,) = Program(Listing("k", [parse_instruction(line)])).steps
    step(wave)
    return [int(word) for word in wave.v[0, :2]]


ONE, TWO, MINUS = 0x3F800000, 0x40000000, 0x80000000


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("v_cndmask_b32_e64 v0, v1, -v2, vcc", [ONE, TWO | MINUS]),
        ("v_cndmask_b32_e64 v0, |v4|, v2, vcc", [ONE, TWO]),
        ("v_pk_fma_f32 v[0:1], v[2:3], 2.0, v[4:5] op_sel_hi:[1,0,1]", [0x40400000, 0x40400000]),
        ("v_bitop3_b16 v0, v1, v2, v4 bitop3:0x80", [0, 0]),
        ("v_bitop3_b16 v0, v1, v1, v1 bitop3:0xf", [0xFFFF, 0xFFFF]),
    ],
)
def test_signs_and_constants_count(line: str, expected: list[int]) -> None:
    given = {"v1": [ONE] * 2, "v2": [TWO] * 2, "v3": [TWO] * 2, "v4": [ONE | MINUS] * 2, "v5": [ONE] * 2}
    assert executed(line, vcc=[0, 1], **given) == expected


@pytest.mark.parametrize(
    "line",
    [
        "v_add_u32_e64 v0, -v1, v2",
        "v_lshl_add_u64 v[0:1], -v[2:3], 1, v[4:5]",
        "v_pk_fma_f32 v[0:1], v[2:3], 2.0, v[4:5]",
        "v_bitop3_b16 v0, v1, v2, v4 bitop3:0x80 op_sel:[1,0,0,0]",
    ],
)
def test_what_instructions_would_ignore_is_refused(line: str) -> None:
    with pytest.raises(GcnError, match="emulator"):
        Program(Listing("k", [parse_instruction(line)]))


BUFFER = "buffer_{}_dword {}, s[0:3], 0 offset:8"


@pytest.mark.parametrize(
    ("store", "load", "first", "loaded"),
    [
        ("scratch_store_dwordx2 off, v[2:3], off", "scratch_load_dwordx2 v[0:1], off, off", 5, 5),
        ("scratch_store_dword v1, v2, s33 offset:4", "scratch_load_dword v0, off, off offset:8", 5, 5),
        ("scratch_store_short_d16_hi off, v2, off", "scratch_load_sshort v0, off, off", 9 << 28, 0xFFFF9000),
        ("scratch_store_byte off, v2, off", "scratch_load_ubyte_d16_hi v0, off, off", 5, 0x5FFFF),
        (BUFFER.format("store", "v2, off"), BUFFER.format("load", "v0, off"), 5, 5),
        (BUFFER.format("store", "v2, v1") + " offen", BUFFER.format("load", "v0, off"), 5, 5),
    ],
)  # fmt: skip
def test_scratch_is_memory_of_each_lane(store: str, load: str, first: int, loaded: int) -> None:
    """What was spilled comes back, in lanes that were active; registers begin as ones, as memory does."""
    wave = Wave(SimpleNamespace(stores_apart=False), 0)
    wave.scratch = np.full((LANES, 16), 0xFF, np.uint8)
    wave.v[1], wave.v[2], wave.v[3], wave.s[33] = 0, first, 7, 4
    wave.set_scalar(EXEC, wave.every - 2, 2)
    for step in Program(Listing("k", [parse_instruction(line) for line in (store, load)])).steps:
        step(wave)
    assert [int(word) for word in wave.v[0, :3]] == [loaded, 0xFFFFFFFF, loaded]
    assert [entry.kind for entry in wave.vector_memory] == ["scratch"] * 2
    assert wave.pending >= {0}


def test_scratch_ends() -> None:
    found: list[tuple[str, str]] = []
    wave = Wave(SimpleNamespace(stores_apart=True, report=lambda *given: found.append(given)), 0)
    wave.scratch = np.zeros((LANES, 8), np.uint8)
    line = "scratch_store_dwordx2 off, v[2:3], off offset:4"
    (step,) = Program(Listing("k", [parse_instruction(line)])).steps
    step(wave)
    assert found == [("out of bounds", line)]
    assert not wave.scratch.any()
    with pytest.raises(GcnError, match="buffer"):
        Program(Listing("k", [parse_instruction("buffer_load_dword v0, v1, s[4:7], 0 offen")]))
