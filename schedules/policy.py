"""LADDER's Algorithm 1: hint, tiling from core to DRAM, transforms, then profile and select.

Source: Ladder (OSDI 2024), section 4.3. `device_hint` gives the granule; `schedules.tilings` grows tiles
aligned to it from the core outwards; `schedule_transform` decides what makes tile and layer
agree; `rank` orders candidates by predicted time, and `ladder.runtime.tune` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from ladder.ir.gemm import Gemm
from schedules.codes import table_bytes
from schedules.cost import Cost
from schedules.cost_model import predict
from schedules.cpu_policy import BUCKETS as CPU_BUCKETS
from schedules.cpu_policy import LARGEST_M, cpu_candidates, cpu_schedule
from schedules.estimate import STREAMED_ROWS, Estimator
from schedules.expert_tiles import expert_tile, tiles_of
from schedules.footprint import (
    DEALT_COLUMNS,
    FP8_INTERVAL,
    PROMOTED_COLUMNS,
    SLICED,
    WARPGROUPS,
    carries,
    promotes_rarely,
    slice_columns,
    turn_columns,
)
from schedules.gemv_buffers import buffer_chunks, gemv_blocks, gemv_run
from schedules.group_values import shared_value_bytes
from schedules.layouts import TILE, lane_of, packed_group, padded
from schedules.legal import is_legal
from schedules.rules import DEALS, RULES, serves
from schedules.schedule import GpuSchedule, Plan, Schedule, TransformList, check
from schedules.segments import GAIN, SWITCH, cover, m_grid, octave_weights, segments
from schedules.spilling import is_unrolled_too_far, note_spilling, seen_spilling, spills_like_any
from schedules.tilings import MOST_DOT_M, decodes_ahead, pipelines_for, tilings
from schedules.tuning import TuningDatabase
from targets import TileDevice
from tile_types.errors import ScheduleError

Order = tuple[object, ...]

TILE_CHUNKS = 8
"""16-byte chunks of a row of 16-bit x that belong to a packed tile."""


def order_of_sums(gemm: Gemm, device: TileDevice, schedule: Schedule) -> Order | None:
    """Return what decides in which order a kernel adds the terms of one result.

    Kernels of the same order give a row the same bits. The tile of activation rows, the depth of pipelining
    and the way through the grid are no part of it, but for `_widened`. Slices of K are whole turns of a loop,
    whose length depends on the stage.

    ``mma`` and ``wgmma`` add sixteen products to a sum alike (compared on an H200), so ``gemv`` has the order
    of ``wgmma`` where that deals K as it does.

    Returns: None where the order depends on the number of rows: a stream-K grid cuts K wherever a share ends.
    """
    if isinstance(schedule, TransformList):
        return ("cpu", schedule.instruction)
    assert isinstance(schedule, GpuSchedule)
    if schedule.stream_k:
        return None
    if slices := dealt_slices(gemm, device, schedule):
        return ("dealt", slices)
    order: Order = (schedule.pipeline, schedule.placement, schedule.split_k)
    if schedule.pipeline not in WARPGROUPS:  # warps or the blocks of a cluster take turns along K
        order += (schedule.tile_k, schedule.warps, schedule.cluster, schedule.warp_rows)
        if schedule.pipeline in SLICED:  # by runs of as many tiles as are in flight and x has room for
            order += (schedule.stages, schedule.tile_m)
    elif schedule.split_k > 1:
        order += (slice_columns(gemm, schedule),)
    if gemm.activation.startswith("fp8"):
        order += _widened(gemm, schedule)
    return order


def _widened(gemm: Gemm, schedule: GpuSchedule) -> Order:
    """Return what decides where fp8 products leave the tensor core for wider sums.

    The columns of K between, where only the length of sums makes them, and warps have one row tile each.
    """
    alone = schedule.pipeline == "wgmma" and schedule.tile_n == 16 * schedule.warps
    narrow = schedule.tile_m <= PROMOTED_COLUMNS and not carries(gemm, schedule)
    if not (alone and narrow and promotes_rarely(gemm)):
        return schedule.tile_m, schedule.tile_n, schedule.tile_k
    turn = turn_columns(gemm, schedule)
    return (FP8_INTERVAL // turn * turn,)


def dealt_slices(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> int:
    """Return to how many slices a kernel deals K in runs of `DEALT_COLUMNS`; 0 if it does otherwise.

    Of ``gemv`` only what multiplies the same operands as ``wgmma``: decoded, with the scales of their groups.
    """
    if schedule.pipeline != "gemv":
        return schedule.deal if schedule.deal > 1 else 0
    same = gemm.scale and lane_of(gemm.activation) == 16 and schedule.placement == "operand"
    if not same or schedule.cluster > 1 or table_bytes(gemm):
        return 0
    tables = shared_value_bytes(gemm, schedule)
    chunks = buffer_chunks(device, gemv_blocks(gemm, device, schedule, tables), tables)
    run = gemv_run(schedule, chunks, TILE_CHUNKS)
    return schedule.split_k if run * TILE == DEALT_COLUMNS else 0


def dealt(gemm: Gemm, device: TileDevice, schedule: Schedule) -> Iterator[GpuSchedule]:
    """Yield the kernels that deal K but do all else as a ``wgmma`` kernel does."""
    if isinstance(schedule, GpuSchedule) and schedule.pipeline == "wgmma" and not schedule.stream_k:
        for deal in DEALS:
            other = replace(schedule, deal=deal)
            if is_legal(gemm, device, other):
                yield other


GPU_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, LARGEST_M)
"""The M for which schedules of a GPU are sought and measured; beyond the last but one nothing changes."""

MIDDLE_BUCKETS = (
    *(48, 80, 96, 112, 144, 160, 176, 192, 208, 224, 240, 272, 320, 352, 384, 416, 448),
    *(576, 640, 704, 768, 896, 1280, 1536, 1792, 2560, 3072),
)
"""Further M for which a schedule is sought: tiles that fit them fit no M of `GPU_BUCKETS`."""

FEW_MIDDLE = (24, 40)
"""The same where operands have 16 bits."""

TYPICAL_LARGE_M = 8192
"""The M for which the last range is tuned."""

COMPETING_WITH_MEASURED = 4
"""Schedules for one M, best predicted first, that compete with those that were measured."""

COMPETING_PER_BUCKET = 2
"""Schedules per bucket, best predicted first, that compete for a place in a plan."""

FOREIGN_SECONDS = 1e3
"""What a schedule takes at an M that its pipeline is not made for: models of pipelines do not compare."""

FAR_BEHIND = 3.0
"""How much slower than the fastest a kernel is whose order of sums need not compete."""

LEAST_GROWTH = 0.9
"""What a schedule takes for more rows over what it takes for fewer, at least: grids may be filled better."""

WINDOW_PIPELINES = ("mma",)
"""What gathers windows of few channels, which tensor copies cannot."""

GROUPED_ROWS = 64
"""Activation rows whose kernels serve groups of channels that those of fewer rows would cut."""

MOST_SCHEDULES, MOST_CLOSE = 10, 26
"""Kernels of a plan, and of one whose tiles follow M by sixteens: each takes seconds to compile."""

CLOSE_GAIN, PLAIN_GAIN = 0.0004, 0.0002
"""What a kernel of such a plan must gain, as `schedules.segments.GAIN` says of others, and of fp8 x fp8."""


class Candidate(NamedTuple):
    """A schedule with its predicted cost."""

    schedule: Schedule
    cost: Cost


def schedule_transform(gemm: Gemm, schedule: GpuSchedule) -> tuple[str, ...]:
    """Return a line for each transform that brings the weights from canonical storage to the core.

    This is text for people, of families whose schedules are not lists of transforms yet.
    """
    group = packed_group(gemm.group_size, gemm.k)
    scale = f"scales per {group} on the {schedule.placement}" if gemm.scale else "one scale per row"
    return (
        f"dram: pad [{gemm.n}, {gemm.k}] -> [{padded(gemm.n)}, {padded(gemm.k)}]",
        "dram: map FragmentLayout: 64 x 64 tiles in tensor-core fragment order",
        f"shared: slice [{schedule.tile_n}, {schedule.tile_k}]",
        f"register: convert {gemm.weight} -> {gemm.activation}; {scale}",
    )


def rank(
    gemm: Gemm,
    device: TileDevice,
    m: int,
    *,
    full: bool = False,
    wide: bool = False,
) -> tuple[Candidate, ...]:
    """Return candidates for M = ``m``, the one predicted fastest first.

    ``full`` as in `tilings`; ``wide`` (and ``full``): of all pipelines that could serve this M.

    On a CPU the measured table (`schedules.cpu_policy`) leads, whatever the model says.

    Raises ConversionError if the device has no core for the activation type.
    Raises ScheduleError if no schedule is legal.
    """
    if not device.is_gpu:
        return tuple(Candidate(s, predict(gemm, device, s, m)) for s in cpu_candidates(gemm, device, m))
    found = _able(gemm, device, m, full=full, wide=wide)
    return tuple(sorted((Candidate(s, predict(gemm, device, s, m)) for s in found), key=_order))


def _able(
    gemm: Gemm, device: TileDevice, m: int, *, full: bool = False, wide: bool = False
) -> list[GpuSchedule]:
    """Return the schedules for a GPU that `rank` orders; arguments and errors as there."""
    device.core_for(gemm.activation)
    tried = [(pipelines_for(device, m, full=full or wide), m)]
    tried += (
        [(WINDOW_PIPELINES, m), (pipelines_for(device, GROUPED_ROWS), GROUPED_ROWS)] if gemm.windows else []
    )
    # Dot products take fewer registers than matrix instructions, whose scales of short groups may not fit.
    tried += [(pipelines_for(device, MOST_DOT_M), MOST_DOT_M)] if device.vendor == "amd" else []
    spilling = seen_spilling(gemm, device)
    for avoided in (spilling, ()):  # where all spill, one of them is right all the same
        for pipelines, rows in tried:
            found = [
                schedule
                for pipeline in _serving(gemm, pipelines)
                if device.cores_for(gemm.activation, pipeline)
                for schedule in tilings(gemm, device, pipeline, rows, full=full)
                if not is_unrolled_too_far(schedule) and not spills_like_any(gemm, device, schedule, avoided)
            ]
            if found:
                return found
    raise ScheduleError(f"no legal schedule for {gemm} on {device.name} at M={m}")


def avoid(gemm: Gemm, device: TileDevice, schedule: Schedule) -> bool:
    """Choose no schedule from now on that spills as this one was seen to; return whether that is news.

    What was measured to be the fastest is chosen all the same, if it was this kernel (`measured_beside`).
    """
    if not isinstance(schedule, GpuSchedule) or not note_spilling(gemm, device, schedule):
        return False
    best_schedule.cache_clear()
    _pool_of_one_order.cache_clear()
    return True


def choose(gemm: Gemm, device: TileDevice, m: int, tuning: TuningDatabase | None = None) -> Candidate:
    """Return the schedule expected to be the fastest for just this M, and what it is expected to take.

    What was measured of just this shape goes before the model. Raises as `rank`.
    """
    if gemm.batch_invariant:
        schedule = make_plan(gemm, device, tuning).schedule_for(m)
        return Candidate(schedule, predict(gemm, device, schedule, m))
    ranked = rank(gemm, device, m)[:COMPETING_WITH_MEASURED]
    estimator = Estimator(gemm, device, (tuning or TuningDatabase()).measurements(device, gemm))
    if not estimator.knows(m):
        return ranked[0]
    tried = (*estimator.measured, *(candidate.schedule for candidate in ranked))
    expected = {schedule: estimator.seconds(schedule, m) for schedule in tried}
    best = min(expected, key=expected.__getitem__)
    return Candidate(best, predict(gemm, device, best, m)._replace(seconds=expected[best]))


def _serving(gemm: Gemm, names: Sequence[str]) -> list[str]:
    """Return those of the pipelines that can do what the problem asks, else all that can."""
    return [name for name in names if serves(gemm, name)] or [name for name in RULES if serves(gemm, name)]


def _order(candidate: Candidate) -> tuple[float, int, str]:
    """Sort by time; among equals fewer warps, then the printed form, to be deterministic."""
    schedule = candidate.schedule
    warps = schedule.warps if isinstance(schedule, GpuSchedule) else 0
    return (round(candidate.cost.seconds, 8), warps, _text(schedule))


_text = lru_cache(maxsize=16384)(str)


@lru_cache(maxsize=4096)
def best_schedule(gemm: Gemm, device: TileDevice, m: int) -> Schedule:
    """Return the schedule that ranks first for M = ``m``."""
    return rank(gemm, device, m)[0].schedule if device.is_gpu else cpu_schedule(gemm, device, m)


def typical_m(limit: int) -> int:
    """Return the M for which the range that ends at ``limit`` is tuned."""
    return min(limit, TYPICAL_LARGE_M)


def make_plan(gemm: Gemm, device: TileDevice, tuning: TuningDatabase | None = None) -> Plan:
    """Choose a schedule for every range of M.

    On a GPU a few schedules are chosen that together are the fastest by estimate
    (`schedules.estimate`) at every M where a tile may begin, so that M = 65 is not served by what
    is best for M = 128 if two smaller tiles are faster.

    gemm, device: The problem and where it runs.
    tuning: Measured schedules; used where present and legal, the cost model decides otherwise.
    Returns Plan: Neighbouring ranges with the same schedule are one entry.
    """
    if device.is_gpu and gemm.slots and not gemm.stored:
        return Plan(((LARGEST_M, _slots_choice(gemm, device)),))
    if device.is_gpu and gemm.experts:
        return _merged((m, _expert_choice(gemm, device, m)) for m in sorted({*tiles_of(gemm), *GPU_BUCKETS}))
    if device.is_gpu:
        return _gpu_plan(gemm, device, tuning)
    return _merged((limit, _cpu_choice(gemm, device, limit, tuning)) for limit in CPU_BUCKETS)


SMALLER_BLOCK_SLACK = 1.02
"""How much longer than the fastest predicted a schedule of smaller blocks may take: such blocks begin while
those of the kernel before still run."""


def _slots_choice(gemm: Gemm, device: TileDevice) -> Schedule:
    """Return the schedule for slots of few rows that name their experts: each reads the weight of one."""
    every = replace(gemm, n=gemm.n * min(gemm.slots, gemm.experts), experts=0, slots=0)
    ranked = ((s, cost.seconds) for s, cost in rank(every, device, 1) if isinstance(s, GpuSchedule))
    able = [(s, took) for s, took in ranked if serves(gemm, s.pipeline) and is_legal(gemm, device, s)]
    if not able:
        raise ScheduleError(f"no pipeline of {device.name} serves {gemm}")
    spilling = seen_spilling(gemm, device)
    able = [(s, took) for s, took in able if not spills_like_any(gemm, device, s, spilling)] or able
    return min((s for s, took in able if took <= SMALLER_BLOCK_SLACK * able[0][1]), key=lambda s: s.warps)


def _expert_choice(gemm: Gemm, device: TileDevice, m: int) -> Schedule:
    """Return the schedule for up to ``m`` tokens per expert: as measured, else predicted to be fastest."""
    tile = expert_tile(gemm, device, m)
    if tile is not None:
        return tile
    every = replace(gemm, n=gemm.n * gemm.experts)  # all experts' blocks share the device
    return rank(every, device, min(m + 2 * math.isqrt(m), TYPICAL_LARGE_M))[0].schedule


def _gpu_plan(gemm: Gemm, device: TileDevice, tuning: TuningDatabase | None) -> Plan:
    known = (tuning.measurements(device, gemm), tuning.akin(device, gemm)) if tuning else ()
    estimator = Estimator(gemm, device, *known)
    grid = m_grid(TYPICAL_LARGE_M)
    pool = _pool_of_one_order(gemm, device) if gemm.batch_invariant else _pool(gemm, device, estimator)
    expected = partial(_predicted, gemm, device) if gemm.batch_invariant else partial(_expected, estimator)
    costs = np.array([[expected(schedule, m) for m in grid] for schedule in pool])
    # No kernel takes longer than with more rows, so that none that serves more is faster than what is chosen.
    # Where this shape was timed, the times at each M decide; where pipelines were not timed beside each
    # other, those of kernels that stream no weights say nothing of few rows.
    least = np.minimum.accumulate(costs[:, ::-1], axis=1)[:, ::-1]
    lifted = np.array([(estimator.close and not estimator.exact) or _streams(one) for one in pool])
    narrow = lane_of(gemm.activation) == 8
    few = (np.array(grid) <= STREAMED_ROWS) & narrow
    costs = np.where(lifted[:, None] | few, least, costs)
    plain = gemm.weight.startswith("fp8") and gemm.activation.startswith("fp8")
    close = MOST_CLOSE, PLAIN_GAIN if plain else CLOSE_GAIN
    most, gain = close if estimator.close else (MOST_SCHEDULES, GAIN)
    # In 8 bits the times of all kernels are lifted for few rows: those need no margin to follow more rows.
    margin = 0.0 if narrow and not estimator.exact else SWITCH
    chosen = cover(costs, octave_weights(grid), most, gain)
    served = segments(costs, chosen, margin)
    limits = (*grid[:-1], LARGEST_M)
    entries = [(limit, pool[row]) for limit, row in zip(limits, served, strict=True)]
    return _merged(_as_usual(gemm, device, tuning, entries) if gemm.batch_invariant else entries)


def _as_usual(
    gemm: Gemm, device: TileDevice, tuning: TuningDatabase | None, entries: Sequence[tuple[int, Schedule]]
) -> Iterable[tuple[int, Schedule]]:
    """Take the usual plan's kernels, which measurements chose, where they add in the order of the others."""
    usual = make_plan(replace(gemm, batch_invariant=False), device, tuning)
    order = order_of_sums(gemm, device, entries[0][1])
    for limit, own in entries:
        other = usual.schedule_for(limit)
        yield limit, other if order_of_sums(gemm, device, other) == order else own


