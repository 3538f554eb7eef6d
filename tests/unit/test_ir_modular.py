"""Primes, and arithmetic modulo them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ladder.ir import modular
from ladder.ir.modular import INT64_MODULI, LEAST_P, LEAST_Q, SAFE_PRIMES, draw_prime, is_prime


def sieve(limit: int) -> np.ndarray:
    prime = np.ones(limit + 1, bool)
    prime[:2] = False
    for number in range(2, math.isqrt(limit) + 1):
        if prime[number]:
            prime[number * number :: number] = False
    return np.flatnonzero(prime)


def test_primality_is_that_of_a_sieve():
    primes = set(sieve(20_000).tolist())
    assert {n for n in range(20_001) if is_prime(n)} == primes


@pytest.mark.parametrize("number", [2047, 3215031751, 3825123056546413051, 318665857834031151167461])
def test_strong_pseudoprimes_are_composite(number):
    assert not is_prime(number)


@pytest.mark.parametrize("p", [2147481143, 2305843009213690799])
def test_the_named_primes_are_safe(p):
    assert is_prime(p)
    assert is_prime((p - 1) // 2)
    assert p % 4 == (p - 1) // 2 % 4 == 3


def test_the_family_has_as_many_members_as_stated():
    """Sieve p = 24 k + 23 and q = 12 k + 11 over the whole range."""
    first, last = -(-(LEAST_P - 23) // 24), (INT64_MODULI - 24) // 24
    good = np.ones(last + 1 - first, bool)
    for prime in sieve(math.isqrt(INT64_MODULI) + 1).tolist():
        if prime > 3:
            inverse = pow(24, -1, prime)
            good[(-23 * inverse - first) % prime :: prime] = False
            good[(-22 * inverse - first) % prime :: prime] = False  # p = 1 mod prime: divides q
    assert int(good.sum()) == SAFE_PRIMES


def test_draws_are_members_and_spread_over_the_range():
    generator = np.random.default_rng(0)
    drawn = [draw_prime(generator) for _ in range(200)]
    assert len(set(drawn)) > 195
    for p in drawn:
        q = (p - 1) // 2
        assert LEAST_P <= p < INT64_MODULI
        assert q >= LEAST_Q
        assert p % 8 == 7
        assert is_prime(p)
        assert is_prime(q)
    assert abs(np.mean(drawn) / (1.5 * LEAST_P) - 1) < 0.05


@pytest.mark.parametrize("count", [3, 200])
def test_powers(count):
    generator = np.random.default_rng(1)
    p = 2147481143
    base, exponent = generator.integers(0, p, count), generator.integers(0, p, count)
    found = modular.power(p, base, exponent)
    assert found.tolist() == [pow(b, e, p) for b, e in zip(base.tolist(), exponent.tolist(), strict=True)]
