"""``python -m benchmarks.peers --output result.json --html report.html``.

Times Ladder beside other libraries, all in one process and on the same weights, checks every
result against float64, and judges the requirements. ``--merge a.json b.json`` draws one report
of several results instead of measuring.
"""

from __future__ import annotations

import argparse
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import command, require_gpu
from benchmarks.peers import bars, run
from benchmarks.peers.cases import CASES, HELD_OUT_CASES, QUICK_SHAPES, QUICK_TOKENS, Case, Shape
from benchmarks.peers.engine import ENGINES
from benchmarks.peers.records import Results, merge, read
from ladder.runtime.cores import usable_cores


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    made.add_argument("--output", type=Path, help="JSON file of the results")
    made.add_argument("--html", type=Path, help="self-contained report")
    made.add_argument("--merge", type=Path, nargs="+", default=[], help="results to merge; measures nothing")
    made.add_argument("--cases", default="", help=f"comma-separated; of {', '.join(CASES)}")
    made.add_argument("--held-out", action="store_true", help="only shapes that nobody tuned for")
    made.add_argument("--shapes", default="", help="comma-separated NxK")
    made.add_argument("-m", "--tokens", default="", help="comma-separated M")
    made.add_argument("--peers", default="", help=f"comma-separated; of {', '.join(ENGINES)}; Ladder always")
    made.add_argument("--quick", action="store_true", help="two shapes, M of 1 and 16, fewer repeats")
    made.add_argument("--rounds", type=int, default=run.ROUNDS, help="replays per contender and point")
    made.add_argument("--jobs", type=int, default=usable_cores(), help="processes that compile")
    made.add_argument("--warm-only", action="store_true", help="compile and tune, measure nothing")
    return made


def shapes_of(text: str) -> tuple[Shape, ...]:
    """Read ``NxK,NxK``."""
    pairs = (part.split("x") for part in text.split(",") if part)
    return tuple((int(n), int(k)) for n, k in pairs)


def selection(arguments: argparse.Namespace) -> run.Selection:
    """Return the part of the table that the options ask for.

    Raises
    ------
    SystemExit
        If a case or an engine does not exist.
    """
    every = [case.name for case in HELD_OUT_CASES] if arguments.held_out else list(CASES)
    names = [name for name in arguments.cases.split(",") if name] or every
    peers = {name for name in arguments.peers.split(",") if name} or set(ENGINES)
    if unknown := [name for name in names if name not in CASES] + sorted(peers - set(ENGINES)):
        raise SystemExit(f"unknown: {', '.join(unknown)}; see --help")
    shapes = shapes_of(arguments.shapes) or (QUICK_SHAPES if arguments.quick else ())
    tokens = tuple(int(m) for m in arguments.tokens.split(",") if m)
    tokens = tokens or (QUICK_TOKENS if arguments.quick else ())
    narrowed = (narrow(CASES[name], shapes, tokens, peers | {"ladder"}) for name in names)
    rounds = min(arguments.rounds, 7) if arguments.quick else arguments.rounds
    return run.Selection(tuple(case for case in narrowed if case.shapes and case.tokens), rounds)


def narrow(case: Case, shapes: Sequence[Shape], tokens: Sequence[int], engines: set[str]) -> Case:
    """Return a case with only some shapes, M and engines; empty means all."""
    return replace(
        case,
        shapes=tuple(shape for shape in case.shapes if not shapes or shape in shapes),
        tokens=tuple(m for m in case.tokens if not tokens or m in tokens),
        contenders=tuple(one for one in case.contenders if one.engine in engines),
    )


def measured(arguments: argparse.Namespace) -> Results:
    """Warm, measure and keep what there is after every case and shape.

    Raises
    ------
    SystemExit
        If there is no GPU to measure on.
    """
    chosen, start = selection(arguments), time.perf_counter()
    if arguments.warm_only:
        run.Warming(chosen, arguments.jobs).wait_for_all()
        return Results()
    require_gpu("--warm-only compiles Ladder's kernels")
    bench, run_id = run.Bench(), uuid.uuid4().hex[:8]
    warming = run.Warming(chosen, arguments.jobs)
    warming.wait_for_peers()
    facts = {**bench.facts(), "command": command(), "rounds": chosen.rounds}
    run.say(f"{facts}")
    results = Results({run_id: facts})
    for rows in run.measure(chosen, run_id, bench, warming):
        results.rows += rows
        facts["seconds"] = round(time.perf_counter() - start)
        if arguments.output:
            results.write(arguments.output)
    return results


def summarise(results: Results) -> bool:
    """Print every bar with its worst value; return whether all hold and all errors are in bounds."""
    good = True
    for (name, bar), verdicts in bars.by_bar(results).items():
        if not verdicts:
            continue
        worst = min(verdicts, key=lambda verdict: verdict.margin)
        held = sum(verdict.holds for verdict in verdicts)
        good &= held == len(verdicts)
        value = "nothing" if worst.value is None else f"{worst.value:.3g}"
        state = "ok  " if held == len(verdicts) else "MISS"
        where = "N = {}, K = {}, M = {}".format(*worst.point[1:])
        print(f"{state} {name:16} {bars.describe(bar)}: {held}/{len(verdicts)}, worst {value} at {where}")
    for row in bars.wrong_rows(results):
        good &= row["engine"] != "ladder"
        where = f"{row['case']} {row['n']}x{row['k']} M={row['m']} {row['label']}"
        print(f"WRONG {where}: relative error {row['relative_error']:.2e} > {row['bound']:.0e}")
    return good


def main() -> int:
    """Run the command; exit code 1 if a bar is missed."""
    arguments = parser().parse_args()
    results = merge(map(read, arguments.merge)) if arguments.merge else measured(arguments)
    if arguments.output:
        results.write(arguments.output)
    if arguments.html:
        from benchmarks.report.page import page

        arguments.html.write_text(page(results))
    return 0 if summarise(results) else 1


if __name__ == "__main__":
    sys.exit(main())
