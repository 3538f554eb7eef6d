"""The tables: bars, ratios to the peers, errors, runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from statistics import geometric_mean

from benchmarks.peers.bars import MEASURES, Verdict, by_bar, describe, judge
from benchmarks.peers.cases import CASES, Case
from benchmarks.peers.records import Results, Row
from benchmarks.report.charts import floor_us

FASTER, EVEN = 1.0, 0.97
"""Ratios from which a cell counts as won, and as even."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are HTML already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def cell(text: str, kind: str = "", title: str = "") -> str:
    """Return a table cell of a class with a text shown on hovering."""
    hover = f' title="{escape(title, quote=True)}"' if title else ""
    return f'<td class="{kind}"{hover}>{text}</td>' if kind or hover else f"<td>{text}</td>"


# ---- bars -----------------------------------------------------------------------------
def bar_table(results: Results) -> str:
    """Return every bar with its worst value and whether it holds."""
    rows = []
    for (name, bar), verdicts in by_bar(results).items():
        head = [escape(CASES[name].title), escape(describe(bar))]
        if not verdicts:
            rows.append([*head, "", "", cell("not measured", "missing")])
            continue
        worst = min(verdicts, key=lambda verdict: verdict.margin)
        held = sum(verdict.holds for verdict in verdicts)
        good = held == len(verdicts)
        state = cell(f"{'holds' if good else 'missed'} ({held}/{len(verdicts)})", "good" if good else "bad")
        rows.append([*head, value_of(worst), where(worst), state])
    return table(("case", "must hold", "worst value", "at", "verdict"), rows)


def value_of(verdict: Verdict) -> str:
    """Return the value of a verdict with its unit."""
    if verdict.value is None:
        return cell("no value", "missing")
    return escape(verdict.measure.form.format(verdict.value, against=verdict.peer or "the best peer"))


def where(verdict: Verdict) -> str:
    """Return shape and M of a verdict."""
    _, n, k, m = verdict.point
    return f"{n} × {k}, M = {m}"


# ---- ratios ---------------------------------------------------------------------------
def case_table(results: Results, case: Case) -> str:
    """Return the times of all contenders at every point of a case, with ratios to Ladder."""
    points = {point: rows for point, rows in results.points().items() if point[0] == case.name}
    verdicts: dict[tuple[str, int, int, int], list[Verdict]] = {}
    for verdict in judge(results):
        verdicts.setdefault(verdict.point, []).append(verdict)
    labels = [one.name for one in case.contenders]
    rows = []
    for point, held in points.items():
        subject = held.get(labels[0], {})
        floor = floor_us(subject, results.runs[subject["run"]]) if "time_us" in subject else None
        _, n, k, m = point
        rows.append(
            [
                f"{n} × {k}",
                str(m),
                f"{floor:.1f}" if floor else "",
                own_cell(subject, floor),
                *(peer_cell(held.get(label), subject) for label in labels[1:]),
                bars_cell(verdicts.get(point, [])),
            ]
        )
    head = ("N × K", "M", "floor", *(escape(label) for label in labels), "bars")
    return table(head, rows)


def own_cell(row: Row, floor: float | None) -> str:
    """Return our time and how much of it the floor is."""
    if floor is None:
        return cell("–", "missing", str(row.get("reason", "not measured")))
    hover = f"error {row['relative_error']:.1e}, bound {row['bound']:.0e}"
    return cell(f"<b>{row['time_us']:.1f}</b> <small>{floor / row['time_us']:.0%}</small>", "", hover)


def peer_cell(row: Row | None, subject: Row) -> str:
    """Return a peer's time and its ratio to ours, or why there is none."""
    if row is None:
        return cell("–", "missing", "not selected in this run")
    if "time_us" not in row:
        return cell("–", "missing", str(row.get("reason", "")))
    hover = f"error {row['relative_error']:.1e}" if "relative_error" in row else ""
    if "time_us" not in subject:
        return cell(f"{row['time_us']:.1f}", "", hover)
    ratio = row["time_us"] / subject["time_us"]
    kind = "good" if ratio >= FASTER else "even" if ratio >= EVEN else "bad"
    return cell(f"{row['time_us']:.1f} <small>{ratio:.2f}×</small>", kind, hover)


