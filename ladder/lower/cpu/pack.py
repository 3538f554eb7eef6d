"""Pack a quantized matrix for CPU kernels, and take the codes back out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from ladder.ir.gemm import Gemm
from schedules.cpu_layout import LANES, ROWS, UNIT, CpuLayout, cpu_layout
from tile_types import TType, get_type
from tile_types.arrays import as_torch
from tile_types.errors import ShapeError
from tile_types.factored import Factored

if TYPE_CHECKING:
    import torch

    from tile_types import QuantizedTensor

CHUNK = 1 << 19
"""Codes packed at a time: temporary arrays stay in the caches."""


PackWords = Callable[[CpuLayout, "QuantizedTensor", "Recoding"], "torch.Tensor"]
"""Packs the codes of a matrix: uint32 words of the layout's shape."""

Transpose = Callable[["torch.Tensor"], "torch.Tensor"]
"""Transposes numbers, in memory of their own."""


def by_torch(numbers: torch.Tensor) -> torch.Tensor:
    """Transpose a matrix of numbers by torch."""
    return numbers.t().contiguous()


def offset_of(weight: str) -> int:
    """Return the smallest value of a type of consecutive integers: what code 0 of an 8-bit lane means."""
    return int(get_type(weight).minimum)


def recoding(element: TType) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the tables code -> value - minimum and back.

    Integer cores multiply unsigned bytes, so packed codes count from the smallest value.
    Codes without a value (ternary's fourth) map to 0.
    """
    codes, values = element.valid_codes(), element.probe_values()
    forward = np.zeros(1 << element.elem_bits, np.int64)
    forward[codes] = (values - values.min()).astype(np.int64)
    backward = np.zeros(1 << element.elem_bits, np.int64)
    backward[forward[codes]] = codes
    return forward, backward


@dataclass(frozen=True)
class Recoding:
    """What packing does to codes.

    table: Entry of each code, or None for the code itself.
    fill: Entry of what is padded.
    """

    table: np.ndarray[Any, Any] | None
    fill: int

    @property
    def flip(self) -> int | None:
        """The bits that are inverted in every code, if that is all: most tables only invert the sign's."""
        if self.table is None:
            return 0
        flip = int(self.table[0])
        return flip if (self.table == np.arange(len(self.table)) ^ flip).all() else None


NUMBERS = {
    "float32": {1: "int8", 2: "float16", 4: "float32"},
    "int32": {1: "uint8", 2: "int16", 4: "int32"},
}
"""Type that kernels compute with -> bytes of a stored number, the last extent of its array -> its type.

Scales and offsets of super-blocks are stored as factors, `HALF` bytes more than a super-block has groups: of
all rows first the float16 numbers, then the integers of the first four groups, of the next, ...
Such an array of zero points holds offsets: kernels compute the zero points, as `without_offset` does.
"""

HALF, WIDEST_NUMBER = 2, 4
"""Bytes of the number of a super-block, and of the widest number that is stored itself."""


def computed_as(gemm: Gemm, name: str) -> str:
    """Return the type that kernels compute with the ``"scale"`` or ``"zero"`` points of a problem in.

    Integer zero points are exact in int32 on an integer core; all others are float32.
    """
    exact = name == "zero" and gemm.zero == "integer" and cpu_layout(gemm).lane == 8
    return "int32" if exact else "float32"


def stored_numbers(gemm: Gemm, name: str, values: torch.Tensor) -> torch.Tensor:
    """Return scales or zero points of the narrowest type that kernels read which holds each of them.

    Where none does, they are rounded to float32, as kernels compute.
    """
    import torch

    kinds = NUMBERS[computed_as(gemm, name)]
    whole = name == "zero" and gemm.zero == "integer"
    for size in sorted(kinds)[0 if whole else 1 :]:
        dtype = getattr(torch, kinds[size])
        if size == max(kinds) or values.dtype == dtype:
            break
        if _holds(dtype, values[:1]) and _holds(dtype, values):  # most that do not hold show in a row
            break
    return values.to(dtype)


def _holds(dtype: torch.dtype, values: torch.Tensor) -> bool:
    """Tell whether a type has each of some values: compared as float64, for 200 is -56 in int8 and back."""
    return bool((values.to(dtype).double() == values.double()).all())


def numbers_of(gemm: Gemm, name: str, stored: torch.Tensor) -> torch.Tensor:
    """Return ``[groups, N padded]`` numbers of packed bytes."""
    import torch

    return stored.view(getattr(torch, NUMBERS[computed_as(gemm, name)][stored.shape[-1]]))[..., 0]


def widened(gemm: Gemm, name: str, stored: torch.Tensor, size: int) -> torch.Tensor:
    """Return packed numbers in ``size`` bytes each, where each is in as many or fewer."""
    import torch

    if stored.shape[-1] == size:
        return stored
    dtype = getattr(torch, NUMBERS[computed_as(gemm, name)][size])
    return numbers_of(gemm, name, stored).to(dtype)[..., None].view(torch.uint8)


def factors_of(gemm: Gemm, weight: QuantizedTensor) -> dict[str, Factored]:
    """Return the scales, and offsets in place of zero points, that are packed as factors: all or none."""
    factors: dict[str, Factored] = {}
    layout, wanted = cpu_layout(gemm), {"scale": "scale"}
    if gemm.zero != "none":
        wanted["zero"] = "offset"
    for name, source in wanted.items():
        found = weight.factored(source)
        if found is None or found.count != layout.factored or weight.block != (1, layout.group):
            return {}
        factors[name] = found
    shifted = "zero" in factors and layout.lane == 8 and offset_of(gemm.weight) != 0
    other = weight.ttype.name != gemm.weight or weight.zero is not None or weight.tensor_scale is not None
    if not gemm.scale or other or shifted:
        return {}
    if "zero" in factors and factors["scale"].vanishes:
        scale, offset = as_torch(weight.scale), as_torch(weight.offset)
        if bool(((scale == 0) & (offset != 0)).any()):
            return {}  # no zero point gives the offset of a scale of zero
    return factors


def _super_blocks(layout: CpuLayout, gemm: Gemm, factors: Factored, transpose: Transpose) -> torch.Tensor:
    """Return the bytes of factors: uint8 ``[super-blocks, N padded, HALF + groups]``."""
    import torch

    number, integers = as_torch(factors.number), as_torch(factors.integers)
    (n, blocks), padded, count = number.shape, layout.padded_n(gemm.n), layout.factored
    make = torch.empty if padded == n else torch.zeros
    result = make(blocks, (HALF + count) * padded, dtype=torch.uint8, device=number.device)
    halves, fours = _planes(result, padded)
    halves[:, :n] = number.t()
    fours[..., :n] = transpose(integers.contiguous().view(torch.int32)).view(blocks, -1, n)
    return result.view(blocks, padded, HALF + count)


def _planes(stored: torch.Tensor, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of packed factors: numbers ``[super-blocks, N]``, and integers, four in an int32."""
    import torch

    flat = stored.view(len(stored), -1)
    start = HALF * padded
    halves, integers = flat[:, :start].view(torch.float16), flat[:, start:].view(torch.int32)
    return halves, integers.view(len(stored), -1, padded)


def factored_numbers(stored: torch.Tensor) -> torch.Tensor:
    """Return ``[groups, N padded]`` float32 numbers of packed factors."""
    halves, fours = _planes(stored, stored.shape[1])
    return (halves.float()[:, None] * _integers(fours)).view(-1, stored.shape[1])


def unpacked_factors(stored: torch.Tensor, n: int) -> Factored:
    """Return the factors that were packed of a matrix of n rows."""
    halves, fours = _planes(stored, stored.shape[1])
    found = factored_numbers(stored), halves, _integers(fours).view(-1, stored.shape[1])
    return Factored(*(each[:, :n].t().contiguous() for each in found))


def _integers(fours: torch.Tensor) -> torch.Tensor:
    """Return int8 ``[super-blocks, groups, N]`` of integers of four groups at a time."""
    import torch

    blocks, _, padded = fours.shape
    octets = fours.contiguous().view(torch.int8).view(blocks, -1, padded, 4)
    return octets.transpose(2, 3).reshape(blocks, -1, padded)


def as_plain(stored: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Return packed factors as bytes of float32 scales, or zero points, ``[groups, N padded, 4]``.

    scales: The packed scales of zero points.
    """
    import torch

    numbers = factored_numbers(stored)
    if scales is not None:
        divisors = factored_numbers(scales)
        numbers = torch.where(divisors == 0, 0, -numbers / divisors)
    return numbers[..., None].contiguous().view(torch.uint8)


def factors_side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return packed factors of matrices, rows below rows, as those of one."""
    import torch

    blocks, _, size = parts[0].shape
    halves, fours = zip(*(_planes(part, part.shape[1]) for part in parts), strict=True)
    both = torch.cat(halves, 1), torch.cat(fours, 2).view(blocks, -1)
    return torch.cat([each.view(torch.uint8) for each in both], 1).view(blocks, -1, size)


def pack(
    gemm: Gemm, weight: QuantizedTensor, words: PackWords | None = None, transpose: Transpose = by_torch
) -> dict[str, torch.Tensor]:
    """Return the arrays of a kernel in the order in which it takes them.

    gemm: The problem that the matrix belongs to.
    weight: Codes ``[N, K]`` with scales and zero points.
    words: Packs codes, by default `packed_words`.
    transpose: Transposes scales and zero points.
    Returns: ``words`` uint32 [row blocks, units, 16 * bits]; ``scales`` uint8 [groups, N padded, bytes] if
        ``gemm.scale``; ``zeros`` alike unless ``gemm.zero`` is ``"none"`` (`NUMBERS` says of what
        type, and what both are where `factors_of` has them); ``row_scale`` float32 [N padded].
    Raises ShapeError if a block of several columns does not match ``gemm.group_size``.
    """
    import torch

    layout = cpu_layout(gemm)
    element = get_type(gemm.weight)
    arrays = {"words": (words or packed_words)(layout, weight, recoding_of(layout, element))}
    where = arrays["words"].device
    if factors := factors_of(gemm, weight):
        packed = {f"{name}s": _super_blocks(layout, gemm, each, transpose) for name, each in factors.items()}
        row_scale = torch.ones(layout.padded_n(gemm.n), dtype=torch.float32, device=where)
        return {**arrays, **packed, "row_scale": row_scale}
    factor = 1.0 if weight.tensor_scale is None else float(weight.tensor_scale)
    scale = None if weight.scale is None else _rows(weight, weight.scale, factor)
    if gemm.scale:
        assert scale is not None  # `ladder.runtime.packed.pack` has looked
        arrays["scales"] = _grouped(layout, gemm, stored_numbers(gemm, "scale", scale), transpose)
    if gemm.zero != "none":
        # Where packed codes count from the smallest value, so do zero points.
        zero = _rows(weight, weight.zero)
        if layout.lane == 8:
            narrow = zero.dtype.itemsize == 1 and not zero.dtype.is_floating_point
            zero = (zero.int() if narrow else zero.double()) - offset_of(gemm.weight)
        arrays["zeros"] = _grouped(layout, gemm, stored_numbers(gemm, "zero", zero), transpose)
    row_scale = torch.ones(layout.padded_n(gemm.n), dtype=torch.float32, device=where)
    if not gemm.scale:
        row_scale[: gemm.n] = factor if scale is None else scale[:, 0].float()
    return {**arrays, "row_scale": row_scale}


def recoding_of(layout: CpuLayout, element: TType) -> Recoding:
    """Return what packing does to the codes of a type."""
    if layout.lane == 8:
        return Recoding(recoding(element)[0].astype(np.uint8), 0)
    return Recoding(None, int(element.valid_codes()[abs(element.probe_values()).argmin()]))


def packed_words(layout: CpuLayout, weight: QuantizedTensor, change: Recoding) -> torch.Tensor:
    """Pack the codes of a matrix by calls of torch, on any device."""
    return pack_codes(layout, recoded(as_torch(weight.codes()), change), change.fill)


def recoded(codes: torch.Tensor, change: Recoding) -> torch.Tensor:
    """Return the entries of a table that codes name."""
    import torch

    if change.table is None or change.flip is not None:
        return codes ^ change.flip if change.flip else codes
    return torch.from_numpy(change.table).to(codes.device)[codes.to(torch.int32)]


def _rows(weight: QuantizedTensor, array: Any, factor: float = 1.0) -> torch.Tensor:
    """Return a scale or zero array, times a factor, as [N, groups], one row per row of the matrix.

    Numbers are those of the array, or rounded to float64.
    """
    import torch

    if not isinstance(array, torch.Tensor):
        array = torch.from_numpy(np.asarray(array).astype(np.float64))
    elif array.dtype.itemsize == 1 and array.is_floating_point():
        array = array.float()
    rows: torch.Tensor = array if factor == 1.0 else array.double() * factor
    height = weight.block[0]
    return rows if height == 1 else rows.repeat_interleave(height, 0)[: weight.shape[0]]


def _grouped(layout: CpuLayout, gemm: Gemm, values: torch.Tensor, transpose: Transpose) -> torch.Tensor:
    """Return the bytes of ``[groups, N padded]`` numbers, zero where nothing is stored."""
    import torch

    groups = layout.groups(gemm.k)
    expected = 1 if layout.group == 0 else -(-gemm.k // layout.group)
    if values.shape[1] != expected:
        raise ShapeError(
            f"the operator has {expected} groups along K={gemm.k}, the weight has {values.shape[1]}; "
            f"quantize with group_size={gemm.group_size}"
        )
    if (groups, layout.padded_n(gemm.n)) == (expected, gemm.n):
        return transpose(values)[..., None].view(torch.uint8)
    result = torch.zeros(groups, layout.padded_n(gemm.n), dtype=values.dtype, device=values.device)
    result[:expected, : gemm.n] = values.T
    return result[..., None].view(torch.uint8)


def pack_codes(layout: CpuLayout, codes: torch.Tensor, fill: int = 0) -> torch.Tensor:
    """Pack codes.

    layout: Where each code goes.
    codes: ``[N, K]`` of any integer dtype.
    fill: Code of the padding.
    Returns: uint32 words of shape ``layout.shape(N, K)``.
    """
    import torch

    n, k = int(codes.shape[0]), int(codes.shape[1])
    blocks, units, words = layout.shape(n, k)
    result = torch.empty(blocks, units, words, dtype=torch.int32, device=codes.device)
    step = max(1, CHUNK // (ROWS * units * UNIT))
    for first in range(0, blocks, step):
        rows = codes[first * ROWS : (first + step) * ROWS]
        height = min(step, blocks - first) * ROWS
        padded = padded_codes(layout, rows, height, units * UNIT, fill)
        result[first : first + step] = _pack_blocks(layout, padded)
    return result.view(torch.uint32)


def padded_codes(layout: CpuLayout, codes: torch.Tensor, height: int, width: int, fill: int) -> torch.Tensor:
    """Return ``[height, width]`` codes, in bytes if they fit, with each group padded to its packed width."""
    import torch

    dtype = torch.uint8 if layout.bits <= 8 else torch.int64
    result = torch.full((height, width), fill, dtype=dtype, device=codes.device)
    n, k = codes.shape
    if layout.group in (0, layout.padded_group):
        result[:n, :k] = codes
        return result
    for group in range(-(-k // layout.group)):
        part = codes[:, group * layout.group : (group + 1) * layout.group]
        start = group * layout.padded_group
        result[:n, start : start + part.shape[1]] = part
    return result


def _pack_blocks(layout: CpuLayout, codes: torch.Tensor) -> torch.Tensor:
    """Pack whole units: ``[16 * blocks, 32 * units]`` codes -> int32 words, byte by byte of all words."""
    import torch

    blocks, units, e = codes.shape[0] // ROWS, codes.shape[1] // UNIT, layout.elements
    shape = 4, blocks, units, layout.bits, LANES
    octets = torch.zeros(shape, dtype=torch.uint8, device=codes.device)
    for plane in layout.planes:
        steps = codes.reshape(blocks, ROWS, units, plane.width, plane.slots, e)
        cells = steps.permute(4, 5, 0, 2, 3, 1).contiguous()
        target = octets[:, :, :, plane.start : plane.start + plane.width]
        pieces = product(range(plane.slots), range(e), range(0, plane.width, 8))
        for slot, element, piece in pieces:
            bits = (cells[slot, element] >> (plane.shift + piece)) & ((1 << min(plane.width, 8)) - 1)
            octet, bit = divmod(layout.lane * element + plane.width * slot + piece, 8)
            target[octet] |= bits.to(torch.uint8) << bit
    lines = octets.permute(1, 2, 3, 4, 0).contiguous().view(torch.int32)
    return lines.reshape(blocks, units, -1)


def unpack(gemm: Gemm, words: torch.Tensor) -> torch.Tensor:
    """Return the codes ``[N, K]`` that `pack` stored: its exact inverse on valid codes.

    gemm: The problem it was packed for.
    words: The array ``words`` of `pack`.
    Returns: int64 codes.
    """
    import torch

    layout = cpu_layout(gemm)
    codes = unpack_codes(layout, words, gemm.n, gemm.k)
    if layout.lane == 8:
        codes = torch.from_numpy(recoding(get_type(gemm.weight))[1]).to(codes.device)[codes]
    return codes


def unpack_codes(layout: CpuLayout, words: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Return the int64 codes ``[n, k]`` of packed words."""
    import torch

    blocks, units, _ = layout.shape(n, k)
    e = layout.elements
    values = words.view(torch.int32).to(torch.int64).reshape(blocks, units, layout.bits, LANES)
    codes = torch.zeros(blocks, units, layout.steps, LANES, e, dtype=torch.int64, device=words.device)
    for plane in layout.planes:
        part = values[:, :, plane.start : plane.start + plane.width]
        target = codes.view(blocks, units, plane.width, plane.slots, LANES, e)
        for slot in range(plane.slots):
            for element in range(e):
                bits = part >> (layout.lane * element + plane.width * slot)
                target[:, :, :, slot, :, element] |= (bits & ((1 << plane.width) - 1)) << plane.shift
    flat = codes.permute(0, 3, 1, 2, 4).reshape(blocks * ROWS, units * UNIT)
    if layout.group in (0, layout.padded_group):
        return flat[:n, :k].contiguous()
    starts = range(0, layout.groups(k) * layout.padded_group, layout.padded_group)
    return torch.cat([flat[:n, s : s + layout.group] for s in starts], 1)[:, :k].contiguous()
