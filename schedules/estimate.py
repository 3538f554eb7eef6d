"""Times of schedules at any M: the cost model, corrected by what was measured nearby.

A measured schedule is predicted at each M at which it ran; the ratio of the measured to the
predicted time, interpolated over log M, corrects the prediction at other M. Measurements of the
nearest shape in the same class serve a shape that was never measured, and those of one product another
one of its architecture: by the ratio of the predictions for both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from statistics import median

from ladder.ir.gemm import Gemm
from schedules.codes import raw_needs_gain, takes_sixteens
from schedules.cost_model import predict
from schedules.footprint import SLICED, resources
from schedules.layouts import lane_of
from schedules.legal import is_legal
from schedules.schedule import GpuSchedule, Schedule
from schedules.spilling import measured_beside
from schedules.tuning import Measurement
from targets import TileDevice, get_device

FARTHEST = log(4.0)
"""Shapes whose N and K differ by more than this in sum of logarithms say nothing about each other."""

UNTRIED = 1.15
"""How much slower than the model says a schedule counts that was not measured where others were."""

UNTRIED_MIDDLE = 1.05
"""The same between `STREAMED_ROWS` and `ALIKE_ROWS`, where kernels of a pipeline were timed nearby."""

NEAR = log(4.0)
"""Times at M whose logarithms differ by no more tell of each other."""

UNTRIED_MANY = 1.03
"""The same beyond `ALIKE_ROWS` where tiles follow M by sixteens: few of them were timed."""

LEAN = 0.6
"""Share of a schedule's own correction, in logarithms, that holds at another shape than it was measured at.

The rest is the median of all that were measured there, since the ratio of one schedule is partly chance.
"""

PASSED_OVER = 1.3
"""How much slower than the fastest a schedule counts at a point where it was not among those timed."""

ALIKE_ROWS = 64
"""Rows of x up to which weights' bytes decide, so that what was measured of one type tells of another."""

STREAMED_ROWS = 16
"""Rows of x up to which every type's weights are streamed through registers."""

LOST = 2.0
"""The same at the very point: the fastest measured there is to be used."""


def distance(row: Measurement, gemm: Gemm) -> float:
    """Return how far a measured shape is from the problem's: 0 is the same shape."""
    return abs(log(row.n / gemm.n)) + abs(log(row.k / gemm.k))


def nearest(rows: Sequence[Measurement], gemm: Gemm) -> list[Measurement]:
    """Return the measurements of the nearest shape that can run here, none if all are far.

    They are of one shape even where two are equally far: then of the one nearer in K, which says
    how long a block works.
    """
    best = min(rows, key=lambda row: (round(distance(row, gemm), 6), abs(log(row.k / gemm.k))), default=None)
    if best is None or distance(best, gemm) >= FARTHEST:
        return []
    return [row for row in rows if (row.n, row.k) == (best.n, best.k)]


def transferred(row: Measurement, gemm: Gemm, device: TileDevice) -> Measurement:
    """Return a measurement as it is expected on ``device`` where it was made on another product."""
    if row.device in ("", device.name):
        return row
    here, there = gemm_at(gemm, row.n, row.k), get_device(row.device)
    new, old = (predict(here, which, row.schedule, row.m).seconds for which in (device, there))
    return replace(row, seconds=row.seconds * new / old, device="")


@dataclass(frozen=True)
class Correction:
    """Measured over predicted time of one schedule, at some M.

    logs: Logarithms of the M, ascending.
    ratios: Logarithms of the ratios.
    least: The smallest M at which the schedule was timed; below it the ratios are only bounds.
    """

    logs: tuple[float, ...]
    ratios: tuple[float, ...]
    least: int

    def at(self, m: int) -> float:
        """Return the factor at M = ``m``: interpolated, and beyond the ends as at the end."""
        x = log(m)
        place = bisect_left(self.logs, x)
        if place in (0, len(self.logs)):
            return exp(self.ratios[min(place, len(self.logs) - 1)])
        low, high = self.logs[place - 1], self.logs[place]
        share = (x - low) / (high - low)
        return exp(self.ratios[place - 1] * (1 - share) + self.ratios[place] * share)


@dataclass(frozen=True)
class Levels:
    """How far the model is off at a shape, by pipeline and M: the median of what was timed nearby.

    timed: Pipeline, logarithm of M, logarithm of the measured over the predicted time.
    """

    timed: tuple[tuple[str, float, float], ...] = ()

    def compares(self, pipeline: str, m: int) -> bool:
        """Tell whether kernels of a pipeline were timed near M."""
        return any(name == pipeline and abs(at - log(m)) <= NEAR for name, at, _ in self.timed)

    def of(self, pipeline: str, m: int) -> float:
        """Return the measured over the predicted time of a pipeline near M, else of the likest timed."""
        own = [row for row in self.timed if row[0] == pipeline] or self.timed
        near = [row for row in own if abs(row[1] - log(m)) <= NEAR] or own
        return exp(median(ratio for _, _, ratio in near)) if near else 1.0


