"""``ladder::matmul`` as torch sees it: opcheck, one graph for every M, dispatch modes, streams of calls."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import ladder
from benchmarks.host_cost import host_cost_us
from ladder.integrations import dynamo
from ladder.runtime import compile as runtime_compile
from ladder.runtime import operator
from ladder.runtime.tokens import quantize_tokens

pytestmark = pytest.mark.usefixtures("plain_compiler")

N, K = 48, 72


def problem(activation: str = "float16", bias: bool = False):
    values = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    op = ladder.Matmul(N, K, "int4", activation, group_size=24, bias=bias, output="float32")
    return op, op.pack(ladder.quantize(values, "int4", group_size=24))


def rows(m: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(m)).to(dtype)


@pytest.mark.parametrize("shape", [(3, K), (2, 2, K), (0, K)])
def test_opcheck(shape: tuple[int, ...]) -> None:
    op, packed = problem()
    x = torch.randn(shape).half()
    torch.library.opcheck(operator.matmul, (x, packed.tensors, None, None, op.request.text))


def test_opcheck_with_bias_and_token_scale() -> None:
    op, packed = problem("int8", bias=True)
    x = torch.randint(-127, 128, (3, K), dtype=torch.int8)
    arguments = (x, packed.tensors, torch.randn(N), torch.rand(3), op.request.text)
    torch.library.opcheck(operator.matmul, arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_opcheck_of_token_quantization(dtype: torch.dtype) -> None:
    x = rows(6, dtype).reshape(2, 3, K)
    x[1, 1] = 0
    torch.library.opcheck(torch.ops.ladder.quantize_tokens.default, (x, "int8"))
    codes, scale = operator.quantize_tokens(x, "int8")
    expected, expected_scale = quantize_tokens(x, "int8")
    assert torch.equal(codes, expected)
    assert torch.equal(scale, expected_scale)
    assert operator.quantize_tokens(x[:0], "int8")[0].shape == (0, 3, K)


def test_kernel_and_torch_round_the_same_product() -> None:
    """Halves of a row's largest magnitude are near a tie of ``x * (1 / scale)``."""
    most = torch.arange(1, 513, dtype=torch.float32)[:, None] / 7
    x = torch.cat([most, most * (torch.arange(63) * 2 + 1) / 254], dim=1)
    x = torch.nn.functional.pad(x, (0, 7))
    for found, expected in zip(operator.quantize_tokens(x, "int8"), quantize_tokens(x, "int8"), strict=True):
        assert torch.equal(found, expected)


class Graphs:
    """A torch.compile backend that keeps the graphs it is given."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        self.graphs.append(graph)
        return graph


@pytest.mark.parametrize("activation", ["float16", "int8"])
def test_one_graph_for_every_m(activation: str) -> None:
    op, packed = problem(activation)
    torch._dynamo.reset()
    backend = Graphs()
    compiled = torch.compile(lambda x: op(x, packed).relu(), backend=backend, fullgraph=True, dynamic=True)
    for m in (5, 2, 33, 300):
        assert torch.equal(compiled(rows(m)), op(rows(m), packed).relu())
    assert len(backend.graphs) == 1
    calls = [node for node in backend.graphs[0].graph.nodes if node.target is operator.matmul]
    assert len(calls) == 1


def test_one_graph_for_every_m_in_a_model() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.GELU(), torch.nn.Linear(N, K)).bfloat16()
    ladder.quantize_(model, "nf4", group_size=24)
    torch._dynamo.reset()
    backend = Graphs()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in (4, 9, 130):
            assert torch.equal(compiled(rows(m, torch.bfloat16)), model(rows(m, torch.bfloat16)))
    assert len(backend.graphs) == 1


def test_what_torch_cannot_trace_is_not_asked_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases differ in which states of theirs `torch.compile` reads: that of ``torch.jit`` not in all."""
    op, packed = problem()
    asked = torch._dynamo.disable(torch._C._is_tracing)
    monkeypatch.setattr(torch._C, "_is_tracing", asked)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: op(x, packed), backend=Graphs(), fullgraph=True, dynamic=True)
    assert torch.equal(compiled(rows(3)), op(rows(3), packed))


@pytest.mark.slow
def test_inductor_runs_it() -> None:
    """Beside one kernel of Inductor's own, whose compiler it need not ask for vector extensions."""
    op, packed = problem()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: op(x * 2, packed), fullgraph=True, dynamic=True)
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        for m in (5, 17):
            torch.testing.assert_close(compiled(rows(m)), op(rows(m) * 2, packed))


def test_export_keeps_m_symbolic_and_runs_in_a_fresh_state(tmp_path) -> None:
    module = ladder.Linear.from_linear(torch.nn.Linear(K, N).half(), "int4", group_size=24)
    batch = torch.export.Dim("m", min=2, max=4096)
    exported = torch.export.export(module, (rows(4),), dynamic_shapes=({0: batch},))
    torch.export.save(exported, tmp_path / "model.pt2")
    runtime_compile.forget()
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for m in (2, 70):
        assert torch.equal(loaded(rows(m)), module(rows(m)))


def test_tracing_of_real_tensors_sees_the_operator() -> None:
    op, packed = problem()
    traced = make_fx(lambda x: op(x, packed))(rows(3))
    assert any(node.target is operator.matmul for node in traced.graph.nodes)


