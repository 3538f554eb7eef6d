"""The page of `ladder report`: one HTML file, no scripts, nothing from elsewhere."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from ladder.partition.subgraphs import KINDS as ALL_KINDS

if TYPE_CHECKING:
    from ladder.cli.model_report import ModelReport
    from ladder.runtime.model.profile import StepCost

KINDS = (*(kind for kind in ALL_KINDS if kind != "view"), "view")
"""In the order of their colours."""

FUSED = ("gemm", "prologue", "found", "chain", "cached_attention")
"""Kinds whose steps are several operators in kernels of ours."""

WIDTH, ROW, GAP, BOX, MOST = 1000, 46, 10, 150, 6
"""Of the drawing, in pixels: its width, a row, between boxes, a box; and boxes in a row."""

LABEL = 23
"""Characters in a box."""

PLOT_WIDTH, PLOT_HEIGHT, LEFT, BOTTOM = 720, 380, 70, 46


def page(report: ModelReport) -> str:
    """Return the report as HTML."""
    title = escape(f"{report.name} on {report.device}")
    style = files("ladder.cli").joinpath("model_page.css").read_text(encoding="utf-8")
    body = [
        f"<h1>{title}</h1>",
        _head(report),
        "<h2>Time per kind</h2>", _kinds(report),
        "<h2>Graph</h2>",
        "<p>One box per step; it leads to the step below. Views only give an address and are left out.</p>",
        _drawing(report),
        "<h2>Roofline</h2>", _roofline(report),
        "<h2>Kernels</h2>", _table(report),
        "<h2>What was fused, and why not more</h2>", _fusion(report),
        "<h2>Steps</h2>", *(_details(step) for step in report.steps),
    ]  # fmt: skip
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _head(report: ModelReport) -> str:
    total = f"{report.total_us:,.0f} µs"
    basis = (
        f"Nothing was measured: {escape(report.not_measured)}. Times are the least that the bytes and the"
        " operations of a step allow on the device; a real kernel takes longer."
        if report.not_measured
        else "Steps were measured one by one: on a CPU with the call of each, on a GPU as nodes of one"
        " CUDA graph that do not overlap."
    )
    facts = {
        "steps": f"{len(report.steps)}, of which {report.launches} launch something in each call",
        "all steps": total,
        "a call": None if report.call_us is None else f"{report.call_us:,.0f} µs",
        "sizes": ", ".join(f"{name} = {size}" for name, size in report.sizes.items()) or None,
        "tensors that it keeps": _bytes(report.stored),
        "intermediate results": f"{_bytes(report.arena)} (side by side {_bytes(report.unshared)})"
        if report.arena
        else None,
        "device": f"{report.device}: {report.peaks.source}; {report.peaks.bandwidth / 1e9:,.0f} GB/s, "
        + ", ".join(f"{n} {p / 1e12:,.2f} TFLOP/s" for n, p in report.peaks.cores.items()),
        "made": f"{report.date} UTC by " + ", ".join(f"{n} {v}" for n, v in report.versions.items()),
    }
    rows = "".join(f"<tr><th>{k}</th><td>{escape(v)}</td></tr>" for k, v in facts.items() if v)
    return f'<p class="lead">{basis}</p><table>{rows}</table>'


def _kinds(report: ModelReport) -> str:
    """Return a bar per kind of step."""
    times: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    counts: Counter[str] = Counter()
    for step in report.steps:
        if not step.constant and step.us:
            times[step.kind] += step.us
            counts[step.kind] += 1
    longest = max(times.values(), default=0.0) or 1.0
    rows = []
    for at, (kind, us) in enumerate(sorted(times.items(), key=lambda item: -item[1])):
        if not counts[kind]:
            continue
        top, length = at * 26, max(2.0, us / longest * 560)
        share = us / (report.total_us or 1.0)
        rows.append(
            f'<text x="90" y="{top + 16}" text-anchor="end">{kind}</text>'
            f'<rect class="k-{kind}" x="98" y="{top + 3}" width="{length:.1f}" height="18" rx="3"/>'
            f'<text x="{length + 106:.1f}" y="{top + 16}">{us:,.1f} µs, {share:.0%},'
            f" {counts[kind]} steps</text>"
        )
    return _svg(900, 26 * len(rows) + 4, rows)


# graph -----------------------------------------------------------------------------------------------


def _drawing(report: ModelReport) -> str:
    """Return the steps as boxes, each below what it reads."""
    shown = [step for step in report.steps if step.kind != "view"]
    makers = _makers(report)
    reads = {step.number: sorted({makers[v] for v in step.inputs if v in makers}) for step in shown}
    rows = _rows(shown, reads)
    places: dict[int, tuple[float, float]] = {}
    for at, row in enumerate(rows):
        width = len(row) * BOX + (len(row) - 1) * GAP
        for column, step in enumerate(row):
            places[step.number] = ((WIDTH - width) / 2 + column * (BOX + GAP), at * ROW + 4.0)
    edges = [_edge(places[a], places[b]) for b, sources in reads.items() for a in sources if a in places]
    boxes = [_box(step, *places[step.number]) for step in shown]
    return f'<div class="scroll">{_svg(WIDTH, len(rows) * ROW + 10, [*edges, *boxes])}</div>'


def _makers(report: ModelReport) -> dict[str, int]:
    """Return value -> the step that computes it; views are their operand's."""
    makers: dict[str, int] = {}
    for step in report.steps:
        for value in step.outputs:
            if step.kind != "view":
                makers[value] = step.number
            elif step.inputs and step.inputs[0] in makers:
                makers[value] = makers[step.inputs[0]]
    return makers


