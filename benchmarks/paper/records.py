"""Results of record and of new runs, found by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

RECORDED = Path(__file__).resolve().parents[1] / "results"
DEVICE = r"(?:cpu|[a-z]+\d+[a-z0-9]*)"
"""How names of results name a device: ``cpu``, ``h200``."""
DATED = r"_\d{4}-\d{2}-\d{2}\.json"


@dataclass
class Records:
    """Folders of results, the most wanted first.

    Parameters
    ----------
    folders
        Where to look.
    used
        Name of a file -> where it lies, of those whose numbers were taken, in order.
    """

    folders: Sequence[Path] = (RECORDED,)
    used: dict[str, Path] = field(default_factory=dict)

    def newest(self, name: str, wanted: Callable[[dict[str, Any]], T]) -> T | None:
        """Return what is wanted of the newest result that has it; None without one.

        name: Such as ``*_models``, ``*`` being a device. The first folder that has what is wanted counts; of
            equal dates, the greater name.
        wanted: Takes it from a result; what is empty or None is not there.
        """
        pattern = re.compile(re.escape(name).replace(r"\*", DEVICE) + DATED)
        for folder in self.folders:
            found = [path for path in folder.glob("*.json") if pattern.fullmatch(path.name)]
            for path in sorted(found, key=lambda path: (path.stem[-10:], path.name), reverse=True):
                if part := wanted(json.loads(path.read_text())):
                    self.used[path.name] = path
                    return part
        return None

    def rows(self, name: str, *columns: str, **values: object) -> list[dict[str, Any]]:
        """Return the rows with these columns, and values of others, of the newest result that has any."""

        def wanted(result: dict[str, Any]) -> list[dict[str, Any]]:
            return [
                row
                for row in result.get("rows", ())
                if {*columns} <= {*row} and values.items() <= {key: row.get(key) for key in values}.items()
            ]

        return self.newest(name, wanted) or []


def file_name(name: str, device: str, date: str) -> str:
    """Return the file of a new result."""
    return f"{name.replace('*', device)}_{date}.json"
