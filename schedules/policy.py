"""LADDER's Algorithm 1: hint, tiling from core to DRAM, transforms, then profile and select.

Source: Ladder (OSDI 2024), section 4.3. `device_hint` gives the granule; `tilings` grows tiles
aligned to it from the core outwards; `schedule_transform` decides what makes tile and layer
agree; `rank` orders candidates by predicted time and `profile_and_select` by measured time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from ladder.ir.gemm import Gemm
from schedules.cost_model import Cost, predict
from schedules.cpu_policy import BUCKETS as CPU_BUCKETS
from schedules.cpu_policy import LARGEST_M, cpu_candidates, cpu_schedule
from schedules.hint import Hint, device_hint
from schedules.layouts import packed_group, padded
from schedules.legal import (
    RULES,
    SWIZZLE_ROW,
    Rule,
    block_rows,
    is_legal,
    operand_bytes,
    placement_for,
    stage_bytes,
)
from schedules.schedule import CpuSchedule, GpuSchedule, Plan, Schedule
from schedules.tuning import TuningDatabase
from targets import TileDevice
from tile_types.errors import ScheduleError

GPU_BUCKETS = (8, 16, 32, 64, 128, 256, LARGEST_M)
"""Largest M of each range of a GPU plan."""

TYPICAL_LARGE_M = 4096
"""The M for which the last range is tuned."""


DEPTHS: Mapping[str, tuple[int, ...]] = {"gemv": (2, 4, 8), "mma": (2, 3, 4), "wgmma": (4, 6, 8)}
"""Depths of pipelining that were measured; all that fit are ranked, for wgmma the first that suffices."""


MOST_SLICES = 4
"""Blocks per multiprocessor up to which splitting K further was ever among the fastest."""


@dataclass(frozen=True)
class Candidate:
    """A schedule with its predicted cost."""

    schedule: Schedule
    cost: Cost


@dataclass(frozen=True)
class LayerTile:
    """The part of the problem that one instance of a memory layer holds."""

    layer: str
    m: int
    n: int
    k: int


@dataclass(frozen=True)
class TransformStep:
    """One transform of the weight tile on its way inwards.

    Parameters
    ----------
    layer
        The layer at which it happens.
    kind
        ``"pad"``, ``"map"``, ``"slice"`` or ``"convert"``.
    detail
        Its arguments, for people.
    """

    layer: str
    kind: str
    detail: str


def pipelines_for(device: TileDevice, m: int) -> tuple[str, ...]:
    """Return the pipelines that compete for M = ``m`` on ``device``.

    Raises
    ------
    ScheduleError
        If no pipeline emits code for this vendor.
    """
    if device.vendor == "cpu":
        return ("cpu",)
    if device.vendor != "nvidia":
        raise ScheduleError(f"no pipeline emits code for {device.name}; choose a CUDA or CPU device")
    large = "wgmma" if "wgmma" in device.features else "mma"
    gemv = "ldmatrix" in device.features
    if gemv and m <= 8:
        return ("gemv",)
    return ("gemv", large) if gemv and large == "mma" and m <= 16 else (large,)


def tile_layers(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> tuple[LayerTile, ...]:
    """Return the tiles of a schedule from core to DRAM; weights are the instruction's rows."""
    core = device.core_for(gemm.activation, schedule.pipeline)
    # What issues one instruction: a warpgroup for wgmma, else a warp; gemv's slices of K share rows.
    issuers = schedule.warps // {"wgmma": 4, "gemv": schedule.split_k}.get(schedule.pipeline, 1)
    rows = block_rows(schedule)
    along_n = min(issuers, rows // core.m)
    along_m = max(1, min(issuers // along_n, schedule.tile_m // 8))
    return (
        LayerTile("core", min(core.n, schedule.tile_m // along_m), core.m, core.k),
        LayerTile("register", schedule.tile_m // along_m, rows // along_n, core.k),
        LayerTile("shared", schedule.tile_m, rows, schedule.tile_k),
        LayerTile("dram", schedule.tile_m, rows, max(schedule.tile_k, padded(gemm.k) // schedule.split_k)),
    )


def aligned(hint: Hint, gemm: Gemm, schedule: GpuSchedule) -> bool:
    """Whether the weight operand of every block step consists of whole hint tiles."""
    return hint.divides(schedule.tile_n, schedule.tile_k * operand_bytes(gemm))


def tilings(
    gemm: Gemm, device: TileDevice, pipeline: str, m: int, *, full: bool = False
) -> Iterator[GpuSchedule]:
    """Yield legal schedules of ``pipeline``, grown from the core's tile to the block's.

    Parameters
    ----------
    gemm, device
        The problem and where it runs.
    pipeline
        A key of `schedules.legal.RULES`.
    m
        Rows of A: tiles of M beyond the next size up only add padding.
    full
        Every legal schedule, for tuning; by default the depths of `DEPTHS`, at most two
        warpgroups, and only splits of K that still find idle multiprocessors.
    """
    hint = device_hint(device, device.core_for(gemm.activation, pipeline))
    for schedule in _tiles(gemm, device, pipeline, m, full):
        if not full and pipeline == "wgmma" and not _finds_idle(gemm, device, schedule, m):
            continue
        if not aligned(hint, gemm, schedule) or not is_legal(gemm, device, schedule):
            continue  # deeper pipelines only need more
        if full:
            depths = (replace(schedule, stages=stages) for stages in RULES[pipeline].stages)
            yield from (deep for deep in depths if is_legal(gemm, device, deep))
        else:
            yield from _depths(gemm, device, schedule)


def _depths(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Iterator[GpuSchedule]:
    """Yield the depths of pipelining worth ranking for a tile whose smallest depth is legal.

    Those of `DEPTHS`, for wgmma up to the first that covers DRAM's latency: deeper ones only
    take room from other blocks. Shallower ones replace them for the smallest step of K alone:
    a longer step with so few buffers was never measured.
    """
    dram, stage = device.layer("dram"), stage_bytes(gemm, schedule)
    wanted = dram.bandwidth * dram.sustained * dram.latency / device.units
    found = None
    for stages in DEPTHS[schedule.pipeline]:
        deep = replace(schedule, stages=stages)
        if not is_legal(gemm, device, deep):
            break
        if found and schedule.pipeline != "wgmma":
            yield found
        found = deep
        if schedule.pipeline == "wgmma" and (stages - 1) * stage >= wanted:
            break
    if found:
        yield found
    elif schedule.tile_k <= SWIZZLE_ROW // operand_bytes(gemm):
        shallow = (replace(schedule, stages=s) for s in (3, 2, 1) if s in RULES[schedule.pipeline].stages)
        yield from (deep for deep in shallow if is_legal(gemm, device, deep))


def _tiles(gemm: Gemm, device: TileDevice, pipeline: str, m: int, full: bool) -> Iterator[GpuSchedule]:
    """Yield tiles, warps and splits of ``pipeline``; their pipelining depth is the smallest."""
    rule, placement = RULES[pipeline], placement_for(gemm)
    for split, persistent in product(rule.split_k, rule.persistent):
        if not _worthwhile(gemm, device, split, persistent, m):
            continue
        warps = rule.warps[: None if full else 2]
        if pipeline == "gemv":
            warps = tuple(row_warps * split for row_warps in (1, 2, 4))
        for tile_m, tile_n, tile_k, count in product(_useful_m(rule, m), rule.tile_n, rule.tile_k, warps):
            if pipeline == "wgmma" and tile_n % (16 * count):
                continue  # most of the product: spare the full check
            yield GpuSchedule(
                pipeline,
                tile_m,
                tile_n,
                tile_k,
                rule.stages[0],
                count,
                split,
                persistent,
                placement=placement,
            )


def _useful_m(rule: Rule, m: int) -> tuple[int, ...]:
    """Return the smallest token tile that holds ``m`` and those of at least half its size."""
    limit = next((tile for tile in rule.tile_m if tile >= m), rule.tile_m[-1])
    return tuple(tile for tile in rule.tile_m if limit // 2 <= tile <= limit)


def _finds_idle(gemm: Gemm, device: TileDevice, tile: GpuSchedule, m: int) -> bool:
    """Whether K is not split, or its slices still find multiprocessors with few blocks."""
    blocks = -(-m // tile.tile_m) * -(-gemm.n // tile.tile_n)
    return tile.split_k == 1 or blocks * tile.split_k <= MOST_SLICES * device.units


def _worthwhile(gemm: Gemm, device: TileDevice, split: int, persistent: bool, m: int) -> bool:
    """Prune what cannot pay: slices of K shorter than four steps, persistence without a second wave."""
    long_enough = split == 1 or padded(gemm.k) // 64 // split >= 4
    small = m * gemm.n <= device.units * 128 * 128
    return long_enough and not (persistent and small)


def schedule_transform(
    gemm: Gemm, device: TileDevice, schedule: Schedule, m: int
) -> tuple[TransformStep, ...]:
    """Return the transforms that bring the weights from canonical storage to the core.

    Memory-bound problems convert as late as possible, in registers next to the multiply, so
    that every layer carries codes. Compute-bound problems on a CPU convert early, into a
    cache-resident scratch tile that all rows of A reuse; on a GPU the register tile is itself
    reused by every token of the block tile.
    """
    if isinstance(schedule, CpuSchedule):
        layer = "l1" if schedule.decode == "scratch" else "register"
        return (
            TransformStep("dram", "slice", f"rows of {schedule.tile_n}, columns of {schedule.tile_k}"),
            TransformStep(layer, "convert", f"{gemm.weight} -> {gemm.activation} for {schedule.core}"),
        )
    assert isinstance(schedule, GpuSchedule)
    group = packed_group(gemm.group_size, gemm.k)
    scale = f"scales per {group} on the {schedule.placement}" if gemm.scale else "one scale per row"
    return (
        TransformStep("dram", "pad", f"[{gemm.n}, {gemm.k}] -> [{padded(gemm.n)}, {padded(gemm.k)}]"),
        TransformStep("dram", "map", "FragmentLayout: 64 x 64 tiles in tensor-core fragment order"),
        TransformStep("shared", "slice", f"[{schedule.tile_n}, {schedule.tile_k}]"),
        TransformStep("register", "convert", f"{gemm.weight} -> {gemm.activation}; {scale}"),
    )


def rank(gemm: Gemm, device: TileDevice, m: int, *, full: bool = False) -> tuple[Candidate, ...]:
    """Return candidates for M = ``m``, the one predicted fastest first; ``full`` as in `tilings`.

    On a CPU the measured table (`schedules.cpu_policy`) leads, whatever the model says.

    Raises
    ------
    ConversionError
        If the device has no core for the activation type.
    ScheduleError
        If no schedule is legal.
    """
    if not device.is_gpu:
        return tuple(Candidate(s, predict(gemm, device, s, m)) for s in cpu_candidates(gemm, device, m))
    device.core_for(gemm.activation)
    found = [
        Candidate(schedule, predict(gemm, device, schedule, m))
        for pipeline in pipelines_for(device, m)
        if device.cores_for(gemm.activation, pipeline)
        for schedule in tilings(gemm, device, pipeline, m, full=full)
    ]
    if not found:
        raise ScheduleError(f"no legal schedule for {gemm} on {device.name} at M={m}")
    return tuple(sorted(found, key=_order))


def _order(candidate: Candidate) -> tuple[float, int, str]:
    """Sort by time; among equals fewer warps, then the printed form, to be deterministic."""
    schedule = candidate.schedule
    warps = schedule.warps if isinstance(schedule, GpuSchedule) else 0
    return (round(candidate.cost.seconds, 8), warps, str(schedule))


def profile_and_select(
    candidates: Sequence[Candidate], measure: Callable[[Schedule], float], top: int = 8
) -> tuple[Schedule, float]:
    """Measure the ``top`` best-ranked candidates and return the fastest with its seconds.

    Parameters
    ----------
    candidates
        From `rank`.
    measure
        Returns seconds of one schedule; infinity where it fails.
    top
        How many to measure.

    Raises
    ------
    ScheduleError
        If none could be measured.
    """
    timed = [(measure(candidate.schedule), index) for index, candidate in enumerate(candidates[:top])]
    seconds, index = min(timed, default=(float("inf"), 0))
    if seconds == float("inf"):
        raise ScheduleError(f"none of {len(timed)} candidates ran")
    return candidates[index].schedule, seconds


@lru_cache(maxsize=4096)
def best_schedule(gemm: Gemm, device: TileDevice, m: int) -> Schedule:
    """Return the schedule that ranks first for M = ``m``."""
    return rank(gemm, device, m)[0].schedule if device.is_gpu else cpu_schedule(gemm, device, m)


def buckets(device: TileDevice) -> tuple[int, ...]:
    """Return the largest M of each range of a plan on ``device``."""
    return GPU_BUCKETS if device.is_gpu else CPU_BUCKETS


def typical_m(limit: int) -> int:
    """Return the M for which the range that ends at ``limit`` is tuned."""
    return min(limit, TYPICAL_LARGE_M)


def make_plan(gemm: Gemm, device: TileDevice, tuning: TuningDatabase | None = None) -> Plan:
    """Choose a schedule for every range of M.

    Parameters
    ----------
    gemm, device
        The problem and where it runs.
    tuning
        Measured schedules; used where present and legal, the cost model decides otherwise.

    Returns
    -------
    Plan
        Neighbouring ranges with the same schedule are one entry.
    """
    entries: list[tuple[int, Schedule]] = []
    for limit in buckets(device):
        schedule = _tuned(gemm, device, limit, tuning) or best_schedule(gemm, device, typical_m(limit))
        if entries and entries[-1][1] == schedule:
            entries.pop()
        entries.append((limit, schedule))
    return Plan(tuple(entries))


def _tuned(gemm: Gemm, device: TileDevice, limit: int, tuning: TuningDatabase | None) -> Schedule | None:
    """Return the measured schedule of a range if it still fits the device."""
    schedule = None if tuning is None else tuning.lookup(device, gemm, limit)
    if isinstance(schedule, GpuSchedule) and (not device.is_gpu or not is_legal(gemm, device, schedule)):
        return None
    return schedule
