"""What `ladder superopt` does and prints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ladder.cli.console import Step
from ladder.installation import cache_root
from ladder.superopt.generator import Database, Limits, Program, Report, get_program, search
from ladder.superopt.generator.ablation import Row, ablation
from ladder.superopt.generator.program import TYPE
from tile_types.errors import ParseError
from tile_types.library import get_type

COLUMNS = ("graph", "operators", "grid", "loop", "KiB per unit", "delta", "error")
ABLATION_COLUMNS = (
    "operators",
    "verified",
    "states",
    "seconds",
    "states unpruned",
    "seconds unpruned",
    "factor",
)
NO_KERNELS = "graphs are ranked by bytes loaded; ladder.superoptimize builds and times their kernels"


def run_superopt(
    name: str, *, operators: int | None, kernels: int, seconds: float, jobs: int, pruning: bool, weight: str,
    group: int, target: str, sizes: str, checkpoint: Path | None, seed: int | None, reuse: bool, step: Step,
) -> Report:  # fmt: skip
    """Search one program; raises LadderError for what the search cannot do yet."""
    program = get_program(name)
    program = with_weight(program.resized(**parse_sizes(sizes)), weight, group)
    count = operators or program.operators + len(program.packed)
    limits = Limits(count, kernels, seconds=seconds, workers=jobs, pruning=pruning).on(target)

    def searched() -> Report:
        return search(program, limits, checkpoint=checkpoint, step=step, seed=seed)

    return Database(cache_root()).recall(program, limits, searched) if reuse else searched()


def with_weight(program: Program, weight: str, group: int) -> Program:
    """Return the program with weights of a type; ``group`` elements share a scale unless the type says."""
    if weight == TYPE:
        return program
    ttype = get_type(weight)
    return program.with_weights(ttype.name if ttype.is_block else f"{weight}_g{group}")


def run_ablation(
    name: str, *, operators: int | None, jobs: int, seconds: float, sizes: str, step: Step
) -> list[Row]:
    """Search one program with and without pruning, for 4 up to ``operators`` operators."""
    program = get_program(name).resized(**parse_sizes(sizes))
    most = operators or program.operators
    counts = range(min(4, most), most + 1)
    return list(ablation(program, Limits(workers=jobs, seconds=seconds), counts, step))


def ablation_rows(table: list[Row]) -> list[tuple[str, ...]]:
    """Return the table as text; states without pruning are a lower bound where the search was stopped."""
    return [
        (
            str(row.operators), str(row.verified), str(row.states), f"{row.seconds:.1f}",
            f"{'' if row.finished else '> '}{row.states_without}", f"{row.seconds_without:.1f}",
            f"{'' if row.finished else '> '}{row.factor:.1f}",
        )
        for row in table
    ]  # fmt: skip


def parse_sizes(text: str) -> dict[str, int]:
    """Read ``B=16,K=4096``; raises ParseError."""
    sizes = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, number = part.partition("=")
        if not number.isdigit() or int(number) < 1:
            raise ParseError(f"sizes are given as NAME=NUMBER, separated by commas, got {part!r}")
        sizes[name] = int(number)
    return sizes


def as_json(report: Report) -> dict[str, Any]:
    """Return the report; ``delta`` is the largest of the verified graphs, null without one."""
    counts = report.counts
    return {
        "program": report.program.name, "sizes": dict(report.program.sizes),
        "weights": dict(report.program.packed), "verified": len(report.found), "dearer": report.dearer,
        "delta": max((found.certificate.delta for found in report.found), default=None),
        "states": counts.states, "pruned": counts.pruned, "candidates": counts.candidates,
        "rejected": counts.rejected, "reasons": counts.reasons, "unstable": len(report.unstable),
        "seconds": report.seconds, "complete": report.complete, "ranked_by": NO_KERNELS,
        "graphs": [
            {
                "graph": str(found.graph), "operators": [step.label for step in found.structure.steps],
                "cost_bytes": found.cost, "certificate": found.certificate.as_json(),
                "extents": found.extents, "error": found.stability.error,
                "error_of_program": found.stability.original,
            }
            for found in report.found
        ],
    }  # fmt: skip


def ablation_json(table: list[Row]) -> dict[str, Any]:
    """Return the ablation."""
    return {"rows": [{**asdict(row), "factor": row.factor} for row in table]}


def rows(report: Report) -> list[tuple[str, ...]]:
    """Return one row per verified graph, cheapest first."""
    return [
        (
            str(number), " ".join(step.label for step in found.structure.steps),
            "·".join(found.structure.mapping.grid) or "-", found.structure.mapping.loop or "-",
            f"{found.cost / 1024:.0f}", f"{found.certificate.delta:.0e}", f"{found.stability.error:.0e}",
        )
        for number, found in enumerate(report.found, 1)
    ]  # fmt: skip


def fields(report: Report) -> dict[str, str]:
    """Return the counts as text."""
    counts = report.counts
    rejected = "; ".join(f"{n} {why}" for why, n in counts.reasons.items())
    return {
        "program": f"{report.program.name}: {report.program.doc}",
        "states": f"{counts.states} explored, {counts.pruned} steps pruned",
        "verified": f"{len(report.found)} of {counts.candidates} complete graphs"
        f"{f', {report.dearer} dearer ones not proved' if report.dearer else ''}",
        "rejected": f"{counts.rejected}{f' ({rejected})' if rejected else ''}",
        "unstable": str(len(report.unstable)),
        "seconds": f"{report.seconds:.1f}{'' if report.complete else ', out of time: not complete'}",
        "note": NO_KERNELS,
    }
