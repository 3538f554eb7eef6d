"""`ScaledMatmul`: products whose weights and activations both are block types, scaled by the cores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch

from ladder.api.lowered import STAGES, require_stage, stage_of
from ladder.ir.scaled import FORMATS, ScaledGemm
from ladder.runtime.build import Kernel
from ladder.runtime.scaled import ScaledOperand, kernel_for, multiply, operand_of, quantize_rows, served
from schedules.scaled import ScaledCost
from schedules.scaled_choice import AnyScaled, choose, predict
from targets import TileDevice, get_device
from tile_types import QuantizedTensor, TType, get_type
from tile_types.errors import ConversionError, DTypeError, ShapeError, require_kind, require_name
from tile_types.quantized import check_quantized

QUANTIZABLE = (torch.float16, torch.bfloat16, torch.float32)
"""Types of x that are quantized when an operator is called."""

DEFAULTS = {
    "group_size": (None, -1), "zero": (None, "none"), "epilogue": ((), []), "token_scale": (None, True),
    "token_group": (None,), "plan": (None,), "batch_invariant": (False,),
}  # fmt: skip
"""Options of `ladder.Matmul` that block-scaled products lack, and the values that ask for nothing."""


class ScaledMatmul:
    """``y[..., N] = x[..., K] · weight[N, K]ᵀ + bias[N]``, both operands codes with a scale per block.

    `ladder.Matmul` makes one where its activation is a block type.

    Parameters
    ----------
    N, K
        Outputs and inputs.
    weight, activation
        ``"mxfp8_e4m3"`` or ``"mxfp8_e5m2"`` with either, ``"mxfp4"`` or ``"nvfp4"`` with itself; on
        gfx950 any two of the types that begin with mx, of 6 bits too.
    output
        Result type, bfloat16 by default.
    bias
        Whether calls pass a bias.
    target
        Device, ``"cuda/sm_100a"`` or ``"rocm/gfx950"``; by default the one that x is on.
    options
        Others of `ladder.Matmul`, which must ask for nothing.

    Raises
    ------
    LadderError
        A subclass says what cannot be.

    Examples
    --------
    >>> op = ladder.Matmul(N=4096, K=4096, weight="nvfp4", activation="nvfp4", target="cuda/sm_100a")
    >>> packed = op.pack(ladder.quantize(weight, "nvfp4"))
    >>> result = ladder.simulate(op, x, packed)
    """

    def __init__(
        self,
        N: int,
        K: int,
        weight: str | TType,
        activation: str,
        *,
        output: str | None = None,
        bias: bool = False,
        target: str | TileDevice | None = None,
        **options: Any,
    ) -> None:
        for name, value in options.items():
            require_name("option of Matmul", name, {*DEFAULTS, "output", "bias", "target"})
            if value not in DEFAULTS[name]:
                raise ConversionError(f"block-scaled products of {activation} take no {name}={value!r}")
        self.form = ScaledGemm(N, K, get_type(weight).name, activation, output or "bfloat16", bias)
        self.target = "" if target is None else get_device(target).name

    def __repr__(self) -> str:
        """Return the problem and the target."""
        return f"ScaledMatmul({self.form}, target={self.target or None!r})"

    def pack(self, weight: QuantizedTensor, device: torch.device | str | None = None) -> ScaledOperand:
        """Bring a quantized matrix into the form that kernels take: codes as stored, scales in their order.

        Raises
        ------
        ShapeError, DTypeError
            If its extents or type are not this operator's.
        """
        check_quantized(weight)
        if tuple(weight.shape) != (self.form.n, self.form.k):
            raise ShapeError(
                f"the weight is {list(weight.shape)}, this operator needs {[self.form.n, self.form.k]}"
            )
        packed = operand_of(self.form, self.form.weight, weight)
        if device is None and packed.device.type == "cpu" and torch.cuda.is_available():
            device = "cuda"
        return packed if device is None else packed.to(device)

    def operand(self, x: torch.Tensor | QuantizedTensor) -> ScaledOperand:
        """Return activations as kernels take them: rows ``[..., K]`` of floats are quantized by torch.

        Raises
        ------
        DTypeError, ShapeError
            If x is neither floats nor a matrix of the activation's type, or has another K.
        """
        if isinstance(x, QuantizedTensor):
            return operand_of(self.form, self.form.activation, x)
        if x.dtype not in QUANTIZABLE:
            raise DTypeError(f"x must be {', '.join(map(str, QUANTIZABLE))} or quantized, got {x.dtype}")
        if not x.ndim or x.shape[-1] != self.form.k:
            raise ShapeError(f"x must be [..., {self.form.k}], got {list(x.shape)}")
        return quantize_rows(self.form, x.detach().reshape(prod(x.shape[:-1]), self.form.k))

    def __call__(
        self, x: torch.Tensor | QuantizedTensor, packed: ScaledOperand, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply.

        Parameters
        ----------
        x
            ``[..., K]`` of floats, which are quantized here (infinity and NaN make their rows NaN), or a
            quantized ``[M, K]``.
        packed
            The weight, from `pack`.
        bias
            ``[N]`` of the output type.

        Returns
        -------
        ``[..., N]`` of the output type.

        Raises
        ------
        DTypeError, DeviceError, ShapeError
            If an argument does not fit, or there are no such cores where they lie.
        """
        require_kind(packed, ScaledOperand, "packed must be what this operator's pack(weight) returned")
        y = multiply(self.form, self.operand(x), packed, bias)
        return y.reshape(*x.shape[:-1], self.form.n)

    def lower(self, target: str | TileDevice | None = None) -> ScaledLowered:
        """Return what the compiler makes of it for a target."""
        name = get_device(target).name if target is not None else self.target or "cuda/sm_100a"
        return ScaledLowered(self.form, name)

    def explain(self, target: str | TileDevice | None = None) -> str:
        """Return, as text, which schedule serves which M, and what it is predicted to take."""
        return self.lower(target).explain()


