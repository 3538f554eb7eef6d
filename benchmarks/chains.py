"""Memory-bound chains on a GPU against torch.compile, in CUDA graphs, in one run.

``python -m benchmarks.chains --output FILE.json`` builds every chain of `benchmarks.chain_programs`, checks
it and torch against float64, and times them in turns. Chains of at most `RESIDENT` bytes run on data that
stays in L2, as what a product has just written does; larger ones rotate over four times the L2, results
too. ``floor`` is the time that the bytes alone take at the copy bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.chain_programs import PROGRAMS
from benchmarks.harness import (
    capture_long,
    copies_for,
    copy_bandwidth,
    environment,
    interleaved_us,
    require_gpu,
    write_record,
)
from ladder.cli.first_kernels import whole_chain
from ladder.ir.graph import Graph
from ladder.movement.mapping import Mapping as Placement
from ladder.runtime.cores import usable_cores
from tile_types.errors import LadderError

TARGET = "cuda/sm_90a"

RESIDENT = 2.5e7
"""Bytes of a chain's arguments and results that stay in L2 between calls, half of an H200's."""

LARGEST_ERROR = 1e-3
"""Relative Frobenius error against float64; results are float16."""

ROUNDS = 11

Point = tuple[str, str]


def points(wanted: Sequence[str] = ()) -> list[Point]:
    """Return (program, size) of all chains, largest first, or of those whose names contain a word."""
    sizes = {name: [size for size in program.shapes if size != "small"] for name, program in PROGRAMS.items()}
    most = max(map(len, sizes.values()))
    found = [(name, of[-at]) for at in range(1, most + 1) for name, of in sizes.items() if at <= len(of)]
    return [point for point in found if not wanted or any(word in " ".join(point) for word in wanted)]


@cache
def chain(point: Point) -> Graph:
    """Return the chain as a tile graph; nothing is computed."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    program = PROGRAMS[point[0]]
    with FakeTensorMode():
        arguments = [torch.empty(shape, dtype=torch.float16) for shape in program.shapes[point[1]]]
        return whole_chain(program.function, arguments)


def draw(point: Point) -> list[Any]:
    """Return fresh random arguments of a chain, on the GPU."""
    import torch

    program = PROGRAMS[point[0]]
    return [
        torch.randn(shape, device="cuda", dtype=torch.float16) * program.scale
        for shape in program.shapes[point[1]]
    ]


# ---- building --------------------------------------------------------------------------------------------
def candidates(point: Point, everything: bool) -> list[Placement | None]:
    """Return the mappings to build: None for the model's choice, else all."""
    from ladder.movement.choose import ranked

    return [None, *([moves.mapping for moves in ranked(chain(point))] if everything else [])]


def build(point: Point, mapping: Placement | None) -> str:
    """Build a kernel into the cache; returns what went wrong, if anything."""
    from ladder.runtime.build import find_or_build
    from ladder.runtime.model.chains import chain_job
    from targets import get_device

    try:
        find_or_build([chain_job(chain(point), get_device(TARGET), mapping)])
    except LadderError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def build_theirs(point: Point, modes: Sequence[str]) -> str:
    """Let torch compile a chain, every kernel that it would choose from, into its cache."""
    import torch

    try:
        arguments = draw(point)
        with as_torch_compiles():
            for mode in modes:
                torch._dynamo.reset()
                torch.compile(PROGRAMS[point[0]].function, dynamic=False, mode=mode)(*arguments)
        torch.cuda.synchronize()
    except Exception as error:  # reported where the chain is measured
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def as_torch_compiles() -> Iterator[None]:
    """Let torch compile in this process, and time its kernels wherever it chooses between them."""
    import torch._inductor.config

    with torch._inductor.config.patch(autotune_local_cache=False, compile_threads=1):
        yield


def build_all(
    jobs: Sequence[tuple[Point, Placement | None]], workers: int, modes: Sequence[str] = ()
) -> set[tuple[Point, Placement | None]]:
    """Build side by side, ours and torch's; returns what was built of ours."""
    wanted = list(dict.fromkeys(point for point, _ in jobs))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        theirs = [pool.submit(build_theirs, point, modes) for point in wanted if modes]
        outcomes = list(pool.map(build, *zip(*jobs, strict=True)))
    for point, compiled in zip(wanted, theirs, strict=False):
        if compiled.result():
            print(f"{' '.join(point)} torch: {compiled.result()}", flush=True)
    for (point, mapping), failure in zip(jobs, outcomes, strict=True):
        if failure and mapping is None:
            print(f"{' '.join(point)} {mapping}: {failure}", flush=True)
    return {job for job, failure in zip(jobs, outcomes, strict=True) if not failure}


