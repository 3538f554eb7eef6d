"""What the papers report: `published.json`, with the source of every number."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _all() -> dict[str, Any]:
    return dict(json.loads((Path(__file__).parent / "published.json").read_text()))


def published(key: str) -> dict[str, Any]:
    """Return source, hardware and numbers of a figure."""
    return dict(_all()[key])
