"""Convolution kernels on a GPU, against torch's in float64."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from convolution_cases import CASES, Case, draw

from ladder import knobs
from targets import get_device

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

BOUNDS = {"float16": 5e-4, "bfloat16": 3e-3, "float32": 1e-5}


def enlarged(case: Case, times: int) -> Case:
    """Return the case with larger images, for the GPU that there is."""
    from ladder.runtime.compile import target_of

    batch, height, width = case.image
    image = (batch * times, height * times, width * times)
    return replace(case, image=image, device=target_of(torch.device("cuda")))


def runs_here(case: Case) -> bool:
    """Return whether the GPU has the tensor cores that the case's schedule is written for."""
    from ladder.runtime.compile import target_of
    from schedules.legal import RULES

    return RULES[case.schedule.pipeline].feature in get_device(target_of(torch.device("cuda"))).features


@pytest.fixture(scope="module")
def built() -> None:
    """Compile the kernels side by side."""
    from ladder.runtime.build import find_or_build
    from ladder.runtime.compile import jobs_of

    cases = filter(runs_here, CASES.values())
    find_or_build([job for case in cases for job in jobs_of(draw(enlarged(case, 1)).request)[1]])


@pytest.mark.parametrize("times", [1, 5])
@pytest.mark.parametrize("name", CASES)
def test_convolution(name: str, times: int, built: None) -> None:
    from ladder.runtime.compile import compiled
    from ladder.runtime.convolve import launch

    if not runs_here(CASES[name]):
        pytest.skip(f"this GPU lacks what pipeline {CASES[name].schedule.pipeline!r} needs")
    drawn = draw(enlarged(CASES[name], times))
    tensors = (drawn.x, drawn.bias, drawn.residual, drawn.factor)
    x, bias, residual, factor = (None if tensor is None else tensor.cuda() for tensor in tensors)
    kernel = compiled(drawn.request.text, x.device)
    y = launch(kernel, x, drawn.packed.to("cuda").tensors, bias, residual, factor=factor)
    error = float((y.cpu().double() - drawn.expected).norm() / drawn.expected.norm())
    assert error <= BOUNDS[drawn.request.gemm.output]


FORMS = {
    "windows": ("int4", (64, 48, 3, 1, 1, 1)),
    "few channels": ("int8", (3, 16, 7, 2, 3, 1)),
    "stride": ("nf4", (16, 64, 3, 2, 1, 1)),
    "every second point": ("int8", (64, 64, 1, 2, 0, 1)),
    "points": ("int4", (64, 40, 1, 1, 0, 1)),
    "dilation": ("nf4", (64, 8, 3, 1, 2, 2)),
}


@pytest.mark.parametrize("name", FORMS)
def test_quantized_module(name: str) -> None:
    import ladder

    weight, form = FORMS[name]
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(*form).half().cuda()
    module = ladder.Conv.from_conv(conv, weight, group_size=64)
    decoded = torch.as_tensor(module.product.canonical.dequantize("float64"))
    kernel = decoded.view(form[1], form[2], form[2], -1)[..., : form[0]].permute(0, 3, 1, 2).cuda()
    x = torch.randn(3, form[0], 13, 17, device="cuda").half()
    exact = torch.nn.functional.conv2d(
        x.double(), kernel.double(), conv.bias.double(), conv.stride, conv.padding, conv.dilation
    )
    assert module.gathers(x) or module.spare
    for y in (module(x), torch.compile(module, backend="eager")(x), ladder.compile(module)(x)):
        assert float((y.double() - exact).norm() / exact.norm()) <= BOUNDS["float16"]


def test_normalised_residual_block() -> None:
    import ladder

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.n = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False), torch.nn.BatchNorm2d(64)
            self.b, self.m = torch.nn.Conv2d(64, 64, 1, bias=False), torch.nn.BatchNorm2d(64)

        def forward(self, x):
            return torch.relu(self.m(self.b(torch.relu(self.n(self.a(x))))) + x)

    torch.manual_seed(0)
    model = Block().half().cuda().eval().requires_grad_(False)
    for norm in (model.n, model.m):
        norm.running_mean.normal_(std=0.1)
        norm.running_var.uniform_(0.8, 1.2)
    x = torch.randn(2, 64, 14, 14, device="cuda").half()
    twin = Block().double().cuda().eval().requires_grad_(False)
    twin.load_state_dict(model.state_dict())
    ladder.quantize_(model, "int8", convolutions=True)
    for ours, exact in ((model.a, twin.a), (model.b, twin.b)):
        matrix = torch.as_tensor(ours.product.canonical.dequantize("float64")).cuda()
        exact.weight.data = matrix.view(64, *ours.windows.kernel, 64).permute(0, 3, 1, 2)
    expected = twin(x.double())
    for y in (model(x), ladder.compile(model)(x)):
        assert float((y.double() - expected).norm() / expected.norm()) <= 2 * BOUNDS["float16"]


@pytest.mark.parametrize("case", ["lines", "windows", "strides", "residual", "alone", "filled up"])
def test_groups_of_models(case: str) -> None:
    """Groups of 64 channels, or 48: by a kernel of ours, with what follows or alone."""
    import ladder

    torch.manual_seed(0)
    nn, one = torch.nn, case == "lines"
    layer = nn.Conv1d(256, 512, 1, groups=4) if one else nn.Conv2d(256, 256, 3, 1, 1, groups=4)
    if case == "strides":
        layer = nn.Conv2d(256, 512, 3, 2, 1, 2, 4, bias=False)

    if case == "filled up":
        layer = nn.Conv2d(256, 192, 3, 1, 1, groups=4)

    def run(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        if case == "alone":
            return y.flatten(1).amax(-1)
        return torch.relu(y + x) if case == "residual" else nn.functional.silu(y)

    x = torch.randn(*((8, 256, 300) if one else (4, 256, 28, 26)), device="cuda")
    layer = layer.cuda().eval().requires_grad_(False).half()
    expected = run(copy.deepcopy(layer).double(), x.half().double())
    fast = ladder.compile(lambda x: run(layer, x))
    with knobs.override(strict=True):
        for _ in range(3):
            y = fast(x.half())
            assert float((y.double() - expected).norm() / expected.norm()) <= 2 * BOUNDS["float16"]
    assert "ladder gemm" in str(fast.plan())
