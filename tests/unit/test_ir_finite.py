"""Arithmetic over Z_p x Z_q."""

from __future__ import annotations

import numpy as np
import pytest

from ladder.ir import finite_rows, modular
from ladder.ir.finite import Field, Residues, UndefinedResidueError
from tile_types.errors import VerificationError

BIG = Field(2305843009213690799, 1152921504606845399, 4)


@pytest.mark.parametrize("field", [Field(), BIG], ids=["31 bit", "61 bit"])
def test_arithmetic_is_exact(field):
    generator = np.random.default_rng(1)
    a, b = field.random((50,), generator), field.random((50,), generator)
    integers = [(int(x), int(y)) for x, y in zip(a.p, b.p, strict=True)]
    assert [int(v) for v in modular.multiply(field.p, a.p, b.p)] == [x * y % field.p for x, y in integers]
    assert [int(v) for v in modular.divide(field.p, a.p, b.p)] == [
        x * pow(y, -1, field.p) % field.p for x, y in integers
    ]


@pytest.mark.parametrize("field", [Field(), BIG], ids=["31 bit", "61 bit"])
def test_exponential_turns_sums_into_products(field):
    generator = np.random.default_rng(2)
    a, b = field.random((20,), generator), field.random((20,), generator)
    both = field.exponential(field.add(a, b))
    apart = modular.multiply(field.p, field.exponential(a).p, field.exponential(b).p)
    assert np.array_equal(both.p, apart)
    assert [int(v) for v in field.exponential(a).p] == [pow(field.omega, int(e), field.p) for e in a.q]


def test_silu_is_x_times_sigmoid_and_tanh_its_definition():
    field = Field()
    x = field.random((20,), np.random.default_rng(3))
    silu = finite_rows.silu(field, [x], {})
    assert np.array_equal(silu.p, modular.multiply(field.p, x.p, finite_rows.sigmoid(field, [x], {}).p))
    up, down = (
        field.exponential(x).p,
        field.exponential(field.negate(x)).p,
    )
    quotient = modular.divide(field.p, modular.subtract(field.p, up, down), modular.add(field.p, up, down))
    assert np.array_equal(finite_rows.tanh(field, [x], {}).p, quotient)


def test_roots_of_squares_and_refusal_of_non_residues():
    p = Field().p
    x = np.arange(1, 200, dtype=np.int64)
    roots = modular.root(p, x * x % p)
    assert np.array_equal(roots * roots % p, x * x % p)
    with pytest.raises(UndefinedResidueError, match="non-residue"):
        modular.root(p, np.array([p - 1]))


def test_zero_denominators_ask_for_new_inputs():
    with pytest.raises(UndefinedResidueError, match="division by zero"):
        modular.inverse(7, np.array([1, 0]))


def test_dyadic_constants():
    field = Field()
    half = field.number(0.5)
    assert int(half.p) * 2 % field.p == 1
    assert int(half.q) * 2 % field.q == 1


def test_fields_are_checked():
    with pytest.raises(VerificationError, match="does not divide"):
        Field(23, 7, 4)
    with pytest.raises(VerificationError, match="does not have order"):
        Field(23, 11, 5)
    with pytest.raises(VerificationError, match="p=2047 is no prime"):
        Field(2047, 11, 2)  # 23 * 89, a pseudoprime to base 2
    with pytest.raises(VerificationError, match="no number"):
        Field().number(float("inf"))


def test_parts_without_exponent_stay_without():
    field = Field()
    x = Residues(field.array([1, 2]), None)
    assert field.add(x, field.random((2,), np.random.default_rng(0))).q is None
