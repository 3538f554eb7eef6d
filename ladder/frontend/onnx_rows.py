"""ONNX operators as tile graph rows: arithmetic, moves and reductions. One row per operator.

A row takes a `Call` and returns a value, a tuple of values, or None: this form is not supported. What ATen
has too goes through its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from ladder.frontend.aten_rows import ROWS as ATEN
from ladder.frontend.borders import mirrored, padded
from ladder.frontend.importer import Importer, wide_of
from ladder.frontend.onnx_call import Call, Row, Value, element_type
from ladder.frontend.onnx_sizes import require_as_many
from ladder.frontend.onnx_values import Known, divided
from ladder.ir.extents import canonical, larger, only_adds, product, smaller, total
from ladder.ir.shapes import broadcast_shapes
from ladder.runtime.onnx_ops.moves import LONGEST, sliced_places
from tile_types.tile import Extent


def _aten(name: str) -> Row:
    """Return ATen's row of that name, for operands alone."""
    return lambda call: ATEN[name](call.im, call.out, *call.operands())


def _truth(name: str) -> Row:
    return lambda call: ATEN[name](call.im, "bool", *call.operands())


def _folded(name: str) -> Row:
    """Return the row of an operator of any number of operands."""

    def row(call: Call) -> Any:
        return reduce(lambda a, b: ATEN[name](call.im, call.out, a, b), call.operands())

    return row


WHOLE = ("int8", "uint8", "int16", "int32", "int64")
"""Integers whose quotients by known numbers kernels compute."""


def _divided(call: Call) -> Any:
    if "float" in call.out:
        return ATEN["div.Tensor"](call.im, call.out, *call.operands())
    divisor = call.known(1) if call.out in WHOLE else None
    if divisor is None or divisor.symbolic or np.isin(divisor.array, (0, -1)).any():
        return None  # torch runs it, and refuses 0
    return call.im.arithmetic("quotient", call.operands(), call.out)


def _powered(call: Call) -> Any:
    """Raise to a power; that of -1/2 is 0 for -inf and inf for -0.0; an inverse root is NaN and -inf."""
    base, exponent = call.operands()
    im, out = call.im, call.out
    if isinstance(exponent, float) and exponent == -0.5 and out.startswith(("float", "bfloat")):
        x = im.operand(base, wide_of(out))
        base = x if _is_never_negative(im, x) else _with_positive_ends(im, x)
    return ATEN["pow.Tensor_Scalar"](im, out, base, exponent)


def _with_positive_ends(im: Importer, x: str) -> str:
    """Return x with inf for -inf and 0.0 for -0.0."""
    magnitude = im.g.add("abs", x)
    finite = im.g.add("less", magnitude, im.operand(inf, im.ttype(x)))
    known = im.g.add("select", finite, x, magnitude)
    return im.g.add("select", im.g.add("less", x, im.operand(0.0, im.ttype(x))), known, magnitude)


def _is_never_negative(im: Importer, x: str) -> bool:
    """Tell whether a value is made of squares, their means and positive numbers alone, as in norms."""
    node = im.g.node(x)
    if node.operator == "mul":
        return node.inputs[0] == node.inputs[1]
    if node.operator == "constant":
        number = dict(node.attributes)["value"]
        return isinstance(number, int | float) and number > 0
    if node.operator in ("add", "div", "reduce_sum", "convert", "reshape"):
        return all(_is_never_negative(im, value) for value in node.inputs)
    return node.operator in ("square", "abs", "exp", "sigmoid")


def _clipped(call: Call) -> Any:
    low, high = (
        call.given[name]
        if name in call.given
        else call.optional(at)
        if call.is_computed(at)
        else call.number(at)
        for at, name in ((1, "min"), (2, "max"))
    )
    return ATEN["clamp.default"](call.im, call.out, call.tensor(0), low, high)


def _gelu(call: Call) -> Any:
    form = call.given.get("approximate", b"none").decode()
    return ATEN["gelu.default"](call.im, call.out, call.tensor(0), form)


def _cast(call: Call) -> Any:
    return _converted(call, element_type(call.given["to"], call.node.output[0]))


