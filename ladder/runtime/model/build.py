"""From an imported program to something that runs: simplify, partition, kernels, plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ladder.partition import partition, simplify
from ladder.runtime.build import Kernel
from ladder.runtime.compile import family_of, load_entry, target_of
from ladder.runtime.model.chains import chain_kernels
from ladder.runtime.model.executable import Executable
from ladder.runtime.model.joined import Join, Joined, joins_of
from ladder.runtime.model.plan import Plan, make_plan

if TYPE_CHECKING:
    import torch

    from ladder.ir.graph import Graph
    from ladder.runtime.model.program import Program


@dataclass(frozen=True)
class Built:
    """A model ready to run, with what it was made from.

    Parameters
    ----------
    program
        As imported, simplified.
    plan
        The steps.
    kernels
        Kernel name -> the library on disk.
    executable
        The call.
    """

    program: Program
    plan: Plan
    kernels: dict[str, Kernel]
    executable: Executable

    @cached_property
    def graph(self) -> Graph:
        """The simplified tile graph."""
        return self.program.graph


def build_model(program: Program, where: torch.device) -> Built:
    """Compile a program for the device that its tensors are on.

    Raises
    ------
    LadderError
        If a part has no executor there; the message names it.
    """
    from targets import get_device

    device = get_device(target_of(where))
    graph = simplify(program.graph)
    packed = [name for name, source in program.sources.items() if source.kind in ("weight", "part")]
    parts = partition(graph, packed, updated_inputs(program, graph), side_by_side=device.is_gpu)
    chains = [number for number, part in enumerate(parts) if part.kind == "chain"]
    kernels = chain_kernels([parts[number].graph for number in chains], device)
    entries = {number: kernel.entry for number, kernel in zip(chains, kernels, strict=True)}
    family = family_of(device)
    plan = make_plan(graph, parts, entries, family)
    loaded = {kernel.entry: load_entry(kernel, family) for kernel in kernels}
    executable = bind_program(program, plan, loaded, where)
    return Built(
        replace(program, graph=graph), plan, {kernel.entry: kernel for kernel in kernels}, executable
    )


def updated_inputs(program: Program, graph: Graph) -> dict[str, str]:
    """Return result of the graph -> the input that takes it."""
    inputs = {s.at[0]: name for name, s in program.sources.items() if s.kind == "argument" and s.at}
    return {graph.outputs[at]: inputs[place] for place, at in program.updates if place in inputs}


def bind_program(program: Program, plan: Plan, kernels: dict[str, Any], where: torch.device) -> Executable:
    """Return the call of a plan."""
    bindings, packs, held = {}, {}, {}
    joins: list[Join] = []
    for name, source in program.sources.items():
        at = source.at
        if source.joined:
            new = joins_of(source)
            at = tuple(range(program.arguments + len(joins), program.arguments + len(joins) + len(new)))
            joins += new
        if source.kind == "weight":
            packs[name] = at
        elif source.kind == "held":
            held[name] = program.held[at[0]]
        elif source.kind == "argument":
            bindings[name] = at[0]
    return Executable(
        plan, bindings, packs, held, program.results, program.updates, kernels, where, Joined(joins)
    )
