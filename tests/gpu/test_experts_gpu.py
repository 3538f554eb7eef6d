"""Experts and 8-bit activations on a GPU: every pipeline, CUDA graphs, changing ranges, torch.compile."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import ladder  # noqa: E402
from ladder.runtime.tokens import quantize_tokens  # noqa: E402
from schedules.schedule import GpuSchedule, Plan  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

E, N, K = 6, 203, 456
COUNTS = [[3, 0, 17, 1, 64, 2], [0, 0, 0, 0, 0, 70], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]

SCHEDULES = {
    "gemv": GpuSchedule("gemv", 8, stages=4, warps=8, split_k=2),
    "mma": GpuSchedule("mma", 32, stages=3, warps=4),
    "wgmma": GpuSchedule("wgmma", 32, 64, 128, stages=4, warps=4),
    "wgmma wide": GpuSchedule("wgmma", 128, 128, 64, stages=4, warps=8),
    "wgmma in a persistent grid": GpuSchedule("wgmma", 32, 64, 128, stages=4, warps=4, persistent=True),
}


def relative_error(y, exact) -> float:
    return float((y.double() - exact).norm() / exact.norm())


@pytest.fixture(scope="module")
def matrices():
    return [ladder.quantize(torch.randn(N, K, device="cuda"), "int4", group_size=64) for _ in range(E)]


def reference(x, matrices, counts, bias):
    rows = torch.split(x, counts)
    parts = zip(rows, matrices, bias, strict=True)
    return torch.cat([r.double() @ m.dequantize("float64").T + b.double() for r, m, b in parts])


def offsets_of(counts):
    return torch.tensor([0, *counts], device="cuda").cumsum(0).to(torch.int32)


@pytest.mark.parametrize("pipeline", [*SCHEDULES, "chosen"])
def test_tokens_of_experts(matrices, pipeline: str) -> None:
    plan = None if pipeline == "chosen" else Plan(((1 << 16, SCHEDULES[pipeline]),))
    op = ladder.GroupedMatmul(E, N, K, "int4", group_size=64, bias=True, plan=plan)
    packed, bias = op.pack(matrices), torch.randn(E, N, device="cuda").half()
    for counts in COUNTS:
        x = torch.randn(sum(counts), K, device="cuda").half()
        y = op(x, packed, offsets_of(counts), bias)
        assert relative_error(y, reference(x, matrices, counts, bias)) <= 5e-4


@pytest.mark.parametrize("pipeline", SCHEDULES)
def test_counted_slots(matrices, pipeline: str) -> None:
    plan = Plan(((1 << 16, SCHEDULES[pipeline]),))
    op = ladder.GroupedMatmul(E, N, K, "int4", group_size=64, masked=True, plan=plan)
    packed = op.pack(matrices)
    for counts in COUNTS:
        x = torch.randn(E, 70, K, device="cuda").half()
        y = op(x, packed, torch.tensor(counts, dtype=torch.int32, device="cuda"))
        rows = [y[e, :count] for e, count in enumerate(counts)]
        exact = [
            x[e, :c].double() @ m.dequantize("float64").T
            for e, (c, m) in enumerate(zip(counts, matrices, strict=True))
        ]
        assert relative_error(torch.cat(rows), torch.cat(exact)) <= 5e-4


def test_a_graph_follows_the_ranges(matrices) -> None:
    op = ladder.GroupedMatmul(E, N, K, "int4", group_size=64)
    packed, bias = op.pack(matrices), torch.zeros(E, N, device="cuda")
    x, offsets = torch.randn(87, K, device="cuda").half(), offsets_of(COUNTS[0])
    op(x, packed, offsets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x, packed, offsets)
    for counts in ([3, 0, 17, 1, 64, 2], [87, 0, 0, 0, 0, 0], [20, 7, 10, 20, 10, 20]):
        offsets.copy_(offsets_of(counts))
        graph.replay()
        assert relative_error(y, reference(x, matrices, counts, bias)) <= 5e-4


@pytest.mark.parametrize("activation", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "k"), [(1, 4096), (33, 1003), (5, 40000)])
def test_quantized_tokens(activation: str, dtype: torch.dtype, m: int, k: int) -> None:
    if activation != "int8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs fp8")
    x = (torch.randn(m, k, device="cuda") * torch.logspace(-4, 2, m, device="cuda")[:, None]).to(dtype)
    x[-1, 0] = torch.inf if m > 1 else 1
    for group in (0, 128):
        codes, scale = ladder.quantize_tokens(x, activation, group_size=group or None)
        expected, expected_scale = quantize_tokens(x, activation, group)
        finite = expected_scale.isfinite()
        torch.testing.assert_close(scale, expected_scale, rtol=3e-7, atol=0, equal_nan=True)
        rows = finite if group == 0 else finite.all(dim=1)
        # Quotients near a tie may round apart (scales differ by an ulp; all equal bfloat16 values do so
        # together, so no share of the elements bounds them): both codes are then equally near.
        widened = scale[:, None] if group == 0 else scale.repeat_interleave(group, dim=1)[:, :k]
        error, least = ((widened * c.float() - x.float()).abs()[rows] for c in (codes, expected))
        assert bool((error <= least + 2**-20 * x.float().abs()[rows]).all())


def test_dynamic_quantization_compiles_and_captures() -> None:
    linear = torch.nn.Linear(512, 256, dtype=torch.bfloat16, device="cuda")
    quantized = ladder.Linear.from_linear(linear, weight="int4", group_size=128, activation="int8")
    x = torch.randn(5, 512, device="cuda").bfloat16()
    with torch.no_grad():
        eager = quantized(x)
        torch.testing.assert_close(torch.compile(quantized, fullgraph=True)(x), eager)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = quantized(x)
        graph.replay()
    assert torch.equal(y, eager)


@pytest.mark.parametrize("m", [1, 64, 300])
@pytest.mark.parametrize("tile", [(), (16, 128, 8), (64, 64, 4), (128, 128, 8)])
def test_blocks_of_weights_and_groups_of_tokens(tile: tuple[int, ...], m: int) -> None:
    if torch.cuda.get_device_capability() < ((9, 0) if tile else (8, 9)):
        pytest.skip("needs fp8, or wgmma")
    plan = None
    if tile:
        tile_m, tile_n, warps = tile
        schedule = GpuSchedule("wgmma", tile_m, tile_n, 128, 4, warps, placement="accumulator")
        plan = Plan(((1 << 16, schedule),))
    weight = ladder.quantize(
        torch.randn(300, 640, device="cuda"), "fp8_e4m3", block=(128, 128), scale_type="float32"
    )
    op = ladder.Matmul(
        300, 640, "fp8_e4m3", "fp8_e4m3", output="float32", group_size=128, token_group=128, plan=plan
    )
    x = torch.randn(m, 640, device="cuda").bfloat16()
    codes, scale = ladder.quantize_tokens(x, "fp8_e4m3", group_size=128)
    exact = (codes.double() * scale.double().repeat_interleave(128, dim=1)) @ weight.dequantize("float64").T
    assert relative_error(op(x, op.pack(weight)), exact) <= 1e-3