def _converted(call: Call, ttype: str) -> Any:
    """Convert; of floats of 8 bits ONNX says otherwise than torch what lies beyond the largest."""
    coded = _is_coded(ttype) or _is_coded(call.out)
    return None if coded and call.out != ttype else call.im.converted(call.tensor(0), ttype)


def _is_coded(ttype: str) -> bool:
    return ttype.startswith("fp8")


def _chosen(call: Call) -> Any:
    _, yes, no = call.operands()
    return ATEN["where.self"](call.im, call.ttype(1), call.tensor(0), yes, no)


def _is_infinite(call: Call) -> Any:
    """Compare with the infinities that are asked for."""
    asked = (("detect_positive", inf), ("detect_negative", -inf))
    wanted = [number for name, number in asked if call.given.get(name, 1)]
    found = [ATEN["eq.Tensor"](call.im, "bool", call.tensor(0), number) for number in wanted]
    if not found:
        return call.im.expand(call.im.number(0, "bool"), call.shape(0))
    return found[0] if len(found) == 1 else call.im.g.add("either", *found)


def _kept(call: Call) -> Any:
    """Return the operand: dropout does nothing outside of training."""
    if call.has(2) and call.number(2):
        return None
    return call.single(call.inputs[0])


# shapes ----------------------------------------------------------------------------------------------


def _size(call: Call) -> Value:
    count = product(call.shape(0))
    return Known(np.array(count, np.int64 if isinstance(count, int) else object))


def _reshaped(call: Call) -> Any:
    """Numbers 0 keep an extent (unless allowzero), -1 takes what is left."""
    shape, given = call.shape(0), call.extents(1)
    if not call.given.get("allowzero", 0):
        given = [shape[at] if extent == 0 else extent for at, extent in enumerate(given)]
    known = [extent for extent in given if extent != -1]
    left = divided(product(shape), product(known)) if len(known) < len(given) else 0
    target = [left if extent == -1 else extent for extent in given]
    require_as_many(shape, target)
    return call.im.reshape(call.tensor(0), target)


