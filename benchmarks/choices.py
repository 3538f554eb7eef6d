"""What the choices of plans lose at shapes that nobody tuned: each beside the best candidates tried.

``python -m benchmarks.choices plan work.json --target cuda/sm_90a:h100`` needs no GPU: for every product
and M it lists the kernel that the plan takes, and those that the model and what was measured rank next.
``python -m benchmarks.choices run work.json --compile 90 --output result.json`` compiles them in parallel
processes, what is not done in so many seconds is left out, checks each against float64 and times them as
`ladder tune` does. ``python -m benchmarks.choices judge work.json result.json`` prints, by class and M,
the time of the choice over that of the fastest, and both over the bytes at the bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from benchmarks.gpu_gemm import Case, problem
from benchmarks.gpu_tune import parse_case, rows_of, shape_of
from benchmarks.harness import (
    copy_bandwidth,
    environment,
    require_gpu,
    write_record,
)
from ladder.ir.gemm import Gemm
from ladder.runtime.compile_pool import Campaign, CompilePool, Trial, at_shapes
from ladder.runtime.measure import Bench, Timed, checked_entries
from schedules.cost import minimum_bytes
from schedules.estimate import Estimator
from schedules.policy import make_plan, rank
from schedules.schedule import GpuSchedule, Schedule, parse_schedule
from schedules.search import spread
from schedules.tuning import TuningDatabase, class_of
from targets import TileDevice, get_device

WORK = (
    ("int4:float16:128", "5120x25600,2880x2880,13824x5120", "1,8,24,64,96,200,500,1500"),
    ("fp8_e4m3:fp8_e4m3", "5120x25600,2880x2880,13824x5120", "1,8,64,256"),
    ("int4:fp8_e4m3:128", "5120x25600,2880x2880,13824x5120", "1,16,200,500"),
    ("mxfp4:bfloat16", "5120x25600,2880x2880", "1,8,24,64,200,500"),
    ("nf4:float16:64", "5120x25600,2880x2880", "1,8,24,64,200,500"),
    ("fp6_e3m2:bfloat16:64", "5120x25600,2880x2880", "1,8,24,64,200,500"),
)
"""Class, shapes (N x K) and M; no row of the shipped tuning database has one of the shapes."""

NEXT, PREDICTED = 3, 1
"""Candidates beside the choice: by the estimates that choose, and by the model alone."""

INVARIANT = ("int4:float16:128", "8192x8192,5120x25600,2880x2880")
"""Where the kernels of the plan whose sums have one order are timed too: a class of `WORK`, and shapes."""

ALL = float("inf"), 1000
"""All kernels of a point are tried: see `ladder.runtime.measure.WORTH_TRYING`."""


@dataclass(frozen=True)
class Point:
    """One product at one M: the schedule that the plan takes, all that are tried, and that of one order."""

    gemm: Gemm
    m: int
    tried: tuple[Schedule, ...]
    invariant: Schedule | None = None

    def row(self, text: str) -> dict[str, Any]:
        """Return the point of the class ``text`` as JSON."""
        row = {
            "case": text,
            "n": self.gemm.n,
            "k": self.gemm.k,
            "m": self.m,
            "tried": [*map(str, self.tried)],
        }
        return row if self.invariant is None else row | {"invariant": str(self.invariant)}


# ---- planning -------------------------------------------------------------------------
def points(
    case: Case, shapes: Iterable[tuple[int, int]], tokens: Sequence[int], target: str
) -> Iterator[Point]:
    """Yield what is timed of a class."""
    device, tuning = get_device(target), TuningDatabase()
    for n, k in shapes:
        gemm = problem(case, n, k)
        plan = make_plan(gemm, device, tuning)
        estimator = Estimator(gemm, device, tuning.measurements(device, gemm), tuning.akin(device, gemm))
        for m in tokens:
            yield Point(gemm, m, tuple(candidates(gemm, device, m, plan.schedule_for(m), estimator)))


def candidates(
    gemm: Gemm, device: TileDevice, m: int, choice: Schedule, estimator: Estimator
) -> Iterator[Schedule]:
    """Yield the choice, then the next best by estimates and by the model, each once."""
    ranked = list(islice(spread(rank(gemm, device, m, wide=True)), 24))
    pool = dict.fromkeys([*estimator.measured, *ranked])
    pool.pop(choice, None)
    by_estimate = sorted(pool, key=lambda schedule: estimator.seconds(schedule, m))
    yield from dict.fromkeys([choice, *by_estimate[:NEXT], *[s for s in ranked if s != choice][:PREDICTED]])


def invariant(target: str, tokens: Sequence[int]) -> Iterator[Point]:
    """Yield what is timed of plans whose sums have one order, beside the usual ones."""
    device, tuning = get_device(target), TuningDatabase()
    for shape in INVARIANT[1].split(","):
        gemm = problem(parse_case(INVARIANT[0]), *shape_of(shape))
        usual, other = (
            make_plan(replace(gemm, batch_invariant=one), device, tuning) for one in (False, True)
        )
        for m in tokens:
            yield Point(gemm, m, (usual.schedule_for(m),), other.schedule_for(m))


def planned(target: str) -> dict[str, Any]:
    """Return all work as JSON."""
    rows = []
    for text, shapes, tokens in WORK:
        at, counts = [shape_of(shape) for shape in shapes.split(",")], [int(m) for m in tokens.split(",")]
        rows += [point.row(text) for point in points(parse_case(text), at, counts, target)]
        rows += [point.row(text) for point in invariant(target, counts)] if text == INVARIANT[0] else []
    return {"target": target, "rows": rows}


# ---- measuring ------------------------------------------------------------------------
@dataclass
class Contest:
    """A class: its campaign, the schedules to compile, choices first, and which compete at N, K and M."""

    campaign: Campaign
    schedules: list[Schedule]
    tried: dict[tuple[int, int, int], set[Schedule]]


def contests(work: dict[str, Any], target: str) -> dict[str, Contest]:
    """Return what is measured, by class."""
    found = {}
    for text in dict.fromkeys(row["case"] for row in work["rows"]):
        rows = [row for row in work["rows"] if row["case"] == text]
        lists = [[*row["tried"][:1], *([row["invariant"]] if "invariant" in row else []), *row["tried"][1:]]
                 for row in rows]  # fmt: skip
        turns = (schedule for turn in zip_longest(*lists) for schedule in turn if schedule)
        schedules = [parse_schedule(schedule) for schedule in dict.fromkeys(turns)]
        tried: dict[tuple[int, int, int], set[Schedule]] = {}
        for row, texts in zip(rows, lists, strict=True):
            tried.setdefault((row["n"], row["k"], row["m"]), set()).update(map(parse_schedule, texts))
        shapes, tokens = dict.fromkeys(at[:2] for at in tried), dict.fromkeys(at[2] for at in tried)
        gemms = at_shapes(problem(parse_case(text), *next(iter(shapes))), shapes)
        found[text] = Contest(Campaign(gemms, list(tokens), target), schedules, tried)
    return found


def compile_all(found: dict[str, Contest], seconds: float) -> None:
    """Compile every class's schedules into its campaign, the first ones of all classes first."""
    begin = time.perf_counter()
    turns = zip_longest(*([(one.campaign, s) for s in one.schedules] for one in found.values()))
    with CompilePool() as pool:
        futures = {}
        for campaign, schedule in (pair for turn in turns for pair in turn if pair):
            (future,) = pool.submit(campaign.problems[0], campaign.device, [schedule])
            futures[future] = campaign
        done, late = wait(futures, timeout=seconds)
        for future in late:
            future.cancel()
        for future in done:
            result = future.result()
            if isinstance(result, Trial):
                futures[future].trials.append(result)
            else:
                print(result[:300], flush=True)
        print(f"{len(done)} kernels, {len(late)} left out, {time.perf_counter() - begin:.0f} s", flush=True)


