"""What plans do beyond operators: weights side by side, packed halves, caches in place, fewer launches."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chain_targets import run_chain
from torch import Tensor, nn

import ladder
from ladder.api.model import Compiled
from ladder.frontend import joined
from ladder.frontend.torch_fx import import_fx
from ladder.ir import GraphBuilder
from ladder.ir.gemm import Gemm
from ladder.partition import partition
from ladder.partition.partition import MOST_INPUTS
from ladder.rewrite import simplify
from ladder.runtime.model.arguments import CallArguments
from ladder.runtime.model.build import Built, build_model
from ladder.runtime.model.prepared import updated_inputs
from targets import TileDevice, get_device

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_schedule")


class Gated(nn.Module):
    """Three products of one value, one of them with a result that is returned."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 128, bias), nn.Linear(64, 256, bias)
        self.down = nn.Linear(64, 48, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = torch.nn.functional.silu(self.gate(x)), self.up(x)
        return gate * up[..., 128:], self.down(x)


def traced(model: Any, *arguments: Tensor) -> tuple[torch.fx.GraphModule, list[Any]]:
    """Return the graph that capture hands over, and its arguments."""
    got: list[Any] = []

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        got.append((module, examples))
        return module.forward

    captured = ladder.compile(model, backend=backend)
    with torch.no_grad():
        captured(*arguments)
    (found,) = got
    return found


def built(model: Any, *arguments: Tensor, **options: Any) -> tuple[Built, list[Any]]:
    module, examples = traced(model, *arguments)
    with torch.no_grad():
        return build_model(import_fx(module, examples, join=True, **options), CPU), examples


def kinds(plan: Built) -> list[str]:
    return [step.part.kind for step in plan.plan.steps]


def error(result: Any, expected: Any) -> float:
    pairs = zip(result, expected, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weight", ["", "int4", "int8"])
def test_weights_lie_side_by_side(bias: bool, weight: str) -> None:
    torch.manual_seed(0)
    model: Any = Gated(bias).eval()
    if weight == "int4":
        model = ladder.quantize(model, "int4", group_size=32)
    elif weight:
        model = ladder.quantize(model, weight, activation="int8")
    x = torch.randn(3, 2, 64)
    plan, examples = built(model, x)
    multiplies = ("gemm",) if weight else ("product", "rows")
    assert sum(kind in multiplies for kind in kinds(plan)) == 2
    with torch.no_grad():
        assert error(plan.executable(*examples), model(x)) < 1e-6


@pytest.mark.parametrize("zero", ["integer", "float"])
def test_numbers_of_different_widths_lie_side_by_side(zero: str) -> None:
    """Scales and real zero points of one matrix are exact in float16, those of the other are not."""
    torch.manual_seed(0)
    model: Any = ladder.quantize(Gated(False).eval(), "uint4", group_size=32, zero=zero)
    wide = model.up.canonical
    scale, points = torch.as_tensor(wide.scale).float() * 1.001, torch.as_tensor(wide.zero)
    points = points if zero == "integer" else points.float() * 1.001
    model.up.set_weight(replace(wide, scale=scale, scale_type="float32", zero=points))
    sizes = {array.shape for layer in (model.gate, model.up) for array in layer._packed.tensors[1:3]}
    assert len(sizes) > 1
    x = torch.randn(3, 2, 64)
    plan, examples = built(model, x)
    assert sum(kind == "gemm" for kind in kinds(plan)) == 2
    with torch.no_grad():
        assert error(plan.executable(*examples), model(x)) < 1e-6


def test_changed_weights_are_joined_again() -> None:
    torch.manual_seed(0)
    model, x = Gated(True).eval(), torch.randn(2, 64)
    plan, examples = built(model, x)
    with torch.no_grad():
        plan.executable(*examples)
        kept = plan.executable.bound.joined
        assert kept is not None
        first = kept.arrays
        plan.executable(*examples)
        assert all(a is b for a, b in zip(first, kept.arrays, strict=True))
        model.gate.weight.mul_(2)
        model.up.bias.data = model.up.bias + 1
        assert error(plan.executable(*examples), model(x)) < 1e-6


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_few_tokens_by_packed_halves(
    dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = Gated(True).eval().to(dtype), torch.randn(3, 64).to(dtype)
    plans = []
    for most in (4, 2):
        monkeypatch.setattr(joined, "serves_dense", lambda device, gemm, rows, most=most: rows <= most)
        plans.append(built(model, x, packed_for="cpu"))
    few, many = plans
    assert kinds(few[0]).count("gemm") == 2
    assert kinds(many[0]).count("gemm") == 0
    with torch.no_grad():
        results = [plan.executable(*examples) for plan, examples in (few, many)]
        expected = model.double()(x.double())
    assert error(results[0], expected) < bound
    assert error(results[1], expected) < bound


class StoredByInputs(nn.Module):
    """Linear layers as GPT-2 stores them, ``[inputs, outputs]``, two of them of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.bias = nn.Parameter(torch.randn(64, 256)), nn.Parameter(torch.randn(256))
        self.other = nn.Parameter(torch.randn(64, 128))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.nn.functional.gelu(torch.addmm(self.bias, x, self.wide), approximate="tanh")
        return wide[:, :128] * torch.mm(x, self.other)


@pytest.mark.parametrize("ours", [True, False])
def test_weights_stored_by_inputs(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function behind a product of ours is its epilogue; torch's product takes the bias."""
    torch.manual_seed(0)
    model, x = StoredByInputs().eval().bfloat16(), torch.randn(40, 64).bfloat16()
    asked = []

    def serves(device: TileDevice, gemm: Gemm, rows: int) -> bool:
        asked.append((gemm.n, gemm.bias, gemm.epilogue, rows))
        return ours

    monkeypatch.setattr(joined, "serves_dense", serves)
    plan, examples = built(model, x, packed_for="cpu")
    assert sorted(asked)[-1] == (256, True, ("gelu_tanh",), 40)
    executors = [executor for _, executor, _, _ in plan.plan.table()]
    assert any("gelu_tanh" in executor for executor in executors) == ours
    assert ("torch.addmm" in executors) != ours
    with torch.no_grad():
        assert error(plan.executable(*examples), [model.double()(x.double())]) < 6e-3


def step(x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """Write two caches of ``[1, 2, 8, 16]`` and read them."""
    heads = torch.mm(x[:2], x.t()).view(1, -1, 4, 16).transpose(1, 2)
    keys.index_copy_(2, position, heads[:, :2].sigmoid())
    values.index_copy_(2, position, heads[:, 2:])
    return (keys * values).sum(2)


def cached() -> tuple[torch.fx.GraphModule, list[Tensor]]:
    x, position = torch.randn(64, 4), torch.tensor([3, 6])
    return torch.fx.symbolic_trace(step), [x, *torch.randn(2, 1, 2, 8, 16), position]


def test_caches_are_written_in_place() -> None:
    torch.manual_seed(0)
    module, examples = cached()
    plan = build_model(import_fx(module, examples), CPU)
    assert len(plan.plan.in_place) == 2
    assert not any("index" in executor for _, executor, _, _ in plan.plan.table())
    twins = [value.clone() for value in examples]
    for number in range(3):
        position = torch.tensor([number, 7 - number])
        (result,) = plan.executable(*examples[:3], position)
        assert torch.allclose(result, step(*twins[:3], position), atol=1e-6)
        assert all(torch.allclose(a, b) for a, b in zip(examples, twins, strict=True))


def test_a_cache_that_lies_otherwise() -> None:
    torch.manual_seed(0)
    module, examples = cached()
    plan = build_model(import_fx(module, examples), CPU)
    wide = torch.randn(1, 2, 8, 20)[..., 3:19]
    twin = wide.clone()
    (result,) = plan.executable(examples[0], wide, *examples[2:])
    expected = step(examples[0], twin, *(value.clone() for value in examples[2:]))
    assert torch.allclose(result, expected, atol=1e-6)
    assert torch.allclose(wide, twin)


def test_a_cache_that_is_read_as_it_was() -> None:
    """The old values are a result as well: the cache may not be overwritten before."""

    def both(x: Tensor, keys: Tensor, position: Tensor) -> Tensor:
        before = keys * 2
        keys.index_copy_(1, position, x)
        return before + keys

    x, keys, position = torch.randn(4, 2, 8), torch.randn(4, 6, 8), torch.tensor([1, 5])
    plan = build_model(import_fx(torch.fx.symbolic_trace(both), [x, keys, position]), CPU)
    assert not plan.plan.in_place
    twin = keys.clone()
    (result,) = plan.executable(x, keys, position)
    assert torch.equal(result, both(x, twin, position))
    assert torch.equal(keys, twin)


def test_chains_of_one_value_are_one_launch() -> None:
    program = import_fx(*cached())
    graph = simplify(program.graph)
    parts = {
        wide: partition(graph, (), updated_inputs(program, graph), side_by_side=wide)
        for wide in (False, True)
    }
    counts = {wide: sum(part.kind == "chain" for part in found) for wide, found in parts.items()}
    assert counts[True] == counts[False] - 1 == 2


def test_linear_layers_of_tensors_are_products_of_matrices() -> None:
    """torch takes some apart into batches of products."""
    layer = nn.Linear(8, 64, bias=False)
    x = torch.randn(2, 4, 3, 2).transpose(1, 2)
    module, examples = traced(lambda value: layer(value.reshape(2, 3, 8)), x)
    plan = build_model(import_fx(module, examples), CPU)
    (shape,) = {
        len(step.part.graph.tile(step.part.outputs[0]).shape)
        for step in plan.plan.steps
        if step.part.kind in ("product", "rows")
    }
    assert shape == 2


class Cached(nn.Module):
    """A layer of attention with a cache of 16 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        self.register_buffer("keys", torch.zeros(1, 4, 16, 16))
        self.register_buffer("values", torch.zeros(1, 4, 16, 16))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = (part.view(1, -1, 4, 16).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        mask = torch.arange(16) <= position[:, None]
        mixed = torch.nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        return x + mixed.transpose(1, 2).reshape(x.shape)


def test_a_step_with_a_cache_is_one_graph() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([Cached(), Cached()])
    twin = copy.deepcopy(model)

    def run(layers: nn.ModuleList, x: Tensor, position: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x, position)
        return x

    fast = ladder.compile(run)
    with torch.no_grad():
        for at in range(5):
            x, position = torch.randn(1, 1, 64), torch.tensor([at])
            assert error([fast(model, x, position)], [run(twin, x, position)]) < 1e-6
            assert error(model.buffers(), twin.buffers()) < 1e-6
    assert fast.outcome == "whole"
    assert isinstance(fast, Compiled)
    assert fast.refused == []
    assert len(fast.models[0].plan.in_place) == 4


def test_an_index_out_of_range_is_told() -> None:
    """Where an index may be bad for the first time, the graph still ends before what was changed."""

    def run(cache: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        cache.index_copy_(0, first, x)
        cache.index_copy_(0, second, x)
        return cache + 1

    fast, cache, x = ladder.compile(run), torch.zeros(4, 2), torch.ones(1, 2)
    with torch.no_grad():
        for number in range(3):
            fast(cache, x, torch.tensor([number]), torch.tensor([1]))
        for first, second in ((0, 9), (9, 0)):
            mine, eager = torch.zeros(4, 2), torch.zeros(4, 2)
            for call, target in ((fast, mine), (run, eager)):
                with pytest.raises(IndexError):
                    call(target, x, torch.tensor([first]), torch.tensor([second]))
            assert torch.equal(mine, eager)


def test_arguments_that_grow_into_what_is_written_are_noticed() -> None:
    """Plans of open sizes get tensors that begin where they did and end elsewhere."""
    memory = torch.zeros(40)
    arguments, written = CallArguments([1]), memory[10:20]
    for count, expected in ((10, True), (10, True), (15, False), (10, True)):
        assert arguments.look([memory[:count], written]).apart is expected
    assert arguments.look([memory[:5], memory[10:20]]).apart
    assert not arguments.look([memory[12:14], written]).apart


def test_arguments_that_stay_are_told_from_those_that_move() -> None:
    """A generation lasts while tensors that stayed lie where they lay; those that move are named."""
    weight, state = torch.zeros(4), torch.zeros(4)
    arguments = CallArguments([1])
    seen = [arguments.look([weight, state, torch.zeros(4), 5]).generation for _ in range(4)]
    assert arguments.moving == {2}
    assert arguments.look([weight, state, torch.zeros(4), 5]).generation == seen[-1]
    weight.data = torch.ones(4)
    assert arguments.look([weight, state, torch.zeros(4), 5]).generation == seen[-1] + 1
    assert arguments.look([weight, torch.zeros(4), torch.zeros(4), 5]).generation == seen[-1] + 2
    assert 1 not in arguments.moving
    assert not arguments.look([state, state, torch.zeros(4), 5]).apart


def test_loaded_plans_refuse_arguments_in_what_they_write(tmp_path: Path) -> None:
    def run(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.add_(x)
        return cache * 2 + x

    cache, x = torch.zeros(8), torch.ones(8)
    with torch.no_grad():
        loaded = ladder.load(ladder.compile(run).export(tmp_path / "model.ladder", cache, x))
        before = cache._version
        assert torch.equal(loaded(cache, x), torch.full((8,), 3.0))
        assert torch.equal(cache, torch.ones(8))
        assert cache._version == before + 1
        with pytest.raises(ladder.AliasingError, match="share memory"):
            loaded(cache, cache)


@pytest.mark.parametrize("target", ["rocm/gfx942", "rocm/gfx1100"])
def test_torch_computes_float64_on_amd(target: str) -> None:
    """What stands around it in float32 stays ours, as all of it does on NVIDIA's GPUs."""
    g = GraphBuilder("g")
    x = g.input("x", "float32", (8, 64))
    wide = g.add("exp", g.add("convert", g.add("square", x), type="float64"))
    graph = g.finish(g.add("exp", g.add("convert", g.add("log", wide), type="float32")))
    parts = partition(graph, device=get_device(target))
    for part in parts:
        inside = {part.graph.tile(value).ttype.name for node in part.graph.nodes for value in node.values}
        assert part.kind == ("torch" if "float64" in inside else "chain")
        assert part.kind == "chain" or part.reason == "no kernel of chains has float64"
    assert {part.kind for part in parts} == {"torch", "chain"}
    assert [part.kind for part in partition(graph, device=get_device("cuda/sm_90a"))] == ["chain"]


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
def test_counters_are_one_launch(target: str) -> None:
    """Caches count their tokens, each in a tensor of one element: those chains go together."""

    count, g = MOST_INPUTS + 2, GraphBuilder("counters")
    counters = {f"x{at}": torch.tensor([7 * at]) for at in range(count)}
    added = [
        g.add("add", g.input(name, "int64", (1,)), g.add("constant", value=at + 1, type="int64"))
        for at, name in enumerate(counters)
    ]
    graph = g.finish(*added)
    together = partition(graph, side_by_side=True)
    assert [len(part.inputs) for part in together] == [MOST_INPUTS, 2]
    assert len(partition(graph)) == count
    found: dict[str, Tensor] = {}
    for part in together:
        results = run_chain(part.graph, [counters[name] for name in part.inputs], target)
        found |= dict(zip(part.outputs, results, strict=True))
    assert [int(found[value]) for value in graph.outputs] == [8 * at + 1 for at in range(count)]


class Decoded(nn.Module):
    """What an embedding gives, added to a product of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(16, 64), nn.Linear(64, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        return h + self.linear(torch.sin(h))


@pytest.mark.parametrize("activation", ["float32", "int8", "fp8_e4m3"])
def test_what_is_added_to_a_single_row_is_its_bias(activation: str) -> None:
    """Whatever axes of one element it has, and whatever scales the row has beside it."""
    types: dict[str, Any] = {"activation": activation} if activation != "float32" else {}
    weight = "fp8_e4m3" if activation == "fp8_e4m3" else "int4"
    model = ladder.quantize_(Decoded(), weight, group_size=32, **types)
    fast, ids = ladder.compile(model), torch.tensor([[3]])
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(ids), model(ids), rtol=1e-5, atol=1e-5)
    (built,) = fast.models
    assert [step.part.gemm.bias for step in built.plan.steps if step.part.gemm is not None] == [True]
    assert "raised" not in fast.explain()


def test_bools_are_numbers_of_a_range() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(False, 3, True)

    fast = ladder.compile(program)
    x = torch.randn(2, 3)
    assert torch.equal(fast(x), program(x))
    assert not fast.refused


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
def test_norms_of_heads_and_their_turns_are_one_launch(target: str) -> None:
    """A norm whose reader needs halves of its row apart joins it once that is whole.

    Chains of few rows go together; what lies between two of them and runs before the second stays before it.
    """
    device, width = get_device(target), 16
    g = GraphBuilder("model")
    hidden, weight = g.input("hidden", "float16", (1, 32)), g.input("weight", "float16", (6 * width, 32))
    product = g.add("matmul", hidden, weight, transpose_b=True, type="float16")
    x, at = g.add("reshape", product, shape=(1, 1, 6 * width)), g.input("at", "int64", (1,))
    cos, sin = (g.input(name, "float16", (1, 1, width)) for name in ("cos", "sin"))
    cache = g.input("cache", "float16", (1, 2, 8, width))

    def turned(begin: int, count: int) -> str:
        rows = g.add("slice", x, begin=(0, 0, begin * width), shape=(1, 1, count * width))
        wide = g.add("convert", g.add("reshape", rows, shape=(1, 1, count, width)), type="float32")
        root = g.add("rsqrt", g.add("reduce_sum", g.add("square", wide), axis=3))
        normed = g.add("convert", g.add("mul", wide, root), type="float16")
        rows = g.add("reshape", normed, shape=(1, count, 1, width))
        high, low = (
            g.add("slice", rows, begin=(0, 0, 0, b), shape=(1, count, 1, width // 2)) for b in (width // 2, 0)
        )
        apart = g.add("concat", g.add("neg", high), low, axis=3)
        return g.add("add", g.add("mul", rows, cos), g.add("mul", apart, sin))

    queries = turned(0, 4)
    following = g.add("add", at, g.add("constant", value=1, type="int64"))
    put = g.add("put", cache, following, turned(4, 2), axis=2)
    graph = simplify(g.finish(queries, put), device)
    parts = partition(graph, (), {put: "cache"}, side_by_side=True, device=device)
    first, second = (part for part in parts if part.kind == "chain")
    assert first.outputs == (following,)
    assert {*second.outputs} == {*graph.outputs}
