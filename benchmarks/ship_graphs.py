"""``python -m benchmarks.ship_graphs``: search the patterns and write the database that is shipped.

Every pattern is searched for each kind of weights and each type; what is found replaces its entry,
others stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.graph_patterns import PATTERNS, TYPES, WEIGHTS, get_pattern
from ladder.runtime.model.found import CHOICES, is_emitted
from ladder.runtime.trials import candidates_of
from ladder.superopt.generator import Limits, Program, Report, VerifiedGraph, search
from ladder.superopt.generator.alphabet import numbers_of
from ladder.superopt.generator.instantiate import instantiate
from ladder.superopt.generator.stored import certificate_to_json
from ladder.superopt.shipped import PATH
from targets import get_device
from tile_types.errors import ScheduleError

TARGET = "cuda/sm_90a"
"""Whose shared memory and multiprocessors rank what is found."""


MOST = 4
"""Graphs of an entry for each type, the fastest by the model first."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Search and write; returns the exit status: 1 if nothing was found for some pattern."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ship_graphs", description=__doc__)
    parser.add_argument("patterns", nargs="*", default=list(PATTERNS), help="names; all by default")
    parser.add_argument("--weights", choices=WEIGHTS, nargs="*", default=WEIGHTS)
    parser.add_argument("--seconds", type=float, default=600.0, help="budget of each search")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    given = parser.parse_args(arguments)
    missing = 0
    for name in given.patterns:
        for weights in given.weights:
            missing += not _ship(name, weights, given.seconds, given.jobs)
    return 1 if missing else 0


def _ship(name: str, weights: str, seconds: float, jobs: int) -> bool:
    """Search one pattern and write its entry; return whether anything was found."""
    forms = {ttype: get_pattern(name).program(weights, ttype) for ttype in TYPES}
    reports: dict[str, Report] = {}
    for ttype, form in forms.items():
        limits = Limits.of(form.program, TARGET, seconds=seconds, workers=jobs)
        report = search(form.program, limits)
        reports[ttype] = report = replace(report, found=_fastest(report))
        sys.stderr.write(f"{name} ({weights}, {ttype}): {len(report.found)} graphs {report.origin}\n")
    if not any(report.found for report in reports.values()):
        return False
    stored = json.loads(PATH.read_text("utf-8")) if PATH.exists() else {}
    stored[forms[TYPES[0]].key] = _entry_of(reports, name, weights)
    text = json.dumps(
        dict(sorted(stored.items(), key=lambda item: (item[1]["pattern"], item[1]["weights"]))), indent=1
    )
    PATH.write_text(f"{text}\n", encoding="utf-8")
    return True


def _fastest(report: Report) -> tuple[VerifiedGraph, ...]:
    """Return the graphs of a report, first those whose kernels are predicted to be fastest.

    Graphs of the same cost, as plans rank them, stay in this order.
    """
    device = get_device(TARGET)

    def seconds(found: VerifiedGraph) -> float:
        try:
            trials = candidates_of(replace(report, found=(found,)), device, 1, choices=CHOICES)
        except ScheduleError:
            return float("inf")
        return next((trial.predicted for trial in trials if is_emitted(trial, device)), float("inf"))

    return tuple(sorted(report.found, key=seconds))


def _entry_of(reports: Mapping[str, Report], pattern: str, weights: str) -> dict[str, Any]:
    """Return reports by type as JSON values of an entry; graphs found twice have the first proof."""
    numbers = numbers_of(reports[TYPES[0]].program.symbolic)
    assert len(set(numbers)) == len(numbers), "equal numbers of an entry could not be told apart at use"
    found: dict[str, dict[str, Any]] = {}
    places: dict[str, int] = {}
    for ttype, report in reports.items():
        for place, one in enumerate(report.found[:MOST]):
            new = {**_found_as_json(one, report.program), "types": []}
            key = json.dumps(new["structure"])
            found.setdefault(key, new)["types"].append(ttype)
            places[key] = min(place, places.get(key, place))
    first = sorted(found, key=places.__getitem__)
    return {"pattern": pattern, "weights": weights, "numbers": numbers, "found": [found[k] for k in first]}


def _found_as_json(found: VerifiedGraph, program: Program) -> dict[str, Any]:
    return {
        "graph": str(instantiate(found.structure, program, packed=True)),
        "structure": asdict(found.structure),
        "certificate": certificate_to_json(found.certificate),
        "extents": found.extents,
        "stability": asdict(found.stability),
    }


if __name__ == "__main__":
    sys.exit(main())
