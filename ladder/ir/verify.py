"""The one verifier of tile graphs; runs after every pass."""

from __future__ import annotations

from collections.abc import Mapping

from ladder.ir.build import infer_tile
from ladder.ir.graph import LEVELS, Graph, Node
from ladder.ir.operator import Operator
from ladder.ir.ops import get_operator
from tile_types.errors import LadderError, VerificationError
from tile_types.tile import Tile

PLACES = {
    "kernel": ("dram",),
    "block": ("l2", "shared", "l1", "scratch", "register"),
}
"""Memory levels that a graph's own results may live at; its operands are in DRAM."""

MAX_GRID = 3
_STAGE_OF_ROLE = {"load": "loaded", "accumulate": "accumulated", "store": "stored"}


def verify(graph: Graph) -> None:
    """Check a graph and all graphs nested in it.

    Checked: names are unique identifiers; every operand is defined before its use (so there
    is no cycle); operators, arities and attributes are in the table; every tile is what its
    operator infers; memory levels fit the graph level; block graphs have at most 3 grid
    dimensions and every path from an operand to an output passes exactly one input iterator,
    one accumulator (if there is a loop) and one store (Mirage, §2).

    Raises VerificationError: Names graph, node and reason.
    """
    _check_graph(graph)
    defined: dict[str, Tile] = {}
    for node in graph.nodes:
        _check_names(graph, node, defined)
        _check_node(graph, node, [defined[value] for value in node.inputs])
        _check_places(graph, node)
        if node.body is not None:
            verify(node.body)
        defined.update(zip(node.values, node.tiles, strict=True))
    for output in graph.outputs:
        if output not in defined:
            raise VerificationError(f"graph {graph.name!r} returns %{output}, which no node defines")
    if graph.level == "block":
        _check_paths(graph)


def _error(graph: Graph, node: Node, reason: object) -> VerificationError:
    return VerificationError(f"graph {graph.name!r}, node %{node.name} = {node.operator}(...): {reason}")


def _check_graph(graph: Graph) -> None:
    problems = {
        f"level {graph.level!r} is none of {', '.join(LEVELS)}": graph.level not in LEVELS,
        f"{graph.name!r} is no identifier": not graph.name.isidentifier(),
        "a graph needs an output": not graph.outputs,
        "only block graphs have grid and loop dimensions": graph.level != "block"
        and bool(graph.grid or graph.loops),
        f"{len(graph.grid)} grid dimensions, at most {MAX_GRID}": len(graph.grid) > MAX_GRID,
    }
    for axis in (*graph.grid, *graph.loops):
        bad = not axis.name.isidentifier() or (isinstance(axis.extent, int) and axis.extent < 1)
        problems[f"dimension {axis.name}={axis.extent} needs a name and a positive extent"] = bad
    for reason, found in problems.items():
        if found:
            raise VerificationError(f"graph {graph.name!r}: {reason}")


def _check_names(graph: Graph, node: Node, defined: Mapping[str, Tile]) -> None:
    if not node.name.isidentifier():
        raise _error(graph, node, "the name is no identifier")
    if node.name in defined:
        raise _error(graph, node, "the name is taken by an earlier node")
    if not node.tiles:
        raise _error(graph, node, "a node needs a result")
    for value in node.inputs:
        if value not in defined:
            later = any(value in other.values for other in graph.nodes)
            reason = (
                "is defined only later: nodes must be in order, without cycles" if later else "is undefined"
            )
            raise _error(graph, node, f"operand %{value} {reason}")


def _check_node(graph: Graph, node: Node, tiles: list[Tile]) -> None:
    try:
        operator = get_operator(node.operator)
        operator.check_arity(len(tiles))
        if operator.stored(dict(node.attributes)) != node.attributes:
            raise VerificationError("attributes must be sorted, each once, without those at their default")
        expected = _expected_tiles(graph, node, operator, tiles)
    except LadderError as error:
        raise _error(graph, node, error) from error
    if graph.level not in operator.levels:
        allowed = " or ".join(operator.levels)
        raise _error(graph, node, f"belongs in a {allowed} graph, this is a {graph.level} graph")
    stated = [(tile.ttype, tile.shape) for tile in node.tiles]
    wanted = [(tile.ttype, tile.shape) for tile in expected]
    if stated != wanted:
        raise _error(graph, node, f"states {_show(node.tiles)}, its operands give {_show(expected)}")


