"""Tuning database: measured schedules, shipped with the package and gathered by the user.

A measurement is keyed on what decides a kernel's speed: the device, the problem's class (`class_of`),
N, K, M, and the generation of the emitters. What an epilogue adds does not count: a layer with a
bias finds what was measured without. What ships for an architecture serves its other products
(`targets.machines`) too: such rows name the device that they were measured on. Each user entry is a
JSON file of its own, written to a temporary file and renamed, so that processes never see half an
entry nor lose each other's.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from ladder.ir.gemm import Gemm
from schedules.codes import looked_up
from schedules.layouts import lane_of
from schedules.schedule import Schedule, parse_schedule
from targets import TileDevice
from tile_types import get_type
from tile_types.errors import CacheError, ParseError
from tile_types.files import replacing
from tile_types.identity import own_values

SHIPPED = Path(__file__).parent / "tuned"
"""Databases in the package, one JSON file per device; `benchmarks.gpu_tune` makes them."""

GENERATION = 1
"""Raise it when emitters change so much that older measurements mislead."""

CLASS_FIELDS = ("weight", "activation", "group_size", "scale", "zero", "power_scales")
"""Fields of `Gemm.shape_free` that decide what the main loop does."""


@dataclass(frozen=True)
class Measurement:
    """One schedule at one shape.

    n, k, m: The shape.
    seconds: Median time of one call.
    device: Name of the device where it was measured; empty: the one that was asked for.
    """

    n: int
    k: int
    m: int
    schedule: Schedule
    seconds: float
    device: str = ""


def class_of(gemm: Gemm) -> dict[str, Any]:
    """Return the problem's class: everything but its extents and its epilogue."""
    fields = gemm.shape_free()
    return {name: fields[name] for name in CLASS_FIELDS if name in fields}


def class_key(device: TileDevice, gemm: Gemm, *, row: bool = False) -> str:
    """Return the canonical text of a class on a device, or on the one of the table's ``row``."""
    name = device.row if row else device.name
    own = own_values(gemm.weight)
    values = {"values": own} if own else {}
    return _canonical({"device": name, "gemm": class_of(gemm), "generation": GENERATION, **values})


