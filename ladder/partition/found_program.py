"""A region of a model as a program of the superoptimizer: matrices of rows, dimensions by what must agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.superopt.canonical import Canonical, canonical
from ladder.superopt.operators import OPERATORS
from ladder.superopt.tracer import OverSize, Traced, Tracer
from tile_types.errors import ConversionError, ShapeError
from tile_types.tile import Tile

HALVES = ("float16", "bfloat16")
"""Types of programs: kernels of found graphs multiply these."""

WIDE = "float32"
"""Type that values may be converted to and from within a program: block graphs compute in it."""


@dataclass(frozen=True)
class Slice:
    """Rows of a weight: what a slice of a product's columns multiplies.

    value: The whole weight.
    begin, rows: Which of its rows.
    """

    value: str
    begin: int
    rows: int

    def __str__(self) -> str:
        """Return the name that these rows have as an input of the model."""
        return f"{self.value}_rows_{self.begin}_{self.rows}"


Input = str | Slice
"""Source of a program's input: a value of the model, or rows of one that is a weight."""


@dataclass(frozen=True)
class RegionProgram:
    """A region's program.

    form: In canonical form.
    inputs: For each of its inputs what it is.
    """

    form: Canonical
    inputs: tuple[Input, ...]

    @property
    def slices(self) -> list[Slice]:
        """The inputs that are rows of a weight."""
        return [value for value in self.inputs if isinstance(value, Slice)]


def program_of(region: Graph, types: Mapping[str, str]) -> RegionProgram:
    """Return the program of a region of known sizes and one result.

    region: Inputs have their names in the model.
    types: Input that is a packed weight -> its type.
    Raises ConversionError, ShapeError: Names what block graphs cannot express.
    """
    return _Translation(region, types).program()


