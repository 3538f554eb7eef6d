"""Resources of a block of a GPU kernel: rows, bytes of shared memory, registers and threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from ladder.ir.gemm import PACKED_ROWS, Gemm
from schedules.codes import table_bytes, weight_bits
from schedules.group_values import (
    scale_span,
    shared_value_bytes,
    shares_values,
    streams_exponents,
    value_words,
)
from schedules.layouts import lane_of, packed_group, padded
from schedules.schedule import GpuSchedule
from schedules.shares import shares_columns
from schedules.waves import FORMS, block_lanes, lds_bytes, tile_rows, wave_registers
from targets import TileDevice

WARP = 32

SWIZZLE_ROW = 128
"""Bytes of A in one row of the 128-byte swizzle that wgmma and TMA use (PTX ISA)."""

DEALT_COLUMNS = 128
"""Neighbouring columns of K that a slice takes at once where wgmma deals K: a turn of its loop (`deal`)."""

CHUNK_BYTES = 16
"""Bytes that a thread copies at once."""

STAGED_COLUMNS: Mapping[str, int] = {"float16": 64, "bfloat16": 64, "float32": 32}
"""Activation rows of an output type that a wgmma epilogue stages through shared memory at a time, at most."""

PRODUCER_REGISTERS = 40
"""Registers that a wgmma producer keeps when it hands the others to the math warpgroups (it spills at 24)."""

X_BUFFERS = 3
"""Buffers in which gemv passes A through shared memory."""

RESIDENT_THREADS = 1024
"""Threads per multiprocessor that gemv's registers and buffers of A are meant for."""

SPARE_REGISTERS = 12
"""Registers by which gemv's estimate may exceed the limit: so many values wait in memory for the rare
turn that copies A."""

X_SUMS = 1024
"""Sums of A over a tile of K that gemv keeps for each of its buffers, four bytes each."""

X_BUFFER_BYTES = 216 * 1024
"""All of gemv's buffers of A together, at most: enough to keep another block off the multiprocessor."""

RESERVED_BYTES = 1024
"""Bytes of shared memory that the system takes per block (CUDA programming guide, compute capability 9.0)."""

ALIGNMENT_BYTES = 3 * 1024
"""What a wgmma block's shared memory may be more than is placed there."""

ESTIMATE_ERROR = 16
"""Registers by which ptxas may exceed the estimate of wgmma: closer to the limit, they are handed over."""

SQUEEZED = 8
"""Registers beyond the estimate with which ptxas is trusted not to spill, so that one more block fits."""

WAVES = tuple(FORMS)
"""Pipelines of AMD's waves."""

WARPGROUPS = ("wgmma", "tcgen05")
"""Pipelines of warpgroups that a producer feeds through a ring of stages."""

TENSOR_COLUMNS = 512
"""Columns of 32 bits of tensor memory, each of 128 lanes (PTX ISA, "Tensor Memory")."""

WEIGHT_COLUMNS = 64
"""Columns of tensor memory that hold decoded weights: two slabs of 128 bytes of K."""

SLICED = ("gemv", "digits")
"""Pipelines whose blocks hold all slices of K of their rows, as warps that stream weights to registers."""

DIGIT_CHUNK_TILES = 512
"""Tiles of K whose digits shared memory holds at most: sums of 8-bit products stay within int32."""

FP8_INTERVAL = 512
"""Elements of K after which wgmma's fp8 sums move to float32, where no scale makes them move earlier.

Longer intervals save nothing on an H200 and add to the error. Where x and weight are both of one sign, the
core's truncation adds up within an interval.
"""

PARTIAL_COLUMNS = 64
"""Activation rows of one of wgmma's two sets of partial sums at most."""

CARRY_INTERVAL = 2048
"""As `FP8_INTERVAL`, for tiles whose sums carry into 16 bits: longer, since that costs more."""

PROMOTED_COLUMNS = 128
"""Activation rows of a set of partial sums at most; a tile of more is multiplied and promoted in parts."""

CROWDED_WARPS, CROWDED_COLUMNS = 12, 96
"""Math warps of wgmma that have registers for totals of fewer activation rows, and how many rows."""


@dataclass(frozen=True)
class Resources:
    """Resources of one block.

    shared: Bytes of shared memory.
    stage: Bytes of one pipeline stage, in flight while another is consumed.
    registers: Estimated 32-bit registers per computing thread.
    threads: Threads, producers included.
    blocks_per_unit: Blocks that fit on one SM at once.
    """

    shared: int
    stage: int
    registers: int
    threads: int
    blocks_per_unit: int


