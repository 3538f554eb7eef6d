"""`simulate`: an operator's kernel for some x and weight, executed on the CPU and compared with float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ladder.simulate.findings import Finding
from ladder.simulate.launch import SimulationResult, simulate_launch
from ladder.simulate.translate import Calls
from tile_types.errors import DeviceError, ShapeError

if TYPE_CHECKING:
    import torch

    from ladder.api.lowered import Lowered
    from ladder.api.matmul import Matmul
    from ladder.runtime.packed import PackedWeight
    from targets import TileDevice

BOUNDS = {
    "float16": 5e-4,
    "bfloat16": 3e-3,
    "fp8_e4m3": 2e-3,
    "fp8_e5m2": 2e-3,
    "fp8_e4m3fnuz": 2e-3,
    "fp8_e5m2fnuz": 2e-3,
    "int8": 1e-5,
}
"""Relative Frobenius error by activation or output type: operands round once, sums are float32."""


def _nvidia(arch: str) -> Calls:
    from ladder.simulate.nvidia import CALLS

    return CALLS


def _amd(arch: str) -> Calls:
    from ladder.simulate.amd import calls_for

    return calls_for(arch)


FAMILIES: Mapping[str, Callable[[str], Calls]] = {"cuda": _nvidia, "rocm": _amd}
"""TVM target kind -> the semantics of what kernels for an architecture call."""


def simulate(
    op: Matmul | Lowered,
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None = None,
    token_scale: torch.Tensor | None = None,
    *,
    target: str | TileDevice | None = None,
    expected: Any = None,
    order: str = "together",
    seed: int = 0,
    blocks: int | None = None,
) -> SimulationResult:
    """Execute the kernel that would multiply x by a weight on a GPU, on the CPU, lane by lane.

    Nothing is compiled for the device and none is needed: the emitted TIR runs.

    Parameters
    ----------
    op
        An operator (with a GPU target, or ``target``), or what its `lower` returned.
    x
        ``[..., K]`` of the activation type, on the CPU. Floats for an 8-bit operator are quantized first.
    packed
        The weight, from ``op.pack(weight)``, on the CPU.
    bias, token_scale
        As in a call of ``op``.
    target
        Device to emit for, e.g. ``"cuda/sm_90a"``; by default the operator's.
    expected
        ``[..., N]`` in float64 to compare with: an error beyond `BOUNDS` becomes a finding.
    order, seed, blocks
        See `simulate_launch`.

    Returns
    -------
    `SimulationResult`; ``y`` is a numpy array ``[M, N]``.

    Raises
    ------
    DeviceError
        If the target is no GPU.
    ShapeError, DTypeError
        If x, the weight, bias or token scale do not fit the operator.
    UnknownCallError
        If the kernel calls something that the simulator has no semantics for.

    Examples
    --------
    >>> op = ladder.Matmul(N=256, K=512, weight="int4", group_size=128, target="cuda/sm_90a")
    >>> result = ladder.simulate(op, x, op.pack(w4))
    >>> assert not result.findings, result.report()
    """
    lowered = op.lower(target) if hasattr(op, "lower") else op
    launch = _Entry(lowered, {"order": order, "seed": seed, "blocks": blocks})
    y = launch.call(x, packed, bias, token_scale)
    assert launch.result is not None
    return _compared(launch.result, y, expected, lowered.request.gemm)


class _Entry:
    """Stands for a compiled kernel: called with tensors, it simulates."""

    def __init__(self, lowered: Lowered, options: dict[str, Any]) -> None:
        self.lowered, self.options = lowered, options
        self.gemm, self.device = lowered.request.gemm, lowered.request.target
        if self.device.kind not in FAMILIES:
            raise DeviceError(
                f"the simulator executes kernels of NVIDIA and AMD GPUs, not those of {self.device.name};"
                " make the operator for one, e.g. target='cuda/sm_90a'"
            )
        self.result: SimulationResult | None = None
        self.m = 0
        self.names: tuple[str, ...] = ("x", "y")

    def call(self, x: torch.Tensor, packed: PackedWeight, bias: Any, token_scale: Any) -> torch.Tensor:
        """Check, pad and quantize as a call of the operator does, then simulate."""
        from ladder.runtime.compile import family_of
        from ladder.runtime.kernel import CompiledGemm
        from ladder.runtime.tokens import EIGHT_BIT, quantize_tokens

        if x.device.type != "cpu":
            raise DeviceError(f"the simulator reads tensors on the CPU, x is on {x.device}")
        self.m = prod(x.shape[:-1])
        if not self.m:
            raise ShapeError(f"x has no rows: {tuple(x.shape)}")
        gemm = self.gemm
        if gemm.token_scale and gemm.activation in EIGHT_BIT and token_scale is None:
            x, token_scale = quantize_tokens(x, gemm.activation, gemm.token_group)
        extras = (("token_scale", token_scale), ("bias", bias))
        given = [name for name, extra in extras if extra is not None]
        self.names = ("x", *packed.arrays, *given, "y")
        compiled = CompiledGemm(gemm, family_of(self.device), [self.m], [self], ["simulated"])
        return compiled(x, packed, bias, token_scale)

    def __call__(self, *tensors: Any) -> None:
        """Simulate one launch; the last tensor is y."""
        arrays = [_numpy(t) for t in tensors]
        calls = FAMILIES[self.device.kind](self.device.arch)
        self.result = simulate_launch(self._function(), arrays, names=self.names, calls=calls, **self.options)

    def _function(self) -> Any:
        from ladder.lower.build import emit
        from ladder.lower.turn import tvm_turn

        plan = self.lowered.plan
        with tvm_turn():
            return emit(self.gemm, self.device, plan.entries[plan.index(self.m)][1], "simulated")


def _numpy(tensor: Any) -> np.ndarray[Any, Any]:
    """View a CPU tensor (or what tvm_ffi made of one) as numpy, narrow floats as ml_dtypes have them."""
    import torch

    from ladder.simulate.values import NUMPY

    held = tensor if isinstance(tensor, torch.Tensor) else torch.utils.dlpack.from_dlpack(tensor)
    name = str(held.dtype).removeprefix("torch.")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[held.dtype.itemsize]
    return held.view(bits).numpy().view(NUMPY[name])


def _compared(result: SimulationResult, y: torch.Tensor, expected: Any, gemm: Any) -> SimulationResult:
    """Add the error against float64, and a finding where it is too large."""
    if expected is None:
        return result
    exact = np.asarray(expected, np.float64).reshape(result.y.shape)
    error = float(np.linalg.norm(result.y.astype(np.float64) - exact) / np.linalg.norm(exact))
    bound = max(BOUNDS[gemm.activation], BOUNDS.get(gemm.output, 0.0))
    findings = result.findings
    if not error <= bound:
        findings += (Finding("wrong values", f"relative error {error:.2e}, at most {bound:.0e} is expected"),)
    return replace(result, findings=findings, relative_error=error)
