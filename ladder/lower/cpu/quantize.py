"""Dynamic activations: one int8 scale per token, chosen from the token's largest magnitude."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.gemm import SMALLEST_SCALE, require_quantizable
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v
from ladder.lower.cpu.vectors import BYTES, as_float
from targets import TileDevice

LARGEST = 127.0
"""Largest int8 magnitude used: symmetric, so that -x quantizes to minus the code of x."""

WIDTH = 32


def emit_quantize_kernel(source: str, device: TileDevice, name: str) -> Any:
    """Emit ``(x[M,K], codes int8[M,K], token_scale float32[M])``: codes = round(x * (1 / scale)).

    ``scale = max |x| / 127`` per row, at least 2**-126, and NaN for a row with infinity or NaN; ties go to
    even.
    """
    del device
    require_quantizable(source)
    with b.function(name) as result:
        m, k = b.symbol("M"), b.symbol("K")
        x = b.tensor("x", (m, k), source, align=BYTES[source])
        codes = b.tensor("codes", (m, k), "int8", align=1)
        scales = b.tensor("token_scale", (m,), "float32", align=4)
        with v.parallel(m) as row:
            largest = _largest(x, source, row, k)
            finite = largest <= tirx.max_value("float32")
            least = tirx.max(largest / T.float32(LARGEST), T.float32(SMALLEST_SCALE))
            scale = b.bind(tirx.Select(finite, least, T.float32(float("nan"))))
            b.store(scales, scale, row)
            inverse = b.bind(T.float32(1) / scale)

            def code(column: Expr) -> None:
                scaled = T.nearbyint(as_float(x[row, column], source) * inverse)
                b.store(codes, T.Cast("int8", T.Cast("int32", scaled)), row, column)

            _by_vectors(k, code)
    return result.func


def _largest(x: Any, source: str, row: Expr, k: Expr) -> Expr:
    """Emit the largest magnitude of a row, infinity if NaN is among them."""
    best = v.scratch(WIDTH, "float32")
    b.store(best, v.constant(0, "float32", WIDTH), v.lanes(0, WIDTH))
    with b.loop(k // WIDTH) as chunk, b.vector(WIDTH) as lane:
        b.store(best, _larger(best[lane], as_float(x[row, chunk * WIDTH + lane], source)), lane)
    with b.loop(k - k // WIDTH * WIDTH) as rest:
        b.store(best, _larger(best[0], as_float(x[row, k // WIDTH * WIDTH + rest], source)), 0)
    total = best[0]
    for lane in range(1, WIDTH):
        total = tirx.max(total, best[lane])
    return b.bind(total)


def _larger(best: Expr, value: Expr) -> Expr:
    """Return the larger magnitude; a comparison with NaN is false, so NaN counts as infinity."""
    magnitude = T.fabs(value)
    ordered = magnitude <= tirx.max_value("float32")
    return tirx.Select(ordered, tirx.max(best, magnitude), T.infinity("float32"))


def _by_vectors(k: Expr, emit: Any) -> None:
    """Emit ``emit(column)`` for every column, whole vectors first."""
    with b.loop(k // WIDTH) as chunk, b.vector(WIDTH) as lane:
        emit(chunk * WIDTH + lane)
    with b.loop(k - k // WIDTH * WIDTH) as rest:
        emit(k // WIDTH * WIDTH + rest)
