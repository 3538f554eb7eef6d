"""Kernels become AMD code objects without an AMD GPU: instructions, registers, errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ladder
from ladder.ir.gemm import Gemm
from ladder.lower.build import build, build_function
from ladder.lower.rocm import toolchain
from schedules.policy import rank
from schedules.schedule import GpuSchedule, Plan
from targets import get_device
from tile_types.errors import CompilerError, ConversionError, DeviceError, MissingToolError

SMALL = {"mfma": ("mfma", 32, 64, 64), "dot": ("dot", 2, 64, 128)}

KERNELS = [
    ("gfx90a", "int4", "float16", "mfma", "v_mfma_f32_16x16x16f16"),
    ("gfx90a", "int4", "bfloat16", "mfma", "v_mfma_f32_16x16x16bf16_1k"),
    ("gfx90a", "int4", "int8", "mfma", "v_mfma_i32_16x16x16i8"),
    ("gfx90a", "int8", "int8", "dot", "v_dot4"),
    ("gfx942", "uint3", "float16", "mfma", "v_mfma_f32_16x16x16_f16"),
    ("gfx942", "nf4", "float16", "dot", "v_dot2"),
    ("gfx942", "int8", "int8", "mfma", "v_mfma_i32_16x16x32_i8"),
    ("gfx942", "fp8_e5m2", "fp8_e4m3", "mfma", "v_mfma_f32_16x16x32_bf8_fp8"),
    ("gfx950", "mxfp4", "float16", "mfma", "v_mfma_f32_16x16x32_f16"),
]


def _compiled(arch: str, gemm: Gemm, schedule: GpuSchedule, folder: Path) -> tuple[str, dict[str, int]]:
    built = build(gemm, get_device(f"rocm/{arch}"), Plan(((1 << 30, schedule),)), folder)
    assert built.path.is_file()
    (report,) = built.resources.values()
    return built.sources["asm"], dict(report)


@pytest.mark.parametrize(("arch", "weight", "activation", "pipeline", "instruction"), KERNELS)
def test_kernels_compile(
    arch: str, weight: str, activation: str, pipeline: str, instruction: str, tmp_path: Path
) -> None:
    wide = activation in ("float16", "bfloat16") and arch != "gfx90a"
    schedule = GpuSchedule(
        *SMALL[pipeline],
        stages=2,
        warps=4,
        split_k=2 if pipeline == "dot" else 1,
        placement="operand" if wide else "accumulator",
        warp_rows=32 if pipeline == "dot" else 16,
    )
    assembly, report = _compiled(arch, Gemm(256, 512, weight, activation, group_size=32), schedule, tmp_path)
    assert re.search(rf"^\s+{instruction}", assembly, re.MULTILINE)
    assert report["code_object"] == 5
    assert report["wave"] == 64
    assert not report["vgpr_spills"] + report["sgpr_spills"] + report["scratch_bytes"]


LARGE = [
    ("gfx942", Gemm(8192, 8192, "float16", "float16", scale=False), 8192),
    ("gfx942", Gemm(8192, 8192, "int4", "bfloat16", group_size=128), 8192),
    ("gfx90a", Gemm(8192, 8192, "int4", "float16", group_size=128), 8192),
    ("gfx942", Gemm(8192, 8192, "int4", "float16", group_size=128), 16),
    ("gfx942", Gemm(8192, 8192, "int4", "float16", group_size=128), 1),
    ("gfx942", Gemm(8192, 8192, "int4", "bfloat16", group_size=128), 1),
]


def _main_loop(assembly: str) -> list[str]:
    """Return the lines of the loop that holds a barrier."""
    lines = assembly.splitlines()
    labels = {line.partition(":")[0]: at for at, line in enumerate(lines) if line.startswith(".LBB0_")}
    for at, line in enumerate(lines):
        match = re.match(r"\s+s_cbranch_\w+ (\.LBB0_\d+)", line)
        begin = labels.get(match[1], at) if match else at
        if any("s_barrier" in inside for inside in lines[begin:at]):
            return lines[begin:at]
    raise AssertionError("no loop with a barrier")


@pytest.mark.parametrize(("arch", "gemm", "m"), LARGE)
def test_what_the_policy_chooses_keeps_loads_in_flight(arch: str, gemm: Gemm, m: int, tmp_path: Path) -> None:
    schedule = rank(gemm, get_device(f"rocm/{arch}"), m)[0].schedule
    assert isinstance(schedule, GpuSchedule)
    assembly, report = _compiled(arch, gemm, schedule, tmp_path)
    assert not report["vgpr_spills"] + report["scratch_bytes"]
    # Loads return in order: whatever is awaited, later ones are still on their way.
    pending = re.findall(r"s_waitcnt vmcnt\((\d+)\)", "\n".join(_main_loop(assembly)))
    assert min(map(int, pending)) > 0


def _lacking(name: str) -> Any:
    """Return a kernel with an instruction that gfx90a has no pattern for."""
    from tvm.script import tirx as T

    from ladder.lower import builder as b
    from ladder.lower.rocm import dialect as d

    with b.function(name) as result:
        y = b.tensor("y", (64, 4), "int32")
        _, lane = d.launch(1, 64)
        zeros = T.Broadcast(T.int32(0), 4)
        pair = d.as_type(d.vector([T.Cast("uint32", lane), T.uint32(0)]), "int64")
        operands = (pair, pair, zeros, T.int32(0), T.int32(0), T.int32(0))
        total = d.intrinsic("int32x4", "llvm.amdgcn.mfma.i32.16x16x32.i8", *operands)
        b.store(y, total, lane, d.lanes(0, 4))
    return result.func


def test_an_instruction_that_is_missing_is_an_error_and_no_abort(tmp_path: Path) -> None:
    with pytest.raises(CompilerError, match=r"rocm/gfx90a.*Cannot select.*mfma"):
        build_function(_lacking, "lacking", get_device("rocm/gfx90a"), tmp_path)
    assert build_function(_lacking, "lacking", get_device("rocm/gfx942"), tmp_path).path.is_file()


@pytest.mark.parametrize("release", [None, 14])
def test_a_missing_or_old_linker_is_named(release: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.linker.cache_clear()
    monkeypatch.setattr(toolchain, "packaged_linker", lambda: None)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: f"/usr/bin/{name}" if release else None)
    monkeypatch.setattr(toolchain, "_release", lambda path: release)
    with pytest.raises(MissingToolError, match=r"ladder-compiler\[rocm\]") as caught:
        toolchain.linker()
    assert ("release 14" if release else "no ld.lld") in str(caught.value)
    toolchain.linker.cache_clear()


def test_the_interface_compiles_and_says_why_it_does_not_run() -> None:
    op = ladder.Matmul(N=128, K=256, weight="int4", group_size=128, target="rocm/gfx942")
    weight = op.pack(ladder.quantize(torch.randn(128, 256), "int4", group_size=128))
    with pytest.raises(DeviceError, match="rocm/gfx942"):
        op(torch.randn(2, 256, dtype=torch.float16), weight)
    with pytest.raises(ConversionError, match="use one of bfloat16, float16, int8"):
        rank(Gemm(128, 256, "int4", "fp8_e4m3"), get_device("rocm/gfx1100"), 1)


@pytest.mark.parametrize(("masked", "m"), [(False, 1), (False, 64), (True, 64)])
def test_experts_compile_with_evidence(masked: bool, m: int) -> None:
    op = ladder.GroupedMatmul(E=8, N=256, K=512, weight="int4", group_size=128, masked=masked)
    found = op.lower("rocm/gfx942").evidence(m).as_json()
    assert found["spills"] == found["scratch_bytes"] == 0
    assert found["mfma"] + found["dots"] > 0
    assert found["predicted_us"] > 0
