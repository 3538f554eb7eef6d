"""Many models of the zoo at once, a process of one thread each, with kernels that were built before.

``python -m benchmarks.zoo_many [NAME ...] [--jobs N] [--limit S] [--seconds S] [--table MODULE] [--steps N]
[--both] [--generate] --output F``

Each model runs twice by `benchmarks.zoo`, in processes forked from one that has imported the libraries: once
to build its kernels, into a cache that the second process finds, whose times are reported: calls, records, a
settled call beside eager's, shares of the time of steps and of models that can, with ``--generate`` what
continuing prompts takes. With ``--steps`` the report also says what torch computes among so many dearest
steps of each; with ``--both`` the second process makes the calls by ``torch.compile`` too. Of a model that
takes more than ``--limit`` seconds, or is not finished after ``--seconds``, what is known is reported.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.forked import Row, rows_of, write_row
from benchmarks.harness import (
    command,
    write_record,
)
from benchmarks.zoo import ROUNDS, all_names, import_torchvision, is_right, made, run, tabled, versions_of
from benchmarks.zoo_speed import summary
from ladder.runtime.cores import usable_cores

FIRST = ("transformers", "timm", "functorch.compile", "ladder.api.model")
"""What every process would import for itself."""


def twice(name: str, output: Path, table: str | None, options: dict[str, Any]) -> None:
    """Write the row of a model whose kernels a process builds that is forked before.

    options: Of `benchmarks.zoo.run`.
    """
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    building = {**options, "rounds": 0, "both": False, "steps": 0}
    before = multiprocessing.get_context("fork").Process(target=once, args=(name, output, table, building))
    before.start()
    before.join()
    once(name, output, table, options)


def once(name: str, output: Path, table: str | None, options: dict[str, Any]) -> None:
    """Write the row of a model, or how it failed."""
    make = (lambda name: tabled(table)[name]()[:2]) if table else made
    row: Row = {"name": name, "outcome": "failed", "right": False}
    try:
        row = {**run(name, graphs_only=False, make=make, **options), "timed": options["rounds"] > 0}
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:500]
        row["at"] = traceback.format_exc().splitlines()[-12:]
    write_row(row, output)


def torch_steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what torch computes among the dearest steps: its time in all models, and how many have it."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        own = [step for step in row.get("steps", []) if step["kind"] in ("library", "product", "torch")]
        for step in own:
            entry = found.setdefault(step["by"], {"by": step["by"], "us": 0.0, "models": set()})
            entry["us"] += step["us"]
            entry["models"].add(row["name"])
    ordered = sorted(found.values(), key=lambda entry: -len(entry["models"]))
    return [{**entry, "us": round(entry["us"]), "models": len(entry["models"])} for entry in ordered]


def main() -> None:
    """Run the command line."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument("--limit", type=float, default=3600.0)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--table")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--both", action="store_true")
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    names = arguments.names or (list(tabled(arguments.table)) if arguments.table else all_names())
    options = {"rounds": ROUNDS, **{key: getattr(arguments, key) for key in ("both", "generate", "steps")}}
    bounds = {key: getattr(arguments, key) for key in ("jobs", "limit", "seconds")}
    import_torchvision()
    for name in FIRST:
        importlib.import_module(name)
    torch.set_num_threads(1)
    bounds["seconds"] -= time.monotonic() - begun
    work = partial(twice, table=arguments.table, options=options)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows_of(names, work, Path(folder), **bounds):
            rows.append(row)
            print(row["name"], row["outcome"], is_right(row), row.get("ratio", ""), flush=True)
    lacking = {"torch_steps": torch_steps(rows)} if arguments.steps else {}
    rows = [{key: value for key, value in row.items() if key != "steps"} for row in rows]
    host = {"cores": os.cpu_count(), "jobs": arguments.jobs, "python": sys.version.split()[0]}
    report = {"versions": versions_of(rows), "host": host, "command": command(), **lacking, "rows": rows}
    write_record(arguments.output, report)
    print(summary([row for row in rows if row.get("timed")]))
    print("not timed:", *(row["name"] for row in rows if not row.get("timed")))


if __name__ == "__main__":
    main()
