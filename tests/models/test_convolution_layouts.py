"""Convolutions on the CPU: channels last, sums over windows column by column, weights put in order once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import ladder
from ladder.frontend.torch_fx import import_fx
from ladder.ir import GraphBuilder
from ladder.partition.repeats import scattered_windows
from ladder.rewrite import simplify
from targets import get_device


class Mixed(nn.Module):
    """Channels last between layers, a convolution of each channel by itself, and one of points."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.own = nn.Conv2d(channels, channels, taps, padding=taps // 2, groups=channels)
        self.points = nn.Conv2d(channels, 2 * channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.own(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return self.points(torch.nn.functional.adaptive_avg_pool2d(y, 2)).relu()


def operators(fast: ladder.api.model.CompiledModel) -> list[str]:
    """Return what the steps of the first plan compute."""
    return [" ".join(step.part.operators) for step in fast.models[0].plan.steps]


@pytest.mark.parametrize("taps", [3, 7])
def test_sums_over_windows_are_ours(taps: int) -> None:
    torch.manual_seed(0)
    model, x = Mixed(16, taps).eval(), torch.randn(2, 16, 8, 8)
    fast = ladder.compile(model)
    with torch.no_grad():
        expected = model(x)
        for _ in range(3):
            found = fast(x)
            assert torch.allclose(found, expected, atol=1e-5)
            assert found.stride() == expected.stride()
    assert not fast.refused
    assert any("map" in text and "mul reduce_sum reduce_sum" in text for text in operators(fast))


DEPTHWISE = {
    "a few channels": ({"channels": 5, "taps": 3, "padding": 1}, (2, 7, 6)),
    "one vector and a rest": ({"channels": 17, "taps": 3, "padding": 1, "stride": 2}, (1, 9, 8)),
    "four vectors and more": ({"channels": 100, "taps": 5, "padding": 2}, (2, 5, 5)),
    "dilated, wide border": ({"channels": 32, "taps": 3, "padding": 4, "dilation": 2}, (1, 4, 3)),
    "no border": ({"channels": 48, "taps": 3, "padding": 0}, (2, 6, 5)),
    "windows larger than the image": ({"channels": 33, "taps": 7, "padding": 3}, (1, 2, 2)),
    "nothing": ({"channels": 32, "taps": 3, "padding": 1}, (0, 6, 6)),
}


def depthwise(channels: int, taps: int, **settings: int) -> nn.Module:
    torch.manual_seed(channels)
    between = nn.Conv2d(channels, channels, taps, groups=channels, **settings)
    norm = nn.BatchNorm2d(channels)
    norm.running_var.uniform_(0.5, 2)
    return nn.Sequential(nn.Conv2d(4, channels, 1), between, norm, nn.SiLU()).eval()


@pytest.mark.parametrize("case", DEPTHWISE)
def test_channels_by_themselves(case: str) -> None:
    settings, (images, high, wide) = DEPTHWISE[case]
    model = depthwise(**settings)
    x = torch.randn(images, 4, high, wide)
    fast = ladder.compile(model)
    with torch.no_grad():
        for given in (
            x,
            x,
            x.to(memory_format=torch.channels_last),
            x.flip(-1).transpose(2, 3).transpose(2, 3),
        ):
            expected = model(given)
            found = fast(given)
            assert found.shape == expected.shape
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert not fast.refused


def test_float64_is_summed_in_float64() -> None:
    model = depthwise(channels=20, taps=3, padding=1).double()
    x, fast = torch.randn(2, 4, 8, 8, dtype=torch.float64), ladder.compile(model)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("groups", [1, 3])
def test_float64_is_summed_in_float64_on_gpus(groups: int) -> None:
    layer = nn.Conv2d(3, 24, 3, groups=groups).double().eval()
    own = nn.Conv2d(24, 24, 3, groups=24).double().eval()
    weights = [layer.weight.detach(), own.weight.detach()]

    def net(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = torch.nn.functional.conv2d(x, first, groups=groups)
        return torch.nn.functional.conv2d(y, second, groups=24)

    given = [torch.randn(2, 3, 9, 8, dtype=torch.float64), *weights]
    graph = simplify(import_fx(make_fx(net)(*given), given).graph, get_device("cuda/sm_90a"))
    assert {node.tile.ttype.name for node in graph.nodes} == {"float64"}
    assert any(node.operator == "map" for node in graph.nodes)


def test_special_values_stay_in_their_windows() -> None:
    model = depthwise(channels=20, taps=3, padding=1)
    model[0].weight.data.zero_()
    model[0].weight.data[:4, :, 0, 0] = torch.eye(4)
    x = torch.randn(1, 4, 8, 8)
    x[0, 0, 0, 0], x[0, 1, 4, 4], x[0, 2, 7, 7] = float("nan"), float("inf"), -float("inf")
    fast = ladder.compile(model)
    with torch.no_grad():
        fast(x)
        found, expected = fast(x), model(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


class Pools(nn.Module):
    """The largest, and the mean, over windows and over all places, with channels last."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.points = nn.Conv2d(3, channels, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.nn.functional.max_pool2d(self.points(x), 3, stride=2, padding=1)
        return y, y.relu().mean((2, 3))


@pytest.mark.parametrize("channels", [3, 16, 50])
def test_pools_run_column_beside_column(channels: int) -> None:
    torch.manual_seed(0)
    model, fast = Pools(channels).eval(), ladder.compile(Pools(channels))
    fast = ladder.compile(model)
    with torch.no_grad():
        for images in (2, 2, 3, 5, 3):
            x = torch.randn(images, 3, 9, 7)
            x[0, :, 0, 0] = float("nan")
            for found, expected in zip(fast(x), model(x), strict=True):
                assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert not fast.refused


@pytest.mark.parametrize("groups", [1, 2])
def test_weights_that_change_are_put_in_order_again(groups: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1, stride=2, groups=groups), nn.ReLU()).eval()
    x = torch.randn(2, 8, 7, 9)
    fast = ladder.compile(model)
    with torch.no_grad():
        for _ in range(3):
            for _ in range(3):
                assert torch.allclose(fast(x), model(x), atol=1e-5)
            model[0].weight.mul_(2)
        model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))
        for _ in range(3):
            assert torch.allclose(fast(x), model(x), atol=1e-5)


def test_a_weight_that_is_computed() -> None:
    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(x, weight * 2, padding=1)

    torch.manual_seed(0)
    fast = ladder.compile(convolved)
    x = torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        for _ in range(4):
            weight = torch.randn(5, 4, 3, 3)
            assert torch.allclose(fast(x, weight), convolved(x, weight), atol=1e-5)


class Upsampled(nn.Module):
    """What feature pyramids do: an image made larger is added to another, and each channel is convolved."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 32, 1), nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.own = nn.Conv2d(32, 32, 5, padding=2, groups=32)
        self.last = nn.Conv2d(32, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        larger = self.coarse(x)[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2)
        return self.last(self.own(self.fine(x) + larger.reshape(x.shape[0], 32, *x.shape[2:])))


def test_channels_stay_last_where_images_are_made_larger() -> None:
    torch.manual_seed(0)
    model, x = Upsampled().eval(), torch.randn(2, 3, 8, 12)
    fast = ladder.compile(model)
    with torch.no_grad():
        fast(x)
        assert torch.allclose(fast(x), model(x), atol=1e-5)
    (own,) = [step.part.graph for step in fast.models[0].plan.steps if "reduce_sum" in step.part.operators]
    assert any(
        node.operator == "map" and own.producer(node.inputs[0]).operator == "input" for node in own.nodes
    )


class Shuffled(nn.Module):
    """Channels of grouped points are shuffled, then convolved each by itself or pooled, and read elsewhere.

    groups: Of the points and of the shuffle.
    reads: What reads the shuffled image besides.
    """

    def __init__(self, groups: int, reads: str) -> None:
        super().__init__()
        self.groups, self.reads = groups, reads
        self.points, self.norm = nn.Conv2d(12, 24, 1, groups=groups), nn.BatchNorm2d(24)
        channels = 12 if reads == "half" else 24
        self.own = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.last = nn.Conv2d(channels, 12, 1, groups=groups)
        self.other = nn.Conv2d(24, 12, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.norm(self.points(x)).relu()
        images, channels, *extents = y.shape
        y = y.view(images, self.groups, channels // self.groups, *extents).transpose(1, 2).reshape(y.shape)
        if self.reads == "half":
            left, right = y.chunk(2, 1)
            return torch.cat((left, self.own(right)), 1), self.last(self.own(right))
        if self.reads == "pool":
            return self.last(torch.nn.functional.max_pool2d(y, 3, 2, 1)), self.last(self.own(y))
        beside = {"result": lambda: (y,), "points": lambda: (self.other(y),), "sum": lambda: (y.sum(1),)}
        return (self.last(self.own(y)), *beside.get(self.reads, tuple)())


@pytest.mark.costly
@pytest.mark.parametrize("reads", ["nothing", "result", "points", "sum", "half", "pool"])
@pytest.mark.parametrize("groups", [2, 3])
def test_shuffled_channels_are_stored_before_windows_read_them(groups: int, reads: str) -> None:
    torch.manual_seed(0)
    model = Shuffled(groups, reads).eval()
    model.norm.running_var.uniform_(0.5, 2)
    fast = ladder.compile(model)
    with torch.no_grad():
        for images, side in ((2, 7), (2, 7), (1, 7), (3, 9), (0, 9)):
            x = torch.randn(images, 12, side, side)
            for found, expected in zip(fast(x), model(x), strict=True):
                assert found.shape == expected.shape
                assert torch.allclose(found, expected, atol=1e-5)
    assert not fast.refused
    windows = [text.split("map") for text in operators(fast) if "map" in text.split()]
    assert windows
    assert not any("transpose" in before for before, *_ in windows)


VIEWS: dict[str, tuple[list[tuple[str, dict[str, Any]]], int]] = {
    "as it lies": ([], 0),
    "turned": ([("transpose", {"permutation": (0, 2, 1, 3)})], 0),
    "shuffled": (
        [
            ("reshape", {"shape": (1, 8, 8, 2, 4)}),
            ("transpose", {"permutation": (0, 1, 2, 4, 3)}),
            ("reshape", {"shape": (1, 8, 8, 8)}),
        ],
        1,
    ),
    "made larger": (
        [
            ("slice", {"begin": (0, 0, 0, 0), "shape": (1, 4, 4, 8), "step": ()}),
            ("reshape", {"shape": (1, 4, 1, 4, 1, 8)}),
            ("broadcast", {"shape": (1, 4, 2, 4, 2, 8)}),
            ("reshape", {"shape": (1, 8, 8, 8)}),
        ],
        0,
    ),
}


@pytest.mark.parametrize("case", VIEWS)
def test_only_an_order_without_strides_is_stored_for_windows(case: str) -> None:
    views, stored = VIEWS[case]
    g = GraphBuilder(case)
    x = g.input("x", "float32", (1, 8, 8, 8))
    for operator, attributes in views:
        x = g.add(operator, x, **attributes)
    sizes = (("h", 6), ("r", 3), ("w", 6), ("s", 3))
    graph = g.finish(g.add("map", x, spec="n h+r w+s c -> n h w r s c", sizes=sizes))
    found = scattered_windows(graph, ())
    assert len(found) == stored
    assert found <= {node.name for node in graph.nodes if node.operator == "reshape"}


POINTS = {
    "two axes": (nn.Conv2d, (2, 8, 5, 6)),
    "one axis": (nn.Conv1d, (2, 8, 9)),
    "three axes": (nn.Conv3d, (1, 8, 3, 4, 5)),
    "no image": (nn.Conv2d, (0, 8, 5, 6)),
}


@pytest.mark.costly
@pytest.mark.parametrize("case", POINTS)
@pytest.mark.parametrize("groups", [2, 4])
def test_points_in_groups_are_products_of_matrices(case: str, groups: int) -> None:
    torch.manual_seed(0)
    kind, shape = POINTS[case]
    model = nn.Sequential(kind(8, 8, 1), nn.ReLU(), kind(8, 12, 1, groups=groups), nn.Sigmoid()).eval()
    fast = ladder.compile(model)
    x = torch.randn(shape)
    with torch.no_grad():
        for given in (x, x, torch.randn(3, *shape[1:])):
            assert torch.allclose(fast(given), model(given), atol=1e-6)
        model[2].weight.mul_(2)
        assert torch.allclose(fast(x), model(x), atol=1e-6)
    assert "torch.bmm" in fast.plan()
    assert not fast.refused
