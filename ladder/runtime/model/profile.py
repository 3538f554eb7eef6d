"""Profile of a plan: bytes and operations of each step, their roofline time and the measured time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from ladder.ir.build import bind, node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.ir.printer import print_graph
from ladder.partition.subgraphs import Subgraph, engine
from ladder.runtime.model.frame import Frame
from ladder.runtime.model.plan import ModelPlan, PlanStep
from ladder.runtime.model.steps import Steps
from ladder.runtime.model.workspace import Bound
from ladder.runtime.recording import recorded
from tile_types.errors import ConversionError

if TYPE_CHECKING:
    from ladder.runtime.model.executable import Executable
    from targets import TileDevice

MULTIPLY_ADDS = {True: 4.0, False: 2.0}
"""On GPUs or not -> float32 operations, two per fused multiply-add, for one 32-bit integer operation: GPUs
have twice the lanes for floats."""


@dataclass(frozen=True)
class StepCost:
    """One step of a plan.

    number: From 0, in order.
    kind, executor, operators, reason: As `ModelPlan.table` has them; the operators joined by spaces.
    inputs, outputs: Values that it reads and makes.
    bytes: Of its operands and results, each once; 0 for views.
    flops: Operations of its product, else of all its operators.
    core: Type in which its product computes; empty for vector units.
    constant: Whether it runs once and not in each call.
    graph: Its tile graph as text.
    least_us: Least time for the bytes and the operations on the device, whichever takes longer.
    measured_us: Median time; None where nothing ran.
    """

    number: int
    kind: str
    executor: str
    operators: str
    reason: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bytes: int
    flops: int
    core: str
    constant: bool
    graph: str
    least_us: float
    measured_us: float | None = None

    @property
    def us(self) -> float:
        """The time to go by: measured, else the least."""
        return self.least_us if self.measured_us is None else self.measured_us


@dataclass(frozen=True)
class Peaks:
    """Peak rates of a device.

    bandwidth: Bytes per second.
    vector: Operations per second of the vector units.
    cores: Type -> operations per second of the matrix cores.
    source: Where the numbers come from.
    """

    bandwidth: float
    vector: float
    cores: Mapping[str, float]
    source: str

    def peak(self, core: str) -> float:
        """Return the operations per second for a type; vector units serve what no core does."""
        return self.cores.get(core, self.vector)

    def least_us(self, nbytes: int, flops: int, core: str) -> float:
        """Return the least time for bytes and operations, in µs."""
        return max(nbytes / self.bandwidth, flops / self.peak(core)) * 1e6


def peaks_of(device: TileDevice, cores: Sequence[str], bandwidth: float | None = None) -> Peaks:
    """Return what a device can do, by its data sheet.

    device: Any.
    cores: Types that products compute in.
    bandwidth: Bytes per second measured on this machine, instead of the data sheet's.
    """
    found = {}
    for name in dict.fromkeys(cores):
        try:
            found[name] = device.peak(device.core_for(name))
        except ConversionError:
            continue  # vector units compute it
    vector = MULTIPLY_ADDS[device.is_gpu] * device.vector_ops_per_cycle * device.units * device.clock
    stated = bandwidth or device.layer("dram").bandwidth
    source = "data sheet" if bandwidth is None else "bandwidth measured in this run, compute by data sheet"
    return Peaks(stated, vector, found, f"{device.title}: {source}")


def plan_costs(plan: ModelPlan, sizes: Mapping[str, int], peaks: Peaks) -> list[StepCost]:
    """Return what every step costs at best, for given symbolic sizes."""
    return [_cost(number, step, sizes, peaks) for number, step in enumerate(plan.steps)]


def cores_of(plan: ModelPlan) -> list[str]:
    """Return the types that a plan's products compute in."""
    return list(dict.fromkeys(filter(None, (_core(step.part) for step in plan.steps))))


def _cost(number: int, step: PlanStep, sizes: Mapping[str, int], peaks: Peaks) -> StepCost:
    part, graph = step.part, bind(step.part.graph, sizes)
    nbytes = 0 if part.kind == "view" else _bytes(graph)
    flops, core = _flops(graph), _core(part)
    return StepCost(
        number,
        part.kind,
        step.executor,
        " ".join(part.operators),
        part.reason,
        part.inputs,
        part.outputs,
        nbytes,
        flops,
        core,
        step.constant,
        print_graph(part.graph),
        0.0 if part.kind == "view" else peaks.least_us(nbytes, flops, core),
    )


