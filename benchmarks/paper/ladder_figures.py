"""Figures 8 to 17 and table 2 of LADDER (OSDI 2024).

Hardware differs, so what is compared are ratios within one run: times over float16 of the same compiler, and
times over the rival of that run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from types import MappingProxyType
from typing import Any

from benchmarks.paper.figure import Figure, Point
from benchmarks.paper.published import published
from benchmarks.paper.records import Records

TYPES = {
    "int4": "int4",
    "nf4": "nf4",
    "fp8 x fp8": "fp8_e4m3:fp8_e4m3",
    "mxfp8 x mxfp8": "mxfp8_e4m3",
    "int1 x int8": "int1:int8",
}
"""The paper's pair of types -> weights of `benchmarks.models`."""
HALF = "ladder float16"
STEPS = ("llama 70b decode context 1024 batch 1", "llama 70b decode context 1024 batch 32",
         "llama 70b prefill 4096 batch 1")  # fmt: skip
"""The paper's (batch, sequence) of (1, 1), (32, 1) and (1, 4096)."""
NETS = {"resnet 50": "resnet 50", "shufflenet v2": "shufflenet v2", "conformer l": "conformer m-shaped",
        "vit b": "vit b/16"}  # fmt: skip

LAYER_TYPES = (
    "*_decoder_types",
    "benchmarks.models --steps 70b:1:1 70b:32:1 --layers 1 --modes default --weights float16 int4 nf4"
    " fp8_e4m3:fp8_e4m3 mxfp8_e4m3 int2:int8 int1:int8 --output {file}",
)
MODELS = ("*_models", "benchmarks.models --side-by-side --models all --modes default --output {file}")
NETS_FILE = (
    "*_batches",
    'benchmarks.models --side-by-side --models ", batch" --weights float16 --modes default --output {file}',
)
PEERS = ("*_peers", "benchmarks.peers --cases bits,breakdown,fp8 --output {file}")
OPERATORS = ("*_operators", "benchmarks.peers --cases operators --peers cublas --output {file}")
CONVOLUTIONS = ("*_convolutions", "benchmarks.convolutions --nets resnet50 --output {file}")
COMPILE = ("*_compile_time", 'benchmarks.compile_time --models "resnet 50" --device cuda --output {file}')

MXFP8 = "activations are float16: MXFP8 weights by 16-bit cores"
CONTEXT = "Ours reads a cache of 1024 tokens. 4096 tokens are bound by 16-bit cores, whatever these decode."

OPERATOR_REMARK = "Convolutions are other layers than the paper's."

READS = "at 4.25 TB/s, as kernels read on an H200"
LAYER_REASONS = {
    "LLAMA-70B layer, 1 token, int1 x int8": "the paper's A100 takes 2.5 times as long for float16, 1.9 times"
    " for int1: reading its weights takes 25 of our 82 µs, the rest are 11 kernels one after the other",
    "LLAMA-70B layer, 1 token, float16 beside torch.compile": "reading the float16 weights takes 403 µs"
    f" {READS}, ours 416 and torch.compile 456: 1.13 is all that it leaves",
    "LLAMA-70B layer, 4096 tokens, float16 beside torch.compile": "torch's products are cuBLAS's, which take"
    " what 16-bit cores sustain: 11.1 ms, 630 TFLOPS over the whole layer",
    **{
        f"{name}, float16 beside torch.compile, batch 1, in CUDA graphs": "the paper's torch.compile takes"
        f" {paper} ms, as if called from Python ({called} here); in a CUDA graph its kernels take {theirs},"
        f" ours {ours}"
        for name, paper, called, theirs, ours in (
            ("resnet 50", "3.4", "2.9", "0.41", "0.27"),
            ("shufflenet v2", "4.2", "4.5", "0.29", "0.17"),
            ("conformer l", "7.9", "7.5", "0.98", "0.83"),
            ("vit b", "3.4", "4.0", "0.56", "0.45"),
        )
    },
}
"""Point of figure 8 -> why it gains less than the paper's."""

INT2_REASON = {
    "decoding a token, int2": "reading the weights takes 50 of our 97 µs, the rest are 11 kernels, one after"
    " the other; of float16's 416 it takes 403"
}
"""Point of figure 16 -> why it gains less than the paper's."""

OPERATOR_REASONS = {
    "M2": "cuBLAS takes what 16-bit cores sustain, 672 TFLOPS, and ours 671",
    "M5": "cuBLAS takes what 16-bit cores sustain, 675 TFLOPS, and ours 673",
    "M3": "28672x8192 in groups of 128, one row, took 56.8 µs in this record and takes 35.1 since:"
    " 3.1 times as fast as float16",
    "C0 to C3": "our rival is a newer cuDNN, which fuses sums and activations",
}
"""Point of figure 12 -> why it gains less than the paper's."""


