"""Running passes: functions from graph to graph, verified and dumped one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ladder.ir.graph import Graph
from ladder.ir.printer import print_graph
from ladder.ir.verify import verify
from ladder.knobs import settings, write_dump
from ladder.rewrite.rules import Rule, rewrite
from tile_types.errors import VerificationError


@dataclass(frozen=True)
class Pass:
    """A named function from graph to graph."""

    name: str
    function: Callable[[Graph], Graph]


def rewriting(name: str, rules: Sequence[Rule]) -> Pass:
    """Return the pass that applies rules to a fixed point."""
    return Pass(name, lambda graph: rewrite(graph, rules))


def run_passes(graph: Graph, passes: Sequence[Pass]) -> Graph:
    """Apply passes in order; verify before the first and after each.

    The folder ``LADDER_DUMP`` receives every stage as ``{graph}.{number}.{pass}.txt``.
    Raises VerificationError: Names the pass that broke the graph.
    """
    folder = settings.dump
    stages = [Pass("input", lambda unchanged: unchanged), *passes]
    for number, stage in enumerate(stages):
        graph = stage.function(graph)
        try:
            verify(graph)
        except VerificationError as error:
            _dump(folder, number, f"{stage.name} broken", graph)
            raise VerificationError(f"after pass {stage.name!r}: {error}") from error
        _dump(folder, number, stage.name, graph)
    return graph


def _dump(folder: Path | None, number: int, name: str, graph: Graph) -> None:
    if folder is None:
        return
    safe = re.sub(r"\W+", "_", name)
    write_dump(folder / f"{graph.name}.{number:02d}.{safe}.txt", print_graph(graph) + "\n")
