"""Which schedules a device can run: extents that `schedules.rules` allows, registers and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

from ladder.ir.gemm import Gemm
from schedules.codes import evenly_spaced, table_bytes, weight_bits
from schedules.footprint import (
    CHUNK_BYTES,
    DEALT_COLUMNS,
    PROMOTED_COLUMNS,
    SPARE_REGISTERS,
    SWIZZLE_ROW,
    WARPGROUPS,
    WAVES,
    X_BUFFER_BYTES,
    X_BUFFERS,
    X_SUMS,
    Resources,
    block_rows,
    block_threads,
    carries,
    digit_columns,
    launch_registers,
    least_x_bytes,
    math_registers,
    operand_bytes,
    promotes,
    registers_per_thread,
    resources,
    shared_bytes,
)
from schedules.group_values import scale_span, shared_value_bytes
from schedules.im2col import CORNERS, MOST_STRIDE, is_reached
from schedules.layouts import TILE, lane_of, packed_group
from schedules.rules import AXES, DEALS, RULES, serves
from schedules.schedule import GpuSchedule
from schedules.waves import (
    GROUPS,
    MOST_REGISTERS,
    MOST_THREADS,
    NARROW,
    STEP_COLUMNS,
    block_lanes,
    column_tiles,
    divisions,
    tile_rows,
)
from targets import TileDevice
from tile_types.errors import ScheduleError

QUAD_PAIR_COPIES = 3
"""Further sets of sums on Volta, whose four quad-pairs each sum a quarter of K (PTX ISA, mma.m8n8k4)."""

UNPACKED_REGISTERS = 56
"""Registers that ``mma`` of fp8 takes besides where ptxas unpacks its operands to float16: up to 55 (compiled
for sm_100a)."""

FEATURES = 8
"""Results that a thread of the mma pipeline stores together."""

MOST_DIGIT_COLUMNS = 32
"""Columns of products, four for an activation row of 16 bits, that a warp of digits holds sums of."""

GATED_ROWS = 32
"""Rows of a warp of a gated product: a fragment of either half."""

LEAST_SLABS = 3
"""Slabs of 128 bytes of K that wgmma's stages hold at least: two that multiply, one fetched ahead."""

FLUSHES: Mapping[str, str] = {"float16": "flushes.float16"}
"""Feature of devices whose cores take subnormal operands of a type for 0, where scaled weights have some."""


_ALLOWED: Mapping[str, Sequence[tuple[str, Sequence[object]]]] = {
    pipeline: [(field, getattr(rule, field)) for field in AXES if getattr(rule, field)]
    for pipeline, rule in RULES.items()
}
"""Pipeline -> the fields whose values its rule limits."""


def placement_for(gemm: Gemm) -> str:
    """Return where scales apply: on the decoded operand of 16-bit cores, on the accumulator of 8-bit ones.

    An 8-bit operand cannot hold the product of a value and a scale; a 16-bit one can, and
    scaling it costs one multiply per register instead of one per accumulator and group.
    """
    return "operand" if lane_of(gemm.activation) == 16 else "accumulator"


