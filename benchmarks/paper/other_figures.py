"""Figures 7 to 11 and table 5 of Mirage (OSDI 2025), and what PowerFusion and MagPy (ATC 2024) report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from types import MappingProxyType

from benchmarks import superopt_graphs
from benchmarks.paper.figure import Figure, Point
from benchmarks.paper.published import published
from benchmarks.paper.records import Records

SUPEROPT = ("*_superopt", "benchmarks.superopt --output {file}")
DECODE = ("*_transformers_decode", "benchmarks.generate --output {file}")
ABLATION = ("superopt_ablation_*", "benchmarks.superopt_ablation --operators 5 6 7 8 9 --output {file}")
CHAINS = ("*_chains", "benchmarks.chains --modes max-autotune-no-cudagraphs --output {file}")
ZOO = ("zoo_graphs_*", "benchmarks.zoo --graphs-only --threads 1 --output {file}")
PARITY = "paritybench"
"""Modules of public projects: its corpus is downloaded by hand, so no command here measures it."""
ZOO_SPEED = ("zoo_speed_*", "benchmarks.zoo --threads 1 --output {file}")

PROGRAMS = ("gqa", "qknorm_attention", "lora", "gated_mlp", "rmsnorm_matmul", "ntrans")


def speedups(records: Records) -> list[Point]:
    """Figure 7: found graphs beside the best rival of the run; the most over the batch sizes."""
    ratios: dict[str, list[float]] = {}
    for row in records.rows(SUPEROPT[0]):
        ratios.setdefault(row["program"].partition(" ")[0], []).append(row["ratio"])
    said = dict(published("mirage-7")["times"])
    found = []
    for label, paper in said.items():
        each = ratios.get(label.partition(",")[0])
        choose = min if label.endswith("least") else max
        found.append(Point(label, paper, choose(each) if each else None, note="rival: torch.compile"))
    each = ratios.get("ntrans")
    note = "the paper: slower than TensorRT, faster than the others"
    return [*found, Point("ntrans", None, max(each) if each else None, note=note)]


def one_kernel(key: str, case: superopt_graphs.Case) -> Callable[[Records], list[Point]]:
    """Return what counts the kernels of the graph that the search finds."""

    def points(records: Records) -> list[Point]:
        count = sum(node.body is not None for node in case.graph.nodes)
        others = [
            node.operator for node in case.graph.nodes if node.body is None and node.operator != "input"
        ]
        note = f"with {', '.join(others)} beside it" if others else "all operators in one block graph"
        return [Point("kernels", published(key)["kernels"], count, unit="", smaller=True, note=note)]

    return points


def models(records: Records) -> list[Point]:
    """Figure 11: whole models, by the whole compiler."""
    said = published("mirage-11")["times"]
    ours = records.newest(DECODE[0], decode_ratio)
    note = "ours: transformers' Llama-3.1-8B by the whole compiler, beside torch's reduce-overhead"
    return [
        Point("end to end, most", said["most"], ours, note=note),
        Point("end to end, least", said["least"], None, note="only one model of the four was timed"),
    ]


def decode_ratio(found: dict[str, object]) -> float | None:
    """Return torch's time per token over ours, in float16."""
    case = found.get("float16")
    if not isinstance(case, dict):
        return None
    times = {name: row["ms"] for name, row in case.items() if isinstance(row, dict) and "ms" in row}
    ours, rivals = times.pop("ladder", None), list(times.values())
    return min(rivals) / ours if ours and rivals else None


def search_time(records: Records) -> list[Point]:
    """Table 5: seconds of the search by operators of a block graph."""
    said = published("mirage-t5")
    ours = {row["operators"]: row for row in records.rows(ABLATION[0])}
    found = []
    for position, count in enumerate(said["operators"]):
        row, without = ours.get(count, {}), said["without abstract expressions"]
        pairs = [
            ("all processes", said["seconds"][position], row.get("seconds")),
            ("one process", said["one thread"][position], row.get("seconds on one process")),
        ]
        if row.get("finished without pruning"):
            slow = without[position] if position < len(without) else None
            pairs.append(("without pruning", slow, row["seconds without pruning"]))
        for name, paper, mine in pairs:
            note = "ours counts no loads and stores" if mine is not None else "not needed: 8 give its graph"
            found.append(Point(f"{count} operators, {name}", paper, mine, "s", smaller=True, note=note))
        if row and not row["finished without pruning"]:
            factor = row["states without pruning"] / row["states"]
            label = f"{count} operators, states without pruning when stopped, over those with it"
            found.append(Point(label, None, factor, note="the paper: more than 10 h from 7 operators on"))
    return found


