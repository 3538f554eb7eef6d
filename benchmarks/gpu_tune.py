"""Measure schedules on a GPU and remember the fastest.

``python -m benchmarks.gpu_tune --weight int4 --group-size 128 --shapes 4096x4096 -m 16,64``
compiles candidates in parallel processes, checks each against float64 and times it with
weights from HBM. ``--output`` keeps every measurement; ``--database`` gets the winners in the
form that `schedules.tuning` ships.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.gpu_gemm import BOUNDS, Case, activations, environment, graph_time_us, problem, quantized
from ladder.ir.gemm import Gemm
from schedules.legal import is_legal, placement_for
from schedules.policy import pipelines_for, rank
from schedules.schedule import GpuSchedule, Plan, Schedule
from targets import TileDevice, get_device
from tile_types.errors import ScheduleError


def candidates(gemm: Gemm, device: str, m: int, top: int, sample: int) -> list[Schedule]:
    """Return schedules to try at M = ``m``.

    The ``top`` best predicted; if that is 0, ``sample`` random ones of the legal grid; if that
    is 0 too, the whole grid.
    """
    target = get_device(device)
    if top:
        return [candidate.schedule for candidate in rank(gemm, target, m, full=True)[:top]]
    legal: list[Schedule] = [s for s in grid(gemm, pipelines(target, m), m) if is_legal(gemm, target, s)]
    return random.Random(m).sample(legal, min(sample, len(legal))) if sample else legal


def pipelines(device: TileDevice, m: int) -> tuple[str, ...]:
    """Return the policy's pipelines, and wgmma where it exists: the policy may be wrong."""
    extra = ("wgmma",) if "wgmma" in device.features else ()
    return tuple(dict.fromkeys((*pipelines_for(device, m), *extra)))


def grid(gemm: Gemm, names: Sequence[str], m: int) -> Iterator[GpuSchedule]:
    """Yield the coarse grid of each pipeline around M = ``m``."""
    placement = placement_for(gemm)
    tokens = [t for t in (8, 16, 32, 64, 128, 256) if t < 2 * max(8, m)][-2:]
    for pipeline in names:
        gemv = pipeline == "gemv"
        for tile_m, tile_n, tile_k, stages, warps, split, persistent in product(
            (8,) if gemv else tokens,
            (64,) if gemv else (64, 128, 256),
            (64,) if gemv else (64, 128, 256),
            (2, 4, 8) if gemv else (4, 6, 8),
            (4, 8, 16) if gemv else (4, 8),
            (1, 2, 4, 8),
            (False,) if m <= 256 or gemv else (False, True),
        ):
            try:
                yield GpuSchedule(
                    pipeline, tile_m, tile_n, tile_k, stages, warps, split, persistent, placement=placement
                )
            except ScheduleError:
                continue


def request(gemm: Gemm, device: str, schedule: Schedule) -> Any:
    """Return what the runtime compiles for one schedule."""
    from ladder.runtime.compile import Request

    return Request(gemm, device, Plan(((1 << 16, schedule),)))


def compile_one(gemm: Gemm, device: str, schedule: Schedule) -> str:
    """Build one schedule into the disk cache; return what went wrong."""
    from ladder.runtime.compile import obtain

    try:
        obtain(request(gemm, device, schedule))
    except Exception as error:  # one broken candidate does not end the search
        return f"{type(error).__name__}: {error}"
    return ""


