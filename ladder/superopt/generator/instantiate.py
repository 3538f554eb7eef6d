"""From a structure to a tile graph, for any extents of the factors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping as Numbers
from collections.abc import Sequence
from typing import Any

from ladder.ir.build import GraphBuilder, bind
from ladder.ir.graph import Graph
from ladder.superopt.generator.program import Program
from ladder.superopt.generator.space import Mapping, Step, Structure
from tile_types.errors import ShapeError
from tile_types.tile import Extent

ACCUMULATOR = "float32"
TILES = (16, 32, 64, 128, 256)
"""Extents of a split dimension in a tile that are tried."""


def axes_of(program: Program) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Return the dimensions of every input and of the output."""
    graph = program.symbolic
    inputs = tuple(tuple(map(str, node.tile.shape)) for node in graph.inputs)
    return inputs, tuple(map(str, graph.tile(graph.outputs[0]).shape))


def instantiate(structure: Structure, program: Program, factors: Numbers[str, int] | None = None) -> Graph:
    """Return the kernel graph with one block graph.

    Parameters
    ----------
    factors
        Number for each factor of the mapping: ``Ng``, ``Kl``, ``Nt`` ...; without, they stay symbols.

    Notes
    -----
    Matrix products take operands of the inputs' type and accumulate in float32; everything else is
    computed in float32; the result is stored in the program's type.
    """
    graph = _Builder(structure, program).graph()
    return graph if factors is None else bind(graph, factors)


class _Builder:
    def __init__(self, structure: Structure, program: Program) -> None:
        self.structure, self.program = structure, program
        mapping = structure.mapping
        loops = {f"{mapping.loop}l": f"{mapping.loop}l"} if mapping.loop else {}
        grid = {f"{dimension}g": f"{dimension}g" for dimension in mapping.grid}
        self.block = GraphBuilder(f"{program.name}_block", "block", grid=grid, loops=loops)
        self.values: list[str] = []
        self.converted: dict[tuple[str, str], str] = {}

    def graph(self) -> Graph:
        program, mapping = self.program, self.structure.mapping
        g = GraphBuilder(program.name)
        inputs, output = axes_of(program)
        operands = [
            g.input(node.name, node.tile.ttype, self._full(axes))
            for node, axes in zip(program.symbolic.inputs, inputs, strict=True)
        ]
        self.ttype = program.symbolic.inputs[0].tile.ttype.name
        for number, (node, axes) in enumerate(zip(program.symbolic.inputs, inputs, strict=True)):
            self._load(number, node.name.lower(), axes)
        for step in self.structure.steps:
            self.values.append(self._step(step))
        result = program.symbolic.tile(program.symbolic.outputs[0]).ttype.name
        stored = self.block.add(
            "store", self._as(self.values[-1], result),
            grid=tuple(output.index(dimension) for dimension in mapping.grid), shape=self._full(output),
        )  # fmt: skip
        return g.finish(*g.nest(self.block.finish(stored), *operands, name="Y"))

    def _full(self, axes: Sequence[str]) -> tuple[Extent, ...]:
        return tuple(self.structure.mapping.full(axis) for axis in axes)

    def _load(self, number: int, name: str, axes: Sequence[str]) -> None:
        mapping = self.structure.mapping
        source = self.block.input(f"{name}_in", self.ttype, self._full(axes))
        loop = (mapping.fmap[number],) if mapping.loop else ()
        shape = mapping.tile(number, axes)
        load = self.block.add("load", source, name=name, grid=mapping.imap[number], loop=loop, shape=shape)
        self.values.append(load)

    def _as(self, value: str, ttype: str) -> str:
        if self.block.tile(value).ttype.name == ttype:
            return value
        key = (value, ttype)
        if key not in self.converted:
            self.converted[key] = self.block.add("convert", value, type=ttype)
        return self.converted[key]

    def _step(self, step: Step) -> str:
        operands = [self.values[i] for i in step.operands]
        attributes: dict[str, Any] = dict(step.attributes)
        if step.operator == "accumulate":
            return self.block.add("accumulate", *operands, **attributes)
        if step.operator == "matmul":
            return self._matmul(*operands)
        if step.operator == "concat_matmul":
            a, b, c, d = (self._as(value, self.ttype) for value in operands)
            return self._matmul(
                self.block.add("concat", a, b, axis=1), self.block.add("concat", c, d, axis=0)
            )
        wide = [self._as(value, ACCUMULATOR) for value in operands]
        if step.operator == "scale":
            constant = self.block.add("constant", type=ACCUMULATOR, **attributes)
            return self.block.add("mul", *wide, constant)
        return self.block.add(step.operator, *wide, **attributes)

    def _matmul(self, a: str, b: str) -> str:
        return self.block.add("matmul", self._as(a, self.ttype), self._as(b, self.ttype), type=ACCUMULATOR)


def small_factors(mapping: Mapping, program: Program, extent: int) -> dict[str, int]:
    """Return factors that are all ``extent``: for the quick test of a candidate."""
    return {name: extent for dimension in program.sizes for name in mapping.factors(dimension)}


def small_program(mapping: Mapping, program: Program, factors: Numbers[str, int]) -> Graph:
    """Return the program with the extents that the factors give."""
    return program.graph({d: math.prod(factors[name] for name in mapping.factors(d)) for d in program.sizes})


def symbolic_program(mapping: Mapping, program: Program) -> Graph:
    """Return the program with the factors of a mapping as extents."""
    return program.graph({dimension: mapping.full(dimension) for dimension in program.sizes})


def choose_factors(
    structure: Structure, program: Program, units: int, capacity: int
) -> tuple[dict[str, int], float]:
    """Return factors for the program's own sizes and what a block loads, times the waves of blocks.

    Parameters
    ----------
    units
        Multiprocessors of the device.
    capacity
        Bytes of shared memory that the tiles of a block may take together.

    Raises
    ------
    ShapeError
        If no tile divides the sizes and fits.
    """
    best: tuple[float, dict[str, int]] | None = None
    for factors in _candidates(structure.mapping, program):
        graph = instantiate(structure, program, factors)
        body = graph.nodes[-1].body
        assert body is not None
        loads = [node for node in body.nodes if node.operator == "load"]
        used = sum(node.tile.nbytes for node in body.nodes if node.tile.level == "shared")
        if used > capacity:
            continue
        blocks = math.prod(factors[f"{dimension}g"] for dimension in structure.mapping.grid)
        steps = factors[f"{structure.mapping.loop}l"] if structure.mapping.loop else 1
        cost = float(-(-blocks // units) * steps * sum(node.tile.nbytes for node in loads))
        if best is None or cost < best[0]:
            best = (cost, factors)
    if best is None:
        raise ShapeError(f"no tiles of {TILES} divide {dict(program.sizes)} and fit {capacity} bytes")
    return best[1], best[0]


def _candidates(mapping: Mapping, program: Program) -> list[dict[str, int]]:
    choices = []
    for dimension, size in program.sizes.items():
        *split, tile = mapping.factors(dimension)
        if not split:
            choices.append([{tile: size}])
            continue
        tiles = [t for t in TILES if size % t == 0 and t < size]
        choices.append([{split[0]: size // t, tile: t} for t in tiles])
    return [
        {name: number for part in parts for name, number in part.items()}
        for parts in itertools.product(*choices)
    ]
