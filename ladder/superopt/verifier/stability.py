"""Floating-point stability: a candidate's error on difficult data, against the original's own.

Both programs run in their own precision, each value rounded to its type and sums taken in float32, and are
compared with the original in float64, on every class of data in `CLASSES`: each input in turn and all at
once, and of `PAIRS`. A candidate that computes in float32 what the original computes in 16 bits is also
compared with the original as kernels compute it: only operands of products and results have 16 bits. A
candidate passes if its error is at most `SLACK` times the original's, or `ULPS` units in the last place of
the result's type, on all of them. Programs without sums and products of matrices are also compared among
results of about the same magnitude, so that large ones do not hide small ones.

Before that, a rule: a candidate that subtracts values of higher degree in the inputs than the original does
(one-pass variance, expanded squared distances) cancels what the original does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.interpret import NUMERIC, Domain, interpret
from ladder.ir.operator import Operator
from ladder.superopt.verifier.coverage import require_complete
from tile_types import get_type
from tile_types.errors import VerificationError
from tile_types.tile import Tile
from tile_types.ttype import TType

Array = npt.NDArray[np.float64]
Shape = tuple[int, ...]
Draw = Callable[[np.random.Generator, Shape, TType], Array]

SLACK = 4.0
"""How many times the original's own error in the same precision is still stable."""

ULPS = 2.0
"""Error in units in the last place of the result's type that is always accepted."""

SPREAD = 0.05
"""Standard deviation of values with a large mean."""


def _around(mean: float) -> Draw:
    return lambda generator, shape, ttype: mean + SPREAD * generator.standard_normal(shape)


def _uniform(generator: np.random.Generator, shape: Shape, ttype: TType) -> Array:
    return generator.uniform(-1.0, 1.0, shape)


def _decades(generator: np.random.Generator, shape: Shape, ttype: TType) -> Array:
    """Magnitudes from 2**-8 to 2**8 side by side."""
    return np.asarray(generator.standard_normal(shape) * np.exp2(generator.integers(-8, 9, shape)))


def _zeros(generator: np.random.Generator, shape: Shape, ttype: TType) -> Array:
    return np.zeros(shape)


def _sparse(generator: np.random.Generator, shape: Shape, ttype: TType) -> Array:
    return np.asarray(generator.standard_normal(shape) * generator.integers(0, 2, shape))


def _alike(generator: np.random.Generator, shape: Shape, ttype: TType) -> Array:
    """Nearly equal values: differences of inputs cancel."""
    return 1.0 + 2.0**-6 * generator.standard_normal(shape)


def _alternating(generator: np.random.Generator, shape: Shape, ttype: TType) -> Array:
    """Nearly equal magnitudes, of alternating sign along the last axis: sums cancel."""
    signs = 1.0 - 2.0 * (np.arange(shape[-1] if shape else 1) % 2)
    return np.asarray(_alike(generator, shape, ttype) * signs).reshape(shape)


def _one_hot(generator: np.random.Generator, shape: Shape, ttype: TType) -> Array:
    """One element of each row is 1."""
    columns = shape[-1] if shape else 1
    return np.asarray(np.eye(columns)[generator.integers(0, columns, shape[:-1])]).reshape(shape)


def _largest(generator: np.random.Generator, shape: Shape, ttype: TType) -> Array:
    """Magnitudes near the largest finite number."""
    signs = generator.choice([-1.0, 1.0], shape)
    return np.asarray(generator.uniform(0.5, 1.0, shape) * signs * ttype.max_abs)


def _vast(generator: np.random.Generator, shape: Shape, ttype: TType) -> Array:
    """Magnitudes whose squares overflow, in types of a wide enough range; in others up to 1."""
    most = ttype.max_abs**ROOT
    return generator.uniform(0.5, 1.0, shape) * (2.0 * most if most > 2.0**20 else 1.0)


def _scaled(factor: float) -> Draw:
    return lambda generator, shape, ttype: factor * generator.standard_normal(shape)


def _factors(generator: np.random.Generator, shape: Shape, ttype: TType) -> Array:
    """Magnitudes of which two multiplied overflow, in types of any range."""
    return np.asarray(generator.uniform(1.0, 2.0, shape) * ttype.max_abs**ROOT)


def _halves(generator: np.random.Generator, shape: Shape, ttype: TType) -> Array:
    """Along each axis the second half is nearly the first, negated: sums cancel, those of parts do not."""
    values = _uniform(generator, shape, ttype)
    for axis, extent in enumerate(shape):
        along, half = np.moveaxis(values, axis, -1), extent // 2
        first = along[..., :half]
        along[..., half : 2 * half] = -first * _alike(generator, first.shape, ttype)
    return values


