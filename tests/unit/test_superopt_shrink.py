"""When small extents prove all, and that the argument is refused where it fails; floating-point stability."""

from __future__ import annotations

import math

import numpy as np
import pytest
import superopt_programs
from superopt_programs import Value, concat

from ladder.ir import Graph, GraphBuilder, bind
from ladder.superopt.generator import get_program
from ladder.superopt.verifier import check_stability, verify_equal, verify_for_all_extents
from ladder.superopt.verifier.shrink import plan


def program(body, *shapes) -> Graph:
    g = GraphBuilder("p")
    return g.finish(
        body(*(Value(g, g.input(f"x{i}", "float32", shape)) for i, shape in enumerate(shapes))).name
    )


X, W = ("m", "k"), ("k", "n")


def test_reduced_symbols():
    def reductions(graph):
        return plan(graph, graph).summed

    assert reductions(program(lambda x, w: x @ w, X, W)) == {"k"}
    assert reductions(program(lambda x: x.square().sum(0), X)) == {"m"}
    assert reductions(get_program("rmsnorm_matmul").symbolic) == {"K"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda x: (x / x).sum(1), "need not vanish"),
        (lambda x: (x / (x.exp().sum(1) + x)).sum(1), "without a common denominator"),
        (lambda x: x.op("reshape", shape=("k", "m")), "does not treat all indices alike"),
        (lambda x: (x / (x + 1.0)).sum(1), "grow with the extents"),
    ],
)
def test_programs_whose_small_extents_prove_nothing(body, reason):
    graph = program(body, X)
    certificate, _ = verify_for_all_extents(graph, graph)
    assert certificate.verdict == "refused"
    assert reason in certificate.reason


def test_equal_programs():
    late = program(lambda x, w, c: (x @ w) / c, X, W, ("m", 1))
    early = program(lambda x, w, c: (x / c) @ w, X, W, ("m", 1))
    certificate, extents = verify_for_all_extents(early, late)
    assert certificate.equal
    assert extents["m"] == extents["n"] == 1
    assert extents["k"] > certificate.bound.degree


@pytest.mark.parametrize(
    ("body", "windows"),
    [
        (lambda x: x.exp().sum(1), 1),
        (lambda x: (x + 1.0).sum(1), 1),
        (lambda x: x.sqrt().sum(1), 1),
        (lambda x: x.exp().sum(1).square(), 2),
        (lambda x: x.exp().sum(1) + 1.0, 2),
        (lambda x: x.exp() / x.exp().sum(1), 2),
    ],
)
def test_sums_are_tested_at_each_extent_of_their_window(body, windows):
    graph = program(body, X)
    certificate, extents = verify_for_all_extents(graph, program(lambda x: body(x * 2.0 - x), X))
    assert certificate.equal
    assert extents["k"] == windows == plan(graph, graph).windows["k"]


def test_a_constant_for_a_sum_of_ones():
    """Equal at extent 1: the window has an extent more where a term has no sum."""
    first, second = (program(body, X) for body in (lambda x: (x + 1.0).sum(1), lambda x: x.sum(1) + 1.0))
    assert verify_equal(bind(first, {"m": 2, "k": 1}), bind(second, {"m": 2, "k": 1})).equal
    certificate, extents = verify_for_all_extents(first, second)
    assert certificate.verdict == "different"
    assert extents["k"] == 2


def test_axes_that_are_joined_in_two_orders_are_refused():
    """Blocks read [a, b] and write [b, a]: at extent 1 of a, nobody sees it."""

    def copied(names: str) -> Graph:
        b = GraphBuilder("copy", "block", grid={name: name for name in names})
        tile = b.add("load", b.input("x", "float32", ("a*b*t",)), grid=(0, 0), shape=("t",))
        body = b.finish(b.add("store", tile, grid=(1 - 1, 0), shape=("a*b*t",)))
        g = GraphBuilder("p")
        return g.finish(*g.nest(body, g.input("x0", "float32", ("a*b*t",)), name="y"))

    assert verify_for_all_extents(copied("ab"), copied("ab"))[0].equal
    certificate, _ = verify_for_all_extents(copied("ab"), copied("ba"))
    assert "joined in two orders" in certificate.reason


