"""optimum-quanto: int8 and fp8 by rows, int4 and int2 in groups along rows.

``w = q * scale``, or ``w = q * scale - shift`` in groups, each step rounded to the type of the scales. Codes
of 4 and 2 bits lie in bytes along the first axis: all first rows in the lowest bits. Source: quanto
``tensor/qbytes.py``, ``tensor/qbits.py``, ``tensor/packed.py``.

A file does not say how many groups a row has: what is read has a group in each row, and `regrouped` gives it
the rows of its layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ladder.formats.compressed import EIGHT_BIT, scale_name
from ladder.formats.layer import SCALES, Format, Layer, Shape
from tile_types import QuantizedTensor, get_type

if TYPE_CHECKING:
    import torch

CODES, PACKED = "._data", "._data._data"
SCALE, SHIFT = "._scale", "._shift"
WIDTHS = (4, 2)
"""Bits of codes that share bytes."""


def read(layer: Layer) -> QuantizedTensor | torch.Tensor:
    """Read codes of 8 bits; those of convolutions, which are no matrices, are dequantized."""
    import torch

    n, *rest = layer.shape(CODES)
    layer.require_type(SCALE, *SCALES)
    codes, scale = layer.tensor(CODES), layer.tensor(SCALE)
    by_rows = scale.numel() == n and scale.shape[:1] == (n,)
    layer.require(by_rows or scale.ndim == 0, f"scales have the shape {list(scale.shape)} for {n} rows")
    if len(rest) != 1:
        return codes.to(scale.dtype) * scale
    (k,) = rest
    return QuantizedTensor(
        get_type(EIGHT_BIT[layer[CODES].dtype]),
        (n, k),
        codes.view(torch.uint8),
        (1 if by_rows else n, k),
        scale=scale.reshape(-1, 1),
        scale_type=scale_name(scale),
    )


def groups_shape(layer: Layer) -> Shape:
    """Return the number of groups and the codes in one."""
    groups, one = layer.shape(SCALE, 2)
    rows, size = layer.shape(PACKED, 2)
    layer.require(one == 1, f"its scales have the shape {[groups, one]}")
    layer.require(len(_widths(groups, rows)) == 1, f"{rows} rows of bytes beside {groups} groups")
    return groups, size


def _widths(groups: int, rows: int) -> list[int]:
    """Return the bits of codes that fill so many rows of bytes."""
    return [bits for bits in WIDTHS if rows == -(-groups * bits // 8)]


def read_groups(layer: Layer) -> QuantizedTensor:
    """Read codes of 4 or 2 bits, a group in each row."""
    import torch

    groups, size = groups_shape(layer)
    layer.require_type(SCALE, *SCALES)
    layer.require(layer.shape(SHIFT) == (groups, 1), f"shifts have the shape {list(layer.shape(SHIFT))}")
    layer.require_type(SHIFT, layer[SCALE].dtype, "int8", "uint8")
    words, scale, shift = layer.tensor(PACKED), layer.tensor(SCALE), layer.tensor(SHIFT)
    (bits,) = _widths(groups, len(words))
    parts = [words >> first & (1 << bits) - 1 for first in range(0, 8, bits)]
    integer = not shift.is_floating_point()
    return QuantizedTensor.from_codes(
        torch.cat(parts)[:groups],
        f"uint{bits}",
        (1, size),
        scale=scale,
        zero=shift if integer else None,
        zero_kind="integer" if integer else "none",
        offset=None if integer else -shift,
        scale_type=scale_name(scale),
    )


def regrouped(matrix: QuantizedTensor, extents: tuple[int, int]) -> QuantizedTensor:
    """Return groups as the matrix of a layer, several in each row; as they are if that is impossible."""
    n, k = extents
    groups, size = matrix.shape
    if groups * size != n * k or k % size or size * matrix.ttype.elem_bits % 8:
        return matrix
    arrays = {name: getattr(matrix, name) for name in ("scale", "zero", "offset")}
    shaped = {name: array.reshape(n, k // size) for name, array in arrays.items() if array is not None}
    return replace(matrix, shape=extents, storage=matrix.storage.reshape(n, -1), **shaped)


FORMATS = (
    Format(
        "quanto",
        CODES,
        lambda layer: layer[CODES].dtype in EIGHT_BIT,
        lambda layer: layer.shape(CODES),
        read,
        methods=("quanto",),
        parts=(SCALE,),
        result="",
        dtype="scale",
        doc="quanto's int8 and fp8, a scale for each row",
    ),
    Format(
        "quanto-groups",
        PACKED,
        lambda layer: layer[PACKED].dtype == "uint8",
        groups_shape,
        read_groups,
        methods=("quanto",),
        parts=(SCALE, SHIFT),
        result="",
        dtype="scale",
        rounding="each",
        by_groups=True,
        doc="quanto's int4 and int2, a group in each row",
    ),
)
