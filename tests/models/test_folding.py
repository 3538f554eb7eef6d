"""Convolutions as plans have them: channels last, affine functions in their weights, with what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_convolutions import simulate
from torch import Tensor, nn
from torch.nn import functional as F

import ladder
from ladder.frontend.torch_fx import import_fx
from ladder.ir import Graph, evaluate
from ladder.ir.build import GraphBuilder
from ladder.ir.folding import fold
from ladder.lower.chain import windows
from ladder.partition import partition
from ladder.rewrite import simplify
from ladder.runtime.model.build import build_prepared
from ladder.runtime.model.joined import computed
from ladder.runtime.model.prepared import Prepared, simplified, with_packed
from targets import get_device, host_cpu

H200 = get_device("cuda/sm_90a")


def traced(function: Callable[..., Any], *values: Tensor) -> Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        return import_fx(make_fx(function)(*values), list(values)).graph


def normalised(x: Tensor, *vectors: Tensor) -> Tensor:
    mean, spread, weight, bias = vectors
    return F.batch_norm(x, mean, spread * spread + 0.5, weight, bias)


def one(x: Tensor, w: Tensor, w2: Tensor, *v: Tensor) -> Tensor:
    return torch.relu(normalised(F.conv2d(x, w, v[0], 2, 1), *v[1:5]))


def in_front(x: Tensor, w: Tensor, w2: Tensor, *v: Tensor) -> Tensor:
    return torch.relu(F.conv2d(x * v[0][:, None, None] + v[1][:, None, None], w))


def before(x: Tensor, w: Tensor, w2: Tensor, *v: Tensor) -> Tensor:
    y = torch.relu(F.conv2d(x, w2, padding=1))
    return F.conv2d(y * v[0][:, None, None] + v[1][:, None, None], w, v[2])


def padded(x: Tensor, w: Tensor, w2: Tensor, *v: Tensor) -> Tensor:
    y = torch.relu(F.conv2d(x, w2, padding=1))
    return F.conv2d(y * v[0][:, None, None], w, padding=1) + 0.5


def padded_term(x: Tensor, w: Tensor, w2: Tensor, *v: Tensor) -> Tensor:
    y = torch.relu(F.conv2d(x, w2, padding=1))
    return F.conv2d(y * v[0][:, None, None] + v[1][:, None, None], w, padding=1)


def joined(x: Tensor, w: Tensor, w2: Tensor, *v: Tensor) -> Tensor:
    first = normalised(F.conv2d(x, w, padding=1), *v[:4])
    return torch.relu(first + normalised(F.conv2d(x, w2, padding=1), *v[4:]))


def stencil(x: Tensor, w: Tensor, w2: Tensor, *v: Tensor) -> Tensor:
    y = torch.relu(F.conv2d(x, w))
    return normalised(F.conv2d(y, w2, stride=2, padding=1, groups=8), *v[:4])


CASES: dict[str, tuple[Callable[..., Tensor], int, int]] = {
    "after": (one, 0, 1),
    "in front of the only one": (in_front, 0, 1),
    "before": (before, 0, 1),
    "before, zeros around, factor only": (padded, 0, 1),
    "before, zeros around": (padded_term, 1, 1),
    "two that meet": (joined, 0, 2),
    "stencils": (stencil, 1, 1),
}
"""Case -> function, multiplications left, additions left."""


@pytest.mark.parametrize("case", CASES)
def test_affine_functions_become_weights(case: str) -> None:
    function, products, sums = CASES[case]
    torch.manual_seed(0)
    depth = 1 if function is stencil else 8
    values = [torch.randn(2, 8, 6, 5), torch.randn(8, 8, 3, 3) / 8, torch.randn(8, depth, 3, 3) / 8]
    values += [torch.randn(8) for _ in range(8)]
    operators = [node.operator for node in checked(function, values).nodes]
    assert operators.count("mul") == products
    assert operators.count("add") == sums


def checked(function: Callable[..., Tensor], values: list[Tensor]) -> Graph:
    """Return the folded graph of a function, which computes the same; the first value is no parameter."""
    plain = simplify(traced(function, *values))
    folded = fold(plain, [node.name for node in plain.inputs[1:]])
    given = dict(zip((node.name for node in plain.inputs), values, strict=True))
    for name, graph in folded.made.items():
        given[name] = computed(graph, [given[node.name] for node in graph.inputs])
    operands = [given[node.name].numpy() for node in folded.graph.inputs]
    exact = evaluate(plain, [value.double().numpy() for value in values])
    assert np.linalg.norm(evaluate(folded.graph, operands) - exact) < 1e-6 * np.linalg.norm(exact)
    return folded.graph


def test_windows_as_large_as_the_image_are_no_groups() -> None:
    """A reshape joins two axes of the result, as many as the weight begins with: they are no channels."""

    def function(x: Tensor, w: Tensor, w2: Tensor, v: Tensor) -> Tensor:
        y = F.conv2d(torch.relu(F.conv2d(x, w)), w2)
        return y.permute(0, 2, 3, 1).flatten(2) * v

    torch.manual_seed(0)
    values = [torch.randn(2, 4, 7, 7), torch.randn(4, 4, 3, 3), torch.randn(3, 4, 3, 3), torch.randn(9)]
    checked(function, values)


class Block(nn.Module):
    """A bottleneck with a branch of its own, a stencil, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1, bias=False)
        self.stencil = nn.Conv2d(16, 16, 3, 2, 1, groups=16, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))
        for norm in self.norms:
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (2, 8)).transpose(1, 2).flatten(1, 2)
        y = torch.relu(self.norms[0](self.first(x)) + self.norms[1](self.second(x)))
        return F.silu(self.norms[2](self.stencil(y))).mean((2, 3))


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block().eval().requires_grad_(False)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


