"""Products and convolutions of integers of 8 bits, exact: by instructions for bytes, or in floats.

Sums of products of codes less their zero points are taken apart: the library multiplies codes, and what the
zero points add is a rank-one correction. What follows from a stored matrix alone is kept with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import torch

from ladder.runtime import byte_products
from ladder.runtime.byte_products import has_kernels
from ladder.runtime.onnx_ops.operation import Operation
from ladder.runtime.onnx_ops.values import wide
from ladder.runtime.onnx_ops.windows import convolved, settings, window_counts, window_pads
from ladder.runtime.stored_codes import BYTES, kept

FARTHEST = 255
"""Largest distance of a code of 8 bits from its zero point."""

WHOLE = 1 << 24
"""Up to here float32 holds every whole number."""

SIGN = 128
"""Offset of unsigned codes from signed ones, and the bit in which they differ."""


@cache
def has_dot_products() -> bool:
    """Tell whether the processor sums products of bytes in 32 bits; without, libraries may saturate in 16."""
    return bool(torch.cpu._is_vnni_supported())


@cache
def takes_unsigned() -> bool:
    """Tell whether torch multiplies unsigned with signed bytes: before 2.12 it takes signed ones alone."""
    try:
        torch._int_mm(torch.zeros(1, 1, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.int8))
    except RuntimeError:
        return False
    return True


def less_zero(x: Any, zero: Any, axis: int | None = None) -> Any:
    """Return codes without their zero point, as int32."""
    value = wide(x).to(torch.int32)
    return value if zero is None else value - along(wide(zero).to(torch.int32), axis, value.ndim)


def along(parameter: Any, axis: int | None, rank: int) -> Any:
    """Return a number per slice of an axis as it broadcasts; one number has no axes."""
    if parameter.ndim != 1 or axis is None or parameter.numel() == 1:
        return parameter.reshape(()) if parameter.numel() == 1 else parameter
    return parameter.reshape([-1 if at == axis % rank else 1 for at in range(rank)])


def signed(codes: torch.Tensor) -> torch.Tensor:
    """Return unsigned codes less `SIGN`, and signed ones as they are."""
    return (codes ^ SIGN).view(torch.int8) if codes.dtype == torch.uint8 else codes


def unsigned(codes: torch.Tensor) -> torch.Tensor:
    """Return signed codes plus `SIGN`, and unsigned ones as they are."""
    return codes.view(torch.uint8) ^ SIGN if codes.dtype == torch.int8 else codes


# products ----------------------------------------------------------------------------------------------


def whole_product(a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
    """Return the product of two tensors of codes less their zero points, int32.

    a, b: Codes; batches broadcast.
    a_zero, b_zero: One, or one per row and one per column; none is 0.
    """
    if has_dot_products() and _is_of_bytes(a, b, a_zero, b_zero):
        return _byte_product(a, b, a_zero, b_zero)
    if _is_of_bytes(a, b, a_zero, b_zero) and (a_zero is None or a_zero.numel() == 1) and has_kernels():
        return _kernel_product(a, b, a_zero, b_zero)
    left = less_zero(a, a_zero, -2 if a.ndim > 1 else None)
    if b.ndim == 2 and a.ndim > 1 and _exact_type(1) == torch.float32:
        return _float_product(left, b, b_zero)
    right = less_zero(b, b_zero, -1)
    exact = _exact_type(left.shape[-1] * FARTHEST * FARTHEST)
    return torch.matmul(left.to(exact), right.to(exact)).to(torch.int64).to(torch.int32)


LONGEST = WHOLE // (FARTHEST * FARTHEST)
"""Products of codes less their zero points whose sum float32 holds."""

MOST_FLOATS = 1 << 24
"""Elements of a matrix of codes that is kept as float32, too."""


def _float_product(left: Any, b: Any, b_zero: Any) -> Any:
    """Return a product with a matrix of codes, int32: sums of as many products as float32 holds."""
    matrix = kept(b, "float32", torch.Tensor.float) if b.numel() <= MOST_FLOATS else b.float()
    rows = left.flatten(0, -2).to(torch.float32)
    total = torch.zeros(rows.shape[0], b.shape[1], dtype=torch.int32, device=rows.device)
    for begin in range(0, rows.shape[1], LONGEST):
        part = slice(begin, begin + LONGEST)
        total += torch.mm(rows[:, part], matrix[part]).to(torch.int32)
    if b_zero is not None:
        total -= left.flatten(0, -2).sum(1, keepdim=True, dtype=torch.int32) * b_zero.to(torch.int32)
    return total.reshape(*left.shape[:-1], b.shape[1])


def _exact_type(largest: int) -> torch.dtype:
    """Return a type in which sums up to a number are exact."""
    plain = largest <= WHOLE and torch.get_float32_matmul_precision() == "highest"
    return torch.float32 if plain else torch.float64


def _is_of_bytes(a: Any, b: Any, *zeros: Any) -> bool:
    shapes = a.ndim > 1 and b.ndim == 2 and a.numel() > 0 and b.numel() > 0
    plain = all(zero is None or zero.ndim < 2 for zero in zeros)
    return shapes and plain and a.dtype in BYTES and b.dtype in BYTES and a.device.type == "cpu"


def signed_columns(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix as signed codes, and their sums; of one that stays they are made once."""
    return kept(b, "columns", _columns)  # type: ignore[no-any-return]


