"""The superoptimizer as a pass of plans: which found graphs replace parts, and how they are called."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from ladder import knobs
from ladder.installation import cache_root
from ladder.ir.extents import product
from ladder.ir.graph import Graph
from ladder.lower.blocks import emitter_for
from ladder.lower.blocks.analysis import gemm_of
from ladder.partition import Subgraph
from ladder.partition.convolutions import ADDMM, COSTS, chain_us, moved
from ladder.partition.found_graphs import Choice, Find, Weight
from ladder.partition.found_program import RegionProgram
from ladder.runtime.build import Job
from ladder.runtime.cache import Identity, KernelCache, cache_key
from ladder.runtime.compile import candidate_for, family_of
from ladder.runtime.cores import usable_cores
from ladder.runtime.fused import Lowering, constants_of
from ladder.runtime.model.entry_calls import ready
from ladder.runtime.model.plan import PlanStep
from ladder.runtime.model.program import Source
from ladder.runtime.model.workspace import Bound, Slots, Workspace
from ladder.runtime.packed import layout_of
from ladder.runtime.trials import Trial, candidates_of
from ladder.superopt.generator import Database, Limits, Program, Report, VerifiedGraph, search
from ladder.superopt.shipped import PATH, certified, entries, recalled
from schedules.attention import is_nvidia
from targets import TileDevice
from tile_types.arrays import torch_dtype
from tile_types.errors import CacheError, LadderError, ScheduleError
from tile_types.library import get_type
from tile_types.tile import Tile

MARGIN = 0.75
"""Predicted time of a found graph over that of the parts it replaces, at most: models err by some percent."""

GRAPHS = 2
"""Graphs of an entry that are proved for a program, and lowered."""

MOST_WORKERS = 16
"""Processes that search, at most: as many as there are cores."""

CHOICES = 3
"""Best choices of tiles, for which all schedules are considered."""


@cache
def shipped_graphs() -> str:
    """Return a digest of the shipped database."""
    return hashlib.sha256(PATH.read_bytes()).hexdigest() if PATH.exists() else ""


def finder(device: TileDevice, search: float = 0.0) -> Find | None:
    """Return what knows found graphs for a device; None if it has no kernels of them that could be faster.

    search: Seconds for programs that neither database knows; what is found is kept in the user's.
    """
    if not is_nvidia(device) or not knobs.settings.found_graphs:
        return None
    return _Finder(device, search)


class _Finder:
    """Finds kernels for regions on a device; `search` seconds are left for programs that are not known."""

    def __init__(self, device: TileDevice, search: float) -> None:
        self.device, self.deadline = device, time.monotonic() + search

    def __call__(self, region: RegionProgram, parts: Sequence[Subgraph]) -> Choice | None:
        """Return the kernels of a region if they are predicted to be faster than its parts."""
        entry, left = entries().get(region.form.key), self.deadline - time.monotonic()
        own = None if entry else self._own(region.form.program)
        if entry is None and own is None and left <= 0:
            return None
        unfused = sum(seconds_of(part, self.device) for part in parts)
        most = MARGIN * unfused
        if floor_of(region.form.program, self.device) > most:
            return None
        if entry is None and own is None:
            own = self._searched(region.form.program, left)
        best = _best(region, self.device, most, own)
        if best is None:
            return None
        name = entry.pattern if entry else "this program by a search"
        proof = f"equal but with probability {best['error']:.0e} (seed {best['seed']})"
        times = f"predicted {best['seconds'] * 1e6:.1f} us, its {len(parts)} parts {unfused * 1e6:.1f} us"
        return Choice(best["text"], best["seconds"], unfused, f"found for {name}, {proof}; {times}")

    def _own(self, program: Program) -> Report | None:
        """Return the report of an earlier search, from the user's database."""
        if not knobs.settings.cache:
            return None
        return Database(cache_root()).find(program, Limits.of(program, self.device.name))

    def _searched(self, program: Program, seconds: float) -> Report | None:
        """Search a program, and keep what was found; None if it is none that the search takes."""
        workers = min(MOST_WORKERS, usable_cores())
        limits = Limits.of(program, self.device.name, seconds=seconds, workers=workers)
        try:
            report = search(program, limits)
        except LadderError:
            return None
        if knobs.settings.cache:
            Database(cache_root()).add(report)
        return report


def seconds_of(part: Subgraph, device: TileDevice) -> float:
    """Return the predicted time of a part that is a product or a chain of known sizes."""
    if part.gemm is not None:
        rows = product(part.graph.tile(part.graph.outputs[0]).shape[:-1])
        return candidate_for(part.gemm, device, int(rows)).cost.seconds
    if part.kind == "chain":
        return 1e-6 * chain_us(part.graph, device)
    costs = COSTS[ADDMM]
    return 1e-6 * (costs.launch + moved(part.graph) / costs.bandwidth)


def floor_of(program: Program, device: TileDevice) -> float:
    """Return the time in which a device could load the inputs of a program."""
    tiles = [
        Tile(get_type(program.packed.get(node.name, node.tile.ttype)), node.tile.shape)
        for node in program.graph().inputs
    ]
    return sum(int(tile.nbytes) for tile in tiles) / device.layer("dram").bandwidth


