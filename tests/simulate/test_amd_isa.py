"""AMD instructions as the simulator has them: layouts beside AMD's own calculator, and single values.

``amd_isa/mfma_layouts.json`` is what AMD's Matrix Instruction Calculator 1.3.2 prints: where each element of
A[M][K], B[K][N] and D[M][N] lies, as lane and first byte of the operand's registers in hexadecimal.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from amd_kernels import compute, intrinsic
from tvm.script import tirx as T

from ladder.simulate import UnknownCallError
from ladder.simulate.amd import mfma
from ladder.simulate.amd.arithmetic import perm
from ladder.simulate.amd.calls import LDS, calls_for
from ladder.simulate.amd.lanes import NOWHERE, dpp_sources

PUBLISHED = json.loads((Path(__file__).parent / "amd_isa" / "mfma_layouts.json").read_text())["instructions"]
CORES = {core.arch: core for core in (mfma.CDNA2, mfma.CDNA3, mfma.CDNA4)}


def _intrinsic(core: mfma.Core, mnemonic: str) -> str:
    """Return LLVM's name of ``v_mfma_f32_16x16x16_f16``, whose type stands behind a dot where it must."""
    sums, shape, kind = re.fullmatch(r"v_mfma_(f32|i32)_(\d+x\d+x\d+)_?(.*)", mnemonic).groups()
    kind = {"bf16": "bf16.1k", "bf16_1k": "bf16.1k"}.get(kind, kind).replace("_", ".")
    return f"llvm.amdgcn.mfma.{sums}.{shape}{kind}"


def _places(table: list[str]) -> np.ndarray:
    """Return lane and byte of every element, ``[rows, columns, 2]``."""
    return np.array([[(int(row[i : i + 2], 16), int(row[i + 2 : i + 4], 16)) for i in range(0, len(row), 4)]
                     for row in table])  # fmt: skip


def _one(dtype: str) -> np.ndarray:
    """Return the bytes of 1 in an operand's type."""
    from ladder.simulate.values import NUMPY

    return np.ones(1, NUMPY[dtype]).view(np.uint8)


