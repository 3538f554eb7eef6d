"""Scales and zero points of a packed weight, in the form that GPU kernels read.

torch is imported only when a function runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from schedules.layouts import (
    EXPONENT_FORMS,
    EXPONENTS,
    LANES,
    OPERAND_EXPONENT,
    SCALE_EXPONENT,
    Exponents,
    lane_of,
    packed_group,
    padded,
)
from tile_types.arrays import as_torch, ldexp
from tile_types.errors import ConversionError, ShapeError
from tile_types.packing import pack_codes

if TYPE_CHECKING:
    import torch

    from tile_types.quantized import QuantizedTensor
    from tile_types.ttype import TType


@dataclass(frozen=True)
class PackedScales:
    """Scales and zero points as GPU kernels read them.

    group: Elements along K that one row of ``scales`` and ``zeros`` serves.
    scales: ``[ceil(k_pad/group), n_pad]`` in the core's type (float32 for 8-bit cores), or None; uint32
        ``[ceil(k_pad/128), n_pad]`` of four exponents each (`Exponents`) where kernels read those.
    zeros: ``[k_groups, n_pad]`` integers (core type, int8 for 8-bit cores), or ``[k_groups, 2, n_pad]``
        (coarse part, remainder) for real zero points, or None.
    row_scale: float32 ``[n_pad]``.
    """

    group: int
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    row_scale: torch.Tensor


def within_reach(weight: QuantizedTensor, core: str) -> QuantizedTensor:
    """Return a matrix whose groups far from 0 beside their spread suit a core's type.

    A real zero point far beyond the values of codes, as of a group of one weight, overflows float16, or
    leaves a scale with few digits beside those of its row. Such a group gets a power of two as its scale,
    and codes of values nearer to the middle one. A weight changes by less than its rounding to float16.

    weight: A quantized matrix; one without such groups is returned as it is.
    core: Operand type of the tensor core.
    Raises ConversionError if a zero point is beyond float16 and the values are too far apart for that.
    """
    import torch

    element = weight.ttype
    if core != "float16" or weight.zero_kind != "float" or weight.scale is None or element.elem_bits > 8:
        return weight
    spread = (element.maximum - element.minimum) / 2
    if float(as_torch(weight.zero).abs().max()) + element.max_abs <= min(FAR * spread, MOST_REACH):
        return weight
    zero, scale = (as_torch(array).to(torch.float64) for array in (weight.zero, weight.scale))
    reach = torch.maximum((element.maximum - zero).abs(), (element.minimum - zero).abs())
    far = (reach > min(FAR * spread, MOST_REACH)) & (scale != 0)
    if not bool(far.any()):
        return weight
    (n, k), (block_n, block_k) = weight.shape, weight.block
    zero, scale, reach, far = (
        array.repeat_interleave(block_n, dim=0)[:n] for array in (zero, scale, reach, far)
    )
    codes = torch.nn.functional.pad(as_torch(weight.codes()), (0, -k % block_k))
    codes = codes.reshape(n, -1, block_k)
    size = scale.abs()
    row = size.amax(dim=1, keepdim=True)
    least = torch.maximum(size * reach / min(FURTHER * spread, WHOLE), row * LEAST)
    raised = ldexp(scale.sign(), torch.frexp(torch.maximum(least, size))[1])
    changed, nearer, fits = _nearer(
        element, codes[far], zero[far], (scale / raised)[far], (row * spread / raised.abs())[far]
    )
    beyond = torch.maximum(reach, zero.abs())[far] > torch.finfo(torch.float16).max
    if bool((beyond & ~fits).any()):
        raise ConversionError(
            f"a zero point of {float(zero.abs().max()):.6g} beside codes of {element.name} is beyond float16;"
            " use bfloat16 or float32 activations"
        )
    codes[far] = torch.where(fits[:, None], changed, codes[far])
    zero[far] = torch.where(fits, nearer, zero[far])
    scale[far] = torch.where(fits, raised[far], scale[far])
    return replace(
        weight,
        storage=pack_codes(codes.reshape(n, -1)[:, :k], element.elem_bits),
        block=(1, block_k),
        scale=scale.to(torch.float32),
        zero=zero.to(torch.float32),
        scale_type="float32",
    )


def _nearer(
    element: TType, codes: torch.Tensor, zero: torch.Tensor, shrink: torch.Tensor, largest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes of values nearer to the middle one, zero points, and which groups keep their weights.

    codes, zero: Of groups, ``[F, size]`` and ``[F]``.
    shrink, largest: What is left of each difference, and the usual weights of the group's row in units of
        its new scale, ``[F]``.
    """
    import torch

    values = element.probe_values()
    middle = float(values[abs(values - (element.minimum + element.maximum) / 2).argmin()])
    wanted = middle + (as_torch(element.decode_array(codes)) - middle) * shrink[:, None]
    finite = torch.isfinite(wanted)
    wanted = torch.where(finite, wanted, middle)
    changed = as_torch(element.encode_finite(wanted)).to(codes.dtype)
    off = as_torch(element.decode_array(changed)) - wanted
    low, high = off.amin(dim=1), off.amax(dim=1)
    nearer = middle + (zero - middle) * shrink
    size = torch.maximum((wanted - nearer[:, None]).abs().amin(dim=1), largest)
    fits = finite.all(dim=1) & ((high - low) / 2 <= torch.finfo(torch.float16).eps / 2 * size)
    return changed, nearer + (high + low) / 2, fits