CLASSES: dict[str, Draw] = {
    "uniform": _uniform, "normal": _scaled(1.0), "small": _scaled(2.0**-12), "large": _scaled(2.0**8),
    "mean 10": _around(10.0), "mean -10": _around(-10.0), "mean 100": _around(1e2),
    "mean 1000": _around(1e3), "mean 10000": _around(1e4),
    "wide range": _decades, "zeros": _zeros, "half zeros": _sparse,
    "cancelling": _alike, "alternating": _alternating, "one-hot": _one_hot,
    "vast": _vast, "largest": _largest,
}  # fmt: skip
"""Name -> ``(generator, shape, type) -> values``."""

ALONE = ("vast", "largest", "alternating")
"""Classes of one input at a time: of two such, products are not finite, or sums are of rounding alone."""

OPPOSED = 100.0
"""Mean of one input and, negated, of another: exponentials of each overflow and vanish, that of their sum
does not."""

PAIRS: dict[str, tuple[Draw, Draw]] = {
    f"mean {OPPOSED:g} and {-OPPOSED:g}": (_around(OPPOSED), _around(-OPPOSED)),
    "overflowing product of": (_factors, _factors),
    "sums that cancel of": (_halves, _around(1e1)),
    "alike beside sums that cancel of": (_around(1e1), _halves),
}
"""Name -> what is drawn for two inputs, the others being uniform."""

IF_FINITE = "all vast"
"""Data on which results are compared if the original is finite everywhere, as quotients are."""

ROOT = 0.51
"""Power of the largest finite number at which products of two magnitudes overflow."""

EDGE = 2.0**-8
"""Where results exceed this part of the largest finite number they may overflow: sums in another order do,
also those beside them, whose terms may be as large."""

FULL = 1.0 - 2.0**-7
"""The part of the largest finite number that magnitudes of terms must sum to for that: no order of smaller
ones overflows."""

SUMMED = ("matmul", "contract", "reduce_sum", "accumulate", "add", "mul", "square", "load", "store", "concat",
    "convert", "broadcast", "reshape", "transpose", "slice")  # fmt: skip
"""Operators whose results are sums of products of elements: of magnitudes they are bounds of all orders."""

SUBTRACTS = "by rule: it subtracts products, where the original subtracts their factors or nothing"

MEANINGLESS = 0.5
"""Relative error of the original from which on candidates are not compared with it."""

LEAST_ELEMENTS = 16
"""Results of one magnitude that are compared on their own."""


@dataclass(frozen=True)
class Stability:
    """Result of `check_stability`.

    stable: Whether the candidate passed on all magnitudes.
    reason: The first magnitudes that it failed on, and how.
    error: The candidate's largest relative Frobenius error against float64 where the original is finite.
    original: The original's.
    """

    stable: bool
    reason: str
    error: float
    original: float


def rounding_domain() -> Domain:
    """Return arithmetic where each result is rounded to its tile's type, without saturation."""
    return replace(NUMERIC, apply=_in_float32, keep=lambda node, value: rounded(value, node.tile))


def rounded(value: Any, tile: Tile) -> Any:
    """Round values to a tile's type as hardware does: overflow gives infinity."""
    ttype = tile.ttype
    if ttype.is_block or not isinstance(value, np.ndarray | np.floating):
        return value
    values = np.asarray(value, np.float64)
    finite = np.isfinite(values)
    nearest = _nearest(np.where(finite, values, 0.0), ttype)
    return np.where(finite, nearest, values)


def _nearest(values: Array, ttype: TType) -> Array:
    native = _NATIVE.get(ttype.name)
    if native is not None:
        with np.errstate(over="ignore"):
            return np.asarray(values.astype(native).astype(np.float64))
    if ttype.limits is not None and ttype.is_integer:
        return np.clip(np.rint(values), *ttype.limits)
    return np.asarray(ttype.decode_codes(ttype.encode(values)), np.float64)


_NATIVE: dict[str, Any] = {
    "float16": np.float16, "float32": np.float32, "float64": np.float64, "bfloat16": ml_dtypes.bfloat16,
}  # fmt: skip

PRODUCTS = ("matmul", "contract")
"""Operators whose operands kernels round to their types."""

SUMS = ("matmul", "contract", "reduce_sum", "accumulate")
"""Operators that compute in float32 what they compute of float32."""


def _in_float32(operator: Operator, values: Sequence[Any], attributes: Any) -> Any:
    if operator.name not in SUMS or any(not isinstance(value, np.ndarray) for value in values):
        return operator.reference(values, attributes)
    return np.asarray(operator.reference([v.astype(np.float32) for v in values], attributes), np.float64)


