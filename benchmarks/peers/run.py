"""Measures: warms every engine in parallel processes, then times contenders in turns."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from benchmarks.harness import (
    Call,
    Captured,
    capture_long,
    copies_for,
    copy_bandwidth,
    graph_time_us,
    interleaved_us,
    poison,
    relative_error,
)
from benchmarks.peers.cases import Case, Contender, Shape
from benchmarks.peers.engine import ENGINES, Operand, Work, engine
from benchmarks.peers.ladder_engine import build, kernels
from tile_types.errors import LadderError

ROUNDS = 20
LOOSE = 1e-2
"""Bound of the error of a peer against its own weights; Ladder's rows have the tighter `Work.bound`."""


@dataclass(frozen=True)
class Selection:
    """What of the table is run.

    Parameters
    ----------
    cases
        Cases, with their shapes, M and contenders already narrowed.
    rounds
        Replays per contender and point.
    """

    cases: tuple[Case, ...]
    rounds: int = ROUNDS

    def shapes(self) -> list[Shape]:
        """Return all shapes, each once."""
        return list(dict.fromkeys(shape for case in self.cases for shape in case.shapes))

    def demands(self) -> dict[tuple[str, Work, Shape], tuple[int, ...]]:
        """Return the M at which each engine meets each product and shape."""
        found: dict[tuple[str, Work, Shape], set[int]] = {}
        for case in self.cases:
            for one in case.contenders:
                for shape in case.shapes:
                    wanted = {m for m in case.tokens if not engine(one.engine).refusal(one.work, *shape, m)}
                    found.setdefault((one.engine, one.work, shape), set()).update(wanted)
        return {key: tuple(sorted(tokens)) for key, tokens in found.items() if tokens}


# ---- warming --------------------------------------------------------------------------
Task = tuple[Callable[..., None], tuple[Any, ...]]


def warm(selection: Selection, jobs: int) -> None:
    """Let every engine compile and tune beforehand, in ``jobs`` processes; the slowest first."""
    tasks = [*peer_tasks(selection), *ladder_tasks(selection)]
    start, spent = time.perf_counter(), dict.fromkeys(ENGINES, 0.0)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(timed, *task): task for task in tasks}
        for done in as_completed(running):
            function, arguments = running[done]
            failure, seconds = done.result()
            spent["ladder" if function is build else arguments[0]] += seconds
            if failure:
                say(f"warming {arguments}: {failure[:300]}")
    split = ", ".join(f"{name} {spent[name]:.0f}" for name in spent if spent[name])
    say(f"warmed {len(tasks)} things in {time.perf_counter() - start:.0f} s; process seconds: {split}")


def timed(function: Callable[..., None], arguments: tuple[Any, ...]) -> tuple[str, float]:
    """Call a function; return what went wrong, and the seconds."""
    start, failure = time.perf_counter(), ""
    try:
        function(*arguments)
    except Exception as error:  # the measurement meets it again and makes a row of it
        failure = f"{type(error).__name__}: {error}"
    return failure, time.perf_counter() - start


def peer_tasks(selection: Selection) -> list[Task]:
    """Return the products that peers compile or tune for."""
    wanted = [
        (name, work, shape, tokens)
        for (name, work, shape), tokens in selection.demands().items()
        if engine(name).warms and not engine(name).absence()
    ]
    return [(call_once, one) for one in sorted(wanted, key=lambda one: one[0])]


def ladder_tasks(selection: Selection) -> list[Task]:
    """Return Ladder's kernels, each once however many shapes share it."""
    found: dict[str, str] = {}
    for (name, work, shape), tokens in selection.demands().items():
        if name == "ladder":
            with contextlib.suppress(LadderError):  # likewise
                found |= {key: one.text for key, one in kernels(work, *shape, tokens).items()}
    return [(build, (text,)) for text in found.values()]


def call_once(name: str, work: Work, shape: Shape, tokens: tuple[int, ...]) -> None:
    """Prepare a product on the GPU and call it at every M."""
    import torch

    operand = engine(name).prepare(work, draw_weight(shape), tokens)
    for m in tokens:
        operand(*operand.given(draw_activations(m, shape[1], work.source)))
    torch.cuda.synchronize()
    del operand
    torch.cuda.empty_cache()


