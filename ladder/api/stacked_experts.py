"""Experts with stacked weights, as transformers' models have them, on `ladder.GroupedMatmul`.

Every class that transformers' ``use_experts_implementation`` decorates says how its weights lie; the gate's
function stays the class's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch

from ladder.api.grouped_linear import GroupedLinear, mixture
from ladder.api.linear import LINEAR_OPTIONS, quantized_matrix
from tile_types import QuantizedTensor
from tile_types.errors import LadderError

GATED, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
"""Names of stacked weights ``[E, N, K]`` (or ``[E, K, N]``, transposed): gates and ups in one, ups, downs."""

HOME = "quantized"
"""Where experts hold their layers: transformers, saving, would take apart what has the weights' names."""


def is_experts(module: torch.nn.Module) -> bool:
    """Tell experts with stacked weights that say how these lie."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "num_experts", DOWN))


def stacks(module: torch.nn.Module) -> tuple[str, str]:
    """Return the names of the two weights of experts."""
    return (GATED if module.has_gate else UP), DOWN


def number_of(module: torch.nn.Module) -> int:
    """Return how many experts there are."""
    return int(module.num_experts)  # type: ignore[arg-type]


def as_matrix(module: torch.nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Return a stacked weight as one matrix ``[E * N, K]``."""
    return (weight.transpose(1, 2) if module.is_transposed else weight).flatten(0, 1)


def layers_from(
    module: torch.nn.Module, weights: Mapping[str, QuantizedTensor], **options: Any
) -> dict[str, GroupedLinear]:
    """Build the layers of experts whose weights are quantized.

    module: Experts.
    weights: `stacks` -> matrix ``[E * N, K]``.
    **options: For `GroupedLinear`.
    Raises LadderError if one of the two weights is missing: experts are quantized as a whole.
    """
    missing = [name for name in stacks(module) if name not in weights]
    if missing:
        raise LadderError(f"the experts' {missing[0]} is not quantized, the other weight is: quantize both")
    experts = number_of(module)
    return {name: GroupedLinear.from_stack(weights[name], experts, **options) for name in stacks(module)}


def quantized_layers(module: torch.nn.Module, weight: str, **options: Any) -> dict[str, GroupedLinear]:
    """Quantize the weights of experts, which are left as they are; ``options`` as in `Linear.from_linear`."""
    owner = getattr(module, DOWN)
    kept = {name: options.pop(name) for name in LINEAR_OPTIONS if name in options}
    weights = {
        name: quantized_matrix(as_matrix(module, getattr(module, name)), weight, **options)
        for name in stacks(module)
    }
    return layers_from(module, weights, dtype=owner.dtype, device=owner.device, **kept)


def install(module: torch.nn.Module, layers: Mapping[str, GroupedLinear]) -> None:
    """Put layers in place of the stacked weights of experts, so that its products run on Ladder's kernels."""
    for name in stacks(module):
        setattr(module, name, None)
    setattr(module, HOME, torch.nn.ModuleDict(layers))
    module.forward = MethodType(forward, module)


def forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts ``[T, H]``.

    hidden_states: ``[T, H]``.
    top_k_index, top_k_weights: ``[T, k]``: experts of each token, and their weights. Numbers from E on are no
        expert (of this rank).
    """
    up, down = (_with_bias(self, name) for name in stacks(self))
    gate = self._apply_gate if self.has_gate else self.act_fn
    experts = int(self.num_experts)
    return mixture(hidden_states, top_k_index, top_k_weights, up, gate, down, experts)


def _with_bias(module: Any, name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a layer with the bias, and the norm behind, that its module keeps."""
    layer = getattr(module, HOME)[name]

    def call(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = layer(x, offsets)
        if module.has_bias:
            at = torch.searchsorted(offsets[1:], torch.arange(len(x), device=x.device), right=True)
            rows = rows + getattr(module, f"{name}_bias")[at.clamp(max=module.num_experts - 1)]
        behind = name == DOWN and getattr(module, "has_post_expert_norm", False)  # not in 5.17
        return module.post_expert_norm(rows) if behind else rows

    return call