def _register_limit(device: TileDevice, schedule: GpuSchedule) -> int:
    """Return the most registers of a computing thread."""
    if schedule.pipeline == "wgmma":
        return math_registers(schedule.warps)
    if schedule.pipeline == "digits":
        return launch_registers(schedule.warps)
    if schedule.pipeline in WAVES:
        return min(MOST_REGISTERS, device.registers_per_unit // block_threads(schedule))
    spare = SPARE_REGISTERS if schedule.pipeline == "gemv" else 0
    return min(255, device.registers_per_unit // block_threads(schedule) // 8 * 8 + spare)


def check_legal(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Resources:
    """Check that ``device`` can run ``schedule`` for ``gemm``.

    Returns Resources: What one block takes.
    Raises ScheduleError: Naming the first rule that is broken.
    Raises ConversionError if the device has no core for the activation type.
    """
    violation = next(violations(gemm, device, schedule), None)
    if violation is not None:
        raise ScheduleError(f"pipeline {schedule.pipeline!r} on {device.name}: {violation}")
    device.core_for(gemm.activation, schedule.pipeline)
    return resources(gemm, device, schedule)


def violations(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Iterator[str]:
    """Yield every rule that ``schedule`` breaks."""
    yield from _pipeline_violations(gemm, device, schedule.pipeline)
    if schedule.cluster > 1 and "cluster" not in device.features:
        yield "the device has no clusters of blocks"
    for field, allowed in _ALLOWED[schedule.pipeline]:
        if (value := getattr(schedule, field)) not in allowed:
            yield f"{field}={value} is not one of {', '.join(map(str, allowed))}"
    if schedule.tails and not schedule.stream_k:
        yield "tails are cut by stream_k"
    yield from _placement_violations(gemm, device, schedule)
    parts = schedule.pipeline == "wgmma" and not gemm.token_group  # whose factors take registers too
    if promotes(gemm, schedule) and schedule.tile_m > PROMOTED_COLUMNS and not parts:
        yield f"tile_m={schedule.tile_m} leaves no registers for a second set of accumulators"
    yield from _window_violations(gemm, schedule)
    yield from _gate_violations(gemm, schedule)
    yield from _deal_violations(gemm, schedule)
    yield from _SHAPE_RULES[schedule.pipeline](gemm, schedule)
    yield from _capacity_violations(gemm, device, schedule)


@lru_cache(maxsize=256)
def _pipeline_violations(gemm: Gemm, device: TileDevice, pipeline: str) -> tuple[str, ...]:
    """Return the rules that every schedule of a pipeline breaks."""
    found, feature = [], RULES[pipeline].feature
    if feature not in device.features:
        found.append(f"the device lacks {feature!r}")
    if not serves(gemm, pipeline):
        found.append(f"the pipeline does not serve {', '.join(gemm.extras)}")
    if gemm.stored and "ldmatrix" not in device.features:
        found.append("the device lacks 'ldmatrix', by which operands come from matrices that are not packed")
    cores = [core.pipelines for core in device.cores if core.a == gemm.activation]
    if cores and not any(pipeline in pipelines for pipelines in cores):
        others = ", ".join(dict.fromkeys(name for pipelines in cores for name in pipelines))
        found.append(f"no core multiplies {gemm.activation} in this pipeline; use {others}")
    return tuple(found)


def _gate_violations(gemm: Gemm, schedule: GpuSchedule) -> Iterator[str]:
    if gemm.gate and schedule.warp_rows != GATED_ROWS:
        yield f"a warp of a gated product has {GATED_ROWS} rows, got warp_rows={schedule.warp_rows}"


def _placement_violations(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Iterator[str]:
    plain = not gemm.scale and gemm.weight == gemm.activation  # nothing is decoded: no choice to be made
    if (plain or not RULES[schedule.pipeline].placement) and schedule.placement != placement_for(gemm):
        yield f"scales of {gemm.activation} cores apply on the {placement_for(gemm)}: placement is that"
    if schedule.placement == "operand" and lane_of(gemm.activation) == 8:
        yield "8-bit operands cannot hold scaled weights; use placement 'accumulator'"
    small = (schedule.placement == "operand" and gemm.scale) or schedule.pipeline == GROUPS
    if small and FLUSHES.get(gemm.activation, "") in device.features:
        yield "the core takes subnormal operands for 0; use placement 'accumulator', not of 'mfma_groups'"


def _window_violations(gemm: Gemm, schedule: GpuSchedule) -> Iterator[str]:
    if gemm.windows is None:
        return
    # A tensor copy's 128 bytes, or a chunk of 16, belong to one tap.
    piece = SWIZZLE_ROW if schedule.pipeline in WARPGROUPS else CHUNK_BYTES
    if gemm.channels * operand_bytes(gemm) % piece:
        yield f"{gemm.channels} channels of a tap are no multiple of {piece} bytes"
    if schedule.pipeline in WARPGROUPS and not is_reached(gemm.windows):
        yield f"tensor copies reach windows {MOST_STRIDE} pixels apart and corners in {CORNERS}: use mma"
    if gemm.windows.features and (schedule.pipeline != "mma" or gemm.windows.features % FEATURES):
        yield f"groups of {gemm.windows.features} features and rows behind them: mma has them, by {FEATURES}"
    if cuts_groups(gemm, schedule):
        rows = f"{block_rows(schedule)} rows" + f" by {schedule.cluster} blocks" * (schedule.cluster > 1)
        yield f"{rows} does not divide the rows of one of {gemm.windows.groups} groups"


def cuts_groups(gemm: Gemm, schedule: GpuSchedule) -> bool:
    """Whether a block, or blocks that share x, would hold weights of two groups of channels.

    Never where N is not known (1).
    """
    groups = gemm.windows.groups if gemm.windows else 1
    rows = groups * block_rows(schedule) * schedule.cluster
    return groups > 1 and gemm.n > 1 and (not rows or gemm.n % rows > 0)


def _gemv_violations(gemm: Gemm, schedule: GpuSchedule) -> Iterator[str]:
    if schedule.cluster > 1 and gemm.experts:
        yield "experts give enough blocks without clusters"
    if schedule.warps % schedule.split_k:
        yield f"warps={schedule.warps} are not as many for each of {schedule.split_k} slices of K"
    shared = schedule.placement == "accumulator" and schedule.cluster > 1
    sums = 4 * X_BUFFERS * X_SUMS if shared else 0
    taken = table_bytes(gemm) + shared_value_bytes(gemm, schedule) + sums + least_x_bytes(gemm, schedule)
    if taken > X_BUFFER_BYTES:
        yield f"buffers of A and tables of {taken} bytes, limit {X_BUFFER_BYTES}"


def _digits_violations(gemm: Gemm, schedule: GpuSchedule) -> Iterator[str]:
    wide, bits = lane_of(gemm.activation) == 16, weight_bits(gemm)
    if schedule.warps % schedule.split_k:
        yield f"warps={schedule.warps} are not as many for each of {schedule.split_k} slices of K"
    if gemm.activation.startswith("fp8"):
        yield f"{gemm.activation} is not split into digits"
    if bits not in ((1, 2, 4) if wide else (2, 4)) or not evenly_spaced(gemm.weight):
        yield f"codes of {gemm.weight} cannot be multiplied where they are"
    if gemm.zero != "none":
        yield "it subtracts no zero points"
    if gemm.scale and packed_group(gemm.group_size, gemm.k) < 64:
        yield f"groups of {gemm.group_size} are shorter than a tile"
    if digit_columns(gemm, schedule) > MOST_DIGIT_COLUMNS:
        yield f"{schedule.tile_m} activation rows need more than {MOST_DIGIT_COLUMNS} columns"


def _mma_violations(gemm: Gemm, schedule: GpuSchedule) -> Iterator[str]:
    if schedule.warps * 16 > schedule.tile_n * (schedule.tile_m // 8):
        yield f"tile {schedule.tile_m} x {schedule.tile_n} leaves some of {schedule.warps} warps without work"


def _wave_violations(gemm: Gemm, schedule: GpuSchedule) -> Iterator[str]:
    if (
        schedule.pipeline in NARROW
        and schedule.warp_rows > 16
        and (schedule.tile_n > 64 or schedule.tile_m > 32)
    ):
        yield "narrow blocks are for few activation rows: with warp_rows=32, tile_n=64 and tile_m up to 32"
    if schedule.pipeline in NARROW and schedule.warp_rows > 16 and tile_rows(schedule) == schedule.tile_n:
        yield f"warp_rows={schedule.warp_rows} makes the {schedule.tile_n} rows that a block has with 16"
    if block_lanes(schedule) > MOST_THREADS:
        yield f"TVM marks AMD kernels as having at most {MOST_THREADS} threads, got {block_lanes(schedule)}"
    if not divisions(schedule):
        yield (
            f"{schedule.warps} waves, {schedule.split_k} slices of K, do not divide a tile of"
            f" {schedule.tile_m} x {tile_rows(schedule)}"
        )


def _group_violations(gemm: Gemm, schedule: GpuSchedule) -> Iterator[str]:
    """Yield what the columns of a matrix instruction cannot have as groups of K."""
    yield from _wave_violations(gemm, schedule)
    groups = schedule.tile_k // TILE // column_tiles(gemm, schedule)
    if 2 * groups > STEP_COLUMNS:
        yield f"two stages have {2 * groups} groups of K, more than {STEP_COLUMNS} columns"
    if gemm.zero != "none":
        yield "it subtracts no zero points"
    if gemm.scale and gemm.group_size < gemm.k and packed_group(gemm.group_size, gemm.k) < TILE:
        yield f"groups of {gemm.group_size} are shorter than a tile"


def _warpgroup_violations(gemm: Gemm, schedule: GpuSchedule) -> Iterator[str]:
    """Yield what both pipelines of warpgroups refuse."""
    yield from grid_violations(gemm, schedule)
    if schedule.tile_m % (schedule.cluster * 8):
        yield f"{schedule.cluster} blocks cannot share {schedule.tile_m} activation rows eight at a time"
    row_bytes = schedule.tile_k * operand_bytes(gemm)
    if row_bytes not in (SWIZZLE_ROW, 2 * SWIZZLE_ROW, 4 * SWIZZLE_ROW):
        yield f"tile_k={schedule.tile_k} is {row_bytes} bytes of A; use 1, 2 or 4 rows of {SWIZZLE_ROW}"


def least_stages(gemm: Gemm, tile_k: int) -> int:
    """Return the least stages of a wgmma kernel."""
    return -(-LEAST_SLABS * SWIZZLE_ROW // (tile_k * operand_bytes(gemm)))


def _wgmma_violations(gemm: Gemm, schedule: GpuSchedule) -> Iterator[str]:
    yield from _warpgroup_violations(gemm, schedule)
    if schedule.tile_n % (16 * schedule.warps):
        yield f"tile_n={schedule.tile_n} is not 64 rows for each of {schedule.warps // 4} warpgroups"
    least = least_stages(gemm, schedule.tile_k)
    if schedule.stages < least:
        yield (
            f"{schedule.stages} stages of {schedule.tile_k} hold no slab that is fetched ahead: the kernel"
            f" would wait for ever; use at least {least} stages"
        )
    if schedule.tile_m & (schedule.tile_m - 1) and gemm.activation == "int8":  # products of fewer sizes
        yield f"sums of {gemm.activation} take a power of two of activation rows, not {schedule.tile_m}"
    if carries(gemm, schedule) and schedule.tile_k * operand_bytes(gemm) != SWIZZLE_ROW:
        yield f"tiles of {schedule.tile_m} activation rows of fp8 take K in stages of 128"


def _deal_violations(gemm: Gemm, schedule: GpuSchedule) -> Iterator[str]:
    if schedule.deal == 1:
        return
    if schedule.pipeline != "wgmma" or lane_of(gemm.activation) == 8:
        yield "only wgmma of 16-bit operands deals K"
    if schedule.deal not in DEALS:
        yield f"K is dealt to {', '.join(map(str, DEALS))} slices, not to {schedule.deal}"
    if gemm.experts or gemm.windows:
        yield "K is dealt of plain rows of x"
    if schedule.deal % schedule.split_k:
        yield f"{schedule.split_k} blocks do not share {schedule.deal} slices evenly"
    if schedule.tile_k > DEALT_COLUMNS and scale_span(gemm) > DEALT_COLUMNS:
        yield f"runs of {DEALT_COLUMNS} columns share no scales: a stage holds one, not {schedule.tile_k}"
    if schedule.stream_k:
        yield "stream_k cuts K elsewhere"


PAIR_COLUMNS = 32
"""Granularity of the columns of a product of two blocks (PTX ISA, "tcgen05.mma", "Matrix shape")."""


def _tcgen05_violations(gemm: Gemm, schedule: GpuSchedule) -> Iterator[str]:
    yield from _warpgroup_violations(gemm, schedule)
    if schedule.pair and (schedule.cluster != 2 or schedule.tile_m % PAIR_COLUMNS):
        yield f"a pair is a cluster of two, with tiles of a multiple of {PAIR_COLUMNS} activation rows"
    if lane_of(gemm.activation) == 8 and (gemm.scale or gemm.zero != "none"):
        yield f"scales and zero points within K cannot meet sums of {gemm.activation} before they end"


def grid_violations(gemm: Gemm, schedule: GpuSchedule) -> Iterator[str]:
    """Yield what pipelines of warpgroups refuse of how blocks share tiles, whatever these are."""
    if schedule.persistent and schedule.split_k > 1:
        yield "persistent kernels do not split K"
    if gemm.experts and (schedule.stream_k or schedule.cluster * schedule.split_k > 1):
        yield "tiles of one expert each are neither cut along K nor shared by clusters"
    if schedule.persistent and schedule.cluster > 2:
        yield "clusters of more than two blocks may not all fit at once, so persistent ones cannot have them"
    if schedule.stream_k and (not schedule.persistent or schedule.cluster > 1):
        yield "stream_k shares the tiles of a persistent grid without clusters"
    if schedule.stream_k and lane_of(gemm.activation) == 8 and not promotes(gemm, schedule):
        yield "stream_k adds float32 sums; those of int8 without groups are integers"
    if schedule.cluster * schedule.split_k > 8:
        yield f"{schedule.cluster} x {schedule.split_k} blocks exceed the portable cluster size of 8"


_SHAPE_RULES: Mapping[str, Callable[[Gemm, GpuSchedule], Iterator[str]]] = {
    "gemv": _gemv_violations,
    "digits": _digits_violations,
    "mma": _mma_violations,
    "wgmma": _wgmma_violations,
    "tcgen05": _tcgen05_violations,
    "mfma": _wave_violations,
    "mfma_groups": _group_violations,
    "dot": _wave_violations,
    "wmma": _wave_violations,
    "wmma_split": _wave_violations,
    "dot32": _wave_violations,
}


def _capacity_violations(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Iterator[str]:
    """Yield what does not fit in registers or shared memory."""
    threads = block_threads(schedule)
    limit = _register_limit(device, schedule)
    registers, shared = registers_per_thread(gemm, schedule), shared_bytes(gemm, schedule)
    if device.vendor == "nvidia" and "ldmatrix" not in device.features:
        registers += QUAD_PAIR_COPIES * schedule.tile_m * schedule.tile_n // threads
    if schedule.pipeline == "mma" and gemm.activation.startswith("fp8") and "tma" in device.features:
        registers += UNPACKED_REGISTERS
    if registers > limit:
        yield f"about {registers} registers per thread, limit {limit}"
    if shared > device.shared_per_block:
        yield f"{shared} bytes of shared memory, limit {device.shared_per_block}"
    if threads > min(1024, device.max_threads_per_unit):
        yield f"{threads} threads per block"


def is_legal(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> bool:
    """Whether `check_legal` accepts the schedule."""
    return next(violations(gemm, device, schedule), None) is None
