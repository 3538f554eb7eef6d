"""Products with prologues: how their kernels are described, built and called."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial

from ladder.ir.extents import Shape, product
from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph
from ladder.ir.parser import parse
from ladder.ir.printer import print_graph
from ladder.partition import Subgraph
from ladder.runtime.build import Job, function_job
from ladder.runtime.compile import ANY_M, gated_schedule, streaming_schedule
from ladder.runtime.model.chains import canonical_chain
from ladder.runtime.model.entry_calls import ready
from ladder.runtime.model.plan import PlanStep
from ladder.runtime.model.workspace import Bound, Slots, Workspace
from schedules.footprint import SLICED
from schedules.policy import rank
from schedules.schedule import GpuSchedule, Plan, parse_plan
from targets import TileDevice
from tile_types.errors import DTypeError, ScheduleError, ShapeError


@dataclass(frozen=True)
class Described:
    """A kernel as a part keeps it, the problem apart.

    chain: The chain, printed, with plain names.
    at: Number of its result that is multiplied.
    schedule: A plan of one schedule, printed.
    copies: As of `ladder.lower.chain.prologue.PrologueForm`.
    """

    chain: str
    at: int
    schedule: str
    copies: tuple[tuple[int, ...], ...] = ()

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> Described:
        """Read `text` back."""
        fields = json.loads(text)
        return cls(**{**fields, "copies": tuple(map(tuple, fields["copies"]))})

    def emit(self, gemm: Gemm, device: TileDevice, name: str) -> object:
        """Emit the kernel; raises ScheduleError where none fits."""
        from ladder.lower.build import emit_with_prologue
        from ladder.lower.chain.prologue import PrologueForm

        graph = parse(self.chain)
        form = PrologueForm(graph, graph.outputs[self.at], self.copies)
        schedule = parse_plan(self.schedule).entries[0][1]
        return emit_with_prologue(form, gemm, device, schedule, name)


def described(
    device: TileDevice, chain: Graph, value: str, gemm: Gemm, copies: tuple[Shape, ...], alone: float
) -> str:
    """Return the description of a product's kernel with a chain as its prologue; empty if there is none.

    alone: Microseconds of a kernel of the chain alone, which this saves. What its rows add is not counted
        against what other pipelines gain: of the smallest matrices, such differences were not timed.
    """
    rows = chain.tile(value).shape[:-1]
    count = 1
    for extent in rows:
        if not isinstance(extent, int):
            return ""
        count *= extent
    try:
        if gemm.gate:
            schedule = gated_schedule(gemm, device, count)
        else:
            schedule = streaming_schedule(gemm, device, count, alone * 1e-6)
    except ScheduleError:
        return ""
    if not isinstance(schedule, GpuSchedule):
        return ""
    at = chain.outputs.index(value)
    told = str(Plan(((ANY_M, schedule),)))
    found = Described(print_graph(canonical_chain(chain)), at, told, copies)  # type: ignore[arg-type]
    return found.text if _is_emitted(found, gemm, device) else ""


@cache
def _is_emitted(found: Described, gemm: Gemm, device: TileDevice) -> bool:
    return can_be_emitted(lambda: found.emit(gemm, device, "kernel"))


def can_be_emitted(emit: Callable[[], object]) -> bool:
    """Tell whether a kernel can be emitted: what must hold is known where it is."""
    from ladder.lower.tvm_lock import tvm_lock

    try:
        with tvm_lock():
            emit()
    except (ScheduleError, ShapeError, DTypeError):
        return False
    return True


def prologue_jobs(part: Subgraph, device: TileDevice) -> list[Job]:
    """Return the kernel of a product with a prologue."""
    gemm, found = part.gemm, Described.parse(part.found)
    assert gemm is not None  # that is what such a part has
    rows = int(str(product(part.graph.tile(part.graph.outputs[0]).shape[:-1])))
    return [_job(found, gemm, device, partial(_other_jobs, found, gemm, device, rows))]


def _job(
    found: Described, gemm: Gemm, device: TileDevice, others: Callable[[], Iterable[Job]] = tuple
) -> Job:
    facts = {"gemm": gemm.shape_free(), "prologue": found.text}
    name = f"ladder_prologue_{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:10]}"
    return function_job(facts, name, device, partial(found.emit, gemm, device), gemm, others)


def _other_jobs(found: Described, gemm: Gemm, device: TileDevice, rows: int) -> Iterator[Job]:
    """Yield the kernel by other schedules that take prologues, those predicted to be fastest first."""
    for schedule, _ in rank(gemm, device, rows, wide=True):
        told = str(Plan(((ANY_M, schedule),)))
        other = replace(found, schedule=told)
        sliced = isinstance(schedule, GpuSchedule) and schedule.pipeline in SLICED
        if sliced and told != found.schedule and _is_emitted(other, gemm, device):
            yield _job(other, gemm, device)


def bind_prologue(memory: Workspace, step: PlanStep) -> Bound:
    """Return the call: the chain's inputs, its other results, what is packed, the bias, and the product."""
    part, entry = step.part, memory.owner.kernels[step.entry]
    assert part.gemm is not None
    roles = part.by_role
    numbers = range(sum(role.startswith("X") for role in roles))
    reads = [
        (memory.slot[value], memory.owner.plan.tiles[value].shape == ())
        for value in (roles[f"X{at}"] for at in numbers)
    ]
    bias = memory.slot[roles["bias"]] if "bias" in roles else None
    arrays, matrix = memory.packed[roles["B"]], (-1, part.gemm.columns)
    places = [(memory.slot[value], memory.target(value)) for value in part.outputs]

    def run(slots: Slots) -> None:
        given = [ready(slots[slot]) for slot, _ in reads]
        given = [x.reshape(1) if number else x for x, (_, number) in zip(given, reads, strict=True)]
        made = []
        for slot, target in places:
            slots[slot] = result = target()
            made.append(result)
        y, *others = made
        weight = memory.weight(arrays)
        extras = [] if bias is None else [slots[bias].contiguous().view(-1)]
        entry(*given, *others, *weight, *extras, y if y.ndim == 2 else y.view(matrix))

    return run
