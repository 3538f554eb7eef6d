"""What tuning tries, and how few schedules come to serve every M."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ladder.ir.gemm import Gemm
from ladder.runtime.compile_pool import Campaign, Trial, at_shapes, load, save
from ladder.runtime.measure import Timed
from ladder.runtime.tune import finals, known_winners, relatives_winners, winners
from schedules.legal import is_legal
from schedules.policy import MOST_CLOSE, make_plan, rank
from schedules.schedule import GpuSchedule, Schedule
from schedules.search import TOKENS, neighbours, refinements, shortlist
from schedules.segments import cover, m_grid, octave_weights, segments
from schedules.tilings import AXES
from schedules.tuning import Measurement
from targets import get_device
from tile_types.errors import ArtifactError

H200 = get_device("sm_90a")
GEMM = Gemm(4096, 4096, "int4", group_size=128)
SHAPES = [(4096, 4096), (28672, 8192)]


def test_shortlist_has_the_best_of_every_point() -> None:
    points = [(gemm, m) for gemm in at_shapes(GEMM, SHAPES) for m in TOKENS]
    chosen = shortlist(H200, points, 64)
    assert len(chosen) == len(set(chosen)) == 64
    for gemm, m in points:
        assert rank(gemm, H200, m, wide=True)[0].schedule in chosen


def test_tuning_tries_tiles_that_fit_the_rows() -> None:
    odd = GpuSchedule("wgmma", 208, 128, 128, 3, 8, placement="accumulator")
    gemm = Gemm(4096, 4096, "int4", "fp8_e4m3", "float16", group_size=128)
    assert not is_legal(replace(gemm, activation="int8"), H200, odd)
    for problem in (gemm, replace(gemm, weight="fp8_e4m3", group_size=4096, scale=False)):
        assert is_legal(problem, H200, odd)
        tried = [candidate.schedule for candidate in rank(problem, H200, 200, full=True)]
        assert 208 in {schedule.tile_m for schedule in tried if isinstance(schedule, GpuSchedule)}


def test_what_won_for_classes_alike_is_tried() -> None:
    weight = Gemm(4096, 4096, "nf4", group_size=64)
    known, found = known_winners(H200, weight), relatives_winners(H200, weight)
    assert set(found) & set(known_winners(H200, GEMM)) - set(known)
    assert all(is_legal(weight, H200, schedule) for schedule in found)


def test_neighbours_are_legal_steps_of_any_field_a_rule_names() -> None:
    for schedule in {schedule for _, schedule in make_plan(GEMM, H200).entries}:
        assert isinstance(schedule, GpuSchedule)
        found = list(neighbours(GEMM, H200, schedule))
        assert found
        for other in found:
            assert is_legal(GEMM, H200, other)
            changed = [name for name in AXES if getattr(other, name) != getattr(schedule, name)]
            assert len(changed) == 1 or changed == ["warps", "split_k"] or changed == ["split_k", "warps"]
            assert other.tile_m == schedule.tile_m


def test_refinements_are_new_and_bounded() -> None:
    tried = [candidate.schedule for candidate in rank(GEMM, H200, 64, full=True)[:5]]
    found = refinements(H200, [(GEMM, schedule) for schedule in tried], tried, 7)
    assert len(found) == len(set(found)) == 7
    assert not set(found) & set(tried)


def test_at_shapes_keeps_what_a_scale_per_row_is() -> None:
    plain = Gemm(4096, 4096, "fp8_e4m3", activation="fp8_e4m3", scale=False)
    assert [gemm.group_size for gemm in at_shapes(plain, SHAPES)] == [4096, 8192]
    assert [gemm.group_size for gemm in at_shapes(GEMM, SHAPES)] == [128, 128]


def test_the_grid_has_every_place_where_a_tile_begins() -> None:
    grid = m_grid(8192)
    assert grid[:6] == (1, 2, 4, 8, 16, 24)
    assert grid[-1] == 8192
    assert {*range(8, 257, 8), *range(256, 1025, 64), *range(1024, 8193, 256)} <= set(grid)
    assert octave_weights(grid).sum() == pytest.approx(1)
    assert octave_weights(grid)[0] == pytest.approx(octave_weights(grid)[1])


def test_cover_takes_what_pays_and_segments_do_not_flutter() -> None:
    costs = np.array([[1.0, 1.0, 2.0, 2.0], [2.0, 2.0, 1.0, 1.0], [1.5, 1.5, 1.5, 1.5], [1.0, 0.999, 2, 2]])
    even = np.full(4, 0.25)
    assert set(cover(costs, even, 10)) == {0, 1} or set(cover(costs, even, 10)) == {3, 1}
    assert len(cover(costs, even, 1)) == 1
    middling = np.array([[1.3, 1.3, 1.3, 1.3], *costs[:2]])
    assert cover(middling, even, 1) == [0]
    assert set(cover(middling, even, 2)) == {1, 2}
    assert segments(np.array([[1.0, 1.01, 1.0], [1.01, 1.0, 1.01]]), [0, 1]) == [0, 0, 0]
    assert segments(np.array([[1.0, 1.2, 1.0], [1.1, 1.0, 1.1]]), [0, 1]) == [0, 1, 0]


def test_the_kernel_of_more_rows_serves_fewer_until_another_is_clearly_faster() -> None:
    costs = np.array([[1.0, 1.0, 1.3], [1.06, 1.015, 1.04]])
    assert segments(costs, [0, 1]) == [0, 1, 1]
    assert segments(costs, [0, 1], 0.0) == [0, 0, 1]


def test_plans_never_lose_to_a_neighbour() -> None:
    """By the model's times, no M takes longer than a larger M, within what avoids needless entries."""
    from schedules.cost_model import predict

    for gemm in at_shapes(GEMM, SHAPES):
        plan = make_plan(gemm, H200)
        tokens = range(16, 1025)  # one pipeline's: the model compares those of two less well
        times = np.array([predict(gemm, H200, plan.schedule_for(m), m).seconds for m in tokens])
        later = np.minimum.accumulate(times[::-1])[::-1]
        worst = float((times / later).max())
        assert worst <= 1 / 0.95
        assert len({schedule for _, schedule in plan.entries}) <= MOST_CLOSE


