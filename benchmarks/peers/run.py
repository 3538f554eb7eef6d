"""Measures: warms every engine in parallel processes, then times contenders in turns."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from benchmarks.harness import (
    Captured,
    capture_long,
    copies_for,
    copy_bandwidth,
    environment,
    graph_time_us,
    interleaved_us,
    poison,
    relative_error,
)
from benchmarks.peers.cases import Case, Contender, Shape
from benchmarks.peers.engine import Operand, Work, engine, versions
from benchmarks.peers.ladder_engine import build, kernels
from tile_types.errors import LadderError

ROUNDS = 20
LONGEST_CASE_S = 60
"""Seconds after which a case at one shape counts as hanging; the slowest took 6."""

LOOSE = 1e-2
"""Bound of the error of a peer against its own weights; Ladder's rows have the tighter `Work.bound`."""


Demands = dict[tuple[str, Work, Shape], tuple[int, ...]]
"""The M at which an engine meets a product and shape."""


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

    def pairs(self) -> Iterator[tuple[Shape, Case]]:
        """Yield shapes and cases in the order of measurement: what times the host last."""
        every = [(shape, case) for shape in self.shapes() for case in self.cases if shape in case.shapes]
        yield from sorted(every, key=lambda pair: pair[1].method == "host")

    def demands(self) -> Demands:
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


