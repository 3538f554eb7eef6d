"""Results of record and of new runs, found by name."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        Files that were read, in order.
    """

    folders: Sequence[Path] = (RECORDED,)
    used: dict[str, Path] = field(default_factory=dict)

    def newest(self, name: str) -> dict[str, Any] | None:
        """Return the newest result of a name such as ``*_models``, ``*`` being a device; None without one.

        The first folder that has one counts; of equal dates, the greater name.
        """
        pattern = re.compile(re.escape(name).replace(r"\*", DEVICE) + DATED)
        for folder in self.folders:
            found = [path for path in folder.glob("*.json") if pattern.fullmatch(path.name)]
            if found:
                self.used[name] = max(found, key=lambda path: (path.stem[-10:], path.name))
                return dict(json.loads(self.used[name].read_text()))
        return None

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of the newest result; none if there is no result."""
        return list((self.newest(name) or {}).get("rows", ()))


def file_name(name: str, device: str, date: str) -> str:
    """Return the file of a new result."""
    return f"{name.replace('*', device)}_{date}.json"
