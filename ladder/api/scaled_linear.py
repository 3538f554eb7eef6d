"""`ScaledLinear`: a linear layer whose weights and activations cores multiply with their block scales."""

from __future__ import annotations

from typing import Any

import torch

from ladder.api.scaled import ScaledMatmul
from ladder.ir.scaled import ScaledGemm
from ladder.runtime.operator import autocast_type
from ladder.runtime.scaled import ScaledOperand
from tile_types import QuantizedTensor
from tile_types.errors import ConversionError, DTypeError

NOTHING = {"keep_canonical": (True, False), "batch_invariant": (False,)}
"""Options of `ladder.Linear` that ask for nothing here, and the values for which that is so."""


class ScaledLinear(torch.nn.Module):
    """``y = x · Wᵀ + b``, x quantized to blocks in each call.

    `ladder.Linear.from_linear` and `ladder.quantize_` make one where the activation is a block type. Codes,
    scales and the factor of the weight are buffers, and so part of ``state_dict``.

    Parameters
    ----------
    weight
        ``[N, K]`` of a block type that `ScaledMatmul` takes.
    bias
        ``[N]``, or None.
    activation
        Block type of x.
    dtype
        Of x, the result and the bias; by default the bias's, else torch's default.
    device
        Where the layer lies.
    options
        Others of `ladder.Linear`, which must ask for nothing.

    Raises
    ------
    LadderError
        If the types do not go together.
    """

    bias: torch.nn.Parameter | None
    codes: torch.Tensor
    scales: torch.Tensor
    factor: torch.Tensor

    def __init__(
        self,
        weight: QuantizedTensor,
        bias: torch.Tensor | None = None,
        *,
        activation: str,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for name, value in options.items():
            if value not in NOTHING.get(name, ()):
                raise ConversionError(f"linear layers of {activation} take no {name}={value!r}")
        self.out_features, self.in_features = weight.shape
        given = torch.get_default_dtype() if bias is None else bias.dtype
        self.dtype = given if dtype is None else dtype
        self._weight, self._activation = weight.type_name, activation
        self._matmul = self._operator(bias is not None)
        packed = self._matmul.pack(weight, device or "cpu")
        for name in ("codes", "scales", "factor"):
            self.register_buffer(name, getattr(packed, name))
        vector = None if bias is None else bias.detach().to(device or "cpu", self.dtype)
        self.bias = None if vector is None else torch.nn.Parameter(vector, requires_grad=False)

    def _operator(self, bias: bool) -> ScaledMatmul:
        output = str(self.dtype).removeprefix("torch.")
        return ScaledMatmul(
            self.out_features, self.in_features, self._weight, self._activation, output=output, bias=bias
        )

    @property
    def problem(self) -> ScaledGemm:
        """The product that it computes."""
        return self._matmul.form

    @property
    def packed(self) -> ScaledOperand:
        """The weight as kernels take it."""
        shape = self.out_features, self.in_features
        return ScaledOperand(self._weight, shape, self.codes, self.scales, self.factor)

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the weight as kernels read it."""
        return self.packed.nbytes

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out_features]`` for ``[..., in_features]``, of the module's dtype or autocast's."""
        x = input
        low = autocast_type(x)
        if x.dtype != self.dtype and low is None:
            raise DTypeError(f"this layer computes in {self.dtype}, x is {x.dtype}")
        y = self._matmul(x, self.packed, self.bias)
        return y if low is None else y.to(low)

    def extra_repr(self) -> str:
        """Return what the module is."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" weight={self._weight!r}, activation={self._activation!r}, dtype={self.dtype}"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> ScaledLinear:
        """Follow ``.to``, ``.cuda``, ``.half``: codes, scales and factor move but never change type."""
        kept = {name: buffer.dtype for name, buffer in self.named_buffers()}
        factor = self.factor
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.factor.dtype != kept["factor"]:
            self.factor = factor.to(self.factor.device)
        probe = fn(torch.empty(0, dtype=self.dtype, device=factor.device))
        if probe.dtype != self.dtype:
            self.dtype = probe.dtype
            self._matmul = self._operator(self.bias is not None)
        return self
