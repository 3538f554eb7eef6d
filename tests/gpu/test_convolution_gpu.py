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


@pytest.mark.parametrize("weight", ["int4", "int8", "nf4"])
@pytest.mark.parametrize(
    "form", [(64, 48, 3, 1, 1, 1), (16, 64, 3, 2, 1, 1), (64, 64, 1, 2, 0, 1), (64, 8, 3, 1, 2, 2)]
)
def test_quantized_module(weight: str, form: tuple[int, ...]) -> None:
    import ladder

    torch.manual_seed(0)
    conv = torch.nn.Conv2d(*form).half().cuda()
    module = ladder.Conv.from_conv(conv, weight, group_size=64)
    decoded = torch.as_tensor(module.product.canonical.dequantize("float64"))
    kernel = decoded.view(form[1], form[2], form[2], form[0]).permute(0, 3, 1, 2).cuda()
    x = torch.randn(3, form[0], 13, 17, device="cuda").half()
    exact = torch.nn.functional.conv2d(
        x.double(), kernel.double(), conv.bias.double(), conv.stride, conv.padding, conv.dilation
    )
    assert module.gathers(x)
    for y in (module(x), torch.compile(module, backend="eager")(x), ladder.compile(module)(x)):
        assert float((y.double() - exact).norm() / exact.norm()) <= BOUNDS["float16"]
