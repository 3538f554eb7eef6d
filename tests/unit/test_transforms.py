"""The four transforms on cases small enough to check by eye, and their errors."""

from __future__ import annotations

import numpy as np
import pytest

from schedules.fragments import FragmentLayout
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
    zero_code,
)
from tile_types import Tile, get_type
from tile_types.errors import ConversionError, ParseError, ShapeError


def tile_of(codes: np.ndarray, ttype: str = "uint4") -> TileValue:
    return TileValue(Tile(get_type(ttype), codes.shape), codes)


COUNTING = tile_of(np.arange(12, dtype=np.uint8).reshape(3, 4))


def test_slice_and_write() -> None:
    part = slice_tile(COUNTING, (1, 2), (2, 2))
    assert part.codes.tolist() == [[6, 7], [10, 11]]
    back = write_slice(COUNTING, (0, 0), part)
    assert back.codes.tolist() == [[6, 7, 2, 3], [10, 11, 6, 7], [8, 9, 10, 11]]
    assert COUNTING.codes[0, 0] == 0


def test_map_transposes_and_remembers_its_layout() -> None:
    transpose = Layout((3, 4), (Step((3, 4), (1, 0), (4, 3)),))
    mapped = map_tile(COUNTING, transpose)
    assert mapped.codes.tolist() == COUNTING.codes.T.tolist()
    assert mapped.tile.layout == transpose
    assert map_tile(mapped, transpose.inverse()).tile == COUNTING.tile


def test_pad_fills_with_the_code_nearest_zero() -> None:
    padded = pad_tile(tile_of(np.zeros((1, 2), np.uint8), "ternary"), (2, 3))
    assert padded.codes.tolist() == [[0, 0, 1], [1, 1, 1]]  # ternary code 1 is 0
    assert zero_code("nf4") == 7  # NF4's table holds 0 at code 7 (QLoRA, appendix E)


def test_convert_is_exact_or_refused() -> None:
    widened = convert_tile(COUNTING, "float16")
    assert widened.codes[0].tolist() == np.array([0, 1, 2, 3], np.float16).view(np.uint16).tolist()
    with pytest.raises(ConversionError, match=r"5\.0 at \(1, 1\)"):  # e2m1 holds 4 and 6, not 5
        convert_tile(COUNTING, "fp4_e2m1")
    assert convert_tile(COUNTING, "fp4_e2m1", lossy=True).values[1, 0] == 4.0


def test_byte_fragment_layout_is_a_map() -> None:
    """For 8-bit codes and 8-bit cores packing only moves bytes, so it must equal a map."""
    codes = np.random.default_rng(0).integers(0, 256, (64, 64)).astype(np.uint8)
    # row = 16w + 8h + g, column = 32j + 16kh + 4c + e
    layout = Layout((64, 64), (Step((4, 2, 8, 2, 2, 4, 4), (3, 0, 2, 5, 4, 1, 6), (4096,)),))
    packed = FragmentLayout(8, 8).pack(codes).numpy().view(np.uint8)
    np.testing.assert_array_equal(map_tile(tile_of(codes, "uint8"), layout).codes, packed)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ShapeError, match="inside"):
        slice_tile(COUNTING, (0, 3), (1, 2))
    with pytest.raises(ShapeError, match="inside"):
        slice_tile(COUNTING, (0,), (1,))
    with pytest.raises(ShapeError, match="pad"):
        pad_tile(COUNTING, (3, 3))
    with pytest.raises(ConversionError, match="99"):
        pad_tile(COUNTING, (3, 5), code=99)
    with pytest.raises(ConversionError, match="convert it first"):
        write_slice(COUNTING, (0, 0), tile_of(np.zeros((1, 1), np.uint8), "int4"))
    with pytest.raises(ShapeError, match="permutation"):
        Step((2, 3), (0, 0), (6,))
    with pytest.raises(ShapeError, match="elements"):
        Layout((4,), (Step((2, 3), (0, 1), (6,)),))
    with pytest.raises(ShapeError, match="follow"):
        Layout((4,)).then(Layout((5,)))
    with pytest.raises(ShapeError, match="tile of shape"):
        TileValue(Tile(get_type("int4"), (2,)), np.zeros(3, np.uint8))
    for text in ("3x", "4 ; 2x2 -> 1 -> 4", "4 ; nonsense"):
        with pytest.raises(ParseError, match="layout"):
            parse_layout(text)
