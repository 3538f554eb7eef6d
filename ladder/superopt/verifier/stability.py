"""Floating-point stability: programs run in their own precision, against float64, on adversarial inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ladder.ir.graph import Graph
from ladder.ir.interpret import NUMERIC, Domain, interpret
from ladder.superopt.verifier.coverage import require_complete
from tile_types.errors import VerificationError
from tile_types.tile import Tile
from tile_types.ttype import TType

Array = npt.NDArray[np.float64]


def _outlier(values: Array) -> Array:
    """One element far above the rest, as activations of language models have."""
    result = values.copy()
    result.flat[:: max(1, values.size // 2)] *= 256.0
    return result


def _decades(values: Array) -> Array:
    """Magnitudes from 2**-8 to 2**8 side by side."""
    return np.asarray(values * np.exp2(np.arange(values.size).reshape(values.shape) % 17 - 8.0))


MAGNITUDES: dict[str, Callable[[Array], Array]] = {
    "one": lambda values: values,
    "small": lambda values: values * 2.0**-10,
    "tiny": lambda values: values * 2.0**-16,
    "large": lambda values: values * 2.0**6,
    "huge": lambda values: values * 2.0**10,
    "outlier": _outlier,
    "decades": _decades,
    "cancelling": lambda values: 1.0 + values * 2.0**-6,
}
"""Name -> what it makes of standard normal inputs. Each input gets each in turn, the others ``one``."""

SLACK = 4.0
"""How many times the original's own error in the same precision is still stable."""


@dataclass(frozen=True)
class Stability:
    """Result of `check_stability`.

    Parameters
    ----------
    stable
        Whether the candidate passed on all magnitudes.
    reason
        The first magnitudes that it failed on, and how.
    error
        The candidate's largest relative Frobenius error against float64 where the original is finite.
    original
        The original's.
    """

    stable: bool
    reason: str
    error: float
    original: float


def rounding_domain() -> Domain:
    """Return float64 arithmetic where each result is rounded to its tile's type, without saturation."""
    return replace(NUMERIC, keep=lambda node, value: rounded(value, node.tile))


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
    return np.asarray(ttype.decode_codes(ttype.encode(values)), np.float64)


def _bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16


_NATIVE: dict[str, Any] = {"float16": np.float16, "float32": np.float32, "bfloat16": _bfloat16()}


def check_stability(
    candidate: Graph, original: Graph, *, tolerance: float = 2e-2, seed: int = 0, trials: int = 1
) -> Stability:
    """Compare a candidate's error with the original's, both computed in their own precision.

    Parameters
    ----------
    candidate, original
        Programs with the same signature and numeric extents; inputs of element types.
    tolerance
        Relative Frobenius error that is always accepted: that of the output's precision.
    seed, trials
        Of the inputs, and how many per magnitude.

    Returns
    -------
    Stability
        Unstable if, on any magnitudes on which the original is finite, the candidate is not, or its
        error exceeds both ``tolerance`` and `SLACK` times the original's.
    """
    require_complete(candidate)
    require_complete(original)
    generator = np.random.default_rng(seed)
    worst = Stability(True, "", 0.0, 0.0)
    for label, operands in _inputs(original, generator, trials):
        with np.errstate(all="ignore"):
            exact = interpret(original, operands, NUMERIC)
            found = _error(interpret(candidate, operands, rounding_domain()), exact)
            wanted = _error(interpret(original, operands, rounding_domain()), exact)
        if not np.isfinite(wanted):
            continue
        worst = replace(worst, error=max(worst.error, found), original=max(worst.original, wanted))
        if found > max(tolerance, SLACK * wanted):
            reason = f"{label}: relative error {found:.1e}, the original has {wanted:.1e}"
            return replace(worst, stable=False, reason=reason)
    return worst


def _inputs(graph: Graph, generator: np.random.Generator, trials: int) -> Any:
    tiles = [node.tile for node in graph.inputs]
    if any(tile.ttype.is_block for tile in tiles):
        raise VerificationError("stability is checked on element types; expand decodes of quantized inputs")
    for _ in range(trials):
        for name, change in MAGNITUDES.items():
            for which in range(len(tiles)):
                drawn = [generator.standard_normal(tile.known_shape) for tile in tiles]
                drawn[which] = change(drawn[which])
                label = f"{name} {graph.inputs[which].name}"
                yield label, [rounded(values, tile) for values, tile in zip(drawn, tiles, strict=True)]


def _error(results: Sequence[Array], exact: Sequence[Array]) -> float:
    """Return the largest relative Frobenius error of the outputs; infinity if one is not finite."""
    errors = []
    for result, wanted in zip(results, exact, strict=True):
        if not np.isfinite(result).all() or not np.isfinite(wanted).all():
            return float("inf")
        scale = float(np.linalg.norm(wanted)) or 1.0
        errors.append(float(np.linalg.norm(result - wanted)) / scale)
    return max(errors)
