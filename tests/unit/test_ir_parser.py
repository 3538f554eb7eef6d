"""Parse errors point at the place."""

from __future__ import annotations

import numpy as np
import pytest
from ir_examples import of_matmul_blocks

from ladder.ir import parse
from ladder.ir.build import GraphBuilder
from ladder.ir.printer import print_literal
from tile_types.errors import ParseError, VerificationError

GOOD = """kernel g {
  %x = input() : float16[M, 8]
  %y = exp(%x) : float16[M, 8]
  return %y
}
"""


@pytest.mark.parametrize(
    ("old", "new", "place", "reason"),
    [
        ("kernel", "warp", "line 1, column 1", "a graph begins with kernel, block, found 'warp'"),
        ("exp(%x)", "exp(%x", "line 3, column 15", "expected 'name', found ':'"),
        ("%y = exp", "%y.1 = exp", "line 3, column 3", "has no '.'"),
        ("float16[M, 8]\n  %y", "float17[M, 8]\n  %y", "line 2, column 18", "unknown type 'float17'"),
        ("[M, 8]\n  %y", "[M/2, 8]\n  %y", "line 2, column 27", "unexpected character '/'"),
        ("[M, 8]\n  %y", "[M M, 8]\n  %y", "line 2, column 26", "not an expression of sizes"),
        ("[M, 8]\n  %y", "[-1, 8]\n  %y", "line 2, column 18", "extents >= 0"),
        ("return", "retrun", "line 4, column 3", "expected 'return'"),
        ("}\n", "", "line 5, column 1", "expected '}', found 'the end'"),
        ("}\n", "} }", "line 5, column 3", "expected 'end'"),
        ("exp(%x)", "exp(%x, a=b)", "line 3, column 18", "expected a number, text"),
        ("exp(%x)", 'exp(%x, a="\\q")', "line 3, column 18", "escape"),
        (
            "[M, 8]\n  return",
            "[M, 8\n  return",
            "line 3, column 29",
            "an extent does not end|expression of sizes",
        ),
    ],
)
def test_errors_name_line_column_and_show_a_caret(old, new, place, reason):
    with pytest.raises(ParseError, match=reason) as caught:
        parse(GOOD.replace(old, new, 1))
    message, line, caret = str(caught.value).split("\n")[0], *str(caught.value).split("\n")[-2:]
    assert message.startswith(place)
    column = int(place.rpartition(" ")[2])
    assert caret == " " * (column + 1) + "^"
    assert line.startswith("  ")


def test_comments_and_spacing_do_not_matter():
    text = str(of_matmul_blocks()).replace("\n", " // note\n").replace(", ", " ,  ").replace(" = ", "=")
    assert parse(text) == of_matmul_blocks()


def test_only_literals_can_be_printed():
    with pytest.raises(VerificationError, match="no textual form"):
        print_literal([1])  # type: ignore[arg-type]


def test_attributes_may_be_infinite_or_no_number():
    graph = GraphBuilder("special")
    x = graph.input("x", "float32", (3,))
    for value in (np.nan, np.inf, -np.inf):
        x = graph.add("add", x, graph.add("constant", value=value, type="float32", shape=()))
    finished = graph.finish(x)
    assert parse(str(finished)) == finished
