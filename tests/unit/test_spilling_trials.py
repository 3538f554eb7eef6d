"""Kernels whose code object says that it spills are not taken on AMD GPUs: candidates, and parts of plans."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import schedules.spilling
from ladder.api import fused_trials
from ladder.api.problem import gemm_for
from ladder.ir import GraphBuilder
from ladder.ir.windows import Windows
from ladder.partition import partition
from ladder.partition.convolutions import best_candidate
from ladder.runtime.build import Kernel
from ladder.runtime.model import build
from targets import get_device
from tile_types.errors import ScheduleError

GFX1100 = get_device("rocm/gfx1100")


def trial(**report: int) -> Any:
    """Return a candidate whose one kernel has such a report."""
    return SimpleNamespace(lowering=SimpleNamespace(jobs=lambda device: [{"k": report}]))


def kernel(reports: dict[str, dict[str, int]]) -> Kernel:
    return Kernel(Path(), {"entry": "k", "resources": reports}, False, dict)


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are reports, and building them gives kernels that have them."""

    def build(jobs: list[Any]) -> list[Kernel]:
        return [kernel(job) for job in jobs]

    monkeypatch.setattr(fused_trials, "find_or_build", build)


SPILLS, FITS = {"vgpr": 256, "vgpr_spills": 7, "scratch_bytes": 28}, {"vgpr": 200, "scratch_bytes": 0}


def test_the_next_candidate_takes_its_place() -> None:
    good = trial(**FITS)
    assert [found for found, _ in fused_trials.built([trial(**SPILLS), good], GFX1100, 1)] == [good]


def test_none_that_fits_is_an_error() -> None:
    with pytest.raises(ScheduleError, match="its kernels spill"):
        fused_trials.built([trial(**SPILLS)], GFX1100, 1)


def test_what_is_timed_may_spill() -> None:
    assert len(fused_trials.built([trial(**SPILLS)], get_device("cuda/sm_90a"), 1)) == 1


@pytest.mark.parametrize(
    ("report", "reasons"),
    [(SPILLS, {0: "torch's: its kernels spill: k (35 registers or bytes)"}), (FITS, {})],
)
def test_torch_computes_a_part_whose_kernel_spills(
    monkeypatch: pytest.MonkeyPatch, report: dict[str, int], reasons: dict[int, str]
) -> None:
    g = GraphBuilder("chain")
    graph = g.finish(g.add("relu", g.input("x", "float16", (4, 64))))
    monkeypatch.setattr(build, "attempt", lambda jobs: [kernel({"k": report}) for _ in jobs])
    kernels, _, found = build.build_kernels(partition(graph, device=GFX1100), {}, GFX1100)
    assert found == reasons
    assert list(kernels) == ([] if reasons else [0])


def test_convolutions_take_the_next_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is chosen for the problem without bias and function."""
    windows = Windows((3, 3), (1, 1), (1, 1))
    gemm = gemm_for(64, 9 * 64, "float16", "float16", windows=windows, bias=True, epilogue=("relu",))
    part: Any = SimpleNamespace(gemm=gemm, operators=("contract", "relu"))
    monkeypatch.setattr(schedules.spilling, "_seen", {})
    monkeypatch.setattr(
        build,
        "obtain",
        lambda asked: (asked.plan, [kernel({"k": SPILLS})]),
    )
    seen = []
    for _ in range(3):
        request = build._request(part, GFX1100, 256)
        seen.append(request.plan)
        assert build._avoid_spilling([part], {0: request})
    assert len(set(seen)) == 3
    best_candidate.cache_clear()
