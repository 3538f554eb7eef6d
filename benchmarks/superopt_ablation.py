"""What pruning and processes save in the search of one program, as in table 5 of Mirage (OSDI 2025).

``python -m benchmarks.superopt_ablation --output FILE.json`` searches a program for each number of operators
in a block graph: with pruning by abstract expressions on all processes, on one process, and without pruning,
which stops after ``--seconds``.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    command,
    write_record,
)
from ladder.installation import ladder_version
from ladder.runtime.cores import usable_cores
from ladder.superopt.generator import Limits, Program, get_program, search


def measure(program: Program, limits: Limits) -> dict[str, Any]:
    """Search with pruning, on one process, and without pruning."""
    pruned = search(program, limits)
    alone = search(program, replace(limits, workers=1))
    full = search(program, replace(limits, pruning=False, compare=False))
    return {
        "program": program.name,
        "operators": limits.operators,
        "found": len(pruned.found),
        "states": pruned.counts.states,
        "seconds": pruned.seconds,
        "seconds on one process": alone.seconds,
        "seconds without pruning": full.seconds,
        "states without pruning": full.counts.states,
        "finished without pruning": full.complete,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each number of operators and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--program", default="rmsnorm_matmul")
    parser.add_argument("--operators", type=int, nargs="*", default=[5, 6, 7, 8])
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument("--seconds", type=float, default=60.0, help="at most, for each search")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": platform.processor() or platform.machine(),
        "versions": {"ladder": ladder_version(), "python": platform.python_version()},
        "command": command(),
        "processes": options.jobs,
        "limit_s": options.seconds,
        "load": os.getloadavg()[0],
        "rows": [],
    }
    for operators in options.operators:
        limits = Limits(operators=operators, workers=options.jobs, seconds=options.seconds)
        report["rows"].append(measure(get_program(options.program), limits))
        print(report["rows"][-1], flush=True)
        write_record(options.output, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