class Warming:
    """Lets every engine compile and tune in other processes; Ladder's kernels in the order of need.

    Parameters
    ----------
    selection
        What will be measured.
    jobs
        Processes.
    """

    def __init__(self, selection: Selection, jobs: int) -> None:
        self.pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
        self.peers = [self._submit(*task) for task in peer_tasks(selection)]
        self.needed: dict[tuple[str, Shape], list[Future[None]]] = {}
        demands, futures = selection.demands(), dict[str, Future[None]]()
        for shape, case in selection.pairs():
            for key, text in kernels_of(case, shape, demands).items():
                if key not in futures:
                    futures[key] = self._submit(build, (text,))
                self.needed.setdefault((case.name, shape), []).append(futures[key])
        self.kernels = list(futures.values())

    def _submit(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> Future[None]:
        return self.pool.submit(quietly, function, arguments)

    def wait_for_peers(self) -> None:
        """Return when no peer uses the GPU any more."""
        start = time.perf_counter()
        wait(self.peers)
        say(f"peers warmed {len(self.peers)} products; waited {time.perf_counter() - start:.0f} s")

    def wait_for(self, case: Case, shape: Shape) -> None:
        """Return when Ladder's kernels for a case at a shape are built."""
        wait(self.needed.get((case.name, shape), []))

    def wait_for_all(self) -> None:
        """Return when everything is done and the machine is quiet."""
        self.wait_for_peers()
        start = time.perf_counter()
        wait(self.kernels)
        say(f"built {len(self.kernels)} kernels; waited {time.perf_counter() - start:.0f} s")


def quietly(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Call a function; if it fails, say so: the measurement meets it again and makes a row of it."""
    try:
        function(*arguments)
    except Exception as error:
        say(f"warming {arguments}: {type(error).__name__}: {error}"[:400])


def peer_tasks(selection: Selection) -> list[Task]:
    """Return the products that peers compile or tune for."""
    wanted = [
        (name, work, shape, tokens)
        for (name, work, shape), tokens in selection.demands().items()
        if engine(name).warms and not engine(name).absence()
    ]
    return [(call_once, one) for one in sorted(wanted, key=lambda one: one[0])]


def kernels_of(case: Case, shape: Shape, demands: Demands) -> dict[str, str]:
    """Return the requests of the kernels that Ladder needs for a case at a shape, by what decides them."""
    found: dict[str, str] = {}
    for one in case.contenders:
        tokens = demands.get((one.engine, one.work, shape))
        if one.engine == "ladder" and tokens:
            with contextlib.suppress(LadderError):  # likewise
                found |= {key: it.text for key, it in kernels(one.work, *shape, tokens).items()}
    return found


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
    demands: Demands = field(default_factory=dict)
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
    message = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {message}"[:300]


# ---- the process that measures --------------------------------------------------------
Batch = tuple[list[dict[str, Any]], str]
"""Rows, and how the device was lost, if it was."""


class Bench:
    """The process that measures, and a new one whenever a kernel breaks the device or the process."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.pool = make_pool()
        self.process = self.pool.submit(get_ready)

    def facts(self) -> dict[str, Any]:
        """Describe machine, versions and limits."""
        found: dict[str, Any] = self.pool.submit(described).result()
        return found

    def rows(self, case: Case, shape: Shape, demands: Demands, rounds: int) -> list[dict[str, Any]]:
        """Return the rows of one case at one shape; a lost device costs the rest of them only."""
        try:
            self.process.result()
            task = self.pool.submit(batch, case, shape, demands, rounds)
            rows, loss = task.result(timeout=LONGEST_CASE_S)
        except (BrokenProcessPool, TimeoutError) as error:
            rows, loss = lost(case, shape, [], reason_of(error)), reason_of(error)
        if loss:
            say(f"lost the device in {case.name} {shape}: {loss}")
            self._replace()
        return rows

    def _replace(self) -> None:
        """Stop the process, which may hang, and start another."""
        with contextlib.suppress(BrokenProcessPool, ProcessLookupError):
            os.kill(self.process.result(), signal.SIGKILL)
        self.pool.shutdown(wait=False, cancel_futures=True)
        self._start()


def measure(
    selection: Selection, run_id: str, bench: Bench, warming: Warming
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of every shape and case."""
    demands = selection.demands()
    for shape, case in selection.pairs():
        if case.method == "host":
            warming.wait_for_all()
        else:
            warming.wait_for(case, shape)
        start = time.perf_counter()
        rows = bench.rows(case, shape, demands, selection.rounds)
        yield [{"run": run_id, "case": case.name, **row} for row in rows]
        say(f"{case.name} {shape}: {len(rows)} rows in {time.perf_counter() - start:.1f} s")


def get_ready() -> int:
    """Import what takes long and open the device, while others still compile; return the process's number."""
    import torch

    engine("ladder")
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    return os.getpid()


def make_pool() -> Executor:
    """Return an executor of one fresh process."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


PREPARED: dict[Shape, Prepared] = {}
"""The operands of the shape that is being measured."""


def prepared_for(shape: Shape) -> Prepared:
    """Return the operands of a shape, after those of the shape before are freed."""
    import torch

    if shape not in PREPARED:
        PREPARED.clear()
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
        gc.freeze()  # each capture collects garbage
        PREPARED[shape] = Prepared(shape)
    return PREPARED[shape]


def batch(case: Case, shape: Shape, demands: Demands, rounds: int) -> Batch:
    """Measure one case at one shape, within the process that measures."""
    import torch

    rows: list[dict[str, Any]] = []
    try:
        prepared = prepared_for(shape)
        prepared.demands = demands
        for row in METHODS[case.method](case, prepared, rounds):
            rows.append(row)
        torch.cuda.synchronize()
    except Exception as error:  # whatever it is, the device is not trusted any more
        loss = reason_of(error)
        return rows + lost(case, shape, rows, loss), loss
    return rows, ""


def lost(case: Case, shape: Shape, rows: list[dict[str, Any]], loss: str) -> list[dict[str, Any]]:
    """Return rows with the reason for what is missing."""
    found = {(row["label"], row["m"]) for row in rows}
    return [
        {**describe(one, shape, m), "reason": f"the device was lost at this case: {loss}"}
        for m in case.tokens
        for one in case.contenders
        if (one.name, m) not in found
    ]


# ---- measuring ------------------------------------------------------------------------
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
    from benchmarks.host_cost import host_cost_us

    op = operand.operator
    cost = host_cost_us(op.compiled_for(x.device), x, operand.packed, direct=op)
    return {f"{name}_us": value for name, value in cost.items()}


METHODS: Mapping[str, Callable[[Case, Prepared, int], Iterator[dict[str, Any]]]] = {
    "times": times,
    "host": host_cost,
}
"""How a point is measured."""


# ---- limits of the device -------------------------------------------------------------
def described() -> dict[str, Any]:
    """Describe machine, versions and limits, within the process that measures."""
    found = environment()
    found["versions"] |= versions()
    return found | limits()


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
