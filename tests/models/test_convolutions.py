"""Convolutions with quantized weights: modules, rules of layout, plans, and their chains on the simulator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import model_zoo as zoo
import numpy as np
import pytest
import torch
from test_models import PHOTO, built, compiled, error
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import ladder
from ladder.frontend.torch_fx import import_fx
from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.ir.convolution import as_fused_convolution
from ladder.ir.gemm import Gemm
from ladder.ir.windows import Windows
from ladder.lower.chain import emit_chain
from ladder.partition import partition
from ladder.rewrite import simplify
from ladder.runtime.model.joined import filled_up
from ladder.runtime.model.prepared import prepare
from ladder.simulate import simulate_launch
from schedules.legal import is_legal
from schedules.policy import make_plan
from targets import get_device
from tile_types.errors import ShapeError

pytestmark = pytest.mark.usefixtures("one_schedule")


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "every second point": lambda: nn.Conv2d(6, 10, 1, stride=2, bias=False),
    "windows": lambda: nn.Conv2d(6, 10, (5, 3), stride=2, padding=(4, 1), dilation=(2, 1)),
    "one axis": lambda: nn.Conv1d(6, 10, 3, padding=1),
}


@pytest.mark.costly
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_modules_convolve(case: str) -> None:
    torch.manual_seed(0)
    conv = CONVOLUTIONS[case]()
    shape = (2, conv.in_channels, 9, 8)[: 2 + len(conv.kernel_size)]
    x = torch.randn(shape)
    quantized = ladder.Conv.from_conv(conv, "int8", group_size=32)
    matrix = torch.as_tensor(quantized.product.canonical.dequantize("float32"))
    points = matrix.shape[1] // conv.in_channels
    twin = CONVOLUTIONS[case]()
    twin.weight.data = matrix.view(-1, points, conv.in_channels).transpose(1, 2).reshape(conv.weight.shape)
    if conv.bias is not None:
        twin.bias.data = conv.bias.data
    with torch.no_grad():
        assert error(quantized(x), twin(x)) < 1e-6


def test_an_image_larger_than_the_stack_is_padded() -> None:
    conv = nn.Conv2d(16, 4, 3, padding=1)
    x = torch.randn(1, 16, 400, 400)  # 10 MB, where a thread's stack has 8
    fast = ladder.compile(conv)
    with torch.no_grad():
        fast(x)
        assert error(fast(x), conv(x)) < 1e-6


def test_what_is_left_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 1), nn.ConvTranspose2d(8, 4, 2))
    ladder.quantize_(model, "int8", convolutions=True)
    report = {row.name: row.reason for row in ladder.quantization(model).rows}
    assert "4 groups" in report["0"]
    assert report["1"] == ""
    assert "ConvTranspose2d" in report["2"]


NETS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "resnet": (lambda: zoo.ResNet((1, 1), 8, 10), PHOTO[..., :32, :32]),
    "efficientnet": (lambda: zoo.EfficientNet([(6, 5, 2, 16, 1)], 8, 32, 10), PHOTO[..., :32, :32]),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", NETS)
def test_nets_run_on_kernels_of_ours(name: str) -> None:
    """Products, windows, stencils and what lies between: nothing is left to torch, nothing is reordered."""
    make, x = NETS[name]
    model = ladder.quantize_(built(make), "int8", group_size=32, convolutions=True)
    with torch.no_grad():
        fast = compiled(model, x)
        assert error(fast(x), model(x)) < 1e-5
        assert error(fast(x), built(make)(x)) < 2e-2
    steps = fast.models[0].plan.steps
    assert {step.part.kind for step in steps} == {"chain", "gemm", "view"}
    graphs = [step.part.graph for step in steps if step.part.kind == "chain"]
    assert not any(n.operator == "transpose" and len(n.tile.shape) > 3 for g in graphs for n in g.nodes)


class Mixed(nn.Module):
    """All that moves channels: windows, stencils, pooling, joins, means."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.stencil = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.last = nn.BatchNorm2d(8), nn.Conv2d(16, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.stencil(torch.relu(self.first(x)))))
        y = torch.cat((y, nn.functional.max_pool2d(y, 3, 1, 1)), 1)
        return self.last(y).mean((2, 3))


def graph_of(model: nn.Module, x: torch.Tensor) -> Any:
    found: list[Any] = []

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        found.append(import_fx(module, examples))
        return module

    with torch.no_grad():
        ladder.compile(model, backend=backend)(x)
    return found[0]


@pytest.mark.costly
def test_chains_between_convolutions_on_the_simulator() -> None:
    device = get_device("cuda/sm_90a")
    model = ladder.quantize_(built(Mixed).half(), "int8", group_size=32, convolutions=True)
    program = graph_of(model, PHOTO[..., :12, :10].half())
    packed = [name for name, source in program.sources.items() if source.kind in ("weight", "part")]
    chains = [
        p.graph
        for p in partition(simplify(program.graph, device), packed, device=device)
        if p.kind == "chain"
    ]
    assert sum("map" in {node.operator for node in graph.nodes} for graph in chains) == 3
    for graph in chains:
        simulate(graph)


