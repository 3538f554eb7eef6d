"""Which schedules a device can run: allowed extents per pipeline, shared memory, registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import gcd

from ladder.ir.gemm import Gemm
from schedules.layouts import lane_of, packed_group
from schedules.schedule import GpuSchedule
from targets import TileDevice
from tile_types import get_type
from tile_types.errors import ScheduleError

WARP = 32
SWIZZLE_ROW = 128
"""Bytes of A in one row of the 128-byte swizzle that wgmma and TMA use (PTX ISA)."""

STAGED_TOKENS = 32
"""Tokens that a wgmma epilogue stages through shared memory at a time."""

QUAD_PAIR_COPIES = 3
"""Further sets of sums on Volta, whose four quad-pairs each sum a quarter of K (PTX ISA, mma.m8n8k4)."""

TOKEN_BUFFER = 56 * 1024
"""Largest of gemv's two buffers of A: two blocks share an SM of 228 KiB."""

GEMV_SPARE = 14
"""Registers by which ptxas undercuts the estimate for gemv (48, 60 and 100 at 2, 4 and 8 stages of int4)."""

SPLIT_TOKENS = 64
"""Tokens per tile up to which a cluster sums slices of K."""


@dataclass(frozen=True)
class Rule:
    """Extents that a pipeline's skeleton supports, and the device feature it needs."""

    feature: str
    tile_m: tuple[int, ...]
    tile_n: tuple[int, ...]
    tile_k: tuple[int, ...]
    stages: tuple[int, ...]
    warps: tuple[int, ...]
    split_k: tuple[int, ...]
    persistent: tuple[bool, ...]


RULES: Mapping[str, Rule] = {
    "gemv": Rule(
        "ldmatrix", (8, 16), (64,), (64,), (1, 2, 3, 4, 6, 8), (4, 8, 16, 32), (1, 2, 4, 8), (False,)
    ),
    "mma": Rule("mma", (16, 32, 64, 128), (64, 128), (64, 128), (2, 3, 4), (4, 8), (1,), (False,)),
    "wgmma": Rule(
        "wgmma",
        (8, 16, 32, 64, 128, 256),
        (64, 128, 256),
        (64, 128, 256),
        (2, 3, 4, 5, 6, 7, 8),
        (4, 8, 16),
        (1, 2, 4, 8),
        (False, True),
    ),
}


SERVES: Mapping[str, frozenset[str]] = {
    "gemv": frozenset({"experts"}),
    "mma": frozenset({"experts", "token_group"}),
    "wgmma": frozenset(),
    "cpu": frozenset(),
}
"""What each pipeline can of `Gemm.extras`."""


def serves(gemm: Gemm, pipeline: str) -> bool:
    """Whether a pipeline can do all that the problem asks."""
    return SERVES[pipeline].issuperset(gemm.extras)


@dataclass(frozen=True)
class Resources:
    """What one block takes.

    Parameters
    ----------
    shared
        Bytes of shared memory.
    stage
        Bytes of one pipeline stage, in flight while another is consumed.
    registers
        Estimated 32-bit registers per computing thread.
    threads
        Threads, producers included.
    blocks_per_unit
        Blocks that fit on one SM at once.
    """

    shared: int
    stage: int
    registers: int
    threads: int
    blocks_per_unit: int


@cache
def _bits(weight: str) -> int:
    return get_type(weight).elem_bits


def weight_bits(gemm: Gemm) -> int:
    """Return the bits of one weight code."""
    return _bits(gemm.weight)


def operand_bytes(gemm: Gemm) -> int:
    """Return the bytes of one activation element on the tensor core."""
    return lane_of(gemm.activation) // 8


def placement_for(gemm: Gemm) -> str:
    """Return where scales apply: on the decoded operand of 16-bit cores, on the accumulator of 8-bit ones.

    An 8-bit operand cannot hold the product of a value and a scale; a 16-bit one can, and
    scaling it costs one multiply per register instead of one per accumulator and group.
    """
    return "operand" if lane_of(gemm.activation) == 16 else "accumulator"


def promotes(gemm: Gemm, schedule: GpuSchedule) -> bool:
    """Whether partial sums move to a second set of accumulators: group scales there, or fp8.

    Hopper's fp8 tensor cores keep about 14 bits of the running sum (DeepSeek-V3, section 3.3.2).
    """
    flushed = gemm.scale or gemm.token_group > 0 or gemm.activation.startswith("fp8")
    return schedule.placement == "accumulator" and flushed


def block_rows(schedule: GpuSchedule) -> int:
    """Return the rows of N that one block serves: ``tile_n``, or 16 per row warp of a gemv slice."""
    return 16 * schedule.warps // schedule.split_k if schedule.pipeline == "gemv" else schedule.tile_n


