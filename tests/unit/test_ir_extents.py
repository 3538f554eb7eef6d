"""Symbolic extents and affine indexing."""

from __future__ import annotations

import numpy as np
import pytest

from ladder.ir.extents import bind, canonical, ceildiv, floordiv, match_shape, product, total
from ladder.ir.indexing import gather, parse_indexing, solve_extents
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