def measured(contest: Contest, until: float) -> Iterator[Timed]:
    """Yield the times of a class's kernels at every shape and M that is begun in time."""
    device = get_device(contest.campaign.device)
    entries = checked_entries(contest.campaign, device)
    for gemm in contest.campaign.problems:
        if time.perf_counter() < until:
            bench = Bench(gemm, device, entries, *ALL)
            legal = bench.entries
            for m in contest.campaign.tokens:
                here = contest.tried.get((gemm.n, gemm.k, m), set())
                bench.entries = {trial: entry for trial, entry in legal.items() if trial.schedule in here}
                yield from (event for event in bench.contest(m) if isinstance(event, Timed))


def run(arguments: argparse.Namespace) -> None:
    """Compile, measure and write."""
    require_gpu("plan and judge work")
    import torch

    from ladder.runtime.compile import target_of

    begin = time.perf_counter()
    target = arguments.target or target_of(torch.device("cuda"))
    found = contests(json.loads(Path(arguments.work).read_text()), target)
    compile_all(found, arguments.compile)
    timed: list[Timed] = []
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()} as {target}: {bandwidth / 1e12:.2f} TB/s copied", flush=True)
    for text, contest in found.items():
        timed += measured(contest, begin + arguments.seconds)
        print(f"{text}: {time.perf_counter() - begin:.0f} s", flush=True)
        report = {
            "environment": environment(),
            "target": target,
            "bandwidth": bandwidth,
            "final": rows_of((e.gemm, e.row) for e in timed if e.final),
            "quick": rows_of((e.gemm, e.row) for e in timed if not e.final),
        }
        write_record(arguments.output, report)


