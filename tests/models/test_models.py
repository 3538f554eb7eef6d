"""Whole models: captured as one graph, compiled, and equal to eager within the bound of their precision."""

from __future__ import annotations

from collections.abc import Callable

import model_zoo as zoo
import pytest
import torch
from torch import Tensor, nn

import ladder
from ladder.api.model import Compiled

IDS = torch.arange(18).reshape(2, 9) * 5 % 89 + 1
MASK = (torch.arange(9)[None] < torch.tensor([[9], [6]])).long()
PHOTO = torch.linspace(-1, 1, 2 * 3 * 64 * 64).sin().reshape(2, 3, 64, 64)

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "llama": (zoo.Llama, (IDS,)),
    "bloom": (zoo.Bloom, (IDS,)),
    "bert": (lambda: zoo.Bert(layers=1), (IDS, MASK)),
    "vit": (lambda: zoo.ViT(layers=1), (PHOTO[..., :32, :32],)),
    "resnet": (lambda: zoo.ResNet((1, 1), 8, 10), (PHOTO,)),
    "shufflenet": (lambda: zoo.ShuffleNet((2,), (8, 16, 48), 10), (PHOTO,)),
    "efficientnet": (
        lambda: zoo.EfficientNet([(1, 3, 1, 8, 1), (6, 5, 2, 16, 1)], 8, 32, 10),
        (PHOTO[..., :32, :32],),
    ),
    "conformer": (lambda: zoo.Conformer(layers=1), (PHOTO[:, 0, :24, :16],)),
    "gpt2": (zoo.GPT2, (IDS,)),
}

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative Frobenius norm of the difference to float64-free eager results, by the model's type."""