def chains(records: Records) -> list[Point]:
    """PowerFusion: memory-bound chains beside the fastest rival."""
    said = published("powerfusion")["times"]
    each = [row["ratio"] for row in records.rows(CHAINS[0], "ratio") if row["ratio"]]
    note = "ours: chains of BERT, GPT-2, Llama, ConvNeXt, ResNet, ShuffleNet, Conformer; rival: max-autotune"
    values = {"mean": geometric_mean(each), "most": max(each)} if each else {}
    found = [
        Point(f"NVIDIA, {name}", said["NVIDIA"][name], values.get(name), note=note) for name in said["NVIDIA"]
    ]
    for device in ("AMD", "MLU"):
        why = f"we have no {'AMD GPU' if device == 'AMD' else 'Cambricon MLU, and no target for it'}"
        found += [Point(f"{device}, {name}", value, None, note=why) for name, value in said[device].items()]
    return found


def capture(records: Records) -> list[Point]:
    """MagPy: programs that are one graph, and speed beside eager."""
    said = published("magpy")
    rows = records.newest(ZOO[0], lambda result: [*result["rows"], *result.get("others", ())]) or []
    whole = sum(row["outcome"] == "whole" for row in rows) / len(rows) if rows else None
    note = f"ours: {len(rows)} architectures of libraries; theirs: {said['programs']} programs of ParityBench"
    modules, of_parity = parity(records)
    speed = [1 / row["ratio"] for row in records.rows(ZOO_SPEED[0], "ratio") if row["ratio"]]
    beside = "ours: one CPU thread, small models, beside eager"
    return [
        Point("programs that are one graph", said["whole graphs"], whole, unit="", note=note),
        Point("modules that are one graph", said["whole graphs"], modules, unit="", note=of_parity),
        Point(
            "right in every call", None, sum(r["right"] for r in rows) / len(rows) if rows else None, unit=""
        ),
        Point("speed, mean", said["times"]["mean"], geometric_mean(speed) if speed else None, note=beside),
        Point("speed, most", said["times"]["most"], max(speed, default=None), note=beside),
    ]


def parity(records: Records) -> tuple[float | None, str]:
    """Return the share of ParityBench's test cases that are right as one graph, and what was tried."""
    found = records.newest(PARITY, lambda result: result)
    if found is None:
        return None, "github.com/jansel/pytorch-jit-paritybench was not tried: `benchmarks.paritybench`"
    whole = sum(found["outcomes"].get(name, 0) for name in ("right", "refused"))
    return whole / found["cases"], f"ours: {found['cases']} test cases of {found['projects']} projects there"


def _figure(
    key: str,
    title: str,
    points: Callable[[Records], Sequence[Point]],
    *results: tuple[str, str],
    remark: str = "",
    reasons: Mapping[str, str] = MappingProxyType({}),
) -> Figure:
    said = published(key)
    return Figure(key, title, said["source"], said["hardware"], points, results, remark, reasons)


MEMORY_BOUND = {
    "gated_mlp": "reading the weights takes an H200 15.8 of our 16.4 µs at batch 1, torch.compile 29.5: 1.87"
    " is all that it leaves; 1.60 of its 25.2 µs at batch 8",
    "rmsnorm_matmul": "reading the weights takes an H200 11.9 of our 12.6 µs, torch.compile 18.1: 1.52 is all"
    " that it leaves",
}
"""Program of Mirage's figure 7 -> why it gains less than the paper's."""

LLAMA_BOUND = (
    "reading 15 GB of weights takes 3.53 of our 4.17 ms, torch's reduce-overhead 5.95: 1.69 is all that it"
    " leaves"
)

GRAPHS = {
    "mirage-8": (
        "figure 8: QKNorm and attention",
        superopt_graphs.attention(2, 256, 64, 4096, 64, 64, norm=True),
    ),
    "mirage-9": ("figure 9: LoRA", superopt_graphs.lora(16, 256, 4096, 16, 64)),
    "mirage-10": ("figure 10: gated MLP", superopt_graphs.gated_mlp(8, 4096, 4096, 64, 64)),
}
"""Figures that draw a graph -> title, and the one that our search finds."""

FIGURES = (
    _figure("mirage-7", "Mirage, figure 7: fused programs", speedups, SUPEROPT,
            remark="The paper's rivals include TensorRT and FlashDecoding; ours are torch.compile's modes.",
            reasons=MEMORY_BOUND),
    *(_figure(key, f"Mirage, {title}", one_kernel(key, case),
              remark="The graph as our search finds it, written out in benchmarks.superopt_graphs.")
      for key, (title, case) in GRAPHS.items()),
    _figure("mirage-11", "Mirage, figure 11: end to end", models, DECODE,
            remark="Plans of 8B layers take no found graph yet: none is predicted to pay.",
            reasons={"end to end, most": LLAMA_BOUND}),
    _figure("mirage-t5", "Mirage, table 5: search time", search_time, ABLATION,
            remark="Other machines, other numbers of processes."),
    _figure("powerfusion", "PowerFusion: memory-bound parts", chains, CHAINS,
            remark="The abstract gives means; its figures by model are drawn without numbers."),
    _figure("magpy", "MagPy: coverage and speed", capture, ZOO, ZOO_SPEED,
            remark="The paper's programs are a choice from ParityBench that it does not name; ours are test"
            " cases of a random sample of its projects, single layers and whole models alike."),
)  # fmt: skip
"""In the order of the papers."""
