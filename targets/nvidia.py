"""NVIDIA GPUs, one row per architecture.

Sources: compute-capability table of the CUDA C++ Programming Guide (occupancy and shared
memory limits); architecture whitepapers and datasheets of the product in ``title`` (units,
boost clock, bandwidth, dense tensor-core rates). Rows marked "measured" come from the
project's own H200 runs (device read 4.25 of 4.8 TB/s, cuBLAS fp16 790 of 989 TFLOP/s,
cuBLASLt fp8 1,575 of 1,979 TFLOP/s); other architectures inherit these ratios.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from targets.device import Core, Layer, TileDevice, accumulator_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

DRAM_SUSTAINED = 4.25 / 4.8
"""Measured on an H200: reads reach 4.25 of the datasheet's 4.8 TB/s."""

CORE_SUSTAINED = 790 / 989
"""Measured on an H200: cuBLAS fp16 reaches 790 of the datasheet's 989 TFLOP/s."""

MMA_ON_HOPPER = 0.62
"""mma.sync reaches about 62 % of wgmma's rate on sm_90 (Luo et al., arXiv:2402.13499, table 8)."""

TENSOR_TILE = (4, 8)
"""ldmatrix.x4: four 8x8 matrices, each of eight 16-byte rows (PTX ISA, ldmatrix)."""

LOADS = {"cp.async": ("cp.async.cg.16",), "tma": ("cp.async.bulk", "cp.async.bulk.tensor")}
"""Feature -> the loads from global memory that it adds."""

VOLTA_TILE = (4, 8)
"""mma.m8n8k4: four quad-pairs of eight lanes (PTX ISA, m8n8k4 fragments)."""


@dataclass(frozen=True)
class Chip:
    """The constants in which architectures differ."""

    arch: str
    title: str
    units: int
    clock: float
    dram: tuple[int, float]  # capacity in bytes, bytes per second
    l2: tuple[int, float]
    shared: tuple[int, int]  # bytes per block, bytes per SM
    features: frozenset[str]
    toolkit: str
    threads: int = 2048  # resident threads per SM
    blocks: int = 32  # resident blocks per SM


def _layers(chip: Chip) -> tuple[Layer, ...]:
    """Return the memory layers: 16-byte lane accesses, 32-byte sectors, 32 banks of 4 bytes."""
    banks = 128.0 * chip.units * chip.clock
    more = (load for feature, loads in LOADS.items() if feature in chip.features for load in loads)
    loads = ("ld.global.nc.v4.b32", *more)
    return (
        Layer("dram", 16, (1, 2), *chip.dram, DRAM_SUSTAINED, loads, 700e-9),
        Layer("l2", 16, (1, 2), *chip.l2, 0.8, loads, 250e-9),
        Layer("shared", 4, (32,), chip.shared[1], banks, 0.9, _shared_moves(chip), 30e-9),
        Layer("register", 4, (32,), 256 * KIB, 4 * banks, 1.0, ("mov.b32", "lop3.b32", "prmt.b32")),
    )


def _shared_moves(chip: Chip) -> tuple[str, ...]:
    return (("ldmatrix.x4",) if "ldmatrix" in chip.features else ()) + ("ld.shared.v4.b32",)


