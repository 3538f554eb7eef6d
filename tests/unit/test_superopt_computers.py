"""What computers compute: roundings, integers, domains and instability are not those of real numbers."""

from __future__ import annotations

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

from ladder.superopt.verifier import check_stability, verify_equal, verify_for_all_extents

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
