"""The search space: which operators a partial block graph may take next."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ladder.ir.build import completed
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.ir.interpret import abstract_expressions
from ladder.ir.operator import AbstractExpression, Attributes
from ladder.ir.ops import get_operator
from ladder.ir.shapes import broadcast_shapes
from ladder.superopt.expressions import Normal, Pruner
from ladder.superopt.generator.alphabet import Alphabet, chains_of, link_of, operands_of, without_maxima
from ladder.superopt.generator.reach import distances
from ladder.superopt.generator.structure import (
    AFTER,
    CONSTANT,
    DECODE,
    FINAL,
    LOOPED,
    GraphStep,
    Links,
    Mapping,
)
from tile_types.errors import ShapeError
from tile_types.library import get_type
from tile_types.tile import Extent, Tile

WIDTH = {"load": 2, "value": 4, "packed": 1}
"""Bytes per element of loaded tiles, of computed ones (float32) and, at most, of quantized ones."""

LEAST_TILE = 16
"""Smallest extent of a split dimension in a tile: what the smallest matrix instruction takes."""

STAGES = (LOOPED, AFTER, FINAL)

ALL = (-1,)
"""Stands for all values as operands."""

COMBINING = 4
"""Most operators of a block graph that combines parts."""


@dataclass(frozen=True, eq=False)
class Value:
    """A value of a partial block graph.

    varies, spread: Whether it varies from step to step, and from block to block of a split reduction.
    cost: Bytes.
    packed: Whether it is codes and scales, of which nothing but a decoding is computed.
    """

    tile: Tile
    expression: Normal | None
    stage: str
    varies: bool
    spread: bool
    cost: int
    packed: bool = False


FLOAT = get_type("float32")


def tile_of(shape: Sequence[Extent]) -> Tile:
    """Return a tile of the search."""
    return Tile(FLOAT, tuple(shape), "shared")


class Partial:
    """A partial block graph: values so far, which of them are unused, and the last step."""

    __slots__ = ("bytes", "steps", "unused", "values")

    def __init__(
        self, values: tuple[Value, ...], steps: tuple[GraphStep, ...], unused: frozenset[int], bytes_: int
    ) -> None:
        self.values, self.steps, self.unused, self.bytes = values, steps, unused, bytes_

    def with_step(self, step: GraphStep, value: Value) -> Partial:
        unused = (self.unused - frozenset(step.operands)) | {len(self.values)}
        return Partial((*self.values, value), (*self.steps, step), unused, self.bytes + value.cost)


class Space:
    """The block graphs of one mapping, with accumulators ``sum`` and ``last``.

    If blocks share a reduction, what each leaves is combined, and more steps may follow.

    mapping: Grid, loop, imap and fmap.
    inputs: For each operand its dimensions, and its abstract expression under this mapping.
    output: Dimensions of the result.
    alphabet: Operators.
    sizes: Extents of dimensions.
    capacity: Bytes of shared memory that all tiles of a block may take together.
    pruner: Decides which values are kept.
    least: Smallest extent of a split dimension in a tile.
    packed: Operands that are quantized.
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
        least: int = LEAST_TILE,
        packed: Collection[int] = (),
    ) -> None:
        self.mapping, self.alphabet, self.pruner, self.capacity = mapping, alphabet, pruner, capacity
        self.looped = bool(mapping.loops)
        self.last = FINAL if mapping.split else AFTER
        self.extents: dict[str, Extent] = {
            "accumulate": product(f"{dimension}l" for dimension in mapping.loops),
            "combine": f"{mapping.split}g" if mapping.split else 1,
        }
        self.least = _least_factors(mapping, sizes, least)
        self.inputs, self.packed = inputs, packed
        self._values: dict[Any, Value] = {}
        self._results: dict[Any, Value | None] = {}
        self._templates: dict[Any, tuple[list[tuple[GraphStep, Value]], int]] = {}
        self.output = tuple(product(mapping.left(dimension)) for dimension in output)

    def start(self) -> Partial | None:
        """Return the graph of the loads alone, or None if they do not fit."""
        values = []
        for operand, (axes, expression) in enumerate(self.inputs):
            shape = self.mapping.tile(operand, axes)
            varies = max(self.mapping.fmap[operand], default=-1) >= 0
            spread = self.mapping.split is not None and self.mapping.imap[operand][-1] >= 0
            stage = LOOPED if self.looped else AFTER
            known = self.pruner.normal(expression)
            packed = operand in self.packed
            values.append(self._shared(shape, known, stage, varies, spread, "packed" if packed else "load"))
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
            total *= evaluated(str(extent), self.least)
        return total

    def moves(
        self, partial: Partial, allows: Callable[[Value], bool]
    ) -> tuple[list[tuple[GraphStep, Value]], int]:
        """Return the steps after the last one in canonical order, with results that are allowed and fit.

        Parameters
        ----------
        allows
            Of a value, the same at every call.

        Returns
        -------
        list
            Steps and results.
        int
            How many more steps there would be if all results were allowed.
        """
        last = partial.steps[-1] if partial.steps else None
        found: list[tuple[GraphStep, Value]] = []
        dropped = 0
        for top in range(last.newest[0] if last else 0, len(partial.values)):
            for below in self._operands_with(partial.values, top):
                offered, without = self._offers((top, *below), partial.values, allows)
                found += offered
                dropped += without
        room = self.capacity - partial.bytes
        fitting = [pair for pair in found if (last is None or pair[0] > last) and pair[1].cost <= room]
        return sorted(fitting, key=lambda pair: pair[0]), dropped

    def _operands_with(self, values: Sequence[Value], top: int) -> Iterator[tuple[int, ...]]:
        """Yield the operands that may go with the newest one: none, one, or all others (concatenations)."""
        yield ()
        stage = values[top].stage
        yield from ((other,) for other in range(top + 1) if values[other].stage == stage)
        if self.alphabet.concat:
            yield ALL

    def _offers(
        self, operands: tuple[int, ...], values: Sequence[Value], allows: Callable[[Value], bool]
    ) -> tuple[list[tuple[GraphStep, Value]], int]:
        """Return the allowed steps of some operands; those of one or two are looked up by the values."""
        if operands[1:] == ALL:
            return self._judged(self._concat_steps(values, operands[0]), values, allows)
        key = (*(values[i] for i in operands), len(set(operands)))
        if key not in self._templates:
            local = {i: n for n, i in enumerate(sorted(set(operands)))}
            given = [values[i] for i in sorted(set(operands))]
            steps = self._steps_of(tuple(local[i] for i in operands), given)
            self._templates[key] = self._judged(steps, given, allows)
        templates, dropped = self._templates[key]
        numbers = sorted(set(operands))
        return [(step.renumbered(numbers), value) for step, value in templates], dropped

    def _judged(
        self, steps: Iterator[GraphStep], values: Sequence[Value], allows: Callable[[Value], bool]
    ) -> tuple[list[tuple[GraphStep, Value]], int]:
        found, dropped = [], 0
        for step in steps:
            value = self._result_of(step, tuple(values[i] for i in step.operands))
            if value is not None and allows(value):
                found.append((step, value))
            elif value is not None:
                dropped += 1
        return found, dropped

    def _steps_of(self, operands: tuple[int, ...], values: Sequence[Value]) -> Iterator[GraphStep]:
        """Yield the steps of one operand, or of two whose shapes can be broadcast."""
        packed = [values[i].packed for i in operands]
        if len(operands) == 1:
            one = (operands[0],)
            yield from (
                [GraphStep(one, DECODE, one)] if packed[0] else self._unary_steps(values[one[0]], one[0])
            )
            return
        if any(packed):
            return
        top, other = operands
        alphabet, pair = self.alphabet, (top, other)
        orders = [pair, pair[::-1]] if other != top else []
        if _broadcast(values[top].tile.shape, values[other].tile.shape):
            for name in alphabet.commutative:
                if other != top or name != "mul" or "square" not in alphabet.unary:
                    yield GraphStep(pair, name, pair[::-1])
            for name in alphabet.ordered:
                yield from (GraphStep(pair, name, order) for order in orders)
        if alphabet.matmul:
            yield from (GraphStep(pair, "matmul", order) for order in orders or [pair])
        if alphabet.transposed and not all(values[i].tile.shape[-1] == 1 for i in pair):  # no kernel turns it
            turned = (("transpose_b", True),)
            yield from (GraphStep(pair, "matmul", order, turned) for order in orders or [pair])

    def _steps_with(self, values: Sequence[Value], top: int) -> Iterator[GraphStep]:
        """Yield all steps whose newest operand is ``top``."""
        for below in self._operands_with(values, top):
            if below == ALL:
                yield from self._concat_steps(values, top)
            else:
                yield from self._steps_of((top, *below), values)

    def _unary_steps(self, value: Value, top: int) -> Iterator[GraphStep]:
        one = (top,)
        for name in self.alphabet.unary:
            yield GraphStep(one, name, one)
        for links in self.alphabet.chains:
            yield GraphStep(one, "chain", one, (("links", links),))
        for constant in self.alphabet.constants:
            yield GraphStep(one, "scale", one, (("value", constant),))
        for constant in self.alphabet.offsets:
            yield GraphStep(one, "offset", one, (("value", constant),))
        if self.alphabet.reduce_sum:
            for axis, extent in enumerate(value.tile.shape):
                if extent != 1:
                    yield GraphStep(one, "reduce_sum", one, (("axis", axis),))
        if value.stage == LOOPED:
            yield GraphStep(one, "accumulate", one, (("kind", "sum" if value.varies else "last"),))
        if value.stage == AFTER and value.spread:
            yield GraphStep(one, "combine", one)

    def _concat_steps(self, values: Sequence[Value], top: int) -> Iterator[GraphStep]:
        """Yield ``concat(a, b) · concat(c, d)`` of matrices whose shapes can be: a · c + b · d.

        A sum occurs in no equal program if one of its products does not; one product is of ``top``.
        """
        stage = values[top].stage
        same = [i for i in range(top + 1) if values[i].stage == stage and not values[i].packed]
        if not any(self._occurs(pair, values) for i in same for pair in ((top, i), (i, top))):
            return
        products = [pair for pair in itertools.permutations(same, 2) if self._occurs(pair, values)]
        for (a, c), (b, d) in itertools.combinations(products, 2):
            four = (a, b, c, d)
            if top in four and len(set(four)) == 4:
                yield GraphStep(tuple(sorted(four, reverse=True)), "concat_matmul", four)

    def _occurs(self, pair: tuple[int, int], values: Sequence[Value]) -> bool:
        """Whether two values are matrices whose product can occur in an equal program."""
        a, b = (values[i] for i in pair)
        if not _multiply(a, b):
            return False
        product = self._result_of(GraphStep(pair, "matmul", pair), (a, b))
        return product is not None and self.pruner.keeps(product.expression)

    def _result_of(self, step: GraphStep, operands: tuple[Value, ...]) -> Value | None:
        """Return the step's result, or None if shapes forbid it."""
        key = (step.operator, step.attributes, operands)
        if key not in self._results:
            self._results[key] = self._value(step, operands)
        return self._results[key]

    def reach(self, start: Partial, is_late: Callable[[], bool]) -> dict[Value, int] | None:
        """Return how many steps each value is from a result at least; None if nothing is known."""
        if not self.pruner.enabled:
            return None

        def result(step: GraphStep, operands: tuple[Value, ...]) -> Value | None:
            value = self._result_of(step, operands)
            small = value is not None and value.cost <= self.capacity
            return value if value is not None and small and self.pruner.keeps(value.expression) else None

        return distances(start.values, self._steps_with, result, self.is_result, is_late)

    def is_result(self, value: Value) -> bool:
        """Whether a value has the result's stage and shape."""
        return value.stage == self.last and value.tile.shape == self.output

    def _value(self, step: GraphStep, operands: tuple[Value, ...]) -> Value | None:
        try:
            shape, expression = _result(step, operands, self.extents, self.pruner)
        except ShapeError:
            return None
        accumulated, combined = step.operator == "accumulate", step.operator == "combine"
        stage = AFTER if accumulated else FINAL if combined else operands[0].stage
        varies = not accumulated and any(operand.varies for operand in operands)
        spread = not combined and any(operand.spread for operand in operands)
        return self._shared(shape, expression, stage, varies, spread, "value")

    def _shared(
        self,
        shape: tuple[Extent, ...],
        expression: Normal | None,
        stage: str,
        varies: bool,
        spread: bool,
        kind: str,
    ) -> Value:
        """Return the only `Value` object with these properties, so that results are looked up by identity."""
        key = (shape, expression, stage, varies, spread, kind)
        if key not in self._values:
            cost = self.elements(shape) * WIDTH[kind]
            value = Value(tile_of(shape), expression, stage, varies, spread, cost, kind == "packed")
            self._values[key] = value
        return self._values[key]

    def complete(self, partial: Partial) -> bool:
        """Whether the last value is a result: nothing else is unused, stage and shape fit the store."""
        return partial.unused == {len(partial.values) - 1} and self.is_result(partial.values[-1])

    def fits(self, partial: Partial, operators: int) -> bool:
        """Whether neither block graph has too many operators."""
        final = sum(value.stage == FINAL for value in partial.values)
        return final <= COMBINING and len(partial.steps) - final <= operators

    def hopeless(self, partial: Partial, left: int) -> bool:
        """Whether too many values are unused for the steps left."""
        joins = 3 if self.alphabet.concat else 1
        earliest = min(STAGES.index(partial.values[i].stage) for i in partial.unused)
        return -(-(len(partial.unused) - 1) // joins) + STAGES.index(self.last) - earliest > left


@lru_cache(maxsize=100_000)
def _broadcast(a: tuple[Extent, ...], b: tuple[Extent, ...]) -> bool:
    """Whether element-wise operators take values of two shapes."""
    try:
        broadcast_shapes([a, b])
    except ShapeError:
        return False
    return True


def _multiply(a: Value, b: Value) -> bool:
    return len(a.tile.shape) == len(b.tile.shape) == 2 and a.tile.shape[1] == b.tile.shape[0]


def _result(
    step: GraphStep, operands: Sequence[Value], extents: Any, pruner: Pruner
) -> tuple[tuple[Extent, ...], Normal | None]:
    tiles = [operand.tile for operand in operands]
    arguments: list[Any] = [operand.expression for operand in operands]
    known = all(argument is not None for argument in arguments)
    if step.operator == "chain":
        shape, expression = chained(step.links, tiles[0], arguments[0])
    else:
        shape, expression = _linked(step.operator, dict(step.attributes), tiles, arguments, extents)
    return shape, pruner.normal(expression) if known else None


def chained(links: Links, tile: Tile, argument: Any) -> tuple[tuple[Extent, ...], Any]:
    """Return the shape of a chain's result, and its expression: one function, named by what it sums over."""
    head = ""
    for operator, given in links:
        before, tile = tile, tile_of(_linked(operator, dict(given), [tile], [None], {})[0])
        extent = before.shape[dict(given)["axis"]] if operator == "reduce_sum" else ""  # type: ignore[index]
        head = f"{head} {operator} {extent}".strip()
    return tile.shape, (head, argument)


def _linked(
    operator: str, given: Attributes, tiles: Sequence[Tile], arguments: Sequence[Any], extents: Any
) -> tuple[tuple[Extent, ...], Any]:
    """Return shape and abstract expression of one operator of a step."""
    if operator == DECODE:
        return tiles[0].shape, arguments[0]
    if operator in CONSTANT:
        return tiles[0].shape, (CONSTANT[operator], ("const", given["value"]), arguments[0])
    if operator == "combine":
        return tiles[0].shape, ("sum", extents[operator], arguments[0])
    if operator == "concat_matmul":
        left, right = (
            _apply("matmul", [tiles[i], tiles[i + 2]], [arguments[i], arguments[i + 2]]) for i in (0, 1)
        )
        if left[0] != right[0]:
            raise ShapeError("products of concatenated matrices differ in shape")
        return left[0], ("add", left[1], right[1])
    context = {"extent": extents[operator]} if operator in extents else {}
    return _apply(operator, tiles, arguments, given, context)


def _apply(
    operator: str,
    tiles: Sequence[Tile],
    arguments: Sequence[Any],
    given: Attributes | None = None,
    context: Attributes | None = None,
) -> tuple[tuple[Extent, ...], Any]:
    """Return shape and abstract expression by the operator table."""
    row = get_operator(operator)
    attributes = {**completed(operator, tuple(sorted((given or {}).items()))), **(context or {})}
    return row.shape(tiles, attributes), row.abstract(arguments, tiles, attributes)


def _least_factors(mapping: Mapping, sizes: Any, smallest: int) -> tuple[tuple[str, int], ...]:
    """Return the factors with the smallest tiles; each is that of its dimension split by it alone."""
    numbers: dict[str, int] = {}
    for dimension, size in sizes.items():
        tiles = mapping.left(dimension)
        split = [name for name in mapping.factors(dimension) if name not in tiles]
        least = (min(smallest, size) if split else size) if tiles else 1
        numbers.update(dict.fromkeys(tiles, least))
        numbers.update(dict.fromkeys(split, -(-size // least)))
    return tuple(sorted(numbers.items()))


@lru_cache(maxsize=100_000)
def evaluated(extent: str, numbers: tuple[tuple[str, int], ...]) -> int:
    """Return a polynomial extent as a number."""
    known = dict(numbers)
    total = 0
    for term in extent.split("+"):
        value = 1
        for factor in re.findall(r"\w+", term):
            value *= int(factor) if factor.isdigit() else known[factor]
        total += value
    return total


def targets_of(graph: Graph, alphabet: Alphabet) -> tuple[AbstractExpression, ...]:
    """Return the abstract expressions of a program's outputs; each chain of the alphabet is one function."""
    chains = chains_of(without_maxima(graph)) if alphabet.chains else ()
    return abstract_expressions(graph, contracted={c[-1].name: _contraction(graph, c) for c in chains})


def _contraction(graph: Graph, chain: Sequence[Node]) -> tuple[str, Any]:
    """Return where a chain starts, and its function."""
    (start,) = operands_of(graph, chain[0])
    links = tuple(link_of(graph, node) for node in chain)
    return start, lambda argument: chained(links, graph.tile(start), argument)[1]


def replayed(
    steps: Sequence[GraphStep], inputs: Sequence[tuple[Sequence[str], Any]], mapping: Mapping, pruner: Pruner
) -> list[tuple[tuple[Extent, ...], Any]]:
    """Return shape and expression of inputs and steps as whole tensors, in the factors of a mapping."""
    values = [
        Value(
            tile_of([mapping.full(axis) for axis in axes]), pruner.normal(expression), AFTER, False, False, 0
        )
        for axes, expression in inputs
    ]
    for step in steps:
        shape, expression = _result(step, [values[i] for i in step.operands], {}, pruner)
        values.append(Value(tile_of(shape), expression, AFTER, False, False, 0))
    return [(value.tile.shape, value.expression) for value in values]
