"""The pipeline for very few tokens and narrow integer codes: integer products of codes in place.

``word & 0x03030303`` *is* four unsigned operands of ``mma.m16n8k32.u8.s8``, each counting a power
of two for the place of its codes: one logic instruction for four weights, no shift, no conversion.
x is split once per block into signed digits (`ladder.lower.cuda.digit_tokens`) that stay in shared
memory, a digit per column of the instruction; integer sums are exact. A warp owns 16 to 64 rows
and one slice of K, whose words it streams through registers; slices are added in shared memory. The
blocks of a cluster split K too: each then splits its own part of x only.

Nothing depends on the size of M, N or K: x passes in *chunks* of K as large as shared memory holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cuda.digit_shape import COLUMNS, Shape
from ladder.lower.cuda.digit_tokens import DIGIT_BITS, MAGIC, MAGIC_VALUE, Splitter, quads
from ladder.lower.cuda.gemv import LOADS, prefetched_words
from ladder.lower.cuda.gemv_geometry import STRIP
from ladder.lower.cuda.gemv_sums import reduce_and_store
from ladder.lower.cuda.launch import Overlap
from ladder.lower.gpu.arguments import declare_arguments
from ladder.lower.gpu.decode import packed_order
from ladder.lower.gpu.emission import TirMachine
from ladder.lower.gpu.groups import Groups, array_dtype
from ladder.lower.gpu.machine import XOR_AND, repeat
from schedules.layouts import TILE
from schedules.legal import check_legal
from schedules.schedule import GpuSchedule, check
from targets import TileDevice
from tile_types import get_type
from tile_types.forms import Affine, affine_forms

Expr = Any

PRODUCT = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32"


def integer_form(weight: str) -> Affine:
    """Return the affine form of a type with the smallest offset that is a whole number of steps."""
    forms = [form for form in affine_forms(get_type(weight)) if (form.offset / form.factor).is_integer()]
    check(bool(forms), f"the codes of {weight} are not evenly spaced multiples of a step")
    return min(forms, key=lambda form: abs(form.offset))


@dataclass(frozen=True)
class BlockRows:
    """A block's part of an array of rows in shared memory, indexed like the whole array."""

    part: Any
    first: Expr

    def __getitem__(self, row: Expr) -> Expr:
        """Return the element of a row."""
        return self.part[row - self.first]


