"""Fit the constants of the GPU cost model to measurements.

``python -m benchmarks.fit_cost_model everything.json …`` reads what `benchmarks.gpu_tune --everything`
wrote, changes one constant of the cost model at a time as long as that helps, and prints the
constants with what they are worth: how much slower than the fastest measured the model's first
choice is, and how far its times are off. Put the constants into the module by hand, and the date here.

Those of ``wgmma`` with 8-bit operands follow from runs on an H200 (2026-11-21: fp8, int8 and int4, 4096² to
28672x8192, M = 1 … 4096); those of ``wgmma`` that decodes to 16 bits from 4,213 later ones and 2,547 of both
cards; stream-K's of plain fp8 from 381 on an H100; those of ``gemv`` and ``digits`` from 2,282 on both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from ladder.ir.gemm import Gemm
from schedules.codes import is_timed_by_sixteens
from schedules.cost_constants import DECODED, TO_FP8, WGMMA
from schedules.cost_model import forget, predict
from schedules.cost_streams import BYTES, HALVES
from schedules.footprint import SLICED
from schedules.layouts import lane_of
from schedules.legal import is_legal
from schedules.schedule import GpuSchedule, parse_schedule
from schedules.tuning import Measurement
from targets import get_device

KINDS = ("gemv", "gemv of bytes", "wgmma", "decoded", "to fp8")
"""What is fitted apart: gemv by the width of x; wgmma of bytes, of weights decoded to 16 bits, and to fp8."""

TABLES: Mapping[str, MutableMapping[str, Any]] = {
    "gemv": HALVES,
    "gemv of bytes": BYTES,
    "wgmma": WGMMA,
    "decoded": DECODED,
    "to fp8": TO_FP8,
}
"""Where the constants of each are."""

CONSTANTS: Mapping[str, tuple[str, ...]] = {
    "gemv": tuple(HALVES),
    "gemv of bytes": tuple(BYTES),
    "wgmma": (
        "SLAB_CYCLES",
        "FILL_SECONDS",
        "PROMOTION_CYCLES",
        "PROMOTION_SLOTS",
        "OVERLAP",
        "MULTICAST_LOSS",
        "TIGHT_LOSS",
        "TENSOR_SHARE",
        "BLOCK_SECONDS",
        "OUTPUT_SECONDS",
        "CLUSTER_SECONDS",
        "EXCHANGE_SECONDS",
        "LAUNCH_SECONDS",
    ),
    "decoded": tuple(DECODED),
    "to fp8": tuple(TO_FP8),
}
"""Constants to fit, by whose runs decide them."""

STEPS = (0.5, 0.7, 0.85, 0.95, 1.05, 1.18, 1.4, 2.0)
NEAR = 0.03
"""Logarithm of predicted times within which runs share the first place."""

SPREAD = 0.25
"""Runs this much slower than the fastest count a third in the error of times."""

OUTPUTS = {"int8": "float32", "fp8_e4m3": "float16", "fp8_e5m2": "float16"}


@dataclass(frozen=True)
class Contest:
    """What was measured at one shape and M."""

    gemm: Gemm
    m: int
    runs: tuple[tuple[GpuSchedule, float], ...]

    @property
    def fastest(self) -> float:
        """Seconds of the fastest run."""
        return min(seconds for _, seconds in self.runs)


def read(paths: Iterable[str], target: str) -> list[Contest]:
    """Return the contests of some files; runs that are no longer legal are left out."""
    device = get_device(target)
    points: dict[tuple[Gemm, int], dict[GpuSchedule, float]] = {}
    for path in paths:
        for part in json.loads(Path(path).read_text())["classes"]:
            schedules = [parse_schedule(text) for text in part["schedules"]]
            for n, k, m, place, us in part["rows"]:
                gemm, schedule = problem(part["class"], n, k), schedules[place]
                if isinstance(schedule, GpuSchedule) and is_legal(gemm, device, schedule):
                    points.setdefault((gemm, m), {})[schedule] = us * 1e-6
    return [Contest(gemm, m, tuple(runs.items())) for (gemm, m), runs in points.items() if len(runs) > 1]


def thin(contests: Sequence[Contest], fastest: int, others: int) -> list[Contest]:
    """Keep of each contest the fastest runs and a random choice of others."""
    kept = []
    for contest in contests:
        ordered = sorted(contest.runs, key=lambda run: run[1])
        rest = ordered[fastest:]
        Random(contest.m).shuffle(rest)
        kept.append(replace(contest, runs=(*ordered[:fastest], *rest[:others])))
    return kept


def write(path: str, source: str, contests: Sequence[Contest]) -> None:
    """Write contests as `read` takes them; ``source`` says where they were measured."""
    from benchmarks.gpu_tune import dump

    rows = [
        (c.gemm, Measurement(c.gemm.n, c.gemm.k, c.m, schedule, seconds))
        for c in contests
        for schedule, seconds in c.runs
    ]
    dump(path, json.loads(Path(source).read_text()).get("environment", {}), rows)


def problem(fields: Mapping[str, object], n: int, k: int) -> Gemm:
    """Return a problem of a class."""
    activation = str(fields["activation"])
    output = OUTPUTS.get(activation, activation)
    changed = {**fields, "group_size": fields["group_size"] or k}
    return Gemm(n, k, output=output, **changed)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Quality:
    """How good the model is on some contests.

    Parameters
    ----------
    regrets
        Measured time of the first choice over the fastest, per contest.
    soft
        Mean log of measured time over the fastest, by how near to the first choice the model sees each
        run: unlike a regret, it changes with every constant.
    errors
        Absolute logarithm of predicted over measured time, of runs near the fastest.
    weights
        Of the errors.
    """

    regrets: tuple[float, ...]
    soft: tuple[float, ...]
    errors: tuple[float, ...]
    weights: tuple[float, ...]

    @property
    def loss(self) -> float:
        """Return what `fit` makes small: soft regret plus mean error."""
        error = sum(e * w for e, w in zip(self.errors, self.weights, strict=True)) / sum(self.weights)
        return 2 * sum(self.soft) / len(self.soft) + error

    def __str__(self) -> str:
        return (
            f"regret median {median(self.regrets):.3f} worst {max(self.regrets):.3f}"
            f" error median {median(self.errors):.3f} loss {self.loss:.4f}"
        )


def judge(contests: Sequence[Contest], target: str) -> Quality:
    """Compare the model with all contests."""
    forget()
    device, regrets, soft, errors, weights = get_device(target), [], [], [], []
    for contest in contests:
        predicted = [predict(contest.gemm, device, s, contest.m).seconds for s, _ in contest.runs]
        fastest = contest.fastest
        first = min(range(len(predicted)), key=predicted.__getitem__)
        regrets.append(contest.runs[first][1] / fastest)
        near = [exp(-log(guess / predicted[first]) / NEAR) for guess in predicted]
        lost = [log(seconds / fastest) for _, seconds in contest.runs]
        soft.append(sum(w * loss for w, loss in zip(near, lost, strict=True)) / sum(near))
        for guess, (_, seconds) in zip(predicted, contest.runs, strict=True):
            errors.append(abs(log(guess / seconds)))
            weights.append(exp(-(seconds / fastest - 1) / SPREAD) / len(predicted))
    return Quality(tuple(regrets), tuple(soft), tuple(errors), tuple(weights))


def of_kind(contests: Sequence[Contest], kind: str) -> list[Contest]:
    """Return the contests with only the runs of one of `KINDS`."""
    pipelines = SLICED if kind.startswith("gemv") else ("wgmma",)
    kept = (
        Contest(c.gemm, c.m, tuple(run for run in c.runs if run[0].pipeline in pipelines))
        for c in contests
        if kind in (_gemv_kind(c.gemm), _wgmma_kind(c.gemm))
    )
    return [contest for contest in kept if len(contest.runs) > 1]


def _gemv_kind(gemm: Gemm) -> str:
    """Return whose constants the model of gemv and digits of a problem has."""
    return "gemv of bytes" if lane_of(gemm.activation) == 8 else "gemv"


def _wgmma_kind(gemm: Gemm) -> str:
    """Return whose constants wgmma's model of a problem has."""
    if lane_of(gemm.activation) == 16:
        return "decoded"
    return "to fp8" if is_timed_by_sixteens(gemm) else "wgmma"


