"""Evidence of compiled kernels: counts in machine code, occupancy, and what a missing tool changes."""

from __future__ import annotations

import re

import pytest

from ladder.api.evidence import VENDORS, gather, resident_blocks
from schedules.cost import Cost
from targets import get_device
from tile_types.errors import MissingToolError

H200, B200, MI300 = map(get_device, ("cuda/sm_90a", "cuda/sm_100a", "rocm/gfx942"))
COST = Cost(2e-6, ("dram", "launch"), (2e-6, 1e-7), 100, 200)

PTX = """
wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%f1}, %rd1, %rd2, p, 1, 1;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1};
tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r2], %rd1, %r3, {%r4, %r4, %r4, %r4}, p;
wgmma.wait_group.sync.aligned 0;
tcgen05.wait::st.sync.aligned;
"""
SASS = """
 /*0a30*/ HMMA.16816.F32 R4, R8, R2, R4 ;
 /*0a40*/ IMMA.16832.S8.S8 R4, R8.ROW, R2.COL, R4 ;
 /*0a50*/ HGMMA.64x128x16.F32 R24, R4, gdesc[UR4], R24 ;
 /*28e0*/ UTCHMMA tmem[UR18], gdesc[UR8], tmem[UR5], tmem[UR16], idesc[UR17], UPT ;
 /*29d0*/ UTCBAR [UR6], URZ ;
 /*0a60*/ IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
"""
ASM = """
 v_mfma_f32_16x16x16_f16 a[0:3], v[0:1], v[2:3], a[0:3]
 v_mfma_i32_16x16x32_i8 a[0:3], v[0:1], v[2:3], a[0:3]
 v_dot2_f32_f16 v1, v2, v3, v1
 v_mul_f32_e32 v1, v2, v3
"""
REPORT = {"registers": 168, "spill_stores": 8, "spill_loads": 4, "stack": 16, "shared": 32}
CUDA = 'extern "C" __global__ void __launch_bounds__(384, 1) kernel('
TIR = 'with T.attr({"tirx.dyn_smem_bytes": T.int64(217216)}):'


def _missing(stage: str) -> str | None:
    if stage == "sass":
        raise MissingToolError("neither cuobjdump nor nvdisasm is on PATH")
    return PTX


@pytest.mark.parametrize(
    ("vendor", "stage", "text", "count"),
    [("nvidia", "ptx", PTX, 3), ("nvidia", "sass", SASS, 4), ("amd", "asm", ASM, 2)],
)
def test_matrix_instructions_are_told_apart(vendor: str, stage: str, text: str, count: int) -> None:
    assert len(re.findall(VENDORS[vendor].stages[stage], text)) == count


@pytest.mark.parametrize(("columns", "blocks"), [(128, 3), (256, 2), (512, 1)])
def test_tensor_memory_limits_resident_blocks(columns: int, blocks: int) -> None:
    tir = f"""with T.attr({{"tirx.dyn_smem_bytes": T.int64(65536)}}):
    T.ptx.tcgen05(address, T.uint32({columns}), "alloc", "cta_group::1")"""
    found = gather(B200, {**REPORT, "registers": 56}, {"cuda": CUDA, "tir": tir}, COST, {"sass": SASS}.get)
    assert (found.facts["tensor_columns"], found.blocks_per_unit) == (columns, blocks)


def test_evidence_of_an_nvidia_kernel() -> None:
    evidence = gather(H200, REPORT, {"cuda": CUDA, "tir": TIR}, COST, {"sass": SASS}.get)
    found = evidence.as_json()
    assert (found["mma"], found["counted_in"], found["notes"]) == (4, "sass", [])
    assert (found["registers"], found["spills"], found["shared_bytes"]) == (168, 12, 217248)
    assert (found["blocks_per_unit"], found["occupancy"]) == (1, 384 / 2048)
    assert (found["predicted_us"], found["bound_by"]) == (2.0, "dram")
    assert "registers 168" in evidence.as_text()["code"]


def test_without_a_disassembler_the_ptx_is_counted_and_it_says_so() -> None:
    found = gather(H200, REPORT, {"cuda": CUDA, "tir": TIR}, COST, _missing).as_json()
    assert (found["mma"], found["counted_in"]) == (3, "ptx")
    assert found["notes"] == ["no SASS: neither cuobjdump nor nvdisasm is on PATH"]


def test_evidence_of_an_amd_kernel() -> None:
    report = {"vgpr": 128, "agpr": 32, "sgpr": 40, "vgpr_spills": 0, "lds_bytes": 20480, "threads": 256}
    found = gather(MI300, report, {"asm": ASM}, COST, lambda stage: None).as_json()
    assert (found["mfma"], found["vgpr"], found["agpr"], found["spills"]) == (2, 128, 32, 0)
    assert found["dots"] == 1
    assert (found["lds_bytes"], found["blocks_per_unit"], found["occupancy"]) == (20480, 3, 0.375)


def test_what_the_compiler_does_not_tell_is_none() -> None:
    found = gather(H200, {}, {"cuda": CUDA}, COST, lambda stage: None).as_json()
    assert found["registers"] is found["occupancy"] is found["mma"] is None


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "expected"),
    [
        (32, 0, 1024, 2),  # threads
        (33, 0, 1024, 1),  # registers come in eights: 40
        (255, 0, 256, 1),
        (64, 100 * 1024, 128, 2),  # shared memory
        (16, 0, 32, 32),  # blocks
    ],
)
def test_resident_blocks_of_an_sm(registers: int, shared: int, threads: int, expected: int) -> None:
    assert resident_blocks(H200, registers, shared, threads, 1024) == expected


@pytest.mark.parametrize(("vgpr", "waves"), [(64, 8), (128, 4), (129, 3), (256, 2), (512, 1)])
def test_waves_of_a_simd(vgpr: int, waves: int) -> None:
    """512 registers per lane of a SIMD, at most eight waves (CDNA3 ISA, "Wavefronts and registers")."""
    assert resident_blocks(MI300, vgpr, 0, 64, 0) == 4 * waves