def ratio(above: float | None, below: float | None) -> float | None:
    """Return a ratio; None if a side is missing."""
    return above / below if above and below else None


def layer_ratio(records: Records, step: str, above: str, below: str) -> float | None:
    """Return the ratio of two engines' times of a 70B layer within one result, or None."""
    for name, _ in (LAYER_TYPES, MODELS):
        times = {row["engine"]: row["us_per_layer"] for row in records.rows(name, "us_per_layer", case=step)}
        if above in times and below in times:
            return float(times[above] / times[below])
    return None


def layer_points(key: str) -> Callable[[Records], list[Point]]:
    """Return what derives the times over float16 of a LLAMA-70B layer."""

    def points(records: Records) -> list[Point]:
        said = published(key)["ms"]["llama 70b layer"]
        found = []
        for position, setting in enumerate(said["settings"]):
            for name, weight in TYPES.items():
                ours = layer_ratio(records, STEPS[position], HALF, f"ladder {weight}")
                paper = said["float16"][position] / said[name][position]
                note = MXFP8 if name.startswith("mx") else ""
                found.append(
                    Point(f"LLAMA-70B layer, {setting}, {name} over float16", paper, ours, note=note)
                )
        return found

    return points


def end_to_end(records: Records) -> list[Point]:
    """Figure 8: a LLAMA-70B layer in every type, and whole models beside torch.compile."""
    from benchmarks.model_cases import BATCHES

    said = published("ladder-8")["ms"]
    found = layer_points("ladder-8")(records)
    for position, setting in enumerate(said["llama 70b layer"]["settings"]):
        one = said["llama 70b layer"]
        paper = one["inductor"][position] / one["float16"][position]
        ours = layer_ratio(records, STEPS[position], "torch default", HALF)
        found.append(Point(f"LLAMA-70B layer, {setting}, float16 beside torch.compile", paper, ours))
    for name, ours_name in NETS.items():
        held = zip(BATCHES, said[name]["inductor"], said[name]["float16"], strict=True)
        for batch, inductor, half in held:
            case = f"{ours_name}, batch {batch}"
            rows = {row["engine"]: row for row in records.rows(NETS_FILE[0], "us", "call_us", case=case)}
            for column, how in (("call_us", "called from Python"), ("us", "in CUDA graphs")):
                theirs, ours = (rows.get(engine, {}).get(column) for engine in ("torch default", HALF))
                label = f"{name}, float16 beside torch.compile, batch {batch}, {how}"
                found.append(Point(label, inductor / half, ratio(theirs, ours), note=f"ours: {ours_name}"))
    for position, setting in enumerate(said["bloom 176b layer"]["settings"]):
        one = said["bloom 176b layer"]
        paper = one["float16"][position] / one["int4"][position]
        why = "no benchmark has a BLOOM-176B layer; its widest products are in figure 12"
        found.append(Point(f"BLOOM-176B layer, {setting}, int4 over float16", paper, None, note=why))
    return found


def other_hardware(key: str, device: str) -> Callable[[Records], list[Point]]:
    """Return what lists the paper's numbers on a device that we do not have."""

    def points(records: Records) -> list[Point]:
        said, why = published(key), f"we have no {device}"
        if "times" in said:
            return [Point(label, value, None, note=why) for label, value in said["times"].items()]
        one = said["ms"]["llama 70b layer"]
        return [
            Point(
                f"LLAMA-70B layer, {setting}, {name} over float16",
                one["float16"][position] / one[name][position],
                None,
                note=why,
            )
            for position, setting in enumerate(one["settings"])
            for name in TYPES
        ]

    return points


def memory(records: Records) -> list[Point]:
    """Figure 11: what a type saves against float16, of ours in packed weights and the plan's arena."""
    from benchmarks.model_cases import LAYERS

    said, weights = published("ladder-11")["MB"]["llama 70b layer"], LAYERS["70b"].weights
    bits = {"int4": 4.125, "nf4": 4.125, "fp8 x fp8": 8, "mxfp8 x mxfp8": 8.25, "int1 x int8": 1}
    rows = [row for name, _ in (MODELS, LAYER_TYPES) for row in records.rows(name, "memory")]
    arenas = {(row["case"], row["engine"]): row["memory"]["arena"] for row in rows}
    found = []
    for position, setting in enumerate(said["settings"]):
        half = arenas.get((STEPS[position], HALF))
        for name, weight in TYPES.items():
            arena = arenas.get((STEPS[position], f"ladder {weight}"))
            saved = None
            if half is not None and arena is not None:
                saved = (weights * (16 - bits[name]) / 8 + half - arena) * 1e-6
            paper = said["float16"][position] - said[name][position]
            found.append(Point(f"{setting}, {name}: saved against float16", paper, saved, "MB"))
    return found