pytestmark = pytest.mark.usefixtures("one_schedule")


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model with statistics that training would have left."""
    torch.manual_seed(0)
    model = make().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


def tensors(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for part in result for t in tensors(part)]


def error(result: object, expected: object) -> float:
    pairs = zip(tensors(result), tensors(expected), strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def compiled(model: nn.Module, *arguments: object) -> Compiled:
    """Compile a model and check that it is one graph; its first call is the recording."""
    fast = ladder.compile(model)
    fast(*arguments)
    assert isinstance(fast, Compiled)
    assert fast.outcome == "whole"
    assert fast.refused == []
    assert len(fast.models) == 1
    return fast


@pytest.mark.parametrize("name", MODELS)
def test_models_are_one_graph_and_right(name: str) -> None:
    make, arguments = MODELS[name]
    model = built(make)
    with torch.no_grad():
        fast = compiled(model, *arguments)
        expected = model(*arguments)
        for _ in range(2):
            assert error(fast(*arguments), expected) < BOUNDS[torch.float32]
    executors = {step.executor for step in fast.models[0].plan.steps}
    assert not any("aten" in executor for executor in executors), executors


def test_half_precision() -> None:
    model = built(zoo.Llama).bfloat16()
    with torch.no_grad():
        fast = compiled(model, IDS)
        exact = built(zoo.Llama)(IDS)
        assert error(fast(IDS), exact) < 1.1 * error(model(IDS), exact)


@pytest.mark.parametrize("options", [{"group_size": 32}, {"weight": "int8", "activation": "int8"}])
def test_quantized_models(options: dict[str, object]) -> None:
    model = ladder.quantize(built(lambda: zoo.Llama(layers=1)), **options)
    with torch.no_grad():
        fast = compiled(model, IDS)
        assert error(fast(IDS), model(IDS)) < 1e-2
        kinds = [step.part.kind for step in fast.models[0].plan.steps]
    assert kinds.count("gemm") == 8
    assert kinds.count("product") == 0
    assert sum("silu" in step.executor for step in fast.models[0].plan.steps) == 1


def test_decoding_with_a_growing_cache() -> None:
    model = built(zoo.GPT2)
    with torch.no_grad():
        fast = ladder.compile(model)
        whole, _ = model(IDS)
        _, past = fast(IDS[:, :6])
        for at in range(6, 8):
            step, past = fast(IDS[:, at : at + 1], past)
            assert error(step[:, -1], whole[:, at]) < BOUNDS[torch.float32]
        assert isinstance(fast, Compiled)
        assert fast.refused == []


def test_a_cache_that_is_changed_in_place() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(4, 8))

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            self.keys.index_copy_(0, at, x)
            return (self.keys * 2).sum(0)

    torch.manual_seed(0)
    model, twin = Step(), Step()
    with torch.no_grad():
        fast = ladder.compile(model)
        for number in range(4):
            x, at = torch.randn(1, 8), torch.tensor([number])
            assert torch.allclose(fast(x, at), twin(x, at))
            assert torch.equal(model.keys, twin.keys)


def test_training_is_left_to_torch() -> None:
    model = built(lambda: zoo.BertLayer(16, 2))
    fast = ladder.compile(model)
    x, mask = torch.randn(1, 3, 16), torch.zeros(1, 1, 1, 3)
    for _ in range(2):
        fast(x, mask).sum().backward()
    assert model.query.weight.grad is not None
    assert "gradients" in fast.refused[0]


def test_memory_is_shared() -> None:
    with torch.no_grad():
        fast = compiled(built(lambda: zoo.Llama(layers=4)), IDS)
        fast(IDS)
    memory = fast.models[0].executable.memory()
    assert 0 < memory["arena"] < memory["without sharing"] / 3


def test_results_outlive_the_next_call() -> None:
    with torch.no_grad():
        fast = compiled(built(lambda: zoo.BertLayer(16, 2)), torch.randn(1, 3, 16), torch.zeros(1, 1, 1, 3))
        first = fast(torch.ones(1, 3, 16), torch.zeros(1, 1, 1, 3))
        kept = first.clone()
        fast(torch.randn(1, 3, 16), torch.zeros(1, 1, 1, 3))
    assert torch.equal(first, kept)


def test_torch_compile_takes_the_backend() -> None:
    from ladder.integrations.dynamo import backend, compiler

    model = built(lambda: zoo.BertLayer(16, 2))
    x, mask = torch.randn(1, 3, 16), torch.zeros(1, 1, 1, 3)
    before = len(compiler.built)
    with torch.no_grad():
        fast = torch.compile(model, backend=backend, fullgraph=True)
        assert error(fast(x, mask), model(x, mask)) < BOUNDS[torch.float32]
    assert len(compiler.built) == before + 1


def test_a_symbolic_batch() -> None:
    """One plan, several batch sizes: the sizes are read off the arguments."""
    from ladder.frontend.torch_fx import import_fx
    from ladder.runtime.model.build import build_model

    model = built(lambda: zoo.ViTBlock(16, 2))
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (torch.randn(3, 5, 16),), dynamic_shapes=({0: batch},))
    places = [node for node in program.graph.nodes if node.op == "placeholder"]
    state = dict(model.named_parameters())
    names = [program.graph_signature.inputs_to_parameters.get(node.name) for node in places]
    with torch.no_grad():
        imported = import_fx(program.graph_module, [node.meta["val"] for node in places])
        assert any(isinstance(extent, str) for extent in imported.graph.inputs[-1].tile.shape)
        run = build_model(imported, torch.device("cpu")).executable
        for count in (2, 3, 7):
            x = torch.randn(count, 5, 16)
            (y,) = run(*(state[name] if name else x for name in names))
            assert error(y, model(x)) < BOUNDS[torch.float32]


def test_the_report_names_every_layer() -> None:
    rules = {"skip": ["lm_head", "nothing"], "overrides": {"*.down_proj": "int8", "*.q_proj": None}}
    model = ladder.quantize(built(lambda: zoo.Llama(layers=1)), weight="int4", group_size=32, **rules)
    report = ladder.quantization(model)
    rows = {row.name: row for row in report.rows}
    assert len(rows) == 9
    assert rows["layers.0.mlp.down_proj"].weight == "int8_g32"
    assert rows["layers.0.mlp.up_proj"].after < rows["layers.0.mlp.up_proj"].before / 3
    assert "skipped" in rows["lm_head"].reason
    assert "overridden" in rows["layers.0.self_attn.q_proj"].reason
    assert "Embedding" in rows["embed_tokens"].reason
    assert report.unused == ("nothing",)
    assert "6 of 9 layers" in str(report)


@pytest.mark.parametrize(("ttype", "bound"), [("float16", 1e-3), ("int8", 1e-2), ("fp8_e4m3", 5e-2)])
def test_keys_and_values_in_small_types(ttype: str, bound: float) -> None:
    torch.manual_seed(0)
    cache = ladder.KVCache(2, 3, 8, 16)
    full = cache.nbytes
    cache.set_type(ttype)
    keys, values = torch.randn(2, 3, 8, 16), torch.randn(2, 3, 8, 16)
    for at in range(8):
        got = cache.append(keys[:, :, at : at + 1], values[:, :, at : at + 1])
    assert error(list(got), [keys, values]) < bound
    assert ttype == "float16" or cache.nbytes < 0.7 * full
    with pytest.raises(ladder.ShapeError, match="holds 8 tokens"):
        cache.append(keys[:, :, :1], values[:, :, :1])


@pytest.mark.parametrize("options", [{"group_size": 32}, {"group_size": 48}, {}])
def test_clipping_never_errs_more(options: dict[str, int]) -> None:
    from ladder.api.quantization import clipped

    torch.manual_seed(0)
    weight = torch.randn(16, 100) ** 3

    def quantized(matrix: Tensor) -> Tensor:
        return torch.as_tensor(ladder.quantize(matrix, "int4", **options).dequantize("float32"))

    before = (quantized(weight) - weight).square().sum()
    after = (quantized(clipped(weight, "int4", **options)) - weight).square().sum()
    assert after < before
