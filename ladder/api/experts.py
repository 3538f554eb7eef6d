"""`GroupedMatmul`: tokens of many experts, each multiplied by its own low-bit weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from ladder.api.lowered import Lowered
from ladder.api.matmul import Facts, Matmul
from ladder.api.problem import gemm_for
from ladder.ir.gemm import Gemm
from ladder.runtime import experts, operator
from ladder.runtime.compile import Request, target_of, usable_device
from ladder.runtime.packed import PackedWeight, check_packed, refuse_layout
from schedules.schedule import Plan
from targets import TileDevice, get_device
from tile_types import QuantizedTensor, TType
from tile_types.arrays import is_torch
from tile_types.errors import positive_number, require_kind, require_options, sequence_of


class GroupedMatmul:
    """``y[t] = epilogue(x[t] · decode(weight[e])ᵀ + bias[e])`` for every token t of expert e.

    Which tokens an expert has is data on the device: a call launches one kernel and does not
    wait, whatever the experts have, nothing included.

    Parameters
    ----------
    E
        Number of experts.
    N, K
        Outputs and inputs of every expert: the extents of its weight matrix.
    weight, activation, output, group_size, zero, bias, epilogue, token_scale, token_group, target, plan
        As in `ladder.Matmul`.
    masked
        How tokens are laid out. False, the contiguous layout: x is ``[T, K]`` with the tokens of
        expert e in rows ``offsets[e]`` to ``offsets[e + 1]``. True: x is ``[E, M, K]`` and expert e
        has the first ``counts[e]`` of its M rows.

    Raises
    ------
    LadderError
        If the types do not go together; see `ladder.Matmul`.

    Examples
    --------
    >>> op = ladder.GroupedMatmul(E=8, N=14336, K=4096, weight="int4", group_size=128)
    >>> packed = op.pack([ladder.quantize(w, "int4", group_size=128) for w in weights])
    >>> y = op(x, packed, offsets)
    """

    def __init__(
        self,
        E: int,
        N: int,
        K: int,
        weight: str | TType,
        activation: str = "float16",
        *,
        masked: bool = False,
        target: str | TileDevice | None = None,
        plan: Plan | None = None,
        **options: Any,
    ) -> None:
        require_options("option of GroupedMatmul", options, type(self).__init__, Matmul.__init__)
        experts = positive_number(E, "E, the number of experts,")
        gemm = replace(gemm_for(N, K, weight, activation, **options), experts=experts, masked=masked)
        self.request = Request(gemm, "" if target is None else get_device(target).name, plan)
        self._facts = Facts.of(self.request)

    @classmethod
    def of(cls, gemm: Gemm) -> Self:
        """Return the operator of a normal form with experts."""
        operator = cls.__new__(cls)
        operator.request = Request(gemm)
        operator._facts = Facts.of(operator.request)
        return operator

    @property
    def gemm(self) -> Gemm:
        """The problem's normal form."""
        return self.request.gemm

    def layout(self, family: str) -> str:
        """Return what a packed weight must be for devices of a family."""
        return self._facts.layouts.get(family, "")

    def __repr__(self) -> str:
        """Return the problem and the target."""
        return f"GroupedMatmul({self.gemm}, target={self.request.device or None!r})"

    def pack(
        self, weights: Sequence[QuantizedTensor], device: torch.device | str | None = None
    ) -> PackedWeight:
        """Bring the quantized matrices ``[N, K]`` of all experts into the kernels' layout.

        Parameters
        ----------
        weights
            What `ladder.quantize` returned, one per expert.
        device
            torch device of the result; by default where the weights are.

        Raises
        ------
        ShapeError
            If there are not E of them, or one is not this operator's.
        DTypeError
            If one is not quantized.
        """
        weights = sequence_of(
            QuantizedTensor, weights, "weights must be a list of what ladder.quantize returned"
        )
        where = None if device is None else usable_device(device)
        if where is None and weights and is_torch(weights[0].storage):
            where = weights[0].storage.device
        held = torch.device("cpu") if where is None else where
        target = get_device(self.request.device or target_of(held))
        return experts.pack_experts(self.gemm, target, [weight.to(held) for weight in weights])

    def __call__(
        self,
        x: torch.Tensor,
        packed: PackedWeight,
        ranges: torch.Tensor,
        bias: torch.Tensor | None = None,
        token_scale: torch.Tensor | None = None,
        *,
        expected: int = 0,
    ) -> torch.Tensor:
        """Multiply.

        Parameters
        ----------
        x
            ``[T, K]``, or ``[E, M, K]`` if masked, of the activation type. ``[S, M, K]`` if it is not: S
            slots of M rows, each of one expert, which suits few rows. For 8-bit activations a
            float x is quantized here, with one scale per row.
        packed
            The weights, from `pack`.
        ranges
            int32 on the device of x: ascending offsets ``[E + 1]`` or, if masked, counts ``[E]``; the experts
            ``[S]`` of slots, where -1, or any other number that is no expert's, is no expert. Offsets need
            not start at 0 nor end at T, and what they say beyond x is ignored.
            Where offsets descend, a CPU raises an error; a GPU, which does not wait for them, gives their
            rows to one of the experts.
        bias
            ``[E, N]`` of the output type.
        token_scale
            float32 ``[T]`` or ``[E, M]``, with ``token_group`` also ``[..., groups]``: scales of an 8-bit x;
            1 if left out.
        expected
            Tokens per expert to choose the kernel for, known on the host; by default the rows of x over
            E. Results do not depend on it.

        Returns
        -------
        The shape of x with N columns, of the output type. Rows that belong to no expert are not written.

        Raises
        ------
        DTypeError, DeviceError, ShapeError, ValueRangeError
            If an argument does not fit.
        """
        require_kind(x, torch.Tensor, "x must be a tensor")
        check_packed(packed)
        layout = self.layout(x.device.type)
        if packed.layout != layout:
            refuse_layout(packed.layout, layout)
        if token_scale is None and self._facts.is_dynamic:
            x, token_scale = operator.with_token_scale(x, self.gemm)
        if operator.needs_dispatch(x) or operator.wants_gradient(x, bias, token_scale):
            return self.apply(x, packed.buffers, ranges, bias, token_scale, expected)
        text = self._facts.text
        return experts.multiply(x, packed.tensors, ranges, bias, token_scale, expected, text)

    def apply(
        self,
        x: torch.Tensor,
        weight: list[torch.Tensor],
        ranges: torch.Tensor,
        bias: torch.Tensor | None = None,
        token_scale: torch.Tensor | None = None,
        expected: int = 0,
    ) -> torch.Tensor:
        """Multiply by the bare tensors of packed weights, through the registered operator."""
        if token_scale is None and self._facts.is_dynamic:
            x, token_scale = operator.with_token_scale(x, self.gemm)
        text = self._facts.text
        return experts.grouped_matmul(x, weight, ranges, bias, token_scale, expected, text)

    def lower(self, target: str | TileDevice | None = None) -> Lowered:
        """Return every stage of the compilation for a target; see `ladder.api.lowered.Lowered`."""
        name = get_device(target).name if target is not None else self.request.device
        return Lowered(Request(self.gemm, name or get_device("cpu").name, self.request.plan))