def _flattened(call: Call) -> Any:
    shape, axis = call.shape(0), call.given.get("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return call.im.reshape(call.tensor(0), [product(shape[:axis]), product(shape[axis:])])


def _unsqueezed(call: Call) -> Any:
    axes, shape = call.ints(1, "axes") or [], list(call.shape(0))
    rank = len(shape) + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        shape.insert(axis, 1)
    return call.im.reshape(call.tensor(0), shape)


def _squeezed(call: Call) -> Any:
    """Leave out axes of one element; open ones are taken to have one, which a call checks."""
    shape, axes = call.shape(0), call.ints(1, "axes")
    if axes is None and not all(isinstance(extent, int) for extent in shape):
        raise call.refuse("which open axes have one element is known when a model is called")
    if axes is None:
        axes = [at for at, extent in enumerate(shape) if extent == 1]
    chosen, value = {axis % len(shape) for axis in axes}, call.tensor(0)
    for axis in chosen:
        if isinstance(shape[axis], str):
            call.piece.limits.append((shape[axis], 1))
            value = call.im.take_axis(value, axis, 0, 1)
        elif shape[axis] != 1:
            raise call.invalid(f"axis {axis} has {shape[axis]} elements, not 1")
    return call.im.reshape(value, [extent for at, extent in enumerate(shape) if at not in chosen])


def _transposed(call: Call) -> Any:
    order = call.given.get("perm", list(range(len(call.shape(0))))[::-1])
    return call.im.permute(call.tensor(0), order)


def _expanded(call: Call) -> Any:
    target = broadcast_shapes([call.shape(0), tuple(map(canonical, call.extents(1)))])
    return call.im.expand(call.tensor(0), target)


def _joined(call: Call) -> Any:
    parts = [call.tensor(at) for at in range(len(call.inputs))]
    return ATEN["cat.default"](call.im, call.out, parts, call.given["axis"])


def _divided_up(call: Call) -> Any:
    axis, count = call.given.get("axis", 0), call.given.get("num_outputs", len(call.node.output))
    axis %= len(call.shape(0))
    extent = call.shape(0)[axis]
    sizes: list[Extent] = list(call.ints(1, "split") or [])
    if not sizes:
        if not isinstance(extent, int):
            return None
        part = -(-extent // count)
        sizes = [max(min(part, extent - at * part), 0) for at in range(count)]
    return ATEN["split_with_sizes.default"](call.im, call.out, call.tensor(0), sizes, axis)


def _sliced(call: Call) -> Any:
    value, shape = call.tensor(0), call.shape(0)
    starts, ends = (
        list(call.given[name]) if name in call.given else call.extents(at)
        for at, name in ((1, "starts"), (2, "ends"))
    )
    axes = call.ints(3, "axes") or list(range(len(starts)))
    steps = [min(step, LONGEST) for step in call.ints(4) or [1] * len(starts)]
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step < 1:
            value = _backward(call, value, axis, start, end, step)
            continue
        begin, count = _bounds(call, shape[axis], start, end, step)
        value = call.im.take_axis(value, axis, begin, count, 1 if count in (0, 1) else step)
    return value


def _backward(call: Call, value: str, axis: int, start: Extent, end: Extent, step: int) -> str:
    """Return a slice that goes from the end to the beginning of an axis."""
    extent = call.im.shape(value)[axis]
    if not (isinstance(start, int) and isinstance(end, int) and isinstance(extent, int) and step):
        raise call.refuse("a negative step needs known sizes")
    found = sliced_places(start, end, step, extent)
    return mirrored(call.im, value, axis, found.start if found else 0, len(found), -found.step)


def _bounds(call: Call, extent: Extent, start: Extent, end: Extent, step: int) -> tuple[Extent, Extent]:
    """Return where a slice begins and how many elements it has."""
    if isinstance(start, int) and isinstance(end, int) and isinstance(extent, int):
        found = sliced_places(start, end, step, extent)
        return found.start if len(found) else 0, len(found)
    first, last = _place(call, start, extent), _place(call, end, extent)
    span = larger(total([last, product([-1, first])]), 0)
    return first, divided(total([span, step - 1]), step) if step > 1 else span


LEAST_OPEN_END = 1 << 16
"""Ends of slices from which on the whole axis is meant: a longer axis is refused when a model is called."""


def _place(call: Call, position: Extent, extent: Extent) -> Extent:
    """Return an end of a slice, brought into the axis.

    Whether a size of terms of both signs counts from the end is not known before the call: it must not.
    """
    if isinstance(position, int):
        if position >= LEAST_OPEN_END:
            call.piece.limits.append((extent, position))
            return extent
        return larger(total([extent, position]), 0) if position < 0 else smaller(position, extent)
    if only_adds(length := product([-1, position])):
        call.piece.limits.append((1, length))
        return larger(total([extent, position]), 0)
    if not only_adds(position):
        call.piece.limits.append((0, position))
    return smaller(position, extent)


def _gathered(call: Call) -> Any:
    axis = call.given.get("axis", 0) % max(len(call.shape(0)), 1)
    known = call.known(1)
    if known is None or known.symbolic:
        return _taken(call, axis, _counted_from_the_end(call, call.tensor(1), call.shape(0)[axis]))
    extent, ids = call.shape(0)[axis], known.array.reshape(-1).tolist()
    if ids and not isinstance(extent, int):  # checked when the model is called
        call.piece.limits.append((max(max(ids) + 1, -min(ids)), extent))
    elif ids and not -extent <= min(ids) <= max(ids) < extent:
        raise call.invalid(f"an index of {min(ids)} to {max(ids)} lies outside of axis {axis} of {extent}")
    places = [total([extent, at]) if at < 0 else at for at in ids]
    step = _stride(places)
    if step is None:
        numbers = call.piece.tensor(Known(known.array.astype(np.int64)))
        counted = _counted_from_the_end(call, numbers, extent) if min(ids, default=0) < 0 else numbers
        return _taken(call, axis, counted)
    box = call.im.take_axis(call.tensor(0), axis, places[0], len(places), step)
    shape = list(call.shape(0))
    return call.im.reshape(box, [*shape[:axis], *known.shape, *shape[axis + 1 :]])


def _stride(places: Sequence[Extent]) -> int | None:
    """Return the step between places if they are a progression."""
    if len(places) == 1:
        return 1
    numbers = [place for place in places if isinstance(place, int)]
    steps = {b - a for a, b in pairwise(numbers)}
    return steps.pop() if len(numbers) == len(places) and len(steps) == 1 and min(steps) > 0 else None


def _counted_from_the_end(call: Call, ids: str, extent: Extent) -> str:
    """Return numbers of rows as ``take`` has them: negative ones count from the end."""
    ids = call.im.cast(ids, "int64")
    negative = call.im.apply("less", [ids, 0], "int64")
    return call.im.g.add("select", negative, call.im.apply("add", [ids, extent], "int64"), ids)


def _taken(call: Call, axis: int, ids: str) -> Any:
    """Take slices of an axis: it becomes the first of a matrix."""
    im, shape = call.im, call.shape(0)
    rest = [extent for at, extent in enumerate(shape) if at != axis]
    first = [axis, *(at for at in range(len(shape)) if at != axis)]
    table = im.reshape(im.permute(call.tensor(0), first), [shape[axis], product(rest)])
    places = im.shape(ids)
    found = im.reshape(im.g.add("take", table, ids), [*places, *rest])
    back = [*(len(places) + at for at in range(axis)), *range(len(places))]
    return im.permute(found, [*back, *range(len(back), len(places) + len(rest))])


def _filled(call: Call) -> Any:
    value = call.given.get("value")
    number = Known(np.zeros(1, np.float32)) if value is None else call.array(value)
    return ATEN["full.default"](call.im, number.ttype, call.extents(0), number.scalar())


def _topped(call: Call) -> Any:
    """Return an axis of one element as it is, with places 0: how lengths of a batch of one are sorted."""
    shape, axis = call.shape(0), call.given.get("axis", -1)
    if not call.has(1) or shape[axis] != 1 or call.number(1) != 1:
        return None
    if not all(isinstance(extent, int) for extent in shape):
        return None
    return call.tensor(0), Known(np.zeros([int(extent) for extent in shape], np.int64))


EXACT = 1 << 24
"""Up to here all whole numbers are float32."""


def _counted(call: Call) -> Any:
    begin, end, step = (call.number(at) for at in range(3))
    if call.out == "float32" and isinstance(end, str):  # numbers up to which all are floats
        if not (float(begin).is_integer() and float(step).is_integer()):
            return None
        begin, step = int(begin), int(step)
        call.piece.limits.append((end, EXACT))
    return ATEN["arange.start_step"](call.im, call.out, begin, end, step)


def _triangle(call: Call) -> Any:
    """Keep what lies on one side of a diagonal."""
    im, shape = call.im, call.shape(0)
    shift = int(call.number(1) or 0)
    rows, columns = (
        im.g.add("iota", extent=shape[axis], axis=axis + 2, rank=2, begin=begin, type="int64")
        for axis, begin in ((-2, shift), (-1, 0))
    )
    sides = (rows, columns) if call.given.get("upper", 1) else (columns, rows)
    return ATEN["where.self"](im, call.out, im.g.add("less_equal", *sides), call.tensor(0), 0.0)


# reductions ------------------------------------------------------------------------------------------


def _reduced(name: str, kinds: str = "") -> Row:
    """Return the row that reduces axes, given as an attribute or as an operand, of types with a name."""

    def row(call: Call) -> Any:
        if kinds not in call.out:
            return None
        axes = call.ints(1, "axes")
        if not axes and call.given.get("noop_with_empty_axes", 0):
            return call.tensor(0)
        return ATEN[name](call.im, call.out, call.tensor(0), axes, bool(call.given.get("keepdims", 1)))

    return row


MOST_FACTORS = 8
"""How many numbers a product of an axis is written out for."""


def _multiplied(call: Call) -> Any:
    """Multiply the few numbers of one axis; of other axes torch takes the product."""
    axes, x, shape = call.ints(1, "axes"), call.tensor(0), call.shape(0)
    if axes is None or len(axes) != 1 or "float" not in call.out:
        return None
    axis = axes[0] % len(shape)
    extent = shape[axis]
    if not isinstance(extent, int) or not 1 <= extent <= MOST_FACTORS:
        return None
    parts = [call.im.take_axis(x, axis, at, 1) for at in range(extent)]
    found = reduce(lambda a, b: call.im.arithmetic("mul", [a, b], call.out), parts)
    kept = [1] if call.given.get("keepdims", 1) else []
    return call.im.reshape(found, [*shape[:axis], *kept, *shape[axis + 1 :]])


SUMMED = ("float16", "bfloat16", "float32")
"""Types whose sums are of float32."""


def _square_sum(call: Call) -> Any:
    """Add squares along axes; where there are none, and for other types, torch does it."""
    im, axes = call.im, call.ints(1, "axes")
    if call.out not in SUMMED or (not axes and call.given.get("noop_with_empty_axes", 0)):
        return None
    squares = im.g.add("square", im.cast(call.tensor(0), "float32"))
    return ATEN["sum.dim_IntList"](im, "float32", squares, axes, bool(call.given.get("keepdims", 1)))


def _length(call: Call) -> Any:
    found = _square_sum(call)
    return None if found is None else call.im.cast(call.im.g.add("sqrt", found), call.out)


def _summed_squares(call: Call) -> Any:
    found = _square_sum(call)
    return None if found is None else call.im.cast(found, call.out)


ARITHMETIC: dict[str, Row] = {
    **{
        name: _aten(f"{row}.{form}")
        for form, rows in {
            "Tensor": {"Add": "add", "Sub": "sub", "Mul": "mul"},
            "default": {
                "Neg": "neg", "Abs": "abs", "Exp": "exp", "Log": "log", "Sqrt": "sqrt", "Sin": "sin",
                "Cos": "cos", "Tanh": "tanh", "Sigmoid": "sigmoid", "Erf": "erf", "Floor": "floor",
                "Relu": "relu", "Reciprocal": "reciprocal",
            },
        }.items()
        for name, row in rows.items()
    },
    **{
        name: _truth(row)
        for name, row in {
            "Equal": "eq.Tensor", "Less": "lt.Tensor", "LessOrEqual": "le.Tensor", "Greater": "gt.Tensor",
            "GreaterOrEqual": "ge.Tensor", "And": "logical_and.default", "Or": "logical_or.default",
            "Not": "logical_not.default",
        }.items()
    },
    "Max": _folded("maximum.default"),
    "Min": _folded("minimum.default"),
    "Div": _divided,
    "Pow": _powered,
    "Clip": _clipped,
    "Gelu": _gelu,
    "Cast": _cast,
    "CastLike": lambda call: _converted(call, call.ttype(1)),
    "Where": _chosen,
    "IsNaN": lambda call: ATEN["isnan.default"](call.im, "bool", call.tensor(0)),
    "IsInf": _is_infinite,
    "Identity": lambda call: call.inputs[0],
    "Dropout": _kept,
}  # fmt: skip
"""Operators that compute each element alone."""

MOVES: dict[str, Row] = {
    "Constant": lambda call: None,  # known at import
    "ConstantOfShape": _filled,
    "Shape": lambda call: None,  # known at import
    "Size": _size,
    "Reshape": _reshaped,
    "Flatten": _flattened,
    "Unsqueeze": _unsqueezed,
    "Squeeze": _squeezed,
    "Transpose": _transposed,
    "Expand": _expanded,
    "Tile": lambda call: ATEN["repeat.default"](call.im, call.out, call.tensor(0), call.extents(1)),
    "Concat": _joined,
    "Split": _divided_up,
    "Slice": _sliced,
    "Gather": _gathered,
    "Pad": padded,
    "Range": _counted,
    "TopK": _topped,
    "Trilu": _triangle,
}
"""Operators that move elements."""

REDUCTIONS: dict[str, Row] = {
    "ReduceSum": _reduced("sum.dim_IntList"),
    "ReduceMean": _reduced("mean.dim", "float"),
    "ReduceMax": _reduced("amax.default"),
    "ReduceProd": _multiplied,
    "ReduceMin": _reduced("amin.default"),
    "ReduceSumSquare": _summed_squares,
    "ReduceL2": _length,
}
"""Operators that reduce axes."""
