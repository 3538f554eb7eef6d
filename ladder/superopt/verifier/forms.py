"""Degrees, term counts and coefficient sizes of a program's values, for the error bound.

Every element of every value of a LAX program is a fraction N / D. N and D are sums of terms
``f · exp(h)``: f a polynomial in the inputs (over Z_p) and in the square roots that the program
takes, h = u / v a fraction of polynomials in the inputs' exponent parts (over Z_q). This module
computes upper bounds for such fractions, element by element, by running the *same* finite-field
column of the operator table (`ladder.ir.finite_rows`) with `Forms` for residues: what is bounded is
what is evaluated.

A polynomial with dyadic coefficients is bounded by

* ``terms`` — distinct exponents other than 0, and ``plain`` (0 or 1) — whether 0 is one of them;
* ``degree`` — the total degree in the inputs; a root counts half of what stands under it;
* ``bits``, ``fraction`` — 2**fraction · f has integer coefficients with sum of magnitudes
  <= 2**bits; a root has the square root of what stands under it.

Both measures are submultiplicative, also after replacing a root's square by what stands under it.

Denominators carry an identity: sums over a common denominator (softmax, normalisation) keep it,
others multiply. Identities follow elements through rearrangements, so they are exact, not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tile_types.errors import VerificationError

Array = npt.NDArray[Any]

_POLYNOMIAL = ("terms", "plain", "degree", "bits", "fraction")
FORM = np.dtype(
    [
        ("value", "i8"),  # equal numbers: equal elements; 0 is the number 0
        ("shared", "i8"),  # equal numbers: equal denominators; 0 is the number 1
        *[(f"n_{name}", "f8") for name in _POLYNOMIAL],
        *[(f"d_{name}", "f8") for name in _POLYNOMIAL],
        *[(f"{side}_{name}", "f8") for side in "uv" for name in ("degree", "bits")],
        ("exponential", "?"),
        ("root", "?"),
    ]
)
"""One element. All bytes zero are the number 0, so rearrangements may fill with zeros."""


HIGHEST = 2.0**50
"""Degrees and bits above are refused: no field of 31 bits decides them, and float64 is exact below."""


def capped(a: Array) -> Array:
    """Keep numbers of exponents finite: far above what is evaluated, all are alike."""
    return np.asarray(np.minimum(a, HIGHEST))


def log2_sum(a: Array, b: Array) -> Array:
    """Return ``log2(2**a + 2**b)``, rounded up a little."""
    return np.asarray(np.maximum(a, b) + np.log2(1 + np.exp2(-np.abs(a - b))) + 1e-9)


@dataclass(frozen=True, eq=False)
class Polynomial:
    """Bounds of one polynomial per element, see the module."""

    terms: Array
    plain: Array
    degree: Array
    bits: Array
    fraction: Array

    def __add__(self, other: Polynomial) -> Polynomial:
        fraction = np.maximum(self.fraction, other.fraction)
        bits = log2_sum(self.bits + fraction - self.fraction, other.bits + fraction - other.fraction)
        return Polynomial(
            capped(self.terms + other.terms),
            np.maximum(self.plain, other.plain),
            np.maximum(self.degree, other.degree),
            bits,
            fraction,
        )

    def __mul__(self, other: Polynomial) -> Polynomial:
        return Polynomial(
            capped(self.terms * other.terms + self.terms * other.plain + self.plain * other.terms),
            self.plain * other.plain,
            self.degree + other.degree,
            self.bits + other.bits,
            self.fraction + other.fraction,
        )

    @property
    def exponents(self) -> Array:
        return self.terms + self.plain


def choose(where: Array, a: Polynomial, b: Polynomial) -> Polynomial:
    """Return a where the condition holds, else b."""
    return Polynomial(*(np.where(where, getattr(a, name), getattr(b, name)) for name in _POLYNOMIAL))


ONE = Polynomial(*(np.asarray(value, np.float64) for value in (0, 1, 0, 0, 0)))


@dataclass(frozen=True, eq=False)
class Forms:
    """An array of `FORM`."""

    data: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.data.shape)

    @property
    def zero(self) -> Forms:
        return Forms(np.zeros((), FORM))

    def map(self, function: Callable[[Array], Array]) -> Forms:
        return Forms(function(self.data))

    def __getitem__(self, name: str) -> Array:
        return np.asarray(self.data[name])

    @property
    def numerator(self) -> Polynomial:
        return Polynomial(*(self[f"n_{name}"] for name in _POLYNOMIAL))

    @property
    def denominator(self) -> Polynomial:
        stored = Polynomial(*(self[f"d_{name}"] for name in _POLYNOMIAL))
        return choose(self["shared"] == 0, ONE, stored)


@dataclass(frozen=True, eq=False)
class Exponents:
    """Bounds of the exponents ``u / v`` that occur in an element: (degree, bits) of u and of v."""

    u_degree: Array
    u_bits: Array
    v_degree: Array
    v_bits: Array

    @staticmethod
    def of(form: Forms) -> Exponents:
        """Read them off an element."""
        return Exponents(*(form[name] for name in ("u_degree", "u_bits", "v_degree", "v_bits")))

    def joined(self, other: Exponents, added: Array) -> Exponents:
        """Exponents of a sum (either operand's), or, where ``added``, of a product (sums of both's)."""
        sums = Exponents(
            np.maximum(self.u_degree + other.v_degree, other.u_degree + self.v_degree),
            log2_sum(self.u_bits + other.v_bits, other.u_bits + self.v_bits),
            self.v_degree + other.v_degree,
            self.v_bits + other.v_bits,
        )
        either = Exponents(
            np.maximum(self.u_degree, other.u_degree),
            np.maximum(self.u_bits, other.u_bits),
            np.maximum(self.v_degree, other.v_degree),
            np.maximum(self.v_bits, other.v_bits),
        )
        names = ("u_degree", "u_bits", "v_degree", "v_bits")
        return Exponents(*(np.where(added, getattr(sums, n), getattr(either, n)) for n in names))


@dataclass
class Radicand:
    """Bounds over all operands of functions: degrees and bits of numerators and denominators."""

    degrees: tuple[int, int] = (0, 0)
    bits: tuple[float, float] = (0.0, 0.0)

    def note(self, form: Forms) -> None:
        """Include the elements of a form."""
        self.join([form.numerator, form.denominator])

    def join(self, sides: Sequence[Polynomial]) -> None:
        """Include numerators and denominators."""
        degrees = [int(np.max(side.degree, initial=0)) for side in sides]
        bits = [float(np.max(side.bits + side.fraction, initial=0)) for side in sides]
        self.degrees = max(self.degrees[0], degrees[0]), max(self.degrees[1], degrees[1])
        self.bits = max(self.bits[0], bits[0]), max(self.bits[1], bits[1])


class Bounding:
    """Arithmetic on `Forms`: the interface of `ladder.ir.finite.Arithmetic`.

    uninterpreted: Functions of which each value is a new variable, as in `ladder.ir.finite.Field`; they may
        be nested.
    functions: How many values of unknown functions, or elements that maxima are taken of, there are.
    radicand: Sizes of their operands, and of what stands under interpreted roots.
    largest: Degree and bits of all values together, as of numerators or denominators.
    maxima: For each maximum in order of evaluation, which unknown each element is: slices of the same
        elements have the same.
    unknowns: How many there are.
    """

    def __init__(self, uninterpreted: frozenset[str] = frozenset()) -> None:
        self._values = 1
        self._numbers: dict[float, int] = {}
        self._denominators: dict[tuple[int, int], int] = {}
        self._unknowns: dict[tuple[int, ...], tuple[int, int]] = {}
        self.uninterpreted = uninterpreted
        self.functions = 0
        self.largest = Radicand()
        self.maxima: list[Array] = []
        self.radicand = Radicand()
        self.roots = 0
        self.exponentials = 0

    @property
    def unknowns(self) -> int:
        """How many different maxima there are."""
        return len(self._unknowns)

    def variables(self, shape: tuple[int, ...]) -> Forms:
        data = np.zeros(shape, FORM)
        data["n_plain"] = data["n_degree"] = 1
        data["value"] = self._fresh(shape)
        return Forms(data)

    def number(self, value: float) -> Forms:
        """Return a dyadic constant."""
        data = np.zeros((), FORM)
        if value == 0:
            return Forms(data)
        if not math.isfinite(value):
            raise VerificationError(f"the constant {value} is no number: the program is outside LAX")
        numerator, denominator = float(value).as_integer_ratio()
        data["value"] = self._numbers.setdefault(value, int(self._fresh(())))
        data["n_plain"] = 1
        data["n_bits"], data["n_fraction"] = math.log2(abs(numerator)), denominator.bit_length() - 1
        return Forms(data)

    def add(self, a: Forms, b: Forms) -> Forms:
        """Bound a sum: over the common denominator where there is one."""
        same = a["shared"] == b["shared"]
        crossed = a.numerator * b.denominator + b.numerator * a.denominator
        numerator = choose(same, a.numerator + b.numerator, crossed)
        denominator = choose(same, a.denominator, a.denominator * b.denominator)
        shared = np.where(same, a["shared"], self._product(a["shared"], b["shared"]))
        return self._combined(a, b, numerator, denominator, shared, ~same)

    def subtract(self, a: Forms, b: Forms) -> Forms:
        return self.add(a, self.negate(b))

    def multiply(self, a: Forms, b: Forms) -> Forms:
        shared = self._product(a["shared"], b["shared"])
        always = np.ones((), bool)
        return self._combined(a, b, a.numerator * b.numerator, a.denominator * b.denominator, shared, always)

    def divide(self, a: Forms, b: Forms) -> Forms:
        """Bound a quotient; equal denominators cancel."""
        same = a["shared"] == b["shared"]
        numerator = choose(same, a.numerator, a.numerator * b.denominator)
        denominator = choose(same, b.numerator, a.denominator * b.numerator)
        rest = np.where(same, 0, a["shared"])
        # The element b itself stands for its numerator; negative so that it differs from products.
        shared = self._product(rest, -b["value"])
        return self._combined(a, b, numerator, denominator, shared, np.ones((), bool))

    def negate(self, a: Forms) -> Forms:
        data = a.data.copy()
        data["value"] = np.where(a["value"] == 0, 0, self._fresh(a.shape))
        return Forms(data)

    def root(self, a: Forms) -> Forms:
        """Bound ``sqrt(N / D) = sqrt(N D) / D``; refuses what the argument of the verifier does not cover."""
        if np.any(a["exponential"]):
            raise VerificationError("a square root of an exponential: the program is outside LAX")
        self.roots += int(a.data.size)
        if "sqrt" in self.uninterpreted:
            return self.function("sqrt", [a])
        self.radicand.note(a)
        if np.any(a["root"]):
            raise VerificationError("a square root under a square root: roots must be taken as unknown")
        product = a.numerator * a.denominator
        data = np.array(a.data)
        data["value"] = self._fresh(a.shape)
        data["n_plain"] = 1
        for name in ("degree", "bits", "fraction"):
            data[f"n_{name}"] = np.ceil(getattr(product, name) / 2)
        data["n_bits"] += 1
        data["root"] = True
        return Forms(data)

    def exponential(self, a: Forms) -> Forms:
        """Bound ``exp(N / D)``: one term, exponent N / D; refuses a second exponential."""
        if "exp" in self.uninterpreted:
            return self.function("exp", [a])
        if np.any(a["exponential"]):
            raise VerificationError("two exponentials on one path: the program is outside LAX")
        self.exponentials += 1
        numerator, denominator = a.numerator, a.denominator
        data = np.zeros(a.shape, FORM)
        data["value"] = self._fresh(a.shape)
        data["n_terms"], data["exponential"], data["root"] = 1, True, a["root"]
        data["u_degree"], data["v_degree"] = numerator.degree, denominator.degree
        data["u_bits"] = numerator.bits + denominator.fraction
        data["v_bits"] = denominator.bits + numerator.fraction
        return Forms(data)

    def total(self, a: Forms, axis: int, keep: bool) -> Forms:
        """Bound a sum along an axis."""
        parts = np.moveaxis(a.data, axis, 0)
        result = Forms(parts[0]) if len(parts) else Forms(np.zeros(parts.shape[1:], FORM))
        for part in parts[1:]:
            result = self.add(result, Forms(part))
        return Forms(np.expand_dims(result.data, axis)) if keep else result

    def function(self, name: str, values: Sequence[Forms]) -> Forms:
        """Return a new variable per element; refuses functions of exponentials that are interpreted."""
        shape = np.broadcast_shapes(*(value.shape for value in values))
        for value in values:
            if np.any(value["exponential"]):
                raise VerificationError(f"{name} of an exponential: the program is outside LAX")
            self.radicand.note(value)
        self.functions += math.prod(shape)
        return self.variables(shape)

    def maximum(self, a: Forms, axis: int, keep: bool) -> Forms:
        """Return a variable per slice along an axis; the same for slices of the same elements."""
        parts = np.moveaxis(a.data, axis, 0)
        if "reduce_max" in self.uninterpreted:
            self.functions += int(a.data.size)
            free = self.function("reduce_max", [Forms(part) for part in parts])
            return free.map(lambda data: np.expand_dims(data, axis)) if keep else free
        columns = parts["value"].reshape(len(parts), -1).T
        found = [self._unknown(tuple(column)) for column in columns.tolist()]
        data = np.zeros(parts.shape[1:], FORM)
        data["n_plain"] = data["n_degree"] = 1
        numbers, values = (np.asarray([pair[i] for pair in found]).reshape(data.shape) for i in (0, 1))
        data["value"], data["exponential"] = values, np.any(parts["exponential"], axis=0)
        self.maxima.append(np.expand_dims(numbers, axis) if keep else numbers)
        return Forms(np.expand_dims(data, axis) if keep else data)

    def _unknown(self, elements: tuple[int, ...]) -> tuple[int, int]:
        if elements not in self._unknowns:
            self._unknowns[elements] = len(self._unknowns), int(self._fresh(()))
        return self._unknowns[elements]

    def joined(self, values: Sequence[Forms], function: Callable[[Sequence[Array]], Array]) -> Forms:
        """Apply a rearrangement of several arrays."""
        return Forms(function([value.data for value in values]))

    def _combined(
        self, a: Forms, b: Forms, numerator: Polynomial, denominator: Polynomial, shared: Array, added: Array
    ) -> Forms:
        exponents = Exponents.of(a).joined(Exponents.of(b), added)
        self._note([numerator, denominator])
        data = np.zeros(np.broadcast_shapes(a.shape, b.shape), FORM)
        for name in _POLYNOMIAL:
            data[f"n_{name}"] = getattr(numerator, name)
            data[f"d_{name}"] = np.where(shared == 0, 0, getattr(denominator, name))
        for name in ("u_degree", "u_bits", "v_degree", "v_bits"):
            data[name] = getattr(exponents, name)
        data["value"], data["shared"] = self._fresh(data.shape), shared
        data["exponential"] = a["exponential"] | b["exponential"]
        data["root"] = a["root"] | b["root"]
        return Forms(data)

    def _note(self, sides: Sequence[Polynomial]) -> None:
        """Keep the largest sizes; VerificationError if they are beyond all fields."""
        self.largest.join(sides)
        if max(*self.largest.degrees, *self.largest.bits) > HIGHEST:
            raise VerificationError("the degrees are too large for 31-bit fields; shrink the inputs")

    def _fresh(self, shape: tuple[int, ...]) -> Array:
        count = math.prod(shape)
        first, self._values = self._values, self._values + count
        return np.arange(first, first + count).reshape(shape)

    def _product(self, a: Array, b: Array) -> Array:
        """Return the identity of a product of denominators; pairs in either order have the same."""
        a, b = np.broadcast_arrays(a, b)
        pairs = np.stack([np.minimum(a, b).ravel(), np.maximum(a, b).ravel()], axis=1)
        unique, where = np.unique(pairs, axis=0, return_inverse=True)
        names = [self._named(int(low), int(high)) for low, high in unique]
        return np.asarray(names, np.int64)[where.ravel()].reshape(a.shape)

    def _named(self, low: int, high: int) -> int:
        if low == 0:
            return high
        return self._denominators.setdefault((low, high), len(self._denominators) + 1)
