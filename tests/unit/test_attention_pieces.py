"""How lanes of a warp share rows of keys and values: every element once, by the widest loads that fit."""

from __future__ import annotations

import pytest

from ladder.ir.attention import HEAD_MULTIPLE, MOST_HEAD_ELEMENTS, Attention, head_problem
from ladder.lower.cuda.attention_loads import LANES_OF_KEY, LANES_OF_VALUE
from schedules import wave_attention
from schedules.attention_rows import divide
from schedules.wave_attention import SIDE
from tile_types.errors import ScheduleError

HEADS = range(HEAD_MULTIPLE, MOST_HEAD_ELEMENTS + 1, HEAD_MULTIPLE)


@pytest.mark.parametrize(
    ("lanes", "least"), [(LANES_OF_KEY, 4), (LANES_OF_VALUE, 4), (2, 1), (4, 1), (SIDE, 1)]
)
@pytest.mark.parametrize("stored", ["float16", "int8"])
def test_lanes_share_a_row_and_none_loads_beside_its_bytes(lanes: int, least: int, stored: str) -> None:
    served = 0
    for size in HEADS:
        form = Attention(1, 1, size, "float16", stored)
        if head_problem(form) or form.width * form.stored_bytes % (least * lanes):
            continue
        served += 1
        pieces = divide(form.width, lanes, form.stored_bytes, least)
        held = [
            p.begin + lane * p.elements + e
            for p in pieces
            for lane in range(lanes)
            for e in range(p.elements)
        ]
        assert held == list(range(form.width))
        for piece in pieces:
            begins = [piece.begin + lane * piece.elements for lane in range(lanes)]
            nbytes = piece.elements * form.stored_bytes
            assert all(begin * form.stored_bytes % nbytes == 0 for begin in begins)
            # A piece lies in the head or beyond it: none is cut.
            assert all(begin >= size or begin + piece.elements <= size for begin in begins)
    assert served >= 8


@pytest.mark.parametrize(
    ("size", "loads"), [(64, [8]), (80, [8, 2]), (96, [8, 4]), (112, [8, 4, 2]), (256, [8] * 4)]
)
def test_values_are_loaded_by_16_bytes_as_long_as_a_row_lasts(size: int, loads: list[int]) -> None:
    assert [piece.elements for piece in divide(size, LANES_OF_VALUE, 2)] == loads


@pytest.mark.parametrize(
    ("size", "keys", "values"),
    [(64, [8, 8], [4]), (80, [8, 8, 4], [4, 1]), (96, [8, 8, 8], [4, 2]), (160, [8] * 5, [8, 2])],
)
def test_lanes_of_amd_gpus_load_as_wide_as_rows_last(size: int, keys: list[int], values: list[int]) -> None:
    form = Attention(1, 1, size, "float16", "float16")
    assert [piece.elements for piece in wave_attention.pieces(form, 4)] == keys
    assert [piece.elements for piece in wave_attention.pieces(form, SIDE)] == values


def test_codes_of_no_whole_words_a_lane_are_refused() -> None:
    with pytest.raises(ScheduleError, match="10 bytes of a head per lane are no whole loads of 4"):
        divide(80, LANES_OF_VALUE, 1)