def _expected(estimator: Estimator, schedule: Schedule, m: int) -> float:
    """Return the expected time; other pipelines than M's own compete only where they were timed.

    Those that stream weights compete up to `STREAMED_ROWS`: what needs them twice was never the fastest.
    What was measured of other shapes, where fewer blocks share a multiprocessor, competes as `tilings` says.
    """
    assert isinstance(schedule, GpuSchedule)
    gemm, device = estimator.gemm, estimator.device
    if not estimator.exact and not decodes_ahead(gemm, device, schedule, m):
        return FOREIGN_SECONDS
    own = schedule.pipeline in pipelines_for(device, m)
    again = _streams(schedule) and m > STREAMED_ROWS
    told = estimator.tells(schedule, m) or estimator.compares(schedule.pipeline, m)
    timed = own or (told and not again)
    return estimator.seconds(schedule, m) if timed else FOREIGN_SECONDS


def _predicted(gemm: Gemm, device: TileDevice, schedule: Schedule, m: int) -> float:
    """Return the time that the model predicts: what was measured chose among kernels of other orders too."""
    return predict(gemm, device, schedule, m).seconds


def _pool(gemm: Gemm, device: TileDevice, estimator: Estimator) -> list[Schedule]:
    """Return the schedules that compete: measured ones, and the best predicted where none was."""
    pool = estimator.measured
    seen: dict[GpuSchedule, float] = {}
    for m in sorted({*GPU_BUCKETS[:-1], *_middle(estimator)}):
        if not estimator.knows(m):
            few = COMPETING_PER_BUCKET if m in GPU_BUCKETS else 1
            able = _able(gemm, device, m, wide=estimator.overlaps(m))
            parts = [able]
            if estimator.overlaps(m):
                parts = [[s for s in able if _streams(s) is streams] for streams in (True, False)]
            pool += [best for part in parts for best in _fastest(gemm, device, part, m, few, seen)]
    return list(dict.fromkeys(pool))