def test_a_difference_that_extent_two_hides():
    """(sum x)**3 and its part with at most two different indices agree at extent 2, not at 3."""

    def cube(x):
        s = x.sum(1)
        return s * s * s

    def at_most_two(x):  # s**3 minus 6 e_3, by Newton: 6 e_3 = p1**3 - 3 p1 p2 + 2 p3
        p1, p2, p3 = x.sum(1), x.square().sum(1), (x.square() * x).sum(1)
        return p1 * p1 * p1 - (p1 * p1 * p1 - 3.0 * p1 * p2 + 2.0 * p3)

    first, second = program(cube, (1, "k")), program(at_most_two, (1, "k"))
    assert verify_equal(bind(first, {"k": 2}), bind(second, {"k": 2})).equal
    assert verify_equal(bind(first, {"k": 3}), bind(second, {"k": 3})).verdict == "different"
    certificate, extents = verify_for_all_extents(first, second)
    assert certificate.verdict == "different"
    assert extents["k"] >= 4


def power_sums(x) -> list[Value]:
    powers = [x, x.square(), x.square() * x, x.square().square()]
    return [power.sum(1) for power in powers]


NEWTON = {
    2: lambda p1, p2, p3, p4: p1 * p1 - p2,
    3: lambda p1, p2, p3, p4: p1 * p1 * p1 - 3.0 * p1 * p2 + 2.0 * p3,
    4: lambda p1, p2, p3, p4: (
        p1 * p1 * p1 * p1 - 6.0 * p1 * p1 * p2 + 3.0 * p2 * p2 + 8.0 * p1 * p3 - 6.0 * p4
    ),
}
"""k -> k! times the k-th elementary symmetric polynomial: 0 iff fewer than k numbers are given."""


@pytest.mark.parametrize("least", NEWTON)
@pytest.mark.parametrize("divided", [False, True])
def test_differences_that_smaller_extents_hide(least, divided):
    def plain(x):
        p1, p2, p3, _ = power_sums(x)
        return p1 * p3 / p2 if divided else p1 * p2 + p3

    def changed(x):
        return plain(x) + NEWTON[least](*power_sums(x))

    first, second = program(plain, (1, "k")), program(changed, (1, "k"))
    assert verify_equal(bind(first, {"k": least - 1}), bind(second, {"k": least - 1})).equal
    certificate, extents = verify_for_all_extents(first, second)
    assert certificate.verdict == "different"
    assert extents["k"] >= least


@pytest.mark.parametrize("extent", [1, 2, 5, 9])
def test_equality_at_the_proved_extent_is_equality_at_others(extent):
    late = program(lambda x, w: (x @ w) / (x.square().sum(1) * 0.5).sqrt(), (1, "k"), W)
    early = program(lambda x, w: (x / (x.square().sum(1) * 0.5).sqrt()) @ w, (1, "k"), W)
    certificate, extents = verify_for_all_extents(early, late)
    assert certificate.equal
    assert extents["k"] > 3
    if extent > 1:  # at extent 1 a square stands under the root
        assert verify_equal(bind(early, {"k": extent, "n": 2}), bind(late, {"k": extent, "n": 2})).equal


def looped(axis_split: bool = True, kind: str = "sum") -> Graph:
    """Sum the columns of x[4, kl*kt] in a loop; or read the first tile only in each step."""
    b = GraphBuilder("sums", "block", grid={"b": 4}, loops={"kl": "kl"})
    x = b.input("x", "float32", (4, "kl*kt"))
    tile = b.add("load", x, grid=(0,), loop=(1 if axis_split else -1,), shape=(1, "kt"))
    total = b.add("accumulate", b.add("reduce_sum", tile, axis=1), kind=kind)
    body = b.finish(b.add("store", total, grid=(0,), shape=(4, 1)))
    g = GraphBuilder("looped")
    return g.finish(*g.nest(body, g.input("x0", "float32", (4, "kl*kt")), name="y"))


def test_loops():
    plain = program(lambda x: x.sum(1), (4, "kl*kt"))
    assert verify_for_all_extents(looped(), plain)[0].equal
    for broken, reason in ((looped(False), "do not make up axis 1"), (looped(kind="last"), "steps alike")):
        certificate, _ = verify_for_all_extents(broken, plain)
        assert certificate.verdict == "refused"
        assert reason in certificate.reason