def bars_cell(verdicts: Sequence[Verdict]) -> str:
    """Return the bars of a point, each met or missed."""
    marks = []
    for one in verdicts:
        value = (
            "no value"
            if one.value is None
            else MEASURES[one.bar.measure].form.format(one.value, against=one.peer or "the best peer")
        )
        kind = "good" if one.holds else "bad"
        sign = "✓" if one.holds else "✗"
        text = escape(f"{describe(one.bar)}: {value}", quote=True)
        marks.append(f'<span class="{kind}" title="{text}">{sign}</span>')
    return " ".join(marks)


def reasons(results: Results, case: Case) -> str:
    """Return why contenders have no time, each reason once."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in results.rows:
        if row["case"] == case.name and row.get("reason"):
            found.setdefault((row["label"], row["reason"]), []).append(f"{row['n']}×{row['k']} M={row['m']}")
    lines = [
        f"<li><b>{escape(label)}</b>: {escape(reason)} <small>({len(at)} points, e.g. {at[0]})</small></li>"
        for (label, reason), at in found.items()
    ]
    return f"<details><summary>Without a time</summary><ul>{''.join(lines)}</ul></details>" if lines else ""


def mean_ratios(results: Results, case: Case) -> str:
    """Return, for each M, the geometric mean over the shapes of the best peer's time over ours."""
    found: dict[int, list[float]] = {}
    for point, rows in results.points().items():
        if point[0] == case.name:
            ours = rows.get(case.contenders[0].name, {}).get("time_us")
            peers = [r["time_us"] for r in rows.values() if r["engine"] != "ladder" and "time_us" in r]
            if ours and peers:
                found.setdefault(point[3], []).append(min(peers) / ours)
    parts = [f"M = {m}: {geometric_mean(ratios):.2f}×" for m, ratios in sorted(found.items())]
    return (
        f"<p>Against the best peer, geometric mean over the shapes: {', '.join(parts)}.</p>" if parts else ""
    )


# ---- host, errors, runs ---------------------------------------------------------------
def host_table(results: Results) -> str:
    """Return the host's cost of a call, by way of calling."""
    rows = [row for row in results.rows if row["case"] == "host" and "direct_us" in row]
    return table(
        ("N × K", "bare launch", "called directly", "torch operator"),
        [
            [
                f"{r['n']} × {r['k']}",
                *(f"{r[f'{way}_us']:.1f} µs" for way in ("kernel", "direct", "operator")),
            ]
            for r in rows
        ],
    )


def error_table(results: Results) -> str:
    """Return the largest error of each contender of each case."""
    worst: dict[tuple[str, str], Row] = {}
    for row in results.rows:
        if "relative_error" in row:
            key = (row["case"], row["label"])
            if key not in worst or row["relative_error"] > worst[key]["relative_error"]:
                worst[key] = row
    rows = [
        [
            escape(case),
            escape(label),
            f"{row['relative_error']:.1e}",
            f"{row['bound']:.0e}",
            cell("within" if row["ok"] else "exceeded", "good" if row["ok"] else "bad"),
        ]
        for (case, label), row in worst.items()
    ]
    return table(("case", "engine", "largest relative error", "bound", ""), rows)


def run_table(results: Results) -> str:
    """Return date, device, limits, versions and command of every run."""
    head = ("run", "date", "device", "read", "copy", "fp16", "fp8", "int8", "versions", "command")
    rows = []
    for name, run in results.runs.items():
        limits = [f"{run[f'{way}_bytes_per_second'] * 1e-12:.2f} TB/s" for way in ("read", "copy")]
        limits += [
            f"{run[f'{kind}_operations_per_second'] * 1e-12:.0f} TFLOP/s"
            for kind in ("float16", "fp8_e4m3", "int8")
        ]
        versions = ", ".join(f"{package} {version}" for package, version in run["versions"].items())
        rows.append(
            [
                name,
                run["date"],
                escape(run["device"]),
                *limits,
                cell(escape(versions), "long"),
                f"<code>{escape(run['command'])}</code>",
            ]
        )
    return table(head, rows)
