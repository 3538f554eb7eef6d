"""Results of searches as JSON: checkpoints, and a database that several processes may share.

An entry is keyed by everything that decides it: the program with its shapes and types, the limits (of a
device), and the sources of the search and of what proves its results. It is written to a file of its own
beside and renamed, so readers see a whole entry or none; one that cannot be read is a miss.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import ladder.ir
import ladder.superopt
from ladder.superopt.generator import structure as structures
from ladder.superopt.generator.choose import choose_factors
from ladder.superopt.generator.instantiate import instantiate
from ladder.superopt.generator.program import Program
from ladder.superopt.generator.report import Counts, Limits, Report, VerifiedGraph
from ladder.superopt.generator.structure import GraphStep, Prefix, Structure
from ladder.superopt.verifier import Bound, Certificate, Stability
from tile_types.errors import CacheError, LadderError
from tile_types.files import replacing
from tile_types.identity import own_values_named

T = TypeVar("T")

FOLDER = "superopt"


def structure_of(value: dict[str, Any]) -> Structure:
    """Return a structure that was written by `dataclasses.asdict` and JSON."""
    prefix = value["prefix"]
    return Structure(
        Prefix(_steps(prefix["steps"]), _tuple(prefix["operands"])),
        structures.Mapping(**{name: _tuple(entry) for name, entry in value["mapping"].items()}),
        _steps(value["steps"]),
        value["shifted"],
    )


def _steps(values: list[dict[str, Any]]) -> tuple[GraphStep, ...]:
    return tuple(GraphStep(**{name: _tuple(entry) for name, entry in value.items()}) for value in values)


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def identity(program: Program, limits: Limits) -> dict[str, Any]:
    """Return what decides the result of a search, as JSON values; the program's name does not."""
    kept = {name: value for name, value in asdict(limits).items() if name not in ("seconds", "workers")}
    graph = replace(program.graph(), name="program")
    return {"graph": str(graph), "packed": dict(program.packed), "limits": kept}


@lru_cache(maxsize=1)
def _sources() -> str:
    """Return a digest of the code that searches and proves."""
    digest = hashlib.sha256()
    for package in (ladder.ir, ladder.superopt):
        for root in package.__path__:
            for path in sorted(Path(root).rglob("*.py")):
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Database:
    """Reports of complete searches, and what else belongs to a search.

    root: A folder, such as that of the kernel cache; it need not exist.
    """

    root: Path

    def path(self, facts: Mapping[str, Any]) -> Path:
        """Return the file of an entry, which these facts and the sources decide."""
        text = json.dumps({**facts, "sources": _sources()}, sort_keys=True)
        text += json.dumps(own_values_named(text), sort_keys=True)
        return self.root / FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

    def read(self, facts: Mapping[str, Any], restore: Callable[[Any], T]) -> T | None:
        """Return what an entry's JSON restores; None if there is none, or none that can be restored."""
        try:
            return restore(json.loads(self.path(facts).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, IndexError, LadderError):
            return None

    def write(self, facts: Mapping[str, Any], value: Any) -> None:
        """Keep an entry, a JSON value."""
        path = self.path(facts)
        with replacing(path, CacheError, folder=True) as part:
            part.write_text(json.dumps(value), encoding="utf-8")

    def find(self, program: Program, limits: Limits) -> Report | None:
        """Return the report of the same search, or None."""
        return self.read(identity(program, limits), lambda stored: _report(stored, program, limits))

    def add(self, report: Report) -> None:
        """Keep a report, unless its search ran out of time."""
        if report.complete:
            self.write(identity(report.program, report.limits), _as_json(report))

    def recall(self, program: Program, limits: Limits, search: Callable[[], Report]) -> Report:
        """Return the report of the same search, or do it and keep its report."""
        report = self.find(program, limits)
        if report is None:
            report = search()
            self.add(report)
        return report


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "counts": asdict(report.counts), "seconds": report.seconds, "dearer": report.dearer,
        "delta": str(report.delta),
        "found": [_found_as_json(found) for found in report.found],
        "unstable": [_found_as_json(found) for found in report.unstable],
    }  # fmt: skip


def _found_as_json(found: VerifiedGraph) -> dict[str, Any]:
    return {
        "structure": asdict(found.structure),
        "certificate": certificate_to_json(found.certificate),
        "extents": found.extents, "stability": asdict(found.stability),
    }  # fmt: skip


def _report(stored: dict[str, Any], program: Program, limits: Limits) -> Report:
    found, unstable = (
        tuple(_found(value, program, limits) for value in stored[name]) for name in ("found", "unstable")
    )
    counts = Counts(**stored["counts"])
    return Report(
        program, limits, found, unstable, counts, stored["seconds"], True, stored["dearer"], recalled=True,
        delta=Fraction(stored["delta"]),
    )  # fmt: skip


def _found(value: dict[str, Any], program: Program, limits: Limits) -> VerifiedGraph:
    structure = structure_of(value["structure"])
    factors, cost = choose_factors(structure, program, limits.units, limits.capacity)
    graph = instantiate(structure, program, factors, packed=True)
    stability, proof = Stability(**value["stability"]), certificate_of(value["certificate"])
    return VerifiedGraph(structure, graph, proof, value["extents"], stability, cost)


def certificate_to_json(proof: Certificate) -> dict[str, Any]:
    """Return all of a certificate of equality as JSON values."""
    return {**asdict(proof), "delta": str(proof.delta)}


def certificate_of(value: Mapping[str, Any]) -> Certificate:
    """Return the certificate that `certificate_to_json` gave."""
    proof = {**value, "bound": Bound(**value["bound"]), "delta": Fraction(value["delta"])}
    return Certificate(**proof)
