"""The runtime on a GPU: streams, CUDA graphs, moving modules, artefacts, opcheck."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attention_layout  # noqa: E402

import ladder  # noqa: E402
from benchmarks.host_cost import host_cost_us  # noqa: E402
from ladder import knobs  # noqa: E402
from ladder.runtime import operator  # noqa: E402
from ladder.runtime.compile import forget  # noqa: E402
from ladder.runtime.model.graphs import Stopwatch  # noqa: E402
from ladder.runtime.recording import recorded  # noqa: E402
from tests.replayed import REPLAYED, lying  # noqa: E402
from tests.replayed_programs import PROGRAMS, differences  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

N, K = 192, 320


def relative_error(y, exact) -> float:
    return float((y.double() - exact).norm() / exact.norm())


@pytest.fixture(scope="module")
def problem():
    weight = ladder.quantize(torch.randn(N, K, device="cuda"), "int4", group_size=64)
    op = ladder.Matmul(N, K, "int4", "float16", group_size=64)
    packed = op.pack(weight)
    assert packed.device.type == "cuda"
    return op, packed, weight.dequantize("float64")


@pytest.mark.parametrize("m", [0, 1, 3, 16, 64, 257, 1025])
def test_every_m_with_one_build(problem, m: int) -> None:
    op, packed, dense = problem
    x = torch.randn(m, K, device="cuda").half()
    y = op(x, packed)
    assert y.shape == (m, N)
    assert m == 0 or relative_error(y, x.double() @ dense.t()) <= 5e-4


def test_runs_on_the_current_stream(problem) -> None:
    """The side stream is kept busy before x gets its values: a launch elsewhere would read the old ones."""
    op, packed, dense = problem
    x, source = torch.zeros(8, K, device="cuda").half(), torch.randn(8, K, device="cuda").half()
    op(x, packed)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.copy_(source)
        y = op(x, packed)
    side.synchronize()
    assert relative_error(y, source.double() @ dense.t()) <= 5e-4


@pytest.mark.parametrize("m", [1, 16, 128])
def test_cuda_graph_replays_with_new_activations(problem, m: int) -> None:
    op, packed, dense = problem
    x = torch.randn(m, K, device="cuda").half()
    op(x, packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x, packed)
    for _ in range(2):
        x.copy_(torch.randn(m, K, device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(y, x.double() @ dense.t()) <= 5e-4


def test_a_kernel_that_nobody_has_built_goes_into_a_graph(problem, tmp_path) -> None:
    """Its first launch loads it, which recordings forbid by default."""
    _, packed, dense = problem
    forget()
    with knobs.override(cache_dir=tmp_path, ahead=False):
        op = ladder.Matmul(N, K, "int4", "float16", group_size=64)
        for m in (1, 200):
            graph, x = torch.cuda.CUDAGraph(), torch.randn(m, K, device="cuda").half()
            with torch.cuda.graph(graph):
                y = op(x, packed)
            x.copy_(torch.randn(m, K, device="cuda"))
            graph.replay()
            torch.cuda.synchronize()
            assert relative_error(y, x.double() @ dense.t()) <= 5e-4
    forget()


def test_opcheck_on_the_gpu(problem) -> None:
    op, packed, _ = problem
    x = torch.randn(3, K, device="cuda").half()
    torch.library.opcheck(operator.matmul, (x, packed.tensors, None, None, op.request.text))


def test_module_moves_between_cpu_and_gpu() -> None:
    torch.manual_seed(0)
    module = ladder.Linear.from_linear(torch.nn.Linear(K, N).half(), "nf4", group_size=64)
    x = torch.randn(4, K).half()
    with torch.no_grad():
        on_cpu = module(x)
        on_gpu = module.cuda()(x.cuda())
        again = module.cpu()(x)
    assert relative_error(on_gpu.cpu(), on_cpu.double()) <= 1e-3
    assert torch.equal(again, on_cpu)
    with pytest.raises(ladder.DeviceError, match="move"):
        module(x.cuda())


@pytest.mark.parametrize("activation", ["int8", "fp8_e4m3"])
def test_dynamic_activations(activation: str) -> None:
    if activation == "fp8_e4m3" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    torch.manual_seed(0)
    module = ladder.Linear.from_linear(
        torch.nn.Linear(K, N, device="cuda").bfloat16(), "int4", group_size=64, activation=activation
    )
    x = torch.randn(5, K, device="cuda").bfloat16()
    exact = x.double() @ module.canonical.to("cuda").dequantize("float64").t() + module.bias.double()
    with torch.no_grad():
        assert relative_error(module(x), exact) <= 5e-2


def test_artefact_on_the_gpu(problem, tmp_path) -> None:
    op, packed, _ = problem
    loaded = ladder.load(op.export(tmp_path / "op.ladder", packed))
    x = torch.randn(7, K, device="cuda").half()
    assert torch.equal(loaded(x), op(x, packed))
    with pytest.raises(ladder.ArtifactError, match="sm_80"):
        ladder.load(op.export(tmp_path / "other.ladder", target="cuda/sm_80"))


def test_compiled_model_with_cuda_graphs(problem) -> None:
    op, packed, dense = problem
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: op(x, packed) * 1.0, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(16, K, device="cuda").half()
        torch.compiler.cudagraph_mark_step_begin()
        assert relative_error(compiled(x), x.double() @ dense.t()) <= 5e-4


def test_recordings_that_fail_leave_nothing_behind() -> None:
    """Random numbers of torch stay in a recording that fails, and so does memory of several streams."""
    before = torch.cuda.CUDAGraph()
    with recorded(before):
        drawn = torch.randn(8, device="cuda")
    torch.manual_seed(1)
    expected = [torch.randn(8, device="cuda") for _ in range(3)]
    with pytest.raises(RuntimeError), recorded(torch.cuda.CUDAGraph()):
        torch.randn(8, device="cuda").sum().item()
    torch.manual_seed(1)
    found = [torch.randn(8, device="cuda")]
    before.replay()
    found += [drawn.clone(), torch.randn(8, device="cuda")]
    assert all(map(torch.equal, found, expected))
    reserved, other = torch.cuda.memory_reserved(), torch.cuda.Stream()
    for _ in range(50):
        shared = torch.empty(1 << 20, device="cuda")
        shared.record_stream(other)
        del shared
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - reserved < 50 << 21


def test_host_cost_is_a_few_microseconds(problem) -> None:
    op, packed, _ = problem
    x = torch.randn(1, K, device="cuda").half()
    cost = host_cost_us(op.compiled_for(x.device), x, packed)
    print({name: round(value, 2) for name, value in cost.items()})
    assert cost["direct"] < 50


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", attention_layout.CASES)
def test_strides_of_attentions_result(case: str, dtype) -> None:
    """Whether a reshape is a view, through which the result is written, depends on them."""
    attention_layout.check_strides(case, "cuda", dtype)


@pytest.mark.parametrize("size", [8, 40, 72, 88])
def test_attention_of_heads_that_are_no_multiple_of_16(size: int) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    q, k, v = (torch.randn(1, 16, n, size, device="cuda").half() for n in (1, 1024, 1024))
    exact, fast = attend(q.double(), k.double(), v.double()), ladder.compile(attend)
    with torch.no_grad():
        for _ in range(3):
            assert (fast(q, k, v) - exact).norm() < 1e-3 * exact.norm()
    assert "no kernel" not in str(fast.plan())


MATH = "aten::_scaled_dot_product_attention_math"
"""Torch's attention that takes all scores to memory, in float32."""

