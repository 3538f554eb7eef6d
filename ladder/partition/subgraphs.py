"""`Subgraph`: connected nodes of a model that one kernel or call computes, and their extraction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from tile_types.tile import Tile

CALLS = ("attention", "recurrent", "codes", "elements", "fourier")
"""Kinds of parts that are one operator by kernels of ours, for which torch has a function too."""

OWN_KINDS = ("gemm", "prologue", "found", "rows", "chain", "cached_attention", *CALLS)
"""Kinds of parts whose kernels are ours: they write into memory that they are given."""

COUNTING = tuple(kind for kind in OWN_KINDS if kind not in ("gemm", "prologue"))
"""Kinds of parts whose kernels count the elements of a tensor in 32 bits."""

KINDS = (*OWN_KINDS, "product", "library", "view", "torch")
"""``gemm``: a quantized product by a kernel of ours; ``prologue``: one whose kernel computes its activation
rows, by a chain; ``found``: what kernels of a found graph compute;
``cached_attention``: attention whose kernel makes q, and puts keys and values into caches, by a chain;
``rows``: a product of rows with a float matrix by one of ours; ``attention``, ``recurrent``: attention or a
recurrent layer by one; ``codes``: a call on codes of 8 bits by some; ``elements``: a gather or scatter by
number, by one; ``fourier``: a transform of frames to frequencies by one; ``product``: one that torch
computes; ``torch``: what is for a kernel of ours but has none, node by node; the others
as `ladder.ir.operator.ENGINES`."""


FORMS = "ladder_functional"
"""Namespace of functional forms of operators that write arguments: their results are tensors of their own."""

JOINT = "__"
"""Stands between namespace and name of the operator in the name of its form."""

OURS = ("ladder.", f"{FORMS}.ladder{JOINT}")
"""How the names of operators of ours begin, and those of their functional forms."""


def is_form(node: Node) -> bool:
    """Tell whether a node calls such a form."""
    return str(dict(node.attributes).get("target")).startswith(f"{FORMS}.")


@dataclass(frozen=True)
class Subgraph:
    """Connected nodes of a model, and what executes them.

    kind: One of `KINDS`.
    graph: Its tile graph: the inputs are values of the model, under their names there.
    inputs, outputs: Values of the model that it reads and makes.
    reason: Why what follows it is not part of it.
    gemm: Of a gemm, with a prologue or without: the problem.
    roles: Of a gemm: which input is what (``A``, ``B``, ``bias``, ``token_scale``; ``X0``, ``X1``, ... are a
        prologue's); of a found graph: its input and the value of the model that it reads there.
    found: Of a found graph: its kernels, as `ladder.runtime.fused.Lowering` prints them; of a prologue: the
        kernel, as `ladder.runtime.model.prologues.Described` prints it.
    """

    kind: str
    graph: Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reason: str = ""
    gemm: Gemm | None = None
    roles: tuple[tuple[str, str], ...] = field(default=())
    found: str = ""

    @cached_property
    def shares(self) -> bool:
        """Whether its results may lie in the memory of what it reads."""
        called = (node for node in self.graph.nodes if node.operator == "call")
        return self.kind in ("view", "torch") or not all(map(is_form, called))

    @cached_property
    def outside(self) -> dict[str, str]:
        """Input of its tile graph -> the value of the model that it is."""
        return dict(zip((node.name for node in self.graph.inputs), self.inputs, strict=True))

    @property
    def by_role(self) -> dict[str, str]:
        """Role in a gemm -> the value of the model that has it."""
        return {role: self.outside[name] for role, name in self.roles}

    @cached_property
    def operators(self) -> tuple[str, ...]:
        """Names of its operators, without numbers and inputs."""
        return tuple(
            node.operator for node in self.graph.nodes if node.operator != "input" and engine(node) != "leaf"
        )


def engine(node: Node) -> str:
    """Return what executes a node: inputs are ``input``, else the table's column."""
    row = get_operator(node.operator)
    return "input" if row.role == "input" else row.engine


def extract(graph: Graph, members: Collection[str], outputs: Sequence[str], name: str = "part") -> Graph:
    """Return the subgraph of the nodes ``members``; what they read from outside becomes inputs."""
    inside = _inside(graph, members)
    made = {value for node in inside for value in node.values}
    read = dict.fromkeys(value for node in inside for value in node.inputs if value not in made)
    inputs = tuple(Node(_input_name(value), "input", (), (), (_plain(graph.tile(value)),)) for value in read)
    renamed = {value: _input_name(value) for value in read}
    nodes = tuple(replace(n, inputs=tuple(renamed.get(v, v) for v in n.inputs)) for n in inside)
    return Graph(name, "kernel", (*inputs, *nodes), tuple(outputs))


def needed(graph: Graph, outputs: Sequence[str]) -> Graph:
    """Return the graph of some of the results, without what none of them needs."""
    names, ahead = set[str](), [*outputs]
    while ahead:
        node = graph.producer(ahead.pop())
        if node.name not in names:
            names.add(node.name)
            ahead += node.inputs
    return replace(graph, nodes=tuple(n for n in graph.nodes if n.name in names), outputs=tuple(outputs))


def outside_inputs(graph: Graph, members: Collection[str]) -> tuple[str, ...]:
    """Return the values that members read from outside, in the order of `extract`'s inputs."""
    inside = _inside(graph, members)
    made = {value for node in inside for value in node.values}
    return tuple(dict.fromkeys(value for node in inside for value in node.inputs if value not in made))


def part_of(kind: str, graph: Graph, node: Node, reason: str = "") -> Subgraph:
    """Return the part that is one node."""
    region = extract(graph, {node.name}, node.values)
    return Subgraph(kind, region, outside_inputs(graph, {node.name}), node.values, reason)


def call_of(graph: Graph) -> Node:
    """Return the call that a part is."""
    return next(node for node in graph.nodes if node.operator == "call")


def _inside(graph: Graph, members: Collection[str]) -> list[Node]:
    """Return the nodes of some names, in the order of the graph."""
    return [graph.nodes[at] for at in sorted(graph.positions[name] for name in members)]


def _input_name(value: str) -> str:
    """Return a name for an input; further results of a node have a dot."""
    return value.replace(".", "_result_")


def _plain(tile: Tile) -> Tile:
    return replace(tile, layout=None)
