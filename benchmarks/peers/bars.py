"""Judges results: what each measure means, and which bars hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.cases import CASES, MB, Bar
from benchmarks.peers.records import Point, Results, Row

Rows = Mapping[str, Row]


@dataclass(frozen=True)
class Scene:
    """What a measure may look at: one point, its neighbours and the limits of its run."""

    point: Point
    rows: Rows
    points: Mapping[Point, Rows]
    run: Mapping[str, Any]

    def time(self, label: str) -> float | None:
        """Return the median microseconds of a contender."""
        value = self.rows.get(label, {}).get("time_us")
        return None if value is None else float(value)

    def best(self, bar: Bar) -> tuple[str, float] | None:
        """Return label and time of the fastest contender that the bar compares with."""
        names = bar.against or tuple(name for name, row in self.rows.items() if row["engine"] != "ladder")
        timed = [(name, t) for name in names if (t := self.time(name)) is not None]
        return min(timed, key=lambda pair: pair[1], default=None)


def ratio(scene: Scene, bar: Bar) -> float | None:
    """Return the time of the fastest peer over ours."""
    ours, best = scene.time(bar.subject), scene.best(bar)
    return None if ours is None or best is None else best[1] / ours


def relative(scene: Scene, bar: Bar) -> float | None:
    """Return our time over that of the contender compared with."""
    value = ratio(scene, bar)
    return None if value is None else 1 / value


def by_bytes(scene: Scene, bar: Bar) -> float | None:
    """Return our time over that of the contender compared with, each by the bytes of its weight."""
    value, best = relative(scene, bar), scene.best(bar)
    if value is None or best is None:
        return None
    return value * float(scene.rows[best[0]]["weight_bytes"]) / float(scene.rows[bar.subject]["weight_bytes"])


def bandwidth(scene: Scene, bar: Bar) -> float | None:
    """Return the bytes that must move per second over the measured read bandwidth."""
    ours = scene.time(bar.subject)
    if ours is None:
        return None
    moved = moved_bytes(scene.rows[bar.subject])
    return float(moved / (ours * 1e-6) / scene.run["read_bytes_per_second"])


def moved_bytes(row: Row) -> float:
    """Return the bytes of the weight as packed, of the activations and of the result."""
    width = 1 if row["activation"] in ("int8", "fp8_e4m3") and not row["dynamic"] else 2
    result = 4 if row["output"] == "float32" else 2
    return float(row["weight_bytes"] + row["m"] * (row["k"] * width + row["n"] * result))


def microseconds(scene: Scene, bar: Bar) -> float | None:
    """Return our median time."""
    return scene.time(bar.subject)


def neighbours(scene: Scene, bar: Bar) -> float | None:
    """Return the fastest time at any larger M over ours: below 1, padding M would be faster."""
    case, n, k, m = scene.point
    larger = [
        float(rows[bar.subject]["time_us"])
        for (c, pn, pk, pm), rows in scene.points.items()
        if (c, pn, pk) == (case, n, k) and pm > m and rows.get(bar.subject, {}).get("time_us") is not None
    ]
    ours = scene.time(bar.subject)
    return None if ours is None else min(larger, default=ours) / ours


def dequantise(scene: Scene, bar: Bar) -> float | None:
    """Return the least that dequantising and then cuBLAS can cost, over our time.

    cuBLAS as measured, plus reading the packed weight and writing the dense one at the
    measured copy bandwidth.
    """
    ours, best = scene.time(bar.subject), scene.best(bar)
    if ours is None or best is None:
        return None
    return (best[1] + dequantise_us(scene.rows[bar.subject], scene.run)) / ours


def dequantise_us(row: Row, run: Mapping[str, Any]) -> float:
    """Return the least microseconds in which a packed weight becomes a dense 16-bit one."""
    return float((row["weight_bytes"] + 2 * row["n"] * row["k"]) / run["copy_bytes_per_second"] * 1e6)


def host(key: str) -> Callable[[Scene, Bar], float | None]:
    """Return the measure that reads a host cost."""
    return lambda scene, bar: scene.rows.get(bar.subject, {}).get(key)


@dataclass(frozen=True)
class Measure:
    """How a value is computed, how it is printed and which way is better."""

    compute: Callable[[Scene, Bar], float | None]
    form: str
    at_least: bool = True


MEASURES: Mapping[str, Measure] = {
    "ratio": Measure(ratio, "{:.2f}× {against}"),
    "relative": Measure(relative, "{:.2f}× the time of {against}", at_least=False),
    "by bytes": Measure(by_bytes, "{:.2f}× the time per byte of {against}", at_least=False),
    "bandwidth": Measure(bandwidth, "{:.0%} of the read bandwidth"),
    "time": Measure(microseconds, "{:.1f} µs", at_least=False),
    "neighbours": Measure(neighbours, "{:.2f}× the speed of its neighbours in M"),
    "dequantise": Measure(dequantise, "{:.2f}× dequantise + cuBLAS"),
    "direct": Measure(host("direct_us"), "{:.1f} µs called directly", at_least=False),
    "operator": Measure(host("operator_us"), "{:.1f} µs through torch's operator", at_least=False),
}
"""Every measure by name."""


COMPARED = ("ratio", "relative", "by bytes", "dequantise")
"""Measures that have another contender's time in them."""


