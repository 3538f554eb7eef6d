"""Which schedules a tuning run tries: the best predicted of every shape and M, then their neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from random import Random

from ladder.ir.gemm import Gemm
from schedules.footprint import SLICED
from schedules.legal import is_legal
from schedules.policy import GPU_BUCKETS, Candidate, rank
from schedules.rules import AXES, RULES
from schedules.schedule import GpuSchedule, Schedule
from targets import TileDevice
from tile_types.errors import ScheduleError

TOKENS = GPU_BUCKETS[:-1]
"""The M that a tuning run measures."""

Point = tuple[Gemm, int]
"""A problem with its extents, and M."""


def shortlist(device: TileDevice, points: Sequence[Point], most: int) -> list[Schedule]:
    """Return at most ``most`` schedules that cover all points, the best predicted of each first.

    The points take turns, so that each has as many of its best candidates as any other. Candidates
    that differ only in depth from a better one of the same point come after all others.
    """
    queues = [spread(rank(gemm, device, m, wide=True)) for gemm, m in points]
    found: dict[Schedule, None] = {}
    for turn in zip(*(islice(queue, most) for queue in queues), strict=False):
        for schedule in turn:
            found.setdefault(schedule)
            if len(found) == most:
                return list(found)
    return list(found)


def sample(device: TileDevice, points: Sequence[Point], most: int, seed: int = 0) -> list[Schedule]:
    """Return at most ``most`` schedules that suit the points, drawn at random: to fit the model."""
    queues = []
    for index, (gemm, m) in enumerate(points):
        candidates = [candidate.schedule for candidate in rank(gemm, device, m, full=True)]
        Random(seed + index).shuffle(candidates)
        queues.append(candidates)
    turns = (schedule for turn in zip_longest(*queues) for schedule in turn if schedule is not None)
    return list(islice(dict.fromkeys(turns), most))


def spread(candidates: Sequence[Candidate]) -> Iterator[Schedule]:
    """Yield candidates by rank, those that only differ in depth from a better one last."""
    seen: set[Schedule] = set()
    later: list[Schedule] = []
    for candidate in candidates:
        schedule = candidate.schedule
        assert isinstance(schedule, GpuSchedule)
        shape = replace(schedule, stages=RULES[schedule.pipeline].stages[0])
        if shape in seen:
            later.append(schedule)
        else:
            seen.add(shape)
            yield schedule
    yield from later


def neighbours(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Iterator[GpuSchedule]:
    """Yield the legal schedules that differ from ``schedule`` by one step of one field.

    Steps are to the next value that the pipeline's rule allows; where slices of K are warps (gemv),
    warps follow.
    """
    rule = RULES[schedule.pipeline]
    for name in AXES:
        if name == "tile_m":  # it follows from M
            continue
        allowed, value = getattr(rule, name), getattr(schedule, name)
        if value not in allowed:
            continue
        place = allowed.index(value)
        for other in allowed[max(0, place - 1) : place + 2]:
            if other != value:
                yield from _legal(gemm, device, schedule, {name: other})
    if schedule.pipeline in SLICED:
        for factor in (2, 0.5):
            both = {"split_k": int(schedule.split_k * factor), "warps": int(schedule.warps * factor)}
            yield from _legal(gemm, device, schedule, both)


def _legal(
    gemm: Gemm, device: TileDevice, schedule: GpuSchedule, change: Mapping[str, int]
) -> Iterator[GpuSchedule]:
    try:
        changed = replace(schedule, **change)  # type: ignore[arg-type]
    except ScheduleError:
        return
    if is_legal(gemm, device, changed):
        yield changed


def refinements(
    device: TileDevice, winners: Iterable[tuple[Gemm, Schedule]], tried: Iterable[Schedule], most: int
) -> list[Schedule]:
    """Return at most ``most`` untried neighbours of the winners; winners take turns."""
    done = set(tried)
    found: dict[Schedule, None] = {}
    queues = [neighbours(gemm, device, s) for gemm, s in winners if isinstance(s, GpuSchedule)]
    while queues and len(found) < most:
        for queue in list(queues):
            schedule = next((s for s in queue if s not in done and s not in found), None)
            if schedule is None:
                queues.remove(queue)
            else:
                found[schedule] = None
    return list(found)[:most]
