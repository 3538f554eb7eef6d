"""Attention as block graphs of every kind, and near misses of them: for the soundness suites."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from superopt_programs import OTHER_OPERATOR, Pair, _map_mutations, differ, mutated

from ladder.ir import Graph
from ladder.ir.graph import Node
from ladder.ir.ops import get_operator
from ladder.superopt.generator import GraphStep, Mapping, Program, Structure, get_program, instantiate
from ladder.superopt.generator.structure import Prefix
from tile_types.errors import LadderError

OPERANDS = (0, 1, 2)
AXES = {"H": (0, 0, 0), "M": (1, -1, -1), "E": (-1, -1, 2), "S": (-1, 2, 1)}
"""Dimension -> the axis of Q, K and V."""


def mapping(grid: str, loop: str | None, split: str | None) -> Mapping:
    imap = tuple(tuple(AXES[name][operand] for name in grid) for operand in OPERANDS)
    fmap = tuple((axis,) for axis in AXES[loop]) if loop else ((), (), ())
    return Mapping(tuple(grid), tuple(loop or ()), imap, fmap, ("H",), split)


def steps(looped: bool, split: bool) -> tuple[GraphStep, ...]:
    """Scores, exponentials, their sums over keys, products with V; accumulated, combined, divided."""
    rows: list[tuple[str, tuple[int, ...], Any]] = [
        ("matmul", (0, 1), ()), ("exp", (3,), ()), ("reduce_sum", (4,), (("axis", 2),)),
        ("matmul", (4, 2), ()),
    ]  # fmt: skip
    pair = (5, 6)
    for operator, attributes, wanted in (
        ("accumulate", (("kind", "sum"),), looped),
        ("combine", (), split),
    ):
        if wanted:
            first = 3 + len(rows)
            rows += [(operator, (value,), attributes) for value in pair]
            pair = (first, first + 1)
    rows.append(("div", pair[::-1], ()))
    return tuple(GraphStep(tuple(sorted(ops, reverse=True)), name, ops, given) for name, ops, given in rows)


KINDS = {
    "one block": ("H", None, None), "rows": ("HM", None, None), "flash": ("H", "S", None),
    "flash rows": ("HM", "S", None), "flash columns": ("HE", "S", None), "split": ("HS", None, "S"),
    "decoding": ("HS", "S", "S"), "decoding rows": ("HMS", "S", "S"), "decoding columns": ("HES", "S", "S"),
}  # fmt: skip
"""Name -> grid, loop, split."""


def structures() -> Iterator[tuple[str, Structure]]:
    """Yield every kind, relative to a maximum and not."""
    for (name, (grid, loop, split)), shifted in itertools.product(KINDS.items(), (True, False)):
        structure = Structure(
            Prefix((), OPERANDS),
            mapping(grid, loop, split),
            steps(loop is not None, split is not None),
            shifted,
        )
        yield f"{name}{' shifted' if shifted else ''}", structure


def small(structure: Structure, extents: dict[str, int] | None = None) -> tuple[Program, dict[str, int]]:
    """Return the program at two of each factor but heads, or what ``extents`` says."""
    program = get_program("gqa")
    names = {d: structure.mapping.factors(d) for d in program.sizes}
    factors = {name: 1 if d == "H" else 2 for d, found in names.items() for name in found}
    factors |= {name: n for name, n in (extents or {}).items() if name in factors}
    sizes = dict.fromkeys(names, 1)
    for d, found in names.items():
        for name in found:
            sizes[d] *= factors[name]
    return program.resized(**sizes), factors


def pair(name: str, structure: Structure, extents: dict[str, int] | None = None) -> Pair:
    """Return the program and a block graph of it."""
    program, factors = small(structure, extents)
    return Pair(name, program.graph(), instantiate(structure, program, factors))


def near_misses(one: Pair) -> Iterator[Pair]:
    """Yield the pair with one thing of the second graph changed that changes its value, says float64."""
    for what, changed in _changes(one.second):
        try:
            if differ(one.first, changed, points=1):
                yield Pair(f"{one.name}: {what}", one.first, changed)
        except (LadderError, ValueError, IndexError):
            continue  # it does not run at all


def _changes(graph: Graph) -> Iterator[tuple[str, Graph]]:
    blocks = [node for node in graph.nodes if node.body is not None]
    for node in blocks:
        assert node.body is not None
        for what, body in _block_changes(node.body):
            changed = replace(node, body=body)
            yield what, replace(graph, nodes=tuple(changed if n is node else n for n in graph.nodes))
    for a, b in itertools.combinations(range(len(blocks[-1].inputs)), 2):
        inputs = list(blocks[-1].inputs)
        inputs[a], inputs[b] = inputs[b], inputs[a]
        changed = replace(blocks[-1], inputs=tuple(inputs))
        yield f"operands {a} and {b}", replace(graph, nodes=(*graph.nodes[:-1], changed))


def _block_changes(body: Graph) -> Iterator[tuple[str, Graph]]:
    for node in body.nodes:
        for what, change in _node_changes(node):
            changed = mutated(body, node, change)
            if changed is not None:
                yield f"%{node.name}: {what}", changed
    for label in ("grid", "loops"):
        for number, axis in enumerate(getattr(body, label)):
            for extent in (axis.extent - 1, axis.extent + 1):
                axes = list(getattr(body, label))
                axes[number] = replace(axis, extent=extent)
                if extent > 0:
                    yield f"{axis.name}={extent}", replace(body, **{label: tuple(axes)})


def _node_changes(node: Node) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = dict(node.attributes).get("kind", "sum")
    if node.operator == "accumulate":
        for other in {"sum": ("last",), "max": ("last", "sum"), "rescale": ("sum", "last")}[str(kind)]:
            given = get_operator("accumulate").stored({"kind": other})
            yield f"{other} for {kind}", {"inputs": node.inputs[:1], "attributes": given}
    if node.operator in ("reduce_sum", "reduce_max"):
        for axis in (1, 2):
            yield f"axis {axis}", {"attributes": (("axis", axis),)}
        other = {"reduce_sum": "reduce_max", "reduce_max": "reduce_sum"}[node.operator]
        yield other, {"operator": other}
    if node.operator in ("sub", "div", "matmul"):
        yield "swapped operands", {"inputs": node.inputs[::-1]}
    if node.operator in ("sub", "div", "exp"):
        yield "dropped", {"drop": node.inputs[0]}
    if node.operator == "matmul":
        yield "transposed operand", {"attributes": (("transpose_b", True), *node.attributes)}
    for other in OTHER_OPERATOR.get(node.operator, ()):
        yield other, {"operator": other}
    yield from (
        (what, {"attributes": get_operator(node.operator).stored({**dict(node.attributes), **given})})
        for what, given in _map_mutations(node)
        if node.operator != "accumulate"
    )
