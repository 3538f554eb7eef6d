"""Convolution kernels on the simulator against torch's in float64: windows gathered while they are read."""

from __future__ import annotations

import pytest
from convolution_cases import CASES, draw

import ladder
from ladder.api.lowered import Lowered


@pytest.mark.parametrize("name", CASES)
def test_convolution(name: str) -> None:
    drawn = draw(CASES[name])
    result = ladder.simulate(
        Lowered(drawn.request),
        drawn.x,
        drawn.packed,
        drawn.bias,
        factor=drawn.factor,
        residual=drawn.residual,
        expected=drawn.expected,
    )
    assert not result.findings, result.report()