class _Translation:
    """Translates one region."""

    def __init__(self, region: Graph, types: Mapping[str, str]) -> None:
        self.region, self.types = region, types
        (self.output,) = region.outputs
        tile = region.tile(self.output)
        self.dtype = tile.ttype.name
        if self.dtype not in HALVES:
            raise ConversionError(f"the result is {self.dtype}")
        self.count = rows_of(tile)
        for node in region.nodes:
            rows_of(node.tile)  # all extents are known
        self.tracer = Tracer()
        self.values: dict[str, Traced] = {}
        self.numbers: dict[str, float] = {}
        self.inputs: list[Input] = []
        self.packed: dict[str, str] = {}
        self.weights: dict[Input, Traced] = {}

    def program(self) -> RegionProgram:
        result = self.value(self.output)
        program = self.tracer.program("region", self.tracer.value(result), self.dtype)
        form = canonical(replace(program, packed=self.packed))
        return RegionProgram(form, tuple(self.inputs[number] for number in form.inputs))

    def value(self, name: str) -> Any:
        """Return a value: traced, or a number."""
        if name in self.numbers:
            return self.numbers[name]
        if name not in self.values:
            found = self._translated(self.region.producer(name))
            if isinstance(found, float):
                self.numbers[name] = found
                return found
            self.values[name] = found
        return self.values[name]

    def _translated(self, node: Node) -> Any:
        given = node_attributes(node)
        if node.operator == "input":
            return self._activations(node)
        if node.operator == "constant":
            return float(given["value"])
        if node.operator in ("convert", "reshape", "slice", "matmul", "reduce_sum", "div"):
            method: Callable[..., Any] = getattr(self, f"_{node.operator}")
            return method(node, given)
        return self._elementwise(node)

    def _activations(self, node: Node) -> Traced:
        """Declare rows, or a vector of one number per column."""
        tile = node.tile
        if tile.ttype.name != self.dtype:
            raise ConversionError(f"%{node.name} is {tile.ttype.name}, the result {self.dtype}")
        if len(tile.shape) < 1:
            raise ConversionError(f"%{node.name} is a number in memory")
        rows, width = rows_of(tile), int(tile.shape[-1])
        vector = len(tile.shape) == 1 or (rows == 1 and self.count > 1)
        if not vector and rows != self.count:
            raise ShapeError(f"%{node.name} has {rows} rows, the result {self.count}")
        self.inputs.append(node.name)
        return self.tracer.input((rows, width), () if vector else (0,))

    def _convert(self, node: Node, given: Mapping[str, Any]) -> Any:
        before = self.region.tile(node.inputs[0]).ttype
        if given.get("exact"):
            raise ConversionError(f"%{node.name} is rounded as it stands")
        if before.is_block or {before.name, node.tile.ttype.name} - {self.dtype, WIDE}:
            raise ConversionError(f"%{node.name} converts {before.name} to {node.tile.ttype.name}")
        return self.value(node.inputs[0])

    def _reshape(self, node: Node, given: Mapping[str, Any]) -> Any:
        before = self.region.tile(node.inputs[0])
        columns = before.shape[-1:] == node.tile.shape[-1:] != ()
        if not columns or rows_of(before) != rows_of(node.tile):
            raise ConversionError(f"%{node.name} divides rows otherwise")
        return self.value(node.inputs[0])

    def _slice(self, node: Node, given: Mapping[str, Any]) -> Traced:
        """Return some columns of a product: one with those rows of the weight."""
        source = sliced_product(self.region, node)
        if source is None:
            raise ConversionError(f"%{node.name} is no columns of a product")
        return self._product(source, int(given["begin"][-1]), int(node.tile.shape[-1]))

    def _matmul(self, node: Node, given: Mapping[str, Any]) -> Traced:
        return self._product(node, 0, int(node.tile.shape[-1]))

    def _product(self, node: Node, begin: int, width: int) -> Traced:
        if not node_attributes(node)["transpose_b"] or len(self.region.tile(node.inputs[1]).shape) != 2:
            raise ConversionError(f"%{node.name} is no product of rows with a matrix [N, K]")
        x = self.value(node.inputs[0])
        weight = self._weight(node.inputs[1], begin, width)
        return OPERATORS["linear"](self.tracer, x, weight)

    def _weight(self, value: str, begin: int, width: int) -> Traced:
        """Declare a matrix ``[N, K]``, or some of its rows; one that is read twice is one input."""
        node = self.region.producer(self.region.unconverted(value))
        if node.operator != "input":
            raise ConversionError(f"%{value} is computed: no weight")
        rows, depth = map(int, node.tile.shape)
        which: Input = node.name if width == rows else Slice(node.name, begin, width)
        if which not in self.weights:
            self.inputs.append(which)
            is_packed = node.name in self.types
            if not is_packed and node.tile.ttype.name != self.dtype:
                raise ConversionError(f"%{node.name} is {node.tile.ttype.name}")
            declare = self.tracer.weight if is_packed else self.tracer.input
            self.weights[which] = declare((width, depth))
            self.packed |= {f"X{len(self.inputs) - 1}": self.types[node.name]} if is_packed else {}
        return self.weights[which]

    def _reduce_sum(self, node: Node, given: Mapping[str, Any]) -> Traced:
        tile = self.region.tile(node.inputs[0])
        if given["axis"] % len(tile.shape) != len(tile.shape) - 1:
            raise ConversionError(f"%{node.name} sums over rows")
        return OPERATORS["sum"](self.tracer, self.value(node.inputs[0]), -1, True)

    def _div(self, node: Node, given: Mapping[str, Any]) -> Any:
        a, b = (self.value(name) for name in node.inputs)
        if b == 0.0:
            raise ConversionError(f"%{node.name} divides by zero")
        total = self.region.producer(node.inputs[0])
        if isinstance(b, float) and total.operator == "reduce_sum":
            summed = self.value(total.inputs[0]).axes[-1]
            if self.tracer.dimensions.sizes[self.tracer.dimensions.root(summed)] == b:  # a mean, at any size
                return self.tracer.elementwise("mul", a, self.tracer.constant(OverSize(summed)))
        return OPERATORS["div"](self.tracer, a, b)

    def _elementwise(self, node: Node) -> Any:
        if not get_operator(node.operator).elementwise:
            raise ConversionError(f"{node.operator} has no counterpart in block graphs")
        operands = [self._aligned(node, name) for name in node.inputs]
        if node.operator in ("mul", "rsqrt", "square"):
            return OPERATORS[node.operator](self.tracer, *operands)
        return self.tracer.elementwise(node.operator, *operands)

    def _aligned(self, node: Node, name: str) -> Any:
        """Return an operand whose rows are those of the result, or one row."""
        shape, whole = self.region.tile(name).shape, node.tile.shape
        leading = whole[len(whole) - len(shape) : -1]
        if shape and shape[:-1] not in (leading, (1,) * (len(shape) - 1)):
            raise ConversionError(f"%{node.name} repeats rows of %{name}")
        return self.value(name)


def sliced_product(graph: Graph, node: Node) -> Node | None:
    """Return the product whose columns a slice takes; None if the slice is another one."""
    given, whole = node_attributes(node), graph.tile(node.inputs[0]).shape
    source = graph.producer(node.inputs[0])
    while source.operator in ("reshape", "convert"):
        if graph.tile(source.inputs[0]).shape[-1:] != source.tile.shape[-1:]:
            return None
        source = graph.producer(source.inputs[0])
    if not isinstance(given["begin"][-1], int):
        return None
    columns = not any(given["begin"][:-1]) and node.tile.shape[:-1] == whole[:-1] and not given.get("step")
    return source if source.operator == "matmul" and columns else None


def rows_of(tile: Tile) -> int:
    """Return how many rows a tensor has: all axes but the last, together.

    Raises ShapeError if an extent is open, or 0.
    """
    if not all(isinstance(extent, int) and extent > 0 for extent in tile.shape):
        raise ShapeError(f"the extents of {tile} are open, or there is nothing to compute")
    return prod(int(extent) for extent in tile.shape[:-1])