# ---- measuring ---------------------------------------------------------------------------------------------
class Measured:
    """One chain: inputs, engines, times."""

    def __init__(self, point: Point) -> None:
        import torch

        self.point, self.program = point, PROGRAMS[point[0]]
        torch.manual_seed(0)
        first = draw(point)
        exact = self.program.function(*(x.double() for x in first))
        self.exact = exact if isinstance(exact, tuple) else (exact,)
        self.nbytes = sum(x.nbytes for x in first) + sum(2 * x.numel() for x in self.exact)
        self.resident = self.nbytes <= RESIDENT
        copies = 1 if self.resident else copies_for(self.nbytes)
        self.copies = [first, *(draw(point) for _ in range(copies - 1))]
        self.errors: dict[str, float] = {}
        self.graphs: dict[str, Any] = {}

    def error(self, results: Sequence[Any]) -> float:
        """Return the largest relative Frobenius error of the results."""
        found = [
            float((result.double() - exact).norm() / exact.norm())
            for result, exact in zip(results, self.exact, strict=True)
        ]
        return max(found) if all(map(math.isfinite, found)) else math.inf

    def engine(self, label: str, calls: Sequence[Callable[[], Any]]) -> None:
        """Check a way to run the chain, and capture it if it is right."""
        found = calls[0]()
        self.errors[label] = self.error(found if isinstance(found, tuple) else (found,))
        if self.errors[label] <= LARGEST_ERROR:
            self.graphs[label] = capture_long(calls)

    def torch_engine(self, mode: str) -> None:
        """Add torch.compile; its results stay alive, so that they rotate as ours do."""
        import torch

        torch._dynamo.reset()
        function = torch.compile(self.program.function, dynamic=False, mode=mode)
        kept: list[Any] = [None] * len(self.copies)

        def call(at: int) -> Any:
            kept[at] = function(*self.copies[at])
            return kept[at]

        with as_torch_compiles():
            self.engine(f"torch {mode}", [partial(call, at) for at in range(len(self.copies))])

    def ours(self, mapping: Placement | None) -> None:
        """Add our kernel."""
        import torch

        from ladder.runtime.build import find_or_build, load_entry
        from ladder.runtime.model.chains import chain_job
        from targets import get_device

        graph = chain(self.point)
        (kernel,) = find_or_build([chain_job(graph, get_device(TARGET), mapping)])
        entry = load_entry(kernel, "cuda")
        shapes = [graph.tile(value).known_shape for value in graph.outputs]

        def call(arguments: Sequence[Any], results: tuple[Any, ...]) -> tuple[Any, ...]:
            entry(*arguments, *results)
            return results

        calls = []
        for arguments in self.copies:
            results = tuple(
                torch.full(shape, math.nan, dtype=torch.float16, device="cuda") for shape in shapes
            )
            calls.append(partial(call, arguments, results))
        self.engine("ladder" if mapping is None else f"ladder {mapping}", calls)

    def row(self, bandwidth: float) -> dict[str, Any]:
        """Time all engines in turns and return what the report shows."""
        times = {label: statistics.median(x) for label, x in interleaved_us(self.graphs, ROUNDS).items()}
        theirs = {label: us for label, us in times.items() if label.startswith("torch")}
        rival = min(theirs, key=theirs.__getitem__) if theirs else ""
        best = min((label for label in times if label not in theirs), key=times.__getitem__, default="")
        chosen = times.get("ladder", 0.0)
        return {
            "chain": self.point[0], "size": self.point[1], "memory": "L2" if self.resident else "HBM",
            "mbytes": round(self.nbytes / 1e6, 2), "floor": round(self.nbytes / bandwidth * 1e6, 2),
            "ratio": round(times[rival] / chosen, 3) if chosen and rival else 0.0, "rival": rival,
            "best": best, "us": {label: round(us, 3) for label, us in times.items()},
            "errors": {label: float(f"{error:.2g}") for label, error in self.errors.items()},
        }  # fmt: skip


def measure(
    built: set[tuple[Point, Placement | None]], wanted: Sequence[Point], modes: Sequence[str], limit: float
) -> Iterator[dict[str, Any]]:
    """Yield a row per chain, until the time is over."""
    began, bandwidth = time.perf_counter(), copy_bandwidth()
    for point in wanted:
        if time.perf_counter() - began > limit:
            print(f"out of time: {' '.join(point)}", flush=True)
            continue
        measured = Measured(point)
        for mapping in (mapping for at, mapping in built if at == point):
            measured.ours(mapping)
        for mode in modes:
            measured.torch_engine(mode)
        yield measured.row(bandwidth)


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers, 0 if there is none."""
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios and min(ratios) > 0 else 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, measure, and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--chains", default="", help="parts of names, separated by commas")
    parser.add_argument("--everything", action="store_true", help="build and time all mappings of the model")
    parser.add_argument("--modes", default="default,max-autotune-no-cudagraphs")
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of measuring")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--prepared", action="store_true", help="everything was built before")
    parser.add_argument("--smallest-first", action="store_true", help="where time may end")
    options = parser.parse_args(arguments)
    if not options.build_only:
        require_gpu("--build-only builds the kernels")
    wanted = points([part for part in options.chains.split(",") if part])
    wanted = wanted[::-1] if options.smallest_first else wanted
    began = time.perf_counter()
    jobs = [(point, mapping) for point in wanted for mapping in candidates(point, options.everything)]
    modes = [mode for mode in options.modes.split(",") if mode]
    built = set(jobs) if options.prepared else build_all(jobs, options.jobs, modes)
    print(f"built {len(built)} of {len(jobs)} kernels in {time.perf_counter() - began:.1f} s", flush=True)
    if options.build_only:
        return
    rows: list[Mapping[str, Any]] = []
    for row in measure(built, wanted, modes, options.limit):
        rows.append(row)
        us, label = row["us"], f"{row['chain']} {row['size']}"
        print(
            f"{label:36s} {row['memory']:3s} floor {row['floor']:7.2f} ladder {us.get('ladder', 0):7.2f}"
            f" {row['rival']} {us.get(row['rival'], 0):7.2f} us: x{row['ratio']:.2f}   best {row['best']}"
            f" {us.get(row['best'], 0):.2f}",
            flush=True,
        )
        mean = geometric_mean([row["ratio"] for row in rows])
        report = {"environment": environment(), "geometric_mean": round(mean, 3), "rows": rows}
        write_record(options.output, report)
    print(json.dumps({"geometric_mean": round(mean, 3), "least": min(row["ratio"] for row in rows)}))


if __name__ == "__main__":
    main()
