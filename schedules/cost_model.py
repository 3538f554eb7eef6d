"""Predicted time of one GEMM under one schedule, and what bounds it.

A block streams stages of K: they are loaded, decoded and multiplied; the blocks of one
multiprocessor share its issue slots and tensor cores; all share DRAM and L2. What is assumed:

* a call is one of many in a CUDA graph whose weights come from DRAM, and starts early behind the
  one before it (programmatic dependent launch): start-up costs are those that this leaves;
* DRAM and L2 deliver the share of their bandwidth that `targets` states as sustained; the clock is
  the one that `targets` states, although long runs of large products lower it;
* DRAM, L2 and the busiest multiprocessor overlap, up to a norm (``OVERLAP``);
* a stage's buffer is asked for again when it has been used (`Work.together`).

The constants were fitted by `benchmarks.fit_cost_model`, which names the runs; `schedules.cost_constants` has
those of ``wgmma`` that decodes and of plain fp8, `schedules.cost_streams` those of ``gemv`` and ``digits``.
Samples lie in ``tests/unit``.
``tcgen05`` is predicted by the same constants with the rates of its device: nothing of it was measured.
They describe the generated kernels: refit them when an emitter changes. The ``mma`` part is a roofline that
was not fitted (`schedules.cost_grid`). The model ranks candidates where nothing was measured;
`schedules.estimate` corrects it by what was.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import log2
from typing import NamedTuple

from ladder.ir.gemm import Gemm
from schedules.codes import decodes_to_floats, is_timed_by_sixteens, takes_sixteens, weight_bits
from schedules.cost import Cost, Traffic, decode_ops, predict_cpu, traffic_of
from schedules.cost_amd import predict_amd
from schedules.cost_constants import DECODED, DENSE, FP8, TO_FP8, WGMMA
from schedules.cost_grid import Grid, Launch, Work, grid_of, launch_of, moved_bytes, predict_mma
from schedules.cost_streams import digits_work, gemv_loss, gemv_work, streaming
from schedules.footprint import (
    FP8_INTERVAL,
    PROMOTED_COLUMNS,
    SLICED,
    SWIZZLE_ROW,
    WARPGROUPS,
    carries,
    math_registers,
    of_any_n,
    operand_bytes,
    promoted_columns,
    promotes,
    promotes_rarely,
    registers_per_thread,
    resources,
    slices_in_turn,
    stage_bytes,
)
from schedules.layouts import lane_of, packed_group, padded
from schedules.schedule import GpuSchedule, Schedule, TransformList
from schedules.shares import most_parts
from targets import TileDevice
from tile_types.errors import ScheduleError

RESTART_CYCLES = 600
"""wgmma: between slices of K that a block sums apart: last products, additions, first decoding (a guess)."""

TIGHT_REGISTERS = 8
"""wgmma: how near the limit an estimate of registers costs ``TIGHT_LOSS``."""

HALF_RATE_COLUMNS = 32
"""Below this many activation rows a wgmma takes as long as with this many."""

CLUSTER_WAIT, NEARLY_FULL = 0.1, 0.88
"""wgmma: where clusters of more than two blocks take up more than this part of all places at once, some wait
for the launch before: the share by which all take longer for each further block of a multiprocessor.
"""

FITTED_PEAK = 989e12
"""Operations per second of the H200's 16-bit cores, for which ``FLOP_SECONDS`` was fitted."""


def predict(gemm: Gemm, device: TileDevice, schedule: Schedule, m: int) -> Cost:
    """Predict the time of one call.

    gemm, device, schedule: What runs where and how.
    m: Rows of A.
    Raises ScheduleError if the schedule is of a kind that this device does not run.
    """
    if isinstance(schedule, GpuSchedule) and device.is_gpu:
        return _predict_gpu(gemm, device, schedule, m)
    if isinstance(schedule, TransformList) and not device.is_gpu:
        return predict_cpu(gemm, device, schedule, m)
    raise ScheduleError(f"{type(schedule).__name__} does not run on {device.name}")


@lru_cache(maxsize=256)
def _constants(gemm: Gemm) -> Mapping[str, float]:
    """Return the constants of wgmma for a problem."""
    if lane_of(gemm.activation) == 16:
        own = DECODED if decodes_to_floats(gemm) else DENSE
    elif is_timed_by_sixteens(gemm):
        own = TO_FP8
    else:
        own = FP8 if takes_sixteens(gemm) else {}
    return {**WGMMA, **own}


