"""CPU schedules: a table by instruction and M, edited by measurement, and the transforms of its rows.

What a core multiplies is decided by values: activations and weights must survive the conversion
unchanged. Each row of `TABLE` says which compute instruction serves that operand type up to one
M, and the register tile; the first row whose core the device has wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from ladder.ir.gemm import Gemm
from ladder.ir.program import Layout, TileProgram, block_graph, operand_type
from schedules.cpu_layout import LANES, UNIT, CpuLayout, bytes_group, cpu_layout
from schedules.instructions import (
    BYTE_DIGITS,
    BYTE_PAIRS,
    BYTE_RECIPES,
    BYTE_SPLITS,
    DIGITS,
    INSTRUCTIONS,
    RECIPES,
    SPLITS,
    TERMS,
    TWO_BYTES,
    columns_in_32_bits,
    pieces_of,
)
from schedules.schedule import TransformList, check
from schedules.transforms import Convert, Map, Pad, Place, Slice, Transform, Use, apply_all
from targets import TileDevice
from tile_types import TType, get_type, representable
from tile_types.forms import byte_form, byte_pairs, choices, is_extended, largest_integer

LARGEST_M = 1 << 16
BUCKETS = (1, 2, 4, 8, 16, LARGEST_M)
"""Largest M of each range of the plan."""

AHEAD = 1024
"""Bytes by which prefetches of a row block run ahead.

Row blocks are streams whose distance often is a power of two, so they share sets of the first
cache, where hardware prefetches evict each other.
"""

STREAMS_AHEAD = 2048
"""The same where a tile of vectors reads several row blocks by turns.

Measured on one core of a Zen 4, M = 1 to 4, weights of 2, 4 and 8 bits: 0.82 to 1.03 of the time of 1024
bytes, 0.94 in the mean, and as much by 3072 to 8192; one row block takes 1.0 to 1.5 by 2048.
"""

TURN_BLOCKS, TURN_ROWS = 8, 128
"""Register tiles of rows, or rows for tile registers, that are prepared at a time: their words stay in the
second-level cache."""

DECODED_UNITS = 8
"""Packed units that are decoded at a time into cache: 16 KiB for two row blocks."""

THREADED_ROWS = 8
"""Rows of a register tile from which preparing them is worth threads."""


@dataclass(frozen=True)
class Row:
    """``core`` serves operands of its type for M up to ``m_max``, with tiles of ``tile_m`` by ``tile_n``.

    unless: A feature of devices that do not take this row.
    groups: Columns of the shortest group that it serves; scales of rows are of one group.
    bits: Bits of the narrowest codes that it serves.
    """

    m_max: int
    core: str
    tile_m: int
    tile_n: int
    unless: str = ""
    groups: int = 0
    bits: int = 0


def _rows(core: str, *steps: tuple[int, int, int]) -> tuple[Row, ...]:
    return tuple(Row(m, core, tile_m, tile_n) for m, tile_m, tile_n in steps)


_VECTOR = ((1, 1, 128), (2, 2, 64), (4, 4, 64), (8, 8, 32), (LARGEST_M, 16, 16))
"""(largest M, rows of x, columns) of a tile of 512-bit accumulators: at most 16 in flight."""

_NARROW = ((1, 1, 16), (2, 2, 16), (LARGEST_M, 4, 16))
"""The same where a 512-bit value takes several registers."""

_DIGITS = ((1, 1, 64), (2, 2, 64), (4, 4, 32))
"""The same where each row has two sums: at M = 8 products of floats take less time."""

_BYTES = ((1, 1, 64), (2, 2, 64), (4, 4, 32), (LARGEST_M, 8, 16))
"""The same where each row has two sums of bytes, or three."""

_PAIRS = ((1, 1, 64), (2, 2, 32), (4, 4, 32), (8, 8, 16))
"""The same where each row has three sums, of two bytes of weights.

Measured on one core of a Zen 4, nf4 by float16, M = 1, 2, 4, 8: 0.65, 0.76, 0.77, 0.76 of the time of
products of floats, which multiply as often and are faster above.
"""

BYTES_UP_TO: Mapping[tuple[str, bool], tuple[int, int]] = {
    (TWO_BYTES, False): (LARGEST_M, LARGEST_M),
    (TWO_BYTES, True): (2, 4),
    (BYTE_DIGITS, False): (LARGEST_M, LARGEST_M),
    (BYTE_DIGITS, True): (0, 2),
}
"""Digits of x, and whether the device multiplies x as bfloat16 too -> largest M of products of bytes: by
codes of fewer than six bits, and of more.