def check_stability(candidate: Graph, original: Graph, *, seed: int = 0) -> Stability:
    """Compare a candidate's error with the original's, both computed in their own precision.

    candidate, original: Programs with the same signature and numeric extents; inputs of element types.
    seed: Of the inputs, one of each class.
    Returns Stability: Unstable if the candidate subtracts what the original does not, or if for any class of
        data, where the original is finite, it is not or its error exceeds both bounds.
    """
    require_complete(candidate)
    require_complete(original)
    worst = Stability(True, "", 0.0, 0.0)
    if subtracted_degree(candidate) > subtracted_degree(original):
        return replace(worst, stable=False, reason=SUBTRACTS)
    apart = not any(node.operator in SUMS for graph in (candidate, original) for _, node in graph.walk())
    types = [original.tile(output).ttype for output in original.outputs]
    wide = any(node.tile.ttype.name == "float32" for _, node in candidate.walk() if node.operator != "input")
    enough = max(map(_unit, types)) * ULPS
    for label, operands in _inputs(original, np.random.default_rng(seed)):
        with np.errstate(all="ignore"):
            exact = interpret(original, operands, NUMERIC)
            found = interpret(candidate, operands, rounding_domain())
            errors = [
                pair
                for wanted, filled in _readings(original, operands, wide)
                if label != IF_FINITE or all(np.isfinite(value).all() for value in wanted)
                for pair in _errors(found, wanted, exact, types, apart, filled >= FULL)
            ]
        for own, its in errors:
            worst = replace(worst, error=max(worst.error, own), original=max(worst.original, its))
            if own > max(enough, SLACK * its):
                reason = f"{label}: relative error {own:.1e}, the original has {its:.1e}"
                return replace(worst, stable=False, reason=reason)
    return worst


def _readings(
    graph: Graph, operands: Sequence[Array], wide: bool
) -> Iterator[tuple[tuple[Array, ...], float]]:
    """Yield results, and the largest part of a type's range that a value's terms sum to.

    wide: Whether to read the graph also as kernels compute it, in float32 but for results and operands of
        products of matrices.
    """
    yield interpret(graph, operands, rounding_domain()), _filled(graph, operands, lambda node: node.tile)
    if wide:
        multiplied = {value for node in graph.nodes if node.operator in PRODUCTS for value in node.inputs}
        narrow = multiplied | set(graph.outputs)

        def tile(node: Node) -> Tile:
            widens = node.name not in narrow and node.tile.ttype.name in ("float16", "bfloat16")
            return replace(node.tile, ttype=get_type("float32")) if widens else node.tile

        domain = replace(rounding_domain(), keep=lambda node, value: rounded(value, tile(node)))
        yield interpret(graph, operands, domain), _filled(graph, operands, tile)


def _filled(graph: Graph, operands: Sequence[Array], tile: Callable[[Node], Tile]) -> float:
    """Return the largest part of a type's range that a value's terms sum to."""
    values: list[Any] = []
    most = 0.0

    def kept(node: Node, value: Any) -> Any:
        values.append(value)
        return value

    def bound(operator: Operator, bounds: Sequence[Any], attributes: Any) -> Any:
        value = np.abs(next(each))
        if operator.name == "sub":
            return bounds[0] + bounds[1]
        return operator.reference(bounds, attributes) if operator.name in SUMMED else value

    def filled(node: Node, value: Any) -> Any:
        nonlocal most
        most = max(most, float(np.max(value, initial=0.0)) / tile(node).ttype.max_abs)
        return value

    interpret(graph, operands, replace(NUMERIC, keep=kept))
    each = iter(values)
    interpret(graph, [*map(np.abs, operands)], replace(NUMERIC, apply=bound, keep=filled))
    return most


def _unit(ttype: TType) -> float:
    """Return the unit in the last place of 1."""
    native = _NATIVE.get(ttype.name)
    if native is None:
        return 0.0
    one = np.ones((), native)
    return float(np.nextafter(one, native(2)).astype(np.float64) - 1.0)


