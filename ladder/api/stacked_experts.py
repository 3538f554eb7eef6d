"""Experts with stacked weights, as transformers' models have them, on `ladder.GroupedMatmul`.

Every class that transformers' ``use_experts_implementation`` decorates says how its weights lie; the others
are rows of `FORMS`. The gate's function stays the class's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch

from ladder.api.calibration import quantized_matrix
from ladder.api.grouped_linear import GroupedLinear, mixture
from ladder.api.linear import LINEAR_OPTIONS
from tile_types import QuantizedTensor
from tile_types.errors import LadderError

GATED, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
"""Names of stacked weights ``[E, N, K]`` (or ``[E, K, N]``, transposed): gates and ups in one, ups, downs."""

HOME = "quantized"
"""Where experts hold their layers: transformers, saving, would take apart what has the weights' names."""


@dataclass(frozen=True)
class Form:
    """How a class of experts holds its weights.

    stacks: Their paths below the module: ``[E, N, K]``, or one matrix ``[E * N, K]``.
    transposed: Those whose matrices are ``[K, N]``.
    forward: The module's method once layers have taken the weights' places.
    experts: The attribute that says how many experts compute; what a stack has behind them is not read.
    """

    stacks: tuple[str, ...]
    transposed: tuple[str, ...]
    forward: Callable[..., torch.Tensor]
    experts: str = "num_experts"


def form(module: torch.nn.Module) -> Form | None:
    """Return how experts hold their weights; None if a module is none, or does not say."""
    if all(hasattr(module, name) for name in ("has_gate", "is_transposed", "num_experts", DOWN)):
        names = ((GATED if module.has_gate else UP), DOWN)
        return Form(names, names if module.is_transposed else (), forward)
    return FORMS.get((type(module).__module__, type(module).__name__))


def is_experts(module: torch.nn.Module) -> bool:
    """Tell experts with stacked weights of a known form."""
    return form(module) is not None


