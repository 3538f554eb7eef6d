"""Modules of public projects through the compiler: the generated files of ParityBench, which you download.

``python -m benchmarks.paritybench FOLDER [--files PATTERN] [--sample N] [--jobs N] [--seconds S] [--limit S]
[--kernels] [--device NAME] --output F``

FOLDER holds ``test_*.py`` (``generated/`` of github.com/jansel/pytorch-jit-paritybench); each is executed in
a process of its own, so run it where you would run the projects. Every test case that eager torch runs twice
alike is compiled and called four times: other values, then twice the batch where eager takes it; results,
arguments, random numbers and the module afterwards are compared with eager's. Of what is no whole graph the
report says whether ``torch.compile(fullgraph=True)`` takes one. Without ``--kernels`` plans run in torch.
``--seconds`` ends the whole, ``--limit`` one case; files come in an order drawn from a fixed seed.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo

from benchmarks.harness import command, write_record
from benchmarks.opinfo import in_torch
from benchmarks.paritybench_case import (
    Case,
    Late,
    cases_of,
    limited,
    mock_missing,
    said,
    taken_by_torch,
    tried,
)
from ladder import knobs
from ladder.installation import ladder_version
from ladder.runtime.cores import usable_cores
from ladder.runtime.model import build

OUTCOMES = ("right", "refused", "split", "eager", "different", "raised", "crashed", "late")
"""Of cases that count. All but the last four are right; ``right`` ones are one graph that is compiled,
``refused`` ones one that runs in torch, ``eager`` ones are not captured."""

MEMORY = 8 << 30
"""Bytes of data of a process."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What all cases share: seconds for one, the device, and whether kernels are built."""

    limit: float
    device: str
    kernels: bool


def child(path: Path, begin: int, options: Options, pipe: Connection) -> None:
    """Send the number of each case of a file from `begin` on, then its row."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    builds = {} if options.kernels else {"build_kernels": in_torch}
    settings = knobs.override(strict=True, num_threads=1)
    quiet = io.StringIO()
    with redirect_stdout(quiet), redirect_stderr(quiet), settings, patch.dict(vars(build), builds):
        try:
            with limited(options.limit):
                cases = cases_of(path)
        except (Exception, SystemExit, Late) as error:
            pipe.send({"file": path.stem, "outcome": "not imported", "notes": [said(error)]})
            cases = []
        for number, (kind, arguments, inputs, _) in enumerate(cases[begin:], begin):
            pipe.send(number)
            case = Case(kind, arguments, inputs, options.device)
            row = row_of(case, options.limit)
            pipe.send({"file": path.stem, "case": number, "module": kind.__name__, **row})


def row_of(case: Case, limit: float) -> Row:
    """Try a case; return its outcome, reasons, seconds, and what torch says of one that is no whole graph."""
    begun = time.perf_counter()
    outcome, notes = tried(case, limit)
    row = {"outcome": outcome, "notes": notes[:4], "seconds": time.perf_counter() - begun}
    if outcome in ("split", "eager"):
        with suppress(Late), limited(limit):
            row["torch"] = taken_by_torch(case) or "whole"
    return row


class Child:
    """A process that tries the cases of a file from one on."""

    def __init__(self, path: Path, begin: int, options: Options) -> None:
        context = multiprocessing.get_context("fork")
        self.path, self.at, self.patience = path, -1, 3 * options.limit + 10
        self.pipe, other = context.Pipe(duplex=False)
        self.process = context.Process(target=child, args=(path, begin, options, other), daemon=True)
        self.process.start()
        other.close()
        self.heard = time.monotonic()

    def news(self) -> Iterator[Row | None]:
        """Yield rows that have come, and None if the process has ended."""
        self.heard = time.monotonic()
        try:
            while self.pipe.poll():
                said = self.pipe.recv()
                if isinstance(said, dict):
                    self.at = -1
                    yield said
                else:
                    self.at = said
        except (EOFError, OSError):
            self.process.join()
            if self.at >= 0:
                code = self.process.exitcode
                outcome = "late" if code == -signal.SIGKILL else "crashed"
                notes = [f"the process ended with {code}"]
                yield {"file": self.path.stem, "case": self.at, "outcome": outcome, "notes": notes}
            yield None

    def end_if_silent(self) -> None:
        """Kill the process where a case takes too long to be stopped from inside."""
        if time.monotonic() - self.heard > self.patience:
            self.process.kill()


def rows(paths: list[Path], options: Options, jobs: int, seconds: float) -> Iterator[Row]:
    """Yield the rows of all files, so many at once, until time is up."""
    waiting, running = [(path, 0) for path in reversed(paths)], list[Child]()
    deadline = time.monotonic() + seconds
    while (waiting or running) and time.monotonic() < deadline:
        while waiting and len(running) < jobs:
            running.append(Child(*waiting.pop(), options))
        ready = wait([each.pipe for each in running], timeout=1.0)
        for each in [each for each in running if each.pipe in ready]:
            for row in each.news():
                if row is not None:
                    yield row
                    continue
                running.remove(each)
                if each.at >= 0:
                    waiting.append((each.path, each.at + 1))
        for each in running:
            each.end_if_silent()
    for each in running:
        each.process.kill()
    for path in {path for path, _ in waiting} | {each.path for each in running}:
        yield {"file": path.stem, "outcome": "not finished"}


def report_of(found: list[Row]) -> dict[str, Any]:
    """Return counts of cases and projects, and the rows of cases that are not right in one graph."""
    counted = [row for row in found if row["outcome"] in OUTCOMES]
    projects: dict[str, set[str]] = {}
    for row in counted:
        projects.setdefault(row["file"], set()).add(row["outcome"])
    whole = [{*outcomes} <= {"right", "refused"} for outcomes in projects.values()]
    others = Counter(row["outcome"] for row in found) - Counter(row["outcome"] for row in counted)
    torchs = Counter(row["torch"] == "whole" for row in counted if "torch" in row)
    return {
        "cases": len(counted),
        "outcomes": dict(Counter(row["outcome"] for row in counted).most_common()),
        "no whole graph, torch has one": torchs[True],
        "projects": len(projects),
        "projects all right in one graph": sum(whole),
        "not counted": dict(others),
        "rows": [row for row in counted if row["outcome"] != "right"],
    }


def main() -> None:
    """Run the command line."""
    as_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_is)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", default="test_*.py")
    parser.add_argument("--sample", type=int, default=0, help="so many files; 0: all")
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    mock_missing()
    paths = sorted(arguments.folder.glob(arguments.files))
    random.Random(0).shuffle(paths)
    options = Options(arguments.limit, arguments.device, arguments.kernels)
    found = []
    for row in rows(paths[: arguments.sample or None], options, arguments.jobs, arguments.seconds):
        found.append(row)
        if row["outcome"] in OUTCOMES[1:]:
            print(json.dumps(row), flush=True)
    report = report_of(found)
    versions = {"ladder": ladder_version(), "torch": torch.__version__}
    print(json.dumps({name: value for name, value in report.items() if name != "rows"}, indent=1))
    if arguments.output:
        write_record(arguments.output, {"versions": versions, "command": command(), **report})


if __name__ == "__main__":
    main()
