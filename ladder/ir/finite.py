"""Finite-field semantics: the ``finite`` column of the operator table.

A value is a pair of residues (Mirage, OSDI'25, §5): in Z_p, and in Z_q, q | p - 1, for use
as an exponent. ``exp`` maps the exponent part x to omega**x, omega of order q, and has no
exponent part itself, so a second exponential on a path is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from ladder.ir import arrange
from ladder.ir.indexing import gather
from ladder.ir.numeric import index_sizes
from ladder.ir.operator import Attributes
from ladder.ir.quantized_values import Components, assemble, require_components, spread
from tile_types.errors import LadderError, VerificationError

Array = npt.NDArray[Any]
Semantics = Callable[["Field", Sequence[Any], Attributes], Any]
SMALL = 1 << 31
"""Below this modulus, products of residues fit int64; above, Python integers are used."""


class UndefinedResidueError(LadderError):
    """A random draw hit a zero denominator or a non-residue under a root: draw again."""


@dataclass(frozen=True)
class Field:
    """The fields Z_p and Z_q and an element of order q.

    Parameters
    ----------
    p, q
        Primes with q | p - 1; roots need p = q = 3 mod 4.
    omega
        An element of Z_p of order q.

    Raises
    ------
    VerificationError
        If q does not divide p - 1 or omega has another order.
    """

    p: int = 2147481143
    q: int = 1073740571
    omega: int = 4

    def __post_init__(self) -> None:
        if (self.p - 1) % self.q:
            raise VerificationError(f"q={self.q} does not divide p-1={self.p - 1}")
        if self.omega % self.p in (0, 1) or pow(self.omega, self.q, self.p) != 1:
            raise VerificationError(f"omega={self.omega} does not have order q={self.q} modulo p={self.p}")

    def array(self, values: Any) -> Array:
        """Return integers as residues can be held without overflow."""
        return np.asarray(values).astype(np.int64 if self.p < SMALL else object)

    def random(self, shape: tuple[int, ...], generator: np.random.Generator) -> Residues:
        """Draw independent uniform residues."""
        return Residues(
            self.array(generator.integers(0, self.p, shape)), self.array(generator.integers(0, self.q, shape))
        )

    def number(self, value: float) -> Residues:
        """Return the residues of a float, which is a dyadic rational."""
        fraction = Fraction(value)
        return Residues(*(self.array(_residue(fraction, m)) for m in (self.p, self.q)))


@dataclass(frozen=True, eq=False)
class Residues:
    """An array over Z_p, with its counterpart over Z_q unless it passed an exponential."""

    p: Array
    q: Array | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.p.shape)

    def map(self, function: Callable[[Array], Array]) -> Residues:
        """Apply a rearrangement to both parts."""
        return Residues(function(self.p), None if self.q is None else function(self.q))


def _residue(fraction: Fraction, modulus: int) -> int:
    return fraction.numerator * pow(fraction.denominator, -1, modulus) % modulus


def both(function: Callable[..., Array]) -> Semantics:
    """Apply ``function(modulus, *arrays)`` in Z_p, and in Z_q if all operands have that part."""

    def semantics(field: Field, values: Sequence[Any], attributes: Attributes) -> Residues:
        return apply(field, function, *values)

    return semantics


def apply(field: Field, function: Callable[..., Array], *values: Residues) -> Residues:
    """Apply ``function(modulus, *arrays)`` to both parts."""
    exponents = [value.q for value in values]
    has_exponents = all(part is not None for part in exponents)
    return Residues(
        function(field.p, *(value.p for value in values)),
        function(field.q, *exponents) if has_exponents else None,
    )


def arranged(function: Callable[[Sequence[Any], Attributes], Any]) -> Semantics:
    """Lift a rearrangement ``(arrays, attributes) -> array``."""

    def semantics(field: Field, values: Sequence[Any], attributes: Attributes) -> Any:
        if any(isinstance(value, Components) for value in values):
            return function(values, attributes)
        return apply(field, lambda modulus, *arrays: function(arrays, attributes), *values)

    return semantics


def power(modulus: int, base: Array, exponent: Any) -> Array:
    """Return ``base ** exponent`` element by element, by square and multiply."""
    exponent = np.asarray(exponent)
    result = np.ones(np.broadcast_shapes(np.shape(base), exponent.shape), np.asarray(base).dtype)
    for bit in range(int(exponent.max(initial=0)).bit_length()):
        odd = (exponent >> bit) & 1 == 1
        result = np.where(odd, result * base % modulus, result)
        base = base * base % modulus
    return result


def add(modulus: int, a: Array, b: Array) -> Array:
    """Return ``a + b``."""
    return (a + b) % modulus


def subtract(modulus: int, a: Array, b: Array) -> Array:
    """Return ``a - b``."""
    return (a - b) % modulus


def multiply(modulus: int, a: Array, b: Array) -> Array:
    """Return ``a * b``."""
    return a * b % modulus


def negate(modulus: int, a: Array) -> Array:
    """Return ``-a``."""
    return -a % modulus


def square(modulus: int, a: Array) -> Array:
    """Return ``a * a``."""
    return a * a % modulus


def inverse(modulus: int, a: Array) -> Array:
    """Return ``1 / a``; raises UndefinedResidueError at 0."""
    if np.any(a == 0):
        raise UndefinedResidueError(f"division by zero modulo {modulus}; draw new inputs")
    return power(modulus, a, np.asarray(modulus - 2, a.dtype))


def divide(modulus: int, a: Array, b: Array) -> Array:
    """Return ``a / b``; raises UndefinedResidueError where b is 0."""
    return a * inverse(modulus, b) % modulus


def root(modulus: int, a: Array) -> Array:
    """Return the square root that is itself a square, for modulus = 3 mod 4; raises UndefinedResidueError."""
    if modulus % 4 != 3:
        raise VerificationError(f"square roots need a modulus of 3 mod 4, got {modulus}")
    found = power(modulus, a, np.asarray((modulus + 1) // 4, a.dtype))
    if np.any(found * found % modulus != a % modulus):
        raise UndefinedResidueError(f"a non-residue modulo {modulus} under a root; draw new inputs")
    return found


def inverse_root(modulus: int, a: Array) -> Array:
    """Return ``1 / sqrt(a)``."""
    return inverse(modulus, root(modulus, a))


def exponential(field: Field, value: Residues) -> Residues:
    """Map x to omega**x; raises VerificationError for a second exponential on a path."""
    if value.q is None:
        raise VerificationError("two exponentials on one path: the program is outside LAX")
    return Residues(power(field.p, field.array(field.omega), value.q), None)


def exp(field: Field, values: Sequence[Any], attributes: Attributes) -> Residues:
    """Return ``exp(x)``."""
    return exponential(field, values[0])


def _logistic(field: Field, value: Residues) -> Residues:
    """Return ``1 / (1 + exp(-x))``."""
    small = exponential(field, apply(field, negate, value))
    return Residues(inverse(field.p, add(field.p, small.p, field.array(1))), None)


def sigmoid(field: Field, values: Sequence[Any], attributes: Attributes) -> Residues:
    """Return ``1 / (1 + exp(-x))``."""
    return _logistic(field, values[0])


def silu(field: Field, values: Sequence[Any], attributes: Attributes) -> Residues:
    """Return ``x / (1 + exp(-x))``."""
    return apply(field, multiply, values[0], _logistic(field, values[0]))


def tanh(field: Field, values: Sequence[Any], attributes: Attributes) -> Residues:
    """Return ``2 / (1 + exp(-2x)) - 1``."""
    logistic = _logistic(field, apply(field, add, values[0], values[0]))
    return Residues((2 * logistic.p - 1) % field.p, None)


def constant(field: Field, values: Sequence[Any], attributes: Attributes) -> Residues:
    """Fill ``shape`` with the residue of a dyadic number."""
    return field.number(attributes["value"]).map(lambda part: np.broadcast_to(part, attributes["shape"]))


def convert(field: Field, values: Sequence[Any], attributes: Attributes) -> Any:
    """Decode a quantized operand; keep any other."""
    if not isinstance(values[0], Components):
        return values[0]
    return assemble(
        values[0],
        lambda a, b: apply(field, subtract, a, b),
        lambda a, b: apply(field, multiply, a, b),
        lambda a, group, extent: a.map(lambda part: spread(part, group, extent)),
    )


def elements(field: Field, values: Sequence[Any], attributes: Attributes) -> Any:
    """Return the part that the codes mean."""
    return require_components(values[0], "elements").elements


def metadata(field: Field, values: Sequence[Any], attributes: Attributes) -> Any:
    """Return a metadata array."""
    return require_components(values[0], "metadata").metadata[attributes["field"]]


def load(field: Field, values: Sequence[Any], attributes: Attributes) -> Any:
    """Take the tile at ``begin``."""
    value = values[0]
    if not isinstance(value, Components):
        return value.map(lambda part: arrange.load([part], attributes))
    sides = {}
    for side in ("p", "q"):
        parts = {name: getattr(array, side) for name, array in value.metadata.items()}
        sides[side] = arrange.load(
            [Components(getattr(value.elements, side), parts, value.group)], attributes
        )
    return Components(
        Residues(sides["p"].elements, sides["q"].elements),
        {name: Residues(sides["p"].metadata[name], sides["q"].metadata[name]) for name in value.metadata},
        sides["p"].group,
    )


def pad(field: Field, values: Sequence[Any], attributes: Attributes) -> Residues:
    """Surround with the residue of ``value``."""
    fill = Fraction(attributes["value"])
    width = list(zip(attributes["low"], attributes["high"], strict=True))
    return apply(field, lambda m, array: np.pad(array, width, constant_values=_residue(fill, m)), values[0])


def sum_along(modulus: int, array: Array, axis: int, keep: bool) -> Array:
    """Sum residues; the sum of residues below 2**31 cannot overflow int64."""
    total: Array = np.sum(array, axis=axis, keepdims=keep)
    return np.asarray(total % modulus)


def reduce_sum(field: Field, values: Sequence[Any], attributes: Attributes) -> Residues:
    """Sum along ``axis``."""
    axis, keep = attributes["axis"], attributes["keep"]
    return apply(field, lambda modulus, array: sum_along(modulus, array, axis, keep), values[0])


def contract(field: Field, values: Sequence[Any], attributes: Attributes) -> Residues:
    """Sum the product of the operands over the indices that the result lacks."""
    indexing, extents = index_sizes(values, attributes)
    names = list(indexing.names)
    kept = len(indexing.result)
    shape = [extents[name] for name in names]

    def contracted(modulus: int, *arrays: Array) -> Array:
        factors = [
            gather(array, axes, names, extents) for array, axes in zip(arrays, indexing.operands, strict=True)
        ]
        full = np.broadcast_to(reduce(lambda a, b: multiply(modulus, a, b), factors), shape)
        flat = full.reshape(*shape[:kept], math.prod(shape[kept:]))
        return sum_along(modulus, flat, -1, False)

    return apply(field, contracted, *values)


def view(field: Field, values: Sequence[Any], attributes: Attributes) -> Residues:
    """Read one operand through an affine map."""
    indexing, extents = index_sizes(values, attributes)
    shape = [extents[name] for name in indexing.result]
    axes = indexing.operands[0]
    return apply(
        field, lambda m, part: np.broadcast_to(gather(part, axes, indexing.result, extents), shape), values[0]
    )


def matmul(field: Field, values: Sequence[Any], attributes: Attributes) -> Residues:
    """Multiply matrices by broadcasting, reducing each product."""

    def multiplied(modulus: int, a: Array, b: Array) -> Array:
        rows = b if attributes["transpose_b"] else np.swapaxes(b, -1, -2)
        products = multiply(modulus, a[..., :, None, :], rows[..., None, :, :])
        return sum_along(modulus, products, -1, False)

    return apply(field, multiplied, *values)


def _joined(modulus: int, array: Array, attributes: Attributes) -> Array:
    return np.concatenate(list(array), axis=attributes["axis"])


_ACCUMULATORS: dict[str, Callable[[int, Array, Attributes], Array]] = {
    "sum": lambda modulus, array, attributes: sum_along(modulus, array, 0, False),
    "last": lambda modulus, array, attributes: array[-1],
    "concat": _joined,
}


def accumulate(field: Field, values: Sequence[Any], attributes: Attributes) -> Residues:
    """Combine the stacked iterations; kinds that compare values are refused by name."""
    combine = _ACCUMULATORS.get(attributes["kind"])
    if combine is None:
        raise VerificationError(f"accumulate {attributes['kind']!r} has no meaning in a finite field")
    return apply(field, lambda modulus, array: combine(modulus, array, attributes), values[0])
