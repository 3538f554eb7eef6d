"""The search space: how a block graph is laid over its operands, and which operators it may take next.

Every dimension of the program is a product of named factors: ``Ng`` blocks (if the grid splits it),
``Kl`` steps (if the loop splits it) and ``Nt``, what is left in a tile. Tiles have these names as extents,
so shapes, abstract expressions and memory are computed by the operator table on symbols, and a match is
never a coincidence of numbers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ladder.ir.extents import product
from ladder.ir.graph import Graph, Literal
from ladder.ir.operator import Attributes, Operator
from ladder.ir.ops import get_operator
from ladder.superopt.expressions import Normal, Pruner
from tile_types.errors import ScheduleError, ShapeError
from tile_types.library import get_type
from tile_types.tile import Extent, Tile

LOOPED, AFTER = "looped", "after"
"""Stages of a value: computed in each step, or once from accumulators (always, without a loop)."""

WIDTH = {"load": 2, "value": 4}
"""Bytes per element of loaded tiles and of computed ones (float32)."""

UNIT_AXIS = "1"
"""Stands for a dimension where an axis has one element."""

LEAST_TILE = 16
"""Smallest extent of a split dimension in a tile: what the smallest matrix instruction takes."""


@dataclass(frozen=True)
class Mapping:
    """How a block graph's dimensions split its operands.

    Parameters
    ----------
    grid
        The dimension that each grid dimension splits.
    loop
        The dimension that the loop splits, or None.
    imap
        For each operand and grid dimension, the axis that is split, or -1 (replicated).
    fmap
        For each operand, the axis that the loop splits, or -1.
    """

    grid: tuple[str, ...]
    loop: str | None
    imap: tuple[tuple[int, ...], ...]
    fmap: tuple[int, ...]

    def factors(self, dimension: str) -> tuple[str, ...]:
        """Return the names whose product is the dimension; none for an axis of extent 1."""
        if dimension == UNIT_AXIS:
            return ()
        names = [f"{dimension}g"] if dimension in self.grid else []
        names += [f"{dimension}l"] if dimension == self.loop else []
        return (*names, f"{dimension}t")

    def full(self, dimension: str) -> Extent:
        """Return the dimension's extent."""
        return product(self.factors(dimension))

    def tile(self, operand: int, axes: Sequence[str]) -> tuple[Extent, ...]:
        """Return the shape of an operand's tile."""
        return tuple(product(self._left(operand, axis, name)) for axis, name in enumerate(axes))

    def _left(self, operand: int, axis: int, dimension: str) -> list[str]:
        names = list(self.factors(dimension))
        if axis in self.imap[operand]:
            names.remove(f"{dimension}g")
        if axis == self.fmap[operand]:
            names.remove(f"{dimension}l")
        return names


def mappings(
    inputs: Sequence[Sequence[str]], output: Sequence[str], sizes: Any, max_grid: int = 3
) -> Iterator[Mapping]:
    """Yield every mapping: grid dimensions split axes of the output, the loop an axis that it lacks.

    Dimensions that one tile holds are not split.

    An axis of an operand that a dimension could split is split or replicated. Every grid and loop
    dimension splits some operand.
    """
    named = sorted({name for axes in inputs for name in axes} - {UNIT_AXIS})
    loops = [None, *(name for name in named if name not in output and sizes[name] > LEAST_TILE)]
    wide = [name for name in output if sizes[name] > LEAST_TILE]
    for count in range(min(max_grid, len(wide)) + 1):
        for grid in itertools.combinations(wide, count):
            for loop in loops:
                yield from _mappings(inputs, grid, loop)


def _mappings(inputs: Sequence[Sequence[str]], grid: tuple[str, ...], loop: str | None) -> Iterator[Mapping]:
    per_dimension = [list(_splits(inputs, dimension)) for dimension in grid]
    loops = list(_splits(inputs, loop)) if loop is not None else [(-1,) * len(inputs)]
    for *chosen, fmap in itertools.product(*per_dimension, loops):
        imap = tuple(tuple(split[operand] for split in chosen) for operand in range(len(inputs)))
        yield Mapping(grid, loop, imap, fmap)


