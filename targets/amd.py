"""AMD GPUs, one row per architecture.

Sources: CDNA2, CDNA3 and CDNA4 whitepapers, RDNA3 ISA guide and product datasheets (units,
clock, bandwidth, dense matrix rates; L2: 32 channels of 128 bytes per clock on CDNA2, 16 on each
die since); LLVM AMDGPU usage guide (LDS, wavefront, targets).
Nothing here was measured by this project. What matrix cores and DRAM sustain and how long DRAM takes are
published measurements, where there are any: see `Chip`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from targets.device import Core, Layer, TileDevice, accumulator_of
from targets.nvidia import CORE_SUSTAINED, DRAM_SUSTAINED, GIB, KIB, MIB

REGISTERS: Mapping[int, int] = {64: 131072, 32: 98304}
"""Lanes of a wave -> 32-bit registers of a compute unit: CDNA has 512 for each lane of four SIMDs, RDNA 1536
for each lane of two (LLVM's AMDGPU usage guide; RDNA3 and RDNA4 ISA)."""

PIPELINES: Mapping[str, tuple[str, ...]] = {
    "float16": ("mfma", "mfma_groups", "dot"),
    "bfloat16": ("mfma", "mfma_groups"),
    "int8": ("mfma", "dot"),
}
"""Pipelines that multiply a type: lanes have dot products of these; of the others matrix cores alone."""


@dataclass(frozen=True)
class Chip:
    """The constants in which architectures differ.

    ``dram`` is (capacity, peak bytes per second, bytes per second of a kernel that only reads, latency).
    The third and fourth are measurements: of MI210 (the die of an MI250) and MI300X those of RRZE-HPC's
    gpu-benches (commit 1038c5d, gpu-stream's column "read" at its best, gpu-latency beyond the last cache:
    1397 and 4199 GB/s, 690 and 880 ns); 4.2 TB/s (ROCm issue 5070) and 81 % of the peak (Ambati et al.,
    "AMD MI300X GPU performance analysis", 2025) agree. Of MI350X 6914 GB/s (ROCm rocm-systems, pull request
    8480: reads that bypass caches); its latency is taken for that of MI300X. Of the Radeon nothing: the
    share is the H200's.

    ``matrix`` is the share of their peak that matrix cores sustain: the fastest bfloat16 product of
    S. Bekman's "Machine Learning Engineering" (commit 744d01e1, maximum achievable matmul FLOPS: MI300X 668.4
    of 1307, MI355X 1565 of 2517 TFLOPS). Of others nothing is published there: the share is the H200's.
    """

    arch: str
    title: str
    units: int
    clock: float
    wave: int
    dram: tuple[int, float, float, float]
    l2: tuple[int, float]
    lds: int
    features: frozenset[str]
    toolkit: str
    dies: int = 1
    matrix: float = CORE_SUSTAINED


def _layers(chip: Chip) -> tuple[Layer, ...]:
    """Return the memory layers: 16-byte lane accesses, 64-byte requests, 32 LDS banks of 4 bytes."""
    loads = (
        "global_load_dwordx4",
        *(("global_load_lds_dwordx4",) if "load.lds.b128" in chip.features else ()),
    )
    lds = 128.0 * chip.units * chip.clock
    capacity, peak, sustained, latency = chip.dram
    return (
        Layer("dram", 16, (1, 4), capacity, peak, sustained / peak, loads, latency),
        Layer("l2", 16, (1, 8), chip.l2[0], chip.l2[1], 0.8, loads, 300e-9),
        Layer("shared", 4, (32,), chip.lds, lds, 0.9, ("ds_read_b128", "ds_write_b128"), 60e-9),
        Layer(
            "register", 4, (chip.wave,), 512 * KIB, 4 * lds, 1.0, ("v_perm_b32", "v_bfe_u32", "v_and_or_b32")
        ),
    )


def _matrix(name: str, k: int, a: str, rate: float, *dots: str) -> Core:
    """Return an MFMA core of 16 x 16; ``dots``: the pipeline of dot products where few devices have it."""
    bits = 8 if a == "int8" or a.startswith("fp8") else 16
    # Lane l holds k/4 consecutive elements of row l % 16 (CDNA3 ISA, 7.1.4).
    pipelines = (*PIPELINES.get(a, ("mfma",)), *dots)
    loaded = k * bits // 32, (4, 16), CORE_SUSTAINED
    return Core(name, 16, 16, k, a, a, accumulator_of(a), rate, pipelines, *loaded)


def _wmma(name: str, a: str, rate: float, repeats: int, *dots: str) -> Core:
    """Return a WMMA core of 16 x 16 x 16: each lane holds a row, of K all or, if ``repeats`` is 1, half.

    dots: The pipeline of dot products, where lanes have them too.
    """
    pipelines = ("wmma" if repeats == 2 else "wmma_split", *dots)
    lane_bytes = repeats * 8 * (1 if a == "int8" or a.startswith("fp8") else 2)
    loaded = lane_bytes, (2, 16), CORE_SUSTAINED
    return Core(name, 16, 16, 16, a, a, accumulator_of(a), rate, pipelines, *loaded)


SCALED = {"mxfp8_e4m3": 8, "mxfp8_e5m2": 8, "mxfp6_e2m3": 6, "mxfp6_e3m2": 6, "mxfp4": 4}
"""Block types whose products CDNA4 scales, any two together -> bits of a code."""


def _scaled(a: str, b: str) -> Core:
    """Return the core of two block types; 8-bit codes on either side take twice the cycles."""
    rate = 8192 if 8 in (SCALED[a], SCALED[b]) else 16384
    name = "v_mfma_scale_f32_16x16x128_f8f6f4"
    return Core(name, 16, 16, 128, a, b, "float32", rate, ("mfma_scale",), 4 * SCALED[a], (4, 16))


def _device(chip: Chip, cores: tuple[Core, ...]) -> TileDevice:
    target = {
        "kind": "rocm",
        "mcpu": chip.arch,
        "mtriple": "amdgcn-amd-amdhsa-hcc",
        "thread_warp_size": chip.wave,
        "max_threads_per_block": 1024,
        "max_shared_memory_per_block": chip.lds,
    }
    return TileDevice(
        name=f"rocm/{chip.arch}",
        vendor="amd",
        arch=chip.arch,
        title=chip.title,
        units=chip.units,
        clock=chip.clock,
        warp=chip.wave,
        layers=_layers(chip),
        cores=tuple(replace(core, sustained=chip.matrix) for core in cores),
        target=tuple(sorted(target.items())),
        features=chip.features,
        vector_ops_per_cycle=64.0,
        registers_per_unit=REGISTERS[chip.wave],
        max_threads_per_unit=32 * chip.wave,
        max_blocks_per_unit=32,
        shared_per_block=chip.lds,
        shared_per_unit=chip.lds,
        toolkit=chip.toolkit,
        dies=chip.dies,
        schedulers=chip.wave // 16,
        source=f"{chip.title} datasheet and architecture whitepaper",
    )


# MI200's cores take subnormal float16 operands for 0 (AMD, "MI200 performance counters and metrics";
# PyTorch, "Numerical accuracy").
CDNA2 = frozenset({"mfma", "fp16", "bf16", "int8", "agpr", "dot", "flushes.float16"})
CDNA3 = (CDNA2 - {"flushes.float16"}) | {"mfma.i8.k32", "mfma.fp8", "fp8fnuz"}
CDNA4 = (CDNA3 - {"fp8fnuz"}) | {
    "mfma.k64",
    "fp8",
    "fp6",
    "fp4",
    "load.lds.b128",
    "cvt.scalef32",
    "dot.bf16",
    "bitop3",
}
RDNA3 = frozenset({"wmma", "fp16", "bf16", "int8", "dot32"})
RDNA4 = frozenset({"wmma.split", "fp16", "bf16", "int8", "fp8", "dot32", "dot.fp8", "wait.ds"})

GFX90A = _device(
    # One of the two dies of an MI250; each is a device of its own.
    Chip(
        "gfx90a", "Instinct MI250 (one die)", 104, 1.7e9, wave=64,
        dram=(64 * GIB, 1638e9, 1397e9, 690e-9), l2=(8 * MIB, 4096 * 1.7e9),
        lds=64 * KIB, features=CDNA2, toolkit="rocm>=5.0",
    ),
    (
        _matrix("v_mfma_f32_16x16x16f16", 16, "float16", 1024),
        _matrix("v_mfma_f32_16x16x16bf16_1k", 16, "bfloat16", 1024),
        _matrix("v_mfma_i32_16x16x16i8", 16, "int8", 1024),
    ),
)  # fmt: skip

# Its fp8 operands are fnuz codes: `ladder.lower.rocm.decode` translates those of the OCP types.
GFX942 = _device(
    Chip(
        "gfx942", "Instinct MI300X", 304, 2.1e9, wave=64,
        dram=(192 * GIB, 5.3e12, 4.2e12, 880e-9), l2=(32 * MIB, 16384 * 2.1e9),
        lds=64 * KIB, features=CDNA3, toolkit="rocm>=6.0", dies=8, matrix=668.4 / 1307,
    ),
    (
        _matrix("v_mfma_f32_16x16x16_f16", 16, "float16", 2048),
        _matrix("v_mfma_f32_16x16x16_bf16", 16, "bfloat16", 2048),
        _matrix("v_mfma_i32_16x16x32_i8", 32, "int8", 4096),
        _matrix("v_mfma_f32_16x16x32_fp8_fp8", 32, "fp8_e4m3", 4096),
        _matrix("v_mfma_f32_16x16x32_bf8_bf8", 32, "fp8_e5m2", 4096),
    ),
)  # fmt: skip

GFX950 = _device(
    Chip(
        "gfx950", "Instinct MI355X", 256, 2.4e9, wave=64,
        dram=(288 * GIB, 8.0e12, 6.914e12, 880e-9), l2=(32 * MIB, 16384 * 2.4e9),
        lds=160 * KIB, features=CDNA4, toolkit="rocm>=7.0", dies=8, matrix=1565 / 2517,
    ),
    (
        _matrix("v_mfma_f32_16x16x32_f16", 32, "float16", 4096),
        _matrix("v_mfma_f32_16x16x32_bf16", 32, "bfloat16", 4096, "dot"),
        # The chip multiplies fp8 twice as fast by the instructions that scale blocks.
        _matrix("v_mfma_i32_16x16x64_i8", 64, "int8", 8192),
        _matrix("v_mfma_f32_16x16x32_fp8_fp8", 32, "fp8_e4m3", 4096),
        _matrix("v_mfma_f32_16x16x32_bf8_bf8", 32, "fp8_e5m2", 4096),
        *(_scaled(a, b) for a in SCALED for b in SCALED),
    ),
)  # fmt: skip

GFX1100 = _device(
    Chip(
        "gfx1100", "Radeon RX 7900 XTX", 96, 2.5e9, wave=32,
        dram=(24 * GIB, 960e9, 960e9 * DRAM_SUSTAINED, 800e-9), l2=(6 * MIB, 3.5e12),
        lds=64 * KIB, features=RDNA3, toolkit="rocm>=5.7",
    ),
    (
        # Both halves of a wave hold the operands (RDNA3 ISA, 7.9).
        _wmma("v_wmma_f32_16x16x16_f16", "float16", 512, 2, "dot32"),
        _wmma("v_wmma_f32_16x16x16_bf16", "bfloat16", 512, 2, "dot32"),
        _wmma("v_wmma_i32_16x16x16_iu8", "int8", 512, 2, "dot32"),
    ),
)  # fmt: skip

GFX1201 = _device(
    Chip(
        # What L2 delivers is not published: as much per unit and clock as that of the RX 7900 XTX.
        "gfx1201", "Radeon RX 9070 XT", 64, 2.97e9, wave=32,
        dram=(16 * GIB, 640e9, 640e9 * DRAM_SUSTAINED, 800e-9), l2=(8 * MIB, 2.77e12),
        lds=64 * KIB, features=RDNA4, toolkit="rocm>=6.4",
    ),
    (
        _wmma("v_wmma_f32_16x16x16_f16", "float16", 1024, 1, "dot32"),
        _wmma("v_wmma_f32_16x16x16_bf16", "bfloat16", 1024, 1, "dot32"),
        _wmma("v_wmma_i32_16x16x16_iu8", "int8", 2048, 1, "dot32"),
        _wmma("v_wmma_f32_16x16x16_fp8_fp8", "fp8_e4m3", 2048, 1, "dot32"),
        _wmma("v_wmma_f32_16x16x16_bf8_bf8", "fp8_e5m2", 2048, 1, "dot32"),
    ),
)  # fmt: skip

DEVICES = (GFX90A, GFX942, GFX950, GFX1100, GFX1201)