def _inputs(graph: Graph, generator: np.random.Generator) -> Iterator[tuple[str, list[Array]]]:
    """Yield each class for each input, the others being uniform, for all of them, and pairs of `OPPOSED`."""
    tiles = [node.tile for node in graph.inputs]
    if any(tile.ttype.is_block for tile in tiles):
        raise VerificationError("stability is checked on element types; expand decodes of quantized inputs")
    alone = [[number] for number in range(len(tiles))]
    together = [list(range(len(tiles)))] if len(tiles) > 1 else []
    for name, draw in CLASSES.items():
        for which in alone if name in ALONE else alone + together:
            drawn = [
                (draw if number in which else _uniform)(generator, tile.known_shape, tile.ttype)
                for number, tile in enumerate(tiles)
            ]
            label = f"{name} {' '.join(graph.inputs[number].name for number in which)}"
            yield label, [rounded(values, tile) for values, tile in zip(drawn, tiles, strict=True)]
    for pair in combinations(range(len(tiles)), 2):
        names = " ".join(graph.inputs[number].name for number in pair)
        for label, draws in PAIRS.items():
            given = dict(zip(pair, draws, strict=True))
            drawn = [
                given.get(number, _uniform)(generator, tile.known_shape, tile.ttype)
                for number, tile in enumerate(tiles)
            ]
            yield (
                f"{label} {names}",
                [rounded(values, tile) for values, tile in zip(drawn, tiles, strict=True)],
            )
    vast = [_vast(generator, tile.known_shape, tile.ttype) for tile in tiles]
    yield IF_FINITE, [rounded(values, tile) for values, tile in zip(vast, tiles, strict=True)]


def _errors(
    found: Sequence[Array],
    wanted: Sequence[Array],
    exact: Sequence[Array],
    types: Sequence[TType],
    apart: bool,
    full: bool,
) -> Iterator[tuple[float, float]]:
    """Yield relative Frobenius errors of candidate and original, where the original is finite and right.

    full: Whether another order of the original's sums may overflow.
    """
    for result, own, value, ttype in zip(found, wanted, exact, types, strict=True):
        finite = np.isfinite(own) & np.isfinite(value)
        near = finite & (np.abs(value) > EDGE * ttype.max_abs)
        finite &= np.isfinite(result) | ~(full & (near if apart else near.any()))
        parts = [finite, *(_magnitudes(value, finite) if apart else [])]
        for part in parts:
            scale = float(np.linalg.norm(value[part])) or 1.0
            errors = (float(np.linalg.norm((each - value)[part])) / scale for each in (result, own))
            a, b = (error if np.isfinite(error) else float("inf") for error in errors)
            if b < MEANINGLESS:
                yield a, b


def _magnitudes(value: Array, finite: npt.NDArray[np.bool_]) -> list[npt.NDArray[np.bool_]]:
    """Return which elements have about the same magnitude."""
    exponents = np.frexp(np.where(finite, value, 0.0))[1]
    parts = [finite & (value != 0) & (exponents == exponent) for exponent in np.unique(exponents)]
    return [part for part in parts if np.count_nonzero(part) >= LEAST_ELEMENTS]


# ---- the rule --------------------------------------------------------------------------------------------
def subtracted_degree(graph: Graph) -> float:
    """Return the highest degree in the inputs of values that are subtracted from one another."""
    return _Degrees().walk(graph, [1.0] * len(graph.inputs))[1]


class _Degrees:
    """Degrees of values, by operator; what divides does not count."""

    def walk(self, graph: Graph, operands: Sequence[float]) -> tuple[list[float], float]:
        """Return the degrees of outputs, and the highest of what is subtracted."""
        values = dict(zip((node.name for node in graph.inputs), operands, strict=True))
        most = 0.0
        for node in graph.nodes:
            arguments = [values[value] for value in node.inputs]
            if node.body is not None:
                found, inside = self.walk(node.body, arguments)
                values.update(zip(node.values, found, strict=True))
                most = max(most, inside)
            elif node.operator != "input":
                values.update(dict.fromkeys(node.values, self._degree(node, arguments)))
                most = max(most, self._subtracts(graph, node, arguments))
        return [values[output] for output in graph.outputs], most

    def _degree(self, node: Node, arguments: Sequence[float]) -> float:
        if node.operator in ("mul", "matmul", "contract"):
            return sum(arguments)
        if node.operator == "square":
            return 2 * arguments[0]
        if node.operator in ("sqrt", "rsqrt"):
            return arguments[0] / 2
        return arguments[0] if node.operator == "div" else max(arguments, default=0.0)

    def _subtracts(self, graph: Graph, node: Node, arguments: Sequence[float]) -> float:
        """Return the degree of what a node subtracts; a maximum of the same values cancels exactly."""
        if node.operator not in ("add", "sub"):
            return 0.0
        producers = [graph.producer(value) for value in node.inputs]
        if any(producer.operator == "reduce_max" for producer in producers):
            return 0.0
        minus = node.operator == "sub" or any(_is_negative(graph, producer) for producer in producers)
        return min(arguments) if minus else 0.0


def _is_negative(graph: Graph, node: Node) -> bool:
    """Whether a value is a negated or negatively scaled one."""
    if node.operator == "neg":
        return True
    factors = [graph.producer(value) for value in node.inputs] if node.operator == "mul" else []
    return any(f.operator == "constant" and float(node_attributes(f)["value"]) < 0 for f in factors)