def _best(
    region: RegionProgram, device: TileDevice, most: float, own: Report | None
) -> dict[str, Any] | None:
    """Return the kernels of a region that are predicted to be fastest, None if they need over ``most``."""
    program = region.form.program
    facts = {
        "purpose": "found", "shipped": shipped_graphs(), "graph": str(program.graph()),
        "packed": dict(program.packed), "graphs": GRAPHS, "choices": CHOICES, "most": most,
        "own": None if own is None else [str(found.structure) for found in own.found],
    }  # fmt: skip
    key = cache_key(facts, Identity.of(None, device, compiled=False)) if knobs.settings.cache else ""
    stored = KernelCache().read_note("plans", key) if key else None
    if stored is not None:
        known: dict[str, Any] | None = json.loads(stored)
        return known
    found = _chosen(region, device, most, own)
    if key:
        with suppress(CacheError):  # `find_or_build` warns of it
            KernelCache().write_note("plans", key, json.dumps(found))
    return found


def _chosen(
    region: RegionProgram, device: TileDevice, most: float, own: Report | None
) -> dict[str, Any] | None:
    """Choose a graph of a region's entry, its tiles and schedules by the model, and prove it."""
    program = region.form.program
    limits = Limits.of(program, device.name, workers=1)
    try:
        report = own or recalled(region.form, limits, GRAPHS)
        trials = candidates_of(report, device, 1, choices=CHOICES) if report and report.found else []
        fast = (trial for trial in trials if trial.predicted <= most)
        best = next((trial for trial in fast if is_emitted(trial, device)), None)
        found = None if best is None else certified(best.found, program, limits)
    except LadderError:  # no tiles fit these sizes, no schedule this device, or no argument proves it
        return None
    if best is None or not isinstance(found, VerifiedGraph):
        return None
    proof = found.certificate
    numbers = {"seconds": best.predicted, "error": proof.error, "seed": f"{proof.seed:x}"}
    return {"text": best.lowering.text, **numbers}


def is_emitted(trial: Trial, device: TileDevice) -> bool:
    """Tell whether kernels can be emitted as scheduled: the model does not know all that must hold."""
    from ladder.lower.tvm_lock import tvm_lock

    emit, lowering = emitter_for(device), trial.lowering
    try:
        with tvm_lock():
            for node, plan in zip(lowering.blocks, lowering.schedules, strict=True):
                assert node.body is not None
                emit(node.body, device, plan, "kernel", constants_of(node, lowering.constants))
    except ScheduleError:
        return False
    return True


def weights_of(graph: Graph, sources: Mapping[str, Source], device: TileDevice) -> dict[str, Weight]:
    """Return what regions may do with the weights among a program's inputs."""
    family = family_of(device)
    return {
        name: Weight(max(1, len(source.joined)), source.dense, _is_readable(graph.tile(name), source, family))
        for name, source in sources.items()
        if source.kind in ("weight", "part")
    }


def _is_readable(tile: Tile, source: Source, family: str) -> bool:
    """Tell whether kernels take a weight's arrays: plain ``[N, K]``, or packed as they have it."""
    if source.gemm is None or source.turned:
        return False
    if source.dense:
        return True
    if not tile.ttype.is_block:
        return False
    own = gemm_of(tile.ttype, tile.known_shape, source.gemm.activation)
    return layout_of(own, family) == layout_of(source.gemm, family)


def found_jobs(part: Subgraph, device: TileDevice) -> list[Job]:
    """Return the kernels of a found graph, in the order in which they run."""
    lowering = Lowering.parse(part.found)
    return [
        replace(job, others=partial(_other_jobs, lowering, at, device))
        for at, job in enumerate(lowering.jobs(device))
    ]


def _other_jobs(lowering: Lowering, at: int, device: TileDevice) -> Iterator[Job]:
    """Yield one of the kernels by other schedules, those predicted to be fastest first."""
    from ladder.lower.blocks.candidates import ranked

    node, plans = lowering.blocks[at], lowering.schedules
    assert node.body is not None
    for found in ranked(node.body, device, constants=constants_of(node, lowering.constants)):
        if found.schedule != plans[at]:
            other = (*plans[:at], found.schedule, *plans[at + 1 :])
            yield replace(lowering, schedules=other).jobs(device)[at]


def bind_found(memory: Workspace, step: PlanStep) -> Bound:
    """Return the call of a step's kernels: what they leave for each other lies in memory of its own."""
    lowering = Lowering.parse(step.part.found)
    kernels = [memory.owner.kernels[name] for name in step.entry.split()]
    sources = dict(step.part.roles)
    read = {node.name: _reader(memory, sources[node.name]) for node in lowering.graph.inputs}
    place, target = memory.slot[step.part.outputs[0]], memory.target(step.part.outputs[0])
    left = _left_between(lowering, memory.owner.where)
    (last,) = lowering.graph.outputs

    def run(slots: Slots) -> None:
        slots[place] = out = target()
        values = {name: arrays(slots) for name, arrays in read.items()} | left
        values[last] = [out.view(-1)]
        for node, entry in zip(lowering.blocks, kernels, strict=True):
            entry(*(array for name in (*node.inputs, *node.values) for array in values[name]))

    return run


def _left_between(lowering: Lowering, where: torch.device) -> dict[str, list[torch.Tensor]]:
    """Return memory for what kernels leave for later ones."""
    tiles = {
        name: tile for node in lowering.blocks for name, tile in zip(node.values, node.tiles, strict=True)
    }
    return {
        name: [torch.empty(int(product(tile.known_shape)), dtype=torch_dtype(tile.ttype.name), device=where)]
        for name, tile in tiles.items()
        if name not in lowering.graph.outputs
    }


def _reader(memory: Workspace, value: str) -> Callable[[Slots], list[torch.Tensor]]:
    """Return what gives the arrays of an input, each as one axis."""
    if value in memory.packed:
        places = memory.packed[value]
        return lambda slots: [array.view(-1) for array in memory.weight(places)]
    slot = memory.slot[value]
    return lambda slots: [ready(slots[slot]).view(-1)]
