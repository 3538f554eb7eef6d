"""When a test at small extents proves equality at all extents.

Two programs over symbolic extents. Each axis is a product of symbols (factors of dimensions: blocks, steps
of the loop, what is left in a tile); no element has two indices of one symbol, as those of a square
matrix and its transpose have; concatenated axes meet only with the same parts in the same order. For a
symbol s, call a value *null in s* if it is zero at every index of s at which all inputs that have s are
zero. `reductions` proves, node by node, that every sum over s is of values that are null in s, and that
every operator treats indices alike (element-wise, matrix product, sum, concatenation; reshape and others
are refused by name).

*Restriction.* Let inputs be zero outside of a set S of indices of s. Then, by induction over nodes, values
at indices in S are those of the program with extent |S| run on the rest, and null values are zero elsewhere,
so that sums lose nothing.

*Supports.* Suppose the programs differ at some extents: some output element has
``P = sum_j f_j exp(H_j)`` not 0 as in the package's docstring. Choose a monomial of f_1 (in the basis of
products of roots), one of each ``u_j v_1 - u_1 v_j``, j > 1, and one of each difference of two
radicands ``N_a D_b - N_b D_a``. They have degree <= d, 2d and 4d (a root counts half of its radicand),
so with the output element they mention at most ``n = 1 + d + 2 d (K - 1) + 4 d m (m - 1) / 2`` indices
of s. Restrict the inputs to those: P keeps these monomials, so f_1 is not 0, no exponent merges with
H_1 and no two radicands merge. The restricted programs differ at extent <= n, so also at extent n, of
which they are a restriction.

So equality at extent n for every symbol that is summed over proves it for all extents. A symbol that
is never summed over needs extent 1 only: an output element at one of its indices depends on inputs at that
index alone. d, K and m must not grow with the extents: they are computed at extent 2 and at n and must
agree. That suffices: denominators that multiply along a sum give degrees of at least its extent, and
n > d; numbers of exponents and of roots that grow do so strictly.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from ladder.ir.build import bind, node_attributes
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.ir.operator import Operator
from ladder.ir.ops import get_operator
from ladder.superopt.verifier.bound import Bound, bound_of
from ladder.superopt.verifier.equivalence import DELTA, Certificate, forms_of, verify_equal
from ladder.superopt.verifier.forms import Bounding
from tile_types.errors import VerificationError
from tile_types.tile import Extent, Tile

MOST = 96
"""Largest extent that is tried."""

PROBE = 2


DIGIT = "@"
"""Marks a symbol by which a value varies from block to block or from step to step, not along an axis."""


Axes = tuple[tuple[Extent, ...], ...]
"""The extents that are joined along each axis; one, unless it is a concatenation."""


@dataclass(frozen=True)
class Symbols:
    """What is known of a value.

    Parameters
    ----------
    axes
        Its axes. The order of what is joined matters: indices must mean the same wherever axes meet.
    digits
        Symbols by which it varies from block to block or from step to step, marked `DIGIT`.
    null
        The symbols, marked if digits, that it is null in.
    """

    axes: Axes
    digits: frozenset[str]
    null: frozenset[str]

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


def reductions(graph: Graph) -> frozenset[str]:
    """Return the symbols that are summed over.

    Raises
    ------
    VerificationError
        Names the node at which the argument of this module fails.
    """
    summed: set[str] = set()
    operands = [_input(node) for node in graph.inputs]
    _walk(graph, operands, summed)
    return frozenset(summed)


def _input(node: Node) -> Symbols:
    for extent in node.tile.shape:
        if not (isinstance(extent, int) or re.fullmatch(r"[A-Za-z_]\w*(\*[A-Za-z_]\w*)*", extent)):
            raise VerificationError(
                f"small extents do not prove all: %{node.name} has {extent} elements along an axis,"
                " which is no product of symbols"
            )
    return Symbols(axes_of(node.tile), frozenset(), symbols_of(node.tile.shape))


def axes_of(tile: Tile) -> Axes:
    """Return the axes of a tile that joins nothing."""
    return tuple((extent,) for extent in tile.shape)


def _walk(graph: Graph, operands: Sequence[Symbols], summed: set[str]) -> list[Symbols]:
    values = dict(zip((node.name for node in graph.inputs), operands, strict=True))
    for node in graph.nodes:
        arguments = [values[value] for value in node.inputs]
        if node.body is not None:
            values.update(zip(node.values, _walk(node.body, arguments, summed), strict=True))
            continue
        step = _Step(graph, node, summed)
        if node.operator != "input":
            values[node.name] = step.result(arguments)
        try:
            values[node.name].require_distinct()
        except ValueError as error:
            raise step.refused(str(error)) from error
    return [values[output] for output in graph.outputs]


class _Step:
    """Symbols of one node's result."""

    def __init__(self, graph: Graph, node: Node, summed: set[str]) -> None:
        self.graph, self.node, self.summed = graph, node, summed
        self.attributes = node_attributes(node, graph)

    def result(self, arguments: list[Symbols]) -> Symbols:
        row = get_operator(self.node.operator)
        if self.node.operator == "constant":
            return Symbols(axes_of(self.node.tile), frozenset(), frozenset())
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
        return Symbols(axes, self._digits_of(arguments), frozenset(null))

    def _digits_of(self, arguments: list[Symbols]) -> frozenset[str]:
        return frozenset().union(*(argument.digits for argument in arguments))

    def _aligned(self, a: Axes, b: Axes) -> Axes:
        """Return the axes of a broadcast; what meets must join the same parts in the same order."""
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

    def sum(self, arguments: list[Symbols]) -> Symbols:
        axis = self.attributes["axis"] % len(arguments[0].axes)
        axes, kept = arguments[0].axes, (((1,),) if self.attributes["keep"] else ())
        left = replace(arguments[0], axes=(*axes[:axis], *kept, *axes[axis + 1 :]))
        return self._summed(left, symbols_of(axes[axis]))

    def matmul(self, arguments: list[Symbols]) -> Symbols:
        a, b = arguments
        right = b.axes if not self.attributes["transpose_b"] else (*b.axes[:-2], b.axes[-1], b.axes[-2])
        inner = self._same(a.axes[-1], right[-2])
        axes = (*self._aligned(a.axes[:-2], right[:-2]), a.axes[-2], right[-1])
        both = Symbols(axes, a.digits | b.digits, a.null | b.null)
        return self._summed(both, symbols_of(inner))

    def load(self, arguments: list[Symbols]) -> Symbols:
        """Each mapped dimension becomes a digit; tile and digits must make up the whole axis."""
        digits = self._split(self.graph.tile(self.node.inputs[0]).shape, self.node.tile.shape)
        null = arguments[0].null
        kept = symbols_of(self.node.tile.shape) & null
        return Symbols(
            axes_of(self.node.tile), digits, kept | {d for d in digits if d.removeprefix(DIGIT) in null}
        )

    def store(self, arguments: list[Symbols]) -> Symbols:
        """Digits become parts of axes again."""
        self._same_tile(arguments[0].axes)
        digits = self._split(self.node.tile.shape, self.graph.tile(self.node.inputs[0]).shape)
        left = sorted(name.removeprefix(DIGIT) for name in arguments[0].digits - digits)
        if left:
            raise self.refused(f"blocks of the same place differ by {left[0]}")
        null = frozenset(name.removeprefix(DIGIT) for name in arguments[0].null)
        return Symbols(axes_of(self.node.tile), frozenset(), null)

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
        split = [dim.extent for dim, axis in zip(axes, maps, strict=False) if axis >= 0]
        return frozenset(DIGIT + name for name in symbols_of(split))

    def accumulate(self, arguments: list[Symbols]) -> Symbols:
        loops = frozenset(DIGIT + name for name in symbols_of([axis.extent for axis in self.graph.loops]))
        kind = self.attributes["kind"]
        if kind == "sum":
            value = self._summed(arguments[0], loops)
            return replace(value, digits=value.digits - loops)
        if kind == "last" and not loops & arguments[0].digits:
            return arguments[0]
        raise self.refused(f"accumulate {kind!r} does not treat all steps alike")

    def concat(self, arguments: list[Symbols]) -> Symbols:
        """Outside of the joined axis a symbol must be null in all operands."""
        axis = self.attributes["axis"] % len(arguments[0].axes)
        null = frozenset.intersection(*(argument.null for argument in arguments))
        for argument in arguments:
            null |= symbols_of(argument.axes[axis]) & argument.null
        rest = reduce(self._aligned, (replace_axis(argument.axes, axis, (1,)) for argument in arguments))
        joined = tuple(part for argument in arguments for part in argument.axes[axis])
        return Symbols(replace_axis(rest, axis, joined), self._digits_of(arguments), null)

    def _summed(self, value: Symbols, names: frozenset[str]) -> Symbols:
        wrong = sorted(names - value.null)
        if wrong:
            name = wrong[0].removeprefix(DIGIT)
            raise self.refused(f"it sums over {name} what need not vanish with the inputs")
        self.summed |= {name.removeprefix(DIGIT) for name in names}
        return replace(value, null=value.null - names)

    def refused(self, reason: str) -> VerificationError:
        return VerificationError(
            f"small extents do not prove all: %{self.node.name} = {self.node.operator}(...), {reason}"
        )


