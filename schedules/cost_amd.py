"""Predicted time of one GEMM on an AMD GPU: the kernels of `ladder.lower.rocm`, by counting clocks.

Nothing here was measured: no AMD GPU was at hand. What is assumed, and from where:

* Matrix cores, vector units, LDS and the path to L1 of a compute unit work side by side as far as
  other waves have work: their clocks join by a norm (``OVERLAP`` of `schedules.cost_constants`, the H200's
  kernels, in which other warps fill in as well). A lone wave per SIMD overlaps what its own
  instructions allow: there the exponent is that of the H200's ``wgmma`` kernels, which decode beside
  running products, 2.
* A matrix instruction takes the passes that the CDNA3 ISA states (table 28 and section 7.1), which is
  the peak rate of `targets`; a vector instruction takes four clocks of a SIMD with sixteen lanes
  (CDNA3 ISA, section 1.1): 64 lanes per clock and unit.
* RDNA's units have two SIMDs of 32 lanes, which issue a vector instruction of a wave each clock (RDNA3 ISA,
  section 1.1; pairs of instructions are not counted on). Its matrix instructions have the rates of the
  datasheets. Its last cache, between L2 and memory, is not modelled: weights come from memory.
* LDS delivers 128 bytes per clock and unit, L1 64 (CDNA3 whitepaper).
* Loads are asked for one stage ahead, so a stage takes at least the latency of memory, unless the
  blocks that share a unit take turns.
* Dies have an L2 each and read what their blocks need through the fabric, whose cache holds the rest;
  the blocks that run at once on a die are ``raster`` row tiles by as many tiles along M as it takes.
* DRAM sustains the share that `targets` states: published measurements of kernels that only read.
* Power lowers the clock as far as matrix cores are busy, of the time of the whole kernel: to the sustained
  share of `targets` where they always are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ladder.ir.gemm import Gemm
from schedules.codes import (
    CONVERT_OPERATIONS,
    EXPONENT_OPERATIONS,
    evenly_spaced,
    held_type,
    looked_up,
    order_read,
    weight_bits,
)
from schedules.cost import Cost, convert_ops, decode_ops, minimum_bytes, weight_bytes
from schedules.footprint import operand_bytes, promotes
from schedules.group_values import streams_exponents
from schedules.layouts import TILE, lane_of, packed_group, padded
from schedules.schedule import GpuSchedule
from schedules.waves import (
    GROUPS,
    STEP_COLUMNS,
    WAVE,
    column_tiles,
    division,
    form,
    is_dot,
    leaves_offsets,
    tile_rows,
)
from targets import Core, TileDevice

OVERLAP, LONE_OVERLAP = 4.2, 2.0
"""Exponents that join the units of one compute unit: with several waves per SIMD, and with one."""

VECTOR_LANES = 64
"""Lanes of a compute unit that issue in a clock: those of four SIMDs of 16, or of RDNA's two of 32."""

LDS_BYTES, L1_BYTES = 128, 64
"""Bytes per clock of a compute unit."""

CLOCK_STEPS = 4
"""Steps in which a clock and the share of time that it leaves matrix cores busy are found together."""

LAUNCH_SECONDS = 1.2e-6
"""A kernel in a graph, start to start, less the start of its first block (`BLOCK_CLOCKS`).

An MI210 takes 2.05 us from start to start of kernels that load and store 16 bytes per thread, alone or in a
graph (RRZE-HPC's gpu-benches, commit 1038c5d, gpu-small-kernels; for MI300 nothing is published there).
"""

BLOCK_CLOCKS = 1500
"""Starting a block: its arguments, first addresses, and the latency of its first stage."""

BARRIER_CLOCKS = 60
"""Waves of a block waiting for each other, per stage."""

COPY_OPERATIONS = 8
"""Vector operations per 16 bytes of x: addresses, bounds, exchange of words on the way to LDS."""

SUM_OPERATIONS = 12
"""Vector operations per 16 bytes of x by which the sums of groups of x reach LDS (counted)."""

STEP_OPERATIONS = 12
"""Vector operations per wave and packed 32 x 64 tile besides decoding: addresses, moves, loop."""

DOT_STEP_OPERATIONS = 7
"""The same of dot products (counted in machine code: int4 and nf4 on gfx942 and gfx950, one row)."""