@dataclass(frozen=True)
class Verdict:
    """A bar at one point; ``value`` is None where something is missing."""

    case: str
    bar: Bar
    point: Point
    value: float | None
    peer: str = ""

    @property
    def holds(self) -> bool:
        """Whether the bar is met."""
        if self.value is None:
            return False
        return self.value >= self.bar.limit if self.measure.at_least else self.value <= self.bar.limit

    @property
    def measure(self) -> Measure:
        """How the value was computed."""
        return MEASURES[self.bar.measure]

    @property
    def margin(self) -> float:
        """How far the value is beyond the bar, as a factor; below 1 the bar is missed."""
        if self.value is None:
            return 0.0
        return self.value / self.bar.limit if self.measure.at_least else self.bar.limit / self.value


def describe(bar: Bar) -> str:
    """Return a bar in words."""
    measure = MEASURES[bar.measure]
    against = " or ".join(bar.against) or "the best peer"
    sign = "≥" if measure.at_least else "≤"
    parts = [f"{sign} {measure.form.format(bar.limit, against=against)}"]
    if bar.tokens:
        parts.append("M = " + ", ".join(map(str, bar.tokens)))
    if bar.shapes:
        parts.append(", ".join(f"{n} × {k}" for n, k in bar.shapes))
    if bar.least_bytes:
        parts.append(f"weights ≥ {bar.least_bytes // MB} MB")
    if bar.subject != "ladder":
        parts.append(bar.subject)
    return "; ".join(parts)


def applies(bar: Bar, point: Point, rows: Rows) -> bool:
    """Tell whether a bar speaks of a point."""
    _, n, k, m = point
    if (bar.tokens and m not in bar.tokens) or (bar.shapes and (n, k) not in bar.shapes):
        return False
    return not bar.least_bytes or rows.get(bar.subject, {}).get("weight_bytes", 0) >= bar.least_bytes


def judge(results: Results) -> Iterator[Verdict]:
    """Yield a verdict for every bar at every point that was measured."""
    points = results.points()
    for point, rows in points.items():
        run = results.runs[next(iter(rows.values()))["run"]]
        scene = Scene(point, rows, points, run)
        for bar in CASES[point[0]].bars:
            if applies(bar, point, rows):
                best = scene.best(bar) if bar.measure in COMPARED else None
                value = MEASURES[bar.measure].compute(scene, bar)
                yield Verdict(point[0], bar, point, value, best[0] if best else "")


def by_bar(results: Results) -> dict[tuple[str, Bar], list[Verdict]]:
    """Return the verdicts of each bar, also of those that nothing was measured for."""
    found: dict[tuple[str, Bar], list[Verdict]] = {
        (case.name, bar): [] for case in CASES.values() for bar in case.bars
    }
    for verdict in judge(results):
        found[verdict.case, verdict.bar].append(verdict)
    return found


def wrong_rows(results: Results) -> list[Row]:
    """Return the rows whose error exceeds its bound."""
    return [row for row in results.rows if row.get("ok") is False]