def _columns(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix as signed codes, and their sums along its columns."""
    codes = signed(b).contiguous()
    return codes, torch._int_mm(torch.ones(1, b.shape[0], dtype=torch.int8), codes)


def _byte_product(a: Any, b: Any, a_zero: Any, b_zero: Any) -> Any:
    codes, sums = signed_columns(b)
    rows = a.reshape(-1, a.shape[-1])
    if rows.dtype == torch.uint8 and not takes_unsigned():
        total = torch._int_mm(signed(rows), codes) + SIGN * sums
    else:
        total = torch._int_mm(rows, codes)
    less = None if a_zero is None else _per_row(a_zero.to(torch.int32), a)
    if less is not None:
        total -= less * sums
    more = signed_zero(b, b_zero)
    if more is not None:
        inner = rows.sum(1, keepdim=True, dtype=torch.int32)
        total -= more * (inner if less is None else inner - less * rows.shape[1])
    return total.reshape(*a.shape[:-1], b.shape[1])


def _kernel_product(a: Any, b: Any, a_zero: Any, b_zero: Any) -> Any:
    rows, right = a.reshape(-1, a.shape[-1]), matrix_columns(b, byte_products.host_depth())
    total = byte_products.product(rows, a_zero, right, b.shape[1], unsigned_zero(b, b_zero))
    return total.reshape(*a.shape[:-1], b.shape[1])


def matrix_columns(b: torch.Tensor, depth: int) -> byte_products.Columns:
    """Return a matrix of codes as kernels take it; of one that stays it is made once."""
    return kept(  # type: ignore[no-any-return]
        b, ("columns", depth), lambda x: byte_products.columns_of(unsigned(x), depth)
    )


def _per_row(zero: Any, a: Any) -> Any:
    """Return zero points per row of a batch of matrices for all rows of the batch."""
    if zero.numel() == 1:
        return zero.reshape(())
    return zero.expand(a.shape[:-1]).reshape(-1, 1)


def signed_zero(codes: Any, zero: Any) -> Any:
    """Return the zero point of codes made `signed`, int32; None if it is 0."""
    if codes.dtype == torch.uint8:
        return (0 if zero is None else zero.to(torch.int32)) - torch.tensor(SIGN, dtype=torch.int32)
    if zero is None or not kept(zero, "any", lambda x: bool(x.any())):
        return None
    return zero.to(torch.int32)


def unsigned_zero(codes: Any, zero: Any) -> Any:
    """Return the zero point of codes made `unsigned`, int32."""
    offset = torch.tensor(0 if codes.dtype == torch.uint8 else SIGN, dtype=torch.int32)
    return offset if zero is None else zero.to(torch.int32) + offset


# convolutions ------------------------------------------------------------------------------------------


def whole_convolution(op: Operation, x: Any, w: Any, x_zero: Any = None, w_zero: Any = None) -> Any:
    """Return the convolution of codes less their zero points: whole numbers in a type that holds them."""
    if _is_image_of_bytes(x, w, x_zero) and fills_blocks(op, w) and has_kernels():
        return _kernel_convolution(op, x, w, x_zero, w_zero)
    left = less_zero(x, x_zero)
    if w_zero is None or not kept(w_zero, "any", lambda z: bool(z.any())):
        right = kept(w, "exact", _exact_weight)
    else:
        right = _exact_weight(less_zero(w, w_zero, 0))
    return convolved(op, left.to(right.dtype), right)


def _exact_weight(codes: Any) -> Any:
    """Return a weight of codes in a type that holds its sums of products with codes."""
    whole = less_zero(codes, None)
    return whole.to(_exact_type(int(whole.abs().flatten(1).sum(1).max()) * FARTHEST if whole.numel() else 0))


def _is_image_of_bytes(x: Any, w: Any, x_zero: Any) -> bool:
    plain = x.ndim in (3, 4) and x.dtype in BYTES and w.dtype in BYTES and x.device.type == "cpu"
    return plain and bool(x.numel() and w.numel()) and (x_zero is None or x_zero.numel() == 1)


def fills_blocks(op: Operation, w: Any) -> bool:
    """Tell whether a kernel's words and rows are used: not where each channel is a group of its own."""
    return bool(w.shape[1] > 1 or w.shape[0] // op.get("group", 1) >= byte_products.ROWS)


def _kernel_convolution(op: Operation, x: Any, w: Any, x_zero: Any, w_zero: Any) -> Any:
    form = convolution_form(op, x.shape, w.shape, byte_products.host_depth())
    if form is None:
        return convolved(op, x.float(), w.float())  # no window fits: empty
    return form(x, byte_products.zero_of(x, x_zero), weight_words(op, w, w_zero, form.window.depth))


def weight_words(op: Operation, w: torch.Tensor, w_zero: Any, depth: int) -> byte_products.Words:
    """Return the weight of a convolution as kernels take it; of one that stays it is made once."""
    groups, less = op.get("group", 1), [] if w_zero is None else w_zero.reshape(-1).tolist()

    def made(codes: torch.Tensor) -> byte_products.Words:
        image = signed(codes.unsqueeze(2) if w.ndim == 3 else codes)
        zero = signed_zero(codes, w_zero)
        return byte_products.kernel_words(image, torch.zeros(1) if zero is None else zero, groups, depth)

    return kept(w, ("words", groups, depth, *less), made)  # type: ignore[no-any-return]


def convolution_form(
    op: Operation, shape: Sequence[int], kernel: Sequence[int], depth: int
) -> byte_products.Convolution | None:
    """Return how kernels convolve codes of a shape, with rows of their own if they have none.

    None if no window fits.
    """
    known = op.once(dict)
    key = (*shape, *kernel, depth)
    if key not in known:
        if len(known) > MOST_FORMS:
            known.clear()
        known[key] = _new_form(op, shape, kernel, depth)
    return known[key]  # type: ignore[no-any-return]


MOST_FORMS = 64
"""Shapes whose forms a node keeps."""


def _new_form(op: Operation, shape: Sequence[int], kernel: Sequence[int], depth: int) -> Any:
    strides, gaps = settings(op, len(shape) - 2)
    low, high = window_pads(op, shape[2:], kernel[2:], strides, gaps)
    out = window_counts(shape, kernel[2:], strides, gaps, low, high)
    if min(out) < 1:
        return None
    extents: Sequence[int] = shape[2:]
    values: Sequence[Sequence[int]] = (out, kernel[2:], strides, gaps, low)
    if prod(kernel[2:]) == prod(strides) == 1 and not any((*low, *high)):  # an image is a row of windows
        extents, values = (prod(extents),), ((prod(out),), (1,), (1,), (1,), (0,))
    alone = 2 - len(extents)
    counts, taps, steps, apart, before = (
        (*(first,) * alone, *value) for first, value in zip((1, 1, 1, 1, 0), values, strict=True)
    )
    window = byte_products.Window(counts, taps, steps, apart, before, depth)
    image, result = (*shape[:2], *(1,) * alone, *extents), (shape[0], kernel[0], *out)
    return byte_products.convolution(image, result, op.get("group", 1), window)
