"""Pack canonical storage of codes into the words that CPU kernels read, and take it out of them again."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v
from ladder.lower.cpu.stored_blocks import ceildiv, merged_bytes, pack_words
from ladder.lower.cpu.transposed import EIGHT, transposed
from schedules.cpu_layout import LANES, ROWS, UNIT, CpuLayout, PackForm, Plane
from tile_types.packing import is_dense


def emit_packed_codes(form: PackForm, name: str) -> Any:
    """Emit ``(change uint8[2], sizes int32[1], storage [N, S], words int32[blocks, units * bits, 16])``.

    change: The code of what is padded, and bits that are inverted in all codes that are stored.
    sizes: Codes of a row.
    storage: uint8, or uint32 where codes do not fill bytes.
    """
    dense = is_dense(form.stored)
    with b.function(name) as result:
        rows, extent, blocks, lines = (b.symbol(s) for s in ("N", "S", "B", "L"))
        change = b.tensor("change", (2,), "uint8", align=1)
        sizes = b.tensor("sizes", (1,), "int32", align=4)
        storage = b.tensor("storage", (rows, extent), "uint8" if dense else "uint32", align=1 if dense else 4)
        words = b.tensor("words", (blocks, lines, LANES), "int32", align=64)
        with v.helpers(v.STREAM_HELPER), v.parallel(blocks) as block:
            codes = v.scratch(form.columns + EIGHT, "uint8")
            packed = v.scratch(ROWS * form.units * form.bits, "int32")
            with b.loop(ceildiv(lines, form.units * form.bits)) as step:
                first = b.bind(step * form.units * form.bits)

                def one_by_one() -> None:
                    with b.loop(ROWS) as row:
                        start = b.bind(block * ROWS + row), b.bind(step * form.columns)
                        _read_row(form, storage, change, sizes[0], codes, start)
                        with b.loop(form.units) as unit:
                            line = b.bind((row * form.units + unit) * form.bits)
                            taken = b.bind(codes[v.lanes(unit * UNIT, UNIT)])
                            for plane in form.layout.planes:
                                place = v.lanes(line + plane.start, plane.width)
                                b.store(packed, _packed(form, plane, taken), place)
                    _write_columns(form, packed, words, block, first)

                def whole() -> None:
                    _permute_words(form, storage, change[1], words, block, first)

                if form.is_permuted:
                    fits = (block + 1) * ROWS <= rows, (step + 1) * form.columns <= sizes[0]
                    b.either(tirx.all(*fits), whole, one_by_one)
                else:
                    one_by_one()
    return result.func


def _read_row(
    form: PackForm, storage: Any, change: Any, count: Expr, codes: Any, place: tuple[Expr, Expr]
) -> None:
    """Take some codes of a row out, a byte each, padded where there are none."""
    row, column = place
    per, unit = form.per, str(storage.dtype)

    def whole() -> None:
        if is_dense(form.stored):
            with b.loop(form.units) as at:
                octets = storage[row, v.lanes(tirx.floordiv(column + at * UNIT, per), UNIT // per)]
                taken = _spread_bytes(b.bind(octets), form.stored) ^ v.splat(change[1], UNIT)
                b.store(codes, taken, v.lanes(at * UNIT, UNIT))
        else:
            with b.loop(form.columns // per // EIGHT) as at:
                first = at * EIGHT
                taken = storage[row, v.lanes(tirx.floordiv(column, per) + first, EIGHT)]
                _spread_words(b.bind(taken), form.stored, codes, first * per)
            with b.loop(form.units) as at:
                span = v.lanes(at * UNIT, UNIT)
                b.store(codes, codes[span] ^ v.splat(change[1], UNIT), span)

    def part() -> None:
        there = b.bind(tirx.Select(row < storage.shape[0], tirx.max(count - column, 0), 0))
        with b.loop(tirx.min(there, form.columns)) as at:
            found = storage[row, tirx.floordiv(column + at, per)]
            shift = T.Cast(unit, tirx.floormod(column + at, per) * form.stored)
            mask = tirx.const((1 << form.stored) - 1, unit)
            code = T.Cast("uint8", T.bitwise_and(T.shift_right(found, shift), mask))
            b.store(codes, code ^ change[1], at)
        with b.loop(tirx.max(form.columns - there, 0)) as at:
            b.store(codes, change[0], there + at)

    b.either(tirx.all(row < storage.shape[0], column + form.columns <= count), whole, part)


def _spread_bytes(octets: Expr, bits: int) -> Expr:
    """Return the codes of some bytes, a byte each."""
    per = 8 // bits
    if per == 1:
        return octets
    count, unit = UNIT // per, f"uint{8 * per}"
    wide = T.Cast(f"{unit}x{count}", octets)
    total = reduce(or_, [v.shifted(wide, -at * (8 - bits), unit, count) for at in range(per)])
    mask = sum(((1 << bits) - 1) << 8 * at for at in range(per))
    return b.bind(T.reinterpret(f"uint8x{UNIT}", v.masked(total, mask, unit, count)))


def _spread_words(words: Expr, bits: int, codes: Any, first: Expr) -> None:
    """Store the codes of eight words, a byte each: the first eight of each word together."""
    per = 32 // bits
    found = T.Cast(f"uint64x{EIGHT}", words)
    for held in (4, 2, 1):
        room, low = 16 * held, (1 << held * bits) - 1
        lower = sum(low << at for at in range(0, 64, room))
        moved = v.shifted(found, held * bits - 8 * held, "uint64", EIGHT)
        found = b.bind(
            v.masked(found, lower, "uint64", EIGHT) | v.masked(moved, lower << 8 * held, "uint64", EIGHT)
        )
    line = v.scratch(EIGHT, "uint64")
    b.store(line, found, v.lanes(0, EIGHT))
    more = v.scratch(EIGHT, "uint32")
    b.store(more, words, v.lanes(0, EIGHT))
    for at in range(EIGHT):
        place = b.bind(first + at * per)
        b.store(codes, T.reinterpret(f"uint8x{EIGHT}", line[at]), v.lanes(place, EIGHT))
        for beyond in range(EIGHT, per):
            code = T.shift_right(more[at], T.uint32(beyond * bits)) & T.uint32((1 << bits) - 1)
            b.store(codes, T.Cast("uint8", code), place + beyond)


def _order(layout: CpuLayout, plane: Plane) -> list[int]:
    """Return the columns of a unit in the order in which their bits lie in the words of a plane."""
    e = layout.elements
    return [
        (word * plane.slots + slot) * e + element
        for word in range(plane.width)
        for element in range(e)
        for slot in range(plane.slots)
    ]


def _packed(form: PackForm, plane: Plane, codes: Expr) -> Expr:
    """Return a plane's words of a unit of a row."""
    field = v.masked(v.shifted(codes, plane.shift, "uint8", UNIT), (1 << plane.width) - 1, "uint8", UNIT)
    ordered = b.bind(tirx.Shuffle([b.bind(field)], _order(form.layout, plane)))
    kind = "int32" if plane.width == 1 else f"int32x{plane.width}"
    return b.bind(T.reinterpret(kind, merged_bytes(ordered, plane.width)))


