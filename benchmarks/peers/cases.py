"""What is measured and what must hold: shapes, M, contenders and bars, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.peers.drawn_types import WITH_ZERO_POINTS
from benchmarks.peers.engine import DRAWN_TYPES, Work

Shape = tuple[int, int]

SHAPES: tuple[Shape, ...] = (
    (28672, 8192),
    (8192, 28672),
    (8192, 8192),
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (6144, 4096),
)
"""(N, K) of projections of 8B and 70B language models."""

SWEEP_SHAPES: tuple[Shape, ...] = ((8192, 8192), (14336, 4096))
SWEEP = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)

HELD_OUT_SHAPES: tuple[Shape, ...] = (
    (5120, 25600),
    (37888, 3584),
    (13824, 5120),
    (2048, 11008),
    (2880, 2880),
)
"""(N, K) of projections of other models; no row of the shipped tuning database has one of them."""

HELD_OUT = (1, 5, 24, 48, 96, 200, 500, 1500)

DRAWN_SHAPES: tuple[Shape, ...] = ((3968, 2176), (6528, 6400), (4224, 26752))
"""(N, K) drawn at random, multiples of 128: 9, 42 and 113 million weights; held out too."""

DRAWN = (1, 16, 48, 96, 200, 500, 1500)

MB = 10**6
LARGE = 50 * MB
"""Packed bytes from which an int4 weight counts as large: 28672 × 8192 and its transpose."""


@dataclass(frozen=True)
class Contender:
    """An engine and what it multiplies; ``label`` names the column of a table."""

    engine: str
    work: Work
    label: str = ""

    @property
    def name(self) -> str:
        """The label, by default the engine's name."""
        return self.label or self.engine


