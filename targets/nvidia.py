"""NVIDIA GPUs, one row per architecture.

Sources: compute-capability table of the CUDA C++ Programming Guide (occupancy and shared
memory limits); architecture whitepapers and datasheets of the product in ``title`` (units,
boost clock, bandwidth, dense tensor-core rates). Rows marked "measured" come from the
project's own H200 runs (device read 4.25 of 4.8 TB/s, cuBLAS fp16 790 of 989 TFLOP/s,
cuBLASLt fp8 1,575 of 1,979 TFLOP/s); other architectures inherit these ratios.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from targets.device import Core, Layer, TileDevice

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

DRAM_SUSTAINED = 4.25 / 4.8
"""Measured on an H200: reads reach 4.25 of the datasheet's 4.8 TB/s."""

CORE_SUSTAINED = 790 / 989
"""Measured on an H200: cuBLAS fp16 reaches 790 of the datasheet's 989 TFLOP/s."""

MMA_ON_HOPPER = 0.62
"""mma.sync reaches about 62 % of wgmma's rate on sm_90 (Luo et al., arXiv:2402.13499, table 8)."""

TENSOR_TILE = (4, 8)
"""ldmatrix.x4: four 8x8 matrices, each of eight 16-byte rows (PTX ISA, ldmatrix)."""

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
    threads: int  # resident threads per SM
    blocks: int  # resident blocks per SM
    int_ops: int  # 32-bit integer operations per cycle and SM
    features: frozenset[str]
    toolkit: str
    dram_moves: tuple[str, ...]


def _layers(chip: Chip) -> tuple[Layer, ...]:
    """Return the memory layers: 16-byte lane accesses, 32-byte sectors, 32 banks of 4 bytes."""
    banks = 128.0 * chip.units * chip.clock
    return (
        Layer("dram", 16, (1, 2), chip.dram[0], chip.dram[1], DRAM_SUSTAINED, chip.dram_moves, 700e-9),
        Layer("l2", 16, (1, 2), chip.l2[0], chip.l2[1], 0.8, chip.dram_moves, 250e-9),
        Layer("shared", 4, (32,), chip.shared[1], banks, 0.9, _shared_moves(chip), 30e-9),
        Layer("register", 4, (32,), 256 * KIB, 4 * banks, 1.0, ("mov.b32", "lop3.b32", "prmt.b32")),
    )


def _shared_moves(chip: Chip) -> tuple[str, ...]:
    return (("ldmatrix.x4",) if "ldmatrix" in chip.features else ()) + ("ld.shared.v4.b32",)


