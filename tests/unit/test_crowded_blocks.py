"""Blocks of wgmma that share a multiprocessor: how many, what that costs, and rings that leave fewer room."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import mean

import pytest

from benchmarks.fit_cost_model import problem
from ladder.ir.gemm import Gemm
from ladder.lower.build import emit
from ladder.lower.cuda.wgmma_geometry import WgmmaGeometry
from schedules.cost_model import predict
from schedules.footprint import RESERVED_BYTES, resources, warpgroup_blocks
from schedules.legal import is_legal
from schedules.policy import rank
from schedules.schedule import GpuSchedule, parse_schedule
from targets import get_device

H200, H100 = get_device("cuda/sm_90a"), get_device("cuda/sm_90a:h100")
RECORD = Path(__file__).parents[2] / "benchmarks/results/h100_crowded_warpgroups_2026-11-28.json"
Runs = dict[tuple[Gemm, int], dict[GpuSchedule, float]]

FEW = GpuSchedule("wgmma", 16, 64, 256, stages=4, warps=4)


def timed(part: Mapping[str, list[dict[str, object]]]) -> Runs:
    """Return microseconds by problem, M and schedule: of the last round that it reached."""
    found: Runs = {}
    for one in (*part["quick"], *part["final"]):
        schedules = [parse_schedule(text) for text in one["schedules"]]  # type: ignore[attr-defined]
        for n, k, m, place, us in one["rows"]:  # type: ignore[attr-defined]
            gemm, schedule = problem(one["class"], n, k), schedules[place]  # type: ignore[arg-type]
            if isinstance(schedule, GpuSchedule) and is_legal(gemm, H100, schedule):
                found.setdefault((gemm, m), {})[schedule] = us
    return found


@pytest.mark.parametrize("weight", ["int4", "int3", "mxfp4"])
@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize("stages", [4, 6, 8])
def test_no_more_blocks_fit_than_are_meant(weight: str, rows: int, stages: int) -> None:
    """H100, mxfp4, 19456x3200, M = 4: four blocks of 96 registers took 19.9 microseconds, three take 17.3."""
    gemm = Gemm(4096, 4096, weight, group_size=32 if weight == "mxfp4" else 128)
    schedule = replace(FEW, tile_m=rows, stages=stages)
    blocks, bytes_of = warpgroup_blocks(gemm, H200, schedule), WgmmaGeometry(gemm, schedule).least_bytes(H200)
    assert (blocks + 1) * (bytes_of + RESERVED_BYTES) > H200.shared_per_unit
    assert blocks * (bytes_of + RESERVED_BYTES) <= H200.shared_per_unit


def test_a_block_takes_the_shared_memory_that_keeps_others_out() -> None:
    gemm = Gemm(4096, 4096, "int3", group_size=128)
    schedule = replace(FEW, tile_m=8)
    text = str(emit(gemm, H200, schedule, "kernel"))
    assert f'"tirx.dyn_smem_bytes": T.int64({WgmmaGeometry(gemm, schedule).least_bytes(H200)})' in text
    assert f'"tirx.launch_bounds_min_blocks_per_sm": {warpgroup_blocks(gemm, H200, schedule)}' in text


def test_blocks_that_crowd_are_predicted_to_take_longer() -> None:
    """90 blocks for 132 multiprocessors: three beside each other, two, or each alone."""
    gemm, runs = (
        Gemm(5760, 1536, "int3", group_size=128),
        timed(json.loads(RECORD.read_text())["alone after"]),
    )
    times = runs[gemm, 16]
    for stages, blocks in ((4, 3), (6, 2), (8, 1)):
        schedule = replace(FEW, stages=stages)
        assert resources(gemm, H100, schedule).blocks_per_unit == blocks
        assert predict(gemm, H100, schedule, 16).seconds * 1e6 == pytest.approx(times[schedule], rel=0.1)


def test_rings_that_leave_room_for_fewer_blocks_are_ranked() -> None:
    gemm = Gemm(5760, 1536, "int3", group_size=128)
    depths = {
        c.schedule.stages for c in rank(gemm, H200, 16, wide=True) if replace(c.schedule, stages=4) == FEW
    }  # type: ignore[union-attr, type-var]
    assert depths >= {4, 8}


def test_first_choices_at_drawn_shapes_of_an_h100() -> None:
    """No constant was fitted to the order of these runs: 1.036 and 1.44 with blocks spread evenly."""
    losses = []
    for (gemm, m), runs in timed(json.loads(RECORD.read_text())["probe"]).items():
        first = min(runs, key=lambda schedule: predict(gemm, H100, schedule, m).seconds)
        losses.append(runs[first] / min(runs.values()))
    assert len(losses) == 108
    assert exp(mean(map(log, losses))) <= 1.025
    assert max(losses) <= 1.25