def _rows(steps: Sequence[StepCost], reads: dict[int, list[int]]) -> list[list[StepCost]]:
    """Return steps by depth; full rows are continued in the next."""
    depth: dict[int, int] = {}
    by_depth: dict[int, list[StepCost]] = {}
    for step in steps:
        depth[step.number] = 1 + max((depth[at] for at in reads[step.number] if at in depth), default=-1)
        by_depth.setdefault(depth[step.number], []).append(step)
    return [
        row[begin : begin + MOST] for _, row in sorted(by_depth.items()) for begin in range(0, len(row), MOST)
    ]


def _edge(source: tuple[float, float], target: tuple[float, float]) -> str:
    x1, y1, x2, y2 = source[0] + BOX / 2, source[1] + 34, target[0] + BOX / 2, target[1]
    middle = (y1 + y2) / 2
    curve = f"C{x1:.0f},{middle:.0f} {x2:.0f},{middle:.0f} {x2:.0f},{y2:.0f}"
    return f'<path class="edge" d="M{x1:.0f},{y1:.0f} {curve}"/>'


def _box(step: StepCost, x: float, y: float) -> str:
    time = "once" if step.constant else f"{step.us:,.1f} µs"
    hover = escape(f"{step.executor}: {step.operators}")
    return (
        f'<a href="#step-{step.number}"><title>{hover}</title>'
        f'<rect class="k-{step.kind}" x="{x:.0f}" y="{y:.0f}" width="{BOX}" height="34" rx="5"/>'
        f'<text class="in" x="{x + 6:.0f}" y="{y + 14:.0f}">{escape(_label(step))}</text>'
        f'<text class="in" x="{x + 6:.0f}" y="{y + 28:.0f}">{time}</text></a>'
    )


def _label(step: StepCost) -> str:
    """Return what fits into a box: the ends of a chain, type and shape of a product, else the executor."""
    names = step.operators.split(" ")
    found = re.search(r" n (\d+) k (\d+) weight (\S+)", step.executor)
    if found is not None:
        what = f"{found[3]} {found[1]}×{found[2]}"
    elif step.kind == "chain":
        what = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
    else:
        what = step.executor.rpartition(".")[2]
    return f"{step.number} {what}"[:LABEL]


# roofline --------------------------------------------------------------------------------------------


def _roofline(report: ModelReport) -> str:
    """Return steps over operations per byte, below what the device can do."""
    steps = [s for s in report.steps if s.bytes and s.flops and s.us > 0 and not s.constant]
    if not steps:
        return "<p>No step computes.</p>"
    peaks = {"vector units": report.peaks.vector, **report.peaks.cores}
    intensities = [s.flops / s.bytes for s in steps]
    low, high = min([*intensities, 0.1]) / 2, max([*intensities, 100.0]) * 2
    rates = [s.flops / s.us * 1e6 for s in steps]
    top, bottom = max(peaks.values()) * 2, min(*rates, report.peaks.bandwidth * low) / 2

    def x(value: float) -> float:
        return LEFT + math.log(value / low) / math.log(high / low) * (PLOT_WIDTH - LEFT - 10)

    def y(value: float) -> float:
        part = math.log(max(value, bottom) / bottom) / math.log(top / bottom)
        return PLOT_HEIGHT - BOTTOM - part * (PLOT_HEIGHT - BOTTOM - 10)

    parts = [*_ticks(low, high, x, True), *_ticks(bottom, top, y, False)]
    names: dict[float, list[str]] = {}
    for name, peak in peaks.items():
        names.setdefault(peak, []).append(name)
    for peak, same in names.items():
        ridge = min(max(peak / report.peaks.bandwidth, low), high)
        turn = min(peak, report.peaks.bandwidth * ridge)
        corners = ((low, report.peaks.bandwidth * low), (ridge, turn), (high, peak))
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in corners)
        label = escape(", ".join(same))
        parts.append(
            f'<polyline class="roof" points="{points}"/>'
            f'<text x="{PLOT_WIDTH - 12}" y="{y(peak) - 4:.1f}" text-anchor="end">{label}</text>'
        )
    for step, intensity, rate in zip(steps, intensities, rates, strict=True):
        hover = escape(f"step {step.number}, {step.executor}: {rate / 1e9:,.1f} GFLOP/s, {step.us:,.1f} µs")
        parts.append(
            f'<a href="#step-{step.number}"><circle class="k-{step.kind}" cx="{x(intensity):.1f}"'
            f' cy="{y(rate):.1f}" r="4.5"><title>{hover}</title></circle></a>'
        )
    parts.append(
        f'<text x="{PLOT_WIDTH / 2}" y="{PLOT_HEIGHT - 8}" text-anchor="middle">operations per byte</text>'
    )
    parts.append(
        f'<text transform="translate(14 {PLOT_HEIGHT / 2}) rotate(-90)" text-anchor="middle">GFLOP/s</text>'
    )
    legend = "".join(f'<span class="key k-{kind}"></span>{kind} ' for kind in KINDS[:-1])
    return f"{_svg(PLOT_WIDTH, PLOT_HEIGHT, parts)}<p>{legend}</p>"


