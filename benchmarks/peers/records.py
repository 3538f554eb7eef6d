"""Results as data: runs and rows, written and read as JSON, and merged.

A row is one contender at one point (case, N, K, M) of one run, or says why it has no time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import compact

FORMAT = 1
Row = Mapping[str, Any]
Point = tuple[str, int, int, int]


@dataclass
class Results:
    """Runs by identifier and the rows that they measured.

    Parameters
    ----------
    runs
        Date, device, versions, command and measured limits of each run.
    rows
        What was measured, in the order of measurement.
    """

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def points(self) -> dict[Point, dict[str, Row]]:
        """Return the rows of each point by label."""
        found: dict[Point, dict[str, Row]] = {}
        for row in self.rows:
            found.setdefault(point_of(row), {})[row["label"]] = row
        return found

    def text(self) -> str:
        """Return the JSON text, one line per row."""
        return compact({"format": FORMAT, "runs": self.runs, "rows": self.rows})

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        path.write_text(self.text())


def point_of(row: Row) -> Point:
    """Return case, N, K and M of a row."""
    return row["case"], row["n"], row["k"], row["m"]


def read(path: Path) -> Results:
    """Read what `Results.write` wrote.

    Raises
    ------
    ValueError
        If the file has another format.
    """
    data = json.loads(path.read_text())
    if data.get("format") != FORMAT:
        raise ValueError(f"{path} is not a result of benchmarks.peers of format {FORMAT}")
    return Results(data["runs"], data["rows"])


def merge(parts: Iterable[Results]) -> Results:
    """Return all points; one that was measured in several runs is taken whole from the last.

    Ratios therefore always compare times of one run.
    """
    runs: dict[str, dict[str, Any]] = {}
    last: dict[Point, list[dict[str, Any]]] = {}
    for part in parts:
        runs |= part.runs
        mine: dict[Point, list[dict[str, Any]]] = {}
        for row in part.rows:
            mine.setdefault(point_of(row), []).append(row)
        last |= mine
    rows = [row for group in last.values() for row in group]
    return Results({name: run for name, run in runs.items() if any(r["run"] == name for r in rows)}, rows)
