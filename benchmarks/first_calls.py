"""First calls of products: cold (an empty cache of kernels) and warm (a new process, same cache), two cores.

``python -m benchmarks.first_calls --output first.json``. Each measurement is a process of its own that may
use two cores; importing torch and Ladder, and packing the weight, do not count. Without a GPU it measures
what a call for ``--target`` does until the library of its kernel is on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

import torch

import ladder
from benchmarks.harness import command, environment, revision, write_record
from ladder.garbage import uncollected
from ladder.runtime.build import Kernel, find_or_build
from ladder.runtime.compile import ANY_M, Request, jobs_of, plan_for
from schedules.schedule import Plan

CASES = (
    ("int4", "float16", 128, 6144, 3072, 1),
    ("int4", "fp8_e4m3", 128, 4608, 3584, 1),
    ("int8", "int8", None, 3072, 5120, 300),
)
"""Weight, activation, group, N, K, M."""

CORES = 2

SETTLED = 3.0
"""Seconds after which the digest of freshly written sources is kept."""


def spent(who: int) -> float:
    """Return the CPU seconds of this process, or of its children."""
    used = getrusage(who)
    return used.ru_utime + used.ru_stime


def prepared(case: Sequence[Any], target: str) -> Callable[[], Any]:
    """Return the call that is measured."""
    weight, activation, group, n, k, m = case
    here = torch.cuda.is_available()
    op = ladder.Matmul(
        N=n, K=k, weight=weight, activation=activation, group_size=group, target=None if here else target
    )
    if here:
        packed = op.pack(ladder.quantize(torch.randn(n, k, device="cuda"), weight, group_size=group))
        x = torch.randn(m, k, dtype=torch.float16, device="cuda")
        torch.cuda.synchronize()
        return partial(finished, op, x, packed)
    return partial(build, op.request, m)


def finished(op: Any, x: torch.Tensor, packed: Any) -> torch.Tensor:
    """Return the result once the GPU has computed it."""
    y: torch.Tensor = op(x, packed)
    torch.cuda.synchronize()
    return y


def build(request: Request, m: int) -> list[Kernel]:
    """Return the kernel that serves ``m`` rows of x, compiled, as a call finds it."""
    with uncollected():
        schedule = plan_for(request).schedule_for(m)
        return find_or_build(jobs_of(replace(request, plan=Plan(((ANY_M, schedule),))))[1])


def measure(case: Sequence[Any], target: str) -> dict[str, Any]:
    """Call once, in this process."""
    call = prepared(case, target)
    before, children, start = spent(RUSAGE_SELF), spent(RUSAGE_CHILDREN), time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    found = {"cpu_s": spent(RUSAGE_SELF) - before, "compiler_cpu_s": spent(RUSAGE_CHILDREN) - children}
    return {"first_s": round(seconds, 3), **{name: round(value, 3) for name, value in found.items()}}


def in_process(case: Sequence[Any], target: str, cache: str) -> dict[str, Any]:
    """Call in a new process with a folder for kernels."""
    command_line = [sys.executable, "-m", "benchmarks.first_calls", "--child", json.dumps(case), "--target"]
    cores = set(sorted(os.sched_getaffinity(0))[:CORES])
    done = subprocess.run(
        [*command_line, target],
        env={**os.environ, "LADDER_CACHE_DIR": cache, "LADDER_AHEAD": "0"},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each case cold, then warm; the least of some rounds counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="cuda/sm_90a", help="of kernels, where there is no GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(measure(options.child, options.target)))
        return 0
    time.sleep(SETTLED)
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for at, case in enumerate(CASES):
            with tempfile.TemporaryDirectory() as cache:
                for how in ("cold", "warm"):
                    rows.setdefault((how, at), []).append(in_process(case, options.target, cache))
    found = [
        {"how": how, "case": CASES[at], **{name: min(row[name] for row in taken) for name in taken[0]}}
        for (how, at), taken in rows.items()
    ]
    for row in found:
        print(row["how"], *row["case"], *(f"{name} {row[name]}" for name in list(row)[2:]), flush=True)
    if options.output:
        head = environment() if torch.cuda.is_available() else {"commit": revision()}
        write_record(options.output, {**head, "command": command(), "rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
