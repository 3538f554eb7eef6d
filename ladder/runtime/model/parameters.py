"""What a program computes of a model's parameters and buffers alone is computed once, not at every call.

Tables of relative positions, resampled embeddings of positions, normalised weights, rotary angles: the plan
makes them as it makes folded weights (`ladder.runtime.model.joined`): again after a parameter was changed.
"""

from __future__ import annotations

from dataclasses import replace

from ladder.ir.build import draws, node_attributes
from ladder.ir.folding import Folded, with_inputs
from ladder.ir.graph import Graph, Node
from ladder.runtime.model.library import VIEWS, resolve
from ladder.runtime.model.nodes import EVALUATED
from ladder.runtime.model.program import Program, Source
from tile_types.tile import Tile

MOST_BYTES = 16 << 20
"""Of one value that is kept beside the parameters, unless it takes no more than what it is computed of."""

PRODUCTS = ("matmul", "contract")
"""Operators whose operands are packed for kernels: these stay as the program has them."""

CHEAP = (*VIEWS, "convert", "constant", "iota")
"""Operators for which alone no value is kept."""


def with_parameters_computed(program: Program) -> Program:
    """Return a program with inputs in place of what is computed of parameters and buffers alone.

    Nothing changes where each operator's result must be rounded as the program has it, nor of parameters
    that the program itself writes.
    """
    written = {at for at, _ in program.updates}
    own = {
        name
        for name, source in program.sources.items()
        if source.of_model and source.graph is None and source.at[0] not in written
    }
    if program.precise or not own:
        return program
    return with_made(program, with_inputs(program.graph, _roots(program.graph, own)))


def with_made(program: Program, found: Folded) -> Program:
    """Return a program of this graph, whose new inputs are made of the arguments that their graphs read."""
    sources = dict(program.sources)
    for name, graph in found.made.items():
        read = tuple((sources[node.name].at[0],) for node in graph.inputs)
        sources[name] = Source("argument", joined=read, graph=graph)
    return replace(program, graph=found.graph, sources=sources)


def _roots(graph: Graph, own: set[str]) -> list[str]:
    """Return the values of the model alone that other nodes read, below moves of their elements.

    What a call returns is made by every call: the caller may write it.
    """
    alone = {name: False for name in own if _is_known(graph.tile(name))}
    """Value of the model alone -> whether it takes work."""
    read = {name: graph.tile(name).nbytes for name in alone}
    """Value of the model alone -> bytes of the largest tensor that it is computed of."""
    roots: dict[str, None] = {}
    returned = {_source(graph, value) for value in graph.outputs}
    for node in graph.nodes:
        if node.operator == "input":
            continue
        if _evaluated(graph, node) and all(value in alone for value in node.inputs):
            alone[node.name] = node.operator not in CHEAP or any(alone[value] for value in node.inputs)
            read[node.name] = max((read[value] for value in node.inputs), default=0)
            continue
        if node.operator in PRODUCTS:
            continue
        for value in node.inputs:
            root = _source(graph, value) if value in alone else ""
            if not root or not alone[root] or root in returned:
                continue
            if graph.tile(root).nbytes <= max(MOST_BYTES, read[root]):
                roots[root] = None
    return list(roots)


def _evaluated(graph: Graph, node: Node) -> bool:
    """Tell whether torch computes a node from its operands alone, to one new tensor of a known shape."""
    if len(node.tiles) != 1 or draws(node) or not _is_known(node.tile):
        return False
    return node.operator in EVALUATED or (node.operator == "call" and _is_function(node))


def _is_known(tile: Tile) -> bool:
    return not tile.ttype.is_block and all(isinstance(extent, int) for extent in tile.shape)


def _is_function(node: Node) -> bool:
    """Tell whether an operator of torch writes nothing, and gives nothing but what it has made."""
    target = str(node_attributes(node)["target"])
    if not target.startswith(("aten.", "ladder.")):
        return False
    schema = resolve(target)._schema
    return not schema.is_mutable and all(item.alias_info is None for item in schema.returns)


def _source(graph: Graph, value: str) -> str:
    """Return the value whose elements another one shows, in a type that is no narrower."""
    while True:
        node = graph.producer(value)
        wider = node.operator == "convert" and (
            node.tile.ttype.elem_bits >= graph.tile(node.inputs[0]).ttype.elem_bits
        )
        if node.operator not in VIEWS and not wider:
            return value
        value = node.inputs[0]
