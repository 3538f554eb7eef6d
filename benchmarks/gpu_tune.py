"""Tune whole matrices of problems on a GPU and write the database that ships.

``python -m benchmarks.gpu_tune --output measured.json`` compiles candidates in parallel processes,
checks each against float64, times them with weights from HBM and writes every finalist;
``--ship schedules/tuned/h200.json`` writes the form that `schedules.tuning` ships. `ladder tune`
does the same for one class and keeps the winners for the user.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_gemm import Case, problem
from benchmarks.harness import environment
from benchmarks.peers.cases import SHAPES
from ladder.ir.gemm import Gemm
from ladder.runtime.compile_pool import Campaign, CompilePool, at_shapes, load, save
from ladder.runtime.cores import usable_cores
from ladder.runtime.gauge import Gauge
from ladder.runtime.measure import Timed
from ladder.runtime.tune import Effort, Measured, Run, compile_campaigns, finals, measure_all, tune
from schedules.schedule import parse_schedule
from schedules.search import TOKENS
from schedules.tuning import Measurement, best_rows, class_key, class_of, class_table, load_rows, write_json
from targets import TileDevice, get_device

MATRIX = (
    Case("int4", "float16", 128),
    Case("int2", "float16", 128),
    Case("int1", "float16", 128),
    Case("nf4", "float16", 64),
    Case("mxfp4", "float16"),
    Case("mxfp4", "bfloat16"),
    Case("int4", "bfloat16", 128),
    Case("fp8_e4m3", "fp8_e4m3"),
    Case("int8", "int8"),
    Case("int4", "int8", 128),
    Case("int4", "fp8_e4m3", 128),
    Case("int2", "int8"),
)
"""Problem classes that ship tuned."""


def campaigns(cases: Sequence[Case], shapes: Sequence[tuple[int, int]], arguments: Any) -> list[Campaign]:
    """Return what is tuned together, class by class."""
    tokens = [int(m) for m in arguments.tokens.split(",")] if arguments.tokens else list(TOKENS)
    work = [
        Campaign(at_shapes(problem(case, *shapes[0]), shapes), tokens, arguments.target) for case in cases
    ]
    return [replace(campaign, random=arguments.random) for campaign in work]


def parse_case(text: str) -> Case:
    """Read ``weight:activation[:group size[:zero]]``."""
    weight, activation, *rest = text.split(":")
    return Case(weight, activation, int(rest[0]) if rest else 0, rest[1] if len(rest) > 1 else "none")


def shape_of(text: str) -> tuple[int, int]:
    """Read ``NxK``."""
    n, _, k = text.partition("x")
    return int(n), int(k)


def rows_of(measured: Iterable[tuple[Gemm, Measurement]]) -> list[dict[str, Any]]:
    """Return measurements by class: schedules once, rows ``[N, K, M, schedule, microseconds]``."""
    classes: dict[str, dict[str, Any]] = {}
    for gemm, row in measured:
        fields = class_of(gemm)
        found = classes.setdefault(json.dumps(fields), {"class": fields, "schedules": {}, "rows": []})
        place = found["schedules"].setdefault(str(row.schedule), len(found["schedules"]))
        found["rows"].append([row.n, row.k, row.m, place, float(f"{row.seconds * 1e6:.4g}")])
    return [{**found, "schedules": list(found["schedules"])} for found in classes.values()]


def dump(path: str, where: dict[str, Any], measured: Iterable[tuple[Gemm, Measurement]]) -> None:
    """Write measurements, one per line, and where they were made; `benchmarks.fit_cost_model` reads them."""
    text = json.dumps({"environment": where, "classes": rows_of(measured)})
    Path(path).write_text(text.replace("], [", "],\n[").replace('", "GpuSchedule', '",\n"GpuSchedule') + "\n")


def write_database(path: Path, device: TileDevice, measured: Mapping[Gemm, Iterable[Measurement]]) -> int:
    """Write measurements into one file, the form in which they ship; return their number.

    Points (N, K, M) of the file that were not measured now stay as they are.

    path: The file; made or changed.
    device: Where they were measured.
    measured: Rows by problem; only the class of each problem counts.
    """
    classes: dict[str, list[Measurement]] = {}
    for gemm, rows in measured.items():
        classes.setdefault(class_key(device, gemm), []).extend(rows)
    for key, older in (load_rows(path) if path.is_file() else {}).items():
        found = classes.setdefault(key, [])
        points = {(row.n, row.k, row.m) for row in found}
        kept = (row for row in older if row[:3] not in points)
        found += [Measurement(n, k, m, parse_schedule(text), seconds) for n, k, m, text, seconds in kept]
    parts = [class_table(json.loads(key), rows) for key, rows in sorted(classes.items())]
    write_json(path, {"classes": [part for whole in parts for part in whole["classes"]]})
    return sum(map(len, classes.values()))


def show(measured: Measured) -> None:
    """Print the winner of every point."""
    for gemm, rows in measured.items():
        for row in best_rows(rows):
            at = f"{gemm.weight} x {gemm.activation} N={row.n} K={row.k} M={row.m}"
            print(f"{at}: {row.seconds * 1e6:.2f} us  {row.schedule}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="cuda/sm_90a")
    parser.add_argument("--cases", default="", help="weight:activation:group[:zero], comma-separated")
    parser.add_argument("--shapes", default="", help="NxK, comma-separated")
    parser.add_argument("--tokens", "-m", default="", help="M, comma-separated")
    parser.add_argument("--kernels", type=int, default=64, help="candidates per class in the first round")
    parser.add_argument("--refined", type=int, default=24, help="neighbours of winners in the second round")
    parser.add_argument(
        "--random", action="store_true", help="random candidates, all tried: to fit the model"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after this")
    parser.add_argument(
        "--stop", type=int, default=0, help="seconds after which to stop and keep what there is"
    )
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument("--output", default="", help="JSON with every finalist")
    parser.add_argument("--everything", default="", help="JSON with the quick times of all that was tried")
    parser.add_argument("--ship", default="", help="database file in the form that ships")
    parser.add_argument("--compile-only", default="", help="compile into this folder and stop")
    parser.add_argument("--measure", default="", help="measure this folder, compile nothing")
    return parser.parse_args()


def write(timed: Sequence[Timed], arguments: argparse.Namespace) -> None:
    """Write what has been measured, first what ships: points of older runs stay in that file."""
    measured = finals(timed)
    if arguments.ship:
        write_database(Path(arguments.ship), get_device(arguments.target), measured)
    if arguments.output:
        dump(arguments.output, environment(), [(g, row) for g, rows in measured.items() for row in rows])
    if arguments.everything:
        dump(arguments.everything, environment(), [(e.gemm, e.row) for e in timed if not e.final])


def perform(run: Run, arguments: argparse.Namespace) -> None:
    """Compile, measure or both, as the arguments say."""
    cases = [parse_case(text) for text in arguments.cases.split(",")] if arguments.cases else MATRIX
    shapes = [shape_of(text) for text in arguments.shapes.split(",")] if arguments.shapes else SHAPES
    work = campaigns(cases, shapes, arguments)
    if arguments.compile_only:
        compile_campaigns(work, run)
        print(f"{save(work, Path(arguments.compile_only))} kernels")
    elif arguments.measure:
        for campaign in load(Path(arguments.measure)):
            measure_all(campaign, run)
    else:
        tune(work, run)


def main() -> int:
    """Run the command; what has been measured is written however it ends."""
    arguments = parse_arguments()
    effort = Effort(arguments.kernels, arguments.refined, arguments.seconds)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(0))
    signal.alarm(arguments.stop)
    with Gauge() as gauge, CompilePool(arguments.jobs) as pool:
        run = Run(pool, gauge, effort, lambda line: print(line, flush=True))
        try:
            perform(run, arguments)
        finally:
            write(run.timed, arguments)
    show(finals(run.timed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