class Estimator:
    """Estimates of one problem on one device.

    rows: Measurements of the problem's class.
    akin: Those of other classes, and the problem of that class, the most alike first: they serve for few rows
        of x where the model is not close and the own class has none at a near shape.
    exact: Whether this very shape was measured.
    close: Whether tiles follow M by sixteens, as those did to which the model of many rows is fitted well.
    """

    def __init__(
        self,
        gemm: Gemm,
        device: TileDevice,
        rows: Iterable[Measurement] = (),
        akin: Iterable[tuple[Gemm, Sequence[Measurement]]] = (),
    ) -> None:
        self.gemm, self.device = gemm, device
        legal = self._legal(rows)
        self.exact = bool(legal) and distance(legal[0], gemm) == 0
        self._known = sorted({row.m for row in legal}) if self.exact else []
        self._corrections = _corrections(gemm, device, legal)
        self._typical = _typical(self._corrections, 1.0)
        self._levels = _levels(gemm, device, legal)
        self._lean = 1.0 if self.exact else LEAN
        self.close = "wgmma" in device.features and takes_sixteens(gemm)
        self._typical_many = _typical(self._corrections, UNTRIED_MANY, ALIKE_ROWS)
        self._few = None if legal or self.close else self._borrowed(akin)

    def _borrowed(self, akin: Iterable[tuple[Gemm, Sequence[Measurement]]]) -> Estimator | None:
        """Return the estimator for few rows of x that what was measured of the likest class gives."""
        for other, rows in akin:
            alike = partial(_tells_of_others, self.gemm, other, self.device)
            if legal := self._legal(filter(alike, rows), other):
                found = Estimator(self.gemm, self.device)
                found._corrections = _corrections(other, self.device, legal)
                found._typical = _typical(found._corrections, 1.0)
                found._levels = _levels(other, self.device, legal)
                return found
        return None

    def _legal(self, rows: Iterable[Measurement], other: Gemm | None = None) -> list[Measurement]:
        """Return what was measured, of ``other`` if given, at the nearest shape of schedules legal here."""
        spilling = measured_beside(self.gemm, self.device)
        return [
            transferred(row, other or self.gemm, self.device)
            for row in nearest(list(rows), self.gemm)
            if isinstance(row.schedule, GpuSchedule)
            and row.schedule not in spilling
            and is_legal(self.gemm, self.device, row.schedule)
        ]

    @property
    def measured(self) -> list[Schedule]:
        """Schedules that were measured at the nearest shape and are legal here."""
        return list(self._corrections if self._few is None else self._few._corrections)

    def tells(self, schedule: Schedule, m: int) -> bool:
        """Tell whether what was measured says what a schedule takes for ``m`` rows.

        Below the fewest rows that it was timed for it was only found to be slower than others, of that type:
        of another type that says nothing.
        """
        if self._few is None:
            return schedule in self._corrections
        found = self._few._corrections.get(schedule)
        return found is not None and found.least <= m

    def compares(self, pipeline: str, m: int) -> bool:
        """Tell whether estimates of a pipeline compare with others: by the model, or by times near M."""
        source = self if self._few is None else self._few
        return self.overlaps(m) and (self.close or source._levels.compares(pipeline, m))

    def overlaps(self, m: int) -> bool:
        """Tell whether pipelines overlap at M, and kernels of both were timed for such codes and operands."""
        if m > ALIKE_ROWS:
            return False
        return self.close or (m > STREAMED_ROWS and lane_of(self.gemm.activation) == 16)

    def _level(self, pipeline: str, m: int) -> tuple[float, float]:
        """Return how far the model is off, and how much slower what was not timed counts."""
        if not self._corrections:
            return 1.0, 1.0
        if self.overlaps(m):
            return self._levels.of(pipeline, m), UNTRIED_MIDDLE
        if m > ALIKE_ROWS and self.close:
            return self._typical_many, 1.0
        return self._typical, UNTRIED

    def knows(self, m: int) -> bool:
        """Tell whether this very shape was measured at M = ``m``."""
        return m in self._known

    def seconds(self, schedule: Schedule, m: int) -> float:
        """Return the expected time of one call.

        Where this shape was measured around M, what was not among the fastest there cannot be. Where the
        model is close, it is not corrected by what was measured at another shape.
        """
        assert isinstance(schedule, GpuSchedule)
        if self._few is not None and m <= ALIKE_ROWS:
            return self._few.seconds(schedule, m)
        found = self._corrections.get(schedule)
        predicted = predict(self.gemm, self.device, schedule, m).seconds
        if self.close and not self.exact:
            return predicted
        level, untried = self._level(schedule.pipeline, m)
        if found is not None:
            return exp(self._lean * log(found.at(m)) + (1 - self._lean) * log(level)) * predicted
        if self.close and m > ALIKE_ROWS and not self.knows(m):
            return self._typical_many * predicted
        if not self._surrounds(m):
            return untried * level * predicted
        fastest = min(map(partial(self.seconds, m=m), self.measured))
        return max(untried * level * predicted, (LOST if self.knows(m) else untried) * fastest)

    def _surrounds(self, m: int) -> bool:
        """Whether this shape was measured within a factor of four below and, unless at the end, above."""
        below = any(known <= m <= 4 * known for known in self._known)
        return below and (m > self._known[-1] or any(m <= known <= 4 * m for known in self._known))


