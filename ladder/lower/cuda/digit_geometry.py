"""Choose the sizes of a kernel of the pipeline ``digits`` before any of it is emitted.

Activations as integers in shared memory, for the pipeline ``digits``.

A 16-bit x becomes an integer of 30 bits with a power of two per *period* of K (one or two tiles),
written as four signed digits of eight bits; each digit is a column of the B operand. An int8 x is
its own only digit. Codes that stay where they are in a byte count ``2**exponent`` fold (`Quad`),
so their x is divided by it before it is rounded: all of a tile's products then share one unit.

Beside the digits each period leaves where its sums start: the bits of `MAGIC` less what the type's
offset makes of the digits' sum, so that a finished sum *is* a float32, and what one step is worth.

Adding ``0x808080`` and inverting the top bits of the three lower bytes makes the bytes signed.

Error: an element is off by at most ``2**-(31-e)`` of the power of two above its period's largest,
e being the largest exponent of the type (0 for four bits, 4 for two, 6 for one), and by 2**-24 of
itself. Below 2**-87 that power of two no longer shrinks. An infinite or NaN element makes the
period's unit NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.gemv_geometry import Slices
from ladder.lower.gpu.groups import Groups
from ladder.lower.gpu.proven import packed_order
from schedules.codes import held_type
from schedules.footprint import (
    DIGIT_CHUNK_TILES,
    RESIDENT_THREADS,
    digit_columns,
    digit_tile_bytes,
    registers_per_thread,
)
from schedules.layouts import TILE
from schedules.legal import check_legal
from schedules.schedule import GpuSchedule, check
from targets import TileDevice
from tile_types.forms import Affine, affine_forms

MAGIC = 0x4B400000
"""Bits of the float32 1.5 * 2**23: plus an integer below 2**22 in magnitude they are that much more."""

MAGIC_VALUE = 12582912.0

DIGITS = 4
"""Digits of a 16-bit x."""

DIGIT_BITS = 8


@dataclass(frozen=True)
class Quad:
    """Four codes of rows g and g+8 that stay in place: one operand register each, and one of x.

    word: The packed word of both.
    position: Lowest bit of row g's codes in each byte; row g+8 has the next codes.
    exponent: Row g's codes count this power of two.
    chunks: Which eight (16-bit x) or sixteen elements of the tile's 64 columns they meet.
    """

    word: int
    position: int
    exponent: int
    chunks: tuple[int, ...]


def quads(bits: int, lane: int) -> tuple[Quad, ...]:
    """Return the four quads of a thread's share of 16 rows of a tile, packed in order ``lanes``."""
    slots, found = lane // bits, []
    for word in range(bits):
        for i in range(0, 8 // bits, 2):
            first = (word * slots + i) // 2
            chunks = (first, first + 4 // bits) if lane == 16 else (first,)
            found.append(Quad(word, bits * i, bits * i, chunks))
    return tuple(found)


VALUES = {
    "float16": "__half2float(__ushort_as_half((unsigned short)({0})))",
    "bfloat16": "__uint_as_float((unsigned int)({0}) << 16)",
}
"""float32 of the 16 low bits of an expression."""

SPLIT = """
static __device__ __forceinline__ void {name}(
    unsigned int w0, unsigned int w1, unsigned int w2, unsigned int w3, unsigned int w4, unsigned int w5,
    unsigned int w6, unsigned int w7, bool active, int c, int tile, unsigned int* digits,
    unsigned int* starts, unsigned int* unit) {{
  const unsigned int w[8] = {{w0, w1, w2, w3, w4, w5, w6, w7}};
  unsigned int most = 0;
#pragma unroll
  for (int q = 0; q < 8; q++) most = __vmaxu2(most, w[q] & 0x7fff7fffu);
  most = max(most & 0xffffu, most >> 16);
#pragma unroll
  for (int d = 1; d < {lanes}; d *= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, d));
  const unsigned int top = __float_as_uint({most}) >> 23;
  const unsigned int power = max(top, 40u);
  const float factor = __uint_as_float((283u - power) << 23);
  unsigned int out[4][4];
  int sums[4] = {{0, 0, 0, 0}};
{quads}
  if (active) {{
#pragma unroll
    for (int d = 0; d < 4; d++)
      reinterpret_cast<uint4*>(digits)[4 * d] = make_uint4(out[0][d], out[1][d], out[2][d], out[3][d]);
  }}
  // Lanes of even columns add up the lower two digits, the others the upper two.
  int low = c & 1 ? sums[2] : sums[0], high = c & 1 ? sums[3] : sums[1];
  if ({offset} != 0) {{
    low += __shfl_xor_sync(0xffffffffu, c & 1 ? sums[0] : sums[2], 1);
    high += __shfl_xor_sync(0xffffffffu, c & 1 ? sums[1] : sums[3], 1);
#pragma unroll
    for (int l = 2; l < {lanes}; l *= 2) {{
      low += __shfl_xor_sync(0xffffffffu, low, l);
      high += __shfl_xor_sync(0xffffffffu, high, l);
    }}
  }}
  if (active && tile == 0 && c < 2) {{
    low = {offset} * low, high = {offset} * high;
    reinterpret_cast<uint4*>(starts)[0] =
        make_uint4({magic}u + low, {magic}u + high, {magic}u + (low << {rows}), {magic}u + (high << {rows}));
    if (c == 0) *unit = top == 255u ? 0x7fc00000u : (power - 29u) << 23;
  }}
}}
"""

SPLIT_QUAD = """  {{
    const float scaled = factor * {scale}f;
    unsigned int y[4];
    y[0] = (unsigned int)__float2int_rn(__fmaf_rn({a}, scaled, 8421504.0f));
    y[1] = (unsigned int)__float2int_rn(__fmaf_rn({b}, scaled, 8421504.0f));
    y[2] = (unsigned int)__float2int_rn(__fmaf_rn({c}, scaled, 8421504.0f));
    y[3] = (unsigned int)__float2int_rn(__fmaf_rn({d}, scaled, 8421504.0f));
    const unsigned int low0 = __byte_perm(y[0], y[1], 0x5140), low1 = __byte_perm(y[2], y[3], 0x5140);
    const unsigned int high0 = __byte_perm(y[0], y[1], 0x7362), high1 = __byte_perm(y[2], y[3], 0x7362);
    out[{t}][0] = __byte_perm(low0, low1, 0x5410) ^ 0x80808080u;
    out[{t}][1] = __byte_perm(low0, low1, 0x7632) ^ 0x80808080u;
    out[{t}][2] = __byte_perm(high0, high1, 0x5410) ^ 0x80808080u;
    out[{t}][3] = __byte_perm(high0, high1, 0x7632);
    if ({offset} != 0) {{
#pragma unroll
      for (int d = 0; d < 4; d++) sums[d] = __dp4a((int)out[{t}][d], {weight:#x}, sums[d]);
    }}
  }}
"""

COPY = """
static __device__ __forceinline__ int {name}(
    unsigned int w0, unsigned int w1, unsigned int w2, unsigned int w3, bool active, int c, int tile,
    unsigned int* digits, unsigned int* starts) {{
  int sum = __dp4a((int)w0, 0x01010101, 0) + __dp4a((int)w1, 0x01010101, 0)
          + __dp4a((int)w2, 0x01010101, 0) + __dp4a((int)w3, 0x01010101, 0);
  if (active) *reinterpret_cast<uint4*>(digits) = make_uint4(w0, w1, w2, w3);
  if ({starts}) {{
    int total = sum;
#pragma unroll
    for (int l = 1; l < {lanes}; l *= 2) total += __shfl_xor_sync(0xffffffffu, total, l);
    if (active && tile == 0 && c == 0) {{
      const int low = {offset} * total;
      starts[0] = {magic}u + low;
      starts[2] = {magic}u + (low << {rows});
    }}
  }}
  return sum;
}}
"""


@dataclass(frozen=True)
class Splitter:
    """Emits the conversion of one thread's sixteen columns of a tile.

    activation, bits, form: Type of x, bits of a code and what codes are worth.
    lane: Bits of an element of x.
    period: Tiles of K that share a unit.
    starts: Whether sums start anew each period.
    """

    activation: str
    bits: int
    form: Affine
    lane: int
    period: int
    starts: bool

    @property
    def offset(self) -> int:
        """Offset added to a code before it is multiplied by the type's step."""
        return int(self.form.offset / self.form.factor)

    @property
    def words(self) -> int:
        """Words of x that a thread converts."""
        return 8 if self.lane == 16 else 4

    def source(self) -> tuple[str, str]:
        """Return name and CUDA text of the helper."""
        step = "down" if self.offset < 0 else "up"
        geo = f"{self.activation}_{self.bits}_{self.period}_{step}{abs(self.offset)}"
        fields: dict[str, Any] = {"lanes": 4 * self.period, "offset": self.offset, "rows": self.bits}
        fields["magic"] = f"{MAGIC:#x}"
        if self.lane == 8:
            name = f"ladder_copy_digits_{geo}_{int(self.starts)}"
            return name, COPY.format(name=name, starts=str(self.starts).lower(), **fields)
        name = f"ladder_split_{geo}"
        value = VALUES[self.activation]
        parts = []
        for t, quad in enumerate(quads(self.bits, 16)):
            first, second = quad.chunks
            sources = (f"w[{first}]", f"w[{second}]", f"(w[{first}] >> 16)", f"(w[{second}] >> 16)")
            numbers = (value.format(f"{x} & 0xffffu") for x in sources)
            weight = 0x01010101 << quad.exponent
            scale = f"{2.0**-quad.exponent:.8f}"
            named = dict(zip("abcd", numbers, strict=True))
            parts.append(SPLIT_QUAD.format(t=t, scale=scale, weight=weight, offset=self.offset, **named))
        text = SPLIT.format(name=name, most=value.format("most"), quads="".join(parts), **fields)
        return name, text

    def emit(self, words: Any, active: Expr, column: Expr, tile: Expr, *targets: Expr) -> Expr:
        """Return the call that converts ``words`` (a local buffer).

        active: Whether this thread has something to store; whole warps must come here together.
        column, tile: Which of four columns of fragments, and which tile of its period.
        targets: Addresses of the first digit, of the starts of the token's columns and (16-bit x) of the
            unit.
        """
        name, source = self.source()
        operands = [words[i] for i in range(self.words)]
        kind = "void" if self.lane == 16 else "int32"
        return b.call_inline(name, source, kind, *operands, active, column, tile, *targets)


COLUMNS = 8
"""Columns of one product."""


@dataclass(frozen=True)
class DigitGeometry(Slices):
    """Sizes that follow from a problem, a device, a schedule, and the bytes that a block keeps besides."""

    groups: Groups
    device: TileDevice
    schedule: GpuSchedule
    held: int = 0

    @property
    def lane(self) -> int:
        """Bits of an element of x."""
        return self.groups.lane

    @property
    def digits(self) -> int:
        """Columns of the B operand that an activation row takes."""
        return DIGITS if self.lane == 16 else 1

    @property
    def flushes(self) -> bool:
        """Whether sums become float32 every period; otherwise they stay integers."""
        return self.lane == 16 or self.groups.gemm.scale

    @property
    def period(self) -> int:
        """Tiles after which sums become float32, and that share a unit of x."""
        return gcd(self.groups.tiles, 2) if self.flushes else 1

    @property
    def column_blocks(self) -> int:
        """Fragments along the columns."""
        return -(-digit_columns(self.groups.gemm, self.schedule) // COLUMNS)

    @property
    def lanes(self) -> int:
        """Lanes of a fragment of x that differ: the others repeat them, their sums are not used."""
        return 4 * min(COLUMNS, digit_columns(self.groups.gemm, self.schedule))

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of x."""
        return TILE * digit_columns(self.groups.gemm, self.schedule)

    @property
    def resident_blocks(self) -> int:
        """Blocks per multiprocessor that registers and shared memory are meant for."""
        registers = -(-registers_per_thread(self.groups.gemm, self.schedule) // 8) * 8
        fitting = self.device.registers_per_unit // (self.threads * registers)
        return max(1, min(fitting, RESIDENT_THREADS // self.threads))

    @property
    def chunk_tiles(self) -> int:
        """Tiles of K that one chunk of x holds."""
        room = min(self.device.shared_per_unit // self.resident_blocks - 1024, self.device.shared_per_block)
        room -= 4 * (32 * self.schedule.tile_m + self.rows) + self.tile_bytes + 1024 + self.held
        return int(min(room // digit_tile_bytes(self.groups.gemm, self.schedule), DIGIT_CHUNK_TILES) // 4 * 4)

    @property
    def classes(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """Sums of a fragment: (exponent, pairs of quads), where x cannot make up for exponents."""
        found = quads(self.groups.bits, self.lane)
        if self.lane == 16:
            return ((0, ((0, 1), (2, 3))),)
        result = []
        for exponent in sorted({quad.exponent for quad in found}):
            own = [t for t, quad in enumerate(found) if quad.exponent == exponent]
            result.append((exponent, tuple((own[i], own[i + 1]) for i in range(0, len(own), 2))))
        return tuple(result)


def integer_form(weight: str) -> Affine:
    """Return the affine form of a type with the smallest offset that is a whole number of steps."""
    forms = [form for form in affine_forms(held_type(weight)) if (form.offset / form.factor).is_integer()]
    check(bool(forms), f"the codes of {weight} are not evenly spaced multiples of a step")
    return min(forms, key=lambda form: abs(form.offset))


@dataclass(frozen=True)
class Spec:
    """Decisions about a kernel before it is emitted.

    quads: Which codes of a packed word make an operand register.
    """

    gemm: Gemm
    schedule: GpuSchedule
    groups: Groups
    geo: DigitGeometry
    form: Affine
    splitter: Splitter
    quads: tuple[Quad, ...]

    @property
    def kind(self) -> str:
        """Type of the sums of a slice."""
        return "float32" if self.geo.flushes else "int32"

    @property
    def fragments(self) -> int:
        """Accumulator fragments of a warp."""
        return self.geo.row_blocks * self.geo.column_blocks

    @property
    def scale_parts(self) -> int:
        """Registers of a lane's share of a warp's scales."""
        return -(-self.schedule.warp_rows // 32)


def choose_spec(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, held: int = 0) -> Spec:
    """Return the sizes of a kernel; ``held`` bytes of shared memory are for what else a block keeps.

    Raises ScheduleError if the schedule does not fit the problem.
    """
    check_legal(gemm, device, schedule)
    groups = Groups(gemm, "accumulator")
    geo, form = DigitGeometry(groups, device, schedule, held), integer_form(gemm.weight)
    check(geo.chunk_tiles >= 4, f"{held} bytes beside x leave no room for its digits")
    element = held_type(gemm.weight)
    check(packed_order(element, gemm.activation) == "lanes", f"codes of {gemm.weight} are not in place")
    check(
        schedule.stages % geo.period == 0,
        f"{schedule.stages} stages are no whole periods of {geo.period} tiles",
    )
    splitter = Splitter(gemm.activation, groups.bits, form, geo.lane, geo.period, geo.flushes)
    return Spec(gemm, schedule, groups, geo, form, splitter, quads(groups.bits, geo.lane))
