"""Tuning database: measured schedules, shipped with the package and gathered by the user.

An entry is keyed on everything that can change the answer: device, the shape-free GEMM, N, K,
the range of M, and Ladder's version. Each user entry is a JSON file of its own, written to a
temporary file and renamed, so that processes never see half an entry nor lose each other's.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ladder.ir.gemm import Gemm
from schedules.schedule import Schedule, parse_schedule
from targets import TileDevice
from tile_types.errors import CacheError, ParseError

SHIPPED = Path(__file__).parent / "tuned"
"""Databases in the package, one JSON file per device: ``{"entries": [{"key": …, "schedule": …}]}``."""


@dataclass(frozen=True)
class Entry:
    """A schedule and the seconds that were measured with it."""

    schedule: Schedule
    seconds: float


def tuning_key(device: TileDevice, gemm: Gemm, m_limit: int, version: str) -> str:
    """Return the canonical key text of one problem.

    Parameters
    ----------
    device
        Where it was measured.
    gemm
        The problem; its N and K count.
    m_limit
        Largest M of the range.
    version
        Version of Ladder whose kernels were measured.
    """
    fields = {
        "device": device.name,
        "gemm": gemm.shape_free(),
        "n": gemm.n,
        "k": gemm.k,
        "m": m_limit,
        "version": version,
    }
    return json.dumps(fields, sort_keys=True)


@dataclass
class TuningDatabase:
    """Shipped entries overlaid by the user's.

    Parameters
    ----------
    directory
        Where the user's entries live; None: shipped entries only, `record` keeps in memory.
    version
        Version of Ladder; entries of other versions are not seen.
    shipped
        Folder of shipped databases.
    """

    directory: Path | None = None
    version: str = "0.1.0"
    shipped: Path = SHIPPED
    _memory: dict[str, Entry] = field(default_factory=dict, repr=False)
    _shipped_entries: dict[str, Entry] | None = field(default=None, repr=False)

    def lookup(self, device: TileDevice, gemm: Gemm, m_limit: int) -> Schedule | None:
        """Return the measured schedule, or None.

        A damaged entry warns and counts as absent.
        """
        key = tuning_key(device, gemm, m_limit, self.version)
        entry = self._memory.get(key) or self._read_user(key) or self._read_shipped().get(key)
        return None if entry is None else entry.schedule

    def record(
        self, device: TileDevice, gemm: Gemm, m_limit: int, schedule: Schedule, seconds: float
    ) -> None:
        """Store a measurement, replacing an older one.

        Raises
        ------
        CacheError
            If the user's directory cannot be written.
        """
        key = tuning_key(device, gemm, m_limit, self.version)
        self._memory[key] = Entry(schedule, seconds)
        if self.directory is not None:
            write_json(self._path(key), _encode(key, schedule, seconds))

    def entries(self) -> dict[str, Entry]:
        """Return all entries by key; the user's win over shipped ones."""
        user = dict(self._user_entries())
        return {**self._read_shipped(), **user, **self._memory}

    def export(self, path: Path) -> int:
        """Write all entries as one database file, the form in which they ship; return their number."""
        found = self.entries()
        rows = [_encode(key, entry.schedule, entry.seconds) for key, entry in sorted(found.items())]
        write_json(path, {"entries": rows})
        return len(rows)

    def _path(self, key: str) -> Path:
        assert self.directory is not None
        return self.directory / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def _read_user(self, key: str) -> Entry | None:
        if self.directory is None or not self._path(key).exists():
            return None
        found = next(_load(self._path(key)), None)
        return found[1] if found is not None and found[0] == key else None

    def _user_entries(self) -> Iterator[tuple[str, Entry]]:
        paths = sorted(self.directory.glob("*.json")) if self.directory is not None else []
        for path in paths:
            yield from _load(path)

    def _read_shipped(self) -> dict[str, Entry]:
        if self._shipped_entries is None:
            self._shipped_entries = {
                key: entry for path in sorted(self.shipped.glob("*.json")) for key, entry in _load(path)
            }
        return self._shipped_entries


def _encode(key: str, schedule: Schedule, seconds: float) -> dict[str, Any]:
    return {"key": json.loads(key), "schedule": str(schedule), "seconds": seconds}


def _load(path: Path) -> Iterator[tuple[str, Entry]]:
    """Yield the entries of one file; what cannot be read is skipped with a warning."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content.get("entries", [content])
        decoded = [
            (
                json.dumps(row["key"], sort_keys=True),
                Entry(parse_schedule(row["schedule"]), float(row["seconds"])),
            )
            for row in rows
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ParseError) as error:
        warnings.warn(
            f"ignoring damaged tuning entry {path.name}: {error}; it will be tuned again", stacklevel=3
        )
        return
    yield from decoded


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` so that readers see the old file or the new one, never a part.

    Raises
    ------
    CacheError
        If the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tuning-", suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(content, stream, indent=1, sort_keys=True)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CacheError(
            f"cannot write tuning entry {path}: {error}; set LADDER_CACHE_DIR elsewhere"
        ) from error