def _tells_of_others(gemm: Gemm, other: Gemm, device: TileDevice, row: Measurement) -> bool:
    """Tell whether a measurement of ``other`` says something: of a pipeline made for so many rows of x.

    Few warps that decode for many rows may do for a cheap type and not for a dearer one; sums that are
    scaled save nothing where operands need a factor too. Where a multiprocessor is to hold more blocks,
    threads that stream weights have fewer registers than those that were timed.
    """
    schedule = row.schedule
    assert isinstance(schedule, GpuSchedule)
    if _resident(gemm, device, schedule) > _resident(other, device, schedule):
        return False
    if schedule.placement == "accumulator" and raw_needs_gain(gemm.weight, gemm.activation):
        return False
    return row.m <= ALIKE_ROWS and (schedule.pipeline == "gemv") == (row.m <= STREAMED_ROWS)


def _resident(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> int:
    """Return the blocks of which a multiprocessor is to hold the registers, 0 where none is meant."""
    return max(1, resources(gemm, device, schedule).blocks_per_unit) if schedule.pipeline in SLICED else 0


def _levels(gemm: Gemm, device: TileDevice, rows: Sequence[Measurement]) -> Levels:
    """Compare measurements of GPU schedules with predictions at the shape where they were made."""
    if not rows:
        return Levels()
    here, timed = gemm_at(gemm, rows[0].n, rows[0].k), []
    for row in rows:
        assert isinstance(row.schedule, GpuSchedule)
        predicted = predict(here, device, row.schedule, row.m).seconds
        timed.append((row.schedule.pipeline, log(row.m), log(row.seconds / predicted)))
    return Levels(tuple(timed))


def _typical(corrections: Mapping[Schedule, Correction], untried: float, least: int = 1) -> float:
    """Return the factor of schedules that were not measured where others were, from M = ``least`` on."""
    ratios = [
        ratio
        for correction in corrections.values()
        for place, ratio in zip(correction.logs, correction.ratios, strict=True)
        if place >= log(least)
    ]
    return untried * exp(median(ratios)) if ratios else 1.0


def _corrections(gemm: Gemm, device: TileDevice, rows: Sequence[Measurement]) -> dict[Schedule, Correction]:
    """Compare measurements with predictions at the shape where they were made.

    Only the fastest few of a point are measured to the end. So where a schedule has no time of its
    own although others do, it counts as at least `PASSED_OVER` times the fastest.
    """
    if not rows:
        return {}
    here = gemm_at(gemm, rows[0].n, rows[0].k)
    points: dict[Schedule, dict[int, float]] = {}
    fastest: dict[int, float] = {}
    for row in rows:
        points.setdefault(row.schedule, {})[row.m] = row.seconds
        fastest[row.m] = min(row.seconds, fastest.get(row.m, row.seconds))
    corrections = {}
    for schedule, seconds in points.items():
        predicted = {m: predict(here, device, schedule, m).seconds for m in fastest}
        timed = {m: seconds[m] / predicted[m] for m in seconds}
        own = _correction(timed, min(seconds))
        least = {m: max(own.at(m), PASSED_OVER * fastest[m] / predicted[m]) for m in fastest}
        corrections[schedule] = _correction({**least, **timed}, min(seconds))
    return corrections


def _correction(ratios: Mapping[int, float], least: int) -> Correction:
    ordered = sorted(ratios)
    return Correction(tuple(log(m) for m in ordered), tuple(log(ratios[m]) for m in ordered), least)


def gemm_at(gemm: Gemm, n: int, k: int) -> Gemm:
    """Return the same problem at other extents, of plain rows; a scale per row stays one."""
    group = k if gemm.group_size >= gemm.k else gemm.group_size
    return replace(gemm, n=n, k=k, group_size=group, windows=None)
