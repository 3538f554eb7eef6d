"""Quantized layers under what torch does with modules: other buffers for a call, refused moves, copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ladder
from ladder.api.grouped_linear import GroupedLinear


def layer(seed: int, **options: object) -> ladder.Linear:
    linear = nn.Linear(64, 40)
    torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(seed))
    return ladder.Linear.from_linear(linear, "int8", group_size=16, **options)


X = torch.randn(5, 64, generator=torch.Generator().manual_seed(9))


def test_no_buffer_is_of_a_type_that_collectives_refuse() -> None:
    for weight, activation in (("int8", None), ("int8", "int8"), ("nf4", None), ("fp8_e4m3", None)):
        made = ladder.Linear.from_linear(nn.Linear(64, 48), weight, activation=activation)
        refused = {torch.uint16, torch.uint32, torch.uint64}
        assert not refused & {buffer.dtype for buffer in made.buffers()}


def test_a_call_with_other_buffers_takes_them() -> None:
    one, other = layer(0), layer(1)
    state = dict(other.named_parameters()) | dict(other.named_buffers())
    before = one(X)
    assert torch.equal(functional_call(one, state, (X,)), other(X))
    assert torch.equal(one(X), before)


def test_a_call_of_experts_with_other_buffers_takes_them() -> None:
    matrices = [torch.randn(2 * 16, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    stacks = [ladder.quantize(matrix, "int8", group_size=16) for matrix in matrices]
    one, other = (GroupedLinear.from_stack(stack, 2, dtype=torch.float32) for stack in stacks)
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    state = dict(other.named_buffers())
    assert torch.equal(functional_call(one, state, (X, offsets)), other(X, offsets))


def test_an_ensemble_is_one_call_by_vmap() -> None:
    layers = [layer(seed) for seed in range(3)]
    parameters, buffers = stack_module_state(layers)

    def call(mine: dict, own: dict) -> torch.Tensor:
        return functional_call(layers[0], (mine, own), (X,))

    wanted = torch.stack([each(X) for each in layers])
    assert torch.equal(vmap(call)(parameters, buffers), wanted)


def test_buffers_that_are_written_are_what_a_call_computes_with() -> None:
    """Eagerly and in a plan; the canonical weight is then no more that of the layer."""
    one, other = layer(0), layer(1)
    fast = ladder.compile(one)
    with torch.no_grad():
        fast(X), fast(X)
        for mine, theirs in zip((*one.buffers(), one.bias), (*other.buffers(), other.bias), strict=True):
            mine.copy_(theirs)
        assert torch.equal(one(X), other(X))
        assert torch.equal(fast(X), other(X))
        for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert torch.equal(copied(X), other(X))
            assert copied.canonical is None
    with pytest.raises(ladder.LadderError, match="written since"):
        one.half()
    same = layer(0)
    with torch.no_grad():
        for mine in same.buffers():
            mine.copy_(mine.clone())
    assert same.half()(X.half()).dtype == torch.half


AVERAGES = {"SWA": None, "EMA": get_ema_multi_avg_fn(0.99)}


@pytest.mark.parametrize("way", AVERAGES)
@pytest.mark.parametrize("options", [{}, {"keep_canonical": False}])
def test_averages_of_words_are_refused(options: dict, way: str) -> None:
    """Words have no average; those of another layer come with their sums."""
    model = nn.Sequential(layer(0, **options))
    averaged = AveragedModel(model, use_buffers=True, multi_avg_fn=AVERAGES[way])
    for _ in range(3):
        averaged.update_parameters(model)
    uses = [
        lambda: averaged(X),
        averaged.state_dict,
        averaged.half,
        lambda: copy.deepcopy(averaged),
        lambda: pickle.dumps(averaged.module),
    ]
    for use in uses:
        with pytest.raises(ladder.LadderError, match="average parameters only"):
            use()
    averaged.module[0].set_weight(layer(0).canonical)
    assert torch.equal(averaged(X), model(X))


@pytest.mark.parametrize("options", [{}, {"keep_canonical": False}])
@pytest.mark.parametrize("weight", ["int8", "int4"])
def test_loading_copies_unless_it_is_told_to_assign(options: dict, weight: str) -> None:
    one, other = (
        ladder.Linear.from_linear(nn.Linear(64, 48), weight, group_size=16, **options) for _ in range(2)
    )
    state = one.state_dict()
    other.load_state_dict(state)
    before, kept = one(X), {name: each.clone() for name, each in state.items()}
    assert torch.equal(other(X), before)
    for each in state.values():
        each.zero_()
    assert torch.equal(other(X), before)
    again = other.state_dict()
    assert all(torch.equal(again[name], each) for name, each in kept.items())


class Beside(nn.Module):
    """Layers whose results are added up."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(seed) for seed in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(each(x) for each in self.layers)


