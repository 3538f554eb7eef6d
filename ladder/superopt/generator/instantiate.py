"""From a structure to a tile graph, for any extents of the factors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping as Numbers
from collections.abc import Sequence
from typing import Any

from ladder.ir.build import GraphBuilder, bind
from ladder.ir.graph import Graph
from ladder.superopt.expressions import Pruner
from ladder.superopt.generator.program import Program
from ladder.superopt.generator.space import (
    WHOLE,
    Mapping,
    Prefix,
    Step,
    Structure,
    dimensions_of,
    replayed,
)
from tile_types.errors import ShapeError

ACCUMULATOR = "float32"
LAUNCH_BYTES = 64 * 1024
"""What a unit loads in the 2 µs of another launch, at 4.2 TB/s over 132 units."""

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


class _Emitter:
    """Adds steps to a graph, with the conversions that they need."""

    def __init__(self, builder: GraphBuilder, ttype: str, values: Sequence[str] = ()) -> None:
        self.builder, self.ttype = builder, ttype
        self.values = list(values)
        self.converted: dict[tuple[str, str], str] = {}

    def cast(self, value: str, ttype: str) -> str:
        """Return the value in a type."""
        if self.builder.tile(value).ttype.name == ttype:
            return value
        key = (value, ttype)
        if key not in self.converted:
            self.converted[key] = self.builder.add("convert", value, type=ttype)
        return self.converted[key]

    def step(self, step: Step) -> str:
        """Add a step and return its result."""
        operands = [self.values[i] for i in step.operands]
        attributes: dict[str, Any] = dict(step.attributes)
        if step.operator == "accumulate":
            return self.builder.add("accumulate", *operands, **attributes)
        if step.operator == "matmul":
            return self._matmul(*operands)
        if step.operator == "concat_matmul":
            a, b, c, d = (self.cast(value, self.ttype) for value in operands)
            rows = self.builder.add("concat", a, b, axis=1)
            return self._matmul(rows, self.builder.add("concat", c, d, axis=0))
        wide = [self.cast(value, ACCUMULATOR) for value in operands]
        if step.operator == "scale":
            constant = self.builder.add("constant", type=ACCUMULATOR, **attributes)
            return self.builder.add("mul", *wide, constant)
        return self.builder.add(step.operator, *wide, **attributes)

    def _matmul(self, a: str, b: str) -> str:
        a, b = self.cast(a, self.ttype), self.cast(b, self.ttype)
        return self.builder.add("matmul", a, b, type=ACCUMULATOR)


class _Builder:
    """Builds the kernel graph of a structure over symbols."""

    def __init__(self, structure: Structure, program: Program) -> None:
        self.structure, self.program = structure, program
        self.ttype = program.symbolic.inputs[0].tile.ttype.name

    def graph(self) -> Graph:
        """Return it."""
        g = GraphBuilder(self.program.name)
        inputs, _ = axes_of(self.program)
        mapping, prefix = self.structure.mapping, self.structure.prefix
        names = [
            g.input(node.name, node.tile.ttype, [mapping.full(axis) for axis in axes])
            for node, axes in zip(self.program.symbolic.inputs, inputs, strict=True)
        ]
        kernels = _Emitter(g, self.ttype, names)
        for step in prefix.steps:
            kernels.values.append(kernels.cast(kernels.step(step), self.ttype))
        operands = [kernels.values[i] for i in prefix.operands]
        return g.finish(*g.nest(self._block(g, operands), *operands, name="Y"))

    def _block(self, kernel: GraphBuilder, operands: Sequence[str]) -> Graph:
        mapping = self.structure.mapping
        loops = {f"{mapping.loop}l": f"{mapping.loop}l"} if mapping.loop else {}
        grid = {f"{dimension}g": f"{dimension}g" for dimension in mapping.grid}
        b = GraphBuilder(f"{self.program.name}_block", "block", grid=grid, loops=loops)
        axes = operand_axes(self.structure.prefix, self.program)
        loop = [(axis,) if mapping.loop else () for axis in mapping.fmap]
        emitter = _Emitter(b, self.ttype)
        for number, name in enumerate(operands):
            source = b.input(f"{name.lower()}_in", self.ttype, kernel.tile(name).shape)
            emitter.values.append(
                b.add(
                    "load", source, name=name.lower(), grid=mapping.imap[number], loop=loop[number],
                    shape=mapping.tile(number, axes[number]),
                )
            )  # fmt: skip
        for step in self.structure.steps:
            emitter.values.append(emitter.step(step))
        _, output = axes_of(self.program)
        ttype = self.program.symbolic.tile(self.program.symbolic.outputs[0]).ttype.name
        stored = b.add(
            "store", emitter.cast(emitter.values[-1], ttype),
            grid=tuple(output.index(dimension) for dimension in mapping.grid),
            shape=tuple(mapping.full(dimension) for dimension in output),
        )  # fmt: skip
        return b.finish(stored)


def operand_axes(prefix: Prefix, program: Program) -> list[tuple[str, ...]]:
    """Return the dimensions of what a block graph takes after a prefix."""
    inputs, _ = axes_of(program)
    named = [(axes, node.name) for axes, node in zip(inputs, program.symbolic.inputs, strict=True)]
    values = replayed(prefix.steps, named, WHOLE, Pruner((), enabled=False))
    return [dimensions_of(values[i][0]) for i in prefix.operands]


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
    """Return factors for the program's own sizes, and the bytes that a unit moves, kernels included.

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
        kernels = sum(graph.tile(v).nbytes for node in graph.nodes[:-1] for v in (node.name, *node.inputs))
        kernels -= sum(node.tile.nbytes for node in graph.inputs)
        cost = -(-blocks // units) * steps * sum(node.tile.nbytes for node in loads) + kernels / units
        cost += LAUNCH_BYTES * len(structure.prefix.steps)
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
