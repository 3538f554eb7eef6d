"""Small charts as SVG text: lines and points on logarithmic or linear axes, and bars.

Colours are classes ``s0`` … ``s7`` of the page's style sheet, so that they follow its theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 14, 46
SERIES_COLOURS = 8
BAR, BAR_GAP, NAME_WIDTH = 18, 6, 210


@dataclass(frozen=True)
class Series:
    """One set of marks.

    Parameters
    ----------
    name
        For the legend.
    points
        (x, y, text shown on hovering).
    colour
        Number of the colour class.
    line
        Whether points are joined.
    marks
        Whether points are drawn.
    hollow
        Whether marks are outlines.
    dashed
        Whether the line is dashed: a limit, not a measurement.
    named
        Whether each mark has its text beside it.
    """

    name: str
    points: Sequence[tuple[float, float, str]]
    colour: int
    line: bool = True
    marks: bool = True
    hollow: bool = False
    dashed: bool = False
    named: bool = False


@dataclass(frozen=True)
class Axis:
    """Where a value lies between two pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = True

    def place(self, value: float) -> float:
        """Return the pixel of a value."""
        scale: Callable[[float], float] = math.log10 if self.log else float
        part = (scale(value) - scale(self.low)) / ((scale(self.high) - scale(self.low)) or 1.0)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round values within the axis: powers of ten with 2 and 5 where there is room."""
        if not self.log:
            step = nice_step(self.high - self.low)
            first = math.ceil(self.low / step)
            return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        factors = (1, 2, 5) if math.log10(self.high / self.low) <= 2.7 else (1,)
        values = [f * 10.0**d for d in decades for f in factors]
        return [v for v in values if self.low * 0.999 <= v <= self.high * 1.001]


def nice_step(span: float) -> float:
    """Return 1, 2 or 5 times a power of ten that divides a span into about five."""
    raw = span / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return min((f * power for f in (1, 2, 5, 10)), key=lambda step: abs(step - raw))


def bounds(values: Sequence[float], log: bool) -> tuple[float, float]:
    """Return the ends of an axis that holds all values with a little room."""
    low, high = min(values), max(values)
    if log:
        return low / 1.25, high * 1.25
    return min(0.0, low), high * 1.08


def chart(
    series: Sequence[Series], x_label: str, y_label: str, *, log_x: bool = True, log_y: bool = True
) -> str:
    """Return lines and points over two axes, with a legend on the right."""
    every = [point for one in series for point in one.points]
    if not every:
        return '<p class="missing">Nothing was measured.</p>'
    x = Axis(*bounds([p[0] for p in every], log_x), LEFT, WIDTH - RIGHT, log_x)
    y = Axis(*bounds([p[1] for p in every], log_y), HEIGHT - BOTTOM, TOP, log_y)
    body = [*grid(x, y, x_label, y_label), *(part for one in series for part in drawn(one, x, y))]
    body += legend(series)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(body)}</svg>'


def grid(x: Axis, y: Axis, x_label: str, y_label: str) -> list[str]:
    """Return grid lines, tick labels and axis labels."""
    parts = []
    for value in x.ticks():
        at = f"{x.place(value):.1f}"
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{y.start}" y2="{y.end}"/>')
        parts.append(f'<text x="{at}" y="{y.start + 16}" text-anchor="middle">{number(value)}</text>')
    for value in y.ticks():
        at = f"{y.place(value):.1f}"
        parts.append(f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{x.start - 6}" y="{at}" dy="4" text-anchor="end">{number(value)}</text>')
    middle = (x.start + x.end) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text transform="translate(14 {(y.start + y.end) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    return parts


def drawn(one: Series, x: Axis, y: Axis) -> list[str]:
    """Return the marks of a series."""
    places = [(f"{x.place(px):.1f}", f"{y.place(py):.1f}", text) for px, py, text in one.points]
    colour, parts = f"s{one.colour % SERIES_COLOURS}", []
    if one.line and len(places) > 1:
        path = " ".join(f"{px},{py}" for px, py, _ in places)
        dashed = " dashed" if one.dashed else ""
        parts.append(f'<polyline class="line {colour}{dashed}" points="{path}"/>')
    if one.marks:
        kind = "hollow" if one.hollow else "mark"
        for px, py, text in places:
            hover = f"<title>{escape(text)}</title>"
            parts.append(f'<circle class="{kind} {colour}" cx="{px}" cy="{py}" r="3.5">{hover}</circle>')
            if one.named:
                parts.append(f'<text x="{float(px) + 5:.1f}" y="{float(py) + 3:.1f}">{escape(text)}</text>')
    return parts


def legend(series: Sequence[Series]) -> list[str]:
    """Return one line of text per series, beside the plot."""
    parts = []
    for position, one in enumerate(series):
        at, colour = TOP + 8 + 17 * position, f"s{one.colour % SERIES_COLOURS}"
        left = WIDTH - RIGHT + 12
        if one.line:
            dashed = " dashed" if one.dashed else ""
            parts.append(
                f'<line class="line {colour}{dashed}" x1="{left}" x2="{left + 16}" y1="{at}" y2="{at}"/>'
            )
        else:
            kind = "hollow" if one.hollow else "mark"
            parts.append(f'<circle class="{kind} {colour}" cx="{left + 8}" cy="{at}" r="3.5"/>')
        parts.append(f'<text x="{left + 22}" y="{at + 4}">{escape(one.name)}</text>')
    return parts


def bars(rows: Sequence[tuple[str, float, str, int]]) -> str:
    """Return horizontal bars of (name, value, text behind the bar, colour)."""
    height = len(rows) * (BAR + BAR_GAP) + BAR_GAP
    longest = max((value for _, value, _, _ in rows), default=1.0)
    room = WIDTH - NAME_WIDTH - RIGHT
    parts = []
    for position, (name, value, text, colour) in enumerate(rows):
        top = BAR_GAP + position * (BAR + BAR_GAP)
        length = max(1.0, value / longest * room)
        parts.append(f'<text x="{NAME_WIDTH - 8}" y="{top + 13}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect class="mark s{colour}" x="{NAME_WIDTH}" y="{top}" width="{length:.1f}" height="{BAR}"/>'
        )
        parts.append(f'<text x="{NAME_WIDTH + length + 6:.1f}" y="{top + 13}">{escape(text)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def number(value: float) -> str:
    """Return a value with three significant digits and without an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
