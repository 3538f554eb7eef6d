"""Discrete Fourier transforms of real frames of a signal on CPUs, of lengths that are powers of two.

A frame of L numbers is a complex row of L / 2, transformed as a matrix: its columns, then, turned and
transposed, its columns again, so that most loops are over neighbours in memory (Bailey's four steps, by
Stockham's passes). The transform of all numbers follows from that of their pairs by its symmetry.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v

LANES = 8
"""Numbers of a vector."""


def emit_frames(length: int, name: str) -> Any:
    """Emit ``(step, x, window, turns, out)``: frame f of a row is ``x[row, f * step:] * window``, then 0.

    length: Of the transform, a power of two from 16 on, and no less than the window's.
    x: float32 ``[rows, samples]``; the last frame ends in it.
    window: float32 ``[W]``.
    turns: float32 ``[2, length]``: cosines and sines of the angles ``-2 pi k / length``.
    out: float32 ``[rows, frames, length / 2 + 1, 2]``: real and imaginary parts.
    """
    half = length // 2
    with b.function(name) as result:
        step = I.arg("step", I.int32())
        rows, samples, taken, frames = (b.symbol(s) for s in ("rows", "samples", "W", "frames"))
        x = b.tensor("x", [rows, samples], "float32", align=4)
        window = b.tensor("window", [taken], "float32", align=4)
        turns = b.tensor("turns", [2, length], "float32", align=4)
        out = b.tensor("out", [rows, frames, half + 1, 2], "float32", align=4)
        columns = 1 << ((half.bit_length() - 1) // 2)
        count = half // columns
        with v.parallel(rows * frames) as number:
            row, frame = tirx.floordiv(number, frames), tirx.floormod(number, frames)
            given, other = Complex(half), Complex(half)
            _load(given, x, window, row, frame * step)
            made, free = _columns(given, other, count, columns, turns, length)
            _turned(made, free, count, columns, turns)
            whole, _ = _columns(free, made, columns, count, turns, length)
            _whole(whole, out, row, frame, turns, half)
    return result.func


class Complex:
    """Memory for complex numbers: real parts, imaginary parts."""

    def __init__(self, count: int) -> None:
        self.parts = v.scratch(count, "float32"), v.scratch(count, "float32")

    def __getitem__(self, at: Expr) -> tuple[Expr, Expr]:
        return self.parts[0][at], self.parts[1][at]

    def store(self, value: tuple[Expr, Expr], at: Expr) -> None:
        for part, number in zip(self.parts, value, strict=True):
            b.store(part, number, at)


def _times(value: tuple[Expr, Expr], turns: Any, at: Expr) -> tuple[Expr, Expr]:
    """Return a complex number turned by an angle of the table."""
    (real, imaginary), cosine, sine = value, turns[0, at], turns[1, at]
    return real * cosine - imaginary * sine, real * sine + imaginary * cosine


def _load(to: Complex, x: Any, window: Any, row: Expr, begin: Expr) -> None:
    """Emit a frame as complex numbers of two neighbours each."""
    half, taken = to.parts[0].shape[0], window.shape[0]
    pairs = b.bind(tirx.floordiv(taken, 2))
    with b.loop(pairs) as n:
        for at, part in enumerate(to.parts):
            b.store(part, x[row, begin + 2 * n + at] * window[2 * n + at], n)
    with b.loop(half - pairs) as n:
        to.store((T.float32(0), T.float32(0)), pairs + n)
    with b.when(tirx.floormod(taken, 2) == 1):
        b.store(to.parts[0], x[row, begin + taken - 1] * window[taken - 1], pairs)


def _columns(
    a: Complex, c: Complex, count: int, columns: int, turns: Any, length: int
) -> tuple[Complex, Complex]:
    """Emit transforms of a matrix's columns, ``[count, columns]``; returns the result, and what is free."""
    spread = 1
    while count > 1:
        _pass(a, c, count // 2, spread * columns, turns, length // count)
        a, c, count, spread = c, a, count // 2, spread * 2
    return a, c


def _pass(a: Complex, c: Complex, half: int, width: int, turns: Any, gap: int) -> None:
    """Emit one of Stockham's passes over ``2 * half`` blocks of ``width`` numbers."""
    lanes = min(width, LANES)
    with b.loop(half) as p, b.loop(width // lanes) as block, b.vector(lanes) as lane:
        at = p * width + block * lanes + lane
        one, other = a[at], a[at + half * width]
        to = at + p * width
        c.store((one[0] + other[0], one[1] + other[1]), to)
        c.store(_times((one[0] - other[0], one[1] - other[1]), turns, p * gap), to + width)


def _turned(a: Complex, c: Complex, count: int, columns: int, turns: Any) -> None:
    """Emit ``c[n, k] = a[k, n]`` turned by ``n * k`` parts of the circle of all numbers."""
    with b.loop(columns) as n, b.loop(count) as k:
        c.store(_times(a[k * columns + n], turns, 2 * n * k), n * count + k)


def _whole(z: Complex, out: Any, row: Expr, frame: Expr, turns: Any, half: int) -> None:
    """Emit the transform of all real numbers from that of their pairs."""
    first = z[0]
    for k, number in ((0, first[0] + first[1]), (half, first[0] - first[1])):
        b.store(out, number, row, frame, k, 0)
        b.store(out, T.float32(0), row, frame, k, 1)
    with b.loop(half - 1) as before:
        k = before + 1
        (real, imaginary), (far, opposite) = z[k], z[half - k]
        even = (real + far) * T.float32(0.5), (imaginary - opposite) * T.float32(0.5)
        odd = _times(((imaginary + opposite) * T.float32(0.5), (far - real) * T.float32(0.5)), turns, k)
        for at in range(2):
            b.store(out, even[at] + odd[at], row, frame, k, at)
