"""`GroupedLinear`: the quantized linear layers of many experts, for tokens in the order of their experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ladder.api.experts import GroupedMatmul
from ladder.api.linear import Linear
from ladder.api.linear_modules import form_of, on_meta
from ladder.runtime.operator import autocast_type
from ladder.runtime.packed import PackedWeight
from tile_types import QuantizedTensor
from tile_types.errors import LadderError, ShapeError
from tile_types.shards import ROWS, shard


class Stack(GroupedMatmul):
    """`GroupedMatmul` of matrices that lie below each other in one ``[E * N, K]``."""

    biased: Stack
    """The same product with a bias; it takes the same packed weights."""

    def pack(self, weights: Any, device: torch.device | str | None = None) -> PackedWeight:
        """Pack the matrix of all experts."""
        experts = self.gemm.experts
        return super().pack([shard(weights, ROWS, expert, experts) for expert in range(experts)], device)


class GroupedLinear(Linear):
    """``y[t] = x[t] · W[e]ᵀ + b[e]`` for every token t of expert e, the weights in a low-bit type.

    It stores and moves its weight as `Linear` does: one matrix ``[E * N, K]``, expert below expert.

    Parameters
    ----------
    experts
        E.
    in_features, out_features, bias, **options
        As in `Linear`, of each expert; the bias is ``[E, N]``.
    """

    def __init__(
        self, experts: int, in_features: int, out_features: int, bias: bool = False, **options: Any
    ) -> None:
        object.__setattr__(self, "experts", experts)  # the operator is built by the base's constructor
        super().__init__(in_features, out_features, bias, **options)
        self.experts = experts
        if self.bias is not None:
            vectors = self.bias.new_zeros(experts, out_features)
            self.bias = torch.nn.Parameter(vectors, requires_grad=False)

    @classmethod
    def from_stack(
        cls, weight: QuantizedTensor, experts: int, bias: torch.Tensor | None = None, **options: Any
    ) -> GroupedLinear:
        """Build the layers of a quantized matrix ``[E * N, K]`` and a bias ``[E, N]``.

        Raises
        ------
        ShapeError
            If the matrix is not that of so many experts, or its columns have an order of their own.
        """
        rows, columns = weight.shape
        if rows % experts or weight.columns is not None:
            raise ShapeError(f"{weight.type_name} [{rows}, {columns}] is no matrix of {experts} experts")
        module = cls(experts, columns, rows // experts, bias is not None, **form_of(weight), **options)
        module._fill(weight, bias)
        return module

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``[T, N]`` for ``x[T, K]``, rows ``offsets[e]`` to ``offsets[e + 1]`` being expert e's.

        For ``x[S, M, K]`` the offsets are the experts ``[S]`` of slots instead. Rows that belong to no expert
        are not written. A layer without a bias of its own takes one ``[E, N]``.
        """
        if self._packed is None:
            return on_meta(self, x)
        low = autocast_type(x)
        x = x if low is None else x.to(self.dtype)
        matmul: Any = self._matmul
        if bias is not None:
            matmul = matmul.biased
        given = offsets, self.bias if bias is None else bias
        bare = self._bare(x)
        result: torch.Tensor = (
            matmul(x, self._packed, *given) if bare is None else matmul.apply(x, bare, *given)
        )
        return result if low is None else result.to(low)

    def shard(self, *_: Any, **__: Any) -> None:
        """Refuse: `ladder.integrations.distributed.shard_experts` cuts experts' matrices.

        Raises
        ------
        LadderError
            Always.
        """
        raise LadderError("experts are cut by ladder.integrations.distributed.shard_experts")

    def _operator(self, dtype: torch.dtype, bias: bool | None = None) -> Any:
        gemm = replace(super()._operator(dtype, bias).gemm, experts=self.experts)
        operator = Stack.of(gemm)
        operator.biased = Stack.of(replace(gemm, bias=True))
        return operator


def mixture(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    gate: Callable[[torch.Tensor], torch.Tensor],
    down: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    experts: int = 0,
) -> torch.Tensor:
    """Return the weighted sum of what each row's experts make of it ``[T, H]``.

    x: ``[T, H]``.
    ids, weights: ``[T, k]``: the experts of each row, and their weights. Numbers below 0 and from E on are
        no expert here.
    up, down: Take rows and offsets, or slots of one row and their experts, as `GroupedLinear` does.
    gate: What lies between them.
    experts: E; by default that of ``down``.
    """
    experts = experts or int(down.experts)  # type: ignore[attr-defined]
    flat, weights = ids.reshape(-1), weights.reshape(-1)
    if len(x) == 1:  # each row is the token: nothing is sorted
        own = flat.to(torch.int32)
        rows = gate(up(x.expand(len(flat), -1)[:, None], own))
        rows = down(rows.to(x.dtype), own)[:, 0]
        here = (flat >= 0) & (flat < experts)  # products do not write rows of no expert
        return (torch.where(here[:, None], rows, 0) * weights[:, None]).sum(0, True).to(x.dtype)
    flat, order = torch.sort(flat, stable=True)
    at, bounds = (torch.arange(extent, device=ids.device) for extent in (flat.numel(), experts + 1))
    offsets = torch.searchsorted(flat, bounds.to(ids.dtype)).to(torch.int32)
    rows = gate(up(x[order // ids.shape[-1]], offsets))
    rows = down(rows.to(x.dtype), offsets)
    here = (at >= offsets[0]) & (at < offsets[-1])
    rows = torch.where(here[:, None], rows, 0) * weights[order][:, None]
    rows = torch.empty_like(rows).index_copy_(0, order, rows)
    return rows.view(*ids.shape, rows.shape[-1]).sum(1).to(x.dtype)