# ---- operands -------------------------------------------------------------------------
def draw_weight(shape: Shape) -> Any:
    """Draw the weight that all engines quantize: normal, float16 ``[n, k]``, outputs of order 1."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(sum(shape))
    values = torch.randn(*shape, device="cuda", generator=generator) * shape[1] ** -0.5
    return values.to(torch.float16)


def draw_activations(m: int, k: int, dtype: str) -> Any:
    """Draw normal activations ``[m, k]``."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(m)
    return torch.randn(m, k, device="cuda", generator=generator).to(getattr(torch, dtype))


@dataclass
class Prepared:
    """Operands of one shape, shared by the cases that meet there."""

    shape: Shape
    demands: dict[tuple[str, Work, Shape], tuple[int, ...]]
    held: dict[tuple[str, Work], list[Operand]] = field(default_factory=dict)
    failures: dict[tuple[str, Work], Exception] = field(default_factory=dict)

    def copies(self, one: Contender) -> list[Operand]:
        """Return copies of a contender's weight that together exceed the L2 four times.

        Raises
        ------
        Exception
            Whatever the engine raised when it was first asked, each time.
        """
        key = one.engine, one.work
        if key in self.failures:
            raise self.failures[key]
        if key not in self.held:
            try:
                self.held[key] = self._make(one)
            except Exception as error:  # a peer that fails is a row with its reason
                self.failures[key] = error
                raise
        return self.held[key]

    def _make(self, one: Contender) -> list[Operand]:
        tokens = self.demands[one.engine, one.work, self.shape]
        first = engine(one.engine).prepare(one.work, draw_weight(self.shape), tokens)
        return [first, *(first.clone() for _ in range(copies_for(first.nbytes) - 1))]


def reason_of(error: Exception) -> str:
    """Return an error in one line, and print where it came from."""
    traceback.print_exception(error, limit=-4, file=sys.stderr)
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}"[:300]