def stage_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the bytes of one pipeline stage: packed weights, activations, scales and zeros."""
    weights = schedule.tile_n * schedule.tile_k * weight_bits(gemm) // 8
    if schedule.pipeline == "gemv":  # weights go straight to registers, split_k slices at once
        return schedule.split_k * block_rows(schedule) * schedule.tile_k * weight_bits(gemm) // 8
    activations = schedule.tile_m * schedule.tile_k * operand_bytes(gemm)
    return weights + activations + scale_bytes(gemm, schedule.tile_n, staged_groups(gemm, schedule))


def scale_bytes(gemm: Gemm, rows: int, groups: int) -> int:
    """Return the bytes of packed scales and zeros of ``rows`` x ``groups``."""
    wide = lane_of(gemm.activation) == 16
    scale = (2 if wide else 4) if gemm.scale else 0
    zero = {"none": 0, "integer": 2 if wide else 1, "float": 4}[gemm.zero]
    return rows * groups * (scale + zero)


def staged_groups(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the scale rows of a stage: one if a group covers it, else one per run that never straddles."""
    group = packed_group(gemm.group_size, gemm.k)
    if gemm.group_size >= gemm.k or group % schedule.tile_k == 0:
        return 1
    return schedule.tile_k // gcd(group, SWIZZLE_ROW // operand_bytes(gemm))


def shared_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the shared memory of one block."""
    if schedule.pipeline == "gemv":
        sums = 4 * schedule.split_k * schedule.tile_m * (block_rows(schedule) + 4)
        return max(2 * _token_bytes(gemm, schedule), sums)
    pipeline = schedule.stages * (stage_bytes(gemm, schedule) + 16)
    if schedule.pipeline == "mma":  # results reuse the stages' memory after the loop
        return max(pipeline, schedule.tile_m * schedule.tile_n * 4)
    staged = schedule.tile_m if schedule.split_k > 1 else min(schedule.tile_m, STAGED_TOKENS)
    warpgroups = schedule.warps // 4
    return pipeline + warpgroups * staged * (schedule.tile_n // warpgroups + 4) * 4 + 3 * 1024


def _token_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return one of gemv's two buffers of A: all stages, or a divisor of them that fits `TOKEN_BUFFER`."""
    step = schedule.split_k * schedule.tile_m * schedule.tile_k * operand_bytes(gemm)
    divisors = (s for s in range(schedule.stages, 0, -1) if schedule.stages % s == 0)
    return next((s * step for s in divisors if s * step <= TOKEN_BUFFER), step)


