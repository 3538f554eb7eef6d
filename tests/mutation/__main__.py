"""Plant each fault in a copy of the tree, and see whether tests fail.

    python -m tests.mutation                                # all faults
    python -m tests.mutation --only 3 17 --output FILE      # some, and a record of them
    python -m tests.mutation --sound                        # the tests alone: all must pass without a fault

A fault is killed where a test fails, or runs beyond the limit; a run that could not collect its tests counts
as neither. Each run of tests has a cache of kernels of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import pytest

from tests.mutation.plant import ROOT, Fault, copy_tree, planted, read_faults

SHARED = ("numpy", "torch", "torch.fx", "tvm", "onnx", "z3", "hypothesis", "ml_dtypes")
"""What is imported once, before the children that run tests are forked."""

LIMIT = 900
"""Seconds of a run of tests."""

BROKEN = 70
"""Exit code of a child in which pytest did not run to its end."""

FIRST_STAMP = 1_000_000_000


@dataclass
class Outcome:
    """What became of a fault.

    Parameters
    ----------
    number, area, file, says
        The fault.
    outcome
        ``"killed"``, ``"survived"``, or ``"broken"`` where tests could not be collected.
    by
        The first test that failed.
    seconds
        Of all its runs.
    """

    number: int
    area: str
    file: str
    says: str
    outcome: str
    by: str
    seconds: float


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests in a copy of the tree up to the first failure; returns pytest's code and that failure."""
    with tempfile.TemporaryDirectory(prefix="ladder-mutation-cache-") as cache:
        said = Path(cache) / "output.txt"
        child = multiprocessing.get_context("fork").Process(target=_child, args=(tree, tests, cache, said))
        child.start()
        child.join(LIMIT)
        if child.exitcode is None:
            child.kill()
            child.join()
            return 1, f"more than {LIMIT} s"
        lines = said.read_text(encoding="utf-8", errors="replace").splitlines() or ["no output"]
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])
    return (child.exitcode, failed) if child.exitcode >= 0 else (1, f"signal {-child.exitcode}")


def _child(tree: Path, tests: Sequence[str], cache: str, said: Path) -> None:
    """Run pytest in a forked child that has what the tree imports from others, and nothing of the tree."""
    sys.path[:] = [str(tree), *filter(_is_of_others, sys.path)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    os.environ |= {"PYTHONPATH": str(tree), "LADDER_CACHE_DIR": cache, "LADDER_STRICT": "1"}
    os.chdir(tree)
    with said.open("w", encoding="utf-8") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    code = BROKEN
    try:
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=no", *tests]))
    finally:  # what raises here is no test that fails
        sys.stdout.flush()
        os._exit(code)


def _is_of_others(path: str) -> bool:
    """Tell whether a folder of modules is not the checkout's; its virtual environment may lie in it."""
    folders = (Path(path), *Path(path).parents)
    return ROOT not in folders or Path(sys.prefix) in folders


OUTCOMES = {0: "survived", 1: "killed"}


def tried(tree: Path, number: int, fault: Fault, *, narrow: bool) -> Outcome:
    """Plant a fault and run its tests, then, unless ``narrow``, those of its area."""
    start = time.monotonic()
    code, by = 0, ""
    with planted(fault, tree, FIRST_STAMP + number):
        for tests in (fault.tests, () if narrow else fault.wider):
            code, by = run_tests(tree, tests) if code == 0 and tests else (code, by)
    outcome = OUTCOMES.get(code, "broken")
    by = "" if outcome == "survived" else by.removeprefix("FAILED ")[:160]
    seconds = round(time.monotonic() - start, 1)
    return Outcome(number, fault.area, fault.file, fault.says, outcome, by, seconds)


def known(path: Path | None) -> dict[int, Outcome]:
    """Return the outcomes in a file of results, those of faults that are still the same."""
    if path is None or not path.exists():
        return {}
    rows = [Outcome(**row) for row in json.loads(path.read_text(encoding="utf-8"))["faults"]]
    numbers = {(fault.file, fault.says): number for number, fault in enumerate(read_faults())}
    same = (row for row in rows if (row.file, row.says) in numbers)
    return {number: replace(row, number=number) for row in same for number in (numbers[row.file, row.says],)}


def record(outcomes: Mapping[int, Outcome]) -> dict[str, object]:
    """Return what is written to a file of results."""
    counts = Counter(row.outcome for row in outcomes.values())
    command = ("git", "describe", "--always", "--dirty")
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    rows = [asdict(outcomes[number]) for number in sorted(outcomes)]
    return {"date": str(date.today()), "commit": commit, "counts": counts, "faults": rows}


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="plant faults, run tests")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of faults")
    parser.add_argument("--area", help="faults of one list")
    parser.add_argument("--narrow", action="store_true", help="only the tests that faults name")
    parser.add_argument("--output", type=Path, help="JSON file of results; those in it are kept")
    parser.add_argument("--left", action="store_true", help="only faults that the file has not killed")
    parser.add_argument("--sound", action="store_true", help="run all their tests without a fault")
    options = parser.parse_args()
    chosen = [
        (number, fault)
        for number, fault in enumerate(read_faults())
        if options.only is None or number in options.only
        if options.area in (None, fault.area)
    ]
    for name in SHARED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="ladder-mutation-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        if options.sound:
            code, by = run_tests(tree, sorted({test for _, fault in chosen for test in fault.tests}))
            print(by)
            return code
        outcomes = known(options.output)
        for number, fault in chosen:
            if options.left and number in outcomes and outcomes[number].outcome == "killed":
                continue
            row = outcomes[number] = tried(tree, number, fault, narrow=options.narrow)
            told = f"{number:3} {row.outcome:8} {row.seconds:6.1f} s  {fault.file}: {fault.says}  {row.by}"
            print(told, flush=True)
            if options.output is not None:
                text = json.dumps(record(outcomes), indent=1, ensure_ascii=False)
                options.output.write_text(text + "\n", encoding="utf-8")
    print(dict(Counter(row.outcome for row in outcomes.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