def _splits(inputs: Sequence[Sequence[str]], dimension: str) -> Iterator[tuple[int, ...]]:
    """Yield for each operand the axis of a dimension or -1, at least one split."""
    choices = [(list(axes).index(dimension), -1) if dimension in axes else (-1,) for axes in inputs]
    return (split for split in itertools.product(*choices) if max(split) >= 0)


@dataclass(frozen=True, order=True)
class Step:
    """One operator of a block graph; steps of a graph increase in this order (canonical form).

    Parameters
    ----------
    newest
        Indices of the operands, largest first: what the order compares first, so that a step that
        does not use its predecessor's result could as well have come before it, and did.
    operator
        Name in `CHOICES`.
    operands
        Indices of the operands in order.
    attributes
        Sorted (name, value) pairs.
    """

    newest: tuple[int, ...]
    operator: str
    operands: tuple[int, ...]
    attributes: tuple[tuple[str, Literal], ...] = ()


@dataclass(frozen=True)
class Prefix:
    """Operators that run as kernels of their own, before the block graph.

    Parameters
    ----------
    steps
        Their steps over the program's inputs, in canonical order.
    operands
        Which values (inputs, then results) the block graph takes.
    """

    steps: tuple[Step, ...]
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Structure:
    """A kernel graph without numbers: what runs first, and a block graph whose last step is stored."""

    prefix: Prefix
    mapping: Mapping
    steps: tuple[Step, ...]

    def with_constants(self, constants: Any) -> Structure:
        """Return the structure with other numbers to scale with: old -> new, as for another size."""
        steps = (
            replace(step, attributes=(("value", constants[dict(step.attributes)["value"]]),))
            if step.operator == "scale"
            else step
            for step in self.steps
        )
        return replace(self, steps=tuple(steps))


@dataclass(frozen=True, eq=False)
class Value:
    """A value of a partial block graph."""

    tile: Tile
    expression: Normal | None
    stage: str
    varies: bool
    cost: int


FLOAT = get_type("float32")


def tile_of(shape: Sequence[Extent]) -> Tile:
    """Return a tile of the search."""
    return Tile(FLOAT, tuple(shape), "shared")


@dataclass(frozen=True)
class Alphabet:
    """Operators that a search may use.

    Parameters
    ----------
    unary, commutative, ordered
        Element-wise rows of the table by how operands are enumerated.
    constants
        Numbers that values may be scaled with.
    matmul, reduce_sum, concat
        Whether matrix products, sums and products of concatenations may be used.
    """

    unary: tuple[str, ...]
    commutative: tuple[str, ...]
    ordered: tuple[str, ...]
    constants: tuple[float, ...]
    matmul: bool = True
    reduce_sum: bool = True
    concat: bool = True

    @staticmethod
    def of(graph: Graph) -> Alphabet:
        """Take a program's own operators, and add, mul, div."""
        rows = {node.operator: get_operator(node.operator) for _, node in graph.walk()}
        binary = sorted({"add", "mul", "div"} | {n for n, row in rows.items() if _is_binary(row)})
        commutative = tuple(name for name in binary if name in ("add", "mul", "maximum", "minimum"))
        constants = {
            float(dict(node.attributes)["value"])  # type: ignore[arg-type]
            for _, node in graph.walk()
            if node.operator == "constant"
        }
        products = sum(node.operator == "matmul" for _, node in graph.walk())
        return Alphabet(
            tuple(sorted(name for name, row in rows.items() if row.unary and name != "convert")),
            commutative,
            tuple(name for name in binary if name not in commutative),
            tuple(sorted(constants)),
            products > 0,
            "reduce_sum" in rows,
            products > 1,
        )


SPECIAL = ("input", "constant", "convert", "matmul", "reduce_sum")
"""Operators besides element-wise ones that a program may have."""


