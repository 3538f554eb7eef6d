"""The page: summary first, then figures, tables, errors, method."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.bars import by_bar, wrong_rows
from benchmarks.peers.cases import CASES
from benchmarks.peers.records import Results
from benchmarks.report import charts, tables
from benchmarks.report.svg import SERIES_COLOURS

STYLE = (Path(__file__).parent / "style.css").read_text() + "".join(
    f".line.s{i}, .hollow.s{i} {{ stroke: var(--c{i}); }} .mark.s{i} {{ fill: var(--c{i}); }}\n"
    for i in range(SERIES_COLOURS)
)

METHOD = """
<p>All engines quantize or repack the same float16 matrix and run in one process. Every engine's calls
are captured in a CUDA graph that walks over copies of the weight which together exceed the L2 cache
four times, so that each call reads its weight from HBM; launches of one graph may overlap where a
library asks for that. The graphs of all engines take turns, one replay each per round; a time is the
median over the rounds, per call. Ratios compare times of one run: a point that was measured in several
runs is taken whole from the last.</p>
<p>The error of a result is its relative Frobenius distance from the float64 product of what the engine
itself stored, with the activations that it saw, so that differences of quantization do not count. The
floor is the larger of the bytes (packed weight, activations, result) at the read bandwidth and the
operations at the dense rate of cuBLAS, both measured in the same run; a dense rate is a peer's, so
prefill can be faster than its floor. “dequantise + cuBLAS” is cuBLAS as measured plus reading the
packed and writing the dense weight at the measured copy bandwidth: the least that an unfused product
costs.</p>
<p>A percentage beside Ladder's time is the floor over that time; a ratio beside a peer's time is that
time over Ladder's: above 1, Ladder is faster. Hover over a cell for errors and reasons.</p>
"""


def page(results: Results) -> str:
    """Return the whole HTML page of some results."""
    roofline = ("Every product, below the measured roofs", charts.roofline(results))
    sections = [
        f"<h1>Ladder beside other libraries</h1>{lead(results)}",
        f"<h2>What must hold</h2>{tables.bar_table(results)}",
        f"<h2>Roofline</h2>{figures([roofline])}",
        section("Time at every M", charts.sweeps(results)),
        section("What each optimisation brings", charts.breakdowns(results)),
        section("Time against bits per weight", charts.bit_widths(results)),
        f"<h2>Ratios</h2>{ratios(results)}",
        f"<h2>Host cost of a call</h2>{tables.host_table(results)}",
        f"<h2>Errors</h2>{tables.error_table(results)}",
        f"<h2>Method</h2>{METHOD}",
        f"<h2>Runs</h2>{tables.run_table(results)}",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Ladder beside other libraries</title><style>{STYLE}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(sections)}</body></html>\n'


def lead(results: Results) -> str:
    """Return the sentence that says how many bars hold."""
    judged = [verdicts for verdicts in by_bar(results).values() if verdicts]
    held = sum(all(verdict.holds for verdict in verdicts) for verdicts in judged)
    devices = ", ".join(dict.fromkeys(run["device"] for run in results.runs.values()))
    dates = ", ".join(dict.fromkeys(run["date"] for run in results.runs.values()))
    wrong = sum(row["engine"] == "ladder" for row in wrong_rows(results))
    errors = (
        "All of Ladder's errors are within bounds." if not wrong else f"{wrong} results of Ladder are wrong."
    )
    return (
        f'<p class="lead">{devices}, {dates}: {held} of {len(judged)} requirements hold at every point'
        f" measured. {errors}</p>"
    )


def figures(drawn: list[charts.Figure]) -> str:
    """Return figures side by side."""
    parts = [f"<figure><figcaption>{title}</figcaption>{svg}</figure>" for title, svg in drawn]
    return f'<div class="figures">{"".join(parts)}</div>'


def section(title: str, drawn: list[charts.Figure]) -> str:
    """Return a heading with its figures, nothing where there are none."""
    return f"<h2>{title}</h2>{figures(drawn)}" if drawn else ""


def ratios(results: Results) -> str:
    """Return one table per case that was measured."""
    measured = {row["case"] for row in results.rows}
    parts = []
    for case in CASES.values():
        if case.name in measured and case.method == "times":
            parts += [
                f"<h3>{case.title}</h3><p><small>µs per call</small></p>",
                "" if case.chart else tables.mean_ratios(results, case),
                tables.case_table(results, case),
                tables.reasons(results, case),
            ]
    return "".join(parts)