@pytest.mark.parametrize("name", PUBLISHED)
def test_operands_and_sums_lie_where_amd_says(name: str) -> None:
    """Every element of A and of B, one-hot, must be the only factor of what the product then holds."""
    arch, mnemonic = name.split()
    core, places = CORES[arch], {matrix: _places(rows) for matrix, rows in PUBLISHED[name].items()}
    what = mfma.parse(_intrinsic(core, mnemonic), core)
    size = places["A"].shape[1] * what.m // 64 * len(_one(what.a))
    kind = np.int32 if what.integer else np.float32
    registers = what.m * what.m // 64
    random = np.random.default_rng(0)
    for i, k, j in zip(
        *(random.permutation(np.arange(32) % n) for n in (what.m, what.k, what.m)), strict=True
    ):
        operands = []
        for matrix, (row, column), dtype in (("A", (i, k), what.a), ("B", (k, j), what.b)):
            lane, byte = places[matrix][row, column]
            held = np.zeros((1, 64, size), np.uint8)
            held[0, lane, byte : byte + len(_one(dtype))] = _one(dtype)
            operands.append(held)
        sums = mfma.multiply(what, core, *operands, np.zeros((1, 64, registers), kind))
        lane, byte = places["D"][i, j]
        assert sums[0, lane, byte // 4] == 1
        assert np.count_nonzero(sums) == 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_whole_products_with_published_layouts(name: str) -> None:
    """Small integers are exact in every type, so the product must be exactly numpy's."""
    arch, mnemonic = name.split()
    core, places = CORES[arch], {matrix: _places(rows) for matrix, rows in PUBLISHED[name].items()}
    what = mfma.parse(_intrinsic(core, mnemonic), core)
    random = np.random.default_rng(1)
    a, b = random.integers(-3, 4, (what.m, what.k)), random.integers(-3, 4, (what.k, what.m))
    c = random.integers(-9, 9, (what.m, what.m))
    size = what.m * what.k // 64 * len(_one(what.a))
    operands = [_scattered(places[n], x, d, size) for n, x, d in (("A", a, what.a), ("B", b, what.b))]
    kind = "int32" if what.integer else "float32"
    sums = _scattered(places["D"], c, kind, what.m * what.m // 16).view(kind)
    result = np.ascontiguousarray(mfma.multiply(what, core, *operands, sums))
    lane, byte = places["D"][..., 0], places["D"][..., 1]
    assert np.array_equal(result[0, lane, byte // 4], a @ b + c)


def _scattered(places: np.ndarray, values: np.ndarray, dtype: str, size: int) -> np.ndarray:
    from ladder.simulate.values import NUMPY

    held = np.zeros((1, 64, size), np.uint8)
    data = values.astype(NUMPY[dtype])[..., None].view(np.uint8)
    for index in np.ndindex(values.shape):
        lane, byte = places[index]
        held[0, lane, byte : byte + data.shape[-1]] = data[index]
    return held


def test_every_matrix_instruction_of_the_tables_parses() -> None:
    for core in CORES.values():
        for name in mfma.rows(core):
            assert mfma.parse(name, core).m in (16, 32)


@pytest.mark.parametrize(
    ("core", "name"),
    [
        (mfma.CDNA2, "llvm.amdgcn.mfma.i32.16x16x32.i8"),
        (mfma.CDNA2, "llvm.amdgcn.mfma.f32.16x16x32.fp8.fp8"),
        (mfma.CDNA3, "llvm.amdgcn.mfma.f32.16x16x32.f16"),
        (mfma.CDNA3, "llvm.amdgcn.mfma.f32.16x16x4f16"),
        (mfma.CDNA3, "llvm.amdgcn.mfma.f64.16x16x4f64"),
    ],
)
def test_what_an_architecture_lacks_is_refused(core: mfma.Core, name: str) -> None:
    with pytest.raises(UnknownCallError, match="mfma"):
        mfma.parse(name, core)


@pytest.mark.parametrize(("core", "kept"), [(mfma.CDNA2, False), (mfma.CDNA3, True)])
def test_cdna2_flushes_subnormal_operands_and_sums(core: mfma.Core, kept: bool) -> None:
    what = mfma.parse("llvm.amdgcn.mfma.f32.16x16x16f16", core)
    tiny = np.zeros((1, 64, 4), np.float16)
    tiny[0, 0, 0] = 2.0**-20
    one = np.zeros((1, 64, 4), np.float16)
    one[0, 0, 0] = 1
    sums = mfma.multiply(what, core, tiny, one, np.zeros((1, 64, 4), np.float32))
    assert sums[0, 0, 0] == (2.0**-20 if kept else 0)


def test_fp8_is_fnuz_on_cdna3_and_ocp_on_cdna4() -> None:
    for core, dtype in ((mfma.CDNA3, ml_dtypes.float8_e4m3fnuz), (mfma.CDNA4, ml_dtypes.float8_e4m3fn)):
        what = mfma.parse("llvm.amdgcn.mfma.f32.16x16x32.fp8.fp8", core)
        a = np.zeros((1, 64, 8), np.uint8)
        a[0, 0, 0] = 0x38
        sums = mfma.multiply(what, core, a, a, np.zeros((1, 64, 4), np.float32))
        assert sums[0, 0, 0] == float(np.uint8(0x38).reshape(1).view(dtype)[0]) ** 2


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (0x03020100, 0x44332211),  # the second operand
        (0x07060504, 0x88776655),  # the first one
        (0x0C0C0400, 0x00005511),
        (0x0D0E0F0C, 0xFFFFFF00),
        (0x08080808, 0x00000000),  # signs of bytes 1, 3, 5 and 7 of the pool
        (0x0B0A0908, 0xFF000000),
    ],
)
def test_v_perm(selector: int, expected: int) -> None:
    words = (np.array(x, np.uint32) for x in (0x88776655, 0x44332211, selector))
    assert int(perm(*words)) == expected


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        (0x1B, [3, 2, 1, 0, 7]),  # quad_perm:[3,2,1,0]
        (0x101, [1, 2, 3, 4, 5]),  # row_shl:1
        (0x111, [NOWHERE, 0, 1, 2, 3]),  # row_shr:1
        (0x121, [15, 0, 1, 2, 3]),  # row_ror:1
        (0x140, [15, 14, 13, 12, 11]),  # row_mirror
        (0x141, [7, 6, 5, 4, 3]),  # row_half_mirror
        (0x153, [3, 3, 3, 3, 3]),  # row_newbcast:3
    ],
)
def test_dpp_controls(control: int, expected: list[int]) -> None:
    assert dpp_sources(control, 64)[:5].tolist() == expected


