"""Arithmetic modulo a prime on numpy arrays, a primality test, and the family of fields to draw from.

Moduli below 2**31 use int64 (a product of two residues is below 2**62); larger ones use Python integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from tile_types.errors import LadderError, VerificationError

Array = npt.NDArray[Any]
INT64_MODULI = 1 << 31
"""Products of residues fit int64 for moduli below this one; for larger moduli Python integers are used."""

LEAST_P, LEAST_Q = 1 << 30, 1 << 29
"""`draw_prime` returns p >= LEAST_P, with q = (p - 1) / 2 >= LEAST_Q."""

SAFE_PRIMES = 817_344
"""How many primes `draw_prime` chooses from: p = 2q + 1 in [2**30, 2**31), q prime, p = 7 mod 8."""

CANDIDATES = 64
"""Numbers that `draw_prime` draws at once; about one in 55 is of the family."""

_SMALL_PRIMES = math.prod((5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79))
"""None of the family has one as a factor: candidates are no multiples of 2 and 3."""

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
"""Miller-Rabin with these bases is a proof below 3.3e24 (Sorenson & Webster, 2015)."""


class UndefinedResidueError(LadderError):
    """A random draw hit a zero denominator or a non-residue under a root: draw again."""


@lru_cache(maxsize=64)
def is_prime(number: int) -> bool:
    """Return whether a number below 3.3e24 is prime (deterministic Miller-Rabin)."""
    if number < 2 or any(number % witness == 0 for witness in _WITNESSES):
        return number in _WITNESSES
    twos = ((number - 1) & (1 - number)).bit_length() - 1
    return all(_passes(number, witness, twos) for witness in _WITNESSES)


def _passes(number: int, witness: int, twos: int) -> bool:
    power = pow(witness, (number - 1) >> twos, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


def draw_prime(generator: np.random.Generator) -> int:
    """Draw p uniformly from the family of `SAFE_PRIMES`.

    p = 2q + 1 with q prime makes the order of every square but 1 equal to q; p = 7 mod 8 gives
    p = q = 3 mod 4, so that roots are one power and -1 is no residue in either field. Primes of
    the family are -1 mod 24 (p, q are not multiples of 3): candidates are drawn from that class.
    """
    first, last = -(-(LEAST_P - 23) // 24), (INT64_MODULI - 24) // 24
    while True:
        for number in generator.integers(first, last + 1, CANDIDATES):
            p = 24 * int(number) + 23
            q = (p - 1) // 2
            # Small factors, then base-2 tests of Fermat: they refuse nearly every composite.
            if math.gcd(p * q, _SMALL_PRIMES) > 1 or pow(2, q - 1, q) != 1 or pow(2, p - 1, p) != 1:
                continue
            if is_prime(q) and is_prime(p):
                return p


LEAST_LARGE = 1 << 60
LARGE_PRIMES = 1 << 54
"""`draw_large_prime` returns primes from 2**60 to 2**61; there are more than so many (Dusart, 2010)."""


def draw_large_prime(generator: np.random.Generator) -> int:
    """Draw a prime from 2**60 to 2**61 uniformly: for what needs neither exponents nor roots."""
    while True:
        number = int(generator.integers(LEAST_LARGE, LEAST_LARGE << 1)) | 1
        if is_prime(number):
            return number


MOST_SINGLE_POWERS = 64
"""Most elements for which Python's ``pow``, element by element, is faster than squaring whole arrays."""


def power(modulus: int, base: Array, exponent: Any) -> Array:
    """Return ``base ** exponent`` element by element, by square and multiply."""
    base, exponent = np.asarray(base), np.asarray(exponent)
    shape = np.broadcast_shapes(base.shape, exponent.shape)
    if math.prod(shape) <= MOST_SINGLE_POWERS:
        pairs = zip(_numbers(base, shape), _numbers(exponent, shape), range(math.prod(shape)), strict=False)
        return np.array([pow(b, e, modulus) for b, e, _ in pairs], base.dtype).reshape(shape)
    result = np.ones(shape, base.dtype)
    for bit in range(int(exponent.max(initial=0)).bit_length()):
        odd = (exponent >> bit) & 1 == 1
        result = np.where(odd, result * base % modulus, result)
        base = base * base % modulus
    return result


def _numbers(array: Array, shape: tuple[int, ...]) -> Iterable[Any]:
    """Return the elements of an array as it is broadcast to a shape; one element repeats without end."""
    if array.size == 1:
        return repeat(array.item())
    whole = array if array.shape == shape else np.broadcast_to(array, shape)
    return whole.ravel().tolist()


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


def inverse(modulus: int, a: Array) -> Array:
    """Return ``1 / a``; raises UndefinedResidueError at 0."""
    if np.any(a == 0):
        raise UndefinedResidueError(f"division by zero modulo {modulus}; draw new inputs")
    return power(modulus, a, np.asarray(modulus - 2, a.dtype))


def divide(modulus: int, a: Array, b: Array) -> Array:
    """Return ``a / b``; raises UndefinedResidueError where b is 0."""
    return a * inverse(modulus, b) % modulus


def root_or_twin(modulus: int, a: Array) -> Array:
    """Return the square root of whichever of a and -a is a square, itself a square, for modulus = 3 mod 4."""
    if modulus % 4 != 3:
        raise VerificationError(f"square roots need a modulus of 3 mod 4, got {modulus}")
    return power(modulus, a, np.asarray((modulus + 1) // 4, np.asarray(a).dtype))


def root(modulus: int, a: Array) -> Array:
    """Return the square root that is itself a square, for modulus = 3 mod 4; raises UndefinedResidueError."""
    found = root_or_twin(modulus, a)
    if np.any(found * found % modulus != a % modulus):
        raise UndefinedResidueError(f"a non-residue modulo {modulus} under a root; draw new inputs")
    return found


def sum_along(modulus: int, array: Array, axis: int, keep: bool) -> Array:
    """Sum residues; the sum of 2**32 residues below 2**31 fits int64."""
    total: Array = np.sum(array, axis=axis, keepdims=keep)
    return np.asarray(total % modulus)