@pytest.mark.parametrize("count", [1, 9])
def test_compiled_graphs_refuse_averages_of_words(count: int) -> None:
    """Those that were compiled before, too; words of another weight that come with their sums are taken."""
    model = Beside(count)
    averaged = AveragedModel(model, use_buffers=True)
    ways = {
        "plan": ladder.compile,
        "torch": lambda given: torch.compile(given, backend="aot_eager"),
        "ladder": lambda given: torch.compile(given, backend="ladder"),
        "exported": lambda given: torch.export.export(given.module, (X,)).module(),
    }
    with torch.no_grad():
        before = {name: way(averaged) for name, way in ways.items()}
        for name, compiled in before.items():
            for _ in range(2):
                assert torch.allclose(compiled(X), model(X), atol=1e-5), name
        for _ in range(3):
            averaged.update_parameters(model)
        torch.compiler.reset()
        uses = [*before.values(), *(lambda x, way=way: way(averaged)(x) for way in ways.values())]
        for use in uses:
            for _ in range(2):
                with pytest.raises(ladder.LadderError, match="average parameters only"):
                    use(X)
        for mine, given in zip(averaged.module.buffers(), model.buffers(), strict=True):
            mine.copy_(given)
        assert torch.allclose(before["plan"](X), model(X), atol=1e-5)


def test_averages_of_parameters_leave_words() -> None:
    model = nn.Sequential(layer(0))
    averaged = AveragedModel(model)
    for _ in range(3):
        averaged.update_parameters(model)
    assert torch.equal(copy.deepcopy(averaged)(X), model(X))


def test_layers_of_inference_mode_hold_plain_sums() -> None:
    with torch.inference_mode():
        made = layer(0)
    assert not made.packed_sums.is_inference()
    copied = copy.deepcopy(made)
    assert [each.shape for each in copied.buffers()] == [each.shape for each in made.buffers()]
    assert torch.equal(copied(X), made(X))


@pytest.mark.parametrize("options", [{}, {"keep_canonical": False}])
def test_a_refused_move_leaves_the_layer_as_it_is(options: dict) -> None:
    made = layer(0, **options)
    wanted = made(X)
    with pytest.raises(ladder.DTypeError, match="float64"):
        made.double()
    if options:
        with pytest.raises(ladder.LadderError, match="not kept"):
            made.half()
    assert torch.equal(made(X), wanted)
    assert made.bias.dtype == made.dtype == torch.float32


def test_pruning_is_refused() -> None:
    made = layer(0)
    wanted = made(X)
    with pytest.raises(ladder.LadderError, match="set_weight"):
        prune.l1_unstructured(made, "weight", amount=0.3)
    assert torch.equal(made(X), wanted)
    assert not made._forward_pre_hooks
    assert prune.l1_unstructured(made, "bias", amount=0.3)(X).shape == wanted.shape


def test_every_key_of_a_state_dict_names_an_attribute() -> None:
    """As `torch.distributed.checkpoint` looks them up."""
    for made in (layer(0), layer(0, keep_canonical=False)):
        for key, value in made.state_dict().items():
            held = made
            for name in key.split("."):
                held = getattr(held, name)
            assert key == "weight.storage" or torch.equal(held, value), key  # a method of all tensors
    with pytest.raises(AttributeError, match="zero"):
        layer(0).weight.zero  # noqa: B018  it has none
