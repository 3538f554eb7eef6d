"""Block-scaled products of gfx950: right in simulation and as machine code, no spills, planted bugs found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rewriting import Once, remove, rewrite, stored
from test_scaled import error_of, random_matrix
from tvm import tirx

import ladder
from ladder.ir.scaled import ScaledGemm
from ladder.lower.rocm.scaled import emit
from ladder.lower.rocm.toolchain import resources_of
from ladder.runtime.scaled import arguments
from ladder.simulate import simulate_launch
from ladder.simulate.amd import calls_for
from ladder.simulate.operator import numpy_of
from schedules.wave_scaled import WaveScaledSchedule, choose, predict, schedules
from targets import get_device
from tile_types.errors import DeviceError, ScheduleError

GPU = get_device("rocm/gfx950")
BOUNDS = {"float32": 1e-5, "bfloat16": 3e-3}
Schedule = WaveScaledSchedule

CASES = {
    "one of each": (1, 1, 1, Schedule(1, 1, 1, 1), "float32", False, "together"),
    "four waves share K": (3, 67, 200, Schedule(1, 1, 4, 2), "float32", False, "random"),
    "K ends within a span": (5, 20, 1090, Schedule(4, 1, 1, 2), "float32", True, "last warps first"),
    "stored as vectors": (37, 132, 650, Schedule(2, 2, 2, 1), "bfloat16", True, "random"),
    "large tiles": (70, 90, 384, Schedule(4, 4, 2, 1), "bfloat16", False, "first warps first"),
    "far ahead": (20, 40, 2600, Schedule(1, 2, 4, 4), "float32", False, "random"),
}
"""M, N, K, schedule, output, bias, order of waves."""


def run(
    case: str, change: Callable[[Any], Any] = lambda function: function, **options: Any
) -> tuple[Any, float]:
    """Simulate a case; return what was found, and the error."""
    m, n, k, schedule, output, biased, order = CASES[case]
    form = ScaledGemm(n, k, "mxfp4", "mxfp4", output, biased)
    x, w = random_matrix(form, "mxfp4", m, 1), random_matrix(form, "mxfp4", n, 2)
    dtype = getattr(torch, output)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(dtype) if biased else None
    arrays = [
        numpy_of(a) for a in arguments(x.operand, w.operand, bias, torch.full((m, n), torch.nan).to(dtype))
    ]
    function = change(emit(form, GPU, schedule, "scaled"))
    if options.get("stage") != "code":
        options["order"] = order
    result = simulate_launch(function, arrays, calls=calls_for("gfx950"), **options)
    exact = x.exact @ w.exact.T + (0 if bias is None else bias.double().numpy())
    return result, error_of(arrays[-1].astype(np.float64), exact)


@pytest.mark.parametrize("case", CASES)
def test_simulated(case: str) -> None:
    result, error = run(case)
    assert not result.findings, result.report()
    assert not result.bank_conflicts
    assert error < BOUNDS[CASES[case][4]]


@pytest.mark.daily(2)
@pytest.mark.parametrize("case", CASES)
def test_machine_code(case: str) -> None:
    result, error = run(case, stage="code")
    assert not result.findings, result.report()
    assert error < BOUNDS[CASES[case][4]]


@pytest.mark.daily(3)
@pytest.mark.parametrize("schedule", list(schedules()), ids=lambda schedule: schedule.title)
def test_no_schedule_spills(schedule: Schedule) -> None:
    form = ScaledGemm(8448, 7168, "mxfp4", "mxfp4", "bfloat16", True)
    found = resources_of({"scaled": emit(form, GPU, schedule, "scaled")}, GPU)["scaled"]
    assert found["vgpr_spills"] == found["scratch_bytes"] == found["sgpr_spills"] == 0
    assert found["lds_bytes"] <= GPU.shared_per_block


def test_blocks_of_nan_make_their_rows_nan() -> None:
    x, w = torch.randn(3, 128), torch.randn(20, 128)
    x[1, 70] = torch.inf
    op = ladder.Matmul(20, 128, "mxfp4", "mxfp4", target="rocm/gfx950")
    result = ladder.simulate(op, x, op.pack(ladder.quantize(w, "mxfp4")))
    assert not result.findings, result.report()
    assert np.isnan(result.y).all(axis=1).tolist() == [False, True, False]


def _next(index: Any) -> Any:
    return (
        index + 4
        if not isinstance(index, tirx.Ramp)
        else tirx.Ramp(index.base + 4, index.stride, index.lanes)
    )


MUTANTS: dict[str, tuple[str, Callable[[], Once], set[str]]] = {
    "no barrier before sums are added": (
        "four waves share K", lambda: remove("tirx.tvm_storage_sync", 0), {"race", "uninitialised", "wrong"},
    ),
    "sums one run further": (
        "four waves share K",
        lambda: stored("shared", "uint32", index=_next),
        {"out of bounds", "race", "wrong"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name: str) -> None:
    case, change, kinds = MUTANTS[name]

    def changed(function: Any) -> Any:
        mutant = rewrite(function, change())
        assert mutant.script() != function.script()
        return mutant

    result, error = run(case, changed)
    wrong = {"wrong"} if not error < BOUNDS[CASES[case][4]] else set()
    assert (result.kinds() | wrong) & kinds


def test_choices() -> None:
    form = ScaledGemm(8448, 7168, "mxfp4", "mxfp4")
    assert choose(form, GPU, 1).split_k == 4
    assert choose(form, GPU, 4096).tile_m >= 32
    times = [predict(form, GPU, choose(form, GPU, m), m).seconds for m in (1, 64, 4096)]
    assert times == sorted(times)
    read = 8448 * 7168 * (4.25 / 8) / 6.914e12
    assert read < times[0] < 3 * read


def test_what_there_is_not() -> None:
    with pytest.raises(DeviceError, match=r"rocm/gfx942 has no kernel for mxfp4 by mxfp4: use rocm/gfx950"):
        ladder.Matmul(64, 128, "mxfp4", "mxfp4", target="rocm/gfx942").explain()
    with pytest.raises(DeviceError, match="nvfp4"):
        ladder.Matmul(64, 128, "nvfp4", "nvfp4", target="rocm/gfx950").explain()
    with pytest.raises(ScheduleError, match="row_steps=3"):
        Schedule(3)
    with pytest.raises(ScheduleError, match="registers"):
        Schedule(4, 4, 1, 4)
