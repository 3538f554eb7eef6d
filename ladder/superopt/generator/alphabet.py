"""The operators that a search may use, taken from the program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ladder.ir.build import prune
from ladder.ir.graph import Graph, Literal, Node
from ladder.ir.operator import Operator
from ladder.ir.ops import get_operator
from ladder.superopt.generator.structure import CONSTANT, Links
from tile_types.errors import ScheduleError

LONG_PROGRAM = 10
"""Programs of more operators are searched with their chains as single operators."""

SPECIAL = ("input", "constant", "convert", "matmul", "reduce_sum", "reduce_max")
"""Operators besides element-wise ones that a program may have."""

NAMED = {operator: step for step, operator in CONSTANT.items()}
"""Operators that take a constant -> their steps."""

COMMUTATIVE = ("add", "mul", "maximum", "minimum")


@dataclass(frozen=True)
class Alphabet:
    """Operators that a search may use.

    unary, commutative, ordered: Element-wise rows of the table by how operands are enumerated.
    constants, offsets: Numbers that values may be scaled with, and that may be added.
    matmul, reduce_sum, concat: Whether matrix products, sums and products of concatenations may be used.
    transposed: Whether products with a transposed right operand may be used.
    chains: Sequences of operators of one operand that are one step, as in ``sqrt(mean(x * x))``.
    """

    unary: tuple[str, ...]
    commutative: tuple[str, ...]
    ordered: tuple[str, ...]
    constants: tuple[float, ...]
    offsets: tuple[float, ...]
    matmul: bool = True
    reduce_sum: bool = True
    concat: bool = True
    transposed: bool = False
    chains: tuple[Links, ...] = ()

    @staticmethod
    def of(graph: Graph) -> Alphabet:
        """Take a program's own operators, and add, mul, div; maxima that are only subtracted are left out."""
        graph = without_maxima(graph)
        chains, left = _contracted(graph)
        rows = {node.operator: get_operator(node.operator) for node in left}
        binary = sorted({"add", "mul", "div"} | {name for name, row in rows.items() if _is_binary(row)})
        products = [node for node in left if node.operator == "matmul"]
        used = {
            name: {n for node in left if node.operator == name for n in _numbers(graph, node)}
            for name in NAMED
        }
        return Alphabet(
            tuple(sorted(name for name, row in rows.items() if row.unary)),
            tuple(name for name in binary if name in COMMUTATIVE),
            tuple(name for name in binary if name not in COMMUTATIVE),
            tuple(sorted(used["mul"])),
            tuple(sorted(used["add"])),
            bool(products),
            "reduce_sum" in rows,
            len(products) > 1,
            any(dict(node.attributes).get("transpose_b") for node in products),
            tuple(sorted({tuple(link_of(graph, node) for node in chain) for chain in chains})),
        )


def _contracted(graph: Graph) -> tuple[list[list[Node]], list[Node]]:
    """Return the chains of a long program without maxima, and its other operators."""
    computing = [node for node in graph.nodes if node.operator not in ("input", "constant", "convert")]
    chains = list(chains_of(graph)) if len(computing) > LONG_PROGRAM else []
    inside = {node.name for chain in chains for node in chain}
    return chains, [node for node in computing if node.name not in inside]


def numbers_of(graph: Graph) -> list[float]:
    """Return the numbers of a program in the order of its operators, whatever its sizes are."""
    return [number for node in graph.nodes for number in _numbers(graph, node)]


def steps_of(graph: Graph) -> int:
    """Return how many steps a program itself is, chains of a long one being one each."""
    chains, left = _contracted(without_maxima(graph))
    return len(chains) + len(left)


def _is_binary(row: Operator) -> bool:
    return row.elementwise and row.arity == (2, 2)


def _numbers(graph: Graph, node: Node) -> list[float]:
    producers = [graph.producer(value) for value in node.inputs]
    return [float(dict(p.attributes)["value"]) for p in producers if p.operator == "constant"]  # type: ignore[arg-type]


def operands_of(graph: Graph, node: Node) -> list[str]:
    """Return the operands that are no constants."""
    return [value for value in node.inputs if graph.producer(value).operator != "constant"]