def operand_bytes(gemm: Gemm) -> int:
    """Return the bytes of one activation element on the tensor core."""
    return lane_of(gemm.activation) // 8


def promotes(gemm: Gemm, schedule: GpuSchedule) -> bool:
    """Whether partial sums move to a second set of accumulators: group scales there, or fp8.

    Hopper's fp8 tensor cores keep about 14 bits of the running sum (DeepSeek-V3, section 3.3.2).
    """
    if schedule.pipeline == "tcgen05":  # sums are float32 (PTX ISA, "tcgen05.mma": .kind::f8f6f4)
        return False
    flushed = gemm.scale or gemm.token_group > 0 or gemm.activation.startswith("fp8")
    return schedule.placement == "accumulator" and flushed


def promotes_rarely(gemm: Gemm) -> bool:
    """Whether nothing but the length of sums makes wgmma promote them."""
    return not gemm.scale and not gemm.token_group


def promoted_columns(tile_m: int) -> int:
    """Return the activation rows that are promoted together: a tile's, or those of an even part of it."""
    return tile_m // -(-tile_m // PROMOTED_COLUMNS)


def carries(gemm: Gemm, schedule: GpuSchedule) -> bool:
    """Whether wgmma's sums keep their upper bits apart: large tiles of fp8 codes multiplied as they are.

    Three warpgroups have no registers for totals of as many rows as two.
    """
    plain = weight_bits(gemm) == 8 and gemm.weight.startswith("fp8") and gemm.activation.startswith("fp8")
    most = CROWDED_COLUMNS if schedule.warps == CROWDED_WARPS else PROMOTED_COLUMNS
    wide = schedule.pipeline == "wgmma" and schedule.tile_m > most
    return wide and plain and promotes_rarely(gemm)


def k_blocks(schedule: GpuSchedule) -> int:
    """Return the blocks that share K: wgmma's slices, or the blocks of a cluster of gemv or digits."""
    if schedule.pipeline in SLICED:
        return schedule.cluster
    return schedule.split_k if schedule.pipeline == "wgmma" else 1


def k_slices(schedule: GpuSchedule) -> int:
    """Return the parts into which K is split, among blocks and among warps of a block."""
    return schedule.split_k * (schedule.cluster if schedule.pipeline in SLICED else 1)