FLIP_OPERATIONS, BASE_OPERATIONS = 0.125, 0.5
"""Vector instructions per weight that `decode_ops` counts for flipping top bits, which raw numbers take with
their mask, and that CDNA takes besides where it lacks V_BITOP3: a mask and a base are two constants, of which
its instructions read one (counted: int4 and uint4 on gfx942 and gfx950)."""

GROUP_STEP_OPERATIONS = 3
"""The same where columns of matrix instructions are groups of K (counted: int4 on gfx950)."""

GROUP_STAGE_OPERATIONS, KNOWN_GROUP_OPERATIONS = 60, 17
"""And of a stage of a wave: which column takes part is computed, or known if two stages fill all columns."""

BFLOAT_DECODE = 2.4
"""bfloat16 operands are made of float32 values: vector instructions in place of one of float16.

Counted (`ladder.lower.rocm.decode`): int1 to int8 take 2.3 to 2.9 times those of float16.
"""

TABLE_OPERATIONS: Mapping[int, float] = {3: 2.3, 4: 3.5, 5: 6.7, 6: 11.4, 7: 20.3, 8: 35.8}
"""Bits of a type of any values -> vector instructions a weight (`ladder.lower.rocm.decode`, counted)."""

BFLOAT_RAW = 1.4
"""The same of raw operands, whose offset is left to the sums (counted: 0.9 to 2.1)."""

BFLOAT_SCALE = 5.0
"""Vector instructions by which a scale multiplies a bfloat16 operand: widened, multiplied, rounded."""

FABRIC_BYTES = 17.2e12
"""Bytes per second that the dies of an MI300 read from the fabric's cache (CDNA3 whitepaper)."""

X_SUMS = 1.5
"""Dot products where x is summed, too: once for the two weight rows of a lane."""

DOT_LANES = 2.0
"""Products of 16-bit operands per lane and dot instruction; those of 8 bits are four."""


@dataclass(frozen=True)
class Stage:
    """Clocks of a compute unit that one stage of one block takes from each of its parts."""

    matrix: float
    vector: float
    lds: float
    l1: float

    def joined(self, blocks: float, exponent: float) -> float:
        """Return the clocks of ``blocks`` stages that run side by side."""
        return joined((blocks * part for part in (self.matrix, self.vector, self.lds, self.l1)), exponent)


def joined(parts: Iterable[float], exponent: float) -> float:
    """Return the time of parts that overlap as far as an exponent says."""
    return float(sum(part**exponent for part in parts) ** (1 / exponent))