Measured on one core of a Zen 4, M = 1 to 128, beside products of floats: float16 by int4 in groups of 128
takes 0.42 to 0.65 of the time by two digits, float32 0.56 to 0.81 by three. bfloat16 by int4 or ternary takes
0.73 to 0.97 up to M = 2, by int8 0.58 to 0.95 up to M = 4; above 1.03 and more.
"""

LEAST_BYTES_GROUP: Mapping[bool, int] = {False: 16, True: 64}
"""Whether the device multiplies x as bfloat16 too, and codes have fewer than six bits -> columns of a group
below which sums of bytes end too often.

Measured on one core of a Zen 4, groups of 32, M = 1 to 16: float16 takes 0.56 to 0.75 of the time of products
of floats, float32 0.72 to 0.88, bfloat16 by int8 0.69 to 0.84 up to M = 4, by int4 1.12; groups of 16, M = 1
to 64: float16 0.59 to 0.86 by 2 to 6 bits, to 1.03 by 8 at M = 1, float32 0.74 to 0.91.
"""

BYTES_IN_ORDER = (
    Row(1, "avx512_vnni8x2", 1, 16, groups=64, bits=8),
    Row(1, "avx512_vnni8x2", 1, 16, groups=128, bits=4),
)
"""One row by one row block at a time: memory is read in order.

Measured on one core of a Zen 4, weights not in cache: int8 by float16, bfloat16 takes 0.74 to 0.81 of the
time of four row blocks, int4 in groups of 128 0.87 to 0.95, in groups of 64 1.09 to 1.13; in cache 2-bit
codes 2.1, int8 in groups of 32 1.19.
"""

ONE_STREAM = Row(1, "avx512_vnni", 1, 16, unless="amx_int8", groups=64)
"""One row of int8 by one row block at a time: memory is read in order.

Measured on one core of a Zen 4, weights of 2, 3, 4 and 8 bits: 0.83 to 0.93 of the time of eight row blocks,
of 6 bits as much; in groups of 32 1.07.
"""

TABLE: tuple[Row, ...] = (
    *_rows("amx_bf16", (16, 16, 32), (LARGEST_M, 32, 32)),
    *_rows("amx_int8", (16, 16, 32), (LARGEST_M, 32, 32)),
    *_rows("amx_bf16_terms", (16, 16, 32), (LARGEST_M, 32, 32)),
    *BYTES_IN_ORDER,
    *_rows("avx512_vnni8x2", *_BYTES),
    *_rows("avx512_vnni8", *_BYTES),
    *_rows("avx512_vnni8w2", *_PAIRS),
    *_rows("avx512_vnni16", *_DIGITS),
    *_rows("avx512_bf16", *_VECTOR),
    ONE_STREAM,
    *_rows("avx512_vnni", *_VECTOR),
    *_rows("fma", *_VECTOR),
)

NARROW_TABLE: tuple[Row, ...] = (*_rows("avx2_maddubs", *_NARROW), *_rows("fma", *_NARROW))
"""The table of machines without 512-bit vectors."""

AMX_FROM: Mapping[str, int] = {"amx_bf16": 3, "amx_bf16_terms": 5, "amx_int8": 9}
"""Smallest M that each instruction on tile registers serves: below, vectors take less time.

Measured on one core of a Xeon, weights of 2 to 8 bits from memory: int4 by bfloat16, 4096 x 4096, M = 2,
3 and 8, takes 1039, 1663 and 3150 us by vectors, and 1249, 1253 and 1294 by tiles; by int8, M = 8, 885
and 1049.
"""


AMX_LONGER_THAN: Mapping[str, int] = {"amx_int8": 16}
"""Groups that each instruction on tile registers leaves to vectors: sums go to memory after each.