def require_searchable(graph: Graph) -> None:
    """Check that the search can express a program at all.

    Raises
    ------
    ScheduleError
        Names what it cannot: an operator, several results, types that differ or are quantized.
    """
    if len(graph.outputs) != 1:
        raise ScheduleError(
            f"the search takes programs of one result, {graph.name!r} has {len(graph.outputs)}"
        )
    types = {tile.ttype for tile in (*(node.tile for node in graph.inputs), graph.tile(graph.outputs[0]))}
    if len(types) > 1 or any(ttype.is_block for ttype in types):
        names = ", ".join(sorted(ttype.name for ttype in types))
        raise ScheduleError(
            f"the search takes inputs and result of one element type, {graph.name!r} has {names}"
        )
    for node in graph.nodes:
        row, attributes = get_operator(node.operator), dict(node.attributes)
        if attributes.get("transpose_b") or not (row.elementwise or node.operator in SPECIAL):
            how = " of a transposed operand" if attributes.get("transpose_b") else ""
            raise ScheduleError(
                f"the search has no {node.operator}{how} yet (%{node.name} of {graph.name!r});"
                f" it has {', '.join(SPECIAL)} and element-wise operators"
            )


def _is_binary(row: Operator) -> bool:
    return row.elementwise and row.arity == (2, 2)


class Partial:
    """A partial block graph: values so far, which of them are unused, and the last step."""

    __slots__ = ("bytes", "steps", "unused", "values")

    def __init__(
        self, values: tuple[Value, ...], steps: tuple[Step, ...], unused: frozenset[int], bytes_: int
    ) -> None:
        self.values, self.steps, self.unused, self.bytes = values, steps, unused, bytes_

    def with_step(self, step: Step, value: Value) -> Partial:
        """Return the graph with one step more."""
        unused = (self.unused - frozenset(step.operands)) | {len(self.values)}
        return Partial((*self.values, value), (*self.steps, step), unused, self.bytes + value.cost)


