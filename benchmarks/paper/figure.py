"""A figure of a paper: what it reports beside what Ladder's results say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.paper.records import Records

EVEN = 0.9
"""Share of the paper's value from which ours counts as equal to it."""


@dataclass(frozen=True)
class Point:
    """One number of a figure.

    Parameters
    ----------
    label
        What was measured.
    paper
        What the paper reports; None if it gives no number.
    ours
        The same from our results; None if nothing was measured.
    unit
        "×" for ratios.
    smaller
        Whether a smaller value is the better one.
    note
        How ours differs, or why there is none.
    """

    label: str
    paper: float | None
    ours: float | None
    unit: str = "×"
    smaller: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        """Say whether ours reaches what the paper reports."""
        if self.ours is None:
            return "not measured"
        if self.paper is None:
            return "the paper gives no number"
        share = self.paper / self.ours if self.smaller else self.ours / self.paper
        return "better" if share > 1 / EVEN else "agrees" if share >= EVEN else "behind"


@dataclass(frozen=True)
class Figure:
    """A figure or table.

    Parameters
    ----------
    key
        Its name on the command line.
    title
        What it shows.
    source
        Where the paper's numbers are from.
    hardware
        What the paper measured on.
    points
        Derives the points from results.
    results
        Names of the results that it needs (`records.Records.newest`) -> the arguments of ``python -m`` that
        measure them; ``{file}`` is where they write.
    remark
        What differs, or what is missing.
    reasons
        Label of a point, or how it begins -> why ours is behind, by what was measured.
    """

    key: str
    title: str
    source: str
    hardware: str
    points: Callable[[Records], Sequence[Point]]
    results: tuple[tuple[str, str], ...] = ()
    remark: str = ""
    reasons: Mapping[str, str] = field(default_factory=dict)

    def reason(self, point: Point) -> str:
        """Say why ours is behind the paper; nothing where it is not."""
        if point.verdict != "behind":
            return ""
        return next((why for label, why in self.reasons.items() if point.label.startswith(label)), "")

    def verdict(self, points: Sequence[Point]) -> str:
        """Say in a line how many points agree."""
        counts: dict[str, int] = {}
        for point in points:
            counts[point.verdict] = counts.get(point.verdict, 0) + 1
        return ", ".join(f"{number} {name}" for name, number in counts.items())