def forget() -> None:
    """Drop what was computed with constants that have changed since."""
    for kept in (_constants, _terms, _known, is_tight):
        kept.cache_clear()


PARTS = ("launch", "dram", "l2", "latency", "decode", "core")
"""Parts of the model's time on an NVIDIA GPU, but for those of ``mma``."""


def _predict_gpu(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, m: int) -> Cost:
    if device.vendor == "amd":
        return predict_amd(gemm, device, schedule, m, resources(gemm, device, schedule).blocks_per_unit)
    launches, loads = _known(gemm, device)
    found = launches.get(schedule)
    if found is None:
        terms = _terms(of_any_n(gemm), device, schedule)
        found = launches[schedule] = launch_of(gemm, device, schedule), terms
    launch, terms = found
    grid = grid_of(launch, schedule.tile_m, m, terms.crowded)
    traffic = loads.get(m)
    if traffic is None:
        traffic = loads[m] = traffic_of(gemm, m)
    moved = moved_bytes(device, schedule, traffic, grid, terms.constants["L2_KEPT"])
    dram = _dram_seconds(terms, device, schedule, moved, grid)
    l2 = _l2_seconds(device, schedule, traffic, grid)
    if schedule.pipeline == "mma":
        memory = {"dram": dram, "l2": l2, "launch": WGMMA["LAUNCH_SECONDS"]}
        return predict_mma(gemm, device, schedule, m, grid, memory)
    overlap, l2 = terms.overlap, l2 / terms.l2_share
    work = terms.work.with_rows(min(m, schedule.tile_m)) if schedule.pipeline in SLICED else terms.work
    units = _unit_seconds(terms.constants, device, schedule, grid, work) * terms.stretch
    power = terms.flop_seconds * grid.along_n * grid.along_m
    start = terms.start + terms.warps * min(grid.rounds, grid.resident)
    seconds = start + (units**overlap + dram**overlap + l2**overlap) ** (1 / overlap) + power
    latency = -(-grid.rounds // grid.resident) * work.chain
    parts = (start, dram, l2, latency, grid.rounds * work.issue, grid.rounds * work.tensor)
    return Cost(seconds, PARTS, parts, traffic.least, 2 * m * gemm.n * gemm.k)


class Known(NamedTuple):
    """What predictions for a problem found: by schedule whatever M is, and the traffic by M."""

    launches: dict[GpuSchedule, tuple[Launch, Terms]]
    loads: dict[int, Traffic]


@lru_cache(maxsize=16)
def _known(gemm: Gemm, device: TileDevice) -> Known:
    """Return what was found so far: plans ask for the same schedules at every M."""
    return Known({}, {})


def _crowded(gemm: Gemm, schedule: GpuSchedule) -> float:
    """Return by how much of a multiprocessor's room blocks lie closer than spread evenly.

    Those of the next launch come while others of the one before still run, and fill up what has room.
    """
    if schedule.pipeline == "gemv":
        return streaming(gemm)["CROWDED"]
    decodes = weight_bits(gemm) < lane_of(gemm.activation)
    crowds = schedule.pipeline in WARPGROUPS and not schedule.persistent and decodes
    return _constants(gemm)["CROWDED"] if crowds else 0.0


class Terms(NamedTuple):
    """What the time of a launch is made of whatever M is.

    constants: Those of wgmma for the problem.
    crowded: By how much of a multiprocessor's room blocks lie closer than spread evenly.
    work: Of one block, without the rows of x.
    start: Seconds of an empty launch.
    overlap: How units, DRAM and L2 add up, as `Work.power`.
    l2_share: Of L2's bandwidth that the pipeline reaches.
    stretch: By what the work of a multiprocessor is stretched.
    flop_seconds: Time that the power of one block tile's operations costs.
    warps: Seconds until the warps of one block have started.
    unit_share: Of DRAM's bandwidth that the busiest multiprocessor can take, of kernels that stream weights.
    """

    constants: Mapping[str, float]
    crowded: float
    work: Work
    start: float
    overlap: float
    l2_share: float
    stretch: float
    flop_seconds: float
    warps: float = 0.0
    unit_share: float = 1.0


NO_WORK = Work(0.0, 0.0, 0.0, 1.0)
"""That of ``mma``, which `schedules.cost_grid.predict_mma` counts."""


@lru_cache(maxsize=16384)
def _terms(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Terms:
    own, crowded, stretch = _constants(gemm), _crowded(gemm, schedule), _loss(gemm, schedule)
    if schedule.pipeline == "mma":
        return Terms(own, crowded, NO_WORK, 0.0, 1.0, 1.0, stretch, 0.0)
    if schedule.pipeline in SLICED:
        work = (gemv_work if schedule.pipeline == "gemv" else digits_work)(gemm, device, schedule)
        few = streaming(gemm)
        warps = few["WARP_SECONDS"] * schedule.warps
        start, overlap, share = few["START_SECONDS"], few["OVERLAP"], few["UNIT_SHARE"]
        return Terms(own, crowded, work, start, overlap, 1.0, stretch, 0.0, warps, share)
    work = _wgmma_work(gemm, device, schedule)
    flops = 2.0 * schedule.tile_n * schedule.tile_m * gemm.k  # those on padding included
    power = own["FLOP_SECONDS"] * flops * _efficiency(gemm, device, schedule)
    return Terms(own, crowded, work, own["LAUNCH_SECONDS"], own["OVERLAP"], own["L2_SHARE"], stretch, power)


def _loss(gemm: Gemm, schedule: GpuSchedule) -> float:
    """Return by what the work of a multiprocessor is stretched."""
    if schedule.pipeline == "gemv":
        return gemv_loss(gemm, schedule)
    if schedule.pipeline not in WARPGROUPS:
        return 1.0
    own = _constants(gemm)
    return (
        (1 + own["MULTICAST_LOSS"] * (schedule.cluster > 1))
        * (1 + own["TIGHT_LOSS"] * (schedule.pipeline == "wgmma" and is_tight(gemm, schedule)))
        * (1 + own["WIDE_LOSS"] * _width(gemm, schedule))
    )


def _width(gemm: Gemm, schedule: GpuSchedule) -> float:
    """Return what part of ``WIDE_LOSS`` two warpgroups lose, whose sums carry."""
    if schedule.warps != 8 or not carries(gemm, schedule):
        return 0.0
    return (schedule.tile_m - PROMOTED_COLUMNS) / PROMOTED_COLUMNS


@lru_cache(maxsize=16384)
def is_tight(gemm: Gemm, schedule: GpuSchedule) -> bool:
    """Whether a wgmma schedule needs nearly all registers: none such was ever among the fastest."""
    return registers_per_thread(gemm, schedule) > math_registers(schedule.warps) - TIGHT_REGISTERS


def _efficiency(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> float:
    """Return the time per operation over that of the device whose clock was seen to fall.

    Others are taken to lose the same share of their time: power per operation falls with it.
    """
    if schedule.pipeline == "wgmma":
        return 1.0
    return FITTED_PEAK / device.peak(device.core_for(gemm.activation, schedule.pipeline))


def _unit_seconds(
    own: Mapping[str, float], device: TileDevice, schedule: GpuSchedule, grid: Grid, work: Work
) -> float:
    """Return the time of the busiest multiprocessor."""
    if not schedule.persistent:
        alone = grid.resident == 1 and schedule.pipeline in WARPGROUPS
        turns = (grid.rounds - 1) * own["TURNOVER_SECONDS"] if alone else 0.0
        return work.waves(grid.rounds, grid.resident) * _waiting(schedule, grid) + turns
    block = own["BLOCK_SECONDS"] + grid.stage * own["FIRST_BYTE_SECONDS"]
    if schedule.stream_k:  # all work alike; whoever began a tile takes in what the others did of it
        parts = most_parts(grid.blocks, device.units, schedule.tails)
        cut = _cut_seconds(own, schedule, parts) if grid.blocks % device.units else 0.0
        return block + grid.blocks / device.units * work.together(1) + cut
    # One block walks all tiles; loads of the next one overlap the epilogue.
    return block + grid.rounds * work.together(1)


def _waiting(schedule: GpuSchedule, grid: Grid) -> float:
    """Return by what clusters that fill nearly all places at once take longer."""
    clusters = schedule.pipeline in WARPGROUPS and schedule.cluster * schedule.split_k > 2
    full = grid.rounds == grid.resident and grid.fill > NEARLY_FULL
    return 1 + CLUSTER_WAIT * (grid.resident - 1) if clusters and full else 1.0


def _cut_seconds(own: Mapping[str, float], schedule: GpuSchedule, parts: int) -> float:
    """Return what the cuts of stream-K cost a block that takes in ``parts`` of its tile."""
    outputs = schedule.tile_m * schedule.tile_n
    each = own["CUT_OUTPUT_SECONDS"] + parts * own["PART_SECONDS"]
    return own["CUT_SECONDS"] + outputs * each


def _wgmma_work(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Work:
    """Return the work of one block: stages of slabs, 128 bytes of K each, then the epilogue."""
    own, core = _constants(gemm), device.core_for(gemm.activation, schedule.pipeline)
    slab = SWIZZLE_ROW // operand_bytes(gemm)
    slabs = schedule.tile_k // slab
    # K that one turn of the loop takes from all slices
    turn = max(2, slabs) * slab * max(schedule.split_k, schedule.deal)
    count = -(-padded(gemm.k) // turn) * max(2, slabs) * slices_in_turn(schedule)
    row_tiles = schedule.tile_n // 16 // schedule.warps
    decode = own["DECODE_CYCLES"] * slab / 2 * decode_ops(gemm, schedule.placement)
    issue = row_tiles * (own["SLAB_CYCLES"] + decode)
    stall = 0.0
    if promotes(gemm, schedule):
        groups = max(1, slab // packed_group(gemm.group_size, gemm.k)) if gemm.scale else 1
        whole = row_tiles * schedule.tile_m == promoted_columns(schedule.tile_m)
        rarely = promotes_rarely(gemm) and (whole or carries(gemm, schedule))
        promotions = slab / FP8_INTERVAL if rarely else groups
        issue += row_tiles * promotions * own["PROMOTION_SLOTS"] * schedule.tile_m
        stall = (groups - 1) * own["PROMOTION_CYCLES"]
    tokens = max(schedule.tile_m, HALF_RATE_COLUMNS)
    tensor = 2.0 * tokens * schedule.tile_n * slab / (core.ops_per_cycle * own["TENSOR_SHARE"])
    # Bytes of a slab enter a multiprocessor no faster than this, whatever the tensor cores could do.
    tensor = max(tensor, stage_bytes(gemm, schedule) / slabs / own["INGEST_BYTES"])
    stall += row_tiles * own["TILE_CYCLES"] + own["STAGE_CYCLES"] / slabs
    restarts = slices_in_turn(schedule) - 1
    edge, hidden = _edge_seconds(own, schedule), own["EDGE_OVERLAP"]
    first = stage_bytes(gemm, schedule) * own["FIRST_BYTE_SECONDS"]
    edge, first = (0.0, 0.0) if schedule.persistent else (own["BLOCK_SECONDS"] + edge, first)
    steps = count / slabs * own["STEP_CYCLES"] / device.clock
    warpgroups = schedule.warps // 4
    return Work(
        (count * stall + restarts * RESTART_CYCLES) / device.clock + hidden * edge,
        count * warpgroups * issue / device.clock,
        count * tensor / device.clock,
        own["WORK_POWER"],
        count / slabs * own["FILL_SECONDS"],
        schedule.stages,
        (1 - hidden) * edge + first + steps,
        own["RING_POWER"],
    )


def _edge_seconds(own: Mapping[str, float], schedule: GpuSchedule) -> float:
    """Return what a block's tile costs outside the K loop."""
    outputs = schedule.tile_m * schedule.tile_n
    stored = outputs * own["OUTPUT_SECONDS"]
    if schedule.split_k == 1:
        return stored
    others = outputs * (1 - 1 / schedule.split_k) * slices_in_turn(schedule)
    doublings = log2(schedule.split_k) * own["DOUBLING_SECONDS"]
    return stored + own["CLUSTER_SECONDS"] + doublings + others * own["EXCHANGE_SECONDS"]


def _dram_seconds(terms: Terms, device: TileDevice, schedule: GpuSchedule, moved: int, grid: Grid) -> float:
    """Time to stream from DRAM, limited by the bytes that the resident blocks keep in flight."""
    dram = device.layer("dram")
    bandwidth = dram.sustained_bandwidth
    if schedule.pipeline in SLICED:  # their chain has a fetch latency; the busiest multiprocessor decides
        share = grid.along_m * grid.rounds * device.units / grid.blocks / terms.unit_share
        return moved / bandwidth * max(1.0, share)
    in_flight = min(grid.blocks, device.units * grid.resident) * grid.stage * max(1, schedule.stages - 1)
    return moved / min(bandwidth, in_flight / dram.latency)


def _l2_seconds(device: TileDevice, schedule: GpuSchedule, traffic: Traffic, grid: Grid) -> float:
    """Time for every block to read its tiles through L2; a cluster reads those of A once."""
    l2 = device.layer("l2")
    sharing = schedule.cluster if schedule.pipeline in WARPGROUPS else 1
    moved = grid.along_m * traffic.weights + grid.along_n / sharing * traffic.activations
    return moved / l2.sustained_bandwidth
