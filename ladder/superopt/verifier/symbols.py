"""Dependence of a program's values on symbols: the premises of `shrink`, proved node by node.

A symbol is a name in the extents: a factor of a dimension (blocks, steps of the loop, what is left in a
tile). Nothing is computed here; `Symbols` says of a value which symbols it varies with, in which it is null,
and how many sums over each symbol its numerator and denominator multiply.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np

from ladder.ir.build import node_attributes
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.ir.operator import Operator
from ladder.ir.ops import get_operator
from ladder.superopt.verifier.sums import PLAIN, Sums, sum_of_add, sum_of_div, sum_of_mul
from ladder.superopt.verifier.values import COMPOSED, Conversions
from tile_types.errors import VerificationError
from tile_types.tile import Extent, Tile

DIGIT = "@"
"""Marks a symbol by which a value varies from block to block or from step to step, not along an axis."""


Axes = tuple[tuple[Extent, ...], ...]
"""The extents that are joined along each axis; one, unless it is a concatenation."""


@dataclass(frozen=True)
class Symbols:
    """Facts about a value.

    axes: Its axes. The order of what is joined matters: indices must mean the same wherever axes meet.
    digits: Symbols by which it varies from block to block or from step to step, marked `DIGIT`.
    null: The symbols, marked if digits, that it is null in.
    sums: By symbol, if not `PLAIN`.
    origin: The computation that it rearranges, or none of its own.
    """

    axes: Axes
    digits: frozenset[str]
    null: frozenset[str]
    sums: Mapping[str, Sums] = field(default_factory=dict)
    origin: int = -1

    def of(self, name: str) -> Sums:
        """Return how it is made of sums over a symbol."""
        return self.sums.get(name, PLAIN)

    @property
    def varies(self) -> frozenset[str]:
        return symbols_of([part for axis in self.axes for part in axis]) | _unmarked(self.digits)

    def require_distinct(self) -> None:
        """Raise ValueError if an element has two indices of one symbol."""
        names = [name for axis in self.axes for part in axis for name in symbols_list([part])]
        names += [name.removeprefix(DIGIT) for name in self.digits]
        twice = sorted(name for name in set(names) if names.count(name) > 1)
        if twice:
            raise ValueError(f"its elements have two indices of {twice[0]}")


def symbols_list(extents: Sequence[Extent]) -> list[str]:
    """Return the names in extents, with repetitions."""
    return re.findall(r"[A-Za-z_]\w*", " ".join(map(str, extents)))


def symbols_of(extents: Sequence[Extent]) -> frozenset[str]:
    """Return the names in extents."""
    return frozenset(symbols_list(extents))


def _unmarked(names: frozenset[str]) -> frozenset[str]:
    return frozenset(name.removeprefix(DIGIT) for name in names)


@dataclass
class Findings:
    """Facts gathered on the way through one or more programs.

    summed: Symbols that are summed over.
    loose: Symbol -> where something is summed over it that is not null in it.
    bent: Symbols that something under an exponential, root or other function varies with.
    tied: Symbol -> where the argument of sums fails for it: a function of such sums, or no common
        denominator.
    before: Pairs of symbols that join in one axis, the first one's index counting more.
    maxima: Origin -> the symbols over which its maximum is taken.
    free: Whether all functions are unknown: each value of one is then a variable of its own.
    greatest: Symbols over which maxima are taken.
    """

    summed: set[str] = field(default_factory=set)
    loose: dict[str, str] = field(default_factory=dict)
    bent: set[str] = field(default_factory=set)
    tied: dict[str, str] = field(default_factory=dict)
    before: set[tuple[str, str]] = field(default_factory=set)
    maxima: dict[int, frozenset[str]] = field(default_factory=dict)
    free: bool = False
    greatest: set[str] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    origins: Iterator[int] = field(default_factory=itertools.count)


def examine(graph: Graph, findings: Findings) -> list[Symbols]:
    """Return what is known of a program's outputs, and add to the findings.

    Raises VerificationError: Names the node at which no argument of `shrink` holds.
    """
    findings.maxima.clear()  # maxima of different programs have nothing in common
    conversions = Conversions.of(graph)
    findings.unknown = {*conversions.unknown, *conversions.rounded}
    operands = [_input(node, next(findings.origins)) for node in graph.inputs]
    return _walk(graph, operands, findings)


def _input(node: Node, origin: int) -> Symbols:
    for extent in node.tile.shape:
        if not (isinstance(extent, int) or re.fullmatch(r"[A-Za-z_]\w*(\*[A-Za-z_]\w*)*", extent)):
            raise VerificationError(
                f"small extents do not prove all: %{node.name} has {extent} elements along an axis,"
                " which is no product of symbols"
            )
    return Symbols(axes_of(node.tile), frozenset(), symbols_of(node.tile.shape), origin=origin)


def axes_of(tile: Tile) -> Axes:
    """Return the axes of a tile that joins nothing."""
    return tuple((extent,) for extent in tile.shape)


def _walk(graph: Graph, operands: Sequence[Symbols], findings: Findings) -> list[Symbols]:
    values = dict(zip((node.name for node in graph.inputs), operands, strict=True))
    for node in graph.nodes:
        arguments = [values[value] for value in node.inputs]
        if node.body is not None:
            values.update(zip(node.values, _walk(node.body, arguments, findings), strict=True))
            continue
        step = _Step(graph, node, findings)
        if node.operator != "input":
            values[node.name] = step.result(arguments)
        try:
            values[node.name].require_distinct()
        except ValueError as error:
            raise step.refused(str(error)) from error
    return [values[output] for output in graph.outputs]


class _Step:
    """Symbols of one node's result."""

    def __init__(self, graph: Graph, node: Node, findings: Findings) -> None:
        self.graph, self.node, self.findings = graph, node, findings
        self.attributes = node_attributes(node, graph)

    def result(self, arguments: list[Symbols]) -> Symbols:
        row = get_operator(self.node.operator)
        if self.node.operator == "constant":
            return Symbols(axes_of(self.node.tile), frozenset(), frozenset())
        if id(self.node) in self.findings.unknown:
            return self._converted(arguments)
        if row.elementwise:
            return self._elementwise(row, arguments)
        rule = _RULES.get(self.node.operator)
        if rule is None:
            raise self.refused(f"{self.node.operator} does not treat all indices alike")
        result: Symbols = rule(self, arguments)
        return result

    def _elementwise(self, row: Operator, arguments: list[Symbols]) -> Symbols:
        """Keep a symbol null if zero operands, whatever the others are, give zero."""
        names = frozenset().union(*(argument.null for argument in arguments))
        null = {
            name for name in names
            if _vanishes(row, tuple(name in argument.null for argument in arguments))
        }  # fmt: skip
        axes = reduce(self._aligned, (argument.axes for argument in arguments))
        return self._made(axes, self._digits_of(arguments), frozenset(null), self._sums(row.name, arguments))

    def _converted(self, arguments: list[Symbols]) -> Symbols:
        """Return what is known of an unknown function of operands, such as a conversion that rounds."""
        row = get_operator(self.node.operator)
        if not (row.elementwise or row.name in ("convert", "encode")):
            raise self.refused(f"{row.name} rounds its result")
        axes = reduce(self._aligned, (argument.axes for argument in arguments))
        sums = self._function(arguments, "convert")
        return self._made(axes, self._digits_of(arguments), frozenset(), sums)

    def _made(
        self, axes: Axes, digits: frozenset[str], null: frozenset[str], sums: Mapping[str, Sums]
    ) -> Symbols:
        return Symbols(axes, digits, null, sums, next(self.findings.origins))

    def _sums(self, operator: str, arguments: Sequence[Symbols]) -> dict[str, Sums]:
        """Return the sums of an element-wise operator's result."""
        row = _COMPOSED.get(operator)
        if row is None:
            return self._function(arguments, operator)
        names = {name for argument in arguments for name in argument.sums}
        if operator == "div":
            names |= arguments[1].varies
        return {name: row([(a.of(name), name in a.varies) for a in arguments]) for name in names}

    def _function(self, arguments: Sequence[Symbols], operator: str) -> dict[str, Sums]:
        """Return the sums of a function of its operands: one that is no atom has a denominator of its own."""
        for argument in arguments:
            self.findings.bent |= argument.varies
            for name, sums in argument.sums.items():
                if sums.high or sums.under_high:
                    why = self._says(f"it is a function of a sum over {name}")
                    self.findings.tied.setdefault(name, why)
        names = frozenset().union(*(argument.varies for argument in arguments))
        if operator in ATOMS or (self.findings.free and operator != "rsqrt"):
            return self._factors(arguments) if operator in FACTORED else {}
        return dict.fromkeys(names, Sums(divided=True))

    def _factors(self, arguments: Sequence[Symbols]) -> dict[str, Sums]:
        """Return the sums of polynomials in the operands and an unknown function."""
        names = {name for argument in arguments for name in argument.sums}
        return {name: reduce(Sums.plus, (argument.of(name) for argument in arguments)) for name in names}

    def _digits_of(self, arguments: list[Symbols]) -> frozenset[str]:
        return frozenset().union(*(argument.digits for argument in arguments))

    def _aligned(self, a: Axes, b: Axes) -> Axes:
        """Return the axes of a broadcast; aligned axes must join the same parts in the same order."""
        pairs = itertools.zip_longest(reversed(a), reversed(b), fillvalue=(1,))
        return tuple(self._same(left, right) for left, right in pairs)[::-1]

    def _same(self, a: tuple[Extent, ...], b: tuple[Extent, ...]) -> tuple[Extent, ...]:
        if a != b and (1,) not in (a, b):
            raise self.refused(f"an axis that joins {a} meets one of {b}")
        return b if a == (1,) else a

    def keep(self, arguments: list[Symbols]) -> Symbols:
        return arguments[0]

    def broadcast(self, arguments: list[Symbols]) -> Symbols:
        axes = self._aligned(arguments[0].axes, axes_of(self.node.tile))
        return replace(arguments[0], axes=axes)

    def transpose(self, arguments: list[Symbols]) -> Symbols:
        axes = tuple(arguments[0].axes[axis] for axis in self.attributes["permutation"])
        return replace(arguments[0], axes=axes)

    def _without(self, axes: Axes) -> tuple[Axes, tuple[Extent, ...]]:
        """Return the axes without the reduced one, and that."""
        axis = self.attributes["axis"] % len(axes)
        kept = ((1,),) if self.attributes["keep"] else ()
        return (*axes[:axis], *kept, *axes[axis + 1 :]), axes[axis]

    def sum(self, arguments: list[Symbols]) -> Symbols:
        axes, removed = self._without(arguments[0].axes)
        return self._summed(replace(arguments[0], axes=axes), symbols_of(removed))

    def max(self, arguments: list[Symbols]) -> Symbols:
        axes, removed = self._without(arguments[0].axes)
        return self._maximum(replace(arguments[0], axes=axes), symbols_of(removed))

    def matmul(self, arguments: list[Symbols]) -> Symbols:
        a, b = arguments
        right = b.axes if not self.attributes["transpose_b"] else (*b.axes[:-2], b.axes[-1], b.axes[-2])
        inner = self._same(a.axes[-1], right[-2])
        axes = (*self._aligned(a.axes[:-2], right[:-2]), a.axes[-2], right[-1])
        sums = self._sums("mul", arguments)
        both = Symbols(axes, a.digits | b.digits, a.null | b.null, sums)
        return self._summed(both, symbols_of(inner))

    def load(self, arguments: list[Symbols]) -> Symbols:
        """Each mapped dimension becomes a digit; tile and digits must make up the whole axis."""
        digits = self._split(self.graph.tile(self.node.inputs[0]).shape, self.node.tile.shape)
        null = arguments[0].null
        kept = symbols_of(self.node.tile.shape) & null
        marked = kept | {d for d in digits if d.removeprefix(DIGIT) in null}
        return replace(arguments[0], axes=axes_of(self.node.tile), digits=digits, null=marked)

    def store(self, arguments: list[Symbols]) -> Symbols:
        """Digits become parts of axes again."""
        self._same_tile(arguments[0].axes)
        digits = self._split(self.node.tile.shape, self.graph.tile(self.node.inputs[0]).shape)
        left = sorted(name.removeprefix(DIGIT) for name in arguments[0].digits - digits)
        if left:
            raise self.refused(f"blocks of the same place differ by {left[0]}")
        null = _unmarked(arguments[0].null)
        return replace(arguments[0], axes=axes_of(self.node.tile), digits=frozenset(), null=null)

    def _same_tile(self, axes: Axes) -> None:
        if any(len(axis) > 1 for axis in axes):
            raise self.refused("it stores a concatenation")

    def _split(self, whole: Sequence[Extent], tile: Sequence[Extent]) -> frozenset[str]:
        maps = (*self.attributes["grid"], *self.attributes.get("loop", ()))
        axes = (*self.graph.grid, *self.graph.loops)
        for axis, extent in enumerate(whole):
            parts = [dim.extent for dim, split in zip(axes, maps, strict=False) if split == axis]
            if product([*parts, tile[axis]]) != extent:
                raise self.refused(f"tiles do not make up axis {axis}")
            self._ordered([symbols_of([part]) for part in (*parts, tile[axis])])
        split = [dim.extent for dim, axis in zip(axes, maps, strict=False) if axis >= 0]
        return frozenset(DIGIT + name for name in symbols_of(split))

    def _ordered(self, parts: list[frozenset[str]]) -> None:
        """Note which symbol's index counts more along an axis: it must be the same everywhere."""
        for early, late in itertools.combinations(parts, 2):
            self.findings.before |= set(itertools.product(early, late))

    def _loops(self) -> frozenset[str]:
        return symbols_of([axis.extent for axis in self.graph.loops])

    def accumulate(self, arguments: list[Symbols]) -> Symbols:
        names = self._loops()
        marked = frozenset(DIGIT + name for name in names)
        kind = self.attributes["kind"]
        if kind == "last" and not marked & arguments[0].digits:
            return arguments[0]
        rule = {"sum": self._summed, "max": self._maximum}.get(kind)
        if rule is not None:
            return rule(replace(arguments[0], digits=arguments[0].digits - marked), names, marked)
        if kind == "rescale":
            return self._rescaled(arguments, names, marked)
        raise self.refused(f"accumulate {kind!r} does not treat all steps alike")

    def _rescaled(
        self, arguments: Sequence[Symbols], names: frozenset[str], marked: frozenset[str]
    ) -> Symbols:
        """``x * exp(m - max m)``: a product with a function of m, summed."""
        x, local = arguments
        top = self._maximum(replace(local, digits=local.digits - marked), names, marked)
        weight = replace(local, null=frozenset(), sums=self._function([local, top], "exp"))
        axes = self._aligned(x.axes, local.axes)
        digits = (x.digits | local.digits) - marked
        product_ = self._made(axes, digits, x.null, self._sums("mul", [x, weight]))
        return self._summed(product_, names, marked)

    def concat(self, arguments: list[Symbols]) -> Symbols:
        """Outside of the joined axis a symbol must be null in all operands."""
        axis = self.attributes["axis"] % len(arguments[0].axes)
        null = frozenset.intersection(*(argument.null for argument in arguments))
        for argument in arguments:
            null |= symbols_of(argument.axes[axis]) & argument.null
        rest = reduce(self._aligned, (replace_axis(argument.axes, axis, (1,)) for argument in arguments))
        joined = tuple(part for argument in arguments for part in argument.axes[axis])
        names = {name for argument in arguments for name in argument.sums}
        sums = {name: reduce(Sums.either, (a.of(name) for a in arguments)) for name in names}
        return self._made(replace_axis(rest, axis, joined), self._digits_of(arguments), null, sums)

    def _summed(self, value: Symbols, names: frozenset[str], null: frozenset[str] | None = None) -> Symbols:
        """Sum over symbols; ``null`` are their names where the value's own say what it is null in."""
        wanted = names if null is None else null
        for name in sorted(wanted - value.null):
            plain = name.removeprefix(DIGIT)
            why = self._says(f"it sums over {plain} what need not vanish with the inputs")
            self.findings.loose.setdefault(plain, why)
        self.findings.summed |= names
        for name in names:
            if value.of(name).divided:
                why = self._says(f"it sums over {name} fractions without a common denominator")
                self.findings.tied.setdefault(name, why)
        sums = {**value.sums, **{name: value.of(name).summed() for name in names}}
        return self._made(value.axes, value.digits, value.null - wanted, sums)

    def _maximum(self, value: Symbols, names: frozenset[str], null: frozenset[str] | None = None) -> Symbols:
        """Take a maximum over symbols: an unknown, whatever it is taken of."""
        taken = self.findings.maxima.setdefault(value.origin, names)
        if taken != names:
            raise self.refused("maxima of one value are taken over different symbols")
        self.findings.bent |= names | value.varies
        self.findings.greatest |= names
        return self._made(value.axes, value.digits, frozenset(), {})

    def _says(self, reason: str) -> str:
        return f"small extents do not prove all: %{self.node.name} = {self.node.operator}(...), {reason}"

    def refused(self, reason: str) -> VerificationError:
        return VerificationError(self._says(reason))