@dataclass(frozen=True)
class Bar:
    """One requirement.

    Parameters
    ----------
    measure
        A key of `benchmarks.peers.bars.MEASURES`, which says how to compute the value.
    limit
        What the value must reach, or must not exceed where smaller is better.
    tokens, shapes
        Where it applies; empty: everywhere that the case measures.
    least_bytes
        Applies only to weights of at least so many packed bytes.
    subject
        Label of the contender that is judged.
    against
        Labels that it is compared with; empty: every other contender that is not Ladder.
    """

    measure: str
    limit: float
    tokens: tuple[int, ...] = ()
    shapes: tuple[Shape, ...] = ()
    least_bytes: int = 0
    subject: str = "ladder"
    against: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A row of the requirements, or a chart: contenders at every shape and M.

    Parameters
    ----------
    name
        For the command line.
    title
        For the report.
    contenders
        What is timed in turns; the first is the subject.
    shapes, tokens
        Where.
    bars
        What must hold.
    chart
        Whether it feeds a chart of its own.
    method
        A key of `benchmarks.peers.run.METHODS`: how a point is measured.
    """

    name: str
    title: str
    contenders: tuple[Contender, ...]
    tokens: tuple[int, ...]
    shapes: tuple[Shape, ...] = SHAPES
    bars: tuple[Bar, ...] = ()
    chart: bool = False
    method: str = "times"


CUBLAS = Contender("cublas", Work("float16"))
CUBLAS_BF16 = Contender("cublas", Work("bfloat16", "bfloat16"))
INT4 = Work("int4", "float16", 128)
TINYGEMM = Contender("tinygemm", Work("int4", "bfloat16", 128))


def everyone(work: Work, *names: str) -> tuple[Contender, ...]:
    """Return Ladder and some engines on the same product."""
    return tuple(Contender(name, work) for name in ("ladder", *names))


def narrow(bits: int, limit: float) -> Case:
    """Return the case of a type below four bits at M = 1."""
    return Case(
        f"int{bits}",
        f"int{bits} g128 × fp16, decode",
        (*everyone(Work(f"int{bits}", "float16", 128), "humming", "gemlite"), CUBLAS),
        (1,),
        bars=(Bar("ratio", limit, (1,), least_bytes=25 * MB, against=("humming",)),),
    )


def four_bit_float(weight: str, group_size: int, activation: str) -> Case:
    """Return the case of a four-bit float or codebook type beside int4."""
    work = Work(weight, activation, group_size)
    dense = CUBLAS if activation == "float16" else CUBLAS_BF16
    int4 = Contender("ladder", replace(INT4, activation=activation), "ladder int4")
    title = f"{weight}{f' g{group_size}' if group_size else ''} × {activation}"
    peers = everyone(work, "humming", "gemlite", "bitsandbytes")
    return Case(
        f"{weight}-{activation}",
        title,
        (*peers, int4, dense),
        (1, 16, 64),
        bars=(Bar("relative", 1.10, against=("ladder int4",)), Bar("ratio", 1.5)),
    )


def eight_bit_activations(activation: str) -> Case:
    """Return the case of int4 by 8-bit activations, quantized within and before the call."""
    before = Work("int4", activation, 128, output="float16")
    within = replace(before, dynamic=True)
    given = " (given codes)"
    return Case(
        f"int4-{activation}",
        f"int4 g128 × {activation}, prefill",
        (
            *everyone(within, "humming"),
            Contender("ladder", before, f"ladder{given}"),
            Contender("humming", before, f"humming{given}"),
            CUBLAS,
        ),
        (4096,),
        bars=(
            Bar("ratio", 1.25, against=("humming",)),
            Bar("ratio", 1.25, subject=f"ladder{given}", against=(f"humming{given}",)),
        ),
    )


INT4_CASE = Case(
    "int4",
    "int4 g128 × fp16",
    (*everyone(INT4, "humming", "gemlite"), TINYGEMM, CUBLAS),
    (1, 16, 64, 256, 4096),
    bars=(
        Bar("bandwidth", 0.88, (1,), least_bytes=LARGE),
        Bar("ratio", 1.25, (1,), least_bytes=LARGE),
        Bar("time", 10.5, (1,), ((8192, 8192),)),
        Bar("time", 5.2, (1,), ((4096, 4096),)),
        Bar("ratio", 1.35, (16,), least_bytes=LARGE),
        Bar("ratio", 1.2, (16,)),
        Bar("ratio", 1.4, (64,), least_bytes=LARGE),
        Bar("ratio", 1.2, (64,)),
        Bar("ratio", 1.1, (256,), against=("humming", "cublas")),
        Bar("ratio", 1.02, (4096,), against=("cublas",)),
    ),
)

CUBLASLT = ("scaled_mm", "scaled_mm by tensor")

FP8 = Case(
    "fp8",
    "fp8 × fp8, scaled by row",
    everyone(Work("fp8_e4m3", "fp8_e4m3"), "scaled_mm", "scaled_mm by tensor", "humming"),
    (1, 16, 64, 256, 4096),
    bars=(
        Bar("ratio", 1.1, (1, 16), against=CUBLASLT),
        Bar("ratio", 1.0, (64, 256, 4096), against=CUBLASLT),
    ),
)

INT8 = Case(
    "int8",
    "int8 × int8",
    everyone(Work("int8", "int8"), "int_mm", "humming"),
    (4096,),
    bars=(Bar("ratio", 1.3, against=("int_mm",)),),
)

BITNET = Case(
    "bitnet",
    "int2 × int8 (BitNet), decode",
    everyone(Work("int2", "int8"), "humming"),
    (1,),
    bars=(Bar("bandwidth", 0.8, least_bytes=25 * MB),),
)


def held_out(name: str, title: str, contenders: tuple[Contender, ...]) -> Case:
    """Return a case whose kernels the policy chooses by itself: no tuning row has these shapes."""
    few, many = split(HELD_OUT)
    bars = (Bar("ratio", 1.0, few), Bar("ratio", 0.97, many), Bar("neighbours", 0.98))
    return Case(f"held-out-{name}", f"{title}, held out", contenders, HELD_OUT, HELD_OUT_SHAPES, bars)


def split(tokens: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the M up to 64, where bytes bind, and those above."""
    return tuple(m for m in tokens if m <= 64), tuple(m for m in tokens if m > 64)


def drawn(name: str, work: Work, *peers: str, more: tuple[Contender, ...] = ()) -> Case:
    """Return a case at shapes that were drawn, against peers and cuBLAS in the activations' 16-bit type."""
    few, many = split(DRAWN)
    dense = CUBLAS if work.source == "float16" else CUBLAS_BF16
    bars = (Bar("ratio", 1.0, few), Bar("ratio", 0.97, many))
    contenders = (*everyone(work, *peers), *more, dense)
    return Case(f"drawn-{name}", f"{work}, drawn shapes", contenders, DRAWN, DRAWN_SHAPES, bars)


def drawn_beside_int4(name: str, work: Work, byte: float) -> Case:
    """Return such a case of a type without peers: at most ``byte`` times int4's time by the bytes of both."""
    few, many = split(DRAWN)
    label = "ladder int4"
    case = drawn(name, work, more=(Contender("ladder", replace(INT4, activation=work.activation), label),))
    bars = (Bar("by bytes", byte, few, against=(label,)), Bar("ratio", 0.95, many))
    return replace(case, bars=bars)


VLLM = ("machete", "marlin")
W4A8 = Work("int4", "fp8_e4m3", 128, output="float16", dynamic=True)
USER_TYPE = Work("fp6_e3m2", "bfloat16", 64)

