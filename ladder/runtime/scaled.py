"""Block-scaled products at run time: operands as the cores take them, kernels, and the call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ladder.ir.scaled import FORMATS, ScaledGemm
from ladder.runtime.build import Kernel, find_or_build, function_job, load_entry
from ladder.runtime.compile import target_of
from ladder.runtime.spills import least_spilling, warn_of_spills
from schedules.scaled import place_scales
from schedules.scaled_choice import AnyScaled, ranked
from targets import TileDevice, get_device
from tile_types import get_type
from tile_types.arrays import as_torch, ldexp, torch_dtype
from tile_types.errors import DeviceError, DTypeError, ShapeError
from tile_types.packing import pack_codes

if TYPE_CHECKING:
    import torch

    from tile_types import QuantizedTensor


@dataclass(frozen=True, eq=False)
class ScaledOperand:
    """A matrix ``[rows, K]`` as kernels take it.

    type_name, shape: Block type, and (rows, K).
    codes: uint8 ``[rows, bytes]``: codes without gaps, rows padded with zeros to blocks of 32.
    scales: uint8 in the order of `schedules.scaled.place_scales`.
    factor: float32 ``[1]``: factor of the whole matrix.
    """

    type_name: str
    shape: tuple[int, int]
    codes: torch.Tensor
    scales: torch.Tensor
    factor: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in (self.codes, self.scales, self.factor))

    @property
    def device(self) -> torch.device:
        """Where the arrays lie."""
        return self.codes.device

    def to(self, device: torch.device | str) -> ScaledOperand:
        """Return a copy on another device."""
        arrays = (array.to(device) for array in (self.codes, self.scales, self.factor))
        return ScaledOperand(self.type_name, self.shape, *arrays)


def operand_of(form: ScaledGemm, type_name: str, matrix: QuantizedTensor) -> ScaledOperand:
    """Bring a quantized matrix into the form that kernels take.

    Raises ShapeError, DTypeError if it is not ``[rows, K]`` of the type, or has zero points, offsets or an
        order of columns.
    """
    import torch

    own = FORMATS[type_name]
    found = (matrix.ttype.name, matrix.block, matrix.scale_type)
    if found != (own.element, (1, own.group), own.scale):
        raise DTypeError(
            f"this operand is {type_name} ({own.element} in blocks of {own.group} with {own.scale} scales),"
            f" got {matrix.type_name}: {found[0]} in blocks of {found[1]} with {found[2]} scales"
        )
    further = [name for name in ("zero", "offset", "columns") if getattr(matrix, name) is not None]
    if further:
        raise DTypeError(f"cores that scale blocks take no {', '.join(further)} of a {matrix.type_name}")
    if matrix.shape[1] != form.k:
        raise ShapeError(f"the operand has K={matrix.shape[1]}, the product has K={form.k}")
    scale = as_torch(matrix.scale).view(torch.uint8)
    factor = torch.tensor([1.0 if matrix.tensor_scale is None else matrix.tensor_scale], device=scale.device)
    has_gaps = own.bits == 6
    codes = _dense(as_torch(matrix.codes()), own.bits) if has_gaps else as_torch(matrix.storage)
    return _placed(form, type_name, matrix.shape[0], codes, scale, factor)


def _placed(
    form: ScaledGemm,
    type_name: str,
    rows: int,
    dense: torch.Tensor,
    scale: torch.Tensor,
    factor: torch.Tensor,
) -> ScaledOperand:
    """Pad rows of codes, and place scales."""
    import torch

    own = FORMATS[type_name]
    codes = torch.nn.functional.pad(dense, (0, own.row_bytes(form.k) - dense.shape[1])).contiguous()
    return ScaledOperand(type_name, (rows, form.k), codes, place_scales(scale, own, form.k), factor)


def _dense(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes ``[rows, count]`` as the bytes of one row of bits each, lowest first.

    Canonical storage leaves gaps in words of 6-bit codes; matrix cores take none.
    """
    import torch

    if bits != 6:
        packed: torch.Tensor = pack_codes(codes, bits)
        return packed
    padded = torch.nn.functional.pad(codes.to(torch.int32), (0, -codes.shape[1] % 4))
    a, b, c, d = (padded[:, i::4] for i in range(4))
    three = (a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2)
    return torch.stack([byte & 0xFF for byte in three], dim=-1).to(torch.uint8).flatten(1)


