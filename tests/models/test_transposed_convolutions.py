"""Transposed convolutions as convolutions of ours, and pixels that go between others, channels last."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ladder
from ladder.frontend.importer import Importer
from ladder.frontend.transposed_convolution import Axis, transposed_convolution
from ladder.rewrite.simplify import simplify
from ladder.runtime.model.nodes import graph_run
from ladder.runtime.model.sizes import CallSizes
from targets import get_device

FUNCTIONS = (None, functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
CASES = {
    "pixels apart": (2, {"taps": 2, "stride": 2}),
    "overlapping": (2, {"taps": 4, "stride": 2, "padding": 1}),
    "stride 1": (2, {"taps": 3, "stride": 1, "padding": 1}),
    "three axes": (3, {"taps": 2, "stride": 2, "padding": 1, "output_padding": 1}),
    "cut off by less": (1, {"taps": 4, "stride": 2, "padding": 1, "output_padding": 1}),
    "padding of the whole kernel": (1, {"taps": 5, "stride": 5, "padding": 5}),
}
"""Name -> axes, settings."""


def axes_of(
    sizes: list[int], taps: int, stride: int, padding: int = 0, output_padding: int = 0
) -> list[Axis]:
    return [Axis(size, stride, taps, padding, padding, output_padding) for size in sizes]


def drawn(rank: int, taps: int, size: int) -> list[Tensor]:
    """Return an image with an infinite element, a kernel and a bias."""
    generator = torch.Generator().manual_seed(taps)
    sizes = (2, 3, *range(size, size + rank)), (3, 5, *[taps] * rank), (5,)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in sizes)
    x.view(-1)[1] = torch.inf
    return [x, weight, bias]


def agree(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


PIXELS = {
    "whole": (2, {"taps": 4, "stride": 1}),
    "cut off": (1, {"taps": 7, "stride": 3, "padding": 2, "output_padding": 1}),
}


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("case", [*CASES, *PIXELS])
def test_sums_are_those_of_torch(case: str, with_bias: bool) -> None:
    """No product by zero is added: an infinite pixel would make NaN of it."""
    rank, settings = (CASES | PIXELS)[case]
    given = drawn(rank, settings["taps"], 4)[: 2 + with_bias]
    if case in PIXELS:
        given[0] = given[0][:, :, *[slice(1)] * rank].contiguous()
    im = Importer("transposed")
    names = [im.g.input(name, "float32", value.shape) for name, value in zip("xwb", given, strict=False)]
    axes = axes_of(list(given[0].shape[2:]), **settings)
    bias = names[2] if with_bias else None
    value = transposed_convolution(im, "float32", names[0], names[1], bias, axes)
    run = graph_run(im.g.finish(value), CallSizes(()), torch.device("cpu"))
    settled = {name: amount for name, amount in settings.items() if name != "taps"}
    agree(run(*given), FUNCTIONS[rank](*(value.double() for value in given), **settled))


LEFT = {
    "taps that are no multiple": (4, {"taps": 3, "stride": 2}),
    "elements beyond the last": (4, {"taps": 2, "stride": 2, "output_padding": 1}),
    "few pixels": (2, {"taps": 9, "stride": 1}),
    "elements beyond a pixel's products": (1, {"taps": 3, "stride": 2, "output_padding": 1}),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_stays_a_call(case: str) -> None:
    size, settings = LEFT[case]
    im = Importer("transposed")
    x, weight = im.g.input("x", "float32", (1, 3, size)), im.g.input("w", "float32", (3, 5, settings["taps"]))
    assert transposed_convolution(im, "float32", x, weight, None, axes_of([size], **settings)) is None


MODULES = {
    "even": (nn.ConvTranspose2d(3, 5, 4, 2, 1), True),
    "a line": (nn.ConvTranspose1d(3, 5, 16, 8, 4), True),
    "no multiple of the stride": (nn.ConvTranspose2d(3, 5, 3, 2, 1, 1), False),
    "groups": (nn.ConvTranspose2d(4, 8, 2, 2, groups=2), False),
    "gaps": (nn.ConvTranspose2d(3, 5, 2, 2, dilation=2), False),
}
"""Name -> module, and whether a CPU computes it by a convolution."""


@pytest.mark.parametrize("case", MODULES)
def test_modules(case: str) -> None:
    layer, ours = MODULES[case]
    rank = layer.weight.ndim - 2
    fast = ladder.compile(nn.Sequential(layer, nn.ReLU()).requires_grad_(False).eval())
    for images in (2, 2, 1, 3):
        x = torch.randn(images, layer.in_channels, *range(3 + images, 3 + images + rank))
        agree(fast(x), layer.double()(x.double()).relu())
        layer.float()
    assert ("aten.convolution.default" not in fast.plan()) == ours


class Decoder(nn.Module):
    """One level of a U-Net: half as many pixels, made twice as many, joined with what was there."""

    def __init__(self, up: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 16, 3, padding=1)
        self.up = up
        self.last = nn.Conv2d(32, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x).relu()
        made = self.up(functional.max_pool2d(kept, 2))
        return self.last(torch.cat([kept, made], 1))


UPS = {
    "transposed": lambda: nn.ConvTranspose2d(16, 16, 2, 2),
    "shuffled": lambda: nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.PixelShuffle(2)),
}


@pytest.mark.parametrize("case", UPS)
def test_images_keep_their_channels_last(case: str) -> None:
    """Nothing but the first image and the last is turned in a call; kernels are put in order once."""
    torch.manual_seed(0)
    model = Decoder(UPS[case]()).eval().requires_grad_(False)
    fast, x = ladder.compile(model), torch.randn(2, 16, 8, 8)
    for _ in range(3):
        agree(fast(x), model.double()(x.double()))
        model.float()
    half = ladder.compile(model.half())
    half(x.half())
    whole = half.models[0].program.graph
    kernels = [node.inputs[1] for node in whole.nodes if node.operator == "contract"]
    assert [whole.producer(kernel).operator for kernel in kernels] == ["input"] * 3
    graph = simplify(half.models[0].program.graph, get_device("cuda/sm_90a"))
    joined = next(node for node in graph.nodes if node.operator == "concat")
    assert joined.tile.shape[-1] == 32
    orders = [dict(node.attributes)["permutation"] for node in graph.nodes if node.operator == "transpose"]
    images = [order for order in orders if len(order) == 4 and order[0] == 0]
    assert sorted(images) == [(0, 2, 3, 1)] * images.count((0, 2, 3, 1)) + [(0, 3, 1, 2)]
