"""Convolution kernels on a GPU, against torch's in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
from convolution_cases import CASES, Case, draw

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

BOUNDS = {"float16": 5e-4, "bfloat16": 3e-3}


def enlarged(case: Case, times: int) -> Case:
    """Return the case with larger images, for the GPU that there is."""
    from ladder.runtime.compile import target_of

    batch, height, width = case.image
    image = (batch * times, height * times, width * times)
    return replace(case, image=image, device=target_of(torch.device("cuda")))


@pytest.fixture(scope="module")
def built() -> None:
    """Compile the kernels side by side."""
    from ladder.runtime.build import find_or_build
    from ladder.runtime.compile import jobs_of

    find_or_build([job for case in CASES.values() for job in jobs_of(draw(enlarged(case, 1)).request)[1]])


@pytest.mark.parametrize("times", [1, 5])
@pytest.mark.parametrize("name", CASES)
def test_convolution(name: str, times: int, built: None) -> None:
    from ladder.runtime.convolve import convolve

    drawn = draw(enlarged(CASES[name], times))
    tensors = (drawn.x, drawn.bias, drawn.residual)
    x, bias, residual = (None if tensor is None else tensor.cuda() for tensor in tensors)
    y = convolve(x, drawn.packed.to("cuda").tensors, bias, residual, drawn.request.text)
    error = float((y.cpu().double() - drawn.expected).norm() / drawn.expected.norm())
    assert error <= BOUNDS[drawn.request.gemm.output]