def _widths(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bits of a class's codes and of its operands."""
    return get_type(fields["weight"]).elem_bits, lane_of(fields["activation"])


def _unlikeness(gemm: Gemm, other: Gemm) -> tuple[float, ...]:
    """Return how differently two classes with operands of one width are decoded, what weighs most first."""
    lane = lane_of(gemm.activation)
    bits = [get_type(problem.weight).element_type.elem_bits for problem in (gemm, other)]
    return (
        gemm.activation != other.activation and lane == 8,
        looked_up(gemm.weight, gemm.activation) != looked_up(other.weight, other.activation),
        abs(bits[0] - bits[1]),
        gemm.power_scales != other.power_scales,
        gemm.activation != other.activation,
        abs(gemm.group_size - other.group_size),
    )


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class TuningDatabase:
    """Shipped measurements overlaid by the user's.

    directory: Where the user's entries live; None: shipped ones only, `record` keeps in memory.
    shipped: Folder of shipped databases.
    """

    directory: Path | None = None
    shipped: Path = SHIPPED
    _memory: dict[str, list[Measurement]] = field(default_factory=dict, repr=False)

    def measurements(self, device: TileDevice, gemm: Gemm) -> tuple[Measurement, ...]:
        """Return what was measured for the problem's class, at every shape.

        Where the user measured a point (N, K, M), nothing shipped is returned for it. A damaged
        entry warns and counts as absent.
        """
        key = class_key(device, gemm)
        own = {(row.n, row.k, row.m): row for row in self._user_rows(key)}
        own |= {(row.n, row.k, row.m): row for row in self._memory.get(key, ())}
        shipped = read_shipped(self.shipped).get(class_key(device, gemm, row=True), ())
        kept = [row for row in shipped if (row[0], row[1], row[2]) not in own]
        return (*own.values(), *_shipped_on(device, kept))

    def relatives(self, device: TileDevice, gemm: Gemm) -> Iterator[tuple[Measurement, ...]]:
        """Yield what ships of every other class whose codes and operands are as wide."""
        own = class_key(device, gemm, row=True)
        for key, rows in read_shipped(self.shipped).items():
            fields = json.loads(key)
            if (
                key != own
                and fields["device"] == device.row
                and _widths(fields["gemm"]) == _widths(class_of(gemm))
            ):
                yield _shipped_on(device, rows)

    def akin(self, device: TileDevice, gemm: Gemm) -> list[tuple[Gemm, tuple[Measurement, ...]]]:
        """Return what ships of classes that decode to operands of the same width, the most alike first.

        With each class comes the problem that it is at the extents of ``gemm``.
        """
        wide, own, found = lane_of(gemm.activation), class_key(device, gemm, row=True), []
        for key, rows in read_shipped(self.shipped).items():
            fields = json.loads(key)
            other = {"power_scales": False, **fields["gemm"]}
            alike = wide == lane_of(other["activation"]) and gemm.scale == other["scale"]
            if alike and fields["device"] == device.row and key != own:
                found.append((replace(gemm, **other), _shipped_on(device, rows)))
        return sorted(found, key=lambda entry: _unlikeness(gemm, entry[0]))

    def lookup(self, device: TileDevice, gemm: Gemm, m: int) -> Schedule | None:
        """Return the fastest schedule measured at exactly this shape and M, or None."""
        here = [
            row for row in self.measurements(device, gemm) if (row.n, row.k, row.m) == (gemm.n, gemm.k, m)
        ]
        return min(here, key=lambda row: row.seconds).schedule if here else None

    def record(self, device: TileDevice, gemm: Gemm, m: int, schedule: Schedule, seconds: float) -> None:
        """Store the winner at one shape and M, replacing an older one.

        Raises CacheError if the user's directory cannot be written.
        """
        key, row = class_key(device, gemm), Measurement(gemm.n, gemm.k, m, schedule, seconds)
        self._memory.setdefault(key, []).append(row)
        if self.directory is not None:
            point = _digest(f"{gemm.n} {gemm.k} {m}")
            write_json(self.directory / f"{_digest(key)}-{point}.json", class_table(json.loads(key), [row]))

    def _user_rows(self, key: str) -> Iterator[Measurement]:
        paths = sorted(self.directory.glob(f"{_digest(key)}-*.json")) if self.directory is not None else []
        for path in paths:
            for found, rows in load_rows(path).items():
                if found == key:
                    yield from (Measurement(n, k, m, _schedule(s), t) for n, k, m, s, t in rows)


Row = tuple[int, int, int, str, float]
"""N, K, M, the schedule's text, seconds."""


def _shipped_on(device: TileDevice, rows: Iterable[Row]) -> tuple[Measurement, ...]:
    """Return what ships of the row of the table that a device is, or is a product of."""
    where = "" if device.name == device.row else device.row
    return tuple(Measurement(n, k, m, _schedule(s), t, where) for n, k, m, s, t in rows)


def class_table(key: Mapping[str, Any], rows: Sequence[Measurement]) -> dict[str, Any]:
    """Return the JSON of one class: schedules once, rows ``[N, K, M, schedule, microseconds]``."""
    texts = list(dict.fromkeys(str(row.schedule) for row in rows))
    place = {text: index for index, text in enumerate(texts)}
    ordered = sorted(rows, key=lambda row: (row.n, row.k, row.m, row.seconds))
    table = [
        [row.n, row.k, row.m, place[str(row.schedule)], float(f"{row.seconds * 1e6:.4g}")] for row in ordered
    ]
    return {"classes": [{"key": dict(key), "schedules": texts, "rows": table}]}


@lru_cache(maxsize=4096)
def _schedule(text: str) -> Schedule:
    return parse_schedule(text)


@lru_cache(maxsize=4)
def read_shipped(folder: Path) -> Mapping[str, tuple[Row, ...]]:
    """Return the rows of every class that ships."""
    found: dict[str, tuple[Row, ...]] = {}
    for path in sorted(folder.glob("*.json")):
        for key, rows in load_rows(path).items():
            found[key] = (*found.get(key, ()), *rows)
    return found


@cache
def shipped_digest() -> str:
    """Return a digest of the databases that ship."""
    files = sorted(SHIPPED.glob("*.json"))
    return _digest("".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files))


def load_rows(path: Path) -> dict[str, tuple[Row, ...]]:
    """Return the rows of one file by class; a file that cannot be read warns and is empty."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {_canonical(part["key"]): tuple(_rows(part)) for part in content["classes"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, ParseError) as error:
        warnings.warn(
            f"ignoring damaged tuning entry {path.name}: {error}; tune again to replace it", stacklevel=4
        )
        return {}


def _rows(part: Mapping[str, Any]) -> Iterator[Row]:
    texts = part["schedules"]
    for text in texts:
        _schedule(text)
    for n, k, m, place, microseconds in part["rows"]:
        yield int(n), int(k), int(m), str(texts[place]), float(microseconds) * 1e-6


def best_rows(rows: Iterable[Measurement]) -> list[Measurement]:
    """Return the fastest row of every shape and M."""

    def point(row: Measurement) -> tuple[int, int, int]:
        return row.n, row.k, row.m

    grouped = groupby(sorted(rows, key=point), point)
    return [min(group, key=lambda row: row.seconds) for _, group in grouped]


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` so that readers see the old file or the new one, never a part.

    Raises CacheError if the folder cannot be written.
    """
    # One row or schedule per line, so that changes show.
    text = json.dumps(content, sort_keys=True).replace("], [", "],\n[").replace('", "', '",\n"')
    with replacing(path, CacheError, "; set LADDER_CACHE_DIR elsewhere", folder=True) as part:
        part.write_text(text + "\n", encoding="utf-8")