def _show(tiles: list[Tile] | tuple[Tile, ...]) -> str:
    return ", ".join(f"{tile.ttype.name}[{', '.join(map(str, tile.shape))}]" for tile in tiles)


def _expected_tiles(graph: Graph, node: Node, operator: Operator, tiles: list[Tile]) -> list[Tile]:
    if (node.body is not None) != (operator.role == "graph"):
        raise VerificationError("exactly the graph-defined operators carry a graph")
    if node.body is not None:
        return _body_tiles(node.body, node, tiles)
    if operator.role == "input":
        return list(node.tiles[:1])
    if operator.role == "call":
        return list(node.tiles)
    return [infer_tile(operator, tiles, dict(node.attributes), node.tile.level, graph.loops)]


def _body_tiles(body: Graph, node: Node, tiles: list[Tile]) -> list[Tile]:
    """Return the results of a nested graph after checking its operands."""
    if body.level != node.operator:
        raise VerificationError(f"carries a {body.level} graph")
    operands = [operand.tile for operand in body.inputs]
    if [(t.ttype, t.shape, t.level) for t in operands] != [(t.ttype, t.shape, t.level) for t in tiles]:
        raise VerificationError(f"operands are {_show(tiles)}, its graph takes {_show(operands)}")
    return [body.tile(output) for output in body.outputs]


def _check_places(graph: Graph, node: Node) -> None:
    role = get_operator(node.operator).role
    outer = role in ("input", "store")
    allowed = PLACES["kernel" if outer else graph.level]
    for tile in node.tiles:
        if tile.level not in allowed:
            raise _error(graph, node, f"lives in {tile.level!r}, allowed here: {', '.join(allowed)}")


def _check_paths(graph: Graph) -> None:
    """Apply the path rule: operand, load, (accumulate,) store, each exactly once."""
    chain = ["operand", "loaded", *(["accumulated"] if graph.loops else []), "stored"]
    stages: dict[str, str | None] = {}
    for node in graph.nodes:
        stage = _stage(graph, node, [stages[value] for value in node.inputs], chain)
        stages.update(dict.fromkeys(node.values, stage))
    for output in graph.outputs:
        if stages[output] != "stored":
            raise VerificationError(f"graph {graph.name!r} returns %{output} without a store on its path")


def _stage(graph: Graph, node: Node, operands: list[str | None], chain: list[str]) -> str | None:
    """Return how far along the chain a value is; None for constants, which lie on no path."""
    role = get_operator(node.operator).role
    if role == "input":
        return "operand"
    found = list(dict.fromkeys(stage for stage in operands if stage is not None))
    if len(found) > 1:
        raise _error(graph, node, f"mixes operands that are {' and '.join(found)}: paths must match")
    stage = found[0] if found else None
    if role in _STAGE_OF_ROLE:
        return _advanced(graph, node, stage, chain, _STAGE_OF_ROLE[role])
    if stage in ("operand", "stored"):
        raise _error(graph, node, f"uses a value that is {stage}: only loaded values can be computed with")
    return stage


def _advanced(graph: Graph, node: Node, stage: str | None, chain: list[str], target: str) -> str:
    """Check that ``target`` follows ``stage`` in the chain."""
    if target not in chain:
        raise _error(graph, node, "accumulates, but the block graph has no loop")
    required = chain[chain.index(target) - 1]
    if stage is not None and stage != required:
        raise _error(
            graph,
            node,
            f"its operand is {stage}, it must be {required}: every path passes exactly one input"
            " iterator, one accumulator (if looped) and one store",
        )
    _check_dimensions(graph, node, target)
    return target


def _check_dimensions(graph: Graph, node: Node, target: str) -> None:
    """Check that loads and stores name an axis (or -1) for each grid and loop dimension."""
    attributes = dict(node.attributes)
    wanted = {"loaded": ("grid", "loop"), "stored": ("grid",)}.get(target, ())
    counts = {"grid": len(graph.grid), "loop": len(graph.loops)}
    for label in wanted:
        axes = attributes.get(label, ())
        assert isinstance(axes, tuple)  # checked with the attributes
        if len(axes) != counts[label]:
            raise _error(
                graph, node, f"{label}={axes} must name an axis for each of {counts[label]} dimensions"
            )
    if target == "stored" and -1 in attributes.get("grid", ()):  # type: ignore[operator]
        raise _error(
            graph, node, "every grid dimension must split an axis of the result, or blocks write the same"
        )