# ---- judging --------------------------------------------------------------------------
def times_of(report: dict[str, Any]) -> dict[tuple[str, int, int, int], dict[str, float]]:
    """Return microseconds by class (as JSON), N, K, M and schedule: of the last round that it reached."""
    found: dict[tuple[str, int, int, int], dict[str, float]] = {}
    for part in (*report["quick"], *report["final"]):
        fields = json.dumps(part["class"], sort_keys=True)
        for n, k, m, place, us in part["rows"]:
            found.setdefault((fields, n, k, m), {})[part["schedules"][place]] = us
    return found


def judge(work: dict[str, Any], report: dict[str, Any]) -> None:
    """Print the loss of every choice, and geometric means."""
    times, losses = times_of(report), dict[tuple[str, int], list[float]]()
    for row in work["rows"]:
        gemm = problem(parse_case(row["case"]), row["n"], row["k"])
        fields = json.dumps(class_of(gemm), sort_keys=True)
        here = times.get((fields, gemm.n, gemm.k, row["m"]), {})
        if row["tried"][0] not in here:
            continue
        choice, best = here[row["tried"][0]], min(here, key=here.__getitem__)
        floor = minimum_bytes(gemm, row["m"]) / report["bandwidth"] * 1e6
        if "invariant" in row:
            other = here.get(row["invariant"], math.nan)
            at = f"{gemm.n}x{gemm.k} M={row['m']}"
            print(f"{at}: sums of one order {other:.2f} us, {other / choice:.2f} of the usual {choice:.2f}")
            continue
        losses.setdefault((row["case"], row["m"]), []).append(choice / here[best])
        at = f"{row['case']:22} {gemm.n:5}x{gemm.k:<5} {row['m']:4}"
        print(f"{at} {choice:7.2f} us, {choice / here[best]:.3f} of the best, {choice / floor:.2f} floors")
        if choice > 1.02 * here[best]:
            print(f"    {short(row['tried'][0])}\n    {short(best)}")
    for (case, m), found in losses.items():
        print(f"{case:22} M={m:4}: {math.exp(sum(map(math.log, found)) / len(found)):.3f}, {max(found):.3f}")


def short(text: str) -> str:
    """Return the fields of a schedule that are not the usual ones."""
    schedule = parse_schedule(text)
    assert isinstance(schedule, GpuSchedule)
    usual = GpuSchedule(schedule.pipeline, schedule.tile_m)
    fields = {n: v for n, v in vars(schedule).items() if n == "tile_m" or v != getattr(usual, n)}
    return f"{schedule.pipeline} " + " ".join(f"{name}={value}" for name, value in fields.items())


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("do", choices=("plan", "run", "judge"))
    parser.add_argument("work")
    parser.add_argument("result", nargs="?")
    parser.add_argument("--target", default="", help="by default the GPU that is here")
    parser.add_argument("--compile", type=float, default=90, help="seconds for compiling")
    parser.add_argument("--seconds", type=float, default=130, help="no shape is begun after so many")
    parser.add_argument("--output", default="choices.json")
    arguments = parser.parse_args()
    if arguments.do == "plan":
        Path(arguments.work).write_text(json.dumps(planned(arguments.target), indent=0) + "\n")
    elif arguments.do == "run":
        run(arguments)
    else:
        judge(json.loads(Path(arguments.work).read_text()), json.loads(Path(arguments.result).read_text()))


if __name__ == "__main__":
    main()
