"""ATen operators as tile graph rows: arithmetic and moves. One row per overload.

A row takes the importer, the type of the first result, and the arguments as ATen has them (tensors are
names of values, sizes are extents). It returns a value, a tuple of values, or None: this form of the
operator stays a library call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ladder.frontend.aten_bits import BITS
from ladder.frontend.aten_curves import CURVES
from ladder.frontend.aten_functions import FUNCTIONS, trigonometric
from ladder.frontend.aten_gathers import GATHERS
from ladder.frontend.aten_moves import MOVES
from ladder.frontend.aten_ranges import counted, identity, spaced
from ladder.frontend.aten_reductions import REDUCTIONS
from ladder.frontend.aten_remainders import floored, left_over, remainder, truncated
from ladder.frontend.aten_scatters import SCATTERS
from ladder.frontend.aten_signs import SIGNS
from ladder.frontend.importer import HALVES, Importer, Row, attribute, held, wide_of
from ladder.ir.extents import larger, only_adds, product, total
from ladder.partition.elements import FLOATS8
from tile_types.arrays import own_name, torch_dtype
from tile_types.tile import Extent


def _arithmetic(operator: str, swapped: bool = False) -> Row:
    """Return the row of ``a op alpha * b``."""

    def row(im: Importer, out: str, a: Any, b: Any, alpha: float = 1) -> Any:
        if operator in ("add", "sub"):
            a, b, alpha = (_narrow(im, value, out) for value in (a, b, alpha))
        if alpha != 1 and _is_narrow(im, out):
            b = im.apply("mul", [b, alpha], "float32")
        elif alpha != 1:
            b = im.arithmetic("mul", [b, alpha], out)
        return im.arithmetic(operator, [b, a] if swapped else [a, b], out)

    return row


def _is_narrow(im: Importer, out: str) -> bool:
    """Tell whether eager rounds numbers to the 16 bits of a sum or power: its kernels for CPUs do."""
    return im.precise and im.on_cpu and out in HALVES


def _narrow(im: Importer, value: Any, out: str) -> Any:
    """Return a number, or a tensor of rank 0 of a wider type, as those kernels take it."""
    if not _is_narrow(im, out):
        return value
    if im.is_value(value):
        return value if im.ttype(value) in (out, "bool") else im.g.add("convert", value, type=out, exact=True)
    return value if isinstance(value, str | bool) else held(value, out)


def _floats(operator: str) -> Row:
    """Return the row of real functions; those that we approximate for float32 alone stay calls in float64."""

    def row(im: Importer, out: str, *operands: Any) -> Any:
        return None if out == "float64" and operator in SINGLE else im.floats(operator, operands, out)

    return row


SINGLE = ("tanh", "erf")


def _divided(im: Importer, out: str, a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return im.floats("div", [a, b], out)
    return (floored if rounding_mode == "floor" else truncated)(im, out, a, b)


def _compared(operator: str, swapped: bool = False, negated: bool = False) -> Row:
    def row(im: Importer, out: str, a: Any, b: Any) -> Any:
        common = own_name(torch.result_type(*(_like(im, value) for value in (a, b))))
        a, b = (_as_compared(im, value, common) for value in (a, b))
        value = im.apply(operator, [b, a] if swapped else [a, b], COMPARED.get(common, common))
        return im.g.add("negation", value) if negated else value

    return row


COMPARED = {
    **dict.fromkeys(("bool", "int8", "uint8", "int16", "uint16"), "int32"),
    **dict.fromkeys(("float16", "bfloat16", *FLOATS8), "float32"),
}
"""Type in which torch compares -> one that holds its values, and that kernels compare."""


def _as_compared(im: Importer, value: Any, common: str) -> Any:
    """Return an operand of a comparison as a type holds it."""
    if isinstance(value, int | float):
        return held(value, common)
    if not im.is_value(value):
        return value
    value = im.stepped(value)
    if common == "int16" or im.ttype(value) == common:
        return value
    if common in FLOATS8:
        return im.cast(value, common)
    return im.g.add("convert", value, type=common, exact=common in HALVES)


def _like(im: Importer, value: Any) -> Any:
    """Return what decides promotion: a number, or an empty tensor of that type, of rank 0 or not."""
    if not im.is_value(value):
        return 1 if isinstance(value, str) else value
    shape = (0,) if im.shape(value) else ()
    return torch.empty(shape, dtype=torch_dtype(im.ttype(value)), device="meta")


def _power(im: Importer, out: str, base: Any, exponent: Any) -> Any:
    """Small constant exponents are products and roots; powers of integers, which wrap, are torch's."""
    if not out.startswith(("float", "bfloat")):
        return None
    if not isinstance(exponent, int | float):
        return im.floats("pow", [base, exponent], out)
    exponent = held(exponent, out) if out in HALVES else exponent
    if exponent == 0.75:
        return im.cast(_three_quarters(im, im.operand(base, wide_of(out)), wide_of(out)), out)
    root = {0.5: "sqrt", -0.5: "rsqrt"}.get(exponent)
    if root is not None:
        return im.cast(im.apply(root, [base], wide_of(out)), out)
    if exponent in PRODUCTS:
        return im.cast(_product(im, im.operand(base, wide_of(out)), int(exponent), wide_of(out)), out)
    return im.floats("pow", [base, exponent], out)


