"""Take blocks of codes apart, as files hold them: canonical storage of the codes, scales and offsets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from math import gcd
from operator import or_
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v
from tile_types.packing import is_dense
from tile_types.stored_blocks import Factors, Octets, Pieces, Plane, StoredBlocks

Read = Callable[[int, int], Expr]
"""First byte in the block, count -> bytes."""

CHUNK = 512
"""Codes, about, that are taken out before they are packed into words that cross blocks."""

LANES, EIGHT = 32, 8
"""Codes in a vector; and those of a look-up."""


def emit_stored_blocks(form: StoredBlocks, name: str) -> Any:
    """Emit ``(octets uint8[R, B, nbytes], grid, marks uint64[..], codes [R, U], numbers...)``.

    grid, marks: Tables of look-ups: eight codes a row, or four of a grid with two integers.
    codes: Canonical storage of rows: uint8, or uint32 where codes do not fill words.
    numbers: float32 ``[R, B * integers]`` of factors, where they are kept followed by their numbers
        float16 ``[R, B]`` and integers int8 ``[R, B * integers]``; or uint8 ``[R, B * count]``.
    """
    dense = is_dense(form.bits)
    per = (8 if dense else 32) // form.bits
    chunk = 1 if dense else max(1, CHUNK // form.elements) * (per // gcd(per, form.elements))
    with b.function(name) as result:
        rows, blocks, units, levels, signs = (b.symbol(s) for s in ("R", "B", "U", "levels", "signs"))
        octets = b.tensor("octets", (rows, blocks, form.nbytes), "uint8", align=1)
        tables = [b.tensor(s, (n,), "uint64", align=8) for s, n in (("grid", levels), ("marks", signs))]
        codes = b.tensor("codes", (rows, units), "uint8" if dense else "uint32", align=1 if dense else 4)
        numbers = [_number_tensors(part, at, rows, blocks) for at, part in enumerate(form.numbers)]
        with v.parallel(rows) as row, b.loop(ceildiv(blocks, chunk)) as step:
            room = None if dense else v.scratch(chunk * form.elements + EIGHT * per, "uint8")
            count = b.bind(tirx.min(chunk, blocks - step * chunk))
            with b.loop(count) as inner:
                block = b.bind(step * chunk + inner)

                def read(at: int, count: int) -> Expr:
                    return octets[row, block, v.lanes(at, count)]

                for part, target in zip(form.numbers, numbers, strict=True):
                    _write_number(part, read, target, row, block)
                for first, values in _codes(form, read, tables):
                    if dense:
                        _pack_bytes(values, form.bits, codes, row, block * form.elements + first)
                    else:
                        b.store(room, values, v.lanes(inner * form.elements + first, _count(values)))
            if not dense:
                start = step * (chunk * form.elements // per)
                pack_words(form.bits, room, count * form.elements, codes, row, start)
    return result.func


def _number_tensors(part: Factors | Octets, at: int, rows: Expr, blocks: Expr) -> list[Any]:
    if not isinstance(part, Factors):
        return [b.tensor(f"numbers{at}", (rows, blocks * part.count), "uint8", align=1)]
    each = rows, blocks * len(part.integers)
    found = [b.tensor(f"numbers{at}", each, "float32", align=4)]
    if part.is_kept:
        found.append(b.tensor(f"halves{at}", (rows, blocks), "float16", align=2))
        found.append(b.tensor(f"integers{at}", each, "int8", align=1))
    return found


def ceildiv(extent: Expr, size: int) -> Expr:
    """Return a quotient that is rounded up."""
    return tirx.floordiv(extent + size - 1, size)


def _count(value: Expr) -> int:
    """Return the elements of a vector."""
    return int(str(value.ty.dtype).partition("x")[2] or 1)


def _codes(form: StoredBlocks, read: Read, tables: list[Any]) -> Iterator[tuple[int, Expr]]:
    """Give vectors of uint8 codes of a block, and the element that each begins with."""
    grid, marks = tables
    for at, lookup in enumerate(form.lookups):
        parts = [grid[_integer(pieces, read)] for pieces in lookup.grid]
        whole = parts[0] if len(parts) == 1 else parts[0] | T.shift_left(parts[1], T.uint64(32))
        total = whole + marks[_integer(lookup.marks, read)]
        yield EIGHT * at, T.reinterpret(f"uint8x{EIGHT}", b.bind(total))
    lanes = min([LANES, *(plane.width for plane in form.planes if plane.width > 1)])
    for first in range(0, form.elements if form.planes else 0, lanes):
        total = reduce(or_, [_field(plane, read, first, lanes) for plane in form.planes])
        total = b.bind(total ^ v.constant(form.flip, "uint8", lanes) if form.flip else total)
        if form.vanishing is not None:
            zero = v.constant(0, "uint8", lanes)
            total = tirx.Select(total == v.constant(form.vanishing, "uint8", lanes), zero, total)
        yield first, b.bind(total)


def _field(plane: Plane, read: Read, first: int, lanes: int) -> Expr:
    """Return the bits of a plane of some consecutive codes, where they belong."""
    if plane.width == 1:
        return _bits_in_order(plane, read, first, lanes)
    at, rest = divmod(first, plane.width * (8 // plane.bits))
    slot, inner = divmod(rest, plane.width)
    octets = read(plane.at + at * plane.width + inner, lanes)
    mask = (1 << plane.bits) - 1 << plane.shift
    moved = v.shifted(octets, slot * plane.bits - plane.shift, "uint8", lanes)
    return v.masked(moved, mask, "uint8", lanes)


def _bits_in_order(plane: Plane, read: Read, first: int, lanes: int) -> Expr:
    """Return fields, single bits as a rule, that lie in the order of the codes."""
    if plane.bits > 1:
        unit, size = f"uint{lanes * plane.bits}", lanes * plane.bits // 8
        octets = read(plane.at + first * plane.bits // 8, size)
        places = v.table([plane.bits * at for at in range(lanes)], unit)
        moved = T.shift_right(v.splat(T.reinterpret(unit, octets), lanes), places)
        fields = T.Cast(f"uint8x{lanes}", v.masked(moved, (1 << plane.bits) - 1, unit, lanes))
        return v.shifted(fields, -plane.shift, "uint8", lanes)
    word = v.splat(T.reinterpret(f"uint{lanes}", read(plane.at + first // 8, lanes // 8)), lanes)
    one = T.bitwise_and(word, v.table([1 << at for at in range(lanes)], f"uint{lanes}"))
    there = one != v.constant(0, f"uint{lanes}", lanes)
    return tirx.Select(there, v.constant(1 << plane.shift, "uint8", lanes), v.constant(0, "uint8", lanes))


def _integer(pieces: Pieces, read: Read) -> Expr:
    """Return an integer that some bits of a block are, as int32."""
    parts = []
    for first, width, left in pieces:
        at, right = divmod(first, 8)
        while width > 0:
            here = min(width, 8 - right)
            octet = T.Cast("int32", read(at, 1))
            field = T.bitwise_and(T.shift_right(octet, T.int32(right)), T.int32((1 << here) - 1))
            parts.append(T.shift_left(field, T.int32(left)))
            at, right, left, width = at + 1, 0, left + here, width - here
    return b.bind(reduce(or_, parts))


def _write_number(part: Factors | Octets, read: Read, targets: list[Any], row: Expr, block: Expr) -> None:
    """Store the scales, or offsets, of a block."""
    target, *kept = targets
    if isinstance(part, Octets):
        b.store(target, read(part.at, part.count), row, v.lanes(block * part.count, part.count))
        return
    half = b.bind(T.reinterpret("float16", T.Cast("uint16", _integer(part.number, read))))
    number = b.bind(T.Cast("float32", half) * T.float32(part.times))
    if kept:
        b.store(kept[0], half * T.float16(part.times), row, block)
    for at, pieces in enumerate(part.integers):
        integer = b.bind((_integer(pieces, read) ^ T.int32(part.flip)) - T.int32(part.less))
        place = block * len(part.integers) + at
        b.store(target, number * T.Cast("float32", integer), row, place)
        if kept:
            b.store(kept[1], T.Cast("int8", integer), row, place)


def _pack_bytes(values: Expr, bits: int, codes: Any, row: Expr, first: Expr) -> None:
    """Store codes whose width divides 8, several in a byte."""
    per = 8 // bits
    packed = merged_bytes(values, bits)
    b.store(codes, packed, row, v.lanes(tirx.floordiv(first, per), _count(values) // per))


def merged_bytes(values: Expr, bits: int) -> Expr:
    """Return codes, a byte each, whose width divides 8 as bytes without gaps, lowest bits first."""
    per = 8 // bits
    if per == 1:
        return values
    count, unit = _count(values) // per, f"uint{8 * per}"
    wide = b.bind(T.reinterpret(f"{unit}x{count}", values))
    total = reduce(or_, [v.shifted(wide, at * (8 - bits), unit, count) for at in range(per)])
    return T.Cast(f"uint8x{count}", v.masked(total, 255, unit, count))


def pack_words(bits: int, room: Any, count: Expr, codes: Any, row: Expr, start: Expr) -> None:
    """Pack codes into words, as many as fit each, eight words at a time; what is missing of the last is 0."""
    per = 32 // bits
    for at in range(0, EIGHT * per, EIGHT):
        b.store(room, v.constant(0, "uint8", EIGHT), v.lanes(count + at, EIGHT))
    words = b.bind(ceildiv(count, per))
    with b.loop(ceildiv(words, EIGHT)) as step:
        first = b.bind(step * EIGHT)
        places = [b.bind((first + at) * per) for at in range(EIGHT)]
        octets = [T.reinterpret("uint64", room[v.lanes(place, EIGHT)]) for place in places]
        total = _merged(v.joined(octets), bits, min(per, EIGHT))
        for at in range(EIGHT, per):
            more = v.joined([T.Cast("uint32", room[place + at]) for place in places])
            total = total | v.shifted(more, -at * bits, "uint32", EIGHT)
        _store_words(codes, b.bind(total), row, start + first, words - first)


def _store_words(codes: Any, words: Expr, row: Expr, first: Expr, count: Expr) -> None:
    """Store eight words, as many as count."""
    b.either(
        count >= EIGHT,
        lambda: b.store(codes, words, row, v.lanes(first, EIGHT)),
        lambda: v.store_first(codes, words, row, first, EIGHT, count),
    )


def _merged(codes: Expr, bits: int, count: int) -> Expr:
    """Return the first codes, bytes of eight uint64, without gaps as uint32; by pairs, fours, eights."""

    def masked(value: Expr, mask: int) -> Expr:
        return v.masked(value, mask, "uint64", EIGHT)

    found = masked(codes, (1 << 8 * count) - 1) if count < EIGHT else codes
    for held in (1, 2, 4):
        room, low = 16 * held, (1 << held * bits) - 1
        lower = sum(low << first for first in range(0, 64, room))
        moved = v.shifted(found, 8 * held - held * bits, "uint64", EIGHT)
        found = b.bind(masked(found, lower) | masked(moved, lower << held * bits))
    return T.Cast(f"uint32x{EIGHT}", found)
