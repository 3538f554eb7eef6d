"""Chains that one block computes one after the other: how their kernel is described, built and called."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder.ir.parser import parse
from ladder.ir.printer import print_graph
from ladder.partition.scatter import written
from ladder.partition.sequences import source_of
from ladder.runtime.build import Job
from ladder.runtime.cache import Identity
from ladder.runtime.model.chains import canonical_chain
from ladder.runtime.model.entry_calls import ready
from tile_types.errors import DTypeError, ScheduleError, ShapeError

if TYPE_CHECKING:
    from ladder.ir.graph import Graph
    from ladder.lower.build import BuiltModule
    from ladder.lower.chain.sequence import Stage
    from ladder.partition import Subgraph
    from ladder.runtime.model.plan import PlanStep
    from ladder.runtime.model.workspace import Bound, Slots, Workspace
    from targets import TileDevice


def described(graph: Graph, group: Sequence[Subgraph], device: TileDevice) -> str:
    """Return the description of the kernel of some chains of a model; empty if there is none."""
    numbers: dict[str, int] = {}
    made = {value for part in group for value in part.outputs}
    stages = []
    for part in group:
        sources = [source_of(graph, value, made) for value in part.inputs]
        inputs = [numbers.setdefault(value, len(numbers)) for value in sources]
        outputs = [numbers.setdefault(value, len(numbers)) for value in part.outputs]
        stages.append([print_graph(canonical_chain(part.graph)), inputs, outputs])
    text = json.dumps({"stages": stages, "values": list(numbers)})
    return text if _is_emitted(json.dumps(stages), device) else ""


def stages_of(text: str) -> list[Stage]:
    """Return the chains of a description."""
    from ladder.lower.chain.sequence import Stage

    return [Stage(parse(graph), tuple(a), tuple(b)) for graph, a, b in json.loads(text)["stages"]]


@cache
def _is_emitted(stages: str, device: TileDevice) -> bool:
    from ladder.lower.chain.sequence import emit_sequence
    from ladder.lower.tvm_lock import tvm_lock

    try:
        with tvm_lock():
            emit_sequence(stages_of(json.dumps({"stages": json.loads(stages)})), device, "kernel")
    except (ScheduleError, ShapeError, DTypeError):
        return False
    return True


def sequence_jobs(part: Subgraph, device: TileDevice) -> list[Job]:
    """Return the kernel of a sequence."""
    facts = {"sequence": json.dumps(json.loads(part.found)["stages"])}
    name = f"ladder_sequence_{hashlib.sha256(facts['sequence'].encode()).hexdigest()[:10]}"

    def make(folder: Path) -> BuiltModule:
        from ladder.lower.build import build_function
        from ladder.lower.chain.sequence import emit_sequence

        stages = stages_of(part.found)
        return build_function(lambda name: emit_sequence(stages, device, name), name, device, folder)

    return [Job(facts, Identity.of(None, device), device, make)]


def bind_sequence(memory: Workspace, step: PlanStep) -> Bound:
    """Return the call: what no chain makes, then what chains make."""
    from ladder.lower.chain.sequence import arguments_of

    part, entry = step.part, memory.owner.kernels[step.entry]
    values, stages = json.loads(part.found)["values"], stages_of(part.found)
    read, made = ([values[number] for number in numbers] for numbers in arguments_of(stages))
    in_place = written(part)
    tiles = memory.owner.plan.tiles
    reads = [(memory.slot[value], tiles[value].shape == ()) for value in read]
    writes = [(memory.slot[value], memory.target(value), value in in_place) for value in made]

    def run(slots: Slots) -> None:
        given: list[Any] = [ready(slots[slot]) for slot, _ in reads]
        given = [x.reshape(1) if number else x for x, (_, number) in zip(given, reads, strict=True)]
        results = []
        for slot, target, _ in writes:
            slots[slot] = result = target()
            results.append(result)
        into = [ready(result) if put else result for result, (_, _, put) in zip(results, writes, strict=True)]
        entry(*given, *(x if x.ndim else x.reshape(1) for x in into))
        for result, copy in zip(results, into, strict=True):
            if copy is not result:  # an argument that lies otherwise
                result.copy_(copy)

    return run
