"""Products of rows less their mean, as `layer_norm` has them: searched as programs of the difference.

What an input contributes is the difference alone. So block graphs are searched that take it, and are then
given the input, and the mean, which a kernel before them computes in float32. All of it is proved like any
other graph.
"""

from __future__ import annotations

from collections.abc import Mapping as Sizes
from dataclasses import dataclass, replace

from ladder.ir.build import prune
from ladder.ir.graph import Graph, Node
from ladder.superopt.generator.alphabet import link_of
from ladder.superopt.generator.program import Extents, Program
from ladder.superopt.generator.structure import GraphStep, Prefix, Structure


@dataclass(frozen=True)
class Centred:
    """A program in which an input occurs only less the mean of its rows.

    number: Of the input.
    total, mean, difference: Names of the sum, the mean, and what is left.
    """

    original: Program
    number: int
    total: str
    mean: str
    difference: str

    @property
    def program(self) -> Program:
        """The program of the difference, in place of the input."""
        return replace(self.original, define=self.define)

    def define(self, extents: Extents, sizes: Sizes[str, int]) -> Graph:
        """Return the graph of the difference."""
        graph = self.original.define(extents, sizes)
        name = graph.inputs[self.number].name
        nodes = [
            replace(node, inputs=tuple(name if value == self.difference else value for value in node.inputs))
            for node in graph.nodes if node.name not in (self.total, self.mean, self.difference)
        ]  # fmt: skip
        return prune(replace(graph, nodes=tuple(nodes)))

    def completed(self, structure: Structure) -> Structure:
        """Return a structure of the difference as one of the input: the mean is one operand more."""
        prefix, mapping, count = structure.prefix, structure.mapping, len(structure.prefix.operands)
        place = prefix.operands.index(self.number)
        mean = len(self.original.symbolic.inputs) + len(prefix.steps)
        links = tuple(link_of(self.original.symbolic, self._node(name)) for name in (self.total, self.mean))
        steps = (*prefix.steps, GraphStep((self.number,), "chain", (self.number,), (("links", links),)))
        rows = [
            (*axes, tuple(-1 if axis == self._last else axis for axis in axes[place]))
            for axes in (mapping.imap, mapping.fmap)
        ]
        numbers = [*range(count), *range(count + 2, count + 2 + len(structure.steps))]
        numbers[place] = count + 1
        moved = [step.renumbered(numbers) for step in structure.steps]
        difference = GraphStep((count, place), "sub", (place, count))
        return replace(
            structure,
            prefix=Prefix(steps, (*prefix.operands, mean)),
            mapping=replace(mapping, imap=rows[0], fmap=rows[1]),
            steps=(difference, *(replace(s, newest=tuple(sorted(s.newest, reverse=True))) for s in moved)),
        )

    @property
    def _last(self) -> int:
        return len(self.original.symbolic.inputs[self.number].tile.shape) - 1

    def _node(self, name: str) -> Node:
        return self.original.symbolic.producer(name)


def centred(program: Program) -> Centred | None:
    """Return how a program subtracts the mean of an input's rows before its products; None if it does not."""
    graph = program.symbolic
    users = {node.name: [user for user in graph.nodes if node.name in user.inputs] for node in graph.nodes}

    def only(name: str, operator: str) -> Node | None:
        found = [user for user in users[name] if user.operator == operator]
        return found[0] if len(found) == 1 and name not in graph.outputs else None

    for number, node in enumerate(graph.inputs if program.multiplies else ()):
        total, difference = only(node.name, "reduce_sum"), only(node.name, "sub")
        mean = total and only(total.name, "mul")
        if not (total and mean and difference and len(users[node.name]) == 2):
            continue
        row = dict(total.attributes)["axis"] == len(node.tile.shape) - 1
        alone = len(users[total.name]) == len(users[mean.name]) == 1
        if row and alone and difference.inputs == (node.name, mean.name):
            return Centred(program, number, total.name, mean.name, difference.name)
    return None