def turn_slabs(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the slabs (128 bytes of K) of a turn of wgmma's loop.

    At least two, so that operand registers alternate; four where each slab ends with a wait for its products.
    """
    slab = SWIZZLE_ROW // operand_bytes(gemm)
    grouped = gemm.group_size < gemm.k
    step = gcd(packed_group(gemm.group_size, gemm.k), schedule.tile_k) if grouped else schedule.tile_k
    drains = operand_bytes(gemm) == 1 and (grouped or gemm.token_group > 0) and step >= slab
    return max(4 if drains else 2, schedule.tile_k // slab)


def turn_columns(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the K of a turn of wgmma's loop."""
    return turn_slabs(gemm, schedule) * SWIZZLE_ROW // operand_bytes(gemm)


def slice_columns(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the K of each slice of wgmma's ``split_k`` but the last: whole turns of its loop."""
    turn = turn_columns(gemm, schedule)
    return -(-padded(gemm.k) // (turn * schedule.split_k)) * turn


def slices_in_turn(schedule: GpuSchedule) -> int:
    """Return the slices of K that a wgmma block sums one after another; in a cluster it keeps all apart."""
    return schedule.deal // schedule.split_k if schedule.deal > 1 else 1


def block_rows(schedule: GpuSchedule) -> int:
    """Return the rows of N that one block serves: ``tile_n``, or all row warps' of a slice of K."""
    if schedule.pipeline in SLICED:
        return schedule.warp_rows * schedule.warps // schedule.split_k
    return tile_rows(schedule)


def stage_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the bytes of one pipeline stage: packed weights, activations, scales and zeros."""
    weights = schedule.tile_n * schedule.tile_k * weight_bits(gemm) // 8
    if schedule.pipeline in SLICED:  # weights go straight to registers, split_k slices at once
        return schedule.split_k * block_rows(schedule) * schedule.tile_k * weight_bits(gemm) // 8
    activations = schedule.tile_m // (1 + schedule.pair) * schedule.tile_k * operand_bytes(gemm)
    return weights + activations + scale_bytes(gemm, schedule.tile_n, staged_groups(gemm, schedule))


def scale_bytes(gemm: Gemm, rows: int, groups: int) -> int:
    """Return the bytes of packed scales and zeros of ``rows`` x ``groups``."""
    wide = lane_of(gemm.activation) == 16
    scale = (2 if wide and not streams_exponents(gemm) else 4) if gemm.scale else 0
    zero = {"none": 0, "integer": 2 if wide else 1, "float": 4}[gemm.zero]
    return rows * groups * (scale + zero)


def staged_groups(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the scale rows of a stage: one if a group covers it, else one per run that never straddles."""
    if gemm.group_size >= gemm.k:
        return 1
    return schedule.tile_k // gcd(scale_span(gemm), schedule.tile_k)


def shared_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the shared memory of one block."""
    if schedule.pipeline == "gemv":
        rows = block_rows(schedule)
        sums = 4 * (schedule.split_k * schedule.tile_m * (rows + 4) + rows)
        held = table_bytes(gemm) + shared_value_bytes(gemm, schedule) + least_x_bytes(gemm, schedule)
        return max(held, sums)
    if schedule.pipeline == "digits":
        sums = 4 * schedule.split_k * schedule.tile_m * (block_rows(schedule) + 4)
        return 4096 + max(16 * digit_tile_bytes(gemm, schedule), sums)
    if schedule.pipeline in WAVES:
        return lds_bytes(gemm, schedule)
    if schedule.pipeline == "mma":  # results reuse the stages' memory after the loop
        ring = schedule.stages * (stage_bytes(gemm, schedule) + 16) + table_bytes(gemm)
        return max(ring, schedule.tile_m * schedule.tile_n * 4)
    return warpgroup_bytes(gemm, schedule) + (64 if schedule.pipeline == "tcgen05" else 0)


def warpgroup_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the dynamic shared memory of a block of warpgroups, alignment included."""
    ring = schedule.stages * (stage_bytes(gemm, schedule) + 16)
    return ring + _staging_bytes(gemm, schedule) + table_bytes(gemm) + ALIGNMENT_BYTES


def least_x_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the least bytes of gemv's buffers of A: one tile of K per slice, or two of 8-bit cores."""
    rows = X_BUFFERS * schedule.tile_m * schedule.split_k
    return rows * max(schedule.tile_k * operand_bytes(gemm), SWIZZLE_ROW)


def digit_columns(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the columns of a block's products: four digits of a row of 16-bit x, one of int8."""
    return schedule.tile_m * (4 if lane_of(gemm.activation) == 16 else 1)


def digit_tile_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the bytes of shared memory that a tile of K of split activations takes, starts and units too."""
    columns = digit_columns(gemm, schedule)
    return 64 * columns + 64 * -(-columns // 8) + 4 * schedule.tile_m


def _staging_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return what a wgmma epilogue transposes sums through, and receives those of other slices of K in."""
    alone = schedule.split_k > 1 and not shares_columns(schedule)
    together = 80 if alone else 68  # bytes of a warp's rows, padding included
    row = together if gemm.output == "float32" else 32
    staged = schedule.warps * staged_columns(gemm, schedule) * row
    units, rows = schedule.tile_n // 16, schedule.tile_m
    if alone:
        units = -(-units // schedule.split_k)
    elif schedule.split_k > 1:
        rows = -(-rows // 8 // schedule.split_k) * 8
    return staged + (schedule.split_k - 1) * slices_in_turn(schedule) * units * rows * 64


def staged_columns(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the activation rows that a wgmma epilogue stages at a time, by eights.

    As many in every turn where that takes at most one turn too many, each of which ends with two barriers;
    else the last turn has fewer.
    """
    most = STAGED_COLUMNS[gemm.output]
    turns = -(-schedule.tile_m // most)
    even = (schedule.tile_m // t for t in (turns, turns + 1) if schedule.tile_m % (8 * t) == 0)
    return next(even, most // 4 * 3)


def registers_per_thread(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Estimate the registers of one computing thread: sums, operands, packed words, addresses."""
    bits = weight_bits(gemm)
    if schedule.pipeline == "gemv":
        return _gemv_registers(gemm, schedule)
    if schedule.pipeline == "digits":
        return _digits_registers(gemm, schedule)
    if schedule.pipeline in WAVES:
        return wave_registers(gemm, schedule, promoted=promotes(gemm, schedule))
    if schedule.pipeline == "tcgen05":
        return _decoding_registers(gemm, schedule)
    sums = schedule.tile_m * schedule.tile_n // (WARP * schedule.warps) * (1 + promotes(gemm, schedule))
    if schedule.pipeline == "mma":
        # Groups of half an 8-bit step: ptxas keeps scales and products of many in flight (measured).
        halves = promotes(gemm, schedule) and gemm.scale and packed_group(gemm.group_size, gemm.k) == 16
        return sums + 16 + 4 * max(1, schedule.tile_m // 16) + bits + 40 + halves * schedule.tile_k
    return math_register_estimate(gemm, schedule)


def _gemv_registers(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the registers below which ptxas spills, roughly."""
    # Either scales that were multiplied out, or a second set of sums.
    sums = schedule.tile_m // 2 + (4 if schedule.placement == "operand" else schedule.tile_m // 2)
    operands = schedule.warp_rows // 2 + schedule.tile_m // 2
    fetched = schedule.stages * weight_bits(gemm)
    rest = 16 + operands + _gemv_values(gemm, schedule)
    return rest + schedule.warp_rows // 16 * (sums + fetched)


def _gemv_values(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the registers of scales and zero points; neighbouring tiles share those of long groups."""
    if shares_values(gemm):
        # In flight, and as many at least of a tile; tiles of small groups are multiplied by halves (ptxas).
        held = sum(4 * -(-words // 128) for words in value_words(gemm, schedule))
        return 2 * held - 12 + (schedule.warp_rows // 2 if schedule.placement == "accumulator" else 0)
    group = scale_span(gemm) or padded(gemm.k)
    values = (2 if gemm.scale else 0) + {"none": 0, "integer": 2, "float": 4}[gemm.zero]
    shared = gcd(schedule.stages, max(1, group // 64)) if gemm.group_size < gemm.k else schedule.stages
    return schedule.warp_rows // 16 * (values * max(1, 64 // group) * schedule.stages // shared)


def _digits_registers(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the registers below which ptxas spills, roughly."""
    fragments = -(-digit_columns(gemm, schedule) // 8)
    classes = 1 if lane_of(gemm.activation) == 16 or weight_bits(gemm) == 4 else 2
    fetched = schedule.stages * weight_bits(gemm)
    scales = -(-schedule.stages // 2) * -(-schedule.warp_rows // 32) if gemm.scale else 0
    sums = 4 * fragments * (1 + classes)
    rest = 28 if lane_of(gemm.activation) == 16 else 22
    return rest + 8 * fragments + scales + schedule.warp_rows // 16 * (sums + fetched)


def math_register_estimate(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Estimate the registers of a wgmma math thread: sums, operands, the next slab's words, addresses."""
    row_tiles = schedule.tile_n // (16 * schedule.warps)
    sums = row_tiles * schedule.tile_m // 2
    if carries(gemm, schedule):
        # Sums, half as many registers of heads, operands of a slab.
        return sums * 3 // 2 + row_tiles * 16 + 8
    if promotes(gemm, schedule):
        # One set of partial sums, or two small ones. Bytes that go to the core as they are need
        # little else; close to the limit ptxas makes do with this many (measured).
        plain = weight_bits(gemm) == 8 and not gemm.scale
        parted, part = schedule.tile_m > PROMOTED_COLUMNS, promoted_columns(schedule.tile_m)
        partial = part // 2 if part > PARTIAL_COLUMNS else part
        # A tile in parts decodes nothing ahead.
        rest = 16 + (8 if plain else 16) if parted else 32 + (8 if plain else 28)
        return sums + partial + rest + (row_tiles - 1) * 32
    # ptxas gives each slab of a turn of the loop operand registers of its own.
    slabs = max(2, schedule.tile_k * operand_bytes(gemm) // SWIZZLE_ROW)
    sums *= slices_in_turn(schedule) if schedule.split_k > 1 else min(2, slices_in_turn(schedule))
    return sums + row_tiles * (slabs * 16 + _fetched(gemm, schedule)) + 24


def _decoding_registers(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Estimate the registers of a thread that decodes into tensor memory, and stores sums from there."""
    row_tiles = schedule.tile_n // (16 * schedule.warps)
    decoding = row_tiles * (16 + _fetched(gemm, schedule))
    return max(decoding, staged_columns(gemm, schedule)) + 56


def tensor_columns(schedule: GpuSchedule) -> int:
    """Return the columns of tensor memory that a tcgen05 block allocates: a power of two."""
    needed = WEIGHT_COLUMNS + schedule.tile_m
    return 1 << (needed - 1).bit_length()


def _fetched(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the registers of a row tile's packed words, scales and zero points of one slab."""
    wide = lane_of(gemm.activation) == 16
    group = packed_group(gemm.group_size, gemm.k)
    rows = max(1, SWIZZLE_ROW // operand_bytes(gemm) // group)
    fused = 1 + (gemm.activation == "float16" and gemm.zero == "none")
    factors = (gemm.scale * fused if wide else 0) + {"none": 0, "integer": 1, "float": 2}[gemm.zero]
    return weight_bits(gemm) * (1 if wide else 2) + 2 * rows * factors


def launch_registers(warps: int) -> int:
    """Return the registers per thread at launch if ``warps`` warps share a multiprocessor.

    Each of its four schedulers has 16 Ki registers for its share of the warps.
    """
    return min(255, 65536 // (WARP * -(-warps // 4) * 4) // 8 * 8)


def moves_registers(gemm: Gemm, schedule: GpuSchedule) -> bool:
    """Whether wgmma's producer hands registers to the math warps (setmaxnreg), so that the block is alone."""
    spare = launch_registers(schedule.warps + 4) - math_register_estimate(gemm, schedule)
    return schedule.warps > 4 and spare < ESTIMATE_ERROR + residual_registers(gemm, schedule)


def residual_registers(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the registers of what a wgmma math thread adds to the sums of one turn of its epilogue."""
    if not gemm.residual:
        return 0
    return staged_columns(gemm, schedule) // (2 if gemm.output == "float32" else 4)


def math_registers(warps: int) -> int:
    """Return the most registers of a wgmma math thread if one block fills a multiprocessor.

    The producer's warpgroup hands over what it does not need.
    """
    if warps == 4:
        return 240
    pool = (warps + 4) * launch_registers(warps + 4)
    return min(240, (pool - 4 * PRODUCER_REGISTERS) // warps // 8 * 8)


@lru_cache(maxsize=4096)
def of_any_n(gemm: Gemm) -> Gemm:
    """Return the problem that stands for those of any N in caches of what a block takes and does."""
    return replace(gemm, n=2 * PACKED_ROWS if gemm.gate else 1)


@lru_cache(maxsize=16384)
def warpgroup_blocks(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> int:
    """Return the blocks of wgmma that a multiprocessor holds.

    ptxas is asked to leave them registers, and shared memory that is left unused keeps further ones out. A
    loop that scales int8 sums by groups decodes ahead in more registers than two blocks leave it.
    """
    scaled = gemm.activation == "int8" and gemm.group_size < gemm.k
    if schedule.persistent or moves_registers(gemm, schedule) or scaled:
        return 1
    fitting = device.shared_per_unit // (_placed_bytes(gemm, schedule) + RESERVED_BYTES)
    enough = math_register_estimate(gemm, schedule) + SQUEEZED
    warps = block_threads(schedule) // WARP
    return next((n for n in range(fitting, 1, -1) if launch_registers(n * warps) >= enough), 1)


def _placed_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the bytes of shared memory that a wgmma block places, to the alignment of a few parts."""
    return shared_bytes(gemm, schedule) - ALIGNMENT_BYTES + 512


@lru_cache(maxsize=16384)
def resources(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Resources:
    """Return what one block of ``schedule`` takes on ``device``."""
    threads = block_threads(schedule)
    shared, registers = shared_bytes(gemm, schedule), registers_per_thread(gemm, schedule)
    if schedule.pipeline == "wgmma":
        blocks = warpgroup_blocks(gemm, device, schedule)
        return Resources(shared, stage_bytes(gemm, schedule), registers, threads, blocks)
    by_registers = device.registers_per_unit // (-(-registers // 8) * 8 * threads)
    reserved = RESERVED_BYTES if device.vendor == "nvidia" else 0  # the driver's, of every block
    by_shared = device.shared_per_unit // (shared + reserved)
    blocks = min(by_registers, by_shared, device.max_threads_per_unit // threads, device.max_blocks_per_unit)
    if schedule.pipeline in SLICED:
        blocks = min(blocks, max(1, RESIDENT_THREADS // threads))
    if schedule.pipeline == "tcgen05":
        blocks = min(blocks, TENSOR_COLUMNS // tensor_columns(schedule))
    return Resources(shared, stage_bytes(gemm, schedule), registers, threads, blocks)


def block_threads(schedule: GpuSchedule) -> int:
    """Return the threads of a block: computing warps, one producer, one that starts products of tcgen05."""
    if schedule.pipeline in WAVES:
        return block_lanes(schedule)
    return WARP * (schedule.warps + {"wgmma": 1, "tcgen05": 2}.get(schedule.pipeline, 0))
