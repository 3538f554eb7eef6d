"""`ladder.simulate` for products whose cores scale blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ladder.simulate.launch import SimulationResult, simulate_launch
from tile_types.arrays import torch_dtype
from tile_types.errors import DeviceError, ShapeError

if TYPE_CHECKING:
    import torch

    from ladder.api.lowered import Lowered
    from ladder.api.scaled import ScaledLowered
    from ladder.runtime.packed import PackedWeight
    from ladder.runtime.scaled import ScaledOperand
    from tile_types import QuantizedTensor

BOUNDS = {"float16": 5e-4, "bfloat16": 3e-3, "float32": 1e-5}
"""Relative Frobenius error by output type: products of codes and scales are exact, sums are float32."""


def simulate_scaled(
    lowered: ScaledLowered | Lowered,
    x: torch.Tensor | QuantizedTensor,
    packed: ScaledOperand | PackedWeight,
    bias: torch.Tensor | None,
    expected: Any,
    cancellation: float,
    options: Mapping[str, Any],
) -> SimulationResult:
    """Execute the kernel that would multiply x, see `ladder.simulate`.

    ``expected`` is the product of the quantized x.
    """
    import torch

    from ladder.api.scaled import ScaledLowered, ScaledMatmul
    from ladder.lower.build import SCALED, resolve
    from ladder.lower.tvm_lock import tvm_lock
    from ladder.runtime.scaled import ScaledOperand, arguments, check_operands
    from ladder.simulate.operator import FAMILIES, judged, numpy_of

    if not isinstance(lowered, ScaledLowered) or not isinstance(packed, ScaledOperand):
        raise ShapeError(f"a weight packed as {type(packed).__name__} is none of {type(lowered).__name__}")
    form = lowered.form
    if isinstance(x, torch.Tensor) and x.device.type != "cpu":
        raise DeviceError(f"the simulator reads tensors on the CPU, x is on {x.device}")
    operator = ScaledMatmul(form.n, form.k, form.weight, form.activation, output=form.output, bias=form.bias)
    operand, weight = operator.operand(x), packed.to("cpu")
    if not operand.shape[0]:
        raise ShapeError(f"x has no rows: {tuple(x.shape)}")
    check_operands(form, operand, weight, bias)
    y = torch.empty((operand.shape[0], form.n), dtype=torch_dtype(form.output))
    arrays = [numpy_of(array) for array in arguments(operand, weight, bias, y)]
    names = ("x", "x_scales", "w", "w_scales", "factor", *(["bias"] if form.bias else []), "y")
    with tvm_lock():
        emit = resolve(SCALED, "target kind", lowered.device.kind)
        function = emit(form, lowered.device, lowered.schedule(operand.shape[0]), "simulated")
    calls = FAMILIES[lowered.device.kind](lowered.device.arch)
    result = simulate_launch(function, arrays, names=names, calls=calls, **options)
    if expected is None:
        return result
    exact = np.asarray(expected, np.float64).reshape(result.y.shape)
    return judged(result, exact, BOUNDS[form.output] * cancellation)