def measure(
    case: Case, shape: tuple[int, int], m: int, schedules: Sequence[Schedule], device: str
) -> Iterator[dict[str, Any]]:
    """Check and time every schedule at one shape and M."""
    from ladder.runtime.compile import compiled
    from ladder.runtime.packed import pack

    gemm = problem(case, *shape)
    weight = quantized(case, *shape, "cuda")
    packed = pack(gemm, get_device(device), weight).tensors
    size = sum(tensor.nbytes for tensor in packed)
    copies = [packed] + [[t.clone() for t in packed] for _ in range(max(1, int(2.4e8 / size)))]
    x = activations(case, m, gemm.k)
    reference = x.double() @ weight.dequantize("float64").t()
    for schedule in schedules:
        row = {"n": gemm.n, "k": gemm.k, "m": m, "schedule": str(schedule), "bytes": size}
        try:
            operator = compiled(request(gemm, device, schedule).text)
            y = operator.run(x, packed)
            row["relative_error"] = float((y.double() - reference).norm() / reference.norm())
            row["time_us"] = graph_time_us([partial(operator.run, x, w) for w in copies], repeats=7)
        except RuntimeError as error:
            row["failure"] = str(error)[:200]
        yield row


def winners(case: Case, rows: Sequence[dict[str, Any]]) -> dict[tuple[int, int, int], dict[str, Any]]:
    """Return the fastest correct row of each (N, K, M)."""
    best: dict[tuple[int, int, int], dict[str, Any]] = {}
    for row in rows:
        if row.get("relative_error", 1.0) <= BOUNDS[case.activation]:
            key = (row["n"], row["k"], row["m"])
            if key not in best or row["time_us"] < best[key]["time_us"]:
                best[key] = row
    return best


def shape_of(text: str) -> tuple[int, int]:
    """Read ``NxK``."""
    n, _, k = text.partition("x")
    return int(n), int(k)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="cuda/sm_90a")
    parser.add_argument("--weight", default="int4")
    parser.add_argument("--activation", default="float16")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--zero", default="none")
    parser.add_argument("--shapes", default="4096x4096")
    parser.add_argument("-m", default="16,64")
    parser.add_argument("--top", type=int, default=0, help="only the best predicted; 0 tries the whole grid")
    parser.add_argument(
        "--sample", type=int, default=0, help="random candidates of the grid per M; 0 tries all"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", default="")
    parser.add_argument("--database", default="", help="folder of a tuning database that gets the winners")
    arguments = parser.parse_args()
    case = Case(arguments.weight, arguments.activation, arguments.group_size, arguments.zero)
    shapes = [shape_of(text) for text in arguments.shapes.split(",")]
    tokens = [int(m) for m in arguments.m.split(",")]
    gemm = problem(case, *shapes[0])
    trials = {m: candidates(gemm, arguments.target, m, arguments.top, arguments.sample) for m in tokens}
    unique = list(dict.fromkeys(s for schedules in trials.values() for s in schedules))
    start = time.perf_counter()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        tasks = {s: pool.submit(compile_one, gemm, arguments.target, s) for s in unique}
        failures = {s: task.result() for s, task in tasks.items() if task.result()}
    print(f"compiled {len(unique)} schedules in {time.perf_counter() - start:.0f} s, {len(failures)} failed")
    for schedule, reason in list(failures.items())[:5]:
        print(schedule, reason[:300], file=sys.stderr)
    rows = [
        row
        for shape in shapes
        for m, schedules in trials.items()
        for row in measure(case, shape, m, [s for s in schedules if s not in failures], arguments.target)
    ]
    best = winners(case, rows)
    for (n, k, m), row in best.items():
        print(f"{case} N={n} K={k} M={m}: {row['time_us']:.1f} us  {row['schedule']}")
    if arguments.output:
        report = {"environment": environment(), "case": str(case), "rows": rows}
        Path(arguments.output).write_text(json.dumps(report, indent=1))
    if arguments.database:
        record(case, best, arguments.target, Path(arguments.database))
    return 0


def record(case: Case, best: dict[tuple[int, int, int], dict[str, Any]], device: str, folder: Path) -> None:
    """Add the winners to a tuning database."""
    from ladder.installation import ladder_version
    from schedules.schedule import parse_schedule
    from schedules.tuning import TuningDatabase

    database = TuningDatabase(folder, ladder_version())
    for (n, k, m), row in best.items():
        schedule = parse_schedule(row["schedule"])
        database.record(get_device(device), problem(case, n, k), m, schedule, row["time_us"] * 1e-6)


if __name__ == "__main__":
    sys.exit(main())
