"""Float64 semantics: the ``reference`` column of the operator table.

Real-number semantics: ``convert`` changes the type and keeps the value, so a graph's
reference is its exact mathematical meaning on the decoded weights; only ``encode`` rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ladder.ir.indexing import Indexing, gather, parse_indexing, solve_extents
from ladder.ir.operator import Attributes
from ladder.ir.quantized_values import Components, assemble, require_components, spread
from tile_types.library import get_type

Array = npt.NDArray[np.float64]
Values = Sequence[Any]
Reference = Callable[[Values, Attributes], Any]


def pointwise(function: Callable[..., Any]) -> Reference:
    """Make a reference of a function of arrays."""

    def reference(values: Values, attributes: Attributes) -> Any:
        return function(*values)

    return reference


def constant(values: Values, attributes: Attributes) -> Array:
    """Fill ``shape`` with ``value``."""
    return np.full(attributes["shape"], attributes["value"], np.float64)


def convert(values: Values, attributes: Attributes) -> Any:
    """Decode a quantized operand; keep the values of any other."""
    if isinstance(values[0], Components):
        return assemble(values[0], np.subtract, np.multiply, spread)
    return values[0]


def encode(values: Values, attributes: Attributes) -> Array:
    """Round to the nearest value of ``type``, saturating."""
    ttype = get_type(attributes["type"])
    return ttype.decode_codes(ttype.encode(values[0]))


def elements(values: Values, attributes: Attributes) -> Any:
    """Return what the codes mean before zero point and scale."""
    return require_components(values[0], "elements").elements


def metadata(values: Values, attributes: Attributes) -> Any:
    """Return a metadata array."""
    return require_components(values[0], "metadata").metadata[attributes["field"]]


def index_sizes(values: Values, attributes: Attributes) -> tuple[Indexing, dict[str, int]]:
    """Return the indexing of ``contract`` or ``map`` and all extents as numbers."""
    indexing = parse_indexing(attributes["spec"])
    extents = solve_extents(indexing, [np.shape(value) for value in values], dict(attributes["sizes"]))
    return indexing, {name: int(extent) for name, extent in extents.items()}


def contract(values: Values, attributes: Attributes) -> Any:
    """Sum the product of the operands over the indices that the result lacks."""
    indexing, extents = index_sizes(values, attributes)
    letters = {name: number for number, name in enumerate(indexing.names)}
    arguments: list[Any] = []
    for value, axes in zip(values, indexing.operands, strict=True):
        names = list(dict.fromkeys(name for axis in axes for name in axis.names))
        direct = [axis.index for axis in axes] == names and [extents[n] for n in names] == list(
            np.shape(value)
        )
        array = value if direct else gather(value, axes, names, extents)
        arguments += [array, [letters[name] for name in names]]
    missing = [name for name in indexing.names if not any(letters[name] in used for used in arguments[1::2])]
    for name in missing:
        arguments += [np.ones(extents[name]), [letters[name]]]
    return np.einsum(*arguments, [letters[name] for name in indexing.result], optimize=True)


def view(values: Values, attributes: Attributes) -> Any:
    """Read one operand through an affine map."""
    indexing, extents = index_sizes(values, attributes)
    gathered = gather(values[0], indexing.operands[0], indexing.result, extents)
    return np.broadcast_to(gathered, [extents[name] for name in indexing.result])


def matmul(values: Values, attributes: Attributes) -> Any:
    """Multiply matrices."""
    b = np.swapaxes(values[1], -1, -2) if attributes["transpose_b"] else values[1]
    return values[0] @ b


def silu(x: Array) -> Array:
    """Return ``x * sigmoid(x)``."""
    return x * sigmoid(x)


def sigmoid(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))`` without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def bits(x: Any) -> Array:
    """Return the bits of numbers, as float32 holds them, as signed integers."""
    return np.asarray(np.asarray(x, np.float32).view(np.int32), np.float64)


def of_bits(x: Any) -> Array:
    """Return the float32 numbers whose bits integers are."""
    return np.asarray(np.asarray(x).astype(np.int32).view(np.float32), np.float64)


def of_integers(function: Callable[..., Any]) -> Callable[..., Array]:
    """Make a function of real arrays, which hold integers, of one of integers."""

    def computed(*values: Any) -> Array:
        return np.asarray(function(*(np.asarray(value).astype(np.int64) for value in values)), np.float64)

    return computed


WIDEST = 63
"""Steps by which a shift to the right leaves the sign alone."""


def shifted_left(a: Array, b: Array) -> Array:
    """Return ``a * 2 ** b``; 0 of what is shifted out, and where b is negative."""
    return np.where((b < 0) | (b > WIDEST), 0, np.left_shift(a, np.clip(b, 0, WIDEST)))


def shifted_right(a: Array, b: Array) -> Array:
    """Return ``a / 2 ** b`` rounded down; a negative b counts as the widest."""
    return np.right_shift(a, np.where((b < 0) | (b > WIDEST), WIDEST, b))


def quotient(a: Array, b: Array) -> Array:
    """Return ``a / b`` rounded toward 0."""
    return np.trunc(np.divide(a, b))


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def erf(x: Array) -> Array:
    """Return the error function."""
    return 1.0 - _erfc(x) if np.size(x) else np.asarray(x)


def gelu(x: Array) -> Array:
    """Return ``x * (1 + erf(x / sqrt 2)) / 2`` without cancellation."""
    return x * 0.5 * _erfc(-x / math.sqrt(2)) if np.size(x) else np.asarray(x)


def gelu_tanh(x: Array) -> Array:
    """Return the tanh approximation of GELU (Hendrycks & Gimpel 2016)."""
    inner: Array = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x * sigmoid(2 * inner)  # (1 + tanh u) / 2 without cancellation


def reduction(function: Callable[..., Any]) -> Reference:
    """Make a reference of a numpy reduction."""

    def reference(values: Values, attributes: Attributes) -> Any:
        return function(values[0], axis=attributes["axis"], keepdims=attributes["keep"])

    return reference


def accumulation(function: Callable[..., Any], nothing: float) -> Reference:
    """Make a reference of what numpy accumulates, in the operand's type; ``nothing`` is before all of it."""

    def reference(values: Values, attributes: Attributes) -> Any:
        axis = attributes["axis"]
        found = function(values[0], axis=axis).astype(values[0].dtype)
        if not attributes.get("exclusive"):
            return found
        found = np.roll(found, 1, axis)
        np.moveaxis(found, axis, 0)[:1] = nothing
        return found

    return reference


def greatest(x: Array, **keywords: Any) -> Any:
    """Return the maximum along an axis, of nothing the least there is."""
    return np.max(x, initial=-np.inf, **keywords)


def rescale(values: Values, attributes: Attributes) -> Any:
    """Sum over iterations of ``x * exp(m - max m)``: the online softmax accumulator."""
    x, local = values
    return (x * np.exp(local - local.max(axis=0))).sum(axis=0)


def _join(values: Values, attributes: Attributes) -> Any:
    return np.concatenate(list(values[0]), axis=attributes["axis"])


ACCUMULATORS: dict[str, Reference] = {
    "sum": lambda values, attributes: values[0].sum(axis=0),
    "max": lambda values, attributes: values[0].max(axis=0),
    "last": lambda values, attributes: values[0][-1],
    "concat": _join,
    "rescale": rescale,
}
"""Kind -> result from the values of all iterations stacked on a new first axis."""


def accumulate(values: Values, attributes: Attributes) -> Any:
    """Combine the stacked values of all loop iterations."""
    return ACCUMULATORS[attributes["kind"]](values, attributes)