@pytest.mark.parametrize("shape", [(1, 16, 4, 6, 6), (0, 16, 6, 6)])
def test_halves_that_no_kernel_of_ours_takes_are_the_library_s(shape: tuple[int, ...]) -> None:
    """Images of three axes, and none at all."""
    convolve = nn.functional.conv3d if len(shape) == 5 else nn.functional.conv2d
    weight = nn.Parameter(torch.randn(32, 16, *(3,) * (len(shape) - 2)).half())
    given = [torch.randn(shape).half(), weight]
    with torch.no_grad():
        module = torch.fx.symbolic_trace(lambda x, weight: torch.relu(convolve(x, weight, padding=1)))
        program = import_fx(module, given, join=True, packed_for="cuda/sm_90a")
        parts = prepare(program, get_device("cuda/sm_90a")).parts
    assert {part.kind for part in parts} <= {"view", "product", "chain"}


GROUPED = {"lines": (nn.Conv1d(256, 256, 1, groups=4), (2, 256, 40)),
           "windows": (nn.Conv2d(128, 256, 3, padding=1, groups=2), (3, 128, 12, 10)),
           "strides": (nn.Conv2d(128, 128, 3, 2, 1, groups=2, bias=False), (2, 128, 9, 7)),
           "filled up": (nn.Conv2d(192, 192, 3, 2, 1, groups=4, bias=False), (8, 192, 56, 56)),
           "two tiles": (nn.Conv2d(144, 208, 3, 1, 1, groups=2), (2, 144, 9, 7))}  # fmt: skip


