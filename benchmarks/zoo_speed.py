"""What the zoo reports of speed: calls beside eager's, seconds of compiling, whose kernels take the time."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import ladder
from ladder.partition.scatter import written
from ladder.runtime.model.binders import BINDERS
from ladder.runtime.model.build import demoted
from ladder.runtime.model.executable import Executable
from ladder.runtime.model.profile import ready_steps, step_times
from ladder.runtime.model.steps import Steps
from ladder.runtime.model.workspace import Bound
from tile_types.errors import LadderError

Inputs = Mapping[str, Any]

OURS = ("chain", "gemm", "prologue", "found", "rows", "attention")
"""Kinds of steps that kernels of Ladder execute."""

INSTEAD = ("torch",)
"""Kinds of steps that torch executes though there are kernels of Ladder: one could not be built."""

GROUP = 32
"""Elements of a group of quantized weights."""

FINE = 2e-5
"""Seconds of a clock's steps, at most, by which calls of a millisecond are timed."""

SETTLING = 40
"""Calls after which nothing is recorded any more."""


def beside(eager: Callable[..., Any], fast: Callable[..., Any], inputs: Inputs, rounds: int) -> list[float]:
    """Return the least milliseconds of a call of each; they alternate, so that both meet the same machine."""
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs.values())
    for _ in range(SETTLING):
        fast(**inputs)
    return least_ms([lambda: eager(**inputs), lambda: fast(**inputs)], rounds, on_gpu=on_gpu)


def least_ms(calls: Sequence[Callable[[], Any]], rounds: int, *, on_gpu: bool) -> list[float]:
    """Return the least milliseconds of each call; they alternate.

    On a CPU with one thread the time is the process's own (`own_time`).
    On a GPU a call lasts until the device has nothing left to do.
    """
    alone = torch.get_num_threads() == 1 and not on_gpu
    clock = own_time() if alone else time.perf_counter
    settled: Callable[[], Any] = torch.cuda.synchronize if on_gpu else lambda: None
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for at, call in enumerate(calls):
            settled()
            start = clock()
            call()
            settled()
            best[at] = min(best[at], 1e3 * (clock() - start))
    return best


@functools.cache
def own_time() -> Callable[[], float]:
    """Return the clock of what the process was given, which other processes do not lengthen.

    Returns: `time.perf_counter` where that clock moves in steps of more than `FINE` seconds, as on hosts that
        count by ticks.
    """
    start = time.process_time()
    while (now := time.process_time()) == start:
        pass
    return time.process_time if now - start <= FINE else time.perf_counter


def microseconds_by_kind(fast: Any, inputs: Inputs, rounds: int = 5) -> dict[str, float]:
    """Return kind of step -> µs in one call; kinds are those of `Plan.table`.

    Parameters
    ----------
    fast
        What `ladder.compile` gave.
    """
    found: dict[str, float] = {}
    for built, values in _run_by(fast, inputs):
        for at, us in step_times(built.executable, values, rounds).items():
            kind = built.plan.steps[at].part.kind
            found[kind] = found.get(kind, 0.0) + us
    return {kind: round(us, 1) for kind, us in found.items()}


def by_kind(fast: Any, inputs: Inputs) -> dict[str, Any]:
    """Return µs by kind of step and the shares of our kernels, or why a step on a GPU cannot be timed."""
    try:
        us = microseconds_by_kind(fast, inputs)
    except RuntimeError as error:
        if next(iter(inputs.values())).device.type == "cpu":
            raise
        return {"unmeasured": str(error)[:200]}
    return {"us": us, **shares(us)} if us else {}


def on_device(make: Callable[[str], Any], device: str) -> Callable[[str], Any]:
    """Return what makes the same model and inputs on another device, where cuDNN keeps float32 whole."""
    torch.backends.cudnn.allow_tf32 = False

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    def moved(name: str) -> Any:
        model, inputs = make(name)
        return model.to(device), torch.utils._pytree.tree_map(there, inputs)

    return moved


def quantized(make: Callable[[str], Any], kind: str) -> Callable[[str], Any]:
    """Return what makes the same model and inputs, linear layers quantized in groups of `GROUP`."""

    def making(name: str) -> Any:
        model, inputs = make(name)
        return ladder.quantize_(model, kind, group_size=GROUP), inputs

    return making


