"""Stored words of checkpoints: transpose them, or nibbles in them, invert bits, exchange halves of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v
from ladder.lower.cpu.transposed import EIGHT, transposed

LANES = 16
"""Words that are read or written at a time: a line of the cache."""

SIDE = 64
"""Words of a row that are transposed at a time: several lines, which memory gives faster than one."""

STEPS = 4
"""Tiles of a panel that a thread transposes one after the other."""

PANEL = 1024
"""Lines that a thread changes at a time."""

NIBBLES, BITS = 8, 4
"""Codes of a word, and the bits of each."""

LOW_HALVES = 0x0F0F0F0F
"""The lower half of each byte of a word."""

ROUNDS = ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, LOW_HALVES))
"""Lines that are exchanged, and which of their nibbles, to transpose the 8 x 8 nibbles of 8 words."""


def emit_transposed_words(name: str) -> Any:
    """Emit ``(flip int32[1], words int32[R, C], out int32[C, R])``: ``out = words.T ^ flip``."""
    with b.function(name) as result:
        rows, columns = b.symbol("R"), b.symbol("C")
        flip = b.tensor("flip", (1,), "int32", align=4)
        words = b.tensor("words", (rows, columns), "int32", align=4)
        out = b.tensor("out", (columns, rows), "int32", align=64)
        with _tiles_of(columns, _tiles(rows, SIDE)) as (column, step):
            first = b.bind(step * SIDE)
            tile = v.scratch(SIDE * SIDE, "int32")
            with b.loop(SIDE) as line, b.loop(SIDE // LANES) as part:
                _read_line(tile, line * SIDE + part * LANES, words, first + line, column + part * LANES)
            with b.loop(SIDE // EIGHT) as part, b.loop(SIDE // LANES) as line:
                start = line * LANES * SIDE + part * EIGHT
                for at, values in enumerate(_columns(tile, start)):
                    _write_line(out, column + part * EIGHT + at, first + line * LANES, values, flip[0])
    return result.func


def emit_changed_words(swaps: bool, name: str) -> Any:
    """Emit ``(flip int32[1], octets uint8[L, 64], out int32[L, 16])``: words of octets, inverted by ``flip``.

    swaps: Whether the halves of each byte are exchanged first.
    """
    with b.function(name) as result:
        lines = b.symbol("L")
        flip = b.tensor("flip", (1,), "int32", align=4)
        octets = b.tensor("octets", (lines, 4 * LANES), "uint8", align=1)
        out = b.tensor("out", (lines, LANES), "int32", align=64)
        with v.helpers(v.STREAM_HELPER), v.parallel(_tiles(lines, PANEL)) as panel:
            first = b.bind(panel * PANEL)
            with b.loop(tirx.min(lines - first, PANEL)) as at:
                value = T.reinterpret(f"uint32x{LANES}", octets[first + at, v.lanes(0, 4 * LANES)])
                if swaps:
                    value = _swapped(b.bind(value))
                value = T.reinterpret(f"int32x{LANES}", value)
                v.stream(out.ptr_to([first + at, 0]), b.bind(value ^ v.splat(flip[0], LANES)))
    return result.func


def _swapped(words: Expr) -> Expr:
    """Return words with the halves of each byte exchanged."""
    low, high = (v.shifted(words, right, "uint32", LANES) for right in (BITS, -BITS))
    high = v.masked(high, LOW_HALVES << BITS, "uint32", LANES)
    return T.bitwise_or(v.masked(low, LOW_HALVES, "uint32", LANES), high)


def emit_transposed_nibbles(name: str) -> Any:
    """Emit ``(flip int32[1], order int32[8], words int32[K, C], out int32[8 * C, K // 8])``.

    Code i of ``words[k, c]`` becomes code ``k % 8`` of ``out[8 * c + order[i], k // 8]``, ``flip`` inverted.
    """
    with b.function(name) as result:
        rows, columns, steps, outputs = (b.symbol(s) for s in ("K", "C", "S", "N"))
        flip, order = (b.tensor(s, (n,), "int32", align=4) for s, n in (("flip", 1), ("order", NIBBLES)))
        words = b.tensor("words", (rows, columns), "int32", align=4)
        out = b.tensor("out", (outputs, steps), "int32", align=64)
        with _tiles_of(columns, _tiles(steps, LANES)) as (column, step):
            first = b.bind(step * LANES)
            tile = v.scratch(NIBBLES * LANES * SIDE, "int32")
            with b.loop(LANES) as inner, b.loop(SIDE // LANES) as part:
                line = v.scratch(NIBBLES * LANES, "int32")
                for word in range(NIBBLES):
                    row = (first + inner) * NIBBLES + word
                    _read_line(line, word * LANES, words, row, column + part * LANES)
                for word, value in enumerate(_exchanged(line)):
                    b.store(tile, value, v.lanes((word * LANES + inner) * SIDE + part * LANES, LANES))
            with b.loop(NIBBLES) as word, b.loop(SIDE // EIGHT) as part:
                start = word * LANES * SIDE + part * EIGHT
                for at, values in enumerate(_columns(tile, start)):
                    output = (column + part * EIGHT + at) * NIBBLES + order[word]
                    _write_line(out, output, first, values, flip[0])
    return result.func


@contextmanager
def _tiles_of(columns: Expr, steps: Expr) -> Iterator[tuple[Expr, Expr]]:
    """Emit loops over tiles, which may write past the caches: first column, step.

    Threads share both: a matrix of few columns has as many tiles as another.
    """
    slices = _tiles(steps, STEPS)
    with v.helpers(v.STREAM_HELPER), v.parallel(_tiles(columns, SIDE) * slices) as task:
        panel, start = b.bind(tirx.floordiv(task, slices)), b.bind(tirx.floormod(task, slices) * STEPS)
        with b.loop(tirx.min(steps - start, STEPS)) as at:
            yield b.bind(panel * SIDE), b.bind(start + at)


def _tiles(extent: Expr, size: int) -> Expr:
    return tirx.floordiv(extent + size - 1, size)


def _read_line(tile: Any, place: Expr, words: Any, row: Expr, column: Expr) -> None:
    """Read some words of a row, whole or what there is of them."""
    rows, columns = words.shape

    def part() -> None:
        with b.when(row < rows), b.loop(tirx.max(columns - column, 0)) as at:
            b.store(tile, words[row, column + at], place + at)

    def whole() -> None:
        b.store(tile, words[row, v.lanes(column, LANES)], v.lanes(place, LANES))

    b.either(tirx.all(row < rows, column + LANES <= columns), whole, part)


def _columns(tile: Any, start: Expr) -> Iterator[Expr]:
    """Give eight columns of some lines of a tile, from one place on."""
    squares = [
        transposed([tile[v.lanes(start + (line + at) * SIDE, EIGHT)] for at in range(EIGHT)])
        for line in range(0, LANES, EIGHT)
    ]
    for parts in zip(*squares, strict=True):
        yield v.joined(parts, EIGHT)


def _write_line(out: Any, row: Expr, column: Expr, values: Expr, flip: Expr) -> None:
    """Write some words of a row, as many as fit; past the caches where they are a line of memory."""
    rows, columns = out.shape
    changed = b.bind(values ^ v.splat(flip, LANES))

    def whole() -> None:
        b.store(out, changed, row, v.lanes(column, LANES))

    def part() -> None:
        with b.when(row < rows):
            v.store_first(out, changed, row, column, LANES, tirx.max(columns - column, 0))

    fits = tirx.all(row < rows, column + LANES <= columns)
    b.either(
        tirx.all(fits, columns % LANES == 0),
        lambda: v.stream(out.ptr_to([row, column]), changed),
        lambda: b.either(fits, whole, part),
    )


def _exchanged(line: Any) -> list[Expr]:
    """Return the transposed 8 x 8 nibbles of each column of 8 lines of words."""
    read = (line[v.lanes(at * LANES, LANES)] for at in range(NIBBLES))
    words = [b.bind(T.reinterpret(f"uint32x{LANES}", word)) for word in read]
    for distance, mask in ROUNDS:
        for low in (at for at in range(NIBBLES) if not at & distance):
            x, y = words[low], words[low + distance]
            moved = v.masked(v.shifted(x, 4 * distance, "uint32", LANES) ^ y, mask, "uint32", LANES)
            moved = b.bind(moved)
            words[low + distance] = b.bind(y ^ moved)
            words[low] = b.bind(x ^ v.shifted(moved, -4 * distance, "uint32", LANES))
    return [T.reinterpret(f"int32x{LANES}", word) for word in words]