def link_of(graph: Graph, node: Node) -> tuple[str, tuple[tuple[str, Literal], ...]]:
    """Return a node of a chain as a link."""
    numbers = _numbers(graph, node)
    return (NAMED[node.operator], (("value", numbers[0]),)) if numbers else (node.operator, node.attributes)


def _links(graph: Graph, node: Node) -> bool:
    """Whether a node can be part of a chain."""
    numbered = node.operator in NAMED and len(_numbers(graph, node)) == 1
    return numbered or node.operator == "reduce_sum" or get_operator(node.operator).unary


def chains_of(graph: Graph) -> Iterator[list[Node]]:
    """Yield the longest sequences of operators of one operand whose results nothing else uses."""
    users: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            users.setdefault(value, []).append(node)

    def follower(node: Node) -> Node | None:
        after = users.get(node.name, [])
        alone = len(after) == 1 and node.name not in graph.outputs
        return after[0] if alone and _links(graph, after[0]) else None

    inner = {found.name for node in graph.nodes if _links(graph, node) and (found := follower(node))}
    for node in graph.nodes:
        if _links(graph, node) and node.name not in inner:
            chain = [node]
            while (after := follower(chain[-1])) is not None:
                chain.append(after)
            if len(chain) > 1:
                yield chain


def without_maxima(graph: Graph) -> Graph:
    """Return a program with ``x`` for each ``x - max``.

    Raises ScheduleError if a maximum is used otherwise.
    """
    renamed: dict[str, str] = {}
    nodes: list[Node] = []
    maxima = {node.name for node in graph.nodes if node.operator == "reduce_max"}
    for node in graph.nodes:
        inputs = tuple(renamed.get(value, value) for value in node.inputs)
        if node.operator == "sub" and inputs[1] in maxima:
            renamed[node.name] = inputs[0]
        elif maxima & set(inputs):
            raise ScheduleError(
                "the search has maxima only to be subtracted, as softmax does:"
                f" %{node.name} of {graph.name!r}"
            )
        else:
            nodes.append(Node(node.name, node.operator, inputs, node.attributes, node.tiles, node.body))
    outputs = tuple(renamed.get(value, value) for value in graph.outputs)
    return prune(Graph(graph.name, graph.level, tuple(nodes), outputs))


def _is_codes(graph: Graph, node: Node) -> bool:
    """Whether an input is only converted to the result's type."""
    result = graph.tile(graph.outputs[0]).ttype
    users = [user for user in graph.nodes if node.name in user.inputs]
    return node.tile.ttype != result and all(
        user.operator == "convert" and user.tile.ttype == result for user in users
    )


def require_searchable(graph: Graph) -> None:
    """Check that the search can express a program at all.

    Raises ScheduleError: Names what it cannot: an operator, several results, types that differ or are
        quantized.
    """
    if len(graph.outputs) != 1:
        raise ScheduleError(
            f"the search takes programs of one result, {graph.name!r} has {len(graph.outputs)}"
        )
    plain = [node for node in graph.inputs if not _is_codes(graph, node)]
    types = {tile.ttype for tile in (*(node.tile for node in plain), graph.tile(graph.outputs[0]))}
    if len(types) > 1 or any(node.tile.ttype.is_block for node in graph.inputs):
        names = ", ".join(sorted(ttype.name for ttype in types))
        raise ScheduleError(
            f"the search takes result and inputs of one element type, but for codes that are only converted"
            f" to it; {graph.name!r} has {names}"
        )
    for node in graph.nodes:
        if node.operator not in NAMED and _numbers(graph, node):
            raise ScheduleError(
                f"the search has constants only as factors and terms, not in {node.operator} (%{node.name})"
            )
        if not (get_operator(node.operator).elementwise or node.operator in SPECIAL):
            raise ScheduleError(
                f"the search has no {node.operator} yet (%{node.name} of {graph.name!r});"
                f" it has {', '.join(SPECIAL)} and element-wise operators"
            )
    without_maxima(graph)
