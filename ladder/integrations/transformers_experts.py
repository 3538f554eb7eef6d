"""Experts of transformers: stacked weights, quantized, on `ladder.GroupedMatmul`.

Every class that transformers' ``use_experts_implementation`` decorates says how its weights lie; the gate's
function stays the class's own.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from types import MethodType
from typing import Any

import torch

from ladder.api.grouped_linear import GroupedLinear
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
    experts, chosen = self.num_experts, top_k_index.shape[-1]
    ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
    bounds = torch.arange(experts + 1, device=ids.device, dtype=ids.dtype)
    offsets = torch.searchsorted(ids, bounds).to(torch.int32)
    up, down = (getattr(self, HOME)[name] for name in stacks(self))
    rows = hidden_states[order // chosen]
    real = ids < experts
    rows = _with_bias(self, stacks(self)[0], up(rows, offsets), ids)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _with_bias(self, DOWN, down(rows.to(hidden_states.dtype), offsets), ids)
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    rows = torch.where(real[:, None], rows * top_k_weights.reshape(-1)[order][:, None], 0)
    placed = torch.empty_like(rows).index_copy_(0, order, rows)
    return placed.view(-1, chosen, rows.shape[-1]).sum(1).to(hidden_states.dtype)


def _with_bias(module: Any, name: str, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return rows with the bias of each one's expert; rows of none are 0."""
    experts = module.num_experts
    if module.has_bias:
        rows = rows + getattr(module, f"{name}_bias")[ids.clamp(max=experts - 1)]
    return torch.where((ids < experts)[:, None], rows, 0)


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
