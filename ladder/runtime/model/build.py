"""From an imported program to something that runs: simplify, partition, kernels, plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch

from ladder import faults
from ladder.ir.extents import MOST_COUNTED, product
from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph
from ladder.partition import Subgraph
from ladder.partition.convolutions import plain_problem
from ladder.partition.subgraphs import CALLS, COUNTING
from ladder.runtime.build import Job, Kernel, all_built, attempt, load_entry
from ladder.runtime.compile import (
    ANY_M,
    Request,
    avoid_spilling,
    candidate_for,
    family_of,
    jobs_of,
    obtain,
    request_for,
    target_of,
)
from ladder.runtime.model.attention import attention_jobs
from ladder.runtime.model.bound_plan import BoundPlan, places_of
from ladder.runtime.model.cached_attention import cached_attention_jobs
from ladder.runtime.model.chains import chain_job, shared_chains
from ladder.runtime.model.codes import codes_jobs
from ladder.runtime.model.executable import Executable
from ladder.runtime.model.found import found_jobs
from ladder.runtime.model.joined import Join, Joined, Made, Pack, joins_of
from ladder.runtime.model.native_parts import elements_job, fourier_job
from ladder.runtime.model.plan import ModelPlan, make_plan
from ladder.runtime.model.prepared import Prepared, prepare
from ladder.runtime.model.program import Program
from ladder.runtime.model.prologues import prologue_jobs
from ladder.runtime.model.recurrent import recurrent_jobs
from ladder.runtime.model.rows import rows_job
from ladder.runtime.spills import least_spilling, refuse_spills, warn_of_spills
from schedules.schedule import Plan
from targets import TileDevice, get_device
from tile_types.errors import MissingToolError, ScheduleError
from tile_types.tile import Extent

JOBS: Mapping[str, Callable[[Subgraph, TileDevice], list[Job]]] = {
    "chain": lambda part, device: [chain_job(part.graph, device)],
    "rows": lambda part, device: [rows_job(part.graph, device)],
    "attention": lambda part, device: attention_jobs(part.graph, device),
    "recurrent": lambda part, device: recurrent_jobs(part.graph, device),
    "codes": lambda part, device: codes_jobs(part.graph, device),
    "elements": lambda part, device: [elements_job(part.graph, device)],
    "fourier": lambda part, device: [fourier_job(part.graph, device)],
    "found": found_jobs,
    "prologue": prologue_jobs,
    "cached_attention": cached_attention_jobs,
}
"""Kind of part -> what describes its kernels, where it has some of its own."""


@dataclass(frozen=True)
class Built:
    """A model ready to run, with what it was made from.

    program: As imported, simplified.
    plan: The steps.
    kernels: Kernel name -> the library on disk.
    """

    program: Program
    plan: ModelPlan
    kernels: dict[str, Kernel]
    executable: Executable

    @cached_property
    def graph(self) -> Graph:
        return self.program.graph


def build_model(program: Program, where: torch.device) -> Built:
    """Compile a program for the device that its tensors are on.

    Raises LadderError if a part has no executor there; the message names it.
    """
    return build_prepared(prepare(program, get_device(target_of(where))), where)


def build_prepared(prepared: Prepared, where: torch.device) -> Built:
    """Find or build the kernels of what was prepared for this device, and lay out its plan.

    Raises LadderError if a part has no executor there; the message names it.
    """
    device = get_device(target_of(where))
    program = prepared.program
    requests, (kernels, further, reasons) = least_spilling(
        _built_parts(prepared.parts, device), lambda built: built[1][1]
    )
    warn_of_spills(further, device)
    parts = [
        demoted(part, reasons[number]) if number in reasons else part
        for number, part in enumerate(prepared.parts)
    ]
    entries = {number: " ".join(kernel.entry for kernel in own) for number, own in kernels.items()}
    entries |= {number: request.text for number, request in requests.items()}
    family = family_of(device)
    plan = make_plan(program.graph, parts, entries, family)
    mine = [kernel for own in kernels.values() for kernel in own]
    loaded = {kernel.entry: load_entry(kernel, family) for kernel in mine}
    executable = bind_program(program, plan, loaded, where)
    named = {kernel.entry: kernel for kernel in (*mine, *further)}
    return Built(program, plan, named, executable)


def _built_parts(
    parts: Sequence[Subgraph], device: TileDevice
) -> Iterator[tuple[dict[int, Request], BuiltKernels]]:
    """Yield the kernels of parts, with products as the policy schedules them: anew while those spill."""
    news = True
    while news:
        requests = gemm_requests(parts, device)
        yield requests, build_kernels(parts, requests, device)
        news = _avoid_spilling(parts, requests)


def _avoid_spilling(parts: Sequence[Subgraph], requests: Mapping[int, Request]) -> bool:
    """Have the policy choose other schedules for products whose kernels spill; return whether some do."""
    known = dict.fromkeys(
        (replace(request, gemm=_scheduled(parts[number])), request) for number, request in requests.items()
    )
    news = [avoid_spilling(asked, *obtain(request)) for asked, request in known]
    return any(news)


def _scheduled(part: Subgraph) -> Gemm:
    """Return the problem by which the schedules of a product are chosen."""
    assert part.gemm is not None  # that is what a gemm part has
    return plain_problem(part.gemm) if "contract" in part.operators else part.gemm


def gemm_requests(parts: Sequence[Subgraph], device: TileDevice) -> dict[int, Request]:
    """Return number of a quantized product among the parts -> the request for its kernels.

    Equal problems are scheduled once.
    """
    found: dict[int, Request] = {}
    known: dict[tuple[Gemm, Extent], Request] = {}
    for number, part in enumerate(parts):
        if part.kind == "gemm":
            rows = product(part.graph.tile(part.graph.outputs[0]).shape[:-1])
            assert part.gemm is not None  # that is what a gemm part has
            asked = part.gemm, rows
            found[number] = known[asked] = known.get(asked) or _request(part, device, rows)
    return found


def _request(part: Subgraph, device: TileDevice, rows: int | str) -> Request:
    """Return the request of a product: convolutions have the schedule that partition chose them for."""
    assert part.gemm is not None  # that is what a gemm part has
    if "contract" not in part.operators:
        return request_for(part.gemm, device, rows)
    chosen = candidate_for(_scheduled(part), device, int(rows))
    return Request(part.gemm, device.name, Plan(((ANY_M, chosen.schedule),)))


BuiltKernels = tuple[dict[int, list[Kernel]], list[Kernel], dict[int, str]]


def build_kernels(
    parts: Sequence[Subgraph], requests: Mapping[int, Request], device: TileDevice
) -> BuiltKernels:
    """Find or build all kernels side by side.

    Returns: Number of a part -> its kernels; those of products; number of a part -> why it cannot have any.
    Raises Exception: What prevents the kernel of a product; under ``LADDER_STRICT`` of any part, unless a
        tool is missing.
    """
    reasons: dict[int, str] = {}
    wanted: dict[int, list[Job]] = {}
    chains = shared_chains(parts)
    for number, part in enumerate(parts):
        if part.kind in COUNTING and (count := most_elements(part)) > MOST_COUNTED:
            reasons[number] = f"torch's: kernels count {MOST_COUNTED} elements, a tensor has {count}"
        elif part.kind in JOBS and not is_empty(part):
            try:
                own = replace(part, graph=chains[number][0]) if number in chains else part
                wanted[number] = JOBS[part.kind](own, device)
            except Exception as error:
                reasons[number] = _without_kernel(error)
    jobs = [job for mine in wanted.values() for job in mine]
    for request in dict.fromkeys(requests.values()):
        jobs += jobs_of(request)[1]
    found = iter(attempt(jobs))
    kernels: dict[int, list[Kernel]] = {}
    for number, mine in wanted.items():
        try:
            built = all_built(list(islice(found, len(mine))))
            fitting = built if parts[number].kind == "prologue" else refuse_spills(built, device)
            kernels[number] = warn_of_spills(fitting, device)
        except Exception as error:
            if parts[number].kind == "prologue":
                raise  # as for every product of packed weights
            reasons[number] = _without_kernel(error)
    return kernels, all_built(list(found)), reasons


def _without_kernel(error: Exception) -> str:
    """Return why a part runs in torch; a missing tool or a limit of kernels is no fault, anything else is."""
    if isinstance(error, ScheduleError):
        return f"torch's: {error}"
    if isinstance(error, MissingToolError):
        faults.warn_once(str(error), f"kernels are not built, their parts run in torch: {error}")
        return f"torch's: {error}"
    return faults.tolerated(error, "torch's")


def demoted(part: Subgraph, reason: str) -> Subgraph:
    """Return a part as torch runs it: attention has a function there, other parts run node by node."""
    return replace(part, kind="library" if part.kind in CALLS else "torch", reason=reason)


def most_elements(part: Subgraph) -> int:
    """Return how many elements the largest tensor that a part reads or writes has, where that is known."""
    counts = (product(part.graph.tile(value).shape) for value in part.graph.ends)
    return max((count for count in counts if isinstance(count, int)), default=0)


def is_empty(part: Subgraph) -> bool:
    """Tell whether there is nothing to compute: every result has an extent 0."""
    return all(0 in part.graph.tile(value).shape for value in part.graph.outputs)


def bind_program(
    program: Program, plan: ModelPlan, kernels: dict[str, Any], where: torch.device
) -> Executable:
    """Return the call of a plan."""
    bindings, packs, held = {}, {}, {}
    joins: list[Join | Pack | Made] = []
    for name, source in program.sources.items():
        at = source.at
        if source.joined or source.dense or source.graph is not None:
            new = joins_of(source)
            first = program.arguments + sum(join.count for join in joins)
            at = tuple(range(first, first + sum(join.count for join in new)))
            joins += new
        if source.kind == "weight":
            packs[name] = at
        elif source.kind == "held":
            held[name] = program.held[at[0]].to(where)
        elif source.kind == "argument":
            bindings[name] = at[0]
    places = {**places_of(plan, bindings), **program.sizes}
    bound = BoundPlan(
        plan, bindings, packs, held, program.results, program.updates, kernels, where, Joined(joins), places
    )
    return Executable(bound)
