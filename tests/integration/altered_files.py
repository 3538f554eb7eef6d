"""Altered files: exported operators and models, and ONNX models, changed at random; what loading them does.

``python tests/integration/altered_files.py --count 1000`` alters each kind so often, prints what came of it,
and fails where anything but one `LadderError` or a result came, took longer than 2 s or more than 1 GB, or
wrote outside of the cache. Each file is loaded and run in a worker process, so that a crash counts as one
fault.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from alterations import altered
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import ladder

SECONDS, BYTES = 2.0, 1 << 30
"""What one file may take: of processor time, so that other processes do not count, and of memory."""

PATIENCE = 180.0
"""Seconds after which a worker counts as hanging."""


@dataclass(frozen=True)
class Outcome:
    """What came of one file."""

    kind: str
    text: str
    seconds: float
    growth: int


# what is altered --------------------------------------------------------------------------------------


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.linspace(-2, 2, 3 * 64).reshape(3, 64),)


def exported(folder: Path) -> dict[str, Path]:
    """Return files of an operator and of two models."""
    torch.manual_seed(0)
    weight = ladder.quantize(torch.randn(48, 64), "int4", group_size=32)
    op = ladder.Matmul(48, 64, "int4", activation="float32", output="float32", group_size=32)
    layers = torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 16), torch.nn.Softmax(-1)
    model = torch.nn.Sequential(*layers).eval()
    quantized = ladder.quantize_(
        torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.SiLU()).eval(), "int4", group_size=32
    )
    with torch.no_grad():
        return {
            "operator": op.export(folder / "operator.ladder", op.pack(weight)),
            "model": ladder.compile(model).export(folder / "model.ladder", *inputs()),
            "quantized": ladder.compile(quantized).export(folder / "quantized.ladder", *inputs()),
        }


def onnx_files(folder: Path) -> dict[str, Path]:
    """Return ONNX models: a network with weights inside, and one with operators of many kinds."""
    generator = np.random.default_rng(0)

    def stored(name: str, array: Any) -> Any:
        return numpy_helper.from_array(np.asarray(array), name)

    float_, node, info = onnx.TensorProto.FLOAT, helper.make_node, helper.make_tensor_value_info
    net = helper.make_graph(
        [
            node("Gemm", ["x", "w", "b"], ["h"], transB=1),
            node("Relu", ["h"], ["r"]),
            node("MatMul", ["r", "v"], ["m"]),
            node("Softmax", ["m"], ["y"], axis=-1),
        ],
        "net",
        [info("x", float_, ["batch", 64])],
        [info("y", float_, ["batch", 8])],
        [
            stored("w", generator.standard_normal((32, 64)).astype(np.float32)),
            stored("b", np.zeros(32, np.float32)),
            stored("v", generator.standard_normal((32, 8)).astype(np.float32)),
        ],
    )
    moves = helper.make_graph(
        [
            node("Reshape", ["x", "shape"], ["r"]),
            node("Transpose", ["r"], ["t"], perm=[0, 2, 1]),
            node("Slice", ["t", "start", "end", "axis"], ["s"]),
            node("Concat", ["s", "s"], ["c"], axis=1),
            node("ReduceMean", ["c", "axis"], ["d"], keepdims=1),
            node("Sub", ["c", "d"], ["e"]),
            node("Clip", ["e", "low", "high"], ["f"]),
            node("Split", ["f", "parts"], ["g", "k"], axis=1),
            node("Unsqueeze", ["g", "axis"], ["u"]),
            node("Expand", ["u", "wide"], ["p"]),
            node("Gather", ["p", "index"], ["y"], axis=0),
        ],
        "moves",
        [info("x", float_, [3, 64])],
        [info("y", float_, [2, 4, 8, 8])],
        [
            *(stored(n, v) for n, v in {"shape": [3, 8, 8], "start": [0], "end": [8], "axis": [1]}.items()),
            *(stored(n, v) for n, v in {"parts": [8, 8], "wide": [3, 4, 8, 8], "index": [2, 0]}.items()),
            stored("low", np.float32(-1)),
            stored("high", np.float32(1)),
        ],
    )
    found = {}
    for graph in (net, moves):
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        onnx.checker.check_model(model, full_check=True)
        found[graph.name] = folder / f"{graph.name}.onnx"
        onnx.save(model, str(found[graph.name]))
    return found


# what comes of them -----------------------------------------------------------------------------------


def ran(path: Path, expected: torch.Tensor, folder: Path) -> Outcome:
    """Load a file and call what it holds."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        if path.suffix == ".onnx":
            found = ladder.compile(path)
            seconds = time.process_time() - start
            found = found(*inputs())
        else:
            found = ladder.load(path)
            seconds = time.process_time() - start
            found = found(*inputs())
        found = found[0] if isinstance(found, tuple | list) else found
        kind, text = "same" if alike(found, expected) else "other result", ""
        if kind == "other result" and path.suffix == ".onnx" and len(expected):
            kind, text = by_reference(path, found)
    except ladder.LadderError as error:
        seconds = time.process_time() - start
        kind, text = "error", f"{type(error).__name__}: {error}"
    except BaseException as error:
        seconds = time.process_time() - start
        kind, text = "FAULT", f"{type(error).__name__}: {str(error)[:200]}"
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return Outcome(kind, text, seconds, growth)


