"""Trained ONNX models written and read again: equal to the model that was compiled, or not, and in which way.

Of each model of a folder of unpacked packages (`benchmarks.onnx_models`): the file of `export`, loaded;
the ONNX file of `to_onnx`, compiled again, with the same tile graph; and the page of `ladder report`. Results
must be equal bit for bit. A model that is one plan only for the shapes of its inputs is written for these
(``equal, for these shapes``). One of several stages even then, a branch or a loop that values decide, has
neither file, by design: it counts as ``stages`` if that is the error.

    python -m benchmarks.onnx_kept models --no-kernels --output onnx_kept.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import ladder
from benchmarks.harness import command, write_record
from benchmarks.onnx_models import reference, started
from benchmarks.onnx_suite import without_kernels
from ladder.cli.model_page import page
from ladder.cli.model_report import run_report
from ladder.runtime.onnx_ops.values import array_of, value_of

WAYS = ("export", "to_onnx", "report")
STAGES = "no single plan"
"""What the error of a model of several stages says."""


def same(found: Any, wanted: Any) -> bool:
    """Return whether results are equal bit for bit, NaNs too."""
    pairs = [[array_of(x) for x in (a if isinstance(a, tuple) else (a,))] for a in (found, wanted)]
    if len(pairs[0]) != len(pairs[1]):
        return False
    return all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))
        for a, b in zip(*([np.ascontiguousarray(x) for x in p] for p in pairs), strict=True)
    )


def exported(fast: Any, values: dict[str, Any], wanted: Any, folder: Path) -> str:
    """Return what became of the file of `export`."""
    loaded = ladder.load(fast.export(folder / "m.ladder"))
    return "equal" if same(loaded(*values.values()), wanted) else "other results"


def written(fast: Any, values: dict[str, Any], wanted: Any, folder: Path) -> str:
    """Return what became of the file of `to_onnx`."""
    again = ladder.compile(fast.to_onnx(folder / "again.onnx"))
    if again.graph != fast.graph:
        return "another graph"
    return "equal" if same(again(*values.values()), wanted) else "other results"


def reported(path: Path) -> str:
    """Return what became of the page of `ladder report`."""
    text = page(run_report(str(path)))
    return "equal" if path.name in text else "names no model"


def attempt(act: Callable[[], str]) -> str:
    """Return what an action says, or its error."""
    try:
        return act()
    except ladder.LadderError as problem:
        said = " ".join(str(problem).split())
        return "stages" if STAGES in said else f"refused: {said}"[:300]
    except Exception as problem:
        return f"unclear: {type(problem).__name__}: {problem}"[:300]


def kept(path: Path, given: Mapping[str, np.ndarray], ways: Sequence[str]) -> dict[str, str]:
    """Return what became of one model in each way, for given inputs."""
    values, told = {name: value_of(array) for name, array in given.items()}, ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            fast = ladder.compile(path)
            if fast.staged.single is None:
                fast = ladder.compile(path, shapes={name: array.shape for name, array in given.items()})
                told = ", for these shapes"
            whole = fast.staged.single is not None
            wanted = fast.whole("cpu")(*values.values()) if whole else fast(**values)
        except Exception as problem:
            return {"no model": f"{type(problem).__name__}: {problem}"[:300]}
        acts: dict[str, Callable[[], str]] = {
            "export": lambda: exported(fast, values, wanted, folder),
            "to_onnx": lambda: written(fast, values, wanted, folder),
            "report": lambda: reported(path),
        }
        found = {way: attempt(acts[way]) for way in ways}
        return {
            way: said + told if said == "equal" and way != "report" else said for way, said in found.items()
        }


def row_of(path: Path, root: Path, ways: Sequence[str]) -> dict[str, str]:
    """Return what became of one model in each way, for inputs that onnxruntime takes."""
    row = {"model": str(path.relative_to(root))}
    try:
        given, _ = reference(started(str(path)))
    except Exception as problem:
        return {**row, "no reference": str(problem)[:200]}
    return row | kept(path, given, ways)


def rows(root: Path, chosen: Any) -> Iterator[dict[str, str]]:
    """Yield a row per model of a folder, and print it."""
    from ladder.runtime.model import build

    plain = mock.patch.object(build, "build_kernels", without_kernels)
    with nullcontext() if chosen.kernels else plain:
        for path in sorted(root.rglob("*.onnx"), key=lambda path: path.stat().st_size):
            row = row_of(path, root, chosen.ways)
            print(row, flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("root", type=Path, help="folder of unpacked packages")
    parser.add_argument("--no-kernels", dest="kernels", action="store_false", help="plans as torch runs them")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        found = list(rows(chosen.root, chosen))
    counts = {
        way: dict(Counter(row[way].split(":")[0] for row in found if way in row)) for way in chosen.ways
    }
    print(counts)
    if chosen.output:
        record = {"date": time.strftime("%Y-%m-%d"), "command": command(), "models": len(found), **counts}
        write_record(chosen.output, {**record, "rows": found})


if __name__ == "__main__":
    main()