Measured on one core of a Xeon by turns, int4 by int8, M = 33 to 512, groups of 16: 38 to 1912 us by vectors,
57 to 3280 by tiles; groups of 32 are level, groups of 64 take 0.61 to 0.86 of the time by tiles.
"""


def proposal(gemm: Gemm, device: TileDevice, core: str, tile_m: int, tile_n: int) -> TransformList:
    """Return the transforms for one instruction and register tile; whether they may be applied they say.

    gemm, device: The problem; the device decides how codes are decoded.
    core: One of `INSTRUCTIONS`.
    tile_m, tile_n: Rows and columns whose sums stay in registers.
    Raises ScheduleError if there is no such instruction.
    """
    check(
        core in INSTRUCTIONS,
        f"tile programs have no instruction {core!r}; use one of {', '.join(INSTRUCTIONS)}",
    )
    layout = cpu_layout(gemm)
    nest = _tile_nest if INSTRUCTIONS[core].tiles else _vector_nest
    steps = (*_storage(gemm, layout), *nest(gemm, device, layout, core, tile_m, tile_n), Use(core))
    return TransformList(steps)


def _storage(gemm: Gemm, layout: CpuLayout) -> Iterator[Transform]:
    """Yield what brings weights to the form that all schedules read."""
    yield from (Pad(axis, multiple) for axis, multiple in layout.padding.items())
    if layout.lane == 8 and get_type(gemm.weight).minimum != 0:
        yield Convert("w", _stored_type(gemm, layout), "offset")
    yield Map("w", Layout("planes", (layout.lane,)))


def _stored_type(gemm: Gemm, layout: CpuLayout) -> str:
    """Return the type of packed codes: where lanes are bytes, they count from the smallest value."""
    signed = layout.lane == 8 and get_type(gemm.weight).minimum != 0
    return f"uint{layout.bits}" if signed else gemm.weight


def _prepared(gemm: Gemm, core: str, words: int, over: str) -> Iterator[Transform]:
    """Yield what prepares rows of x."""
    yield Place("x", "cache", over)
    row = INSTRUCTIONS[core]
    if row.split:
        yield Convert("x", row.operand, row.split)
    elif row.operand != gemm.activation:
        yield Convert("x", row.operand, "widening")
    yield Map("x", Layout("words", (words,)))


def _decoded(
    gemm: Gemm, device: TileDevice, layout: CpuLayout, core: str, level: str, ahead: int
) -> Iterator[Transform]:
    """Yield what brings weights from memory to the instruction, fetched some bytes ahead."""
    wanted, stored = INSTRUCTIONS[core].weight, _stored_type(gemm, layout)
    recipe = INSTRUCTIONS[core].recipe or _recipe(get_type(stored), layout.lane, wanted, device)
    if recipe != "arithmetic":
        yield Place("w", "l2", f"prefetch {max(1, ahead // (4 * LANES * layout.bits))}")
    yield Place("w", level)
    if stored != wanted:
        yield Convert("w", wanted, recipe)


def _recipe(stored: TType, lane: int, wanted: str, device: TileDevice) -> str:
    """Return the first recipe that makes the wanted type of such codes on the device, and pays."""
    for name, row in RECIPES.items():
        if (
            name not in BYTE_RECIPES
            and wanted in row.results
            and stored.elem_bits <= row.most_bits
            and lane in row.lanes
            and row.features <= device.features
            and (not row.choices or row.choices <= choices(stored))
            and stored.elem_bits >= row.least_bits
            and (name != "extend" or is_extended(stored))
        ):
            return name
    return "none"


def _vector_nest(
    gemm: Gemm, device: TileDevice, layout: CpuLayout, core: str, tile_m: int, tile_n: int
) -> Iterator[Transform]:
    """Yield the nest of vector registers: sums of one group stay in them while K passes by."""
    yield Slice("m", TURN_BLOCKS * tile_m, "loop")
    yield from _prepared(gemm, core, tile_m, "threads" if tile_m >= THREADED_ROWS else "loop")
    yield Slice("n", tile_n, "threads")
    yield Slice("m", tile_m, "loop")
    yield Place("total", "cache")
    groups = layout.padding.get("g", 1)
    if groups > 1:
        yield Slice("g", groups, "loop")
    yield Slice("g", 1, "unrolled" if groups > 1 or layout.group == 0 else "loop")
    yield Place("acc", "register")
    yield Slice("k", min(UNIT, layout.padded_group or UNIT), "loop")
    ahead = STREAMS_AHEAD if tile_n > LANES or tile_m >= THREADED_ROWS else AHEAD
    yield from _decoded(gemm, device, layout, core, "register", ahead)


def _tile_nest(
    gemm: Gemm, device: TileDevice, layout: CpuLayout, core: str, tile_m: int, tile_n: int
) -> Iterator[Transform]:
    """Yield the nest of tile registers: weights are decoded into cache, and serve all rows of a turn."""
    depth, split = INSTRUCTIONS[core].depth, INSTRUCTIONS[core].split
    pieces = pieces_of(gemm.activation, split) if split else 1
    yield Slice("m", TURN_ROWS >> (pieces - 1), "loop")  # their words stay in the second-level cache
    yield from _prepared(gemm, core, 1, "threads")
    yield Slice("n", tile_n, "threads")
    yield Place("total", "cache")
    yield Slice("g", 1, "loop")
    yield Place("acc", "cache")
    yield Slice("k", DECODED_UNITS * UNIT, "loop")
    yield from _decoded(gemm, device, layout, core, "cache", AHEAD)
    yield Slice("m", tile_m, "loop")
    yield Place("acc", "register")
    yield Slice("k", gcd(layout.padded_group or depth, depth), "loop")


@lru_cache(maxsize=1024)
def tile_program(gemm: Gemm, device: TileDevice, schedule: TransformList) -> TileProgram:
    """Return the tile program of a product.

    Raises ScheduleError if a transform may not be applied; the message begins with it.
    """
    return apply_all(block_graph(gemm), schedule.transforms, device)


def _fits(gemm: Gemm, device: TileDevice, row: Row, m: int) -> bool:
    instruction, group = INSTRUCTIONS[row.core], gemm.group_size
    if row.core not in {core.name for core in device.cores} or m > row.m_max or row.unless in device.features:
        return False
    if 0 < cpu_layout(gemm).padded_group < row.groups:
        return False
    if not row.bits <= get_type(gemm.weight).elem_bits <= INSTRUCTIONS[row.core].most_bits:
        return False
    if 0 < group <= AMX_LONGER_THAN.get(row.core, 0):
        return False
    if instruction.split == DIGITS and not takes_digits(gemm, device):
        return False
    if instruction.recipe == BYTE_PAIRS:
        return takes_byte_pairs(gemm, device)
    if instruction.split in BYTE_SPLITS and not takes_bytes(gemm, device, m, instruction.split):
        return False
    if m < AMX_FROM.get(row.core, 1) and not gemm.batch_invariant:  # those need one core for every m
        return False
    if instruction.split == TERMS:
        return takes_terms(gemm)
    return instruction.operand in (operand_type(gemm), "float32")


def takes_digits(gemm: Gemm, device: TileDevice) -> bool:
    """Whether products of digits serve a product: weights are integers, sums of a group fit in 32 bits.

    Activations of 32 bits have digits of their own; one order of sums for every M takes one instruction.
    Zen 4 multiplies a pair of bfloat16 in the time of a pair of integers, Intel's in twice that.
    """
    largest = largest_integer(get_type(gemm.weight))
    if largest is None or gemm.activation not in ("float16", "bfloat16") or gemm.batch_invariant:
        return False
    if gemm.activation == "bfloat16" and device.features & {"avx512_bf16", "avx512_fp16"} == {"avx512_bf16"}:
        return False
    return 0 < cpu_layout(gemm).padded_group <= columns_in_32_bits(largest)


def takes_bytes(gemm: Gemm, device: TileDevice, m: int, split: str) -> bool:
    """Whether products of bytes serve a product: weights are bytes, 32 bits hold sums of a group, it pays.

    Two digits are for results that are rounded to 16 bits. Codes of six bits and more cost products of
    bfloat16 much, narrower ones little. Machines with AMX keep what was measured there.
    """
    form, layout = byte_form(get_type(gemm.weight)), cpu_layout(gemm)
    if form is None or gemm.batch_invariant or "amx_bf16" in device.features:
        return False
    if gemm.activation not in SPLITS[split] or (split == TWO_BYTES and gemm.output == "float32"):
        return False
    beside = gemm.activation == "bfloat16" and "avx512_bf16" in device.features
    wide = layout.bits >= RECIPES["extend"].least_bits
    if m > BYTES_UP_TO[split, beside][wide]:
        return False
    least = max(LEAST_BYTES_GROUP[beside and not wide], bytes_group(layout.bits))
    return least <= layout.padded_group <= columns_in_32_bits(form.largest, split)


def takes_byte_pairs(gemm: Gemm, device: TileDevice) -> bool:
    """Whether products of two digits and weights of two bytes serve a product, which float32 would take."""
    weight, layout = get_type(gemm.weight), cpu_layout(gemm)
    form = None if byte_form(weight) else byte_pairs(weight)
    if form is None or gemm.batch_invariant or "amx_bf16" in device.features or gemm.output == "float32":
        return False
    beside = operand_type(gemm) == "bfloat16" and "avx512_bf16" in device.features
    if gemm.activation not in SPLITS[TWO_BYTES] or beside:
        return False
    return bytes_group(layout.bits) <= layout.padded_group <= columns_in_32_bits(form.largest, TWO_BYTES)


def takes_terms(gemm: Gemm) -> bool:
    """Whether products of bfloat16 terms serve a product: they lose nothing of its operands."""
    weight = get_type(gemm.weight)
    return gemm.activation in SPLITS[TERMS] and weight.exact and representable(weight, "bfloat16")


def _rows_for(device: TileDevice) -> tuple[Row, ...]:
    return TABLE if "avx512f" in device.features else NARROW_TABLE


def cpu_candidates(gemm: Gemm, device: TileDevice, m: int) -> tuple[TransformList, ...]:
    """Return every schedule of the table that could serve ``m``, the table's choice first."""
    rows = (row for row in _rows_for(device) if _fits(gemm, device, row, m))
    found = (proposal(gemm, device, row.core, row.tile_m, row.tile_n) for row in rows)
    return tuple(dict.fromkeys(found))


def cpu_schedule(gemm: Gemm, device: TileDevice, m: int) -> TransformList:
    """Return the table's schedule for ``m`` rows of A.

    Raises ScheduleError if the device has no core that the CPU pipeline can emit.
    """
    found = cpu_candidates(gemm, device, m)
    check(bool(found), f"{device.name} has no core that the CPU pipeline can emit for {gemm.activation}")
    return found[0]