def test_sums_of_what_does_not_change_count_the_steps():
    """Accumulating a value that all steps share multiplies it with their number."""
    b = GraphBuilder("steps", "block", loops={"kl": "kl"})
    x = b.add("load", b.input("x", "float32", (4, "kl")), loop=(-1,), shape=(4, "kl"))
    body = b.finish(b.add("store", b.add("accumulate", b.add("reduce_sum", x, axis=1)), shape=(4, 1)))
    g = GraphBuilder("p")
    graph = g.finish(*g.nest(body, g.input("x0", "float32", (4, "kl")), name="y"))
    assert verify_for_all_extents(graph, graph)[0].equal
    once = program(lambda x: x.sum(1), (4, "kl"))
    certificate, extents = verify_for_all_extents(graph, once)
    assert certificate.verdict == "different"
    assert extents["kl"] == 2  # equal at 1


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.exp().sum(1).sqrt(),
        lambda x: x.sigmoid().sum(1),
        lambda x: x.silu().sum(1),
        lambda x: ((x + 1.0).sum(1) * x).exp(),
    ],
)
def test_functions_of_any_sums_are_equal_for_equal_sums(body):
    """Each function becomes an input where its operands were proved equal at all extents."""
    graph, turned = program(body, X), program(lambda x: body(x * 2.0 - x), X)
    assert verify_for_all_extents(graph, turned)[0].equal
    assert not verify_for_all_extents(graph, program(lambda x: body(x * 2.0), X))[0].equal


def half(body, *shapes) -> Graph:
    g = GraphBuilder("p")
    return g.finish(
        body(*(Value(g, g.input(f"x{i}", "float16", shape)) for i, shape in enumerate(shapes))).name
    )


def test_stability():
    """a² - b² as (a + b)(a - b) is stable, the other way round is not; a large intermediate overflows."""
    squares = half(lambda a, b: a.square() - b.square(), (8, 8), (8, 8))
    factored = half(lambda a, b: (a + b) * (a - b), (8, 8), (8, 8))
    assert check_stability(factored, squares).stable
    plain = half(lambda a, b: a * b, (8, 8), (8, 8))
    scaled = half(lambda a, b: a.op("mul", b) * b / b, (8, 8), (8, 8))
    assert check_stability(plain, plain).stable
    found = check_stability(scaled, plain)
    assert not found.stable
    assert "relative error" in found.reason


@pytest.mark.parametrize("kind", ["float64", "int64", "int32"])
def test_stability_of_types_without_codes(kind):
    """Values of 64 bits are rounded as they are."""

    def added(a, b):
        return (a.op("convert", type=kind) + b.op("convert", type=kind)).op("convert", type="float16")

    plain = half(added, (8, 8), (8, 8))
    assert check_stability(plain, plain).stable


@pytest.mark.parametrize("factor", [1 / 60, 0.25])
def test_products_overflow_that_only_a_factor_kept_small(factor, monkeypatch):
    """(x k) @ w as (x @ w) k: no order of the original's terms overflows, that of larger ones does.

    Back, x k is rounded where k is no power of two, which sums that cancel show.
    """
    monkeypatch.setattr(superopt_programs, "TYPE", "float16")
    before = half(lambda x, w: (x * factor) @ w, (8, 16), (16, 8))
    after = half(lambda x, w: (x @ w) * factor, (8, 16), (16, 8))
    turned = half(lambda x, w: (w.T @ (x * factor).T).T, (8, 16), (16, 8))
    assert not check_stability(after, before).stable
    assert check_stability(before, after).stable == (math.frexp(factor)[0] == 0.5)
    assert check_stability(turned, before).stable


