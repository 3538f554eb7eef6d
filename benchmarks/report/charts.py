"""The figures: roofline, time at every M, what each optimisation brings, time against bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.peers.bars import dequantise_us, moved_bytes
from benchmarks.peers.cases import CASES
from benchmarks.peers.records import Results, Row
from benchmarks.report.svg import Series, bars, chart, number

SIXTEEN_BIT, EIGHT_BIT = ("float16",), ("fp8_e4m3", "int8")
RATES = {"float16": SIXTEEN_BIT, "bfloat16": SIXTEEN_BIT, "fp8_e4m3": EIGHT_BIT, "int8": EIGHT_BIT}
"""The measured dense rates of which the highest limits products of an activation type."""

Figure = tuple[str, str]
"""Title and SVG."""


def operations(row: Row) -> float:
    """Return multiplications and additions of a product."""
    return float(2 * row["m"] * row["n"] * row["k"])


def floor_us(row: Row, run: Mapping[str, Any]) -> float:
    """Return the least time: bytes at the measured read bandwidth, operations at the measured dense rate."""
    moving = moved_bytes(row) / run["read_bytes_per_second"]
    rates = [run[f"{kind}_operations_per_second"] for kind in RATES[row["activation"]]]
    computing = operations(row) / max(rates)
    return float(max(moving, computing) * 1e6)


def timed(results: Results, case: str) -> Iterator[Row]:
    """Yield the rows of a case that have a time."""
    for row in results.rows:
        if row["case"] == case and "time_us" in row:
            yield row


# ---- roofline -------------------------------------------------------------------------
def roofline(results: Results) -> str:
    """Return the achieved operations per second over the operations per byte, below the measured roofs."""
    judged = [case for case in CASES.values() if not case.chart]
    series = [roof(results, kind) for kind in ("float16", "fp8_e4m3")] if results.runs else []
    for colour, case in enumerate(judged):
        own = [row for row in timed(results, case.name) if row["label"] == case.contenders[0].name]
        points = [roofline_point(row) for row in own]
        if points:
            series.append(Series(case.name, points, colour, line=False, hollow=colour >= 8))
    return chart(series, "operations per byte", "TFLOP/s")


def roofline_point(row: Row) -> tuple[float, float, str]:
    """Return intensity, TFLOP/s and a description of a row."""
    text = f"{row['case']} N={row['n']} K={row['k']} M={row['m']}: {row['time_us']:.1f} µs"
    return operations(row) / moved_bytes(row), operations(row) / row["time_us"] * 1e-6, text


def roof(results: Results, kind: str) -> Series:
    """Return the roof of an activation type: bandwidth up to the ridge, then the dense rate."""
    run = list(results.runs.values())[-1]
    bandwidth, rate = run["read_bytes_per_second"], run[f"{kind}_operations_per_second"]
    ridge = rate / bandwidth
    points = [(x, min(bandwidth * x, rate) * 1e-12, "") for x in (1.0, ridge, 1e4)]
    name = "roof of fp16" if kind == "float16" else "roof of fp8"
    return Series(name, points, 7 if kind == "float16" else 6, marks=False, dashed=True)


# ---- time at every M ------------------------------------------------------------------
def sweeps(results: Results) -> list[Figure]:
    """Return time over M at each shape of the sweep."""
    rows = list(timed(results, "sweep"))
    shapes = dict.fromkeys((row["n"], row["k"]) for row in rows)
    return [(f"N = {n}, K = {k}", sweep(results, n, k)) for n, k in shapes]


def sweep(results: Results, n: int, k: int) -> str:
    """Return time over M at one shape, with the floor."""
    rows = [row for row in timed(results, "sweep") if (row["n"], row["k"]) == (n, k)]
    series = []
    for colour, label in enumerate(dict.fromkeys(row["label"] for row in rows)):
        own = [row for row in rows if row["label"] == label]
        points = [(r["m"], r["time_us"], f"{label} M={r['m']}: {r['time_us']:.1f} µs") for r in own]
        series.append(Series(label, points, colour))
    ours = [row for row in rows if row["label"] == "ladder"]
    floors = [(r["m"], floor_us(r, results.runs[r["run"]]), "") for r in ours]
    series.append(Series("floor of int4", floors, 7, marks=False, dashed=True))
    return chart(series, "M", "µs")


# ---- what each optimisation brings ----------------------------------------------------
def breakdowns(results: Results) -> list[Figure]:
    """Return, for each M, times with more and more of the schedule's optimisations."""
    by_m: dict[int, dict[str, Row]] = {}
    for row in timed(results, "breakdown"):
        by_m.setdefault(row["m"], {})[row["label"]] = row
    return [(f"M = {m}", breakdown(results, rows)) for m, rows in sorted(by_m.items())]


def breakdown(results: Results, rows: Mapping[str, Row]) -> str:
    """Return the bars of one M; the first is the least that an unfused product costs."""
    times = []
    if "cublas" in rows and "ladder" in rows:
        unfused = rows["cublas"]["time_us"] + dequantise_us(
            rows["ladder"], results.runs[rows["ladder"]["run"]]
        )
        times.append(("dequantise + cuBLAS, at least", unfused))
    steps = [one.name for one in CASES["breakdown"].contenders[1:] if one.engine == "ladder"]
    times += [(name, rows[name]["time_us"]) for name in steps if name in rows]
    if "ladder" in rows:
        times.append(("+ multicast: the whole schedule", rows["ladder"]["time_us"]))
    if not times:
        return '<p class="missing">Nothing was measured.</p>'
    first = times[0][1]
    return bars(
        [(name, t, f"{number(t)} µs  {first / t:.2f}×", 0 if i else 7) for i, (name, t) in enumerate(times)]
    )


# ---- time against bits ----------------------------------------------------------------
def bit_widths(results: Results) -> list[Figure]:
    """Return, for each M, the time over the bits of a weight."""
    by_m: dict[int, list[Row]] = {}
    for row in timed(results, "bits"):
        by_m.setdefault(row["m"], []).append(row)
    return [(f"M = {m}", bit_width(results, rows)) for m, rows in sorted(by_m.items())]


def bit_width(results: Results, rows: list[Row]) -> str:
    """Return time over bits at one M, with the floor and cuBLAS."""
    ours = sorted((int(row["label"].split()[0]), row) for row in rows if row["engine"] == "ladder")
    dense = next((row["time_us"] for row in rows if row["engine"] == "cublas"), None)
    series = [
        Series("ladder", [(b, r["time_us"], f"{b} bits: {r['time_us']:.1f} µs") for b, r in ours], 0),
        Series(
            "floor",
            [(b, floor_us(r, results.runs[r["run"]]), "") for b, r in ours],
            7,
            marks=False,
            dashed=True,
        ),
    ]
    if dense is not None and ours:
        ends = (ours[0][0], ours[-1][0])
        series.append(Series("cuBLAS fp16", [(b, dense, f"{dense:.1f} µs") for b in ends], 2, marks=False))
    return chart(series, "bits per weight", "µs", log_x=False, log_y=False)