def _permute_words(form: PackForm, storage: Any, flip: Expr, words: Any, block: Expr, first: Expr) -> None:
    """Pack whole words of all rows of a block: the codes of one stored word each, in another order."""
    ones = sum(1 << at for at in range(0, 32, form.bits))
    inverted = b.bind(T.Cast("uint32", flip) * T.uint32(ones))
    with b.loop(form.units * form.bits // EIGHT) as part:
        at = b.bind((first + part * EIGHT) * 4)
        halves = []
        for half in range(0, ROWS, EIGHT):
            read = (storage[block * ROWS + half + row, v.lanes(at, 4 * EIGHT)] for row in range(EIGHT))
            lines = [b.bind(T.reinterpret(f"uint32x{EIGHT}", octets)) for octets in read]
            ordered = [_in_order(line ^ v.splat(inverted, EIGHT), form) for line in lines]
            halves.append(transposed([T.reinterpret(f"int32x{EIGHT}", line) for line in ordered]))
        for line, parts in enumerate(zip(*halves, strict=True)):
            target = words.ptr_to([block, first + part * EIGHT + line, 0])
            v.stream(target, b.bind(v.joined(parts, EIGHT)))


def _in_order(words: Expr, form: PackForm) -> Expr:
    """Bring the codes of words from the order of columns into that of elements, and slots within each.

    A code's place is a number whose lowest bits tell the element. Each round exchanges two neighbouring bits
    of all numbers, until those bits are the highest.
    """
    elements = (form.layout.elements - 1).bit_length()
    slots = (form.layout.planes[0].slots - 1).bit_length()
    for low in range(elements - 1, -1, -1):
        for bit in range(low, low + slots):
            words = _exchanged_bits(words, form.bits, bit)
    return words


def _exchanged_bits(words: Expr, bits: int, bit: int) -> Expr:
    """Exchange codes of words: bits ``bit`` and ``bit + 1`` of each code's place change places."""
    distance = bits << bit
    moving = [at for at in range(32 // bits) if at >> bit & 3 == 1]
    mask = sum((1 << bits) - 1 << at * bits for at in moving)
    both = v.masked(v.shifted(words, distance, "uint32", EIGHT) ^ words, mask, "uint32", EIGHT)
    return v.kept(words ^ both ^ v.shifted(both, -distance, "uint32", EIGHT), "uint32", EIGHT)


def _write_columns(form: PackForm, packed: Any, words: Any, block: Expr, first: Expr) -> None:
    """Write some words of the rows of a block, word by word of all rows."""
    width = form.units * form.bits
    with b.loop(width // EIGHT) as part:
        halves = [
            transposed([packed[v.lanes((half + row) * width + part * EIGHT, EIGHT)] for row in range(EIGHT)])
            for half in range(0, ROWS, EIGHT)
        ]
        for at, parts in enumerate(zip(*halves, strict=True)):
            line = b.bind(first + part * EIGHT + at)
            with b.when(line < words.shape[1]):
                v.stream(words.ptr_to([block, line, 0]), b.bind(v.joined(parts, EIGHT)))


def emit_unpacked_codes(form: PackForm, name: str) -> Any:
    """Emit ``(flip uint8[1], sizes int32[1], words int32[blocks, units * bits, 16], storage [N, S])``.

    The inverse of `emit_packed_codes`: bits of ``flip`` are inverted in all codes; places of a stored byte or
    word beyond a row's codes become 0.
    """
    dense, width = is_dense(form.stored), form.units * form.bits
    unit = "uint8" if dense else "uint32"
    with b.function(name) as result:
        rows, extent, blocks, lines = (b.symbol(s) for s in ("N", "S", "B", "L"))
        flip = b.tensor("flip", (1,), "uint8", align=1)
        sizes = b.tensor("sizes", (1,), "int32", align=4)
        words = b.tensor("words", (blocks, lines, LANES), "int32", align=64)
        storage = b.tensor("storage", (rows, extent), unit, align=1 if dense else 4)
        with v.parallel(blocks) as block:
            packed = v.scratch(ROWS * width, "int32")
            codes = v.scratch(form.columns + EIGHT * form.per, "uint8")
            with b.loop(ceildiv(lines, width)) as step:
                _read_columns(packed, words, block, step * width, width)
                with b.loop(tirx.max(tirx.min(ROWS, rows - block * ROWS), 0)) as row:
                    first = b.bind(step * form.columns)
                    there = b.bind(tirx.max(tirx.min(sizes[0] - first, form.columns), 0))
                    _take_codes(form, packed, row, flip[0], codes)
                    with b.loop(form.columns - there) as at:
                        b.store(codes, T.uint8(0), there + at)
                    target = b.bind(block * ROWS + row), b.bind(tirx.floordiv(first, form.per))
                    _store_row(form, codes, storage, target, there)
    return result.func


def _read_columns(packed: Any, words: Any, block: Expr, first: Expr, width: int) -> None:
    """Read some words of the rows of a block: the inverse of `_write_columns`."""
    with b.loop(width // EIGHT) as part, b.loop(ROWS // EIGHT) as half:
        start = b.bind(first + part * EIGHT)
        square = [
            words[block, tirx.min(start + at, words.shape[1] - 1), v.lanes(half * EIGHT, EIGHT)]
            for at in range(EIGHT)
        ]
        for row, values in enumerate(transposed(square)):
            b.store(packed, values, v.lanes((half * EIGHT + row) * width + part * EIGHT, EIGHT))


def _take_codes(form: PackForm, packed: Any, row: Expr, flip: Expr, codes: Any) -> None:
    """Store the codes of some units of a row, a byte each."""
    with b.loop(form.units) as unit:
        line = b.bind((row * form.units + unit) * form.bits)
        total = reduce(or_, [_unpacked(form, plane, packed, line) for plane in form.layout.planes])
        b.store(codes, total ^ v.splat(flip, UNIT), v.lanes(unit * UNIT, UNIT))


def _unpacked(form: PackForm, plane: Plane, packed: Any, line: Expr) -> Expr:
    """Return the bits of a unit's codes that a plane holds, where they belong."""
    octets = T.reinterpret(f"uint8x{4 * plane.width}", packed[v.lanes(line + plane.start, plane.width)])
    ordered, order = _spread_bytes(b.bind(octets), plane.width), _order(form.layout, plane)
    places = [order.index(column) for column in range(UNIT)]
    return b.bind(v.shifted(tirx.Shuffle([ordered], places), -plane.shift, "uint8", UNIT))


def _store_row(form: PackForm, codes: Any, storage: Any, target: tuple[Expr, Expr], count: Expr) -> None:
    """Pack some codes of a row into canonical storage."""
    row, start = target
    if not is_dense(form.stored):
        pack_words(form.stored, codes, count, storage, row, start)
        return
    per = form.per
    line = v.scratch(form.columns // per, "uint8")
    with b.loop(form.units) as unit:
        taken = b.bind(codes[v.lanes(unit * UNIT, UNIT)])
        b.store(line, merged_bytes(taken, form.stored), v.lanes(unit * (UNIT // per), UNIT // per))
    with b.loop(ceildiv(count, per)) as at:
        b.store(storage, line[at], row, start + at)
