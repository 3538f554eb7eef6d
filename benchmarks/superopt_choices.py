"""Tiles and schedules of block graphs that were fastest on an H200, by point of `benchmarks.superopt`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Choice = tuple[tuple[int, ...], Mapping[str, Any]]

CHOICES: Mapping[str, Sequence[Choice]] = {}