def operators(records: Records) -> list[Point]:
    """Figure 12: products M0 to M5 by type, and convolutions beside cuDNN."""
    said = published("ladder-12")["ms"]["products"]
    times = {
        (row["m"], row["n"], row["k"], row["label"]): row["time_us"]
        for row in records.rows(OPERATORS[0], "time_us", case="operators")
    }
    names = {"int4": "int4", "nf4": "nf4", "fp8": "fp8_e4m3", "mxfp8 x mxfp8": "mxfp8_e4m3",
             "int1 x int8": "int1 × int8"}  # fmt: skip
    found = []
    for position, shape in enumerate(said["shapes [M, N, K]"]):
        half = times.get((*shape, "float16"))
        label = f"M{position} = {'×'.join(map(str, shape))}"
        paper = said["cublas"][position] / said["float16"][position]
        found.append(
            Point(f"{label}, float16 beside cuBLAS", paper, ratio(times.get((*shape, "cublas")), half))
        )
        for name, ours_name in names.items():
            paper = said["float16"][position] / said[name][position]
            ours, note = ratio(half, times.get((*shape, ours_name))), MXFP8 if name.startswith("mx") else ""
            found.append(Point(f"{label}, {name} over float16", paper, ours, note=note))
    return [*found, *convolutions(records)]


def convolutions(records: Records) -> list[Point]:
    """Return the mean over layers beside cuDNN, apart for those that take cuDNN 0.06 ms each."""
    said = published("ladder-12")["ms"]["convolutions"]
    each = [c / o for c, o in zip(said["cudnn"], said["float16"], strict=True)]
    layers: dict[str, dict[str, float]] = {}
    for row in records.rows(CONVOLUTIONS[0]):
        kind = {"cudnn fused": "cudnn"}.get(row["way"], row.get("weight", ""))
        if row["layer"].startswith("resnet50") and kind in ("cudnn", "float16"):
            times = layers.setdefault(row["layer"], {})
            times[kind] = min(row["us"], times.get(kind, row["us"]))
    both = [times["cudnn"] / times["float16"] for times in layers.values() if len(times) == 2]
    ours, label = geometric_mean(both) if both else None, "float16 convolutions beside cuDNN, mean"
    note, why = (
        "ours: ResNet-50's layers, 8 images",
        "theirs: cuDNN takes about 0.06 ms for each, large or small",
    )
    return [
        Point(f"C0 to C3, {label}", geometric_mean(each[:4]), ours, note=note),
        Point(f"C4 to C7, {label}", geometric_mean(each[4:]), None, note=why),
    ]


def native_fp8(records: Records) -> list[Point]:
    """Figure 13: fp8 by fp8 beside cuBLASLt, which the paper gives in words."""
    times: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in records.rows(PEERS[0], "time_us", case="fp8"):
        times.setdefault((row["n"], row["k"], row["m"]), {})[row["label"]] = row["time_us"]
    rivals = ("scaled_mm", "scaled_mm by tensor")
    found = []
    for m in sorted({point[2] for point in times}):
        each = [
            min(t[name] for name in rivals if name in t) / t["ladder"]
            for point, t in times.items()
            if point[2] == m and "ladder" in t and any(name in t for name in rivals)
        ]
        label = f"fp8 × fp8 beside the faster cuBLASLt, M = {m}, mean over shapes"
        found.append(Point(label, None, geometric_mean(each), note="the paper: faster than cuBLAS"))
    return found or [Point("fp8 × fp8 beside cuBLASLt", None, None)]


def breakdown(records: Records) -> list[Point]:
    """Figure 14: what the steps of the schedule bring together."""
    said = published("ladder-14")["ms"]
    times = {
        (row["m"], row["label"]): row["time_us"]
        for row in records.rows(PEERS[0], "time_us", case="breakdown")
    }
    found = []
    for setting, m in (("1 token", 1), ("4096 tokens", 4096)):
        ours = ratio(times.get((m, "fused, fewest buffers")), times.get((m, "ladder")))
        for position, name in enumerate(published("ladder-14")["ms"]["settings"]):
            paper = said[setting]["+Transform"][position] / said[setting]["+Holistic Schedule"][position]
            mine = ours if name == "int4" else None
            note = (
                "ours: one 8192² product; buffers, pipeline, split K and multicast"
                if name == "int4"
                else "the breakdown of ours is measured for int4"
            )
            found.append(Point(f"{setting}, {name}: all steps over the first", paper, mine, note=note))
    return found


