"""Whole models on a GPU beside ``torch.compile``: errors, times of CUDA graphs, and the kernels of each.

``python -m benchmarks.models --steps 8b:1:1 8b:32:1 8b:1:4096 --models all --output models.json``. Every
engine runs the same eager model; all are recorded as CUDA graphs and replayed by turns, so that times are
the GPU's alone. Layers have memory of their own and together exceed the L2 several times, so weights come
from HBM. Errors are relative Frobenius norms against float64 on the same (decoded) weights.

``--side-by-side`` gives each case a process: all compile beside each other, then they take turns to be timed.
With ``--compile-only`` that fills the caches of kernels of both compilers; what torch chooses by timing its
kernels is not kept, but chosen again when times are taken.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config

import ladder
from benchmarks.harness import (
    Captured,
    capture,
    environment,
    interleaved_us,
    relative_error,
    require_gpu,
    write_record,
)
from benchmarks.model_cases import MODELS, Step, decoder, exact_result, zoo_model
from benchmarks.turns import take_turns, wait_for_turn

TORCH_MODES = ("default", "max-autotune-no-cudagraphs")
"""torch's own recording is left out of the second: every engine is recorded alike."""

HBM = 4.25e12
"""Bytes per second that kernels read on an H200 (benchmarks/bandwidth.py)."""

ROUNDS = 15

COMPILE_THREADS = 4
"""Of torch's compiler, in each of the processes that prepare a run."""


@dataclass
class Engine:
    """One way to run a model.

    Parameters
    ----------
    name
        In reports.
    graph
        Its recording.
    seconds
        What compiling took.
    result
        What it computed.
    about
        More for the report.
    """

    name: str
    graph: Captured
    seconds: float
    result: list[torch.Tensor]
    about: dict[str, Any] = field(default_factory=dict)
    owner: Any = None
    """Keeps the memory that the recording uses."""
    call: Callable[[], Any] | None = None
    """Runs it from Python, guards and all."""


def tensors(result: Any) -> list[torch.Tensor]:
    """Return all tensors of a nested result."""
    return [result] if isinstance(result, torch.Tensor) else [t for part in result for t in tensors(part)]


def ladder_engine(model: Any, arguments: Sequence[Any], name: str, through: str) -> Engine:
    """Compile by Ladder; its plan records itself at the third call."""
    start = time.perf_counter()
    if through == "torch":
        from ladder.integrations.dynamo import backend, compiler

        torch._dynamo.reset()
        before = len(compiler.built)
        fast: Any = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        result = tensors(fast(*arguments))
        built, refused, outcome = compiler.built[before:], compiler.refused, "torch.compile"
    else:
        fast = ladder.compile(model)
        result = tensors(fast(*arguments))
        built, refused, outcome = fast.models, fast.refused, fast.outcome
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    result = [tensor.clone() for tensor in result]
    for _ in range(4):
        last = fast(*arguments)
    result = tensors(last)
    if len(built) != 1 or refused:
        raise RuntimeError(f"{name}: {len(built)} graphs, outcome {outcome}, refused: {refused}")
    recorded = built[0].executable.recorded()
    if not recorded:
        raise RuntimeError(f"{name}: no CUDA graph")
    about = {
        "outcome": outcome,
        "steps": dict(Counter(step.part.kind for step in built[0].plan.steps)),
        "plan": str(built[0].plan).splitlines(),
        "memory": built[0].executable.memory(),
    }
    graph = Captured(recorded[0], [lambda: None])
    return Engine(name, graph, seconds, result, about, built[0], lambda: fast(*arguments))


def torch_engine(model: Any, arguments: Sequence[Any], mode: str) -> Engine:
    """Compile by torch (eager: not at all) and record."""
    start = time.perf_counter()
    run = model
    if mode != "eager":
        torch._dynamo.reset()
        run = torch.compile(model, mode=None if mode == "default" else mode, fullgraph=True, dynamic=False)
    with choosing_again(keep_graphs=mode == "default"):
        result = tensors(run(*arguments))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    graph = capture([lambda: run(*arguments)])
    kept = [tensor.clone() for tensor in result]
    return Engine(f"torch {mode}", graph, seconds, kept, owner=run, call=lambda: run(*arguments))


@contextmanager
def choosing_again(keep_graphs: bool) -> Iterator[None]:
    """Let torch take compiled kernels from its cache, but choose between them by timing them now."""
    with (
        torch._inductor.config.patch(autotune_local_cache=False, fx_graph_cache=keep_graphs),
        torch._functorch.config.patch(enable_autograd_cache=keep_graphs),
    ):
        yield