class Digits:
    """One kernel being emitted."""

    def __init__(self, gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> None:
        check_legal(gemm, device, schedule)
        self.gemm, self.schedule = gemm, schedule
        self.groups = Groups(gemm, "accumulator")
        self.shape = Shape(self.groups, device, schedule)
        self.form = integer_form(gemm.weight)
        element = get_type(gemm.weight).element_type
        check(packed_order(element, gemm.activation) == "lanes", f"codes of {gemm.weight} are not in place")
        check(
            schedule.stages % self.shape.period == 0,
            f"{schedule.stages} stages are no whole periods of {self.shape.period} tiles",
        )
        shape = self.shape
        self.splitter = Splitter(
            gemm.activation, self.groups.bits, self.form, shape.lane, shape.period, shape.flushes
        )
        self.quads = quads(self.groups.bits, shape.lane)
        self.tile_words = 128 * self.groups.bits
        self.args = declare_arguments(gemm)
        self.overlap = Overlap(device)

    def emit(self) -> None:
        """Emit the whole body."""
        shared = ["clusterCtaIdx.x"] * (self.schedule.cluster > 1)
        self.overlap.declare("blockIdx.x", "blockIdx.y", *shared, "threadIdx.x")
        self._locate()
        self.overlap.release()
        self._allocate()
        self._prefetch()
        self.overlap.wait()
        size = self.shape.chunk_tiles
        # Also where nothing is left of K for this block: it finishes its share of the outputs.
        chunks = b.keep(T.max((self.end_tile - self.first_tile + size - 1) // size, 1))
        with b.loop(chunks, rolled=True) as chunk:
            self._chunk(b.keep(self.first_tile + chunk * size))
        self._finish()

    # ---- set-up ---------------------------------------------------------------------
    def _locate(self) -> None:
        """Find out which rows, tokens and slice of K this thread works on."""
        shape, args, plan = self.shape, self.args, self.schedule
        tile_strips = TILE // plan.warp_rows
        strips = args.n_tiles * tile_strips
        b.device(shape.resident_blocks)
        row_blocks = (strips + shape.row_warps - 1) // shape.row_warps
        block, token_block = b.block_index(
            [row_blocks * plan.cluster, (args.m + plan.tile_m - 1) // plan.tile_m]
        )
        self._share_tiles()
        block = b.bind(block // plan.cluster) if plan.cluster > 1 else block
        self.thread = b.thread_index(shape.threads)
        self.warp = b.bind(self.thread // 32)
        self.lane = b.bind(self.thread % 32)
        self.slice = b.bind(self.warp // shape.row_warps)
        self.row_warp = b.bind(self.warp % shape.row_warps)
        self.first_strip = b.bind(block * shape.row_warps)
        # Warps beyond the last strip repeat it; nothing of theirs is stored.
        strip = b.keep(T.min(self.first_strip + self.row_warp, strips - 1))
        self.first_row = b.bind(block * shape.rows)
        self.first_token = b.bind(token_block * plan.tile_m)
        self.token_count = b.keep(T.min(args.m - self.first_token, plan.tile_m))
        self.column = b.keep(strip * plan.warp_rows + self.lane % min(32, plan.warp_rows))
        owner = strip % tile_strips * (32 * shape.row_blocks) + self.lane
        self.strip_tile = b.keep(strip // tile_strips * args.k_tiles)
        self.owner = b.keep(owner * min(self.groups.bits, 4))
        self.words_at = b.Variable("int64", T.int64(0))

    def _share_tiles(self) -> None:
        """Share K among the blocks of a cluster in whole periods."""
        blocks, period, tiles = self.schedule.cluster, self.shape.period, self.args.k_tiles
        if blocks == 1:
            self.rank, self.first_tile, self.end_tile = T.int32(0), T.int32(0), tiles
            return
        self.rank = b.keep(b.cluster_rank([blocks])[0])
        share = b.bind((tiles + period * blocks - 1) // (period * blocks) * period)
        self.first_tile = b.keep(T.min(self.rank * share, tiles))
        self.end_tile = b.keep(T.min(self.first_tile + share, tiles))

    @property
    def kind(self) -> str:
        """Type of the sums of a slice."""
        return "float32" if self.shape.flushes else "int32"

    def _allocate(self) -> None:
        """Allocate shared buffers and registers; the reduction reuses x's memory."""
        shape, plan = self.shape, self.schedule
        periods = shape.chunk_tiles // shape.period
        pool = b.shared_pool()
        self.parts = pool.alloc((32, plan.tile_m), "int32", align=128)
        self.row_scales = pool.alloc((shape.rows,), "float32", align=128)
        first = pool.offset
        self.digits = pool.alloc((shape.chunk_tiles * shape.tile_bytes // 4,), "uint32", align=128)
        self.starts = pool.alloc((periods * shape.token_blocks * 16,), "uint32", align=128)
        self.units = pool.alloc((periods * plan.tile_m,), "uint32", align=128)
        pool.alloc((shape.tile_bytes // 4,), "uint32", align=128)  # a tile is read ahead of its use
        pool.move_base_to(first)
        self.pitch = shape.rows + 4
        self.slices = pool.alloc((plan.split_k, plan.tile_m, self.pitch), self.kind, align=128)
        pool.commit()
        bits, fragments = self.groups.bits, shape.row_blocks * shape.token_blocks * 4
        self.x_words, self.x_next = (b.local(self.splitter.words, "uint32") for _ in range(2))
        self.ring = [[b.local(bits, "uint32") for _ in range(shape.row_blocks)] for _ in range(plan.stages)]
        # Warps without work multiply what they never loaded: nobody reads the sums, but they are defined.
        for words in (words for stage in self.ring for words in stage):
            for i in range(bits):
                b.store(words, T.uint32(0), i)
        scales = array_dtype(self.args.scales)
        rings = range(plan.stages // shape.period)
        # A lane has the scale of one row of 32, and hands it out when the period ends.
        self.scale_ring = [b.local(-(-plan.warp_rows // 32), scales) for _ in rings] if scales else []
        self.sums = [b.local(fragments, "uint32") for _ in shape.classes]
        self.totals = b.local(fragments, self.kind)
        for i in range(fragments):
            b.store(self.totals, T.float32(0) if shape.flushes else T.int32(0), i)
        # Fragments of x of this tile and of the next.
        self.tokens = [[b.local(4, "uint32") for _ in range(shape.token_blocks)] for _ in range(2)]
        self.initial = [b.local(4, "uint32") for _ in range(shape.token_blocks)]

    def _prefetch(self) -> None:
        """Bring the first words of every slice, and scales, into L2 while the kernel before still runs.

        The words of a packed row of tiles are fetched by the block that has its first strip.
        """
        if not self.overlap.possible:
            return
        args, split = self.args, self.schedule.split_k
        strips = TILE // self.schedule.warp_rows
        tile = b.bind((self.first_strip + strips - 1) // strips + self.thread // split)
        mine = tile * strips < self.first_strip + self.shape.row_warps
        tiles = b.bind(self.end_tile - self.first_tile)
        begin, stop = self._slice(self.thread % split, T.min(self.shape.chunk_tiles, tiles))
        own = T.min(stop * self.shape.period, tiles) - begin * self.shape.period
        even = prefetched_words(args.n_tiles, args.k_tiles * self.tile_words)
        words = T.min(own * self.tile_words, even // (split * self.schedule.cluster) // 4 * 4)
        with b.when(T.And(T.And(mine, tile < args.n_tiles), words > 0)):
            first = T.Cast("int64", tile * args.k_tiles + self.first_tile + begin * self.shape.period)
            start = args.words.ptr_to([0, 0, first * T.int64(self.tile_words)])
            b.ptx("cp.async.bulk.prefetch.L2.global", start, T.Cast("uint32", words * 4))
        if self.gemm.scale:
            with b.when(self.thread < args.groups):
                b.ptx("prefetch.global.L2", args.scales.ptr_to([self.thread, self.first_row]))

    def _read_row_scales(self) -> Any:
        """Load this thread's share of the block's row scales, so that nothing waits for them at the end."""
        count = -(-self.shape.rows // self.shape.threads)
        values, last = b.local(count, "uint32"), self.args.n_tiles * TILE - 1
        for i in range(count):
            row = T.min(self.first_row + self.thread + i * self.shape.threads, last)
            b.ptx("ld.global.u32", values[i], self.args.row_scale.ptr_to([row]))
        return values

    def _keep_row_scales(self, values: Any) -> None:
        for i in range(-(-self.shape.rows // self.shape.threads)):
            row = self.thread + i * self.shape.threads
            with b.when(row < self.shape.rows):
                b.store(self.row_scales, T.reinterpret(values[i], dtype="float32"), row)

    # ---- a chunk of K ---------------------------------------------------------------
    def _chunk(self, first: Expr) -> None:
        """Multiply the tiles of K from ``first`` on that one chunk of x holds."""
        shape, plan = self.shape, self.schedule
        period = shape.period
        tiles = b.keep(T.min(shape.chunk_tiles, self.end_tile - first))
        periods = b.keep((tiles + period - 1) // period)
        begin, stop = self._slice(self.slice, tiles)
        begin, self.stop = b.keep(begin), b.keep(stop)
        self.end = b.keep(T.min(first + self.stop * period, self.end_tile))
        self.tile = b.Variable("int32", first + begin * period)
        self.period_at = b.Variable("int32", begin)
        start = T.Cast("int64", self.strip_tile + self.tile.value) * T.int64(self.tile_words)
        self.words_at.set(start + T.Cast("int64", self.owner))
        self._start_sums()
        # x first: its conversion begins while the weights, which would delay it, are on their way.
        items = b.keep(periods * (4 * period))
        self._begin_tokens(first, T.int32(0), items)
        for slot in range(plan.stages):
            self._load(slot, slot, guarded=True)
        row_scales = self._read_row_scales()
        self._convert(first, items)
        self._keep_row_scales(row_scales)
        b.block_sync()
        self._aim()
        count = self.end - self.tile.value
        turns = b.keep((count + plan.stages - 1) // plan.stages)
        whole = b.keep(T.max(count // plan.stages - 1, 0))
        with b.loop(whole, rolled=True):
            self._turn(guarded=False)
        with b.loop(turns, whole, rolled=True):
            self._turn(guarded=True)
        self._keep_integers()
        b.block_sync()

    def _slice(self, index: Expr, tiles: Expr) -> tuple[Expr, Expr]:
        """Return the periods of a chunk of ``tiles`` where a slice begins and ends."""
        periods = b.bind((tiles + self.shape.period - 1) // self.shape.period)
        share = b.bind((periods + self.schedule.split_k - 1) // self.schedule.split_k)
        return T.min(index * share, periods), T.min((index + 1) * share, periods)

    def _start_sums(self) -> None:
        if not self.shape.flushes:
            for sums in self.sums:
                for i in range(self._fragments * 4):
                    b.store(sums, T.uint32(0), i)

    def _keep_integers(self) -> None:
        """Move integer sums of a chunk to the totals; what places of codes add to them divides them."""
        if self.shape.flushes:
            return
        for i in range(self._fragments * 4):
            down = self.groups.bits * (i % 4 // 2)
            total = self.totals[i]
            for (exponent, _), sums in zip(self.shape.classes, self.sums, strict=True):
                total = total + (T.Cast("int32", sums[i]) >> T.int32(exponent + down))
            b.store(self.totals, total, i)

    @property
    def _fragments(self) -> int:
        return self.shape.row_blocks * self.shape.token_blocks

    def _aim(self) -> None:
        """Point at the slice's first digits and starts."""
        shape = self.shape
        lane = self.lane % shape.lanes
        word = self.period_at.value * (shape.period * shape.tile_bytes // 4) + lane * 4
        pointer = T.cuda.cvta_generic_to_shared(self.digits.ptr_to([word]))
        self.digits_at = b.Variable("uint32", pointer)
        if shape.flushes:
            word = self.period_at.value * (shape.token_blocks * 16) + self.lane % 4 * 4
            pointer = T.cuda.cvta_generic_to_shared(self.starts.ptr_to([word]))
            self.starts_at = b.Variable("uint32", pointer)
            self._read_starts(0)
        self._read_digits(0)

    # ---- x --------------------------------------------------------------------------
    def _begin_tokens(self, first: Expr, token: Expr, items: Expr) -> None:
        """Emit the loads of the first two turns of a token's conversion."""
        for turn, words in enumerate((self.x_words, self.x_next)):
            self._read_tokens(words, first, token, self.thread + turn * self.shape.threads, items)

    def _convert(self, first: Expr, items: Expr) -> None:
        """Write the digits of a chunk of x; whole periods, zero beyond K. The first loads are under way."""
        shape = self.shape
        turns = b.keep((items + shape.threads - 1) // shape.threads)
        words, fetched = self.x_words, self.x_next
        with b.loop(self.token_count, rolled=True) as token:
            total = b.Variable("int32", 0)
            with b.when(token > 0):
                self._begin_tokens(first, token, items)
            with b.loop(turns, rolled=True) as turn:
                item = b.bind(turn * shape.threads + self.thread)
                call = self._convert_item(words, b.bind(item < items), item, token)
                if shape.lane == 16:
                    b.emit(call)
                else:
                    total.set(total.value + call)
                for i in range(self.splitter.words):
                    b.store(words, fetched[i], i)
                self._read_tokens(fetched, first, token, item + 2 * shape.threads, items)
            if not shape.flushes and self.splitter.offset:
                self._add_part(total, token, first)

    def _read_tokens(self, words: Any, first: Expr, token: Expr, item: Expr, items: Expr) -> None:
        """Emit the loads of sixteen elements of a tile, zero where x ends; four items make a tile."""
        count, tile = self.splitter.words, b.bind(first + item // 4)
        start = b.bind(tile * TILE + item % 4 * (32 // self.shape.lane))

        def load(i: int) -> None:
            place = [self.first_token + token, start + i * (TILE // count)]
            b.ptx("ld.global.u32", words[i], self.args.x.ptr_to(place))

        def whole() -> None:
            for i in range(count):
                load(i)

        def part() -> None:
            for i in range(count):
                b.store(words, T.uint32(0), i)
                with b.when(T.And(item < items, start + i * (TILE // count) < self.args.k_x)):
                    load(i)

        b.either(T.And(item < items, tile * TILE + TILE <= self.args.k_x), whole, part)

    def _convert_item(self, words: Any, active: Expr, item: Expr, token: Expr) -> Expr:
        shape = self.shape
        tile, column = b.bind(item // 4), b.bind(item % 4)
        inner, period = b.bind(tile % shape.period), b.bind(tile // shape.period)
        inside = T.if_then_else(active, tile, 0)
        digit = inside * (shape.tile_bytes // 4) + token * (16 * shape.digits) + column * 4
        first = token * shape.digits  # of the token's columns, two share a start
        at = T.if_then_else(active, period, 0) * (shape.token_blocks * 16) + first // 2 * 4 + first % 2
        targets = [self.digits.ptr_to([digit])]
        if shape.lane == 16:
            unit = T.if_then_else(active, period, 0) * self.schedule.tile_m + token
            targets += [self.starts.ptr_to([at + column % 2 * 4]), self.units.ptr_to([unit])]
        else:
            targets += [self.starts.ptr_to([at])]
        return self.splitter.emit(words, active, column, inner, *targets)

    def _add_part(self, total: b.Variable, token: Expr, first: Expr) -> None:
        """Add a warp's sum of x to its part."""
        for distance in (16, 8, 4, 2, 1):
            other = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), total.value, distance, 32, 32)
            total.set(total.value + other)
        with b.when(self.lane == 0):
            before = b.Variable("int32", 0)
            with b.when(first > self.first_tile):
                before.set(self.parts[self.warp, token])
            b.store(self.parts, before.value + total.value, self.warp, token)

    # ---- weights --------------------------------------------------------------------
    def _load(self, slot: int, distance: int, *, guarded: bool) -> None:
        """Emit the loads of the tile ``distance`` after the current one, and of its period's scales."""
        shape = self.shape
        bits = self.groups.bits
        with b.when(self.tile.value + distance < self.end if guarded else True):
            for block, words in enumerate(self.ring[slot]):
                at = self.words_at.value + T.int64(distance * self.tile_words + block * 32 * bits)
                b.ptx(LOADS[bits], *(words[i] for i in range(bits)), self.args.words.ptr_to([0, 0, at]))
        before = shape.period - 1
        if self.gemm.scale and slot % shape.period == before:
            first = self.tile.value + (distance - before)
            with b.when(first < self.end if guarded else True):
                row = b.bind(self.groups.row(first, 0))
                for part in range(-(-self.schedule.warp_rows // 32)):
                    scale = self.args.scales[row, self.column + part * 32]
                    b.store(self.scale_ring[slot // shape.period], scale, part)

    # ---- products -------------------------------------------------------------------
    def _turn(self, *, guarded: bool) -> None:
        """Multiply ``stages`` tiles and refill their slots; guards keep both within the slice."""
        shape, plan = self.shape, self.schedule
        for first in range(0, plan.stages, shape.period):
            index = first // shape.period
            with b.when(self.period_at.value + index < self.stop if guarded else True):
                for slot in range(first, first + shape.period):
                    self._multiply(slot, fresh=shape.flushes and slot == first)
                    if shape.flushes and slot == first:
                        self._read_starts(index + 1)
                if shape.flushes:
                    self._flush(index)
                for slot in range(first, first + shape.period):
                    self._load(slot, slot + plan.stages, guarded=guarded)
        self.words_at.set(self.words_at.value + T.int64(plan.stages * self.tile_words))
        self.tile.set(self.tile.value + plan.stages)
        self.period_at.set(self.period_at.value + plan.stages // shape.period)
        self.digits_at.set(self.digits_at.value + T.uint32(plan.stages * shape.tile_bytes))
        if shape.flushes:
            step = plan.stages // shape.period * shape.token_blocks * 64
            self.starts_at.set(self.starts_at.value + T.uint32(step))

    def _read_starts(self, index: int) -> None:
        for block, registers in enumerate(self.initial):
            at = self.starts_at.value + T.uint32((index * self.shape.token_blocks + block) * 64)
            b.ptx("ld.shared.v4.u32", *(registers[i] for i in range(4)), at)

    def _read_digits(self, slot: int) -> None:
        """Emit the loads of a tile's fragments of x."""
        for block, registers in enumerate(self.tokens[slot % 2]):
            at = self.digits_at.value + T.uint32(slot * self.shape.tile_bytes + block * 64 * COLUMNS)
            b.ptx("ld.shared.v4.u32", *(registers[i] for i in range(4)), at)

    def _multiply(self, slot: int, *, fresh: bool) -> None:
        """Emit the products of a tile; ``fresh`` ones start from what the period says."""
        shape = self.shape
        self._read_digits(slot + 1)
        for row_block, words in enumerate(self.ring[slot]):
            codes = [self._codes(words, half, t) for t in range(4) for half in range(2)]
            for token_block, registers in enumerate(self.tokens[slot % 2]):
                for place, (_, steps) in enumerate(shape.classes):
                    for step, (first, second) in enumerate(steps):
                        a = (*codes[2 * first : 2 * first + 2], *codes[2 * second : 2 * second + 2])
                        x = (registers[first], registers[second])
                        begin = fresh and step == 0
                        self._product(place, row_block, token_block, a, x, begin)

    def _codes(self, words: Any, half: int, t: int) -> Expr:
        """Return four codes of row g or g+8 in place."""
        quad, bits = self.quads[t], self.groups.bits
        position = quad.position + bits * half
        mask = 0x01010101 * (((1 << bits) - 1) << position)
        if not self.form.flip:
            return b.bind(words[quad.word] & T.uint32(mask))
        # All codes are flipped by one constant, which stays in a register beside the mask.
        m = TirMachine()
        flip = m.constant(repeat(self.form.flip, bits))
        return m.lop3(m.input(words[quad.word]), flip, m.constant(mask), XOR_AND).content

    def _product(self, place: int, row_block: int, token_block: int, a: Any, x: Any, begin: bool) -> None:
        first = (row_block * self.shape.token_blocks + token_block) * 4
        sums = [self.sums[place][first + i] for i in range(4)]
        before = sums
        if begin:
            fixed = [T.uint32(MAGIC)] * 4
            before = [self.initial[token_block][i] for i in range(4)] if place == 0 else fixed
        b.ptx(PRODUCT, *sums, *a, *x, *before)

    def _flush(self, index: int) -> None:
        """Add a period's sums, times their scales and the unit of x, to the totals."""
        shape = self.shape
        for token_block in range(shape.token_blocks):
            unit = self._unit(index, token_block) if shape.lane == 16 else None
            scales = self._own_scales(index, unit)
            for row_block in range(shape.row_blocks):
                for half in range(2):
                    factor = self._factor(scales, row_block, half, unit)
                    for i in (2 * half, 2 * half + 1):
                        at = (row_block * shape.token_blocks + token_block) * 4 + i
                        b.store(self.totals, self.totals[at] + self._as_float(at) * factor, at)

    def _unit(self, index: int, token_block: int) -> Expr:
        token = (token_block * COLUMNS + self.lane % 4 * 2) // self.shape.digits % self.schedule.tile_m
        at = (self.period_at.value + index) * self.schedule.tile_m + token
        return b.bind(T.reinterpret(self.units[at], dtype="float32"))

    def _own_scales(self, index: int, unit: Expr | None) -> list[Expr]:
        """Return the scales that this lane has, times the unit of x if all columns have the same."""
        if not self.gemm.scale:
            return []
        own = [T.Cast("float32", self.scale_ring[index][i]) for i in range(-(-self.schedule.warp_rows // 32))]
        return [b.bind(x * unit if self._one_unit and unit is not None else x) for x in own]

    @property
    def _one_unit(self) -> bool:
        return self.schedule.tile_m == 1

    def _factor(self, scales: list[Expr], row_block: int, half: int, unit: Expr | None) -> Expr:
        """Return the scale of a row, which another lane has, times the unit of x."""
        if not scales:
            return unit
        part, row = divmod(row_block * STRIP + 8 * half, 32)
        source = self.lane // 4 + row
        scale = T.tvm_warp_shuffle(T.uint32(0xFFFFFFFF), scales[part], source, 32, 32)
        return b.bind(scale if unit is None or self._one_unit else scale * unit)

    def _as_float(self, at: int) -> Expr:
        """Return a fragment's finished sum as float32."""
        value: Expr = None
        for (exponent, _), sums in zip(self.shape.classes, self.sums, strict=True):
            own = T.reinterpret(sums[at], dtype="float32") - T.float32(MAGIC_VALUE)
            own = own if exponent == 0 else own * T.float32(2.0**-exponent)
            value = own if value is None else value + own
        return value

    # ---- reduction and output -------------------------------------------------------
    def _finish(self) -> None:
        """Join the digits, add the slices and store the block's outputs."""
        shape = self.shape
        if not shape.flushes and self.splitter.offset:
            self._add_offsets()
        for row_block in range(shape.row_blocks):
            for token_block in range(shape.token_blocks):
                at = (row_block * shape.token_blocks + token_block) * 4
                for half in range(2):
                    row = self.row_warp * self.schedule.warp_rows + row_block * STRIP + self.lane // 4
                    put = self._put_digits if shape.lane == 16 else self._put_tokens
                    put(at + 2 * half, token_block, row + 8 * half, half)
        # Sums read row scales from this block's copy.
        self.args = replace(self.args, row_scale=BlockRows(self.row_scales, self.first_row))
        reduce_and_store(self, shape)

    def finished(self, total: Expr) -> Expr:
        """Return a total of all slices as float32."""
        value = T.Cast("float32", total)
        return value if self.shape.flushes else value * T.float32(self.form.factor)

    def _put_digits(self, at: int, token_block: int, row: Expr, half: int) -> None:
        """Join the digits of a token, two each of neighbouring lanes."""
        low = self.totals[at] + self.totals[at + 1] * T.float32(2.0**DIGIT_BITS)
        upper = T.float32(2.0 ** (2 * DIGIT_BITS))
        low = b.Variable("float32", low * T.if_then_else(self.lane % 2 == 0, T.float32(1), upper)).value
        other = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), low, 1, 32, 32)
        gain = T.float32(self.form.factor * 2.0 ** (-self.groups.bits * half))
        value = b.bind((low + other) * gain)
        token = token_block * 2 + self.lane % 4 // 2
        with b.when(T.And(self.lane % 2 == 0, token < self.schedule.tile_m)):
            b.store(self.slices, value, self.slice, token, row)

    def _put_tokens(self, at: int, token_block: int, row: Expr, half: int) -> None:
        del token_block
        for i in range(2):
            token = self.lane % 4 * 2 + i
            value = self.totals[at + i]
            if self.shape.flushes:
                value = value * T.float32(self.form.factor * 2.0 ** (-self.groups.bits * half))
            with b.when(token < self.schedule.tile_m):
                b.store(self.slices, value, self.slice, token, row)

    def _add_offsets(self) -> None:
        """Add what the offset of the type makes of the sums of x to the integer sums of the first slice."""
        for i in range(2):
            token = T.min(self.lane % 4 * 2 + i, self.schedule.tile_m - 1)
            with b.when(self.slice == 0):
                parts: Expr = self.parts[0, token]
                for warp in range(1, self.schedule.warps):
                    parts = parts + self.parts[warp, token]
                shift = b.keep(parts * self.splitter.offset)
                for fragment in range(self._fragments * 2):
                    at = 2 * fragment + i
                    b.store(self.totals, self.totals[at] + shift, at)