def replace_axis(axes: Axes, axis: int, by: tuple[Extent, ...]) -> Axes:
    """Return the axes with one replaced."""
    return (*axes[:axis], by, *axes[axis + 1 :])


_RULES: Mapping[str, Any] = {
    "convert": _Step.keep, "load": _Step.load, "store": _Step.store,
    "broadcast": _Step.broadcast, "transpose": _Step.transpose, "reduce_sum": _Step.sum,
    "reduce_max": _Step.max, "matmul": _Step.matmul, "accumulate": _Step.accumulate,
    "concat": _Step.concat,
}  # fmt: skip
"""Operators that are not element-wise -> how symbols pass them; all others are refused."""


_COMPOSED: Mapping[str, Any] = {
    "add": sum_of_add, "sub": sum_of_add, "mul": sum_of_mul, "div": sum_of_div,
    "neg": lambda operands: operands[0][0], "square": lambda operands: operands[0][0].times(operands[0][0]),
}  # fmt: skip
"""Element-wise operators that are fractions of their operands; others are functions."""

ATOMS = ("exp", "sqrt", "convert")
"""Functions whose values are variables of their own; others contain a division, unless all are unknown."""

FACTORED = ("silu", *COMPOSED)
"""Functions that multiply an operand with an unknown function, if all are unknown."""

_SAMPLES = (1.7, -2.3, 0.4)


def _vanishes(row: Operator, zero: tuple[bool, ...]) -> bool:
    """Whether the float64 reference is 0 when these operands are 0 and the others are not."""
    if not any(zero):
        return False
    for sample in _SAMPLES:
        operands = [np.asarray(0.0 if flag else sample) for flag in zero]
        with np.errstate(all="ignore"):
            if row.reference(operands, {}) != 0:
                return False
    return True