def call_us(call: Callable[[], Any], us: float) -> float:
    """Return the microseconds per call from Python, calls one after the other.

    us: What the GPU takes for one. Five times 30 calls, fewer of those that would take more than 0.2 s.
    """
    calls, times = max(3, min(30, int(2e5 / us))), []
    with torch.no_grad():
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def kernels_of(graph: Captured, replays: int = 5) -> list[tuple[str, float, float]]:
    """Return (kernel, launches per replay, microseconds of each), by time; launches may overlap."""
    from torch.profiler import ProfilerActivity, profile

    graph.graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(replays):
            graph.graph.replay()
        torch.cuda.synchronize()
    count: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for event in found.events() or []:
        if "CUDA" in str(event.device_type):
            count[event.name] += 1
            spent[event.name] += event.device_time_total
    return [(name, count[name] / replays, us / count[name]) for name, us in spent.most_common()]


def compare(
    engines: Sequence[Engine], exact: Sequence[torch.Tensor], show: bool, per: int = 1
) -> Iterator[dict[str, Any]]:
    """Time engines by turns and yield a row each; ``per`` layers share a time."""
    times = interleaved_us({engine.name: engine.graph for engine in engines}, ROUNDS)
    for engine in engines:
        spent = sorted(times[engine.name])
        errors = [0.0, *(relative_error(a, b) for a, b in zip(engine.result, exact, strict=False))]
        kernels = kernels_of(engine.graph)
        yield {
            "engine": engine.name,
            "us": statistics.median(spent),
            "us_per_layer": statistics.median(spent) / per,
            "us_low": spent[0],
            "us_high": spent[-1],
            "error": max(errors),
            "kernels": round(sum(number for _, number, _ in kernels)),
            "compile_s": engine.seconds,
            **engine.about,
            **({} if engine.call is None else {"call_us": call_us(engine.call, spent[0])}),
            **({"each": kernels} if show else {}),
        }


def attempt(make: Callable[[], Engine], name: str, failures: dict[str, str]) -> list[Engine]:
    """Return an engine, or nothing and why."""
    try:
        with torch.no_grad():
            return [make()]
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {str(error)[:600]}"
        return []


