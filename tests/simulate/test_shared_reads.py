"""What several results or rows read is loaded once, on the simulator: two widths, frames of signals."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ladder.ir import GraphBuilder
from ladder.lower.chain import emit_chain
from ladder.movement.choose import ranked
from ladder.movement.mapping import Mapping
from ladder.simulate import simulate_launch
from targets import get_device

H100 = get_device("cuda/sm_90a")


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_results_of_two_widths_share_their_vectors(narrow: str) -> None:
    """As weights of 16 bits beside their moments: each thread has as many elements of both."""
    g = GraphBuilder("chain")
    x, m = g.input("x", "float32", (6, 64)), g.input("m", "float32", (6, 64))
    found = g.add("maximum", x, m)
    graph = g.finish(found, g.add("convert", found, type=narrow))
    function = emit_chain(graph, H100, "chain", Mapping(threads=128))
    loads = function.script().count("T.ptx.ld(")
    assert loads == 2  # vectors of four: those of eight would store halves of sectors
    rng = np.random.default_rng(0)
    values = [rng.uniform(0, 9, (6, 64)).astype(np.float32) for _ in range(2)]
    values[0][0, :4] = np.nan, np.inf, -np.inf, -0.0
    values[1][0, 3] = -0.0
    dtype = getattr(ml_dtypes, narrow, None) or np.dtype(narrow)
    wide, small = np.zeros((6, 64), np.float32), np.zeros((6, 64), dtype)
    assert not simulate_launch(function, [*values, wide, small], outputs=(-2, -1)).findings
    wanted = np.maximum(*values)
    np.testing.assert_array_equal(wide, wanted)
    np.testing.assert_array_equal(small.astype(np.float32), wanted.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("columns", [63, 65])
def test_results_of_odd_rows_are_right_beside_narrower_ones(columns: int) -> None:
    g = GraphBuilder("chain")
    x = g.input("x", "float32", (3, columns))
    graph = g.finish(g.add("neg", x), g.add("convert", x, type="bfloat16"))
    values = np.random.default_rng(1).standard_normal((3, columns)).astype(np.float32)
    for moves in ranked(graph):
        wide, small = np.zeros_like(values), np.zeros(values.shape, ml_dtypes.bfloat16)
        function = emit_chain(graph, H100, "chain", moves.mapping)
        launch = simulate_launch(function, [values, wide, small], outputs=(-2, -1))
        assert not launch.findings
        np.testing.assert_array_equal(wide, -values)
        np.testing.assert_array_equal(small, values.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(("length", "step"), [(80, 32), (66, 25)])
def test_frames_of_a_signal_are_held(length: int, step: int) -> None:
    """Windows that overlap, and what is computed of all of each: lanes read a frame once."""
    g = GraphBuilder("chain")
    x, w = g.input("x", "float32", (2, 400)), g.input("w", "float32", (length,))
    count = (400 - length) // step + 1
    frames = g.add("map", x, spec=f"a {step}*f+r -> a f r", sizes=(("f", count), ("r", length)))
    value = g.add("mul", frames, w)
    graph = g.finish(value, g.add("reduce_sum", g.add("square", value), axis=2, keep=False))
    best = ranked(graph)[0].mapping
    assert best.lanes > 1
    assert best.num > 0
    rng = np.random.default_rng(2)
    signal, window = rng.standard_normal((2, 400)), rng.standard_normal(length)
    inputs = [signal.astype(np.float32), window.astype(np.float32)]
    places = step * np.arange(count)[:, None] + np.arange(length)
    wanted = inputs[0][:, places] * inputs[1]
    for moves in ranked(graph)[:4]:
        got, energy = np.zeros((2, count, length), np.float32), np.zeros((2, count), np.float32)
        function = emit_chain(graph, H100, "chain", moves.mapping)
        launch = simulate_launch(function, [*inputs, got, energy], outputs=(-2, -1))
        assert not launch.findings
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_allclose(energy, np.square(wanted.astype(np.float64)).sum(2), rtol=1e-5)
