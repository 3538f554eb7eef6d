"""Abstract expressions: equality and subexpressions under the axioms, against z3 and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from superopt_oracle import Oracle

from ladder.superopt.expressions import Pruner, UndecidedError, is_subexpression, normal
from ladder.superopt.expressions.normal import product
from ladder.superopt.expressions.subexpression import quotient

SQUARES = ("sum", "K", ("mul", "X", "X"))
NORM = ("sqrt", ("mul", ("const", 0.25), SQUARES))
PROGRAM = ("sum", "K", ("mul", ("div", "X", NORM), "W"))

EQUAL = [
    (("add", "a", "b"), ("add", "b", "a")),
    (("mul", "a", ("mul", "b", "c")), ("mul", ("mul", "a", "b"), "c")),
    (("mul", "a", ("add", "b", "c")), ("add", ("mul", "a", "b"), ("mul", "c", "a"))),
    (("add", ("div", "a", "z"), ("div", "b", "z")), ("div", ("add", "a", "b"), "z")),
    (("mul", "a", ("div", "b", "z")), ("div", ("mul", "a", "b"), "z")),
    (("div", ("div", "a", "b"), "c"), ("div", "a", ("mul", "b", "c"))),
    (("sum", 1, "a"), "a"),
    (("sum", 4, ("sum", 6, "a")), ("sum", 24, "a")),
    (("sum", "Kl", ("sum", "Kt", "a")), ("sum", "Kl*Kt", "a")),
    (("sum", 3, ("add", "a", "b")), ("add", ("sum", 3, "a"), ("sum", 3, "b"))),
    (("sum", 3, ("mul", "a", "b")), ("mul", ("sum", 3, "a"), "b")),
    (("sum", 3, ("div", "a", "b")), ("div", ("sum", 3, "a"), "b")),
    (("exp", ("add", "a", "b")), ("mul", ("exp", "a"), ("exp", "b"))),
    (PROGRAM, ("div", ("sum", "K", ("mul", "X", "W")), NORM)),
    (("div", ("div", "a", "a"), ("div", "b", "c")), ("div", "a", ("div", ("mul", "a", "b"), "c"))),
]
DIFFERENT = [
    ("a", "b"), (("div", "a", "a"), ("const", 1.0)), (("add", "a", "a"), "a"),
    (("sum", 2, "a"), ("add", "a", "a")), (("div", "a", ("div", "b", "c")), ("div", ("mul", "a", "c"), "b")),
    (("sqrt", ("mul", "a", "a")), "a"), (("silu", ("add", "a", "b")), ("add", ("silu", "a"), ("silu", "b"))),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), EQUAL)
def test_axioms(left, right):
    assert normal(left) == normal(right)


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_no_other_equalities(left, right):
    assert normal(left) != normal(right)


PREFIXES = {
    "X": True,
    ("mul", "X", "W"): True,
    ("mul", "X", "X"): True,
    SQUARES: True,
    NORM: True,
    ("mul", ("sum", "K", "X"), "W"): True,
    ("div", "W", NORM): True,
    ("mul", ("const", 0.25), "X"): True,
    ("mul", "W", "W"): False,
    ("mul", ("mul", "X", "X"), "W"): False,
    ("sqrt", "X"): False,
    ("div", "X", "W"): False,
    ("add", "X", "W"): False,
    ("sum", "K", ("sum", "K", ("mul", "X", "W"))): False,
    ("div", "X", SQUARES): False,
}


@pytest.mark.parametrize(("prefix", "kept"), PREFIXES.items())
def test_prefixes_of_a_norm(prefix, kept):
    assert is_subexpression(normal(prefix), normal(PROGRAM)) == kept


@pytest.fixture(scope="module")
def oracle():
    return Oracle(timeout_ms=300)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_z3_proves_is_kept(oracle, prefix):
    """Pruning may keep more than z3 proves within its time, never less."""
    if oracle.decide(prefix, PROGRAM):
        assert PREFIXES[prefix]


@pytest.mark.parametrize(
    "prefix", ["X", ("mul", "X", "W"), ("mul", "X", "X"), ("mul", ("sum", "K", "X"), "W")]
)
def test_z3_finds_easy_subexpressions(oracle, prefix):
    assert oracle.decide(prefix, PROGRAM) is True


LEAVES = st.sampled_from(["a", "b", "c"])
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["add", "mul", "div"]), inner, inner),
        st.tuples(st.just("sum"), st.sampled_from([2, 3, "k"]), inner),
        st.tuples(st.sampled_from(["exp", "sqrt"]), inner),
    ),
    max_leaves=6,
)


@pytest.mark.costly
@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS, EXPRESSIONS, st.sampled_from(["add", "mul", "div", "under", "exp", "silu", "sum"]))
def test_every_context_makes_a_subexpression(part, other, context):
    """The definition: an expression is a subexpression of what is built from it, rewritten as may be."""
    built = {
        "add": ("add", part, other), "mul": ("mul", part, other), "div": ("div", part, other),
        "under": ("div", other, part), "exp": ("exp", part), "silu": ("silu", part), "sum": ("sum", 5, part),
    }[context]  # fmt: skip
    outer = ("mul", ("add", built, other), ("div", "c", other))
    for whole in (built, outer):
        pruner = Pruner([whole])
        assert pruner.keeps(pruner.normal(part))


AXIOMS = {
    "commute": lambda a, b, c: (("mul", a, b), ("mul", b, a)),
    "associate": lambda a, b, c: (("add", ("add", a, b), c), ("add", a, ("add", b, c))),
    "distribute": lambda a, b, c: (("mul", a, ("add", b, c)), ("add", ("mul", a, b), ("mul", a, c))),
    "add fractions": lambda a, b, c: (("add", ("div", a, c), ("div", b, c)), ("div", ("add", a, b), c)),
    "mul a fraction": lambda a, b, c: (("mul", a, ("div", b, c)), ("div", ("mul", a, b), c)),
    "div a fraction": lambda a, b, c: (("div", ("div", a, b), c), ("div", a, ("mul", b, c))),
    "sum of sums": lambda a, b, c: (("sum", 2, ("sum", 3, a)), ("sum", 6, a)),
    "mul out of sum": lambda a, b, c: (("sum", 2, ("mul", a, b)), ("mul", ("sum", 2, a), b)),
    "div out of sum": lambda a, b, c: (("sum", 2, ("div", a, b)), ("div", ("sum", 2, a), b)),
    "sum of adds": lambda a, b, c: (("sum", "k", ("add", a, b)), ("add", ("sum", "k", a), ("sum", "k", b))),
    "exp": lambda a, b, c: (("exp", ("add", a, b)), ("mul", ("exp", a), ("exp", b))),
}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(AXIOMS)), EXPRESSIONS, EXPRESSIONS, EXPRESSIONS, st.booleans())
def test_axioms_hold_for_all_expressions(name, a, b, c, under):
    left, right = AXIOMS[name](a, b, c)
    if under:
        left, right = ("div", c, ("sqrt", left)), ("div", c, ("sqrt", right))
    assert normal(left) == normal(right)


def test_division_of_polynomials():
    def polynomial(value):
        ((_, numerator),) = normal(value).fractions
        return numerator

    a, b = polynomial(("add", "x", "y")), polynomial(("add", "y", ("mul", "z", "z")))
    assert quotient(product(a, b), a) == b
    assert quotient(a, b) is None
    assert quotient(polynomial(("mul", "x", "y")), polynomial("x")) == polynomial("y")


def test_too_large_is_kept():
    wide = ("add", "a", "b")
    for _ in range(9):
        wide = ("mul", ("add", wide, ("f", wide)), wide)
    with pytest.raises(UndecidedError):
        normal(wide)
    pruner = Pruner(["a"])
    assert pruner.normal(wide) is None
    assert pruner.keeps(None)
    assert not pruner.keeps(pruner.normal("b"))
    assert Pruner(["a"], enabled=False).keeps(normal("b"))