def _fastest(
    gemm: Gemm,
    device: TileDevice,
    schedules: Iterable[GpuSchedule],
    m: int,
    few: int,
    seen: dict[GpuSchedule, float],
) -> list[Schedule]:
    """Return the ``few`` schedules that are predicted fastest for ``m`` rows, in order.

    seen: What schedules take for fewer rows, and here as well where predicted: none takes less for more
        (`LEAST_GROWTH`), so that of those which are far behind already nothing is predicted.
    """
    best: list[tuple[tuple[float, int, str], Schedule]] = []
    for schedule in sorted(schedules, key=lambda each: seen.get(each, 0.0)):
        if len(best) == few and LEAST_GROWTH * seen.get(schedule, 0.0) > best[-1][0][0]:
            break
        found = Candidate(schedule, predict(gemm, device, schedule, m))
        seen[schedule] = found.cost.seconds
        best = sorted([*best, (_order(found), schedule)])[:few]
    return [schedule for _, schedule in best]


def _middle(estimator: Estimator) -> tuple[int, ...]:
    """Return the M beside `GPU_BUCKETS` for which a schedule is sought."""
    if not estimator.close:
        return ()
    return MIDDLE_BUCKETS if lane_of(estimator.gemm.activation) == 8 else (*FEW_MIDDLE, *MIDDLE_BUCKETS)


