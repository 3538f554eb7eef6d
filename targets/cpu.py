"""CPUs by instruction set; the host is one of these rows with its own core count.

Sources: Intel Intrinsics Guide and the Intel 64 optimisation manual (instruction extents and
throughput), AMD Zen 4 optimisation guide, Arm Architecture Reference Manual (DotProd, I8MM).
Clock and bandwidth are per core of a cloud machine; the project measured 33 GB/s of reads on
two AMX cores. They rank schedules and are never quoted.
"""

from __future__ import annotations

from dataclasses import dataclass

from targets.device import Core, Layer, TileDevice

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

BANDWIDTH_PER_CORE = 33e9 / 2
"""Bytes per second; measured on two cores of an AMX machine."""

MAX_BANDWIDTH = 300e9
"""Eight channels of DDR5-4800 give 307 GB/s: more cores do not add bandwidth."""

CPU = ("cpu",)


@dataclass(frozen=True)
class CpuCore:
    """A compute instruction and the features it needs."""

    core: Core
    needs: frozenset[str]


def _row(
    name: str, extents: tuple[int, int, int], a: str, accumulator: str, ops: float, vector: int, needs: str
) -> CpuCore:
    m, n, k = extents
    core = Core(name, m, n, k, a, a, accumulator, ops, CPU, vector, (1, 1), 0.7)
    return CpuCore(core, frozenset(needs.split()))


CORES = (
    # tdpbssd: 16x16x64 in 16 cycles; tdpbf16ps: 16x16x32 in 16 cycles (Intel optimisation manual, AMX).
    _row("amx_int8", (16, 16, 64), "int8", "int32", 2048, 64, "amx_tile amx_int8"),
    _row("amx_bf16", (16, 16, 32), "bfloat16", "float32", 1024, 64, "amx_tile amx_bf16"),
    # The same with elements that are sums of two bfloat16, or three.
    _row("amx_bf16_terms", (16, 16, 32), "float16", "float32", 512, 64, "amx_tile amx_bf16 f16c"),
    _row("amx_bf16_terms", (16, 16, 32), "float32", "float32", 341, 64, "amx_tile amx_bf16"),
    # vpdpbusd zmm: 64 multiply-adds, two per cycle on Intel, one on Zen 4.
    _row("avx512_vnni", (1, 16, 4), "int8", "int32", 128, 64, "avx512f avx512_vnni"),
    _row("avx_vnni", (1, 8, 4), "int8", "int32", 128, 32, "avx2 avx_vnni"),
    # vpmaddubsw ymm: 32 multiply-adds, two per cycle beside as many additions of 16 bits on Zen 3.
    _row("avx2_maddubs", (1, 8, 4), "int8", "int32", 96, 32, "avx2"),
    _row("avx512_bf16", (1, 16, 2), "bfloat16", "float32", 64, 64, "avx512f avx512_bf16"),
    _row("i8mm", (2, 2, 8), "int8", "int32", 128, 16, "asimd i8mm"),
    _row("dotprod", (1, 4, 4), "int8", "int32", 64, 16, "asimd dotprod"),
    _row("bfmmla", (2, 2, 4), "bfloat16", "float32", 64, 16, "asimd bf16"),
    # fma works on float32 after an exact widening of the activation, hence one row per operand type.
    _row("fma", (1, 16, 1), "float32", "float32", 64, 64, "avx512f"),
    _row("fma", (1, 16, 1), "bfloat16", "float32", 64, 64, "avx512f"),
    _row("fma", (1, 16, 1), "float16", "float32", 64, 64, "avx512f f16c"),
    # vpdpwssd zmm: 32 multiply-adds, as often as vpdpbusd; each element of x takes two.
    *(
        _row("avx512_vnni16", (1, 16, 2), x, "float32", 64, 64, "avx512f avx512bw avx512_vnni f16c")
        for x in ("bfloat16", "float16")
    ),
    # Bytes of weights by three digits of an element, or by two; weights of two bytes.
    *(
        _row(name, (1, 16, 4), x, "float32", ops, 64, "avx512f avx512bw avx512_vbmi avx512_vnni f16c")
        for name, ops, given in (
            ("avx512_vnni8x2", 64, ("bfloat16", "float16")),
            ("avx512_vnni8w2", 32, ("bfloat16", "float16")),
            ("avx512_vnni8", 42, ("bfloat16", "float16", "float32")),
        )
        for x in given
    ),
    _row("fma", (1, 4, 1), "float32", "float32", 16, 16, "asimd"),
    _row("fma", (1, 4, 1), "bfloat16", "float32", 16, 16, "asimd"),
    _row("fma", (1, 4, 1), "float16", "float32", 16, 16, "asimd"),
    _row("fma", (1, 4, 1), "int8", "int32", 16, 16, "asimd"),
    _row("fma", (1, 8, 1), "float32", "float32", 32, 32, ""),
    _row("fma", (1, 8, 1), "bfloat16", "float32", 32, 32, ""),
    _row("fma", (1, 8, 1), "float16", "float32", 32, 32, ""),
    _row("fma", (1, 8, 1), "int8", "int32", 32, 32, ""),
)