def replace_axis(axes: Axes, axis: int, by: tuple[Extent, ...]) -> Axes:
    """Return the axes with one replaced."""
    return (*axes[:axis], by, *axes[axis + 1 :])


_RULES: Mapping[str, Any] = {
    "convert": _Step.keep, "sync": _Step.keep, "load": _Step.load, "store": _Step.store,
    "broadcast": _Step.broadcast, "transpose": _Step.transpose, "reduce_sum": _Step.sum,
    "matmul": _Step.matmul, "accumulate": _Step.accumulate, "concat": _Step.concat,
}  # fmt: skip
"""Operators that are not element-wise -> how symbols pass them; all others are refused."""

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


def verify_for_all_extents(
    first: Graph, second: Graph, *, delta: float = DELTA, seed: int | None = None
) -> tuple[Certificate, dict[str, int]]:
    """Decide whether two programs over symbolic extents are equal at all extents.

    Returns
    -------
    Certificate
        As of `verify_equal`; refused where the argument of this module does not apply.
    dict
        The extent of every symbol in the test.
    """
    try:
        summed = reductions(first) | reductions(second)
        names = symbols_of([extent for graph in (first, second) for extent in _all_extents(graph)])
        probe = {name: PROBE if name in summed else 1 for name in names}
        bound = _bound(bind(first, probe), bind(second, probe))
        needed = needed_extent(bound)
    except VerificationError as error:
        return Certificate("refused", str(error)), {}
    if needed > MOST:
        return Certificate("refused", f"small extents do not prove all: {needed} needed, at most {MOST}"), {}
    extents = {name: needed if name in summed else 1 for name in names}
    small = bind(first, extents), bind(second, extents)
    certificate = verify_equal(*small, delta=delta, seed=seed)
    if certificate.equal and _sizes(_bound(*small)) != _sizes(bound):
        reason = "small extents do not prove all: degrees, exponents or roots grow with the extents"
        return replace(certificate, verdict="refused", reason=reason, delta=0.0), extents
    return certificate, extents


def _sizes(bound: Bound) -> tuple[int, int, int]:
    return bound.degree, bound.terms, bound.radicands


def needed_extent(bound: Bound) -> int:
    """Return n of the module's argument; ``bound.radicands`` counts all roots of both programs."""
    d, m = bound.degree, bound.radicands
    return 1 + d + 2 * d * (bound.terms - 1) + 4 * d * math.comb(m, 2)


def _all_extents(graph: Graph) -> list[Extent]:
    extents: list[Extent] = []
    for owner, node in graph.walk():
        extents += [axis.extent for axis in (*owner.grid, *owner.loops)]
        extents += [extent for tile in node.tiles for extent in tile.shape]
    return extents


def _bound(first: Graph, second: Graph) -> Bound:
    boundings = [Bounding(), Bounding()]
    a, b = (forms_of(graph, each) for graph, each in zip((first, second), boundings, strict=True))
    bound = bound_of(a, b, any(each.exponentials for each in boundings))
    return bound.with_radicands(sum(each.roots for each in boundings))