def test_the_latest_time_of_a_finalist_counts() -> None:
    first, second = (candidate.schedule for candidate in rank(GEMM, H200, 64, full=True)[:2])

    def timed(m: int, schedule: Schedule, seconds: float, final: bool = True) -> Timed:
        return Timed(GEMM, Measurement(4096, 4096, m, schedule, seconds), final)

    events = [timed(1, first, 2e-6), timed(64, first, 2e-6), timed(64, second, 1e-6, False)]
    assert winners(finals(events)) == [(GEMM, first)]
    events += [timed(64, first, 4e-6), timed(64, second, 3e-6)]
    rows = {(row.m, row.schedule): row.seconds for row in finals(events)[GEMM]}
    assert rows == {(1, first): 2e-6, (64, first): 4e-6, (64, second): 3e-6}


def test_a_folder_of_trials_travels(tmp_path: Path) -> None:
    (tmp_path / "kernel.so").write_bytes(b"code")
    schedule = rank(GEMM, H200, 64)[0].schedule
    trial = Trial(schedule, tmp_path / "kernel.so", "entry")
    assert save([Campaign([GEMM], [1, 64], "cuda/sm_90a", [trial])], tmp_path / "folder") == 1
    (found,) = load(tmp_path / "folder")
    assert (found.problems, found.tokens, found.device) == ([GEMM], [1, 64], "cuda/sm_90a")
    assert found.trials[0].schedule == schedule
    assert found.trials[0].library.read_bytes() == b"code"
    manifest = tmp_path / "folder" / "trials.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(ArtifactError, match="format 99"):
        load(tmp_path / "folder")