@dataclass(frozen=True)
class ScaledLowered:
    """A block-scaled product on one target.

    plan: Schedule that serves every M, instead of the policy's.
    """

    form: ScaledGemm
    target: str
    plan: AnyScaled | None = None

    @cached_property
    def device(self) -> TileDevice:
        """The target."""
        return get_device(self.target)

    @cached_property
    def _served(self) -> dict[int, tuple[AnyScaled, Kernel]]:
        """M -> its schedule and kernel, where that was compiled."""
        return {}

    def schedule(self, m: int = 1) -> AnyScaled:
        """Return the schedule that serves M = ``m``: once its kernel is compiled, one that does not spill."""
        known = self._served[m][0] if m in self._served else self.plan
        return known or choose(self.form, self.device, m)

    def predicted(self, m: int = 1) -> ScaledCost:
        """Return what a call with M = ``m`` is predicted to take."""
        return predict(self.form, self.device, self.schedule(m), m)

    def kernel(self, m: int = 1) -> Kernel:
        """Return the compiled kernel that serves M = ``m``."""
        if self.plan is not None:
            return kernel_for(self.form, self.device, self.plan)
        if m not in self._served:
            self._served[m] = served(self.form, self.device, m)
        return self._served[m][1]

    def source(self, stage: str, m: int = 1) -> str:
        """Return one stage as text: ``"schedule"``, ``"tir"``, ``"cuda"``, ``"ptx"`` or ``"sass"``.

        Raises UnknownNameError if there is no such stage.
        Raises MissingToolError, CompilerError if the kernel cannot be compiled or taken apart.
        """
        require_stage(stage, self.device, STAGES[self.device.kind][1:])
        if stage == "schedule":
            return str(self.schedule(m))
        return stage_of(self.kernel(m), stage, self.device)

    def explain(self) -> str:
        """Return which schedule serves some M, and what it is predicted to take."""
        lines = [str(self.form), f"on {self.target}: {self.device.title}"]
        for m in (1, 16, 64, 256, 1024, 4096):
            cost = self.predicted(m)
            lines.append(f"M = {m}: {self.schedule(m)}")
            lines.append(f"  predicted: {cost.seconds * 1e6:.1f} µs, bound by {cost.bound}")
        return "\n".join(lines)


def is_scaled(activation: Any) -> bool:
    """Whether activations of a type are multiplied with their block scales."""
    return isinstance(activation, str) and activation in FORMATS
