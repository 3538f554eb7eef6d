"""Rewriting as data: rules are (pattern, function) pairs in tuples that compose with ``+``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from ladder.ir.build import GraphBuilder, node_attributes, prune
from ladder.ir.graph import Graph, Node
from tile_types.errors import VerificationError
from tile_types.tile import Tile

MAX_SWEEPS = 100


@dataclass(frozen=True)
class Pattern:
    """Matches a value by the node that computes it.

    operators: Names it may be; empty matches any value.
    inputs: Patterns of its operands; empty matches any operands.
    name: Key of the matched value in the `Match`.
    """

    operators: tuple[str, ...] = ()
    inputs: tuple[Pattern, ...] = ()
    name: str = ""


def pattern(operators: str, *inputs: Pattern | str, name: str = "") -> Pattern:
    """Build a pattern; ``operators`` separates alternatives by ``|``, a bare text binds any value.

    Examples
    --------
    >>> pattern("convert", pattern("convert", "x"), name="outer").inputs[0].operators
    ('convert',)
    """
    parts = tuple(Pattern(name=part) if isinstance(part, str) else part for part in inputs)
    return Pattern(tuple(operators.split("|")), parts, name)


@dataclass(frozen=True)
class Match:
    """The argument of a rule's function: the builder of the new graph and the bound values.

    shared: Values that the graph reads, or returns, more than once: they stay whatever replaces the root.
    """

    builder: GraphBuilder
    root: Node
    bound: Mapping[str, str]
    shared: Set[str]

    def __getitem__(self, name: str) -> str:
        """Return the value that a pattern bound."""
        return self.bound[name]

    def node(self, name: str) -> Node:
        """Return the node that computes a bound value."""
        return self.builder.node(self.bound[name])

    def tile(self, name: str) -> Tile:
        """Return the tile of a bound value."""
        return self.builder.tile(self.bound[name])

    def attributes(self, name: str) -> dict[str, Any]:
        """Return the attributes of the node that computes a bound value."""
        return node_attributes(self.node(name))


@dataclass(frozen=True)
class Rule:
    """One rewriting.

    name: For traces.
    pattern: Matched against every node.
    function: Adds the replacement to ``match.builder`` and returns its value, or None to leave the node.
    """

    name: str
    pattern: Pattern
    function: Callable[[Match], str | None]


Rules = tuple[Rule, ...]


def rewrite(graph: Graph, rules: Sequence[Rule]) -> Graph:
    """Apply rules everywhere, nested graphs included, until none applies; drop what is unused.

    Raises VerificationError if the rules do not come to an end.
    """
    for _ in range(MAX_SWEEPS):
        result = prune(_sweep(graph, rules))
        if result == graph:
            return graph
        graph = result
    names = ", ".join(rule.name for rule in rules)
    raise VerificationError(f"rewriting {graph.name!r} did not end after {MAX_SWEEPS} sweeps; rules: {names}")


def _sweep(graph: Graph, rules: Sequence[Rule]) -> Graph:
    builder = GraphBuilder(graph.name, graph.level)
    builder.grid, builder.loops = graph.grid, graph.loops
    renamed: dict[str, str] = {}
    readers = Counter([*(value for node in graph.nodes for value in node.inputs), *graph.outputs])
    shared: set[str] = set()
    for node in graph.nodes:
        body = rewrite(node.body, rules) if node.body is not None else None
        inputs = tuple(renamed[value] for value in node.inputs)
        copy = replace(node, name=builder.fresh(node.name), inputs=inputs, body=body)
        replacement = _apply(builder, copy, rules, shared)
        if replacement is None:
            copy = replace(copy, name=builder.fresh(node.name))
            builder.insert(copy)
        values = copy.values if replacement is None else (replacement,)
        renamed.update(zip(node.values, values, strict=True))
        shared.update(renamed[value] for value in node.values if readers[value] > 1)
    return builder.finish(*(renamed[output] for output in graph.outputs))


def _apply(builder: GraphBuilder, node: Node, rules: Sequence[Rule], shared: Set[str]) -> str | None:
    """Return the replacement of the first rule that gives one."""
    for rule in rules:
        bound: dict[str, str] = {}
        if _matches_node(builder, rule.pattern, node, bound):
            replacement = rule.function(Match(builder, node, bound, shared))
            if replacement is not None:
                return replacement
    return None


def _matches_node(builder: GraphBuilder, want: Pattern, node: Node, bound: dict[str, str]) -> bool:
    if want.operators and node.operator not in want.operators:
        return False
    if want.inputs and len(want.inputs) != len(node.inputs):
        return False
    pairs = zip(want.inputs, node.inputs, strict=False)
    return all(_matches_value(builder, part, value, bound) for part, value in pairs)


def _matches_value(builder: GraphBuilder, want: Pattern, value: str, bound: dict[str, str]) -> bool:
    if want.name and bound.setdefault(want.name, value) != value:
        return False
    plain = not want.operators and not want.inputs
    return plain or _matches_node(builder, want, builder.node(value), bound)