def _ticks(low: float, high: float, place: object, horizontal: bool) -> list[str]:
    """Return grid lines at powers of ten."""
    assert callable(place)
    parts = []
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        at, shown = place(10.0**power), 10.0**power if horizontal else 10.0 ** (power - 9)
        text = f"{shown:,.0f}" if shown >= 1 else f"{shown:g}"
        if horizontal:
            parts.append(
                f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="10" y2="{PLOT_HEIGHT - BOTTOM}"/>'
            )
            parts.append(
                f'<text x="{at:.1f}" y="{PLOT_HEIGHT - BOTTOM + 16}" text-anchor="middle">{text}</text>'
            )
        else:
            parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{PLOT_WIDTH - 10}" y1="{at:.1f}" y2="{at:.1f}"/>'
            )
            parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    return parts


# tables ----------------------------------------------------------------------------------------------


def _table(report: ModelReport) -> str:
    """Return every step that launches something, the dearest first."""
    heads = (
        "step",
        "kind",
        "executor",
        "operators",
        "bytes",
        "operations",
        "least µs",
        "measured µs",
        "of least",
    )
    rows = []
    for step in sorted(report.steps, key=lambda s: (s.constant, -s.us)):
        if step.kind == "view":
            continue
        measured = "once" if step.constant else "" if step.measured_us is None else f"{step.measured_us:,.1f}"
        share = f"{step.least_us / step.measured_us:.0%}" if step.measured_us else ""
        cells = (
            f'<a href="#step-{step.number}">{step.number}</a>', step.kind, escape(step.executor),
            escape(step.operators[:90]), _bytes(step.bytes), f"{step.flops:,}", f"{step.least_us:,.2f}",
            measured, share,
        )  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _fusion(report: ModelReport) -> str:
    """Return how much became one kernel, and the reasons against more."""
    fused = [step for step in report.steps if step.kind in FUSED and step.operators]
    counts = [len(step.operators.split()) for step in fused]
    lines = [
        f"<p>{sum(counts)} operators became {len(fused)} kernels of ours, the longest of {max(counts)}.</p>"
        if counts
        else "<p>No kernels of ours.</p>"
    ]
    reasons: dict[str, list[int]] = {}
    for step in report.steps:
        if step.reason:
            reasons.setdefault(step.reason, []).append(step.number)
    rows = "".join(
        f"<tr><td>{escape(reason)}</td><td>{len(numbers)}</td><td>{_links(numbers)}</td></tr>"
        for reason, numbers in sorted(reasons.items(), key=lambda item: -len(item[1]))
    )
    if rows:
        lines.append(f"<table><tr><th>what ends a step</th><th>steps</th><th></th></tr>{rows}</table>")
    return "".join(lines)


def _links(numbers: Sequence[int]) -> str:
    shown = " ".join(f'<a href="#step-{number}">{number}</a>' for number in numbers[:24])
    return shown + (" …" if len(numbers) > 24 else "")


def _details(step: StepCost) -> str:
    reads, makes = (escape(", ".join(names)) for names in (step.inputs, step.outputs))
    reason = f"<p>Ends because: {escape(step.reason)}</p>" if step.reason else ""
    return (
        f'<details id="step-{step.number}"><summary><b>{step.number}</b> {step.kind} '
        f"{escape(step.executor)} <small>{escape(step.operators[:120])}</small></summary>"
        f"<p>reads {reads or 'nothing'}; makes {makes}</p>{reason}<pre>{escape(step.graph)}</pre></details>"
    )


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img">{"".join(parts)}</svg>'


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"