def fit(contests: Sequence[Contest], kind: str, target: str, rounds: int) -> Quality:
    """Change constants of the model, in place, until no step of one of them helps."""
    table, best = TABLES[kind], judge(contests, target)
    for _ in range(rounds):
        before = best.loss
        for name in CONSTANTS[kind]:
            value = table[name]
            for step in STEPS:
                table[name] = value * step
                found = judge(contests, target)
                if found.loss < best.loss - 1e-5:
                    best, value = found, value * step
            table[name] = value
        if before - best.loss < 5e-4:
            break
    return best


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--target", default="cuda/sm_90a")
    parser.add_argument("--sample", default="", help="only write a small part of the measurements here")
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    contests = read(arguments.files, arguments.target)
    if arguments.sample:
        write(arguments.sample, arguments.files[0], thin(contests, 6, 6))
        return 0
    print(f"{len(contests)} contests, {sum(len(c.runs) for c in contests)} runs")
    for kind in KINDS:
        some = of_kind(contests, kind)
        if not some:
            continue
        print(f"{kind} before: {judge(some, arguments.target)}")
        print(f"{kind} after:  {fit(some, kind, arguments.target, arguments.rounds)}")
        for name in CONSTANTS[kind]:
            print(f"  {name} = {TABLES[kind][name]:.4g}")
    print(f"all: {judge(contests, arguments.target)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