def test_dpp_broadcasts_to_later_rows() -> None:
    assert dpp_sources(0x142, 64)[[0, 16, 31, 32, 63]].tolist() == [NOWHERE, 15, 15, 31, 47]
    assert dpp_sources(0x143, 64)[[0, 31, 32, 63]].tolist() == [NOWHERE, NOWHERE, 31, 31]
    with pytest.raises(UnknownCallError, match="0x130"):
        dpp_sources(0x130, 64)


LANE = np.arange(64, dtype=np.int32)


@pytest.mark.parametrize(
    ("name", "operands", "expected"),
    [
        ("ds.bpermute", lambda lane: ((lane + 1) * 4, lane * 10), (LANE + 1) % 64 * 10),
        ("readlane", lambda lane: (lane * 3, 5), np.full(64, 15)),
        ("readfirstlane", lambda lane: (lane + 7,), np.full(64, 7)),
        ("mov.dpp", lambda lane: (lane, 0x140, 15, 15, True), LANE // 16 * 16 + 15 - LANE % 16),
        ("update.dpp", lambda lane: (lane * 0 - 1, lane, 0x111, 15, 15, False),
         np.where(LANE % 16 == 0, -1, LANE - 1)),
        ("update.dpp", lambda lane: (lane * 0 - 1, lane, 0x111, 10, 15, True),
         np.where(LANE // 16 % 2 == 0, -1, np.where(LANE % 16 == 0, 0, LANE - 1))),
        ("sdot4", lambda lane: (0x7F80FF02, 0x01010101, lane, False), LANE + 127 - 128 - 1 + 2),
        ("ubfe", lambda lane: (lane, 1, 3), LANE >> 1 & 7),
        ("sbfe", lambda lane: (lane, 0, 2), ((LANE & 3) ^ 2) - 2),
    ],
)  # fmt: skip
def test_intrinsics_in_a_kernel(name: str, operands: object, expected: np.ndarray) -> None:
    """Each goes the whole way: an intrinsic of LLVM in TIR, executed by 64 lanes."""
    found = compute("gfx942", lambda lane: intrinsic("int32", name, *operands(lane)))
    assert np.array_equal(found, expected)


def test_16_byte_reads_are_served_in_fours() -> None:
    lanes = np.arange(64)
    assert LDS.passes(lanes * 4, 4) == (2, 2)
    assert LDS.passes(lanes * 16, 16) == (8, 8)
    # Lanes 0 to 7 on the same banks: a write meets them in one pass, a read in two.
    folded = np.where(lanes % 8 < 4, lanes % 4 * 16, lanes % 4 * 16 + 4096)
    assert LDS.passes(folded, 16, is_read=False) == (16, 8)
    sorted_lanes = sorted(lane for group in LDS.groups(16, True) for lane in group)
    assert sorted_lanes == lanes.tolist()


def test_unknown_architectures_are_named() -> None:
    with pytest.raises(UnknownCallError, match="gfx942"):
        calls_for("gfx906")


@pytest.mark.parametrize(("arch", "kept"), [("gfx90a", False), ("gfx942", True)])
def test_cdna2_flushes_subnormals_in_dot_products_too(arch: str, kept: bool) -> None:
    def body(lane: object) -> object:
        tiny = T.Cast("float16", T.Cast("float32", lane) * T.float32(2.0**-20))
        pair = T.Broadcast(tiny, 2)
        return intrinsic("float32", "fdot2", pair, T.Broadcast(T.float16(1), 2), T.float32(0), False)

    found = compute(arch, body, "float32")
    assert np.array_equal(found, LANE * np.float32(2.0**-19) if kept else np.zeros(64))
