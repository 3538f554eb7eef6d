"""Symbolic extents and affine indexing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from ladder.ir.build import GraphBuilder
from ladder.ir.extents import (
    FUNCTIONS,
    bind,
    canonical,
    ceildiv,
    floordiv,
    larger,
    match_shape,
    only_adds,
    product,
    smaller,
    total,
)
from ladder.ir.indexing import check_inside, gather, parse_indexing, solve_extents
from tile_types.errors import ShapeError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("M", "M"), ("2*M+M", "3*M"), ("M-M", 0), ("N*M", "M*N"), ("3+4", 7), ("M*2 - 1 + N", "2*M + N - 1")],
)
def test_equal_polynomials_have_equal_text(text, expected):
    assert canonical(text) == expected


def test_arithmetic_binds_like_integers():
    extent = total([product(["M", 3]), ceildiv("M", 16), floordiv(total(["M", -1]), 2)])
    assert isinstance(extent, str)
    assert bind(extent, {"M": 37}) == 37 * 3 + 3 + 18
    assert bind(extent, {"N": 1}) == extent
    assert canonical(extent) == extent


@pytest.mark.parametrize("text", ["M/2", "f(M)", "M**2", "", "M +", "1.5"])
def test_what_is_no_extent_is_refused(text):
    with pytest.raises(ShapeError, match="extent"):
        canonical(text)


def test_sizes_are_read_off_shapes():
    sizes: dict[str, int] = {}
    match_shape(("M", "2*M", 3), (5, 10, 3), "x", sizes)
    assert sizes == {"M": 5}
    with pytest.raises(ShapeError, match=r"y must have shape \[M\] with M=5, got \[6\]"):
        match_shape(("M",), (6,), "y", sizes)


def test_indexing_prints_what_it_reads():
    text = "n 2*h+r-1 s+w c, f r s c -> n h w f"
    assert str(parse_indexing(text)) == text
    assert parse_indexing("m k, n k -> m n").reduced == ("k",)


@pytest.mark.parametrize("text", ["m k", "m*n -> m", "m -> m m", "2h -> h", "m n/2 -> m"])
def test_malformed_indexing_is_refused(text):
    with pytest.raises(ShapeError):
        parse_indexing(text)


def test_extents_of_a_strided_window():
    indexing = parse_indexing("2*h+r, r -> h")
    assert solve_extents(indexing, [(9,), (3,)], {}) == {"h": 4, "r": 3}
    assert solve_extents(parse_indexing("h+r, r -> h"), [("H",), (3,)], {}) == {"h": "H - 2", "r": 3}


def test_disagreeing_and_unknown_extents():
    with pytest.raises(ShapeError, match="index 'k'"):
        solve_extents(parse_indexing("m k, n k -> m n"), [(2, 3), (4, 5)], {})
    with pytest.raises(ShapeError, match="unknown; give it in sizes"):
        solve_extents(parse_indexing("h+r -> h r"), [(9,)], {})


def test_gather_reads_zero_outside():
    x = np.arange(1.0, 5.0)
    axes = parse_indexing("h+r-1 -> h r").operands[0]
    got = gather(x, axes, ["h", "r"], {"h": 4, "r": 3})
    padded = np.pad(x, 1)
    assert np.array_equal(got, np.lib.stride_tricks.sliding_window_view(padded, 3))


OPERATIONS = {
    "+": (lambda a, b: total([a, b]), lambda a, b: a + b),
    "-": (lambda a, b: total([a, product([-1, b])]), lambda a, b: a - b),
    "*": (lambda a, b: product([a, b]), lambda a, b: a * b),
    "floordiv": (floordiv, lambda a, b: a // b),
    "ceildiv": (ceildiv, lambda a, b: -(-a // b)),
    "max": (larger, max),
    "min": (smaller, min),
}


def drawn_extent(rng: random.Random, depth: int) -> tuple[Any, Any]:
    """Return an extent and the function of sizes that it is."""
    if depth == 0:
        name, number = rng.choice("mn"), rng.randint(0, 9)
        named = name, lambda sizes: sizes[name]
        return named if rng.random() < 0.7 else (number, lambda sizes: number)
    operation = rng.choice([*OPERATIONS])
    symbolic, plain = OPERATIONS[operation]
    left, of_left = drawn_extent(rng, depth - 1)
    if operation.endswith("div"):
        by = rng.choice((2, 3, 4, 6, 8))
        return symbolic(left, by), lambda sizes: plain(of_left(sizes), by)
    right, of_right = drawn_extent(rng, rng.randint(0, depth - 1))
    return symbolic(left, right), lambda sizes: plain(of_left(sizes), of_right(sizes))


@pytest.mark.parametrize("seed", range(8))
def test_nested_extents_bind_like_integers(seed):
    rng = random.Random(seed)
    for _ in range(60):
        extent, wanted = drawn_extent(rng, rng.randint(1, 4))
        for _ in range(6):
            sizes = {"m": rng.randint(0, 40), "n": rng.randint(0, 40)}
            assert bind(extent, sizes) == wanted(sizes), (extent, sizes)


@pytest.mark.parametrize("divide", [floordiv, ceildiv])
@pytest.mark.parametrize("factor", [1, 2, 6])
@pytest.mark.parametrize("number", [-7, -1, 1, 5])
@pytest.mark.parametrize(("first", "second"), [(1, 9), (3, 4), (4, 6), (9, 4)])
def test_quotients_of_quotients_and_numbers(divide, factor, number, first, second):
    plain = (lambda a, b: a // b) if divide is floordiv else (lambda a, b: -(-a // b))
    extent = divide(total([divide(product([factor, "n"]), first), number]), second)
    for n in range(40):
        assert bind(extent, {"n": n}) == plain(plain(factor * n, first) + number, second)


def test_quotients_of_near_dividends_are_ordered() -> None:
    """``floor((n + 2) / 3)`` is at most ``floor(n / 3) + 1``; nothing else is taken for it."""
    assert larger("floordiv(n, 3) + 1", "floordiv(n + 2, 3)") == canonical("floordiv(n, 3) + 1")
    assert smaller("floordiv(n, 3) + 1", "floordiv(n + 2, 3)") == "floordiv(n + 2, 3)"
    draw, decided = random.Random(0), 0
    for _ in range(300):
        a, b = (
            f"{draw.randint(1, 2)}*{draw.choice(('floordiv', 'ceildiv'))}("
            f"{draw.choice(('n', '2*n', 'n + m'))} + {draw.randint(0, 20)}, {draw.choice((2, 3, 16))})"
            f" + {draw.randint(-4, 8)}"
            for _ in range(2)
        )
        decided += "max" not in str(larger(a, b))
        for n in range(0, 40, 7):
            sizes = {"n": n, "m": n // 2 + 1}
            ends = bind(a, sizes), bind(b, sizes)
            assert (bind(smaller(a, b), sizes), bind(larger(a, b), sizes)) == tuple(sorted(map(int, ends)))
    assert decided


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("N + max(-N + max(N - 1, 0), 0)", "N"),
        ("max(max(N, 8) - N, 8) - 8", 0),
        ("min(floordiv(2*N + 2, 3), 2*floordiv(N, 3) + 2)", "floordiv(2*N + 2, 3)"),
        ("max(7*ceildiv(N, 3) - 2*N, 0) + 2*N", "7*ceildiv(N, 3)"),
        ("max(3*floordiv(N, 3) - 1, N - 3)", "max(3*floordiv(N, 3) - 1, N - 3)"),
        ("max(3*ceildiv(N, 3), N) - N", "3*ceildiv(N, 3) - N"),
        ("max(3*floordiv(N, 3), N)", "N"),
    ],
)
def test_excesses_and_quotients_that_have_one_sign(text, expected):
    assert canonical(text) == canonical(expected)
    assert all(bind(canonical(text), {"N": n}) == eval(text, {**FUNCTIONS, "N": n}) for n in range(40))


def test_only_sums_of_sizes_are_never_negative():
    assert all(map(only_adds, (0, 3, "n", "n + 1", "2*m*n + n")))
    assert not any(map(only_adds, (-1, "n - 1", "m*n - n + 4", "m - n")))


@pytest.mark.parametrize(
    ("spec", "shape", "sizes", "fits"),
    [
        ("h+r -> h r", (8,), {"h": 6, "r": 3}, True),
        ("h+r -> h r", (8,), {"h": 7, "r": 3}, False),
        ("2*h+1 -> h", (8,), {"h": 4}, True),
        ("2*h+2 -> h", (8,), {"h": 4}, False),
        ("h-1 -> h", (8,), {"h": 3}, False),
        ("-h+7 -> h", (8,), {"h": 8}, True),
        ("-h+7 -> h", (8,), {"h": 9}, False),
        ("-h+7 -> h", (8,), {"h": 0}, True),
    ],
)
def test_indices_stay_within_their_axes(spec, shape, sizes, fits):
    indexing = parse_indexing(spec)
    if fits:
        check_inside(indexing, [shape], sizes)
        return
    with pytest.raises(ShapeError, match="spans"):
        check_inside(indexing, [shape], sizes)


@pytest.mark.parametrize(
    ("operator", "shapes", "attributes", "fits"),
    [
        ("slice", [(8,)], {"begin": (2,), "shape": (3,), "step": (2,)}, True),
        ("slice", [(8,)], {"begin": (3,), "shape": (3,), "step": (2,)}, True),
        ("slice", [(8,)], {"begin": (4,), "shape": (3,), "step": (2,)}, False),
        ("slice", [(8,)], {"begin": (5,), "shape": (4,)}, False),
        ("slice", [(8,)], {"begin": (8,), "shape": (0,)}, True),
        ("slice", [(8,)], {"begin": (-1,), "shape": (2,)}, False),
        ("concat", [(2, 3), (2, 4)], {"axis": 1}, True),
        ("concat", [(2, 3), (3, 3)], {"axis": 1}, False),
        ("concat", [(2, 3), (2, 3, 1)], {"axis": 1}, False),
        ("repeat", [(3,)], {"axis": 0, "times": 4, "extent": 9}, True),
        ("repeat", [(3,)], {"axis": 0, "times": 4, "extent": 8}, False),
        ("repeat", [(3,)], {"axis": 0, "times": 4, "extent": 13}, False),
        ("reshape", [(4, 6)], {"shape": (3, 8)}, True),
        ("reshape", [(4, 6)], {"shape": (3, 9)}, False),
        ("transpose", [(4, 6)], {"permutation": (0, 0)}, False),
        ("broadcast", [(4, 1)], {"shape": (2, 4, 5)}, True),
        ("broadcast", [(4, 2)], {"shape": (4, 5)}, False),
    ],
)
def test_shapes_that_do_not_fit_are_refused(operator, shapes, attributes, fits):
    g = GraphBuilder("g")
    given = [g.input(f"x{at}", "float32", shape) for at, shape in enumerate(shapes)]
    if fits:
        g.add(operator, *given, **attributes)
        return
    with pytest.raises(ShapeError):
        g.add(operator, *given, **attributes)


def test_lines_that_extremes_make_together() -> None:
    inner = larger(total(["s", -1]), 0)
    assert larger(total([product([2, "s"]), -1, product([-1, inner])]), 0) == "s"
    assert larger(total([product([2, "s"]), -2, product([-1, inner])]), 0) != "s"
    for size in range(5):
        found = larger(total([product([2, "s"]), -2, product([-1, inner])]), 0)
        assert bind(found, {"s": size}) == max(2 * size - 2 - max(size - 1, 0), 0)