def test_fake_tensors_know_shape_and_type() -> None:
    op, packed = problem()
    with torch._subclasses.FakeTensorMode() as mode:
        y = op.apply(mode.from_tensor(rows(3)), [mode.from_tensor(t) for t in packed.tensors])
    assert (tuple(y.shape), y.dtype, y.device.type) == ((3, N), torch.float32, "cpu")


def test_wrong_weight_is_refused_under_compile_too() -> None:
    op, _ = problem()
    other = ladder.Matmul(N, K, "int4", group_size=36, output="float32")
    packed = other.pack(ladder.quantize(torch.randn(N, K), "int4", group_size=36))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: op(x, packed), backend="eager")
    with pytest.raises(ladder.ShapeError, match="group_size=36"):
        compiled(rows(3))


@pytest.mark.parametrize(
    ("x", "error"),
    [(torch.ones(3, K, dtype=torch.float16), "built for"), (torch.ones(3, K - 1), "last axis")],
)
def test_wrong_rows_are_refused_under_compile_too(x: torch.Tensor, error: str) -> None:
    torch.manual_seed(0)
    layer = ladder.Linear.from_linear(torch.nn.Linear(K, N), "int4", group_size=24)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=dynamo.backend)
    for run in (layer, compiled):
        with torch.no_grad(), pytest.raises(Exception, match=error):
            run(x)


def test_host_cost_is_measured() -> None:
    op, packed = problem()
    kernel = op.compiled_for(torch.device("cpu"))
    cost = host_cost_us(kernel, rows(1), packed, calls=400)
    assert cost.keys() == {"kernel", "direct", "operator"}
    assert all(0 < value < 1000 for value in cost.values())


def test_there_are_gradients_wherever_the_operator_is_called() -> None:
    op, packed = problem()
    x = rows(3).requires_grad_()
    decoded = op(torch.eye(x.shape[-1], dtype=x.dtype), packed)
    torch.library.opcheck(operator.matmul, (x.detach(), packed.tensors, None, None, op.request.text))
    for call in (
        lambda: op(x, packed),
        lambda: operator.matmul(x, packed.tensors, None, None, op.request.text),
    ):
        y = call()
        assert torch.equal(y.detach(), op(x.detach(), packed))
        (found,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(found, decoded.sum(1).to(x.dtype).expand_as(x))
        with torch.no_grad():
            assert not call().requires_grad


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64)])
def test_results_with_gradients_may_be_written(shape: tuple[int, ...]) -> None:
    layer = ladder.Linear.from_linear(torch.nn.Linear(64, 8), weight="int4", group_size=32)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    y += 1
    assert torch.equal(y, layer(x) + 1)
    y.sum().backward()


def test_gradients_of_what_goes_beside_x_are_refused() -> None:
    """Of a bias, of scales, and of x through its quantization to 8 bits."""
    weight = ladder.quantize(torch.randn(8, 64), "int4", group_size=32)
    op = ladder.Matmul(8, 64, "int4", "int8", group_size=32, bias=True, output="float32")
    packed, x, bias, scale = op.pack(weight), torch.randn(3, 64), torch.randn(8), torch.rand(3)
    codes = torch.ones(3, 64, dtype=torch.int8)
    for y in (
        op(x.clone().requires_grad_(), packed, bias),
        op(x, packed, bias.clone().requires_grad_()),
        op(codes, packed, bias, scale.clone().requires_grad_()),
    ):
        with pytest.raises(ladder.LadderError, match="no_grad"):
            y.sum().backward()
    with torch.no_grad():
        assert not op(x, packed, bias.requires_grad_()).requires_grad


def test_a_weight_that_was_used_can_be_copied_and_pickled() -> None:
    op, packed = problem()
    y = op(rows(3), packed)
    for copied in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert copied.tensors[0].data_ptr() != packed.tensors[0].data_ptr()
        assert torch.equal(op(rows(3), copied), y)


def test_a_bound_call_knows_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way that GPUs take, here with a CPU's kernels."""
    op, packed = problem()
    expected = op(rows(6), packed)
    kernel = op.compiled_for(torch.device("cpu"))
    monkeypatch.setattr(kernel, "_on_cpu", False)
    call = kernel._bound(packed.foreign, packed.device)
    wide = torch.zeros(6, K + 8, dtype=torch.float16)
    wide[:, :K] = rows(6)
    shifted = torch.zeros(6 * K + 1, dtype=torch.float16)[1:].view(6, K).copy_(rows(6))
    for x in (rows(6), wide[:, :K], shifted, rows(6).t().contiguous().t()):
        assert torch.equal(call(x), expected)
    for shape in ((2, 3, K), (6, 1, K), (1, 2, 3, K)):
        y = call(rows(6).view(shape))
        assert y.is_contiguous()
        assert torch.equal(y, expected.view(*shape[:-1], N))
    assert torch.equal(call(rows(6).view(2, 3, K).transpose(0, 1)), expected.view(2, 3, N).transpose(0, 1))
    assert call(rows(1)[0]).shape == (N,)
    assert call(rows(1)[:0]).shape == (0, N)
    assert call(rows(1).view(1, 1, K)[:, :0]).shape == (1, 0, N)
    with pytest.raises(ladder.DTypeError, match="float32"):
        call(rows(6).float())
    with pytest.raises(ladder.ShapeError, match=f"K={K}"):
        call(torch.zeros(1, K - 8, dtype=torch.float16))
    with pytest.raises(ladder.DeviceError, match="meta"):
        call(rows(6).to("meta"))