def _mma(k: int, a: str, accumulator: str, rate: float, pipelines: tuple[str, ...], m: int = 16) -> Core:
    bits = 8 if a in ("int8", "fp8_e4m3", "fp8_e5m2") else 32 if a == "tfloat32" else 16
    lane_bytes = max(4, m * k * bits // 8 // 32)
    return Core(
        f"mma.m{m}n8k{k}.{a}",
        m,
        8,
        k,
        a,
        a,
        accumulator,
        rate,
        pipelines,
        lane_bytes,
        TENSOR_TILE,
        CORE_SUSTAINED,
    )


def _wgmma(k: int, a: str, accumulator: str, rate: float) -> Core:
    return Core(
        f"wgmma.m64n256k{k}.{a}",
        64,
        256,
        k,
        a,
        a,
        accumulator,
        rate,
        ("wgmma",),
        16,
        TENSOR_TILE,
        CORE_SUSTAINED,
    )


def _tcgen05(k: int, a: str, rate: float) -> Core:
    shape = ("tcgen05",), 16, TENSOR_TILE, CORE_SUSTAINED
    accumulator = "int32" if a == "int8" else "float32"
    return Core(f"tcgen05.m128n256k{k}.{a}", 128, 256, k, a, a, accumulator, rate, *shape)


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
        vector_ops_per_cycle=chip.int_ops,
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
HOPPER = ADA | {"wgmma", "tma", "mbarrier", "cluster", "setmaxnreg", "stmatrix", "pdl"}
BLACKWELL = (HOPPER - {"wgmma"}) | {"tcgen05", "block.scale", "fp4", "fp6"}

PLAIN_LOADS = ("ld.global.nc.v4.b32",)
ASYNC_LOADS = (*PLAIN_LOADS, "cp.async.cg.16")
BULK_LOADS = (*ASYNC_LOADS, "cp.async.bulk", "cp.async.bulk.tensor")


def _ampere_cores(rate: float) -> tuple[Core, ...]:
    return (
        _mma(16, "float16", "float32", rate, ALL_WARP),
        _mma(16, "bfloat16", "float32", rate, ALL_WARP),
        _mma(32, "int8", "int32", 2 * rate, ALL_WARP),
        _mma(8, "tfloat32", "float32", rate / 2, ()),
    )


def _ada_cores(rate: float, fp8: float | None = None) -> tuple[Core, ...]:
    eight = 2 * rate if fp8 is None else fp8
    types = "fp8_e4m3", "fp8_e5m2"
    return _ampere_cores(rate) + tuple(_mma(32, name, "float32", eight, BOTH) for name in types)


SM_70 = _device(
    Chip(
        "sm_70",
        "Tesla V100 SXM2",
        80,
        1.53e9,
        (32 * GIB, 900e9),
        (6 * MIB, 2.1e12),
        (96 * KIB, 96 * KIB),
        2048,
        32,
        64,
        VOLTA,
        "cuda>=9.0,<13.0",
        PLAIN_LOADS,
    ),
    (
        Core(
            "mma.m8n8k4.float16",
            8,
            8,
            4,
            "float16",
            "float16",
            "float32",
            1024,
            ("mma",),
            8,
            VOLTA_TILE,
            CORE_SUSTAINED,
        ),
    ),
)

SM_75 = _device(
    Chip(
        "sm_75",
        "Tesla T4",
        40,
        1.59e9,
        (16 * GIB, 320e9),
        (4 * MIB, 1.2e12),
        (64 * KIB, 64 * KIB),
        1024,
        16,
        64,
        TURING,
        "cuda>=10.0",
        PLAIN_LOADS,
    ),
    (
        # Turing has m16n8k8 for fp16 and m8n8k16 for int8 (PTX ISA).
        _mma(8, "float16", "float32", 1024, BOTH),
        Core(
            "mma.m8n8k16.int8", 8, 8, 16, "int8", "int8", "int32", 2048, BOTH, 4, TENSOR_TILE, CORE_SUSTAINED
        ),
    ),
)

SM_80 = _device(
    Chip(
        "sm_80",
        "A100 SXM 80GB",
        108,
        1.41e9,
        (80 * GIB, 2039e9),
        (40 * MIB, 4.5e12),
        (163 * KIB, 164 * KIB),
        2048,
        32,
        64,
        AMPERE,
        "cuda>=11.0",
        ASYNC_LOADS,
    ),
    _ampere_cores(2048),
)

SM_86 = _device(
    Chip(
        "sm_86",
        "RTX A6000",
        84,
        1.80e9,
        (48 * GIB, 768e9),
        (6 * MIB, 2.5e12),
        (99 * KIB, 100 * KIB),
        1536,
        16,
        64,
        AMPERE,
        "cuda>=11.1",
        ASYNC_LOADS,
    ),
    _ampere_cores(1024),
)

SM_89 = _device(
    Chip(
        "sm_89",
        "L40S",
        142,
        2.52e9,
        (48 * GIB, 864e9),
        (96 * MIB, 5.0e12),
        (99 * KIB, 100 * KIB),
        1536,
        24,
        64,
        ADA,
        "cuda>=11.8",
        ASYNC_LOADS,
    ),
    _ada_cores(1024),
)

SM_90A = _device(
    # L2: size as the driver reports it; bandwidth such that 0.8 of it covers the 7.2 TB/s of tile
    # reads (4.9 GB in 682 us) of the project's fastest int4 kernel at 8192², M=4096.
    Chip(
        "sm_90a",
        "H200 SXM",
        132,
        1.83e9,
        (141 * GIB, 4.8e12),
        (60 * MIB, 10.5e12),
        (227 * KIB, 228 * KIB),
        2048,
        32,
        64,
        HOPPER,
        "cuda>=12.0",
        BULK_LOADS,
    ),
    (
        _wgmma(16, "float16", "float32", 4096),
        _wgmma(16, "bfloat16", "float32", 4096),
        _wgmma(32, "fp8_e4m3", "float32", 8192),
        _wgmma(32, "fp8_e5m2", "float32", 8192),
        _wgmma(32, "int8", "int32", 8192),
        *_ada_cores(4096 * MMA_ON_HOPPER),
    ),
)

B200 = Chip(
    "sm_100a",
    "B200 SXM",
    148,
    1.85e9,
    (180 * GIB, 8.0e12),
    (126 * MIB, 1.0e13),
    (227 * KIB, 228 * KIB),
    2048,
    32,
    64,
    BLACKWELL,
    "cuda>=12.8",
    BULK_LOADS,
)

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