# ---- measuring ------------------------------------------------------------------------
def measure(selection: Selection, run_id: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of every shape and case.

    Raises
    ------
    RuntimeError
        If a kernel broke the device's context, after which nothing can be measured.
    """
    import torch

    demands = selection.demands()
    for shape in selection.shapes():
        prepared = Prepared(shape, demands)
        for case in selection.cases:
            if shape in case.shapes:
                start = time.perf_counter()
                rows = list(METHODS[case.method](case, prepared, selection.rounds))
                yield [{"run": run_id, "case": case.name, **row} for row in rows]
                torch.cuda.synchronize()
                say(f"{case.name} {shape}: {len(rows)} rows in {time.perf_counter() - start:.1f} s")
        del prepared
        torch.cuda.empty_cache()


def times(case: Case, prepared: Prepared, rounds: int) -> Iterator[dict[str, Any]]:
    """Check and time all contenders of a case at one shape, M by M."""
    dense: dict[tuple[str, Work], Any] = {}
    for m in case.tokens:
        rows = {one.name: describe(one, prepared.shape, m) for one in case.contenders}
        graphs = {}
        for one in case.contenders:
            row = rows[one.name]
            if reason := absence(one, prepared.shape, m):
                row["reason"] = reason
                continue
            try:
                copies = prepared.copies(one)
                if (one.engine, one.work) not in dense:
                    dense[one.engine, one.work] = copies[0].dense()
                row |= check(one, copies[0], dense[one.engine, one.work], m)
                row |= {"weight_bytes": copies[0].nbytes, "copies": len(copies)}
                graphs[one.name] = captured(one, copies, m, prepared.shape[1])
            except Exception as error:  # likewise
                row["reason"] = reason_of(error)
        for name, samples in interleaved_us(graphs, rounds).items():
            rows[name] |= statistics_of(samples)
        yield from with_ratios(case, rows)


def captured(one: Contender, copies: Sequence[Operand], m: int, k: int) -> Captured:
    """Return the graph that multiplies by every copy in turn."""
    given = copies[0].given(draw_activations(m, k, one.work.source))
    return capture_long([partial(copy, *given) for copy in copies])


def absence(one: Contender, shape: Shape, m: int) -> str:
    """Return why a contender has no time here, as far as that is known beforehand."""
    chosen = engine(one.engine)
    return chosen.absence() or chosen.refusal(one.work, *shape, m)


def describe(one: Contender, shape: Shape, m: int) -> dict[str, Any]:
    """Return the fields of a row that say what it is about."""
    return {"n": shape[0], "k": shape[1], "m": m, "label": one.name, "engine": one.engine, **asdict(one.work)}


def check(one: Contender, operand: Operand, dense: Any, m: int) -> dict[str, Any]:
    """Compare with float64 on what the operand's codes and the quantized activations stand for."""
    given = operand.given(draw_activations(m, dense.shape[1], one.work.source))
    like = operand(*given)
    poison(like.numel(), like.dtype)
    del like
    result = operand(*given)
    error = relative_error(result, operand.seen(*given) @ dense.t())
    bound = one.work.bound if one.engine == "ladder" else LOOSE
    output = str(result.dtype).removeprefix("torch.")
    return {"output": output, "relative_error": error, "bound": bound, "ok": error <= bound}


def statistics_of(times: Sequence[float]) -> dict[str, float]:
    """Return median, smallest and tenth-largest time."""
    ordered = sorted(times)
    return {
        "time_us": statistics.median(ordered),
        "min_us": ordered[0],
        "p90_us": ordered[int(0.9 * (len(ordered) - 1))],
    }


def with_ratios(case: Case, rows: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows; timed ones with their time over the subject's."""
    subject = rows[case.contenders[0].name].get("time_us")
    for row in rows.values():
        if subject and "time_us" in row:
            row["ratio"] = row["time_us"] / subject
        yield row


def host_cost(case: Case, prepared: Prepared, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the host's microseconds per call, by way of calling; the kernel is shorter than the call."""
    for one in case.contenders:
        row = describe(one, prepared.shape, 1)
        try:
            row |= host_times(
                prepared.copies(one)[0], draw_activations(1, prepared.shape[1], one.work.source)
            )
        except Exception as error:  # likewise
            row["reason"] = reason_of(error)
        yield row


def host_times(operand: Any, x: Any) -> dict[str, float]:
    """Return microseconds of the bare launch, of `Matmul` and of the operator registered with torch."""
    from ladder.runtime.operator import matmul

    op, packed, y = operand.operator, operand.packed, operand(x)
    entry = op.compiled_for(x.device).entries[0]
    return {
        "kernel_us": mean_host_us(lambda: entry(x, *packed.tensors, y)),
        "direct_us": mean_host_us(lambda: op(x, packed)),
        "operator_us": mean_host_us(lambda: matmul(x, packed.tensors, None, None, op.request.text)),
    }


def mean_host_us(call: Call, batches: int = 11, calls: int = 200) -> float:
    """Return the median over batches of the host's microseconds per call; the launch queue never fills."""
    import torch

    means = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        means.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(means)


METHODS: Mapping[str, Callable[[Case, Prepared, int], Iterator[dict[str, Any]]]] = {
    "times": times,
    "host": host_cost,
}
"""How a point is measured."""


# ---- limits of the device -------------------------------------------------------------
def limits() -> dict[str, float]:
    """Measure bandwidths, and rates of cuBLAS on large products, in bytes and operations per second."""
    from benchmarks.bandwidth import read_bandwidth

    found = {"read_bytes_per_second": read_bandwidth(), "copy_bytes_per_second": copy_bandwidth()}
    for name, engine_name, activation in (
        ("float16", "cublas", "float16"),
        ("fp8_e4m3", "scaled_mm", "fp8_e4m3"),
        ("int8", "int_mm", "int8"),
    ):
        found[f"{name}_operations_per_second"] = dense_rate(engine_name, Work(activation, activation))
    return found


def dense_rate(engine_name: str, work: Work, extent: int = 8192) -> float:
    """Return the operations per second of a dense product of ``extent`` in each direction."""
    operand = engine(engine_name).prepare(work, draw_weight((extent, extent)), (extent,))
    given = operand.given(draw_activations(extent, extent, work.source))
    return 2 * extent**3 / (graph_time_us([lambda: operand(*given)] * 2) * 1e-6)


def say(text: str) -> None:
    """Tell progress on stderr."""
    print(text, file=sys.stderr, flush=True)