def alike(found: Any, expected: Any) -> bool:
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        return False
    return torch.allclose(found.float(), expected.float(), rtol=1e-4, atol=1e-5, equal_nan=True)


def by_reference(path: Path, found: Any) -> tuple[str, str]:
    """Compare with what the altered model computes by the standard's own implementation."""
    model = onnx.load(str(path))
    given = {model.graph.input[0].name: inputs()[0].numpy()}
    try:
        with np.errstate(all="ignore"):
            expected = ReferenceEvaluator(model).run(None, given)[0]
    except Exception as error:
        return "no reference", f"{type(error).__name__}: {error}"
    return ("right", "") if alike(found, torch.from_numpy(np.array(expected))) else ("FAULT", "wrong result")


def worker(pipe: Any, cache: str) -> None:
    """Answer (path, expected result) with what came of it, until the pipe closes."""
    import os

    os.environ["LADDER_CACHE_DIR"] = cache
    torch.set_num_threads(1)
    while True:
        try:
            path, expected = pipe.recv()
        except EOFError:
            return
        pipe.send(ran(path, expected, path.parent))


class Worker:
    """A process that loads files; replaced where it crashes or hangs."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=worker, args=(theirs, str(self.cache)), daemon=True)
        self.process.start()
        theirs.close()

    def run(self, path: Path, expected: torch.Tensor) -> Outcome:
        try:
            self.pipe.send((path, expected))
            if self.pipe.poll(PATIENCE):
                return self.pipe.recv()  # type: ignore[no-any-return]
            outcome = Outcome("FAULT", "hangs", PATIENCE, 0)
        except (EOFError, OSError):
            self.process.join(5)
            outcome = Outcome("FAULT", f"crash, exit status {self.process.exitcode}", 0.0, 0)
        self.stop()
        self.start()
        return outcome

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def survey(
    kind: str, count: int, seed: int, folder: Path, seconds: float = SECONDS
) -> tuple[Counter[Any], list[str]]:
    """Alter files of a kind, and return counts of (alteration, outcome) and the faults.

    Parameters
    ----------
    kind
        ``"ladder"`` or ``"onnx"``.
    count, seed
        How many, and which.
    folder
        Receives cache and files.
    seconds
        What one file may take.
    """
    good, bad, cache = folder / "good", folder / "bad", folder / "cache"
    for each in (good, bad, cache):
        each.mkdir(parents=True, exist_ok=True)
    files = exported(good) if kind == "ladder" else onnx_files(good)
    helper_process, draw = Worker(cache), random.Random(seed)
    nothing = torch.zeros(0)
    expected = {}
    for name, path in files.items():
        plain = ladder.compile(path) if kind == "onnx" else ladder.load(path)
        found = plain(*inputs())
        expected[name] = found[0] if isinstance(found, tuple | list) else found
        assert helper_process.run(path, nothing).kind == "other result"  # and warms the worker up
    counts: Counter[Any] = Counter()
    faults = []
    for number in range(count):
        name = draw.choice(list(files))
        how, data = altered(files[name], draw)
        path = bad / f"x{files[name].suffix}"
        path.write_bytes(data)
        outcome = helper_process.run(path, expected[name])
        slow, large = outcome.seconds > seconds, outcome.growth > BYTES
        counts[how, outcome.kind] += 1
        if outcome.kind in ("FAULT", "no reference") or slow or large or list(bad.iterdir()) != [path]:
            kept = folder / f"{kind}-{number}{path.suffix}"
            path.rename(kept)
            faults.append(
                f"{kept}: {how}: {outcome.seconds:.1f} s, {outcome.growth >> 20} MB: {outcome.text}"
            )
    helper_process.stop()
    outside = sorted(
        each.name for each in folder.iterdir() if each.is_dir() and each not in (good, bad, cache)
    )
    return counts, [*faults, *(f"written outside: {name}" for name in outside)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=("ladder", "onnx"), action="append")
    options = parser.parse_args()
    status = 0
    for kind in options.kind or ("ladder", "onnx"):
        folder = Path(tempfile.mkdtemp(prefix="altered-"))  # stays: it holds what made faults
        counts, faults = survey(kind, options.count, options.seed, folder)
        for (how, outcome), times in sorted(counts.items()):
            print(f"{kind:7} {how:9} {outcome:13} {times}")
        print(*faults, f"{kind}: {len(faults)} faults of {options.count}", sep="\n")
        status |= bool(faults)
    return status


if __name__ == "__main__":
    sys.exit(main())
