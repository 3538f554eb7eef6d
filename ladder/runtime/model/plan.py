"""The plan of a model: steps in order, each with its executor by name, and the life of every value.

A plan is data: it prints, and is what `artifact` writes. `executable` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ladder.ir.graph import Graph
from ladder.lower.chain.scatter import size_names
from ladder.partition import Subgraph
from ladder.partition.scatter import written
from ladder.partition.subgraphs import OURS
from ladder.runtime.model.chains import shared_chains
from ladder.runtime.model.library import library_title, product_title
from ladder.runtime.packed import layout_of
from tile_types.tile import Tile

COMPUTES = ("aten.", *OURS)
"""How the names of operators begin that have no effect but on their operands."""


@dataclass(frozen=True)
class PlanStep:
    """One part with what executes it.

    executor: ``"ladder gemm ..."``, ``"ladder chain <kernel>"``, or the name of torch's function.
    entry: For quantized products the text of the request for their kernels, for others of ours their names.
    constant: Whether it reads nothing that changes from call to call.
    sizes: Names of the symbolic sizes that it depends on, in the order in which a chain's kernel takes them.
    starts: Of a chain, what its kernel takes after these: see `ladder.runtime.model.chains.shared_chains`.
    """

    part: Subgraph
    executor: str
    entry: str = ""
    constant: bool = False
    sizes: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelPlan:
    """Steps in order.

    steps: All of them.
    outputs: Values that the plan gives, in the order of the graph's outputs.
    last_use: Value -> number of the last step that reads it or a view of it; results outlive all.
    in_place: Value that a step writes into an input, or into another step's result -> that.
    """

    steps: tuple[PlanStep, ...]
    tiles: Mapping[str, Tile]
    outputs: tuple[str, ...]
    last_use: Mapping[str, int] = field(default_factory=dict)
    in_place: Mapping[str, str] = field(default_factory=dict)

    def is_pure(self) -> bool:
        """Say whether all that steps call are operators of torch and of Ladder, which only compute."""
        nodes = (node for step in self.steps for node in step.part.graph.nodes)
        targets = (str(dict(node.attributes).get("target", COMPUTES[0])) for node in nodes)
        return all(target.startswith(COMPUTES) for target in targets)

    def table(self) -> list[tuple[str, str, str, str]]:
        """Return (kind, executor, operators, why it ends there) per step, for people."""
        return [(s.part.kind, s.executor, " ".join(s.part.operators), s.part.reason) for s in self.steps]

    def __str__(self) -> str:
        """Return one line per step."""
        lines = []
        for kind, executor, operators, reason in self.table():
            once = f"  [{reason}]" if reason else ""
            lines.append(f"{kind:8} {executor:44} {operators}{once}")
        return "\n".join(lines)


def make_plan(graph: Graph, parts: Sequence[Subgraph], entries: Mapping[int, str], family: str) -> ModelPlan:
    """Return the plan of parts.

    parts: In order.
    entries: Number of a chain or quantized product among the parts -> its `PlanStep.entry`.
    family: ``"cpu"`` or ``"cuda"``.
    """
    constant: set[str] = set()
    starts = {number: own for number, (_, own) in shared_chains(parts).items()}
    in_place = {value: base for part in parts for value, base in written(part).items()}
    changed = set(in_place.values())
    steps = []
    for number, part in enumerate(parts):
        names = size_names(part.graph)
        fixed = part.kind in ("chain", "view") and all(value in constant for value in part.inputs)
        fixed = fixed and not names and not changed.intersection(part.outputs)
        constant |= set(part.outputs) if fixed else set()
        entry = entries.get(number, "")
        executor = _EXECUTORS[part.kind](part, entry, family)
        steps.append(PlanStep(part, executor, entry, fixed, names, starts.get(number, ())))
    last = _last_uses(steps, graph.outputs)
    for value, base in reversed(in_place.items()):
        last[base] = max(last[base], last[value])
    return ModelPlan(tuple(steps), _tiles(graph, parts), graph.outputs, last, in_place)


def _prologue_title(part: Subgraph, entry: str, family: str) -> str:
    return f"{_gemm_title(part, entry, family)}, its rows made in the kernel"


def _gemm_title(part: Subgraph, entry: str, family: str) -> str:
    assert part.gemm is not None  # that is what a gemm part has
    after = " ".join([*part.gemm.epilogue, *([f"{part.gemm.gate} gate"] if part.gemm.gate else [])])
    layout = layout_of(part.gemm, family).split(" scale=")[0].replace("=", " ")
    return f"ladder gemm {layout}{' + ' + after if after else ''}"


_EXECUTORS: Mapping[str, Any] = {
    "gemm": _gemm_title,
    "prologue": _prologue_title,
    "found": lambda part, entry, family: f"ladder found {entry.rpartition('_')[2]}",
    "rows": lambda part, entry, family: f"ladder rows {entry.rpartition('_')[2]}",
    "chain": lambda part, entry, family: f"ladder chain {entry.rpartition('_')[2]}",
    "recurrent": lambda part, entry, family: f"ladder recurrent {entry.rpartition('_')[2]}",
    "codes": lambda part, entry, family: f"ladder {library_title(part.graph).removeprefix('torch ')}",
    "elements": lambda part, entry, family: f"ladder {library_title(part.graph).removeprefix('torch ')}",
    "fourier": lambda part, entry, family: f"ladder {library_title(part.graph).removeprefix('torch ')}",
    "attention": lambda part, entry, family: f"ladder attention {entry.rpartition('_')[2]}",
    "cached_attention": lambda part, entry, family: (
        f"ladder attention {entry.rpartition('_')[2]}, with its rows"
    ),
    "product": lambda part, entry, family: product_title(part),
    "library": lambda part, entry, family: library_title(part.graph),
    "view": lambda part, entry, family: "address",
    "torch": lambda part, entry, family: "torch, operator by operator",
}
"""Kind of part -> title of what executes it."""


def _tiles(graph: Graph, parts: Sequence[Subgraph]) -> dict[str, Tile]:
    wanted = [node.name for node in graph.inputs] + [v for part in parts for v in part.outputs]
    return {value: replace(graph.tile(value), layout=None) for value in wanted}


def _last_uses(steps: Sequence[PlanStep], outputs: Sequence[str]) -> dict[str, int]:
    """Return when each value is read last; what a view shows lives as long as the view."""
    last: dict[str, int] = dict.fromkeys(outputs, len(steps))
    for number in reversed(range(len(steps))):
        part = steps[number].part
        ends = [last.setdefault(value, number) for value in part.outputs]
        for value in part.inputs:
            until = max([number, *ends]) if part.shares else number
            last[value] = max(last.get(value, 0), until)
    return last
