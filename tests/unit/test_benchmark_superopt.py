"""`benchmarks.superopt` times what `ladder.superoptimize` returns; its programs are those of the graphs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import superopt
from benchmarks.superopt_graphs import Case, attention, gated_mlp, lora, norm_transition, rmsnorm_matmul
from tile_types.quantized import QuantizedTensor

SMALL: dict[str, Case] = {
    "rmsnorm_matmul b=1": rmsnorm_matmul(2, 32, 16, 16, 16),
    "gated_mlp b=1": gated_mlp(4, 32, 16, 16, 16),
    "lora b=1": lora(4, 32, 16, 16, 16),
    "gqa b=1": attention(2, 8, 16, 32, 8, 16),
    "qknorm_attention b=1": attention(2, 8, 16, 32, 8, 16, norm=True),
    "ntrans b=1": norm_transition(4, 32),
}


@pytest.mark.parametrize("name", SMALL)
def test_programs_mean_what_the_graphs_compute(name: str) -> None:
    case, point = SMALL[name], superopt.points()[name]
    shapes = tuple(node.tile.known_shape for node in case.graph.inputs)
    assert [len(shape) for shape in shapes] == [len(shape) for shape in point.shapes]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).double() for shape in shapes]
    exact = replace(point, shapes=shapes).function(*inputs).numpy()
    assert np.allclose(case.meaning(*(x.numpy() for x in inputs)), exact, rtol=1e-9)


def test_weights_that_are_packed_come_decoded_and_transposed() -> None:
    point = superopt.points()["int4 lora M=8"]
    point = replace(point, shapes=((8, 256), (256, 128), (256, 16), (16, 128)))
    x, w, a, c = point.drawn("cpu")
    assert isinstance(w, QuantizedTensor)
    assert tuple(w.shape) == (128, 256)
    decoded = w.dequantize("float32")
    y = point.function(x.float(), decoded, a.float(), c.float())
    exact = superopt.PROGRAMS["lora"](x.float(), decoded.t(), a.float(), c.float())
    assert torch.equal(y, exact)


@pytest.mark.parametrize("name", superopt.points())
def test_weights_and_packed_inputs_are_inputs(name: str) -> None:
    point = superopt.points()[name]
    assert len(point.scales) >= len(point.shapes)
    assert set(point.packed) <= set(point.weights) < set(range(len(point.shapes)))


def test_both_choices_are_superoptimizes_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows hold what `ladder.superoptimize` returns, without constants and with, and what it says."""
    asked = []

    def superoptimize(function: object, inputs: object, constants: tuple[int, ...] = ()) -> object:
        asked.append(constants)
        return function

    monkeypatch.setattr(superopt.ladder, "superoptimize", superoptimize)
    monkeypatch.setattr(superopt.Point, "drawn", lambda point, device: [torch.ones(s) for s in point.shapes])
    monkeypatch.setattr(superopt, "capture_long", len)
    monkeypatch.setattr(superopt, "poison", lambda *_: None)
    point = replace(superopt.points()["gated_mlp b=1"], shapes=((1, 4), (4, 2), (4, 2)))
    measured = superopt.Measured("small", point)
    measured.fused(declared=True)
    assert asked == [(), (1, 2)]
    assert set(measured.graphs) == {"fused", superopt.CONSTANTS}
    assert all(math.isclose(error, 0, abs_tol=1e-6) for error in measured.errors.values())
    times = {"fused": [2.0], superopt.CONSTANTS: [1.0], "eager": [4.0], "compile default": [3.0]}
    monkeypatch.setattr(superopt, "interleaved_us", lambda *_: times)
    row = measured.row()
    assert (row["ratio"], row["ratio without constants"], row["rival"]) == (3.0, 1.5, "compile default")