def dearest(fast: Any, inputs: Inputs, count: int, rounds: int = 5) -> list[dict[str, Any]]:
    """Return the steps of a call that take the most time, ours with what torch takes operator by operator."""
    found = []
    for built, values in _run_by(fast, inputs):
        times = step_times(built.executable, values, rounds)
        top = sorted(times, key=lambda at: -times[at])[:count]
        ours = [at for at in top if built.plan.steps[at].part.kind in OURS]
        beside = torch_times(built.executable, values, ours, rounds)
        found += [_step(built.plan, at, times[at], beside.get(at)) for at in top]
    return sorted(found, key=lambda row: -row["us"])[:count]


def torch_times(
    executable: Executable, values: Sequence[Any], numbers: Collection[int], rounds: int = 20
) -> dict[int, float]:
    """Measure what steps of a plan on a CPU would take in torch, operator by operator.

    numbers: Of the steps.
    executable, values, rounds: As `ladder.runtime.model.profile.step_times` takes them.
    Returns: Number of a step -> median µs; those that torch cannot run, or that write into arguments, are
        left out.
    """
    steps, values = ready_steps(executable, values)
    times: dict[int, list[float]] = {}

    def timed(at: int, bound: Bound, other: Bound) -> Bound:
        def run(slots: list[Any]) -> None:
            apart = list(slots)
            start = time.perf_counter()
            other(apart)
            times.setdefault(at, []).append(time.perf_counter() - start)
            bound(slots)

        return run

    others = {at: other for at in numbers if (other := _in_torch(steps, at))}
    kept = steps.bound
    steps.bound = [
        (timed(at, bound, others[at]) if at in others else bound, dead)
        for at, (bound, dead) in zip(steps.numbers, kept, strict=True)
    ]
    for _ in range(rounds):
        steps.run(values)
    steps.bound = kept
    return {at: statistics.median(found) * 1e6 for at, found in times.items()}


def _in_torch(steps: Steps, number: int) -> Bound | None:
    """Return a step as torch runs it; None where it cannot, or would write into an argument.

    Torch cannot where the plan holds an operand in the order of a kernel only.
    """
    step = steps.owner.plan.steps[number]
    if written(step.part) or not steps.memory.packed.keys().isdisjoint(step.part.inputs):
        return None
    instead = replace(step, part=demoted(step.part, ""))
    try:
        return BINDERS[instead.part.kind](steps.memory, instead)
    except LadderError:
        return None


def _step(plan: Any, at: int, us: float, by_torch: float | None) -> dict[str, Any]:
    kind, executor, operators, reason = plan.table()[at]
    part = plan.steps[at].part
    return {
        "us": round(us, 1),
        **({} if by_torch is None else {"torch_us": round(by_torch, 1)}),
        "kind": kind,
        "by": executor[:60],
        "operators": operators[:200],
        "reason": reason[:150],
        "tiles": [_tile(plan.tiles[value]) for value in (*part.inputs, *part.outputs)][:8],
    }


def _tile(tile: Any) -> str:
    return f"{tile.ttype.name}{list(tile.shape)}"


def _run_by(fast: Any, inputs: Inputs) -> list[tuple[Any, Sequence[Any]]]:
    """Return the plans that run in a call, with their arguments."""
    found: list[tuple[Any, Sequence[Any]]] = []

    def watched(built: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        def watching(values: Sequence[Any], *rest: Any) -> Any:
            found.append((built, values))
            return run(values, *rest)

        return watching

    for built in fast.models:
        built.executable.run = watched(built, built.executable.run)
    try:
        fast(**inputs)
    finally:
        for built in fast.models:
            del built.executable.run
    return found


def shares(us: Mapping[str, float]) -> dict[str, float]:
    """Return the share of Ladder's kernels of the time of all steps, and of those that have such kernels.

    Views are left out.
    """
    ours = sum(us.get(kind, 0.0) for kind in OURS)
    whole = sum(each for kind, each in us.items() if kind != "view")
    having = ours + sum(us.get(kind, 0.0) for kind in INSTEAD)
    return {"ours": ours / whole if whole else 1.0, "ours_where_any": ours / having if having else 1.0}


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the medians and the worst of what was measured of all models, in a line each."""
    lines = []
    for key, title, digits in (
        ("ratio", "steady call beside eager", 2),
        ("compile_s", "seconds of compiling, all calls", 1),
        ("ours", "share of time on Ladder's kernels", 2),
        ("ours_where_any", "the same, of steps for which there are such kernels", 2),
    ):
        found = sorted((row[key], row["name"]) for row in rows if key in row)
        if found:
            values = [value for value, _ in found]
            ends = f"{values[0]:.{digits}f} ({found[0][1]}) to {values[-1]:.{digits}f} ({found[-1][1]})"
            lines.append(f"{title}: median {statistics.median(values):.{digits}f}, {ends}")
    return "\n".join(lines)
