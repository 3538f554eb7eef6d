"""Times memory-bound chains that turn their input on this CPU, and rows of open length, beside torch.

``python -m benchmarks.cpu_chains --threads 1 [--rows]``: microseconds of each chain's kernel and of eager
torch, which take turns; the least and the median of all rounds. With ``--rows`` one kernel of softmax for all
sizes serves rows of 16 to 65,536 elements. Torch allocates its results, as it does in a model;
plans of Ladder have their memory before. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.chain_programs import PROGRAMS
from benchmarks.harness import (
    command,
    write_record,
)
from ladder.cli.first_kernels import whole_chain
from ladder.ir import GraphBuilder
from ladder.runtime.build import find_or_build, load_entry
from ladder.runtime.compile import target_of
from ladder.runtime.model.chains import chain_job
from targets import get_device

Function = Callable[..., Any]


LENGTHS = (16, 32, 64, 100, 256, 1000, 4096, 16384, 65536)
"""Elements of a row."""

ELEMENTS = 1 << 17
"""Of all rows."""


def channels_first(x: Any) -> Any:
    """Return NCHW of NHWC."""
    return torch.relu(x).permute(0, 3, 1, 2).contiguous()


CASES: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "NCHW to NHWC, bias, ReLU": (PROGRAMS["channels_last"].function, ((8, 64, 56, 56), (64,))),
    "the same, deeper": (PROGRAMS["channels_last"].function, ((8, 512, 14, 14), (512,))),
    "NHWC to NCHW, ReLU": (channels_first, ((8, 56, 56, 64),)),
    "sum with a transposed matrix": (PROGRAMS["add_transposed"].function, ((2048, 2048),) * 2),
    "gated linear unit, time last": (PROGRAMS["transposed_glu"].function, ((8, 400, 1024),)),
    "norm of transposed rows": (PROGRAMS["transposed_norm"].function, ((8, 96, 56, 56), (96,), (96,))),
}
"""Name -> function, shapes of its arguments."""


def measured(function: Function, arguments: list[Any], rounds: int) -> dict[str, Any]:
    """Return microseconds of the kernel and of torch (least, median), and the kernel's error."""
    graph = whole_chain(function, arguments)
    (kernel,) = find_or_build([chain_job(graph, get_device(target_of(torch.device("cpu"))))])
    (output,) = graph.outputs
    result = torch.empty(graph.tile(output).known_shape, dtype=arguments[0].dtype)
    return beside(load_entry(kernel, "cpu"), function, arguments, result, rounds)


def softmax_rows(dtype: torch.dtype, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield what one kernel for rows of any length takes."""
    graph, kind = GraphBuilder("softmax"), str(dtype).removeprefix("torch.")
    exact = graph.add("convert", graph.input("x", kind, ("M", "N")), type="float32")
    powers = graph.add("exp", graph.add("sub", exact, graph.add("reduce_max", exact, axis=1)))
    y = graph.add("div", powers, graph.add("reduce_sum", powers, axis=1))
    chain = graph.finish(graph.add("convert", y, type=kind))
    (built,) = find_or_build([chain_job(chain, get_device(target_of(torch.device("cpu"))))])
    entry = load_entry(built, "cpu")
    for length in LENGTHS:
        x = torch.randn(ELEMENTS // length, length).to(dtype)
        kernel, eager = partial(entry, *x.shape), partial(torch.softmax, dim=-1)
        yield {"rows": [*x.shape], **beside(kernel, eager, [x], torch.empty_like(x), rounds)}


def beside(
    entry: Function, function: Function, arguments: list[Any], result: torch.Tensor, rounds: int
) -> dict[str, Any]:
    """Return microseconds of a kernel and of torch, which take turns, and the kernel's error."""
    calls: dict[str, Callable[[], Any]] = {
        "ladder": lambda: entry(*arguments, result),
        "torch": lambda: function(*arguments),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e6)
    exact = function(*(x.double() for x in arguments))
    found = {name: [round(min(t), 1), round(statistics.median(t), 1)] for name, t in times.items()}
    return {**found, "error": float((result.double() - exact).norm() / exact.norm())}


def main() -> None:
    """Measure, print, and write a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    rows = []
    for dtype in (torch.float32, torch.bfloat16) if options.rows else ():
        for found in softmax_rows(dtype, options.rounds):
            rows.append({"chain": "softmax", "type": str(dtype).removeprefix("torch."), **found})
            print(json.dumps(rows[-1]), flush=True)
    for name, (function, shapes) in {}.items() if options.rows else CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            arguments = [torch.randn(shape).to(dtype) for shape in shapes]
            row = {"chain": name, "type": str(dtype).removeprefix("torch.")}
            rows.append({**row, **measured(function, arguments, options.rounds)})
            print(json.dumps(rows[-1]), flush=True)
    if options.output:
        facts = {
            "date": time.strftime("%Y-%m-%d"),
            "command": command(),
            "processor": get_device(target_of(torch.device("cpu"))).title,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "load": round(os.getloadavg()[0], 1),
            "unit": "us: least, median",
        }
        write_record(options.output, {**facts, "rows": rows})


if __name__ == "__main__":
    main()
