"""The command `ladder superopt`; its kernels are in `superopt_kernels`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder.cli.console import Progress, print_fields, print_table
from ladder.installation import cache_root
from ladder.superopt.generator import Database, Limits, Program, Report, get_program, search
from ladder.superopt.generator.program import TYPE
from ladder.superopt.verifier import rounded_up
from tile_types.errors import LadderError, ParseError
from tile_types.library import get_type

if TYPE_CHECKING:
    from ladder.cli.superopt_kernels import Lowering

COLUMNS = ("graph", "operators", "grid", "loop", "KiB per unit", "delta", "error")

RANKED = "graphs by bytes loaded, kernels by the device model until they are timed"


def run_superopt(
    name: str, *, operators: int | None, kernels: int, loops: int, seconds: float, jobs: int, pruning: bool,
    weight: str, group: int, target: str, sizes: str, checkpoint: Path | None, seed: int | None,
    reuse: bool, step: Progress,
) -> Report:  # fmt: skip
    """Search one program; raises LadderError for what the search cannot do yet."""
    program = get_program(name)
    program = with_weight(program.resized(**parse_sizes(sizes)), weight, group)
    limits = Limits.of(
        program, target, operators=operators, kernels=kernels, loops=loops, seconds=seconds, workers=jobs,
        pruning=pruning,
    )  # fmt: skip

    def searched() -> Report:
        return search(program, limits, checkpoint=checkpoint, step=step, seed=seed)

    return Database(cache_root()).recall(program, limits, searched) if reuse else searched()


def with_weight(program: Program, weight: str, group: int) -> Program:
    """Return the program with weights of a type; ``group`` elements share a scale unless the type says."""
    if weight == TYPE:
        return program
    ttype = get_type(weight)
    return program.with_weights(ttype.name if ttype.is_block else f"{weight}_g{group}")


def parse_sizes(text: str) -> dict[str, int]:
    """Read ``B=16,K=4096``; raises ParseError."""
    sizes = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, number = part.partition("=")
        if not name or name in sizes or not re.fullmatch("0*[1-9][0-9]{0,9}", number):
            raise ParseError(
                "sizes are given as NAME=NUMBER, each name once, a number of up to ten digits,"
                f" separated by commas; got {part!r}"
            )
        sizes[name] = int(number)
    return sizes


def kernels_of(
    report: Report, target: str, count: int, seed: int, step: Progress
) -> tuple[list[Lowering], str]:
    """Build and check the best kernels of a report; return them, or why there are none that were wanted."""
    if not report.found:
        return [], "no verified graph was found; allow more --operators or --seconds"
    if not count:
        return [], ""
    from ladder.cli.superopt_kernels import run_kernels

    try:
        kernels = run_kernels(report, target, count, seed, step)
    except LadderError as error:
        return [], f"no kernels: {error}"
    wrong = sum(not kernel.right for kernel in kernels)
    return kernels, f"{wrong} of {len(kernels)} kernels are wrong" if wrong else ""


def print_report(report: Report, kernels: Sequence[Lowering]) -> None:
    """Print counts, graphs and kernels."""
    print_fields(fields(report))
    print_table(COLUMNS, rows(report), "\nverified graphs")
    if kernels:
        from ladder.cli import superopt_kernels as built

        print_table(built.COLUMNS, built.kernel_rows(kernels), "\nkernels")


def as_json(report: Report, kernels: Sequence[Lowering] = ()) -> dict[str, Any]:
    """Return the report; ``delta`` bounds the error of all verified graphs, null without one."""
    from ladder.cli.superopt_kernels import kernels_json

    counts = report.counts
    return {
        "program": report.program.name, "sizes": dict(report.program.sizes),
        "weights": dict(report.program.packed), "verified": len(report.found), "dearer": report.dearer,
        "delta": rounded_up(report.delta) if report.found else None,
        "states": counts.states, "pruned": counts.pruned, "candidates": counts.candidates,
        "rejected": counts.rejected, "reasons": counts.reasons, "unstable": len(report.unstable),
        "seconds": report.seconds, "complete": report.complete, "from_database": report.recalled,
        "ranked_by": RANKED,
        "graphs": [
            {
                "graph": str(found.graph), "operators": [step.label for step in found.structure.steps],
                "cost_bytes": found.cost, "certificate": found.certificate.as_json(),
                "extents": found.extents, "error": found.stability.error,
                "error_of_program": found.stability.original,
            }
            for found in report.found
        ],
        "kernels": kernels_json(kernels),
    }  # fmt: skip


def rows(report: Report) -> list[tuple[str, ...]]:
    """Return one row per verified graph, cheapest first."""
    return [
        (
            str(number), " ".join(step.label for step in found.structure.steps),
            "·".join(found.structure.mapping.grid) or "-", "·".join(found.structure.mapping.loops) or "-",
            f"{found.cost / 1024:.0f}", f"{found.certificate.error:.0e}", f"{found.stability.error:.0e}",
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
        "origin": report.origin,
        "order": RANKED,
    }