def planned(model: nn.Module, x: Tensor) -> Callable[..., Any]:
    """Return a model as it is folded for GPUs, run on this machine by torch and chains."""

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        program = simplified(import_fx(module, examples), H200)
        made = [name for name, source in program.sources.items() if source.graph is not None]
        assert bool(made) != model.training
        parts = partition(program.graph, device=host_cpu(), packable=made)
        return build_prepared(Prepared(program, parts), x.device).executable

    with torch.no_grad():
        fast = ladder.compile(model, backend=backend)
        fast(x)
    return fast


def test_weights_that_change_are_folded_again(block: Block) -> None:
    x = torch.randn(2, 16, 8, 8)
    fast = planned(block, x)

    def less() -> None:
        block.norms[0].running_var.mul_(3)

    def other() -> None:
        block.second.weight.neg_()

    with torch.no_grad():
        for change in (less, other):
            change()
            exact = block.double()(x.double())
            block.float()
            assert relative(fast(x), exact) < 1e-6


def test_halves_are_as_exact_as_torch(block: Block) -> None:
    x = torch.randn(2, 16, 8, 8)
    exact = block.double()(x.double())
    half = block.half()
    fast = planned(half, x.half())
    with torch.no_grad():
        assert relative(fast(x.half()), exact) < 1.5 * relative(half(x.half()), exact)


def test_weights_are_made_without_random_numbers_drawn_before() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolve = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.convolve(x + torch.randn_like(x))

    model = Noisy().eval()
    fast = ladder.compile(model)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 4, 16)
            state = torch.get_rng_state()
            want, after = model(x), torch.get_rng_state()
            torch.set_rng_state(state)
            assert relative(fast(x), want.double()) < 1e-5
            assert torch.equal(torch.get_rng_state(), after)


def test_statistics_of_training_are_not_folded(block: Block) -> None:
    x = torch.randn(2, 16, 8, 8)
    fast = planned(block.train(), x)
    before = block.norms[0].running_mean.clone()
    with torch.no_grad():
        fast(x)
    assert not torch.equal(before, block.norms[0].running_mean)


