"""Values that are known when an ONNX model is imported: weights, and shapes with symbolic sizes.

Exporters compute shapes by operators (``Shape``, ``Gather``, ``Concat`` ... ``Reshape``). Such values never
become tensors: a `Known` holds a numpy array, or, where a size is symbolic, an array of extents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch

from ladder.ir.extents import canonical, floordiv, larger, product, quotient, smaller, total
from ladder.runtime.onnx_ops.moves import sliced_places
from tile_types.arrays import own_name
from tile_types.errors import DTypeError
from tile_types.tile import Extent

WHOLE = {6: "int32", 7: "int64"}
FLOATS = {1: "float32", 11: "float64"}
"""ONNX's types of sizes -> ours."""

TENSOR_TYPES = (
    *("float32", "float16", "bfloat16", "float64", "int64", "int32", "int8", "uint8", "bool"),
    *("fp8_e4m3", "fp8_e5m2"),
)
"""Types of the tensors that models take, make and keep."""


@dataclass(frozen=True, eq=False)
class Known:
    """A value that no input decides but for symbolic sizes.

    array: The value; of dtype object, whose elements are extents, where a size is symbolic (int64 then).
    text: Whether elements of dtype object are text.
    whole: Type of symbolic sizes: of `WHOLE` or `FLOATS`.
    """

    array: np.ndarray
    text: bool = False
    whole: str = "int64"

    @property
    def ttype(self) -> str:
        """Name of the type."""
        return self.whole if self.symbolic else type_name(self.array.dtype)

    @property
    def has_type(self) -> bool:
        """Whether tensors of plans have its type."""
        return self.symbolic or own_name(self.array.dtype) in TENSOR_TYPES

    @property
    def symbolic(self) -> bool:
        """Whether an element is a symbolic extent."""
        return self.array.dtype == object and not self.text

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value itself."""
        return self.array.shape

    def extents(self) -> list[Extent]:
        """Return the elements of a shape."""
        return [value if isinstance(value, str) else int(value) for value in self.array.reshape(-1)]

    def typed(self, ttype: str) -> Known:
        """Return whole numbers, or sizes, in the type that an operator gives."""
        if self.symbolic:
            return replace(self, whole=ttype)
        return Known(self.array.astype(ttype)) if self.array.dtype == np.int64 else self

    def scalar(self) -> Any:
        """Return the only element: a Python number, or a symbolic extent."""
        value = self.array.reshape(-1)[0]
        return value if isinstance(value, str | int) else value.astype(wide(self.array.dtype)).item()


def wide(dtype: np.dtype) -> np.dtype:
    """Return a dtype that Python has for one: bfloat16 and fp8 become float32."""
    return dtype if dtype.isbuiltin == 1 else np.dtype(np.float32)


def type_name(dtype: np.dtype) -> str:
    """Return our name of a numpy dtype.

    Raises DTypeError if tensors of models have no such type.
    """
    name = own_name(dtype)
    if name not in TENSOR_TYPES:
        raise DTypeError(f"tensors of the type {dtype.name} are not for models: {', '.join(TENSOR_TYPES)}")
    return name


def known_extents(values: Sequence[Extent], shape: Sequence[int] | None = None) -> Known:
    """Return extents as a value: int64 if all are numbers."""
    numbers = all(isinstance(value, int) for value in values)
    array = np.empty(len(values), np.int64 if numbers else object)
    array[:] = list(values)
    return Known(array.reshape(len(values) if shape is None else tuple(shape)))


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor of its own; types that numpy lacks keep their bits."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array.copy())
    bits = torch.from_numpy(array.view(f"u{array.dtype.itemsize}").copy())
    return bits.view(getattr(torch, array.dtype.name))


# arithmetic of extents -------------------------------------------------------------------------------


def divided(a: Extent, b: Extent) -> Extent:
    """Divide extents, rounding down; a multiple gives a polynomial."""
    exact = quotient(a, b)
    if exact is not None:
        return exact
    return floordiv(a, b)


def _same(a: Extent, b: Extent) -> bool | None:
    """Tell whether extents are equal; None where that depends on sizes. Sizes are not negative."""
    if canonical(a) == canonical(b):
        return True
    numbers = [value for value in (a, b) if isinstance(value, int)]
    return False if len(numbers) == 2 or any(number < 0 for number in numbers) else None


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(given: Mapping[str, Any], *operands: Known) -> Known | None:
        arrays = np.broadcast_arrays(*(operand.array for operand in operands))
        rows = zip(*(array.reshape(-1) for array in arrays), strict=True)
        found = [function(*(_python(value) for value in row)) for row in rows]
        if any(value is None for value in found):
            return None
        if all(isinstance(value, bool) for value in found):
            return Known(np.array(found, bool).reshape(arrays[0].shape))
        return known_extents(found, arrays[0].shape)

    return apply


def _python(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _gathered(given: Mapping[str, Any], x: Known, indices: Known) -> Known:
    places = indices.array.astype(np.int64)
    return _normal(np.asarray(np.take(x.array, places, axis=given.get("axis", 0)), object))


def _sliced(given: Mapping[str, Any], x: Known, *bounds: Known) -> Known | None:
    if any(bound.symbolic for bound in bounds):
        return None
    starts, ends, *rest = (bound.array.tolist() for bound in bounds)
    axes = rest[0] if rest else range(len(starts))
    steps = rest[1] if len(rest) > 1 else [1] * len(starts)
    array = x.array
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        array = array.take(sliced_places(start, end, step, array.shape[axis]), axis)
    return _normal(array)


def _unsqueezed(given: Mapping[str, Any], x: Known, axes: Known) -> Known:
    return Known(np.expand_dims(x.array, tuple(axes.array.reshape(-1).tolist())))


def _squeezed(given: Mapping[str, Any], x: Known, axes: Known | None = None) -> Known:
    chosen = None if axes is None else tuple(axes.array.reshape(-1).tolist())
    return Known(np.squeeze(x.array, chosen))


def _joined(given: Mapping[str, Any], *parts: Known) -> Known:
    return _normal(np.concatenate([part.array.astype(object) for part in parts], given["axis"]))


def _cast(given: Mapping[str, Any], x: Known) -> Known | None:
    """Return sizes in another type; as floats they are only moved and counted to, see `MOVES`."""
    target = {**WHOLE, **FLOATS}.get(given["to"])
    return None if target is None else x.typed(target)


def symbolic_value(operator: str, given: Mapping[str, Any], operands: Sequence[Known]) -> Known | None:
    """Return what an operator gives of symbolic sizes; None if that depends on them."""
    if operator not in SYMBOLIC or (operator in ARRANGING and any(value.symbolic for value in operands[1:])):
        return None
    if operator not in MOVES and any(value.symbolic and value.whole in FLOATS.values() for value in operands):
        return None
    found = SYMBOLIC[operator](given, *with_attributes(operator, given, operands))
    keeps = found is not None and operator not in ("Cast", "Equal")
    return (
        found.typed(operands[-1 if operator == "Where" else 0].ttype)
        if found is not None and keeps
        else found
    )


def _normal(array: np.ndarray) -> Known:
    """Return int64 where no element is symbolic any more."""
    return known_extents([_python(value) for value in array.reshape(-1)], array.shape)


SYMBOLIC: Mapping[str, Callable[..., Known | None]] = {
    "Add": _elementwise(lambda a, b: total([a, b])),
    "Sub": _elementwise(lambda a, b: total([a, product([-1, b])])),
    "Mul": _elementwise(lambda a, b: product([a, b])),
    "Div": _elementwise(divided),
    "Neg": _elementwise(lambda a: product([-1, a])),
    "Max": _elementwise(lambda *extents: reduce(larger, extents)),
    "Min": _elementwise(lambda *extents: reduce(smaller, extents)),
    "Equal": _elementwise(_same),
    "Where": _elementwise(lambda condition, yes, no: yes if condition else no),
    "Identity": lambda given, x: x,
    "Cast": _cast,
    "Gather": _gathered,
    "Slice": _sliced,
    "Reshape": lambda given, x, shape: Known(x.array.reshape(shape.array.astype(np.int64))),
    "Unsqueeze": _unsqueezed,
    "Squeeze": _squeezed,
    "Concat": _joined,
}
"""Operators of shapes with symbolic sizes -> ``(attributes, *values)``; None: that depends on the sizes."""

ARRANGING = frozenset(("Gather", "Reshape", "Unsqueeze", "Squeeze", "Slice"))
"""Operators whose further operands are places, which must be numbers."""

MOVES = ARRANGING | {"Identity", "Cast"}
"""Operators that compute nothing."""

ATTRIBUTES: Mapping[str, Sequence[str]] = {
    "Unsqueeze": ("axes",),
    "Squeeze": ("axes",),
    "Slice": ("starts", "ends", "axes"),
}
"""Operator -> attributes that are operands in newer versions."""


def with_attributes(operator: str, given: Mapping[str, Any], operands: Sequence[Known]) -> list[Known]:
    """Return operands as newer versions have them."""
    named = [name for name in ATTRIBUTES.get(operator, ()) if name in given]
    return [*operands, *(Known(np.array(given[name], np.int64)) for name in named)]


def is_plain(number: Any) -> bool:
    """Tell whether a number is finite, and no zero below 0: then it may be an attribute."""
    found = float(number)
    return np.isfinite(found) and not (found == 0 and np.signbit(found))
