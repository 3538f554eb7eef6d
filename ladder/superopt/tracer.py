"""A program over named dimensions, while it is traced.

Axes that must have the same extent, whatever it is, are one dimension: equal numbers alone are no reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ladder.ir.build import GraphBuilder, prune
from ladder.ir.graph import Graph
from ladder.superopt.generator import Program
from tile_types.errors import ConversionError, ShapeError

Sizes = Mapping[str, int]

STEPS = 1 << 20
"""While tracing, the number of the first step: inputs may be declared at any time."""


@dataclass(frozen=True)
class Traced:
    """A value of the traced function.

    number: Of the input, or of the step that computes it, from `STEPS` on.
    axes: The dimension of each axis, as `Dimensions` numbers them; 0 for an axis of one element.
    transposed: Whether the last two axes are meant the other way round: only a product's second operand may
        be.
    inverse: Whether it stands for its reciprocal: ``x * rsqrt(y)`` is ``x / sqrt(y)``.
    """

    number: int
    axes: tuple[int, ...]
    transposed: bool = False
    inverse: bool = False


@dataclass
class Dimensions:
    """Dimensions by number, joined where axes must agree."""

    sizes: list[int] = field(default_factory=lambda: [1])
    parents: list[int] = field(default_factory=lambda: [0])

    def new(self, size: int, is_open: bool = False) -> int:
        """Return a new dimension, or 0 for one element unless it is open: could be more."""
        if size == 1 and not is_open:
            return 0
        self.sizes.append(size)
        self.parents.append(len(self.parents))
        return len(self.parents) - 1

    def root(self, dimension: int) -> int:
        """Return the dimension that stands for all that were joined with one."""
        while self.parents[dimension] != dimension:
            dimension = self.parents[dimension]
        return dimension

    def join(self, a: int, b: int) -> int:
        """Make two dimensions one."""
        a, b = self.root(a), self.root(b)
        if self.sizes[a] != self.sizes[b]:
            raise ShapeError(f"axes of {self.sizes[a]} and {self.sizes[b]} elements must agree")
        self.parents[max(a, b)] = min(a, b)
        return min(a, b)


@dataclass(frozen=True)
class OverSize:
    """The number 1 / size of a dimension: while tracing its number, in a program its name."""

    dimension: int | str


@dataclass(frozen=True)
class Operation:
    """One operator: a row of the operator table, operands, attributes; an attribute may be `OverSize`."""

    operator: str
    operands: tuple[int, ...]
    attributes: tuple[tuple[str, Any], ...]

    def completed(self, sizes: Sizes) -> dict[str, Any]:
        return {
            name: 1.0 / sizes[str(value.dimension)] if isinstance(value, OverSize) else value
            for name, value in self.attributes
        }


@dataclass(frozen=True)
class Definition:
    """A program as steps: what `Program.define` is; it can go to other processes.

    name, dtype: Of the program and of its inputs.
    shapes: Dimensions of each input, by name or 1.
    steps: In order.
    output: Number of the result.
    """

    name: str
    dtype: str
    shapes: tuple[tuple[str | int, ...], ...]
    steps: tuple[Operation, ...]
    output: int

    def __call__(self, extents: Mapping[str, Any], sizes: Sizes) -> Graph:
        """Return the graph with these extents; constants follow the sizes."""
        g = GraphBuilder(self.name)
        values = [
            g.input(f"X{i}", self.dtype, [extents[x] if isinstance(x, str) else x for x in shape])
            for i, shape in enumerate(self.shapes)
        ]
        for step in self.steps:
            attributes = step.completed(sizes)
            if step.operator == "constant":
                attributes["type"] = self.dtype
            values.append(g.add(step.operator, *(values[i] for i in step.operands), **attributes))
        return prune(g.finish(values[self.output]))


class Tracer:
    """Translates a graph of torch operators.

    epsilon: What norms add to a mean square unless told otherwise: torch takes the type's own.
    """

    def __init__(self, epsilon: float = 0.0) -> None:
        self.epsilon = epsilon
        self.dimensions = Dimensions()
        self.inputs: list[Traced] = []
        self.steps: list[Operation] = []

    def input(self, shape: Sequence[int], opened: Collection[int] = ()) -> Traced:
        """Declare an input; axes that are open are dimensions even if they have one element."""
        axes = tuple(self.dimensions.new(size, axis in opened) for axis, size in enumerate(shape))
        found = Traced(len(self.inputs), axes)
        self.inputs.append(found)
        return found

    def weight(self, shape: Sequence[int]) -> Traced:
        """Declare a quantized input ``[N, K]``: the program has it as ``[K, N]``, as products take it."""
        found = self.input(shape[::-1])
        return replace(found, axes=found.axes[::-1], transposed=True)

    def add(
        self, operator: str, operands: Sequence[Traced], axes: Sequence[int], **attributes: Any
    ) -> Traced:
        for operand in operands:
            if operand.transposed:
                raise ConversionError(
                    f"{operator} takes a transposed tensor; only matmul's second operand may be"
                )
        numbers = tuple(operand.number for operand in operands)
        self.steps.append(Operation(operator, numbers, tuple(attributes.items())))
        return Traced(STEPS + len(self.steps) - 1, tuple(axes))

    def constant(self, value: Any) -> Traced:
        """Add a number, or one that depends on sizes."""
        return self.add("constant", (), (), value=value)

    def value(self, x: Any) -> Traced:
        """Return a tensor as it is, and a number as a constant."""
        if isinstance(x, Traced):
            return self.reciprocal(x) if x.inverse else x
        return self.constant(float(x))

    def reciprocal(self, x: Traced) -> Traced:
        """Return ``1 / x`` of what stands for its reciprocal."""
        return self.add("div", (self.constant(1.0), replace(x, inverse=False)), x.axes)

    def elementwise(self, operator: str, *operands: Any) -> Traced:
        """Apply an element-wise operator; axes align at the right, those of one element stretch."""
        values = [self.value(x) for x in operands]
        rank = max(len(x.axes) for x in values)
        axes = [0] * rank
        for value in values:
            for offset, dimension in enumerate(value.axes, rank - len(value.axes)):
                joined = axes[offset] and dimension
                axes[offset] = (
                    self.dimensions.join(axes[offset], dimension) if joined else axes[offset] or dimension
                )
        return self.add(operator, values, axes)

    def name(self, dimension: int) -> str | int:
        """Return a dimension's name, or 1."""
        root = self.dimensions.root(dimension)
        return f"D{root}" if root else 1

    def program(self, name: str, result: Traced, dtype: str) -> Program:
        shapes = [tuple(self.name(axis) for axis in x.axes) for x in self.inputs]
        used = [name for shape in shapes for name in shape if isinstance(name, str)]
        sizes = {name: self.dimensions.sizes[int(name[1:])] for name in dict.fromkeys(used)}
        steps = tuple(map(self._finished, self.steps))
        definition = Definition(name, dtype, tuple(shapes), steps, self._place(result.number))
        return Program(name, definition, sizes)

    def _finished(self, step: Operation) -> Operation:
        """Return a step as one of a program: all inputs come before it."""
        attributes = tuple((name, self._named(value)) for name, value in step.attributes)
        return Operation(step.operator, tuple(map(self._place, step.operands)), attributes)

    def _place(self, number: int) -> int:
        return number if number < STEPS else number - STEPS + len(self.inputs)

    def _named(self, value: Any) -> Any:
        """Return an attribute with its dimension's name: all that must agree are joined by now."""
        return OverSize(self.name(int(value.dimension))) if isinstance(value, OverSize) else value
