"""Programs in KernelBench's form through ``ladder.compile``, beside eager torch and ``torch.compile``.

    python -m benchmarks.kernelbench FOLDER
    python -m benchmarks.kernelbench FOLDER --device cuda --torch --processes 15
    python -m benchmarks.kernelbench FOLDER --level 1 --only cumsum --processes 4 --limit 120 --output F

``FOLDER`` holds ``level1/*.py`` and so on (a checkout of KernelBench has it in its folder of that name). Each
program is called three times with other values and compared with eager: by the error against float64 where
roundings of eager's own size do not explain the difference. Reported are graphs, seconds of compiling, what
the plan's steps run on, and the least time of a call of each, by turns. Sizes are halved until a call fits
`BUDGETS`, as far as a program allows. ``--seconds`` ends it: what is not finished is named.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import gc
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ladder
from benchmarks.harness import command, write_record
from benchmarks.kernelbench_programs import Program, smaller
from benchmarks.zoo_compare import difference
from benchmarks.zoo_speed import INSTEAD, SETTLING, least_ms
from ladder.installation import ladder_version

SEEDS = 3
"""Calls with values of their own."""

ROUNDS = 30
"""Calls of each that are timed, unless they take `TIMED_S` together."""

TIMED_S = 0.5

ROUNDINGS = 16
"""By which a result may differ from eager's, of its greatest magnitude, without a look at float64."""

BUDGETS = {"cpu": (4e6, 1e9), "cuda": (2.5e8, 4e11)}
"""Device -> elements of arguments, weights and results, and operations, that a call may have."""


# ---- one program ----------------------------------------------------------------------
def nearer(found: Any, eager: Any, exact: Any) -> bool:
    """Say whether a result is as near to the exact one as eager's, up to a few roundings."""
    widened = torch.utils._pytree.tree_map(_double, (found, eager))
    mine, its = (difference(exact, each) for each in widened)
    return mine <= 2 * its + ROUNDINGS * torch.finfo(torch.float32).eps


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def compared(program: Program, model: Any, fast: Any, device: str) -> dict[str, Any]:
    """Make all calls beside eager; return the worst difference, and whether roundings explain it."""
    worst, right = 0.0, True
    for seed in range(SEEDS):
        expected, found = (_called(engine, program.inputs(device, seed)) for engine in (model, fast))
        off = difference(expected, found)
        worst = max(worst, off)
        if off > ROUNDINGS * torch.finfo(torch.float32).eps:
            widened = torch.utils._pytree.tree_map(_double, program.inputs(device, seed))
            exact = _called(copy.deepcopy(model).double(), widened)
            right = right and nearer(found, expected, exact)
    return {"right": right, "worst": worst}


def _called(engine: Any, inputs: list[Any]) -> Any:
    torch.manual_seed(0)
    return engine(*inputs)


def plan_of(fast: Any) -> dict[str, Any]:
    """Return how many steps each kind has in a program's plans, and what torch computes and why."""
    steps = [row for built in fast.models for row in built.plan.table()]
    kinds = Counter(kind for kind, *_ in steps)
    torchs = sorted({f"{who}: {why}"[:160] for kind, who, _, why in steps if kind in INSTEAD})
    return {"graphs": len(fast.models), "kinds": dict(kinds), "by_torch": torchs, "refused": fast.refused}


def timed(calls: Sequence[Any], *, on_gpu: bool) -> list[float]:
    """Return the least milliseconds of each call, by turns, once all have settled."""
    (once,) = least_ms([lambda: [call() for call in calls]], 2, on_gpu=on_gpu)
    for _ in range(min(SETTLING, int(1e3 * TIMED_S / once))):
        for call in calls:
            call()
    return least_ms(calls, max(3, min(ROUNDS, int(1e3 * TIMED_S / once))), on_gpu=on_gpu)


def measured(program: Program, device: str, *, by_torch: bool, lock: Path) -> dict[str, Any]:
    """Return what becomes of a program; `lock` is held by the one process that times."""
    model = program.model(device)
    fast = ladder.compile(copy.deepcopy(model))
    given = program.inputs(device)
    with torch.no_grad():
        row: dict[str, Any] = {"compile_s": _seconds(fast, program.inputs(device))}
        row |= compared(program, model, fast, device) | plan_of(fast) | {"outcome": fast.outcome}
        engines: dict[str, Any] = {"eager_ms": model, "ladder_ms": fast}
        if by_torch:
            engines["torch_ms"] = torch.compile(model)
            row["torch_compile_s"] = _seconds(engines["torch_ms"], given)
        with _locked(lock):
            calls = [partial(engine, *given) for engine in engines.values()]
            row |= dict(zip(engines, timed(calls, on_gpu=device == "cuda"), strict=True))
    row["splits"] = sorted({f"{record.split}: {record.where[-1]}" for record in fast.records if record.split})
    return row


