"""What computers compute: roundings, integers, domains and instability are not those of real numbers."""

from __future__ import annotations

import numpy as np
import pytest
from superopt_computers import (
    F32,
    computer_near_misses,
    conversions,
    domains,
    functions,
    integers,
    to,
    true_rewritings,
    typed,
    unstable,
)

from ladder.ir import Field
from ladder.superopt.verifier import check_stability, equivalence, verify_equal, verify_for_all_extents
from ladder.superopt.verifier.domains import Signs
from ladder.superopt.verifier.values import holds

TRUE = list(true_rewritings())


@pytest.mark.parametrize("family", [conversions, functions, integers, domains])
def test_near_misses_of_computers_are_rejected(family):
    accepted = [pair.name for pair in family() if verify_equal(pair.first, pair.second).equal]
    assert accepted == []


def test_unstable_rewritings_are_rejected():
    accepted = [pair.name for pair in unstable() if check_stability(pair.second, pair.first).stable]
    assert accepted == []


def test_there_are_enough_near_misses():
    assert sum(1 for _ in computer_near_misses()) >= 300


@pytest.mark.parametrize("pair", TRUE, ids=[pair.name for pair in TRUE])
def test_true_rewritings_are_accepted_at_all_extents(pair):
    certificate, _ = verify_for_all_extents(pair.first, pair.second)
    assert certificate.equal, certificate.reason
    assert 0 < certificate.delta <= 2**-64


EXACT = {
    "int8 by way of float32": ("int8", lambda a: to(to(a, F32), "int8")),
    "int8 by way of int32": ("int8", lambda a: to(to(a, "int32"), "int8")),
    "bool by way of float16": ("bool", lambda a: to(to(a, "float16"), "bool")),
    "float16 by way of float32": ("float16", lambda a: to(to(a, F32), "float16")),
    "bfloat16 by way of float32": ("bfloat16", lambda a: to(to(a, F32), "bfloat16")),
}


@pytest.mark.parametrize("name", EXACT)
def test_conversions_that_keep_all_values_are_none(name):
    ttype, body = EXACT[name]
    plain = typed(lambda a: a.op("transpose", permutation=(1, 0)), {"a": ttype})
    moved = typed(lambda a: body(a).op("transpose", permutation=(1, 0)), {"a": ttype})
    assert verify_equal(plain, moved).equal


def test_integers_that_cannot_wrap_around_are_numbers():
    types = {"a": "int8", "b": "int8"}
    within = typed(lambda a, b: to(to(a, "int32") + to(b, "int32"), F32), types)
    outside = typed(lambda a, b: to(a, F32) + to(b, F32), types)
    assert verify_equal(within, outside).equal
    ring = typed(lambda a, b: (a + b) * (a + b), types)
    assert verify_equal(ring, typed(lambda a, b: a * a + (a + a) * b + b * b, types)).equal


def test_a_program_is_replaced_only_where_it_is_finite():
    """x y / y is x wherever it is finite; x is finite where x y / y is not."""
    types = {"x": F32, "y": F32}
    plain = typed(lambda x, y: x + y * 0.0, types)
    fraction = typed(lambda x, y: (x * y) / y + y * 0.0, types)
    assert verify_equal(fraction, plain).equal
    certificate = verify_equal(plain, fraction)
    assert certificate.verdict == "refused"
    assert "divides by what may be 0" in certificate.reason


def test_huge_degrees_are_refused():
    """Degrees beyond the largest float are no error."""

    def tower(x):
        for _ in range(1100):
            x = x.square()
        return x

    graph = typed(tower, {"x": F32}, (1, 1))
    certificate = verify_equal(graph, graph)
    assert certificate.verdict == "refused"
    assert "too large for 31-bit fields" in certificate.reason


HOLDS = {
    ("float16", "bfloat16"): False,
    ("bfloat16", "float16"): False,
    ("float16", "fp8_e5m2"): True,
    ("fp8_e5m2", "fp8_e4m3"): False,
    ("float32", "bfloat16"): True,
    ("float32", "float64"): False,
    ("float16", "int32"): False,
    ("float16", "int8"): True,
    ("float32", "int32"): False,
    ("float64", "int32"): True,
    ("uint8", "int8"): False,
    ("int32", "uint8"): True,
}
"""(target, source) -> whether the target has all values: digits and exponents of both kinds count."""


@pytest.mark.parametrize(("target", "source"), HOLDS)
def test_a_type_holds_another_by_digits_and_exponents(target, source):
    assert holds(target, source) == HOLDS[target, source]


SIGNS = {"positive": 3.0, "negative": -2.0, "zero": 0.0}


@pytest.mark.parametrize("left", SIGNS)
@pytest.mark.parametrize("right", SIGNS)
@pytest.mark.parametrize("name", ["add", "subtract", "multiply"])
def test_signs_that_are_known_are_right(name, left, right):
    """And what is known of the operands' signs is enough where no sum of both signs is made."""
    arithmetic = Signs(Field(1019, 509, 4))
    values = SIGNS[left], SIGNS[right]
    found = getattr(arithmetic, name)(*map(arithmetic.number, values))
    number = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply}[name](*values)
    for known, holds_ in ((found.low, number >= 0), (found.high, number <= 0), (found.apart, number != 0)):
        assert holds_ or not known
    other = -values[1] if name == "subtract" else values[1]
    if name == "multiply" or values[0] * other >= 0:
        assert bool(found.low) == (number >= 0)
        assert bool(found.high) == (number <= 0)
        assert bool(found.apart) == (number != 0)


@pytest.mark.parametrize(("times", "stable"), [(1.0, True), (2.0**6, False), (2.0**9, False)])
def test_errors_are_compared_with_the_originals_own(times, stable):
    """Both add what they take away again, the candidate so many times as much: so is its error."""
    types = {"x": F32, "y": F32}

    def program(large):
        return typed(lambda x, y: (x * y + x * large) - x * large, types, (4, 16))

    found = check_stability(program(2.0**6 * times), program(2.0**6))
    assert found.stable == stable, found.reason


@pytest.mark.parametrize(("name", "same"), [("less", False), ("less_equal", False), ("equal", True)])
def test_the_order_of_what_is_compared_matters(name, same):
    types = {"x": F32, "y": F32}
    first = typed(lambda x, y: to(x.op(name, y), F32), types)
    second = typed(lambda x, y: to(y.op(name, x), F32), types)
    assert equivalence.agree_at_once(first, second, seed=0) == same
