"""From a structure to a tile graph, for any extents of the factors."""

from __future__ import annotations

import math
from collections.abc import Mapping as Numbers
from collections.abc import Sequence
from dataclasses import replace

from ladder.ir.build import GraphBuilder, bind
from ladder.ir.extents import product
from ladder.ir.graph import Graph
from ladder.superopt.expressions import Pruner
from ladder.superopt.generator.alphabet import numbers_of
from ladder.superopt.generator.emitter import ACCUMULATOR, Emitter, Shift
from ladder.superopt.generator.program import Program
from ladder.superopt.generator.space import replayed
from ladder.superopt.generator.structure import FINAL, UNIT_AXIS, WHOLE, GraphStep, Mapping, Prefix, Structure
from tile_types.errors import ScheduleError
from tile_types.tile import Extent


def axes_of(program: Program) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Return the dimensions of every input and of the output."""
    graph = program.symbolic
    inputs = tuple(tuple(map(str, node.tile.shape)) for node in graph.inputs)
    return inputs, tuple(map(str, graph.tile(graph.outputs[0]).shape))


def instantiate(
    structure: Structure, program: Program, factors: Numbers[str, int] | None = None, *, packed: bool = False
) -> Graph:
    """Return the kernel graph with one block graph, or two if blocks share a reduction.

    Parameters
    ----------
    factors
        Number for each factor of the mapping: ``Ng``, ``Kl``, ``Nt`` ...; without, they stay symbols.
    packed
        Whether quantized weights are operands; otherwise their values are, as in the program's graph.

    Notes
    -----
    Matrix products take operands of the inputs' type and accumulate in float32; everything else is
    computed in float32, and so are the sums, whole or in parts, that kernels leave for each other; the
    result is stored in the program's type.

    Raises
    ------
    ScheduleError
        If exponentials are to be relative to a maximum and that cannot be carried through the steps.
    """
    graph = _Builder(structure, program, packed).graph()
    return graph if factors is None else without_single_sums(bind(graph, factors))


def without_single_sums(graph: Graph) -> Graph:
    """Return a graph without sums and maxima over one element: tiles of a loop's dimension may hold one."""
    renamed: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        inputs = tuple(renamed.get(value, value) for value in node.inputs)
        if node.operator in ("reduce_sum", "reduce_max") and graph.tile(node.inputs[0]) == node.tile:
            renamed[node.name] = inputs[0]
            continue
        body = without_single_sums(node.body) if node.body is not None else None
        nodes.append(replace(node, inputs=inputs, body=body))
    return replace(graph, nodes=tuple(nodes))


