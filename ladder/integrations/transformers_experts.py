"""Experts of transformers: stacked weights, quantized, on `ladder.GroupedMatmul`.

Every class that transformers' ``use_experts_implementation`` decorates says how its weights lie; the gate's
function stays the class's own.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from types import MethodType
from typing import Any

import torch

from ladder.api.grouped_linear import GroupedLinear, mixture
from tile_types import QuantizedTensor
from tile_types.errors import LadderError
from tile_types.shards import joined

GATED, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
"""Names of stacked weights ``[E, N, K]`` (or ``[E, K, N]``, transposed): gates and ups in one, ups, downs."""

MEMBERS = {
    GATED: (("w1", "w3"), ("gate_proj", "up_proj")),
    UP: (("up_proj",),),
    DOWN: (("w2",), ("down_proj",)),
}
"""Stacked weight -> names that checkpoints give its parts in a folder per expert, by family of models."""


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


def install(module: torch.nn.Module, weights: dict[str, QuantizedTensor], **options: Any) -> None:
    """Put quantized weights in place of a module's own, and its products on Ladder's kernels.

    Parameters
    ----------
    module
        Experts whose weights were taken away (None).
    weights
        `stacks` -> matrix ``[E * N, K]``.
    **options
        For `GroupedLinear`.

    Raises
    ------
    LadderError
        If one of the two weights is missing: experts are quantized as a whole.
    """
    missing = [name for name in stacks(module) if name not in weights]
    if missing:
        raise LadderError(f"the experts' {missing[0]} is not quantized, the other weight is: quantize both")
    made = {
        name: GroupedLinear.from_stack(weights[name], number_of(module), **options) for name in stacks(module)
    }
    setattr(module, HOME, torch.nn.ModuleDict(made))
    module.forward = MethodType(forward, module)


def forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts ``[T, H]``.

    Parameters
    ----------
    hidden_states
        ``[T, H]``.
    top_k_index, top_k_weights
        ``[T, k]``: experts of each token, and their weights. Numbers from E on are no expert (of this rank).
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
        behind = name == DOWN and module.has_post_expert_norm
        return module.post_expert_norm(rows) if behind else rows

    return call


def sources(stack: str, experts: int, prefix: str, known: Container[str]) -> list[str]:
    """Return the names that a checkpoint has a stacked weight by: one, or one per part of each expert.

    Parameters
    ----------
    stack
        `GATED`, `UP` or `DOWN`.
    experts
        E.
    prefix
        Name of the module.
    known
        Names in the checkpoint.

    Returns
    -------
    Empty if it has none, or not all of them.
    """
    whole = [
        name
        for name in (
            f"{prefix}{path}" for path in (f".{stack}", f".{stack}.weight", f".{HOME}.{stack}.weight")
        )
        if name in known
    ]
    families = [
        [f"{prefix}.{expert}.{member}.weight" for expert in range(experts) for member in members]
        for members in MEMBERS[stack]
    ]
    complete = (names for names in families if all(name in known for name in names))
    return whole[:1] or next(complete, [])


def read(names: Iterable[str], load: Callable[[str], Any]) -> QuantizedTensor:
    """Return the matrix ``[E * N, K]`` of a stacked weight from its `sources`."""
    loaded = [load(name) for name in names]
    return joined([matrix for part in loaded for matrix in (part if isinstance(part, tuple) else (part,))])
