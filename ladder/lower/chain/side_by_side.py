"""Chains that share nothing but inputs, in one launch: the rows of each have blocks of their own."""

from __future__ import annotations

from collections.abc import Mapping as Dictionary
from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as I

from ladder.ir.graph import Graph
from ladder.lower import builder as b
from ladder.lower.chain.dialect import Dialect, Early
from ladder.lower.chain.gathers import reads_rows
from ladder.lower.chain.gpu_nest import GpuNest
from ladder.lower.chain.gpu_rows import RowLoops
from ladder.lower.chain.indices import Indices
from ladder.lower.chain.scatter import Chain
from ladder.lower.chain.vectors import ACCESS_BYTES
from ladder.movement.mapping import Mapping, mappings
from ladder.partition.rows import separate_loops
from ladder.partition.subgraphs import needed
from schedules.schedule import check
from tile_types.tile import Tile

Sizes = Dictionary[str, Any]
"""Name of an open size -> the argument."""


class Loop(GpuNest):
    """One of the chains; its arguments are among those of the kernel, but for results that are none."""

    def __init__(
        self, chain: Chain, dialect: Dialect, mapping: Mapping, cheap: bool, sizes: Sizes, arguments: Any
    ) -> None:
        self.given = sizes, arguments
        super().__init__(chain, dialect, mapping, cheap)
        check(isinstance(self.count, int), "rows side by side are of a known number")

    def declared_sizes(self, chain: Chain) -> dict[str, Any]:
        return dict(self.given[0])

    def buffer(self, name: str, tile: Tile) -> Any:
        return self.given[1].get(name)


def _mapping(graph: Graph, wave: int) -> Mapping:
    """Return rows of a warp each, held in registers where they fit."""
    held = (m.num for m in mappings(graph, wave=wave) if m.lanes == wave and m.num)
    return Mapping(wave, next(held, 0))


class SideBySide:
    """The kernel of a chain whose results fall into several loops over rows; parameters as `GpuNest`."""

    def __init__(self, chain: Chain, dialect: Dialect, cheap: bool) -> None:
        self.dialect = dialect
        sizes, arguments = declare_arguments(chain)
        parts = [part_of(chain, rows) for rows in separate_loops(chain.graph, chain.graph.outputs) or ()]
        self.nests = [
            Loop(part, dialect, _mapping(part.graph, dialect.wave), cheap, sizes, arguments) for part in parts
        ]

    def emit(self) -> None:
        lines: dict[str, Early] = {}
        for nest in self.nests:
            lines |= nest.early_lines()
        counts = [int(nest.count) for nest in self.nests]
        block, thread = self.dialect.start(sum(counts), self.dialect.wave, 0, list(lines.values()))
        if any(reads_rows(nest.graph) for nest in self.nests):
            self.dialect.watch_rows()
        first = 0
        for nest, count in zip(self.nests, counts, strict=True):
            with b.when(tirx.And(block >= first, block < first + count)):
                nest.thread = thread
                nest.open_codes()
                RowLoops(nest).team(b.bind(block - first), thread)
            first += count
        self.dialect.finish()


def declare_arguments(chain: Chain, results: bool = True) -> tuple[Sizes, dict[str, Any]]:
    """Declare the arguments of a chain in calling order: sizes, inputs, and its results."""
    graph = chain.graph
    sizes = {name: I.arg(name, I.int32()) for name in chain.sizes}
    extents = Indices(sizes)

    def declared(name: str, tile: Tile) -> Any:
        shape = [extents.extent(extent) for extent in tile.shape]
        return b.tensor(name, shape or [1], b.tir_name(tile.ttype.name), align=ACCESS_BYTES)

    arguments = {node.name: declared(node.name, node.tile) for node in graph.inputs}
    for value in graph.outputs if results else ():
        scatter = chain.scatters.get(value)
        tile = graph.tile(value) if scatter is None else scatter.base
        arguments[f"{value}_result"] = declared(f"{value}_result", tile)
    return sizes, arguments


def part_of(chain: Chain, results: tuple[str, ...]) -> Chain:
    """Return the chain that computes some of the results."""
    scatters = {value: chain.scatters[value] for value in results if value in chain.scatters}
    read = needed(chain.graph, (*results, *(scatter.ids for scatter in scatters.values())))
    return Chain(replace(read, outputs=results), scatters, chain.sizes)
