"""Arithmetic on residues: finite fields in which programs are compared.

A value is a pair of residues (Mirage, OSDI'25, §5): in Z_p, and in Z_q, q | p - 1, for use
as an exponent. ``exp`` maps the exponent part x to omega**x, omega of order q, and has no
exponent part itself, so a second exponential on a path is refused.

The column is written against `Arithmetic`, not against residues: the same rows computed with
other arithmetic give the degrees and term counts that the error bound of the equivalence test
needs (`ladder.superopt.verifier.forms`), so the bound is of exactly what is evaluated. What a
test with these fields proves, and with which error, is worked out there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, Protocol

import numpy as np

from ladder.ir import modular
from ladder.ir.modular import INT64_MODULI, Array, UndefinedResidueError, is_prime
from tile_types.errors import VerificationError

__all__ = ["Arithmetic", "Field", "Residues", "RootLog", "UndefinedResidueError", "Unknowns"]


class Arithmetic(Protocol):
    """The domain that the column computes in; a value has ``shape`` and ``map(rearrangement)``."""

    def number(self, value: float) -> Any: ...
    def add(self, a: Any, b: Any) -> Any: ...
    def subtract(self, a: Any, b: Any) -> Any: ...
    def multiply(self, a: Any, b: Any) -> Any: ...
    def divide(self, a: Any, b: Any) -> Any: ...
    def negate(self, a: Any) -> Any: ...
    def root(self, a: Any) -> Any: ...
    def exponential(self, a: Any) -> Any: ...
    def total(self, a: Any, axis: int, keep: bool) -> Any: ...
    def maximum(self, a: Any, axis: int, keep: bool) -> Any: ...
    def function(self, name: str, values: Sequence[Any]) -> Any: ...
    def joined(self, values: Sequence[Any], function: Callable[[Sequence[Array]], Array]) -> Any: ...

    @property
    def uninterpreted(self) -> Collection[str]: ...


@dataclass
class RootLog:
    """Radicands of one evaluation, in order, and whether each was a quadratic residue."""

    radicands: list[Array] = field(default_factory=list)
    residues: list[Array] = field(default_factory=list)


SYMMETRIC = frozenset({"reduce_max", "equal", "both", "either"})
"""Functions of which the order of the operands does not matter."""

Known = dict[tuple[Any, ...], tuple[int, int]]
"""Values of functions, by name and operands."""


class Relations(Protocol):
    """Roots that are products of others: ``sqrt(a b)`` where ``sqrt(a)`` and ``sqrt(b)`` are known."""

    def root(self, field: Field, a: Residues) -> Residues: ...
    def restart(self) -> None: ...


@dataclass
class Unknowns:
    """Functions without a meaning in a field: their values are drawn, and are equal where they must be.

    generator: Draws.
    count: How many different maxima there are.
    maxima: For each maximum in order of evaluation, which of them its elements are.
    known: Known values of functions, to which others are added. Programs that share it have the same
        functions.
    relations: How roots depend on each other, if that was found out.
    """

    generator: np.random.Generator
    count: int = 0
    maxima: Sequence[Array] = ()
    known: Known = field(default_factory=dict)
    relations: Relations | None = None
    _drawn: Residues | None = None
    _next: int = 0

    def restart(self) -> Unknowns:
        """Begin another evaluation with the same values."""
        self._next = 0
        if self.relations is not None:
            self.relations.restart()
        return self

    def maximum(self, field: Field, a: Residues) -> Residues:
        """Return the next maximum, taken of ``a``."""
        if self._drawn is None:
            self._drawn = field.random((self.count,), self.generator)
        names, self._next = self.maxima[self._next], self._next + 1
        found = self._drawn.map(lambda part: part[names])
        return Residues(found.p, None if a.q is None else found.q)

    def function(self, field: Field, name: str, values: Sequence[Residues]) -> Residues:
        """Return a value of an unknown function for each tuple of operands."""
        shape = np.broadcast_shapes(*(value.shape for value in values))
        plain = any(value.q is None for value in values)
        operands = [(value.p,) if plain else value.parts for value in values]
        drawn = [self._value(field, (name, *key)) for key in _keys(name, operands, shape)]
        p, q = (field.array([pair[i] for pair in drawn]).reshape(shape) for i in (0, 1))
        return Residues(p, None if plain else q)

    def _value(self, field: Field, key: tuple[Any, ...]) -> tuple[int, int]:
        if key not in self.known:
            drawn = field.random((), self.generator)
            assert drawn.q is not None
            self.known[key] = int(drawn.p), int(drawn.q)
        return self.known[key]


def _keys(
    name: str, operands: Sequence[Sequence[Array]], shape: tuple[int, ...]
) -> Iterator[tuple[Any, ...]]:
    """Yield the operands of each element; in order of size if the function is symmetric."""
    columns = [
        list(zip(*(np.broadcast_to(part, shape).ravel().tolist() for part in parts), strict=True))
        for parts in operands
    ]
    for key in zip(*columns, strict=True):
        yield tuple(sorted(key)) if name in SYMMETRIC else key


@dataclass(frozen=True)
class Field:
    """The fields Z_p and Z_q and an element of order q.

    p, q: Primes with q | p - 1; roots need p = q = 3 mod 4.
    omega: An element of Z_p of order q.
    logs: If given, roots in Z_p and Z_q are noted here, and the root of a non-residue a is that of -a (so
        that an evaluation shows all radicands) instead of an UndefinedResidueError.
    unknowns: Values of maxima and of functions.
    uninterpreted: Which of ``exp``, ``sqrt`` and ``reduce_max`` are unknown functions of their operands, too.
    exponents: Whether numbers have a part in Z_q: not needed where no exponential is interpreted.
    Raises VerificationError if p or q is no prime, q does not divide p - 1 or omega has another order.
    """

    p: int = 2147481143
    q: int = 1073740571
    omega: int = 4
    logs: tuple[RootLog, RootLog] | None = None
    unknowns: Unknowns | None = None
    uninterpreted: frozenset[str] = frozenset()
    exponents: bool = True

    def __post_init__(self) -> None:
        if (self.p - 1) % self.q:
            raise VerificationError(f"q={self.q} does not divide p-1={self.p - 1}")
        for name, number in (("p", self.p), ("q", self.q)):
            if not is_prime(number):
                raise VerificationError(f"{name}={number} is no prime")
        if self.omega % self.p in (0, 1) or pow(self.omega, self.q, self.p) != 1:
            raise VerificationError(f"omega={self.omega} does not have order q={self.q} modulo p={self.p}")

    def array(self, values: Any) -> Array:
        """Return integers as residues can be held without overflow."""
        return np.asarray(values).astype(np.int64 if self.p < INT64_MODULI else object)

    def random(self, shape: tuple[int, ...], generator: np.random.Generator) -> Residues:
        """Draw independent uniform residues."""
        return Residues(
            self.array(generator.integers(0, self.p, shape)), self.array(generator.integers(0, self.q, shape))
        )

    def number(self, value: float) -> Residues:
        """Return the residues of a float, a dyadic rational; raises VerificationError if it is not finite."""
        if not math.isfinite(value):
            raise VerificationError(f"the constant {value} is no number: the program is outside LAX")
        fraction = Fraction(value)
        p = self.array(_residue(fraction, self.p))
        return Residues(p, self.array(_residue(fraction, self.q)) if self.exponents else None)

    def both(self, function: Callable[..., Array], *values: Residues) -> Residues:
        """Apply ``function(modulus, *arrays)`` in Z_p, and in Z_q if all operands have that part."""
        exponents = [value.q for value in values]
        has_exponents = all(part is not None for part in exponents)
        kind = values[0].p.dtype  # numpy makes a Python number of an operation on objects without axes
        return Residues(
            np.asarray(function(self.p, *(value.p for value in values)), kind),
            np.asarray(function(self.q, *exponents), kind) if has_exponents else None,
        )

    def add(self, a: Residues, b: Residues) -> Residues:
        return self.both(modular.add, a, b)

    def subtract(self, a: Residues, b: Residues) -> Residues:
        return self.both(modular.subtract, a, b)

    def multiply(self, a: Residues, b: Residues) -> Residues:
        return self.both(modular.multiply, a, b)

    def divide(self, a: Residues, b: Residues) -> Residues:
        """Return ``a / b``; raises UndefinedResidueError where b is 0."""
        return self.both(modular.divide, a, b)

    def negate(self, a: Residues) -> Residues:
        return self.both(modular.negate, a)

    def root(self, a: Residues) -> Residues:
        """Return the root that is a square itself; raises UndefinedResidueError unless ``logs`` are kept."""
        if self.unknowns is not None and self.unknowns.relations is not None:
            return self.unknowns.relations.root(self, a)
        return self.own_root(a)

    def own_root(self, a: Residues) -> Residues:
        """Return the root of what is no product of other radicands."""
        if "sqrt" in self.uninterpreted:
            return self.function("sqrt", [a])
        if self.logs is None:
            return self.both(modular.root, a)
        logs = dict(zip((self.p, self.q), self.logs, strict=True))

        def logged(modulus: int, array: Array) -> Array:
            found = modular.root_or_twin(modulus, array)
            logs[modulus].radicands.append(np.ravel(array))
            logs[modulus].residues.append(np.ravel(found * found % modulus == array % modulus))
            return found

        return self.both(logged, a)

    def exponential(self, a: Residues) -> Residues:
        """Map x to omega**x; raises VerificationError for a second exponential on a path."""
        if "exp" in self.uninterpreted:
            return self.function("exp", [a])
        if a.q is None:
            raise VerificationError("two exponentials on one path: the program is outside LAX")
        return Residues(modular.power(self.p, self.array(self.omega), a.q), None)

    def total(self, a: Residues, axis: int, keep: bool) -> Residues:
        return self.both(lambda modulus, array: modular.sum_along(modulus, array, axis, keep), a)

    def maximum(self, a: Residues, axis: int, keep: bool) -> Residues:
        """Return an unknown per slice along an axis; raises VerificationError if none are given."""
        if self.unknowns is None:
            raise VerificationError("a maximum has no meaning in a finite field: its value must be given")
        if "reduce_max" not in self.uninterpreted:
            return self.unknowns.maximum(self, a)
        slices = [partial(np.take, indices=[at], axis=axis) for at in range(a.shape[axis])]
        found = self.function("reduce_max", [a.map(each) for each in slices])
        return found if keep else found.map(lambda part: np.squeeze(part, axis))

    def function(self, name: str, values: Sequence[Residues]) -> Residues:
        """Return the value of a function of which only is known that equal operands give equal values.

        Raises VerificationError if no values are given.
        """
        if self.unknowns is None:
            raise VerificationError(f"{name} has no meaning in a finite field: its value must be given")
        return self._step(*values) if name == "step" else self.unknowns.function(self, name, values)

    def _step(self, a: Residues) -> Residues:
        """Return whether ``a > 0``: 1 less what it is of ``-a``; at 0 it must not matter."""
        assert self.unknowns is not None
        turned = a.p > self.p // 2
        minus = self.negate(a)
        found = self.unknowns.function(self, "step", [_chosen(turned, minus, a)])
        return _chosen(turned, self.subtract(self.number(1.0), found), found)

    def joined(self, values: Sequence[Residues], function: Callable[[Sequence[Array]], Array]) -> Residues:
        """Apply a rearrangement of several arrays."""
        return self.both(lambda modulus, *arrays: function(arrays), *values)


@dataclass(frozen=True, eq=False)
class Residues:
    """An array over Z_p, with its counterpart over Z_q unless it passed an exponential."""

    p: Array
    q: Array | None

    @property
    def parts(self) -> tuple[Array, ...]:
        return (self.p,) if self.q is None else (self.p, self.q)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.p.shape)

    def map(self, function: Callable[[Array], Array]) -> Residues:
        """Apply a rearrangement to both parts."""
        return Residues(function(self.p), None if self.q is None else function(self.q))

    @property
    def zero(self) -> Residues:
        """The number 0, with the parts that this value has."""
        zero = np.zeros((), self.p.dtype)
        return Residues(zero, None if self.q is None else zero)


def _chosen(where: Array, a: Residues, b: Residues) -> Residues:
    """Return a where the condition holds, else b."""
    q = None if a.q is None or b.q is None else np.where(where, a.q, b.q)
    return Residues(np.where(where, a.p, b.p), q)


def _residue(fraction: Fraction, modulus: int) -> int:
    return fraction.numerator * pow(fraction.denominator, -1, modulus) % modulus
