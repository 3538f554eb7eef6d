"""Reductions of ATen as tile graph rows: sums, means, extremes, variances; see `aten_rows`."""

from __future__ import annotations

import math
from typing import Any

from ladder.frontend.importer import Importer, Row, wide_of


def _summed(im: Importer, out: str, x: str, axes: Any = None, keep: bool = False, **_: Any) -> Any:
    wide = "float32" if out in ("float16", "bfloat16") else out
    return im.cast(im.reduce("reduce_sum", im.cast(x, wide), _axes(im, x, axes), keep), out)


def _averaged(im: Importer, out: str, x: str, axes: Any = None, keep: bool = False, **_: Any) -> Any:
    return im.cast(im.mean(im.cast(x, wide_of(out)), _axes(im, x, axes), keep), out)


def _largest(im: Importer, out: str, x: str, axes: Any = None, keep: bool = False) -> Any:
    if out == "bool":  # of nothing the least uint8, which is False
        return im.cast(_largest(im, "uint8", im.cast(x, "uint8"), axes, keep), out)
    return im.reduce("reduce_max", x, _axes(im, x, axes), keep)


def _smallest(im: Importer, out: str, x: str, axes: Any = None, keep: bool = False) -> Any:
    """Negate around the greatest; of integers ``-1 - x``, which all of them have."""
    if out == "bool":
        return im.cast(_smallest(im, "int32", im.cast(x, "int32"), axes, keep), out)

    def turned(value: str) -> str:
        if "int" in out:
            return im.arithmetic("sub", [-1, value], out)
        return im.arithmetic("neg", [value], out)

    return turned(im.reduce("reduce_max", turned(x), _axes(im, x, axes), keep))


def _norm(
    im: Importer, out: str, x: str, order: float = 2, axes: Any = None, keep: bool = False, **_: Any
) -> Any:
    """Return the norm of order 2, 1 or infinity; other orders are calls."""
    wide, chosen = wide_of(out), _axes(im, x, axes)
    if order not in (1, 2, math.inf) or not out.startswith(("float", "bfloat")):
        return None
    parts = im.g.add("square" if order == 2 else "abs", im.cast(x, wide))
    found = im.reduce("reduce_max" if order == math.inf else "reduce_sum", parts, chosen, keep)
    return im.cast(im.g.add("sqrt", found) if order == 2 else found, out)


def _axes(im: Importer, x: str, axes: Any) -> list[int]:
    rank = len(im.shape(x))
    chosen = [axes] if isinstance(axes, int) else axes
    return [axis % rank for axis in chosen] if chosen and rank else list(range(rank))


def _moments(*, root: bool = False, both: bool = False) -> Row:
    """Return a row of the variance or its root, or of (that, mean)."""

    def row(
        im: Importer, out: str, x: str, axes: Any = None, *, correction: Any = 1, keepdim: bool = False
    ) -> Any:
        found = _mean_and_variance(im, out, x, axes, correction, keepdim, root)
        return found if both else found[0]

    return row


def _mean_and_variance(
    im: Importer, out: str, x: str, axes: Any, correction: Any, keepdim: bool, root: bool
) -> Any:
    """Return (variance or its root, mean); on CPUs those of float32 in float64, as torch takes them."""
    within = "float64" if im.on_cpu and out == "float32" else wide_of(out)
    chosen, wide = _axes(im, x, axes), im.cast(x, within)
    mean = im.mean(wide, chosen)
    deviations = im.g.add("square", im.g.add("sub", wide, mean))
    sums = im.reduce("reduce_sum", deviations, chosen, True)
    count = im.count(wide, chosen)
    if correction:
        left = im.apply("sub", [count, float(correction)], within)
        count = im.apply("maximum", [left, 0.0], within)
    variance = im.g.add("div", sums, count)
    results = (im.g.add("sqrt", variance) if root else variance, mean)
    shape = [extent for at, extent in enumerate(im.shape(x)) if at not in chosen]
    return tuple(im.cast(r if keepdim else im.reshape(r, shape), out) for r in results)


REDUCTIONS: dict[str, Row] = {
    "sum.default": _summed,
    "sum.dim_IntList": _summed,
    "mean.default": _averaged,
    "mean.dim": _averaged,
    "amax.default": _largest,
    "amin.default": _smallest,
    "linalg_vector_norm.default": _norm,
    "var.correction": _moments(),
    "std.correction": _moments(root=True),
    "var_mean.correction": _moments(both=True),
    "std_mean.correction": _moments(root=True, both=True),
}
"""Name and overload -> row."""
