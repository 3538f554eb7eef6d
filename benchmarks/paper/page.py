"""Prints a figure as text and draws figures as one HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from benchmarks.paper.figure import Figure, Point
from benchmarks.report.page import STYLE
from benchmarks.report.svg import bars, number
from benchmarks.report.tables import table

Drawn = tuple[Figure, Sequence[Point], Sequence[Path]]
"""A figure, its points, and the results that they were derived from."""

PAPER, OURS = 7, 0
"""Colour classes of the bars."""


def shown(value: float | None, unit: str) -> str:
    """Return a value with its unit, or a dash."""
    return "–" if value is None else f"{number(value)} {unit}".rstrip().replace(" ×", "×")


def cells(figure: Figure, point: Point) -> tuple[str, ...]:
    """Return the row of a point of a figure."""
    values = (shown(value, point.unit) for value in (point.paper, point.ours))
    note = "; ".join(filter(None, (point.note, figure.reason(point))))
    return (point.label, *values, point.verdict, note or missing(figure, point))


def missing(figure: Figure, point: Point) -> str:
    """Say what would measure a point that no result has."""
    if point.ours is not None or not figure.results:
        return ""
    names = dict.fromkeys(arguments.split()[0] for _, arguments in figure.results)
    return f"no result of record has it; --measure runs {' and '.join(names)}"


HEAD = ("what", "paper", "ours", "", "note")


def text(figure: Figure, points: Sequence[Point], files: Iterable[Path]) -> str:
    """Return a figure for people at a terminal."""
    rows = [HEAD, *(cells(figure, point) for point in points)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    ]
    head = [
        f"{figure.key}: {figure.title}",
        f"paper: {figure.source}; {figure.hardware}",
        f"ours: {', '.join(path.name for path in files) or 'no result; --measure makes one'}",
        *([figure.remark] if figure.remark else []),
    ]
    return "\n".join([*head, *lines, figure.verdict(points)])


def plot(points: Sequence[Point]) -> str:
    """Return two bars for each point: the paper's and ours."""
    rows = []
    for point in points:
        for name, value, colour in (("paper", point.paper, PAPER), ("ours", point.ours, OURS)):
            if value is not None:
                rows.append((name, value, f"{shown(value, point.unit)}  {point.label}", colour))
    return bars(rows)


def section(drawn: Drawn) -> str:
    """Return a figure as HTML: plot and table."""
    figure, points, files = drawn
    made = ", ".join(path.name for path in files) or "no result yet"
    body = [[escape(cell) for cell in cells(figure, point)] for point in points]
    return (
        f'<h2 id="{figure.key}">{escape(figure.title)}</h2><p>{escape(figure.verdict(points))}.'
        f" {escape(figure.remark)}</p><p><small>Paper: {escape(figure.source)}; {escape(figure.hardware)}. "
        f"Ours: {escape(made)}.</small></p><figure>{plot(points)}</figure>"
        f'<div class="wide">{table(HEAD, body)}</div>'
    )


def page(drawn: Sequence[Drawn]) -> str:
    """Return one HTML page of figures."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>The papers' figures</title><style>{STYLE}</style>"
    )
    lead = "<h1>The papers' figures, and Ladder's</h1>"
    body = lead + "".join(map(section, drawn))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'
