"""Products and convolutions of codes of 8 bits on CPUs with AVX2: exact, by sums of pairs of 16 bits.

The left factor is words: two codes less their zero point, 16 bits each, of consecutive elements of a sum. The
right one is signed codes, a pair per column; eight columns side by side are a vector, which one instruction
multiplies with a word of each of its columns and adds in 32 bits. Where vectors begin, and where each pair of
a sum lies behind that, is told by tables, so that windows of an image are read in place.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v

Expr = Any

ROWS = 4
"""Rows of the left factor in a block."""

LANES = 8
"""Columns in a vector."""

VECTORS = 2
"""Vectors of a block."""

WIDE = 16
"""Elements that are rounded or put in pairs at a time."""

LEVELS = 255


def emit_byte_product(name: str) -> Any:
    """Emit ``(words, sums, factor, pairs, begins, places, counts, offsets, out)``.

    words: int32 ``[groups, blocks, K, 4]``, K pairs of each sum, four rows side by side.
    sums, factor: int32 ``[groups, blocks, 4]`` and ``[1]``: sums of products begin with ``sums * factor``.
    pairs: int8 ``[images, bytes]``; image i is multiplied with group ``i % groups``.
    begins: int64 ``[vectors]``, an even number: the byte where a vector begins.
    places, counts: int32 ``[vectors]``: the column of a vector's first sum, and how many it has.
    offsets: int64 ``[K]``: bytes from the beginning of a vector to each of its pairs.
    out: int32 ``[images, rows, columns]``.
    """
    with b.function(name) as result:
        groups, blocks, k, size = (b.symbol(s) for s in ("groups", "blocks", "K", "size"))
        images, rows, columns, vectors = (b.symbol(s) for s in ("images", "rows", "columns", "vectors"))
        words = b.tensor("words", [groups, blocks, k, ROWS], "int32", align=4)
        starts = b.tensor("sums", [groups, blocks, ROWS], "int32", align=4)
        factor = b.tensor("factor", [1], "int32", align=4)
        pairs = b.tensor("pairs", [images, size], "int8", align=1)
        begins = b.tensor("begins", [vectors], "int64", align=8)
        places, counts = (b.tensor(s, [vectors], "int32", align=4) for s in ("places", "counts"))
        offsets = b.tensor("offsets", [k], "int64", align=8)
        out = b.tensor("out", [images, rows, columns], "int32", align=4)
        flat_words, flat_pairs = words.view(-1), pairs.view(-1)
        each = tirx.floordiv(vectors, VECTORS)
        with v.parallel(images * each) as number:
            image, at = b.bind(tirx.floordiv(number, each)), b.bind(tirx.floormod(number, each) * VECTORS)
            group = b.bind(tirx.floormod(image, groups))
            first = [b.bind(begins[at + vector] + T.Cast("int64", image) * size) for vector in range(VECTORS)]
            with b.loop(blocks) as block:
                sums = v.scratch(ROWS * VECTORS * LANES, "int32")
                for row in range(ROWS):
                    for vector in range(VECTORS):
                        beginning = v.splat(starts[group, block, row] * factor[0], LANES)
                        b.store(sums, beginning, v.lanes((row * VECTORS + vector) * LANES, LANES))
                panel = b.bind(T.Cast("int64", group * blocks + block) * k * ROWS)
                with I.serial(T.int64(0), T.Cast("int64", k)) as pair:
                    given = [flat_words[panel + pair * ROWS + row] for row in range(ROWS)]
                    places_of = [v.lanes(begin + offsets[pair], 2 * LANES) for begin in first]
                    _step(sums, given, [flat_pairs[place] for place in places_of])
                for row in range(ROWS):
                    with b.when(block * ROWS + row < rows):
                        for vector in range(VECTORS):
                            cell, here = (row * VECTORS + vector) * LANES, at + vector
                            _stored(out, sums, cell, (image, block * ROWS + row), places[here], counts[here])
    return result.func


def _step(sums: Any, words: list[Expr], codes: list[Expr]) -> None:
    """Emit the products of one word of each row with one pair of each column."""
    wide = [b.bind(T.Cast(f"int16x{2 * LANES}", x)) for x in codes]
    for row, word in enumerate(words):
        both = b.bind(T.reinterpret(f"int16x{2 * LANES}", v.splat(word, LANES)))
        for vector, x in enumerate(wide):
            place = v.lanes((row * len(wide) + vector) * LANES, LANES)
            total = T.call_llvm_pure_intrin(f"int32x{LANES}", "llvm.x86.avx2.pmadd.wd", both, x)
            b.store(sums, sums[place] + total, place)


def _stored(out: Any, sums: Any, cell: int, row: tuple[Expr, Expr], place: Expr, count: Expr) -> None:
    """Emit the sums of a vector into their row, or the first of them where it ends before."""

    def whole() -> None:
        b.store(out, sums[v.lanes(cell, LANES)], *row, v.lanes(place, LANES))

    def part() -> None:
        kept = v.scratch(LANES, "int32")
        b.store(kept, sums[v.lanes(cell, LANES)], v.lanes(0, LANES))
        with b.loop(count) as at:
            b.store(out, kept[at], *row, place + at)

    b.either(count == LANES, whole, part)


def emit_words(unsigned: bool, name: str) -> Any:
    """Emit ``(zero, codes, words, sums)``: codes ``[M, K]`` as the left factor of `emit_byte_product`.

    zero: ``[1]``, of the codes' type: uint8 if ``unsigned``, else int8.
    words, sums: ``[1, blocks, ceil(K / 2), 4]``, and ``[1, blocks, 4]``: sums of rows less their zero points.
    """
    with b.function(name) as result:
        m, k, blocks, count = (b.symbol(s) for s in ("M", "K", "blocks", "count"))
        kind = _kind(unsigned)
        given = b.tensor("zero", [1], kind, align=1)
        codes = b.tensor("codes", [m, k], kind, align=1)
        zero = b.bind(T.Cast("int32", given[0]))
        words = b.tensor("words", [1, blocks, count, ROWS], "int32", align=4)
        sums = b.tensor("sums", [1, blocks, ROWS], "int32", align=4)
        with v.parallel(blocks) as block:
            for row in range(ROWS):
                at = block * ROWS + row
                total = v.scratch(1, "int32")
                b.store(total, T.int32(0), 0)

                def code(column: Expr, at: Expr = at) -> Expr:
                    return T.Cast("int32", codes[at, column]) - zero

                def filled(block: Expr = block, row: int = row, total: Any = total, code: Any = code) -> None:
                    with b.loop(tirx.floordiv(k, 2)) as pair:
                        low, high = b.bind(code(pair * 2)), b.bind(code(pair * 2 + 1))
                        b.store(words, _word(low, high), 0, block, pair, row)
                        b.store(total, total[0] + low + high, 0)
                    with b.when(tirx.floormod(k, 2) == 1):
                        low = b.bind(code(k - 1))
                        b.store(words, _word(low, T.int32(0)), 0, block, count - 1, row)
                        b.store(total, total[0] + low, 0)

                def empty(block: Expr = block, row: int = row) -> None:
                    with b.loop(count) as pair:
                        b.store(words, T.int32(0), 0, block, pair, row)

                b.either(at < m, filled, empty)
                b.store(sums, total[0], 0, block, row)
    return result.func


def _kind(unsigned: bool) -> str:
    return "uint8" if unsigned else "int8"


def _word(low: Expr, high: Expr) -> Expr:
    return T.bitwise_or(T.bitwise_and(low, T.int32(0xFFFF)), T.shift_left(high, T.int32(16)))


def emit_pairs(unsigned: bool, name: str) -> Any:
    """Emit ``(top, left, zero, codes, pairs, factor)``: an image as the right factor of `emit_byte_product`.

    zero, codes: ``[1]`` and ``[images, channels, height, width]``, uint8 if ``unsigned``, else int8.
    pairs: uint16 ``[images, ceil(channels / 2), rows, stride, columns]``: of two channels signed codes side
        by side; column c of phase p is column ``c * stride + p - left`` of the image, row r is ``r - top``,
        and what lies beyond the image is the zero point.
    factor: int32 ``[1]``: the zero point of signed codes, negated.
    """
    with b.function(name) as result:
        top, left = (I.arg(s, I.int32()) for s in ("top", "left"))
        images, channels, height, width = (b.symbol(s) for s in ("images", "channels", "height", "width"))
        half, rows, stride, columns = (b.symbol(s) for s in ("half", "rows", "stride", "columns"))
        kind, flip = _kind(unsigned), 128 if unsigned else 0
        given = b.tensor("zero", [1], kind, align=1)
        codes = b.tensor("codes", [images, channels, height, width], kind, align=1)
        pairs = b.tensor("pairs", [images, half, rows, stride, columns], "uint16", align=2)
        factor = b.tensor("factor", [1], "int32", align=4)
        zero = b.bind(T.Cast("int32", given[0]) - flip)
        b.store(factor, T.int32(0) - zero, 0)
        beyond = b.bind(T.Cast("uint16", T.bitwise_and(zero, T.int32(255)) * T.int32(257)))

        def pair(image: Expr, channel: Expr, y: Expr, x: Expr) -> Expr:
            low, high = (
                T.bitwise_xor(T.Cast("uint16", T.reinterpret("uint8", codes[image, c, y, x])), T.uint16(flip))
                for c in (channel * 2, tirx.min(channel * 2 + 1, channels - 1))
            )
            return T.bitwise_or(low, T.shift_left(high, T.uint16(8)))

        with v.parallel(images * half) as number:
            image, channel = b.bind(tirx.floordiv(number, half)), b.bind(tirx.floormod(number, half))
            with b.loop(rows) as row:
                y = b.bind(row - top)
                inside = tirx.all(y >= 0, y < height)

                def of_image(
                    row: Expr = row, y: Expr = y, image: Expr = image, channel: Expr = channel
                ) -> None:
                    with b.loop(stride) as phase:
                        # columns of the image that this phase has: from first on, up to last
                        first = b.bind(tirx.max(tirx.floordiv(left - phase + stride - 1, stride), 0))
                        end = tirx.floordiv(left + width - phase + stride - 1, stride)
                        last = b.bind(tirx.max(tirx.min(end, columns), first))
                        with b.loop(first) as at:
                            b.store(pairs, beyond, image, channel, row, phase, at)
                        with b.loop(last - first) as at:
                            x = (first + at) * stride + phase - left
                            b.store(pairs, pair(image, channel, y, x), image, channel, row, phase, first + at)
                        with b.loop(columns - last) as at:
                            b.store(pairs, beyond, image, channel, row, phase, last + at)

                def outside(row: Expr = row, image: Expr = image, channel: Expr = channel) -> None:
                    with b.loop(stride) as phase, b.loop(columns) as at:
                        b.store(pairs, beyond, image, channel, row, phase, at)

                b.either(inside, of_image, outside)
    return result.func


def emit_rounding(name: str) -> Any:
    """Emit ``(x, codes, scale, zero)``: float32 ``[size]`` as uint8 codes by its range, which has 0 in it.

    ``scale`` is a 255th of the range, NaN if an element is; where it is 0, codes are 0.
    """
    with b.function(name) as result:
        size = b.symbol("size")
        x = b.tensor("x", [size], "float32", align=4)
        codes = b.tensor("codes", [size], "uint8", align=1)
        scale = b.tensor("scale", [1], "float32", align=4)
        zero = b.tensor("zero", [1], "uint8", align=1)
        least, most = _range(x, size)
        step = b.bind((most - least) / T.float32(LEVELS))
        b.store(scale, step, 0)
        divisor = b.bind(tirx.Select(step == T.float32(0), T.float32(1), step))
        place = b.bind(T.nearbyint(_clamped((T.float32(0) - least) / divisor)))
        b.store(zero, T.Cast("uint8", T.Cast("int32", place)), 0)

        def code(at: Expr) -> None:
            found = _clamped(T.nearbyint(x[at] / divisor) + place)
            b.store(codes, T.Cast("uint8", T.Cast("int32", found)), at)

        with b.loop(tirx.floordiv(size, WIDE)) as chunk, b.vector(WIDE) as lane:
            code(chunk * WIDE + lane)
        with b.loop(tirx.floormod(size, WIDE)) as rest:
            code(size - tirx.floormod(size, WIDE) + rest)
    return result.func


def _clamped(value: Expr) -> Expr:
    return tirx.max(tirx.min(value, T.float32(LEVELS)), T.float32(0))


def _range(x: Any, size: Expr) -> tuple[Expr, Expr]:
    """Emit the smallest and largest element of a vector and 0; both NaN if an element is."""
    low, high, lost = (v.scratch(WIDE, "float32") for _ in range(3))
    for end in (low, high, lost):
        b.store(end, v.constant(0, "float32", WIDE), v.lanes(0, WIDE))

    def taken(value: Expr, at: Expr) -> None:
        b.store(low, tirx.min(low[at], value), at)
        b.store(high, tirx.max(high[at], value), at)
        b.store(lost, tirx.Select(T.isnan(value), value, lost[at]), at)

    with b.loop(tirx.floordiv(size, WIDE)) as chunk, b.vector(WIDE) as lane:
        taken(x[chunk * WIDE + lane], lane)
    with b.loop(tirx.floormod(size, WIDE)) as rest:
        taken(x[size - tirx.floormod(size, WIDE) + rest], 0)
    least, most, nothing = low[0], high[0], lost[0]
    for lane in range(1, WIDE):
        least, most = tirx.min(least, low[lane]), tirx.max(most, high[lane])
        nothing = nothing + lost[lane]
    nothing = b.bind(nothing)
    return b.bind(least + nothing), b.bind(most + nothing)