class Space:
    """The block graphs of one mapping: at most one loop dimension, accumulators ``sum`` and ``last``.

    Parameters
    ----------
    mapping
        Grid, loop, imap and fmap.
    inputs
        For each operand its dimensions, and its abstract expression under this mapping.
    output
        Dimensions of the result.
    alphabet
        Operators.
    sizes
        Extents of dimensions.
    capacity
        Bytes of shared memory that all tiles of a block may take together.
    pruner
        Decides which values are kept.
    """

    def __init__(
        self,
        mapping: Mapping,
        inputs: Sequence[tuple[Sequence[str], Any]],
        output: Sequence[str],
        alphabet: Alphabet,
        sizes: Any,
        capacity: int,
        pruner: Pruner,
    ) -> None:
        self.mapping, self.alphabet, self.pruner, self.capacity = mapping, alphabet, pruner, capacity
        self.looped = mapping.loop is not None
        self.steps_extent = f"{mapping.loop}l" if self.looped else 1
        self.least = _least_factors(mapping, sizes)
        self.inputs = inputs
        self._values: dict[Any, Value] = {}
        self._results: dict[Any, Value | None] = {}
        self.output = tuple(
            product(name for name in mapping.factors(dim) if not name.endswith("g")) for dim in output
        )

    def start(self) -> Partial | None:
        """Return the graph of the loads alone, or None if they do not fit."""
        values = []
        for operand, (axes, expression) in enumerate(self.inputs):
            shape = self.mapping.tile(operand, axes)
            varies = self.mapping.fmap[operand] >= 0
            stage = LOOPED if self.looped else AFTER
            known = self.pruner.normal(expression)
            values.append(self._shared(shape, known, stage, varies, WIDTH["load"]))
        total = sum(value.cost for value in values)
        return (
            Partial(tuple(values), (), frozenset(range(len(values))), total)
            if total <= self.capacity
            else None
        )

    def elements(self, shape: Sequence[Extent]) -> int:
        """Return the elements of a tile with the smallest tiles of split dimensions."""
        total = 1
        for extent in shape:
            total *= _evaluated(str(extent), self.least)
        return total

    def steps(self, partial: Partial) -> Iterator[Step]:
        """Yield the steps after the last one, without looking at shapes, in canonical order."""
        last = partial.steps[-1] if partial.steps else None
        newest = last.newest[0] if last else 0
        found: list[Step] = []
        for top in range(newest, len(partial.values)):
            found += self._steps_with(partial, top)
        return iter(sorted(step for step in found if last is None or step > last))

    def _steps_with(self, partial: Partial, top: int) -> Iterator[Step]:
        """Yield steps whose newest operand is ``top``."""
        values, alphabet = partial.values, self.alphabet
        stage = values[top].stage
        yield from self._unary_steps(values[top], top)
        for other in range(top + 1):
            if values[other].stage != stage:
                continue
            pair = (top, other)
            for name in alphabet.commutative:
                if other != top or name != "mul" or "square" not in alphabet.unary:
                    yield Step(pair, name, pair[::-1])
            orders = {pair, pair[::-1]} if other != top else set()
            for name in alphabet.ordered:
                yield from (Step(pair, name, order) for order in orders)
            if alphabet.matmul:
                yield from (Step(pair, "matmul", order) for order in orders or {pair})
        if alphabet.concat:
            yield from self._concat_steps(values, top)

    def _unary_steps(self, value: Value, top: int) -> Iterator[Step]:
        one = (top,)
        for name in self.alphabet.unary:
            yield Step(one, name, one)
        for constant in self.alphabet.constants:
            yield Step(one, "scale", one, (("value", constant),))
        if self.alphabet.reduce_sum:
            for axis, extent in enumerate(value.tile.shape):
                if extent != 1:
                    yield Step(one, "reduce_sum", one, (("axis", axis),))
        if value.stage == LOOPED:
            yield Step(one, "accumulate", one, (("kind", "sum" if value.varies else "last"),))

    def _concat_steps(self, values: Sequence[Value], top: int) -> Iterator[Step]:
        """Yield ``concat(a, b) · concat(c, d)`` of matrices whose shapes can be: a · c + b · d."""
        same = [i for i in range(top + 1) if values[i].stage == values[top].stage]
        products = [(a, c) for a, c in itertools.permutations(same, 2) if _multiply(values[a], values[c])]
        for (a, c), (b, d) in itertools.combinations(products, 2):
            four = (a, b, c, d)
            if top in four and len(set(four)) == 4:
                yield Step(tuple(sorted(four, reverse=True)), "concat_matmul", four)

    def value(self, partial: Partial, step: Step) -> Value | None:
        """Return the step's result, or None if shapes or memory forbid it. The expression is not judged."""
        operands = tuple(partial.values[i] for i in step.operands)
        key = (step.operator, step.attributes, operands)
        if key not in self._results:
            self._results[key] = self._value(step, operands)
        value = self._results[key]
        return None if value is None or partial.bytes + value.cost > self.capacity else value

    def _value(self, step: Step, operands: tuple[Value, ...]) -> Value | None:
        try:
            shape, expression = _result(step, operands, self.steps_extent, self.pruner)
        except ShapeError:
            return None
        accumulated = step.operator == "accumulate"
        stage = AFTER if accumulated else operands[0].stage
        varies = not accumulated and any(operand.varies for operand in operands)
        return self._shared(shape, expression, stage, varies, WIDTH["value"])

    def _shared(
        self, shape: tuple[Extent, ...], expression: Normal | None, stage: str, varies: bool, width: int
    ) -> Value:
        """Return the one value with these properties, so that results are looked up by identity."""
        key = (shape, expression, stage, varies, width)
        if key not in self._values:
            self._values[key] = Value(tile_of(shape), expression, stage, varies, self.elements(shape) * width)
        return self._values[key]

    def complete(self, partial: Partial) -> bool:
        """Whether the last value is a result: nothing else is unused, stage and shape fit the store."""
        last = partial.values[-1]
        return (
            partial.unused == {len(partial.values) - 1}
            and last.stage == AFTER
            and last.tile.shape == self.output
        )

    def hopeless(self, partial: Partial, left: int) -> bool:
        """Whether too many values are unused for the steps left."""
        joins = 3 if self.alphabet.concat else 1
        looped = any(partial.values[i].stage == LOOPED for i in partial.unused)
        return -(-(len(partial.unused) - 1) // joins) + looped > left


def _multiply(a: Value, b: Value) -> bool:
    return len(a.tile.shape) == len(b.tile.shape) == 2 and a.tile.shape[1] == b.tile.shape[0]


def _result(
    step: Step, operands: Sequence[Value], steps: Extent, pruner: Pruner
) -> tuple[tuple[Extent, ...], Normal | None]:
    tiles = [operand.tile for operand in operands]
    arguments = [operand.expression for operand in operands]
    known = all(argument is not None for argument in arguments)
    shape: tuple[Extent, ...]
    if step.operator == "scale":
        shape = tiles[0].shape
        expression = ("mul", ("const", dict(step.attributes)["value"]), arguments[0])
    elif step.operator == "concat_matmul":
        left, right = (
            _apply("matmul", [tiles[i], tiles[i + 2]], [arguments[i], arguments[i + 2]]) for i in (0, 1)
        )
        if left[0] != right[0]:
            raise ShapeError("products of concatenated matrices differ in shape")
        shape, expression = left[0], ("add", left[1], right[1])
    else:
        given = dict(step.attributes)
        context = {"extent": steps} if step.operator == "accumulate" else {}
        shape, expression = _apply(step.operator, tiles, arguments, given, context)
    return shape, pruner.normal(expression) if known else None


def _apply(
    operator: str,
    tiles: Sequence[Tile],
    arguments: Sequence[Any],
    given: Attributes | None = None,
    context: Attributes | None = None,
) -> tuple[tuple[Extent, ...], Any]:
    """Return shape and abstract expression by the operator table."""
    row = get_operator(operator)
    attributes = {**_completed(operator, tuple(sorted((given or {}).items()))), **(context or {})}
    return row.shape(tiles, attributes), row.abstract(arguments, tiles, attributes)


@lru_cache(maxsize=4096)
def _completed(operator: str, given: tuple[tuple[str, Literal], ...]) -> Attributes:
    return get_operator(operator).complete(dict(given))


def _least_factors(mapping: Mapping, sizes: Any) -> tuple[tuple[str, int], ...]:
    numbers: dict[str, int] = {}
    for dimension, size in sizes.items():
        *split, tile = mapping.factors(dimension)
        least = min(LEAST_TILE, size) if split else size
        numbers[tile] = least
        numbers.update((name, -(-size // least)) for name in split)
    return tuple(sorted(numbers.items()))


@lru_cache(maxsize=100_000)
def _evaluated(extent: str, numbers: tuple[tuple[str, int], ...]) -> int:
    """Return a polynomial extent as a number."""
    known = dict(numbers)
    total = 0
    for term in extent.split("+"):
        value = 1
        for factor in re.findall(r"\w+", term):
            value *= int(factor) if factor.isdigit() else known[factor]
        total += value
    return total


WHOLE = Mapping((), None, (), ())
"""The mapping of kernels: nothing is split."""


def replayed(
    steps: Sequence[Step], inputs: Sequence[tuple[Sequence[str], Any]], mapping: Mapping, pruner: Pruner
) -> list[tuple[tuple[Extent, ...], Any]]:
    """Return shape and expression of inputs and steps as whole tensors, in the factors of a mapping."""
    values = [
        Value(tile_of([mapping.full(axis) for axis in axes]), pruner.normal(expression), AFTER, False, 0)
        for axes, expression in inputs
    ]
    for step in steps:
        shape, expression = _result(step, [values[i] for i in step.operands], 1, pruner)
        values.append(Value(tile_of(shape), expression, AFTER, False, 0))
    return [(value.tile.shape, value.expression) for value in values]


def dimensions_of(shape: Sequence[Extent]) -> tuple[str, ...]:
    """Return the dimension of each axis of a tensor that nothing splits (``Kt`` is K)."""
    return tuple(str(extent)[:-1] if isinstance(extent, str) else UNIT_AXIS for extent in shape)