@pytest.mark.parametrize("case", GROUPED)
def test_grouped_convolutions_are_one_kernel_with_what_follows(case: str) -> None:
    layer, shape = GROUPED[case]
    layer = copy.deepcopy(layer).half()
    program = graph_of(nn.Sequential(layer, nn.SiLU()), torch.randn(shape).half())
    prepared = prepare(program, get_device("cuda/sm_90a"))
    (gemm,) = (part.gemm for part in prepared.parts if part.gemm)
    assert gemm.windows.groups == layer.groups
    assert (gemm.columns, gemm.k) == (layer.out_channels, layer.weight[0].numel())
    assert gemm.n == layer.groups * 64 * -(-layer.out_channels // layer.groups // 64)
    assert (gemm.bias, gemm.epilogue) == (layer.bias is not None, ("silu",))


def test_weights_of_groups_are_filled_up_with_zeros() -> None:
    gemm = Gemm(128, 36, "float16", scale=False, windows=Windows((3, 3), groups=2, features=24))
    matrix = torch.randn(48, 36).half()
    found = filled_up(gemm, matrix).view(2, 64, 36)
    assert torch.equal(found[:, :24], matrix.view(2, 24, 36))
    assert not found[:, 24:].any()
    for rows in (129, 32):
        with pytest.raises(ShapeError, match="2 of 24 features"):
            replace(gemm, n=rows)


@pytest.mark.parametrize("target", ["cuda/sm_80", "cuda/sm_89", "cuda/sm_90a", "cuda/sm_100a"])
@pytest.mark.parametrize(("channels", "features"), [(64, 48), (128, 8), (48, 48), (64, 72)])
def test_kernels_of_filled_up_groups_have_them(channels: int, features: int, target: str) -> None:
    """Also where channels are whole rows of tensor copies, which other groups are read by."""
    windows = Windows((3, 3), padding=(1, 1), groups=4, features=features)
    rows = 4 * 64 * -(-features // 64)
    gemm = Gemm(rows, 9 * channels, "float16", scale=False, bias=True, epilogue=("silu",), windows=windows)
    device = get_device(target)
    for _, schedule in make_plan(gemm, device).entries:
        assert is_legal(gemm, device, schedule)


def test_groups_that_torch_has_kernels_for_are_left_to_it() -> None:
    layer = nn.Conv2d(256, 256, 3, 1, 1, groups=32).half()
    program = graph_of(layer, torch.randn(8, 256, 28, 28).half())
    assert not any(part.gemm for part in prepare(program, get_device("cuda/sm_90a")).parts)


def test_places_and_channels_that_are_joined_are_no_groups() -> None:
    """What is added to both behind a plain convolution is no bias of its channels."""
    g = GraphBuilder("joined")
    sizes = (("h0", 8), ("r0", 3), ("h1", 6), ("r1", 3))
    spec = "n h0+r0-1 h1+r1-1 c, f r0 r1 c -> n h0 h1 f"
    image, weight = g.input("x", "float16", (2, 8, 6, 64)), g.input("w", "float16", (64, 3, 3, 64))
    y = g.add("contract", image, weight, spec=spec, sizes=sizes, pad=True, type="float16")
    y = g.add("add", g.add("reshape", y, shape=(2, 8, 384)), g.input("b", "float16", (384,)))
    graph = g.finish(g.add("relu", y))
    with pytest.raises(ShapeError, match="reshape"):
        as_fused_convolution(graph)
    parts = partition(graph, device=get_device("cuda/sm_90a"), packable=["w"])
    assert [part.kind for part in parts if "contract" in part.operators] in (["gemm"], ["product"])
    assert not any(part.gemm.bias for part in parts if part.gemm)


def test_what_is_added_to_each_group_is_no_bias() -> None:
    g = GraphBuilder("groups")
    image, weight = g.input("x", "float16", (2, 40, 2, 64)), g.input("w", "float16", (2, 64, 1, 64))
    spec, sizes = "n h0+r0 g c, g f r0 c -> n h0 g f", (("h0", 40), ("r0", 1))
    y = g.add("contract", image, weight, spec=spec, sizes=sizes, pad=True, type="float16")
    graph = g.finish(g.add("add", y, g.input("b", "float16", (64,))))
    with pytest.raises(ShapeError, match="each group"):
        as_fused_convolution(graph)


@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions_of_three_axes_keep_their_weight_in_order(groups: int) -> None:
    """One order serves all sizes; it is made again when the weight changes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(8, 16, 3, (1, 2, 1), 1, (2, 1, 1), groups), nn.ReLU()).eval()
    fast = ladder.compile(model)
    with torch.no_grad():
        for count, *sizes in (
            (1, 7, 9, 11),
            (1, 7, 9, 11),
            (3, 7, 9, 11),
            (2, 5, 6, 7),
            (0, 5, 6, 7),
            (1, 3, 8, 8),
        ):
            x = torch.randn(count, 8, *sizes)
            x[..., 0, 0, 0] = float("nan")
            x = x.to(memory_format=torch.channels_last_3d) if count > 1 else x
            assert torch.allclose(fast(x), model(x), rtol=1e-4, atol=1e-5, equal_nan=True)
        model[0].weight.mul_(2)
        assert torch.allclose(fast(x), model(x), rtol=1e-4, atol=1e-5, equal_nan=True)
    assert not fast.refused


@pytest.mark.parametrize("target", ["cuda/sm_90a", "cpu/avx2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_float32_images_stay_as_they_lie_on_gpus(dtype: torch.dtype, target: str) -> None:
    """cuDNN convolves them so; halves, and all on CPUs, have channels last. Depthwise ones are sums."""
    weights = (torch.randn(8, 6, 3, 3), torch.randn(8, 1, 3, 3), torch.randn(4, 8, 1, 1))
    given = [each.to(dtype) for each in (torch.randn(2, 6, 9, 8), *weights)]

    def net(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.relu(nn.functional.conv2d(x, weight, groups=x.shape[1] // weight.shape[1]))
        return x

    with torch.no_grad():
        plain = import_fx(make_fx(net)(*given), given).graph
    graph = simplify(plain, get_device(target))
    operators = [node.operator for node in graph.nodes]
    stay = dtype == torch.float32 and target.startswith("cuda")
    assert operators.count("contract") == 2
    assert ("transpose" in operators) == (not stay)
    values = [each.double().numpy() for each in given]
    assert np.allclose(evaluate(graph, values), evaluate(plain, values), atol=1e-5)


def simulate(graph: Graph) -> None:
    rng = np.random.default_rng(0)
    kinds = {"float16": np.float16, "float32": np.float32}
    inputs = [
        rng.uniform(0.1, 2, node.tile.known_shape).astype(kinds[node.tile.ttype.name])
        for node in graph.inputs
    ]
    outputs = [
        np.full(graph.tile(v).known_shape, np.nan, kinds[graph.tile(v).ttype.name]) for v in graph.outputs
    ]
    function = emit_chain(graph, get_device("cuda/sm_90a"), "chain")
    places = tuple(range(len(inputs), len(inputs) + len(outputs)))
    result = simulate_launch(function, [*inputs, *outputs], outputs=places)
    assert not result.findings, result.report()
    expected = evaluate(graph, inputs)
    for got, exact in zip(outputs, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert np.linalg.norm(got.astype(np.float64) - exact) < 1e-3 * np.linalg.norm(exact)


OWN = {
    "odd rows": ((2, 3, 9, 7), 3, {"padding": 1}),
    "steps of two": ((1, 5, 8, 12), 5, {"padding": 2, "stride": 2}),
    "gaps, one side alone": ((2, 4, 11, 10), (1, 3), {"padding": (0, 2), "dilation": 2}),
    "seven by seven": ((1, 2, 8, 16), 7, {"padding": 3}),
}


@pytest.mark.parametrize("case", OWN)
def test_channels_by_themselves_are_sums_where_they_lie(case: str) -> None:
    """In float32 on NVIDIA's GPUs: one kernel with what is before and behind, and no copy."""
    shape, taps, settings = OWN[case]
    torch.manual_seed(0)
    layer = nn.Conv2d(shape[1], shape[1], taps, groups=shape[1], **settings).eval().requires_grad_(False)
    x = torch.randn(shape)
    prepared = prepare(graph_of(layer, x), get_device("cuda/sm_90a"))
    (part,) = (part for part in prepared.parts if part.kind != "view")
    assert part.kind == "chain"
    assert "transpose" not in part.operators
    simulate(part.graph)