def stacks(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the paths of the weights of experts."""
    found = form(module)
    return () if found is None else found.stacks


def held(module: torch.nn.Module, stack: str) -> Any:
    """Return a stacked weight; None where a layer has its place."""
    return attrgetter(stack)(module)


def holder(module: torch.nn.Module, stack: str) -> torch.nn.Module:
    """Return the module whose own parameter a stacked weight is."""
    return module.get_submodule(stack.rpartition(".")[0])


def home_of(stack: str) -> str:
    """Return the name of a stacked weight's layer."""
    return stack.replace(".", "_")


def number_of(module: torch.nn.Module) -> int:
    """Return how many experts there are."""
    found = form(module)
    assert found is not None
    return int(getattr(module, found.experts))


def as_matrix(module: torch.nn.Module, stack: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a stacked weight as one matrix ``[E * N, K]``."""
    found = form(module)
    assert found is not None
    each = weight[: number_of(module)] if weight.dim() == 3 else weight
    each = each.reshape(number_of(module), -1, weight.shape[-1])
    return (each.transpose(1, 2) if stack in found.transposed else each).flatten(0, 1)


def layers_from(
    module: torch.nn.Module, weights: Mapping[str, QuantizedTensor], **options: Any
) -> dict[str, GroupedLinear]:
    """Build the layers of experts whose weights are quantized.

    module: Experts.
    weights: `stacks` -> matrix ``[E * N, K]``.
    **options: For `GroupedLinear`.
    Raises LadderError if one of the weights is missing: experts are quantized as a whole.
    """
    missing = [name for name in stacks(module) if name not in weights]
    if missing:
        raise LadderError(f"the experts' {missing[0]} is not quantized, another weight is: quantize all")
    experts = number_of(module)
    return {name: GroupedLinear.from_stack(weights[name], experts, **options) for name in stacks(module)}


def quantized_layers(module: torch.nn.Module, weight: str, **options: Any) -> dict[str, GroupedLinear]:
    """Quantize the weights of experts, which are left as they are; ``options`` as in `Linear.from_linear`."""
    owner = held(module, stacks(module)[-1])
    kept = {name: options.pop(name) for name in LINEAR_OPTIONS if name in options}
    weights = {
        name: quantized_matrix(as_matrix(module, name, held(module, name)), weight, **options)
        for name in stacks(module)
    }
    return layers_from(module, weights, dtype=owner.dtype, device=owner.device, **kept)


def install(module: torch.nn.Module, layers: Mapping[str, GroupedLinear]) -> None:
    """Put layers in place of the stacked weights of experts, so that its products run on Ladder's kernels."""
    found = form(module)
    assert found is not None
    for name in found.stacks:
        setattr(holder(module, name), name.rpartition(".")[2], None)
    setattr(module, HOME, torch.nn.ModuleDict({home_of(name): layer for name, layer in layers.items()}))
    module.forward = partial(found.forward, module)  # a method would be pickled as the class's own


def uninstall(module: torch.nn.Module, like: torch.nn.Module, dtype: str) -> None:
    """Invert `install`, with dequantized weights.

    like: A module of the same class with its weights, which tell the shapes.
    dtype: Name of their type.
    """
    found = form(module)
    assert found is not None
    for name in found.stacks:
        matrix = getattr(module, HOME)[home_of(name)].canonical.dequantize(dtype)
        each = matrix.view(number_of(module), -1, matrix.shape[1])
        each = each.transpose(1, 2) if name in found.transposed else each
        whole = each.new_zeros(held(like, name).shape)
        whole.view(-1)[: each.numel()] = each.reshape(-1)
        weight = torch.nn.Parameter(whole, requires_grad=False)
        setattr(holder(module, name), name.rpartition(".")[2], weight)
    delattr(module, HOME)
    del module.forward  # the class's own


def forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts ``[T, H]``.

    hidden_states: ``[T, H]``.
    top_k_index, top_k_weights: ``[T, k]``: experts of each token, and their weights. Numbers from E on are no
        expert (of this rank).
    """
    up, down = (_with_bias(self, name) for name in stacks(self))
    gate = self._apply_gate if stacks(self)[0] == GATED else self.act_fn
    return mixture(hidden_states, top_k_index, top_k_weights, up, gate, down, number_of(self))


def _with_bias(module: Any, name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a layer with the bias, and the norm behind, that its module keeps."""
    layer = getattr(module, HOME)[name]

    def call(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        bias = getattr(module, f"{name}_bias") if getattr(module, "has_bias", False) else None
        rows: torch.Tensor = layer(x, offsets, bias)
        behind = name == DOWN and getattr(module, "has_post_expert_norm", False)  # not in 5.17
        return module.post_expert_norm(rows) if behind else rows

    return call


def forward_all(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return what each expert makes of its rows (Llama 4).

    hidden_states: ``[E * T, H]``, as many rows for each expert, expert after expert.
    """
    layers, experts = getattr(self, HOME), number_of(self)
    rows = hidden_states.reshape(-1, self.hidden_size)
    offsets = torch.arange(experts + 1, dtype=torch.int32, device=rows.device) * (len(rows) // experts)
    gate, up = layers[GATED](rows, offsets).chunk(2, dim=-1)
    y: torch.Tensor = layers[DOWN](up * self.act_fn(gate), offsets)
    return y


def forward_apart(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, whose gates are matrices of their own (DBRX).

    hidden_states: ``[B, T, H]``; the others as `forward` takes them.
    """
    layers, rows = getattr(self, HOME), hidden_states.reshape(-1, self.hidden_size)

    def gated(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.mlp.activation_fn(layers["mlp_w1"](rows, offsets))
        product = product * layers["mlp_v1"](rows, offsets)
        return product

    down = layers["mlp_w2"]
    y = mixture(rows, top_k_index, top_k_weights, gated, torch.nn.Identity(), down, number_of(self))
    return y.view(hidden_states.shape[0], -1, self.hidden_size)


def forward_sorted(self: Any, inputs: torch.Tensor, expert_size: list[int]) -> torch.Tensor:
    """Return the products of rows in the order of their experts (JetMoe).

    inputs: ``[T, K]``.
    expert_size: Rows of each expert.
    """
    offsets = torch.tensor([0, *accumulate(expert_size)], dtype=torch.int32, device=inputs.device)
    y: torch.Tensor = getattr(self, HOME)["weight"](inputs, offsets)
    return y


def forward_or_same(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, of which those from E on give the token (LongCat)."""

    def gated(product: torch.Tensor) -> torch.Tensor:
        gate, up = product.chunk(2, dim=-1)
        made: torch.Tensor = self.act_fn(gate) * up
        return made

    layers, experts = getattr(self, HOME), number_of(self)
    y = mixture(hidden_states, top_k_index, top_k_weights, layers[GATED], gated, layers[DOWN], experts)
    same = torch.where(top_k_index >= experts, top_k_weights, 0).sum(-1, keepdim=True)
    return y + (hidden_states * same).to(y.dtype)


def forward_shared(self: Any, hidden_states: torch.Tensor, gammas: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of what all experts make of all tokens (Inkling).

    hidden_states: ``[..., H]``.
    gammas: ``[..., E]``.
    """
    layers, experts = getattr(self, HOME), number_of(self)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1]).repeat(experts, 1)
    offsets = torch.arange(experts + 1, dtype=torch.int32, device=rows.device) * (len(rows) // experts)
    product = self.act_fn(layers["gate_proj"](rows, offsets)) * layers[UP](rows, offsets)
    product = product * gammas.reshape(-1, experts).t().reshape(-1, 1)
    down = layers[DOWN](product.to(rows.dtype), offsets).float().unflatten(0, (experts, -1))
    y: torch.Tensor = down.sum(0).to(rows.dtype).view(hidden_states.shape)
    return y


_MODELS = "transformers.models"
FORMS = {
    (f"{_MODELS}.step3p7.modeling_step3p7", "Step3p7Experts"): Form((GATED, DOWN), (), forward),
    (f"{_MODELS}.llama4.modeling_llama4", "Llama4TextExperts"): Form(
        (GATED, DOWN), (GATED, DOWN), forward_all
    ),
    (f"{_MODELS}.dbrx.modeling_dbrx", "DbrxExperts"): Form(
        ("mlp.w1", "mlp.v1", "mlp.w2"), ("mlp.w2",), forward_apart
    ),
    (f"{_MODELS}.longcat_flash.modeling_longcat_flash", "LongcatFlashExperts"): Form(
        (GATED, DOWN), (), forward_or_same, "num_routed_experts"
    ),
    (f"{_MODELS}.inkling.modeling_inkling", "InklingSharedExperts"): Form(
        ("gate_proj", UP, DOWN), (), forward_shared, "n_shared_experts"
    ),
    (f"{_MODELS}.jetmoe.modeling_jetmoe", "JetMoeParallelExperts"): Form(("weight",), (), forward_sorted),
}
"""Module and name of a class that does not say how its weights lie -> its form; nothing of it is imported."""
