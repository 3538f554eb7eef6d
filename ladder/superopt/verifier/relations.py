"""Roots that are products of others: ``sqrt(a b) = sqrt(a) sqrt(b)``, ``sqrt(4 a) = 2 sqrt(a)``.

Such roots have a sign that a finite field does not know, and that real numbers do: where a and b are not
negative, which `domains` shows of everything under a root, the product of roots is the root of the product.
The relations are found by evaluating both programs exactly at two random rational points, before any field is
drawn; that they hold is checked in every draw, as an identity of polynomials like any other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from ladder.ir.finite import Field, Residues
from ladder.ir.graph import Graph
from ladder.ir.interpret import interpret
from ladder.ir.modular import UndefinedResidueError
from ladder.superopt.verifier.values import Conversions, domain_of
from tile_types.errors import VerificationError

Array = npt.NDArray[Any]

POINTS = 2
LARGEST = 1 << 12
"""Inputs are integers up to this: large enough that values are hardly equal by chance."""

MOST_BASES = 24
"""Most roots whose products are tried."""


@dataclass(frozen=True)
class Product:
    """A root as a positive number times roots of other radicands, or their reciprocals.

    factor: The number.
    roots: Number of each other radicand, and 1 or -1.
    new: Its own number if it is no such product; it is then the root itself.
    """

    factor: Fraction
    roots: tuple[tuple[int, int], ...]
    new: bool = False


Plan = list[list[Product]]
"""For each operator that takes roots, in order of evaluation, what its elements are."""


@dataclass(frozen=True, eq=False)
class Rationals:
    """An array of exact numbers."""

    data: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.data.shape)

    @property
    def zero(self) -> Rationals:
        return Rationals(np.asarray(Fraction(0), object))

    def map(self, function: Callable[[Array], Array]) -> Rationals:
        return Rationals(np.asarray(function(self.data), object))


class Exact:
    """Arithmetic on `Rationals`, the interface of `ladder.ir.finite.Arithmetic`, that notes radicands."""

    uninterpreted: Collection[str] = frozenset({"exp", "sqrt", "reduce_max"})

    def __init__(self, generator: np.random.Generator, known: dict[tuple[Any, ...], Fraction]) -> None:
        self.generator, self.known = generator, known
        self.radicands: list[list[Fraction]] = []

    def variables(self, shape: tuple[int, ...]) -> Rationals:
        drawn = self.generator.integers(1, LARGEST, shape)
        data = np.empty(shape, object)
        data[...] = np.vectorize(Fraction, otypes=[object])(drawn) if drawn.size else drawn
        return Rationals(data)

    def number(self, value: float) -> Rationals:
        if not math.isfinite(value):
            raise VerificationError(f"the constant {value} is no number: the program is outside LAX")
        return Rationals(np.asarray(Fraction(value), object))

    def add(self, a: Rationals, b: Rationals) -> Rationals:
        return Rationals(np.asarray(a.data + b.data, object))

    def subtract(self, a: Rationals, b: Rationals) -> Rationals:
        return Rationals(np.asarray(a.data - b.data, object))

    def multiply(self, a: Rationals, b: Rationals) -> Rationals:
        return Rationals(np.asarray(a.data * b.data, object))

    def divide(self, a: Rationals, b: Rationals) -> Rationals:
        """Return ``a / b``; raises UndefinedResidueError where b is 0."""
        if np.any(b.data == 0):
            raise UndefinedResidueError("division by zero; draw new inputs")
        return Rationals(np.asarray(a.data / b.data, object))

    def negate(self, a: Rationals) -> Rationals:
        return Rationals(np.asarray(-a.data, object))

    def root(self, a: Rationals) -> Rationals:
        """Note what stands under a root, and return a value for it."""
        self.radicands.append(list(np.ravel(a.data)))
        return self.function("sqrt", [a])

    def exponential(self, a: Rationals) -> Rationals:
        return self.function("exp", [a])

    def function(self, name: str, values: Sequence[Rationals]) -> Rationals:
        """Return a value for each tuple of operands."""
        shape = np.broadcast_shapes(*(value.shape for value in values))
        result = np.empty(shape, object)
        columns = [np.broadcast_to(value.data, shape) for value in values]
        for index in np.ndindex(shape):
            key = (name, *(column[index] for column in columns))
            if key not in self.known:
                self.known[key] = Fraction(int(self.generator.integers(1, LARGEST)))
            result[index] = self.known[key]
        return Rationals(result)

    def total(self, a: Rationals, axis: int, keep: bool) -> Rationals:
        return Rationals(np.asarray(a.data.sum(axis=axis, keepdims=keep), object))

    def maximum(self, a: Rationals, axis: int, keep: bool) -> Rationals:
        """Return a value for each slice."""
        parts = [Rationals(np.asarray(part, object)) for part in np.moveaxis(a.data, axis, 0)]
        found = self.function("reduce_max", parts)
        return found.map(lambda data: np.expand_dims(data, axis)) if keep else found

    def joined(self, values: Sequence[Rationals], function: Callable[[Sequence[Array]], Array]) -> Rationals:
        """Apply a rearrangement of several arrays."""
        return Rationals(np.asarray(function([value.data for value in values]), object))


Draw = Callable[[Callable[[tuple[int, ...]], Any]], list[Any]]
"""Returns the programs' inputs, each from its shape."""