def _mma(k: int, a: str, rate: float, pipelines: tuple[str, ...]) -> Core:
    bits = 8 if a in ("int8", "fp8_e4m3", "fp8_e5m2") else 32 if a == "tfloat32" else 16
    loaded = max(4, 16 * k * bits // 8 // 32), TENSOR_TILE, CORE_SUSTAINED
    return Core(f"mma.m16n8k{k}.{a}", 16, 8, k, a, a, accumulator_of(a), rate, pipelines, *loaded)


def _wide(pipeline: str, m: int, k: int, a: str, rate: float) -> Core:
    """Return the core of a whole warpgroup, with 256 columns."""
    loaded = 16, TENSOR_TILE, CORE_SUSTAINED
    return Core(
        f"{pipeline}.m{m}n256k{k}.{a}", m, 256, k, a, a, accumulator_of(a), rate, (pipeline,), *loaded
    )


_wgmma, _tcgen05 = partial(_wide, "wgmma", 64), partial(_wide, "tcgen05", 128)


def _device(chip: Chip, cores: tuple[Core, ...]) -> TileDevice:
    compute = chip.arch.removeprefix("sm_")
    target = {
        "kind": "cuda",
        "arch": chip.arch,
        "max_threads_per_block": 1024,
        "thread_warp_size": 32,
        "max_shared_memory_per_block": chip.shared[0],
    }
    return TileDevice(
        name=f"cuda/{chip.arch}",
        vendor="nvidia",
        arch=chip.arch,
        title=chip.title,
        units=chip.units,
        clock=chip.clock,
        warp=32,
        layers=_layers(chip),
        cores=cores,
        target=tuple(sorted(target.items())),
        compile_options=("-gencode", f"arch=compute_{compute},code=sm_{compute}"),
        features=chip.features,
        vector_ops_per_cycle=64,  # 32-bit integer operations
        registers_per_unit=65536,
        max_threads_per_unit=chip.threads,
        max_blocks_per_unit=chip.blocks,
        shared_per_block=chip.shared[0],
        shared_per_unit=chip.shared[1],
        toolkit=chip.toolkit,
        source=f"{chip.title} datasheet; CUDA C++ Programming Guide, compute capabilities",
    )


BOTH = ("gemv", "mma")
ALL_WARP = (*BOTH, "digits")
"""``digits`` multiplies unsigned by signed bytes, whatever the type of the activations."""
VOLTA = frozenset({"mma", "fp16"})
TURING = VOLTA | {"ldmatrix", "int8"}
AMPERE = TURING | {"cp.async", "bf16", "tf32", "l2.prefetch", "redux"}
ADA = AMPERE | {"fp8"}
HOPPER = ADA | {"wgmma", "tma", "mbarrier", "cluster", "setmaxnreg", "stmatrix", "pdl", "vector.red"}
BLACKWELL = (HOPPER - {"wgmma"}) | {"tcgen05", "block.scale", "fp4", "fp6"}


def _ampere_cores(rate: float) -> tuple[Core, ...]:
    return (
        _mma(16, "float16", rate, ALL_WARP),
        _mma(16, "bfloat16", rate, ALL_WARP),
        _mma(32, "int8", 2 * rate, ALL_WARP),
        _mma(8, "tfloat32", rate / 2, ()),
    )


def _ada_cores(rate: float, fp8: float | None = None) -> tuple[Core, ...]:
    eight = 2 * rate if fp8 is None else fp8
    types = "fp8_e4m3", "fp8_e5m2"
    return _ampere_cores(rate) + tuple(_mma(32, name, eight, BOTH) for name in types)


SM_70 = _device(
    Chip(
        "sm_70", "Tesla V100 SXM2", 80, 1.53e9, dram=(32 * GIB, 900e9), l2=(6 * MIB, 2.1e12),
        shared=(96 * KIB, 96 * KIB), features=VOLTA, toolkit="cuda>=9.0,<13.0",
    ),
    (
        Core(
            "mma.m8n8k4.float16", 8, 8, 4, "float16", "float16", "float32", 1024, ("mma",), 8, VOLTA_TILE,
            CORE_SUSTAINED,
        ),
    ),
)  # fmt: skip

SM_75 = _device(
    Chip(
        "sm_75", "Tesla T4", 40, 1.59e9, dram=(16 * GIB, 320e9), l2=(4 * MIB, 1.2e12),
        shared=(64 * KIB, 64 * KIB), features=TURING, toolkit="cuda>=10.0", threads=1024, blocks=16,
    ),
    (
        # Turing has m16n8k8 for fp16 and m8n8k16 for int8 (PTX ISA).
        _mma(8, "float16", 1024, BOTH),
        Core(
            "mma.m8n8k16.int8", 8, 8, 16, "int8", "int8", "int32", 2048, BOTH, 4, TENSOR_TILE, CORE_SUSTAINED
        ),
    ),
)  # fmt: skip

SM_80 = _device(
    Chip(
        "sm_80", "A100 SXM 80GB", 108, 1.41e9, dram=(80 * GIB, 2039e9), l2=(40 * MIB, 4.5e12),
        shared=(163 * KIB, 164 * KIB), features=AMPERE, toolkit="cuda>=11.0",
    ),
    _ampere_cores(2048),
)  # fmt: skip

SM_86 = _device(
    Chip(
        "sm_86", "RTX A6000", 84, 1.80e9, dram=(48 * GIB, 768e9), l2=(6 * MIB, 2.5e12),
        shared=(99 * KIB, 100 * KIB), features=AMPERE, toolkit="cuda>=11.1", threads=1536, blocks=16,
    ),
    _ampere_cores(1024),
)  # fmt: skip

SM_89 = _device(
    Chip(
        "sm_89", "L40S", 142, 2.52e9, dram=(48 * GIB, 864e9), l2=(96 * MIB, 5.0e12),
        shared=(99 * KIB, 100 * KIB), features=ADA, toolkit="cuda>=11.8", threads=1536, blocks=24,
    ),
    _ada_cores(1024),
)  # fmt: skip

SM_90A = _device(
    # L2: size as the driver reports it; bandwidth such that 0.8 of it covers the 7.2 TB/s of tile
    # reads (4.9 GB in 682 us) of the project's fastest int4 kernel at 8192², M=4096.
    Chip(
        "sm_90a", "H200 SXM", 132, 1.83e9, dram=(141 * GIB, 4.8e12), l2=(60 * MIB, 10.5e12),
        shared=(227 * KIB, 228 * KIB), features=HOPPER, toolkit="cuda>=12.0",
    ),
    (
        _wgmma(16, "float16", 4096),
        _wgmma(16, "bfloat16", 4096),
        _wgmma(32, "fp8_e4m3", 8192),
        _wgmma(32, "fp8_e5m2", 8192),
        _wgmma(32, "int8", 8192),
        *_ada_cores(4096 * MMA_ON_HOPPER),
    ),
)  # fmt: skip

B200 = Chip(
    "sm_100a", "B200 SXM", 148, 1.85e9, dram=(180 * GIB, 8.0e12), l2=(126 * MIB, 1.0e13),
    shared=(227 * KIB, 228 * KIB), features=BLACKWELL, toolkit="cuda>=12.8",
)  # fmt: skip

BLACKWELL_CORES = (
    # A datasheet of eight B200 (NVIDIA) has 36 PFLOPS of 16-bit, 72 of 8-bit products, sparse:
    # half of an eighth each; as a share of that cores are taken to sustain what the H200's do.
    # mma.sync is taken to run at Hopper's rate (not published); of fp8, ptxas makes products of float16.
    _tcgen05(16, "float16", 8192),
    _tcgen05(16, "bfloat16", 8192),
    _tcgen05(32, "fp8_e4m3", 16384),
    _tcgen05(32, "fp8_e5m2", 16384),
    *_ada_cores(4096 * MMA_ON_HOPPER, fp8=4096 * MMA_ON_HOPPER),
)

SM_100A = _device(B200, (_tcgen05(32, "int8", 16384), *BLACKWELL_CORES))

SM_103A = _device(
    # The datasheet of eight B300 has the B200's rates of 16 and 8 bits; tcgen05 of sm_103a has no kind::i8.
    replace(B200, arch="sm_103a", title="B300 SXM", dram=(268 * GIB, 8.0e12), toolkit="cuda>=12.9"),
    BLACKWELL_CORES,
)

DEVICES = (SM_70, SM_75, SM_80, SM_86, SM_89, SM_90A, SM_100A, SM_103A)