HIDDEN: dict[str, Any] = {
    "rows": lambda q, bias: (q[:, :1, :, :1] < 9).expand(-1, -1, -1, q.shape[-2]),
    "keys": lambda q, bias: (q[:, :1, None, :, 0] < 2).expand(-1, -1, q.shape[-2], -1),
    "turned": lambda q, bias: bias.permute(2, 0, 1)[None],
    "none": lambda q, bias: None,
}
"""Masks of which torch takes all scores to memory as they lie."""


@pytest.mark.parametrize("shape", [(2, 8, 256, 64), (2, 3, 8, 64, 32)], ids=str)
@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize("case", HIDDEN)
def test_torchs_attention_is_one_of_its_fused_ones(case: str, kv_heads: int, shape: tuple[int, ...]) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        mask = HIDDEN[case](q if q.ndim == 4 else q[0], bias)
        grouped = q.shape[-3] != k.shape[-3]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped)

    if len(shape) > 4 and kv_heads < 8:
        pytest.skip("torch groups heads of four axes alone")
    torch.manual_seed(0)
    q = torch.randn(shape, device="cuda").half()
    k, v = torch.randn(2, *shape[:-3], kv_heads, shape[-1], shape[-2], device="cuda").half().mT.unbind(0)
    bias = torch.randn(shape[-2], shape[-2], 8, device="cuda").half()
    exact, fast = attend(q.double(), k.double(), v.double(), bias.double()), ladder.compile(attend)
    with torch.no_grad():
        fast(q, k, v, bias)  # is recorded as eager runs it
        with torch.profiler.profile() as profile:
            found = fast(q, k, v, bias)
        assert MATH not in {event.key for event in profile.key_averages()}
        for result in (found, fast(q, k, v, bias), fast(q, k, v, bias)):
            assert (result - exact).norm() < 2e-3 * exact.norm()


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("axis", [1, -1])
def test_topk_joins_chains(axis: int, largest: bool) -> None:
    """A router's choice of experts; a long axis stays torch's."""

    def router(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = torch.topk(torch.softmax(x, -1), 3, axis, largest)
        return values / values.sum(-1, keepdim=True), ids

    x = torch.randn(3, 6, 128, device="cuda")
    fast = ladder.compile(router)
    with torch.no_grad():
        for _ in range(3):
            for found, wanted in zip(fast(x), router(x), strict=True):
                torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
        assert "topk" not in str(fast.plan())
        for tokens in (1, 5, 40):
            x = torch.randn(tokens, 6, 128, device="cuda")
            for found, wanted in zip(fast(x), router(x), strict=True):
                torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    beyond = ladder.compile(lambda x: torch.topk(x, 3))
    x = torch.randn(2, 1000, device="cuda")
    assert torch.equal(beyond(x)[1], torch.topk(x, 3)[1])


@torch.no_grad()
def test_calls_in_several_streams_have_memory_of_their_own() -> None:
    """A call's work goes on behind it: what the next one writes in another stream is not read by it."""
    weights = [torch.randn(2048, 2048, device="cuda", dtype=torch.float16) / 45 for _ in range(4)]

    def program(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.nn.functional.gelu(torch.softmax(x @ weight, -1) * 100 + x)
        return x

    fast = ladder.compile(program)
    streams = [torch.cuda.Stream() for _ in range(3)]
    xs = [torch.randn(4096, 2048, device="cuda", dtype=torch.float16) for _ in streams]
    torch.cuda.synchronize()
    expected = [fast(x) for x in xs]
    torch.cuda.synchronize()
    for _ in range(6):
        found = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(fast(x))
        torch.cuda.synchronize()
        # cuBLAS may take another kernel in another stream
        assert max(map(relative_error, found, expected)) <= 1e-2


@torch.no_grad()
def test_graphs_that_a_program_records_have_memory_of_their_own() -> None:
    """They are replayed side by side, between calls, and when the plan serves other sizes since."""
    weights = [torch.randn(1024, 1024, device="cuda", dtype=torch.float16) / 32 for _ in range(3)]

    def program(x: torch.Tensor) -> torch.Tensor:
        shift = torch.arange(1024, device=x.device, dtype=x.dtype).cos()
        for weight in weights:
            x = torch.nn.functional.gelu(torch.softmax(x @ weight, -1) * 100 + x + shift)
        return x

    fast = ladder.compile(program)
    xs = [torch.randn(2048, 1024, device="cuda", dtype=torch.float16) for _ in range(3)]
    expected = [fast(x) for x in [*xs, *xs]][3:]
    graphs, found = [torch.cuda.CUDAGraph() for _ in xs], []
    for graph, x in zip(graphs, xs, strict=True):
        with torch.cuda.graph(graph):
            found.append(fast(x))
    for rows in (4096, 512, 3072):
        for _ in range(4):
            fast(torch.randn(rows, 1024, device="cuda", dtype=torch.float16))
    streams = [torch.cuda.Stream() for _ in xs]
    for _ in range(6):
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        again = fast(xs[0])
        torch.cuda.synchronize()
        assert max(map(relative_error, [*found, again], [*expected, expected[0]])) <= 1e-2


@torch.no_grad()
def test_what_is_written_through_data_is_seen() -> None:
    """As adapters are merged, into weights that plans fold, join and turn."""
    norm = torch.nn.Sequential(torch.nn.Conv2d(32, 64, 3), torch.nn.BatchNorm2d(64), torch.nn.ReLU())
    net = torch.nn.Sequential(norm, torch.nn.AvgPool2d(14), torch.nn.Flatten(), torch.nn.Linear(64, 96))
    net = net.eval().to("cuda", torch.float16)
    fast, x = ladder.compile(net), torch.randn(4, 32, 16, 16, device="cuda", dtype=torch.float16)
    for name, _ in [("", x)] * 3 + [*net.named_parameters()] * 2:
        if name:
            net.get_parameter(name).data += 0.25
        assert relative_error(fast(x), net(x).double()) <= 1e-2


@pytest.mark.parametrize("gap", [1, 2])
@pytest.mark.parametrize("name", REPLAYED)
@torch.no_grad()
def test_results_of_replays_lie_as_in_eager(name: str, gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stopwatch, "allows", lambda self, *copied: True)
    program = REPLAYED[name]
    fast = ladder.compile(program)
    for _ in range(5):
        x, y = (torch.randn(n, 6 * gap, device="cuda")[:, ::gap] for n in (4, 3))
        own, wanted = y.clone(), program(x, y)
        y.copy_(own)
        found = fast(x, y)
        torch.testing.assert_close(found, program(x, own), rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(y, own)
        assert lying((x, y, *found)) == lying((x, y, *wanted))
    assert any(built.executable.recorded() for built in fast.models)


@pytest.mark.parametrize("name", PROGRAMS)
@torch.no_grad()
def test_replayed_calls_are_as_in_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stopwatch, "allows", lambda self, *copied: True)
    assert not differences(name, "cuda")


@pytest.mark.parametrize(("rows", "recorded"), [(4, True), (1 << 18, False)])
def test_graphs_are_recorded_where_copies_cost_less_than_launches(rows: int, recorded: bool) -> None:
    """Five products of few rows wait for their launches; one gigabyte of arguments that change does not."""
    weights = [torch.randn(1024, 1024, device="cuda") / 32 for _ in range(5)] if recorded else []

    def program(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.relu(x @ weight)
        return torch.relu(x)

    fast = ladder.compile(program)
    xs = [torch.randn(rows, 1024, device="cuda") for _ in range(2)]
    with torch.no_grad():
        for at in range(6):
            torch.testing.assert_close(fast(xs[at % 2]), program(xs[at % 2]), atol=1e-4, rtol=1e-4)
    graphs = [graph for built in fast.models for graph in built.executable.recorded()]
    assert bool(graphs) == recorded


def gated(rows: torch.Tensor) -> torch.Tensor:
    """Return what two halves give, as a kernel's epilogue computes it where one token has the rows."""
    one, two = rows.chunk(2, -1)
    return torch.nn.functional.silu(one) * two


@pytest.mark.parametrize("gate", [torch.relu, gated])
def test_one_token_of_quantized_experts(gate: Any) -> None:
    from ladder.api.grouped_linear import GroupedLinear, mixture

    experts, width, hidden, chosen = 8, 128, 256, 3
    up, down = (
        GroupedLinear.from_stack(
            ladder.quantize(torch.randn(experts * n, k, device="cuda") / k**0.5, "int4", group_size=64),
            experts, dtype=torch.float16, device="cuda",
        )
        for n, k in ((hidden * (2 if gate is gated else 1), width), (width, hidden))
    )  # fmt: skip
    dense = [layer.canonical.dequantize("float64").cuda().unflatten(0, (experts, -1)) for layer in (up, down)]
    fast = ladder.compile(lambda x, ids, w: mixture(x, ids, w, up, gate, down))
    with torch.no_grad():
        for tokens in (1, 1, 2, 7):
            x = torch.randn(tokens, width, device="cuda").half()
            ids = torch.randint(0, experts, (tokens, chosen), device="cuda")
            weights = torch.rand(tokens, chosen, device="cuda")
            wanted = torch.zeros(tokens, width, device="cuda", dtype=torch.float64)
            for token in range(tokens):
                for each in range(chosen):
                    first, second = (matrix[ids[token, each]] for matrix in dense)
                    between = gate(x[token].double() @ first.T)
                    wanted[token] += weights[token, each] * (between @ second.T)
            assert relative_error(fast(x, ids, weights), wanted) < 1e-3
