"""Sequences: small chains that read one another become one part, which one block computes in one launch.

A chain of a few thousand elements takes less time than its launch. Partition leaves such chains apart where
a row of one needs more of another than a row: routers of mixtures of experts, norms of heads before a rotary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ladder.ir.build import draws
from ladder.ir.graph import Graph
from ladder.partition.subgraphs import Subgraph, extract, outside_inputs

MOST_WORK = 180_000
"""Elements that a chain computes at most, each of its operators counted: a block of one multiprocessor takes
about 0.8 µs for them at 128 lanes a clock, and a launch 2."""

MOST_STAGES = 8

Work = Callable[[Graph], int]
"""A chain -> the elements that it computes."""

Lower = Callable[[Sequence[Subgraph]], str]
"""Chains in order -> how their kernel is described; empty if there is none."""


def with_sequences(graph: Graph, parts: Sequence[Subgraph], work: Work, lower: Lower) -> list[Subgraph]:
    """Return parts with small chains that read one another as one part each."""
    groups = _Groups(parts, work).groups()
    found = list(parts)
    for group in groups:
        text = lower(group)
        if text:
            gone = {id(part) for part in group}
            at = max(number for number, part in enumerate(found) if id(part) in gone)
            found[at] = _joined(graph, group, text)
            found = [part for part in found if id(part) not in gone]
    return found


def _joined(graph: Graph, group: Sequence[Subgraph], text: str) -> Subgraph:
    """Return chains as one part; all that each gives, it gives."""
    members = {n.name for part in group for n in part.graph.nodes if n.operator != "input"}
    outputs = tuple(value for part in group for value in part.outputs)
    region, inputs = extract(graph, members, outputs, "sequence"), outside_inputs(graph, members)
    return Subgraph("sequence", region, inputs, outputs, group[-1].reason, found=text)


class _Groups:
    """Finds chains that may be computed one after the other.

    parts: In order.
    work: Counts what a chain computes.
    """

    def __init__(self, parts: Sequence[Subgraph], work: Work) -> None:
        self.parts, self.work = parts, work
        self.maker = {value: at for at, part in enumerate(parts) for value in part.outputs}
        self.constant: set[int] = set()
        self.above: list[set[int]] = []
        for at, part in enumerate(parts):
            direct = {self.maker[value] for value in part.inputs if value in self.maker}
            self.above.append(direct.union(*(self.above[other] for other in direct)))
            if part.kind in ("chain", "view") and direct <= self.constant and len(direct) == len(part.inputs):
                self.constant.add(at)

    def groups(self) -> list[list[Subgraph]]:
        """Return the groups of two chains and more."""
        found: list[list[int]] = []
        for at in range(len(self.parts)):
            if not self._is_small(at):
                continue
            made = {self._source(value) for value in self.parts[at].inputs}
            own = [at]
            for group in [group for group in found if made & {*group}]:
                wider = sorted((*own, *group))
                if len(wider) <= MOST_STAGES and self._is_closed({*wider}):
                    found.remove(group)
                    own = wider
            found.append(own)
        return [[self.parts[at] for at in group] for group in found if len(group) > 1]

    def _is_small(self, at: int) -> bool:
        part = self.parts[at]
        nodes = part.graph.nodes
        known = all(isinstance(e, int) and e for node in nodes for tile in node.tiles for e in tile.shape)
        if part.kind != "chain" or at in self.constant or not known or any(map(draws, nodes)):
            return False
        return "map" not in part.operators and self.work(part.graph) <= MOST_WORK

    def _source(self, value: str) -> int | None:
        """Return the part that makes a value, or what the value is a reshaped view of; None: no part does."""
        made = self.maker.get(value)
        while made is not None and self.parts[made].kind == "view" and self._is_reshape(made):
            made = self.maker.get(self.parts[made].inputs[0])
        return made

    def _is_closed(self, group: set[int]) -> bool:
        """Tell whether nothing that is made from a group outside of it is read within."""
        read = {self._source(value) for at in group for value in self.parts[at].inputs} - group
        return not any(made is not None and self.above[made] & group for made in read)

    def _is_reshape(self, at: int) -> bool:
        return not set(self.parts[at].operators) - {"reshape"}


def source_of(graph: Graph, value: str, made: set[str]) -> str:
    """Return the value among those made of which another is a reshaped view; itself, if it is none."""
    seen = value
    while seen not in made:
        node = graph.producer(seen)
        if node.operator != "reshape":
            return value
        seen = node.inputs[0]
    return seen
