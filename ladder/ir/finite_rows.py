"""Finite-field semantics of operators: the ``finite`` column of the operator table.

Functions take an `Arithmetic`: fields, forms of polynomials and signs share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from ladder.ir import arrange
from ladder.ir.indexing import gather
from ladder.ir.modular import Array
from ladder.ir.numeric import index_sizes
from ladder.ir.operator import Attributes
from ladder.ir.quantized_values import Components, assemble, require_components, spread
from tile_types.errors import VerificationError

Semantics = Callable[[Any, Sequence[Any], Attributes], Any]


def calls(method: str) -> Semantics:
    """Return the row of an operator that is one method of `Arithmetic`."""

    def semantics(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
        return getattr(field, method)(*values)

    return semantics


def arranged(function: Callable[[Sequence[Any], Attributes], Any]) -> Semantics:
    """Lift a rearrangement ``(arrays, attributes) -> array``."""

    def semantics(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
        if any(isinstance(value, Components) for value in values):
            return function(values, attributes)
        return field.joined(values, lambda arrays: function(arrays, attributes))

    return semantics


def square(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Return ``x * x``."""
    return field.multiply(values[0], values[0])


def inverse_root(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Return ``1 / sqrt(x)``."""
    return field.divide(field.number(1.0), field.root(values[0]))


def _logistic(field: Any, value: Any) -> Any:
    """Return ``1 / (1 + exp(-x))``."""
    if "exp" in field.uninterpreted:
        return field.function("sigmoid", [value])
    one = field.number(1.0)
    return field.divide(one, field.add(one, field.exponential(field.negate(value))))


def sigmoid(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Return ``1 / (1 + exp(-x))``."""
    return _logistic(field, values[0])


def silu(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Return ``x / (1 + exp(-x))``."""
    return field.multiply(values[0], _logistic(field, values[0]))


def tanh(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Return ``2 / (1 + exp(-2x)) - 1``."""
    logistic = _logistic(field, field.add(values[0], values[0]))
    return field.subtract(field.add(logistic, logistic), field.number(1.0))


def constant(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Fill ``shape`` with a dyadic number."""
    return field.number(attributes["value"]).map(lambda part: np.broadcast_to(part, attributes["shape"]))


def convert(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Decode a quantized operand; keep any other."""
    if not isinstance(values[0], Components):
        return values[0]
    return assemble(
        values[0],
        field.subtract,
        field.multiply,
        lambda a, group, extent: a.map(lambda part: spread(part, group, extent)),
    )


def elements(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Return the part that the codes mean."""
    return require_components(values[0], "elements").elements


def metadata(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Return a metadata array."""
    return require_components(values[0], "metadata").metadata[attributes["field"]]


def load(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Take the tile at ``begin``; of a quantized operand, the parts of the tile."""
    value, begin, shape = values[0], attributes["begin"], attributes["shape"]
    if not isinstance(value, Components):
        return value.map(lambda part: arrange.load([part], attributes))
    aligned = begin[-1] % value.group == 0 and shape[-1] % value.group == 0
    extent = value.shape[-1]

    def of_metadata(part: Array) -> Array:
        if not np.ndim(part):
            return part
        taken = arrange.box(spread(part, value.group, extent), begin, shape)
        return np.asarray(taken[..., :: value.group] if aligned else taken)

    return Components(
        value.elements.map(lambda part: arrange.box(part, begin, shape)),
        {name: array.map(of_metadata) for name, array in value.metadata.items()},
        value.group if aligned else 1,
    )


def pad(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Surround with ``value``."""
    fill = field.number(attributes["value"])
    low, high = attributes["low"], attributes["high"]

    def padded(arrays: Sequence[Array]) -> Array:
        array, filling = arrays
        shape = [before + n + after for before, n, after in zip(low, array.shape, high, strict=True)]
        result = np.array(np.broadcast_to(filling, shape))
        result[tuple(slice(begin, begin + n) for begin, n in zip(low, array.shape, strict=True))] = array
        return result

    return field.joined([values[0], fill], padded)


def reduce_sum(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Sum along ``axis``."""
    return field.total(values[0], attributes["axis"], attributes["keep"])


def reduce_max(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Return the unknown that stands for the maximum along ``axis``; of no elements it is no real number."""
    if not values[0].shape[attributes["axis"]]:
        raise VerificationError("the maximum of no elements is infinite: nothing finite equals it")
    return field.maximum(values[0], attributes["axis"], attributes["keep"])


def contract(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Sum the product of the operands over the indices that the result lacks."""
    indexing, extents = index_sizes(values, attributes)
    names = list(indexing.names)
    kept = len(indexing.result)
    shape = [extents[name] for name in names]
    factors = [
        value.map(lambda part, axes=axes: gather(part, axes, names, extents))
        for value, axes in zip(values, indexing.operands, strict=True)
    ]
    product = reduce(field.multiply, factors)
    flat = product.map(
        lambda part: np.broadcast_to(part, shape).reshape(*shape[:kept], math.prod(shape[kept:]))
    )
    return field.total(flat, -1, False)


def view(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Read one operand through an affine map."""
    indexing, extents = index_sizes(values, attributes)
    shape = [extents[name] for name in indexing.result]
    axes = indexing.operands[0]
    return values[0].map(lambda part: np.broadcast_to(gather(part, axes, indexing.result, extents), shape))


def matmul(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Multiply matrices by broadcasting, reducing each product."""
    rows = values[0].map(lambda part: part[..., :, None, :])
    columns = values[1].map(
        lambda part: (part if attributes["transpose_b"] else np.swapaxes(part, -1, -2))[..., None, :, :]
    )
    return field.total(field.multiply(rows, columns), -1, False)


def _rescaled(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Sum ``x * exp(m - max m)`` over the iterations."""
    x, local = values
    shift = field.subtract(local, field.maximum(local, 0, True))
    return field.total(field.multiply(x, field.exponential(shift)), 0, False)


_ACCUMULATORS: dict[str, Semantics] = {
    "sum": lambda field, values, attributes: field.total(values[0], 0, False),
    "max": lambda field, values, attributes: field.maximum(values[0], 0, False),
    "rescale": _rescaled,
    "last": lambda field, values, attributes: values[0].map(lambda part: part[-1]),
    "concat": lambda field, values, attributes: values[0].map(
        lambda part: np.concatenate(list(part), axis=attributes["axis"])
    ),
}


def accumulate(field: Any, values: Sequence[Any], attributes: Attributes) -> Any:
    """Combine the stacked iterations."""
    return _ACCUMULATORS[attributes["kind"]](field, values, attributes)