def predict_amd(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, m: int, resident: int) -> Cost:
    """Predict the time of one call.

    gemm, device, schedule: What runs where and how.
    m: Rows of x; those of each expert, if there are any.
    resident: Blocks that fit on a compute unit at once.
    """
    gemm = _all_experts(gemm)
    stage = stage_clocks(gemm, device, schedule)
    along_m, along_n = -(-m // schedule.tile_m), -(-gemm.n // tile_rows(schedule))
    rounds = -(-along_m * along_n // device.units)
    stages = stages_of(gemm, schedule)
    clocks, waiting = block_clocks(device, stage, stages, rounds, resident, schedule.warps)
    core = device.core_for(gemm.activation, schedule.pipeline)
    dram = _dram_seconds(gemm, device, schedule, m, min(resident, rounds))
    l2 = _l2_seconds(gemm, device, along_m, along_n, m)
    fabric = _fabric_seconds(gemm, device, schedule, along_m, along_n, min(resident, rounds))
    others = (dram, l2, fabric)
    clock = lowered_clock(device, core, stages * rounds * stage.matrix, clocks, others)
    seconds = LAUNCH_SECONDS + joined((clocks / clock, *others), OVERLAP)
    count = stages * rounds / clock
    parts = {
        "launch": LAUNCH_SECONDS,
        "latency": waiting / clock,
        "dram": dram,
        "l2": l2,
        "fabric": fabric,
        "core": count * stage.matrix,
        "decode": count * stage.vector,
        "lds": count * stage.lds,
        "l1": count * stage.l1,
    }
    return Cost(seconds, tuple(parts), tuple(parts.values()), minimum_bytes(gemm, m), 2 * m * gemm.n * gemm.k)


def _all_experts(gemm: Gemm) -> Gemm:
    """Return the product of as many weight rows as all experts have: as many blocks and bytes."""
    return replace(gemm, n=gemm.n * gemm.experts, experts=0, masked=False, slots=0) if gemm.experts else gemm


def lowered_clock(
    device: TileDevice, core: Core, matrix: float, clocks: float, others: tuple[float, ...]
) -> float:
    """Return the clock of a kernel whose matrix cores are busy for a share of its time.

    matrix, clocks: Clocks of the busiest compute unit, in which matrix cores work and in all.
    others: Seconds of what does not run by this clock.
    """
    clock = device.clock
    for _ in range(CLOCK_STEPS):
        busy = matrix / clock / joined((clocks / clock, *others), OVERLAP)
        clock = device.clock * (1 - (1 - core.sustained) * busy)
    return clock


def stages_of(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the stages of K of one block."""
    return -(-padded(gemm.k) // (schedule.tile_k * schedule.split_k))


def stage_clocks(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Stage:
    """Return what one stage of one block takes from the parts of its compute unit."""
    waves = division(schedule)
    tokens, rows = schedule.tile_m, tile_rows(schedule)
    span = schedule.tile_k * schedule.split_k
    bytes_of_x = tokens * span * operand_bytes(gemm)
    weights = rows * span * waves.m_waves * form(schedule).copies
    operands = weight_bits(gemm) == lane_of(gemm.activation)  # as they lie in memory
    operations = 0.0 if operands else weights * wave_decode_ops(gemm, device, schedule) / VECTOR_LANES
    copied = COPY_OPERATIONS + (SUM_OPERATIONS if schedule.pipeline == GROUPS else 0)
    operations += _step_operations(gemm, schedule, weights) + copied * bytes_of_x / 16 / VECTOR_LANES
    if promotes(gemm, schedule):
        groups = max(1.0, span / packed_group(gemm.group_size, gemm.k)) if gemm.scale else 1.0
        operations += groups * 2 * tokens * rows / VECTOR_LANES
    core = device.core_for(gemm.activation, schedule.pipeline)
    products = 2.0 * tokens * rows * span
    matrix = products / core.ops_per_cycle
    if schedule.pipeline == GROUPS:
        matrix *= STEP_COLUMNS
    if is_dot(schedule):
        lanes = DOT_LANES * 2 / operand_bytes(gemm)
        summed = X_SUMS if _sums_x(gemm, schedule) else 1.0
        operations, matrix = operations + summed * products / 2 / lanes / VECTOR_LANES, 0.0
    lds = (waves.row_waves + 1) * bytes_of_x / LDS_BYTES
    l1 = (weights * weight_bits(gemm) / 8 + bytes_of_x) / L1_BYTES
    # A SIMD issues for its own waves only: fewer waves than SIMDs leave some idle.
    idle = max(1.0, device.schedulers / schedule.warps)
    return Stage(matrix * idle, operations * idle, lds, l1)


def _step_operations(gemm: Gemm, schedule: GpuSchedule, weights: int) -> float:
    """Return the vector operations of a stage's addresses, moves and loop."""
    tiles = weights / (32 * 64)
    if schedule.pipeline == GROUPS:
        known = 2 * schedule.tile_k == STEP_COLUMNS * TILE * column_tiles(gemm, schedule)
        each = KNOWN_GROUP_OPERATIONS if known else GROUP_STAGE_OPERATIONS
        return GROUP_STEP_OPERATIONS * tiles + each * schedule.warps
    return tiles * (DOT_STEP_OPERATIONS if is_dot(schedule) else STEP_OPERATIONS)


def wave_decode_ops(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> float:
    """Return the vector instructions that a weight takes a lane until it is an operand."""
    if order_read(held_type(gemm.weight), gemm.activation, device):
        return CONVERT_OPERATIONS + _scale_operations(gemm, schedule)
    if looked_up(gemm.weight, gemm.activation) and lane_of(gemm.activation) == 16:
        multiplied = [gemm.scale and schedule.placement == "operand", gemm.zero != "none"]
        each = BFLOAT_SCALE if gemm.activation == "bfloat16" else 0.5
        return TABLE_OPERATIONS[weight_bits(gemm)] + each * sum(multiplied)
    if gemm.activation != "bfloat16":
        raw = convert_ops(gemm.weight) / DOT_LANES + FLIP_OPERATIONS if _sums_x(gemm, schedule) else 0.0
        return decode_ops(gemm, schedule.placement) - raw + _base_operations(gemm, device)
    operations = decode_ops(gemm, "accumulator")
    if _sums_x(gemm, schedule):
        return operations * BFLOAT_RAW
    scaled = BFLOAT_SCALE if gemm.scale and schedule.placement == "operand" else 0.0
    return operations * BFLOAT_DECODE + scaled


def _base_operations(gemm: Gemm, device: TileDevice) -> float:
    """Return `BASE_OPERATIONS` where a device takes them for float16 operands."""
    apart = device.warp == WAVE and "bitop3" not in device.features and gemm.activation == "float16"
    return BASE_OPERATIONS * (apart and evenly_spaced(gemm.weight))


def _sums_x(gemm: Gemm, schedule: GpuSchedule) -> bool:
    """Tell whether raw operands have an offset, which takes sums of x."""
    return leaves_offsets(gemm, schedule) and weight_bits(gemm) < 8 and evenly_spaced(gemm.weight)


def _scale_operations(gemm: Gemm, schedule: GpuSchedule) -> float:
    """Return the instructions by which scales multiply a converted operand: exponents go into conversions."""
    if not gemm.scale or schedule.placement != "operand":
        return 0.0
    if streams_exponents(gemm):
        return EXPONENT_OPERATIONS
    return BFLOAT_SCALE if gemm.activation == "bfloat16" else 0.5


def block_clocks(
    device: TileDevice, stage: Stage, count: int, rounds: int, resident: int, waves: int
) -> tuple[float, float]:
    """Return the clocks of a compute unit, and those of them in which it waits for memory.

    rounds, resident: Blocks that it takes, and how many of them fit at once.
    count, waves: Stages and waves of a block.
    """
    latency = device.layer("dram").latency * device.clock
    clocks, waiting, fitting = 0.0, 0.0, max(1, resident)
    for turns, here in ((rounds // fitting, fitting), (1, rounds % fitting)):
        if turns and here:
            exponent = OVERLAP if here * waves >= 2 * device.schedulers else LONE_OVERLAP
            busy = stage.joined(here, exponent) + BARRIER_CLOCKS
            # Asked for when the stage before began: the latency shows where a stage is shorter.
            clocks += turns * (BLOCK_CLOCKS + count * max(busy, latency))
            waiting += turns * count * max(0.0, latency - busy)
    return clocks, waiting


def _dram_seconds(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, m: int, resident: int) -> float:
    """Return the time of streaming once, limited by the bytes that the resident blocks keep in flight."""
    dram = device.layer("dram")
    span = schedule.tile_k * schedule.split_k
    stage = tile_rows(schedule) * span * weight_bits(gemm) / 8
    stage += schedule.tile_m * span * operand_bytes(gemm)
    in_flight = device.units * max(1, resident) * stage / dram.latency
    return minimum_bytes(gemm, m) / min(dram.sustained_bandwidth, in_flight)


def _l2_seconds(gemm: Gemm, device: TileDevice, along_m: int, along_n: int, m: int) -> float:
    """Return the time in which every block reads its tiles through L2."""
    l2 = device.layer("l2")
    moved = along_m * weight_bytes(gemm) + along_n * m * gemm.k * operand_bytes(gemm)
    return moved / l2.sustained_bandwidth


def _fabric_seconds(
    gemm: Gemm, device: TileDevice, schedule: GpuSchedule, along_m: int, along_n: int, resident: int
) -> float:
    """Return the time in which every die reads the tiles of its blocks, those of a wave of blocks once."""
    if device.dies == 1:
        return 0.0
    wave = max(1, device.units * max(1, resident) // device.dies)
    rows = min(schedule.raster, along_n)
    columns = min(along_m, -(-wave // rows))
    row_bytes = tile_rows(schedule) * gemm.k * weight_bits(gemm) / 8
    column_bytes = schedule.tile_m * gemm.k * operand_bytes(gemm)
    waves = along_m * along_n / (rows * columns)
    return waves * (rows * row_bytes + columns * column_bytes) / FABRIC_BYTES
