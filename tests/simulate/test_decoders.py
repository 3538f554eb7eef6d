"""Emitted decoders, simulated: every register of a tile is as the proof's machine computes it.

What is proven is a recipe executed by `NumpyMachine`; this closes the gap to the kernel.
"""

from __future__ import annotations

import pytest
from decode_kernels import CORES, PLACEMENTS, arguments, differing, emit_decode, problems
from problems import SimulatedKernel

from targets import get_device


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("core", CORES)
def test_generated_decoders_equal_the_proven_ones(core: str, placement: str) -> None:
    device = get_device("cuda/sm_89")
    cases = problems(core)
    kernel = SimulatedKernel(emit_decode(cases, device, "decode", placement))
    out = arguments(cases, device)
    kernel(*out)
    assert not differing(cases, device, out[-1], placement)
