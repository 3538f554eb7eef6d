"""`simulate`: an operator's kernel for some x and weight, executed on the CPU and compared with float64.

`simulate_tokens` does the same for the kernel that quantises tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ladder.ir.rounding import BOUNDS, largest_error
from ladder.lower.builder import tir_name
from ladder.simulate.findings import Finding
from ladder.simulate.launch import SimulationResult, calls_of, simulate_launch
from ladder.simulate.values import NUMPY, Array
from targets import TileDevice
from tile_types.arrays import torch_dtype
from tile_types.errors import DeviceError, ShapeError, require_kind

if TYPE_CHECKING:
    import torch

    from ladder.api.experts import GroupedMatmul
    from ladder.api.lowered import Lowered
    from ladder.api.matmul import Matmul
    from ladder.api.scaled import ScaledLowered, ScaledMatmul
    from ladder.runtime.kernel import CompiledGemm
    from ladder.runtime.packed import PackedWeight
    from ladder.runtime.scaled import ScaledOperand
    from tile_types import QuantizedTensor


USUAL_ROUNDING = math.sqrt(3 / 8 / math.log(2) / 12)
"""Error of rounding numbers of all sizes, relative to them, in epsilons: root mean square."""


UNLIKELY = 1e-6
"""Probability with which roundings add up to more than `rounding_bound`."""


def rounding_bound(exact: Array, kind: str, terms: Array | None = None) -> float:
    """Return the relative Frobenius error that attention may have: its weights and its results are rounded.

    Rounding to nearest errs by at most the unit roundoff u, relative to a number, and in the mean over
    numbers of all sizes by `USUAL_ROUNDING` times 2 u. The weights of a row may have one that counts, whose
    error all elements of the row share; results err each for itself. Squares of errors are weighted with
    those of results: a mean of few exceeds its expectation as Hoeffding's inequality says, but never u.

    exact: Results in float64, rows along the last axis.
    kind: Type that they, and the weights, are rounded to.
    terms: Of each row the sum of the squares of weights times values; where these cancel it exceeds that of
        results, and errors are relative to it. By default nothing cancels.
    """
    unit = float(ml_dtypes.finfo(NUMPY[kind]).eps) / 2
    squares = np.nan_to_num(exact.astype(np.float64)) ** 2
    rows = squares.sum(-1) if terms is None else terms
    grown = float(rows.sum()) / (float(squares.sum()) or 1.0) if terms is not None else 1.0
    return unit * math.sqrt(grown * _mean_square(rows) + _mean_square(squares))


def _mean_square(weights: Array) -> float:
    """Return what a weighted mean of squared rounding errors, in units of roundoff, does not exceed."""
    total = float(weights.sum()) or 1.0
    share = float((weights**2).sum()) / total**2
    return min(1.0, (2 * USUAL_ROUNDING) ** 2 + math.sqrt(-math.log(UNLIKELY) * share / 2))


def simulate(
    op: Matmul | ScaledMatmul | GroupedMatmul | Lowered | ScaledLowered,
    x: torch.Tensor,
    packed: PackedWeight | ScaledOperand,
    bias: torch.Tensor | None = None,
    token_scale: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    ranges: torch.Tensor | None = None,
    target: str | TileDevice | None = None,
    expected: Any = None,
    cancellation: float = 1.0,
    order: str = "together",
    seed: int = 0,
    blocks: int | None = None,
    stage: str = "emitted",
) -> SimulationResult:
    """Execute the kernel that would multiply x by a weight on a GPU, on the CPU, lane by lane.

    The emitted TIR runs, or what ``stage`` names. The result's ``y`` is a numpy array ``[M, N]``.

    Parameters
    ----------
    op
        An operator (with a GPU target, or ``target``), or what its `lower` returned.
    x
        ``[..., K]`` of the activation type, or ``[B, H, W, C]``. Floats for 8-bit cores are quantized first.
    packed
        The weight, from ``op.pack(weight)``; where it was packed to a GPU, a copy on the CPU is taken.
    bias, token_scale, residual, factor
        As in a call of ``op``; ``[..., N]`` that it adds, and float32 ``[N]`` that it multiplies by.
    ranges, target
        Of a `GroupedMatmul`; rows of no expert are not compared. Device to emit for, if not the operator's.
    expected
        ``[..., N]`` in float64 to compare with: an error beyond `largest_error` becomes a finding.
    cancellation
        By what factor the bound grows, as terms cancel or results are few.
    order, seed, blocks, stage
        See `simulate_launch`.

    Raises
    ------
    DeviceError, ShapeError, DTypeError, UnknownCallError
        If the target is no GPU, operands do not fit, or the kernel calls what the simulator does not know.
    """
    from ladder.api.lowered import Lowered
    from ladder.runtime.packed import PackedWeight

    lowered = _lowered(op, x, target)
    options = {"order": order, "seed": seed, "blocks": blocks, "stage": stage}
    if not isinstance(packed, PackedWeight) or not isinstance(lowered, Lowered):
        return simulate_scaled(lowered, x, packed, bias, expected, cancellation, options)
    launch = _Entry(_of_slots(lowered, x), options)
    given = {"factor": factor, "bias": bias, "residual": residual}
    launch.run(x, packed.to("cpu"), given, ranges, token_scale)
    assert launch.result is not None
    return _compared(launch.result, launch.owned, expected, launch.gemm, cancellation)


def _lowered(op: Any, x: Any, target: str | TileDevice | None) -> Lowered | ScaledLowered:
    """Return an operator on a target; raises DTypeError if it is none, or x no tensor."""
    import torch

    from ladder.api.lowered import Lowered
    from ladder.api.scaled import ScaledLowered
    from tile_types import QuantizedTensor

    require_kind(x, (torch.Tensor, QuantizedTensor), "x is a tensor")
    lowered: Lowered | ScaledLowered = (
        op.lower(target) if hasattr(op, "lower") and not isinstance(op, str) else op
    )
    require_kind(lowered, (Lowered, ScaledLowered), "op is an operator, or what its lower returned")
    return lowered


def _of_slots(lowered: Lowered, x: torch.Tensor) -> Lowered:
    """Return what multiplies x, also where its three axes say that slots name their experts."""
    from ladder.api.lowered import Lowered
    from ladder.runtime.compile import Request
    from ladder.runtime.experts import of_slots

    gemm = lowered.request.gemm
    if not gemm.experts or gemm.masked or gemm.slots or x.dim() != 3:
        return lowered
    return Lowered(Request.parse(of_slots(lowered.request.text, len(x))))


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
    result = simulate_launch(function, arrays, names=names, target=lowered.device, **options)
    if expected is None:
        return result
    exact = np.asarray(expected, np.float64).reshape(result.y.shape)
    return judged(result, exact, BOUNDS[form.output] * cancellation)


class _Entry:
    """Stands for a compiled kernel: called with tensors, it simulates."""

    def __init__(self, lowered: Lowered, options: dict[str, Any]) -> None:
        self.lowered, self.options = lowered, options
        self.gemm, self.device = lowered.request.gemm, lowered.request.target
        calls_of(self.device)
        self.result: SimulationResult | None = None
        self.m = 0
        self.names: tuple[str, ...] = ("x", "y")
        # Rows of y that belong to an expert; all, if there are none.
        self.owned: slice | np.ndarray[Any, Any] = slice(None)

    def run(
        self, x: torch.Tensor, packed: PackedWeight, given: dict[str, Any], ranges: Any, token_scale: Any
    ) -> None:
        """Do what a call of the operator does, whichever it is, then simulate."""
        from ladder.runtime.packed import refuse_layout

        gemm, bias = self.gemm, given["bias"]
        if (ranges is None) == bool(gemm.experts):
            raise ShapeError("a GroupedMatmul needs the ranges of its experts' tokens, and only it has them")
        if packed.layout != (expected := self._kernel().layout):
            refuse_layout(packed.layout, expected)
        if gemm.windows or gemm.residual or gemm.factor:
            self.convolve(x, packed, given)
        elif ranges is None:
            self.call(x, packed, bias, token_scale)
        else:
            self.call_experts(x, packed, ranges, bias, token_scale)

    def call(self, x: torch.Tensor, packed: PackedWeight, bias: Any, token_scale: Any) -> None:
        """Check, pad and quantize as a call of the operator does, then simulate."""
        x, token_scale = self._quantized(x, token_scale)
        self.m = math.prod(x.shape[:-1])
        extras = (("token_scale", token_scale), ("bias", bias))
        given = [name for name, extra in extras if extra is not None]
        self.names = ("x", *packed.arrays, *given, "y")
        self._kernel().run(x, packed.tensors, bias, token_scale)

    def convolve(self, x: torch.Tensor, packed: PackedWeight, further: dict[str, Any]) -> None:
        """Do what a call of a convolution does, then simulate."""
        from ladder.runtime import convolve

        self.m = convolve.window_count(self.gemm, x)
        given = (name for name, extra in further.items() if extra is not None)
        self.names = ("x", *packed.arrays, *given, "y")
        convolve.launch(self._kernel(), x, packed.tensors, **further)

    def call_experts(
        self, x: torch.Tensor, packed: PackedWeight, ranges: torch.Tensor, bias: Any, token_scale: Any
    ) -> None:
        """Do what a call of a `GroupedMatmul` does, then simulate."""
        import torch

        from ladder.runtime import experts

        gemm = self.gemm
        x, token_scale = self._quantized(x, token_scale)
        experts.check_operands(gemm, x, ranges, bias, token_scale)
        rows = x.reshape(-1, gemm.k)
        self.m = -(-len(rows) // (len(ranges) if gemm.slots else gemm.experts))
        extras = (("ranges", ranges), ("token_scale", token_scale), ("bias", bias))
        given = [name for name, extra in extras if extra is not None]
        self.names = ("x", *packed.arrays, *given, "y")
        self.owned = np.zeros(len(rows), np.bool_)
        for _, start, stop in experts.host_ranges(gemm, ranges, len(rows)):
            self.owned[start:stop] = True
        scales = None if token_scale is None else token_scale.reshape(-1, *gemm.token_scale_shape)
        out = torch.empty((len(rows), gemm.columns), dtype=torch_dtype(gemm.output))
        operands = experts.Operands(rows, packed.tensors, ranges, bias, scales, out)
        experts.at_once(self._kernel(), operands, self.m)

    def _quantized(self, x: torch.Tensor, token_scale: Any) -> tuple[torch.Tensor, Any]:
        """Check x, and quantize it as a call of the operator does."""
        from ladder.runtime.tokens import EIGHT_BIT, quantize_tokens

        if x.device.type != "cpu":
            raise DeviceError(f"the simulator reads tensors on the CPU, x is on {x.device}")
        if not math.prod(x.shape[:-1]):
            raise ShapeError(f"x has no rows: {tuple(x.shape)}")
        gemm = self.gemm
        if gemm.token_scale and gemm.activation in EIGHT_BIT and token_scale is None:
            return quantize_tokens(x, gemm.activation, gemm.token_group)
        return x, token_scale

    def _kernel(self) -> CompiledGemm:
        """Return an operator whose kernel is this object."""
        from ladder.runtime.compile import family_of
        from ladder.runtime.kernel import CompiledGemm
        from ladder.runtime.packed import own_order

        order = own_order(self.gemm, self.device)
        return CompiledGemm(self.gemm, family_of(self.device), [self.m], [self], order)

    def __call__(self, *tensors: Any) -> None:
        """Simulate one launch; the last tensor is y."""
        arrays = [numpy_of(t) for t in tensors]
        self.result = simulate_launch(
            self._function(), arrays, target=self.device, names=self.names, **self.options
        )

    def _function(self) -> Any:
        from ladder.lower.build import emit
        from ladder.lower.tvm_lock import tvm_lock

        plan = self.lowered.plan
        with tvm_lock():
            return emit(self.gemm, self.device, plan.entries[plan.index(self.m)][1], "simulated")


def numpy_of(tensor: Any) -> np.ndarray[Any, Any]:
    """View a CPU tensor (or what tvm_ffi made of one) as numpy, narrow floats as ml_dtypes have them."""
    import torch

    held = tensor if isinstance(tensor, torch.Tensor) else torch.utils.dlpack.from_dlpack(tensor)
    name = str(held.dtype).removeprefix("torch.")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[held.dtype.itemsize]
    return held.view(bits).numpy().view(NUMPY[name])


def _compared(
    result: SimulationResult, owned: Any, expected: Any, gemm: Any, cancellation: float
) -> SimulationResult:
    """Add the error of some rows against float64, and a finding where it is too large."""
    if not isinstance(owned, slice) and not owned.all():  # rows of no expert are not written
        kept = tuple(finding for finding in result.findings if finding.kind != "unwritten")
        result = replace(result, findings=kept)
    if expected is None:
        return result
    exact = np.asarray(expected, np.float64).reshape(result.y.shape)
    return judged(result, exact, largest_error(gemm) * cancellation, owned)


def judged(result: SimulationResult, exact: Any, bound: float, owned: Any = slice(None)) -> SimulationResult:
    """Add the error of some rows, and a finding where it is more than `explained`."""
    found, exact = result.y[owned], exact[owned]
    error, bound = relative_error(found, exact), explained(exact, found.dtype, bound)
    findings = result.findings
    if not error <= bound:
        findings += (Finding("wrong values", f"relative error {error:.2e}, at most {bound:.1e} is expected"),)
    return replace(result, findings=findings, relative_error=error)


def relative_error(found: Any, exact: Any) -> float:
    """Return the Frobenius norm of the difference over that of the exact results, or over 1 if that is 0."""
    return float(np.linalg.norm(found.astype(np.float64) - exact) / (np.linalg.norm(exact) or 1.0))


def explained(exact: Any, kind: Any, bound: float) -> float:
    """Return the relative error that rounding explains, given a bound that knows what it usually costs.

    Where few results lie just above powers of two, rounding them to their type costs more: by that it grows.
    """
    with np.errstate(over="ignore"):
        rounding = relative_error(exact.astype(kind), exact)
    usual = USUAL_ROUNDING * float(ml_dtypes.finfo(kind).eps)
    return math.sqrt(bound**2 + max(0.0, rounding**2 - usual**2)) if math.isfinite(rounding) else bound


OUTPUTS = ("codes", "token_scale")


def simulate_tokens(
    x: Array, activation: str, device: TileDevice, *, group: int = 0, order: str = "together"
) -> SimulationResult:
    """Execute the kernel that quantises rows of x on a GPU, and compare every code and scale.

    x: ``[M, K]``, float16, bfloat16 (of ml_dtypes) or float32.
    activation: ``"int8"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``.
    device: A GPU that multiplies them.
    group: Elements along K that share a scale; 0: all of a row.
    order: See `simulate_launch`.
    Returns: `SimulationResult` whose outputs are codes ``[M, K]`` and scales ``[M]`` or ``[M, groups]``. What
        is not ``x / scale``, rounded once, is a finding. ``relative_error`` is that of codes times scales
        against x.
    Raises ConversionError if the device does not multiply the type.
    """
    from ladder.lower.build import emit_quantizer
    from ladder.lower.tvm_lock import tvm_lock
    from schedules.quantization import tiled

    plan = tiled(str(x.dtype), activation, group, x.shape[1], device.vendor)
    with tvm_lock():
        function = emit_quantizer(plan, device, "simulated")
    expected, expected_scale = quantized(x, activation, plan.limit, group)
    codes = np.full(x.shape, 77, np.uint8).view(NUMPY[tir_name(activation)])
    scale = np.full(expected_scale.shape, np.nan, np.float32)
    result = simulate_launch(
        function, [x, codes, scale], outputs=(1, 2), names=("x", *OUTPUTS),
        target=device, order=order,
    )  # fmt: skip
    findings = list(result.findings)
    for name, found, exact in zip(OUTPUTS, (codes, scale), (expected, expected_scale), strict=True):
        wrong = int((found.astype(np.float64) != exact.astype(np.float64)).sum())
        if wrong:
            findings.append(Finding("wrong values", f"{wrong} of {found.size} {name} are not as defined"))
    each = np.repeat(scale.reshape(len(x), -1), group or x.shape[1], axis=1)[:, : x.shape[1]]
    error = relative_error(codes.astype(np.float64) * each, x.astype(np.float64))
    return replace(result, findings=tuple(findings), relative_error=error)


def quantized(x: Array, activation: str, limit: float, group: int = 0) -> tuple[Array, Array]:
    """Return codes (as float64) and float32 scales as `ladder.lower.gpu.quantize.Quantizer` defines them."""
    rows, k = x.shape
    width = group or k
    padded: Any = np.zeros((rows, -(-k // width), width), np.float32)
    padded.reshape(rows, -1)[:, :k] = x.astype(np.float32)
    scale = np.maximum(np.abs(padded).max(axis=2) / np.float32(limit), np.float32(2.0**-126))
    units = (padded * (np.float32(1) / scale)[..., None]).reshape(rows, -1)[:, :k]
    codes = np.rint(units) if activation == "int8" else units.astype(NUMPY[tir_name(activation)])
    return codes.astype(np.float64), scale if group else scale[:, 0]