class _Builder:
    """Builds the kernel graph of a structure over symbols."""

    def __init__(self, structure: Structure, program: Program, packed: bool) -> None:
        self.structure, self.program, self.mapping = structure, program, structure.mapping
        self.ttype = program.symbolic.tile(program.symbolic.outputs[0]).ttype.name
        self.types: Numbers[str, str] = program.packed if packed else {}
        self.output = axes_of(program)[1]
        self.stages = structure.stages()
        self.own = len(structure.prefix.operands)

    def graph(self) -> Graph:
        if not self.structure.shifted:
            return self._graph(None)
        reasons = []
        for axis in reversed(range(len(self.output))):
            try:
                return self._graph(axis)
            except ScheduleError as error:
                reasons.append(str(error))
        raise ScheduleError(f"no running maximum: {'; '.join(dict.fromkeys(reasons))}")

    def _graph(self, softmax_axis: int | None) -> Graph:
        g = GraphBuilder(self.program.name)
        inputs, _ = axes_of(self.program)
        prefix = self.structure.prefix
        kernels = Emitter(g, self.ttype)
        for number, (node, axes) in enumerate(zip(self.program.symbolic.inputs, inputs, strict=True)):
            shape = [self.mapping.full(axis) for axis in axes]
            kernels.values[number] = g.input(node.name, self.types.get(node.name, node.tile.ttype), shape)
        for number, step in enumerate(prefix.steps, len(inputs)):
            kernels.add(number, step)
            sums = any(operator == "reduce_sum" for operator, _ in step.links)
            kernels.values[number] = kernels.cast(kernels.values[number], ACCUMULATOR if sums else self.ttype)
        operands = [kernels.values[i] for i in prefix.operands]
        if self.mapping.split is None:
            return g.finish(*g.nest(self._whole(g, operands, softmax_axis), *operands, name="Y"))
        parts, left = self._parts(g, operands, softmax_axis)
        partial = g.nest(parts, *operands, name="P")
        return g.finish(*g.nest(self._combination(g, partial, left), *partial, name="Y"))

    def _block(
        self, kernel: GraphBuilder, operands: Sequence[str], softmax_axis: int | None
    ) -> tuple[GraphBuilder, Emitter]:
        """Return the block graph with all steps but those that combine parts."""
        mapping = self.mapping
        loops = {f"{dimension}l": f"{dimension}l" for dimension in mapping.loops}
        grid = {f"{dimension}g": f"{dimension}g" for dimension in mapping.grid}
        b = GraphBuilder(f"{self.program.name}_block", "block", grid=grid, loops=loops)
        axes = operand_axes(self.structure.prefix, self.program)
        emitter = Emitter(b, self.ttype, softmax_axis)
        for number, name in enumerate(operands):
            whole = kernel.tile(name)
            source = b.input(f"{name.lower()}_in", whole.ttype, whole.shape)
            emitter.values[number] = b.add(
                "load", source, name=name.lower(), grid=mapping.imap[number], loop=mapping.fmap[number],
                shape=mapping.tile(number, axes[number]),
            )  # fmt: skip
        for number, step in self._steps():
            if self.stages[number] != FINAL:
                emitter.add(number, step)
        return b, emitter

    def _steps(self) -> list[tuple[int, GraphStep]]:
        return list(enumerate(self.structure.steps, self.own))

    def _whole(self, kernel: GraphBuilder, operands: Sequence[str], softmax_axis: int | None) -> Graph:
        b, emitter = self._block(kernel, operands, softmax_axis)
        return b.finish(self._stored(b, emitter))

    def _stored(self, b: GraphBuilder, emitter: Emitter) -> str:
        """Store the last value as the program's result."""
        last = len(self.stages) - 1
        if last in emitter.shifts:
            raise ScheduleError("the result is relative to a maximum")
        return b.add(
            "store", emitter.cast(emitter.values[last], self.ttype),
            grid=tuple(self.output.index(axis.name[:-1]) for axis in b.grid),
            shape=tuple(self.mapping.full(dimension) for dimension in self.output),
        )  # fmt: skip

    def _parts(
        self, kernel: GraphBuilder, operands: Sequence[str], softmax_axis: int | None
    ) -> tuple[Graph, dict[str, tuple[int, Shift | None]]]:
        """Return the first block graph, which stores what is to be combined and the maxima of that.

        And for each of its results which value it is, or -1, and what that is relative to.
        """
        b, emitter = self._block(kernel, operands, softmax_axis)
        combined = [step.operands[0] for _, step in self._steps() if step.operator == "combine"]
        stores: dict[str, tuple[int, Shift | None]] = {}
        tops: dict[Shift, str] = {}
        for value in combined:
            shift = emitter.shifts.get(value)
            if shift is not None and shift not in tops:
                tops[shift] = self._store_part(b, emitter.top(shift))
                stores[tops[shift]] = (-1, shift)
            stores[self._store_part(b, emitter.cast(emitter.values[value], "float32"))] = (value, shift)
        return b.finish(*stores), stores

    def _store_part(self, b: GraphBuilder, value: str) -> str:
        tile = b.tile(value).shape
        grid = self._part_axes(tile)
        return b.add("store", value, grid=grid, shape=self._part_shape(tile, grid))

    def _part_shape(self, tile: Sequence[Extent], grid: Sequence[int]) -> tuple[Extent, ...]:
        names = [f"{dimension}g" for dimension in self.mapping.grid]
        return tuple(
            product([*(name for name, where in zip(names, grid, strict=True) if where == axis), extent])
            for axis, extent in enumerate(tile)
        )

    def _part_axes(self, tile: Sequence[Extent]) -> tuple[int, ...]:
        """Return the axis of a part that each grid dimension splits: its own, or one of extent 1.

        What a part does not vary with is stored by each block for itself. Parts along the reduction are
        joined to the rows, as the fastest of what blocks number.
        """
        rows = max(0, len(tile) - 2)
        single = [axis for axis, extent in enumerate(tile) if extent == 1]
        found = []
        for dimension in self.mapping.grid:
            own = [axis for axis, extent in enumerate(tile) if (extent,) == self.mapping.left(dimension)]
            leading = [self.output.index(dimension)] if dimension in self.mapping.batch else []
            found.append(rows if dimension == self.mapping.split else [*own, *leading, *single[-1:], rows][0])
        return tuple(found)

    def _combination(
        self, kernel: GraphBuilder, partial: Sequence[str], left: dict[str, tuple[int, Shift | None]]
    ) -> Graph:
        """Return the second block graph: it sums the parts and does the rest."""
        split = f"{self.mapping.split}g"
        grid = {f"{dimension}g": f"{dimension}g" for dimension in self.mapping.grid[:-1]}
        b = GraphBuilder(f"{self.program.name}_combine", "block", grid=grid, loops={split: split})
        loaded = [self._load_part(b, kernel.tile(name).shape, number) for number, name in enumerate(partial)]
        tops = {shift: name for name, (value, shift) in zip(loaded, left.values(), strict=True) if value < 0}
        parts = {value: (name, shift) for name, (value, shift) in zip(loaded, left.values(), strict=True)}
        emitter = Emitter(b, self.ttype)
        for number, step in self._steps():
            if step.operator == "combine":
                name, shift = parts[step.operands[0]]
                relative = None if shift is None else Shift(tops[shift], shift.axis)
                emitter.values[number], after = emitter.accumulate(name, {}, relative)
                emitter.shifts.update({number: after} if after is not None else {})
            elif self.stages[number] == FINAL:
                emitter.add(number, step)
        return b.finish(self._stored(b, emitter))

    def _load_part(self, b: GraphBuilder, whole: Sequence[Extent], number: int) -> str:
        source = b.input(f"part{number}", "float32", whole)
        tile = self._part_tile(whole)
        *grid, loop = self._part_axes(tile)
        return b.add("load", source, grid=tuple(grid), loop=(loop,), shape=tile)

    def _part_tile(self, whole: Sequence[Extent]) -> tuple[Extent, ...]:
        """Return the extents of a stored part: those of the whole, without what grid dimensions split."""
        names = {f"{dimension}g" for dimension in self.mapping.grid}
        return tuple(
            product(name for name in str(extent).split("*") if name not in names) for extent in whole
        )


