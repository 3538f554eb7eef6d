"""Texts of tile programs and schedules that were edited: read, or refused with an error of ours."""

from __future__ import annotations

import pytest

from ladder.ir.gemm import Gemm
from ladder.ir.program.product import block_graph
from ladder.ir.program.text import parse_program
from ladder.ir.program.verify import verify_program
from schedules.transforms import parse_transform
from tile_types.errors import ParseError, VerificationError

TEXT = str(block_graph(Gemm(32, 64, "int4", "bfloat16", group_size=16)))

UNREAD = {
    "an axis without an extent": (", k: ", ", k, "),
    "an axis with two extents": (", k: ", ", k: 4: "),
    "an axis without a name": (", k: ", ", : "),
}


@pytest.mark.parametrize("edit", UNREAD)
def test_texts_that_are_no_program(edit: str) -> None:
    old, new = UNREAD[edit]
    assert old in TEXT
    with pytest.raises(ParseError, match="not an axis"):
        parse_program(TEXT.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("total[m, n]", "total[m, x]", "total has no axis 'x'"),
        ("total[m, n]", "total[mn]", "total has no axis 'mn'"),
        ("w[n, g, k]", "w[n, q, k]", "w has no axis 'q'"),
        ("axes m: M", "axes j: M", "has no axis 'm'"),
        (", n: N", ", n: N, n: N", "there are two axes n"),
    ],
)
def test_tiles_of_axes_that_do_not_exist(old: str, new: str, named: str) -> None:
    assert old in TEXT
    with pytest.raises(VerificationError, match=named):
        verify_program(parse_program(TEXT.replace(old, new, 1)))


@pytest.mark.parametrize("numbers", ["1,6", "16,", ", ", " "])
def test_layouts_whose_numbers_are_none(numbers: str) -> None:
    with pytest.raises(ParseError, match="not a transform"):
        parse_transform(f"map w to planes({numbers})")
    with pytest.raises(ParseError, match="not a statement"):
        parse_program(f"{TEXT}\nw.a[n]: int4[8] l2 planes({numbers}) <- w")