def _streams(schedule: Schedule) -> bool:
    return isinstance(schedule, GpuSchedule) and schedule.pipeline in SLICED


@lru_cache(maxsize=256)
def _pool_of_one_order(gemm: Gemm, device: TileDevice) -> tuple[Schedule, ...]:
    """Return the schedules that compete where all must add in one order: that which is fastest over M."""
    pools: dict[Order, list[Schedule]] = {}
    for m in GPU_BUCKETS[:-1]:
        best: dict[Order, Schedule] = {}
        for candidate in _with_dealt(gemm, device, m):
            order = order_of_sums(gemm, device, candidate.schedule)
            if order is not None:
                best.setdefault(order, candidate.schedule)
        for order, schedule in best.items():
            pools.setdefault(order, []).append(schedule)

    def over_all_m(pool: Iterable[Schedule]) -> float:
        tried = list(dict.fromkeys(pool))
        return sum(math.log(min(_predicted(gemm, device, s, m) for s in tried)) for m in GPU_BUCKETS[:-1])

    check(bool(pools), f"no kernels for {gemm} on {device.name} add in one order for every M")
    return tuple(dict.fromkeys(min(pools.values(), key=over_all_m)))


def _with_dealt(gemm: Gemm, device: TileDevice, m: int) -> list[Candidate]:
    """Return the candidates for M = ``m`` that are not far behind, those that deal K among them, in order."""
    ranked = rank(gemm, device, m, wide=True)
    near = [each for each in ranked if each.cost.seconds < FAR_BEHIND * ranked[0].cost.seconds]
    more = (other for each in near for other in dealt(gemm, device, each.schedule))
    every = [*near, *(Candidate(each, predict(gemm, device, each, m)) for each in more)]
    return sorted(every, key=_order)


def _merged(entries: Iterable[tuple[int, Schedule]]) -> Plan:
    """Return a plan in which neighbouring ranges with the same schedule are one entry."""
    kept: list[tuple[int, Schedule]] = []
    for limit, schedule in entries:
        if kept and kept[-1][1] == schedule:
            kept.pop()
        kept.append((limit, schedule))
    return Plan(tuple(kept))


def _cpu_choice(gemm: Gemm, device: TileDevice, limit: int, tuning: TuningDatabase | None) -> Schedule:
    if gemm.batch_invariant:  # of the instruction that serves the most rows
        order = order_of_sums(gemm, device, best_schedule(gemm, device, LARGEST_M))
        return next(s for s in cpu_candidates(gemm, device, limit) if order_of_sums(gemm, device, s) == order)
    measured = None if tuning is None else tuning.lookup(device, gemm, limit)
    return measured or best_schedule(gemm, device, limit)