X86_V3 = frozenset({"sse4_2", "avx", "avx2", "fma", "f16c", "bmi1", "bmi2"})
X86_V4 = X86_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
VNNI = X86_V4 | {"avx512_vnni"}
ZEN4 = VNNI | {
    "avx512_bf16",
    "avx512_vbmi",
    "avx512_vbmi2",
    "avx512_bitalg",
    "avx512_vpopcntdq",
    "avx512ifma",
    "gfni",
}
AMX = ZEN4 | {"amx_tile", "amx_int8", "amx_bf16", "avx512_fp16", "avx_vnni"}
NEON = frozenset({"asimd", "asimdhp", "dotprod"})

ATTRIBUTES = {
    "avx2": "avx2", "fma": "fma", "f16c": "f16c", "bmi1": "bmi", "bmi2": "bmi2", "gfni": "gfni",
    "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512cd": "avx512cd", "avx512dq": "avx512dq",
    "avx512vl": "avx512vl", "avx512ifma": "avx512ifma", "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16", "avx512_fp16": "avx512fp16", "avx512_vbmi": "avx512vbmi",
    "avx512_vbmi2": "avx512vbmi2", "avx512_bitalg": "avx512bitalg",
    "avx512_vpopcntdq": "avx512vpopcntdq", "avx_vnni": "avxvnni", "amx_tile": "amx-tile",
    "amx_int8": "amx-int8", "amx_bf16": "amx-bf16", "amx_fp16": "amx-fp16",
    "asimd": "neon", "asimdhp": "fullfp16", "dotprod": "dotprod", "i8mm": "i8mm", "bf16": "bf16",
}  # fmt: skip
"""Feature, spelled as in /proc/cpuinfo up to `targets.detect.ALIASES`, to LLVM attribute."""

MCPU = (
    ("sapphirerapids", frozenset({"amx_tile", "amx_int8", "amx_bf16", "avx512_fp16"})),
    ("znver4", ZEN4),
    ("x86-64-v4", X86_V4),
    ("x86-64-v3", frozenset({"avx2", "fma", "f16c", "bmi2"})),
)
"""LLVM processor by features, most demanding first; `ATTRIBUTES` add what it leaves out."""

ABSENT = {"znver4": ("-sse4a",)}
"""LLVM processor -> what it has and others of the same features lack: LLVM shuffles bytes by AMD's SSE4a."""


DOT_TUNING = ("+fast-dpwssd",)
"""LLVM makes a multiply and an addition of ``vpdpwssd`` unless it is told that this is slower."""


def mcpu_for(features: frozenset[str]) -> str:
    """Return the LLVM processor name whose features are all present."""
    if "asimd" in features:
        return "generic"
    return next((name for name, needs in MCPU if needs <= features), "x86-64")


def cores_of(features: frozenset[str]) -> tuple[Core, ...]:
    """Return the compute instructions available with ``features``, fastest first per operand type."""
    rows: dict[tuple[str, str], Core] = {}
    for row in CORES:
        if row.needs <= features:
            rows.setdefault((row.core.name, row.core.a), row.core)
    return tuple(rows.values())


def cpu_device(
    name: str, title: str, features: frozenset[str], cores: int, clock: float = 2.6e9
) -> TileDevice:
    """Build a CPU from its features.

    name: Device name, ``"cpu/..."``.
    title: What it is, for people.
    features: As in /proc/cpuinfo.
    cores, clock: Number of cores and their clock in Hz.
    """
    arm, mcpu = "asimd" in features, mcpu_for(features)
    vector = 16 if arm else 64 if "avx512f" in features else 32
    bandwidth = min(BANDWIDTH_PER_CORE * cores, MAX_BANDWIDTH)
    target: dict[str, object] = {
        "kind": "llvm",
        "mcpu": mcpu,
        "mattr": tuple(f"+{ATTRIBUTES[x]}" for x in sorted(features) if x in ATTRIBUTES)
        + (DOT_TUNING if "avx512_vnni" in features else ())
        + ABSENT.get(mcpu, ()),
        "num-cores": cores,
    }
    if arm:
        target["mtriple"] = "aarch64-unknown-linux-gnu"
    return TileDevice(
        name=name,
        vendor="cpu",
        arch=name.removeprefix("cpu/"),
        title=title,
        units=cores,
        clock=clock,
        warp=1,
        layers=(
            Layer("dram", vector, (64 // vector,), 16 * GIB, bandwidth, 0.9, ("load", "prefetch"), 90e-9),
            Layer(
                "l2", vector, (64 // vector,), 1 * MIB, 32.0 * clock * cores, 0.8, ("load", "prefetch"), 6e-9
            ),
            Layer("l1", vector, (1,), 32 * KIB, 2.0 * vector * clock * cores, 0.9, ("load",), 2e-9),
            Layer("register", vector, (1,), 32 * vector, 4.0 * vector * clock * cores),
        ),
        cores=cores_of(features),
        target=tuple(sorted(target.items())),
        features=features,
        vector_ops_per_cycle=2.0 * vector / 4,
        source="Intel, AMD and Arm manuals; per-core clock and bandwidth assumed",
    )


DEVICES = (
    cpu_device("cpu/amx", "x86-64 with AMX (Sapphire Rapids)", AMX, 2),
    cpu_device("cpu/avx512_bf16", "x86-64 with AVX-512 VNNI and BF16 (Zen 4)", ZEN4, 2),
    cpu_device("cpu/avx512_vnni", "x86-64 with AVX-512 VNNI (Ice Lake)", VNNI, 2),
    cpu_device("cpu/avx2", "x86-64 with AVX2", X86_V3, 2),
    cpu_device("cpu/dotprod", "AArch64 with DotProd", NEON, 2),
)