def registers_per_thread(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Estimate the registers of one computing thread: sums, operands, packed words, addresses."""
    bits = weight_bits(gemm)
    if schedule.pipeline == "gemv":
        scales = (2 if gemm.scale else 0) + {"none": 0, "integer": 2, "float": 4}[gemm.zero]
        in_flight = bits + scales * max(1, 64 // packed_group(gemm.group_size, gemm.k))
        sums = schedule.tile_m // 2 * (1 if schedule.placement == "operand" else 2)
        return 44 + sums + (schedule.stages + 1) * in_flight
    sums = schedule.tile_m * schedule.tile_n // (WARP * schedule.warps) * (1 + promotes(gemm, schedule))
    if schedule.pipeline == "mma":
        # Groups of half an 8-bit step: ptxas keeps scales and products of many in flight (measured).
        halves = promotes(gemm, schedule) and gemm.scale and packed_group(gemm.group_size, gemm.k) == 16
        return sums + 16 + 4 * max(1, schedule.tile_m // 16) + bits + 40 + halves * schedule.tile_k
    row_tiles = schedule.tile_n // (16 * schedule.warps)
    return sums + 2 * 16 * row_tiles + bits + 32


def resources(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Resources:
    """Return what one block of ``schedule`` takes on ``device``."""
    threads = block_threads(schedule)
    shared, registers = shared_bytes(gemm, schedule), registers_per_thread(gemm, schedule)
    used = registers - (GEMV_SPARE if schedule.pipeline == "gemv" else 0)
    by_registers = device.registers_per_unit // (max(1, -(-used // 8) * 8) * threads)
    by_shared = device.shared_per_unit // (shared + 1024)
    blocks = min(by_registers, by_shared, device.max_threads_per_unit // threads, device.max_blocks_per_unit)
    return Resources(shared, stage_bytes(gemm, schedule), registers, threads, blocks)


def block_threads(schedule: GpuSchedule) -> int:
    """Return the threads of a block: computing warps, and one producer warp for wgmma."""
    return WARP * (schedule.warps + (schedule.pipeline == "wgmma"))


def check_legal(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Resources:
    """Check that ``device`` can run ``schedule`` for ``gemm``.

    Returns
    -------
    Resources
        What one block takes.

    Raises
    ------
    ScheduleError
        Naming the first rule that is broken.
    ConversionError
        If the device has no core for the activation type.
    """
    violation = next(violations(gemm, device, schedule), None)
    if violation is not None:
        raise ScheduleError(f"pipeline {schedule.pipeline!r} on {device.name}: {violation}")
    device.core_for(gemm.activation, schedule.pipeline)
    return resources(gemm, device, schedule)


def violations(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Iterator[str]:
    """Yield every rule that ``schedule`` breaks."""
    rule = RULES[schedule.pipeline]
    if device.vendor != "nvidia" or rule.feature not in device.features:
        yield f"the device lacks {rule.feature!r}"
    if not serves(gemm, schedule.pipeline):
        yield f"the pipeline does not serve {', '.join(gemm.extras)}"
    for field in ("tile_m", "tile_n", "tile_k", "stages", "warps", "split_k", "persistent"):
        value, allowed = getattr(schedule, field), getattr(rule, field)
        if value not in allowed:
            yield f"{field}={value} is not one of {', '.join(map(str, allowed))}"
    if schedule.placement == "operand" and lane_of(gemm.activation) == 8:
        yield "8-bit operands cannot hold scaled weights; use placement 'accumulator'"
    if promotes(gemm, schedule) and schedule.tile_m > 128:
        yield "tile_m=256 leaves no registers for a second set of accumulators"
    if gemm.activation == "int8" and schedule.tile_m > 128:
        yield "TVM 0.27 knows no integer wgmma of 256 tokens"
    yield from _SHAPE_RULES[schedule.pipeline](gemm, schedule)
    yield from _capacity_violations(gemm, device, schedule)


def _gemv_violations(gemm: Gemm, schedule: GpuSchedule) -> Iterator[str]:
    if schedule.warps not in (schedule.split_k, 2 * schedule.split_k, 4 * schedule.split_k):
        yield f"warps={schedule.warps} is not 1, 2 or 4 for each of {schedule.split_k} slices of K"


def _mma_violations(gemm: Gemm, schedule: GpuSchedule) -> Iterator[str]:
    if schedule.warps * 16 > schedule.tile_n * (schedule.tile_m // 8):
        yield f"tile {schedule.tile_m} x {schedule.tile_n} leaves some of {schedule.warps} warps without work"


def _wgmma_violations(gemm: Gemm, schedule: GpuSchedule) -> Iterator[str]:
    if schedule.tile_n % (16 * schedule.warps):
        yield f"tile_n={schedule.tile_n} is not 64 rows for each of {schedule.warps // 4} warpgroups"
    if schedule.persistent and schedule.split_k > 1:
        yield "persistent kernels do not split K"
    if schedule.split_k > 1 and schedule.tile_m > SPLIT_TOKENS:
        yield f"split_k needs at most {SPLIT_TOKENS} tokens per tile"
    row_bytes = schedule.tile_k * lane_of(gemm.activation) // 8
    if row_bytes not in (SWIZZLE_ROW, 2 * SWIZZLE_ROW, 4 * SWIZZLE_ROW):
        yield f"tile_k={schedule.tile_k} is {row_bytes} bytes of A; use 1, 2 or 4 rows of {SWIZZLE_ROW}"


_SHAPE_RULES: Mapping[str, Callable[[Gemm, GpuSchedule], Iterator[str]]] = {
    "gemv": _gemv_violations,
    "mma": _mma_violations,
    "wgmma": _wgmma_violations,
}


def _capacity_violations(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Iterator[str]:
    """Yield what does not fit in registers or shared memory."""
    threads = block_threads(schedule)
    limit = min(255, device.registers_per_unit // threads // 8 * 8)
    registers, shared = registers_per_thread(gemm, schedule), shared_bytes(gemm, schedule)
    if "ldmatrix" not in device.features:
        registers += QUAD_PAIR_COPIES * schedule.tile_m * schedule.tile_n // threads
    if registers > limit:
        yield f"about {registers} registers per thread, limit {limit}"
    if shared > device.shared_per_block:
        yield f"{shared} bytes of shared memory, limit {device.shared_per_block}"
    if threads > min(1024, device.max_threads_per_unit):
        yield f"{threads} threads per block"


def is_legal(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> bool:
    """Whether `check_legal` accepts the schedule."""
    return next(violations(gemm, device, schedule), None) is None