@pytest.mark.parametrize("seed", range(3))
def test_gains_may_not_overflow_before_the_norm_divides(seed, monkeypatch):
    """(x g) @ w / norm rounds x g to float16; a row divided first, or (x @ (g w)) / norm, stays finite."""
    monkeypatch.setattr(superopt_programs, "TYPE", "float16")

    def wide(value):
        return value.op("convert", type="float32")

    def norm(x):
        mean, epsilon = (
            Value(x.builder, x.builder.add("constant", value=c, type="float32")) for c in (1 / 16, 1e-5)
        )
        return (wide(x).square().sum(1) * mean + epsilon).sqrt()

    def result(late):
        return lambda x, g, w: late(x, g, w).op("convert", type="float16")

    def product(x, w):
        return x.op("convert", type="float16").op("matmul", w.op("convert", type="float16"), type="float32")

    shapes = (4, 16), (1, 16), (16, 8)
    original = half(lambda x, g, w: (x / (x.square().sum(1) * (1 / 16) + 1e-5).sqrt() * g) @ w, *shapes)
    first = half(result(lambda x, g, w: product(wide(x) * wide(g), w) / norm(x)), *shapes)
    after = half(result(lambda x, g, w: product(wide(x) / norm(x) * wide(g), w)), *shapes)
    weights = half(result(lambda x, g, w: product(x, wide(g).T * wide(w)) / norm(x)), *shapes)
    assert "relative error inf" in check_stability(first, original, seed=seed).reason
    assert check_stability(after, original, seed=seed).stable
    assert check_stability(weights, original, seed=seed).stable


def test_exponentials_without_their_maximum_overflow():
    def softmax(x):
        e = x.exp()
        return e / e.sum(1)

    def shifted(x):
        e = (x - x.op("reduce_max", axis=1)).exp()
        return e / e.sum(1)

    plain, safe = half(softmax, (4, 16)), half(shifted, (4, 16))
    assert not check_stability(plain, safe).stable
    assert check_stability(safe, plain).stable
    assert np.isfinite(check_stability(safe, safe).error)


@pytest.mark.parametrize("seed", range(4))
def test_exponentials_of_terms_overflow_where_that_of_the_sum_does_not(seed):
    """exp(x) exp(y) is infinity times 0: refused for every seed, also beside results that may overflow."""
    together = half(lambda a, b: (a + b).exp(), (4, 2), (4, 2))
    apart = half(lambda a, b: a.exp() * b.exp(), (4, 2), (4, 2))
    summed = half(lambda a, b, c: ((a + c).exp() * b).sum(1), (4, 8), (4, 8), (4, 8))
    terms = half(lambda a, b, c: (a.exp() * (c.exp() * b)).sum(1), (4, 8), (4, 8), (4, 8))
    assert not check_stability(apart, together, seed=seed).stable
    assert not check_stability(terms, summed, seed=seed).stable
    assert check_stability(together, together, seed=seed).stable
    assert check_stability(summed, summed, seed=seed).stable


def test_two_indices_of_one_symbol_are_refused():
    """At extent 1 a square matrix is its transpose."""
    square = ("m", "m")
    first, second = program(lambda x: x * 1.0, square), program(lambda x: x.T, square)
    assert verify_equal(bind(first, {"m": 1}), bind(second, {"m": 1})).equal
    certificate, _ = verify_for_all_extents(first, second)
    assert certificate.verdict == "refused"
    assert "two indices of m" in certificate.reason
    outer = program(lambda a, b: a @ b, ("m", 2), (2, "m"))
    assert "two indices of m" in verify_for_all_extents(outer, outer)[0].reason


def test_concatenations_must_meet_part_by_part():
    """(a ‖ b) · (c ‖ d) and (a ‖ b) · (d ‖ c) have the same shapes."""
    shapes = ("m", "k"), ("m", "r"), ("k", "n"), ("r", "n")

    def product(a, b, c, d):
        return concat(1, a, b) @ concat(0, c, d)

    def crossed(a, b, c, d):
        return concat(1, a, b) @ concat(0, d, c)

    plain = program(lambda a, b, c, d: a @ c + b @ d, *shapes)
    assert verify_for_all_extents(program(product, *shapes), plain)[0].equal
    certificate, _ = verify_for_all_extents(program(crossed, *shapes), plain)
    assert certificate.verdict == "refused"
    assert "joins" in certificate.reason


def test_axes_that_are_no_products_of_symbols_are_refused():
    graph = program(lambda x: x.sum(0), ("2*m", "n"))
    assert "no product of symbols" in verify_for_all_extents(graph, graph)[0].reason
