"""Products of points whose channels are no pieces of 16 bytes: zeros come from weights, and stay zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_convolutions import simulate
from test_folding import planned, relative
from torch import Tensor, nn

import ladder
from ladder.frontend.torch_fx import import_fx
from ladder.lower.chain import emit_chain, exact_products, windows
from ladder.partition import partition
from ladder.partition.subgraphs import Subgraph
from ladder.runtime.model.prepared import simplified
from targets import get_device

H200 = get_device("cuda/sm_90a")


class Unit(nn.Module):
    """Half of a ShuffleNet's unit: points, windows of single channels, points."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(24, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False),
            nn.BatchNorm2d(channels),
            nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
        )  # fmt: skip
        for norm in self.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.normal_(norm.running_mean, std=0.1)
                nn.init.uniform_(norm.running_var, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def made(channels: int, stride: int = 1) -> Unit:
    torch.manual_seed(0)
    return Unit(channels, stride).eval().requires_grad_(False)


def parts_of(model: nn.Module, x: Tensor) -> list[Subgraph]:
    """Return the parts of a model's plan for an H200."""
    found: list[Subgraph] = []

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        program = simplified(import_fx(module, examples), H200)
        packable = [name for name, source in program.sources.items() if source.graph is not None]
        found.extend(partition(program.graph, device=H200, packable=packable))
        return module

    with torch.no_grad():
        ladder.compile(model, backend=backend)(x)
    return found


@pytest.mark.parametrize(("channels", "stride"), [(58, 1), (58, 2), (29, 1)])
def test_channels_are_whole_pieces(channels: int, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step only copies, every product's rows are whole pieces, and the chain is right on the simulator."""
    monkeypatch.setattr(windows, "BUSY_ROWS", 1)
    model, x = made(channels, stride).half(), torch.randn(2, 24, 9, 8).half()
    parts = parts_of(model, x)
    kinds = [part.kind for part in parts]
    assert kinds.count("gemm") + kinds.count("product") == 2
    chains = [part for part in parts if "reduce_sum" in part.operators]
    assert len(chains) == 1
    graph = chains[0].graph
    assert graph.tile(graph.outputs[0]).shape[-1] == -(-channels // 8) * 8
    assert all("pad" not in part.operators for part in parts if part.kind != "chain" or part in chains)
    assert all(part.gemm.k % 8 == 0 for part in parts if part.gemm is not None)
    simulate(graph)


@pytest.mark.parametrize("channels", [58, 29])
def test_results_are_as_exact_as_torch(channels: int) -> None:
    x, model = torch.randn(2, 24, 9, 8), made(channels)
    exact = model.double()(x.double())
    half = model.half()
    fast = planned(half, x.half())
    with torch.no_grad():
        assert relative(fast(x.half()), exact) < 1.5 * relative(half(x.half()), exact)


def test_infinite_elements_reach_what_they_reach_in_torch() -> None:
    """Zeros that weights make of an infinite image are NaN: they must not get into sums."""
    model = made(58).half()
    with torch.no_grad():
        model.layers[0].weight.abs_().neg_()  # all of the first product is -inf there, which ReLU makes 0
        x = torch.randn(1, 24, 9, 8).half().abs()
        x[0, 3, 4, 4] = torch.inf
        want, got = model(x), planned(model, x)(x)
    assert want.isfinite().all()
    assert got.isfinite().all()
    assert relative(got, want.double()) < 2e-3


def test_other_images_keep_their_channels() -> None:
    """Neither float32, nor few channels, nor an image that others read too."""
    for model, x in (
        (made(58), torch.randn(2, 24, 9, 8)),
        (nn.Conv2d(12, 16, 1).half().requires_grad_(False), torch.randn(2, 12, 9, 8).half()),
    ):
        assert all(
            "pad" not in part.operators and "select" not in part.operators for part in parts_of(model, x)
        )


def test_exact_products_are_added_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of halves are exact in float32: the compiler may fuse them, and no bit changes."""
    monkeypatch.setattr(windows, "BUSY_ROWS", 1)
    model = nn.Conv2d(3, 16, 3, 2, 1).half().requires_grad_(False)
    (part,) = [part for part in parts_of(model, torch.randn(2, 3, 9, 8).half()) if part.kind == "chain"]
    assert [exact_products.is_exact_product(part.graph, node) for node in part.graph.nodes].count(True) == 1
    text = emit_chain(part.graph, H200, "chain").script()
    assert "ladder_product" not in text
    assert "if_then_else" not in text  # what lies beyond the image is loaded as zeros
    simulate(part.graph)
    halves = parts_of(made(58).half(), torch.randn(2, 24, 9, 8).half())
    stencil = next(part for part in halves if "mul" in part.operators)  # its weights are float32
    assert not any(exact_products.is_exact_product(stencil.graph, node) for node in stencil.graph.nodes)


class Twice(nn.Module):
    """Two convolutions of one image."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Conv2d(24, 32, 3, padding=1), nn.Conv2d(24, 16, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.near(x), self.far(x)], 1)


@pytest.mark.parametrize("last", [False, True])
def test_readers_share_a_copy_in_order(last: bool) -> None:
    """Of an image that has its channels first; one that has them last is read as it lies."""
    torch.manual_seed(0)
    x = torch.randn(2, 24, 9, 8).half()
    x = x.to(memory_format=torch.channels_last) if last else x
    parts = parts_of(Twice().half().eval().requires_grad_(False), x)
    read = {part.by_role["A"] for part in parts if part.kind == "gemm"}
    assert len(read) == 1
    maker = next(part for part in parts if read & {*part.outputs})
    assert maker.kind == ("view" if last else "chain")
    if not last:
        simulate(maker.graph)