def _seconds(engine: Any, inputs: list[Any]) -> float:
    """Return the processor seconds of a call in this process and those that it starts."""
    begun = sum(os.times()[:4])
    engine(*inputs)
    return sum(os.times()[:4]) - begun


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def child(arguments: argparse.Namespace) -> None:
    """Measure the programs whose paths come in, a line each; print a row of JSON for each."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    for line in sys.stdin:
        program = smaller(Program(Path(line.strip())), *BUDGETS[arguments.device])
        row: dict[str, Any] = {"name": program.name, "sizes": dict(program.sizes)}
        try:
            row |= measured(program, arguments.device, by_torch=arguments.torch, lock=arguments.lock)
        except Exception as error:
            text = str(error).strip().partition("\n")[0][:300]
            row |= {"outcome": "failed", "right": False, "error": f"{type(error).__name__}: {text}"}
            traceback.print_exc(limit=-6)
        _cleared(arguments.device)
        print(json.dumps(row), flush=True)


def _cleared(device: str) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


# ---- many programs --------------------------------------------------------------------
class Worker:
    """A process that measures programs one after the other; it is started anew where one ends it.

    Parameters
    ----------
    options
        Of the command.
    limit
        Seconds of a program.
    deadline
        Of all, by `time.monotonic`.
    """

    def __init__(self, options: list[str], limit: float, deadline: float) -> None:
        self.options, self.limit, self.deadline = options, limit, deadline
        self.process: subprocess.Popen[str] | None = None

    def row(self, path: Path) -> dict[str, Any]:
        """Return the row of a program; it says so where its process ended or took too long."""
        name = f"{path.parent.name}/{path.stem}"
        if time.monotonic() > self.deadline:
            return {"name": name, "outcome": "not begun"}
        if self.process is None or self.process.poll() is not None:
            self.process = self._started()
        row = self._asked(str(path), min(self.limit, self.deadline - time.monotonic()))
        if row:
            return row
        self.process.kill()
        code = self.process.wait()
        return {
            "name": name,
            "outcome": "failed",
            "right": False,
            "error": f"ended ({code}) or took too long",
        }

    def _started(self) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "benchmarks.kernelbench", "--child", *self.options]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(words, **pipes)

    def _asked(self, line: str, seconds: float) -> dict[str, Any]:
        """Write a line to the process; return what it answers within a time, or nothing."""
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(max(seconds, 0.1), process.kill)
        timer.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            for said in process.stdout:
                if said.startswith("{"):
                    found: dict[str, Any] = json.loads(said)
                    return found
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        return {}

    def end(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def rows_of(paths: Sequence[Path], options: list[str], arguments: argparse.Namespace) -> Iterator[Any]:
    """Yield the row of each program, as they end."""
    deadline = time.monotonic() + arguments.seconds
    waiting, found = queue.SimpleQueue[Path](), queue.SimpleQueue[Any]()
    for path in paths:
        waiting.put(path)

    def work() -> None:
        worker = Worker(options, arguments.limit, deadline)
        with contextlib.suppress(queue.Empty):
            while True:
                found.put(worker.row(waiting.get_nowait()))
        worker.end()

    for _ in range(arguments.processes):
        threading.Thread(target=work, daemon=True).start()
    for _ in paths:
        yield found.get()


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return how many are right and whole, and the ratios of times."""
    ran = [row for row in rows if "right" in row]
    whole = sum(row["outcome"] == "whole" for row in ran)
    right = sum(row["right"] for row in ran)
    lines = [f"{len(ran)} of {len(rows)} programs ran: {right} right, {whole} in one graph"]
    for rival in ("eager_ms", "torch_ms"):
        ratios = sorted(row["ladder_ms"] / row[rival] for row in ran if rival in row)
        if ratios:
            slower = sum(ratio > 1.05 for ratio in ratios)
            ends = f"{ratios[0]:.2f} to {ratios[-1]:.2f}, {slower} over 1.05"
            lines.append(f"time beside {rival[:-3]}: median {statistics.median(ratios):.2f}, {ends}")
    return "\n".join(lines)


def line_of(row: dict[str, Any]) -> str:
    """Return what is said of a program while others run."""
    ratios = [f"x{row['ladder_ms'] / row[k]:.2f}" for k in ("eager_ms", "torch_ms") if k in row]
    right = {True: "right", False: "WRONG"}.get(row.get("right", ...), "")
    told = [f"{row['name']:60}", row["outcome"], right, *ratios]
    told += [f"{row['compile_s']:.1f} s", str(row["kinds"])] if "kinds" in row else []
    return " ".join([*told, *row.get("by_torch", [])[:2], *row.get("splits", [])[:2], row.get("error", "")])


def chosen(folder: Path, levels: Sequence[str], parts: Sequence[str]) -> list[Path]:
    """Return the programs of levels whose names hold one of the parts."""
    found = [path for level in levels for path in sorted((folder / f"level{level}").glob("*.py"))]
    return [path for path in found if any(part in f"{path.parent.name}/{path.stem}" for part in parts)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--level", nargs="+", default=["1", "2", "3", "4"])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--torch", action="store_true", help="torch.compile too")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a program")
    parser.add_argument("--seconds", type=float, default=1e5, help="of all")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    paths = chosen(arguments.folder, arguments.level, arguments.only)
    rows = []
    with tempfile.NamedTemporaryFile() as lock:
        options = [str(arguments.folder), "--device", arguments.device, "--lock", lock.name]
        options += ["--torch"] * arguments.torch
        for row in rows_of(paths, options, arguments):
            rows.append(row)
            print(line_of(row), flush=True)
            if arguments.output:
                report = {
                    "versions": {"ladder": ladder_version(), "torch": torch.__version__},
                    "command": command(),
                }
                write_record(arguments.output, {**report, "rows": rows})
    print(summary(rows))


if __name__ == "__main__":
    main()