def run_step(step: Step, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure a step of decoder layers with every weight type and engine."""
    arguments = step.arguments("cuda")
    engines: list[Engine] = []
    failures: dict[str, str] = {}
    exacts: dict[str, list[torch.Tensor]] = {}
    keep: list[Any] = []
    for weight in options.weights:
        model, layer = decoder(step, "cuda", "" if weight == "float16" else weight)
        keep.append(model)
        if not options.compile_only:
            with torch.no_grad():
                exacts[weight] = [exact_result(layer, step, arguments)]
            del layer
            torch.cuda.empty_cache()
        name = f"ladder {weight}"

        def make(model: Any = model, name: str = name) -> Engine:
            return ladder_engine(model, arguments, name, options.through)

        engines += attempt(make, name, failures)
        if weight == "float16":
            for mode in options.modes:

                def torch_make(model: Any = model, mode: str = mode) -> Engine:
                    return torch_engine(model, arguments, mode)

                engines += attempt(torch_make, f"torch {mode}", failures)
    if options.turn:
        wait_for_turn()
    for row in [] if options.compile_only else compare(engines, [], options.kernels, step.layers):
        engine = next(e for e in engines if e.name == row["engine"])
        weight = row["engine"].removeprefix("ladder ")
        exact = exacts[weight if weight in exacts else "float16"]
        row["error"] = max(relative_error(a, b) for a, b in zip(engine.result, exact, strict=True))
        bits = {"int4": 4.125, "int8:int8": 8, "int8": 8.125}.get(weight, 16)
        yield {
            "case": step.name,
            "layers": step.layers,
            "floor_us": step.floor_bytes(bits) / HBM * 1e6,
            **row,
        }
    for name, reason in failures.items():
        yield {"case": step.name, "engine": name, "failed": reason}


def run_model(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure a model of the tests at full size."""
    model, arguments = zoo_model(name, "cuda")
    failures: dict[str, str] = {}
    engines = attempt(
        lambda: ladder_engine(model, arguments, "ladder float16", options.through), "ladder float16", failures
    )
    for mode in () if options.compile_only else ("eager",):
        engines += attempt(lambda mode=mode: torch_engine(model, arguments, mode), f"torch {mode}", failures)  # type: ignore[misc]
    for mode in options.modes:
        engines += attempt(lambda mode=mode: torch_engine(model, arguments, mode), f"torch {mode}", failures)  # type: ignore[misc]
    if not options.compile_only:
        with torch.no_grad():
            exact = [tensor.double() for tensor in tensors(copy.deepcopy(model).float()(*_wide(arguments)))]
        if options.turn:
            wait_for_turn()
        for row in compare(engines, exact, options.kernels):
            yield {"case": name, **row}
    for engine, reason in failures.items():
        yield {"case": name, "engine": engine, "failed": reason}


def _wide(arguments: Any) -> Any:
    """Return nested arguments with halves as float32."""
    if isinstance(arguments, torch.Tensor):
        return arguments.float() if arguments.dtype == torch.float16 else arguments
    return type(arguments)(map(_wide, arguments)) if isinstance(arguments, list | tuple) else arguments


def step_of(text: str, layers: int) -> Step:
    """Read ``model:batch:tokens[:context]``."""
    model, batch, tokens, *context = text.split(":")
    kept = int(context[0]) if context else max(1024, int(tokens))
    return Step(model, int(batch), int(tokens), kept, layers)


def show(row: Mapping[str, Any]) -> str:
    """Return a row for people."""
    if "failed" in row:
        return f"{row['case']:34} {row['engine']:34} FAILED {row['failed'][:300]}"
    layer = f" ({row['us_per_layer']:.1f} per layer)" if row.get("layers", 1) > 1 else ""
    text = (
        f"{row['case']:34} {row['engine']:34} {row['us']:9.1f} us{layer}"
        f" error {row['error']:.1e} kernels {row['kernels']} compiled in {row['compile_s']:.1f} s"
    )
    for name, number, us in row.get("each", ()):
        text += f"\n      {number:6.1f} x {us:8.2f} us  {name[:100]}"
    return text


def models_of(options: argparse.Namespace) -> list[str]:
    """Return the models that are asked for, by name or by a word that names contain; or all."""
    words = [""] if options.models == ["all"] else options.models
    return [
        name
        for name in MODELS
        if any(word == name or (word not in MODELS and word in name) for word in words)
    ]


def side_by_side(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Compile every case in a process of its own; then they take turns."""
    cases = [("--steps", step) for step in options.steps] + [
        ("--models", name) for name in models_of(options)
    ]
    flags = ["--weights", *options.weights, "--modes", *options.modes, "--layers", str(options.layers)]
    flags += ["--through", options.through, *(["--kernels"] if options.kernels else [])]
    flags += ["--compile-only"] if options.compile_only else ["--turn"]
    settings = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS)}
    with tempfile.TemporaryDirectory(prefix="ladder-models-") as folder:
        files = [Path(folder) / f"{number}.json" for number in range(len(cases))]
        commands = [
            [sys.executable, "-m", "benchmarks.models", *case, *flags, "--output", str(file)]
            for case, file in zip(cases, files, strict=True)
        ]

        def after(number: int) -> None:
            failed = [{"case": cases[number][1], "engine": "all", "failed": "its process ended"}]
            file = files[number]
            report["rows"] += json.loads(file.read_text())["rows"] if file.is_file() else failed
            save(report, options)

        take_turns(commands, settings, after, options.patience)


def save(report: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Write what there is."""
    if options.output:
        write_record(options.output, report)


def one_by_one(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Measure every case in this process."""
    cases = [(run_step, step_of(text, options.layers)) for text in options.steps]
    cases += [(run_model, name) for name in models_of(options)]  # type: ignore[misc]
    for run, case in cases:
        try:
            rows = list(run(case, options))
        except Exception as error:
            rows = [{"case": str(case), "engine": "all", "failed": f"{type(error).__name__}: {error}"}]
        for row in rows:
            print(show(row), flush=True)
        report["rows"] += rows
        save(report, options)
        torch.cuda.empty_cache()


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table: a line per case, microseconds and kernels of each engine, and our ratio."""
    engines = list(dict.fromkeys(row["engine"] for row in rows if "failed" not in row))
    lines = ["| | " + " | ".join(engines) + " |", "|---" * (len(engines) + 1) + "|"]
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {row["engine"]: row for row in rows if row["case"] == case and "failed" not in row}
        ours = [row["us"] for name, row in found.items() if name.startswith("ladder")]
        cells = []
        for name in engines:
            row = found.get(name)
            if row is None:
                cells.append("")
                continue
            ratio = "" if name.startswith("ladder") or not ours else f" ({row['us'] / min(ours):.2f}x)"
            cells.append(f"{row['us_per_layer']:.4g} µs{ratio}, {row['kernels']}")
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; the report is rewritten after each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", nargs="*", default=[], help="decoder steps, model:batch:tokens[:context]")
    parser.add_argument("--models", nargs="*", default=[], help="models of the tests, or 'all'")
    parser.add_argument("--weights", nargs="*", default=["int4", "float16"])
    parser.add_argument("--modes", nargs="*", default=["default"], help=f"of torch: {', '.join(TORCH_MODES)}")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kernels", action="store_true", help="list every kernel with its time")
    parser.add_argument("--through", choices=("ladder", "torch"), default="ladder", help="who captures")
    parser.add_argument("--side-by-side", action="store_true", help="a process for each case")
    parser.add_argument("--patience", type=float, default=600, help="seconds that side by side may take")
    parser.add_argument("--compile-only", action="store_true", help="nothing is timed")
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if options.side_by_side and not options.compile_only and any("max" in mode for mode in options.modes):
        parser.error("max-autotune chooses by timing kernels: it needs the GPU to itself")
    if not options.compile_only:
        require_gpu("--compile-only fills the caches")
    report: dict[str, Any] = {**environment(), "rows": []}
    (side_by_side if options.side_by_side else one_by_one)(options, report)
    print(table(report["rows"]))
    return int(any("failed" in row for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
