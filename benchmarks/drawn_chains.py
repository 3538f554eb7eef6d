"""Chains that nobody tuned, as programs call them, beside torch.compile in CUDA graphs of one run.

``python -m benchmarks.drawn_chains [WORD ...] [--jobs N] [--seconds S] --output F`` runs the programs of
`MODULES` whose names contain a word, each in a process of its own; one after the other they take the GPU for
their timings. What fits into half of an H200's L2 stays there; larger data rotate over four times the L2.
Errors are relative to float64, in Frobenius' norm.

A graph holds many calls, as long as `benchmarks.harness.capture_long` finds them by replays: a call that
compiles or records tells nothing of how long the next one takes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ladder
from benchmarks.chains import RESIDENT, ROUNDS, geometric_mean
from benchmarks.compiled import alone, of_type
from benchmarks.drawn_cases import CASES
from benchmarks.forked import Row, rows_of, write_row
from benchmarks.harness import (
    capture_long,
    copies_for,
    environment,
    interleaved_us,
    require_gpu,
    write_record,
)

MODULES = ("benchmarks.drawn_programs", "benchmarks.drawn_programs_again")

WARM = 6
"""Calls after which neither side compiles or records."""


def relative_error(found: Any, exact: Any) -> float:
    """Return the largest relative error of results; equal values and equal NaNs have none."""
    worst = 0.0
    pairs = zip(
        *(value if isinstance(value, tuple | list) else [value] for value in (found, exact)), strict=True
    )
    for result, right in pairs:
        left, wanted = result.double(), right.double()
        same = (left == wanted) | (left.isnan() & wanted.isnan())
        size = wanted.masked_fill(~wanted.isfinite(), 0).norm().clamp(min=1e-30)
        off = float((left - wanted).masked_fill(same, 0).norm() / size)
        worst = max(worst, off if math.isfinite(off) else math.inf)
    return worst


def measure(name: str, output: Path, lock: str) -> None:
    """Write the row of a chain, or how it failed."""
    warnings.simplefilter("ignore")
    for module in MODULES:
        importlib.import_module(module)
    function, specs = CASES[name]
    row: Row = {"name": name, "outcome": "failed"}
    try:
        generator = torch.Generator("cuda").manual_seed(7)
        first = [spec.draw(generator) for spec in specs]
        with torch.no_grad():
            eager = function(*first)
            exact = function(*of_type(torch.float64, first))
            results = eager if isinstance(eager, tuple | list) else [eager]
            nbytes = sum(tensor.nbytes for tensor in (*first, *results))
            count = 1 if nbytes <= RESIDENT else copies_for(nbytes)
            given = [first, *([spec.draw(generator) for spec in specs] for _ in range(count - 1))]
            ways: dict[str, Any] = {
                "ladder": ladder.compile(function),
                "torch": torch.compile(function, dynamic=False),
            }
            row |= {"mbytes": nbytes / 1e6, "copies": count}
            for way, compiled in ways.items():
                start = time.perf_counter()
                for _ in range(WARM):
                    found = compiled(*first)
                torch.cuda.synchronize()
                row |= {f"{way}_s": time.perf_counter() - start, f"{way}_error": relative_error(found, exact)}
            row["plan"] = [" ".join(line.split())[:90] for line in ways["ladder"].plan().splitlines()]
            with alone(lock):
                graphs = {
                    way: capture_long([_keeping(compiled, arguments) for arguments in given])
                    for way, compiled in ways.items()
                }
                times = {way: statistics.median(us) for way, us in interleaved_us(graphs, ROUNDS).items()}
            row |= {f"{way}_us": us for way, us in times.items()}
            row |= {"ratio": times["torch"] / times["ladder"], "outcome": "timed"}
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:400]
        row["at"] = traceback.format_exc().splitlines()[-6:]
    write_row(row, output)


def _keeping(function: Callable[..., Any], arguments: list[Any]) -> Callable[[], Any]:
    """Return a call whose results live until it is made again, so that results rotate too."""
    kept: list[Any] = [None]

    def call() -> Any:
        kept[0] = function(*arguments)
        return kept[0]

    return call


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--limit", type=float, default=120.0)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    require_gpu()
    for module in MODULES:
        importlib.import_module(module)
    names = [name for name in CASES if not arguments.words or any(word in name for word in arguments.words)]
    bounds = {key: getattr(arguments, key) for key in ("jobs", "limit", "seconds")}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        short = {f"{at}": name for at, name in enumerate(names)}
        work = functools.partial(_numbered, names=short, lock=f"{folder}/gpu.lock")
        for row in rows_of([*short], work, Path(folder), method="spawn", **bounds):
            rows.append({**row, "name": short.get(row["name"], row["name"])})
            print(rows[-1]["name"], row["outcome"], row.get("ratio", ""), row.get("error", ""), flush=True)
            write_record(arguments.output, {**environment(), "rows": rows})
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    print(len(ratios), "timed, mean", geometric_mean(ratios), "below 0.97:", sum(r < 0.97 for r in ratios))


def _numbered(number: str, output: Path, names: dict[str, str], lock: str) -> None:
    """Measure the chain of a number: its name is none of a file."""
    measure(names[number], output, lock)


if __name__ == "__main__":
    main()
