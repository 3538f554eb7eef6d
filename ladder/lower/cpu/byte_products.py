"""Products and convolutions of codes of 8 bits on CPUs with AVX2, exact; by dot products of bytes if there.

The left factor is words of 32 bits: signed codes of consecutive elements of a sum, two of 16 bits each, or
four of 8. The right one is unsigned codes, as many per column; columns side by side are a vector, which one
instruction multiplies with a word of each of its columns and adds in 32 bits. What zero points add follows
from sums of codes along rows and columns. Where vectors begin, and where each group of codes of a sum lies
behind that, is told by tables, so that windows of an image are read in place.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v

ROWS = 4
"""Rows of the left factor in a block."""

COLUMNS = 4
"""Columns in a vector per code of a word: 8 and 16."""

VECTORS = 2
"""Vectors of a block."""

VECTOR = 16
"""Elements that are rounded at a time."""

LEVELS = 255

SIGN = 128
"""What unsigned codes are more than signed ones."""


def emit_byte_product(depth: int, name: str) -> Any:
    """Emit ``(words, sums, zeros, factor, codes, begins, places, counts, offsets, out)``.

    depth: Codes in a word: 2, or 4 for processors that have dot products of bytes.
    words: int32 ``[groups, blocks, K, 4]``, K words of each sum, four rows side by side.
    sums, zeros: int32 ``[groups, blocks, 4]``: of rows less their zero points, and these.
    factor: int32 ``[1]``: the negated zero point of the right factor.
    codes: uint8 ``[images, bytes]``; image i is multiplied with group ``i % groups``.
    begins: int64 ``[vectors]``, an even number: the byte where a vector begins.
    places, counts: int32 ``[vectors]``: the column of a vector's first sum, and how many it has.
    offsets: int64 ``[K]``: bytes from the beginning of a vector to each of its groups of codes.
    out: int32 ``[images, rows, columns]``.
    """
    lanes = COLUMNS * depth
    with b.function(name) as result:
        groups, blocks, k, size = (b.symbol(s) for s in ("groups", "blocks", "K", "size"))
        images, rows, columns, vectors = (b.symbol(s) for s in ("images", "rows", "columns", "vectors"))
        words = b.tensor("words", [groups, blocks, k, ROWS], "int32", align=4)
        starts, zeros = (b.tensor(s, [groups, blocks, ROWS], "int32", align=4) for s in ("sums", "zeros"))
        factor = b.tensor("factor", [1], "int32", align=4)
        codes = b.tensor("codes", [images, size], "uint8", align=1)
        begins = b.tensor("begins", [vectors], "int64", align=8)
        places, counts = (b.tensor(s, [vectors], "int32", align=4) for s in ("places", "counts"))
        offsets = b.tensor("offsets", [k], "int64", align=8)
        out = b.tensor("out", [images, rows, columns], "int32", align=4)
        flat_words, flat_codes = words.view(-1), codes.view(-1)
        each = tirx.floordiv(vectors, VECTORS)
        with v.parallel(images * each) as number:
            image, at = b.bind(tirx.floordiv(number, each)), b.bind(tirx.floormod(number, each) * VECTORS)
            group = b.bind(tirx.floormod(image, groups))
            first = [b.bind(begins[at + vector] + T.Cast("int64", image) * size) for vector in range(VECTORS)]

            def products(sums: Any, given: Any) -> None:
                """Add the products of some rows with all groups of codes."""
                with I.serial(T.int64(0), T.Cast("int64", k)) as word:
                    places_of = [v.lanes(begin + offsets[word], depth * lanes) for begin in first]
                    _step(sums, given(word), [flat_codes[place] for place in places_of], depth)

            across = v.scratch(VECTORS * lanes, "int32")
            b.store(across, v.constant(0, "int32", VECTORS * lanes), v.lanes(0, VECTORS * lanes))
            products(across, lambda word: [_word([T.int32(1)] * depth)])
            with b.loop(blocks) as block:
                sums = v.scratch(ROWS * VECTORS * lanes, "int32")
                for row in range(ROWS):
                    less = v.splat(zeros[group, block, row], lanes)
                    for vector in range(VECTORS):
                        beginning = v.splat(starts[group, block, row] * factor[0], lanes)
                        beginning = beginning - less * across[v.lanes(vector * lanes, lanes)]
                        b.store(sums, beginning, v.lanes((row * VECTORS + vector) * lanes, lanes))
                panel = b.bind(T.Cast("int64", group * blocks + block) * k * ROWS)
                products(sums, lambda word: [flat_words[panel + word * ROWS + row] for row in range(ROWS)])
                for row in range(ROWS):
                    with b.when(block * ROWS + row < rows):
                        for vector in range(VECTORS):
                            cell, here = (row * VECTORS + vector) * lanes, at + vector
                            found, there = sums[v.lanes(cell, lanes)], (image, block * ROWS + row)
                            _stored(out, found, there, places[here], counts[here], lanes)
    return result.func


def _step(sums: Any, words: list[Expr], codes: list[Expr], depth: int) -> None:
    """Emit the products of one word of each row with one group of codes of each column."""
    lanes = COLUMNS * depth
    wide = [b.bind(T.Cast(f"int16x{2 * lanes}", x) if depth == 2 else x) for x in codes]
    for row, word in enumerate(words):
        many = v.splat(word, lanes)
        for vector, x in enumerate(wide):
            place = v.lanes((row * len(wide) + vector) * lanes, lanes)
            if depth == 2:
                both = T.reinterpret(f"int16x{2 * lanes}", many)
                found = T.call_llvm_pure_intrin(f"int32x{lanes}", "llvm.x86.avx2.pmadd.wd", both, x)
                b.store(sums, sums[place] + found, place)
            else:
                b.store(sums, v.dot_int8(sums[place], x, many), place)


def _stored(out: Any, sums: Expr, row: tuple[Expr, Expr], place: Expr, count: Expr, lanes: int) -> None:
    """Emit the sums of a vector into their row, or the first of them where it ends before."""

    def whole() -> None:
        b.store(out, sums, *row, v.lanes(place, lanes))

    def part() -> None:
        kept = v.scratch(lanes, "int32")
        b.store(kept, sums, v.lanes(0, lanes))
        with b.loop(count) as at:
            b.store(out, kept[at], *row, place + at)

    b.either(count == lanes, whole, part)


def emit_words(depth: int, unsigned: bool, name: str) -> Any:
    """Emit ``(zero, codes, words, sums, zeros)``: codes ``[M, K]`` as the left factor of `emit_byte_product`.

    zero: ``[1]``, of the codes' type: uint8 if ``unsigned``, else int8.
    words, sums, zeros: ``[1, blocks, ceil(K / depth), 4]``, and twice ``[1, blocks, 4]``.
    """
    with b.function(name) as result:
        m, k, blocks, count = (b.symbol(s) for s in ("M", "K", "blocks", "count"))
        kind, flip = _kind(unsigned), SIGN if unsigned else 0
        given = b.tensor("zero", [1], kind, align=1)
        codes = b.tensor("codes", [m, k], kind, align=1)
        zero = b.bind(T.Cast("int32", given[0]) - flip)
        words = b.tensor("words", [1, blocks, count, ROWS], "int32", align=4)
        sums, zeros = (b.tensor(s, [1, blocks, ROWS], "int32", align=4) for s in ("sums", "zeros"))
        with v.parallel(blocks) as block:
            for row in range(ROWS):
                at = block * ROWS + row
                total = v.scratch(1, "int32")
                b.store(total, T.int32(0), 0)

                def code(column: Expr, at: Expr = at) -> Expr:
                    return T.Cast("int32", codes[at, column]) - flip

                def filled(block: Expr = block, row: int = row, total: Any = total, code: Any = code) -> None:
                    def word(place: Expr, parts: list[Expr]) -> None:
                        b.store(words, _word(parts), 0, block, place, row)
                        b.store(total, sum(parts, total[0]), 0)

                    with b.loop(tirx.floordiv(k, depth)) as place:
                        word(place, [b.bind(code(place * depth + i)) for i in range(depth)])
                    with b.when(tirx.floormod(k, depth) > 0):
                        rest = [(count - 1) * depth + i for i in range(depth)]
                        last = [tirx.Select(c < k, code(tirx.min(c, k - 1)), T.int32(0)) for c in rest]
                        word(count - 1, [b.bind(part) for part in last])
                    b.store(total, total[0] - k * zero, 0)

                def empty(block: Expr = block, row: int = row) -> None:
                    with b.loop(count) as place:
                        b.store(words, T.int32(0), 0, block, place, row)

                b.either(at < m, filled, empty)
                b.store(sums, total[0], 0, block, row)
                b.store(zeros, zero, 0, block, row)
    return result.func


def _kind(unsigned: bool) -> str:
    return "uint8" if unsigned else "int8"


def _word(parts: list[Expr]) -> Expr:
    """Return signed codes side by side."""
    bits = 32 // len(parts)
    found = T.bitwise_and(parts[0], T.int32((1 << bits) - 1))
    for at, part in enumerate(parts[1:], 1):
        kept = T.bitwise_and(part, T.int32((1 << bits) - 1))
        found = T.bitwise_or(found, T.shift_left(kept, T.int32(at * bits)))
    return found


def emit_image(depth: int, unsigned: bool, name: str) -> Any:
    """Emit ``(top, left, zero, codes, image, factor)``: codes as the right factor of `emit_byte_product`.

    zero, codes: ``[1]`` and ``[images, channels, height, width]``, uint8 if ``unsigned``, else int8.
    image: ``[images, ceil(channels / depth), rows, stride, columns]``, of ``depth`` channels unsigned codes
        side by side, 0 beyond the last; column c of phase p is column ``c * stride + p - left`` of the codes,
        row r is ``r - top``, and what lies beyond them is the zero point.
    factor: int32 ``[1]``: the zero point of unsigned codes, negated.
    """
    with b.function(name) as result:
        top, left = (I.arg(s, I.int32()) for s in ("top", "left"))
        images, channels, height, width = (b.symbol(s) for s in ("images", "channels", "height", "width"))
        many, rows, stride, columns = (b.symbol(s) for s in ("many", "rows", "stride", "columns"))
        kind, flip, each = _kind(unsigned), 0 if unsigned else SIGN, f"uint{8 * depth}"
        given = b.tensor("zero", [1], kind, align=1)
        codes = b.tensor("codes", [images, channels, height, width], kind, align=1)
        grouped = b.tensor("image", [images, many, rows, stride, columns], each, align=depth)
        factor = b.tensor("factor", [1], "int32", align=4)
        zero = b.bind(T.Cast("int32", given[0]) + flip)
        b.store(factor, T.int32(0) - zero, 0)
        ones = _every_byte(depth, 1)
        with v.parallel(images * many) as number:
            image, channel = b.bind(tirx.floordiv(number, many)), b.bind(tirx.floormod(number, many))
            missing = tirx.max(channel * depth + depth - channels, 0)
            mask = b.bind(T.shift_right(tirx.IntImm(each, ones * LEVELS), T.Cast(each, missing * 8)))
            beyond = b.bind(T.bitwise_and(T.Cast(each, zero) * tirx.IntImm(each, ones), mask))
            with b.loop(rows) as row:
                y = b.bind(row - top)
                inside = tirx.all(y >= 0, y < height)

                def of_image() -> None:
                    with b.loop(stride) as phase:
                        # columns of the codes that this phase has: from first on, up to last
                        first = b.bind(tirx.max(tirx.floordiv(left - phase + stride - 1, stride), 0))
                        end = tirx.floordiv(left + width - phase + stride - 1, stride)
                        last = b.bind(tirx.max(tirx.min(end, columns), first))
                        with b.loop(first) as at:
                            b.store(grouped, beyond, image, channel, row, phase, at)
                        with b.loop(last - first) as at:
                            x = (first + at) * stride + phase - left
                            place = [image, channel, y, x]
                            found = T.bitwise_and(_side_by_side(codes, place, depth, flip), mask)
                            b.store(grouped, found, image, channel, row, phase, first + at)
                        with b.loop(columns - last) as at:
                            b.store(grouped, beyond, image, channel, row, phase, last + at)

                def outside() -> None:
                    with b.loop(stride) as phase, b.loop(columns) as at:
                        b.store(grouped, beyond, image, channel, row, phase, at)

                b.either(inside, of_image, outside)
    return result.func


def _every_byte(count: int, value: int) -> int:
    return int.from_bytes([value] * count, "little")


def _side_by_side(codes: Any, place: list[Expr], depth: int, flip: int) -> Expr:
    """Return the codes of ``depth`` channels at a place of an image, the last one again beyond it."""
    image, group, y, x = place
    each = f"uint{8 * depth}"
    found = tirx.IntImm(each, _every_byte(depth, flip))
    for at in range(depth):
        channel = tirx.min(group * depth + at, codes.shape[1] - 1)
        code = T.Cast(each, T.reinterpret("uint8", codes[image, channel, y, x]))
        found = T.bitwise_xor(found, T.shift_left(code, tirx.IntImm(each, 8 * at)))
    return found


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

        with b.loop(tirx.floordiv(size, VECTOR)) as chunk, b.vector(VECTOR) as lane:
            code(chunk * VECTOR + lane)
        with b.loop(tirx.floormod(size, VECTOR)) as rest:
            code(size - tirx.floormod(size, VECTOR) + rest)
    return result.func


def _clamped(value: Expr) -> Expr:
    return tirx.max(tirx.min(value, T.float32(LEVELS)), T.float32(0))


def _range(x: Any, size: Expr) -> tuple[Expr, Expr]:
    """Emit the smallest and largest element of a vector and 0; both NaN if an element is."""
    low, high, lost = (v.scratch(VECTOR, "float32") for _ in range(3))
    for end in (low, high, lost):
        b.store(end, v.constant(0, "float32", VECTOR), v.lanes(0, VECTOR))

    def taken(value: Expr, at: Expr) -> None:
        b.store(low, tirx.min(low[at], value), at)
        b.store(high, tirx.max(high[at], value), at)
        b.store(lost, tirx.Select(T.isnan(value), value, lost[at]), at)

    with b.loop(tirx.floordiv(size, VECTOR)) as chunk, b.vector(VECTOR) as lane:
        taken(x[chunk * VECTOR + lane], lane)
    with b.loop(tirx.floormod(size, VECTOR)) as rest:
        taken(x[size - tirx.floormod(size, VECTOR) + rest], 0)
    least, most, nothing = low[0], high[0], lost[0]
    for lane in range(1, VECTOR):
        least, most = tirx.min(least, low[lane]), tirx.max(most, high[lane])
        nothing = nothing + lost[lane]
    nothing = b.bind(nothing)
    return b.bind(least + nothing), b.bind(most + nothing)