HELD_OUT_CASES = (
    held_out("int4", "int4 g128 × fp16", (*everyone(INT4, "humming", *VLLM), CUBLAS)),
    held_out("mxfp4", "mxfp4 × fp16", (*everyone(Work("mxfp4", "float16"), "humming"), CUBLAS)),
    held_out("fp6", "fp6_e3m2 g64 × bf16", (*everyone(USER_TYPE), CUBLAS_BF16)),
    held_out("int4-fp8", "int4 g128 × fp8", (*everyone(W4A8, "humming", "cutlass"), CUBLAS)),
    held_out("fp8", "fp8 × fp8, scaled by row", everyone(FP8.contenders[0].work, "humming", *CUBLASLT)),
)
"""What users meet whose models nobody tuned for: ``--held-out``."""

GIVEN = replace(W4A8, dynamic=False)

DRAWN_CASES = (
    drawn("uint4", Work("uint4", "float16", 128, zero="integer"), "humming", *VLLM),
    drawn("int3", Work("int3", "float16", 128), "humming"),
    drawn("mxfp4", Work("mxfp4", "float16"), "humming"),
    drawn("int4-fp8", W4A8, "humming", "cutlass"),
    drawn("int4-fp8-given", GIVEN, "humming", "cutlass"),
    drawn_beside_int4("nf4", Work("nf4", "float16", 64), 1.1),
    *(
        drawn_beside_int4(name, Work(name, "bfloat16", 64, zero=WITH_ZERO_POINTS.get(name, "")), 1.25)
        for name in DRAWN_TYPES
    ),
)
"""The same for classes of weights that no tuning row has, or few, at shapes that were drawn at random."""

SWEEP_CASE = Case(
    "sweep",
    "int4 g128 × fp16 at every M",
    (*everyone(INT4, "humming"), CUBLAS),
    SWEEP,
    SWEEP_SHAPES,
    bars=(Bar("neighbours", 0.95), Bar("dequantise", 1.0, against=("cublas",))),
    chart=True,
)

HOST = Case(
    "host",
    "host cost of one call",
    (Contender("ladder", INT4),),
    (1,),
    ((4096, 4096),),
    bars=(Bar("direct", 7.0), Bar("operator", 14.0)),
    chart=True,
    method="host",
)

BITS = Case(
    "bits",
    "time against bits per weight",
    (
        *(Contender("ladder", Work(f"int{b}", "float16", 128), f"{b} bits") for b in range(1, 9)),
        Contender("ladder", Work("float16"), "16 bits"),
        CUBLAS,
    ),
    (1, 4096),
    ((28672, 8192),),
    chart=True,
)

STEPS = ("fused, fewest buffers", "+ deep pipeline", "+ split K, persistence")

BREAKDOWN = Case(
    "breakdown",
    "what each optimisation brings",
    (
        Contender("ladder", INT4),
        *(Contender("ladder", Work("int4", "float16", 128, step=step), step) for step in STEPS),
        CUBLAS,
    ),
    (1, 16, 64, 256, 4096),
    ((8192, 8192),),
    chart=True,
)

OPERATORS = Case(
    "operators",
    "types at the products of LADDER's operator benchmark",
    (
        Contender("ladder", Work("float16"), "float16"),
        Contender("ladder", INT4, "int4"),
        Contender("ladder", Work("nf4", "float16", 128), "nf4"),
        Contender("ladder", Work("fp8_e4m3", "float16"), "fp8_e4m3"),
        Contender("ladder", Work("mxfp8_e4m3", "float16"), "mxfp8_e4m3"),
        Contender("ladder", Work("int1", "int8"), "int1 × int8"),
        CUBLAS,
    ),
    (1, 32, 4096),
    ((57344, 14336), (28672, 8192)),
    chart=True,
)
"""M0 to M5 of the paper's figure 12: (M, K, N) = (1 | 32 | 4096, 14336, 57344) and (…, 8192, 28672)."""

CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        INT4_CASE,
        narrow(2, 1.9),
        narrow(1, 2.5),
        *(four_bit_float("nf4", 64, activation) for activation in ("float16", "bfloat16")),
        *(four_bit_float("mxfp4", 0, activation) for activation in ("float16", "bfloat16")),
        FP8,
        INT8,
        *(eight_bit_activations(activation) for activation in ("int8", "fp8_e4m3")),
        BITNET,
        SWEEP_CASE,
        HOST,
        BITS,
        BREAKDOWN,
        OPERATORS,
        *HELD_OUT_CASES,
        *DRAWN_CASES,
    )
}
"""Every case by name."""

QUICK_SHAPES: tuple[Shape, ...] = ((4096, 4096), (8192, 8192))
QUICK_TOKENS = (1, 16)
