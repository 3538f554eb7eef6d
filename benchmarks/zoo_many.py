"""Many models of the zoo at once, a process of one thread each, with kernels that were built before.

``python -m benchmarks.zoo_many [NAME ...] [--jobs N] [--seconds S] [--table MODULE] [--steps N] [--both]
--output F``

Each model runs twice by ``benchmarks.zoo``: once to build its kernels, into a cache that the second process
finds, whose times are reported: calls, records, a settled call beside eager's, shares of the time of steps
and of models that can, ``generate``. With ``--steps`` the report also says what torch computes among so many
dearest steps of each; with ``--both`` the second process makes the calls by ``torch.compile`` too. After
``--seconds`` what is not finished is named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    command,
    write_record,
)
from benchmarks.zoo import all_names, tabled
from benchmarks.zoo_speed import summary
from ladder.runtime.cores import usable_cores

BUILDING = ("--rounds", "0")
"""What the process that builds kernels is told: it times nothing."""


def row_of(
    name: str, options: list[str], deadline: float, folder: Path, *, both: bool = False
) -> dict[str, Any]:
    """Return the row of a model in its second process; what it lacks if time ran out or a process failed.

    Parameters
    ----------
    options
        Of ``benchmarks.zoo``.
    deadline
        By `time.monotonic`.
    folder
        Where results are put.
    both
        Whether the second process makes the calls by ``torch.compile`` too.
    """
    output = folder / f"{name.replace('/', '_')}.json"
    asked = [sys.executable, "-m", "benchmarks.zoo", name, "--threads", "1", "--generate", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TVM_NUM_THREADS": "1"}
    for further in (BUILDING, ("--output", str(output), *["--both"] * both)):
        left = deadline - time.monotonic()
        try:
            ran = subprocess.run(
                [*asked, *further], env=environment, timeout=max(left, 0.1), capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return {"name": name, "outcome": "not finished", "right": False, "building": further is BUILDING}
        if ran.returncode:
            return {"name": name, "outcome": "failed", "right": False, "error": ran.stderr[-500:]}
    report = json.loads(output.read_text())
    return {**report["rows"][0], "versions": report["versions"]}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--table")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--both", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    names = arguments.names or (list(tabled(arguments.table)) if arguments.table else all_names())
    options = ["--steps", str(arguments.steps), *(["--table", arguments.table] if arguments.table else [])]
    deadline = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        tried = partial(row_of, options=options, deadline=deadline, folder=Path(folder), both=arguments.both)
        rows = []
        for row in pool.map(tried, names):
            rows.append(row)
            print(row["name"], row["outcome"], row["right"], row.get("ratio", ""), flush=True)
    versions: dict[str, str] = next((row["versions"] for row in rows if "versions" in row), {})
    lacking = {"torch_steps": torch_steps(rows)} if arguments.steps else {}
    rows = [{key: value for key, value in row.items() if key not in ("versions", "steps")} for row in rows]
    host = {"cores": os.cpu_count(), "jobs": arguments.jobs, "python": sys.version.split()[0]}
    report = {"versions": versions, "host": host, "command": command(), **lacking, "rows": rows}
    write_record(arguments.output, report)
    print(summary(rows))
    print("not finished or failed:", *(r["name"] for r in rows if r["outcome"] in ("not finished", "failed")))


if __name__ == "__main__":
    main()