def operand_axes(prefix: Prefix, program: Program) -> list[tuple[str, ...]]:
    """Return the dimensions of what a block graph takes after a prefix."""
    inputs, _ = axes_of(program)
    named = [(axes, node.name) for axes, node in zip(inputs, program.symbolic.inputs, strict=True)]
    values = replayed(prefix.steps, named, WHOLE, Pruner((), enabled=False))
    return [dimensions_of(values[i][0]) for i in prefix.operands]


def dimensions_of(shape: Sequence[Extent]) -> tuple[str, ...]:
    """Return the dimension of each axis of a tensor that nothing splits (``Kt`` is K)."""
    return tuple(str(extent)[:-1] if isinstance(extent, str) else UNIT_AXIS for extent in shape)


def small_factors(mapping: Mapping, program: Program, extent: int) -> dict[str, int]:
    """Return factors that are all ``extent``, 1 for batches: for the quick test of a candidate."""
    return {
        name: 1 if dimension in mapping.batch else extent
        for dimension in program.sizes for name in mapping.factors(dimension)
    }  # fmt: skip


def small_program(mapping: Mapping, program: Program, factors: Numbers[str, int]) -> Graph:
    """Return the program with the extents that the factors give."""
    return program.graph({d: math.prod(factors[name] for name in mapping.factors(d)) for d in program.sizes})


def at_factors(
    structure: Structure, program: Program, factors: Numbers[str, int]
) -> tuple[Structure, Program]:
    """Return a structure and its program at the sizes that factors give; constants follow the sizes.

    Constants that depend on sizes are steps of the structure: they change with the program.
    """
    mapping = structure.mapping
    small = program.resized(
        **{d: math.prod(factors[name] for name in mapping.factors(d)) for d in program.sizes}
    )
    before, after = (numbers_of(one.symbolic) for one in (program, small))
    return structure.with_constants(dict(zip(before, after, strict=True))), small


def symbolic_program(mapping: Mapping, program: Program) -> Graph:
    """Return the program with the factors of a mapping as extents."""
    return program.graph({dimension: mapping.full(dimension) for dimension in program.sizes})