def quantize_rows(form: ScaledGemm, x: torch.Tensor) -> ScaledOperand:
    """Quantize rows of x to the activation's blocks, by torch's own operators on its device.

    Codes and scales are those of `ladder.quantize`. Blocks with infinity or NaN get the scale NaN, so that
    all products with their row are NaN. Nothing is read back to the host.
    """
    import torch

    own = FORMATS[form.activation]
    rows, element = x.shape[0], get_type(own.element)
    wide = torch.nn.functional.pad(x.to(torch.float64), (0, -form.k % own.group))
    blocks = wide.reshape(rows, wide.shape[1] // own.group, own.group)
    largest = blocks.abs().amax(dim=-1)
    finite = largest.isfinite()
    largest = torch.where(finite, largest, 0.0)
    factor, scale, stored = _SCALES[own.scale](largest, element.maximum)
    units = torch.where(finite[..., None], blocks / scale[..., None], 0.0)
    stored = torch.where(finite, stored, NAN[own.scale]).to(torch.uint8)
    codes = element.encode_finite(units.flatten(1)[:, : form.k])
    return _placed(form, form.activation, rows, _dense(codes, own.bits), stored, factor)


NAN = {"e8m0": 255, "fp8_e4m3": 127}
"""Code of a scale that is no number."""


def _exponents(largest: torch.Tensor, limit: float) -> tuple[torch.Tensor, ...]:
    """Return the factor 1, scales 2**(floor(log2 largest) - emax) and their codes (OCP MX v1.0, 6.3)."""
    import torch

    exponent = torch.frexp(largest)[1] - math.frexp(limit)[1]
    exponent = torch.where(largest > 0, exponent, ZERO_EXPONENT).clamp(-127, 127)
    scale = ldexp(torch.ones_like(largest), exponent)
    return torch.ones(1, device=largest.device), scale, exponent + 127


def _fractions(largest: torch.Tensor, limit: float) -> tuple[torch.Tensor, ...]:
    """Return the factor of the matrix, scales of blocks with it, and their codes."""
    import torch

    scales = get_type("fp8_e4m3")
    most = torch.cat([largest.flatten(), largest.new_zeros(1)]).amax()
    factor = (most / (limit * scales.maximum)).to(torch.float32).reshape(1)
    factor = torch.where(factor > 0, factor, 1.0)
    wanted = (largest / limit / factor).clamp(scales.smallest_positive, scales.maximum)
    stored = scales.encode_finite(wanted)
    return factor, scales.decode_array(stored) * factor, stored


_SCALES: Mapping[str, Callable[[torch.Tensor, float], tuple[torch.Tensor, ...]]] = {
    "e8m0": _exponents,
    "fp8_e4m3": _fractions,
}
"""Type of scales -> factor of the matrix, float64 scales of blocks with it, and their codes."""

ZERO_EXPONENT = -14
"""Exponent of the scale of a block of zeros (`tile_types.scaling.ZERO_BLOCK_SCALE`)."""


def kernel_for(form: ScaledGemm, device: TileDevice, schedule: AnyScaled) -> Kernel:
    """Find or build the kernel of a schedule; the device need not be here.

    Raises DeviceError, ScheduleError if the device has no such cores, or the schedule does not fit.
    Raises MissingToolError, CompilerError if it cannot be compiled.
    """
    shapeless = {name: value for name, value in asdict(form).items() if name not in ("n", "k")}
    name = f"ladder_scaled_{form.weight}_{form.activation}_{schedule.title}"

    def emit(name: str) -> Any:
        from ladder.lower.build import SCALED, resolve

        return resolve(SCALED, "target kind", device.kind)(form, device, schedule, name)

    facts = {"scaled": shapeless, "schedule": str(schedule)}
    return find_or_build([function_job(facts, name, device, emit)])[0]


def served(form: ScaledGemm, device: TileDevice, m: int) -> tuple[AnyScaled, Kernel]:
    """Return the best schedule for M = ``m`` whose kernel does not spill, and its kernel.

    Raises as `kernel_for`.
    """
    built = ((schedule, kernel_for(form, device, schedule)) for schedule in ranked(form, device, m))
    schedule, kernel = least_spilling(built, lambda found: found[1:])
    warn_of_spills([kernel], device)
    return schedule, kernel


@lru_cache(maxsize=4096)
def _entry(form: ScaledGemm, target: str, m: int) -> Any:
    return load_entry(served(form, get_device(target), m)[1], "cuda")


def check_operands(
    form: ScaledGemm, x: ScaledOperand, weight: ScaledOperand, bias: torch.Tensor | None
) -> None:
    """Raise unless operands and bias are the product's.

    Raises ShapeError, DTypeError, DeviceError: Says which is not, and what is wanted.
    """
    if not isinstance(weight, ScaledOperand):
        raise ShapeError(f"a weight packed as {type(weight).__name__} is none of a block-scaled product")
    if (weight.type_name, weight.shape) != (form.weight, (form.n, form.k)):
        raise ShapeError(
            f"the weight is {weight.type_name} {list(weight.shape)}, this product needs {form.weight}"
            f" {[form.n, form.k]}"
        )
    if (x.type_name, x.shape[1]) != (form.activation, form.k):
        raise ShapeError(f"x is {x.type_name} with K={x.shape[1]}, not {form.activation} with K={form.k}")
    if (bias is None) == form.bias:
        raise ShapeError("the bias is missing" if form.bias else "this product was made without a bias")
    if bias is not None and (tuple(bias.shape), bias.dtype) != ((form.n,), torch_dtype(form.output)):
        raise ShapeError(f"the bias must be {form.output} [{form.n}], got {bias.dtype} {list(bias.shape)}")
    places = {x.device, weight.device} | ({bias.device} if bias is not None else set())
    if len(places) > 1:
        raise DeviceError(f"x, weight and bias lie on different devices: {', '.join(map(str, places))}")


def arguments(
    x: ScaledOperand, weight: ScaledOperand, bias: torch.Tensor | None, y: torch.Tensor
) -> list[Any]:
    """Return the kernel's arguments."""
    rest = [] if bias is None else [bias.contiguous()]
    return [x.codes, x.scales, weight.codes, weight.scales, x.factor * weight.factor, *rest, y]


def multiply(
    form: ScaledGemm, x: ScaledOperand, weight: ScaledOperand, bias: torch.Tensor | None
) -> torch.Tensor:
    """Launch the kernel that is predicted to be fastest for x; returns ``[M, N]``.

    Raises DeviceError if the operands lie on no GPU whose cores scale blocks.
    """
    import torch

    check_operands(form, x, weight, bias)
    target, m = target_of(x.device), x.shape[0]
    ranked(form, get_device(target), max(m, 1))  # also of no rows it says whether there are such cores
    y = torch.empty((m, form.n), dtype=torch_dtype(form.output), device=x.device)
    if m:
        _entry(form, target, m)(*arguments(x, weight, bias, y))
    return y
