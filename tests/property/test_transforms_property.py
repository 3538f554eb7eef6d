"""inverse ∘ forward = identity, and layouts agree with index arithmetic, for random cases."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.transforms import (
    Layout,
    Step,
    TileValue,
    convert_tile,
    map_tile,
    pad_tile,
    parse_layout,
    slice_tile,
    write_slice,
)
from tile_types import Tile, get_type

EXTENTS = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def steps(draw: st.DrawFn, elements: tuple[int, ...]) -> Step:
    """A step over the given factors, merged at random places."""
    split = draw(st.permutations(elements).map(tuple))
    order = draw(st.permutations(range(len(split))).map(tuple))
    permuted = [split[axis] for axis in order]
    cut = draw(st.integers(0, len(permuted)))
    return Step(split, order, (prod(permuted[:cut]), prod(permuted[cut:])))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Up to three steps over the same factors."""
    factors = draw(EXTENTS)
    return Layout(factors, tuple(draw(st.lists(steps(factors), max_size=3))))


def tile_of(shape: tuple[int, ...], ttype: str, seed: int) -> TileValue:
    codes = get_type(ttype).valid_codes()
    picked = np.random.default_rng(seed).choice(codes, shape).astype(np.uint8)
    return TileValue(Tile(get_type(ttype), shape), picked)


@given(layouts(), st.integers(0, 99))
def test_map_inverts(layout: Layout, seed: int) -> None:
    value = tile_of(layout.shape, "uint8", seed)
    back = map_tile(map_tile(value, layout), layout.inverse())
    np.testing.assert_array_equal(back.codes, value.codes)
    assert back.tile == value.tile


@given(layouts())
def test_layout_prints_and_parses(layout: Layout) -> None:
    assert parse_layout(str(layout)) == layout
    assert parse_layout(str(layout.inverse())) == layout.inverse()


@given(layouts())
def test_layout_is_a_bijection_of_positions(layout: Layout) -> None:
    positions = layout.apply(np.arange(prod(layout.shape)).reshape(layout.shape))
    assert sorted(positions.ravel()) == list(range(prod(layout.shape)))


@given(layouts())
def test_composition_is_application_in_turn(layout: Layout) -> None:
    array = np.arange(prod(layout.shape)).reshape(layout.shape)
    back = layout.then(layout.inverse())
    np.testing.assert_array_equal(back.apply(array), array)


@given(EXTENTS, st.data())
def test_pad_then_slice_is_identity(shape: tuple[int, ...], data: st.DataObject) -> None:
    value = tile_of(shape, "int3", 1)
    wider = tuple(extent + data.draw(st.integers(0, 3)) for extent in shape)
    padded = pad_tile(value, wider)
    assert padded.codes.shape == wider
    np.testing.assert_array_equal(slice_tile(padded, (0,) * len(shape), shape).codes, value.codes)
    assert padded.values.sum() == value.values.sum()


@given(EXTENTS, st.data())
def test_slice_of_write_is_the_part(shape: tuple[int, ...], data: st.DataObject) -> None:
    value, start = (
        tile_of(shape, "uint4", 2),
        tuple(data.draw(st.integers(0, extent - 1)) for extent in shape),
    )
    box = tuple(data.draw(st.integers(1, extent - first)) for extent, first in zip(shape, start, strict=True))
    part = tile_of(box, "uint4", 3)
    np.testing.assert_array_equal(slice_tile(write_slice(value, start, part), start, box).codes, part.codes)
    np.testing.assert_array_equal(write_slice(value, start, slice_tile(value, start, box)).codes, value.codes)


LOSSLESS = [("int4", "int8"), ("uint3", "bfloat16"), ("ternary", "fp8_e4m3"), ("fp4_e2m1", "float16")]


@settings(max_examples=30)
@given(EXTENTS, st.sampled_from(LOSSLESS), st.integers(0, 99))
def test_lossless_conversion_inverts(shape: tuple[int, ...], pair: tuple[str, str], seed: int) -> None:
    narrow, wide = pair
    value = tile_of(shape, narrow, seed)
    there = convert_tile(value, wide)
    np.testing.assert_array_equal(there.values, value.values)
    back = convert_tile(there, narrow)
    np.testing.assert_array_equal(back.values, value.values)