PRODUCTS = (*range(2, 9), -1, -2)
"""Exponents of powers that are products, or quotients of 1 by one, which torch takes too."""


def _product(im: Importer, x: str, exponent: int, wide: str) -> str:
    """Return a power by squares and products of them."""
    left, power, found = abs(exponent), x, ""
    while left:
        if left % 2:
            found = im.g.add("mul", power, found) if found else power
        left //= 2
        power = im.g.add("square", power) if left else power
    return found if exponent > 0 else im.g.add("div", im.number(1.0, wide), found)


def _three_quarters(im: Importer, x: str, wide: str) -> str:
    """Return the power 3/4, of local response normalization, by two roots; of -inf it is inf, as of inf."""
    root = im.apply("sqrt", [x], wide)
    power = im.apply("mul", [root, im.apply("sqrt", [root], wide)], wide)
    magnitude = im.apply("abs", [x], wide)
    return im.g.add("select", im.apply("less", [magnitude, math.inf], wide), power, magnitude)


def _gelu(im: Importer, out: str, x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return im.floats("gelu_tanh", [x], out)
    return None if out == "float64" else im.floats("gelu", [x], out)


def _clamped(im: Importer, out: str, x: Any, low: Any = None, high: Any = None) -> Any:
    for operator, limit in (("maximum", low), ("minimum", high)):
        if limit is None or limit == (-math.inf if operator == "maximum" else math.inf):
            continue
        limit = held(limit, out) if isinstance(limit, int | float) else limit
        x = _extreme(operator)(im, out, x, limit)
    return im.cast(x, out)


def _extreme(operator: str) -> Row:
    """Return the row of an extreme, whose operands torch converts to the type of the result."""

    def row(im: Importer, out: str, *operands: Any) -> Any:
        held_by_type = [_rounded(im, value, out) if isinstance(value, str) else value for value in operands]
        return im.arithmetic(operator, held_by_type, out)

    return row


def _rounded(im: Importer, value: str, ttype: str) -> str:
    """Return a value or an extent as a type holds it, also where computing goes on in a wider one."""
    value = im.operand(value, "int64") if not im.is_value(value) else value
    return value if im.ttype(value) == ttype else im.g.add("convert", value, type=ttype, exact=True)


def _chosen(im: Importer, out: str, condition: Any, yes: Any, no: Any) -> Any:
    operands = [im.operand(value, out) for value in (yes, no)]
    return im.g.add("select", im.cast(condition, "bool"), *operands)


def _filled(im: Importer, out: str, shape: Sequence[Extent], value: Any, **_: Any) -> Any:
    return im.expand(im.number(value, out), shape)


def _same(im: Importer, out: str, x: str, *_: Any, **__: Any) -> Any:
    return im.cast(x, out)


def _viewed(im: Importer, out: str, x: str, shape: Sequence[Extent]) -> Any:
    known = [extent for extent in shape if extent != -1]
    size = _quotient(product(im.shape(x)), product(known)) if len(known) < len(shape) else 0
    return im.reshape(x, [size if extent == -1 else extent for extent in shape])


def _quotient(size: Extent, part: Extent) -> Extent:
    """Divide what is a multiple: the names and the numbers of monomials."""
    if isinstance(size, int) and isinstance(part, int):
        return size // part if part else 0
    names, divisors = str(size).split("*"), str(part).split("*")
    number = math.prod(int(name) for name in names if name.isdecimal())
    by = math.prod(int(name) for name in divisors if name.isdecimal())
    rest = [name for name in names if not name.isdecimal()]
    for name in divisors:
        if name in rest:
            rest.remove(name)
    return product([number // by, *rest])


def _unsqueezed(im: Importer, out: str, x: str, axis: int) -> Any:
    shape = list(im.shape(x))
    shape.insert(axis % (len(shape) + 1), 1)
    return im.reshape(x, shape)


def _squeezed(im: Importer, out: str, x: str, axes: Any = None) -> Any:
    shape = im.shape(x)
    chosen = range(len(shape)) if axes is None else [axes] if isinstance(axes, int) else axes
    dropped = {axis % len(shape) for axis in chosen} if shape else set()
    return im.reshape(x, [extent for at, extent in enumerate(shape) if at not in dropped or extent != 1])


def _transposed(im: Importer, out: str, x: str, a: int = 0, b: int = 1) -> Any:
    order = list(range(len(im.shape(x))))
    if len(order) < 2:
        return x
    order[a], order[b] = order[b], order[a]
    return im.permute(x, order)


def _expanded(im: Importer, out: str, x: str, shape: Sequence[Extent], **_: Any) -> Any:
    lead = len(shape) - len(im.shape(x))
    own = [1] * lead + list(im.shape(x))
    return im.expand(x, [old if new == -1 else new for old, new in zip(own, shape, strict=True)])


def _sliced(
    im: Importer, out: str, x: str, axis: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    extent = im.shape(x)[axis]
    if not isinstance(extent, int) or not all(isinstance(at, int | None) for at in (start, end)):
        begin = _open_begin(im, extent, axis, start or 0)
        return None if begin is None or step != 1 else im.take_axis(x, axis, begin, im.stated[axis])
    first, last, step = slice(start, end, step).indices(extent)
    return im.take_axis(x, axis, first, max(0, -(-(last - first) // step)), step)


def _open_begin(im: Importer, extent: Extent, axis: int, start: Extent) -> Extent | None:
    """Return where a slice begins, of whose sizes torch knows the result's; None if that is not certain.

    It may be clamped at either end, which shows in the number of elements that are left.
    """
    count = im.stated[axis]
    if count == extent:
        return 0
    if (isinstance(start, int) and start >= 0) or only_adds(start):
        return start
    from_end = larger(total([extent, start]), 0)
    return from_end if isinstance(start, int) or only_adds(product([-1, start])) else None


def _selected(im: Importer, out: str, x: str, axis: int, index: Any) -> Any:
    shape = im.shape(x)
    if isinstance(index, str) and not only_adds(index) and not only_adds(product([-1, index])):
        return None  # from which end it counts depends on sizes
    at = index if only_adds(index) else total([shape[axis], index])
    one = im.take_axis(x, axis, at, 1)
    return im.reshape(one, [extent for place, extent in enumerate(shape) if place != axis % len(shape)])


def _split(im: Importer, out: str, x: str, sizes: Sequence[Extent] | Extent, axis: int = 0) -> Any:
    extent = im.shape(x)[axis]
    if isinstance(sizes, int):
        if not isinstance(extent, int):
            return None
        sizes = [min(sizes, extent - begin) for begin in range(0, extent, sizes)]
    assert not isinstance(sizes, str | int)
    begins: list[Extent] = [0]
    for size in sizes:
        begins.append(total([begins[-1], size]))
    return tuple(im.take_axis(x, axis, begin, size) for begin, size in zip(begins, sizes, strict=False))


def _unbound(im: Importer, out: str, x: str, axis: int = 0) -> Any:
    extent = im.shape(x)[axis]
    if not isinstance(extent, int):
        return None
    return tuple(_selected(im, out, x, axis, index) for index in range(extent))


def _joined(im: Importer, out: str, parts: Sequence[str], axis: int = 0) -> Any:
    kept = [im.cast(part, out) for part in parts if im.shape(part) != (0,)] or [im.cast(parts[0], out)]
    return kept[0] if len(kept) == 1 else im.g.add("concat", *kept, axis=axis % len(im.shape(kept[0])))


def _stacked(im: Importer, out: str, parts: Sequence[str], axis: int = 0) -> Any:
    place = axis % (len(im.shape(parts[0])) + 1)
    return _joined(im, out, [_unsqueezed(im, out, part, place) for part in parts], place)


def _padded(im: Importer, out: str, x: str, width: Sequence[int], value: float = 0.0) -> Any:
    rank = len(im.shape(x))
    if not all(isinstance(extent, int) for extent in width):
        return None
    low, high = [0] * rank, [0] * rank
    for at in range(len(width) // 2):
        low[rank - 1 - at], high[rank - 1 - at] = width[2 * at], width[2 * at + 1]
    for axis, (before, after) in enumerate(zip(low, high, strict=True)):
        extent = im.shape(x)[axis]
        if min(before, after) < 0:  # what is cut off
            if not isinstance(extent, int) or extent + min(before, 0) + min(after, 0) <= 0:
                return None
            x = im.take_axis(x, axis, max(-before, 0), extent + min(before, 0) + min(after, 0))
    low, high = [max(n, 0) for n in low], [max(n, 0) for n in high]
    if not any(low + high):
        return x
    return im.g.add("pad", x, low=tuple(low), high=tuple(high), value=attribute(value, im.ttype(x)))


def _repeated(im: Importer, out: str, x: str, times: Sequence[Extent]) -> Any:
    own = [1] * (len(times) - len(im.shape(x))) + list(im.shape(x))
    pairs = [*zip(times, own, strict=True)]
    apart = im.reshape(x, [extent for _, size in pairs for extent in (1, size)])
    return im.reshape(im.expand(apart, [extent for pair in pairs for extent in pair]), [*map(product, pairs)])


WHOLE = (1 << 63) - 1
"""The end of a slice that has none."""


def _put_slice(
    im: Importer,
    out: str,
    x: str,
    part: str,
    axis: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> Any:
    """Join what lies before, the part, and what lies after."""
    extent = im.shape(x)[axis]
    if step != 1 or not all(isinstance(at, int | None) for at in (start, end)):
        return None
    if not start and (end is None or end == WHOLE):
        return _joined(im, out, [part], axis)
    if not isinstance(extent, int):
        return None
    first, last, _ = slice(start, end).indices(extent)
    sides = ((0, first), (last, extent - last))
    before, after = ([im.take_axis(x, axis, begin, size)] if size else [] for begin, size in sides)
    return _joined(im, out, [*before, part, *after], axis) if last > first else x


def _put_one(im: Importer, out: str, x: str, part: str, axis: int, index: Any) -> Any:
    extent = im.shape(x)[axis]
    if not isinstance(extent, int) or not isinstance(index, int):
        return None
    at = index % extent
    return _put_slice(im, out, x, _unsqueezed(im, out, part, axis % len(im.shape(x))), axis, at, at + 1)


def _sign(im: Importer, out: str, x: str) -> Any:
    if out == "bool":
        return x
    x, common = im.stepped(x), COMPARED.get(out, out)
    above, below = (im.apply("less", pair, common) for pair in ([0, x], [x, 0]))
    return im.arithmetic("sub", [im.cast(above, out), im.cast(below, out)], out)


def _whole(name: str) -> Row:
    """Return the row of a function that leaves whole numbers as they are."""
    return lambda im, out, x: (
        im.floats(name, [im.stepped(x)], out) if out.startswith(("float", "bfloat")) else x
    )


def _ceiling(im: Importer, out: str, x: str) -> Any:
    if not out.startswith(("float", "bfloat")):
        return None
    return im.arithmetic("neg", [im.floats("floor", [im.arithmetic("neg", [im.stepped(x)], out)], out)], out)


_COMPARISONS = {
    "lt": _compared("less"), "le": _compared("less_equal"), "eq": _compared("equal"),
    "gt": _compared("less", swapped=True), "ge": _compared("less_equal", swapped=True),
    "ne": _compared("equal", negated=True),
}  # fmt: skip

ROWS: dict[str, Row] = {
    **{f"{name}.{form}": row for name, row in _COMPARISONS.items() for form in ("Tensor", "Scalar")},
    **{f"add.{form}": _arithmetic("add") for form in ("Tensor", "Scalar")},
    **{f"sub.{form}": _arithmetic("sub") for form in ("Tensor", "Scalar")},
    **{f"mul.{form}": _arithmetic("mul") for form in ("Tensor", "Scalar")},
    **{f"rsub.{form}": _arithmetic("sub", swapped=True) for form in ("Tensor", "Scalar")},
    **{f"div.{form}": _divided for form in ("Tensor", "Scalar", "Tensor_mode", "Scalar_mode")},
    **{f"remainder.{form}": remainder for form in ("Scalar", "Tensor")},
    **{f"fmod.{form}": left_over for form in ("Scalar", "Tensor")},
    "floor_divide.default": floored,
    **{f"pow.{form}": _power for form in ("Tensor_Scalar", "Tensor_Tensor", "Scalar")},
    **{f"clamp.{form}": _clamped for form in ("default", "Tensor")},
    **{
        f"{name}.default": _floats(row)
        for name, row in {
            **{name: name for name in ("exp", "exp2", "log", "log2", "log10", "sqrt", "rsqrt", "tanh")},
            **{name: name for name in ("sigmoid", "silu")},
        }.items()
    },
    **{f"{name}.default": trigonometric(name) for name in ("sin", "cos")},
    "erf.default": lambda im, out, x: None if out == "float64" else im.floats("erf", [x], out),
    "reciprocal.default": lambda im, out, x: im.floats("div", [1.0, x], out),
    # A view that torch negates where it is read, as of what is conjugate; kernels read memory as it is.
    **{f"{name}.default": lambda im, out, x: im.arithmetic("neg", [x], out) for name in ("neg", "_neg_view")},
    "abs.default": lambda im, out, x: im.arithmetic("abs", [x], out),
    **{f"{name}.default": _whole(name) for name in ("round", "floor")},
    "ceil.default": _ceiling,
    "sign.default": _sign,
    "relu.default": lambda im, out, x: im.arithmetic("relu", [x], out),
    "gelu.default": _gelu,
    **{f"{name}.default": _extreme(name) for name in ("maximum", "minimum")},
    "clamp_min.default": lambda im, out, x, low: _clamped(im, out, x, low),
    "clamp_max.default": lambda im, out, x, high: _clamped(im, out, x, None, high),
    "hardtanh.default": lambda im, out, x, low=-1.0, high=1.0: _clamped(im, out, x, low, high),
    "where.self": _chosen,
    "masked_fill.Scalar": lambda im, out, x, mask, value: _chosen(im, out, mask, value, x),
    **BITS,
    "full.default": _filled,
    "full_like.default": lambda im, out, x, value, **_: _filled(im, out, im.shape(x), value),
    "zeros.default": lambda im, out, shape, **_: _filled(im, out, shape, 0),
    "ones.default": lambda im, out, shape, **_: _filled(im, out, shape, 1),
    "scalar_tensor.default": lambda im, out, value, **_: _filled(im, out, (), value),
    **{f"arange.{form}": counted for form in ("default", "start", "start_step")},
    "linspace.default": spaced,
    "eye.default": identity,
    "eye.m": identity,
    "_to_copy.default": lambda im, out, x, *_, **__: im.converted(x, out),
    **{f"{name}.default": _same for name in ("clone", "detach", "alias", "lift_fresh_copy", "wait_tensor")},
    **{f"{name}.default": _viewed for name in ("view", "reshape", "_unsafe_view", "_reshape_copy")},
    "unsqueeze.default": _unsqueezed,
    **{f"squeeze.{form}": _squeezed for form in ("default", "dim", "dims")},
    "permute.default": lambda im, out, x, order: im.permute(x, order),
    "t.default": _transposed,
    "transpose.int": _transposed,
    "expand.default": _expanded,
    "slice.Tensor": _sliced,
    "select.int": _selected,
    "split_with_sizes.default": _split,
    "split.Tensor": _split,
    "unbind.int": _unbound,
    "cat.default": _joined,
    "stack.default": _stacked,
    "constant_pad_nd.default": _padded,
    "copy.default": lambda im, out, x, source, *_: im.expand(im.cast(source, out), im.shape(x)),
    "repeat.default": _repeated,
    "slice_scatter.default": _put_slice,
    "select_scatter.default": _put_one,
    **FUNCTIONS,
    **SIGNS,
    **CURVES,
    **MOVES,
    **GATHERS,
    **REDUCTIONS,
    **SCATTERS,
}  # fmt: skip
"""Name and overload -> row."""
