"""ONNX operators of texts, and of columns of classical models, as onnxruntime has them."""

from __future__ import annotations

import locale
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import ladder
from ladder.runtime.onnx_ops.operation import Operation
from ladder.runtime.onnx_ops.table import TABLE
from tile_types.errors import ShapeError

WORDS = ["Monday", "monday", "MONDAY x", "", "Zürich", "straße"]


def texts(*words: str) -> np.ndarray:
    return np.array(words, object)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, WORDS),
        ({"stopwords": ["monday"]}, WORDS[2:]),
        ({"stopwords": ["monday"], "is_case_sensitive": 1}, [WORDS[0], *WORDS[2:]]),
        (
            {"stopwords": ["monday", ""], "case_change_action": "UPPER", "locale": "de_DE"},
            ["MONDAY X", "ZÜRICH", "STRAßE"],
        ),
        (
            {"stopwords": ["MONDAY"], "case_change_action": "LOWER", "is_case_sensitive": 1},
            ["monday", "monday", "monday x", "", "zürich", "straße"],
        ),
        ({"stopwords": WORDS}, [""]),
    ],
)
def test_words_are_left_out_whole_and_keep_their_accents(given: dict[str, Any], wanted: list[str]) -> None:
    before = locale.setlocale(locale.LC_ALL)
    op = Operation("StringNormalizer", 10, given)
    assert TABLE[op.name](op, texts(*WORDS)).tolist() == wanted
    assert TABLE[op.name](op, texts(*WORDS)[None]).tolist() == [wanted]
    assert locale.setlocale(locale.LC_ALL) == before


def test_words_of_several_rows_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\[2, 3\]"):
        TABLE["StringNormalizer"](Operation("StringNormalizer", 10), texts(*WORDS).reshape(2, 3))


@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
def test_weights_of_counted_words_are_one(mode: str) -> None:
    pool = {"pool_strings": ["a", "b"], "ngram_counts": [0], "ngram_indexes": [0, 1]}
    sizes = {"min_gram_length": 1, "max_gram_length": 1, "max_skip_count": 0}
    op = Operation("TfIdfVectorizer", 9, {"mode": mode, **pool, **sizes})
    (found,) = TABLE[op.name](op, texts("a", "c", "a"))
    assert found.tolist() == [1.0 if mode == "IDF" else 2.0, 0.0]


@pytest.mark.parametrize(
    ("shapes", "widths", "wanted"),
    [
        ([(3,), (2,)], [2, 3], [[0, 1, 0, 1, 0]]),
        ([(2, 2), (2, 1)], [1, 2], [[0, 0, 0], [2, 1, 0]]),
        ([(1, 1, 3), (1, 1, 1)], [3, 1], [[0, 1, 2, 0]]),
        ([(2, 2, 2), (2, 1)], [3, 1], [[0, 1, 2, 0], [4, 5, 6, 1]]),
        ([(0, 2), (0, 1)], [2, 1], np.zeros((0, 3)).tolist()),
    ],
)
def test_vectors_are_one_row_of_features(
    shapes: list[tuple[int, ...]], widths: list[int], wanted: list[Any]
) -> None:
    parts = [torch.arange(int(np.prod(shape))).reshape(shape) for shape in shapes]
    op = Operation("ai.onnx.ml::FeatureVectorizer", 1, {"inputdimensions": widths})
    (found,) = TABLE[op.name](op, *parts)
    assert found.dtype == torch.float32
    assert found.shape == (max(len(wanted), 0), sum(widths))
    assert found.tolist() == wanted


def test_categories_of_any_number_of_axes() -> None:
    x = torch.tensor([[[2.75, 1.0], [7.0, -0.5]]])
    op = Operation("ai.onnx.ml::OneHotEncoder", 1, {"cats_int64s": [1, 0, 2]})
    found = TABLE[op.name](op, x)
    assert found.dtype == torch.float32
    assert found.tolist() == [[[[0, 0, 1], [1, 0, 0]], [[0, 0, 0], [0, 1, 0]]]]
    assert TABLE[op.name](op, x[:0]).shape == (0, 2, 2, 3)
    strict = Operation("ai.onnx.ml::OneHotEncoder", 1, {"cats_strings": ["a", ""], "zeros": 0})
    assert TABLE[op.name](strict, texts("", "a")[:, None, None]).tolist() == [[[[0, 1]]], [[[1, 0]]]]
    with pytest.raises(ShapeError, match="no category"):
        TABLE[op.name](strict, texts("", "b"))


def test_texts_show_the_sizes_of_a_call() -> None:
    """As scikit-learn's hashers ask them; a plan reads the shape alone."""
    model = ladder.compile(
        onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 22]>
        g (string[N, 1] x, float[2] z) => (float[N, 2] y)
        <int64[1] one = {1}, int64[1] zero = {0}> {
            shape = Shape(x)
            rows = Slice(shape, zero, one)
            sizes = Concat<axis = 0>(rows, one)
            empty = ConstantOfShape(sizes)
            y = Add(empty, z)
        }""")
    )
    z = torch.randn(2)
    for rows in (3, 0, 1):
        assert torch.equal(model(np.array([["ü"]] * rows, object).reshape(rows, 1), z), z.expand(rows, 2))
    with pytest.raises(ShapeError, match="'x' must have shape"):
        model(np.array(["a", "b"], object), z)


@pytest.mark.parametrize("back", [0, 1])
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_texts_are_scanned(axis: int, rows: int, back: int) -> None:
    """A vector's slices are single texts; no slices make no texts."""
    whole = np.array([["a", "B"], ["cD", ""], ["ü", "y"]], object)[:rows]
    model = ladder.compile(
        onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 16]>
        g (string[N, 2] x, string[N] z) => (string[2, M] y, string[N] w) {{
            y = Scan<num_scan_inputs = 1, scan_input_directions = [{back}], scan_output_axes = [{axis}],
                     body = b (string[2] t) => (string[2] o) {{ o = Identity(t) }}>(x)
            w = Scan<num_scan_inputs = 1, scan_output_directions = [{back}],
                     body = c (string s) => (string p) {{ p = Identity(s) }}>(z)
        }}""")
    )
    y, w = model(whole, whole[:, 0])
    turned = whole[::-1] if back else whole
    assert np.array_equal(y, np.moveaxis(turned, 0, axis))
    assert w.tolist() == turned[:, 0].tolist()
    assert y.dtype == w.dtype == object


def test_loops_that_never_run_give_no_texts() -> None:
    model = ladder.compile(
        onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 16]>
        g (string[N, 2] x, int64 n, bool c) => (string[M, 2] y) {
            y = Loop<body = b (int64 i, bool before) => (bool after, string[2] o) {
                o = Gather<axis = 0>(x, i)
                after = Identity(before)
            }>(n, c)
        }""")
    )
    x = np.array([["a", "b"], ["c", "d"]], object)
    for count in (0, 2):
        found = model(x, torch.tensor(count), torch.tensor(True))
        assert np.array_equal(found, x[:count])