def bit_widths(records: Records) -> list[Point]:
    """Figure 15: times over 16 bits; the paper says that they grow for one token and stay for 4096."""
    times = {
        (row["m"], row["label"]): row["time_us"] for row in records.rows(PEERS[0], "time_us", case="bits")
    }
    words = {1: "the paper: grows with fewer bits", 4096: "the paper: unchanged by the weight's bits"}
    return [
        Point(
            f"M = {m}, int{bits} by float16 over 16 bits",
            None,
            ratio(times.get((m, "16 bits")), times.get((m, f"{bits} bits"))),
            note=words[m],
        )
        for m in words
        for bits in (8, 4, 2, 1)
    ]


def accuracy(records: Records) -> list[Point]:
    """Figure 16: decoding times over float16, and what the types cost in accuracy."""
    said = published("ladder-16")["times over float16"]
    names = {**TYPES, "int2 x int8": "int2:int8"}
    found = [
        Point(f"decoding a token, {name} over float16", paper,
              layer_ratio(records, STEPS[0], HALF, f"ladder {names[name]}"),
              note=f"ours: one 70B layer; theirs: {'70B' if 'int2' in name else 'mean of 3B to 70B'}")
        for name, paper in said.items()
    ]  # fmt: skip
    cases: Mapping[str, Any] = records.newest("minilm_*", lambda result: dict(result.get("cases", {}))) or {}
    for name, case in cases.items():
        if "cosine_mean" in case and not name.startswith("float32"):
            label = f"MiniLM, {name}: cosine similarity to float32"
            why = "no LLAMA-2 checkpoint or WikiText here"
            found.append(Point(label, None, case["cosine_mean"], unit="", note=why))
    return found


def compile_time(records: Records) -> list[Point]:
    """Table 2: minutes of compiling with an empty cache."""
    seconds = {row["case"]: row["seconds"] for row in records.rows(COMPILE[0], state="cold")}
    ours = seconds.get("resnet 50")
    return [
        Point(
            name,
            minutes,
            ours / 60 if ours is not None and name.startswith("resnet") else None,
            unit="min",
            smaller=True,
            note="ours: float16, 8 images" if name.startswith("resnet") else "not timed with an empty cache",
        )
        for name, minutes in published("ladder-t2")["minutes"].items()
    ]


def _figure(
    key: str,
    title: str,
    points: Callable[[Records], Sequence[Point]],
    *results: tuple[str, str],
    remark: str = "",
    reasons: Mapping[str, str] = MappingProxyType({}),
) -> Figure:
    said = published(key)
    title = f"LADDER, {title}"
    return Figure(key, title, said["source"], said["hardware"], points, results, remark, reasons)


FIGURES = (
    _figure("ladder-8", "figure 8: inference latency", end_to_end, LAYER_TYPES, NETS_FILE, remark=CONTEXT,
            reasons=LAYER_REASONS),
    _figure("ladder-9", "figure 9: inference latency on V100", other_hardware("ladder-9", "V100"),
            remark="Kernels for sm_70 are compiled, not run."),
    _figure("ladder-10", "figure 10: inference latency on A6000", other_hardware("ladder-10", "RTX A6000")),
    _figure("ladder-11", "figure 11: memory of inference", memory, LAYER_TYPES, MODELS,
            remark="Ours is counted, not measured: packed weights and arena."),
    _figure("ladder-12", "figure 12: operators", operators, OPERATORS, CONVOLUTIONS,
            remark=OPERATOR_REMARK, reasons=OPERATOR_REASONS),
    _figure("ladder-13", "figure 13: operators with native fp8", native_fp8, PEERS,
            remark="An RTX 4090 in the paper; ours is another GPU."),
    _figure("ladder-14", "figure 14: optimization breakdown", breakdown, PEERS,
            remark="The steps of the two compilers are not the same."),
    _figure("ladder-15", "figure 15: bit widths", bit_widths, PEERS,
            remark="The paper draws no numbers, and scales activations too."),
    _figure("ladder-16", "figure 16: accuracy against latency", accuracy, LAYER_TYPES,
            ("minilm_*", "benchmarks.minilm --output {file}"), reasons=INT2_REASON),
    _figure("ladder-17", "figure 17: inference latency on AMD", other_hardware("ladder-17", "AMD MI250"),
            remark="Kernels for AMD are checked on emulators only, which have no clock."),
    _figure("ladder-t2", "table 2: compilation time", compile_time, COMPILE),
)  # fmt: skip
"""In the order of the paper."""
