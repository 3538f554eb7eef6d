"""Convolution kernels on the simulator against torch's in float64: windows gathered while they are read."""

from __future__ import annotations

import pytest
from convolution_cases import AMD, CASES, Case, draw

import ladder
from ladder.api.lowered import Lowered


@pytest.mark.parametrize("name", CASES)
def test_convolution(name: str) -> None:
    require_right(CASES[name], "emitted")


@pytest.mark.parametrize("stage", ["emitted", "code"])
@pytest.mark.parametrize("name", AMD)
def test_convolution_on_amd(name: str, stage: str) -> None:
    require_right(AMD[name], stage)


def require_right(case: Case, stage: str) -> None:
    """Fail unless a kernel has no findings, errors among them."""
    drawn = draw(case)
    result = ladder.simulate(
        Lowered(drawn.request),
        drawn.x,
        drawn.packed,
        drawn.bias,
        factor=drawn.factor,
        residual=drawn.residual,
        expected=drawn.expected,
        stage=stage,
    )
    assert not result.findings, result.report()