def _bytes(graph: Graph) -> int:
    """Return the bytes of operands and results, each once; of a table only the rows that are taken."""
    tables = {node.inputs[0] for node in graph.nodes if node.operator in ("take", "gather")}
    read = sum(node.tile.nbytes for node in graph.inputs if node.name not in tables)
    written = sum(graph.tile(value).nbytes for value in graph.outputs)
    return read + written * (2 if tables else 1)


def _flops(graph: Graph) -> int:
    products = [node for node in graph.nodes if _is_product(node)]
    nodes = products or [node for node in graph.nodes if get_operator(node.operator).role == "value"]
    return sum(_operations(graph, node) for node in nodes)


def _is_product(node: Node) -> bool:
    return engine(node) == "product" or node.operator == "attention"


def _operations(graph: Graph, node: Node) -> int:
    tiles = [graph.tile(value) for value in node.inputs]
    found = get_operator(node.operator).flops(tiles, node.tile, node_attributes(node))
    return found if isinstance(found, int) else 0


def _core(part: Subgraph) -> str:
    """Return the type in which a part's product computes, empty if it has none."""
    if part.gemm is not None:
        return part.gemm.activation
    found = next((node for node in part.graph.nodes if _is_product(node)), None)
    return "" if found is None else part.graph.tile(found.inputs[0]).ttype.name


# measuring -------------------------------------------------------------------------------------------


def step_times(executable: Executable, values: Sequence[Any], rounds: int = 20) -> dict[int, float]:
    """Measure the steps of a plan one after the other, in the order of the plan.

    executable: The plan.
    values: Arguments of a call.
    rounds: How often.
    Returns: Number of a step -> median µs. Steps that run once are left out. On a CPU a time includes the
        call of the kernel. On a GPU the steps are nodes of one CUDA graph with marks between them, so a time
        holds no launch by the host and operands come from where a call of the model finds them; steps do not
        overlap, as they may in a call.
    Raises RuntimeError: A step on a GPU cannot be recorded.
    """
    steps, values = ready_steps(executable, values)
    clock = _gpu_rounds if executable.where.type == "cuda" else _cpu_rounds
    found = zip(*clock(steps, values, rounds), strict=True)
    return {at: statistics.median(times) * 1e6 for at, times in zip(steps.numbers, found, strict=True)}


def ready_steps(executable: Executable, values: Sequence[Any]) -> tuple[Steps, Sequence[Any]]:
    """Return the steps for the sizes of a call, which ran once, and all values that they take."""
    if executable.bound.joined is not None:
        values = (*values, *executable.bound.joined.of(values))
    frame = Frame(executable.bound)
    sizes = tuple(executable.sizes(values).values())
    state = frame.enter(sizes)
    for_all = executable.where.type == "cuda" or state.some_empty
    steps = state.steps or (frame.steps if for_all else frame.settled(sizes))
    steps.run(values)
    return steps, values


def _cpu_rounds(steps: Steps, values: Sequence[Any], rounds: int) -> list[list[float]]:
    """Return each round's seconds by step."""
    times: list[float] = []

    def watch(bound: Bound) -> Bound:
        def run(slots: list[Any]) -> None:
            start = time.perf_counter()
            bound(slots)
            times.append(time.perf_counter() - start)

        return run

    with _watched(steps, watch):
        for _ in range(rounds):
            steps.run(values)
    count = len(steps.bound)
    if not count:
        return []
    return [times[at : at + count] for at in range(0, len(times), count)]


def _gpu_rounds(steps: Steps, values: Sequence[Any], rounds: int) -> list[list[float]]:
    """Return each round's seconds by step, less what two marks with nothing between them take."""
    marks = [_mark()]

    def watch(bound: Bound) -> Bound:
        def run(slots: list[Any]) -> None:
            bound(slots)
            marks.append(_mark())
            marks[-1].record()

        return run

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with _watched(steps, watch), recorded(graph, steps.owner.where):
        marks[0].record()
        marks.append(_mark())
        marks[1].record()
        steps.run(values)
    found = []
    for _ in range(rounds):
        graph.replay()
        torch.cuda.synchronize()
        empty, *times = (a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))
        found.append([max(taken - empty, 0.0) for taken in times])
    return found


def _mark() -> Any:
    """Return an event that is a node of the CUDA graph it is recorded in."""
    event: Any = torch.cuda.Event  # its constructor has no types
    return event(enable_timing=True, external=True)


@contextmanager
def _watched(steps: Steps, watch: Callable[[Bound], Bound]) -> Iterator[None]:
    """Wrap every step for a while."""
    kept = steps.bound
    steps.bound = [(watch(bound), dead) for bound, dead in kept]
    try:
        yield
    finally:
        steps.bound = kept