def test_plans_for_gpus(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product takes in the sum and the function behind it; all chains are right on the simulator."""
    monkeypatch.setattr(windows, "BUSY_ROWS", 1)
    found: list[Any] = []

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        found.append(simplified(import_fx(module, examples), H200))
        return module

    ladder.compile(block.half(), backend=backend)(torch.randn(2, 16, 8, 8).half())
    (program,) = found
    made = [name for name, source in program.sources.items() if source.graph is not None]
    parts = partition(program.graph, device=H200, packable=made)
    products = [part for part in parts if part.kind in ("gemm", "product")]
    assert sorted(part.operators.count("relu") for part in products) == [0, 1]
    assert any(part.gemm and part.gemm.residual for part in parts) or any(part.roles for part in products)
    assert all("us" in part.reason for part in products)
    packed = with_packed(program, parts).sources.values()
    assert sum(source.kind == "weight" for source in packed) == sum(part.gemm is not None for part in parts)
    for part in parts:
        if part.kind == "chain":
            simulate(part.graph)


class Context(nn.Module):
    """What a product gives for a whole image is added to each of its places (timm's gcresnext26ts)."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.context = nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.image(x)
        return torch.relu(self.context(y.mean((2, 3), keepdim=True)) + y)


def test_a_product_takes_in_no_more_than_it_computes() -> None:
    found: list[Any] = []

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        found.append(simplified(import_fx(module, examples), H200))
        return module

    ladder.compile(Context().half(), backend=backend)(torch.randn(2, 16, 8, 8).half())
    made = [name for name, source in found[0].sources.items() if source.graph is not None]
    parts = partition(found[0].graph, device=H200, packable=made)
    products = [part for part in parts if part.kind in ("gemm", "product")]
    assert [part.operators.count("relu") for part in products] == [0, 0]


@pytest.mark.parametrize("taps", [3, 7])
def test_images_of_three_channels(taps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few products are sums over windows; else the channels become four."""
    monkeypatch.setattr(windows, "BUSY_ROWS", 1)
    x, w, v = torch.randn(1, 3, 10, 9).half(), torch.randn(16, 3, taps, taps).half(), torch.randn(16).half()
    plain = simplify(traced(lambda x, w, v: F.silu(F.conv2d(x, w, v, 2, taps // 2)), x, w, v), H200)
    folded = fold(plain, [node.name for node in plain.inputs[1:]])
    parts = partition(folded.graph, device=H200)
    assert ["product" in part.kind for part in parts].count(True) == (taps == 7)
    simulate(next(part.graph for part in parts if part.kind == "chain"))
    exact = F.silu(F.conv2d(x.double(), w.double(), v.double(), 2, taps // 2)).numpy()
    found = evaluate(plain, [value.double().numpy() for value in (x, w, v)])
    assert np.linalg.norm(found - exact) < 1e-3 * np.linalg.norm(exact)


def pooled() -> Graph:
    g = GraphBuilder("pool")
    x = g.add("pad", g.input("x", "float16", (2, 7, 8, 16)), low=(0, 1, 1, 0), high=(0, 1, 1, 0), value=-1e4)
    spec = "n 2*h0+r0 2*h1+r1 c -> n h0 h1 c r0 r1"
    x = g.add("map", x, sizes=(("h0", 4), ("r0", 3), ("h1", 4), ("r1", 3)), spec=spec)
    for _ in range(2):
        x = g.add("reduce_max", x, axis=len(g.tile(x).shape) - 1, keep=False)
    return g.finish(x)


def mean(shape: tuple[int, ...], function: str) -> Graph:
    g = GraphBuilder("mean")
    x = g.add(function, g.add("convert", g.input("x", "float16", shape), type="float32"))
    for axis in range(len(shape) - 2, 0, -1):
        x = g.add("reduce_sum", x, axis=axis)
    return g.finish(g.add("convert", g.add("sigmoid", x), type="float16"))


def depthwise(shape: tuple[int, ...], taps: int, step: int) -> Graph:
    """Windows of each channel times its weights, channels last."""
    g, (_, high, wide, channels), border = GraphBuilder("depthwise"), shape, taps // 2
    sizes = (("h0", -(-high // step)), ("r0", taps), ("h1", -(-wide // step)), ("r1", taps))
    spec = f"n {step}*h0+r0-{border} {step}*h1+r1-{border} c -> n h0 h1 c r0 r1"
    x = g.add("map", g.input("x", "float16", shape), sizes=sizes, spec=spec, pad=True)
    x = g.add("mul", g.add("convert", x, type="float32"), g.input("w", "float32", (channels, taps, taps)))
    for _ in range(2):
        x = g.add("reduce_sum", x, axis=len(g.tile(x).shape) - 1, keep=False)
    return g.finish(
        g.add("convert", g.add("relu", g.add("add", x, g.input("b", "float32", (channels,)))), type="float16")
    )


GRAPHS: dict[str, Callable[[], Graph]] = {
    "depthwise 3": lambda: depthwise((2, 5, 6, 16), 3, 1),
    "depthwise 5": lambda: depthwise((1, 9, 16, 24), 5, 2),
    "depthwise 7": lambda: depthwise((1, 6, 8, 8), 7, 1),
    "pooling": pooled,
    "mean": lambda: mean((2, 9, 9, 24), "relu"),
    "mean of one axis": lambda: mean((3, 40, 200), "silu"),
    "odd channels": lambda: mean((2, 5, 5, 6), "square"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_chains_on_vectors_of_channels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "BUSY_ROWS", 1)
    simulate(GRAPHS[name]())


def test_threads_take_several_windows_of_channels() -> None:
    """As many as divide a row, where there are enough for all multiprocessors."""
    for shape, beside in (((16, 32, 32, 768), 4), ((16, 9, 30, 768), 3), ((16, 7, 7, 768), 1)):
        graph = depthwise(shape, 7, 1)
        assert windows.windows_beside(graph, graph.outputs[0], 8) == beside