FAR = 2.0**8
FURTHER = 2.0**12
"""Distances of zero points, in half the range of values: beyond which scales beside others in float16 lose
digits, and which powers of two may lose to."""

LEAST = 2.0**-14
"""Least scale of such a group beside the largest of its row: float16 holds it."""

MOST_REACH = 2.0**15
"""Difference of a value from a zero point beyond which a group is changed, whatever its values."""

WHOLE = 2.0**11
"""Up to which float16 holds whole numbers."""


def normalise_scales(
    weight: QuantizedTensor, core: str, *, grouped: bool | None = None, exponents: bool = False
) -> PackedScales:
    """Bring the scales of a quantized matrix into the form that kernels read.

    Each row gives up a power of two (in ``row_scale``) so that its largest scale lies in
    [2**-9, 2**-8), or its largest scaled value in [2**11, 2**12) if that is less: then neither
    scales, even times 2**24, nor scaled weights overflow in float16. Without group scales,
    ``row_scale`` holds the whole float32 scale.

    weight: A quantized matrix ``[N, K]``; its arrays may be numpy or torch, on any device.
    core: Operand type of the tensor core.
    grouped, exponents: Whether to keep scales per group, by default if a row has several; whether to keep
        exponents of them, of groups of `EXPONENT_GROUP`: NaN goes to ``row_scale``.
    Returns PackedScales: With N and K padded; padded scales and zeros are 0.
    Raises ConversionError if 8-bit cores meet real zero points, or integer zero points beyond int8; if a
        scale of which the exponent is wanted is no power of two, or above 2**118.
    Raises ShapeError if the group size does not fit, or a row has several scales but ``grouped`` is False.
    """
    import torch

    (n, k), lane = weight.shape, lane_of(core)
    group = packed_group(weight.block[1], k)
    scale = None if weight.scale is None else _expand(weight.scale, weight, group)
    zero = None if weight.zero is None or weight.zero_kind == "none" else _expand(weight.zero, weight, group)
    grouped = scale is not None and weight.block[1] < k if grouped is None else grouped
    scales = None
    if scale is None:
        row = torch.ones(n, dtype=torch.float64, device="cpu" if zero is None else zero.device)
    elif not grouped:
        if weight.block[1] < k:
            raise ShapeError(
                f"scales of groups of {weight.block[1]} along K={k} do not fold into one per row"
            )
        row = scale[0]
    elif exponents:
        infinite = ~torch.isfinite(scale)
        row, lowered = _lowered(torch.where(infinite, 2.0**-127, scale), zero, weight.ttype)
        row = torch.where(infinite.any(dim=0), torch.nan, row)
        scales = _exponent_words(lowered, EXPONENT_FORMS[core], -(-k // group))
    else:
        row, lowered = _lowered(scale, zero, weight.ttype)
        scales = _pad_rows(lowered, n).to(getattr(torch, core) if lane == 16 else torch.float32)
    zeros = None if zero is None else _pad_rows(_zeros(zero, weight, core), n)
    factor = 1.0 if weight.tensor_scale is None else float(weight.tensor_scale)
    return PackedScales(group, scales, zeros, _pad_rows((row * factor).to(torch.float32), n))


def _lowered(
    scale: torch.Tensor, zero: torch.Tensor | None, limits: TType
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the power of two that each row gives up, and the scales without it."""
    import torch

    exponent = _row_exponent(scale, zero, limits)
    return ldexp(torch.ones_like(scale[0]), exponent), ldexp(scale, -exponent)


def _expand(array: Any, weight: QuantizedTensor, group: int) -> torch.Tensor:
    """Repeat ``[ceil(N/bn), ceil(K/bk)]`` to float64 ``[k_groups, N]``, zero beyond K."""
    import torch

    (n, k), (block_n, block_k) = weight.shape, weight.block
    if isinstance(array, torch.Tensor):
        values = array.detach().to(torch.float64)
    else:
        values = torch.from_numpy(np.asarray(array).astype(np.float64))
    expected = (-(-n // block_n), -(-k // block_k))
    if tuple(values.shape) != expected:
        raise ShapeError(f"scale or zero array has shape {tuple(values.shape)}, expected {expected}")
    rows = values.repeat_interleave(block_n, dim=0)[:n]
    columns = rows if block_k >= k else rows.repeat_interleave(block_k // group, dim=1)
    k_groups = -(-padded(k) // group)
    result = torch.zeros(k_groups, n, dtype=torch.float64, device=values.device)
    kept = min(k_groups, columns.shape[1])
    result[:kept] = columns.t()[:kept]
    return result


def _row_exponent(scale: torch.Tensor, zero: torch.Tensor | None, limits: TType) -> torch.Tensor:
    """Return int32 ``[N]``: the power of two that each row gives up."""
    import torch

    offset = torch.zeros_like(scale) if zero is None else zero
    reach = torch.maximum((limits.maximum - offset).abs(), (limits.minimum - offset).abs())
    largest = (reach * scale.abs()).amax(dim=0)
    _, exponent = torch.frexp(largest)
    # What float16 rounds up to the next power of two counts as that.
    _, scale_exponent = torch.frexp(scale.abs().amax(dim=0) * (1 + 2.0**-11))
    exponent = torch.maximum(exponent - OPERAND_EXPONENT, scale_exponent - SCALE_EXPONENT)
    # An all-zero row keeps factor 1; float32 holds 2**-126 .. 2**127 as normal numbers.
    return torch.where(largest > 0, exponent, torch.zeros_like(exponent)).clamp(-126, 127)


def _exponent_words(scale: torch.Tensor, form: Exponents, groups: int) -> torch.Tensor:
    """Return the words of scales ``[k_groups, N]``, of which the first ``groups`` lie within K."""
    import torch

    fraction, exponent = torch.frexp(scale)
    if bool((fraction[:groups] != 0.5).any()):
        raise ConversionError(
            "a scale is no power of two, but the operator was made for a type whose scales all are;"
            " name the type with the scales' own type"
        )
    wanted = torch.where(scale == 0, form.lowest, exponent - 1 + form.raised + form.bias)
    if bool((wanted > form.highest).any()):
        raise ConversionError(
            "a scale above 2**118 leaves no float32 factor for its row; scale the weight down"
        )
    byte = wanted.clamp(form.lowest, form.highest).to(torch.uint8)
    rows, n = -(-len(byte) // EXPONENTS), byte.shape[1]
    whole = torch.full((rows * EXPONENTS, padded(n)), form.lowest, dtype=torch.uint8, device=byte.device)
    whole[: len(byte), :n] = byte
    four = whole.reshape(rows, EXPONENTS, -1).transpose(1, 2).contiguous()
    return four.view(torch.int32).squeeze(-1).view(torch.uint32)


def _zeros(zero: torch.Tensor, weight: QuantizedTensor, core: str) -> torch.Tensor:
    """Return zero points ``[k_groups, N]`` (integer) or ``[k_groups, 2, N]`` (real) in kernel types."""
    import torch

    kind = weight.zero_kind
    if LANES[core] == 8:
        if kind == "float" or int(zero.min()) < -128 or int(zero.max()) > 127:
            reason = "real numbers" if kind == "float" else "beyond int8"
            raise ConversionError(
                f"zero points that are {reason} cannot be subtracted on the 8-bit core {core!r};"
                " use float16 or bfloat16 activations"
            )
        return zero.to(torch.int8)
    dtype = getattr(torch, core)
    if kind == "integer":
        return zero.to(dtype)
    coarse = _coarse(zero, weight.ttype, torch.finfo(dtype).eps).to(dtype)
    return torch.stack((coarse, (zero - coarse.to(torch.float64)).to(dtype)), dim=1)


def _coarse(zero: torch.Tensor, element: TType, eps: float) -> torch.Tensor:
    """Round zero points to multiples of the least power of two that leaves differences from codes exact.

    What remains is small beside most differences, so its own rounding and that of its product with the scale
    add little to the rounding of a weight. Multiples of s up to 2 s / eps have no digits to round.
    """
    import torch

    reach = torch.stack((zero.abs(), (element.maximum - zero).abs(), (element.minimum - zero).abs()))
    _, exponent = torch.frexp(reach.amax(dim=0))
    step = ldexp(torch.full_like(zero, eps / 2), exponent).clamp(max=1.0)
    return (zero / step).round() * step


def _pad_rows(array: torch.Tensor, n: int) -> torch.Tensor:
    """Zero-extend the last axis from N to the padded N."""
    import torch

    return torch.nn.functional.pad(array, (0, padded(n) - n)).contiguous()