def related(graphs: Sequence[Graph], inputs: Draw, generator: np.random.Generator) -> list[Plan] | None:
    """Return what the roots of each program are; None if none is a product of others."""
    points = [_radicands(graphs, inputs, generator) for _ in range(POINTS)]
    known: dict[tuple[Fraction, ...], Product] = {}
    bases: list[tuple[Fraction, ...]] = []
    plans: list[Plan] = []
    for same in zip(*points, strict=True):
        operators = zip(*same, strict=True)
        plans.append([[_product(v, known, bases) for v in zip(*each, strict=True)] for each in operators])
    return plans if any(not product.new for product in known.values()) else None


def _radicands(
    graphs: Sequence[Graph], inputs: Draw, generator: np.random.Generator
) -> list[list[list[Fraction]]]:
    """Return what stands under roots in each program at a random point."""
    for _ in range(8):
        shared: dict[tuple[Any, ...], Fraction] = {}
        fields = [Exact(generator, shared) for _ in graphs]
        operands = inputs(fields[0].variables)
        try:
            for graph, own in zip(graphs, fields, strict=True):
                interpret(graph, operands, domain_of(Conversions.of(graph), own))
        except UndefinedResidueError:
            continue
        return [own.radicands for own in fields]
    raise VerificationError("a division was undefined in 8 draws in a row")


def _product(
    value: tuple[Fraction, ...], known: dict[tuple[Fraction, ...], Product], bases: list[tuple[Fraction, ...]]
) -> Product:
    """Return what a root is, given its radicand at all points."""
    if value not in known:
        found = _of_others(value, bases) if all(value) else None
        known[value] = found or Product(Fraction(1), ((len(bases), 1),), True)
        if found is None:
            bases.append(value)
    return known[value]


def _of_others(value: tuple[Fraction, ...], bases: Sequence[tuple[Fraction, ...]]) -> Product | None:
    """Return a radicand's root as a product of up to two others, if the rest is a square of one number."""
    usable = [number for number, base in enumerate(bases[:MOST_BASES]) if all(base)]
    for count in (0, 1, 2):
        for chosen in itertools.combinations(usable, count):
            for signs in itertools.product((1, -1), repeat=count):
                powers = list(zip(chosen, signs, strict=True))
                rests = {
                    v / math.prod(bases[n][at] ** sign for n, sign in powers) for at, v in enumerate(value)
                }
                factor = _square_root(rests.pop()) if len(rests) == 1 else None
                if factor is not None:
                    return Product(factor, tuple(powers))
    return None


def _square_root(value: Fraction) -> Fraction | None:
    """Return the root of a positive rational number if that is rational."""
    if value <= 0:
        return None
    root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    return root if root * root == value else None


Store = dict[int, Residues]
"""Number of a radicand -> itself and its root, as two elements."""


@dataclass
class RootRelations:
    """Computes the roots of one program in a field by its plan.

    store: Radicands and roots known so far, shared by both programs: the first runs before the second.
    first: Whether this is the first program's.
    latest: What the roots of the last operator are.
    """

    plan: Plan
    store: Store
    first: bool
    latest: Sequence[Product] = ()
    _next: int = field(default=0)

    @property
    def own(self) -> frozenset[int]:
        """Numbers of the radicands that this program's roots are made of."""
        return frozenset(n for each in self.plan for product in each for n, _ in product.roots)

    def restart(self) -> None:
        """Begin another evaluation."""
        self._next = 0
        if self.first:
            self.store.clear()

    def root(self, own: Field, a: Residues) -> Residues:
        """Return the roots of the next operator's operands.

        Raises VerificationError if a relation does not hold: its two points were misleading.
        """
        products, self._next = self.plan[self._next], self._next + 1
        self.latest = products
        flat = a.map(np.ravel)
        self._add_bases(own, flat, products)
        parts = [
            [self._element(modulus, side, int(v), product) for v, product in zip(part, products, strict=True)]
            for side, (modulus, part) in enumerate(zip((own.p, own.q), flat.parts, strict=False))
        ]
        return Residues(*(own.array(part).reshape(a.shape) for part in parts), *([None] * (2 - len(parts))))

    def _add_bases(self, own: Field, flat: Residues, products: Sequence[Product]) -> None:
        """Take the roots of radicands that are products of no others."""
        new = {
            product.roots[0][0]: at
            for at, product in enumerate(products)
            if product.new and product.roots[0][0] not in self.store
        }
        if not new:
            return
        radicands = flat.map(lambda part: part[list(new.values())])
        roots = own.own_root(radicands)
        for at, number in enumerate(new):
            pair = own.joined([radicands, roots], lambda arrays, at=at: np.array([x[at] for x in arrays]))  # type: ignore[misc]
            self.store[number] = pair

    def _element(self, modulus: int, side: int, radicand: int, product: Product) -> int:
        """Return one root modulo p (side 0) or q (side 1)."""
        square = root = 1
        for number, sign in product.roots:
            values = [int(v) for v in self.store[number].parts[side]]
            if sign < 0 and 0 in values:
                raise UndefinedResidueError("a root of 0 under a fraction; draw new inputs")
            square = square * pow(values[0], sign, modulus) % modulus
            root = root * pow(values[1], sign, modulus) % modulus
        factor = product.factor.numerator * pow(product.factor.denominator, -1, modulus) % modulus
        if square * factor * factor % modulus != radicand % modulus:
            raise VerificationError("a root is a product of others at some points only: nothing is decided")
        return root * factor % modulus
